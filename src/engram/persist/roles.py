"""What fields mean to a checkpoint: which of them end a trajectory, and which must be rewritten when it moves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from engram._support.field_paths import public

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engram.format.parts import PartField
    from engram.format.schema import Column, Field

#: The role of fields, by key, as users say it.
Roles: TypeAlias = "Mapping[str, str] | Mapping[tuple[str, ...], str] | Mapping[str | tuple[str, ...], str]"
F = TypeVar("F", bound="Column")

ROLES = ("data", "done", "terminated", "truncated", "step_type", "env_id", "traj_id", "position")
#: Roles of flags that end a trajectory.
_FLAGS = ("done", "terminated", "truncated")
#: Roles that say where a trajectory ends.
ENDS = frozenset((*_FLAGS, "step_type", "traj_id"))
#: What fields are called that have a role without being told: the last part of their key, at any depth.
_USUAL = {**{role: role for role in (*_FLAGS, "step_type", "env_id")}, "traj_ids": "traj_id", "episode": "traj_id"}
#: The last part of keys that number the trajectory of a row or its environment, as far as names tell.
IDS = re.compile(r"(^|_)ids?$")
_START = "is_init"


def check_roles(given: Roles | None) -> None:
    """Raise ``ValueError`` unless these are roles."""
    for key, role in (given or {}).items():
        if role not in ROLES:
            raise ValueError(f"roles: {key!r}: expected one of {', '.join(ROLES)}, got {role!r}.")


def of_the_step(fields: Sequence[F]) -> list[F]:
    """Of fields that are called alike, those that say it of the step that a row is: nested least, and none of the next step.

    ``fields`` have a ``key``. Where all are of the next step, those of them that are nested least.
    """
    here = [field for field in fields if "next" not in field.key[:-1]] or fields
    least = min((len(field.key) for field in here), default=0)
    return [field for field in here if len(field.key) == least]


def boundary_fields(fields: Sequence[F], roles: Sequence[str]) -> dict[str, list[F]]:
    """Which fields say where trajectories begin and end, by what they say: flags by their role, ``traj_id``, ``is_init``, and of step
    types ``last`` and ``first``.

    Where the step type of the next step is stored, too, a row is the transition to that step: it says which row is the last.
    """
    of: dict[str, list[F]] = {}
    for field, role in zip(fields, roles, strict=True):
        of.setdefault(role, []).append(field)
    ids, types = of.get("traj_id", []), of.get("step_type", [])
    ahead = [field for field in types if "next" in field.key[:-1]]
    return {
        **{role: of.get(role, []) for role in _FLAGS},
        "traj_id": of_the_step([field for field in ids if field.key[-1] == "traj_ids"] or ids)[:1],
        "last": ahead or of_the_step(types),
        "first": of_the_step(types) if len(ahead) < len(types) else [],
        "is_init": of_the_step([field for field in fields if field.key[-1] == _START]),
    }


def roles_of(fields: Sequence[Field], given: Roles | None = None) -> tuple[str, ...]:
    """The role of each field. Several may have the same one.

    Args:
        fields: of a store.
        given: role by key, such as ``{("next", "over"): "done", "t": "position"}``. It replaces what is usual for that key and
            for that role.

    Without it, fields have the role that the last part of their key says, at any depth: ``done``, ``terminated``, ``truncated``,
    ``step_type``, ``env_id``, and for ``traj_id`` also ``traj_ids`` or ``episode``. Flags are those of the transition (below
    ``"next"``) if there are any, and of those the ones that are nested least: those of single agents end no trajectory.

    Raises:
        KeyError: a key that is not stored. ValueError: as :func:`check_roles`.
    """
    check_roles(given)
    stored = {field.key: number for number, field in enumerate(fields)}
    roles = ["data"] * len(fields)
    for key, role in (given or {}).items():
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in stored:
            raise KeyError(f"roles: expected stored fields, {[public(field.key) for field in fields]}, got {key!r}.")
        roles[stored.pop(path)] = role
    told = {*(given or {}).values()}
    usual = {key: _USUAL[key[-1]] for key in stored if key[-1] in _USUAL and _USUAL[key[-1]] not in told}
    flags = [key for key, role in usual.items() if role in _FLAGS]
    flags = [key for key in flags if "next" in key[:-1]] or flags
    least = min(map(len, flags), default=0)
    for key, role in usual.items():
        if role not in _FLAGS or (key in flags and len(key) == least):
            roles[stored[key]] = role
    return tuple(roles)


def doubts(fields: Sequence[PartField], given: Roles | None = None) -> list[str]:
    """What may go wrong where trajectories are moved, by fields with a key, a dtype and a role: an entry each.

    ``given``: what the user said of fields, who has thought of those.
    """
    said = []
    if not any(field.role in ENDS for field in fields):
        said.append(
            f"no field says where trajectories end: expected one of {', '.join(sorted({*_USUAL} - {'env_id'}))}, at any depth, got "
            f"{[field.key[-1] for field in fields]}. On other ranks a restore deals out blocks of steps then, and windows may join steps "
            "that did not follow each other. Store such a field, or name the one that says it with roles="
        )
    told = {(key,) if isinstance(key, str) else tuple(key) for key in given or {}}
    stale = [
        field.key
        for field in fields
        if field.role == "data" and IDS.search(field.key[-1]) and "int" in field.dtype and field.key not in told
    ]
    if stale:
        said.append(
            f"{', '.join(repr(key[0] if len(key) == 1 else key) for key in stale)}: called like an id, and stays as it was written "
            'when its row moves to another lane. Say with roles= what it is: "env_id", "traj_id", or "data" for neither'
        )
    return said
