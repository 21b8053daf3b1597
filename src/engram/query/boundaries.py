"""Which fields tell trajectories apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram._words import warn
from engram.field_paths import as_path, public
from engram.trajectories import DEFAULT_DONE_KEYS

if TYPE_CHECKING:
    from collections.abc import Collection

    from engram.field_paths import FieldPath

#: Trajectory ids, in the order in which they are looked for.
ID_KEYS: tuple[FieldPath, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))
#: End flags: those of the first group that has one.
END_KEYS = (tuple(("next", key) for key in DEFAULT_DONE_KEYS), tuple((key,) for key in DEFAULT_DONE_KEYS))


def boundary_keys(known: Collection[FieldPath], given: object, call: str) -> tuple[bool, tuple[FieldPath, ...]]:
    """Whether an id tells trajectories apart, and its key; or the keys of end flags, with a warning.

    Raises ``KeyError``: none of them is known. ``TypeError``: no key.
    """
    path = as_path(given, f"{call}: trajectory_key")
    for key in ID_KEYS if path is None else (path,):
        if key in known:
            return True, (key,)
    if path is not None:
        raise KeyError(
            f"{call}: trajectory_key: expected a stored field, one of {[public(key) for key in sorted(known)]}, got {public(path)!r}."
        )
    for group in END_KEYS:
        found = tuple(key for key in group if key in known)
        if found:
            warn(
                f"{call}: expected trajectory ids, such as the field ('collector', 'traj_ids') or 'episode', got the end flags "
                f"{[public(key) for key in found]} only: a trajectory whose last step has none is taken for a part of the next one. Store "
                "ids, or name their field: trajectory_key=…."
            )
            return False, found
    raise KeyError(
        f"{call}: expected trajectory ids, one of {[public(key) for key in ID_KEYS]}, or end flags such as ('next', 'done'), got "
        f"{[public(key) for key in sorted(known)]}. Name their field: trajectory_key=…."
    )
