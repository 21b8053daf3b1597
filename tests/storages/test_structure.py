"""From data of any form to columns and back."""

import copy
import pickle
import warnings
from collections import namedtuple
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, is_tensor_collection, tensorclass

from engram.format.schema import DTYPES, Schema
from engram.storages._structure import SINGLE, Structure, leading_size

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Pair(NamedTuple):
    left: object
    right: object


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


def of_dtype(name, shape):
    """A tensor of any dtype whose elements differ."""
    dtype = getattr(torch, name)
    numbers = torch.arange(int(np.prod(shape)) * dtype.itemsize, dtype=torch.int64) * 37 % 101
    if name == "bool":
        return numbers.reshape(shape) % 2 == 0
    return numbers.to(torch.uint8).view(dtype).reshape(shape)  # the bytes: not every dtype can compute


def same(one, other):
    """Whether two rows or batches are alike: kinds, names in order, batch sizes, dtypes and every byte."""
    if isinstance(one, torch.Tensor) and not is_tensor_collection(one):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype is other.dtype
            and one.shape == other.shape
            and raw(one) == raw(other)
        )
    if type(one) is not type(other):
        return False
    if is_tensor_collection(one):
        keys = list(one.keys())
        return (
            one.batch_size == other.batch_size
            and keys == list(other.keys())
            and all(same(one.get(key), other.get(key)) for key in keys)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))


def raw(tensor):
    """Every byte of its values."""
    return tensor.detach().clone().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


# ---- there and back --------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(lambda key: key != ".engram")
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def data(draw, batch, depth=0):
    """Nested data whose leaves begin with ``batch``."""
    kinds = ["tensor", "dict", "tuple", "namedtuple", "tensordict", "step"] if depth < 3 else ["tensor"]
    kind = draw(st.sampled_from(kinds))
    if kind == "tensor":
        return of_dtype(draw(st.sampled_from(sorted(DTYPES))), (*batch, *draw(shapes)))
    inner = data(batch, depth + 1)
    if kind == "dict":
        return draw(st.dictionaries(names, inner, min_size=1, max_size=3))
    if kind == "tuple":
        return tuple(draw(st.lists(inner, min_size=1, max_size=3)))
    if kind == "namedtuple":
        return Pair(draw(inner), draw(inner))
    if kind == "step":
        return Step(*(of_dtype(draw(st.sampled_from(sorted(DTYPES))), (*batch, 2)) for _ in "ab"), batch_size=batch)
    return draw(tensordicts(batch, depth + 1))


@st.composite
def tensordicts(draw, batch, depth):
    extra = draw(shapes.filter(lambda shape: len(shape) < 2))
    td = TensorDict({}, batch_size=(*batch, *extra))
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        if depth < 3 and draw(st.booleans()):
            td.set(name, draw(tensordicts((*batch, *extra), depth + 1)))
        else:
            shape = (*batch, *extra, *draw(shapes))
            td.set(name, of_dtype(draw(st.sampled_from(sorted(DTYPES))), shape))
    return td


@settings(max_examples=150)
@given(data(()))
@example({"a": torch.zeros(())})
def test_one_row_comes_back(row):
    structure = Structure.of(row, batched=False, call="add")
    columns = structure.flatten(row, None, "add")
    assert [tuple(column.shape) for column in columns] == [field.shape for field in structure.fields]
    assert same(structure.unflatten(columns, torch.Size(())), row)


@settings(max_examples=150)
@given(st.integers(1, 4).flatmap(lambda n: data((n,))))
def test_a_batch_comes_back(batch):
    n = leading_size(batch, "extend")
    structure = Structure.of(batch, batched=True, call="extend")
    columns = structure.flatten(batch, n, "extend")
    assert [tuple(column.shape) for column in columns] == [(n, *field.shape) for field in structure.fields]
    assert all(column.is_contiguous() for column in columns)
    assert same(structure.unflatten(columns, torch.Size((n,))), batch)


@settings(max_examples=60)
@given(st.integers(1, 4).flatmap(lambda n: data((n,))))
def test_the_description_of_a_structure_is_the_structure(batch):
    n = leading_size(batch, "extend")
    structure = Structure.of(batch, batched=True, call="extend")
    schema = Schema(6, 1, (), structure.fields, structure.root)
    schema.validate()
    for other in (Structure.from_schema(schema), pickle.loads(pickle.dumps(structure)), copy.deepcopy(structure)):
        assert same(other.unflatten(other.flatten(batch, n, "extend"), torch.Size((n,))), batch)


def test_lists_inside_a_row_stay_lists():
    row = {"a": [torch.zeros(2), (torch.ones(1), [torch.ones(3)])]}
    structure = Structure.of(row, batched=False, call="add")
    assert [field.key for field in structure.fields] == [("a", "0"), ("a", "1", "0"), ("a", "1", "1", "0")]
    assert same(structure.unflatten(structure.flatten(row, None, "add"), torch.Size(())), row)


def test_a_single_tensor_has_torchrls_name():
    structure = Structure.of(torch.zeros(3, 2), batched=True, call="extend")
    assert [(field.key, field.shape) for field in structure.fields] == [((SINGLE,), (2,))]
    assert structure.field_of(SINGLE) == 0


def test_field_of():
    row = {"a": torch.zeros(2), "next": {"b": torch.zeros(2), "c": torch.zeros(2)}}
    structure = Structure.of(row, batched=False, call="add")
    assert [structure.field_of(key) for key in ["a", ("a",), ("next", "c"), ["next", "b"]]] == [0, 0, 2, 1]
    for key in ("next", "z", ("a", "b")):
        with pytest.raises(KeyError, match="update_: expected a stored field, one of"):
            structure.field_of(key, "update_")


def test_contiguous_data_is_not_copied():
    batch = TensorDict({"a": torch.zeros(3, 2), "next": {"b": torch.zeros(3)}}, batch_size=[3])
    structure = Structure.of(batch, batched=True, call="extend")
    columns = structure.flatten(batch, 3, "extend")
    assert [column.data_ptr() for column in columns] == [batch["a"].data_ptr(), batch["next", "b"].data_ptr()]


def test_extra_entries_join_the_root():
    batch = TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3])
    structure = Structure.of(batch, batched=True, call="extend")
    index = torch.arange(3)
    for form in (structure, Structure.of(TensorDict({"n": batch}, batch_size=[3]), batched=True, call="extend")):
        columns = form.flatten(batch if form is structure else TensorDict({"n": batch}, [3]), 3, "extend")
        out = form.unflatten(columns, torch.Size((3,)), torch.device("cpu"), {"index": index})
        assert out.get("index") is index
        assert out.device == torch.device("cpu")


# ---- unusual tensors -------------------------------------------------------------------------------------------------

COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6.0]])
with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch: support is experimental
    HALF = COMPLEX.to(torch.complex32)
UNUSUAL = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "a column": torch.arange(8.0).reshape(2, 4)[:, 1:3].t(),
    "with gaps": torch.arange(12.0)[::4],
    "expanded": torch.tensor([[1.0, 2.0]]).expand(3, 2),
    "one number expanded": torch.tensor(7).expand(3, 2, 2),
    "with offset": torch.arange(10)[4:7],
    "flipped": torch.arange(6).reshape(3, 2).flip(0),
    "conjugated": COMPLEX.conj(),
    "conjugated in half": HALF.conj(),
    "conjugated and transposed": COMPLEX.mH,
    "negated": COMPLEX.conj().imag,
    "negated in half": HALF.conj().imag,
    "zero tensor": torch._efficientzerotensor((3, 2)),
    "requires grad": torch.ones(3, requires_grad=True),
    "computed with grad": torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(3, 2)),
    "inference": torch.inference_mode()(lambda: torch.arange(3.0))(),
    "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "no elements": torch.zeros(3, 0, 2),
}


@pytest.mark.parametrize("form", ["tensor", "dict", "tensordict"])
@pytest.mark.parametrize("tensor", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tensors_become_columns_of_the_same_values(tensor, form):
    n = len(tensor)
    batch = {"tensor": tensor, "dict": {"a": tensor}, "tensordict": TensorDict({"a": tensor}, batch_size=[n])}[form]
    structure = Structure.of(batch, batched=True, call="extend")
    (column,) = structure.flatten(batch, n, "extend")
    assert column.is_contiguous()
    assert not column.is_conj()
    assert not column.is_neg()
    assert raw(column) == raw(tensor.detach().clone())
    assert raw(column) == column.detach().clone().view(torch.uint8).reshape(-1).tolist() if column.numel() else True


ARRAYS = {
    "plain": np.arange(6.0).reshape(3, 2),
    "negative stride": np.arange(6).reshape(3, 2)[::-1],
    "negative inner stride": np.arange(6).reshape(3, 2)[:, ::-1],
    "Fortran order": np.asfortranarray(np.arange(6).reshape(3, 2)),
    "read-only": np.broadcast_to(np.arange(2), (3, 2)),
    "big-endian": np.arange(3, dtype=">f4"),
    "big-endian ints": np.arange(6, dtype=">i8").reshape(3, 2)[::-1],
    "unaligned": np.zeros(3, dtype=[("x", "u1"), ("y", "<f4")])["y"],
    "uint16": np.arange(3, dtype=np.uint16),
    "uint64": np.arange(3, dtype=np.uint64),
    "half": np.arange(3, dtype=np.float16),
    "complex": np.arange(3) * (1 + 2j),
    "bool": np.array([True, False, True]),
    "subclass": np.arange(3).view(type("Sub", (np.ndarray,), {})),
    "no elements": np.zeros((3, 0)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_become_tensors(array):
    structure = Structure.of({"a": array}, batched=True, call="extend")
    (column,) = structure.flatten({"a": array}, 3, "extend")
    assert column.is_contiguous()
    assert column.numpy().dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(column.numpy(), np.asarray(array))
    before = np.array(array)
    column.zero_() if array.flags.writeable and not array.size else None
    assert np.array_equal(before, array)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(2), np.uint8(255)])
def test_numpy_scalars_are_rows(scalar):
    structure = Structure.of({"a": scalar}, batched=False, call="add")
    (column,) = structure.flatten({"a": scalar}, None, "add")
    assert (column.shape, column.item()) == ((), scalar.item())
    assert structure.fields[0].dtype == scalar.dtype.name


def test_arrays_and_tensors_are_interchangeable():
    structure = Structure.of({"a": np.zeros((3, 2), np.float32)}, batched=True, call="extend")
    (column,) = structure.flatten({"a": torch.ones(4, 2)}, 4, "extend")
    assert column.sum() == 8


# ---- refused ---------------------------------------------------------------------------------------------------------

GOOD = {"a": torch.zeros(3, 2), "next": {"b": torch.zeros(3, 1, dtype=torch.int64)}}


def changed(**entries):
    return {**GOOD, **entries}


MISFITS = {
    "missing": ({"a": GOOD["a"]}, KeyError, r"data: expected the fields of the first row.*missing \['next'\]"),
    "unknown": (changed(z=GOOD["a"]), KeyError, r"data: .*unknown \['z'\]"),
    "renamed": (
        {"a": GOOD["a"], "next": {"c": GOOD["next"]["b"]}},
        KeyError,
        r"field 'next': .*missing \['b'\], unknown \['c'\]",
    ),
    "another shape": (
        changed(a=torch.zeros(3, 4)),
        RuntimeError,
        r"field a: expected shape \[3, 2\] float32 as in the first row, got \[3, 4\] float32\. If lengths differ .*\{'a': Ragged\(torch",
    ),
    "another number of rows": (
        changed(next={"b": torch.zeros(2, 1, dtype=torch.int64)}),
        RuntimeError,
        r"\[2, 1\] int64\.$",
    ),
    "another order of sizes": (changed(a=torch.zeros(2, 3)), RuntimeError, r"Use \.reshape\(\[3, 2\]\)"),
    "one dimension less": (
        changed(next={"b": torch.zeros(3, dtype=torch.int64)}),
        RuntimeError,
        r"field \('next', 'b'\): expected shape \[3, 1\] int64 .* got \[3\] int64\. Use \.reshape\(\[3, 1\]\)",
    ),
    "another dtype": (
        changed(a=torch.zeros(3, 2, dtype=torch.float64)),
        RuntimeError,
        r"field a: expected shape \[3, 2\] float32 .* got \[3, 2\] float64\. Convert it with \.to\(torch\.float32\)",
    ),
    "another dtype of the same size": (
        changed(a=torch.zeros(3, 2, dtype=torch.int32)),
        RuntimeError,
        "Convert it with",
    ),
    "one row": (changed(a=torch.zeros(2)), RuntimeError, r"It looks like one row: did you mean add\(\)\?"),
    "a tensor for a dict": (changed(next=GOOD["a"]), TypeError, r"field 'next': expected a dict as in the first row"),
    "a dict for a tensor": (changed(a=GOOD["next"]), TypeError, r"field 'a': expected a tensor or an array, got dict"),
    "a td for a dict": (changed(next=TensorDict(GOOD["next"], [3])), TypeError, "field 'next': expected a dict"),
    "a tuple for a dict": (changed(next=(GOOD["a"],)), TypeError, "field 'next': expected a dict"),
    "a float": (changed(a=1.0), RuntimeError, r"field a: expected shape \[3, 2\] float32 .* got \[\] float32"),
    "a string": (changed(a="x"), TypeError, "field 'a': expected a tensor or an array, got str 'x'"),
    "None": (changed(a=None), TypeError, "field 'a': expected a tensor or an array, got NoneType"),
    "another root": (GOOD["a"], TypeError, r"data: expected a dict as in the first row, got a tensor \[3, 2\]"),
}


@pytest.mark.parametrize(("data", "error", "says"), MISFITS.values(), ids=MISFITS)
def test_data_that_does_not_fit(data, error, says):
    structure = Structure.of(GOOD, batched=True, call="extend")
    with pytest.raises(error, match=says):
        structure.flatten(data, 3, "extend")


@pytest.mark.parametrize("key", ["missing", "unknown", "renamed", "another shape", "another dtype", "one row"])
def test_tensordicts_that_do_not_fit(key):
    good = TensorDict(GOOD, batch_size=[3])
    data, error, says = MISFITS[key]
    for entries, batch in ((good, None), (good.select("a"), "flat")):
        structure = Structure.of(entries, batched=True, call="extend")
        td = TensorDict({}, batch_size=[])
        for name, value in data.items():
            if batch is None or name == "a":
                td.set(name, value)
        if batch == "flat" and key in ("missing", "renamed", "unknown"):
            td.rename_key_("a", "q")
            says = r"missing \['a'\], unknown \['q'\]"
        with pytest.raises(error, match=says):
            structure.flatten(td, 3, "extend")


def test_a_batch_given_to_add():
    structure = Structure.of({"a": torch.zeros(2)}, batched=False, call="add")
    with pytest.raises(RuntimeError, match=r"add: field a: .* looks like a batch of 5 rows: did you mean extend\(\)\?"):
        structure.flatten({"a": torch.zeros(5, 2)}, None, "add")


def test_entries_that_are_ignored():
    structure = Structure.of(TensorDict({"a": torch.zeros(3)}, [3]), batched=True, call="extend")
    td = TensorDict({"a": torch.ones(3), "index": torch.ones(3), "z": torch.ones(3)}, [3])
    with pytest.raises(KeyError, match=r"unknown \['z'\]"):
        structure.flatten(td, 3, "extend", ["index"])
    (column,) = structure.flatten(td, 3, "extend", ["index", "z"])
    assert column.sum() == 3


FIRST = {
    "string": (
        {"a": "text"},
        TypeError,
        r"field 'a': expected a tensor or an array, got str 'text'\. Use torch\.as_tensor",
    ),
    "object": ({"a": {"b": object()}}, TypeError, r"field \('a', 'b'\): expected a tensor or an array, got object"),
    "ragged lists": ({"a": [[1.0], [1.0, 2.0]]}, TypeError, "field 'a': expected lists of one length.* ListStorage"),
    "None": ({"a": None}, TypeError, "field 'a': .* got NoneType"),
    "numbers and text": ({"a": [1.0, "x"]}, TypeError, "field .* got str"),
    "set": ({"a": {1}}, TypeError, "field 'a': .* got set"),
    "a string alone": ("text", TypeError, "data: expected a tensor or an array, got str"),
    "nothing": ({}, TypeError, r"expected at least one tensor, got dict \{\}"),
    "an empty td": (TensorDict({}, [3]), TypeError, "expected at least one tensor, got a TensorDict"),
    "text array": (
        {"a": np.array(["x", "y"])},
        TypeError,
        "field 'a': an array of <U1 cannot be stored. Use a ListStorage",
    ),
    "object array": ({"a": np.array([None])}, TypeError, "field 'a': an array of object cannot be stored"),
    "long double": ({"a": np.zeros(3, np.longdouble)}, TypeError, "field 'a': an array of .* cannot be stored"),
    "records": ({"a": np.zeros(3, [("x", "u1")])}, TypeError, "field 'a': an array of .* cannot be stored"),
    "records of nothing": ({"a": np.zeros(3, [])}, TypeError, "field 'a': an array of .* cannot be stored"),
    "dates": ({"a": np.zeros(3, "datetime64[s]")}, TypeError, "field 'a': an array of .* cannot be stored"),
    "non-tensor data": (
        TensorDict({"a": torch.zeros(3), "b": NonTensorData("text", batch_size=[3])}, [3]),
        TypeError,
        "field 'b': expected a tensor or an array",
    ),
    "text in a td": (TensorDict({"a": torch.zeros(3), "b": "text"}, [3]), TypeError, "field 'b': expected a tensor"),
    "text in a tensorclass": (
        Step(torch.zeros(3), "text", batch_size=[3]),
        TypeError,
        "field 'done': expected a tensor",
    ),
    "float8": (
        {"a": torch.zeros(3, dtype=torch.float8_e8m0fnu)},
        TypeError,
        r"'a': dtype torch\.float8_e8m0fnu cannot be",
    ),
    "sparse": (
        {"a": torch.eye(3).to_sparse()},
        TypeError,
        r"'a': expected a dense tensor, got a torch\.sparse_coo one",
    ),
    "number as a key": ({"a": {1.5: torch.zeros(3)}}, TypeError, "'a': expected keys that are .* ints .*, got 1.5"),
    ".engram": ({"a": {".engram": torch.zeros(3)}}, ValueError, r"'\.engram' is reserved.*Rename the key"),
    "a key that is too long": ({"a" * 256: torch.zeros(3)}, ValueError, "a key of 256 bytes, at most 255"),
}


@pytest.mark.parametrize(("data", "error", "says"), FIRST.values(), ids=FIRST)
def test_data_that_cannot_be_stored(data, error, says):
    with pytest.raises(error, match=says):
        Structure.of(data, batched=True, call="extend")


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"extend: field 'a': dtype {dtype} cannot be stored"):
        Structure.of({"a": torch.empty(3, dtype=dtype)}, batched=True, call="extend")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(TypeError, match="'a': expected a dense tensor"):
        Structure.of({"a": nested}, batched=True, call="extend")


def test_meta_tensors_hold_nothing_to_store():
    with pytest.raises(TypeError, match="'a': expected a tensor with data, got one on the meta device"):
        Structure.of({"a": torch.zeros(3, device="meta")}, batched=True, call="extend")
    structure = Structure.of({"a": torch.zeros(3)}, batched=True, call="extend")
    with pytest.raises(TypeError, match="meta device"):
        structure.flatten({"a": torch.zeros(3, device="meta")}, 3, "extend")
    flat = Structure.of(TensorDict({"a": torch.zeros(3)}, [3]), batched=True, call="extend")
    with pytest.raises(TypeError, match="meta device"):
        flat.flatten(TensorDict({"a": torch.zeros(3, device="meta")}, [3]), 3, "extend")


# ---- how many rows ---------------------------------------------------------------------------------------------------


def test_leading_size():
    assert leading_size(torch.zeros(3, 2), "extend") == 3
    assert leading_size(GOOD, "extend") == 3
    assert leading_size((np.zeros((3, 1)), GOOD), "extend") == 3
    assert leading_size(TensorDict({}, batch_size=[4, 2]), "extend") == 4


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (torch.zeros(()), TypeError, r"data: expected a batch of rows, got a scalar .*Did you mean add\(\)\?"),
        (np.float32(1), TypeError, r"data: expected a batch of rows.*Did you mean add\(\)\?"),
        (1.5, TypeError, r"data: expected a batch of rows.*Did you mean add\(\)\?"),
        ({"a": torch.zeros(3), "b": torch.zeros(())}, TypeError, r"field 'b': .* scalar .*Did you mean add\(\)\?"),
        (
            TensorDict({"a": torch.zeros(3)}, []),
            TypeError,
            r"got a TensorDict of batch size \[\]: one row\. For one row use add",
        ),
        ({"a": TensorDict({"b": torch.zeros(3)}, [])}, TypeError, r"field 'a': .*Did you mean add\(\)\?"),
        ({"a": torch.zeros(3), "b": {"c": torch.zeros(4)}}, RuntimeError, r"'a' has 3, field \('b', 'c'\) has 4"),
        (torch.zeros(0, 2), RuntimeError, "expected at least one row, got an empty batch"),
        (TensorDict({"a": torch.zeros(0)}, [0]), RuntimeError, "expected at least one row, got an empty batch"),
        ({}, TypeError, "expected at least one tensor"),
        (range(3), TypeError, r"expected a tensor or an array, got range"),
        ({1, 2}, TypeError, "expected a tensor or an array, got set"),
    ],
)
def test_what_is_no_batch(data, error, says):
    with pytest.raises(error, match=f"extend: .*{says}"):
        leading_size(data, "extend")


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_classes_come_back_as_themselves():
    batch = {
        "steps": Step(torch.zeros(3, 2), torch.zeros(3), batch_size=[3]),
        "pair": Pair(torch.zeros(3), torch.ones(3)),
    }
    structure = Structure.of(batch, batched=True, call="extend")
    out = structure.unflatten(structure.flatten(batch, 3, "extend"), torch.Size((3,)))
    assert type(out["steps"]) is Step
    assert type(out["pair"]) is Pair
    assert out["pair"].right.sum() == 3


def test_another_class_is_another_structure():
    other = namedtuple("Pair", ["left", "right"])
    structure = Structure.of(Pair(torch.zeros(3), torch.ones(3)), batched=True, call="extend")
    with pytest.raises(TypeError, match=r"data: expected a .*Pair.* as in the first row"):
        structure.flatten(other(torch.zeros(3), torch.ones(3)), 3, "extend")
    with pytest.raises(TypeError, match="data: expected a namedtuple"):
        structure.flatten((torch.zeros(3), torch.ones(3)), 3, "extend")


def test_lazy_stacks_are_rows_like_others():
    td = TensorDict({"a": torch.arange(3.0)}, [])
    stack = LazyStackedTensorDict.lazy_stack([td, td.clone()])
    structure = Structure.of(stack, batched=True, call="extend")
    (column,) = structure.flatten(stack, 2, "extend")
    assert column.tolist() == [[0, 1, 2], [0, 1, 2]]


# ---- the short path of nested data -------------------------------------------------------------------------------------


def step(**changes):
    """Two rows of nested TensorDicts, some entries of "next" changed; None takes one away."""
    inner = {"reward": torch.arange(2.0), "done": torch.zeros(2, 1, dtype=torch.bool), **changes}
    inner = {key: value for key, value in inner.items() if value is not None}
    return {"a": torch.arange(6).reshape(2, 3), "next": TensorDict(inner, [2]), "id": torch.arange(2)}


NESTED = {
    "as it is": lambda: TensorDict(step(), [2]),
    "in another order": lambda: TensorDict(dict(reversed(step().items())), [2]),
    "of another dtype": lambda: TensorDict(step(reward=torch.arange(2)), [2]),
    "of another shape": lambda: TensorDict(step(done=torch.zeros(2, dtype=torch.bool)), [2]),
    "not contiguous": lambda: TensorDict(step(reward=torch.arange(4.0)[::2]), [2]),
    "without one": lambda: TensorDict(step(done=None), [2]),
    "with one more": lambda: TensorDict(step(more=torch.ones(2)), [2]),
    "with one instead of another": lambda: TensorDict(step(done=None, more=torch.ones(2)), [2]),
    "with one that is ignored": lambda: TensorDict({**step(), "p": torch.ones(2)}, [2]),
    "with one that is ignored elsewhere": lambda: TensorDict(step(p=torch.ones(2)), [2]),
    "a leaf where a TensorDict was": lambda: TensorDict({**step(), "next": torch.ones(2)}, [2]),
    "a TensorDict where a leaf was": lambda: TensorDict({**step(), "a": TensorDict({}, [2])}, [2]),
    "a dict": step,
    "a lazy stack inside": lambda: TensorDict(
        {**step(), "next": LazyStackedTensorDict(*TensorDict(step(), [2])["next"].unbind(0), stack_dim=0)}, [2]
    ),
    "a tensor": lambda: torch.ones(2),
}


@pytest.mark.parametrize("n", [2, 3, None])
@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED.keys())
@pytest.mark.parametrize("of", ["TensorDict", "dict", "dict of dicts"])
def test_nested_data_is_the_same_on_the_short_path(data, n, of):
    first = {"TensorDict": TensorDict(step(), [2]), "dict": step(), "dict of dicts": {"x": {"y": torch.ones(2)}}}[of]
    structure = Structure.of(first, batched=True, call="extend")
    assert structure._plain
    data = data()

    def outcome():
        try:
            return [(column.dtype, column.tolist()) for column in structure.flatten(data, n, "extend", ("p",))]
        except (KeyError, RuntimeError, TypeError) as error:
            return type(error), str(error)

    short = outcome()
    structure._plain = False
    assert outcome() == short


def test_the_short_path_hands_over_the_users_own_memory():
    data = TensorDict(step(), [2])
    columns = Structure.of(data, batched=True, call="extend").flatten(data, 2, "extend")
    assert [column.data_ptr() for column in columns] == [
        leaf.data_ptr() for leaf in (data["a"], data["next", "reward"], data["next", "done"], data["id"])
    ]


@pytest.mark.parametrize("data", [(torch.ones(2), torch.ones(2)), {"a": [torch.ones(2)]}, torch.ones(2)])
def test_other_containers_have_no_short_path(data):
    assert not Structure.of(data, batched=True, call="extend")._plain


Turned = namedtuple("Turned", ["left", "right"])


def test_a_named_tuple_that_is_another_one_now_is_not_filled_by_position(monkeypatch):
    structure = Structure.of(Turned(torch.zeros(2), torch.ones(2)), batched=True, call="extend")
    schema = Schema(capacity=4, lanes=1, columns=(), fields=structure.fields, structure=structure.root)
    assert [field.key for field in Structure.from_schema(schema).fields] == [("left",), ("right",)]
    monkeypatch.setitem(globals(), "Turned", namedtuple("Turned", ["right", "left"]))
    with pytest.raises(
        TypeError, match=r"namedtuple 'Turned' with the fields \['left', 'right'\], but .* \['right', 'left'\]"
    ):
        Structure.from_schema(schema)
