"""The shortest uses: rows of a plain tensor, of nested dictionaries, in files; and what is logged of a new storage."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, RowError
from tests import fresh


def test_single_rows_of_a_plain_tensor():
    cfg = SimpleNamespace(buffer_size=100)
    buffer = ReplayBuffer(
        cfg.buffer_size, collate_fn=lambda tensors: tensors, storage=LazyMemmapStorage(cfg.buffer_size)
    )
    written = torch.randn(3)
    buffer.add(written)
    sample = buffer.sample(1)
    assert sample.shape == torch.Size([1, 3])
    assert torch.equal(sample[0], written)
    assert torch.equal(buffer._storage[2], torch.zeros(3))  # not assigned yet
    assert torch.equal(buffer._storage[0], written)


def test_a_tensordict_in_memory_mapped_files(tmp_path):
    td = TensorDict({"a": torch.randn(10, 3), "b": torch.ones(10, 1)}, batch_size=[10])
    buffer = ReplayBuffer(10, collate_fn=lambda x: x, storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    buffer.extend(td)
    sample = buffer.sample(3)
    assert isinstance(sample, TensorDict)
    assert sample.batch_size == (3,)
    assert sample.get("b").shape == (3, 1)
    assert sample.get("a").shape == (3, 3)
    assert type(sample.get("b")) is torch.Tensor  # an ordinary tensor, and in RAM
    assert not sample.is_locked
    stored = buffer[:]
    assert isinstance(stored.get("a"), MemoryMappedTensor)
    assert str(stored.get("a").filename) == str(tmp_path / "a.memmap")
    assert (stored == td).all()


def test_creation_is_logged_and_prints_nothing(tmp_path):
    program = """
        import logging, torch
        from tensordict import TensorDict
        from engram import LazyMemmapStorage, ReplayBuffer

        logging.basicConfig(format="%(name)s: %(message)s", level=level)
        td = TensorDict({"a": torch.randn(10, 3), "b": torch.ones(10, 1)}, batch_size=[10])
        buffer = ReplayBuffer(10, collate_fn=lambda x: x, storage=LazyMemmapStorage(10, scratch_dir=folder))
        buffer.extend(td)
        buffer.extend(td)
        """
    line = f"engram: 10 rows in {tmp_path}, 160 B: a [3] float32 (120 B), b [1] float32 (40 B)"
    for level, lines in (("INFO", [line]), ("WARNING", [])):
        made = fresh.start(program, folder=str(tmp_path / level), level=level)
        assert made.wait() == 0, made.err
        assert made.err.splitlines() == [it.replace(str(tmp_path), str(tmp_path / level)) for it in lines]


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_nested_dictionaries(storage):
    buffer = ReplayBuffer(storage=storage(10))
    rows = {
        "observation": {"pixels": torch.arange(12).reshape(4, 3), "state": torch.ones(4)},
        "reward": torch.rand(4, 1),
    }
    buffer.extend(rows)
    sample = buffer.sample(5)
    assert type(sample) is dict
    assert type(sample["observation"]) is dict
    assert sample["observation"]["pixels"].shape == (5, 3)
    assert sample["reward"].shape == (5, 1)
    row = buffer[2]
    assert type(row) is dict
    assert row["observation"]["pixels"].tolist() == [6, 7, 8]
    assert torch.equal(buffer[1:3]["reward"], rows["reward"][1:3])
    assert torch.equal(buffer["observation", "pixels"], rows["observation"]["pixels"])
    assert torch.equal(buffer["reward"], rows["reward"])


def test_the_shortest_use():
    """Size, storage, one call to write, one to read: nothing else is needed."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=32)
    for step in range(50):
        buffer.add({"step": torch.tensor(step)})
    assert set(buffer.sample()["step"].tolist()) <= set(range(50))
    assert len(buffer) == 50


def test_with_closes_it_at_the_end(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "a"))
    rb.extend(torch.arange(3))
    with pytest.raises(RowError), rb:
        rb[5]
    assert rb.closed
    with ReplayBuffer.open(tmp_path / "a") as rb:
        assert rb[:].tolist() == [0, 1, 2]
        rb.close()
    with pytest.raises(RuntimeError, match="closed"), rb:
        pass
