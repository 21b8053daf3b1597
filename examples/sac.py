"""Soft actor-critic on Pendulum (Haarnoja et al., 2018, "Soft actor-critic algorithms and applications").

It may be killed at any moment: with ``--folder``, the same command goes on, with all rows and the weights of the last whole
episode. Hyper-parameters are those of CleanRL's ``sac_continuous_action.py``.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from engram import ReplayBuffer

ROWS, BATCH, WARMUP = 1_000_000, 256, 5_000
GAMMA, FOLLOW = 0.99, 0.005
POLICY_RATE, CRITIC_RATE, POLICY_EVERY = 3e-4, 1e-3, 2
SPREAD = (-5, 2)  # of logarithms of standard deviations


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.policy = network(inputs, 2 * actions)
        self.critics = nn.ModuleList(network(inputs + actions, 1) for _ in range(2))
        self.slow_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_weight = nn.Parameter(torch.zeros(()))  # of the entropy

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in -1 … 1, ``[B, actions]``, and the logarithms of their densities, ``[B]``."""
        mean, spread = self.policy(observation).chunk(2, -1)
        spread = SPREAD[0] + (SPREAD[1] - SPREAD[0]) * (spread.tanh() + 1) / 2
        normal = torch.distributions.Normal(mean, spread.exp())
        before = normal.rsample()
        action = before.tanh()
        return action, (normal.log_prob(before) - (1 - action.square() + 1e-6).log()).sum(-1)

    @staticmethod
    def values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
        """What each of the critics says: ``[2, B]``."""
        both = torch.cat([observation, action], -1)
        return torch.stack([critic(both).squeeze(-1) for critic in critics])


def train(folder: Path, steps: int, warmup: int, seed: int) -> None:
    rb = ReplayBuffer.open_or_create(folder / "replay", ROWS, batch_size=BATCH)
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("Pendulum-v1"))
    env = rb.record(gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1)))
    torch.manual_seed(seed)
    env.action_space.seed(seed)
    size = env.action_space.shape[0]
    agent = Agent(env.observation_space.shape[0], size)
    critics = torch.optim.Adam(agent.critics.parameters(), lr=CRITIC_RATE)
    policy = torch.optim.Adam(agent.policy.parameters(), lr=POLICY_RATE)
    weight = torch.optim.Adam([agent.log_weight], lr=CRITIC_RATE)
    parts = {"agent": agent, "critics": critics, "policy": policy, "weight": weight}
    if (folder / "agent.pt").exists():
        saved = torch.load(folder / "agent.pt")
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    observation, _ = env.reset(seed=seed)
    for step in range(rb.write_count + 1, steps + 1):  # a row is a step
        if step <= warmup:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = agent.act(torch.from_numpy(observation))[0].numpy()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}", flush=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "new.pt")
            (folder / "new.pt").rename(folder / "agent.pt")  # whole, or not there
            observation, _ = env.reset()
        if step <= warmup:
            continue

        batch = rb.sample()
        now, following, entropy_weight = batch["observation"], batch["next"], agent.log_weight.exp().detach()
        with torch.no_grad():
            action, density = agent.act(following["observation"])
            value = agent.values(agent.slow_critics, following["observation"], action).min(0).values
            goal = following["reward"] + GAMMA * (value - entropy_weight * density) * ~following["terminated"]
        critics.zero_grad()
        (agent.values(agent.critics, now, batch["action"]) - goal).square().mean(1).sum().backward()
        critics.step()
        for _ in range(POLICY_EVERY if step % POLICY_EVERY == 0 else 0):
            action, density = agent.act(now)
            policy.zero_grad()
            (entropy_weight * density - agent.values(agent.critics, now, action).min(0).values).mean().backward()
            policy.step()
            weight.zero_grad()
            (-agent.log_weight.exp() * (density.detach().mean() - size)).backward()
            weight.step()
        for slow, fast in zip(agent.slow_critics.parameters(), agent.critics.parameters(), strict=True):
            slow.lerp_(fast.detach(), FOLLOW)
    rb.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before it learns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where replay and weights stay; default: nowhere")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        train(arguments.folder or Path(temporary), arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
