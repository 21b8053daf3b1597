"""Members of ensembles: every row says which member it is of, and which row of it."""

import itertools

import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter

#: Numbers of a member's rows begin with this, times its number.
APART = 1000


def rows(member, n, first=0, **more):
    """``n`` TensorDict rows of a member, of which each fifth is the last of an episode."""
    numbers = torch.arange(first, first + n)
    done = (numbers % 5 == 4).unsqueeze(-1)
    fields = {"a": APART * member + numbers, "x": numbers.float().unsqueeze(-1), ("next", "done"): done, **more}
    return TensorDict(fields, [n])


def member(
    number=0, n=20, cls=TensorDictReplayBuffer, capacity=100, storage=LazyTensorStorage, tracks=False, **arguments
):
    if "writer" not in arguments and cls is TensorDictReplayBuffer:
        arguments["writer"] = TensorDictRoundRobinWriter(track_generations=tracks)
    rb = cls(storage=storage(capacity), **arguments)
    if n:
        rb.extend(rows(number, n))
    return rb


def members(*sizes, **arguments):
    return [member(number, n, **arguments) for number, n in enumerate(sizes)]


def storages(folder):
    """Makers of the storages that members may have."""
    number = itertools.count()
    return {
        "RAM": LazyTensorStorage,
        "directory": lambda n: LazyMemmapStorage(n, scratch_dir=folder / f"store-{next(number)}"),
        "list": ListStorage,
    }


def check_rows(batch):
    """Every row is that of the member and the number that the batch says."""
    index = batch["index"]
    assert torch.equal(batch["a"], APART * index["buffer_ids"] + index["index"])
    assert torch.equal(batch["x"].squeeze(-1), index["index"].float())
