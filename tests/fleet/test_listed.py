"""Fleets whose servers are listed in a file, or by DNS: stores join and leave them while they are used."""

import contextlib
import pickle
import socket
import time
import warnings

import numpy as np
import pytest
import torch

from engram import PrioritizedSampler, ReplayBuffer
from engram.remote.member_list import MemberList
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.serving.servers import serving
from tests.waiting import until


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    monkeypatch.setattr(MemberList, "interval_s", 0.02)


def write(path, addresses, comment="# the stores of this run"):
    """As an operator would: a reader sees the old list or the new one."""
    replace(path, ("\n".join([comment, "", *(f"{address}  # up" for address in addresses)]) + "\n").encode())


def replace(path, content):
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


@pytest.fixture
def three(tmp_path):
    """Three stores of 10, 20 and 30 rows with priorities 1, 2, 4, of which ``a`` counts from 0: servers; and where they are listed."""
    with contextlib.ExitStack() as stack:
        servers, first = [], 0
        for k, n in enumerate((10, 20, 30)):
            with made(tmp_path / str(k), rows_of(n, first), PrioritizedSampler(alpha=1.0, beta=1.0)) as rb:
                rb.update_priority(torch.arange(n), float(2**k))
            servers.append(stack.enter_context(serving(tmp_path / str(k))))
            first += n
        yield servers, tmp_path / "members"


def shares(rb, batches=60):
    """Of the rows that are drawn, how many are of each store."""
    drawn = torch.cat([rb.sample()["a"] for _ in range(batches)])
    return np.histogram(drawn.numpy(), bins=[0, 10, 30, 60])[0] / len(drawn)


def draws(rb, begin, end):
    """Whether a batch has rows of the store that counts from there."""
    drawn = rb.sample()["a"]
    return bool(((drawn >= begin) & (drawn < end)).any())


def connected(path, **more):
    return ReplayBuffer.connect(f"file:{path}", generator=seeded(), batch_size=64, **more)


def test_a_store_that_has_left_is_not_emptied(three):
    servers, path = three
    write(path, [server.address for server in servers])
    with connected(path) as rb:
        assert (len(rb), rb.stats()["capacity"]) == (60, 600)
        write(path, [server.address for server in servers[:2]])
        until(lambda: len(rb) == 30)
        assert rb.stats()["capacity"] == 400
        rb.empty()
        assert len(rb) == 0
    with ReplayBuffer.connect(servers[2].address) as left:
        assert len(left) == 30


def test_stores_join_and_leave_by_a_file(three):
    servers, path = three
    write(path, [servers[0].address])
    with connected(path) as rb, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (len(rb), rb.stats()["shards"]) == (10, 1)
        write(path, [server.address for server in servers])
        until(lambda: len(rb) == 60)
        np.testing.assert_allclose(shares(rb), np.array([10, 40, 120]) / 170, atol=0.04)
        before = rb.sample()
        write(path, [servers[0].address, servers[2].address])
        until(lambda: len(rb) == 40)
        stats = rb.stats()
        assert (stats["shards"], stats["shards_missing"], stats["rows_missing"]) == (2, 0, 0)
        np.testing.assert_allclose(shares(rb), np.array([10, 0, 120]) / 130, atol=0.04)
        gone = int((before["index"] >> 48 == 1).sum())
        assert gone
        rb.update_priority(before["index"], 1.0)  # those of the store that left are counted, and nothing else happens
        assert rb.stats()["priority_updates_dropped"] == gone
        write(path, [server.address for server in servers])
        until(lambda: len(rb) == 60)
        assert rb.stats()["shards"] == 3
        assert shares(rb)[1] > 0


def test_a_writer_whose_store_leaves_begins_another_trajectory_elsewhere(three):
    servers, path = three
    write(path, [servers[0].address])
    with connected(path) as rb:
        rb.extend(rows_of(3, 1000))  # no step ends the trajectory
        write(path, [servers[1].address])
        until(lambda: rb.stats()["shards"] == 1 and len(rb) == 20)
        with pytest.raises(ConnectionError, match="Nothing was written. Begin a new episode"):
            rb.extend(rows_of(3, 1003))
        rb.extend(rows_of(4, 2000))
        assert len(rb) == 24


def test_a_list_that_cannot_be_used_changes_nothing_and_is_logged_once(three, caplog, monkeypatch):
    servers, path = three
    write(path, [server.address for server in servers[:2]])
    looks, addresses = [], MemberList.addresses
    monkeypatch.setattr(MemberList, "addresses", lambda it: looks.append(1) or addresses(it))
    with connected(path) as rb:
        for text, why in (
            (b"", "got none"),
            (b"no address\n", "got 'no address'"),
            (b"# caf\xe9\n", "members: expected a text in UTF-8, got other bytes"),
            (b"unix:/one.sock\nfile:/more\n", "A list of addresses stands alone"),
            (None, "No such file"),
        ):
            caplog.clear()
            path.unlink() if text is None else replace(path, text)
            until(lambda: "stay as they are" in caplog.text)
            before = len(looks)
            until(lambda: len(looks) > before + 5)
            said = [it for it in caplog.messages if "stay as they are" in it]
            assert len(said) == 1
            assert why in said[0]
            assert (len(rb), rb.stats()["shards"]) == (30, 2)
        write(path, [servers[1].address])
        until(lambda: len(rb) == 20)
        path.unlink()  # the same as before, once more
        until(lambda: len([it for it in caplog.messages if "No such file" in it]) == 2)


def test_a_store_that_dies_is_looked_for_as_long_as_it_is_listed(three, tmp_path):
    servers, path = three
    write(path, [server.address for server in servers[:2]])
    with connected(path, patience=0.2) as rb:
        rb.sample()
        servers[1].kill()
        with pytest.warns(UserWarning, match="is gone, with 20 rows"):
            until(lambda: rb.sample() is not None and rb.stats()["shards_missing"] == 1)
        with serving(tmp_path / "1"):
            until(lambda: rb.stats()["shards_missing"] == 0)
            assert len(rb) == 30


def test_a_store_at_another_address_is_the_same_store(three, tmp_path):
    servers, path = three
    write(path, [server.address for server in servers[:2]])
    with connected(path, patience=0.2) as rb, serving(tmp_path / "1", f"unix:{tmp_path}/moved.sock") as moved:
        servers[1].kill()
        write(path, [servers[0].address, moved.address])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is gone, with")  # until the new list is read
            until(lambda: any((rb.sample()["a"] >= 10).any() for _ in range(5)))
        assert (len(rb), rb.stats()["shards"]) == (30, 2)


def test_a_store_leaves_where_another_one_took_its_address(three, tmp_path):
    servers, path = three
    at = f"unix:{tmp_path}/taken.sock"
    with serving(tmp_path / "1", at) as first:
        write(path, [servers[0].address, at])
        with connected(path, patience=0.2) as rb, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is gone, with")  # until the other store answers
            assert len(rb) == 30
            first.kill()
            until(lambda: rb.stats()["shards_missing"] == 1)
            with serving(tmp_path / "2", at) as second:
                until(lambda: len(rb) == 40 and rb.stats()["shards_missing"] == 0)
                assert (rb.stats()["shards"], rb.stats()["rows_missing"]) == (2, 0)
                until(lambda: draws(rb, 30, 60))
                second.kill()
                until(lambda: rb.stats()["shards_missing"] == 1)
            with serving(tmp_path / "1", at):  # and back
                until(lambda: len(rb) == 30 and rb.stats()["shards_missing"] == 0)
                until(lambda: draws(rb, 10, 30))


def test_a_pickled_buffer_follows_the_list(three):
    servers, path = three
    write(path, [servers[0].address])
    with connected(path) as rb, pickle.loads(pickle.dumps(rb)) as other:
        write(path, [server.address for server in servers])
        until(lambda: len(rb) == len(other) == 60)


def test_hosts_of_a_name_join(three, monkeypatch):
    """The name server is replaced: what it says are sockets of these servers."""
    servers, _ = three
    known = servers[:1]

    def looked_up(host, port, **_):
        assert (host, port) == ("engram.test", 7777)
        return [(0, 0, 0, "", (server.address, port)) for server in known]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(
        "engram.remote.protocol.Address.uri", property(lambda it: it.host.replace("unix:", "grpc+unix://"))
    )
    with ReplayBuffer.connect("dns:engram.test:7777", generator=seeded(), batch_size=64, patience=0.2) as rb:
        assert len(rb) == 10
        known = servers
        until(lambda: len(rb) == 60)
        known = servers[:2]  # a host that DNS leaves out and that answers is of the fleet
        time.sleep(0.1)
        assert len(rb) == 60
        servers[2].kill()
        with pytest.warns(UserWarning, match="is gone, with 30 rows"):
            until(lambda: rb.sample() is not None and rb.stats()["shards"] == 2)
        assert rb.stats()["shards_missing"] == 0


def test_what_is_listed_is_read_as_addresses(tmp_path, monkeypatch):
    path = tmp_path / "members"
    path.write_text("grpc+tls://one:7777 # first\n\n  two:7777\n")
    assert [str(it) for it in MemberList(f"file:{path}").addresses()] == ["grpc+tls://one:7777", "grpc+tls://two:7777"]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **_: [(0, 0, 0, "", (it, port)) for it in ("10.0.0.2", "10.0.0.1", "10.0.0.2")],
    )
    found = MemberList("dns:grpc+tls://engram.svc:7777").addresses()
    assert [str(it) for it in found] == ["grpc+tls://10.0.0.1:7777", "grpc+tls://10.0.0.2:7777"]
    assert {it.certified for it in found} == {"engram.svc"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("file:/nowhere/members", FileNotFoundError, "nowhere"),
        ("dns:engram.invalid:7777", ConnectionError, "no addresses of engram.invalid were found"),
        ("dns:engram", ValueError, "expected unix:/PATH, HOST:PORT"),
    ],
)
def test_lists_that_are_none(text, error, message):
    with pytest.raises(error, match=message):
        ReplayBuffer.connect(text, patience=0)


@pytest.mark.parametrize("mixed", ["file:/more", "dns:engram.test:1"])
def test_a_list_stands_alone(mixed):
    said = rf"got '{mixed}'\. A list of addresses stands alone: connect\('{mixed}'\)"
    for given in (["unix:/one.sock", mixed], f"unix:/one.sock,{mixed}"):
        with pytest.raises(ValueError, match=said):
            ReplayBuffer.connect(given)


def test_an_empty_list_is_refused(tmp_path):
    (tmp_path / "members").write_text("# soon\n")
    with pytest.raises(ValueError, match="expected an address of a server in each line, got none"):
        ReplayBuffer.connect(f"file:{tmp_path}/members")
