"""Calls that wait for the limits of a store, in the threads of one process."""

import gc
import pickle
import re
import signal
import threading
import time
import weakref

import pytest
import torch

from engram import (
    ConsumingSampler,
    DeviceLoader,
    LazyTensorStorage,
    MaxInFlight,
    MinSize,
    NoSampleable,
    RateLimited,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.buffer import prefetch
from tests.limits.test_rules import UsingUp
from tests.ranks.processes import wait_for

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size=")

LONG_S = 300  # never over


def as_it_is(x):
    return x


def buffer(**more):
    return ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=10, **more)


def waiting(rb, side, n=1):
    wait_for(lambda: rb.stats().get(f"{side}s_waiting") == n)


class Call(threading.Thread):
    """A call in a thread of its own: what it returned or raised."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call = call
        self.start()

    def run(self):
        try:
            self._said = self._call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self._said = error

    def said(self):
        self.join(60)
        assert not self.is_alive(), "it waits still"
        return self._said


def test_a_sample_waits_for_rows():
    rb = buffer().limit(MinSize(20))
    rb.extend(torch.arange(19))
    call = Call(lambda: rb.sample(timeout=LONG_S))
    waiting(rb, "sample")
    rb.add(torch.tensor(19))
    assert len(call.said()) == 10
    assert rb.stats()["samples_waiting"] == 0


def test_a_sample_waits_for_the_first_row_ever():
    rb = buffer().limit(MinSize(1))
    call = Call(lambda: rb.sample(timeout=LONG_S))
    rb.extend(torch.arange(3))
    assert len(call.said()) == 10
    with pytest.raises(RateLimited, match="does not exist yet"):
        buffer().limit(MinSize(1)).sample(timeout=0.05)
    with pytest.raises(NoSampleable):
        buffer().sample(timeout=0.05)


def test_an_insert_waits_for_samples():
    rb = buffer().limit(SamplesPerInsert(1, min_size=20, tolerance=0.5))
    rb.extend(torch.arange(30))
    rows = Call(lambda: rb.extend(torch.arange(5), timeout=LONG_S))
    waiting(rb, "insert")
    rb.sample()
    assert rows.said().tolist() == [*range(30, 35)]
    one = Call(lambda: rb.add(torch.tensor(35), timeout=LONG_S))
    rb.sample()
    assert one.said() == 35


def test_what_is_refused_says_what_would_help():
    rb = buffer().limit(SamplesPerInsert(2, min_size=10, tolerance=0.5))
    rb.extend(torch.arange(9))
    with pytest.raises(RateLimited, match=re.escape("9 rows are live")) as few:
        rb.sample(timeout=0)
    assert "Insert 1 more row" in str(few.value)
    rb.extend(torch.arange(6))
    with pytest.raises(RateLimited, match=r"^extend: 3 rows were not admitted") as many:
        rb.extend(torch.arange(3), timeout=0)
    assert (
        "the level is 30, to stay from 10 to 30; 15 rows were inserted and 0 sampled since. Sample 6 more rows"
        in str(many.value)
    )
    assert isinstance(many.value, TimeoutError)
    assert rb.sample(6).numel() == 6
    rb.extend(torch.arange(3), timeout=0)
    assert len(rb) == rb.write_count == 18


def test_a_timeout_is_kept():
    rb = buffer().limit(MinSize(500))
    rb.extend(torch.arange(3))
    began, cpu = time.monotonic(), time.thread_time()
    with pytest.raises(RateLimited):
        rb.sample(timeout=0.4)
    assert time.monotonic() - began >= 0.4
    assert time.thread_time() - cpu < 0.2
    stats = rb.stats()
    assert stats["sample_waits"] == 1
    assert 0 < stats["sample_waited_s"] < 60
    assert stats["samples_waiting"] == 0


@pytest.mark.parametrize("change", [MinSize(3), None, SamplesPerInsert(1, min_size=2)])
def test_another_limit_counts_for_what_waits(change):
    rb = buffer().limit(MinSize(500))
    rb.extend(torch.arange(3))
    call = Call(lambda: rb.sample(timeout=LONG_S))
    waiting(rb, "sample")
    rb.limit(change)
    assert len(call.said()) == 10


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("end", ["close", "shutdown"])
def test_the_end_of_a_buffer_ends_what_waits(end, depth):
    rb = buffer(prefetch=depth).limit(MinSize(500))
    rb.extend(torch.arange(3))
    other = ReplayBuffer(storage=rb.storage, batch_size=10)
    calls = [Call(lambda: rb.sample(timeout=LONG_S)), Call(lambda: other.sample(timeout=LONG_S))]
    waiting(other, "sample", 2)
    getattr(rb, end)()
    said = calls[0].said()
    assert isinstance(said, RuntimeError), said
    assert re.search("clos|shut", str(said))
    other.limit(None)
    assert len(calls[1].said()) == 10


def test_the_end_of_a_buffer_ends_writes_that_wait():
    rb = buffer().limit(SamplesPerInsert(1, min_size=5, tolerance=0))
    rb.extend(torch.arange(20))
    other = ReplayBuffer(storage=rb.storage)
    call = Call(lambda: rb.add(torch.tensor(1), timeout=LONG_S))
    waiting(other, "insert")
    rb.close()
    assert "closed" in str(call.said())
    assert len(other) == 20


def test_a_signal_ends_a_wait():
    class Enough(Exception):
        pass

    def ring(*_):
        raise Enough

    rb = buffer().limit(MinSize(500))
    rb.extend(torch.arange(3))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            rb.sample(timeout=LONG_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rb.stats()["samples_waiting"] == 0


def test_rows_are_given_back_if_they_are_not_written_or_drawn():
    rb = buffer().limit(SamplesPerInsert(1, min_size=5, tolerance=1))
    rb.extend(torch.arange(5))
    before = rb.stats()
    with pytest.raises(RuntimeError):
        rb.extend(torch.zeros(3, 2))
    rb.append_transform(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rb.sample(5)
    after = rb.stats()
    assert [after[f"limit_{name}"] for name in ("level", "inserts", "samples")] == [5, 5, 0]
    assert before["limit_level"] == 5


def test_emptying_begins_again():
    rb = buffer().limit(SamplesPerInsert(1, min_size=5, tolerance=0))
    rb.extend(torch.arange(30))
    rb.empty()
    assert rb.stats()["limit_inserts"] == 0
    with pytest.raises(RateLimited):
        rb.sample(1, timeout=0)
    rb.extend(torch.arange(30), timeout=0)
    assert len(rb.sample(10, timeout=0)) == 10


def test_a_load_begins_in_the_centre():
    rb = buffer().limit(SamplesPerInsert(2, min_size=5, tolerance=0))
    rb.extend(torch.arange(30))
    state = rb.state_dict()
    rb.sample(50)
    rb.load_state_dict(state)
    assert rb.stats()["limit_level"] == 10
    assert rb.limits == (SamplesPerInsert(2, min_size=5, tolerance=0),)


def test_rows_in_flight_wait_until_they_are_used_up():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=UsingUp(), batch_size=4).limit(MaxInFlight(10))
    rb.extend(torch.arange(10), timeout=0)
    with pytest.raises(RateLimited, match="10 are in flight"):
        rb.add(torch.tensor(1), timeout=0)
    call = Call(lambda: rb.extend(torch.arange(4), timeout=LONG_S))
    waiting(rb, "insert")
    rb.storage.store.core.consumed(3)
    waiting(rb, "insert")
    rb.storage.store.core.consumed(1)
    assert len(call.said()) == 4
    assert rb.stats()["limit_in_flight"] == 10


def test_a_queue_hands_each_row_out_once():
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sampler=ConsumingSampler(), batch_size=4).limit(MaxInFlight(12))
    taken = [Call(lambda: sum((rb.sample(timeout=LONG_S).tolist() for _ in range(25)), [])) for _ in range(2)]
    for first in range(0, 200, 4):
        rb.extend(torch.arange(first, first + 4), timeout=LONG_S)
        assert rb.stats()["limit_in_flight"] <= 12
    assert sorted(sum((call.said() for call in taken), [])) == [*range(200)]
    assert rb.stats()["limit_in_flight"] == 0


def test_rows_that_are_overwritten_before_they_are_used_up_are_in_flight_no_longer():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=ConsumingSampler(), batch_size=4).limit(MaxInFlight(12))
    for first in range(0, 40, 4):
        rb.extend(torch.arange(first, first + 4), timeout=0)
    assert rb.stats()["limit_in_flight"] == 8
    state = rb.state_dict()
    rb.sample()
    assert rb.stats()["limit_in_flight"] == 4
    rb.load_state_dict(state)
    assert rb.stats()["limit_in_flight"] == 8


def test_writers_that_choose_rows_are_limited_too():
    from tensordict import TensorDict

    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="r"), batch_size=4
    )
    rb.limit(SamplesPerInsert(1, min_size=4, tolerance=0))
    rb.extend(TensorDict({"r": torch.arange(8.0)}, [8]))
    call = Call(lambda: rb.extend(TensorDict({"r": torch.full((2,), 9.0)}, [2]), timeout=LONG_S))
    waiting(rb, "insert")
    rb.sample()
    assert len(call.said()) == 2
    assert rb.stats()["limit_inserts"] == 10


# ---- batches ahead -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["caller", "threads"])
def who(request, monkeypatch):
    """Who makes batches."""
    if request.param == "threads":
        monkeypatch.setattr(prefetch.Prefetcher, "slow_s", -1.0)
        monkeypatch.setattr(prefetch.Prefetcher, "slow_in_a_row", 1)
    return request.param


SAMPLERS = [None, SamplerWithoutReplacement]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_ahead_count_when_they_are_drawn(who, sampler):
    rb = buffer(prefetch=3, sampler=sampler, transform=as_it_is).limit(SamplesPerInsert(1, min_size=100, tolerance=0.2))
    rb.extend(torch.arange(100))
    assert [len(rb.sample()) for _ in range(2)] == [10, 10]  # the level is 80
    with pytest.raises(RateLimited):
        rb.sample(timeout=0.05)
    assert rb.stats()["limit_samples"] == 20
    for step in range(5):  # writes of the same buffer do not wait for the batches that wait for them
        rb.extend(torch.arange(10), timeout=LONG_S)
        assert len(rb.sample(timeout=LONG_S)) == 10, step
    assert rb.stats()["limit_samples"] <= 70 + 20
    rb.close()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_thread_waits_while_the_learner_writes(who, sampler):
    rb = buffer(prefetch=2, sampler=sampler, transform=as_it_is).limit(SamplesPerInsert(2, min_size=50, tolerance=0))
    rb.extend(torch.arange(50))
    got = Call(lambda: [len(rb.sample(timeout=LONG_S)) for _ in range(50)])
    wrote = Call(lambda: [len(rb.extend(torch.arange(5), timeout=LONG_S)) for _ in range(60)])
    sizes = got.said()
    rb.limit(None)
    assert wrote.said() == [5] * 60
    rb.close()
    # An epoch is over the rows that were live when it began, an odd number of fives at times: its last batch is shorter.
    assert len(sizes) == 50
    assert set(sizes) <= ({10} if sampler is None else {5, 10})


def test_states_and_emptying_do_not_wait_for_the_limits(who, tmp_path):
    rb = buffer(prefetch=2, transform=as_it_is).limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    rb.extend(torch.arange(20))
    rb.sample(timeout=LONG_S)
    with pytest.raises(RateLimited):
        list(iter(lambda: len(rb.sample(timeout=0.05)), 0))
    state = rb.state_dict()
    rb.dumps(tmp_path / "dump")
    pickle.loads(pickle.dumps(rb)).close()
    rb.synchronize()
    rb.load_state_dict(state)
    rb.empty()
    rb.extend(torch.arange(40))
    assert len(rb.sample(timeout=LONG_S)) == 10
    rb.close()


def test_a_buffer_that_nothing_refers_to_ends_although_a_thread_waits(who):
    others = threading.enumerate()
    rb = buffer(prefetch=2, transform=as_it_is).limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    rb.extend(torch.arange(20))
    for _ in range(4):
        try:
            rb.sample(timeout=0.02)
        except RateLimited:
            break
    threads = [it for it in threading.enumerate() if it not in others and it.name.startswith("engram-prefetch")]
    known = weakref.ref(rb.storage)
    del rb
    gc.collect()
    wait_for(lambda: gc.collect() is not None and known() is None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_iteration_waits():
    rb = buffer(prefetch=1).limit(SamplesPerInsert(1, min_size=10, tolerance=0))
    rb.extend(torch.arange(10))
    batches = iter(rb)
    assert len(next(batches)) == 10
    call = Call(lambda: next(batches))
    rb.extend(torch.arange(40))
    assert len(call.said()) == 10
    loader = iter(DeviceLoader(rb, "cpu"))
    assert len(next(loader)) == 10
    rb.close()


def test_a_write_over_used_rows_and_new_ones_is_admitted_as_a_whole():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=ConsumingSampler(1), batch_size=2)
    rb.extend({"a": torch.arange(10)})
    rb.limit(MaxInFlight(10))
    rb.sample()
    for _ in range(2):
        with pytest.raises(RateLimited):
            rb.extend({"a": torch.arange(10, 14)}, timeout=0)
    assert rb.write_count == 10
    assert rb.stats()["limit_in_flight"] == 8
    rb.sample()
    rb.extend({"a": torch.arange(10, 14)}, timeout=0)
    assert rb.write_count == 14
