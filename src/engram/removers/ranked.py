"""Removers whose order follows from what rows hold: ranks, kept in order natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engram import _native
from engram.field_paths import checked_path, public

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.removers._base import Removable
    from engram.store import Store


class _Ranked:
    """The rows of the smallest ranks go; of equal ones that with the lower number.

    The storage is the truth: its tickets say which rows changed since they were looked at.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._ranking: _native.Ranking
        self._numbers: NDArray[np.int64]
        #: The next ticket number when all rows were looked at last; None: look again.
        self._settled: int | None = None
        #: Rows that were chosen last: they are written next, if all goes well.
        self._chosen: NDArray[np.int64] = np.empty(0, np.int64)

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 ``[n]`` of rows that have these tickets; infinity for one that has another one by now."""
        raise NotImplementedError

    def choose(self, storage: Removable, n: int) -> Tensor:
        """The ``n`` rows that go, the first of them first."""
        store = storage.memory
        if store is None:
            raise RuntimeError(f"{type(self).__name__}: expected a tensor storage that was written to.")
        capacity = storage.extent().capacity
        if store is not self._store:
            self._store, self._settled = store, None
            self._ranking, self._numbers = _native.Ranking(capacity), np.full(capacity, -1)
        self._catch_up(storage)
        rows, _ = self._ranking.place(np.full(n, np.inf), np.empty(0, np.int64))  # forgotten by the next call
        if len(rows) < n:
            raise RuntimeError(
                f"{type(self).__name__}: expected {n} rows that can go, got {len(rows)}: others are just being written."
            )
        self._chosen = rows
        return torch.from_numpy(rows.copy())

    def _catch_up(self, storage: Removable) -> None:
        settled = storage.settled()
        if settled is not None and settled == self._settled:
            return
        chosen, before = self._chosen, self._settled
        self._settled = None
        if before is not None and settled == before + len(
            chosen
        ):  # a plan of ours was written, and nothing else, or else by others
            numbers = storage.tickets_of(torch.from_numpy(chosen)).numpy()
            changed = np.arange(before, settled)
            if len(chosen) and np.array_equal(numbers, changed):
                self._numbers[chosen] = numbers
                self._ranking.set(chosen, self._ranks(storage, chosen, numbers))
                self._settled = settled
                return
        numbers = storage.tickets_of(torch.arange(len(self._numbers), device="cpu")).numpy()
        rows = np.flatnonzero(numbers != self._numbers)
        ranks = np.full(len(rows), np.inf)  # of a row that is just being written: it is not ours to replace
        live = np.flatnonzero(numbers[rows] >= 0)
        ranks[live] = self._ranks(storage, rows[live], numbers[rows[live]])
        if len(rows):
            self._ranking.set(rows, ranks)
        self._numbers, self._settled = numbers, settled
        moved = rows[np.isinf(ranks)]
        if len(moved):
            self._numbers[moved], self._settled = -1, None

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_store", "_ranking", "_numbers", "_settled", "_chosen")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        _Ranked.__init__(self)
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
        del storage, rows
        return numbers.astype(np.float64)

    def __repr__(self) -> str:
        return "FifoRemover()"


class Lifo(_Ranked):
    """The newest rows go: what was there first stays. An edit of a row makes it newer.

    Rows of one call do not replace each other.

    Cost: O(log rows) per row; after a write of another process, a removal or an edit the next choice reads the ticket of every row:
    O(rows), a word each. With several writing processes that is each choice.

    >>> import torch
    >>> from engram import LazyTensorStorage, Lifo, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=Lifo())
    >>> _ = rb.extend(torch.arange(3))
    >>> rb.extend(torch.tensor([10])).tolist(), rb.extend(torch.tensor([11, 12])).tolist()
    ([2], [2, 1])
    """

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        del storage, rows
        return -numbers.astype(np.float64)

    def __repr__(self) -> str:
        return "Lifo()"


class StalestFirst(_Ranked):
    """The rows of the oldest policy version go; of equal ones that with the lower number. A NaN is older than all numbers.

    Args:
        version_key: the field that holds the version, one number per row, as that of :class:`StalenessAwareSampler`.

    Raises:
        KeyError: when the store is full: no such field. ValueError: it holds several numbers per row.

    Cost: O(log rows) per row; after a write of another process, a removal or an edit the next choice reads the ticket of every row:
    O(rows), a word each. With several writing processes that is each choice.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, StalestFirst
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=StalestFirst("version"))
    >>> _ = rb.extend({"version": torch.tensor([7, 5, 6])})
    >>> rb.extend({"version": torch.tensor([4, 9])}).tolist()
    [1, 2]
    >>> rb.add({"version": torch.tensor(8)})
    1
    """

    def __init__(self, version_key: str | tuple[str, ...] = "policy_version") -> None:
        super().__init__()
        self._key = checked_path(version_key, "StalestFirst: version_key")

    @property
    def version_key(self) -> str | tuple[str, ...]:
        """The field that holds the version."""
        return public(self._key)

    def _ranks(self, storage: Removable, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        values, moved = storage.field(self._key, torch.from_numpy(rows), torch.from_numpy(numbers))
        if values.numel() != len(rows):
            raise ValueError(
                f"StalestFirst: version_key: expected one number per row, field {self.version_key!r} has shape {list(values.shape[1:])}."
            )
        ranks: NDArray[np.float64] = values.reshape(-1).double().numpy()
        ranks = np.where(np.isnan(ranks), -np.inf, ranks)
        ranks[moved] = np.inf
        return ranks

    def __repr__(self) -> str:
        return f"StalestFirst({self.version_key!r})"
