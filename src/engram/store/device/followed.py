"""Next observations of rows on an accelerator that are not stored: those of the following rows, and those that are kept apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.store.device.row_operations import Drawing
    from engram.store.device.store import DeviceStore

#: Step types: the first step of a trajectory, and the last one.
_FIRST, _LAST = 0, 2


#: How a field ends a trajectory: by another content in the following row; by the last type, or the first one in the following row; by
#: flags other than zero.
EndKind: TypeAlias = Literal["id", "step type", "any flag", "all flags"]


class End(NamedTuple):
    """A field that ends a trajectory."""

    field: int
    by: EndKind


class Followed:
    """Where the next observations of rows are. The newest row of a lane has none yet, unless it ends a trajectory.

    Args:
        store: the steps.
        finals: the observations after the last steps, in the order of ``fields``, and behind them a tag.
        mark: the field in which a last step names its row there, and the tag; -1 in those of other steps.
        fields: the observations.
        ends: what ends a trajectory. Without a mark such a step has no next observation.
    """

    def __init__(
        self, store: DeviceStore, finals: DeviceStore, mark: int, fields: Sequence[int], ends: Sequence[End]
    ) -> None:
        self.store, self.rows, self.finals_store, self.finals = store, store.rows, finals, finals.rows
        self.mark, self.fields, self.ends, self.width = mark, tuple(fields), ends, math.prod(store.schema.columns)
        self.table: Tensor | None = None
        """As the kernels find it; None: they cannot use it."""

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether rows have a next observation, and in which rows it is: int64 ``[n]`` each, of ``finals`` or -1, and of the steps."""
        steps, finals = self.rows, self.finals
        first = rows // steps.lane_length * steps.lane_length
        after = first + (rows - first + self.width) % steps.lane_length
        after.clamp_(max=steps.spare)  # nothing follows that one
        place, tag = steps.whole[self.mark][rows].unbind(-1)
        is_last, inside = place >= 0, place < finals.capacity
        kept = inside & (finals.whole[-1][torch.where(is_last & inside, place, finals.nowhere)] == tag)
        goes_on = steps.numbers[after] > steps.numbers[rows]  # else it is the newest of its lane, and the oldest comes
        for end in self.ends:
            goes_on &= ~self._ends(end, rows, after)
        return (steps.numbers[rows] > 0) & torch.where(is_last, kept, goes_on), torch.where(kept, place, -1), after

    def _ends(self, end: End, rows: Tensor, after: Tensor) -> Tensor:
        """Whether a trajectory ends with each of some rows, as one of the fields says: bool ``[n]``."""
        column = self.rows.whole[end.field]
        column = column.view(len(column), math.prod(column.shape[1:]))
        here = column[rows]
        if end.by == "id":
            return (here != column[after]).any(1)
        if end.by == "step type":
            return (here == _LAST).any(1) | (column[after] == _FIRST).any(1)
        return (here != 0).all(1) if end.by == "all flags" else (here != 0).any(1)

    def read(self, rows: Tensor) -> list[Tensor]:
        """The next observations of rows that have one, ``[n, *shape]`` per field."""
        _, place, after = self.find(rows)
        at, found = torch.where(place < 0, self.finals.nowhere, place), []
        for number, kept in zip(self.fields, self.finals.whole, strict=False):
            following = self.rows.whole[number][after]
            is_last = (place >= 0).view(-1, *[1] * (following.ndim - 1))
            found.append(torch.where(is_last, kept[at].to(following.dtype), following))
        return found

    def sample_rows(self, n: int, key: int, how: Drawing) -> list[Tensor]:
        """As :meth:`DeviceStore.sample_rows`, with next observations."""
        return self.store.sample_rows(n, key, how._replace(followed=self))

    def lost(self) -> int:
        """How many rows name a final observation that was overwritten. Waits for the device."""
        with self.rows, self.finals:
            rows = torch.arange(self.rows.capacity, device=self.rows.device)
            held = (self.rows.numbers[:-1] > 0) & (self.rows.whole[self.mark][:-1, 0] >= 0)
            return int((held & (self.find(rows)[1] < 0)).sum())
