"""Offline: an agent learns to cross a frozen lake from a data set of Minari's, in which nobody meant to arrive.

Random walks become a data set of Minari's. The import writes them to a directory once; killed, it goes on where it was. From
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
    from minari.data_collector import EpisodeBuffer

    env, walks = gym.make(LAKE, is_slippery=False), []
    env.action_space.seed(seed)
    for number in range(episodes):
        places, actions, rewards, flags = [env.reset(seed=seed + number)[0]], [], [], [(False, False)]
        while not any(flags[-1]):
            actions.append(env.action_space.sample())
            place, reward, *flag, _ = env.step(actions[-1])
            places.append(place)
            rewards.append(reward)
            flags.append(tuple(flag))
        ends = {"terminations": [one for one, _ in flags[1:]], "truncations": [one for _, one in flags[1:]]}
        walks.append(EpisodeBuffer(number, observations=places, actions=actions, rewards=rewards, **ends))
    about = {"algorithm_name": "random walks", "author": "engram", "author_email": "none", "code_permalink": "none"}
    minari.create_dataset_from_buffers(NAME, buffer=walks, env=env, eval_env=env, description="of a lake", **about)
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
    parser.add_argument("--episodes", type=int, default=800)
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
