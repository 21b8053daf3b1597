"""Filters around any sampler: what is drawn is what the sampler draws among the rows that are ready, fresh and not used up."""

import math
import pickle
import random
from collections import Counter

import pytest
import torch

from engram import (
    ConsumingSampler,
    FilteredSampler,
    FrameStack,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxInFlight,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    Ragged,
    RandomSampler,
    RateLimited,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from tests.statistics_of import assert_proportional, assert_uniform


def made(sampler, capacity=64, batch_size=16, **given):
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size, **given)


def rows_of(n, ready=lambda i: True, version=lambda i: 0):
    return {
        "x": torch.arange(n),
        "reward": torch.tensor([float(i) if ready(i) else math.nan for i in range(n)]),
        "policy_version": torch.tensor([version(i) for i in range(n)]),
    }


def drawn(rb, batches, batch_size=None):
    """How often each row came."""
    counts = Counter()
    for _ in range(batches):
        counts.update(rb.sample(batch_size)["x"].tolist())
    return counts


# ---- distributions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [2, 40], ids=["many", "few"])
def test_uniform_draws_are_uniform_among_ready_and_fresh_rows(share):
    """Few: draws are among the rows that may be drawn; many: what else is drawn is refused."""
    torch.manual_seed(1)
    n = 400
    rb = made(FilteredSampler(RandomSampler, ready=("reward",), max_staleness=1), n, 64)
    rb.extend(rows_of(n, ready=lambda i: i % share == 0, version=lambda i: i % 3))
    rb.sampler.consumer_version = 2
    wanted = [i for i in range(n) if i % share == 0 and i % 3 >= 1]
    counts = drawn(rb, 40 if share > 2 else 200)
    assert set(counts) <= set(wanted)
    assert_uniform([counts[i] for i in wanted])


@pytest.mark.parametrize("share", [2, 20], ids=["many", "few"])
def test_draws_by_priority_are_in_proportion_among_ready_and_fresh_rows(share):
    torch.manual_seed(2)
    n = 120
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5)
    rb = made(FilteredSampler(sampler, ready=("reward",), max_staleness=0), n, 64)
    index = rb.extend(rows_of(n, ready=lambda i: i % share == 0, version=lambda i: i % 4 != 1))
    rb.sampler.consumer_version = 1
    priorities = [0.0 if i % 7 == 6 else 1.0 + i % 5 for i in range(n)]
    rb.update_priority(index, torch.tensor(priorities))
    leaves = [(p + 1e-8) ** 0.7 for p in priorities]
    wanted = [leaf if i % share == 0 and i % 4 != 1 and priorities[i] else 0.0 for i, leaf in enumerate(leaves)]
    counts = Counter()
    for _ in range(200):
        batch, info = rb.sample(return_info=True)
        rows = batch["x"].tolist()
        counts.update(rows)
        expected = torch.tensor([(leaves[i] / min(leaves)) ** -0.5 for i in rows])
        torch.testing.assert_close(info["priority_weight"], expected, rtol=1e-4, atol=1e-7)
        assert info["index_generation"].tolist() == [i + 1 for i in rows]
    assert all(wanted[i] for i in counts)
    assert_proportional([counts[i] for i in range(n) if wanted[i]], [w for w in wanted if w])


def test_uses_and_priorities_are_those_of_draws_one_after_another():
    """Two draws of a row of three, each used up by one: the probability of each pair, by hand."""
    torch.manual_seed(3)
    rb = made(FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.0, eps=0.0), max_uses=1), 3, 2)
    index = rb.extend(rows_of(3))
    weights = [1.0, 2.0, 5.0]
    rb.update_priority(index, torch.tensor(weights))
    counts, total = Counter(), sum(weights)
    for _ in range(3_000):
        counts[tuple(sorted(rb.sample()["x"].tolist()))] += 1
        state = rb.sampler.state_dict()
        rb.sampler.load_state_dict({**state, "filter": {"uses": torch.zeros(0, dtype=torch.int32)}})

    def pair(i, j):
        return weights[i] / total * weights[j] / (total - weights[i])

    pairs = [(0, 1), (0, 2), (1, 2)]
    assert_proportional([counts[it] for it in pairs], [pair(i, j) + pair(j, i) for i, j in pairs])


def test_windows_are_those_whose_rows_are_all_ready_and_equally_likely():
    torch.manual_seed(4)
    n, length, width = 80, 20, 4
    rb = made(FilteredSampler(SliceSampler(slice_len=width, traj_key="episode"), ready=("reward",)), n, 8 * width)
    gaps = {3, 4, 17, 45, 60, 61, 79}
    rb.extend({**rows_of(n, ready=lambda i: i not in gaps), "episode": torch.arange(n) // length})
    windows = [
        first
        for first in range(n - width + 1)
        if first // length == (first + width - 1) // length and not gaps & set(range(first, first + width))
    ]
    counts = Counter()
    for _ in range(150):
        batch, info = rb.sample(return_info=True)
        steps = batch["x"].reshape(-1, width)
        assert (steps.diff(dim=1) == 1).all()
        assert torch.equal(info["index"][0], batch["x"])
        assert torch.equal(info["next", "truncated"].reshape(-1, width).nonzero()[:, 1], torch.full((8,), width - 1))
        counts.update(steps[:, 0].tolist())
    assert set(counts) <= set(windows)
    assert_uniform([counts[first] for first in windows])


def test_windows_by_priority_start_in_proportion_among_those_that_are_ready():
    torch.manual_seed(5)
    n, width = 30, 3
    sampler = PrioritizedSliceSampler(n, 1.0, 0.5, slice_len=width, traj_key="episode", eps=0.0)
    rb = made(FilteredSampler(sampler, ready=("reward",)), n, 10 * width)
    index = rb.extend({**rows_of(n, ready=lambda i: i % 10 != 5), "episode": torch.arange(n) // 10})
    priorities = torch.tensor([1.0 + i % 4 for i in range(n)])
    rb.update_priority(index, priorities)
    starts = [i for i in range(n) if i % 10 <= 7 and i % 10 not in (3, 4, 5)]
    counts = Counter()
    for _ in range(120):
        counts.update(rb.sample()["x"].reshape(-1, width)[:, 0].tolist())
    assert set(counts) <= set(starts)
    assert_proportional([counts[i] for i in starts], priorities[starts].tolist())


def test_the_weights_of_a_sampler_by_staleness_hold_among_rows_that_are_left():
    torch.manual_seed(6)
    rb = made(FilteredSampler(StalenessAwareSampler(), ready=("reward",)), 40, 1)
    rb.extend(rows_of(40, ready=lambda i: i % 2 == 0, version=lambda i: i % 4))
    rb.sampler.consumer_version = 3
    counts = drawn(rb, 3_000)
    wanted = [i for i in range(40) if i % 2 == 0]
    assert set(counts) <= set(wanted)
    assert_proportional([counts[i] for i in wanted], [1 / (4 - i % 4) for i in wanted])


# ---- against a model -------------------------------------------------------------------------------------------------------


class Model:
    """Which rows may be drawn, in plain Python."""

    def __init__(self, capacity, uses, staleness):
        self.capacity, self.uses, self.staleness = capacity, uses, staleness
        self.rows = [None] * capacity  # [item, reward, version, uses left]
        self.version = self.written = 0

    def write(self, row, item, reward, version):
        self.rows[row] = [item, reward, version, self.uses]
        self.written += 1

    def may(self):
        return {
            row
            for row, it in enumerate(self.rows)
            if it is not None
            and not math.isnan(it[1])
            and not math.isnan(it[2])
            and (self.staleness is None or it[2] >= self.version - self.staleness)
            and (it[3] is None or it[3] > 0)
        }

    def take(self, row):
        assert row in self.may()
        if self.rows[row][3] is not None:
            self.rows[row][3] -= 1


@pytest.mark.parametrize("uses", [None, 1, 3])
@pytest.mark.parametrize("staleness", [None, 2])
@pytest.mark.parametrize("kind", [RandomSampler, PrioritizedSampler, SamplerWithoutReplacement, StalenessAwareSampler])
def test_rows_are_those_of_a_model_after_any_writes_edits_and_draws(kind, uses, staleness, tmp_path):
    capacity = 12
    for seed in range(6):
        dice, model = random.Random(seed), Model(capacity, uses, staleness)
        torch.manual_seed(seed)
        inner = kind(alpha=0.6, beta=0.4) if kind is PrioritizedSampler else kind()
        sampler = FilteredSampler(
            inner, ready=("reward",), max_uses=uses, max_staleness=-1 if staleness is None else staleness
        )
        storage = (
            LazyMemmapStorage(capacity, scratch_dir=tmp_path / str(seed))
            if seed % 3 == 0
            else LazyTensorStorage(capacity)
        )
        rb = ReplayBuffer(storage=storage, sampler=sampler)
        item = 0
        for _ in range(120):
            reward = math.nan if dice.random() < 0.4 else float(dice.randrange(9))
            what = dice.randrange(10)
            if what < 3:
                n = dice.randrange(1, 4)
                versions = [float(dice.randrange(max(0, model.version - 4), model.version + 2)) for _ in range(n)]
                data = {
                    "x": torch.arange(item, item + n),
                    "reward": torch.full((n,), reward),
                    "policy_version": torch.tensor(versions),
                }
                for at, row in enumerate(rb.extend(data).tolist()):
                    model.write(row, item + at, reward, versions[at])
                item += n
            elif what < 5 and len(rb.storage):
                row = dice.randrange(len(rb.storage))
                rb.set_at_("reward", torch.tensor([reward]), torch.tensor([row]))
                model.rows[row][1] = reward
            elif what == 5 and staleness is not None:
                model.version += 1
                rb.sampler.consumer_version = model.version
            elif what == 6 and kind is PrioritizedSampler and len(rb.storage):
                rb.update_priority(
                    torch.tensor([dice.randrange(len(rb.storage))]), torch.tensor([1.0 + dice.randrange(3)])
                )
            elif what == 7 and dice.random() < 0.1:
                rb.empty()
                model.rows, model.version = [None] * capacity, 0
            elif len(rb.storage):
                may, size = model.may(), dice.randrange(1, 6)
                assert set(rb.sampler._attached().core.drawable_rows().tolist()) == may
                if kind is not SamplerWithoutReplacement:
                    assert rb.can_sample(size) == bool(may)
                try:
                    batch, info = rb.sample(size, return_info=True)
                except NoSampleable:
                    # An epoch may have passed over all of them before they could be drawn.
                    assert not may or kind is SamplerWithoutReplacement
                    continue
                rows = info["index"].tolist()
                for row, x in zip(rows, batch["x"].tolist(), strict=True):
                    assert model.rows[row][0] == x
                    model.take(row)
                if kind is not SamplerWithoutReplacement:
                    left = sum(model.rows[row][3] or 0 for row in may) + len(rows)
                    assert len(rows) == (size if uses is None else min(size, left))
            if uses is not None:
                assert len(rb) == len(model.may())
        rb.close()


# ---- the rest of a sampler ------------------------------------------------------------------------------------------------


def test_counts_say_what_became_of_rows():
    rb = made(FilteredSampler(RandomSampler, ready=("reward",), max_uses=1, max_staleness=0), 6, 2)
    rb.extend(rows_of(6, ready=lambda i: i != 5, version=lambda i: i // 2))
    assert {
        "drawable_rows": 5,
        "used_rows": 0,
        "expired_rows": 0,
        "evicted_rows": 0,
        "starved_draws": 0,
    }.items() <= rb.stats().items()
    rb.sampler.consumer_version = 1
    assert set(rb.sample()["x"].tolist()) <= {2, 3, 4}
    assert {"drawable_rows": 1, "used_rows": 2, "expired_rows": 2, "starved_draws": 0}.items() <= rb.stats().items()
    assert len(rb.sample()["x"]) == 1
    with pytest.raises(
        NoSampleable,
        match=r"not ready=\('reward',\) or those that were used max_uses=1 times or those whose 'policy_version'",
    ):
        rb.sample()
    assert rb.stats()["starved_draws"] == 2  # one found a row of two
    rb.extend(rows_of(6))  # takes the place of the three that were used up, and of three that were not
    assert rb.stats()["evicted_rows"] == 3


def test_late_fields_and_waiting_draws():
    rb = made(FilteredSampler(PrioritizedSampler(alpha=0.6, beta=0.4), ready=("reward",)), 8, 2)
    index = rb.extend(rows_of(4, ready=lambda i: False))
    assert not rb.can_sample()
    with pytest.raises(NoSampleable):
        rb.sample(timeout=0)
    rb.set_at_("reward", torch.tensor([1.0]), index[2:3])
    assert rb.can_sample()
    assert rb.sample()["x"].tolist() == [2, 2]
    assert len(rb) == 4  # nothing is used up


def test_an_epoch_passes_over_rows_that_may_not_be_drawn():
    rb = made(FilteredSampler(SamplerWithoutReplacement(), ready=("reward",)), 10, 4)
    rb.extend(rows_of(10, ready=lambda i: i % 3 == 0))
    for _ in range(3):
        assert sorted(sum((batch["x"].tolist() for batch in rb), [])) == [0, 3, 6, 9]


def test_iterating_uses_all_rows_up_once():
    rb = made(FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.4), max_uses=2), 20, 6)
    rb.extend(rows_of(20))
    rb.update_priority(torch.arange(20), torch.arange(20.0) + 1)
    assert Counter(sum((batch["x"].tolist() for batch in rb), [])) == dict.fromkeys(range(20), 2)
    assert len(rb) == 0
    rb.mark_update(torch.tensor([3, 4]))
    assert sorted(sum((batch["x"].tolist() for batch in rb), [])) == [3, 3, 4, 4]


def test_rows_without_a_priority_leave_a_batch_short_or_raise():
    rb = made(FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.4, eps=0.0), max_uses=1), 8, 4)
    rb.extend(rows_of(8))
    rb.update_priority(torch.arange(8), torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]))
    assert sorted(rb.sample()["x"].tolist()) == [0, 1]
    with pytest.raises(NoSampleable):
        rb.sample()


def test_a_list_counts_uses_of_what_another_sampler_draws():
    rb = ReplayBuffer(
        storage=ListStorage(10), sampler=FilteredSampler(RandomSampler, max_uses=1), batch_size=3, collate_fn=list
    )
    rb.extend([10, 11, 12, 13])
    assert sorted(sum(rb, [])) == [10, 11, 12, 13]
    with pytest.raises(TypeError, match="expected a tensor storage"):
        ReplayBuffer(storage=ListStorage(10), sampler=FilteredSampler(RandomSampler, ready=("reward",)))


def test_inserts_wait_until_rows_are_used_up():
    rb = made(FilteredSampler(PrioritizedSampler(alpha=0.6, beta=0.4), max_uses=1), 8, 2).limit(MaxInFlight(4))
    rb.extend(rows_of(4))
    with pytest.raises(RateLimited):
        rb.extend(rows_of(2), timeout=0)
    rb.sample()
    rb.extend(rows_of(2), timeout=0)
    assert rb.stats()["limit_in_flight"] == 4


def test_expanders_go_around_it():
    data = {**rows_of(12, ready=lambda i: i % 2 == 0), "episode": torch.zeros(12, dtype=torch.int64)}
    data["next"] = {"reward": torch.ones(12)}
    sampler = NStep(FilteredSampler(RandomSampler, ready=("reward",)), 3, 1.0, traj_key="episode")
    rb = made(sampler, 12, 32)
    rb.extend(data)
    batch = rb.sample()
    assert set((batch["x"] % 2).tolist()) == {0}
    assert batch["next"]["reward"].max() == 3
    windows = FilteredSampler(SliceSampler(slice_len=2, traj_key="episode"), ready=("reward",))
    rb = made(FrameStack(windows, 2, None, ["x"]), 12, 8)
    rb.extend({**data, **rows_of(12, ready=lambda i: i in (4, 5, 6))})
    assert set(rb.sample()["x"][..., -1].flatten().tolist()) <= {4, 5, 6}


def test_it_is_as_before_in_a_copy_a_state_and_a_reopened_store(tmp_path):
    sampler = FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.4), ready=("reward",), max_uses=1, max_staleness=3)
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "s"), sampler=sampler, batch_size=2)
    rb.extend(rows_of(10, ready=lambda i: i % 2 == 0, version=lambda i: i))
    rb.sampler.consumer_version = 5
    rb.sampler.beta = 0.75
    first = set(rb.sample()["x"].tolist())
    state = rb.state_dict()
    copied = pickle.loads(pickle.dumps(rb.sampler))
    assert repr(copied) == repr(rb.sampler)
    assert (copied.consumer_version, copied.beta) == (5, 0.75)
    rb.close()
    again = ReplayBuffer.open(tmp_path / "s", batch_size=2)
    assert repr(again.sampler) == repr(sampler)
    assert (again.sampler.consumer_version, again.sampler.beta) == (5, 0.75)
    other = made(copied, 10, 2)
    other.load_state_dict(state)
    for one in (again, other):
        assert set(sum((batch["x"].tolist() for batch in one), [])) | first == {2, 4, 6, 8}
        assert len(one) == 0
    other.load_state_dict(state)
    assert set(sum((batch["x"].tolist() for batch in other), [])) | first == {2, 4, 6, 8}
    again.close()


def test_an_index_has_one_set_of_rules():
    rb = made(FilteredSampler(RandomSampler, ready=("reward",), max_uses=1), 8, 2)
    rb.extend(rows_of(8))
    rb.sample()
    shared = ReplayBuffer(
        storage=rb.storage,
        sampler=FilteredSampler(PrioritizedSampler(alpha=1, beta=1), ready=("reward",), max_uses=1),
        batch_size=10,
    )
    assert len(shared.sample()["x"]) == 6
    for other in (
        FilteredSampler(RandomSampler, ready=("reward",), max_uses=2),
        FilteredSampler(RandomSampler, ready=("reward",)),
        FilteredSampler(RandomSampler, ready=("x2",)),
        ConsumingSampler(),
    ):
        with pytest.raises(KeyError if getattr(other, "ready", None) == ("x2",) else IncompatibleStore):
            ReplayBuffer(storage=rb.storage, sampler=other, batch_size=1).sample()


def test_what_it_refuses():
    for refused in (
        SliceSamplerWithoutReplacement(slice_len=2),
        StreamingSliceSampler(slice_len=2),
        FilteredSampler(RandomSampler, max_uses=1),
        PromptGroupSampler(num_groups=1),
        NStep(RandomSampler(), 2, 0.9),
        3,
    ):
        with pytest.raises((TypeError, ValueError), match="FilteredSampler: "):
            FilteredSampler(refused, ready=("reward",))
    with pytest.raises(ValueError, match="another than a ConsumingSampler has"):
        FilteredSampler(ConsumingSampler(2), ready=("reward",), max_uses=1)
    with pytest.raises(ValueError, match="which share rows"):
        FilteredSampler(SliceSampler(slice_len=2), max_uses=1)
    with pytest.raises(ValueError, match="normalize"):
        FilteredSampler(PrioritizedSampler(alpha=1, beta=1, normalize="batch"), ready=("reward",))
    with pytest.raises(ValueError, match="one of ready, max_uses and max_staleness"):
        FilteredSampler(RandomSampler())
    with pytest.raises(ValueError, match="max_uses"):
        FilteredSampler(RandomSampler(), max_uses=0)
    with pytest.raises(TypeError, match="sequence of fields"):
        FilteredSampler(RandomSampler(), ready="reward")
    rb = made(FilteredSampler(RandomSampler, ready=("x",)), 4, 1)
    rb.extend(rows_of(4))
    with pytest.raises(TypeError, match="floating numbers"):
        rb.sample()
    rb = made(FilteredSampler(SliceSampler(slice_len=2, traj_key="episode"), ready=("reward",)), 4, 2)
    rb.extend({**rows_of(4, ready=lambda i: i % 2 == 0), "episode": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(NoSampleable, match="1000 draws"):
        rb.sample()


def test_rows_whose_items_newer_rows_need_count_as_evicted():
    """Of a model of the ring: the oldest rows make way, and those count that were still to be drawn."""
    chance = random.Random(3)
    storage = LazyTensorStorage(100, ragged={"text": Ragged("bytes", max_length=10)}, ragged_bytes=60)
    sampler = FilteredSampler(RandomSampler(), ready=("reward",), max_uses=1)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=1, generator=torch.Generator().manual_seed(2))
    rb.extend({"id": torch.tensor([-1]), "text": [b""], "reward": torch.ones(1)})
    assert rb.sample()["id"].tolist() == [-1]  # from here on the filter counts
    written, drawn, evicted, removed = 0, set(), 0, set()
    for _ in range(60):
        before = set(rb[:]["id"].tolist())
        n = chance.randint(1, 5)
        rb.extend({"id": torch.arange(written, written + n), "text": [b"x" * 10] * n, "reward": torch.ones(n)})
        written += n
        evicted += len(before - set(rb[:]["id"].tolist()) - drawn - {-1})
        assert rb.stats()["evicted_rows"] == evicted
        for _ in range(chance.randint(0, 3)):
            if rb.can_sample():
                drawn.update(rb.sample()["id"].tolist())
        if chance.random() < 0.3 and len(left := rb[:]["id"]) > 1:  # one that is removed was not evicted
            gone = int(left[-1])
            rb.remove(rb.storage.extent().rows(torch.tensor([len(left) - 1])))
            removed.add(gone)
            assert rb.stats()["evicted_rows"] == evicted
    assert evicted > 20
    assert drawn
    assert removed
