"""A checkpoint on its way to other ranks, lanes or capacities: what goes where, what is left out and why, in figures."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from engram._words import count
from engram.errors import IncompatibleCheckpoint
from engram.format import schema as schemas
from engram.persist import parts
from engram.persist.rows import read_rows_state
from engram.reshard.by_rank import plan_best
from engram.reshard.plan import DROPPED, Incomplete, counted, make_plan
from engram.reshard.scatter import (
    can_truncate,
    fields_of,
    fill_placed,
    has_ends,
    in_blocks,
    in_rows,
    open_saved,
    placed_state,
    read_runs,
)

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from engram.format.checkpoints import Checkpoint
    from engram.format.parts import PartField
    from engram.reshard.plan import Plan, Target
    from engram.reshard.scatter import Saved
    from engram.types import Ranking

__all__ = [
    "Move",
    "Planner",
    "by_trajectory",
    "by_value",
    "checked_incomplete",
    "open_shards",
    "saved_fields",
    "seed_of",
]

_POLICIES = {"open": ("drop", "truncate", "keep"), "headless": ("drop", "keep")}
#: Why trajectories are left out that may lack their last steps, or their first ones.
_LACKING = {"open": ("open", "both", "mid", "orphan"), "headless": ("headless", "both", "orphan")}


def checked_incomplete(given: Mapping[str, str] | None) -> Incomplete:
    """Policies by kind. Raises ``ValueError``: a kind or a policy that there is not."""
    for kind, policy in (given or {}).items():
        if kind not in _POLICIES:
            raise ValueError(f"incomplete: expected the keys {', '.join(_POLICIES)}, got {kind!r}.")
        if policy not in _POLICIES[kind]:
            raise ValueError(f"incomplete: {kind!r}: expected one of {', '.join(_POLICIES[kind])}, got {policy!r}.")
    return Incomplete(**(given or {}))  # type: ignore[arg-type]


#: What decides where everything goes.
Planner: TypeAlias = "Callable[[Sequence[Saved], Sequence[Target]], Move]"


class Move(NamedTuple):
    """Shards and where their trajectories go."""

    saved: list[Saved]
    plan: Plan
    targets: list[Target]

    @property
    def leader(self) -> int:
        """The shard that says what is not of rows: the first that was ever written."""
        return next((i for i, one in enumerate(self.saved) if one.reader.geometry is not None), 0)

    @property
    def fields(self) -> tuple[PartField, ...]:
        """None, if no shard was ever written."""
        return fields_of(self.saved)

    def rows(self, rank: int, env_offset: int = 0) -> tuple[dict[str, Any], Callable[[Sequence[Tensor]], None]]:
        """What a rank gets: the state of its store without rows, and what reads those into it.

        Raises:
            CorruptCheckpoint: a table or a block is damaged.
            IncompatibleCheckpoint: shards differ in alpha or eps, or a dtype cannot number the lanes.
        """
        first = self.saved[self.leader]
        if first.reader.geometry is None:
            return read_rows_state(first.reader), lambda _: None
        target = self.targets[rank]
        schema = msgspec.structs.replace(
            schemas.decode(first.reader.state["schema"].encode(), str(first.reader.folder)),
            capacity=target.capacity,
            lanes=target.lanes,
            columns=(),
        )
        return placed_state(self.saved, self.plan, rank, schema), fill_placed(
            self.saved, self.plan, rank, schema, env_offset
        )

    def check_left_out(self, most: float, where: str, ways: Mapping[str, str], otherwise: str) -> None:
        """Raise unless enough of the steps are kept. What there is no room for is not counted: smaller targets mean that.

        Args:
            most: the fraction of the saved steps that may be left out.
            where: for the message.
            ways: how those are kept that lack their last steps (``open``), or their first ones (``headless``).
            otherwise: what else can be done.

        Raises:
            IncompatibleCheckpoint: more would be left out as incomplete, or longer than any lane.
        """
        steps = sum(int(one.source.saved[1]) for one in self.saved)
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
        """Raise ``RuntimeError`` unless, of every shard, what is kept and what is left out is what was saved: a bug otherwise."""
        plan = self.plan
        found = counted(plan.source, plan.steps, len(self.saved)) + plan.left_out.sum(1)
        for which, one in enumerate(self.saved):
            if (found[which] != one.source.saved).any():
                raise RuntimeError(
                    f"{one.reader.folder}: expected a plan for {one.source.saved.tolist()} episodes and steps, got one for "
                    f"{found[which].tolist()}. Nothing was changed. This is a bug of engram: please report it."
                )


def open_shards(checkpoint: Checkpoint, stack: contextlib.ExitStack) -> list[Saved]:
    """What all ranks saved. It is closed with the stack.

    Raises:
        CorruptCheckpoint: a shard is missing, or a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    return [
        open_saved(stack.enter_context(parts.open_storage(checkpoint, rank)))
        for rank in range(checkpoint.manifest.world)
    ]


def saved_fields(checkpoint: Checkpoint) -> tuple[PartField, ...]:
    """The fields of the first rank that was ever written; none: none was."""
    for rank in range(checkpoint.manifest.world):
        with parts.open_storage(checkpoint, rank) as reader:
            if reader.schema is not None:
                return reader.schema
    return ()


def by_trajectory(incomplete: Incomplete, overflow: Literal["cut", "fill"]) -> Planner:
    """Whole trajectories are dealt out, the newest first; blocks of steps, where no field says which belong together.

    What it returns raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: no field can say that a trajectory was cut short, as ``incomplete`` asks for.
    """

    def plan(saved: Sequence[Saved], targets: Sequence[Target]) -> Move:
        fields = fields_of(saved)
        if incomplete.open == "truncate" and has_ends(fields) and not can_truncate(fields):
            raise IncompatibleCheckpoint(
                f"{saved[0].reader.folder}: expected a field with the role done, truncated or step_type, which can say that a "
                'trajectory was cut short, found none. "keep" in place of "truncate" leaves open ones as they are.'
            )
        whole = in_blocks(saved, min(target.lane_length for target in targets))
        return _checked(whole, make_plan([one.source for one in whole], targets, incomplete, overflow), targets)

    return plan


def by_value(ranking: Ranking) -> Planner:
    """Rows are dealt out by themselves, the best first.

    What it returns raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: a shard lacks the field, or a target has several lanes.
    """

    def plan(saved: Sequence[Saved], targets: Sequence[Target]) -> Move:
        lanes = max((target.lanes for target in targets), default=1)
        if lanes > 1:
            raise IncompatibleCheckpoint(
                f"{saved[0].reader.folder}: expected targets of 1 lane, as its writer keeps the best rows, got {lanes}."
            )
        rows = [in_rows(one) for one in saved]
        values = [ranking.values(read_runs(one, ranking.key)) if len(one.source.runs) else np.empty(0) for one in rows]
        return _checked(rows, plan_best([one.source for one in rows], values, targets), targets)

    return plan


def _checked(saved: Sequence[Saved], plan: Plan, targets: Sequence[Target]) -> Move:
    move = Move(list(saved), plan, list(targets))
    move.check_counts()
    return move


def seed_of(checkpoint: Checkpoint, ranks: int, rank: int) -> int:
    """Of a rank's generator: every load of this checkpoint by as many ranks gives the same."""
    text = f"{checkpoint.sha256} {ranks} {rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
