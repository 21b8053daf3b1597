"""Numbers and lists of them, Python's and NumPy's: one field each, of the dtype of the first row, through every door."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    FinalObservations,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
)
from engram.storages._structure import Structure


@dataclass
class Row:
    x: Any
    v: Any


def plain(**arguments):
    return ReplayBuffer(storage=LazyTensorStorage(64), **arguments)


def transformed():
    rb = plain()
    rb.append_transform(lambda rows: rows, invert=True)
    return rb


def ranked():
    return plain(writer=TensorDictMaxValueWriter("rank"))


def columns(row):
    return {key: columns(value) if isinstance(value, dict) else [value] for key, value in row.items()}


#: How one row reaches the buffer: what makes it, and what writes a row.
DOORS = {
    "add": (plain, lambda rb, row: rb.add(row)),
    "appender": (plain, lambda rb, row: rb.appender().add(**row)),
    "extend": (plain, lambda rb, row: rb.extend([row])),
    "extend two": (plain, lambda rb, row: rb.extend([row, row])),
    "columns": (plain, lambda rb, row: rb.extend(columns(row))),
    "a transform": (transformed, lambda rb, row: rb.add(row)),
    "a transform, extend": (transformed, lambda rb, row: rb.extend([row])),
    "a writer that ranks": (ranked, lambda rb, row: rb.extend([{**row, "rank": 0.5}])),
    "an edit": (plain, lambda rb, row: rb.__setitem__([0], [row])),
}
#: What a number is written as.
SPELLINGS = {
    "int": int,
    "float": float,
    "bool": bool,
    **{name: np.dtype(name).type for name in ("float16", "float32", "float64", "int64", "uint8", "int16", "bool_")},
}
KIND = {name: "f" if "float" in name else "b" if "bool" in name else "i" for name in SPELLINGS}


def fits(stored, given_as, value):
    """Whether a field of a dtype takes a number: floats take ints, nothing else takes another kind."""
    if (stored == "bool") != (KIND[given_as] == "b"):
        return False
    if stored.startswith("float"):
        return True
    return KIND[given_as] != "f" and (stored == "bool" or np.iinfo(stored).min <= value <= np.iinfo(stored).max)


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=25, deadline=None)
@given(
    first=st.sampled_from(sorted(SPELLINGS)),
    later=st.lists(st.tuples(st.sampled_from(sorted(SPELLINGS)), st.integers(0, 200)), min_size=1, max_size=4),
    nested=st.booleans(),
)
def test_a_number_becomes_the_dtype_of_its_field(door, first, later, nested):
    """A scalar, a list of two and a list of lists, in every spelling."""
    make, write = DOORS[door]
    rb = make()

    def row(spelling, value):
        number = SPELLINGS[spelling](value)
        other = {"x": number, "v": [number, number], "w": [[number], [number]]}
        return {**other, "n": {"x": [number]}} if nested else other

    rb.add({**row(first, 1), **({"rank": 0.0} if door == "a writer that ranks" else {})})
    stored = {"int": "int64", "float": "float32", "bool_": "bool"}.get(first, first)
    schema = {
        field.name: (field.dtype, tuple(field.shape))
        for field in rb.storage.store.schema.fields
        if field.name != "rank"
    }
    assert schema == {
        "x": (stored, ()),
        "v": (stored, (2,)),
        "w": (stored, (2, 1)),
        **({"('n', 'x')": (stored, (1,))} if nested else {}),
    }
    for spelling, value in later:
        before = len(rb)
        if not fits(stored, spelling, value % 2 if KIND[spelling] == "b" else value):
            with pytest.raises(RuntimeError, match=f"expected shape .* {stored} as in the first row, got"):
                write(rb, row(spelling, value))
            assert len(rb) == before
            continue
        write(rb, row(spelling, value))
        newest = rb[0 if door == "an edit" else len(rb) - 1]
        expected = torch.tensor(bool(value) if stored == "bool" else value).to(getattr(torch, stored))
        assert newest["x"].dtype is expected.dtype
        assert newest["x"] == expected
        assert (newest["v"] == expected).all()
        assert (newest["w"] == expected).all()
        assert not nested or (newest["n"]["x"] == expected).all()


def test_the_first_row_of_a_list():
    """Lists of NumPy's numbers keep their dtype, as arrays do; with one of Python's among them they are Python's."""
    for numbers, dtype in (
        (list(np.arange(3, dtype=np.float16)), torch.float16),
        (list(np.arange(3)), torch.int64),
        (list(np.arange(3) > 1), torch.bool),
        ([np.float64(1), np.float64(2)], torch.float64),
        ([1.0, np.float64(2), 3], torch.float32),
        ([1, np.uint8(2)], torch.int64),
        ([list(row) for row in np.ones((2, 3), np.float32)], torch.float32),
    ):
        rb = plain()
        rb.add({"obs": numbers})
        rb.extend({"obs": [numbers, numbers]})
        assert rb[:]["obs"].dtype is dtype
        assert rb[:]["obs"].tolist() == [np.array(numbers).tolist()] * 3


def test_what_is_no_list_of_numbers():
    for wrong, said in (
        ([np.float32(1), [np.float32(2)]], "expected lists of one length, got ragged"),
        ([np.str_("a"), np.str_("b")], "cannot be stored. Use a ListStorage"),
        ([np.datetime64("2020-01-01")], "cannot be stored. Use a ListStorage"),
    ):
        for make in (plain, transformed):
            rb = make()
            with pytest.raises(TypeError, match=said):
                rb.add({"obs": wrong})
            assert not rb.storage.initialized
    rb = plain()
    rb.add({"obs": [np.zeros(2), np.zeros(3)]})  # of arrays, each a field
    assert [value.shape for value in rb[:]["obs"]] == [(1, 2), (1, 3)]


def test_lists_of_rows_of_classes():
    rb = plain()
    rb.add(Row(np.float32(1), [1.0, 2.0]))
    rb.extend([Row(2, [1, 2]), Row(np.float64(3), list(np.arange(2)))])
    assert rb[:].x.tolist() == [1, 2, 3]
    assert rb[:].v.tolist() == [[1, 2], [1, 2], [0, 1]]


def test_a_list_of_rows_of_another_kind_is_refused():
    rb = plain()
    rb.add({"r": 1.0, "o": [1.0, 2.0]})
    for rows, error, said in (
        ([{"r": 1.0}], KeyError, "expected the fields of the first row, got others"),
        ([{"r": 1.0, "o": [1.0, 2.0]}, {"r": 1.0}], KeyError, "expected the fields of the first row, got others"),
        ([{"r": 1.0, "o": [1.0]}], RuntimeError, r"expected shape \[2\] float32 as in the first row.* ListStorage"),
        ([{"r": True, "o": [1.0, 2.0]}], RuntimeError, "got .* bool"),
    ):
        with pytest.raises(error, match=said):
            rb.extend(rows)
    assert len(rb) == 1


def test_a_store_that_has_a_field_for_each_number_goes_on(tmp_path):
    """Stores of earlier versions, which took a list of NumPy's numbers for a list of fields."""
    row = {"obs": [np.zeros((), np.float32), np.zeros((), np.float32)]}  # arrays are fields still
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "a"))
    rb.add(row)
    assert len(rb.storage.store.schema.fields) == 2
    rb.add({"obs": list(np.arange(2, dtype=np.float32))})
    rb.extend([{"obs": [np.float32(5), np.float32(6)]}])
    rb.add({"obs": [7.0, 8.0]})
    assert [column.tolist() for column in rb[:]["obs"]] == [[0, 0, 5, 7], [0, 1, 6, 8]]
    rb.close()
    assert Structure.of({"obs": [np.float32(1), 2.0]}, batched=False, call="add").fields[0].shape == (2,)


def test_rows_behind_a_transform_that_removes_what_cannot_be_stored():
    rb = plain()
    rb.append_transform(lambda rows: {"x": rows["x"]}, invert=True)
    rb.add({"x": 1.0, "text": "a", "word": np.str_("b")})
    rb.add({"x": 0, "text": "a", "word": np.str_("b")})
    assert rb[:]["x"].tolist() == [1, 0]


def test_final_observations_take_lists():
    finals = FinalObservations(["o"], LazyTensorStorage(10))
    rb = plain(transform=finals)
    rb.add({"o": [1.0, 2.0], "next": {"o": [2.0, 3.0], "r": 1.0, "done": False}})
    rb.add({"o": [2.0, 3.0], "next": {"o": [4.0, 5.0], "r": 0, "done": np.bool_(True)}})
    assert rb[:]["o"].tolist() == [[1, 2], [2, 3]]
    assert rb[:]["next"]["r"].tolist() == [1, 0]
    assert finals.storage[:]["o"].tolist() == [[4, 5]]


def test_lists_of_a_list_storage_stay_lists():
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    rb.append_transform(lambda rows: rows, invert=True)
    rb.add([1, np.float32(2)])
    assert rb[0] == [1, 2]
    assert isinstance(rb[0], list)
