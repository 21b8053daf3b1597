"""How far long work is: a bar where there is somebody to see it, lines in the log, and calls of the user's function."""

import contextlib
import itertools
import logging
import threading

import pytest
import torch

from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    Progress,
    ReplayBuffer,
)
from engram._support import progress as _progress
from engram.saved.inspection import verify
from tests.serving.servers import serving

KB = 1024


def lefts(*numbers):
    yield from numbers


class Clock:
    """A clock that stands, until it is told how late it is."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(_progress, "_clock", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="engram")
    return lambda: [record.getMessage() for record in caplog.records if "saving" in record.getMessage()]


@pytest.fixture
def slow(monkeypatch):
    """A clock that goes on by so much at each look."""
    ticks = itertools.count(0, 0.2)
    monkeypatch.setattr(_progress, "_clock", lambda: next(ticks))


def check(told, *, what):
    """That these calls are of one work that was done."""
    assert told
    assert {it.what for it in told} == {what}
    assert all(0 <= it.done <= it.total or not it.total for it in told)
    for before, after in itertools.pairwise(told):
        assert before.done <= after.done
        assert before.total <= after.total
    assert told[-1].done == told[-1].total > 0


def filled(storage, n=3000, seed=0):
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(5000, 0.6, 0.4), batch_size=4)
    rows = torch.randn(n, 256, generator=torch.Generator().manual_seed(seed))
    if n:
        rb.extend({"obs": rows, "done": torch.arange(n) % 10 == 9})
    return rb


STORAGES = {
    "RAM": lambda folder: LazyTensorStorage(5000),
    "memmap": lambda folder: LazyMemmapStorage(5000, scratch_dir=folder / "store"),
    "list": lambda folder: ListStorage(5000),
}


# ---- bars --------------------------------------------------------------------------------------------------------------


def test_what_is_short_shows_nothing(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pieces = lefts(2, 1, 0)
    _progress.watch(pieces, "counting")
    assert not list(pieces)
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    _progress.watch(lefts(0), "counting")
    _progress.watch(lefts(), "counting")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_what_takes_longer_shows_a_bar_on_a_terminal(capsys, monkeypatch, terminal):
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    pieces = lefts(4, 5, 1, 0)  # others may add to the work
    _progress.watch(pieces, "counting")
    assert not list(pieces)
    out, err = capsys.readouterr()
    assert not out
    assert ("engram: counting" in err) is terminal
    assert bool(err) is terminal


def test_a_bar_appears_after_a_second_and_not_before(capsys, monkeypatch, clock):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with _progress.Work("saving", 100) as work:
        clock.now += 0.99
        work(10)
        assert capsys.readouterr().err == ""
        clock.now += 0.01
        work(10)
    assert "engram: saving" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["a function is called", "another rank", "another thread"])
def test_no_bar_is_shown_where_it_would_disturb(capsys, monkeypatch, clock, lines, why):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")

    def act():
        told = (lambda _: None) if why == "a function is called" else None
        with _progress.Work("saving", 100, told, quiet=why == "another rank") as work:
            clock.now += 20
            work(50)

    if why == "another thread":
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    else:
        act()
    assert capsys.readouterr().err == ""
    assert lines() == ["saving: 0.00 of 0.00 GB (50 %) in 20 s"]


# ---- lines in the log --------------------------------------------------------------------------------------------------


def test_the_log_has_a_line_each_ten_seconds(clock, lines):
    with _progress.Work("saving", 20_000_000_000) as work:
        for _ in range(25):
            clock.now += 1
            work(500_000_000)
    assert lines() == ["saving: 5.00 of 20.00 GB (25 %) in 10 s", "saving: 10.00 of 20.00 GB (50 %) in 20 s"]


def test_the_log_says_rows_of_scans_and_no_share_of_an_unknown_total(clock, lines):
    def pieces():
        for left in (9_000_000, 6_000_000, 3_000_000, 0):
            yield left
            clock.now += 10

    _progress.watch(pieces(), "saving")
    with _progress.Work("saving") as work:
        clock.now += 10
        work(3_000_000_000)
    assert lines() == [
        "saving: 3.00 of 9.00 million rows (33.3 %) in 10 s",
        "saving: 6.00 of 9.00 million rows (66.7 %) in 20 s",
        "saving: 9.00 of 9.00 million rows (100 %) in 30 s",
        "saving: 3.00 GB in 10 s",
    ]


def test_a_bar_takes_the_place_of_lines(clock, lines, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with _progress.Work("saving", 100) as work:
        for _ in range(30):
            clock.now += 1
            work(1)
    assert lines() == []


# ---- a function of the user's --------------------------------------------------------------------------------------------


def test_the_function_is_called_ten_times_a_second_at_most_and_when_all_is_done(clock):
    told = []
    with _progress.Work("saving", 1000, told.append) as work:
        for _ in range(100):
            clock.now += 0.03
            work(9)
        work.total = 2000
    # after 4, 8 … steps of 0.03 s
    assert told[:-1] == [Progress("saving", 9 * k, 1000) for k in range(4, 101, 4)]
    assert told[-1] == ("saving", 2000, 2000)


def test_more_than_the_total_is_all_of_it(clock):
    told = []
    with _progress.Work("saving", 10, told.append) as work:
        clock.now += 1
        work(11)
    assert told == [("saving", 10, 10)] * 2
    with _progress.Work("saving", 0, told.append) as work:
        clock.now += 1
        work(11)
    assert told[2:] == [("saving", 11, 0), ("saving", 11, 11)]
    with _progress.Work("saving", 0, told.append):
        pass
    assert told[4:] == [("saving", 1, 1)]


def test_what_the_function_raises_comes_out_once(clock):
    calls = []

    def refuse(it):
        calls.append(it)
        raise ValueError("enough")

    def act():
        with _progress.Work("saving", 10, refuse) as work:
            clock.now += 1
            work(1)

    with pytest.raises(ValueError, match="enough"):
        act()
    assert len(calls) == 1
    with _progress.Work("saving", 10, refuse) as work:
        clock.now += 1
        with pytest.raises(ValueError, match="enough"):
            work(1)
        work(1)  # another thread, which has not heard of it
    assert len(calls) == 2
    with pytest.raises(ValueError, match="enough"), _progress.Work("saving", 10, refuse):
        pass
    with pytest.raises(KeyError), _progress.Work("saving", 10, refuse):
        raise KeyError
    assert len(calls) == 3


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.usefixtures("slow")
def test_dumps_and_loads_tell(tmp_path, kind):
    if kind == "list":
        rb, other = (ReplayBuffer(storage=ListStorage(10)) for _ in range(2))
        rb.extend([torch.arange(3)])
    else:
        rb, other = filled(STORAGES[kind](tmp_path)), filled(STORAGES[kind](tmp_path / "other"), n=0)
    told = []
    rb.dumps(tmp_path / "dump", progress=told.append)
    check(told, what="saving")
    if kind != "list":
        assert told[-1].total == 3000 * (256 * 4 + 1)
        assert len(told) > 2
    for buffer, times in ((other, 1), (rb, 2)):  # rows that are here stay until all others are checked
        del told[:]
        buffer.loads(tmp_path / "dump", progress=told.append)
        check(told, what="loading")
        assert len(buffer) == len(rb)
        if kind != "list":
            assert told[-1].total == pytest.approx(times * 3000 * (256 * 4 + 1), rel=0.1)
            assert told[-2].done > 0.8 * told[-1].total
    rb.close()
    other.close()


@pytest.mark.usefixtures("slow")
def test_saves_restores_and_checks_tell(tmp_path):
    rb, told = filled(LazyTensorStorage(5000)), []
    checkpoints = Checkpointer(tmp_path, rb)
    checkpoints.save(1, progress=told.append)
    check(told, what="saving")
    assert told[-1].total == 3000 * (256 * 4 + 1)
    assert len(told) > 2
    del told[:]
    checkpoints.save(2, wait=False, progress=told.append).wait()
    check(told, what="saving")
    size = sum(path.stat().st_size for path in (tmp_path / checkpoints.latest).rglob("*.bin"))
    for full in (False, True):
        for empty in (True, False):
            del told[:]
            if empty:
                rb.empty()
            checkpoints.restore(verify="full" if full else "read", progress=told.append)
            check(told, what="restoring")
            times = 1 + full + (not empty)
            assert told[-1].total == pytest.approx(times * size, rel=0.1)
            assert told[-2].done > 0.8 * told[-1].total  # what was counted on the way
    del told[:]
    assert checkpoints.verify(checkpoints.latest, progress=told.append) == []
    check(told, what="checking")
    assert told[-1].total == pytest.approx(size, rel=0.1)
    for path, times in ((tmp_path / checkpoints.latest, 1), (tmp_path, 2)):
        del told[:]
        assert verify(path, progress=told.append).good
        check(told, what="checking")
        assert told[-1].total == pytest.approx(times * size, rel=0.1)
        assert told[-2].done > 0.8 * told[-1].total


@pytest.mark.usefixtures("slow")
def test_redistributed_rows_tell(tmp_path):
    rb, told = filled(LazyTensorStorage(5000)), []
    Checkpointer(tmp_path, rb).save(1)
    other = ReplayBuffer(
        storage=LazyTensorStorage(6000, lanes=3), sampler=PrioritizedSampler(6000, 0.6, 0.4), batch_size=4
    )
    Checkpointer(tmp_path, other).restore(progress=told.append)
    check(told, what="restoring")
    assert len(other) == 3000


@pytest.mark.usefixtures("slow")
def test_dumps_of_a_server_tell(tmp_path):
    with filled(LazyMemmapStorage(5000, scratch_dir=tmp_path / "store")) as rb:
        told, n = [], len(rb)
    with (
        serving(tmp_path / "store", f"unix:{tmp_path}/socket") as server,
        ReplayBuffer.connect(server.address) as there,
    ):
        there.dumps(tmp_path / "dump", progress=told.append)
    check(told, what="copying")
    assert told[-1].total > n * 256 * 4
    assert verify(tmp_path / "dump").good


# ---- what it raises -----------------------------------------------------------------------------------------------------


class Enough(Exception):
    pass


def at_call(number):
    """Raises at that call; None: at the last one."""
    calls = itertools.count(1)

    def told(it):
        if next(calls) == number or (number is None and it.done == it.total):
            raise Enough

    return told


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("call", [1, 2, None])
def test_dumps_that_is_stopped_leaves_what_lay_there(tmp_path, call):
    rb = filled(LazyTensorStorage(5000), n=2500)
    rb.dumps(tmp_path / "dump")
    rb.extend({"obs": torch.zeros(1000, 256), "done": torch.zeros(1000, dtype=torch.bool)})
    with pytest.raises(Enough):
        rb.dumps(tmp_path / "dump", progress=at_call(call))
    with pytest.raises(Enough):
        rb.dumps(tmp_path / "new", progress=at_call(call))
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
    other = ReplayBuffer(storage=LazyTensorStorage(5000), sampler=PrioritizedSampler(5000, 0.6, 0.4), batch_size=4)
    other.loads(tmp_path / "dump")
    assert len(other) == 2500
    rb.dumps(tmp_path / "dump")  # writers were let go on
    assert len(rb) == 3500


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    "save",
    [lambda to, told: to.save(2, progress=told), lambda to, told: to.save(2, wait=False, progress=told).wait()],
    ids=["here", "in the background"],
)
def test_a_save_that_is_stopped_leaves_the_one_before(tmp_path, save):
    rb = filled(LazyTensorStorage(5000))
    checkpoints = Checkpointer(tmp_path, rb)
    before = checkpoints.save(1).name
    rb.extend({"obs": torch.zeros(1000, 256), "done": torch.zeros(1000, dtype=torch.bool)})
    for call in (1, 2, None):
        with pytest.raises(Enough):
            save(checkpoints, at_call(call))
        assert checkpoints.latest == before
    assert checkpoints.save(3).steps == 4000


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("held", [True, False])
def test_a_load_that_is_stopped_leaves_all_or_nothing(tmp_path, held):
    """Rows that are here stay while the others are checked; later, the buffer is empty."""
    saved = filled(LazyTensorStorage(5000))
    saved.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "series", saved).save(1)
    for load in ("loads", "restore"):
        for call in itertools.count(1):
            rb = filled(LazyTensorStorage(5000), n=100 if held else 0, seed=1)
            rows = rb[:]["obs"].clone() if held else None
            told = at_call(call)
            try:
                if load == "loads":
                    rb.loads(tmp_path / "dump", progress=told)
                else:
                    Checkpointer(tmp_path / "series", rb).restore(progress=told)
            except Enough:
                assert len(rb) in (0, 100 * held, 3000)
                if len(rb) == 100:
                    assert torch.equal(rb[:]["obs"], rows)
                rb.extend({"obs": torch.zeros(10, 256), "done": torch.zeros(10, dtype=torch.bool)})
                if held and call == 1:
                    assert len(rb) == 110
            else:
                assert len(rb) == 3000
                break
        assert call > 3


def test_a_check_that_is_stopped(tmp_path):
    rb = filled(LazyTensorStorage(5000))
    checkpoints = Checkpointer(tmp_path, rb)
    name = checkpoints.save(1).name
    with pytest.raises(Enough):
        checkpoints.verify(name, progress=at_call(1))
    assert checkpoints.verify(name) == []


def test_a_second_call_may_be_made_from_the_function(tmp_path):
    """Nothing is locked meanwhile."""
    rb = filled(LazyTensorStorage(5000))
    seen = []

    def told(it):
        rb.extend({"obs": torch.zeros(1, 256), "done": torch.zeros(1, dtype=torch.bool)})
        seen.append(len(rb.sample()["obs"]))
        with contextlib.suppress(FileExistsError):
            rb.dumps(tmp_path / "inner")

    rb.dumps(tmp_path / "dump", progress=told)
    assert seen == [4]
    assert verify(tmp_path / "inner").good
