"""TD3 on Pendulum (Fujimoto et al., 2018, "Addressing function approximation error in actor-critic methods").

A loop of NumPy arrays that writes its rows itself, by an appender. Hyper-parameters are those of CleanRL's
``td3_continuous_action.py``, but for the warm-up of 25,000 steps, which is for environments that take millions.
"""

import argparse
import copy

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from engram import LazyTensorStorage, ReplayBuffer

ROWS, BATCH, WARMUP = 1_000_000, 256, 1_000
GAMMA, LEARNING_RATE, FOLLOW, DELAY = 0.99, 3e-4, 0.005, 2
EXPLORATION, SMOOTHING, CLIP = 0.1, 0.2, 0.5  # noise, where actions span -1 … 1


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(network(inputs, actions), nn.Tanh())
        self.critics = nn.ModuleList(network(inputs + actions, 1) for _ in range(2))

    def values(self, observation: Tensor, action: Tensor) -> Tensor:
        """What each of the critics says: ``[2, B]``."""
        both = torch.cat([observation, action], 1)
        return torch.stack([critic(both).squeeze(1) for critic in self.critics])


def train(steps: int, warmup: int, seed: int) -> None:
    storage = LazyTensorStorage(ROWS, dtypes={"reward": torch.float32})  # Gymnasium's are float64
    rb = ReplayBuffer(storage=storage, batch_size=BATCH)
    replay = rb.appender()
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("Pendulum-v1"))
    env = gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    size = env.action_space.shape[0]
    agent = Agent(env.observation_space.shape[0], size)
    target = copy.deepcopy(agent).requires_grad_(False)
    critics = torch.optim.Adam(agent.critics.parameters(), lr=LEARNING_RATE)
    policy = torch.optim.Adam(agent.policy.parameters(), lr=LEARNING_RATE)

    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        if len(rb) < warmup:
            action = random.uniform(-1, 1, size).astype(np.float32)
        else:
            with torch.no_grad():
                action = agent.policy(torch.from_numpy(observation)).numpy()
            action = (action + random.normal(0, EXPLORATION, size)).clip(-1, 1).astype(np.float32)
        following, reward, terminated, truncated, info = env.step(action)
        replay.add(observation=observation, action=action, reward=reward, following=following, terminated=terminated)
        observation = following
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()
        if len(rb) < warmup:
            continue

        batch = rb.sample()
        with torch.no_grad():
            noise = (SMOOTHING * torch.randn_like(batch["action"])).clamp(-CLIP, CLIP)
            chosen = (target.policy(batch["following"]) + noise).clamp(-1, 1)
            value = target.values(batch["following"], chosen).min(0).values
            goal = batch["reward"] + GAMMA * value * ~batch["terminated"]
        error = agent.values(batch["observation"], batch["action"]) - goal
        critics.zero_grad()
        error.square().mean(1).sum().backward()
        critics.step()
        if step % DELAY == 0:
            policy.zero_grad()
            (-agent.values(batch["observation"], agent.policy(batch["observation"]))[0].mean()).backward()
            policy.step()
            for slow, fast in zip(target.parameters(), agent.parameters(), strict=True):
                slow.lerp_(fast.detach(), FOLLOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before it learns")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
