"""Whoever asks on whichever rank: all ranks save at one step, within one interval."""

import os
import signal
import threading
import time
import warnings

import pytest

from engram import RankFailed, Ranks
from engram.saved import attempts
from engram.saved.checkpoints import Checkpoint
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, done, job, play
from tests.waiting import Limit


def train(ranks, rank, root, steps, *, ask=None, every=None, poll_every=5, **more):
    """Steps of a training, in which rank ``ask[0]`` asks before step ``ask[1]``; the steps at which this rank saved."""
    rb = buffer()
    play(rb, rank, 0, [3])
    ck = checkpointer(root, rb, ranks, every_steps=every, poll_every=poll_every, **more)
    saved = []
    for step in range(1, steps + 1):
        if ask == (rank, step):
            ck.request()
        handle = ck.poll(step)
        if handle is not None:
            saved.append((step, handle.wait(60).name))
    return saved


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_a_request_of_any_rank_reaches_all_within_one_interval(tmp_path, asking):
    saved = done(job(3, lambda *args: train(*args, 20, ask=(asking, 7)), tmp_path))
    assert saved[0] == saved[1] == saved[2]
    assert [step for step, _ in saved[0]] == [10]
    with Checkpoint(tmp_path / saved[0][0][1]) as checkpoint:
        assert checkpoint.manifest.steps_by_rank == (10, 10, 10)


def test_nobody_asked(tmp_path):
    assert done(job(2, lambda *args: train(*args, 20), tmp_path)) == [[], []]


def test_every_so_many_steps_whatever_the_interval_of_agreements(tmp_path):
    """One exchange for each save, and none in between."""

    def act(ranks, rank):
        real, exchanges = ranks.max, []
        ranks.max = lambda *args: exchanges.append(1) or real(*args)
        return train(ranks, rank, tmp_path, 20, every=6, poll_every=100), len(exchanges)

    saved = done(job(2, act))
    assert saved[0] == saved[1]
    assert [step for step, _ in saved[0][0]] == [6, 12, 18]
    assert saved[0][1] == 3


def test_what_is_due_while_a_save_goes_on_waits_and_stops_nobody(tmp_path):
    """Rank 1 still writes when the next save is due: rank 0, which is done, waits with it, for no longer than needed."""
    gate = threading.Event()

    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, every_steps=5, poll_every=100)
        play(ck._job.buffer, rank, 0, [3])
        if rank == 1:
            real = ck._job.saved
            ck._job.saved = lambda *args: gate.wait(60) and real(*args)
        first = ck.poll(5)
        if rank == 0:
            first.wait(60)
        limit = Limit(50)
        assert [ck.poll(step) for step in range(6, 13)] == [None] * 7
        limit.check("going on")
        gate.set()
        first.wait(60)
        ranks.gather(b"", 60.0)
        second = ck.poll(13)
        assert second is not first
        return [first.wait(60).step, second.wait(60).step, ck.poll(14)]

    assert done(job(2, act)) == [[5, 13, None]] * 2


def test_one_process_does_not_get_a_handle_of_a_save_that_it_did_not_begin(tmp_path):
    gate = threading.Event()
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), every_steps=1)
    play(ck._job.buffer, 0, 0, [3])
    real = ck._job.write_parts
    ck._job.write_parts = lambda *args: gate.wait(60) and real(*args)
    handles = [ck.poll(step) for step in range(1, 6)]
    assert handles[1:] == [None] * 4
    gate.set()
    handles[0].wait(60)
    assert ck.poll(6).wait(60).step == 6
    assert [name.step for name in attempts.names(tmp_path)] == [6, 1]


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_failure_that_ranks_hear_of_at_different_steps_does_not_part_them(tmp_path, on_failure):
    """Whatever ``poll`` raises, also a warning that is made an error: its call counts, and what is due begins."""

    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, every_steps=5, poll_every=3, on_failure=on_failure, keep=9)
        play(ck._job.buffer, rank, 0, [3])
        shard, make, late, told = ck._job.write_shard, ck._attempt, threading.Event(), {}

        def write_shard(attempt, step, *more):
            if step == 5:
                raise OSError("no space")
            return shard(attempt, step, *more)

        def ended_late(asked):
            attempt = make(asked)
            write = attempt._write

            def late_write():
                try:
                    return write()
                finally:
                    late.wait(60)

            attempt._write = late_write
            return attempt

        ck._job.write_shard, ck._attempt = write_shard, ended_late
        for step in range(1, 21):
            if step == (6 if rank == 0 else 8):
                late.set()
            if late.is_set() and ck._current is not None:
                ck._current.join()
            if step > 8:
                ranks.gather(b"", 60.0)  # no save goes on
            if step == 12 and rank == 1:
                ck.request()
            try:
                ck.poll(step)
            except (RankFailed, UserWarning) as error:
                told[step] = str(error)
        ck._current.wait(60)
        return told

    with warnings.catch_warnings(action="error"):
        told = done(job(2, act))
    assert [list(it) for it in told] == [[6], [8]]
    assert all("no space" in it for texts in told for it in texts.values())
    good = [name.step for name in attempts.names(tmp_path) if Series(tmp_path).look(name) is None]
    assert good == [20, 15, 12, 10]


def test_every_so_many_minutes_of_rank_0s_clock(tmp_path):
    """Rank 1's clock goes otherwise, and nobody asks it. What is due waits for the next agreement, and for a save that goes on."""

    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, every_minutes=10, poll_every=5)
        play(ck._job.buffer, rank, 0, [3])
        later = {(1, 2): 3600, (0, 7): 300, (0, 11): 300, (0, 19): 600}
        saved = []
        for step in range(1, 26):
            ck._schedule._began -= later.get((rank, step), 0)
            if (handle := ck.poll(step)) is not None:
                handle.wait(60)
                saved.append(step)
            ranks.gather(b"", 60.0)  # no save goes on at the next agreement
        return saved

    assert done(job(2, act)) == [[15, 20]] * 2


def test_minutes_count_from_the_last_save_and_the_restore(tmp_path):
    def made():
        ck = checkpointer(tmp_path, buffer(), Ranks.local(), every_minutes=1, poll_every=1)
        play(ck._job.buffer, 0, 0, [3])
        ck._schedule._began -= 61
        return ck

    assert made().poll(1).wait(60)
    for act in (lambda ck: ck.save(2), lambda ck: ck.restore()):
        ck = made()
        act(ck)
        assert ck.poll(3) is None
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), every_minutes=0.001, poll_every=1)
    play(ck._job.buffer, 0, 0, [3])
    time.sleep(0.07)
    assert ck.poll(5).wait(60)


def test_after_a_restore_the_next_save_is_due_one_period_later(tmp_path):
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), every_steps=10)
    play(ck._job.buffer, 0, 0, [3])
    ck.save(25)
    again = checkpointer(tmp_path, buffer(), Ranks.local(), every_steps=10)
    again.restore()
    assert [step for step in range(26, 45) if (h := again.poll(step)) and h.wait(60)] == [30, 40]


def test_two_requests_are_one_save(tmp_path):
    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, poll_every=1)
        play(ck._job.buffer, rank, 0, [3])
        assert ck.requests.ask() is ck.requests.ask()
        ck.request()
        first = ck.poll(1)
        first.wait(60)
        return ck.poll(2)

    assert done(job(2, act)) == [None, None]
    assert len(attempts.names(tmp_path)) == 1


def test_a_request_while_a_save_goes_on_waits_and_is_not_lost(tmp_path):
    gate = threading.Event()

    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks, poll_every=1)
        play(ck._job.buffer, rank, 0, [3])
        if rank == 1:
            real = ck._job.write_parts
            ck._job.write_parts = lambda *args: gate.wait(60) and real(*args)
        ck.request()
        first = ck.poll(1)
        ck.request()
        assert ck.poll(2) is None
        ranks.gather(b"", 60.0)
        gate.set()
        first.wait(60)
        ranks.gather(b"", 60.0)
        return ck.poll(3).wait(60).step

    assert done(job(2, act)) == [3, 3]


def test_a_failed_save_warns_or_raises_at_the_next_poll(tmp_path):
    def act(ranks, rank, on_failure):
        ck = checkpointer(tmp_path, buffer(), ranks, every_steps=1, poll_every=100, on_failure=on_failure)
        ck._job.write_parts = lambda *_: (_ for _ in ()).throw(OSError("no space"))
        handle = ck.poll(1)
        while not handle.done:
            time.sleep(0.01)
        ck._schedule._options = ck._schedule._options._replace(every_steps=None)
        ck.poll(2)

    for error in job(2, act, "raise"):
        assert "no space" in str(error)
    with pytest.warns(UserWarning, match="poll: there is no new checkpoint: .*no space"):
        done(job(2, act, "warn"))


def test_who_asks_while_a_save_begins_joins_it(tmp_path):
    """Between the moment at which nothing is asked for any more, and the one that is saved, there is none."""
    ck = checkpointer(tmp_path, buffer(), Ranks.local(), poll_every=1)
    play(ck._job.buffer, 0, 0, [3])
    asked = [ck.requests.ask(join=True)]
    for place, name in ((ck, "_start"), (ck._job, "snapshot")):
        real = getattr(place, name)

        def act(*args, real=real, **more):
            asked.append(ck.requests.ask(join=True))
            return real(*args, **more)

        setattr(place, name, act)
    ck.poll(1).wait(60)
    assert {it.id for it in asked} == {asked[0].id}
    assert len(asked) == 3
    assert ck.poll(2) is None


def test_sigusr2_asks_and_the_old_handler_is_still_called(tmp_path):
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append(1))
    try:
        ck = checkpointer(tmp_path, buffer(), Ranks.local(), poll_every=1)
        play(ck._job.buffer, 0, 0, [3])
        with ck.listen_signals():
            assert ck.poll(1) is None
            os.kill(os.getpid(), signal.SIGUSR2)
            assert ck.poll(2).wait(60).step == 2
            assert ck.poll(3) is None
        assert heard == [1]
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [1, 1]
        assert not ck.requests.any
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_many_saves_in_a_row_beside_agreements(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        ck = checkpointer(tmp_path, rb, ranks, every_steps=1, poll_every=3, keep=2)
        for step in range(1, 21):
            play(rb, rank, 0, [3], first=step)
            ck.poll(step)
            ranks.max(step, 60.0)
        ck.save(21)

    done(job(2, act))
    good = [name.step for name in attempts.names(tmp_path) if Series(tmp_path).look(name) is None]
    assert (good[0], len(good)) == (21, 2)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("every_steps", 0),
        ("poll_every", 0),
        ("on_failure", "stop"),
        ("timeout", 0),
        ("every_minutes", 0),
        ("every_minutes", float("nan")),
    ],
)
def test_arguments_out_of_range(tmp_path, argument, value):
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        checkpointer(tmp_path, buffer(), Ranks.local(), **{argument: value})


def test_what_was_told_of_attempts_is_forgotten(tmp_path):
    """Also of those that failed, once one is made."""

    def act(ranks, rank):
        ck = checkpointer(tmp_path, buffer(), ranks)
        play(ck._job.buffer, rank, 0, [3])
        for step in range(1, 8):
            try:
                ck.save(step if rank or step % 3 else -1)
            except RankFailed:
                assert step % 3 == 0
        ranks.gather(b"", 60.0)
        return [key for key in ranks._board.values if "attempt/" in key]

    assert done(job(2, act)) == [[], []]
    assert len(attempts.names(tmp_path)) == 3
