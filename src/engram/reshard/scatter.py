"""Rows of saved stores on their way to places that a plan gives them: in another store, of another size, on other ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from engram import _native
from engram.errors import IncompatibleCheckpoint
from engram.format import layout
from engram.format import schema as schemas
from engram.format.problems import corrupt
from engram.format.sums import BLOCK
from engram.format.tables import HAS_FIRST, HAS_LAST
from engram.persist.parallel_read import parallel_read
from engram.persist.roles import ENDS, boundary_fields
from engram.persist.rows import Stretch, checked_numbers, dtype_of, read_rows_state, stretches
from engram.reshard.plan import Source, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartField, PartReader
    from engram.format.schema import Schema
    from engram.reshard.plan import Plan

__all__ = [
    "Saved",
    "can_truncate",
    "fields_of",
    "fill_placed",
    "has_ends",
    "in_blocks",
    "in_rows",
    "open_saved",
    "placed_state",
    "read_runs",
]

#: Bytes that are read at a time: as many as caches hold.
_WINDOW = 2 << 20
#: Rows whose fields are rewritten at a time.
_REWRITTEN = 1 << 18
#: Of rows without trajectories: steps that stay together, how many such blocks a lane has at least, and a shard at most.
_STEPS = 256
_IN_A_LANE = 16
_BLOCKS = 1 << 16
#: What has as many bytes, and can be indexed.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOVABLE = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage")
#: What fields that mark a step as the last one of a trajectory that was cut short get there.
_CUT = {"done": 1, "truncated": 1, "terminated": 0, "step_type": 2}
_LAST = frozenset(_CUT)


class Saved(NamedTuple):
    """A store in a checkpoint, and what is planned with."""

    reader: PartReader
    source: Source
    fields: tuple[PartField, ...] = ()
    """None, if it was never written."""
    held: dict[str, Any] | None = None
    """The state of the storage without rows; None: what is wanted of its arrays is read when it is needed."""

    @property
    def head(self) -> dict[str, Any]:
        """That state, in which arrays may be missing."""
        return self.reader.state if self.held is None else self.held


def open_saved(reader: PartReader, *, held: bool = False) -> Saved:
    """What there is to move in a part.

    Of each shard the table of its trajectories is held, and nothing that grows with its rows; unless ``held`` says so.

    Raises:
        CorruptCheckpoint: a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    state = read_rows_state(reader) if held else None
    geometry = reader.geometry
    if geometry is None:
        if reader.type not in _MOVABLE:
            raise IncompatibleCheckpoint(
                f"{reader.folder}: expected a storage of type {' or '.join(_MOVABLE)}, whose rows can be moved, got a "
                f"{reader.type!r:.100}. Load it with as many ranks as saved it, into storages of the same size."
            )
        return Saved(reader, Source(1, np.empty((0, 5), np.int64)), held=state)
    clock = reader.state.get("clock")
    if type(clock) is not int or clock < 1:
        raise corrupt(reader.folder, f"expected the clock of a store, got {clock!r:.100}")
    columns = math.prod(geometry.columns)
    runs = _checked_runs(reader, geometry.lane_length, columns)
    fields = reader.schema or ()
    marks_ends = not has_ends(fields) or any(field.role in _LAST for field in fields)
    return Saved(reader, Source(clock, runs, columns, marks_ends), fields, state)


def in_blocks(saved: Sequence[Saved], lane_length: int) -> list[Saved]:
    """The same for lanes of that length: where no field says how steps belong together, they are moved in blocks that follow each
    other, each as if it were a trajectory.

    Of 256 steps at most, but for shards that would be more than 65,536 of them; and short enough that so many fit a lane with
    little left over.

    Raises ``CorruptCheckpoint``: a block is damaged.
    """
    if has_ends(fields_of(saved)):
        return list(saved)
    fitting = lane_length // max(_IN_A_LANE, -(-lane_length // _STEPS))
    return [_cut(one, min(lane_length, max(fitting, -(-int(one.source.saved[1]) // _BLOCKS), 1))) for one in saved]


def in_rows(saved: Saved) -> Saved:
    """The same, of which each row is moved by itself, as it is: no field is rewritten.

    Raises ``CorruptCheckpoint``: a block is damaged.
    """
    return _cut(saved, 1)._replace(fields=tuple(msgspec.structs.replace(field, role="data") for field in saved.fields))


def _cut(saved: Saved, block: int) -> Saved:
    """The same in blocks of so many steps."""
    source = saved.source
    if not len(source.runs):
        return saved
    return saved._replace(source=source._replace(runs=_blocks(saved.reader, source.runs, source.columns, block)))


def read_runs(saved: Saved, key: tuple[str, ...]) -> Tensor:
    """A field of the first step of each trajectory, ``[K, *shape]``.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: there is no such field.
    """
    reader, geometry = saved.reader, saved.reader.geometry
    number = next((number for number, field in enumerate(saved.fields) if field.key == key), None)
    if number is None or geometry is None:
        raise IncompatibleCheckpoint(
            f"{reader.folder}: expected the field {key} to rank rows by, got {[field.key for field in saved.fields]}."
        )
    field = saved.fields[number]
    lane, first = saved.source.runs[:, 0], saved.source.runs[:, 1]
    rows = lane * geometry.lane_length + first % _lanes(reader)[lane, 1]
    column = torch.empty((int(rows.max(initial=-1)) + 1, *field.shape), dtype=dtype_of(field.dtype), device="cpu")
    every = _Extents(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(column)]))
    room = _room(field.row_bytes)
    for stretch in stretches(reader):
        if stretch.field == number:
            for low, raw in _windows(reader, stretch, every, field.row_bytes, room):
                _put(raw.reshape(-1, field.row_bytes), low, every, column)
    return column[torch.from_numpy(rows)]


def fields_of(saved: Sequence[Saved]) -> tuple[PartField, ...]:
    """The fields of all shards that were written."""
    return next((one.fields for one in saved if one.fields), ())


def has_ends(fields: Sequence[PartField]) -> bool:
    """Whether some field says where trajectories end."""
    return any(field.role in ENDS for field in fields)


def can_truncate(fields: Sequence[PartField]) -> bool:
    """Whether a step can be marked as the last one of a trajectory that was cut short."""
    return any(_CUT.get(field.role) for field in fields)


def _lanes(reader: PartReader) -> NDArray[np.int64]:
    """Position and live rows of each lane."""
    return np.frombuffer(reader.read_all(f"{layout.FOLDER}/lanes.bin"), "<i8").reshape(-1, 4)[:, :2]


def _checked_runs(reader: PartReader, lane_length: int, columns: int) -> NDArray[np.int64]:
    """The trajectories, each of rows that are there and no two of the same ones."""
    lanes, rows = _lanes(reader), reader.records["tickets"]
    if reader.segment_rows is not None:
        rows = max((it.first_row + it.rows for it in reader.segments()), default=0)
    position, live = lanes[:, 0], lanes[:, 1]
    if (position < 0).any() or (live < np.minimum(position, lane_length)).any() or (live > lane_length).any():
        raise corrupt(reader.folder / layout.FOLDER / "lanes.bin", "expected lanes of a store")
    path = reader.folder / layout.FOLDER / "trajectories.bin"
    runs = np.frombuffer(reader.read_all(f"{layout.FOLDER}/trajectories.bin"), "<i8").reshape(-1, 5)
    lane, first, end, time, flags = runs.T
    good = (lane >= 0) & (lane < len(lanes)) & (first < end) & (time >= 0) & (flags >= 0) & (flags < 16)
    at = np.where(good, lane, 0)
    good &= (first >= position[at] - live[at]) & (end < position[at] + columns)
    ring = np.maximum(live[at], 1)
    offset, last = first % ring, (end - columns) % ring
    good &= lane * lane_length + np.where(last < offset, ring - 1, last) < rows
    order = np.lexsort((first, first % columns, lane))
    track = np.stack([lane, first % columns])[:, order]
    good[order[1:]] &= (track[:, 1:] != track[:, :-1]).any(0) | (first[order[1:]] >= end[order[:-1]])
    if not good.all():
        raise corrupt(path, f"expected trajectories of the rows that are there, got {runs[np.argmin(good)].tolist()}")
    return runs


def _blocks(reader: PartReader, runs: NDArray[np.int64], columns: int, block: int) -> NDArray[np.int64]:
    """Runs in pieces of so many steps, counted from their newest ones, as if each were a trajectory."""
    geometry = reader.geometry
    assert geometry is not None  # it has runs
    live, numbers = _lanes(reader)[:, 1], read_rows_state(reader)["numbers"].numpy()
    steps = (runs[:, 2] - runs[:, 1]) // columns
    counts = -(-steps // block)
    run = np.repeat(np.arange(len(runs)), counts)
    from_newest = np.repeat(counts, counts) - 1 - within(counts)
    end = runs[run, 2] - from_newest * block * columns
    first = np.maximum(end - block * columns, runs[run, 1])
    last = runs[run, 0] * geometry.lane_length + (end - columns) % live[runs[run, 0]]
    return np.stack([runs[run, 0], first, end, numbers[last], np.full(len(run), HAS_FIRST | HAS_LAST)], 1)


class _Extents(NamedTuple):
    """Steps of one source that follow each other there and in the target. All int64 ``[K]``, by their first row there."""

    first: NDArray[np.int64]
    """Row of the source."""
    target: NDArray[np.int64]
    """Row of the target."""
    rows: NDArray[np.int64]
    """How many."""

    def near(self, begin: int, end: int) -> _Extents:
        """Those with rows in ``[begin, end)`` of the source."""
        low = np.searchsorted(self.first + self.rows, begin, "right")
        high = np.searchsorted(self.first, end, "left")
        return _Extents(*(column[low:high] for column in self))

    def windows(self, begin: int, end: int, most: int, gap: int) -> Iterator[tuple[int, int]]:
        """Rows of the source in ``[begin, end)`` among which there is something wanted: ``most`` at a time, without long gaps."""
        low, high = np.maximum(self.first, begin), np.minimum(self.first + self.rows, end)
        breaks = np.flatnonzero(low[1:] - high[:-1] >= gap) + 1
        for start, stop in zip(
            low[np.append(0, breaks)].tolist(), high[np.append(breaks - 1, -1)].tolist(), strict=True
        ):
            for at in range(start, stop, most):
                yield at, min(at + most, stop)


def _extents(plan: Plan, rank: int, which: int, saved: Saved, lane_length: int) -> _Extents:
    """What a rank gets of one source."""
    geometry = saved.reader.geometry
    assert geometry is not None  # it has runs
    at = np.flatnonzero((plan.rank == rank) & (plan.source == which))
    columns = saved.source.columns
    runs = saved.source.runs[plan.run[at]]
    begin = _kept_from(plan, at, saved.source)
    target, steps = plan.lane[at] * lane_length + plan.position[at], plan.steps[at]
    start = runs[:, 0] * geometry.lane_length
    # Positions go round the live rows: those that were written by number, ahead of the cursor, lie behind the newest one.
    ring = _lanes(saved.reader)[runs[:, 0], 1]
    if columns > 1:  # every step is an extent
        step = within(steps)
        rows = np.repeat(start, steps) + (np.repeat(begin, steps) + step * columns) % np.repeat(ring, steps)
        found = _Extents(rows, np.repeat(target, steps) + step, np.ones_like(rows))
    else:
        offset = begin % ring
        before = np.minimum(steps, ring - offset)  # up to the end of the ring
        wraps = steps > before
        found = _Extents(
            np.concatenate([start + offset, start[wraps]]),
            np.concatenate([target, (target + before)[wraps]]),
            np.concatenate([before, (steps - before)[wraps]]),
        )
    order = np.argsort(found.first, kind="stable")
    return _Extents(*(column[order] for column in found))


def _kept_from(plan: Plan, at: NDArray[np.int64], source: Source) -> NDArray[np.int64]:
    """Of some of the trajectories that are kept, all of one source: the position there of the first step that is."""
    first: NDArray[np.int64] = source.runs[plan.run[at], 1] + plan.skipped[at] * source.columns
    return first


def _pairs(extents: _Extents, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the source in ``[begin, end)`` that are wanted, and where they go."""
    first, target, rows = extents.near(begin, end)
    skipped = np.maximum(begin - first, 0)
    count = np.minimum(first + rows, end) - first - skipped
    step = within(count)
    return np.repeat(first + skipped, count) + step, np.repeat(target + skipped, count) + step


def placed_state(saved: Sequence[Saved], plan: Plan, rank: int, schema: Schema) -> dict[str, Any]:
    """The state without rows of the store that a rank gets.

    Tickets keep their ages; priorities are copied, bit for bit, and the largest one of all is everybody's; passes begin anew. What
    is read of the files is what this rank gets, in whole blocks.

    Raises:
        CorruptCheckpoint: a block is damaged, or a trajectory has rows that are void.
        IncompatibleCheckpoint: the shards differ in alpha, eps or the names of their indexes.
    """
    clock = max(one.source.clock for one in saved)
    length = schema.capacity // schema.lanes
    numbers = torch.zeros(schema.capacity, dtype=torch.int64, device="cpu")
    mine = plan.rank == rank
    written = [one for one in saved if one.reader.geometry is not None]
    priorities = _common_priorities(written, schema.capacity)
    room = _room()
    for which, one in enumerate(saved):
        if (mine & (plan.source == which)).any():
            extents = _extents(plan, rank, which, one, length)
            _place_numbers(one, extents, clock - one.source.clock, numbers, room)
            for name, common in priorities.items():
                _place_leaves(one, extents, name, common["leaves"], room)
    if int(numbers.count_nonzero()) != int(plan.steps[mine].sum()):
        raise corrupt(saved[0].reader.folder.parent, "expected trajectories of rows that are there, got void ones")
    heads = [one.head for one in written]
    lanes = torch.zeros((schema.lanes, 4), dtype=torch.int64, device="cpu")
    load = np.bincount(plan.lane[mine], plan.steps[mine] + plan.gap[mine], schema.lanes).astype(np.int64)
    lanes[:, 0] = lanes[:, 1] = torch.from_numpy(load)
    return {
        "schema": schemas.encode(schema).decode(),
        "lanes": lanes,
        "numbers": numbers,
        "clock": clock,
        "write_count": _share(sum(int(head["write_count"]) for head in heads), rank, plan.ranks),
        "priorities": priorities,
        "passes": {},
        "windows": dict(heads[0]["windows"]) if heads else {},
    }


def _place_numbers(saved: Saved, extents: _Extents, later: int, numbers: Tensor, room: Tensor) -> None:
    """Tickets of a source, ``later`` than they are there; 0 for void ones."""
    if saved.held is not None:
        held = saved.held["numbers"]
        _put(torch.where(held != 0, held + later, 0), 0, extents, numbers)
        return
    reader = saved.reader
    file = reader.table_file("tickets")
    at = 0
    pieces = [Stretch(file, 0, 0, 0, reader.records["tickets"])]
    if reader.segment_rows is not None:
        pieces = []
        for it in reader.segments():
            pieces.append(Stretch(file, 8 * at, 0, it.first_row, it.first_row + it.rows))
            at += it.rows
    for stretch in pieces:
        for low, raw in _windows(reader, stretch, extents, 8, room):
            words = raw.view(torch.int64)
            there = checked_numbers(words.numpy(), reader.folder / file, stretch.offset + 8 * (low - stretch.begin))
            np.add(there, later, out=there, where=there != 0)
            _put(words, low, extents, numbers)


def _place_leaves(saved: Saved, extents: _Extents, name: str, leaves: Tensor, room: Tensor) -> None:
    """Priorities of a source. Rows behind the last one that has any are not saved."""
    found = saved.head["priorities"][name]["leaves"]
    if saved.held is not None:
        _put(found, 0, extents, leaves)
        return
    reader = saved.reader
    array = reader.array(found["$array"])
    if array.dtype != "float64" or len(array.shape) != 1:
        raise corrupt(
            reader.folder, f"priorities {name!r}: expected a float64 one of [n], got {array.dtype} {array.shape}"
        )
    for low, raw in _windows(
        reader, Stretch(reader.array_file(found["$array"]), 0, 0, 0, array.shape[0]), extents, 8, room
    ):
        _put(raw.view(torch.float64), low, extents, leaves)


def _share(total: int, rank: int, ranks: int) -> int:
    return total // ranks + (rank < total % ranks)


def _common_priorities(saved: Sequence[Saved], rows: int) -> dict[str, dict[str, Any]]:
    if not saved:
        return {}
    every = [one.head["priorities"] for one in saved]
    for one, other in zip(saved, every, strict=True):
        if other.keys() != every[0].keys():
            raise IncompatibleCheckpoint(
                f"{one.reader.folder}: expected the priorities {sorted(every[0])}, as in {saved[0].reader.folder}, got {sorted(other)}."
            )
    common = {}
    for name, state in every[0].items():
        for one, other in zip(saved, every, strict=True):
            for entry in ("alpha", "eps", "max_priority_within_buffer"):
                if other[name][entry] != state[entry]:
                    raise IncompatibleCheckpoint(
                        f"{one.reader.folder}: priorities {name!r}: expected {entry}={state[entry]}, as in {saved[0].reader.folder}, "
                        f"got {other[name][entry]}."
                    )
        highest = max(other[name]["highest"] for other in every)
        leaves = torch.zeros(rows, dtype=torch.float64, device="cpu")
        common[name] = {**state, "highest": highest, "leaves": leaves}
    return common


def fill_placed(
    saved: Sequence[Saved], plan: Plan, rank: int, schema: Schema, env_offset: int = 0
) -> Callable[[Sequence[Tensor]], None]:
    """What reads the rows of a rank into the fields of its store, each file once and in pieces, several shards at once, and checks
    every block.

    Fields whose role says so are rewritten: ``env_id`` to ``env_offset`` plus the lane, ``traj_id`` to the number of the
    trajectory, ``position`` by how far it moved; and the last steps of those that the plan truncates.

    Raises:
        IncompatibleCheckpoint: lanes, trajectories or positions have numbers that the dtype of their field cannot hold.
    """
    fields = fields_of(saved)
    length = schema.capacity // schema.lanes
    mine = np.flatnonzero(plan.rank == rank)
    widest = max((field.row_bytes for field in fields), default=0)
    _check_range(fields, "env_id", env_offset + schema.lanes - 1, "lanes")
    _check_range(fields, "traj_id", len(mine) - 1, "trajectories")
    _check_range(fields, "position", int((plan.position + plan.steps)[mine].max(initial=0)) - 1, "rows in a lane")

    def placed(which: int, tensors: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
        reader, extents, room = saved[which].reader, _extents(plan, rank, which, saved[which], length), _room(widest)
        for stretch in stretches(reader):
            field, tensor = fields[stretch.field], tensors[stretch.field]
            for low, raw in _windows(reader, stretch, extents, field.row_bytes, room):
                yield partial(_put, raw.reshape(-1, field.row_bytes), low, extents, tensor)

    def fill(tensors: Sequence[Tensor]) -> None:
        parallel_read([placed(which, tensors) for which, one in enumerate(saved) if len(one.source.runs)], tensors)
        _rewrite(tensors, fields, plan, mine, saved, length, env_offset)

    return fill


def _room(row_bytes: int = 0) -> Tensor:
    """Memory for a window, with the rest of the blocks at its ends."""
    return torch.empty(max(row_bytes, _WINDOW) + 2 * BLOCK, dtype=torch.uint8, device="cpu")


def _windows(
    reader: PartReader, stretch: Stretch, extents: _Extents, size: int, room: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """What is wanted of a stretch, with little beside it: the number of the first row, and the bytes of it and those behind it.

    They are read in whole blocks, each of which is checked; the next ones come to the same memory.
    """
    wanted = extents.near(stretch.begin, stretch.end)
    if not size or not len(wanted.first):
        return
    for low, high in wanted.windows(stretch.begin, stretch.end, max(1, _WINDOW // size), max(1, BLOCK // size)):
        at = stretch.offset + (low - stretch.begin) * size
        skipped = at % BLOCK
        stop = min(-(-(at + (high - low) * size) // BLOCK) * BLOCK, reader.bytes_of(stretch.file))
        reader.read(stretch.file, at - skipped, room[: stop - at + skipped].numpy().data)
        yield low, room[skipped : skipped + (high - low) * size]


def _put(source: Tensor, begin: int, extents: _Extents, tensor: Tensor) -> None:
    """Rows of a source, ``begin`` and those behind it, to their places in a field."""
    end = begin + len(source)
    near = extents.near(begin, end)
    if tensor.is_cpu:
        first, target, rows = (np.ascontiguousarray(column) for column in near)
        addresses = (column.ctypes.data for column in (first, target, rows))
        size = source.nbytes // max(1, len(source))
        _native.place_runs(
            source.data_ptr(), begin, len(source), *addresses, len(first), tensor.data_ptr(), len(tensor), size
        )
        return
    at, to = (torch.from_numpy(column) for column in _pairs(near, begin, end))
    flat = tensor.reshape(len(tensor), -1).view(torch.uint8)
    flat.index_copy_(0, to.to(tensor.device), source.index_select(0, at - begin).to(tensor.device))


def _check_range(fields: Sequence[PartField], role: str, most: int, what: str) -> None:
    """Raise ``IncompatibleCheckpoint`` unless the field of that role can say every number up to ``most``."""
    for field in fields:
        if field.role != role:
            continue
        dtype = dtype_of(field.dtype)
        counts = dtype is not torch.bool and not dtype.is_floating_point  # what is shifted must count as ints do
        if dtype.is_complex or (role == "position" and not counts):
            raise IncompatibleCheckpoint(
                f"{field.key}: expected a dtype of integers, as its role is {role!r}, got {field.dtype}. Save it with such a one, "
                "or with another role."
            )
        if most > (limit := _largest(dtype)):
            raise IncompatibleCheckpoint(
                f"{field.key}: expected at most {limit + 1} {what}, as many as {field.dtype} can number, got {most + 1}. Use a "
                "larger dtype, or give the field another role."
            )


def _largest(dtype: torch.dtype) -> int:
    """Up to which number all integers are exact."""
    if dtype is torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _rewrite(
    tensors: Sequence[Tensor],
    fields: Sequence[PartField],
    plan: Plan,
    mine: NDArray[np.int64],
    saved: Sequence[Saved],
    length: int,
    env_offset: int,
) -> None:
    rewritten = [
        (field.role, tensor)
        for field, tensor in zip(fields, tensors, strict=True)
        if field.role in ("env_id", "traj_id", "position")
    ]
    steps, lane, position = plan.steps[mine], plan.lane[mine], plan.position[mine]
    shift = np.zeros(len(mine), np.int64)
    if any(role == "position" for role, _ in rewritten):
        for which, one in enumerate(saved):
            its = plan.source[mine] == which
            shift[its] = position[its] - _kept_from(plan, mine[its], one.source) // one.source.columns
    values = {"env_id": lane + env_offset, "traj_id": np.arange(len(mine)), "position": shift}
    piece = (np.cumsum(steps) - steps) // _REWRITTEN
    for some in np.split(np.arange(len(mine)), np.flatnonzero(np.diff(piece)) + 1) if rewritten else ():
        step = within(steps[some])
        rows = torch.from_numpy(np.repeat(lane[some] * length + position[some], steps[some]) + step)
        for role, tensor in rewritten:
            words = _words(tensor)
            at = rows.to(tensor.device)
            value = torch.from_numpy(np.repeat(values[role][some], steps[some])).reshape(-1, *[1] * (tensor.ndim - 1))
            if role == "position":
                value = words[at].to("cpu").view(tensor.dtype).to(torch.int64) + value
            words[at] = value.to(tensor.dtype).view(words.dtype).to(tensor.device)
    last = plan.truncated[mine]
    ends = (lane * length + position + steps - 1)[last]
    if len(ends):
        _truncate(fields, tensors, torch.from_numpy(ends))


def _words(tensor: Tensor) -> Tensor:
    """The same memory as what torch can index: not each of its dtypes is."""
    return tensor if tensor.is_complex() else tensor.view(_WORDS[tensor.itemsize])


def _truncate(fields: Sequence[PartField], tensors: Sequence[Tensor], rows: Tensor) -> None:
    """Mark steps as the last ones of trajectories that were cut short."""
    said = boundary_fields(fields, [field.role for field in fields])
    lasts = {role: said["last" if role == "step_type" else role] for role in _CUT}
    for field, tensor in zip(fields, tensors, strict=True):
        if field in lasts.get(field.role, ()):
            value = torch.tensor(_CUT[field.role], device="cpu").to(tensor.dtype)
            words = _words(tensor)
            words[rows.to(tensor.device)] = value.view(words.dtype).to(tensor.device)
