"""Reads a part. Every byte is compared with its checksum; no file is mapped or written."""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from bisect import bisect_right
from itertools import accumulate, count, pairwise
from pathlib import Path
from struct import iter_unpack
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from msgspec import UNSET

from engram._support.closing import Closes
from engram.errors import CorruptCheckpoint
from engram.format import layout, strict
from engram.format.files import Descriptor
from engram.format.schema import SPAN_BYTES, PartField
from engram.saved import description, disk, folder
from engram.saved.description import PART, SUMS, Geometry, Part, Sums, segment_layout, wrong_block
from engram.saved.documents import Problem, corrupt, misfits, no_file, open_folder, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer


#: States of the tickets of rows that are whole, and of those that hold nothing.
COMMITTED, VOID = 2, 3
#: Behind all offsets.
_NOWHERE = 1 << 63


class SummedFile(NamedTuple):
    """A file whose sums are known."""

    bytes: int
    #: Number of its first sum.
    sums_at: int


class Listing(NamedTuple):
    """A part's description, and the files that follow from it. Never changes, so that readers can share it."""

    document: Part
    #: Of ``part.json``.
    sha256: str
    #: Bytes of every file, by its path in the folder.
    sizes: dict[str, int]
    #: All but ``part.json`` and ``sums.bin``, in the order of their sums.
    files: dict[str, SummedFile]
    sums: Sums
    segments: list[description.Segment]
    pieces: list[description.ItemsPiece]
    #: Bytes of a block, of files whose blocks are not of the usual size.
    blocks: dict[str, int]

    def sums_of(self, relative: str) -> Sums:
        """The sums of a file. Raises ``KeyError``."""
        file = self.files[relative]
        blocks = description.blocks_of(file.bytes, self.blocks.get(relative, description.BLOCK))
        return self.sums[file.sums_at : file.sums_at + blocks]


def read_listing(folder: Path, folder_fd: int, expected_sha256: str | None = None) -> Listing:
    """Read and check the description of a part.

    Args:
        folder: where the part lies, for messages.
        folder_fd: the open folder.
        expected_sha256: of its ``part.json``; None: not known.

    Raises:
        CorruptCheckpoint: ``part.json``, ``sums.bin`` or the table of segments is missing, damaged or impossible.
        IncompatibleCheckpoint: written by a newer engram.
    """
    is_hidden = not _holds(folder_fd, PART) and _holds(folder_fd, layout.FOLDER)
    prefix = f"{layout.FOLDER}/" if is_hidden else ""
    name, name_of_sums = f"{prefix}{PART}", f"{prefix}{SUMS}"
    try:
        own_fd = disk.open_below(folder_fd, layout.FOLDER) if is_hidden else folder_fd
    except OSError as error:
        raise corrupt(folder / name, no_file(error)) from error
    own = folder / layout.FOLDER if is_hidden else folder
    raw = read_small(own, own_fd, PART, strict.MAX_BYTES)
    digest = hashlib.sha256(raw).hexdigest()
    if expected_sha256 is not None and digest != expected_sha256:
        raise corrupt(folder / name, f"expected the sha256 {expected_sha256} that shard.json names, got {digest}")
    part = Part.decode(raw, f"{folder}/{name}")
    try:
        description.check(part)
        if prefix != description.prefix(part.part):
            raise ValueError(f"a {part.part} that lies where no {part.part} is kept")
    except ValueError as error:
        raise corrupt(folder / name, str(error)) from error
    raw_sums = read_small(own, own_fd, SUMS, part.sums.bytes, exactly=True)
    found = hashlib.sha256(raw_sums).hexdigest()
    if found != part.sums.sha256:
        raise corrupt(folder / name_of_sums, f"expected the sha256 {part.sums.sha256} that {PART} names, got {found}")
    listing = Listing(part, digest, {}, dict(_described(part)), array("Q", raw_sums), [], [], {})
    if part.part == "storage":
        _list_tables(folder, folder_fd, listing)
    at = 0
    for file, (nbytes, sums_at) in listing.files.items():
        if sums_at != at:
            raise corrupt(folder / name, f"expected the sums of {file} at {at}, got {sums_at}")
        at += -(-nbytes // listing.blocks.get(file, description.BLOCK))
        listing.sizes[file] = nbytes
    listing.sizes.update({name: len(raw), name_of_sums: len(raw_sums)})
    if at != len(listing.sums):
        raise corrupt(folder / name, f"expected {at} sums, got {len(listing.sums)}")
    return listing


def _list_tables(folder: Path, folder_fd: int, listing: Listing) -> None:
    """Add the files that tables name."""
    part = listing.document
    if part.segment is not UNSET:
        listing.segments.extend(_segments(folder, folder_fd, listing))
        for it in listing.segments:
            listing.files[it.name] = SummedFile(it.nbytes, it.sums_at)
    if part.tables is not UNSET and "items" in part.tables:
        listing.pieces.extend(_pieces(folder, folder_fd, listing))
        for piece in listing.pieces:
            listing.files[piece.name] = SummedFile(piece.nbytes, piece.sums_at)
        listing.blocks.update(description.blocks_of_pieces(listing.pieces) if part.version[0] > 2 else {})


def _holds(folder_fd: int, name: str) -> bool:
    """Whether something is called that in the folder, wherever that lies by now."""
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _described(part: Part) -> Iterator[tuple[str, SummedFile]]:
    """All files but segments."""
    prefix = description.prefix(part.part)
    for i, info in enumerate(part.arrays):
        yield description.array_name(prefix, i), SummedFile(info.bytes, info.sums_at)
    if part.storage is not UNSET and part.schema is not UNSET:
        for file in part.storage:
            if file.meta is not UNSET:
                yield description.meta_name(file.meta), SummedFile(file.bytes, file.sums_at)
            elif file.field is not UNSET:
                yield description.field_name(part.schema[file.field]), SummedFile(file.bytes, file.sums_at)
    if part.tables is not UNSET:
        for table, name in description.TABLE_FILES.items():
            if entry := part.tables.get(table):
                yield name, SummedFile(entry.bytes, entry.sums_at)


def _table(folder: Path, folder_fd: int, listing: Listing, name: str) -> bytes:
    """A table, whose blocks have their sums."""
    raw = read_small(folder, folder_fd, name, listing.files[name].bytes, exactly=True)
    expected = listing.sums_of(name)
    if (wrong := description.first_wrong(raw, expected, 0)) is not None:
        raise corrupt(*wrong_block(folder / name, expected, wrong))
    return raw


def _pieces(folder: Path, folder_fd: int, listing: Listing) -> Iterator[description.ItemsPiece]:
    """The table of items, checked."""
    part = listing.document
    assert part.schema is not UNSET  # description.check
    assert part.geometry is not UNSET
    name = description.TABLE_FILES["items"]
    groups = description.as_schema(part.schema, part.geometry).ragged_groups
    fields = {group.leader: description.piece_fields(part.schema, group.leader) for group in groups}
    try:
        for it in description.unpack_pieces(_table(folder, folder_fd, listing, name)):
            if it.lane >= part.geometry.lanes or it.leader not in fields:
                raise ValueError(f"expected items of {part.geometry.lanes} lanes and fields {[*fields]}, got {it}")
            size = segment_layout(fields[it.leader], it.items)[1]
            if it.nbytes != size:
                raise ValueError(f"expected {size} bytes of {it.items} items, got {it}")
            yield it
    except ValueError as error:
        raise corrupt(folder / name, str(error)) from error


def _segments(folder: Path, folder_fd: int, listing: Listing) -> Iterator[description.Segment]:
    """The table of segments, checked."""
    part = listing.document
    assert part.schema is not UNSET  # description.check
    assert part.geometry is not UNSET
    assert part.segment is not UNSET
    assert part.tables is not UNSET
    name = description.TABLE_FILES["segments"]
    raw = _table(folder, folder_fd, listing, name)
    length, rows = part.geometry.lane_length, part.segment.rows
    sizes: dict[int, int] = {}
    total = 0
    try:
        for it in description.unpack_segments(raw):
            begin = it.lane * length + it.k * rows
            end = min(begin + rows, (it.lane + 1) * length)
            if it.lane >= part.geometry.lanes or not (begin <= it.first_row and 1 <= it.rows <= end - it.first_row):
                raise ValueError(
                    f"expected rows of [{begin}, {end}) in segment {it.lane}-{it.k}, got {it.rows} from {it.first_row}"
                )
            if it.rows not in sizes:
                sizes[it.rows] = segment_layout(part.schema, it.rows)[1]
            if it.nbytes != sizes[it.rows]:
                raise ValueError(
                    f"expected {sizes[it.rows]} bytes of {it.rows} rows in segment {it.lane}-{it.k}, got {it.nbytes}"
                )
            total += it.rows
            yield it
        in_table = 0 if part.version[0] > 1 else total
        if in_table != part.tables["tickets"].records:
            raise ValueError(f"expected {in_table} tickets in their table, got {part.tables['tickets'].records}")
    except ValueError as error:
        raise corrupt(folder / name, str(error)) from error


Level = Literal["meta", "read", "full"]

_CHUNK = 1 << 20
#: Shorter reads are not told of: there are few.
_COUNTED = 1 << 16


def is_part(folder: Path) -> bool:
    """Whether a part lies there."""
    return (folder / PART).is_file() or (folder / layout.FOLDER / PART).is_file()


class PartReader(Closes):
    """A part, open for reading. Also a context manager. For one thread at a time.

    The constructor reads and checks the description; ``open`` also looks at the size of every file.

    Args:
        folder: where the part lies; it may be reached through links, nothing in it may be one.
        expected_sha256: of its ``part.json``; None: not known.
        folder_fd: the open folder, which the reader then closes; None: it is opened.
        listing: of this very part, which is then not read again.
        progress: called with how many bytes were read, a megabyte at a time. What it raises comes out of the call that reads.

    Raises:
        CorruptCheckpoint: ``part.json``, ``sums.bin`` or the table of segments is missing, damaged or impossible.
        IncompatibleCheckpoint: written by a newer engram.
    """

    def __init__(
        self,
        folder: Path,
        expected_sha256: str | None = None,
        folder_fd: Descriptor | None = None,
        listing: Listing | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.folder, self._progress = folder, progress
        # What was opened last, by name; both close when others take their places.
        self._file: tuple[str, Descriptor] | None = None
        self._checked: dict[str, bytearray] = {}
        #: What is read does not stay in the kernel's memory, where rows are that others draw.
        self.behind = False
        self._below: tuple[str, Descriptor] | None = None
        self.folder_fd = open_folder(folder, "a part") if folder_fd is None else folder_fd
        try:
            self.listing = read_listing(folder, self.folder_fd, expected_sha256) if listing is None else listing
        except BaseException:
            self.close()
            raise
        part = self.listing.document
        self.part, self.name = part.part, part.name
        #: Which class wrote it. To be looked up, never imported.
        self.type = part.type
        #: The component's state; an array in it is ``{"$array": number}``.
        self.state = part.state
        self.arrays = part.arrays
        self.geometry: Geometry | None = part.geometry or None
        #: Fields of the rows; None: not a storage of rows.
        self.schema: tuple[PartField, ...] | None = part.schema or None
        self.schema_sum: str | None = part.schema_sum or None
        #: Whether segments begin with the tickets of their rows.
        self.has_tickets_within = part.version[0] > 1  # as checked
        #: Rows of a whole segment; None: the rows lie flat, in a file per field.
        self.segment_rows: int | None = part.segment.rows if part.segment else None

    @classmethod
    def open(cls, folder: Path, expected_sha256: str | None = None, folder_fd: Descriptor | None = None) -> Self:
        """A reader of a part whose files are all there, with their exact sizes.

        Raises:
            CorruptCheckpoint: they are not, or as the constructor.
        """
        return cls(folder, expected_sha256, folder_fd).complete()

    def complete(self) -> Self:
        """This reader, if all files are there with their exact sizes. Raises ``CorruptCheckpoint``, and closes it: they are not."""
        try:
            for problem in self.misfits():
                raise corrupt(*problem)
        except BaseException:
            self.close()
            raise
        return self

    def again(self) -> Self:
        """Another one of the same part, for another thread."""
        other = type(self)(self.folder, None, Descriptor.copy_of(self.folder_fd), self.listing, self._progress)
        other.behind = self.behind
        return other

    def close(self) -> None:
        """Close its files. A second call does nothing."""
        for opened in (self._file, self._below):
            if opened is not None:
                opened[1].close()
        self._file = self._below = None
        self.folder_fd.close()

    # -- what there is --

    @property
    def files(self) -> dict[str, int]:
        """Bytes of every file that has sums, by its path in the folder."""
        return {name: file.bytes for name, file in self.listing.files.items()}

    @property
    def records(self) -> dict[str, int]:
        """Records of each table of a storage."""
        return {name: table.records for name, table in (self.listing.document.tables or {}).items()}

    def array_file(self, number: int) -> str:
        """The path of an array of the state."""
        return description.array_name(description.prefix(self.part), number)

    # -- bytes --

    def read(self, file: str | int, offset: int, into: Buffer) -> None:
        """Fill ``into`` with bytes of a file; each block is checked when it is first read.

        Args:
            file: a path as ``files`` has it, or the number of an array.
            offset: of the first byte.
            into: writable, C-contiguous. After an error its content is undefined.

        Raises:
            CorruptCheckpoint: a block has another sum, or the file has become shorter; names file and byte.
            KeyError: there is no such file.
            ValueError: beyond the end of the file.
            OSError: an I/O error.
        """
        name = self.array_file(file) if isinstance(file, int) else file
        size = self.listing.files[name].bytes
        view = memoryview(into)
        end = offset + view.nbytes
        if offset < 0 or end > size:
            raise ValueError(f"{self.folder / name}: expected bytes in [0, {size}), got [{offset}, {end}).")
        if not view.nbytes:
            return
        view = view.cast("B")
        block = self.listing.blocks.get(name, description.BLOCK)
        step = max(_CHUNK // block, 1) * block
        for begin in range(offset // step * step, end, step):
            first, last = max(begin, offset), min(begin + step, end)
            self._read_checked(name, view[first - offset : last - offset], first)

    def read_all(self, file: str | int) -> bytearray:
        """All bytes of a file. Raises as ``read``."""
        name = self.array_file(file) if isinstance(file, int) else file
        raw = bytearray(self.listing.files[name].bytes)
        self.read(name, 0, raw)
        return raw

    def lanes(self) -> list[description.Lane]:
        """The lanes of a storage. Raises as ``read``, and ``CorruptCheckpoint`` for a lane that no store has."""
        assert self.geometry is not None
        name = description.TABLE_FILES["lanes"]
        try:
            return description.unpack_lanes(self.read_all(name), self.geometry.lane_length)
        except ValueError as error:
            raise corrupt(self.folder / name, str(error)) from error

    def trajectories(self) -> Iterator[description.Trajectory]:
        """The trajectories of a storage, read in pieces of 1 MiB. Raises as ``lanes``, when it comes there."""
        assert self.geometry is not None
        name = description.TABLE_FILES["trajectories"]
        size = self.listing.files[name].bytes
        piece = _CHUNK // description.RECORD_BYTES["trajectories"] * description.RECORD_BYTES["trajectories"]
        columns = math.prod(self.geometry.columns)
        last: description.Trajectory | None = None
        for at in range(0, size, piece):
            raw = bytearray(min(piece, size - at))
            self.read(name, at, raw)
            try:
                for it in description.unpack_trajectories(raw, self.geometry.lanes, columns, last):
                    yield it
                    last = it
            except ValueError as error:
                raise corrupt(self.folder / name, str(error), at) from error

    # -- checks --

    def misfits(self) -> Iterator[Problem]:
        """Files that are missing, not regular or of another size."""
        return misfits(self.folder, self.folder_fd, self.listing.sizes)

    def damage(self) -> Iterator[Problem]:
        """Files with a block that has another sum: the first such block of each. Reads everything."""
        yield from self._damage_beside()
        for name, file in self.listing.files.items():
            its_sums, block = self.listing.sums_of(name), self.listing.blocks.get(name, description.BLOCK)
            chunk = memoryview(bytearray(max(4 * _CHUNK // block, 1) * block))
            found: list[Problem] = []
            for at in range(0, file.bytes, len(chunk)):
                piece = chunk[: min(len(chunk), file.bytes - at)]
                try:
                    self._fill(name, piece, at)
                except CorruptCheckpoint as error:
                    found.append(problem_of(error))
                    break
                number = at // block
                while (
                    wrong := description.first_wrong(piece[number * block - at :], its_sums, number, block)
                ) is not None:
                    found.append(wrong_block(self.folder / name, its_sums, wrong, block))
                    number = wrong + 1
            if len(found) == 1:
                yield found[0]
            elif found:
                yield found[0]._replace(what=f"{found[0].what}; {len(found)} blocks of this file are damaged")

    def _damage_beside(self) -> Iterator[Problem]:
        """Files beside the part that are not as its state says."""
        number = folder.sums_array(self.state)
        if number is not None and 0 <= number < len(self.arrays):
            raw = bytearray(math.prod(self.arrays[number].shape))
            self.read(number, 0, memoryview(raw))
            yield from folder.damaged_files(self.folder, folder.listed_files(self.state), bytes(raw))

    def strangers(self) -> Iterator[Problem]:
        """What lies in the folder and is no file of the part."""
        known = self.listing.sizes | folder.listed_files(self.state)
        folders = {parent.as_posix() for name in known for parent in Path(name).parents}
        for name, is_folder in disk.entries(self.folder_fd):
            if name not in (folders if is_folder else known) and (self.part, name) != ("writer", folder.OF_WRITER):
                yield Problem(self.folder / name, "expected nothing here: the part does not list it")

    def misplaced(self, lane_length: int) -> Iterator[Problem]:
        """A row whose items are in no file that is listed, or also those of another row: the first such items."""
        pieces, places = self.listing.pieces, list[tuple[int, int, int, int]]()
        tickets = {it.begin: it for it in ticket_stretches(self)}
        for it in stretches(self):
            items = (self.schema or ())[it.field].ragged
            if items and items.is_leader:
                words, spans = (bytearray(size * (it.end - it.begin)) for size in (8, SPAN_BYTES))
                self.read(tickets[it.begin].file, tickets[it.begin].offset, words)
                self.read(it.file, it.offset, spans)
                rows = zip(count(it.begin), iter_unpack("<Q", words), iter_unpack("<qi", spans), strict=False)
                for row, (word,), (first, length) in rows:
                    if length and word & 3 == COMMITTED:
                        end = first + length if 0 < length <= items.max_length else _NOWHERE
                        places.append((row // lane_length, it.field, first, end))
        for own, after in pairwise([*sorted(places), (-1, -1, 0, 0)]):
            at = bisect_right(pieces, (*own[:3], _NOWHERE)) - 1
            there = any(it[:2] == own[:2] and own[3] <= it.end for it in pieces[at : at + 1])
            if not there or (after[:2] == own[:2] and after[2] < own[3]):
                where = f"lane {own[0]} by themselves, in a file that is listed, got some of field {own[1]} at {own[2]}"
                yield Problem(self.folder, f"expected items of each row of {where}")
                return

    def problems(self, level: Level) -> Iterator[Problem]:
        """All that is wrong, each file named once. ``meta``: sizes. ``read``: every block too. ``full``: and strangers.

        Where all bytes are as they were written, ``read`` and ``full`` also look whether rows have their items. That takes 150 bytes
        of memory for each row with ragged fields.
        """
        named: set[Path] = set()
        looks = {"meta": [self.misfits], "read": [self.misfits, self.damage]}
        for look in looks.get(level, [self.misfits, self.damage, self.strangers]):
            for problem in look():
                if problem.path not in named:
                    named.add(problem.path)
                    yield problem
        if level != "meta" and not named and self.geometry is not None:
            yield from self.misplaced(self.geometry.lane_length)

    def verify(self) -> None:
        """Read and check everything; whatever else lies in the folder is an error too.

        Raises:
            CorruptCheckpoint: the first thing that is wrong.
        """
        for problem in self.problems("full"):
            raise corrupt(*problem)

    # -- inside --

    def _fill(self, name: str, view: memoryview, offset: int) -> None:
        nbytes = self.listing.files[name].bytes
        try:
            fd = self._opened(name)
        except OSError as error:
            raise corrupt(self.folder / name, no_file(error, nbytes)) from error
        read = disk.read(fd, view, offset)
        if self.behind:
            disk.drop(fd, offset, read)
        if read != len(view):
            raise corrupt(self.folder / name, f"expected {nbytes} bytes, the file ends here", offset + read)
        if self._progress is not None and read >= _COUNTED:
            self._progress(read)

    def _opened(self, name: str) -> Descriptor:
        """The file, which stays open until another one is read, and its folder until one of another is."""
        if self._file is None or self._file[0] != name:
            parent, _, base = name.rpartition("/")
            if parent and (self._below is None or self._below[0] != parent):
                self._below = parent, disk.open_below(self.folder_fd, parent)
            folder_fd = self._below[1] if parent and self._below else self.folder_fd
            self._file = name, disk.open_file(folder_fd, base)
        return self._file[1]

    def _read_checked(self, name: str, target: memoryview, offset: int) -> None:
        """As :meth:`read`, of one chunk."""
        nbytes, block = self.listing.files[name].bytes, self.listing.blocks.get(name, description.BLOCK)
        seen = self._checked.get(name)
        if seen is None:
            seen = self._checked[name] = bytearray(description.blocks_of(nbytes, block))
        # Only blocks that are touched, and whole ones: the wanted bytes alone have no sum.
        end = offset + len(target)
        first, last = offset // block, len(seen) if end == nbytes else description.blocks_of(end, block)
        if all(seen[first:last]):
            self._fill(name, target, offset)
            return
        begin, stop = first * block, min(last * block, nbytes)
        is_whole = len(target) == stop - begin
        whole = target if is_whole else memoryview(bytearray(stop - begin))
        self._fill(name, whole, begin)
        its_sums = self.listing.sums_of(name)
        wrong = description.first_wrong(whole, its_sums, first, block)
        if wrong is not None:
            raise corrupt(*wrong_block(self.folder / name, its_sums, wrong, block))
        seen[first:last] = b"\1" * (last - first)
        if not is_whole:
            target[:] = whole[offset - begin :][: len(target)]


class Stretch(NamedTuple):
    """Rows of a field that lie in a file."""

    file: str
    #: Of the first row.
    offset: int
    field: int
    begin: int
    #: Which rows of the part.
    end: int


def stretches(reader: PartReader) -> Iterator[Stretch]:
    """Where all rows of a part lie."""
    fields = reader.schema or ()
    if reader.segment_rows is None:
        for number, field in enumerate(fields):
            yield Stretch(description.field_name(field), 0, number, 0, reader.records["tickets"])
        return
    for it in reader.listing.segments:
        name, end = it.name, it.end
        for number, offset in enumerate(description.segment_layout(fields, it.rows)[0]):
            yield Stretch(name, offset, number, it.first_row, end)


def ticket_stretches(reader: PartReader) -> list[Stretch]:
    """Where the tickets of all rows of a part lie. Their field is 0, which means nothing."""
    table, segments = description.TABLE_FILES["tickets"], reader.listing.segments
    if reader.segment_rows is None:
        return [Stretch(table, 0, 0, 0, reader.records["tickets"])]
    if reader.has_tickets_within:
        return [Stretch(it.name, 0, 0, it.first_row, it.end) for it in segments]
    before = accumulate((8 * it.rows for it in segments), initial=0)
    return [Stretch(table, at, 0, it.first_row, it.end) for it, at in zip(segments, before, strict=False)]
