"""Small parts, dumps and series for the tests of ``format/``: made of every kind of file there is."""

import random
from array import array

from engram.format.schema import PartField
from engram.saved import attempts
from engram.saved.checkpoints import finish_dump, replacing
from engram.saved.description import (
    HAS_FIRST,
    HAS_LAST,
    OPEN,
    Geometry,
    Lane,
    Segment,
    Trajectory,
    pack_lanes,
    pack_trajectories,
    schema_sum,
    segment_layout,
)
from engram.saved.documents import Count, Cut, ShardRows, Totals, rank_folder
from engram.saved.part_reader import PartReader
from engram.saved.part_writer import PartWriter
from engram.saved.series import Series

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
    Segment(0, 0, 0, 8, tickets_sum=11),
    Segment(0, 1, 8, 8, tickets_sum=12),
    Segment(0, 2, 16, 4, tickets_sum=13),
    Segment(1, 0, 20, 7, tickets_sum=14),
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
        "highest": 2.0,
        "live_leaves": 2,
        "leaves": {"$array": writer.array("float64", (len(leaves),), leaves)},
        "nested": [{"counts": {"$array": writer.array("int64", (2, 0), b"")}}],
        "blob": {"$array": writer.array("uint8", (5,), b"abcde")},
    }
    return writer.finish(state)


SCHEMA_SUM = schema_sum(SCHEMA)


TOTALS = Totals(steps=ROWS, episodes=3, complete=Count(1, 7), open=Count(1, 5), headless=Count(1, 15))
CONTENT = ShardRows(Cut(41), TOTALS, SCHEMA_SUM)


def write_dump(path, seed=0, user=None):
    with replacing(path) as folder:
        parts = [
            write_flat(folder / "storage", seed),
            write_index(folder / "sampler"),
            write_index(folder / "indexes/000", name="critic", part="index"),
        ]
        return finish_dump(folder, parts, CONTENT, step=seed, user=user or {"seed": seed})


def vote(folder, rank, world, seed=0, parent=None):
    own = folder / rank_folder(rank, world)
    parts = [write_segments(own / "storage", seed, parent), write_index(own / "sampler")]
    return attempts.accept(folder, rank, parts, CONTENT)


def save(root, step, epoch, world=1, parent=None):
    """A whole save of a series, segments of lane 0 linked from ``parent``, a folder."""
    folder = attempts.begin(root, step=step, epoch=epoch, world=world, trigger="period", parent=parent and parent.name)
    for rank in range(world):
        if parent is None:
            vote(folder, rank, world, seed=step)
        else:
            with PartReader.open(parent / rank_folder(rank, world) / "storage") as reader:
                vote(folder, rank, world, seed=step, parent=reader)
    made = attempts.decide(folder, epoch)
    assert made is not None
    if made.status == "complete":
        Series(root).set_latest(made.name, epoch)
    return folder


def tree(folder):
    """Content of every file, to be compared with later: and nobody may have touched it."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def rewrite(path, raw):
    path.chmod(0o600)
    path.write_bytes(raw)
    path.chmod(0o400)
