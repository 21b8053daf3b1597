"""Queries of rows that are no TensorDicts: trajectories are around TensorDicts of the same fields."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer, traj

STEPS = torch.arange(12)
ENTRIES = {"episode": STEPS // 4, "next": {"reward": STEPS.float().unsqueeze(1), "done": (STEPS % 4 == 3).unsqueeze(1)}}


class After(NamedTuple):
    reward: torch.Tensor
    done: torch.Tensor


class Step(NamedTuple):
    episode: torch.Tensor
    next: After


@tensorclass
class Flat:
    episode: torch.Tensor
    reward: torch.Tensor


KINDS = {
    "dict": lambda: ENTRIES,
    "named tuple": lambda: Step(ENTRIES["episode"], After(**ENTRIES["next"])),
    "tensorclass": lambda: Flat(episode=STEPS // 4, reward=STEPS.float().unsqueeze(1), batch_size=[12]),
}


def check(rb):
    whole = rb.query()
    assert [it.episode.reshape(-1).tolist() for it in whole] == [[k] * 4 for k in range(3)]
    assert [float(it.total_reward) for it in whole] == [6, 22, 38]
    for wanted in (traj.reward.sum() > 10, lambda it: it.total_reward > 10, traj.length == 4):
        found = rb.query(wanted)
        assert [int(it.episode.reshape(-1)[0]) for it in found] == ([0, 1, 2] if len(found) == 3 else [1, 2])
    assert all(isinstance(it.data, TensorDict) for it in whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_of_a_tensor_storage(storage, kind):
    rb = ReplayBuffer(storage=storage(12), batch_size=2)
    rb.extend(KINDS[kind]())
    check(rb)
    rb.close()


@pytest.mark.parametrize("of", [torch.Tensor, np.ndarray, float])
def test_of_a_list(of):
    rb = ReplayBuffer(storage=ListStorage(12), batch_size=2)
    for step in range(12):
        reward, done = ENTRIES["next"]["reward"][step], ENTRIES["next"]["done"][step]
        if of is np.ndarray:
            reward, done = reward.numpy(), done.numpy()
        elif of is float:
            reward, done = float(reward), bool(done)
        rb.add({"episode": step // 4, "next": {"reward": reward, "done": done}})
    check(rb)


def test_of_columns_and_a_ring_that_is_full():
    rb = ReplayBuffer(storage=LazyTensorStorage(16, ndim=2), batch_size=2)
    rb.extend({"episode": torch.arange(24).reshape(2, 12) // 4, "x": torch.arange(24).reshape(2, 12)})
    found = [it.x.tolist() for it in rb.query()]
    assert found == [[*range(4, 8)], [*range(8, 12)], [*range(16, 20)], [*range(20, 24)]]


def test_transforms_see_tensordicts():
    rb = ReplayBuffer(storage=LazyTensorStorage(12), batch_size=2)
    rb.extend(ENTRIES)
    kinds = []

    def double(batch):
        kinds.append(type(batch))
        batch["next"]["reward"] = batch["next"]["reward"] * 2
        return batch

    rb.append_transform(double)
    assert [float(it.total_reward) for it in rb.query(traj.reward.sum() > 30)] == [44, 76]
    assert set(kinds) == {TensorDict}


def test_those_of_tensordicts_are_the_same():
    dicts, others = ReplayBuffer(storage=LazyTensorStorage(12)), TensorDictReplayBuffer(storage=LazyTensorStorage(12))
    dicts.extend(ENTRIES)
    others.extend(TensorDict(ENTRIES, [12]))
    for one, other in zip(dicts.query(), others.query(), strict=True):
        assert bool((one.data == other.data.select(*one.data.keys(True, True))).all())
