"""Ranks that die in the middle of a restore: the others raise in time and say who; what is saved is as it was, and loads."""

import itertools
import os
import signal
import time

import pytest

from engram import RankFailed
from engram.saved import disk
from tests import stress
from tests.processes import running
from tests.ranks.jobs import buffer, checkpointer, done, job, play, steps_of, whos
from tests.ranks.processes import answer, join, only_for_the_dead, run, start, stopped, wait_for
from tests.saved.checkpoint_folders import tree

#: What all ranks do one after the other; each hears of the others before it goes on.
PHASES = ("finding", "opening", "planning", "checking", "loading")
#: Of restores that give every rank its own shard: there is nothing to plan.
EXACT = tuple(phase for phase in PHASES if phase != "planning")
#: Of a rank that is gone; those that live are waited for.
TIMEOUT = 0.5


def lengths_of(rank):
    return [5, 7, 3 + rank], [9, 4]


def save(ranks, rank, root):
    rb = buffer(2, 64)
    for lane, lengths in enumerate(lengths_of(rank)):
        play(rb, rank, lane, lengths)
    checkpointer(root, rb, ranks).save(1)
    return whos(steps_of(rb))


def saved(root, n=3):
    """What a job saved: its steps, and every file."""
    steps = set().union(*done(job(n, save, root)))
    return steps, tree(root)


def used(lanes, length):
    """A buffer that holds something."""
    rb = buffer(lanes, length)
    play(rb, 77, 0, [6])
    return rb


def ends(ranks, phases, phase, when, end):
    """Call ``end`` in a phase of the next restore: before this rank's part of it, amid it, or when others know of it."""
    real, reads, at = ranks.gather, disk.read, {"phase": phases[0], "reads": 0}

    def gather(value, timeout):
        if at["phase"] == phase and when == "before":
            end()
        given = real(value, timeout)
        if at["phase"] == phase and when == "after":
            end()
        now = phases.index(at["phase"]) + 1
        at["phase"] = phases[now] if now < len(phases) else None
        return given

    def read(*args):
        if at["phase"] == phase and when == "amid":
            at["reads"] += 1
            if at["reads"] == 2:
                end()
        return reads(*args)

    ranks.gather, disk.read = gather, read


class Gone(BaseException):
    """A thread that plays a dead rank."""


def kept(phase, when):
    """Whether what a buffer held before is there after the death of another rank."""
    if (phase, when) == ("loading", "after"):
        return "new"
    return "nothing" if phase == "loading" or (phase, when) == ("checking", "after") else "old"


@pytest.mark.stress(sample=10)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("targets", "phase"), [*itertools.product([2], PHASES), *itertools.product([3], EXACT)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_goes_silent(tmp_path, victim, targets, phase, when):
    """The logic of it, in threads: each phase, before and after the others were told that it is over."""
    steps, files = saved(tmp_path)
    lanes = (2, 64) if targets == 3 else (2, 128)
    alive = set(range(targets))

    def ended():
        alive.remove(victim)
        raise Gone

    def act(ranks, rank):
        rb = used(*lanes)
        only_for_the_dead(ranks, alive.copy, TIMEOUT)
        if rank == victim:
            ends(ranks, EXACT if targets == 3 else PHASES, phase, when, ended)
        started = time.monotonic()
        try:
            checkpointer(tmp_path, rb, ranks).restore()
            said = None
        except RankFailed as error:
            said = str(error)
        return said, whos(steps_of(rb)), time.monotonic() - started

    results = job(targets, act)
    assert isinstance(results.pop(victim), Gone)
    old = whos(steps_of(used(*lanes)))
    for said, there, took in results:
        assert (said is None) == (kept(phase, when) == "new")
        assert said is None or f"rank {victim}" in said
        assert there == old if kept(phase, when) == "old" else there <= steps
        assert bool(there) == (kept(phase, when) != "nothing")
        assert took < 50
    assert tree(tmp_path) == files or kept(phase, when) == "new"  # then there is a report
    again = done(job(targets, restored, tmp_path, lanes))
    assert set().union(*again) == steps


def restored(ranks, _, root, lanes=(2, 128)):
    rb = used(*lanes)
    checkpointer(root, rb, ranks).restore()
    return whos(steps_of(rb))


# ---- processes -----------------------------------------------------------------------------------------------------------


def living(folder, n):
    return {rank for rank in range(n) if running((folder / f"pid-{rank}").read_text())}


KILLED = {"is killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "exits": lambda: os._exit(7)}


def dies(ranks, rank, folder, root, victim, phase, when, how):
    rb = used(2, 128)
    only_for_the_dead(ranks, lambda: living(folder, ranks.world), TIMEOUT)
    if rank == victim:
        ends(ranks, PHASES, phase, when, KILLED[how])
    started = time.monotonic()
    try:
        checkpointer(root, rb, ranks).restore()
        said = None
    except RankFailed as error:
        said = str(error)
    took = time.monotonic() - started
    (folder / f"said-{rank}").touch()
    if rank == 0 and victim != 0:
        wait_for((folder / f"said-{3 - victim}").exists)  # it holds the store
    return {"said": said, "took": took, "who": sorted(whos(steps_of(rb)))}


EVERY = [
    (victim, phase, when, how)
    for victim, phase, when, how in itertools.product([0, 1], PHASES, ["before", "amid", "after"], KILLED)
    if not (when == "amid" and (phase, victim) in {("finding", 1), ("checking", 0), ("checking", 1)})
]
SOME = [
    (0, "finding", "amid", "is killed"),
    (1, "opening", "after", "exits"),
    (0, "planning", "before", "exits"),
    (1, "planning", "amid", "is killed"),
    (1, "checking", "before", "is killed"),
    (0, "checking", "after", "is killed"),
    (1, "loading", "amid", "is killed"),
    (0, "loading", "before", "is killed"),
]


@pytest.mark.stress
@pytest.mark.parametrize(("victim", "phase", "when", "how"), stress.size(SOME, EVERY))
def test_a_process_dies(tmp_path, victim, phase, when, how):
    root = tmp_path / "root"
    steps, files = saved(root)
    said, codes = run(3, dies, tmp_path / "job", root, victim, phase, when, how)
    assert codes[victim] == (-signal.SIGKILL if how == "is killed" else 7)
    assert said.pop(victim) is None
    old = whos(steps_of(used(2, 128)))
    for it in said:
        assert "error" not in it, it
        if kept(phase, when) == "new" and it["said"] is None:  # all had heard that all is well
            assert set(it["who"]) < steps
        else:
            assert f"rank {victim}" in it["said"]
            # The store ends with rank 0: whoever hears of that before it began to load has what it had.
            allowed = {"old": [old], "nothing": [set(), old][: 2 - victim], "new": [set()]}
            assert set(it["who"]) in allowed[kept(phase, when)]
        assert it["took"] < 50
    if (phase, when) != ("loading", "after"):
        assert tree(root) == files
    assert set().union(*done(job(2, restored, root))) == steps


def going(folder, n):
    return {rank for rank in range(n) if not stopped(int((folder / f"pid-{rank}").read_text()))}


def is_stopped(ranks, rank, folder, root, victim, phase, when, waits):
    """A restore with one that is stopped, for which others wait or not, and one more when it goes on."""
    rb = used(2, 128)
    ck = checkpointer(root, rb, ranks)
    if not waits:
        only_for_the_dead(ranks, lambda: going(folder, ranks.world), TIMEOUT)
    if rank == victim:
        ends(ranks, PHASES, phase, when, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    found = []
    for _ in range(2):
        try:
            ck.restore()
            said = None
        except RankFailed as error:
            said = str(error)
        found.append([said, sorted(whos(steps_of(rb)))])
        (folder / f"said-{rank}").touch()
        ranks.__dict__.pop("gather", None)
        ranks.__dict__.pop("_wait", None)
    (folder / f"over-{rank}").touch()
    if rank == 0:  # it holds the store
        wait_for(lambda: all((folder / f"over-{other}").exists() for other in range(ranks.world)))
    return found


@pytest.mark.parametrize(("phase", "when"), [("planning", "before"), ("loading", "before"), ("checking", "after")])
def test_a_process_is_stopped_for_longer_than_others_wait(tmp_path, phase, when):
    """They give up and say who it was. When it goes on it does not load either; then all try again."""
    root, folder = tmp_path / "root", tmp_path / "job"
    steps, _ = saved(root)
    every = start(3, is_stopped, folder, root, 1, phase, when, False)
    wait_for(lambda: all((folder / f"said-{rank}").exists() for rank in (0, 2)))
    wait_for(lambda: stopped(every[1].pid))
    assert not (folder / "said-1").exists()
    os.kill(every[1].pid, signal.SIGCONT)
    assert join(every) == [0, 0, 0]
    said = [answer(folder, rank) for rank in range(3)]
    old = whos(steps_of(used(2, 128)))
    for first, second in said:
        assert "rank 1" in first[0]
        assert set(first[1]) == (set() if kept(phase, when) == "nothing" else old)
        assert second[0] is None
    assert set().union(*(second[1] for _, second in said)) == steps


def test_a_process_is_stopped_for_a_moment(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "job"
    steps, _ = saved(root)
    every = start(3, is_stopped, folder, root, 1, "planning", "before", True)
    wait_for(lambda: every[1].pid and stopped(every[1].pid))
    time.sleep(0.3)
    os.kill(every[1].pid, signal.SIGCONT)
    assert join(every) == [0, 0, 0]
    for which in (0, 1):
        said = [answer(folder, rank)[which] for rank in range(3)]
        assert [it[0] for it in said] == [None] * 3
        assert set().union(*(it[1] for it in said)) == steps
