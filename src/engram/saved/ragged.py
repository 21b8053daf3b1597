"""The items of ragged fields in a part: written in pieces, of which those that did not change are linked, and read back.

A piece is a range of offsets of one lane, for all fields that share lengths. It is cut between rows. As offsets only grow, new rows
never change a piece that was saved; an edit renews the ticket of its row, so tickets say which pieces are as they were.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from engram._support.state import tensor_in
from engram.errors import IncompatibleCheckpoint
from engram.saved import description
from engram.saved.documents import corrupt
from engram.saved.part_writer import PieceItems
from engram.store.memory import DTYPE_OF
from engram.store.ragged_rows import offsets_of, places_of
from engram.store.ragged_state import Piece, Spans, check_room, compacted, gather, oldest_first, read_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.schema import PartField, RaggedGroup, Schema
    from engram.saved.part_reader import PartReader
    from engram.saved.part_writer import PartWriter
    from engram.store.ragged import RaggedStore

#: Bytes of the items that one piece begins among, at least; a ring has no more than so many blocks of that size.
_BLOCK, _BLOCKS_OF_A_RING = 4 << 20, 4096
#: Pieces of a block, before it is written again as one.
_PIECES_OF_A_BLOCK = 16


class Parent(NamedTuple):
    """The same part of an older checkpoint."""

    reader: PartReader
    numbers: NDArray[np.int64]
    """Its ticket numbers, by row."""


class _LaneRows(NamedTuple):
    """Rows of a lane that have items, oldest first, so that their offsets grow."""

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    """Their offsets, as they are saved."""
    end: NDArray[np.int64]
    same: NDArray[np.bool_]
    """Whether the parent has them as they are."""


class ItemsWriter:
    """Writes the items of a store's rows.

    Args:
        part: that they are of.
        store: whose rows these are.
        fields: as the part describes them.
        lanes: int64 ``[L, 4]``, as they were at the snapshot.
        base: by how much tickets are larger than saved ones.
        parent: the same part of an older checkpoint of this very store.
        paranoid: compare pieces that are linked with the items of the rows.
        progress: called with how many bytes were done.
    """

    def __init__(
        self,
        part: PartWriter,
        store: RaggedStore,
        fields: Sequence[PartField],
        lanes: Tensor,
        base: int,
        parent: Parent | None,
        *,
        paranoid: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._paranoid = paranoid
        self._part, self._store, self._fields, self._base = part, store, fields, base
        self._order = [rows.numpy() for rows in oldest_first(lanes, store.lane_length)]
        self._parent, self._progress = parent, progress
        self._theirs = _by_lane(() if parent is None else parent.reader.pieces())
        groups = store.schema.ragged_groups
        none = torch.zeros((store.lanes, len(groups)), dtype=torch.int64, device="cpu")
        self._shifts = (none if store.item_shifts is None else store.item_shifts).numpy()
        self._spans: dict[int, Tensor] = {}
        self.pieces: list[PieceItems] = []
        """What was written and linked."""

    def write(self, numbers: NDArray[np.int64]) -> dict[int, Tensor]:
        """Write the items of rows that have these ticket numbers, which become 0 for those that have others by now.

        Returns:
            Of each leader its column as it is saved, int32 ``[n, 3]``.

        Raises:
            RuntimeError: ``paranoid``, and items were changed through a view, which no ticket says.
        """
        groups = self._store.schema.ragged_groups
        self._read_spans(numbers)
        for number, group in enumerate(groups):
            for lane, order in enumerate(self._order):
                self._write_lane(number, group, lane, order, numbers)
        columns = {}
        for number, group in enumerate(groups):
            spans = Spans.of(self._spans[group.leader])
            spans = Spans(spans.offsets, torch.where(torch.from_numpy(numbers != 0), spans.lengths, 0))
            lane_of = torch.arange(len(numbers), device="cpu") // self._store.lane_length
            columns[group.leader] = spans.moved(-torch.from_numpy(self._shifts)[lane_of, number]).column
        return columns

    def _read_spans(self, numbers: NDArray[np.int64]) -> None:
        store, rows = self._store, numbers.nonzero()[0]
        own = torch.from_numpy(rows)
        columns, moved = read_spans(store.core, store.schema, own, torch.from_numpy(numbers[rows]))
        numbers[rows[moved]] = 0
        for group, column in zip(store.schema.ragged_groups, columns, strict=True):
            self._spans[group.leader] = torch.zeros((len(numbers), 3), dtype=torch.int32, device="cpu")
            self._spans[group.leader][own] = column

    def _write_lane(
        self, number: int, group: RaggedGroup, lane: int, order: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> None:
        """Link the pieces of the parent whose rows are as they were, and write the others, oldest first."""
        spans = self._spans[group.leader].numpy()
        there = order[order < len(numbers)]
        there = there[(numbers[there] != 0) & (spans[there, 2] > 0)]
        of = Spans.of(torch.from_numpy(spans[there]))
        first = of.offsets.numpy() - self._shifts[lane, number]
        rows = _LaneRows(there, first, first + of.lengths.numpy(), self._same(there, numbers))
        block = self._items_of_a_block(group)
        linked = self._linkable(rows, lane, group.leader, block)
        at = 0
        for begin, end, piece in [*linked, (len(there), len(there), None)]:
            for some in _cut(rows.first, at, begin, block):
                self._write_piece(group, lane, rows, some, numbers)
            which, at = slice(begin, end), end
            if piece is None:
                break
            holds = rows.same[which].all() or self._holds(group, rows, which, numbers, piece)
            if not holds or not self._link(piece):
                self._write_piece(group, lane, rows, which, numbers)
            elif self._paranoid:
                self._compare(group, rows, which, numbers, piece)

    def _same(self, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self._parent is None:
            return np.zeros(len(rows), bool)
        theirs, known = self._parent.numbers, np.zeros(len(rows), np.int64)
        inside = rows < len(theirs)
        known[inside] = theirs[rows[inside]]
        same: NDArray[np.bool_] = known == numbers[rows] - self._base
        return same

    def _items_of_a_block(self, group: RaggedGroup) -> int:
        item_bytes = sum(self._store.schema.ragged[member].item_bytes for member in group.members)
        return max(_BLOCK // item_bytes, group.items // _BLOCKS_OF_A_RING, 1)

    def _linkable(
        self, rows: _LaneRows, lane: int, leader: int, block: int
    ) -> list[tuple[int, int, description.ItemsPiece]]:
        """Pieces of the parent of which there are rows here: from which row to which, and the piece."""
        found = []
        for piece in self._theirs.get((lane, leader), ()):
            begin, end = np.searchsorted(rows.first, [piece.first, piece.end]).tolist()
            if begin < end and rows.end[end - 1] <= piece.end:
                found.append((begin, end, piece))
        blocks = np.array([piece.first // block for *_, piece in found], np.int64)
        _, number, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        return [it for it, many in zip(found, counts[number] >= _PIECES_OF_A_BLOCK, strict=True) if not many]

    def _holds(
        self,
        group: RaggedGroup,
        rows: _LaneRows,
        which: slice,
        numbers: NDArray[np.int64],
        piece: description.ItemsPiece,
    ) -> bool:
        """Whether a piece of the parent has the items of rows of which other fields were edited."""
        assert self._parent is not None  # whose piece it is
        summing = description.Summing()
        summing.update(self._gathered(group, rows, which, numbers, piece.first, piece.items).numpy().data)
        name = description.piece_name(piece.lane, piece.leader, piece.first)
        return summing.done() == self._parent.reader.listing.sums_of(name)

    def _link(self, piece: description.ItemsPiece) -> bool:
        assert self._parent is not None  # whose piece it is
        name = description.piece_name(piece.lane, piece.leader, piece.first)
        if not self._part.link(name, self._parent.reader, name):
            return False
        self.pieces.append(PieceItems(*piece[:4]))
        self._progress(piece.nbytes)
        return True

    def _write_piece(
        self, group: RaggedGroup, lane: int, rows: _LaneRows, which: slice, numbers: NDArray[np.int64]
    ) -> None:
        first, items = int(rows.first[which][0]), int(rows.end[which][-1] - rows.first[which][0])
        room = self._gathered(group, rows, which, numbers, first, items)
        with self._part.file(description.piece_name(lane, group.leader, first), len(room)) as file:
            file.write(room.numpy().data)
        self.pieces.append(PieceItems(lane, group.leader, first, items))
        self._progress(len(room))

    def _compare(
        self,
        group: RaggedGroup,
        rows: _LaneRows,
        which: slice,
        numbers: NDArray[np.int64],
        piece: description.ItemsPiece,
    ) -> None:
        assert self._parent is not None  # whose piece it is
        still = numbers.copy()
        ours = self._gathered(group, rows, which, still, piece.first, piece.items).numpy()
        name = description.piece_name(piece.lane, piece.leader, piece.first)
        theirs = np.frombuffer(self._parent.reader.read_all(name), np.uint8)
        fields = description.piece_fields(self._fields, group.leader)
        for field, offset in zip(fields, description.segment_layout(fields, piece.items)[0], strict=True):
            span = slice(offset, offset + piece.items * field.row_bytes)
            differs = (ours[span] != theirs[span]).reshape(piece.items, -1).any(1)
            for row, first, end in zip(rows.rows[which], rows.first[which], rows.end[which], strict=True):
                if still[row] and differs[first - piece.first : end - piece.first].any():
                    raise RuntimeError(
                        f"save: row {row} of {field.key} was changed through a view since the last checkpoint, which would not have it. "
                        "Write with rb[index] = value or set_at_."
                    )

    def _gathered(
        self, group: RaggedGroup, rows: _LaneRows, which: slice, numbers: NDArray[np.int64], first: int, items: int
    ) -> Tensor:
        """The bytes of a piece; of rows that moved meanwhile zeros, and 0 in ``numbers``."""
        fields = description.piece_fields(self._fields, group.leader)
        offsets, size = description.segment_layout(fields, items)
        room = torch.zeros(size, dtype=torch.uint8, device="cpu")
        columns = [
            room[offset : offset + items * field.row_bytes].view(items, field.row_bytes)
            for field, offset in zip(fields, offsets, strict=True)
        ]
        own = torch.from_numpy(rows.rows[which])
        places = torch.from_numpy(rows.first[which] - first)
        tickets, spans = torch.from_numpy(numbers[rows.rows[which]]), self._spans[group.leader][own]
        moved = gather(self._store.core, self._store.schema, group, own, tickets, spans, columns, places)
        for row in moved:
            for column in columns:
                column[int(places[row]) : int(places[row]) + int(spans[row, 2])] = 0
        numbers[rows.rows[which][moved]] = 0
        return room


def _by_lane(pieces: Iterable[description.ItemsPiece]) -> dict[tuple[int, int], list[description.ItemsPiece]]:
    """By lane and leader."""
    found: dict[tuple[int, int], list[description.ItemsPiece]] = {}
    for piece in pieces:
        found.setdefault((piece.lane, piece.leader), []).append(piece)
    return found


def _cut(first: NDArray[np.int64], begin: int, end: int, block: int) -> Iterator[slice]:
    """Rows ``[begin, end)`` in groups of those that begin in the same block."""
    borders = (np.diff(first[begin:end] // block) != 0).nonzero()[0] + begin + 1
    edges = [begin, *borders.tolist(), end] if begin < end else []
    for at, after in itertools.pairwise(edges):
        yield slice(at, after)


# ---- reading ---------------------------------------------------------------------------------------------------------------


@runtime_checkable
class RaggedRowsSource(Protocol):
    """Rows that were saved, some of whose fields are ragged."""

    def take_items(self, state: Mapping[str, Tensor], here: Schema, where: str) -> None:
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

    def __init__(self, reader: PartReader, state: Mapping[str, Tensor]) -> None:
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
        self.order = [rows[rows < len(self._live)] for rows in oldest_first(state["lanes"], length)]
        """The rows of each lane, the oldest first."""
        self.spans = [self._checked(saved, number) for number in range(len(self.groups))]
        """Where the items of each group are, of all rows."""

    def pieces(self, group: int) -> Iterator[Piece]:
        """The items of a group, as they were saved."""
        for it in self._reader.pieces():
            if it.leader == self.groups[group].leader:
                yield Piece(it.lane, it.first, self._read(it))

    def picked(self, group: int, lane_of: Tensor, offsets: Tensor) -> Iterator[Piece]:
        """The items of a group elsewhere.

        Args:
            group: which.
            lane_of: int64 ``[n]``: the lane that each row has there; -1: it is left out.
            offsets: int64 ``[n]``: where its items are in that lane's ring.
        """
        for it in self._reader.pieces():
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

    def _read(self, it: description.ItemsPiece) -> list[Tensor]:
        fields = description.piece_fields(self._fields, it.leader)
        offsets, _ = description.segment_layout(fields, it.items)
        name, values = description.piece_name(it.lane, it.leader, it.first), []
        for field, offset in zip(fields, offsets, strict=True):
            made = torch.empty((it.items, *field.shape), dtype=DTYPE_OF[field.dtype], device="cpu")
            self._reader.read(name, offset, made.reshape(-1).view(torch.uint8).numpy().data)
            values.append(made)
        return values

    def _checked(self, saved: Schema, number: int) -> Spans:
        """Where the items of a group are."""
        group = self.groups[number]
        column = read_column(self._reader, self._fields[group.leader], len(self._live))
        spans = Spans.of(column)
        spans = Spans(torch.where(self._live, spans.offsets, 0), torch.where(self._live, spans.lengths, 0))
        most = min(saved.ragged[group.leader].max_length, group.items)
        pieces = _by_lane(self._reader.pieces())
        for lane, order in enumerate(self.order):
            head, some = int(self.heads[lane, number]), pieces.get((lane, group.leader), [])
            wrong = _wrong_row(spans, order, most, group.items, head, some)
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
        self._items, self.heads, self.lane_of = items, items.heads, items.lane_of
        self._spans, self._is_laid_anew = items.spans, False
        check_longest(self._spans, here, where)
        if [group.items for group in items.groups] != [group.items for group in here.ragged_groups]:
            laid = [compacted(spans.lengths, items.order) for spans in items.spans]
            self._spans, self.heads = [spans for spans, _ in laid], torch.stack([heads for _, heads in laid], 1)
            self._is_laid_anew = True
            check_room(self.heads, here, where)

    def spans(self, group: int) -> Spans:
        return self._spans[group]

    def pieces(self, group: int) -> Iterator[Piece]:
        if self._is_laid_anew:
            return self._items.picked(group, self.lane_of, self._spans[group].offsets)
        return self._items.pieces(group)


def check_longest(every: Sequence[Spans], here: Schema, where: str) -> None:
    """Raise ``IncompatibleCheckpoint`` for rows that are longer than they may be in a store. ``every``: of each group."""
    for spans, group in zip(every, here.ragged_groups, strict=True):
        longest, most = int(spans.lengths.max()) if len(spans.lengths) else 0, here.ragged[group.leader].max_length
        if longest > most:
            raise IncompatibleCheckpoint(
                f"{where}: {here.fields[group.leader].name}: expected at most {most} items in a row, got {longest}."
            )


def _taken(values: Tensor, which: Tensor) -> Tensor:
    """Some items, also of a dtype that torch cannot index."""
    raw = values.reshape(len(values), -1).view(torch.uint8).numpy()[which.numpy()]
    return torch.from_numpy(raw).view(values.dtype).view(len(which), *values.shape[1:])


def _wrong_row(
    spans: Spans, order: Tensor, most: int, ring: int, head: int, pieces: Sequence[description.ItemsPiece]
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


def read_column(reader: PartReader, field: PartField, rows: int) -> Tensor:
    """The column of a leader, of so many rows of the part, int32 ``[rows, 3]``. Raises ``CorruptCheckpoint``."""
    column = torch.zeros((rows, *field.shape), dtype=torch.int32, device="cpu")
    for name, offset, begin, end in column_stretches(reader, field.id):
        some = torch.empty((end - begin, *field.shape), dtype=torch.int32, device="cpu")
        reader.read(name, offset, some.reshape(-1).view(torch.uint8).numpy().data)
        column[begin:end] = some[: max(0, rows - begin)]
    return column


def column_stretches(reader: PartReader, number: int) -> Iterator[tuple[str, int, int, int]]:
    """Where the rows of a field lie: file, offset, and which rows of the part."""
    fields = reader.schema or ()
    if reader.segment_rows is None:
        yield description.field_name(fields[number]), 0, 0, reader.records["tickets"]
        return
    for it in reader.segments():
        offset = description.segment_layout(fields, it.rows)[0][number]
        yield description.segment_name(it.lane, it.k), offset, it.first_row, it.first_row + it.rows
