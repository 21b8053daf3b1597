"""Names of the dims of TensorDicts: those of a row are kept, those before it are none, as in TorchRL."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, CompressedListStorage]


def paths_of(n, names=("path", "time"), **more):
    """Rows that are trajectories of 5 steps each."""
    return TensorDict({"reward": torch.ones(n, 5, 1), **more}, batch_size=[n, 5], names=names)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_those_of_rows_are_kept(kind, buffer):
    rb = buffer(storage=kind(10), batch_size=4)
    rb.extend(paths_of(8))
    for batch in (rb.sample(), rb[:], rb[1:3], rb[[0, 4]]):
        assert batch.names == [None, "time"]
    assert rb[1].names == ["time"]


@pytest.mark.parametrize("names", [None, ("path", None)])
def test_rows_without_names(names):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(paths_of(8, names))
    assert rb.sample()._td_dim_names is None


@pytest.mark.filterwarnings("ignore:add. the first row")
def test_of_single_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    for row in paths_of(6):
        rb.add(row)
    rb.extend(list(paths_of(4)))
    assert rb.sample().names == [None, "time"]
    assert rb[0].names == ["time"]


def test_of_nested_rows():
    frames = TensorDict({"pixels": torch.zeros(8, 5, 3)}, batch_size=[8, 5, 3])
    rows = paths_of(8, frames=frames)
    rows["frames"].names = ["path", "time", "channel"]
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(rows)
    batch = rb.sample()
    assert batch["frames"].names == [None, "time", "channel"]
    assert batch.names == [None, "time"]


@pytest.mark.parametrize("around", [lambda td: {"of": td}, lambda td: (td, torch.zeros(8)), lambda td: {"of": [td]}])
def test_within_other_containers(around):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(around(paths_of(8)))
    batch = rb.sample()
    while not isinstance(batch, TensorDict):
        batch = batch["of" if isinstance(batch, dict) else 0]
    assert batch.names == [None, "time"]


@tensorclass
class Path:
    reward: torch.Tensor


def test_of_tensorclasses():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(Path(torch.ones(8, 5, 1), batch_size=[8, 5], names=[None, "time"]))
    assert rb.sample().names == [None, "time"]


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_copies_and_added_fields_keep_them(kind, tmp_path):
    storage = kind(10) if kind is LazyTensorStorage else kind(10, scratch_dir=tmp_path / "rows")
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rb.extend(paths_of(8))
    rb.add_field("value", torch.zeros(5))
    assert rb.sample().names == [None, "time"]
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb.share()))):
        assert twin.sample().names == [None, "time"]


def test_a_folder_does_not_record_them(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"), batch_size=4)
    rb.extend(paths_of(8))
    rb.close()
    with ReplayBuffer.open(tmp_path / "rows", batch_size=4) as again:
        assert again.sample().names == [None, None]


def test_reward_sums_as_a_transform():
    transforms = pytest.importorskip("torchrl.envs.transforms")
    sums = transforms.RewardSum(in_keys=["reward"], out_keys=["sum"])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=sums, batch_size=4)
    rb.extend(paths_of(8))
    assert torch.equal(rb.sample()["sum"], sums(paths_of(4))["sum"])
