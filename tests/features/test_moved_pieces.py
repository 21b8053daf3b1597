"""Trajectories that take turns in a lane, on another number of ranks: their pieces keep one number, and no other gets it."""

from unittest import mock

import numpy as np
import pytest

from engram import Checkpointer, LazyTensorStorage
from engram.reshard import scatter
from tests.features.remembering import Fragments
from tests.features.rows import check_whole, whos_of
from tests.ranks.jobs import done, job

FRAGMENTED = Fragments("episode", 2)
OF_A_RANK = 6
KEEP = {"open": "keep", "headless": "keep"}
#: Lanes of each rank, and at least so many windows that lie in two pieces.
SHAPES = {"1": ((1,), 20), "1 of 3 lanes": ((3,), 20), "3": ((1, 1, 1), 8), "3 of some lanes": ((2, 1, 3), 8)}


def save(ranks, rank, root):
    """Both ranks number their trajectories alike; ``prompt`` tells them apart."""
    rb = FRAGMENTED.buffer(LazyTensorStorage(64), seed=rank)
    known = FRAGMENTED.play(rb, range(OF_A_RANK * rank, OF_A_RANK * (rank + 1)))
    rb.update_({"episode": rb[:]["episode"] % OF_A_RANK})
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).save(1)
    return known


def restore(ranks, rank, root, lanes):
    rb = FRAGMENTED.buffer(LazyTensorStorage(90, lanes=lanes[rank]))
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).restore(incomplete=KEEP)
    return rb


def moved(root, lanes):
    whos = set().union(*(known.whos for known in done(job(2, save, root))))
    every = done(job(len(lanes), restore, root, lanes))
    shares = [whos_of(rb) for rb in every]
    assert sum(map(len, shares)) == len(whos)
    assert set().union(*shares) == whos
    return every


def windows(rb):
    """The windows that should be drawn, and those of them that lie in two pieces of the saved lanes."""
    whos = whos_of(rb)
    every = {(who, who + 1) for who in whos if who + 1 in whos}
    return every, {(who, after) for who, after in every if who % 2}


def check(rb):
    check_whole(rb[:])
    every, _ = windows(rb)
    drawn = set()
    for _ in range(2000):
        drawn.update(map(tuple, rb.sample()["who"].reshape(-1, 2).tolist()))
        if drawn >= every:
            break
    assert drawn == every


def check_all(every):
    for rb in every:
        check(rb)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_windows_survive(shape, tmp_path):
    lanes, least = SHAPES[shape]
    every = moved(tmp_path, lanes)
    assert sum(len(windows(rb)[1]) for rb in every) >= least
    for rb in every:
        rows = rb[:]
        names = set(zip(rows["prompt"].tolist(), rows["episode"].tolist(), strict=True))
        assert len(names) == len({name for name, _ in names}) == len({number for _, number in names})
        check(rb)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_piece_by_itself_loses_windows(shape, tmp_path):
    """A negative control: numbers as they were given before."""
    alone = mock.patch.object(scatter.Numbering, "numbers", lambda self, tensors, first: np.arange(len(first)))
    with alone:
        every = moved(tmp_path, SHAPES[shape][0])
    with pytest.raises(AssertionError):
        check_all(every)


def old_numbers(numbering, tensors, first):
    """The numbers that the first steps have."""
    return numbering._marks(tensors, first).ids[:, 0]


def test_shards_that_share_a_number_would_mix(tmp_path):
    """A negative control: the old numbers, which both ranks gave."""
    with mock.patch.object(scatter.Numbering, "numbers", old_numbers):
        (rb,) = moved(tmp_path, (1,))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(rb)
