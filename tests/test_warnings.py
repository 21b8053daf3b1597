"""Warnings: they point to the line of the program that led to them, through however many calls of ours."""

import linecache

import pytest
import torch
from tensordict import TensorDict

from engram import (
    DeviceLoader,
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)


def filled(kind=ReplayBuffer, sampler=RandomSampler):
    rb = kind(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(8), "episode": torch.arange(8) // 4}, [8]))
    return rb


def equal(sampler):
    rb = filled(sampler=sampler)
    rb.sampler.alpha = 0.0
    return rb


def slices():
    return PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2)


ROWS = torch.arange(2)
WARNINGS = {
    "another batch size": lambda: filled().sample(3),
    "of a TensorDict buffer": lambda: filled(TensorDictReplayBuffer).sample(3),
    "include_info": lambda: filled(TensorDictReplayBuffer).sample(include_info=True),
    "no priorities": lambda: filled().update_priority(ROWS, 1.0),
    "no priorities inside": lambda: filled(sampler=NStep(RandomSampler(), 2, 1.0)).update_priority(ROWS, 1.0),
    "no priorities of a sampler": lambda: RandomSampler().update_priority(ROWS, 1.0),
    "no priorities of a loader": lambda: DeviceLoader(filled(), "cpu").update_priority(ROWS, 1.0),
    "span": lambda: PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, span=True),
    "spans": lambda: PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, span=(True, False)),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings_point_to_the_line_that_led_to_them(name):
    with pytest.warns(UserWarning, match=".") as said:
        WARNINGS[name]()
    assert [(one.filename, f'"{name}": lambda' in linecache.getline(one.filename, one.lineno)) for one in said] == [
        (__file__, True)
    ]


@pytest.mark.parametrize(
    "sampler",
    [lambda: PrioritizedSampler(10, 1.0, 1.0), slices, lambda: NStep(PrioritizedSampler(10, 1.0, 1.0), 2, 1.0)],
)
def test_a_setting_warns_where_it_is_set(sampler):
    rb = equal(sampler())
    with pytest.warns(UserWarning, match="alpha") as said:
        rb.sampler.alpha = 1.0
    assert [linecache.getline(one.filename, one.lineno).strip() for one in said] == ["rb.sampler.alpha = 1.0"]
