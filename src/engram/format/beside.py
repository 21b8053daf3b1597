"""Files that lie beside a part and that its state lists, with their sums: rows in a layout that other libraries read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engram.errors import CorruptCheckpoint
from engram.format import disk, sums
from engram.format.folder import Folder
from engram.format.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Entry of a state with what is beside it: ``files``, ``[name, bytes]`` of each, and ``sums``, an array with those of all.
ENTRY = "layout"
#: Files that TorchRL alone reads: of a dump, and of its writer.
OF_DUMP, OF_WRITER = "buffer_metadata.json", "metadata.json"

_READ = 4 << 20


def listed(state: Mapping[str, object]) -> dict[str, int]:
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


def summed(folder: Path, names: Sequence[str]) -> tuple[list[list[object]], bytearray]:
    """What a state notes of files: ``[name, bytes]`` of each, and the sums of all. Reads them."""
    described, packed = [], bytearray()
    for name in names:
        size, raw = _sums_of(Folder(folder), tuple(name.split("/")), None)
        described.append([name, size])
        packed += raw
    return described, packed


def damage(folder: Path, files: Mapping[str, int], raw: bytes) -> Iterator[Problem]:
    """What is wrong with files. ``raw``: their sums, one behind the other. Reads everything."""
    at = 0
    for name, size in files.items():
        expected = raw[at : at + 8 * sums.blocks_of(size)]
        at += len(expected)
        try:
            found = _sums_of(Folder(folder), tuple(name.split("/")), size)[1]
        except CorruptCheckpoint as error:
            yield Problem(folder / name, str(error).removeprefix(f"{folder / name}: ").removesuffix("."))
            continue
        if found != expected:
            yield Problem(folder / name, "expected the sums that it was saved with, got others")


def _sums_of(folder: Folder, parts: tuple[str, ...], size: int | None) -> tuple[int, bytes]:
    """Bytes and sums of a file."""
    summing = sums.Summing()
    with folder.open(parts, size) as fd:
        nbytes = os.fstat(fd).st_size
        memory = memoryview(bytearray(min(_READ, nbytes)))
        for at in itertools.count(0, _READ):
            piece = memory[: max(0, min(_READ, nbytes - at))]
            if not piece:
                break
            if disk.read(fd, piece, at) < len(piece):
                raise CorruptCheckpoint(f"{folder.name(parts)}: it became shorter while it was read.")
            summing.update(piece)
    return nbytes, sums.pack(summing.done())
