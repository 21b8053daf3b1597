"""The rows of a store as files, and back: flat, a file per field; or in segments, of which those that did not change are linked."""

from __future__ import annotations

import contextlib
import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from engram.errors import CorruptStore
from engram.format import disk, layout
from engram.format import schema as schemas
from engram.format.checkpoints import Count, Cut, ShardRows, Totals
from engram.format.description import field_name, segment_name
from engram.format.files import Descriptor
from engram.format.parts import Geometry, PartField, PartWriter, schema_sum, segment_layout
from engram.format.problems import corrupt
from engram.format.tables import OPEN
from engram.format.workers import work_off
from engram.persist.components import described_state, read_state
from engram.persist.roles import boundary_fields, roles_of
from engram.persist.trajectory_table import Marks, count_kinds, find_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartInfo, PartReader, SegmentRows
    from engram.format.schema import Schema
    from engram.persist.roles import Roles
    from engram.store import Store
    from engram.types import RowsTarget


_HERE = Path()
#: What a ticket says of a row that is whole, and of one of which nothing was saved.
_COMMITTED, _VOID = 2, 3
#: Bytes that are copied from an accelerator, or to it, at a time; and that a thread reads into memory of the processor: more, as
#: blocks at both ends are checked beside it.
_PIECE, _LONG_PIECE = 16 << 20, 128 << 20
#: Bytes that a file system shares between files, or a multiple of them.
_BLOCK = 4096
#: Files that are written at the same time.
_OPEN_FILES = 64
#: Rows whose marks are looked at together.
_MARKED = 1 << 20
#: Tickets that are looked at together.
_LOOK = 1 << 18
_STEP_TYPES = {"first": 0, "last": 2}
#: What ids are compared as, bit for bit, by the bytes of a number.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
#: Entries of a state that are tables of their own.
TABLES = ("lanes", "numbers", "writes")


#: Threads, the caller's included. Disks give more to two than to one; beyond that it is the processors that training needs.
READERS = 2


def parallel_read(shares: Sequence[Iterable[Callable[[], object]]], into: Sequence[Tensor]) -> None:
    """Call all that the shares consist of, in several threads, as :func:`work_off` does.

    Shares must not touch the same reader or the same rows at once. Tensors on a device are filled by this thread alone, as what is
    launched there belongs to its stream.
    """
    work_off(shares, READERS if all(tensor.is_cpu for tensor in into) else 1)


class SavedRows(NamedTuple):
    """A storage that was written, and what a shard says of it."""

    info: PartInfo
    shard: ShardRows


def described(schema: Schema, roles: Sequence[Any]) -> tuple[Geometry, list[PartField]]:
    """A store as a part describes it."""
    geometry = Geometry(schema.capacity, schema.lanes, schema.capacity // schema.lanes, schema.columns)
    fields = [
        PartField(number, field.key, field.dtype, field.shape, role)
        for number, (field, role) in enumerate(zip(schema.fields, roles, strict=False))
    ]
    return geometry, fields


# ---- writing ---------------------------------------------------------------------------------------------------------


class Moment(Protocol):
    """What is saved of a store: its rows as they were at one moment. A :class:`~engram.persist.snapshot.RowsSnapshot`."""

    @property
    def kind(self) -> str: ...
    @property
    def store(self) -> Store: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def base(self) -> int: ...
    @property
    def live(self) -> int: ...
    @property
    def copies(self) -> Sequence[Tensor] | None: ...
    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def numbers_now(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...


class RowsWriter:
    """A part with the rows of a snapshot, while it is written.

    Args:
        folder: where; it must not exist.
        snapshot: what is written.
        roles: what fields mean, by key, where they are not called as usual.
        progress: called with how many bytes were written.
    """

    def __init__(
        self, folder: Path, snapshot: Moment, roles: Roles | None, progress: Callable[[int], None] | None = None
    ) -> None:
        schema = snapshot.store.schema
        self.part = PartWriter(folder, "storage", snapshot.kind, behind=snapshot.store.larger, progress=progress)
        self.boundaries = Boundaries(schema, own := roles_of(schema.fields, roles))
        self.geometry, self.fields = described(schema, own)
        self._snapshot = snapshot

    def finish(
        self,
        numbers: NDArray[np.int64],
        stored: NDArray[np.int64],
        marks: Callable[[NDArray[np.int64]], Marks],
        writes: NDArray[np.int64],
        *,
        segment_rows: int | None = None,
        segments: Sequence[SegmentRows] = (),
    ) -> SavedRows:
        """Write lanes, tickets, trajectories and the state.

        Args:
            numbers: of all rows as they are saved, 0 for those that hold nothing.
            stored: of the rows that the files hold, in their order.
            marks: what rows say of trajectories.
            writes: of all rows the numbers of their writes.
            segment_rows: rows of a whole segment, if files are segments.
            segments: what they hold.
        """
        snapshot = self._snapshot
        state = snapshot.state
        totals = write_tables(self.part, snapshot.store, state["lanes"].numpy(), numbers, stored, marks)
        rest = {name: value for name, value in state.items() if name not in TABLES}
        rest |= named_writes(numbers, np.where(numbers != 0, writes[: len(numbers)], 0))
        lost = snapshot.live - int(np.count_nonzero(stored))
        info = self.part.finish(
            described_state(self.part, rest, "storage"),
            geometry=self.geometry,
            schema=self.fields,
            segment_rows=segment_rows,
            segments=segments,
        )
        cut = Cut(state["clock"], exact=not lost, lost_rows=lost)
        return SavedRows(info, ShardRows(cut, totals, schema_sum(self.fields)))


def save_flat(folder: Path, snapshot: Moment, progress: Callable[[int], None] | None = None) -> SavedRows:
    """Write a store into a new folder, a file per field, which ``TensorDict.load_memmap`` reads. Others may be writing.

    ``progress`` is called with how many bytes were written.

    Raises:
        OSError: no space, or an I/O error.
    """
    known, writes = snapshot.numbers()
    writer = RowsWriter(folder, snapshot, None, progress)
    store, copies = snapshot.store, snapshot.copies
    in_use = np.zeros(store.rows_in_use(snapshot.state["lanes"]), np.int64)
    in_use[: len(known)] = known
    boundaries = writer.boundaries
    marks = boundaries.marks_now(store, in_use) if copies is None else boundaries.marks_of(copies)
    numbers = in_use[: int(in_use.nonzero()[0].max(initial=-1)) + 1]  # the last ones may be void
    _write_flat(writer.part, store, numbers, copies)
    if copies is None:
        # The files hold bytes of no row where others wrote meanwhile: such a row's ticket is void.
        numbers[snapshot.numbers_now()[0][: len(numbers)] != numbers] = 0
    in_use[in_use != 0] -= snapshot.base
    return writer.finish(in_use, numbers, marks, np.pad(writes, (0, len(in_use) - len(writes))))


def _write_flat(part: PartWriter, store: Store, numbers: NDArray[np.int64], copied: Sequence[Tensor] | None) -> None:
    rows = len(numbers)
    there = np.concatenate([[False], numbers != 0, [False]])
    borders = (there[1:] != there[:-1]).nonzero()[0].tolist()
    stretches = list(zip(borders[::2], borders[1::2], strict=True))
    together = None if copied or store.directory is None or not store.has_files else layout.group_of(store.schema)
    if together:
        _write_together(part, store, rows, stretches, together)
    for number, (field, tensor) in enumerate(zip(store.schema.fields, copied or store.tensors, strict=True)):
        if together and number in together.offsets:
            continue
        size = field.row_bytes
        name = layout.field_path(_HERE, field.key).as_posix()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(part.file(name, rows * size, sparse=True))
            source = None if copied else stack.enter_context(_its_file(store, field.key, size))
            at = 0
            for begin, end in stretches:
                file.skip((begin - at) * size)
                if source is not None:
                    for first, n in _steps(begin, end, size if store.larger else 0):
                        with store.traceless([number], first, n):
                            file.copy_from(source, first * size, n * size)
                elif copied and tensor.is_cpu:
                    file.write(bytes_of(tensor[begin:end]))
                else:
                    for piece in _pieces(tensor, begin, end, size):
                        file.write(piece)
                at = end
            file.skip((rows - at) * size)
    flat = msgspec.structs.replace(store.schema, capacity=rows, grouped=0)
    for path, raw in layout.meta_files(_HERE, flat).items():
        with part.file(path.as_posix(), len(raw)) as file:
            file.write(raw)


def _write_together(
    part: PartWriter, store: Store, rows: int, stretches: Sequence[tuple[int, int]], group: layout.Group
) -> None:
    """Write the files of fields that lie in one file of a directory store, which is read once for every 64 of them."""
    assert store.directory is not None  # as the caller has looked
    path, fields, stride = store.directory / layout.FOLDER / layout.GROUPED, store.schema.fields, group.stride
    memory = np.empty(max(_PIECE // stride, 1) * stride, np.uint8)
    for i in range(0, len(group.offsets), _OPEN_FILES):
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW))
            out = []
            for number, offset in list(group.offsets.items())[i : i + _OPEN_FILES]:
                size, name = fields[number].row_bytes, layout.field_path(_HERE, fields[number].key).as_posix()
                out.append((stack.enter_context(part.file(name, rows * size, sparse=True)), offset, size))
            at = 0
            for begin, end in [*stretches, (rows, rows)]:
                for file, _, size in out:
                    file.skip((begin - at) * size)
                for first, n in _steps(begin, end, stride):
                    piece = memory[: n * stride]
                    with store.traceless([min(group.offsets)], first, n):
                        if disk.read(fd, piece.data, first * stride) < len(piece):
                            raise CorruptStore(f"{path}: expected {store.capacity * stride} bytes, it ends earlier.")
                    for file, offset, size in out:
                        column = piece.reshape(n, stride)[:, offset : offset + size]
                        file.write(np.ascontiguousarray(column).data.cast("B"))
                at = end


def _steps(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Rows in pieces, of whole blocks where these are short: a file system shares no others. 0 bytes each: all at once."""
    step, blocks = max(1, _PIECE // size) if size else end - begin, _BLOCK // math.gcd(_BLOCK, size)
    step = step // blocks * blocks or step
    for first in range(begin, end, step):
        yield first, min(step, end - first)


def bytes_of(rows: Tensor) -> memoryview:
    """The bytes of contiguous rows in RAM. A view."""
    return rows.reshape(-1).view(torch.uint8).numpy().data


def _pieces(tensor: Tensor, begin: int, end: int, size: int) -> Iterator[memoryview]:
    """Rows as bytes, copied piece by piece: what is summed and written must not change in between."""
    step = max(1, _PIECE // max(1, size))
    for i in range(begin, end, step):
        piece = tensor[i : min(i + step, end)]
        yield bytes_of(piece.clone() if piece.is_cpu else piece.cpu())


@contextlib.contextmanager
def _its_file(store: Store, key: tuple[str, ...], size: int) -> Iterator[int | None]:
    """The file of a field of a directory store: another file may share its space."""
    if store.directory is None or not store.has_files or not size:
        yield None
        return
    with Descriptor.open(layout.field_path(store.directory, key), os.O_RDONLY | os.O_NOFOLLOW) as fd:
        yield fd


def write_tables(
    part: PartWriter,
    store: Store,
    lanes: NDArray[np.int64],
    numbers: NDArray[np.int64],
    stored: NDArray[np.int64],
    marks: Callable[[NDArray[np.int64]], Marks],
) -> Totals:
    """Write lanes, tickets and trajectories.

    Args:
        part: of the storage.
        store: whose they are.
        lanes, numbers: as :class:`StoreState` has them.
        stored: numbers of the rows that the files hold, in their order.
        marks: what rows say of trajectories.
    """
    columns = int(np.prod(store.schema.columns))
    runs = find_runs(lanes, numbers, marks, lane_length=store.lane_length, columns=columns)
    lanes = lanes.copy()
    lanes[:, 2] = 0
    lanes[runs[runs[:, 4] & OPEN != 0, 0], 2] = 1
    for name, table in (("lanes", lanes), ("tickets", ticket_words(stored)), ("trajectories", runs)):
        raw = np.ascontiguousarray(table, dtype="<i8")
        with part.file(f"{layout.FOLDER}/{name}.bin", raw.nbytes) as file:
            file.write(raw.data)
    totals = Totals(steps=int(np.count_nonzero(numbers)), episodes=len(runs))
    counted = count_kinds(runs, columns).items()
    return msgspec.structs.replace(totals, **{kind: Count(**count) for kind, count in counted})


def named_writes(numbers: NDArray[np.int64], writes: NDArray[np.int64]) -> dict[str, Tensor]:
    """The entry of a state that says the numbers of the rows' writes, where they are others than those of the tickets."""
    return {} if np.array_equal(numbers, writes) else {"writes": torch.from_numpy(np.array(writes))}


def ticket_words(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tickets as they are saved: of rows that are whole, or void."""
    return np.where(numbers != 0, numbers << 2 | _COMMITTED, _VOID).astype("<i8")


class Boundaries:
    """Which fields of a store say where trajectories begin and end."""

    def __init__(self, schema: Schema, roles: Sequence[str]) -> None:
        number = {field.key: i for i, field in enumerate(schema.fields)}
        chosen = boundary_fields(schema.fields, roles)
        said = [(name, number[field.key]) for name, some in chosen.items() for field in some]
        self._names = tuple(name for name, _ in said)
        self.which = tuple(which for _, which in said)
        """Numbers of the fields."""

    def marks(self, columns: Sequence[Tensor]) -> Marks:
        """What rows say, from those fields of them, ``[n, *shape]`` each."""
        ids: Tensor | None = None
        true: dict[str, list[NDArray[np.bool_]]] = {}
        for name, column in zip(self._names, columns, strict=True):
            flat = column.cpu().reshape(len(column), -1)
            if name == "traj_id":
                ids = flat
                continue
            # Not by torch, whose threads would wait for each other where others have the cores.
            flags = (
                flat == _STEP_TYPES[name] if name in _STEP_TYPES else flat if flat.dtype == torch.bool else flat != 0
            )
            true.setdefault(name, []).append(_any_of(flags))
        done, over, cut, last, first, begun = (
            _any(true.get(name, [])) for name in ("done", "terminated", "truncated", "last", "first", "is_init")
        )
        return Marks(
            None if ids is None else ids.contiguous().view(_WORDS[ids.element_size()]).numpy(),
            _any([done, cut, over, last]),
            cut if cut is None or over is None else cut & ~over,
            _any([begun, first]),
        )

    def marks_of(self, fields: Sequence[Tensor]) -> Callable[[NDArray[np.int64]], Marks]:
        """What rows say, of which there are all fields."""
        columns = [fields[which].cpu() for which in self.which]
        raw = [column.reshape(len(column), math.prod(column.shape[1:])).view(torch.uint8).numpy() for column in columns]
        return lambda rows: self.marks(
            [torch.from_numpy(of[rows]).view(column.dtype) for of, column in zip(raw, columns, strict=True)]
        )

    def marks_now(self, store: Store, numbers: NDArray[np.int64]) -> Callable[[NDArray[np.int64]], Marks]:
        """What all rows say of trajectories, copied before they may be overwritten; 0 in ``numbers`` for those that are already."""
        if not self.which:
            return lambda _: Marks()
        rows = (numbers != 0).nonzero()[0]  # of bools: without the interpreter
        place = np.zeros(len(numbers), np.int64)
        place[rows] = np.arange(len(rows))
        said = []
        for begin in range(0, len(rows), _MARKED):
            piece = rows[begin : begin + _MARKED]
            columns, moved = store.read(
                torch.from_numpy(piece), expected=torch.from_numpy(numbers[piece]), which=self.which
            )
            numbers[piece[moved]] = 0
            said.append(self.marks(columns))
        whole = (None if column[0] is None else np.concatenate(column) for column in zip(*said, strict=True))
        every = Marks._make(whole) if said else Marks()

        def marks(asked: NDArray[np.int64]) -> Marks:
            at = place[asked]
            return Marks._make(None if column is None else column[at] for column in every)

        return marks


def _any_of(flags: Tensor) -> NDArray[np.bool_]:
    """Of each row."""
    found: NDArray[np.bool_] = np.logical_or.reduce(flags.numpy(), axis=1)
    return found


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
    state: dict[str, Any] = read_state(reader)
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
    stored = _read_numbers(reader)
    for name, nbytes in reader.files.items():  # what a load does not need; but what is damaged is not loaded
        if name.rpartition("/")[2] in ("trajectories.bin", "meta.json"):
            for at in range(0, nbytes, _PIECE):
                reader.read(name, at, bytearray(min(_PIECE, nbytes - at)))
    if reader.segment_rows is None:
        numbers = stored
    else:
        segments = reader.segments()
        # Not of all the capacity.
        numbers = np.zeros(max((it.first_row + it.rows for it in segments), default=0), np.int64)
        at = 0
        for segment in segments:
            numbers[segment.first_row : segment.first_row + segment.rows] = stored[at : at + segment.rows]
            at += segment.rows
    if close_open:
        in_order = lanes[:, 1] == np.minimum(lanes[:, 0], geometry.lane_length)  # and not written by number
        left_out = _closed(lanes, (goes_on & in_order).nonzero()[0], geometry)
        numbers = np.append(numbers, np.zeros(max(0, int(left_out.max(initial=-1)) + 1 - len(numbers)), np.int64))
        numbers[left_out] = 0
        writes = state.get("writes")
        if isinstance(writes, torch.Tensor) and writes.ndim == 1:  # others are refused later
            writes[left_out[left_out < len(writes)]] = 0
    return {**state, "lanes": torch.from_numpy(lanes), "numbers": torch.from_numpy(numbers)}


def _read_numbers(reader: PartReader) -> NDArray[np.int64]:
    """Ticket numbers of the rows that are stored, 0 for void ones: in one array, however many they are."""
    name = f"{layout.FOLDER}/tickets.bin"
    numbers = np.frombuffer(reader.read_all(name), "<i8").astype(np.int64, copy=False)
    for begin in range(0, len(numbers), _LOOK):
        checked_numbers(numbers[begin : begin + _LOOK], reader.folder / name, 8 * begin)
    return numbers


def checked_numbers(words: NDArray[np.int64], path: Path, offset: int) -> NDArray[np.int64]:
    """Ticket words, which come from ``offset`` of a file, become their numbers, in place; 0 for void ones.

    Raises:
        CorruptCheckpoint: others.
    """
    void = words & 3 == _VOID
    if not (void | (words & 3 == _COMMITTED)).all() or (words < 0).any():
        raise corrupt(path, "expected tickets of whole or void rows", offset)
    words >>= 2
    words[void] = 0
    return words


def _closed(lanes: NDArray[np.int64], which: NDArray[np.int64], geometry: Geometry) -> NDArray[np.int64]:
    """Leaves out the next row of some lanes (with columns one of each). Changes ``lanes``; the rows that hold nothing then."""
    step = int(np.prod(geometry.columns))
    left_out = which * geometry.lane_length + lanes[which, 0] % geometry.lane_length
    lanes[which, 0] += step
    lanes[which, 1] = np.minimum(lanes[which, 1] + step, geometry.lane_length)
    return np.ravel(left_out[:, None] + np.arange(step))


class Stretch(NamedTuple):
    """Rows of a field that lie in a file."""

    file: str
    offset: int
    """Of the first row."""
    field: int
    begin: int
    end: int
    """Which rows of the part."""


def stretches(reader: PartReader) -> Iterator[Stretch]:
    """Where all rows of a part lie."""
    fields = reader.schema or ()
    if reader.segment_rows is None:
        for number, field in enumerate(fields):
            yield Stretch(field_name(field), 0, number, 0, reader.records["tickets"])
        return
    for it in reader.segments():
        for number, offset in enumerate(segment_layout(fields, it.rows)[0]):
            yield Stretch(segment_name(it.lane, it.k), offset, number, it.first_row, it.first_row + it.rows)


class SavedRowsSource:
    """The rows of a part, for the fields of a store. Every block is checked when it is read."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._free: list[PartReader] = []  # a reader is for one thread at a time

    def fill(self, tensors: RowsTarget) -> None:
        """Read into tensors ``[capacity, *shape]``."""
        here = all(tensor.is_cpu for tensor in tensors)
        most = _LONG_PIECE if here and tensors.put is None else _PIECE
        pieces = [
            it._replace(offset=it.offset + (begin - it.begin) * size, begin=begin, end=min(begin + step, it.end))
            for it in stretches(self._reader)
            if (size := tensors[it.field][:1].nbytes)
            for step in [max(1, most // size)]
            for begin in range(it.begin, it.end, step)
        ]
        with contextlib.ExitStack() as stack:
            more = min(READERS if here else 1, len(pieces)) - 1
            self._free = [self._reader, *(stack.enter_context(self._reader.again()) for _ in range(more))]
            parallel_read([[partial(self._read_piece, it, tensors)] for it in pieces], tensors)

    def _read_piece(self, it: Stretch, tensors: RowsTarget) -> None:
        reader = self._free.pop()
        try:
            _read_rows(reader, it, tensors[it.field][it.begin : it.end], tensors.put)
        finally:
            self._free.append(reader)


def _read_rows(reader: PartReader, it: Stretch, into: Tensor, put: Callable[[int, int, Tensor], None] | None) -> None:
    direct = into.is_cpu and into.is_contiguous() and put is None
    rows = into if direct else torch.empty(into.shape, dtype=into.dtype, device="cpu")
    reader.read(it.file, it.offset, rows.reshape(-1).view(torch.uint8).numpy().data)
    if put is not None:
        put(it.field, it.begin, rows)
    elif rows is not into:
        into[:] = rows.to(into.device)
