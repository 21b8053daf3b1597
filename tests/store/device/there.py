"""Storages as on an accelerator, without one: by operations of torch, and by kernels in Triton's interpreter."""

import pytest

from engram import LazyTensorStorage
from engram.store.device.row_operations import RowKernels
from engram.store.device.store import DeviceStore


class There(LazyTensorStorage):
    """As a storage on an accelerator, priorities included. Operations of torch do its work, or kernels."""

    kernels = False

    def _allocate(self, schema):
        store = DeviceStore.on(schema, self._device)
        store.keeps_priorities = True
        if self.kernels:
            store.rows.work = RowKernels(store.rows)
        return store


class ByKernels(There):
    kernels = True


@pytest.fixture(params=["operations", "kernels"])
def both_ways(request, monkeypatch):
    """Storages of :class:`There` work by operations of torch in one run of a test, and by kernels in another."""
    monkeypatch.setattr(There, "kernels", request.param == "kernels")
