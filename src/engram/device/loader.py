"""Batches on the learner's device, copied while it works on the previous ones."""

from __future__ import annotations

import collections
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from engram._support import checks, closing, native, nested, tensordicts, words
from engram._support.devices import existing_device
from engram.device.direct import Changed, DirectReader, NotDirect, Place, Queued, Readable
from engram.device.pinning import Blocks, Drawn, Sent
from engram.samplers import declared
from engram.store.device.accelerator import Accelerator
from engram.store.device.chain import NoRoom, ResidentRows
from engram.store.store import Store

__all__ = ["DeviceLoader", "Streams"]

#: The name that programs of engram 0.1 import.
Streams = Accelerator


class _Update(NamedTuple):
    #: The values are complete when it has occurred; None: they were on the host.
    event: torch.Event | None
    rows: object
    priority: object
    generation: object


class DeviceLoader(closing.Closes):
    """Iterates over the batches of a buffer on ``device``: the same batches in the same order as ``iter(rb)``.

    A CUDA device reads the rows of a store in RAM or in shared memory by itself, where nothing of a batch needs the host:
    ``docs/gpu.md`` says what does. Batches are then read on the consumer's stream, when they are asked for, and a row that is written
    before the device gets there may show. Epochs count rows when they are asked for. With a ``depth`` above 1, batches of at least 512 KiB
    are read one ahead, on a stream of their own, while the consumer works on the one before.

    Otherwise a batch is drawn into one block of pinned memory, and one copy brings it to the device. The host does not
    wait for the copy. Small batches are drawn when they are asked for, and copied on the consumer's stream. Where drawing takes
    long, a thread draws ahead and copies on a stream of its own, which the consumer's stream waits for. There is a thread if ``depth``
    is above 1, and the first batch has at least 512 KiB or both of the first two took at least a millisecond to draw: because of
    transforms, ``collate_fn``, lists of rows, or a connection. This is decided once for all iterations: :attr:`draws_ahead`. The
    memory of a batch is not reused before the consumer's work on it has ended, even if the batch goes out of scope. On the CPU, the
    loader passes ``iter(rb)`` through, without a thread and without drawing ahead.

    Args:
        rb: a buffer with a ``batch_size``. ``pin_memory`` makes no difference.
        device: the device of the batches. Leaves that are already there are not copied; objects other than tensors are not
            changed.
        depth: the most batches drawn ahead of the consumer, by a thread; 1: no thread.
        return_info: yield ``(batch, info)``, as ``rb.sample(return_info=True)``.
        transport: ``"direct"``: the device reads by itself, or an error says why it cannot. ``"block"``: the host copies. None: the
            former where it is possible. ``"resident"``: rows stay in the device's memory, which must have room for all; rows in a
            directory are sent by the host, those that changed. On the CPU, and on ``meta``, there is none of these.

    Raises:
        RuntimeError: there is no such device; the buffer has no ``batch_size``; or the ``transport`` that you ask for is not possible,
            with the cause.
        TypeError: ``depth`` is not an int.
        ValueError: ``depth`` is below 1; there is no such ``transport``, or not to this device.

    The tensors of a batch share the memory of one block on the device: one that you keep for long keeps all of it, so keep a
    ``clone()``. With a thread, a batch shows the rows and follows the priorities of up to ``depth`` batches before it is returned, and
    an iteration that is left early has drawn up to ``depth`` batches that are discarded; the next iteration draws new ones. An error
    while drawing is raised when its batch is due, and ends the iteration. A buffer with a ``generator`` draws what it would draw
    without the loader; a thread's draws from torch's default generator happen in it. Only one thread may consume.

    >>> import torch
    >>> from engram import DeviceLoader, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    >>> _ = rb.extend(torch.arange(4))
    >>> [batch.tolist() for batch in DeviceLoader(rb, "cpu")]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self, rb: Any, device: Place, depth: int = 2, *, return_info: bool = False, transport: str | None = None
    ) -> None:
        self.depth = checks.check_count("DeviceLoader: depth", depth, "batch")
        self.device = existing_device(device, "DeviceLoader: device")
        try:
            batch_size = rb.batch_size
        except AttributeError as error:
            raise TypeError(f"DeviceLoader: rb: expected a buffer, got {type(rb).__name__}.") from error
        if batch_size is None:
            raise RuntimeError("DeviceLoader: expected a buffer with a batch size: ReplayBuffer(batch_size=…).")
        self.rb = rb
        self.return_info = bool(return_info)
        self._asked = _checked(transport, self.device)
        self._streams = None if self.device.type in ("cpu", "meta") else Accelerator(self.device)
        self._readable = rb.device_readable() if self._may_read(rb) else None
        self._direct: DirectReader | None = None
        self._resident: ResidentRows | None = None
        #: Why the host copies, and the state of the buffer for which that is so.
        self._refused: tuple[object, str | None] = (None, None)
        self._blocks = None if self._streams is None else Blocks(self._streams)
        self._thread = _ThreadRule(self.depth if self._streams is not None else 1)
        self._counts = dict.fromkeys(("batches", "bytes", "spilled"), 0)
        self._updates: collections.deque[_Update] = collections.deque()
        self._runs: weakref.WeakSet[_Run] = weakref.WeakSet()
        self._closings = 0  # each ends the iterations that have begun
        if self._readable is not None:
            self._reader()

    def __repr__(self) -> str:
        depth, info = f", depth={self.depth}" * (self.depth != 2), ", return_info=True" * self.return_info
        ahead = "" if self.draws_ahead is None else f", draws_ahead={self.draws_ahead}"
        how = "" if self._streams is None else f", transport='{self.transport}'{ahead}"
        return f"DeviceLoader(batch_size={self.rb.batch_size}, device='{self.device}'{depth}{info}{how})"

    def _may_read(self, rb: object) -> TypeGuard[Readable]:
        """Whether it is worth asking whether the device can read by itself."""
        if self._streams is None or self._asked == "block":
            return False
        if self._asked is not None and not isinstance(rb, Readable):
            raise RuntimeError(
                f"DeviceLoader: transport: {self._asked!r} expects a ReplayBuffer, got {type(rb).__name__}. Leave it out."
            )
        return isinstance(rb, Readable)

    @property
    def transport(self) -> str:
        """How rows get to the device: ``"direct"``: it reads them by itself; ``"resident"``: they stay there once they were read;
        ``"block"``: the host copies them into one block per batch; ``"none"``: they stay in the host's memory, or go nowhere (``meta``).
        It may change with the buffer, at the next batch.
        """
        return "none" if self._streams is None else "block" if self._direct is None else self._direct.transport

    @property
    def draws_ahead(self) -> bool | None:
        """Whether a thread draws ahead of the consumer. None: not decided yet, for want of a first or second batch."""
        return self._thread.needed

    def stats(self) -> dict[str, object]:
        """What went through the loader since it was made.

        ``transport``; ``batches``: batches handed out; ``bytes``: of the blocks of batches that were copied, or that the device read;
        ``spilled``: batches that were larger than their block, which cost a copy on the host. Blocks grow with them, and the first batch
        has none. ``reason``: why the device does not read by itself, where that was tried. Where it does: ``redraws``: rows that were
        read or drawn again; ``repeated``: places that repeat another place's row; ``missing``: places without a row; ``resident``: places
        whose row was on the device already, with that transport and without files; ``dropped``: priorities for which there was no room
        on the way. These wait for the device, and count from the last change of the buffer on.

        >>> import torch
        >>> from engram import DeviceLoader, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = rb.extend(torch.arange(4))
        >>> DeviceLoader(rb, "cpu").stats()
        {'transport': 'none', 'batches': 0, 'bytes': 0, 'spilled': 0}
        """
        found: dict[str, object] = {"transport": self.transport, **self._counts}
        if self._direct is not None:
            found |= {**self._direct.counts, **found}
            if self._direct.updates is not None:
                found["dropped"] = int(self._direct.updates.counters[7])
        return found if self._refused[1] is None else {**found, "reason": self._refused[1]}

    # ---- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over new batches. Before each, priorities whose copies have arrived are applied."""
        if self._streams is None or self._blocks is None:
            return self._passed_through()
        return self._copied() if self._readable is None else self._read_by_device(self._closings)

    def _copied(self) -> Iterator[object]:
        """Batches that the host copies."""
        assert self._streams is not None and self._blocks is not None  # noqa: PT018 - there is an accelerator
        run = _Run(self._drawn(), self._streams, self._blocks, self._thread)
        self._runs.add(run)
        batches = self._handed_out(run)
        weakref.finalize(batches, run.close)  # also before the interpreter ends, which must not interrupt a draw
        return batches

    def _reader(self) -> DirectReader | None:
        """What reads the next batch; None: the host does.

        Raises ``RuntimeError``: the device cannot, and was asked to. What :meth:`Registered.use` raises in a child of a fork.
        """
        rows, streams = self._readable, self._streams
        if rows is None or streams is None or (rows.store is None and rows.refusal is None):
            return None
        before = self._direct
        if before is not None and before.is_current():
            return before
        state = rows.state()
        if self._refused[1] is not None and self._refused[0] == state:
            return None
        try:
            if self._asked == "resident" and rows.store is not None:
                self._make_resident(rows.store, streams)
            fresh = DirectReader(rows, self.rb.batch_size, streams, ahead=self.depth > 1, resident=self._resident)
        except (NotDirect, NoRoom) as error:
            if self._asked is not None:
                raise RuntimeError(
                    f"DeviceLoader: transport={self._asked!r}: expected rows that {self.device} can read by itself, got a buffer that does "
                    f"not allow it: {error}. Use transport='block', or leave it out."
                ) from error
            self._refused, fresh = (state, str(error)), None
            if rows.refusal is None and not rows.on_disk and self.device.type == "cuda":
                words.warn(
                    f"DeviceLoader: {self.device} cannot read the rows by itself: {error}. The host copies them (transport='block')."
                )
        else:
            self._refused = (None, None)
        self._read_by(fresh)
        return fresh

    def _make_resident(self, store: Store, streams: Accelerator) -> None:
        """Have memory on the device for all rows. Raises ``NoRoom``."""
        if self._resident is None or not self._resident.fits(store):
            self._read_by(None)  # memory is given back before more is taken
            self._resident = None
            self._resident = ResidentRows(store, streams)

    def _read_by(self, fresh: DirectReader | None) -> None:
        """Read by another one, or none. Priorities that are under way are applied, and memory is given back."""
        before, self._direct = self._direct, fresh
        if before is not None:
            try:
                before.flush("DeviceLoader")
            finally:
                before.close()

    def _read_by_device(self, begun: int) -> Iterator[object]:
        """As :meth:`_drawn`: where the buffer changes so that the device cannot go on, the host does. ``begun``: of :attr:`_closings`."""
        rows, streams = self._readable, self._streams
        assert rows is not None and streams is not None  # noqa: PT018 - there is a reader
        rows.begin()
        why = "each replay would bring the same batch; DeviceReplay is for graphs"
        ahead = collections.deque[tuple[DirectReader, Queued]]()
        while self._closings == begun:
            streams.check_not_capturing("DeviceLoader", why)
            if not (ahead and ahead[-1][1].is_last):
                reader = self._reader()
                if reader is not None:
                    self._apply()
                    try:
                        ahead.append((reader, reader.queue()))
                    except Changed:
                        continue
                    except Exception:
                        if not ahead:  # else it is raised when that batch is due
                            raise
                    else:
                        if len(ahead) == 1 and reader.reads_ahead:
                            continue
                elif not ahead:
                    yield from self._copied()
                    return
            reader, queued = ahead.popleft()
            self._counts["batches"] += 1
            self._counts["bytes"] += reader.nbytes
            yield reader.hand_out(queued, return_info=self.return_info)
            if queued.is_last:
                return

    def _drawn(self) -> Iterator[object]:
        """Batches as the buffer returns them."""
        if not self.return_info:
            yield from self.rb
            return
        sampler = declared(self.rb.sampler)
        sampler.ran_out = False
        while True:
            yield self.rb.sample(return_info=True)
            if sampler.ran_out:
                return

    def _passed_through(self) -> Iterator[object]:
        for batch in self._drawn():
            self._counts["batches"] += 1
            if all(leaf.device == self.device for leaf in nested.tensors(batch)):
                yield batch
            else:
                yield nested.map_tensors(batch, lambda leaf: leaf.to(self.device), device=self.device)

    def _handed_out(self, run: _Run) -> Iterator[object]:
        streams = self._streams
        assert streams is not None
        try:
            while True:
                self._apply()
                ready = run.take()
                if ready is None:
                    return
                if ready.events:
                    consumer = streams.current()
                    for event in ready.events:
                        streams.wait(consumer, event)
                    for tensor in ready.memory:
                        streams.keep(tensor, consumer)
                for name, n in zip(self._counts, (1, ready.nbytes, ready.spilled), strict=True):
                    self._counts[name] += n
                yield ready.batch
        finally:
            run.close()

    # ---- priorities ----------------------------------------------------------------------------------------------------

    def update_priority(self, index: object, priority: object, *, generation: torch.Tensor | None = None) -> None:
        """``rb.update_priority`` with values that may be on the device, without waiting for them.

        The values are copied to pinned memory after the work that computes them. They are applied in the order of the calls,
        once they have arrived: by the next batch, update or :meth:`flush`. Values on the host are applied at once if no earlier
        update is pending. Where the device reads by itself, a native thread applies float32 priorities of whole rows; if it falls
        behind, some are dropped.

        Args:
            index, priority, generation: as for ``rb.update_priority``. They may be changed or freed afterwards.

        Raises:
            PriorityError, RowError, RuntimeError: an update that is applied now, this one or an earlier one, failed. It is
                dropped; the others stay.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> from engram import DeviceLoader
        >>> with DeviceLoader(rb, "cpu") as loader:
        ...     loader.update_priority(rows, torch.rand(10))
        """
        if self._sent_back(index, priority, generation):
            return
        streams = self._streams
        values = (index, priority, generation)
        found = [] if streams is None else [leaf for leaf in nested.tensors(values) if streams.holds(leaf)]
        if streams is None or not found:
            event = None
            if self._updates:
                values = nested.map_tensors(values, torch.clone, device=None)
        else:
            behind = streams.mark(streams.current())
            streams.wait(streams.down, behind)
            with streams.on(streams.down):
                values = nested.map_tensors(
                    values, lambda leaf: streams.receive(leaf) if streams.holds(leaf) else leaf.clone(), device=None
                )
            for leaf in found:
                streams.keep(leaf, streams.down)
            event = streams.mark(streams.down)
            streams.wait(streams.current(), event)  # the caller may overwrite them in place
        self._updates.append(_Update(event, *values))
        self._apply()

    def _sent_back(self, index: object, priority: object, generation: object) -> bool:
        """Send priorities through the ring of the device that reads by itself. False: there is none, or they are not all there."""
        reader = self._direct
        if reader is None or reader.updates is None:
            return False
        given = reader.on_device(index, generation, priority)
        if not given or self._updates:
            reader.flush("update_priority")  # those before come first
            return False
        try:
            reader.send(*(one.reshape(-1) for one in given))
        except Changed:
            reader.flush("update_priority")
            return False
        reader.check("update_priority")
        return True

    def update_tensordict_priority(self, data: tensordicts.TensorDictBase) -> None:
        """``rb.update_tensordict_priority`` with a batch on the device, as :meth:`update_priority`.

        Raises:
            KeyError: the batch has no ``priority_key``.
            PriorityError, RowError, RuntimeError: as :meth:`update_priority`.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> storage = LazyTensorStorage(100)
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=4)
        >>> from engram import DeviceLoader
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(5, 3)}, [5]))
        >>> with DeviceLoader(rb, "cpu") as loader:
        ...     batch = next(iter(loader))
        ...     batch["td_error"] = torch.rand(4)  # of your model
        ...     loader.update_tensordict_priority(batch)
        """
        key = self.rb.priority_key
        priority = data.get(key, None)
        if priority is None:
            raise KeyError(f"update_tensordict_priority: expected the key {key!r}, got {[*map(str, data.keys())]}.")
        self.update_priority(data.get("index"), priority, generation=data.get("index_generation", None))

    def flush(self) -> None:
        """Wait for all pending priorities, and apply them. Raises: as :meth:`update_priority`.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> from engram import DeviceLoader
        >>> with DeviceLoader(rb, "cpu") as loader:
        ...     loader.update_priority(rows, torch.rand(10))
        ...     loader.flush()  # the priorities are in the buffer
        """
        self._apply(wait=True)
        if self._direct is not None:
            self._direct.flush("flush")

    def _apply(self, *, wait: bool = False) -> None:
        """Apply the updates that have arrived, in order."""
        while self._updates:
            event = self._updates[0].event
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            update = self._updates.popleft()
            self.rb.update_priority(update.rows, update.priority, generation=update.generation)

    # ---- life ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End iterations and their threads, and apply all priorities. Repeatable. Raises: as :meth:`update_priority`.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> from engram import DeviceLoader
        >>> loader = DeviceLoader(rb, "cpu")
        >>> batch = next(iter(loader))
        >>> loader.close()
        """
        self._closings += 1
        for run in list(self._runs):
            run.close()
        try:
            self.flush()
        finally:
            if self._direct is not None:
                self._direct.close()
            self._direct = self._resident = None


def _checked(transport: str | None, device: torch.device) -> str | None:
    """The way that the user asks for. Raises ``ValueError``: it does not exist, or does not lead to that device."""
    checks.check_choice("DeviceLoader: transport", transport, (None, "block", "direct", "resident"))
    if transport is not None and device.type in ("cpu", "meta"):
        raise ValueError(
            f"DeviceLoader: transport: expected an accelerator for {transport!r}, got device='{device}', where batches are handed on "
            "as they are. Leave it out."
        )
    return transport


class _ThreadRule:
    """Whether a thread draws ahead. Decided once, by the first batches, and then for good."""

    #: A batch that takes less is drawn before a thread would be awake, and Python's lock taken over twice.
    SECONDS = 1e-3
    BYTES = native.PARALLEL_BYTES

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.needed: bool | None = False if depth == 1 else None
        self._first: float | None = None

    def note(self, nbytes: int, seconds: float) -> None:
        """A batch was drawn without one. The second decides, as much is made and loaded by the first; bytes are known at once."""
        if self.needed is not None:
            return
        if nbytes >= self.BYTES:
            self.needed = True
        elif self._first is not None:
            self.needed = min(self._first, seconds) >= self.SECONDS
        self._first = seconds


class _Run:
    """The work of one iteration: draws and copies, in a thread at most ``depth`` batches ahead or when a batch is taken.

    It has no reference to the iterator, so that the iterator can be garbage-collected.
    """

    def __init__(self, batches: Iterator[object], streams: Accelerator, blocks: Blocks, rule: _ThreadRule) -> None:
        self.batches = batches
        self.streams = streams
        self.blocks = blocks
        self.rule = rule
        self.ready: queue.SimpleQueue[Sent | BaseException | None] = queue.SimpleQueue()
        self.slots = threading.Semaphore(rule.depth)
        self.stopped = False
        self.thread: threading.Thread | None = None
        self._start_if_needed()

    def take(self) -> Sent | None:
        """The next batch, whose copy is queued; None at the end."""
        if self.stopped:
            return None
        self._start_if_needed()
        if self.thread is None:
            drawn = self.blocks.draw(self.batches)
            if drawn is None:
                return None
            ready = self.blocks.send(drawn.batch, drawn.block)
            self.rule.note(ready.nbytes, drawn.seconds)
            return ready
        found = self.ready.get()
        self.slots.release()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the thread. Repeatable."""
        self.stopped = True
        self.slots.release()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _start_if_needed(self) -> None:
        if self.rule.needed and self.thread is None:
            self.thread = threading.Thread(target=self.run, name="engram-device-loader", daemon=True)
            self.thread.start()

    # ---- in the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self.slots.acquire() and not self.stopped:
                drawn = self.blocks.draw(self.batches)
                if drawn is None:
                    break
                self.ready.put(self._sent(drawn))
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self.ready.put(error)
        self.ready.put(None)

    def _sent(self, drawn: Drawn) -> Sent:
        streams = self.streams
        # Leaves that are already on the device were computed on this thread's stream; the stream of the copies does not wait for it.
        there = any(streams.holds(leaf) for leaf in nested.tensors(drawn.batch))
        events = [streams.mark(streams.current())] if there else []
        with streams.on(streams.up):
            sent = self.blocks.send(drawn.batch, drawn.block)
        return sent._replace(events=(*events, streams.mark(streams.up)))
