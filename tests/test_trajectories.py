"""Where trajectories begin and end in tensors."""

import pytest
import torch

from engram import DEFAULT_DONE_KEYS, find_start_stop_traj


def found(**arguments):
    return [result.tolist() for result in find_start_stop_traj(**arguments)]


def test_default_keys():
    assert DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")


def test_one_column():
    end = torch.tensor([False, True, False, False, True, False])
    assert found(end=end, at_capacity=False) == [[[0], [2], [5]], [[1], [4], [5]], [2, 3, 1]]
    assert found(end=end, at_capacity=True) == [[[5], [2]], [[1], [4]], [3, 3]]
    assert found(end=end, at_capacity=True, cursor=2) == [[[5], [2], [3]], [[1], [2], [4]], [3, 1, 2]]
    assert found(end=end, at_capacity=False, cursor=2) == found(end=end, at_capacity=False)
    assert not end[2]  # the caller's
    assert not end[5]


def test_ids():
    ids = torch.tensor([7, 7, 8, 8, 9, 7])
    assert found(trajectory=ids, at_capacity=False) == [[[0], [2], [4], [5]], [[1], [3], [4], [5]], [2, 2, 1, 1]]
    assert found(trajectory=ids, at_capacity=True) == [[[5], [2], [4]], [[1], [3], [4]], [3, 2, 1]]
    assert found(trajectory=ids, at_capacity=True, cursor=5) == found(trajectory=ids, at_capacity=False)


def test_columns():
    end = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 1]])
    start, stop, lengths = find_start_stop_traj(end=end, at_capacity=True)
    assert start.tolist() == [[2, 0], [0, 1], [0, 2], [1, 2]]
    assert stop.tolist() == [[1, 0], [3, 1], [0, 2], [3, 2]]
    assert lengths.tolist() == [4, 4, 1, 3]
    start, stop, lengths = find_start_stop_traj(end=end.reshape(4, 1, 3), at_capacity=False)
    assert start.shape == stop.shape == (5, 3)
    assert stop.tolist() == [[1, 0, 0], [3, 0, 0], [3, 0, 1], [0, 0, 2], [3, 0, 2]]
    assert lengths.tolist() == [2, 2, 4, 1, 3]


@pytest.mark.parametrize("cursor", [2, -4, torch.tensor(2), torch.tensor([0, 1, 2]), range(3), slice(0, 3), [1, 2]])
def test_forms_of_the_cursor(cursor):
    end = torch.zeros(6, dtype=torch.bool)
    assert found(end=end, at_capacity=True, cursor=cursor) == [[[3]], [[2]], [6]]


def test_a_ring_in_which_nothing_ends():
    for arguments in ({"end": torch.zeros(4)}, {"trajectory": torch.ones(4)}):
        assert found(**arguments, at_capacity=True) == [[[0]], [[3]], [4]]
        assert found(**arguments, at_capacity=False) == [[[0]], [[3]], [4]]
    assert found(end=torch.ones(1), at_capacity=True) == [[[0]], [[0]], [1]]


@pytest.mark.parametrize("at_capacity", [False, True])
def test_against_a_walk(at_capacity):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        steps = int(torch.randint(1, 12, (), generator=generator))
        end = torch.rand(steps, 2, generator=generator) < 0.3
        cursor = int(torch.randint(steps, (), generator=generator))
        start, stop, lengths = find_start_stop_traj(end=end, at_capacity=at_capacity, cursor=cursor)
        for column in range(2):
            seen = {}
            mine = start[:, 1] == column
            for a, b, n in zip(start[mine, 0].tolist(), stop[mine, 0].tolist(), lengths[mine].tolist(), strict=True):
                walk = [(a + i) % steps for i in range(n)]
                assert walk[-1] == b
                assert not end[walk[:-1], column].any()
                seen.update(dict.fromkeys(walk, a))
            assert sorted(seen) == list(range(steps))
            last = cursor if at_capacity else steps - 1
            assert last in stop[mine, 0].tolist()
        assert lengths.sum() == 2 * steps


def test_device():
    results = find_start_stop_traj(end=torch.ones(2), at_capacity=False, device="meta")
    assert {result.device.type for result in results} == {"meta"}


def test_mistakes():
    flag = torch.ones(3)
    for arguments in ({}, {"end": flag, "trajectory": flag}):
        with pytest.raises(TypeError, match="expected one of trajectory and end"):
            find_start_stop_traj(**arguments, at_capacity=True)
    for empty in (torch.ones(0), torch.ones(()), torch.ones(3, 0)):
        with pytest.raises(RuntimeError, match="expected steps, "):
            find_start_stop_traj(end=empty, at_capacity=True)
    for cursor in (torch.tensor([], dtype=torch.int64), [], range(0), slice(0, 0)):
        with pytest.raises(RuntimeError, match="cursor: expected the slots written last, got none"):
            find_start_stop_traj(end=flag, at_capacity=True, cursor=cursor)
    for cursor in (3, -4):
        with pytest.raises(ValueError, match="cursor: expected a slot"):
            find_start_stop_traj(end=flag, at_capacity=True, cursor=cursor)
