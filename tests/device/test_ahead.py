"""Large batches that a device reads by itself are read one ahead, on a stream of their own."""

import itertools

import pytest
import torch

from engram import DeviceLoader, NoSampleable, SamplerWithoutReplacement
from engram.device import direct
from tests.device import test_direct
from tests.device.test_direct import by_priority, pair, same

device = test_direct.device
SAMPLERS = {"uniform": lambda: None, "priority": by_priority, "epoch": SamplerWithoutReplacement}


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every batch is."""
    monkeypatch.setattr(direct.native, "PARALLEL_BYTES", 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_are_those_of_the_host(device, sampler):
    here, there = pair(sampler=SAMPLERS[sampler])
    reading = DeviceLoader(here, "cuda")
    assert reading._direct.reads_ahead
    assert reading._direct._chain._programs <= direct._PROGRAMS
    expected = list(itertools.islice(there, 4))
    got = list(itertools.islice(reading, 4))
    assert len(got) == len(expected) == (3 if sampler == "epoch" else 4)
    for one, other in zip(got, expected, strict=True):
        if sampler == "priority":
            torch.testing.assert_close(one.pop("priority_weight"), other.pop("priority_weight"), rtol=1e-6, atol=0)
        assert same(one, other)
    assert reading.stats()["batches"] == len(got)
    if sampler == "epoch":
        assert len(list(reading)) == len(list(there)) == 3


def test_the_order_of_events(device):
    rb, _ = pair()
    reading = DeviceLoader(rb, "cuda")
    side, batches, ahead = reading._direct._side.name, iter(reading), None
    for number in range(4):
        before = len(device.log)
        next(batches)
        marked, (waited,), kept = (
            [entry for entry in device.log[before:] if entry[0] == what] for what in ("mark", "wait", "keep")
        )
        assert [entry[1] for entry in marked] == [side] * (1 if number else 2), (
            "one more is queued before one is handed out"
        )
        assert waited[1] == "MainThread"
        assert kept == [("keep", "MainThread")]
        if number:
            assert waited[2] == ahead, "the consumer waits for the batch that was queued before, not for the new one"
        ahead = marked[-1][2]
        assert device.log.index(waited) > max(map(device.log.index, marked))
    assert device.counts["sync"] == 0


def test_the_consumer_waits_for_its_batch_and_no_memory_is_reused(device):
    here, there = pair()
    reading = DeviceLoader(here, "cuda")
    device.held = {reading._direct._side.name, "MainThread"}
    batches, found, kept = iter(reading), [], []
    for _ in range(4):
        batch = next(batches)  # which was not read yet
        kept.append(batch)
        device.queue(lambda batch=batch: found.append(batch.clone()))
    assert found == []
    device.release("MainThread")
    assert found == [], "the consumer's work waits for the batch"
    device.release()
    for one in found:
        assert same(one, there.sample())
    spans = sorted(
        (batch["obs"].untyped_storage().data_ptr(), batch["obs"].untyped_storage().nbytes()) for batch in kept
    )
    assert all(begin + size <= other for (begin, size), (other, _) in itertools.pairwise(spans))


def test_small_batches_and_depth_1_stay_on_the_consumers_stream(device, monkeypatch):
    rb, _ = pair()
    assert not DeviceLoader(rb, "cuda", 1)._direct.reads_ahead
    monkeypatch.setattr(direct.native, "PARALLEL_BYTES", 1 << 19)
    reading = DeviceLoader(rb, "cuda")
    assert not reading._direct.reads_ahead
    next(iter(reading))
    assert [entry for entry in device.log if entry[0] == "keep"] == []


def test_what_changes_between_is_seen_by_the_batch_after_next(device):
    rb, _ = pair()
    reading = DeviceLoader(rb, "cuda")
    batches = iter(reading)
    next(batches)
    rb.add_field("more", torch.tensor(5.0))
    assert "more" not in next(batches), "it was read before"
    assert "more" in next(batches)
    rb.append_transform(lambda batch: batch)
    assert "more" in next(batches)
    assert reading.transport == "block" or next(batches) is not None
    assert not device.faults


def test_an_error_is_raised_when_its_batch_is_due(device):
    rb, _ = pair()
    batches = iter(DeviceLoader(rb, "cuda"))
    next(batches)
    rb.empty()
    assert len(next(batches)) == 8
    with pytest.raises(NoSampleable):
        next(batches)


def test_an_iteration_that_is_left_early(device):
    here, there = pair()
    reading = DeviceLoader(here, "cuda")
    assert same(next(iter(reading)), there.sample())
    there.sample()  # the one that was read ahead
    assert same(next(iter(reading)), there.sample())
