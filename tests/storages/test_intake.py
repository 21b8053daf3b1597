"""What users hand over reaches the rows as it is: arrays, tensors and numbers, however their memory lies."""

import collections
import threading
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from engram.errors import RowError

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


class Pair(NamedTuple):
    left: object
    right: object


def values(rng, dtype, shape):
    kind = np.dtype(dtype).kind
    if kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))
    made = np.asarray(rng.standard_normal(shape))
    if kind == "c":
        made = made + 1j * np.asarray(rng.standard_normal(shape))
    return np.asarray(made > 0 if kind == "b" else made).astype(dtype)


def reversed_bytes(array):
    return array.astype(array.dtype.newbyteorder())


def sparse(array):
    """The same values with gaps between them."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype) if array.ndim else array
    if array.ndim:
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def off_by_one(array):
    """At an address that the dtype would not choose."""
    return (
        np.frombuffer(b"x" + array.tobytes(), array.dtype, array.size, 1).reshape(array.shape) if array.size else array
    )


def tensor_of(leaf):
    leaf = np.asarray(leaf)
    return torch.from_numpy(leaf.astype(leaf.dtype.newbyteorder("="), order="C"))


#: The same values for users who keep them otherwise.
GUISES = {
    "array": lambda array: array,
    "Fortran's order": lambda array: np.array(array, order="F"),
    "gaps": sparse,
    "backwards": lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    "read-only": read_only,
    "other bytes": reversed_bytes,
    "unaligned": off_by_one,
    "tensor": tensor_of,
    "tensor with gaps": lambda array: torch.from_numpy(np.array(array, order="F")),
    "scalar": lambda array: array[()],
}

rows = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "fields": st.lists(
            st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4
        ),
        "nest": st.sampled_from(["dict", "nested", "tuple", "list", "namedtuple", "tensordict"]),
        "writes": st.lists(st.tuples(st.sampled_from(["add", "extend"]), st.integers(1, 5)), min_size=1, max_size=6),
        "guises": st.lists(st.sampled_from(sorted(GUISES)), min_size=8, max_size=8),
    }
)


def nested(leaves, nest, batch):
    if nest == "dict":
        return {f"f{i}": leaf for i, leaf in enumerate(leaves)}
    if nest == "nested":
        return {
            "first": leaves[0],
            "others": {"in": {f"f{i}": leaf for i, leaf in enumerate(leaves[1:])}, "last": leaves[0]},
        }
    if nest == "tuple":
        return (leaves[0], {"others": tuple(leaves)})
    if nest == "list":
        return [leaves[0], {"others": leaves[0]}]
    if nest == "namedtuple":
        return Pair(leaves[0], Pair(leaves[-1], {"x": leaves[0]}))
    entries = {f"f{i}": leaf if isinstance(leaf, torch.Tensor) else tensor_of(leaf) for i, leaf in enumerate(leaves)}
    return TensorDict(entries, batch)


def leaves_of(data):
    if isinstance(data, TensorDict):
        data = dict(data.items())
    if isinstance(data, dict):
        return [leaf for key in sorted(data) for leaf in leaves_of(data[key])]
    if isinstance(data, tuple | list):
        return [leaf for child in data for leaf in leaves_of(child)]
    return [np.asarray(data)]


@settings(max_examples=150, deadline=None)
@given(rows)
def test_rows_are_what_was_written(case):
    rng, guises = np.random.default_rng(case["seed"]), iter(case["guises"] * 6)
    rb = ReplayBuffer(storage=LazyTensorStorage(16))
    written = collections.deque(maxlen=16)
    for call, n in case["writes"]:
        batch = [n] if call == "extend" else []
        plain = [values(rng, dtype, [*batch, *shape]) for dtype, shape in case["fields"]]
        dressed = [GUISES[next(guises)](array) for array in plain]
        if case["nest"] == "list" and call == "extend":
            continue  # a list is a list of rows there
        getattr(rb, call)(nested(dressed, case["nest"], batch))
        expected = leaves_of(nested(plain, case["nest"], batch))
        written.extend([leaf[i] for leaf in expected] for i in range(n)) if batch else written.append(expected)
    assert len(rb) == len(written)
    oldest = rb.write_count % 16 if rb.write_count > 16 else 0
    for i, row in enumerate(written):
        for stored, leaf in zip(leaves_of(rb[(oldest + i) % 16]), row, strict=True):
            assert stored.dtype == leaf.dtype
            np.testing.assert_array_equal(stored, leaf)


def test_an_array_may_change_between_calls():
    """In its values, its dtype, strides and byte order, at the same address."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    memory = np.zeros(64, np.uint8)
    array = memory[:16].view(np.float32)
    array[:] = [1, 2, 3, 4]
    rb.add({"a": array})
    array[:] = [5, 6, 7, 8]
    rb.add({"a": array})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        array.strides = (8,)
        array[:] = [9, 10, 11, 12]
        rb.add({"a": array})
        array.strides = (4,)
    array.dtype = ">f4"
    array[:] = [13, 14, 15, 16]
    rb.add({"a": array})
    assert rb[:]["a"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    array.dtype = np.int32
    with pytest.raises(RuntimeError, match="field a: expected shape .*float32.*int32"):
        rb.add({"a": array})
    array.dtype = np.float32
    with pytest.raises(RuntimeError, match=r"field a: expected shape \[4\].*\[2, 2\]"):
        rb.add({"a": array.reshape(2, 2)})
    assert len(rb) == 4


@pytest.mark.parametrize(
    "wrong", [np.datetime64("2020-01-01"), np.timedelta64(3), np.str_("x"), np.bytes_(b"x"), np.void(b"12345678")]
)
def test_scalars_that_are_no_numbers(wrong):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, lanes=2))
    rb.extend({"a": np.zeros((2, 8), np.uint8)}, lane="each")
    for write in (
        lambda: rb.add({"a": wrong}, lane=0),
        lambda: rb.extend({"a": wrong}, lane=0),
        lambda: rb.extend({"a": np.zeros((2, 8), np.uint8)}, lane=wrong),
        lambda: rb.extend({"a": np.zeros((2, 8), np.uint8)}, lane=np.array([wrong, wrong])),
    ):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            write()
    assert len(rb) == 2


class TestNumbers:
    """Python's: a float is float32, an int int64, a bool bool. Lists of them are leaves."""

    @pytest.mark.parametrize("again", [1, 3])
    def test_first_rows_decide_dtypes(self, again):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        for _ in range(again):
            rb.add({"reward": 0.1, "action": 3, "done": True, "obs": [1.0, 2.5], "grid": [[1, 2], [3, 4]]})
        row = rb[again - 1]
        assert {key: value.dtype for key, value in row.items()} == {
            "reward": torch.float32, "action": torch.int64, "done": torch.bool, "obs": torch.float32, "grid": torch.int64
        }  # fmt: skip
        assert row["reward"] == torch.tensor(0.1)
        assert (row["action"], row["done"], row["obs"].tolist(), row["grid"].tolist()) == (
            3,
            True,
            [1, 2.5],
            [[1, 2], [3, 4]],
        )

    def test_batches(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        for k in (1.0, 2.0, 3.0):
            rb.extend({"reward": [k, 2 * k], "obs": np.full((2, 3), k)})
        assert rb[:]["reward"].tolist() == [1, 2, 2, 4, 3, 6]
        assert rb[:]["obs"].dtype == torch.float64  # an array keeps its dtype

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_they_become_the_dtype_of_the_field(self, dtype):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.add({"a": torch.zeros(2, dtype=dtype), "b": torch.zeros((), dtype=dtype)})
        for numbers, number in (([0.1, 3], 0.1), ([-1, 7], 5)):
            rb.add({"a": numbers, "b": number})
            assert torch.equal(rb[len(rb) - 1]["a"], torch.tensor(numbers, dtype=dtype))
            assert torch.equal(rb[len(rb) - 1]["b"], torch.tensor(number, dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16])
    def test_ints_that_a_field_cannot_hold(self, dtype):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        limits = torch.iinfo(dtype)
        for number in (limits.min, limits.max, 0):
            rb.add({"a": torch.tensor(number, dtype=dtype)})
            rb.add({"a": number})
            assert rb[len(rb) - 1]["a"] == rb[len(rb) - 2]["a"] == number
        for wrong in (limits.min - 1, limits.max + 1, 0.0, True, 2**70):
            with pytest.raises((RuntimeError, TypeError), match="field '?a"):
                rb.add({"a": wrong})
        assert len(rb) == 6

    @pytest.mark.parametrize("wrong", [1, 0.0, [True, 1], "True", None])
    def test_a_bool_is_no_number(self, wrong):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.add({"a": True})
        with pytest.raises((RuntimeError, TypeError), match="field '?a"):
            rb.add({"a": wrong})
        assert len(rb) == 1

    @pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], [1.0, [2.0]], [1.0, "x"], [1.0, None], []])
    def test_lists_of_another_shape(self, wrong):
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        rb.add({"a": [1.0, 2.0]})
        with pytest.raises((RuntimeError, TypeError, KeyError)):
            rb.add({"a": wrong})
        assert len(rb) == 1


def test_a_batch_that_is_a_list_is_a_list_of_rows():
    """Also where a row is a list of fields, which it could be taken for."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add([torch.tensor(1.0), torch.tensor(2.0)])
    for wrong in ([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], [np.ones(4, np.float32), np.ones(4, np.float32)]):
        with pytest.raises((TypeError, RuntimeError)):
            rb.extend(wrong)
    rb.extend([[np.float32(1), np.float32(2)], [np.float32(3), np.float32(4)]])
    assert [[float(x) for x in rb[i]] for i in range(3)] == [[1, 2], [1, 2], [3, 4]]


def test_tensordicts_within_a_batch_have_its_size():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    inner = {"y": torch.zeros(4, 3)}
    rb.extend({"x": np.zeros(4), "td": TensorDict(inner, [4])})
    for size in ([], [3]):
        wrong = TensorDict({"y": torch.zeros(4, 3)[: size[0] if size else 4]}, size)
        with pytest.raises((TypeError, RuntimeError)):
            rb.extend({"x": np.zeros(4), "td": wrong})
    assert len(rb) == 4


LANES = {
    "list": [2, 0, 1],
    "tuple": (2, 0, 1),
    "array": np.array([2, 0, 1]),
    "bytes": np.array([2, 0, 1], np.uint8),
    "gaps": np.array([2, 9, 0, 9, 1])[::2],
    "tensor": torch.tensor([2, 0, 1]),
    "small tensor": torch.tensor([2, 0, 1], dtype=torch.int8),
}


class TestLanes:
    def make(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(12, lanes=3), batch_size=2)
        rb.extend({"a": np.arange(3)}, lane="each")
        return rb

    @pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
    def test_one_per_row(self, lane):
        rb = self.make()
        assert rb.extend({"a": np.arange(10, 13)}, lane=lane).tolist() == [9, 1, 5]
        assert [int(rb[i]["a"]) for i in (9, 1, 5)] == [10, 11, 12]

    @pytest.mark.parametrize("lane", [range(3), "each", None])
    def test_each(self, lane):
        rb = self.make()
        for k in (1, 2, 3):
            assert rb.extend({"a": np.arange(3) + 10 * k}, lane=lane).tolist() == [k, 4 + k, 8 + k]
            assert [int(rb[i]["a"]) for i in (k, 4 + k, 8 + k)] == [10 * k, 10 * k + 1, 10 * k + 2]

    @pytest.mark.parametrize("lane", [1, np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)])
    def test_one_for_all(self, lane):
        assert self.make().extend({"a": np.arange(2)}, lane=lane).tolist() == [5, 6]

    @pytest.mark.parametrize(
        "lane",
        [
            3,
            -1,
            [0, 1, 3],
            [0, -1, 2],
            (0, 1),
            np.array([0, 1, -1], np.int8),
            np.array([0, 1, 255], np.uint8),
            [0, 1, 2**70],
        ],
    )
    def test_lanes_that_are_not_there(self, lane):
        rb = self.make()
        with pytest.raises((RowError, RuntimeError, TypeError), match="lane|rows"):
            rb.extend({"a": np.arange(3)}, lane=lane)
        assert len(rb) == 3

    @pytest.mark.parametrize(
        "lane", [0.5, "all", "\ud800", [0.0, 1.0, 2.0], np.array([True, False, True]), [[0, 1, 2]]]
    )
    def test_what_is_no_lane(self, lane):
        rb = self.make()
        with pytest.raises((TypeError, RuntimeError)):
            rb.extend({"a": np.arange(3)}, lane=lane)
        assert len(rb) == 3


def test_data_that_others_change_while_it_is_written():
    """Containers of the user's may lose what is being written; the memory stays until it is copied."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend({"a": np.zeros((64, 512))})
    data, stop = {"a": np.zeros((64, 512))}, threading.Event()

    def change():
        k = 0
        while not stop.is_set():
            k += 1
            data["a"] = np.full((64, 512), float(k))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            written = rb[rb.extend(data)]["a"]
            assert bool((written == written[0, 0]).all())
    finally:
        stop.set()
        thread.join()


def test_samplers_hear_of_rows(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "store", lanes=2),
        sampler=SliceSampler(slice_len=3, traj_key="episode", strict_length=True, cache_values=True),
        batch_size=6,
    )
    for t in range(20):
        ids = torch.tensor([t // 10, 100 + t // 10])
        rb.extend(TensorDict({"episode": ids, "t": torch.tensor([t, t])}, [2]), lane="each")
    for _ in range(20):
        batch = rb.sample()
        t = batch["t"].reshape(2, 3)
        assert bool((t.diff(dim=1) == 1).all())
