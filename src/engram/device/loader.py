"""Batches on the learner's device, copied while it works on the previous ones."""

from __future__ import annotations

import collections
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engram._checks import check_count
from engram._devices import existing_device
from engram.device.pinning import Pinning
from engram.nested import map_tensors, tensors
from engram.samplers import declared
from engram.store.device.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from tensordict import TensorDictBase

__all__ = ["DeviceLoader", "Streams"]

#: What the loader's accelerator was called before.
Streams = Accelerator


class _Ready(NamedTuple):
    batch: object
    events: tuple[torch.Event, ...]
    """The batch is complete when these have occurred."""


class _Update(NamedTuple):
    event: torch.Event | None
    """The values are complete when it has occurred; None: they were on the host."""
    rows: object
    priority: object
    generation: object


class DeviceLoader:
    """Iterates over the batches of a buffer on ``device``: the same batches in the same order as ``iter(rb)``.

    On an accelerator, a thread draws ahead and copies from pinned memory on its own stream. The consumer's stream waits for the
    copy; the host does not. The memory of a batch is not reused before the consumer's work on it has ended, even if the batch
    goes out of scope. On the CPU, the loader passes ``iter(rb)`` through, without a thread and without drawing ahead.

    Args:
        rb: a buffer with a ``batch_size``. ``pin_memory=True`` saves a copy on the host; without it, the loader pins.
        device: the device of the batches. Leaves that are already there are not copied; objects other than tensors are not
            changed.
        depth: the number of batches drawn ahead of the consumer.
        return_info: yield ``(batch, info)``, as ``rb.sample(return_info=True)``.

    Raises:
        RuntimeError: there is no such device, or the buffer has no ``batch_size``.
        TypeError: ``depth`` is not an int.
        ValueError: ``depth`` is below 1.

    A batch shows the rows and follows the priorities of up to ``depth`` batches before it is returned. An iteration that is left
    early has drawn up to ``depth`` batches that are discarded; the next iteration draws new ones. An error while drawing is
    raised when its batch is due, and ends the iteration. A buffer with a ``generator`` draws what it would draw without the
    loader; draws from torch's default generator happen in the loader's thread. Only one thread may consume.

    >>> import torch
    >>> from engram import DeviceLoader, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    >>> _ = rb.extend(torch.arange(4))
    >>> [batch.tolist() for batch in DeviceLoader(rb, "cpu")]
    [[0, 1], [2, 3]]
    """

    def __init__(self, rb: Any, device: torch.device | str | int, depth: int = 2, *, return_info: bool = False) -> None:
        self.depth = check_count("DeviceLoader: depth", depth, "batch")
        self.device = existing_device(device, "DeviceLoader: device")
        try:
            batch_size = rb.batch_size
        except AttributeError as error:
            raise TypeError(f"DeviceLoader: rb: expected a buffer, got {type(rb).__name__}.") from error
        if batch_size is None:
            raise RuntimeError("DeviceLoader: expected a buffer with a batch size: ReplayBuffer(batch_size=…).")
        self.rb = rb
        self.return_info = bool(return_info)
        self._streams = None if self.device.type in ("cpu", "meta") else Accelerator(self.device)
        self._updates: collections.deque[_Update] = collections.deque()
        self._runs: weakref.WeakSet[_Run] = weakref.WeakSet()

    def __repr__(self) -> str:
        depth, info = f", depth={self.depth}" * (self.depth != 2), ", return_info=True" * self.return_info
        return f"DeviceLoader(batch_size={self.rb.batch_size}, device='{self.device}'{depth}{info})"

    # ---- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate over new batches. Before each, priorities whose copies have arrived are applied."""
        if self._streams is None:
            return self._passed_through()
        run = _Run(self._drawn, self._streams, self.depth)
        self._runs.add(run)
        batches = self._handed_out(run)
        weakref.finalize(batches, run.close)  # also before the interpreter ends, which must not interrupt a draw
        return batches

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
            if all(leaf.device == self.device for leaf in tensors(batch)):
                yield batch
            else:
                yield map_tensors(batch, lambda leaf: leaf.to(self.device), device=self.device)

    def _handed_out(self, run: _Run) -> Iterator[object]:
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

    def update_priority(self, index: object, priority: object, *, generation: Tensor | None = None) -> None:
        """``rb.update_priority`` with values that may be on the device, without waiting for them.

        The values are copied to pinned memory after the work that computes them. They are applied in the order of the calls,
        once they have arrived: by the next batch, update or :meth:`flush`. Values on the host are applied at once if no earlier
        update is pending.

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
            streams.wait(streams.current(), event)  # the caller may overwrite them in place
        self._updates.append(_Update(event, *values))
        self._apply()

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
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
            raise KeyError(
                f"update_tensordict_priority: expected the key {key!r}, got {sorted(map(str, data.keys()))}."
            )
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
        for run in list(self._runs):
            run.close()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Run:
    """The work of one iteration: a thread that draws and copies, at most ``depth`` batches ahead.

    It has no reference to the iterator, so that the iterator can be garbage-collected.
    """

    def __init__(self, drawn: Callable[[], Iterator[object]], streams: Accelerator, depth: int) -> None:
        self.drawn = drawn
        self.streams = streams
        self.pinning = Pinning(streams.memory)
        self.ready: queue.SimpleQueue[_Ready | BaseException | None] = queue.SimpleQueue()
        self.slots = threading.Semaphore(depth)
        self.stopped = False
        self.thread = threading.Thread(target=self.run, name="engram-device-loader", daemon=True)
        self.thread.start()

    def take(self) -> _Ready | None:
        """The next batch, whose copy is queued; None at the end."""
        if self.stopped:
            return None
        found = self.ready.get()
        self.slots.release()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the thread. Repeatable."""
        self.stopped = True
        self.slots.release()
        if self.thread is not threading.current_thread():
            self.thread.join()

    # ---- in the thread -------------------------------------------------------------------------------------------------

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

    def _sent(self, batch: object) -> _Ready:
        streams = self.streams
        # Leaves that are already on the device were computed on this thread's stream; the stream of the copies does not wait for it.
        there = any(streams.holds(leaf) for leaf in tensors(batch))
        events = [streams.mark(streams.current())] if there else []
        pinned = self.pinning(batch)
        with streams.on(streams.up):
            moved = map_tensors(
                pinned, lambda leaf: leaf if streams.holds(leaf) else streams.send(leaf), device=streams.device
            )
        return _Ready(moved, (*events, streams.mark(streams.up)))
