"""Rows whose end flags or next observations are not below ``next``: what several steps say of the last one, beside plain lists."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    FinalObservations,
    FrameStack,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    RandomSampler,
    ReplayBuffer,
)
from engram._support.nested import find_field

GAMMA = 0.5
Row = namedtuple("Row", ["obs", "next_obs", "reward", "done"])
Next = namedtuple("Next", ["obs", "reward"])
Nested = namedtuple("Nested", ["obs", "terminated", "next"])

#: By layout: the rows of ``(obs, following, reward, terminated, truncated)``; where a batch holds what follows, the reward and the end; and
#: the arguments.
LAYOUTS = {
    "CleanRL": (
        lambda o, f, r, e, c: {"obs": o, "next_obs": f, "reward": r, "done": e | c},
        (("next_obs",), ("reward",), [("done",)]),
        {"reward_key": "reward"},
    ),
    "Tianshou": (
        lambda o, f, r, e, c: {"obs": o, "obs_next": f, "rew": r, "terminated": e, "truncated": c},
        (("obs_next",), ("rew",), [("terminated",), ("truncated",)]),
        {"reward_key": "rew"},
    ),
    "flags beside the observation": (
        lambda o, f, r, e, c: {"obs": o, "terminated": e, "truncated": c, "next": {"obs": f, "reward": r}},
        (("next", "obs"), ("next", "reward"), [("terminated",), ("truncated",)]),
        {},
    ),
    "done beside the observation": (
        lambda o, f, r, e, c: {"obs": o, "done": e | c, "next": {"obs": f, "reward": r}},
        (("next", "obs"), ("next", "reward"), [("done",)]),
        {},
    ),
    "one flag beside the observation": (
        lambda o, f, r, e, c: {
            "obs": o,
            "terminated": e,
            "next": {"obs": f, "reward": r, "truncated": c, "done": e | c},
        },
        (("next", "obs"), ("next", "reward"), [("terminated",), ("next", "truncated")]),
        {},
    ),
    "nested": (
        lambda o, f, r, e, c: {"agent": {"obs": o, "next_obs": f}, "reward": r, "done": e | c},
        (("agent", "next_obs"), ("reward",), [("done",)]),
        {"reward_key": "reward"},
    ),
    "next further below": (
        lambda o, f, r, e, c: {"agent": {"obs": o, "next": {"obs": f}}, "reward": r, "done": e | c},
        (("agent", "next", "obs"), ("reward",), [("done",)]),
        {"reward_key": "reward"},
    ),
    "flags of other names": (
        lambda o, f, r, e, c: {"obs": o, "next_obs": f, "reward": r, "dead": e, "late": c},
        (("next_obs",), ("reward",), [("dead",), ("late",)]),
        {"reward_key": "reward", "end_keys": ["dead", "late"]},
    ),
    "ids beside a flag": (
        lambda o, f, r, e, c: {"obs": o, "next_obs": f, "reward": r, "done": e | c, "episode": o // 100},
        (("next_obs",), ("reward",), [("done",)]),
        {"reward_key": "reward"},
    ),
    "next observations of another name": (
        lambda o, f, r, e, c: {"obs": o, "obs2": f, "reward": r, "done": e | c},
        (("obs2",), ("reward",), [("done",)]),
        {"reward_key": "reward", "next_keys": ["obs2"]},
    ),
    "named tuples": (
        lambda o, f, r, e, c: Row(o, f, r, e | c),
        (("next_obs",), ("reward",), [("done",)]),
        {"reward_key": "reward"},
    ),
    "nested named tuples": (
        lambda o, f, r, e, c: Nested(o, e | c, Next(f, r)),
        (("next", "obs"), ("next", "reward"), [("terminated",)]),
        {},
    ),
}


def steps(lengths):
    """Episodes one behind the other, the last one open: ``(obs, following, reward, terminated, truncated)`` of each step."""
    return [
        (100 * e + t, 100 * e + t + 1, 1.0 + t, end and e % 2 == 0, end and e % 2 == 1)
        for e, length in enumerate(lengths)
        for t in range(length)
        for end in [t + 1 == length and e + 1 < len(lengths)]
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_the_last_step_says_what_follows(layout, lengths, n):
    of, (following, reward, flags), arguments = LAYOUTS[layout]
    told = steps(lengths)
    columns = [np.array(column) for column in zip(*told, strict=True)]
    sampler = NStep(RandomSampler(), n, GAMMA, **arguments)
    rb = ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler, batch_size=64)
    rb.extend(of(columns[0], columns[1], columns[2].astype(np.float32), *columns[3:]))
    batch, info = rb.sample(return_info=True)
    for i, row in enumerate(info["index"].tolist()):
        ahead = 0
        while ahead + 1 < n and row + ahead + 1 < len(told) and not any(told[row + ahead][3:]):
            ahead += 1
        last = told[row + ahead]
        obs = find_field(batch, ("agent", "obs") if following[0] == "agent" else ("obs",))
        assert int(obs[i]) == told[row][0]
        assert int(find_field(batch, following)[i]) == last[1]
        assert float(find_field(batch, reward)[i]) == sum(GAMMA**j * told[row + j][2] for j in range(ahead + 1))
        over = [bool(find_field(batch, flag)[i]) for flag in flags]
        assert over == ([last[3], last[4]] if len(flags) == 2 else [last[3] or last[4]])


def test_flags_of_the_observation_stay():
    """TorchRL's rows have both: those below ``next`` are the step's."""
    done = torch.tensor([False, False, True, False, False, True])
    start = torch.tensor([True, False, False, True, False, False])
    rows = {
        "obs": torch.arange(6),
        "done": start,
        "next": {"obs": 1 + torch.arange(6), "reward": torch.ones(6), "done": done},
    }
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=NStep(RandomSampler(), 2, GAMMA), batch_size=64)
    rb.extend(rows)
    batch = rb.sample()
    assert (batch["done"] == start[batch["obs"]]).all()
    assert batch["next"]["done"].tolist() == [i in (1, 2, 4, 5) for i in batch["obs"].tolist()]


def test_a_reward_that_is_not_found_says_how_to_name_it():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=NStep(RandomSampler(), 2, GAMMA), batch_size=4)
    rb.extend({"obs": torch.arange(4.0), "reward": torch.ones(4), "done": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(KeyError, match=r"got \('next', 'reward'\)\. Name the one that holds rewards with reward_key="):
        rb.sample()


@pytest.mark.parametrize("following", ["next_obs", "obs_next"])
def test_stacks_of_next_frames_begin_with_the_first_observation(following):
    obs = torch.arange(6.0).reshape(6, 1)
    rows = {"obs": obs, following: obs + 1, "done": torch.arange(6) == 2}
    sampler = FrameStack(RandomSampler(), 3, -1, ["obs", following])
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=64)
    rb.extend(rows)
    batch = rb.sample()
    seen = {
        int(now[-1]): (now.tolist(), after.tolist()) for now, after in zip(batch["obs"], batch[following], strict=True)
    }
    assert seen == {
        0: ([0, 0, 0], [0, 0, 1]),
        1: ([0, 0, 1], [0, 1, 2]),
        2: ([0, 1, 2], [1, 2, 3]),
        3: ([3, 3, 3], [3, 3, 4]),
        4: ([3, 3, 4], [3, 4, 5]),
        5: ([3, 4, 5], [4, 5, 6]),
    }


@pytest.mark.parametrize("flags", [["done"], ["terminated", "truncated"], ["truncated"]])
def test_final_observations_of_flags_beside_the_observation(flags):
    finals = FinalObservations(["obs"], LazyTensorStorage(8))
    sampler = NextFromFollowing(RandomSampler(), finals)
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, transform=finals, batch_size=64)
    obs = torch.tensor([0, 1, 2, 10, 11, 12])
    ended = obs % 10 == 2
    rb.extend({"obs": obs, **dict.fromkeys(flags, ended), "next": {"obs": obs + 1}})
    batch = rb.sample()
    assert (batch["next"]["obs"] == batch["obs"] + 1).all()
    assert len(finals.storage) == 2
    assert {*batch["obs"].tolist()} == {*obs.tolist()}


def test_rows_without_flags_are_told_of_both_kinds():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=FrameStack(RandomSampler(), 2, -1, ["obs"]), batch_size=4)
    rb.extend({"obs": torch.zeros(4, 1)})
    with pytest.raises(RuntimeError, match="or of these names beside the observation, or with a 'step_type'"):
        rb.sample()
