"""Claim: what a remover's choice costs follows from what was written since the last one, not from the number of rows, whoever wrote.

Measured: ``extend`` of 1 and of 256 rows (obs [4], version) into full stores of 10^5, 10^6 and 10^7 rows in shared memory, with each
remover and, beside them, into the ring without one. "alone": one process writes. "in turn": another process writes as many rows before
each call, outside the clock. With ``MaxTimesSampled`` a batch of 256 is sampled before each call, outside the clock, too.

A ranking picks out the next eighth of the rows when the last one is used up, in one pass over the ranks. That is once in many thousand
calls here, so a median does not have it: about 2 ns for each row of the store, shared by an eighth of as many rows.
"""

from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

SIZES = (10**5, 10**6, 10**7)
BATCHES = (1, 256)
REMOVERS = ("ring", "LowestPriority", "StalestFirst", "Lifo", "MaxTimesSampled")
PIECE = 10**6
WRITES = Effort(calls=20, blocks=30)
_LATE_S = 120


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Writes with each remover at growing numbers of rows, by one process and by two in turn."""
    engram = libraries["engram"].module
    if engram is None:
        return
    for name in REMOVERS:
        full = [_Full(engram, name, rows) for rows in SIZES]
        try:
            for batch in BATCHES:
                for mode in ("alone", "in turn"):
                    sides = [one.side(batch, beside=mode == "in turn") for one in full]
                    timing = alternate(sides, WRITES.scaled(share))
                    key = f"removers/{name}/{batch}/{mode.replace(' ', '-')}"
                    what = f"extend {batch} · {name} · {mode}"
                    yield timed(key, what, timing, ours=sides[-1].name, share=[side.name for side in sides[:-1]])
        finally:
            for one in full:
                one.close()


class _Full:
    """A full buffer in shared memory, and another process that writes into it when it is told."""

    def __init__(self, engram: Any, name: str, rows: int) -> None:
        self.rows, self.samples = rows, name == "MaxTimesSampled"
        sampler = engram.PrioritizedSampler(rows, 0.6, 0.4) if name == "LowestPriority" else engram.RandomSampler()
        removers = {
            "LowestPriority": engram.LowestPriority,
            "StalestFirst": lambda: engram.StalestFirst("version"),
            "Lifo": engram.Lifo,
            "MaxTimesSampled": engram.MaxTimesSampled,
        }
        remover = removers[name]() if name in removers else None
        storage = engram.LazyTensorStorage(rows)
        self.buffer = engram.TensorDictReplayBuffer(storage=storage, sampler=sampler, remover=remover, batch_size=256)
        self.buffer.extend(_steps(1))
        self.buffer = self.buffer.share()
        if self.samples:
            self.buffer.count_usage()
        for first in range(1, rows, PIECE):
            self.buffer.extend(_steps(min(PIECE, rows - first)))
        if name == "LowestPriority":
            self.buffer.update_priority(torch.arange(rows), torch.rand(rows))
        fork = get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_write, args=(self.buffer, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def side(self, batch: int, *, beside: bool) -> Side:
        data = [_steps(batch) for _ in range(16)]
        at = iter(range(1 << 62))

        def between() -> None:
            if self.samples:
                self.buffer.sample()
            if beside:
                self._pipe.send(batch)
                if not self._pipe.poll(_LATE_S):
                    raise TimeoutError(f"bench_removers: expected an answer within {_LATE_S} s, got none.")
                self._pipe.recv()

        def call() -> object:
            return self.buffer.extend(data[next(at) % len(data)])

        breaks: Callable[[], object] | None = between if beside or self.samples else None
        return Side(f"{self.rows:.0e} rows", call, between=breaks)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(_LATE_S)
        self.buffer.close()


def _write(buffer: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    while (batch := pipe.recv()) is not None:
        buffer.extend(_steps(batch))
        pipe.send("written")


def _steps(n: int) -> TensorDict:
    return TensorDict({"obs": torch.zeros(n, 4), "version": torch.randint(10**6, (n,))}, [n])
