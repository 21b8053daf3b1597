"""The remover that asks how often rows were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engram import _native
from engram._words import warn
from engram.changes import ChangesIndex
from engram.usage import UsageIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.removers._base import Removable
    from engram.store import Store


class MaxTimesSampled:
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

    def __init__(self) -> None:
        self._store: Store | None = None
        self._ages: _Ages
        self._changes: ChangesIndex
        #: The number of the last look at the changes; 0: all rows count as changed.
        self._since = 0

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
        store = storage.memory
        if store is None:
            raise RuntimeError("MaxTimesSampled: expected a tensor storage that was written to.")
        counts = UsageIndex.in_use(store)
        if counts is None and store.replaced is None:
            raise RuntimeError(
                "MaxTimesSampled: expected a store that counts samples, got one that does not. Call rb.count_usage() first."
            )
        if counts is None:
            warn(
                "MaxTimesSampled: what was loaded does not say how often rows were sampled: they count as never sampled. "
                "Call rb.count_usage() before you save."
            )
            counts = UsageIndex.of_store(store)
        if store is not self._store:
            self._changes, self._since = ChangesIndex.of_store(store, samples=True), 0
            self._ages = _Ages(storage.extent().capacity)
            self._store = store
        since, among = self._changes.look(self._since)
        rows = torch.from_numpy(among)
        self._ages.set(among, storage.tickets_of(rows).numpy(), counts.counts(rows).numpy())
        self._since = since
        chosen = self._ages.first(n)
        if len(chosen) < n:
            raise RuntimeError(
                f"MaxTimesSampled: expected {n} rows that can go, got {len(chosen)}: others are just being written."
            )
        return torch.from_numpy(chosen)

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        MaxTimesSampled.__init__(self)

    def __repr__(self) -> str:
        return "MaxTimesSampled()"


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
        self._ranking = _native.Ranking(2 * len(self._tickets))
        self._rows, self._end = np.full(2 * len(self._tickets), -1), len(live)
        self._rows[: self._end], self._places[live] = live, np.arange(self._end)
        self._ranking.set(self._places[live], -self._times[live].astype(np.float64))
