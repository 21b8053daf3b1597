"""HDF5 files: engram's names of TorchRL's checkpointer and its hooks, which work where TorchRL is installed."""

import sys

import pytest

from engram import (
    H5Combine,
    H5Split,
    H5StorageCheckpointer,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    Nested2TED,
    StorageCheckpointerBase,
    TED2Nested,
    TensorDictReplayBuffer,
)
from tests.torchrl.layouts.steps import episodes, in_columns, same


@pytest.fixture
def theirs():
    pytest.importorskip("h5py")
    return pytest.importorskip("torchrl.data")


@pytest.fixture(params=["ours", "theirs"])
def checkpointer(request, theirs):
    """Under engram's name, and TorchRL's own object."""
    return H5StorageCheckpointer if request.param == "ours" else theirs.H5StorageCheckpointer


@pytest.mark.parametrize("name", ["a.h5", "folder"])
@pytest.mark.parametrize("lengths", [(3, 2, 2), (5, 4, 5), (12,), (5, 5)])
def test_rows_come_back_in_order(tmp_path, checkpointer, lengths, name):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=checkpointer())
    assert isinstance(rb.storage.checkpointer, StorageCheckpointerBase)
    for step in episodes(lengths):
        rb.add(step)
    rb.storage.dumps(tmp_path / name)
    for full in (False, True):
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        other.storage.checkpointer = checkpointer()
        if full:
            other.extend(episodes((10,), seed=3))
        other.storage.loads(tmp_path / name)
        assert len(other) == len(rb)
        assert same(other.read_all_in_order(lane=0), rb.read_all_in_order(lane=0))
        other.extend(episodes((2,), seed=8))


def test_columns(tmp_path, checkpointer):
    steps = in_columns((6, 4), 3)
    rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2)) for _ in range(2))
    for i in range(10):
        rb.extend(steps[:, i : i + 1])
    rb.storage.checkpointer = other.storage.checkpointer = checkpointer()
    rb.storage.dumps(tmp_path / "a.h5")
    other.storage.loads(tmp_path / "a.h5")
    assert same(other.read_all_in_order(lane=0), rb.read_all_in_order(lane=0))


def test_torchrl_reads_the_file(tmp_path, theirs):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(episodes((3, 2)))
    H5StorageCheckpointer().dumps(rb.storage, tmp_path / "a.h5")
    read = theirs.LazyTensorStorage(10)
    theirs.H5StorageCheckpointer().loads(read, tmp_path / "a.h5")
    assert same(read._storage[:5].clone(), rb[:].clone())


def test_a_dump_of_a_buffer_needs_another_one(tmp_path, checkpointer):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), checkpointer=checkpointer())
    rb.extend(episodes((3, 2)))
    with pytest.raises(TypeError, match=r"Call rb\.storage\.dumps\(path\)"):
        rb.dumps(tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_a_dump_of_torchrl_in_such_a_file_says_what_loads_it(tmp_path, theirs):
    other = theirs.TensorDictReplayBuffer(
        storage=theirs.LazyTensorStorage(10), checkpointer=theirs.H5StorageCheckpointer(), batch_size=2
    )
    other.extend(episodes((3, 2)))
    other.dumps(tmp_path / "theirs")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(IncompatibleCheckpoint, match=r"H5StorageCheckpointer\(\)\.loads\(rb\.storage, '.*storage'\)"):
        rb.loads(tmp_path / "theirs")
    H5StorageCheckpointer().loads(rb.storage, tmp_path / "theirs" / "storage")
    assert same(rb[:], other[:].exclude("index"))


def test_hooks_are_torchrls(theirs):
    steps = episodes((3, 2))
    save = TED2Nested()
    save.shift, save.is_full = 5, True
    split = H5Split()(save(steps))
    assert type(H5Split()) is theirs.H5Split
    assert type(H5Combine()) is theirs.H5Combine
    assert same(Nested2TED()(H5Combine()(split)), steps)


@pytest.mark.parametrize("missing", ["h5py", "torchrl.data"])
@pytest.mark.parametrize("make", [H5StorageCheckpointer, H5Split, H5Combine])
def test_without_torchrl_the_message_says_what_to_install(make, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install torchrl 'engram-replay\[hdf5\]'"):
        make()


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="expected a storage checkpointer, got object"):
        LazyTensorStorage(10).checkpointer = object()
