"""Items that a tensor storage, or one of stacks, does not keep, and the storages that do."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from engram import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_objects_are_for_lists(buffer):
    rows = TensorDict({"a": torch.zeros(4), "next": {"text": NonTensorData({"x": 1}, batch_size=[4])}}, [4])
    for storage in (LazyTensorStorage, LazyMemmapStorage):
        rb = buffer(storage=storage(8))
        for write, data in ((rb.extend, rows), (rb.add, rows[0])):
            with pytest.raises(
                TypeError, match=r"field \('next', 'text'\): expected a tensor .* or a ListStorage for strings"
            ):
                write(data)
        assert not rb.storage.initialized
    for storage in (ListStorage, LazyStackStorage):
        rb = buffer(storage=storage(8), batch_size=3)
        rb.extend(rows)
        assert list(rb.sample()["next", "text"]) == [{"x": 1}] * 3


def test_items_of_several_batch_sizes():
    items = [TensorDict({"a": torch.zeros(n)}, [n]) for n in (3, 4)]
    rb = ReplayBuffer(storage=LazyStackStorage(8))
    rb.extend(items)
    with pytest.raises(
        RuntimeError, match=r"LazyStackStorage: expected rows of one batch size, got \[3\], \[4\].* ListStorage"
    ):
        rb[:]
    rb = ReplayBuffer(storage=ListStorage(8))
    rb.extend(items)
    assert rb[:].batch_size == (2, -1)
