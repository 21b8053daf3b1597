"""Several stores are one buffer: what is drawn from them is what one store of all their rows would give."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    NoSampleable,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.serving.servers import serving_each

#: Rows of the stores: uneven.
SIZES = (70, 5, 130, 1)
STARTS = np.cumsum((0, *SIZES))


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def rows_of(n, first=0):
    next_ = TensorDict({"done": torch.zeros(n, 1, dtype=torch.bool)}, [n])
    return TensorDict({"a": torch.arange(first, first + n), "b": torch.ones(n, 2), "next": next_}, [n])


def made(folder, rows, sampler, capacity=200, **more):
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, **more)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=10)
    rb.extend(rows, lane=torch.arange(len(rows)) % rb.lanes)
    return rb


SAMPLERS = {
    "uniform": RandomSampler,
    "priority": lambda: PrioritizedSampler(alpha=0.6, beta=0.4),
    "epoch": SamplerWithoutReplacement,
}


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    """By sampler: the addresses of stores of ``SIZES``, whose rows ``a`` count from 0."""
    root, found = tmp_path_factory.mktemp("fleets"), {}
    for name, sampler in SAMPLERS.items():
        found[name] = []
        for start, size in zip(STARTS, SIZES, strict=False):
            folder = root / f"{name}-{start}"
            with made(folder, rows_of(size, int(start)), sampler()) as rb:
                if name == "priority":
                    rb.update_priority(torch.arange(size), priorities()[start : start + size])
            found[name].append(folder)
    with serving_each([folder for folders in found.values() for folder in folders]):
        yield {name: [f"unix:{folder}.sock" for folder in folders] for name, folders in found.items()}


def priorities():
    return torch.from_numpy(np.random.default_rng(5).gamma(0.7, size=sum(SIZES)))


def probabilities(name):
    leaves = (priorities().numpy() + 1e-8) ** 0.6 if name == "priority" else np.ones(sum(SIZES))
    return leaves / leaves.sum()


def fits(counts, expected):
    """Whether counts are those of independent draws: chi squared within five standard deviations."""
    many = expected > 5
    seen, hoped = [*counts[many], counts[~many].sum()], [*expected[many], expected[~many].sum()]
    chi = sum((s - h) ** 2 / h for s, h in zip(seen, hoped, strict=True) if h)
    return abs(chi - len(seen) + 1) < 5 * np.sqrt(2 * len(seen))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ["uniform", "priority"])
def test_rows_are_drawn_as_of_one_store(fleets, name, prefetch):
    with ReplayBuffer.connect(fleets[name], batch_size=2000, generator=seeded(), prefetch=prefetch) as rb:
        batches = [rb.sample() for _ in range(15)]
        a, index = (torch.cat([batch[key] for batch in batches]) for key in ("a", "index"))
        assert fits(np.bincount(a.numpy(), minlength=sum(SIZES)), probabilities(name) * len(a))
        assert (index >> 48).unique().tolist() == [0, 1, 2, 3]
        assert torch.equal(torch.from_numpy(STARTS)[index >> 48] + (index & (1 << 48) - 1), a)
        places = a.reshape(15, 2000) < SIZES[0]  # those of a store come anywhere in a batch
        halves = places[:, :1000].sum() - places[:, 1000:].sum()
        assert abs(int(halves)) < 5 * np.sqrt(len(a) * 0.25)


def test_weights_are_those_of_one_tree(fleets):
    leaves = (priorities() + 1e-8) ** 0.6
    with ReplayBuffer.connect(fleets["priority"], batch_size=500, generator=seeded()) as rb:
        for _ in range(3):
            batch = rb.sample()
            expected = (leaves[batch["a"]] / leaves.min()) ** -0.4
            assert torch.allclose(batch["priority_weight"].double(), expected, rtol=1e-6)


def test_weights_are_right_where_masses_are_out_of_date(fleets):
    """Of rows that were drawn by what was known, as likely as they were."""
    leaves = (priorities() + 1e-8) ** 0.6
    with ReplayBuffer.connect(fleets["priority"], batch_size=4000, generator=seeded()) as rb:
        rb.sample()
        for shard, factor in zip(rb.storage.members.shards, (0.5, 3.0, 1.5, 2.0), strict=True):
            shard.weight *= factor
        stores = torch.from_numpy(np.repeat(np.arange(4), SIZES))
        likely = leaves * torch.tensor([0.5, 3.0, 1.5, 2.0])[stores]
        batch = rb.sample()
        expected = (likely / likely.min())[batch["a"]] ** -0.4
        assert torch.allclose(batch["priority_weight"].double(), expected, rtol=1e-6)
        counts = np.bincount(batch["a"].numpy(), minlength=sum(SIZES))
        assert fits(counts, (likely / likely.sum()).numpy() * len(batch))
        assert fits(np.bincount(rb.sample()["a"].numpy(), minlength=sum(SIZES)), probabilities("priority") * 4000)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_row_comes_once_per_epoch(fleets, prefetch):
    with ReplayBuffer.connect(fleets["epoch"], generator=seeded(), prefetch=prefetch) as rb:
        for _ in range(2):
            batches = [batch["a"] for batch in rb]
            assert [len(batch) for batch in batches] == [10] * 20 + [6]
            assert torch.cat(batches).sort().values.tolist() == [*range(sum(SIZES))]


def test_several_clients_share_an_epoch(fleets):
    with (
        ReplayBuffer.connect(fleets["epoch"], generator=seeded(1)) as one,
        ReplayBuffer.connect(fleets["epoch"], generator=seeded(2)) as other,
    ):
        assert one.can_sample()
        assert other.can_sample()  # both know that no epoch goes on
        drawn = [rb.sample()["a"] for _ in range(10) for rb in (one, other)]
        drawn += [one.sample()["a"]]
        assert torch.cat(drawn).sort().values.tolist() == [*range(sum(SIZES))]
        assert len(other.sample()) == 10  # of the next one


@pytest.mark.parametrize("name", ["uniform", "priority"])
def test_draws_follow_from_the_generator(fleets, name, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # else of the client's number, too

    def drawn(seed, prefetch):
        with ReplayBuffer.connect(fleets[name], generator=seeded(seed), prefetch=prefetch) as rb:
            return [rb.sample()["index"].tolist() for _ in range(12)]

    assert drawn(1, 0) == drawn(1, 0) == drawn(1, 3) != drawn(2, 0)


def test_a_stratum_draws_from_its_store_and_says_what_its_rows_count(fleets):
    for name in ("uniform", "priority"):
        likely = probabilities(name)
        for number in range(4):
            with ReplayBuffer.connect(fleets[name], stratum=number, generator=seeded()) as rb:
                batch = rb.sample()
                assert (batch["index"] >> 48 == number).all()
                share = likely[STARTS[number] : STARTS[number + 1]].sum()
                assert torch.allclose(batch["loss_factor"].double(), torch.tensor(4 * share), rtol=1e-6)
    with pytest.raises(ValueError, match="one of 4 stores"):
        ReplayBuffer.connect(fleets["uniform"], stratum=4)


def test_the_numbers_of_all_stores(fleets):
    with ReplayBuffer.connect(fleets["uniform"]) as rb:
        assert len(rb) == rb.write_count == sum(SIZES)
        stats = rb.stats()
        assert (stats["shards"], stats["shards_missing"], stats["rows_missing"]) == (4, 0, 0)
        assert (stats["size"], stats["capacity"], stats["lanes"]) == (sum(SIZES), 800, 1)
        assert rb.can_sample()
        assert rb.limits == ()
        assert "FleetStorage(RemoteStorage(unix:" in repr(rb.storage)
        raw = pickle.dumps(rb)
        with pickle.loads(raw) as copy:
            assert len(copy) == sum(SIZES)
            assert len(copy.sample()) == 10


@pytest.fixture
def pair(tmp_path):
    """Two stores of ten rows with priorities, open here, and their addresses."""
    folders = [tmp_path / name for name in "ab"]
    sampler = lambda: PrioritizedSampler(alpha=1.0, beta=1.0)  # noqa: E731
    stores = [made(folder, rows_of(10, k * 10), sampler(), 40, lanes=2) for k, folder in enumerate(folders)]
    with serving_each(folders), stores[0], stores[1]:
        yield stores, [f"unix:{folder}.sock" for folder in folders]


def test_each_client_writes_to_one_store_and_clients_are_spread_evenly(pair):
    stores, addresses = pair
    clients = [ReplayBuffer.connect(addresses) for _ in range(4)]
    homes = []
    for number, client in enumerate(clients):
        index = torch.cat([client.extend(rows_of(3, 100 * number), lane=1), client.extend(rows_of(3), lane=1)])
        assert index.diff().eq(1).all()
        homes.append(int(index[0] >> 48))
        assert client.add(rows_of(1)[0], lane=0) >> 48 == homes[-1]
        ends = client.end_trajectory()
        assert (ends[ends >= 0] >> 48 == homes[-1]).all()
    assert sorted(homes) == [0, 0, 1, 1]
    assert [len(rb) for rb in stores] == [24, 24]
    assert len(clients[0]) == 48
    found = set()
    for _ in range(30):
        found |= set(clients[0].sample()["a"].tolist())  # its own rows are known at once
    assert {0, 100, 200, 300} <= found
    clients[0].empty()
    assert [len(rb) for rb in stores] == [0, 0]
    with pytest.raises(NoSampleable, match="fleet"):
        clients[0].sample()
    for client in clients:
        client.close()


def test_priorities_go_to_the_store_of_each_row_and_stale_ones_are_counted(pair):
    stores, addresses = pair
    with ReplayBuffer.connect(addresses, batch_size=64, generator=seeded()) as rb:
        batch = rb.sample()
        for store in stores:
            store.extend(rows_of(20, 500), lane=0)  # replaces all rows of lane 0
        gone = int(((batch["index"] & 0xFF) < 5).sum())
        keep = int(batch["index"][(batch["index"] >> 48 == 1) & ((batch["index"] & 0xFF) >= 20)][0])
        batch["td_error"] = torch.where(batch["index"] == keep, 1e9, 0.0)
        rb.update_tensordict_priority(batch)
        rb.sample()  # the answers say the new masses
        assert (rb.sample()["index"] == keep).all()
        known = sum(store.stats()["priority_updates_dropped"] for store in stores)
        assert rb.stats()["priority_updates_dropped"] == known == gone
        rb.update_priority(torch.tensor([keep, -1, keep]), torch.tensor([5.0, 1.0, 0.0]))  # the last one counts
        rb.sample()
        assert keep not in rb.sample()["index"]
        for bad in (40, 2 << 48, -2, 1 << 48 | 40):
            with pytest.raises(RowError, match="store << 48"):
                rb.update_priority(torch.tensor([bad]), 1.0)
