"""Where saved trajectories go when the ranks, lanes or capacities that load them are not those that saved them.

A plan is a pure function of the tables of all shards: integers only, and no order that a set, a folder, a hash seed or a clock could
change. So every rank computes the same plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from engram._support.checks import check_choice
from engram.errors import IncompatibleCheckpoint
from engram.format import layout, schema
from engram.saved import checkpoints, description, documents, part_reader, parts
from engram.saved.rows import ENDS, Ints, counted, kinds_of, named_counts, read_rows_state
from engram.types import Ranking

#: Why a trajectory is left out: of which kind it is, or there was no room.
DROPPED = (*description.KINDS[1:], "oversize", "overflow")
KEPT = -1


class Source(NamedTuple):
    """The trajectories that one shard holds."""

    #: Its store's ticket counter.
    clock: int
    #: int64 ``[K, 5]``: the table of its trajectories.
    runs: Ints
    #: By which positions step.
    columns: int = 1
    #: Whether rows say themselves that they are the last ones; else only the next trajectory's first row does.
    marks_ends: bool = True

    @property
    def steps(self) -> Ints:
        """Of each trajectory, int64 ``[K]``."""
        return (self.runs[:, 2] - self.runs[:, 1]) // self.columns

    @property
    def saved(self) -> Ints:
        """int64 ``[2]``: how many trajectories, and how many steps."""
        return np.array([len(self.runs), self.steps.sum()], np.int64)


class Target(NamedTuple):
    """The room of one rank that loads."""

    lanes: int
    lane_length: int

    @property
    def capacity(self) -> int:
        return self.lanes * self.lane_length


class Incomplete(NamedTuple):
    """The policy for trajectories of which a part is missing. Both entries count for those that lack both ends."""

    #: Without a last step: there is none yet, or a row that holds nothing or another's first step follows. ``truncate``: the last
    #: one there is becomes one, marked as cut short. ``keep``: a row that holds nothing follows it, where it ends.
    open: Literal["drop", "truncate", "keep"] = "drop"
    #: Without a first step: it was overwritten, or a row that holds nothing stands before. Of those that are longer than any lane
    #: ``keep`` keeps the newest steps.
    headless: Literal["drop", "keep"] = "drop"


class ReshardPlan(NamedTuple):
    """The trajectories that are kept, in the order of their places: by rank, lane and position. Arrays are int64 ``[K]``."""

    rank: Ints
    lane: Ints
    #: Of the first step in its lane.
    position: Ints
    #: Shard, and in its table the number of the trajectory.
    source: Ints
    run: Ints
    #: Of its first steps, that are left out.
    skipped: Ints
    #: That are kept.
    steps: Ints
    #: Its last step is to be marked as one.
    truncated: np.typing.NDArray[np.bool_]
    #: The row behind it holds nothing.
    gap: np.typing.NDArray[np.bool_]
    #: That load.
    ranks: int
    #: int64 ``[M, reasons, 2]``: by shard and reason, as in :data:`DROPPED`, how many trajectories and steps.
    drops: Ints

    @property
    def digest(self) -> str:
        """sha256 of what goes where: the same on all ranks, or they must not go on."""
        sha = hashlib.sha256()
        places = (self.rank, self.lane, self.position, self.source, self.run)
        for array in (*places, self.skipped, self.steps, self.truncated, self.gap):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Episodes and steps that are left out, by reason, of all shards."""
        return named_counts(DROPPED, self.drops.sum(0))


def numbered(sources: Sequence[Source]) -> tuple[Ints, Ints]:
    """The shard of each trajectory of all of them, and its number there."""
    counts = np.array([len(source.runs) for source in sources], np.int64)
    shard = np.arange(len(sources)).repeat(counts)
    return shard, within(counts)


def within(counts: Ints) -> Ints:
    """0 … count - 1, for each count."""
    ends = counts.cumsum()
    return np.arange(int(ends[-1]) if len(ends) else 0) - (ends - counts).repeat(counts)


def dropped_by(reason: Ints, shard: Ints, steps: Ints, shards: int) -> Ints:
    of = reason != KEPT
    groups = shard[of] * len(DROPPED) + reason[of]
    return counted(groups, steps[of], shards * len(DROPPED)).reshape(shards, len(DROPPED), 2)


#: Of rows without trajectories: steps that stay together, how many such blocks a lane has at least, and a shard at most.
_STEPS = 256
_IN_A_LANE = 16
_BLOCKS = 1 << 16
MOVABLE = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage")
#: What fields that mark a step as the last one of a trajectory that was cut short get there.
TRUNCATED = {"done": 1, "truncated": 1, "terminated": 0, "step_type": 2}
_LAST = frozenset(TRUNCATED)


class SavedShard(NamedTuple):
    """A store in a checkpoint, and what is planned with."""

    reader: part_reader.PartReader
    source: Source
    #: None, if it was never written.
    fields: tuple[schema.PartField, ...] = ()
    #: The state of the storage without rows; None: what is wanted of its arrays is read when it is needed.
    held: dict[str, Any] | None = None

    @property
    def head(self) -> dict[str, Any]:
        """That state, in which arrays may be missing."""
        return self.reader.state if self.held is None else self.held


def open_shard(reader: part_reader.PartReader, *, held: bool = False) -> SavedShard:
    """What there is to move in a part.

    Of each shard the table of its trajectories is held, and nothing that grows with its rows; unless ``held`` says so.

    Raises:
        CorruptCheckpoint: a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    state = read_rows_state(reader) if held else None
    geometry = reader.geometry
    if geometry is None:
        if reader.type not in MOVABLE:
            raise IncompatibleCheckpoint(
                f"{reader.folder}: expected a storage of type {' or '.join(MOVABLE)}, whose rows can be moved, got a "
                f"{reader.type!r:.100}. Load it with as many ranks as saved it, into storages of the same size."
            )
        return SavedShard(reader, Source(1, np.empty((0, 5), np.int64)), held=state)
    clock = reader.state.get("clock")
    if type(clock) is not int or clock < 1:
        raise documents.corrupt(reader.folder, f"expected the clock of a store, got {clock!r:.100}")
    columns = math.prod(geometry.columns)
    runs = _checked_runs(reader, geometry.lane_length, columns)
    fields = reader.schema or ()
    marks_ends = not has_ends(fields) or any(field.role in _LAST for field in fields)
    return SavedShard(reader, Source(clock, runs, columns, marks_ends), fields, state)


def in_blocks(saved: Sequence[SavedShard], lane_length: int) -> list[SavedShard]:
    """The same for lanes of that length: where no field says how steps belong together, they are moved in blocks that follow each
    other, each as if it were a trajectory.

    Of 256 steps at most, but for shards that would be more than 65,536 of them; and short enough that so many fit a lane with
    little left over.

    Raises ``CorruptCheckpoint``: a block is damaged.
    """
    if has_ends(fields_of(saved)):
        return list(saved)
    fitting = lane_length // max(_IN_A_LANE, -(-lane_length // _STEPS))
    return [_cut(one, min(lane_length, max(fitting, -(-int(one.source.saved[1]) // _BLOCKS), 1))) for one in saved]


def in_rows(saved: SavedShard) -> SavedShard:
    """The same, of which each row is moved by itself, as it is: no field is rewritten.

    Raises ``CorruptCheckpoint``: a block is damaged.
    """
    return _cut(saved, 1)._replace(fields=tuple(msgspec.structs.replace(field, role="data") for field in saved.fields))


def _cut(saved: SavedShard, block: int) -> SavedShard:
    """The same in blocks of so many steps."""
    source = saved.source
    if not len(source.runs):
        return saved
    return saved._replace(source=source._replace(runs=_blocks(saved.reader, source.runs, source.columns, block)))


def fields_of(saved: Sequence[SavedShard]) -> tuple[schema.PartField, ...]:
    """The fields of all shards that were written."""
    return next((one.fields for one in saved if one.fields), ())


def has_ends(fields: Sequence[schema.PartField]) -> bool:
    """Whether some field says where trajectories end."""
    return any(field.role in ENDS for field in fields)


def can_truncate(fields: Sequence[schema.PartField]) -> bool:
    """Whether a step can be marked as the last one of a trajectory that was cut short."""
    return any(TRUNCATED.get(field.role) for field in fields)


def lanes_of(reader: part_reader.PartReader) -> Ints:
    """Position and live rows of each lane."""
    return np.frombuffer(reader.read_all(f"{layout.FOLDER}/lanes.bin"), "<i8").reshape(-1, 4)[:, :2]


def _checked_runs(reader: part_reader.PartReader, lane_length: int, columns: int) -> Ints:
    """The trajectories, each of rows that are there and no two of the same ones."""
    lanes, rows = lanes_of(reader), reader.records["tickets"]
    if reader.segment_rows is not None:
        rows = max((it.end for it in reader.listing.segments), default=0)
    position, live = lanes[:, 0], lanes[:, 1]
    if (position < 0).any() or (live < np.minimum(position, lane_length)).any() or (live > lane_length).any():
        raise documents.corrupt(reader.folder / layout.FOLDER / "lanes.bin", "expected lanes of a store")
    path = reader.folder / layout.FOLDER / "trajectories.bin"
    runs = np.frombuffer(reader.read_all(f"{layout.FOLDER}/trajectories.bin"), "<i8").reshape(-1, 5)
    lane, first, end, time, flags = runs.T
    good = (lane >= 0) & (lane < len(lanes)) & (first < end) & (time >= 0) & (flags >= 0) & (flags < 16)
    at = np.where(good, lane, 0)
    good &= (first >= position[at] - live[at]) & (end < position[at] + columns)
    ring = np.maximum(live[at], 1)
    offset, last = first % ring, (end - columns) % ring
    good &= lane * lane_length + np.where(last < offset, ring - 1, last) < rows
    order = np.lexsort((first, first % columns, lane))
    track = np.stack([lane, first % columns])[:, order]
    good[order[1:]] &= (track[:, 1:] != track[:, :-1]).any(0) | (first[order[1:]] >= end[order[:-1]])
    if not good.all():
        raise documents.corrupt(
            path, f"expected trajectories of the rows that are there, got {runs[np.argmin(good)].tolist()}"
        )
    return runs


def _blocks(reader: part_reader.PartReader, runs: Ints, columns: int, block: int) -> Ints:
    """Runs in pieces of so many steps, counted from their newest ones, as if each were a trajectory."""
    live, numbers = lanes_of(reader)[:, 1], read_rows_state(reader)["numbers"].numpy()
    steps = (runs[:, 2] - runs[:, 1]) // columns
    counts = -(-steps // block)
    run = np.arange(len(runs)).repeat(counts)
    from_newest = counts.repeat(counts) - 1 - within(counts)
    end = runs[run, 2] - from_newest * block * columns
    first = np.maximum(end - block * columns, runs[run, 1])
    length = reader.geometry.lane_length  # type: ignore[union-attr] # it has runs
    last = runs[run, 0] * length + (end - columns) % live[runs[run, 0]]
    flags = np.full(len(run), description.HAS_FIRST | description.HAS_LAST)
    return np.stack([runs[run, 0], first, end, numbers[last], flags], 1)


def open_shards(checkpoint: checkpoints.Checkpoint, stack: contextlib.ExitStack) -> list[SavedShard]:
    """What all ranks saved. It is closed with the stack.

    Raises:
        CorruptCheckpoint: a shard is missing, or a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    readers = (parts.open_storage(checkpoint, rank) for rank in range(checkpoint.manifest.world))
    return [open_shard(stack.enter_context(reader)) for reader in readers]


def saved_fields(checkpoint: checkpoints.Checkpoint) -> tuple[schema.PartField, ...]:
    """The fields of the first rank that was ever written; none: none was."""
    for rank in range(checkpoint.manifest.world):
        with parts.open_storage(checkpoint, rank) as reader:
            if reader.schema is not None:
                return reader.schema
    return ()


_POLICIES = {"open": ("drop", "truncate", "keep"), "headless": ("drop", "keep")}


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
    tail, head = flags & description.HAS_LAST != 0, flags & description.HAS_FIRST != 0
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
        gap[kept[_last_of_lanes(rank, lane)]] = True
    drops = dropped_by(reason, shard, steps, len(sources))
    drops[:, DROPPED.index("overflow"), 1] += counted(shard[kept], skipped[kept], len(sources))[:, 1]
    runs = shard[kept], number[kept], skipped[kept], (steps - skipped)[kept]
    truncated = ~tail[kept] & (incomplete.open == "truncate")
    return ReshardPlan(rank, lane, position, *runs, truncated, gap[kept], len(targets), drops)


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _newest_first(sources: Sequence[Source], shard: Ints, which: Ints) -> Ints:
    """The order of some of all trajectories by age. Of equal ones: by shard and lane, and the later one in it first."""
    age = _joined(source.clock - source.runs[:, 3] for source in sources)[which]
    lane = _joined(source.runs[:, 0] for source in sources)[which]
    later = _joined(-source.runs[:, 1] for source in sources)[which]
    return np.lexsort((later, lane, shard[which], age))


def _positions(rank: Ints, lane: Ints, room: Ints) -> Ints:
    """Where each begins in its lane, one behind the other."""
    before = room.cumsum() - room
    newest = _last_of_lanes(rank, lane)
    oldest = np.zeros_like(newest)
    oldest[1:] = newest[:-1] + 1
    return before - before[oldest].repeat(newest + 1 - oldest)


def _last_of_lanes(rank: Ints, lane: Ints) -> Ints:
    """Which of them is the last one of its lane."""
    last = np.ones(len(rank), bool)
    last[:-1] = (rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])
    return last.nonzero()[0]


def _assign(rooms: Ints, targets: Sequence[Target], overflow: str) -> tuple[Ints, Ints]:
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


def _ints(numbers: Ints, piece: int = 1 << 14) -> Iterator[int]:
    """As ints, which Python adds and compares faster; not all of them at once."""
    return itertools.chain.from_iterable(numbers[at : at + piece].tolist() for at in range(0, len(numbers), piece))


def plan_by_rank(
    sources: Sequence[Source], values: Sequence[np.typing.NDArray[np.float64]], targets: Sequence[Target]
) -> ReshardPlan:
    """Deal rows out round robin, the best first, until there is no room; each rank's lie in the order of their ages.

    Of equal ones that of the lower shard comes first, then the one that lies first in its table.

    Args:
        sources: the shards, in the order of their ranks; each row is a run of its own.
        values: of their rows.
        targets: the ranks that load, of one lane each.

    Cost: O(n log n).
    """
    shard, number = numbered(sources)
    time = _joined(source.clock - source.runs[:, 3] for source in sources)
    best_first = np.lexsort((number, shard, -np.concatenate([np.empty(0), *values])))
    rank = _round_robin([target.capacity for target in targets], len(shard))
    kept = best_first[: len(rank)]
    by_age = np.lexsort((number[kept], shard[kept], -time[kept], rank))
    kept, rank = kept[by_age], rank[by_age]
    position = within(np.bincount(rank, minlength=len(targets)))
    none, left = np.zeros(len(rank), bool), shard[best_first[len(rank) :]]
    drops = dropped_by(np.full_like(left, DROPPED.index("overflow")), left, np.ones_like(left), len(sources))
    lane, runs = np.zeros_like(rank), (shard[kept], number[kept], np.zeros_like(rank), np.ones_like(rank))
    return ReshardPlan(rank, lane, position, *runs, none, none, len(targets), drops)


def _round_robin(room: Sequence[int], n: int) -> Ints:
    """The rank of each of ``n`` rows, or of as many as there is room for."""
    places = [min(size, n) for size in room]
    turn = _joined(np.arange(size) for size in places)
    rank = np.repeat(np.arange(len(places)), places)
    return rank[np.lexsort((rank, turn))][:n]


def checked_incomplete(given: Mapping[str, str] | None) -> Incomplete:
    """Policies by kind. Raises ``ValueError``: a kind or a policy that there is not."""
    for kind, policy in (given or {}).items():
        check_choice("incomplete", kind, _POLICIES)
        check_choice(f"incomplete: {kind!r}", policy, _POLICIES[kind])
    return Incomplete(**(given or {}))  # type: ignore[arg-type]


class Policy(NamedTuple):
    """The policy of a reshard: what is kept of a checkpoint, and how it is redistributed."""

    incomplete: Incomplete = Incomplete()
    overflow: Literal["cut", "fill"] = "cut"
    #: Rows are redistributed one by one, the best first; None: whole trajectories, the newest first.
    ranking: Ranking | Literal["newest"] | None = None
