"""Calls that are shorter than handing Python's lock over keep it, and give it up before they wait."""

import gc
import sys
import sysconfig
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.store.blocks import Key

pytestmark = pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="there is no lock to keep")

ROWS, MANY = 4_096, 300


@pytest.fixture(autouse=True)
def _switch_when_it_is_given_up():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    gc.collect()
    gc.disable()  # torch gives the lock up whenever a tensor is freed
    yield
    gc.enable()
    sys.setswitchinterval(before)


class Waiting:
    """A thread that needs Python's lock from now on, and notes when it got it."""

    def __init__(self):
        self._begin = threading.Lock()
        self._begin.acquire()
        self.ran = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self):
        with self._begin:
            self.ran = True

    def __enter__(self):
        self._begin.release()
        return self

    def __exit__(self, *_):
        self._thread.join()


def steps(n=ROWS, width=16):
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[63::64] = True
    return TensorDict({"obs": torch.zeros(n, width), "next": {"done": done}}, [n])


def sampling(sampler):
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=32)
    rb.extend(steps())
    key = Key()  # torch gives the lock up as it draws one
    return lambda: rb._reading.sample_with(key, 32, True, None)  # all that is made for it is kept, and so not freed


def uniform():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=32)
    rb.extend(steps())
    key = Key()
    return lambda: rb._reading.sample_with(key, 32, False, None)


def updating(of):
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=PrioritizedSampler(ROWS, 0.6, 0.4))
    rb.extend(steps())
    rows, priorities = of(torch.arange(32)), of(torch.rand(32))
    return lambda: rb.update_priority(rows, priorities)


def adding(**arguments):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), **arguments)
    step = {"obs": np.zeros(16, np.float32), "reward": np.float32(1), "done": np.bool_(False)}
    rb.add(step)
    return lambda: rb.add(step)


def extending():
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rows = {"obs": np.zeros((8, 16), np.float32), "reward": np.zeros(8, np.float32)}
    for _ in range(10):  # of which the first ones are looked at, for a hint
        rb.extend(rows)
    return lambda: rb.extend(rows)


SHORT = {
    "uniform": uniform,
    "without replacement": lambda: sampling(SamplerWithoutReplacement()),
    "by priority": lambda: sampling(PrioritizedSampler(ROWS, 0.6, 0.4)),
    "windows": lambda: sampling(SliceSampler(slice_len=4)),
    "windows, each once": lambda: sampling(SliceSamplerWithoutReplacement(slice_len=4)),
    "rows": extending,
    "priorities": lambda: updating(lambda x: x),
    "priorities, NumPy": lambda: updating(torch.Tensor.numpy),
    "a row": adding,
    "a row and its priority": lambda: adding(sampler=PrioritizedSampler(64, 0.6, 0.4)),
    "a row of a trajectory": lambda: adding(sampler=SliceSampler(num_slices=2, end_key="done")),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_calls_keep_the_lock(name):
    """They let no other thread run, though the interpreter would ask them to only after minutes."""
    call = SHORT[name]()
    results = [call()]  # kept: torch gives the lock up whenever a tensor is freed
    with Waiting() as other:
        results += [call() for _ in range(MANY)]
        assert not other.ran


def test_long_calls_give_it_up():
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=ROWS)
    rb.extend(torch.zeros(ROWS, 64))
    with Waiting() as other:
        while not other.ran:
            rb.sample()


def test_a_call_that_waits_gives_it_up():
    """It waits for a thread that needs Python's lock to end what is waited for."""
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(torch.zeros(8, 3))
    begun, end = threading.Event(), threading.Event()

    def hold():
        with rb.storage.memory.paused():
            begun.set()
            end.wait()

    other = threading.Thread(target=hold)
    other.start()
    begun.wait()
    end.set()
    assert rb.add(torch.ones(3)) == 8
    other.join()
