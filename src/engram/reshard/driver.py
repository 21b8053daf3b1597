"""A checkpoint on its way to other ranks, lanes or capacities: planned, checked and read, for each of its three callers.

``Checkpointer.restore`` has one :class:`Reshard` on every rank, ``loads(convert=True)`` one of a single shard, and the command line
one for all ranks.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from engram._words import count
from engram.errors import IncompatibleCheckpoint
from engram.format import schema as schemas
from engram.persist import parts
from engram.persist.components import check_kind
from engram.persist.rows import SavedRowsSource, read_rows_state
from engram.reshard.by_rank import plan_by_rank
from engram.reshard.by_trajectory import plan_by_trajectory
from engram.reshard.plan import DROPPED, Incomplete, Target, counted
from engram.reshard.scatter import Scatter
from engram.reshard.shards import MOVABLE, can_truncate, fields_of, has_ends, in_blocks, in_rows, read_first_steps
from engram.types import Ranking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.checkpoints import Checkpoint
    from engram.format.parts import PartField
    from engram.format.schema import Schema
    from engram.persist.components import SavedPart
    from engram.reshard.plan import ReshardPlan
    from engram.reshard.shards import SavedShard
    from engram.types import RowsSource

_POLICIES = {"open": ("drop", "truncate", "keep"), "headless": ("drop", "keep")}
#: Why trajectories are dropped that may lack their last steps, or their first ones.
_LACKING = {"open": ("open", "both", "mid", "orphan"), "headless": ("headless", "both", "orphan")}
#: Of the steps, that a conversion may drop as longer than a lane.
_CONVERSION_DROPS = 0.5
_OTHER_CONVERSIONS = (
    "load it into a buffer of the same capacity and lanes; or save it by a Checkpointer with roles={...: 'data'} for the fields "
    "that say where trajectories end: then its rows are moved by themselves. The buffer is as it was"
)


def checked_incomplete(given: Mapping[str, str] | None) -> Incomplete:
    """Policies by kind. Raises ``ValueError``: a kind or a policy that there is not."""
    for kind, policy in (given or {}).items():
        if kind not in _POLICIES:
            raise ValueError(f"incomplete: expected the keys {', '.join(_POLICIES)}, got {kind!r}.")
        if policy not in _POLICIES[kind]:
            raise ValueError(f"incomplete: {kind!r}: expected one of {', '.join(_POLICIES[kind])}, got {policy!r}.")
    return Incomplete(**(given or {}))  # type: ignore[arg-type]


class Policy(NamedTuple):
    """What is kept of a checkpoint, and how it is redistributed."""

    incomplete: Incomplete = Incomplete()
    overflow: Literal["cut", "fill"] = "cut"
    ranking: Ranking | Literal["newest"] | None = None
    """Rows are redistributed one by one, the best first; None: whole trajectories, the newest first."""


class PlacedRows(NamedTuple):
    """What one rank gets."""

    state: dict[str, Any]
    """Of its store, without rows."""
    source: RowsSource


class _NoRows:
    """Of shards that were never written."""

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """There is nothing to fill."""


class Reshard:
    """Shards, and where their trajectories go."""

    def __init__(self, shards: Sequence[SavedShard], plan: ReshardPlan, targets: Sequence[Target]) -> None:
        self.shards, self.plan, self.targets = list(shards), plan, list(targets)
        self._leader_parts: dict[str, SavedPart] | None = None

    @property
    def leader(self) -> int:
        """The shard that says what is not of rows: the first that was ever written."""
        return next((i for i, one in enumerate(self.shards) if one.reader.geometry is not None), 0)

    @property
    def fields(self) -> tuple[PartField, ...]:
        """None, if no shard was ever written."""
        return fields_of(self.shards)

    def rows(self, rank: int, env_offset: int = 0) -> PlacedRows:
        """What a rank gets of the rows.

        Raises:
            CorruptCheckpoint: a table or a block is damaged.
            IncompatibleCheckpoint: shards differ in alpha or eps, or a dtype cannot number the lanes.
        """
        first = self.shards[self.leader]
        if first.reader.geometry is None:
            return PlacedRows(read_rows_state(first.reader), _NoRows())
        target = self.targets[rank]
        schema = msgspec.structs.replace(
            schemas.decode(str(first.reader.state["schema"]).encode(), str(first.reader.folder)),
            capacity=target.capacity,
            lanes=target.lanes,
            columns=(),
        )
        scatter = Scatter(self.shards, self.plan, rank, schema, env_offset)
        state = scatter.state()
        scatter.check_ranges()
        return PlacedRows(state, scatter)

    def parts(self, checkpoint: Checkpoint, rank: int) -> list[tuple[str, str, dict[str, object]]]:
        """The parts of a rank that are not of rows, by name and class: as the leader has them, but for what begins again.

        Raises:
            CorruptCheckpoint: one is damaged. IncompatibleCheckpoint: one has what is of rows.
        """
        seed = seed_of(checkpoint, len(self.targets), rank)
        generator = torch.Generator().manual_seed(seed).get_state()
        others = [
            (name, it.type, parts.reset(name, it.state, seed, generator))
            for name, it in self.leader_parts(checkpoint).items()
        ]
        return [(part, kind, state) for part, kind, state in others if state != parts.EMPTY.get(part)]

    def leader_parts(self, checkpoint: Checkpoint) -> dict[str, SavedPart]:
        """The parts of the leader that are not of rows, which are read once. Raises ``CorruptCheckpoint``: one is damaged."""
        if self._leader_parts is None:
            self._leader_parts = parts.read_parts(checkpoint, self.leader)
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
        lost = {reason: self.plan.dropped[reason]["steps"] for reason in DROPPED if reason != "overflow"}
        if sum(lost.values()) <= most * steps:
            return
        named = ", ".join(f"{number} {reason}" for reason, number in lost.items() if number)
        advice = [way for end, way in ways.items() if any(lost[reason] for reason in _LACKING[end])]
        if lost["oversize"]:
            longest = max(target.lane_length for target in self.targets)
            advice.append(f"lanes longer than {count(longest, 'row')} keep the oversize ones")
        raise IncompatibleCheckpoint(
            f"{where}: expected to leave out at most {most:.0%} of {count(steps, 'saved step')}, would leave out {sum(lost.values())} "
            f"({named}). {'; '.join([*advice, otherwise])}."
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


def reshard(shards: Sequence[SavedShard], targets: Sequence[Target], policy: Policy) -> Reshard:
    """Plan where saved rows go.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: no field can say that a trajectory was cut short, as the policy asks for; rows are ranked, and a
            shard lacks the field that decides, or a target has several lanes.
    """
    planned = _in_blocks_or_trajectories if policy.ranking is None else _in_single_rows
    made = planned(shards, targets, policy)
    made.check_counts()
    return made


def _in_blocks_or_trajectories(shards: Sequence[SavedShard], targets: Sequence[Target], policy: Policy) -> Reshard:
    fields = fields_of(shards)
    if policy.incomplete.open == "truncate" and has_ends(fields) and not can_truncate(fields):
        raise IncompatibleCheckpoint(
            f"{shards[0].reader.folder}: expected a field with the role done, truncated or step_type, which can say that a "
            'trajectory was cut short, found none. "keep" in place of "truncate" leaves open ones as they are.'
        )
    whole = in_blocks(shards, min(target.lane_length for target in targets))
    plan = plan_by_trajectory([one.source for one in whole], targets, policy.incomplete, policy.overflow)
    return Reshard(whole, plan, targets)


def _in_single_rows(shards: Sequence[SavedShard], targets: Sequence[Target], policy: Policy) -> Reshard:
    lanes = max((target.lanes for target in targets), default=1)
    if lanes > 1:
        raise IncompatibleCheckpoint(
            f"{shards[0].reader.folder}: expected targets of 1 lane, as its writer puts rows in no order, got {lanes}."
        )
    rows = [in_rows(one) for one in shards]
    values = [_values(one, policy.ranking) for one in rows]
    return Reshard(rows, plan_by_rank([one.source for one in rows], values, targets), targets)


def _values(rows: SavedShard, ranking: Ranking | Literal["newest"] | None) -> NDArray[np.float64]:
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
    dropped: dict[str, dict[str, int]]
    """Episodes and steps that are dropped, by reason."""


def convert(shard: SavedShard, schema: Schema, ndim: int, ranking: Ranking | Literal["newest"] | None) -> Converted:
    """A shard for the storage of that schema.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: a storage with columns, or more than half of the steps cannot be moved.
    """
    check_kind(shard.reader, parts.STORAGE, *MOVABLE)
    if schemas.encode(schema).decode() == shard.head["schema"]:
        return Converted(PlacedRows(shard.head, SavedRowsSource(shard.reader)), {})
    where = str(shard.reader.folder)
    if ndim > 1:
        raise IncompatibleCheckpoint(
            f"{where}: expected the geometry of a storage with ndim={ndim}: it cannot be converted."
        )
    target = Target(schema.lanes, schema.capacity // schema.lanes)
    policy = Policy(Incomplete(open="keep", headless="keep"), "cut", ranking)
    made = reshard([shard], [target], policy)
    made.check_dropped(_CONVERSION_DROPS, where, {}, _OTHER_CONVERSIONS)
    return Converted(made.rows(0), made.plan.dropped)


def seed_of(checkpoint: Checkpoint, ranks: int, rank: int) -> int:
    """Of a rank's generator: every load of this checkpoint by as many ranks gives the same."""
    text = f"{checkpoint.sha256} {ranks} {rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
