"""Shards of a buffer on Ray that join and leave it while clients write and draw."""

import os
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from engram import Checkpointer, LazyMemmapStorage, PrioritizedSampler, RayReplayBuffer, ReplayBuffer
from engram.serving import draining
from tests import waiting
from tests.cluster.on_nodes import AWAY, HERE, made, rows
from tests.statistics_of import assert_proportional

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
LIMIT_S = 240
BY_PRIORITY = partial(PrioritizedSampler, alpha=1.0, beta=1.0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.05)
    monkeypatch.setattr("engram.remote.shards._LIST_INTERVAL_S", 0.2)
    monkeypatch.setattr(draining, "FORWARD_S", 1.0)


def until(condition):
    waiting.until(condition, LIMIT_S)


def node(resource):
    """The id of the node of the tests' cluster that has a resource."""
    (found,) = (it["NodeID"] for it in ray.nodes() if it["Alive"] and resource in it["Resources"])
    return found


def names_in(folder):
    """The names of the rows that lie in the directories of shards."""
    found = []
    for path in sorted(folder.iterdir()):
        with ReplayBuffer.open(path, unclean="accept") as store:
            found += store[:]["a"].tolist() if len(store) else []
    return found


def call(shard, function, *arguments):
    """Call a function in the actor of a shard."""
    return ray.get(shard.actor.__ray_call__.remote(lambda _: function(*arguments)))


@ray.remote(num_cpus=0, resources={"away": 0.01})
class Elsewhere:
    """A client on the other node."""

    def __init__(self, rb):
        self._rb = rb

    def shards(self):
        return self._rb.stats()["shards"], len(self._rb)

    def write(self, n, first):
        return self._rb.extend(rows(n, first)).tolist()


def test_a_shard_joins_and_a_node_leaves_while_clients_go_on(nodes, tmp_path):
    storage = partial(LazyMemmapStorage, scratch_dir=tmp_path / "store")
    with made(AWAY, storage, 2000, sampler=BY_PRIORITY, shards=2, name="growing") as rb, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for k, writer in enumerate(rb.clients(2)):
            index = writer.extend(rows(20, 20 * k))
            writer.update_priority(index, torch.full((20,), 1.0 + k))
            writer.close()
        elsewhere = Elsewhere.remote(rb)
        with ReplayBuffer.connect("ray:growing", patience=LIMIT_S, batch_size=64) as named:
            assert (len(named), ray.get(elsewhere.shards.remote())) == (40, (2, 40))
            RayReplayBuffer.add_shard(rb, HERE)
            until(lambda: {rb.stats()["shards"], named.stats()["shards"], ray.get(elsewhere.shards.remote())[0]} == {3})
            with rb.client() as writer:
                index = writer.extend(rows(20, 40))
                assert (index >> 48 == 2).all()
                writer.update_priority(index, torch.full((20,), 4.0))
            until(lambda: len(named) == 60)
            check_draws(named, [1.0] * 20 + [2.0] * 20 + [4.0] * 20)

            ended, written = threading.Event(), []

            def write():
                with rb.client() as writer:
                    for first in range(100, 1000, 5):
                        try:
                            writer.extend(rows(5, first))
                        except ConnectionError:
                            writer.extend(rows(5, first))  # nothing was written: it was told once that its store leaves
                        written.extend(range(first, first + 5))
                        if ended.is_set():
                            return
                        time.sleep(0.02)

            writing = threading.Thread(target=write)
            writing.start()
            RayReplayBuffer.drain_node(rb, node("away"))
            ended.set()
            writing.join()
            assert sorted(ray.get(elsewhere.write.remote(5, 2000)))
            written += range(2000, 2005)
            everything = [*range(60), *written]
            until(lambda: {rb.stats()["shards"], named.stats()["shards"], ray.get(elsewhere.shards.remote())[0]} == {1})
            assert len(rb) == len(named) == ray.get(elsewhere.shards.remote())[1] == len(everything)
            for one in (rb, named):
                assert one.stats()["shards_missing"] == one.stats()["rows_missing"] == 0
            with rb.client() as late, ReplayBuffer.connect("ray:growing", patience=LIMIT_S) as later:
                assert late.stats()["shards"] == later.stats()["shards"] == 1
        ray.kill(elsewhere)
        with ReplayBuffer.connect("ray:growing", patience=LIMIT_S) as named:
            assert len(named) == len(everything)
            RayReplayBuffer.add_shard(rb)  # behind a fleet of one
            assert rb._service.shards.each[-1].name == "growing/3"
            until(lambda: named.stats()["shards"] == 2)
    assert sorted(names_in(tmp_path / "store")) == sorted(everything)


def check_draws(rb, weights):
    """Draws of the first rows are proportional to these weights."""
    for _ in range(3):
        rb.sample()  # the stores tell their masses with it
    counts = np.zeros(len(weights))
    for _ in range(int(sum(weights)) * 20 // len(rb.sample())):
        counts += np.bincount(rb.sample()["a"].numpy(), minlength=len(weights))
    assert_proportional(counts.tolist(), weights)


def die(method, count, when):
    """Let the process of a shard die in a method of its class, when it is called for this time."""
    from engram.serving import draining, service

    kind = {"take": service.Service, "_keep": draining.Draining}[method]
    done, calls = getattr(kind, method), []
    draining.BLOCK_ROWS = 8

    def dying(self, *given, **named):
        calls.append(1)
        if len(calls) == count and when == "before":
            os._exit(1)
        found = done(self, *given, **named)
        if len(calls) == count:
            os._exit(1)
        return found

    setattr(kind, method, dying)


@pytest.mark.parametrize(
    ("who", "method", "count", "when"),
    [(0, "_keep", 4, "after"), (0, "_keep", 5, "after"), (1, "take", 5, "before"), (1, "take", 5, "after")],
)
def test_no_row_is_lost_or_doubled_where_a_shard_is_killed_in_the_midst(nodes, tmp_path, who, method, count, when):
    storage = partial(LazyMemmapStorage, scratch_dir=tmp_path / "store")
    with made([AWAY, HERE], storage, 200, sampler=BY_PRIORITY, shards=2) as rb, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, writer in enumerate(rb.clients(2)):
            index = writer.extend(rows(40, 40 * k))
            writer.update_priority(index, torch.full((40,), 1.0 + k))
            writer.close()
        call(rb._service.shards.each[who], die, method, count, when)
        RayReplayBuffer.drain_node(rb, node("away"))
        until(lambda: rb.stats()["shards"] == 1 and rb.stats()["shards_missing"] == 0)
        assert len(rb) == 80
        check_draws(rb, [1.0] * 40 + [2.0] * 40)
    assert sorted(names_in(tmp_path / "store")) == list(range(80))


def test_checkpoints_are_of_the_shards_that_there_are(nodes, tmp_path, monkeypatch):
    storage = partial(LazyMemmapStorage, scratch_dir=tmp_path / "store")
    with made([HERE, AWAY], storage, shards=2, missing="wait") as rb, rb.client() as other:
        rb.extend(rows(10))
        other.extend(rows(10, 10))
        checkpoints = Checkpointer(tmp_path / "series", rb)
        assert checkpoints.save(1).steps == 20
        RayReplayBuffer.add_shard(rb, HERE)
        with rb.client() as third:
            third.extend(rows(10, 20))
        assert checkpoints.save(2).steps == 30
        monkeypatch.setattr(draining, "FORWARD_S", 5.0)
        leaving = threading.Thread(target=RayReplayBuffer.drain_node, args=(rb, node("away")))
        leaving.start()
        until(lambda: refused(checkpoints))
        leaving.join()
        assert len(rb) == len(other) == 30
        assert checkpoints.save(4).steps == 30
        rb.empty()
        assert checkpoints.restore().steps == 30
        drawn = set()
        until(lambda: drawn.update(rb.sample()["a"].tolist()) or drawn == set(range(30)))
        assert checkpoints.restore(step=2).steps == 30


def refused(checkpoints):
    """Whether a save is refused now, as a shard is drained."""
    try:
        checkpoints.save(3)
    except RuntimeError as error:
        return "one is drained" in str(error)
    return False


def test_what_cannot_change_is_refused(nodes):
    with made(HERE) as one, pytest.raises(ValueError, match="shards=2 or more"):
        RayReplayBuffer.add_shard(one)
    with made(HERE, shards=2, name="here") as rb:
        with rb.client() as client, pytest.raises(ValueError, match="made here"):
            RayReplayBuffer.drain_node(client, node("here"))
        for other in ("away", "here"):
            with pytest.raises(ValueError, match="Nothing moves"):
                RayReplayBuffer.drain_node(rb, node(other))
        for more in ({"shards": 2}, {}):
            with pytest.raises(ValueError, match="that no buffer here has, got 'here'"):
                made(HERE, name="here", **more)
        with pytest.raises(ValueError, match="expected 3 dicts"):
            RayReplayBuffer.add_shard(rb, [HERE])
        assert len(rb._service.shards.each) == 2
