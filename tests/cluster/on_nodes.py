"""Buffers on the nodes of the tests' cluster, and rows for them."""

from functools import partial

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer

#: A node that this program is not on, and the one that it is on.
AWAY = {"num_cpus": 0, "resources": {"away": 0.01}}
HERE = {"num_cpus": 0, "resources": {"here": 0.01}}


def rows(n, first=0):
    steps = torch.arange(first, first + n)
    return TensorDict({"a": steps, "next": {"reward": steps.float()}}, [n])


def made(where, storage=LazyTensorStorage, size=100, kind=TensorDictReplayBuffer, **more):
    return RayReplayBuffer(
        storage=partial(storage, size), batch_size=8, replay_buffer_cls=kind, remote_config=where, **more
    )
