"""What a batch holds besides the stored rows: expanders describe it, and one native read returns it with the steps around each row."""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from engram._support import native as _native
from engram._support.field_paths import FieldPath, public
from engram._support.retries import TRIES_WITHOUT_PAUSE
from engram._support.words import warn_of_mixed
from engram.around.episodes import END_KEYS, NAMED, TrajectoryKeys, step_type_bytes
from engram.around.windows import LAST_STEPS
from engram.errors import NoSampleable, RowError
from engram.samplers.redraw import Redraw
from engram.store import DTYPE_OF, Store, as_rows, dlpack_specs
from engram.types import Draw, Entry, Info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.around.following import Following
    from engram.around.hindsight import Goals, Relabelling
    from engram.format.schema import Field
    from engram.samplers._base import DeclaredSampler
    from engram.store.sampled import SampledStorage

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
        #: Steps from the drawn one to that whose next observation is read, where no field says it.
        self.ahead = 0
        #: Steps of each full lane that are not drawn.
        self.oldest = 0
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


#: Draws in place of rows whose next observation is not there yet.
_MOST_REDRAWS = 2_000


class Expansion:
    """The native read of a batch: stored fields, and what expanders make of the steps around each row."""

    def __init__(self, memory: Store, reading: Reading, keys: TrajectoryKeys, who: str) -> None:
        """Raises ``RuntimeError``: nothing in the rows says where trajectories end. Messages begin with ``who``."""
        self._episodes = keys.episodes(memory, f"sample: {who}")
        specs = dlpack_specs(reading.fields)
        columns = [*reading.columns, *reading.entries.values()]
        names = [*reading.entries]
        if reading.following is not None:
            reading.following.check(memory)
            columns += reading.following.columns(columns)
            names += reading.following.names
        #: Ragged fields by how many steps ahead they are read. Their items are read apart, after the spans and the steps to their rows.
        self._ragged = _ragged_ahead(columns, reading, f"sample: {who}")
        columns += [Column("steps", ahead=ahead) for ahead in self._ragged if ahead]
        #: The native read. It returns one tensor per column, then tickets.
        self.native = _native.Expansion(*self._episodes.ends())
        for column in columns:
            column.add_to(self.native, specs[column.field], reading.fields[column.field])
        #: What it reads: replaced where the store has other fields.
        self.memory, self.stored = memory, reading.fields
        self._who = who
        self._stacked = [
            (at, column.dim) for at, column in enumerate(columns) if column.kind == "frames" and column.dim is not None
        ]
        self._count = len(reading.fields)
        plain = memory.schema.structure.kind == "dict"
        #: Under which keys of the info and of the batch those stand that are not stored, and which are ``[B]`` in the batch: numbers
        #: ``[B, 1]`` that belong to a reward ``[B]`` of dicts, so that arithmetic of both is by rows.
        self.computed: dict[Entry, bool] = {
            public(name): plain and column.is_number and not reading.fields[column.field].shape
            for name, column in zip(names, columns[len(reading.fields) :], strict=False)
        }
        #: Whether the columns are those of the rows alone.
        self.plain = all(column.kind == "row" and not (column.ahead or column.following) for column in columns)
        self._following, self._oldest = reading.following, reading.oldest
        #: Puts goals into what was read; None: rows keep their own.
        self.relabelling = reading.relabelling
        #: What windows leave out, as ``WindowSampler.sample_apart`` takes it.
        self.finished = None if reading.following is None else reading.following.finished(reading.columns)

    @cached_property
    def table(self) -> _native.Trajectories:
        """Found with the first read: a sampler of windows makes its table itself, which counts windows of its length then."""
        return self._episodes.table()

    @staticmethod
    def check_rows(memory: Store, who: str) -> None:
        """Raise ``RuntimeError`` unless each row is one step whose fields have keys."""
        kind, batch = memory.schema.structure.kind, memory.schema.structure.batch
        if kind not in NAMED:
            raise RuntimeError(f"sample: {who}: expected rows whose fields have keys, got a {kind}.")
        if batch:
            raise RuntimeError(
                f"sample: {who}: expected rows that are one step each, got TensorDicts of batch size {list(batch)}: "
                "their steps may belong to different trajectories. Use a storage with ndim > 1, or lanes."
            )

    def read(self, draw: Draw) -> tuple[list[Tensor], list[int], bool]:
        """Columns and tickets of some rows, the places to draw again, and whether all of those wait for a next step."""
        rows, tickets = as_rows(draw.rows, "sample"), None if draw.tickets is None else as_rows(draw.tickets, "sample")
        if self.table.mixed():
            warn_of_mixed(self._who)
        try:
            tensors, moved = self.native.read(self.memory.core, self.table, rows, tickets)
        except IndexError as error:
            raise RowError(f"sample: {error}.") from error
        waiting = False
        if self._ragged:
            moved = self._read_items(rows, tensors, moved)
        if self._following is not None:
            moved, waiting = self._following.complete(self.memory, rows, tensors, moved)
        if self._oldest and (old := self._old(rows)):
            moved, waiting = sorted({*moved, *old}), waiting or not moved
        return tensors, moved, waiting

    def _read_items(self, rows: Tensor, tensors: list[Tensor], moved: list[int]) -> list[int]:
        """Put the items of ragged fields in the place of their spans: all places that moved. ``tensors``: steps are removed."""
        memory, tickets, length = self.memory, tensors.pop(), self.memory.lane_length
        steps = {ahead: tensors.pop().reshape(-1).to(torch.int64) - 1 for ahead in reversed(self._ragged) if ahead}
        tensors.append(tickets)
        for ahead, which in self._ragged.items():
            later, expected = rows, tickets
            if ahead:
                later = rows - rows % length + (rows % length + steps[ahead].clamp(0, ahead)) % length
                expected = memory.tickets_of(later)
            items, changed = memory.read(later, expected=expected, which=which)
            for number, column in zip(which, items, strict=True):
                tensors[number] = column
            moved = sorted({*moved, *changed})
        if steps:  # rows after one that is still there are those that followed it
            moved = sorted({*moved, *(memory.tickets_of(rows) != tickets).nonzero().flatten().tolist()})
        return moved

    def _old(self, rows: Tensor) -> list[int]:
        """The places of rows that are among the oldest of a full lane: as it is after the read, which a writer may have overtaken."""
        length, extent = self.memory.lane_length, self.memory.extent()
        filled, seam = (torch.tensor(each, device="cpu")[rows // length] for each in (extent.filled, extent.seam))
        count = self._oldest * math.prod(self.memory.schema.columns)
        return ((filled == length) & ((rows - seam) % length < count)).nonzero().flatten().tolist()

    def read_windows(self, draw: Draw, goals: Goals | None = None) -> tuple[list[Tensor], list[int]]:
        """Columns of windows, and the places of rows that have changed since. A row with a neighbour that moves is read again."""
        tensors, moved, _ = self.read(draw)
        tickets = draw.tickets
        assert tickets is not None  # windows have them
        for _ in range(TRIES_WITHOUT_PAUSE):
            if not moved:
                break
            places = torch.tensor(moved, device="cpu")
            fresh, still, _ = self.read(Draw(draw.rows[places], tickets[places]))
            moved = _patch(tensors, places, fresh, moved, still)
        if goals is not None and not moved:
            moved = goals.read_windows(draw.rows, tensors[-1], cast("Tensor", draw.info[LAST_STEPS]))
        self.stack(tensors)
        return tensors[:-1], moved

    def read_drawn(
        self, storage: SampledStorage, source: DeclaredSampler, draw: Draw, key: int, goals: Goals | None
    ) -> tuple[list[Tensor], Tensor, Info]:
        """Columns and tickets of rows that a sampler drew, the rows in the end, and their info.

        In place of rows that move meanwhile, other rows are drawn if draws are independent of each other, or if the sampler named
        the tickets that it means. Rows of other samplers are read once more, with what they hold now. If one of those holds
        nothing, another live row is drawn. Rows whose goal moves count as those that move themselves.

        Raises:
            NoSampleable: the buffer was emptied, or no row has a next observation yet.
            WriterStalled: something moved at every try.
        """
        tensors, moved, waiting = self.read(draw)
        rows, info = draw.rows, dict(draw.info)
        if goals is not None:
            moved = goals.read(as_rows(rows, "sample"), tensors[-1], moved)
        if moved:
            others = self._following or self._oldest or draw.tickets is not None or source.traits.draws_uniformly
            redraw = Redraw(storage, draw, source if others else None, key, detail=", or a step around it,")
            while moved:
                if waiting and redraw.retries.count >= _MOST_REDRAWS:
                    if len(moved) == len(redraw.rows) or goals is not None:
                        raise NoSampleable("sample: no row that is drawn has a next observation yet. Add data first.")
                    redraw.repeat(moved, tensors)
                    break
                places, fresh = redraw.again(moved, waiting=waiting)
                read, still, waiting = self.read(fresh)
                if goals is not None:
                    still = goals.read(as_rows(fresh.rows, "sample"), read[-1], still, places)
                moved = _patch(tensors, places, read, places.tolist(), still)
            rows, info = redraw.rows, redraw.info
        self.stack(tensors)
        return tensors, rows, info

    def stack(self, tensors: list[Tensor]) -> None:
        """Concatenate frames, ``[n, frames, *shape]``, along their dimension of the shape; no copy if that is the first."""
        for at, dim in self._stacked:
            frames = tensors[at]
            place = frames.ndim - 1 + dim
            tensors[at] = frames.movedim(1, place).flatten(place, place + 1)

    def fields(self, tensors: list[Tensor], info: Info) -> list[Tensor]:
        """The stored fields of a batch; the entries that are not stored go to ``info``."""
        info.update(zip(self.computed, tensors[self._count :], strict=True))
        return tensors[: self._count]


def _ragged_ahead(columns: Sequence[Column], reading: Reading, who: str) -> dict[int, list[int]]:
    """The ragged fields, by how many steps ahead they are read. Raises ``TypeError``: one is stacked, summed, relabelled or followed."""
    ragged = {number for number, field in enumerate(reading.fields) if field.ragged is not None}
    changed = {column.field for column in columns if column.kind in ("frames", "sum") or column.following}
    for number in ragged & (changed if reading.relabelling is None else changed | reading.relabelling.reads):
        raise TypeError(
            f"{who}: field {reading.fields[number].name}: expected rows of one size, got those of a ragged field, which are read as they "
            "are stored. Name another field."
        )
    return {at: [n for n in sorted(ragged) if columns[n].ahead == at] for at in {columns[n].ahead for n in ragged}}


def _patch(tensors: list[Tensor], places: Tensor, fresh: list[Tensor], moved: list[int], still: list[int]) -> list[int]:
    """Put what was read once more at its places; which of ``moved`` have to be read yet again."""
    for tensor, values in zip(tensors, fresh, strict=True):
        tensor[places] = values
    return [moved[i] for i in still]
