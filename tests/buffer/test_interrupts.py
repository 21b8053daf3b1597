"""Exceptions that come from outside, as Ctrl-C does, at every moment of whatever takes a lock, a pause or a descriptor:
afterwards nothing is held, other processes write at once, and so does this one.
"""

import contextlib
import gc
import itertools
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

import engram.store
from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram._support import native
from engram.format import files
from tests import stress
from tests.failing_calls import OPERATIONS, ROWS, Operation, descriptors, forked, in_this_process
from tests.twins import rows
from tests.waiting import Limit

pytestmark = [pytest.mark.stress, pytest.mark.timeout(stress.LIMIT_S)]


class Interrupted(KeyboardInterrupt):
    """Not one of engram's, and not one that anybody handles."""


@contextlib.contextmanager
def no_collection():
    """What a collection calls, of Hypothesis for one, is no moment of what is interrupted."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@no_collection()
def interrupted_at(n, act):
    """Call it; an exception is raised at the n-th moment at which Python handles signals: where a function begins, and where one of
    C has returned, whose result is lost then. Where that was; nothing, if there are not as many.
    """
    left = n

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return") and not uninterrupted(frame):
            left -= 1
            if left == 0:
                where.extend(traceback.format_stack(frame, 4))
                raise Interrupted  # which ends the profiling, too

    where = []
    sys.setprofile(profile)
    try:
        act()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return where


@no_collection()
def interrupted_before(n, act):
    """As :func:`interrupted_at`, before the n-th bytecode, so also where Python handles no signals. Between the body of a ``with``
    and the call that releases a lock, say: code as a whole cannot do without.
    """
    left = n

    def trace(frame, event, argument):
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and not uninterrupted(frame):
            left -= 1
            if left == 0:
                where.extend(traceback.format_stack(frame, 4))
                raise Interrupted
        return trace

    where = []
    sys.settrace(trace)
    try:
        act()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
    return where


def __del__(descriptor):  # noqa: N807
    """Under the name by which :func:`uninterrupted` knows destructors, in which Python swallows interrupts."""
    descriptor.close()


def uninterrupted(frame):
    """Whether this is outside of the operation, or in ``rmtree`` of the standard library, which loses a descriptor then."""
    return frame.f_code.co_filename in (__file__, shutil.__file__) or "__del__" in (
        frame.f_code.co_name,
        frame.f_back.f_code.co_name,
    )


class Work(Operation):
    """What an open store does, beside others."""

    def prepare(self):
        self.rb = self.make()
        self.rb.extend(rows(9))

    def make(self, name="store"):
        return TensorDictReplayBuffer(
            storage=LazyMemmapStorage(12, scratch_dir=self.folder / name),
            sampler=PrioritizedSampler(12, 0.5, 0.5),
            batch_size=4,
        )

    def again(self):
        self.act()
        self.rb.extend(rows(2))
        self.rb.close()


class Write(Work):
    def act(self):
        self.rb.extend(rows(3))
        self.rb.add(rows(1)[0])
        self.rb.update_priority(torch.arange(3), 2.0)
        self.rb.sample()
        self.rb.empty()


class AddField(Work):
    """There in all rows or in none, for this process, too, which goes on at once."""

    added = 0

    def act(self):
        self.rb.add_field(f"v{self.added}", torch.zeros(2), fill=self.added)
        self.added += 1

    def again(self):
        self.goes_on()
        self.act()
        assert {f"v{n}" for n in range(self.added)} <= set(self.goes_on().keys())
        self.rb.close()

    def goes_on(self):
        self.rb.extend(rows(3))
        stored, batch = self.rb[:], self.rb.sample()
        told = {"index", "index_generation", "priority_weight"}
        assert set(stored.keys()) - told == set(batch.keys()) - told
        for name in [name for name in stored.keys() if name.startswith("v")]:
            assert stored[name].eq(float(name[1:])).all()
            assert batch[name].eq(float(name[1:])).all()
        assert len(stored) == len(self.rb) > 3
        return stored


class AddFieldInMemory(AddField):
    def make(self, name="store"):
        beside = super().make(name)  # what others open
        beside.extend(rows(2))
        beside.close()
        sampler = PrioritizedSampler(12, 0.5, 0.5)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=4)


class WriteTheBest(Write):
    def make(self, name="store"):
        return TensorDictReplayBuffer(
            storage=LazyMemmapStorage(12, scratch_dir=self.folder / name), writer=TensorDictMaxValueWriter("score")
        )

    def act(self):
        self.rb.empty()
        self.rb.extend(rows(6, 20))


class Dump(Work):
    def act(self):
        self.rb.dumps(self.folder / "dump")


class DumpAgain(Dump):
    def prepare(self):
        super().prepare()
        self.rb.dumps(self.folder / "dump")


class Load(Work):
    def prepare(self):
        super().prepare()
        self.rb.dumps(self.folder / "dump")

    def act(self):
        self.rb.loads(self.folder / "dump")


class State(Work):
    def act(self):
        self.rb.load_state_dict(self.rb.state_dict())


class Save(Work):
    """A checkpoint, of which another one is the parent."""

    def prepare(self):
        super().prepare()
        self.saving = Checkpointer(self.folder / "series", self.rb)
        self.saving.save(1)
        self.step = 1

    def act(self):
        self.step += 1
        self.saving.save(self.step)


class Restore(Save):
    def act(self):
        Checkpointer(self.folder / "series", self.rb).restore()


WORK = {
    **OPERATIONS,
    "write": Write,
    "write the best": WriteTheBest,
    "add a field": AddField,
    "add a field in memory": AddFieldInMemory,
    "dump": Dump,
    "dump again": DumpAgain,
    "load": Load,
    "state": State,
    "save": Save,
    "restore": Restore,
}
del WORK["fork"]


@pytest.fixture
def ram(monkeypatch):
    """With shared memory of its own, and limits that nobody reaches who need not wait."""
    folder = Path(tempfile.mkdtemp(dir=stress.RAM, prefix="test-interrupts-"))
    home = folder / "shm"
    home.mkdir()
    monkeypatch.setattr(engram.store.lifetime, "shared_memory", lambda: home)
    monkeypatch.setattr("engram.storages._home.shared_memory", lambda: home)
    monkeypatch.setattr(engram.store.lifetime, "WAIT_S", 20.0)
    monkeypatch.setattr(files.Descriptor, "__del__", __del__)
    before = native.wait_limit()
    native._core.set_wait_limit(20.0)
    gc.collect()
    gc.freeze()  # each child looks for what it has open
    yield folder
    native._core.set_wait_limit(before)
    shutil.rmtree(folder)


def others_go_on(folder):
    """In another process, while the interrupted one is there."""
    if not (folder / "store" / ".engram").exists():
        return True
    rb = ReplayBuffer.open(folder / "store")
    rows_are_dicts = len(rb) > 0 and isinstance(rb[:1], dict)
    rb.extend(rows(2) if isinstance(rb, TensorDictReplayBuffer) else {"a": ROWS[:2]} if rows_are_dicts else ROWS[:2])
    with rb.storage.placing, rb.storage.paused:
        pass
    rb.dumps(folder / "of another process")
    rb.close()
    return True


def join_threads():
    for thread in threading.enumerate():
        if thread is threading.current_thread():
            continue
        if not thread.is_alive():  # an interrupt ended its start: it is about to begin, or never will
            time.sleep(0.1)
        if thread.is_alive():
            thread.join()


def left_open(before, allowed=lambda path: False):
    """Descriptors that were not open before, once those of threads are closed that nobody can see yet: they have just been started."""
    limit = Limit(60)
    while True:
        left = [path for path in descriptors() if path not in before and not allowed(path)]
        if not left or limit.left_s() < 0:
            return left
        join_threads()
        time.sleep(0.001)


def is_kept_alive(path, operation):
    """Whether this says that the process has a store open, and it has. Of one that is gone, until the buffer is collected."""
    return path.endswith("/alive (deleted)") or (path.endswith("/alive") and operation.has_store())


def interrupt(operation, n, asking, told):
    """In a process of its own. Whether there was an n-th moment."""
    operation.prepare()
    join_threads()
    gc.collect()
    gc.disable()
    before = descriptors()
    hit = interrupted_at(n, operation.act)
    join_threads()  # what goes on in the background has files open
    if hit:
        left = left_open(before, lambda path: is_kept_alive(path, operation))
        assert not left, f"descriptors were left open: {left}\n{''.join(hit)}"
    os.write(asking, b"x")
    os.read(told, 1)
    if hit and hasattr(operation, "again"):
        operation.again()
    return bool(hit)


@pytest.mark.parametrize("how", ["store.paused()", "store.placing()", "alone(folder)"])
def test_what_is_held_is_given_back(how, ram):
    """At every bytecode, of which the first is before it is taken and the last behind."""
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=ram / "store"))
    rb.extend(rows(2))
    store, alone = rb.storage.store, engram.store.lifetime.exclusive
    names = {"store": store, "alone": alone, "folder": store.directory}
    code = compile(f"with {how}: pass", "<a program>", "exec")

    def others():
        with alone(store.directory), store.placing(), store.paused():
            pass
        rb.extend(rows(1))

    failed = []
    threading.excepthook, before = failed.append, threading.excepthook
    for n in itertools.count(1):
        hit = interrupted_before(n, lambda: exec(code, names))
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(60)
        assert (thread.is_alive(), failed, store.core.paused) == (False, [], False), "".join(hit)
        if not hit:
            break
    threading.excepthook = before
    assert n > 10
    rb.close()


@pytest.mark.parametrize("name", WORK)
def test_nothing_is_held_afterwards(name, ram):
    for n in moments(name):
        work = ram / "work"
        work.mkdir()
        operation = WORK[name](work)
        if not go_on_after(operation, n, ram):
            break
        shutil.rmtree(work)
        for left in (ram / "shm").iterdir():
            shutil.rmtree(left)
    print(f"{name}: up to moment {n}", file=sys.stderr)


@pytest.mark.parametrize("name", [name for name in WORK if name not in OPERATIONS])
def test_nothing_is_held_after_each(name, ram):
    """One process is interrupted again and again, a moment later each time, beside another one."""
    work, seen, report = ram / "work", ram / "seen", ram / "report"
    step = stress.size(None, 7, 1)
    n = 1 if step is None else 1 + stress.chance("moments", name).randrange(step)
    status, failed = 0, []
    while status != ALL:
        work.mkdir()
        seen.write_text("")
        chosen = range(n, n + 16 * (step or 1), step or 1)
        status = forked(lambda chosen=chosen: interrupt_each(WORK[name](work), chosen, seen), report)
        if status in (0, ALL):
            status = forked(lambda: others_go_on(work), report) or status
        n += len(seen.read_text()) * chosen.step
        if status not in (0, ALL):
            failed.append(f"moment {n}: {status}\n{said(report)}")
            n += chosen.step
        shutil.rmtree(work)
        if step is None:
            break
    print(f"{name}: {n - 1} moments, one in {step}", file=sys.stderr)
    assert not failed, "\n".join([f"{len(failed)} failed, of which the first:", *failed[:5]])


#: Status of a process that found no more moments: of a function that returned False.
ALL = 3


def said(report):
    return report.read_text() if report.exists() else ""


def interrupt_each(operation, moments, seen):
    """In a process of its own, which in the end goes on. Whether there were as many moments."""
    beside = Beside(operation.folder)
    operation.prepare()
    operation.act()
    beside.writes()
    join_threads()
    gc.disable()
    before = descriptors()
    for n in moments:
        hit = interrupted_at(n, operation.act)
        join_threads()
        left = left_open(before)
        assert not left, f"{n}: descriptors were left open: {left}\n{''.join(hit)}"
        assert beside.writes(), f"{n}: another process cannot write\n{said(beside.report)}\n{''.join(hit)}"
        if not hit:
            break
        with seen.open("a") as file:
            file.write(".")
    operation.again()
    beside.end()
    return bool(hit)


class Beside:
    """Another process, which opens the store before it writes for the first time."""

    def __init__(self, folder):
        self.report = folder / "report of the other"
        self.ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.ours.close()
            in_this_process(lambda: self.serve(theirs, folder), self.report)
        theirs.close()

    def serve(self, asked, folder):
        rb = None
        while asked.recv(1):
            rb = rb or ReplayBuffer.open(folder / "store")
            rb.extend(rows(2))
            with rb.storage.placing, rb.storage.paused:
                pass
            asked.send(b"x")
        return True

    def writes(self):
        self.ours.send(b"x")
        return self.ours.recv(1) == b"x"

    def end(self):
        self.ours.close()
        assert os.waitpid(self.pid, 0)[1] == 0, said(self.report)


def moments(name):
    """Those to interrupt: one in each octave; for longer runs one in so many."""
    step, draws = stress.size(None, 7, 1), stress.chance("interrupts", name)
    if step is not None:
        return itertools.count(1 + draws.randrange(step), step)
    return (draws.randrange(1 << k, 2 << k) for k in itertools.count(2))


def go_on_after(operation, n, ram):
    report = ram / "report"
    (asked, asking), (told, telling) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(asked), os.close(telling)
        in_this_process(lambda: interrupt(operation, n, asking, told), report)
    os.close(asking), os.close(told)
    try:
        if os.read(asked, 1):
            status = forked(lambda: others_go_on(operation.folder), ram / "report of others")
            assert status == 0, f"moment {n}: others: {status}\n{(ram / 'report of others').read_text()}"
        os.close(telling)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 3), f"moment {n}: {status}\n{report.read_text() if report.exists() else ''}"
    finally:
        os.close(asked)
        with contextlib.suppress(OSError):
            os.close(telling)
    return status == 0
