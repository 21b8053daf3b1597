"""Another store is served at an address that clients are connected to: a channel connects again by itself, and nothing lands there."""

import contextlib
import warnings

import pytest
import torch

from engram import PrioritizedReplayBuffer, ReplayBuffer
from tests.serving.servers import serving, token_file


def rows(first, n):
    return {"key": torch.arange(first, first + n), "done": torch.zeros(n, dtype=torch.bool)}


def row(key):
    return {"key": torch.tensor(key), "done": torch.tensor(False)}


def streamed(remote):
    remote.add(row(7))
    try:
        remote.add(row(8))  # it may come before the first one has failed
        len(remote)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            remote.close()


#: What a client does, and how it is connected.
CALLS = {
    "extend": (lambda rb: rb.extend(rows(7, 2)), {}),
    "add": (lambda rb: rb.add(row(7)), {}),
    "streamed": (streamed, {"full": "block"}),
    "sample": (lambda rb: rb.sample(), {}),
    "prefetched": (lambda rb: [rb.sample() for _ in range(40)], {"prefetch": 2}),
    "update_priority": (lambda rb: (rb.update_priority(torch.tensor([0]), torch.tensor([9.0])), rb.sample()), {}),
    "len": (len, {}),
    "stats": (lambda rb: rb.stats(), {}),
    "empty": (lambda rb: rb.empty(), {}),
    "end_trajectory": (lambda rb: rb.end_trajectory(), {}),
    "remove": (lambda rb: rb.remove([0, 1]), {}),
    "index_keys": (lambda rb: rb.index_keys("key"), {}),
    "update_if_present": (
        lambda rb: rb.update_if_present(index=[0], generation=[0], patch={"key": torch.tensor([9])}),
        {},
    ),
    "dumps": (lambda rb: rb.dumps(rb.path), {}),
}


def state(folder):
    """All that a call can change."""
    with ReplayBuffer.open(folder) as rb:
        tickets = rb.storage.tickets_of(torch.arange(10)).tolist()
        return rb["key"].tolist(), rb["done"].tolist(), rb.write_count, tickets, rb.sampler.priorities().masses


@pytest.mark.parametrize("used", [False, True], ids=["idle", "used"])
def test_no_call_reaches_the_store_that_is_there_now(tmp_path, used):
    token = token_file(tmp_path)
    for name, first in (("mine", 0), ("other", 50)):
        with PrioritizedReplayBuffer.open_or_create(tmp_path / name, 100, alpha=0.6, beta=0.4, batch_size=4) as rb:
            rb.extend(rows(first, 10))
    before = state(tmp_path / "other")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "mine", "127.0.0.1:0", token))
        each = {
            name: stack.enter_context(ReplayBuffer.connect(server.address, token=token, patience=5, **how))
            for name, (_, how) in CALLS.items()
        }
        for remote in each.values():
            remote.path = tmp_path / "dump"
            if used:
                remote.sample()
        server.kill()
        stack.enter_context(serving(tmp_path / "other", server.address, token))
        for name, remote in each.items():
            with pytest.raises((ValueError, ConnectionError), match="another store"):
                CALLS[name][0](remote)
    assert not (tmp_path / "dump").exists()
    assert state(tmp_path / "other") == before
