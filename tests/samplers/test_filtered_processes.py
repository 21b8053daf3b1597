"""Processes that draw by priority from one store share the uses of its rows out, whatever dies."""

import random
from collections import Counter

import pytest
import torch

from engram import FilteredSampler, LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from tests import stress
from tests.ranks.processes import tell
from tests.samplers.consumers import consume, consume_and_die, write
from tests.store.processes import Child
from tests.waiting import ended

USES = 2


def store(folder, rows, capacity):
    sampler = FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.4), max_uses=USES)
    rb = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder), sampler=sampler, batch_size=5)
    index = rb.extend(torch.arange(rows))
    rb.update_priority(index, 1.0 + index % 7)
    return rb


def numbers(file):
    return [int(word) for word in file.read_text().split()]


def test_each_row_is_used_as_often_as_it_may_while_others_write(tmp_path):
    rb = store(tmp_path / "s", 50, 2_000)
    files = [tmp_path / f"got-{i}" for i in range(2)]
    consumers = [Child(consume, tmp_path / "s", file, tmp_path / "end") for file in files]
    writers = [Child(write, tmp_path / "s", 1_000 * (1 + i), 15, 8) for i in range(2)]
    for child in writers:
        child.join()
    tell(tmp_path / "end", "")
    for child in consumers:
        child.join()
    written = [*range(50), *range(1_000, 1_120), *range(2_000, 2_120)]
    assert Counter(sum(map(numbers, files), [])) == dict.fromkeys(written, USES)
    assert len(rb) == 0
    rb.close()


@pytest.mark.stress
def test_killed_consumers_use_no_row_too_often_and_lose_none_but_what_they_had_drawn(tmp_path):
    """Two at a time are killed amid a draw: what each was drawing counts, and all else is handed out."""
    rows, kills = 300, stress.size(6, 40)
    rb = store(tmp_path / "s", rows, rows)
    seen, dice = Counter(), random.Random(7)
    for kill in range(0, kills, 2):
        files = [tmp_path / f"got-{kill + i}" for i in range(2)]
        batches = [dice.randrange(USES * rows // 5 // kills) for _ in files]  # there are enough for all
        children = [Child(consume_and_die, tmp_path / "s", *it) for it in zip(files, batches, strict=True)]
        for child, file in zip(children, files, strict=True):
            ended(child.process)
            assert child.process.exitcode == -9
            seen.update(numbers(file))
    for batch in rb:
        seen.update(batch.tolist())
    assert max(seen.values()) == USES
    assert sum(seen.values()) == USES * rows - 5 * kills
    assert len(rb) == 0
    rb.close()
