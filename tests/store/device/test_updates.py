"""Priorities on their way from a device to the host."""

import gc
import os
import threading
import weakref

import pytest
import torch

from engram.errors import CorruptStore
from engram.store.device.chain import Chain, Drained, UpdateRing, columns_of
from engram.types import WritePlan
from tests import waiting
from tests.store.device.stores import content, filled, prioritized

FIELDS = (("int64", ()),)


@pytest.fixture
def store():
    return filled(20, 1, FIELDS)


@pytest.fixture
def ring():
    ring = UpdateRing(20, 2, 3, "cpu", dtype=torch.float64)
    yield ring
    ring.close()


def attached(ring, store, index):
    ring.attach(index, store.indexes)
    return ring


def send(ring, store, row, priority=1.0):
    rows = torch.tensor([row, row])
    ring.send(rows, store.tickets_of(rows), torch.tensor([0.5, priority], dtype=ring.dtype))


def applied(ring):
    """What is taken when all that was sent is applied."""
    assert ring.flush(60)
    return ring.stats


def native_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_the_host(store, dtype):
    index, other = prioritized(store), prioritized(store, name="other")
    batch = Chain(columns_of(store, priorities=index), 8, "cpu", kind="prioritized", rows_per_program=8).run(1)
    values = torch.rand(8, dtype=dtype) + 0.1
    ring = attached(UpdateRing(20, 8, 2, "cpu", dtype=dtype), store, index)
    assert applied(ring) == Drained(0, 0, 0)
    ring.send(batch.rows, batch.tickets, values)
    assert applied(ring) == Drained(1, 8, 0)
    ring.close()
    other.update(batch.rows, values, batch.tickets)
    assert torch.equal(index.leaves(20), other.leaves(20))


def test_rows_written_since_keep_their_priority(store):
    index = prioritized(store)
    rows, tickets = torch.tensor([1, 2, -1]), store.tickets_of(torch.tensor([1, 2, 2]))
    ring = UpdateRing(20, 3, 2, "cpu")
    ring.send(rows, tickets, torch.tensor([5.0, 6.0, 7.0]))
    store.write(WritePlan(rows=torch.tensor([2])), content(store, torch.tensor([2])), 1)
    before = index.leaves(20)
    assert applied(attached(ring, store, index)) == Drained(1, 3, 0)
    after = index.leaves(20)
    assert after[1] != before[1]
    assert torch.equal(after[2:], before[2:])
    assert index.core.dropped == 1


def test_edited_rows_take_updates(store):
    index = prioritized(store)
    store.edit(torch.arange(20), [0], [torch.arange(20) + 100])
    batch = Chain(columns_of(store, priorities=index), 4, "cpu", kind="prioritized", rows_per_program=4).run(2)
    ring = attached(UpdateRing(20, 4, 1, "cpu"), store, index)
    ring.send(batch.rows, batch.tickets, torch.full((4,), 9.0))
    ring.close()
    assert index.core.dropped == 0
    assert torch.allclose(index.leaves_of(batch.rows), torch.full((4,), 9.0**0.7, dtype=torch.float64))


def test_a_full_ring_drops_and_counts(store, ring):
    index = prioritized(store)
    for row in range(5):
        send(ring, store, row, row + 1.0)
    assert ring.counters[[5, 7]].tolist() == [3, 4]
    assert applied(attached(ring, store, index)) == Drained(3, 6, 0)
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) ** 0.7
    assert torch.allclose(index.leaves(3), expected, rtol=1e-6), "of a row named twice the last one"
    for row in range(7, 9):
        send(ring, store, row)
    assert applied(ring) == Drained(5, 10, 0)
    assert ring.counters[[5, 7]].tolist() == [5, 4]


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
    assert applied(attached(ring, store, index)) == Drained(1, 2, 6)
    after = index.leaves(20)
    assert after[4:6].tolist() == [9.0, 0.0]
    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[6:], before[6:])


def test_a_batch_of_nothing(store, ring):
    ring.send(torch.arange(0), torch.arange(0), torch.zeros(0, dtype=torch.float64))
    assert applied(attached(ring, store, prioritized(store))) == Drained(1, 0, 0)


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


# ---- the thread --------------------------------------------------------------------------------------------------------


def test_no_thread_runs_before_something_is_sent(store, ring):
    before = native_threads()
    attached(ring, store, prioritized(store))
    assert native_threads() == before
    assert ring.stats == Drained(0, 0, 0)
    send(ring, store, 3)
    assert native_threads() == before + 1
    ring.close()
    assert native_threads() == before


def test_without_priorities_nothing_is_taken(store, ring):
    send(ring, store, 3)
    assert not ring.flush(0)
    assert ring.stats == Drained(0, 0, 0)


def test_closing_applies_what_has_arrived_and_others_go_on_from_there(store, ring):
    index, other = prioritized(store), prioritized(store, name="other")
    attached(ring, store, index)
    send(ring, store, 3, 50.0)
    ring.close()
    ring.close()
    assert ring.stats.batches == 1
    untouched = other.leaves(20)
    assert index.leaves(20).argmax() == 3
    send(ring, store, 4, 50.0)
    assert not ring.flush(0)
    assert applied(attached(ring, store, other)) == Drained(2, 2, 0)
    changed = other.leaves(20) != untouched
    assert changed.nonzero().flatten().tolist() == [4]


def test_attaching_others_applies_what_has_arrived_first(store, ring):
    index, other = prioritized(store), prioritized(store, name="other")
    attached(ring, store, index)
    send(ring, store, 3, 50.0)
    attached(ring, store, other)
    assert index.leaves(20).argmax() == 3
    assert torch.equal(other.leaves(20), prioritized(store, name="another").leaves(20))


def test_a_store_that_is_closed_takes_what_has_arrived_and_no_more(store, ring):
    index = prioritized(store)
    core = index.core
    attached(ring, store, index)
    before = native_threads()
    send(ring, store, 3, 50.0)
    store_tickets = store.tickets_of(torch.tensor([4, 4]))
    store.close()
    assert native_threads() == before
    assert core.leaf(3) == 50.0**0.7
    untouched = core.leaf(4)
    ring.send(torch.tensor([4, 4]), store_tickets, torch.tensor([9.0, 9.0], dtype=torch.float64))
    assert not ring.flush(60), "at once: no thread takes it"
    assert core.leaf(4) == untouched
    assert ring.stats == Drained(1, 2, 0)
    ring.close()
    attached(ring, store, index)
    with pytest.raises(RuntimeError, match="the store was closed"):
        ring.flush(60)


def test_memory_outlives_the_thread(ring):
    store = filled(20, 1, FIELDS)
    attached(ring, store, prioritized(store))
    send(ring, store, 3)
    tickets, gone = store.tickets_of(torch.tensor([3, 3])), weakref.ref(store)
    del store
    gc.collect()
    for number in range(100):  # the ring still has the priorities
        ring.send(torch.tensor([3, 3]), tickets, torch.tensor([1.0, 1.0 + number], dtype=torch.float64))
    assert ring.flush(60)
    ring.close()
    gc.collect()
    assert gone() is None


def test_a_ring_that_is_forgotten_ends_its_thread(store):
    before = native_threads()
    ring = attached(UpdateRing(20, 2, 3, "cpu", dtype=torch.float64), store, prioritized(store))
    send(ring, store, 3)
    del ring
    gc.collect()
    assert native_threads() == before


def test_priorities_of_another_number_of_rows_are_refused(ring):
    store = filled(21, 1, FIELDS)
    attached(ring, store, prioritized(store))
    with pytest.raises(ValueError, match="expected priorities of 20 rows, as many as the ring is for, got those of 21"):
        send(ring, store, 3)


def test_damage_is_raised_by_the_next_call(store, ring):
    index = prioritized(store)
    words = index.block.tensor[:64].view(torch.float64)
    assert words[4] == 0.7, "alpha"
    words[4] = -1.0
    attached(ring, store, index)
    send(ring, store, 3)
    with pytest.raises(CorruptStore, match="expected alpha, beta and the highest priority"):
        ring.flush(60)
    with pytest.raises(CorruptStore, match="expected alpha"):
        send(ring, store, 3)
    with pytest.raises(CorruptStore, match="expected alpha"):
        ring.close()
    words[4] = 0.7
    assert applied(attached(ring, store, index)) == Drained(1, 2, 0), "the batch at which it ended stayed"


def test_updates_beside_a_host_that_draws_and_updates(store, ring):
    index = prioritized(store)
    attached(ring, store, index)
    over, errors = threading.Event(), []

    def use():
        rows = torch.arange(20)
        try:
            while not over.is_set():
                index.update(rows, torch.rand(20) + 0.1, store.tickets_of(rows))
                index.draw(1, 8)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for number in range(100):
            send(ring, store, number % 20)
    finally:
        over.set()
        thread.join()
    assert not errors
    sent, dropped = ring.counters[[5, 7]].tolist()
    assert applied(ring) == Drained(sent, 2 * sent, 0)
    assert 2 * sent + dropped == 200
    leaves = index.leaves(20)
    assert abs(float(leaves.sum()) - index.core.total) < 1e-9 * index.core.total


def test_a_forked_child_applies_nothing(store, ring):
    index = prioritized(store)
    attached(ring, store, index)
    send(ring, store, 3, 50.0)
    applied(ring)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            send(ring, store, 4, 60.0)
            told = ring.flush(60)
            ring.close()
            status = 0 if not told and ring.stats.batches == 1 and index.leaves(20).argmax() == 3 else 2
        finally:
            os._exit(status)
    limit = waiting.Limit(60)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        limit.check("a child")
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    send(ring, store, 5, 70.0)
    assert applied(ring) == Drained(2, 4, 0)
    assert index.leaves(20).argmax() == 5
