"""A second copy of rows of any length and of limits, what its servers say of it, and what they do where a disk is full."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from engram import ConsumingSampler, LazyMemmapStorage, MaxInFlight, Ragged, RateLimited, ReplayBuffer
from engram.cli import main
from engram.remote import connection
from engram.remote.fleet.members import SKIP_S
from engram.saved import disk
from engram.serving import copies
from tests import fresh
from tests.fleet.test_drain import drain
from tests.fleet.test_fleets import made, rows_of
from tests.serving.pairs import SERVER, store
from tests.serving.servers import Served
from tests.serving.test_kills import is_whole, row_of
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:connect. no server answers", "ignore:connect. .* took over")


@pytest.mark.parametrize("layout", ["ring", "slots"])
@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
def test_rows_with_any_number_of_items(pair, layout, sync):
    """They are written while a copy is made, and go around their rings."""
    ragged = {"b": Ragged(torch.int64, max_length=8)}
    how = {"ragged_bytes": 64 * 40} if layout == "ring" else {"ragged_layout": "slots"}
    with ReplayBuffer(
        storage=LazyMemmapStorage(64, scratch_dir=pair.root / "a", ragged=ragged, **how), batch_size=4
    ) as rb:
        rb.extend(row_of(torch.arange(4), True))
    a, _ = pair.start("a", sync=sync), pair.program("b", follow="a")
    pair.copied(4)
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        for first in range(4, 104, 4):
            remote.extend(row_of(torch.arange(first, first + 4), True))
        if not sync:
            pair.copied(104)
        a.kill()
        pair.promote()
        for first in range(104, 204, 4):
            remote.extend(row_of(torch.arange(first, first + 4), True))
            assert is_whole(remote.sample(), True)
    with ReplayBuffer.open(pair.root / "b", unclean="accept") as rb:
        ids = rb[:]["a"].sort().values.tolist()
        assert ids == [*range(204 - len(ids), 204)]
        assert len(ids) > 30
        assert is_whole(rb[:], True)


@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
def test_a_queue_admits_as_many_rows_at_the_copy(pair, sync):
    """Rows that are in flight there count, and no others: used up ones are not waited for."""
    sampler = ConsumingSampler()
    store(pair.root / "a", capacity=64, sampler=sampler)
    with ReplayBuffer.open(pair.root / "a") as rb:
        rb.limit(MaxInFlight(16))
    a, _ = pair.start("a", sync=sync), pair.program("b", follow="a")
    pair.copied(10)
    with ReplayBuffer.connect(pair.at["a"], batch_size=4) as remote:
        remote.extend({"a": torch.arange(10, 16)})
        with pytest.raises(RateLimited):
            remote.extend({"a": torch.arange(99, 100)}, timeout=0.2)
        drawn = remote.sample()["a"].tolist() + remote.sample()["a"].tolist()
        pair.copied(16)
        remote.extend({"a": torch.arange(16, 20)})
        pair.copied(20)
        a.kill()
        pair.promote()
        with pytest.raises(ConnectionError, match="may be written or not"):  # rows go where others are used up
            remote.extend({"a": torch.arange(99, 100)})
        remote.extend({"a": torch.arange(20, 24)})
        with pytest.raises(RateLimited):
            remote.extend({"a": torch.arange(99, 100)}, timeout=0.2)
        for _ in range(4):
            drawn += remote.sample()["a"].tolist()
    assert sorted(drawn) == [*range(24)]


def test_a_write_in_doubt_does_not_stay_at_the_server_that_is_gone(pair):
    """The next one waits for a server, and says of itself that none answered: of it nothing was sent."""
    store(pair.root / "a", capacity=64, sampler=ConsumingSampler())
    a, _ = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    with ReplayBuffer.connect([pair.at["a"], pair.at["b"]], patience=1) as remote:
        remote.extend({"a": torch.arange(10, 12)})
        pair.copied(12)
        a.kill()
        for why in ("may be written or not", "no server answered within 1 s"):
            with pytest.raises(ConnectionError, match=why):
                remote.extend({"a": torch.arange(98, 99)})
        pair.promote()
        assert len(remote.extend({"a": torch.arange(12, 14)})) == 2
    assert sorted(pair.rows("b")) == [*range(14)]


def test_a_store_that_a_server_follows_is_not_drained(pair):
    """Its copy has the rows that have moved, too, and would serve them once the server is gone."""
    for k in "ac":
        made(pair.root / k, rows_of(10, 100 * (k == "c")), None).close()
    pair.start("a"), pair.program("b", follow="a"), pair.start("c")
    pair.copied(10)
    result = drain(pair.at["a"], pair.at["c"])
    assert result.exit_code == 1
    assert "expected a store that no server follows" in result.output
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        remote.extend(rows_of(5, 10))
        assert len(remote) == 15
    pair.copied(15)


MOUNTED = """
from tests.ranks.networks import own_mounts
import subprocess
own_mounts()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % room, "tmpfs", disk], check=True)
if made:
    from tests.serving.test_copies import wide
    wide(folder, 10)
"""


def wide(folder, n):
    with ReplayBuffer(storage=LazyMemmapStorage(512, scratch_dir=folder), batch_size=4) as rb:
        rb.extend(wide_rows(0, n))


def wide_rows(first, n):
    return {"a": torch.arange(first, first + n).unsqueeze(1).expand(-1, 512).contiguous()}


def filled(remote, condition):
    """Write until that is so, other rows each time."""
    first = 0

    def written():
        nonlocal first
        remote.extend(wide_rows(first, 512))
        first += 512
        return condition()

    until(written, 15)


def on_a_small_disk(pair, name, room, **how):
    """A server whose directory is on a disk with so many bytes."""
    disk = pair.root / f"disk-{name}"
    disk.mkdir()
    given = {"token": None, "lease": "", "sync": False, "follow": "", "made": False} | how
    program = fresh.start(
        MOUNTED + SERVER, folder=str(disk / name), listen=pair.at[name], room=room, disk=str(disk), **given
    )
    pair.running.append(program)
    return program


needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="a disk cannot be mounted here")


def promote_inside(program, pair):
    """Have a program promote the copy that it keeps, where others see none of its disk."""
    Path(f"/proc/{program.pid}/root{pair.root}/disk-b/b-copy/promote").touch()


@needs_mounts
def test_a_full_disk_of_a_follower(pair):
    """It says so, its leader goes on, and it follows again once there is room."""
    wide(pair.root / "a", 10)
    pair.start("a")
    b = on_a_small_disk(pair, "b", 5 << 20, follow=pair.at["a"])
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        filled(remote, lambda: "No space left" in b.err)
        remote.empty()
        remote.extend(wide_rows(5000, 20))
        promote_inside(b, pair)
        until((pair.root / "b.sock").exists)
    with ReplayBuffer.connect(pair.at["b"]) as remote:
        remote.extend(wide_rows(5020, 1))
        assert len(remote) == 21


@needs_mounts
@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
def test_a_full_disk_of_a_leader(pair, sync):
    """Its follower says so. Writes go on, or wait where they are to be copied, until there is room."""
    a = Served(on_a_small_disk(pair, "a", 5 << 20, made=True, sync=sync))
    b = pair.program("b", follow="a")
    pair.copied(10)
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        thread = threading.Thread(target=filled, args=(remote, lambda: "No space left" in b.err), daemon=True)
        thread.start()
        until(lambda: "No space left" in b.err)
        if not sync:
            thread.join(60)
        with ReplayBuffer.connect(pair.at["a"]) as other:
            assert len(other) == 512
            other.empty()
        thread.join(60)
        assert not thread.is_alive()
        remote.extend(wide_rows(5000, 3))
    pair.promote()
    assert a.program.wait() == 0
    assert pair.rows("b")[-1][0] == 5002


def test_a_promotion_that_finds_nothing_stops_no_follower_that_begins(pair, monkeypatch):
    """It holds the lock of the folder for a moment, by which it sees that no other process has it."""
    monkeypatch.setattr(copies, "_RETRY_S", 5.0)  # a busy machine lets the timer wait
    root = pair.root / "b-copy"
    root.mkdir()
    held = [disk.open_folder(root)]
    assert disk.lock(held[0])
    ends = threading.Timer(0.3, held.clear)
    ends.start()
    pair.follower()
    ends.join()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("missing", ["skip", "wait"])
def test_no_client_waits_for_a_follower(pair, missing):
    """It has no address before it is promoted, which its leader says."""
    store(pair.root / "a")
    a, b = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    began = time.monotonic()
    with ReplayBuffer.connect([pair.at["b"], pair.at["a"]], missing=missing) as remote:
        assert time.monotonic() - began < SKIP_S, "it waits for the follower"
        assert remote.extend({"a": torch.tensor([10])}).tolist() == [10]
        pair.copied(11)
        a.kill()
        until(lambda: "the newest copy here is ckpt-" in b.err)
        pair.promote()
        assert remote.extend({"a": torch.tensor([11])}).tolist() == [11]


def test_the_age_of_a_copy_is_told(pair):
    store(pair.root / "a")

    def age(remote):
        return remote.stats().get("copy_age_s")

    def said(*command):
        done = CliRunner().invoke(main, [*command, pair.at["a"]])
        assert done.exit_code == 0, done.output
        return done.output

    a = pair.start("a")
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        assert age(remote) is None
        assert said("health") == "ok\n"
        b = pair.program("b", follow="a")
        pair.copied(10)
        until(lambda: age(remote) < 1)
        until(lambda: "its copy is 0." in said("health"))
        assert json.loads(said("health", "--json"))["copy_age_s"] >= 0
        b.kill()
        until(lambda: age(remote) > 1.5)
        remote.extend({"a": torch.tensor([10])})
        follower, began = pair.follower(), time.monotonic()
        follower.fetch()
        assert age(remote) > 1.5, "it is not known to have arrived"
        follower.fetch()
        assert age(remote) <= time.monotonic() - began
        assert " s behind" in said("top", "--count", "1", "--every", "0.1")
        a.kill()
        pair.start("a")
        assert age(remote) >= 0


def test_a_copy_is_no_older_when_a_row_is_written(pair):
    """It had all rows until then, however long ago it was saved."""
    store(pair.root / "a")
    pair.start("a")
    follower = pair.follower()
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        follower.fetch()
        saved = time.monotonic()
        until(lambda: follower.fetch() or time.monotonic() > saved + 2)
        quiet = time.monotonic()
        follower.fetch()
        remote.extend({"a": torch.tensor([10])})
        follower.fetch()  # it comes, and is not known to have arrived
        assert remote.stats()["copy_age_s"] <= time.monotonic() - quiet


def test_a_follower_keeps_its_copy_where_another_store_is_served(pair):
    """As where the machine of its leader comes back with an empty disk: the copy is all that there is of the store."""
    store(pair.root / "a")
    a, b = pair.start("a"), pair.program("b", follow="a")
    pair.copied(10)
    a.kill()
    for name in ("a", "a-copy"):
        disk.remove(pair.root / name)
    store(pair.root / "a", rows=3)
    pair.start("a")
    until(lambda: "another store is served there" in b.err)
    b.kill()
    b = pair.program("b", follow="a")
    until(lambda: "another store is served there" in b.err)
    pair.promote()
    assert pair.rows("b") == [*range(10)]
    assert pair.rows("a") == [*range(3)]


def test_a_lease_promotes_no_copy_without_a_word_of_its_leader(pair):
    """The follower was down while rows were written. After a power cut it is up first, and nobody has the lease."""
    store(pair.root / "a")
    lease = {"lease": pair.root / "lease"}
    a, b = pair.start("a", **lease), pair.program("b", follow="a", **lease)
    pair.copied(10)
    b.kill()
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        remote.extend({"a": torch.arange(10, 15)})
    a.kill()
    b = pair.program("b", follow="a", **lease)
    until(lambda: "the lease does not promote it" in b.err)
    a = pair.start("a", **lease)
    pair.copied(15)
    a.kill()
    until((pair.root / "b.sock").exists)
    assert pair.rows("b") == [*range(15)]


@pytest.mark.parametrize("sync", [False, True], ids=["", "sync"])
def test_clients_hear_of_a_follower_that_begins_later(pair, sync):
    """One that writes, and one that draws: both were connected before there was a second server."""
    store(pair.root / "a")
    a, b = pair.start("a"), None
    with ReplayBuffer.connect(pair.at["a"]) as writer, ReplayBuffer.connect(pair.at["a"]) as learner:
        writer.extend({"a": torch.arange(10, 12)})
        learner.sample()
        if sync:
            a.kill()
            a = pair.start("a", sync=True)  # nobody is told of a follower with an answer to a write
            learner.sample()
        b = pair.program("b", follow="a")
        pair.copied(12)
        writer.extend({"a": torch.arange(12, 14)})
        learner.sample()
        pair.copied(14)
        a.kill()
        pair.promote()
        writer.extend({"a": torch.arange(14, 16)})
        assert {*learner.sample()["a"].tolist()} <= {*range(16)}
    assert b.poll() is None
    assert pair.rows("b") == [*range(16)]


def test_a_write_that_waits_for_a_follower_that_is_there_asks_for_no_other(pair, monkeypatch):
    store(pair.root / "a")
    given = {"folder": str(pair.root / "a"), "listen": pair.at["a"], "token": None, "follow": "", "lease": ""}
    a = fresh.start("from engram.serving import copies\ncopies._SILENT_S = 1.0\n" + SERVER, sync=True, **given)
    pair.running.append(a.until("ready"))
    follower, append = pair.follower(), connection._append
    follower.fetch()
    monkeypatch.setattr(connection, "_append", lambda *of: (time.sleep(0.3), append(*of)))
    with ReplayBuffer.connect(pair.at["a"]) as remote:
        thread = threading.Thread(target=remote.extend, args=({"a": torch.tensor([10])},))
        thread.start()
        until(lambda: follower.fetch() or not thread.is_alive())
        thread.join()
    assert "a write waits for " in a.err
    assert "b.sock to fetch its rows" in a.err
    assert "Start one" not in a.err


def test_a_follower_that_fetches_for_long_is_there(pair, monkeypatch):
    """No other one takes its place, whether it reads parts slowly or waits for files that are compared."""
    store(pair.root / "a", rows=1 << 21, capacity=1 << 21)
    slow = "import time, filecmp\nfilecmp.cmp = lambda one, *_, **__: time.sleep(one.stat().st_size * 2e-7)\n"
    brief = "from engram.serving import copies\ncopies._SILENT_S, copies._ANSWER_S = 1.0, 1.0\n"
    given = {"folder": str(pair.root / "a"), "listen": pair.at["a"], "token": None, "follow": "", "lease": ""}
    monkeypatch.setattr(copies, "_ANSWER_S", 100.0)
    first, second, append = pair.follower(), pair.follower(name="c"), connection._append
    for reads_slowly in (True, False):
        a = fresh.start(slow + brief + SERVER, sync=False, **given)
        pair.running.append(a.until("ready"))
        with monkeypatch.context() as patched:
            if reads_slowly:
                patched.setattr(connection, "_append", lambda *of: (time.sleep(len(of[2]) * 1e-7), append(*of)))
            thread = threading.Thread(target=first.fetch)
            thread.start()
            until((pair.root / "b-copy" / "coming").exists)
            while (pair.root / "b-copy" / "coming").exists():
                with pytest.raises(RuntimeError, match="expected one follower"):
                    second.fetch()
            thread.join()
        a.kill()


def test_a_leader_that_starts_again_sends_what_the_follower_lacks(pair, monkeypatch):
    sent, append = [], connection._append

    def counted(folder, name, data, before):
        sent.append(len(data or b""))
        append(folder, name, data, before)

    monkeypatch.setattr(connection, "_append", counted)
    store(pair.root / "a", rows=300_000, capacity=1 << 19)
    a, follower = pair.start("a"), pair.follower()
    follower.fetch()
    whole = sum(sent)
    assert whole > 2_400_000
    for more in (0, 5):
        a.kill()
        if more:
            with ReplayBuffer.open(pair.root / "a", unclean="accept") as rb:
                rb.extend({"a": torch.arange(300_000, 300_000 + more)})
        a = pair.start("a")
        sent.clear()
        follower.fetch()
        assert 0 < sum(sent) < (whole * 2 / 3 if more else 100_000), "all of it came again"
    a.kill()
    follower.make()
    assert pair.rows("b") == [*range(300_005)]
