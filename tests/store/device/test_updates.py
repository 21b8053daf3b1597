"""Priorities on their way from a device to the host."""

import pytest
import torch

from engram.store.device.chain import Chain
from engram.store.device.columns import columns_of
from engram.store.device.updates import Drained, UpdateRing
from engram.types import WritePlan
from tests.store.device.stores import content, filled, prioritized

FIELDS = (("int64", ()),)


@pytest.fixture
def store():
    return filled(20, 1, FIELDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_the_host(store, dtype):
    index, other = prioritized(store), prioritized(store, name="other")
    batch = Chain(columns_of(store, priorities=index), 8, "cpu", kind="prioritized", rows_per_program=8).run(1)
    values = torch.rand(8, dtype=dtype) + 0.1
    ring = UpdateRing(20, 8, 2, "cpu", dtype=dtype)
    assert ring.drain(index) == Drained(0, 0)
    ring.send(batch.rows, batch.tickets, values)
    assert ring.drain(index) == Drained(8, 0)
    assert ring.drain(index) == Drained(0, 0)
    other.update(batch.rows, values, batch.tickets)
    assert torch.equal(index.leaves(20), other.leaves(20))


def test_rows_written_since_keep_their_priority(store):
    index = prioritized(store)
    rows, tickets = torch.tensor([1, 2, -1]), store.tickets_of(torch.tensor([1, 2, 2]))
    ring = UpdateRing(20, 3, 2, "cpu")
    ring.send(rows, tickets, torch.tensor([5.0, 6.0, 7.0]))
    store.write(WritePlan(rows=torch.tensor([2])), content(store, torch.tensor([2])), 1)
    before = index.leaves(20)
    assert ring.drain(index) == Drained(3, 0)
    after = index.leaves(20)
    assert after[1] != before[1]
    assert torch.equal(after[2:], before[2:])
    assert index.core.dropped == 1


def test_edited_rows_take_updates(store):
    index = prioritized(store)
    store.edit(torch.arange(20), [0], [torch.arange(20) + 100])
    batch = Chain(columns_of(store, priorities=index), 4, "cpu", kind="prioritized", rows_per_program=4).run(2)
    ring = UpdateRing(20, 4, 1, "cpu")
    ring.send(batch.rows, batch.tickets, torch.full((4,), 9.0))
    ring.drain(index)
    assert index.core.dropped == 0
    assert torch.allclose(index.leaves_of(batch.rows), torch.full((4,), 9.0**0.7, dtype=torch.float64))


def test_a_full_ring_drops_and_counts(store):
    index = prioritized(store)
    tickets = store.tickets_of(torch.arange(20))
    ring = UpdateRing(20, 2, 3, "cpu")

    def send(row):
        ring.send(torch.tensor([row, row]), tickets[[row, row]], torch.tensor([1.0, row + 1.0]))

    for row in range(5):
        send(row)
    assert ring.counters[[5, 7]].tolist() == [3, 4]
    assert ring.drain(index) == Drained(6, 0)
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) ** 0.7
    assert torch.allclose(index.leaves(3), expected, rtol=1e-6), "of a row named twice the last one"
    for row in range(7, 9):
        send(row)
    assert ring.drain(index) == Drained(4, 0)
    assert ring.drained == 5 and ring.counters[[5, 7]].tolist() == [5, 4]


def test_priorities_that_none_can_be_are_refused_alone(store):
    index = prioritized(store)
    before = index.leaves(20)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 20, -2])
    tickets = store.tickets_of(rows.clamp(0, 19))
    values = [float("nan"), -1.0, float("inf"), 1e308, 3.0, 0.0, 1.0, 1.0]
    ring = UpdateRing(20, 8, 2, "cpu", dtype=torch.float64)
    index.core.alpha = 2.0
    before = index.leaves(20)
    ring.send(rows, tickets, torch.tensor(values, dtype=torch.float64))
    assert ring.drain(index) == Drained(2, 6)
    after = index.leaves(20)
    assert after[4:6].tolist() == [9.0, 0.0]
    assert torch.equal(after[:4], before[:4]) and torch.equal(after[6:], before[6:])


def test_what_is_sent_is_checked(store):
    ring = UpdateRing(20, 2, 2, "cpu")
    rows = torch.tensor([0, 1])
    for given in (
        (rows, rows, torch.zeros(2, dtype=torch.float64)),
        (rows.int(), rows, torch.zeros(2)),
        (rows, rows[:1], torch.zeros(2)),
        (rows, rows, torch.zeros(2, 2)[:, 0]),
        (torch.arange(3), torch.arange(3), torch.zeros(3)),
    ):
        with pytest.raises(ValueError, match="update_priority: expected contiguous rows and tickets of int64"):
            ring.send(*given)
    assert ring.counters.tolist() == [0] * 8
