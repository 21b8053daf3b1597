"""Processes that draw from one store share its rows out, whatever dies."""

import random
from collections import Counter

import pytest
import torch

from engram import ConsumingSampler, LazyMemmapStorage, LazyTensorStorage, MaxInFlight, NoSampleable, ReplayBuffer
from tests import stress
from tests.ranks.processes import tell
from tests.samplers.consumers import consume, consume_and_die, write
from tests.store.processes import Child
from tests.waiting import ended


def store(folder, rows, capacity, most=1):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=folder), sampler=ConsumingSampler(most), batch_size=5
    )
    rb.extend(torch.arange(rows))
    return rb


def numbers(file):
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("most", [1, 3])
def test_each_row_goes_to_one_of_them_while_others_write(tmp_path, most):
    """Writers never overwrite a row that is not used up: there is room for all."""
    rb = store(tmp_path / "s", 50, 2_000, most)
    files = [tmp_path / f"got-{i}" for i in range(2)]
    consumers = [Child(consume, tmp_path / "s", file, tmp_path / "end") for file in files]
    writers = [Child(write, tmp_path / "s", 1_000 * (1 + i), 20, 8) for i in range(2)]
    for child in writers:
        child.join()
    tell(tmp_path / "end", "")
    for child in consumers:
        child.join()
    written = [*range(50), *range(1_000, 1_160), *range(2_000, 2_160)]
    assert Counter(sum(map(numbers, files), [])) == dict.fromkeys(written, most)
    assert len(rb) == 0
    rb.close()


def test_a_queue_of_as_many_rows_as_the_storage_has_loses_none(tmp_path):
    """A row gives its room back when it was read, and the rows that take the room go where it was."""
    rb = store(tmp_path / "s", 40, 40).limit(MaxInFlight(40))
    files, count = [tmp_path / f"got-{i}" for i in range(2)], stress.size(60, 3_000)
    consumers = [Child(consume, tmp_path / "s", file, tmp_path / "end") for file in files]
    writers = [Child(write, tmp_path / "s", 100_000 * (1 + i), count, 8) for i in range(2)]
    for child in writers:
        child.join()
    tell(tmp_path / "end", "")
    for child in consumers:
        child.join()
    written = [*range(40), *range(100_000, 100_000 + 8 * count), *range(200_000, 200_000 + 8 * count)]
    assert Counter(sum(map(numbers, files), [])) == dict.fromkeys(written, 1)
    assert rb.stats()["limit_in_flight"] == 0
    rb.close()


@pytest.mark.stress
def test_a_killed_consumers_rows_count_as_drawn(tmp_path):
    """What it was drawing when it died goes to nobody, and all else to exactly one."""
    rows, kills = 400, stress.size(4, 40)
    rb = store(tmp_path / "s", rows, rows)
    seen = []
    for kill in range(kills):
        file = tmp_path / f"got-{kill}"
        child = Child(consume_and_die, tmp_path / "s", file, random.Random(kill).randrange(1 + rows // 5 // kills))
        ended(child.process)
        assert child.process.exitcode == -9
        seen += numbers(file)
    lost = 5 * kills
    assert len(rb) == rows - len(seen) - lost
    for batch in rb:
        seen += batch.tolist()
    assert len(set(seen)) == len(seen) == rows - lost
    rb.close()


def test_counts_survive_the_death_of_all(tmp_path):
    def begin():
        rb = store(tmp_path / "s", 40, 40, 2)
        rb.sample()
        consume_and_die(tmp_path / "s", tmp_path / "got", 3)

    child = Child(begin)
    ended(child.process)
    assert child.process.exitcode == -9
    rb = ReplayBuffer.open(tmp_path / "s")
    assert int(rb.sampler.state_dict()["counts"].sum()) == 25
    assert len([row for batch in rb for row in batch]) == 55
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend(torch.arange(3))
    assert len(rb) == 3
    rb.close()


def test_a_forked_child_of_a_private_buffer_counts_for_itself():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=10)
    rb.extend(torch.arange(10))

    def child():
        assert len(rb.sample()) == 10

    Child(child).join()
    assert len(rb.sample()) == 10
