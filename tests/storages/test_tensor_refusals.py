"""Rows that a tensor storage refuses."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack, tensorclass

import engram
from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, RowError, TensorDictReplayBuffer, TensorStorage
from tests.storages.rows import batch, row, state

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


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
    "range": rejected(range(3), TypeError, "got range"),
    "set": rejected({1, 2}, TypeError, "got set"),
    "number": rejected(1.0, TypeError, "expected a batch of rows, got a scalar"),
    "None": rejected(None, TypeError, "got NoneType"),
    "float leaf": rejected(
        {**ROW, "a": 1.0}, RuntimeError, r"add: field a: expected shape \[3\] .*got \[\]", call="add"
    ),
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
        "range",
        "number",
        "None",
        "lane",
        "negative lane",
        "lanes",
        "count of lanes",
        "td without batch",
        "float lanes",
    )
} | {
    "strings and others": rejected({"a": torch.zeros(2), "b": ["x", 1]}, TypeError, "'b'.*: expected a tensor or an"),
    "string": rejected({"a": torch.zeros(2), "b": "text"}, TypeError, "field 'b': expected a tensor or an array"),
    "object": rejected({"a": torch.zeros(2), "b": object()}, TypeError, "field 'b': .*got object"),
    "non-tensor data": rejected(
        TensorDict({"a": torch.zeros(2), "b": NonTensorData(None, batch_size=[2])}, [2]), TypeError, "field 'b'"
    ),
    "float8": rejected(
        {"a": torch.zeros(2, dtype=torch.float8_e8m0fnu)}, TypeError, "dtype torch.float8_e8m0fnu cannot"
    ),
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


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize(("data", "call", "field"), TEXTS.values(), ids=TEXTS)
def test_strings_are_refused_by_name_where_the_first_row_has_none(make, kind, data, call, field):
    if not isinstance(data, TensorDictBase):
        pytest.skip("refused as no TensorDict")
    rb = kind(storage=make(6))
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
    if columns:
        with pytest.raises(TypeError, match="field 'text': expected a tensor.*ListStorage"):
            ReplayBuffer(storage=LazyTensorStorage(6, ndim=2)).extend(td)


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
        (TypeError, "compilable: expected True or False.*got 3", {"compilable": 3}),
        (TypeError, r"'shared_init' is not supported yet; it will come with rb\.share\(\)", {"shared_init": 2}),
        (TypeError, "unexpected argument 'max_length'", {"max_length": 3}),
    ],
)
def test_impossible_arguments(make, error, says, options):
    with pytest.raises(error, match=f"Lazy.*Storage: .*{says}"):
        make(**{"capacity": 10, **options})


def test_arguments_that_are_off_are_accepted():
    LazyTensorStorage(10, compilable=True, shared_init=False, cleanup_memmap=False, consolidated=True)
    LazyMemmapStorage(10, compilable=False, shared_init=False)
    with pytest.raises(TypeError, match="'cleanup_memmap' is not supported yet"):
        LazyTensorStorage(10, cleanup_memmap=1)
    with pytest.raises(TypeError, match="consolidated: expected True or False, .* got 'one block'"):
        LazyTensorStorage(10, consolidated="one block")


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
