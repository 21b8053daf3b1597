"""A replay that belongs to a model: by name, else the newest that is not of a later step, and it is said what happened."""

import shutil
import warnings

import pytest
import torch

from engram import Checkpointer, CorruptCheckpoint, LazyTensorStorage, ReplayBuffer
from tests.ranks.jobs import buffer, checkpointer, done, job, play


@pytest.fixture
def root(tmp_path):
    """Of step n it holds n rows."""
    ck = Checkpointer(tmp_path, rb := made(), keep=10)
    for step in (2, 4, 6):
        rb.extend(torch.arange(2))
        ck.save(step)
    return tmp_path


def made():
    return ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)


def entry(root, step):
    return next(it for it in Checkpointer(root, made()).list() if it.step == step)


def restore(root, **which):
    """The step that is loaded, and what is warned of."""
    rb = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = Checkpointer(root, rb).restore(resume="exact", **which)
    assert len(rb) == report.step
    return report.step, [str(one.message) for one in caught]


def test_that_of_the_name_without_a_word(root):
    assert restore(root, name=entry(root, 4).name, at_most=5) == (4, [])
    assert restore(root, name=entry(root, 6).name, at_most=5) == (6, []), "whatever its step"


@pytest.mark.parametrize(("at_most", "step"), [(6, 6), (5, 4), (4, 4), (2, 2), (100, 6)])
def test_the_newest_up_to_a_step(root, at_most, step):
    assert restore(root, at_most=at_most) == (step, [])


def test_a_name_that_was_removed(root):
    name = entry(root, 4).name
    shutil.rmtree(entry(root, 4).path)
    step, said = restore(root, name=name, at_most=5)
    assert step == 2
    why = f"restore: {entry(root, 2).name} is loaded, as: {root}: expected a checkpoint called {name!r}, found none."
    assert said == [why]
    with pytest.raises(FileNotFoundError, match="expected a checkpoint called"):
        restore(root, name=name)


def test_a_name_that_is_damaged(root):
    four = entry(root, 4)
    shutil.rmtree(next(four.path.glob("rank-*")))
    step, said = restore(root, name=four.name, at_most=4)
    assert step == 2
    assert any(f"{entry(root, 2).name} is loaded, as:" in line and four.name in line for line in said)
    assert any(f"{entry(root, 2).name} is loaded, and not:" in line for line in said)
    with pytest.raises(CorruptCheckpoint):
        restore(root, name=four.name)


def test_there_is_none_so_old(root):
    for which in ({"at_most": 1}, {"at_most": 1, "name": "ckpt-000000000001-e0001-00000000"}):
        with pytest.raises(FileNotFoundError, match=r"of a step of at most 1, found the steps \[2, 4, 6\]"):
            restore(root, **which)
    shutil.rmtree(next(entry(root, 2).path.glob("rank-*")))
    with pytest.raises(CorruptCheckpoint, match="of a step of at most 3, found none that is whole"):
        restore(root, at_most=3)


def test_a_step_and_another_one(root):
    with pytest.raises(ValueError, match="expected step or at_most, got step=2, at_most=4"):
        restore(root, step=2, at_most=4)


def test_all_ranks_take_the_same(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [3])
        ck = checkpointer(tmp_path, rb, ranks)
        for step in (1, 5):
            ck.save(step)
        ranks.gather(b"", 60.0)
        return ck.restore(name="ckpt-000000000003-e0001-00000000", at_most=4).step

    with pytest.warns(UserWarning, match="is loaded, as: .*expected a checkpoint called 'ckpt-000000000003"):
        assert done(job(2, act)) == [1, 1]
