"""Updates of fields in the background, in the order in which they were submitted, and before what is drawn afterwards."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Protocol

from engram._support import fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.buffer.field_updates import ConditionalUpdateResult
    from engram.buffer.wiring import Wiring


class Source(Protocol):
    """What batches come from."""

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """What ``ReplayBuffer.sample`` returns."""


class Updated(Protocol):
    """A buffer, or an ensemble of some."""

    _reading: Source
    _wiring: Wiring
    update_if_present: Callable[..., ConditionalUpdateResult]

    @property
    def service_backend(self) -> str:
        """Where it runs."""


class AfterUpdates:
    """Batches that are drawn after the updates that were submitted before."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.after_fork()
        fork.registered(self)

    def after_fork(self) -> None:
        """In a child: the thread is its parent's, and so is what it has to do."""
        self._lock = fork.lock()
        self._submitted: deque[Future[ConditionalUpdateResult]] = deque()
        self._thread = ThreadPoolExecutor(1, "engram-updates")

    def submit(self, update: Callable[[], ConditionalUpdateResult]) -> Future[ConditionalUpdateResult]:
        """Have an update made behind those that were submitted before."""
        with self._lock:
            future = self._thread.submit(update)
            self._submitted.append(future)
            return future

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """The next batch, as soon as the updates are made. Raises what one of them has raised, once."""
        while self._submitted:
            with self._lock:
                first = self._submitted[0] if self._submitted else None
            if first is not None:
                wait([first])
                self._forget(first)
        return self._source.sample(batch_size, return_info, timeout)

    def _forget(self, update: Future[ConditionalUpdateResult]) -> None:
        with self._lock:
            if not self._submitted or self._submitted[0] is not update:
                return  # another thread has seen to it
            self._submitted.popleft()
        if not update.cancelled() and (error := update.exception()) is not None:
            raise error


def submit_update_if_present(
    self: Updated,
    *,
    index: object,
    generation: object,
    patch: object,
    version_key: object = None,
    version: object = None,
    require_newer: bool = False,
) -> Future[ConditionalUpdateResult]:
    """As :meth:`update_if_present`, but by a thread in the background, which copies what is on an accelerator, too.

    Batches that are prefetched when this is called have the rows as they were; what is sampled afterwards waits for the update, and
    sees it. Updates are made in the order in which they were submitted. What is passed must not be changed before the future is done.

    Returns:
        A ``concurrent.futures.Future`` of what :meth:`update_if_present` returns. What that raises the future has, and the next
        :meth:`sample` raises it once.

    Raises:
        NotImplementedError: the rows are on a server.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    >>> index = rb.extend({"obs": torch.arange(4), "state": torch.zeros(4)})
    >>> generation = rb.writer.generations_of(index)
    >>> future = rb.submit_update_if_present(index=index, generation=generation, patch={"state": torch.ones(4)})
    >>> future.result().updated_count
    4
    """
    if self.service_backend != "direct" or self._wiring.storage.traits.is_remote:
        raise NotImplementedError(
            "submit_update_if_present: expected rows that are here, got a buffer whose rows are on a server. Call update_if_present there."
        )
    reading = self._reading
    if not isinstance(reading, AfterUpdates):
        self._reading = reading = AfterUpdates(reading)
    named = {"index": index, "generation": generation, "patch": patch, "version_key": version_key, "version": version}
    return reading.submit(partial(self.update_if_present, **named, require_newer=require_newer))
