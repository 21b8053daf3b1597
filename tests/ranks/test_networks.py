"""Ranks on computers with addresses of their own, and cables that are pulled."""

import json
import os
import time

import pytest

from engram import RankFailed, Ranks
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, decides_when_voted, filled, steps_of, whos
from tests.ranks.networks import Switch, own_network
from tests.ranks.processes import answer, join, only_for_the_dead, spawn, tell, wait_for
from tests.saved.checkpoint_folders import tree
from tests.waiting import Limit


def main(rank, n, act, folder, *more):
    """A rank on a computer of its own."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    own_network()
    tell(folder / f"alone-{rank}", str(os.getpid()))
    wait_for((folder / f"connected-{rank}").exists)
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    distributed.init_process_group("gloo", init_method=f"tcp://{Switch.address(0)}:29400", rank=rank, world_size=n)
    ranks = Ranks.from_torch(timeout=60.0, host=Switch.address(0))
    said = act(ranks, rank, folder, *more)
    tell(folder / f"answer-{rank}.json", json.dumps(said))
    if rank == 0:  # it holds the store
        wait_for(lambda: all(answer(folder, other) for other in range(n)))
    os._exit(0)  # where a cable was pulled, gloo would wait for the others


def started(switch, n, act, folder, *more):
    folder.mkdir()
    every = spawn(n, main, act, folder, *more)
    for rank in range(n):
        wait_for(lambda rank=rank: answer_of(folder / f"alone-{rank}"))
        switch.connect(rank, int(answer_of(folder / f"alone-{rank}")))
        (folder / f"connected-{rank}").touch()
    return every


def answer_of(file):
    return file.read_text() if file.exists() else ""


@pytest.fixture
def switch():
    with Switch() as it:
        yield it


def save(ranks, rank, folder, root):
    rb = filled(rank)
    ck = checkpointer(root, rb, ranks, poll_every=1)
    if rank == 2:
        ck.request()
    return {"name": ck.poll(3).wait(60).name, "who": sorted(whos(steps_of(rb)))}


def restore(ranks, rank, folder, root):
    rb = buffer(2, 128)
    report = checkpointer(root, rb, ranks).restore()
    return {"who": sorted(whos(steps_of(rb))), "plan": report.dealt["plan"]}


def test_three_computers_save_two_restore(tmp_path, switch):
    one, two = tmp_path / "one", tmp_path / "two"
    root = tmp_path / "root"
    assert join(started(switch, 3, save, one, root)) == [0] * 3
    said = [answer(one, rank) for rank in range(3)]
    assert len({it["name"] for it in said}) == 1
    every = sorted(who for it in said for who in it["who"])
    with Switch() as another:
        assert join(started(another, 2, restore, two, root)) == [0] * 2
    loaded = [answer(two, rank) for rank in range(2)]
    assert sorted(who for it in loaded for who in it["who"]) == every
    assert len({it["plan"] for it in loaded}) == 1


def heard(act):
    """What a rank is told, and after how long."""
    started_at = time.monotonic()
    try:
        said = act()
    except RankFailed as error:
        said = str(error)
    return said, time.monotonic() - started_at


def cut_off(ranks, rank, folder, root):
    """A cable is pulled before a restore has planned; then a save and an agreement are tried."""
    import engram.checkpoint.ranks
    from engram.checkpoint import restore

    engram.checkpoint.ranks._ROLL_CALL_S = 0.5
    rb = filled(rank)
    before = whos(steps_of(rb))
    ck = checkpointer(root, rb, ranks)
    real = restore.reshard
    pulled = folder / "pulled"
    near = {2} if rank == 2 else {0, 1}
    only_for_the_dead(ranks, lambda: near if pulled.exists() else {0, 1, 2}, 1.0)
    if rank != 2:
        decides_when_voted(ck, near, 1.0)

    def planned(*args):
        (folder / f"there-{rank}").touch()
        wait_for(pulled.exists)
        if rank == 2:
            ranks._timeout = 2.0  # for the store
        return real(*args)

    restore.reshard = planned
    restored = heard(lambda: ck.restore(incomplete={}).name)
    assert whos(steps_of(rb)) == before
    saved = heard(lambda: ck.save(4).name)
    agreed = heard(lambda: ranks.max(1, 1.0))
    return {"restore": restored, "save": saved, "agree": agreed}


def test_a_cable_is_pulled_amid_a_restore(tmp_path, switch):
    """Nobody waits for ever, all say who it was, and what is saved is as it was."""
    one, two, root = tmp_path / "one", tmp_path / "two", tmp_path / "root"
    assert join(started(switch, 3, save, one, root)) == [0] * 3
    name, files = answer(one, 0)["name"], tree(root)
    with Switch() as another:
        every = started(another, 3, cut_off, two, root)
        wait_for(lambda: all((two / f"there-{rank}").exists() for rank in range(3)))
        another.pull(2)
        (two / "pulled").touch()
        assert join(every) == [0] * 3
    for rank in range(3):
        said = answer(two, rank)
        for what, (text, took) in said.items():
            assert ("rank 0" if rank == 2 else "rank 2") in text or (what, "[2]" in text) == ("save", True), (
                rank,
                said,
            )
            assert took < 50, said
    path, _ = Series(root).latest()
    assert path.name == name
    assert {file: it for file, it in tree(root).items() if file in files and "/" in file} == {
        file: it for file, it in files.items() if "/" in file
    }


def slow_save(ranks, rank, folder, root):
    """A cable is pulled when all write their shards: those and the votes are files."""
    ck = checkpointer(root, filled(rank), ranks)
    real = ck._job.write_parts

    def write(*args):
        (folder / f"there-{rank}").touch()
        wait_for((folder / "pulled").exists)
        if rank == 1:
            ranks._timeout = 2.0  # for the store
        return real(*args)

    ck._job.write_parts = write
    only_for_the_dead(ranks, lambda: {1} if rank == 1 else {0, 2}, 1.0)
    return {"name": ck.save(3).name, "agree": heard(lambda: ranks.max(1, 1.0))[0]}


def test_a_cable_is_pulled_amid_a_save_that_nobody_needs_any_more(tmp_path, switch):
    folder, root = tmp_path / "job", tmp_path / "root"
    every = started(switch, 3, slow_save, folder, root)
    wait_for(lambda: all((folder / f"there-{rank}").exists() for rank in range(3)))
    switch.pull(1)
    (folder / "pulled").touch()
    assert join(every) == [0] * 3
    path, _ = Series(root).latest()
    for rank in range(3):
        said = answer(folder, rank)
        assert said["name"] == path.name
        assert ("rank 0" if rank == 1 else "rank 1") in said["agree"]  # the cable is pulled


def watched(ranks, rank, folder, root):
    """A cable is pulled while all train; a watch is kept."""
    from engram.checkpoint import watchdog

    watchdog._SILENT_S = 1.5
    ck = checkpointer(root, filled(rank), ranks)
    try:
        with ck.guard(grace=60.0):
            ck.poll(1)
            if rank == 1:
                ranks._timeout = 2.0  # for the store
            (folder / f"there-{rank}").touch()
            limit = Limit(60)
            while limit.left_s() > 0:
                if Series(root).latest()[0] is not None:
                    raise ConnectionError("the network is gone")
                time.sleep(0.1)
    except ConnectionError:
        return {"over": True}
    return {"over": False}


def test_a_cable_is_pulled_while_a_watch_is_kept(tmp_path, switch):
    """Nobody is dead: all save their shards, and that is a checkpoint of all."""
    folder, root = tmp_path / "job", tmp_path / "root"
    every = started(switch, 3, watched, folder, root)
    wait_for(lambda: all((folder / f"there-{rank}").exists() for rank in range(3)))
    time.sleep(1.2)  # all gave heartbeats
    switch.pull(1)
    assert join(every) == [0] * 3
    assert [answer(folder, rank) for rank in range(3)] == [{"over": True}] * 3
    path, _ = Series(root).latest()
    assert path.name.endswith("crash1")
