"""What may be limited, and what is refused."""

import math

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxInFlight,
    MinSize,
    RandomSampler,
    ReadOnlyStore,
    ReplayBuffer,
    SamplesPerInsert,
)


class UsingUp(RandomSampler):
    """Says that it uses rows up, after two draws."""

    draws_of_a_row = 2


def buffer(size=100, sampler=None):
    return ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=4)


@pytest.mark.parametrize("ratio", [0, -1, math.nan, math.inf, 1e13])
def test_a_ratio_is_a_number_above_zero(ratio):
    with pytest.raises(ValueError, match="ratio: expected a finite number above 0"):
        SamplesPerInsert(ratio, min_size=1)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SamplesPerInsert("8", min_size=1), TypeError),
        (lambda: SamplesPerInsert(True, min_size=1), TypeError),
        (lambda: SamplesPerInsert(8), TypeError),
        (lambda: SamplesPerInsert(8, min_size=0), ValueError),
        (lambda: SamplesPerInsert(8, min_size=1.5), TypeError),
        (lambda: SamplesPerInsert(8, min_size=1, tolerance=-0.1), ValueError),
        (lambda: SamplesPerInsert(8, min_size=1, tolerance=math.nan), ValueError),
        (lambda: MinSize(0), ValueError),
        (lambda: MinSize("1"), TypeError),
        (lambda: MaxInFlight(-1), ValueError),
        (lambda: MaxInFlight(None), TypeError),
    ],
)
def test_other_values_are_refused(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    ("limits", "error", "why"),
    [
        ((), TypeError, "got nothing"),
        ((8,), TypeError, "got int"),
        ((MinSize,), TypeError, "got MinSize"),
        ((MinSize(1), MinSize(2)), ValueError, "expected one MinSize"),
        ((SamplesPerInsert(1, min_size=1), MinSize(2)), ValueError, "SamplesPerInsert has a min_size"),
        ((MinSize(101),), ValueError, "at least 101 rows"),
        ((SamplesPerInsert(1, min_size=101),), ValueError, "got one of 100"),
        ((MaxInFlight(5),), ValueError, "ConsumingSampler"),
    ],
)
def test_limits_that_cannot_be_are_refused_and_change_nothing(limits, error, why):
    rb = buffer().limit(MinSize(7))
    with pytest.raises(error, match=why):
        rb.limit(*limits)
    assert rb.limits == (MinSize(7),)


def test_what_would_stop_both_sides_is_refused():
    rb = buffer(sampler=UsingUp())
    with pytest.raises(ValueError, match="at least the 6 rows that samples wait for"):
        rb.limit(MinSize(6), MaxInFlight(5))
    with pytest.raises(ValueError, match="at most 2, as often as the sampler draws a row"):
        rb.limit(SamplesPerInsert(2.5, min_size=1))
    rb.limit(MinSize(5), MaxInFlight(5))
    rb.add(torch.tensor(0))
    with pytest.raises(
        ValueError, match=r"expected at most 1 rows at a time, .* got 2\. Write fewer .*MaxInFlight\(6\)"
    ):
        rb.extend(torch.arange(2))
    assert len(rb) == 1


def test_a_list_cannot_be_limited():
    with pytest.raises(TypeError, match="expected a storage of tensors, got a ListStorage"):
        ReplayBuffer(storage=ListStorage(10)).limit(MinSize(1))


@pytest.mark.parametrize("timeout", ["1", True, torch.tensor(1.0), -1, math.nan])
def test_a_timeout_is_seconds(timeout):
    rb = buffer()
    rb.extend(torch.arange(4))
    for call in (lambda **t: rb.add(torch.tensor(1), **t), lambda **t: rb.extend(torch.arange(2), **t), rb.sample):
        with pytest.raises((TypeError, ValueError), match="timeout: expected"):
            call(timeout=timeout)
    assert len(rb) == 4
    assert len(rb.sample(timeout=None)) == len(rb.sample(timeout=0)) == 4


def test_limits_are_read_back():
    rb = buffer(sampler=UsingUp())
    assert rb.limits == ()
    both = (SamplesPerInsert(0.5, min_size=10, tolerance=0.0), MaxInFlight(50))
    assert rb.limit(*both) is rb
    assert rb.limits == both  # before there is a store
    rb.extend(torch.arange(4))
    assert rb.limits == both
    assert rb.limit(MaxInFlight(9)).limits == (MaxInFlight(9),)
    assert rb.limit(None).limits == ()


def test_a_store_keeps_its_limits(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), batch_size=4)
    rb.limit(SamplesPerInsert(3, min_size=5))
    rb.extend(torch.arange(6))
    rb.sample()
    rb.close()
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert rb.limits == (SamplesPerInsert(3, min_size=5),)
        assert (rb.stats()["limit_inserts"], rb.stats()["limit_samples"]) == (6, 4)


def limit_counts(rb):
    return {name: value for name, value in rb.stats().items() if name.startswith("limit")}


def test_shared_rows_keep_their_limits():
    rb = buffer().limit(SamplesPerInsert(3, min_size=5))
    rb.extend(torch.arange(6))
    rb.sample()
    before = limit_counts(rb)
    rb.share()
    assert rb.limits == (SamplesPerInsert(3, min_size=5),)
    assert limit_counts(rb) == before
    rb.close()


def test_a_reader_neither_waits_nor_counts(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), batch_size=4)
    rb.limit(SamplesPerInsert(1, min_size=50))
    rb.extend(torch.arange(6))
    with ReplayBuffer.open(tmp_path / "store", readonly=True) as reader:
        assert reader.limits == rb.limits
        for _ in range(10):
            assert len(reader.sample(4, timeout=0)) == 4
        with pytest.raises(ReadOnlyStore):
            reader.limit(None)
    assert rb.stats()["limit_samples"] == 0
    rb.close()


@pytest.mark.parametrize("filled", [False, True])
def test_a_sampler_that_would_stop_inserts_for_ever_is_refused(filled):
    rb = buffer(sampler=ConsumingSampler(2)).limit(MaxInFlight(50))
    if filled:
        rb.extend(torch.arange(20))
    before = rb.sampler
    with pytest.raises(ValueError, match=r"set_sampler: MaxInFlight\(50\): expected a sampler that uses rows up"):
        rb.set_sampler(RandomSampler())
    assert rb.sampler is before
    rb.limit(SamplesPerInsert(2, min_size=10))
    rb.set_sampler(RandomSampler())
    with pytest.raises(ValueError, match="set_sampler: SamplesPerInsert: ratio: expected at most 1"):
        rb.set_sampler(ConsumingSampler())
    rb.limit(None).set_sampler(ConsumingSampler(2))


def test_can_sample_asks_the_limits_and_counts_nothing():
    rb = buffer().limit(SamplesPerInsert(1, min_size=8, tolerance=0))
    assert not rb.can_sample()
    rb.extend(torch.arange(7))
    assert not rb.can_sample()
    rb.extend(torch.arange(1))
    before = limit_counts(rb)
    assert rb.can_sample()
    assert limit_counts(rb) == before
    rb.sample()
    assert not rb.can_sample()
    rb.extend(torch.arange(4))
    assert rb.can_sample()
    rb.limit(None)
    assert rb.can_sample()
