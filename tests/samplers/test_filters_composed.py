"""Filters of filters: rules around a ConsumingSampler and a StalenessAwareSampler are one index, and what becomes of rows is counted."""

import math
import pickle
from collections import Counter

import pytest
import torch

from engram import (
    ConsumingSampler,
    FilteredSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    MaxInFlight,
    NoSampleable,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    SamplesPerInsert,
    StalenessAwareSampler,
)
from tests.statistics_of import assert_proportional


def made(sampler, capacity=64, batch_size=8, **given):
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size, **given)


def rows_of(n, ready=lambda i: True, version=lambda i: 0):
    return {
        "x": torch.arange(n),
        "reward": torch.tensor([float(i) if ready(i) else math.nan for i in range(n)]),
        "policy_version": torch.tensor([version(i) for i in range(n)]),
    }


@pytest.mark.parametrize("uses", [1, 3])
def test_each_row_that_may_be_drawn_comes_as_often_as_a_consuming_sampler_says(tmp_path, uses):
    """Once a batch at most, and never one that is not ready or too old."""
    torch.manual_seed(1)
    sampler = FilteredSampler(ConsumingSampler(uses), ready=("reward",), max_staleness=1)
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "rows"), sampler=sampler, batch_size=7)
    index = rb.extend(rows_of(40, ready=lambda i: i % 3 > 0, version=lambda i: i % 4))
    rb.sampler.consumer_version = 3
    wanted = [i for i in range(40) if i % 3 and i % 4 >= 2]
    assert (len(rb), rb.sampler.draws_of_a_row) == (len(wanted), uses)
    counts = Counter()
    while rb.can_sample():
        batch = rb.sample()["x"].tolist()
        assert len(set(batch)) == len(batch)
        counts.update(batch)
    assert counts == dict.fromkeys(wanted, uses)
    with pytest.raises(NoSampleable, match=r"not ready=.*max_uses=.*'policy_version' is below 2"):
        rb.sample()
    rb.set_at_("reward", torch.ones(1), index[3:4])  # of version 3
    assert rb.sample()["x"].tolist() == [3]
    assert len(rb) == int(uses > 1)


def test_its_state_its_copies_and_the_store_go_on_with_the_same_rules(tmp_path):
    sampler = FilteredSampler(ConsumingSampler(1), ready=("reward",), max_staleness=1)
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "rows"), sampler=sampler)
    rb.extend(rows_of(20, ready=lambda i: i < 10))
    rb.sampler.consumer_version = 1
    first = rb.sample(3)["x"].tolist()
    state, twin = rb.state_dict(), pickle.loads(pickle.dumps(rb.sampler))
    rest = rb.sample(7)["x"].tolist()
    assert sorted(first + rest) == list(range(10))
    assert repr(twin) == repr(rb.sampler)
    rb.close()
    again = ReplayBuffer.open(tmp_path / "rows")
    assert repr(again.sampler) == repr(twin)
    assert not again.can_sample(1)
    again.load_state_dict(state)
    assert sorted(again.sample(7)["x"].tolist()) == sorted(rest)
    again.close()


def test_the_limit_of_a_sampler_by_staleness_is_a_rule():
    """Fresh rows that are used up, beside old ones that are not: there is nothing to draw, and it says so at once."""
    torch.manual_seed(2)
    n = 2_000
    sampler = FilteredSampler(StalenessAwareSampler(max_staleness=1, version_key="made"), max_uses=1)
    rb = made(sampler, n, 4)
    rb.extend({"x": torch.arange(n), "made": torch.tensor([3 if i % 100 == 7 else 0 for i in range(n)])})
    rb.sampler.consumer_version = 4
    wanted = [i for i in range(n) if i % 100 == 7]
    assert (len(rb), rb.sampler.max_staleness) == (len(wanted), 1)
    seen = [x for _ in range(5) for x in rb.sample()["x"].tolist()]
    assert sorted(seen) == wanted
    assert not rb.can_sample()
    with pytest.raises(NoSampleable, match="got none: rows do not count: .*'made' is below 3"):
        rb.sample()
    assert rb.stats()["expired_rows"] == n - len(wanted)


def test_weights_of_staleness_hold_where_few_rows_are_left():
    """Rows of several versions, of which few are ready: they are found, in proportion to their weights."""
    torch.manual_seed(3)
    n, ready = 3_000, [10, 20, 30, 40]
    rb = made(FilteredSampler(StalenessAwareSampler(), ready=("reward",)), n, 1)
    rb.extend(rows_of(n, ready=lambda i: i in ready, version=lambda i: i // 10 % 5))
    rb.sampler.consumer_version = 4
    counts = Counter(rb.sample()["x"].item() for _ in range(400))
    assert set(counts) == set(ready)
    assert_proportional([counts[i] for i in ready], [1 / (5 - i // 10 % 5) for i in ready])


def test_a_sampler_by_staleness_draws_none_that_the_filter_would_refuse():
    """Rows that are ready, in place of others that are not any more, and none that is not."""
    n = 4_000
    inner = StalenessAwareSampler()
    rb = made(inner, n, 64)
    rows = rb.extend(rows_of(n, ready=lambda i: i in (5, 3_000)))
    assert len(set(rb.sample()["x"].tolist())) == 64
    rb.set_sampler(FilteredSampler(inner, ready=("reward",)))
    rb.sample()
    drawn = [inner.draw(rb.storage.extent(), 2, key).rows.tolist() for key in range(20)]
    assert {row for both in drawn for row in both} == {5, 3_000}
    rb.set_at_("reward", torch.tensor([torch.nan, 1.0]), rows[[5, 6]])
    drawn = [inner.draw(rb.storage.extent(), 2, key).rows.tolist() for key in range(20)]
    assert {row for both in drawn for row in both} == {6, 3_000}
    rb.set_at_("reward", torch.full((2,), torch.nan), rows[[6, 3_000]])
    before = rb.stats()["starved_draws"]
    with pytest.raises(NoSampleable, match="got none: rows do not count: those that are not ready"):
        rb.sample()
    assert rb.stats()["starved_draws"] == before + 1


@pytest.mark.parametrize("kind", ["consuming", "filter", "groups"])
def test_what_becomes_of_rows_is_counted(kind):
    sampler = {
        "consuming": lambda: ConsumingSampler(1),
        "filter": lambda: FilteredSampler(RandomSampler, ready=("reward",), max_uses=1),
        "groups": lambda: PromptGroupSampler(samples_per_group=1, group_key="x", ready=("reward",), max_uses=1),
    }[kind]()
    rb = made(sampler, 8, None)
    index = rb.extend(rows_of(8))
    used = set(rb.sample(2)["x"].tolist())
    left = [i for i in range(8) if i not in used]
    rb.remove(index[left[:2]])
    counted = {"used_rows": 2, "dropped_rows": 2, "evicted_rows": 0, "starved_draws": 0}
    assert counted.items() <= rb.stats().items()
    rb.remove(index[sorted(used)])  # those were used up: nothing is lost with them
    assert counted.items() <= rb.stats().items()
    assert sorted(rb.sample(4)["x"].tolist()) == left[2:]
    with pytest.raises(NoSampleable):
        rb.sample(2)
    counted |= {"used_rows": 6, "starved_draws": 1}
    assert counted.items() <= rb.stats().items()
    for _ in range(2):
        rb.extend(rows_of(8))  # the second time over rows that nothing has drawn
    assert (counted | {"evicted_rows": 8}).items() <= rb.stats().items()


def test_limits_beside_groups_that_are_used_up():
    rb = made(PromptGroupSampler(samples_per_group=2, group_key="x", max_uses=2))
    with pytest.raises(
        ValueError, match=r"MaxInFlight\(8\).*one by one.*groups that are never complete.*oldest make way"
    ):
        rb.limit(MaxInFlight(8))
    with pytest.raises(ValueError, match="ratio: expected at most 2, as often as the sampler draws a row, got 3"):
        rb.limit(SamplesPerInsert(3, min_size=4))
    assert rb.limits == ()
    rb.limit(SamplesPerInsert(2, min_size=4))
    with pytest.raises(ValueError, match="got 2: inserts would wait"):
        rb.set_sampler(PromptGroupSampler(samples_per_group=2, group_key="x", max_uses=1))
    rb.limit(None)
    rb.set_sampler(ConsumingSampler(1))
    rb.limit(MaxInFlight(8))
    with pytest.raises(ValueError, match="one by one"):
        rb.set_sampler(PromptGroupSampler(samples_per_group=2, group_key="x", max_uses=1))


def test_rows_in_flight_of_a_composed_filter_are_those_that_may_be_drawn():
    rb = made(FilteredSampler(ConsumingSampler(1), ready=("reward",)), 16, 2)
    rb.limit(MaxInFlight(4))
    rb.extend(rows_of(4))
    with pytest.raises(TimeoutError):
        rb.extend(rows_of(2), timeout=0)
    rb.sample()
    rb.extend(rows_of(2), timeout=0)
    assert rb.stats()["limit_in_flight"] == 4
