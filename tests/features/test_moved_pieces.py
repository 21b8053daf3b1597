"""Trajectories that take turns in a lane, on another number of ranks: each piece goes by itself."""

from engram import Checkpointer, LazyTensorStorage
from tests.features.rows import whos_of
from tests.features.table import FEATURES
from tests.ranks.jobs import done, job

FRAGMENTED = FEATURES["fragmented"]


def save(ranks, rank, root):
    rb = FRAGMENTED.buffer(LazyTensorStorage(64), seed=rank)
    known = FRAGMENTED.play(rb, [3 * rank + number for number in range(3)])
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).save(1)
    return known


def restore(ranks, rank, root):
    rb = FRAGMENTED.buffer(LazyTensorStorage(128))
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).restore(incomplete={"open": "keep", "headless": "keep"})
    return rb


def test_each_piece_gets_a_number_of_its_own(tmp_path):
    """In a field that is known as one of numbers of trajectories; other fields keep what joins the pieces."""
    whos = set().union(*(known.whos for known in done(job(2, save, tmp_path))))
    (rb,) = done(job(1, restore, tmp_path))
    assert whos_of(rb) == whos
    rows = rb[:]
    pieces = rows["episode"].tolist()
    joined = [one == other for one, other in zip(pieces[1:], pieces[:-1], strict=True)]
    assert sum(joined) < len(whos) / 4
    assert set(zip(rows["prompt"].tolist(), rows["step"].tolist(), strict=True)) == {divmod(who, 100) for who in whos}
    for number in range(6):
        of_one = rows["episode"][rows["prompt"] == number].tolist()
        assert len(set(of_one)) > 1
