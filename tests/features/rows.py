"""Rows that say who they are: ``who = 100 * trajectory + step``. All that a feature may show follows from the steps that are stored."""

import torch
from tensordict import TensorDict

LENGTHS = (5, 4, 6)  # steps of the trajectories, in turn
APART = 50  # trajectories from this number on are written after all else


def length_of(trajectory):
    return LENGTHS[trajectory % 3]


def whos_in(*trajectories):
    """The steps of whole trajectories."""
    return {100 * number + step for number in trajectories for step in range(length_of(number))}


def scrambled(who):
    """A number of their own for steps below 10007, in no order."""
    return who * 7919 % 10007


def steps(trajectory):
    """A whole trajectory."""
    n = length_of(trajectory)
    step = torch.arange(n)
    who = 100 * trajectory + step
    done = (step == n - 1).unsqueeze(-1)
    return TensorDict(
        {
            "who": who,
            "episode": torch.full((n,), trajectory),
            "name": torch.full((n, 4), trajectory, dtype=torch.uint8),
            "prompt": torch.full((n,), trajectory),
            "same": torch.zeros(n, dtype=torch.int64),
            "step": step,
            "obs": who.float().unsqueeze(-1),
            "never": torch.zeros_like(done),
            "version": scrambled(who),
            "goal": torch.full((n, 1), -1.0),
            "next": {
                "obs": (who + 1).float().unsqueeze(-1),
                "reward": step.float().unsqueeze(-1),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [n],
    )


def by_trajectory(whos):
    """The steps of each trajectory, in order."""
    found = {}
    for who in sorted(whos):
        found.setdefault(who // 100, []).append(who)
    return found


def window(own, first, n):
    """``n`` steps from a position on, the first and the last one in place of those that are missing."""
    return [own[min(max(at, 0), len(own) - 1)] for at in range(first, first + n)]


def whos_of(rb):
    """Who is stored."""
    whos = rb[:]["who"].tolist() if rb.storage.initialized else []
    assert len(set(whos)) == len(whos), "a step is stored twice"
    return set(whos)


def check_whole(batch):
    """Each row has the bytes of its step. (A move to other ranks numbers the episodes anew.)"""
    who = batch["who"].float()
    assert torch.equal(batch["next", "obs"].squeeze(-1), who + 1)
    assert torch.equal(batch["next", "reward"].squeeze(-1), batch["step"].float())
    assert torch.equal(batch["who"] % 100, batch["step"])
    assert torch.equal(batch["who"] // 100, batch["prompt"])
    assert (batch["name"] == batch["prompt"].unsqueeze(-1)).all()
