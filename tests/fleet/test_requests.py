"""A fleet asks its stores for nothing that nobody needs, and one that is dead lets nobody else wait."""

import contextlib
import time
import warnings
from collections import Counter
from functools import partial
from threading import Barrier

import pytest
import torch

from engram import LazyMemmapStorage, MinSize, PrioritizedSampler, RandomSampler, RateLimited, ReplayBuffer
from engram.remote import connection
from engram.remote.fleet import members
from tests.serving.servers import serving, serving_each


def rows(n, first=0):
    return {"a": torch.arange(first, first + n)}


def made(folder, sampler=RandomSampler):
    with ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=folder), sampler=sampler(), batch_size=64) as rb:
        rb.extend(rows(20))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Of five stores."""
    folders = [tmp_path_factory.mktemp("requests") / name for name in "abcde"]
    for folder in folders:
        made(folder)
    with serving_each(folders):
        yield [f"unix:{folder}.sock" for folder in folders]


@pytest.fixture
def asked(monkeypatch):
    """The actions that were asked for since it was cleared, as Flight's client sends them."""
    found, answer = Counter(), connection._answer

    def counted(client, options, name, *more):
        found[name] += 1
        return answer(client, options, name, *more)

    monkeypatch.setattr(connection, "_answer", counted)
    return found


@pytest.fixture
def seconds(monkeypatch):
    """Lets time pass, for what looks at the clock."""
    offset, clock = [0.0], time.monotonic
    monkeypatch.setattr(members.time, "monotonic", lambda: clock() + offset[0])

    def pass_by(n):
        offset[0] += n

    return pass_by


def test_a_writer_asks_its_store_and_no_other_one(addresses, asked, seconds):
    with ReplayBuffer.connect(addresses) as rb:
        home = int(rb.extend(rows(3))[0] >> 48)
        assert [k for k, it in enumerate(rb.storage.members.shards) if it.storage.connection.is_open] == [home]
        asked.clear()
        for _ in range(5):
            seconds(2.0)
            rb.extend(rows(3))
        assert not asked


def test_a_learner_asks_for_batches_alone(addresses, asked, seconds):
    with ReplayBuffer.connect(addresses, batch_size=512) as rb:
        rb.sample()
        asked.clear()
        for _ in range(5):
            seconds(0.5)  # each answer says what its store has
            rb.sample()
        assert not asked


def test_limits_that_another_client_sets_are_heard_of_with_the_next_answer(addresses, asked):
    with contextlib.ExitStack() as stack:
        one, writer, learner = (stack.enter_context(ReplayBuffer.connect(addresses, batch_size=64)) for _ in range(3))
        writer.extend(rows(1)), learner.sample()
        one.limit(MinSize(5000))
        learner.sample(timeout=0)  # its answers tell
        writer.extend(rows(1))
        with pytest.raises(RateLimited, match="MinSize"):
            learner.sample(timeout=0)
        one.limit(None)
        learner.sample(timeout=30)
        writer.extend(rows(1))
        writer.extend(rows(1))
        learner.sample()
        asked.clear()
        for _ in range(3):
            learner.sample(), writer.extend(rows(1))
        assert not asked


class Waits(Exception):
    """Raised in place of a pause."""


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(1000, 1.0, 1.0)])
def test_a_store_that_dies_stalls_neither_draws_nor_priorities_nor_writes_to_others(tmp_path, sampler, monkeypatch):
    """No call pauses between two looks for a server: whoever does, raises here."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        made(folder, sampler)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(folder)) for folder in folders]
        rb = stack.enter_context(ReplayBuffer.connect([it.address for it in servers], patience=60))
        monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 1e6)
        opened = connection.Connection._open

        def hurried(self, known=None, patience_s=None):
            assert patience_s == 0.0, "it would wait"
            return opened(self, known, patience_s)

        home = int(rb.extend(rows(3))[0] >> 48)
        first, second = (k for k in range(3) if k != home)
        batch = rb.sample(return_info=True)[1]["index"]
        monkeypatch.setattr(connection.Connection, "_open", hurried)
        servers[first].kill()
        change = rb.sample if sampler is RandomSampler else partial(rb.update_priority, batch, torch.ones(len(batch)))
        with pytest.warns(UserWarning, match="is gone"):
            [change() for _ in range(50)]
        servers[second].kill()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            rb.extend(rows(3))
            found = [rb.sample(return_info=True)[1]["index"] for _ in range(5)][-1]
        assert (found >> 48 == home).all()
        assert rb.stats()["shards_missing"] == 2


def test_stores_are_asked_at_the_same_time(addresses, monkeypatch):
    """Each answers when all have been asked."""
    together, answer = Barrier(len(addresses)), connection._answer

    def waits(client, options, name, *more):
        if name == "stats":
            together.wait(60)
        return answer(client, options, name, *more)

    with ReplayBuffer.connect(addresses) as rb:
        monkeypatch.setattr(connection, "_answer", waits)
        assert rb.stats()["shards"] == len(addresses)
        rb.sample()
