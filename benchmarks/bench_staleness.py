"""Claim: draws by the staleness of rows cost the batch and the number of versions, not the buffer, while rows are written, too.

Measured: 256 of 10^6 rows in RAM (obs [8] float32 and the version of the policy), 100 versions, no limit, one thread. "while written"
adds a row of the newest version before every sample.

Then engram alone at growing numbers of rows, while written. The clock counts CPU time of the thread.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

DRAW = Effort(calls=4, blocks=40)
ROWS, BATCH, VERSIONS = 10**6, 256, 100
GROWING = (10**5, 10**6, 10**7)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Beside TorchRL, at rest and while rows are written; then alone at growing sizes."""
    sides = [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]
    for key, what, writes in (("rest", "at rest", False), ("written", "while written", True)):
        drawing = [Side(one.name, _drawing(one, ROWS, writes=writes)) for one in sides]
        timing = alternate(drawing, DRAW.scaled(share), time.thread_time_ns)
        yield timed(f"staleness/{key}", f"sample {BATCH} by staleness · {what}", timing, times=("TorchRL",))
    if (engram := libraries["engram"]).module is not None:
        alone = [Side(f"{rows:.0e} rows", _drawing(engram, rows, writes=True)) for rows in GROWING]
        timing = alternate(alone, DRAW.scaled(share), time.thread_time_ns)
        others = [side.name for side in alone[:-1]]
        what = f"sample {BATCH} by staleness · while written"
        yield timed("scaling/staleness", what, timing, ours=alone[-1].name, share=others)


def _drawing(library: rivals.Library, rows: int, *, writes: bool) -> Callable[[], object]:
    kinds = library.module
    sampler = kinds.StalenessAwareSampler() if library.name == "engram" else _torchrls()
    rb = kinds.TensorDictReplayBuffer(storage=kinds.LazyTensorStorage(rows), sampler=sampler, batch_size=BATCH)
    versions = torch.arange(rows) * VERSIONS // rows
    rb.extend(TensorDict({"obs": torch.zeros(rows, 8), "policy_version": versions}, [rows]))
    sampler.consumer_version = VERSIONS
    row = TensorDict({"obs": torch.zeros(8), "policy_version": torch.tensor(VERSIONS)}, [])
    rb.sample()
    return partial(_written_and_drawn, rb, row) if writes else rb.sample


def _written_and_drawn(rb: Any, row: TensorDict) -> None:
    rb.add(row)
    rb.sample()


def _torchrls() -> Any:
    from torchrl.data.replay_buffers.samplers import StalenessAwareSampler

    return StalenessAwareSampler()
