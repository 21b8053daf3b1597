"""How often rows were sampled is part of dumps, states and checkpoints: after a load the same rows go as before."""

import pytest
import torch

from engram import Checkpointer, LazyMemmapStorage, LazyTensorStorage, MaxTimesSampled, ReplayBuffer

CAPACITY = 12


def made(folder=None):
    storage = LazyTensorStorage(CAPACITY) if folder is None else LazyMemmapStorage(CAPACITY, scratch_dir=folder)
    generator = torch.Generator().manual_seed(4)
    return ReplayBuffer(storage=storage, batch_size=4, generator=generator, remover=MaxTimesSampled())


def filled(folder=None):
    rb = made(folder)
    rb.extend({"t": torch.arange(CAPACITY)})
    rb.count_usage()
    for _ in range(5):
        rb.sample()
    return rb


def counts(rb):
    return [rb.explain(row).times_sampled for row in range(CAPACITY)]


WAYS = {
    "dump": lambda rb, to, folder: (rb.dumps(folder / "dump"), to.loads(folder / "dump")),
    "state": lambda rb, to, folder: to.load_state_dict(rb.state_dict()),
    "saved state": lambda rb, to, folder: (
        torch.save(rb.state_dict(), folder / "state.pt"),
        to.load_state_dict(torch.load(folder / "state.pt", weights_only=True)),
    ),
    "storage": lambda rb, to, folder: to.storage.load_state_dict(rb.storage.state_dict()),
    "checkpoint": lambda rb, to, folder: (
        Checkpointer(folder / "series", rb).save(1),
        Checkpointer(folder / "series", to).restore(),
    ),
}


@pytest.mark.parametrize("place", ["RAM", "folder"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_rows_go_after_a_load(way, place, tmp_path):
    rb = filled(tmp_path / "one" if place == "folder" else None)
    to = made(tmp_path / "other" if place == "folder" else None)
    before = counts(rb)
    assert len(set(before)) > 1
    WAYS[way](rb, to, tmp_path)
    assert counts(to) == counts(rb) == before
    for n in range(3):
        new = {"t": 100 + 3 * n + torch.arange(3)}
        assert to.extend(new).tolist() == rb.extend(new).tolist()
    assert counts(to) == counts(rb)
    to.sample()
    assert sum(counts(to)) == sum(counts(rb)) + 4
    to.close()
    rb.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_replaces_the_counts_that_are_there(way, tmp_path):
    rb, to = filled(), filled()
    for _ in range(9):
        to.sample()
    to.extend({"t": torch.arange(20, 25)})
    WAYS[way](rb, to, tmp_path)
    assert counts(to) == counts(rb)
    new = {"t": torch.arange(7)}
    assert to.extend(new).tolist() == rb.extend(new).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_without_counts_rows_begin_at_0(way, tmp_path):
    rb = made()  # which counts nothing yet
    rb.extend({"t": torch.arange(CAPACITY)})
    assert "usage" not in rb.storage.state_dict()
    to, counting = made(), filled()
    WAYS[way](rb, to, tmp_path)
    (tmp_path / "again").mkdir()
    with pytest.warns(UserWarning, match="they count as never sampled"):
        assert to.extend({"t": torch.arange(3)}).tolist() == [0, 1, 2]
    assert counts(to) == [0] * CAPACITY
    WAYS[way](rb, counting, tmp_path / "again")
    assert counts(counting) == [0] * CAPACITY
    assert counting.extend({"t": torch.arange(3)}).tolist() == [0, 1, 2]


def test_a_state_of_wrong_counts_is_refused():
    rb = filled()
    for wrong, kind in [
        (torch.full((CAPACITY,), -1, dtype=torch.int32), ValueError),
        (torch.zeros(CAPACITY + 1, dtype=torch.int32), ValueError),
        (torch.zeros(CAPACITY), (TypeError, ValueError)),
        ("many", TypeError),
    ]:
        state = rb.storage.state_dict()
        state["usage"] = wrong
        before = counts(rb)
        with pytest.raises(kind, match="usage"):
            rb.storage.load_state_dict(state)
        assert counts(rb) == before


def test_a_store_that_was_never_written_has_none():
    state = made().storage.state_dict()
    assert "usage" not in state
    filled().storage.load_state_dict(state)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_part_of_the_rows(emptied, tmp_path):
    rb = made()
    rb.extend({"t": torch.arange(5)})
    rb.count_usage()
    rb.sample()
    if emptied:
        rb.empty()
    rb.dumps(tmp_path / "dump")
    to = made()
    to.loads(tmp_path / "dump")
    assert counts_of(to) == counts_of(rb)
    to.extend({"t": torch.arange(CAPACITY + 2)})
    assert to.stats()["never_sampled_frac"] >= 0


def counts_of(rb):
    return [rb.explain(row).times_sampled for row in range(len(rb))]
