"""What bench_cleanrl and learning make of runs, without running any."""

import numpy as np
import pytest
import torch

from benchmarks import bench_cleanrl, learning


def test_rows_compare_the_buffers_of_each_run_and_name_the_share():
    runs = [
        {"steps": 9, "run": 11.4, "buffers": {"engram": 0.4, "SB3": 1.0}},
        {"steps": 9, "run": 9.8, "buffers": {"engram": 0.9, "SB3": 0.9}},
        {"steps": 9, "run": 8.8, "buffers": {"engram": 0.4, "SB3": 0.8}},
    ]
    whole, part = bench_cleanrl.rows("dqn", runs)
    assert whole.comparisons[0].measured.median == pytest.approx(8.4 / 8)
    assert part.comparisons[0].measured.median == 2.0
    assert part.notes["engram"] == "5.00% of the CPU of the run."
    assert whole.comparisons[0].floor.bound == 1
    assert part.comparisons[0].floor.bound == 1.5


def test_engram_gives_what_the_files_expect_of_a_batch():
    """CleanRL's `sac`: one flag, of which a time limit is no end."""
    gymnasium = pytest.importorskip("gymnasium")
    space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)
    replay = bench_cleanrl.Replay(100, space, space, "cpu", handle_timeout_termination=True)
    for step in range(50):
        seen = np.full((1, 3), step, np.float32)
        late = step % 2 == 1
        flags = np.array([step % 5 == 0 or late])
        infos = [{"TimeLimit.truncated": late}]
        replay.add(seen, seen + 1, np.full((1, 1), -step, np.float32), np.array([0.1 * step]), flags, infos)
    batch = replay.sample(64)
    step = batch.observations[:, 0]
    assert batch.observations.shape == (64, 3)
    assert batch.actions.shape == (64, 1)
    assert {column.dtype for column in batch} == {torch.float32}
    assert torch.equal(batch.next_observations, batch.observations + 1)
    assert torch.equal(batch.actions[:, 0], -step)
    torch.testing.assert_close(batch.rewards.flatten(), 0.1 * step)
    assert torch.equal(batch.dones.flatten() != 0, (step % 5 == 0) & (step % 2 == 0))


def test_a_curve_is_the_mean_of_parts():
    returns = [(1, 10.0), (4, 20.0), (6, 5.0), (100, 7.0)]
    assert learning.curve(returns, 100) == [15.0, 5.0, *[None] * 17, 7.0]
    assert learning.summary([[1.0, None, 3.0], [5.0, 4.0, None]]) == "best 3, 5, last 3, 4"
