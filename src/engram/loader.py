"""Batches on the learner's device, copied while it works on the ones before."""

from __future__ import annotations

import collections
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engram._devices import existing_device
from engram.nested import map_tensors, tensors
from engram.pinning import HostMemory, Pinning
from engram.samplers import declared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Self

__all__ = ["DeviceLoader", "Streams"]


class Streams:
    """What the loader asks of an accelerator: two streams beside the consumer's, and copies to and from the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HostMemory()
        self._module: Any = torch.get_device_module(device)
        #: Towards the device, and back.
        self.up, self.down = self._module.Stream(device), self._module.Stream(device)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device == self.device

    def current(self) -> Any:
        """The calling thread's stream."""
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """In this block, work is queued on a stream."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def mark(self, stream: Any) -> Any:
        """An event behind all that is queued on a stream."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is queued on a stream from now on wait for an event. The host goes on."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do not reuse a tensor's memory before what is queued on a stream now is done."""
        tensor.record_stream(stream)

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the device, queued on the stream in use."""
        return tensor.to(self.device, non_blocking=True)

    def receive(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, queued on the stream in use."""
        return self.memory.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


class _Ready(NamedTuple):
    batch: Any
    events: tuple[Any, ...]
    """The batch is there when these have come."""


class _Update(NamedTuple):
    event: Any
    """The values are there when it has come; None: they were on the host."""
    index: Any
    priority: Any
    generation: Any


class DeviceLoader:
    """Iterates over the batches of a buffer, on ``device``: the same ones in the same order as ``iter(rb)``.

    On an accelerator a thread draws ahead and copies from pinned memory on a stream of its own. The consumer's stream waits for the
    copy, the host does not; and the batch's memory is not reused before the consumer's work on it is done, whatever becomes of the
    Python objects. On the CPU it passes ``iter(rb)`` through: no thread, nothing ahead.

    Args:
        rb: a buffer with a ``batch_size``. ``pin_memory=True`` saves a copy on the host; without, the loader pins.
        device: where batches are to be. Leaves that are there already stay; other objects than tensors stay as they are.
        depth: batches drawn ahead of the consumer.
        return_info: yield ``(batch, info)``, as ``rb.sample(return_info=True)``.

    Raises:
        RuntimeError: no such device; no ``batch_size``.
        ValueError: ``depth`` below 1.

    A batch shows the rows, and is drawn by the priorities, of up to ``depth`` batches before it is handed out. An iteration that is
    left early has drawn up to ``depth`` batches that nobody sees; the next one draws anew. What drawing raises is raised in its turn,
    and ends the iteration. The draws of a buffer with a ``generator`` are those it would make without the loader; draws from
    torch's default generator come from another thread beside yours. One consumer thread.

    >>> import torch
    >>> from engram import DeviceLoader, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    >>> _ = rb.extend(torch.arange(4))
    >>> [batch.tolist() for batch in DeviceLoader(rb, "cpu")]
    [[0, 1], [2, 3]]
    """

    def __init__(self, rb: Any, device: torch.device | str | int, depth: int = 2, *, return_info: bool = False) -> None:
        if type(depth) is not int:
            raise TypeError(f"DeviceLoader: depth: expected an int, got {type(depth).__name__}.")
        if depth < 1:
            raise ValueError(f"DeviceLoader: depth: expected at least 1 batch, got {depth}.")
        self.device = existing_device(device, "DeviceLoader: device")
        if rb.batch_size is None:
            raise RuntimeError("DeviceLoader: expected a buffer with a batch size: ReplayBuffer(batch_size=…).")
        self.rb = rb
        self.depth = depth
        self.return_info = bool(return_info)
        self._streams = None if self.device.type in ("cpu", "meta") else Streams(self.device)
        self._updates: collections.deque[_Update] = collections.deque()
        self._runs: weakref.WeakSet[_Run] = weakref.WeakSet()

    # ---- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Batches from now on. Priorities whose copies have arrived are applied before each."""
        if self._streams is None:
            return self._passed_through()
        run = _Run(self._drawn, self._streams, self.depth)
        self._runs.add(run)
        return self._handed_out(run)

    def _drawn(self) -> Iterator[Any]:
        """Batches as the buffer makes them."""
        if not self.return_info:
            yield from self.rb
            return
        sampler = declared(self.rb.sampler)
        sampler.ran_out = False
        while True:
            yield self.rb.sample(return_info=True)
            if sampler.ran_out:
                return

    def _passed_through(self) -> Iterator[Any]:
        for batch in self._drawn():
            if all(leaf.device == self.device for leaf in tensors(batch)):
                yield batch
            else:
                yield map_tensors(batch, lambda leaf: leaf.to(self.device), device=self.device)

    def _handed_out(self, run: _Run) -> Iterator[Any]:
        streams = self._streams
        assert streams is not None
        try:
            while True:
                self._apply()
                ready = run.take()
                if ready is None:
                    return
                consumer = streams.current()
                for event in ready.events:
                    streams.wait(consumer, event)
                for leaf in tensors(ready.batch):
                    if streams.holds(leaf):
                        streams.keep(leaf, consumer)
                yield ready.batch
        finally:
            run.close()

    # ---- priorities ----------------------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any, *, generation: Any = None) -> None:
        """``rb.update_priority`` of values that may be on the device, without waiting for them.

        They are copied to pinned memory behind the work that computes them, and applied, in the order of the calls, once they have
        arrived: by the next batch, update or :meth:`flush` after that. Values on the host with none before them are applied at once.

        Args:
            index, priority, generation: as for ``rb.update_priority``. They may be changed or freed afterwards.

        Raises:
            PriorityError, RowError, RuntimeError: what an update raised that is applied now, this one or one before; that update
                is dropped, the others stay.
        """
        streams = self._streams
        values = (index, priority, generation)
        found = [] if streams is None else [leaf for leaf in tensors(values) if streams.holds(leaf)]
        if streams is None or not found:
            event = None
            if self._updates:
                values = map_tensors(values, torch.clone, device=None)
        else:
            behind = streams.mark(streams.current())
            streams.wait(streams.down, behind)
            with streams.on(streams.down):
                values = map_tensors(
                    values, lambda leaf: streams.receive(leaf) if streams.holds(leaf) else leaf.clone(), device=None
                )
            for leaf in found:
                streams.keep(leaf, streams.down)
            event = streams.mark(streams.down)
        self._updates.append(_Update(event, *values))
        self._apply()

    def update_tensordict_priority(self, data: Any) -> None:
        """``rb.update_tensordict_priority`` of a batch on the device, as :meth:`update_priority`.

        Raises:
            KeyError: no ``priority_key``.
        """
        key = self.rb.priority_key
        priority = data.get(key, None)
        if priority is None:
            raise KeyError(
                f"update_tensordict_priority: expected the key {key!r}, got {sorted(map(str, data.keys()))}."
            )
        self.update_priority(data.get("index"), priority, generation=data.get("index_generation", None))

    def flush(self) -> None:
        """Wait for all priorities that were handed over, and apply them. Raises: as :meth:`update_priority`."""
        self._apply(wait=True)

    def _apply(self, *, wait: bool = False) -> None:
        """Apply updates in order, until one has not arrived."""
        while self._updates:
            event = self._updates[0].event
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            update = self._updates.popleft()
            self.rb.update_priority(update.index, update.priority, generation=update.generation)

    # ---- life ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End iterations and their threads, and apply all priorities. Repeatable. Raises: as :meth:`update_priority`."""
        for run in list(self._runs):
            run.close()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Run:
    """One iteration: a thread that draws and copies, at most ``depth`` batches ahead."""

    def __init__(self, drawn: Callable[[], Iterator[Any]], streams: Streams, depth: int) -> None:
        work = _Work(drawn, streams, depth)
        self._work = work
        self._thread = threading.Thread(target=work.run, name="engram-device-loader", daemon=True)
        self._thread.start()
        # Before the interpreter goes, too: a thread that is drawing then must not be cut off.
        self._end = weakref.finalize(self, _end, work, self._thread)

    def take(self) -> _Ready | None:
        """The next batch, once it was queued for copying; None at the end."""
        if not self._end.alive:
            return None
        found = self._work.ready.get()
        self._work.slots.release()
        if isinstance(found, BaseException):
            raise found
        ready: _Ready | None = found
        return ready

    def close(self) -> None:
        self._end()


class _Work:
    """What the thread does; it does not know its iteration, which ends when nobody refers to that."""

    def __init__(self, drawn: Callable[[], Iterator[Any]], streams: Streams, depth: int) -> None:
        self.drawn = drawn
        self.streams = streams
        self.pinning = Pinning(streams.memory)
        self.ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.slots = threading.Semaphore(depth)
        self.stopped = False

    def run(self) -> None:
        try:
            batches = self.drawn()
            while self._has_slot():
                batch = next(batches, None)
                if batch is None:
                    break
                self.ready.put(self._sent(batch))
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self.ready.put(error)
        self.ready.put(None)

    def _has_slot(self) -> bool:
        self.slots.acquire()
        return not self.stopped

    def _sent(self, batch: Any) -> _Ready:
        streams = self.streams
        # What is on the device already was made on this thread's stream, which the stream of the copies does not wait for.
        there = any(streams.holds(leaf) for leaf in tensors(batch))
        events = [streams.mark(streams.current())] if there else []
        pinned = self.pinning(batch)
        with streams.on(streams.up):
            moved = map_tensors(
                pinned, lambda leaf: leaf if streams.holds(leaf) else streams.send(leaf), device=streams.device
            )
        return _Ready(moved, (*events, streams.mark(streams.up)))


def _end(work: _Work, thread: threading.Thread) -> None:
    work.stopped = True
    work.slots.release()
    if thread is not threading.current_thread():
        thread.join()
