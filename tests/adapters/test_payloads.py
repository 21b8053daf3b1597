"""Values as bytes and back. The oracle is the value itself, compared by class, dtype, shape and bits."""

import datetime as dt
import enum
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict

from engram.adapters.keyed_values import FORM, decode, encode
from engram.format.schema import DTYPES as DTYPES_STORED
from engram.store.ragged_rows import Items

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
SHAPES = st.lists(st.integers(0, 4), max_size=4)


def plain(value):
    """A value as something that compares by class, dtype, shape and bits."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return kind, str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist())
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack("<d", value) if not math.isnan(value) else "nan"
    if isinstance(value, list | tuple):
        return kind, [plain(item) for item in value]
    if isinstance(value, dict):
        return kind, [(plain(key), plain(item)) for key, item in value.items()]
    return kind, value


def tensors():
    def made(shape, dtype, seed):
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8,
                             generator=torch.Generator().manual_seed(seed))  # fmt: skip
        return (bits.view(dtype) if len(bits) else torch.empty(0, dtype=dtype)).reshape(shape)

    return st.builds(made, SHAPES, st.sampled_from(DTYPES), st.integers(0, 9))


def arrays():
    return (
        tensors()
        .filter(lambda x: not any(word in str(x.dtype) for word in ("bfloat", "float8", "complex32")))
        .map(lambda x: x.numpy())
    )


LEAVES = st.one_of(
    tensors(),
    arrays(),
    st.text(),
    st.binary(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["\ud800", math.inf, math.nan, -0.0]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.none()), inner, max_size=3),
    ),
    max_leaves=8,
)


def there_and_back(*values):
    """What was encoded and decoded together, which is in part what neighbours are."""
    forms, items = encode(values, [str(place) for place in range(len(values))], 10**6)
    assert (forms.dtype, tuple(forms.shape)) == (torch.int32, (len(values), FORM))
    return decode(forms, items.packed())


@settings(max_examples=120, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_values_come_back(values):
    assert list(map(plain, there_and_back(*values))) == list(map(plain, values))


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=8), st.data())
def test_views_of_tensors_come_back(several, data):
    several = [it.transpose(0, data.draw(st.integers(0, it.ndim - 1))) if it.ndim else it for it in several]
    several = [it[:: data.draw(st.integers(1, 3))] if it.ndim else it for it in several]
    assert list(map(plain, there_and_back(*several))) == list(map(plain, several))


def test_tensors_of_many_dimensions_come_back():
    values = [torch.arange(2**n).reshape([2] * n) for n in range(12)] + [torch.zeros(*[1] * 9, 0)]
    assert list(map(plain, there_and_back(*values))) == list(map(plain, values))


def test_tensors_lose_what_is_no_value():
    for value in [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1]:
        (found,) = there_and_back(value)
        assert type(found) is torch.Tensor
        assert found.tolist() == [1, 1]
        assert not found.requires_grad
    assert type(there_and_back(MemoryMappedTensor.from_tensor(torch.ones(2)))[0]) is torch.Tensor
    assert there_and_back(torch.tensor([1 + 2j]).conj())[0].tolist() == [1 - 2j]
    assert there_and_back(np.arange(3, dtype=">i4"))[0].tolist() == [0, 1, 2]
    found = there_and_back(np.str_("a"), np.bytes_(b"a"), np.float32(1.5), np.int64(-3), np.bool_(True))
    assert [(type(it), it) for it in found] == [(str, "a"), (bytes, b"a"), (float, 1.5), (int, -3), (bool, True)]


def test_what_was_read_is_the_readers():
    forms, items = encode([torch.arange(3), {"a": np.arange(3)}], "ab", 1_000)
    rows = items.packed()
    stored = rows.given.clone()
    found = decode(forms, Items(rows.given.clone(), rows.starts, rows.lengths))
    found[0][0], found[1]["a"][0] = 9, 9
    assert torch.equal(rows.given, stored)


def test_the_layout_stays():
    """Rows that were written once are read for ever."""
    forms, items = encode([torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor(True)], "ab", 100)
    assert forms.tolist() == [[8, 1, 2, *[-1] * 5], [1, *[-1] * 7]]
    assert [row.tolist() for row in items.rows()] == [[1, 0, 0, 0, 2, 0, 0, 0], [1]]
    forms, items = encode(["é", {"a": [1, None]}, (b"x",)], "abc", 200)
    texts = ['"é"', '{"a": [1, null]}', '{"": "tuple", "of": [{"": ["bytes", "uint8", 1], "at": [0, 1]}]}']
    assert forms.tolist() == [[0, len(text.encode()), *[-1] * 6] for text in texts]
    rows = [bytes(row.tolist()) for row in items.rows()]
    assert [row[: len(text.encode())].decode() for row, text in zip(rows, texts, strict=True)] == texts
    assert rows[2].rstrip(bytes(1))[-1:] == b"x"
    assert rows[2].rindex(b"x") % 16 == 0
    assert list(DTYPES_STORED)[:9] == ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
    assert list(DTYPES_STORED)[9:15] == [
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ]
    assert list(DTYPES_STORED)[15:20] == ["float32", "float64", "complex32", "complex64", "complex128"]


class _Colour(enum.StrEnum):
    RED = "red"


REFUSED = {
    "an object": object(),
    "a class of one's own": {"a": [1, dt.date(2026, 1, 1)]},
    "a set": {1, 2},
    "a TensorDict": TensorDict({"a": torch.zeros(2)}),
    "an array of objects": np.array(["a", None], dtype=object),
    "an array of texts": np.array(["a"]),
    "an array of dates": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "an enum": _Colour.RED,
    "a key": {dt.date(2026, 1, 1): 3},
    "a nested tensor": torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "bytes that change": bytearray(b"x"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a tensor without content": torch.empty(2, device="meta"),
    "a complex number": 1j,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_other_values_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^put: here.*: expected"):
        encode([1, value], ["there", "here"], 1_000)
    with pytest.raises(TypeError, match=r"^put: here\['b'\]\[1\].*: expected"):
        encode([{"a": torch.zeros(2), "b": [1, value]}], ["here"], 1_000)


def test_deep_and_long_values_are_refused():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="put: here.*: expected containers at most hundreds deep"):
        encode([value], ["here"], 1_000)
    for long in (torch.zeros(251), "x" * 1_000):
        with pytest.raises(ValueError, match=r"put: b: expected at most 1,000 bytes, .* got 1,0\d\d\."):
            encode([torch.zeros(250), long, 1], "abc", 1_000)


def test_damaged_rows_are_refused():
    """Bytes of a few rows are changed: all that raises is ValueError, and nothing crashes."""
    forms, items = encode([torch.arange(3), "text", {"a": (torch.zeros(2), [1], b"x")}], "abc", 1_000)
    rows, refused = items.packed(), 0
    for memory in (forms.view(torch.uint8).view(-1), rows.given):
        for at in range(len(memory)):
            for put in (0, 1, 7, 127, 255):
                before = int(memory[at])
                memory[at] = put
                refused += _refuses(forms, rows)
                memory[at] = before
    assert refused > 200
    assert decode(forms, rows)[1] == "text"


def _refuses(forms, rows):
    try:
        decode(forms, rows)
    except ValueError as error:
        return str(error).startswith("expected rows that encode() made")
    return False


@pytest.mark.parametrize("value", [np.ma.masked_array([1, 2], [True, False]), np.timedelta64(3), np.longdouble(1)])
def test_values_that_would_come_back_as_others_are_refused(value):
    with pytest.raises(TypeError, match="objects are not pickled"):
        encode([value], ["a"], 1 << 20)
