"""Tables of a store's trajectories: which fields end one, and the native table that knows where each begins and ends.

A table belongs to the store, under a name. All samplers of the same name and boundaries draw from the same table, and every
write updates it, also those of other processes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from engram._support import checks, fork, native, progress
from engram._support.field_paths import FieldPath, as_path, as_paths, plain, public
from engram.format.schema import DTYPES, Field
from engram.saved.rows import of_the_step
from engram.store.indexes import check_index_name
from engram.store.memory import placed, row_stride
from engram.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch import Tensor

    from engram.around.settings import WindowSettings
    from engram.types import Extent

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

    #: Numbers of the fields in the store: one, or none.
    ids: tuple[int, ...]
    #: Numbers of fields that end a trajectory by a byte other than zero, or by a step type.
    ends: tuple[int, ...]
    #: Of a field with several flags, all must be set; else one is enough.
    all_flags: bool = False

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


def usual_flags(is_there: Callable[[FieldPath], bool]) -> list[FieldPath]:
    """The flags that end a trajectory if no keys are given: of the next step, or where none of these is there, beside the observation."""
    return [key for key in END_KEYS if is_there(key)] or [key[1:] for key in END_KEYS if is_there(key[1:])]


def stored_ends(fields: Sequence[Field], known: Container[FieldPath]) -> list[FieldPath]:
    """The fields that end a trajectory if no keys are given: the usual flags, and the step types of the step and of the next one.

    ``known``: the paths among the fields.
    """
    types = [field for field in fields if field.key in known and step_type_bytes(field)]
    sides = ([field for field in types if ("next" in field.key[:-1]) is ahead] for ahead in (False, True))
    return usual_flags(known.__contains__) + [field.key for some in sides for field in of_the_step(some)[:1]]


def checked_end_when(end_when: str | None, who: str) -> str | None:
    """``"any"``, ``"all"`` or None. Raises ``ValueError``: another value."""
    checks.check_choice(f"{who}: end_when", end_when, (None, "any", "all"))
    return end_when


class TrajectoryKeys(NamedTuple):
    """Which trajectories are meant: arguments of samplers and expanders, of which all may be None."""

    traj_key: FieldPath | None
    end_keys: tuple[FieldPath, ...] | None
    #: Name of the store's table of trajectories: the argument ``index``.
    table: str | None
    #: ``"all"``: of a field with several flags, all must be set. ``"any"``, None: one is enough.
    end_when: str | None = None

    @classmethod
    def of(
        cls,
        who: str,
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> Self:
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

    def episodes(self, memory: Store, call: str) -> Episodes:
        """The trajectories of a store. Raises as :meth:`boundaries`."""
        name, fields = self.table or "main", memory.schema.fields
        known = memory.indexes.made_with.get(name)
        return Episodes(memory, self.boundaries(fields, numbers_by_path(memory), call, known), name)


def check_order(memory: Store) -> None:
    """Raise ``TypeError`` for a store whose rows are not in the order of writing."""
    if not memory.in_order:
        raise TypeError(
            f"sample: expected rows in the order of steps, a {memory.place} does not say that they are. Let it place rows in a ring, and "
            "declare traits = Traits(in_order=True)."
        )


class Episodes(NamedTuple):
    """The trajectories of a store: which fields end one, and the table of where each begins and ends."""

    memory: Store
    boundaries: Boundaries
    #: Of the table, in the store.
    name: str

    @property
    def id_key(self) -> FieldPath | None:
        """The field that tells trajectories apart; None: end flags alone do."""
        return next((self.memory.schema.fields[number].key for number in self.boundaries.ids), None)

    def ends(self) -> tuple[tuple[int, ...], list[int], list[int]]:
        """The fields that end a trajectory, and :func:`step_type_bytes` and :func:`whole_flag_bytes` of each."""
        fields = [self.memory.schema.fields[number] for number in self.boundaries.ends]
        whole = [whole_flag_bytes(field, self.boundaries.all_flags) for field in fields]
        return self.boundaries.ends, [*map(step_type_bytes, fields)], whole

    def table(self, window: int = 1) -> native.Trajectories:
        """The store's table of that name. Where there is none, one is made by a scan of the rows, which counts windows of so many steps.

        Raises:
            IncompatibleStore: the name stands for other boundaries. TypeError: rows are not in the order of steps.
        """
        memory, name, ids = self.memory, self.name, len(self.boundaries.ids)
        check_order(memory)

        def make() -> native.Trajectories:
            which, fields = memory.on_host(self.boundaries.which)
            counted = memory.indexes.windows.setdefault(name, window)
            memory.indexes.made_with[name] = len(memory.schema.fields)
            sizes = [[0] * ids + each for each in self.ends()[1:]]
            table = _new_table(memory, ids, which, fields, counted, sizes)
            memory.core.attach(table)
            _scan(table, memory)
            return table

        return memory.indexes.table(name, "trajectories", self.boundaries, make)


def _new_table(
    memory: Store, ids: int, which: Sequence[int], fields: Sequence[Tensor], window: int, sizes: Sequence[list[int]]
) -> native.Trajectories:
    """A table over ``fields``, ``[C, ...]`` each and on the CPU, that knows no rows yet.

    ``ids``: how many of them, the first ones, hold ids. ``which``: their numbers in the core; empty for fields that no write changes.
    ``types``: :func:`step_type_bytes` of each; empty if all of them are flags or an id. ``whole``: :func:`whole_flag_bytes` of each;
    empty if one flag is enough.
    """
    width = math.prod(memory.schema.columns)
    nbytes = native.Trajectories.bytes(memory.lanes, memory.lane_length, width)
    block = memory.zeroed(nbytes)
    (types, whole), at, owner = sizes, block.data_ptr(), (*memory.control_memory, block, *fields)
    described = list(which), types, whole
    table = native.Trajectories(memory.core, ids, *described, *placed(fields), width, window, at, nbytes, owner)
    return fork.registered(table)


def _scan(table: native.Trajectories, memory: Store) -> None:
    """Let a table look at all rows."""
    steps = max(1, progress.CHUNK // memory.lanes)
    progress.watch(iter(lambda: table.catch_up(steps), 0), "looking for trajectories")


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
        self.table = _new_table(memory, int(by_id), (), [self._field], window, ([], []))

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


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: object = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """First and last step of every trajectory in a ring of slots.

    Args:
        trajectory: ids ``[T, *columns]``, constant within a trajectory.
        end: bools ``[T, *columns]``, true at the last step of one. Exactly one of the two; other dtypes: not zero.
        at_capacity: whether the ring is full: then trajectories go on across its end, from slot ``T - 1`` to slot 0.
        cursor: of a full ring, the slot that was written last: a trajectory ends there. An int, or a tensor, array, range or
            slice, of which the last element counts. None: nothing ends but by the signal.
        device: where the results are to be. Default: that of the signal.

    Returns:
        ``(start, stop, lengths)``, int64 ``[K, n]``, ``[K, n]`` and ``[K]``, with ``n`` the dimensions of the signal: the slot
        first, then the column. ``stop`` is inclusive; where it is smaller than ``start``, the trajectory goes on across the
        end of the ring. Grouped by column; within one, in the order of ``stop``. A column in which nothing ends has one
        trajectory, up to its last row.

    Raises:
        TypeError: not exactly one of ``trajectory`` and ``end``.
        RuntimeError: a signal without steps or dimensions.
        RuntimeError: ``cursor`` is an empty tensor, array, range or slice.
        ValueError: ``cursor`` is no slot.

    >>> import torch
    >>> start, stop, lengths = find_start_stop_traj(end=torch.tensor([0, 1, 0, 0, 1, 0]), at_capacity=True)
    >>> start.flatten().tolist(), stop.flatten().tolist(), lengths.tolist()
    ([5, 2], [1, 4], [3, 3])
    """
    if (trajectory is None) == (end is None):
        given = "both" if end is not None else "none"
        raise TypeError(f"find_start_stop_traj: expected one of trajectory and end, got {given}.")
    signal = trajectory if trajectory is not None else end
    assert signal is not None  # one of the two was given
    if signal.ndim == 0 or signal.numel() == 0:
        raise RuntimeError(f"find_start_stop_traj: expected steps, [T, *columns], got shape {list(signal.shape)}.")
    if trajectory is not None:
        stops = trajectory != trajectory.roll(-1, 0)  # in the last row: whether it is followed by slot 0
    else:
        stops = signal.clone() if signal.dtype is torch.bool else signal != 0
    steps = len(stops)
    if not at_capacity:
        stops[-1] = True
    elif cursor is not None:
        stops[_last_slot(cursor, steps)] = True
    columns = stops.reshape(steps, -1).t()
    columns[:, -1] |= ~columns.any(1)
    column, stop = columns.nonzero(as_tuple=True)
    before = stop.roll(1)  # the stop before, of the same column: for its first one, the column's last
    first = torch.ones_like(column, dtype=torch.bool)
    first[1:] = column[1:] != column[:-1]
    last = first.roll(-1).nonzero().flatten()
    before[first] = stop[last]
    lengths = (stop - before - 1) % steps + 1
    start = (before + 1) % steps
    places = torch.unravel_index(column, stops.shape[1:]) if stops.ndim > 1 else ()
    found = [torch.stack([slot, *places], -1) for slot in (start, stop)]
    target = signal.device if device is None else torch.device(device)
    return found[0].to(target), found[1].to(target), lengths.to(target)


def _last_slot(cursor: object, steps: int) -> int:
    if isinstance(cursor, slice):
        cursor = range(steps)[cursor]
    slots = torch.as_tensor(list(cursor[-1:]) if isinstance(cursor, range) else cursor).flatten()
    if not slots.numel():
        raise RuntimeError("find_start_stop_traj: cursor: expected the slots written last, got none. Pass None.")
    slot = int(slots[-1])
    if not -steps <= slot < steps:
        raise ValueError(f"find_start_stop_traj: cursor: expected a slot in [0, {steps}), got {slot}.")
    return slot


class _Fields(NamedTuple):
    """Numbers of the fields in the store."""

    trajectory: int
    step: int
    boundaries: Boundaries


def fragments_table(
    memory: Store, settings: WindowSettings, rules: TrajectoryKeys, window: int
) -> tuple[native.Fragments, FieldPath]:
    """The store's table of interleaved trajectories under the settings' name, and the field that tells trajectories apart.

    Where there is none, one is made by a scan of the rows.

    Raises:
        RuntimeError: a field is not stored, or rows are in columns.
        TypeError: a field is not one integer per row.
        IncompatibleStore: the name stands for other fields.
    """
    if memory.schema.columns:
        raise RuntimeError(f"sample: fragmented: expected ndim=1, got columns {list(memory.schema.columns)}.")
    numbers = numbers_by_path(memory)
    ids = ID_KEYS if settings.traj_key is None else (settings.traj_key,)
    id_key = next((key for key in ids if key in numbers), None)
    step_key = settings.step_key
    if id_key is None or step_key not in numbers:
        missing = f"traj_key {[*map(public, ids)]}" if id_key is None else f"step_key {public(step_key or ())!r}"
        got = [public(field.key) for field in memory.schema.fields] if numbers else "rows of one tensor each"
        raise RuntimeError(f"sample: fragmented: expected rows with the {missing}, got {got}. Name a stored field.")
    fields, episodes = memory.schema.fields, rules.episodes(memory, "sample")
    boundaries = episodes.boundaries._replace(ids=())
    which = _Fields(numbers[id_key], numbers[step_key], boundaries)
    for field, argument in ((fields[which.trajectory], "traj_key"), (fields[which.step], "step_key")):
        if "int" not in field.dtype or field.row_bytes != DTYPES[field.dtype]:
            raise TypeError(
                f"sample: fragmented: {argument}={field.name!r}: expected one integer per row, got {field.dtype} {list(field.shape)}."
            )

    def make() -> native.Fragments:
        counted = memory.indexes.windows.setdefault(settings.index, window)
        memory.indexes.made_with[settings.index] = len(fields)
        _, (trajectory, step, *ends) = memory.on_host((which.trajectory, which.step, *boundaries.ends))
        owner = (*memory.control_memory, trajectory, step, *ends)
        described = (*_described(memory, which.trajectory, trajectory), *_described(memory, which.step, step))
        made = native.Fragments(memory.core, *described, *placed(ends), *episodes.ends()[1:], counted, owner)
        table = fork.registered(made)
        memory.core.attach(table)
        table.catch_up()
        return table

    return memory.indexes.table(settings.index, "fragments", which, make), id_key


def _described(memory: Store, number: int, field: Tensor) -> tuple[int, int, int, bool]:
    """Address of a field, bytes of an integer, bytes from row to row, and whether it is signed."""
    signed = memory.schema.fields[number].dtype.startswith("int")
    return field.data_ptr(), field[:1].nbytes, row_stride(field), signed
