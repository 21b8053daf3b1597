"""Draws of windows at a moment at which a writer is in all of them."""

import re

import pytest
import torch

from engram import LazyTensorStorage, NoSampleable, ReplayBuffer, SliceSampler
from engram.around import windows


def lapped(times, **arguments):
    """A sampler that finds no window so many times, as it is where a writer laps the ring meanwhile; and how often it was asked."""
    asked = []

    class Lapped(SliceSampler):
        def _choose(self, table, given):
            asked.append(len(given))
            drawn = super()._choose(table, given)
            return [tensor[:0] for tensor in drawn] if len(asked) <= times else drawn

    return Lapped(**arguments), asked


def filled(sampler, episodes=4, length=5):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=12)
    step = torch.arange(episodes * length)
    rb.extend({"step": step, "episode": step // length})
    return rb


@pytest.mark.parametrize("arguments", [{"slice_len": 3}, {"num_slices": 4}, {"slice_len": 3, "strict_length": False}])
def test_are_made_again(arguments):
    sampler, asked = lapped(3, **arguments)
    rb = filled(sampler)
    assert bool((rb.sample()["step"].reshape(4, 3).diff() == 1).all())
    assert len(asked) == 4


def test_of_given_boundaries_are_made_again():
    ends = torch.arange(20) % 5 == 4
    sampler, asked = lapped(2, slice_len=3, ends=ends, cache_values=True)
    assert len(filled(sampler).sample()["step"]) == 12
    assert len(asked) == 3


def test_that_never_find_one_say_what_is_true(monkeypatch):
    monkeypatch.setattr(windows, "_TRIES", 3)
    sampler, asked = lapped(10, slice_len=3)
    with pytest.raises(NoSampleable, match="slice_len=3: expected a trajectory that stays while it is drawn") as raised:
        filled(sampler).sample()
    assert len(asked) == 4
    assert not re.search("got .* of at most", str(raised.value))


def test_of_trajectories_that_are_too_short_are_refused_at_once():
    sampler, asked = lapped(0, slice_len=6)
    with pytest.raises(NoSampleable, match="expected a trajectory of at least 6 steps, got 4 of at most 5"):
        filled(sampler).sample(12)
    assert len(asked) == 1
