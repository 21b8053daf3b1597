"""Lists whose tensors are compressed, and lists whose batches are lazy stacks."""

import copy
import pickle
import sys
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from engram import (
    CompressedListStorage,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyStackStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    TensorDictReplayBuffer,
)
from engram._support import copies as streams
from engram.testing import StorageContract


def small(tensor):
    return torch.frombuffer(bytearray(zlib.compress(tensor.numpy().tobytes())), dtype=torch.uint8)


def large(data, said):
    raw = bytearray(zlib.decompress(data.numpy().tobytes()))
    flat = torch.frombuffer(raw, dtype=said["dtype"]) if raw else torch.empty(0, dtype=said["dtype"])
    return flat.reshape(said["shape"])


def with_functions(max_size):
    return CompressedListStorage(max_size, compression_fn=small, decompression_fn=large)


def with_zstd(max_size, **arguments):
    pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return CompressedListStorage(max_size, **arguments)


KINDS = [with_functions, with_zstd]


class TestCompressed(StorageContract):
    def make(self, capacity):
        return with_functions(capacity)


class TestCompressedTensorDicts(StorageContract):
    def make(self, capacity):
        return with_functions(capacity)

    def rows(self, first, n):
        numbers = torch.arange(first, first + n)
        return TensorDict({"a": numbers, "next": {"b": numbers.float()}}, [n])


class TestLazyStack(StorageContract):
    def make(self, capacity):
        return LazyStackStorage(capacity)

    def rows(self, first, n):
        return [TensorDict({"a": torch.full((1 + i % 3,), i)}) for i in range(first, first + n)]


DTYPES = st.sampled_from([torch.uint8, torch.float32, torch.int64, torch.bool, torch.float64])
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=6))
@pytest.mark.parametrize("make", KINDS)
def test_what_goes_in_comes_out(make, forms):
    items = [(torch.rand(shape) * 9).to(dtype) for dtype, shape in forms]
    nested = [{"a": item, "b": [item, (item, 3)], "c": TensorDict({"d": item, "e": {"f": item}})} for item in items]
    rb = ReplayBuffer(storage=make(20), collate_fn=list)
    rb.extend(items)
    rb.extend(nested)
    for item, found in zip(items, (rb[i] for i in range(len(items))), strict=True):
        assert found.dtype == item.dtype
        assert torch.equal(found, item)
    for item, found in zip(items, (rb[len(items) + i] for i in range(len(items))), strict=True):
        assert type(found["c"]) is TensorDict
        for one in (found["a"], found["b"][0], found["b"][1][0], found["c"]["d"], found["c"]["e", "f"]):
            assert torch.equal(one, item)
        assert found["b"][1][1] == 3


@pytest.mark.parametrize("make", KINDS)
def test_pixels_take_less(make):
    storage = make(10)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
    pixels = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 64, 64)
    rb.extend(TensorDict({"pixels": pixels, "n": torch.arange(10)}, [10]))
    assert 0 < storage.bytes() < pixels.numel() / 20
    assert rb.stats()["bytes"] == storage.bytes()
    batch = rb.sample()
    assert batch["pixels"].shape == (4, 3, 64, 64)
    assert torch.equal(batch["pixels"][:, 0, 0, 0].long(), batch["n"])
    before = storage.bytes()
    rb[0] = TensorDict({"pixels": torch.randint(255, (3, 64, 64), dtype=torch.uint8), "n": torch.tensor(0)})
    assert storage.bytes() > before + 10_000
    rb.empty()
    assert storage.bytes() == 0


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("how", ["state", "folder", "pickle", "copy"])
def test_states(tmp_path, make, how):
    if how == "pickle" and make is with_functions:
        pytest.skip("functions of a test module cannot be pickled where tests are no package that is imported")
    rb = TensorDictReplayBuffer(storage=make(5), sampler=PrioritizedSampler(5, 1.0, 1.0))
    numbers = torch.arange(7)
    index = rb.extend(TensorDict({"a": numbers, "next": {"b": torch.rand(7, 2)}}, [7]))
    rb.update_priority(index[-5:], torch.arange(1.0, 6.0))
    if how == "pickle":
        other = pickle.loads(pickle.dumps(rb))
    elif how == "copy":
        other = copy.deepcopy(rb)
    else:
        other = TensorDictReplayBuffer(storage=make(5), sampler=PrioritizedSampler(5, 1.0, 1.0))
        if how == "state":
            other.load_state_dict(rb.state_dict())
        else:
            rb.dumps(tmp_path / "saved")
            other.loads(tmp_path / "saved")
    assert other.storage.bytes() == rb.storage.bytes()
    for i in range(5):
        assert bool((other[i] == rb[i]).all())
    torch.manual_seed(0)
    first = rb.sample(8)
    torch.manual_seed(0)
    second = other.sample(8)
    assert torch.equal(first["a"], second["a"])
    assert torch.equal(first["priority_weight"], second["priority_weight"])


def test_states_of_other_kinds_are_refused():
    storage, plain = with_functions(3), ListStorage(3)
    for one in (storage, plain):
        ReplayBuffer(storage=one).extend([torch.zeros(3)])
    with pytest.raises(ValueError, match="compressed item"):
        storage.load_state_dict(plain.state_dict())
    assert len(storage) == 1


def test_dumps_of_other_kinds_are_refused(tmp_path):
    storage = with_functions(3)
    ReplayBuffer(storage=storage).extend([torch.zeros(3)])
    storage.dumps(tmp_path / "saved")
    with pytest.raises(IncompatibleCheckpoint):
        ListStorage(3).loads(tmp_path / "saved")
    other = with_functions(3)
    other.loads(tmp_path / "saved")
    assert other[0].tolist() == [0.0] * 3
    for path in (tmp_path / "saved").rglob("*"):
        if path.is_file() and path.suffix != ".json":
            raw = bytearray(path.read_bytes())
            raw[0] ^= 1
            path.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint):
        with_functions(3).loads(tmp_path / "saved")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"compression_level": 99}, ValueError, r"compression_level: expected one in \[.*, 22\]"),
        ({"compression_level": "3"}, TypeError, "compression_level"),
        ({"compression_fn": small}, TypeError, "together"),
        ({"decompression_fn": large}, TypeError, "together"),
        ({"compression_fn": 3, "decompression_fn": large}, TypeError, "callable"),
        ({"max_size": 0}, ValueError, "max_size|at least 1"),
    ],
)
def test_refusals(arguments, error, match):
    with pytest.raises(error, match=match):
        with_zstd(**{"max_size": 3, **arguments})


@pytest.fixture
def without_zstd(monkeypatch):
    """As on an interpreter that has no Zstandard."""
    for name in ("compression", "compression.zstd", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    streams.zstd.cache_clear()
    yield
    streams.zstd.cache_clear()


@pytest.mark.parametrize("level", [-7, 0, 3, 22])
def test_zlib_where_there_is_no_zstandard(without_zstd, level):
    rb = ReplayBuffer(storage=CompressedListStorage(10, compression_level=level), batch_size=4)
    rows = TensorDict({"pixels": torch.zeros(3, 40, 50), "next": {"step": torch.arange(3)}}, [3])
    rb.extend(rows)
    rb.add({"pixels": torch.zeros(40, 50)})
    assert rb.storage.bytes() < 4 * 1_000
    assert (rb[:3][1] == rows[1]).all()
    assert rb[3]["pixels"].shape == (40, 50)
    stream = rb.storage._items[3]["pixels"].data
    assert zlib.decompress(stream.numpy().tobytes()) == bytes(8_000)
    other = CompressedListStorage(10)
    other.load_state_dict(rb.storage.state_dict())
    assert (other[0] == rows[0]).all()


def test_what_zlib_has_compressed_is_read_with_zstandard(monkeypatch, without_zstd):
    rb = ReplayBuffer(storage=CompressedListStorage(10))
    rb.add({"a": torch.arange(5)})
    monkeypatch.undo()
    streams.zstd.cache_clear()
    other = with_zstd(10)
    other.load_state_dict(rb.storage.state_dict())
    assert other[0]["a"].tolist() == [0, 1, 2, 3, 4]


def test_reading_needs_what_has_compressed(monkeypatch):
    rb = ReplayBuffer(storage=with_zstd(10))
    rb.add({"a": torch.arange(5)})
    monkeypatch.setattr(streams, "zstd", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"CompressedListStorage: expected Zstandard.*engram-replay\[zstd\]"):
        rb[0]


def test_levels_are_used():
    noise = torch.randint(4, (50_000,), dtype=torch.uint8)
    sizes = []
    for level in (-7, 19):
        storage = with_zstd(1, compression_level=level)
        ReplayBuffer(storage=storage).extend([noise])
        sizes.append(storage.bytes())
    assert sizes[1] < sizes[0]


def test_rows_that_are_not_there():
    storage = with_functions(3)
    rb = ReplayBuffer(storage=storage)
    rb.extend([torch.zeros(2)])
    with pytest.raises(RowError):
        storage[2]
    with pytest.raises(TypeError, match="to_bytestream"):
        storage.to_bytestream("text")


# ---- lazy stacks -----------------------------------------------------------------------------------------------------------


def ragged(n=5):
    return [TensorDict({"a": torch.full((i + 1,), i), "text": f"item {i}", "b": torch.tensor([i])}) for i in range(n)]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_batches_are_lazy_stacks(cls):
    rb = cls(storage=LazyStackStorage(10), batch_size=6)
    rb.extend(LazyStackedTensorDict(*ragged()))
    batch = rb.sample()
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.shape == (6,)
    for one in batch.unbind(0):
        i = int(one["b"])
        assert one["a"].tolist() == [i] * (i + 1)
        assert one["text"] == f"item {i}"
        assert cls is ReplayBuffer or int(one["index"]) == i
    assert "index" not in rb.storage[0].keys()


def test_stacks_along_another_dimension_are_those_of_torchrl():
    rl = pytest.importorskip("torchrl.data")
    for dim in (0, 1, -1, -2):
        shapes = []
        for storage in (rl.LazyStackStorage(5, stack_dim=dim), LazyStackStorage(5, stack_dim=dim)):
            items = [TensorDict({"a": torch.full((2, i + 1), i)}, [2]) for i in range(3)]
            storage.set(range(3), items)
            found = storage.get(range(3))
            shapes.append((found.shape, found.stack_dim, [one["a"].tolist() for one in found.unbind(found.stack_dim)]))
        assert shapes[0] == shapes[1]
    assert LazyStackStorage(5).stack_dim == 0


def test_a_batch_does_not_change_what_is_stored():
    rb = ReplayBuffer(storage=LazyStackStorage(5), transform=lambda batch: batch.set("c", torch.zeros(batch.shape)))
    rb.extend(ragged())
    assert "c" in rb.sample(3).keys()
    assert all("c" not in item.keys() for item in rb.storage._items)
    assert isinstance(rb[:3], LazyStackedTensorDict)
    assert type(rb.storage[2]) is TensorDict


def test_what_cannot_be_stacked():
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend([torch.zeros(3), torch.zeros(4)])
    with pytest.raises(TypeError, match="expected TensorDicts, got Tensor"):
        rb.sample(3)
    rb = ReplayBuffer(storage=LazyStackStorage(5))
    rb.extend([TensorDict(batch_size=[1]), TensorDict(batch_size=[2])])
    with pytest.raises(RuntimeError, match="one batch size"):
        rb[[0, 1]]
    rb = ReplayBuffer(storage=LazyStackStorage(5, stack_dim=2))
    rb.extend(ragged())
    with pytest.raises(ValueError, match=r"stack_dim: expected one in \[-1, 1\)"):
        rb.sample(2)
    with pytest.raises(TypeError, match="stack_dim"):
        LazyStackStorage(5, stack_dim="0")


def test_a_collate_function_gets_the_items():
    rb = ReplayBuffer(storage=LazyStackStorage(5), collate_fn=lambda items: [len(item["a"]) for item in items])
    rb.extend(ragged())
    assert set(rb.sample(50)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("cls", [CompressedListStorage, LazyStackStorage])
def test_lists_are_called_by_their_class(cls):
    assert repr(cls(3)) == f"{cls.__name__}(size=0/3)"
    with pytest.raises(ValueError, match=f"{cls.__name__}: max_size: expected at least 1, got 0"):
        cls(0)


@pytest.mark.parametrize("made", [None, b"bytes", 3])
def test_what_is_no_compressed_tensor_is_refused_when_it_is_written(made):
    outcome = {}
    storage = CompressedListStorage(4, compression_fn=lambda x: outcome.get("it", small(x)), decompression_fn=large)
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.add(torch.ones(2))
    outcome["it"] = made
    for item in (torch.ones(3), TensorDict({"a": torch.ones(3)}), [{"a": torch.ones(3)}]):
        with pytest.raises(
            TypeError, match=f"compression_fn: expected a uint8 tensor.*got {type(made).__name__}\\. Return"
        ):
            rb.add(item)
    with pytest.raises(TypeError, match="compression_fn"):
        storage[0] = torch.ones(3)
    assert (len(rb), rb.write_count) == (1, 1)
    assert storage[0].tolist() == [1, 1]


@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("rows", ["noise", "zeros", "TensorDicts"])
def test_a_flipped_bit_of_a_state_is_no_other_value(rows, level):
    """Whatever bit of what the state says of an item: an error, or the same values."""
    values = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(level), dtype=torch.uint8)
    items = [{"a": value * (rows != "zeros")} for value in values]
    rb = ReplayBuffer(storage=with_zstd(8, compression_level=level))
    rb.extend([TensorDict(item) for item in items] if rows == "TensorDicts" else items)
    state = rb.state_dict()
    packed = [leaf for leaf in leaves_of(state["_storage"]["items"]) if leaf.dtype is torch.uint8 and leaf.numel() > 30]
    bits = [(leaf, bit) for leaf in packed for bit in range(8 * leaf.numel())]
    assert len(bits) > 100
    wrong = []
    for leaf, bit in bits[:: max(1, len(bits) // 400)]:
        flat = leaf.view(-1)
        flat[bit // 8] ^= 1 << bit % 8
        other = ReplayBuffer(storage=with_zstd(8, compression_level=level))
        try:
            other.load_state_dict(state)
            found = other[:]["a"]
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError):
            found = None
        if found is not None and not torch.equal(found, torch.stack([item["a"] for item in items])):
            wrong.append(bit)
        flat[bit // 8] ^= 1 << bit % 8
    assert not wrong
    other.load_state_dict(state)


def leaves_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [leaf for value in values for leaf in leaves_of(value)]
