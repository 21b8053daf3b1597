"""The base of the expanders, samplers around a sampler; and what a batch holds besides the stored rows: expanders describe it, and one
native read returns it with the steps around each row.
"""

from __future__ import annotations

import contextlib
import math
import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

import torch
from torch import Tensor

from engram import samplers
from engram._support import checks, fork, retries, words
from engram._support import native as _native
from engram._support.field_paths import FieldPath, public
from engram.around.episodes import END_KEYS, NAMED, TrajectoryKeys, step_type_bytes
from engram.around.windows import LAST_STEPS, WindowSampler
from engram.errors import NoSampleable, RowError
from engram.format.schema import Field
from engram.samplers._base import DeclaredSampler, SamplerAround
from engram.samplers.redraw import Redraw
from engram.store import blocks, store
from engram.store.memory import DTYPE_OF, as_rows, dlpack_specs
from engram.types import Draw, Entry, Extent, Info, NativeBatch, Sampler, Shown, Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.around.following import Following
    from engram.around.hindsight import Goals, Relabelling
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

    #: ``row``, ``frames``, ``sum``, ``steps``, ``discount``, ``over`` or ``after``: methods of the native ``Expansion``.
    kind: str
    #: Number of the field in the store; of a number, that of the reward that it belongs to.
    field: int = 0
    ahead: int = 0
    gamma: float = 1.0
    frames: int = 1
    #: The dimension along which frames are concatenated; None: one of their own.
    dim: int | None = -1
    #: The field that holds the frame before the trajectory's first step; -1: there is none.
    first: int = -1
    #: The value before the first frame; None: that frame itself.
    padding: float | None = None
    #: Of ``row`` and ``frames``: those of the step after ``ahead``. Where none comes after it, the caller puts the newest one in.
    following: bool = False
    #: Of ``frames``: whether they may be a view of those up to the following step, which are read with one frame more.
    views: bool = False

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
        #: Fields ``k`` whose next observations, ``("next", k)``, are not stored but read from the following rows.
        self.followed = followed
        self.numbers: dict[FieldPath, int] = {field.key: number for number, field in enumerate(fields)}
        #: Of every stored field, in order.
        self.columns = [Column("row", number) for number in range(len(fields))]
        #: Of what is not stored.
        self.entries: dict[FieldPath, Column] = {}
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
        return [n for path, n in self.numbers.items() if is_of_next_step(path) and observed_before(path) == key]

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
            raise TypeError(f"sample: {who}: {field.name}: expected real numbers, got {field.dtype}. Store float32.")
        return number

    def add(self, key: FieldPath, column: Column, who: str) -> None:
        """Add an entry. Raises ``ValueError``: the batch has one of that name."""
        if key in self.entries or key in self.numbers:
            raise ValueError(f"sample: {who}: expected a name of its own for {public(key)!r}: rows have such a field.")
        self.entries[key] = column


#: Draws in place of rows whose next observation is not there yet.
_MOST_REDRAWS = 2_000


class Expansion:
    """The native read of a batch: stored fields, and what expanders make of the steps around each row."""

    def __init__(self, memory: store.Store, reading: Reading, keys: TrajectoryKeys, who: str) -> None:
        """Raises ``RuntimeError``: nothing in the rows says where trajectories end. Messages begin with ``who``."""
        self._episodes = keys.episodes(memory, f"sample: {who}")
        specs = dlpack_specs(reading.fields)
        columns = [*reading.columns, *reading.entries.values()]
        names = [*reading.entries]
        #: Stacks that are views: their places, those of the following stacks, the dimension, the shape, and what it has of a frame.
        self._views: list[tuple[int, int, int, tuple[int, ...], int]] = []
        if reading.following is not None:
            reading.following.check(memory)
            places = enumerate(reading.following.fields.values(), len(columns))
            columns += reading.following.columns(columns)
            names += reading.following.names
            for at, number in places:
                now = columns[number]
                if now.views and now.ahead == columns[at].ahead:
                    frame = reading.fields[number].shape if now.dim else (1, *reading.fields[number].shape)
                    dim = now.dim or -len(frame)
                    columns[number] = Column("after")  # a byte, in whose place the view comes
                    # Along their first dimension frames lie one after the other already.
                    columns[at] = columns[at]._replace(frames=now.frames + 1, dim=None if dim == -len(frame) else dim)
                    shape = (*frame[:dim], frame[dim] * now.frames, *frame[dim:][1:])
                    self._views.append((number, at, dim, shape, frame[dim]))
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
        self._stacked = [(at, it.dim) for at, it in enumerate(columns) if it.kind == "frames" and it.dim is not None]
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
        self._following, self._oldest = reading.following, reading.oldest * math.prod(memory.schema.columns)
        #: Puts goals into what was read; None: rows keep their own.
        self.relabelling = reading.relabelling
        #: What windows leave out, as ``WindowSampler.sample_apart`` takes it.
        self.finished = None if reading.following is None else reading.following.finished(reading.columns)

    @cached_property
    def table(self) -> _native.Trajectories:
        """Found with the first read: a sampler of windows makes its table itself, which counts windows of its length then."""
        return self._episodes.table()

    @staticmethod
    def check_rows(memory: store.Store, who: str) -> None:
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
            words.warn_of_mixed(self._who)
        try:
            tensors, moved, old, ended = self.native.read(self.memory.core, self.table, rows, tickets, self._oldest)
        except IndexError as error:
            raise RowError(f"sample: {error}.") from error
        waiting = False
        if self._ragged:
            moved = self._read_items(rows, tensors, moved)
        if self._following is not None:
            moved, waiting = self._following.complete(self.memory, rows, tensors, moved, ended)
        if old:
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

    def read_windows(self, draw: Draw, goals: Goals | None = None) -> tuple[list[Tensor], list[int]]:
        """Columns of windows, and the places of rows that have changed since. A row with a neighbour that moves is read again."""
        tensors, moved, _ = self.read(draw)
        for _ in range(retries.TRIES_WITHOUT_PAUSE):
            if not moved:
                break
            places = torch.tensor(moved, device="cpu")
            # Windows have tickets.
            fresh, still, _ = self.read(Draw(draw.rows[places], cast("Tensor", draw.tickets)[places]))
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
            tensors[at] = (frames if place == 1 else frames.movedim(1, place)).flatten(place, place + 1)
        for now, following, dim, shape, step in self._views:
            both = tensors[following]
            size, at = (len(both), *shape), int(both.storage_offset())
            strides = (both.stride(0), *both.stride()[-len(shape) :])
            tensors[now] = both.as_strided(size, strides, at)
            tensors[following] = both.as_strided(size, strides, at + step * strides[dim])

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


class TrajectoryArguments(TypedDict, total=False):
    """Keywords of expanders that say which rows are one trajectory."""

    traj_key: object
    end_keys: object
    index: str | None
    end_when: str | None


class Expander(SamplerAround):
    """A sampler around a sampler. The inner one draws the rows; the expander adds what it computes from the steps
    around them.

    Rows, ``"index"``, ``"index_generation"`` and ``"priority_weight"`` are those of the inner sampler, so
    priorities are updated as without an expander. Attributes that an expander does not have are those of
    :attr:`sampler`, for reading and for setting: ``rb.sampler.beta = 0.5`` sets ``beta`` of the
    ``PrioritizedSampler`` inside. Expanders can wrap expanders, in any order.

    Steps belong together as for a :class:`SliceSampler`: to one trajectory in one lane (with ``ndim > 1``, in one
    column), never across the seam of a ring, where the newest row precedes the oldest. The rows around a drawn row
    are read together with it and compared with their tickets. If one of them is overwritten meanwhile, all are read
    or drawn again.

    Around a slice sampler, every step of every window is expanded as if it had been drawn alone. It may therefore
    include steps before or after the window, but never of another trajectory. Windows and their marks stay:
    ``("next", "truncated")`` is true at the last step of a window, and ``("next", "done")`` there and where the
    expanded entry is true.

    Computed entries are fields of the batch, nested by their keys, as if they were stored: ``batch["next"]["frame"]`` of
    dicts, ``batch["next", "frame"]`` of TensorDicts. Collate functions and transforms get them with the stored fields. They
    are in ``info`` as well, as they were computed: ``info["next", "frame"]``. Counts, discounts and flags are ``[B, 1]``; in
    batches of dicts whose rewards are ``[B]`` they are ``[B]``, too. Rows of named tuples, dataclasses and tensorclasses have
    no place for computed entries; there they are in ``info`` only. What tells rows and windows apart, such as ``"index"``,
    ``"priority_weight"`` and masks, is in the ``info`` of all buffers and in the batches of :class:`TensorDictReplayBuffer`.
    """

    @property
    def changed(self) -> tuple[FieldPath, ...]:
        """Fields of which each entry of a batch holds something made of several steps."""
        return ()

    @property
    def followed(self) -> tuple[FieldPath, ...]:
        """Fields whose next observation is read from the following row."""
        return ()

    #: Whether rows say where their final observation is.
    marks = False

    @property
    def chain(self) -> tuple[Expander, ...]:
        """The expanders inside this one, the innermost first, and this one."""
        return (*self._inside, self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("engram."):  # those of users are not there in every program that opens the store
            cls.known[cls.__name__] = cls

    def __init__(self, sampler: Sampler | type[Sampler], **trajectories: Unpack[TrajectoryArguments]) -> None:
        name = type(self).__name__
        inner = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(inner, Sampler):
            raise TypeError(f"{name}: sampler: expected a sampler, got {type(sampler).__name__}.")
        keys = TrajectoryKeys.of(name, **trajectories)
        if isinstance(inner, Expander):
            theirs = inner.rules
            said = theirs._replace(end_when=theirs.end_when or "any")
            if any(mine not in (None, other) for mine, other in zip(keys, said, strict=True)):
                raise ValueError(
                    f"{name}: expected the trajectories of the {type(inner).__name__} inside, traj_key, end_keys, index, end_when = "
                    f"{tuple(theirs)}, got {tuple(keys)}. Give them to the innermost expander only."
                )
            keys = theirs
        elif (source := samplers.declared(inner)).traits.reads_windows:
            of_windows = cast("WindowSampler", source).rules
            if of_windows is None:
                raise TypeError(
                    f"{name}: sampler: expected windows of trajectories that the rows tell, got a {type(inner).__name__} with ends or "
                    "trajectories of its own. Store them as a field, and name it with traj_key or end_key."
                )
            if keys == TrajectoryKeys(None, None, None):
                keys = of_windows
        self._rules = keys
        self.sampler: Any = inner
        self._attach()
        for key in (key for other in self._inside for key in other.changed):
            if key in self.changed:
                raise TypeError(
                    f"{name}: expected a field as it is stored, but an expander inside has changed {public(key)!r}. Stack or sum it once."
                )

    def _attach(self) -> None:
        """Set what follows from the sampler inside, and forget the store."""
        inner = self.sampler
        self._source = samplers.declared(inner)
        #: The expanders inside, the innermost first, and the sampler that they are around.
        self._inside: tuple[Expander, ...] = (*inner.inside, inner) if isinstance(inner, Expander) else ()
        self._innermost: DeclaredSampler = inner.innermost if isinstance(inner, Expander) else self._source
        self._lock = fork.rlock()
        #: The innermost sampler, if it is one of windows that are read natively.
        self._windows = cast("WindowSampler", self._innermost) if self._innermost.traits.reads_windows else None
        self._expansion: Expansion | None = None
        vars(self)["computed_keys"] = {}  # those of the store that was read last

    @property
    def rules(self) -> TrajectoryKeys:
        """``traj_key``, ``end_keys``, ``index`` and ``end_when``: those of the innermost expander."""
        return self._rules

    @property
    def inside(self) -> tuple[Expander, ...]:
        """The expanders inside this one, the innermost first."""
        return self._inside

    @property
    def innermost(self) -> DeclaredSampler:
        """The innermost sampler, which is not an expander."""
        return self._innermost

    def change(self, reading: Reading) -> None:
        """Declare what batches contain.

        Raises:
            KeyError: a field is not stored.
            TypeError: a field is of the wrong kind.

        Args:
            reading: what a batch holds so far: the fields as they are stored, and what the expanders inside made of them.

        >>> import torch
        >>> from engram import LazyTensorStorage, NStep, RandomSampler, ReplayBuffer
        >>> sampler = NStep(RandomSampler(), n=2, gamma=0.5, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
        >>> rows = {"episode": torch.zeros(3, dtype=torch.int64), "next": {"reward": torch.ones(3)}}
        >>> _ = rb.extend(rows)
        >>> set(rb.sample()["next"]["reward"].tolist()) <= {1.0, 1.5}  # as NStep declares: the sum over two steps
        True
        """
        raise NotImplementedError

    @property
    def reads_there(self) -> bool:
        """Whether rows on an accelerator can be read with what this expander adds."""
        return False

    @property
    def _followed(self) -> tuple[FieldPath, ...]:
        """Of all expanders here."""
        return tuple(key for expander in self.chain for key in expander.followed)

    def stored(self, fields: Sequence[Field]) -> tuple[Field, ...]:
        """The fields of rows as they are stored, of rows as they are written."""
        gone = {("next", *key) for key in self._followed}
        kept = tuple(field for field in fields if field.key not in gone)
        marked = any(expander.marks for expander in self.chain)
        return kept if not marked else (*(field for field in kept if field.key != MARK), Field(MARK, "int64", (2,)))

    def ready_bytes(self, stored: Sequence[Field]) -> int:
        """Bytes of a row that holds what batches have: all frames of its stacks, and its next observations.

        Raises: as drawing does, if an expander does not find its fields among those that are stored.
        """
        reading = self._reading(stored)
        nexts = [] if reading.following is None else reading.following.columns(reading.columns)[:-1]
        read = [column for column in (*reading.columns, *nexts) if reading.fields[column.field].key != MARK]
        return sum(column.frames * reading.fields[column.field].row_bytes for column in read)

    def beside_bytes(self, stored: Sequence[Field]) -> int:
        """Bytes that this expander keeps beside rows of these fields.

        >>> from engram import NStep, RandomSampler
        >>> NStep(RandomSampler(), 3, 0.99).beside_bytes([])
        0
        """
        return 0

    # ---- the sampler inside ------------------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are read with what is around them."""
        return self._source.traits._replace(draws_uniformly=False, reads_natively=True)

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        """Asked of :attr:`sampler`. Of rows whose next observations are read from following ones, one is drawn to see."""
        source = self._innermost
        if not self._followed or not len(storage):
            return source.can_sample(storage, batch_size)
        assert storage.memory is not None
        if not storage.memory.is_native and self.draws_on_device:
            return self._can_sample_there(storage.memory) and source.can_sample(storage, batch_size)
        if self._windows is not None:
            finished = self.expansion_of(storage.memory).finished
            return self._windows.can_sample(storage, batch_size, finished=finished)
        with contextlib.suppress(NoSampleable):
            if source.can_sample(storage, batch_size):
                self.sample_natively(storage, blocks.Key.of(0), 1)
                return True
        return False

    def masses(self, storage: SampledStorage) -> blocks.Masses | None:
        """Those of :attr:`sampler`; None where next observations are read from following rows, which some rows have not yet."""
        return None if self._followed else self._source.masses(storage)

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes."""
        self._expansion = None
        self._source.moved()

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn.

        Raises:
            RuntimeError: its rows are no fields, or not on the CPU.
            TypeError: next frames of a field are stacked that are not stored, but its frames are not.

        >>> from engram import FrameStack, ListStorage, RandomSampler
        >>> FrameStack(RandomSampler(), 4, None, ["frame"]).bind(ListStorage(10))
        Traceback (most recent call last):
        RuntimeError: FrameStack: expected a tensor storage on the CPU, ...
        """
        self._check_next_frames()
        self._check_storage(storage)
        there = storage.device is not None and storage.device.type != "cpu"
        if not storage.traits.has_fields or (there and not self.reads_there):
            where = f"a {type(storage).__name__}" + (f" on {storage.device}" if storage.device is not None else "")
            raise RuntimeError(self._elsewhere(where))
        self._source.bind(storage)

    def _check_storage(self, storage: SampledStorage) -> None:
        """Raise for a storage that this expander does not take."""

    def _check_next_frames(self) -> None:
        for stacking in self.chain:
            for following in self.chain:
                for key in following.followed:
                    if ("next", *key) in stacking.changed and key not in stacking.changed:
                        raise TypeError(
                            f"{type(stacking).__name__}: in_keys: expected {public(key)!r} beside {public(('next', *key))!r}, whose frames "
                            f"{type(following).__name__} takes from the rows of {public(key)!r}: a batch would hold a single frame now and "
                            "several next. Name both."
                        )

    def _elsewhere(self, where: str) -> str:
        return (
            f"{type(self).__name__}: expected a tensor storage on the CPU, whose rows have neighbours that can be read, got {where}. "
            'Use LazyTensorStorage or LazyMemmapStorage with device="cpu", and a DeviceLoader for batches on an accelerator.'
        )

    # ---- the store ---------------------------------------------------------------------------------------------------

    def expansion_of(self, memory: store.Store) -> Expansion:
        """The read of a store's rows. It is replaced as a whole if another store was read last: other threads may be drawing."""
        memory.core.find_fields()
        found = self._expansion
        if found is None or found.memory is not memory or found.stored != memory.schema.fields:
            with self._lock:
                found = self._expansion  # which another thread may have made meanwhile
                if found is None or found.memory is not memory or found.stored != memory.schema.fields:
                    found = self._expansion = self._new_expansion(memory)
        return found

    def _new_expansion(self, memory: store.Store) -> Expansion:
        name = type(self).__name__
        if not memory.is_native:  # device="auto", and the first row was elsewhere
            raise RuntimeError(self._elsewhere(f"rows of {memory.place}"))
        Expansion.check_rows(memory, name)
        expansion = Expansion(memory, self._reading(memory.schema.fields), self._rules, name)
        vars(self)["computed_keys"] = expansion.computed
        return expansion

    def _reading(self, fields: Sequence[Field]) -> Reading:
        reading = Reading(fields, self._followed)
        for expander in self.chain:
            expander.change(reading)
        if reading.relabelling is not None:
            reading.relabelling.check(reading)
        return reading

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Refused: rows alone are not what an expander is for. Raises ``RuntimeError``."""
        raise RuntimeError(self._elsewhere("a storage of other rows"))

    def sample_natively(
        self, storage: SampledStorage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """Draw, and read the rows with what is around them in one native call: ``(columns, rows, info)``.

        Raises:
            NoSampleable: nothing to draw.
            WriterStalled: a row or a step around it moved at every try.
            KeyError, TypeError, RuntimeError: the rows have not the fields that are needed.
        """
        source, memory = self._innermost, storage.memory
        assert memory is not None  # the buffer asks only then
        if not memory.is_native and self.draws_on_device:
            return self._sample_there(storage, key, n, numbered=numbered)
        expansion = self.expansion_of(memory)
        relabelling, windows = expansion.relabelling, self._windows
        goals = None if relabelling is None else relabelling.goals(memory, expansion.table, key.value)
        if windows is not None:
            finished = expansion.finished
            read = expansion.read_windows if goals is None else partial(expansion.read_windows, goals=goals)
            tensors, rows, info = windows.sample_apart(
                storage, key, n, read, numbered=numbered, finished=finished, ended=goals is not None
            )
            columns = expansion.fields(tensors, info)
            if goals is not None:
                goals.apply(storage, columns, info, expansion.computed, windows.truncated_key)
            return windows.laid_out(columns, rows, info)
        if goals is not None and expansion.plain and source.traits.draws_uniformly:
            *columns, rows, writes = memory.sample_uniform(key, n, with_rows=True, with_numbers=True)
            if not goals.read(rows, writes, []):  # else as below
                info = {"index_generation": writes} if numbered else {}
                goals.apply(storage, columns, info, {})
                return columns, rows, info
        extent = storage.extent()
        samplers.check_drawable(extent.size)
        source.bind(storage)
        draw = source.draw(extent, n, key.value)
        tensors, rows, info = expansion.read_drawn(storage, source, draw, key.value, goals)
        memory.count_sampled(rows)
        tickets = tensors.pop()
        if numbered or draw.tickets is not None:
            info["index_generation"] = memory.writes_of(rows, tickets)
        columns = expansion.fields(tensors, info)
        if goals is not None:
            goals.apply(storage, columns, info, expansion.computed)
        return columns, rows, info

    def _sample_there(self, storage: SampledStorage, key: blocks.Key, n: int, *, numbered: bool) -> NativeBatch:
        """As :meth:`sample_natively`, of rows on an accelerator. Where no row can be drawn, ``rb.stats()`` raises."""
        raise NotImplementedError

    def _can_sample_there(self, memory: store.Store) -> bool:
        """Whether some row on an accelerator can be read with what this expander adds."""
        raise NotImplementedError

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def config(self) -> dict[str, object]:
        """The constructor's arguments, as plain values: what a store notes to make the expander again.

        >>> from engram import NStep, RandomSampler
        >>> config = NStep(RandomSampler(), n=3, gamma=0.99).config()
        >>> config["n"], config["sampler"]["type"]
        (3, 'RandomSampler')
        """
        return {**self._inner_config(), **self._rules.config(), **super().config()}

    def __getstate__(self) -> dict[str, object]:
        derived = ("_source", "_inside", "_innermost", "_windows", "_lock", "_expansion", "_there", "computed_keys")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attach()


def check_steps(what: str, value: object) -> int:
    """A number of steps. Raises ``TypeError``, ``ValueError``: it is none, below 1, or larger than the native core takes."""
    steps = checks.check_count(what, value)
    if steps >= 1 << 31:
        raise ValueError(f"{what}: expected less than 2 ** 31, got {steps}.")
    return steps
