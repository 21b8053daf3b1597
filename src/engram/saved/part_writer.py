"""Writes a part: its files in order, their sums, and last the description, which completes it."""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import msgspec
from msgspec import UNSET

from engram.format import files, layout
from engram.format.schema import DTYPES, MAX_DIMS, PartField
from engram.saved import description, disk
from engram.saved.part_reader import Listing, PartReader, SummedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Buffer


#: Entries of a storage's state that version 1.0 of a part does not have.
_LATER = {"writes", "usage"}
_CHUNK = 1 << 20
#: Bytes of a file after which the disk is told to begin with them, while the next ones are copied.
_START = 16 << 20

R = TypeVar("R", description.Segment, description.ItemsPiece)


def _bytes_of(files: Sequence[_Written], more: int) -> tuple[int, int]:
    """Bytes that were written, with ``more`` beside the files, and those that were linked."""
    linked = sum([file.bytes for file in files if file.linked])
    return sum([file.bytes for file in files]) - linked + more, linked


def _version_of(part: str, state: Mapping[str, object], pieces: object) -> tuple[int, int]:
    """The oldest version whose readers understand the part."""
    if pieces is not None:
        return (3, 0)
    return (1, 1) if part == "storage" and not _LATER.isdisjoint(state) else (1, 0)


class PartInfo(NamedTuple):
    """A part that was written."""

    folder: Path
    #: Of its ``part.json``.
    bytes: int
    #: Of its ``part.json``, which names every sum.
    sha256: str
    #: Bytes of its files that were written.
    written: int
    #: Bytes of its files that are also an older checkpoint's.
    linked: int
    #: What a reader of it would read.
    listing: Listing


class _Written(NamedTuple):
    """A file that was written or linked."""

    bytes: int
    sums: description.Sums
    linked: bool


class FileWriter:
    """A file, written from its beginning to its end. Also a context manager, which closes it.

    After an error the file is given up: its part cannot be finished. ``behind``: of a long one the kernel keeps the end alone.
    """

    def __init__(
        self,
        path: str,
        nbytes: int,
        block: int,
        sparse: bool,
        behind: bool,
        done: Callable[[_Written], None],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._path, self._nbytes, self._behind, self._done = path, nbytes, behind, done
        self._progress = progress
        self._summing = description.Summing(block)
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
        done, block = partial(self._files.__setitem__, relative), description.block_of(relative, nbytes)
        return FileWriter(self._path(relative), nbytes, block, sparse, self._behind, done, self._progress)

    def link(self, relative: str, reader: PartReader, its_relative: str) -> bool:
        """Hard-link a file of an older checkpoint, with its sums, without reading it.

        Returns:
            False: this file system cannot, or the file is gone, of another size, or has sums of other blocks. Write it.

        Raises:
            FileExistsError: it was begun before.
            KeyError: the other part has no such file.
        """
        nbytes, its_sums = reader.listing.files[its_relative].bytes, reader.listing.sums_of(its_relative)
        self._begin(relative)
        target = self._path(relative)
        fit = len(its_sums) == description.blocks_of(nbytes, description.block_of(relative, nbytes))
        made = fit and disk.link(its_relative, reader.folder_fd, target)
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
        geometry: description.Geometry | None = None,
        schema: Sequence[PartField] | None = None,
        segment_rows: int | None = None,
        segments: Sequence[description.Segment] = (),
        pieces: Sequence[description.ItemsPiece] | None = None,
    ) -> PartInfo:
        """Write sums and ``part.json``, and wait until every name is on disk. The part is complete when this returns.

        Args:
            state: JSON values; arrays as ``{"$array": number}``. The order of keys is not kept, and
                other keys that begin with ``$`` are reserved.
            geometry: storage: the sizes of the store.
            schema: storage: its fields, numbered from 0.
            segment_rows: storage in segments: rows of a whole one. Default: flat, a file per field.
            segments: what the files ``seg/<lane>-<k>.bin`` hold; their table is written here.
            pieces: what the files with items hold, likewise; None: no field is ragged.

        Raises:
            TypeError: the state has something that JSON has no word for; names it.
            ValueError: the state, a file or a size does not fit the rest; a file was not closed, or failed.
            OSError: no space, or an I/O error.
        """
        segments, its_pieces = sorted(segments), sorted(pieces or ())
        later: dict[description.TableName, int] = {} if segment_rows is None else {"segments": len(segments)}
        later |= {} if pieces is None else {"items": len(its_pieces)}
        placed = self._placed(schema or (), segments, its_pieces, later)
        records = (
            [] if segment_rows is None else self._write_records("segments", segments, placed, description.pack_segments)
        )
        of_items = [] if pieces is None else self._write_records("items", its_pieces, placed, description.pack_pieces)
        written = [self._complete(name) for name in placed]
        raw_sums = b"".join([file.sums.tobytes() for file in written])
        part, type_, name = self._names
        document = description.Part(
            version=_version_of(part, state, pieces),
            part=part,
            type=type_,
            name=name,
            state=dict(state),
            arrays=tuple(
                description.ArrayInfo(dtype, shape, *placed[description.array_name(self._prefix, i)])
                for i, (dtype, shape) in enumerate(self._arrays)
            ),
            sums=description.SumsEntry(len(raw_sums), hashlib.sha256(raw_sums).hexdigest()),
            geometry=UNSET if geometry is None else geometry,
            byteorder=UNSET if schema is None else "little",
            schema=UNSET if schema is None else tuple(schema),
            schema_sum=UNSET if schema is None else description.schema_sum(schema),
            segment=UNSET if segment_rows is None else description.SegmentSize(segment_rows),
            storage=UNSET if schema is None or segment_rows is not None else description.file_entries(schema, placed),
            tables=description.table_entries(placed) if self._prefix else UNSET,
        )
        description.check(document)
        raw, sha256 = self._put(document, raw_sums)
        new, linked = _bytes_of(written, len(raw) + len(raw_sums))
        sizes = {name: file.bytes for name, file in placed.items()}
        sizes |= {f"{self._prefix}{description.PART}": len(raw), f"{self._prefix}{description.SUMS}": len(raw_sums)}
        read, sums = msgspec.json.decode(raw, type=description.Part), array("Q", raw_sums)
        listing = Listing(read, sha256, sizes, placed, sums, records, of_items, description.blocks_of_pieces(of_items))
        return PartInfo(self.folder, len(raw), sha256, new, linked, listing)

    def _put(self, document: description.Part, raw_sums: bytes) -> tuple[bytes, str]:
        """Write the description, and wait for all names. Its text and sha256."""
        raw = document.encode()
        disk.put(self._path(f"{self._prefix}{description.SUMS}"), raw_sums)
        disk.put(self._path(f"{self._prefix}{description.PART}"), raw)
        for relative in reversed(self._folders):
            disk.sync_folder(self._path(relative))
        return raw, hashlib.sha256(raw).hexdigest()

    def _write_records(
        self,
        table: description.TableName,
        records: Sequence[R],
        placed: Mapping[str, SummedFile],
        pack: Callable[[list[R]], bytes],
    ) -> list[R]:
        """Write the table of some files, whose sizes and sums are known by now."""
        made = []
        for it in records:
            name = it.name
            (nbytes, sums_at), linked = placed[name], self._complete(name).linked
            made.append(it._replace(nbytes=nbytes, sums_at=sums_at, flags=description.LINKED if linked else 0))
        raw = pack(made)
        with self.file(description.TABLE_FILES[table], len(raw)) as file:
            file.write(raw)
        return made

    def _placed(
        self,
        schema: Sequence[PartField],
        segments: Sequence[description.Segment],
        pieces: Sequence[description.ItemsPiece],
        later: Mapping[description.TableName, int],
    ) -> dict[str, SummedFile]:
        """Size and number of the first sum of every file, in the order of their sums.

        ``later``: the records of tables that are written later.
        """
        sizes = {name: self._complete(name).bytes for name in self._files}
        for table, records in later.items():
            sizes[description.TABLE_FILES[table]] = records * description.RECORD_BYTES[table]
        names = [description.array_name(self._prefix, i) for i in range(len(self._arrays))]
        of_rows = [*map(description.field_name, schema), *map(description.meta_name, description.levels(schema))]
        names += [name for name in (*of_rows, *description.TABLE_FILES.values()) if name in sizes]
        names += [it.name for it in segments] + [it.name for it in pieces]
        strangers = sorted(set(sizes).symmetric_difference(names))
        if strangers:
            raise ValueError(f"{self.folder}: expected the files of schema and segments, differs: {strangers[:10]}.")
        placed, at = {}, 0
        for name in names:
            placed[name] = SummedFile(sizes[name], at)
            at += description.blocks_of(sizes[name], description.block_of(name, sizes[name]))
        return placed

    def _complete(self, relative: str) -> _Written:
        written = self._files.get(relative)
        if written is None:
            raise ValueError(f"{self.folder / relative}: expected a complete file: not closed, or a write failed.")
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
