"""End flags of which a step has several, one per agent: any of them ends a trajectory, or all do."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    HERReplayBuffer,
    Hindsight,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

AGENTS = 3


def flags_of(n, seed, dtype=torch.bool):
    """Flags of which sometimes one is set, and sometimes all are."""
    random = torch.Generator().manual_seed(seed)
    kind = torch.rand(n, generator=random)
    some = torch.rand(n, AGENTS, 1, generator=random) < 0.5
    flags = some & (kind < 0.4)[:, None, None]
    flags[kind > 0.85] = True
    return flags if dtype is torch.bool else flags.to(dtype) / (256 if dtype is torch.float32 else 1)


def rows(n, seed, dtype=torch.bool):
    flags = flags_of(n, seed, dtype)
    step = torch.arange(float(n)).unsqueeze(1)
    following = TensorDict({"done": flags, "reward": torch.ones(n, 1)}, [n])
    return TensorDict({"step": step, "achieved_goal": step, "desired_goal": -step, "next": following}, [n])


def ends_of(data, end_when):
    """Which steps end a trajectory, by plain lists."""
    every = all if end_when == "all" else any
    return [every(flag != 0 for agent in step for flag in agent) for step in data["next", "done"].tolist()]


def last_of(ends):
    """Of each step, the last one of its trajectory."""
    last, found = len(ends) - 1, []
    for step in range(len(ends) - 1, -1, -1):
        last = step if ends[step] else last
        found.append(last)
    return found[::-1]


def buffer(sampler, data, storage=None, **more):
    storage = LazyTensorStorage(len(data)) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(0), **more)
    rb.extend(data)
    return rb


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("end_when", [None, "any", "all"])
def test_sums_end_where_the_flags_say(end_when, dtype):
    data = rows(300, 1, dtype)
    last = last_of(ends_of(data, end_when))
    rb = buffer(NStep(RandomSampler(), 5, 1.0, end_when=end_when), data, batch_size=2_000)
    batch = rb.sample()
    expected = [float(min(5, last[row] - row + 1)) for row in batch["index"].tolist()]
    assert batch["next", "reward"].flatten().tolist() == expected


@pytest.mark.parametrize("end_when", [None, "any", "all"])
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_windows_end_where_the_flags_say(kind, end_when):
    data = rows(300, 2)
    last = last_of(ends_of(data, end_when))
    prioritized = (300, 0.7, 0.5) if kind is PrioritizedSliceSampler else ()
    sampler = kind(*prioritized, slice_len=3, end_when=end_when)
    rb = buffer(sampler, data, batch_size=300)
    starts = set()
    for _ in range(60):
        try:
            batch = rb.sample()
        except NoSampleable:
            continue
        index = batch["index"].flatten().reshape(-1, 3)
        assert bool((index == index[:, :1] + torch.arange(3)).all())
        starts.update(index[:, 0].tolist())
    allowed = {row for row in range(298) if last[row] - row >= 2}
    assert starts <= allowed
    assert len(starts) > 0.9 * len(allowed)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("end_when", ["any", "all"])
def test_goals_are_of_episodes_that_end_where_the_flags_say(end_when, ids):
    data = rows(300, 3)
    if ids:  # of one trajectory, which flags end besides
        data["episode"] = torch.zeros(300, dtype=torch.int64)
    last = last_of(ends_of(data, end_when))
    rb = HERReplayBuffer(
        lambda td: td["desired_goal"],
        her_ratio=1.0,
        strategy="final",
        achieved_goal_key="achieved_goal",
        end_when=end_when,
        storage=LazyTensorStorage(300),
    )
    rb.extend(data)
    batch = rb.sample(2_000)
    assert batch["desired_goal"].flatten().tolist() == [float(last[row]) for row in batch["index"].tolist()]


def test_a_table_of_any_flag_is_not_one_of_all():
    rb = buffer(SliceSampler(slice_len=2), rows(50, 4), batch_size=10)
    rb.sample()
    rb.set_sampler(SliceSampler(slice_len=2, end_when="all"))
    with pytest.raises(IncompatibleStore, match="index"):
        rb.sample()
    rb.set_sampler(SliceSampler(slice_len=2, end_when="all", index="all"))
    rb.sample()


def test_an_expander_takes_the_choice_of_what_is_inside():
    inner = SliceSampler(slice_len=2, end_when="all")
    assert NStep(inner, 2, 1.0).rules.end_when == "all"
    around = Hindsight(NStep(RandomSampler(), 2, 1.0, end_when="all"), len)
    assert around.rules.end_when == "all"
    assert Hindsight(NStep(RandomSampler(), 2, 1.0), len, end_when="any").rules.end_when is None
    with pytest.raises(ValueError, match="expected the trajectories of the NStep inside"):
        Hindsight(NStep(RandomSampler(), 2, 1.0), len, end_when="all")


@pytest.mark.parametrize(
    "sampler", [SliceSampler(slice_len=2, end_when="all"), NStep(RandomSampler(), 3, 1.0, end_when="all")]
)
def test_a_store_notes_the_choice(tmp_path, sampler):
    storage = LazyMemmapStorage(60, scratch_dir=tmp_path / "store")
    rb = buffer(sampler, rows(50, 5), storage, batch_size=10)
    rb.sample()
    rb.close()
    with ReplayBuffer.open(tmp_path / "store") as again:
        assert again.sampler.rules.end_when == "all"
        again.sample()


def test_what_earlier_versions_noted_is_read():
    for sampler in (SliceSampler(slice_len=2), NStep(RandomSampler(), 3, 1.0)):
        noted = sampler.config()
        assert "end_when" not in noted
        assert type(sampler).from_config(noted).rules.end_when is None


def test_another_choice_is_refused():
    for make in (
        lambda: SliceSampler(slice_len=2, end_when="most"),
        lambda: NStep(RandomSampler(), 2, 1.0, end_when="most"),
        lambda: HERReplayBuffer(len, storage=LazyTensorStorage(5), end_when="most"),
    ):
        with pytest.raises(ValueError, match="end_when: expected None, 'any' or 'all', got 'most'"):
            make()
