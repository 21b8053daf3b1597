"""A queue whose rows are removed, evicted or lost with a process: each gives its room under MaxInFlight back, once."""

import signal
import time

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    MaxInFlight,
    MinSize,
    RateLimited,
    ReplayBuffer,
    SamplesPerInsert,
)
from tests.fresh import start
from tests.ranks.processes import wait_for

ROWS = 32


def in_flight(rb):
    return rb.stats()["limit_in_flight"]


@pytest.fixture(params=["memory", "directory", "lanes"])
def queue(request, tmp_path):
    """32 rows, each of which is drawn twice; 24 of them may be in flight, and 16 are."""
    storage = LazyTensorStorage(ROWS, lanes=2) if request.param == "lanes" else LazyTensorStorage(ROWS)
    if request.param == "directory":
        storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "queue")
    rb = ReplayBuffer(storage=storage, sampler=ConsumingSampler(2), batch_size=4)
    lane = {"lane": torch.arange(16) % 2} if request.param == "lanes" else {}
    rb.rows = rb.extend(torch.arange(16), **lane)
    rb.limit(MaxInFlight(24))
    yield rb
    rb.close()


def admitted(call):
    try:
        call()
    except RateLimited:
        return False
    return True


def rewritten(rb, n):
    return rb.extend(
        torch.arange(n), timeout=0, **({"lane": torch.arange(n) % 2} if rb.storage.memory.lanes == 2 else {})
    )


def drain(rb):
    while len(rb):
        rb.sample()


def test_removed_rows_give_their_room_back_once(queue):
    assert queue.remove(queue.rows[:10]) == 10
    assert in_flight(queue) == 6
    assert queue.remove(queue.rows[:12]) == 2  # the others are gone already
    assert in_flight(queue) == 4
    rewritten(queue, 20)
    assert in_flight(queue) == 24
    with pytest.raises(RateLimited):
        rewritten(queue, 1)
    queue.remove(torch.arange(ROWS))
    assert in_flight(queue) == 0 == len(queue.storage)


def test_rows_that_are_used_up_gave_it_back_before(queue):
    drain(queue)
    assert in_flight(queue) == 0
    queue.remove(queue.rows)
    assert in_flight(queue) == 0
    rewritten(queue, 24)
    assert in_flight(queue) == 24


def test_rows_that_are_being_read_give_it_back_under_their_ticket(queue):
    index = queue.sampler._attached()
    claimed = [index.core.claim(key, 16) for key in (1, 2)]  # for the last time
    assert in_flight(queue) == 16
    queue.remove(queue.rows[:8])
    assert in_flight(queue) == 8
    for rows, tickets in claimed:
        index.core.were_read(rows, tickets)
    assert in_flight(queue) == 0


def test_rows_that_are_overwritten_after_they_were_removed_count_once(queue):
    queue.remove(queue.rows)
    rewritten(queue, 24)
    assert in_flight(queue) == 24
    drain(queue)
    assert in_flight(queue) == 0


def test_rows_that_may_be_drawn_again_are_in_flight_again(queue):
    drain(queue)
    queue.mark_update(queue.rows[:6])
    assert in_flight(queue) == 6
    with pytest.raises(RateLimited):
        rewritten(queue, 19)
    drain(queue)
    assert in_flight(queue) == 0


def test_a_state_and_emptying_begin_with_what_is_there(queue):
    state = queue.state_dict()
    queue.remove(queue.rows)
    queue.load_state_dict(state)
    assert in_flight(queue) == 16
    queue.empty()
    assert in_flight(queue) == 0
    rewritten(queue, 24)


def test_samples_wait_no_longer_than_until_rows_are_there(queue):
    queue.limit(MaxInFlight(24), MinSize(8))
    queue.remove(queue.rows)
    with pytest.raises(RateLimited, match="Insert 8 more rows"):
        queue.sample(timeout=0)
    rewritten(queue, 8)
    queue.sample(timeout=0)


def test_a_ratio_goes_on_after_rows_were_removed(queue):
    queue.limit(SamplesPerInsert(2, min_size=8, tolerance=0.5))
    queue.remove(queue.rows)
    for _ in range(40):
        assert admitted(lambda: rewritten(queue, 4)) or admitted(lambda: queue.sample(timeout=0))
    counts = queue.stats()
    assert counts["limit_inserts"] > 20 < counts["limit_samples"]


def test_the_refusal_of_a_sample_does_not_ask_for_what_is_refused(queue):
    index = queue.sampler._attached()
    rewritten(queue, 8)
    for key in (1, 2):
        index.core.claim(key, 24)  # another consumer reads them all
    with pytest.raises(RateLimited, match="Wait until those who read") as refused:
        queue.sample(timeout=0)
    assert "Insert" not in str(refused.value)


# ---- processes that die --------------------------------------------------------------------------------------------------

OPEN = """
import os, signal, torch
from engram import ReplayBuffer, ConsumingSampler
rb = ReplayBuffer.open(folder, batch_size=8, sampler=ConsumingSampler(1))
"""
PREPAID = OPEN + "rb.storage.memory.core.prepay_inserts(16)\nos.kill(os.getpid(), signal.SIGKILL)"
READING = OPEN + "rb.sampler._attached().core.claim(1, 16)\nos.kill(os.getpid(), signal.SIGKILL)"
WRITING = OPEN + "print('ready', flush=True)\nwhile True: rb.extend(torch.arange(4))"


@pytest.fixture
def shared(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "queue"), sampler=ConsumingSampler(1), batch_size=8
    )
    rb.extend(torch.arange(16))
    rb.limit(MaxInFlight(16))
    yield rb
    rb.close()


def test_rows_that_a_killed_writer_was_to_write_give_it_back(shared):
    shared.sample(), shared.sample()
    assert start(PREPAID, folder=str(shared.storage.scratch_dir)).wait() == -signal.SIGKILL
    assert in_flight(shared) == 16
    shared.extend(torch.arange(16), timeout=60)
    assert in_flight(shared) == 16


def test_rows_that_a_killed_consumer_was_reading_give_it_back(shared):
    assert start(READING, folder=str(shared.storage.scratch_dir)).wait() == -signal.SIGKILL
    assert in_flight(shared) == 16
    shared.extend(torch.arange(16), timeout=60)
    assert in_flight(shared) == 16


def test_writers_that_are_killed_anywhere_leave_room_for_what_is_free(shared):
    """What is in flight in the end are the rows that can be drawn."""
    for wait in (0.0, 0.003, 0.007):
        program = start(WRITING, folder=str(shared.storage.scratch_dir))
        wait_for(lambda: program.out)
        until = time.monotonic() + wait
        while time.monotonic() < until:
            admitted(lambda: shared.sample(timeout=0))
        program.kill()
        assert program.wait() == -signal.SIGKILL
    shared.storage.memory.core.reclaim()
    shared.limit(MaxInFlight(16))  # counted again
    drawable = shared.sampler.drawable(shared.storage)
    assert in_flight(shared) == drawable
    if drawable < 16:
        shared.extend(torch.arange(16 - drawable), timeout=60)
    assert in_flight(shared) == 16


def test_a_limit_that_is_set_again_counts_again(shared):
    core = shared.storage.memory.core
    core.consumed(5)  # as one that was killed may have left it
    assert in_flight(shared) == 11
    shared.limit(MaxInFlight(16))
    assert in_flight(shared) == 16
    assert shared.stats()["limit_inserts"] == 0
