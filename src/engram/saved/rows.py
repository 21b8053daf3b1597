"""The rows of a store as a part has them: what fields mean, which trajectories they make, and reading them back."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash
from msgspec import UNSET
from numpy.typing import NDArray

from engram._support import field_paths, native
from engram._support.words import raise_as
from engram.errors import CorruptStore
from engram.format import layout
from engram.format import schema as schemas
from engram.format.schema import Column, Field, PartField, Schema
from engram.saved import description, disk, parts
from engram.saved.documents import corrupt
from engram.saved.part_reader import COMMITTED, VOID, PartReader, Stretch, stretches, ticket_stretches
from engram.saved.ragged import PartItems, WholeItems
from engram.store import memory, rings
from engram.store.store import Store
from engram.types import RowsTarget

Ints: TypeAlias = NDArray[np.int64]

#: The role of fields, by key, as users say it.
Roles: TypeAlias = "Mapping[str, str] | Mapping[tuple[str, ...], str] | Mapping[str | tuple[str, ...], str]"
F = TypeVar("F", bound="Column")
M = TypeVar("M", bound=np.generic)

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
            raise KeyError(
                f"roles: expected stored fields, {[field_paths.public(field.key) for field in fields]}, got {key!r}."
            )
        if fields[stored[path]].ragged and role != "data":
            raise ValueError(f"roles: {key!r}: expected a field whose rows have one size, got a ragged one.")
        roles[stored.pop(path)] = role
    told = {*(given or {}).values()}
    usual = {
        key: _USUAL[key[-1]]
        for key, number in stored.items()
        if key[-1] in _USUAL and _USUAL[key[-1]] not in told and not fields[number].ragged
    }
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


class Marks(NamedTuple):
    """Marks of ``n`` rows that say where trajectories begin and end; anything of rows that hold nothing. None: no field says it."""

    #: ``[n, words]``: of another trajectory where other words stand.
    ids: NDArray[np.signedinteger] | None = None
    #: ``[n]``: the last step of its trajectory.
    ends: NDArray[np.bool_] | None = None
    #: ``[n]``: the last step because the trajectory was cut short.
    cut: NDArray[np.bool_] | None = None
    #: ``[n]``: the first step of its trajectory.
    starts: NDArray[np.bool_] | None = None


def find_runs(lanes: Ints, numbers: Ints, marks: Marks, *, lane_length: int, columns: int = 1) -> Ints:
    """Live steps that belong together, of all lanes.

    Args:
        lanes: int64 ``[L, 2]`` or wider: position of each lane's next step, and its live rows.
        numbers: int64 ticket numbers of all rows up to the last live one; 0 for a row that holds nothing.
        marks: of those rows.
        lane_length: rows of a lane.
        columns: of the only lane (``ndim > 1``), each of which has runs of its own.

    Returns:
        int64 ``[K, 5]``: lane, position of the first step, position behind the last one, time of the end, flags; by lane and
        position. With columns, positions step by their number, and runs of different columns lie between each other. Rows that
        were written by number, ahead of the cursor, lie before position 0.

    Cost: O(rows): about 2 ns each.
    """
    if any(column is not None and len(column) < len(numbers) for column in marks):
        raise CorruptStore(f"its lanes: expected marks of {len(numbers)} rows, got those of fewer.")
    places, numbers = np.ascontiguousarray(lanes[:, :2], np.int64), np.ascontiguousarray(numbers, np.int64)
    ids, *flags = (None if column is None else np.ascontiguousarray(column) for column in marks)
    of_ids = (0, 0) if ids is None else (ids.ctypes.data, ids[:1].nbytes)
    ends, cut, starts = (0 if column is None else column.ctypes.data for column in flags)
    said = numbers.ctypes.data, len(numbers), *of_ids, (ends, cut, starts)
    with raise_as(CorruptStore, "its lanes"):
        runs = native.find_runs(places.ctypes.data, len(places), lane_length, columns, *said).reshape(-1, 5)
    return runs if columns == 1 else runs[np.lexsort((runs[:, 1], runs[:, 0]))]


def kinds_of(runs: Ints, columns: int = 1) -> Ints:
    """int64 ``[K]``: for each run of a table which of the :data:`KINDS` it is."""
    lane, begin, _, _, flags = runs.T
    order = np.lexsort((begin, begin % columns, lane))
    track = np.stack([lane, begin % columns])[:, order]
    oldest = np.ones(len(runs), bool)  # of its lane, or of its column
    oldest[order[1:]] = (track[:, 1:] != track[:, :-1]).any(0)
    first, last, is_open = (flags & bit != 0 for bit in (description.HAS_FIRST, description.HAS_LAST, description.OPEN))
    headless = ~first & oldest
    members = (first & last, first & is_open, headless & last, headless & is_open, first & ~last & ~is_open)
    return np.select(members, range(len(members)), len(members))


def count_kinds(runs: Ints, columns: int = 1) -> dict[str, dict[str, int]]:
    """Episodes and steps of each of the :data:`KINDS`."""
    steps = (runs[:, 2] - runs[:, 1]) // columns
    return named_counts(description.KINDS, counted(kinds_of(runs, columns), steps, len(description.KINDS)))


def counted(of: Ints, steps: Ints, groups: int) -> Ints:
    """int64 ``[groups, 2]``: how many trajectories each group has, and how many steps. ``of``: the group of each."""
    episodes = np.bincount(of, minlength=groups)
    total = np.zeros(groups, np.int64)
    np.add.at(total, of, steps)
    return np.stack([episodes, total], 1)


def named_counts(names: Sequence[str], counts: Ints) -> dict[str, dict[str, int]]:
    """Episodes and steps by name, of an int64 ``[names, 2]``."""
    pairs = zip(names, counts.tolist(), strict=True)
    return {name: {"episodes": episodes, "steps": steps} for name, (episodes, steps) in pairs}


#: Bytes that are copied from an accelerator, or to it, at a time; and that a thread reads into memory of the processor: more, as
#: blocks at both ends are checked beside it.
PIECE, _LONG_PIECE = 16 << 20, 128 << 20
#: Rows whose marks are looked at together.
_MARKED = 1 << 20
#: Tickets that are looked at together.
_LOOK = 1 << 18
_STEP_TYPES = {"first": 0, "last": 2}
#: What ids are compared as, bit for bit, by the bytes of a number.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


#: Threads, the caller's included. Disks give more to two than to one; beyond that it is the processors that training needs.
READERS = 2


def parallel_read(shares: Sequence[Iterable[Callable[[], object]]], into: Sequence[torch.Tensor]) -> None:
    """Call all that the shares consist of, in several threads, as :func:`work_off` does.

    Shares must not touch the same reader or the same rows at once. Tensors on a device are filled by this thread alone, as what is
    launched there belongs to its stream.
    """
    disk.work_off(shares, READERS if all(tensor.is_cpu for tensor in into) else 1)


def described(schema: Schema, roles: Sequence[Any]) -> tuple[description.Geometry, list[PartField]]:
    """A store as a part describes it."""
    geometry = description.Geometry(schema.capacity, schema.lanes, schema.capacity // schema.lanes, schema.columns)
    fields = [
        PartField(number, field.key, field.dtype, field.shape, role, field.ragged or UNSET)
        for number, (field, role) in enumerate(zip(schema.fields, roles, strict=False))
    ]
    return geometry, fields


def ticket_words(numbers: Ints, base: int = 0) -> Ints:
    """Tickets as they are saved, of rows that are whole, or void. ``base``: by how much the numbers are larger than saved ones."""
    words = numbers.astype("<i8")
    words -= base
    words <<= 2
    words |= COMMITTED
    if not numbers.all():
        words[numbers == 0] = VOID
    return words


def sum_of(numbers: Ints, base: int) -> int:
    """Of the tickets of a segment, as they are saved: equal ones mean equal rows."""
    return int(xxhash.xxh3_64_intdigest(ticket_words(numbers, base).data))


class Boundaries:
    """The fields of a store that say where trajectories begin and end."""

    def __init__(self, schema: Schema, roles: Sequence[str]) -> None:
        number = {field.key: i for i, field in enumerate(schema.fields)}
        chosen = boundary_fields(schema.fields, roles)
        said = [(name, number[field.key]) for name, some in chosen.items() for field in some]
        self._names = tuple(name for name, _ in said)
        #: Numbers of the fields.
        self.which = tuple(which for _, which in said)

    def marks(self, columns: Sequence[torch.Tensor]) -> Marks:
        """What rows say, from those fields of them, ``[n, *shape]`` each."""
        ids: torch.Tensor | None = None
        true: dict[str, list[NDArray[np.bool_]]] = {}
        for name, column in zip(self._names, columns, strict=True):
            flat = column.cpu().reshape(len(column), math.prod(column.shape[1:]))
            if name == "traj_id":
                ids = flat
                continue
            # Not by torch, whose threads would wait for each other where others have the cores.
            flags = (
                flat == _STEP_TYPES[name] if name in _STEP_TYPES else flat if flat.dtype == torch.bool else flat != 0
            )
            true.setdefault(name, []).append(np.logical_or.reduce(flags.numpy(), axis=1))
        done, over, cut, last, first, begun = (
            _any(true.get(name, [])) for name in ("done", "terminated", "truncated", "last", "first", "is_init")
        )
        words = None if ids is None else ids.contiguous().view(_WORDS[ids.element_size()]).numpy()
        cut_alone = cut if cut is None or over is None else cut & ~over
        return Marks(words, _any([done, cut, over, last]), cut_alone, _any([begun, first]))

    def marks_of(self, fields: Sequence[torch.Tensor], n: int) -> Marks:
        """What the first rows say, of which there are all fields."""
        return self.marks([fields[which][:n].cpu() for which in self.which]) if self.which else Marks()

    def marks_now(self, store: Store, numbers: Ints) -> Marks:
        """What all rows say of trajectories, copied before they may be overwritten; 0 in ``numbers`` for those that are already."""
        if not self.which:
            return Marks()
        rows = (numbers != 0).nonzero()[0]  # of bools: without the interpreter
        said = []
        for begin in range(0, len(rows), _MARKED):
            piece = rows[begin : begin + _MARKED]
            columns, moved = store.read(
                torch.from_numpy(piece), expected=torch.from_numpy(numbers[piece]), which=self.which
            )
            numbers[piece[moved]] = 0
            said.append(self.marks(columns))
        return (
            Marks._make(_spread(column, rows, len(numbers)) for column in zip(*said, strict=True)) if said else Marks()
        )


def _spread(pieces: Sequence[NDArray[M] | None], rows: Ints, n: int) -> NDArray[M] | None:
    """What some of ``n`` rows say, in pieces, at the places of those rows."""
    if pieces[0] is None:
        return None
    every = np.zeros((n, *pieces[0].shape[1:]), pieces[0].dtype)
    every[rows] = np.concatenate(pieces)  # type: ignore[arg-type] # all or none are None
    return every


def _any(flags: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    there = [flag for flag in flags if flag is not None]
    return np.logical_or.reduce(there) if there else None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_rows_state(reader: PartReader, *, close_open: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
    """The storage's state without rows, from its part; every block of it is checked.

    ``close_open``: a row that holds nothing follows the trajectories that go on, so they end there. ``without``: names of priorities
    that are left out.

    Raises:
        CorruptCheckpoint: a block has another sum, or a table says what no store does.
    """
    state: dict[str, Any] = parts.read_state(reader)
    for name in without:
        state["priorities"].pop(name, None)
    geometry = reader.geometry
    if geometry is None:
        return state
    path = reader.folder / layout.FOLDER / "part.json"
    try:
        schema = schemas.decode(state["schema"].encode(), str(path))
    except (KeyError, AttributeError, UnicodeEncodeError, CorruptStore) as error:
        raise corrupt(path, f"expected the schema of a store ({str(error).removesuffix('.')})") from error
    roles = {field.key: field.role for field in reader.schema or ()}
    sizes, fields = described(schema, [roles.get(field.key, "data") for field in schema.fields])
    if (geometry, list(reader.schema or ())) != (sizes, fields):
        differs = schemas.field_differences(fields, reader.schema or ()) or [f"geometry {geometry}"]
        raise corrupt(path, f"expected geometry and fields as its schema has them, got others: {'; '.join(differs)}")
    name = f"{layout.FOLDER}/lanes.bin"
    lanes = np.frombuffer(reader.read_all(name), "<i8").reshape(-1, 4).copy()
    goes_on = lanes[:, 2] != 0
    lanes[:, 2] = 0  # rows say it themselves
    numbers = read_numbers(reader)
    for name, nbytes in reader.files.items():  # what a load does not need; but what is damaged is not loaded
        if name.rpartition("/")[2] in ("trajectories.bin", "meta.json"):
            for at in range(0, nbytes, PIECE):
                reader.read(name, at, bytearray(min(PIECE, nbytes - at)))
    if close_open:
        in_order = lanes[:, 1] == np.minimum(lanes[:, 0], geometry.lane_length)  # and not written by number
        left_out = _closed(lanes, (goes_on & in_order).nonzero()[0], geometry)
        numbers = np.append(numbers, np.zeros(max(0, int(left_out.max(initial=-1)) + 1 - len(numbers)), np.int64))
        numbers[left_out] = 0
        writes = state.get("writes")
        if isinstance(writes, torch.Tensor) and writes.ndim == 1:  # others are refused later
            writes[left_out[left_out < len(writes)]] = 0
    return {**state, "lanes": torch.from_numpy(lanes), "numbers": torch.from_numpy(numbers)}


def read_numbers(reader: PartReader) -> Ints:
    """Ticket numbers of the rows of a part up to the last one, 0 for those that hold nothing. Raises ``CorruptCheckpoint``."""
    stretches = ticket_stretches(reader)
    numbers = np.zeros(max((it.end for it in stretches), default=0), "<i8")  # not of all the capacity
    for it in stretches:
        _read_numbers(reader, it, numbers[it.begin : it.end])
    return numbers


def _read_numbers(reader: PartReader, it: Stretch, into: Ints) -> Ints:
    reader.read(it.file, it.offset, into.data)
    for first in range(0, len(into), _LOOK):
        checked_numbers(into[first : first + _LOOK], reader.folder / it.file, it.offset + 8 * first)
    return into


def same(reader: PartReader, numbers: Ints, base: int) -> NDArray[np.bool_]:
    """The rows that a part in segments has with these ticket numbers, less ``base``. Reads what sums do not tell.

    Raises ``CorruptCheckpoint``.
    """
    found = np.zeros(len(numbers), np.bool_)
    for it, stretch in zip(reader.listing.segments, ticket_stretches(reader), strict=True):
        own, into = numbers[it.first_row : it.end], found[it.first_row : it.end]
        into[:] = sum_of(own, base) == it.tickets_sum
        if not into.all():
            into[:] = _read_numbers(reader, stretch, np.empty(it.rows, "<i8"))[: len(own)] == own - base
    return found


def checked_numbers(words: Ints, path: Path, offset: int) -> Ints:
    """Ticket words, which come from ``offset`` of a file, become their numbers, in place; 0 for void ones.

    Raises:
        CorruptCheckpoint: others.
    """
    void = words & 3 == VOID
    if not (void | (words & 3 == COMMITTED)).all() or (words < 0).any():
        raise corrupt(path, "expected tickets of whole or void rows", offset)
    words >>= 2
    words[void] = 0
    return words


def _closed(lanes: Ints, which: Ints, geometry: description.Geometry) -> Ints:
    """Leaves out the next row of some lanes (with columns one of each). Changes ``lanes``; the rows that hold nothing then."""
    step = int(np.prod(geometry.columns))
    left_out = which * geometry.lane_length + lanes[which, 0] % geometry.lane_length
    lanes[which, 0] += step
    lanes[which, 1] = np.minimum(lanes[which, 1] + step, geometry.lane_length)
    return np.ravel(left_out[:, None] + np.arange(step))


class SavedRowsSource:
    """The rows of a part, for the fields of a store. Every block is checked when it is read."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._free: list[PartReader] = []  # a reader is for one thread at a time
        self._items: WholeItems | None = None

    def take_items(self, state: Mapping[str, torch.Tensor], here: Schema, where: str) -> None:
        """Read and check where the items of ragged fields are. Raises as :class:`PartItems` and :class:`WholeItems`."""
        self._items = WholeItems(PartItems(self._reader, state), here, where)

    def fill(self, tensors: RowsTarget) -> None:
        """Read into tensors ``[capacity, *shape]``."""
        here = all(tensor.is_cpu for tensor in tensors)
        most = _LONG_PIECE if here and tensors.put is None else PIECE
        pieces = [
            it._replace(offset=it.offset + (begin - it.begin) * size, begin=begin, end=min(begin + step, it.end))
            for it in stretches(self._reader)
            if not (self._reader.schema or ())[it.field].ragged
            if (size := tensors[it.field][:1].nbytes)
            for step in [max(1, most // size)]
            for begin in range(it.begin, it.end, step)
        ]
        with contextlib.ExitStack() as stack:
            more = min(READERS if here else 1, len(pieces)) - 1
            self._free = [self._reader, *(stack.enter_context(self._reader.again()) for _ in range(more))]
            parallel_read([[partial(self._read_piece, it, tensors)] for it in pieces], tensors)
        if self._items is not None:
            rings.fill_rings(tensors, self._items)

    def _read_piece(self, it: Stretch, tensors: RowsTarget) -> None:
        reader, into = self._free.pop(), tensors[it.field][it.begin : it.end]
        direct = into.is_cpu and into.is_contiguous() and tensors.put is None
        rows = into if direct else torch.empty(into.shape, dtype=into.dtype, device="cpu")
        try:
            reader.read(it.file, it.offset, rows.reshape(-1).view(torch.uint8).numpy().data)
        finally:
            self._free.append(reader)
        if not direct:
            memory.write_rows(tensors, it.field, it.begin, rows)
