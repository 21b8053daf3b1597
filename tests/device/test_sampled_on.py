"""``rb.sample(device=)`` on a device that reads by itself: the one-line form of ``DeviceReplay``."""

import contextlib

import pytest
import torch

from engram import (
    DeviceLoader,
    DeviceReplay,
    LazyTensorStorage,
    NoSampleable,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from engram.buffer import replay_buffer
from engram.store.device.accelerator import NotRegistered, Registered
from tests.device import test_direct
from tests.device.test_direct import by_priority, pair, same

device = test_direct.device


@pytest.fixture(autouse=True)
def target(device, monkeypatch):
    monkeypatch.setattr(replay_buffer, "target_of", lambda device, form: torch.device("cuda", 0))
    monkeypatch.setattr(replay_buffer, "moved", lambda sample, target: ("by the host", sample))


def test_batches_are_read_by_the_device(device):
    rb, _ = pair()
    batch = rb.sample(device="cuda")
    assert same(batch, rb[batch["index"]].set("index", batch["index"]))
    launches = device.counts["launch"]
    with pytest.warns(UserWarning, match="batch_size=3"):
        batch, info = rb.sample(3, return_info=True, device="cuda")
    assert batch.shape == (3,)
    assert torch.equal(info["index"], batch["index"])
    assert device.counts["launch"] > launches
    rb.add_field("more", torch.tensor(5.0))
    assert "more" in rb.sample(device="cuda")
    assert not device.faults


def test_what_is_refused_draws_nothing(device):
    """Of the buffer's generator: the host draws in its place what it would have drawn."""
    here, there = pair(transform=lambda batch: batch)
    with pytest.raises(RuntimeError, match="a transform"):
        DeviceReplay(here, "cuda")
    _, batch = here.sample(device="cuda")
    assert same(batch, there.sample())


def test_in_a_graph_with_its_update(device):
    rb, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    rb.sample(device="cuda")
    drawn = []

    def step():
        batch = rb.sample(device="cuda")
        batch["td_error"] = torch.full((8,), 3.0)
        drawn.append(batch)
        rb.update_tensordict_priority(batch)

    graph = device.capture(step)
    before = device.counts.copy()
    graph.replay()
    assert device.counts - before == {"replay": 1}
    rows = drawn[0]["index"].clone()
    rb.update_priority([0], 7.0)  # on the host: what was sent comes first
    leaves = rb.sampler.priorities().leaves_of(rows[rows != 0])
    torch.testing.assert_close(leaves, torch.full_like(leaves, 3.0**0.7))
    assert float(rb.sampler.priorities().leaves_of(torch.tensor([0]))) == pytest.approx(7.0**0.7)


def test_what_the_host_must_draw(device):
    rb, _ = pair(transform=lambda batch: batch)
    assert rb.sample(device="cuda")[0] == "by the host"
    with pytest.raises(
        RuntimeError, match="while a graph is captured, got a buffer that does not allow it: a transform"
    ):
        device.capture(lambda: rb.sample(device="cuda"))
    rb, _ = pair()
    with pytest.raises(RuntimeError, match="call it once before the capture"):
        device.capture(lambda: rb.sample(device="cuda"))
    rb.sample(device="cuda")
    rb.append_transform(lambda batch: batch)
    assert rb.sample(device="cuda")[0] == "by the host"
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    with pytest.raises(NoSampleable):
        rb.sample(device="cuda")
    rb.extend(torch.arange(4))
    assert torch.is_tensor(rb.sample(device="cuda"))
    rb.empty()
    with pytest.raises(NoSampleable):
        rb.sample(device="cuda")


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_closing_the_buffer_applies_what_is_under_way(device, monkeypatch, value):
    rb, _ = pair(TensorDictPrioritizedReplayBuffer, sampler=by_priority)
    batch, seen = rb.sample(device="cuda"), []
    batch["td_error"] = torch.full((8,), value)
    rb.update_tensordict_priority(batch)
    kept = rb.sampler.priorities()
    before = kept.leaves_of(batch["index"])
    storage, detach = type(rb.storage), type(rb.storage).detach
    monkeypatch.setattr(
        storage, "detach", lambda self, rb: (seen.append(kept.leaves_of(batch["index"])), detach(self, rb))
    )
    with contextlib.nullcontext() if value == 3.0 else pytest.warns(UserWarning, match="close: .*left out 8 others"):
        rb.close()
    torch.testing.assert_close(seen[0], torch.full_like(before, 3.0**0.7) if value == 3.0 else before)
    assert not device.regions, "the memory is registered no more"
    rb.close()


@pytest.mark.parametrize("through", ["loader", "buffer"])
def test_priorities_under_way_when_the_memory_moves_come_before_later_ones(device, monkeypatch, through):
    rb, _ = pair(sampler=by_priority)
    rows = torch.arange(8)
    writes = rb.storage.memory.writes_of(rows, rb.storage.memory.tickets_of(rows))
    loader = DeviceLoader(rb, "cuda")
    update = loader.update_priority
    if (
        through == "buffer"
    ):  # else it would take what the loader brings to the host: here all tensors count as the device's
        rb.sample(device="cuda")
        update = rb.update_priority
    device.held = {"MainThread"}
    update(rows, torch.full((8,), 2.0), generation=writes)

    def moved(*_):
        raise NotRegistered("it lies elsewhere")

    monkeypatch.setattr(Registered, "use", moved)
    update(rows, torch.full((8,), 7.0), generation=writes)
    first = 2.0 if through == "loader" else 7.0  # the later ones of a loader come with the next call
    assert rb.sampler.priorities().leaves(8).tolist() == pytest.approx([first**0.7] * 8)
    monkeypatch.undo()
    device.release()
    loader.flush()
    assert rb.sampler.priorities().leaves(8).tolist() == pytest.approx([7.0**0.7] * 8)
    loader.close()
    rb.close()
