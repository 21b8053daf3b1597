"""Claim: counting samples takes at most 1 % of the time of a sample, and counting those of each row about a nanosecond a row.

Measured: process CPU of uniform batches of 64 and 256 rows, as they are, which are counted by the native call that draws them; beside
the same that are counted once more, by a call of its own from Python, which takes longer than what the native call does. So the
cost is below the difference. And beside the same with an index ``usage``. Then what one ``stats()`` takes.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

EFFORT = Effort(calls=500, blocks=40, lead=2)
ASKED = Effort(calls=20, blocks=20, lead=1)
ROWS = 100_000


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches that are counted, counted twice, and by row."""
    library = libraries["engram"]
    if library.module is None:
        return
    engram = library.module
    for n in (64, 256):
        plain, usage = _buffer(engram, n), _buffer(engram, n)
        usage.count_usage()
        sides = {"counted": plain.sample, "counted twice": partial(_twice, plain, n), "usage": usage.sample}
        timing = alternate([Side(*side) for side in sides.items()], EFFORT.scaled(share), time.process_time_ns)
        yield timed(f"meter/{n}", f"batches of {n} rows, TensorDict", timing, ours="counted twice", share=("counted",))
        yield timed(f"meter/usage-{n}", f"batches of {n} rows, TensorDict", timing, ours="usage", share=("counted",))
    asked: Callable[[], object] = _buffer(engram, 64).stats
    timing = alternate([Side("engram", asked)], ASKED.scaled(share), time.process_time_ns)
    yield timed("meter/stats", f"stats() of {ROWS:,} rows", timing)


def _twice(rb: Any, n: int) -> None:
    start = time.perf_counter_ns()
    rb.sample()
    core = rb.storage.memory.core
    core.count_sampled(0, n)
    core.count_wait(start)


def _buffer(engram: Any, n: int) -> Any:
    rb = engram.TensorDictReplayBuffer(storage=engram.LazyTensorStorage(ROWS), batch_size=n)
    from tensordict import TensorDict

    rb.extend(
        TensorDict({"obs": torch.zeros(ROWS, 14), "reward": torch.zeros(ROWS, 1), "id": torch.arange(ROWS)}, [ROWS])
    )
    return rb
