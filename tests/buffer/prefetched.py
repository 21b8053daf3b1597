"""Buffers that prefetch."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RewardToGo,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.buffer.prefetch import Prefetcher
from tests.components import Newest

ROWS, BATCH = 60, 8
SAMPLERS = {
    "uniform": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "pass-in-order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices-pass": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized-slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.5, slice_len=4),
    "custom": Newest,
    "expander": lambda: RewardToGo(RandomSampler(), reward_key="reward", traj_key="episode"),
    "expander-pass": lambda: RewardToGo(SamplerWithoutReplacement(), reward_key="reward", traj_key="episode"),
}
EPOCHS = ("pass", "pass-in-order", "slices-pass", "expander-pass")


def made_by(who, monkeypatch):
    """From the second batch on."""
    monkeypatch.setattr(Prefetcher, "slow_s", 0.0 if who == "threads" else 1e9)
    monkeypatch.setattr(Prefetcher, "slow_in_a_row", 1)


@pytest.fixture(params=["caller", "threads", "as-it-comes"])
def who(request, monkeypatch):
    """Who makes batches: as measured, or always the same."""
    if request.param != "as-it-comes":
        made_by(request.param, monkeypatch)
    return request.param


@pytest.fixture
def threads(monkeypatch):
    made_by("threads", monkeypatch)


def data(first=0, n=ROWS):
    step = torch.arange(first, first + n)
    return TensorDict({"x": step, "episode": step // 6, "reward": step[:, None].float()}, [n])


def buffer(depth, sampler=RandomSampler, storage=LazyTensorStorage, *, seed=5, filled=True, batch=BATCH, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    rb = TensorDictReplayBuffer(
        storage=storage(ROWS), sampler=sampler(), batch_size=batch, prefetch=depth, generator=generator, **kwargs
    )
    if filled:
        rb.extend(data())
    return rb


def rows_of(rb, n):
    return [rb.sample()["x"].tolist() for _ in range(n)]


def engaged(rb):
    """Whether threads make the batches of a buffer."""
    return rb._prefetching._workers is not None
