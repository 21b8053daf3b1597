"""What components declare that they can do, and what a buffer makes of it."""

import pytest
import torch

from engram import (
    Draw,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Traits,
    WritePlan,
)
from engram.samplers import declared
from tests.components import Newest


class Named(RandomSampler):
    """Adds a method, and overrides none of the protocol's."""

    def name(self):
        return "mine"


class Drawing(RandomSampler):
    def draw(self, extent, batch_size, key):
        return Draw(torch.zeros(batch_size, dtype=torch.int64))


class Observing(RandomSampler):
    def __init__(self):
        super().__init__()
        self.heard = []

    def observe(self, write, data):
        self.heard.append(None if write is None else write.rows.tolist())


class Updating(RandomSampler):
    def __init__(self):
        super().__init__()
        self.updates = []

    def update_priority(self, index, priority, *, generation=None):
        self.updates.append((index, priority))


class First:
    def draw(self, extent, batch_size, key):
        return Draw(torch.zeros(batch_size, dtype=torch.int64))


class Mixed(First, RandomSampler):
    pass


class Below(Drawing):
    pass


def buffer(sampler, storage=LazyTensorStorage):
    rb = ReplayBuffer(storage=storage(10), sampler=sampler, batch_size=4)
    rb.extend(torch.arange(10))
    return rb


def natively(rb, monkeypatch):
    """Whether a sample is one native call of the store."""
    calls = []
    memory = rb.storage.memory
    sample = type(memory).sample_unlimited
    monkeypatch.setattr(type(memory), "sample_unlimited", lambda *a, **k: calls.append(1) or sample(*a, **k))
    rb.sample()
    return bool(calls)


@pytest.mark.parametrize(
    ("sampler", "native"),
    [
        (RandomSampler, True),
        (Named, True),
        (Drawing, False),
        (Observing, False),
        (Updating, False),
        (Mixed, False),
        (Below, False),
    ],
)
def test_a_subclass_keeps_the_native_path_unless_it_overrides_what_that_replaces(sampler, native, monkeypatch):
    assert sampler.traits.draws_uniformly is native
    assert natively(buffer(sampler()), monkeypatch) is native


def test_what_is_overridden_is_called():
    assert buffer(Drawing()).sample().tolist() == [0] * 4
    assert buffer(Mixed()).sample().tolist() == [0] * 4
    rb = buffer(Observing())
    rb.empty()
    assert rb.sampler.heard == [list(range(10)), None]
    rb = buffer(Updating())
    rb.update_priority([1], [2.0])
    assert rb.sampler.updates == [([1], [2.0])]


@pytest.mark.parametrize("sampler", [PrioritizedSampler, SamplerWithoutReplacement, SliceSampler])
def test_overriding_draw_ends_the_native_reading_of_any_sampler(sampler):
    drawing = type("Drawing", (First, sampler), {})
    assert sampler.traits.reads_natively
    assert not drawing.traits.reads_natively
    assert drawing.traits == sampler.traits._replace(reads_natively=False, has_epochs=True)


def test_a_priority_of_ones_own_drawing():
    class Ordered(PrioritizedSampler):
        def draw(self, extent, batch_size, key):
            return Draw(torch.arange(batch_size))

    assert buffer(Ordered(10, 1.0, 1.0)).sample().tolist() == [0, 1, 2, 3]


def test_a_subclass_may_declare_its_own():
    class Declares(RandomSampler):
        traits = RandomSampler.traits._replace(draws_uniformly=False)

    assert not Declares.traits.draws_uniformly
    assert len(buffer(Declares()).sample()) == 4


def test_who_has_epochs():
    ends = {
        RandomSampler: False,
        SamplerWithoutReplacement: True,
        SliceSampler: False,
        SliceSamplerWithoutReplacement: True,
    }
    assert {sampler: sampler.traits.has_epochs for sampler in ends} == ends
    assert {sampler: sampler.traits.can_rewind for sampler in ends} == ends
    assert not NStep(RandomSampler(), 2, 0.9).traits.has_epochs
    assert NStep(SamplerWithoutReplacement(), 2, 0.9).traits.has_epochs
    assert NStep(Newest(), 2, 0.9).traits.has_epochs
    assert declared(Newest()).traits == Traits()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_sampler_of_the_protocol_keeps_its_epochs(storage, prefetch):
    class EveryThird(Newest):
        ran_out = False
        draws = 0

        def draw(self, extent, batch_size, key):
            self.draws += 1
            self.ran_out |= self.draws % 3 == 0
            return super().draw(extent, batch_size, key)

    rb = ReplayBuffer(storage=storage(10), sampler=EveryThird(), batch_size=2, prefetch=prefetch)
    rb.extend(torch.arange(4))
    assert [len(list(rb)) for _ in range(3)] == [3, 3, 3]


def test_a_sampler_of_the_protocol_may_declare_that_it_does_not_listen():
    class Deaf(Newest):
        traits = Traits(listens=False)

        def observe(self, write, data):
            assert write is None  # an emptied buffer it hears of

    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=Deaf())
    rb.extend(torch.arange(4))
    rb.empty()


def test_a_ring_that_places_rows_itself_does_not_append():
    class Renamed(RoundRobinWriter):
        pass

    class Placing(RoundRobinWriter):
        def place(self, extent, n, lane, data):
            return WritePlan(rows=torch.arange(n))

    assert Renamed.traits.appends
    assert not Placing.traits.appends
    assert not type("Mixed", (Placing, RoundRobinWriter), {}).traits.appends
    assert RoundRobinWriter(track_generations=True).traits.tracks_tickets
    assert not RoundRobinWriter.traits.tracks_tickets


def test_traits_are_frozen():
    with pytest.raises(AttributeError):
        RandomSampler.traits.listens = True
