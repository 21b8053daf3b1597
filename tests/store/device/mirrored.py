"""Storages on an imitated device with a mirror."""

import torch

from engram import LazyTensorStorage, ReplayBuffer
from engram.store.device import mirror
from engram.store.device.store import DeviceStore
from tests.device.imitation import Imitation


class There(LazyTensorStorage):
    """As a storage on an accelerator, without one."""

    def _check_accelerated(self):
        pass

    def _allocate_here(self, schema):
        return self._kept_there(DeviceStore.on(schema, torch.device("cpu")))

    @staticmethod
    def _kept_there(store):
        store.keeps_priorities = True
        return store


def content(numbers):
    """Rows that say which they are, wide enough to be torn."""
    return {"a": numbers, "b": numbers[:, None] * torch.arange(1, 200)}


def imitate(monkeypatch, **arguments):
    """Mirrors made from here on use one imitated device."""
    device = Imitation(**arguments)
    monkeypatch.setattr(mirror, "Accelerator", lambda _: device)
    return device


def assert_same(storage, folder):
    """The folder, opened as it is, holds what the storage does."""
    there = storage.store
    rb = ReplayBuffer.open(folder)
    here = rb.storage.store
    assert here.extent().filled == there.extent().filled
    assert here.extent().seam == there.extent().seam
    assert len(rb) == len(storage)
    rows = torch.arange(there.capacity)
    live = there.tickets_of(rows) >= 0
    assert torch.equal(here.tickets_of(rows) >= 0, live)
    for one, other in zip(here.tensors, there.tensors, strict=True):
        assert torch.equal(one[live], other[live])
    for (name, kind), index in there.indexes.items():
        saved = here.indexes[name, kind].state()
        assert torch.equal(saved["leaves"], index.state()["leaves"])
        assert saved["highest"] == index.highest
    rb.close()
