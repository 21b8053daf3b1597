"""Rows of saved stores on their way to places that a plan gives them: in another store, of another size, on other ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from engram.checkpoint.plan import Source
from engram.checkpoint.rows import dtype_of, read_rows_state
from engram.errors import IncompatibleCheckpoint
from engram.format import layout
from engram.format import schema as schemas
from engram.format.parts import segment_layout
from engram.format.problems import corrupt
from engram.format.tables import HAS_FIRST, HAS_LAST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.checkpoint.plan import Plan
    from engram.format.parts import PartField, PartReader
    from engram.format.schema import Schema

__all__ = ["Saved", "fill_placed", "has_ends", "open_saved", "placed_state"]

#: Bytes of a flat file that are read at a time.
_PIECE = 16 << 20
#: Pieces that rows without trajectories are moved in, at most.
_BLOCKS = 1 << 16
_MOVABLE = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage")
_ENDS = frozenset({"done", "terminated", "truncated", "step_type", "traj_id"})


class Saved(NamedTuple):
    """A store in a checkpoint, and what is planned with."""

    reader: PartReader
    source: Source
    held: dict[str, Any] | None = None
    """The state of the storage without rows; None: it is read when it is needed."""

    @property
    def head(self) -> dict[str, Any]:
        """That state, in which arrays may be missing."""
        return self.reader.state if self.held is None else self.held

    def state(self) -> dict[str, Any]:
        """That state. Raises ``CorruptCheckpoint``: a block is damaged."""
        return read_rows_state(self.reader) if self.held is None else self.held

    @property
    def fields(self) -> tuple[PartField, ...]:
        return self.reader.schema or ()


def open_saved(reader: PartReader, *, held: bool = False) -> Saved:
    """What there is to move in a part. Where no field says how steps belong together, they are moved in blocks.

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
        return Saved(reader, Source(1, np.empty((0, 5), np.int64)), state)
    clock = reader.state.get("clock")
    if type(clock) is not int or clock < 1:
        raise corrupt(reader.folder, f"expected the clock of a store, got {clock!r:.100}")
    columns = math.prod(geometry.columns)
    runs = _checked_runs(reader, geometry.lane_length, columns)
    if not has_ends(reader.schema or ()):
        runs = _blocks(
            runs, _lanes(reader)[:, 1], read_rows_state(reader)["numbers"].numpy(), geometry.lane_length, columns
        )
    return Saved(reader, Source(clock, runs, columns), state)


def has_ends(fields: Sequence[PartField]) -> bool:
    """Whether some field says where trajectories end."""
    return any(field.role in _ENDS for field in fields)


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


def _blocks(
    runs: NDArray[np.int64], live: NDArray[np.int64], numbers: NDArray[np.int64], lane_length: int, columns: int
) -> NDArray[np.int64]:
    """Runs in pieces of one length, counted from their newest steps, as if each were a trajectory."""
    steps = (runs[:, 2] - runs[:, 1]) // columns
    block = max(1, -(-int(steps.sum()) // _BLOCKS))
    counts = -(-steps // block)
    run = np.repeat(np.arange(len(runs)), counts)
    from_newest = np.repeat(counts, counts) - 1 - _within(counts)
    end = runs[run, 2] - from_newest * block * columns
    first = np.maximum(end - block * columns, runs[run, 1])
    last = runs[run, 0] * lane_length + (end - columns) % live[runs[run, 0]]
    return np.stack([runs[run, 0], first, end, numbers[last], np.full(len(run), HAS_FIRST | HAS_LAST)], 1)


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 … count - 1, for each count."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


class _Extents(NamedTuple):
    """Steps of one source that follow each other there and in the target. All int64 ``[K]``, by their first row there."""

    first: NDArray[np.int64]
    """Row of the source."""
    target: NDArray[np.int64]
    """Row of the target."""
    rows: NDArray[np.int64]
    """How many."""


def _extents(plan: Plan, rank: int, which: int, saved: Saved, lane_length: int) -> _Extents:
    """What a rank gets of one source."""
    geometry = saved.reader.geometry
    assert geometry is not None  # it has runs
    at = np.flatnonzero((plan.rank == rank) & (plan.source == which))
    runs = saved.source.runs[plan.run[at]]
    target, steps = plan.lane[at] * lane_length + plan.position[at], plan.steps[at]
    start = runs[:, 0] * geometry.lane_length
    # Positions go round the live rows: those that were written by number, ahead of the cursor, lie behind the newest one.
    ring = _lanes(saved.reader)[runs[:, 0], 1]
    columns = saved.source.columns
    if columns > 1:  # every step is an extent
        step = _within(steps)
        rows = np.repeat(start, steps) + (np.repeat(runs[:, 1], steps) + step * columns) % np.repeat(ring, steps)
        found = _Extents(rows, np.repeat(target, steps) + step, np.ones_like(rows))
    else:
        offset = runs[:, 1] % ring
        before = np.minimum(steps, ring - offset)  # up to the end of the ring
        wraps = steps > before
        found = _Extents(
            np.concatenate([start + offset, start[wraps]]),
            np.concatenate([target, (target + before)[wraps]]),
            np.concatenate([before, (steps - before)[wraps]]),
        )
    order = np.argsort(found.first, kind="stable")
    return _Extents(*(column[order] for column in found))


def _pairs(extents: _Extents, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the source in ``[begin, end)`` that are wanted, and where they go."""
    low = np.searchsorted(extents.first + extents.rows, begin, "right")
    high = np.searchsorted(extents.first, end, "left")
    first, target, rows = (column[low:high] for column in extents)
    skipped = np.maximum(begin - first, 0)
    count = np.minimum(first + rows, end) - first - skipped
    step = _within(count)
    return np.repeat(first + skipped, count) + step, np.repeat(target + skipped, count) + step


def placed_state(saved: Sequence[Saved], plan: Plan, rank: int, schema: Schema) -> dict[str, Any]:
    """The state without rows of the store that a rank gets.

    Tickets keep their ages; priorities are copied, bit for bit, and the largest one of all is everybody's; passes begin anew.

    Raises:
        IncompatibleCheckpoint: the shards differ in alpha, eps or the names of their indexes.
    """
    clock = max(one.source.clock for one in saved)
    length = schema.capacity // schema.lanes
    numbers = np.zeros(schema.capacity, np.int64)
    mine = plan.rank == rank
    written = [one for one in saved if one.reader.geometry is not None]
    heads = [one.head for one in written]  # arrays are read shard by shard
    priorities = _common_priorities(written, schema.capacity)
    for which, one in enumerate(saved):
        if not (mine & (plan.source == which)).any():
            continue
        state = one.state()
        extents = _extents(plan, rank, which, one, length)
        rows, target = _pairs(extents, 0, np.iinfo(np.int64).max)
        numbers[target] = state["numbers"].numpy()[rows] + (clock - one.source.clock)
        for name, common in priorities.items():
            leaves = state["priorities"][name]["leaves"]
            there = rows < len(leaves)
            common["leaves"][torch.from_numpy(target[there])] = leaves[torch.from_numpy(rows[there])]
    lanes = torch.zeros((schema.lanes, 4), dtype=torch.int64, device="cpu")
    load = np.bincount(plan.lane[mine], plan.steps[mine] + plan.gap[mine], schema.lanes).astype(np.int64)
    lanes[:, 0] = lanes[:, 1] = torch.from_numpy(load)
    return {
        "schema": schemas.encode(schema).decode(),
        "lanes": lanes,
        "numbers": torch.from_numpy(numbers),
        "clock": clock,
        "write_count": _share(sum(int(head["write_count"]) for head in heads), rank, plan.ranks),
        "priorities": priorities,
        "passes": {},
        "windows": dict(heads[0]["windows"]) if heads else {},
    }


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
    """What reads the rows of a rank into the fields of its store, each file once and in pieces, and checks every block.

    Fields whose role says so are rewritten: ``env_id`` to ``env_offset`` plus the lane, ``traj_id`` to the number of the
    trajectory, ``position`` by how far it moved; and the last steps of those that the plan truncates.

    Raises:
        IncompatibleCheckpoint: lanes or trajectories have numbers that the dtype of their field cannot hold.
    """
    fields = saved[0].fields
    length = schema.capacity // schema.lanes
    mine = np.flatnonzero(plan.rank == rank)
    _check_range(fields, "env_id", env_offset + schema.lanes - 1, "lanes")
    _check_range(fields, "traj_id", len(mine) - 1, "trajectories")

    def fill(tensors: Sequence[Tensor]) -> None:
        for which, one in enumerate(saved):
            if len(one.source.runs):
                extents = _extents(plan, rank, which, one, length)
                for rows, target, columns in _read(one, extents):
                    at, to = torch.from_numpy(rows), torch.from_numpy(target)
                    together = len(rows) == rows[-1] - rows[0] + 1 and bool((np.diff(rows) == 1).all())
                    for tensor, column in zip(tensors, columns, strict=True):
                        wide = _words(column)
                        taken = wide[rows[0] : rows[-1] + 1] if together else wide.index_select(0, at)
                        _words(tensor).index_copy_(0, to.to(tensor.device), taken.to(tensor.device))
        _rewrite(tensors, fields, plan, mine, saved, length, env_offset)

    return fill


def _words(rows: Tensor) -> Tensor:
    """Rows in the largest units that they consist of: torch moves unit by unit, and ten times as fast in words as in bytes."""
    size = rows[:1].numel() * rows.element_size()
    unit = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % dtype.itemsize == 0)
    flat = rows.reshape(len(rows), -1) if size else rows.new_empty((len(rows), 0))
    return flat.view(torch.uint8).view(unit) if size else flat.to(torch.uint8)


def _read(saved: Saved, extents: _Extents) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], list[Tensor]]]:
    """Pieces of a source in which something is wanted: places in the piece, rows of the target, and the piece's fields."""
    reader, fields = saved.reader, saved.fields
    for begin, end, name, offsets in _pieces(reader, fields):
        rows, target = _pairs(extents, begin, end)
        if not len(rows):
            continue
        low, high = (begin, end) if name is not None else (int(rows.min()), int(rows.max()) + 1)
        columns = []
        for field, offset in zip(fields, offsets, strict=True):
            column = torch.empty((high - low, *field.shape), dtype=dtype_of(field.dtype), device="cpu")
            if column.numel():
                file = reader.field_file(field.id) if name is None else name
                at = offset + (low - begin) * field.row_bytes
                reader.read(file, at, column.reshape(-1).view(torch.uint8).numpy().data)
            columns.append(column)
        yield rows - low, target, columns


def _pieces(reader: PartReader, fields: Sequence[PartField]) -> Iterator[tuple[int, int, str | None, list[int]]]:
    """Rows ``[begin, end)`` that lie together, in which file (None: each field in its own), and where each field begins there."""
    if reader.segment_rows is not None:
        for it in reader.segments():
            yield it.first_row, it.first_row + it.rows, reader.segment_file(it), segment_layout(fields, it.rows)[0]
        return
    step = max(1, _PIECE // max(1, sum(field.row_bytes for field in fields)))
    for begin in range(0, reader.records["tickets"], step):
        yield begin, min(begin + step, reader.records["tickets"]), None, [begin * field.row_bytes for field in fields]


def _check_range(fields: Sequence[PartField], role: str, most: int, what: str) -> None:
    for field in fields:
        dtype = dtype_of(field.dtype)
        if field.role == role and not dtype.is_floating_point and not dtype.is_complex:
            limit = 1 if dtype is torch.bool else torch.iinfo(dtype).max
            if most > limit:
                raise IncompatibleCheckpoint(
                    f"{field.key}: expected at most {limit + 1} {what}, as many as {field.dtype} can number, got {most + 1}. Use a "
                    "larger dtype, or give the field another role."
                )


def _rewrite(
    tensors: Sequence[Tensor],
    fields: Sequence[PartField],
    plan: Plan,
    mine: NDArray[np.int64],
    saved: Sequence[Saved],
    length: int,
    env_offset: int,
) -> None:
    steps = plan.steps[mine]
    step = _within(steps)
    rows = torch.from_numpy(np.repeat(plan.lane[mine] * length + plan.position[mine], steps) + step)
    by_role = {field.role: tensor for field, tensor in zip(fields, tensors, strict=True)}
    moved = None
    if "position" in by_role:
        first = np.array(
            [
                saved[s].source.runs[run, 1] // saved[s].source.columns
                for s, run in zip(plan.source[mine], plan.run[mine], strict=True)
            ],
            np.int64,
        )
        moved = np.repeat(plan.position[mine] - first, steps)
    values = {
        "env_id": np.repeat(plan.lane[mine] + env_offset, steps),
        "traj_id": np.repeat(np.arange(len(mine)), steps),
        "position": moved,
    }
    for role, value in values.items():
        if role in by_role and value is not None and len(rows):
            tensor = by_role[role]
            at, shape = rows.to(tensor.device), (len(rows), *[1] * (tensor.ndim - 1))
            new = torch.from_numpy(value).reshape(shape).to(tensor.device)
            tensor[at] = ((tensor[at] + new) if role == "position" else new.expand(len(rows), *tensor.shape[1:])).to(
                tensor.dtype
            )
    last = plan.truncated[mine]
    ends = (plan.lane[mine] * length + plan.position[mine] + steps - 1)[last]
    if len(ends):
        _truncate(by_role, torch.from_numpy(ends))


def _truncate(by_role: dict[Any, Tensor], rows: Tensor) -> None:
    """Mark steps as the last ones of trajectories that were cut short."""
    for role, value in (("done", 1), ("truncated", 1), ("terminated", 0), ("step_type", 2)):
        if role in by_role:
            tensor = by_role[role]
            tensor[rows.to(tensor.device)] = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
