"""Ranks that see their folder through two mounts of a network's file system, each of which believes for a minute what it saw."""

import errno
import os
import threading
import time

import pytest
import torch

from engram import CorruptCheckpoint, LazyTensorStorage, ReplayBuffer
from engram.saved import attempts, disk
from engram.saved.inspection import verify
from engram.saved.series import Series
from tests.network_files import Server
from tests.ranks.jobs import buffer, checkpointer, done, filled, job, play, steps_of, whos
from tests.ranks.processes import wait_for
from tests.saved import checkpoint_folders as made
from tests.waiting import Limit

LONG = 600.0  # no test lasts until a mount believes something else by itself


@pytest.fixture(params=["NFS", "no links"])
def options(request):
    """As NFS is mounted; as SMB is, where links are missing."""
    return {"NFS": {}, "no links": {"no_links": True, "noreplace": True}}[request.param]


@pytest.fixture
def mounts(tmp_path):
    with Server(tmp_path, seconds=LONG) as server:
        yield server.mount("near"), server.mount("far")


def of(mounts, rank):
    """The series, as this rank sees it: the odd ones are on another machine."""
    return mounts[rank % 2] / "series"


def saved(ranks, rank, mounts, steps, timeout=60.0):
    """The names of checkpoints, one for each step, and who is in the last one."""
    rb = filled(rank)
    ck = checkpointer(of(mounts, rank), rb, ranks, keep=2, timeout=timeout)
    names = []
    for step in steps:
        play(rb, rank, 0, [3], first=step)
        names.append(ck.save(step).name)
    return names, whos(steps_of(rb))


def restored(ranks, rank, mounts):
    """Who is there; the first rank sees the folder through the other mount than the first one that saved."""
    rb = buffer(4, 128)
    report = checkpointer(of(mounts, rank + 1), rb, ranks).restore()
    return report.name, whos(steps_of(rb))


def test_ranks_save_and_three_restore(tmp_path, options):
    with Server(tmp_path, seconds=LONG, **options) as server:
        mounts = server.mount("near"), server.mount("far")
        for mount in mounts:  # what is seen now is believed from now on
            assert os.listdir(mount) == []
            assert not (mount / "series").exists()
        limit = Limit(60)
        said = done(job(4 if not options else 2, saved, mounts, [1, 2] if not options else [1, 2, 3]))
        limit.check("what the others wrote was seen late")
        assert len({tuple(names) for names, _ in said}) == 1
        assert [str(name) for name in attempts.names(of(mounts, 1))] == said[0][0][:-3:-1], "keep=2"
        for mount in mounts:
            assert verify(mount / "series").problems == []
        loaded = done(job(3, restored, mounts))
        assert {name for name, _ in loaded} == {said[0][0][-1]}
        assert set().union(*(who for _, who in loaded)) == set().union(*(who for _, who in said))


def test_votes_and_the_decision_are_seen_at_once(mounts, monkeypatch):
    """Also by a machine that has looked before, which without asking would not see them."""
    near, far = mounts
    attempt = attempts.begin(near, step=1, epoch=attempts.claim_epoch(near), world=1, trigger="t")
    seen = far / attempt.name
    assert attempts.decision(seen) is None
    assert not attempts.has_voted(seen, 0, 1)
    assert not (seen / "manifest.json").exists()
    made.vote(attempt, 0, 1)
    assert attempts.decide(attempt, 1).status == "complete"
    with monkeypatch.context() as patch:
        patch.setattr(disk, "look_again", lambda *_: None)
        assert not attempts.has_voted(seen, 0, 1)
        assert attempts.decision(seen) is None
    assert attempts.has_voted(seen, 0, 1)
    assert attempts.decision(seen).status == "complete"


def test_a_file_system_that_cannot_make_a_name_once_is_refused(tmp_path):
    """At the first save, before anything is written."""
    with Server(tmp_path, seconds=LONG, no_links=True) as server:
        mounts = server.mount("near"), server.mount("far")
        for result in job(2, saved, mounts, [1]):
            assert isinstance(result, Exception)
            assert "hard links, or one that renames without replacing, got one with neither" in str(result)


def test_an_answer_that_was_lost(tmp_path, monkeypatch):
    """The server has made the link, and the client asks again: that finds the name taken, by itself."""
    link = os.link

    def twice(*arguments, **options):
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(disk.os, "link", twice)
    assert disk.publish(tmp_path / "x", b"mine")
    assert not disk.publish(tmp_path / "x", b"mine")
    assert os.listdir(tmp_path) == ["x"]


def test_incarnations_on_both_machines(mounts):
    """Each is another one, although neither machine sees the other's files by itself; the one that was replaced is told."""
    near, far = mounts
    assert [attempts.claim_epoch(root) for root in (near, far, near, far)] == [1, 2, 3, 4]
    for root in mounts:
        assert attempts.newest_epoch(root) == 4
        with pytest.raises(RuntimeError, match="later incarnation"):
            attempts.begin(root, step=1, epoch=3, world=1, trigger="t")


def test_an_incarnation_that_no_listing_shows(tmp_path, monkeypatch):
    """Names that were made since the folder was listed are passed over, not tried for ever."""
    for _ in range(3):
        attempts.claim_epoch(tmp_path)
    monkeypatch.setattr(attempts, "newest_epoch", lambda _: 1)
    assert attempts.claim_epoch(tmp_path) == 4


def test_the_newest_checkpoint_is_found_on_a_machine_that_has_looked_before(mounts):
    near, far = mounts
    rb, other = filled(0), buffer(2, 64)
    here, there = checkpointer(near / "series", rb, None), checkpointer(far / "series", other, None)
    assert there.latest is None
    for step in (1, 2):
        name = here.save(step).name
        assert there.latest == name
        assert there.list()[0].name == name
        assert there.restore().name == name


def test_what_the_other_machine_removes_is_missing_not_an_error(mounts):
    """A reader that has it open: stale files are damage that is named, and a restore takes another checkpoint."""
    near, far = mounts
    rb = filled(0)
    here = checkpointer(near / "series", rb, None, keep=1, full_every=1)
    name = here.save(1).name
    known = Series(far / "series")
    checkpoint = known.open(far / "series" / name)
    with checkpoint, checkpoint.part(0, "storage") as part:
        file = next(iter(part.files))
        part.read(file, 0, bytearray(8))
        here.save(2)
        wait_for(lambda: not left(near))
        with pytest.raises(CorruptCheckpoint, match="ends here|found none"):
            part.again().read_all(file)
    again = buffer(2, 64)
    assert checkpointer(far / "series", again, None).restore().step == 2


def left(root):
    """The files of checkpoints that are being removed."""
    return [name for folder, _, names in os.walk(root / "series") if "/trash-" in folder for name in names]


def test_files_that_are_open_here_stay_under_other_names_until_they_are_closed(mounts, caplog):
    near, _ = mounts
    rb = filled(0)
    ck = checkpointer(near / "series", rb, None, keep=1, full_every=1)
    opened = open(near / "series" / ck.save(1).name / "attempt.json")  # noqa: SIM115 - it is open on purpose
    ck.save(2)
    wait_for(lambda: [name[:4] for name in left(near)] == [".nfs"])
    ck.save(3)
    opened.close()
    wait_for(lambda: not left(near))
    ck.save(4)
    wait_for(lambda: not [name for name in os.listdir(near / "series") if name.startswith("trash-")])
    assert "not removed" not in caplog.text


def test_a_mount_that_stalls_amid_a_save(tmp_path):
    """All wait for it, and the save is what it would have been."""
    with Server(tmp_path, seconds=LONG) as server:
        mounts = server.mount("near"), server.mount("far")
        done(job(2, saved, mounts, [1]))
        stalled, accept = threading.Event(), attempts.accept

        def stalls(folder, rank, *more, **options):
            if rank == 0 and not stalled.is_set():
                server.stall("far")
                stalled.set()
            return accept(folder, rank, *more, **options)

        attempts.accept = stalls
        go_on = threading.Thread(target=lambda: stalled.wait(60) and (time.sleep(0.3), server.go_on("far")))
        go_on.start()
        try:
            said = done(job(2, saved, mounts, [2]))
        finally:
            attempts.accept = accept
            stalled.set()
            go_on.join()
        assert len({tuple(names) for names, _ in said}) == 1
        assert verify(of(mounts, 0)).problems == []


def test_a_dump_is_replaced_and_both_machines_load_it(mounts):
    near, far = mounts
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert not (far / "dump").exists()
    for number in range(3):
        rb.extend(torch.full((2,), number))
        rb.dumps(near / "dump")
        disk.look_again(far)
        other = ReplayBuffer(storage=LazyTensorStorage(10))
        other.loads(far / "dump")
        assert other[:].tolist() == rb[:].tolist()
    (near / "other").mkdir()
    with pytest.raises(OSError, match="Invalid argument") as caught:
        disk.exchange(near / "dump", near / "other")
    assert caught.value.errno == errno.EINVAL, "or this test shows nothing"
