"""The items of ragged fields in a part: written in pieces, of which those that did not change are linked, and read back.

A piece is a range of offsets of one lane, for all fields that share lengths. It is cut between rows. As offsets only grow, new rows
never change a piece that was saved; an edit renews the ticket of its row, so tickets say which pieces are as they were.

Rows with slots are saved as a log: those that are as they were stay at their offset of the parent, others come behind all pieces of the
parent. A piece is written again if less than half of it is of rows, or if there are many small ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from engram._support.state import tensor_in
from engram._support.words import raise_as
from engram.errors import CorruptStore, IncompatibleCheckpoint
from engram.format.schema import PartField, RaggedGroup, Schema
from engram.saved import description
from engram.saved.description import ItemsPiece
from engram.saved.documents import corrupt
from engram.saved.part_reader import PartReader, stretches
from engram.saved.part_writer import PartWriter
from engram.store.memory import DTYPE_OF
from engram.store.ragged import RaggedStore
from engram.store.ragged_rows import offsets_of, places_of
from engram.store.rings import Piece, Spans, check_room, compacted, oldest_first

B = TypeVar("B", "torch.Tensor", "NDArray[np.uint8]")

#: Bytes of the items that one piece begins among, at least; a ring has no more than so many blocks of that size.
_BLOCK, _BLOCKS_OF_A_RING = 4 << 20, 256
#: Above all offsets.
_MOST_OFFSET = 1 << 62
#: Pieces of a block, before it is written again as one.
_PIECES_OF_A_BLOCK = 64


def columns_in(room: B, fields: Sequence[PartField], rows: int) -> list[B]:
    """The column of each field in the bytes of a segment or a piece: ``[rows, row_bytes]``."""
    offsets, _ = description.segment_layout(fields, rows)
    placed = zip(fields, offsets, strict=True)
    return [room[at : at + rows * it.row_bytes].reshape(rows, it.row_bytes) for it, at in placed]


def changed_unseen(row: int, field: PartField) -> RuntimeError:
    """The error for a row whose bytes differ from those that an older checkpoint has of the same write."""
    return RuntimeError(
        f"save: row {row} of {field.key} was changed through a view since the last checkpoint, which would not have it. "
        "Write with rb[index] = value or set_at_."
    )


class Parent(NamedTuple):
    """The same part of an older checkpoint."""

    reader: PartReader
    #: bool ``[n]``: the rows that have the same tickets there.
    same: NDArray[np.bool_]


class _LaneRows(NamedTuple):
    """Rows of a lane that have items of a group, oldest first, so that their offsets grow."""

    group: RaggedGroup
    lane: int
    rows: NDArray[np.int64]
    #: Where their items are in the store, int32 ``[n, 3]``.
    spans: NDArray[np.int32]
    #: Their offsets, as they are saved.
    first: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.spans[:, 2]

    @property
    def end(self) -> NDArray[np.int64]:
        """The offsets behind their items."""
        return self.first + self.lengths

    @property
    def items(self) -> int:
        """Items of all of them."""
        return int(self.lengths.sum())

    def picked(self, which: slice | NDArray[np.int64] | NDArray[np.bool_]) -> _LaneRows:
        """Some of these."""
        return self._replace(rows=self.rows[which], spans=self.spans[which], first=self.first[which])


class ItemsWriter:
    """Writes the items of a store's rows.

    Args:
        part: that they are of.
        store: whose rows these are.
        fields: as the part describes them.
        lanes: int64 ``[L, 4]``, as they were at the snapshot.
        parent: the same part of an older checkpoint of this very store.
        now: the ticket numbers of all rows as the store has them when it is called, 0 of those that changed since the snapshot.
        paranoid: compare pieces that are linked with the items of the rows.
        progress: called with how many bytes were done.
    """

    def __init__(
        self,
        part: PartWriter,
        store: RaggedStore,
        fields: Sequence[PartField],
        lanes: torch.Tensor,
        parent: Parent | None,
        now: Callable[[], NDArray[np.int64]],
        *,
        paranoid: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._now = now
        self._part, self._store, self._fields, self._lanes = part, store, fields, lanes[:, :2].tolist()
        self._parent, self._paranoid, self._progress = parent, paranoid, progress
        self._theirs = _by_lane(() if parent is None else parent.reader.listing.pieces)
        none = torch.zeros((store.lanes, len(store.schema.ragged_groups)), dtype=torch.int64, device="cpu")
        self._shifts = (none if store.item_shifts is None else store.item_shifts).numpy()
        #: Of slots, by leader: the offset of each row, as the parent has it until others are given, int64 ``[n]``, and its items there.
        self._saved: dict[int, NDArray[np.int64]] = {}
        self._there: dict[int, NDArray[np.int32]] = {}
        #: What was written and linked.
        self.pieces: list[ItemsPiece] = []

    def write(self, numbers: NDArray[np.int64]) -> None:
        """Write the items of rows that have these ticket numbers, which become 0 for those that are found to have others by now.

        Raises:
            RuntimeError: ``paranoid``, and items were changed through a view, which no ticket says.
        """
        self._numbers = numbers
        #: bool ``[n]``: the rows that the parent has, too, and whose items lie elsewhere there.
        self.displaced = np.zeros(len(numbers), np.bool_)
        self._same = np.zeros(len(numbers), np.bool_) if self._parent is None else self._parent.same
        groups, lanes = self._store.schema.ragged_groups, range(self._store.lanes)
        edges = {it: self._edges(*it) for it in itertools.product(range(len(groups)), lanes) if self._theirs_of(*it)}
        if edges:  # rows that were passed over have changed by now, so that their pieces may seem to hold others
            now = self._now()[: len(numbers)]
            changed = (numbers != 0) & (np.pad(now, (0, len(numbers) - len(now))) != numbers)
            numbers[changed], self._same = 0, self._same & ~changed
        for number, group in enumerate(groups):
            if group.slot:
                before = self._column_of_parent(group.leader, len(numbers)).numpy()
                self._saved[group.leader] = before[:, :2].copy().view(np.int64).ravel()
                self._there[group.leader] = before[:, 2]
            for lane in lanes:
                if group.slot:
                    self._write_slots(number, group, lane)
                else:
                    self._write_lane(number, group, lane, edges.get((number, lane), np.zeros((0, 2), np.int64)))

    def columns(self, begin: int, end: int) -> dict[int, torch.Tensor]:
        """Of each leader the column of rows ``[begin, end)`` as it is saved, int32 ``[n, 3]``."""
        rows = self._numbers[begin:end].nonzero()[0] + begin
        read, lanes, columns = self._read_spans(rows), rows // self._store.lane_length, {}
        there = self._numbers[rows] != 0
        for number, group in enumerate(self._store.schema.ragged_groups):
            spans, offsets, lengths = read[number], *(np.zeros(end - begin, np.int64) for _ in range(2))
            found = there & (spans[:, 2] > 0)
            offsets[(rows - begin)[found]] = self._offsets(number, rows, spans, lanes)[found]
            lengths[(rows - begin)[found]] = spans[found, 2]
            columns[group.leader] = Spans(torch.from_numpy(offsets), torch.from_numpy(lengths)).column
        return columns

    def _column_of_parent(self, leader: int, n: int) -> torch.Tensor:
        if self._parent is None:
            return torch.zeros((n, 3), dtype=torch.int32, device="cpu")
        return read_column(self._parent.reader, leader, n)

    def _read_spans(self, rows: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """Where the items of rows are, of each group; 0 becomes the number of those that moved."""
        # By NumPy, as torch's threads would wait for each other where others have the cores.
        read, moved = self._store.read_spans(torch.from_numpy(rows), torch.from_numpy(self._numbers[rows]))
        self._numbers[rows[moved]] = 0
        return [spans.numpy() for spans in read]

    def _offsets(
        self, number: int, rows: NDArray[np.int64], spans: NDArray[np.int32], lanes: NDArray[np.int64] | int
    ) -> NDArray[np.int64]:
        """The offsets of rows, as they are saved."""
        saved = self._saved.get(self._store.schema.ragged_groups[number].leader)
        if saved is not None:
            return saved[rows]
        offsets: NDArray[np.int64] = (
            np.ascontiguousarray(spans[:, :2]).view(np.int64)[:, 0] - self._shifts[lanes, number]
        )
        return offsets

    def _ages(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Of a lane's rows, the oldest first, those from the ``begin``-th to the ``end``-th: from which row to which, once or twice."""
        live, first, seam = self._lanes[lane][1], lane * self._store.lane_length, self._seam(lane)
        begin, end = begin + seam, end + seam
        both = (begin, min(end, live)), (max(begin - live, 0), end - live)
        return [(first + a, first + b) for a, b in both if a < b]

    def _seam(self, lane: int) -> int:
        """Behind how many rows of a lane its oldest one is."""
        position, live = self._lanes[lane]
        return position % live if live == self._store.lane_length else 0

    def _rows(self, number: int, group: RaggedGroup, lane: int, begin: int, end: int) -> _LaneRows:
        """Of a lane's rows, the oldest first, those from the ``begin``-th to the ``end``-th that have items."""
        every = [self._numbers[a:b].nonzero()[0] + a for a, b in self._ages(lane, begin, end)]
        rows = np.concatenate([np.zeros(0, np.int64), *every])
        spans = self._read_spans(rows)[number]
        found = _LaneRows(group, lane, rows, spans, self._offsets(number, rows, spans, lane))
        return found.picked((self._numbers[rows] != 0) & (found.lengths > 0))

    def _block(self, group: RaggedGroup) -> int:
        """Items that pieces begin among."""
        item_bytes = sum(self._store.schema.ragged[member].item_bytes for member in group.members)
        return max(_BLOCK // item_bytes, group.items // _BLOCKS_OF_A_RING, 1)

    def _write_slots(self, number: int, group: RaggedGroup, lane: int) -> None:
        """As :meth:`_write_lane`, of rows that have slots."""
        there, block = self._rows(number, group, lane, 0, self._lanes[lane][1]), self._block(group)
        rows = there.picked(self._there[group.leader][there.rows] == there.lengths)
        rows = rows.picked(rows.first.argsort())
        pieces, linked = self._theirs.get((lane, group.leader), []), np.zeros(len(self._numbers), bool)
        many = sum(piece.items < block // 2 for piece in pieces) >= _PIECES_OF_A_BLOCK
        for piece in pieces:
            if many and piece.items < block // 2:
                continue
            own = rows.picked(slice(*np.searchsorted(rows.first, [piece.first, piece.end]).tolist()))
            same = own.picked(self._same[own.rows])
            whole = own.items == piece.items  # then other fields of its rows may have been edited
            found = (it for it in [own] * whole + [same] if 2 * it.items >= piece.items and self._linked(it, piece))
            if (kept := next(found, None)) is not None:
                linked[kept.rows] = True
        others = there.picked(~linked[there.rows])
        behind = max((piece.end for piece in pieces), default=0)
        saved, offsets = self._saved[group.leader], behind + others.lengths.cumsum() - others.lengths
        self.displaced[others.rows] |= saved[others.rows] != offsets
        saved[others.rows] = offsets
        self._write_pieces(others._replace(first=saved[others.rows]), block)

    def _write_lane(self, number: int, group: RaggedGroup, lane: int, edges: NDArray[np.int64]) -> None:
        """Link the pieces of the parent whose rows are as they were, and write the others, oldest first."""
        at, block = 0, self._block(group)
        for begin, end, piece, rows in self._linkable(number, group, lane, edges, block):
            if at < begin:
                self._write_pieces(self._rows(number, group, lane, at, begin), block)
            at = end
            if not self._linked(rows, piece):
                self._write_pieces(self._rows(number, group, lane, begin, end), block)
        self._write_pieces(self._rows(number, group, lane, at, self._lanes[lane][1]), block)

    def _theirs_of(self, number: int, lane: int) -> list[ItemsPiece]:
        """The pieces that the parent has of a lane, of items in a ring."""
        group = self._store.schema.ragged_groups[number]
        return [] if group.slot else self._theirs.get((lane, group.leader), [])

    def _edges(self, number: int, lane: int) -> NDArray[np.int64]:
        """From which of a lane's rows to which, the oldest first, those of the parent's pieces are, int64 ``[pieces, 2]``."""
        live, first = self._lanes[lane][1], lane * self._store.lane_length
        ends = np.array([[piece.first, piece.end] for piece in self._theirs_of(number, lane)], np.int64)
        ends += self._shifts[lane, number]
        numbers = np.ascontiguousarray(self._numbers[first : first + live])
        told = numbers.ctypes.data, ends.ctypes.data, ends.size
        with raise_as(CorruptStore, "its lanes"):
            edges: NDArray[np.int64] = self._store.core.rows_from(number, lane, self._seam(lane), live, *told)
        return edges.reshape(-1, 2)

    def _linkable(
        self, number: int, group: RaggedGroup, lane: int, edges: NDArray[np.int64], block: int
    ) -> list[tuple[int, int, ItemsPiece, _LaneRows | None]]:
        """Pieces of the parent of which there are rows here: from which row to which, the oldest first, the piece, and these rows, where
        not all are as they were.
        """
        pieces, found = self._theirs_of(number, lane), []
        for piece, (begin, end) in zip(pieces, edges.tolist(), strict=True):
            same = not self._paranoid and all(self._same[a:b].all() for a, b in self._ages(lane, begin, end))
            rows = None if same else self._rows(number, group, lane, begin, end)
            if begin < end and (rows is None or (len(rows.rows) and rows.end[-1] <= piece.end)):
                found.append((begin, end, piece, rows))
        blocks = np.array([it[2].first // block for it in found], np.int64)
        _, which, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        return [it for it, many in zip(found, counts[which] >= _PIECES_OF_A_BLOCK, strict=True) if not many]

    def _linked(self, rows: _LaneRows | None, piece: ItemsPiece) -> bool:
        """Link a piece of the parent that has the items of rows, of which other fields may have been edited. False: it was not.

        ``rows``: None: all of them are as they were.
        """
        assert self._parent is not None  # whose piece it is
        reader, name = self._parent.reader, piece.name
        if rows is not None and not self._same[rows.rows].all():
            summing = description.Summing(reader.listing.blocks.get(name, description.BLOCK))
            summing.update(self._gathered(rows, piece, self._numbers).numpy().data)
            if summing.done() != reader.listing.sums_of(name):
                return False
        if not self._part.link(name, reader, name):
            return False
        self.pieces.append(piece)
        self._progress(piece.nbytes)
        if self._paranoid and rows is not None:
            self._compare(rows, piece, np.frombuffer(reader.read_all(name), np.uint8))
        return True

    def _write_pieces(self, rows: _LaneRows, block: int) -> None:
        """Write rows, those that begin in the same block as one piece."""
        borders = (np.diff(rows.first // block) != 0).nonzero()[0] + 1
        for some in itertools.pairwise([0, *borders.tolist(), len(rows.rows)] if len(rows.rows) else []):
            self._write_piece(rows.picked(slice(*some)))

    def _write_piece(self, rows: _LaneRows) -> None:
        first = int(rows.first[0])
        piece = ItemsPiece(rows.lane, rows.group.leader, first, int(rows.end[-1]) - first)
        room = self._gathered(rows, piece, self._numbers)
        with self._part.file(piece.name, len(room)) as file:
            file.write(room.numpy().data)
        self.pieces.append(piece)
        self._progress(len(room))

    def _compare(self, rows: _LaneRows, piece: ItemsPiece, theirs: NDArray[np.uint8]) -> None:
        still, n = self._numbers.copy(), piece.items
        fields = description.piece_fields(self._fields, piece.leader)
        both = (self._gathered(rows, piece, still).numpy(), theirs)
        for field, *columns in zip(fields, *(columns_in(room, fields, n) for room in both), strict=True):
            differs = (columns[0] != columns[1]).any(1)
            for row, first, end in zip(rows.rows, rows.first, rows.end, strict=True):
                if still[row] and differs[first - piece.first : end - piece.first].any():
                    raise changed_unseen(row, field)

    def _gathered(self, rows: _LaneRows, piece: ItemsPiece, numbers: NDArray[np.int64]) -> torch.Tensor:
        """The bytes of a piece; of rows that moved meanwhile zeros, and 0 in ``numbers``."""
        fields = description.piece_fields(self._fields, piece.leader)
        room = torch.zeros(description.segment_layout(fields, piece.items)[1], dtype=torch.uint8, device="cpu")
        columns = columns_in(room, fields, piece.items)
        own, places = torch.from_numpy(rows.rows), torch.from_numpy(rows.first - piece.first)
        tickets, spans = torch.from_numpy(numbers[rows.rows]), torch.from_numpy(rows.spans)
        moved = self._store.gather(rows.group, own, tickets, spans, columns, places)
        for row in moved:
            for column in columns:
                column[int(places[row]) : int(places[row]) + int(spans[row, 2])] = 0
        numbers[rows.rows[moved]] = 0
        return room


def _by_lane(pieces: Iterable[ItemsPiece]) -> dict[tuple[int, int], list[ItemsPiece]]:
    """By lane and leader, as which they come."""
    return {(lane, of): [*some] for (lane, of), some in itertools.groupby(pieces, lambda it: (it.lane, it.leader))}


# ---- reading ---------------------------------------------------------------------------------------------------------------


@runtime_checkable
class RaggedRowsSource(Protocol):
    """Rows that were saved, some of whose fields are ragged."""

    def take_items(self, state: Mapping[str, torch.Tensor], here: Schema, where: str) -> None:
        """Read and check where the items of those fields are. Called once, before the rows are read.

        Args:
            state: of the rows, as it will be.
            here: of the store that will hold them.
            where: for messages.

        Raises:
            CorruptCheckpoint: they are not where a store has them.
            IncompatibleCheckpoint: there is no room for them.
        """


class PartItems:
    """The ragged rows of a part. Every block is checked when it is read.

    The constructor reads where items are, and checks it.

    Args:
        reader: of the part.
        state: its rows without fields, as they are to be.

    Raises:
        CorruptCheckpoint: rows whose items are not where a store has them, or are in no piece.
    """

    def __init__(self, reader: PartReader, state: Mapping[str, torch.Tensor]) -> None:
        geometry, fields = reader.geometry, reader.schema
        assert geometry is not None  # it has rows
        assert fields is not None
        self._reader, self._fields = reader, fields
        saved = description.as_schema(fields, geometry)
        self.groups, length = saved.ragged_groups, geometry.lane_length
        self._live = state["numbers"] != 0
        try:
            self.heads = tensor_in(state, "heads", torch.int64, (geometry.lanes, len(self.groups)), "state")
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt(reader.folder, f"expected the heads of rings ({str(error).removesuffix('.')})") from error
        self.lane_of = torch.arange(len(self._live), device="cpu") // length
        #: The rows of each lane, the oldest first.
        self.order = [rows[rows < len(self._live)] for rows in oldest_first(state["lanes"], length)]
        #: Where the items of each group are, of all rows.
        self.spans = [self._checked(saved, number) for number in range(len(self.groups))]

    def pieces(self, group: int) -> Iterator[Piece]:
        """The items of a group, as they were saved."""
        for it in self._reader.listing.pieces:
            if it.leader == self.groups[group].leader:
                yield Piece(it.lane, it.first, self._read(it))

    def picked(self, group: int, lane_of: torch.Tensor, offsets: torch.Tensor) -> Iterator[Piece]:
        """The items of a group elsewhere.

        Args:
            group: which.
            lane_of: int64 ``[n]``: the lane that each row has there; -1: it is left out.
            offsets: int64 ``[n]``: where its items are in that lane's ring.
        """
        for it in self._reader.listing.pieces:
            if it.leader != self.groups[group].leader:
                continue
            spans, order = self.spans[group], self.order[it.lane]
            inside = (spans.lengths[order] > 0) & (spans.offsets[order] >= it.first) & (spans.offsets[order] < it.end)
            rows = order[inside & (lane_of[order] >= 0)]
            if not len(rows):
                continue
            values, lengths, lanes, to = self._read(it), spans.lengths[rows], lane_of[rows], offsets[rows]
            follows = (lanes[1:] == lanes[:-1]) & (to[1:] == to[:-1] + lengths[:-1])
            borders = [0, *((~follows).nonzero()[:, 0] + 1).tolist(), len(rows)]
            for begin, end in itertools.pairwise(borders):
                some = slice(begin, end)
                which = places_of(spans.offsets[rows[some]] - it.first, offsets_of(lengths[some])[:-1], lengths[some])
                yield Piece(int(lanes[begin]), int(to[begin]), [_taken(of, which) for of in values])

    def _read(self, it: ItemsPiece) -> list[torch.Tensor]:
        fields = description.piece_fields(self._fields, it.leader)
        room = torch.from_numpy(np.frombuffer(self._reader.read_all(it.name), np.uint8))
        columns = zip(fields, columns_in(room, fields, it.items), strict=True)
        return [of.reshape(-1).view(DTYPE_OF[field.dtype]).view(it.items, *field.shape) for field, of in columns]

    def _checked(self, saved: Schema, number: int) -> Spans:
        """Where the items of a group are."""
        group = self.groups[number]
        column = read_column(self._reader, group.leader, len(self._live))
        spans = Spans(*[torch.where(self._live, of, 0) for of in Spans.of(column)])
        most = min(saved.ragged[group.leader].max_length, group.items)
        pieces = _by_lane(self._reader.listing.pieces)
        for lane, order in enumerate(self.order):
            head, some = int(self.heads[lane, number]), pieces.get((lane, group.leader), [])
            if group.slot:  # a log, in which there is nothing between offsets
                order, head = order[spans.offsets[order].argsort()], _MOST_OFFSET
            wrong = _wrong_row(spans, order, most, _MOST_OFFSET if group.slot else group.items, head, some)
            if wrong is not None:
                found = [int(of[wrong]) for of in spans]
                raise corrupt(
                    self._reader.folder,
                    f"expected items of {saved.fields[group.leader].name} where a store has them, in order and in a file that is "
                    f"listed, got {found[1]} at {found[0]} in row {wrong}",
                )
            # Rows without items stay as long as those behind them.
            first = torch.where(spans.lengths[order] > 0, spans.offsets[order], head)
            spans.offsets[order] = first.flip(0).cummin(0).values.flip(0)
        return spans


class WholeItems:
    """All ragged rows of a part, for a store of the same capacity and lanes, whose rings may have other sizes.

    Args:
        items: of the part.
        here: the schema of the store.
        where: for messages.

    Raises:
        IncompatibleCheckpoint: the rings here are too small.
    """

    def __init__(self, items: PartItems, here: Schema, where: str) -> None:
        check_longest(items.spans, here, where)
        self._items, self.heads, self.lane_of, self.spans = items, items.heads, items.lane_of, items.spans
        rings = [[(it.items, it.slot) for it in groups] for groups in (items.groups, here.ragged_groups)]
        self._moves = not here.in_slots and rings[0] != rings[1]
        if self._moves:
            self.spans, self.heads = compacted([spans.lengths for spans in items.spans], items.order)
            check_room(self.heads, here, where)

    def pieces(self, group: int) -> Iterator[Piece]:
        if self._moves:
            return self._items.picked(group, self.lane_of, self.spans[group].offsets)
        return self._items.pieces(group)


def check_longest(every: Sequence[Spans], here: Schema, where: str) -> None:
    """Raise ``IncompatibleCheckpoint`` for rows that are longer than they may be in a store. ``every``: of each group."""
    for spans, group in zip(every, here.ragged_groups, strict=True):
        longest, most = int(spans.lengths.max()) if len(spans.lengths) else 0, here.ragged[group.leader].max_length
        if longest > most:
            raise IncompatibleCheckpoint(
                f"{where}: {here.fields[group.leader].name}: expected at most {most} items in a row, got {longest}."
            )


def _taken(values: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Some items, also of a dtype that torch cannot index."""
    raw = values.reshape(len(values), -1).view(torch.uint8).numpy()[which.numpy()]
    return torch.from_numpy(raw).view(values.dtype).view(len(which), *values.shape[1:])


def _wrong_row(
    spans: Spans, order: torch.Tensor, most: int, ring: int, head: int, pieces: Sequence[ItemsPiece]
) -> int | None:
    """The first row of a lane whose items are not where a store has them; None: all are."""
    lengths = spans.lengths[order]
    bad = (lengths < 0) | (lengths > most)
    if bool(bad.any()):
        return int(order[bad][0])
    rows = order[lengths > 0]
    first, lengths = spans.offsets[rows], spans.lengths[rows]
    end = first + lengths
    bad = (first < max(0, head - ring)) | (end > head) | (first % ring + lengths > ring)
    bad[1:] |= first[1:] < end[:-1]
    begins = torch.tensor([-1, *(piece.first for piece in pieces)], device="cpu")
    ends = torch.tensor([-1, *(piece.end for piece in pieces)], device="cpu")
    bad |= end > ends[torch.searchsorted(begins, first, right=True) - 1]
    return int(rows[bad][0]) if bool(bad.any()) else None


def read_column(reader: PartReader, number: int, rows: int) -> torch.Tensor:
    """The column of a leader, of so many rows of the part, int32 ``[rows, 3]``. Raises ``CorruptCheckpoint``."""
    column = torch.zeros((rows, 3), dtype=torch.int32, device="cpu")
    for it in stretches(reader):
        if it.field == number:
            some = torch.empty((it.end - it.begin, 3), dtype=torch.int32, device="cpu")
            reader.read(it.file, it.offset, some.view(-1).view(torch.uint8).numpy().data)
            column[it.begin : it.end] = some[: max(0, rows - it.begin)]
    return column
