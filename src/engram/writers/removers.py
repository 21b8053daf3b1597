"""Removers whose order follows from what rows hold: ranks, kept in order natively."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from engram._support import field_paths, native, words
from engram.saved.parts import Noted
from engram.store import indexes, priorities
from engram.store.row_indexes import ChangesIndex, UsageIndex
from engram.store.sampled import StoredRows
from engram.store.store import Store


def _written(storage: Removable, remover: object) -> Store:
    """The storage's rows. Raises ``RuntimeError``: there are none of tensors."""
    if storage.memory is None:
        raise RuntimeError(f"{type(remover).__name__}: expected a tensor storage that was written to.")
    return storage.memory


class LowestPriority(Noted):
    """The rows of lowest priority go; of equal ones that with the lower number.

    Asks the priorities of the store, as every process has left them. Exact.

    Args:
        index: name of the priorities, as the sampler's ``index=``.

    Raises:
        TypeError, ValueError: ``index`` is no name of an index.
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

    noted = ("index",)

    def __init__(self, index: str = "main") -> None:
        indexes.check_index_name(index, "LowestPriority: index")
        self.index = index

    def choose(self, storage: Removable, n: int) -> torch.Tensor:
        """The ``n`` rows of lowest priority, the lowest first.

        >>> import torch
        >>> from engram import LazyTensorStorage, LowestPriority, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(3))
        >>> rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([2.0, 0.5, 1.0]))
        >>> LowestPriority().choose(rb.storage, 2).tolist()
        [1, 2]
        """
        store = _written(storage, self)
        key = (self.index, priorities.PriorityIndex.kind)
        index = store.indexes.get(key) or store.indexes.refreshed().get(key)
        if index is None:
            raise RuntimeError(
                f"LowestPriority: expected priorities {self.index!r} in the store, got none. Use a PrioritizedSampler, or name its index."
            )
        rows = native.empty_rows(n)
        found = index.core.lowest(rows)
        if found < n:
            raise RuntimeError(
                f"LowestPriority: expected {n} rows with a priority above zero, got {found}. Use eps above 0, so that no priority is zero."
            )
        return rows


class _Ranked(Noted):
    """The rows of the smallest ranks go; of equal ones that with the lower number.

    The storage is the truth: its tickets say which rows changed, and an index of the store which of them to look at.
    """

    _store: Store | None = None
    _changes: ChangesIndex
    #: The number of the last look at the changes; 0: all rows count as changed.
    _since = 0
    #: Whether a sample of a row is a change.
    _by_samples = False
    _ranking: native.Ranking
    #: Tickets of the rows when they were ranked; -1: it is to be ranked again.
    _numbers: NDArray[np.int64]

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 ``[n]`` of rows that have these tickets; infinity for one that has another one by now."""
        raise NotImplementedError

    def choose(self, storage: Removable, n: int) -> torch.Tensor:
        """The ``n`` rows that go, the first of them first."""
        store = _written(storage, self)
        if store is not self._store:
            self._changes, self._since = ChangesIndex.of_store(store, samples=self._by_samples), 0
            self._begin(storage.extent().capacity)
            self._store = store
        since, changed = self._changes.look(self._since)
        self._catch_up(storage, changed)
        self._since = since
        rows = self._first(n)
        if len(rows) < n:
            raise RuntimeError(
                f"{type(self).__name__}: expected {n} rows that can go, got {len(rows)}: others are just being written."
            )
        return torch.from_numpy(rows)

    def _begin(self, capacity: int) -> None:
        self._ranking, self._numbers = native.Ranking(capacity), np.full(capacity, -1)

    def _catch_up(self, storage: Removable, rows: NDArray[np.int64]) -> None:
        """Rank the rows that may have changed."""
        numbers = storage.tickets_of(torch.from_numpy(rows)).numpy()
        changed = numbers != self._numbers[rows]
        rows, numbers = rows[changed], numbers[changed]
        if len(rows):
            ranks = np.full(len(rows), np.inf)  # of a row that is just being written: it is not ours to replace
            live = np.flatnonzero(numbers >= 0)
            if len(live):
                ranks[live] = self._ranks(storage, rows[live], numbers[live])
            self._ranking.set(rows, ranks)
            self._numbers[rows] = np.where(np.isinf(ranks), -1, numbers)

    def _first(self, n: int) -> NDArray[np.int64]:
        """The ``n`` rows that go first, or fewer if there are not as many."""
        rows, _ = self._ranking.place(np.full(n, np.inf), np.empty(0, np.int64))  # forgotten by the next call
        return rows

    def __getstate__(self) -> dict[str, object]:
        found = ("_store", "_changes", "_since", "_ranking", "_numbers", "_counts", "_ages")
        return {name: value for name, value in vars(self).items() if name not in found}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


class FifoRemover(_Ranked):
    """The oldest rows go. It is the default: ``ReplayBuffer(remover=FifoRemover())`` has the ring of a buffer without a remover.

    In ``RemovingWriter(FifoRemover())`` the rows that were written longest ago go, void ones first. An edit of a row makes it newer.

    Cost there: as of :class:`Lifo`.

    >>> import torch
    >>> from engram import FifoRemover, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=FifoRemover())
    >>> rb.extend(torch.arange(5)).tolist()
    [0, 1, 2, 0, 1]
    """

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        return numbers.astype(np.float64)


class Lifo(_Ranked):
    """The newest rows go: what was there first stays. An edit of a row makes it newer.

    Rows of one call do not replace each other.

    Cost: O(log rows) for each row that any process has written since the last choice; the first choice reads the ticket of every row.
    Memory: half a byte per row in the store, and 16 bytes per row in each process that chooses.

    >>> import torch
    >>> from engram import LazyTensorStorage, Lifo, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=Lifo())
    >>> _ = rb.extend(torch.arange(3))
    >>> rb.extend(torch.tensor([10])).tolist(), rb.extend(torch.tensor([11, 12])).tolist()
    ([2], [2, 1])
    """

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        return -numbers.astype(np.float64)


class StalestFirst(_Ranked):
    """The rows of the oldest policy version go; of equal ones that with the lower number. A NaN is older than all numbers.

    Args:
        version_key: the field that holds the version, one number per row, as that of :class:`StalenessAwareSampler`.

    Raises:
        KeyError: when the store is full: no such field. ValueError: it holds several numbers per row.

    Cost: O(log rows) for each row that any process has written since the last choice; the first choice reads the ticket of every row.
    Memory: half a byte per row in the store, and 16 bytes per row in each process that chooses.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, StalestFirst
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=StalestFirst("version"))
    >>> _ = rb.extend({"version": torch.tensor([7, 5, 6])})
    >>> rb.extend({"version": torch.tensor([4, 9])}).tolist()
    [1, 2]
    >>> rb.add({"version": torch.tensor(8)})
    1
    """

    noted = ("version_key",)

    def __init__(self, version_key: str | tuple[str, ...] = "policy_version") -> None:
        self._key = field_paths.checked_path(version_key, "StalestFirst: version_key")

    @property
    def version_key(self) -> str | tuple[str, ...]:
        """The field that holds the version."""
        return field_paths.public(self._key)

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        try:
            values, moved = storage.field(self._key, torch.from_numpy(rows), torch.from_numpy(numbers))
        except KeyError as error:
            raise KeyError(f"StalestFirst: version_key: {error.args[0]} Store the version with every row.") from error
        if values.numel() != len(rows):
            raise ValueError(
                f"StalestFirst: version_key: expected one number per row, field {self.version_key!r} has shape {list(values.shape[1:])}."
            )
        ranks: NDArray[np.float64] = values.reshape(-1).double().numpy()
        ranks = np.where(np.isnan(ranks), -np.inf, np.minimum(ranks, np.finfo(np.float64).max))
        ranks[moved] = np.inf
        return ranks


class MaxTimesSampled(_Ranked):
    """The rows that were sampled most often go; of equal ones the older. An edit of a row makes it newer, and it keeps its count.

    Asks the counts of the store, of the samples of all processes: call :meth:`ReplayBuffer.count_usage` before the store is full. Exact:
    each choice goes by the counts of its time. Dumps, states and checkpoints have the counts. Rows of one that has none, as of a store
    that did not count or of an older version, begin at 0, and a warning says so.

    Raises:
        RuntimeError: when the store is full: samples are not counted, or fewer rows than are to go are not just being written.

    Cost: O(log rows) for each row that any process has written or sampled since the last choice, with 16 rows looked at for each at
    most; the first choice looks at all rows. Memory: half a byte per row in the store, and 64 bytes per row in each process that chooses.

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

    _by_samples = True
    _counts: UsageIndex
    _ages: _Ages

    def choose(self, storage: Removable, n: int) -> torch.Tensor:
        """The ``n`` rows that were sampled most often, the first of them first.

        >>> import torch
        >>> from engram import LazyTensorStorage, MaxTimesSampled, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=4)
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.count_usage()
        >>> MaxTimesSampled().choose(rb.storage, 2).tolist()
        [0, 1]
        """
        store = _written(storage, self)
        counts = UsageIndex.in_use(store)
        if counts is None and store.replaced is None:
            raise RuntimeError(
                "MaxTimesSampled: expected a store that counts samples, got one that does not. Call rb.count_usage() first."
            )
        if counts is None:
            words.warn(
                "MaxTimesSampled: what was loaded does not say how often rows were sampled: they count as never sampled. "
                "Call rb.count_usage() before you save."
            )
            counts = UsageIndex.of_store(store)
        self._counts = counts
        return super().choose(storage, n)

    def _begin(self, capacity: int) -> None:
        self._ages = _Ages(capacity)

    def _catch_up(self, storage: Removable, rows: NDArray[np.int64]) -> None:
        asked = torch.from_numpy(rows)
        self._ages.set(rows, storage.tickets_of(asked).numpy(), self._counts.counts(asked).numpy())

    def _first(self, n: int) -> NDArray[np.int64]:
        return self._ages.first(n)


class _Ages:
    """Rows by counts, and of equal ones by tickets.

    A ranking has the lower number first where ranks are equal. So what it ranks are not rows but places in a line: a row that was
    written goes to its end. A line that is full is made again, of the rows in the order of their tickets.
    """

    def __init__(self, rows: int) -> None:
        self._tickets, self._times = np.full(rows, -1), np.zeros(rows, np.int64)
        self._places = np.full(rows, -1)
        self._line_up()

    def set(self, rows: NDArray[np.int64], tickets: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """What these rows have now, each once; a ticket of -1: it cannot go."""
        changed = (self._tickets[rows] != tickets) | (self._times[rows] != times)
        rows, tickets, times = rows[changed], tickets[changed], times[changed]
        written = self._tickets[rows] != tickets
        left = self._places[rows[written]]
        self._tickets[rows], self._times[rows], self._places[rows[written]] = tickets, times, -1
        come = rows[written & (tickets >= 0)]
        if self._end + len(come) > len(self._rows):
            self._line_up()
            return
        come = come[np.argsort(self._tickets[come])]
        places = np.arange(self._end, self._end + len(come))
        self._end += len(come)
        self._rows[places], self._places[come] = come, places
        left = left[left >= 0]
        self._ranking.set(left, np.full(len(left), np.inf))
        stay = rows[tickets >= 0]
        self._ranking.set(self._places[stay], -self._times[stay].astype(np.float64))

    def first(self, n: int) -> NDArray[np.int64]:
        """The ``n`` rows that go first, or fewer if there are not as many."""
        places, _ = self._ranking.place(np.full(n, np.inf), np.empty(0, np.int64))  # forgotten by the next call
        return self._rows[places]

    def _line_up(self) -> None:
        live = np.flatnonzero(self._tickets >= 0)
        live = live[np.argsort(self._tickets[live])]
        self._ranking = native.Ranking(2 * len(self._tickets))
        self._rows, self._end = np.full(2 * len(self._tickets), -1), len(live)
        self._rows[: self._end], self._places[live] = live, np.arange(self._end)
        self._ranking.set(self._places[live], -self._times[live].astype(np.float64))


class Removable(StoredRows, Protocol):
    """The storage that is full, as a remover sees it.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> class LeastScore:
    ...     def choose(self, storage, n):
    ...         rows = torch.arange(storage.extent().capacity)
    ...         score, _ = storage.field(("score",), rows, storage.tickets_of(rows))
    ...         return score.argsort()[:n]
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=LeastScore())
    >>> _ = rb.extend({"score": torch.tensor([2.0, 1.0, 3.0])})
    >>> rb.add({"score": torch.tensor(5.0)})
    1
    """


#: The removers that a store notes.
KNOWN: dict[str, type[LowestPriority | _Ranked]] = {
    cls.__name__: cls for cls in (FifoRemover, Lifo, LowestPriority, MaxTimesSampled, StalestFirst)
}


@runtime_checkable
class Remover(Protocol):
    """Chooses the rows that new ones replace. A class with this method is enough.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> class LastPlaces:
    ...     def choose(self, storage, n):
    ...         capacity = storage.extent().capacity
    ...         return torch.arange(capacity - n, capacity)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), remover=LastPlaces())
    >>> _ = rb.extend(torch.arange(4))
    >>> rb.extend(torch.tensor([10, 11])).tolist()
    [2, 3]
    """

    def choose(self, storage: Removable, n: int) -> torch.Tensor:
        """The ``n`` rows that go, int64 ``[n]``, each once and live. Called once no free row is left; no other process chooses meanwhile.

        >>> import torch
        >>> from engram import Lifo, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(4))
        >>> Lifo().choose(rb.storage, 2).tolist()
        [0, 2]
        """
