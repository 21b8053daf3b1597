"""A buffer saved as a folder and loaded again. A1–A17 of the checkpoint tests."""

import os
import warnings

import pytest
import torch
from tensordict import TensorDict

from engram import (
    Compose,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ObservationNorm,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.checkpoint.checkpointer import Checkpointer
from engram.saved.inspection import verify
from tests.buffer.dumped import Through
from tests.buffer.states import STORAGES, L, buffer, items, kinds, twins
from tests.saved.system_calls import settled
from tests.twins import bits, contents, rows

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")


# ---- what a dump cannot hold ---------------------------------------------------------------------------------------------


def halved(batch):
    return batch.set("score", batch["score"] / 2)


class Doubled:
    """A transform of a user's own, without a state."""

    def forward(self, batch):
        return batch.set("score", batch["score"] * 2)


@pytest.mark.parametrize("way", ["dumps", "series"])
@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        ([halved], [], "halved"),
        ([lambda batch: batch], [], "<lambda>"),
        ([Doubled()], [], "Doubled"),
        ([halved, Doubled()], [halved], "halved, Doubled"),
        ([Compose(halved, Doubled()), halved], [Compose()], "halved, Doubled, halved"),
        ([halved], [halved], None),
        ([halved], [lambda batch: batch], None),
        ([], [halved], None),
        ([], [], None),
    ],
)
def test_functions_that_are_missing_where_a_dump_is_loaded_are_named(there, here, named, way, ram):
    def made(transforms):
        return buffer(transform=Compose(*transforms), n=4)

    rb, other, through = made(there), made(here), Through(ram)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        getattr(through, way)(rb, other)
    told = [str(one.message) for one in said if "transform" in str(one.message)]
    assert len(told) == (0 if named is None else 1)
    assert named is None or f"saved with the transforms {named}," in told[0]
    assert torch.equal(rb.storage[:]["score"], other.storage[:]["score"])


# ---- exact ---------------------------------------------------------------------------------------------------------------


@pytest.mark.stress(sample=32)
@pytest.mark.parametrize(("storage", "sampler", "writer"), list(kinds()))
def test_goes_on_as_if_it_had_never_been_saved(storage, sampler, writer, ram):
    both, through = twins(storage, sampler, writer, seed=len(storage) + 10 * len(sampler)), Through(ram)
    both.run(20)
    both.swap(through=through.dumps)
    both.run(20)
    both.swap(used=True, through=through.series)
    both.run(20)
    both.check()
    both.close()


@pytest.mark.parametrize("way", ["dumps", "series"])
@pytest.mark.parametrize(
    ("storage", "sampler", "writer"),
    [("memmap", "priority-slices", "generations"), ("lanes", "priority", "ring"), ("list", "live-max", "best")],
)
def test_for_a_thousand_operations(storage, sampler, writer, way, ram):
    both, through = twins(storage, sampler, writer, seed=2), Through(ram)
    both.run(100)
    both.swap(through=getattr(through, way))
    both.run(1000)
    both.check()
    both.close()


@pytest.mark.stress(sample=14)
@pytest.mark.parametrize("n", [0, 1, L - 1, L, L + 1, 3 * L + 7])
@pytest.mark.parametrize("storage", STORAGES)
def test_of_every_size(storage, n, ram):
    """Save, load, write, save, load."""
    both, through = twins(storage, "priority"), Through(ram)
    if n:
        both.extend(n)
    both.swap(through=through.dumps)
    both.sample()
    both.extend(2)
    both.swap(used=storage != "full", through=through.series)
    both.update()
    both.extend(L + 1)
    both.swap(through=through.series)
    both.sample()
    both.check()
    both.close()


@pytest.mark.parametrize("sampler", ["uniform", "epoch", "priority", "slices"])
@pytest.mark.parametrize("storage", ["ram", "memmap", "list"])
def test_of_a_buffer_that_was_never_written(storage, sampler, ram):
    if (storage, sampler) == ("list", "slices"):
        pytest.skip("lists have no trajectories")
    made = twins(storage, sampler)
    for way in (Through(ram).dumps, Through(ram).series):
        rb, used = made._make(), made._make()
        used.extend(rows(9))
        way(rb, used)
        assert len(used) == 0
        assert used.write_count == 0
        assert used.extend(rows(2)).tolist() == [0, 1]
        used.close()
        rb.close()
    made.close()


def test_rows_written_by_number(ram):
    """A row ahead of the cursor, holes below it."""
    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = buffer(), buffer()
        rb.extend(rows(L))
        rb.empty()
        rb.writer.write_at([2, 7], rows(2, 50))
        way(rb, other)
        assert bits(other[:]) == bits(rb[:])
        for n in (3, L):
            assert other.extend(rows(n)).tolist() == rb.extend(rows(n)).tolist()
            assert contents(other) == contents(rb)


def test_several_indexes(ram):
    def make(n):
        rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=n)
        more = [PrioritizedSampler(L, 1.0, 0.3, index="critic"), SliceSampler(slice_len=2, index="windows")]
        return rb, [ReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=2) for sampler in more]

    for way in (Through(ram).dumps, Through(ram).series):
        rb, (critic, _) = make(L + 3)
        critic.update_priority(torch.arange(4), torch.tensor([0.0, 2.0, 5e-324, 7.0], dtype=torch.float64))
        other, (its_critic, _) = make(2)
        way(rb, other)
        assert contents(other) == contents(rb)
        assert bits(its_critic.sampler.state_dict()) == bits(critic.sampler.state_dict())


# ---- generators and batches ahead ------------------------------------------------------------------------------------------


def test_generators(ram):
    """A given one goes on; torch's own only if that is asked for."""
    rb = buffer(n=9, generator=torch.Generator().manual_seed(5))
    rb.sample()
    rb.dumps(ram / "given")
    torch.manual_seed(3)
    free = buffer(n=9)
    free.sample()
    free.dumps(ram / "default")
    Checkpointer(ram / "series", free).save(1)
    drawn, freely = ([one.sample()["step"].tolist() for _ in range(5)] for one in (rb, free))

    for other in (buffer(), buffer(generator=torch.Generator().manual_seed(6))):
        before = torch.get_rng_state()
        other.loads(ram / "given")
        assert [other.sample()["step"].tolist() for _ in range(5)] == drawn
        assert torch.equal(torch.get_rng_state(), before), "a load does not reseed the program"
    for load in (
        lambda one, **more: one.loads(ram / "default", **more),
        lambda one, **more: Checkpointer(ram / "series", one).restore(resume="exact", **more),
    ):
        other = buffer()
        torch.manual_seed(4)
        load(other)
        assert torch.initial_seed() == 4
        load(other, default_rng=True)
        assert [other.sample()["step"].tolist() for _ in range(5)] == freely


@pytest.mark.parametrize("transform", [None, lambda: ObservationNorm(1.0, 2.0, ["score"])], ids=["plain", "transform"])
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(L, 0.7, 0.5), SamplerWithoutReplacement])
def test_batches_that_were_drawn_ahead(sampler, transform, ram):
    def make(seed):
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(L),
            sampler=sampler(),
            transform=transform and transform(),
            batch_size=3,
            prefetch=2,
            generator=torch.Generator().manual_seed(seed),
        )

    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = make(1), make(2)
        rb.extend(rows(L))
        rb.sample()
        rb.sample()
        ahead = rb.state_dict()["_prefetch_state"]["queue"]
        assert ahead, "otherwise this tests nothing"
        way(rb, other)
        rb.extend(rows(3, 100))  # what was drawn before is not changed by it
        other.extend(rows(3, 100))
        for _ in range(6):
            one, two = rb.sample(return_info=True), other.sample(return_info=True)
            assert bits(one[0].exclude("index_generation")) == bits(two[0].exclude("index_generation"))
        rb.close()
        other.close()


def test_batches_ahead_are_left_out(ram):
    def make(prefetch):
        return buffer(generator=torch.Generator().manual_seed(1), prefetch=prefetch)

    rb = make(2)
    rb.extend(rows(L))
    rb.sample()
    rb.dumps(ram / "with")
    rb.dumps(ram / "without", prefetch="drop")
    other = make(3)
    with pytest.raises(RuntimeError, match="expected a buffer with prefetch=2"):
        other.loads(ram / "with")
    assert len(other) == 0
    for depth in (0, 3):
        other = make(depth)
        other.loads(ram / "without")
        assert other.state_dict()["_prefetch_state"] is None
        assert len(other.sample()["step"]) == 4
        other.close()
    with pytest.raises(ValueError, match="prefetch: expected 'save' or 'drop', got 'x'"):
        rb.dumps(ram / "x", prefetch="x")
    assert settled(ram) == ["with", "without"]
    rb.close()


# ---- components, and where rows go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dumps", "dump", "save"])
def test_components_alone(name, ram):
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), writer=TensorDictMaxValueWriter("score"), n=L + 5)
    rb.update_priority(torch.arange(5), torch.rand(5))
    rb.dumps(ram / "whole")
    load = {"dumps": "loads", "dump": "load", "save": "load"}[name]
    for part in ("storage", "sampler", "writer"):
        component = getattr(rb, part)
        getattr(component, name)(ram / part)
        getattr(component, name)(str(ram / part))  # replaces it
        assert verify(ram / part).good
        for folder in (ram / part, ram / "whole" / part):
            other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), writer=TensorDictMaxValueWriter("score"))
            if part == "sampler":
                other.storage.loads(ram / "storage")
            getattr(getattr(other, part), load)(folder)
            if part == "storage":
                assert bits(list(other.storage)) == bits(list(rb.storage))
                assert other.write_count == rb.write_count
            assert part != "sampler" or bits(other.sampler.state_dict()) == bits(rb.sampler.state_dict())
    with pytest.raises(IncompatibleCheckpoint, match="expected a sampler of type PrioritizedSampler"):
        rb.sampler.loads(ram / "whole" / "writer")
    assert settled(ram) == ["sampler", "storage", "whole", "writer"]


def test_a_subclass_loads_what_it_dumped(ram):
    class Mine(LazyTensorStorage):
        pass

    rb, other = buffer(Mine(L), n=5), buffer(Mine(L))
    rb.dumps(ram / "d")
    other.loads(ram / "d")
    assert contents(other) == contents(rb)


def test_tensordict_reads_the_rows(ram):
    rb = buffer(n=L + 2)
    rb.dumps(ram / "d")
    read = TensorDict.load_memmap(ram / "d" / "storage")
    assert read.batch_size == (L,)
    assert bits(read.to_tensordict()) == bits(rb[:].exclude("index", "index_generation"))
    assert verify(ram / "d").good


@pytest.mark.parametrize("first", ["ram", "memmap", "full"])
@pytest.mark.parametrize("then", ["ram", "memmap", "full"])
def test_from_one_memory_to_another(first, then, ram):
    rb, other = (buffer(STORAGES[kind](), PrioritizedSampler(L, 0.7, 0.5)) for kind in (first, then))
    rb.extend(rows(L + 5))
    rb.update_priority(torch.arange(5), torch.rand(5))
    for way in (Through(ram).dumps, Through(ram).series):
        way(rb, other)
        assert contents(other) == contents(rb)
    rb.close()
    other.close()


def test_a_directory_is_dumped_and_loaded_into(ram):
    rb = buffer(LazyMemmapStorage(L, scratch_dir=ram / "one"), PrioritizedSampler(L, 0.7, 0.5), n=L + 3)
    rb.update_priority(torch.arange(5), torch.rand(5))
    live = {path.stat().st_ino for path in (ram / "one").rglob("*")}
    Through(ram).series(rb, rb)
    rb.dumps(ram / "d")
    assert not live & {path.stat().st_ino for path in (ram / "d").rglob("*")}, "a dump is never live memory"
    assert not live & {path.stat().st_ino for path in (ram / "series").rglob("*")}
    expected = bits(rb[:].exclude("index_generation")), bits(rb.sampler.state_dict())
    rb.extend(rows(5, 100))
    rb.close()
    other = buffer(LazyMemmapStorage(L, scratch_dir=ram / "two"), PrioritizedSampler(L, 0.7, 0.5))
    other.loads(ram / "d")
    other.close()
    again = ReplayBuffer.open(ram / "two")
    assert (bits(again[:].exclude("index_generation")), bits(again.sampler.state_dict())) == expected
    again.close()


def test_every_dtype_and_key(ram):
    longest = "k" * 200

    def data(n=5):
        return TensorDict(
            {
                "half": torch.rand(n).half(),
                "brain": torch.rand(n, 2).bfloat16(),
                "flag": torch.rand(n) > 0.5,
                "nothing": torch.zeros(n, 0),
                "a/b.c ü%": {"..": torch.rand(n, dtype=torch.complex64), "日本": torch.arange(n).to(torch.uint16)},
                longest: torch.rand(n, 1, 1, dtype=torch.complex128),
                "words": (torch.arange(n) - 2).view(torch.uint64),
            },
            batch_size=[n],
        )

    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(7), batch_size=2) for _ in range(2))
        rb.extend(data())
        rb.extend(data(4))
        way(rb, other)
        assert bits(other[:].exclude("index")) == bits(rb[:].exclude("index"))
    assert verify(ram / "dump").good
    assert verify(ram / "series").good
    assert all(ram in path.resolve().parents for path in ram.rglob("*"))


def test_lists(ram):
    given = items()
    for way in (Through(ram).dumps, Through(ram).series):
        rb, other = (ReplayBuffer(storage=ListStorage(20), collate_fn=list) for _ in range(2))
        rb.extend(given)
        way(rb, other)
        loaded = other[:]
        assert [type(item) for item in loaded] == [type(item) for item in given]
        assert bits(loaded) == bits([*given[:-1], given[-1].resolve_conj()])


def test_no_descriptor_stays_open(ram):
    rb, other = buffer(n=5), buffer()
    other.loads(_dumped(rb, ram / "d"))
    checkpointer = Checkpointer(ram / "s", rb)
    checkpointer.save(1)
    (ram / "broken").mkdir()
    _dumped(rb, ram / "broken")
    (ram / "broken" / "writer" / "sums.bin").unlink()
    settled(ram)
    before = os.listdir("/proc/self/fd")
    for step in range(2, 4):
        other.loads(ram / "d")
        checkpointer.save(step)
        checkpointer.restore()
        with pytest.raises(CorruptCheckpoint):
            other.loads(ram / "broken")
        with pytest.raises(IncompatibleCheckpoint):
            buffer(LazyTensorStorage(L + 1)).loads(ram / "d")
        rb.storage.dumps(ram / "part")
        other.storage.loads(ram / "part")
    settled(ram)
    assert os.listdir("/proc/self/fd") == before


def _dumped(rb, path):
    rb.dumps(path)
    return path
