"""Keys, and fields of keys, that are refused: nothing is removed, written or indexed then."""

import pytest
import torch

from engram import (
    ImmutableDatasetWriter,
    IncompatibleStore,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorStorage,
)
from tests.store.keyed import ROWS, made, rows, text


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (3, TypeError, "or a list of them, as the field 'name' has texts, got int"),
        ([text(1), 3], TypeError, "got int at 1"),
        ([text(1), "x" * 13], ValueError, "at most 12 bytes, as the field 'name' has, got 13 at 1: 'xxx"),
        ("\ud800", ValueError, "lone surrogate"),
        (torch.zeros(2, 12), TypeError, r"got float32 \[2, 12\]"),
        (torch.zeros(2, 2, 12, dtype=torch.uint8), TypeError, r"got uint8 \[2, 2, 12\]"),
        (torch.ones(2, 13, dtype=torch.uint8), ValueError, "at most 12 bytes.*got 13"),
        (None, TypeError, "got NoneType"),
    ],
)
@pytest.mark.parametrize("call", ["rows_of", "remove"])
def test_keys_that_are_no_texts(call, keys, error, message):
    rb = made()
    rb.extend(rows([1]))
    if call == "remove" and keys is None:
        return
    with pytest.raises(error, match=f"{call}: keys: expected.*{message}"):
        rb.rows_of(keys) if call == "rows_of" else rb.remove(keys=keys)
    assert len(rb) == 1


@pytest.mark.parametrize("keys", ["a", [1.5], torch.tensor([True]), None])
def test_keys_that_are_no_numbers(keys):
    rb = made(field="uid")
    rb.extend(rows([1]))
    with pytest.raises(TypeError, match="rows_of: keys: expected"):
        rb.rows_of(keys)


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        ("other", KeyError, r"expected a stored field, one of \[.*\], got 'other'"),
        ("reward", TypeError, "'reward': expected one integer per row.*got float32"),
        ("long", TypeError, r"at most 1024.*got uint8 \[1025\]"),
        ("flag", TypeError, r"got bool \[\]"),
        ("pair", TypeError, r"got int64 \[2\]"),
        (3.5, TypeError, "index_keys: field: expected a string"),
    ],
)
def test_fields_that_are_no_keys(field, error, message):
    data = {
        **rows([1, 2]),
        "long": torch.zeros(2, 1025, dtype=torch.uint8),
        "flag": torch.zeros(2, dtype=torch.bool),
        "pair": torch.zeros(2, 2, dtype=torch.int64),
    }
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    rb.extend(data)
    with pytest.raises(error, match=message):
        rb.index_keys(field)
    with pytest.raises(RuntimeError, match="rows_of: expected rows with an index of their keys.*rb.index_keys"):
        rb.rows_of(1)
    if isinstance(field, str):  # before the first write: that write says it, and writes nothing
        rb = ReplayBuffer(storage=LazyTensorStorage(ROWS))
        rb.index_keys(field)
        with pytest.raises(error, match=message):
            rb.extend(data)
        assert len(rb) == 0
        rb.index_keys("uid")
        rb.extend(data)
        assert rb.rows_of(2).rows.tolist() == [1]


def test_a_store_has_one_key():
    rb = made()
    rb.extend(rows([1]))
    with pytest.raises(IncompatibleStore, match="expected the field 'name'.*got 'uid'"):
        rb.index_keys("uid")
    assert rb.rows_of(text(1)).rows.tolist() == [0]


def test_before_the_first_write():
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    for call in (lambda: rb.rows_of(text(1)), lambda: rb.remove(keys=text(1))):
        with pytest.raises(RuntimeError, match="expected rows with an index of their keys"):
            call()
    rb.index_keys("name")
    assert rb.rows_of([text(1), text(2)]).rows.tolist() == [-1, -1]
    assert rb.rows_of(text(1)).generations.tolist() == [-1]
    assert rb.remove(keys=text(1)) == 0


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_lists_have_no_keys(storage):
    rb = ReplayBuffer(storage=storage(4), collate_fn=list)
    with pytest.raises(TypeError, match="index_keys: expected a tensor storage"):
        rb.index_keys("uid")


def test_rows_of_two_dimensions_have_no_keys():
    rb = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    with pytest.raises(NotImplementedError, match="index_keys: expected a storage with ndim=1"):
        rb.index_keys("uid")


@pytest.mark.parametrize("arguments", [{}, {"rows": 1, "keys": "a"}, {"keys": "a", "generation": [1]}])
def test_rows_or_keys_are_removed(arguments):
    rb = made()
    rb.extend(rows([1]))
    with pytest.raises(TypeError, match="remove: expected rows, and perhaps their generations, or keys="):
        rb.remove(**arguments)
    assert len(rb) == 1


def test_a_dataset_keeps_its_rows():
    rb = ReplayBuffer(storage=TensorStorage({"uid": torch.tensor([4, 5, 6])}), writer=ImmutableDatasetWriter())
    rb.index_keys("uid")
    with pytest.raises(RuntimeError):
        rb.remove(keys=5)
    assert rb.rows_of(5).rows.tolist() == [1]
