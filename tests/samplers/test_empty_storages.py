"""Draws from a storage without rows, however it became so: the message begins as TorchRL's, which programs look for."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    CompressedListStorage,
    ConsumingSampler,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RewardToGo,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.errors import NoSampleable
from tests.serving.servers import serving_each

ALPHA = {"alpha": 0.6, "beta": 0.4}
SLICES = {"slice_len": 2, "traj_key": "episode"}
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(20, **ALPHA),
    "slices": lambda: SliceSampler(**SLICES),
    "slices of an epoch": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "slices by priority": lambda: PrioritizedSliceSampler(20, **ALPHA, **SLICES),
    "streams": lambda: StreamingSliceSampler(**SLICES),
    "queue": ConsumingSampler,
    "staleness": StalenessAwareSampler,
    "groups": lambda: PromptGroupSampler(num_groups=2, group_key="episode"),
    "n-step": lambda: NStep(RandomSampler(), 2, 0.9),
    "n-step by priority": lambda: NStep(PrioritizedSampler(20, **ALPHA), 2, 0.9),
    "returns": lambda: RewardToGo(RandomSampler(), 0.9),
}
STORAGES = {
    "list": lambda _: ListStorage(20),
    "stack": lambda _: LazyStackStorage(20),
    "RAM": lambda _: LazyTensorStorage(20),
    "shared": lambda _: LazyTensorStorage(20, shared_init=True),
    "directory": lambda folder: LazyMemmapStorage(20, scratch_dir=folder / "store"),
}
IN_LISTS = ("uniform", "epoch", "priority", "queue")


def rows(n=6):
    steps = torch.arange(n)
    done = (steps % 3 == 2).unsqueeze(-1)
    next_ = TensorDict({"done": done, "reward": torch.ones(n, 1)}, [n])
    goals = {"achieved_goal": torch.zeros(n, 2), "desired_goal": torch.zeros(n, 2)}
    return TensorDict({"a": steps, "episode": steps // 3, "policy_version": steps, **goals, "next": next_}, [n])


def refused(rb, *size):
    with pytest.raises(NoSampleable, match="^Cannot sample from an empty storage"):
        rb.sample(*size)


def check(rb):
    """Before a write, after ``empty()``, and after all rows were removed."""
    refused(rb)
    rb.extend(rows())
    rb.sample()
    rb.empty()
    refused(rb)
    index = rb.extend(rows())
    try:
        rb.remove(index)
    except (NotImplementedError, TypeError):  # of some lists and wrappers
        return
    refused(rb)
    rb.extend(rows())
    rb.sample()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_sampler_and_storage(sampler, storage, tmp_path):
    if (storage == "list" and sampler not in IN_LISTS) or (storage == "stack" and sampler not in (*IN_LISTS, "groups")):
        pytest.skip("not of lists")
    check(TensorDictReplayBuffer(storage=STORAGES[storage](tmp_path), sampler=SAMPLERS[sampler](), batch_size=4))


def test_the_draw_of_a_sampler_itself():
    storage, sampler = LazyTensorStorage(20), PrioritizedSampler(20, **ALPHA)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.extend(rows())
    rb.empty()
    with pytest.raises(NoSampleable, match="^Cannot sample from an empty storage"):
        sampler.sample(storage, 4)


def test_zero_priorities_are_no_empty_storage():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, **ALPHA, eps=0), batch_size=4
    )
    index = rb.extend(rows())
    rb.update_priority(index, torch.zeros(6))
    with pytest.raises(NoSampleable, match="^sample: every priority is zero"):
        rb.sample()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "made",
    [
        TensorDictReplayBuffer,
        lambda **more: TensorDictReplayBuffer(sample_unit=Sequence(2), **more),
        lambda **more: TensorDictPrioritizedReplayBuffer(**ALPHA, **more),
        lambda **more: HERReplayBuffer(
            reward_fn=lambda rows: rows["next", "reward"], achieved_goal_key="achieved_goal", **more
        ),
    ],
    ids=["plain", "sequence", "prioritized", "hindsight"],
)
def test_buffers(made, prefetch):
    rb = made(storage=LazyTensorStorage(20), batch_size=4, prefetch=prefetch)
    refused(rb)
    rb.extend(rows())
    rb.empty()
    refused(rb)


@pytest.mark.parametrize("storage", [lambda: LazyTensorStorage(20), lambda: ListStorage(20)])
def test_rows_of_dicts_and_tensors(storage):
    for data in (torch.arange(6), {"a": torch.arange(6)}):
        rb = PrioritizedReplayBuffer(**ALPHA, storage=storage(), batch_size=4)
        refused(rb)
        rb.extend(data if isinstance(data, torch.Tensor) else [{"a": one} for one in data["a"]])
        rb.empty()
        refused(rb)


def test_compressed_lists():
    rb = TensorDictReplayBuffer(storage=CompressedListStorage(20), batch_size=4)
    refused(rb)
    rb.extend(rows())
    rb.empty()
    refused(rb)


@pytest.mark.parametrize("sampler", [RandomSampler, ConsumingSampler, SAMPLERS["priority"], SAMPLERS["slices"]])
@pytest.mark.parametrize("more", [{}, {"p": "sampleable"}, {"sample_from_all": True}, {"p": [1.0, 2.0]}])
def test_ensembles(sampler, more):
    one, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler(), batch_size=4) for _ in "ab")
    rb = ReplayBufferEnsemble(one, other, batch_size=4, **more)
    refused(rb)
    for member in (one, other):
        member.extend(rows())
    rb.sample()
    for member in (one, other):
        member.empty()
    refused(rb)


@pytest.mark.parametrize("sampler", ["uniform", "priority", "slices", "queue", "n-step"])
def test_connections_and_fleets(sampler, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        storage = LazyMemmapStorage(20, scratch_dir=folder)
        with TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=4) as rb:
            rb.extend(rows())
            rb.empty()
    addresses = [f"unix:{folder}.sock" for folder in folders]
    with serving_each(folders):
        for address in (addresses[0], addresses):
            with ReplayBuffer.connect(address) as rb:
                refused(rb)
