"""Steps of trajectories, buffers with a slice sampler, and what its batches are."""

import itertools

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, SliceSampler, SliceSamplerWithoutReplacement, TensorDictReplayBuffer

BOTH = [SliceSampler, SliceSamplerWithoutReplacement]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def steps(lengths, *, lane=0, first=0, open_end=False, ids=True, **more):
    """Rows that say where they are: lane, episode and step, with every flag there is."""
    episode = torch.cat([torch.full((n,), first + i) for i, n in enumerate(lengths)])
    step = torch.cat([torch.arange(n) for n in lengths])
    size = torch.tensor(lengths)[episode - first]
    last = step + 1 == size
    if open_end:
        last[-1] = False
    n = len(step)
    td = {
        "lane": torch.full((n,), lane),
        "step": step,
        "number": episode,
        "is_init": (step == 0).unsqueeze(-1),
        "next": TensorDict({"done": last.unsqueeze(-1)}, batch_size=[n]),
        **more,
    }
    if ids:
        td["episode"] = episode
    return TensorDict(td, batch_size=[n])


def buffer(sampler, *data, capacity=1000, lanes=1, td=True, storage=None, **arguments):
    kind = TensorDictReplayBuffer if td else ReplayBuffer
    storage = LazyTensorStorage(capacity, lanes=lanes) if storage is None else storage
    rb = kind(storage=storage, sampler=sampler, generator=seeded(), **arguments)
    for part in data:
        rb.extend(part)
    return rb


def windows(batch, length):
    """(lane, number, first step) of each window; checks that its steps follow each other."""
    assert len(batch) % length == 0
    table = torch.stack([batch["lane"], batch["number"], batch["step"]], -1).reshape(-1, length, 3)
    assert (table[:, :, :2] == table[:, :1, :2]).all()
    assert (table[:, :, 2] == table[:, :1, 2] + torch.arange(length)).all()
    return [tuple(first) for first in table[:, 0].tolist()]


def cut(batch):
    """Windows of a batch in which they may be short, by their marks: lists of (number, step)."""
    ends = batch["next", "truncated"].flatten().nonzero().flatten().tolist()
    begins = [0, *[end + 1 for end in ends]]
    assert begins[-1] == len(batch)
    rows = list(zip(batch["number"].tolist(), batch["step"].tolist(), strict=True))
    return [rows[a:b] for a, b in itertools.pairwise(begins)]


def runs_of(rb):
    """Lengths of the trajectories that the sampler sees."""
    rb.sampler.draw(rb.storage.extent(), rb.sampler.num_slices or rb.sampler.slice_len, 0)
    return rb.sampler._table.runs().reshape(-1, 3)[:, 2].tolist()


def flags(at, n=12):
    flag = torch.zeros(n, 1, dtype=torch.bool)
    flag[at] = True
    return flag


def numbers(rb, batch_size, slice_len):
    return [number for _, number, _ in windows(rb.sample(batch_size), slice_len)]
