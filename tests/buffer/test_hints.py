"""What is said once of data that is not what it seems: environments in one lane, rows that are drawn again, lanes that do not fit."""

import logging

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)


@pytest.fixture
def said(caplog):
    """Lines that were logged, from that level on."""
    caplog.set_level(logging.INFO, logger="engram")

    def lines(word, level=logging.WARNING):
        return [one.getMessage() for one in caplog.records if one.levelno >= level and word in one.getMessage()]

    return lines


def environments(n, steps, *, length=7, seed=0):
    """Batches of a vector of environments that end at different steps."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 3, generator=generator) * 10
    for t in range(steps):
        done = (t + 3 * torch.arange(n)) % length == length - 1
        yield {"obs": obs, "done": done.unsqueeze(-1), "reward": torch.randn(n, generator=generator)}
        obs = obs + 0.1 * torch.randn(n, 3, generator=generator)


def windows():
    return SliceSampler(slice_len=2, end_key="done")


@pytest.mark.parametrize("n", [2, 5, 16])
@pytest.mark.parametrize("sampler", [windows, lambda: NStep(RandomSampler(), 2, 0.9)])
@pytest.mark.parametrize("tensordicts", [False, True])
def test_batches_that_look_like_environments_are_said_once(said, n, sampler, tensordicts):
    kind = TensorDictReplayBuffer if tensordicts else ReplayBuffer
    rb = kind(storage=LazyTensorStorage(1_000), sampler=sampler())
    for batch in environments(n, 30):
        rb.extend(TensorDict(batch, [n]) if tensordicts else batch)
    (line,) = said("environments")
    assert f"lanes={n}" in line


def test_draws_of_single_rows_have_a_line_at_info(said):
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000))
    for batch in environments(4, 30):
        rb.extend(batch)
    assert not said("environments")
    assert len(said("environments", logging.INFO)) == 1


def observed(n, steps, *, jump, resets="stored"):
    """Environments whose observations differ less from one another than from one step to the next; most of their fields say nothing."""
    generator = torch.Generator().manual_seed(n)
    obs = torch.randn(n, 4, generator=generator)
    for t in range(steps):
        done = (t + 3 * torch.arange(n)) % 11 == 10
        after = obs + jump * torch.randn(1, 4, generator=generator) + 0.01 * torch.randn(n, 4, generator=generator)
        following = {"obs": after, "done": done.unsqueeze(-1), "reward": torch.ones(n)}
        yield {"obs": obs, "action": torch.randint(2, (n,), generator=generator), "next": following}
        fresh = torch.randn(n, 4, generator=generator)
        obs = torch.where(done.unsqueeze(-1), fresh, after) if resets == "same step" else after


@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("resets", ["stored", "same step"])
@pytest.mark.parametrize("tensordicts", [False, True])
def test_environments_whose_next_observations_are_those_of_the_next_batch(said, n, resets, tensordicts):
    kind = TensorDictReplayBuffer if tensordicts else ReplayBuffer
    rb = kind(storage=LazyTensorStorage(1_000), sampler=SliceSampler(slice_len=2))
    for batch in observed(n, 20, jump=30.0, resets=resets):
        rb.extend(TensorDict(batch, [n]) if tensordicts else batch)
    (line,) = said("environments")
    assert f"lanes={n}" in line


@pytest.mark.parametrize("n", [2, 8, 50])
@pytest.mark.parametrize("period", [1, 5])
def test_next_observations_within_a_batch_are_those_of_a_trajectory(said, n, period):
    """A trajectory that comes back to where it was a batch before looks like environments, but for its next observations."""
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=SliceSampler(slice_len=2))
    step = torch.arange(20 * n)
    noise = torch.randn(20 * n + 1, 3, generator=torch.Generator().manual_seed(n)) * 0.01
    obs = torch.sin(torch.arange(20 * n + 1) * (2 * torch.pi / n)).unsqueeze(-1) * 10 + noise
    rows = {"obs": obs[:-1], "next": {"obs": obs[1:], "done": (step % (37 // period) == 5).unsqueeze(-1)}}
    for first in range(0, 20 * n, n):
        cut = slice(first, first + n)
        rb.extend({"obs": rows["obs"][cut], "next": {key: value[cut] for key, value in rows["next"].items()}})
    assert not said("environments", logging.INFO)


def test_rows_without_an_order_are_not_taken_for_environments(said):
    for n in (2, 3, 8):
        rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=SliceSampler(slice_len=2))
        generator = torch.Generator().manual_seed(n)
        for _ in range(20):
            state, after = (torch.randint(2, (n, 1), generator=generator) for _ in range(2))
            done = torch.rand(n, 1, generator=generator) < 0.1
            rb.extend(
                {"state": state, "goal": torch.ones(n), "next": {"state": after, "goal": torch.ones(n), "done": done}}
            )
    assert not said("environments", logging.INFO)


def trajectory(rows):
    """Steps of one environment, with ends at odd places."""
    obs = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1)).mul(0.1).cumsum(0)
    return {"obs": obs, "done": (torch.arange(rows) % 37 == 36).unsqueeze(-1), "reward": torch.ones(rows)}


def noise(rows):
    return {"obs": torch.randn(rows, 3), "done": torch.rand(rows, 1) < 0.1}


@pytest.mark.parametrize("data", [trajectory, noise])
@pytest.mark.parametrize("n", [2, 8, 50])
def test_chunks_of_a_trajectory_and_of_a_dataset_are_not_taken_for_environments(said, data, n):
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=windows())
    rows = data(20 * n)
    for first in range(0, 20 * n, n):
        rb.extend({key: value[first : first + n] for key, value in rows.items()})
    assert not said("environments", logging.INFO)


def test_a_whole_dataset_single_rows_and_named_lanes_are_not_either(said):
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=windows())
    rb.extend(trajectory(500))
    for storage, lane in ((LazyTensorStorage(1_000, lanes=4), None), (LazyTensorStorage(1_000), 0)):
        rb = ReplayBuffer(storage=storage, sampler=windows())
        for batch in environments(4, 20):
            rb.extend(batch, lane=lane)
    rb = ReplayBuffer(storage=LazyTensorStorage(1_000), sampler=windows())
    for batch in environments(1, 20):
        rb.extend(batch)
    assert not said("environments", logging.INFO)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(100, 0.6, 0.4)])
def test_a_batch_that_has_rows_several_times_is_said_once(said, storage, prefetch, sampler):
    with ReplayBuffer(storage=storage(100), sampler=sampler(), batch_size=16, prefetch=prefetch) as rb:
        rb.extend([torch.zeros(3)])
        for _ in range(3):
            rb.sample()
        (line,) = said("several times")
        assert "16 rows has some of the 1 stored row several times" in line


def test_enough_rows_and_samplers_that_draw_each_once_say_nothing(said):
    for sampler, rows in ((RandomSampler(), 16), (SamplerWithoutReplacement(), 4), (windows(), 4)):
        rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=16)
        rb.extend({"a": torch.arange(rows), "done": torch.zeros(rows, 1, dtype=torch.bool)})
        rb.sample()
    assert not said("several times", logging.INFO)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_that_lanes_cannot_have_are_said_once(said, storage):
    with ReplayBuffer(storage=storage(100, lanes=8)) as rb:
        for _ in range(3):
            rb.extend(torch.zeros(8, 2))
        (line,) = said("lanes are")
        assert "100 rows in 8 lanes are 96" in line
    with ReplayBuffer(storage=storage(96, lanes=8)) as rb:
        rb.extend(torch.zeros(8, 2))
    assert len(said("lanes are")) == 1
