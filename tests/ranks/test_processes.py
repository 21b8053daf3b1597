"""Real processes with gloo: saving, restoring, requests, and deaths in each phase."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from engram import RankFailed
from engram.saved.checkpoints import Checkpoint
from engram.saved.series import Series
from tests import fresh, interpreter
from tests.ranks.jobs import buffer, checkpointer, done, filled, job, play, steps_of, whos
from tests.ranks.processes import answer, join, meet, only_for_the_dead, run, start, wait_for
from tests.twins import contents


def save(ranks, rank, folder):
    rb = filled(rank)
    report = checkpointer(folder / "root", rb, ranks).save(3)
    return {"name": report.name, "who": sorted(whos(steps_of(rb))), "steps": report.steps}


def restore(ranks, rank, folder, root):
    rb = buffer(2, 128)
    report = checkpointer(root, rb, ranks).restore()
    return {"who": sorted(whos(steps_of(rb))), "plan": report.dealt and report.dealt["plan"]}


def test_four_processes_save_three_restore(tmp_path):
    said, codes = run(4, save, tmp_path / "one")
    assert codes == [0] * 4
    assert len({it["name"] for it in said}) == 1
    every = sorted(who for it in said for who in it["who"])
    assert {it["steps"] for it in said} == {len(every)}
    loaded, codes = run(3, restore, tmp_path / "two", tmp_path / "one" / "root")
    assert codes == [0] * 3
    assert sorted(who for it in loaded for who in it["who"]) == every
    assert len({it["plan"] for it in loaded}) == 1


def ends_at_once(ranks, rank, folder, root, what):
    """Rank 0 ends as soon as it may; the others are slow to look for the last time."""
    rb = buffer(2, 128) if what == "restore" else filled(rank)
    ck = checkpointer(root, rb, ranks)
    if rank:
        ask = ranks._ask

        def slowly(act):
            time.sleep(0.05)
            return ask(act)

        ranks._ask = slowly
    if what == "restore":
        ck.restore()
    elif what == "save":
        ck.save(3)
    elif what == "guard":
        with ck.guard():
            ck.poll(1)
    else:
        if rank == 0:
            ck._job.write_shard = _no_space
        try:
            ck.save(3)
        except RankFailed as error:
            (folder / f"error-{rank}").write_text(str(error))
    (folder / f"ended-{rank}").touch()
    os._exit(0)  # no interpreter, thread or handler is left to answer others


def _no_space(*_):
    raise OSError("no space")


@pytest.mark.parametrize("what", ["restore", "save", "guard", "a save that fails"])
def test_a_rank_may_end_at_once(tmp_path, what):
    """Nothing that ranks do together may need rank 0, whose process holds the store, once that rank has returned."""
    if what == "restore":
        _, codes = run(3, save, tmp_path / "one")
        assert codes == [0] * 3
    folder = tmp_path / "job"
    every = start(3, ends_at_once, folder, tmp_path / "one" / "root", what)
    assert join(every, 60) == [0] * 3
    assert all((folder / f"ended-{rank}").exists() for rank in range(3))
    assert not list((tmp_path / "one" / "root").glob("CRASH-*"))
    if what == "a save that fails":
        assert {"no space" in (folder / f"error-{rank}").read_text() for rank in range(3)} == {True}


def primitives(ranks, rank, folder):
    ranks.set(f"k{rank}", bytes(range(256)))
    given = ranks.gather(bytes([rank]) * 3, 60.0)
    seen = ranks.wait(["k0", "k1"], 60.0)
    return [
        [list(one) for one in given],
        [one == bytes(range(256)) for one in seen],
        ranks.max(rank * 10, 60.0),
        ranks.get("nothing"),
        ranks.max(ranks.add("n", 1), 60.0),
    ]


def test_messages(tmp_path):
    said, codes = run(2, primitives, tmp_path / "job")
    assert codes == [0, 0]
    assert said == [[[[0] * 3, [1] * 3], [True, True], 10, None, 2]] * 2


def dies_or_stops(ranks, rank, folder, how):
    import engram.checkpoint.ranks
    from engram import RankFailed

    engram.checkpoint.ranks._ROLL_CALL_S = 1.0
    only_for_the_dead(ranks, lambda: {0, 2}, 0.5)
    if rank == 1:
        if how == "dies":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    said = []
    for act in (lambda: ranks.max(1, 1.0), lambda: ranks.gather(b"", 0.5)):
        try:
            act()
        except RankFailed as error:
            said.append(str(error))
    took = time.monotonic() - started
    if rank == 0:
        wait_for((folder / "answer-2.json").exists)  # it holds the store
    return {"said": said, "took": took}


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_who_failed_is_named_in_time(tmp_path, how):
    every = start(3, dies_or_stops, tmp_path / "job", how)
    wait_for(lambda: answer(tmp_path / "job", 0) and answer(tmp_path / "job", 2))
    every[1].kill()
    join(every)
    for rank in (0, 2):
        said = answer(tmp_path / "job", rank)
        assert len(said["said"]) == 2
        assert all("rank 1" in text for text in said["said"])
        assert said["took"] < 50


def asked_by_a_signal(ranks, rank, folder):
    ck = checkpointer(folder / "root", filled(rank), ranks, poll_every=5)
    with ck.listen_signals():
        (folder / f"ready-{rank}").touch()
        for step in range(1, 20_000):
            handle = ck.poll(step)
            if handle is not None:
                return [step, handle.wait(60).name]
            time.sleep(0.005)
    return None


def test_sigusr2_to_one_process_saves_all(tmp_path):
    folder = tmp_path / "job"
    every = start(3, asked_by_a_signal, folder)
    wait_for(lambda: all((folder / f"ready-{rank}").exists() for rank in range(3)))
    os.kill(every[2].pid, signal.SIGUSR2)
    assert join(every) == [0, 0, 0]
    said = [answer(folder, rank) for rank in range(3)]
    assert said[0] == said[1] == said[2]
    with Checkpoint(folder / "root" / said[0][1]) as checkpoint:
        assert checkpoint.manifest.world == 3


def in_a_collective(ranks, rank, folder, how):
    """Rank 1 fails while others wait for it in an all-reduce of the default group."""
    from torch import distributed

    from engram.checkpoint import watchdog

    watchdog._SILENT_S = 100.0  # what a slow rank does is no silence
    ck = checkpointer(folder / "root", filled(rank), ranks, poll_every=5)
    with ck.guard(grace=60.0):
        for step in range(1, 11):
            ck.poll(step)
        (folder / f"ready-{rank}").touch()
        if rank == 1:
            if how == "raises":
                raise ZeroDivisionError("the original error")
            if how == "exits":
                sys.exit(23)
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        # With no wait of its own: only the death of the peer ends it.
        try:
            distributed.all_reduce(torch.zeros(1))
        finally:
            watchdog._SILENT_S = 1.0  # now one is dead


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_fails_while_others_wait_in_a_collective(tmp_path, how):
    folder = tmp_path / "job"
    every = start(3, in_a_collective, folder, how)
    codes = join(every)
    assert codes[1] == (1 if how == "raises" else 23)
    if how == "raises":
        assert answer(folder, 1)["error"] == "ZeroDivisionError: the original error"
    path, _ = Series(folder / "root").latest()
    assert path is not None
    assert path.name.endswith("crash1")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.manifest.world == 3
        assert checkpoint.manifest.trigger == "crash"
        assert checkpoint.manifest.step == 10
    expected = set().union(*(whos(steps_of(filled(rank))) for rank in range(3)))
    with warnings.catch_warnings(action="error"):
        loaded = done(job(2, lambda ranks, rank: restored(ranks, folder / "root")))
    assert set().union(*loaded) == expected


def restored(ranks, root, **more):
    rb = buffer(2, 128)
    checkpointer(root, rb, ranks).restore(**more)
    return whos(steps_of(rb))


def test_a_rank_is_killed_and_what_is_left_loads_on_request_only(tmp_path):
    folder = tmp_path / "job"
    every = start(3, in_a_collective, folder, "is killed")
    codes = join(every)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == codes[2] == 1  # their all-reduce failed, and that is what they end with
    root = folder / "root"
    with pytest.raises(RuntimeError, match=r"undecided: 2 of 3 ranks voted for it\. allow_partial=True"):
        done(job(1, lambda ranks, rank: restored(ranks, root)))
    expected = set().union(*(whos(steps_of(filled(rank))) for rank in (0, 2)))
    assert done(job(1, lambda ranks, rank: restored(ranks, root, allow_partial=True))) == [expected]


def stuck(ranks, rank, folder):
    """The main thread of rank 1 is in C, where no handler runs."""
    import ctypes

    ck = checkpointer(folder / "root", filled(rank), ranks, poll_every=5)
    with ck.guard(grace=60.0):
        if rank == 1:
            libc = ctypes.CDLL(None)
            lock, never = (ctypes.c_char * 64)(), (ctypes.c_char * 64)()

            def there():
                libc.pthread_mutex_lock(lock)  # the main thread gives it back where it waits, and never gets it again
                (folder / f"ready-{rank}").touch()

            libc.pthread_mutex_lock(lock)
            threading.Thread(target=there, daemon=True).start()
            libc.pthread_cond_wait(never, lock)  # for ever; signals do not end it
        else:
            (folder / f"ready-{rank}").touch()
            time.sleep(300)


def test_sigterm_with_the_main_thread_stuck_in_c(tmp_path):
    folder = tmp_path / "job"
    every = start(2, stuck, folder)
    wait_for(lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)))
    os.kill(every[1].pid, signal.SIGTERM)
    wait_for(lambda: Series(folder / "root").latest()[0] is not None)
    every[1].join(60)
    assert every[1].exitcode == 143
    os.kill(every[0].pid, signal.SIGTERM)
    every[0].join(60)
    assert every[0].exitcode == -signal.SIGTERM
    with Checkpoint(Series(folder / "root").latest()[0]) as checkpoint:
        assert checkpoint.manifest.world == 2


def trains(ranks, rank, folder, steps):
    """Collectives of a training in the default group, and saves in the background all the time."""
    from torch import distributed

    rb = buffer(2, 64)
    ck = checkpointer(folder / "root", rb, ranks, keep=2)
    gradient, handles, beside = torch.zeros(1000), [], 0
    write, gates = ck._job.write_parts, [threading.Event() for _ in range(steps)]
    nexts = iter(gates)

    def beside_one(*args):
        gate = next(nexts, None)
        assert gate is None or gate.wait(60)
        return write(*args)

    ck._job.write_parts = beside_one
    for step in range(1, steps + 1):
        play(rb, rank, step % 2, [3], first=step)
        handles.append(ck.save(step, wait=False))
        for _ in range(4):
            gradient += step * (rank + 1)
            distributed.all_reduce(gradient, op=distributed.ReduceOp.MAX)
            beside += not handles[-1].done
            gates[step - 1].set()
    last = ck.save(steps + 1)
    meet(folder, "over", ranks)  # rank 0 holds the store
    names = [handle.wait(60).name for handle in handles]
    return {"names": names, "last": last.name, "gradient": gradient.tolist()[0], "beside": beside, "rows": last.steps}


def test_fifty_saves_in_a_row_beside_the_collectives_of_a_training(tmp_path):
    said, codes = run(2, trains, tmp_path / "job", 50)
    assert codes == [0, 0]
    assert said[0]["names"] == said[1]["names"]
    assert len(set(said[0]["names"])) == 50
    assert said[0]["gradient"] == said[1]["gradient"] == sum(4 * 2 * step for step in range(1, 51))
    assert min(it["beside"] for it in said) >= 50, "a save that did not go on beside a collective"
    root = tmp_path / "job" / "root"
    path, problems = Series(root).latest()
    assert (path.name, problems) == (said[0]["last"], [])
    expected = done(job(2, lambda ranks, _: restored(ranks, root, incomplete={"headless": "keep"})))
    assert sum(map(len, expected)) == said[0]["rows"]


def fails_then_loads(n, rank, folder):
    """What a launcher starts: a training that loads what there is, and of which rank 1 fails in the first run."""
    import torch
    from torch import distributed

    from engram import Ranks

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ranks = Ranks.from_torch(timeout=60.0)
    rb = buffer(2, 128)
    ck = checkpointer(folder / "root", rb, ranks, poll_every=1)
    first = Series(folder / "root").latest()[0] is None
    if not first:
        ck.restore()
    found = sorted(whos(steps_of(rb))) if not first else []
    (folder / f"found-{n}-{rank}.json").write_text(json.dumps(found))
    with ck.guard(grace=60.0):
        for step in range(1, 4):
            play(rb, rank + 10 * n, step % 2, [4], first=step)
            ck.poll(step)
        if first and rank == 1:
            raise ZeroDivisionError("the original error")
        distributed.all_reduce(torch.zeros(1))
    ck.save(10)
    meet(folder, f"over-{n}", ranks)


def launched(n, folder):
    """The exit code of torchrun, and what it said."""
    script = folder / "train.py"
    script.write_text(
        "import os, pathlib\nfrom tests.ranks.test_processes import fails_then_loads\n"
        f"fails_then_loads({n}, int(os.environ['RANK']), pathlib.Path({str(folder)!r}))\n"
    )
    command = [
        interpreter.executable(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={n}",
        str(script),
    ]
    here = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stderr


def test_a_launcher_starts_fewer_after_a_failure(tmp_path):
    code, said = launched(2, tmp_path)
    assert code == 1
    assert "ZeroDivisionError: the original error" in said, said
    path, _ = Series(tmp_path / "root").latest()
    assert path.name.endswith("crash1")
    code, said = launched(1, tmp_path)
    assert code == 0, said
    found = json.loads((tmp_path / "found-1-0.json").read_text())
    assert len(found) == 2 * 3 * 4
    assert {who // 100_000_000 for who in found} == {20, 21}
    path, _ = Series(tmp_path / "root").latest()
    assert path.name.startswith("ckpt-000000000010-")


def what_is_loaded(ranks, root):
    """The plan, and a digest of all that there is then; but for what a process mixes into keys, as threads have no rank of theirs."""
    rb = buffer(3, 60, seed=0)
    plan = checkpointer(root, rb, ranks).restore().dealt["plan"]
    found = contents(rb)
    found["_rng"] = found["_rng"][:2]
    return plan, hashlib.sha256(repr(found).encode()).hexdigest()


def loads_by_another_seed(rank, folder, root):
    """A rank in a process of its own hash seed, to which folders are listed in another order."""
    import random

    from torch import distributed

    from engram import Ranks

    real = os.listdir

    def shuffled(*args):
        names = list(real(*args))
        random.shuffle(names)
        return names

    os.listdir = shuffled
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks = Ranks.from_torch(timeout=60.0)
    said = what_is_loaded(ranks, root)
    (folder / f"said-{rank}.json").write_text(json.dumps([hash("a string"), *said]))
    meet(folder, "over", ranks)


def test_neither_hash_seeds_nor_the_order_of_folders_change_what_is_loaded(tmp_path):
    """Two processes of different seeds, beside threads here: the same plan, and the same bits on each rank."""
    root = tmp_path / "root"

    def act(ranks, rank):
        rb = buffer(3, 60)
        for lane in range(3):
            play(rb, rank, lane, [3, 5, 2, 7, 1, 4])
        checkpointer(root, rb, ranks).save(0)

    done(job(3, act))
    program = """
        import pathlib, sys
        sys.path.insert(0, packages)
        from tests.ranks.test_processes import loads_by_another_seed
        loads_by_another_seed(0, pathlib.Path(folder), pathlib.Path(root))
    """
    first = fresh.start(program, packages=str(Path(__file__).parents[2]), folder=str(tmp_path), root=str(root))
    second = multiprocessing.get_context("fork").Process(target=loads_by_another_seed, args=(1, tmp_path, root))
    second.start()
    assert join([second], 60) == [0]
    assert first.wait() == 0, first.err
    (one, other), *said = zip(
        *(json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)), strict=True
    )
    assert one != other
    here = done(job(2, lambda ranks, _: what_is_loaded(ranks, root)))
    assert list(zip(*said, strict=True)) == here
    assert len(set(here)) == 2  # of one plan, other rows
    assert len({plan for plan, _ in here}) == 1


def replaced(ranks, rank, folder, root):
    """A job that another one replaced at the same root."""
    ck = checkpointer(root, filled(rank), ranks)
    ck.save(1)
    (folder / f"saved-{rank}").touch()
    wait_for((folder / "go").exists)
    try:
        ck.save(2)
    finally:
        (folder / f"tried-{rank}").touch()
        wait_for((folder / f"tried-{1 - rank}").exists)  # rank 0 holds the store


def test_two_jobs_at_one_root(tmp_path):
    root = tmp_path / "root"
    every = start(2, replaced, tmp_path / "one", root)
    wait_for(lambda: all((tmp_path / "one" / f"saved-{rank}").exists() for rank in range(2)))
    names = done(job(2, lambda ranks, rank: checkpointer(root, filled(rank), ranks).save(5).name))
    (tmp_path / "one" / "go").touch()
    join(every)
    assert all("later incarnation" in answer(tmp_path / "one", rank)["error"] for rank in range(2))
    assert Series(root).latest()[0].name == names[0]


def closes(ranks, rank, folder):
    ranks.gather(b"", 60.0)
    meet(folder, "closed", ranks)
    ranks.close()
    return [thread.name for thread in threading.enumerate()]


def test_no_thread_is_left_that_the_end_of_the_interpreter_could_stop(tmp_path):
    said, codes = run(2, closes, tmp_path / "job")
    assert codes == [0, 0]
    assert all("engram-ranks" not in names for names in said), said
