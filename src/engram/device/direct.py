"""Batches that an accelerator reads from a store in host memory by itself: the host copies nothing, and waits for nothing."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from engram._support import checks, closing, fork, native, nested, tensordicts
from engram._support.devices import existing_device
from engram._support.words import warn
from engram.device.pinning import Block, Blocks
from engram.errors import NoSampleable, PriorityError, WriterStalled
from engram.format.files import FIXED_BYTES
from engram.store.device.accelerator import REGISTRY, Accelerator, NotRegistered, Registry
from engram.store.device.chain import Batch, Chain, Kind, NoRoom, ResidentRows, UpdateRing, columns_of, signed
from engram.store.priorities import PriorityIndex
from engram.store.store import Store

#: How many bytes of rows go in one block.
_AT_ONCE = 64 << 20
_COMMITTED, _NUMBER = 2, (1 << 63) - 1


class Sender:
    """Keeps the rows of a store on a device as they are on the host, with their tickets and lanes.

    Args:
        store: rows on the CPU. resident: their memory on the device. accelerator: the device.
    """

    def __init__(self, store: Store, resident: ResidentRows, accelerator: Accelerator) -> None:
        self._store, self._resident, self.columns = store, resident, resident.columns
        self._accelerator, self._blocks = accelerator, Blocks(accelerator)
        control, tickets = store.control_memory
        self._lanes = control[FIXED_BYTES : FIXED_BYTES + resident.lanes.nbytes].view(torch.int64)
        self._words = tickets[: resident.words.nbytes].view(torch.int64)
        #: The ticket words on the device; 0: of a row that is not whole there.
        self._seen = torch.zeros(store.capacity, dtype=torch.int64, device="cpu")
        self._seen_lanes = torch.zeros_like(self._lanes, device="cpu")
        self._at_once = max(1, _AT_ONCE // max(1, store.schema.row_bytes))

    def send(self) -> None:
        """Queue copies of what changed since the last call, on the stream in use. Not in a capture.

        Cost: O(capacity), one word per row: about a millisecond per million rows.
        """
        lanes = self._lanes.clone()  # before the rows: those are as new at least
        changed = (self._words != self._seen).nonzero().squeeze(1)
        for rows in torch.split(changed, self._at_once) if len(changed) else ():
            words = self._words[rows]
            whole = ((words & 3) == _COMMITTED).nonzero().squeeze(1)
            numbers = (words[whole] & _NUMBER) >> 2
            columns, moved = self._store.read(rows[whole], expected=numbers)
            words[whole[moved]] = 0
            writes = self._store.writes_of(rows[whole], numbers)
            self._replace(*self._sent([rows, words, rows[whole], writes, *columns]))
            self._seen[rows] = words  # now: after an interrupt they are sent again
        if not torch.equal(lanes, self._seen_lanes):
            self._resident.lanes.copy_(self._sent([lanes])[0])
            self._seen_lanes = lanes

    def _sent(self, tensors: list[Tensor]) -> list[Tensor]:
        return cast("list[Tensor]", self._blocks.send(tensors, Block(self._accelerator.memory, 0)).batch)

    def _replace(self, rows: Tensor, words: Tensor, whole: Tensor, writes: Tensor, *columns: Tensor) -> None:
        """Put what came to its rows."""
        resident = self._resident
        resident.words[rows], resident.writes[whole] = words, writes
        for field, column in zip(resident.fields, columns, strict=True):
            if field.numel():
                field[whole] = column.reshape(-1).view(torch.uint8).view(len(whole), field.shape[1])


#: Commands of a ring, and the words of one.
_SLOTS, _WORDS = 64, 8
#: What a chain counts of its batches, and their bytes.
_COUNTS = ("batches", "bytes", "redraws", "repeated", "missing", "resident")
#: Batches of priorities that may be under way to the host.
_UPDATES = 32
#: Programs that copy rows while the consumer works on the batch before.
_PROGRAMS = 32


class DeviceReadable(Protocol):
    """A buffer as an accelerator reads it."""

    @property
    def refusal(self) -> str | None:
        """What of its batches needs the host; None: nothing does."""

    @property
    def on_disk(self) -> bool:
        """Whether rows are in files on a disk, which no device reads: the host must send them."""

    @property
    def store(self) -> Store | None:
        """The rows; None: nothing was ever written."""

    @property
    def kind(self) -> Kind:
        """How rows are drawn."""

    @property
    def priorities(self) -> PriorityIndex | None:
        """What rows are drawn by; None: not by priority."""

    def state(self) -> object:
        """Equal to that of before as long as an accelerator may read on as before."""

    @property
    def ran_out(self) -> bool:
        """Whether the batch before was the last of a pass over the rows."""

    def begin(self) -> None:
        """An iteration begins: the batch before was not the last one."""

    def next_seed(self) -> int:
        """64 random bits of the buffer's generator."""

    @property
    def has_columns(self) -> bool:
        """Whether rows are named by several numbers, as with ``ndim > 1``."""

    def next_draw(self, n: int, *, keyed: bool) -> tuple[int, Tensor | None]:
        """The key of the next batch, 0 if it is not ``keyed``; and its rows, int64 ``[at most n]``, if the host chooses them. Raises what
        ``rb.sample`` raises.
        """

    def finish(self, batch: Batch, n: int, device: torch.device, *, return_info: bool) -> object:
        """The first ``n`` rows of a batch in the form of ``rb.sample``."""


@runtime_checkable
class Readable(Protocol):
    """A buffer that an accelerator may be able to read."""

    def device_readable(self) -> DeviceReadable:
        """What it needs of the buffer."""


class NotDirect(RuntimeError):
    """An accelerator cannot read a buffer by itself. The text is the cause."""


class Changed(RuntimeError):
    """A buffer, or its memory, is not what it was."""


class Queued(NamedTuple):
    """A batch whose reading is queued."""

    batch: Batch
    #: How many of its rows are meant: the first ones.
    n: int
    #: Whether it is the last one of a pass over the rows.
    is_last: bool
    #: When it has come, the batch has been read, on a stream that the consumer's does not wait for yet. None: on the consumer's.
    event: torch.Event | None


class _Commands:
    """A ring in host memory: of each batch its key, where it goes, and where its ranks are. A captured chain reads them."""

    def __init__(self, accelerator: Accelerator, batch_size: int, *, with_ranks: bool) -> None:
        self.memory = torch.zeros(_SLOTS * (_WORDS + batch_size * with_ranks), dtype=torch.int64, device="cpu")
        self._words = self.memory.numpy().data
        self._accelerator, self._room = accelerator, batch_size
        #: Of the next batch.
        self.number, self._behind = 0, list[torch.Event]()
        #: Whether a batch was about to be queued when the number was written last: it may be, or may not.
        self.queueing = False
        #: Where the device sees the memory.
        self.address = 0

    def put(self, key: int, out: int, ranks: Tensor | None, stream: torch.Stream) -> None:
        """Write the command of the next batch, which will be read on a stream.

        Waits on the host if the batch that had the place is not read yet: half a ring of batches ago.
        """
        slot = self.number % _SLOTS
        if slot % (_SLOTS // 2) == 0 and self.number:
            self._behind = [*self._behind[-1:], self._accelerator.mark(stream)]
            if len(self._behind) > 1:
                self._behind[0].synchronize()
        at = slot * _WORDS
        if ranks is not None:
            begin = _SLOTS * _WORDS + slot * self._room
            self.memory[begin : begin + len(ranks)].copy_(ranks)
            self.memory[begin + len(ranks) : begin + self._room] = ranks[-1]
            self._words[at + 2] = self.address + 8 * begin
        self._words[at], self._words[at + 1] = signed(key), out


def _not_readable(rows: DeviceReadable, *, counted: bool, resident: bool) -> str | None:
    """What keeps a device from reading a buffer; None: nothing does. ``counted``: graphs capture it. ``resident``: rows stay there."""
    if rows.refusal is not None:
        return rows.refusal
    if rows.on_disk and not resident:
        return "rows in files on a disk"
    if rows.on_disk and rows.kind == "prioritized":
        return "priorities in files on a disk"
    if counted and rows.kind == "permuted":
        return "a sampler without replacement, whose passes the host counts"
    return "ndim > 1, by priority" if counted and rows.kind == "prioritized" and rows.has_columns else None


class DirectReader:
    """Reads the batches of a buffer on an accelerator, as long as :meth:`DeviceReadable.state` stays what it was.

    Args:
        rows: the buffer.
        batch_size: rows of a batch.
        accelerator: where batches go.
        seed: batches follow from these 64 bits and their number, which the device counts, so that a graph may capture :meth:`read`.
            None: each follows from the next key of the buffer, so that they are those of ``iter(rb)``.
        updates: priorities may be sent back.
        ahead: batches are read before they are needed. Large ones are, on a stream of their own, by few programs, which leave room for
            the consumer's work.
        resident: where all rows of the store stay on the device once they were read, or, if they are in files, sent. None: nowhere.
        registry: of the memory that devices read.

    Raises:
        NotDirect: the buffer needs the host, the device cannot read its memory, or kernels cannot be compiled.
    """

    def __init__(
        self,
        rows: DeviceReadable,
        batch_size: int,
        accelerator: Accelerator,
        *,
        seed: int | None = None,
        updates: bool = True,
        ahead: bool = False,
        resident: ResidentRows | None = None,
        registry: Registry = REGISTRY,
    ) -> None:
        store, index = rows.store, rows.priorities
        reason = _not_readable(rows, counted=seed is not None, resident=resident is not None) or accelerator.obstacle()
        if reason is not None or store is None:
            raise NotDirect(reason or "nothing was ever written")
        self.rows, self.batch_size, self.accelerator, self.state = rows, batch_size, accelerator, rows.state()
        self._store, self._stream, self.resident = store, accelerator.current(), resident
        large = batch_size * store.schema.row_bytes >= native.PARALLEL_BYTES
        self._side = accelerator.stream() if ahead and large else None
        #: Whether batches are read on a stream of their own, while the consumer works on the one before.
        self.reads_ahead = self._side is not None
        #: How rows get to the device: as ``DeviceLoader(transport=)``.
        self.transport = "direct" if resident is None else "resident"
        self._commands = commands = (
            None if seed is not None else _Commands(accelerator, batch_size, with_ranks=rows.kind == "permuted")
        )
        self._sender = None if resident is None or not rows.on_disk else Sender(store, resident, accelerator)
        memory = [] if commands is None else [commands.memory]
        if self._sender is None:
            memory += [*store.control_memory, *(tensor for tensor in store.tensors if tensor.nbytes)]
        words = UpdateRing.words(batch_size, _UPDATES) if index is not None and updates else 0
        ring = torch.zeros(words, dtype=torch.int64, device="cpu")
        memory += [] if index is None else [index.block.tensor, ring][: 1 + updates]
        try:
            self._registered = registry.register(accelerator, memory)
            seen = dict(zip(map(Tensor.data_ptr, memory), self._registered.addresses, strict=True))
            with accelerator.active():
                self._chain = self._chain_over(seen, index, seed)
                self.updates = None
                if index is not None and updates:
                    self.updates = UpdateRing(
                        store.capacity, batch_size, _UPDATES, accelerator.device, memory=ring, address=seen[ring.data_ptr()],
                        launcher=accelerator.launch,
                    )  # fmt: skip
                    self.updates.attach(index, store.indexes)
                self._graph = None if commands is None else accelerator.capture(self._chain.launch)
        except Exception as error:  # Triton has errors of its own, and those of the C compiler that it calls
            said = isinstance(error, RuntimeError | ImportError)
            raise NotDirect(str(error) if said else f"{type(error).__name__}: {error}") from error
        #: Of a batch.
        self.nbytes = self._chain.layout.nbytes
        #: Work is queued by one thread at a time: it uses the chain's own memory, in order.
        self._lock = fork.rlock()
        self._refused, self._pid, self._moved = 0, os.getpid(), False

    def _chain_over(self, seen: dict[int, int], index: PriorityIndex | None, seed: int | None) -> Chain:
        """The kernels that read a batch. ``seen``: where the device sees memory of the host, by address."""
        store, kind, commands, accelerator = self._store, self.rows.kind, self._commands, self.accelerator
        if commands is not None:
            commands.address = seen[commands.memory.data_ptr()]
        sent = None if self._sender is None else self._sender.columns
        columns = sent or columns_of(store, seen.__getitem__, index)
        self._full = seed is None and store.lanes > 1 and store.core.size() == store.capacity
        return Chain(
            columns, self.batch_size, accelerator.device, kind=kind, full=kind == "permuted" or self._full,  # ranks are rows
            seed=seed, commands=0 if commands is None else commands.address, slots=0 if commands is None else _SLOTS,
            resident=self.resident if sent is None else None, programs=None if self._side is None else _PROGRAMS,
            launcher=accelerator.launch,
        )  # fmt: skip

    def seed(self, seed: int) -> None:
        """Let batches follow from another seed, in 64 bits. Before the first one."""
        self._chain.seed = seed % (1 << 64)

    @property
    def counts(self) -> dict[str, int]:
        """What happened to batches, for ``stats()``. Waits for the device."""
        self._wait()
        batches, _, *others = self._chain.counters[:6].tolist()
        return dict(zip(_COUNTS, (batches, batches * self.nbytes, *others), strict=True))

    def is_current(self) -> bool:
        """Whether the buffer and its memory are still what they were, as far as is known."""
        if self._moved or self.rows.state() != self.state:
            return False
        return not self._full or self._store.core.size() == self._store.capacity

    @contextlib.contextmanager
    def _queueing(self, side: torch.Stream | None = None) -> Iterator[torch.Stream]:
        """Inside, work that reads the memory may be queued on the stream in use, behind that of the call before: the chain has memory of
        its own, one batch at a time. No other thread registers the memory again meanwhile. ``side``: it is queued there, always.

        Raises ``Changed``: it lies elsewhere since a fork. ``ForkedHandle``: this is a forked child.
        """
        accelerator = self.accelerator
        with self._lock, self._registered.turn, contextlib.nullcontext() if side is None else accelerator.on(side):
            try:
                self._moved |= self._registered.use()
            except NotRegistered:
                self._moved = True
            if self._moved:
                raise Changed(
                    "expected the memory of the buffer where it was, got another place: the process has forked. Make a new DeviceReplay."
                )
            if side is not None:
                yield side
            elif accelerator.capturing():
                _CAPTURED.add(self)  # a graph may read it until this is closed
                yield accelerator.current()
            else:
                self._stream = accelerator.after(self._stream) or self._stream
                yield self._stream

    def read(self, *, return_info: bool) -> object:
        """The next batch, in the form of ``rb.sample``, whose reading is queued on the stream in use. Raises as :meth:`queue`."""
        return self.hand_out(self.queue(), return_info=return_info)

    def queue(self) -> Queued:
        """Queue the reading of the next batch. Raises what ``rb.sample`` raises, and as :meth:`_queueing`."""
        commands, graph, layout = self._commands, self._graph, self._chain.layout
        with self._queueing(self._side) as stream:
            key, ranks = self.rows.next_draw(self.batch_size, keyed=commands is not None)
            is_last = self.rows.ran_out
            if self._sender is not None:
                self._sender.send()
            batch = layout.views(layout.empty(self.accelerator.device))
            if commands is None or graph is None:
                self._chain.launch(batch.block.data_ptr())
            else:
                if commands.queueing:  # an interrupt came: the device knows whether that batch is queued
                    commands.number = int(self._chain.counters[0])
                commands.put(key, batch.block.data_ptr(), ranks, stream)
                commands.queueing = True
                graph.replay()
                commands.number += 1
                commands.queueing = False
            event = None if self._side is None else self.accelerator.mark(stream)
        return Queued(batch, self.batch_size if ranks is None else len(ranks), is_last, event)

    def hand_out(self, queued: Queued, *, return_info: bool) -> object:
        """A batch in the form of ``rb.sample``, for work on the stream in use, which comes after its reading."""
        if queued.event is not None:
            consumer = self.accelerator.current()
            self.accelerator.wait(consumer, queued.event)
            self.accelerator.keep(queued.batch.block, consumer)
        return self.rows.finish(queued.batch, queued.n, self.accelerator.device, return_info=return_info)

    def on_device(self, *values: object) -> list[Tensor]:
        """The rows, priorities and numbers of a batch, if all are on the device, and as many; else none."""
        found = [one for one in values if isinstance(one, Tensor) and self.accelerator.holds(one)]
        fits = len(found) == len(values) and len({one.numel() for one in found}) == 1
        return found if fits and found[0].numel() <= self.batch_size else []

    def send(self, rows: Tensor, tickets: Tensor, priorities: Tensor) -> None:
        """Queue new priorities, all ``[n]`` on the device, on the stream in use. Raises as :meth:`UpdateRing.send`; ``Changed``."""
        assert self.updates is not None  # rows are drawn by priority
        with self._queueing():
            self.updates.send(rows.contiguous(), tickets.contiguous(), priorities.detach().float().contiguous())

    def check(self, call: str) -> None:
        """Raise ``PriorityError`` for priorities that were none, since the last time."""
        if self.updates is not None:
            before, self._refused = self._refused, self.updates.stats.refused  # read once: a thread counts on
            refused = self._refused - before
            if refused:
                raise PriorityError(f"{call}: expected finite priorities of at least 0, left out {refused} others.")

    def _wait(self) -> None:
        """Wait on the host for all that was queued, whatever the stream in use is; of graphs, on every stream."""
        streams = {None} if self in _CAPTURED else {self._stream, self._side or self._stream}
        for stream in streams:
            self.accelerator.finish(stream)

    def flush(self, call: str) -> None:
        """Wait until the priorities that were sent are in the buffer. Raises as :meth:`check`; ``WriterStalled``: it takes too long."""
        if self.updates is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._wait()
            arrived = self.updates.flush()
        if not arrived:
            raise WriterStalled(f"{call}: expected priorities in the buffer by now, got none for too long. Try again.")
        self.check(call)

    def close(self) -> None:
        """Give the memory up, after the work that reads it. Priorities that have not arrived are lost: :meth:`flush` first. Repeatable."""
        if os.getpid() != self._pid:
            return
        _CAPTURED.discard(self)
        if self.updates is not None:
            self.updates.close()
        if self.resident is not None and not self.accelerator.capturing():
            self.accelerator.finish()  # what reads them may be on another stream than the one on which their memory was made
        self._registered.close()


#: Those that a graph may use, which does not keep them: until they are closed.
_CAPTURED: set[DirectReader] = set()


#: An accelerator.
Place: TypeAlias = "torch.device | str | int"


class DeviceReplay(closing.Closes):
    """Draws batches of a buffer on a GPU, which reads the rows in host memory by itself and sends priorities back.

    No call waits for the device, so all may be captured in a CUDA graph, together with the loss and the optimizer step: each replay then
    draws a new batch. Batches follow from a sequence of their own, which begins with a key from the buffer's generator.

    Args:
        rb: a buffer in RAM or in shared memory whose rows are tensors and whose sampler draws uniformly or by priority, without
            transforms and ``collate_fn``. Rows must have been written.
        device: a CUDA device.
        batch_size: rows of a batch; default the buffer's.
        graphs: how many calls of :meth:`sample` graphs may capture. Each has memory of its own, so that graphs do not disturb each other.
        transport: ``"direct"``: rows are read from host memory each time. ``"resident"``: they stay in the device's memory, which must
            have room for all; rows in a directory are sent by the host, those that changed, and graphs cannot capture that.

    Raises:
        RuntimeError: the buffer, its memory or the device does not allow it, with the cause. Use :class:`DeviceLoader`, which then
            copies on the host.
        TypeError: not a buffer, or ``batch_size`` and ``graphs`` are no ints. ValueError: they are below 1, or no such ``transport``.

    A batch has whole rows that were live when it was read. A place for which none is found repeats another place's row; :meth:`stats`
    counts these. Of an empty buffer batches are zeros, and :meth:`check` raises. Fields that are added later, another sampler,
    transforms and limits are seen by the next call outside of a graph, which raises; captured calls go on as they are.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
    >>> if torch.cuda.is_available():
    ...     from engram import DeviceReplay
    ...     replay = DeviceReplay(rb, "cuda")
    ...     replay.sample()["obs"].device.type
    """

    def __init__(
        self, rb: object, device: Place, batch_size: int | None = None, *, graphs: int = 4, transport: str = "direct"
    ) -> None:
        checks.check_choice("DeviceReplay: transport", transport, ("direct", "resident"))
        graphs = checks.check_count("DeviceReplay: graphs", graphs)
        on = existing_device(device, "DeviceReplay: device")
        if on.type in ("cpu", "meta"):
            raise RuntimeError(f"DeviceReplay: device: expected a CUDA device, got {on}. Use rb.sample() there.")
        if not isinstance(rb, Readable):
            raise TypeError(f"DeviceReplay: rb: expected a ReplayBuffer, got {type(rb).__name__}.")
        found = batch_size if batch_size is not None else cast("Any", rb).batch_size
        if found is None:
            raise RuntimeError("DeviceReplay: expected a batch size: DeviceReplay(rb, device, batch_size=…).")
        self.rb, self.batch_size = rb, checks.check_count("DeviceReplay: batch_size", found)
        self._rows, self._accelerator = rb.device_readable(), Accelerator(on)
        store = self._rows.store
        try:
            resident = ResidentRows(store, self._accelerator) if transport == "resident" and store is not None else None
            reader = partial(DirectReader, self._rows, self.batch_size, self._accelerator, resident=resident)
            numbers = range(1 if self._rows.on_disk else graphs + 1)
            made = [reader(seed=0, updates=not number) for number in numbers]
        except (NotDirect, NoRoom) as error:
            raise RuntimeError(
                f"DeviceReplay: expected rows that {on} can read by itself, got a buffer that does not allow it: {error}. Use "
                "DeviceLoader(rb, device), which copies on the host."
            ) from error
        seed = self._rows.next_seed()  # now: what is refused draws nothing from the buffer's generator
        for number, one in enumerate(made):
            one.seed(seed + number)
        self._reader, *self._spare = made
        self._captured: list[DirectReader] = []
        self._last: tuple[Tensor, Tensor] | None = None
        self._missing = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"DeviceReplay(batch_size={self.batch_size}, device='{self._accelerator.device}')"

    def sample(self, return_info: bool = False) -> Any:
        """A new batch on the device, in the form of ``rb.sample``. Its reading is queued on the stream in use.

        Batches of buffers of TensorDicts have ``"index"``, and with priorities ``"priority_weight"`` and ``"index_generation"``.

        Args:
            return_info: return ``(batch, info)``; the info has these, too.

        Raises:
            RuntimeError: the buffer is not what it was; outside of a capture only. Or graphs have captured as many calls as were named.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     batch = DeviceReplay(rb, "cuda").sample()
        """
        reader = self._reader
        if self._rows.on_disk:
            self._accelerator.check_not_capturing("DeviceReplay.sample", "the host sends rows of files on a disk")
        if self._accelerator.capturing():
            if not self._spare:
                raise RuntimeError(
                    f"DeviceReplay.sample: expected at most {len(self._captured)} captured calls, got one more. Make it with "
                    f"DeviceReplay(…, graphs={2 * len(self._captured)})."
                )
            reader = self._spare.pop()
            self._captured.append(reader)
        elif not reader.is_current():
            what = self._rows.refusal or "its fields, or its memory"
            raise Changed(
                f"DeviceReplay.sample: expected a buffer as it was, got one that changed ({what}). Make a new DeviceReplay."
            )
        batch, info = cast("tuple[Any, dict[str, Tensor]]", reader.read(return_info=True))
        tickets = info.get("index_generation")
        self._last = None if tickets is None else (info["index"], tickets)
        return (batch, info) if return_info else batch

    def update_priority(self, index: Tensor, priority: Tensor, *, generation: Tensor | None = None) -> None:
        """New priorities for rows of a batch. They reach the buffer some batches later; a crash loses those under way.

        Args:
            index: int64 ``[n]`` on the device, at most a batch. Of a row named twice the last counts.
            priority: ``[n]`` or ``[n, 1]`` on the device. Negative and infinite ones and NaN are left out, and :meth:`check` raises.
            generation: int64 ``[n]``, as ``"index_generation"``; rows that were written since are left out. Default that of the last
                batch, if ``index`` is its index.

        Raises:
            RuntimeError: the buffer has no priorities; or no ``generation`` of another index. ValueError: another number of priorities.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     with DeviceReplay(rb, "cuda") as replay:
        ...         batch, info = replay.sample(return_info=True)
        ...         replay.update_priority(info["index"], torch.rand(4, device="cuda"))
        """
        call = "DeviceReplay.update_priority"
        if self._reader.updates is None:
            raise RuntimeError(f"{call}: expected a PrioritizedSampler, got a buffer without.")
        if generation is None:
            if self._last is None or index is not self._last[0]:
                raise RuntimeError(
                    f"{call}: expected the index of the last batch, or generation=…, got another index. Pass "
                    "generation=info['index_generation']."
                )
            generation = self._last[1]
        if priority.numel() != index.numel():
            raise ValueError(f"{call}: expected one priority per row, {index.numel()}, got {list(priority.shape)}.")
        self._reader.send(index.reshape(-1), generation.reshape(-1), priority.reshape(-1))

    def update_tensordict_priority(self, data: tensordicts.TensorDictBase) -> None:
        """As :meth:`update_priority`, with ``"index"``, ``"index_generation"`` and the buffer's ``priority_key`` of a batch.

        Raises:
            KeyError: one of them is missing. TypeError: no TensorDict. What :meth:`update_priority` raises.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import DeviceReplay, LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(10, 3)}, [10]))
        >>> if torch.cuda.is_available():
        ...     with DeviceReplay(rb, "cuda") as replay:
        ...         batch = replay.sample()
        ...         batch["td_error"] = torch.rand(4, device="cuda")  # of your model
        ...         replay.update_tensordict_priority(batch)
        """
        key, call = cast("Any", self.rb).priority_key, "DeviceReplay.update_tensordict_priority"
        if not nested.is_tensordict(data):
            raise TypeError(f"{call}: expected a TensorDict, got {type(data).__name__}.")
        found = [data.get(name, None) for name in ("index", key, "index_generation")]
        if None in [value if value is None else 0 for value in found]:
            raise KeyError(f"{call}: expected 'index', {key!r} and 'index_generation', got {[*map(str, data.keys())]}.")
        self.update_priority(found[0], found[1], generation=found[2])

    def flush(self) -> None:
        """Wait until all priorities are in the buffer. Not in a capture. Raises as :meth:`check`, but
        for batches; ``WriterStalled``: it takes longer than 5 s.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").flush()
        """
        self._accelerator.check_not_capturing("DeviceReplay.flush", "it waits for the device")
        self._reader.flush("DeviceReplay.flush")

    def check(self) -> None:
        """Raise for what the device has found since the last check. Waits for it: not in a capture.

        Raises:
            PriorityError: some priorities were none; the others are in the buffer, or on their way. NoSampleable: batches had no rows.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").check()
        """
        missing = int(self.stats()["missing"]) - self._missing
        self._missing += missing
        self._reader.check("DeviceReplay.update_priority")
        if missing:
            raise NoSampleable(f"DeviceReplay.sample: expected rows, found none for {missing} places, which are zeros.")

    def stats(self) -> dict[str, int | str]:
        """What happened since this was made. Waits for the device: not in a capture.

        ``transport``; ``batches``, those of graphs among them; ``bytes``: of their blocks; ``redraws``: rows that were read again, or
        drawn again, because they moved; ``repeated``: places that repeat another place's row; ``missing``: places without a row;
        ``resident``: places whose row was on the device already, with that transport and without
        files; and of updates of priorities ``updates``: batches
        of them that the buffer has taken, ``dropped``: priorities for which there was no room on the way, and ``refused``: those that
        are none.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     batches = DeviceReplay(rb, "cuda").stats()["batches"]
        """
        self._accelerator.check_not_capturing("DeviceReplay.stats", "it waits for the device")
        found = collections.Counter[str]()
        for reader in (self._reader, *self._captured):
            found.update(reader.counts)
        updates, applied, dropped, refused = self._reader.updates, 0, 0, 0
        if updates is not None:
            (applied, _, refused), dropped = updates.stats, int(updates.counters[7])
        sent = {"updates": applied, "dropped": dropped, "refused": refused}
        return {"transport": self._reader.transport, **found, **sent}

    def close(self) -> None:
        """Apply the priorities that are under way, and give the memory up. Graphs must not be replayed afterwards. Repeatable.
        Until then the memory that graphs use stays, even if nothing refers to this any more. Raises as :meth:`flush`.

        >>> import torch
        >>> from engram import DeviceReplay, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> if torch.cuda.is_available():
        ...     DeviceReplay(rb, "cuda").close()
        """
        if not self._closed:
            self._closed = True
            try:
                self._reader.flush("DeviceReplay.close")
            finally:
                for reader in (self._reader, *self._spare, *self._captured):
                    reader.close()

    def _sends(self, index: object, priority: object, generation: Tensor | None) -> bool:
        """Send priorities of a batch, if all are on the device. False: those before are in the buffer then."""
        last = self._last
        known = generation if generation is not None or last is None or index is not last[0] else last[1]
        given = self._reader.on_device(index, priority, known)
        if not given or self._reader.updates is None:
            self.flush()
            return False
        try:
            self.update_priority(given[0], given[1], generation=given[2])
        except Changed:
            self.flush()
            return False
        return True


class Replays:
    """The :class:`DeviceReplay` objects of a buffer, made when they are asked for."""

    def __init__(self, rows: DeviceReadable) -> None:
        self._rows = rows
        #: By device and size of batches.
        self.made: dict[tuple[torch.device, int], DeviceReplay] = {}
        #: Why there is none, and the state of the buffer for which that is so.
        self._refused: dict[tuple[torch.device, int], tuple[str, object]] = {}

    def sample(self, device: torch.device, n: int, return_info: bool) -> object:
        """A batch that the device reads. None: the host must draw it.

        Raises ``RuntimeError``: it must, and a graph is being captured; or this was not called before with this device and size.
        """
        key, in_graph = (device, n), Accelerator(device).capturing()
        why, state = self._refused.get(key, ("call it once before the capture, which registers the memory", None))
        if not in_graph and key not in self.made and (state is None or state != self._rows.state()):
            try:
                self.made[key] = DeviceReplay(self._rows, device, n)
            except RuntimeError as error:
                self._refused[key] = str(error.__cause__ or error), self._rows.state()
        if key in self.made:
            try:
                return self.made[key].sample(return_info)
            except Changed:
                self.made.pop(key).close()
                return self.sample(device, n, return_info)
        if in_graph and (self._rows.store is None or self._rows.store.is_native):
            raise RuntimeError(
                f"sample: device: expected rows that {device} can read by itself while a graph is captured, got a buffer that does not "
                f"allow it: {why}."
            )
        return None

    def update(self, index: object, priority: object, generation: Tensor | None) -> bool:
        """Send priorities of a batch to the buffer. False: the host must apply them; those before are applied."""
        return any(replay._sends(index, priority, generation) for replay in self.made.values())  # noqa: SLF001 - it is in this module

    def close(self) -> None:
        """Apply the priorities that are under way, and give the memory up. A failure is a warning."""
        while self.made:
            try:
                self.made.popitem()[1].close()
            except (PriorityError, WriterStalled) as error:
                warn(f"close: {error}")
