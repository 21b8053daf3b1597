"""The online queue: of each lane the newest window, once all its steps are newer than those that were taken."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler, WindowSpec
from tests.ranks.jobs import checkpointer, done, job
from tests.samplers.slicing import seeded

SPEC = WindowSpec(3)


def buffer(lanes=1, *, spec=SPEC, storage=None, **options):
    sampler = SliceSampler(window=spec, flat=False, online=True)
    storage = LazyTensorStorage(lanes * 24, lanes=lanes) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=sampler, generator=seeded(), **options)


class Lanes:
    """Steps of several lanes, written one by one, and what a queue takes of them: the oracle."""

    def __init__(self, rb, lanes, length):
        self.rb, self.length = rb, length
        self.steps = [[] for _ in range(lanes)]  # (time of the write, episode, step)
        self.taken = [-1] * lanes
        self.time = self.episodes = 0

    def write(self, lane, *, first):
        newest = self.steps[lane][-1] if self.steps[lane] else None
        if first or newest is None:
            self.episodes += 1
            step = (self.time, self.episodes, 0)
        else:
            step = (self.time, newest[1], newest[2] + 1)
        self.steps[lane].append(step)
        self.time += 1
        self.rb.extend({"time": [step[0]], "episode": [step[1]], "step": [step[2]]}, lane=lane)

    def take(self, n):
        """Times of the steps of the windows that come first."""
        windows = []
        for lane, steps in enumerate(self.steps):
            for end in range(len(steps), self.length - 1, -1):
                window = steps[end - self.length : end]
                if len({episode for _, episode, _ in window}) == 1:  # the newest
                    if window[0][0] > self.taken[lane]:
                        windows.append((lane, window))
                    break
        windows.sort(key=lambda found: -found[1][-1][0])
        for lane, window in windows[:n]:
            self.taken[lane] = window[-1][0]
        return [[time for time, _, _ in window] for _, window in windows[:n]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.tuples(st.integers(0, 2), st.booleans()), st.integers(1, 4)), min_size=8, max_size=60),
    st.integers(1, 3),
)
def test_the_newest_windows_come_first_and_once(operations, length):
    spec = WindowSpec(length)
    rb = buffer(3, spec=spec, storage=LazyTensorStorage(3 * 64, lanes=3))
    lanes = Lanes(rb, 3, length)
    for operation in operations:
        if isinstance(operation, tuple):
            lane, first = operation
            lanes.write(lane, first=first)
        elif rb.can_sample(operation):
            expected = lanes.take(operation)
            times = rb.sample(operation)["time"].tolist()
            assert times[: len(expected)] == expected
            written = [[t for t, _, _ in steps] for steps in lanes.steps]
            assert all(any(set(window) <= set(lane) for lane in written) for window in times)


def test_the_rest_of_a_batch_is_drawn_as_without():
    rb = buffer()
    rb.extend({"time": np.arange(20), "episode": np.zeros(20, int)})
    assert rb.sample(4)["time"][0].tolist() == [17, 18, 19]
    starts = np.concatenate([rb.sample(50)["time"][:, 0] for _ in range(20)])
    assert set(starts.tolist()) == set(range(18))


@pytest.mark.parametrize("padding", [0, 1])
def test_padding_and_burn_in_of_queued_windows(padding):
    spec = WindowSpec(2, burn_in=1, padding=padding)
    rb = buffer(spec=spec)
    rb.extend({"time": np.arange(3), "episode": np.zeros(3, int)})
    batch, info = rb.sample(1, return_info=True)
    assert batch["time"].tolist() == [[0, 1, 2]]
    rb.extend({"time": np.arange(3, 5), "episode": np.ones(2, int)})
    batch, info = rb.sample(1, return_info=True)
    if padding:  # an episode of two steps is complete with one that is repeated
        assert batch["time"].tolist() == [[3, 3, 4]]
        assert info["validity_mask"].tolist() == [[False, True, True]]
    else:
        assert batch["time"].tolist() == [[0, 1, 2]]  # drawn, as there is no other


def test_states_copies_and_prefetched_batches():
    data = {"time": np.arange(9), "episode": np.repeat([0, 1], [5, 4])}
    rb, other = buffer(2), buffer(2)
    for one in (rb, other):
        for lane in (0, 1):
            one.extend({**data, "lane": np.full(9, lane)}, lane=lane)
    assert rb.sample(1)["time"].tolist() == [[6, 7, 8]]
    other.load_state_dict(rb.state_dict())
    copy = pickle.loads(pickle.dumps(rb))
    batches = [[one.sample(3) for _ in range(5)] for one in (rb, other, copy)]
    for one in batches:
        assert one[0]["time"][0].tolist() == [6, 7, 8]
        assert one[0]["lane"][0, 0] == 0  # the first batch had lane 1, which was written last
        assert all(str(batch) == str(known) for batch, known in zip(one, batches[0], strict=True))
    # A state of other rows begins a queue again.
    fresh = buffer(2)
    fresh.extend(data, lane=0)
    fresh.sampler.load_state_dict(rb.sampler.state_dict())
    assert fresh.sample(1)["time"].tolist() == [[6, 7, 8]]
    with pytest.raises(ValueError, match="taken: expected numbers from -1 to below the clock"):
        rb.sampler.load_state_dict({**rb.sampler.state_dict(), "clock": 1})


def test_prefetched_batches_that_are_dropped_go_back_to_the_queue():
    rb = buffer(4, batch_size=1, prefetch=2)
    for lane in range(4):
        rb.extend({"lane": np.full(3, lane), "episode": np.zeros(3, int)}, lane=lane)
    assert rb.sample()["lane"][0, 0] == 3
    rb._prefetching.wait()  # lanes 2 and 1 are drawn
    rb.set_storage(rb.storage)  # drops what is prefetched
    assert [int(rb.sample()["lane"][0, 0]) for _ in range(3)] == [2, 1, 0]
    rb.shutdown()


def test_every_process_and_every_opening_has_a_queue_of_its_own(tmp_path):
    rb = buffer(storage=LazyMemmapStorage(24, scratch_dir=tmp_path / "store"))
    rb.extend({"time": np.arange(9), "episode": np.repeat([0, 1], [5, 4])})
    assert rb.sample(1)["time"].tolist() == [[6, 7, 8]]
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    assert rb.sampler.online
    assert rb.sample(1)["time"].tolist() == [[6, 7, 8]]
    rb.empty()
    rb.extend({"time": np.arange(3), "episode": np.zeros(3, int)})
    assert rb.sample(1)["time"].tolist() == [[0, 1, 2]]
    rb.close()


def test_a_checkpoint_goes_into_a_buffer_with_or_without_a_queue(tmp_path):
    rb = buffer()
    rb.extend({"time": np.arange(9), "episode": np.repeat([0, 1], [5, 4])})
    rb.sample(1)
    rb.dumps(tmp_path / "queued")
    plain = ReplayBuffer(
        storage=LazyTensorStorage(24), sampler=SliceSampler(window=SPEC, flat=False, traj_key="episode")
    )
    plain.loads(tmp_path / "queued")
    assert plain.sampler.state_dict() == {}
    plain.dumps(tmp_path / "plain")
    rb.loads(tmp_path / "plain")
    assert rb.sample(1)["time"].tolist() == [[6, 7, 8]]  # the queue begins again


def test_on_other_ranks_it_begins_again(tmp_path):
    """The clock there may be that of the state, though other rows are in its lanes."""

    def saved(together, rank):
        rb = buffer(2)
        for lane, first in ((1, 0), (0, 100), (1, 200)) if rank == 0 else ():
            done = np.arange(6) == 5
            rb.extend({"time": np.arange(first, first + 6), "episode": np.full(6, first), "done": done}, lane=lane)
        if rank == 0:
            assert sorted(rb.sample(2)["time"][:, 0].tolist()) == [103, 203]
        checkpointer(tmp_path, rb, together).save(1)

    def loaded(together, _):
        rb = buffer(2)
        checkpointer(tmp_path, rb, together).restore()
        lanes = rb[:]["time"].split(list(rb.storage.extent().filled))
        newest = [lane[-1] for lane in lanes]
        return newest, rb.sample(2)["time"].tolist()

    done(job(2, saved))
    ((newest, windows),) = done(job(1, loaded))
    assert sorted(window[-1] for window in windows) == sorted(newest)
