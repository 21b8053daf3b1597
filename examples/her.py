"""Hindsight experience replay on bit flipping (Andrychowicz et al., 2017): the same agent learns with it, and nothing without.

An episode shows some bits, and others that are wanted. Each step flips one bit; the reward is 0 if all are as wanted, else -1. Hardly
any random episode gets there, so rewards alone say nothing. In hindsight every episode has reached something: rows are drawn with
bits as wanted that their own episode came to later.
"""

import argparse
import logging

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from engram import HERReplayBuffer, LazyTensorStorage

ENVS, ROWS, BATCH = 16, 64_000, 256
GAMMA, FOLLOW, RATE, EXPLORE = 0.98, 0.05, 1e-3, 0.1


def reward(rows: TensorDict) -> Tensor:
    """``[B, 1]``: 0 where the step made the bits as wanted."""
    same = (rows["next", "bits"] == rows["wanted"]).all(-1, keepdim=True)
    return same.float() - 1


class BitFlips:
    """Environments that are stepped together."""

    def __init__(self, bits: int) -> None:
        self.bits = torch.randint(2, (ENVS, bits)).float()
        self.wanted = torch.randint(2, (ENVS, bits)).float()
        self.steps = torch.zeros(ENVS, 1)
        self.successes = self.episodes = 0

    def step(self, action: Tensor) -> TensorDict:
        """Rows ``[ENVS]``. Those that end begin anew."""
        rows = TensorDict({"bits": self.bits, "wanted": self.wanted, "action": action.unsqueeze(-1)}, [ENVS])
        self.bits = self.bits.clone()
        self.bits[torch.arange(ENVS), action] = 1 - self.bits[torch.arange(ENVS), action]
        self.steps = self.steps + 1
        rows["next"] = TensorDict({"bits": self.bits}, [ENVS])
        rows["next", "reward"] = reward(rows)
        terminated = rows["next", "reward"] == 0
        done = terminated | (self.steps == self.bits.shape[1])
        rows["next", "terminated"], rows["next", "done"] = terminated, done
        self.successes += int(terminated.sum())
        self.episodes += int(done.sum())
        fresh = torch.randint(2, (2, *self.bits.shape)).float()
        self.bits, self.wanted = torch.where(done, fresh[0], self.bits), torch.where(done, fresh[1], self.wanted)
        self.steps = self.steps * ~done
        return rows


def network(bits: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * bits, 256), nn.ReLU(), nn.Linear(256, bits))


def train(bits: int, steps: int, her_ratio: float, seed: int) -> float:
    """The share of successes among the episodes of the last quarter."""
    torch.manual_seed(seed)
    storage = LazyTensorStorage(ROWS, lanes=ENVS)  # each environment writes to a lane of its own
    rb = HERReplayBuffer(
        reward,
        her_ratio=her_ratio,
        goal_key="wanted",
        achieved_goal_key=("next", "bits"),
        storage=storage,
        batch_size=BATCH,
    )
    values, slow = network(bits), network(bits)
    slow.load_state_dict(values.state_dict())
    optimizer = torch.optim.Adam(values.parameters(), lr=RATE)
    envs = BitFlips(bits)
    for step in range(steps):
        if step == steps * 3 // 4:
            envs.successes = envs.episodes = 0
        with torch.no_grad():
            best = values(torch.cat([envs.bits, envs.wanted], -1)).argmax(-1)
        random = torch.rand(ENVS) < EXPLORE
        rb.extend(envs.step(torch.where(random, torch.randint(bits, (ENVS,)), best)))

        batch = rb.sample()
        gained, wanted = batch["next", "reward"], batch["wanted"]
        with torch.no_grad():
            following = slow(torch.cat([batch["next", "bits"], wanted], -1)).amax(-1, keepdim=True)
            goal = (gained + GAMMA * following * (gained < 0)).clamp(-1 / (1 - GAMMA), 0)  # as wanted is the end
        value = values(torch.cat([batch["bits"], wanted], -1)).gather(-1, batch["action"])
        optimizer.zero_grad()
        (value - goal).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), values.parameters(), strict=True):
                old.lerp_(new, FOLLOW)
    rb.close()
    return envs.successes / max(envs.episodes, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8_000, help="of each environment")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.getLogger("engram").setLevel("WARNING")
    torch.set_num_threads(1)
    for name, her_ratio in (("with hindsight", 0.8), ("without", 0.0)):
        share = train(arguments.bits, arguments.steps, her_ratio, arguments.seed)
        print(f"{name}: {100 * share:.0f}% of the last episodes end as wanted", flush=True)


if __name__ == "__main__":
    main()
