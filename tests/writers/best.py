"""Buffers that keep the best rows."""

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ListStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

STORAGES = [LazyTensorStorage, ListStorage]


def rows(ranks, key="score", dtype=torch.float64):
    """Rows of these ranks, told apart by a running number."""
    ranks = torch.as_tensor(ranks, dtype=dtype)
    n = len(ranks)
    return TensorDict({key: ranks, "id": torch.arange(n)}, batch_size=[n])


def row(rank, number=0):
    return TensorDict({"score": torch.tensor(float(rank), dtype=torch.float64), "id": torch.tensor(number)})


def best(capacity=3, storage=LazyTensorStorage, ranks=(), **kwargs):
    writer = TensorDictMaxValueWriter(**{"rank_key": "score", **kwargs})
    rb = TensorDictReplayBuffer(storage=storage(capacity), writer=writer, batch_size=4)
    if len(ranks):
        rb.extend(rows(ranks))
    return rb


def scores(rb):
    return [float(x["score"]) for x in rb.storage]
