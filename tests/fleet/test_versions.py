"""One policy version for all stores, and rows by their freshness over all of them."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    NoSampleable,
    RandomSampler,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from tests.fleet.test_fleets import fits, seeded
from tests.fleet.test_missing import until
from tests.serving.servers import serving, serving_each

SIZES = (70, 20, 130)
STARTS = np.cumsum((0, *SIZES))


def rows(n, first, version):
    return TensorDict({"a": torch.arange(first, first + n), "policy_version": version}, [n])


def versions():
    """Of all rows: those of the second store are stale."""
    drawn = np.random.default_rng(5).integers(2, 6, size=sum(SIZES))
    drawn[STARTS[1] : STARTS[2]] -= 2
    return torch.from_numpy(drawn)


def made(folder, n, first, sampler=StalenessAwareSampler):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=folder), sampler=sampler(), batch_size=4)
    rb.extend(rows(n, first, versions()[first : first + n]))
    return rb


@pytest.fixture
def fleet(tmp_path):
    """Stores that are open here, and their addresses."""
    folders = [tmp_path / str(k) for k in range(3)]
    stores = [made(folder, n, int(first)) for folder, n, first in zip(folders, SIZES, STARTS, strict=False)]
    with serving_each(folders), stores[0], stores[1], stores[2]:
        yield stores, [f"unix:{folder}.sock" for folder in folders]


def test_a_version_is_told_to_all_stores_and_only_grows(fleet):
    stores, addresses = fleet
    with ReplayBuffer.connect(addresses) as rb, ReplayBuffer.connect(addresses[1]) as one:
        assert rb.sampler.consumer_version == one.sampler.consumer_version == 0
        rb.sampler.consumer_version = 5
        assert [store.sampler.consumer_version for store in stores] == [5, 5, 5]
        rb.sampler.consumer_version = 3
        assert rb.sampler.consumer_version == rb.stats()["consumer_version"] == 5
        one.sampler.increment_consumer_version()  # one store is ahead
        assert [store.sampler.consumer_version for store in stores] == [5, 6, 5]
        assert rb.sampler.consumer_version == 6
        rb.sampler.increment_consumer_version()
        assert [store.sampler.consumer_version for store in stores] == [7, 7, 7]
        for bad in (1.5, 1 << 60, "1"):
            with pytest.raises((TypeError, ValueError), match="consumer_version"):
                rb.sampler.consumer_version = bad


def test_rows_are_drawn_by_their_freshness_as_of_one_store(fleet):
    with ReplayBuffer.connect(fleet[1], generator=seeded(), prefetch=4) as rb:
        rb.sampler.consumer_version = 5
        batches = [rb.sample(return_info=True) for _ in range(1500)]
        a = torch.cat([batch["a"] for batch, _ in batches])
        staleness = torch.cat([info["staleness"] for _, info in batches])
        assert torch.equal(staleness, (5 - versions()[a]).float())
        weights = 1 / (5 - versions().numpy() + 1)
        assert fits(np.bincount(a.numpy(), minlength=sum(SIZES)), weights / weights.sum() * len(a))


def test_stores_that_are_too_stale_are_not_asked(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for k, folder in enumerate(folders):
        made(folder, SIZES[k], int(STARTS[k]), lambda: StalenessAwareSampler(max_staleness=3)).close()
    with serving_each(folders), ReplayBuffer.connect([f"unix:{folder}.sock" for folder in folders]) as rb:
        rb.sampler.consumer_version = 7
        assert all((rb.sample()["a"] < SIZES[0]).all() for _ in range(10))
        rb.sampler.consumer_version = 99
        with pytest.raises(NoSampleable):
            rb.sample()


def test_a_store_that_is_back_learns_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    folders = [tmp_path / name for name in "ab"]
    for k, folder in enumerate(folders):
        made(folder, SIZES[k], int(STARTS[k])).close()
    with (
        serving(folders[0]) as one,
        serving(folders[1]) as other,
        ReplayBuffer.connect([one.address, other.address], patience=0.2) as rb,
    ):
        other.kill()
        with pytest.warns(UserWarning, match="is gone"):
            rb.sampler.consumer_version = 4
        with serving(folders[1]):
            until(lambda: rb.stats()["shards_missing"] == 0)
            with ReplayBuffer.connect(other.address) as alone:
                assert alone.sampler.consumer_version == 4


def test_a_store_that_did_not_answer_joins_when_it_does(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    folders = [tmp_path / name for name in "abc"]
    for k, folder in enumerate(folders):
        made(folder, SIZES[k], int(STARTS[k])).close()
    other = tmp_path / "other"
    made(other, 10, 0, RandomSampler).close()
    addresses = [f"unix:{folder}.sock" for folder in (*folders, other)]
    caplog.set_level("INFO", "engram")
    with serving_each(folders[:2]):
        with pytest.warns(
            UserWarning, match=r"no server answers at .*c\.sock, .*other\.sock: these addresses join when"
        ):
            rb = ReplayBuffer.connect(addresses, patience=0.2, generator=seeded(), batch_size=64)
        with rb:
            assert (rb.stats()["shards"], len(rb)) == (2, 90)
            rb.sampler.consumer_version = 5
            rb.sample()
            with serving_each(folders[2:]):
                until(lambda: rb.stats()["shards"] == 3)
                assert len(rb) == sum(SIZES)
                batches = [rb.sample() for _ in range(5)]
                a, store = torch.cat([it["a"] for it in batches]), torch.cat([it["index"] for it in batches]) >> 48
                assert torch.equal(store == 2, a >= STARTS[2])
                assert (store == 2).any()
                assert rb.sampler.consumer_version == 5
                with ReplayBuffer.connect(addresses[2]) as alone:
                    assert alone.sampler.consumer_version == 5
                assert sum("has joined" in record.message for record in caplog.records) == 1


def test_a_buffer_without_such_a_sampler_has_no_version(tmp_path):
    made(tmp_path / "a", 10, 0, RandomSampler).close()
    refused = pytest.raises(TypeError, match="expected a store that a StalenessAwareSampler draws from")
    with serving(tmp_path / "a") as server, ReplayBuffer.connect(server.address) as rb, refused:
        rb.sampler.consumer_version = 1
