"""Algorithms of Stable-Baselines3, sb3-contrib and CleanRL train over a store; one of them is killed."""

import contextlib
import json

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from engram.adapters.sb3 import PrioritizedDQN, ReplayBuffer
from tests import fresh
from tests.adapters.sb3_corridor import BEST, PLACES, Corridor

LEARNING = {
    "buffer_size": 2_000,
    "learning_starts": 100,
    "learning_rate": 3e-3,
    "batch_size": 32,
    "gamma": 0.9,
    "train_freq": 2,
    "target_update_interval": 100,
    "exploration_fraction": 0.8,
    "policy_kwargs": {"net_arch": [32]},
    "device": "cpu",
    "seed": 0,
}


def return_of(model):
    env = Corridor()
    observed, _ = env.reset()
    total, over = 0.0, False
    while not over:
        observed, reward, terminated, truncated, _ = env.step(model.predict(observed, deterministic=True)[0])
        total, over = total + reward, terminated or truncated
    return total


@pytest.mark.parametrize(
    ("cls", "buffer"), [(DQN, {"n_steps": 3, "gamma": 0.9}), (PrioritizedDQN, {"alpha": 0.6, "beta": 0.4})]
)
def test_an_agent_learns(cls, buffer, tmp_path):
    buffer = buffer | {"scratch_dir": tmp_path / "replay"}
    chosen = {} if cls is PrioritizedDQN else {"replay_buffer_class": ReplayBuffer}
    how = LEARNING | {"policy_kwargs": {"net_arch": [32]}}
    model = cls("MlpPolicy", Corridor(), replay_buffer_kwargs=buffer, **chosen, **how)
    model.learn(800)
    assert return_of(model) == pytest.approx(BEST)
    model.replay_buffer.close()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", ["DQN", "QRDQN", "SAC", "TD3", "DDPG", "TQC"])
def test_algorithms_run(name, once, tmp_path):
    """With two environments, timeouts and normalization: they learn from steps of ours, and go on with them."""
    contrib = pytest.importorskip("sb3_contrib")
    cls = {"DQN": DQN, "SAC": SAC, "TD3": TD3, "DDPG": DDPG}.get(name) or getattr(contrib, name)
    env = VecNormalize(make_vec_env("CartPole-v1" if "DQN" in name else "Pendulum-v1", 2, seed=0))

    def model():
        return cls(
            "MlpPolicy",
            env,
            buffer_size=200,
            learning_starts=20,
            batch_size=8,
            train_freq=2,
            replay_buffer_class=ReplayBuffer,
            replay_buffer_kwargs={"scratch_dir": tmp_path / "replay"},
            optimize_memory_usage=once,
            policy_kwargs={"net_arch": [8]},
            device="cpu",
            seed=0,
        )

    first = model()
    before = [parameter.clone() for parameter in first.policy.parameters()]
    first.learn(60)
    assert type(first.replay_buffer) is ReplayBuffer
    assert (first.replay_buffer.size(), first._n_updates > 0) == (30, True)
    assert any(not torch.equal(a, b) for a, b in zip(before, first.policy.parameters(), strict=True))
    first.replay_buffer.close()
    again = model()
    assert again.replay_buffer.size() == 30
    with (
        pytest.warns(UserWarning, match="issues/46") if once else contextlib.nullcontext()
    ):  # Stable-Baselines3 says that it ends episodes
        again.learn(20)
    assert again.replay_buffer.size() == 40
    again.replay_buffer.close()


TRAINING = """
import json
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from engram.adapters.sb3 import PrioritizedDQN, PrioritizedReplayBuffer

torch.set_num_threads(1)

class Reporting(PrioritizedReplayBuffer):
    def add(self, obs, next_obs, action, reward, done, infos):
        super().add(obs, next_obs, action, reward, done, infos)
        arrays = obs, next_obs, action, np.asarray(reward, np.float32), done
        print(json.dumps([np.asarray(array).tolist() for array in arrays]))

model = PrioritizedDQN(
    "MlpPolicy", make_vec_env("CartPole-v1", 2, seed=0), buffer_size=4_000, learning_starts=50, train_freq=1, batch_size=8,
    replay_buffer_class=Reporting, replay_buffer_kwargs={"scratch_dir": folder}, policy_kwargs={"net_arch": [8]}, device="cpu", seed=0,
)
print("begun")
model.learn(10_000_000)
"""


def test_a_process_is_killed_while_it_trains(tmp_path):
    """The same lines, started again, go on with all steps that the killed process had added, byte for byte."""
    program = fresh.start(TRAINING, folder=str(tmp_path / "replay"))
    program.until("begun")
    program._until(lambda: program.poll() is not None or program.out.count("\n") > 150, 120.0, "150 steps")
    program.kill()
    lines = program.out.split("\n")[1:-1]
    steps = [json.loads(line) for line in lines]
    assert len(steps) > 140
    count = len(steps)
    model = PrioritizedDQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 2, seed=1),
        buffer_size=4_000,
        learning_starts=0,
        train_freq=1,
        replay_buffer_kwargs={"scratch_dir": tmp_path / "replay"},
        policy_kwargs={"net_arch": [8]},
        device="cpu",
    )
    buffer = model.replay_buffer
    assert count <= buffer.size() <= count + 1  # the step that was under way may be there
    dtypes = (np.float32, np.float32, np.int64, np.float32, np.float32)
    for at, (name, dtype) in enumerate(
        zip(["observations", "next_observations", "actions", "rewards", "dones"], dtypes, strict=True)
    ):
        wanted = np.array([step[at] for step in steps], dtype)
        found = np.asarray(getattr(buffer, name)[:count])
        assert found.reshape(wanted.shape)[:-1].tobytes() == wanted[:-1].tobytes(), name
        if name != "dones":  # what was open is truncated
            assert found.reshape(wanted.shape).tobytes() == wanted.tobytes(), name
    assert np.asarray(buffer.dones)[buffer.size() - 1].all()
    held = buffer.size()
    assert buffer.rb.sampler.priorities().leaves(count).unique().numel() > 10  # they came along
    model.learn(20)
    assert buffer.size() == held + 10
    buffer.close()


def test_cleanrl_changes_an_import():
    """The loop of ``cleanrl/dqn.py``, whose buffer was ``cleanrl_utils.buffers.ReplayBuffer``."""
    torch.manual_seed(0)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv([Corridor, Corridor], autoreset_mode=mode)
    envs.action_space.seed(0)
    q_network, target_network = (torch.nn.Linear(PLACES, 2) for _ in range(2))
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=5e-2)
    rb = ReplayBuffer(
        2_000,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        n_envs=2,
        optimize_memory_usage=True,
        handle_timeout_termination=False,
    )
    obs, _ = envs.reset(seed=1)
    for global_step in range(800):
        actions = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for idx, over in enumerate(terminations | truncations):
            if over:
                real_next_obs[idx] = infos["final_obs"][idx]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
        if global_step > 100:
            data = rb.sample(64)
            with torch.no_grad():
                target_max, _ = target_network(data.next_observations).max(dim=1)
                td_target = data.rewards.flatten() + 0.9 * target_max * (1 - data.dones.flatten())
            old_val = q_network(data.observations).gather(1, data.actions).squeeze()
            loss = torch.nn.functional.mse_loss(td_target, old_val)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if global_step % 50 == 0:
                target_network.load_state_dict(q_network.state_dict())
    assert q_network(torch.eye(PLACES)).argmax(1)[:-1].tolist() == [1] * (PLACES - 1)
    values = q_network(torch.eye(PLACES))[PLACES - 2, 1].item()
    assert values == pytest.approx(0.99, abs=0.1)
