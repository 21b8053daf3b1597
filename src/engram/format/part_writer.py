"""Writes a part: its files in order, their sums, and last the description, which completes it."""

from __future__ import annotations

import hashlib
import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import UNSET

from engram.format import description, disk, files, layout, strict, sums, tables
from engram.format.description import PART, SUMS, ArrayInfo, Geometry, Part, SegmentSize, SumsEntry, segment_layout
from engram.format.problems import corrupt, no_file, read_small, wrong_block
from engram.format.schema import DTYPES, MAX_DIMS, PartField

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from engram.format.part_reader import PartReader
    from engram.format.sums import Sums


class SummedFile(NamedTuple):
    """A file whose sums are known."""

    bytes: int
    sums_at: int
    """Number of its first sum."""


class Listing(NamedTuple):
    """A part's description, and the files that follow from it. Never changes, so that readers can share it."""

    document: Part
    sha256: str
    """Of ``part.json``."""
    sizes: dict[str, int]
    """Bytes of every file, by its path in the folder."""
    files: dict[str, SummedFile]
    """All but ``part.json`` and ``sums.bin``, in the order of their sums."""
    sums: Sums
    segments: list[tables.Segment]

    def sums_of(self, relative: str) -> Sums:
        """The sums of a file. Raises ``KeyError``."""
        file = self.files[relative]
        return self.sums[file.sums_at : file.sums_at + sums.blocks_of(file.bytes)]


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
    listing = Listing(part, digest, {}, dict(_described(part)), sums.unpack(raw_sums), [])
    if part.segment is not UNSET:
        listing.segments.extend(_segments(folder, folder_fd, listing))
        for it in listing.segments:
            listing.files[description.segment_name(it.lane, it.k)] = SummedFile(it.nbytes, it.sums_at)
    at = 0
    for file, (nbytes, sums_at) in listing.files.items():
        if sums_at != at:
            raise corrupt(folder / name, f"expected the sums of {file} at {at}, got {sums_at}")
        at += -(-nbytes // sums.BLOCK)
        listing.sizes[file] = nbytes
    listing.sizes.update({name: len(raw), name_of_sums: len(raw_sums)})
    if at != len(listing.sums):
        raise corrupt(folder / name, f"expected {at} sums, got {len(listing.sums)}")
    return listing


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
    for i, array in enumerate(part.arrays):
        yield description.array_name(prefix, i), SummedFile(array.bytes, array.sums_at)
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


def _segments(folder: Path, folder_fd: int, listing: Listing) -> Iterator[tables.Segment]:
    """The table of segments, checked."""
    part = listing.document
    assert part.schema is not UNSET  # description.check
    assert part.geometry is not UNSET
    assert part.segment is not UNSET
    assert part.tables is not UNSET
    name = description.table_name("segments")
    raw = read_small(folder, folder_fd, name, listing.files[name].bytes, exactly=True)
    expected = listing.sums_of(name)
    if (wrong := sums.first_wrong(raw, expected, 0)) is not None:
        raise corrupt(*wrong_block(folder / name, expected, wrong))
    length, rows = part.geometry.lane_length, part.segment.rows
    sizes: dict[int, int] = {}
    total = 0
    try:
        for it in tables.unpack_segments(raw):
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
        if total != part.tables["tickets"].records:
            raise ValueError(f"expected {part.tables['tickets'].records} rows, got {total}")
    except ValueError as error:
        raise corrupt(folder / name, str(error)) from error


#: Entries of a storage's state that version 1.0 of a part does not have.
_LATER = {"writes", "usage"}
_CHUNK = 1 << 20
#: Bytes of a file after which the disk is told to begin with them, while the next ones are copied.
_START = 16 << 20


class PartInfo(NamedTuple):
    """A part that was written."""

    folder: Path
    bytes: int
    """Of its ``part.json``."""
    sha256: str
    """Of its ``part.json``, which names every sum."""
    written: int
    """Bytes of its files that were written."""
    linked: int
    """Bytes of its files that are also an older checkpoint's."""
    listing: Listing
    """What a reader of it would read."""


class SegmentRows(NamedTuple):
    """What a segment's file holds: rows ``[first_row, first_row + rows)`` of the store, all of one lane."""

    lane: int
    k: int
    first_row: int
    rows: int
    tickets_sum: int


class _Written(NamedTuple):
    bytes: int
    sums: sums.Sums
    linked: bool


class FileWriter:
    """One file, written from its beginning to its end. Also a context manager, which closes it.

    After an error the file is given up: its part cannot be finished. ``behind``: of a long one the kernel keeps the end alone.
    """

    def __init__(
        self,
        path: str,
        nbytes: int,
        sparse: bool,
        behind: bool,
        done: Callable[[_Written], None],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._path, self._nbytes, self._behind, self._done = path, nbytes, behind, done
        self._progress = progress
        self._summing = sums.Summing()
        self._position = self._started = 0
        self._fd: files.Descriptor | None = disk.create(path, nbytes, sparse=sparse)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def write(self, data: Buffer) -> None:
        """Append bytes. ``data``: C-contiguous; must not change during the call. Raises ``OSError``; ``ValueError`` beyond the size."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        self._append(len(view), partial(self._write, view))

    def skip(self, nbytes: int) -> None:
        """Append zeros without writing them: a hole in a sparse file."""
        self._append(nbytes, lambda _: self._summing.zeros(nbytes))

    def copy_from(self, fd: int, offset: int, nbytes: int) -> None:
        """Append bytes of another file, which must not change during the call. The files share space where the file system can.

        Raises:
            EOFError: the other file is shorter.
        """
        self._append(nbytes, partial(self._copy, fd, offset, nbytes))

    def close(self) -> None:
        """Wait until the bytes are on disk. A second call does nothing.

        Raises:
            OSError: they may not be. The part is lost.
            ValueError: less was written than the size given.
        """
        if self._fd is None:
            return
        try:
            if self._position != self._nbytes:
                raise ValueError(f"{self._path}: expected {self._nbytes} bytes, got {self._position}.")
            self._start(self._fd)
            disk.finish(self._fd)
        except BaseException:
            self._abandon()
            raise
        self._fd = None
        self._done(_Written(self._nbytes, self._summing.done(), False))

    def _write(self, view: memoryview, own: int) -> None:
        for at in range(0, len(view), _CHUNK):  # a chunk is summed while it is in the cache
            chunk = view[at : at + _CHUNK]
            self._summing.update(chunk)
            disk.write(own, chunk, self._position + at)
            if self._progress is not None:
                self._progress(len(chunk))

    def _copy(self, fd: int, offset: int, nbytes: int, own: int) -> None:
        if self._behind:
            disk.announce(fd, offset, nbytes)
        copied = disk.copy(fd, offset, own, self._position, nbytes)
        chunk = memoryview(bytearray(min(_CHUNK, nbytes)))
        for at in range(0, nbytes, _CHUNK):
            piece = chunk[: min(_CHUNK, nbytes - at)]
            # What was copied is read back: the sums are those of this file, whatever happens to the other one.
            read = disk.read(own, piece, self._position + at) if copied else disk.read(fd, piece, offset + at)
            if read != len(piece):
                raise EOFError(f"expected {nbytes} bytes at byte {offset}, the file ends after {at + read}")
            self._summing.update(piece)
            if not copied:
                disk.write(own, piece, self._position + at)
            if self._progress is not None:
                self._progress(len(piece))

    def _append(self, nbytes: int, fill: Callable[[int], None]) -> None:
        """Let ``fill`` write that many bytes to the descriptor that it is given."""
        if self._fd is None:
            raise ValueError(f"{self._path}: the file is closed, or an earlier write to it failed.")
        if nbytes < 0 or self._position + nbytes > self._nbytes:
            raise ValueError(
                f"{self._path}: expected at most {self._nbytes - self._position} more bytes, got {nbytes}. Nothing was written."
            )
        try:
            fill(self._fd)
        except BaseException:
            self._abandon()
            raise
        self._position += nbytes
        if self._position - self._started >= _START:
            self._start(self._fd)

    def _start(self, fd: int) -> None:
        disk.start(fd, self._started, self._position - self._started)
        if self._behind:
            disk.forget(fd, 0, self._started)
        self._started = self._position

    def _abandon(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            fd.close()


class PartWriter:
    """Writes one part into a new folder.

    >>> part = PartWriter(folder / "sampler", "sampler", "PrioritizedSampler")        # doctest: +SKIP
    >>> leaves = part.array("float64", (n,), data)                                    # doctest: +SKIP
    >>> info = part.finish({"alpha": 0.6, "leaves": {"$array": leaves}})              # doctest: +SKIP

    Args:
        folder: where; made with its missing parents. Must not hold a part.
        part: what it is a part of a buffer as: ``storage``, ``index``, ``sampler``, ``writer`` …
        type: which class wrote it: looked up by the loading program in its own registry, never imported.
        name: of an index.
        behind: what is written does not stay in the kernel's memory, where rows are that others draw.
        progress: called with how many bytes were written, a megabyte at a time; what it raises gives the file up.

    Raises:
        ValueError: a name that is too long or has characters other than letters, digits and ``._-`` (``part`` only).
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        type: str,  # noqa: A002 - the word of part.json
        name: str = "",
        *,
        behind: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if not description.NAME.fullmatch(part):
            raise ValueError(f"part: expected 1 to 128 letters, digits, '.', '_' or '-', got {part!r:.200}.")
        self.folder, self._behind, self._progress = folder, behind, progress
        self._root = os.fspath(folder)
        self._names = (part, type, name)
        self._prefix = description.prefix(part)
        self._arrays: list[tuple[str, tuple[int, ...]]] = []
        self._files: dict[str, _Written | None] = {}
        self._folders: dict[str, None] = {}
        self._make("")
        if self._prefix:
            self._make(layout.FOLDER)

    def array(self, dtype: str, shape: Sequence[int], data: Buffer) -> int:
        """Write an array. Returns its number: the state refers to it as ``{"$array": number}``.

        Args:
            dtype: a key of ``schema.DTYPES``.
            shape: up to 32 dimensions, zeros too.
            data: its bytes, C-contiguous and little-endian.

        Raises:
            TypeError: a dtype that cannot be stored.
            ValueError: a shape that is impossible, or not that of ``data``.
            OSError: no space, or an I/O error.
        """
        if dtype not in DTYPES:
            raise TypeError(f"array: expected one of the dtypes {', '.join(DTYPES)}, got {dtype!r}.")
        shape = tuple(shape)
        nbytes = memoryview(data).nbytes
        if len(shape) > MAX_DIMS or any(d < 0 for d in shape) or math.prod(shape) * DTYPES[dtype] != nbytes:
            raise ValueError(f"array: expected {nbytes} bytes of {dtype}, got the shape {list(shape)}.")
        number = len(self._arrays)
        if number == description.MAX_ARRAYS:
            raise ValueError(f"array: expected at most {description.MAX_ARRAYS} arrays in a part.")
        self._arrays.append((dtype, shape))
        with self.file(description.array_name(self._prefix, number), nbytes) as file:
            file.write(data)
        return number

    def file(self, relative: str, nbytes: int, *, sparse: bool = False) -> FileWriter:
        """Begin a file of a storage: rows of a field, ``meta.json``, a table or a segment.

        Args:
            relative: its path in the part's folder, as the layout has it: what ``finish`` is told must name it.
            nbytes: its size.
            sparse: what is skipped takes no space, but then a full disk shows while writing, not here.

        Raises:
            FileExistsError: it was begun before.
            OSError: no space, or an I/O error.
        """
        self._begin(relative)
        done = partial(self._files.__setitem__, relative)
        return FileWriter(self._path(relative), nbytes, sparse, self._behind, done, self._progress)

    def link(self, relative: str, reader: PartReader, its_relative: str) -> bool:
        """Hard-link a file of an older checkpoint, with its sums, without reading it.

        Returns:
            False: this file system cannot, or the file is gone or of another size. Write it.

        Raises:
            FileExistsError: it was begun before.
            KeyError: the other part has no such file.
        """
        nbytes, its_sums = reader.listing.files[its_relative].bytes, reader.listing.sums_of(its_relative)
        self._begin(relative)
        target = self._path(relative)
        made = disk.link(its_relative, reader.folder_fd, target)
        if made and os.lstat(target).st_size != nbytes:
            disk.remove(target)
            made = False
        if made:
            self._files[relative] = _Written(nbytes, its_sums, True)
        else:
            del self._files[relative]
        return made

    def finish(
        self,
        state: Mapping[str, object],
        *,
        geometry: Geometry | None = None,
        schema: Sequence[PartField] | None = None,
        segment_rows: int | None = None,
        segments: Sequence[SegmentRows] = (),
    ) -> PartInfo:
        """Write sums and ``part.json``, and wait until every name is on disk. The part is complete when this returns.

        Args:
            state: JSON values; arrays as ``{"$array": number}``. The order of keys is not kept, and
                other keys that begin with ``$`` are reserved.
            geometry: storage: the sizes of the store.
            schema: storage: its fields, numbered from 0.
            segment_rows: storage in segments: rows of a whole one. Default: flat, a file per field.
            segments: what the files ``seg/<lane>-<k>.bin`` hold; their table is written here.

        Raises:
            TypeError: the state has something that JSON has no word for; names it.
            ValueError: the state, a file or a size does not fit the rest; a file was not closed, or failed.
            OSError: no space, or an I/O error.
        """
        segments = sorted(segments)
        segments_bytes = None if segment_rows is None else len(segments) * tables.RECORD_BYTES["segments"]
        placed = self._placed(schema or (), segments, segments_bytes)
        records = [] if segments_bytes is None else self._write_segments(segments, placed)
        written = [self._complete(name) for name in placed]
        raw_sums = b"".join([sums.pack(file.sums) for file in written])
        part, type_, name = self._names
        document = Part(
            version=Part.VERSION if part == "storage" and not _LATER.isdisjoint(state) else (1, 0),
            part=part,
            type=type_,
            name=name,
            state=dict(state),
            arrays=tuple(
                ArrayInfo(dtype, shape, *placed[description.array_name(self._prefix, i)])
                for i, (dtype, shape) in enumerate(self._arrays)
            ),
            sums=SumsEntry(len(raw_sums), hashlib.sha256(raw_sums).hexdigest()),
            geometry=UNSET if geometry is None else geometry,
            byteorder=UNSET if schema is None else "little",
            schema=UNSET if schema is None else tuple(schema),
            schema_sum=UNSET if schema is None else description.schema_sum(schema),
            segment=UNSET if segment_rows is None else SegmentSize(segment_rows),
            storage=UNSET if schema is None or segment_rows is not None else description.file_entries(schema, placed),
            tables=description.table_entries(placed) if self._prefix else UNSET,
        )
        description.check(document)
        raw, sha256 = self._put(document, raw_sums)
        linked = sum([file.bytes for file in written if file.linked])
        new = sum([file.bytes for file in written]) - linked + len(raw) + len(raw_sums)
        sizes = {name: file.bytes for name, file in placed.items()}
        sizes |= {f"{self._prefix}{description.PART}": len(raw), f"{self._prefix}{description.SUMS}": len(raw_sums)}
        listing = Listing(msgspec.json.decode(raw, type=Part), sha256, sizes, placed, sums.unpack(raw_sums), records)
        return PartInfo(self.folder, len(raw), sha256, new, linked, listing)

    def _put(self, document: Part, raw_sums: bytes) -> tuple[bytes, str]:
        """Write the description, and wait for all names. Its text and sha256."""
        raw = document.encode()
        disk.put(self._path(f"{self._prefix}{description.SUMS}"), raw_sums)
        disk.put(self._path(f"{self._prefix}{description.PART}"), raw)
        for relative in reversed(self._folders):
            disk.sync_folder(self._path(relative))
        return raw, hashlib.sha256(raw).hexdigest()

    def _write_segments(
        self, segments: Sequence[SegmentRows], placed: Mapping[str, SummedFile]
    ) -> list[tables.Segment]:
        """The table of segments. Their sums come after its own, whose number its size says."""
        records = []
        for it in segments:
            name = description.segment_name(it.lane, it.k)
            size, sums_at = placed[name]
            flags = tables.LINKED if self._complete(name).linked else 0
            records.append(tables.Segment(it.lane, it.k, it.first_row, it.rows, size, it.tickets_sum, sums_at, flags))
        raw = tables.pack_segments(records)
        with self.file(description.table_name("segments"), len(raw)) as file:
            file.write(raw)
        return records

    def _placed(
        self, schema: Sequence[PartField], segments: Sequence[SegmentRows], segments_bytes: int | None
    ) -> dict[str, SummedFile]:
        """Size and number of the first sum of every file, in the order of their sums.

        ``segments_bytes``: of the table of segments, which is written later; None: there is none.
        """
        sizes = {name: self._complete(name).bytes for name in self._files}
        if segments_bytes is not None:
            sizes[description.table_name("segments")] = segments_bytes
        names = [description.array_name(self._prefix, i) for i in range(len(self._arrays))]
        of_rows = [*map(description.field_name, schema), *map(description.meta_name, description.levels(schema))]
        names += [name for name in (*of_rows, *description.TABLE_FILES.values()) if name in sizes]
        names += [description.segment_name(it.lane, it.k) for it in segments]
        strangers = sorted(set(sizes).symmetric_difference(names))
        if strangers:
            raise ValueError(
                f"{self.folder}: expected the files that schema and segments name, differs: {strangers[:10]}."
            )
        placed, at = {}, 0
        for name in names:
            placed[name] = SummedFile(sizes[name], at)
            at += sums.blocks_of(sizes[name])
        return placed

    def _complete(self, relative: str) -> _Written:
        written = self._files.get(relative)
        if written is None:
            raise ValueError(
                f"{self.folder / relative}: expected a complete file. It was not closed, or a write failed."
            )
        return written

    def _begin(self, relative: str) -> None:
        if relative in self._files:
            raise FileExistsError(f"{self.folder / relative}: expected a file that was not begun before.")
        self._make(relative.rpartition("/")[0])
        self._files[relative] = None

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}" if relative else self._root

    def _make(self, relative: str) -> None:
        """A folder of the part, and those it lies in."""
        if relative not in self._folders:
            if relative:
                self._make(relative.rpartition("/")[0])
            disk.make_folders(self._path(relative))
            self._folders[relative] = None
