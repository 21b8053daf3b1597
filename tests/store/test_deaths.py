"""Deaths and stops at every step of what takes several: whoever comes next goes on at once, and nothing is left behind."""

import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch

import engram.store.store
from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, StoreInUse, WriterStalled
from engram._support import native
from tests import stress
from tests.failing_calls import OPERATIONS, ROWS, buffer, forked, listing
from tests.processes import running
from tests.waiting import Limit, until

pytestmark = [pytest.mark.stress, pytest.mark.timeout(stress.LIMIT_S)]

SOURCE = str(Path(engram.store.__file__).parent.parent)
WRITING = 1  # a row's ticket, while a write copies into it


def at_step(n, what):
    """From now on ``what()`` is called when engram's Python code makes its n-th call or return."""
    left = n

    def profile(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename.startswith(SOURCE):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                what()

    sys.setprofile(profile)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def ram():
    folder = Path(tempfile.mkdtemp(dir=stress.RAM, prefix="test-deaths-"))
    yield folder
    shutil.rmtree(folder)


def somebody_goes_on(name, operation, home):
    """After a death in an operation: in another process, and without waiting."""
    limit = Limit(20)
    if name in ("share", "close temporary"):
        ReplayBuffer(storage=LazyTensorStorage(10)).share().close()
        left = [path for path in home.glob("engram-*") if listing(path)]
        assert not left, [listing(path) for path in left]
        return True
    folder = operation.folder / "store"
    if (folder / ".engram").exists():
        rb = ReplayBuffer.open(folder)
    else:
        assert name == "create"
        rb = buffer(operation.folder)
    assert len(rb) in (0, 7)
    rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    if not len(rb):
        rb.extend(ROWS)
    assert rb[:].tolist() == ROWS.tolist()
    leaves = stress.check_priorities(rb.sampler.priorities(), range(7))
    assert bool((leaves[:7] > 0).all()), leaves
    rb.extend(ROWS[:2])
    assert not [path for path in listing(folder) if ".engram-" in path or "/.priorities" in path], listing(folder)
    rb.close()
    limit.check("going on")
    return True


@pytest.mark.parametrize("name", ["create", "open", "recover", "share", "new index", "close", "close temporary"])
def test_killed_at_every_step(ram, name, monkeypatch):
    """Of the Python code; the C++ tests do that with every instruction below."""
    home = ram / "shm"
    home.mkdir()
    monkeypatch.setattr(engram.store.lifetime, "shared_memory", lambda: home)
    monkeypatch.setattr("engram.storages._home.shared_memory", lambda: home)
    report = ram / "report"
    step = stress.size(307, 1)
    for n in itertools.count(1 + stress.chance(name).randrange(step), step):
        work = ram / "work"
        work.mkdir()
        operation = OPERATIONS[name](work)

        def dies(operation=operation, n=n):
            operation.prepare()
            at_step(n, die)
            operation.act()
            sys.setprofile(None)

        status = forked(dies, report)
        if status == -signal.SIGKILL:
            status = forked(lambda o=operation: somebody_goes_on(name, o, home), report)
            assert status == 0, f"step {n}: {status}\n{report.read_text() if report.exists() else ''}"
        else:
            assert status == 3, report.read_text()
            break
        shutil.rmtree(work)
        for left in home.iterdir():  # empty ones stay for a while: somebody may be about to use them
            left.rmdir()
    print(f"{name}: {n} steps, every {step}th", file=sys.stderr)


def test_stopped_while_it_makes_a_store(ram, monkeypatch):
    """Others are told in bounded time; when it goes on, all is well."""
    monkeypatch.setattr(engram.store.lifetime, "WAIT_S", 0.3)
    for n in stress.size((300, 600), range(200, 800, 5)):
        folder = ram / f"{n}"
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            ended = 1
            try:
                engram.store.lifetime.WAIT_S = 60.0  # its own waits go on while it is stopped
                rb = buffer(folder)
                at_step(n, lambda: os.kill(os.getpid(), signal.SIGSTOP))
                rb.extend(ROWS)
                rb.close()
                ended = 0
            except BaseException:  # noqa: BLE001 - reported
                traceback.print_exc()
            finally:
                os._exit(ended)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        made = (folder / "store" / ".engram").exists()
        other = buffer(folder) if not made else None
        limit, first = Limit(20), False
        try:
            if other is None:
                ReplayBuffer.open(folder / "store").close()
            else:
                other.extend(ROWS)
        except StoreInUse:
            pass
        else:  # stopped before it was alone, or after
            first = not made
            assert made or not other.storage.store.closed
        limit.check("going on")
        if other is not None:
            other.close()
        os.kill(pid, signal.SIGCONT)
        assert (os.waitpid(pid, 0)[1] == 0) != first  # there is a store: it is refused
        rb = ReplayBuffer.open(folder / "store")
        assert rb[:].tolist()[:7] == ROWS.tolist()
        rb.close()


def test_somebody_makes_a_store_in_a_folder_that_another_has_just_made(ram, monkeypatch):
    """The other is refused, and takes nothing of the store along with its folder."""
    exclusive, folder = engram.store.lifetime.exclusive, ram / "folder"

    def after_another(directory, made):
        made.folder(directory)
        monkeypatch.undo()
        status = forked(lambda: len(buffer(folder).extend(ROWS)), ram / "report")
        assert status == 0, (ram / "report").read_text()
        return exclusive(directory, made)

    monkeypatch.setattr(engram.store.lifetime, "exclusive", after_another)
    with pytest.raises(RuntimeError, match="already holds a store"):
        buffer(folder).extend(ROWS)
    rb = ReplayBuffer.open(folder / "store", unclean="accept")
    assert rb[:].tolist() == ROWS.tolist()
    rb.close()


def caught_writing(rb, pid):
    """Stop a process while it has a row in hand: a claim alone, before its first row and after its last, is not enough."""
    for _ in range(1000):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.003)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        if (rb.storage.store._ticket_words() & 3 == WRITING).any():
            return
    raise AssertionError("never in the middle of a write")


def test_the_holder_of_a_row_is_stopped_and_killed():
    """Stopped: a typed error for those who need its row, and nothing for others. Killed: they go on."""
    for _ in range(stress.size(1, 50)):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, lanes=2), shared=True, sampler=PrioritizedSampler(4, 1.0, 1.0))
        row = torch.arange(1_000_000)
        rb.extend(row.expand(4, -1), lane=torch.tensor([0, 0, 1, 1]))
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                while True:
                    rb.extend(row.expand(2, -1), lane=0)
            finally:
                os._exit(1)
        caught_writing(rb, pid)
        before = native.wait_limit()
        native._core.set_wait_limit(stress.size(1.0, before))  # it looks all the time
        limit = Limit(50)
        try:
            with pytest.raises(WriterStalled):
                rb.extend(row.expand(4, -1), lane=torch.zeros(4, dtype=torch.int64))  # over both rows
        finally:
            native._core.set_wait_limit(before)
        limit.check("going on")
        rb.extend(row.expand(2, -1), lane=1)
        batch, info = rb.sample(2, return_info=True)
        assert torch.equal(batch, row.expand(2, -1))
        rb.update_priority(info["index"], 2.0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        limit = Limit(20)
        rb.extend(row.expand(2, -1), lane=0)
        limit.check("going on")
        assert len(rb) == 4
        stress.check_priorities(rb.sampler.priorities(), range(4))
        rb.close()


def test_killed_among_large_updates():
    """Whoever dies with the tree in hand: the next one puts it in order and goes on."""
    n = 1 << 17
    rb = ReplayBuffer(storage=LazyTensorStorage(n), shared=True, sampler=PrioritizedSampler(n, 0.6, 0.4))
    rb.extend(torch.arange(n))
    chance = stress.chance("updates")
    slowest = 0.0
    for _ in range(stress.size(6, 2_000)):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                while True:
                    rb.update_priority(torch.arange(n), torch.rand(n, dtype=torch.float64))
            finally:
                os._exit(1)
        time.sleep(0.01 + 0.05 * chance.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        began = time.monotonic()
        _, info = rb.sample(32, return_info=True)
        rb.update_priority(info["index"], 0.5)
        slowest = max(slowest, time.monotonic() - began)
        assert slowest < 20
        stress.check_priorities(rb.sampler.priorities(), range(n))
    print(f"the slowest went on after {1000 * slowest:.1f} ms", file=sys.stderr)
    rb.close()


def test_the_first_opener_dies_as_soon_as_others_can_see_him(ram, monkeypatch):
    """Whoever takes him for alive joins without looking; if all die then, the next one must know."""
    rb = buffer(ram)
    rb.extend(ROWS)
    rb.close()
    pid = os.fork()
    if pid == 0:
        join = engram.store.store.Store.join
        monkeypatch.setattr(engram.store.store.Store, "join", lambda *a, **k: (join(*a, **k), die()))
        ReplayBuffer.open(ram / "store")
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    rb = ReplayBuffer.open(ram / "store")
    assert rb.storage.store.repair is not None
    rb.close()


WAYS = ("close", "exit", "kill")


def test_exit_orders(ram, monkeypatch):
    """Three processes have a temporary store; they leave in every order and way. The last one, or the next sweep, removes it."""
    home = ram / "shm"
    home.mkdir()
    monkeypatch.setattr(engram.store.lifetime, "shared_memory", lambda: home)
    monkeypatch.setattr("engram.storages._home.shared_memory", lambda: home)
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    cases = list(
        itertools.product(("ram", "disk"), itertools.permutations(range(3)), itertools.product(WAYS, repeat=3))
    )
    stress.chance("exits").shuffle(cases)
    for kind, order, ways in cases[: stress.size(8, len(cases))]:
        turns = [os.pipe() for _ in range(3)]
        told, tell = os.pipe()

        def leave(k, rb, ways=ways, turns=turns):
            os.read(turns[k][0], 1)
            if rb[:].tolist() != ROWS.tolist():
                os._exit(1)  # and leaves the store behind, which is noticed
            if ways[k] == "kill":
                die()
            if ways[k] == "close":
                rb.close()
            else:
                rb.storage.store.attachment._finalizer()  # what an exit runs
            os._exit(0)

        creator = os.fork()
        if creator == 0:
            storage = LazyTensorStorage(10) if kind == "ram" else LazyMemmapStorage(10)
            rb = ReplayBuffer(storage=storage).share()
            rb.extend(ROWS)
            for k in (1, 2):
                child = os.fork()
                if child == 0:
                    leave(k, rb)
                os.write(tell, f"{child} ".encode())
            os.write(tell, b".")
            leave(0, rb)
        said = b""
        while not said.endswith(b"."):
            said += os.read(told, 100)
        pids = [creator, *map(int, said[:-1].split())]
        for k in order:
            assert len([path for path in home.iterdir() if path.name.startswith("engram")]) == 1
            os.write(turns[k][1], b"x")
            if k == 0:
                os.waitpid(creator, 0)
            else:
                until(lambda pid=pids[k]: not running(pid))
        for fd in (told, tell, *itertools.chain(*turns)):
            os.close(fd)
        ReplayBuffer(storage=LazyTensorStorage(10)).share().close()
        left = [listing(path) for path in home.iterdir()]
        if ways[order[-1]] != "kill" or kind == "ram":
            assert not [one for one in left if one], (kind, order, ways, left)
        for path in home.iterdir():
            shutil.rmtree(path)
