"""The values components exchange, and the protocols they follow."""

import inspect
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Draw,
    Extent,
    ImmutableDatasetWriter,
    RandomSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    Write,
    WritePlan,
    Writer,
)
from tests.components import Backwards, Listener, Newest


@st.composite
def extents(draw):
    lanes = draw(st.integers(1, 4))
    length = draw(st.integers(1, 6))
    filled = tuple(draw(st.lists(st.integers(0, length), min_size=lanes, max_size=lanes)))
    inside = [k * length + i for k in range(lanes) for i in range(filled[k])]
    holes = draw(st.lists(st.sampled_from(inside), unique=True)) if inside else []
    seam = tuple(k * length + f % length for k, f in enumerate(filled))
    extent = Extent(lanes * length, filled, seam, torch.tensor(sorted(holes)) if holes else None)
    return extent, [row for row in inside if row not in holes]


@settings(max_examples=300, deadline=None, database=None)
@given(extents())
def test_ranks_are_the_live_rows_in_order(case):
    extent, live = case
    assert extent.size == len(live)
    assert extent.rows(torch.arange(extent.size)).tolist() == live
    backwards = torch.arange(extent.size).flip(0)
    assert extent.rows(backwards).tolist() == live[::-1]


@settings(max_examples=200, deadline=None, database=None)
@given(extents())
def test_it_contains_the_live_rows_and_nothing_else(case):
    extent, live = case
    rows = torch.arange(-2, extent.capacity + 3)
    assert rows[extent.contains(rows)].tolist() == live
    assert extent.contains(rows.flip(0).reshape(1, -1)).shape == (1, len(rows))


def test_rows_of_one_lane_are_the_ranks_themselves():
    ranks = torch.tensor([2, 0, 0])
    assert Extent(10, (3,), (3,)).rows(ranks) is ranks
    assert Extent(6, (3, 3), (0, 3)).rows(ranks) is ranks
    assert Extent(6, (2, 3), (2, 3)).rows(ranks).tolist() == [3, 0, 0]


def test_tickets_of_a_write():
    write = Write(torch.tensor([4, 0, 1]), 17)
    assert write.tickets.tolist() == [17, 18, 19]
    assert write.tickets.dtype is torch.int64


@pytest.mark.parametrize(
    "value", [Extent(3, (1,), (1,)), WritePlan(lane=0), Write(torch.zeros(1), 1), Draw(torch.zeros(1))], ids=repr
)
def test_values_are_frozen(value):
    with pytest.raises(AttributeError):
        setattr(value, value._fields[0], None)


def test_defaults():
    assert WritePlan() == (None, None, None)
    assert Draw(torch.zeros(1)).tickets is None
    assert dict(Draw(torch.zeros(1)).info) == {}
    assert Extent(3, (1,), (1,)).holes is None


def test_protocols_ask_for_nothing_more():
    for sampler in (RandomSampler(), Listener(), Newest()):
        assert isinstance(sampler, Sampler)
        assert not isinstance(sampler, Writer)
    for writer in (RoundRobinWriter(), ImmutableDatasetWriter(), Backwards()):
        assert isinstance(writer, Writer)
        assert not isinstance(writer, Sampler)
    public = {name for name, _ in inspect.getmembers(Sampler, inspect.isfunction) if not name.startswith("_")}
    assert public == {"draw", "observe", "update_priority", "state_dict", "load_state_dict"}
    public = {name for name, _ in inspect.getmembers(Writer, inspect.isfunction) if not name.startswith("_")}
    assert public == {"place"}


@pytest.mark.parametrize("missing", ["draw", "observe", "update_priority", "state_dict", "load_state_dict"])
def test_a_sampler_without_one_method_is_none(missing):
    methods = {name: lambda self: None for name in vars(Listener) if not name.startswith("_") and name != missing}
    assert not isinstance(type("Incomplete", (), methods)(), Sampler)


def test_annotations_that_name_tensordict_can_be_looked_up():
    assert typing.get_type_hints(ReplayBufferEnsemble.extend)["return"] is TensorDict
