"""Tables of a store's trajectories: which fields end one, and the native table that knows where each begins and ends.

A table belongs to the store, under a name. All samplers of the same name and boundaries draw from the same table, and every
write updates it, also those of other processes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from engram import _fork, _native, _progress
from engram.field_paths import WINDOW_ENDS, as_path, as_paths, plain, public
from engram.format.schema import DTYPES
from engram.persist.roles import of_the_step
from engram.store import check_index_name
from engram.store.memory import placed

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from typing import Self

    from torch import Tensor

    from engram.around.settings import WindowSettings
    from engram.field_paths import FieldPath
    from engram.format.schema import Field
    from engram.store import Store
    from engram.types import Entry, Extent, Info

    Merge: TypeAlias = Callable[[Tensor, Tensor], Tensor]

#: The name of step types.
STEP_TYPE = "step_type"
#: Kinds of rows whose entries have names.
NAMED = ("tensordict", "tensorclass", "dict", "namedtuple")

#: Trajectory ids that are looked for in this order if no key is given.
ID_KEYS: tuple[FieldPath, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))
#: Flags that end a trajectory if no keys are given. Where none of them is stored, those of the same names beside the observation count.
END_KEYS: tuple[FieldPath, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))


class Boundaries(NamedTuple):
    """What ends a trajectory: another content of an id field in the next step, or an end that is stored."""

    ids: tuple[int, ...]
    """Numbers of the fields in the store: one, or none."""
    ends: tuple[int, ...]
    """Numbers of fields that end a trajectory by a byte other than zero, or by a step type."""
    all_flags: bool = False
    """Of a field with several flags, all must be set; else one is enough."""

    @property
    def which(self) -> tuple[int, ...]:
        """Numbers of all these fields."""
        return self.ids + self.ends


def numbers_by_path(memory: Store) -> dict[FieldPath, int]:
    """The fields of rows by path; none, if a row is one tensor."""
    if memory.schema.structure.kind == "leaf":
        return {}
    return {field.key: number for number, field in enumerate(memory.schema.fields)}


def step_type_bytes(field: Field) -> int:
    """Of a field that holds step types, the bytes of one; of others 0.

    Step types are integers called ``step_type``, at any depth: 0 is the first step of a trajectory, 2 the last one, as in dm_env. A
    first step begins a trajectory also if the last step of the one before it was lost.
    """
    integers = "int" in field.dtype
    return DTYPES[field.dtype] if field.key[-1] == STEP_TYPE and integers else 0


def whole_flag_bytes(field: Field, all_flags: bool) -> int:
    """Of a field with several flags of which all must be set, the bytes of one; of others 0."""
    several = field.row_bytes != DTYPES[field.dtype]
    return DTYPES[field.dtype] if all_flags and several and not step_type_bytes(field) else 0


def stored_ends(fields: Sequence[Field], known: Container[FieldPath]) -> list[FieldPath]:
    """The fields that end a trajectory if no keys are given: the usual flags, and the step types of the step and of the next one.

    ``known``: the paths among the fields.
    """
    ends = [key for key in END_KEYS if key in known] or [key[1:] for key in END_KEYS if key[1:] in known]
    types = [field for field in fields if field.key in known and step_type_bytes(field)]
    sides = ([field for field in types if ("next" in field.key[:-1]) is ahead] for ahead in (False, True))
    return ends + [field.key for some in sides for field in of_the_step(some)[:1]]


def what_ends(fields: Sequence[Field], boundaries: Boundaries) -> tuple[list[int], list[int]]:
    """:func:`step_type_bytes` and :func:`whole_flag_bytes` of each field that ends trajectories. ``fields``: of the store."""
    ends = [fields[number] for number in boundaries.ends]
    return [*map(step_type_bytes, ends)], [whole_flag_bytes(field, boundaries.all_flags) for field in ends]


def checked_end_when(end_when: str | None, who: str) -> str | None:
    """``"any"``, ``"all"`` or None. Raises ``ValueError``: another value."""
    if end_when is not None and end_when not in ("any", "all"):
        raise ValueError(
            f"{who}: end_when: expected 'any' or 'all' of the flags of a step that has several, got {end_when!r}."
        )
    return end_when


class TrajectoryKeys(NamedTuple):
    """Which trajectories are meant: arguments of samplers and expanders, of which all may be None."""

    traj_key: FieldPath | None
    end_keys: tuple[FieldPath, ...] | None
    table: str | None
    """Name of the store's table of trajectories: the argument ``index``."""
    end_when: str | None = None
    """``"all"``: of a field with several flags, all must be set. ``"any"``, None: one is enough."""

    @classmethod
    def of(cls, who: str, traj_key: object, end_keys: object, index: str | None, end_when: str | None) -> Self:
        """Check the arguments. Raises ``TypeError``, ``ValueError``; messages begin with ``who``."""
        if index is not None:
            check_index_name(index, f"{who}: index")
        path, ends = as_path(traj_key, f"{who}: traj_key"), as_paths(end_keys, f"{who}: end_keys", empty=True)
        return cls(path, ends, index, checked_end_when(end_when, who))

    def config(self) -> dict[str, object]:
        """The arguments as plain values. ``end_when`` is among them if it was given: earlier versions do not know it."""
        given = {} if self.end_when is None else {"end_when": self.end_when}
        return {"traj_key": plain(self.traj_key), "end_keys": plain(self.end_keys), "index": self.table, **given}

    def boundaries(
        self, fields: Sequence[Field], numbers: dict[FieldPath, int], call: str, known: int | None = None
    ) -> Boundaries:
        """The boundaries in a store: the first id that is stored, and all ends: the given ones that are stored, or the usual ones.

        Args:
            fields: of the store.
            numbers: those of them that have a path, by path.
            call: what messages begin with.
            known: how many fields there were when the table was made; None: there is none yet. Usual ones are looked for among these.

        Raises ``RuntimeError``: the store holds none of the fields.
        """
        usual = {key: number for key, number in numbers.items() if known is None or number < known}
        wanted, among = (ID_KEYS, usual) if self.traj_key is None else ((self.traj_key,), numbers)
        ids = [among[key] for key in wanted if key in among][:1]
        ends = stored_ends(fields, usual) if self.end_keys is None else [key for key in self.end_keys if key in numbers]
        if ids or ends:
            return Boundaries(tuple(ids), tuple(numbers[key] for key in ends), bool(ends) and self.end_when == "all")
        got = [public(field.key) for field in fields] if numbers else "rows of one tensor each"
        names = f", or of these names beside the observation, or with a {STEP_TYPE!r} of integers"
        flags, also = (END_KEYS, names) if self.end_keys is None else (self.end_keys, "")
        raise RuntimeError(
            f"{call}: expected rows with one of the trajectory ids {[public(key) for key in wanted]}, or of the end flags "
            f"{[public(key) for key in flags]}{also}, got {got}. Name a stored field with traj_key or end_keys."
        )


def check_order(memory: Store) -> None:
    """Raise ``TypeError`` for a store whose rows are not in the order of writing."""
    if not memory.in_order:
        raise TypeError(
            f"sample: expected rows in the order of steps, a {memory.place} does not say that they are. Let it place rows in a ring, and "
            "declare traits = Traits(in_order=True)."
        )


def shared_table(memory: Store, name: str, boundaries: Boundaries, window: int) -> _native.Trajectories:
    """The store's table of that name. Where there is none, one is made by a scan of the rows.

    Raises:
        IncompatibleStore: the name stands for other boundaries. TypeError: rows are not in the order of steps.
    """
    check_order(memory)

    def make() -> _native.Trajectories:
        which, fields = memory.on_host(boundaries.which)
        counted = memory.indexes.windows.setdefault(name, window)
        memory.indexes.made_with[name] = len(memory.schema.fields)
        ids = len(boundaries.ids)
        types, whole = ([0] * ids + sizes for sizes in what_ends(memory.schema.fields, boundaries))
        table = _new_table(memory, ids, which, fields, counted, types, whole)
        memory.core.attach(table)
        _scan(table, memory)
        return table

    table: _native.Trajectories = memory.indexes.table(name, "trajectories", boundaries, make)
    return table


def _new_table(
    memory: Store,
    ids: int,
    which: Sequence[int],
    fields: Sequence[Tensor],
    window: int,
    step_types: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> _native.Trajectories:
    """A table over ``fields``, ``[C, ...]`` each and on the CPU, that knows no rows yet.

    ``ids``: how many of them, the first ones, hold ids. ``which``: their numbers in the core; empty for fields that no write changes.
    ``step_types``: :func:`step_type_bytes` of each; empty if all of them are flags or an id. ``whole``:
    :func:`whole_flag_bytes` of each; empty if one flag is enough.
    """
    width = math.prod(memory.schema.columns)
    nbytes = _native.Trajectories.bytes(memory.lanes, memory.lane_length, width)
    block = memory.zeroed(nbytes)
    table: _native.Trajectories = _fork.registered(
        _native.Trajectories(
            memory.core,
            ids,
            list(which),
            list(step_types),
            list(whole),
            *placed(fields),
            width,
            window,
            block.data_ptr(),
            nbytes,
            (*memory.control_memory, block, *fields),
        )
    )
    return table


def _scan(table: _native.Trajectories, memory: Store) -> None:
    """Let a table look at all rows."""
    steps = max(1, _progress.CHUNK // memory.lanes)
    _progress.watch(iter(lambda: table.catch_up(steps), 0), "looking for trajectories")


class StaticTable:
    """A private table over boundaries that the user gave and no row holds: those of all live rows, in row order."""

    def __init__(self, memory: Store, name: str, values: Tensor, *, by_id: bool, window: int) -> None:
        check_order(memory)
        self._memory = memory
        self._name = name
        self._values = values
        self._field = torch.zeros((memory.capacity, *values.shape[1:]), dtype=values.dtype, device="cpu")
        #: Ticket number of the next write when the values were placed.
        self._placed = -1
        self.table = _new_table(memory, int(by_id), (), [self._field], window)

    def place(self, extent: Extent) -> None:
        """Give the live rows their values. The caller holds a lock until its draw is over.

        Raises ``ValueError``: there are more or fewer live rows than values, because of a write.
        """
        if len(self._values) != extent.size:
            raise ValueError(
                f"sample: {self._name}: expected one value per live row, {extent.size}, got {len(self._values)}. Give a sampler "
                "with those of the rows that are there now."
            )
        version = int(self._memory.core.next_ticket)
        if version == self._placed:
            return
        self._placed = -1  # in case of an interrupt
        self._field.zero_()
        self._field[extent.rows(torch.arange(extent.size, device="cpu"))] = self._values
        self.table.forget()
        _scan(self.table, self._memory)
        self._placed = version


_MASK = ("collector", "mask")
_VALID, _LEARNING = "validity_mask", "learning_mask"
#: What the native core is told of a mark that is not wanted, or that is not merged with a stored flag.
_UNWANTED, _ALONE = -2, -1


class EndMarks(NamedTuple):
    """Which marks a batch of windows carries, and where its tensors hold them.

    The tensors of a batch are its columns, its rows, then one tensor per mark, priority weights and tickets if it has them.
    """

    wanted: _native.Marks
    """What the native core is asked for."""
    places: dict[Entry, int]
    """Entries of ``info`` that are among the tensors: the place of each."""
    merged: list[tuple[Entry, Merge, int, int]]
    """Entries made of a stored flag and a mark: the entry, the function that merges them, and the places of both."""
    fields: int = 0
    """Columns of the batch."""

    @classmethod
    def none(cls) -> EndMarks:
        """No marks."""
        return cls(_native.Marks(_UNWANTED, False, _UNWANTED, False, _UNWANTED, False, False, False), {}, [])

    @classmethod
    def of(
        cls, store: Store, settings: WindowSettings, *, weighted: bool, apart: bool = False, within: bool = False
    ) -> EndMarks:
        """The marks for the flags that a store holds.

        Under ``truncated_key`` and its siblings ``done`` and ``terminated`` they are bool ``[B, 1]``. Under ``init_key``, if it is
        stored, the mark has its shape and dtype. With padding ``("collector", "mask")`` is bool ``[B]``; of windows of a spec,
        ``"validity_mask"`` and ``"learning_mask"`` are.

        Args:
            store: holds the rows.
            settings: names the flags, and says whether short windows are filled up.
            weighted: the batch has ``"priority_weight"``.
            apart: the native core does not read the stored flags, so it cannot merge its marks with them.
            within: the marks take the place of the batch's own flags: columns of the same shape and dtype are marked themselves.
        """
        truncated_key, init_key, padded = settings.truncated_key, settings.init_key, settings.pad_output
        fields = numbers_by_path(store)
        places: dict[Entry, int] = {}
        merged: list[tuple[Entry, Merge, int, int]] = []
        ends, never, done, in_place, begun, begun_is_column = _UNWANTED, False, _UNWANTED, False, _UNWANTED, False
        stored = len(store.schema.fields)
        at = stored + 1
        if truncated_key is not None:
            *above, name = truncated_key
            within = within and name not in ("done", "terminated")
            number, entry = fields.get(truncated_key), public(truncated_key)
            if within and number is not None and _is_flag(store, number, (1,)):
                ends = places[entry] = number
            else:
                ends, places[entry], at = _ALONE, at, at + 1
            number, entry = fields.get((*above, "done")), public((*above, "done"))
            if within and number is not None and _is_flag(store, number, (1,)):
                done, in_place, places[entry] = number, True, number
            elif number is None or (not apart and _is_flag(store, number, (), (1,))):
                done, places[entry], at = _ALONE if number is None else number, at, at + 1
            else:
                done, at = _ALONE, at + 1
                merged.append((entry, _with_ends, number, at - 1))
            number, entry = fields.get((*above, "terminated")), public((*above, "terminated"))
            if number is None:
                never, places[entry], at = True, at, at + 1
            elif _is_flag(store, number, (1,)):
                places[entry] = number
            else:
                merged.append((entry, lambda stored, _: _as_flag(stored), number, number))
        elif not settings.are_even:  # for transforms alone, and for goals
            ends, places[WINDOW_ENDS], at = _ALONE, at, at + 1
        if init_key is not None and init_key in fields:
            number, entry = fields[init_key], public(init_key)
            if not apart and _is_flag(store, number, (), (1,)):
                begun, begun_is_column = number, store.schema.fields[number].shape != ()
                places[entry] = at
            else:
                begun = _ALONE
                merged.append((entry, with_starts, number, at))
            at += 1
        specified = settings.window is not None
        for mask in [_VALID, _LEARNING] if specified else [_MASK] if padded else []:
            places[mask], at = at, at + 1
        if weighted:
            places["priority_weight"] = at
        wanted = _native.Marks(ends, never, done, in_place, begun, begun_is_column, padded or specified, specified)
        return cls(wanted, places, merged, stored)

    def info(self, tensors: Sequence[Tensor], *, numbered: bool, flat: bool = True) -> Info:
        """The ``info`` of a batch, without its index. ``numbered``: the last tensor holds tickets. ``flat``: tensors are ``[B, ...]``,
        else ``[B, T, ...]``.
        """
        info: Info = {entry: tensors[place] for entry, place in self.places.items()}
        for entry, merge, field, mark in self.merged:
            if flat:
                info[entry] = merge(tensors[field], tensors[mark])
            else:
                merged = merge(tensors[field].flatten(0, 1), tensors[mark].flatten(0, 1))
                info[entry] = merged.reshape(*tensors[field].shape[:2], *merged.shape[1:])
        if numbered:
            info["index_generation"] = tensors[-1]
        return info


def _is_flag(store: Store, number: int, *shapes: tuple[int, ...]) -> bool:
    field = store.schema.fields[number]
    return field.dtype == "bool" and tuple(field.shape) in shapes


# ---- flags that are stored as something else than bool [B] or [B, 1] -----------------------------------------------------


def _as_flag(stored: Tensor) -> Tensor:
    """A stored flag as bools ``[B, 1]`` (rows with batch dimensions: as stored)."""
    flag = stored if stored.dtype is torch.bool else stored != 0
    return flag.unsqueeze(-1) if flag.ndim == 1 else flag


def _with_ends(stored: Tensor, ends: Tensor) -> Tensor:
    flag = _as_flag(stored)
    return flag | _like(ends, flag)


def with_starts(stored: Tensor, first: Tensor) -> Tensor:
    """A stored flag of first steps, set where ``first`` is: a new tensor of its shape and dtype."""
    first = _like(first, stored)
    return stored | first if stored.dtype is torch.bool else stored.where(~first, 1)


def _like(mark: Tensor, stored: Tensor) -> Tensor:
    """Marks ``[B]`` or ``[B, 1]`` in the dimensions of a stored field."""
    return mark if mark.ndim == stored.ndim else mark.reshape(-1, *(1,) * (stored.ndim - 1))
