"""Stores whose servers die: the others go on, and those that are back are drawn from again."""

import contextlib
import warnings

import pytest
import torch

from engram import (
    LazyMemmapStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.store.limits import MinSize
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.serving.servers import serving, serving_each
from tests.waiting import until

#: Seconds after which a store is left out.
SKIP_S = 0.2


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)


@contextlib.contextmanager
def fleet(tmp_path, sampler):
    """Two stores of 20 and 30 rows, each with a server of its own: the servers and the folders."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, first, n in zip(folders, (0, 20), (20, 30), strict=True):
        made(folder, rows_of(n, first), sampler()).close()
    with serving(folders[0]) as one, serving(folders[1]) as other:
        yield (one, other), folders


@pytest.mark.parametrize(
    ("sampler", "prefetch"), [(RandomSampler, 0), (lambda: PrioritizedSampler(alpha=1.0, beta=1.0), 2)]
)
def test_a_store_that_dies_is_left_out_and_comes_back(tmp_path, sampler, prefetch):
    with fleet(tmp_path, sampler) as (servers, folders):
        addresses = [server.address for server in servers]
        how = {"patience": SKIP_S, "generator": seeded(), "prefetch": prefetch, "batch_size": 64}
        with ReplayBuffer.connect(addresses, **how) as rb:
            batch = rb.sample()
            assert (batch["a"] >= 20).any()
            servers[1].kill()
            with pytest.warns(UserWarning, match="is gone, with 30 rows"):
                rest = [rb.sample() for _ in range(20)][-1]
            assert len(rest) == 64
            assert (rest["a"] < 20).all()
            assert len(rb) == 20
            stats = rb.stats()
            assert (stats["shards_missing"], stats["rows_missing"]) == (1, 30)
            if rb.sampler.traits.prioritized:
                rb.update_priority(batch["index"], 2.0)
                dropped = int((batch["index"] >> 48 == 1).sum())
                assert rb.stats()["priority_updates_dropped"] == dropped
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(3):  # warned once
                    rb.sample()
            with serving(folders[1]):
                until(lambda: rb.stats()["shards_missing"] == 0)
                assert len(rb) == 50
                assert any((rb.sample()["a"] >= 20).any() for _ in range(20))


def test_batches_of_a_stratum_that_came_are_there_when_its_store_is_gone(tmp_path):
    with fleet(tmp_path, RandomSampler) as (servers, _):
        addresses, how = [server.address for server in servers], {"patience": SKIP_S, "generator": seeded()}
        with ReplayBuffer.connect(addresses, stratum=1, prefetch=2, batch_size=8, **how) as rb:
            rb.sample()
            servers[1].kill()
            with pytest.warns(UserWarning, match="is gone, with 30 rows"):
                until(lambda: len(rb) == 20)
            batches = []
            with pytest.raises(ConnectionError, match="store 1, the stratum of this buffer, is gone"):
                batches.extend(rb.sample() for _ in range(100))
            for batch in batches:
                assert (batch["a"] >= 20).all()
                assert torch.allclose(batch["loss_factor"], torch.tensor(2 * 30 / 50))
            assert batches


def test_rows_of_an_epoch_come_once_though_a_store_was_away(tmp_path):
    with fleet(tmp_path, SamplerWithoutReplacement) as (servers, folders):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, patience=SKIP_S, generator=seeded(), batch_size=5) as rb:
            drawn = [rb.sample()["a"] for _ in range(3)]
            servers[1].kill()
            with pytest.warns(UserWarning, match="is gone"):
                drawn.append(rb.sample()["a"])
            while rb.storage.members.shards[0].weight > 5:
                drawn.append(rb.sample()["a"])
            with serving(folders[1]):
                until(lambda: rb.stats()["shards_missing"] == 0)
                while not rb.sampler.ran_out:
                    drawn.append(rb.sample()["a"])
            assert torch.cat(drawn).sort().values.tolist() == [*range(50)]


def test_a_writer_whose_store_died_goes_on_at_another(tmp_path):
    with fleet(tmp_path, RandomSampler) as (servers, _):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, patience=SKIP_S) as rb:
            home = int(rb.extend(rows_of(3, 100))[0] >> 48)
            servers[home].kill()
            with pytest.warns(UserWarning, match="is gone"), pytest.raises(ConnectionError, match="no server"):
                rb.extend(rows_of(3, 200))
            assert (rb.extend(rows_of(3, 300)) >> 48 == 1 - home).all()
            with pytest.raises(ConnectionError, match="Nothing is emptied"):
                rb.empty()
            servers[1 - home].kill()
            for _ in range(2):
                with pytest.raises(ConnectionError, match="2 stores of the fleet"):
                    rb.sample()


def test_stores_may_be_waited_for(tmp_path):
    with fleet(tmp_path, RandomSampler) as (servers, folders):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, missing="wait", patience=SKIP_S, batch_size=64) as rb:
            rb.sample()
            servers[0].kill()
            with pytest.raises(ConnectionError, match="no server"):
                rb.sample()
            with serving(folders[0]):
                assert len(rb.sample()) == 64
        with pytest.raises(ConnectionError, match="no server"):
            ReplayBuffer.connect(addresses, missing="wait", patience=SKIP_S)
        with pytest.warns(UserWarning, match="no server answers at"):
            ReplayBuffer.connect(addresses, patience=SKIP_S).close()
    with pytest.raises(ValueError, match="'skip' or 'wait'"):
        ReplayBuffer.connect(addresses, missing="never")


def test_what_holds_for_one_store_is_refused_by_name(tmp_path):
    best = {"writer": TensorDictMaxValueWriter(rank_key="a")}
    kinds = {
        "plain": (RandomSampler(), {}),
        "limits": (RandomSampler(), {}),
        "best": (RandomSampler(), best),
        "drop": (SamplerWithoutReplacement(drop_last=True), {}),
        "slices": (SliceSampler(slice_len=2, traj_key="a"), {}),
    }
    for name, (sampler, more) in kinds.items():
        storage = LazyMemmapStorage(10, scratch_dir=tmp_path / name)
        with TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4, **more) as rb:
            rb.extend(rows_of(4))
            if name == "limits":
                rb.limit(MinSize(2))
    fields = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "fields"), batch_size=4)
    fields.extend(rows_of(4).exclude("b"))
    fields.close()
    with serving_each([tmp_path / name for name in (*kinds, "fields")]):
        at = {name: f"unix:{tmp_path / name}.sock" for name in (*kinds, "fields")}
        refused = {"limits": "limits", "best": "keeps the best", "drop": "drop_last", "slices": "the same sampler"}
        for name, said in {**refused, "fields": "the same fields"}.items():
            with pytest.raises(ValueError, match=said):
                ReplayBuffer.connect([at["plain"], at[name]])
        with ReplayBuffer.connect([at["plain"], at["plain"]]) as rb:  # one store
            assert len(rb) == 4
            rb.dumps(tmp_path / "dump")
        with ReplayBuffer.connect([at["plain"]], stratum=0) as rb:
            assert rb.sample()["loss_factor"].tolist() == [1.0] * 4
            with pytest.raises(RuntimeError, match="dumps"):
                rb.dumps(tmp_path / "other")
