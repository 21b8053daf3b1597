"""Processes killed, disks full, and loads cut short while a whole buffer is saved or loaded. C23–C30."""

import contextlib
import errno
import os
import signal
import time

import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import disk
from engram.saved.inspection import verify
from tests import stress
from tests.saved.system_calls import ERRORS, counted, failing_at, killed_at, settled

L = 40


def steps(n, first=0):
    at = torch.arange(first, first + n)
    return TensorDict({"at": at, "copy": at[:, None].float().expand(n, 300).clone()}, [n])


def make(storage=None):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(L) if storage is None else storage,
        sampler=PrioritizedSampler(L, 0.7, 0.5),
        batch_size=4,
        generator=torch.Generator().manual_seed(0),
    )


def newest(rb):
    """The last step of a buffer whose rows are whole and those before it."""
    at = sorted(rb["at"].tolist())
    assert at == list(range(at[-1] + 1 - min(at[-1] + 1, L), at[-1] + 1))
    assert (rb["copy"] == rb["at"][:, None]).all()
    assert int((rb.sampler.state_dict()["leaves"] > 0).sum()) == len(at)
    return at[-1]


class Dumps:
    """One dump over another."""

    def __init__(self, folder):
        self.folder = folder
        self.rb = make()
        self.rb.extend(steps(30))
        self.save()
        self.before, self.after = 29, 49
        self.rb.extend(steps(20, 30))

    def save(self):
        self.rb.dumps(self.folder / "d")

    def load(self):
        rb = make()
        rb.loads(self.folder / "d")
        return rb


class Saves(Dumps):
    """One more checkpoint, which links the one before; the oldest goes."""

    def save(self):
        self.checkpointer = getattr(self, "checkpointer", None) or Checkpointer(self.folder, self.rb, keep=1)
        self.checkpointer.save(len(os.listdir(self.folder)))

    def load(self):
        rb = make()
        Checkpointer(self.folder, rb).restore(resume="exact")
        return rb


class Handles(Saves):
    """The same in the background."""

    def save(self):
        self.checkpointer = getattr(self, "checkpointer", None) or Checkpointer(self.folder, self.rb, keep=1)
        self.checkpointer.save(len(os.listdir(self.folder)), wait=False).wait(60)


def check_tidy(work, folder):
    """After one more save nothing is left but what should be there."""
    work.rb.extend(steps(1, work.after + 1))
    if isinstance(work, Saves):
        again = Checkpointer(folder, work.rb, keep=1)
        again.save(10**6)
        left = [name for name in settled(folder) if not name.startswith("EPOCH-")]
        assert sorted(left) == ["LATEST", again.list()[0].name]
        assert verify(folder).good
    else:
        work.save()
        assert settled(folder) == ["d"]
        assert verify(folder / "d").good
    assert newest(work.load()) == work.after + 1


@pytest.mark.stress
@pytest.mark.parametrize("kind", [Dumps, Saves])
@pytest.mark.filterwarnings("ignore:restore. ")
def test_killed_at_system_calls(kind, ram):
    (ram / "count").mkdir()
    calls = counted(kind(ram / "count").save).calls
    assert calls > 60
    numbers = sorted({*range(1, calls + 1, stress.size(9, 1)), *range(calls - 12, calls + 2)})
    seen = set()
    for number in numbers:
        folder = ram / str(number)
        folder.mkdir()
        work = kind(folder)
        assert killed_at(number, work.save) == (number <= calls)
        found = newest(work.load())
        assert found in (work.before, work.after)
        assert found == work.after or number <= calls
        seen.add(found)
        if number % 2:
            check_tidy(work, folder)
    assert seen == {29, 49}


@pytest.mark.stress
@pytest.mark.parametrize("code", ERRORS[:2], ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", [Dumps, Saves])
@pytest.mark.filterwarnings("ignore:restore. ")
def test_a_call_that_fails(kind, code, ram):
    """The process goes on, writers too, and the next save succeeds."""
    (ram / "count").mkdir()
    calls = counted(kind(ram / "count").save).calls
    failed = 0
    for number in sorted({*range(1 + code % 3, calls + 1, stress.size(9, 1)), *range(calls - 8, calls + 1)}):
        folder = ram / str(number)
        folder.mkdir()
        work = kind(folder)
        settled(folder)
        descriptors = len(os.listdir("/proc/self/fd"))
        error = failing_at(number, code, work.save)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        failed += error is not None
        assert error is None or error.errno == code
        assert newest(work.load()) in (work.before, work.after)
        assert error is not None or newest(work.load()) == work.after
        check_tidy(work, folder)
    assert failed > calls // 20


def test_a_failure_leaves_no_attempt_undecided(ram):
    """What was reported as failed is not committed by the next start."""
    work = Saves(ram)
    publish, asked = disk.publish, []

    def only_votes(path, raw):
        asked.append(os.path.basename(path))
        if asked[-1] == "manifest.json" and asked.count("manifest.json") == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(path, raw)

    disk.publish = only_votes
    try:
        with pytest.raises(OSError, match="No space left"):
            work.save()
    finally:
        disk.publish = publish
    again = make()
    checkpointer = Checkpointer(ram, again, keep=1)
    with pytest.warns(UserWarning, match="aborted"):
        checkpointer.restore(resume="exact")
    assert newest(again) == work.before
    again.extend(steps(1, work.before + 1))
    checkpointer.save(10**6)
    assert len(checkpointer.list()) == 1


@pytest.mark.stress
@pytest.mark.parametrize("kind", [Dumps, Saves, Handles])
@pytest.mark.filterwarnings("ignore:restore. ")
@pytest.mark.filterwarnings("ignore:this process was forked")
def test_killed_at_any_time(kind, ram):
    chance, found = stress.chance("ckt", kind.__name__), []
    work = kind(ram)
    started = time.monotonic()
    work.save()
    took = time.monotonic() - started
    work.after = 49
    saved, says = os.pipe()
    rounds = stress.size(20, 400)
    for round_ in range(rounds):
        pid = os.fork()
        if pid == 0:
            try:
                work.checkpointer = None
                first = work.after + 1
                while True:
                    work.rb.extend(steps(1, first))
                    first += 1
                    work.save()
                    os.write(says, b"x")
            finally:
                os._exit(1)
        if round_ == rounds - 1:
            os.read(saved, 1 << 16)
            os.read(saved, 1)  # of this one, if the first was of those before
        time.sleep(chance.uniform(0.0, 4 * took))
        if found and max(found) == work.after:
            took = min(1.5 * took, 1.0)  # on a machine that has become slower
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, round_
        work.checkpointer = None
        last = newest(work.load())
        assert last >= work.after
        found.append(last)
    os.close(saved)
    os.close(says)
    assert max(found) > work.after, "the last one, at least, came to an end"
    check_tidy(work, ram)


@pytest.mark.stress
@pytest.mark.parametrize("kind", [Dumps, Saves])
@pytest.mark.parametrize("used", [False, True])
def test_a_load_that_is_killed_leaves_a_directory_empty_or_whole(kind, used, ram):
    """As it was, too, while nothing was changed yet."""
    (ram / "saved").mkdir()
    kind(ram / "saved")
    states = set()

    def loaded(rb):
        if kind is Dumps:
            rb.loads(ram / "saved" / "d")
        else:
            Checkpointer(ram / "saved", rb).restore(resume="exact")

    def act(folder, number):
        rb = make(LazyMemmapStorage(L, scratch_dir=folder))
        if used:
            rb.extend(steps(5))
        counts = [0]
        read = disk.read

        def counting(*arguments):
            counts[0] += 1
            if counts[0] == number:
                os._exit(9)
            return read(*arguments)

        disk.read = counting
        try:
            loaded(rb)
        finally:
            disk.read = read
        rb.close()
        return counts[0]

    reads = act(ram / "whole", None)
    assert reads > 8
    for number in sorted({*range(1, reads - 1, stress.size(3, 1)), reads - 1, reads, reads + 1}):
        folder = ram / f"store{number}"
        pid = os.fork()
        if pid == 0:
            try:
                act(folder, number)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (9 if number <= reads else 0)
        if not (folder / ".engram").exists():
            states.add("nothing")
            continue
        rb = ReplayBuffer.open(folder, sampler=PrioritizedSampler(L, 0.7, 0.5))
        states.add(len(rb))
        if len(rb) == 30:
            assert newest(rb) == 29
        assert len(rb) in ((0, 5, 30) if used else (0, 30))
        loaded(make())
        rb.close()
    assert states == ({0, 5, 30} if used else {"nothing", 0, 30})


def test_an_exception_amid_an_add_before_a_save(ram, monkeypatch):
    """What was acknowledged is there, what was not is there as a whole or not at all."""
    rb = make()
    rb.extend(steps(10))
    with pytest.raises((RuntimeError, ValueError, KeyError, TypeError)):
        rb.extend(TensorDict({"at": torch.zeros(3), "copy": torch.zeros(3, 2)}, [3]))
    notify = rb.storage.notify

    def interrupted(*_):
        raise KeyboardInterrupt

    rb.storage.notify = interrupted
    listener = TensorDictReplayBuffer(storage=rb.storage, batch_size=1)
    assert listener
    with contextlib.suppress(KeyboardInterrupt):
        rb.extend(steps(5, 10))
    rb.storage.notify = notify
    Checkpointer(ram / "s", rb).save(1)
    rb.dumps(ram / "d")
    for load in (lambda one: one.loads(ram / "d"), lambda one: Checkpointer(ram / "s", one).restore(resume="exact")):
        other = make()
        load(other)
        assert newest(other) in (9, 14)
        assert len(other) == len(rb)
