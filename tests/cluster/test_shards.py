"""Buffers of which several actors of Ray keep a store each."""

import copy
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    MinSize,
    NoSampleable,
    PrioritizedSampler,
    RateLimited,
    RayReplayBuffer,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests import waiting
from tests.cluster.on_nodes import AWAY, HERE, made, rows
from tests.statistics_of import assert_proportional

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
ROW = (1 << 48) - 1


def until(condition, limit_s=240):
    """Look again and again, as Ray starts actors when it can."""
    waiting.until(condition, limit_s)


@pytest.fixture(scope="module")
def three(nodes):
    """A buffer of two shards on the other node and one on this."""
    sampler = partial(PrioritizedSampler, 100, 1.0, 1.0)
    with made([AWAY, HERE, AWAY], sampler=sampler, shards=3, name="three") as rb:
        yield rb


def test_before_the_first_row_it_is_empty_and_each_writer_has_a_shard_of_its_own(three):
    assert isinstance(three, RayReplayBuffer)
    assert (three.transport_kind, three.service_backend) == ("flight", "ray")
    assert (len(three), three.write_count, three.can_sample(), three.storage.max_size) == (0, 0, False, 300)
    with pytest.raises(NoSampleable):
        three.sample()
    with pytest.raises(RowError, match="empty buffer"):
        three.update_priority(torch.tensor([1]), 1.0)
    assert three.remove([0, 299, -1]) == 0
    writers = three.clients(3)
    index = [writer.extend(rows(10 * (k + 1), 100 * k)) for k, writer in enumerate(writers)]
    assert sorted((one >> 48).unique().tolist() for one in index) == [[0], [1], [2]]
    assert [writer.extend(rows(1, 90 + k))[0] >> 48 for k, writer in enumerate(writers)] == [
        one[0] >> 48 for one in index
    ]
    assert len(three) == three.write_count == 63
    stats = three.stats()
    assert (stats["shards"], stats["shards_missing"], stats["size"], stats["capacity"]) == (3, 0, 63, 300)
    for writer in writers:
        writer.close()
    assert len(three) == 63


def test_clients_that_begin_at_once_take_different_shards(three):
    with three.client() as first:
        first.extend(rows(1))  # a home is chosen once there are rows
    until(lambda: three.storage.there.state().writers == 0)  # it has left, and those of the test before
    writers, barrier, homes = three.clients(3), threading.Barrier(3), [None] * 3

    def begin(k):
        len(writers[k])
        barrier.wait()
        homes[k] = writers[k].storage.there.home().number  # none of them has told a store yet that it writes

    threads = [threading.Thread(target=begin, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(homes) == [0, 1, 2]
    for writer in writers:
        writer.close()


def test_limits_and_versions_are_those_of_all_shards(nodes):
    sampler = partial(StalenessAwareSampler, max_staleness=1, version_key="a")
    with made([AWAY, HERE], sampler=sampler, shards=2) as rb:
        for early in (lambda: rb.limit(MinSize(3)), lambda: rb.sampler.consumer_version):
            with pytest.raises(RuntimeError, match="expected rows in .* nothing was ever written"):
                early()
        writers = rb.clients(2)
        for writer in writers:
            writer.extend(rows(5))  # of versions 0 to 4
        rb.limit(MinSize(12))
        with pytest.raises(RateLimited, match="MinSize"):
            rb.sample(timeout=0)
        assert rb.limits == (MinSize(12),)
        until(lambda: writers[0].limits == rb.limits)  # which looks at them again from time to time
        writers[0].extend(rows(5))
        rb.sampler.consumer_version = 4
        assert writers[1].sampler.consumer_version == 4
        assert set(rb.sample(timeout=240)["a"].tolist()) <= {3, 4}
        rb.limit(None)
        [writer.close() for writer in writers]


def test_draws_are_those_of_one_tree(three):
    three.empty()
    writers = three.clients(3)
    index = torch.cat([writer.extend(rows(10 * (k + 1), 30 * k)) for k, writer in enumerate(writers)])
    names = torch.cat([torch.arange(30 * k, 30 * k + 10 * (k + 1)) for k in range(3)])
    priorities = torch.rand(60, generator=torch.Generator().manual_seed(1)) + 0.1
    of_name, counts = torch.zeros(100), torch.zeros(100)
    of_name[names] = priorities
    how = {"batch_size": 100, "generator": torch.Generator().manual_seed(5), "patience": 240}
    with ReplayBuffer.connect("ray:three", **how) as rb:
        rb.update_priority(index, priorities)
        for _ in range(2):
            rb.sample()  # the stores tell their masses with it
        for _ in range(60):
            batch = rb.sample()
            counts += torch.bincount(batch["a"], minlength=100)
            assert torch.allclose(batch["priority_weight"], priorities.min() / of_name[batch["a"]], rtol=1e-4)
            assert batch["next", "reward"].tolist() == batch["a"].float().tolist()
    assert_proportional(counts[names].tolist(), of_name[names].tolist())
    for writer in writers:
        writer.close()


def test_names_pickles_and_copies_are_clients_of_all_shards(three):
    three.empty()
    three.extend(rows(20))

    @ray.remote(num_cpus=0, resources={"away": 0.01})
    def use(rb):
        rb.extend(rows(5, 50))
        kind, transport, size = type(rb).__name__, rb.transport_kind, len(rb)
        rb.close()
        return kind, transport, size

    assert ray.get(use.remote(three)) == ("TensorDictReplayBuffer", "flight", 25)
    with ReplayBuffer.connect("ray:three", patience=240, batch_size=4, missing="wait") as rb:
        assert (len(rb), rb.stats()["shards"], len(rb.sample())) == (25, 3, 4)
        with pickle.loads(pickle.dumps(rb)) as again, copy.copy(rb) as other:
            assert len(again.sample()) == len(other.sample()) == 4
    with ReplayBuffer.connect("ray:three", patience=240, stratum=int(three.extend(rows(1))[0] >> 48)) as rb:
        batch = rb.sample()
        assert batch["loss_factor"].shape == (8,)
        assert len((batch["index"] >> 48).unique()) == 1
    with pytest.raises(ValueError, match="one of 3 stores, got 3"):
        ReplayBuffer.connect("ray:three", patience=240, stratum=3)
    with pytest.raises(ValueError, match="missing"):
        ReplayBuffer.connect("ray:three", missing="drop")


def test_an_epoch_has_every_row_of_all_shards_once(nodes):
    with made(AWAY, sampler=SamplerWithoutReplacement, shards=2) as rb:
        writers = rb.clients(2)
        for k, writer in enumerate(writers):
            writer.extend(rows(20, 20 * k))
        drawn = torch.cat([rb.sample(8)["a"] for _ in range(5)])
        assert sorted(drawn.tolist()) == list(range(40))
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("missing", ["skip", "wait"])
def test_a_shard_that_died_serves_its_rows_again(nodes, tmp_path, missing, monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    storage = partial(LazyMemmapStorage, scratch_dir=tmp_path / "store")
    with made(AWAY, storage, shards=2, missing=missing) as rb, rb.client() as other, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = rb.extend(rows(10))
        second = other.extend(rows(10, 10))
        assert {int(first[0] >> 48), int(second[0] >> 48)} == {0, 1}
        victim = rb._service.shards.each[int(second[0] >> 48)]
        ray.kill(victim.actor, no_restart=False)
        for _ in range(5):  # whether it is there or not
            assert set(rb.sample()["a"].tolist()) <= set(range(20))
        until(lambda: rb.stats()["shards_missing"] == 0)
        assert len(rb) == 20
        third = rb.extend(rows(10, 20))
        assert int(third[0] >> 48) == int(first[0] >> 48)
        seen = set()
        until(lambda: seen.update(rb.sample()["a"].tolist()) or seen == set(range(30)))
    names = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert names == ["shard-00000-of-00002", "shard-00001-of-00002"]
    found = []
    for name in names:
        with ReplayBuffer.open(tmp_path / "store" / name, unclean="accept") as store:
            found += store[:]["a"].tolist()
    assert sorted(found) == list(range(30))


def test_what_several_stores_cannot_do_is_refused_before_rows_come(nodes):
    steps = {"kind": TensorDictReplayBuffer, "shards": 2}
    with pytest.raises(ValueError, match="keeps the best rows"):
        made(HERE, writer=TensorDictMaxValueWriter, **steps)
    with pytest.raises(ValueError, match="different lengths"):
        made(HERE, sampler=partial(SliceSampler, num_slices=2), **steps)


def test_the_constructor_of_a_buffer_takes_shards_too(nodes):
    with TensorDictReplayBuffer(
        storage=partial(LazyMemmapStorage, 50),
        batch_size=4,
        service_backend="ray",
        service_backend_options={"remote_config": HERE},
        shards=2,
        missing="wait",
    ) as rb:
        rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
        assert (len(rb), len(rb.sample()), rb.stats()["shards"]) == (10, 4, 2)
