"""What is known of a row, beside a model that keeps a list of all writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    SliceSampler,
)

LENGTH = 12


def model(writes, lane, row):
    """Of the step in a row of a lane: (steps since, steps before and behind it in its trajectory, begun, ended)."""
    ends = [end for to, end in writes if to == lane]
    first = max(0, len(ends) - LENGTH)
    step = max(i for i in range(first, len(ends)) if i % LENGTH == row % LENGTH)
    before, i = 0, step - 1
    while i >= first and not ends[i]:
        before, i = before + 1, i - 1
    begun = i >= first or first == 0
    behind, i = 0, step
    while not ends[i] and i + 1 < len(ends):
        behind, i = behind + 1, i + 1
    return len(ends) - 1 - step, before, behind, begun, ends[i]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([False, False, False, True])), min_size=1, max_size=60))
def test_every_row_beside_the_model(writes):
    rb = ReplayBuffer(storage=LazyTensorStorage(2 * LENGTH, lanes=2))
    for number, (lane, end) in enumerate(writes):
        rb.add({"number": number, "done": end}, lane=lane)
    for lane in range(2):
        for row in range(min(LENGTH, sum(to == lane for to, _ in writes))):
            found = rb.explain(lane * LENGTH + row)
            ago, before, after, begun, ended = model(writes, lane, row)
            assert (found.row, found.lane, found.steps_ago) == (lane * LENGTH + row, lane, ago)
            assert found.trajectory == (before, after, begun, ended)
            number = int(rb["number"][_rank(rb, found.row)])
            assert found.age == len(writes) - 1 - number


def _rank(rb, row):
    """The place of a row among the live ones."""
    return int((rb.storage.extent().rows(torch.arange(len(rb))) == row).nonzero())


def test_priority_probability_and_samples():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSampler(10, 0.5, 0.4, eps=0.0, dtype=torch.float64),
        batch_size=4,
    )
    rb.update_priority(rb.extend(torch.arange(4)), torch.tensor([1.0, 4.0, 9.0, 16.0]).double())
    assert rb.explain(2).times_sampled is None
    rb.count_usage()
    drawn = torch.cat([rb.sample(return_info=True)[1]["index"] for _ in range(5)])
    for row, priority in enumerate((1.0, 4.0, 9.0, 16.0)):
        found = rb.explain(row)
        assert found.priority == pytest.approx(priority)
        assert found.probability == pytest.approx(priority**0.5 / 10)
        assert found.times_sampled == int((drawn == row).sum())


def test_uniform_draws_and_others():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(4))
    found = rb.explain(-1)
    assert (found.row, found.probability, found.priority, found.trajectory) == (3, 0.25, None, None)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2))
    rb.extend({"a": torch.arange(4), "done": torch.zeros(4).bool()})
    assert rb.explain(0).probability is None


def test_columns_are_lanes_of_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    done = torch.zeros(2, 4, dtype=torch.bool)
    done[1, 1] = True
    rb.extend({"a": torch.arange(8).reshape(2, 4), "done": done})
    first, second = rb.explain((0, 3)), rb.explain((1, 3))
    assert (first.trajectory.before, first.trajectory.after, first.steps_ago) == (3, 0, 0)
    assert (second.trajectory.before, second.trajectory.begun) == (1, True)


def test_an_edited_row_keeps_its_ticket_and_its_step():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"a": torch.arange(4)})
    before = rb.explain(1)
    rb.set_at_("a", torch.tensor([7]), [1])
    after = rb.explain(1)
    assert after.ticket == before.ticket
    assert (after.age, after.steps_ago) == (before.age + 1, before.steps_ago)


def test_it_reads_as_a_sentence():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend({"done": torch.tensor([0, 1, 0, 0]).bool()})
    assert str(rb.explain(2)) == (
        "row 2: ticket 3, 1 write ago; lane 0, 1 step ago; step 0 of its trajectory, 1 behind it, not ended; drawn with "
        "probability 0.25; not counted how often sampled: rb.count_usage()"
    )


def test_what_is_no_row():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(4))
    for row in (4, 10, -5):
        with pytest.raises(RowError):
            rb.explain(row)
    with pytest.raises(TypeError, match=r"^explain: expected one row, got list"):
        rb.explain([1, 2])


def test_rows_of_a_list_and_of_a_reader(tmp_path):
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["a", "b"])
    assert rb.explain(0)[1:5] == (1, 1, 0, 1)
    with ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "store"), batch_size=8) as rb:
        rb.extend(torch.arange(4))
        rb.count_usage()
        rb.sample()
        with ReplayBuffer.open(tmp_path / "store", readonly=True) as reader:
            assert [reader.explain(row) for row in range(4)] == [rb.explain(row) for row in range(4)]
            assert sum(reader.explain(row).times_sampled for row in range(4)) == 8


def test_usage_is_refused_where_it_cannot_be(tmp_path):
    with pytest.raises(TypeError, match=r"^count_usage: expected a tensor storage, got a ListStorage"):
        ReplayBuffer(storage=ListStorage(10)).count_usage()
    with pytest.raises(RuntimeError, match=r"^count_usage: expected a store, but nothing was ever written"):
        ReplayBuffer(storage=LazyTensorStorage(10)).count_usage()
