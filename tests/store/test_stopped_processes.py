"""Whoever waits in vain for a process that is stopped is told so by one of engram's errors, whatever he called."""

import os
import signal
import sys
import threading
import time

import pytest
import torch

from engram import (
    EngramError,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    WriterStalled,
)
from engram._support import native

ROWS = 1 << 18


@pytest.fixture(autouse=True)
def impatient():
    before = native.wait_limit()
    native._core.set_wait_limit(0.02)
    yield
    native._core.set_wait_limit(before)


def lock_of(rb, kind, at):
    """The word of an index's mutex: who holds it, 0 for nobody."""
    return rb.storage.store.indexes["main", kind].block.tensor[at : at + 4].view(torch.int32)


@pytest.fixture(scope="module")
def stopped():
    """A buffer whose tree another process holds, which is stopped."""
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=PrioritizedSampler(ROWS, 0.6, 0.4), shared=True)
    rb.extend(torch.arange(ROWS))
    rb.sample(1)
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            while True:
                rb.update_priority(torch.arange(ROWS), torch.rand(ROWS))
        finally:
            os._exit(1)
    lock = lock_of(rb, "priorities", 112)
    for _ in range(1000):
        time.sleep(0.003)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        if int(lock[0]):
            break
        os.kill(pid, signal.SIGCONT)
    assert int(lock[0])
    yield rb
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    rb.close()


WAITING = {
    "sample": lambda rb: rb.sample(4),
    "update": lambda rb: rb.update_priority([1, 2], [1.0, 2.0]),
    "mark_update": lambda rb: rb.mark_update([1, 2]),
    "beta": lambda rb: setattr(rb.sampler, "beta", 0.5),
    "alpha": lambda rb: setattr(rb.sampler, "alpha", 0.5),
    "priorities": lambda rb: rb.sampler._index.leaves(4),
    "total": lambda rb: rb.sampler._index.core.total,
    "weights": lambda rb: rb.sampler._index.weights(torch.arange(4)),
    "state": lambda rb: rb.sampler.state_dict(),
    "empty": lambda rb: rb.empty(),
}


@pytest.mark.parametrize("call", WAITING.items(), ids=lambda call: call[0])
def test_the_tree_is_held(stopped, call):
    with pytest.raises(WriterStalled, match=r"for 20 ms\. A process that is stopped") as caught:
        call[1](stopped)
    assert isinstance(caught.value, EngramError)
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("call", WAITING.items(), ids=lambda call: call[0])
def test_other_threads_run_while_one_waits_for_the_tree(stopped, call):
    """For seconds, elsewhere: whoever waits must not keep Python's lock."""
    begun, ran = threading.Lock(), []
    begun.acquire()

    def work():
        with begun:
            ran.append(True)

    other = threading.Thread(target=work)
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        begun.release()
        with pytest.raises(WriterStalled):
            call[1](stopped)
        assert ran
    finally:
        sys.setswitchinterval(before)
        other.join()


def test_the_pass_is_held(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path), sampler=SamplerWithoutReplacement(), batch_size=2
    )
    rb.extend(torch.arange(8))
    rb.sample()
    lock = lock_of(rb, "pass", 64)
    lock.fill_(os.getppid())  # as if that had it
    for call in (rb.sample, rb.sampler.state_dict, lambda: rb.sampler.ran_out):
        with pytest.raises(WriterStalled):
            call()
    lock.fill_(0)
    assert len(rb.sample()) == 2
    rb.close()


def test_rows_are_being_placed(tmp_path):
    """Said in other words than those of the core, which calls it an index."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    rb.extend(torch.arange(4))
    store = rb.storage.store
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with store.placing():
            os.write(write, b"x")
            signal.pause()
    assert os.read(read, 1) == b"x"
    with pytest.raises(WriterStalled, match=r"another process has been placing rows for 20 ms"), store.placing():
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with store.placing():
        pass
    rb.close()
    os.close(read), os.close(write)
