"""What is saved when a rank fails, and how ranks leave the watch."""

import sys
import threading

import pytest

from engram import Ranks
from engram.checkpoint import watchdog as watch
from engram.saved import attempts
from tests.ranks.jobs import buffer, checkpointer, done, job, play
from tests.ranks.processes import wait_for


class Failed(Exception):
    pass


def crashes(root, *, heard):
    """A process that fails after ``heard(checkpointer)``, with a step that none of that knows; its next incarnation's restore."""
    rb = buffer(2, 64)
    play(rb, 0, 0, [3])
    ck = checkpointer(root, rb, Ranks.local())

    def train():
        with ck.guard():
            heard(ck)
            play(rb, 0, 1, [4])
            raise Failed

    with pytest.raises(Failed):
        train()
    return checkpointer(root, buffer(2, 64), Ranks.local())


HEARD = [
    pytest.param(lambda ck: ck.save(1000, user={"m": 1}), 1000, {"m": 1}, id="save"),
    pytest.param(lambda ck: ck.poll(1000, user={"m": 1}), 1000, {"m": 1}, id="poll"),
    pytest.param(lambda ck: (ck.save(900, user={"m": 1}), ck.poll(1000)), 1000, {"m": 1}, id="poll without user"),
    pytest.param(lambda ck: (ck.poll(900, user={"m": 1}), ck.save(1000, user={"m": 2})), 1000, {"m": 2}, id="both"),
    pytest.param(lambda ck: (ck.poll(1000), ck.save(900)), 1000, {}, id="an older save"),
    pytest.param(
        lambda ck: (ck.poll(1000, user={"m": 2}), ck.save(900, user={"m": 1})),
        1000,
        {"m": 2},
        id="user of an older save",
    ),
    pytest.param(
        lambda ck: (ck.poll(1000), ck.save(900, user={"m": 1})), 1000, {"m": 1}, id="user of an older save only"
    ),
    pytest.param(
        lambda ck: (ck.save(1000, user={"m": 1}), ck.poll(1000, user={"m": 2})),
        1000,
        {"m": 2},
        id="twice the same step",
    ),
    pytest.param(lambda ck: (ck.save(1000, user={"m": 1}), ck.save(1001), ck.restore(1000)), 1000, {"m": 1}, id="back"),
]


@pytest.mark.parametrize(("heard", "step", "user"), HEARD)
def test_a_crash_checkpoint_is_of_the_latest_step_and_user_state(tmp_path, heard, step, user):
    again = crashes(tmp_path, heard=heard)
    (crashed,) = [entry for entry in again.list() if "crash" in entry.name]
    assert (tmp_path / "LATEST").read_text().strip() == crashed.name
    assert crashed.step == step
    report = again.restore(name=crashed.name)
    assert (report.step, report.user, report.steps) == (step, user, 7)


def test_at_most_gives_nothing_that_is_newer(tmp_path):
    def heard(ck):
        for step in (100, 200, 300):
            ck.save(step)

    again = crashes(tmp_path, heard=heard)
    assert [(again.restore(at_most=step).step, "crash" in again.restore(at_most=step).name) for step in (299, 300)] == [
        (200, False),
        (300, True),
    ]


def test_what_was_told_is_a_copy(tmp_path):
    user = {"m": [1]}

    def heard(ck):
        ck.poll(5, user=user)
        user["m"].append(object())

    assert crashes(tmp_path, heard=heard).restore().user == {"m": [1]}


# ---- leaving ---------------------------------------------------------------------------------------------------------------


class Clock:
    """The seconds of watches. A tenth passes when each of them that goes on has looked: none is silent for being slow."""

    def __init__(self):
        self.watches = 2
        self._looked = {}
        self._lock = threading.Lock()
        self._looks = 0

    def monotonic(self):
        return self._looks / 10

    def look(self, watchdog, real):
        real(watchdog)
        with self._lock:
            self._looked[watchdog] = True
            going = [one for one in self._looked if not one._stop.is_set()]
            if len(self._looked) == self.watches and all(self._looked[one] for one in going):
                self._looks += 1
                self._looked.update(dict.fromkeys(going, False))

    def wait(self, seconds):
        until = self.monotonic() + seconds
        wait_for(lambda: self.monotonic() >= until)


@pytest.fixture
def quick(monkeypatch):
    """Signs of life come often, and their lack is noticed soon."""
    clock, real = Clock(), watch.Watchdog._look_for_life
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(watch, "_BEAT_S", 0.0)
    monkeypatch.setattr(watch, "_SILENT_S", 1.0)
    monkeypatch.setattr(watch.Watchdog, "_look_for_life", lambda watchdog: clock.look(watchdog, real))
    return clock


def inside(root, clock, act, timeout=60.0):
    """Two ranks, each of which calls ``act(rank)`` as the guarded training; for how long each was inside, by that clock."""

    def body(ranks, rank):
        rb = buffer(2, 64)
        play(rb, rank, 0, [3])
        ck = checkpointer(root, rb, ranks, timeout=timeout)
        started = clock.monotonic()
        try:
            with ck.guard(grace=0.5):
                act(rank)
        except SystemExit as left:
            assert left.code in (None, 0)  # noqa: PT017 - others must end in any case
        return clock.monotonic() - started

    return done(job(2, body))


@pytest.mark.parametrize("code", [None, 0])
@pytest.mark.parametrize("later", [0.0, 0.5])
def test_a_rank_that_exits_without_an_error_leaves(tmp_path, quick, code, later):
    """Before its first heartbeat, and after some; another rank that goes on does not think that it died."""

    def act(rank):
        quick.wait(later if rank else later + 1.5)
        if rank:
            sys.exit(code)

    took = inside(tmp_path, quick, act)
    assert all(1.4 < it < 50 for it in took)
    assert attempts.names(tmp_path) == []


def test_a_rank_that_dies_before_its_first_sign_of_life(tmp_path, quick):
    quick.watches = 1

    def body(ranks, rank):
        rb = buffer(2, 64)
        play(rb, rank, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks)
        if rank:
            ck._job.protocol.claim(5.0)  # as it enters; and nothing more comes
            return 0
        started = quick.monotonic()
        with ck.guard(grace=0.5):
            pass
        return quick.monotonic() - started

    assert 0.9 < done(job(2, body))[0] < 50
    (name,) = attempts.names(tmp_path)
    assert [vote.shard is not None for vote in attempts.votes(tmp_path / str(name))] == [True, False]


def test_nobody_waits_for_ever_for_others_to_leave(tmp_path, quick, caplog):
    """Who lives and does not leave is named; and does not think that the other one died, though that beats no more."""

    def act(rank):
        if rank:
            wait_for(lambda: "rank 0 left guard()" in caplog.text)
            quick.wait(2.0)

    took = inside(tmp_path, quick, act, timeout=1.0)
    assert 1.0 <= took[0] < took[1] - 1.9
    assert [it.message for it in caplog.records if it.levelname == "ERROR"] == [
        "rank 0 left guard() without ranks [1], 1 s after its end"
    ]
    assert attempts.names(tmp_path) == []
