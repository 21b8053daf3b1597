"""Rows whose fields are keyword arguments, in lanes that were named once."""

import numpy as np
import pytest
import torch

from engram import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer, RowError, TensorDictReplayBuffer


def make(lanes=3, kind=ReplayBuffer, **options):
    return kind(storage=LazyTensorStorage(30, lanes=lanes), **options)


def test_it_writes_what_the_buffer_writes():
    one, other = make(), make()
    for lane in (2, 0):
        appender = one.appender(lane=lane)
        assert appender.lane == lane
        for k in range(4):
            row = {"obs": np.full(3, k, np.float32), "action": k, "next": {"done": k == 3}}
            assert appender.add(**row) == other.add(row, lane=lane)
        batch = {"obs": np.ones((5, 3), np.float32), "action": list(range(5)), "next": {"done": [True] * 5}}
        assert torch.equal(appender.extend(**batch), other.extend(batch, lane=lane))
    for field in ("obs", "action"):
        assert torch.equal(one[:][field], other[:][field])
    assert torch.equal(one[:]["next"]["done"], other[:]["next"]["done"])


@pytest.mark.parametrize("lane", ["each", [2, 0, 1], np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_rows_of_several_lanes(lane):
    rb = make()
    appender = rb.appender(lane=lane)
    if isinstance(lane, np.ndarray):
        lane[:] = 0  # the appender keeps what was named
    appender.extend(a=np.arange(3))
    rows = appender.extend(a=np.arange(10, 13))
    assert rows.tolist() == ([1, 11, 21] if isinstance(lane, str) else [21, 1, 11])
    assert rb[rows]["a"].tolist() == [10, 11, 12]


def test_without_a_lane():
    assert make(lanes=1).appender().add(a=1.0) == 0
    rb = make()
    with pytest.raises(RuntimeError, match=r"expected the lane of a row, .*rb\.appender\(lane=k\)"):
        rb.appender().add(a=1.0)
    assert rb.appender().extend(a=[1.0, 2.0, 3.0]).tolist() == [0, 10, 20]
    assert rb.on_lane(1).appender().add(a=1.0) == 11


@pytest.mark.parametrize("call", ["add", "extend"])
def test_rows_by_position_get_a_sentence(call):
    rb = make()
    with pytest.raises(
        TypeError, match=rf"appender\.{call}: expected fields by keyword, .*got a dict\. .*rb\.{call}\(row"
    ):
        getattr(rb.appender(lane=0), call)({"a": 1.0})
    assert not len(rb)


@pytest.mark.parametrize(("lane", "error"), [(3, RowError), (-1, RowError), ([0, 3], RowError), (0.5, TypeError)])
def test_lanes_that_are_not_there(lane, error):
    with pytest.raises(error, match="lane"):
        make().appender(lane=lane)


def test_other_fields_are_refused():
    rb = make()
    appender = rb.appender(lane=0)
    appender.add(a=1.0)
    with pytest.raises(KeyError, match="expected the fields of the first row"):
        appender.add(b=1.0)
    with pytest.raises(RuntimeError, match="field a"):
        appender.add(a=[1.0])
    assert len(rb) == 1


def test_samplers_hear_of_it():
    rb = make(sampler=PrioritizedSampler(30, 1.0, 1.0), batch_size=4)
    rb.appender(lane="each").extend(a=np.arange(3))
    rb.update_priority(torch.tensor([0, 10, 20]), torch.tensor([1.0, 1.0, 5.0]))
    assert set(rb.sample()["a"].tolist()) <= {0, 1, 2}


def test_other_buffers_and_storages():
    rb = make(kind=TensorDictReplayBuffer, batch_size=2)
    with pytest.raises(ValueError, match="expected a TensorDict, got dict"):
        rb.appender(lane=0).add(a=1.0)
    rb = ReplayBuffer(storage=ListStorage(3))
    rb.appender().add(text="abc")
    assert rb[0] == {"text": "abc"}


def test_a_closed_buffer():
    rb = make()
    appender = rb.appender(lane=0)
    appender.add(a=1.0)
    rb.close()
    with pytest.raises(RuntimeError, match="closed"):
        appender.add(a=1.0)
    with pytest.raises(RuntimeError, match="closed"):
        appender.extend(a=[1.0])
