"""Every index that reads or sets rows of a storage whose rows torch moves means what it means on the CPU."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils import _pytree

from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer, TensorDictRoundRobinWriter
from tests.store.test_device import OnDevice

INDEXES = {
    "an int": 1,
    "a negative int": -1,
    "NumPy's int": np.int64(2),
    "a slice": slice(1, 4),
    "every second": slice(0, 5, 2),
    "from the end": slice(-3, None),
    "all": slice(None),
    "no slice": slice(2, 2),
    "an ellipsis": ...,
    "a list": [0, 2],
    "a negative list": [-1, 0],
    "an empty list": [],
    "a range": range(1, 3),
    "an array": np.array([0, 3]),
    "a tensor": torch.tensor([3, 1]),
    "a negative tensor": torch.tensor([-1, -2]),
    "int32": torch.tensor([1], dtype=torch.int32),
    "a tensor of no dimension": torch.tensor(2),
    "a negative one": torch.tensor(-2),
    "an empty tensor": torch.zeros(0, dtype=torch.int64),
    "a grid": torch.tensor([[0, 1], [2, 3]]),
    "one row three times": torch.tensor([1, 1, 1]),
    "a mask": torch.tensor([True, False, True, False, False]),
    "a mask of nothing": torch.zeros(5, dtype=torch.bool),
    "a list of bools": [True, False, True, False, False],
    "a row too many": 9,
}
KINDS = {
    "TensorDicts": (TensorDictReplayBuffer, lambda rows: rows),
    "dicts": (ReplayBuffer, lambda rows: rows.to_dict()),
    "tensors": (ReplayBuffer, lambda rows: rows["a"]),
}


def made(storage, kind, lanes=1):
    buffer, dressed = KINDS[kind]
    writer = TensorDictRoundRobinWriter if buffer is TensorDictReplayBuffer else RoundRobinWriter
    rb = buffer(storage=storage(10, lanes=lanes), writer=writer(track_generations=True))
    numbers = torch.arange(5)
    nested = {"b": torch.arange(10.0).reshape(5, 2), "flag": numbers % 2 == 0}
    rb.extend(dressed(TensorDict({"a": numbers, "n": nested, "none": torch.zeros(5, 0)}, [5])), lane=0)
    return rb


def plain(found):
    """What can be compared: values and shapes."""
    if isinstance(found, TensorDict):
        return [(key, plain(value)) for key, value in sorted(found.items(True, True), key=str)], found.batch_size
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return (found.tolist(), found.shape) if isinstance(found, torch.Tensor) else found


def outcome(storage, kind, act):
    rb = made(storage, kind, lanes=2 if kind == "dicts" else 1)
    try:
        found = act(rb)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        found = type(error), str(error)
    return plain(found), plain(rb[:])


def changed(rows):
    return _pytree.tree_map(lambda x: x if x.dtype is torch.bool else x + 100, rows)


ACTS = {
    "read": lambda rb, index: rb[index],
    "read the storage": lambda rb, index: rb.storage[index],
    "get": lambda rb, index: rb.storage.get(index),
    "set": lambda rb, index: rb.__setitem__(index, changed(rb[index])),
    "set one row": lambda rb, index: rb.__setitem__(index, changed(rb[3])),
    "set what was gone": lambda rb, index: rb.storage.set(index, changed(rb[index])),
    "set an entry": lambda rb, index: rb.set_at_("a", torch.tensor(7), index) and None,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("index", INDEXES)
def test_an_index_means_what_it_means_on_the_cpu(index, act, kind):
    if act == "set an entry" and kind != "TensorDicts":
        pytest.skip("of TensorDicts alone")
    ours, theirs = (
        outcome(storage, kind, lambda rb: ACTS[act](rb, INDEXES[index])) for storage in (OnDevice, LazyTensorStorage)
    )
    assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_set(kind):
    rb = made(OnDevice, kind)
    rb[1] = changed(rb[4])
    rb[-1] = rb[0]
    found = rb[:] if kind == "tensors" else rb[:]["a"]
    assert found.tolist() == [0, 104, 2, 3, 0]


def test_numbers_are_set():
    rb = made(OnDevice, "dicts")
    rb[2] = {"a": 7, "n": {"b": [1.0, 2.0], "flag": True}, "none": torch.zeros(0)}
    assert rb["a"].tolist() == [0, 1, 7, 3, 4]
    assert rb[2]["n"]["b"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rows", [[0], [4, 0], [-1, 2], [], [3, 3]])
def test_fields_are_updated_where_the_rows_are_still_there(rows):
    found = []
    for storage in (OnDevice, LazyTensorStorage):
        rb = made(storage, "dicts")
        index, number = (
            torch.tensor(rows, dtype=torch.int64),
            rb.storage.tickets_of(torch.tensor(rows, dtype=torch.int64)),
        )
        rb[3] = rb[2]  # whose ticket is another one now
        patch = {"a": 50 + torch.arange(len(rows)), "n": {"b": torch.ones(len(rows), 2)}}
        found.append((plain(tuple(rb.update_if_present(index=index, generation=number, patch=patch))), plain(rb[:])))
    assert found[0][1] == found[1][1]
