"""A trajectory ends with its id, and at every stored end: where an id comes again right after an end, nothing goes across."""

import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import (
    FinalObservations,
    FrameStack,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RewardToGo,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
    WindowSpec,
    iter_trajectories,
)
from engram.around.episodes import STEP_TYPE

#: Lengths of the trajectories, in the order of writing; ids change after the second one only.
LENGTHS, IDS = (4, 5, 3, 6), (7, 7, 8, 8)
N = sum(LENGTHS)
LAST = torch.tensor(LENGTHS).cumsum(0) - 1
NUMBER = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))

#: What says where trajectories end, beside the ids. Of several, no one says all.
ENDS = {
    "done": {("next", "done"): [0, 1, 2, 3]},
    "terminated": {("next", "done"): [], ("next", "terminated"): [0, 1, 2, 3]},
    "truncated": {("next", "done"): [1], ("next", "terminated"): [3], ("next", "truncated"): [0, 2]},
    "beside": {("done",): [1, 3], ("truncated",): [0, 2]},
    "types": {(STEP_TYPE,): [0, 1, 2, 3]},
}


def rows(kind="truncated", key="episode"):
    data = {"i": torch.arange(N), "frame": torch.arange(N).float().unsqueeze(1), "next": {"reward": torch.ones(N, 1)}}
    path = (key,) if isinstance(key, str) else key
    td = TensorDict(data, [N])
    td[path] = torch.repeat_interleave(torch.tensor(IDS), torch.tensor(LENGTHS))
    for flag, which in ENDS[kind].items():
        value = torch.zeros(N, 1, dtype=torch.bool)
        value[LAST[which]] = True
        td[flag] = value if flag != (STEP_TYPE,) else 1 + value.squeeze(1).long()
    return td


def buffer(sampler, data=None, *, storage=None, td=True, **more):
    kind = TensorDictReplayBuffer if td else ReplayBuffer
    rb = kind(storage=LazyTensorStorage(50) if storage is None else storage, sampler=sampler, **more)
    rb.extend(rows() if data is None else data)
    return rb


def crossings(rb, length, n=200, batch=None):
    i = (rb.sample(n * length) if batch is None else batch)["i"].reshape(-1, length)
    assert (i[:, 1:] == i[:, :-1] + 1).all()
    return int((NUMBER[i[:, 0]] != NUMBER[i[:, -1]]).sum())


SAMPLERS = {
    "slices": lambda **keys: SliceSampler(slice_len=3, **keys),
    "anchors": lambda **keys: SliceSampler(slice_len=3, uniform_over="anchors", **keys),
    "shaped": lambda **keys: SliceSampler(window=WindowSpec(length=2, burn_in=1), **keys),
    "epoch": lambda **keys: SliceSamplerWithoutReplacement(slice_len=3, **keys),
    "priority": lambda **keys: PrioritizedSliceSampler(50, 0.7, 0.5, slice_len=3, **keys),
    "streaming": lambda **keys: StreamingSliceSampler(slice_len=3, **keys),
    "returns": lambda **keys: NStep(SliceSampler(slice_len=3, **keys), 2, 0.9),
}
KEYS = {
    "default": {},
    "id": {"traj_key": "episode"},
    "both": {"traj_key": "episode", "end_keys": [("next", "done"), ("next", "terminated"), ("next", "truncated")]},
    "ends": {"end_keys": [("next", "done"), ("next", "terminated"), ("next", "truncated")]},
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_window_crosses_an_end(name, keys):
    rb = buffer(SAMPLERS[name](**KEYS[keys]))
    for n in (2, 4, 4):
        assert crossings(rb, 3, n) == 0
    if name != "epoch":
        assert crossings(rb, 3, 100) == 0
    alone = {**KEYS[keys], "end_keys": []}
    if name not in ("epoch", "returns"):
        assert crossings(buffer(SAMPLERS[name](**alone)), 3, 100) > 0


@pytest.mark.parametrize("key", ["episode", "traj_ids", ("collector", "traj_ids")])
@pytest.mark.parametrize("kind", ENDS)
def test_every_stored_end_counts(kind, key):
    data = rows(kind, key)
    for td in (True, False):
        rb = buffer(SliceSampler(slice_len=3), data if td else data.to_dict(), td=td)
        assert crossings(rb, 3) == 0
    returns = buffer(RewardToGo(RandomSampler()), data).sample(200)
    left = torch.cat([torch.arange(n, 0, -1) for n in LENGTHS])
    assert torch.equal(returns["reward_to_go"].flatten(), left[returns["i"]].float())
    batch = buffer(RandomSampler(), data, sample_unit=Sequence(3)).sample(100).reshape(100, 3)
    assert torch.equal(NUMBER[batch["i"]], NUMBER[batch["i"][:, :1]].expand(100, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = buffer(RandomSampler(), data).query()
    assert [it.length for it in found] == [it.length for it in iter_trajectories(data)] == list(LENGTHS)


@pytest.mark.parametrize("where", ["RAM", "directory", "shared", "columns", "full ring"])
def test_in_every_storage(tmp_path, where):
    data = rows()
    storage = {
        "directory": lambda: LazyMemmapStorage(50, scratch_dir=tmp_path / "rows"),
        "columns": lambda: LazyTensorStorage(50, ndim=2),
        "full ring": lambda: LazyTensorStorage(N),
    }.get(where, lambda: LazyTensorStorage(50))()
    rb = buffer(SliceSampler(slice_len=3), torch.stack([data, data]) if where == "columns" else data, storage=storage)
    if where == "shared":
        rb.share()
    if where == "full ring":
        rb.extend(data[:7])
    assert crossings(rb, 3) == 0
    if where == "directory":
        rb.close()
        with ReplayBuffer.open(tmp_path / "rows") as again:
            assert crossings(again, 3) == 0
    rb.close()


def test_items_of_lists_and_members_of_ensembles():
    assert [it.length for it in buffer(RandomSampler(), storage=ListStorage(50)).query()] == list(LENGTHS)
    members = [buffer(SliceSampler(slice_len=3)) for _ in range(2)]
    batch = ReplayBufferEnsemble(*members, num_buffer_sampled=2).sample(120)
    assert crossings(None, 3, batch=batch.reshape(-1)) == 0


def test_goals_and_next_observations_stop_there():
    data = rows("done")
    data["achieved_goal"] = data["frame"].clone()
    data["desired_goal"] = torch.full((N, 1), -1.0)
    sampler = Hindsight(
        RandomSampler(),
        lambda batch: batch["next", "reward"],
        her_ratio=1.0,
        strategy="final",
        achieved_goal_key="achieved_goal",
    )
    batch = buffer(sampler, data).sample(100)
    assert torch.equal(batch["desired_goal"].flatten().long(), LAST[NUMBER[batch["i"]]])
    data["next", "frame"] = data["frame"] + 0.5
    kept = FinalObservations(["frame"], LazyTensorStorage(9))
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=NextFromFollowing(RandomSampler(), kept), transform=kept
    )
    rb.extend(data)
    batch = rb.sample(200)
    last = (batch["i"].unsqueeze(1) == LAST).any(1)
    expected = batch["frame"].flatten() + torch.where(last, 0.5, 1.0)
    assert torch.equal(batch["next", "frame"].flatten(), expected)


def test_stacks_of_frames_stop_there():
    rb = buffer(FrameStack(RandomSampler(), 3, -1, ["frame"], padding="constant", padding_value=-1))
    batch = rb.sample(200)
    stack = batch["frame"].long()
    assert ((stack < 0) | (NUMBER[stack.clamp_min(0)] == NUMBER[batch["i"]].unsqueeze(1))).all()


def test_ends_that_are_edited_are_seen():
    rb = buffer(SliceSampler(slice_len=3, strict_length=False), rows("done"))
    assert crossings(rb, 3, 1) == 0
    rb.set_at_(("next", "done"), torch.zeros(1, 1, dtype=torch.bool), [3])
    rb.sampler.strict_length = True
    crossed = [NUMBER[rb.sample(3)["i"]].unique().tolist() for _ in range(60)]
    assert [0, 1] in crossed
    assert [2, 3] not in crossed
    assert [1, 2] not in crossed
