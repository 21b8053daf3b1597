"""R2D2 (Kapturowski et al., 2019): a recurrent agent learns from sequences that are drawn by priority, and begins each with a burn-in.

Sixteen games at a time show a sign in their first step, and ask for it four to eight steps later, when nothing of it is to be
seen. Each game writes into its own lane, with the agent's state before every step. Any step may be drawn: a sequence is the four
steps before it and the eight from it on, and is padded where the game has fewer. Its priority is 0.9 times its largest error and
0.1 times their mean. The states that the learner computes replace those that the agent had.
The paper has an LSTM, 80 steps, targets of five steps and a rescaled value; here are a GRU, 12 steps, targets of one and plain values.
"""

import argparse
import copy
import logging
import time

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from engram import LazyTensorStorage, Sequence, TensorDictPrioritizedReplayBuffer, TensorDictRoundRobinWriter

GAMES, ROWS, BATCH = 16, 16_000, 32
BURN_IN, LENGTH, HIDDEN = 4, 8, 32
LEARNING_RATE, GAMMA, FOLLOW = 2e-3, 0.97, 0.02
SIGNS, SOONEST, LATEST = 3, 4, 8


class Games:
    """Games of memory, many at a time. The sign is shown in the first step, and the last one asks for it."""

    def __init__(self, number: int) -> None:
        self.sign, self.age, self.asked = torch.empty(3, number, dtype=torch.int64)
        self.begin(torch.ones(number, dtype=torch.bool))

    def begin(self, which: Tensor) -> None:
        number = int(which.sum())
        self.sign[which], self.age[which] = torch.randint(SIGNS, (number,)), 0
        self.asked[which] = torch.randint(SOONEST, LATEST + 1, (number,))

    def observe(self) -> Tensor:
        """float32 ``[number, SIGNS + 1]``: the sign in the first step, else 0; 1 in the last step, else 0."""
        shown = nn.functional.one_hot(self.sign, SIGNS) * (self.age == 0).unsqueeze(1)
        return torch.cat([shown, (self.age == self.asked).unsqueeze(1)], 1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and which games are over: ``[number]`` each."""
        over = self.age == self.asked
        self.age += 1
        return (over & (action == self.sign)).float(), over


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIGNS + 1, HIDDEN)
        self.value = nn.Linear(HIDDEN, SIGNS)

    def unroll(self, observation: Tensor, real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[B, T, HIDDEN]`` before and after each step, from the state before the first. Padding changes nothing."""
        before, after = [], []
        for now, exists in zip(observation.unbind(1), real.unbind(1), strict=True):
            before.append(state)
            state = torch.where(exists.unsqueeze(1), self.cell(now, state), state)
            after.append(state)
        return torch.stack(before, 1), torch.stack(after, 1)

    def following(self, observation: Tensor, states: Tensor) -> Tensor:
        """Values ``[B, T, SIGNS]`` of the observations after each step, from the states after it."""
        after: Tensor = self.value(self.cell(observation.flatten(0, 1), states.flatten(0, 1)))
        return after.unflatten(0, states.shape[:2])

    @torch.no_grad()
    def act(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The best actions ``[B]`` for observations and states, and the states after them."""
        state = self.cell(observation, state)
        return self.value(state).argmax(1), state


def errors_of(batch: TensorDictBase, agent: Agent, follower: Agent) -> tuple[Tensor, Tensor]:
    """The errors of double Q-learning ``[B, T]``, and the states before each step."""
    real, stored = batch["validity_mask"], batch["state"][:, 0]
    before, states = agent.unroll(batch["observation"], real, stored)
    value = agent.value(states).gather(2, batch["action"].unsqueeze(2))
    following = batch["next", "observation"]
    with torch.no_grad():
        best = agent.following(following, states).argmax(2, keepdim=True)
        _, states = follower.unroll(batch["observation"], real, stored)
        bootstrap = follower.following(following, states).gather(2, best)
        target = batch["next", "reward"] + GAMMA * bootstrap * ~batch["next", "done"]
    return (value - target).squeeze(2), before.detach()


def score(agent: Agent) -> float:
    """The share of 512 games in which the agent remembers the sign."""
    games, state, right = Games(512), torch.zeros(512, HIDDEN), 0.0
    playing = torch.ones(512, dtype=torch.bool)
    for _ in range(LATEST + 1):
        action, state = agent.act(games.observe(), state)
        reward, over = games.step(action)
        right += float(reward[playing].sum())
        playing &= ~over
    return right / 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600, help="of every game")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("engram").setLevel("WARNING")  # do not log allocations
    torch.set_num_threads(1)  # batches are so small that more threads make them slower
    torch.manual_seed(arguments.seed)

    unit = Sequence(LENGTH, burn_in=BURN_IN, priority_eta=0.9)
    replay = TensorDictPrioritizedReplayBuffer(
        alpha=0.9,
        beta=0.6,
        storage=LazyTensorStorage(ROWS, lanes=GAMES),
        sample_unit=unit,
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=BATCH,
    )
    agent = Agent()
    follower = copy.deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, fused=True)
    games, state = Games(GAMES), torch.zeros(GAMES, HIDDEN)
    refreshed, started = 0, time.perf_counter()
    for step in range(1, arguments.steps + 1):
        row = TensorDict({"observation": games.observe(), "state": state}, [GAMES])
        action, state = agent.act(row["observation"], state)
        explore = torch.rand(GAMES) < 0.3
        row["action"] = torch.where(explore, torch.randint(SIGNS, (GAMES,)), action)
        reward, over = (column.unsqueeze(1) for column in games.step(row["action"]))
        row["next"] = {"observation": games.observe(), "reward": reward, "done": over}
        replay.extend(row)  # one step of every game, each to its lane
        state = state.masked_fill(over, 0)  # a game starts without memory
        games.begin(over.squeeze(1))
        if step < 2 * LATEST:
            continue
        batch = replay.sample().reshape(BATCH, unit.total)
        error, before = errors_of(batch, agent, follower)
        real = batch["validity_mask"]
        optimizer.zero_grad()
        (batch["priority_weight"] * error.square())[real & batch["learning_mask"]].mean().backward()
        optimizer.step()
        for slow, fast in zip(follower.parameters(), agent.parameters(), strict=True):
            slow.lerp_(fast.detach(), FOLLOW)
        batch["td_error"] = error.detach().abs()
        replay.update_tensordict_priority(batch)
        drawn = batch["index_generation"].where(real, -1)  # a step that padding repeats is not written again
        result = replay.update_if_present(index=batch["index"], generation=drawn, patch={"state": before})
        refreshed += result.updated_count
        if step % max(1, arguments.steps // 20) == 0:
            print(f"step {step}, {time.perf_counter() - started:.0f} s: right in {score(agent):.0%}")
    print(f"{refreshed} states were replaced by newer ones")
    print(f"in the end: right in {score(agent):.1%} of the games; without memory {1 / SIGNS:.0%}")


if __name__ == "__main__":
    main()
