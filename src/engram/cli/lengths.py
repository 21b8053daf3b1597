"""How long the trajectories of a live store are, as far as its end flags tell: read without torch, beside processes that write."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from engram.format import control, disk, files, layout
from engram.format.histograms import histogram
from engram.format.verify import read_store
from engram.persist.roles import roles_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from engram.format.schema import Schema

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
