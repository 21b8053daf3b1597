"""Buffers with rows of any length, to save."""

import torch

from engram import LazyMemmapStorage, LazyTensorStorage, Ragged, ReplayBuffer
from tests.storages import ragged_rows as said

CAPACITY, RING = 39, 2000


LONG = {"tokens": Ragged(torch.int32, max_length=2000), "log_prob": Ragged(torch.float32, like="tokens")}


def long_rows(first, n):
    generator = torch.Generator().manual_seed(first)
    lengths = torch.randint(200, 2001, (n,), generator=generator).tolist()
    tokens = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths, first)]
    return {"number": torch.arange(first, first + n), "tokens": tokens, "log_prob": [it.float() for it in tokens]}


def make(lanes=1, ring=RING, capacity=CAPACITY, folder=None, **more):
    more = {"lanes": lanes, "ragged": said.fields(), "ragged_bytes": ring, **more}
    storage = (
        LazyTensorStorage(capacity, **more)
        if folder is None
        else LazyMemmapStorage(capacity, scratch_dir=folder, **more)
    )
    return ReplayBuffer(storage=storage, batch_size=4)


def fill(rb, first, n, **more):
    """Rows ``[first, first + n)``, five to a lane in turns."""
    for number in range(first, first + n, 5):
        lane = {"lane": number // 5 % rb.storage.lanes} if rb.storage.lanes > 1 else {}
        rb.extend({**said.rows(number, 5), **more}, **lane)
    return rb


def contents(rb, edited=()):
    """What rows hold, by their place, as plain lists: each what its number says, unless it was edited."""
    batch = rb[:]
    if not edited:
        said.check(batch)
    columns = [batch["number"].tolist(), [it.tolist() for it in batch["tokens"].unbind()]]
    columns += [[it.tolist() for it in batch["log_prob"].unbind()], list(batch["text"])]
    return list(zip(*columns, strict=True))


def heads(rb):
    core = rb.storage.store.core
    return [core.ragged_lane(lane)[1:] for lane in range(rb.storage.lanes)]


def part_of(folder):
    return max(folder.glob("ckpt-*/rank-*/storage"))
