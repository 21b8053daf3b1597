"""Checkpoints of environments that begin again, and beside others."""

import os
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram import (
    ImmutableDatasetWriter,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.checkpoint.save import Job
from engram.saved import attempts, disk
from engram.saved.checkpoints import Checkpoint
from engram.saved.documents import rank_folder
from engram.saved.series import Series
from engram.saved.snapshot import RowsSnapshot
from tests import fresh, stress
from tests.buffer.dumped import Writers, check_marked, marked
from tests.buffer.states import L, twins
from tests.checkpoint.saving import CAPACITY, buffer, restored, steps
from tests.ranks.jobs import done, job
from tests.twins import bits, contents, rows

# ---- environments that begin anew ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", ["trajectories", "anchors"])
@pytest.mark.parametrize("n", [5, 29, 32, 45])
def test_windows_never_join_what_was_restored_and_what_is_new(ram, n, uniform):
    def make():
        sampler = SliceSampler(slice_len=3, uniform_over=uniform, strict_length=True)
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(64, lanes=2),
            sampler=sampler,
            batch_size=48,
            generator=torch.Generator().manual_seed(0),
        )

    def lived(first, count, lane):
        at = torch.arange(first, first + count)
        over = torch.zeros(count, 1, dtype=torch.bool)
        return TensorDict({"at": at, "lane": torch.full((count,), lane), "next": {"done": over}}, [count])

    def check(rb):
        for _ in range(6):
            batch = rb.sample()
            assert (batch["at"].reshape(-1, 3).diff(dim=1) == 1).all()
            assert (batch["lane"].reshape(-1, 3).diff(dim=1) == 0).all()

    rb = make()
    for lane in range(2):
        rb.extend(lived(0, n, lane), lane=lane)
    Checkpointer(ram, rb).save(1)
    for step in (1, 2, 3):  # again and again: what was a border stays one
        rb = make()
        checkpointer = Checkpointer(ram, rb)
        checkpointer.restore()
        for lane in range(2):
            rb.extend(lived(1000 * step, 9, lane), lane=lane)
        check(rb)
        assert len(rb) > 0
        checkpointer.save(step + 1)
    exact = make()
    Checkpointer(ram, exact).restore(resume="exact")
    check(exact)


@pytest.mark.stress(sample=12)
@pytest.mark.parametrize("n", [1, L - 1, L, L + 1, 3 * L + 7])
@pytest.mark.parametrize("storage", ["ram", "lanes", "memmap", "columns", "full", "device", "list"])
def test_what_is_there_after_environments_began_anew(ram, storage, n):
    """All but the rows that mark the break: of each lane, or column, the oldest one if the ring is full."""
    both = twins(storage, "epoch" if storage == "list" else "priority")
    both.extend(n)
    rb, other = both.pair
    Checkpointer(ram, rb).save(1)
    checkpointer = Checkpointer(ram, other)
    report = checkpointer.restore()
    was, now = (set(one["step"].flatten().tolist()) for one in (rb, other))
    full = max(rb.storage.extent().filled) == rb.storage.max_size // rb.lanes
    assert now <= was
    assert len(was - now) <= (2 if storage == "columns" else 1) * full
    assert (report.steps, report.given_up) == (len(now), len(was - now))
    for _ in range(3):
        batch = other.sample()
        assert set(batch["step"].flatten().tolist()) <= now
    other.extend(both._shaped(rows(4, 7000)), lane=0 if rb.lanes > 1 else None)
    checkpointer.save(2)
    again = both._make()
    Checkpointer(ram, again).restore(2, resume="exact")
    assert contents(again) == contents(other)
    again.close()
    both.close()


@pytest.mark.parametrize("resume", ["env_reset", "exact"])
def test_a_dataset_that_nobody_adds_to_keeps_its_rows(ram, resume):
    def make(first):
        return TensorDictReplayBuffer(
            storage=TensorStorage(rows(10, first)), writer=ImmutableDatasetWriter(), batch_size=4
        )

    Checkpointer(ram, make(1)).save(1)
    other = make(500)
    Checkpointer(ram, other).restore(resume=resume)
    assert other["step"].tolist() == list(range(1, 11))


def test_an_exact_restore_lets_trajectories_go_on(ram):
    """The negative control of the test above."""

    def make():
        return buffer(sampler=SliceSampler(slice_len=2, traj_key="lane"))

    rb = make()
    rb.extend(steps(0, 10))
    Checkpointer(ram, rb).save(1)
    for resume, joined in (("exact", True), ("env_reset", False)):
        other = restored(ram, make=make, resume=resume)
        other.extend(steps(10, 5))
        pairs = torch.cat([other.sample()["at"].reshape(-1, 2) for _ in range(60)])
        assert ([8, 9] in pairs.tolist(), [10, 11] in pairs.tolist()) == (True, True)
        assert ([9, 10] in pairs.tolist()) == joined


# ---- beside others ---------------------------------------------------------------------------------------------------------


class Slow:
    """Holds a save up where it copies rows, until it may go on."""

    def __init__(self, monkeypatch):
        self.there, self.go_on = threading.Event(), threading.Event()
        write = Job.write_parts

        def held(*arguments):
            self.there.set()
            assert self.go_on.wait(60)
            return write(*arguments)

        monkeypatch.setattr(Job, "write_parts", held)


@pytest.mark.parametrize("first", ["waiting", "handle"])
@pytest.mark.parametrize("second", ["waiting", "handle"])
def test_a_second_call_waits_for_the_first_and_saves_what_is_its_own(ram, monkeypatch, first, second):
    slow = Slow(monkeypatch)
    rb = buffer(300)
    checkpointer = Checkpointer(ram, rb)
    reports = []

    def call(step, how):
        made = checkpointer.save(step, user={"is": step}, wait=how == "waiting")
        reports.append(made if how == "waiting" else made.wait(60))

    one = threading.Thread(target=call, args=(1, first))
    one.start()
    slow.there.wait(60)
    two = threading.Thread(target=call, args=(2, second))
    two.start()
    time.sleep(0.05)
    rb.extend(steps(300, 1))  # while the second one waits
    slow.go_on.set()
    one.join()
    two.join()
    assert sorted((report.step, report.steps) for report in reports) == [(1, 300), (2, 301)]
    assert [checkpointer.restore(step).user for step in (1, 2)] == [{"is": 1}, {"is": 2}]


def test_a_program_that_ends_meanwhile_ends_after_its_save(ram):
    program = """
        import threading, time, torch
        from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        from engram.saved import attempts
        accept, asked = attempts.accept, threading.Event()
        attempts.accept = lambda *some, **more: (asked.wait(60), time.sleep(0.3), accept(*some, **more))[2]
        rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
        rb.extend(torch.arange(50))
        assert not Checkpointer(root, rb).save(7, wait=False).done
        asked.set()
        """
    fresh.run(program, root=str(ram))
    again = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    assert Checkpointer(ram, again).restore().step == 7
    assert again[:].tolist() == list(range(50))


def test_in_the_background(ram, monkeypatch):
    slow = Slow(monkeypatch)
    rb = buffer(300, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    was = contents(rb)
    checkpointer = Checkpointer(ram, rb)
    handle = checkpointer.save(1, wait=False)
    assert not handle.done
    with pytest.raises(TimeoutError, match=r"not over after 0\.01 s"):
        handle.wait(0.01)
    slow.there.wait(60)
    rb.extend(steps(300, 50))
    rb.update_priority(torch.arange(50), torch.rand(50))
    rb.sample()
    slow.go_on.set()
    report = handle.wait(60)
    assert handle.done
    assert (report.steps, report.lost_rows) == (300, 0)
    other = restored(ram, make=lambda: buffer(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)))
    assert contents(other) == was, "as it was when it was asked for"


def test_an_error_in_the_background(ram, monkeypatch):
    rb = buffer(300)
    checkpointer = Checkpointer(ram, rb)
    checkpointer.save(1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write", full)
        handle = checkpointer.save(2, wait=False)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                handle.wait(60)
    assert handle.done
    assert len(restored(ram)) == 300
    checkpointer.save(3)
    assert [entry.step for entry in checkpointer.list()] == [3, 1], "what failed is swept"


@pytest.mark.parametrize("overwritten", [0, 100, CAPACITY - 700, CAPACITY - 600, CAPACITY, 3 * CAPACITY])
def test_rows_that_were_overwritten_before_they_were_copied_are_counted(ram, monkeypatch, overwritten):
    slow = Slow(monkeypatch)
    rb = buffer(700)
    handle = Checkpointer(ram, rb).save(1, wait=False)
    slow.there.wait(60)
    if overwritten:
        rb.extend(steps(700, overwritten))
    slow.go_on.set()
    report = handle.wait(60)
    lost = min(700, max(0, overwritten - (CAPACITY - 700)))
    assert (report.steps, report.lost_rows) == (700 - lost, lost)
    other = restored(ram)
    assert other["at"].tolist() == list(range(lost, 700))
    assert (other["copy"] == other["at"][:, None]).all()
    with Checkpoint(report.path) as checkpoint:
        assert checkpoint.shard(0).cut.exact == (lost == 0)
    assert other.extend(steps(700, 1)).tolist() == [700], "the next row is that of the cut"


@pytest.mark.parametrize("how", ["loads", "empty", "share"])
def test_rows_replaced_before_they_were_copied(ram, monkeypatch, how):
    """All are lost, or none; what is there loads."""
    rb, small = buffer(700), buffer(3)
    small.dumps(ram / "dump")
    slow = Slow(monkeypatch)
    checkpointer = Checkpointer(ram / "s", rb)
    handle = checkpointer.save(1, wait=False)
    slow.there.wait(60)
    if how == "loads":
        rb.loads(ram / "dump")
    elif how == "empty":
        rb.empty()
        rb.extend(steps(9000, 30))
    else:
        rb.share()
    slow.go_on.set()
    report = handle.wait(60)
    assert (report.steps, report.lost_rows) == ((700, 0) if how == "share" else (0, 700))
    other = restored(ram / "s")
    assert other["at"].tolist() == list(range(report.steps))
    rb.extend(steps(40_000, 20))
    checkpointer.save(2)
    assert contents(restored(ram / "s", 2)) == contents(rb)
    rb.close()


def test_another_storage_before_the_rows_were_copied(ram, monkeypatch):
    slow = Slow(monkeypatch)
    rb = buffer(700)
    checkpointer = Checkpointer(ram, rb)
    handle = checkpointer.save(1, wait=False)
    slow.there.wait(60)
    rb.set_storage(LazyTensorStorage(CAPACITY))
    rb.extend(steps(9000, 700))
    slow.go_on.set()
    assert handle.wait(60).lost_rows == 0
    assert restored(ram)["at"].tolist() == list(range(700))
    assert checkpointer.save(2).bytes_linked == 0
    assert restored(ram)["at"].tolist() == list(range(9000, 9700))


def test_a_buffer_that_is_written_first_while_it_is_saved(ram):
    rb = buffer(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    prepare = rb.storage.prepare_snapshot

    def late(**_):
        prepared = prepare(**_)
        rb.extend(steps(0, 5))
        return prepared

    rb.storage.prepare_snapshot = late
    checkpointer = Checkpointer(ram, rb)
    assert checkpointer.save(1).steps == 5
    other = restored(ram, make=lambda: buffer(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5)))
    assert bits(other["at"]) == bits(rb["at"])
    assert contents(other) == contents(rb)


def check_cut(rb, report):
    """Of one instant: of each lane the newest rows before its cursor, but those that were overwritten before they were copied."""
    length = rb.storage.max_size // rb.lanes
    lanes = rb.storage.state_dict()["lanes"]
    data = rb[:]
    assert (data["copy"] == data["at"][:, None]).all(), "every row is whole"
    lost = 0
    for lane in range(rb.lanes):
        position, live = lanes[lane, :2].tolist()
        assert position % 3 == 0, "no write by half"
        assert live == min(position, length)
        found = data["at"][data["lane"] == lane].tolist()
        # The oldest are missing, or those that a block of rows was copied too late for.
        assert len({*found}) == len(found)
        assert {*found} <= {*range(position - live, position)}
        lost += live - len(found)
    assert (report.steps, report.lost_rows) == (len(data), lost)
    return lost


@pytest.mark.parametrize("who", ["threads", "processes"])
@pytest.mark.stress
def test_saved_at_one_instant_while_others_write(ram, who, monkeypatch):
    """At full speed, over a ring so short that the copying is overtaken now and then."""

    def make():
        return TensorDictReplayBuffer(storage=LazyTensorStorage(2 * 90, lanes=2), batch_size=4)

    rb = make()
    stop, threads, processes = threading.Event(), [], None
    if who == "processes":
        rb.share()
        processes = Writers(rb, 2)
    else:

        def write(lane):
            position = 0
            while not stop.is_set():
                rb.extend(marked(position, lane), lane=lane)
                position += 3

        threads = [threading.Thread(target=write, args=(lane,)) for lane in range(2)]
        for thread in threads:
            thread.start()
    checkpointer = Checkpointer(ram, rb)
    lost, paused = 0, []
    write_parts = Job.write_parts

    def overtaken(*arguments):
        """Once, whatever the machine does."""
        monkeypatch.setattr(Job, "write_parts", write_parts)
        begun = rb.write_count
        while rb.write_count < begun + 2 * 180:
            time.sleep(0.001)
        return write_parts(*arguments)

    monkeypatch.setattr(Job, "write_parts", overtaken)
    try:
        while len(rb) < 180:
            time.sleep(0.001)
        for step in range(stress.size(12, 2000)):
            report = checkpointer.save(step, wait=False).wait(60)
            other = make()
            Checkpointer(ram, other).restore(resume="exact")
            lost += check_cut(other, report)
            paused.append(report.paused_s)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        if processes is not None:
            processes.kill()
    assert lost > 0, "otherwise this is not the test it means to be"
    assert sorted(paused)[len(paused) // 2] < 5, "writers wait for a copy of words, not of rows"
    rb.dumps(ram / "dump")
    other = make()
    other.loads(ram / "dump")
    if who == "threads":
        check_marked(other)
    rb.close()


def test_dumps_and_a_series_do_not_disturb_each_other(ram, monkeypatch):
    slow = Slow(monkeypatch)
    rb = buffer(300)
    handle = Checkpointer(ram / "s", rb).save(1, wait=False)
    slow.there.wait(60)
    rb.dumps(ram / "d")
    slow.go_on.set()
    handle.wait(60)
    other = buffer()
    other.loads(ram / "d")
    assert contents(other) == contents(restored(ram / "s")) == contents(rb)


def test_a_checkpoint_is_found_by_its_folder(ram):
    rb = buffer(30)
    report = Checkpointer(ram, rb).save(1)
    assert report.path == ram / report.name
    assert (report.path / rank_folder(0, 1) / "shard.json").exists()
    other = buffer()
    other.loads(report.path)
    assert contents(other) == contents(rb)
    assert Series(ram).latest()[0] == report.path


def test_batches_ahead_that_cannot_be_saved_can_be_left_out(ram):
    def made():
        return ReplayBuffer(
            storage=LazyTensorStorage(12),
            batch_size=4,
            prefetch=2,
            sampler=SamplerWithoutReplacement(),
            collate_fn=lambda rows: {*rows.tolist()},
        )

    rb = made()
    rb.extend(torch.arange(12))
    first = rb.sample()
    with pytest.raises(TypeError, match="got a set"):
        Checkpointer(ram / "a", rb).save(1)
    assert not [name for name in os.listdir(ram / "a") if name.startswith("ckpt")]
    with pytest.raises(ValueError, match="expected 'save' or 'drop'"):
        Checkpointer(ram / "b", rb, prefetch="no")
    Checkpointer(ram / "b", rb, prefetch="drop").save(1)
    other = made()
    Checkpointer(ram / "b", other).restore(resume="exact")
    assert first | other.sample() | other.sample() == set(range(12))


def test_a_save_in_the_background_that_fails_is_told(ram, caplog, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(12))
    rb.extend(torch.arange(12))
    checkpointer = Checkpointer(ram / "a", rb)
    monkeypatch.setattr(
        RowsSnapshot, "save_segments", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    handle = checkpointer.save(7, wait=False)
    with pytest.raises(OSError, match="No space left"):
        handle.wait(60)
    assert "the save of step 7 failed: OSError" in caplog.text


def test_under_torch_distributed_without_ranks(ram, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    with pytest.warns(
        UserWarning, match=r"torch.distributed has 4 ranks, and ranks= was not given: .*from_torch"
    ) as said:
        Checkpointer(ram, buffer())
    assert said[0].filename == __file__


def test_the_latest(ram, monkeypatch):
    checkpointer = Checkpointer(ram, buffer(10))
    assert checkpointer.latest is None
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found none"):
        checkpointer.restore()
    attempts.begin(ram, step=1, epoch=attempts.claim_epoch(ram), world=1, trigger="save")
    assert Checkpointer(ram, buffer()).latest is None, "killed in its first save"
    checkpointer = Checkpointer(ram, buffer(10))
    assert checkpointer.save(2).name == checkpointer.latest


def test_a_save_of_an_earlier_step_says_what_a_restore_takes(ram, caplog):
    checkpointer = Checkpointer(ram, buffer(10))
    later = checkpointer.save(20).name
    checkpointer.save(5)
    assert f"is there, but restore() takes {later}, which is of a later step" in caplog.text


def test_a_save_of_an_earlier_step_stays_until_the_next_save(ram):
    checkpointer = Checkpointer(ram, buffer(10), keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step)
    report = checkpointer.save(5)
    assert report.path.is_dir()
    assert [it.step for it in checkpointer.list()] == [30, 20, 5]
    assert Checkpointer(ram, buffer()).restore(step=5).step == 5
    checkpointer.save(6)
    assert [it.step for it in checkpointer.list()] == [30, 20, 6]


@pytest.mark.filterwarnings("ignore:Checkpointer. no field says where")
def test_several_ranks_are_not_loaded_as_one(ram):
    done(job(2, lambda ranks, rank: Checkpointer(ram, buffer(10), ranks=ranks).save(1)))
    path = Series(ram).latest()[0]
    rb = buffer(3)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"got a checkpoint of 2 ranks\. Checkpointer\('.*', buffer\)\.restore\(name='ckpt"
    ):
        rb.loads(path)
    assert len(rb) == 3


def test_a_warning_of_restore_points_to_the_line_that_called_it(ram):
    """Also where reading tells that the newest is damaged, and where its file has another size."""
    rb = buffer(10)
    checkpointer = Checkpointer(ram, rb)
    path = [checkpointer.save(step).path for step in (1, 2, 3)]
    file = next((path[2] / "rank-00000-of-00001" / "storage" / "seg").iterdir())
    raw = bytearray(file.read_bytes())
    raw[3] ^= 1
    file.unlink()  # others are links to it
    file.write_bytes(raw)
    (path[1] / "rank-00000-of-00001" / "storage" / ".engram" / "lanes.bin").unlink()
    with pytest.warns(UserWarning, match=f"^restore: {path[0].name} is loaded, and not: ") as said:
        report = Checkpointer(ram, buffer()).restore()
    assert report.name == path[0].name
    assert [problem.path.name for problem in report.passed_over] == [path[2].name, path[1].name] or len(
        report.passed_over
    ) == 2
    assert {it.filename for it in said} == {__file__}
    with pytest.warns(UserWarning, match="is loaded, as: ") as said:
        Checkpointer(ram, buffer()).restore(name="ckpt-000000000009-e0001-00000000", at_most=1)
    assert {it.filename for it in said} == {__file__}
