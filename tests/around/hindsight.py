"""Rows whose goals say where they come from, and what hindsight may make of them, by plain lists."""

import torch
from tensordict import TensorDict

OWN = -1.0
"""The first number of a goal that is stored: no achieved one has it."""


def achieved_of(lane, episode, step):
    """Goals of two numbers that no other row has reached."""
    return [1000.0 * lane + episode, float(step)]


def reward(rows):
    """Of the row and of its goal, so that neither may be another one."""
    goal, achieved = rows["desired_goal"], rows["achieved_goal"]
    return (10_000 * goal[:, 1] + 100 * goal[:, 0] + achieved[:, 1]).unsqueeze(-1)


def goals_of(strategy, run, row, live):
    """Which rows a goal may come from. ``run``: the rows of the trajectory, oldest first; ``live``: all rows."""
    return {"future": run[run.index(row) :], "final": run[-1:], "episode": run, "random": sorted(live)}[strategy]


def steps(lengths, *, first=0, lane=0, open_end=False, ids=False):
    """Episodes of these lengths, of which the last may go on."""
    where = [(lane, first + i, step) for i, n in enumerate(lengths) for step in range(n)]
    done = [[step + 1 == n] for n in lengths for step in range(n)]
    done[-1] = [not open_end and done[-1][0]]
    n = len(where)
    own = torch.tensor([[OWN, float(step)] for _, _, step in where])
    td = {
        "where": torch.tensor(where),
        "achieved_goal": torch.tensor([achieved_of(*one) for one in where]),
        "desired_goal": own,
        **({"episode": torch.tensor([episode for _, episode, _ in where])} if ids else {}),
    }
    following = {"desired_goal": own.clone(), "reward": torch.full((n, 1), OWN), "done": torch.tensor(done)}
    return TensorDict({**td, "next": TensorDict(following, [n])}, [n])


def check(batch, rows, relabelled, allowed, stored):
    """Refuse a batch whose first rows have not one of the goals that they may have, and the reward of it.

    ``allowed(row)``: rows that its goal may come from. ``stored[row]``: lane, episode and step that it holds.
    Returns the row that each relabelled goal comes from.
    """
    by_goal = {tuple(achieved_of(*where)): row for row, where in stored.items()}
    goals, rewards = batch["desired_goal"].tolist(), batch["next", "reward"]
    assert batch["where"].tolist() == [list(stored[row]) for row in rows]
    assert batch["achieved_goal"].tolist() == [achieved_of(*stored[row]) for row in rows]
    assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
    assert all(goal[0] == OWN for goal in goals[relabelled:])
    assert bool((rewards[relabelled:] == OWN).all())
    assert torch.equal(rewards[:relabelled], reward(batch[:relabelled]))
    chosen = [by_goal[tuple(goal)] for goal in goals[:relabelled]]
    assert all(goal in allowed(row) for row, goal in zip(rows, chosen, strict=False))
    return chosen
