"""Memory from windows: a recurrent agent learns to turn as told by a sign at the beginning of a corridor.

The agent walks through sixteen mazes at a time. Each maze writes into its own lane, so the steps of an episode are
contiguous. A GRU learns action values from windows of them. At the fork the agent sees the same for both signs, so an agent
without memory is right in at most half of the mazes.
"""

import argparse
import copy
import time

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from engram import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

LANES, ROWS = 16, 16_000
WINDOWS, LENGTH, HIDDEN = 32, 12, 32
LEARNING_RATE, GAMMA, FOLLOW = 2e-3, 0.95, 0.02
CORRIDOR, LIMIT = 8, 40  # cells before the fork; steps of an episode, at most
WALK, LEFT, RIGHT = range(3)


class Mazes:
    """T-mazes (Bakker, 2002), many at a time. The sign, -1 or 1, can only be read in the first cell."""

    def __init__(self, number: int) -> None:
        self.sign, self.cell, self.age = torch.empty(3, number, dtype=torch.int64)
        self.begin(torch.ones(number, dtype=torch.bool))

    def begin(self, which: Tensor) -> None:
        self.sign[which] = torch.randint(2, (int(which.sum()),)) * 2 - 1
        self.cell[which] = self.age[which] = 0

    def observe(self) -> Tensor:
        """float32 ``[number, 2]``: the sign in the first cell, else 0; 1 at the fork, else 0."""
        return torch.stack([self.sign * (self.cell == 0), self.cell == CORRIDOR], 1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Walk, or turn at the fork. Returns rewards, which mazes ended, and which reached the limit: ``[number]`` each."""
        turned = (self.cell == CORRIDOR) & (action != WALK)
        right = turned & (action == torch.where(self.sign > 0, RIGHT, LEFT))
        self.cell += (action == WALK) & (self.cell < CORRIDOR)
        self.age += 1
        return right.float(), turned, (self.age == LIMIT) & ~turned


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, HIDDEN, batch_first=True)
        self.value = nn.Linear(HIDDEN, 3)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[B, T, 3]`` and states ``[B, T, HIDDEN]`` of windows ``[B, T, 2]``, from states ``[B, HIDDEN]`` before them."""
        states, _ = self.gru(observation, state.unsqueeze(0))
        return self.value(states), states

    @torch.no_grad()
    def act(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The best actions ``[B]`` for observations ``[B, 2]`` and states, and the states after them."""
        values, states = self(observation.unsqueeze(1), state)
        return values.squeeze(1).argmax(1), states.squeeze(1)


def unbroken(batch: TensorDictBase) -> bool:
    """Whether each step of every window begins where the previous one ended."""
    follows = (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all(2)
    return bool(follows[batch["collector", "mask"][:, 1:]].all())


def loss_of(batch: TensorDictBase, agent: Agent, follower: Agent) -> Tensor:
    """The loss of double Q-learning. ``batch``: ``[WINDOWS, LENGTH]``."""
    # A window has steps of one episode only, so one unroll from the agent's state covers all of them.
    observation, before = batch["observation"], batch["state"][:, 0]
    following = batch["next", "observation"].flatten(0, 1).unsqueeze(1)
    values, states = agent(observation, before)
    value = values.gather(2, batch["action"].unsqueeze(2))
    with torch.no_grad():
        best = agent(following, states.flatten(0, 1))[0].argmax(2, keepdim=True)
        _, states = follower(observation, before)
        bootstrap = follower(following, states.flatten(0, 1))[0].gather(2, best).view_as(value)
        # The last step of every window is marked as truncated. Truncated steps bootstrap; terminated ones do not.
        target = batch["next", "reward"] + GAMMA * bootstrap * ~batch["next", "terminated"]
    real = batch["collector", "mask"]  # false for the padding of short episodes
    return nn.functional.smooth_l1_loss(value[real], target[real])


def score(agent: Agent) -> float:
    """The share of 256 mazes in which the agent turns as the sign says."""
    mazes, state = Mazes(256), torch.zeros(256, HIDDEN)
    walking, right = torch.ones(256, dtype=torch.bool), 0.0
    for _ in range(LIMIT):
        action, state = agent.act(mazes.observe(), state)
        reward, turned, _ = mazes.step(action)
        right += float(reward[walking].sum())
        walking &= ~turned
    return right / 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4_000, help="of every maze")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # batches are so small that more threads make them slower
    torch.manual_seed(arguments.seed)

    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS, lanes=LANES),
        sampler=SliceSampler(slice_len=LENGTH, strict_length=False, pad_output=True),  # shorter episodes count, too
        batch_size=WINDOWS * LENGTH,
    )
    agent = Agent()
    follower = copy.deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, fused=True)
    mazes, lanes, state = Mazes(LANES), torch.arange(LANES), torch.zeros(LANES, HIDDEN)
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        row = TensorDict({"observation": mazes.observe(), "state": state}, batch_size=[LANES])
        action, state = agent.act(row["observation"], state)
        explore = torch.rand(LANES) < max(0.05, 1 - 2 * step / arguments.steps)
        row["action"] = torch.where(explore, torch.randint(3, (LANES,)), action)
        reward, turned, late = (column.unsqueeze(1) for column in mazes.step(row["action"]))
        done = turned | late
        row["next"] = {"observation": mazes.observe(), "reward": reward, "terminated": turned, "truncated": late}
        row["next", "done"] = done
        replay.extend(row, lane=lanes)  # one step of every lane
        state = state.masked_fill(done, 0)  # an episode starts without memory
        mazes.begin(done.squeeze(1))
        if step < 2 * LENGTH:
            continue
        batch = replay.sample().reshape(WINDOWS, LENGTH)
        if step == 2 * LENGTH:
            print(f"{WINDOWS} windows of up to {LENGTH} steps, each from one episode: {unbroken(batch)}")
        loss = loss_of(batch, agent, follower)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(follower.parameters(), agent.parameters(), strict=True):
            slow.lerp_(fast.detach(), FOLLOW)
        if step % max(1, arguments.steps // 10) == 0:
            print(f"step {step}, {time.perf_counter() - started:.0f} s: right in {score(agent):.0%}")
    print(f"in the end: right in {score(agent):.1%} of the mazes; without memory at most 50%")


if __name__ == "__main__":
    main()
