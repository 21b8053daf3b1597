"""Batches of which a share is drawn from the newest rows."""

from collections import Counter

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, RandomSampler, ReplayBuffer, Sequence
from tests.statistics_of import assert_proportional


def expected_of(lanes, steps, share):
    """The chance of each row, by its value; a lane is a list of those that are live or, None, removed."""
    every = [x for lane in lanes for x in lane if x is not None]
    new = [x for lane in lanes for x in lane[-steps:]]  # for one that was removed there is one of all
    share *= 1 - new.count(None) / len(new)
    new = [x for x in new if x is not None]
    return {x: (1 - share) / len(every) + (x in new) * share / len(new) for x in every}


@pytest.mark.parametrize("size", [10, 7, 1])
@pytest.mark.parametrize("removed", [(), (57, 58, 105)])
def test_rows_come_in_these_shares(size, removed):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40, lanes=2), sampler=RandomSampler(recent_share=0.3, recent_steps=4), batch_size=size
    )
    rb.extend(torch.arange(29, 60), lane=0)  # a ring that has begun again
    rb.extend(torch.arange(100, 106), lane=1)
    values = rb[:].tolist()
    rb.remove([values.index(x) if x < 100 else 20 + x - 100 for x in removed])
    lanes = [[None if x in removed else x for x in lane] for lane in (range(40, 60), range(100, 106))]
    expected = expected_of(lanes, 4, 0.3)
    rb.set_rng(torch.Generator().manual_seed(1))
    seen = Counter(x for _ in range(40_000 // size if size > 1 else 6_000) for x in rb.sample().tolist())
    assert seen.keys() == expected.keys()
    assert_proportional([seen[x] for x in expected], expected.values())


def test_the_first_rows_of_a_batch_are_the_recent_ones():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=RandomSampler(recent_share=0.25, recent_steps=10), batch_size=32
    )
    rb.extend(torch.arange(1000))
    for _ in range(20):
        assert (rb.sample()[:8] >= 990).all()


def test_windows_around_recent_rows(tmp_path):
    """With a unit, and opened again: the share is noted with the store."""
    sampler = RandomSampler(recent_share=1.0, recent_steps=2)
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, scratch_dir=str(tmp_path)), sampler=sampler, batch_size=8)
    rb.extend({"step": torch.arange(30), "done": torch.zeros(30, dtype=torch.bool)})
    rb.close()
    with ReplayBuffer.open(tmp_path) as rb:
        assert repr(rb.sampler) == "RandomSampler(recent_share=1.0, recent_steps=2)"
        assert (rb.sample()["step"] >= 28).all()
        rb.extend({"step": torch.arange(30, 33), "done": torch.zeros(3, dtype=torch.bool)})
        assert (rb.sample()["step"] >= 31).all()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), sampler=sampler, sample_unit=Sequence(length=2, burn_in=3), batch_size=8
    )
    rb.extend({"step": torch.arange(30), "done": torch.zeros(30, dtype=torch.bool)})
    assert (rb.sample()["step"].reshape(8, 5)[:, 3] >= 28).all()


def test_a_list():
    rb = ReplayBuffer(storage=ListStorage(10), sampler=RandomSampler(recent_share=1.0, recent_steps=3), batch_size=16)
    rb.extend([torch.tensor(i) for i in range(14)])
    assert set(rb.sample().tolist()) <= {11, 12, 13}


def test_without_a_share_nothing_is_noted_or_drawn_otherwise():
    assert RandomSampler().config() == {}
    assert RandomSampler().traits.draws_uniformly
    assert not RandomSampler(recent_share=0.1, recent_steps=1).traits.draws_uniformly


@pytest.mark.parametrize(
    "arguments",
    [
        {"recent_share": 1.5, "recent_steps": 3},
        {"recent_share": -0.1, "recent_steps": 3},
        {"recent_share": 0.5},
        {"recent_steps": 3},
        {"recent_share": 0.5, "recent_steps": -1},
    ],
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="RandomSampler: recent_"):
        RandomSampler(**arguments)


def test_unknown_arguments_are_named():
    with pytest.raises(
        TypeError, match=r"replacement=True\): expected no .* but \['recent_share'.*got \['drop_last'\]"
    ):
        RandomSampler(drop_last=True, recent_share=0.5)


@pytest.mark.parametrize("more", [{"recent_share": 0.5, "recent_steps": 3}, {"recent_steps": 3}])
def test_epochs_have_no_share_of_recent_rows(more):
    with pytest.raises(
        TypeError, match=r"RandomSampler\(replacement=False\): expected no .* but \['drop_last'.*got \['recent_"
    ):
        RandomSampler(replacement=False, **more)
    with pytest.raises(TypeError, match="RandomSampler"):
        RandomSampler(True, replacement=False)
    assert RandomSampler(replacement=False, drop_last=True, shuffle=False, index="other").drop_last
