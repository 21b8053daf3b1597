"""The control block of a directory store, read without the core: what ``native/core/control.h`` writes."""

from __future__ import annotations

import struct
from typing import NamedTuple

_HEADER = struct.Struct("=8sIIII9Q")
_SECTION = struct.Struct("=16sQQ")
_MAGIC = b"engram\0\1"
_MAJOR = 2
_BYTE_ORDER = 0x01020304
_LANE = struct.Struct("=QQQ40x")
_PARTICIPANT = struct.Struct("=II120x")

#: Offset and bytes of the parts of a block, by name. Behind them lie the lanes.
_SECTIONS = {
    "locks": (4096, 4096),
    "counters": (8192, 2048),
    "limits": (10240, 1024),
    "waits": (11264, 1024),
    "participants": (12288, 256 * 128),
}
#: Bytes before the lanes: header and the other sections.
FIXED_BYTES = sum(_SECTIONS["participants"])
_HEADER_BYTES = _HEADER.size + (len(_SECTIONS) + 1) * _SECTION.size
_CLEAN_AT = _SECTIONS["locks"][0] + 56


class Header(NamedTuple):
    """What never changes of a store, and whether it was closed in order."""

    capacity: int
    lanes: int
    lane_length: int
    schema_sum: int
    """xxh3-64 of ``store.json``."""
    clean: bool
    """Closed by its last owner. False: open now, or its processes died."""


def control_bytes(lanes: int) -> int:
    """Size of the block of a store with that many lanes."""
    return FIXED_BYTES + lanes * _LANE.size


def parse(raw: bytes) -> Header:
    """The header of a block, of which ``raw`` holds the fixed part.

    Raises:
        ValueError: not a control block, of another machine or version, or its checksum does not match.
    """
    magic, major, _, order, crc, _, capacity, lanes, length, _, at, count, _, schema_sum = _HEADER.unpack_from(raw)
    if magic != _MAGIC or order != _BYTE_ORDER:
        raise ValueError("not a control block of this byte order")
    if major != _MAJOR:
        raise ValueError(f"expected format {_MAJOR}, got {major}")
    if crc != _crc32c(raw[:20] + bytes(4) + raw[24:_HEADER_BYTES]):
        raise ValueError("the header's checksum does not match")
    if lanes < 1 or lanes * length != capacity:
        raise ValueError(f"{lanes} lanes of {length} rows are not the capacity {capacity}")
    sections = {**_SECTIONS, "lanes": (FIXED_BYTES, lanes * _LANE.size)}
    directory = b"".join(_SECTION.pack(name.encode(), *place) for name, place in sections.items())
    if (at, count, raw[_HEADER.size : _HEADER_BYTES]) != (_HEADER.size, len(sections), directory):
        raise ValueError("the sections do not fit the geometry")
    (clean,) = struct.unpack_from("=Q", raw, _CLEAN_AT)
    return Header(capacity, lanes, length, schema_sum, clean == 1)


def processes(raw: bytes) -> list[int]:
    """Numbers of the processes that are noted in a block, of which ``raw`` holds the fixed part. Some may have ended."""
    at, nbytes = _SECTIONS["participants"]
    return [pid for state, pid in _PARTICIPANT.iter_unpack(raw[at : at + nbytes]) if state]


def filled(raw: bytes, header: Header) -> list[int]:
    """Rows inside each lane's extent, those that hold nothing included. ``raw``: the lanes."""
    found = []
    for cursor, base, high in _LANE.iter_unpack(raw):
        found.append(min(max(max(cursor, high) - base, 0), header.lane_length))
    return found


def _crc32c(raw: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
