"""Messages of a first day that say what to call, which folder is meant, and what is free."""

import errno
import os
import re

import pytest
import torch
from tensordict import TensorDict

import engram
from engram import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Trajectory,
)
from engram.errors import IncompatibleStore
from engram.format import files

ALPHA = {"alpha": 0.6, "beta": 0.4}


def rows(n=6):
    return TensorDict({"obs": torch.zeros(n, 2), "next": TensorDict({"reward": torch.zeros(n)}, [n])}, [n])


# ---- priorities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [(), (torch.ones(4),)])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_batch_where_rows_are_expected(storage, priority):
    tds = TensorDictPrioritizedReplayBuffer(**ALPHA, storage=storage(20), batch_size=4)
    tds.extend(rows())
    dicts = PrioritizedReplayBuffer(**ALPHA, storage=LazyTensorStorage(20), batch_size=4)
    dicts.extend(rows().to_dict())
    uniform = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    uniform.extend(rows().to_dict())
    batch, info = dicts.sample(return_info=True)
    for rb, given in ((tds, tds.sample()), (dicts, batch), *[(dicts, info)][len(priority) :], (uniform, batch)):
        with pytest.raises(TypeError, match=r"update_tensordict_priority\(batch\).*update_priority\(info\[\"index\"\]"):
            rb.update_priority(given, *priority)


def test_a_batch_of_an_ensemble_where_rows_are_expected():
    members = [TensorDictPrioritizedReplayBuffer(**ALPHA, storage=LazyTensorStorage(20)) for _ in "ab"]
    for member in members:
        member.extend(rows())
    rb = ReplayBufferEnsemble(*members, batch_size=4)
    with pytest.raises(TypeError, match=r"update_priority: expected rows and their priorities.*info\[\"index\"\]"):
        rb.update_priority(rb.sample()["index"])
    rb.update_priority(rb.sample()["index"], torch.ones(2, 2))


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, HERReplayBuffer])
def test_priorities_of_a_buffer_without(kind, name, tmp_path):
    said = rf"unexpected argument '{name}'. Use \(TensorDict\)PrioritizedReplayBuffer, or sampler=PrioritizedSampler\("
    more = {"reward_fn": lambda batch: batch["next", "reward"]} if kind is HERReplayBuffer else {}
    with pytest.raises(TypeError, match=said):
        kind(storage=LazyTensorStorage(10), **{name: 0.5}, **more)
    with pytest.raises(TypeError, match=said):
        ReplayBuffer.open_or_create(tmp_path / "store", 10, **{name: 0.5})


# ---- kinds of rows ---------------------------------------------------------------------------------------------------

STORAGES = {
    "RAM": lambda _: LazyTensorStorage(20),
    "shared": lambda _: LazyTensorStorage(20, shared_init=True),
    "directory": lambda folder: LazyMemmapStorage(20, scratch_dir=folder / "store"),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_another_kind(storage, tmp_path):
    rb = ReplayBuffer(storage=STORAGES[storage](tmp_path))
    rb.extend(rows())
    for write, data in ((rb.extend, rows().to_dict()), (rb.add, rows()[0].to_dict())):
        with pytest.raises(
            TypeError, match=r"expected a TensorDict as .*, got dict with \['obs', 'next'\]. Write TensorDict\("
        ):
            write(data)
    with pytest.raises(TypeError, match=r"expected a TensorDict as in the first row, got a tensor \[3\]\.$"):
        rb.extend(torch.zeros(3))
    rb = ReplayBuffer(storage=STORAGES[storage](tmp_path / "dicts"))
    rb.extend(rows().to_dict())
    for write, data in ((rb.extend, rows()), (rb.add, rows()[0])):
        with pytest.raises(TypeError, match=r"expected a dict as in the first row, got a TensorDict .*\.to_dict\(\)"):
            write(data)
    assert len(rb) == 6


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_dicts_for_a_buffer_of_tensordicts(storage):
    rb = TensorDictReplayBuffer(storage=storage(20))
    for data in (rows().to_dict(), [rows()[0].to_dict()]):
        with pytest.raises(
            ValueError, match=r"expected a TensorDict, got (dict|list). Write TensorDict\(data, \[n\]\), or use"
        ):
            rb.extend(data)


class DataSet:
    """As of h5py: it has a shape and a dtype, and what it holds is read by an index."""

    shape, dtype = (6, 2), "float32"

    def __getitem__(self, index):
        return torch.zeros(6, 2)[index]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("before", [False, True])
def test_data_sets_as_columns(storage, before, tmp_path):
    rb = ReplayBuffer(storage=STORAGES[storage](tmp_path))
    if before:
        rb.extend({"obs": torch.zeros(2, 2), "a": torch.zeros(2)})
    with pytest.raises(
        TypeError, match=r"field 'obs': expected a tensor or an array, got DataSet.*Read it first: obs\[:\]"
    ):
        rb.extend({"obs": DataSet(), "a": torch.zeros(6)})
    with pytest.raises(TypeError, match=r"Read it first: obs\[:\]"):
        rb.add({"obs": DataSet(), "a": torch.tensor(0.0)})
    rb.extend({"obs": DataSet()[:], "a": torch.zeros(6)})


def test_data_sets_of_h5py(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["obs"] = torch.ones(6, 2).numpy()
        rb = ReplayBuffer(storage=LazyTensorStorage(10))
        with pytest.raises(TypeError, match=r"Read it first: obs\[:\]"):
            rb.extend({"obs": file["obs"]})
        with pytest.raises(TypeError, match=r"Read it first: data\[:\]"):
            rb.extend(file["obs"])
        rb.extend({"obs": file["obs"][:]})


# ---- no space --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
@pytest.mark.parametrize("size", [10_000, 10**9])
def test_a_disk_without_space(code, size, tmp_path, monkeypatch):
    def full(fd, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fallocate", full)
    rb = ReplayBuffer(storage=LazyMemmapStorage(size, scratch_dir=tmp_path / "store"))
    with pytest.raises(OSError, match="reserving") as caught:
        rb.extend({"obs": torch.zeros(3, 84, 84)})
    said = str(caught.value)
    assert re.search(r"expected (282 M|28\.2 T)B, got [\d.]+ [MGT]B that are free", said), said
    assert "engram.plan(row, capacity)" in said
    assert str(tmp_path / "store") in said
    assert caught.value.errno == code
    assert str(engram.plan({"obs": torch.zeros(84, 84)}, size))


# ---- a folder that is opened again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("open_again", ["open", "open_or_create"])
def test_another_layout_in_a_folder_names_it(open_again, tmp_path):
    folder = tmp_path / "store"
    with ReplayBuffer.open_or_create(folder, 20) as rb:
        rb.extend({"obs": torch.zeros(3, 4)})
        with pytest.raises(RuntimeError, match="as in the first row, got"):
            rb.extend({"obs": torch.zeros(3, 5)})  # which this program has written
    arguments = (folder,) if open_again == "open" else (folder, 20)
    with getattr(ReplayBuffer, open_again)(*arguments) as rb:
        for data, kind in (
            ({"obs": torch.zeros(3, 5)}, RuntimeError),
            ({"obs": torch.zeros(3, 4).double()}, RuntimeError),
            ({"other": torch.zeros(3, 4)}, KeyError),
            (TensorDict({"obs": torch.zeros(3, 4)}, [3]), TypeError),
        ):
            with pytest.raises(kind, match=re.escape(f"The first row is in {str(folder)!r}")):
                rb.extend(data)
        rb.add_field("more", torch.zeros(()))
        with pytest.raises(RuntimeError, match=re.escape(str(folder))):
            rb.extend({"obs": torch.zeros(3, 5), "more": torch.zeros(3)})
    with pytest.raises(IncompatibleStore, match=re.escape(str(folder))):
        ReplayBuffer.open_or_create(folder, 20, dtypes={"obs": torch.float16})


# ---- units -----------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_no_unit():
    for unit in (Trajectory, Trajectory(rows())):
        with pytest.raises(TypeError, match=r"got Trajectory. It is what rb.query returns. Pass Sequence\(length="):
            ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=unit)
    with pytest.raises(TypeError, match=r"expected a TensorDict \[T\].*sample_unit=Sequence\(length="):
        Trajectory()
    with pytest.raises(TypeError, match=r"got Sequence. Write Sequence\(…\)\.$"):
        ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_are_written_one_way():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000))
    rb.extend(rows(2_000))
    for shown in (repr(rb), rb._repr_html_()):
        assert "2,000/100,000" in shown
    assert "size=2,000/100,000" in repr(rb.storage)
    members = ReplayBufferEnsemble(rb, rb, batch_size=2)
    assert "2,000/100,000" in repr(members)
    kept = ReplayBuffer(storage=ListStorage(100_000))
    kept.extend([0] * 2_000)
    assert "size=2,000/100,000" in repr(kept.storage)
    assert "4,000 rows" not in repr(rb)
