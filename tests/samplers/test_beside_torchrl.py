"""Samplers that count draws or go by versions, and delayed construction: what TorchRL's of these names do, ours do."""

import random

import pytest
import torch
from tensordict import TensorDict

import engram

rl = pytest.importorskip("torchrl.data")
pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = range(30)


def outcome(call):
    """What comes back; None: it was refused."""
    try:
        return call()
    except RuntimeError:
        return None


def consuming(library, rows, most, shorthand):
    storage = library.LazyTensorStorage(rows)
    if shorthand:
        return library.ReplayBuffer(storage=storage, consume_after_n_samples=most)
    return library.ReplayBuffer(storage=storage, sampler=library.ConsumingSampler(most))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_used_up_alike(seed):
    """As long as no row is overwritten that is not used up: which one that is depends on what was drawn."""
    dice = random.Random(seed)
    rows, most, written = dice.randint(1, 8), dice.choice([1, 1, 2, 3]), 0
    shorthand = dice.random() < 0.5
    both = [consuming(library, rows, most, shorthand) for library in (engram, rl)]
    draws = [{}, {}]
    for _ in range(dice.randint(1, 12)):
        free = rows - max(map(len, both))
        call = dice.choice(["extend", "add", "sample", "sample", "empty"])
        if call in ("extend", "add") and free:
            data = torch.arange(written, written + (dice.randint(1, free) if call == "extend" else 1))
            written += len(data)
            for rb in both:
                rb.extend(data) if call == "extend" else rb.add(data[0])
        elif call == "sample":
            size = dice.randint(1, 5)
            batches = [outcome(lambda rb=rb: rb.sample(size).flatten().tolist()) for rb in both]
            for batch, drawn in zip(batches, draws, strict=True):
                assert batch is None or len(set(batch)) == len(batch) > 0
                for row in batch or ():
                    drawn[row] = drawn.get(row, 0) + 1
                    assert drawn[row] <= most
            if most == 1:  # else it depends on which rows were drawn
                assert len(batches[0] or ()) == len(batches[1] or ())
        elif call == "empty" and dice.random() < 0.3:
            for rb in both:
                rb.empty()
        if most == 1:
            assert len(both[0]) == len(both[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_too_stale_alike(seed):
    """The consumer is not behind: there TorchRL's weights are negative."""
    dice = random.Random(seed)
    rows, most, live = dice.randint(1, 8), dice.choice([-1, 0, 1, 2, 3]), {}
    both = [
        library.TensorDictReplayBuffer(
            storage=library.LazyTensorStorage(rows), sampler=library.StalenessAwareSampler(max_staleness=most)
        )
        for library in (engram, rl)
    ]
    written = 0
    for _ in range(dice.randint(1, 6)):
        versions = [dice.randint(0, 4) for _ in range(dice.randint(1, rows))]
        data = TensorDict({"x": torch.arange(len(versions)), "policy_version": torch.tensor(versions)}, [len(versions)])
        for version in versions:
            live[written % rows] = version
            written += 1
        consumer = max(4, both[0].sampler.consumer_version) + dice.randint(0, 1)
        fresh = [version for version in live.values() if most < 0 or consumer - version <= most]
        found = []
        for rb in both:
            rb.extend(data.clone())
            rb.sampler.consumer_version = consumer
            batch = outcome(lambda rb=rb: rb.sample(max(1, len(fresh))))
            found.append(None if batch is None else sorted(batch["staleness"].flatten().tolist()))
        assert found == [sorted(float(consumer - version) for version in fresh) or None] * 2


def test_a_buffer_is_made_at_its_first_use_alike():
    made = [[], []]
    both = [
        library.ReplayBuffer(
            storage=lambda library=library, log=log: log.append(1) or library.LazyTensorStorage(10),
            sampler=library.RandomSampler,
            batch_size=4,
            delayed_init=True,
        )
        for library, log in zip((engram, rl), made, strict=True)
    ]
    assert [rb.initialized for rb in both] == [False, False]
    assert made == [[], []]
    for rb in both:
        rb.extend(torch.arange(5))
        assert len(rb.sample()) == 4
    assert [rb.initialized for rb in both] == [True, True]
    assert made == [[1], [1]]
