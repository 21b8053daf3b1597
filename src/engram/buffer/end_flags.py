"""The stored fields that say that a step is the last one of its trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram.field_paths import public
from engram.persist.roles import boundary_fields, roles_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.persist.roles import Roles

#: The step type of the last step of a trajectory, as dm_env numbers them.
_LAST = 2


class EndFlags(NamedTuple):
    """Which fields end a trajectory, and what an end says in them."""

    flags: tuple[int, ...]
    """Numbers of fields that say of an end anything but zero."""
    step_types: tuple[int, ...]
    """Numbers of fields that say the step type."""
    marked: tuple[tuple[FieldPath, int], ...]
    """Path of every field that a new end is written to, and what is written."""

    @classmethod
    def of(cls, fields: Sequence[Field], roles: Roles | None, *, terminated: bool, call: str) -> EndFlags:
        """The end flags among the fields of a store.

        Args:
            fields: of the store.
            roles: what fields mean that are not called as usual.
            terminated: a new end is a terminal one; else a truncation.
            call: what messages begin with.

        Raises:
            KeyError, ValueError: as :func:`roles_of`. RuntimeError: no field can say that a trajectory ends so.
        """
        meant = boundary_fields(fields, roles_of(fields, roles))
        kind, other = ("terminated", "truncated") if terminated else ("truncated", "terminated")
        marked = [(field.key, 1) for field in (*meant["done"], *meant[kind])]
        marked += [(field.key, _LAST) for field in meant["last"]]
        if not marked:
            got = [public(field.key) for field in meant[other]] or [field.name for field in fields]
            raise RuntimeError(
                f"{call}: expected a stored flag that says 'done' or {kind!r}, or a 'step_type', got {got}. Store ('next', {kind!r}), "
                "or name the field that says it with roles=. (Where ids tell trajectories apart, the next step's id ends one.)"
            )
        number = {field.key: i for i, field in enumerate(fields)}
        flags = [number[field.key] for role in ("done", "terminated", "truncated") for field in meant[role]]
        return cls(tuple(flags), tuple(number[field.key] for field in meant["last"]), tuple(marked))

    def are_set(self, columns: Sequence[Tensor]) -> Tensor:
        """Whether steps are ends: bool ``[n]``, n > 0. ``columns``: all fields of the store, ``[n, ...]`` each."""
        ends = [columns[number] != 0 for number in self.flags]
        ends += [columns[number] == _LAST for number in self.step_types]
        return torch.stack([end.reshape(len(end), -1).any(1) for end in ends]).any(0).cpu()

    def entries(self, fields: Sequence[Field], n: int) -> dict[FieldPath, object]:
        """What ``n`` new ends say, by path."""
        known = {field.key: field for field in fields}
        return {
            path: torch.full((n, *known[path].shape), value, dtype=getattr(torch, known[path].dtype), device="cpu")
            for path, value in self.marked
        }
