"""DQN and SAC of RLlib learn over a store; a DQN learns what it learns over RLlib's own buffer; a training is killed and goes on."""

import logging
import os

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig

from engram.adapters.rllib import EpisodeReplayBuffer
from tests import fresh

#: Of Ray: warnings of what it will change, and files that it leaves open.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
#: A mean return of CartPole; an agent that draws actions reaches 20.
SOLVED = 100
OURS, THEIRS = "engram.adapters.rllib.", ""


def dqn(kind, capacity=20_000, **place):
    """An algorithm on CartPole in this process alone: its returns are the same each time."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    logging.getLogger("ray").setLevel(logging.ERROR)
    np.random.seed(1)  # noqa: NPY002 - which RLlib draws by
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=1)
    config = config.training(
        replay_buffer_config={"type": kind, "capacity": capacity, **place},
        train_batch_size=32,
        lr=1e-3,
        n_step=3,
        target_network_update_freq=200,
        num_steps_sampled_before_learning_starts=500,
        epsilon=[(0, 1.0), (3_000, 0.05)],
        training_intensity=8,
    )
    return made(config)


def made(config):
    algorithm = config.debugging(seed=1, log_level="ERROR").build_algo()
    algorithm.local_replay_buffer.rng = np.random.default_rng(1)
    return algorithm


def trained(algorithm, steps, stop=SOLVED):
    """Mean returns while it takes so many steps, or until it is good."""
    returns, taken = [], 0
    while taken < steps and (not returns or not returns[-1] >= stop):
        result = algorithm.train()
        taken = result["num_env_steps_sampled_lifetime"]
        returns.append(result["env_runners"].get("episode_return_mean", float("nan")))
    return returns


def test_an_agent_learns(tmp_path):
    algorithm = dqn(OURS + "EpisodeReplayBuffer", scratch_dir=tmp_path / "replay")
    assert isinstance(algorithm.local_replay_buffer, EpisodeReplayBuffer)
    returns = trained(algorithm, 30_000)
    print(returns)
    assert returns[-1] >= SOLVED
    algorithm.stop()
