"""Numbers of trajectories that were moved: the pieces of one keep one number, and no other trajectory gets it.

Trajectories that take turns in a lane are moved piece by piece. Two pieces belong together if they come from one lane of a shard and
had one number there, unless a flag ended the older one or the newer one begins with a first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engram.persist.roles import boundary_fields
from engram.persist.rows import Boundaries
from engram.reshard.shards import read_first_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.schema import Schema
    from engram.persist.trajectory_table import Marks
    from engram.reshard.plan import ReshardPlan
    from engram.reshard.shards import SavedShard


class Numbering:
    """The trajectories of one rank, whose rows are in their places and still have their old numbers.

    Args:
        shards: all of them.
        plan: where their trajectories went.
        mine: int64 ``[K]``: which of them are this rank's, by lane and position.
        schema: of the rank's store.
    """

    def __init__(
        self, shards: Sequence[SavedShard], plan: ReshardPlan, mine: NDArray[np.int64], schema: Schema
    ) -> None:
        self._shards, self._plan, self._mine = shards, plan, mine
        fields = next(one.fields for one in shards if one.fields)
        roles = [field.role for field in fields]
        self._says = Boundaries(schema, roles)
        self._keys = [field.key for field in boundary_fields(fields, roles)["traj_id"]]
        self._source, self._run = plan.source[mine], plan.run[mine]

    def numbers(self, tensors: Sequence[Tensor], first: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each, from 0 on, in the order of their places.

        Args:
            tensors: the fields of the store.
            first: the row of the first step of each.

        Cost: O(K log K). Where pieces of one trajectory have come to lie next to each other, the numbers in their shards are read.
        """
        count, plan, mine = len(self._mine), self._plan, self._mine
        if not count or not self._keys:
            return np.arange(count)
        begun = self._marks(tensors, first)
        assert begun.ids is not None  # a field says them
        if len(set(zip(self._source.tolist(), *begun.ids.T.tolist(), strict=True))) == count:  # no pieces
            return np.arange(count)
        lane, begin, end = (self._of_runs(column) for column in range(3))
        over = self._marks(tensors, first + plan.steps[mine] - 1).ends
        ends = plan.truncated[mine] if over is None else over | plan.truncated[mine]
        order = np.lexsort((begin, *begun.ids.T, lane, self._source))
        breaks = np.ones(count, bool)
        older, newer = order[:-1], order[1:]
        breaks[1:] = (self._source[older] != self._source[newer]) | (lane[older] != lane[newer]) | ends[older]
        breaks[1:] |= (begun.ids[older] != begun.ids[newer]).any(1)
        if begun.starts is not None:
            breaks[1:] |= begun.starts[newer]
        group = _numbered(order, breaks)
        behind = 1 + ((group[1:] == group[:-1]) & self._touch()).nonzero()[0]
        behind = behind if over is None else behind[~self._continues(behind, begin[behind] - end[behind - 1])]
        if len(behind):
            place = np.empty(count, np.int64)
            place[order] = np.arange(count)
            breaks[np.maximum(place[behind], place[behind - 1])] = True
            group = _numbered(order, breaks)
        return group

    def _of_runs(self, column: int) -> NDArray[np.int64]:
        """What the tables of the shards say of each trajectory."""
        found = np.empty(len(self._mine), np.int64)
        for which in np.unique(self._source).tolist():
            its = self._source == which
            found[its] = self._shards[which].source.runs[self._run[its], column]
        return found

    def _marks(self, tensors: Sequence[Tensor], rows: NDArray[np.int64]) -> Marks:
        columns = (tensors[which] for which in self._says.which)
        at = torch.from_numpy(rows)
        return self._says.marks([_taken(column, at) for column in columns])

    def _touch(self) -> NDArray[np.bool_]:
        """Whether the row behind a trajectory is the first one of the next: bool ``[K - 1]``."""
        rows, plan = self._mine, self._plan
        touch: NDArray[np.bool_] = (plan.lane[rows[1:]] == plan.lane[rows[:-1]]) & ~plan.gap[rows[:-1]]
        return touch

    def _continues(self, behind: NDArray[np.int64], between: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of those goes on where the one before it ended: no step that lay between them was of the same trajectory."""
        goes_on = np.zeros(len(behind), bool)
        for which in np.unique(self._source[behind]).tolist():
            shard = self._shards[which]
            if shard.source.columns != 1:
                continue
            its = self._source[behind] == which
            newer, runs = behind[its], shard.source.runs
            covered = np.append(0, (runs[:, 2] - runs[:, 1]).cumsum())
            one, other = self._run[newer - 1], self._run[newer]
            goes_on[its] = (
                (_next_alike(shard, self._keys[0])[one] == other)
                & (covered[other] - covered[one + 1] == between[its])
                & (self._plan.skipped[self._mine[newer]] == 0)
            )
        return goes_on


def _numbered(order: NDArray[np.int64], breaks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers of groups that begin at those places of an order, by where their first members are."""
    group = np.empty(len(order), np.int64)
    group[order] = breaks.cumsum() - 1
    _, first, found = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[first.argsort()] = np.arange(len(first))
    return number[found]


def _next_alike(shard: SavedShard, key: tuple[str, ...]) -> NDArray[np.int64]:
    """int64 ``[K]``: for each run of a shard the next one in its lane that has the same number; -1: there is none."""
    runs = shard.source.runs
    ids = read_first_steps(shard, key).reshape(len(runs), -1).contiguous().view(torch.uint8).numpy()
    order = np.lexsort((runs[:, 1], *ids.T, runs[:, 0]))
    same = (runs[order[1:], 0] == runs[order[:-1], 0]) & (ids[order[1:]] == ids[order[:-1]]).all(1)
    found = np.full(len(runs), -1)
    found[order[:-1][same]] = order[1:][same]
    return found


def _taken(column: Tensor, rows: Tensor) -> Tensor:
    """Some rows, also of a dtype that torch cannot index."""
    flat = column.reshape(len(column), -1).view(torch.uint8)
    taken = flat[rows.to(column.device)].cpu().contiguous().view(column.dtype)
    return taken.reshape(len(rows), *column.shape[1:])
