"""Saved stores, as they are planned with and read from when their rows go elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from engram._support import native
from engram.errors import IncompatibleCheckpoint
from engram.format import layout
from engram.format.problems import corrupt
from engram.format.sums import BLOCK
from engram.format.tables import HAS_FIRST, HAS_LAST
from engram.persist import parts
from engram.persist.roles import ENDS
from engram.persist.rows import read_rows_state, stretches
from engram.reshard.plan import Source, within
from engram.store.memory import DTYPE_OF

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.checkpoints import Checkpoint
    from engram.format.parts import PartField, PartReader
    from engram.persist.rows import Stretch


#: Of rows without trajectories: steps that stay together, how many such blocks a lane has at least, and a shard at most.
_STEPS = 256
_IN_A_LANE = 16
_BLOCKS = 1 << 16
MOVABLE = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage")
#: What fields that mark a step as the last one of a trajectory that was cut short get there.
TRUNCATED = {"done": 1, "truncated": 1, "terminated": 0, "step_type": 2}
_LAST = frozenset(TRUNCATED)


#: Bytes that are read at a time: as many as caches hold.
_WINDOW = 2 << 20


class Extents(NamedTuple):
    """Steps of one source that follow each other there and in the target, by their first row there.

    All int64 ``[K]`` and contiguous.
    """

    first: NDArray[np.int64]
    """Row of the source."""
    target: NDArray[np.int64]
    """Row of the target."""
    rows: NDArray[np.int64]
    """How many."""

    def near(self, begin: int, end: int) -> Extents:
        """Those with rows in ``[begin, end)`` of the source."""
        low = (self.first + self.rows).searchsorted(begin, "right")
        high = self.first.searchsorted(end)
        return Extents(self.first[low:high], self.target[low:high], self.rows[low:high])

    def windows(self, begin: int, end: int, most: int, gap: int) -> Iterator[tuple[int, int]]:
        """Rows of the source in ``[begin, end)`` among which there is something wanted: ``most`` at a time, without long gaps."""
        low, high = np.maximum(self.first, begin), np.minimum(self.first + self.rows, end)
        breaks = (low[1:] - high[:-1] >= gap).nonzero()[0]
        starts, stops = [low[0], *low[breaks + 1]], [*high[breaks], high[-1]]
        for start, stop in zip(map(int, starts), map(int, stops), strict=True):
            for at in range(start, stop, most):
                yield at, min(at + most, stop)


def _pairs(extents: Extents, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the source in ``[begin, end)`` that are wanted, and where they go."""
    first, target, rows = extents.near(begin, end)
    skipped = np.maximum(begin - first, 0)
    count = np.minimum(first + rows, end) - first - skipped
    step = within(count)
    return (first + skipped).repeat(count) + step, (target + skipped).repeat(count) + step


def zeroed_window(row_bytes: int = 0) -> Tensor:
    """Memory for a window, with the rest of the blocks at its ends."""
    return torch.empty(max(row_bytes, _WINDOW) + 2 * BLOCK, dtype=torch.uint8, device="cpu")


def windows(
    reader: PartReader, stretch: Stretch, extents: Extents, size: int, memory: Tensor
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
        stop = min(-(-(at + (high - low) * size) // BLOCK) * BLOCK, reader.listing.files[stretch.file].bytes)
        reader.read(stretch.file, at - skipped, memory[: stop - at + skipped].numpy().data)
        yield low, memory[skipped : skipped + (high - low) * size]


def put(source: Tensor, begin: int, extents: Extents, tensor: Tensor) -> None:
    """Rows of a source, ``begin`` and those behind it, to their places in a field."""
    end = begin + len(source)
    near = extents.near(begin, end)
    if tensor.is_cpu:
        size = source.nbytes // max(1, len(source))
        native.place_runs(
            source.data_ptr(),
            begin,
            len(source),
            torch.from_numpy(near.first),
            torch.from_numpy(near.target),
            torch.from_numpy(near.rows),
            tensor.data_ptr(),
            len(tensor),
            size,
            size if tensor.is_contiguous() else tensor.stride(0) * tensor.element_size(),
        )
        return
    at, to = (torch.from_numpy(column) for column in _pairs(near, begin, end))
    flat = tensor.reshape(len(tensor), -1).view(torch.uint8)
    flat.index_copy_(0, to.to(tensor.device), source.index_select(0, at - begin).to(tensor.device))


def put_by_run(source: Tensor, begin: int, extents: Extents, write: Callable[[int, Tensor], None]) -> None:
    """As :func:`put`, with a call that writes rows from one on: each run of rows that stay together by itself."""
    end = begin + len(source)
    for first, target, rows in zip(*(column.tolist() for column in extents.near(begin, end)), strict=True):
        skipped = max(begin - first, 0)
        write(target + skipped, source[first + skipped - begin : min(first + rows, end) - begin])


class SavedShard(NamedTuple):
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


def open_shard(reader: PartReader, *, held: bool = False) -> SavedShard:
    """What there is to move in a part.

    Of each shard the table of its trajectories is held, and nothing that grows with its rows; unless ``held`` says so.

    Raises:
        CorruptCheckpoint: a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    state = read_rows_state(reader) if held else None
    geometry = reader.geometry
    if geometry is None:
        if reader.type not in MOVABLE:
            raise IncompatibleCheckpoint(
                f"{reader.folder}: expected a storage of type {' or '.join(MOVABLE)}, whose rows can be moved, got a "
                f"{reader.type!r:.100}. Load it with as many ranks as saved it, into storages of the same size."
            )
        return SavedShard(reader, Source(1, np.empty((0, 5), np.int64)), held=state)
    clock = reader.state.get("clock")
    if type(clock) is not int or clock < 1:
        raise corrupt(reader.folder, f"expected the clock of a store, got {clock!r:.100}")
    columns = math.prod(geometry.columns)
    runs = _checked_runs(reader, geometry.lane_length, columns)
    fields = reader.schema or ()
    marks_ends = not has_ends(fields) or any(field.role in _LAST for field in fields)
    return SavedShard(reader, Source(clock, runs, columns, marks_ends), fields, state)


def in_blocks(saved: Sequence[SavedShard], lane_length: int) -> list[SavedShard]:
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


def in_rows(saved: SavedShard) -> SavedShard:
    """The same, of which each row is moved by itself, as it is: no field is rewritten.

    Raises ``CorruptCheckpoint``: a block is damaged.
    """
    return _cut(saved, 1)._replace(fields=tuple(msgspec.structs.replace(field, role="data") for field in saved.fields))


def _cut(saved: SavedShard, block: int) -> SavedShard:
    """The same in blocks of so many steps."""
    source = saved.source
    if not len(source.runs):
        return saved
    return saved._replace(source=source._replace(runs=_blocks(saved.reader, source.runs, source.columns, block)))


def read_first_steps(saved: SavedShard, key: tuple[str, ...]) -> Tensor:
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
    rows = lane * geometry.lane_length + first % lanes_of(reader)[lane, 1]
    order = rows.argsort(kind="stable")
    ones = Extents(np.ascontiguousarray(rows[order]), order, np.ones_like(order))
    column = torch.empty((len(rows), *field.shape), dtype=DTYPE_OF[field.dtype], device="cpu")
    memory = zeroed_window(field.row_bytes)
    for stretch in stretches(reader):
        if stretch.field == number:
            for low, raw in windows(reader, stretch, ones, field.row_bytes, memory):
                put(raw.reshape(-1, field.row_bytes), low, ones, column)
    return column


def fields_of(saved: Sequence[SavedShard]) -> tuple[PartField, ...]:
    """The fields of all shards that were written."""
    return next((one.fields for one in saved if one.fields), ())


def has_ends(fields: Sequence[PartField]) -> bool:
    """Whether some field says where trajectories end."""
    return any(field.role in ENDS for field in fields)


def can_truncate(fields: Sequence[PartField]) -> bool:
    """Whether a step can be marked as the last one of a trajectory that was cut short."""
    return any(TRUNCATED.get(field.role) for field in fields)


def lanes_of(reader: PartReader) -> NDArray[np.int64]:
    """Position and live rows of each lane."""
    return np.frombuffer(reader.read_all(f"{layout.FOLDER}/lanes.bin"), "<i8").reshape(-1, 4)[:, :2]


def _checked_runs(reader: PartReader, lane_length: int, columns: int) -> NDArray[np.int64]:
    """The trajectories, each of rows that are there and no two of the same ones."""
    lanes, rows = lanes_of(reader), reader.records["tickets"]
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
    live, numbers = lanes_of(reader)[:, 1], read_rows_state(reader)["numbers"].numpy()
    steps = (runs[:, 2] - runs[:, 1]) // columns
    counts = -(-steps // block)
    run = np.arange(len(runs)).repeat(counts)
    from_newest = counts.repeat(counts) - 1 - within(counts)
    end = runs[run, 2] - from_newest * block * columns
    first = np.maximum(end - block * columns, runs[run, 1])
    last = runs[run, 0] * geometry.lane_length + (end - columns) % live[runs[run, 0]]
    return np.stack([runs[run, 0], first, end, numbers[last], np.full(len(run), HAS_FIRST | HAS_LAST)], 1)


def open_shards(checkpoint: Checkpoint, stack: contextlib.ExitStack) -> list[SavedShard]:
    """What all ranks saved. It is closed with the stack.

    Raises:
        CorruptCheckpoint: a shard is missing, or a table is damaged.
        IncompatibleCheckpoint: rows that are in no trajectory, as those of lists.
    """
    return [
        open_shard(stack.enter_context(parts.open_storage(checkpoint, rank)))
        for rank in range(checkpoint.manifest.world)
    ]


def saved_fields(checkpoint: Checkpoint) -> tuple[PartField, ...]:
    """The fields of the first rank that was ever written; none: none was."""
    for rank in range(checkpoint.manifest.world):
        with parts.open_storage(checkpoint, rank) as reader:
            if reader.schema is not None:
                return reader.schema
    return ()
