"""What ranks do at once or see too late: decisions that race, files that others do not see yet, one that has nothing to save."""

import errno
import json
import os
import shutil
import time

import pytest

from engram import RankFailed
from engram.saved import attempts
from engram.saved.series import Series
from tests import stress
from tests.ranks import processes
from tests.ranks.jobs import buffer, checkpointer, decides_when_voted, done, job, play, steps_of, whos
from tests.ranks.processes import join, wait_for
from tests.saved import checkpoint_folders as made

ROUNDS = stress.size(12, 500)


# ---- decisions ---------------------------------------------------------------------------------------------------------------


def decides(rank, n, folder, root, usual):
    """The last vote, two that commit and one that gives up: at once, and later from round to round.

    Only the rounds between are races: in the first the vote comes after the decision, in the last nobody gives up before it.
    """
    said = []
    for step in range(ROUNDS):
        attempt = root / str(attempts.Name(step, 1, f"{step:08x}"))
        (folder / f"{step}-{rank}").touch()
        while not all((folder / f"{step}-{other}").exists() for other in range(n)):
            time.sleep(0.0002)
        if rank == 3:
            time.sleep(usual * 6 * step / ROUNDS)
        while (rank, step) in ((0, 0), (3, ROUNDS - 1)) and attempts.decision(attempt) is None:
            time.sleep(0.0002)
        if rank == 0:
            made.vote(attempt, 1, 2)
        made_of_it = None
        while made_of_it is None:
            made_of_it = attempts.decide(attempt, 1, give_up="at last" if rank == 3 else None)
        said.append([made_of_it.status, list(made_of_it.reasons)])
    (folder / f"answer-{rank}.json").write_text(json.dumps(said))


def test_processes_that_commit_and_one_that_gives_up(tmp_path):
    """One decision each, whoever makes it; and what is committed has all votes."""
    folder, root = tmp_path / "job", tmp_path / "root"
    folder.mkdir()
    root.mkdir()
    assert attempts.claim_epoch(root) == 1
    took = []
    for step in range(ROUNDS):
        begun = attempts.begin(root, step=step, epoch=1, world=2, trigger="t", attempt=f"{step:08x}")
        started = time.monotonic()
        made.vote(begun, 0, 2)
        took.append(time.monotonic() - started)
    assert join(processes.spawn(4, decides, folder, root, sorted(took)[ROUNDS // 2])) == [0] * 4
    said = [processes.answer(folder, rank) for rank in range(4)]
    assert said[1:] == said[:1] * 3
    for step, (status, reasons) in enumerate(said[0]):
        attempt = root / str(attempts.Name(step, 1, f"{step:08x}"))
        assert attempts.decision(attempt).status == status
        assert (Series(attempt.parent).look(attempt.name) is None) == (status == "complete")
        assert reasons == ([] if status == "complete" else ["at last: no vote of ranks [1]"])
    assert {status for status, _ in said[0]} == {"complete", "aborted"}
    assert not list(root.glob("*/*.tmp"))


# ---- what others do not see yet ----------------------------------------------------------------------------------------------


def save(ranks, rank, root, step=1):
    rb = buffer(2, 64)
    play(rb, rank, 0, [5, 7, 3])
    checkpointer(root, rb, ranks).save(step)
    return whos(steps_of(rb))


def test_a_folder_that_a_rank_sees_later(tmp_path):
    """As on file systems of networks: it comes within the time, and all go on; or it does not, and that is said."""

    def act(ranks, rank, later):
        rb = buffer(2, 64)
        play(rb, rank, 0, [4])
        root = tmp_path / str(rank)
        ck = checkpointer(root, rb, ranks, timeout=60.0 if later else 1.0)
        if rank == 1:
            ranks.gather(b"", 60.0)
            os.rmdir(root)
            wait = ranks._wait
            ranks._wait = lambda keys, _, over=None: wait(keys, 60.0, over)  # rank 0 takes as long as it needs to begin
            if later:  # seen through a link from now on
                (tmp_path / "seen").symlink_to(tmp_path / "0")
                joined = ck._job.protocol._joined

                def late(*args):
                    time.sleep(0.2)
                    (tmp_path / "seen").rename(root)
                    return joined(*args)

                ck._job.protocol._joined = late
        else:
            ranks.gather(b"", 60.0)
        return ck.save(1).name

    names = done(job(2, act, True))
    assert names[0] == names[1]
    shutil.rmtree(tmp_path / "0")
    (tmp_path / "1").unlink()
    first, second = job(2, act, False)
    assert "after 1 s: no vote of ranks [1]" in str(first)
    assert "rank 1: expected " in str(second)
    assert "Is it a file system that all ranks share?" in str(second)


def test_a_listing_that_is_older_than_what_was_saved(tmp_path):
    """Rank 0 says what is loaded: what others have in their listings does not count."""
    saved = set().union(*done(job(2, save, tmp_path / "0")))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    newer = set().union(*done(job(2, save, tmp_path / "0", 2)))
    (new,) = (tmp_path / "0").glob("ckpt-000000000002-*")

    def act(ranks, rank):
        rb = buffer(2, 128)
        play(rb, 77, 0, [6])
        before = steps_of(rb)
        try:
            return checkpointer(tmp_path / str(rank), rb, ranks).restore(incomplete={}).step
        except RankFailed as error:
            assert steps_of(rb) == before
            return str(error)

    assert saved == newer
    errors = job(2, act)
    assert errors[0] == errors[1]
    assert errors[0].startswith("restore: rank 1: RankFailed: expected ckpt-")
    assert new.name in errors[0]
    shutil.copytree(new, tmp_path / "1" / new.name)  # there, and its LATEST is the old one
    assert done(job(2, act)) == [2, 2]


def test_a_slow_rank_is_waited_for_and_one_that_is_too_slow_is_named(tmp_path):
    def act(ranks, rank, too_slow):
        """Rank 2 writes after the others have voted, or after they have decided without it."""
        rb = buffer(2, 64)
        play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        write = ck._job.write_parts

        def slow(own, *args):
            folder = own.parent
            wait_for(
                lambda: attempts.decision(folder) if too_slow else all(it.shard for it in attempts.votes(folder)[:2])
            )
            return write(own, *args)

        if rank == 2:
            ck._job.write_parts = slow
        elif too_slow:
            decides_when_voted(ck, (0, 1), 0.5)
        return ck.save(1).name

    assert len(set(done(job(3, act, False)))) == 1
    errors = job(3, act, True)
    assert all(isinstance(error, RankFailed) for error in errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "after 0.5 s: no vote of ranks [2]" in str(errors[0])


# ---- nothing to save ---------------------------------------------------------------------------------------------------------


def one_has_nothing(ranks, rank, root, empty, fails=None):
    """A buffer that was never written has no fields either."""
    rb = buffer(2, 64)
    if rank != empty:
        play(rb, rank, 0, [4])
    ck = checkpointer(root, rb, ranks)
    if rank == fails:
        ck._job.write_parts = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    return ck.save(1).name, steps_of(rb) if rank != empty else set()


@pytest.mark.parametrize("empty", [0, 2])
def test_a_rank_that_has_nothing(tmp_path, empty):
    saved = done(job(3, one_has_nothing, tmp_path, empty))
    assert len({name for name, _ in saved}) == 1

    def load(ranks, rank):
        rb = buffer(2, 64)
        ck = checkpointer(tmp_path, rb, ranks)
        ck.restore()
        there = steps_of(rb) if rb.storage.initialized else set()
        play(rb, 50 + rank, 1, [3])
        return there, ck.save(2).name

    assert [there for there, _ in done(job(3, load))] == [steps for _, steps in saved]
    shutil.rmtree(tmp_path)
    done(job(3, one_has_nothing, tmp_path, empty))
    back = [there for there, _ in done(job(2, load))]
    assert sorted(map(len, back)) == [4, 4]
    assert set().union(*back) == set().union(*(steps for _, steps in saved))


def test_nobody_has_anything(tmp_path):
    def act(ranks, _):
        ck = checkpointer(tmp_path, buffer(2, 64), ranks)
        return ck.save(1).steps

    assert done(job(2, act)) == [0, 0]
    for n in (2, 3):
        restored = done(job(n, lambda ranks, _: checkpointer(tmp_path, buffer(2, 64), ranks).restore()))
        assert [report.steps for report in restored] == [0] * n


def test_a_rank_that_has_nothing_and_one_that_cannot_write(tmp_path):
    errors = job(3, one_has_nothing, tmp_path, 0, 2)
    assert all(isinstance(error, RankFailed) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "rank 2: OSError: [Errno 5] Input/output error" in str(errors[0])
    assert Series(tmp_path).latest()[0] is None


def test_a_rank_that_had_nothing_before_the_others_died(tmp_path):
    """What is left of a crash loads, though one that lived has no fields."""

    def act(ranks, rank):
        rb = buffer(2, 64)
        if rank != 0:
            play(rb, rank, 0, [4])
        ck = checkpointer(tmp_path, rb, ranks)
        if rank == 2:
            ck._job.write_crash = lambda _: None
        with ck.guard(grace=0.3):  # for the vote of rank 2
            ranks.gather(b"", 60.0)
            raise ZeroDivisionError

    job(3, act)
    report = done(job(1, lambda ranks, _: _loaded(ranks, tmp_path)))[0]
    assert report == {1}


def _loaded(ranks, root):
    rb = buffer(2, 64)
    report = checkpointer(root, rb, ranks).restore(allow_partial=True)
    assert report.missing == (2,)
    return {who // 100_000_000 for who in whos(steps_of(rb))}
