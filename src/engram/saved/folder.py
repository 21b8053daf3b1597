"""Folders of unknown origin: no links, regular files of known size, strict JSON.

Also files that lie beside a part and that its state lists, with their sums: rows in a layout that other libraries read.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from engram._support.words import raise_as
from engram.errors import CorruptCheckpoint
from engram.format import schema, strict
from engram.format.files import Descriptor
from engram.saved import description, disk, documents

_T = TypeVar("_T")


class Folder:
    """Opens what lies below a folder: for reading, never through a link, regular files only.

    Raises ``OSError``: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        disk.open_folder(path).close()

    def name(self, parts: Sequence[str]) -> str:
        return str(self.path.joinpath(*parts))

    def _opened(self, parts: Sequence[str], opened: Callable[[int, str], Descriptor]) -> Descriptor:
        """A descriptor; for whatever is missing ``FileNotFoundError``, for a link or a file amid the path ``CorruptCheckpoint``."""
        if any(part in ("", ".", "..") or {"/", "\0"} & set(part) for part in parts):
            raise CorruptCheckpoint(f"{self.name(parts)}: not a name of a file.")
        with disk.open_folder(self.path) as fd:
            try:
                return opened(fd, "/".join(parts)) if parts else Descriptor.copy_of(fd)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                    raise FileNotFoundError(error.errno, error.strerror, self.name(parts)) from error
                raise CorruptCheckpoint(f"{self.name(parts)}: {documents.no_file(error)}.") from error

    def open(self, parts: Sequence[str], nbytes: int | None = None) -> Descriptor:
        """A descriptor of a regular file, of exactly ``nbytes`` bytes if given."""
        try:
            fd = self._opened(parts, disk.open_file)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{self.name(parts)}: expected a file, found none.") from error
        size = os.fstat(fd).st_size
        if nbytes is not None and size != nbytes:
            fd.close()
            raise CorruptCheckpoint(
                f"{self.name(parts)}: expected {nbytes} bytes, got {size}. The file was truncated or replaced; nothing was changed. "
                "Copy the dump again."
            )
        return fd

    def names(self, parts: Sequence[str]) -> list[str]:
        """What is in a folder, sorted; nothing if there is none."""
        try:
            with self._opened(parts, disk.open_below) as fd:
                return sorted(os.listdir(fd))
        except FileNotFoundError:
            return []

    def is_folder(self, parts: Sequence[str]) -> bool:
        with contextlib.suppress(FileNotFoundError, CorruptCheckpoint):
            self._opened(parts, disk.open_below).close()
            return True
        return False

    def read(self, parts: Sequence[str], most: int = schema.MAX_BYTES) -> bytes:
        """All of a file, of at most so many bytes."""
        with self.open(parts) as fd, open(fd, "rb", closefd=False) as file:
            if (size := os.fstat(fd).st_size) > most:
                raise CorruptCheckpoint(f"{self.name(parts)}: expected at most {most} bytes, got {size}.")
            return file.read(size)

    def json(self, parts: Sequence[str]) -> dict[str, object]:
        raw = self.read(parts)
        with raise_as(CorruptCheckpoint, f"{self.name(parts)}: not readable as JSON"):
            tree = strict.parse(raw)
            if not isinstance(tree, dict):
                raise ValueError("not an object")
        return tree

    def described(self, kind: type[_T], parts: Sequence[str]) -> _T:
        return cast("_T", convert(self.json(parts), kind, self.name(parts)))

    def read_into(self, view: memoryview, parts: Sequence[str], nbytes: int, offset: int = 0) -> None:
        """Fill writable memory from a file of ``nbytes`` bytes, by ``pread``."""
        with self.open(parts, nbytes) as fd:
            if disk.read(fd, view, offset) < len(view):
                raise CorruptCheckpoint(f"{self.name(parts)}: it became shorter while it was read.")


def convert(value: object, kind: object, name: str) -> Any:
    """A parsed description as a type. Raises ``CorruptCheckpoint``: it is none."""
    strict.describe(kind)
    with raise_as(CorruptCheckpoint, name, msgspec.ValidationError):
        return msgspec.convert(value, kind, strict=True)


#: Entry of a state with what is beside it: ``files``, ``[name, bytes]`` of each, and ``sums``, an array with those of all.
ENTRY = "layout"
#: Files that TorchRL alone reads: of a dump, and of its writer.
OF_DUMP, OF_WRITER = "buffer_metadata.json", "metadata.json"

_SUMMED_AT_ONCE = 4 << 20


def listed_files(state: Mapping[str, object]) -> dict[str, int]:
    """Names and bytes of files that a state lists; empty: none."""
    noted = state.get(ENTRY)
    entries = noted.get("files") if isinstance(noted, dict) else None
    return {
        entry[0]: entry[1]
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], int)
    }


def sums_array(state: Mapping[str, object]) -> int | None:
    """The number of the array with the sums; None: there is none."""
    noted = state.get(ENTRY)
    entry = noted.get("sums") if isinstance(noted, dict) else None
    number = entry.get("$array") if isinstance(entry, dict) else None
    return number if isinstance(number, int) else None


def summed_files(folder: Path, names: Sequence[str]) -> tuple[list[list[object]], bytearray]:
    """What a state notes of files: ``[name, bytes]`` of each, and the sums of all. Reads them."""
    described, packed = [], bytearray()
    for name in names:
        size, raw = _sums_of(Folder(folder), tuple(name.split("/")), None)
        described.append([name, size])
        packed += raw
    return described, packed


def damaged_files(folder: Path, files: Mapping[str, int], raw: bytes) -> Iterator[documents.Problem]:
    """What is wrong with files. ``raw``: their sums, one behind the other. Reads everything."""
    at = 0
    for name, size in files.items():
        expected = raw[at : at + 8 * description.blocks_of(size)]
        at += len(expected)
        try:
            found = _sums_of(Folder(folder), tuple(name.split("/")), size)[1]
        except CorruptCheckpoint as error:
            yield documents.Problem(folder / name, str(error).removeprefix(f"{folder / name}: ").removesuffix("."))
            continue
        if found != expected:
            yield documents.Problem(folder / name, "expected the sums that it was saved with, got others")


def _sums_of(folder: Folder, parts: tuple[str, ...], size: int | None) -> tuple[int, bytes]:
    """Bytes and sums of a file."""
    summing = description.Summing()
    with folder.open(parts, size) as fd:
        nbytes = os.fstat(fd).st_size
        memory = memoryview(bytearray(min(_SUMMED_AT_ONCE, nbytes)))
        for at in range(0, nbytes, _SUMMED_AT_ONCE):
            piece = memory[: nbytes - at]
            if disk.read(fd, piece, at) < len(piece):
                raise CorruptCheckpoint(f"{folder.name(parts)}: it became shorter while it was read.")
            summing.update(piece)
    return nbytes, summing.done().tobytes()
