"""Rows of every kind."""

import os

import torch
from tensordict import TensorDict, tensorclass

from engram import ReplayBuffer
from tests.storages.test_structure import raw


@tensorclass
class Step:
    obs: torch.Tensor
    done: torch.Tensor


def numbered(start, n):
    return {"a": torch.arange(start, start + n), "next": {"b": torch.arange(start, start + n).float()[:, None]}}


def reopened(rb):
    """The same rows in a buffer that was opened anew, if they are in a directory."""
    folder = getattr(rb.storage, "scratch_dir", None)
    if folder is None:
        return rb
    rb.close()
    return ReplayBuffer.open(folder)


# ---- what is refused -------------------------------------------------------------------------------------------------


def state(storage):
    """All that a refused write must not change."""
    if not storage.initialized:
        folder = getattr(storage, "scratch_dir", None)
        return (None, os.path.exists(folder) if folder is not None else None)
    return (
        storage.extent(),
        storage.write_count,
        storage.store.core.next_ticket,
        [raw(tensor) for tensor in storage.store.tensors],
        storage.store.tickets_of(torch.arange(storage.max_size)).tolist(),
    )


def row(text, **more):
    return TensorDict({"a": torch.zeros(3), "next": {"b": torch.tensor(0)}, **more, "text": text}, [])


def batch(**entries):
    return TensorDict({"a": torch.zeros(2, 3), "next": {"b": torch.zeros(2, dtype=torch.int64)}, **entries}, [2])
