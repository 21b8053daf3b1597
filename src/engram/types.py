"""The three values that components exchange, and the protocols they follow.

The writer says *where*, the storage holds *what*, the sampler says *which*: storages, samplers and writers do not know
each other. Letters: ``B`` batch, ``n`` rows of a write, ``C`` capacity, ``L`` lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Draw", "Extent", "Plan", "Sampler", "Write", "Writer"]


class Extent(NamedTuple):
    """What is live now. Made by the storage, read by samplers and writers.

    A lane is a ring of ``capacity // lanes`` consecutive rows; lane ``k`` starts at row ``k * (capacity // lanes)``. Its
    first ``filled[k]`` rows hold data.
    """

    capacity: int
    """Rows of the store."""
    filled: tuple[int, ...]
    """``[L]`` rows inside each lane's extent, holes included."""
    seam: tuple[int, ...]
    """``[L]`` row that each lane will write next: of a full ring, its oldest row."""
    holes: Tensor | None = None
    """int64, sorted: rows inside the extent that hold nothing, left by a writer that died; None if there are none."""

    @property
    def size(self) -> int:
        """Live rows, over all lanes."""
        return sum(self.filled) - (0 if self.holes is None else len(self.holes))

    def contains(self, rows: Tensor) -> Tensor:
        """Whether rows are inside their lane's extent and no holes: bool, same shape."""
        import torch

        length = self.capacity // len(self.filled)
        inside = (rows >= 0) & (rows < self.capacity)
        lane = torch.where(inside, rows, 0) // length
        inside &= rows - lane * length < torch.tensor(self.filled, device="cpu")[lane]
        return inside if self.holes is None else inside & ~torch.isin(rows, self.holes)

    def rows(self, ranks: Tensor) -> Tensor:
        """The rows with these ranks among the live ones, in row order (lane after lane).

        Args:
            ranks: int64 ``[B]``, each in ``[0, size)``.

        Returns:
            int64 ``[B]`` in ``[0, capacity)``; ``ranks`` itself where rank and row agree. Cost: O(B log (L + holes)).
        """
        total = sum(self.filled)
        if self.holes is None and (len(self.filled) == 1 or total == self.capacity):
            return ranks
        import torch

        length = self.capacity // len(self.filled)
        filled = torch.tensor(self.filled, device="cpu")
        ends = filled.cumsum(0)
        starts = ends - filled
        if self.holes is not None:
            lane = self.holes // length
            before = starts[lane] + self.holes % length - torch.arange(len(self.holes), device="cpu")
            ranks = ranks + torch.searchsorted(before, ranks, right=True)
        lane = torch.searchsorted(ends, ranks, right=True)
        return ranks - starts[lane] + lane * length


class Plan(NamedTuple):
    """Where a writer wants rows to go. Making one has no side effect."""

    lane: int | Tensor | None = None
    """Append to this lane, or row ``i`` to lane ``lane[i]`` (int64 ``[n]``); None where rows are named."""
    rows: Tensor | None = None
    """int64 ``[n]``: write these rows by number. Cursors stay; the extent grows to cover them."""
    kept: Tensor | None = None
    """int64 ``[k]``, ascending: only these of the ``n`` rows of data are written, to ``rows`` ``[k]``; the others are
    rejected. None: all are written."""

    def reported(self, written: Tensor, n: int) -> Tensor:
        """int64 ``[n]``: where each row of the data was written, -1 for a rejected one. ``written``: the planned rows."""
        if self.kept is None:
            return written
        import torch

        rows = torch.full((n,), -1, device="cpu")
        rows[self.kept] = written
        return rows


class Write(NamedTuple):
    """What was written where. Made by the store."""

    rows: Tensor
    """int64 ``[n]``; -1 for a rejected row. Of a row that is named twice the last entry stays."""
    first: int
    """Ticket number of the first row that was written; the others follow."""

    @property
    def tickets(self) -> Tensor:
        """int64 ``[n]`` ticket numbers: larger is newer, never reused; -1 for a rejected row."""
        import torch

        written = self.rows >= 0
        return torch.where(written, self.first - 1 + written.cumsum(0), -1)

    @property
    def survivors(self) -> Tensor:
        """int64 ``[n]``: the rows, but -1 for one that a later row of the same write replaced."""
        rows = self.rows.tolist()
        if len(set(rows)) + max(rows.count(-1), 1) - 1 == len(rows):  # none is named twice
            return self.rows
        import torch

        last = {row: i for i, row in enumerate(rows)}
        return torch.tensor([row if last[row] == i else -1 for i, row in enumerate(rows)], device="cpu")


class Draw(NamedTuple):
    """Which rows to read. Made by a sampler."""

    rows: Tensor
    """int64 ``[B]`` rows in ``[0, capacity)``, on the CPU."""
    tickets: Tensor | None = None
    """int64 ``[B]`` numbers the rows must still have when they are read, or None: any whole row will do."""
    info: Mapping[str, Any] = {}
    """Named arrays with one entry per drawn row, handed to the user beside the batch."""


class Changes(NamedTuple):
    """Rows written or edited since some ticket. Made by the store, for whoever did not hear of the writes of other processes."""

    rows: Tensor
    """int64 ``[n]``, each once, the one that was written longest ago first."""
    tickets: Tensor
    """int64 ``[n]`` ticket numbers of the rows, ascending."""
    next: int
    """Ask for this ticket the next time. Rows that were written beside a write still under way come again."""


class Ranking(NamedTuple):
    """How a writer ranks rows, of which it keeps the best."""

    key: tuple[str, ...]
    """Of the field that decides."""
    values: Callable[[Tensor], NDArray[np.float64]]
    """The value of each of ``n`` rows of that field, float64 ``[n]``, without NaN: larger ones are better."""


@runtime_checkable
class Sampler(Protocol):
    """What a custom sampler implements, and all it implements."""

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Choose ``batch_size`` rows. ``key`` is 64 random bits, new for every draw: derive all randomness from it."""

    def observe(self, write: Write | None, data: Any) -> None:
        """Hear of rows written or edited, after the fact; ``write=None`` means the buffer was emptied."""

    def update_priority(self, index: Tensor, priority: Tensor, *, generation: Tensor | None = None) -> None:
        """Take new priorities for rows drawn earlier, or ignore them."""

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors and plain values. Copies."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state made by ``state_dict``. Copies."""


@runtime_checkable
class Writer(Protocol):
    """What a custom writer implements: a policy of places. The cursors belong to the store."""

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: Any) -> Plan:
        """Choose where the ``n`` rows of ``data`` go. Must not have side effects; raises to refuse the write."""
