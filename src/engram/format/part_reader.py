"""Reading a part: nothing is believed before it was compared, nothing is mapped, and nothing is ever written."""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from engram.errors import CorruptCheckpoint
from engram.format import description, disk, files, layout, strict, sums, tables
from engram.format.description import PART, SUMS, ArrayInfo, Geometry, Part, PartField, segment_layout
from engram.format.problems import Problem, corrupt, no_file, problem_of, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from typing_extensions import Buffer

__all__ = ["Level", "PartReader", "is_part"]

Level = Literal["meta", "read", "full"]

#: Files that a reader keeps open.
MAX_OPEN = 2

_CHUNK = 1 << 20


def is_part(folder: Path) -> bool:
    """Whether a part lies there."""
    return (folder / PART).is_file() or (folder / layout.FOLDER / PART).is_file()


class _File(NamedTuple):
    bytes: int
    sums_at: int


class PartReader:
    """One part, open for reading. Also a context manager. For one thread at a time.

    The constructor reads and checks the description; ``open`` also looks at the size of every file.

    Args:
        folder: where the part lies; it may be reached through links, nothing in it may be one.
        expected_sha256: of its ``part.json``; None: not known.
        folder_fd: the open folder, which the reader then closes; None: it is opened.

    Raises:
        CorruptCheckpoint: ``part.json``, ``sums.bin`` or the table of segments is missing, damaged or impossible.
        IncompatibleCheckpoint: written by a newer engram.
    """

    def __init__(
        self, folder: Path, expected_sha256: str | None = None, folder_fd: files.Descriptor | None = None
    ) -> None:
        self.folder = folder
        self._open: OrderedDict[str, files.Descriptor] = OrderedDict()
        self._checked: dict[str, bytearray] = {}
        self._segments: list[tables.Segment] = []
        try:
            self.folder_fd = disk.open_folder(folder) if folder_fd is None else folder_fd
        except (FileNotFoundError, NotADirectoryError) as error:
            raise corrupt(folder, "expected the folder of a part, found none") from error
        try:
            self._describe(expected_sha256)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, folder: Path, expected_sha256: str | None = None, folder_fd: files.Descriptor | None = None) -> Self:
        """A reader of a part whose files are all there, with their exact sizes.

        Raises:
            CorruptCheckpoint: they are not, or as the constructor.
        """
        reader = cls(folder, expected_sha256, folder_fd)
        try:
            for problem in reader.misfits():
                raise corrupt(*problem)
        except BaseException:
            reader.close()
            raise
        return reader

    def again(self) -> Self:
        """Another one of the same part, for another thread. Raises as the constructor."""
        return type(self)(self.folder, self.sha256, files.Descriptor.copy_of(self.folder_fd))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files. A second call does nothing."""
        while self._open:
            self._open.popitem()[1].close()
        self.folder_fd.close()

    # -- what there is --

    @property
    def part(self) -> str:
        return self._part.part

    @property
    def type(self) -> str:
        """Which class wrote it. To be looked up, never imported."""
        return self._part.type

    @property
    def name(self) -> str:
        return self._part.name

    @property
    def state(self) -> dict[str, Any]:
        """The component's state; an array in it is ``{"$array": number}``."""
        return self._part.state

    @property
    def geometry(self) -> Geometry | None:
        return None if self._part.geometry is msgspec.UNSET else self._part.geometry

    @property
    def schema(self) -> tuple[PartField, ...] | None:
        """Fields of the rows; None: not a storage of rows."""
        return None if self._part.schema is msgspec.UNSET else self._part.schema

    @property
    def schema_sum(self) -> str | None:
        return None if self._part.schema_sum is msgspec.UNSET else self._part.schema_sum

    @property
    def segment_rows(self) -> int | None:
        """Rows of a whole segment; None: the rows lie flat, in a file per field."""
        return None if self._part.segment is msgspec.UNSET else self._part.segment.rows

    @property
    def arrays(self) -> tuple[ArrayInfo, ...]:
        return self._part.arrays

    def array(self, number: int) -> ArrayInfo:
        """Dtype, shape and size of an array of the state."""
        return self._part.arrays[number]

    @property
    def records(self) -> dict[str, int]:
        """Records of each table of a storage."""
        entries = self._part.tables
        return {} if entries is msgspec.UNSET else {name: table.records for name, table in entries.items()}

    @property
    def files(self) -> dict[str, int]:
        """Bytes of every file that has sums, by its path in the folder."""
        return {name: file.bytes for name, file in self._files.items()}

    def sums_of(self, relative: str) -> tuple[int, sums.Sums]:
        """Size and sums of a file. Raises ``KeyError``."""
        file = self._files[relative]
        return file.bytes, self._sums[file.sums_at : file.sums_at + sums.blocks_of(file.bytes)]

    def field_file(self, field: int) -> str:
        """The path of a field's rows in a flat storage."""
        assert self.schema is not None
        return description.field_name(self.schema[field])

    def array_file(self, number: int) -> str:
        """The path of an array of the state."""
        return description.array_name(description.prefix(self.part), number)

    def table_file(self, table: str) -> str:
        """The path of a table of a storage."""
        return description.table_name(table)

    def bytes_of(self, file: str) -> int:
        """Size of a file, by its path in the folder."""
        return self._files[file].bytes

    # -- bytes --

    def read(self, file: str | int, offset: int, into: Buffer, *, verify: bool = True) -> None:
        """Fill ``into`` with bytes of a file; each block of 256 KiB is checked when it is first read.

        Args:
            file: a path as ``files`` has it, or the number of an array.
            offset: of the first byte.
            into: writable, C-contiguous. After an error its content is undefined.
            verify: False: bytes are taken as they are.

        Raises:
            CorruptCheckpoint: a block has another sum, or the file has become shorter; names file and byte.
            KeyError: there is no such file.
            ValueError: beyond the end of the file.
            OSError: an I/O error.
        """
        name = self.array_file(file) if isinstance(file, int) else file
        size = self._files[name].bytes
        view = memoryview(into)
        end = offset + view.nbytes
        if offset < 0 or end > size:
            raise ValueError(f"{self.folder / name}: expected bytes in [0, {size}), got [{offset}, {end}).")
        if not view.nbytes:
            return
        view = view.cast("B")
        if not verify:
            self._fill(name, view, offset)
            return
        for begin in range(offset // _CHUNK * _CHUNK, end, _CHUNK):
            self._read_chunk(name, view, offset, begin, min(begin + _CHUNK, size))

    def read_all(self, file: str | int) -> bytearray:
        """All bytes of a file. Raises as ``read``."""
        name = self.array_file(file) if isinstance(file, int) else file
        raw = bytearray(self._files[name].bytes)
        self.read(name, 0, raw)
        return raw

    def lanes(self) -> list[tables.Lane]:
        """The lanes of a storage. Raises as ``read``, and ``CorruptCheckpoint`` for a lane that no store has."""
        geometry = self.geometry
        assert geometry is not None
        name = description.table_name("lanes")
        try:
            return tables.unpack_lanes(self.read_all(name), geometry.lane_length)
        except ValueError as error:
            raise corrupt(self.folder / name, str(error)) from error

    def trajectories(self) -> Iterator[tables.Trajectory]:
        """The trajectories of a storage, read in pieces of 1 MiB. Raises as ``lanes``, when it comes there."""
        geometry = self.geometry
        assert geometry is not None
        name = description.table_name("trajectories")
        size = self._files[name].bytes
        piece = _CHUNK // tables.RECORD_BYTES["trajectories"] * tables.RECORD_BYTES["trajectories"]
        last: tables.Trajectory | None = None
        for at in range(0, size, piece):
            raw = bytearray(min(piece, size - at))
            self.read(name, at, raw)
            try:
                for it in tables.unpack_trajectories(raw, geometry.lanes, math.prod(geometry.columns), last):
                    yield it
                    last = it
            except ValueError as error:
                raise corrupt(self.folder / name, str(error), at) from error

    def segments(self) -> list[tables.Segment]:
        """The segments of a storage, by lane and number."""
        return list(self._segments)

    def segment_file(self, segment: tables.Segment) -> str:
        """The path of a segment."""
        return description.segment_name(segment.lane, segment.k)

    # -- checks --

    def misfits(self) -> Iterator[Problem]:
        """Files that are missing, not regular or of another size."""
        for (name, file), size in zip(self._files.items(), disk.sizes(self.folder_fd, self._files), strict=True):
            if isinstance(size, OSError):
                yield Problem(self.folder / name, no_file(size, file.bytes))
            elif size != file.bytes:
                yield Problem(self.folder / name, f"expected {file.bytes} bytes, got {size}")

    def damage(self) -> Iterator[Problem]:
        """Files with a block that has another sum: the first such block of each. Reads everything."""
        chunk = memoryview(bytearray(4 * _CHUNK))
        for name, file in self._files.items():
            its_sums = self.sums_of(name)[1]
            wrong = 0
            first: Problem | None = None
            for at in range(0, file.bytes, len(chunk)):
                piece = chunk[: min(len(chunk), file.bytes - at)]
                try:
                    self._fill(name, piece, at)
                except CorruptCheckpoint as error:
                    first, wrong = first or problem_of(error), wrong + 1
                    break
                number = at // sums.BLOCK
                while (found := sums.first_wrong(piece[number * sums.BLOCK - at :], its_sums, number)) is not None:
                    first, wrong = first or self._wrong_block(name, found), wrong + 1
                    number = found + 1
            if first is not None:
                yield (
                    first
                    if wrong == 1
                    else first._replace(what=f"{first.what}; {wrong} blocks of this file are damaged")
                )

    def strangers(self) -> Iterator[Problem]:
        """What lies in the folder and is no file of the part."""
        prefix = description.prefix(self.part)
        known = {*self._files, f"{prefix}{PART}", f"{prefix}{SUMS}"}
        folders = {parent.as_posix() for name in known for parent in Path(name).parents}
        for name, is_folder in disk.entries(self.folder_fd):
            if name not in (folders if is_folder else known):
                yield Problem(self.folder / name, "expected nothing here: the part does not list it")

    def problems(self, level: Level) -> Iterator[Problem]:
        """All that is wrong, each file named once. ``meta``: sizes. ``read``: every block too. ``full``: and strangers."""
        named: set[Path] = set()
        looks = {"meta": [self.misfits], "read": [self.misfits, self.damage]}
        for look in looks.get(level, [self.misfits, self.damage, self.strangers]):
            for problem in look():
                if problem.path not in named:
                    named.add(problem.path)
                    yield problem

    def verify(self) -> None:
        """Read and check everything; whatever else lies in the folder is an error too.

        Raises:
            CorruptCheckpoint: the first thing that is wrong.
        """
        for problem in self.problems("full"):
            raise corrupt(*problem)

    # -- inside --

    def _holds(self, name: str) -> bool:
        """Whether something is called that in the folder, wherever that lies by now."""
        try:
            os.stat(name, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _describe(self, expected_sha256: str | None) -> None:
        hidden = f"{layout.FOLDER}/{PART}"
        in_sight = self._holds(PART) or not self._holds(layout.FOLDER)
        name = PART if in_sight else hidden
        path = self.folder / name
        raw = read_small(self.folder, self.folder_fd, name, strict.MAX_BYTES)
        digest = hashlib.sha256(raw).hexdigest()
        if expected_sha256 is not None and digest != expected_sha256:
            raise corrupt(path, f"expected the sha256 {expected_sha256} that shard.json names, got {digest}")
        self.sha256 = digest
        self._part = Part.decode(raw, path)
        try:
            description.check(self._part)
            if (name == hidden) != (self._part.part == "storage"):
                raise ValueError(f"a {self._part.part} that lies where no {self._part.part} is kept")
        except ValueError as error:
            raise corrupt(path, str(error)) from error
        self._read_sums()
        self._files: dict[str, _File] = {}
        at = 0
        for found in self._entries():
            if found[2] != at:
                raise corrupt(path, f"expected the sums of {found[0]} at {at}, got {found[2]}")
            at += sums.blocks_of(found[1])
            self._files[found[0]] = _File(found[1], found[2])
        if at != len(self._sums):
            raise corrupt(path, f"expected {at} sums, got {len(self._sums)}")

    def _read_sums(self) -> None:
        name = f"{description.prefix(self._part.part)}{SUMS}"
        entry = self._part.sums
        raw = read_small(self.folder, self.folder_fd, name, entry.bytes, exactly=True)
        digest = hashlib.sha256(raw).hexdigest()
        if digest != entry.sha256:
            raise corrupt(self.folder / name, f"expected the sha256 {entry.sha256} that {PART} names, got {digest}")
        self._sums = sums.unpack(raw)

    def _entries(self) -> Iterator[tuple[str, int, int]]:
        """Path, size and first sum of every file, as the description has them. Segments are checked here."""
        part = self._part
        for i, array in enumerate(part.arrays):
            yield description.array_name(description.prefix(part.part), i), array.bytes, array.sums_at
        if part.storage is not msgspec.UNSET and part.schema is not msgspec.UNSET:
            for file in part.storage:
                if file.meta is not msgspec.UNSET:
                    yield description.meta_name(file.meta), file.bytes, file.sums_at
                elif file.field is not msgspec.UNSET:
                    yield description.field_name(part.schema[file.field]), file.bytes, file.sums_at
        if part.tables is not msgspec.UNSET:
            for table in tables.RECORD_BYTES:
                if entry := part.tables.get(table):  # type: ignore[call-overload]
                    yield description.table_name(table), entry.bytes, entry.sums_at
        if part.segment is not msgspec.UNSET:
            self._segments = self._checked_segments()
            yield from ((self.segment_file(it), it.nbytes, it.sums_at) for it in self._segments)

    def _checked_segments(self) -> list[tables.Segment]:
        name = description.table_name("segments")
        try:
            segments = list(tables.unpack_segments(self.read_all(name) if name in self._files else b""))
        except ValueError as error:
            raise corrupt(self.folder / name, str(error)) from error
        schema, g, size = self._part.schema, self._part.geometry, self._part.segment
        assert schema is not msgspec.UNSET
        assert g is not msgspec.UNSET
        assert size is not msgspec.UNSET
        sizes: dict[int, int] = {}
        total = 0
        for it in segments:
            begin = it.lane * g.lane_length + it.k * size.rows
            end = min(begin + size.rows, (it.lane + 1) * g.lane_length)
            if it.lane >= g.lanes or not (begin <= it.first_row and 1 <= it.rows <= end - it.first_row):
                raise corrupt(
                    self.folder / name,
                    f"expected rows of [{begin}, {end}) in segment {it.lane}-{it.k}, got {it.rows} from {it.first_row}",
                )
            if it.rows not in sizes:
                sizes[it.rows] = segment_layout(schema, it.rows)[1]
            if it.nbytes != sizes[it.rows]:
                raise corrupt(
                    self.folder / name,
                    f"expected {sizes[it.rows]} bytes of {it.rows} rows in segment {it.lane}-{it.k}, got {it.nbytes}",
                )
            total += it.rows
        if total != self.records["tickets"]:
            raise corrupt(self.folder / name, f"expected {self.records['tickets']} rows, got {total}")
        return segments

    def _fill(self, name: str, view: memoryview, offset: int) -> None:
        fd = self._open.get(name)
        if fd is None:
            try:
                fd = disk.open_file(self.folder_fd, name)
            except OSError as error:
                raise corrupt(self.folder / name, no_file(error, self._files[name].bytes)) from error
            self._open[name] = fd
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        read = disk.read(fd, view, offset)
        if read != len(view):
            raise corrupt(
                self.folder / name, f"expected {self._files[name].bytes} bytes, the file ends here", offset + read
            )

    def _read_chunk(self, name: str, view: memoryview, offset: int, begin: int, stop: int) -> None:
        """The bytes of [begin, stop) that are wanted, where ``view`` begins at ``offset``. ``begin``: of a block."""
        first, last = begin // sums.BLOCK, sums.blocks_of(stop)
        seen = self._checked.setdefault(name, bytearray(sums.blocks_of(self._files[name].bytes)))
        wanted = slice(max(begin, offset), min(stop, offset + len(view)))
        target = view[wanted.start - offset : wanted.stop - offset]
        # Only blocks that are touched, and whole ones: the wanted bytes alone have no sum.
        first = wanted.start // sums.BLOCK
        last = sums.blocks_of(wanted.stop)
        if all(seen[first:last]):
            self._fill(name, target, wanted.start)
            return
        begin, stop = first * sums.BLOCK, min(last * sums.BLOCK, self._files[name].bytes)
        whole = target if (begin, stop) == (wanted.start, wanted.stop) else memoryview(bytearray(stop - begin))
        self._fill(name, whole, begin)
        wrong = sums.first_wrong(whole, self.sums_of(name)[1], first)
        if wrong is not None:
            raise corrupt(*self._wrong_block(name, wrong))
        seen[first:last] = b"\1" * (last - first)
        if whole is not target:
            target[:] = whole[wanted.start - begin : wanted.stop - begin]

    def _wrong_block(self, name: str, block: int) -> Problem:
        expected = self.sums_of(name)[1][block]
        return Problem(
            self.folder / name, f"expected the checksum {expected:016x} of a block, got another", block * sums.BLOCK
        )
