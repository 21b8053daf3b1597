"""Batches of ensembles: the choice of members, and that their rows are the rows of batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from engram import (
    Compose,
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RewardScaling,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SampleUnit,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
    WindowSpec,
)
from tests.members.buffers import APART, check_rows, member, members, rows, storages
from tests.statistics_of import assert_proportional, assert_uniform

SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(100, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices-epoch": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "priority-slices": lambda: PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=2),
    "consuming": lambda: ConsumingSampler(1000),
}


@pytest.mark.parametrize("storage", ["RAM", "directory", "list"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_are_those_that_the_batch_says(tmp_path, storage, sampler):
    if storage == "list" and ("slices" in sampler):
        pytest.skip("lists have no fields")
    both = members(10, 20, 15, storage=storages(tmp_path)[storage], sampler=SAMPLERS[sampler])
    rb = ReplayBufferEnsemble(*both, num_buffer_sampled=4)
    for _ in range(10):
        batch, info = rb.sample(24, return_info=True)
        assert batch.shape == (4, 6)
        check_rows(batch)
        assert torch.equal(info["index", "index"], batch["index", "index"])
        assert torch.equal(info["index", "buffer_ids"], batch["index", "buffer_ids"])
        assert bool((batch["index", "buffer_ids"] == batch["index", "buffer_ids"][:, :1]).all())
        assert ("priority_weight" in batch.keys()) == ("priority" in sampler)
        if "slices" in sampler:
            assert bool((batch["a"][:, 1::2] == batch["a"][:, ::2] + 1).all())
            assert bool(batch["next", "truncated"][:, 1::2].all())
    rb.close()


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 1 << 40)
)
@settings(max_examples=40)
def test_parts_are_of_one_member_each(sizes, parts, of_each, seed):
    generator = torch.Generator().manual_seed(seed)
    rb = ReplayBufferEnsemble(*members(*sizes), num_buffer_sampled=parts, generator=generator)
    batch = rb.sample(parts * of_each)
    assert batch.shape == (parts, of_each)
    check_rows(batch)
    assert bool((batch["index", "index"] < torch.tensor(sizes)[batch["index", "buffer_ids"]]).all())


def test_each_member_gives_its_part_in_order():
    rb = ReplayBufferEnsemble(*members(5, 6, 7), sample_from_all=True)
    for _ in range(5):
        assert rb.sample(12)["index", "buffer_ids"].tolist() == [[0] * 4, [1] * 4, [2] * 4]


@pytest.mark.parametrize(("p", "weights"), [(None, [1, 1, 1]), ([1, 0, 3], [1, 0, 3]), ("sampleable", [5, 10, 25])])
def test_members_are_as_likely_as_they_are_to_be(p, weights):
    generator = torch.Generator().manual_seed(5)
    rb = ReplayBufferEnsemble(*members(5, 10, 25), p=p, num_buffer_sampled=100, generator=generator)
    ids = torch.cat([rb.sample(100)["index", "buffer_ids"] for _ in range(30)])
    assert_proportional(ids.flatten().bincount(minlength=3).tolist(), weights)


def test_rows_of_a_member_are_equally_likely():
    rb = ReplayBufferEnsemble(*members(5, 4), generator=torch.Generator().manual_seed(3), num_buffer_sampled=4)
    drawn = torch.cat([rb.sample(400)["a"].flatten() for _ in range(5)])
    assert_uniform(drawn[drawn < APART].bincount(minlength=5).tolist())
    assert_uniform((drawn[drawn >= APART] - APART).bincount(minlength=4).tolist())


def test_a_change_of_weights_counts_for_the_next_batch():
    rb = ReplayBufferEnsemble(*members(5, 5), num_buffer_sampled=8)
    for only in (0, 1):
        rb.sampler.p = [1.0 - only, only]
        assert set(rb.sample(8)["index", "buffer_ids"].flatten().tolist()) == {only}


def test_sampleable_leaves_out_members_that_cannot_give_a_part():
    sizes = [(0, RandomSampler), (4, lambda: SliceSampler(slice_len=5)), (30, lambda: SliceSampler(slice_len=5))]
    some = [member(number, n, sampler=sampler) for number, (n, sampler) in enumerate(sizes)]
    rb = ReplayBufferEnsemble(*some, p="sampleable", num_buffer_sampled=3)
    assert rb.can_sample(15)
    assert set(rb.sample(15)["index", "buffer_ids"].flatten().tolist()) == {2}
    some[2].empty()
    assert not rb.can_sample(15)
    with pytest.raises(NoSampleable, match="expected a member"):
        rb.sample(15)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_draws_follow_from_the_generator(sampler, prefetch):
    def drawn(seed, prefetch):
        torch.manual_seed(99)  # must not matter
        rb = ReplayBufferEnsemble(
            *members(20, 20, sampler=SAMPLERS[sampler]),
            batch_size=8,
            num_buffer_sampled=4,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(seed),
        )
        batches = [rb.sample() for _ in range(6)]
        rb.close()
        return [(batch["index", "buffer_ids"].tolist(), batch["index", "index"].tolist()) for batch in batches]

    # An epoch's order follows from its first key, which a store draws.
    assert drawn(1, 0) == drawn(1, prefetch)
    assert drawn(1, 0) != drawn(2, 0)


def test_a_generator_is_set_and_the_default_one_is_asked_at_the_moment():
    rb = ReplayBufferEnsemble(*members(20, 20))
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append(rb.sample(8)["a"].tolist())
    rb.set_rng(torch.Generator().manual_seed(7))
    seen.append(rb.sample(8)["a"].tolist())
    assert seen[0] == seen[1] == seen[2]


def test_epochs_of_members_go_on_across_parts():
    one = member(0, 10, sampler=SamplerWithoutReplacement())
    rb = ReplayBufferEnsemble(one, num_buffer_sampled=2)
    drawn = torch.cat(
        [rb.sample(8)["a"].flatten() for _ in range(5)]
    )  # 40 rows: four epochs, of which parts have 4 rows
    assert drawn.bincount(minlength=10).tolist() == [4] * 10


def test_transforms_and_collate_functions_of_members_come_first():
    seen = []

    def note(name):
        def change(data):
            seen.append((name, tuple(data.shape)))
            return data

        return change

    first = member(
        0, 5, transform=Compose(note("first"), RewardScaling(0.0, 2.0, in_keys=["x"])), collate_fn=note("collate")
    )
    rb = ReplayBufferEnsemble(first, member(1, 5), transform=note("all"), sample_from_all=True)
    batch = rb.sample(6)
    assert seen == [("collate", (3,)), ("first", (3,)), ("all", (2, 3))]
    assert torch.equal(batch["x"][0].squeeze(-1), 2 * batch["index", "index"][0].float())
    assert torch.equal(batch["x"][1].squeeze(-1), batch["index", "index"][1].float())


def test_a_collate_function_gets_the_parts():
    def collate(parts):
        assert [part.shape for part in parts] == [(3,), (3,)]
        return torch.stack([part["a"] for part in parts])

    batch, info = ReplayBufferEnsemble(*members(5, 5), collate_fn=collate, sample_from_all=True).sample(
        6, return_info=True
    )
    assert torch.equal(batch, APART * info["index", "buffer_ids"] + info["index", "index"])


@pytest.mark.parametrize("make", [lambda a: a, lambda a: {"a": a, "next": {"b": a}}, lambda a: (a, a.float())])
def test_other_rows_than_tensordicts_say_where_they_are_beside(make):
    some = []
    for number in range(2):
        some.append(ReplayBuffer(storage=LazyTensorStorage(10)))
        some[-1].extend(make(APART * number + torch.arange(10)))
    rb = ReplayBufferEnsemble(*some, num_buffer_sampled=3, p=[1, 2])
    batch, info = rb.sample(12, return_info=True)
    first = batch if isinstance(batch, torch.Tensor) else batch["a"] if isinstance(batch, dict) else batch[0]
    assert torch.equal(first, APART * info["index", "buffer_ids"] + info["index", "index"])
    assert type(batch) is type(make(torch.zeros(2)))


def test_windows_keep_their_shape():
    sampler = [SliceSampler(window=WindowSpec(length=3, burn_in=1), flat=False) for _ in range(2)]
    rb = ReplayBufferEnsemble(*(member(i, 20, sampler=one) for i, one in enumerate(sampler)), sample_from_all=True)
    batch = rb.sample(12)
    assert batch.shape[0] == 2
    assert batch.shape[2] == 4
    check_rows(batch)
    assert batch["learning_mask"].shape == batch.shape


def test_expanders_of_members_count():
    def made(number):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=NStep(RandomSampler(), 2, gamma=0.5))
        reward = torch.ones(30, 1)
        rb.extend(rows(number, 30).set(("next", "reward"), reward))
        return rb

    batch = ReplayBufferEnsemble(made(0), made(1), sample_from_all=True).sample(40)
    assert set(batch["next", "reward"].flatten().tolist()) == {1.0, 1.5}
    check_rows(batch)


def test_weights_are_one_where_there_are_no_priorities():
    prioritized = member(0, 10, sampler=PrioritizedSampler(100, 1.0, 1.0))
    rb = ReplayBufferEnsemble(prioritized, member(1, 10), sample_from_all=True)
    rb.update_priority(
        {"buffer_ids": torch.zeros(10, dtype=torch.int64), "index": torch.arange(10)}, torch.arange(1.0, 11.0)
    )
    batch = rb.sample(40)
    assert torch.allclose(batch["priority_weight"][0], 1.0 / (batch["index", "index"][0] + 1.0))
    assert bool((batch["priority_weight"][1] == 1.0).all())
    assert bool((batch["index_generation"][1] == -1).all())


def test_staleness_of_all_members_is_told():
    def made(number):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=StalenessAwareSampler())
        rb.extend(rows(number, 10, policy_version=torch.full((10,), number)))
        return rb

    rb = ReplayBufferEnsemble(made(0), made(1), sample_from_all=True)
    assert rb.sample(8, return_info=True)[1]["staleness"].shape == (2, 4)


def test_ragged_items_become_a_lazy_stack():
    def made(number):
        rb = ReplayBuffer(storage=ListStorage(5))
        rb.extend([TensorDict({"a": torch.full((number + 2,), number)}) for _ in range(5)])
        return rb

    batch = ReplayBufferEnsemble(made(0), made(1), sample_from_all=True).sample(4)
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch[1]["a"].tolist() == [[1] * 3] * 2


def test_prefetched_batches_are_in_pinned_form_and_end_with_the_ensemble():
    with ReplayBufferEnsemble(*members(5, 5), batch_size=4, prefetch=2) as rb:
        assert rb.prefetch == 2
        for _ in range(5):
            check_rows(rb.sample())
        rb.synchronize()
        assert rb.stats()["prefetch_queue_size"] == 2
        rb.empty()
        with pytest.raises(NoSampleable):
            rb.sample()


@pytest.mark.parametrize("output", ["numpy", "namedtuple"])
def test_batches_have_the_form_that_is_asked_for(output):
    batch = ReplayBufferEnsemble(*members(5, 5), output=output).sample(4)
    index = batch["index"]["buffer_ids"] if output == "numpy" else batch.index.buffer_ids
    assert index.shape == (2, 2)


def test_iteration_goes_on():
    rb = ReplayBufferEnsemble(*members(5, 5, sampler=SamplerWithoutReplacement), batch_size=4)
    batches = iter(rb)
    assert [next(batches).shape for _ in range(6)] == [(2, 2)] * 6
    assert rb.next().device is None


def test_a_member_of_two_ensembles_and_of_one_twice():
    one, other = members(5, 6)
    assert ReplayBufferEnsemble(one, one).sample(4).shape == (2, 2)
    assert ReplayBufferEnsemble(other, one).sample(4).shape == (2, 2)


@pytest.mark.parametrize("largest", [1.7e308, 1e308, 1.0, 1e-320])
def test_weights_count_relative_to_each_other_however_large(largest):
    sampler = SamplerEnsemble(*(RandomSampler() for _ in range(3)), p=[largest, largest / 2, 0])
    torch.testing.assert_close(sampler.p, torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64), rtol=1e-2, atol=0)
    rb = ReplayBufferEnsemble(*members(5, 5, 5), p=[largest, largest, 0], num_buffer_sampled=64)
    assert set(rb.sample(64)["index", "buffer_ids"].flatten().tolist()) == {0, 1}


class Pairs(SampleUnit):
    """Two rows for each that is drawn."""

    def expand(self, index, info, storage):
        return torch.stack([index, (index + 1) % len(storage)], -1).flatten(), info


class CountedPairs(Pairs):
    total = 2


@pytest.mark.parametrize("unit", [Sequence(length=4), Sequence(length=3, burn_in=1), CountedPairs()])
def test_members_whose_rows_stand_for_several(unit):
    """Each part is what its member draws by itself, ids of windows and all."""
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(50), sample_unit=unit) for _ in range(2)]
    for number, one in enumerate(members):
        step = torch.arange(40)
        one.extend(TensorDict({"step": step + 100 * number, "next": {"done": step % 10 == 9}}, [40]))
    batch = ReplayBufferEnsemble(*members, batch_size=12, num_buffer_sampled=3).sample()
    assert batch.shape == (3, 4 * unit.total)
    steps = batch["step"].view(3, 4, unit.total)
    assert ((steps >= 100) == (batch["index", "buffer_ids"].view(steps.shape) == 1)).all()
    assert torch.equal(batch["index", "index"].view(steps.shape), steps % 100)
    if isinstance(unit, Sequence):
        assert torch.equal(batch["sequence_id"], torch.arange(4).repeat_interleave(unit.total).expand(3, -1))


def test_a_unit_that_does_not_say_how_many_rows_is_refused_by_name():
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sample_unit=Pairs())
    one.extend(TensorDict({"step": torch.arange(40)}, [40]))
    with pytest.raises(RuntimeError, match=r"expected 4 rows of .*Pairs.*got 8.* The unit's total says"):
        ReplayBufferEnsemble(one).sample(4)
