"""Windows beside edits of another process: an edit leaves each step where it is, so no window is lost, and none comes twice."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from engram import (
    LazyMemmapStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
)
from tests.fresh import start

STEPS = 4
EPISODES = 32
ROWS = EPISODES * STEPS
WIDTH = 2000  # so that an edit takes a while

EDITOR = """
import torch
from engram import ReplayBuffer
rb = ReplayBuffer.open(folder)
wide = torch.ones(16, width)
print("edits", flush=True)
while True:
    rb.set_at_("wide", wide, torch.randperm(rows)[:16])
"""


@pytest.fixture
def folder(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "store"), sampler=RandomSampler())
    rb.extend({"episode": torch.arange(ROWS) // STEPS, "wide": torch.zeros(ROWS, WIDTH)})
    rb.close()
    return tmp_path / "store"


@contextmanager
def edits(folder, rows=ROWS):
    """Another process edits some of the first rows, 16 at a time, for as long as the block lasts."""
    editor = start(EDITOR, folder=str(folder), rows=rows, width=WIDTH).until("edits")
    try:
        yield
        assert editor.poll() is None
    finally:
        editor.kill()


def while_edited(rb, edits=1000):
    """Until the store has been edited so many times more."""
    core = rb.storage.memory.core
    end = core.next_ticket + 16 * edits
    while core.next_ticket < end:
        yield


def opened(folder, sampler, windows, length):
    return ReplayBuffer.open(folder, sampler=sampler, batch_size=windows * length)


def firsts(batch, length):
    episodes = batch["episode"].reshape(-1, length)
    assert torch.equal(episodes, episodes[:, :1].expand_as(episodes))
    return episodes[:, 0].tolist()


def test_windows_behind_the_edited_rows_are_drawn_as_often(folder):
    rb = opened(folder, SliceSampler(slice_len=2, traj_key="episode"), 32, 2)
    seen = Counter()
    with edits(folder, ROWS // 2):
        for _ in while_edited(rb):
            seen.update(firsts(rb.sample(), 2))
    assert sum(seen[episode] for episode in range(EPISODES // 2, EPISODES)) > 0.45 * seen.total()  # half of them


def test_an_epoch_has_every_trajectory_once(folder):
    rb = opened(folder, SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"), 4, 2)
    with edits(folder):
        for _ in while_edited(rb):
            assert Counter(episode for batch in rb for episode in firsts(batch, 2)) == Counter(range(EPISODES))


def test_every_completed_window_comes_once_in_order(folder):
    with edits(folder):
        for _ in while_edited(ReplayBuffer.open(folder)):
            rb = opened(folder, StreamingSliceSampler(slice_len=STEPS, traj_key="episode"), 4, STEPS)
            seen = [episode for _ in range(EPISODES // 4) for episode in firsts(rb.sample(), STEPS)]
            rb.close()
            assert sorted(seen) == list(range(EPISODES))
