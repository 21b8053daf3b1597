"""Storages of listed rows: what holds of them in one process, and what they refuse by name, changing nothing."""

import pytest
import torch

from engram import (
    Checkpointer,
    CompressedListStorage,
    IncompatibleCheckpoint,
    LazyStackStorage,
    ListStorage,
    TensorDictReplayBuffer,
)
from tests.features.base import Feature
from tests.features.rows import APART
from tests.ranks.jobs import done, job

FEATURE = Feature()
STORAGES = {
    "ListStorage": ListStorage,
    "LazyStackStorage": LazyStackStorage,
    "CompressedListStorage": CompressedListStorage,
}
pytestmark = pytest.mark.parametrize("kind", STORAGES)


def made(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    storage = STORAGES[kind](FEATURE.capacity)
    return TensorDictReplayBuffer(storage=storage, batch_size=8, generator=generator, collate_fn=torch.stack)


def go_on(rb, known):
    for number in (APART, APART + 1):
        assert whos_of_list(rb) == known.whos
        FEATURE.check(rb, known)
        FEATURE.write(rb, known, number)
    FEATURE.check(rb, known)


def whos_of_list(rb):
    return {int(rb[row]["who"]) for row in range(len(rb))}


@pytest.mark.parametrize("how", ["dump", "checkpoint"])
def test_saved_rows_go_on(kind, how, tmp_path):
    rb, again = made(kind), made(kind, seed=1)
    known = FEATURE.play(rb, [0, 1, 2])
    if how == "dump":
        rb.dumps(tmp_path / "saved")
        again.loads(tmp_path / "saved")
    else:
        Checkpointer(tmp_path / "saved", rb, timeout=60.0).save(1)
        Checkpointer(tmp_path / "saved", again, timeout=60.0).restore()
    go_on(again, known)


def test_they_are_not_shared(kind):
    rb = made(kind)
    known = FEATURE.play(rb, [0, 1, 2])
    with pytest.raises(RuntimeError, match=kind):
        rb.share()
    go_on(rb, known)


def save(ranks, rank, kind, root):
    rb = made(kind, seed=rank)
    known = FEATURE.play(rb, [3 * rank + number for number in range(3)])
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).save(1)
    return known


def restore(ranks, rank, kind, root):
    rb = made(kind)
    known = FEATURE.play(rb, [6, 7])
    ck = Checkpointer(root, rb, ranks=ranks, timeout=60.0)
    with pytest.raises(IncompatibleCheckpoint, match="list|List|Stack"):
        ck.restore()
    go_on(rb, known)


@pytest.mark.parametrize("ranks", [1, 3])
def test_they_are_not_dealt_out_to_other_ranks(kind, ranks, tmp_path):
    done(job(2, save, kind, tmp_path / "saved"))
    done(job(ranks, restore, kind, tmp_path / "saved"))
