"""Next observations are compared bit by bit, whatever the size of a row is."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import FlatStorageCheckpointer, IncompatibleCheckpoint, LazyTensorStorage, TensorDictReplayBuffer


def steps(n, shape, dtype):
    """Steps of one trajectory that goes on, with bytes that differ everywhere."""
    row = int(np.prod(shape)) * dtype.itemsize
    every = torch.arange((n + 1) * row).mul(7).remainder(251).to(torch.uint8)
    every = every.remainder(2) if dtype is torch.bool else every
    observations = every.view(dtype).reshape(n + 1, *shape)
    flag = torch.zeros(n, 1, dtype=torch.bool)
    after = TensorDict({"obs": observations[1:].clone(), "reward": torch.zeros(n), "done": flag}, [n])
    return TensorDict({"obs": observations[:-1].clone(), "done": flag, "next": after}, [n])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4,), (2, 3), (8,)])
def test_any_size_of_rows(tmp_path, shape, dtype):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), checkpointer=FlatStorageCheckpointer())
    data = steps(9, shape, dtype)
    rb.extend(data)
    rb.dumps(tmp_path / "dump")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    other.loads(tmp_path / "dump")
    for key in ("obs", ("next", "obs")):
        found = other[:][key]
        assert bytes(found.contiguous().view(torch.uint8).numpy()) == bytes(
            data[key].contiguous().view(torch.uint8).numpy()
        )
    values = rb.storage[:]["next", "obs"].clone().view(torch.uint8).reshape(9, -1 if data["obs"].numel() else 0)
    for row in range(8):  # the ninth has nothing after it
        for byte in {0, values.shape[1] - 1} if values.shape[1] else ():
            wrong = values.clone()
            wrong[row, byte] ^= 1
            rb.storage.set(torch.arange(9), data.clone().set(("next", "obs"), wrong.view(dtype).reshape(9, *shape)))
            with pytest.raises(IncompatibleCheckpoint, match=f"row {row}: expected .*'obs'"):
                rb.dumps(tmp_path / "wrong")
