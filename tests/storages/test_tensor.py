"""Rows as columns of tensors, in RAM and in a directory: what is taken, what comes back, what is refused."""

import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, is_tensor_collection

from engram import ReplayBuffer
from engram.format.schema import DTYPES
from tests.fresh import run
from tests.storages.rows import Step, numbered, reopened
from tests.storages.test_structure import UNUSUAL, of_dtype, raw

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Pair = namedtuple("Pair", ["left", "right"])


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
    loaded = None if "float8" in dtype else without_engram(rb)  # tensordict reads no float8
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
    assert told[0].startswith(
        "open: the rows are of the tensorclass 'Step', which this program has not defined. Import it first ("
    )
    assert told[0].endswith("it was defined in module 'steps'). False")
    assert told[1:] == ["Batch engram._support.nested Batch"]
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
