"""Hindsight for Stable-Baselines3: whose goals, which rewards, beside what its steps were."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN
from stable_baselines3 import HerReplayBuffer as Theirs
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from engram.adapters.sb3 import HerReplayBuffer
from tests.adapters.sb3_steps import BOX, DISCRETE, as_bytes

GOAL = spaces.Box(-1e6, 1e6, (2,), np.float64)
SPACE = spaces.Dict({"observation": BOX, "achieved_goal": GOAL, "desired_goal": GOAL})
FAR = 1e5


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Rewards:
    """A vector of environments that counts how far goals are apart, and what it was asked."""

    def __init__(self):
        self.asked = []

    def env_method(self, name, achieved, desired, infos, indices):
        assert (name, indices) == ("compute_reward", [0])
        self.asked.append((achieved.copy(), desired.copy(), infos))
        return [-np.abs(achieved - desired).sum(1)]


def goals_of(step, env):
    return np.full(2, 1_000 * env + step, np.float64)


def written(buffer, count, n, length=5, cut=False):
    """Episodes of ``length`` steps, whose achieved goal is the number of the step; no stored goal is ever reached."""
    for step in range(count):
        over = np.full(n, step % length == length - 1)

        def observed(at):
            return {
                "observation": np.stack([np.full(3, 1_000 * env + at, np.float32) for env in range(n)]),
                "achieved_goal": np.stack([goals_of(at, env) for env in range(n)]),
                "desired_goal": np.full((n, 2), FAR),
            }

        infos = [{"TimeLimit.truncated": cut and bool(over[env]), "step": (step, env)} for env in range(n)]
        # The last observation of an episode is none that another one has.
        buffer.add(observed(step), observed(step + 0.5), np.zeros(n), np.full(n, -FAR), over, infos)


def made(n=2, size=200, **keywords):
    env = Rewards()
    return HerReplayBuffer(size, SPACE, DISCRETE, env, "cpu", n, **keywords), env


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_of_the_same_episode(strategy):
    buffer, env = made(n_sampled_goal=3, goal_selection_strategy=strategy)
    written(buffer, 40, 2)
    batch = buffer.sample(400)
    goals, steps = batch.observations["desired_goal"][:, 0], batch.observations["observation"][:, 0].double()
    relabelled = goals != FAR
    assert int(relabelled.sum()) == 300  # int(0.75 * 400), as theirs
    assert torch.equal(batch.observations["desired_goal"], batch.next_observations["desired_goal"])
    assert (batch.rewards[~relabelled] == -FAR).all()
    reached = batch.next_observations["achieved_goal"]
    wanted = -(reached - batch.observations["desired_goal"]).abs().sum(1, keepdim=True)
    assert torch.equal(batch.rewards[relabelled], wanted[relabelled].float())
    goal, step = goals[relabelled] - 0.5, steps[relabelled]
    assert torch.equal(goal // 5, step // 5)  # the same episode, of the same environment: 5 divides 1,000
    if strategy == "future":
        assert (goal >= step).all()
        assert (goal == step).any()
        assert (goal > step).any()
    elif strategy == "final":
        assert (goal % 5 == 4).all()
    else:
        assert (goal < step).any()
    assert env.asked[0][0].shape == (300, 2)


def test_goals_are_distributed_as_theirs():
    """Of steps of one episode: how often each goal comes to each step."""
    ours, _ = made(1, n_sampled_goal=4)
    theirs = Theirs(200, SPACE, DISCRETE, Rewards(), "cpu", 1, n_sampled_goal=4)
    shares = []
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - Stable-Baselines3 draws from it
    for buffer in (ours, theirs):
        written(buffer, 5, 1)
        batch = buffer.sample(20_000)
        goals = (batch.observations["desired_goal"][:, 0] - 0.5).long().clamp(max=5)
        pairs = batch.observations["observation"][:, 0].long() * 6 + goals
        shares.append(torch.bincount(pairs, minlength=30) / 20_000)
    assert (shares[0] - shares[1]).abs().max() < 0.02  # seven standard deviations
    assert torch.equal(shares[0] > 0, shares[1] > 0)


@pytest.mark.parametrize("cut", [False, True])
def test_ends_are_theirs(cut):
    ours, _ = made(2)
    theirs = Theirs(200, SPACE, DISCRETE, Rewards(), "cpu", 2)
    for buffer in (ours, theirs):
        written(buffer, 20, 2, cut=cut)
    for buffer in (ours, theirs):
        batch = buffer.sample(300)
        last = batch.observations["observation"][:, 0].long() % 5 == 4
        assert torch.equal(batch.dones[:, 0] == 1, last & (not cut))
    assert np.array_equal(ours.dones, theirs.dones)


def test_infos_reach_the_reward():
    buffer, env = made(2, size=20, copy_info_dict=True)
    written(buffer, 27, 2)  # a ring that is full
    buffer.sample(50)
    achieved, _, infos = env.asked[0]
    assert [info["step"] for info in infos] == [(int(goal % 1_000), int(goal // 1_000)) for goal in achieved[:, 0]]
    copy = pickle.loads(pickle.dumps(buffer))
    copy.set_env(other := Rewards())
    copy.sample(50)
    achieved, _, infos = other.asked[0]
    assert [info["step"] for info in infos] == [(int(goal % 1_000), int(goal // 1_000)) for goal in achieved[:, 0]]


def test_normalization_comes_after_the_goals():
    class Still(BitFlippingEnv):
        observation_space, action_space = SPACE, DISCRETE

        def __init__(self):
            pass

    env = VecNormalize(DummyVecEnv([Still]), clip_obs=1e9, clip_reward=1e9)
    for rms in env.obs_rms.values():
        rms.mean, rms.var = rms.mean + 3, rms.var * 4
    env.ret_rms.var = np.float64(4.0)
    buffer, asked = made(1, n_sampled_goal=1_000_000)
    written(buffer, 10, 1)
    batch = buffer.sample(20, env)
    achieved, desired, _ = asked.asked[0]
    scale = np.sqrt(4 + env.epsilon)
    np.testing.assert_allclose(batch.rewards[:19, 0], -np.abs(achieved - desired).sum(1) / scale, rtol=1e-5)
    np.testing.assert_allclose(batch.observations["desired_goal"][:19], (desired - 3) / scale, rtol=1e-5)


def test_an_open_episode_and_its_truncation(recwarn):
    buffer, _ = made(2)
    written(buffer, 7, 2)
    assert not np.asarray(buffer.dones)[6].any()
    buffer.truncate_last_trajectory()
    assert "The last trajectory in the replay buffer will be truncated" in str(recwarn.pop(UserWarning).message)
    assert np.asarray(buffer.dones)[6].all()
    assert buffer.timeouts[6].all()
    buffer.truncate_last_trajectory()
    assert not recwarn.list
    steps = [as_bytes(row) for row in buffer.sample(300).observations["observation"].numpy()]
    assert len({*steps}) == 14


def test_a_pickle_leaves_the_environment_out():
    buffer, env = made(2)
    written(buffer, 10, 2)
    copy = pickle.loads(pickle.dumps(buffer))
    with pytest.raises(RuntimeError, match=r"expected an environment.*set_env"):
        copy.sample(10)
    copy.set_env(env)
    assert copy.sample(10).rewards.shape == (10, 1)
    with pytest.raises(ValueError, match="set_env: expected no environment yet"):
        copy.set_env(env)


def test_a_directory_goes_on(tmp_path):
    for size in (7, 14):
        buffer, _ = made(2, scratch_dir=tmp_path / "replay")
        written(buffer, 7, 2)
        assert buffer.size() == size
        goals = buffer.sample(200).observations["desired_goal"]
        assert goals[goals < FAR].max() <= 1_006.5
        buffer.close()


def test_save_and_load_by_the_algorithm(tmp_path):
    """A whole pickle of a buffer in RAM, and the environment comes back."""
    keywords = {"n_sampled_goal": 2}
    small = {"buffer_size": 200, "learning_starts": 10, "device": "cpu", "seed": 0}
    replay = {"replay_buffer_class": HerReplayBuffer, "replay_buffer_kwargs": keywords}
    model = DQN("MultiInputPolicy", BitFlippingEnv(n_bits=3), **small, **replay)
    model.learn(40)
    before = model.replay_buffer.observations
    model.save_replay_buffer(tmp_path / "replay")
    del model.replay_buffer
    model.load_replay_buffer(tmp_path / "replay", truncate_last_traj=False)
    for key, value in before.items():
        assert np.array_equal(model.replay_buffer.observations[key], value)
    model.learn(20, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 60


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"observation_space": spaces.Dict({"observation": BOX})}, TypeError, "'achieved_goal', 'desired_goal'"),
        ({"observation_space": BOX}, TypeError, "expected a Dict"),
        ({"goal_selection_strategy": "past"}, ValueError, "goal_selection_strategy: expected .*'past'"),
        ({"n_steps": 3}, ValueError, "n_steps=1"),
        ({"optimize_memory_usage": True}, ValueError, "optimize_memory_usage=False"),
        ({"copy_info_dict": True, "scratch_dir": "anywhere"}, ValueError, "copy_info_dict: expected no scratch_dir"),
        ({"n_sampled_goal": -1}, ValueError, "n_sampled_goal"),
    ],
)
def test_what_cannot_be(how, error, said):
    with pytest.raises(error, match=said):
        HerReplayBuffer(
            **{"buffer_size": 40, "observation_space": SPACE, "action_space": DISCRETE, "env": Rewards()} | how
        )
