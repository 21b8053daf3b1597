"""Claim: a sample that waits for a limit goes on within a millisecond of the insert that it waits for, and takes no CPU meanwhile; where
there are no limits nothing costs more.

Measured: the time from the start of an insert in another process to the batch of a sample that waited for it; CPU of a process per
second in which it waits; sampling and writing without a limit, and with one that is never reached.
"""

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import rivals
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, alternate

EFFORT = Effort(calls=200, blocks=40, lead=2)
#: Samples that wait, and seconds of one that waits in vain.
WAITS, IDLE_S = 300, 5.0
BATCH = 32


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Waits of two processes, and what a limit costs that is never reached."""
    library = libraries["engram"]
    if library.module is None:
        return
    engram = library.module
    rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(10_000), batch_size=BATCH, shared=True)
    rb.extend(torch.zeros(1_000, 16))
    yield from _waits(engram, rb, max(20, int(WAITS * share)))
    rb.close()
    for what, width in (("sample", BATCH), ("extend", BATCH)):
        buffers = {side: _buffer(engram) for side in ("no limit", "a limit")}
        buffers["a limit"].limit(engram.SamplesPerInsert(1, min_size=1_000, tolerance=1e9))
        rows = torch.zeros(width, 16)
        calls = {side: rb.sample if what == "sample" else partial(rb.extend, rows) for side, rb in buffers.items()}
        timing = alternate(
            [Side(side, call) for side, call in calls.items()], EFFORT.scaled(share), time.process_time_ns
        )
        yield timed(f"limits/{what}", f"{what} of {width} rows", timing, ours="a limit", share=("no limit",))


def _buffer(engram: Any) -> Any:
    rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(10_000), batch_size=BATCH)
    rb.extend(torch.zeros(1_000, 16))
    return rb


def _waits(engram: Any, rb: Any, waits: int) -> Iterator[Row]:
    """A process samples, this one inserts: each batch is due when its rows are there."""
    rb.limit(engram.SamplesPerInsert(1, min_size=1_000, tolerance=0))
    here, there = multiprocessing.Pipe()
    learner = multiprocessing.get_context("spawn").Process(target=_learn, args=(rb, there, waits), daemon=True)
    learner.start()
    rows, late = torch.zeros(BATCH, 16), []
    assert here.recv() == "ready"
    for _ in range(waits):
        while not rb.stats()["samples_waiting"]:
            time.sleep(0.0005)
        time.sleep(0.002)  # it sleeps
        began = time.monotonic_ns()
        rb.extend(rows)
        late.append((here.recv() - began) / 1e3)
    late.sort()
    at = [late[int(part * (len(late) - 1))] for part in (0.25, 0.5, 0.75, 0.99)]
    spread = Spread(at[1], at[0], at[2])
    judged = Comparison("1 ms", "value", spread, FLOORS["limits/wake", "1 ms"])
    what = "insert → batch of a sample that waited"
    yield Row("limits/wake", what, {"engram": spread}, [judged], blocks_us={"engram": late})
    yield Row("limits/wake-p99", "the same, 99 of 100", {"engram": Spread(at[3], at[3], at[3])}, [])
    cpu = here.recv()
    idle = Spread(cpu, cpu, cpu)
    yield Row("limits/idle", "CPU of a process per second in which it waits", {"engram": idle}, [])
    learner.join(60)


def _learn(rb: Any, said: Connection, waits: int) -> None:
    torch.set_num_threads(1)
    for _ in range(4):  # from the middle of the band down to its end
        try:
            rb.sample(timeout=0)
        except TimeoutError:
            break
    said.send("ready")
    for _ in range(waits):
        rb.sample()
        said.send(time.monotonic_ns())
    began, cpu = time.monotonic(), time.process_time()
    try:
        rb.sample(timeout=IDLE_S)
    except TimeoutError:
        said.send((time.process_time() - cpu) * 1e6 / (time.monotonic() - began))
    rb.close()
