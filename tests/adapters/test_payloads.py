"""Values as bytes and back. The oracle is the value itself, compared by class, dtype, shape and bits."""

import datetime as dt
import enum
import math
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict

from engram.adapters.payloads import decode, encode

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
    if isinstance(value, torch.Tensor) and value.is_nested:
        return kind, str(value.layout), [plain(part) for part in value.unbind()]
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return kind, str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist())
    if isinstance(value, np.ndarray | np.generic):
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
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), "\ud800", math.inf, math.nan, -0.0]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(VALUES)
def test_values_come_back(value):
    payload = encode(value)
    assert len(payload) % 16 == 0
    assert plain(decode(payload)) == plain(value)
    assert plain(decode(bytes(payload))) == plain(value)


@settings(max_examples=30, deadline=None)
@given(tensors(), st.data())
def test_views_of_tensors_come_back(tensor, data):
    if tensor.ndim:
        tensor = tensor.transpose(0, data.draw(st.integers(0, tensor.ndim - 1)))
        tensor = tensor[:: data.draw(st.integers(1, 3))]
    assert plain(decode(encode(tensor))) == plain(tensor)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 3), st.sampled_from(DTYPES[5:9] + DTYPES[10:12])
)
def test_jagged_tensors_come_back(lengths, width, dtype):
    parts = [torch.randint(0, 99, (n, width)).to(dtype) for n in lengths]
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    for value in (jagged, jagged.transpose(1, 2)):
        found = decode(encode(value))
        assert found.layout is torch.jagged
        assert plain(found) == plain(value)
        assert found.offsets().tolist() == value.offsets().tolist()


def test_nested_tensors_of_other_kinds_come_back():
    parts = [torch.zeros(2, 3), torch.ones(1, 4)]
    strided = torch.nested.nested_tensor(parts, layout=torch.strided)
    assert plain(decode(encode(strided))) == plain(strided)
    start, length = torch.tensor([0, 1]), torch.tensor([2, 3])
    holes = torch.nested.narrow(torch.arange(30).reshape(2, 5, 3), 1, start, length, layout=torch.jagged)
    assert plain(decode(encode(holes))) == plain(holes)


def test_tensors_lose_what_is_no_value():
    for value in [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1]:
        found = decode(encode(value))
        assert type(found) is torch.Tensor
        assert found.tolist() == [1, 1]
        assert not found.requires_grad
    assert type(decode(encode(MemoryMappedTensor.from_tensor(torch.ones(2))))) is torch.Tensor
    conjugate = torch.tensor([1 + 2j]).conj()
    assert decode(encode(conjugate)).tolist() == [1 - 2j]
    assert decode(encode(np.arange(3, dtype=">i4"))).tolist() == [0, 1, 2]
    assert [type(decode(encode(value))) for value in (np.str_("a"), np.bytes_(b"a"))] == [str, bytes]
    assert decode(encode([np.str_("\ud800")])) == ["\ud800"]


def test_what_is_read_can_be_written_and_is_shared_only_with_bytes_that_can():
    payload = encode(torch.arange(3))
    read = decode(bytes(payload))
    read[0] = 9
    assert decode(bytes(payload)).tolist() == [0, 1, 2]
    shared = decode(payload)
    shared[0] = 9
    assert decode(payload).tolist() == [9, 1, 2]


def test_payloads_in_a_row_are_aligned():
    row = bytearray().join([encode("abc"), encode(torch.tensor(1.5)), encode(torch.arange(5.0))])
    first, second = len(encode("abc")), len(encode("abc")) + len(encode(torch.tensor(1.5)))
    found = decode(memoryview(row)[second:])
    assert (found.data_ptr() - torch.frombuffer(row, dtype=torch.uint8).data_ptr()) % 16 == 0
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert decode(memoryview(row)[first:second]).item() == 1.5


def test_the_layout_stays():
    """Payloads that were written once are read for ever."""
    assert encode(torch.tensor([1, 2], dtype=torch.int32)).hex() == (
        "01000701" + "00000000" + "0200000000000000" + "0100000002000000" + "0000000000000000"
    )
    assert encode("é").hex() == "01030001" + "00000000" + "0200000000000000" + "c3a9" + "00" * 14
    assert (
        encode({"a": [1, None]}).hex()
        == "01050001" + "00000000" + "0e00000000000000" + b'{"a":[1,null]}'.hex() + "0000"
    )
    tree = encode((b"x",))
    assert tree[:4] == bytes([1, 6, 0, 1])
    assert tree[16 : 16 + tree[8]] == b'["tuple",[["leaf"]]]'


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
    "a key": {(1, 2): 3},
    "a bool as key": {True: 3},
    "bytes that change": bytearray(b"x"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a tensor without content": torch.empty(2, device="meta"),
    "a complex number": 1j,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_other_values_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^here.*: expected"):
        encode(value, "here")
    with pytest.raises(TypeError, match=r"^here\['b'\]\[1\].*: expected"):
        encode({"a": torch.zeros(2), "b": [1, value]}, "here")


def test_deep_values_are_refused():
    value = []
    for _ in range(18):
        value = [value]
    with pytest.raises(ValueError, match="16 deep"):
        encode(value)


def test_damaged_payloads_are_refused():
    """Every byte of a few payloads is changed, and they are cut: all that raises is ValueError, and nothing crashes."""
    values = [torch.arange(3), "text", {"a": (torch.zeros(2, 0), [1], np.float32(1))}]
    values.append(torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))
    refused = 0
    for value in values:
        payload = bytes(encode(value))
        for at in range(len(payload)):
            for put in (0, 1, 7, 255):
                damaged = payload[:at] + bytes([put]) + payload[at + 1 :]
                refused += _refuses(damaged)
        for end in range(len(payload)):
            assert _refuses(payload[:end])
        assert _refuses(payload + bytes(16))
    assert refused > 100
    assert _refuses(pickle.dumps(torch.zeros(2)))


def _refuses(payload):
    try:
        decode(payload, "here")
    except ValueError as error:
        return str(error).startswith("here: expected a payload")
    return False
