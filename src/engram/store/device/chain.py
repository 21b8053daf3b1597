"""A store in host memory as a device reads it: by addresses, and in a chain of kernels per batch, which may keep rows on the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

import torch

from engram._support import checks, fork, native
from engram._support.words import no_space
from engram.format import files, schema
from engram.format.sizes import resident_sizes
from engram.store.blocks import ALIGNMENT, GENERATION, INDEX, WEIGHT, BlockLayout, aligned, empty_block
from engram.store.device.accelerator import Accelerator
from engram.store.indexes import AnyIndex, Indexes
from engram.store.memory import row_stride, torch_dtype
from engram.store.store import Store

#: Children of a node of the store's priority tree: one line of 64 bytes.
FANOUT = 8
#: Bytes before the tree, and where beta stands among them: ``native/core/priorities.h``.
_TREE_AT, _BETA_AT = 4096, 40
_VALID = schema.Field(("valid",), "bool", ())


class Column(NamedTuple):
    """The rows of one field."""

    address: int
    #: Bytes from row to row: more than ``row_bytes`` for small fields that lie together.
    stride: int
    row_bytes: int
    dtype: torch.dtype
    #: Of one row.
    shape: tuple[int, ...]


class Tree(NamedTuple):
    """The priority tree of a store: addresses of doubles."""

    #: By level, the leaves first and the root last.
    sums: tuple[int, ...]
    #: Nodes by level.
    sizes: tuple[int, ...]
    #: The smallest leaf above zero.
    least: int
    beta: int


class Columns(NamedTuple):
    """A store by addresses. All are valid on the device that reads it; nothing here keeps the memory alive or registered."""

    #: A word per row: ``edited << 63 | number << 2 | state``.
    tickets: int
    #: A word per row: where the row is edited, the number of the write that it holds.
    writes: int
    #: 64 bytes per lane: cursor, base and high are the first three words.
    lanes_at: int
    capacity: int
    lanes: int
    lane_length: int
    fields: tuple[Column, ...]
    tree: Tree | None = None


def columns_of(
    store: Store, translate: Callable[[int], int] = lambda address: address, priorities: AnyIndex | None = None
) -> Columns:
    """A store as a device reads it.

    Args:
        store: rows on the CPU. The caller keeps it open as long as a device reads it.
        translate: from an address of the host to that of the same byte on the device. Called once per memory: with the beginning
            of the tickets, the control block, the priorities, and of each field that has bytes.
        priorities: the store's index of priorities to draw by.
    """
    control, words = store.control_memory
    tickets, capacity = translate(words.data_ptr()), store.capacity
    behind = 8 * capacity + -(-4 * capacity // 8) * 8  # tickets and laps
    fields = []
    for field, tensor in zip(store.schema.fields, store.tensors, strict=True):
        address = translate(tensor.data_ptr()) if field.row_bytes else 0
        fields.append(Column(address, row_stride(tensor), field.row_bytes, torch_dtype(field), field.shape))
    writes = tickets + (behind if words.nbytes > behind else 0)  # stores of before have none, nor rows that were edited
    lanes_at = translate(control.data_ptr()) + files.FIXED_BYTES
    tree = None if priorities is None else tree_at(translate(priorities.block.address), capacity)
    return Columns(tickets, writes, lanes_at, capacity, store.lanes, store.lane_length, tuple(fields), tree)


def tree_at(address: int, leaves: int) -> Tree:
    """The tree in the memory of an index of priorities that begins at an address: leaves, sums, then minima, level by level.

    Levels are padded to whole lines of 64 bytes.
    """
    sizes = [leaves, -(-leaves // FANOUT)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // FANOUT))
    padded = [-(-size // FANOUT) * FANOUT * 8 for size in (*sizes, *sizes[1:])]
    begin = list(accumulate(padded, initial=address + _TREE_AT))
    return Tree(tuple(begin[: len(sizes)]), tuple(sizes), begin[-2], address + _BETA_AT)


class Batch(NamedTuple):
    """Rows that a device has read. All tensors are views of the block."""

    #: uint8, all parts one behind the other.
    block: torch.Tensor
    #: ``[B, *row shape]`` per field.
    fields: tuple[torch.Tensor, ...]
    #: int64 ``[B]``; -1 where no row could be read.
    rows: torch.Tensor
    #: int64 ``[B]``: the numbers of the writes that the rows held, which updates of priorities name; -1 where there is none.
    tickets: torch.Tensor
    #: bool ``[B]``: False where no row could be read, and all bytes of the row are zero.
    valid: torch.Tensor
    #: float32 ``[B]``, of draws by priority: over the smallest leaf of the store; 0 where no row could be read.
    weights: torch.Tensor | None


class Layout:
    """One block of bytes per batch: the fields, rows, tickets, valid and weights, each part at a multiple of 64 bytes.

    Args:
        fields: those of the batch.
        batch_size: rows.
        weighted: whether it has weights.
    """

    def __init__(self, fields: Iterable[Column], batch_size: int, *, weighted: bool) -> None:
        named = [schema.Field((str(number),), str(field.dtype)[6:], field.shape) for number, field in enumerate(fields)]
        blocks = BlockLayout((*named, INDEX, GENERATION, _VALID, *([WEIGHT] if weighted else [])))
        self.batch_size = batch_size
        self.weighted = weighted
        self.nbytes = blocks.nbytes(batch_size)
        offsets = blocks.offsets(batch_size)
        #: Where each field begins.
        self.fields = tuple(offsets[: len(named)])
        self.rows, self.tickets, self.valid = offsets[len(named) : len(named) + 3]
        self.weights = offsets[-1] if weighted else 0
        kinds = [(torch_dtype(field), (batch_size, *field.shape)) for field in blocks.fields]
        self._parts = [
            (dtype, shape, torch.empty(shape, device="meta").stride(), offset // dtype.itemsize)
            for offset, (dtype, shape) in zip(offsets, kinds, strict=True)
        ]
        self._dtypes = {dtype for dtype, *_ in self._parts}

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """An uninitialised block on a device, at a multiple of 64 bytes."""
        return empty_block(self.nbytes, device)

    def views(self, block: torch.Tensor) -> Batch:
        """The parts of a block.

        Raises:
            ValueError: it is not uint8 of :attr:`nbytes` in one piece, or does not begin at a multiple of 64 bytes.
        """
        found = block.dtype, tuple(block.shape), block.stride(), block.data_ptr() % ALIGNMENT
        if found != (torch.uint8, (self.nbytes,), (1,), 0):
            raise ValueError(
                f"Layout: expected a contiguous block of uint8 [{self.nbytes}] at a multiple of {ALIGNMENT} bytes, got {block.dtype} "
                f"{list(block.shape)} at {block.data_ptr():#x}. Use Layout.empty."
            )
        typed = {dtype: (view := block.view(dtype), view.storage_offset()) for dtype in self._dtypes}
        # data: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
        parts = [
            typed[dtype][0].as_strided(shape, strides, typed[dtype][1] + at).data
            for dtype, shape, strides, at in self._parts
        ]
        count = len(self.fields)
        rows, tickets, valid = parts[count : count + 3]
        return Batch(block, tuple(parts[:count]), rows, tickets, valid, parts[-1] if self.weighted else None)


class NoRoom(RuntimeError):
    """The rows of a store do not fit on a device."""


class ResidentRows:
    """Memory on a device for all rows of a store, empty at first: ticket words, numbers of writes, lanes, and the fields.

    A chain fills it with what it reads (``Chain(resident=…)``), or the host does, and a chain reads :attr:`columns` as a store.

    Args:
        store: rows on the CPU. accelerator: whose memory it is.

    Raises:
        NoRoom: too little is free, with the figures. Nothing is allocated.
    """

    def __init__(self, store: Store, accelerator: Accelerator) -> None:
        capacity, fields = store.capacity, store.schema.fields
        sizes = resident_sizes(capacity, store.lanes, [field.row_bytes for field in fields])
        *begins, nbytes = accumulate(map(aligned, sizes), initial=0)
        free, _ = accelerator.room()
        if nbytes > free:
            raise NoRoom(
                f"all rows stay on {accelerator.device}: {no_space(nbytes, free, 'Use fewer rows or a smaller dtype')}"
            )
        memory = empty_block(nbytes, accelerator.device)
        parts = [memory[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        self._of, self.nbytes = (store, store.schema), nbytes
        self.words, self.writes, self.lanes = (part.view(torch.int64) for part in parts[:3])
        #: uint8 ``[capacity, row bytes]`` each.
        self.fields = [part.view(capacity, math.prod(part.shape) // capacity) for part in parts[3:]]
        self.words.zero_()
        self.lanes.zero_()
        words, writes, lanes = self.words.data_ptr(), self.writes.data_ptr(), self.lanes.data_ptr()
        columns = [
            Column(memory.data_ptr() + at, field.row_bytes, field.row_bytes, torch_dtype(field), field.shape)
            for at, field in zip(begins[3:], fields, strict=True)
        ]
        self.columns = Columns(words, writes, lanes, capacity, store.lanes, store.lane_length, tuple(columns))

    def fits(self, store: Store) -> bool:
        """Whether it is for the rows of that store, with the fields that it has now."""
        return self._of[0] is store and self._of[1] is store.schema


#: How rows are chosen: ``permuted`` takes ranks that the host has chosen.
Kind: TypeAlias = Literal["uniform", "prioritized", "permuted"]
#: Queues a kernel with its arguments and constants on the stream in use.
Launcher: TypeAlias = "Callable[..., None]"
KINDS: tuple[Kind, ...] = ("uniform", "prioritized", "permuted")

#: Bytes that a program copies at once, with how many warps.
CHUNKS = {256: 1, 2048: 4, 16384: 8}
_LANES_AT_ONCE = 1024
_ENTRY_WORDS = 8
#: Where counters and places begin in the state of a chain: as in kernels.py.
_COUNTERS, _PLACES, _PLACE_WORDS = 64, 72, 6


def kernels_of(device: torch.device) -> ModuleType:
    """The kernels, for a device.

    Raises:
        RuntimeError: they cannot run on that device; the message says why, and what to do.
    """
    try:
        from engram.store.device import kernels
    except ImportError as error:
        raise RuntimeError(f"kernels: expected Triton, got {error}. Install torch's: pip install triton.") from error
    if device.type == "cpu" and not kernels.INTERPRETED:
        raise RuntimeError(
            "kernels: expected a CUDA device, got cpu. Set TRITON_INTERPRET=1 before the first import to run them in Triton's interpreter."
        )
    return kernels


def chunk_table(columns: Columns, layout: Layout, chunk: int, resident: Sequence[int] | None = None) -> list[list[int]]:
    """What the gather copies of each row: source, stride, where it goes in the block and how far apart, bytes, bytes per load, and where
    rows are resident, of which the addresses of the fields are given.

    A load is as wide as all addresses of a chunk allow, 8 bytes at most.
    """
    entries = []
    kept = [0] * len(columns.fields) if resident is None else resident
    for field, offset, at in zip(columns.fields, layout.fields, kept, strict=True):
        aligned = field.address | field.stride | field.row_bytes | 8
        for begin in range(0, field.row_bytes, chunk):
            nbytes = min(chunk, field.row_bytes - begin)
            place = (field.address + begin, field.stride, offset + begin, field.row_bytes)
            entries.append([*place, nbytes, aligned & -aligned, at + begin, 0])
    return entries


def chunk_for(row_bytes: Sequence[int]) -> int:
    """Bytes that a program copies at once, of rows whose fields are that large."""
    longest = max(row_bytes, default=0)
    return 256 if longest <= 256 else 2048 if longest <= 4096 else 16384


def signed(key: int) -> int:
    """64 bits as an int64 has them."""
    return key - (1 << 64) if key >> 63 else key


def call(kernel: Callable[..., object], *arguments: object, **constants: object) -> None:
    """Queue a kernel on the stream in use. The device is the current one."""
    kernel(*arguments, **constants)


class Chain:
    """Reads batches of one size with three kernels on the current stream, four where lanes must be looked at first.

    draw() chooses rows and reads their tickets, gather() copies, repair() reads the tickets again and reads other rows where a row was
    not whole throughout. Nothing waits for the device, and the host reads nothing. On a CUDA device the constructor compiles and loads
    every kernel; afterwards :meth:`launch` may be captured in a CUDA graph. The device must be the current one in all calls.

    A place for which no row can be read repeats another place's row. With no row to be read it is zeros, and ``valid`` is False.

    Args:
        columns: the store. Its memory must stay valid on the device as long as a batch is under way or a graph may be replayed.
        batch_size: rows.
        device: where batches lie.
        kind: ``uniform``: the rows of :meth:`Store.sample_uniform` for the same key while no writer is at work; ``prioritized``: those of
            ``Priorities.draw``; ``permuted``: the rows of given ranks among those inside the extents.
        full: all lanes were full, and stay so. Then nothing looks at their cursors.
        seed: batches follow from these 64 bits and their number since the constructor, which the last kernel counts up on the
            device; ``key`` of :meth:`launch` is passed over. None: each batch follows from its key.
        commands: address on the device of a ring of commands, 64 bytes each: key, address of the output block, address of the
            ranks. Batch ``b`` follows command ``b % slots`` in place of what :meth:`launch` was given.
        slots: commands of that ring; 0: there is none.
        resident: where rows stay on the device once they were read whole; of the store's capacity, empty at first. None: nowhere.
        programs: how many programs of gather share its chunks at most; None: one each.
        rows_per_program: of draw; more than one is for Triton's interpreter alone.
        launcher: queues a kernel, which it calls with the rest, on the stream in use: ``Accelerator.launch``.

    Raises:
        ValueError: no rows, a priority tree that is missing, or a kind that does not exist.
        RuntimeError: :func:`kernels_of`. Whatever Triton raises where it cannot compile.
    """

    def __init__(
        self,
        columns: Columns,
        batch_size: int,
        device: torch.device | str,
        *,
        kind: Kind = "uniform",
        full: bool = False,
        seed: int | None = None,
        commands: int = 0,
        slots: int = 0,
        resident: ResidentRows | None = None,
        programs: int | None = None,
        rows_per_program: int = 1,
        launcher: Launcher = call,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"Chain: batch_size: expected at least 1, got {batch_size}.")
        checks.check_choice("Chain: kind", kind, KINDS)
        if kind == "prioritized" and columns.tree is None:
            raise ValueError("Chain: expected columns with a priority tree, got none. Give columns_of the priorities.")
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.layout = Layout(columns.fields, batch_size, weighted=kind == "prioritized")
        #: Kernels launched so far.
        self.launches = 0
        self._kernels, self._launcher = kernels_of(self.device), launcher
        #: It may be set until the first batch.
        self.seed = seed
        self._chunk = chunk_for([field.row_bytes for field in columns.fields])
        self._rows_per_program = rows_per_program
        steps = 0 if full else -1 if columns.lanes == 1 else columns.lanes.bit_length()
        self._looks_at_lanes = steps > 0 and kind != "prioritized"
        self._slots = slots
        self._chosen = {"KIND": KINDS.index(kind), "LANES": steps, "COUNTED": seed is not None}
        self._in_all = {"SLOTS": slots, "RESIDENT": resident is not None}
        self._resident = resident
        self._chunks = len(chunk_table(columns, self.layout, self._chunk))
        self._programs = min(batch_size * self._chunks, programs or 1 << 30)
        words = _PLACES + _PLACE_WORDS * batch_size + _ENTRY_WORDS * self._chunks + columns.lanes
        self._state = torch.zeros(words, dtype=torch.int64, device=self.device)
        #: int64 on the device: batches, then internal, rows read again, places that repeat another one's row, places without a row, and
        #: places whose row was resident.
        self.counters = self._state[_COUNTERS:_PLACES]
        if not self._kernels.INTERPRETED:
            self._warm_up(columns)
        self.replace(columns, commands)

    def run(self, key: int = 0, out: torch.Tensor | None = None, *, ranks: torch.Tensor | None = None) -> Batch:
        """Launch the kernels that read one batch, on the current stream.

        Args:
            key: 64 random bits, ``0 <= key < 2 ** 64``.
            out: a block of :class:`Layout` on the device; None: a new one.
            ranks: int64 ``[B]`` on the device, for ``permuted``.
        """
        batch = self.layout.views(self.layout.empty(self.device) if out is None else out)
        self.launch(batch.block.data_ptr(), key, 0 if ranks is None else ranks.data_ptr())
        return batch

    def launch(self, out: int = 0, key: int = 0, ranks: int = 0) -> None:
        """As :meth:`run`, by addresses that are valid on the device: what a graph captures."""
        given = (self._state, signed(key if self.seed is None else self.seed), ranks, out)
        if self._looks_at_lanes:
            self._launch("extents", 1, 4, self._state, BLOCK=_LANES_AT_ONCE)
        per = self._rows_per_program
        beside = self._state if self._resident is None else self._resident.words
        chosen = {**self._chosen, **self._in_all}
        self._launch("draw", -(-self.batch_size // per), 1, *given, beside, BLOCK=per, **chosen)
        if self._chunks:
            self._launch("gather", self._programs, CHUNKS[self._chunk], *given, CHUNK=self._chunk, **self._in_all)
        self._launch("repair", self.batch_size, CHUNKS[self._chunk], *given, beside, CHUNK=self._chunk, **chosen)

    def replace(self, columns: Columns, commands: int = 0) -> None:
        """Take over new addresses of the same rows, and of the ring, after their memory was registered again. Graphs follow.

        Copies from the host: not inside of a capture. Batches under way must be over.
        """
        kept = None if self._resident is None else [field.address for field in self._resident.columns.fields]
        table = chunk_table(columns, self.layout, self._chunk, kept)
        at = _PLACES + _PLACE_WORDS * self.batch_size
        ends = at + _ENTRY_WORDS * len(table)
        tree = columns.tree
        levels = [] if tree is None else [word for level in zip(tree.sums, tree.sizes, strict=True) for word in level]
        of_tree = (0, 0, 0) if tree is None else (len(tree.sizes), tree.least, tree.beta)
        parts = (self.layout.rows, self.layout.tickets, self.layout.valid, self.layout.weights)
        header = [*columns[:6], *of_tree, self.batch_size, len(table), at, ends, commands, *parts, *levels]
        self._state[: len(header)] = torch.tensor(header)
        self._state[at:ends] = torch.tensor(table, dtype=torch.int64).flatten()

    def _launch(self, name: str, programs: int, warps: int, *arguments: object, **constants: object) -> None:
        """One kernel. Without fused multiply-adds: they would draw other rows than the host."""
        self.launches += 1
        kernel = vars(self._kernels)[name]
        self._launcher(kernel[(programs,)], *arguments, **constants, num_warps=warps, enable_fp_fusion=False)

    def _warm_up(self, columns: Columns) -> None:
        """A batch that is thrown away: all kernels are compiled and loaded then."""
        block = self.layout.empty(self.device)
        ranks = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        command = [0, block.data_ptr(), ranks.data_ptr(), *[0] * 5]
        commands = torch.tensor([command] * max(self._slots, 1), device=self.device)
        self.replace(columns, commands.data_ptr())
        self.launch(block.data_ptr(), 0, ranks.data_ptr())
        self.counters.zero_()
        self.launches = 0


#: Words before the slots, and before the entries of a slot; which of the first ones the host writes.
_HEADER, _SLOT_HEADER, _CONSUMED = 8, 4, 1
_ENTRIES_AT_ONCE = 1024
#: Of the counters on the device: batches sent.
_SENT = 5


class Drained(NamedTuple):
    """What the host has taken from a ring."""

    #: Since the ring was made.
    batches: int = 0
    #: Handed to the priorities that are attached, which drop those whose row was written since.
    entries: int = 0
    #: Entries with a priority that none can be: negative, not finite or too large; or of a row that does not exist.
    refused: int = 0


class UpdateRing:
    """Priorities that a learner computes on a device, on their way to a store on the host.

    :meth:`send` launches two kernels and waits for nothing: it may be captured in a CUDA graph, and each replay takes the next slot. When
    all slots are full, the entries are dropped and counted. Once priorities are attached, the first :meth:`send` starts a native thread
    that applies what arrives, under its tickets and without Python's lock. Draws show an update some batches later. An update that is
    under way is lost when the process dies. In a forked child nothing is applied.

    Args:
        capacity: rows of the store.
        entries: of a slot: a batch at most.
        slots: batches that may be under way.
        device: where the priorities are computed.
        memory: int64 ``[UpdateRing.words(entries, slots)]`` on the host, zeroed, which the device may write to; None: new memory, for a
            device that is the CPU.
        address: where the memory begins on the device; None: where it begins on the host.
        dtype: of the priorities: float32 or float64.
        launcher: as for ``Chain``.

    Raises:
        RuntimeError: :func:`engram.store.device.chain.kernels_of`. Whatever Triton raises where it cannot compile.
    """

    def __init__(
        self,
        capacity: int,
        entries: int,
        slots: int,
        device: torch.device | str,
        *,
        memory: torch.Tensor | None = None,
        address: int | None = None,
        dtype: torch.dtype = torch.float32,
        launcher: Launcher = call,
    ) -> None:
        self.device = torch.device(device)
        self.capacity = capacity
        self.entries = entries
        self.slots = slots
        self.dtype = dtype
        self._kernels, self._launcher = kernels_of(self.device), launcher
        self._memory = (
            torch.zeros(self.words(entries, slots), dtype=torch.int64, device="cpu") if memory is None else memory
        )
        self._address = self._memory.data_ptr() if address is None else address
        self._state = torch.zeros(72, dtype=torch.int64, device=self.device)
        #: On the device: at 5 the batches sent, at 7 the entries that were dropped because the ring was full.
        self.counters = self._state[64:]
        self._attached: tuple[AnyIndex, Indexes] | None = None
        self._drain: native.UpdateDrain | None = None
        if not self._kernels.INTERPRETED:  # compiled and loaded now; the ring counts one empty batch
            self.send(*(torch.zeros(0, dtype=kind, device=self.device) for kind in (torch.int64, torch.int64, dtype)))

    @staticmethod
    def words(entries: int, slots: int) -> int:
        """Words of 64 bits that a ring needs."""
        return _HEADER + slots * (_SLOT_HEADER + 3 * entries)

    def send(self, rows: torch.Tensor, tickets: torch.Tensor, priorities: torch.Tensor) -> None:
        """Launch the kernels that put a batch into the ring, on the current stream.

        Args:
            rows: int64 ``[n]`` on the device; -1 is passed over. tickets: int64 ``[n]``, as of a :class:`Batch`.
            priorities: ``[n]``, of the ring's dtype. All are contiguous.

        Raises:
            ValueError: another dtype or shape; or the priorities that are attached have another number of rows.
            RuntimeError: their store was closed before the first call.
            WriterStalled, CorruptStore: of the priorities, since the last call. Nothing is applied before they are attached again.
        """
        self._run()
        n = len(rows)
        kinds = [(tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) for tensor in (rows, tickets, priorities)]
        if kinds != [(kind, (n,), True) for kind in (torch.int64, torch.int64, self.dtype)] or n > self.entries:
            raise ValueError(
                f"update_priority: expected contiguous rows and tickets of int64 and priorities of {self.dtype}, at most {self.entries} "
                f"each, got {kinds}."
            )
        where = (self._state, self._address, self.entries, n)
        given = (*where, rows, tickets, priorities)
        self._launcher(self._kernels.update[(1,)], *given, SLOTS=self.slots, BLOCK=_ENTRIES_AT_ONCE)
        self._launcher(self._kernels.publish[(1,)], *where, SLOTS=self.slots)

    def attach(self, priorities: AnyIndex, indexes: Indexes) -> None:
        """Let updates reach an index of priorities, from the next :meth:`send` or :meth:`flush` on, in place of what was attached.

        Args:
            priorities: of as many rows as the ring. indexes: those of their store; :meth:`Indexes.close` ends the updates.

        Raises as :meth:`close`.
        """
        self.close()
        self._attached = (priorities, indexes)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all batches are applied that were sent on the current stream, for which the device is waited for.

        Args:
            timeout_s: default :func:`engram._support.native.wait_limit`.

        Returns:
            False: they were not applied in that time, or no priorities are attached.

        Raises as :meth:`send`.
        """
        drain = self._run()
        sent = int(self.counters[_SENT])
        return drain is not None and drain.flush(sent, native.wait_limit() if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Apply what has arrived, and detach the priorities. Repeatable. Call it before the ring's memory is given back.

        Raises as :meth:`send`.
        """
        drain, self._drain, self._attached = self._drain, None, None
        if drain is not None:
            self._stop()
            drain.check()

    @property
    def stats(self) -> Drained:
        """What was taken so far. What the device counts is in :attr:`counters`."""
        batches, *others = (int(self._memory[_CONSUMED]),) if self._drain is None else self._drain.counts
        return Drained(batches - (not self._kernels.INTERPRETED), *others)  # without the one that the constructor sent

    def _run(self) -> native.UpdateDrain | None:
        """The thread that applies updates, started if there is none yet. None: no priorities are attached. Raises what ended it."""
        if self._drain is None and self._attached is not None:
            priorities, indexes = self._attached
            if priorities.core.rows != self.capacity:
                raise ValueError(
                    f"update_priority: expected priorities of {self.capacity} rows, as many as the ring is for, got those of "
                    f"{priorities.core.rows}. Attach those of the store that is drawn from."
                )
            ring = (self._memory.data_ptr(), self._memory.nbytes, self.slots, self.entries)
            drain = native.UpdateDrain(*ring, self.dtype is torch.float32, priorities.core, self._memory)
            self._drain, self._stop = fork.registered(drain, uses_others=True), weakref.finalize(self, drain.stop)
            indexes.drains.add(drain)
        if self._drain is not None:
            self._drain.check()
        return self._drain
