"""Indices, TorchRL's verbs, and who hears of writes: what all storages share."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram import LazyTensorStorage, ListStorage, ReplayBuffer, RowError, Storage, TensorStorage
from engram.types import WritePlan


def storage(n=5, capacity=8, lanes=1):
    """Rows ``0 … n-1``; row ``i`` holds ``10 · i``."""
    made = LazyTensorStorage(capacity, lanes=lanes)
    if lanes == 1:
        ReplayBuffer(storage=made).extend(torch.arange(n) * 10)
    else:
        rb = ReplayBuffer(storage=made)
        for lane in range(lanes):
            rb.extend(torch.arange(n) * 10 + 10 * lane * capacity // lanes, lane=lane)
    return made


# ---- indices ---------------------------------------------------------------------------------------------------------

INDICES = {
    "int": (2, 20),
    "numpy int": (np.int64(2), 20),
    "0-d tensor": (torch.tensor(2), 20),
    "0-d array": (np.array(2), 20),
    "negative": (-1, 40),
    "first from the end": (-5, 0),
    "all": (slice(None), [0, 10, 20, 30, 40]),
    "ellipsis": (..., [0, 10, 20, 30, 40]),
    "None": (None, [0, 10, 20, 30, 40]),
    "nothing": ((), [0, 10, 20, 30, 40]),
    "1-tuple": ((3,), 30),
    "1-tuple of a slice": ((slice(1, 3),), [10, 20]),
    "slice": (slice(1, 4), [10, 20, 30]),
    "open slice": (slice(3, None), [30, 40]),
    "slice from the end": (slice(-2, None), [30, 40]),
    "slice beyond": (slice(3, 100), [30, 40]),
    "empty slice": (slice(3, 3), []),
    "crossed slice": (slice(4, 1), []),
    "steps": (slice(0, None, 2), [0, 20, 40]),
    "backwards": (slice(None, None, -1), [40, 30, 20, 10, 0]),
    "list": ([3, 0, 3], [30, 0, 30]),
    "list of negatives": ([-1, 0, -5], [40, 0, 0]),
    "empty list": ([], []),
    "range": (range(1, 4), [10, 20, 30]),
    "tensor": (torch.tensor([4, 1]), [40, 10]),
    "int32 tensor": (torch.tensor([4, 1], dtype=torch.int32), [40, 10]),
    "uint8 tensor": (torch.tensor([4, 1], dtype=torch.uint8), [40, 10]),
    "strided tensor": (torch.tensor([4, 9, 1, 9])[::2], [40, 10]),
    "array": (np.array([4, 1]), [40, 10]),
    "mask": (torch.tensor([True, False, True, False, True]), [0, 20, 40]),
    "mask as an array": (np.array([True, False, True, False, True]), [0, 20, 40]),
    "mask as a list": ([False, False, False, True, False], [30]),
    "mask of nothing": (torch.zeros(5, dtype=torch.bool), []),
}


@pytest.mark.parametrize(("index", "expected"), INDICES.values(), ids=INDICES)
def test_indices(index, expected):
    assert storage()[index].tolist() == expected
    assert storage().get(index).tolist() == expected
    assert ReplayBuffer(storage=storage())[index].tolist() == expected


@pytest.mark.parametrize(("index", "expected"), INDICES.values(), ids=INDICES)
def test_assignment(index, expected):
    made = storage()
    single = not isinstance(expected, list)
    if expected == []:
        with pytest.raises(RuntimeError, match="expected at least one row, got an empty batch"):
            made[index] = torch.arange(0)
        return
    made[index] = torch.tensor(7) if single else torch.arange(len(expected)) + 1000
    numbers = torch.arange(5) * 10
    for i, number in enumerate([expected] if single else expected):
        numbers[number // 10] = 7 if single else 1000 + i  # of a row named twice the last entry wins
    assert made[:].tolist() == numbers.tolist()
    assert (len(made), made.write_count, made.extent().seam) == (5, 5, (5,))


REFUSED = {
    "beyond": (5, RowError, "row 5 is not live: expected one of 5 rows"),
    "beyond the capacity": (8, RowError, "row 8 is not live"),
    "before": (-6, RowError, "at least -5, got -6"),
    "list beyond": ([0, 5], RowError, "row 5 is not live"),
    "list before": ([0, -6], RowError, "at least -5, got -6"),
    "huge": (1 << 62, RowError, "is not live"),
    "tensor beyond": (torch.tensor([-1, 6]), RowError, "row 6 is not live"),
    "short mask": (torch.tensor([True, False]), RowError, r"expected a mask of the 5 live rows, got shape \[2\]"),
    "long mask": (torch.ones(8, dtype=torch.bool), RowError, "expected a mask of the 5 live rows"),
    "float": (1.0, TypeError, "expected an int, slice, mask, or a list, range, array or tensor of ints; got float"),
    "string": ("a", TypeError, "got str"),
    "dict": ({}, TypeError, "got dict"),
    "float tensor": (torch.tensor([1.0]), TypeError, r"expected ints, got torch\.float32"),
    "float array": (np.array([1.5]), TypeError, "expected ints"),
    "complex": (torch.tensor([1j]), TypeError, "expected ints"),
    "2-tuple": ((1, 2), TypeError, "got tuple"),
    "strings": (["a"], TypeError, None),
}


@pytest.mark.parametrize(("index", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_indices_that_are_refused(index, error, says):
    made = storage()
    if type(index) is int and index == 5:  # there is room for it
        assert made.get(index) == 0
    else:
        with pytest.raises(error, match=says):
            made.get(index)
    with pytest.raises(error, match=says):
        made[index] = torch.tensor(1)
    assert made[:].tolist() == [0, 10, 20, 30, 40]


@given(st.integers(1, 4), st.integers(0, 6), st.slices(12), st.lists(st.integers(-12, 11), max_size=5))
def test_indices_count_live_rows_in_row_order(lanes, n, index, rows):
    length = 6
    made = LazyTensorStorage(length * lanes, lanes=lanes)
    rb = ReplayBuffer(storage=made)
    live = []
    rb.extend(torch.tensor([0]), lane=0)
    rb.empty()
    for lane in range(lanes):
        k = (n + lane) % (length + 1)
        if k:
            rb.extend(torch.arange(k) + lane * length, lane=lane)
        live += [lane * length + i for i in range(k)]
    assert made[index].tolist() == live[index]
    assert made[:].tolist() == live
    assert [int(x) for x in made] == live
    expected = []
    for row in rows:
        if row in live:
            expected.append(row)
        elif row < 0 and -row <= len(live):
            expected.append(live[row])
        else:
            with pytest.raises(RowError):
                made.get(rows)
            return
    assert made[rows].tolist() == expected


def test_slices_are_views_and_the_rest_copies():
    made = storage()
    base = made.store.tensors[0].data_ptr()
    assert made[1:3].data_ptr() == base + 8
    assert made[:].data_ptr() == base
    assert ReplayBuffer(storage=made)[:].data_ptr() == base
    for index in (1, [0, 1], slice(0, 4, 2), torch.tensor([True] * 5)):
        copied = made[index]
        copied.zero_()
        assert made[1] == 10
    lanes = storage(2, 8, lanes=2)
    assert lanes[:].tolist() == [0, 10, 40, 50]  # a gap between the lanes: a copy
    lanes[:].zero_()
    assert lanes[:].tolist() == [0, 10, 40, 50]


def test_rows_that_are_allocated_but_unwritten_are_zero():
    made = storage(2)
    assert made[5] == 0
    with pytest.raises(RowError, match="row 5 is not live"):
        ReplayBuffer(storage=made)[5]


# ---- set -------------------------------------------------------------------------------------------------------------


def test_set_writes_rows_by_number():
    made = LazyTensorStorage(8)
    made.set(0, torch.tensor(5))
    made.set(range(1, 4), torch.tensor([6, 7, 8]))
    made.set(torch.tensor([1, 5]), torch.tensor([60, 9]))
    assert made[:].tolist() == [5, 60, 7, 8, 0, 9]  # the row in between came to life as zeros
    assert len(made) == 6
    made.set([2, 2], torch.tensor([1, 2]), set_cursor=False)
    assert made[2] == 2
    assert len(made) == 6
    assert made.extent().seam == (0,)
    assert ReplayBuffer(storage=made).extend(torch.tensor([99])).tolist() == [0]


def test_set_into_lanes_raises_their_extents():
    made = LazyTensorStorage(8, lanes=2)
    made.set([5], torch.tensor([1]))
    assert made.extent().filled == (0, 2)
    assert made[:].tolist() == [0, 1]


# ---- contains, iteration, equality of words --------------------------------------------------------------------------


def test_contains():
    made = storage()
    assert [i in made for i in (-1, 0, 4, 5, 8, 1 << 62)] == [False, True, True, False, False, False]
    assert made.contains(4) is True
    assert made.contains(torch.tensor([[0, 4], [5, -1]])).tolist() == [[True, True], [False, False]]
    assert torch.tensor([0, 4]) in made
    assert torch.tensor([0, 5]) not in made
    assert np.int64(3) in made


def test_iteration_gives_rows():
    made = storage(2, 8, lanes=2)
    assert [int(row) for row in made] == [0, 10, 40, 50]
    assert list(LazyTensorStorage(3)) == []


# ---- who hears of writes ---------------------------------------------------------------------------------------------


class Ear:
    def __init__(self):
        self.heard = []

    def observe(self, write, data):
        self.heard.append((None if write is None else write.rows.tolist(), data))


def test_attached_buffers_hear_of_writes_and_are_not_kept_alive():
    made = ListStorage(4)
    one, two = Ear(), Ear()
    made.attach(one)
    made.attach(one)
    made.attach(two)
    write = made.write(WritePlan(lane=0), ["a", "b"], 2)
    made.notify(write, ["a", "b"])
    made.notify(None, None)
    assert one.heard == two.heard == [([0, 1], ["a", "b"]), (None, None)]
    made.detach(two)
    made.notify(None, None)
    assert (len(one.heard), len(two.heard)) == (3, 2)
    del one
    made.notify(None, None)


def test_writes_through_one_buffer_are_seen_by_another():
    made = LazyTensorStorage(6)
    one, two = ReplayBuffer(storage=made), ReplayBuffer(storage=made)
    one.extend(torch.arange(3))
    assert two.extend(torch.arange(3)).tolist() == [3, 4, 5]
    assert len(one) == 6
    assert one.write_count == 6
    two.empty()
    assert len(one) == 0


# ---- the base class --------------------------------------------------------------------------------------------------


def test_the_base_class_needs_the_methods_of_a_storage():
    class Unfinished(Storage):
        def prepare(self, data, call, *, batched, ignored=(), count=None):
            return data, 1

    with pytest.raises(NotImplementedError, match=r"Storage: expected the methods .*'prepare', 'write', 'edit'"):
        Storage()
    with pytest.raises(
        NotImplementedError, match=r"Unfinished: expected the methods .*'max_size'.*'write', 'edit'"
    ) as told:
        Unfinished()
    assert "'prepare'" not in str(told.value)
    base = ListStorage(3)
    assert (base.lanes, base.nbytes, base.ndim) == (1, 0, 1)
    assert set(base.counters()) >= {"void_rows", "lapped_rows", "redraws", "priority_updates_dropped", "field_updates"}
    assert not any(base.counters().values())
    for kind in (LazyTensorStorage(3), ListStorage(3), TensorStorage(torch.zeros(3))):
        assert isinstance(kind, Storage)


def test_plans_are_checked():
    made = storage()
    prepared, n = made.prepare(torch.arange(2), "extend", batched=True)
    before = (made[:].tolist(), made.extent(), made.store.core.next_ticket)
    for plan, error in (
        (WritePlan(lane=1), RowError),
        (WritePlan(lane=-1), RowError),
        (WritePlan(lane=torch.tensor([0, 1])), RowError),
        (WritePlan(lane=torch.tensor([0])), RuntimeError),
        (WritePlan(rows=torch.tensor([0])), RuntimeError),
        (WritePlan(rows=torch.tensor([0, 8])), RowError),
        (WritePlan(rows=torch.tensor([0, -1])), RowError),
        (WritePlan(rows=torch.tensor([0]), kept=torch.tensor([2])), RowError),
        (WritePlan(rows=torch.tensor([0]), kept=torch.tensor([-1])), RowError),
        (WritePlan(rows=torch.tensor([8]), kept=torch.tensor([1])), RowError),
        (WritePlan(rows=torch.tensor([0, 1]), kept=torch.tensor([1])), RuntimeError),
    ):
        with pytest.raises(error):
            made.write(plan, prepared, n)
        assert (made[:].tolist(), made.extent(), made.store.core.next_ticket) == before


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_a_plan_may_keep_some_rows(kind):
    made = kind(4)
    made.set(range(4), torch.arange(4) * 10)
    prepared, n = made.prepare(torch.arange(5), "extend", batched=True)
    first = made.settled()
    write = made.write(WritePlan(rows=torch.tensor([3, 0, 3]), kept=torch.tensor([0, 2, 4])), prepared, n)
    assert (write.rows.tolist(), write.first) == ([3, -1, 0, -1, 3], first)
    assert [int(made[i]) for i in range(4)] == [2, 10, 20, 4]
    assert made.tickets_of(torch.tensor([0, 3])).tolist() == [first + 1, first + 2]
    none = torch.tensor([], dtype=torch.int64)
    assert made.write(WritePlan(rows=none, kept=none), prepared, n).rows.tolist() == [-1] * 5
    assert (made.settled(), made.write_count) == (first + 3, 7)


def test_expected_tickets_are_compared():
    made = storage()
    rows = torch.tensor([0, 3, 3])
    numbers = made.tickets_of(rows)
    columns, moved = made.read(rows, numbers)
    assert (columns[0].tolist(), moved) == ([0, 30, 30], [])
    made[3] = torch.tensor(77)
    assert made.read(rows, numbers)[1] == [1, 2]
    assert made.tickets_of(torch.tensor([6, 99, -1])).tolist() == [-1, -1, -1]
    with pytest.raises(RowError, match="read: "):
        made.read(torch.tensor([8]))
