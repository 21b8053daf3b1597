"""Shares of work for several threads: all is done, the first failure stops all, and nobody works on after that."""

import _thread
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from engram import LazyTensorStorage, ReplayBuffer
from engram.saved.disk import WorkerEvent
from engram.saved.rows import READERS, parallel_read
from tests import fresh
from tests.waiting import until

HERE = [torch.zeros(1)]
BEFORE = [0]


class Elsewhere:
    is_cpu = False


@pytest.fixture(autouse=True)
def threads_before():
    BEFORE[:] = [_thread._count()]


def all_ended():
    until(lambda: _thread._count() <= BEFORE[0], 60)
    return _thread._count() <= BEFORE[0]


def test_all_is_done_each_share_in_order():
    done = []
    parallel_read([[partial(done.append, (share, i)) for i in range(5)] for share in range(7)], HERE)
    assert sorted(done) == list(itertools.product(range(7), range(5)))
    for share in range(7):
        assert [i for its, i in done if its == share] == list(range(5))
    parallel_read([], HERE)


def test_shares_are_done_at_once():
    together = threading.Barrier(READERS)
    parallel_read([[partial(together.wait, 60)] for _ in range(READERS)], HERE)


def test_what_is_elsewhere_is_filled_by_this_thread():
    seen = set()
    parallel_read([[lambda: seen.add(threading.get_ident())]] * 6, [*HERE, Elsewhere()])
    assert seen == {threading.get_ident()}


def test_an_interrupt_before_a_thread_begins_leaves_nobody_to_wait_for(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_read([[lambda: None]] * READERS, HERE)


def test_without_more_threads_the_calling_one_does_all(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(_thread, "start_new_thread", refused)
    parallel_read([[partial(done.append, i)] for i in range(5)], HERE)
    assert done == [*range(5)]


def test_what_has_ended_is_told_to_all_who_wait():
    ended = WorkerEvent()
    assert not ended.wait(0.01)
    with ThreadPoolExecutor() as threads:
        told = [threads.submit(ended.wait, 60) for _ in range(3)]
        ended.set()
        ended.set()
        assert all(it.result() for it in told)
    assert ended.is_set()
    assert ended.wait()


@pytest.mark.parametrize("fails", range(READERS))
def test_the_first_failure_stops_the_others(fails):
    began, others = threading.Barrier(READERS), []

    def failing():
        began.wait(60)
        raise OSError("the disk is gone")
        yield

    def endless(share):
        began.wait(60)
        for _ in range(60_000):
            yield partial(time.sleep, 0.001)
        others.append(share)

    shares = [failing() if share == fails else endless(share) for share in range(READERS)]
    with pytest.raises(OSError, match="the disk is gone"):
        parallel_read([*shares, [partial(others.append, "a share behind them")]], HERE)
    assert others == []
    assert all_ended()


def test_interrupts_wait_for_what_still_writes():
    """More than one, as impatient users send them: rows must not be given free while a thread writes to them."""
    main, wrote = threading.get_ident(), []

    def act():
        if threading.get_ident() == main:
            time.sleep(100)
            return
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        wrote.append(True)

    with pytest.raises(KeyboardInterrupt):
        parallel_read([[act], [act]], HERE)
    assert wrote == [True]
    assert all_ended()


def test_loads_of_a_thread_that_outlives_the_program(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.arange(10), "reward": torch.ones(10)})
    rb.dumps(tmp_path / "dump")
    program = """
        import threading, time
        from engram import LazyTensorStorage, ReplayBuffer

        def load():
            threading.main_thread().join()
            time.sleep(0.2)
            rb = ReplayBuffer(storage=LazyTensorStorage(10))
            rb.loads(dump)
            print(len(rb), flush=True)

        threading.Thread(target=load).start()
    """
    assert fresh.run(program, dump=str(tmp_path / "dump")) == "10"


def test_loads_from_a_folder_that_gets_another_name_meanwhile(tmp_path, monkeypatch):
    from engram.saved.part_reader import PartReader

    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"obs": torch.arange(10), "reward": torch.ones(10)})
    rb.dumps(tmp_path / "dump")
    real = PartReader.again

    def again(self):
        if (tmp_path / "dump").exists():
            (tmp_path / "dump").rename(tmp_path / "moved")
        return real(self)

    monkeypatch.setattr(PartReader, "again", again)
    other = ReplayBuffer(storage=LazyTensorStorage(10))
    other.loads(tmp_path / "dump")
    assert other[:]["obs"].tolist() == list(range(10))
    assert not (tmp_path / "dump").exists()
