"""Rows that are written to allocate memory and forgotten before a batch is drawn: their fields are forgotten with them."""

import multiprocessing

import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests import forkserver

#: Of every row to come.
ROWS = TensorDict({"obs": torch.ones(4, 3), "reward": torch.ones(4, 1), "step": torch.arange(4)}, [4])
FAKE = {
    "dtype": TensorDict({"obs": torch.zeros(3), "reward": torch.zeros(1), "step": torch.zeros(())}),
    "shape": TensorDict({"obs": torch.zeros(2), "reward": torch.zeros(1), "step": torch.zeros((), dtype=torch.int64)}),
    "fields": TensorDict({"obs": torch.zeros(3), "other": {"reward": torch.zeros(1)}}),
}


def fakes(differs, n):
    return FAKE[differs].expand(n).clone()


@pytest.mark.parametrize("differs", FAKE)
@pytest.mark.parametrize("n", [1, 7])
def test_the_first_real_rows_say_the_fields(make, differs, n):
    rb = TensorDictReplayBuffer(storage=make(10), batch_size=4)
    rb.extend(fakes(differs, n))
    rb.empty()
    assert rb.storage.initialized  # the memory stays, should the rows fit it
    assert rb.extend(ROWS).tolist() == [0, 1, 2, 3]
    assert set(rb.sample().keys()) == {"obs", "reward", "step", "index"}
    assert rb[:]["step"].tolist() == [0, 1, 2, 3]
    assert rb[:]["step"].dtype is torch.int64
    rb.close()


@pytest.mark.parametrize("write", ["add", "extend", "list"])
def test_rows_of_another_kind(make, write):
    rb = ReplayBuffer(storage=make(10), batch_size=2)
    rb.extend(fakes("dtype", 3))
    rb.empty()
    row = {"obs": torch.ones(2), "done": True}
    if write == "add":
        rb.add(row)
    else:
        rb.extend([row, row] if write == "list" else {"obs": torch.ones(2, 2), "done": [True, True]})
    assert rb[:]["done"].all()
    rb.close()


def test_rows_that_are_no_rows_change_nothing(make):
    rb = ReplayBuffer(storage=make(10))
    rb.extend(fakes("dtype", 3))
    rb.empty()
    for call, data in ((rb.add, "text"), (rb.extend, {"obs": "text"}), (rb.extend, [object()])):
        with pytest.raises(TypeError):
            call(data)
    assert rb.storage.initialized
    rb.close()


def test_other_columns(make):
    rb = ReplayBuffer(storage=make(12, ndim=2))
    rb.extend({"a": torch.zeros(5, 2)})
    rb.empty()
    rb.extend({"a": torch.ones(3, 2)})
    assert (rb.storage.columns, len(rb)) == ((3,), 6)
    rb.close()


def test_a_field_that_was_added_stays(make):
    rb = ReplayBuffer(storage=make(10))
    rb.extend({"a": torch.zeros(3)})
    rb.empty()
    rb.add_field("b", torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="expected shape"):
        rb.extend({"a": torch.zeros(3, 2)})
    rb.close()


def write(rb):
    for _ in range(2):
        rb.extend(ROWS)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_workers_write_what_the_fake_rows_did_not_have(kind, shared, start, tmp_path):
    where = {"scratch_dir": tmp_path / "store"} if kind is LazyMemmapStorage else {}
    rb = TensorDictReplayBuffer(storage=kind(100, **where), shared=shared or start == "fork", batch_size=8)
    rb.extend(fakes("dtype", 5))
    rb.empty()
    context = multiprocessing.get_context("fork") if start == "fork" else forkserver.CONTEXT
    workers = [context.Process(target=write, args=(rb,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(rb) == 16
    assert rb.sample()["step"].dtype is torch.int64
    rb.close()
