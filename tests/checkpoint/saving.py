"""Buffers to save."""

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, TensorDictReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer

CAPACITY = 1024
WORDS = 2000


def steps(first, n, *, lane=0):
    at = torch.arange(first, first + n)
    return TensorDict(
        {"at": at, "copy": at[:, None].float().expand(n, WORDS).clone(), "lane": torch.full((n,), lane)}, [n]
    )


def buffer(n=0, *, lanes=1, storage=None, sampler=None, seed=0):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lanes=lanes) if storage is None else storage,
        sampler=sampler,
        batch_size=8,
        generator=torch.Generator().manual_seed(seed),
    )
    if n:
        rb.extend(steps(0, n))
    return rb


def restored(root, step=None, *, resume="exact", make=buffer, **more):
    rb = make()
    Checkpointer(root, rb).restore(step, resume=resume, **more)
    return rb
