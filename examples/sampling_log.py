"""Write down which rows each batch had, and read the same batches again.

A row is named by its index and its generation, the number of the write that it held. Both stand in the info of a batch, with
the weights. They stay true after a crash, in another process and in a restored checkpoint. A row that was overwritten
meanwhile has another generation, so a batch is never replayed with other data.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from tensordict import TensorDict

from engram import Checkpointer, LazyTensorStorage, PrioritizedSampler, RoundRobinWriter, TensorDictReplayBuffer

KEYS = ("index", "index_generation", "priority_weight")


def make_replay() -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(1_000),
        sampler=PrioritizedSampler(1_000, alpha=0.6, beta=0.4),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=32,
    )


def sample(rb: TensorDictReplayBuffer, log: BinaryIO) -> TensorDict:
    """A batch, which is in the log before it is returned. Each process needs a log of its own."""
    batch, info = rb.sample(return_info=True)
    for key in KEYS:
        np.save(log, np.asarray(info[key]))
    log.flush()
    return batch


def replay(rb: TensorDictReplayBuffer, path: Path) -> Iterator[TensorDict | None]:
    """The batches of a log, in order; None: rows of the batch were overwritten, or are not in the checkpoint."""
    with path.open("rb") as log:
        while log.peek(1):
            index, generation, weight = (torch.from_numpy(np.load(log)) for _ in KEYS)
            if torch.equal(rb.writer.generations_of(index), generation):
                yield rb[index].update({"priority_weight": weight})
            else:
                yield None


def rows(n: int) -> TensorDict:
    return TensorDict({"obs": torch.randn(n, 4), "reward": torch.randn(n)}, batch_size=[n])


def same(replayed: Iterator[TensorDict | None], batches: list[TensorDict]) -> int:
    """How many batches came again, bit for bit."""
    keys = ("obs", "reward", "priority_weight")
    pairs = zip(replayed, batches, strict=True)
    return sum(one is not None and all(torch.equal(one[key], other[key]) for key in keys) for one, other in pairs)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rb = make_replay()
    rb.extend(rows(500))
    with (folder / "draws.log").open("ab") as log:
        drawn = [sample(rb, log) for _ in range(10)]
    print(f"{same(replay(rb, folder / 'draws.log'), drawn)} of {len(drawn)} batches come again")

    Checkpointer(folder / "checkpoints", rb).save(1)
    restored = make_replay()
    Checkpointer(folder / "checkpoints", restored).restore()
    print(f"from the checkpoint: {same(replay(restored, folder / 'draws.log'), drawn)}")

    rb.extend(rows(900))  # 400 of the 500 rows are overwritten
    print(f"when their rows were overwritten: {same(replay(rb, folder / 'draws.log'), drawn)}")
