"""The best rows: a better one replaces the worst."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torch import Tensor

from engram._later import refuse
from engram._tensordict import children, find
from engram.types import Extent, Plan
from engram.writers._base import NativeWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engram.types import Write

__all__ = ["TensorDictMaxValueWriter"]

#: ``[n, m]`` to ``[n]``. A NaN among a row's numbers makes its rank NaN.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "mean": lambda x: x.mean(1),
    "median": lambda x: x.median(1).values,
}

#: Worst rows that are kept in order, at least: looking for them costs O(rows), so it is done once for many writes.
_POOL = 2048


class TensorDictMaxValueWriter(NativeWriter):
    """Keeps the ``max_size`` best TensorDicts: of a full storage a row replaces the worst one, if it is better.

    A row's rank is its ``rank_key``, reduced to one number in float64. A row as good as the worst one is rejected, and of
    several worst rows the one with the lowest number goes. ``add`` returns None for a rejected row; ``extend`` does what
    adding its rows one after another would do, and reports -1 for rows that were rejected or replaced by a later one.
    ``write_count`` counts the accepted rows, replaced ones included.

    Ranks follow from what is stored: edits, ``empty`` and what other writers and buffers write count from the next write
    on. A NaN stored that way ranks below all numbers.

    Args:
        rank_key: entry to rank rows by. Default ``("next", "reward")``.
        reduction: ``"sum"``, ``"max"``, ``"min"``, ``"mean"`` or ``"median"`` (of an even count the lower one), over all
            numbers that the entry has in a row.

    Raises:
        NotImplementedError: another reduction.
        TypeError: ``rank_key`` is no string or tuple of strings.
        ValueError: with a buffer whose storage has ``ndim > 1`` or several lanes. On writing: a rank is NaN, or a row has no
            number to rank it by.
        RuntimeError: on writing: data is no TensorDict.
        KeyError: on writing: no ``rank_key`` in the data.

    Cost of a write of n rows: O(n log n); O(rows) after somebody else wrote to the storage or edited rows, when those rows
    are read again, and once in some thousand replaced rows.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
    >>> rb.extend(TensorDict({"score": torch.tensor([3., 1., 2.])}, batch_size=[3]))
    tensor([ 0, -1,  1])
    >>> rb.add(TensorDict({"score": torch.tensor(2.)})) is None
    True
    >>> rb.add(TensorDict({"score": torch.tensor(5.)}))
    1
    >>> rb["score"]
    tensor([3., 5.])
    """

    adds_index = True
    rejects = True

    def __init__(self, rank_key: str | tuple[str, ...] | None = None, reduction: str = "sum", **later: Any) -> None:
        refuse(type(self).__name__, later, {"compilable": "tracing through torch.compile"})
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise NotImplementedError(
                f"{type(self).__name__}: reduction: expected one of {list(_REDUCTIONS)}, got {reduction!r}."
            )
        key: Any = ("next", "reward") if rank_key is None else rank_key
        path = (key,) if isinstance(key, str) else key
        if not isinstance(path, tuple | list) or not path or not all(isinstance(part, str) for part in path):
            raise TypeError(
                f"{type(self).__name__}: rank_key: expected a string or a tuple of strings, got {rank_key!r}."
            )
        self._rank_key = tuple(path)
        self._reduction = reduction
        self._stored: _Stored | None = None

    @property
    def rank_key(self) -> str | tuple[str, ...]:
        """Entry that rows are ranked by."""
        return self._rank_key[0] if len(self._rank_key) == 1 else self._rank_key

    @property
    def reduction(self) -> str:
        """How the numbers of a row become its rank."""
        return self._reduction

    def register_storage(self, storage: Any) -> None:
        """As for every writer. Raises ``ValueError`` for a storage with ``ndim > 1`` or several lanes."""
        if storage.ndim > 1:
            raise ValueError(
                f"{type(self).__name__}: expected a storage with ndim=1, got ndim={storage.ndim}: its rows would be parts of "
                "slots. Store each trajectory as one row, or flatten the data."
            )
        if storage.lanes > 1:
            raise ValueError(
                f"{type(self).__name__}: expected a storage with 1 lane, got {storage.lanes}: the best rows of all are in no "
                "order. Use lanes=1."
            )
        super().register_storage(storage)
        self._stored = None

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: Any) -> Plan:
        ranks = self._ranks_of(data, n)
        free = _free_rows(extent, n)
        if len(free) == n:
            return Plan(rows=torch.from_numpy(free))
        storage = self._registered()
        with storage.placing:
            memory = getattr(storage, "memory", storage)
            if self._stored is None or self._stored.memory is not memory:
                self._stored = _Stored(storage, memory, self._rank_key, self._reduced)
            self._stored.catch_up(extent.filled[0])
            return self._stored.place(ranks, free)

    def written(self, plan: Plan, write: Write) -> None:
        if self._stored is not None:
            self._stored.written(plan, write)

    def get_insert_index(self, data: Any) -> int | None:
        """The row that one row of data would be written to now; None if it would be rejected. Nothing is written.

        Raises: as ``add``.
        """
        plan = self.place(self._registered().extent(), 1, 0, data)
        assert plan.rows is not None  # as place makes them
        return int(plan.rows[0]) if len(plan.rows) else None

    def _write(self, call: str, data: Any, plan: Plan | None, *, batched: bool) -> Write:
        if not self._registered().initialized:  # data that is refused leaves no memory behind
            self._ranks_of(data, (data.batch_size or (0,))[0] if batched and is_tensor_collection(data) else 1)
        return super()._write(call, data, plan, batched=batched)

    def _ranks_of(self, data: Any, n: int) -> NDArray[np.float64]:
        """Ranks of ``n`` rows that are to be written, float64 ``[n]``."""
        if type(data) is not TensorDict and (not is_tensor_collection(data) or is_tensorclass(data)):
            raise RuntimeError(
                f"{type(self).__name__}: expected a TensorDict, got {type(data).__name__}. Use a RoundRobinWriter for other data."
            )
        value = find(data, self._rank_key)
        if value is None:
            raise KeyError(
                f"{type(self).__name__}: expected the rank key {self.rank_key!r}, got {[str(k) for k in children(data)]}."
            )
        ranks = self._reduced(value, n)
        if n and math.isnan(ranks.max()):  # the largest of numbers with a NaN is NaN
            nan = np.isnan(ranks)
            raise ValueError(
                f"{type(self).__name__}: {self.rank_key!r}: expected ranks that are numbers, got NaN in row "
                f"{int(nan.argmax())} of {n}. Leave out such rows."
            )
        return ranks

    def _reduced(self, value: Any, n: int) -> NDArray[np.float64]:
        """Ranks from the rank entry of ``n`` rows."""
        if not isinstance(value, Tensor) or value.dtype.is_complex:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{type(self).__name__}: {self.rank_key!r}: expected a tensor of real numbers, got {kind}.")
        if n and not value.numel():
            raise ValueError(
                f"{type(self).__name__}: {self.rank_key!r}: expected at least one number per row, got shape {list(value.shape)}."
            )
        numbers = value.detach().to("cpu", torch.float64).resolve_neg()
        if value.numel() > n:
            numbers = _REDUCTIONS[self._reduction](numbers.reshape(n, -1))
        ranks: NDArray[np.float64] = numbers.numpy().reshape(n)
        return ranks

    def state_dict(self) -> dict[str, Any]:
        """Empty: ranks follow from the rows, cursors and counts belong to the store."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._stored = None

    def config(self) -> dict[str, Any]:
        return {"rank_key": self.rank_key, "reduction": self._reduction}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}


class _Planned(NamedTuple):
    """A plan that may be written next: what it changes then."""

    plan: Plan
    ranks: NDArray[np.float64]
    """Of the rows it writes."""
    taken: int
    """So many of the worst rows are no longer where they were in the order."""
    back: list[tuple[float, int]]
    """What belongs there again."""


class _Stored:
    """Ranks of a storage's rows, and the worst of them in order.

    The storage is the truth: its tickets say which rows changed since they were looked at. After a write of our own plan, and
    nothing else, there is nothing to look at.
    """

    def __init__(
        self, storage: Any, memory: Any, key: tuple[str, ...], reduced: Callable[[Any, int], NDArray[np.float64]]
    ) -> None:
        self.memory = memory
        self._storage = storage
        self._key = key
        self._reduced = reduced
        self._numbers = np.empty(0, np.int64)
        self._ranks = np.empty(0)
        self._settled: int | None = None
        self._planned: _Planned | None = None
        #: (rank, row), ascending: all rows up to and including ``_limit``.
        self._worst: list[tuple[float, int]] = []
        self._limit = (-np.inf, -1)

    # ---- keeping up --------------------------------------------------------------------------------------------------

    def catch_up(self, filled: int) -> None:
        """Learn what changed among the first ``filled`` rows. Cost: O(1) if only our own plans were written."""
        settled = self._storage.settled()
        if settled is None or settled != self._settled or filled != len(self._ranks):
            self._look_again(filled, settled)

    def written(self, plan: Plan, write: Write) -> None:
        """Bring up to date what a plan changed, if it is the last one and nobody wrote since it was made."""
        planned = self._planned
        if planned is None or planned.plan is not plan or write.first != self._settled:
            return
        assert plan.rows is not None  # as place makes them
        rows, self._planned = plan.rows.numpy(), None
        self._settled = None  # in case of an interrupt
        self._numbers[rows] = np.arange(write.first, write.first + len(rows))  # of a row named twice the last one stays
        self._ranks[rows] = planned.ranks
        del self._worst[: planned.taken]
        for entry in planned.back:
            insort(self._worst, entry)
        self._settled = write.first + len(rows)

    def _look_again(self, filled: int, settled: int | None) -> None:
        """Compare all tickets, and read the rows that have another one. Cost: O(filled)."""
        numbers = self._storage.numbers_of(torch.arange(filled, device="cpu")).numpy()
        known = np.full(filled, -1)
        ranks = np.full(filled, np.inf)  # of a row that is just being written: it is not ours to replace
        same = min(filled, len(self._ranks))
        known[:same], ranks[:same] = self._numbers[:same], self._ranks[:same]
        changed = np.flatnonzero(numbers != known)
        ranks[changed] = np.inf
        live = changed[numbers[changed] >= 0]
        if len(live):
            values, moved = self._storage.field(self._key, torch.from_numpy(live), torch.from_numpy(numbers[live]))
            if moved:
                whole = np.setdiff1d(np.arange(len(live)), moved)
                values = values[torch.from_numpy(whole)] if isinstance(values, Tensor) else [values[i] for i in whole]
                numbers[live[moved]] = -1
                live, settled = live[whole], None
            ranks[live] = self._ranks_of(values, len(live))
        self._numbers, self._ranks, self._settled = numbers, ranks, settled
        self._planned, self._worst = None, []

    def _ranks_of(self, values: Any, n: int) -> NDArray[np.float64]:
        if isinstance(values, Tensor):
            ranks = self._reduced(values, n)
        else:
            ranks = np.array([self._reduced(value, 1)[0] for value in values], dtype=np.float64)
        return np.where(np.isnan(ranks), -np.inf, ranks)

    # ---- choosing rows -----------------------------------------------------------------------------------------------

    def place(self, ranks: NDArray[np.float64], free: NDArray[np.int64]) -> Plan:
        """Rows of data in order: the first ones to the free rows, then each one to the worst row if it is better."""
        first = len(free)
        self._planned = None
        worst = min([rank for rank, _ in self._smallest(1)] + ranks[:first].tolist())
        better = (ranks[first:] > worst).nonzero()[0] + first  # the worst rank only rises
        taken = self._smallest(len(better))
        chosen = ranks[better]
        if not first and len(better) == len(taken) and (not len(taken) or chosen.min() > taken[-1][0]):
            kept, rows = better, np.array([row for _, row in taken], dtype=np.int64)
            near = (chosen <= self._limit[0]).nonzero()[0]
            back = list(zip(chosen[near].tolist(), rows[near].tolist(), strict=True)) if len(near) else []
        else:
            back = taken + list(zip(ranks[:first].tolist(), free.tolist(), strict=True))
            heapq.heapify(back)
            kept, rows = _replace_worst(back, better, chosen)
            kept, rows = np.concatenate([np.arange(first), kept]), np.concatenate([free, rows])
        plan = Plan(rows=torch.from_numpy(rows), kept=None if len(kept) == len(ranks) else torch.from_numpy(kept))
        if not first and len(rows):
            back = [entry for entry in back if entry <= self._limit]
            self._planned = _Planned(plan, ranks[kept], len(taken), back)
        return plan

    def _smallest(self, n: int) -> list[tuple[float, int]]:
        """The ``n`` worst rows, worst first; all if there are fewer."""
        if len(self._worst) < min(n, len(self._ranks)):
            self._sort_out(max(n, _POOL))
        return self._worst[:n]

    def _sort_out(self, n: int) -> None:
        """Find the ``n`` worst rows anew. Cost: O(rows + n log n)."""
        ranks = self._ranks
        if n >= len(ranks):
            rows = np.argsort(ranks, kind="stable")
            self._limit = (np.inf, len(ranks))
        else:
            bound = np.partition(ranks, n - 1)[n - 1]
            below, equal = np.flatnonzero(ranks < bound), np.flatnonzero(ranks == bound)
            rows = np.concatenate([below[np.argsort(ranks[below], kind="stable")], equal[: n - len(below)]])
            self._limit = (float(bound), int(rows[-1]))
        self._worst = list(zip(ranks[rows].tolist(), rows.tolist(), strict=True))


_NONE = np.empty(0, np.int64)


def _free_rows(extent: Extent, n: int) -> NDArray[np.int64]:
    """The first rows that hold nothing, ``n`` at most, in order."""
    filled = extent.filled[0]
    if filled == extent.capacity and extent.holes is None:
        return _NONE
    holes = np.empty(0, np.int64) if extent.holes is None else extent.holes[:n].numpy()
    behind = np.arange(filled, min(extent.capacity, filled + n - len(holes)))
    return np.concatenate([holes, behind]) if len(holes) else behind


def _replace_worst(
    heap: list[tuple[float, int]], which: NDArray[np.int64], ranks: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put ranks one after another where the worst entry of a heap is, if they are better: which ones, and their rows."""
    kept, rows = [], []
    for i, rank in zip(which.tolist(), ranks.tolist(), strict=True):
        worst, row = heap[0]
        if rank > worst:
            heapq.heapreplace(heap, (rank, row))
            kept.append(i)
            rows.append(row)
    return np.array(kept, dtype=np.int64), np.array(rows, dtype=np.int64)
