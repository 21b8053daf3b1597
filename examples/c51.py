"""Categorical Q-learning on CartPole (Bellemare et al., 2017, "A distributional perspective on reinforcement learning").

A network says with which probabilities an action returns each of 101 values. Hyper-parameters are those of CleanRL's ``c51.py``.
"""

import argparse
import random

import gymnasium
import torch
from torch import Tensor, nn

from engram import LazyTensorStorage, ReplayBuffer

ROWS, BATCH, WARMUP = 10_000, 128, 10_000
GAMMA, LEARNING_RATE = 0.99, 2.5e-4
LEARN_EVERY, FOLLOW_EVERY = 10, 500  # steps
LEAST, EXPLORING = 0.05, 0.5  # the chance of a random action sinks to the one, in this share of the run
ATOMS = torch.linspace(-100, 100, 101)  # the values of a return


class Network(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.layers = nn.Sequential(
            nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions * len(ATOMS))
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Log-probabilities ``[B, actions, atoms]``."""
        return self.layers(observation).unflatten(-1, (self.actions, -1)).log_softmax(-1)

    def best(self, observation: Tensor) -> Tensor:
        """The actions ``[B]`` of the highest mean return."""
        return (self(observation).exp() @ ATOMS).argmax(-1)


def projected(probabilities: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """The distribution of ``reward + discount * return``, each value shared between the two atoms around it: ``[B, atoms]``."""
    value = (reward.unsqueeze(1) + discount.unsqueeze(1) * ATOMS).clamp(ATOMS[0], ATOMS[-1])
    place = (value - ATOMS[0]) / (ATOMS[1] - ATOMS[0])
    below = place.long().clamp(max=len(ATOMS) - 2)
    upper = probabilities * (place - below)
    found = torch.zeros_like(probabilities).scatter_add_(1, below, probabilities - upper)
    return found.scatter_add_(1, below + 1, upper)


def train(steps: int, warmup: int, seed: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=BATCH)
    env = rb.record(gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))
    random.seed(seed)
    torch.manual_seed(seed)
    env.action_space.seed(seed)
    online, target = (Network(env.observation_space.shape[0], int(env.action_space.n)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=LEARNING_RATE, eps=0.01 / BATCH)
    rows = torch.arange(BATCH)

    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        if random.random() < max(LEAST, 1 - (1 - LEAST) * step / (EXPLORING * steps)):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = online.best(torch.from_numpy(observation)).item()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()

        if rb.write_count > warmup and step % LEARN_EVERY == 0:
            batch = rb.sample()
            following = batch["next"]
            with torch.no_grad():
                likely = target(following["observation"]).exp()
                likely = likely[rows, (likely @ ATOMS).argmax(1)]
                goal = projected(likely, following["reward"], GAMMA * ~following["terminated"])
            guess = online(batch["observation"])[rows, batch["action"]]
            optimizer.zero_grad()
            (-goal * guess).sum(1).mean().backward()
            optimizer.step()
        if step % FOLLOW_EVERY == 0:
            target.load_state_dict(online.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rows before it learns")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is so small that more threads make it slower
    train(arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
