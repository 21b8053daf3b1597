"""RandomSampler: the distribution, and where its randomness comes from."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import engram
from engram import (
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictRoundRobinWriter,
)
from tests.samplers.machine import SETTINGS, StoreMachine, stressed
from tests.statistics_of import assert_uniform


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def buffer(rows, capacity=None, *, storage=LazyTensorStorage, generator=None, tracks=False, **kwargs):
    """A buffer whose live rows hold their own number."""
    capacity = capacity or rows
    rb = ReplayBuffer(
        storage=storage(capacity, **kwargs),
        sampler=RandomSampler(),
        generator=generator or seeded(0),
        writer=RoundRobinWriter(track_generations=tracks),
    )
    if rows:
        rb.extend(torch.arange(rows))
    return rb


# Uniform draws are made in the native core, or by the sampler where something else needs to see them.
WAYS = {"native": {}, "sampler": {"tracks": True}, "list": {"storage": ListStorage}}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(
    ("rows", "capacity"), [(1, 1), (1, 8), (2, 2), (3, 7), (7, 7), (13, 26), (13, 13), (1000, 1000)]
)
def test_every_live_row_is_equally_likely(rows, capacity, way):
    rb = buffer(rows, capacity, generator=seeded(rows * capacity), **way)
    counts = torch.bincount(rb.sample(200 * rows), minlength=capacity)
    assert_uniform(counts[:rows].tolist())
    assert not counts[rows:].any()


@pytest.mark.parametrize("way", [{}, {"tracks": True}], ids=["native", "sampler"])
@pytest.mark.parametrize("written", [(5, 1, 3), (5, 5, 5), (0, 2, 0), (9, 1, 4)])
def test_rows_of_unevenly_filled_lanes_are_equally_likely(written, way):
    rb = buffer(0, 15, lanes=3, generator=seeded(sum(written)), **way)
    live = []
    for lane, n in enumerate(written):
        if n:
            rb.extend(torch.arange(n), lane=lane)
        live += [5 * lane + i for i in range(min(n, 5))]
    _, info = rb.sample(300 * len(live), return_info=True)
    counts = Counter(info["index"].tolist())
    assert sorted(counts) == live
    assert_uniform(counts.values())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("batch_size", [1, 8], ids=["across calls", "within a call"])
def test_consecutive_draws_are_independent(batch_size, way):
    rb = buffer(4, generator=seeded(batch_size), **way)
    draws = torch.cat([rb.sample(batch_size) for _ in range(3200 // batch_size)]).tolist()
    for distance in (1, 2, 8):
        pairs = Counter(zip(draws, draws[distance:], strict=False))
        assert_uniform([pairs[a, b] for a in range(4) for b in range(4)])


def test_the_same_places_of_consecutive_batches_are_independent():
    rb = buffer(4, generator=seeded(5))
    batches = torch.stack([rb.sample(16) for _ in range(400)])
    pairs = Counter(zip(batches[:-1].flatten().tolist(), batches[1:].flatten().tolist(), strict=True))
    assert_uniform([pairs[a, b] for a in range(4) for b in range(4)])


def test_a_batch_may_be_larger_than_the_buffer():
    rb = buffer(3)
    assert rb.sample(100).shape == (100,)
    assert rb.can_sample(100)
    assert not rb.sampler.ran_out


def test_only_live_rows_after_empty():
    rb = buffer(10)
    rb.empty()
    assert not rb.can_sample(1)
    with pytest.raises(NoSampleable):
        rb.sample(1)
    rb.extend(torch.tensor([70, 71]))
    assert set(rb.sample(64).tolist()) == {70, 71}


# ---- where the randomness comes from -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
class TestReproducible:
    def draws(self, rb, calls=5):
        return torch.cat([rb.sample(7) for _ in range(calls)]).tolist()

    def test_from_a_generator(self, way):
        a, b, other = (buffer(50, generator=seeded(s), **way) for s in (3, 3, 4))
        torch.manual_seed(0)
        first = self.draws(a)
        torch.manual_seed(1)
        assert self.draws(b) == first
        assert self.draws(other) != first
        assert self.draws(a) != first  # it goes on

    def test_from_manual_seed_at_any_time(self, way):
        rb = buffer(50, **way)
        rb.set_rng(None)
        torch.manual_seed(1)
        first = self.draws(rb)
        torch.manual_seed(1)
        assert self.draws(rb) == first
        again = buffer(50, **way)
        again.set_rng(None)
        torch.manual_seed(1)
        assert self.draws(again) == first
        assert self.draws(again) != first

    def test_the_default_generator_is_left_alone_where_another_is_given(self, way):
        rb = buffer(50, generator=seeded(3), **way)
        before = torch.get_rng_state()
        self.draws(rb)
        assert torch.equal(torch.get_rng_state(), before)

    def test_set_rng(self, way):
        rb = buffer(50, generator=seeded(3), **way)
        first = self.draws(rb)
        rb.set_rng(seeded(3))
        assert self.draws(rb) == first

    def test_calls_are_counted_not_rows(self, way):
        """One key per draw: what follows does not depend on how large the draws before were."""
        a, b = buffer(50, generator=seeded(3), **way), buffer(50, generator=seeded(3), **way)
        a.sample(3)
        b.sample(30)
        assert self.draws(a) == self.draws(b)

    def test_writes_take_nothing_from_the_generator(self, way):
        a, b = buffer(50, generator=seeded(3), **way), buffer(50, generator=seeded(3), **way)
        for i in range(50):
            b.add(torch.tensor(i))
        assert self.draws(a) == self.draws(b)


def test_threads_change_nothing():
    threads = engram.num_threads()
    batches = []
    try:
        for n in (1, 4):
            engram.set_num_threads(n)
            assert engram.num_threads() == n
            rb = ReplayBuffer(storage=LazyTensorStorage(300), generator=seeded(2))
            rb.extend(torch.arange(300 * 4096).reshape(300, 4096))
            batches.append(rb.sample(256))  # 8 MiB: large enough to be shared out
    finally:
        engram.set_num_threads(threads)
    assert torch.equal(*batches)


def test_keys_give_different_draws():
    sampler = RandomSampler()
    extent = buffer(1000).storage.extent()
    draws = [tuple(sampler.draw(extent, 8, key).rows.tolist()) for key in range(200)]
    assert len(set(draws)) == len(draws)
    assert sampler.draw(extent, 8, 7).rows.tolist() == list(draws[7])


def test_numpy_and_random_are_not_used():
    rb = buffer(50)
    np.random.seed(0)  # noqa: NPY002 - the global state is what must not be touched
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    rb.sample(10)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


# ---- the class ---------------------------------------------------------------------------------------------------------


def test_replacement_false_makes_the_other_sampler():
    assert type(RandomSampler()) is type(RandomSampler(replacement=True)) is RandomSampler
    other = RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert type(other) is SamplerWithoutReplacement
    assert (other.drop_last, other.shuffle) == (True, False)


@pytest.mark.parametrize("arguments", [{"drop_last": True}, {"replacement": True, "shuffle": False}, {"seed": 3}])
def test_unknown_arguments(arguments):
    with pytest.raises(TypeError, match=next(name for name in arguments if name != "replacement")):
        RandomSampler(**arguments)


def test_verbs_of_torchrl():
    rb = buffer(5)
    sampler = rb.sampler
    rows, info = sampler.sample(rb.storage, 40)
    assert set(rows.tolist()) <= set(range(5))
    assert len(rows) == 40
    assert info == {}
    assert sampler.can_sample(rb.storage, 4)
    assert not sampler.can_sample(LazyTensorStorage(3), 1)
    assert sampler.default_priority == 1.0
    assert sampler.add(0) is None
    assert sampler.extend([0]) is None
    assert sampler.mark_update([0]) is None
    torch.manual_seed(2)
    first = sampler.sample(rb.storage, 40)[0]
    torch.manual_seed(2)
    assert torch.equal(sampler.sample(rb.storage, 40)[0], first)


def test_stateless():
    sampler = RandomSampler()
    assert sampler.state_dict() == {}
    sampler.load_state_dict({})
    with pytest.raises(KeyError, match="counter"):
        sampler.load_state_dict({"counter": 3})
    assert repr(sampler) == "RandomSampler()"


def test_priorities_have_no_effect_and_that_is_said():
    rb = buffer(5)
    with pytest.warns(UserWarning, match=r"RandomSampler.*no effect"):
        rb.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(NoSampleable):
        RandomSampler().draw(buffer(0, 3).storage.extent(), 1, 0)


# ---- against a model ---------------------------------------------------------------------------------------------------


class Draws(StoreMachine):
    """Live rows and no others, whatever was written."""

    lists = True

    def make_sampler(self, draw):
        return RandomSampler()

    @rule(n=st.integers(1, 30))
    def draw(self, n):
        assert self.rb.can_sample(n) == bool(self.rings.live())
        if self.rings.live():
            rows, _ = self.drawn(n)
            assert len(rows) == n
        else:
            with pytest.raises(NoSampleable):
                self.rb.sample(n)

    @precondition(lambda self: self.rings.live())
    @rule()
    def every_row_comes(self):
        live = self.rings.live().keys()
        rows, _ = self.drawn(25 * len(live))  # that one does not: one in 10 ** 9
        assert set(rows) == live

    @rule(generations=st.booleans())
    def track(self, generations):
        """Where they are tracked, draws are made by the sampler."""
        self.rb.set_writer(TensorDictRoundRobinWriter(track_generations=generations))


TestDraws = pytest.mark.filterwarnings("ignore:sample. batch_size")(Draws.TestCase)
TestDraws.settings = SETTINGS
stressed(TestDraws)
