"""Tensors that the extension makes, with a torch that publishes DLPack's exchange table and with one that does not."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer, _native
from engram.format.schema import DTYPES


@pytest.fixture
def older_torch():
    """As before torch 2.10."""
    assert not _native._core.use_tensor_type(object)
    yield
    assert _native._core.use_tensor_type(torch.Tensor) == _native.HAS_EXCHANGE


def rows_of(dtype: str, n: int) -> torch.Tensor:
    bits = torch.randint(0, 256, (n, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    values = bits.view(getattr(torch, dtype)) if dtype != "bool" else bits > 127
    return values.contiguous()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_samples_of_every_dtype(dtype, older_torch):
    data = rows_of(dtype, 8)
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=20)
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert (batch.dtype, batch.shape) == (data.dtype, (20, *data.shape[1:]))
    assert batch.is_contiguous()
    assert torch.equal(batch.view(torch.uint8), data.view(torch.uint8)[info["index"]])
    assert torch.equal(rb[:].view(torch.uint8), data.view(torch.uint8))


def test_tensors_own_their_memory(older_torch):
    rb = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.extend(torch.arange(8))
    batches = [rb.sample() for _ in range(50)]
    copies = [batch.clone() for batch in batches]
    del rb
    assert all(torch.equal(a, b) for a, b in zip(batches, copies, strict=True))


def test_the_same_windows(older_torch):
    def sample() -> TensorDict:
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(40),
            sampler=SliceSampler(slice_len=3),
            batch_size=6,
            generator=torch.Generator().manual_seed(1),
        )
        rb.extend(TensorDict({"episode": torch.arange(40) // 9, "x": torch.arange(40.0)}, [40]))
        return rb.sample()

    older = sample()
    _native._core.use_tensor_type(torch.Tensor)
    assert (older == sample()).all()
    assert older["next", "truncated"].shape == (6, 1)
