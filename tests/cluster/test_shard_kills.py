"""Shards that are killed at any moment, under writers and a learner: what was acknowledged is there, once and whole."""

import itertools
import os
import signal
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from tests import stress
from tests.cluster.on_nodes import AWAY, made
from tests.waiting import Limit

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
KILLS, SHARDS, AT_ONCE = stress.size(2, 200), 2, 3
CAPACITY = 1_000_000
ROW = (1 << 48) - 1


def rows(name):
    """Of one write: each row says which one it is, in two fields."""
    a = torch.arange(name * AT_ONCE, (name + 1) * AT_ONCE)
    return TensorDict({"a": a, "b": torch.stack([a, -a], 1)}, [AT_ONCE])


def impatient(rb):
    """Let a client take a shard for gone at once."""
    for shard in rb.storage.there.members.shards:
        shard.storage.connection.access.patience_s = 0.1


class Writer:
    """A client that writes, and what it knows of its rows."""

    def __init__(self, rb, names):
        self.rb, self._names = rb, names
        #: By row of the fleet, what is there; and names of writes that may be there or not.
        self.known, self.unsure = {}, set()

    def write(self):
        name = next(self._names)
        try:
            index = self.rb.extend(rows(name))
        except ConnectionError:
            self.unsure.add(name)
        else:
            self.known |= {int(row): name * AT_ONCE + k for k, row in enumerate(index)}


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_acknowledged_rows_are_there_once_though_shards_are_killed(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    chance, names = stress.chance("shards"), itertools.count()
    storage = partial(LazyMemmapStorage, scratch_dir=tmp_path)
    sampler = partial(PrioritizedSampler, alpha=0.6, beta=0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with made(AWAY, storage, CAPACITY, sampler=sampler, shards=SHARDS) as rb:
            writers = [Writer(client, names) for client in rb.clients(SHARDS)]
            for writer in writers:
                writer.write()
                impatient(writer.rb)
            rb.sample()
            impatient(rb)
            for _ in range(KILLS):
                kill(rb._service.shards.each[chance.randrange(SHARDS)].actor)
                limit = Limit(240)
                for step in itertools.count():
                    for writer in writers:
                        writer.write()
                    batch = rb.sample()
                    assert torch.equal(batch["b"], torch.stack([batch["a"], -batch["a"]], 1))
                    batch["td_error"] = torch.rand(8)
                    rb.update_tensordict_priority(batch)
                    if step > 3 and not any(one.stats()["shards_missing"] for one in (rb, *(it.rb for it in writers))):
                        break
                    limit.check("going on after a kill")
            for writer in writers:
                writer.rb.close()
    check(tmp_path, writers)


def kill(actor):
    """Kill the process of an actor, which Ray starts again."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def check(folder, writers):
    """Every row that was acknowledged is where it was said to be, whole, and none is anywhere twice."""
    unsure, everything = set().union(*(writer.unsure for writer in writers)), []
    known = {row: name for writer in writers for row, name in writer.known.items()}
    for number in range(SHARDS):
        with ReplayBuffer.open(folder / f"shard-{number:05d}-of-{SHARDS:05d}", unclean="accept") as store:
            extent = store.storage.extent()
            at = extent.rows(torch.arange(extent.size))
            a, b = store[at]["a"], store[at]["b"]
        assert torch.equal(b, torch.stack([a, -a], 1))
        found = dict(zip(at.tolist(), a.tolist(), strict=True))
        ours = {row & ROW: name for row, name in known.items() if row >> 48 == number}
        assert ours
        assert ours.items() <= found.items()
        assert {found[row] // AT_ONCE for row in found.keys() - ours.keys()} <= unsure
        everything += found.values()
    assert len(set(everything)) == len(everything)
