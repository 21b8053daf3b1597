"""Dumps of TorchRL's ``CompressedListStorage``."""

import collections
import json
import os
import shutil
import sys
import warnings
import zlib

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from engram import (
    CompressedListStorage,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.torchrl.dumps import read
from tests.torchrl import make_golden
from tests.torchrl.torchrl_dumps import edit, faults, make_priorities, put, quietly_read, snapshot, watched

STORAGE = "storage/"
ITEMS = STORAGE + "metadata.json"
PLACES = STORAGE + "data_indices.json"
DATA = STORAGE + "compressed_data/"


def small(tensor):
    return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)


def large(data, said):
    raw = bytearray(zlib.decompress(data.numpy().tobytes()))
    made = torch.frombuffer(raw, dtype=said["dtype"]) if raw else torch.empty(0, dtype=said["dtype"])
    return made.view(said["shape"])


def compressed(size=10):
    return CompressedListStorage(size, compression_fn=small, decompression_fn=large)


def own(size=10):
    pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return CompressedListStorage(size)


STORAGES = [compressed, own, ListStorage]


def quietly(call, *arguments, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not read, and lost")
        return call(*arguments, **options)


def loaded(path, storage=ListStorage, *, size=10, kind=ReplayBuffer, **options):
    rb = kind(storage=storage(size), collate_fn=list, **{"batch_size": 2, **options})
    quietly(rb.loads, path)
    return rb


def items_of(rb):
    return [rb.storage[i] for i in range(len(rb))]


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        return torch.equal(a, b)
    if isinstance(a, TensorDict):
        assert a.batch_size == b.batch_size
        return set(a.keys()) == set(b.keys()) and all(same(a.get(key), b.get(key)) for key in a.keys())
    if isinstance(a, NonTensorData):
        return a.data == b.data
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or str(a) == str(b) == "nan"


def dumped(torchrl, path, items, *, size=10, kind="ReplayBuffer", **options):
    """A dump by TorchRL of items that were added one by one."""
    rb = getattr(torchrl, kind)(storage=torchrl.CompressedListStorage(size, **options), batch_size=2, collate_fn=list)
    for item in items:
        rb.add(item)
    rb.dumps(path)
    return path


CASES = {
    "tensors": [torch.arange(6.0).view(2, 3) + i for i in range(3)],
    "ragged": [torch.arange(i + 1) for i in range(4)],
    "scalars": [torch.tensor(3, dtype=torch.int16), torch.tensor(2.5, dtype=torch.float64)],
    "without elements": [torch.zeros(0, 3), torch.zeros(2, 0, dtype=torch.int8)],
    "dtypes": [
        torch.tensor([1, 0]).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.float16, torch.uint16, torch.complex64)
    ],
    "tensordicts": [TensorDict({"a": torch.arange(3) + i, "b": torch.ones(2, i)}) for i in range(3)],
    "other fields each": [TensorDict({"a": torch.arange(3)}), TensorDict({"b": torch.arange(2)})],
    "keys": [TensorDict({"a.b": torch.arange(3), "c/d": torch.ones(2), "..": torch.ones(1), "é ": torch.zeros(1), "data": torch.ones(2)})],
    "text": [TensorDict({"a": torch.arange(i + 1), "text": f"{i} tokens"}) for i in range(3)],
    "notes": [TensorDict({"a": torch.ones(1), "note": NonTensorData({"x": 1, "y": None})})],
    "empty tensordict": [TensorDict({})],
    "dicts": [
        {"a": torch.arange(2, dtype=torch.uint8) + i, "n": {"b": torch.ones(2, 1, dtype=torch.float64), "c": 3}, "s": "x"}
        for i in range(2)
    ],
    "lists": [[torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)], [1, 2], ["a", "b"]],
    "lists in dicts": [{"a": [torch.ones(2, dtype=torch.int8)], "b": [1.5, 2.5]}],
    "anything": [1, 2.5, True, "text", {}, {"a": {}}],
    "not finite": [float("nan"), {"a": torch.tensor([float("inf")])}],
    "mixed": [torch.arange(3), "x", TensorDict({"a": torch.ones(2)}), {"a": torch.ones(1)}],
}  # fmt: skip


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
def test_items_are_as_they_were(tmp_path, torchrl, name, storage):
    path = dumped(torchrl, tmp_path / "dump", CASES[name])
    before = snapshot(path)
    with watched() as events:
        rb = loaded(path, storage)
    assert list(faults(events)) == []
    assert snapshot(path) == before
    assert same(items_of(rb), CASES[name])
    assert rb.write_count == len(rb)
    rb.add(torch.ones(7))
    assert len(items_of(rb)[-1]) == 7


@pytest.mark.filterwarnings("ignore:Attempting to set a value")
def test_what_torchrl_does_not_dump(tmp_path, torchrl):
    """If it did some day, more would have to be read."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        dumped(torchrl, tmp_path / "nested", [TensorDict({"a": TensorDict({"b": torch.ones(2)})})])
    with pytest.raises(ValueError, match="TensorDict conversion"):
        dumped(torchrl, tmp_path / "tuple", [(torch.ones(2), torch.ones(3))])


@pytest.mark.filterwarnings("ignore:Using `add")
def test_batch_sizes_are_those_that_torchrl_kept(tmp_path, torchrl):
    """It forgets them when an item is written."""
    path = dumped(torchrl, tmp_path / "dump", [TensorDict({"a": torch.zeros(3, 2)}, [3])])
    assert torchrl_items(torchrl, path)[0].batch_size == ()
    assert items_of(loaded(path))[0].batch_size == ()


def torchrl_items(torchrl, path):
    rb = torchrl.ReplayBuffer(storage=torchrl.CompressedListStorage(10), batch_size=2, collate_fn=list)
    rb.loads(path)
    return [rb._storage[i] for i in range(len(rb._storage))]


@pytest.mark.parametrize("name", ["lists", "lists in dicts"])
def test_what_json_does_not_say_is_told(tmp_path, torchrl, name):
    path = dumped(torchrl, tmp_path / "dump", CASES[name])
    with pytest.warns(UserWarning, match=r"which lists in items were tuples"):
        read(path)
    path = dumped(torchrl, tmp_path / "other", CASES["dicts"])
    with pytest.warns(UserWarning, match="prefetched batches") as caught:
        read(path)
    assert "tuples" not in str(caught[0].message)


# ---- the ring ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [1, 3, 4, 5, 8, 11])
def test_a_ring_goes_on_where_it_was(tmp_path, torchrl, written):
    path = dumped(torchrl, tmp_path / "dump", [torch.full((1,), i) for i in range(written)], size=4)
    rb = loaded(path, size=4)
    assert rb.write_count == written
    for more in range(written, written + 6):
        live = range(max(0, more - 4), more)
        assert sorted(map(int, items_of(rb))) == list(live)
        tickets = rb.storage.tickets_of(torch.arange(len(rb)))
        oldest_first = [int(rb.storage[int(row)]) for row in tickets.argsort()]
        assert oldest_first == list(live)
        rb.add(torch.full((1,), more))


def test_a_list_of_another_size(tmp_path, torchrl):
    items = [torch.full((1,), i) for i in range(6)]
    path = dumped(torchrl, tmp_path / "full", items, size=4)
    for size in (5, 3):
        with pytest.raises(IncompatibleCheckpoint, match="Make the storage with max_size=4"):
            loaded(path, size=size)
    rb = loaded(path, size=None)
    rb.extend([torch.full((1,), i) for i in (6, 7)])
    assert (rb.storage.max_size, list(map(int, items_of(rb)))) == (4, [4, 5, 6, 7])
    path = dumped(torchrl, tmp_path / "seam at the end", items[:4], size=4)
    rb = loaded(path, size=9)
    rb.add(torch.full((1,), 4))
    assert list(map(int, items_of(rb))) == [0, 1, 2, 3, 4]
    with pytest.raises(IncompatibleCheckpoint, match="at most 3 items.*got 4"):
        loaded(path, size=3)


def test_what_was_here_goes(tmp_path, torchrl):
    path = dumped(torchrl, tmp_path / "dump", CASES["ragged"])
    rb = ReplayBuffer(storage=compressed(), collate_fn=list, batch_size=2)
    rb.extend([torch.zeros(9)] * 7)
    before = rb.storage.tickets_of(torch.arange(7))
    quietly(rb.loads, path)
    assert same(items_of(rb), CASES["ragged"])
    after = rb.storage.tickets_of(torch.arange(len(rb)))
    assert int(after.min()) > int(before.max()), "late updates of what was here are none of what is here now"


# ---- buffers and samplers ------------------------------------------------------------------------------------------------


def test_tensordict_buffers(tmp_path, torchrl):
    rows = [TensorDict({"a": torch.arange(2) + i}) for i in range(3)]
    path = dumped(torchrl, tmp_path / "dump", rows, kind="TensorDictReplayBuffer")
    assert "index" in json.loads((path / ITEMS).read_text())[0]["fields"], "TorchRL keeps it"
    rb = TensorDictReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
    quietly(rb.loads, path)
    assert same([rb.storage[i] for i in range(3)], rows)
    batch = rb.sample()
    assert torch.equal(batch["a"][:, 0], batch["index"])


@pytest.mark.parametrize("storage", STORAGES)
def test_priorities(tmp_path, torchrl, storage):
    path = dumped(torchrl, tmp_path / "dump", [torch.full((1,), i) for i in range(3)])
    make_priorities(path, [0.0, 4.0, 1.0] + [0.0] * 7, alpha=0.5, beta=0.25, largest=(16.0, 1.0))
    rb = loaded(path, storage, sampler=PrioritizedSampler(10, alpha=0.9, beta=0.9), batch_size=500)
    assert (rb.sampler.alpha, rb.sampler.beta) == (0.5, 0.25)
    _, info = rb.sample(return_info=True)
    counts = torch.bincount(info["index"], minlength=3)
    assert counts[0] == 0
    assert counts[1] > 2 * counts[2]
    assert rb.sampler.state_dict()["highest"] == 16.0


def test_generators_and_the_batch_size(tmp_path, torchrl):
    rb = torchrl.ReplayBuffer(
        storage=torchrl.CompressedListStorage(10),
        batch_size=7,
        generator=torch.Generator().manual_seed(3),
        collate_fn=list,
    )
    rb.add(torch.ones(1))
    rb.dumps(tmp_path / "dump")
    here = torch.Generator().manual_seed(4)
    there = ReplayBuffer(storage=ListStorage(10), collate_fn=list, generator=here)
    quietly(there.loads, tmp_path / "dump")
    assert there.batch_size == 7
    assert torch.equal(here.get_state(), torch.Generator().manual_seed(3).get_state())


# ---- streams -------------------------------------------------------------------------------------------------------------


def test_streams_of_python_3_14(tmp_path, torchrl):
    """Which TorchRL then makes by Zstandard."""
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    path = dumped(torchrl, tmp_path / "dump", CASES["tensors"])
    for number, item in enumerate(CASES["tensors"]):
        replace_stream(path, number, zstd.compress(item.numpy().tobytes(), level=3))
    assert same(items_of(loaded(path)), CASES["tensors"])
    replace_stream(path, 1, zstd.compress(bytes(1 << 24)))
    with pytest.raises(
        CorruptCheckpoint, match=r"compressed_data/1/data.memmap: expected a stream of 24 bytes, got one of more"
    ):
        loaded(path)
    replace_stream(path, 1, zstd.compress(bytes(24))[:-2])
    with pytest.raises(CorruptCheckpoint, match=r"compressed_data/1/data.memmap: expected a stream of 24 bytes"):
        loaded(path)


def replace_stream(path, number, stream):
    put(path / f"{DATA}{number}/data.memmap", stream)
    meta = path / f"{DATA}{number}/meta.json"
    tree = json.loads(meta.read_text())
    tree["data"]["shape"] = [len(stream)]
    put(meta, tree)


def test_functions_of_the_users(tmp_path, torchrl):
    def halved(tensor):
        return small(tensor * 2)

    def doubled(data, said):
        return large(data, said) / 2

    options = {"compression_fn": halved, "decompression_fn": doubled}
    path = dumped(torchrl, tmp_path / "dump", CASES["tensors"], **options)
    rb = loaded(path, lambda size: CompressedListStorage(size, **options))
    assert same(items_of(rb), CASES["tensors"])

    def plain(tensor):
        return tensor.reshape(-1)

    def shaped(data, said):
        return data.view(said["shape"])

    options = {"compression_fn": plain, "decompression_fn": shaped}
    path = dumped(torchrl, tmp_path / "other", CASES["tensors"], **options)
    assert same(items_of(loaded(path, lambda size: CompressedListStorage(size, **options))), CASES["tensors"])
    with pytest.raises(IncompatibleCheckpoint, match=r"0/data.memmap: .*TorchRL had a compression_fn of your own"):
        loaded(path)
    with pytest.raises(IncompatibleCheckpoint, match=r"decompression_fn raised error .*whose default is zlib"):
        loaded(path, compressed)
    options["decompression_fn"] = lambda data, said: data.to(torch.int8)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"expected a tensor \[2, 3\] torch.float32 .*got \[6\] torch.int8"
    ):
        loaded(path, lambda size: CompressedListStorage(size, **options))


def test_no_more_is_made_of_a_stream_than_it_should_hold(tmp_path, torchrl):
    """A bomb, of an item of 24 bytes."""
    path = dumped(torchrl, tmp_path / "dump", CASES["tensors"])
    stream = zlib.compressobj()
    bomb = b"".join(stream.compress(bytes(1 << 24)) for _ in range(4)) + stream.flush()
    replace_stream(path, 2, bomb)
    for storage in (ListStorage, own):
        with pytest.raises(CorruptCheckpoint, match=r"2/data.memmap: expected a stream of 24 bytes, got one of more"):
            loaded(path, storage)


def test_more_than_there_is_memory(tmp_path, torchrl):
    path = dumped(torchrl, tmp_path / "dump", CASES["tensors"])
    dump = quietly_read(path, max_bytes=1 << 20)
    assert len(list(dump.read(None, whole=True))) == 3
    dump.items._most = 48
    assert len(list(dump.read(None, whole=False))) == 3
    with pytest.raises(IncompatibleCheckpoint, match="at most 48 bytes in all items.*got 72.*CompressedListStorage"):
        next(dump.read(None, whole=True))
    dump.items._most = 23
    with pytest.raises(IncompatibleCheckpoint, match="at most 23 bytes in item 0.*got 24"):
        next(dump.read(None, whole=False))
    with pytest.raises(CorruptCheckpoint, match=r"metadata.json: expected at most 10 bytes"):
        read(path, max_bytes=160)


def test_a_huge_item_is_refused_before_anything_is_allocated(tmp_path, torchrl):
    path = dumped(torchrl, tmp_path / "dump", CASES["tensors"])
    shape_of(1, [1 << 40, 1 << 14])(path)
    for storage in (ListStorage, own):
        with pytest.raises(
            IncompatibleCheckpoint, match=r"metadata.json: expected at most \d+ bytes in (item 1|all items)"
        ):
            loaded(path, storage)


# ---- damage --------------------------------------------------------------------------------------------------------------


def item(number, **changes):
    def change(path):
        tree = json.loads((path / ITEMS).read_text())
        tree[number].update(changes)
        put(path / ITEMS, tree)

    return change


def shape_of(number, shape):
    return item(number, shape={"__type__": "torch.Size", "value": shape})


def dtype_of(number, dtype):
    return item(number, dtype={"__type__": "torch.dtype", "value": dtype})


def tree(name, change):
    return lambda path: put(path / name, change(json.loads((path / name).read_text())))


def stream(change):
    def replace(path):
        raw = (path / DATA / "1/data.memmap").read_bytes()
        replace_stream(path, 1, change(raw))

    return replace


def link(name):
    def change(path):
        (path / name).rename(path / "moved")
        (path / name).symlink_to(path / "moved")

    return change


FIRST = DATA + "0/data.memmap"
SECOND = DATA + "1/data.memmap"
META = DATA + "1/meta.json"
Damage = collections.namedtuple("Damage", ["change", "file", "kind"], defaults=[CorruptCheckpoint])

DAMAGE = {
    **{
        f"{name} missing": Damage(lambda path, name=name: (path / name).unlink(), name)
        for name in (ITEMS, PLACES, SECOND, META, DATA + "meta.json")
    },
    **{
        f"{name} shorter": Damage(lambda path, name=name: put(path / name, (path / name).read_bytes()[:-1]), name)
        for name in (ITEMS, PLACES, SECOND, META, DATA + "meta.json")
    },
    **{
        f"{name} longer": Damage(lambda path, name=name: put(path / name, (path / name).read_bytes() + b"x"), name)
        for name in (ITEMS, PLACES, SECOND, META)
    },
    **{f"{name} a link": Damage(link(name), name) for name in (ITEMS, PLACES, FIRST, SECOND, META, DATA + "1")},
    "data a link": Damage(link(STORAGE + "compressed_data"), "compressed_data"),
    "no data": Damage(lambda path: (path / STORAGE / "compressed_data").rename(path / "moved"), PLACES),
    "items no list": Damage(tree(ITEMS, lambda items: {"a": items}), ITEMS),
    "an item missing": Damage(tree(ITEMS, lambda items: items[1:]), PLACES),
    "an item more": Damage(tree(ITEMS, lambda items: [*items, items[0]]), PLACES),
    "no item": Damage(tree(ITEMS, lambda items: [None, *items[1:]]), ITEMS),
    "an item without a type": Damage(item(1, type=None), ITEMS),
    "an item of another type": Damage(item(1, type="pickle"), ITEMS),
    "places no list": Damage(tree(PLACES, lambda places: 3), PLACES),
    "places of texts": Damage(tree(PLACES, lambda places: ["0", "../1", "2"]), PLACES),
    "negative places": Damage(tree(PLACES, lambda places: [0, -1, 2]), PLACES),
    "places twice": Damage(tree(PLACES, lambda places: [0, 0, 1]), PLACES),
    "places out of order": Damage(tree(PLACES, lambda places: [1, 0, 2]), PLACES),
    "places beyond": Damage(tree(PLACES, lambda places: [0, 1, 3]), PLACES),
    "no place of a tensor": Damage(
        lambda path: [tree(PLACES, lambda places: [0, None, 1])(path), os.rename(path / DATA / "2", path / "moved")], ITEMS
    ),
    "a folder missing": Damage(lambda path: (path / DATA / "2").rename(path / "moved"), PLACES),
    "a folder more": Damage(lambda path: (path / DATA / "3").mkdir(), PLACES),
    "data no stack": Damage(edit(DATA + "meta.json", _type="<class 'tensordict._td.TensorDict'>"), DATA + "meta.json"),
    "negative shape": Damage(shape_of(1, [-2, 3]), ITEMS),
    "shape of texts": Damage(shape_of(1, ["2", "3"]), ITEMS),
    "shape of floats": Damage(shape_of(1, [2.0, 3.0]), ITEMS),
    "shape too long": Damage(shape_of(1, [1] * 40), ITEMS),
    "shape beyond int64": Damage(shape_of(1, [1 << 70]), ITEMS),
    "shape smaller": Damage(shape_of(1, [2, 2]), SECOND),
    "shape larger": Damage(shape_of(1, [2, 4]), SECOND),
    "no shape": Damage(item(1, shape=None), ITEMS),
    "another dtype": Damage(dtype_of(1, "torch.float64"), SECOND),
    "unknown dtype": Damage(dtype_of(1, "torch.float99"), ITEMS, IncompatibleCheckpoint),
    "dtype by attribute": Damage(dtype_of(1, "torch.load"), ITEMS, IncompatibleCheckpoint),
    "dtype that would be evaluated": Damage(dtype_of(1, "__import__('os').abort()"), ITEMS, IncompatibleCheckpoint),
    "dtype no text": Damage(dtype_of(1, 7), ITEMS),
    "quantized": Damage(dtype_of(1, "torch.qint8"), ITEMS, IncompatibleCheckpoint),
    "a stream cut off": Damage(stream(lambda raw: raw[:-1]), SECOND),
    "a stream that goes on": Damage(stream(lambda raw: raw + b"x"), SECOND),
    "two streams": Damage(stream(lambda raw: raw + raw), SECOND),
    "a stream of less": Damage(stream(lambda raw: zlib.compress(bytes(23))), SECOND),
    "a stream of more": Damage(stream(lambda raw: zlib.compress(bytes(25))), SECOND),
    "a byte of a stream": Damage(stream(lambda raw: raw[:-4] + bytes(b ^ 1 for b in raw[-4:])), SECOND),
    "an empty stream": Damage(stream(lambda raw: b""), SECOND, IncompatibleCheckpoint),
    "no stream": Damage(stream(lambda raw: b"abc" + raw), SECOND, IncompatibleCheckpoint),
    "a stream of a pickle": Damage(stream(lambda raw: b"\x80\x04N."), SECOND, IncompatibleCheckpoint),
    "a stream of floats": Damage(edit(META, data={"dtype": "torch.float32", "shape": [4]}), SECOND),
    "a stream of bfloat16": Damage(
        lambda path: [replace_stream(path, 1, b"1234"), edit(META, data={"dtype": "torch.bfloat16", "shape": [2]})(path)], SECOND,
        IncompatibleCheckpoint,
    ),
    "a stream of another size": Damage(edit(META, data={"dtype": "torch.uint8", "shape": [1 << 50]}), ITEMS, IncompatibleCheckpoint),
    "a stream of an unknown dtype": Damage(edit(META, data={"dtype": "torch.int99", "shape": [4]}), META, IncompatibleCheckpoint),
    "nested": Damage(edit(META, data={"dtype": "torch.uint8", "shape": [4], "is_nested": True}), META, IncompatibleCheckpoint),
    "duplicate key": Damage(
        lambda path: put(path / ITEMS, (path / ITEMS).read_bytes().replace(b'"type"', b'"type": "other", "type"', 1)), ITEMS
    ),
    "very deep": Damage(lambda path: put(path / ITEMS, b"[" * 100_000 + b"]" * 100_000), ITEMS),
    "not UTF-8": Damage(lambda path: put(path / PLACES, b'["\xff"]'), PLACES),
    "cursor beyond": Damage(edit("writer/metadata.json", cursor=4), "writer/metadata.json"),
}  # fmt: skip


@pytest.fixture
def tensors(golden, tmp_path):
    """Three tensors [2, 3] of float32, by TorchRL 0.14.1."""
    return shutil.copytree(golden / "tensors", tmp_path / "dump")


@pytest.mark.parametrize("storage", [ListStorage, compressed])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage(tensors, name, storage):
    change, file, kind = DAMAGE[name]
    loaded(tensors, storage)
    change(tensors)
    if storage is compressed and name in ("a stream that goes on", "two streams"):
        return  # which the function of the user passes over
    if storage is compressed and name in ("an empty stream", "no stream", "a stream of a pickle", "a stream of floats"):
        kind = (kind, IncompatibleCheckpoint)
    elif storage is compressed and "stream" in name:
        kind = IncompatibleCheckpoint  # the function of the user says what it is
    elif storage is compressed and name.startswith(("shape smaller", "shape larger", "another dtype")):
        kind = IncompatibleCheckpoint
    before = snapshot(tensors)
    rb = ReplayBuffer(storage=storage(10), collate_fn=list, batch_size=2)
    rb.extend([torch.ones(1), torch.zeros(2)])
    with pytest.raises(kind) as caught:
        quietly(rb.loads, tensors)
    assert file.rstrip("/") in str(caught.value)
    assert snapshot(tensors) == before
    assert [len(one) for one in items_of(rb)] == [1, 2]


def test_what_is_committed(golden):
    """One item of each kind, in a full list whose oldest is in row 2."""
    rb = loaded(golden / "items", size=len(make_golden.ITEMS))
    assert same(items_of(rb), make_golden.ITEMS)
    assert rb.write_count == len(make_golden.ITEMS) + 2
    rb.add("next")
    assert rb.storage[2] == "next"


def test_torchrl_writes_what_is_committed(torchrl, tmp_path, golden):
    dumped(torchrl, tmp_path / "dump", [*make_golden.ITEMS, *make_golden.ITEMS[:2]], size=len(make_golden.ITEMS))
    names = [
        {str(one.relative_to(path)): one.read_bytes() if one.suffix == ".json" else None for one in path.rglob("*")}
        for path in (tmp_path / "dump", golden / "items")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("storage", [LazyTensorStorage])
def test_storages_of_tensors_take_no_items(tensors, storage):
    with pytest.raises(IncompatibleCheckpoint, match="got the items of a list. Load them into a CompressedListStorage"):
        quietly(ReplayBuffer(storage=storage(10)).loads, tensors)
