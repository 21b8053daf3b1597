"""Claim: threads that draw at the same time are in total not slower than one of them.

Measured: process CPU of uniform batches, TensorDict of three fields, drawn by one thread and by four. A native call that is shorter
than handing Python's lock over keeps it; a longer one gives it up. Rows of a directory on a disk may have to be read first, so
there every call gives it up. What the threads need to meet before and after is counted, too. And so is what torch does: it gives
the lock up whenever a tensor is freed, three times per batch. Rows that are added and priorities
that are set free no tensor.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

THREADS, BATCHES, SHORT = 4, 200, 2_000
EFFORT = Effort(calls=1, blocks=40, lead=1)
#: Rows of a batch, and bytes of a row: within the border, and beyond it.
SHAPES = ((32, 64), (128, 64), (128, 256), (512, 64), (512, 256), (512, 1024))


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches of several sizes."""
    library = libraries["engram"]
    if library.module is None:
        return

    def row(key: str, what: str, call: Callable[[], object], calls: int) -> Row:
        sides = [Side("engram", _Team(call, calls, THREADS).run), Side("1 thread", _Team(call, calls, 1).run)]
        timing = alternate(sides, EFFORT.scaled(share), time.process_time_ns)
        return timed(f"threads/{key}", f"{calls:,} {what} · {THREADS} threads", timing, share=("1 thread",))

    for n, width in SHAPES:
        yield row(
            f"{n}x{width}", f"batches of {n} rows of {width} B", partial(_buffer(library, width).sample, n), BATCHES
        )
    yield row("add", "rows of 64 B added, NumPy", _adding(library), SHORT)
    yield row("update", "updates of 32 priorities", _updating(library), SHORT)


class _Team:
    """Threads that wait until all of them are to call something."""

    def __init__(self, call: Callable[[], object], calls: int, threads: int) -> None:
        self._barrier = threading.Barrier(threads + 1)
        for _ in range(threads):
            threading.Thread(target=self._work, args=(call, calls // threads), daemon=True).start()

    def _work(self, call: Callable[[], object], calls: int) -> None:
        while True:
            self._barrier.wait()
            for _ in range(calls):
                call()
            self._barrier.wait()

    def run(self) -> None:
        self._barrier.wait()
        self._barrier.wait()


def _adding(library: rivals.Library) -> Callable[[], object]:
    rb = library.module.ReplayBuffer(storage=library.module.LazyTensorStorage(40_000))
    return partial(rb.add, {"obs": np.zeros(14, np.float32), "reward": np.float32(1), "id": np.int32(1)})


def _updating(library: rivals.Library) -> Callable[[], object]:
    sampler = library.module.PrioritizedSampler(40_000, 0.6, 0.4)
    rb = library.module.ReplayBuffer(storage=library.module.LazyTensorStorage(40_000), sampler=sampler)
    rb.extend(torch.zeros(40_000, 16))
    return partial(rb.update_priority, torch.arange(32), torch.ones(32))


def _buffer(library: rivals.Library, width: int) -> Any:
    rows = 40_000
    data = TensorDict(
        {"obs": torch.zeros(rows, width // 4 - 2), "reward": torch.zeros(rows, 1), "id": torch.arange(rows).int()},
        [rows],
    )
    rb = library.module.TensorDictReplayBuffer(storage=library.module.LazyTensorStorage(rows))
    rb.extend(data)
    return rb
