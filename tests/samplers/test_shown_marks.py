"""Batches of windows are the same, whatever of their rows and marks is shown, and wherever the marks are made."""

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer, WindowSpec

STEPS, EPISODE = 60, 7  # the last one is shorter than a window


def steps(shape, names):
    number = torch.arange(STEPS)
    flags = {"done": number % EPISODE == EPISODE - 1, "terminated": number % 14 == 13, "truncated": number % 5 == 0}
    following = {name: flags[name].reshape(STEPS, *shape) for name in names}
    return TensorDict(
        {"step": number, "episode": number // EPISODE, "next": {"step": number + 1, **following}}, [STEPS]
    )


def drawn(kind, data, *, return_info=False, collate_fn=None, **arguments):
    sampler = SliceSampler(traj_key="episode", **arguments)
    generator = torch.Generator().manual_seed(5)
    rb = kind(
        storage=LazyTensorStorage(STEPS), sampler=sampler, batch_size=12, generator=generator, collate_fn=collate_fn
    )
    rb.extend(data)
    batches = [rb.sample(return_info=return_info) for _ in range(5)]
    stored = rb[:]
    assert all(torch.equal(stored[key], data[key]) for key in data.keys(True, True))
    return batches


FORMS = [
    {"slice_len": 4},
    {"slice_len": 4, "truncated_key": ("next", "done")},
    {"slice_len": 4, "truncated_key": ("next", "terminated")},
    {"slice_len": 4, "truncated_key": None},
    {"slice_len": 6, "strict_length": False, "pad_output": True},
    {"window": WindowSpec(4, burn_in=1, padding=1), "flat": False},
    {"window": WindowSpec(4, period=2), "flat": True},
]


@pytest.mark.parametrize("arguments", FORMS)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("names", [(), ("done",), ("terminated", "truncated"), ("done", "terminated", "truncated")])
def test_marks_made_within_the_columns_are_those_made_beside_them(arguments, shape, names):
    data = steps(shape, names)
    within = drawn(TensorDictReplayBuffer, data, **arguments)
    beside = drawn(TensorDictReplayBuffer, data, collate_fn=lambda batch: batch, **arguments)
    for one, other in zip(within, beside, strict=True):
        assert one.batch_size == other.batch_size
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(
            torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one.keys(True, True)
        )


@pytest.mark.parametrize("arguments", FORMS)
@pytest.mark.parametrize("names", [(), ("done", "terminated", "truncated")])
def test_batches_without_info_hold_what_is_stored(arguments, names):
    data = steps((1,), names)
    silent = drawn(ReplayBuffer, data, **arguments)
    told = drawn(ReplayBuffer, data, return_info=True, **arguments)
    for batch, (other, info) in zip(silent, told, strict=True):
        assert batch.batch_size == other.batch_size
        assert set(batch.keys(True, True)) == set(data.keys(True, True))
        rows = info["index"][0].flatten()
        for key in data.keys(True, True):
            assert torch.equal(batch[key].reshape(-1), data[key][rows].reshape(-1))
