"""``device=None``, as TorchRL's programs set it: rows stay where they are written, or lie."""

import pytest
import torch

from engram import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorStorage,
)

KINDS = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


@pytest.mark.parametrize("kind", [*KINDS, lambda _: TensorStorage(torch.zeros(10))])
def test_it_may_be_set_before_and_after_rows(kind):
    storage = kind(10)
    storage.device = None
    assert storage.device in (None, torch.device("cpu"))
    rb = ReplayBuffer(storage=storage, batch_size=2, collate_fn=lambda batch: batch)
    rb.extend(torch.arange(4.0))
    storage.device = None
    assert [float(row) for row in rb[:4]] == [0, 1, 2, 3]
    rb.close()


@pytest.mark.parametrize("kind", KINDS)
def test_it_may_be_given(kind):
    storage = kind(10, device=None)
    rb = ReplayBuffer(storage=storage, batch_size=2, collate_fn=lambda batch: batch)
    rb.extend(torch.arange(4.0))
    assert [float(row) for row in rb[:4]] == [0, 1, 2, 3]
    rb.close()


def test_a_shared_one_is_on_the_cpu():
    storage = LazyTensorStorage(10, device="auto")
    with pytest.raises(RuntimeError, match='device="auto" before the first write'):
        storage.share()
    storage.device = None
    storage.share()
    rb = ReplayBuffer(storage=storage)
    rb.extend(torch.arange(2))
    assert (rb[:].tolist(), storage.device) == ([0, 1], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no such device"):
        storage.device = "cuda:77"
    rb.close()
