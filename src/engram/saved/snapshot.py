"""What a storage held at one moment, and how it is written while others write.

It is written flat, a file per field, or in segments, of which those that did not change are linked.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from engram._support.words import count
from engram.errors import CorruptStore
from engram.format import files, layout
from engram.saved import disk, ragged
from engram.saved.description import NO_SCHEMA, OPEN, Segment, schema_sum, segment_layout, spans_name, with_tickets
from engram.saved.documents import Count, Cut, ShardRows, Totals
from engram.saved.part_writer import PartInfo, PartWriter
from engram.saved.parts import Parts, Preparation, described_state, write_part
from engram.saved.rows import PIECE, Boundaries, count_kinds, described, find_runs, roles_of, same, sum_of, ticket_words
from engram.store.ragged import RaggedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from engram.format.schema import PartField
    from engram.saved.part_reader import PartReader
    from engram.saved.rows import Ints, Marks, Roles
    from engram.store.store import Store
    from engram.types import Form

    SpansOf: TypeAlias = Callable[[int, int], Mapping[int, Tensor]]

_HERE = Path()
#: Bytes that a file system shares between files, or a multiple of them.
_BLOCK = 4096
#: Files that are written at the same time.
_OPEN_FILES = 64
#: Entries of a state that are tables of their own.
TABLES = ("lanes", "numbers", "writes")


class SavedRows(NamedTuple):
    """A storage that was written, and what a shard says of it."""

    info: PartInfo
    shard: ShardRows


# ---- writing ---------------------------------------------------------------------------------------------------------


class RowsWriter:
    """A part with the rows of a snapshot, while it is written.

    Args:
        folder: where; it must not exist.
        snapshot: what is written.
        roles: what fields mean, by key, where they are not called as usual.
        progress: called with how many bytes were written.
    """

    def __init__(
        self, folder: Path, snapshot: RowsSnapshot, roles: Roles | None, progress: Callable[[int], None] | None = None
    ) -> None:
        schema = snapshot.store.schema
        self._pieces: ragged.ItemsWriter | None = None
        self.part = PartWriter(folder, "storage", snapshot.kind, behind=snapshot.store.larger, progress=progress)
        self.boundaries = Boundaries(schema, own := roles_of(schema.fields, roles))
        self.geometry, self.fields = described(schema, own)
        self._snapshot = snapshot

    def write_items(
        self,
        numbers: Ints,
        parent: PartReader | None = None,
        *,
        paranoid: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> SpansOf:
        """Write the items of ragged fields.

        Args:
            numbers: of all rows; 0 afterwards for those that moved meanwhile.
            parent: the same part of an older checkpoint of this very store, in segments.
            paranoid: compare items that are linked with the rows.
            progress: called with how many bytes were done.

        Returns:
            The columns of rows that say where they are, by field, from the first row and the one behind the last.

        Raises:
            RuntimeError: ``paranoid``, and items were changed through a view.
        """
        snapshot = self._snapshot
        store = snapshot.store
        if not isinstance(store, RaggedStore):
            return lambda _, __: {}
        before = None if parent is None else ragged.Parent(parent, same(parent, numbers, snapshot.base))
        lanes = snapshot.state["lanes"]

        def numbers_now() -> Ints:
            return snapshot.numbers_now()[0]

        self._pieces = ragged.ItemsWriter(
            self.part, store, self.fields, lanes, before, numbers_now, paranoid=paranoid, progress=progress
        )
        self._pieces.write(numbers)
        return self._pieces.columns

    def is_displaced(self, it: Segment) -> bool:
        """Whether items of a row of a segment lie elsewhere than in the parent, which the tickets do not say."""
        return self._pieces is not None and bool(self._pieces.displaced[it.first_row : it.end].any())

    def finish(
        self,
        numbers: Ints,
        stored: Ints,
        marks: Marks,
        writes: Ints,
        *,
        segment_rows: int | None = None,
        segments: Sequence[Segment] = (),
    ) -> SavedRows:
        """Write lanes, tickets, trajectories and the state.

        Args:
            numbers: of all rows as they are saved, 0 for those that hold nothing.
            stored: of the rows that the files hold, in their order; empty where segments have tickets themselves.
            marks: what rows say of trajectories.
            writes: of all rows the numbers of their writes. Becomes 0 for those that hold nothing.
            segment_rows: rows of a whole segment, if files are segments.
            segments: what they hold.
        """
        snapshot = self._snapshot
        state = snapshot.state
        totals = self._write_tables(numbers, stored, marks)
        rest = {name: value for name, value in state.items() if name not in TABLES}
        writes = writes[: len(numbers)]
        writes[numbers == 0] = 0
        rest |= named_writes(numbers, writes)
        lost = snapshot.live - totals.steps
        described = described_state(self.part, rest, "storage")
        pieces = None if self._pieces is None else self._pieces.pieces
        fields, geometry = self.fields, self.geometry
        info = self.part.finish(
            described, geometry=geometry, schema=fields, segment_rows=segment_rows, segments=segments, pieces=pieces
        )
        cut = Cut(state["clock"], exact=not lost, lost_rows=lost)
        return SavedRows(info, ShardRows(cut, totals, schema_sum(self.fields)))

    def _write_tables(self, numbers: Ints, stored: Ints, marks: Marks) -> Totals:
        """Write lanes, tickets and trajectories."""
        store, lanes = self._snapshot.store, self._snapshot.state["lanes"].numpy().copy()
        columns = int(np.prod(store.schema.columns))
        runs = find_runs(lanes, numbers, marks, lane_length=store.lane_length, columns=columns)
        lanes[:, 2] = 0
        lanes[runs[runs[:, 4] & OPEN != 0, 0], 2] = 1
        for name, table in (("lanes", lanes), ("tickets", ticket_words(stored)), ("trajectories", runs)):
            raw = np.ascontiguousarray(table, dtype="<i8")
            with self.part.file(f"{layout.FOLDER}/{name}.bin", raw.nbytes) as file:
                file.write(raw.data)
        totals = Totals(steps=int(np.count_nonzero(numbers)), episodes=len(runs))
        counted = count_kinds(runs, columns).items()
        return msgspec.structs.replace(totals, **{kind: Count(**count) for kind, count in counted})


def _write_flat(part: PartWriter, store: Store, numbers: Ints, copied: Sequence[Tensor] | None, spans: SpansOf) -> None:
    """Write a file per field. ``spans``: columns of ragged fields as they are saved."""
    rows = len(numbers)
    there, columns = np.concatenate([[False], numbers != 0, [False]]), spans(0, rows)
    borders = (there[1:] != there[:-1]).nonzero()[0].tolist()
    stretches = list(zip(borders[::2], borders[1::2], strict=True))
    together = None if copied or store.directory is None or not store.has_files else layout.group_of(store.schema)
    if together:
        _write_together(part, store, rows, stretches, together)
    for number, (field, tensor) in enumerate(zip(store.schema.fields, copied or store.tensors, strict=True)):
        if together and number in together.offsets:
            continue
        if field.ragged is not None:
            column = columns.get(number, tensor[:0])
            with part.file(spans_name(number), column.nbytes) as file:
                file.write(bytes_of(column))
            continue
        size = field.row_bytes
        name = layout.field_path(_HERE, field.key).as_posix()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(part.file(name, rows * size, sparse=True))
            source: files.Descriptor | None = None  # another file may share its space
            if not copied and size and store.directory is not None and store.has_files:
                path = layout.field_path(store.directory, field.key)
                source = stack.enter_context(files.Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW))
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
    memory = np.empty(max(PIECE // stride, 1) * stride, np.uint8)
    for i in range(0, len(group.offsets), _OPEN_FILES):
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(files.Descriptor.open(path, os.O_RDONLY | os.O_NOFOLLOW))
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
    step, blocks = max(1, PIECE // size) if size else end - begin, _BLOCK // math.gcd(_BLOCK, size)
    step = step // blocks * blocks or step
    for first in range(begin, end, step):
        yield first, min(step, end - first)


def bytes_of(rows: Tensor) -> memoryview:
    """The bytes of contiguous rows in RAM. A view."""
    return rows.reshape(-1).view(torch.uint8).numpy().data


def _pieces(tensor: Tensor, begin: int, end: int, size: int) -> Iterator[memoryview]:
    """Rows as bytes, copied piece by piece: what is summed and written must not change in between."""
    step = max(1, PIECE // max(1, size))
    for i in range(begin, end, step):
        piece = tensor[i : min(i + step, end)]
        yield bytes_of(piece.clone() if piece.is_cpu else piece.cpu())


def named_writes(numbers: Ints, writes: Ints) -> dict[str, Tensor]:
    """The entry of a state that says the numbers of the rows' writes, where they are others than those of the tickets."""
    return {} if np.array_equal(numbers, writes) else {"writes": torch.from_numpy(np.array(writes))}


_log = logging.getLogger("engram")


#: Bytes of a segment at most, and at least where a lane can have that many segments.
_MAX_SEGMENT, _MIN_SEGMENT, _SEGMENTS_OF_A_LANE = 16 << 20, 1 << 20, 16
#: The same where fields are ragged: a segment has little of a row, as items lie apart.
_MIN_RAGGED_SEGMENT, _RAGGED_SEGMENTS = 1 << 13, 128


def rows_of_a_segment(
    lane_length: int, row_bytes: int, of_lane: int = _SEGMENTS_OF_A_LANE, least: int = _MIN_SEGMENT
) -> int:
    """As many as fit in 16 MiB; but a lane has so many of them, unless they would be below so many bytes."""
    size = max(1, row_bytes)
    rows = min(_MAX_SEGMENT // size, max(-(-lane_length // of_lane), least // size))
    return max(1, min(rows, lane_length))


def _ranges(lanes: Ints, lane_length: int, rows: int) -> Iterator[Segment]:
    """All of them: of each lane those with the oldest rows first, in the direction in which a writer goes on."""
    for lane, (position, live) in enumerate(lanes[:, :2].tolist()):
        count = -(-live // rows)
        seam = position % lane_length // rows if live == lane_length else 0
        for i in range(count):
            k = (seam + i) % count
            first = lane * lane_length
            yield Segment(lane, k, first + k * rows, min(rows, live - k * rows))


class _SegmentRoom:
    """Copies rows of a store as a segment has them.

    Args:
        store: whose rows.
        fields: as the part describes them.
        rows: of a whole segment.
        spans: columns of ragged fields as they are saved.
        base: by how much tickets are larger than saved ones.
    """

    def __init__(self, store: Store, fields: Sequence[PartField], rows: int, spans: SpansOf, base: int) -> None:
        self._store, self._fields, self._spans, self._base = store, fields, spans, base
        self._room = torch.empty(segment_layout(fields, rows)[1], dtype=torch.uint8, device="cpu")

    def copied(self, it: Segment, numbers: Ints) -> memoryview:
        """A segment's bytes; of rows that moved meanwhile zeros, and 0 in ``numbers``. Valid until the next call."""
        n = it.rows
        offsets, size = segment_layout(self._fields, n)
        room = self._room[:size]
        columns, end = [], 8 * n if with_tickets(self._fields) else 0
        tickets = room[:end]
        for field, offset in zip(self._fields, offsets, strict=True):
            room[end:offset] = 0
            end = offset + n * field.row_bytes
            columns.append(room[offset:end].view(n, field.row_bytes))
        rows = torch.arange(it.first_row, it.end, device="cpu")
        expected = torch.from_numpy(np.where(numbers != 0, numbers, -1))
        if self._store.larger:
            with self._store.traceless(range(len(columns)), it.first_row, n):
                moved = self._store.copy_rows(rows, expected, columns)
        else:
            moved = self._store.copy_rows(rows, expected, columns)
        for number, spans in self._spans(it.first_row, it.end).items():
            columns[number][:] = spans.view(torch.uint8)
        for column in columns:
            column[moved] = 0
        numbers[moved] = 0
        if len(tickets):
            tickets.numpy()[:] = ticket_words(numbers, self._base).view(np.uint8)
        return room.numpy().data


def _compare(reader: _SegmentRoom, it: Segment, numbers: Ints, parent: PartReader) -> None:
    still, fields = numbers.copy(), parent.schema or ()
    both = (np.frombuffer(raw, np.uint8) for raw in (reader.copied(it, still), parent.read_all(it.name)))
    for field, *columns in zip(fields, *(ragged.columns_in(room, fields, it.rows) for room in both), strict=True):
        differs = (columns[0] != columns[1]).any(1) & (still != 0)
        if differs.any():
            raise ragged.changed_unseen(it.first_row + int(differs.argmax()), field)


class WholeSnapshot(NamedTuple):
    """A state that is all of a storage: items of a list, or a storage that was never written."""

    #: The class of the storage.
    kind: str
    state: dict[str, Any]
    clock: int
    steps: int
    nbytes: int
    #: Whether writers must wait until it is saved.
    needs_pause: bool = False

    def fields(self, roles: Roles | None) -> Sequence[PartField]:  # noqa: ARG002 - it has none
        return ()

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:  # noqa: ARG002 - it is short
        info = write_part(folder, "storage", self.kind, self.state)
        return SavedRows(info, ShardRows(Cut(self.clock), Totals(steps=self.steps, episodes=0), NO_SCHEMA))

    def save_segments(self, folder: Path, **_: object) -> SavedRows:
        return self.save(folder)


class RowsSnapshot(NamedTuple):
    """The rows of a store. A row that others change before it is written is left out."""

    #: The class of the storage.
    kind: str
    store: Store
    #: The storage's, without rows; also without ``numbers`` and ``writes``, where these are read later.
    state: dict[str, Any]
    #: By how much tickets in the store were larger than those that are saved.
    base: int
    #: How many rows there were.
    live: int
    #: Of the rows.
    nbytes: int
    #: Copies of all rows, by field. None: rows are read when they are written.
    copies: Sequence[Tensor] | None = None
    #: Whether writers must wait until it is saved.
    needs_pause: bool = False

    def fields(self, roles: Roles | None) -> Sequence[PartField]:
        schema = self.store.schema
        return described(schema, roles_of(schema.fields, roles))[1]

    def numbers(self) -> tuple[Ints, Ints]:
        """Ticket numbers of the rows up to the last live one, and the numbers of their writes, to be changed by the caller."""
        if "numbers" in self.state:
            tickets = self.state["numbers"]
            return tickets.numpy().copy(), self.state.get("writes", tickets).numpy().copy()
        return self.numbers_now()

    def numbers_now(self) -> tuple[Ints, Ints]:
        """The same as the store has them by now: 0 also for rows that changed since."""
        state = self.state
        return self.store.numbers_before(state["clock"] + self.base, state["lanes"])

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write a store into a new folder, a file per field, which ``TensorDict.load_memmap`` reads. Others may be writing.

        ``progress`` is called with how many bytes were written.

        Raises:
            OSError: no space, or an I/O error.
        """
        known, writes = self.numbers()
        writer = RowsWriter(folder, self, None, progress)
        store, copies = self.store, self.copies
        in_use = np.zeros(store.rows_in_use(self.state["lanes"]), np.int64)
        in_use[: len(known)] = known
        boundaries = writer.boundaries
        marks = boundaries.marks_now(store, in_use) if copies is None else boundaries.marks_of(copies, len(in_use))
        spans = writer.write_items(in_use)
        numbers = in_use[: int(in_use.nonzero()[0].max(initial=-1)) + 1]  # the last ones may be void
        _write_flat(writer.part, store, numbers, copies, spans)
        if copies is None:
            # The files hold bytes of no row where others wrote meanwhile: such a row's ticket is void.
            numbers[self.numbers_now()[0][: len(numbers)] != numbers] = 0
        in_use[in_use != 0] -= self.base
        saved = writer.finish(in_use, numbers, marks, np.pad(writes, (0, len(in_use) - len(writes))))
        if lost_rows := saved.shard.cut.lost_rows:
            lost = count(lost_rows, "row")
            _log.warning("dumps: left out, as others changed them before they were copied: %s", lost)
        return saved

    def save_segments(
        self,
        folder: Path,
        *,
        roles: Roles | None,
        progress: Callable[[int], None],
        parent: PartReader | None = None,
        paranoid: bool = False,
    ) -> SavedRows:
        """Write a store into a new folder, in segments. Others may be writing.

        Args:
            folder: where; it must not exist.
            roles: what fields mean, by key, where they are not called as usual.
            parent: the same part of an older checkpoint of this very store.
            paranoid: compare segments that are taken over from the parent with the rows, as far as they are still there.
            progress: called with how many bytes were done.

        Raises:
            RuntimeError: ``paranoid``, and rows were changed through a view, which no ticket says.
            OSError: no space, or an I/O error.
        """
        numbers, writes = self.numbers()
        writer = RowsWriter(folder, self, roles)
        part, fields, base = writer.part, writer.fields, self.base
        store, lanes = self.store, self.state["lanes"].numpy()
        marks = writer.boundaries.marks_now(store, numbers)
        of_lane, least = (_RAGGED_SEGMENTS, _MIN_RAGGED_SEGMENT) if store.items else (_SEGMENTS_OF_A_LANE, _MIN_SEGMENT)
        size = rows_of_a_segment(store.lane_length, store.schema.row_bytes, of_lane, least)
        if parent is not None and (parent.schema_sum != schema_sum(fields) or parent.segment_rows is None):
            parent = None
        if parent is not None and parent.segment_rows is not None:
            size = parent.segment_rows
        known = {(*it[:4], it.tickets_sum) for it in (parent.listing.segments if parent else ())}
        spans = writer.write_items(numbers, parent, paranoid=paranoid, progress=progress)
        rows = _SegmentRoom(store, fields, size, spans, base)
        segments = []
        for it in _ranges(lanes, store.lane_length, size):
            name, wanted = it.name, numbers[it.first_row : it.end]
            its_sum = sum_of(wanted, base)
            stays = (*it[:4], its_sum) in known and not writer.is_displaced(it)
            if parent is not None and stays and part.link(name, parent, name):
                if paranoid:
                    _compare(rows, it, wanted, parent)
            else:
                content = rows.copied(it, wanted)
                with part.file(name, len(content)) as file:
                    file.write(content)
                its_sum = sum_of(wanted, base)
            segments.append(it._replace(tickets_sum=its_sum))
            progress(it.rows * store.schema.row_bytes)
        if base:
            np.subtract(numbers, base, out=numbers, where=numbers != 0)
        apart = [] if with_tickets(fields) else [numbers[it.first_row : it.end] for it in sorted(segments)]
        stored = np.concatenate([numbers[:0], *apart])
        return writer.finish(numbers, stored, marks, writes, segment_rows=size, segments=segments)


#: What a storage held at one moment.
StorageSnapshot: TypeAlias = RowsSnapshot | WholeSnapshot
StoragePreparation: TypeAlias = Preparation[StorageSnapshot]


class Snapshot(NamedTuple):
    """A buffer at one moment, as a checkpoint saves it. The rows are read when they are written."""

    rows: StorageSnapshot
    parts: Parts
    form: Form
    #: For how long writers waited.
    paused_s: float
