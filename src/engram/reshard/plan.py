"""Where saved trajectories go when the ranks, lanes or capacities that load them are not those that saved them.

A pure function of the tables of all shards: integers only, and no order that a set, a folder, a hash seed or a clock could
change. So every rank computes the same plan.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from engram.format.tables import HAS_FIRST, HAS_LAST
from engram.persist.trajectory_table import KINDS, kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "DROPPED",
    "Incomplete",
    "Plan",
    "Source",
    "Target",
    "by_reason",
    "counted",
    "leave_out",
    "make_plan",
    "numbered",
    "within",
]

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


class Plan(NamedTuple):
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
    left_out: NDArray[np.int64]
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
    reason = np.where(wanted, _KEPT, kind - 1)  # the first reasons are the kinds but for complete
    gap = ~tail & (incomplete.open == "keep")
    closing = not all(source.marks_ends for source in sources)
    targets = [target._replace(lane_length=target.lane_length - closing) for target in targets]
    longest = max((target.lane_length for target in targets), default=0)
    too_long = np.maximum(steps + gap - longest, 0)
    skipped = np.where(wanted & (too_long < steps) & (incomplete.headless == "keep"), too_long, 0)
    room = steps - skipped + gap
    reason[wanted & (room > longest)] = DROPPED.index("oversize")
    candidates = np.flatnonzero(reason == _KEPT)
    candidates = candidates[_newest_first(sources, shard, candidates)]
    rank, lane = _deal(room[candidates], targets, overflow)
    placed = rank >= 0
    reason[candidates[~placed]] = DROPPED.index("overflow")
    kept, rank, lane = candidates[placed], rank[placed], lane[placed]
    oldest_first = np.lexsort((-np.arange(len(kept)), lane, rank))
    kept, rank, lane = kept[oldest_first], rank[oldest_first], lane[oldest_first]
    position = _positions(rank, lane, room[kept])
    if closing:
        gap[kept[_newest(rank, lane)]] = True
    left_out = _left_out(reason, shard, steps, len(sources))
    left_out[:, DROPPED.index("overflow"), 1] += counted(shard[kept], skipped[kept], len(sources))[:, 1]
    return Plan(
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
        left_out,
    )


def numbered(sources: Sequence[Source]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The shard of each trajectory of all of them, and its number there."""
    counts = np.array([len(source.runs) for source in sources], np.int64)
    shard = np.repeat(np.arange(len(sources)), counts)
    return shard, within(counts)


def within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 … count - 1, for each count."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _joined(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _newest_first(sources: Sequence[Source], shard: NDArray[np.int64], which: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of some of all trajectories by age. Of equal ones: by shard and lane, and the later one in it first."""
    age = _joined(source.clock - source.runs[:, 3] for source in sources)[which]
    lane = _joined(source.runs[:, 0] for source in sources)[which]
    later = _joined(-source.runs[:, 1] for source in sources)[which]
    return np.lexsort((later, lane, shard[which], age))


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
    newest = _newest(rank, lane)
    oldest = np.append(0, newest[:-1] + 1)[: len(newest)]
    begin: NDArray[np.int64] = before - np.repeat(before[oldest], newest + 1 - oldest)
    return begin


def _newest(rank: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of them is the last one of its lane."""
    last = np.ones(len(rank), bool)
    last[:-1] = (rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])
    return np.flatnonzero(last)


def _deal(
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
