"""Stores that answer for the first time, and are gone again before they have joined a fleet."""

from types import SimpleNamespace

import pytest

from engram.remote.fleet import storage
from engram.remote.fleet.members import Members
from engram.remote.protocol import State


class Store:
    """A served store, of which some calls find no server."""

    def __init__(self, name, *, refuses=0):
        self.name, self.refuses, self.version, self.closed = name, refuses, None, False
        self.served = SimpleNamespace(store=name)
        self.connection = SimpleNamespace(reconnect=self.asked, is_replaced=False)

    def asked(self):
        if self.refuses:
            self.refuses -= 1
            raise ConnectionError("no server")

    def consumer_version(self, version):
        self.asked()
        self.version = version

    def state(self):
        self.asked()
        return State(0, 0, {}, (0.0, 0.0, 0, 0), {})

    def forget_asked(self):
        pass

    def close(self):
        self.closed = True


class Joining:
    """Gives a store once."""

    def __init__(self, store):
        self.stores = [store]

    def left(self):
        return bool(self.stores)

    def has_left(self, storage, *, lost):
        del storage, lost
        return False

    def find(self, known):
        del known
        while self.stores:
            yield self.stores.pop()


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch):
    monkeypatch.setattr(
        "engram.remote.fleet.members.ReconnectPoller", lambda members: SimpleNamespace(end=lambda: None)
    )


def test_a_store_that_is_gone_while_it_joins_is_looked_for():
    late = Store("late", refuses=1)
    members = Members([Store("first")], "skip", Joining(late), epochs=False)
    members.version = 5
    assert members.find()  # goes on looking
    assert [shard.lost for shard in members.shards] == [False, True]
    assert not members.find()
    assert [shard.lost for shard in members.shards] == [False, False]
    assert late.version == 5


def test_an_address_whose_server_is_gone_again_is_asked_again(monkeypatch, recwarn):
    answers = SimpleNamespace(store="late")
    made = [Store("late", refuses=1), Store("late")]
    given = iter(made)
    monkeypatch.setattr(storage, "_served_at", lambda access, address: answers)
    monkeypatch.setattr(storage, "check_stores", lambda served, full: None)
    monkeypatch.setattr(storage, "Connection", lambda access: None)
    monkeypatch.setattr(storage, "RemoteStorage", lambda connection: next(given))
    silent = storage.Silent(
        SimpleNamespace(full=None, addresses=(), members=None, _replace=lambda **_: None), ["there"]
    )
    first = Store("first")
    assert list(silent.find([first])) == []
    assert silent.left()
    assert made[0].closed
    assert list(silent.find([first])) == [made[1]]
    assert not silent.left()
    assert not recwarn.list
