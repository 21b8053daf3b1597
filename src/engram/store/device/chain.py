"""A chain of kernels that reads one batch of a store in host memory: draw, gather, repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from engram.store.device.columns import Batch, Columns, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    from engram.store.device.resident import ResidentRows

#: How rows are chosen: ``permuted`` takes ranks that the host has chosen.
Kind: TypeAlias = Literal["uniform", "prioritized", "permuted"]
#: Queues a kernel with its arguments and constants on the stream in use.
Launcher: TypeAlias = "Callable[..., None]"
KINDS: tuple[Kind, ...] = ("uniform", "prioritized", "permuted")

#: Bytes that a program of the gather copies, with how many warps.
_CHUNKS = {256: 1, 2048: 4, 16384: 8}
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
        raise RuntimeError(
            f"kernels: expected Triton, got {error}. Install the version that torch names: pip install triton."
        ) from error
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
        if kind not in KINDS:
            raise ValueError(f"Chain: kind: expected one of {KINDS}, got {kind!r}.")
        if kind == "prioritized" and columns.tree is None:
            raise ValueError("Chain: expected columns with a priority tree, got none. Give columns_of the priorities.")
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.layout = Layout(columns.fields, batch_size, weighted=kind == "prioritized")
        self.launches = 0
        """Kernels launched so far."""
        self._kernels, self._launcher = kernels_of(self.device), launcher
        self.seed = seed
        """It may be set until the first batch."""
        longest = max((field.row_bytes for field in columns.fields), default=0)
        self._chunk = 256 if longest <= 256 else 2048 if longest <= 4096 else 16384
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
        self.counters = self._state[_COUNTERS:_PLACES]
        """int64 on the device: batches, then internal, rows read again, places that repeat another one's row, places without a row, and
        places whose row was resident.
        """
        if not self._kernels.INTERPRETED:
            self._warm_up(columns)
        self.replace(columns, commands)

    def run(self, key: int = 0, out: Tensor | None = None, *, ranks: Tensor | None = None) -> Batch:
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
            self._launch("gather", self._programs, _CHUNKS[self._chunk], *given, CHUNK=self._chunk, **self._in_all)
        self._launch("repair", self.batch_size, _CHUNKS[self._chunk], *given, beside, CHUNK=self._chunk, **chosen)

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
