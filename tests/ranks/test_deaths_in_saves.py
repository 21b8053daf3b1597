"""Ranks that die or are stopped in the middle of a save: the others end in time, no attempt is revived, and what was saved loads."""

import os
import signal
import time
import warnings

import pytest

from engram import RankFailed
from engram.saved import attempts
from engram.saved.series import Series
from tests import stress
from tests.processes import running
from tests.ranks.jobs import buffer, checkpointer, done, filled, job, steps_of, whos
from tests.ranks.processes import answer, join, meet, run, start, stopped, wait_for

PHASES = ("begin", "write", "vote", "decide", "retire")


def ends(ck, phase, end):
    """Call ``end`` before this rank's part of a phase of the next save; in all but the first the others are as far by then."""
    other = "rank-0000{}-of-00002{}".format(
        1 - ck._job.ranks.rank, "/shard.json" if phase in ("decide", "retire") else ""
    )
    place, name = {
        "begin": (ck._job.protocol, "begin"),
        "write": (ck._job, "write_parts"),
        "vote": (attempts, "accept"),
        "decide": (ck._job.protocol, "decided"),
        "retire": (ck._job.series, "retire"),
    }[phase]
    real = getattr(place, name)

    def ended(*args, **more):
        setattr(place, name, real)
        if phase != "begin":
            wait_for(lambda: any(ck.root.glob(f"ckpt-000000000002-*/{other}")))
        end()
        return real(*args, **more)

    setattr(place, name, ended)


def impatient(ck, phase, seconds):
    """Wait no longer for what a rank that ends in this phase of the next save does not do: for all else as long as it takes.

    Returns how to be patient again.
    """
    patient, begin = ck._job.options, ck._job.protocol.begin
    if phase not in ("decide", "retire"):  # then all have voted
        ck._job.options = patient._replace(timeout=seconds)
    if phase != "begin":
        ck._job.protocol.begin = lambda number, begun, _: begin(number, begun, patient.timeout)

    def again():
        ck._job.options = patient
        ck._job.protocol.__dict__.pop("begin", None)

    return again


def heard(act):
    """The name of a checkpoint, or what a rank is told; and after how long."""
    started = time.monotonic()
    try:
        said = act().name
    except RankFailed as error:
        said = f"RankFailed: {error}"
    return said, time.monotonic() - started


def restored(ranks, _, root, step):
    """The next job loads what there is, and saves."""
    rb = buffer(2, 64)
    ck = checkpointer(root, rb, ranks)
    ck.restore()
    return whos(steps_of(rb)), ck.save(step).name


def check_next_job(root, step):
    results = done(job(2, restored, root, step))
    assert [who for who, _ in results] == [whos(steps_of(filled(rank))) for rank in range(2)]
    assert {name for _, name in results} == {Series(root).latest()[0].name}


# ---- deaths ----------------------------------------------------------------------------------------------------------------


def dies(ranks, rank, folder, victims, phase):
    ck = checkpointer(folder / "root", filled(rank), ranks)
    first = ck.save(1).name
    meet(folder, "saved", ranks)  # rank 0 has made it the latest
    impatient(ck, phase, 1.0)
    if rank in victims:
        ends(ck, phase, lambda: os.kill(os.getpid(), signal.SIGKILL))
    said, took = heard(lambda: ck.save(2))
    if rank == 0:  # it holds the store
        wait_for(lambda: not running((folder / "pid-1").read_text()))
    return {"first": first, "said": said, "took": took}


EVERY = [(victim, phase) for victim in (0, 1) for phase in PHASES if (victim, phase) != (1, "retire")]
SOME = [it for it in EVERY if it not in {(0, "vote"), (1, "begin")}]


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:restore. ckpt:UserWarning")
@pytest.mark.parametrize(("victim", "phase"), stress.size(SOME, EVERY))
def test_killed_in_a_phase_of_a_save(tmp_path, victim, phase):
    folder, root = tmp_path / "job", tmp_path / "job" / "root"
    said, codes = run(2, dies, folder, [victim], phase)
    assert codes[victim] == -signal.SIGKILL
    assert said[victim] is None
    other = said[1 - victim]
    path, _ = Series(root).latest()
    if phase in ("decide", "retire"):  # all have voted
        assert other["said"] == path.name != other["first"]
    else:
        assert other["said"].startswith("RankFailed")
        assert f"[{victim}]" in other["said"] or f"rank {victim}" in other["said"]
        assert path.name == other["first"]
    assert other["took"] < 50
    check_next_job(root, 2)


def test_all_are_killed_after_they_voted(tmp_path):
    """Nobody decided: the next start does."""
    folder, root = tmp_path / "job", tmp_path / "job" / "root"
    _, codes = run(2, dies, folder, [0, 1], "decide")
    assert codes == [-signal.SIGKILL] * 2
    with warnings.catch_warnings(action="error"):  # that nobody came to write LATEST, too, is nothing to warn of
        results = done(job(2, restored, root, 3))
    assert [who for who, _ in results] == [whos(steps_of(filled(rank))) for rank in range(2)]
    names = [name.step for name in attempts.names(root) if Series(root).look(name) is None]
    assert names == [3, 2, 1]


# ---- stops -----------------------------------------------------------------------------------------------------------------


def is_stopped(ranks, rank, folder, victim, phase, timeout):
    """A save with one that is stopped, and one more when it goes on."""
    ck = checkpointer(folder / "root", filled(rank), ranks)
    first = ck.save(1).name
    meet(folder, "saved", ranks)
    patient = impatient(ck, phase, timeout)
    if rank == victim:
        ends(ck, phase, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    said, took = heard(lambda: ck.save(2))
    (folder / f"said-{rank}").touch()
    ranks.gather(b"", 60.0)
    latest = Series(folder / "root").latest()[0].name
    patient()
    ranks.gather(b"", 60.0)
    again, _ = heard(lambda: ck.save(3))
    meet(folder, "over", ranks)  # rank 0 holds the store
    return {"first": first, "said": said, "took": took, "latest": latest, "again": again}


STOPPED = [(victim, phase) for victim in (0, 1) for phase in PHASES[:4] if (victim, phase) != (0, "begin")]
SOME_STOPPED = [(1, "write"), (1, "vote"), (0, "decide")]


@pytest.mark.stress
@pytest.mark.parametrize(("victim", "phase"), stress.size(SOME_STOPPED, STOPPED))
def test_stopped_for_longer_than_others_wait(tmp_path, victim, phase):
    """They give up and say who it was. When it goes on it votes, and writes, for nothing: what is decided stays so."""
    folder = tmp_path / "job"
    every = start(2, is_stopped, folder, victim, phase, 1.0)
    wait_for((folder / f"said-{1 - victim}").exists)
    wait_for(lambda: stopped(every[victim].pid))
    os.kill(every[victim].pid, signal.SIGCONT)
    assert join(every) == [0, 0]
    stuck, other = answer(folder, victim), answer(folder, 1 - victim)
    assert stuck["latest"] == other["latest"]
    assert stuck["again"] == other["again"] == Series(folder / "root").latest()[0].name
    assert other["took"] < 50
    if phase == "decide":
        assert stuck["said"] == other["said"] == other["latest"] != other["first"]
        return
    assert other["latest"] == other["first"]
    assert f"rank {victim}" in other["said"] or f"[{victim}]" in other["said"]
    assert stuck["said"].startswith("RankFailed")
    left = {str(path.relative_to(path.parents[1])) for path in (folder / "root").glob("ckpt-000000000002-*/rank-*/*")}
    assert all(name.endswith(".json") for name in left), "rows of an attempt that was aborted"


def test_stopped_for_a_moment(tmp_path):
    folder = tmp_path / "job"
    every = start(2, is_stopped, folder, 1, "write", 60.0)
    wait_for(lambda: every[1].pid and stopped(every[1].pid))
    time.sleep(0.3)
    os.kill(every[1].pid, signal.SIGCONT)
    assert join(every) == [0, 0]
    said = [answer(folder, rank) for rank in range(2)]
    assert said[0]["said"] == said[1]["said"] == said[0]["latest"] != said[0]["first"]


def holds_the_store(ranks, rank, folder):
    ck = checkpointer(folder / "root", filled(rank), ranks)
    first = ck.save(1).name
    meet(folder, "saved", ranks)
    if rank == 0:
        ck._job.options = ck._job.options._replace(timeout=1.0)
        ends(ck, "begin", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    else:
        wait_for(lambda: stopped(int((folder / "pid-0").read_text())))
        ranks._timeout = 1.0
    said = [heard(lambda: ck.save(step)) for step in (2, 3)[: 1 + rank]]
    meet(folder, "over", ranks)  # rank 0 holds the store
    return {"first": first, "said": said}


def test_rank_0_is_stopped_and_the_store_with_it(tmp_path):
    """Others give up for good: who does not answer may have half of what was told. Nor is there a checkpoint of rank 0 alone."""
    folder = tmp_path / "job"
    every = start(2, holds_the_store, folder)
    wait_for((folder / "over-1").exists)
    os.kill(every[0].pid, signal.SIGCONT)
    assert join(every) == [0, 0]
    first, (stuck, other) = answer(folder, 0)["first"], (answer(folder, rank)["said"] for rank in range(2))
    assert all("rank 0, which holds the store of this job, did not answer for 1 s" in said for said, _ in other)
    assert all(took < 50 for _, took in other)
    assert "no vote of ranks [1]" in stuck[0][0]
    assert Series(folder / "root").latest()[0].name == first
