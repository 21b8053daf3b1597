"""Lanes as adapters of frameworks read them: in the order of steps, by absolute positions, and one of them emptied.

The oracle is a list of steps for each lane, from which the oldest falls out when the lane is full.
"""

import random
from collections import namedtuple

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RowError,
    SliceSampler,
    TensorDictReplayBuffer,
)

LENGTH = 5
STORAGES = {
    "one lane": lambda tmp: LazyTensorStorage(LENGTH),
    "lanes": lambda tmp: LazyTensorStorage(3 * LENGTH, lanes=3),
    "directory": lambda tmp: LazyMemmapStorage(3 * LENGTH, scratch_dir=str(tmp / "rows"), lanes=3),
    "list": lambda tmp: ListStorage(LENGTH),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_lanes_are_read_and_emptied_as_lists_of_their_steps(tmp_path, storage):
    rb = ReplayBuffer(storage=STORAGES[storage](tmp_path), batch_size=2)
    chance, number = random.Random(storage), 0
    steps = [[] for _ in range(rb.lanes)]  # of each lane its positions and values, oldest first
    written = [0] * rb.lanes
    for _ in range(60):
        lane, n = chance.randrange(rb.lanes), chance.randint(1, LENGTH + 2)
        if chance.random() < 0.2:
            lanes = chance.sample(range(rb.lanes), chance.randint(1, rb.lanes))
            rb.empty(lane=lanes if len(lanes) > 1 else lanes[0])
            for one in lanes:
                steps[one] = []
        else:
            rb.extend(torch.arange(number, number + n), lane=lane)
            fresh = [(written[lane] + i, number + i) for i in range(n)]
            written[lane], number = written[lane] + n, number + n
            steps[lane] = [step for step in steps[lane] + fresh if step[0] >= written[lane] - LENGTH]
        expected = [[value for _, value in one] for one in steps]
        assert len(rb) == sum(map(len, expected))
        assert rb.write_count == number
        for one, values in enumerate(expected):
            if values:
                assert rb.read_all_in_order(lane=one).tolist() == values
                assert rb.read_all_in_order(2, lane=[one]).tolist() == values[:2]
        if len(rb):
            assert rb.read_all_in_order(lane="each").tolist() == sum(expected, [])
        if storage != "list":
            rows = torch.arange(rb.lanes * LENGTH).reshape(rb.lanes, LENGTH)
            found = {(k, p) for k, of in enumerate(rb.writer.positions_of(rows).tolist()) for p in of if p >= 0}
            assert found == {(k, p) for k, one in enumerate(steps) for p, _ in one}
            for k, one in enumerate(steps):
                for position, value in one:
                    assert rb[k * LENGTH + position % LENGTH] == value
    rb.close()


def test_an_empty_lane_reads_as_no_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    rb.extend(torch.arange(3), lane=1)
    assert rb.read_all_in_order(lane=0).tolist() == []
    rb.empty(lane=0)
    assert len(rb) == 3
    rb.empty(lane="each")
    assert len(rb) == 0


def test_all_steps_of_columns_are_read_in_time():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=2)
    rb.extend(torch.arange(16).reshape(2, 8))  # columns of six slots: the first two steps are gone
    assert rb.read_all_in_order(lane=0).tolist() == [x for t in range(2, 8) for x in (t, 8 + t)]
    assert rb.writer.positions_of(torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0], [5, 1]])).tolist() == [6, 6, 7, 2, 5]
    rb.empty(lane=0)
    assert len(rb) == 0


def test_positions_begin_again_after_empty_and_survive_a_restart(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(LENGTH, scratch_dir=str(tmp_path)))
    rb.extend(torch.arange(7))
    assert rb.writer.positions_of(range(LENGTH)).tolist() == [5, 6, 2, 3, 4]
    rb.close()
    with ReplayBuffer.open(tmp_path) as rb:
        assert rb.writer.positions_of(torch.tensor([[1], [2]])).tolist() == [[6], [2]]
        rb.empty()
        rb.extend(torch.arange(2))
        assert rb.writer.positions_of([0, 1, 2, -1, 99]).tolist() == [0, 1, -1, -1, -1]


def test_windows_do_not_reach_over_an_emptied_part():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, lanes=2), sampler=SliceSampler(slice_len=3, traj_key="episode"), batch_size=300
    )
    for first in (0, 8):
        for lane in range(2):
            steps = torch.arange(first, first + 8)
            rb.extend(TensorDict({"step": steps, "episode": torch.full((8,), lane)}, [8]), lane=lane)
        if first == 0:
            rb.empty(lane=1)
    batch = rb.sample().reshape(100, 3)
    assert (batch["step"].diff(dim=1) == 1).all()
    assert (batch["step"][batch["episode"][:, 0] == 1] >= 8).all()
    assert (batch["step"][batch["episode"][:, 0] == 0] < 8).any()


@pytest.mark.parametrize("call", ["empty", "read_all_in_order"])
@pytest.mark.parametrize(
    ("lane", "error", "words"),
    [(2, RowError, r"lane: expected an int in \[0, 2\)"), ("all", TypeError, "lane: expected an int, one int per row")],
)
def test_no_lane(call, lane, error, words):
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    rb.extend(torch.arange(8).reshape(8), lane=torch.arange(8) % 2)
    with pytest.raises(error, match=f"{call}: {words}"):
        getattr(rb, call)(lane=lane)
    assert len(rb) == 8


def test_a_list_has_no_positions():
    rb = ReplayBuffer(storage=ListStorage(4))
    rb.extend([torch.zeros(2)])
    with pytest.raises(TypeError, match="positions_of: expected a tensor storage of this machine, got ListStorage"):
        rb.writer.positions_of(0)


TimeStep = namedtuple("TimeStep", "reward observation")
Experience = namedtuple("Experience", "time_step action")


@pytest.mark.parametrize("form", ["named tuples", "tuples"])
def test_fields_within_named_tuples_are_read_and_set_by_key(form):
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    row = lambda i: Experience(TimeStep(torch.tensor(float(i)), torch.full((3,), i)), torch.tensor(i))  # noqa: E731
    plain = lambda i: (tuple(row(i)[0]), row(i)[1])  # noqa: E731
    rb.extend([row(i) if form == "named tuples" else plain(i) for i in range(4)])
    step, reward = ("time_step", "reward") if form == "named tuples" else ("0", "0")
    assert rb[step, reward].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert type(rb[step]) is (TimeStep if form == "named tuples" else tuple)
    rb[step, reward] = torch.full((4,), 7.0)
    assert rb[step, reward].tolist() == [7.0] * 4
    with pytest.raises(KeyError, match=r"expected one of .*, got 'none' in"):
        rb[step, "none"]
