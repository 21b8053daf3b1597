"""Removers that ask an index of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engram import _native, priorities
from engram.usage import UsageIndex

if TYPE_CHECKING:
    from torch import Tensor

    from engram.removers._base import Removable
    from engram.store import Store


class LowestPriority:
    """The rows of lowest priority go; of equal ones that with the lower number.

    Asks the priorities of the store, as every process has left them. Exact.

    Args:
        index: name of the priorities, as the sampler's ``index=``.

    Raises:
        RuntimeError: when the store is full: it has no such priorities (use a :class:`PrioritizedSampler`), or fewer rows than are to go
            have one above zero (use ``eps`` above 0).

    Cost: O(log rows) per row, natively, with the lock of the priorities held.

    >>> import torch
    >>> from engram import LazyTensorStorage, LowestPriority, PrioritizedSampler, ReplayBuffer
    >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, remover=LowestPriority(), batch_size=2)
    >>> rows = rb.extend(torch.arange(3))
    >>> rb.update_priority(rows, torch.tensor([2.0, 0.5, 1.0]))
    >>> rb.add(torch.tensor(10))
    1
    """

    def __init__(self, index: str = "main") -> None:
        self.index = index

    def choose(self, storage: Removable, n: int) -> Tensor:
        """The ``n`` rows of lowest priority, the lowest first.

        >>> import torch
        >>> from engram import LazyTensorStorage, LowestPriority, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(3))
        >>> rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([2.0, 0.5, 1.0]))
        >>> LowestPriority().choose(rb.storage, 2).tolist()
        [1, 2]
        """
        store = _store_of(storage, type(self).__name__)
        key = (self.index, priorities.KIND)
        index = store.indexes.get(key) or store.indexes.refreshed().get(key)
        if index is None:
            raise RuntimeError(
                f"LowestPriority: expected priorities {self.index!r} in the store, got none. Use a PrioritizedSampler, or name its index."
            )
        rows = _native.empty_rows(n)
        found = index.core.lowest(n, rows.data_ptr())
        if found < n:
            raise RuntimeError(
                f"LowestPriority: expected {n} rows with a priority above zero, got {found}. Use eps above 0, so that no priority is zero."
            )
        return rows

    def __repr__(self) -> str:
        return "LowestPriority()" if self.index == "main" else f"LowestPriority(index={self.index!r})"


class MaxTimesSampled:
    """The rows that were sampled most often go; of equal ones the older.

    Asks the counts of the store, of the samples of all processes: call :meth:`ReplayBuffer.count_usage` before the store is full.

    Exact at each look, not at each write: one look at the counts serves an eighth of the rows, which go one after another from then on. A
    row that is sampled after a look goes where its count of then puts it, and at the next look where its count of that time does.

    Raises:
        RuntimeError: when the store is full: samples are not counted.

    Cost: O(rows) once for every eighth of the rows that is replaced, so O(1) per row on average.

    >>> import torch
    >>> from engram import LazyTensorStorage, MaxTimesSampled, ReplayBuffer, SamplerWithoutReplacement
    >>> sampler = SamplerWithoutReplacement(shuffle=False)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, remover=MaxTimesSampled(), batch_size=1)
    >>> _ = rb.extend(torch.arange(3))
    >>> rb.count_usage()
    >>> _ = rb.sample()
    >>> rb.add(torch.tensor(10))
    0
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        #: Rows in the order in which they go, and the tickets that they had: of those that are left.
        self._rows = self._tickets = torch.empty(0, dtype=torch.int64, device="cpu")

    def choose(self, storage: Removable, n: int) -> Tensor:
        """The ``n`` rows that were sampled most often, the first of them first.

        >>> import torch
        >>> from engram import LazyTensorStorage, MaxTimesSampled, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=4)
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.count_usage()
        >>> MaxTimesSampled().choose(rb.storage, 2).tolist()
        [0, 1]
        """
        store = _store_of(storage, type(self).__name__)
        counts = UsageIndex.in_use(store)
        if counts is None:
            raise RuntimeError(
                "MaxTimesSampled: expected a store that counts samples, got one that does not. Call rb.count_usage() first."
            )
        if store is not self._store:
            self._store, self._rows = store, self._rows[:0]
        rows = self._rows[: len(self._rows)]
        stays = storage.tickets_of(rows[:n]) == self._tickets[: min(n, len(rows))]
        if len(rows) < n or not bool(stays.all()):
            rows = self._look(storage, counts, n)
        chosen = rows[:n]
        self._rows, self._tickets = rows[n:], self._tickets[n:]
        return chosen

    def _look(self, storage: Removable, counts: UsageIndex, n: int) -> Tensor:
        every = torch.arange(storage.extent().capacity, device="cpu")
        tickets = storage.tickets_of(every).numpy()
        times = np.where(
            tickets < 0, -1, counts.counts(every).numpy()
        )  # of one that is just being written: it goes last
        most = min(max(n, len(every) // 8), len(every))
        among = np.flatnonzero(times >= np.partition(times, len(times) - most)[len(times) - most])
        order = among[np.lexsort((tickets[among], -times[among]))][:most]
        self._tickets = torch.from_numpy(tickets[order])
        return torch.from_numpy(order)

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        MaxTimesSampled.__init__(self)

    def __repr__(self) -> str:
        return "MaxTimesSampled()"


def _store_of(storage: Removable, who: str) -> Store:
    if storage.memory is None:
        raise RuntimeError(f"{who}: expected a tensor storage that was written to.")
    return storage.memory
