"""Claim: a batch of several buffers is drawn five times as fast as by TorchRL's ensemble.

Measured: ``sample`` of a ``ReplayBufferEnsemble`` of three full ``TensorDictReplayBuffer`` in RAM with 10^6 rows each: an observation
and the next one, 17 float32 each, an action of 6, a reward and a done flag. A part of each member, 258 rows, and four parts
of members that are drawn, 256 rows. One thread.
"""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

SAMPLE = Effort(calls=20, blocks=40)
ROWS, CHUNK, MEMBERS = 1_000_000, 100_000, 3
CASES = {
    "all": ("a part of each of 3 buffers · 258 rows", 258, {"sample_from_all": True}),
    "drawn": ("4 parts of 3 buffers · 256 rows", 256, {"num_buffer_sampled": 4}),
}


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Each way to choose members."""
    made = {
        name: list(_members(libraries[name].module)) for name in rivals.TORCH_LIKE if libraries[name].module is not None
    }
    for key, (row, size, arguments) in CASES.items():
        sides = [Side(name, _sample(libraries[name].module, some, size, arguments)) for name, some in made.items()]
        yield timed(f"ensembles/{key}", row, alternate(sides, SAMPLE.scaled(share)), times=("TorchRL",))


def _members(module: Any) -> Iterator[Any]:
    done = torch.zeros(CHUNK, 1, dtype=torch.bool)
    for _ in range(MEMBERS):
        rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(ROWS))
        for _ in range(ROWS // CHUNK):
            following = {"observation": torch.randn(CHUNK, 17), "reward": torch.randn(CHUNK, 1), "done": done}
            rows = {"observation": torch.randn(CHUNK, 17), "action": torch.randn(CHUNK, 6)}
            rb.extend(TensorDict({**rows, "next": TensorDict(following, [CHUNK])}, [CHUNK]))
        yield rb


def _sample(module: Any, members: list[Any], size: int, arguments: dict[str, Any]) -> Any:
    rb = module.ReplayBufferEnsemble(*members, **arguments)
    return lambda: rb.sample(size)
