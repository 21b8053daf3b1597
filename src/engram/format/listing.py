"""The files of a part, as its ``part.json`` lists them. Every number is checked before it is used."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from engram.format import description, disk, layout, strict, sums, tables
from engram.format.description import PART, SUMS, Part, segment_layout
from engram.format.problems import corrupt, no_file, read_small, wrong_block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
