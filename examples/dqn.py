"""Deep Q-learning on CartPole (Mnih et al., 2015, "Human-level control through deep reinforcement learning").

``rb.record(env)`` writes every step, so the loop only acts and learns. The replay lies in a folder: with ``--folder``, the next
start begins with the rows of the last one, and needs no warm-up. Hyper-parameters are those of CleanRL's ``dqn.py``.
"""

import argparse
import random
import tempfile

import gymnasium
import torch
from torch import nn

from engram import ReplayBuffer

ROWS, BATCH, WARMUP = 10_000, 128, 10_000
GAMMA, LEARNING_RATE = 0.99, 2.5e-4
LEARN_EVERY, FOLLOW_EVERY = 10, 500  # steps
LEAST, EXPLORING = 0.05, 0.5  # the chance of a random action sinks to the one, in this share of the run


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs))


def train(folder: str, steps: int, warmup: int, seed: int) -> None:
    rb = ReplayBuffer.open_or_create(folder, ROWS, batch_size=BATCH)
    env = rb.record(gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))
    random.seed(seed)
    torch.manual_seed(seed)
    env.action_space.seed(seed)
    online, target = (network(env.observation_space.shape[0], int(env.action_space.n)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=LEARNING_RATE)

    observation, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        if random.random() < max(LEAST, 1 - (1 - LEAST) * step / (EXPLORING * steps)):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = online(torch.from_numpy(observation)).argmax().item()
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            print(f"step {step}: return {info['episode']['r']:.0f}")
            observation, _ = env.reset()

        if rb.write_count > warmup and step % LEARN_EVERY == 0:
            batch = rb.sample()
            following = batch["next"]
            with torch.no_grad():
                value = target(following["observation"]).max(1).values
                goal = following["reward"] + GAMMA * value * ~following["terminated"]
            guess = online(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.mse_loss(guess, goal).backward()
            optimizer.step()
        if step % FOLLOW_EVERY == 0:
            target.load_state_dict(online.state_dict())
    rb.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rows before it learns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the replay stays; default: nowhere")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is so small that more threads make it slower
    with tempfile.TemporaryDirectory() as temporary:
        train(arguments.folder or temporary, arguments.steps, arguments.warmup, arguments.seed)


if __name__ == "__main__":
    main()
