"""What bench_sb3 gives to both buffers, and what it says of their memory."""

import pytest
import torch

from benchmarks import bench_sb3

pytest.importorskip("stable_baselines3")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bench_sb3, "CAPACITY", 240)


@pytest.mark.parametrize(("name", "n_envs"), [("dqn", 1), ("dqn", 8), ("sac", 1), ("frames", 1)])
def test_both_are_given_the_same_steps(name, n_envs):
    ours, theirs = (bench_sb3._filled(side, name, n_envs) for side in ("engram", "SB3"))
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
    assert torch.equal(torch.as_tensor(ours.rewards), torch.as_tensor(theirs.rewards))
    newest = slice(3, 4) if name == "frames" else slice(None)
    assert torch.equal(torch.as_tensor(ours.observations), torch.as_tensor(theirs.observations[:, :, newest]))
    for buffer in (ours, theirs):
        assert bench_sb3._calls(buffer, 16)().rewards.shape == (16, 1)


def test_memory_is_that_of_single_frames():
    row = bench_sb3._memory()
    assert row.comparisons[0].verdict == "yes"
    assert row.spreads["engram"].median > 84 * 84
    assert row.spreads["SB3"].median > 8 * 84 * 84
