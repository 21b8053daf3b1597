"""What a part holds: ``part.json``, the binary tables that it names, and the sums of all files.

::

    <part>/part.json       what there is: state, dtypes, shapes, sizes            <storage>/.engram/part.json  the same
    <part>/sums.bin        u64 per block of each file below, in order             <storage>/.engram/sums.bin
    <part>/000.bin, …      the arrays that the state names                        <storage>/.engram/000.bin, …
                                                                                  <storage>/.engram/lanes.bin, …
                                                                                  <storage>/<key>.memmap, meta.json
                                                                                  or <storage>/seg/<lane>-<k>.bin
                                                                  <storage>/.engram/items/<lane>-<field>-<offset>.bin

Names are computed from what ``part.json`` says, never read from it. Tables are records of fixed size, little-endian, without a
header; ``tickets`` is one too, of one u64 per stored row, whose words are read as an array. Sums are xxh3-64 of each block of
256 KiB, so that a reader of some blocks can check them: they find accidents, and do not prove who wrote a file. A file of items,
which is read whole, has at most four blocks: its sums are written again by each checkpoint that links it.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from array import array
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import xxhash

from engram.format import layout, strict
from engram.format.schema import DTYPES, MAX_DIMS, Field, Node, PartField, Schema, validate_fields, validate_geometry
from engram.saved import documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = [
    "HAS_FIRST",
    "HAS_LAST",
    "LINKED",
    "MAX_SEGMENTS",
    "MAX_TRAJECTORIES",
    "OPEN",
    "RECORD_BYTES",
    "TRUNCATED",
    "Lane",
    "Segment",
    "Trajectory",
    "pack_lanes",
    "pack_segments",
    "pack_trajectories",
    "unpack_lanes",
    "unpack_segments",
    "unpack_trajectories",
]

#: Bytes of a block, of a file with items at least; the last one of a file may be shorter.
BLOCK = 1 << 18

_ZEROS = bytes(BLOCK)
_SUM_OF_ZEROS: int = xxhash.xxh3_64_intdigest(_ZEROS)


Sums: TypeAlias = "array[int]"


def blocks_of(nbytes: int, block: int = BLOCK) -> int:
    """How many blocks a file of that many bytes has."""
    return -(-nbytes // block)


def block_of(name: str, nbytes: int) -> int:
    """Bytes of a block of a file, as it is written now. One of items has at most four."""
    return BLOCK * (max(1, blocks_of(nbytes, 4 * BLOCK)) if name.startswith(_ITEMS) else 1)


class Summing:
    """Computes the sums of a file whose bytes come in order, in pieces of any size. ``block``: bytes of each of its blocks."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block, self._sums = block, array("Q")
        self._open = xxhash.xxh3_64()
        self._filled = 0  # bytes of the block that is open

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes. ``data``: C-contiguous."""
        view = memoryview(data)
        at = self._complete(view)
        while len(view) - at >= self._block:
            self._sums.append(xxhash.xxh3_64_intdigest(view[at : at + self._block]))
            at += self._block
        if at < len(view):
            self._open.update(view[at:])
            self._filled += len(view) - at

    def zeros(self, nbytes: int) -> None:
        """Add zero bytes, of a file of rows. Cost: 8 bytes a block, none of them hashed."""
        assert self._block == BLOCK  # items have no holes
        first = min(nbytes, -self._filled % self._block)
        self.update(memoryview(_ZEROS)[:first])
        whole, rest = divmod(nbytes - first, self._block)
        self._sums.extend([_SUM_OF_ZEROS] * whole)
        self.update(memoryview(_ZEROS)[:rest])

    def done(self) -> Sums:
        """The sums of all blocks; the last one may be short. The object cannot be used afterwards."""
        if self._filled:
            self._sums.append(self._open.intdigest())
        return self._sums

    def _complete(self, view: memoryview) -> int:
        """Complete the open block. Returns how many bytes that took."""
        if not self._filled:
            return 0
        take = min(self._block - self._filled, len(view))
        self._open.update(view[:take])
        self._filled += take
        if self._filled == self._block:
            self._sums.append(self._open.intdigest())
            self._open.reset()
            self._filled = 0
        return take


def first_wrong(data: bytes | memoryview, sums: Sums, first: int, block: int = BLOCK) -> int | None:
    """The number of the first block whose bytes do not have its sum; None: all have.

    Args:
        data: bytes from the beginning of block ``first``; whole blocks, but for the last one of a file.
        sums: of all blocks of the file.
        first: number of a block.
        block: bytes of a block.
    """
    view = memoryview(data)
    for i in range(blocks_of(len(view), block)):
        if xxhash.xxh3_64_intdigest(view[i * block : (i + 1) * block]) != sums[first + i]:
            return first + i
    return None


def wrong_block(path: Path, sums: Sums, number: int, block: int = BLOCK) -> documents.Problem:
    """The problem of a block whose sum differs from the one in ``sums``."""
    return documents.Problem(path, f"expected the checksum {sums[number]:016x} of a block, got another", number * block)


#: Flags of a trajectory: its first live step carries a start mark; its last one an end; that end is a truncation; it goes on.
HAS_FIRST, HAS_LAST, TRUNCATED, OPEN = 1, 2, 4, 8
#: Kinds of trajectories, by which ends they still have (checkpoint format, "totals").
KINDS = ("complete", "open", "headless", "both", "mid", "orphan")
#: Flag of a segment: its file is also the parent's.
LINKED = 1

#: Where files with items lie.
_ITEMS = f"{layout.FOLDER}/items/"

MAX_SEGMENTS = 1 << 20
MAX_TRAJECTORIES = 1 << 31

#: Rows that were written by number, ahead of the cursor, lie before position 0.
_MAX_POSITION = 1 << 58

_LANE = struct.Struct("<4q")
_TRAJECTORY = struct.Struct("<5q")
_SEGMENT = struct.Struct("<IIqqqQqI12s")
_PADDING = bytes(12)
_PIECE = struct.Struct("<IIqqqqII")
#: Offsets of items are smaller.
_MAX_OFFSET = 1 << 61

#: Bytes of a record, by table.
RECORD_BYTES = {"lanes": _LANE.size, "tickets": 8, "trajectories": _TRAJECTORY.size, "segments": _SEGMENT.size}
RECORD_BYTES["items"] = _PIECE.size


class Lane(NamedTuple):
    """A lane at the snapshot."""

    next_position: int
    live_rows: int
    #: A trajectory has begun and not ended.
    is_open: bool


class Trajectory(NamedTuple):
    """Consecutive live steps of one lane. By lane and position in their table."""

    lane: int
    #: Position of the first live step.
    first: int
    #: Beyond the last one. With columns, positions step by their number.
    end: int
    #: Ticket number of the last row, or ``t_end`` of the lane's next trajectory if that is smaller.
    t_end: int
    flags: int


class Segment(NamedTuple):
    """Rows of one lane in a file of their own."""

    lane: int
    k: int
    first_row: int
    rows: int
    #: Of its file; these entries are filled in when it is written.
    nbytes: int = 0
    #: xxh3-64 of the saved tickets: an equal one means equal rows.
    tickets_sum: int = 0
    #: Number of its first sum in ``sums.bin``.
    sums_at: int = 0
    flags: int = 0

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first_row + self.rows

    @property
    def name(self) -> str:
        """Of its file."""
        return f"seg/{self.lane}-{self.k}.bin"


class ItemsPiece(NamedTuple):
    """Items of one lane and of fields that share lengths, in a file of their own. All items of a row are in one piece."""

    lane: int
    #: The number of the field that leads.
    leader: int
    #: The offset of the first item.
    first: int
    items: int
    #: Of its file; these entries are filled in when it is written.
    nbytes: int = 0
    #: Number of its first sum in ``sums.bin``.
    sums_at: int = 0
    flags: int = 0

    @property
    def end(self) -> int:
        """The offset behind the last item."""
        return self.first + self.items

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{_ITEMS}{self.lane}-{self.leader}-{self.first}.bin"


def pack_lanes(lanes: Iterable[Lane]) -> bytes:
    """The table of all lanes, in their order."""
    return b"".join(_LANE.pack(lane.next_position, lane.live_rows, lane.is_open, 0) for lane in lanes)


def unpack_lanes(raw: Buffer, lane_length: int) -> list[Lane]:
    """The lanes in a table. Raises ``ValueError`` for one that no store has."""
    lanes = []
    for i, (position, live, is_open, zero) in enumerate(_LANE.iter_unpack(memoryview(raw))):
        if position < 0 or not 0 <= live <= lane_length or is_open not in (0, 1) or zero:
            raise ValueError(
                f"lane {i}: expected a position, at most {lane_length} live rows, 0 or 1, and 0, "
                f"got {position}, {live}, {is_open}, {zero}"
            )
        lanes.append(Lane(position, live, bool(is_open)))
    return lanes


def pack_trajectories(trajectories: Iterable[Trajectory]) -> bytes:
    """Records in the order given, which must be that of the table."""
    return b"".join(_TRAJECTORY.pack(*trajectory) for trajectory in trajectories)


def unpack_trajectories(
    raw: Buffer, lanes: int, columns: int = 1, after: Trajectory | None = None
) -> Iterator[Trajectory]:
    """The trajectories in a table, or in a piece of one that follows the record ``after``.

    Raises:
        ValueError: one that no store has, or that is not in order; comes when it is reached.
    """
    for fields in _TRAJECTORY.iter_unpack(memoryview(raw)):
        it = Trajectory._make(fields)
        if not (0 <= it.lane < lanes and -_MAX_POSITION <= it.first < it.end and it.t_end >= 0 and 0 <= it.flags < 16):
            raise ValueError(f"expected a trajectory of one of {lanes} lanes, got {it}")
        if after is not None and not _follows(it, after, columns):
            raise ValueError(f"expected trajectories by lane and position, got {it} after {after}")
        after = it
        yield it


def pack_segments(segments: Iterable[Segment]) -> bytes:
    """Records in the order given, which must be that of the table."""
    return b"".join(_SEGMENT.pack(*segment, _PADDING) for segment in segments)


def unpack_segments(raw: Buffer) -> Iterator[Segment]:
    """The segments in a table, by lane and number. Raises ``ValueError`` for records that are not zero where they must be."""
    before = (-1, -1)
    for *fields, zeros in _SEGMENT.iter_unpack(memoryview(raw).cast("B")):
        it = Segment._make(fields)
        if zeros != _PADDING or it.flags & ~LINKED:
            raise ValueError(f"segment {it.lane}-{it.k}: expected flags 0 or {LINKED} and zeros, got {it.flags}")
        if (it.lane, it.k) <= before:
            raise ValueError(
                f"expected segments by lane and number, got {it.lane}-{it.k} after {before[0]}-{before[1]}"
            )
        before = (it.lane, it.k)
        yield it


def blocks_of_pieces(pieces: Iterable[ItemsPiece]) -> dict[str, int]:
    """Bytes of a block of each file of items, by its name."""
    return {name: block_of(name, piece.nbytes) for piece in pieces for name in [piece.name]}


def pack_pieces(pieces: Iterable[ItemsPiece]) -> bytes:
    """Records in the order given, which must be that of the table."""
    return b"".join(_PIECE.pack(*piece, 0) for piece in pieces)


def unpack_pieces(raw: Buffer) -> Iterator[ItemsPiece]:
    """The pieces in a table, by lane, leader and offset. Raises ``ValueError`` for records that no store has, or that overlap."""
    before = ItemsPiece(0, 0, 0, 0, 0, 0, 0)
    for *fields, zero in _PIECE.iter_unpack(memoryview(raw).cast("B")):
        it = ItemsPiece._make(fields)
        if zero or it.flags & ~LINKED or not (0 <= it.first < _MAX_OFFSET and 1 <= it.items < _MAX_OFFSET):
            raise ValueError(f"expected offsets of items, flags 0 or {LINKED}, and zero, got {it} and {zero}")
        if (it.lane, it.leader) < before[:2] or (it[:2] == before[:2] and it.first < before.end):
            raise ValueError(f"expected items by lane, field and offset, got {it} after {before}")
        before = it
        yield it


def _follows(it: Trajectory, before: Trajectory, columns: int) -> bool:
    if columns > 1:  # those of different columns lie between each other
        return (before.lane, before.first) < (it.lane, it.first)
    return before.lane < it.lane or (before.lane == it.lane and before.end <= it.first)


PART = "part.json"
SUMS = "sums.bin"
#: Each field begins at a multiple of that many bytes in a segment.
ALIGN: Literal[4096] = 4096
MAX_ARRAYS = 1 << 16
#: Sums of 2 TiB; they are kept in memory while a part is open.
MAX_SUMS_BYTES = 1 << 26

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
#: Of whatever is counted.
_LIMIT = 1 << 62
Size = Annotated[int, msgspec.Meta(ge=0, lt=_LIMIT)]

TableName = Literal["lanes", "tickets", "trajectories", "segments", "items"]
#: In the order of their sums.
TABLE_FILES: dict[TableName, str] = {table: f"{layout.FOLDER}/{table}.bin" for table in get_args(TableName)}


class ArrayInfo(msgspec.Struct, frozen=True):
    """An array of a part's state: so many bytes in C order, little-endian."""

    dtype: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPES)})\\Z")]
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
    bytes: int
    sums_at: int


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a flat storage: a field's rows, or TensorDict's ``meta.json`` of a level of the keys."""

    bytes: int
    sums_at: int
    field: int | msgspec.UnsetType = msgspec.UNSET
    meta: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class TableEntry(msgspec.Struct, frozen=True):
    """A table of a storage, as its part lists it."""

    records: Size
    bytes: int
    sums_at: int


class SumsEntry(msgspec.Struct, frozen=True):
    """The file with the sums of a part."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUMS_BYTES, multiple_of=8)]
    sha256: str


class Geometry(msgspec.Struct, frozen=True):
    """The sizes of a store."""

    capacity: int
    lanes: int
    lane_length: int
    columns: tuple[int, ...] = ()


class SegmentSize(msgspec.Struct, frozen=True):
    """The size of segments of a storage."""

    #: Rows of a whole segment; the last one of a lane may have fewer.
    rows: Annotated[int, msgspec.Meta(ge=1)]
    align: Literal[4096] = ALIGN


class Part(documents.Summed, frozen=True, kw_only=True):
    """``part.json``: the description of a part."""

    VERSIONS: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (2, 0), (3, 0))

    part: Annotated[str, msgspec.Meta(pattern=f"^{NAME.pattern}\\Z")]
    type: str
    name: str
    state: dict[str, object]
    arrays: Annotated[tuple[ArrayInfo, ...], msgspec.Meta(max_length=MAX_ARRAYS)]
    sums: SumsEntry
    geometry: Geometry | msgspec.UnsetType = msgspec.UNSET
    byteorder: Literal["little"] | msgspec.UnsetType = msgspec.UNSET
    schema: tuple[PartField, ...] | msgspec.UnsetType = msgspec.UNSET
    schema_sum: str | msgspec.UnsetType = msgspec.UNSET
    segment: SegmentSize | msgspec.UnsetType = msgspec.UNSET
    storage: tuple[FileEntry, ...] | msgspec.UnsetType = msgspec.UNSET
    tables: dict[TableName, TableEntry] | msgspec.UnsetType = msgspec.UNSET
    format: Literal["engram.part"] = "engram.part"


class _Fields(msgspec.Struct):
    """The fields that a sum is of."""

    schema: tuple[PartField, ...]


def schema_sum(fields: Sequence[PartField]) -> str:
    """xxh3-64 of the fields, as 16 hex digits."""
    return _sum_of(tuple(fields))


@functools.lru_cache(64)  # asked for several times in a save
def _sum_of(fields: tuple[PartField, ...]) -> str:
    return str(xxhash.xxh3_64_hexdigest(documents.encode(_Fields(fields))))


#: Of a storage without fields: a list, or one that was never written.
NO_SCHEMA = schema_sum(())


def with_tickets(fields: Sequence[PartField]) -> bool:
    """Whether segments begin with the tickets of their rows, so that the table of tickets is empty."""
    for field in fields:  # noqa: SIM110 - asked for every segment
        if field.ragged:
            return True
    return False


def segment_layout(fields: Sequence[PartField], rows: int) -> tuple[list[int], int]:
    """Where each field begins in a segment of that many rows, and how long the file is, in bytes.

    Where fields are ragged, the tickets of the rows come first: such rows are short, and a table of all tickets would be most of what a
    later checkpoint writes.
    """
    offsets, end = [], 0
    for field in fields:
        if field.ragged:  # as with_tickets, which is one call more of so many
            end = RECORD_BYTES["tickets"] * rows
            break
    for field in fields:
        begin = -(-end // ALIGN) * ALIGN
        offsets.append(begin)
        end = begin + rows * field.row_bytes
    return offsets, end


def prefix(part: str) -> str:
    """Where in its folder a part keeps what is not rows."""
    return f"{layout.FOLDER}/" if part == "storage" else ""


def array_name(prefix: str, number: int) -> str:
    return f"{prefix}{number:03d}.bin"


def spans_name(number: int) -> str:
    return f"{layout.FOLDER}/{number:03d}.spans"


def piece_fields(schema: Sequence[PartField], leader: int) -> list[PartField]:
    """The fields that share the lengths of this one, as if each item were a row."""
    return [
        PartField(field.id, field.key, it.dtype, it.shape)
        for field in schema
        if (it := field.ragged) and leader == (field.id if it.is_leader else it.like)
    ]


def field_name(field: PartField) -> str:
    """Of ragged fields the file is of spans, and lies where no other library looks for rows."""
    if field.ragged:
        return spans_name(field.id)
    return layout.field_name(field.key)


def as_schema(fields: Sequence[PartField], geometry: Geometry) -> Schema:
    """What a part says of its fields, without how rows are put together from them."""
    own = tuple([Field(it.key, it.dtype, it.shape, it.ragged or None) for it in fields])
    return Schema(geometry.capacity, geometry.lanes, geometry.columns, own, Node("leaf"))


def meta_name(level: tuple[str, ...]) -> str:
    return "/".join([*map(layout.encode_key, level), "meta.json"])


def levels(schema: Sequence[PartField]) -> list[tuple[str, ...]]:
    """Levels of the keys that have a ``meta.json``."""
    return sorted({field.key[:n] for field in schema for n in range(len(field.key))})


def file_entries(schema: Sequence[PartField], placed: Mapping[str, tuple[int, int]]) -> tuple[FileEntry, ...]:
    fields = [FileEntry(*file, field=field.id) for field in schema if (file := placed.get(field_name(field)))]
    metas = [FileEntry(*file, meta=level) for level in levels(schema) if (file := placed.get(meta_name(level)))]
    return (*fields, *metas)


def table_entries(placed: Mapping[str, tuple[int, int]]) -> dict[TableName, TableEntry]:
    """Of the tables that are there."""
    entries = {}
    for table, name in TABLE_FILES.items():
        if file := placed.get(name):
            entries[table] = TableEntry(file[0] // RECORD_BYTES[table], *file)
    return entries


def check(part: Part) -> None:
    """All that the types of ``Part`` cannot say, but for the places of sums. Raises ``ValueError``."""
    for number, info in enumerate(part.arrays):
        rows = math.prod(filter(None, info.shape))  # zeros count as ones: torch multiplies the other sizes too
        if rows >= _LIMIT or info.bytes != math.prod(info.shape) * DTYPES[info.dtype]:
            shape = f"{list(info.shape)!r:.200} of {info.dtype}"
            raise ValueError(f"array {number}: {info.bytes} bytes are not {shape}, or these are too many")
    _check_state(part.state, len(part.arrays))
    extras = (part.geometry, part.byteorder, part.schema, part.schema_sum, part.segment, part.storage, part.tables)
    if part.version[0] > 1 and not with_tickets(part.schema or ()):
        raise ValueError(f"expected ragged fields in a part of version {part.version[0]}.x, found none")
    if part.part != "storage":
        if extras.count(msgspec.UNSET) < len(extras):
            raise ValueError(f"a {part.part} with entries that only a storage has")
        return
    if part.tables is msgspec.UNSET:
        raise ValueError("a storage without tables")
    if part.geometry is not msgspec.UNSET:
        g = part.geometry
        validate_geometry(g.capacity, g.lanes, g.columns)
        if g.lanes * g.lane_length != g.capacity:
            raise ValueError(f"{g.lanes} lanes of {g.lane_length} rows are not the capacity {g.capacity}")
    _check_tables(part.tables, part.geometry)
    if part.schema is not msgspec.UNSET:
        _check_rows(part, part.schema)
    elif extras[1:-1].count(msgspec.UNSET) < len(extras) - 2:
        raise ValueError("a storage without a schema that has files of rows")


def _check_state(state: object, arrays: int) -> None:
    left = [("state", state)]
    for where, value in left:  # grows while it is read
        if isinstance(value, dict):
            for key, part in value.items():
                number = value.get("$array")
                known = len(value) == 1 and type(number) is int and 0 <= number < arrays
                if str(key).startswith("$") and not known:
                    raise ValueError(
                        f"{where}: expected {{'$array': number of one of {arrays} arrays}} where keys begin with '$', got {value!r:.100}"
                    )
                if isinstance(part, dict | list | tuple):
                    left.append((f"{where}.{key!s:.100}", part))
        elif isinstance(value, list | tuple):
            left += [(f"{where}[{i}]", part) for i, part in enumerate(value) if isinstance(part, dict | list | tuple)]


def _check_tables(entries: dict[TableName, TableEntry], geometry: Geometry | msgspec.UnsetType) -> None:
    most = {"trajectories": MAX_TRAJECTORIES, "segments": MAX_SEGMENTS, "items": MAX_SEGMENTS}
    if geometry is not msgspec.UNSET:
        most |= {"lanes": geometry.lanes, "tickets": geometry.capacity}
        if "lanes" in entries and entries["lanes"].records != geometry.lanes:
            raise ValueError(f"lanes: {entries['lanes'].records} records for {geometry.lanes} lanes")
    elif entries:
        raise ValueError("tables without a geometry")
    for name, table in entries.items():
        if table.records > most[name]:
            raise ValueError(f"{name}: {table.records} records, at most {most[name]} are possible")
        if table.bytes != table.records * RECORD_BYTES[name]:
            raise ValueError(f"{name}: {table.bytes} bytes are not {table.records} records")


def _check_rows(part: Part, schema: tuple[PartField, ...]) -> None:
    if part.geometry is msgspec.UNSET or part.byteorder is msgspec.UNSET:
        raise ValueError("a storage with a schema and without geometry or byteorder")
    if [field.id for field in schema] != list(range(len(schema))):
        raise ValueError(f"fields numbered {[field.id for field in schema][:20]}, expected 0, 1, …")
    validate_fields(schema, part.geometry.capacity)
    clash = layout.clash(schema)
    if clash is not None:
        raise ValueError(f"the fields need {clash!r:.200} as a file and as a folder")
    if part.schema_sum != schema_sum(schema):
        raise ValueError(f"expected the schema_sum {schema_sum(schema)}, got {part.schema_sum}")
    assert part.tables is not msgspec.UNSET  # _check
    if not {"lanes", "tickets"} <= set(part.tables):
        raise ValueError("a storage of rows without lanes or tickets")
    if bool(part.segment) == (part.storage is not msgspec.UNSET):
        raise ValueError("expected either storage or segment")
    is_ragged = with_tickets(schema)
    if is_ragged != ("items" in part.tables) or is_ragged != (part.version[0] > 1):
        raise ValueError("expected items where fields are ragged, and in a part of version 2.x or 3.x")
    if is_ragged:
        as_schema(schema, part.geometry).validate_ragged()
    if part.segment and part.segment.rows > part.geometry.lane_length:
        raise ValueError(f"segments of {part.segment.rows} rows in lanes of {part.geometry.lane_length}")
    if ("segments" in part.tables) != bool(part.segment):
        raise ValueError("segments without their table, or a table without segments")
    if part.storage is not msgspec.UNSET:
        _check_files(part.storage, schema, part.tables["tickets"].records)


def _check_files(files: tuple[FileEntry, ...], schema: tuple[PartField, ...], rows: int) -> None:
    if [file.field for file in files[: len(schema)]] != list(range(len(schema))):
        raise ValueError("expected a file for every field, in their order")
    for field, file in zip(schema, files, strict=False):
        if file.meta is not msgspec.UNSET or file.bytes != rows * field.row_bytes:
            raise ValueError(f"field {field.id}: {file.bytes} bytes are not {rows} rows of {field.row_bytes}")
    others = files[len(schema) :]
    found = [file.meta for file in others if file.meta is not msgspec.UNSET]
    if len(found) < len(others) or found != sorted(set(found) & set(levels(schema))):
        raise ValueError("files that are neither of a field nor the description of a level of the keys")
    if any(file.field is not msgspec.UNSET or not 0 <= file.bytes <= strict.MAX_BYTES for file in others):
        raise ValueError("a description of a level of the keys that is too long, or also a field")
