"""Where the best rows go, beside what others write."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Write,
    WritePlan,
)
from engram._support import native
from tests.components import Listener
from tests.writers.best import STORAGES, best, row, rows, scores

# ---- where a row would go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_get_insert_index(storage):
    rb = best(2, storage)
    where = rb.writer.get_insert_index
    assert where(row(1)) == 0
    rb.extend(rows([4, 3]))
    for _ in range(2):  # asking changes nothing
        assert where(row(3.5)) == 1
        assert where(row(3)) is None
    assert scores(rb) == [4, 3]
    assert rb.add(row(3.5)) == 1
    assert where(row(3.5)) is None


def test_get_insert_index_needs_a_storage():
    with pytest.raises(RuntimeError, match="registered storage"):
        TensorDictMaxValueWriter("score").get_insert_index(row(1))


def test_placing_has_no_side_effect():
    rb = best(3, ranks=[1, 2, 3])
    extent = rb.storage.extent()
    for _ in range(3):
        plan = rb.writer.place(extent, 3, 0, rows([0, 5, 2]))
        assert plan.rows.tolist() == [0]
        assert plan.kept.tolist() == [1]
    assert rb.writer.place(extent, 2, 0, rows([0, 0])).rows.tolist() == []
    assert scores(rb) == [1, 2, 3]
    assert rb.extend(rows([1.5])).tolist() == [0]


@pytest.mark.parametrize("path", ["write_natively", "write"])
def test_a_write_that_fails_after_placing_is_forgotten(monkeypatch, path):
    rb = best(2, ranks=[1, 2])
    rb.extend(rows([1.5]))

    def fails(*_):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "write_natively", lambda *_: None)
        patch.setattr(rb.storage, path, fails)
        with pytest.raises(OSError, match="no"):
            rb.extend(rows([9, 9]))
    rb.storage[0] = row(1)  # as many tickets as the plan would have taken
    rb.storage[0] = row(0)
    assert rb.extend(rows([1])).tolist() == [0]
    assert scores(rb) == [1, 2]


def test_an_edit_between_placing_and_writing_is_seen(monkeypatch):
    rb = best(2, ranks=[1, 2])
    rb.extend(rows([0.5]))
    write = rb.storage.write

    def late(*args):
        rb.storage[1] = row(0)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "write_natively", lambda *_: None)
        patch.setattr(rb.storage, "write", late)
        assert rb.add(row(1.5)) == 0
    assert rb.add(row(0.5)) == 1


def test_another_plan_that_was_written_is_not_taken_for_the_last_one():
    rb = best(2, ranks=[1, 2])
    rb.writer.place(rb.storage.extent(), 1, 0, rows([9]))
    other = WritePlan(rows=torch.tensor([1]))
    rb.writer.written(other, rb.storage.write(other, rb.storage.prepare(rows([5]), "extend", batched=True)[0], 1))
    assert rb.extend(rows([3, 4])).tolist() == [-1, 0]


def test_other_memory_under_the_same_storage():
    rb, other = best(2, ranks=[1, 2]), best(2, ranks=[7, 6])
    rb.add(row(0))
    other.add(row(0))
    rb.storage._adopt(other.storage.memory, other.storage.structure)
    assert rb.add(row(5)) is None
    assert rb.add(row(6.5)) == 1


# ---- what others write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
class TestOthers:
    def test_edits_count(self, storage):
        rb = best(3, storage, [1, 2, 3])
        rb.add(row(1.5))
        rb[0] = row(9)
        assert rb.add(row(2.5)) == 1
        rb[[0, 2]] = rows([0, 1])
        assert rb.extend(rows([0.5, 0.7])).tolist() == [-1, 0]

    def test_emptying_counts(self, storage):
        rb = best(2, storage, [8, 9])
        rb.extend(rows([10]))
        rb.empty()
        assert rb.extend(rows([1, 2, 3])).tolist() == [-1, 1, 0]
        assert rb.write_count == 3

    def test_another_buffer_counts(self, storage):
        rb = best(3, storage, [1, 2, 3])
        other = TensorDictReplayBuffer(storage=rb.storage, writer=TensorDictMaxValueWriter("score"))
        assert other.add(row(5)) == 0
        assert rb.add(row(4)) == 1
        assert other.add(row(3.5)) == 2
        assert rb.extend(rows([3.4, 6])).tolist() == [-1, 2]

    def test_a_stored_nan_ranks_below_all_numbers(self, storage):
        rb = best(3, storage, [1, 2, 3])
        ReplayBuffer(storage=rb.storage, writer=RoundRobinWriter()).writer.write_at([1], rows([float("nan")]))
        assert rb.add(row(-5)) == 1

    def test_another_storage(self, storage):
        rb = best(2, storage, [1, 2])
        rb.extend(rows([1.5]))
        rb.set_storage(storage(2))
        assert rb.extend(rows([0.1, 0.2, 0.15])).tolist() == [-1, 1, 0]
        assert scores(rb) == [0.15, 0.2]


def test_fields_that_are_set_count():
    rb = best(3, ranks=[1, 2, 3])
    rb.add(row(1.5))
    rb.set_at_("score", torch.tensor([7.0], dtype=torch.float64), [0])
    assert rb.add(row(2.5)) == 1
    rb["score"] = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    assert rb.add(row(1.5)) == 2


def test_threads_keep_the_best():
    rb = best(50)
    ranks = torch.randperm(4 * 40 * 5).reshape(4, 40, 5).double()
    threads = [threading.Thread(target=lambda i=i: [rb.extend(rows(r)) for r in ranks[i]]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(scores(rb)) == list(range(750, 800))


# ---- beside the rows ---------------------------------------------------------------------------------------------------


def test_rows_read_back_say_where_they_are():
    rb = best(2, ranks=[1, 2, 3])
    assert rb[:]["index"].tolist() == [0, 1]
    assert "index" not in rb.storage[0].keys()


def test_priorities_and_observers_hear_of_rejected_rows():
    class Noting(Listener):
        def observe(self, write, data):
            self.heard.append((write.rows.tolist(), write.tickets.tolist(), len(data)))

    rb = best(2, ranks=[1, 2])
    rb.set_sampler(Noting())
    first = int(rb.storage.memory.core.next_ticket)
    rb.extend(rows([0, 5, 1, 6]))
    rb.extend(rows([0, 1]))
    assert rb.sampler.heard == [([-1, 0, -1, 1], [-1, first, -1, first + 1], 4), ([-1, -1], [-1, -1], 2)]
    assert rb.storage.tickets_of(torch.tensor([0, 1])).tolist() == [first, first + 1]


def test_survivors_of_a_write():
    assert Write(torch.tensor([0, -1, 2]), 5).survivors.tolist() == [0, -1, 2]
    assert Write(torch.tensor([0, -1, 2, 0, -1]), 5).survivors.tolist() == [-1, -1, 2, 0, -1]
    assert Write(torch.tensor([0, -1, 2, 0, -1]), 5).tickets.tolist() == [5, -1, 6, 7, -1]


@pytest.mark.parametrize("storage", STORAGES)
def test_the_writers_own_verbs(storage):
    rb = best(2, storage)
    writer = rb.writer
    assert writer.add(row(1)) == 0
    assert writer.extend(rows([3, 0.5, 2])).tolist() == [1, -1, 0]
    assert writer.add(row(1)) is None
    assert writer.write_count == 3


def test_with_a_write_transform():
    class Negated(torch.nn.Module):
        def forward(self, data):
            return data

        def inv(self, data):
            return data.set("score", -data["score"])

    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("score"), transform=Negated()
    )
    rb.extend(rows([1, 2]))
    assert rb.add(row(3)) is None
    assert rb.add(row(1.5)) == 1


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"]
)
def test_copies_go_their_own_way(storage, duplicate):
    rb = best(2, storage, [1, 2])
    rb.extend(rows([1.5]))
    twin = duplicate(rb)
    assert repr(twin.writer) == repr(rb.writer)
    assert twin.add(row(1.8)) == 0
    assert rb.add(row(1.7)) == 0
    assert scores(rb) == [1.7, 2]
    assert scores(twin) == [1.8, 2]


def test_state_dict():
    rb = best(2, ranks=[1, 2])
    rb.extend(rows([1.5]))
    state = rb.writer.state_dict()
    rb.writer.load_state_dict(state)
    assert rb.writer.state_dict() == state
    assert rb.add(row(1.2)) is None
    assert rb.add(row(1.6)) == 0
    with pytest.raises(KeyError, match="cursor"):
        rb.writer.load_state_dict({"cursor": 3})


@pytest.mark.parametrize("other", [{"rank_key": ["reward"]}, {"reduction": "max"}])
def test_a_state_of_rows_that_were_ranked_by_something_else(other):
    state = {"rank_key": ["score"], "reduction": "sum"}
    writer = TensorDictMaxValueWriter("score")
    assert writer.state_dict() == state
    writer.load_state_dict(state)
    with pytest.raises(IncompatibleCheckpoint, match="expected rows that are ranked by"):
        writer.load_state_dict({**state, **other})


def test_a_reopened_store_goes_on(tmp_path):
    folder = tmp_path / "store"
    writer = TensorDictMaxValueWriter(("deep", "score"), "min")
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(2, scratch_dir=folder), writer=writer)

    def data(*ranks):
        deep = TensorDict({"score": torch.tensor(ranks)}, [len(ranks)])
        return TensorDict({"deep": deep}, [len(ranks)])

    rb.extend(data([1.0, 9], [5, 2]))
    rb.extend(data([1.5, 3]))
    rb.close()
    rb = ReplayBuffer.open(folder)
    assert repr(rb.writer) == repr(writer)
    assert rb.extend(data([1.4, 9], [1.8, 1.7])).tolist() == [-1, 0]
    rb.close()


def test_a_list_without_a_bound_takes_everything():
    rb = ReplayBuffer(storage=ListStorage(), writer=TensorDictMaxValueWriter("score"))
    assert rb.extend(rows([3, 1, 2])).tolist() == [0, 1, 2]
    assert rb.add(row(0)) == 3


def test_rows_set_aside_are_filled_first():
    from engram import Extent

    rb = best(4, ranks=[1, 2, 3, 4])
    extent = Extent(4, (4,), (0,), torch.tensor([1, 3]))
    plan = rb.writer.place(extent, 1, 0, rows([0]))
    assert plan.rows.tolist() == [1]


@pytest.mark.parametrize(
    ("ranks", "free", "error"),
    [
        (np.zeros((2, 1)), np.zeros(0, np.int64), TypeError),
        (np.zeros(2), np.array([3]), IndexError),
        (np.zeros(2), np.array([-1]), IndexError),
        (np.zeros(2), np.array([0, 1, 2]), ValueError),
        (np.array([1.0, np.nan]), np.zeros(0, np.int64), ValueError),
    ],
)
def test_the_native_ranking_takes_only_what_it_can_hold(ranks, free, error):
    ranking = native.Ranking(3)
    with pytest.raises(error):
        ranking.place(ranks, free)
    assert [part.tolist() for part in ranking.place(np.zeros(1), np.array([2]))] == [[2], [0]]


def test_the_native_ranking_wants_one_rank_per_row():
    with pytest.raises(ValueError, match="one rank per row"):
        native.Ranking(3).set(np.array([0, 1]), np.zeros(1))


@pytest.mark.parametrize("method", ["place", "written"])
def test_a_subclass_that_overrides_a_method_is_asked_for_every_write(method):
    calls = []

    def own(self, *args):
        calls.append(method)
        return getattr(TensorDictMaxValueWriter, method)(self, *args)

    kind = type("Own", (TensorDictMaxValueWriter,), {method: own})
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=kind("score"))
    rb.extend(rows([1, 2]))
    rb.extend(rows([3]))
    before = len(calls)
    for rank in (4, 5, 0):
        rb.extend(rows([rank]))
    assert len(calls) - before >= 3
    assert scores(rb) == [5, 4]


def test_a_shared_folder_and_a_second_writer(tmp_path):
    storage = LazyMemmapStorage(3, scratch_dir=tmp_path / "rows")
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter("score"))
    rb.extend(rows([1, 2, 3]))
    assert rb.extend(rows([0, 4, 2])).tolist() == [-1, 0, -1]
    other = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter("score"))
    assert other.extend(rows([5, 1])).tolist() == [1, -1]
    assert other.extend(rows([6, 1])).tolist() == [2, -1]
    assert rb.extend(rows([4.5, 7])).tolist() == [-1, 0]  # 4.5 took the place of 4, then 7 that of 4.5
    rb.close()
    other.close()


def test_a_row_that_replaces_another_reaches_the_sampler():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2),
        writer=TensorDictMaxValueWriter("score"),
        sampler=PrioritizedSampler(2, 1.0, 1.0),
        batch_size=64,
    )
    rb.extend(rows([1, 2]))
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([0.0, 5.0]))
    rb.extend(rows([0]))
    assert rb.extend(rows([3])).tolist() == [0]  # a new row has the largest priority so far
    assert set(rb.sample()["score"].tolist()) == {2.0, 3.0}
