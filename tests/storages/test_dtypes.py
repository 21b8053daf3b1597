"""Fields whose dtype was said once: whatever is written to them is cast, and nothing but precision is given up."""

import cmath
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import engram
from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import CorruptStore, IncompatibleCheckpoint, IncompatibleStore

NAMES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NAMES += ["float16", "float32", "float64", "complex64", "complex128"]
KINDS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


def oracle(values, target):
    """What is stored of an array, or None where it is refused: by Python's numbers, one by one."""
    target = np.dtype(target)
    if KINDS[values.dtype.kind] > max(KINDS[target.kind], 1) or (target.kind == "b" and KINDS[values.dtype.kind] > 1):
        return None
    stored = []
    for value in values.ravel().tolist():
        if target.kind == "b":
            if value not in (0, 1):
                return None
        elif target.kind in "iu":
            if not np.iinfo(target).min <= value <= np.iinfo(target).max:
                return None
        else:
            with np.errstate(over="ignore"):
                if cmath.isfinite(value) and not np.isfinite(np.array(value, values.dtype).astype(target)):
                    return None
        stored.append(value)
    with np.errstate(over="ignore"):
        return np.array(stored, values.dtype).reshape(values.shape).astype(target)


def numbers_of(name):
    dtype = np.dtype(name)
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return st.one_of(st.sampled_from([info.min, info.max, 0, 1]), st.integers(info.min, info.max))
    width = {"float16": 16, "float32": 32, "complex64": 32}.get(name, 64)
    floats = st.floats(width=width)
    small = st.sampled_from([0.0, 1.0, 0.5, -2.0])
    return st.one_of(small, floats if dtype.kind == "f" else st.complex_numbers(max_magnitude=1e6, width=width * 2))


cases = st.sampled_from(NAMES).flatmap(
    lambda name: st.fixed_dictionaries(
        {
            "from": st.just(name),
            "to": st.sampled_from(NAMES),
            "values": st.lists(numbers_of(name), min_size=1, max_size=6),
            "first": st.booleans(),
            "guise": st.sampled_from(["array", "tensor", "gaps", "other bytes"]),
            "path": st.sampled_from(["dict", "tensordict", "nested", "ndim", "add", "appender", "rb[i]", "set_at_"]),
        }
    )
)


@settings(max_examples=300, deadline=None)
@given(cases)
def test_values_become_the_dtype_that_was_said(case):
    values = np.array(case["values"], case["from"])
    expected = oracle(values, case["to"])
    n, path = len(values), case["path"]
    key = ("next", "a") if path == "nested" else "a"
    storage = LazyTensorStorage(64, ndim=2 if path == "ndim" else 1, dtypes={key: getattr(torch, case["to"])})
    rb = (TensorDictReplayBuffer if path == "tensordict" else ReplayBuffer)(storage=storage)
    dressed = {
        "array": values,
        "tensor": torch.from_numpy(values),
        "gaps": np.repeat(values, 2)[::2],
        "other bytes": values.astype(values.dtype.newbyteorder()),
    }[case["guise"]]
    zeros = np.zeros(n, bool)

    def write(data):
        if path == "tensordict":
            tensor = torch.as_tensor(
                data if isinstance(data, torch.Tensor) else data.astype(data.dtype.newbyteorder("="))
            )
            rb.extend(TensorDict({"a": tensor}, [n]))
        elif path == "appender":
            rb.appender().extend(a=data)
        elif path == "rb[i]":
            rb[list(range(n))] = {"a": data}
        elif path == "set_at_":
            rb.set_at_("a", data, list(range(n)))
        elif path == "add":
            rb.add({"a": data})
        else:
            rb.extend({"nested": {"next": {"a": data}}, "ndim": {"a": data[None]}}.get(path, {"a": data}))

    edits = path in ("rb[i]", "set_at_")
    if edits:
        rb.extend({"a": zeros})
    elif not case["first"]:
        write(zeros)
    written, before = edits or not case["first"], rb.write_count
    if expected is None:
        with pytest.raises(RuntimeError, match=f"field .*{case['to']} holds, as dtypes= says.*{case['from']}"):
            write(dressed)
        assert rb.write_count == before
        assert storage.initialized is written
        return
    write(dressed)
    stored = rb[:][key if isinstance(key, str) else "next"]
    stored = stored["a"] if isinstance(key, tuple) else stored
    stored = stored[-1] if path == "add" else stored.reshape(-1)[-n:]
    assert str(stored.dtype) == f"torch.{case['to']}"
    np.testing.assert_array_equal(stored.numpy(), expected)


@pytest.mark.parametrize("n", [3, 70_000, 1_100_000])
def test_sizes_that_are_cast_elsewhere(n):
    rb = ReplayBuffer(storage=LazyTensorStorage(3 * n, dtypes={"a": torch.float32}))
    values = np.arange(2 * n, dtype=np.float64) / 7
    parts = values[:n], values[::2], values[1::2]
    for data in parts:
        rb.extend({"a": data})
    np.testing.assert_array_equal(rb[:]["a"].numpy(), np.concatenate(parts).astype(np.float32))


class TestNumbers:
    def test_of_python(self):
        dtypes = {"r": torch.float32, "d": torch.float32, "a": torch.int8, "h": torch.bfloat16, "b": torch.bool}
        rb = ReplayBuffer(storage=LazyTensorStorage(10, dtypes=dtypes))
        for reward in (1, 0.5):
            rb.add({"r": reward, "d": True, "a": 7, "h": 1.5, "b": 1})
        rb.extend({"r": [1, 2.5], "d": [True, False], "a": [1, 2], "h": [1.5, 2.5], "b": [0, True]})
        assert rb[:]["r"].tolist() == [1, 0.5, 1, 2.5]
        assert rb[:]["d"].tolist() == [1, 1, 1, 0]
        assert rb[:]["b"].tolist() == [True, True, False, True]
        assert {k: v.dtype for k, v in rb[0].items()} == dtypes
        for wrong in ({"a": 128}, {"a": 0.5}, {"b": 2}, {"b": 0.0}):
            with pytest.raises(RuntimeError, match=f"field {next(iter(wrong))}: expected values"):
                rb.add({"r": 1, "d": True, "a": 7, "h": 1.5, "b": 1, **wrong})
        assert len(rb) == 4

    def test_a_list_of_rows(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"r": torch.float32}))
        for _ in range(2):
            rb.extend([{"r": 1}, {"r": 0.5}, {"r": np.float64(2)}])
        assert rb[:]["r"].tolist() == [1, 0.5, 2] * 2

    @pytest.mark.parametrize("path", ["native", "python"])
    def test_scalars_of_numpy_are_numbers(self, path):
        """What ``env.step`` returns, after a first row of Python's numbers. Arrays keep their dtype."""
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        if path == "python":
            rb.storage.add_row = lambda *_: None
        rb.add({"r": 0.0, "a": 0, "d": False})
        rb.add({"r": np.float64(0.1), "a": np.int32(3), "d": np.bool_(True)})
        rb.add({"r": np.float16(0.5), "a": np.uint8(4), "d": True})
        rb.add({"r": np.int64(2), "a": np.int64(5), "d": False})
        assert rb[:]["r"].tolist() == [0.0, np.float32(0.1), 0.5, 2]
        assert rb[:]["a"].tolist() == [0, 3, 4, 5]
        assert {k: v.dtype for k, v in rb[0].items()} == {"r": torch.float32, "a": torch.int64, "d": torch.bool}
        for wrong in (
            {"r": np.array(0.1)}, {"r": np.float64(1e300)}, {"r": np.bool_(True)}, {"a": np.float64(3)},
            {"a": np.uint64(2**63)}, {"a": np.bool_(True)}, {"d": np.int64(1)}, {"r": np.complex128(1)},
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=f"field {next(iter(wrong))}: expected shape"):
                rb.add({"r": 0.0, "a": 0, "d": False, **wrong})
        assert len(rb) == 4


# ---- the storage remembers -------------------------------------------------------------------------------------------

WIDE = {"obs": np.full((2, 3), 0.1), "next": {"r": np.array([0.1, 0.2])}, "t": np.array([1.5, 2.5])}
DTYPES = {"obs": torch.float32, ("next", "r"): torch.float16}


def casts(rb):
    before = rb.write_count
    rb.extend(WIDE)
    assert rb.write_count == before + 2
    assert (rb[:]["obs"].dtype, rb[:]["next"]["r"].dtype, rb[:]["t"].dtype) == (
        torch.float32,
        torch.float16,
        torch.float64,
    )
    return rb


def test_a_directory_notes_them_for_open(tmp_path):
    casts(ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "a", dtypes=DTYPES))).close()
    for _ in range(2):
        casts(ReplayBuffer.open(tmp_path / "a")).close()
    note = tmp_path / "a" / ".engram" / "buffer.json"
    note.write_text(note.read_text().replace("float16", "no dtype"))
    with pytest.raises(CorruptStore, match="recorded open: dtypes: .*expected a dtype"):
        ReplayBuffer.open(tmp_path / "a")


def test_open_or_create_takes_them_at_every_start(tmp_path):
    for _ in range(2):
        casts(ReplayBuffer.open_or_create(tmp_path / "a", 10, dtypes=DTYPES)).close()
    rb = ReplayBuffer.open_or_create(tmp_path / "a", 10)
    with pytest.raises(RuntimeError, match="field obs: expected shape .* float32"):
        rb.extend(WIDE)
    rb.close()
    for other, says in (
        ({"obs": torch.float64}, "expected float64 .* obs.* stored as float32"),
        ({"x": torch.int8}, "field x"),
    ):
        with pytest.raises(IncompatibleStore, match=f"dtypes: .*{says}"):
            ReplayBuffer.open_or_create(tmp_path / "a", 10, dtypes=other)
    casts(ReplayBuffer.open_or_create(tmp_path / "a", 10, dtypes=DTYPES))


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_copies_and_handles(written, shared):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, dtypes=DTYPES), shared=shared)
    if written:
        casts(rb)
    other = pickle.loads(pickle.dumps(rb))
    casts(rb)
    casts(other)
    assert len(rb) == 2 + 2 * written + 2 * shared


def test_a_state_of_other_dtypes_is_refused():
    wide, narrow = (ReplayBuffer(storage=LazyTensorStorage(10, dtypes=d)) for d in (None, DTYPES))
    wide.extend(WIDE)
    with pytest.raises(IncompatibleCheckpoint, match="dtypes: expected float32 for the field obs"):
        narrow.load_state_dict(wide.state_dict())
    more = ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"rewrad": torch.float32}))
    with pytest.raises(
        IncompatibleCheckpoint, match=r"dtypes: expected stored fields, \['obs', .*\], got field rewrad"
    ):
        more.load_state_dict(wide.state_dict())
    casts(narrow)
    other = ReplayBuffer(storage=LazyTensorStorage(10, dtypes=DTYPES))
    other.load_state_dict(narrow.state_dict())
    casts(other)


# ---- saying so -------------------------------------------------------------------------------------------------------


def test_one_line_names_the_remedy(caplog):
    caplog.set_level("INFO", "engram")
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(WIDE)
    rb.extend(WIDE)
    said = [line for line in caplog.messages if "dtypes" in line]
    remedy = "{'obs': torch.float32, ('next', 'r'): torch.float32, 't': torch.float32}"
    assert said == [f"float64: obs, ('next', 'r'), t. dtypes={remedy} of the storage takes half the memory."]
    plan = engram.plan({"obs": np.zeros(3), "x": 1.0}, 10)
    assert str(plan).endswith("float64: obs. dtypes={'obs': torch.float32} of the storage takes half the memory.")
    assert (plan.row_bytes, engram.plan({"obs": np.zeros(3), "x": 1.0}, 10, dtypes={"obs": "float32"}).row_bytes) == (
        28,
        16,
    )
    caplog.clear()
    ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"a": torch.float64})).extend({"a": np.zeros(3)})
    ReplayBuffer(storage=LazyTensorStorage(10)).extend(np.zeros(3))
    assert "dtypes" not in caplog.text


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    "wrong",
    [
        {"a": "text"},
        {"a": None},
        {"a": torch.float8_e8m0fnu},
        {1.5: torch.float32},
        {(): torch.float32},
        "float32",
        [1],
    ],
)
def test_what_names_no_dtypes(make, wrong):
    with pytest.raises(TypeError, match=f"{make.__name__}: dtypes"):
        make(10, dtypes=wrong)


def test_nested_dtypes_are_named_by_tuples():
    with pytest.raises(TypeError, match=r"Name nested fields by tuples, \('next', …\)"):
        LazyTensorStorage(10, dtypes={"next": {"a": torch.float32}})


def test_a_field_that_is_not_there():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"rewrad": torch.float32}))
    with pytest.raises(
        KeyError, match=r"extend: dtypes: expected fields of the first row, of \['reward'\], got 'rewrad'"
    ):
        rb.extend({"reward": np.zeros(3)})
    assert not rb.storage.initialized


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.uint64, -1), (torch.uint64, [-1, 2]), (torch.float32, 1e300), (torch.float32, [0.5, -1e300])],
)
def test_numbers_of_python_that_a_field_does_not_hold(dtype, value, said):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, dtypes={"x": dtype} if said else None))
    rb.add({"x": torch.zeros_like(torch.as_tensor(value), dtype=dtype)})
    with pytest.raises(RuntimeError, match=r"add: field x: expected .*(int|float)64"):
        rb.add({"x": value})
    assert len(rb) == 1


@pytest.mark.parametrize("value", [2**63, [2**63, 2**64 - 1], np.ulonglong(7), np.ones(2, np.ulonglong)])
def test_all_that_a_field_of_uint64_holds(value):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    for _ in range(2):  # the first one makes the field
        rb.add({"x": value})
    assert rb[:]["x"].dtype is torch.uint64
    assert rb[:]["x"].tolist() == [np.asarray(value).tolist()] * 2
