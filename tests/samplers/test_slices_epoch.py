"""Epochs of slice samplers: every trajectory once, in new orders."""

from collections import Counter

import pytest
import torch

from engram import LazyTensorStorage, NoSampleable, ReplayBuffer, SliceSampler, SliceSamplerWithoutReplacement
from tests.samplers.slicing import buffer, numbers, steps, windows
from tests.statistics_of import assert_uniform
from tests.twins import bits

# ---- passes --------------------------------------------------------------------------------------------------------------


def test_a_pass_takes_every_trajectory_once():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=2), steps([2, 5, 3, 9, 4]), batch_size=4)
    for _ in range(5):
        batches = [[number for _, number, _ in windows(batch, 2)] for batch in rb]
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert sorted(sum(batches, [])) == list(range(5))
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=2), steps([2, 5, 3, 9, 4]))
    assert Counter(number for _ in range(3 * 20) for number in numbers(rb, 4, 2)) == dict.fromkeys(range(5), 20)
    starts = Counter()
    for _ in range(400):
        rb.sampler.load_state_dict({"key": 0, "version": 0, "visited": 0, "count": 0, "clock": 0, "ran_out": False})
        starts.update(first for _, number, first in windows(rb.sample(10), 2) if number == 3)
    assert len(starts) == 8
    assert_uniform(starts.values())


def test_orders_of_a_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([2, 1, 3]))
    orders = Counter(tuple(numbers(rb, 3, 1)) for _ in range(1200))
    assert len(orders) == 6
    assert_uniform(orders.values())
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, shuffle=False), steps([2, 1, 3]))
    assert [numbers(rb, 2, 1) for _ in range(4)] == [[0, 1], [2], [0, 1], [2]]


def test_without_shuffling_the_oldest_trajectory_comes_first():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)
    for episode in range(6):  # the last two lie where the first two were
        rb.extend({"episode": torch.full((2,), episode), "step": torch.arange(2) + 2 * episode})
    assert [rb.sample()["step"].tolist() for _ in range(2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_what_a_write_adds_joins_the_next_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, shuffle=False), steps([2, 1, 3]), capacity=20)
    assert numbers(rb, 2, 1) == [0, 1]
    rb.extend(steps([2], first=3))
    rb.set_at_("step", torch.tensor([0]), [1])
    assert numbers(rb, 3, 1) == [2]
    assert rb.sampler.ran_out
    assert numbers(rb, 4, 1) == [0, 1, 2, 3]
    assert rb.sampler.ran_out
    assert numbers(rb, 3, 1) == [0, 1, 2]
    rb.empty()
    rb.extend(steps([1, 1], first=7))
    assert numbers(rb, 1, 1) == [7]


def test_too_short_ones_shorten_their_batch():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=3, shuffle=False), steps([3, 1, 2, 4, 2, 2]))
    assert numbers(rb, 6, 3) == [0]
    assert numbers(rb, 6, 3) == [3]
    with pytest.raises(NoSampleable, match="in every batch of an epoch"):
        rb.sample(6)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_window_that_moves_in_the_last_batch_begins_no_pass(drop_last):
    sampler = SliceSamplerWithoutReplacement(slice_len=1, drop_last=drop_last)
    rb = buffer(sampler, steps([1] * 6), batch_size=3)
    first = set(rb.sample()["index"].flatten().tolist())
    words, row = rb.storage.memory.control_memory[1].view(torch.int64), min({*range(6)} - first)
    words[row] -= 1  # being written, by somebody who began before the pass did
    second = rb.sample()["index"].flatten().tolist()
    words[row] += 1
    assert len(second) == 3
    assert row not in second
    assert sampler.ran_out
    assert sampler.state_dict()["visited"] == 6


def test_drop_last_begins_a_pass_where_the_rest_is_less_than_a_batch():
    """Batches of several sizes in one pass."""
    sampler = SliceSamplerWithoutReplacement(slice_len=2, drop_last=True)
    rb = buffer(sampler, steps([4] * 5), batch_size=4)
    draws = [sampler.sample(rb.storage, size)[0][0] for size in (4, 2, 6)]
    assert [len(rows) for rows in draws] == [4, 2, 6]
    assert sampler.ran_out


def test_drop_last():
    sampler = SliceSamplerWithoutReplacement(slice_len=1, drop_last=True)
    rb = buffer(sampler, steps([1] * 7), batch_size=3)
    for _ in range(3):
        batches = [len(batch) for batch in rb]
        assert batches == [3, 3]
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True), steps([1] * 7), batch_size=8)
    with pytest.raises(ValueError, match="drop_last: expected at least 8 trajectories, got 7"):
        rb.sample()
    with pytest.raises(ValueError, match="drop_last needs"):
        buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True))
    assert [len(b) for b in buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([1] * 7), batch_size=3)] == [
        3,
        3,
        1,
    ]


@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_drop_last_skips_a_rest_that_a_larger_batch_finds():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1, drop_last=True), steps([1] * 7), batch_size=3)
    assert [len(rb.sample(n)) for n in (3, 5)] == [3, 5]
    assert rb.sampler.ran_out


def test_a_draw_from_nothing_ends_no_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([2]))
    rb.empty()
    state = rb.sampler.state_dict()
    with pytest.raises(NoSampleable):
        rb.sample(1)
    assert rb.sampler.state_dict() == state
    assert not rb.sampler.ran_out


def test_the_state_of_a_pass():
    rb = buffer(SliceSamplerWithoutReplacement(slice_len=1), steps([1] * 9))
    first = numbers(rb, 4, 1)
    state = rb.sampler.state_dict()
    assert all(isinstance(value, int | bool) for name, value in state.items() if name != "known")
    assert state["known"].shape == (9, 2)  # of each trajectory the last row, and its write
    rest = numbers(rb, 5, 1)
    rb.sampler.load_state_dict(state)
    again = numbers(rb, 5, 1)
    assert again == rest
    assert sorted(first + rest) == list(range(9))
    for bad, kind in [({}, KeyError), ({**state, "more": 1}, KeyError), ({**state, "visited": 99}, ValueError)]:
        before = bits(rb.sampler.state_dict())
        with pytest.raises(kind):
            rb.sampler.load_state_dict(bad)
        assert bits(rb.sampler.state_dict()) == before
    assert SliceSampler(slice_len=1).state_dict() == {}
