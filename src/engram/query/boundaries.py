"""Which fields tell trajectories apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._words import warn
from engram.field_paths import as_path, public
from engram.samplers.trajectory_tables import TrajectoryKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.samplers.trajectory_tables import Boundaries


def boundaries_of(fields: Sequence[Field], numbers: dict[FieldPath, int], given: object, call: str) -> Boundaries:
    """Where trajectories end among rows of these fields, with a warning where no id says it.

    Raises ``KeyError``: no field says it. ``TypeError``: no key.

    Args:
        fields, numbers: as :meth:`TrajectoryKeys.boundaries`.
        given: the field with ids; None: the usual ones.
    """
    path = as_path(given, f"{call}: trajectory_key")
    known = [public(key) for key in sorted(numbers)]
    if path is not None and path not in numbers:
        raise KeyError(f"{call}: trajectory_key: expected a stored field, one of {known}, got {public(path)!r}.")
    try:
        found = TrajectoryKeys(path, None, None).boundaries(fields, numbers, call)
    except RuntimeError:
        raise KeyError(
            f"{call}: expected trajectory ids, such as ('collector', 'traj_ids') or 'episode', or end flags such as ('next', 'done'), "
            f"got {known}. Name their field: trajectory_key=…."
        ) from None
    if not found.ids:
        warn(
            f"{call}: expected trajectory ids, such as the field ('collector', 'traj_ids') or 'episode', got the end flags "
            f"{[public(fields[number].key) for number in found.ends]} only: a trajectory whose last step has none is taken for a part of "
            "the next one. Store ids, or name their field: trajectory_key=…."
        )
    return found
