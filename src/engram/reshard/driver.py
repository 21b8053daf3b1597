"""A checkpoint on its way to other ranks, lanes or capacities: planned, checked and read, for each of its three callers.

``Checkpointer.restore`` has one :class:`Reshard` on every rank, ``loads(convert=True)`` one of a single shard, and the command line
one for all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from engram._support import copies, words
from engram.errors import IncompatibleCheckpoint
from engram.format import schema as schemas
from engram.format.sizes import resized, rings_of, with_rings
from engram.reshard import plan as plans
from engram.reshard.scatter import Scatter, read_first_steps
from engram.saved import checkpoints, part_reader
from engram.saved import parts as saved_parts
from engram.saved.rows import SavedRowsSource, count_kinds, counted, named_counts, read_rows_state
from engram.types import Ranking, RowsSource

#: Why trajectories are dropped that may lack their last steps, or their first ones.
_LACKING = {"open": ("open", "both", "mid", "orphan"), "headless": ("headless", "both", "orphan")}
#: Of the steps, that a conversion may drop as longer than a lane.
_CONVERSION_DROPS = 0.5
_OTHER_CONVERSIONS = (
    "load it into a buffer of the same capacity and lanes; or save it by a Checkpointer with roles={...: 'data'} for the fields "
    "that say where trajectories end: then its rows are moved by themselves. The buffer is as it was"
)


class PlacedRows(NamedTuple):
    """The rows that one rank gets."""

    #: Of its store, without rows.
    state: dict[str, Any]
    source: RowsSource


class Reshard:
    """Shards, and where their trajectories go."""

    def __init__(
        self, shards: Sequence[plans.SavedShard], plan: plans.ReshardPlan, targets: Sequence[plans.Target]
    ) -> None:
        self.shards, self.plan, self.targets = list(shards), plan, list(targets)
        self._leader_parts: dict[str, saved_parts.SavedPart] | None = None
        self._needed: dict[int, int] = {}

    @property
    def leader(self) -> int:
        """The shard that says what is not of rows: the first that was ever written."""
        return next((i for i, one in enumerate(self.shards) if one.reader.geometry is not None), 0)

    @property
    def fields(self) -> tuple[schemas.PartField, ...]:
        """None, if no shard was ever written."""
        return plans.fields_of(self.shards)

    def rows(self, rank: int, env_offset: int = 0) -> PlacedRows:
        """What a rank gets of the rows.

        Raises:
            CorruptCheckpoint: a table or a block is damaged.
            IncompatibleCheckpoint: shards differ in alpha or eps, or a dtype cannot number the lanes.
        """
        first = self.shards[self.leader]
        if first.reader.geometry is None:  # no shard was ever written: there is nothing to fill
            return PlacedRows(read_rows_state(first.reader), SavedRowsSource(first.reader))
        scatter = Scatter(self.shards, self.plan, rank, self._schema(first.reader, rank), env_offset)
        state = scatter.state()
        scatter.check_ranges()
        return PlacedRows(state, scatter)

    def make_room(self) -> None:
        """From now on rings have room for the items that come to the fullest lane of all ranks.

        Raises:
            CorruptCheckpoint: a table or a block is damaged.
        """
        reader = self.shards[self.leader].reader
        if reader.geometry is None or not any(field.ragged for field in self.fields):
            return
        for rank in range(len(self.targets)):
            needed = Scatter(self.shards, self.plan, rank, self._schema(reader, rank)).needed_items()
            self._needed = {leader: max(items, self._needed.get(leader, 0)) for leader, items in needed.items()}

    def _schema(self, reader: part_reader.PartReader, rank: int) -> schemas.Schema:
        target = self.targets[rank]
        saved = schemas.decode(str(reader.state["schema"]).encode(), str(reader.folder))
        made = msgspec.structs.replace(resized(saved, target.capacity, target.lanes), columns=())
        if not self._needed:
            return made
        sizes = {n: (items and max(items, self._needed.get(n, 0)), most) for n, (items, most) in rings_of(made).items()}
        return with_rings(made, sizes)

    def parts(self, checkpoint: checkpoints.Checkpoint, rank: int) -> list[tuple[str, str, dict[str, object]]]:
        """The parts of a rank that are not of rows, by name and class: as the leader has them, but for what begins again.

        Raises:
            CorruptCheckpoint: one is damaged. IncompatibleCheckpoint: one has what is of rows.
        """
        seed = seed_of(checkpoint, len(self.targets), rank)
        generator = torch.Generator().manual_seed(seed).get_state()
        leading = self.leader_parts(checkpoint).items()
        others = [(name, it.type, saved_parts.reset(name, it.state, seed, generator)) for name, it in leading]
        return [(part, kind, state) for part, kind, state in others if state != saved_parts.EMPTY.get(part)]

    def leader_parts(self, checkpoint: checkpoints.Checkpoint) -> dict[str, saved_parts.SavedPart]:
        """The parts of the leader that are not of rows, which are read once. Raises ``CorruptCheckpoint``: one is damaged."""
        if self._leader_parts is None:
            self._leader_parts = saved_parts.read_parts(checkpoint, self.leader)
        return self._leader_parts

    def check_dropped(self, most: float, where: str, ways: Mapping[str, str], otherwise: str) -> None:
        """Raise unless enough of the steps are kept. What there is no room for is not counted: smaller targets mean that.

        Args:
            most: the fraction of the saved steps that may be dropped.
            where: for the message.
            ways: how those are kept that lack their last steps (``open``), or their first ones (``headless``).
            otherwise: what else can be done.

        Raises:
            IncompatibleCheckpoint: more would be dropped as incomplete, or longer than any lane.
        """
        steps = sum(int(one.source.saved[1]) for one in self.shards)
        lost = {reason: self.plan.dropped[reason]["steps"] for reason in plans.DROPPED if reason != "overflow"}
        if sum(lost.values()) <= most * steps:
            return
        named = ", ".join(f"{number:,} {reason}" for reason, number in lost.items() if number)
        advice = [way for end, way in ways.items() if any(lost[reason] for reason in _LACKING[end])]
        if lost["oversize"]:
            longest = max(target.lane_length for target in self.targets)
            advice.append(f"lanes longer than {words.count(longest, 'row')} keep the oversize ones")
        raise IncompatibleCheckpoint(
            f"{where}: expected to leave out at most {words.format_share(most)} of {words.count(steps, 'saved step')}, would leave out "
            f"{sum(lost.values()):,} ({named}). {'; '.join([*advice, otherwise])}."
        )

    def check_counts(self) -> None:
        """Raise ``RuntimeError`` unless, of every shard, what is kept and what is dropped is what was saved: a bug otherwise."""
        plan = self.plan
        found = counted(plan.source, plan.steps, len(self.shards)) + plan.drops.sum(1)
        for which, one in enumerate(self.shards):
            if (found[which] != one.source.saved).any():
                raise RuntimeError(
                    f"{one.reader.folder}: expected a plan for {one.source.saved.tolist()} episodes and steps, got one for "
                    f"{found[which].tolist()}. Nothing was changed. This is a bug of engram: please report it."
                )


def reshard(shards: Sequence[plans.SavedShard], targets: Sequence[plans.Target], policy: plans.Policy) -> Reshard:
    """Plan where saved rows go.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: no field can say that a trajectory was cut short, as the policy asks for; rows are ranked, and a
            shard lacks the field that decides, or a target has several lanes.
    """
    fields, lanes = plans.fields_of(shards), max((target.lanes for target in targets), default=1)
    if policy.ranking is None:  # whole trajectories, or blocks of steps
        if policy.incomplete.open == "truncate" and plans.has_ends(fields) and not plans.can_truncate(fields):
            raise IncompatibleCheckpoint(
                f"{shards[0].reader.folder}: expected a field with the role done, truncated or step_type, which can say that a "
                'trajectory was cut short, found none. "keep" in place of "truncate" leaves open ones as they are.'
            )
        moved = plans.in_blocks(shards, min(target.lane_length for target in targets))
        plan = plans.plan_by_trajectory([one.source for one in moved], targets, policy.incomplete, policy.overflow)
    else:
        if lanes > 1:
            raise IncompatibleCheckpoint(
                f"{shards[0].reader.folder}: expected targets of 1 lane, as its writer puts rows in no order, got {lanes}."
            )
        moved = [plans.in_rows(one) for one in shards]
        values = [_values(one, policy.ranking) for one in moved]
        plan = plans.plan_by_rank([one.source for one in moved], values, targets)
    made = Reshard(moved, plan, targets)
    made.check_counts()
    return made


def _values(rows: plans.SavedShard, ranking: Ranking | Literal["newest"] | None) -> np.typing.NDArray[np.float64]:
    """Of each row: the largest stay."""
    source = rows.source
    if not len(source.runs):
        return np.empty(0)
    if isinstance(ranking, Ranking):
        return ranking.values(read_first_steps(rows, ranking.key))
    return (source.runs[:, 3] - source.clock).astype(np.float64)  # in writes of its shard: 0 and below


class Converted(NamedTuple):
    """A shard, for a storage of another capacity or number of lanes."""

    rows: PlacedRows
    #: Episodes and steps that are dropped, by reason.
    dropped: dict[str, dict[str, int]]


def convert(
    shard: plans.SavedShard, schema: schemas.Schema, ndim: int, ranking: Ranking | Literal["newest"] | None
) -> Converted:
    """A shard for the storage of that schema.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: a storage with columns, or more than half of the steps cannot be moved.
    """
    saved_parts.check_kind(shard.reader, saved_parts.STORAGE, *plans.MOVABLE)
    where = str(shard.reader.folder)
    saved = str(shard.head["schema"]).encode()
    if schema.ragged:
        saved = schemas.encode(with_rings(schemas.decode(saved, where), rings_of(schema)))
    if schemas.encode(schema) == saved:
        return Converted(PlacedRows(shard.head, SavedRowsSource(shard.reader)), {})
    if ndim > 1:
        raise IncompatibleCheckpoint(f"{where}: expected the geometry of one with ndim={ndim}: it cannot be converted.")
    target = plans.Target(schema.lanes, schema.capacity // schema.lanes)
    policy = plans.Policy(plans.Incomplete(open="keep", headless="keep"), "cut", ranking)
    made = reshard([shard], [target], policy)
    made.check_dropped(_CONVERSION_DROPS, where, {}, _OTHER_CONVERSIONS)
    return Converted(made.rows(0), made.plan.dropped)


def seed_of(checkpoint: checkpoints.Checkpoint, ranks: int, rank: int) -> int:
    """Of a rank's generator: every load of this checkpoint by as many ranks gives the same."""
    text = f"{checkpoint.sha256} {ranks} {rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Lost(NamedTuple):
    """Shards that there are none of."""

    ranks: tuple[int, ...] = ()
    #: The checkpoint that last had them. None: none did, so what is lost is unknown.
    as_of: str | None = None
    episodes: int | None = None
    steps: int | None = None


def reshard_report(made: Reshard, ranks: Sequence[int], lost: Lost = Lost()) -> dict[str, Any]:  # noqa: B008 - a value
    """Episodes and steps: saved, of which kinds, kept, dropped by reason, and truncated; in total and by shard; and what each
    target got.

    Args:
        made: what was done.
        ranks: what those were called that saved the shards.
        lost: shards that were missing.
    """
    plan, shards_there = made.plan, len(made.shards)
    kept = counted(plan.source, plan.steps, shards_there)
    cut = counted(plan.source[plan.truncated], plan.steps[plan.truncated], shards_there)
    shards: list[dict[str, Any]] = [
        {
            "rank": rank,
            "saved": _pair(one.source.saved),
            "kinds": count_kinds(one.source.runs, one.source.columns),
            "kept": _pair(kept[which]),
            "dropped": named_counts(plans.DROPPED, plan.drops[which]),
            "truncated": _pair(cut[which]),
        }
        for which, (rank, one) in enumerate(zip(ranks, made.shards, strict=True))
    ]
    targets = [_load(made, rank) for rank in range(len(made.targets))]
    return {
        "plan": plan.digest,
        **{what: _sum([shard[what] for shard in shards]) for what in shards[0] if what != "rank"},
        "lost": {**lost._asdict(), "ranks": list(lost.ranks)},
        "smallest_rank": min(target["steps"] for target in targets),
        "largest_rank": max(target["steps"] for target in targets),
        "smallest_lane": min(target["smallest_lane"] for target in targets),
        "largest_lane": max(target["largest_lane"] for target in targets),
        "unused": sum(target["unused"] for target in targets),
        "shards": shards,
        "targets": targets,
    }


def _load(made: Reshard, rank: int) -> dict[str, int]:
    target, mine = made.targets[rank], made.plan.rank == rank
    steps = counted(made.plan.lane[mine], made.plan.steps[mine], target.lanes)[:, 1]
    return {
        "rank": rank,
        **target._asdict(),
        "episodes": int(mine.sum()),
        "steps": int(steps.sum()),
        "smallest_lane": int(steps.min()),
        "largest_lane": int(steps.max()),
        "unused": target.capacity - int(steps.sum()),
    }


def format_reshard(dealt: Mapping[str, Any]) -> str:
    """A report in a line."""
    text = f"{_format_counts(dealt)}; from {words.count(len(dealt['shards']), 'rank')} to {len(dealt['targets'])}"
    lost = dealt["lost"]
    if not lost["ranks"]:
        return text
    ranks = ", ".join(map(str, lost["ranks"]))
    whose = f"the shard of rank {ranks}" if len(lost["ranks"]) == 1 else f"the shards of ranks {ranks}"
    if lost["as_of"] is None:
        return f"{text}; lost with {whose}: unknown how much"
    return f"{text}; lost with {whose}: at {lost['as_of']} that was {format_counts(lost)}"


def reshard_lines(dealt: Mapping[str, Any]) -> Iterator[str]:
    """What became of each shard, and what each target got, in a line each."""
    for shard in dealt["shards"]:
        yield f"shard of rank {shard['rank']}: {_format_counts(shard)}"
    for it in dealt["targets"]:
        yield (
            f"rank {it['rank']}: {format_counts(it)} in {words.count(it['lanes'], 'lane')} of {words.count(it['lane_length'], 'row')}, "
            f"{it['smallest_lane']} to {it['largest_lane']} in each; {words.count(it['unused'], 'row')} unused"
        )
    yield (
        f"{dealt['smallest_rank']} to {words.count(dealt['largest_rank'], 'step')} in a rank, {dealt['smallest_lane']} to "
        f"{dealt['largest_lane']} in a lane; {words.count(dealt['unused'], 'row')} unused; plan {dealt['plan']}"
    )


def _format_counts(counts: Mapping[str, Any]) -> str:
    every = {"saved": counts["saved"], "kept": counts["kept"]}
    every |= {f"dropped as {reason}": it for reason, it in counts["dropped"].items() if it["episodes"]}
    if counts["truncated"]["episodes"]:
        every["kept as truncated"] = counts["truncated"]
    return ", ".join(f"{what} {format_counts(it)}" for what, it in every.items())


def format_counts(counts: Mapping[str, int]) -> str:
    """Episodes and steps."""
    return f"{words.count(counts['episodes'], 'episode')} with {words.count(counts['steps'], 'step')}"


def _pair(pair: np.typing.NDArray[np.int64]) -> dict[str, int]:
    return {"episodes": int(pair[0]), "steps": int(pair[1])}


def _sum(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all, added up; also those one level below."""
    return {
        key: sum(one[key] for one in counts) if isinstance(value, int) else _sum([one[key] for one in counts])
        for key, value in counts[0].items()
    }


#: Parts that begin again, whatever they say.
_RESET = ("rng", "prefetch")
#: Of priorities, what is not of rows; other entries must agree, or are those of all.
_OF_PRIORITIES = "beta"
_RANKS_NAMED = 8
#: What a storage's state is called that is part of something else.
_ROWS = "storage"


def disagreements(checkpoint: checkpoints.Checkpoint, made: Reshard) -> list[str]:
    """Where ranks that have written differ from the one whose state is taken, an entry each.

    Raises:
        CorruptCheckpoint: a part is damaged.
        IncompatibleCheckpoint: something has rows of its own that others' rows mean, such as final observations.
    """
    written = [rank for rank, one in enumerate(made.shards) if one.reader.geometry is not None]
    if len(written) < 2:
        return []
    taken = made.leader
    ours = _state(made.shards[taken], made.leader_parts(checkpoint))
    found: dict[str, list[str]] = {}
    names = checkpoint.ranks
    for rank in written:
        if rank == taken:
            continue
        parts = saved_parts.read_parts(checkpoint, rank, without=(saved_parts.STORAGE, *_RESET))
        theirs = _state(made.shards[rank], parts)
        for where, here, there in _differences(ours, theirs, ""):
            if where not in found:
                found[where] = [f"rank {names[taken]}{_said(here)}"]
            if where.rpartition(".")[2] == _ROWS:
                raise IncompatibleCheckpoint(
                    f"{checkpoint.folder}: {where}: expected no state with rows of its own, which those of the buffer mean, as final "
                    "observations are: it cannot be redistributed. Restore it with as many ranks as saved it, into buffers of "
                    "their sizes."
                )
            found[where].append(f"rank {names[rank]}{_said(there)}")
    return [
        f"{where}: expected the same on all ranks, got that of {', '.join(said[:_RANKS_NAMED])}{' …' * (len(said) > _RANKS_NAMED)}; "
        f"that of rank {names[taken]} is taken"
        for where, said in found.items()
    ]


def _state(shard: plans.SavedShard, parts: Mapping[str, saved_parts.SavedPart]) -> dict[str, object]:
    """All of it that could matter to others."""
    storage = shard.head
    priorities = {name: {_OF_PRIORITIES: it[_OF_PRIORITIES]} for name, it in storage["priorities"].items()}
    state: dict[str, object] = {"priorities": priorities, "windows": storage["windows"], "transforms": {}}
    return state | {key: saved_parts.reset(key, it.state, 0, None) for key, it in parts.items() if key not in _RESET}


def _differences(ours: object, theirs: object, where: str) -> Iterator[tuple[str, object, object]]:
    """The deepest entries that differ; of a storage's state, that it does."""
    if where.rpartition(".")[2] == _ROWS and any(True for _ in _differences(ours, theirs, "")):
        yield where, ours, theirs
        return
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key, value in ours.items():
            yield from _differences(value, theirs[key], f"{where}.{key}" if where else key)
        return
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype is theirs.dtype and ours.shape == theirs.shape
        same = same and torch.equal(copies.raw_bytes(ours), copies.raw_bytes(theirs))
    else:
        same = repr(ours) == repr(theirs)
    if not same:
        yield where, ours, theirs


def _said(value: object) -> str:
    return f" ({value!r})" if isinstance(value, bool | int | float | str) and len(repr(value)) < 40 else ""
