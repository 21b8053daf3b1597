"""Bad arguments on one rank: all hear of them, and the next call is in step again."""

import numpy as np
import pytest

from engram import RankFailed, Ranks
from engram.checkpoint.save import Job, SaveAttempt
from engram.saved import attempts
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, done, job, play
from tests.waiting import Limit

WRONG = [{"step": -1}, {"step": True}, {"step": 2.0}, {"user": 5}, {"user": {("a", "b"): 1}}, {"user": {"a": 1e400}}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_argument_of_one_rank_is_told_to_all_and_the_next_save_is_made(tmp_path, rank, wrong):
    def act(ranks, here):
        rb = buffer()
        play(rb, here, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks)
        limit = Limit(50)
        with pytest.raises(RankFailed) as failed:
            ck.save(**({"step": 1} | (wrong if here == rank else {})))
        limit.check("going on")
        return str(failed.value).partition("rank ")[2], ck.save(2).name

    said = done(job(2, act))
    assert said[0] == said[1]
    assert said[0][0].startswith(f"{rank}: {'TypeError' if wrong.get('user') == 5 else ''}")
    assert next(iter(wrong)) in said[0][0]
    assert Series(tmp_path).latest()[0].name == said[0][1]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_one_process_alone_raises_at_once_and_saves_again(tmp_path, wrong, wait):
    ck = checkpointer(tmp_path, buffer(), Ranks.local())
    play(ck._job.buffer, 0, 0, [3])
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        ck.save(**({"step": 1} | wrong), wait=wait)
    assert attempts.names(tmp_path) == []
    saved = ck.save(2, wait=False)
    assert saved.wait(60).step == 2


@pytest.mark.parametrize("where", ["prepare", "snapshot", "_write"])
@pytest.mark.parametrize("wait", [True, False])
def test_whatever_goes_wrong_the_handle_ends(tmp_path, monkeypatch, where, wait):
    """Also interrupts, and a thread that cannot start: the next save would wait for it for ever."""
    ck = checkpointer(tmp_path, buffer(), Ranks.local())
    play(ck._job.buffer, 0, 0, [3])

    def fails(error):
        def act(*_):
            raise error

        return act

    def saves(wait):
        said = ck.save(1, wait=wait)
        said.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(Job if where == "snapshot" else SaveAttempt, where, fails(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            saves(wait)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", fails(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            saves(wait=False)
    assert ck._current.done
    assert ck.save(2).step == 2


def test_numbers_of_numpy_are_steps(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks, every_steps=5)
        kind = np.int64 if rank else int
        saved = [handle.wait(60).step for step in range(1, 11) if (handle := ck.poll(kind(step)))]
        return [*saved, ck.save(kind(11)).step]

    assert done(job(2, act)) == [[5, 10, 11]] * 2
    assert [name.step for name in attempts.names(tmp_path)] == [11, 10, 5]


@pytest.mark.stress(sample=9)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", [3, 8, 10])  # amid; where all agree; where a save is due
def test_a_bad_argument_of_poll_leaves_all_ranks_in_step(tmp_path, rank, wrong, at):
    """That rank's call counts: it raises there, and all save at the same steps afterwards."""

    def act(ranks, here):
        rb = buffer()
        play(rb, here, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks, every_steps=5, poll_every=4, on_failure="raise", timeout=60.0)
        saved = []
        for number in range(1, 25):
            if number == 17:
                ck.request()
            arguments = {"step": 2 * number}  # not every trainer counts by one
            if number == at and here == rank:
                with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
                    ck.poll(**(arguments | wrong))
                continue
            handle = ck.poll(**arguments)
            if handle is not None:
                saved.append(handle.wait(60).step)
        return ck._schedule._polls, saved

    said = done(job(2, act))
    assert said[0] == said[1]
    due = [step for step in range(2, 49, 2) if step // 5 > (step - 2) // 5]
    assert said[0] == (24, [step + 2 * (step == 2 * at) for step in due])
