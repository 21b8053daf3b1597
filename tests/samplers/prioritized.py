"""Buffers of prioritized rows."""

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer

ALPHA, BETA, EPS = 0.7, 0.5, 1e-3


def made(storage=LazyTensorStorage, capacity=10, rows=10, batch_size=64, **settings_):
    arguments = {"alpha": ALPHA, "beta": BETA, "eps": EPS, **settings_}
    sampler = PrioritizedSampler(capacity, **arguments)
    rb = ReplayBuffer(storage=storage(capacity), sampler=sampler, batch_size=batch_size)
    if rows:
        rb.extend(list(torch.arange(rows)) if storage is ListStorage else torch.arange(rows))
    return rb


def leaves(rb):
    return rb.sampler.state_dict()["leaves"]


kinds = pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
