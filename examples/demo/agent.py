"""Double DQN with a small network, and the steps of CartPole that it plays.

Source: van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning", AAAI 2016.
"""

import copy
import zlib

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn

BATCH, LEARN_FROM = 128, 500
#: Training ends when the mean return of the last 20 episodes passes this.
SOLVED = 195.0
#: Of CartPole's observations: position, velocity, angle, angular velocity.
SCALE = torch.tensor((0.4, 0.5, 5.0, 0.5))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
        self.target, self.updates = copy.deepcopy(self.online), 0
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=2.5e-4, fused=True)

    def learn(self, batch):
        """Update once, and set the absolute errors as ``"td_error"``. Truncated steps bootstrap."""
        value = self.online(batch["observation"] * SCALE).gather(1, batch["action"].unsqueeze(1))
        following = batch["next", "observation"] * SCALE
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            bootstrap = self.target(following).gather(1, best) * ~batch["next", "terminated"]
            target = batch["next", "reward"] + 0.99 * bootstrap
        losses = nn.functional.smooth_l1_loss(value, target, reduction="none").squeeze(1)
        self.optimizer.zero_grad()
        (batch.get("priority_weight", torch.ones(1)) * losses).mean().backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % 200 == 0:
            self.target.load_state_dict(self.online.state_dict())
        batch["td_error"] = (target - value.detach()).abs().squeeze(1)

    @torch.no_grad()
    def play(self, seed, written):
        """Steps without end: rows, each with the return of the episode if it ends there. It explores less, the more is ``written()``."""
        generator, environment = torch.Generator().manual_seed(seed), gymnasium.make("CartPole-v1")
        observation, total = torch.from_numpy(environment.reset(seed=seed)[0]), 0.0
        while True:
            explores = float(torch.rand((), generator=generator)) < max(0.05, 1 - 0.95 * written() / 4_000)
            values = torch.rand(2, generator=generator) if explores else self.online(observation * SCALE)
            following, reward, terminated, truncated, _ = environment.step(int(values.argmax()))
            total += float(reward)
            done = terminated or truncated
            outcome = {"reward": float(reward), "terminated": terminated, "truncated": truncated, "done": done}
            after = {name: torch.tensor([value]) for name, value in outcome.items()}
            after["observation"] = torch.from_numpy(following)
            row = TensorDict({"observation": observation, "action": values.argmax(), "next": after})
            yield row, total if done else None
            observation = after["observation"]
            if done:
                observation, total = torch.from_numpy(environment.reset()[0]), 0.0


def checksums(rows):
    """CRC-32 of each row, over all of its fields but ``"index"``, which the buffer adds."""
    rows = rows.exclude("index")
    fields = [rows[key].reshape(len(rows), -1).contiguous() for key in sorted(rows.keys(True, True), key=str)]
    return [zlib.crc32(row) for row in torch.cat([field.view(torch.uint8) for field in fields], 1).numpy()]


def mean_return(returns):
    """Of the last 20 episodes; 0 before there are 20."""
    return sum(returns[-20:]) / 20 if len(returns) >= 20 else 0.0


def progress(steps, returns, rates):
    bar = "█" * int(20 * min(mean_return(returns) / SOLVED, 1))
    return f"step {steps:6,}  return {mean_return(returns):4.0f} {bar:░<20} {rates}"
