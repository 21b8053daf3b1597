"""What a batch holds besides the stored rows, as expanders describe it before anything is read."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._dtypes import DTYPE_OF
from engram.around.episodes import END_KEYS, step_type_bytes
from engram.field_paths import FieldPath, public

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram import _native
    from engram.around.episodes import TrajectoryKeys
    from engram.around.following import Following
    from engram.around.hindsight import Relabelling
    from engram.format.schema import Field


#: Where a row says which final observation is its own, if next observations are those of the following rows.
MARK: FieldPath = ("next", "final")
#: Parts of keys that say that a field is of the next step: "next", "next_obs", "obs_next".
_NEXT = re.compile(r"^next(?![a-z])_?|_next$")
#: Names of flags that a step was the last one of its trajectory.
_FLAGS = tuple(key[-1] for key in END_KEYS)
#: As many steps ahead as there are.
TO_THE_END = (1 << 64) - 1


def is_of_next_step(key: FieldPath) -> bool:
    """Whether a field is called like one of the next step."""
    return any(map(_NEXT.search, key))


def observed_before(key: FieldPath) -> FieldPath:
    """What a field of the next step is called of the step itself: ``obs`` for ``("next", "obs")``, ``next_obs`` and ``obs_next``."""
    return tuple(part for part in (_NEXT.sub("", part) for part in key) if part)


class Column(NamedTuple):
    """One tensor of a batch. Step 0 is the drawn row; ``ahead`` names a later step, or the trajectory's last one before that."""

    kind: str
    """``row``, ``frames``, ``sum``, ``steps``, ``discount``, ``over`` or ``after``: methods of the native ``Expansion``."""
    field: int = 0
    """Number of the field in the store; of a number, that of the reward that it belongs to."""
    ahead: int = 0
    gamma: float = 1.0
    frames: int = 1
    dim: int | None = -1
    """The dimension along which frames are concatenated; None: one of their own."""
    first: int = -1
    """The field that holds the frame before the trajectory's first step; -1: there is none."""
    padding: float | None = None
    """The value before the first frame; None: that frame itself."""
    following: bool = False
    """Of ``row`` and ``frames``: those of the step after ``ahead``. Where none comes after it, the caller puts the newest one in."""

    @property
    def is_number(self) -> bool:
        """Whether it is one number ``[B, 1]``, whatever the shape of :attr:`field`."""
        return self.kind in ("steps", "discount", "over")

    def add_to(self, read: _native.Expansion, spec: tuple[int, int, tuple[int, ...]], field: Field) -> None:
        """Let the native read return this column. ``spec``, ``field``: of :attr:`field`."""
        match self.kind:
            case "row":
                read.row(self.field, spec, self.ahead + self.following)
            case "frames":
                filling = self._filling(field)
                read.frames(self.field, spec, self.ahead, self.frames, self.following, self.first, filling)
            case "sum":
                read.sum(self.field, spec, self.ahead, self.gamma)
            case "steps":
                read.steps(self.ahead)
            case "discount":
                read.discount(self.ahead, self.gamma)
            case "over":
                read.over(self.ahead)
            case _:
                read.after(self.ahead)

    def _filling(self, field: Field) -> bytes:
        """A frame of padding, as it would lie in the store."""
        if self.padding is None:
            return b""
        frame = torch.full((math.prod(field.shape),), self.padding, dtype=DTYPE_OF[field.dtype], device="cpu")
        return frame.view(torch.uint8).numpy().tobytes()


class Reading:
    """What a batch will hold. Expanders change it, from the innermost outwards, before anything is read."""

    def __init__(self, fields: Sequence[Field], followed: tuple[FieldPath, ...] = ()) -> None:
        self.fields = tuple(fields)
        self.followed = followed
        """Fields ``k`` whose next observations, ``("next", k)``, are not stored but read from the following rows."""
        self.numbers: dict[FieldPath, int] = {field.key: number for number, field in enumerate(fields)}
        self.columns = [Column("row", number) for number in range(len(fields))]
        """Of every stored field, in order."""
        self.entries: dict[FieldPath, Column] = {}
        """Of what is not stored."""
        self.following: Following | None = None
        self.relabelling: Relabelling | None = None

    def number(self, key: FieldPath, who: str) -> int:
        """The field under a key. Raises ``KeyError``: it is not stored."""
        if key not in self.numbers:
            raise KeyError(self._missing(key, who))
        return self.numbers[key]

    def _missing(self, key: FieldPath, who: str) -> str:
        return f"sample: {who}: expected a stored field, one of {[public(f.key) for f in self.fields]}, got {public(key)!r}."

    def below(self, key: FieldPath) -> list[int]:
        """The fields under a key. For a next observation that is not stored, that which says where it is."""
        found = {number for path, number in self.numbers.items() if path[: len(key)] == key}
        if any(("next", *path)[: len(key)] == key for path in self.followed) and MARK in self.numbers:
            found.add(self.numbers[MARK])
        return sorted(found)

    def of_next_step(self) -> list[int]:
        """The fields of the next step, as their names say."""
        return [number for key, number in self.numbers.items() if is_of_next_step(key)]

    def nexts_of(self, key: FieldPath) -> list[int]:
        """The stored fields that are called as those of the next step of a field."""
        return [
            number for path, number in self.numbers.items() if is_of_next_step(path) and observed_before(path) == key
        ]

    def flags(self, keys: TrajectoryKeys) -> list[int]:
        """The flags that a step was the last one of its trajectory: those that were named, and of every usual name those of the next
        step, else all.
        """
        named = [self.numbers[key] for key in keys.end_keys or () if key in self.numbers]
        for name in _FLAGS:
            found = [key for key in self.numbers if key[-1] == name]
            named += [self.numbers[key] for key in [key for key in found if is_of_next_step(key)] or found]
        return [number for number in named if not step_type_bytes(self.fields[number])]

    def number_of_reward(self, key: FieldPath, who: str) -> int:
        """The field of a reward. Raises ``KeyError``: it is not stored. ``TypeError``: it holds no real numbers."""
        if key not in self.numbers:
            raise KeyError(f"{self._missing(key, who)} Name the one that holds rewards with reward_key=.")
        number = self.numbers[key]
        field = self.fields[number]
        if field.dtype.startswith(("complex", "float8")):
            raise TypeError(
                f"sample: {who}: field {field.name}: expected real numbers, got {field.dtype}. Store rewards as float32."
            )
        return number

    def add(self, key: FieldPath, column: Column, who: str) -> None:
        """Add an entry. Raises ``ValueError``: the batch has one of that name."""
        if key in self.entries or key in self.numbers:
            raise ValueError(
                f"sample: {who}: expected a name of its own for {public(key)!r}, but the rows have such a field."
            )
        self.entries[key] = column
