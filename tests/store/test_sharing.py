"""Processes that write and draw in one store."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram._support import native
from engram.store.indexes import Indexes
from engram.store.lifetime import exclusive, shared_memory, sweep_shared_memory
from tests import fresh
from tests.ranks.processes import wait_for
from tests.store.processes import Child, leaves, steps, whole
from tests.waiting import Limit, ended, until

# ---- at work together ----------------------------------------------------------------------------------------------------

ROWS = 64


def write(rb, lane, count, size):
    for i in range(count):
        rb.extend(steps(1000 * i, size, episode=1000 * lane + i), lane=lane)


def draw(rb, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert whole(rb.sample())


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(),
        SamplerWithoutReplacement(),
        PrioritizedSampler(4 * ROWS, 0.6, 0.4),
        SliceSampler(slice_len=4),
        PrioritizedSliceSampler(4 * ROWS, 0.6, 0.4, slice_len=4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_writers_and_samplers_in_processes_of_their_own(storage, sampler):
    rb = TensorDictReplayBuffer(
        storage=storage(4 * ROWS, lanes=4), sampler=copy.deepcopy(sampler), batch_size=32
    ).share()
    rb.extend(steps(0, 8, episode=-1), lane=0)  # of a trajectory that no writer goes on with
    children = [Child(write, rb, lane, 150, 8) for lane in range(3)] + [Child(draw, rb, 0.7)]
    while any(child.process.is_alive() for child in children):
        batch = rb.sample()
        assert whole(batch)
        if "Slice" in type(sampler).__name__:
            step = batch["step"].reshape(-1, 4)
            assert bool((step[:, 1:] == step[:, :-1] + 1).all())
            episode = batch["episode"].reshape(-1, 4)
            assert bool((episode == episode[:, :1]).all())
        if "Prioritized" in type(sampler).__name__:
            batch["td_error"] = torch.rand(len(batch))
            rb.update_tensordict_priority(batch)
    for child in children:
        child.join()
    assert len(rb) == 3 * ROWS
    assert rb.write_count == 8 + 3 * 150 * 8
    if isinstance(sampler, PrioritizedSampler):
        assert bool((leaves(rb)[: 3 * ROWS] > 0).all())
        assert rb.sampler._index.core.total == pytest.approx(leaves(rb).sum().item(), rel=1e-12)
    rb.close()


# ---- one pass ------------------------------------------------------------------------------------------------------------


def passing(storage, rows=1000, batch_size=7, **arguments):
    rb = ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(**arguments), batch_size=batch_size).share()
    rb.extend(torch.arange(rows))
    return rb


def walk(rb, seen):
    for _ in range(40):
        for row in rb.sample().tolist():
            seen[row] += 1


@pytest.mark.parametrize(("storage", "method"), [(LazyMemmapStorage, "forkserver"), (LazyTensorStorage, "fork")])
def test_processes_walk_one_pass(storage, method):
    rb = passing(storage(1000))
    seen = [torch.zeros(1000, dtype=torch.int64).share_memory_() for _ in range(3)]
    for row in rb.sample().tolist():
        seen[0][row] += 1
    children = [Child(walk, rb, mine, method=method) for mine in seen]
    for child in children:
        child.join()
    while not rb.sampler.ran_out:
        for row in rb.sample().tolist():
            seen[0][row] += 1
    assert sum(seen).tolist() == [1] * 1000
    assert all(int(mine.sum()) >= 40 * 7 for mine in seen)
    assert all(rb.sample().tolist())
    rb.close()


def iterate(rb, seen):
    for batch in rb:
        seen[batch] += 1
        time.sleep(0.001)


def test_iterations_of_all_processes_end_with_the_pass():
    rb = passing(LazyMemmapStorage(1000))
    seen = [torch.zeros(1000, dtype=torch.int64).share_memory_() for _ in range(3)]
    children = [Child(iterate, rb, mine) for mine in seen]
    for child in children:
        child.join()
    total = sum(seen)
    assert int(total.min()) >= 1
    assert int(total.sum()) < 4000  # who draws just when another one took the last batch begins the next pass
    rb.close()


def test_a_pass_goes_on_when_the_store_is_shared_or_opened_again(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(torch.arange(10))
    seen = rb.sample().tolist()
    rb.share()
    seen += rb.sample().tolist()
    assert len(rb.sample()) == 2
    assert len(set(seen)) == 8
    rb.close()
    rb = passing(LazyMemmapStorage(10, scratch_dir=tmp_path), 10, 4, index="train")
    seen = rb.sample().tolist()
    rb.close()
    rb = ReplayBuffer.open(tmp_path)
    assert rb.sampler.index_name == "train"
    other = ReplayBuffer(storage=rb.storage, sampler=SamplerWithoutReplacement(index="eval"), batch_size=4)
    assert sorted(sum((batch.tolist() for batch in other), [])) == list(range(10))
    assert sorted(seen + sum((batch.tolist() for batch in rb), [])) == list(range(10))
    rb.close()


def walk_for_ever(rb):
    while True:
        rb.sample()


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_survives_those_who_walk_it(drop_last):
    rb = passing(LazyMemmapStorage(100), 100, drop_last=drop_last)
    for _ in range(15):
        child = Child(walk_for_ever, rb)
        for _ in range(20):
            rb.sample()
        child.kill()
        rb.sampler.ran_out = False
        while not rb.sampler.ran_out:
            rb.sample()
        rows = torch.cat(list(rb))
        assert len(rows) == (98 if drop_last else 100) == len(rows.unique())
    rb.close()


# ---- what others wrote ---------------------------------------------------------------------------------------------------


class Following:
    """A sampler that notes something of every row, whoever wrote it."""

    def __init__(self, storage):
        self.store = storage.store
        self.seen, self.next = {}, 0

    def catch_up(self):
        changes = self.store.changes(self.next)
        assert changes.tickets.tolist() == sorted(changes.tickets.tolist())
        self.seen.update(zip(changes.rows.tolist(), changes.tickets.tolist(), strict=True))
        self.next = changes.next
        return changes.rows.tolist()


def overwrite(rb, lane, count):
    for i in range(count):
        rb.extend(steps(i, 3), lane=lane)
        if i % 7 == 0:
            rb[20 * lane] = steps(i, 1)[0]


def test_what_other_processes_wrote_can_be_learnt():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(60, lanes=3))
    rb.extend(steps(0, 3), lane=0)
    following = Following(rb.storage)
    assert following.catch_up() == [0, 1, 2]
    children = [Child(overwrite, rb, lane, 400) for lane in range(3)]
    while any(child.process.is_alive() for child in children):
        following.catch_up()
    for child in children:
        child.join()
    following.catch_up()
    assert following.catch_up() == []
    rows = torch.arange(60)
    assert following.seen == dict(zip(rows.tolist(), rb.storage.tickets_of(rows).tolist(), strict=True))
    rb[5] = steps(1, 1)[0]
    assert following.catch_up() == [5]
    rb.close()


def write_best(rb, start, count):
    for i in range(count):
        rb.extend(steps(start + 8 * i, 8))


def test_the_best_rows_of_all_processes():
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(64), writer=TensorDictMaxValueWriter(rank_key="step"), batch_size=8
    )
    rb.extend(steps(0, 64))
    children = [Child(write_best, rb, 1000 * (k + 1), 40) for k in range(2)]
    write_best(rb, 5000, 10)
    for child in children:
        child.join()
    offered = [*range(64), *range(1000, 1320), *range(2000, 2320), *range(5000, 5080)]
    assert sorted(rb[:]["step"].tolist()) == sorted(offered)[-64:]
    rb.close()


def write_first(rb, barrier, start):
    barrier.wait()
    rb.extend(steps(start, 48))


def test_the_best_rows_of_processes_that_write_first_at_once():
    for _ in range(10):
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(64), writer=TensorDictMaxValueWriter(rank_key="step"))
        barrier = mp.get_context("fork").Barrier(2)
        for child in [Child(write_first, rb, barrier, start) for start in (0, 48)]:
            child.join()
        assert sorted(rb["step"].tolist()) == list(range(32, 96))
        rb.close()


def set_priority(rb, rows, value):
    rb.update_priority(torch.tensor(rows), value)


def write_with_plain_buffer(folder):
    rb = ReplayBuffer.open(folder, sampler=RandomSampler())
    rb.extend(steps(500, 4))
    rb.close()


def test_an_index_that_another_process_makes_is_kept_by_all(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32, scratch_dir=tmp_path / "x"), batch_size=8)
    rb.extend(steps(0, 4))
    child = Child(make_priorities, str(tmp_path / "x"))
    child.join()
    assert not rb.storage.store.indexes
    rb.extend(steps(100, 3))
    assert list(rb.storage.store.indexes) == [("main", "priorities")]
    rb.set_sampler(PrioritizedSampler(32, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [3.0] * 7 + [0.0] * 25
    Child(set_priority, rb, [1, 2], 8.0).join()
    assert leaves(rb)[:4].tolist() == [3.0, 8.0, 8.0, 3.0]
    Child(write_with_plain_buffer, str(tmp_path / "x"), method="forkserver").join()
    assert leaves(rb)[7:11].tolist() == [8.0] * 4
    rb.close()


def make_priorities(folder):
    rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(32, 1.0, 1.0, 0.0))
    rb.update_priority(torch.arange(4), 3.0)
    rb.close()


def make_priorities_and_die(folder):
    Indexes.scan = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    make_priorities(folder)


@pytest.mark.parametrize("joins", ["who was there", "who comes", "who comes for something else"])
def test_an_index_whose_maker_died_before_it_saw_the_rows(tmp_path, joins):
    """While others have the store open: whoever comes or asks for it next lets it look."""
    folder = tmp_path / "x"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32, scratch_dir=folder), batch_size=8)
    rb.extend(steps(0, 4))
    child = Child(make_priorities_and_die, str(folder))
    ended(child.process)
    assert child.process.exitcode == -signal.SIGKILL
    mark = folder / ".engram/indexes/main/.unscanned-priorities"
    assert mark.exists()
    if joins == "who was there":
        rb.extend(steps(100, 3))  # by which it meets the index
    elif joins == "who comes":
        Child(set_priority_there, str(folder), [1], 8.0).join()
    else:
        Child(write_with_plain_buffer, str(folder), method="forkserver").join()
        assert not mark.exists()
    rb.set_sampler(PrioritizedSampler(32, 1.0, 1.0, 0.0))
    assert not mark.exists()
    assert leaves(rb)[:4].tolist() == [1.0, 8.0 if joins == "who comes" else 1.0, 1.0, 1.0]
    rb.close()


def set_priority_there(folder, rows, value):
    rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(32, 1.0, 1.0, 0.0))
    set_priority(rb, rows, value)
    rb.close()


def forget(rb):
    rb.empty()


def test_another_process_empties():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32), sampler=PrioritizedSampler(32, 1.0, 1.0), batch_size=4)
    rb.extend(steps(0, 20))
    Child(forget, rb).join()
    assert len(rb) == 0
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(steps(50, 3))
    assert rb.sample()["step"].min() >= 50
    rb.close()


def cut_in_two(rb, row):
    rb[row] = TensorDict({"step": torch.tensor(row), "twice": torch.tensor(2 * row), "episode": torch.tensor(77)}, [])


def test_an_edit_of_another_process_cuts_a_trajectory():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32), sampler=SliceSampler(slice_len=3), batch_size=30)
    rb.extend(steps(0, 10))
    assert whole(rb.sample())
    Child(cut_in_two, rb, 5).join()
    for _ in range(20):
        step = rb.sample()["step"].reshape(-1, 3)
        assert not bool((step == 5).any())
    rb.close()


# ---- death ---------------------------------------------------------------------------------------------------------------


def write_for_ever(rb, lane):
    i = 0
    while True:
        rb.extend(steps(i, 8, episode=lane), lane=lane)
        i += 8


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_killed_writers_stop_nobody(storage):
    """Again and again: whoever is left goes on, and in the end every row and every priority is right."""
    rb = TensorDictReplayBuffer(
        storage=storage(4 * 40, lanes=4), sampler=PrioritizedSampler(160, 0.6, 0.4), batch_size=16
    ).share()
    rb.extend(steps(0, 40), lane=3)
    children = [Child(write_for_ever, rb, lane) for lane in range(2)]
    for i in range(12):
        time.sleep(0.01 + 0.005 * (i % 5))
        children[i % 2].kill()
        limit = Limit(20)
        batch = rb.sample()
        assert whole(batch)
        batch["td_error"] = torch.rand(len(batch))
        rb.update_tensordict_priority(batch)
        rb.extend(steps(i, 3), lane=i % 2)  # over what the dead one was writing
        limit.check("going on")
        children[i % 2] = Child(write_for_ever, rb, i % 2)
    for child in children:
        child.kill()
    rb.storage.store.core.reclaim()
    assert rb.storage.store.core.in_flight == 0
    holes = rb.storage.extent().holes
    void = set() if holes is None else set(holes.tolist())
    live = [
        row for row in range(160) if row < rb.storage.extent().filled[row // 40] + row // 40 * 40 and row not in void
    ]
    assert len(rb) == len(live)
    assert ((leaves(rb) > 0).nonzero().flatten()).tolist() == live
    assert whole(rb[live])
    rb.close()


def test_all_dead_then_somebody_opens(tmp_path):
    program = fresh.start(
        """
        import os, torch
        from tensordict import MemoryMappedTensor, TensorDict, tensorclass
        from engram import LazyMemmapStorage, PrioritizedSampler, TensorDictReplayBuffer
        rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(1000, scratch_dir=folder), sampler=PrioritizedSampler(1000, 1.0, 1.0), batch_size=8
        )
        rb.extend(TensorDict({"step": torch.arange(8), "twice": 2 * torch.arange(8)}, [8]))
        other = os.fork()
        if other:
            print("writing", other, flush=True)
        i = 0
        while True:
            rb.extend(TensorDict({"step": torch.arange(i, i + 8), "twice": 2 * torch.arange(i, i + 8)}, [8]))
            i += 8
        """,
        folder=str(tmp_path / "x"),
    ).until("\n")
    other = int(program.out.split()[-1])
    time.sleep(0.3)
    program.kill()
    os.kill(other, signal.SIGKILL)
    until(lambda: not native.start_time_of(other), 60)
    rb = ReplayBuffer.open(tmp_path / "x")
    store = rb.storage.store
    assert store.repair is not None
    assert store.core.in_flight == 0
    void = set(store.core.holes().tolist())
    assert len(rb) == store.extent().filled[0] - len(void) >= 8
    assert ((leaves(rb) > 0).nonzero().flatten()).tolist() == [
        r for r in range(store.extent().filled[0]) if r not in void
    ]
    assert whole(rb.sample())
    rb.close()


def test_the_creator_may_go_first(tmp_path):
    """A temporary folder stays for whoever has it open, and goes with the last one."""
    program = fresh.start(
        """
        import os, sys, time, torch
        from engram import LazyMemmapStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(10))
        rb.extend(torch.arange(4))
        folder = rb.storage.scratch_dir
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)  # until the creator is gone
            assert folder.exists()
            rb.extend(torch.arange(3))
            with open(report, "w") as file:
                print(len(rb), folder, file=file, flush=True)
            rb.close()
            with open(report, "a") as file:
                print(folder.exists(), file=file, flush=True)
            os._exit(0)
        os.close(reading)
        rb.close()
        """,
        report=str(tmp_path / "report"),
    )
    assert program.wait() == 0, program.err
    report = tmp_path / "report"
    until(lambda: report.exists() and len(report.read_text().splitlines()) == 2)
    first, second = (tmp_path / "report").read_text().splitlines()
    assert first.split()[0] == "7"
    assert second == "False"
    assert not Path(first.split()[1]).exists()


def test_what_all_owners_left_in_shared_memory_is_swept():
    program = fresh.start(
        """
        import os, torch
        from engram import LazyTensorStorage, ReplayBuffer
        rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
        rb.extend(torch.arange(4))
        print(rb.storage.store.directory, flush=True)
        import time
        time.sleep(60)
        """
    ).until("\n")
    folder = Path(program.out.strip().splitlines()[-1])
    assert folder.exists()
    other = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert folder.exists()  # its owner lives
    program.kill()
    ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    assert not folder.exists()
    other.close()


def test_a_sweep_waits_for_nobody():
    """Somebody who is stopped while he makes or closes a store, say."""
    folder = Path(tempfile.mkdtemp(dir=shared_memory(), prefix="engram-test-"))
    with exclusive(folder):
        limit = Limit(5)
        thread = threading.Thread(target=sweep_shared_memory)  # who holds a folder himself may go in
        thread.start()
        thread.join()
        limit.check("going on")
    folder.rmdir()


def test_a_stopped_writer_is_reported_not_robbed(tmp_path):
    """SIGSTOP: rows that it holds cost a typed error, others nothing; it goes on unharmed."""
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(80, lanes=2, scratch_dir=tmp_path / "x"), batch_size=8)
    rb.extend(steps(0, 40), lane=1)
    child = Child(write_for_ever, rb, 0)
    time.sleep(0.2)
    os.kill(child.process.pid, signal.SIGSTOP)
    for _ in range(20):
        assert whole(rb.sample())
        rb.extend(steps(7, 3), lane=1)
    os.kill(child.process.pid, signal.SIGCONT)
    count = rb.write_count
    wait_for(lambda: rb.write_count > count)
    child.kill()
    assert whole(rb.sample())
    rb.close()
