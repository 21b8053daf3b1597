"""Deep Q-learning by priority whose whole update is one CUDA graph: draw, read, weigh, learn and send priorities back.

The GPU reads the rows in the host's memory by itself, so an update costs the host one call. Without a GPU the same update runs on the
CPU, without a graph.
"""

import argparse
import random

import gymnasium
import torch
from torch import nn

from engram import DeviceReplay, LazyTensorStorage, PrioritizedSampler, ReplayBuffer

ROWS, BATCH, WARMUP = 100_000, 128, 1_000
GAMMA, LEARNING_RATE, FOLLOWING, EXPLORING = 0.99, 5e-4, 0.01, 0.05


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Learner:
    """``source`` draws batches and takes priorities: a buffer, or a :class:`DeviceReplay` of it."""

    def __init__(self, source: ReplayBuffer | DeviceReplay, inputs: int, outputs: int, device: torch.device) -> None:
        self.source = source
        self.online, self.target = network(inputs, outputs).to(device), network(inputs, outputs).to(device)
        self.target.load_state_dict(self.online.state_dict())
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=LEARNING_RATE, capturable=on_gpu)
        self.graph = torch.cuda.CUDAGraph() if on_gpu else None
        self.updates = 0

    def update(self) -> None:
        """One update: the first three as they are, the others as a graph."""
        self.updates += 1
        if self.graph is None or self.updates <= 3:
            self.learn()
            return
        if self.updates == 4:
            with torch.cuda.graph(self.graph):
                self.learn()
        self.graph.replay()

    def learn(self) -> None:
        batch, info = self.source.sample(return_info=True)
        following = batch["next"]
        with torch.no_grad():
            value = self.target(following["observation"]).max(1).values
            goal = following["reward"] + GAMMA * value * ~following["terminated"]
        guess = self.online(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        error = guess - goal
        self.optimizer.zero_grad(set_to_none=True)
        (info["priority_weight"] * error.square()).mean().backward()
        self.optimizer.step()
        self.source.update_priority(info["index"], error.detach().abs(), generation=info["index_generation"])
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, FOLLOWING)


def train(steps: int, warmup: int, seed: int) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    random.seed(seed)
    torch.manual_seed(seed)
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=BATCH)
    env = rb.record(gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    inputs, outputs = env.observation_space.shape[0], int(env.action_space.n)
    learner = None
    for step in range(1, steps + 1):
        if learner is None or random.random() < EXPLORING:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = learner.online(torch.from_numpy(observation).to(device)).argmax().item()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()
        if step == warmup:
            learner = Learner(DeviceReplay(rb, device) if device.type == "cuda" else rb, inputs, outputs, device)
        if learner is not None:
            learner.update()
    if learner is not None:
        print(f"{learner.updates} updates on {device.type}")
        if isinstance(learner.source, DeviceReplay):
            learner.source.close()
    rb.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rows before it learns")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of the CPU: the network is so small that more threads make it slower
    train(arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
