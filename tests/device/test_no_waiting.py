"""Calls on a storage on an accelerator make the host wait for nothing. Shown on torch's ``meta`` device, which has no data to read."""

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from engram.store.device.store import DeviceStore
from tests.device.synchronisation import Waited, no_synchronisation

THERE = torch.device("meta")
#: More than the first batches, at which a buffer looks more closely.
TIMES = 100


def steps_of(n, first=0):
    return TensorDict(
        {"obs": torch.rand(n, 3), "step": torch.arange(first, first + n), "next": {"done": torch.zeros(n, 1)}}, [n]
    )


def prioritized(**arguments):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(100, device="meta", **arguments),
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
        batch_size=16,
    )


def test_the_guard_finds_what_waits():
    there = torch.zeros(3, device=THERE)
    with no_synchronisation() as guard:
        there + 1
    assert guard.operations == 1
    for wait in (
        there.nonzero,
        there.unique,
        lambda: there[there > 0],
        lambda: torch.equal(there, there),
        lambda: bool(there.any()),
        there.cpu,
        lambda: there[torch.zeros((), dtype=torch.int64, device=THERE)],
    ):
        with pytest.raises((Waited, NotImplementedError, RuntimeError)), no_synchronisation():
            wait()


@pytest.mark.parametrize("n", [1, 2, 30, 250])
def test_extend(n):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100, device="meta"), batch_size=8)
    rb.extend(steps_of(70))
    with no_synchronisation() as guard:
        for _ in range(TIMES):
            index = rb.extend(steps_of(n))
            assert index.device == THERE
    assert guard.operations
    assert isinstance(rb.storage.store, DeviceStore)
    assert rb.storage.store.rows.pending == 70 + TIMES * n  # the core was not asked either
    assert (len(rb), rb.write_count) == (min(100, 70 + TIMES * n), 70 + TIMES * n)


@pytest.mark.parametrize("generations", [False, True])
def test_uniform_draws(generations):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100, device="meta"),
        writer=TensorDictRoundRobinWriter(track_generations=generations),
        batch_size=8,
    )
    rb.extend(steps_of(70))
    rb.sample()
    with no_synchronisation():
        for _ in range(5):
            rb.extend(steps_of(7))
            batch, info = rb.sample(return_info=True)
            assert batch["obs"].device == info["index"].device == THERE
            assert batch["obs"].shape == (8, 3)
    assert rb.storage.store.rows.pending == 35  # the first batch asked how many there are


def test_lanes():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100, device="meta", lanes=4), batch_size=8)
    rb.extend(steps_of(20), lane=0)
    lanes = torch.arange(20) % 4
    with no_synchronisation():
        for _ in range(3):
            rb.extend(steps_of(20), lane=lanes)
            rb.extend(steps_of(30), lane=2)
            rb.sample()
    assert rb.storage.extent().filled == (25, 15, 25, 15)


@pytest.mark.parametrize("normalize", ["store", "batch"])
def test_draws_by_priority_and_updates(normalize):
    rb = prioritized()
    rb.sampler.normalize = normalize
    rb.extend(steps_of(70))
    rb.sample()
    with no_synchronisation():
        for _ in range(TIMES):
            rb.extend(steps_of(40))
            batch, info = rb.sample(return_info=True)
            assert batch["priority_weight"].dtype is torch.float32
            error = torch.rand(16, device=THERE)
            rb.update_priority(batch["index"], error)
            rb.update_priority(info["index"], error.unsqueeze(1), generation=info["index_generation"])
            rb.update_priority(batch["index"], 2.0)
            rb.sampler.mark_update(batch["index"])


def test_the_prioritized_buffer_of_tensordicts():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(100, device="meta"), batch_size=16, sampler_device="meta"
    )
    rb.extend(steps_of(70))
    rb.sample()
    with no_synchronisation():
        batch = rb.sample()
        batch["td_error"] = torch.rand(16, device=THERE)
        rb.update_tensordict_priority(batch)


def test_steps_of_environments_are_slices():
    """``ndim=2``: the rows of a step of all environments follow each other."""
    rb = prioritized(ndim=2)

    def steps(time):
        return TensorDict({"obs": torch.rand(4, time, 3), "next": {"reward": torch.zeros(4, time)}}, [4, time])

    rb.extend(steps(5))
    rb.sample()
    with no_synchronisation():
        for time in (1, 3):
            rb.extend(steps(time))
            batch = rb.sample()
            assert batch["index"].shape == (16, 2)
            rb.update_priority(batch["index"], torch.rand(16, device=THERE))
    assert rb.storage.store.rows.pending == (1 + 3) * 4


@pytest.mark.parametrize("kind", ["TensorDicts", "dicts", "tensors"])
def test_rows_are_set(kind):
    made = {"TensorDicts": lambda td: td, "dicts": lambda td: td.to_dict(), "tensors": lambda td: td["obs"]}[kind]
    cls = TensorDictReplayBuffer if kind == "TensorDicts" else ReplayBuffer
    rb = cls(storage=LazyTensorStorage(100, device="meta"), batch_size=16)
    rb.extend(made(steps_of(70)))
    there = torch.tensor([3, 1, 3, -1]).to(THERE)
    with no_synchronisation():
        rb[1] = made(steps_of(70)[5])
        rb[-1] = made(steps_of(70)[5])
        rb[2:9] = made(steps_of(7))
        rb[[4, 4, 9]] = made(steps_of(3))
        rb[there] = made(steps_of(4))
    assert rb.storage.store.rows.edits
