"""Claim: threads that draw at the same time are in total not slower than one of them.

Measured: process CPU of uniform batches, TensorDict of three fields, drawn by one thread and by four. A native call that is shorter
than handing Python's lock over keeps it; a longer one gives it up. Rows of a directory on a disk may have to be read first, so
there every call gives it up. What the threads need to meet before and after is counted, too.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

THREADS, BATCHES = 4, 200
EFFORT = Effort(calls=1, blocks=40, lead=1)
#: Rows of a batch, and bytes of a row: within the border, and beyond it.
SHAPES = ((32, 64), (128, 64), (128, 256), (512, 64), (512, 256), (512, 1024))


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches of several sizes."""
    library = libraries["engram"]
    if library.module is None:
        return
    for n, width in SHAPES:
        rb = _buffer(library, width)
        sides = [Side("engram", _Team(rb, n, THREADS).draw), Side("1 thread", _Team(rb, n, 1).draw)]
        timing = alternate(sides, EFFORT.scaled(share), time.process_time_ns)
        what = f"{BATCHES} batches of {n} rows of {width} B · {THREADS} threads"
        yield timed(f"threads/{n}x{width}", what, timing, share=("1 thread",))


class _Team:
    """Threads that wait until all of them are to draw."""

    def __init__(self, rb: Any, n: int, threads: int) -> None:
        self._barrier = threading.Barrier(threads + 1)
        for _ in range(threads):
            threading.Thread(target=self._work, args=(rb.sample, n, BATCHES // threads), daemon=True).start()

    def _work(self, sample: Callable[[int], object], n: int, batches: int) -> None:
        while True:
            self._barrier.wait()
            for _ in range(batches):
                sample(n)
            self._barrier.wait()

    def draw(self) -> None:
        self._barrier.wait()
        self._barrier.wait()


def _buffer(library: rivals.Library, width: int) -> Any:
    rows = 40_000
    data = TensorDict(
        {"obs": torch.zeros(rows, width // 4 - 2), "reward": torch.zeros(rows, 1), "id": torch.arange(rows).int()},
        [rows],
    )
    rb = library.module.TensorDictReplayBuffer(storage=library.module.LazyTensorStorage(rows))
    rb.extend(data)
    return rb
