"""A writer whose store is gone is told once, where a trajectory began there: it is never continued in another store."""

import contextlib
import warnings

import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from tests.serving.servers import serving


def steps(n, *, done=False):
    ends = torch.zeros(n, dtype=torch.bool)
    ends[-1] = done
    return {"obs": torch.zeros(n, 2), "next": {"done": ends}}


@contextlib.contextmanager
def fleet(tmp_path, lanes=1, n=2):
    """Servers of stores, and a buffer that looks for none that is gone."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name in "abc"[:n]:
            storage = LazyMemmapStorage(100, scratch_dir=tmp_path / name, lanes=lanes)
            with ReplayBuffer(storage=storage, batch_size=16) as rb:
                rb.extend(steps(4, done=True), lane=0)
            servers.append(stack.enter_context(serving(tmp_path / name)))
        rb = stack.enter_context(ReplayBuffer.connect([it.address for it in servers], patience=0.2))
        yield servers, rb


def lose(rb, servers, number):
    """The server dies, and it is a draw that notices it."""
    servers[number].kill()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        while not rb.storage.members.shards[number].lost:
            rb.sample()


@pytest.fixture(autouse=True)
def _looks_never(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 1e6)


def home_of(rb):
    return rb.storage._home.number


@pytest.mark.parametrize("call", ["extend", "add", "end_trajectory"])
def test_it_is_told_once_whoever_noticed(tmp_path, call):
    with fleet(tmp_path) as (servers, rb):
        rb.extend(steps(3))
        home = home_of(rb)
        lose(rb, servers, home)
        before = rb.stats()["size"]
        one = {"obs": torch.zeros(2), "next": {"done": torch.tensor(False)}}
        calls = {"extend": lambda: rb.extend(steps(2)), "add": lambda: rb.add(one), "end_trajectory": rb.end_trajectory}
        with pytest.raises(ConnectionError, match="is gone. Nothing was written. Begin a new episode"):
            calls[call]()
        assert rb.stats()["size"] == before
        assert (rb.extend(steps(2)) >> 48 == 1 - home).all()
        assert (rb.extend(steps(2)) >> 48 == 1 - home).all()


@pytest.mark.parametrize("ends", ["a flag", "end_trajectory", "nothing was written"])
def test_between_two_trajectories_nobody_is_told(tmp_path, ends):
    with fleet(tmp_path) as (servers, rb):
        if ends == "nothing was written":
            home = rb.storage.home().number
        else:
            rb.extend(steps(3, done=ends == "a flag"))
            home = home_of(rb)
            if ends == "end_trajectory":
                rb.end_trajectory()
        lose(rb, servers, home)
        assert (rb.extend(steps(2)) >> 48 == 1 - home).all()


def test_each_lane_counts(tmp_path):
    with fleet(tmp_path, lanes=3) as (servers, rb):
        rb.extend(steps(2), lane=0)
        rb.extend(steps(3), lane=torch.tensor([1, 2, 1]))
        home = home_of(rb)
        rb.extend(steps(1, done=True), lane=1)
        rb.end_trajectory(lane=2)
        assert rb.storage._open == {0}
        lose(rb, servers, home)
        with pytest.raises(ConnectionError, match="Begin a new episode"):
            rb.extend(steps(2), lane=1)
        assert (rb.extend(steps(2), lane=0) >> 48 == 1 - home).all()


def test_a_write_that_fails_has_told_it(tmp_path):
    with fleet(tmp_path) as (servers, rb):
        rb.extend(steps(3))
        home = home_of(rb)
        servers[home].kill()
        with pytest.warns(UserWarning, match="is gone"), pytest.raises(ConnectionError, match="no server"):
            rb.extend(steps(2))
        assert (rb.extend(steps(2)) >> 48 == 1 - home).all()


def test_a_store_that_is_back_in_time_keeps_the_trajectory(tmp_path):
    with fleet(tmp_path) as (servers, rb):
        rb.extend(steps(3))
        home = home_of(rb)
        lose(rb, servers, home)
        with serving(tmp_path / "ab"[home]):
            rb.storage.members.find()
            assert (rb.extend(steps(2)) >> 48 == home).all()
