"""A buffer that was given no storage: its first rows say whether they are columns of tensors or the items of a list."""

import copy
import logging
import multiprocessing
import pickle
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

ROWS = [{"obs": np.full(3, i, np.float32), "action": i, "next": {"reward": 0.5, "done": i == 3}} for i in range(4)]
COLUMNS = {
    "obs": np.zeros((4, 3), np.float32),
    "action": [0, 1, 2, 3],
    "next": {"reward": [0.5] * 4, "done": [False] * 4},
}
WRITES = {
    "add": lambda rb: [rb.add(row) for row in ROWS],
    "extend": lambda rb: rb.extend(ROWS),
    "columns": lambda rb: rb.extend(COLUMNS),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: ReplayBuffer(100_000, batch_size=4),
        lambda: ReplayBuffer(batch_size=4, storage=None),
        lambda: ReplayBuffer(100, batch_size=4, shared=True),
        lambda: ReplayBuffer(100, batch_size=4, delayed_init=True),
        lambda: ReplayBuffer(100, batch_size=4, prefetch=2),
        lambda: ReplayBuffer(100, batch_size=4, transform=lambda batch: batch),
        lambda: ReplayBuffer(100, batch_size=2, sampler=ConsumingSampler(2)),
        lambda: ReplayBuffer(100, batch_size=2, sampler=SamplerWithoutReplacement()),
        lambda: PrioritizedReplayBuffer(100, alpha=0.6, beta=0.4, batch_size=4),
    ],
)
def test_dicts_are_columns(make, write):
    rb = make()
    WRITES[write](rb)
    assert type(rb.storage) is LazyTensorStorage
    assert len(rb) == rb.write_count == 4
    batch = rb.sample()
    assert batch["next"]["reward"].tolist() == [0.5] * len(batch["action"])
    assert rb[3]["action"] == 3
    WRITES[write](rb)  # by the short path
    assert rb[:]["action"].tolist() == [0, 1, 2, 3] * 2
    rb.close()


def test_the_storage_is_the_same_object():
    rb = ReplayBuffer(100)
    storage, other = rb.storage, ReplayBuffer(storage=rb.storage, sampler=PrioritizedSampler(100, 1.0, 1.0))
    assert isinstance(storage, ListStorage)
    assert "LazyTensorStorage if the first rows are dicts" in repr(storage)
    assert "LazyTensorStorage" in repr(rb)
    assert (len(storage), storage.max_size) == (0, 100)
    rb.extend(ROWS)
    assert storage is rb.storage is other.storage
    assert len(storage) == len(other) == 4
    assert other.sample(2)["obs"].shape == (2, 3)
    assert repr(storage) == "LazyTensorStorage(size=4/100, 4 fields, cpu)"


class Step(NamedTuple):
    obs: torch.Tensor


@pytest.mark.parametrize(
    "rows",
    [
        [TensorDict({"a": torch.zeros(2)})] * 2,
        TensorDict({"a": torch.zeros(2)}, [2]),
        torch.zeros(2, 3),
        [torch.zeros(3)] * 2,
        ["a", "bc"],
        [object(), {"a": 1}],
        [{"a": 1}, "text"],
        [Step(torch.zeros(2))] * 2,
        range(2),
        [{"text": "a"}, {"text": "b"}],
        [{"a": None}, {"a": None}],
        [{"a": torch.zeros(2)}, {"a": torch.zeros(3)}],
        [{"a": 1}, {"b": 1}],
        [{"a": [1, [2]]}] * 2,
    ],
    ids=[
        *("TensorDicts", "batch", "tensor", "tensors", "strings", "mixed", "dict and text"),
        *("named tuples", "range", "texts", "nones", "ragged", "fields", "ragged lists"),
    ],
)
def test_other_rows_are_items(rows):
    rb = ReplayBuffer(100, batch_size=2)
    rb.extend(rows)
    assert type(rb.storage) is ListStorage
    assert len(rb) == 2
    rb.add({"a": 1})  # it stays a list
    assert rb[2] == {"a": 1}


def test_a_line_says_why_dicts_are_items(caplog):
    with caplog.at_level(logging.INFO, "engram"):
        ReplayBuffer(100).add({"obs": torch.zeros(2), "prompt": "text"})
    (line,) = caplog.messages
    assert line.startswith("add: rows are kept in a list, which is several times slower than a LazyTensorStorage: ")
    assert "field 'prompt': expected a tensor" in line


@pytest.mark.parametrize(
    ("columns", "error", "match"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, RuntimeError, "same number of rows"),
        ({"a": ["x", "y"]}, TypeError, "ListStorage for strings"),
        ({"a": torch.zeros(())}, TypeError, r"Did you mean add\(\)"),
    ],
)
def test_columns_that_do_not_fit_change_nothing(columns, error, match):
    rb = ReplayBuffer(100)
    with pytest.raises(error, match=match):
        rb.extend(columns)
    assert len(rb) == 0
    rb.extend(["a"])  # nothing was chosen
    assert rb[0] == "a"


def test_what_is_named_is_kept():
    for rb in (
        ReplayBuffer(storage=ListStorage(9)),
        ReplayBuffer(storage=ListStorage),
        ReplayBuffer(9, collate_fn=list),
    ):
        rb.extend(ROWS)
        assert type(rb.storage) is ListStorage
    assert type(TensorDictReplayBuffer(9).storage) is ListStorage


def test_rows_of_other_kinds_are_refused_with_a_remedy():
    rb = ReplayBuffer(100)
    rb.add({"a": torch.zeros(2)})
    for row, error in (({"a": torch.zeros(3)}, RuntimeError), ({"b": 1}, KeyError), ("text", TypeError)):
        with pytest.raises(error, match=r"storage=ListStorage\("):
            rb.add(row)
    assert len(rb) == 1


def test_limits_and_devices_come_along():
    rb = ReplayBuffer(100, batch_size=2)
    rb.storage.device = None
    rb.limit(MinSize(2))
    rb.extend(ROWS)
    assert rb.limits == (MinSize(2),)
    assert rb.storage.device == torch.device("cpu")
    listed = ReplayBuffer(100)
    with pytest.raises(TypeError, match="no limits|expected"):
        listed.limit()
    listed.add("text")
    assert listed[0] == "text"


def test_dumps_and_states_before_and_after_the_first_row(tmp_path):
    rb = ReplayBuffer(100, batch_size=2)
    rb.dumps(tmp_path / "none")
    none = rb.state_dict()
    rb.extend(ROWS)
    rb.dumps(tmp_path / "rows")
    loads = {
        "dump": lambda other: other.loads(tmp_path / "rows"),
        "converted": lambda other: other.loads(tmp_path / "rows", convert=True),
        "state": lambda other: other.load_state_dict(rb.state_dict()),
        "storage": lambda other: other.storage.load_state_dict(rb.storage.state_dict()),
    }
    for load in loads.values():
        other = ReplayBuffer(100, batch_size=2)
        load(other)
        assert type(other.storage) is LazyTensorStorage
        assert other[:]["action"].tolist() == [0, 1, 2, 3]
        other.extend(ROWS)
    for load in (lambda other: other.loads(tmp_path / "none"), lambda other: other.load_state_dict(none)):
        for rows, kind in ((ROWS, LazyTensorStorage), (["a", "b"], ListStorage)):
            other = ReplayBuffer(100)
            load(other)
            other.extend(rows)
            assert type(other.storage) is kind


def test_a_list_that_was_loaded_stays_one(tmp_path):
    rb = ReplayBuffer(100)
    rb.extend(["x", {"a": torch.zeros(2)}][1:])
    listed = ReplayBuffer(storage=ListStorage(100))
    listed.extend([torch.zeros(2), torch.zeros(3)])
    listed.dumps(tmp_path / "rows")
    other = ReplayBuffer(100)
    other.loads(tmp_path / "rows")
    other.add({"a": 1})
    assert (type(other.storage), len(other)) == (ListStorage, 3)


def test_a_checkpoint_is_restored(tmp_path):
    rb, other = (ReplayBuffer(100, batch_size=2) for _ in range(2))
    rb.extend(ROWS)
    Checkpointer(tmp_path, rb).save(step=1)
    Checkpointer(tmp_path, other).restore()
    assert type(other.storage) is LazyTensorStorage
    assert other[:]["action"].tolist() == [0, 1, 2, 3]


def test_copies_choose_for_themselves():
    rb = ReplayBuffer(100)
    one, other = pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb)
    one.extend(ROWS)
    other.extend(["a"])
    assert (type(one.storage), type(other.storage)) == (LazyTensorStorage, ListStorage)
    assert type(pickle.loads(pickle.dumps(one)).storage) is LazyTensorStorage
    assert len(rb) == 0


def test_threads_choose_once():
    for _ in range(20):
        rb = ReplayBuffer(100)
        begin = threading.Barrier(4)

        def write(rb=rb, begin=begin):
            begin.wait()
            rb.add(ROWS[0])

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(rb) == 4


def extend(rb):
    rb.extend(ROWS)


def test_processes_share_it():
    rb = ReplayBuffer(100, batch_size=2)
    rb.share()
    workers = [multiprocessing.get_context("fork").Process(target=extend, args=(rb,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(rb) == 8
    assert rb.sample()["obs"].shape == (2, 3)
    rb.close()


def test_without_rows_it_says_what_empty_buffers_say():
    for rb in (ReplayBuffer(100), ReplayBuffer(storage=ListStorage(100))):
        for read in (lambda rb=rb: rb[:], lambda rb=rb: rb["a"], lambda rb=rb: rb.read_all_in_order()):
            with pytest.raises(RuntimeError, match="^Cannot sample from an empty storage"):
                read()
    assert ReplayBuffer(100, collate_fn=list)[:] == []
    rb = ReplayBuffer(100)
    rb.extend([torch.zeros(2)])
    with pytest.raises(RuntimeError, match="^no items to stack"):
        rb[[]]


class Columns(NamedTuple):
    obs: object
    action: object


@pytest.mark.parametrize("make", [lambda: ReplayBuffer(100), lambda: ReplayBuffer(storage=ListStorage(100))])
def test_a_batch_in_a_named_tuple_is_no_list_of_items(make):
    rb, batch = make(), Columns(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(TypeError, match="extend: expected a list of items, .* named tuples .*LazyTensorStorage"):
        rb.extend(batch)
    assert len(rb) == 0
    rb.add(Columns(torch.zeros(3), torch.zeros(())))
    rb.extend([Columns(torch.ones(3), torch.ones(()))] * 2)
    assert (len(rb), rb[2].obs.tolist()) == (3, [1, 1, 1])
    tensors = ReplayBuffer(storage=LazyTensorStorage(100))
    tensors.extend(batch)
    assert len(tensors) == 4
