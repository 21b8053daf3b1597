"""A saved store for a buffer of another size, or with priorities of another kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engram.checkpoint.placing import fill_placed, placed_state
from engram.checkpoint.plan import DROPPED, Incomplete, Target, make_plan
from engram.errors import IncompatibleCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.checkpoint.placing import Saved
    from engram.checkpoint.plan import Plan
    from engram.format.schema import Schema

__all__ = ["Converted", "converted", "with_parameters"]

#: More of the steps are not left out without being asked to.
_MOST_DROPPED = 0.5


class Converted(NamedTuple):
    """A storage's state without rows, and what fills them."""

    state: dict[str, Any]
    fill: Callable[[Sequence[Tensor]], None]
    plan: Plan


def converted(saved: Saved, schema: Schema) -> Converted:
    """The newest whole trajectories that fit, dealt out to the lanes; those that are not whole are kept as they are.

    Args:
        saved: what there is.
        schema: of the store that they are for: the same fields, another capacity or number of lanes.

    Raises:
        IncompatibleCheckpoint: the store has columns; more than half of the steps belong to trajectories that cannot be moved; or
            lanes or trajectories have numbers that the dtype of their field cannot hold.
    """
    if schema.columns:
        raise IncompatibleCheckpoint(
            f"{saved.reader.folder}: expected the geometry of a storage with ndim={len(schema.columns) + 1}: it cannot be converted."
        )
    target = Target(schema.lanes, schema.capacity // schema.lanes)
    plan = make_plan([saved.source], [target], Incomplete(open="keep", headless="keep"))
    total = sum(count["steps"] for count in plan.saved.values())
    lost = {
        reason: plan.dropped[reason]["steps"]
        for reason in DROPPED
        if reason != "overflow" and plan.dropped[reason]["steps"]
    }
    if sum(lost.values()) > _MOST_DROPPED * total:
        raise IncompatibleCheckpoint(
            f"{saved.reader.folder}: {sum(lost.values())} of {total} steps belong to trajectories that cannot be moved ({lost}): longer "
            "than a lane, or without both ends. Load it into a buffer of the same capacity and lanes; or save it by a Checkpointer "
            "with roles={...: 'data'} for the fields that say where trajectories end, so that its rows are moved by themselves."
        )
    return Converted(placed_state([saved], plan, 0, schema), fill_placed([saved], plan, 0, schema), plan)


def with_parameters(state: dict[str, Any], alpha: float, eps: float) -> dict[str, Any]:
    """Priorities as they are with another ``alpha`` or ``eps``: each is computed from its leaf."""
    if (state["alpha"], state["eps"]) == (alpha, eps):
        return state
    leaves = state["leaves"]
    priorities = leaves.abs() ** (1 / state["alpha"]) - state["eps"] if state["alpha"] else torch.ones_like(leaves)
    powers = (priorities.clamp(min=0) + eps) ** alpha
    given = (leaves > 0) | leaves.signbit()
    powers = torch.where(powers > 0, powers, torch.full_like(powers, -0.0))
    return {**state, "alpha": alpha, "eps": eps, "leaves": torch.where(given, powers, leaves)}
