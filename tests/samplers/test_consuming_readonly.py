"""Buffers that only read, beside others that draw rows a limited number of times: they see what is left."""

import random
from collections import Counter

import pytest
import torch

from engram import (
    ConsumingSampler,
    FilteredSampler,
    LazyMemmapStorage,
    MaxInFlight,
    NoSampleable,
    PromptGroupSampler,
    RandomSampler,
    RateLimited,
    ReplayBuffer,
    StalenessAwareSampler,
)
from tests.store.processes import Child

ROWS = 40


def opened(folder, sampler, n=ROWS):
    storage = LazyMemmapStorage(ROWS, scratch_dir=folder)
    rb = ReplayBuffer(storage=storage, sampler=sampler)
    rb.extend(rows(range(n)))
    return rb


def rows(numbers, reward=0.5, version=0):
    numbers = torch.tensor([*numbers])
    n = len(numbers)
    return {"row": numbers, "reward": torch.full((n,), reward), "policy_version": torch.full((n,), version)}


def left_of(rb):
    """Rows that a read-only buffer draws until it has none left, and how often each came."""
    found = Counter()
    while rb.can_sample():
        found.update(rb.sample()["row"].tolist())
    return found


class Model:
    """How often each row of a ring was drawn: of those who write. Rows that are gone are not there."""

    def __init__(self, most):
        self.most, self.drawn, self.value, self.cursor = most, {}, {}, 0

    def write(self, rows, numbers):
        for row, number in zip(rows, numbers, strict=True):
            self.drawn[row], self.value[row] = 0, number

    def left(self):
        return {self.value[row]: self.most - n for row, n in self.drawn.items() if n < self.most}


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_beside_one_who_draws(tmp_path, most, seed):
    """Each step is seen by a reader that was open before it, and by one that is opened behind it."""
    dice, model, number = random.Random(seed), Model(most), ROWS
    rb = opened(tmp_path / "s", ConsumingSampler(most))
    model.write(range(ROWS), range(ROWS))
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=7)
    for _ in range(60):
        what = dice.choice(
            ["draw", "draw", "draw", "write", "remove", "again", "empty" if dice.random() < 0.2 else "draw"]
        )
        live = sorted(model.drawn)
        if what == "draw" and model.left():
            _, info = rb.sample(dice.randint(1, 9), return_info=True)
            for row in info["index"].tolist():
                model.drawn[row] += 1
        elif what == "write":
            n = dice.randint(1, 12)
            model.write(rb.extend(rows(range(number, number + n))).tolist(), range(number, number + n))
            number += n
        elif what == "remove" and live:
            gone = dice.sample(live, min(3, len(live)))
            assert rb.remove(torch.tensor(gone)) == len(gone)
            for row in gone:
                del model.drawn[row]
        elif what == "again" and live:
            some = dice.sample(live, min(5, len(live)))
            rb.mark_update(torch.tensor(some))
            model.drawn |= dict.fromkeys(some, 0)
        elif what == "empty":
            rb.empty()
            model.drawn.clear()
        assert len(reader) == len(model.left()) == len(rb)
        seen, theirs = reader.stats(), rb.stats()
        for name in ("drawable_rows", "used_rows", "evicted_rows", "dropped_rows", "starved_draws"):
            assert seen[name] == theirs[name]
        counts = reader.sampler._attached().counts(ROWS).tolist()
        assert {row: counts[row] for row in model.drawn} == model.drawn
        assert reader.can_sample() == bool(model.left())
    later = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=7)
    assert left_of(reader) == left_of(later) == model.left()
    assert (len(reader), len(later), len(rb)) == (0, 0, len(model.left()))  # their draws count for each alone
    for one in (reader, later, rb):
        one.close()


def test_draws_of_a_reader_count_beside_those_of_others(tmp_path):
    rb = opened(tmp_path / "s", ConsumingSampler(3), n=1)
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=1)
    reader.sample()
    rb.sample(1)
    assert (len(reader), len(rb)) == (1, 1)
    reader.sample()
    assert (len(reader), len(rb)) == (0, 1)
    rb.mark_update(torch.tensor([0]))  # what others drew counts no more
    assert len(reader) == 1
    rb.extend(rows([7]))
    rb.sample(2)
    assert left_of(reader) == {7: 2}  # of row 0 it has drawn two, and they one
    reader.close()
    rb.close()


def draw_and_write(folder):
    rb = ReplayBuffer.open(folder, batch_size=4)
    while rb.can_sample():
        rb.sample()
    rb.sampler.increment_consumer_version() if hasattr(rb.sampler, "consumer_version") else None
    rb.close()


def test_another_process_draws(tmp_path):
    rb = opened(tmp_path / "s", ConsumingSampler(2))
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=4)
    assert (len(reader), reader.stats()["used_rows"]) == (ROWS, 0)
    Child(draw_and_write, tmp_path / "s").join()
    assert (len(reader), reader.stats()["used_rows"]) == (0, ROWS)
    with pytest.raises(NoSampleable):
        reader.sample()
    reader.close()
    rb.close()


def test_rules_are_followed(tmp_path):
    """Rows become ready, are used and become too old, as others say it."""
    sampler = FilteredSampler(RandomSampler(), ready=("reward",), max_uses=1, max_staleness=1)
    rb = opened(tmp_path / "s", sampler, n=0)
    rb.extend(rows(range(6), torch.nan))
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=4)
    assert not reader.can_sample()
    rb.set_at_("reward", torch.ones(4), torch.arange(4))
    assert (reader.can_sample(), len(reader)) == (True, 4)
    used = rb.sample(2)["row"].tolist()
    rb.extend(rows(range(10, 13), version=2))
    drawn = left_of(ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=4))
    assert drawn == dict.fromkeys({0, 1, 2, 3, 10, 11, 12} - {*used}, 1)
    rb.sampler.consumer_version = 2
    assert (reader.sampler.consumer_version, len(reader)) == (2, 3)
    assert reader.stats()["used_rows"] == 2
    rb.sample(4)  # which finds those that are too old
    assert (len(reader), reader.stats()["expired_rows"]) == (0, 2)
    rb.empty()
    rb.extend(rows([20]))
    assert (reader.sampler.consumer_version, left_of(reader)) == (0, {20: 1})
    reader.close()
    rb.close()


def test_a_reader_of_its_own_version(tmp_path):
    rb = opened(tmp_path / "s", StalenessAwareSampler(max_staleness=1), n=4)
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=2)
    rb.sampler.consumer_version = 3
    assert reader.sampler.consumer_version == 3
    assert not reader.can_sample()
    reader.sampler.increment_consumer_version()
    assert (reader.sampler.consumer_version, rb.sampler.consumer_version) == (4, 3)
    rb.sampler.consumer_version = 9
    assert reader.sampler.consumer_version == 9
    assert reader.stats()["consumer_version"] == 9
    reader.close()
    rb.close()


def test_groups_that_others_have_used(tmp_path):
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "s")
    rb = ReplayBuffer(storage=storage, sampler=PromptGroupSampler(samples_per_group=2, max_uses=2), batch_size=2)
    rb.extend({"query": torch.arange(6).repeat_interleave(2)})
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=2)
    mine = reader.sample()["query"].tolist()
    left = Counter(range(6)) + Counter(range(6))
    while rb.can_sample():
        used = int(rb.sample()["query"][0])
        left[used] -= 1
        assert reader.sampler.groups == sum(n > (query in mine) for query, n in left.items())
    assert reader.stats()["used_rows"] == rb.stats()["used_rows"] == 12
    assert not reader.can_sample()
    rb.extend({"query": torch.tensor([8, 8])})
    assert reader.sample()["query"].tolist() == [8, 8]
    reader.close()
    rb.close()


def test_a_reader_keeps_no_limit(tmp_path):
    """Its draws make no place for writers."""
    rb = opened(tmp_path / "s", ConsumingSampler(1), n=0).limit(MaxInFlight(8))
    rb.extend(rows(range(8)))
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True, batch_size=4)
    assert sum(left_of(reader).values()) == 8
    with pytest.raises(RateLimited):
        rb.extend(rows([8]), timeout=0)
    rb.sample(3)
    rb.extend(rows([8, 9, 10]), timeout=0)
    with pytest.raises(RateLimited):
        rb.extend(rows([11]), timeout=0)
    assert left_of(reader) == {8: 1, 9: 1, 10: 1}
    reader.close()
    rb.close()
