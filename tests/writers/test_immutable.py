"""ImmutableDatasetWriter: a buffer that only reads."""

import pytest
import torch

from engram import (
    ImmutableDatasetWriter,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)


@pytest.fixture
def rb():
    data = {"a": torch.arange(4), "b": {"c": torch.zeros(4, 2)}}
    return ReplayBuffer(storage=TensorStorage(data), writer=ImmutableDatasetWriter())


ROW = {"a": torch.tensor(9), "b": {"c": torch.ones(2)}}
ROWS = {"a": torch.full((4,), 9), "b": {"c": torch.ones(4, 2)}}
WRITES = {
    "add": lambda rb: rb.add(ROW),
    "extend": lambda rb: rb.extend(ROWS),
    "empty": lambda rb: rb.empty(),
    "rb[i] =": lambda rb: rb.__setitem__(0, ROW),
    "rb[:] =": lambda rb: rb.__setitem__(slice(None), ROWS),
    "rb[key] =": lambda rb: rb.__setitem__("a", ROWS["a"]),
    "set_at_": lambda rb: rb.set_at_("a", torch.tensor(9), 0),
    "set_": lambda rb: rb.set_("a", ROWS["a"]),
    "update_": lambda rb: rb.update_(ROWS),
    "write_all": lambda rb: rb.write_all(ROWS),
    "writer.add": lambda rb: rb.writer.add(ROW),
    "writer.extend": lambda rb: rb.writer.extend(ROWS),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_is_refused(rb, write):
    with pytest.raises(RuntimeError, match="read-only.*ImmutableDatasetWriter"):
        write(rb)
    assert len(rb) == 4
    assert rb["a"].tolist() == [0, 1, 2, 3]
    assert not rb["b", "c"].any()


def test_wrong_data_is_refused_for_the_same_reason(rb):
    with pytest.raises(RuntimeError, match="read-only"):
        rb.extend("nothing that could be stored")


def test_reading_works(rb):
    assert rb.sample(8)["a"].shape == (8,)
    assert rb[2]["a"] == 2
    assert rb.write_count == 0
    assert rb.writer.write_count == 0
    assert rb.writer.state_dict() == {}
    assert repr(rb.writer) == "ImmutableDatasetWriter()"


def test_another_writer_makes_it_writable(rb):
    previous = rb.set_writer(RoundRobinWriter())
    assert isinstance(previous, ImmutableDatasetWriter)
    assert rb.add(ROW) == 0
    assert rb[0]["a"] == 9


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_writer_given_as_a_class(buffer):
    rb = buffer(storage=ListStorage(4), writer=ImmutableDatasetWriter)
    with pytest.raises((RuntimeError, ValueError)):
        rb.add(torch.tensor(1))
    assert len(rb) == 0
