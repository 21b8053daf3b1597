"""A learner of continuous actions that draws its batches as LeRobot's do, from the iterator over a store that is opened again half-way."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from engram.adapters.lerobot import ReplayBuffer

STATE = "observation.state"
STEPS, LENGTH, GAMMA, RATE = 1200, 15, 0.9, 0.05


def moved(place, action):
    """A cart on a line that is pushed: what it is paid for is to be at 0."""
    place = np.clip(place + 0.3 * action, -1, 1).astype(np.float32)
    return place, -float(abs(place[0]))


def mean_return(policy):
    total, starts = 0.0, np.linspace(-1, 1, 9, dtype=np.float32)
    for start in starts:
        place = np.array([start])
        for _ in range(LENGTH):
            place, reward = moved(place, policy(place))
            total += reward
    return total / len(starts)


def layers(inputs, *last):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), *last)


def test_a_deterministic_policy_gradient_learns(tmp_path):
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    actor, critic, slow_actor, slow_critic = layers(1, nn.Tanh()), layers(2), layers(1, nn.Tanh()), layers(2)
    slow_actor.load_state_dict(actor.state_dict())
    slow_critic.load_state_dict(critic.state_dict())
    improve, judge = (torch.optim.Adam(net.parameters(), 3e-3) for net in (actor, critic))

    def acts(place):
        with torch.no_grad():
            return actor(torch.from_numpy(place)).numpy()

    def learn(batch):
        states, following = batch["state"][STATE], batch["next_state"][STATE]
        with torch.no_grad():
            ahead = slow_critic(torch.cat([following, slow_actor(following)], 1)).squeeze(1)
            target = batch["reward"] + GAMMA * (1 - batch["done"]) * ahead
        judge.zero_grad()
        mse_loss(critic(torch.cat([states, batch["action"]], 1)).squeeze(1), target).backward()
        judge.step()
        improve.zero_grad()
        (-critic(torch.cat([states, actor(states)], 1)).mean()).backward()
        improve.step()
        for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
            for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                old.data.lerp_(new.data, RATE)

    before = mean_return(acts)
    for part in range(2):
        buffer = ReplayBuffer(STEPS, "cpu", [STATE], scratch_dir=tmp_path / "replay")
        assert len(buffer) == part * STEPS // 2
        batches, place = buffer.get_iterator(64, queue_size=2), np.zeros(1, np.float32)
        for step in range(STEPS // 2):
            if step % LENGTH == 0:
                place = generator.uniform(-1, 1, 1).astype(np.float32)
            action = np.clip(acts(place) + generator.normal(0, 0.4, 1), -1, 1).astype(np.float32)
            following, reward = moved(place, action)
            states = [{STATE: torch.from_numpy(it[None])} for it in (place, following)]
            ends = step % LENGTH == LENGTH - 1
            buffer.add(states[0], torch.from_numpy(action[None]), reward, states[1], done=False, truncated=ends)
            place = following
            if step >= 50:
                learn(next(batches))
        batches.close()
        buffer.close()
    # Who stays where it starts has -8.3, and the best -0.44.
    assert before < -4
    assert mean_return(acts) > -1.5
