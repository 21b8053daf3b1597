"""What a storage held at one moment. It is written later, while others write to the buffer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash

from engram._support.words import count
from engram.format.checkpoints import Cut, ShardRows, Totals
from engram.format.description import segment_name
from engram.format.parts import NO_SCHEMA, SegmentRows, schema_sum, segment_layout
from engram.persist.components import Preparation, write_part
from engram.persist.roles import roles_of
from engram.persist.rows import RowsWriter, SavedRows, described, save_flat, ticket_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartField, PartReader
    from engram.persist.roles import Roles
    from engram.store import Store


_log = logging.getLogger("engram")


_MOST, _LEAST, _COUNT = 16 << 20, 1 << 20, 16


def rows_of_a_segment(lane_length: int, row_bytes: int) -> int:
    """As many as fit in 16 MiB; but a lane has 16 of them, unless they would be below 1 MiB."""
    size = max(1, row_bytes)
    rows = min(_MOST // size, max(-(-lane_length // _COUNT), _LEAST // size))
    return max(1, min(rows, lane_length))


class _Range(NamedTuple):
    """Rows of a segment that are inside their lane's extent."""

    lane: int
    k: int
    begin: int
    end: int


def _ranges(lanes: NDArray[np.int64], lane_length: int, rows: int) -> Iterator[_Range]:
    """All of them: of each lane those with the oldest rows first, in the direction in which a writer goes on."""
    for lane, (position, live) in enumerate(lanes[:, :2].tolist()):
        count = -(-live // rows)
        seam = position % lane_length // rows if live == lane_length else 0
        for i in range(count):
            k = (seam + i) % count
            first = lane * lane_length
            yield _Range(lane, k, first + k * rows, first + min((k + 1) * rows, live))


def save_segments(
    folder: Path,
    snapshot: RowsSnapshot,
    roles: Roles | None,
    *,
    parent: PartReader | None = None,
    paranoid: bool = False,
    progress: Callable[[int], None],
) -> SavedRows:
    """Write a store into a new folder, in segments. Others may be writing.

    Args:
        folder: where; it must not exist.
        snapshot: what is written.
        roles: what fields mean, by key, where they are not called as usual.
        parent: the same part of an older checkpoint of this very store.
        paranoid: compare segments that are taken over from the parent with the rows, as far as they are still there.
        progress: called with how many bytes were done.

    Raises:
        RuntimeError: ``paranoid``, and rows were changed through a view, which no ticket says.
        OSError: no space, or an I/O error.
    """
    numbers, writes = snapshot.numbers()
    writer = RowsWriter(folder, snapshot, roles)
    part, fields, base = writer.part, writer.fields, snapshot.base
    store, lanes = snapshot.store, snapshot.state["lanes"].numpy()
    marks = writer.boundaries.marks_now(store, numbers)
    size = rows_of_a_segment(store.lane_length, store.schema.row_bytes)
    known: dict[tuple[int, int, int, int, int], str] = {}
    if parent is not None and parent.schema_sum == schema_sum(fields) and parent.segment_rows is not None:
        size = parent.segment_rows
        known = {
            (it.lane, it.k, it.first_row, it.rows, it.tickets_sum): segment_name(it.lane, it.k)
            for it in parent.segments()
        }
    rows = _Rows(store, fields, size)
    segments = []
    for it in _ranges(lanes, store.lane_length, size):
        name = segment_name(it.lane, it.k)
        wanted = numbers[it.begin : it.end]
        tickets_sum = _sum(wanted, base)
        theirs = known.get((it.lane, it.k, it.begin, it.end - it.begin, tickets_sum))
        if theirs is not None and parent is not None and part.link(name, parent, theirs):
            if paranoid:
                _compare(rows, it, wanted, parent, theirs)
        else:
            content = rows.copied(it, wanted)
            with part.file(name, len(content)) as file:
                file.write(content)
            tickets_sum = _sum(wanted, base)
        segments.append(SegmentRows(it.lane, it.k, it.begin, it.end - it.begin, tickets_sum))
        progress((it.end - it.begin) * store.schema.row_bytes)
    saved = np.where(numbers != 0, numbers - base, 0)
    in_order = np.concatenate([saved[:0], *(saved[it.first_row : it.first_row + it.rows] for it in sorted(segments))])
    return writer.finish(saved, in_order, marks, writes, segment_rows=size, segments=segments)


def _sum(numbers: NDArray[np.int64], base: int) -> int:
    """Of the tickets of a segment, as they are saved: equal ones mean equal rows."""
    words = ticket_words(np.where(numbers != 0, numbers - base, 0))
    return int(xxhash.xxh3_64_intdigest(words.data))


class _Rows:
    """Copies rows of a store as a segment has them."""

    def __init__(self, store: Store, fields: Sequence[PartField], rows: int) -> None:
        self._store, self._fields = store, fields
        self._room = torch.empty(segment_layout(fields, rows)[1], dtype=torch.uint8, device="cpu")

    def copied(self, it: _Range, numbers: NDArray[np.int64]) -> memoryview:
        """A segment's bytes; of rows that moved meanwhile zeros, and 0 in ``numbers``. Valid until the next call."""
        n = it.end - it.begin
        offsets, size = segment_layout(self._fields, n)
        room = self._room[:size]
        columns, end = [], 0
        for field, offset in zip(self._fields, offsets, strict=True):
            room[end:offset] = 0
            end = offset + n * field.row_bytes
            columns.append(room[offset:end].view(n, field.row_bytes))
        rows = torch.arange(it.begin, it.end, device="cpu")
        expected = torch.from_numpy(np.where(numbers != 0, numbers, -1))
        if self._store.larger:
            with self._store.traceless(range(len(columns)), it.begin, n):
                moved = self._store.copy_rows(rows, expected, columns)
        else:
            moved = self._store.copy_rows(rows, expected, columns)
        for column in columns:
            column[moved] = 0
        numbers[moved] = 0
        return room.numpy().data


def _compare(reader: _Rows, it: _Range, numbers: NDArray[np.int64], parent: PartReader, name: str) -> None:
    still = numbers.copy()
    ours = np.frombuffer(reader.copied(it, still), np.uint8)
    theirs = np.frombuffer(parent.read_all(name), np.uint8)
    offsets, _ = segment_layout(parent.schema or (), it.end - it.begin)
    for field, offset in zip(parent.schema or (), offsets, strict=True):
        span = slice(offset, offset + (it.end - it.begin) * field.row_bytes)
        differs = (ours[span] != theirs[span]).reshape(it.end - it.begin, -1).any(1) & (still != 0)
        if differs.any():
            raise RuntimeError(
                f"save: row {it.begin + int(differs.argmax())} of {field.key} was changed through a view since the last "
                "checkpoint, which would not have it. Write with rb[index] = value or set_at_."
            )


class WholeSnapshot(NamedTuple):
    """A state that is all of a storage: items of a list, or a storage that was never written."""

    kind: str
    """The class of the storage."""
    state: dict[str, Any]
    clock: int
    steps: int
    nbytes: int
    needs_pause: bool = False
    """Whether writers must wait until it is saved."""

    def fields(self, roles: Roles | None) -> Sequence[PartField]:  # noqa: ARG002 - it has none
        return ()

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:  # noqa: ARG002 - it is short
        info = write_part(folder, "storage", self.kind, self.state)
        return SavedRows(info, ShardRows(Cut(self.clock), Totals(steps=self.steps, episodes=0), NO_SCHEMA))

    def save_segments(self, folder: Path, **_: object) -> SavedRows:
        return self.save(folder)


class RowsSnapshot(NamedTuple):
    """The rows of a store. A row that others change before it is written is left out."""

    kind: str
    """The class of the storage."""
    store: Store
    state: dict[str, Any]
    """The storage's, without rows; also without ``numbers`` and ``writes``, where these are read later."""
    base: int
    """By how much tickets in the store were larger than those that are saved."""
    live: int
    """How many rows there were."""
    nbytes: int
    """Of the rows."""
    copies: Sequence[Tensor] | None = None
    """Copies of all rows, by field. None: rows are read when they are written."""
    needs_pause: bool = False
    """Whether writers must wait until it is saved."""

    def fields(self, roles: Roles | None) -> Sequence[PartField]:
        schema = self.store.schema
        return described(schema, roles_of(schema.fields, roles))[1]

    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ticket numbers of the rows up to the last live one, and the numbers of their writes, to be changed by the caller."""
        if "numbers" in self.state:
            tickets = self.state["numbers"]
            return tickets.numpy().copy(), self.state.get("writes", tickets).numpy().copy()
        return self.numbers_now()

    def numbers_now(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same as the store has them by now: 0 also for rows that changed since."""
        state = self.state
        return self.store.numbers_before(state["clock"] + self.base, state["lanes"])

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        rows = save_flat(folder, self, progress)
        if lost_rows := rows.shard.cut.lost_rows:
            lost = count(lost_rows, "row")
            _log.warning("dumps: left out, as others changed them before they were copied: %s", lost)
        return rows

    def save_segments(
        self,
        folder: Path,
        *,
        roles: Roles | None,
        progress: Callable[[int], None],
        parent: PartReader | None = None,
        paranoid: bool = False,
    ) -> SavedRows:
        return save_segments(folder, self, roles, progress=progress, parent=parent, paranoid=paranoid)


#: What a storage held at one moment.
StorageSnapshot: TypeAlias = RowsSnapshot | WholeSnapshot
StoragePreparation: TypeAlias = Preparation[StorageSnapshot]
