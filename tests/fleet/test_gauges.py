"""Numbers of connected buffers: those of one store as where it is, those of several as of one store with all their rows."""

import contextlib
import json

import numpy as np
import pytest
import torch

from engram import LazyMemmapStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, TensorDictReplayBuffer
from engram.remote.fleet.members import combined
from engram.remote.protocol import Mass, State
from tests.fleet.test_fleets import rows_of
from tests.fresh import start
from tests.serving.servers import serving, serving_each

#: Of this moment, or of the process that answers.
PASSING = ("add_per_s", "sample_per_s", "checkpoint_age_s", "prefetch_queue_size")
SIZES = (70, 5, 130)
ALPHA, EPS = 0.6, 1e-8
#: Serves as an engram did that knew no such command.
OLD = """
from engram.remote import protocol
del protocol.ACTIONS["gauges"]
from pathlib import Path
from engram.serving.server import listening
from engram.serving.server import run
run(Path(folder), listening(listen, None, None, None, insecure=False), lambda address: print("ready", address, flush=True))
"""
COMMAND = """
from engram.cli import main
main(arguments, standalone_mode=False)
"""


def priorities(size):
    return torch.from_numpy(np.random.default_rng(size).gamma(0.7, size=size)) + 0.01


def made(folder, size, sampler=None, capacity=200):
    sampler = PrioritizedSampler(alpha=ALPHA, beta=0.4, eps=EPS) if sampler is None else sampler
    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=10)
    rb.extend(rows_of(max(size, 1)))
    if not size:
        rb.empty()
    elif isinstance(sampler, PrioritizedSampler):
        rb.update_priority(torch.arange(size), priorities(size))
    return rb


@contextlib.contextmanager
def stores(root, sizes=SIZES, sampler=None):
    """Stores that are open here, and the addresses of their servers."""
    folders = [root / f"{k}" for k in range(len(sizes))]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(made(folder, size, sampler)) for folder, size in zip(folders, sizes, strict=True)]
        stack.enter_context(serving_each(folders))
        yield opened, [f"unix:{folder}.sock" for folder in folders]


def lasting(stats):
    return {name: value for name, value in stats.items() if name not in PASSING and "file" not in name}


@pytest.mark.parametrize("sampler", [None, RandomSampler()])
def test_a_connected_buffer_says_what_the_store_says(tmp_path, sampler):
    with made(tmp_path / "store", 130, sampler) as rb, serving(tmp_path / "store") as server:
        rb.count_usage()
        rb.sample()
        with ReplayBuffer.connect(server.address, batch_size=8) as remote:
            remote.sample()
            ours, theirs = rb.stats(), remote.stats()
            assert theirs.pop("server_streams") == 1
            assert theirs.keys() == ours.keys()
            assert lasting(theirs) == pytest.approx(lasting(ours))
            assert theirs["sample_count"] == 18
            assert ("priority_ess" in theirs) == (sampler is None)
            remote.empty()
            assert "age_mean" not in remote.stats()


def test_several_stores_are_as_one(tmp_path):
    with stores(tmp_path) as (opened, addresses), ReplayBuffer.connect(addresses, batch_size=20) as fleet:
        for _ in range(3):
            fleet.sample()
        stats, each = fleet.stats(), [store.stats() for store in opened]
        leaves = np.concatenate([(priorities(size).numpy() + EPS) ** ALPHA for size in SIZES])
        assert stats["priority_ess"] == pytest.approx(leaves.sum() ** 2 / (leaves**2).sum())
        assert stats["priority_mean"] == pytest.approx(float(torch.cat([priorities(size) for size in SIZES]).mean()))
        ages = np.concatenate([np.arange(size) for size in SIZES])
        assert stats["age_mean"] == pytest.approx(ages.mean())
        assert stats["age_p99"] == pytest.approx(max(np.quantile(np.arange(size), 0.99) for size in SIZES))
        assert stats["priority_max"] == max(one["priority_max"] for one in each)
        assert stats["sample_count"] == sum(one["sample_count"] for one in each) == 60
        assert stats["replay_ratio"] == pytest.approx(60 / sum(SIZES))
        assert stats["bytes_disk"] == sum(one["bytes_disk"] for one in each)
        assert stats["usage_counted"] == 0
        assert "never_sampled_frac" not in stats
        for store in opened[:2]:
            store.count_usage()
        assert "never_sampled_frac" not in fleet.stats()  # not of all
        opened[2].count_usage()
        assert fleet.stats()["never_sampled_frac"] == 1


def test_stores_without_rows_and_uniform_ones(tmp_path):
    with stores(tmp_path / "some", (0, 40, 20)) as (_, addresses), ReplayBuffer.connect(addresses) as fleet:
        stats = fleet.stats()
        assert stats["age_mean"] == pytest.approx((40 * 19.5 + 20 * 9.5) / 60)
        leaves = np.concatenate([(priorities(size).numpy() + EPS) ** ALPHA for size in (40, 20)])
        assert stats["priority_ess"] == pytest.approx(leaves.sum() ** 2 / (leaves**2).sum())
    with stores(tmp_path / "none", (0, 0)) as (_, addresses), ReplayBuffer.connect(addresses) as fleet:
        assert not fleet.stats().keys() & {"age_mean", "age_p99", "priority_ess", "priority_mean"}
        assert fleet.stats()["sample_count"] == 0
    with (
        stores(tmp_path / "uniform", (3, 4), RandomSampler()) as (_, addresses),
        ReplayBuffer.connect(addresses) as fleet,
    ):
        assert not fleet.stats().keys() & {"priority_ess", "priority_mean"}
        assert fleet.stats()["age_mean"] == pytest.approx((3 * 1 + 4 * 1.5) / 7)


def test_servers_of_an_older_engram_are_shown_without_them(tmp_path):
    listen = f"unix:{tmp_path}/old.sock"
    with made(tmp_path / "old", 20), made(tmp_path / "new", 30), serving(tmp_path / "new") as server:
        old = start(OLD, folder=str(tmp_path / "old"), listen=listen).until("\n")
        try:
            for addresses, size in ((listen, 20), ([listen, server.address], 50)):
                with ReplayBuffer.connect(addresses) as rb:
                    stats = rb.stats()
                    assert (stats["size"], stats["void_rows"]) == (size, 0)
                    assert not stats.keys() & {"age_mean", "priority_ess", "sample_count", "bytes_disk"}
            top = start(COMMAND, arguments=["top", listen, "--every", "0.1", "--count", "1"])
            assert top.wait() == 0, top.err
            assert "20 of 200 (10 %)" in top.out
            assert "not counted here" in top.out
            assert "effective" not in top.out
        finally:
            old.kill()


def test_top_of_an_address_shows_what_top_of_the_directory_does(tmp_path):
    def shown(*arguments):
        top = start(COMMAND, arguments=["top", *arguments, "--every", "0.1", "--count", "1", "--json"])
        assert top.wait() == 0, top.err
        return json.loads(top.out)

    with stores(tmp_path) as (opened, addresses):
        opened[2].sample()
        here, there, fleet = shown(str(tmp_path / "2")), shown(addresses[2]), shown(",".join(addresses))
        names = here.keys() - {"store", "seconds", "problems", *PASSING, "inserts_per_s", "samples_per_s"}
        names -= {name for name in names if "file" in name} | {"bytes_disk"}  # one attaches fewer indexes
        assert {"age_p99", "priority_ess", "sample_count", "replay_ratio", "lapped_rows"} <= names
        assert {name: there[name] for name in names} == pytest.approx({name: here[name] for name in names})
        assert fleet["priority_ess"] == pytest.approx(opened_effective(opened))
        text = start(COMMAND, arguments=["top", ",".join(addresses), "--every", "0.1", "--count", "1"])
        assert text.wait() == 0, text.err
        assert "age        53 writes, 99 % below 128" in text.out
        assert f"as diverse as of {fleet['priority_ess']:,.0f} equally likely rows" in text.out


def opened_effective(opened):
    leaves = np.concatenate([(priorities(len(store)).numpy() + EPS) ** ALPHA for store in opened])
    return leaves.sum() ** 2 / (leaves**2).sum()


def answered(size=10, total=5.0, **gauges):
    """A store's numbers; what is not said is as of one that was never sampled."""
    mass = Mass(total, 1.0, size, 0.4, 0, goes_on=False)
    known = {"sample_count": 0, "replay_ratio": 0.0, "add_per_s": 0.0, "sample_per_s": 0.0, "usage_counted": 0}
    places = {"bytes_ram": 0, "bytes_disk": 100}
    return State(size, size, {}, (0.0, 0.0, 0, 0), {}, mass), {**known, **places, **gauges}


def test_what_does_not_add_up():
    waits = answered(sample_wait_ms_p50=1.0, sample_wait_ms_p99=2.0, checkpoint_age_s=3.0)
    assert combined([waits, answered()])["sample_wait_ms_p99"] == 2  # nobody has waited at the other one
    assert "checkpoint_age_s" not in combined([waits, answered()])  # the other was never saved
    assert combined([waits, answered(checkpoint_age_s=9.0)])["checkpoint_age_s"] == 9
    assert "checkpoint_age_s" not in combined([waits, answered(size=0)])
    assert combined([]) == {}
    assert combined([waits, (waits[0], {})]) == {}


def test_the_ratio_of_stores_that_were_never_sampled():
    sampled = answered(size=10, sample_count=40, replay_ratio=2.0)  # of 20 rows written
    assert combined([sampled, answered(size=10)])["replay_ratio"] == 40 / 30
    assert combined([answered(size=0), answered(size=0)])["replay_ratio"] == 0


def test_effective_rows_of_stores_without_mass():
    rows = {"priority_ess": 4.0}
    assert combined([answered(total=3.0, **rows), answered(total=0.0, priority_ess=0.0)])["priority_ess"] == 4
    assert combined([answered(total=3.0, **rows)] * 2)["priority_ess"] == 8
    assert "priority_ess" not in combined([answered(total=0.0, priority_ess=0.0)])
    state, gauges = answered(**rows)
    unknown = State(state.size, state.write_count, {}, state.limit, {}, None)
    assert "priority_ess" not in combined([(state, gauges), (unknown, gauges)])
