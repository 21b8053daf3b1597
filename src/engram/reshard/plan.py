"""Where saved trajectories go when the ranks, lanes or capacities that load them are not those that saved them.

A pure function of the tables of all shards: integers only, and no order that a set, a folder, a hash seed or a clock could
change. So every rank computes the same plan.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from engram.persist.trajectory_table import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Why a trajectory is left out: of which kind it is, or there was no room.
DROPPED = (*KINDS[1:], "oversize", "overflow")
KEPT = -1


class Source(NamedTuple):
    """What one shard holds."""

    clock: int
    """Its store's ticket counter."""
    runs: NDArray[np.int64]
    """int64 ``[K, 5]``: the table of its trajectories."""
    columns: int = 1
    """By which positions step."""
    marks_ends: bool = True
    """Whether rows say themselves that they are the last ones; else only the next trajectory's first row does."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """Of each trajectory, int64 ``[K]``."""
        return (self.runs[:, 2] - self.runs[:, 1]) // self.columns

    @property
    def saved(self) -> NDArray[np.int64]:
        """int64 ``[2]``: how many trajectories, and how many steps."""
        return np.array([len(self.runs), self.steps.sum()], np.int64)


class Target(NamedTuple):
    """What one rank has room for."""

    lanes: int
    lane_length: int

    @property
    def capacity(self) -> int:
        return self.lanes * self.lane_length


class Incomplete(NamedTuple):
    """What becomes of trajectories of which a part is missing. Both count for those that lack both ends."""

    open: Literal["drop", "truncate", "keep"] = "drop"
    """Without a last step: there is none yet, or a row that holds nothing or another's first step follows. ``truncate``: the last
    one there is becomes one, marked as cut short. ``keep``: a row that holds nothing follows it, where it ends."""
    headless: Literal["drop", "keep"] = "drop"
    """Without a first step: it was overwritten, or a row that holds nothing stands before. Of those that are longer than any lane
    ``keep`` keeps the newest steps."""


class ReshardPlan(NamedTuple):
    """The trajectories that are kept, in the order of their places: by rank, lane and position. Arrays are int64 ``[K]``."""

    rank: NDArray[np.int64]
    lane: NDArray[np.int64]
    position: NDArray[np.int64]
    """Of the first step in its lane."""
    source: NDArray[np.int64]
    """Shard, and in its table the number of the trajectory."""
    run: NDArray[np.int64]
    skipped: NDArray[np.int64]
    """Of its first steps, that are left out."""
    steps: NDArray[np.int64]
    """That are kept."""
    truncated: NDArray[np.bool_]
    """Its last step is to be marked as one."""
    gap: NDArray[np.bool_]
    """The row behind it holds nothing."""
    ranks: int
    """That load."""
    drops: NDArray[np.int64]
    """int64 ``[M, reasons, 2]``: by shard and reason, as in :data:`DROPPED`, how many trajectories and steps."""

    @property
    def digest(self) -> str:
        """sha256 of what goes where: the same on all ranks, or they must not go on."""
        sha = hashlib.sha256()
        places = (self.rank, self.lane, self.position, self.source, self.run)
        for array in (*places, self.skipped, self.steps, self.truncated, self.gap):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()

    @property
    def kept(self) -> dict[str, int]:
        return {"episodes": len(self.rank), "steps": int(self.steps.sum())}

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Episodes and steps that are left out, by reason, of all shards."""
        return by_reason(self.drops.sum(0))


def by_reason(drops: NDArray[np.int64]) -> dict[str, dict[str, int]]:
    """Episodes and steps by reason, of an int64 ``[reasons, 2]``."""
    return {
        reason: {"episodes": int(count[0]), "steps": int(count[1])}
        for reason, count in zip(DROPPED, drops, strict=True)
    }


def counted(of: NDArray[np.int64], steps: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """int64 ``[groups, 2]``: how many trajectories each group has, and how many steps. ``of``: the group of each."""
    episodes = np.bincount(of, minlength=groups)
    total = np.zeros(groups, np.int64)
    np.add.at(total, of, steps)
    return np.stack([episodes, total], 1)


def numbered(sources: Sequence[Source]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The shard of each trajectory of all of them, and its number there."""
    counts = np.array([len(source.runs) for source in sources], np.int64)
    shard = np.arange(len(sources)).repeat(counts)
    return shard, within(counts)


def within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 … count - 1, for each count."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if len(ends) else 0) - (ends - counts).repeat(counts)


def drop_rows(why: str, shard: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """What a plan says of single rows that are left out for one reason. ``shard``: that of each."""
    reason = np.full(len(shard), DROPPED.index(why))
    return dropped_by(reason, shard, np.ones(len(shard), np.int64), shards)


def dropped_by(
    reason: NDArray[np.int64], shard: NDArray[np.int64], steps: NDArray[np.int64], shards: int
) -> NDArray[np.int64]:
    of = reason != KEPT
    groups = shard[of] * len(DROPPED) + reason[of]
    return counted(groups, steps[of], shards * len(DROPPED)).reshape(shards, len(DROPPED), 2)
