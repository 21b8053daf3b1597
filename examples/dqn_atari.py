"""Deep Q-learning from frames of 84 × 84 pixels (Mnih et al., 2015), each of which is stored once.

The agent sees four frames: the wrapper around ``rb.record(env)`` stacks them. The replay records what is inside of the wrapper, one
frame a step. ``FrameStack`` makes the same stacks of them when they are sampled, also of the next observations, which
``NextFromFollowing`` reads from the following rows: an eighth of the memory of stored stacks. The game is in this file: catch a
ball that bounces off the walls, so that one frame does not tell where it comes down. ``--env ALE/Pong-v5`` plays Atari
(``pip install ale-py opencv-python-headless``). Hyper-parameters are those of CleanRL's ``dqn_atari.py``; capacity, warm-up,
exploration and the target network are for a run of 10,000 steps, not of 10,000,000.
"""

import argparse
import random

import gymnasium
import numpy as np
import torch
from torch import nn

from engram import (
    FinalObservations,
    FrameStack,
    LazyTensorStorage,
    NextFromFollowing,
    RandomSampler,
    TensorDictReplayBuffer,
)

ROWS, EPISODES, BATCH, WARMUP = 50_000, 5_000, 32, 1_000
GAMMA, LEARNING_RATE, FRAMES = 0.99, 1e-4, 4
LEARN_EVERY, FOLLOW_EVERY = 4, 200  # steps
LEAST, EXPLORING = 0.01, 0.5  # the chance of a random action sinks to the one, in this share of the run
OBSERVED = ["observation", ("next", "observation")]


class Catch(gymnasium.Env):
    """A ball falls and bounces off the walls; the paddle at the bottom moves left, stays or moves right. 1 if it catches, else -1."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)
    SIZE, WIDE, FALLS, STEP = 6, 18, 6, 6  # pixels

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        last = 84 - self.SIZE
        self.x, self.y, self.speed = self.np_random.integers(last + 1), 0, self.np_random.integers(-8, 9)
        self.paddle = (84 - self.WIDE) // 2
        return self.frame(), {}

    def frame(self):
        pixels = np.zeros((84, 84), np.uint8)
        pixels[self.y : self.y + self.SIZE, self.x : self.x + self.SIZE] = 255
        pixels[-self.SIZE :, self.paddle : self.paddle + self.WIDE] = 128
        return pixels

    def step(self, action):
        last = 84 - self.SIZE
        self.paddle = int(np.clip(self.paddle + self.STEP * (action - 1), 0, 84 - self.WIDE))
        self.x, self.y = self.x + self.speed, self.y + self.FALLS
        if not 0 <= self.x <= last:
            self.x, self.speed = (-self.x if self.x < 0 else 2 * last - self.x), -self.speed
        down = self.y >= last
        caught = down and self.paddle - self.SIZE < self.x < self.paddle + self.WIDE
        return self.frame(), float(down) * (1 if caught else -1), bool(down), False, {}


def game(name: str) -> gymnasium.Env:
    """Frames ``[84, 84]`` of bytes, one at a time, and rewards of -1, 0 and 1."""
    if name == "catch":
        return gymnasium.wrappers.RecordEpisodeStatistics(Catch())
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(name, frameskip=1))
    env = gymnasium.wrappers.AtariPreprocessing(env)
    return gymnasium.wrappers.TransformReward(env, np.sign)


def network(actions: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(FRAMES, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, actions),
    )


def train(name: str, steps: int, warmup: int, seed: int) -> None:
    finals = FinalObservations(["observation"], LazyTensorStorage(EPISODES))
    sampler = FrameStack(NextFromFollowing(RandomSampler(), finals), n=FRAMES, dim=None, in_keys=OBSERVED)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, transform=finals, batch_size=BATCH)
    env = gymnasium.wrappers.FrameStackObservation(rb.record(game(name)), FRAMES)
    random.seed(seed)
    torch.manual_seed(seed)
    env.action_space.seed(seed)
    online, target = (network(int(env.action_space.n)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=LEARNING_RATE)

    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        if random.random() < max(LEAST, 1 - (1 - LEAST) * step / (EXPLORING * steps)):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = online(torch.from_numpy(observation)[None] / 255).argmax().item()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()

        if len(rb) > warmup and step % LEARN_EVERY == 0:
            batch = rb.sample()
            following = batch["next"]
            now, later = (frames / 255 for frames in (batch["observation"], following["observation"]))
            with torch.no_grad():
                value = target(later).max(1, keepdim=True).values
                goal = following["reward"] + GAMMA * value * ~following["terminated"]
            guess = online(now).gather(1, batch["action"].unsqueeze(1))
            optimizer.zero_grad()
            nn.functional.mse_loss(guess, goal).backward()
            optimizer.step()
        if step % FOLLOW_EVERY == 0:
            target.load_state_dict(online.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="catch", help="catch, or a game of Atari, such as ALE/Pong-v5")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rows before it learns")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.env, arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
