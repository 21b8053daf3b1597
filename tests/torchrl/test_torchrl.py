"""Folders that TorchRL's ``dumps`` wrote. Where TorchRL is not installed, folders made by hand in its layout remain."""

import json
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import IncompatibleCheckpoint
from engram.format.schema import Field, Node, Schema
from engram.storages._structure import Structure
from engram.store.store import Store
from engram.torchrl.dumps import recognises
from tests.torchrl.torchrl_dumps import ENTRIES, columns_of, make_dump, oldest_first, quietly_read, raw

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:last_cursor is None"),  # TorchRL, of a storage that nothing was written to
]


@tensorclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


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
    assert recognises(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    assert (dump.capacity, dump.length, dump.columns) == (10, len(rb), ())
    assert (dump.position, dump.write_count, dump.batch_size) == (first, first, 5)
    assert (dump.priorities, dump.rng_state) == (None, None)
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
    with pytest.warns(UserWarning, match="digits are read as strings") if tree == "digits" else nullcontext():
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

    for sampler in (samplers.RandomSampler(), samplers.SamplerWithoutReplacement(drop_last=True)):
        dump = dumped(type(sampler).__name__, sampler=sampler)
        assert dump.priorities is None
        assert [name.partition(" ")[0] for name in dump.left_out] == ["prefetch.pkl"]
    generator = torch.Generator().manual_seed(7)
    dump = dumped("generator", generator=generator)
    assert torch.equal(dump.rng_state, generator.get_state())
    assert (
        dumped("slices", sampler=samplers.SliceSampler(slice_len=2, traj_key="number", strict_length=False)).priorities
        is None
    )
    dump = dumped("max", writer=torchrl.TensorDictMaxValueWriter(rank_key=("next", "deep", "reward")))
    assert dump.length == 8
    assert [name.partition(" ")[0] for name in dump.left_out] == ["prefetch.pkl"]
    assert (
        dumped("consuming", sampler=samplers.ConsumingSampler(2)).left_out[1].startswith("sampler/consuming_sampler.pt")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_the_best_rows_of_a_full_buffer(tmp_path, torchrl, dtype):
    rb = torchrl.TensorDictReplayBuffer(
        storage=torchrl.LazyTensorStorage(5), writer=torchrl.TensorDictMaxValueWriter(rank_key="r")
    )
    rb.extend(TensorDict({"r": torch.tensor([3, 9, 1, 7, 2, 8, 5, 6, 0, 4]).to(dtype)}, [10]))
    rb.dumps(tmp_path / "dump")
    dump = quietly_read(tmp_path / "dump")
    (column,) = [c for c, f in zip(columns_of(dump), dump.fields, strict=True) if f.key == ("r",)]
    assert sorted(column.tolist()) == [5, 6, 7, 8, 9]
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
    assert priorities.max_priority == 3.0


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
