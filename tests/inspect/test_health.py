"""Advice: each case is made so that its number follows from how it was made."""

import numpy as np
import pytest
import torch

from engram import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer


def found(rb, name):
    (finding,) = (finding for finding in rb.health() if finding.name == name)
    return finding


def prioritized(priorities):
    n = len(priorities)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(n), sampler=PrioritizedSampler(n, 1.0, 0.4, eps=0.0, dtype=torch.float64)
    )
    rb.update_priority(rb.extend(torch.arange(n)), priorities)
    return rb


def test_few_rows_that_take_most_draws():
    priorities = torch.full((2_000,), 1e-3, dtype=torch.float64)
    priorities[:40] = 1.0
    finding = found(prioritized(priorities), "priorities")
    assert not finding.good
    assert finding.numbers["rows_of_most_draws"] == pytest.approx(38 / 2_000, abs=1e-3)
    assert "lower alpha" in finding.text
    assert "1.9 % of the rows take 90 % of the draws" in finding.text


def test_even_priorities_are_good():
    finding = found(prioritized(torch.ones(2_000, dtype=torch.float64)), "priorities")
    assert finding.good
    assert finding.numbers["rows_of_most_draws"] == pytest.approx(0.9, abs=1e-3)
    assert finding.numbers["priority_ess"] == pytest.approx(2_000)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("written", [300, 700])
def test_next_observations_that_are_stored_twice(lanes, written):
    """Of every 20 pairs of steps one is not of a trajectory: there the next observation is another."""
    rb = ReplayBuffer(storage=LazyTensorStorage(400 * lanes, lanes=lanes))
    for lane in range(lanes):
        obs = torch.arange(written, dtype=torch.float64) + 1e6 * lane
        next_ = obs + 1
        next_[19::20] = -1
        rb.extend({"obs": obs, "next": {"obs": next_}}, lane=lane)
    finding = found(rb, "next observations")
    assert not finding.good
    assert finding.numbers["bytes_per_row"] == 8
    assert finding.numbers["equal_frac"] == pytest.approx(0.95, abs=0.03)
    assert "NextFromFollowing" in finding.text


def test_next_observations_that_are_others_are_good():
    rb = ReplayBuffer(storage=LazyTensorStorage(400))
    rb.extend({"obs": torch.zeros(300, 4), "next": {"obs": torch.ones(300, 4)}})
    assert found(rb, "next observations").numbers["equal_frac"] == 0
    assert rb.health().good


def test_rows_that_are_overwritten_before_they_are_sampled():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
    rb.extend(torch.arange(100))
    rb.sample()
    assert found(rb, "replay ratio").good  # nothing is overwritten yet
    rb.extend(torch.arange(100))
    finding = found(rb, "replay ratio")
    assert not finding.good
    assert finding.numbers["replay_ratio"] == 10 / 200
    assert "overwritten before they are sampled" in finding.text


def test_rows_that_are_sampled_all_too_often():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=300)
    rb.extend(torch.arange(1))
    rb.sample()
    assert "too well" in found(rb, "replay ratio").text


def test_rows_that_are_never_sampled():
    rb = prioritized(torch.cat([torch.ones(100), torch.zeros(1_900)]).double())
    assert found(rb, "never sampled").text.startswith("not counted: rb.count_usage()")
    rb.count_usage()
    for _ in range(3):
        rb.sample(2_000)
    finding = found(rb, "never sampled")
    assert not finding.good
    assert finding.numbers["never_sampled_frac"] == pytest.approx(0.95, abs=0.01)


def test_lanes_that_are_no_longer_written_to():
    rb = ReplayBuffer(storage=LazyTensorStorage(300, lanes=3))
    for lane in range(3):
        rb.extend(torch.arange(100), lane=lane)
    assert found(rb, "stale rows").good
    rb.extend(torch.arange(700), lane=0)
    rb.extend(torch.arange(100), lane=2)
    finding = found(rb, "stale rows")
    assert not finding.good
    assert finding.numbers["stale_frac"] == pytest.approx(1 / 3)
    assert "lanes 1:" in finding.text


def test_what_it_looks_like():
    rb = prioritized(torch.ones(2_000, dtype=torch.float64))
    health = rb.health()
    assert repr(health) == f"Health(good=True, {len(health)} findings, 0 with advice)"
    assert [line.split()[0] for line in str(health).splitlines()] == ["ok"] * len(health)
    assert health.advice == []


def test_nothing_is_changed_or_counted():
    rb = prioritized(torch.ones(200, dtype=torch.float64))
    before, state = rb.stats(), rb.storage.memory.core.next_ticket
    rb.health()
    assert rb.stats()["sample_count"] == before["sample_count"]
    assert rb.storage.memory.core.next_ticket == state


def test_of_a_list_there_is_less_to_say():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([1, 2, 3])
    assert rb.health() == ()
    assert str(rb.health()).startswith("nothing to judge")


def test_an_empty_buffer_says_so():
    with pytest.raises(RuntimeError, match=r"^health: the buffer is empty\. Add data"):
        ReplayBuffer(storage=LazyTensorStorage(10)).health()


def test_numbers_are_plain():
    for finding in prioritized(torch.rand(200, dtype=torch.float64)).health():
        assert all(type(value) in (int, float) for value in finding.numbers.values()), finding
        assert not isinstance(finding.good, np.bool_)
