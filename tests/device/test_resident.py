"""``transport="resident"``: rows that stay in the device's memory, of buffers in RAM, in shared memory and in a directory."""

import itertools

import pytest
import torch

from engram import (
    DeviceLoader,
    DeviceReplay,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.device import test_direct
from tests.device.test_direct import by_priority, captured, pair, same, steps

device = test_direct.device


@pytest.fixture
def in_files(tmp_path):
    numbers = itertools.count()
    return lambda n, **kwargs: LazyMemmapStorage(n, scratch_dir=tmp_path / str(next(numbers)), **kwargs)


@pytest.fixture
def storage(request, in_files):
    return {"files": in_files, "memory": LazyTensorStorage}[request.param]


BOTH = pytest.mark.parametrize("storage", ["memory", "files"], indirect=True)


def resident(rb, **kwargs):
    return DeviceLoader(rb, "cuda", transport="resident", **kwargs)


@BOTH
@pytest.mark.parametrize("sampler", [lambda: None, SamplerWithoutReplacement], ids=["uniform", "epoch"])
def test_batches_are_those_of_the_host(device, storage, sampler):
    here, there = pair(rows=40, sampler=sampler, storage=storage)
    reading = resident(here, return_info=True)
    for got in itertools.islice(reading, 3):
        assert same(got, there.sample(return_info=True))
    assert reading.transport == reading.stats()["transport"] == "resident"
    assert "transport='resident'" in repr(reading)
    assert reading.stats()["missing"] == 0
    assert reading.stats()["bytes"] == reading.stats()["batches"] * reading._direct.nbytes
    reading.close()
    assert not device.regions


def test_by_priority(device):
    here, there = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    with resident(here) as reading:
        for batch in itertools.islice(reading, 3):
            batch["td_error"] = batch["obs"][:, 0] + 1
            reading.update_tensordict_priority(batch)
            reading.flush()
            expected = there.sample()
            expected["td_error"] = expected["obs"][:, 0] + 1
            there.update_tensordict_priority(expected)
            assert torch.equal(batch["index"], expected["index"])
        assert reading.stats()["resident"] > 0


CHANGES = {
    "append": lambda rb: rb.extend(steps(30)),
    "edit": lambda rb: rb.__setitem__(slice(0, 12), steps(12) * 0),
    "some fields": lambda rb: rb.update_({"action": torch.full((20,), 77)}),
    "remove": lambda rb: rb.remove(torch.arange(0, 20, 2)),
    "empty": lambda rb: (rb.empty(), rb.extend(steps(3) * 2)),
    "a new field": lambda rb: rb.add_field("more", torch.tensor(5.0)),
    "all of it": lambda rb: (rb.empty(), rb.extend(steps(32) * 3), rb.extend(steps(7) * 4)),
}


@pytest.mark.stress(sample=6)
@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_no_row_is_stale(device, storage, change):
    here, there = pair(storage=storage)
    reading = resident(here)
    batches = iter(reading)
    for _ in range(2):
        assert same(next(batches), there.sample())
    for rb in (here, there):
        CHANGES[change](rb)
    assert same(next(batches), there.sample())
    assert reading.transport == "resident"


def test_each_version_of_a_row_crosses_once(device, in_files):
    here, _ = pair(storage=in_files)
    reading = resident(here)
    batches = iter(reading)
    sender, sent = reading._direct._sender, []
    replace = sender._replace
    sender._replace = lambda rows, *others: (sent.append(rows.tolist()), replace(rows, *others))
    next(batches)
    assert sent == [list(range(20))]
    next(batches)
    here.extend(steps(3))
    here[torch.tensor([4, 5])] = steps(2)
    next(batches)
    next(batches)
    assert sent == [list(range(20)), [4, 5, 20, 21, 22]]


def test_large_stores_come_in_pieces(device, in_files, monkeypatch):
    monkeypatch.setattr("engram.device.direct._AT_ONCE", 100)
    here, there = pair(storage=in_files)
    for got in itertools.islice(resident(here), 2):
        assert same(got, there.sample())


def test_small_fields_that_lie_together(device, in_files):
    here, there = pair(storage=lambda n: in_files(n, group_small_fields=24))
    for got in itertools.islice(resident(here), 2):
        assert same(got, there.sample())


def test_rows_of_other_dtypes(device, in_files):
    made = [
        ReplayBuffer(storage=in_files(10), batch_size=4, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    ]
    rows = {
        "a": torch.arange(10).to(torch.bfloat16),
        "b": torch.arange(10) % 2 == 0,
        "c": torch.zeros(10, 0),
        "d": torch.arange(60.0).view(10, 2, 3),
        "e": torch.complex(torch.arange(10.0), torch.ones(10)),
    }
    for rb in made:
        rb.extend(rows)
    for got in itertools.islice(resident(made[0]), 2):
        expected = made[1].sample()
        assert all(torch.equal(got[key], expected[key]) for key in rows)


@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes(device, in_files, lanes):
    made = [in_files(30, lanes=lanes) for _ in range(2)]
    here, there = (ReplayBuffer(storage=one, batch_size=4, generator=torch.Generator().manual_seed(0)) for one in made)
    batches = None
    for turn in range(3):
        for rb in (here, there):
            for lane in range(lanes):
                rb.extend(torch.arange(3) + 10 * lane + 100 * turn, lane=lane)
        batches = batches or iter(resident(here))
        for _ in range(2):
            assert torch.equal(next(batches), there.sample())


def test_what_does_not_fit_is_refused_with_the_figures(device):
    here, _ = pair(size=1000)
    device.free = 1 << 10
    with pytest.raises(
        RuntimeError, match=r"transport='resident'.*all rows stay on .*expected .* kB, got 1\.02 kB"
    ) as said:
        resident(here)
    assert "transport='block'" in str(said.value)
    with pytest.raises(RuntimeError, match=r"DeviceReplay.*all rows stay on"):
        DeviceReplay(here, "cuda", transport="resident")
    assert not device.regions


def test_room_is_given_back_before_more_is_taken(device, monkeypatch):
    """A new field needs other memory: there is never room for both."""
    here, there = pair(size=1000)
    reading = resident(here)
    batches = iter(reading)
    next(batches), there.sample()
    for rb in (here, there):
        rb.limit(MinSize(1))
    with pytest.raises(RuntimeError, match="limits"):
        next(batches)
    for rb in (here, there):
        rb.limit(None)
    before = reading._resident
    batches = iter(reading)
    assert same(next(batches), there.sample())
    assert reading._resident is before  # what was read stays
    here.add_field("more", torch.tensor(5.0))
    there.add_field("more", torch.tensor(5.0))
    device.free = 0
    with pytest.raises(RuntimeError, match="0 B that are free"):
        next(batches)
    assert reading._resident is None
    assert not device.regions


def test_refusals_are_named(device, in_files):
    for kwargs, cause in (
        ({"transform": lambda batch: batch}, "a transform"),
        ({"storage": ListStorage}, "rows in a list"),
        ({"storage": in_files, "sampler": by_priority}, "priorities in files on a disk"),
    ):
        rb, _ = pair(**kwargs)
        with pytest.raises(RuntimeError, match=rf"transport='resident'.*{cause}"):
            resident(rb)
        with pytest.raises(RuntimeError, match=cause):
            DeviceReplay(rb, "cuda", transport="resident")
    with pytest.raises(ValueError, match="transport: expected 'direct' or 'resident', got 'block'"):
        DeviceReplay(rb, "cuda", transport="block")
    with pytest.raises(RuntimeError, match="'resident' expects a ReplayBuffer, got Fake"):
        resident(type("Fake", (), {"batch_size": 3})())


def test_a_loader_made_before_the_first_row(device, in_files):
    for storage in (in_files, LazyTensorStorage):
        rb = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
        reading = resident(rb)
        batches = iter(reading)
        rb.extend(steps(5))
        next(batches)
        assert reading.transport == "resident"


def test_replay_in_a_graph(device):
    here, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    batches = []
    with DeviceReplay(here, "cuda", transport="resident") as replayed:
        graph = captured(device, replayed, batches)
        for _ in range(4):
            graph.replay()
            rows = batches[0]["index"]
            assert torch.equal(batches[0]["obs"], here[rows]["obs"])
        here[torch.arange(20)] = steps(20) * 5
        for _ in range(2):
            graph.replay()
            assert torch.equal(batches[0]["obs"], here[batches[0]["index"]]["obs"])
        found = replayed.stats()
        assert found["transport"] == "resident"
        assert (found["batches"], found["missing"]) == (6, 0)
        assert 0 < found["resident"] < 6 * 8
        assert found["bytes"] == 6 * replayed._reader.nbytes


def test_replay_of_files(device, in_files):
    here, _ = pair(storage=in_files)
    with DeviceReplay(here, "cuda", transport="resident") as replayed:
        for turn in range(3):
            batch = replayed.sample()
            assert torch.equal(batch["obs"], here[batch["index"]]["obs"])
            here[torch.arange(20)] = steps(20) * turn
        with pytest.raises(RuntimeError, match="while a graph is captured.*the host sends rows of files"):
            captured(device, replayed, [])
