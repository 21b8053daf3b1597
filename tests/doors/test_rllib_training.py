"""DQN and SAC of RLlib learn over a store what they learn over RLlib's own buffers."""

import logging
import os

import numpy as np
import pytest
import torch

os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}

pytest.importorskip("ray.rllib")

import ray
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SAC, SACConfig

from engram.adapters import rllib

#: Of Ray: warnings of what it will change, and files that it leaves open.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1_800)]
#: A mean return of CartPole; an agent that draws actions reaches 20.
SOLVED = 100


@pytest.fixture(autouse=True, scope="module")
def _ray():
    for left in reversed(range(20)):
        try:  # Ray gives up a start after 30 seconds, which a busy machine may take
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            break
        except Exception as error:
            ray.shutdown()
            if not left or "timed out" not in str(error):
                raise
    yield
    ray.shutdown()


def dqn(kind, capacity=20_000, **place):
    """An algorithm on CartPole, in this process alone."""
    by = {"alpha": 0.6, "beta": 0.4} if "Prioritized" in kind else {}
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .training(
            replay_buffer_config={"type": kind, "capacity": capacity, **by, **place},
            train_batch_size=32,
            lr=1e-3,
            n_step=3,
            target_network_update_freq=200,
            num_steps_sampled_before_learning_starts=500,
            epsilon=[(0, 1.0), (3_000, 0.05)],
            training_intensity=8,
        )
    )
    return made(config)


def made(config):
    logging.getLogger("ray").setLevel(logging.ERROR)
    np.random.seed(1)  # noqa: NPY002 - which RLlib draws by
    torch.manual_seed(1)
    torch.set_num_threads(1)  # of matrices as small as these
    config = config.env_runners(num_env_runners=0, num_envs_per_env_runner=1)
    algorithm = config.debugging(seed=1, log_level="ERROR").build_algo()
    algorithm.local_replay_buffer.rng = np.random.default_rng(1)
    return algorithm


def trained(algorithm, steps, stop=SOLVED):
    """Mean returns while it takes so many steps, or until it is good."""
    returns, taken = [], 0
    while taken < steps and not (returns and returns[-1] >= stop):
        result = algorithm.train()
        taken = result["num_env_steps_sampled_lifetime"]
        returns.append(float(result["env_runners"].get("episode_return_mean", "nan")))
    return returns


def weights(algorithm):
    return [one.clone() for one in algorithm.get_module().parameters()]


@pytest.mark.parametrize("kind", ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"])
def test_an_agent_learns_what_it_learns_over_rllibs_own_buffer(kind, tmp_path):
    ours = dqn(f"engram.adapters.rllib.{kind}", scratch_dir=tmp_path / "replay")
    assert type(ours.local_replay_buffer) is getattr(rllib, kind)
    returns = trained(ours, 20_000)
    found = weights(ours)
    ours.stop()
    assert returns[-1] >= SOLVED, returns
    theirs = dqn(kind)
    assert trained(theirs, 20_000) == returns
    for one, other in zip(found, weights(theirs), strict=True):
        assert torch.equal(one, other)
    theirs.stop()


class StoredSAC(SAC):
    """RLlib's SAC takes RLlib's own four names alone: the method makes the buffer of its configuration in their place."""

    def _create_local_replay_buffer_if_necessary(self, config):
        how = {key: value for key, value in config["replay_buffer_config"].items() if key != "type"}
        return rllib.PrioritizedEpisodeReplayBuffer(**how)


def test_a_sac_agent_learns_what_it_learns_over_rllibs_own_buffer(tmp_path):
    trainings = []
    for kind, place in ((StoredSAC, {"scratch_dir": tmp_path / "replay"}), (SAC, {})):
        config = (
            SACConfig(algo_class=kind).environment("Pendulum-v1").training(n_step=1, train_batch_size_per_learner=32)
        )
        by = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": 2_000, "alpha": 0.6, "beta": 0.4, **place}
        config.training(replay_buffer_config=by, num_steps_sampled_before_learning_starts=150)
        algorithm = made(config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=50))
        assert isinstance(algorithm.local_replay_buffer, rllib.PrioritizedEpisodeReplayBuffer) == (kind is StoredSAC)
        first = weights(algorithm)
        returns = trained(algorithm, 450, stop=0)
        trainings.append((first, weights(algorithm), [one for one in returns if one == one]))  # noqa: PLR0124 - no NaN
        if kind is StoredSAC:
            assert algorithm.local_replay_buffer.scratch_dir == tmp_path / "replay"
            priorities = algorithm.local_replay_buffer.rb.sampler.priorities()
            assert priorities.leaves_of(torch.arange(400)).unique().numel() > 100
        algorithm.stop()
    (first, ours, returns), (_, theirs, wanted) = trainings
    assert returns == wanted
    assert len(returns) >= 2
    assert not any(torch.equal(one, other) for one, other in zip(ours, first, strict=True) if one.ndim == 2)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
