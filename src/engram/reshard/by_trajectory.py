"""Whole trajectories for other ranks, lanes or capacities: the newest first, each to the rank and lane that hold the least."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from engram.format.tables import HAS_FIRST, HAS_LAST
from engram.persist.trajectory_table import kinds_of
from engram.reshard.plan import DROPPED, KEPT, Incomplete, ReshardPlan, counted, dropped_by, numbered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from engram.reshard.plan import Source, Target


def plan_by_trajectory(
    sources: Sequence[Source],
    targets: Sequence[Target],
    incomplete: Incomplete = Incomplete(),  # noqa: B008 - a value
    overflow: Literal["cut", "fill"] = "cut",
) -> ReshardPlan:
    """Assign trajectories: the newest first, each to the rank and the lane of it that hold the least so far.

    Loads of ranks of one capacity, and of the lanes of a rank, then differ by no more than the longest trajectory, at every point
    of time. Where rows do not mark ends, one that holds nothing closes each lane: the newest trajectory would be open otherwise,
    and the next one that is written there could join it.

    Args:
        sources: the shards, in the order of their ranks.
        targets: the ranks that load.
        incomplete: what becomes of trajectories that are not whole.
        overflow: of more than there is room for: stop at the first that fits nowhere, so that nothing newer than anything kept is
            dropped; or go on with older, shorter ones.

    Cost: O(n log n), about 3 µs per trajectory.
    """
    shard, number = numbered(sources)
    steps = _joined(source.steps for source in sources)
    kind = _joined(kinds_of(source.runs, source.columns) for source in sources).astype(np.int8)
    flags = _joined(source.runs[:, 4] for source in sources)
    tail, head = flags & HAS_LAST != 0, flags & HAS_FIRST != 0
    del flags
    wanted = (tail | (incomplete.open != "drop")) & (head | (incomplete.headless != "drop"))
    reason = np.where(wanted, KEPT, kind - 1)  # the first reasons are the kinds but for complete
    gap = ~tail & (incomplete.open == "keep")
    closing = not all(source.marks_ends for source in sources)
    targets = [target._replace(lane_length=target.lane_length - closing) for target in targets]
    longest = max((target.lane_length for target in targets), default=0)
    too_long = np.maximum(steps + gap - longest, 0)
    skipped = np.where(wanted & (too_long < steps) & (incomplete.headless == "keep"), too_long, 0)
    room = steps - skipped + gap
    reason[wanted & (room > longest)] = DROPPED.index("oversize")
    candidates = (reason == KEPT).nonzero()[0]
    candidates = candidates[_newest_first(sources, shard, candidates)]
    rank, lane = _assign(room[candidates], targets, overflow)
    placed = rank >= 0
    reason[candidates[~placed]] = DROPPED.index("overflow")
    kept, rank, lane = candidates[placed], rank[placed], lane[placed]
    oldest_first = np.lexsort((-np.arange(len(kept)), lane, rank))
    kept, rank, lane = kept[oldest_first], rank[oldest_first], lane[oldest_first]
    position = _positions(rank, lane, room[kept])
    if closing:
        gap[kept[_newest(rank, lane)]] = True
    drops = dropped_by(reason, shard, steps, len(sources))
    drops[:, DROPPED.index("overflow"), 1] += counted(shard[kept], skipped[kept], len(sources))[:, 1]
    return ReshardPlan(
        rank,
        lane,
        position,
        shard[kept],
        number[kept],
        skipped[kept],
        (steps - skipped)[kept],
        ~tail[kept] & (incomplete.open == "truncate"),
        gap[kept],
        len(targets),
        drops,
    )


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _newest_first(sources: Sequence[Source], shard: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of some of all trajectories by age. Of equal ones: by shard and lane, and the later one in it first."""
    age = _joined(source.clock - source.runs[:, 3] for source in sources)[which]
    lane = _joined(source.runs[:, 0] for source in sources)[which]
    later = _joined(-source.runs[:, 1] for source in sources)[which]
    return np.lexsort((later, lane, shard[which], age))


def _positions(rank: NDArray[np.int64], lane: NDArray[np.int64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins in its lane, one behind the other."""
    before = room.cumsum() - room
    newest = _newest(rank, lane)
    oldest = np.zeros_like(newest)
    oldest[1:] = newest[:-1] + 1
    begin: NDArray[np.int64] = before - before[oldest].repeat(newest + 1 - oldest)
    return begin


def _newest(rank: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of them is the last one of its lane."""
    last = np.ones(len(rank), bool)
    last[:-1] = (rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])
    return last.nonzero()[0]


def _assign(
    rooms: NDArray[np.int64], targets: Sequence[Target], overflow: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank and lane of each; -1 for what is left out."""
    capacities = [max(1, target.capacity) for target in targets]
    common = math.lcm(*capacities)
    unit = [common // capacity for capacity in capacities]  # loads in this unit compare as shares of the capacity do
    ranks = [(0, n) for n in range(len(targets))]
    lanes = [[(0, lane) for lane in range(target.lanes)] for target in targets]
    room = [target.lane_length for target in targets]  # of the lane that holds the least
    to_rank, to_lane = np.full(len(rooms), -1), np.full(len(rooms), -1)
    hopeless = max(room, default=0) + 1  # nothing of that length or longer fits anywhere
    for i, length in enumerate(_ints(rooms)):
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


def _ints(numbers: NDArray[np.int64], piece: int = 1 << 14) -> Iterator[int]:
    """As ints, which Python adds and compares faster; not all of them at once."""
    return itertools.chain.from_iterable(numbers[at : at + piece].tolist() for at in range(0, len(numbers), piece))
