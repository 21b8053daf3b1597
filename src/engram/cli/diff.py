"""``engram diff``: what differs between two stores, dumps or checkpoints. Reads them without torch."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec
import numpy as np

from engram._progress import Work
from engram._words import count
from engram.cli.show import echo, plain, table
from engram.format import control, disk, files, layout, series
from engram.format.checkpoints import Checkpoint
from engram.format.description import segment_layout, segment_name
from engram.format.histograms import histogram
from engram.format.schema import name_of
from engram.format.verify import kind_of, read_store, verify
from engram.persist.roles import roles_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from engram.format.part_reader import PartReader
    from engram.format.schema import Column, Schema

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint64]
    Numbers = NDArray[np.int64]


#: Rows whose flags are read, at most.
_MOST = 1 << 20
_FLAGS = ("done", "terminated", "truncated")


class _Flag(NamedTuple):
    """Where the end flags of the rows lie: a byte of each row."""

    path: Path
    stride: int
    offset: int


def described_lengths(directory: Path) -> dict[str, object]:
    """``lengths``, a histogram of whole trajectories among the newest rows, and ``lengths_rows``, how many those are.

    Nothing, if no field of one byte ends trajectories. Raises ``OSError`` and as ``read_store``.
    """
    schema, header = read_store(directory)
    flags = [] if schema.columns else [*_flags(directory, schema)]
    if not flags:
        return {}
    lengths, rows = Counter[float](), 0
    for number, (cursor, base, _) in enumerate(_lanes(directory, header)):
        first = max(base, cursor - header.lane_length, cursor - max(1, _MOST // header.lanes))
        if first >= cursor:
            continue
        rows += cursor - first
        ends = _ends(flags, number * header.lane_length, header.lane_length, first, cursor)
        last = first - 1 if first == base else None
        for end in ends:
            if last is not None:
                lengths[end - last] += 1
            last = end
    return {"lengths": histogram(lengths, whole=True), "lengths_rows": rows}


def _lanes(directory: Path, header: control.Header) -> list[tuple[int, int, int]]:
    raw = bytearray(control.control_bytes(header.lanes) - control.FIXED_BYTES)
    with files.open_regular(directory / layout.FOLDER / layout.CONTROL, os.O_RDONLY) as fd:
        disk.read(fd, memoryview(raw), control.FIXED_BYTES)
    return control.lanes(bytes(raw))


def _flags(directory: Path, schema: Schema) -> Iterator[_Flag]:
    """Of the fields that end a trajectory, those whose rows are one byte."""
    group = layout.group_of(schema)
    for number, (field, role) in enumerate(zip(schema.fields, roles_of(schema.fields), strict=True)):
        if role in _FLAGS and field.row_bytes == 1:
            if group is not None and number in group.offsets:
                yield _Flag(directory / layout.FOLDER / layout.GROUPED, group.stride, group.offsets[number])
            else:
                yield _Flag(layout.field_path(directory, field.key), 1, 0)


def _ends(flags: Sequence[_Flag], begin: int, length: int, first: int, cursor: int) -> Iterator[int]:
    """Positions of the last steps in ``[first, cursor)`` of the lane whose rows begin at ``begin``, in ascending order."""
    at = first
    while at < cursor:
        stop = min(cursor, (at // length + 1) * length)  # up to where the ring turns
        row, rows = begin + at % length, stop - at
        merged = 0
        for flag in flags:
            raw = bytearray(rows * flag.stride)
            with files.open_regular(flag.path, os.O_RDONLY) as fd:
                disk.read(fd, memoryview(raw), row * flag.stride)
            merged |= int.from_bytes(raw[flag.offset :: flag.stride], "little")
        marks = merged.to_bytes(rows, "little").translate(_TRUTH)
        found = marks.find(b"\1")
        while found >= 0:
            yield at + found
            found = marks.find(b"\1", found + 1)
        at = stop


_TRUTH = b"\0" + b"\1" * 255


#: State of a ticket whose row is whole.
_COMMITTED = 2
#: Bytes that are compared at a time.
_CHUNK = 32 << 20
#: Files of segments that are open at a time.
_OPEN = 64
#: Tickets of rows that differ, of which so many are named.
_NAMED = 10


class Rows(msgspec.Struct):
    """Rows of both sides, paired by rank and ticket."""

    a: int = 0
    b: int = 0
    paired: int = 0
    only_a: int = 0
    only_b: int = 0
    differ: int = 0
    """Of those that are paired."""
    moved: int = 0
    """Overwritten while they were compared; not counted as ``differ``."""
    by_field: dict[str, int] = {}
    """Rows that differ in that field."""
    first: list[int] = []
    """Tickets of the first rows that differ."""


class Comparison(msgspec.Struct):
    """What ``engram diff`` found. ``[of A, of B]`` where it names both."""

    a: str
    b: str
    kinds: list[str]
    same: bool
    fields: str
    """How the fields differ; empty: not at all."""
    sizes: dict[str, list[int]]
    """Those that differ."""
    rows: Rows | None
    problems: list[dict[str, str | int | None]]
    notes: list[dict[str, str | int | None]]


def compare(one: Path, other: Path) -> Comparison:
    """Compare what lies in two folders.

    Raises:
        FileNotFoundError: nothing of ours lies there, or no whole checkpoint. OSError: no permission, an I/O error.
        CorruptStore, CorruptCheckpoint, IncompatibleStore, IncompatibleCheckpoint: it cannot be read.

    Cost: reads all rows of both, in pieces of 32 MiB.
    """
    with contextlib.ExitStack() as stack:
        sides = [_opened(path, stack) for path in (one, other)]
        a, b = sides
        sizes = {name: [a.sizes[name], b.sizes[name]] for name in a.sizes if a.sizes[name] != b.sizes[name]}
        ours, theirs = ({it.key: it for it in side.fields} for side in sides)
        fields = _field_differences(ours, theirs)
        notes: list[dict[str, str | int | None]] = []
        rows: Rows | None = None
        if "ranks" in sizes:
            what = f"expected as many ranks on both sides, got {a.sizes['ranks']} and {b.sizes['ranks']}: rows were not compared"
            notes.append({"file": b.path, "offset": None, "what": what})
        else:
            rows = Rows()
            common = [*_common(a.fields, b.fields)]
            if not common:
                what = "expected a field of the same name, dtype and shape on both sides, got none: only tickets were compared"
                notes.append({"file": b.path, "offset": None, "what": what})
            for left, right in zip(a.ranks, b.ranks, strict=True):
                _compare_rows(left, right, common, rows)
        problems = [it.entry() for path in (one, other) for it in verify(path, "meta").problems]
    found = rows is not None and not (rows.only_a or rows.only_b or rows.differ)
    same = found and not (fields or sizes or problems)
    return Comparison(a.path, b.path, [a.kind, b.kind], same, fields, sizes, rows, problems, notes)


def show_comparison(found: Comparison) -> None:
    """Print what differs."""
    click.echo(f"A  {found.kinds[0]} {plain(found.a)}")
    click.echo(f"B  {found.kinds[1]} {plain(found.b)}")
    if found.fields:
        click.echo(f"fields   {plain(found.fields)}")
    echo(f"{name:<8} {of_a:,} in A, {of_b:,} in B" for name, (of_a, of_b) in found.sizes.items())
    rows = found.rows
    if rows is not None:
        click.echo(f"rows     {rows.a:,} in A, {rows.b:,} in B; {rows.only_a:,} only in A, {rows.only_b:,} only in B")
        click.echo(f"         {rows.paired:,} in both, of which {rows.differ:,} differ")
        if rows.moved:
            click.echo(f"         {rows.moved:,} were overwritten meanwhile, and not compared")
        fields = [(f"         {plain(name)}", count(number, "row")) for name, number in rows.by_field.items()]
        echo(table(fields, right=[1]))
        if rows.first:
            click.echo(
                f"         first: ticket {', '.join(map(str, rows.first))}{', …' if rows.differ > len(rows.first) else ''}"
            )
    echo(f"note: {plain(entry['file'])}: {plain(entry['what'])}." for entry in (*found.notes, *found.problems))
    if found.same:
        click.echo("no difference")


# ---- both sides ------------------------------------------------------------------------------------------------------


class _Rank:
    """The rows of a store, or of one rank of a checkpoint, in the order of their tickets' words."""

    def __init__(self, words: Words, pieces: Sequence[_Piece]) -> None:
        self.words = words
        """Tickets; of a live store, as they are now."""
        self._pieces = pieces
        self._starts = [piece.first for piece in pieces]
        self._mapped: dict[tuple[int, int], Bytes] = {}

    def bytes_of(self, number: int, rows: Numbers) -> Bytes:
        """The bytes of a field in these rows, which ascend: ``[rows, bytes of a row]``."""
        found: list[Bytes] = []
        at = 0
        while at < len(rows):
            piece = bisect.bisect_right(self._starts, int(rows[at])) - 1
            stop = at + int(np.searchsorted(rows[at:], self._pieces[piece].first + self._pieces[piece].rows))
            found.append(self._mapping(piece, number)[rows[at:stop] - self._pieces[piece].first])
            at = stop
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _mapping(self, piece: int, number: int) -> Bytes:
        key = piece, number
        if key not in self._mapped:
            if len(self._mapped) >= _OPEN:
                self._mapped.clear()
            self._mapped[key] = self._pieces[piece].mapped(number)
        return self._mapped[key]


class _Place(NamedTuple):
    """Where a field of a piece lies."""

    file: Path
    offset: int
    stride: int
    row_bytes: int


class _Piece(NamedTuple):
    """Consecutive rows whose fields lie in the same files."""

    first: int
    rows: int
    places: tuple[_Place, ...]

    def mapped(self, number: int) -> Bytes:
        """A view of a field: ``[rows, bytes of a row]``."""
        place = self.places[number]
        if not place.row_bytes or not self.rows:
            return np.zeros((self.rows, 0), np.uint8)
        raw = np.memmap(place.file, np.uint8, "r")
        strides = (place.stride, 1)
        begin = raw[place.offset :]
        if len(begin) < (self.rows - 1) * place.stride + place.row_bytes:
            raise FileNotFoundError(
                f"{place.file}: expected {self.rows} rows of {place.row_bytes} bytes, the file is shorter."
            )
        return np.lib.stride_tricks.as_strided(begin, (self.rows, place.row_bytes), strides, writeable=False)


class _Side(NamedTuple):
    path: str
    kind: str
    sizes: dict[str, int]
    fields: Sequence[Column]
    ranks: Sequence[_Rank]


def _opened(path: Path, stack: contextlib.ExitStack) -> _Side:
    kind = kind_of(path)
    if kind == "store":
        decoded, header = read_store(path)
        sizes = {"capacity": decoded.capacity, "lanes": header.lanes, "ranks": 1}
        return _Side(str(path), kind, sizes, decoded.fields, [_store_rows(path, decoded)])
    folder = series.latest(path)[0] if kind == "series" else path
    if folder is None or kind not in ("series", "checkpoint", "dump"):
        raise FileNotFoundError(f"{path}: expected a store, a dump or a whole checkpoint, found none ({kind}).")
    checkpoint = stack.enter_context(Checkpoint(folder))
    checkpoint.progress = stack.enter_context(Work("comparing", checkpoint.nbytes))
    ranks, capacity, lanes = [], 0, 0
    fields: Sequence[Column] = ()
    for rank in range(checkpoint.manifest.world):
        for part in checkpoint.parts(rank):
            if part.part == "storage" and part.geometry is not None and part.schema is not None:
                capacity, lanes, fields = capacity + part.geometry.capacity, lanes + part.geometry.lanes, part.schema
                ranks.append(_part_rows(part))
    if len(ranks) < checkpoint.manifest.world:
        raise FileNotFoundError(f"{folder}: expected rows with fields in every rank, found them in {len(ranks)}.")
    return _Side(str(folder), kind, {"capacity": capacity, "lanes": lanes, "ranks": len(ranks)}, fields, ranks)


def _store_rows(path: Path, schema: Schema) -> _Rank:
    words = np.memmap(path / layout.FOLDER / layout.TICKETS, np.uint64, "r", shape=(schema.capacity,))
    group = layout.group_of(schema)
    places = []
    for number, field in enumerate(schema.fields):
        if group is not None and number in group.offsets:
            file = path / layout.FOLDER / layout.GROUPED
            places.append(_Place(file, group.offsets[number], group.stride, field.row_bytes))
        else:
            places.append(_Place(layout.field_path(path, field.key), 0, field.row_bytes, field.row_bytes))
    return _Rank(words, [_Piece(0, schema.capacity, tuple(places))])


def _part_rows(part: PartReader) -> _Rank:
    schema = part.schema or ()
    words = np.frombuffer(part.read_all(f"{layout.FOLDER}/tickets.bin"), "<u8").astype(np.uint64)
    if part.segment_rows is None:
        places = [_Place(layout.field_path(part.folder, it.key), 0, it.row_bytes, it.row_bytes) for it in schema]
        return _Rank(words, [_Piece(0, len(words), tuple(places))])
    pieces, first = [], 0
    for it in part.segments():
        offsets, _ = segment_layout(schema, it.rows)
        file = part.folder / segment_name(it.lane, it.k)
        fields = zip(schema, offsets, strict=True)
        places = [_Place(file, offset, field.row_bytes, field.row_bytes) for field, offset in fields]
        pieces.append(_Piece(first, it.rows, tuple(places)))
        first += it.rows
    return _Rank(words, pieces)


# ---- what differs ----------------------------------------------------------------------------------------------------


def _is_alike(one: Column, other: Column) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _field_differences(ours: Mapping[tuple[str, ...], Column], theirs: Mapping[tuple[str, ...], Column]) -> str:
    said = []
    for name, these, those in (("A", ours, theirs), ("B", theirs, ours)):
        if only := [name_of(key) for key in these if key not in those]:
            said.append(f"only in {name}: {', '.join(only)}")
    for key, it in ours.items():
        if key in theirs and not _is_alike(it, theirs[key]):
            there = theirs[key]
            said.append(f"{name_of(key)}: {it.dtype} {list(it.shape)} in A, {there.dtype} {list(there.shape)} in B")
    return "; ".join(said)


class _Common(NamedTuple):
    """A field that both sides have alike: its number there and there."""

    name: str
    in_a: int
    in_b: int
    row_bytes: int


def _common(ours: Sequence[Column], theirs: Sequence[Column]) -> Iterator[_Common]:
    numbers = {it.key: number for number, it in enumerate(theirs)}
    for number, it in enumerate(ours):
        there = numbers.get(it.key)
        if there is not None and _is_alike(it, theirs[there]) and it.row_bytes:
            yield _Common(name_of(it.key), number, there, it.row_bytes)


def _committed(words: Words) -> tuple[Numbers, Numbers]:
    """Numbers of the writes of whole rows, and those rows."""
    rows = np.flatnonzero((words & np.uint64(3)) == _COMMITTED)
    return (words[rows] << np.uint64(1) >> np.uint64(3)).astype(
        np.int64
    ), rows  # the highest bit says that a row was edited


def _compare_rows(left: _Rank, right: _Rank, common: Sequence[_Common], into: Rows) -> None:
    """Compare the rows of a rank, and add to what was found."""
    (numbers_a, rows_a), (numbers_b, rows_b) = _committed(left.words), _committed(right.words)
    numbers, at_a, at_b = np.intersect1d(numbers_a, numbers_b, assume_unique=True, return_indices=True)
    into.a, into.b = into.a + len(numbers_a), into.b + len(numbers_b)
    into.only_a, into.only_b = into.only_a + len(numbers_a) - len(numbers), into.only_b + len(numbers_b) - len(numbers)
    into.paired += len(numbers)
    order = np.argsort(at_a)  # as the rows of A lie
    numbers, rows_a, rows_b = numbers[order], rows_a[at_a[order]], rows_b[at_b[order]]
    step = max(1, _CHUNK // max(1, *(it.row_bytes for it in common), 1))
    for begin in range(0, len(numbers), step):
        piece = slice(begin, begin + step)
        _compare_chunk(left, right, numbers[piece], rows_a[piece], rows_b[piece], common, into)


def _compare_chunk(
    left: _Rank, right: _Rank, numbers: Numbers, rows_a: Numbers, rows_b: Numbers, common: Sequence[_Common], into: Rows
) -> None:
    differing = {}
    order = np.argsort(rows_b)
    back = np.argsort(order)
    for it in common:
        there = right.bytes_of(it.in_b, rows_b[order])[back]
        differing[it.name] = (left.bytes_of(it.in_a, rows_a) != there).any(1)
    expected = ((numbers.astype(np.uint64) << np.uint64(2)) | np.uint64(_COMMITTED)) << np.uint64(1)
    same_rows = (left.words[rows_a] << np.uint64(1) == expected) & (right.words[rows_b] << np.uint64(1) == expected)
    found = np.zeros(len(numbers), bool)
    for name, which in differing.items():
        which &= same_rows
        found |= which
        if which.any():
            into.by_field[name] = into.by_field.get(name, 0) + int(which.sum())
    into.moved += len(numbers) - int(same_rows.sum())
    into.differ += int(found.sum())
    into.first.extend(numbers[found][: _NAMED - len(into.first)].tolist())
