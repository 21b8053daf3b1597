"""Rows of an ensemble that are removed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    RowError,
    TensorDictReplayBuffer,
)
from tests.members.buffers import member, members, rows, storages
from tests.testing.test_broken_storages import Ring


def held(rb):
    return [one[:]["a"].tolist() if len(one) else [] for one in rb._rbs]


def named(ids, of_them):
    return {"buffer_ids": np.array(ids, int), "index": np.array(of_them, None if of_them else int)}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 8)), max_size=10).map(tuple), min_size=1, max_size=4)
)
def test_rows_of_each_member_go_and_no_others(calls):
    rb = ReplayBufferEnsemble(*members(9, 9, 9))
    left = {(number, row) for number in range(3) for row in range(9)}
    for call in calls:
        gone = left & set(call)
        assert rb.remove(named([one for one, _ in call], [row for _, row in call])) == len(gone)
        left -= gone
        assert held(rb) == [sorted(1000 * one + row for one, row in left if one == number) for number in range(3)]


@pytest.mark.parametrize("storage", ["RAM", "directory"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_of_a_batch_are_not_drawn_again(tmp_path, storage, prefetch):
    kind = storages(tmp_path)[storage]
    some = [member(number, sampler=PrioritizedSampler(100, 1.0, 1.0), storage=kind) for number in range(2)]
    rb = ReplayBufferEnsemble(*some, batch_size=16, prefetch=prefetch)
    seen = rb.sample()
    gone = set(
        zip(seen["index", "buffer_ids"].flatten().tolist(), seen["index", "index"].flatten().tolist(), strict=True)
    )
    assert rb.remove(seen["index"]) == len(gone)
    if prefetch:
        for _ in range(prefetch):
            rb.sample()  # were asked for before
    for _ in range(10):
        batch = rb.sample()
        pairs = batch["index", "buffer_ids"].flatten().tolist(), batch["index", "index"].flatten().tolist()
        assert gone.isdisjoint(zip(*pairs, strict=True))
    assert sum(map(len, rb._rbs)) == 40 - len(gone)
    rb.close()


def test_rows_that_were_written_since_stay():
    rb = ReplayBufferEnsemble(*members(0, 0, tracks=True, capacity=4), routing_key="to")
    old = rb.extend(rows(0, 6, to=torch.tensor([0, 0, 1, 1, 0, 1])))
    rb.extend(rows(0, 2, first=10, to=torch.tensor([1, 1])))  # one lies where a row was
    assert rb.remove(old, generation=old["index_generation"]) == 5
    assert held(rb) == [[], [11, 10]]


REFUSED = {
    "no index": (torch.zeros(2, dtype=torch.int64), None, TypeError, "buffer_ids"),
    "no such member": (named([0, 2], [0, 0]), None, ValueError, r"\[0, 2\), got 2"),
    "a row outside": (named([0, 1], [0, 100]), None, RowError, r"\[-1, 100\), got 100"),
    "floats": (named([0, 1], [0.0, 1.0]), None, TypeError, "expected ints"),
    "few generations": (named([0, 1], [0, 1]), [1], ValueError, "one generation per row"),
    "generations of floats": (named([0, 1], [0, 1]), [1.0, 2.0], TypeError, "expected ints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_removes_nothing(case):
    index, generation, error, message = REFUSED[case]
    rb = ReplayBufferEnsemble(*members(5, 5))
    with pytest.raises(error, match=message):
        rb.remove(index, generation=generation)
    assert held(rb) == [[0, 1, 2, 3, 4], [1000, 1001, 1002, 1003, 1004]]


def test_items_of_lists_go_too():
    first = members(5)[0]
    second = TensorDictReplayBuffer(storage=ListStorage(10))
    second.extend(rows(1, 5))
    assert ReplayBufferEnsemble(first, second).remove(named([0, 1, 1, 1], [0, 0, 4, -1])) == 3
    assert [len(first), len(second)] == [4, 3]


@pytest.mark.parametrize("kind", ["own", "read-only"])
def test_a_member_that_cannot_is_named_and_nothing_is_removed(kind):
    first, second = members(5, 5)
    if kind == "own":
        second = TensorDictReplayBuffer(storage=Ring(10))
        second.extend(rows(1, 5))
    else:
        second.set_writer(ImmutableDatasetWriter())
    rb = ReplayBufferEnsemble(first, second)
    with pytest.raises(RuntimeError, match=kind if kind == "read-only" else "OwnStorage") as raised:
        rb.remove(named([0, 1], [0, 0]))
    assert raised.value.__notes__ == ["Raised by member 1 of the ensemble. Nothing was changed."]
    assert len(first) == len(second) == 5


def test_members_of_several_dimensions_are_named_by_coordinates():
    rb = ReplayBufferEnsemble(*(TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2)) for _ in range(2)))
    for number, one in enumerate(rb._rbs):
        one.extend(rows(number, 12).reshape(4, 3))
    batch = rb.sample(8)
    ids, coordinates = batch["index", "buffer_ids"], batch["index", "index"]
    assert coordinates.shape == (*ids.shape, 2)
    gone = {
        (number, *of) for number, of in zip(ids.flatten().tolist(), coordinates.flatten(0, 1).tolist(), strict=True)
    }
    assert rb.remove(batch["index"]) == len(gone)
    assert [len(one) for one in rb._rbs] == [12 - sum(number == one for one, *_ in gone) for number in range(2)]
    assert rb.remove(batch["index"]) == 0
