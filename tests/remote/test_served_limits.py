"""Limits of a store hold for the clients of its server."""

import contextlib
import threading

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
