"""A second copy of a served store: it trails, it is promoted, and the server before serves nothing more."""

import contextlib
import json
import os
import signal
import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from engram import LazyMemmapStorage, MinSize, PrioritizedSampler, ReplayBuffer
from engram.buffer.connecting import access_to
from engram.cli import main
from engram.remote import protocol
from engram.remote.connection import Connection
from engram.serving import following
from engram.serving.following import Copying, Follower
from tests import fresh
from tests.serving.servers import Served
from tests.waiting import until

SERVER = """
from functools import partial
from pathlib import Path
from engram.buffer.connecting import access_to
from engram.serving import following
from engram.serving.following import Copying, Follower, is_promoted
from engram.serving.server import listening, run
copying = Copying(partial(access_to, call="serve", patience=0.0, token=token), sync)
made = partial(Follower, Path(folder), follow, copying) if follow and not is_promoted(Path(folder)) else None
at = listening(listen, token, None, None, insecure=True)
run(Path(folder), at, lambda address: print("ready", address, flush=True), None, made, copying)
"""


class Pair:
    """A store that is served at one socket, and its copy at another one."""

    def __init__(self, root):
        self.root, self.at = root, {name: f"unix:{root}/{name}.sock" for name in "abc"}
        self.running = []

    def start(self, name, follow="", *, sync=False, token=None):
        folder, follow = str(self.root / name), follow and self.at[follow]
        program = fresh.start(SERVER, folder=folder, listen=self.at[name], follow=follow, sync=sync, token=token)
        self.running.append(Served(program))
        return self.running[-1]

    def ask(self, name, action, kind=dict, command=None, token=None):
        with closing(Connection(access_to(self.at[name], "test", patience=0.0, token=token), standby=True)) as one:
            return one.ask(action, command or protocol.ACTIONS[action](), kind)

    def health(self, name="b"):
        return self.ask(name, "health")

    def promote(self, name="b"):
        return self.ask(name, "promote", protocol.Promoted)

    def copied(self, writes):
        """Wait until the copy has so many rows that were written."""

        def there():
            with contextlib.suppress(ConnectionError):  # it has not heard of the other one yet
                health = self.health()
                return health["copy"] and health["writes"] >= writes

        until(there)

    def rows(self, name):
        with ReplayBuffer.open(self.root / name, readonly=True) as rb:
            return rb[:]["a"].tolist()


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    for one in made.running:
        one.kill()


def store(folder, rows=10, capacity=1 << 16, **how):
    with ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder), batch_size=4, **how) as rb:
        rb.extend({"a": torch.arange(rows)})


class Writer:
    """A client that writes numbers, two in a call, until it is told to end. ``acknowledged``: those for which it was told so."""

    def __init__(self, addresses, first=1000):
        self.remote, self._next, self.acknowledged, self.doubtful = ReplayBuffer.connect(addresses), first, [], []
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            rows = [self._next, self._next + 1]
            self._next += 2
            try:
                self.remote.extend({"a": torch.tensor(rows)})
            except ConnectionError:
                self.doubtful += rows
            else:
                self.acknowledged += rows

    def progress(self, n=6):
        before = len(self.acknowledged)
        until(lambda: len(self.acknowledged) >= before + n)

    def end(self):
        self._ends.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.remote.close()
        return self.acknowledged


def check_whole(pair, writer):
    """Every row that was acknowledged is in the copy once, and in order."""
    acknowledged = writer.end()
    rows = [row for row in pair.rows("b") if row >= 1000]
    assert rows == sorted({*rows}), "a row is there twice, or out of order"
    assert {*acknowledged} <= {*rows}, "an acknowledged row is lost"
    assert {*rows} <= {*acknowledged, *writer.doubtful}, "a row that nobody wrote"


def test_a_leader_that_answers_hands_over_and_nothing_is_lost(pair):
    store(pair.root / "a")
    a, _ = pair.start("a"), pair.start("b", "a")
    pair.copied(10)
    writer = Writer([pair.at["a"], pair.at["b"]])
    writer.progress()
    promoted = pair.promote()
    assert (promoted.handed_over, promoted.lost, promoted.generation) == (True, 0, 1)
    writer.progress()
    assert a.program.wait() == 0, "the server before ends"
    check_whole(pair, writer)
    assert not writer.doubtful
    with pytest.raises(RuntimeError, match="is served already, as generation 1"):
        pair.promote()


@pytest.mark.parametrize("emptied", [False, True], ids=["", "emptied before"])
def test_no_row_is_lost_or_doubled_whose_acknowledgement_waits_for_the_copy(pair, emptied):
    store(pair.root / "a", rows=10)
    a, _ = pair.start("a", sync=True), pair.start("b", "a")
    addresses = [pair.at["b"], pair.at["a"]]
    if emptied:
        with ReplayBuffer.connect(addresses) as remote:
            remote.empty()
    writer = Writer(addresses)
    writer.progress()
    a.kill()
    assert not pair.promote().handed_over
    writer.progress()
    check_whole(pair, writer)
    assert not writer.doubtful, "what was not acknowledged is sent again, and written once"


def test_the_old_server_comes_back_and_serves_nothing(pair):
    store(pair.root / "a")
    a, b = pair.start("a"), pair.start("b", "a")
    pair.copied(10)
    a.kill()
    pair.promote()
    with ReplayBuffer.connect(pair.at["b"]) as remote:
        remote.extend({"a": torch.tensor([77])})
    with pytest.raises(AssertionError, match="a copy of this store took over"):  # its follower says so
        pair.start("a")
    note = pair.root / "a" / ".engram" / "copy.json"
    note.write_text(json.dumps({"follower": pair.at["b"]}))
    b.kill()
    a = pair.start("a")  # nobody says so now
    pair.start("b", "a")  # it was promoted, and tells
    assert a.program.wait() == 0
    with pytest.raises(AssertionError, match="a copy of this store took over"):
        pair.start("a")
    assert pair.rows("b")[-1] == 77


def test_a_client_takes_no_server_of_an_older_generation(pair):
    store(pair.root / "a")
    a, b = pair.start("a"), pair.start("b", "a")
    pair.copied(10)
    a.kill()
    pair.promote()
    (pair.root / "a" / ".engram" / "copy.json").write_text("{}")
    (pair.root / "c").symlink_to(pair.root / "a")  # the old server, where nobody tells it
    pair.start("c")
    with ReplayBuffer.connect([pair.at["c"], pair.at["b"]], patience=0.5) as remote:
        remote.extend({"a": torch.tensor([77])})
        assert pair.rows("b")[-1] == 77
        b.kill()
        with pytest.raises(ConnectionError, match="no server answered"):
            remote.extend({"a": torch.tensor([78])})
    assert pair.rows("a") == [*range(10)]


@pytest.mark.parametrize("killed", ["ab", "a", "b"])
def test_a_copy_goes_on_after_deaths(pair, killed):
    store(pair.root / "a", capacity=1 << 16)
    running = {"a": pair.start("a"), "b": pair.start("b", "a")}
    pair.copied(10)
    total = 10
    for _ in range(2):
        with ReplayBuffer.connect(pair.at["a"]) as remote:
            remote.extend({"a": torch.arange(total, total + 20_000)})
            total += 20_000
        for name in killed:  # amid a checkpoint, now and then
            running[name].kill()
        for name in killed:
            running[name] = pair.start(name, "a" * (name == "b"))
        pair.copied(total)
    assert pair.promote().rows == total
    assert pair.rows("b") == [*range(total)]


def test_a_copy_has_priorities_and_limits(pair):
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    store(pair.root / "a", sampler=sampler)
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.limit(MinSize(3))
        rb.update_priority(torch.arange(10), torch.arange(10) + 0.5)
        pair.start("a"), pair.start("b", "a")
        pair.copied(10)
        pair.promote()
        with ReplayBuffer.open(pair.root / "b") as copy:
            assert copy.limits == rb.limits
            one, other = (it.sampler.state_dict()["leaves"] for it in (rb, copy))
            assert torch.equal(one, other)
            assert copy.write_count == 10


def test_the_commands_say_how_old_a_copy_is_and_what_became_of_it(pair):
    store(pair.root / "a")
    a, _ = pair.start("a"), pair.start("b", "a")
    pair.copied(10)

    def said(*command):
        done = CliRunner().invoke(main, command)
        return done.exit_code, done.output

    assert said("health", pair.at["b"])[1].startswith(f"ok: a copy of {pair.at['a']}, ")
    a.kill()
    code, text = said("promote", pair.at["b"])
    assert (code, text) == (0, f"{pair.at['b']} serves generation 1, 10 rows: no row is known to be lost\n")
    code, text = said("promote", pair.at["b"])
    assert code == 1
    assert "is served already" in text
    assert said("health", pair.at["b"]) == (0, "ok\n")


def test_what_is_lost_is_counted_and_told(pair):
    store(pair.root / "a")
    a = pair.start("a")
    copying = Copying(partial(access_to, call="serve", patience=0.0, token=None))
    follower = Follower(pair.root / "b", pair.at["a"], copying)
    with closing(follower):
        follower._fetch()
        follower._writes += 7  # as a leader says that goes on writing
        a.kill()
        promoted = follower._promote()
        assert (promoted.handed_over, promoted.lost, promoted.rows) == (False, 7, 10)
        assert follower.found().do(protocol.Describe(protocol.PROTOCOL, "")).lost == 7


def test_a_leader_that_answers_and_cannot_hand_over_goes_on(pair):
    store(pair.root / "a")
    pair.start("a")
    copying = Copying(partial(access_to, call="serve", patience=0.0, token=None))
    with closing(Follower(pair.root / "b", pair.at["a"], copying)) as follower:
        follower._fetch()
        series = pair.root / "a-copy"
        series.rename(pair.root / "aside")
        series.write_text("no folder")
        with pytest.raises(RuntimeError, match="answers, and does not hand over"):
            follower._promote()
        series.unlink()
        (pair.root / "aside").rename(series)
        follower._fetch()
        with ReplayBuffer.connect(pair.at["a"]) as remote:
            assert remote.extend({"a": torch.tensor([3])}).tolist() == [10]
        assert follower._promote().rows == 11


def test_a_leader_that_hangs_is_replaced(pair, monkeypatch):
    monkeypatch.setattr(following, "_LAST_S", 1.0)
    store(pair.root / "a")
    a = pair.start("a")
    copying = Copying(partial(access_to, call="serve", patience=0.0, token=None))
    with closing(Follower(pair.root / "b", pair.at["a"], copying)) as follower:
        follower.begin(pair.at["b"])
        until(lambda: follower.do(protocol.Health())["copy"])
        os.kill(a.program.pid, signal.SIGSTOP)
        assert not follower._promote().handed_over
        os.kill(a.program.pid, signal.SIGCONT)
        assert a.program.wait() == 0, "it is told that it is out of date"


def test_a_follower_trails_by_less_than_a_second(pair):
    store(pair.root / "a")
    pair.start("a"), pair.start("b", "a")
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        for row in range(3):
            remote.extend({"a": torch.tensor([row])})
            pair.copied(11 + row)
            until(lambda: pair.health()["age_s"] < 1)


def test_a_directory_with_something_in_it_is_refused(pair):
    store(pair.root / "a")
    pair.start("a")
    store(pair.root / "b")
    with pytest.raises(AssertionError, match="expected a free name or an empty folder"):
        pair.start("b", "a")


def test_nothing_is_promoted_without_a_copy(pair, tmp_path):
    copying = Copying(partial(access_to, call="serve", patience=0.0, token=None))
    with closing(Follower(pair.root / "b", f"unix:{tmp_path}/nobody.sock", copying)) as follower:
        with pytest.raises(RuntimeError, match="expected a whole copy of the store"):
            follower._promote()
        with pytest.raises(FileExistsError, match="another server keeps a copy"):
            Follower(pair.root / "b", f"unix:{tmp_path}/nobody.sock", copying)
    assert not (pair.root / "b").exists()
