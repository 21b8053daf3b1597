"""Servers that are killed while a client writes and draws: what was acknowledged is there once, whole, and the client goes on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engram import LazyMemmapStorage, Ragged, ReplayBuffer
from tests import fresh, stress
from tests.serving.servers import start
from tests.waiting import until

CLIENT = """
import torch
from engram import ReplayBuffer
from tests.serving.test_kills import is_whole, row_of

remote = ReplayBuffer.connect(addresses, prefetch=2, full=full)
first = 0
while True:
    for _ in range(writes):
        ids = torch.arange(first, first + 4)
        first += 4
        remote.extend(row_of(ids, ragged))
    if full is not None:
        len(remote)  # waits for what is under way
        assert remote.stats()["rows_dropped"] == 0
    print("ack", first, flush=True)
    batch = remote.sample()
    assert is_whole(batch, ragged), batch
"""


def row_of(ids, ragged):
    """Rows that say in all fields which they are; ``ragged``: with up to six items, or none."""
    if not ragged:
        return {"a": ids, "b": ids.unsqueeze(1).expand(-1, 64).contiguous()}
    lengths = (ids + 7) % 7
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {"a": ids, "b": (ids.repeat_interleave(lengths), offsets)}


def is_whole(batch, ragged):
    """Whether all fields of each row say the same."""
    if not ragged:
        return torch.equal(batch["b"], batch["a"].unsqueeze(1).expand(-1, 64))
    return all(
        torch.equal(items, one.expand((int(one) + 7) % 7))
        for one, items in zip(batch["a"], batch["b"].unbind(), strict=True)
    )


def progressed(program, since):
    """Wait until the client was acknowledged something more; how much it has said by then."""

    def more():
        assert program.poll() is None, program.err
        return program.out[since:].count("ack") >= 2

    until(more)
    return len(program.out)


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
@pytest.mark.parametrize(
    ("full", "writes", "ragged"),
    [(None, 1, False), ("block", 6, False), (None, 1, True)],
    ids=["acknowledged", "streamed", "with items"],
)
def test_acknowledged_rows_are_there_once_and_whole(tmp_path, full, writes, ragged):
    folder, capacity = tmp_path / "store", stress.size(1 << 17, 1 << 20)
    items = {"ragged": {"b": Ragged(torch.int64, max_length=8)}, "ragged_bytes": 64 * capacity} if ragged else {}
    with ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder, **items), batch_size=16) as rb:
        rb.extend(row_of(torch.full((4,), -1), ragged))
    chance = stress.chance("serving kills", full)
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    servers = [start(folder, at) for at in sockets]
    client = fresh.start(CLIENT, addresses=sockets, full=full, writes=writes, ragged=ragged)
    try:
        said = 0
        for _ in range(stress.size(4, 200)):
            said = progressed(client, said)
            which = chance.randrange(2)
            if chance.random() < 0.25:
                assert servers[which].stop() == 0
            else:
                servers[which].kill()
            servers[which] = start(folder, sockets[which])
        progressed(client, said)
    finally:
        client.kill()
        for server in servers:
            server.kill()
    acknowledged = max(int(line.split()[1]) for line in client.out.split("\n")[:-1])  # whole lines
    with ReplayBuffer.open(folder) as rb:
        ids = rb["a"][4:].tolist()
        assert ids == list(range(len(ids))), "a row is there twice, or lost"
        assert acknowledged <= len(ids) <= acknowledged + 4 * writes, "an acknowledged row is lost"
        assert is_whole(rb[:], ragged), "a row is torn"


def test_a_server_that_goes_before_the_first_sample_and_write_is_waited_for(tmp_path):
    folder = tmp_path / "store"
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder), batch_size=16) as rb:
        rb.extend({"a": torch.arange(10)})
    first = start(folder, f"unix:{tmp_path}/a.sock")
    with ReplayBuffer.connect(first.address) as remote, ThreadPoolExecutor(2) as threads:
        first.kill()
        drawn, written = threads.submit(remote.sample), threads.submit(remote.extend, {"a": torch.arange(2)})
        second = start(folder, first.address)
        assert (drawn.result(60)["a"] < 10).all()
        assert written.result(60).tolist() == [10, 11]
        second.kill()


def test_the_next_batch_comes_from_the_sibling_at_once(tmp_path):
    folder = tmp_path / "store"
    with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder), batch_size=16) as rb:
        rb.extend({"a": torch.arange(10)})
    servers = [start(folder, f"unix:{tmp_path}/{name}.sock") for name in "ab"]
    with ReplayBuffer.connect(
        [server.address for server in servers], generator=torch.Generator().manual_seed(1)
    ) as remote:
        first = [remote.sample()["a"].tolist() for _ in range(2)]
        servers[0].kill()
        remote.set_rng(torch.Generator().manual_seed(1))
        assert [remote.sample()["a"].tolist() for _ in range(2)] == first
        assert remote.extend({"a": torch.arange(2)}).tolist() == [10, 11]
        servers[1].kill()
    with pytest.raises(ConnectionError, match="no server answered at"):
        ReplayBuffer.connect(servers[1].address, patience=0)
