"""Where saved trajectories go when the ranks, lanes or capacities that load them are not those that saved them.

A pure function of the tables of all shards: integers only, and no order that a set, a folder, a hash seed or a clock could
change. So every rank computes the same plan.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from engram.checkpoint.runs import KINDS, kinds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["DROPPED", "Incomplete", "Plan", "Source", "Target", "by_reason", "counted", "leave_out", "make_plan"]

#: Why a trajectory is left out: of which kind it is, or there was no room.
DROPPED = (*KINDS[1:], "oversize", "overflow")
_KEPT = -1


class Source(NamedTuple):
    """What one shard holds."""

    clock: int
    """Its store's ticket counter."""
    runs: NDArray[np.int64]
    """int64 ``[K, 5]``: the table of its trajectories."""
    columns: int = 1
    """By which positions step."""

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
    """What becomes of trajectories of which a part is missing."""

    open: Literal["drop", "truncate", "keep"] = "drop"
    """No last step yet. ``truncate``: the last one there is becomes one, marked as cut short. ``keep``: a row that holds nothing
    follows it, where it ends."""
    headless: Literal["drop", "keep"] = "drop"
    """The first steps were overwritten."""


class Plan(NamedTuple):
    """The trajectories that are kept, in the order of their places: by rank, lane and position. Arrays are int64 ``[K]``."""

    rank: NDArray[np.int64]
    lane: NDArray[np.int64]
    position: NDArray[np.int64]
    """Of the first step in its lane."""
    source: NDArray[np.int64]
    """Shard, and in its table the number of the trajectory."""
    run: NDArray[np.int64]
    steps: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    """Its last step is to be marked as one."""
    gap: NDArray[np.bool_]
    """The row behind it holds nothing."""
    ranks: int
    """That load."""
    left_out: NDArray[np.int64]
    """int64 ``[M, reasons, 2]``: by shard and reason, as in :data:`DROPPED`, how many trajectories and steps."""

    @property
    def digest(self) -> str:
        """sha256 of what goes where: the same on all ranks, or they must not go on."""
        sha = hashlib.sha256()
        for array in (self.rank, self.lane, self.position, self.source, self.run, self.steps, self.truncated, self.gap):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()

    @property
    def kept(self) -> dict[str, int]:
        return {"episodes": len(self.rank), "steps": int(self.steps.sum())}

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Episodes and steps that are left out, by reason, of all shards."""
        return by_reason(self.left_out.sum(0))


def by_reason(left_out: NDArray[np.int64]) -> dict[str, dict[str, int]]:
    """Episodes and steps by reason, of an int64 ``[reasons, 2]``."""
    return {
        reason: {"episodes": int(count[0]), "steps": int(count[1])}
        for reason, count in zip(DROPPED, left_out, strict=True)
    }


def counted(of: NDArray[np.int64], steps: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """int64 ``[groups, 2]``: how many trajectories each group has, and how many steps. ``of``: the group of each."""
    episodes = np.bincount(of, minlength=groups)
    total = np.zeros(groups, np.int64)
    np.add.at(total, of, steps)
    return np.stack([episodes, total], 1)


def make_plan(
    sources: Sequence[Source],
    targets: Sequence[Target],
    incomplete: Incomplete = Incomplete(),  # noqa: B008 - a value
    overflow: Literal["cut", "fill"] = "cut",
) -> Plan:
    """Deal trajectories out: the newest first, each to the rank and the lane of it that hold the least so far.

    Loads of ranks of one capacity, and of the lanes of a rank, then differ by no more than the longest trajectory, at every point
    of time.

    Args:
        sources: the shards, in the order of their ranks.
        targets: the ranks that load.
        incomplete: what becomes of trajectories that are not whole. Others than open and headless ones are dropped.
        overflow: of more than there is room for: stop at the first that fits nowhere, so that nothing newer than anything kept is
            dropped; or go on with older, shorter ones.

    Cost: O(n log n), about 3 µs per trajectory.
    """
    shard, number, table, steps = _together(sources)
    kind = np.concatenate([np.empty(0, np.int64), *(kinds_of(source.runs, source.columns) for source in sources)])
    age = np.array([source.clock for source in sources], np.int64)[shard] - table[:, 3]
    policy = {"complete": True, "open": incomplete.open != "drop", "headless": incomplete.headless != "drop"}
    wanted = np.array([policy.get(name, False) for name in KINDS])[kind]
    reason = np.where(wanted, _KEPT, kind - 1)  # the first reasons are the kinds but for complete
    is_open = kind == KINDS.index("open")
    gap = is_open & (incomplete.open == "keep")
    room = steps + gap
    longest = max((target.lane_length for target in targets), default=0)
    reason[wanted & (room > longest)] = DROPPED.index("oversize")
    candidates = np.flatnonzero(reason == _KEPT)
    newest_first = np.lexsort((-table[candidates, 1], table[candidates, 0], shard[candidates], age[candidates]))
    candidates = candidates[newest_first]
    rank, lane = _deal(room[candidates].tolist(), targets, overflow)
    placed = rank >= 0
    reason[candidates[~placed]] = DROPPED.index("overflow")
    kept, rank, lane = candidates[placed], rank[placed], lane[placed]
    oldest_first = np.lexsort((-np.arange(len(kept)), lane, rank))
    kept, rank, lane = kept[oldest_first], rank[oldest_first], lane[oldest_first]
    return Plan(
        rank,
        lane,
        _positions(rank, lane, room[kept]),
        shard[kept],
        number[kept],
        steps[kept],
        is_open[kept] & (incomplete.open == "truncate"),
        gap[kept],
        len(targets),
        _left_out(reason, shard, steps, len(sources)),
    )


def _together(
    sources: Sequence[Source],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The trajectories of all shards: the shard of each, its number there, its record, and its steps."""
    counts = np.array([len(source.runs) for source in sources], np.int64)
    shard = np.repeat(np.arange(len(sources)), counts)
    number = np.arange(len(shard)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.concatenate([np.empty((0, 5), np.int64), *(source.runs for source in sources)])
    steps = np.concatenate([np.empty(0, np.int64), *(source.steps for source in sources)])
    return shard, number, table, steps


def leave_out(why: str, shard: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """What a plan says of single rows that are left out for one reason. ``shard``: that of each."""
    reason = np.full(len(shard), DROPPED.index(why))
    return _left_out(reason, shard, np.ones(len(shard), np.int64), shards)


def _left_out(
    reason: NDArray[np.int64], shard: NDArray[np.int64], steps: NDArray[np.int64], shards: int
) -> NDArray[np.int64]:
    of = reason != _KEPT
    groups = shard[of] * len(DROPPED) + reason[of]
    return counted(groups, steps[of], shards * len(DROPPED)).reshape(shards, len(DROPPED), 2)


def _positions(rank: NDArray[np.int64], lane: NDArray[np.int64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins in its lane, one behind the other."""
    before = np.cumsum(room) - room
    first = np.ones(len(rank), bool)
    first[1:] = (rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])
    return before - np.repeat(before[first], np.diff(np.append(np.flatnonzero(first), len(rank))))


def _deal(
    room_of: Sequence[int], targets: Sequence[Target], overflow: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank and lane of each; -1 for what is left out."""
    common = math.lcm(*(target.capacity for target in targets)) if targets else 1
    unit = [common // target.capacity for target in targets]  # loads in this unit compare as shares of the capacity do
    ranks = [(0, n) for n in range(len(targets))]
    lanes = [[(0, lane) for lane in range(target.lanes)] for target in targets]
    room = [target.lane_length for target in targets]  # of the lane that holds the least
    to_rank, to_lane = np.full(len(room_of), -1), np.full(len(room_of), -1)
    hopeless = max(room, default=0) + 1  # nothing of that length or longer fits anywhere
    for i, length in enumerate(room_of):
        full: list[tuple[int, int]] = []
        if length < hopeless:
            while ranks and room[ranks[0][1]] < length:
                full.append(heapq.heappop(ranks))
        if length >= hopeless or not ranks:
            for entry in full:
                heapq.heappush(ranks, entry)
            if overflow == "cut":
                break
            hopeless = min(hopeless, length)
            continue
        load, n = ranks[0]
        held, lane = lanes[n][0]
        heapq.heapreplace(lanes[n], (held + length, lane))
        heapq.heapreplace(ranks, (load + length * unit[n], n))
        room[n] = targets[n].lane_length - lanes[n][0][0]
        to_rank[i], to_lane[i] = n, lane
        for entry in full:
            heapq.heappush(ranks, entry)
    return to_rank, to_lane
