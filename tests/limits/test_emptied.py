"""Calls that sample, under limits, from a store that another handle or process empties at the worst moment: they wait."""

import threading

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    MinSize,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RateLimited,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    Sequence,
    SliceSampler,
)
from tests.limits.test_waiting import LONG_S, Call, waiting
from tests.serving.servers import serving

CAPACITY = 64


def rows(n=32):
    steps = torch.arange(n)
    return {"t": steps, "next": {"done": steps.unsqueeze(-1) % 8 == 7, "reward": torch.ones(n, 1)}}


WAYS = {
    "uniform": dict,
    "priorities": lambda: {"sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5)},
    "epoch": lambda: {"sampler": SamplerWithoutReplacement()},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2)},
    "n-step": lambda: {"sampler": NStep(RandomSampler(), 2, 0.9)},
    "sequence": lambda: {"sample_unit": Sequence(2)},
    "using up": lambda: {"sampler": ConsumingSampler(4)},
}


def limits():
    return SamplesPerInsert(1, min_size=4, tolerance=1000)


class Emptied:
    """Empties the store between the admission of a draw and the draw itself, ``times`` times."""

    def __init__(self, rb, monkeypatch, times, refill=None):
        self.left, self.emptied = times, threading.Semaphore(0)
        gate, emptied = type(rb._wiring.gate), self
        admitted = gate.admitted

        def admits(*args, **kwargs):
            inside = admitted(*args, **kwargs)

            class Inside:
                def __enter__(self):
                    inside.__enter__()
                    if emptied.left:
                        emptied.left -= 1
                        rb.storage.store.empty(keep_write_count=False)
                        if refill is not None:
                            rb.extend(refill, timeout=0)
                        emptied.emptied.release()

                def __exit__(self, *raised):
                    return inside.__exit__(*raised)

            return Inside()

        monkeypatch.setattr(gate, "admitted", admits)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_it_waits_until_rows_come_again(way, prefetch, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=8, prefetch=prefetch, **WAYS[way]())
    rb.limit(limits())
    rb.extend(rows())
    emptied = Emptied(rb, monkeypatch, 1)
    call = Call(lambda: rb.sample(timeout=None))
    assert emptied.emptied.acquire(timeout=60)
    waiting(rb, "sample")
    rb.extend(rows())
    assert set(call.said()) >= {"t", "next"}
    rb.close()


@pytest.mark.parametrize("way", ["uniform", "priorities", "n-step", "sequence"])
def test_rows_that_came_meanwhile_are_drawn(way, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=8, **WAYS[way]())
    rb.limit(limits())
    rb.extend(rows())
    Emptied(rb, monkeypatch, 3, refill=rows(8))
    assert set(rb.sample(timeout=None)) >= {"t", "next"}
    rb.close()


def test_in_the_end_it_says_that_there_are_no_rows(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=8)
    rb.limit(limits())
    rb.extend(rows())
    Emptied(rb, monkeypatch, 1)
    with pytest.raises(RateLimited, match="0 rows are live"):
        rb.sample(timeout=0.05)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_consumers_wait_for_rows_that_nobody_has_drawn(prefetch):
    sampler = ConsumingSampler(1)
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=8, prefetch=prefetch)
    rb.limit(limits())
    rb.extend(rows(8))
    assert len(rb.sample()["t"]) == 8
    with pytest.raises(RateLimited):
        rb.sample(timeout=0.05)
    call = Call(lambda: rb.sample(timeout=LONG_S))
    rb.extend(rows(8))
    assert len(call.said()["t"]) == 8
    rb.close()


def test_without_rows_that_will_do_it_says_so_at_once():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=20), batch_size=20)
    rb.limit(MinSize(4))
    rb.extend(rows())
    with pytest.raises(NoSampleable, match="expected a trajectory of at least 20 steps"):
        rb.sample(timeout=None)


@pytest.mark.parametrize("way", ["uniform", "priorities", "using up"])
def test_a_client_waits_too(way, tmp_path):
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "store")
    rb = ReplayBuffer(storage=storage, batch_size=8, **WAYS[way]())
    rb.limit(limits())
    rb.extend(rows())
    with serving(tmp_path / "store") as served:
        client = ReplayBuffer.connect(served.address)
        assert len(client.sample()["t"]) == 8
        rb.empty()
        call = Call(lambda: client.sample(timeout=None))
        rb.extend(rows())
        assert len(call.said()["t"]) == 8
        client.close()
    rb.close()
