"""Processes killed, disks full and power lost at every system call of a save: the old or the new one loads. C23–C26, C28, T8, T11."""

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from engram.saved import attempts, disk
from engram.saved.checkpoints import Checkpoint, standing
from engram.saved.inspection import verify
from engram.saved.part_writer import PartWriter
from engram.saved.series import Series
from tests import stress
from tests.saved import checkpoint_folders as made
from tests.saved.system_calls import ERRORS, Disk, Shim, counted, failing_at, killed_at, settled


class Dump:
    """``dumps`` to a path where a dump lies."""

    def prepare(self, folder):
        made.write_dump(folder / "d", seed=1)

    def act(self, folder):
        made.write_dump(folder / "d", seed=2)

    def check(self, folder, *, done=False):
        assert verify(folder / "d").problems == []
        with Checkpoint(folder / "d") as checkpoint:
            assert checkpoint.manifest.user["seed"] in ((2,) if done else (1, 2))

    def afterwards(self, folder):
        made.write_dump(folder / "d", seed=3)
        assert settled(folder) == ["d"]


class FirstDump(Dump):
    """``dumps`` to a path that is free: nothing or a whole one."""

    def prepare(self, folder):
        pass

    def check(self, folder, *, done=False):
        if done or (folder / "d").exists():
            super().check(folder, done=done)


class Save:
    """A save of a series, which links segments, and the removal of the checkpoint before."""

    world = 1

    def prepare(self, folder):
        made.save(folder, 10, attempts.claim_epoch(folder), self.world)

    def act(self, folder):
        parent = Series(folder).latest()[0]
        made.save(folder, 20, 1, self.world, parent)
        Series(folder).prune(1, 1)

    def check(self, folder, *, done=False):
        epoch = attempts.claim_epoch(folder)
        Series(folder).recover(epoch)
        found, _ = Series(folder).latest()
        assert found is not None
        assert attempts.Name.parse(found.name).step in ((20,) if done else (10, 20))
        assert verify(folder).problems == []  # of all that say they are complete

    def afterwards(self, folder):
        epoch = attempts.newest_epoch(folder)
        made.save(folder, 30, epoch, self.world, Series(folder).latest()[0])
        Series(folder).prune(1, epoch)
        left = sorted(name for name in os.listdir(folder) if not name.startswith("EPOCH-"))
        assert left[0] == "LATEST"
        assert [attempts.Name.parse(name).step for name in left[1:]] == [30]
        assert verify(folder) == verify(folder)._replace(problems=[], notes=[])


OPERATIONS = [Dump, FirstDump, Save]


@pytest.fixture
def tmp_path(tmp_path):
    """In RAM, where there is some: thousands of fsyncs are waited for here."""
    ram = Path("/dev/shm")
    if not ram.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=ram) as folder:
        yield Path(folder)


@pytest.fixture
def ready(tmp_path, request):
    operation = request.param()
    (tmp_path / "before").mkdir()
    operation.prepare(tmp_path / "before")
    return operation


def fresh(tmp_path):
    """The folder as it was before the operation, links and all."""
    shutil.rmtree(tmp_path / "now", ignore_errors=True)
    shutil.copytree(tmp_path / "before", tmp_path / "now")
    return tmp_path / "now"


@pytest.mark.stress
@pytest.mark.parametrize("ready", OPERATIONS, indirect=True)
def test_killed_before_every_call(ready, tmp_path):
    folder = fresh(tmp_path)
    calls = counted(lambda: ready.act(folder)).calls
    assert calls > 100
    for number in sorted({*range(1, calls + 1, stress.size(3, 1)), calls, calls + 1}):
        folder = fresh(tmp_path)
        assert killed_at(number, lambda: ready.act(folder)) == (number <= calls)
        ready.check(folder, done=number > calls)
        if number % 3 == 0:
            ready.afterwards(folder)


@pytest.mark.stress
@pytest.mark.parametrize("code", ERRORS[:2], ids=errno.errorcode.get)
@pytest.mark.parametrize("ready", [Dump, FirstDump], indirect=True)
def test_every_call_of_a_dump_fails(ready, tmp_path, code):
    folder = fresh(tmp_path)
    names = os.listdir(folder)
    shim = counted(lambda: ready.act(folder))
    tidy = 0
    for number in range(1, shim.calls + 1, stress.size(2, 1)):
        folder = fresh(tmp_path)
        open_files = len(os.listdir("/proc/self/fd"))
        error = failing_at(number, code, lambda: ready.act(folder))
        assert len(os.listdir("/proc/self/fd")) == open_files
        ready.check(folder, done=error is None)
        if error is not None:
            assert error.errno == code
            left = set(os.listdir(folder)) - {*names, "d"}
            assert all(name.startswith(".d.") for name in left)  # its removal is what failed
            tidy += not left
        if number % 4 == 0:
            ready.afterwards(folder)
    assert tidy > shim.calls // stress.size(4, 2)


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_every_call_of_a_rank_fails(tmp_path, code):
    """One rank cannot write: it says no, the attempt is aborted, the checkpoint before stays the latest."""
    (tmp_path / "before").mkdir()
    made.save(tmp_path / "before", 10, attempts.claim_epoch(tmp_path / "before"), 2)

    def rank(folder):
        made.vote(folder, 0, 2, seed=20)

    folder = fresh(tmp_path)
    attempt = attempts.begin(folder, step=20, epoch=1, world=2, trigger="t")
    calls = counted(lambda: rank(attempt)).calls
    for number in range(1, calls + 1, 3 if code == errno.EIO else 5):
        folder = fresh(tmp_path)
        attempt = attempts.begin(folder, step=20, epoch=1, world=2, trigger="t")
        made.vote(attempt, 1, 2, seed=20)
        error = failing_at(number, code, lambda: rank(attempt))
        if error is None:  # of a call after the vote was there
            assert attempts.decide(attempt, 1).status == "complete"
            continue
        assert error.errno == code
        attempts.refuse(attempt, 0, f"{type(error).__name__}: {error}")
        decided = attempts.decide(attempt, 1)
        assert decided.status == "aborted"
        assert os.strerror(code) in decided.reasons[0]
        assert Series(folder).latest()[0].name.startswith("ckpt-000000000010-")
        made.save(folder, 30, 1, 2)
        Series(folder).prune(1, 1)
        assert len(attempts.names(folder)) == 1


def states(operation, tmp_path):
    """Folders as they may be after a crash at every call, and whether the operation was over."""
    folder = fresh(tmp_path)
    log = counted(lambda: operation.act(folder)).log
    model = Disk(folder, tmp_path / "before")
    draws = 0
    for number in range(len(log) + 1):
        for how in stress.size(("lost", "zeroed" if number % 2 else "random"), ("lost", "zeroed", *["random"] * 30)):
            target = tmp_path / "crashed"
            shutil.rmtree(target, ignore_errors=True)
            model.crash(target, how, draws)
            draws += 1
            yield target, number == len(log)
        if number < len(log):
            model.apply(*log[number])


@pytest.mark.stress
@pytest.mark.parametrize("ready", OPERATIONS, indirect=True)
def test_power_is_lost_at_every_call(ready, tmp_path):
    """Whatever was not synced may be gone, or there without its bytes."""
    for i, (folder, done) in enumerate(states(ready, tmp_path)):
        ready.check(folder, done=done)
        if i % 20 == 0:
            ready.afterwards(folder)


@pytest.mark.parametrize("ready", OPERATIONS, indirect=True)
@pytest.mark.parametrize("missing", ["sync_folder", "finish"])
def test_without_syncs_power_loss_is_seen(ready, tmp_path, monkeypatch, missing):
    """Negative control: the model finds what happens without fsync of folders, or of files."""
    monkeypatch.setattr(disk, missing, lambda *_: None)

    def all_good():
        for folder, done in states(ready, tmp_path):
            ready.check(folder, done=done)

    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check comes first
        all_good()


def test_the_model_ends_with_what_the_disk_has(tmp_path):
    operation = Save()
    (tmp_path / "before").mkdir()
    operation.prepare(tmp_path / "before")
    folder = fresh(tmp_path)
    log = counted(lambda: operation.act(folder)).log
    model = Disk(folder, tmp_path / "before")
    for entry in log:
        model.apply(*entry)
    model.crash(tmp_path / "crashed", "zeroed")  # all names, and of the files what was synced
    assert {k: v[0] for k, v in made.tree(tmp_path / "crashed").items()} == {
        k: v[0] for k, v in made.tree(folder).items()
    }


def test_a_prune_that_is_killed_leaves_nothing_unusable(tmp_path):
    (tmp_path / "before").mkdir()
    epoch = attempts.claim_epoch(tmp_path / "before")
    for step in (10, 20, 30):
        made.save(tmp_path / "before", step, epoch)
    folder = fresh(tmp_path)
    calls = counted(lambda: Series(folder).prune(1, epoch)).calls
    for number in range(1, calls + 1):
        folder = fresh(tmp_path)
        assert killed_at(number, lambda: Series(folder).prune(1, epoch))
        assert verify(folder).problems == []
        assert Series(folder).latest()[0].name.startswith("ckpt-000000000030-")
        Series(folder).prune(1, epoch)
        assert len(os.listdir(folder)) == 3  # LATEST, EPOCH, the checkpoint


def test_two_dumps_at_once_and_a_dead_one_beside(tmp_path):
    """A dump in progress is not swept away by another one; what a dead one left is."""
    dead = tmp_path / f".d.tmp-{0:016x}"
    made.write_dump(dead)
    with made.replacing(tmp_path / "d") as first:
        assert not dead.exists()
        made.write_index(first)
        made.write_index(tmp_path / "sampler")
        with made.replacing(tmp_path / "d") as second:
            assert first.exists()
            made.write_index(second, leaves=[3.0])
    assert os.listdir(tmp_path / "d")
    assert settled(tmp_path) == ["d", "sampler"]


def test_nobody_waits_for_the_removal_of_the_old_dump(tmp_path, monkeypatch):
    """It goes on in the background; another dump leaves it alone meanwhile, and has its own removed."""
    begun, go_on, removed, remove = threading.Event(), threading.Event(), [], disk.remove

    def slow(path):
        begun.set()
        assert go_on.wait(60)
        removed.append(path.name)
        remove(path)

    made.write_dump(tmp_path / "d", seed=1)
    monkeypatch.setattr(disk, "remove", slow)
    made.write_dump(tmp_path / "d", seed=2)
    assert begun.wait(60)
    made.write_dump(tmp_path / "d", seed=2)
    Dump().check(tmp_path, done=True)
    assert removed == []
    assert len(list(tmp_path.glob(".d.trash-*"))) == 2
    go_on.set()
    assert settled(tmp_path) == ["d"]
    assert len(removed) == 2, "each once"


class DumpInTurns(Dump):
    """``dumps`` to a path where a dump lies, on a file system that cannot exchange two names."""

    def check(self, folder, *, done=False):
        found = standing(folder / "d")
        assert found == folder / "d" or not done
        assert verify(found).problems == []
        with Checkpoint(found) as checkpoint:
            assert checkpoint.manifest.user["seed"] in ((2,) if done else (1, 2))


@pytest.fixture(params=[errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def no_exchange(request, monkeypatch):
    real = disk._rename

    def fail(old, new, flag):
        if flag == disk._EXCHANGE:
            raise OSError(request.param, "no")
        real(old, new, flag)

    monkeypatch.setattr(disk, "_rename", fail)


def test_where_two_names_cannot_be_exchanged_a_dump_is_replaced_in_turns(tmp_path, no_exchange):
    case = DumpInTurns()
    (tmp_path / "before").mkdir()
    case.prepare(tmp_path / "before")
    folder, calls = fresh(tmp_path), []
    with Shim(lambda number, name: calls.append((number, name))).installed():
        case.act(folder)
    case.check(folder, done=True)
    renames = [number for number, name in calls if name == "rename"]
    aside = 0
    for number in range(renames[0], min(renames[-1] + 2, len(calls) + 1)):
        folder = fresh(tmp_path)
        assert killed_at(number, lambda: case.act(folder))
        case.check(folder)
        aside += standing(folder / "d") != folder / "d"
        case.afterwards(folder)
    assert aside, "no kill hit the moment between the names"


def test_a_dump_that_is_put_back_by_another_process_is_replaced_nevertheless(tmp_path, no_exchange, monkeypatch):
    """It took the one that replaces the dump for dead."""
    made.write_dump(tmp_path / "d", seed=1)
    rename, back = disk.rename, []

    def put_back(old, new):
        rename(old, new)
        if ".d.was-" in str(new) and not back:
            back.append(new)
            rename(new, old)

    monkeypatch.setattr(disk, "rename", put_back)
    made.write_dump(tmp_path / "d", seed=2)
    DumpInTurns().check(tmp_path, done=True)
    assert settled(tmp_path) == ["d"]


def test_a_dump_stays_where_it_cannot_be_replaced(tmp_path, no_exchange, monkeypatch):
    made.write_dump(tmp_path / "d", seed=1)
    rename = disk.rename

    def fail(old, new):
        if ".d.tmp-" in str(old) and new == tmp_path / "d":
            raise OSError(errno.EIO if (tmp_path / "d").exists() is False else errno.ENOTEMPTY, "no")
        rename(old, new)

    monkeypatch.setattr(disk, "rename", fail)
    with pytest.raises(OSError, match="no") as caught:
        made.write_dump(tmp_path / "d", seed=2)
    assert caught.value.errno == errno.EIO
    Dump().check(tmp_path)
    assert settled(tmp_path) == ["d"]


@pytest.mark.parametrize("what", ["file", "folder", "link", "store", "series", "someone else's manifest"])
def test_what_is_no_dump_is_not_replaced(tmp_path, what):
    path = tmp_path / "d"
    if what == "file":
        path.write_text("x")
    elif what == "link":
        (tmp_path / "target").mkdir()
        path.symlink_to("target")
    else:
        path.mkdir()
        if what == "series":
            made.save(path, 10, attempts.claim_epoch(path))
        else:
            (path / "manifest.json").write_text('{"name":"my web app"}')
    before = made.tree(tmp_path)
    with pytest.raises(FileExistsError, match="expected a free name, an empty folder or a dump to replace"):
        made.write_dump(path)
    assert made.tree(tmp_path) == before


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "d").mkdir()
    made.write_dump(tmp_path / "d")
    assert verify(tmp_path / "d").good


def test_an_exception_while_dumping_leaves_nothing(tmp_path):
    made.write_dump(tmp_path / "d", seed=1)
    with pytest.raises(TypeError), made.replacing(tmp_path / "d") as folder:
        PartWriter(folder / "sampler", "sampler", "S").finish({"state": object()})
    with pytest.raises(ValueError, match="expected a finished dump"), made.replacing(tmp_path / "d"):
        pass
    Dump().check(tmp_path)
    assert os.listdir(tmp_path) == ["d"]
