"""A second copy of a served store: it trails, it is promoted, and the server before serves nothing more."""

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
import torch
from click.testing import CliRunner
from pyarrow import flight

from engram import LazyMemmapStorage, MinSize, PrioritizedSampler, RateLimited, ReplayBuffer, SamplesPerInsert
from engram.buffer.connecting import Way
from engram.cli import main
from engram.remote import connection, protocol
from engram.remote.connection import Connection
from engram.serving import copies
from engram.serving.copies import Follower, Note
from engram.serving.server import listening
from tests.serving.pairs import store
from tests.serving.servers import token_file
from tests.serving.test_doors import certificate
from tests.waiting import until

#: A copy is at no address before it is promoted, and lacks rows then.
pytestmark = pytest.mark.filterwarnings("ignore:connect. no server answers", "ignore:connect. .* took over")


class Writer:
    """A client that writes numbers, two in a call, until it is told to end. ``acknowledged``: those for which it was told so."""

    def __init__(self, addresses, first=1000):
        self.remote, self._next, self.acknowledged, self.doubtful = ReplayBuffer.connect(addresses), first, [], []
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self.failed = None
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            rows = [self._next, self._next + 1]
            self._next += 2
            try:
                self.remote.extend({"a": torch.tensor(rows)})
            except ConnectionError:
                self.doubtful += rows
            except Exception as error:
                self.failed = error
                raise
            else:
                self.acknowledged += rows

    def progress(self, n=6):
        before = len(self.acknowledged)
        until(lambda: self.failed or len(self.acknowledged) >= before + n)
        assert not self.failed, self.failed

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


@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
def test_a_leader_that_answers_hands_over_and_nothing_is_lost(pair, sync):
    store(pair.root / "a")
    a, _ = pair.start("a", sync=sync), pair.program("b", follow="a")
    pair.copied(10)
    writer = Writer(pair.at["a"])
    writer.progress()
    note = pair.promote()
    assert (note.lost, note.generation) == (0, 1)
    writer.progress()
    assert a.program.wait() == 0, "the server before ends"
    check_whole(pair, writer)
    assert not writer.doubtful
    with pytest.raises(RuntimeError, match="is served already, as generation 1"):
        pair.promote()


@pytest.mark.parametrize("seed", range(3))
def test_no_row_is_lost_or_doubled_whose_acknowledgement_waits_for_the_copy(pair, seed):
    store(pair.root / "a", rows=10)
    a, _ = pair.start("a", sync=True), pair.program("b", follow="a")
    pair.copied(10)
    if seed == 1:
        with ReplayBuffer.connect(pair.at["a"]) as remote:
            remote.empty()
    writer = Writer([pair.at["b"], pair.at["a"]] if seed == 2 else pair.at["a"])
    writer.progress()
    time.sleep(random.Random(seed).uniform(0, 0.3))
    a.kill()
    pair.promote()
    writer.progress()
    check_whole(pair, writer)
    assert not writer.doubtful, "what was not acknowledged is sent again, and written once"


@pytest.mark.parametrize("seed", range(3))
def test_clients_send_again_what_the_copy_lacks(pair, seed):
    store(pair.root / "a", rows=10)
    a, _ = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    writer = Writer(pair.at["a"])
    writer.progress()
    time.sleep(random.Random(seed).uniform(0.2, 0.6))
    a.kill()
    note = pair.promote()
    writer.progress()
    check_whole(pair, writer)
    assert not writer.doubtful
    assert note.lost >= 0


def test_the_old_server_comes_back_and_serves_nothing(pair):
    store(pair.root / "a")
    a, b = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    a.kill()
    pair.promote()
    with ReplayBuffer.connect(pair.at["b"]) as remote:
        remote.extend({"a": torch.tensor([77])})
    with pytest.raises(AssertionError, match="a copy of this store took over"):  # its follower says so
        pair.start("a")
    note = pair.root / "a" / ".engram" / "copy.json"
    assert json.loads(note.read_text()) == {"other": pair.at["b"], "outdated": True}
    note.unlink()
    b.kill()
    a = pair.start("a")  # nobody says so now
    pair.start("b", follow="a")  # it was promoted, is served again, and tells
    assert a.program.wait() == 0
    with pytest.raises(AssertionError, match="a copy of this store took over"):
        pair.start("a")
    assert pair.rows("b")[-1] == 77


def test_a_client_that_knows_the_copy_ends_the_old_server(pair):
    store(pair.root / "a")
    a, b = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    a.kill()
    pair.promote()
    (pair.root / "a" / ".engram" / "copy.json").unlink()
    (pair.root / "c").symlink_to(pair.root / "a")  # the old server, where its follower does not look for it
    with ReplayBuffer.connect([pair.at["c"], pair.at["b"]], patience=0.5) as remote:
        c = pair.start("c")
        remote.extend({"a": torch.tensor([77])})
        assert pair.rows("b")[-1] == 77
        b.kill()
        with pytest.raises(ConnectionError, match="no server answered"):
            remote.extend({"a": torch.tensor([78])})
        assert c.program.wait() == 0
    assert pair.rows("a") == [*range(10)]


@pytest.mark.parametrize("killed", ["ab", "a", "b"])
def test_a_copy_goes_on_after_deaths(pair, killed):
    store(pair.root / "a", capacity=1 << 16)
    running = {"a": pair.start("a"), "b": pair.program("b", follow="a")}
    pair.copied(10)
    total = 10
    for _ in range(2):
        with ReplayBuffer.connect(pair.at["a"]) as remote:
            remote.extend({"a": torch.arange(total, total + 20_000)})
            total += 20_000
        for name in killed:  # amid a checkpoint, now and then
            running[name].kill()
        for name in killed:
            running[name] = pair.start("a") if name == "a" else pair.program("b", follow="a")
        pair.copied(total)
    pair.promote()
    assert pair.rows("b") == [*range(total)]


def test_a_copy_of_a_copy_takes_over(pair):
    store(pair.root / "a")
    a, b = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    a.kill()
    assert pair.promote().generation == 1
    pair.program("d", follow="b")
    pair.copied(10, "d")
    with ReplayBuffer.connect(pair.at["b"]) as remote:
        remote.extend({"a": torch.tensor([77])})
        pair.copied(11, "d")
        b.kill()
        assert pair.promote("d").generation == 2
        remote.extend({"a": torch.tensor([78])})
    assert pair.rows("d") == [*range(10), 77, 78]


def test_a_copy_has_priorities_and_limits(pair):
    sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    store(pair.root / "a", sampler=sampler)
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.limit(MinSize(3))
        rb.update_priority(torch.arange(10), torch.arange(10) + 0.5)
        pair.start("a"), pair.program("b", follow="a")
        pair.copied(10)
        pair.promote()
        with ReplayBuffer.open(pair.root / "b") as copy:
            assert copy.limits == rb.limits
            one, other = (it.sampler.state_dict()["leaves"] for it in (rb, copy))
            assert torch.equal(one, other)
            assert copy.write_count == 10


def test_the_command_says_what_became_of_a_copy(pair):
    store(pair.root / "a")
    a, _ = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)

    def said(*command):
        done = CliRunner().invoke(main, command)
        return done.exit_code, done.output

    a.kill()
    folder = str(pair.root / "b")
    assert said("promote", folder) == (0, f"{folder} is generation 1, and lacked at least 0 rows of the other.\n")
    code, text = said("promote", folder)
    assert code == 1
    assert "is served already" in text
    code, text = said("promote", str(pair.root / "c"))
    assert code == 1
    assert "no server keeps a copy" in text


def test_commands_with_a_token_and_certificates(pair):
    store(pair.root / "a")
    token, root = token_file(pair.root), certificate(pair.root, "root")

    def start(name, place, *more):
        cert, key = certificate(pair.root, f"server-{name}", signer=root)
        command = ["serve", pair.root / name, "--listen", place, "--token", token, "--tls-cert", cert, "--tls-key", key]
        command += ["--tls-clients", root[0], *more]
        return stack.enter_context(
            subprocess.Popen([sys.executable, "-m", "engram", *map(str, command)], stdout=subprocess.PIPE, text=True)
        )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        a = start("a", "127.0.0.1:0")
        stack.callback(a.kill)
        b = start("b", place, "--follow", address := a.stdout.readline().strip())
        stack.callback(b.kill)
        pair.copied(10)
        mine = dict(zip(("tls_cert", "tls_key"), certificate(pair.root, "client", signer=root), strict=True))
        with ReplayBuffer.connect(address, token=token, tls_root=root[0], **mine) as remote:
            assert copies.promoted(pair.root / "b").lost == 0
            assert b.stdout.readline().strip() == f"grpc+tls://{place}"
            assert remote.extend({"a": torch.tensor([10])}).tolist() == [10]
        assert a.wait() == 0
    assert pair.rows("b") == [*range(11)]


def test_what_is_lost_is_counted_and_told(pair, monkeypatch):
    store(pair.root / "a")
    a, follower = pair.start("a"), pair.follower()
    follower.fetch()
    remote = ReplayBuffer.connect(pair.at["a"])
    remote.extend({"a": torch.arange(10, 17)})
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "fetch_dump", None)
        with pytest.raises(TypeError):  # what it hears is newer than what it has
            follower.fetch()
    a.kill()
    assert follower.make().lost == 7
    pair.start("b")
    remote._wiring.storage._kept.clear()  # as a client that has no room
    with pytest.warns(UserWarning, match="It lacked at least 7 rows"), pytest.raises(ConnectionError):
        remote.extend({"a": torch.tensor([17])})
    remote.extend({"a": torch.tensor([18])})
    remote.close()
    assert pair.rows("b") == [*range(10), 18]


def test_a_leader_that_answers_and_cannot_hand_over_goes_on(pair):
    store(pair.root / "a")
    pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    series = pair.root / "a-copy"
    series.rename(pair.root / "aside")
    series.write_text("no folder")
    with pytest.raises(RuntimeError, match="a.sock is neither copied nor replaced: "):
        pair.promote()
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        assert remote.extend({"a": torch.tensor([10])}).tolist() == [10]
    series.unlink()
    (pair.root / "aside").rename(series)
    pair.promote()
    assert pair.rows("b") == [*range(11)]


def test_a_full_disk_is_told_and_the_copy_stays(pair, monkeypatch):
    store(pair.root / "a")
    a = pair.start("a")
    follower = pair.follower()
    follower.fetch()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copies, "create_store", full)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="No space left"):
        copies.promoted(pair.root / "b")
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        remote.extend({"a": torch.tensor([10])})
    pair.copied(11)
    monkeypatch.undo()
    assert copies.promoted(pair.root / "b").lost == 0
    thread.join(60)
    assert pair.rows("b") == [*range(11)]
    pair.start("b")
    assert a.program.wait() == 0


def test_of_a_leader_that_is_gone_it_is_not_said_that_it_answers(pair, monkeypatch):
    """Who must decide whether to promote the copy reads it, where the copy cannot be served."""
    store(pair.root / "a")
    a, follower = pair.start("a"), pair.follower()
    follower.fetch()
    a.kill()

    def failing(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copies, "create_store", failing)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="copy here is ckpt-.* nor replaced: .*No space left") as full:
        copies.promoted(pair.root / "b")
    monkeypatch.setattr(follower, "_check_address", failing)
    with pytest.raises(RuntimeError, match="nor replaced: .*No space left") as taken:
        copies.promoted(pair.root / "b")
    assert not any(" answers" in str(it.value) or str(it.value).endswith("..") for it in (full, taken))
    monkeypatch.undo()
    assert copies.promoted(pair.root / "b").generation == 1
    thread.join(60)


def test_of_a_leader_that_sends_too_slowly_it_is_not_said_that_it_is_gone(pair, monkeypatch, caplog):
    store(pair.root / "a")
    pair.start("a")
    follower = pair.follower()

    def late(*_):
        raise flight.FlightTimedOutError("too late")

    monkeypatch.setattr(connection, "_append", late)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    until(lambda: "too late" in caplog.text)
    assert "a.sock is neither copied nor replaced: " in caplog.text
    assert "does not serve the store" not in caplog.text
    monkeypatch.undo()
    pair.copied(10)
    copies.promoted(pair.root / "b")
    thread.join(60)


def test_a_leader_that_hangs_is_replaced(pair, monkeypatch):
    monkeypatch.setattr(copies, "_ANSWER_S", 1.0)
    store(pair.root / "a")
    a = pair.start("a")
    follower = pair.follower()
    follower.fetch()
    os.kill(a.program.pid, signal.SIGSTOP)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    assert copies.promoted(pair.root / "b").generation == 1
    thread.join(60)
    pair.start("b")
    os.kill(a.program.pid, signal.SIGCONT)
    assert a.program.wait() == 0, "it is told that it is out of date"


def test_a_follower_trails_by_less_than_a_second(pair):
    store(pair.root / "a")
    pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        for row in range(3):
            remote.extend({"a": torch.tensor([row])})
            began = time.process_time()
            pair.copied(11 + row)
            assert time.process_time() - began < 1, "too slow, not wrong"


def test_a_copy_takes_over_when_the_server_of_the_store_loses_the_lease(pair):
    store(pair.root / "a")
    lease = pair.root / "lease"
    a, b = pair.start("a", lease=lease), pair.program("b", follow="a", lease=lease)
    pair.copied(10)
    with pytest.raises(AssertionError, match="another server has locked it"):
        pair.start("c", lease=lease)
    a.kill()
    until((pair.root / "b.sock").exists)
    assert Note.of(pair.root / "b").generation == 1
    with pytest.raises(AssertionError, match="another server has locked it"):
        pair.start("a", lease=lease)
    b.kill()
    with lease.open() as file:
        until(lambda: not fcntl.flock(file, fcntl.LOCK_EX))


def test_final_observations_are_not_copied(pair):
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=pair.root / "a"), batch_size=4) as rb:
        rb.extend({"a": torch.arange(4)})
    noted = pair.root / "a" / ".engram" / "buffer.json"
    recipe = json.loads(noted.read_text())
    pair.start("a")
    noted.write_text(json.dumps(recipe | {"sampler": {"finals": {}}}))
    with pytest.raises(ValueError, match="keeps final observations in a folder beside the store"):
        pair.follower().fetch()


def test_one_follower_and_no_more(pair):
    store(pair.root / "a")
    pair.start("a")
    first, second = pair.follower(), pair.follower(name="c")
    first.fetch()
    with pytest.raises(RuntimeError, match="expected one follower, but unix:.*b.sock follows"):
        second.fetch()
    with pytest.raises(FileExistsError, match="another process keeps a copy"):
        pair.follower()


def test_a_directory_with_something_in_it_is_refused(pair):
    store(pair.root / "a")
    pair.start("a")
    store(pair.root / "b")
    with pytest.raises(AssertionError, match="expected a free name or an empty folder"):
        pair.start("b", follow="a")


def test_nothing_is_promoted_without_a_copy(pair):
    follower = pair.follower("c")
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="does not serve the store, and the newest copy here is none"):
        copies.promoted(pair.root / "b")
    assert not (pair.root / "b").exists()


@pytest.mark.parametrize(
    ("ticket", "match"), [(b"copy ../../x y", "expected names of checkpoints"), (b"copy a", "expected the ticket dump")]
)
def test_a_client_cannot_name_other_files(pair, ticket, match):
    store(pair.root / "a")
    pair.start("a")
    access = Way(patience=0.0).access(pair.at["a"], "test")
    with closing(Connection(access)) as one, pytest.raises(ConnectionError, match=match):
        one.fetch_dump(pair.root / "got", lambda _: None, ticket)


def test_a_follower_is_at_an_address_and_not_in_a_file(pair):
    store(pair.root / "a")
    pair.start("a")
    access = Way(patience=0.0).access(pair.at["a"], "test")
    with closing(Connection(access)) as one, pytest.raises(ValueError, match="address: expected unix:/PATH"):
        one.ask("tick", protocol.Tick("", "file:/etc/passwd"), protocol.Ticked)


def test_another_protocol_is_refused(pair, monkeypatch):
    store(pair.root / "a")
    pair.start("a")
    monkeypatch.setattr(protocol, "PROTOCOL", 99)
    with pytest.raises(Exception, match="expected protocol 1"):
        pair.follower().fetch()


def test_no_other_follower_begins_or_ends_a_hand_over(pair):
    store(pair.root / "a")
    pair.start("a")
    first, other = pair.follower(), Connection(Way(patience=0.0).access(pair.at["a"], "test"))

    def refused(*lasts):
        for last in lasts:
            with pytest.raises(RuntimeError, match="expected one follower"):
                other.ask("tick", protocol.Tick("", pair.at["c"], last), protocol.Ticked)

    with closing(other), ReplayBuffer.connect(pair.at["a"], patience=0.5) as remote:
        refused(True)  # nobody follows yet
        remote.extend({"a": torch.tensor([10])})
        first.fetch()
        refused(True, False)
        remote.extend({"a": torch.tensor([11])})
        first.fetch(last=True)
        refused(True, False)
        with pytest.raises(ConnectionError):
            remote.extend({"a": torch.tensor([12])})
        first.fetch()  # it did not take over
        remote.extend({"a": torch.tensor([13])})
    assert set(pair.rows("a")) >= {*range(12), 13}


def test_rows_that_limits_refuse_at_the_copy_stay_kept(pair):
    store(pair.root / "a")
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.limit(SamplesPerInsert(1.0, min_size=4, tolerance=30))
    a, follower = pair.start("a"), pair.follower()
    follower.fetch()
    with ReplayBuffer.connect(pair.at["a"], batch_size=1) as remote:
        for row in range(200):
            remote.extend({"a": torch.tensor([1000 + row])})
            remote.sample()
        a.kill()
        follower.make()  # its counts begin again
        pair.start("b")
        with pytest.raises(RateLimited):
            remote.extend({"a": torch.tensor([5000])}, timeout=0.5)
        for _ in range(200):
            remote.sample()
        remote.extend({"a": torch.tensor([5000])})
    assert pair.rows("b") == [*range(10), *range(1000, 1200), 5000]


def test_a_copy_has_the_index_of_keys(pair):
    store(pair.root / "a")
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.index_keys("a")
    a, follower = pair.start("a"), pair.follower()
    follower.fetch()
    a.kill()
    follower.make()
    pair.start("b")
    with ReplayBuffer.connect(pair.at["b"]) as remote:
        remote.extend({"a": torch.tensor([77])})
        assert remote.rows_of(torch.tensor([7, 77, 78])).rows.tolist() == [7, 10, -1]


def test_what_reads_waits_for_no_follower(pair):
    store(pair.root / "a")
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.index_keys("a")
    pair.start("a", sync=True)  # no server follows
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        assert remote.rows_of(torch.tensor([7])).rows.tolist() == [7]
        assert remote.sample()["a"].shape == (4,)


def test_a_follower_needs_a_free_address_with_a_port(pair):
    def follower(address):
        return Follower(pair.root / "b", pair.at["a"], listening(address, None, None, None, insecure=True))

    with pytest.raises(ValueError, match="expected --listen with a port"):
        follower("127.0.0.1:0")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="cannot listen there: .*already in use"),
    ):
        follower(f"127.0.0.1:{taken.getsockname()[1]}")
