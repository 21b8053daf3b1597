"""The goals that hindsight takes by default are those that actions reached; ends of relabelled rows follow from ``end_fn``."""

import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FinalObservations,
    HERReplayBuffer,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
)

STRATEGIES = ["final", "future", "episode"]
LENGTHS = [5, 3, 7, 1]


def episodes(lengths=LENGTHS, *, width=1, flags=("done",), key=("next", "achieved_goal")):
    """Rows that count: the step from ``x`` reaches ``x + 1``, and an episode begins at a hundred of its own."""
    at = torch.cat([100.0 * (i + 1) + torch.arange(n) for i, n in enumerate(lengths)])[:, None].repeat(1, width)
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    n = len(at)
    rows = TensorDict({"achieved_goal": at, "desired_goal": torch.full((n, width), -1.0)}, [n])
    rows["next"] = TensorDict({"reward": torch.zeros(n, 1), **{flag: done.clone() for flag in flags}}, [n])
    rows[key] = at + 1
    return rows


def reached(rows, key=("next", "achieved_goal")):
    found = rows["next"][key[1]] if isinstance(key, tuple) else rows[key]
    return (found == rows["desired_goal"]).all(-1, keepdim=True).float()


def lasts(batch):
    """What the episode of each row reaches at its end."""
    episode = (batch["achieved_goal"][:, 0] // 100).long()
    return 100 * episode + torch.tensor(LENGTHS)[episode - 1]


def check(batch, strategy):
    at, goal, last = batch["achieved_goal"][:, 0], batch["desired_goal"][:, 0], lasts(batch)
    if strategy == "final":
        assert torch.equal(goal, last)
    elif strategy == "future":
        assert ((at < goal) & (goal <= last)).all()
    else:
        assert ((goal > at // 100 * 100) & (goal <= last)).all()
    assert goal.eq(last).any()


def storages(tmp_path):
    shared = LazyTensorStorage(40)
    shared.share()
    return {
        "ram": LazyTensorStorage(40),
        "shared": shared,
        "directory": LazyMemmapStorage(40, scratch_dir=tmp_path / "s"),
    }


@pytest.mark.parametrize("kind", ["ram", "shared", "directory"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [1, 3])
def test_default_goals_are_those_that_actions_reached(strategy, kind, width, tmp_path):
    storage = storages(tmp_path)[kind]
    rb = HERReplayBuffer(reached, her_ratio=1.0, strategy=strategy, storage=storage, batch_size=256)
    rb.extend(episodes(width=width))
    batch = rb.sample()
    check(batch, strategy)
    assert torch.equal(batch["next", "reward"], reached(batch))
    rb.close()


def as_dicts(data):
    return {k: as_dicts(v) if isinstance(v, TensorDict) else v for k, v in data.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["next_achieved_goal", "achieved_goal_next"])
def test_flat_rows_of_dicts(strategy, name):
    data = episodes(key=name)
    data["next_desired_goal"] = data["desired_goal"].clone()
    sampler = Hindsight(RandomSampler(), lambda rows: reached(rows, name), her_ratio=1.0, strategy=strategy)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=256)
    rb.extend(as_dicts(data))
    batch = rb.sample()
    check(batch, strategy)
    assert torch.equal(batch["next_desired_goal"], batch["desired_goal"])


@pytest.mark.parametrize("inner", [RandomSampler(), PrioritizedSampler(40, 0.7, 0.5)])
def test_any_strategy_and_sampler(inner):
    sampler = Hindsight(inner, reached, her_ratio=1.0, strategy="random")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=512)
    data = episodes()
    rb.extend(data)
    assert set(rb.sample()["desired_goal"].flatten().tolist()) == set(data["next", "achieved_goal"].flatten().tolist())


def test_windows():
    sampler = Hindsight(SliceSampler(slice_len=2, strict_length=False), reached, her_ratio=1.0, strategy="final")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=64)
    rb.extend(episodes())
    check(rb.sample(), "final")


def test_a_key_that_is_given_is_taken_without_a_word():
    rb = HERReplayBuffer(
        reached, achieved_goal_key="achieved_goal", her_ratio=1.0, strategy="final", storage=LazyTensorStorage(40)
    )
    rb.extend(episodes())
    batch = rb.sample(256)
    assert torch.equal(batch["desired_goal"][:, 0], lasts(batch) - 1)


@pytest.mark.parametrize("followed", [False, True])
def test_goals_before_the_action_are_announced_once(followed):
    data, more = episodes(), {}
    inner = RandomSampler()
    if followed:
        more["transform"] = finals = FinalObservations(["achieved_goal"], LazyTensorStorage(40))
        inner = NextFromFollowing(inner, finals)
    else:
        del data["next", "achieved_goal"]
    sampler = Hindsight(inner, lambda rows: rows["desired_goal"], her_ratio=1.0, strategy="final")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=64, **more)
    rb.extend(data)
    with pytest.warns(UserWarning, match="goals are those that were achieved before each action") as told:
        batch = rb.sample()
    assert len(told) == 1
    assert torch.equal(batch["desired_goal"][:, 0], lasts(batch) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sample()
        rb.add_field("more", torch.zeros(1))
        rb.sample()


def test_no_achieved_goal():
    rb = HERReplayBuffer(reached, storage=LazyTensorStorage(40), batch_size=4)
    rb.extend(episodes().exclude("achieved_goal", ("next", "achieved_goal")))
    with pytest.raises(KeyError, match=r"Hindsight: achieved_goal_key: expected a stored field.*'achieved_goal'"):
        rb.sample()


# ---- ends --------------------------------------------------------------------------------------------------------------


def ended(rows):
    assert torch.equal(rows["next"]["reward"], reached(rows)), "rewards are the new ones"
    return rows["next"]["reward"] > 0


def wanted(rows, stored, flags, n):
    """The flags of a batch whose first ``n`` rows are relabelled."""
    last = rows["next", "achieved_goal"][:, 0] == stored
    new = rows["next", "achieved_goal"][:, 0] == rows["desired_goal"][:, 0]
    new = torch.where(torch.arange(len(new)) < n, new, last)
    found = {"terminated": new, "truncated": last, "done": new | last if "truncated" in flags else new}
    return {flag: found[flag] for flag in flags}


FLAGS = [("done",), ("terminated",), ("terminated", "done"), ("terminated", "truncated", "done"), ("truncated", "done")]


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("flags", FLAGS, ids="-".join)
def test_ends_follow_from_the_new_goal(flags, ratio):
    rb = HERReplayBuffer(reached, end_fn=ended, her_ratio=ratio, storage=LazyTensorStorage(40), batch_size=256)
    data = episodes(flags=flags)
    rb.extend(data)
    batch = rb.sample()
    expected = wanted(batch, lasts(batch), flags, int(256 * ratio))
    for flag, value in expected.items():
        assert torch.equal(batch["next", flag], value[:, None]), flag
    for flag in flags:
        assert torch.equal(rb[:]["next", flag], data["next", flag]), "nothing that is stored changes"
    if ratio == 1.0 and "terminated" in flags:
        assert batch["next", "terminated"][batch["next", "achieved_goal"][:, 0] < lasts(batch)].any()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_flags_of_other_dtypes_in_dicts(dtype, shape):
    data = episodes(flags=("terminated", "truncated", "done"))
    for flag in ("terminated", "truncated", "done"):
        data["next", flag] = data["next", flag].to(dtype).reshape(len(data), *shape)
    sampler = Hindsight(RandomSampler(), reached, end_fn=lambda rows: ended(rows).reshape(-1), her_ratio=1.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=256)
    rb.extend(as_dicts(data))
    batch = TensorDict(rb.sample(), [256])
    expected = wanted(batch, lasts(batch), ("terminated", "truncated", "done"), 256)
    for flag, value in expected.items():
        assert torch.equal(batch["next", flag], value.to(dtype).reshape(256, *shape)), flag


@pytest.mark.parametrize("form", ["flat", "windows", "columns"])
@pytest.mark.parametrize(
    "flags", [("terminated", "truncated", "done"), ("terminated", "done"), ("done",)], ids="-".join
)
def test_ends_of_windows_stay(flags, form):
    windows = SliceSampler(slice_len=2) if form != "windows" else SliceSampler(window=WindowSpec(2))
    sampler = Hindsight(windows, reached, end_fn=ended, her_ratio=0.5)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=128)
    rb.extend(episodes([5, 3, 7, 2], flags=flags))
    batch, info = rb.sample(return_info=True)
    if form == "windows":
        batch = batch.reshape(-1)
    at, goal = batch["next", "achieved_goal"][:, 0], batch["desired_goal"][:, 0]
    last = 100 * (at // 100) + torch.tensor([0, 5, 3, 7, 2])[(at // 100).long()]
    terminated = torch.where(torch.arange(len(at)) < len(at) // 2, at == goal, at == last)
    ends = torch.arange(len(at)) % 2 == 1
    assert torch.equal(batch["next", "done"][:, 0], terminated | ends)
    if "terminated" in flags:
        assert torch.equal(batch["next", "terminated"][:, 0], terminated)
    assert torch.equal(batch["next", "truncated"][:, 0], ends)
    assert torch.equal(info["next", "done"].reshape(-1), terminated | ends)


def test_other_names_of_flags():
    data = episodes(flags=("over", "terminated"))
    rb = HERReplayBuffer(
        reached, end_fn=ended, her_ratio=1.0, end_key=("next", "over"), storage=LazyTensorStorage(40), batch_size=64
    )
    rb.extend(data)
    batch = rb.sample()
    for flag in ("over", "terminated"):
        assert torch.equal(batch["next", flag], reached(batch) > 0)
    assert rb.end_fn is ended


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (lambda _: True, TypeError, r"end_fn: expected a tensor \[8\], got bool"),
        (lambda rows: torch.zeros(len(rows), 2), RuntimeError, r"end_fn: expected \[8\] or \[8, 1\], got \[8, 2\]"),
        (lambda _: torch.zeros(1), RuntimeError, r"end_fn: expected \[8\] or \[8, 1\], got \[1\]"),
    ],
)
def test_an_end_of_another_kind_is_refused(end, error, said):
    rb = HERReplayBuffer(reached, end_fn=end, her_ratio=1.0, storage=LazyTensorStorage(40), batch_size=8)
    rb.extend(episodes())
    with pytest.raises(error, match=said):
        rb.sample()


def test_an_end_that_no_flag_can_say_is_refused():
    data = episodes(flags=())
    data["episode"] = (data["achieved_goal"][:, 0] // 100).long()
    sampler = Hindsight(RandomSampler(), reached, end_fn=ended, traj_key="episode")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=8)
    rb.extend(data)
    with pytest.raises(KeyError, match="end_fn: expected a stored end flag"):
        rb.sample()
    with pytest.raises(TypeError, match="end_fn: expected a function of the relabelled rows, got int"):
        Hindsight(RandomSampler(), reached, end_fn=1)
