"""Returns of rewards that are whole, true or false, or of half precision: their sums are float32."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.serving.servers import serving

INTEGERS = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS += [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROWS, EPISODE, GAMMA = 30, 6, 0.5


def rewards(dtype, shape=()):
    values = np.random.default_rng(3).integers(0, 2 if dtype is torch.bool else 100, (ROWS, *shape))
    if dtype in FLOATS or dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        values -= 30 * (dtype is not torch.bool)
    return torch.from_numpy(values).to(torch.float64).to(dtype)


def rows(reward, kind="dict"):
    step = torch.arange(ROWS)
    done = (step % EPISODE == EPISODE - 1).reshape(ROWS, *[1] * (reward.ndim - 1))
    data = {"step": step, "next": {"reward": reward, "done": done}}
    return TensorDict(data, [ROWS]) if kind == "tensordict" else data


def returns(reward, ahead):
    """Of every step, in float64."""
    values = reward.to(torch.float64)
    found = torch.zeros_like(values)
    for step in range(ROWS):
        last = min(step + ahead - 1, step // EPISODE * EPISODE + EPISODE - 1)
        found[step] = sum(GAMMA ** (i - step) * values[i] for i in range(step, last + 1))
    return found


def sum_of(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "shape"), [("dict", ()), ("dict", (2,)), ("tensordict", (1,))])
def test_of_a_dtype(dtype, kind, shape):
    reward = rewards(dtype, shape)
    of = TensorDictReplayBuffer if kind == "tensordict" else ReplayBuffer
    for expander, ahead, key in (
        (NStep(RandomSampler(), n=3, gamma=GAMMA), 3, ("next", "reward")),
        (RewardToGo(RandomSampler(), gamma=GAMMA), ROWS, ("reward_to_go",)),
    ):
        rb = of(storage=LazyTensorStorage(ROWS), sampler=expander, batch_size=40)
        rb.extend(rows(reward, kind))
        batch = rb.sample()
        got = batch["next"]["reward"] if key[0] == "next" else batch[key[0]]
        assert got.dtype is sum_of(dtype)
        assert torch.equal(got, returns(reward, ahead)[batch["step"]].to(got.dtype))
        if key[0] == "next":
            assert torch.equal(batch["next"]["original_reward"].double(), reward[batch["step"]].double())


def test_of_numbers_of_python(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "s"), sampler=NStep(RandomSampler(), n=2, gamma=GAMMA)
    )
    for step in range(6):
        rb.add({"step": step, "next": {"reward": 1, "done": step == 5}})
    batch = rb.sample(32)
    assert batch["next"]["reward"].tolist() == [1.0 if step == 5 else 1.5 for step in batch["step"].tolist()]
    rb.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16], ids=str)
def test_of_windows_and_by_priority_and_ahead(dtype):
    reward = rewards(dtype, (1,))
    for inner in (SliceSampler(slice_len=4), PrioritizedSampler(alpha=0.6, beta=0.4)):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(ROWS), sampler=NStep(inner, n=3, gamma=GAMMA), batch_size=40, prefetch=2
        )
        rb.extend(rows(reward, "tensordict"))
        batch = rb.sample()
        assert batch["next", "reward"].dtype is torch.float32
        assert torch.equal(batch["next", "reward"], returns(reward, 3)[batch["step"]].float())
        rb.close()


def test_as_arrays_and_over_a_connection(tmp_path):
    reward = rewards(torch.uint8)
    sampler = NStep(RandomSampler(), n=3, gamma=GAMMA)
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "s"), sampler=sampler, batch_size=20, output="numpy"
    )
    rb.extend(rows(reward))
    expected = returns(reward, 3).float().numpy()
    batch = rb.sample()
    assert batch["next"]["reward"].dtype == np.float32
    assert np.array_equal(batch["next"]["reward"], expected[batch["step"]])
    with serving(tmp_path / "s") as server, ReplayBuffer.connect(server.address) as remote:
        batch = remote.sample(20)
        assert np.array_equal(batch["next"]["reward"], expected[batch["step"]])
    rb.close()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_of_other_numbers_are_refused(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=RewardToGo(RandomSampler()))
    rb.extend(rows(torch.ones(ROWS).to(dtype)))
    with pytest.raises(TypeError, match=r"RewardToGo: .*reward.*expected real numbers, got"):
        rb.sample(2)
