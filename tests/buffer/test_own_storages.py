"""Storages of one's own, in buffers: what works is as with rows in memory, what cannot is refused by name."""

import copy
import importlib.util
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import engram
from engram import (
    Checkpointer,
    Extent,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RewardScaling,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Traits,
)
from engram.testing import RowStorageContract
from engram.testing.contract import same, steps
from tests.testing.test_broken_storages import FreeSlots, Ring

CAPACITY = 20
SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5),
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4),
    "slices of an epoch": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.5, slice_len=4),
}


def buffer(storage, sampler="uniform", **more):
    generator = torch.Generator().manual_seed(3)
    made = SAMPLERS[sampler]()
    return TensorDictReplayBuffer(storage=storage, sampler=made, batch_size=8, generator=generator, **more)


class Broken(Ring):
    """Its disk is full, if it is said to be."""

    full = False

    def write(self, rows, data, *, append):
        if self.full:
            raise OSError("no space left")
        super().write(rows, data, append=append)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("transformed", [False, True])
def test_a_buffer_does_as_with_rows_in_memory(sampler, transformed):
    twins = []
    for storage in (Ring(CAPACITY), LazyTensorStorage(CAPACITY)):
        more = {"transform": RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")])} if transformed else {}
        twins.append(buffer(storage, sampler, **more))
    for first in range(0, 64, 8):
        seen = []
        for rb in twins:
            index = rb.extend(steps(first, 7))
            row = rb.add(steps(first + 7, 1)[0])
            batch = rb.sample()
            if rb.sampler.traits.takes_priorities and rb.sampler.traits.prioritized:
                rb.update_priority(
                    batch["index"][:, 0] if batch["index"].ndim > 1 else batch["index"], 0.5 + torch.arange(8)
                )
            rb[2] = rb[1]
            rb["step"] = rb["step"] + 1
            seen.append(
                [
                    index,
                    row,
                    batch.to_dict(),
                    len(rb),
                    rb.write_count,
                    rb[:].clone(),
                    rb[[1, -1]],
                    rb["next", "done"].clone(),
                ]
            )
        assert same(*seen)
    assert twins[0].storage.extent() == twins[1].storage.extent()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_states_go_on_in_both_directions(sampler):
    own, ram = buffer(Ring(CAPACITY), sampler), buffer(LazyTensorStorage(CAPACITY), sampler)
    own.extend(steps(0, 31))
    own.sample()
    ram.load_state_dict(own.state_dict())
    other = buffer(Ring(CAPACITY), sampler)
    other.load_state_dict(ram.state_dict())
    for rb in (own, ram, other):
        rb.extend(steps(40, 5))
    assert same(own[:], ram[:].clone())
    assert same(own[:], other[:])
    assert own.sample()["step"].tolist() == other.sample()["step"].tolist()
    assert other.storage.own.extent() == own.storage.own.extent()


def test_dumps_and_checkpoints(tmp_path):
    own = buffer(Ring(CAPACITY))
    own.extend(steps(0, 31))
    own.dumps(tmp_path / "dump")
    Checkpointer(tmp_path / "series", own).save(1)
    for make in (lambda: Ring(CAPACITY), lambda: LazyTensorStorage(CAPACITY)):
        other = buffer(make())
        other.loads(tmp_path / "dump")
        assert same(other[:].clone(), own[:])
    other = buffer(Ring(CAPACITY))
    Checkpointer(tmp_path / "series", other).restore(resume="exact")
    assert same(other[:], own[:])
    third = buffer(Ring(CAPACITY))
    third.extend(steps(100, 4))
    before = third[:]
    with pytest.raises(IncompatibleCheckpoint, match=r'a Ring has none, got 1 rows that hold nothing.*resume="exact"'):
        Checkpointer(tmp_path / "series", third).restore()
    assert same(third[:], before)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["extend", "rows", "edit", "empty", "again"]), st.integers(1, 9)), max_size=12)
)
def test_any_calls(calls):
    """Against a model that shares no code: a list of ``capacity`` numbers."""
    capacity = 6
    rb = ReplayBuffer(storage=Ring(capacity), batch_size=4)

    def numbered(first, n):
        return TensorDict({"n": torch.arange(first, first + n)}, [n])

    model, seam, number = {}, 0, 0
    for call, n in calls:
        match call:
            case "extend":
                rb.extend(numbered(number, n))
                for i in range(n):
                    model[seam] = number + i
                    seam = (seam + 1) % capacity
            case "rows" if model:
                rows = [(n * i) % len(model) for i in range(n)]
                rb.storage.set(rows, numbered(number, n))
                model.update(zip(rows, range(number, number + n), strict=True))
            case "edit" if model:
                rb[n % len(model)] = numbered(number, 1)[0]
                model[n % len(model)] = number
            case "empty":
                rb.empty()
                model, seam = {}, 0
            case "again":
                rb = ReplayBuffer(storage=rb.storage.own, batch_size=4)
        number += n
        assert len(rb) == len(model)
        if model:
            assert rb[:]["n"].tolist() == [model[row] for row in range(len(model))]
            assert set(rb.sample()["n"].tolist()) <= set(model.values())
    assert rb.storage.own.extent().seam == (seam,)


def test_rows_that_lie_there_already():
    first = buffer(Ring(CAPACITY), "slices")
    first.extend(steps(0, 31))
    second = buffer(first.storage.own, "slices")
    assert same(first[:], second[:])
    rows, numbers = torch.arange(CAPACITY), second.storage.tickets_of(torch.arange(CAPACITY))
    assert rows[numbers.argsort()].tolist() == [(31 + i) % CAPACITY for i in range(CAPACITY)]
    assert (second.sample()["step"].view(2, 4).diff(dim=1) == 1).all()
    second.extend(steps(31, 1))
    with pytest.raises(
        RuntimeError, match=r"Ring: expected 20 rows, the next one at 11, as this buffer .* the next one at 12"
    ):
        first.extend(steps(90, 1))


def test_another_order():
    rb = TensorDictReplayBuffer(storage=FreeSlots(CAPACITY), batch_size=8)
    assert rb.extend(steps(0, 18)).tolist() == list(range(18))
    assert rb.extend(steps(18, 4)).tolist() == [18, 19, 19, 18]
    assert rb["step"].tolist() == [*range(18), 21, 20]
    rb.set_sampler(SliceSampler(slice_len=4))
    with pytest.raises(TypeError, match=r"a FreeSlots does not say that they are.*Traits\(in_order=True\)"):
        rb.sample()
    for call in (rb.empty, lambda: rb.load_state_dict(buffer(LazyTensorStorage(CAPACITY)).state_dict())):
        with pytest.raises(RuntimeError, match=r"FreeSlots does not declare that it can forget"):
            call()
    assert len(rb) == 20


def test_writers_that_choose_rows():
    for storage in (Ring(4), FreeSlots(4)):
        rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="value"), batch_size=2)
        for value in (3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0):
            rb.extend(TensorDict({"value": torch.tensor([value])}, [1]))
        assert sorted(rb["value"].tolist()) == [3.0, 4.0, 6.0, 9.0]


def test_prefetching_draws_the_same():
    found = []
    for storage in (Ring(CAPACITY), LazyTensorStorage(CAPACITY)):
        with buffer(storage, prefetch=2) as rb:
            rb.extend(steps(0, 20))
            found.append([rb.sample()["step"].tolist() for _ in range(6)])
    assert found[0] == found[1]


def test_calls_never_overlap():
    class Exclusive(Ring):
        inside = 0

        def read(self, rows):
            self.inside += 1
            assert self.inside == 1
            try:
                return super().read(rows)
            finally:
                self.inside -= 1

    rb, failures = buffer(Exclusive(CAPACITY)), []
    rb.extend(steps(0, 20))

    def draw():
        try:
            for _ in range(30):
                rb.sample()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for first in range(20, 60):
        rb.extend(steps(first, 1))
    for thread in threads:
        thread.join()
    assert not failures


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_what_needs_rows_in_memory():
    rb = buffer(Ring(CAPACITY))
    rb.extend(steps(0, 20))
    before = rb[:]
    refused = {
        "share: the rows are in a Ring, a storage of one's own": rb.share,
        "copy: the rows are in a Ring": lambda: copy.deepcopy(rb),
        "copy: the rows are in a Ring, a storage": lambda: pickle.dumps(rb),
        r"remove and empty\(lane=\): expected rows in memory, got those of OwnStorage": lambda: rb.remove(3),
        r"empty\(lane=\): expected rows in memory": lambda: rb.empty(lane=0),
        "limit: the rows are in a Ring": lambda: rb.limit(MinSize(3)),
        "expected rows on the CPU, got those of Ring": lambda: rb.add_field("more", torch.zeros(())),
    }
    for said, call in refused.items():
        with pytest.raises(RuntimeError, match=said):
            call()
    expanded = ReplayBuffer(storage=rb.storage, sampler=NStep(RandomSampler(), n=3, gamma=0.9), batch_size=2)
    with pytest.raises(RuntimeError, match="NStep: expected a tensor storage on the CPU"):
        expanded.sample()
    with pytest.raises(engram.RowError, match="lane"):
        rb.extend(steps(0, 1), lane=1)
    assert same(rb[:], before)


def test_a_load_that_fails_says_that_the_storage_is_empty():
    saved = buffer(LazyTensorStorage(CAPACITY))
    saved.extend(steps(0, 6))
    state = saved.state_dict()
    rb = buffer(Broken(CAPACITY))
    rb.extend(steps(20, 8))
    rb.storage.own.full = True
    with pytest.raises(OSError, match="no space left") as caught:
        rb.load_state_dict(state)
    assert any("storage is empty now" in note and "Load again" in note for note in caught.value.__notes__)
    assert len(rb) == 0
    assert rb.storage.own.extent().size == 0
    rb.storage.own.full = False
    rb.load_state_dict(state)
    assert same(rb[:], saved[:])


def test_rows_that_cannot_be_read_are_not_loaded():
    """All are read before the first one is written."""
    rb = buffer(Broken(CAPACITY))
    rb.extend(steps(20, 8))
    before = rb[:]
    state = {name: value for name, value in rb.storage.state_dict().items() if name != "rows"}

    def fails(_):
        raise OSError("cannot be read")

    with pytest.raises(OSError, match="cannot be read") as caught:
        rb.storage.prepare_rows(state, SimpleNamespace(fill=fails)).commit()
    assert not getattr(caught.value, "__notes__", None)
    assert same(rb[:], before)


def test_a_write_that_fails_changes_nothing():
    rb = buffer(Broken(CAPACITY), "prioritized")
    rb.extend(steps(0, 8))
    rb.storage.own.full = True
    before = rb[:], rb.storage.extent(), rb.storage.tickets_of(torch.arange(8))
    for call in (lambda: rb.extend(steps(8, 4)), lambda: rb.add(steps(8, 1)[0])):
        with pytest.raises(OSError, match="no space left"):
            call()
    with pytest.raises(OSError, match="no space left"):
        rb[0] = rb[1]
    with pytest.raises(RuntimeError, match="field step: expected shape"):
        rb.extend(steps(8, 4).apply(lambda x: x.float() if x.dtype is torch.int64 else x))
    assert same(before, (rb[:], rb.storage.extent(), rb.storage.tickets_of(torch.arange(8))))
    rb.storage.own.full = False
    rb.extend(steps(8, 4))
    assert rb["step"].tolist() == list(range(12))


class Half:
    extent, read = Ring.extent, Ring.read


class Derived(engram.RowStorage):
    def extent(self):
        return Extent(4, (0,), (0,))


class OfStorage(engram.Storage):
    place, write, read = Ring.place, Ring.write, Ring.read


def test_methods_that_are_missing():
    with pytest.raises(TypeError, match=r"storage: expected a Storage .* got Half\. It has no place, write\."):
        ReplayBuffer(storage=Half())
    with pytest.raises(TypeError, match=r"Derived.*abstract methods '?place'?, '?read'?, '?write'?"):
        ReplayBuffer(storage=Derived())
    with pytest.raises(
        NotImplementedError,
        match=r"OfStorage: expected the methods .*engram\.RowStorage: extent, place, write and read",
    ):
        OfStorage()
    assert isinstance(Ring(3), engram.RowStorage)
    assert not isinstance(ListStorage(3), engram.RowStorage)


@pytest.mark.parametrize(
    ("extent", "error", "said"),
    [
        (None, TypeError, "Ring.extent: expected an Extent, got NoneType"),
        (Extent(4, (0, 0), (0, 0)), ValueError, "expected one lane, no holes"),
        (Extent(4, (5,), (0,)), ValueError, "rows up to it and a seam below it"),
        (Extent(4, (2,), (4,)), ValueError, "rows up to it and a seam below it"),
        (Extent(0, (0,), (0,)), ValueError, "a capacity above 0"),
    ],
)
def test_extents_that_are_none(extent, error, said):
    ring = Ring(4)
    ring.extent = lambda: extent
    with pytest.raises(error, match=said):
        ReplayBuffer(storage=ring)


def test_values_that_are_none():
    ring = Ring(4)
    rb = ReplayBuffer(storage=ring)
    ring.place = lambda n: list(range(n))
    with pytest.raises(TypeError, match=r"Ring\.place: expected a tensor of int64 \[2\], got list"):
        rb.extend(steps(0, 2))
    ring.place = lambda n: torch.arange(n) + 1
    with pytest.raises(RuntimeError, match=r"Ring\.place: expected 2 rows from 0 on"):
        rb.extend(steps(0, 2))
    del ring.place
    rb.extend(steps(0, 2))
    ring.read = lambda rows: steps(0, len(rows)).exclude("step")
    with pytest.raises(KeyError, match=r"Ring\.read: data: expected the fields of the first row.*missing \['step'\]"):
        rb.sample(2)
    ring.traits = "ordered"
    with pytest.raises(TypeError, match="Ring: traits: expected a Traits, got str"):
        ReplayBuffer(storage=ring)
    assert Traits().in_order is False


# ---- over another library ----------------------------------------------------------------------------------------------


def example():
    path = Path(__file__).parents[2] / "examples" / "own_storage.py"
    spec = importlib.util.spec_from_file_location("own_storage", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_storage_over_sqlite_keeps_the_contract(tmp_path):
    module, made = example(), []

    class Case(RowStorageContract):
        def make(self, capacity):
            made.append(module.SqliteStorage(tmp_path / f"{len(made)}.sqlite", capacity))
            return made[-1]

        def reopened(self, storage):
            storage.db.close()
            made[-1] = module.SqliteStorage(tmp_path / f"{len(made) - 1}.sqlite", storage.capacity)
            return made[-1]

        def rows(self, first, n):
            step = torch.arange(first, first + n)
            return {"x": torch.stack([step, -step], 1).float(), "y": step.float(), "done": step % 5 == 4}

    Case().run_all()
    for storage in made:
        storage.db.close()
