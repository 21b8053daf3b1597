"""Servers of a fleet that are killed at any moment, under a learner and writers."""

import itertools
import warnings

import pytest
import torch

from engram import PrioritizedSampler, ReplayBuffer
from tests import stress
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.serving.servers import start
from tests.waiting import Limit

KILLS = stress.size(4, 200)
STORES = 3


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_batches_are_whole_and_acknowledged_rows_there_though_servers_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.remote.fleet.members._RECONNECT_INTERVAL_S", 0.02)
    chance = stress.chance("fleet")
    folders = [tmp_path / str(number) for number in range(STORES)]
    for number, folder in enumerate(folders):
        made(folder, rows_of(50, 1000 * number), PrioritizedSampler(alpha=0.6, beta=0.4), 100_000).close()
    servers = [start(folder, f"unix:{folder}.sock") for folder in folders]
    addresses, names, kept = [server.address for server in servers], itertools.count(1_000_000), []
    unsure = set()
    how = {"patience": 0.05, "generator": seeded(), "batch_size": 32, "prefetch": 2}
    warnings.simplefilter("ignore")
    with ReplayBuffer.connect(addresses, **how) as rb, ReplayBuffer.connect(addresses, **how) as writer:
        for _ in range(KILLS):
            victim = chance.randrange(STORES)
            servers[victim].program.kill()
            limit = Limit(60)
            for step in itertools.count():
                batch = rb.sample()
                assert len(batch) == 32
                known = batch["a"] < 1_000_000
                assert torch.equal(batch["index"][known] >> 48, batch["a"][known] // 1000)
                assert (batch["b"] == 1).all()
                batch["td_error"] = torch.rand(32)
                rb.update_tensordict_priority(batch)
                name = next(names)
                try:
                    index = writer.extend(rows_of(3, name * 3))
                    kept += [(int(row), name * 3 + k) for k, row in enumerate(index)]
                except ConnectionError:
                    unsure.add(name * 3)
                if step == 3:
                    servers[victim] = start(folders[victim], f"unix:{folders[victim]}.sock")
                if step > 3 and rb.stats()["shards_missing"] == writer.stats()["shards_missing"] == 0:
                    break
                limit.check("going on after a kill")
        assert rb.stats()["shards_missing"] == 0
    for server in servers:
        server.stop()
    for number, folder in enumerate(folders):
        with ReplayBuffer.open(folder, unclean="accept") as store:
            a = store[:]["a"]
            for row, value in kept:
                if row >> 48 == number:
                    assert int(a[row & (1 << 48) - 1]) == value
            written = a[a >= 3_000_000].tolist()
            assert len(set(written)) == len(written)
            extra = set(written) - {value for row, value in kept if row >> 48 == number}
            assert extra <= {first + k for first in unsure for k in range(3)}
