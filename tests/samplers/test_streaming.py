"""Windows that are complete come first, once each, the oldest first."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from tests.ranks.jobs import checkpointer, done, job
from tests.samplers.slicing import seeded
from tests.store.processes import METHODS, Child, context


def buffer(length=3, *, capacity=24, lanes=1, storage=None, **options):
    sampler = StreamingSliceSampler(slice_len=length, traj_key="episode")
    storage = LazyTensorStorage(capacity * lanes, lanes=lanes) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=sampler, generator=seeded(), **options)


def rows(first, n, episode=0):
    return {"time": np.arange(first, first + n), "episode": np.full(n, episode)}


class Queue:
    """Windows as they are completed, in a list: the oracle."""

    def __init__(self, lanes, capacity, length):
        self.capacity, self.length = capacity, length
        self.lanes = [[] for _ in range(lanes)]
        self.open = [[] for _ in range(lanes)]
        self.episodes = [None] * lanes
        self.queue = []

    def write(self, lane, time, episode):
        self.lanes[lane].append(time)
        if episode != self.episodes[lane]:
            self.open[lane] = []
        self.episodes[lane] = episode
        self.open[lane].append(time)
        if len(self.open[lane]) == self.length:
            self.queue.append((lane, self.open[lane]))
            self.open[lane] = []

    def take(self, n):
        stored = [set(times[-self.capacity :]) for times in self.lanes]
        whole = [window for lane, window in self.queue if set(window) <= stored[lane]]
        self.queue = [(lane, window) for lane, window in self.queue if window in whole[n:]]
        return whole[:n]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 1), st.booleans(), st.integers(1, 7)), st.integers(1, 4), st.none()),
        min_size=8,
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_complete_windows_come_first_and_once(operations, length):
    rb, queue = buffer(length, capacity=12, lanes=2), Queue(2, 12, length)
    time = episodes = 0
    for operation in operations:
        if isinstance(operation, tuple):
            lane, new, n = operation
            episodes += new
            episode = 2 * episodes + lane
            rb.extend(rows(time, n, episode), lane=lane)
            rb.can_sample(length)  # from the first write on it knows where trajectories begin
            for step in range(time, time + n):
                queue.write(lane, step, episode)
            time += n
        elif operation is None:
            rb.sampler.load_state_dict(rb.sampler.state_dict())
        elif rb.can_sample(operation * length):
            expected = queue.take(operation)
            drawn = rb.sample(operation * length)["time"].reshape(-1, length).tolist()
            assert drawn[: len(expected)] == expected


def test_the_rest_of_a_batch_is_drawn_as_without():
    rb = buffer()
    rb.extend(rows(0, 20))
    drawn = rb.sample(24)["time"].reshape(-1, 3)
    assert drawn[:6].tolist() == np.arange(18).reshape(6, 3).tolist()
    starts = torch.cat([rb.sample(3 * 50)["time"].reshape(-1, 3)[:, 0] for _ in range(36)])
    counts = torch.bincount(starts, minlength=18)
    assert len(counts) == 18  # every window, also one that lies across two of the queue
    assert ((counts - 100.0) ** 2 / 100).sum() < 42.3  # chi-square with 17 degrees of freedom, p = 0.0006


def test_marks_are_those_of_a_slice_sampler():
    data = TensorDict(
        {"episode": torch.zeros(7, dtype=torch.int64), "is_init": torch.zeros(7, 1, dtype=torch.bool)}, [7]
    )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=StreamingSliceSampler(slice_len=3), batch_size=6)
    rb.extend(data)
    batch = rb.sample()
    assert batch["index"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert batch["is_init"].flatten().tolist() == [True, False, False] * 2


def test_columns_have_windows_of_their_own():
    sampler = StreamingSliceSampler(slice_len=2, traj_key="episode")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2), sampler=sampler, generator=seeded())
    time = torch.arange(10).reshape(2, 5)
    rb.extend(TensorDict({"time": time, "episode": torch.zeros(2, 5, dtype=torch.int64)}, [2, 5]))
    assert rb.sample(8)["time"].reshape(-1, 2).tolist() == [[0, 1], [5, 6], [2, 3], [7, 8]]


def test_rows_that_are_replaced_or_edited_are_no_new_ones():
    rb = buffer()
    rb.extend(rows(0, 6))
    assert rb.sample(3)["time"].tolist() == [0, 1, 2]
    rb[1] = {"time": 100, "episode": 0}
    rb.extend(rows(6, 1))
    assert rb.sample(3)["time"].tolist() == [3, 4, 5]
    rb.extend(rows(7, 2))
    assert rb.sample(3)["time"].tolist() == [6, 7, 8]


def test_after_empty_it_begins_again():
    rb = buffer()
    rb.extend(rows(0, 8))
    rb.sample(3)
    rb.empty()
    rb.extend(rows(50, 4))
    assert rb.sample(6)["time"].tolist()[:3] == [50, 51, 52]


@pytest.mark.parametrize("pickled", [False, True])
def test_states_go_on_where_they_were(tmp_path, pickled):
    rb = buffer()
    rb.extend(rows(0, 40))  # of 24 rows: it begins with the oldest
    assert rb.sample(3)["time"].tolist() == [16, 17, 18]
    rb.extend(rows(40, 4))  # the next window loses a step, and is dropped
    if pickled:
        other = pickle.loads(pickle.dumps(rb))
    else:
        rb.dumps(tmp_path)
        other = buffer()
        other.loads(tmp_path)
    for one in (rb, other):
        assert one.sample(6)["time"].tolist() == [22, 23, 24, 25, 26, 27]
        one.extend(rows(44, 2))
        assert one.sample(18)["time"].tolist() == list(range(28, 46))


def _drawn(rb, answers):
    answers.put([rb.sample(3)["time"].tolist() for _ in range(2)])
    rb.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_gets_the_buffer_goes_on_where_it_was(tmp_path, method):
    rb = buffer(storage=LazyMemmapStorage(24, scratch_dir=tmp_path / "store"))
    rb.extend(rows(0, 9))
    assert rb.sample(3)["time"].tolist() == [0, 1, 2]
    answers = context(method).SimpleQueue()
    child = Child(_drawn, rb, answers, method=method)
    child.join()
    assert answers.get() == [[3, 4, 5], [6, 7, 8]]
    assert [rb.sample(3)["time"].tolist() for _ in range(2)] == [[3, 4, 5], [6, 7, 8]]
    rb.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks_every_window_comes(tmp_path, ranks):
    """Two ranks have drawn some windows: elsewhere rows are others, and all windows are still to come."""

    def saved(together, rank):
        rb = buffer(lanes=2)
        for episode in range(3):
            first = 1000 * rank + 100 * episode
            rb.extend({**rows(first, 6, 10 * rank + episode), "done": np.arange(6) == 5}, lane=episode % 2)
        rb.sample(9)
        checkpointer(tmp_path, rb, together).save(1)

    def loaded(together, _):
        rb = buffer(lanes=2)
        checkpointer(tmp_path, rb, together).restore()
        return [tuple(window) for window in rb.sample(len(rb))["time"].reshape(-1, 3).tolist()]

    done(job(2, saved))
    found = [window for part in done(job(ranks, loaded)) for window in part]
    firsts = [1000 * rank + 100 * episode + step for rank in range(2) for episode in range(3) for step in (0, 3)]
    assert sorted(found) == [(first, first + 1, first + 2) for first in firsts]


def test_a_dump_of_another_capacity_begins_again(tmp_path):
    rb = buffer()
    rb.extend(rows(0, 20))
    assert rb.sample(6)["time"].tolist() == list(range(6))
    rb.dumps(tmp_path)
    other = buffer(capacity=48)
    other.loads(tmp_path, convert=True)
    assert other.sample(18)["time"].tolist() == list(range(18))


def test_a_checkpoint_of_another_slice_sampler_is_converted(tmp_path):
    sampler = SliceSampler(slice_len=3, traj_key="episode")
    rb, plain = buffer(), ReplayBuffer(storage=LazyTensorStorage(24), sampler=sampler)
    plain.extend(rows(0, 9))
    plain.dumps(tmp_path)
    rb.loads(tmp_path, convert=True)
    assert rb.sample(9)["time"].tolist() == list(range(9))
    with pytest.raises(ValueError, match="clock"):
        rb.sampler.load_state_dict({"clock": -1, "next": torch.zeros(1, dtype=torch.int64)})


def test_a_state_of_later_rows_begins_again():
    rb, other = buffer(), buffer()
    rb.extend(rows(0, 20))
    rb.sample(9)
    other.extend(rows(0, 6))
    other.sampler.load_state_dict(rb.sampler.state_dict())
    assert other.sample(6)["time"].tolist() == list(range(6))


@pytest.mark.parametrize("written", [20, 30])
def test_a_state_of_other_rows_begins_again(written):
    """Although there are as many, or more: what another buffer has drawn is still to come here."""
    rb, other = buffer(capacity=48), buffer(capacity=48)
    rb.extend(rows(0, 20))
    assert rb.sample(18)["time"].tolist() == list(range(18))
    state = rb.sampler.state_dict()
    other.extend(rows(100, written))
    other.sampler.load_state_dict(state)
    assert other.sample(18)["time"].tolist() == list(range(100, 118))
    rb.sampler.load_state_dict({name: value for name, value in state.items() if name != "rows"})
    assert rb.sample(18)["time"].tolist() == list(range(18)), (
        "states of older versions do not say which rows they are of"
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_alone_goes_on_in_its_own_rows(shared):
    rb = buffer(capacity=48)
    rb.extend(rows(0, 9))
    rb.sample(3)
    state = rb.sampler.state_dict()
    assert rb.sample(3)["time"].tolist() == [3, 4, 5]
    if shared:
        rb.share()
    rb.extend(rows(9, 3))
    rb.sampler.load_state_dict(state)
    assert same(state, rb.sampler.state_dict())
    assert rb.sample(9)["time"].tolist() == list(range(3, 12))
    before = rb.sampler.state_dict()
    other = buffer(capacity=48)
    other.extend(rows(200, 12))
    rb.load_state_dict(other.state_dict())  # other rows in the same store
    rb.sampler.load_state_dict(before)
    assert rb.sample(12)["time"].tolist() == list(range(200, 212))
    rb.close()


def test_a_state_of_another_process_goes_on_in_its_directory(tmp_path):
    rb = buffer(storage=LazyMemmapStorage(24, scratch_dir=tmp_path / "store"))
    rb.extend(rows(0, 9))
    rb.sample(3)
    state = rb.sampler.state_dict()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    rb.sampler.load_state_dict(state)
    assert rb.sample(6)["time"].tolist() == list(range(3, 9))
    rb.close()


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_state_with_its_rows_goes_on(tmp_path, way):
    """Whatever the store was before, and also before anything is drawn."""
    rb = buffer()
    rb.extend(rows(0, 12))
    rb.sample(3)
    for _ in range(2):
        other = buffer()
        other.extend(rows(500, 21))
        if way == "dumps":
            rb.dumps(tmp_path)
            other.loads(tmp_path)
        else:
            other.load_state_dict(rb.state_dict())
        rb = other  # of which nothing was drawn
    rb.extend(rows(12, 3))
    assert rb.sample(12)["time"].tolist() == list(range(3, 15))


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
    )


def test_prefetched_batches_that_are_dropped_go_back():
    rb = buffer(batch_size=3, prefetch=2)
    rb.extend(rows(0, 12))
    assert rb.sample()["time"].tolist() == [0, 1, 2]
    rb._prefetching.wait()
    rb.set_storage(rb.storage)  # drops what is prefetched
    assert [rb.sample()["time"].tolist() for _ in range(3)] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    rb.shutdown()


def drawn_in_a_child(path):
    rb = ReplayBuffer.open(path)
    times = [rb.sample(3)["time"].tolist() for _ in range(3)]
    rb.close()
    return times


def test_every_process_has_a_queue_of_its_own(tmp_path):
    rb = buffer(storage=LazyMemmapStorage(24, scratch_dir=tmp_path / "store"))
    rb.extend(rows(0, 9))
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert rb.sample(3)["time"].tolist() == expected[0]
    assert drawn_in_a_child(tmp_path / "store") == expected
    assert rb.sample(6)["time"].tolist() == expected[1] + expected[2]
    rb.close()


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="replacement=True"):
        StreamingSliceSampler(slice_len=3, replacement=False)
    with pytest.raises(TypeError):
        StreamingSliceSampler(num_slices=3)
    with pytest.raises(ValueError, match="slice_len"):
        StreamingSliceSampler(slice_len=0)
    rb = buffer(30)
    rb.extend(rows(0, 24))
    with pytest.raises(ValueError, match="expected slice_len of at most 24"):
        rb.sample(30)
    assert not rb.can_sample(30)
    rb = buffer(3)
    rb.extend(rows(0, 9))
    with pytest.raises(RuntimeError, match="batch_size"):
        rb.sample(4)
