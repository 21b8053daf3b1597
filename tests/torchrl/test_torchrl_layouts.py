"""Layouts that hold each observation once: TorchRL reads what engram wrote, and engram what TorchRL wrote."""

from pathlib import Path

import pytest

import engram
from engram import LazyTensorStorage, TensorDictReplayBuffer
from tests.torchrl.layouts.steps import episodes, in_columns, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what TorchRL did not save as tensors is named

#: Episodes: not full, and full with the oldest step inside. TorchRL cannot load a storage whose oldest slot is the first.
LENGTHS = [(3, 2, 2), (5, 4, 5), (12,), (1, 1, 1)]


@pytest.fixture(params=["Flat", "Nested"])
def kinds(request, torchrl):
    """Both checkpointers of a layout."""
    from torchrl.data.replay_buffers import checkpointers

    name = f"{request.param}StorageCheckpointer"
    return getattr(engram, name), getattr(checkpointers, name)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_whole_buffers_in_both_directions(tmp_path, torchrl, kinds, lengths):
    ours, theirs = kinds
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=ours(), batch_size=2)
    other = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), checkpointer=theirs(), batch_size=2)
    for step in episodes(lengths):
        rb.add(step)
        other.add(step)
    rb.dumps(tmp_path / "ours")
    other.dumps(tmp_path / "theirs")
    read = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(10), checkpointer=theirs(), batch_size=2)
    read.loads(tmp_path / "ours")
    assert same(read[:].exclude("index").clone(), rb[:].clone())
    assert read._writer._cursor == sum(lengths) % 10
    for full in (False, True):
        back = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        if full:
            back.extend(episodes((10,), seed=3))
        back.loads(tmp_path / "theirs")
        assert same(back[:], rb[:])
        more = episodes((2,), seed=8)
        twin = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        twin.loads(tmp_path / "ours")
        assert back.extend(more).tolist() == twin.extend(more).tolist()
        assert same(back[:], twin[:])


@pytest.mark.parametrize("lengths", [(3, 2), (5, 4, 5), (6, 4)])
def test_columns_in_both_directions(tmp_path, torchrl, kinds, lengths):
    ours, theirs = kinds
    steps = in_columns(lengths, 3)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2), checkpointer=ours())
    other = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(24, ndim=2), checkpointer=theirs())
    for i in range(sum(lengths)):
        rb.extend(steps[:, i : i + 1])
        other.extend(steps[:, i : i + 1].clone())
    rb.dumps(tmp_path / "ours")
    other.dumps(tmp_path / "theirs")
    read = torchrl.LazyTensorStorage(24, ndim=2)
    theirs().loads(read, Path(tmp_path / "ours" / "storage"))
    assert same(read._storage[: min(sum(lengths), 8)].transpose(0, 1).clone(), rb[:].clone())
    back = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    back.loads(tmp_path / "theirs")
    assert same(back[:], rb[:])


def test_files_are_the_same(tmp_path, torchrl, kinds):
    """Byte by byte, where the layout is files."""
    ours, theirs = kinds
    steps = episodes((5, 4, 5))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=ours())
    other = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(10), checkpointer=theirs())
    for step in steps:
        rb.add(step)
        other.add(step)
    rb.dumps(tmp_path / "ours")
    other.dumps(tmp_path / "theirs")
    found = {
        side: {
            str(path.relative_to(tmp_path / side)): path.read_bytes()
            for path in (tmp_path / side / "storage").rglob("*.memmap")
            if "/.engram/" not in str(path)
        }
        for side in ("ours", "theirs")
    }
    assert found["ours"] == found["theirs"]
