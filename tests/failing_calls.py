"""Lets each system call of an operation fail in turn: the first, the second, …, until the operation makes fewer.

Run by test_failing_calls.py as a program of its own, under the library made from failing_calls.c. Every attempt is a forked
process, so that one that dies or hangs is seen and takes nothing along.

    python -m tests.failing_calls FOLDER '[["create", "fsync", "EIO"], …]'
"""

import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import engram.storages._home
import engram.store
from engram import EngramError, ForkedHandle, LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer

LIMIT_S = 100
ROWS = torch.arange(7)


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def descriptors():
    """Files that this process has open."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def buffer(folder, **options):
    return ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder / "store"), **options)


class Operation:
    """One after another: ``prepare``, ``act`` while a call fails, ``failed`` if that raised, ``act`` again, ``right``."""

    def __init__(self, folder):
        self.folder = folder

    def prepare(self): ...

    def failed(self): ...

    def has_store(self):
        """Whether it has a store, in spite of the failure."""
        return hasattr(self, "rb") and self.rb.storage.initialized

    def right(self):
        assert self.rb[:].tolist() == ROWS.tolist()
        self.rb.extend(ROWS[:2])
        assert len(self.rb) == 9
        self.rb.close()

    def afterwards(self):
        """In another process, when this one is gone."""
        rb = ReplayBuffer.open(self.folder / "store")
        assert rb.storage.store.repair is None
        assert rb[:].tolist() == [*ROWS.tolist(), 0, 1]
        rb.close()


class Create(Operation):
    def prepare(self):
        self.rb = buffer(self.folder, batch_size=5)

    def act(self):
        self.rb.extend(ROWS)

    def failed(self):
        made = listing(self.folder)
        assert made == [] or self.rb.storage.initialized, (
            made
        )  # noting the components comes last: then the store is there
        assert len(self.rb) == 0

    def afterwards(self):
        rb = ReplayBuffer.open(self.folder / "store")
        assert len(rb.sample()) == 5
        rb.close()
        super().afterwards()


class Open(Operation):
    """A store that was closed in order."""

    def prepare(self):
        rb = buffer(self.folder)
        rb.extend(ROWS)
        rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
        rb.close()
        self.before = listing(self.folder)

    def act(self):
        self.rb = ReplayBuffer.open(self.folder / "store")

    def failed(self):
        assert listing(self.folder) == self.before


class Recover(Open):
    """A store whose process was killed."""

    def prepare(self):
        pid = os.fork()
        if pid == 0:
            Open.prepare(self)
            ReplayBuffer.open(self.folder / "store")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        self.before = listing(self.folder)


class Share(Operation):
    def prepare(self):
        self.before = set(os.listdir(engram.store.lifetime.shared_memory()))
        self.rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 1.0, 1.0, 0.0))
        self.rb.extend(ROWS)
        self.rb.update_priority(ROWS, ROWS.double())

    def left(self):
        return {
            name
            for name in set(os.listdir(engram.store.lifetime.shared_memory())) - self.before
            if name.startswith("engram-")
        }

    def act(self):
        self.rb.share()

    def failed(self):
        assert not self.left()
        assert not self.rb.shared
        self.same()

    def same(self):
        assert self.rb[:].tolist() == ROWS.tolist()
        assert self.rb.sampler.priorities().leaves(7).tolist() == ROWS.tolist()

    def right(self):
        assert self.rb.shared
        self.same()
        home = self.rb.storage.store.directory
        self.rb.close()
        assert not home.exists()

    def afterwards(self): ...


class NewIndex(Operation):
    def prepare(self):
        self.rb = buffer(self.folder)
        self.rb.extend(ROWS)
        self.before = listing(self.folder)

    def act(self):
        self.rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
        self.rb.update_priority(ROWS, 2.0)

    def failed(self):
        made = set(listing(self.folder)) - set(self.before)
        assert not [name for name in made if "/." in name.replace("/.engram", "")], made  # nothing half made
        self.rb.extend(ROWS)
        self.rb.empty()
        self.rb.extend(ROWS)

    def right(self):
        assert self.rb.sampler.priorities().leaves(7).tolist() == [2.0] * 7
        super().right()


class NewField(Operation):
    """There in all rows, or not at all."""

    def prepare(self):
        self.rb = buffer(self.folder)
        self.rb.extend({"a": ROWS})
        self.before = listing(self.folder)

    def act(self):
        self.rb.add_field("v", 0, fill=5)

    def failed(self):
        if "v" not in self.rb[:]:
            assert listing(self.folder) == self.before
            self.rb.extend({"a": ROWS[:1]})
            self.rb.empty()
            self.rb.extend({"a": ROWS})

    def right(self):
        assert self.rb["v"].tolist() == [5] * 7
        self.rb.extend({"a": ROWS[:2]})
        self.rb.close()

    def afterwards(self):
        rb = ReplayBuffer.open(self.folder / "store")
        assert rb["a"].tolist() == [*ROWS.tolist(), 0, 1]
        assert rb["v"].tolist() == [5] * 9
        rb.close()


class Close(Operation):
    """Whatever fails: the rows stay, and the next one that comes can go on with them."""

    def prepare(self):
        self.rb = buffer(self.folder)
        self.rb.extend(ROWS)

    def act(self):
        self.rb.close()

    def right(self): ...

    def afterwards(self):
        rb = ReplayBuffer.open(self.folder / "store")
        assert rb[:].tolist() == ROWS.tolist()
        rb.close()


class CloseTemporary(Operation):
    """What is left in shared memory the next share() sweeps."""

    def prepare(self):
        self.rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
        self.rb.extend(ROWS)
        (self.folder / "home").write_text(str(self.rb.storage.store.directory))

    def act(self):
        self.rb.close()

    def right(self): ...

    def afterwards(self):
        ReplayBuffer(storage=LazyTensorStorage(10), shared=True).close()
        home = Path((self.folder / "home").read_text())
        # An empty one stays for a minute: somebody may be about to use it.
        assert not home.exists() or not listing(home), listing(home)


class Fork(Operation):
    """The child is a participant, or its handle says that it is none."""

    def prepare(self):
        self.rb = buffer(self.folder)
        self.rb.extend(ROWS)

    def act(self):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(ForkedHandle):
                self.rb.extend(ROWS[:1])
                self.rb.empty()
                self.rb.extend(ROWS)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"the forked child ended with {status}"


OPERATIONS = {
    "create": Create,
    "open": Open,
    "recover": Recover,
    "share": Share,
    "new index": NewIndex,
    "new field": NewField,
    "close": Close,
    "close temporary": CloseTemporary,
    "fork": Fork,
}


def attempt(operation, call, code, n):
    """In a process of its own. Returns whether the n-th call was made."""
    control = ctypes.CDLL(None)
    operation.prepare()
    before = descriptors()
    control.failing_calls_arm(call.encode(), n, code)
    try:
        operation.act()
        error = None
    except (OSError, EngramError) as raised:
        error = raised
    left = control.failing_calls_left()
    control.failing_calls_arm(b"", 0, 0)
    if left > 0:
        assert error is None, f"no call failed, and yet: {error!r}"
    elif call == "fsync":
        assert error is not None, "a failed fsync was not noticed"
    if error is not None:
        del error  # it has the frames, they have the descriptors
        operation.failed()
        left_open = [path for path in descriptors() if path not in before]
        left_open = [path for path in left_open if not path.endswith("/alive") or not operation.has_store()]
        if call == "mmap":  # torch leaves a file open that it could not map
            left_open = left_open[1:]
        assert not left_open, f"descriptors were left open: {left_open}"
        operation.act()
    operation.right()
    return left <= 0


def in_this_process(function, report):
    """Ends it: with status 0 for True, 3 for anything else that the function returned."""
    signal.alarm(LIMIT_S)
    code = 1
    try:
        code = 0 if function() else 3
    except BaseException:  # noqa: BLE001 - reported
        report.write_text(traceback.format_exc())
    finally:
        with contextlib.suppress(BaseException):
            gc.collect()
        os._exit(code)


def forked(function, report):
    """Exit status of a process that runs ``function``, as :func:`in_this_process`."""
    pid = os.fork()
    if pid == 0:
        in_this_process(function, report)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(case, folder):
    """How many calls failed, one at a time; ends the program where something is wrong."""
    name, call, error = case
    n = 0
    while True:
        n += 1
        work = folder / "work"
        work.mkdir()
        operation, report = OPERATIONS[name](work), folder / "report"
        status = forked(lambda o=operation, n=n: attempt(o, call, getattr(errno, error), n), report)
        if status in (0, 3):
            status = forked(lambda o=operation: o.afterwards() or True, report) or status
        if status not in (0, 3):
            said = report.read_text() if report.exists() else ""
            raise SystemExit(f"{name}: {call} number {n} gave {error}: ended with {status}\n{said}")
        shutil.rmtree(work)
        if status == 3:
            return n - 1


def swallowed(folder):
    """What is said where an error of fsync is swallowed."""
    real = os.fsync

    def swallow(fd):
        with contextlib.suppress(OSError):
            real(fd)

    os.fsync = swallow
    try:
        run(("create", "fsync", "EIO"), folder)
    except SystemExit as said:
        return str(said)
    finally:
        os.fsync = real
    return "nothing"


def main(folder, cases):
    torch.set_num_threads(1)
    logging.getLogger("engram").setLevel(logging.ERROR)
    home = Path(folder) / "ram"  # whatever others have in shared memory does not concern us
    home.mkdir()
    engram.store.lifetime.shared_memory = engram.storages._home.shared_memory = lambda: home
    for name, kind in OPERATIONS.items():  # what is imported late is imported now
        work = Path(folder) / "first"
        work.mkdir()
        operation = kind(work)
        operation.prepare()
        operation.act()
        operation.right()
        if name != "close temporary":
            operation.afterwards()
        shutil.rmtree(work)
    gc.freeze()
    began, failed = time.monotonic(), 0
    for case in json.loads(cases):
        failed += run(case, Path(folder))
    print(json.dumps({"failed calls": failed, "seconds": round(time.monotonic() - began, 1)}))
    print("swallowed:", swallowed(Path(folder)), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
