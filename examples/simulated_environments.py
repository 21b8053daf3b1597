"""Thousands of simulated environments: a simulator in torch steps them all at once, and their rows stay on its device.

Each environment is a point that is to stay at the origin. A step of all of them is one slice of the storage; no index is
computed, and on a GPU no call waits for the host. Without a GPU the same runs in RAM. `python simulated_environments.py --steps 400`.
"""

import argparse
import tempfile

import torch
from torch import nn

from engram import LazyTensorStorage, ReplayBuffer

GAMMA = 0.95


class Points:
    """E points on a line, pushed to the left or to the right. A point that runs away begins again near the origin."""

    def __init__(self, count, device):
        self.state = torch.randn(count, 2, device=device)

    def step(self, action):
        position, speed = self.state.unbind(1)
        speed = 0.95 * speed + 0.1 * (2.0 * action - 1.0)
        position = position + 0.1 * speed
        after = torch.stack((position, speed), 1)
        done = position.abs() > 3
        reward = -position.abs() - done.float()
        row = {"obs": self.state, "action": action, "reward": reward, "done": done, "next_obs": after}
        self.state = torch.where(done[:, None], torch.randn_like(after), after)
        return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = 64  # steps of every environment
    folder = tempfile.TemporaryDirectory()
    mirror = {"mirror": f"{folder.name}/replay"} if device == "cuda" else {}
    storage = LazyTensorStorage(kept * given.environments, device=device, ndim=2, **mirror)
    rb = ReplayBuffer(storage=storage, batch_size=1_024)
    envs = Points(given.environments, device)
    q = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    target = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    first = last = 0.0
    for step in range(given.steps):
        with torch.no_grad():
            greedy = q(envs.state).argmax(1)
            explores = torch.rand(len(greedy), device=device) < max(0.05, 1 - 2 * step / given.steps)
            action = torch.where(explores, torch.randint_like(greedy, 2), greedy)
            row = envs.step(action)
        rb.extend({name: value.unsqueeze(1) for name, value in row.items()})  # [E, 1, ...]
        if step < 4:
            continue
        batch = rb.sample()
        with torch.no_grad():
            ahead = target(batch["next_obs"]).amax(1) * ~batch["done"]
        value = q(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, batch["reward"] + GAMMA * ahead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            target.load_state_dict(q.state_dict())
        if step == given.steps // 10:
            first = float(row["reward"].mean())
    last = float(row["reward"].mean())
    print(
        f"{given.environments:,} environments on {device.partition(':')[0]}: {rb.write_count:,} steps of all, {len(rb):,} rows kept"
    )
    print(f"mean reward {first:.2f}, in the end {last:.2f}")
    rb.close()
    folder.cleanup()


if __name__ == "__main__":
    main()
