"""A DQN of tianshou learns over a store; it learns what it learns over tianshou's own buffer; a training is killed and goes on."""

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("tianshou")

from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector
from tianshou.data import VectorReplayBuffer as Theirs
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainer, OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from engram.adapters.tianshou import PrioritizedVectorReplayBuffer, VectorReplayBuffer
from tests import fresh

#: Collectors warn of old random seeds, policies of spaces; of neither are we.
pytestmark = pytest.mark.filterwarnings("ignore")
#: A mean return; an agent that draws actions reaches 20. With other seeds it takes 4 to 9 thousand steps.
SOLVED = 100


def trained(buffer, epochs, stop=SOLVED):
    """Train a policy on CartPole for so many thousand steps, or until it is good. It, and its mean returns after each thousand."""
    np.random.seed(1)  # noqa: NPY002 - which tianshou draws by
    torch.manual_seed(1)
    torch.set_num_threads(1)  # of matrices as small as these
    environments, tests = environments_of(4, 1), environments_of(5, 7)
    net = Net(state_shape=(4,), action_shape=2, hidden_sizes=[64, 64])
    policy = DiscreteQLearningPolicy(model=net, action_space=environments.action_space[0], eps_training=0.1)
    how = {"n_step_return_horizon": 3, "target_update_freq": 100, "gamma": 0.95}
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), **how)
    collector = Collector(algorithm, environments, buffer, exploration_noise=True)
    collector.reset(reset_buffer=False)
    returns = []

    def is_solved(mean):
        returns.append(mean)
        return mean >= stop

    params = OffPolicyTrainerParams(
        training_collector=collector,
        max_epochs=epochs,
        epoch_num_steps=1_000,
        collection_step_num_env_steps=8,
        update_step_num_gradient_steps_per_sample=0.25,
        batch_size=64,
        test_collector=Collector(algorithm, tests),
        test_step_num_episodes=5,
        stop_fn=is_solved,
        verbose=False,
        show_progress=False,
    )
    OffPolicyTrainer(algorithm, params).run(reset_collectors=False)
    return policy, returns


def environments_of(n, seed):
    made = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(n)])
    made.seed(seed)
    return made


def test_an_agent_learns_what_it_learns_over_tianshous_own_buffer(tmp_path):
    ours, reached = trained(VectorReplayBuffer(20_000, 4, scratch_dir=tmp_path / "replay"), epochs=15)
    theirs, wanted = trained(Theirs(20_000, 4), epochs=15)
    assert reached == wanted
    assert reached[-1] >= SOLVED
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_agent_learns_by_priority(tmp_path):
    buffer = PrioritizedVectorReplayBuffer(20_000, 4, alpha=0.6, beta=0.4, scratch_dir=tmp_path / "replay")
    assert trained(buffer, epochs=15)[1][-1] >= SOLVED
    assert buffer.rb.sampler.priorities().leaves_of(torch.arange(100)).unique().numel() > 50
    buffer.close()


TRAINING = """
from engram.adapters.tianshou import VectorReplayBuffer
from tests.doors.test_tianshou_training import trained

class Told(VectorReplayBuffer):
    def add(self, *arguments, **keywords):
        said = super().add(*arguments, **keywords)
        print(len(self))
        return said

trained(Told(2_000, 4, scratch_dir=folder), epochs=100, stop=1_000)
"""


def test_a_training_that_is_killed_goes_on(tmp_path):
    program = fresh.start(TRAINING, folder=str(tmp_path / "replay"))
    program.until("\n400\n")
    program.kill()
    told = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    buffer = VectorReplayBuffer(2_000, 4, scratch_dir=tmp_path / "replay")
    before = len(buffer)
    assert told <= before <= told + 4
    for env in range(4):  # each step begins where the last one of its environment ended
        rows = buffer.sample_indices(0)
        rows = rows[(rows >= 500 * env) & (rows < 500 * env + 500)]
        steps = buffer[rows]
        on = ~steps.done[:-1]
        assert np.array_equal(steps.obs[1:][on], steps.obs_next[:-1][on])
    assert buffer.done[buffer.last_index].all()
    trained(buffer, epochs=1, stop=1_000)
    assert len(buffer) >= before + 900
    buffer.close()
