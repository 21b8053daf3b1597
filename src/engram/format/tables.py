"""The binary tables of a shard: records of fixed size, little-endian, without a header.

``tickets`` is a table too, of one u64 per stored row, lane by lane; its words are read as an array, not one by one.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

#: Flags of a trajectory: its first live step carries a start mark; its last one an end; that end is a truncation; it goes on.
HAS_FIRST, HAS_LAST, TRUNCATED, OPEN = 1, 2, 4, 8
#: Flag of a segment: its file is also the parent's.
LINKED = 1

MAX_SEGMENTS = 1 << 20
MAX_TRAJECTORIES = 1 << 31

#: Rows that were written by number, ahead of the cursor, lie before position 0.
_LIMIT = 1 << 58

_LANE = struct.Struct("<4q")
_TRAJECTORY = struct.Struct("<5q")
_SEGMENT = struct.Struct("<IIqqqQqI12s")
_ZEROS = bytes(12)

#: Bytes of a record, by table.
RECORD_BYTES = {"lanes": _LANE.size, "tickets": 8, "trajectories": _TRAJECTORY.size, "segments": _SEGMENT.size}


class Lane(NamedTuple):
    """A lane at the snapshot."""

    next_position: int
    live_rows: int
    is_open: bool
    """A trajectory has begun and not ended."""


class Trajectory(NamedTuple):
    """Consecutive live steps of one lane. By lane and position in their table."""

    lane: int
    first: int
    """Position of the first live step."""
    end: int
    """Beyond the last one. With columns, positions step by their number."""
    t_end: int
    """Ticket number of the last row, or ``t_end`` of the lane's next trajectory if that is smaller."""
    flags: int


class Segment(NamedTuple):
    """Rows of one lane in a file of their own."""

    lane: int
    k: int
    first_row: int
    rows: int
    nbytes: int
    tickets_sum: int
    """xxh3-64 of the saved tickets: an equal one means equal rows."""
    sums_at: int
    """Number of its first sum in ``sums.bin``."""
    flags: int


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
        if not (0 <= it.lane < lanes and -_LIMIT <= it.first < it.end and it.t_end >= 0 and 0 <= it.flags < 16):
            raise ValueError(f"expected a trajectory of one of {lanes} lanes, got {it}")
        if after is not None and not _follows(it, after, columns):
            raise ValueError(f"expected trajectories by lane and position, got {it} after {after}")
        after = it
        yield it


def pack_segments(segments: Iterable[Segment]) -> bytes:
    """Records in the order given, which must be that of the table."""
    return b"".join(_SEGMENT.pack(*segment, _ZEROS) for segment in segments)


def unpack_segments(raw: Buffer) -> Iterator[Segment]:
    """The segments in a table, by lane and number. Raises ``ValueError`` for records that are not zero where they must be."""
    before = (-1, -1)
    for *fields, zeros in _SEGMENT.iter_unpack(memoryview(raw).cast("B")):
        it = Segment._make(fields)
        if zeros != _ZEROS or it.flags & ~LINKED:
            raise ValueError(f"segment {it.lane}-{it.k}: expected flags 0 or {LINKED} and zeros, got {it.flags}")
        if (it.lane, it.k) <= before:
            raise ValueError(
                f"expected segments by lane and number, got {it.lane}-{it.k} after {before[0]}-{before[1]}"
            )
        before = (it.lane, it.k)
        yield it


def _follows(it: Trajectory, before: Trajectory, columns: int) -> bool:
    if columns > 1:  # those of different columns lie between each other
        return (before.lane, before.first) < (it.lane, it.first)
    return before.lane < it.lane or (before.lane == it.lane and before.end <= it.first)
