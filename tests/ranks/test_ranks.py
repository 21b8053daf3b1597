"""Messages between ranks: all get the same, and nobody waits for ever."""

import threading
import time

import pytest

from engram import RankFailed, Ranks
from tests.ranks.jobs import done, job
from tests.ranks.processes import only_for_the_dead


def test_one_process_is_a_job_too():
    alone = Ranks.local()
    assert (alone.rank, alone.world) == (0, 1)
    assert alone.gather(b"x", 1.0) == [b"x"]
    assert alone.max(-7, 1.0) == -7
    assert alone.run_on_all("test", lambda: (1, b"done"), 1.0) == (1, [b"done"])
    with pytest.raises(KeyError, match="mine"):
        alone.run_on_all("test", lambda: {}["mine"], 1.0)


def test_threads_below_one():
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        Ranks.threads(0)


def test_everybody_gets_what_all_gave_in_the_order_of_ranks():
    def act(ranks, rank):
        return [ranks.gather(bytes([rank, i, 0, 255]), 60.0) for i in range(5)], ranks.max(10 - rank, 60.0)

    every = [[bytes([rank, i, 0, 255]) for rank in range(3)] for i in range(5)]
    assert done(job(3, act)) == [(every, 10)] * 3


def test_what_was_gathered_is_forgotten():
    ranks = Ranks.local()
    for i in range(50):
        ranks.gather(bytes([i]), 1.0)
    assert len(ranks._board.values) == 2


def test_the_store():
    first, second = Ranks.threads(2)
    assert first.get("a") is None
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert (first.add("n", 2), second.add("n", 3)) == (2, 5)
    assert second.wait(["a", "b"], 0.01) == [b"\x00\xff", None]
    second.forget("a")
    assert first.get("a") is None
    assert [first.claim("c", b"1"), second.claim("c", b"2"), second.get("c")] == [b"1"] * 3
    assert first.section() == second.section() != first.section()


def test_who_does_not_come_is_named_in_time():
    def act(ranks, rank):
        if rank in (1, 2):
            return None
        only_for_the_dead(ranks, lambda: {0, 3}, 1.0)
        started = time.monotonic()
        with pytest.raises(RankFailed, match=r"expected all 4 ranks within 1 s, got nothing from ranks 1, 2"):
            ranks.gather(b"", 1.0)
        return time.monotonic() - started

    took = done(job(4, act))
    assert max(took[0], took[3]) >= 1.0
    assert max(took[0], took[3]) < 50.0


def test_who_comes_too_late_does_not_go_on_without_the_others():
    """All that was given is there by then. It must fail as they did: the next exchange is everybody's again."""

    def act(ranks, rank):
        while rank == 1 and ranks.get("gather/0/over") is None:
            time.sleep(0.01)
        if rank != 1:
            only_for_the_dead(ranks, lambda: {0, 2}, 1.0)
        said = []
        for timeout in (1.0, 60.0):
            try:
                said.append(ranks.gather(bytes([rank]), timeout))
            except RankFailed as error:
                said.append(str(error))
            ranks.__dict__.pop("_wait", None)
        return said

    late = "expected all 3 ranks within 1 s, got nothing from rank 1."
    assert done(job(3, act)) == [[late, [b"\x00", b"\x01", b"\x02"]]] * 3


def test_who_is_slower_to_give_up_than_others_to_come_goes_on_with_them():
    """Whoever is first says how an exchange ended, and that holds for all."""
    first, second = Ranks.threads(2)
    first.set("gather/0/0", b"a")
    assert first.claim("gather/0/over", b"+") == b"+"
    second._wait = lambda keys, timeout, over: [None, b"b"]  # its time was over just before
    assert second.gather(b"b", 0.1) == [b"a", b"b"]


def test_who_comes_later_hears_at_once_that_it_is_over():
    """Its own time is not over for long; but rank 0, which holds the store, does not wait for that."""

    def act(ranks, rank):
        if rank == 2:
            return None
        if rank == 0:
            only_for_the_dead(ranks, lambda: {0, 1}, 0.3)
        started = time.monotonic()
        with pytest.raises(RankFailed, match=r"within 0\.3 s, got nothing from rank 2\.$"):
            ranks.gather(b"", 0.3 if rank == 0 else 80.0)
        return time.monotonic() - started

    took = done(job(3, act))
    assert took[1] < 60


def test_rank_0_returns_last():
    """Its process holds the store, so it may end only when no other rank looks at it any more."""
    first, second, third = Ranks.threads(3)
    go = threading.Event()
    looks = type(third).claim

    def claim(*arguments):
        assert go.wait(60)
        return looks(third, *arguments)

    third.claim = claim
    threads = [threading.Thread(target=ranks.gather, args=(b"", 30.0), daemon=True) for ranks in (first, second, third)]
    for thread in threads:
        thread.start()
    threads[1].join(60)
    threads[0].join(0.2)
    assert [thread.is_alive() for thread in threads] == [True, False, True]
    go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_failure_of_one_is_everybodys_with_the_same_words():
    def act(ranks, rank):
        def part():
            if rank == 1:
                raise OSError("no space")
            return None, b""

        with pytest.raises(RankFailed) as caught:
            ranks.run_on_all("work", part, 60.0)
        return str(caught.value), type(caught.value.__cause__)

    said = done(job(3, act))
    assert said == [("work: rank 1: OSError: no space", OSError if rank == 1 else type(None)) for rank in range(3)]


def test_a_failure_that_is_the_same_everywhere_keeps_its_class():
    def act(ranks, _):
        def part():
            raise ValueError("expected 1, got 2")

        ranks.run_on_all("work", part, 60.0)

    assert [(type(error), str(error)) for error in job(3, act)] == [(ValueError, "expected 1, got 2")] * 3


def test_an_interrupt_stays_one_and_others_hear_of_it():
    def act(ranks, rank):
        def part():
            if rank == 0:
                raise KeyboardInterrupt
            return None, b""

        ranks.run_on_all("work", part, 60.0)

    first, second = job(2, act)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RankFailed)
    assert "rank 0: KeyboardInterrupt" in str(second)
