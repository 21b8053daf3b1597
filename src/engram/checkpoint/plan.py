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

__all__ = ["DROPPED", "Incomplete", "Plan", "Source", "Target", "make_plan"]

#: Why a trajectory is left out.
DROPPED = ("open", "headless", "both", "mid", "orphan", "oversize", "overflow")


class Source(NamedTuple):
    """What one shard holds."""

    clock: int
    """Its store's ticket counter."""
    runs: NDArray[np.int64]
    """int64 ``[K, 5]``: the table of its trajectories."""
    columns: int = 1
    """By which positions step."""


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
    saved: dict[str, dict[str, int]]
    """Episodes and steps of each kind."""
    dropped: dict[str, dict[str, int]]
    """Episodes and steps that are left out, by reason."""

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
    if not sources:
        sources = [Source(1, np.empty((0, 5), np.int64))]
    shard = np.concatenate([np.full(len(source.runs), i) for i, source in enumerate(sources)])
    number = np.concatenate([np.arange(len(source.runs)) for source in sources])
    table = np.concatenate([source.runs for source in sources])
    kind = np.concatenate([kinds_of(source.runs, source.columns) for source in sources])
    steps = (table[:, 2] - table[:, 1]) // np.array([source.columns for source in sources])[shard]
    age = np.array([source.clock for source in sources])[shard] - table[:, 3]
    saved = {name: _count(steps, kind == i) for i, name in enumerate(KINDS)}
    policy = {"complete": True, "open": incomplete.open != "drop", "headless": incomplete.headless != "drop"}
    wanted = np.array([policy.get(name, False) for name in KINDS])[kind]
    dropped = {name: _count(steps, ~wanted & (kind == KINDS.index(name))) for name in DROPPED[:5]}
    is_open = kind == KINDS.index("open")
    gap = is_open & (incomplete.open == "keep")
    room = steps + gap
    longest = max((target.lane_length for target in targets), default=0)
    dropped["oversize"] = _count(steps, wanted & (room > longest))
    wanted &= room <= longest
    candidates = np.flatnonzero(wanted)
    newest_first = np.lexsort((-table[candidates, 1], table[candidates, 0], shard[candidates], age[candidates]))
    candidates = candidates[newest_first]
    rank, lane = _deal(room[candidates].tolist(), targets, overflow)
    placed = rank >= 0
    dropped["overflow"] = _count(steps[candidates], ~placed)
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
        saved,
        dropped,
    )


def _count(steps: NDArray[np.int64], which: NDArray[np.bool_]) -> dict[str, int]:
    return {"episodes": int(which.sum()), "steps": int(steps[which].sum())}


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
