"""Processes on two mounts of a network's file system: ranks with addresses of their own, a job and its followers, and kills."""

import os
import re
import signal
import tempfile
import time

import pytest
import torch

from engram import LazyTensorStorage, RankFailed, ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved import attempts
from engram.saved.inspection import verify
from engram.saved.series import Series
from tests import stress
from tests.network_files import Server
from tests.ranks.jobs import buffer, checkpointer, filled, steps_of, whos
from tests.ranks.networks import Switch
from tests.ranks.processes import answer, join, spawn, tell, wait_for
from tests.ranks.test_networks import started

KILLS = stress.size(1, 25)
ROWS = 50


@pytest.fixture
def mounts(tmp_path):
    with Server(tmp_path, seconds=600.0) as server:
        yield server.mount("near"), server.mount("far")


# ---- ranks -----------------------------------------------------------------------------------------------------------------


def saves(ranks, rank, folder, mounts):
    """A save; then one amid which the last rank is killed."""
    rb = filled(rank)
    ck = checkpointer(mounts[rank % 2] / "series", rb, ranks, timeout=60.0)
    name = ck.save(1).name
    if rank == ranks.world - 1:
        tell(folder / f"answer-{rank}.json", '{"killed": true}')
        attempts.accept = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    else:
        ck._job.options = ck._job.options._replace(timeout=5.0)
    try:
        ck.save(2)
        why = ""
    except RankFailed as error:
        why = str(error)
    return {"name": name, "who": sorted(whos(steps_of(rb))), "why": why}


def restores(ranks, rank, folder, mounts):
    rb = buffer(4, 128)
    report = checkpointer(mounts[(rank + 1) % 2] / "series", rb, ranks).restore()
    return {"name": report.name, "who": sorted(whos(steps_of(rb)))}


def test_four_ranks_of_two_machines_one_of_which_is_killed(tmp_path, mounts):
    one, two = tmp_path / "one", tmp_path / "two"
    with Switch() as switch:
        assert join(started(switch, 4, saves, one, mounts)) == [0, 0, 0, -signal.SIGKILL]
    said = [answer(one, rank) for rank in range(3)]
    assert len({it["name"] for it in said}) == 1
    assert all(re.search(r"no vote of ranks \[.*\b3\]", it["why"]) for it in said), (
        said
    )  # on a busy machine others are late, too
    with Switch() as switch:
        assert join(started(switch, 2, restores, two, mounts)) == [0, 0]
    loaded = [answer(two, rank) for rank in range(2)]
    assert {it["name"] for it in loaded} == {said[0]["name"]}
    everyone = {who for it in loaded for who in it["who"]}
    assert everyone > {who for it in said for who in it["who"]}
    assert verify(mounts[1] / "series").problems == []


# ---- a job and its followers -----------------------------------------------------------------------------------------------


def writes(rank, n, folder, root, first):
    """Every 50 ms a checkpoint all of whose rows say its step; the one before is removed."""
    torch.set_num_threads(1)
    rb = ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=8)
    ck = Checkpointer(root, rb, keep=1)
    step = first
    while True:
        rb.extend({"step": torch.full((ROWS,), step)})
        ck.save(step)
        tell(folder / "saved", str(step))
        step += 1
        time.sleep(0.05)


def follows(rank, n, folder, root, name):
    """Batches are of one checkpoint each, and those become newer."""
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)  # what a killed follower leaves
    seen = 0
    with ReplayBuffer.follow(root, every=0.02, timeout=100.0) as rb:
        while True:
            steps = set(rb.sample()["step"].tolist())
            if len(steps) != 1 or min(steps) < seen:
                tell(folder / f"wrong-{name}", str(steps))
                os._exit(1)
            if min(steps) > seen:
                seen = min(steps)
                tell(folder / f"seen-{name}", str(seen))


def number(file):
    return int(file.read_text()) if file.exists() else 0


def test_a_job_and_followers_that_are_killed(tmp_path, mounts):
    """Followers see newer checkpoints whatever dies, and what died holds nothing up."""
    near, far = mounts[0] / "root", mounts[1] / "root"
    near.mkdir()
    running = []

    def run(act, *more):
        running.extend(spawn(1, act, tmp_path, *more))
        return running[-1]

    def see(name, more):
        """That follower sees so many more steps."""
        least = number(tmp_path / f"seen-{name}") + more
        wait_for(lambda: number(tmp_path / f"seen-{name}") >= least or list(tmp_path.glob("wrong-*")), 100)
        assert not list(tmp_path.glob("wrong-*"))

    try:
        job, step = run(writes, near, 1), 1
        run(follows, far, "stays")
        for kill in range(KILLS):
            follower = run(follows, far, f"dies-{kill}")
            see(f"dies-{kill}", 2)
            follower.kill()
            follower.join()
            see("stays", 2)
            job.kill()
            job.join()
            step = number(tmp_path / "saved") + 10
            job = run(writes, near, step)
            wait_for(lambda step=step: number(tmp_path / "seen-stays") >= step, 100)
            see("stays", 2)
    finally:
        for process in running:
            process.kill()
            process.join()
    assert not list(tmp_path.glob("wrong-*"))
    last = Series(near).latest()[0]
    assert last is not None
    assert verify(near).problems == []
