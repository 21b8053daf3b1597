"""Offline: an agent learns to cross a frozen lake from a data set of Minari's, in which nobody meant to arrive.

Random walks are recorded by Minari's own collector. The import writes them to a directory once; killed, it goes on where it was. From
then on it is a store as any other, which several trainings may read: here 64 of its steps are drawn at a time, with what was seen after
them, and Q-learning makes a table of values of them. In the lake itself the agent acts for the first time when it is judged.
"""

import argparse
import os
import tempfile
from pathlib import Path

import gymnasium as gym
import torch

from engram import ReplayBuffer
from engram.datasets import from_minari

LAKE, NAME = "FrozenLake-v1", "lake/random-v0"
GAMMA, RATE, BATCH = 0.95, 0.5, 64


def record(episodes: int, seed: int) -> None:
    """A data set of Minari's, by name."""
    import minari

    env = minari.DataCollector(gym.make(LAKE, is_slippery=False))
    env.action_space.seed(seed)
    for number in range(episodes):
        env.reset(seed=seed + number)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
    env.create_dataset(dataset_id=NAME, algorithm_name="random walks", author="engram", description="of a frozen lake")
    env.close()


def learn(data: ReplayBuffer, updates: int) -> torch.Tensor:
    """The value of each action in each place, ``[places, actions]``, from recorded steps alone."""
    values = torch.zeros(16, 4)
    for _ in range(updates):
        batch = data.sample()
        place, action = batch["observation"].flatten(), batch["action"].flatten()
        after = batch["next"]["observation"].flatten()
        more = GAMMA * values[after].amax(1) * ~batch["next"]["terminated"].flatten()
        target = batch["next"]["reward"].flatten().float() + more
        values[place, action] += RATE * (target - values[place, action])
    return values


def arrives(values: torch.Tensor) -> bool:
    """Whether the agent crosses the lake."""
    env = gym.make(LAKE, is_slippery=False)
    place, _ = env.reset()
    ended, reward = False, 0.0
    while not ended:
        place, reward, terminated, truncated, _ = env.step(int(values[place].argmax()))
        ended = terminated or truncated
    env.close()
    return reward > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1500)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder  # before Minari is imported
        record(arguments.episodes, arguments.seed)
        with from_minari(NAME, Path(folder) / "store", batch_size=BATCH) as data:
            numbers, returns = data["collector", "traj_ids"], data["episode_return"]
            arrived = len(numbers[returns > 0].unique())
            print(f"{len(numbers.unique())} episodes of {len(data)} steps: {arrived} arrive")
            values = learn(data, arguments.updates)
    print(f"the agent arrives: {arrives(values)}")


if __name__ == "__main__":
    main()
