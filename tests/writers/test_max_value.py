"""TensorDictMaxValueWriter: which rows stay, what is reported, and that the ranks follow from what is stored."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from engram import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.writers.best import STORAGES, best, row, rows, scores

INF = float("inf")


class Model:
    """The best rows in a list, one at a time."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.slots = []
        self.accepted = 0

    def add(self, rank, number):
        if len(self.slots) < self.capacity:
            self.slots.append((rank, number))
            slot = len(self.slots) - 1
        else:
            slot = min(range(self.capacity), key=lambda i: (self.slots[i][0], i))
            if not rank > self.slots[slot][0]:
                return None
            self.slots[slot] = (rank, number)
        self.accepted += 1
        return slot

    def extend(self, ranks, numbers):
        placed = [self.add(rank, number) for rank, number in zip(ranks, numbers, strict=True)]
        last = {slot: i for i, slot in enumerate(placed)}
        return [-1 if slot is None or last[slot] != i else slot for i, slot in enumerate(placed)]


# ---- which rows stay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
class TestKeepingTheBest:
    def test_rows_go_where_there_is_room(self, storage):
        rb = best(4, storage)
        assert rb.add(row(1)) == 0
        assert rb.extend(rows([5, 3])).tolist() == [1, 2]
        assert rb.add(row(-7)) == 3
        assert scores(rb) == [1, 5, 3, -7]

    def test_a_better_row_takes_the_place_of_the_worst(self, storage):
        rb = best(3, storage, [5, 1, 3])
        assert rb.add(row(4)) == 1
        assert rb.extend(rows([3.5])).tolist() == [2]
        assert scores(rb) == [5, 4, 3.5]

    def test_a_row_that_is_not_better_is_rejected(self, storage):
        rb = best(2, storage, [5, 3])
        assert rb.add(row(3)) is None
        assert rb.add(row(2)) is None
        assert rb.extend(rows([1, 3])).tolist() == [-1, -1]
        assert scores(rb) == [5, 3]

    def test_of_several_worst_rows_the_lowest_goes(self, storage):
        rb = best(4, storage, [9, 1, 1, 1])
        rb[1] = row(1)  # the newest of them now
        assert [rb.add(row(2)) for _ in range(3)] == [1, 2, 3]

    def test_a_batch_may_be_larger_than_the_buffer(self, storage):
        rb = best(2, storage)
        assert rb.extend(rows([1, 2, 3, 0, 2.5])).tolist() == [-1, -1, 0, -1, 1]
        assert scores(rb) == [3, 2.5]

    def test_a_replaced_row_reports_minus_one_and_is_counted(self, storage):
        rb = best(2, storage, [10, 20])
        assert rb.extend(rows([11, 12, 5])).tolist() == [-1, 0, -1]
        assert rb.write_count == 4
        assert rb.writer.write_count == 4

    def test_the_count_is_of_accepted_rows(self, storage):
        rb = best(2, storage, [10, 20])
        rb.extend(rows([1, 2, 3]))
        rb.add(row(1))
        assert rb.write_count == 2

    def test_infinities_rank(self, storage):
        rb = best(2, storage, [-INF, 0])
        assert rb.add(row(-INF)) is None
        assert rb.extend(rows([INF, INF])).tolist() == [0, 1]
        assert rb.add(row(INF)) is None
        assert scores(rb) == [INF, INF]


def test_ranks_are_kept_in_float64():
    rb = best(1, ranks=[1.0])
    assert rb.add(row(1.0 + 2**-50)) == 0
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter("a"))
    two = torch.tensor([[2.0**24, 0.0]])
    rb.extend(TensorDict({"a": two}, [1]))
    assert rb.extend(TensorDict({"a": two + torch.tensor([0.0, 1.0])}, [1])).tolist() == [0]  # equal sums in float32


ranks_of_batches = st.lists(
    st.lists(st.sampled_from([-INF, -2.0, -0.0, 0.0, 1.0, 1.5, 2.0, 3.0, INF]), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("storage", STORAGES)
@given(capacity=st.integers(1, 7), batches=ranks_of_batches, singly=st.booleans())
@settings(max_examples=150)
def test_extend_is_adding_row_after_row(storage, capacity, batches, singly):
    """Against a list: slots, reports, content and count."""
    rb, model, number = best(capacity, storage), Model(capacity), 0
    for ranks in batches:
        data = rows(ranks)
        data["id"] += number
        if singly:
            found = [rb.add(one) for one in data.unbind(0)]
            assert found == [model.add(*pair) for pair in zip(ranks, data["id"].tolist(), strict=True)]
        else:
            assert rb.extend(data).tolist() == model.extend(ranks, data["id"].tolist())
        number += len(ranks)
        assert [(float(x["score"]), int(x["id"])) for x in rb.storage] == model.slots
        assert rb.write_count == model.accepted


@given(seed=st.integers(0, 2**32), values=st.sampled_from([3, 30, 10**6]))
@settings(max_examples=30)
def test_many_rows(seed, values):
    rng = np.random.default_rng(seed)
    rb, model = best(200), Model(200)
    for n in rng.integers(1, 500, 12):
        ranks = rng.integers(0, values, n).astype(float)
        assert rb.extend(rows(ranks)).tolist() == model.extend(ranks.tolist(), range(n))
    assert scores(rb) == [rank for rank, _ in model.slots]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "edit", "field", "empty", "ring", "other", "write_at", "copy", "only place"]),
        st.lists(st.integers(-3, 3), min_size=1, max_size=6),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize("storage", STORAGES)
@given(steps=STEPS)
@settings(max_examples=150)
def test_whatever_else_is_written_the_best_stay(storage, steps):
    """Edits, emptying, other writers and buffers between the writes: each write is right for what is stored then."""
    rb = best(5, storage)
    ring = ReplayBuffer(storage=rb.storage, writer=RoundRobinWriter())
    other = TensorDictReplayBuffer(storage=rb.storage, writer=TensorDictMaxValueWriter("score"))
    for step, ranks in steps:
        where = [abs(rank) for rank in ranks if abs(rank) < len(rb)]
        values = rows([float(rank) for rank in ranks])
        if step == "edit" and where:
            rb[where] = values[: len(where)]
        elif step == "field" and where and storage is LazyTensorStorage:
            rb.set_at_("score", values["score"][: len(where)], where)
        elif step == "empty":
            rb.empty()
        elif step == "ring":
            ring.extend(values)
        elif step == "write_at" and where:
            ring.writer.write_at(where, values[: len(where)])
        elif step == "only place":
            rb.writer.place(rb.storage.extent(), len(values), 0, values)
        elif step == "copy":
            rb = pickle.loads(pickle.dumps(rb))
            ring = ReplayBuffer(storage=rb.storage, writer=RoundRobinWriter())
            other = TensorDictReplayBuffer(storage=rb.storage, writer=TensorDictMaxValueWriter("score"))
        elif step in ("extend", "other"):
            model = Model(5)
            model.slots = [(rank, 0) for rank in scores(rb)]
            expected = model.extend([float(rank) for rank in ranks], range(len(ranks)))
            assert (rb if step == "extend" else other).extend(values).tolist() == expected
            assert scores(rb) == [rank for rank, _ in model.slots]


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_read_again_only_after_others_wrote(storage, monkeypatch):
    rb = best(4, storage, [1, 2])
    looked, field = [], rb.storage.field

    def noted(key, rows, expected):
        looked.append(rows.tolist())
        return field(key, rows, expected)

    monkeypatch.setattr(rb.storage, "field", noted)
    assert rb.extend(rows([3, 4, 1.5, 0])).tolist() == [2, 3, 0, -1]  # fills it, and goes on
    assert looked == [[0, 1]]
    assert rb.extend(rows([2.5, 0, 1.6])).tolist() == [0, -1, -1]
    assert rb.add(row(8)) == 1
    assert looked == [[0, 1]]
    rb[3] = row(0)
    assert rb.add(row(0.5)) == 3
    assert looked == [[0, 1], [3]]


# ---- parameters --------------------------------------------------------------------------------------------------------


def test_the_default_key_is_the_next_reward():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter)
    assert rb.writer.rank_key == ("next", "reward")

    def step(reward, here):
        nested = TensorDict({"reward": torch.tensor([[reward]])}, [1])
        return TensorDict({"next": nested, "reward": torch.tensor([[here]])}, [1])

    rb.extend(step(1.0, 5.0))
    assert rb.extend(step(0.0, 9.0)).tolist() == [-1]
    assert rb.extend(step(2.0, 0.0)).tolist() == [0]


@pytest.mark.parametrize("key", ["a", ("a",), ("deep", "er"), ["deep", "er"]])
def test_rank_key(key):
    def one(a, er):
        return TensorDict({"a": torch.tensor(a), "deep": TensorDict({"er": torch.tensor(er)})})

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter(key))
    rb.add(one(1, 1))
    by_a = key in ("a", ("a",))
    assert rb.add(one(2, 0)) == (0 if by_a else None)
    rb.empty()
    rb.add(one(1, 1))
    assert rb.add(one(0, 2)) == (None if by_a else 0)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("reduction", "order"),
    [("sum", [2, 0, 1]), ("max", [2, 1, 0]), ("min", [1, 0, 2]), ("mean", [2, 0, 1]), ("median", [0, 2, 1])],
)
def test_reduction(storage, reduction, order):
    values = torch.tensor([[0.0, 0, 5, 0], [2, 2, 2, -1], [1, 1, 1, 1.5]])
    data = TensorDict({"a": values.reshape(3, 2, 2), "id": torch.arange(3)}, [3])
    rb = TensorDictReplayBuffer(storage=storage(3), writer=TensorDictMaxValueWriter("a", reduction))
    rb.extend(data)
    high = TensorDict({"a": torch.full((3, 2, 2), 100.0), "id": torch.arange(3)}, [3])
    assert rb.extend(high).tolist() == order, reduction
    assert rb.writer.reduction == reduction


def test_sum_and_mean_rank_rows_of_different_lengths_differently():
    def episode(*rewards):
        return TensorDict({"a": torch.tensor(rewards)}, [len(rewards)])

    for reduction, expected in (("sum", 0), ("mean", None)):
        rb = ReplayBuffer(
            storage=ListStorage(1), writer=TensorDictMaxValueWriter("a", reduction), collate_fn=lambda x: x
        )
        rb.add(episode(2.0, 2.0))
        assert rb.add(episode(1.0, 1.0, 1.0, 1.5, 1.5)) == expected


def test_the_median_of_an_even_count_is_the_lower_one():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter("a", "median"))
    rb.add(TensorDict({"a": torch.tensor([1.0, 2.0])}))
    assert rb.add(TensorDict({"a": torch.tensor([1.0, 9.0])})) is None


@pytest.mark.parametrize("reduction", ["prod", "", None])
def test_an_unknown_reduction(reduction):
    with pytest.raises(NotImplementedError, match="reduction: expected one of .*'median'"):
        TensorDictMaxValueWriter(reduction=reduction)


@pytest.mark.parametrize("key", [3.5, (), ("a", 1.5)])
def test_a_key_of_another_kind(key):
    with pytest.raises(TypeError, match="rank_key: expected a string"):
        TensorDictMaxValueWriter(key)


def test_arguments_of_later():
    for compilable in (False, True):
        assert isinstance(TensorDictMaxValueWriter(compilable=compilable), TensorDictMaxValueWriter)
    with pytest.raises(TypeError, match="compilable"):
        TensorDictMaxValueWriter(compilable="no")
    with pytest.raises(TypeError, match="unexpected argument 'speed'"):
        TensorDictMaxValueWriter(speed=1)


def test_repr_and_config():
    assert repr(TensorDictMaxValueWriter("a", "max")) == "TensorDictMaxValueWriter(rank_key='a', reduction='max')"
    assert TensorDictMaxValueWriter().config() == {"rank_key": ("next", "reward"), "reduction": "sum"}


# ---- what is refused ---------------------------------------------------------------------------------------------------


def unchanged(rb, before):
    assert scores(rb) == before
    assert rb.write_count == len(before)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("filled", [0, 2, 3])
class TestRefused:
    def start(self, storage, filled):
        rb = best(3, storage, [1.0, 2.0, 3.0][:filled])
        return rb, [1.0, 2.0, 3.0][:filled]

    def test_nan(self, storage, filled):
        rb, before = self.start(storage, filled)
        for write in (
            lambda: rb.extend(rows([5, float("nan"), 6])),
            lambda: rb.add(row(float("nan"))),
            lambda: rb.writer.extend(rows([float("nan")])),
            lambda: rb.writer.add(row(float("nan"))),
            lambda: rb.writer.get_insert_index(row(float("nan"))),
        ):
            with pytest.raises(ValueError, match="'score': expected ranks that are numbers, got NaN"):
                write()
            unchanged(rb, before)
        assert rb.storage.initialized == (filled > 0 or storage is ListStorage)

    def test_no_rank_key(self, storage, filled):
        rb, before = self.start(storage, filled)
        data = rows([5]).exclude("score")
        for write in (lambda: rb.extend(data), lambda: rb.add(data[0]), lambda: rb.writer.extend(data)):
            with pytest.raises(KeyError):
                write()
            unchanged(rb, before)

    def test_no_rank_key_is_each_error_that_programs_expect(self, storage, filled):
        rb, before = self.start(storage, 0)
        data = rows([5]).exclude("score")
        for write in (lambda: rb.extend(data), lambda: rb.add(data[0]), lambda: rb.writer.get_insert_index(data[0])):
            for kind in (KeyError, RuntimeError):
                with pytest.raises(kind, match="^TensorDictMaxValueWriter: expected the rank key 'score', got "):
                    write()
            unchanged(rb, before)

    def test_no_tensordict(self, storage, filled):
        rb, before = self.start(storage, filled)
        rb = ReplayBuffer(storage=rb.storage, writer=TensorDictMaxValueWriter("score"))
        for write in (lambda: rb.writer.extend((torch.ones(2),)), lambda: rb.writer.get_insert_index(torch.ones(2))):
            with pytest.raises((RuntimeError, TypeError)):
                write()
            unchanged(rb, before)

    def test_other_fields(self, storage, filled):
        rb, before = self.start(storage, filled)
        if filled and storage is LazyTensorStorage:
            with pytest.raises(KeyError, match="extra"):
                rb.extend(rows([7, 8]).set("extra", torch.ones(2)))
            unchanged(rb, before)
            rb.extend(rows([7, 8]))
            assert sorted(scores(rb))[-2:] == [7, 8]


@tensorclass
class Scored:
    score: torch.Tensor


@pytest.mark.parametrize("data", [(torch.ones(2),), torch.ones(2), Scored(torch.ones(2), batch_size=[2])])
def test_data_that_is_no_tensordict(data):
    rb = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("score"))
    with pytest.raises(
        RuntimeError,
        match="TensorDictMaxValueWriter expects data to be a tensor collection: a TensorDict or a dict, got",
    ):
        rb.extend(data)
    assert not rb.storage.initialized


def test_a_sum_that_is_no_number():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("a"))
    with pytest.raises(ValueError, match="NaN in row 1 of 2"):
        rb.extend(TensorDict({"a": torch.tensor([[0.0, 0.0], [INF, -INF]])}, [2]))
    assert not rb.storage.initialized


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.ones(2, 0), ValueError),
        (torch.ones(2, dtype=torch.complex64), TypeError),
        (TensorDict({}, [2]), TypeError),
    ],
)
def test_ranks_of_another_kind(value, error):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("a"))
    with pytest.raises(error, match="'a': expected"):
        rb.extend(TensorDict({"a": value, "b": torch.ones(2)}, [2]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"ndim": 2}, "expected a storage with ndim=1"), ({"lanes": 2}, "expected a storage with 1 lane")],
)
def test_storages_of_more_than_one_dimension_or_lane(kwargs, message):
    def storage():
        return LazyTensorStorage(4, **kwargs)

    with pytest.raises(ValueError, match=message):
        ReplayBuffer(storage=storage(), writer=TensorDictMaxValueWriter())
    rb = ReplayBuffer(storage=storage())
    previous = rb.writer
    with pytest.raises(ValueError, match=message):
        rb.set_writer(TensorDictMaxValueWriter())
    assert rb.writer is previous
    rb = best(4, ranks=[1, 2])
    previous = rb.storage
    with pytest.raises(ValueError, match=message):
        rb.set_storage(storage())
    assert rb.storage is previous
    assert rb.add(row(5)) == 2


def test_a_rank_key_that_is_not_stored():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter("td_error"))
    ReplayBuffer(storage=rb.storage).extend(TensorDict({"a": torch.ones(1)}, [1]))
    with pytest.raises(KeyError, match="stored field"):
        rb.extend(TensorDict({"a": torch.ones(1), "td_error": torch.ones(1)}, [1]))
    rb = best(1, ListStorage)
    ReplayBuffer(storage=rb.storage).extend(["no TensorDict"])
    with pytest.raises(KeyError, match="row 0"):
        rb.add(row(1))
