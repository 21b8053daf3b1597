"""The best rows of dicts."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictMaxValueWriter, TensorDictReplayBuffer

FORMS = {
    "tensors": torch.as_tensor,
    "float32": lambda ranks: torch.as_tensor(ranks, dtype=torch.float32),
    "integers": lambda ranks: torch.as_tensor(ranks).long(),
    "arrays": np.asarray,
    "column": lambda ranks: np.asarray(ranks, np.float32)[:, None],
    "strided": lambda ranks: np.repeat(np.asarray(ranks), 2)[::2],
    "numbers": lambda ranks: [float(rank) for rank in ranks],
}


def keeper(capacity, storage=LazyTensorStorage, key=("next", "reward"), **kwargs):
    return ReplayBuffer(storage=storage(capacity), writer=TensorDictMaxValueWriter(key, **kwargs))


def batch(ranks, form, first=0):
    return {"id": np.arange(first, first + len(ranks)), "next": {"reward": form(ranks)}}


def one_by_one(held, ranks, capacity):
    """What adding rows one after another to these ranks returns, by the definition."""
    index = []
    for rank in ranks:
        if len(held) < capacity:
            index.append(len(held))
            held.append(rank)
            continue
        worst = min(range(capacity), key=lambda row: (held[row], row))
        index.append(worst if rank > held[worst] else -1)
        held[worst] = max(held[worst], rank)
    last = {row: i for i, row in enumerate(index)}
    return [row if last[row] == i else -1 for i, row in enumerate(index)]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_best_of_nested_dicts_stay(form):
    rb, held, number = keeper(7), [], 0
    dice = np.random.default_rng(3)
    for _ in range(60):
        ranks = dice.integers(0, 50, dice.integers(1, 12)).astype(np.float64)
        before = len(held)
        expected = one_by_one(held, ranks.tolist(), 7)
        data = batch(ranks, form, number)
        assert rb.extend(data).tolist() == expected, before
        number += len(ranks)
        stored = rb[:]
        assert stored["next"]["reward"].reshape(-1).tolist() == held
        for i, row in enumerate(expected):
            if row >= 0:
                assert int(stored["id"][row]) == int(data["id"][i])


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("form", [float, np.float32, lambda x: np.array([x]), lambda x: torch.tensor(float(x))])
def test_rows_one_by_one_and_in_lists(storage, form):
    rb, held = keeper(3, storage, "score"), []
    for rank in (4, 1, 2, 3, 3, 9, 0):
        (expected,) = one_by_one(held, [rank], 3)
        assert rb.add({"score": form(rank)}) == (None if expected < 0 else expected)
    ranks = [5, 1, 7, 11]
    assert rb.extend([{"score": form(rank)} for rank in ranks]).tolist() == one_by_one(held, ranks, 3)
    assert [float(np.asarray(rb[i]["score"]).item()) for i in range(3)] == held


def test_python_floats_rank_as_they_are_stored():
    rb = keeper(1, key="score")
    rb.add({"score": 0.7})
    for _ in range(3):
        assert rb.add({"score": 0.7}) is None
        rb[0] = {"score": 0.7}  # the row is read again


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean", "median"])
def test_reductions_of_arrays_are_those_of_tensors(reduction):
    values = np.random.default_rng(1).normal(size=(40, 9)).astype(np.float32)
    dicts = keeper(5, key="score", reduction=reduction)
    writer = TensorDictMaxValueWriter("score", reduction)
    tensordicts = TensorDictReplayBuffer(storage=LazyTensorStorage(5), writer=writer)
    for part in np.split(values, 4):
        expected = tensordicts.extend(TensorDict({"score": torch.from_numpy(part)}, [len(part)]))
        assert dicts.extend({"score": part}).tolist() == expected.tolist()


def test_a_dict_around_tensordicts():
    rb = keeper(2)
    for ranks in ([1.0, 2.0], [3.0, 0.0]):
        rb.extend({"next": TensorDict({"reward": torch.tensor(ranks)}, [2])})
    assert rb[:]["next"]["reward"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("filled", [0, 1, 2])
@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (batch([1.0, float("nan")], np.asarray), ValueError, "'reward'.*NaN in row 1 of 2"),
        ({"id": np.arange(2), "next": {}}, KeyError, "'reward'"),
        ({"id": np.arange(2)}, KeyError, "'reward'|'next'|fields"),
        (batch([1.0, 2.0], lambda _: np.array(["a", "b"])), TypeError, "reward"),
        ((np.arange(2), np.ones(2)), (RuntimeError, TypeError), "dict"),
    ],
)
def test_what_is_refused_changes_nothing(filled, data, error, match):
    rb = keeper(2)
    for i in range(filled):
        rb.extend(batch([1.0], np.asarray, i))
    count = rb.write_count
    with pytest.raises(error, match=match):
        rb.extend(data)
    assert (len(rb), rb.write_count) == (filled, count)
    assert rb.storage.initialized == (filled > 0)
    assert not filled or rb[:]["next"]["reward"].tolist() == [1.0] * filled


def test_data_of_another_shape_names_the_field_in_a_full_storage():
    rb = keeper(2)
    rb.extend(batch([1.0, 2.0], np.asarray))
    rb.extend(batch([0.0], np.asarray))
    stored = rb[:]["next"]["reward"].tolist()
    with pytest.raises(RuntimeError, match="reward"):
        rb.extend({"id": np.arange(2), "next": {"reward": np.ones((2, 3))}})
    with pytest.raises(RuntimeError, match="field id"):
        rb.extend({"id": np.ones(2), "next": {"reward": np.array([5.0, 6.0])}})
    assert rb[:]["next"]["reward"].tolist() == stored
    assert rb.extend(batch([1.5], np.asarray)).tolist() == [0]
