"""Folders that TorchRL's ``dumps`` wrote. Where TorchRL is not installed, folders made by hand in its layout remain."""

import collections
import contextlib
import json
import math
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

from engram import CorruptCheckpoint, IncompatibleCheckpoint, LazyTensorStorage, TensorDictReplayBuffer
from engram.format.schema import DTYPES, Field, Node, Schema
from engram.migrate.torchrl.dump import is_torchrl_dump, read
from engram.storages._structure import Structure
from engram.store import Store

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:last_cursor is None"),  # TorchRL, of a storage that nothing was written to
]

MAX32 = float(torch.finfo(torch.float32).max)


@tensorclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


@tensorclass
class Labelled:
    value: torch.Tensor
    label: object


# ---- help ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchrl")
        import torchrl.data
        import torchrl.data.replay_buffers.checkpointers
    return torchrl.data


def quietly_read(path, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not read, and lost")
        return read(path, **options)


def columns_of(dump):
    columns = []
    for field in dump.fields:
        out = torch.empty(dump.length, *field.shape, dtype=getattr(torch, field.dtype))
        dump.read_rows(field.key, out)
        columns.append(out)
    return columns


def rows_of(dump, like=None):
    """All live rows, put together as the schema says."""
    schema = dump.schema(like)
    columns = [torch.empty(dump.length, *f.shape, dtype=getattr(torch, f.dtype)) for f in schema.fields]
    for field, column in zip(schema.fields, columns, strict=True):
        dump.read_rows(field.key, column)
    return Structure.from_schema(schema).unflatten(columns, torch.Size((dump.length,)))


def same(a, b):
    """Bitwise equality of anything made of tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    assert type(a) is type(b)
    assert a.batch_size == b.batch_size
    return set(a.keys()) == set(b.keys()) and all(same(a.get(k), b.get(k)) for k in a.keys())


def raw(tensor):
    tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def oldest_first(dump, values):
    rows = [p % dump.capacity for p in range(dump.position - dump.length, dump.position)]
    return values[rows].tolist()


def snapshot(folder):
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        found[str(path)] = (
            status.st_mode,
            status.st_size,
            status.st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
    return found


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())


def leaf(tensor):
    return {"device": "cpu", "shape": list(tensor.shape), "dtype": str(tensor.dtype), "is_nested": False}


def make_tensordict(folder, entries, shape):
    """A memory-mapped TensorDict, as tensordict writes it."""
    meta = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            meta[key] = {"type": "TensorDict"}
            make_tensordict(folder / key, value, shape)
        else:
            meta[key] = leaf(value)
            put(folder / f"{key}.memmap", raw(value))
    put(folder / "meta.json", {**meta, "shape": shape, "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"})


def make_dump(path, entries, length, *, writer=None, batch_size=4):
    """A dump by hand. ``entries``: tensors of full capacity."""
    first = next(iter(entries.values()))
    make_tensordict(path / "storage", entries, [len(first)])
    put(path / "storage" / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": length})
    if writer is not None:
        put(path / "writer" / "metadata.json", writer)
    put(path / "buffer_metadata.json", {"batch_size": batch_size, "consume_after_n_samples": None})
    return path


def make_priorities(path, sums, mins=None, *, alpha=0.6, beta=0.4, eps=1e-8, largest=(1.0, 0.0), capacity=None, **more):
    mins = [s or MAX32 for s in sums] if mins is None else mins
    put(path / "sampler" / "sumtree.memmap", np.array(sums, dtype="<f8").tobytes())
    put(path / "sampler" / "mintree.memmap", np.array(mins, dtype="<f8").tobytes())
    state = {"_alpha": alpha, "_beta": beta, "_eps": eps, "_max_priority": largest}
    put(
        path / "sampler" / "sampler_metadata.json",
        {**state, "_max_capacity": float(len(sums) if capacity is None else capacity), "_schema_version": 1, **more},
    )
    return path


ENTRIES = {"obs": torch.arange(30.0).reshape(10, 3), "next": {"done": torch.arange(10) % 2 == 0}}


@pytest.fixture
def plain(tmp_path):
    """Six rows of ten."""
    return make_dump(tmp_path / "dump", ENTRIES, 6, writer={"cursor": 6, "write_count": 6})


@pytest.fixture
def full(plain):
    """Everything at once, with priorities, ranks and a generator."""
    make_priorities(plain, [0.5, 1.0, 0.0, 2.0, 1.5, 3.0, 0, 0, 0, 0], largest=(3.0, 5.0))
    writer = {"cursor": 6, "write_count": 6, "rank_key": ["next", "reward"], "dtype": "torch.float32", "shape": [6, 2]}
    put(plain / "writer" / "metadata.json", writer)
    ranks = torch.tensor([[0.5, 3], [1.5, 2], [2.5, 5], [3.5, 0], [4.5, 1], [5.5, 4]])
    put(plain / "writer" / "current_top_values.memmap", raw(ranks))
    make_tensordict(plain / "rng_state", {"rng_state": torch.Generator().manual_seed(3).get_state()}, [])
    return plain


# ---- folders made by TorchRL ---------------------------------------------------------------------------------------------


def steps(first, n):
    numbers = torch.arange(first, first + n)
    return TensorDict(
        {
            "number": numbers,
            "obs": numbers.reshape(n, 1, 1) * torch.ones(2, 3),
            "half": numbers.to(torch.bfloat16),
            "odd/key. %é\\": numbers.to(torch.uint8),
            "..": numbers.to(torch.float16),
            "empty": torch.zeros(n, 0),
            "next": {"done": (numbers % 3 == 0).reshape(n, 1), "deep": {"reward": numbers.double()}},
        },
        [n],
    )


@pytest.mark.parametrize("writes", [[4], [10], [7, 7], [10, 10, 10], [3, 9, 9, 2]], ids=str)
@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage", "TensorStorage"])
@pytest.mark.parametrize("scratch", [False, True])
def test_tensordicts(tmp_path, torchrl, kind, writes, scratch):
    if kind == "TensorStorage":
        prepared = steps(0, 10).zero_()
        prepared["index"] = torch.zeros(10, dtype=torch.int64)
        storage = torchrl.TensorStorage(prepared)
        storage._len = 0
    else:
        storage = getattr(torchrl, kind)(
            10, **({"scratch_dir": tmp_path / "s"} if scratch and "Memmap" in kind else {})
        )
    rb = torchrl.TensorDictReplayBuffer(storage=storage, batch_size=5)
    first = 0
    for n in writes:
        data = steps(first, n)
        if "Memmap" in kind:
            del data["empty"]  # TorchRL cannot map a tensor without elements
        rb.extend(data)
        first += n
    rb.dumps(tmp_path / "dump")
    assert is_torchrl_dump(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    assert (dump.capacity, dump.length, dump.columns) == (10, len(rb), ())
    assert (dump.position, dump.write_count, dump.batch_size) == (first, first, 5)
    assert (dump.priorities, dump.drop_last, dump.ranks, dump.rng_state) == (None, None, None, None)
    rows = rows_of(dump)
    assert same(rows.exclude("index"), rb[:].exclude("index"))
    assert oldest_first(dump, rows["number"]) == list(range(first - len(rb), first))
    assert ("index",) not in [field.key for field in dump.schema(without=("index",)).fields]


def test_a_store_takes_the_schema_and_the_rows(tmp_path, torchrl):
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(steps(0, 8))
    rb.dumps(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    store = Store.private(dump.schema(without=("index",)))
    for field, tensor in zip(store.schema.fields, store.tensors, strict=True):
        dump.read_rows(field.key, tensor[: dump.length])
    views = [tensor[: dump.length] for tensor in store.tensors]
    assert same(Structure.from_schema(store.schema).unflatten(views, torch.Size([8])), rb[:].exclude("index"))


TREES = {
    "tensor": lambda n: torch.rand(n, 3),
    "dict": lambda n: {"a": torch.rand(n, 3), "b": {"c": torch.arange(n), "d.e": torch.rand(n, 2) > 0.5}},
    "dots": lambda n: {"a.b": torch.rand(n), "a": {"c.memmap": {"d": torch.rand(n)}}, "..": torch.rand(n), "": torch.rand(n)},
    "tuple": lambda n: (torch.rand(n, 3), torch.arange(n)),
    "list in a dict": lambda n: {"a": [torch.rand(n), torch.rand(n, 2)], "z": torch.rand(n)},
    "tuple in a list": lambda n: {"a": [(torch.rand(n), torch.rand(n, 2)), torch.rand(n)]},
    "no elements": lambda n: {"a": {"b": torch.zeros(n, 0)}, "z": torch.rand(n)},
    "digits": lambda n: {"1": torch.rand(n), "0": torch.rand(n)},
}  # fmt: skip


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("tree", TREES)
def test_trees(tmp_path, torchrl, tree, storage):
    if tree == "no elements" and "Memmap" in storage:
        pytest.skip("TorchRL cannot map a tensor without elements")
    rb = torchrl.ReplayBuffer(storage=getattr(torchrl, storage)(10))
    data = TREES[tree](6)
    rb.extend(data)
    rb.dumps(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    like = None
    if "tuple" in tree or "list" in tree:
        with pytest.raises(IncompatibleCheckpoint, match="lists or in tuples.*Write one such row"):
            dump.schema()
        structure = Structure.of(data, batched=True, call="test")
        like = Schema(3, 1, (), structure.fields, structure.root)
    rows = rows_of(dump, like)
    assert same(rows, data)
    assert (dump.capacity, dump.length, dump.position) == (10, 6, 6)


def test_a_structure_that_differs_is_not_taken(tmp_path):
    dump = quietly_read(make_dump(tmp_path / "dump", {"a": torch.rand(4), "index": torch.arange(4)}, 4))
    structure = Structure.of({"a": torch.rand(4), "index": torch.arange(4)}, batched=True, call="test")
    like = Schema(4, 1, (), structure.fields, structure.root)
    assert dump.schema(like).structure.kind == "tensordict", "a dict is no TensorDict"
    other = Schema(
        4,
        1,
        (),
        (Field(("a",), "float32", (0,)),),
        Node("tensordict", children={"a": Node("leaf", field=0)}, batch=(0,)),
    )
    assert dump.schema(other, without=("index",)).structure.batch == (), "nor is one of another batch size"
    assert [f.key for f in dump.schema(like, without=("index",)).fields] == [("a",), ("index",)], "the target has it"
    assert [f.key for f in dump.schema(without=("index",)).fields] == [("a",)]
    with pytest.raises(IncompatibleCheckpoint, match="besides"):
        dump.schema(without=("index", "a"))


def test_fields_come_in_the_order_of_the_target(tmp_path):
    dump = quietly_read(make_dump(tmp_path / "dump", {"a": torch.rand(4), "b": torch.arange(4)}, 4))
    structure = Structure.of(TensorDict({"b": torch.arange(4), "a": torch.rand(4)}, [4]), batched=True, call="test")
    like = Schema(4, 1, (), structure.fields, structure.root)
    assert dump.schema(like) == like


def test_tensorclasses(tmp_path, torchrl):
    data = Pair(left=torch.rand(6, 2), right=torch.arange(6), batch_size=[6])
    rb = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(data)
    rb.dumps(tmp_path / "root")
    assert same(rows_of(quietly_read(tmp_path / "root")), data)
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(TensorDict({"pair": data}, [6]))
    rb.dumps(tmp_path / "nested")
    assert same(rows_of(quietly_read(tmp_path / "nested"))["pair"], data)


@pytest.mark.parametrize(("ndim", "max_size"), [(1, 12), (1, 20), (2, 12), (2, 11), (2, 30)])
def test_more_dimensions(tmp_path, torchrl, ndim, max_size):
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(max_size, ndim=ndim))
    batch = {1: [12], 2: [3, 4]}[ndim]  # time is last here, and first in the storage
    *columns, time = batch
    width = 12 // time
    for i in range(4):
        rb.extend(TensorDict({"x": 100 * i + torch.arange(12.0).reshape(*batch, 1)}, batch))
        rb.dumps(tmp_path / str(i))
        dump = quietly_read(tmp_path / str(i), ndim=ndim)
        stored = rb._storage._storage["x"]
        assert (dump.columns, dump.fields[0].shape) == (tuple(columns), (1,))
        assert dump.capacity == len(stored) * width == -(-max_size // width) * width
        assert dump.position == dump.write_count == (i + 1) * time * width
        assert dump.length == min(dump.position, dump.capacity)
        (x, _) = columns_of(dump)
        assert torch.equal(x.flatten(), stored.flatten()[: dump.length])
        assert oldest_first(dump, x[:, 0].reshape(-1)) == [
            100 * (p // 12) + c * time + p % 12 // width
            for p in range(dump.position - dump.length, dump.position)
            for c in [p % width]
        ]


def test_another_number_of_dimensions_is_refused(plain):
    with pytest.raises(IncompatibleCheckpoint, match=r"expected 2 dimensions that index rows.*\[10\]"):
        quietly_read(plain, ndim=2)
    with pytest.raises(IncompatibleCheckpoint, match="in which order the dimensions are"):
        quietly_read(plain, ndim=3)


def test_samplers_and_writers(tmp_path, torchrl):
    def dumped(name, **components):
        rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), batch_size=2, **components)
        rb.extend(steps(0, 8))
        if "writer" not in components:
            rb.sample()
        rb.dumps(tmp_path / name)
        return quietly_read(tmp_path / name)

    from torchrl.data.replay_buffers import samplers

    assert dumped("random", sampler=samplers.RandomSampler()).drop_last is None
    for last in (False, True):
        dump = dumped(f"without {last}", sampler=samplers.SamplerWithoutReplacement(drop_last=last))
        assert dump.drop_last is last
    generator = torch.Generator().manual_seed(7)
    dump = dumped("generator", generator=generator)
    assert torch.equal(dump.rng_state, generator.get_state())
    assert (
        dumped("slices", sampler=samplers.SliceSampler(slice_len=2, traj_key="number", strict_length=False)).priorities
        is None
    )
    assert dumped("round robin", writer=torchrl.TensorDictRoundRobinWriter()).ranks is None
    dump = dumped("max", writer=torchrl.TensorDictMaxValueWriter(rank_key=("next", "deep", "reward")))
    assert dump.ranks.rank_key == ("next", "deep", "reward")
    assert dump.ranks.ranks.tolist() == list(range(8))
    assert (
        dumped("consuming", sampler=samplers.ConsumingSampler(2)).left_out[1].startswith("sampler/consuming_sampler.pt")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_ranks_of_a_full_buffer(tmp_path, torchrl, dtype):
    rb = torchrl.TensorDictReplayBuffer(
        storage=torchrl.LazyTensorStorage(5), writer=torchrl.TensorDictMaxValueWriter(rank_key="r")
    )
    rb.extend(TensorDict({"r": torch.tensor([3, 9, 1, 7, 2, 8, 5, 6, 0, 4]).to(dtype)}, [10]))
    rb.dumps(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    (column,) = [c for c, f in zip(columns_of(dump), dump.fields, strict=True) if f.key == ("r",)]
    assert sorted(column.tolist()) == [5, 6, 7, 8, 9]
    assert dump.ranks.ranks.tolist() == column.tolist(), "each row's own rank"
    assert dump.length == 5
    assert dump.position % 5 == 0


def test_buffers_that_cannot_be_written(tmp_path, torchrl):
    data = steps(0, 6)
    rb = torchrl.ReplayBuffer(storage=torchrl.TensorStorage(data), writer=torchrl.ImmutableDatasetWriter())
    rb.dumps(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    assert (dump.capacity, dump.length, dump.position) == (6, 6, 6)
    assert same(rows_of(dump), data)


def test_an_emptied_buffer(tmp_path, torchrl):
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(steps(0, 8))
    rb.empty(empty_write_count=False)
    rb.dumps(tmp_path / "empty")
    dump = quietly_read(tmp_path / "empty")
    assert (dump.length, dump.position, dump.write_count) == (0, 10, 8)
    rb.extend(steps(8, 3))
    rb.dumps(tmp_path / "again")
    dump = quietly_read(tmp_path / "again")
    assert (dump.length, dump.position, dump.write_count) == (3, 13, 11)
    assert oldest_first(dump, rows_of(dump)["number"]) == [8, 9, 10]


def test_priorities_of_torchrl(tmp_path, torchrl):
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    try:
        sampler = PrioritizedSampler(10, alpha=0.6, beta=0.4)
    except RuntimeError as error:
        pytest.skip(f"TorchRL's extension does not load: {error}")
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), sampler=sampler, batch_size=2)
    rb.extend(steps(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 3.0, 2.0]))
    rb.dumps(tmp_path / "dump")
    priorities = quietly_read(tmp_path / "dump").priorities
    torch.testing.assert_close(
        priorities.leaves, (torch.tensor([1.0, 0.0, 3.0, 2.0]).double() + 1e-8) ** 0.6, rtol=1e-6, atol=1e-6
    )
    assert (priorities.max_priority, priorities.max_row) == (3.0, 2)


@pytest.mark.parametrize("kind", ["FlatStorageCheckpointer", "NestedStorageCheckpointer", "H5StorageCheckpointer"])
def test_other_layouts_of_torchrl_are_refused_by_name(tmp_path, torchrl, kind):
    if kind.startswith("H5"):
        pytest.importorskip("h5py")
    from torchrl.data.replay_buffers import checkpointers

    rb = torchrl.TensorDictReplayBuffer(
        storage=torchrl.LazyTensorStorage(10), checkpointer=getattr(checkpointers, kind)(), batch_size=2
    )
    ends = torch.tensor([[False], [False], [False], [True]])
    root = {"obs": torch.rand(4, 2), "done": torch.zeros(4, 1, dtype=torch.bool)}
    root["terminated"] = root["done"].clone()
    after = {"obs": torch.rand(4, 2), "reward": torch.rand(4, 1), "done": ends, "terminated": ends.clone()}
    rb.extend(TensorDict({**root, "next": after}, [4]))
    rb.dumps(tmp_path / "dump")
    with pytest.raises(IncompatibleCheckpoint, match={"F": "flat", "N": "nested", "H": "HDF5"}[kind[0]]):
        read(tmp_path / "dump")


def test_ensembles_and_compressed_storages_of_torchrl_are_refused_by_name(tmp_path, torchrl):
    from torchrl.data.replay_buffers import samplers, writers

    members = [torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(4), batch_size=2) for _ in range(2)]
    for rb in members:
        rb.extend(steps(0, 3))
    rb = torchrl.ReplayBufferEnsemble(*members, batch_size=2)
    rb._storage.dumps(tmp_path / "a" / "storage")
    put(tmp_path / "a" / "buffer_metadata.json", {"batch_size": 2})
    with pytest.raises(IncompatibleCheckpoint, match="ensemble"):
        read(tmp_path / "a")
    storage = torchrl.CompressedListStorage(4)
    rb = torchrl.ReplayBuffer(storage=storage, sampler=samplers.RandomSampler(), writer=writers.RoundRobinWriter())
    rb.extend(steps(0, 3).select("obs"))
    rb.dumps(tmp_path / "b")
    with pytest.raises(IncompatibleCheckpoint, match="compressed"):
        read(tmp_path / "b")


def test_folders_by_hand_are_as_torchrl_makes_them(tmp_path, torchrl):
    """Else the tests below would prove nothing."""
    rb = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict(ENTRIES, [10]))
    rb.dumps(tmp_path / "theirs")
    make_dump(tmp_path / "ours", ENTRIES, 10, writer={"cursor": 0, "write_count": 10})

    def content(path):
        return {
            str(p.relative_to(path)): json.loads(p.read_text()) if p.suffix == ".json" else p.read_bytes()
            for p in path.rglob("*")
            if p.is_file() and p.suffix != ".pkl"
        }

    assert content(tmp_path / "ours") == content(tmp_path / "theirs")


# ---- the seam ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 9), st.sampled_from(["exact", "none", "less", "more"]))
@example(4, 0, 0, "none")
@example(4, 4, 0, "none")
@settings(max_examples=80)
def test_the_seam(tmp_path_factory, capacity, written, before, count):
    """A simulated ring: whatever is known of the writes, the live rows come out oldest first."""
    path = tmp_path_factory.mktemp("seam")
    ring = torch.full((capacity,), -1)
    for i in range(written):
        ring[i % capacity] = i
    length, cursor = min(written, capacity), written % capacity
    counts = {"exact": written, "none": None, "less": max(0, written - before), "more": written + before}
    make_dump(path, {"x": ring}, length, writer={"cursor": cursor, "write_count": counts[count]})
    dump = quietly_read(path)
    assert oldest_first(dump, ring) == list(range(written - length, written))
    assert dump.position % capacity == cursor
    known = counts[count]
    if known is None:
        assert dump.position == cursor + (capacity if length == capacity else 0)
        assert dump.write_count == dump.position
    else:
        assert dump.write_count == known
        assert max(known, length) <= dump.position < max(known, length) + capacity
        if count == "exact":
            assert dump.position == written


def test_old_dumps_without_a_count(plain):
    put(plain / "writer" / "metadata.json", {"cursor": 6})
    assert quietly_read(plain).position == 6


@pytest.mark.parametrize(("length", "cursor"), [(6, 5), (6, 7), (6, 0), (10, 10), (0, 1)])
def test_a_cursor_that_contradicts_the_rows(plain, length, cursor):
    put(plain / "storage" / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": length})
    put(plain / "writer" / "metadata.json", {"cursor": cursor, "write_count": cursor})
    with pytest.raises(CorruptCheckpoint, match=r"writer/metadata\.json: expected a cursor of .*, got"):
        read(plain)


# ---- priorities, ranks, generators ---------------------------------------------------------------------------------------


def test_priorities(full):
    dump = quietly_read(full)
    got = dump.priorities
    assert (got.alpha, got.beta, got.eps, got.max_priority, got.max_row) == (0.6, 0.4, 1e-8, 3.0, 5)
    assert got.leaves.dtype is torch.float64
    assert got.leaves.tolist() == [0.5, 1.0, 0.0, 2.0, 1.5, 3.0]


@pytest.mark.parametrize("unwritten", [MAX32, sys.float_info.max, float("inf")])
def test_leaves_never_written(plain, unwritten):
    make_priorities(plain, [1.0, 0.0, 0.0] + [1.0] * 7, [1.0, unwritten, 0.0] + [1.0] * 7)
    assert quietly_read(plain).priorities.leaves.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_leaves_of_rows_that_are_not_live_are_not_looked_at(plain):
    make_priorities(plain, [1.0] * 6 + [float("nan")] * 6, [1.0] * 12)
    assert quietly_read(plain).priorities.leaves.tolist() == [1.0] * 6


def test_leaves_are_bitwise(plain):
    values = [1.0, np.nextafter(1.0, 2), 5e-324, 1e300, 0.1, 1 / 3]
    make_priorities(plain, values + [0.0] * 4)
    assert quietly_read(plain).priorities.leaves.tolist() == values


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        ((float(np.float32(4.0**0.6)), 3.0), pytest.approx(4.0, rel=1e-5)),  # the leaf of row 3
        ((5.0, 3.0), 5.0),  # a priority; the row was rewritten since
        ((5.0, 9.0), 5.0),  # of a row that is not live
        ((5.0, None), 5.0),
        ((None, None), None),
    ],
)
def test_the_largest_priority_of_older_versions_may_be_a_leaf(plain, largest, expected):
    leaves = [1.0, 1.0, 1.0, float(np.float32(4.0**0.6)), 1.0, 1.0, 0, 0, 0, 0]
    make_priorities(plain, leaves, largest=largest)
    assert quietly_read(plain).priorities.max_priority == largest[0], "the version says it is a priority"
    described = plain / "sampler" / "sampler_metadata.json"
    state = json.loads(described.read_text())
    del state["_schema_version"]
    put(described, state)
    assert quietly_read(plain).priorities.max_priority == expected
    state["_alpha"] = 0.0
    put(described, state)
    assert quietly_read(plain).priorities.max_priority == largest[0], "alpha 0 cannot be undone"


def test_ranks(full):
    ranks = quietly_read(full).ranks
    assert ranks.rank_key == ("next", "reward")
    assert ranks.ranks.tolist() == [3.5, 4.5, 1.5, 0.5, 5.5, 2.5]


@pytest.mark.parametrize(
    "heap",
    [
        torch.tensor([[1.0, 0.0], [2.0, 1.0]]),
        torch.tensor([[float(i), float(max(i, 1))] for i in range(6)]),
        torch.tensor([]),
    ],
    ids=["some rows", "one twice", "none"],
)
def test_ranks_that_do_not_fit_are_left_to_the_rows(full, heap):
    put(full / "writer" / "current_top_values.memmap", raw(heap))
    state = json.loads((full / "writer" / "metadata.json").read_text())
    put(full / "writer" / "metadata.json", {**state, "shape": list(heap.shape)})
    assert quietly_read(full).ranks.ranks is None


def test_numbers_of_rows_that_were_rounded_are_not_trusted(tmp_path):
    """Above 2**11 rows for float16, as above 2**24 for float32: there a row's number may name another row."""
    for n, trusted in ((2048, True), (2049, False)):
        numbers = torch.arange(n)
        path = make_dump(tmp_path / str(n), {"x": numbers}, n)
        heap = torch.stack([torch.zeros(n), numbers.float()], dim=1).half()
        writer = {"cursor": 0, "write_count": n, "rank_key": "x", "dtype": "torch.float16", "shape": [n, 2]}
        put(path / "writer" / "metadata.json", writer)
        put(path / "writer" / "current_top_values.memmap", raw(heap))
        assert (quietly_read(path).ranks.ranks is not None) is trusted


def test_generators_continue(full):
    state = quietly_read(full).rng_state
    ours, theirs = torch.Generator(), torch.Generator().manual_seed(3)
    ours.set_state(state)
    assert torch.equal(torch.rand(5, generator=ours), torch.rand(5, generator=theirs))


def test_the_state_of_an_accelerators_generator_is_kept_as_it_is(plain):
    make_tensordict(plain / "rng_state", {"rng_state": torch.arange(16, dtype=torch.uint8)}, [])
    assert quietly_read(plain).rng_state.tolist() == list(range(16))


# ---- rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_dtype(tmp_path, dtype):
    size = DTYPES[dtype]
    numbers = np.arange(10 * 3 * size, dtype=np.uint8) if dtype != "bool" else np.arange(30, dtype=np.uint8) % 2
    values = torch.from_numpy(numbers).view(getattr(torch, dtype)).reshape(10, 3)
    dump = quietly_read(make_dump(tmp_path / "dump", {"x": values}, 7))
    assert dump.fields == (Field(("x",), dtype, (3,)),)
    assert raw(columns_of(dump)[0]) == raw(values[:7])
    piece = torch.empty(2, 3, dtype=values.dtype)
    dump.read_rows(("x",), piece, first=4)
    assert raw(piece) == raw(values[4:6])
    dump.read_rows(("x",), piece[:0], first=7)


def test_rows_that_are_asked_for_wrongly(plain):
    dump = quietly_read(plain)
    for key, out, first, kind in [
        (("x",), torch.empty(1, 3), 0, KeyError),
        (("obs",), torch.empty(1, 3, dtype=torch.float64), 0, ValueError),
        (("obs",), torch.empty(1, 4), 0, ValueError),
        (("obs",), torch.empty(()), 0, ValueError),
        (("obs",), torch.empty(3, 1).t().expand(2, 3), 0, ValueError),
        (("obs",), torch.empty(7, 3), 0, ValueError),
        (("obs",), torch.empty(1, 3), 6, ValueError),
        (("obs",), torch.empty(1, 3), -1, ValueError),
    ]:
        with pytest.raises(kind, match="expected"):
            dump.read_rows(key, out, first)


def test_a_file_that_changes_after_it_was_checked(plain):
    dump = quietly_read(plain)
    os.truncate(plain / "storage" / "obs.memmap", 119)
    with pytest.raises(CorruptCheckpoint, match=r"obs\.memmap: expected 120 bytes, got 119"):
        dump.read_rows(("obs",), torch.empty(6, 3))


def test_bytes_that_are_no_bools(plain):
    put(plain / "storage" / "next" / "done.memmap", bytes([0, 1, 2] + [0] * 7))
    dump = quietly_read(plain)
    dump.read_rows(("next", "done"), torch.empty(2, dtype=torch.bool))
    with pytest.raises(CorruptCheckpoint, match=r"done\.memmap: expected bools"):
        dump.read_rows(("next", "done"), torch.empty(3, dtype=torch.bool))


def test_descriptions_may_say_more_than_we_know(plain):
    edit("buffer_metadata.json", note=json.loads('{"a":' * 15 + "1" + "}" * 15), number=(1 << 63) - 1)(plain)
    assert quietly_read(plain).batch_size == 4


def test_names_of_older_versions(tmp_path):
    """They were not encoded."""
    path = make_dump(tmp_path / "dump", {"a b": torch.arange(4), "c:d": {"e<": torch.arange(4)}}, 4)
    assert (path / "storage" / "c:d" / "e<.memmap").is_file()
    assert all(torch.equal(column, torch.arange(4)) for column in columns_of(quietly_read(path)))


def test_a_limit(plain):
    assert quietly_read(plain, max_bytes=130).capacity == 10
    with pytest.raises(IncompatibleCheckpoint, match=r"at most 129 bytes, got 10 rows of 13 bytes\. Raise max_bytes"):
        read(plain, max_bytes=129)


def test_what_is_a_dump(tmp_path, plain):
    assert is_torchrl_dump(plain)
    assert not is_torchrl_dump(tmp_path / "nothing")
    assert not is_torchrl_dump(plain / "buffer_metadata.json")
    put(plain / "manifest.json", {})
    assert not is_torchrl_dump(plain), "ours may have been written over it"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


# ---- what is left out ----------------------------------------------------------------------------------------------------


def test_pickles_are_named(plain):
    for name in ("prefetch.pkl", "transform.t", "sampler/streaming_slice.pt", "sampler/own.pickle"):
        put(plain / name, b"not even a pickle")
    with pytest.warns(UserWarning, match="Pickles are never opened") as caught:
        read(plain)
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)
    text = str(caught[0].message)
    assert "prefetch.pkl (prefetched batches" in text
    assert "transform.t (state of the transforms" in text
    assert "sampler/streaming_slice.pt" in text
    assert "sampler/own.pickle" in text


def test_a_load_points_to_the_line_that_asked_for_it(plain):
    put(plain / "prefetch.pkl", b"not even a pickle")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.warns(UserWarning, match=f"{plain}: not read, and lost .*prefetch.pkl") as caught:
        rb.loads(plain)
    assert [it.filename for it in caught] == [__file__]
    assert len(rb) == 6


def test_nothing_left_out_is_no_warning(plain):
    assert read(plain).left_out == ()


def test_a_sampler_that_is_not_known(plain):
    make_tensordict(plain / "sampler", {"consumer_version": torch.tensor(3), "max_staleness": torch.tensor(9)}, [])
    with pytest.warns(UserWarning, match=r"sampler's state \(consumer_version, max_staleness\)"):
        dump = read(plain)
    assert dump.drop_last is None


def test_entries_that_are_no_tensors_are_named(tmp_path, torchrl):
    rb = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10))
    rb.extend(TensorDict({"x": torch.arange(4), "name": NonTensorData("n", batch_size=[4])}, [4]))
    rb.dumps(tmp_path / "dump")
    with pytest.warns(UserWarning, match="storage/name: field name, which is no tensor"):
        dump = read(tmp_path / "dump")
    assert {field.key for field in dump.fields} == {("x",), ("index",)}


def test_pickled_parts_of_tensorclasses_are_named(plain):
    folder = plain / "storage" / "labelled"
    make_tensordict(folder / "_tensordict", {"value": torch.arange(10)}, [10])
    put(folder / "meta.json", {"_type": f"<class '{__name__}.Labelled'>", "note": 1})
    put(folder / "other.pickle", b"?")
    meta = json.loads((plain / "storage" / "meta.json").read_text())
    put(plain / "storage" / "meta.json", {"labelled": {"type": "Labelled"}, **meta})
    with (
        pytest.warns(
            UserWarning, match=r"storage/labelled: what is no tensor in .*Labelled \(note, other\.pickle, a pickle\)"
        ),
        watched() as events,
    ):
        dump = read(plain)
    assert list(faults(events)) == []
    assert dump.structure.children["labelled"].type == f"{__name__}:Labelled"
    assert dump.fields[0] == Field(("labelled", "value"), "int64", ())


# ---- damage --------------------------------------------------------------------------------------------------------------


def edit(name, **changes):
    """A change of a JSON file: values by name, None removes."""

    def change(path):
        tree = json.loads((path / name).read_text())
        for key, value in changes.items():
            tree.pop(key, None) if value is None else tree.update({key: value})
        put(path / name, tree)

    return change


def text(name, old, new):
    def change(path):
        before = (path / name).read_text()
        assert old in before
        (path / name).write_text(before.replace(old, new, 1))

    return change


def bytes_of(name, change):
    return lambda path: put(path / name, change((path / name).read_bytes()))


def replaced(name, make):
    def change(path):
        (path / name).rename(path / "moved")
        make(path / name, path / "moved")

    return change


OBS = "storage/obs.memmap"
META = "storage/meta.json"
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


def obs(**changes):
    return edit(META, obs={**leaf(ENTRIES["obs"]), **changes})


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


# ---- what is opened ------------------------------------------------------------------------------------------------------

_watching: list[list] = []


def _hook(event, args):
    if _watching and event in ("open", "mmap.__new__", "os.mkdir", "os.rename", "os.remove", "pickle.find_class"):
        _watching[-1].append((event, *args))


@contextlib.contextmanager
def watched():
    if not hasattr(sys, "_engram_watches_opens"):
        sys.addaudithook(_hook)
        sys._engram_watches_opens = True
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def faults(events):
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for event, *args in events:
        if event != "open":
            yield event
        elif args[2] & writing:
            yield f"{args[0]} for writing"
        elif str(args[0]).endswith((".pkl", ".pickle", ".pt", ".t")):
            yield f"{args[0]}, a pickle"


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
        children={
            "obs": Node("leaf", field=0),
            "next": Node("tensordict", children={"done": Node("leaf", field=1)}),
        },
    )
    assert dump.schema().capacity == 10
