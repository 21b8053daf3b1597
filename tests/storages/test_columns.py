"""Storages whose rows have more than one dimension: which of them a leaf's rows become."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorStorage
from engram.storages._columns import rows_of_batch, rows_of_slot, rows_of_stored

Pair = namedtuple("Pair", ["left", "right"])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4), st.lists(st.integers(0, 2), max_size=2))
def test_rows_are_slot_after_slot(columns, time, rest):
    ndim = len(columns) + 1
    slot = np.arange(int(np.prod([*columns, *rest]))).reshape(*columns, *rest)
    batch = np.stack([slot + 1000 * t for t in range(time)], axis=ndim - 1)  # [*columns, time, *rest]
    expected = np.concatenate([(slot + 1000 * t).reshape(np.prod(columns), *rest) for t in range(time)])
    data = {"a": torch.from_numpy(batch), "b": (batch, Pair(batch, TensorDict({"c": batch}, batch.shape[:ndim])))}
    rows, found = rows_of_batch(data, ndim, "extend", ndim - 1)
    assert found == tuple(columns)
    for leaf in (rows["a"], rows["b"][0], rows["b"][1].left, rows["b"][1].right["c"]):
        assert np.array_equal(leaf, expected)
    assert type(rows["b"][1]) is Pair

    rows, found = rows_of_slot({"a": slot}, ndim, "add")
    assert found == tuple(columns)
    assert np.array_equal(rows["a"], expected[: len(rows["a"])])

    stored = np.moveaxis(batch, ndim - 1, 0)
    rows, found = rows_of_stored({"a": stored}, ndim, "TensorStorage")
    assert found == tuple(columns)
    assert np.array_equal(rows["a"], expected)


REFUSED = {
    "columns that differ": (
        {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(3, 2)}},
        RuntimeError,
        r"field \('b', 'c'\): expected leading dimensions \[2, 3\] as in field 'a', got \[3, 2\]",
    ),
    "time that differs": (
        {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)},
        RuntimeError,
        r"field 'b': .*\[2, 3\].*\[2, 4\]",
    ),
    "a leaf without time": ({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, RuntimeError, r"field 'b': .*got \[2\]"),
    "too few dimensions": (torch.zeros(2), RuntimeError, r"2 leading dimensions.*got \[2\]"),
    "td of too few": (TensorDict({"a": torch.zeros(2, 3)}, [2]), RuntimeError, r"2 leading dimensions.*got \[2\]"),
    "a float": ({"a": torch.zeros(2, 3), "b": 1.0}, RuntimeError, r"field 'b': .*2 leading dimensions, got \[\]"),
    "a string": (
        {"a": torch.zeros(2, 3), "b": "x"},
        TypeError,
        "field 'b': expected a tensor or an array, got str 'x'",
    ),
    "None": ((torch.zeros(2, 3), None), TypeError, "field '1': expected a tensor or an array, got NoneType"),
    "a float alone": (1.5, RuntimeError, r"data: .*2 leading dimensions, got \[\]"),
    "nothing": ({}, TypeError, r"expected at least one tensor, got dict \{\}"),
}


@pytest.mark.parametrize(("data", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_data_of_another_layout_is_refused(data, error, says):
    storage = LazyTensorStorage(12, ndim=2)
    with pytest.raises(error, match=f"extend: .*{says}"):
        ReplayBuffer(storage=storage).extend(data)
    assert not storage.initialized
    rb = ReplayBuffer(storage=storage)
    rb.extend({"a": torch.ones(2, 3), "b": {"c": torch.ones(2, 3)}})
    with pytest.raises((error, TypeError, KeyError)):
        rb.extend(data)
    assert (len(rb), rb.write_count) == (6, 3)
    if not isinstance(data, TensorDict):
        with pytest.raises(error):
            TensorStorage(data, ndim=2)


def test_an_empty_tuple_is_no_data_of_a_storage():
    with pytest.raises(TypeError, match=r"expected at least one tensor, got tuple \(\)"):
        TensorStorage((), ndim=2)


def test_arrays_of_all_kinds_are_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend({"a": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1], "b": np.broadcast_to(np.float32(1), (2, 3, 4))})
    assert rb.storage.grid()["a"].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert rb.storage.grid()["b"].shape == (2, 3, 4)


def test_lists_of_steps_are_stacked_first():
    """``extend`` of a list: every item is one entry of the first dimension."""
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend([torch.arange(3), torch.arange(3) + 10])
    assert rb.storage.grid().tolist() == [[0, 1, 2], [10, 11, 12]]
