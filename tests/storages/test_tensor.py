"""Rows as columns of tensors, in RAM and in a directory: what is taken, what comes back, what is refused."""

import copy
import os
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
    tensorclass,
)

import engram
from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.format.schema import DTYPES
from engram.storages.announcing import creation_lines
from tests.fresh import run
from tests.storages.test_structure import UNUSUAL, of_dtype, raw

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


def numbered(start, n):
    return {"a": torch.arange(start, start + n), "next": {"b": torch.arange(start, start + n).float()[:, None]}}


def reopened(rb):
    """The same rows in a buffer that was opened anew, if they are in a directory."""
    folder = getattr(rb.storage, "scratch_dir", None)
    if folder is None:
        return rb
    rb.close()
    return ReplayBuffer.open(folder)


def without_engram(rb):
    """The rows as tensordict reads them, if they are in a directory."""
    folder = getattr(rb.storage, "scratch_dir", None)
    return None if folder is None else TensorDict.load_memmap(folder)


# ---- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(make, dtype, shape):
    batch = of_dtype(dtype, (5, *shape))
    rb = ReplayBuffer(storage=make(8))
    rb.extend({"x": batch[:4]})
    rb.add({"x": batch[4]})
    found = rb.sample(20, return_info=True)
    assert raw(found[0]["x"]) == raw(torch.stack([batch[i] for i in found[1]["index"].tolist()]))
    rb = reopened(rb)
    assert rb[:]["x"].dtype is batch.dtype
    assert raw(rb[:]["x"]) == raw(batch)
    assert raw(rb[2]["x"]) == raw(batch[2])
    assert raw(rb[[4, 0]]["x"]) == raw(torch.stack([batch[4], batch[0]]))
    rb[1] = {"x": batch[3]}
    assert raw(rb[1]["x"]) == raw(batch[3])
    loaded = without_engram(rb)
    if loaded is not None:
        assert (loaded["x"].dtype, loaded["x"].shape) == (batch.dtype, (8, *shape))
        assert raw(loaded["x"][4]) == raw(batch[4])
    rb.close()


@pytest.mark.parametrize("n", [10, 11, 19, 20, 23, 57])
def test_batches_larger_than_the_storage(make, n):
    rb = ReplayBuffer(storage=make(10))
    rb.extend(numbered(0, 3))
    index = rb.extend(numbered(3, n))
    assert index.tolist() == [(3 + i) % 10 for i in range(n)]
    assert rb.write_count == 3 + n
    rows = sorted(range(3 + n), reverse=True)[:10]
    assert sorted(rb[:]["a"].tolist()) == sorted(rows)
    assert all(int(rb[int(row)]["a"]) == number for row, number in list(zip(index, range(3, 3 + n), strict=True))[-10:])
    assert len(rb) == 10


def test_batches_larger_than_a_lane(make):
    rb = ReplayBuffer(storage=make(10, lanes=2))
    assert rb.extend(numbered(0, 12), lane=1).tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    assert rb[:]["a"].tolist() == [10, 11, 7, 8, 9]
    assert (len(rb), rb.write_count) == (5, 12)


@pytest.mark.parametrize("extend", [True, False])
def test_a_storage_of_one_row(make, extend):
    rb = ReplayBuffer(storage=make(1))
    for number in range(4):
        rows = numbered(number, 1)
        if extend:
            assert rb.extend(rows).tolist() == [0]
        else:
            assert rb.add({"a": rows["a"][0], "next": {"b": rows["next"]["b"][0]}}) == 0
        assert len(rb) == 1
        assert rb.sample(3)["a"].tolist() == [number] * 3
    assert rb.extend(numbered(0, 3)).tolist() == [0, 0, 0]
    assert rb[0]["a"] == 2


@pytest.mark.parametrize(("asked", "lanes", "capacity"), [(100, 3, 99), (7, 7, 7), (13, 7, 7), (9, 2, 8), (10, 5, 10)])
def test_capacity_is_rounded_down_to_whole_lanes(make, asked, lanes, capacity):
    storage = make(asked, lanes=lanes)
    rb = ReplayBuffer(asked, storage=storage)
    for _ in range(2):
        assert storage.max_size == capacity
        assert (f"max_size={asked} asked" in repr(storage)) == (asked != capacity)
        assert f"lanes={lanes}" in repr(storage)
        assert rb.lanes == lanes
        rb.extend(numbered(0, capacity // lanes + 1), lane=lanes - 1)
        assert len(rb) == capacity // lanes


@pytest.mark.parametrize("form", ["tensor", "dict", "tensordict"])
@pytest.mark.parametrize("tensor", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors(make, tensor, form):
    n = len(tensor)
    wrap = {
        "tensor": lambda x: x,
        "dict": lambda x: {"a": x},
        "tensordict": lambda x: TensorDict({"a": x}, x.shape[:1]),
    }[form]
    plain = tensor.detach().resolve_conj().resolve_neg().clone().contiguous()
    before = raw(tensor)
    rb = ReplayBuffer(storage=make(20))
    rb.extend(wrap(tensor))  # first write
    rb.extend(wrap(plain))
    rb.extend(wrap(tensor))  # later
    row = {"tensor": lambda: tensor[1], "dict": lambda: {"a": tensor[1]}, "tensordict": lambda: wrap(tensor)[1]}[form]()
    rb.add(row)
    rb[0] = row
    stored = rb[:] if form == "tensor" else rb[:]["a"]
    expected = torch.cat([plain, plain, plain, plain[1:2]])
    expected[0] = plain[1]
    assert raw(stored) == raw(expected)
    assert not stored.requires_grad
    assert not stored.is_conj()
    assert not stored.is_neg()
    assert raw(tensor) == before
    batch = rb.sample(7) if form == "tensor" else rb.sample(7)["a"]
    assert (batch.shape, batch.dtype, batch.requires_grad) == ((7, *tensor.shape[1:]), tensor.dtype, False)
    assert n == len(tensor)


def test_stored_rows_are_copies(make):
    data = numbered(0, 3)
    rb = ReplayBuffer(storage=make(5))
    rb.extend(data)
    data["a"].zero_()
    assert rb[:]["a"].tolist() == [0, 1, 2]
    batch = rb.sample(5)
    batch["a"].zero_()
    one = rb[2]
    one["a"].zero_()
    some = rb[[1, 2]]
    some["next"]["b"].zero_()
    assert rb[:]["a"].tolist() == [0, 1, 2]
    assert rb[:]["next"]["b"].reshape(-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("form", ["dict", "tensordict", "arrays"])
def test_a_surrounding_device_changes_nothing(make, device, lanes, form):
    """Whatever is allocated in between belongs to the CPU. Without that, addresses would be those of no memory at all."""
    td = TensorDict({"a": torch.arange(6), "b": torch.ones(6, 2)}, batch_size=[6])
    data = {
        "dict": {"a": td["a"], "b": td["b"]},
        "tensordict": td,
        "arrays": {"a": np.arange(6), "b": np.ones((6, 2), np.float32)},
    }[form]
    row = td[2] if form == "tensordict" else {key: value[2] for key, value in data.items()}
    lane_of, rows, mask = torch.tensor([0] * 6), torch.tensor([4, 1]), torch.tensor([True, False] * 3)
    with torch.device(device):
        storage = make(12, lanes=lanes)
        rb = ReplayBuffer(storage=storage)
        rb.extend(data, lane=0)
        rb.extend(data, lane=lane_of) if lanes == 2 else rb.empty() or rb.extend(data)
        rb.add(row, lane=0) if lanes == 2 else None
        assert 2 in storage
        assert storage.contains(rows).tolist() == [True, True]
        storage.set(range(2), {key: value[:2] for key, value in data.items()} if form != "tensordict" else data[:2])
        storage.set(3, row)
        results = [rb.sample(2), rb[1], rb[-1], rb[:], rb[1:3], rb[0:6:2], rb[[0, 2]], rb[rows], storage[2]]
        results += [rb[range(3)], storage[11], next(iter(storage)), rb.sample(4, return_info=True)[1]]
        if len(rb) == 6:
            results.append(rb[mask])
            rb[0] = row
            rb[0:2] = data[:2] if form == "tensordict" else {key: value[:2] for key, value in data.items()}
            rb.set_at_("b", torch.ones(1, 2, device="cpu"), [1])
        rb = reopened(rb)
        results += [rb.sample(2), rb[0], rb[:]]
        extent = rb.storage.extent()
        results.append({"rows": extent.rows(torch.arange(extent.size, device="cpu"))})
    for result in results:
        for tensor in result.values():
            assert tensor.device == torch.device("cpu")
            assert bool((tensor >= 0).all())
    with torch.device(device):
        rb.close()


def test_inference_mode_and_default_dtype_change_nothing(make):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            rb = ReplayBuffer(storage=make(8))
            rb.extend({"a": torch.zeros(3, 2, dtype=torch.float32)})
            rb.sample(2)
    finally:
        torch.set_default_dtype(torch.float32)
    rb.extend({"a": torch.ones(3, 2)})
    weight = torch.ones(2, requires_grad=True)
    (rb.sample(4)["a"] * weight).sum().backward()
    assert weight.grad is not None
    rb[:]["a"].add_(5)
    assert rb[:]["a"].sum() == 6 + 60


NAMES = {
    "slash": "a/b",
    "slashes": "/",
    "parent": "..",
    "itself": ".",
    "percent": "%2F",
    "space": " a  b ",
    "unicode": "ключ-鍵-🔑",
    "decomposed": "e\u0301",
    "control": "a\n\t\0b",
    "quotes": "\"'\\",
    "long": "k" * 200,
    "empty": "",
    "like a file": "x.memmap",
    "like ours": ".engram ",
    "like tensordict's": "meta.json ",
    "like python": "__class__",
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_of_all_kinds(make, name, nested):
    column = torch.arange(3)
    data = {name: {name: column}} if nested else {name: column}
    rb = ReplayBuffer(storage=make(5))
    rb.extend(data)
    rb = reopened(rb)
    found = rb[:]
    assert list(found) == [name]
    assert (found[name][name] if nested else found[name]).tolist() == [0, 1, 2]
    loaded = without_engram(rb)
    if loaded is not None:
        assert loaded.get((name, name) if nested else name).tolist() == [0, 1, 2, 0, 0]
        assert all(path.resolve().is_relative_to(rb.storage.scratch_dir) for path in rb.storage.scratch_dir.rglob("*"))
    rb.close()


@pytest.mark.parametrize("others", [True, False])
def test_leaves_without_elements(make, others):
    data = {"none": torch.zeros(3, 0, 2), **({"some": torch.arange(3)} if others else {})}
    rb = ReplayBuffer(storage=make(5))
    rb.extend(data)
    rb.add({key: value[0] for key, value in data.items()})
    assert rb.sample(4)["none"].shape == (4, 0, 2)
    rb = reopened(rb)
    assert rb[:]["none"].shape == (4, 0, 2)
    assert rb[1]["none"].shape == (0, 2)
    assert len(rb) == 4
    loaded = without_engram(rb)
    if loaded is not None:
        assert loaded["none"].shape == (5, 0, 2)
    rb.close()


def test_two_thousand_fields_with_few_descriptors(tmp_path):
    out = run(
        """
        import resource, torch
        from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
        from tensordict import TensorDict
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        data = {f"field {i}": torch.full((3,), i) for i in range(2000)}
        for storage in (LazyMemmapStorage(4, scratch_dir=folder + "/store"), LazyTensorStorage(4)):
            rb = ReplayBuffer(storage=storage)
            rb.extend(data)
            rb.extend(TensorDict(data, [3]).to_dict())
            batch = rb.sample(5)
            assert all(bool((batch[f"field {i}"] == i).all()) for i in range(2000))
            rb.close()
        rb = ReplayBuffer.open(folder + "/store")
        print(len(rb), len(rb[0]), int(rb[:]["field 1999"][2]), len(TensorDict.load_memmap(folder + "/store").keys()))
        """,
        folder=str(tmp_path),
    )
    assert out == "4 2000 1999 2000"


# ---- what comes back -------------------------------------------------------------------------------------------------


def forms():
    a, b = torch.arange(4), torch.ones(4, 2)
    td = TensorDict({"a": a, "next": {"b": b}}, batch_size=[4])
    return {
        "tensor": (a, lambda x: x),
        "dict": ({"a": a, "next": {"b": b}}, lambda x: x["a"]),
        "tuple": ((a, (b, a)), lambda x: x[1][1]),
        "namedtuple": (Pair(a, {"b": b}), lambda x: x.left),
        "tensordict": (td, lambda x: x["a"]),
        "tensordict with batch dims": (td.unsqueeze(1).expand(4, 3).clone(), lambda x: x["a"][..., 0]),
        "tensordict in a dict": ({"steps": td, "b": b}, lambda x: x["steps"]["a"]),
        "tensordict in a tuple": ((td, b), lambda x: x[0]["a"]),
        "tensorclass": (Step(a, b, batch_size=[4]), lambda x: x.obs),
        "tensorclass in a tensordict": (TensorDict({"step": Step(a, b, batch_size=[4])}, [4]), lambda x: x["step"].obs),
        "array": (np.arange(4), lambda x: x),
        "arrays": ({"a": np.arange(4), "b": np.ones((4, 2), np.float32)}, lambda x: x["a"]),
    }


@pytest.mark.parametrize("form", forms())
def test_rows_come_back_in_the_form_they_came_in(make, form):
    data, key = forms()[form]
    rb = ReplayBuffer(storage=make(6))
    rb.extend(data)
    expected = torch.Tensor if isinstance(data, np.ndarray) else type(data)
    batch, info = rb.sample(30, return_info=True)
    assert torch.equal(key(batch), info["index"])
    rb = reopened(rb)
    for result, rows in (
        (rb[:], [0, 1, 2, 3]),
        (rb[1:3], [1, 2]),
        (rb[[3, 0]], [3, 0]),
        (rb[2], 2),
        (rb.sample(5), None),
    ):
        assert type(result) is expected or (expected is torch.Tensor and isinstance(result, torch.Tensor))
        if rows is not None:
            assert key(result).tolist() == rows
    if is_tensor_collection(data):
        assert rb[1:3].batch_size == (2, *data.batch_size[1:])
        assert rb[2].batch_size == data.batch_size[1:]
        assert rb.sample(5).batch_size == (5, *data.batch_size[1:])
        assert rb.sample(5).device == torch.device("cpu")
    row = rb[3]
    rb.add(row)
    assert key(rb[4]) == 3
    rb.extend([row, rb[1]])
    assert [int(key(rb[i])) for i in (5, 0)] == [3, 1]
    rb.close()


def test_dicts_keep_the_order_of_their_entries(make):
    rb = ReplayBuffer(storage=make(4))
    rb.extend({"z": torch.zeros(2), "a": torch.ones(2), "m": {"y": torch.zeros(2), "b": torch.zeros(2)}})
    rb.extend({"m": {"b": torch.zeros(2), "y": torch.zeros(2)}, "a": torch.ones(2), "z": torch.zeros(2)})
    rb = reopened(rb)
    for data in (rb[:], rb.sample(2), rb[0]):
        assert [list(data), list(data["m"])] == [["z", "a", "m"], ["y", "b"]]
    assert rb[:]["a"].tolist() == [1, 1, 1, 1]
    rb.close()


def test_tensorclasses_come_back_in_a_program_that_defines_them(tmp_path):
    (tmp_path / "steps.py").write_text(
        "import torch\nfrom typing import NamedTuple\nfrom tensordict import tensorclass\n\n"
        "@tensorclass\nclass Step:\n    obs: torch.Tensor\n    done: torch.Tensor\n\n"
        "class Outer:\n    class Pair(NamedTuple):\n        left: torch.Tensor\n        right: torch.Tensor\n"
    )
    make = """
        import sys, torch
        sys.path.insert(0, folder)
        from steps import Outer, Step
        from engram import LazyMemmapStorage, ReplayBuffer
        for name, data in {
            "class": Step(torch.arange(3), torch.zeros(3), batch_size=[3]),
            "pair": Outer.Pair(torch.arange(3), torch.zeros(3)),
        }.items():
            rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=f"{folder}/{name}"), batch_size=2)
            rb.extend(data)
            rb.close()
    """
    run(make, folder=str(tmp_path))
    read = """
        import sys, torch
        sys.path.insert(0, folder)
        {first}
        from engram import ReplayBuffer
        for name in ("class", "pair"):
            try:
                rb = ReplayBuffer.open(f"{{folder}}/{{name}}")
            except TypeError as error:
                print(error, "steps" in sys.modules)
                continue
            batch = rb.sample()
            print(type(batch).__qualname__, type(rb[:]).__module__, type(rb[1]).__qualname__)
            rb.add(rb[0])
            rb.close()
    """
    told = run(read.format(first=""), folder=str(tmp_path)).split("\n")
    assert told == [
        f"open: the rows are of the {kind} {name!r}, which this program has not defined. "
        "Import it first (it was defined in module 'steps'). False"
        for kind, name in (("tensorclass", "Step"), ("namedtuple", "Outer.Pair"))
    ]
    out = run(read.format(first="import steps"), folder=str(tmp_path)).split("\n")
    assert out == ["Step steps Step", "Outer.Pair steps Outer.Pair"]


def test_lists_of_rows_are_stacked(make):
    rb = ReplayBuffer(storage=make(5))
    items = [{"a": torch.tensor(i), "b": np.ones(2)} for i in range(3)]
    assert rb.extend(items).tolist() == [0, 1, 2]
    assert rb.extend(items[:1]).tolist() == [3]
    assert rb[:]["a"].tolist() == [0, 1, 2, 0]
    assert rb[:]["b"].dtype is torch.float64


def test_rows_of_tensordicts_with_batch_dims_of_their_own(make):
    rb = ReplayBuffer(storage=make(4))
    td = TensorDict({"a": torch.arange(3)}, batch_size=[3])
    with pytest.warns(UserWarning, match=r"stored as one row of that shape.*use extend\(\)"):
        assert rb.add(td) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rb.add(td + 1) == 1
    assert len(rb) == 2
    assert rb[1].batch_size == (3,)
    assert rb.sample(5).batch_size == (5, 3)
    assert rb[:]["a"].tolist() == [[0, 1, 2], [1, 2, 3]]


# ---- what is refused -------------------------------------------------------------------------------------------------


def state(storage):
    """All that a refused write must not change."""
    if not storage.initialized:
        folder = getattr(storage, "scratch_dir", None)
        return (None, os.path.exists(folder) if folder is not None else None)
    return (
        storage.extent(),
        storage.write_count,
        storage.store.core.next_ticket,
        [raw(tensor) for tensor in storage.store.tensors],
        storage.store.tickets_of(torch.arange(storage.max_size)).tolist(),
    )


def rejected(data, error, says, *, call="extend", lane=0):
    return data, error, says, call, {"lane": lane}


GOOD = {"a": torch.zeros(2, 3), "next": {"b": torch.zeros(2, dtype=torch.int64)}}
ROW = {"a": torch.zeros(3), "next": {"b": torch.tensor(0)}}
LATER = {
    "missing field": rejected({"a": GOOD["a"]}, KeyError, r"extend: .*missing \['next'\]"),
    "unknown field": rejected({**GOOD, "z": GOOD["a"]}, KeyError, r"unknown \['z'\]"),
    "missing below": rejected({**GOOD, "next": {}}, KeyError, r"field 'next': .*missing \['b'\]"),
    "dtype": rejected(
        {**GOOD, "a": GOOD["a"].double()}, RuntimeError, r"field a: expected .*float32.*got .*float64\. Convert"
    ),
    "shape": rejected(
        {**GOOD, "a": torch.zeros(2, 4)}, RuntimeError, r"field a: expected shape \[2, 3\].*got \[2, 4\]"
    ),
    "shape that would broadcast": rejected({**GOOD, "a": torch.zeros(2, 1)}, RuntimeError, r"got \[2, 1\]"),
    "the last of many leaves": rejected(
        {**GOOD, "next": {"b": torch.zeros(2, 1, dtype=torch.int64)}}, RuntimeError, r"\('next', 'b'\)"
    ),
    "one row": rejected(ROW, TypeError, r"extend: .*Did you mean add\(\)\?"),
    "one row without scalars": rejected(
        {"a": torch.zeros(3), "next": {"b": torch.zeros(3, dtype=torch.int64)}},
        RuntimeError,
        r"field a: .*looks like one row: did you mean add\(\)\?",
    ),
    "a batch": rejected(GOOD, RuntimeError, r"add: .*did you mean extend\(\)\?", call="add"),
    "different counts": rejected({**GOOD, "a": torch.zeros(3, 3)}, RuntimeError, r"'a' has 3, .*has 2"),
    "empty": rejected({"a": torch.zeros(0, 3), "next": {"b": torch.zeros(0)}}, RuntimeError, "got an empty batch"),
    "empty list": rejected([], RuntimeError, "got an empty list"),
    "range": rejected(range(3), TypeError, "got range"),
    "set": rejected({1, 2}, TypeError, "got set"),
    "number": rejected(1.0, TypeError, "got float"),
    "None": rejected(None, TypeError, "got NoneType"),
    "float leaf": rejected({**ROW, "a": 1.0}, TypeError, "add: field 'a': .*got float 1.0", call="add"),
    "strings": rejected({**ROW, "a": ["x", "y"]}, TypeError, r"add: field 'a': .*got list \['x', 'y'\]", call="add"),
    "string leaf": rejected({**ROW, "a": "x"}, TypeError, "add: field 'a': .*got str 'x'", call="add"),
    "float8": rejected(
        {**GOOD, "a": torch.zeros(2, 3).to(torch.float8_e5m2)}, RuntimeError, "field a: .*float32.*got.*float8_e5m2"
    ),
    "lane": rejected(GOOD, RowError, r"lane: expected .* in \[0, 2\).* got 2", lane=2),
    "negative lane": rejected(GOOD, RowError, r"\[0, 2\).*-1", lane=-1),
    "lane of add": rejected(ROW, RowError, r"\[0, 2\).*2", call="add", lane=2),
    "lanes": rejected(GOOD, RowError, r"lanes? in \[0, 2\).*2", lane=torch.tensor([0, 2])),
    "negative lanes": rejected(GOOD, RowError, r"lanes? in \[0, 2\)", lane=torch.tensor([0, -1])),
    "count of lanes": rejected(GOOD, RuntimeError, "expected 3 rows, one per .*lane", lane=torch.tensor([0, 0, 1])),
    "lanes of two dimensions": rejected(GOOD, RuntimeError, "one dimension", lane=torch.tensor([[0, 1]])),
    "td without batch": rejected(TensorDict(ROW, []), TypeError, r"For one row use add\(\)"),
    "another kind": rejected(TensorDict(GOOD, [2]), TypeError, "expected a dict as in the first row, got a TensorDict"),
    "rows that differ": rejected([ROW, {**ROW, "a": torch.zeros(4)}], RuntimeError, r"field a: expected shape \[3\]"),
    "lists of other rows": rejected([{"a": torch.zeros(3)}], KeyError, r"missing \['next'\]"),
    "float lane": rejected(GOOD, (RowError, TypeError), "lane", lane=0.5),
    "float lanes": rejected(GOOD, TypeError, "lane: expected ints, one per row", lane=torch.tensor([0.5, 0.0])),
}


@pytest.mark.parametrize(("data", "error", "says", "call", "options"), LATER.values(), ids=LATER)
def test_refused_writes_change_nothing(make, data, error, says, call, options):
    storage = make(6, lanes=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.ones(2, 3), "next": {"b": torch.tensor([5, 6])}}, lane=1)
    before = state(storage)
    with pytest.raises(error, match=says):
        getattr(rb, call)(data, **options)
    assert state(storage) == before
    assert rb.extend(GOOD, lane=0).tolist() == [0, 1]


FIRST = {
    key: LATER[key]
    for key in (
        "one row",
        "different counts",
        "empty",
        "empty list",
        "range",
        "number",
        "None",
        "float leaf",
        "string leaf",
        "lane",
        "negative lane",
        "lanes",
        "count of lanes",
        "td without batch",
        "rows that differ",
        "float lanes",
    )
} | {
    "strings": rejected({"a": torch.zeros(2), "b": ["x", "y"]}, TypeError, "field 'b': expected a tensor or an array"),
    "string": rejected({"a": torch.zeros(2), "b": "text"}, TypeError, "field 'b': expected a tensor or an array"),
    "object": rejected({"a": torch.zeros(2), "b": object()}, TypeError, "field 'b': .*got object"),
    "non-tensor data": rejected(
        TensorDict({"a": torch.zeros(2), "b": NonTensorData("text", batch_size=[2])}, [2]), TypeError, "field 'b'"
    ),
    "python number": rejected({"a": 1.0}, TypeError, "field 'a': .*got float 1.0", call="add"),
    "float8": rejected({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, TypeError, "dtype torch.float8_e4m3fn cannot"),
    ".engram": rejected({".engram": torch.zeros(2)}, ValueError, r"'\.engram' is reserved"),
    ".engram below": rejected({"a": {".engram": torch.zeros(2)}}, ValueError, r"'\.engram' is reserved"),
    "surrogate": rejected({"a\udc80": torch.zeros(2)}, ValueError, "not valid Unicode"),
    "meta": rejected({"a": torch.zeros(2, device="meta")}, TypeError, "meta device"),
}


@pytest.mark.parametrize(("data", "error", "says", "call", "options"), FIRST.values(), ids=FIRST)
def test_refused_first_writes_allocate_nothing(make, data, error, says, call, options):
    storage = make(6, lanes=2)
    rb = ReplayBuffer(storage=storage)
    before = state(storage)
    with pytest.raises(error, match=says):
        getattr(rb, call)(data, **options)
    assert state(storage) == before
    assert not storage.initialized
    rb.extend({"x": torch.zeros(2)})  # nothing of the refused data has become the structure
    assert list(rb[:]) == ["x"]


@tensorclass
class Labelled:
    a: torch.Tensor
    text: str


def labelled(text):
    return Labelled(torch.zeros(3), text, batch_size=[])


def row(text, **more):
    return TensorDict({"a": torch.zeros(3), "next": {"b": torch.tensor(0)}, **more, "text": text}, [])


def batch(**entries):
    return TensorDict({"a": torch.zeros(2, 3), "next": {"b": torch.zeros(2, dtype=torch.int64)}, **entries}, [2])


#: Strings in rows, each with the call that writes it and the field that the message names.
TEXTS = {
    "one per row": (batch(text=["x", "y"]), "extend", "field 'text'"),
    "stacked rows": (torch.stack([row("x"), row("y")]), "extend", "field 'text'"),
    "stacked rows of one text": (torch.stack([row("x"), row("x")]), "extend", "field 'text'"),
    "lazily stacked rows": (lazy_stack([row("x"), row("y")]), "extend", "field 'text'"),
    "one for all": (batch(text=NonTensorData("x", batch_size=[2])), "extend", "field 'text'"),
    "below": (batch(info={"text": ["x", "y"]}), "extend", r"field \('info', 'text'\)"),
    "a list of rows": ([row("x"), row("y")], "extend", "field 'text'"),
    "a list whose second row has it": ([row("x").exclude("text"), row("y")], "extend", "field 'text'"),
    "objects": (batch(text=NonTensorStack(NonTensorData({"x": 1}), NonTensorData(None))), "extend", "field 'text'"),
    "a tensorclass": (torch.stack([labelled("x"), labelled("y")]), "extend", "field 'text'"),
    "in a tensorclass": (batch(c=torch.stack([labelled("x"), labelled("y")])), "extend", r"field \('c', 'text'\)"),
    "a dict": ({"a": torch.zeros(2, 3), "text": NonTensorStack("x", "y")}, "extend", "field 'text'"),
    "a row": (row("x"), "add", "field 'text'"),
    "a tensorclass as a row": (labelled("x"), "add", "field 'text'"),
    "a row below": (row("x", info={"text": "x"}).exclude("text"), "add", r"field \('info', 'text'\)"),
    "a text that stands for the batch": (NonTensorStack("x", "y"), "extend", "data"),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize(("data", "call", "field"), TEXTS.values(), ids=TEXTS)
def test_strings_are_refused_by_name(make, kind, written, data, call, field):
    if not isinstance(data, TensorDictBase) and (written or kind is TensorDictReplayBuffer):
        pytest.skip("refused as no TensorDict")
    rb = kind(storage=make(6))
    if written:
        rb.extend(batch())
    before = state(rb.storage)
    with pytest.raises(TypeError, match=f"{call}: {field}: expected a tensor.*ListStorage"):
        getattr(rb, call)(data)
    assert state(rb.storage) == before
    assert len(rb.extend(batch())) == 2


def test_strings_are_refused_by_edits(make):
    rb = ReplayBuffer(storage=make(6))
    rb.extend(batch())
    before = state(rb.storage)
    texts = NonTensorStack("x", "y")
    for edit in (
        lambda: rb.__setitem__([0, 1], batch(text=["x", "y"])),
        lambda: rb.__setitem__(0, row("x")),
        lambda: rb.__setitem__("a", texts),
        lambda: rb.__setitem__("text", texts),
        lambda: rb.set_at_("text", NonTensorData("x"), 0),
        lambda: rb.set_("a", texts),
        lambda: rb.update_(batch(text=["x", "y"])),
        lambda: rb.update_({"a": texts}),
        lambda: rb.storage.set([0, 1], batch(text=["x", "y"])),
        lambda: rb.storage.__setitem__(slice(None), batch(text=["x", "y"])),
        lambda: rb.writer.extend(batch(text=["x", "y"])),
    ):
        with pytest.raises(TypeError, match=r"field '(text|a)': expected a tensor.*ListStorage"):
            edit()
        assert state(rb.storage) == before


@pytest.mark.parametrize("columns", [[], [2]])
def test_strings_in_existing_data(columns):
    td = TensorDict({"a": torch.zeros(3, *columns, 1)}, [3, *columns])
    td["text"] = NonTensorData("x", batch_size=[3, *columns])
    with pytest.raises(TypeError, match="field 'text': expected a tensor.*ListStorage"):
        TensorStorage(td, ndim=1 + len(columns))
    with pytest.raises(TypeError, match="field 'text': expected a tensor.*ListStorage"):
        ReplayBuffer(storage=LazyTensorStorage(6, ndim=1 + len(columns))).extend(td)


def test_strings_in_a_plan():
    with pytest.raises(TypeError, match="plan: field 'text': expected a tensor.*ListStorage"):
        engram.plan(row("x"), 10)


@pytest.mark.parametrize("index", [6, -1, 100, torch.tensor([0, 6]), [2, -7], range(3, 8)])
def test_rows_outside_are_refused(make, index):
    storage = make(6)
    count = 1 if isinstance(index, int) else len(index)
    data = torch.tensor(1) if isinstance(index, int) else torch.ones(count, dtype=torch.int64)
    with pytest.raises(RowError, match=r"row .*\[0, 6\)"):
        storage.set(index, data)
    assert not storage.initialized
    rb = ReplayBuffer(storage=storage)
    rb.extend(torch.arange(3))
    before = state(storage)
    with pytest.raises(RowError, match=r"row .*\[0, 6\)"):
        storage.set(index, data)
    assert state(storage) == before


def test_counts_of_rows_and_indices_must_agree(make):
    storage = make(6)
    with pytest.raises(RuntimeError, match="set: expected 3 rows, one per index or lane that was given, got 2"):
        storage.set(range(3), torch.zeros(2))
    assert not storage.initialized


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (ValueError, "max_size: expected at least 1, got 0", {"capacity": 0}),
        (ValueError, "max_size: expected at least 1, got -3", {"capacity": -3}),
        (TypeError, "max_size: expected an int, got bool", {"capacity": True}),
        (TypeError, "max_size: expected an int, got float", {"capacity": 10.0}),
        (TypeError, "max_size: expected an int, got str", {"capacity": "10"}),
        (TypeError, "max_size: expected an int, got NoneType", {"capacity": None}),
        (ValueError, "lanes: expected at least 1, got 0", {"lanes": 0}),
        (ValueError, "lanes: expected at least 1, got -1", {"lanes": -1}),
        (TypeError, "lanes: expected an int, got bool", {"lanes": True}),
        (TypeError, "lanes: expected an int, got float", {"lanes": 2.0}),
        (ValueError, "lanes: expected at most max_size=10, got 11", {"lanes": 11}),
        (ValueError, "lanes: expected 1 with ndim=2, .* got 2", {"lanes": 2, "ndim": 2}),
        (ValueError, "ndim: expected at least 1, got 0", {"ndim": 0}),
        (TypeError, "ndim: expected an int, got float", {"ndim": 1.0}),
        (TypeError, "'compilable' is not supported yet; it will come with tracing", {"compilable": True}),
        (TypeError, r"'shared_init' is not supported yet; it will come with rb\.share\(\)", {"shared_init": True}),
        (TypeError, "unexpected argument 'max_length'", {"max_length": 3}),
    ],
)
def test_impossible_arguments(make, error, says, options):
    with pytest.raises(error, match=f"Lazy.*Storage: .*{says}"):
        make(**{"capacity": 10, **options})


def test_arguments_that_are_off_are_accepted():
    LazyTensorStorage(10, compilable=False, shared_init=False, cleanup_memmap=False, consolidated=None)
    LazyMemmapStorage(10, compilable=False, shared_init=False)
    with pytest.raises(TypeError, match="'cleanup_memmap' is not supported yet"):
        LazyTensorStorage(10, cleanup_memmap=1)
    with pytest.raises(TypeError, match=r"'consolidated' is not supported yet; .* one block of memory"):
        LazyTensorStorage(10, consolidated=True)


def test_capacities_that_no_memory_has(make):
    storage = make(1 << 59)
    with pytest.raises((ValueError, OSError, MemoryError, RuntimeError)):
        ReplayBuffer(storage=storage).extend(torch.zeros(2, 3))
    assert not storage.initialized
    if storage.__class__ is LazyMemmapStorage:
        assert not storage.scratch_dir.exists()


def test_unwritten_storages(make):
    storage = make(6)
    rb = ReplayBuffer(storage=storage)
    assert (len(storage), storage.initialized, storage.max_size, storage.write_count) == (0, False, 6, 0)
    assert (storage.nbytes, storage.shape, storage._storage, 3 in storage) == (0, (0,), None, False)
    assert "not allocated yet" in repr(storage)
    for read in (
        lambda: storage.get(0),
        lambda: storage[0],
        lambda: rb[0],
        lambda: rb[:],
        lambda: storage.get(range(2)),
    ):
        with pytest.raises(RuntimeError, match=r"nothing was ever written.*by the first add or extend"):
            read()
    with pytest.raises(RuntimeError, match=r"Add data before sampling|empty"):
        rb.sample(2)
    storage.close()


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_lanes_are_rings_of_their_own(make):
    rb = ReplayBuffer(storage=make(9, lanes=3))
    assert rb.extend(numbered(0, 2), lane=2).tolist() == [6, 7]
    assert rb.extend(numbered(2, 4), lane=0).tolist() == [0, 1, 2, 0]
    assert rb.extend(numbered(6, 5), lane=torch.tensor([1, 2, 1, 2, 1])).tolist() == [3, 8, 4, 6, 5]
    assert rb[:]["a"].tolist() == [5, 3, 4, 6, 8, 10, 9, 1, 7]
    assert rb.storage.extent().seam == (1, 3, 7)
    assert rb.on_lane(1) is rb
    assert rb.add({"a": torch.tensor(99), "next": {"b": torch.zeros(1)}}) == 3
    rb = reopened(rb)
    assert rb.storage.extent().seam == (1, 4, 7)
    rb.close()


# ---- ndim > 1 --------------------------------------------------------------------------------------------------------


def vectorised(envs, steps, start=0):
    """``[envs, steps]``: number = 100 · env + step."""
    number = torch.arange(envs)[:, None] * 100 + torch.arange(start, start + steps)
    return TensorDict({"a": number, "b": number[..., None].float().expand(envs, steps, 2)}, batch_size=[envs, steps])


def test_columns_advance_together(make):
    storage = make(10, ndim=2)
    rb = ReplayBuffer(storage=storage)
    index = rb.extend(vectorised(3, 2))
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert (storage.max_size, storage.columns, storage.shape) == (12, (3,), (2, 3))
    assert "max_size=10 asked" in repr(storage)
    assert (len(rb), rb.write_count) == (6, 2)
    grid = storage.grid()
    assert grid.batch_size == (3, 2)
    assert grid["a"].tolist() == [[0, 1], [100, 101], [200, 201]]
    assert grid["b"].shape == (3, 2, 2)
    rb.extend(vectorised(3, 3, 2))
    assert storage.grid()["a"][2].tolist() == [204, 201, 202, 203]
    batch, info = rb.sample(20, return_info=True)
    assert batch.batch_size == (20,)
    stored = storage.grid()["a"]
    assert torch.equal(batch["a"], stored[info["index"][1], info["index"][0]])
    rb = reopened(rb)
    assert rb.storage.grid()["a"][2].tolist() == [204, 201, 202, 203]
    assert rb[1].batch_size == (4,)
    assert (rb.storage.ndim, rb.storage.columns) == (2, (3,))
    rb.close()


def test_three_dimensions(make):
    storage = make(30, ndim=3)
    rb = ReplayBuffer(storage=storage)
    data = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    index = rb.extend({"a": data})
    assert index[:2].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert (storage.max_size, storage.columns, storage.shape, len(rb)) == (30, (2, 3), (4, 2, 3), 24)
    assert torch.equal(storage.grid()["a"], data)
    slot = {"a": torch.arange(6).reshape(2, 3) + 1000}
    assert rb.add(slot).tolist() == [[4, i, j] for i in range(2) for j in range(3)]
    assert torch.equal(storage.grid()["a"][..., 4], slot["a"])


def test_other_columns_are_refused(make):
    storage = make(12, ndim=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend(vectorised(3, 2))
    before = state(storage)
    for data, error, says in (
        (vectorised(4, 2), RuntimeError, r"expected columns \(3,\) as in the first write, got \(4,\)"),
        (vectorised(3, 2)[:, 0], RuntimeError, r"extend: data: expected .* 2 leading dimensions, got \[3\]"),
    ):
        with pytest.raises(error, match=says):
            rb.extend(data)
    with pytest.raises(RuntimeError, match=r"expected columns \(3,\) as in the first write, got \(2,\)"):
        rb.add(vectorised(2, 2)[:, 0])
    assert state(storage) == before


def test_flatten_shows_the_same_rows(make):
    storage = make(12, ndim=2)
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        storage.flatten()
    rb = ReplayBuffer(storage=storage)
    rb.extend(vectorised(3, 2))
    flat = storage.flatten()
    assert (flat.ndim, flat.max_size, len(flat), flat.shape) == (1, 12, 6, (6,))
    assert flat[:]["a"].tolist() == [0, 100, 200, 1, 101, 201]
    flat[0] = flat[5].clone()
    assert storage.grid()["a"][0, 0] == 201
    assert flat.flatten() is flat
    assert make(5).flatten().ndim == 1


# ---- around data that exists -----------------------------------------------------------------------------------------


def test_storage_around_data_shares_its_memory():
    data = TensorDict({"a": torch.arange(4), "next": {"b": torch.zeros(4, 2)}}, batch_size=[4])
    storage = TensorStorage(data)
    rb = ReplayBuffer(storage=storage)
    assert (len(rb), storage.max_size, rb.write_count, storage.initialized) == (4, 4, 0, True)
    data["a"][2] = 50
    assert rb[2]["a"] == 50
    assert rb.extend(data[:1] + 7).tolist() == [0]
    assert data["a"].tolist() == [7, 1, 50, 3]
    assert rb[:]["next", "b"].data_ptr() == data["next", "b"].data_ptr()
    assert set(rb.sample(100)["a"].tolist()) == {7, 1, 50, 3}


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(4),
        (torch.arange(4), torch.zeros(4)),
        {"a": np.arange(4)},
        Step(torch.arange(4), torch.ones(4), batch_size=[4]),
    ],
)
def test_storage_around_other_data(data):
    rb = ReplayBuffer(storage=TensorStorage(data, 4))
    assert len(rb) == 4
    leaf = {
        torch.Tensor: lambda x: x,
        tuple: lambda x: x[0],
        dict: lambda x: x["a"],
        Step: lambda x: x.obs,
    }[type(data)]
    assert leaf(rb[2]) == 2
    rb.add(rb[3])
    assert leaf(data)[0] == 3


def test_leaves_that_are_not_contiguous_are_copied():
    data = {
        "a": torch.arange(8).reshape(2, 4).t(),
        "b": torch.zeros(1).expand(4),
        "c": torch.ones(4, requires_grad=True),
    }
    storage = TensorStorage(data)
    storage[0] = {"a": torch.tensor([9, 9]), "b": torch.tensor(1.0), "c": torch.tensor(5.0)}
    assert data["a"][0].tolist() == [0, 4]
    assert data["b"].tolist() == [0, 0, 0, 0]
    assert data["c"][0] == 5
    assert not storage[:]["c"].requires_grad


def test_storage_around_slots_of_columns():
    data = torch.arange(12).reshape(4, 3)  # [time, columns]
    storage = TensorStorage(data, ndim=2)
    rb = ReplayBuffer(storage=storage)
    assert (storage.max_size, storage.columns, storage.shape, len(rb)) == (12, (3,), (4, 3), 12)
    assert torch.equal(storage.grid(), data.t())
    rb.extend(torch.full((3, 1), 77))
    assert data[0].tolist() == [77] * 3


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        (None, {}, ValueError, "expected data, got None"),
        (torch.zeros(4), {"max_size": 5}, ValueError, "max_size: expected 4, the size of the data, got 5"),
        (torch.zeros(4), {"lanes": 3}, ValueError, "lanes: expected a divisor of the 4 rows, got 3"),
        (torch.zeros(4), {"lanes": 5}, ValueError, "lanes: expected at most max_size=4, got 5"),
        (torch.zeros(0), {}, RuntimeError, "empty batch"),
        (torch.zeros(()), {}, TypeError, "scalar"),
        ({"a": "text"}, {}, TypeError, "'a': expected a tensor or an array"),
        ({"a": torch.zeros(4), "b": torch.zeros(5)}, {}, RuntimeError, "'a' has 4, field 'b' has 5"),
        (torch.zeros(4), {"compilable": True}, TypeError, "'compilable' is not supported yet"),
    ],
)
def test_data_that_no_storage_goes_around(data, options, error, says):
    with pytest.raises(error, match=says):
        TensorStorage(data, **options)


def test_devices():
    for device in ("cpu", torch.device("cpu"), "auto"):
        for storage in (LazyTensorStorage(5, device=device), TensorStorage(torch.arange(5), device=device)):
            ReplayBuffer(storage=storage).extend(torch.arange(2))
            assert storage.device == torch.device("cpu")
    for device in ("cuda", "nowhere", object()):
        with pytest.raises(ValueError, match=rf"LazyMemmapStorage: device: expected 'cpu'.*got '.*{str(device)[:5]}"):
            LazyMemmapStorage(5, device=device)


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", object()])
def test_no_such_device(device):
    for make in (
        lambda: LazyTensorStorage(5, device=device),
        lambda: TensorStorage(torch.arange(5), device=device),
        lambda: ListStorage(5, device=device),
    ):
        with pytest.raises(
            RuntimeError, match=r"Storage: device: (no such device, 'cuda:99'.*has cpu|expected a device)"
        ):
            make()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool"])
def test_rows_on_an_accelerator(dtype):
    storage = LazyTensorStorage(5, device="cuda")
    rb = ReplayBuffer(storage=storage)
    data = of_dtype(dtype, (7, 3))
    rb.extend({"a": data[:3]})
    rb.extend({"a": data[3:].cuda()})
    assert rb[:]["a"].is_cuda
    assert raw(rb[:]["a"].cpu()) == raw(torch.cat([data[5:], data[2:5]]))
    assert rb.sample(10)["a"].is_cuda


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_first_writes_of_many_threads_make_one_store(make):
    rb = ReplayBuffer(storage=make(1000))
    gate = threading.Barrier(8)

    def write(number):
        gate.wait()
        for i in range(10):
            rb.extend({"a": torch.full((3, 4), number * 100 + i)})
            rb.add({"a": torch.full((4,), number * 100 + i)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    rows = rb[:]["a"]
    assert bool((rows == rows[:, :1]).all())
    numbers, counts = rows[:, 0].unique(return_counts=True)
    assert numbers.tolist() == sorted(number * 100 + i for number in range(8) for i in range(10))
    assert counts.tolist() == [4] * 80


# ---- saying what was made --------------------------------------------------------------------------------------------


def test_creation_is_logged(make, caplog):
    caplog.set_level("INFO", "engram")
    storage = make(1000)
    rb = ReplayBuffer(storage=storage)
    assert caplog.messages == []
    rb.extend({"obs": torch.zeros(2, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(2, 1)}})
    folder = getattr(storage, "scratch_dir", None)
    places = ["RAM", "RAM"] if folder is None else [f"{folder}/obs.memmap", f"{folder}/next/reward.memmap"]
    assert caplog.messages == [
        f"obs: {places[0]}, 7.056 MB, shape [1000, 84, 84] uint8",
        f"('next', 'reward'): {places[1]}, 0.004 MB, shape [1000, 1] float32",
    ]
    assert caplog.messages == creation_lines(
        storage.store.schema.fields, 1000, lambda field: places[storage.structure.field_of(field.key)]
    )
    rb.extend({"obs": torch.zeros(2, 84, 84, dtype=torch.uint8), "next": {"reward": torch.zeros(2, 1)}})
    assert len(caplog.messages) == 2


def test_creation_is_shown_by_default_and_can_be_silenced(tmp_path):
    program = """
        import logging, torch
        {first}
        from engram import LazyTensorStorage, ReplayBuffer
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(2))
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(2))
        import sys
        sys.stdout.write(str(len(logging.getLogger("engram").handlers)))
    """
    from tests.fresh import start

    said = {}
    for name, first in {
        "default": "",
        "silenced": "logging.getLogger('engram').setLevel(logging.WARNING)",
        "configured": "logging.basicConfig(format='mine: %(message)s', level=logging.INFO)",
    }.items():
        made = start(program.format(first=first))
        assert made.wait() == 0, made.err
        said[name] = made.err.split("\n")[:-1]
    line = "_-single-tensor-_: RAM, 40 bytes, shape [10] float32"
    assert said == {"default": [f"engram: {line}"] * 2, "silenced": [], "configured": [f"mine: {line}"] * 2}


def test_repr_says_what_matters(make):
    storage = make(10, lanes=3)
    ReplayBuffer(storage=storage).extend(numbered(0, 2), lane=0)
    assert f"{type(storage).__name__}(size=2/9, lanes=3, max_size=10 asked, 2 fields, cpu)" == repr(storage)


def test_collectors_find_what_they_look_for(make):
    """semantics.md, section 4."""
    storage = make(4)
    rb = TensorDictReplayBuffer(storage=storage)
    assert rb._storage is storage
    assert storage.initialized is False
    assert storage.shared_init is True  # so that they write no fake row
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert storage.initialized is True
    assert storage._storage.batch_size == (4,)
    assert storage._storage["a"].tolist() == [0, 1, 0, 0]
    rb.empty()
    assert len(storage) == 0
    assert engram.__version__


# ---- a fake row --------------------------------------------------------------------------------------------------------


FAKE = {"a": torch.zeros(3), "done": torch.tensor([False])}
REAL = {"a": torch.ones(4, 5), "_reset": torch.tensor([[True]] * 4)}


def batch_of_one(row):
    return {key: value.unsqueeze(0) for key, value in row.items()}


@pytest.mark.parametrize("call", ["add", "extend"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_fake_row_says_nothing_of_the_rows_to_come(make, shared, call):
    """TorchRL's collectors wrote one to allocate memory, and emptied the buffer."""
    storage = make(10)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0), shared=shared, batch_size=4)
    rb.add(FAKE) if call == "add" else rb.extend(batch_of_one(FAKE))
    _, info = rb.sample(return_info=True)
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    with pytest.raises(NoSampleable):
        rb.sample()
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    rb.update_priority(info["index"], torch.full((4,), 9.0), generation=info["index_generation"])
    assert rb.stats()["priority_updates_dropped"] == 4  # they were drawn before
    assert rb.sample()["_reset"].all()
    rb.empty()
    assert storage.initialized
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(batch_of_one(FAKE))
    rb.close()


def test_what_was_emptied_stays_a_store(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"))
    rb.add(FAKE)
    rb.empty()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    assert len(rb) == 0
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    rb.close()
    assert ReplayBuffer.open(tmp_path / "store")[:]["_reset"].all()


def test_a_fake_slot_of_columns(make):
    storage = make(12, ndim=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.zeros(5, 1)})
    assert storage.max_size == 15
    rb.empty()
    rb.extend({"b": torch.ones(5, 2)})
    assert (storage.max_size, storage.columns, len(rb)) == (15, (5,), 10)
    rb.close()


def test_a_fake_row_before_the_buffer_is_shared():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add(FAKE)
    rb.empty()
    rb.share()
    other = copy.deepcopy(rb)
    assert rb.extend(REAL).tolist() == [0, 1, 2, 3]
    assert other.extend(REAL).tolist() == [4, 5, 6, 7]
    rb.close()


def test_two_rows_fix_the_fields(make):
    rb = ReplayBuffer(storage=make(10))
    rb.add(FAKE)
    rb.add(FAKE)
    rb.empty()
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(REAL)
    rb.close()


def test_a_count_that_is_kept_keeps_the_fields(make):
    rb = ReplayBuffer(storage=make(10))
    rb.add(FAKE)
    rb.empty(empty_write_count=False)
    assert rb.write_count == 1
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(REAL)
    rb.close()


def test_buffers_that_share_a_storage_go_on_after_a_fake_row(make):
    storage = make(10)
    one, other = (ReplayBuffer(storage=storage, sampler=PrioritizedSampler(10, 1.0, 1.0)) for _ in range(2))
    one.add(FAKE)
    other.sample(1)
    one.empty()
    one.extend(REAL)
    assert other.sample(4)["_reset"].all()
    one.close()


def test_a_fake_row_that_another_handle_sees_keeps_the_fields(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.add(FAKE)
    other = copy.deepcopy(rb)
    rb.empty()
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        rb.extend(REAL)
    other.extend(batch_of_one(FAKE))
    assert len(rb) == 1
    rb.close()
    other.close()


MOVES = ("view.share_memory_()", "torch.multiprocessing.get_context('spawn').SimpleQueue().put(view)")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reach", ["rb[:]", "rb[2:5]", "rb.storage[:]", "rb.storage._storage"])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_view_that_torch_moves_becomes_a_copy(move, reach, columns):
    """In a process of its own, which a write to memory that torch had freed would end."""
    run(
        f"""
        import gc, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, TensorDictReplayBuffer
        shape = [*columns, 1 << 13]
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1 << 14 if columns else 1 << 13, ndim=1 + len(columns)))
        rows = TensorDict(dict(a=torch.ones(*shape, 8), b=torch.ones(shape, dtype=torch.bfloat16)), shape)
        rb.extend(rows)
        before = [tensor.data_ptr() for tensor in rb.storage.store.tensors]
        for key in ("a", "b"):
            view = {reach}[key]
            {move}
            assert view.is_shared()
        gc.collect()
        rb.extend(rows * 3)
        assert before == [tensor.data_ptr() for tensor in rb.storage.store.tensors]
        assert (rb[:]["a"] == 3).all() and (rb.sample(64)["a"] == 3).all()
        assert (view == 1).all()
        """,
        columns=list(columns),
    )
