"""Batches that an accelerator reads from a store in host memory by itself: the host copies nothing, and waits for nothing."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

import torch

from engram._support import fork, native
from engram.device.pinning import Block, Blocks
from engram.errors import PriorityError, WriterStalled
from engram.format.files import FIXED_BYTES
from engram.store.device.chain import Batch, Chain, Kind, ResidentRows, UpdateRing, columns_of, signed
from engram.store.device.registry import REGISTRY, NotRegistered, Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from engram.store import Store
    from engram.store.device.accelerator import Accelerator
    from engram.store.priorities import PriorityIndex

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
    n: int
    """How many of its rows are meant: the first ones."""
    is_last: bool
    """Whether it is the last one of a pass over the rows."""
    event: torch.Event | None
    """When it has come, the batch has been read, on a stream that the consumer's does not wait for yet. None: on the consumer's."""


class _Commands:
    """A ring in host memory: of each batch its key, where it goes, and where its ranks are. A captured chain reads them."""

    def __init__(self, accelerator: Accelerator, batch_size: int, *, with_ranks: bool) -> None:
        self.memory = torch.zeros(_SLOTS * (_WORDS + batch_size * with_ranks), dtype=torch.int64, device="cpu")
        self._words = self.memory.numpy().data
        self._accelerator, self._room = accelerator, batch_size
        self.number, self._behind = 0, list[torch.Event]()
        """Of the next batch."""
        self.queueing = False
        """Whether a batch was about to be queued when the number was written last: it may be, or may not."""
        self.address = 0
        """Where the device sees the memory."""

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
        self.transport = "direct" if resident is None else "resident"
        """How rows get to the device: as ``DeviceLoader(transport=)``."""
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
            seen = dict(zip(map(torch.Tensor.data_ptr, memory), self._registered.addresses, strict=True))
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
        self.nbytes = self._chain.layout.nbytes
        """Of a batch."""
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
        found = [one for one in values if isinstance(one, torch.Tensor) and self.accelerator.holds(one)]
        fits = len(found) == len(values) and len({one.numel() for one in found}) == 1
        return found if fits and found[0].numel() <= self.batch_size else []

    def send(self, rows: Tensor, tickets: Tensor, priorities: Tensor) -> None:
        """Queue new priorities, all ``[n]`` on the device, on the stream in use. Raises as :meth:`UpdateRing.send`; ``Changed``."""
        assert self.updates is not None  # rows are drawn by priority
        with self._queueing():
            self.updates.send(
                rows.contiguous(), tickets.contiguous(), priorities.detach().to(torch.float32).contiguous()
            )

    def check(self, call: str) -> None:
        """Raise ``PriorityError`` for priorities that were none, since the last time."""
        if self.updates is not None:
            before, self._refused = self._refused, self.updates.stats.refused  # read once: a thread counts on
            refused = self._refused - before
            if refused:
                raise PriorityError(
                    f"{call}: expected finite priorities of at least 0, got {refused} others. They were left out."
                )

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
            raise WriterStalled(
                f"{call}: expected priorities to be in the buffer by now, got none for too long. Try again."
            )
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
