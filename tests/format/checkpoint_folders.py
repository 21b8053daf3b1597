"""Small parts, dumps and series for the tests of ``format/``: made of every kind of file there is."""

import random
import struct
from array import array

from engram.format.parts import Geometry, PartField, PartWriter, SegmentRows, schema_sum, segment_layout
from engram.format.tables import HAS_FIRST, HAS_LAST, OPEN, Lane, Trajectory, pack_lanes, pack_trajectories

SCHEMA = (
    PartField(0, ("next", "reward"), "float32", (1,), "data"),
    PartField(1, ("observation",), "uint8", (3,)),
    PartField(2, ("done",), "bool", (), "done"),
)
GEOMETRY = Geometry(40, 2, 20)
LANES = [Lane(25, 20, True), Lane(7, 7, False)]
TRAJECTORIES = [
    Trajectory(0, 5, 20, 30, HAS_LAST),
    Trajectory(0, 20, 25, 40, HAS_FIRST | OPEN),
    Trajectory(1, 0, 7, 35, HAS_FIRST | HAS_LAST),
]
ROWS = 27
META = b'{"shape":[27],"device":"cpu"}'


def noise(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


def write_tables(part, rows=ROWS, seed=0):
    for name, raw in (
        ("lanes", pack_lanes(LANES)),
        ("tickets", noise(rows * 8, seed)),
        ("trajectories", pack_trajectories(TRAJECTORIES)),
    ):
        with part.file(f".engram/{name}.bin", len(raw)) as file:
            file.write(raw)


def write_flat(folder, seed=0):
    """A storage with a file per field."""
    part = PartWriter(folder, "storage", "TensorStorage")
    for i, (name, row_bytes) in enumerate((("next/reward", 4), ("observation", 3), ("done", 1))):
        with part.file(f"{name}.memmap", ROWS * row_bytes, sparse=True) as file:
            file.write(noise(20 * row_bytes, seed + i))
            file.skip((ROWS - 20) * row_bytes)
    for name in ("meta.json", "next/meta.json"):
        with part.file(name, len(META)) as file:
            file.write(META)
    write_tables(part, seed=seed)
    return part.finish({"kind": "flat"}, geometry=GEOMETRY, schema=SCHEMA)


SEGMENTS = [
    SegmentRows(0, 0, 0, 8, 11),
    SegmentRows(0, 1, 8, 8, 12),
    SegmentRows(0, 2, 16, 4, 13),
    SegmentRows(1, 0, 20, 7, 14),
]


def write_segments(folder, seed=0, parent=None):
    """A storage in segments. Those of lane 0 are taken over from ``parent`` (a reader), where there is one."""
    part = PartWriter(folder, "storage", "TensorStorage")
    for it in SEGMENTS:
        name = f"seg/{it.lane}-{it.k}.bin"
        if parent is not None and it.lane == 0 and part.link(name, parent, name):
            continue
        offsets, nbytes = segment_layout(SCHEMA, it.rows)
        with part.file(name, nbytes) as file:
            at = 0
            for offset, field in zip(offsets, SCHEMA, strict=True):
                file.skip(offset - at)
                file.write(noise(it.rows * field.row_bytes, seed + field.id))
                at = offset + it.rows * field.row_bytes
    write_tables(part, seed=seed)
    return part.finish({"kind": "segments"}, geometry=GEOMETRY, schema=SCHEMA, segment_rows=8, segments=SEGMENTS)


def write_index(folder, leaves=None, name="", part="sampler"):
    writer = PartWriter(folder, part, "PrioritizedSampler", name)
    leaves = array("d", [0.0, 0.5, 2.0, -0.0] if leaves is None else leaves)
    state = {
        "alpha": 0.6,
        "beta": 0.4,
        "eps": 1e-8,
        "max_priority": None,
        "live_leaves": 2,
        "leaves": {"$array": writer.array("float64", (len(leaves),), leaves)},
        "nested": [{"counts": {"$array": writer.array("int64", (2, 0), b"")}}],
        "blob": {"$array": writer.array("uint8", (5,), b"abcde")},
    }
    return writer.finish(state)


def records(raw, code):
    return list(struct.iter_unpack(code, raw))


SCHEMA_SUM = schema_sum(SCHEMA)
