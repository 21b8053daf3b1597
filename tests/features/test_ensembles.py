"""Ensembles of buffers on every storage: members in other processes, dumps, and checkpoints of their members, on other ranks included."""

import pytest
import torch

from engram import Checkpointer, LazyMemmapStorage, LazyTensorStorage, ReplayBufferEnsemble
from tests import forkserver
from tests.features.base import Feature, Known, until
from tests.features.rows import APART, whos_in, whos_of
from tests.ranks.jobs import done, job
from tests.store.processes import Child

FEATURE = Feature()
KINDS = ["RAM", "shared", "folder"]


def member(kind, folder, seed=0):
    storage = LazyMemmapStorage(64, scratch_dir=folder) if kind == "folder" else LazyTensorStorage(64)
    rb = FEATURE.buffer(storage, seed=seed)
    return rb.share() if kind == "shared" else rb


def together(members):
    return ReplayBufferEnsemble(*members, batch_size=8, generator=torch.Generator().manual_seed(0))


def check(rb, every):
    """Each part of a batch is of the steps of its member, and all steps are drawn."""
    drawn = [set() for _ in every]
    for _ in until(lambda: drawn == every):
        sound(rb.sample(), every, drawn)
    assert drawn == every


def sound(batch, every, drawn):
    batch = batch.reshape(-1)
    FEATURE.sound(batch, set().union(*every))
    for who, number in zip(batch["who"].tolist(), batch["index", "buffer_ids"].tolist(), strict=True):
        assert who in every[number]
        drawn[number].add(who)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dump_goes_on_in_another_storage(kind, tmp_path):
    rb = together([member(kind, tmp_path / f"first-{number}") for number in range(2)])
    every = [FEATURE.play(rb[number], [3 * number, 3 * number + 1]).whos for number in range(2)]
    check(rb, every)
    rb.dumps(tmp_path / "dump")
    other = KINDS[KINDS.index(kind) - 1]
    again = together([member(other, tmp_path / f"second-{number}") for number in range(2)])
    again.loads(tmp_path / "dump")
    check(again, every)
    FEATURE.write(again[1], Known(set()), APART)
    check(again, [every[0], every[1] | whos_in(APART)])
    with pytest.raises(AssertionError):
        check(again, [every[0], every[1]])


@pytest.mark.parametrize("kind", ["shared", "folder"])
def test_another_process_writes_to_a_member(kind, tmp_path):
    members = [member(kind, tmp_path / f"store-{number}") for number in range(2)]
    every = [FEATURE.play(rb, [3 * number, 3 * number + 1]).whos for number, rb in enumerate(members)]
    rb = together(members)
    here, there = forkserver.CONTEXT.Pipe()
    child = Child(write, members[1], there, method="forkserver")
    assert here.poll(60)
    here.recv()
    every[1] |= whos_in(*range(APART, APART + 4))
    drawn = [set(), set()]
    for _ in range(30):
        sound(rb.sample(), every, drawn)
    child.join()
    assert whos_of(members[1]) == every[1]
    check(rb, every)


def write(rb, pipe):
    pipe.send("began")
    FEATURE.write(rb, Known(set()), *range(APART, APART + 4))
    rb.close()


def save(ranks, rank, root):
    members = [member("RAM", None, seed=rank) for _ in range(2)]
    every = [FEATURE.play(rb, [10 * number + rank]).whos for number, rb in enumerate(members)]
    for number, rb in enumerate(members):
        Checkpointer(root / f"member-{number}", rb, ranks=ranks, timeout=60.0).save(1)
    return every


def restore(ranks, rank, root):
    members = [member(KINDS[rank], root / f"store-{rank}-{number}", seed=rank) for number in range(2)]
    for number, rb in enumerate(members):
        Checkpointer(root / f"member-{number}", rb, ranks=ranks, timeout=60.0).restore(
            incomplete={"headless": "keep", "open": "keep"}
        )
    return members


@pytest.mark.parametrize("ranks", [1, 2])
def test_members_go_on_on_another_number_of_ranks(ranks, tmp_path):
    saved = done(job(3, save, tmp_path))
    restored = done(job(ranks, restore, tmp_path))
    for number in range(2):
        shares = [whos_of(members[number]) for members in restored]
        assert set().union(*shares) == set().union(*(every[number] for every in saved))
        assert sum(map(len, shares)) == sum(len(every[number]) for every in saved)
    for members in restored:
        check(together(members), [whos_of(rb) for rb in members])
