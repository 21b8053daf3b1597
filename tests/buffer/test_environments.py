"""The lanes of environments that collectors number: each keeps its own, whatever the order, the handle or the process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import RowError

LANES = 3
LENGTH = 4


def buffer(storage=None):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(LANES * LENGTH, lanes=LANES) if storage is None else storage
    )


def write(rb, ids, **more):
    ids = torch.tensor(ids)
    return rb.extend(TensorDict({"x": ids, "collector": {"env_id": ids}}, list(ids.shape)), **more).tolist()


def lane_of(rb):
    """The environments whose rows each lane holds."""
    rows = rb.storage.extent().contains(torch.arange(LANES * LENGTH)).reshape(LANES, LENGTH)
    envs = rb.storage.store.tensors[1].reshape(LANES, LENGTH)
    return [{*envs[lane][rows[lane]].tolist()} for lane in range(LANES)]


def test_each_keeps_its_lane():
    rb = buffer()
    assert write(rb, [4, 5, 6]) == [0, 4, 8]
    assert write(rb, [5, 4, 6]) == [5, 1, 9]
    assert write(rb, [6, 6, 4]) == [10, 11, 2]
    assert write(rb, [[5, 5], [4, 4]]) == [6, 7, 3, 0]
    assert lane_of(rb) == [{4}, {5}, {6}]


@pytest.mark.parametrize("ids", [[0, 1, 2], [7, 8, 9], [0], [4, 5, 7], [0, 1, 5]])
@pytest.mark.parametrize("first", [[4, 5, 6], [3, 1, 0]])
def test_other_environments_are_refused(ids, first):
    rb = buffer()
    write(rb, first)
    before = lane_of(rb)
    with pytest.raises(
        RowError, match=r"'env_id'\) names the lanes: lane: expected lanes in \[0, 3\), of which the environments "
    ):
        write(rb, [i for i in ids if i not in first] or [8])
    assert lane_of(rb) == before
    assert len(rb) == 3
    write(rb, [0, 0, 0], lane="each")  # their lanes are named


@pytest.mark.parametrize("ids", [[7, 7, 7], [0, 0, 3], [7, 8], [0, 1, 2, 3], [-1]])
def test_numbers_that_are_no_lanes_are_refused(ids):
    rb = buffer()
    with pytest.raises(
        RowError, match=r"'env_id'\) names the lanes: lane: expected lanes in \[0, 3\), got .* Name them with lane="
    ):
        write(rb, ids)
    assert len(rb) == 0
    assert write(rb, [2, 0]) == [8, 0]


def test_those_that_are_numbered_as_the_lanes_come_in_any_order():
    rb = buffer()
    assert write(rb, [1]) == [4]
    assert write(rb, [2, 0, 1, 1]) == [8, 0, 5, 6]


def test_an_emptied_buffer_takes_others():
    rb = buffer()
    write(rb, [4, 5, 6])
    rb.empty()
    assert write(rb, [9, 8, 7]) == [0, 4, 8]
    assert write(rb, [7, 8, 9]) == [9, 5, 1]


def test_a_handle_goes_by_what_others_wrote(tmp_path):
    """The rows say which environment has a lane, also to another handle and in another run."""
    rb = buffer(LazyMemmapStorage(LANES * LENGTH, scratch_dir=tmp_path / "a", lanes=LANES))
    write(rb, [6, 4, 5])
    with ReplayBuffer.open(tmp_path / "a") as other:
        assert write(other, [4, 5, 6]) == [5, 9, 1]
        with pytest.raises(RowError, match="environments"):
            write(other, [0, 1, 2])
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "a")
    assert write(rb, [5]) == [10]
    rb.close()


def test_what_is_not_stored_is_remembered():
    rb = buffer()
    rb.append_transform(lambda rows: rows.exclude("collector"), invert=True)
    assert write(rb, [4, 5, 6]) == [0, 4, 8]
    assert write(rb, [6, 5, 4]) == [9, 5, 1]
    with pytest.raises(RowError, match="environments"):
        write(rb, [5, 6, 7])


def test_lanes_that_were_named_for_rows_of_one_number_say_nothing():
    rb = buffer()
    write(rb, [0, 0, 0], lane="each")
    assert write(rb, [2, 1, 0]) == [9, 5, 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_lane_holds_two_environments(data):
    """Two handles write batches of some environments, whatever their numbers; what is refused changes nothing."""
    first = buffer()
    handles = [first, TensorDictReplayBuffer(storage=first.storage)]
    model = {}
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        rows = len(first)
        try:
            index = write(data.draw(st.sampled_from(handles)), ids)
        except RowError:
            free = LANES - len({*model.values()})
            assert {*ids} - model.keys(), "known ones have their lanes"
            assert len({*ids} - model.keys()) != free or free == 0
            assert len(first) == rows
            continue
        for number, row in zip(ids, index, strict=True):
            assert model.setdefault(number, row // LENGTH) == row // LENGTH
        assert len({*model.values()}) == len(model)
