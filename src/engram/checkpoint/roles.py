"""What fields mean to a checkpoint: which of them end a trajectory, and which must be rewritten when it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engram.format.schema import Field

__all__ = ["ROLES", "check_roles", "roles_of"]

ROLES = ("data", "done", "terminated", "truncated", "step_type", "env_id", "traj_id", "position")

#: Fields that mean something unless ``roles=`` says otherwise: the first one that is stored.
_USUAL: dict[str, tuple[tuple[str, ...], ...]] = {
    "done": (("next", "done"), ("done",)),
    "terminated": (("next", "terminated"), ("terminated",)),
    "truncated": (("next", "truncated"), ("truncated",)),
    "step_type": (("step_type",),),
    "env_id": (("env_id",),),
    "traj_id": (("collector", "traj_ids"), ("episode",)),
}


def check_roles(given: Mapping[Any, str] | None) -> None:
    """Raise ``ValueError`` unless these are roles, and each but ``data`` is that of one field."""
    chosen: dict[str, Any] = {}
    for key, role in (given or {}).items():
        if role not in ROLES:
            raise ValueError(f"roles: {key!r}: expected one of {', '.join(ROLES)}, got {role!r}.")
        if role != "data" and role in chosen:
            raise ValueError(f"roles: expected one field per role, got {chosen[role]!r} and {key!r} for {role!r}.")
        chosen[role] = key


def roles_of(fields: Sequence[Field], given: Mapping[Any, str] | None = None) -> tuple[str, ...]:
    """The role of each field.

    Args:
        fields: of a store.
        given: role by key, such as ``{("next", "over"): "done", "t": "position"}``; it replaces what is usual for that key and
            that role.

    Raises:
        KeyError: a key that is not stored. ValueError: as :func:`check_roles`.
    """
    check_roles(given)
    stored = {field.key: number for number, field in enumerate(fields)}
    roles = ["data"] * len(fields)
    for key, role in (given or {}).items():
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in stored:
            raise KeyError(f"roles: expected stored fields, {[field.name for field in fields]}, got {key!r}.")
        roles[stored.pop(path)] = role
    for role, keys in _USUAL.items():
        key = next((key for key in keys if key in stored), None)
        if role not in (given or {}).values() and key is not None:
            roles[stored[key]] = role
    return tuple(roles)
