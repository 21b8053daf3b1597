"""Limits of a store that several processes use: killed, stopped, waiting."""

import os
import signal

import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer, SamplesPerInsert
from tests import stress
from tests.fresh import start
from tests.ranks.processes import wait_for

OPEN = """
import torch
from engram import ReplayBuffer
rb = ReplayBuffer.open(folder, batch_size=8)
"""
SAMPLE = OPEN + "print('ready', flush=True)\nprint(len(rb.sample(timeout=120)), flush=True)"
WRITE = OPEN + "print('ready', flush=True)\nprint(len(rb.extend(torch.arange(8), timeout=120)), flush=True)"


@pytest.fixture
def rb(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(1_000, scratch_dir=tmp_path / "store"), batch_size=8)
    rb.extend(torch.arange(16))
    yield rb
    rb.close()


def waiting(rb, side, n=1):
    wait_for(lambda: rb.stats().get(f"{side}s_waiting") == n)


ENDS = """
import threading, time, torch
from engram import LazyTensorStorage, MinSize, ReplayBuffer
rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8).limit(MinSize(20))
rb.extend(torch.arange(3))
threading.Thread(target=rb.sample, kwargs={"timeout": 120}, daemon=True).start()
while not rb.stats()["samples_waiting"]:
    time.sleep(0.01)
"""


def test_a_program_ends_although_a_daemon_thread_waits():
    assert start(ENDS).wait() == 0


def test_processes_wait_for_each_other(rb):
    rb.limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    program = start(SAMPLE, folder=str(rb.storage.scratch_dir))
    waiting(rb, "sample")
    rb.extend(torch.arange(4))
    assert program.wait() == 0
    rb.extend(torch.arange(16))
    program = start(WRITE, folder=str(rb.storage.scratch_dir))
    waiting(rb, "insert")
    rb.sample(8)
    rb.sample(8)
    assert program.wait() == 0
    assert rb.stats()["limit_inserts"] == 4 + 16 + 8


def test_processes_that_are_killed_or_stopped_while_they_wait_hold_nothing(rb):
    rb.limit(SamplesPerInsert(1, min_size=20, tolerance=0))
    folder = str(rb.storage.scratch_dir)
    killed, stopped, third = (start(SAMPLE, folder=folder) for _ in range(3))
    waiting(rb, "sample", 3)
    killed.kill()
    os.kill(stopped.pid, signal.SIGSTOP)
    rb.extend(torch.arange(8))
    assert third.wait() == 0
    os.kill(stopped.pid, signal.SIGCONT)
    rb.extend(torch.arange(8), timeout=120)
    assert stopped.wait() == 0
    assert rb.stats()["limit_samples"] == 16


def test_a_limit_of_another_process_counts_at_once(rb):
    rb.limit(SamplesPerInsert(1, min_size=500, tolerance=0))
    program = start(SAMPLE, folder=str(rb.storage.scratch_dir))
    waiting(rb, "sample")
    code = OPEN + "from engram import MinSize\nrb.limit(MinSize(10))"
    assert start(code, folder=str(rb.storage.scratch_dir)).wait() == 0
    assert program.wait() == 0


#: Of each of four processes.
OPERATIONS = stress.size(300, 500_000, 2_500_000)
WORK = (
    OPEN
    + """
import random
dice = random.Random(seed)
print("ready", flush=True)
for step in range(operations):
    if side == "insert":
        rb.extend(torch.arange(dice.randint(1, 4)), timeout=None)
    else:
        rb.sample(timeout=None)
    if step == 50:
        print("at work", flush=True)
"""
)


@pytest.mark.stress
def test_the_ratio_stays_in_its_band(rb):
    """Of four processes, one of which is killed."""
    rb.limit(SamplesPerInsert(4, min_size=16, tolerance=0.5))
    folder = str(rb.storage.scratch_dir)
    programs = [
        start(WORK, folder=folder, operations=OPERATIONS, side=side, seed=seed)
        for seed, side in enumerate(["insert", "insert", "sample", "sample"])
    ]
    for program in programs:
        program.until("at work")
    programs[0].kill()
    centre, slack, most = 64, 32, 16 + 8  # the largest insert, and a batch that a killed process may have counted
    seen = 0
    while all(program.poll() is None for program in programs[1:]):
        level = rb.stats()["limit_level"]
        assert centre - slack - most <= level <= centre + slack + most
        seen += 1
    assert seen
    for program in programs[1:]:
        program.kill()
    stats = rb.stats()
    level = 64 + 4 * stats["limit_inserts"] - stats["limit_samples"]
    assert abs(level - stats["limit_level"]) <= most
