"""Walks over data of any form."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram._support import nested

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def data():
    return {
        "td": TensorDict({"a": torch.arange(2), "in": {"b": torch.ones(2)}}, batch_size=[2]),
        "pair": Pair(torch.zeros(1), [np.arange(3), "text"]),
        "empty": (),
    }


def test_leaves_change_and_containers_are_new(data):
    seen = []
    made = nested.map_leaves(data, lambda leaf: seen.append(leaf) or leaf)
    assert seen == [data["td"], data["pair"].left, data["pair"].right[0], "text"]
    assert type(made["pair"]) is Pair
    assert made["pair"] is not data["pair"]
    assert made["empty"] == ()
    assert made["td"] is data["td"]


def test_paths(data):
    paths = []
    nested.map_with_paths(data, lambda leaf, path: paths.append(path))
    assert paths == [("td",), ("pair", "0"), ("pair", "1", "0"), ("pair", "1", "1")]


def test_what_does_not_change_is_kept(data):
    data["ordered"] = OrderedDict(a=1)
    assert nested.map_with_paths(data, lambda leaf, _: leaf, keep=True) is data
    made = nested.map_with_paths(data, lambda leaf, _: 2 if isinstance(leaf, int) else leaf, keep=True)
    assert made["pair"] is data["pair"]
    assert made["ordered"] == OrderedDict(a=2)
    assert type(made["ordered"]) is OrderedDict
    assert data["ordered"] == OrderedDict(a=1)


def test_tensors_in_tensordicts_too(data):
    made = nested.map_tensors(data, lambda x: x + 1)
    assert made["td"]["in", "b"].tolist() == [2.0, 2.0]
    assert made["td"].batch_size == (2,)
    assert made["pair"].left.tolist() == [1.0]
    assert made["pair"].right[0] is data["pair"].right[0]
    assert nested.map_tensors(data, torch.clone, device=torch.device("cpu"))["td"].device == torch.device("cpu")
    assert [x.tolist() for x in nested.tensors(data)] == [[0, 1], [1.0, 1.0], [0.0]]


def test_first_leaf(data):
    assert nested.first_leaf(data) is data["td"]
    assert nested.first_leaf((("a", "b"),)) == "a"
    assert nested.first_leaf([1, 2]) == [1, 2]
    assert nested.first_leaf({}) is None
    assert nested.first_leaf(((), 1)) is None


def test_entries(data):
    assert nested.find(data, ("td", "in", "b")) is data["td"]["in", "b"]
    assert nested.find(data, ()) is data
    assert nested.find(data, ("td", "c")) is None
    assert nested.find(data, ("pair", "left")) is None
    assert nested.find_field(data, ("pair", "left")) is data["pair"].left
    assert nested.find_field(data, ("pair", "up")) is nested.find_field(data, ("pair", "right", "9")) is None
    assert nested.find_field(data, ("pair", "right", "0")) is data["pair"].right[0]
    assert nested.find_field(data, ("td", "in", "b")) is data["td"]["in", "b"]
    del data["pair"]
    assert [path for path, _ in nested.flatten(data)] == [("td", "a"), ("td", "in", "b"), ("empty",)]


def test_kinds():
    td = TensorDict({}, batch_size=[])
    assert [nested.has_dimensions(x) for x in (td, torch.zeros(1), np.zeros(1), np.float32(1), {}, 1.0)] == [
        True
    ] * 4 + [False] * 2
    assert [nested.has_entries(x) for x in (td, {}, (), torch.zeros(1))] == [True, True, False, False]
