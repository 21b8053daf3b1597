"""A field that is added to a store which is being served: clients go on with those that they began with, and adopt it."""

import os
import warnings

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler
from engram.format import layout
from tests.serving.servers import serving, start

SAMPLERS = {
    "uniform": RandomSampler,
    "priority": lambda: PrioritizedSampler(64, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, end_key="done"),
}


def rows(n, first=0):
    steps = torch.arange(first, first + n)
    return {"a": steps, "done": steps % 4 == 3}


def made(folder, sampler=RandomSampler, **how):
    return ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=folder, **how), sampler=sampler(), batch_size=8)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_clients_go_on_and_adopt_it(sampler, lanes, prefetch, tmp_path):
    rb = made(tmp_path / "store", SAMPLERS[sampler], lanes=lanes)
    rb.extend(rows(16), lane=0)
    with serving(tmp_path / "store") as served:
        client = ReplayBuffer.connect(served.address, prefetch=prefetch)
        assert set(client.sample()) == {"a", "done"}
        rb.add_field("v", torch.zeros(2), fill=3.0)
        for n in range(3):
            batch = client.sample()
            assert set(batch) == {"a", "done"}
            assert torch.equal(batch["done"], batch["a"] % 4 == 3)
            client.extend(rows(4, 16 + 4 * n), lane=lanes - 1)
        late = ReplayBuffer.connect(served.address)
        assert set(late.sample()) == {"a", "done", "v"}
        assert rb["a"].tolist() == list(range(28))
        assert rb["v"].tolist() == [[3.0, 3.0]] * 28
        with pytest.raises(
            RuntimeError, match="add_field: expected the rows in this process, the buffer is a connection"
        ):
            client.add_field("w", 0)
        assert len(client) == 28  # asks the server, which shows the field
        for _ in range(50):  # those that were under way lack it
            batch = client.sample()
        assert set(batch) == {"a", "done", "v"}
        assert batch["v"].tolist() == [[3.0, 3.0]] * 8
        client.extend({**rows(4, 28), "v": torch.full((4, 2), 5.0)}, lane=0)
        client.extend(rows(4, 32), lane=0)  # left out
        assert rb["v"].sum(1).sort().values.tolist() == [6.0] * 32 + [10.0] * 4
        late.close()
        client.close()
    rb.close()


@pytest.mark.parametrize("streamed", [None, "block"])
def test_a_client_goes_on_at_the_next_server(tmp_path, streamed):
    rb = made(tmp_path / "store")
    rb.extend(rows(16))
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    servers = [start(tmp_path / "store", at) for at in sockets]
    with ReplayBuffer.connect(sockets, full=streamed) as client:
        client.sample(), client.extend(rows(1, 16))
        rb.add_field("v", torch.zeros(2), fill=3.0)
        servers[0].kill()
        client.sample()
        client.extend(rows(3, 17))
        assert len(client) == 20
        assert set(client.sample()) == {"a", "done", "v"}
        assert rb["v"].tolist() == [[3.0, 3.0]] * 20
    servers[1].kill()
    rb.close()


def test_a_fleet_keeps_a_store_whose_fields_grow_and_shows_them_once_all_stores_do(tmp_path):
    """The message of a death must not come: warnings are errors."""
    folders = [tmp_path / name for name in "ab"]
    stores = [made(folder) for folder in folders]
    for number, rb in enumerate(stores):
        rb.extend(rows(16, 16 * number))
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in "abc"]
    servers = [start(folder, at) for folder, at in zip([*folders, folders[0]], sockets, strict=True)]
    with ReplayBuffer.connect(sockets, batch_size=32) as fleet, warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet.sample()
        stores[0].add_field("v", torch.zeros(2), fill=3.0)
        servers[0].kill()  # its client goes on at the third
        assert {int(number) for _ in range(5) for number in fleet.sample()["a"] // 16} == {0, 1}
        assert fleet.stats()["shards_missing"] == 0
        assert set(fleet.sample()) == {"a", "done"}
        stores[1].add_field("v", torch.zeros(2), fill=4.0)
        assert len(fleet) == 32
        batch = fleet.sample()
        assert torch.equal(batch["v"][:, 0], 3.0 + batch["a"] // 16)
        fleet.extend({**rows(4, 32), "v": torch.full((4, 2), 5.0)})
    assert sorted(len(rb) for rb in stores) == [16, 20]
    for one in (*servers[1:], *stores):
        one.kill() if hasattr(one, "kill") else one.close()


def test_a_copy_of_a_store_is_another_store_and_one_in_memory_keeps_its_name(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8).share()
    rb.extend(rows(16))
    folder = rb.storage.memory.directory
    names = []
    for _ in range(2):
        with serving(folder, f"unix:{tmp_path}/sock") as served, ReplayBuffer.connect(served.address) as client:
            names.append(client.storage.served.store)
        rb.add_field(f"v{len(names)}", 0)
    os.system(f"cp -r {folder} {tmp_path}/copy")
    with serving(tmp_path / "copy") as served, ReplayBuffer.connect(served.address) as client:
        names.append(client.storage.served.store)
    assert names[0] == names[1] != names[2]
    rb.close()


def test_the_name_lies_where_earlier_versions_read_nothing(tmp_path):
    made(tmp_path / "store").extend(rows(4))
    control = tmp_path / "store" / layout.FOLDER / layout.CONTROL
    before = control.read_bytes()
    assert not any(before[9216:9232])
    with serving(tmp_path / "store"):
        name = control.read_bytes()[9216:9232]
    assert any(name)
    with serving(tmp_path / "store"):
        assert control.read_bytes()[9216:9232] == name
