"""Damaged dumps of TorchRL, and what is opened."""

import collections
import contextlib
import json
import math
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from engram import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import Node
from engram.torchrl.dumps import read
from tests.torchrl.torchrl_dumps import (
    ENTRIES,
    META,
    columns_of,
    edit,
    faults,
    leaf,
    make_dump,
    obs,
    put,
    quietly_read,
    snapshot,
    text,
    watched,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:last_cursor is None"),  # TorchRL, of a storage that nothing was written to
]


def bytes_of(name, change):
    return lambda path: put(path / name, change((path / name).read_bytes()))


def replaced(name, make):
    def change(path):
        (path / name).rename(path / "moved")
        make(path / name, path / "moved")

    return change


OBS = "storage/obs.memmap"
LENGTH = "storage/storage_metadata.json"
CURSOR = "writer/metadata.json"
HEAP = "writer/current_top_values.memmap"
SUMS = "sampler/sumtree.memmap"
MINS = "sampler/mintree.memmap"
STATE = "sampler/sampler_metadata.json"
RNG = "rng_state/rng_state.memmap"
RNG_META = "rng_state/meta.json"
FILES = [OBS, META, LENGTH, "storage/next/meta.json", "storage/next/done.memmap", HEAP, SUMS, MINS, RNG]
FILES += [RNG_META, "buffer_metadata.json"]

Damage = collections.namedtuple("Damage", ["change", "file", "kind"], defaults=[CorruptCheckpoint])


DAMAGE = {
    **{f"{name} missing": Damage(lambda path, name=name: (path / name).unlink(), name) for name in FILES},
    **{f"{name} shorter": Damage(bytes_of(name, lambda raw: raw[:-1]), name) for name in FILES},
    **{f"{name} longer": Damage(bytes_of(name, lambda raw: raw + b"x"), name) for name in FILES},
    **{f"{name} a link": Damage(replaced(name, lambda new, old: new.symlink_to(old)), name) for name in FILES},
    **{f"{name} a FIFO": Damage(replaced(name, lambda new, old: os.mkfifo(new)), name) for name in FILES},
    **{f"{name} a folder": Damage(replaced(name, lambda new, old: new.mkdir()), name) for name in FILES},
    "storage a link": Damage(replaced("storage", lambda new, old: new.symlink_to(old)), "storage"),
    "next a link": Damage(replaced("storage/next", lambda new, old: new.symlink_to(old)), "storage/next"),
    "sampler a file": Damage(replaced("sampler", lambda new, old: new.touch()), "sampler"),
    "writer a link": Damage(replaced("writer", lambda new, old: new.symlink_to(old)), "writer"),
    "no storage": Damage(replaced("storage", lambda new, old: None), LENGTH),
    "unknown dtype": Damage(obs(dtype="torch.float99"), META, IncompatibleCheckpoint),
    "dtype by attribute": Damage(obs(dtype="torch.load"), META, IncompatibleCheckpoint),
    "another dtype": Damage(obs(dtype="torch.float64"), OBS),
    "dtype no text": Damage(obs(dtype=7), META),
    "huge shape": Damage(obs(shape=[10, 1 << 57]), OBS),
    "overflowing shape": Damage(obs(shape=[10] + [1 << 57] * 9), OBS),
    "shape beyond int64": Damage(text(META, "[10, 3]", f"[10, {1 << 64}]"), META),
    "negative shape": Damage(obs(shape=[10, -3]), META),
    "shape of bools": Damage(text(META, "[10, 3]", "[10, true]"), META),
    "shape of floats": Damage(text(META, "[10, 3]", "[10, 3.0]"), META),
    "other shape of the same size": Damage(obs(shape=[5, 6]), META),
    "too many dimensions": Damage(obs(shape=[10, 3] + [1] * 40), META),
    "no dimension": Damage(obs(shape=[]), META, IncompatibleCheckpoint),
    "nested": Damage(obs(is_nested=True), META, IncompatibleCheckpoint),
    "root of another size": Damage(edit(META, shape=[11]), META),
    "root without shape": Damage(edit(META, shape=None), META),
    "root of size 0": Damage(edit(META, shape=[0]), META, IncompatibleCheckpoint),
    "unknown collection": Damage(edit(META, _type="<class 'tensordict._lazy.LazyStackedTensorDict'>"), META, IncompatibleCheckpoint),
    "no collection": Damage(edit(META, _type=None), META),
    "traversal": Damage(edit(META, **{"../../obs": leaf(ENTRIES["obs"])}), "storage/..%2F..%2Fobs.memmap"),
    "traversal to a folder": Damage(edit(META, **{"..": {"type": "TensorDict"}}), "storage/%2E%2E/meta.json"),
    "absolute": Damage(edit(META, **{"/etc/passwd": leaf(ENTRIES["obs"])}), "storage/%2Fetc%2Fpasswd.memmap"),
    "zero byte": Damage(edit(META, **{"a\0b": leaf(ENTRIES["obs"])}), "storage/a%00b.memmap"),
    "reserved": Damage(edit(META, **{".engram": leaf(ENTRIES["obs"])}), META),
    "long key": Damage(edit(META, **{"k" * 256: leaf(ENTRIES["obs"])}), META),
    "long name": Damage(edit(META, **{" " * 200: leaf(ENTRIES["obs"])}), "%20.memmap"),
    "half a surrogate": Damage(edit(META, **{"\ud800": leaf(ENTRIES["obs"])}), META),
    "duplicate key": Damage(text(META, '"device": "cpu"', '"device": "cpu", "device": "cpu"'), META),
    "NaN": Damage(text(STATE, "0.6", "NaN"), STATE),
    "NaN anywhere": Damage(edit(META, note=float("nan")), META),
    "infinite": Damage(text(STATE, "0.6", "1e999"), STATE),
    "int beyond 64 bits": Damage(edit(META, note=1 << 63), META),
    "deep": Damage(edit("buffer_metadata.json", note=json.loads('{"a":' * 16 + "1" + "}" * 16)), "buffer_metadata.json"),
    "very deep": Damage(text(META, '"cpu"', "[" * 100_000 + "]" * 100_000), META),
    "huge JSON": Damage(bytes_of(META, lambda raw: raw + b" " * (1 << 20)), META),
    "no object": Damage(lambda path: put(path / LENGTH, b"[]"), LENGTH),
    "not UTF-8": Damage(lambda path: put(path / LENGTH, b'{"\xff": 1}'), LENGTH),
    "length beyond capacity": Damage(edit(LENGTH, len=11), LENGTH),
    "negative length": Damage(edit(LENGTH, len=-1), LENGTH),
    "length a bool": Damage(edit(LENGTH, len=True), LENGTH),
    "no length": Damage(edit(LENGTH, len=None), LENGTH),
    "tree without files": Damage(edit(LENGTH, is_pytree=True, metadata={"a.b": {"dtype": "torch.int8", "shape": [10]}}), LENGTH),
    **{
        f"tree {where}": Damage(edit(LENGTH, is_pytree=True, metadata={where: {"dtype": "torch.int8", "shape": [10]}}), LENGTH)
        for where in ("....buffer_metadata", "../outside", "/etc/passwd", "obs\0", "")
    },
    "negative cursor": Damage(edit(CURSOR, cursor=-4), CURSOR),
    "cursor a float": Damage(edit(CURSOR, cursor=6.0), CURSOR),
    "heap too large": Damage(edit(CURSOR, shape=[11, 2]), CURSOR),
    "heap of triples": Damage(edit(CURSOR, shape=[4, 3]), CURSOR),
    "heap of complex": Damage(edit(CURSOR, dtype="torch.complex64"), CURSOR),
    "heap of another size": Damage(edit(CURSOR, shape=[5, 2]), HEAP),
    "heap with a row outside": Damage(bytes_of(HEAP, lambda raw: raw[:4] + struct.pack("<f", 10) + raw[8:]), HEAP),
    "heap with half a row": Damage(bytes_of(HEAP, lambda raw: raw[:4] + struct.pack("<f", 1.5) + raw[8:]), HEAP),
    "heap with NaN": Damage(bytes_of(HEAP, lambda raw: raw[:4] + struct.pack("<f", float("nan")) + raw[8:]), HEAP),
    "NaN leaf": Damage(bytes_of(SUMS, lambda raw: raw[:8] + struct.pack("<d", float("nan")) + raw[16:]), SUMS),
    "infinite leaf": Damage(bytes_of(SUMS, lambda raw: raw[:8] + struct.pack("<d", float("inf")) + raw[16:]), SUMS),
    "negative leaf": Damage(bytes_of(SUMS, lambda raw: raw[:8] + struct.pack("<d", -1e-300) + raw[16:]), SUMS),
    "trees that differ": Damage(bytes_of(MINS, lambda raw: raw[:8] + struct.pack("<d", 1.5) + raw[16:]), MINS),
    "negative alpha": Damage(edit(STATE, _alpha=-0.1), STATE),
    "no beta": Damage(edit(STATE, _beta=None), STATE),
    "alpha a text": Damage(edit(STATE, _alpha="0.6"), STATE),
    "negative largest priority": Damage(edit(STATE, _max_priority=[-1.0, 0.0]), STATE),
    "largest priority beyond numbers": Damage(edit(STATE, _schema_version=0, _alpha=1e-4, _max_priority=[3.0, 5.0]), STATE),
    "tree smaller than the rows": Damage(edit(STATE, _max_capacity=5.0), STATE),
    "tree of another size": Damage(edit(STATE, _max_capacity=11.0), SUMS),
    "half a row of tree": Damage(edit(STATE, _max_capacity=10.5), STATE),
    "huge tree": Damage(edit(STATE, _max_capacity=1e17), SUMS),
    "batch size 0": Damage(edit("buffer_metadata.json", batch_size=0), "buffer_metadata.json"),
    "generator too long": Damage(edit(RNG_META, rng_state={"dtype": "torch.uint8", "shape": [1 << 30]}), RNG_META),
    "generator of floats": Damage(edit(RNG_META, rng_state={"dtype": "torch.float32", "shape": [4]}), RNG_META),
    "no state for a generator": Damage(bytes_of(RNG, lambda raw: b"\xff" * len(raw)), RNG),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(full, name):
    change, file, kind = DAMAGE[name]
    quietly_read(full)
    change(full)
    before = snapshot(full)
    with pytest.raises(kind) as caught:
        read(full)
    assert file in str(caught.value)
    assert snapshot(full) == before


def test_a_sparse_file_of_a_huge_shape_takes_no_memory(plain):
    """Its size is right: whoever would allocate what it says takes max_bytes."""
    shape = [10, 1 << 36]
    obs(shape=shape)(plain)
    os.truncate(plain / OBS, 4 * math.prod(shape))
    assert quietly_read(plain).fields[0].row_bytes == 1 << 38
    with pytest.raises(IncompatibleCheckpoint, match="Raise max_bytes"):
        read(plain, max_bytes=1 << 30)


def test_too_many_fields(tmp_path):
    path = make_dump(tmp_path / "dump", {"x": torch.arange(2)}, 2)
    metadata = {f"k{i}": {"dtype": "torch.int8", "shape": [2, 0]} for i in range(4097)}
    put(path / LENGTH, {"metadata": metadata, "is_pytree": True, "len": 2})
    with pytest.raises(IncompatibleCheckpoint, match="more than 4096 fields"):
        read(path)


def test_two_files_for_one_leaf_of_a_tree(tmp_path):
    path = make_dump(tmp_path / "dump", {"x": torch.arange(2)}, 2)
    put(path / LENGTH, {"metadata": {"a.b": {"dtype": "torch.int8", "shape": [2]}}, "is_pytree": True, "len": 2})
    put(path / "storage" / "a.b.memmap", b"12")
    assert quietly_read(path).fields[0].key == ("a.b",)
    put(path / "storage" / "a" / "b.memmap", b"12")
    with pytest.raises(CorruptCheckpoint, match="expected one file"):
        read(path)


def test_a_leaf_without_elements_has_no_path_in_a_tree(tmp_path):
    """So it may be named as it likes."""
    path = make_dump(tmp_path / "dump", {"x": torch.arange(2)}, 2)
    leaves = {name: {"dtype": "torch.int8", "shape": [2, 0]} for name in ("../x", "..", "/etc.passwd")}
    put(path / LENGTH, {"metadata": leaves, "is_pytree": True, "len": 2})
    with watched() as events:
        dump = quietly_read(path)
    assert [field.key for field in dump.fields] == [("", "", "/x"), ("", "", ""), ("/etc", "passwd")]
    assert not {"..", "passwd", "/etc", "/x"} & {str(event[1]) for event in events}
    assert columns_of(dump)[0].shape == (2, 0)


def test_folders_nested_without_end(tmp_path):
    """TensorDicts in TensorDicts, deeper than any key may be."""
    path = make_dump(tmp_path / "dump", {"x": torch.arange(2)}, 2)
    meta = {"a": {"type": "TensorDict"}, "shape": [2], "_type": "<class 'tensordict._td.TensorDict'>"}
    folder = path / "storage"
    for _ in range(30):
        put(folder / "meta.json", meta)
        folder = folder / "a"
    with pytest.raises(CorruptCheckpoint, match="at most 16 levels"):
        read(path)


def maps():
    with contextlib.suppress(FileNotFoundError):
        return Path("/proc/self/maps").read_text()
    return ""


def test_nothing_is_written_mapped_or_unpickled(full):
    for name in ("prefetch.pkl", "transform.t", "sampler/consuming_sampler.pt"):
        put(full / name, pickle.dumps({"a": 1}))
    before = snapshot(full)
    with watched() as events:
        dump = quietly_read(full)
        columns = columns_of(dump)
    opened = {str(event[1]) for event in events if event[0] == "open"}
    assert {"obs.memmap", "sumtree.memmap", "storage_metadata.json"} <= opened, "the hook sees what is opened"
    assert list(faults(events)) == []
    assert str(full) not in maps()
    assert snapshot(full) == before
    assert len(columns) == 2


def test_the_hook_sees_what_it_is_for(full):
    put(full / "prefetch.pkl", pickle.dumps(collections.OrderedDict()))
    with watched() as events:
        with open(full / "prefetch.pkl", "rb") as file:
            pickle.load(file)
        with open(full / OBS, "r+b"):
            pass
    found = list(faults(events))
    assert any("a pickle" in fault for fault in found)
    assert any("for writing" in fault for fault in found)
    assert "pickle.find_class" in found
    if maps():
        td = TensorDict.load_memmap(full / "storage")
        assert str(full) in maps()
        del td


def test_read_only_folders_are_read(full):
    for path in [*full.rglob("*"), full]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert len(columns_of(quietly_read(full))) == 2
    finally:
        for path in [full, *full.rglob("*")]:
            path.chmod(0o700)


def test_structures_are_validated_as_those_of_stores(plain):
    dump = quietly_read(plain)
    assert dump.structure == Node(
        "tensordict",
        children={"obs": Node("leaf", field=0), "next": Node("tensordict", children={"done": Node("leaf", field=1)})},
    )
    assert dump.schema().capacity == 10
