"""Limits of a store hold for the clients of its server."""

import contextlib
import threading
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    MaxInFlight,
    NoSampleable,
    RateLimited,
    ReplayBuffer,
    SamplesPerInsert,
)
from engram._support.native import NotAdmitted
from engram.buffer.connecting import RequestsUnderWay
from tests.serving.servers import serving_each

LIMITS = {"ratio": SamplesPerInsert(1, min_size=20, tolerance=0), "queue": MaxInFlight(20)}


def rows(n):
    return {"a": torch.arange(n)}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Served buffers of twenty rows by name, each with its address."""
    root = tmp_path_factory.mktemp("limited")
    found = {}
    for name in LIMITS:
        sampler = ConsumingSampler(1) if name == "queue" else None
        found[name] = ReplayBuffer(
            storage=LazyMemmapStorage(100, scratch_dir=root / name), sampler=sampler, batch_size=10
        )
        found[name].extend(rows(20))
    with serving_each([root / name for name in found]):
        yield {name: (rb, f"unix:{root / name}.sock") for name, rb in found.items()}
    for rb in found.values():
        rb.close()


@pytest.fixture(params=LIMITS)
def limited(stores, request):
    """A buffer that holds as many rows as its limit centres on, and its server's address."""
    rb, address = stores[request.param]
    rb.limit(None)
    rb.empty()
    rb.extend(rows(20))
    rb.limit(LIMITS[request.param])
    yield rb, address
    rb.limit(None)


def test_a_client_is_told_whether_it_can_sample(limited):
    rb, address = limited
    with ReplayBuffer.connect(address) as client:
        batches = 0
        while client.can_sample():
            client.sample(timeout=0)
            batches += 1
        assert batches
        with pytest.raises((RateLimited, NoSampleable)):
            client.sample(timeout=0)
        rb.extend(rows(10))
        assert client.can_sample()


def test_rows_over_a_connection_count_and_wait(limited):
    rb, address = limited
    with ReplayBuffer.connect(address) as remote:
        assert remote.limits == rb.limits
        if rb.stats()["limit_ratio"]:
            remote.extend(rows(10), timeout=0)  # as much as one insert needs
        with pytest.raises(RateLimited, match="extend: 10 rows .*Sample"):
            remote.extend(rows(10), timeout=0.05)
        remote.sample(timeout=0)
        assert rb.stats()["limit_samples"] == remote.stats()["limit_samples"] == 10
        remote.extend(rows(10), timeout=0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sample_waits_until_rows_are_inserted(limited, prefetch):
    rb, address = limited
    with ReplayBuffer.connect(address, prefetch=prefetch) as remote:
        drawn = 0
        with contextlib.suppress(RateLimited, NoSampleable):  # a queue has nothing more to draw
            while drawn < 20:
                remote.sample(timeout=0)
                drawn += 1
        assert drawn <= 2
        got = []
        waiting = threading.Thread(target=lambda: got.append(remote.sample(timeout=60)))
        waiting.start()
        rb.extend(rows(20))
        waiting.join()
        assert len(got[0]["a"]) == 10


def test_one_thread_that_samples_and_writes_never_waits_for_itself(limited):
    _, address = limited
    with ReplayBuffer.connect(address, prefetch=2) as remote:
        for _ in range(20):
            remote.sample(timeout=0)
            remote.extend(rows(10), timeout=0)


def test_what_waits_ends_with_its_buffer(limited):
    _, address = limited
    remote = ReplayBuffer.connect(address)
    if remote.stats()["limit_ratio"]:
        remote.extend(rows(10), timeout=0)
    began, errors = threading.Event(), []

    def write():
        began.set()
        try:
            remote.extend(rows(10), timeout=None)
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=write)
    waiting.start()
    began.wait()
    remote.close()
    waiting.join()
    assert "closed" in str(errors[0])


def test_a_batch_that_was_drawn_behind_a_refusal_is_handed_out():
    """Of two messages under way the first came too early: the rows of the second are counted."""
    no = NotAdmitted(10)
    answers, asked = [no, ["a batch", "one more"], no, no, ["the last"], no, no, no, no], []

    def answer(_):
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return [partial(str, batch) for batch in said]  # each is copied out when it is called for

    storage = SimpleNamespace(batches_in_message=lambda _: 2, answer=answer, ask_for=lambda keys, _: asked.append(keys))
    wiring = SimpleNamespace(storage=storage, of_sampler=SimpleNamespace(has_epochs=False))
    numbers = count()
    reading = SimpleNamespace(draw_key=lambda key: key.draw())
    requests = RequestsUnderWay(wiring, SimpleNamespace(prefetch=2, batch_size=10), reading)
    requests._drawn_key = lambda: next(numbers)
    assert requests._next(None) == "a batch"
    assert asked == [[0, 1], [2, 3], [0, 1], [4, 5]]  # what was refused is asked for again
    assert requests._next(None) == "one more"
    assert requests._next(None) == "the last"  # the refusals were of messages from before this call
    with pytest.raises(NotAdmitted):
        requests._next(None)
    assert asked[4:] == [[0, 1], [4, 5], [1, 6], [4, 5], [1, 6]]  # also the key of a batch that did not come
    assert answers == []
