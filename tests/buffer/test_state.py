import contextlib
import copy
import itertools
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import (
    Compose,
    FinalObservations,
    FrameStack,
    ImmutableDatasetWriter,
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextFromFollowing,
    NoSampleable,
    NStep,
    ObservationNorm,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    VecNorm,
)
from engram.priorities import PriorityIndex
from engram.state import copied, mapped
from tests.components import Backwards, Newest
from tests.store.test_device import OnDevice
from tests.twins import Twins, bits, contents, rows, through_a_file

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")

L = 12


STORAGES = {
    "ram": lambda: LazyTensorStorage(L),
    "lanes": lambda: LazyTensorStorage(2 * L, lanes=2),
    "memmap": lambda: LazyMemmapStorage(L),
    "columns": lambda: LazyTensorStorage(2 * L, ndim=2),
    "full": lambda: TensorStorage(rows(L, 500)),
    "device": lambda: OnDevice(L),
    "list": lambda: ListStorage(L),
}
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(2 * L, 0.7, 0.5),
    "live-max": lambda: PrioritizedSampler(
        2 * L, 0.6, 0.4, eps=0.0, max_priority_within_buffer=True, dtype=torch.float64
    ),
    "slices": lambda: SliceSampler(slice_len=2),
    "anchors": lambda: SliceSampler(slice_len=2, uniform_over="anchors"),
    "slice-pass": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "priority-slices": lambda: PrioritizedSliceSampler(2 * L, 0.7, 0.5, slice_len=2),
    "n-step": lambda: NStep(PrioritizedSampler(2 * L, 0.7, 0.5), n=2, gamma=0.9),
    "stack": lambda: FrameStack(SamplerWithoutReplacement(), 2, -1, ["obs"]),
}
WRITERS = {
    "ring": RoundRobinWriter,
    "generations": lambda: TensorDictRoundRobinWriter(track_generations=True),
    "best": lambda: TensorDictMaxValueWriter("score"),
}
WINDOWS = ("slices", "anchors", "slice-pass", "priority-slices", "n-step", "stack")


def kinds():
    """What is made for each other. Files are slow to make, and their rows are those of RAM: one writer will do."""
    for storage, sampler, writer in itertools.product(STORAGES, SAMPLERS, WRITERS):
        windows_there = storage not in ("list", "device") or sampler not in WINDOWS
        order_there = storage not in ("lanes", "columns") or writer != "best"
        if windows_there and order_there and (storage != "memmap" or writer == "generations"):
            yield storage, sampler, writer


def twins(storage="ram", sampler="uniform", writer="ring", seed=0):
    def make():
        return TensorDictReplayBuffer(
            storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), writer=WRITERS[writer](), batch_size=4
        )

    shape = 2 if storage == "columns" else None
    lanes = 2 if storage == "lanes" else 1
    return Twins(make, seed=seed, shape=shape, lanes=lanes, edits=storage != "columns", samples=(2, 4, 8))


class TestTwins:
    @pytest.mark.parametrize(("storage", "sampler", "writer"), list(kinds()))
    def test_goes_on_as_if_it_had_never_been_saved(self, storage, sampler, writer):
        both = twins(storage, sampler, writer, seed=len(storage) + 10 * len(sampler))
        both.run(25)
        both.swap()
        both.run(30)
        both.swap(used=True)
        both.run(25)
        both.check()
        both.close()

    @pytest.mark.parametrize(
        ("storage", "sampler", "writer"),
        [
            ("ram", "priority", "ring"),
            ("memmap", "priority-slices", "generations"),
            ("lanes", "anchors", "ring"),
            ("columns", "slice-pass", "ring"),
            ("list", "live-max", "best"),
            ("full", "epoch", "best"),
        ],
    )
    def test_for_a_thousand_operations(self, storage, sampler, writer):
        both = twins(storage, sampler, writer, seed=1)
        both.run(100)
        both.swap()
        both.run(1000)
        both.check()
        both.close()

    @pytest.mark.parametrize("n", [0, 1, L - 1, L, L + 1, 3 * L + 7])
    @pytest.mark.parametrize("storage", STORAGES)
    def test_of_every_size(self, storage, n):
        """Save, load, write, save, load."""
        both = twins(storage, "priority")
        if n:
            both.extend(n)
        both.swap()
        both.sample()
        both.extend(2)
        both.swap(used=storage != "full")
        both.update()
        both.extend(L + 1)
        both.sample()
        both.check()
        both.close()

    @settings(max_examples=25, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        storage=st.sampled_from(["ram", "lanes", "list"]),
        sampler=st.sampled_from(["epoch", "priority", "live-max"]),
        writer=st.sampled_from(["ring", "generations"]),
        steps=st.lists(st.sampled_from(["extend", "sample", "update", "edit", "anneal", "empty", "swap"]), max_size=40),
        seed=st.integers(0, 1 << 20),
    )
    def test_whatever_is_done(self, storage, sampler, writer, steps, seed):
        both = twins(storage, sampler, writer, seed=seed)
        for step in steps:
            getattr(both, step)(*([both.random.randint(1, 2 * L)] if step == "extend" else []))
        both.check()


# ---- rows --------------------------------------------------------------------------------------------------------------


def buffer(storage=None, sampler=None, writer=None, n=0, **more):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(L) if storage is None else storage,
        sampler=sampler,
        writer=writer,
        batch_size=4,
        **more,
    )
    if n:
        rb.extend(rows(n))
    return rb


def test_a_storage_alone():
    for make in STORAGES.values():
        rb, other = (buffer(make()) for _ in range(2))
        if rb.storage.ndim == 1:
            rb.extend(rows(7), lane=0)
        state = through_a_file(rb.storage.state_dict())
        other.storage.load_state_dict(state)
        assert len(other) == len(rb)
        if len(rb):
            assert bits(list(other.storage)) == bits(list(rb.storage))
        assert other.write_count == rb.write_count
        rb.close()
        other.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "full"])
def test_states_are_copies(storage):
    rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 0.7, 0.5), n=9)
    state = rb.state_dict()
    before = bits(state)
    rb.extend(rows(5, 100))
    rb.update_priority(torch.arange(5), torch.rand(5))
    if storage == "list":
        rb[0]["obs"].zero_()  # items are as they were given
    assert bits(state) == before, "what the buffer does is not seen in the state"
    other = buffer(STORAGES[storage](), PrioritizedSampler(L, 0.7, 0.5))
    other.load_state_dict(state)
    loaded = contents(other)
    mapped(state, lambda value: value.zero_() if value.is_floating_point() else value.fill_(1))
    assert contents(other) == loaded, "what becomes of the state is not seen in the buffer"
    rb.close()
    other.close()


def test_rows_that_hold_nothing_are_zero_in_a_state():
    rb = buffer(n=L)
    rb.empty()
    rb.writer.write_at([2], rows(1, 50))
    state = rb.state_dict()["_storage"]
    assert [len(field) for field in state["rows"]] == [3] * 6
    assert (state["numbers"] != 0).tolist() == [True] * 3, "rows below one that is written are zeros"
    other = buffer()
    other.load_state_dict(rb.state_dict())
    assert bits(other[:]) == bits(rb[:])
    assert other.extend(rows(2)).tolist() == rb.extend(rows(2)).tolist() == [0, 1]


def test_a_state_is_as_large_as_what_is_live():
    rb = buffer(LazyTensorStorage(100_000), n=3)
    state = rb.state_dict()["_storage"]
    assert [len(field) for field in state["rows"]] == [3] * 6
    assert len(state["numbers"]) == 3


def test_slices_never_join_newest_and_oldest():
    rb = buffer(sampler=SliceSampler(slice_len=3, end_key=("next", "done")))
    for first in range(0, 3 * L + 5, 5):
        rb.extend(rows(5, first).set(("next", "done"), torch.zeros(5, 1, dtype=torch.bool)))
    other = buffer(sampler=SliceSampler(slice_len=3, end_key=("next", "done")))
    other.load_state_dict(through_a_file(rb.state_dict()))
    for _ in range(50):
        steps = other.sample(12)["step"].reshape(-1, 3)
        assert (steps.diff(dim=1) == 1).all()
    assert set(other["step"].tolist()) == set(rb["step"].tolist())


def test_every_dtype_and_key():
    def data():
        return {
            "half": torch.rand(5).half(),
            "brain": torch.rand(5, 2).bfloat16(),
            "flag": torch.rand(5) > 0.5,
            "nothing": torch.zeros(5, 0),
            "a/b.c ü": (torch.rand(5, dtype=torch.complex64), torch.arange(5).to(torch.uint16)),
        }

    rb = ReplayBuffer(storage=LazyTensorStorage(7))
    rb.extend(data())
    other = ReplayBuffer(storage=LazyTensorStorage(7))
    other.load_state_dict(through_a_file(rb.state_dict()))
    assert bits(other[:]) == bits(rb[:])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.bool])
def test_rows_that_hold_nothing_are_zero_whatever_the_dtype(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
    rb.extend({"x": torch.ones(3).to(dtype), "nothing": torch.zeros(3, 0).to(dtype)}, lane=0)
    rb.extend({"x": torch.ones(2).to(dtype), "nothing": torch.zeros(2, 0).to(dtype)}, lane=1)
    rows = rb.storage.state_dict()["rows"]
    column = next(row for row in rows if row.ndim == 1)
    assert column.dtype is dtype
    assert column.to(torch.int64).tolist() == [1, 1, 1, 0, 1, 1]


def test_shared_buffers(tmp_path):
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=5).share()
    rb.update_priority(torch.arange(5), torch.rand(5))
    other = buffer(LazyMemmapStorage(L, scratch_dir=tmp_path / "s"), sampler=PrioritizedSampler(L, 0.7, 0.5))
    other.load_state_dict(rb.state_dict())
    expected = bits(rb[:]), bits(rb.sampler.state_dict())
    assert (bits(other[:]), bits(other.sampler.state_dict())) == expected
    other.close()
    reopened = ReplayBuffer.open(tmp_path / "s")
    assert (bits(reopened[:]), bits(reopened.sampler.state_dict())) == expected
    reopened.close()
    rb.close()


def test_draws_of_before_match_no_more():
    for storage in ("ram", "list"):
        rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=L)
        state = rb.state_dict()
        batch = rb.sample(4)
        rb.load_state_dict(state)
        batch["td_error"] = torch.full((4,), 9.0)
        rb.update_tensordict_priority(batch)
        assert rb.sampler.state_dict()["highest"] == 0.0
        assert rb.stats()["priority_updates_dropped"] == 4
        assert not set(rb.sample(50)["index_generation"].tolist()) & set(batch["index_generation"].tolist())


def test_tickets_keep_their_order():
    rb = buffer(writer=RoundRobinWriter(track_generations=True), n=L + 5)
    rb.set_at_("score", torch.zeros(1, dtype=torch.float64), [3])
    order = rb.writer.generations_of(torch.arange(L)).argsort()
    other = buffer(writer=RoundRobinWriter(track_generations=True))
    other.load_state_dict(rb.state_dict())
    assert other.writer.generations_of(torch.arange(L)).argsort().tolist() == order.tolist()


def test_another_sampler_on_the_storage_hears_of_it():
    rb = buffer(n=5)
    listener = ReplayBuffer(storage=rb.storage, sampler=Newest())
    rb.add(rows(1, 60)[0])
    assert listener.sampler.state_dict() == {"rows": [5]}
    rb.load_state_dict(rb.state_dict())
    assert listener.sampler.state_dict() == {"rows": []}


# ---- indexes -----------------------------------------------------------------------------------------------------------


def test_an_index_is_saved_once():
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=5)
    critic = ReplayBuffer(storage=rb.storage, sampler=PrioritizedSampler(L, 1.0, 0.5, index="critic"))
    critic.update_priority(torch.arange(3), torch.tensor([0.0, 2.0, 5.0]))
    state = rb.state_dict()
    assert list(state["_storage"]["priorities"]) == ["critic"]
    assert list(rb.storage.state_dict()["priorities"]) == ["critic", "main"], "a storage alone has all"
    other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5))
    other.load_state_dict(through_a_file(state))
    its_critic = PrioritizedSampler(L, 1.0, 0.5, index="critic")
    its_critic.bind(other.storage)
    assert bits(its_critic.state_dict()) == bits(critic.sampler.state_dict())
    assert bits(other.sampler.state_dict()) == bits(rb.sampler.state_dict())


def test_an_index_that_the_state_does_not_have():
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=5)
    other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=3)
    more = ReplayBuffer(storage=other.storage, sampler=PrioritizedSampler(L, 1.0, 0.5, eps=0.0, index="more"))
    more.update_priority(torch.arange(3), 7.0)
    other.load_state_dict(rb.state_dict())
    assert more.sampler.state_dict()["leaves"].tolist() == [1.0] * 5 + [0.0] * (L - 5)
    assert more.sampler.default_priority == 1.0


def test_leaves_bit_for_bit():
    up = float(np.nextafter(1.0, 2.0))
    priority = torch.tensor([1.0, up, 5e-324, 0.0, 2.5e-308, 1e200], dtype=torch.float64)
    for storage in ("ram", "list"):
        rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=7)
        rb.update_priority(torch.arange(6), priority)
        other = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0))
        other.load_state_dict(through_a_file(rb.state_dict()))
        index, its = rb.sampler.priorities(), other.sampler.priorities()
        assert bits(its.leaves(7)) == bits(index.leaves(7))
        assert its.leaves(6).tolist() == priority.tolist()
        assert its.core.total == index.core.total
        assert bits(its.weights(torch.arange(7))) == bits(index.weights(torch.arange(7)))
        assert other.sampler.default_priority == 1e200


def test_a_priority_of_zero_is_not_one_that_nobody_told():
    """Rows that were given none get the default one when they are edited; those that were given zero do not."""
    rb = buffer(sampler=PrioritizedSampler(L, 2.0, 0.5, eps=0.0), n=3)
    rb.update_priority([0, 1], torch.tensor([0.0, 1e-200], dtype=torch.float64))
    rb.extend(rows(1, 3))  # the default priority, 1e-200: its square is no number above zero
    other = buffer(sampler=PrioritizedSampler(L, 2.0, 0.5, eps=0.0))
    other.load_state_dict(through_a_file(rb.state_dict()))
    for one in (rb, other):
        one.update_priority(2, 3.0)
        one.set_at_("score", torch.zeros(4, dtype=torch.float64), [0, 1, 2, 3])
    assert rb.sampler.state_dict()["leaves"][:4].tolist() == [0, 0, 9, 9]
    assert bits(other.sampler.state_dict()) == bits(rb.sampler.state_dict())


def test_before_any_priority_exists():
    rb, other = (buffer(sampler=PrioritizedSampler(L, 0.7, 0.5)) for _ in range(2))
    state = through_a_file(rb.state_dict())
    assert (state["_sampler"]["highest"], len(state["_sampler"]["leaves"])) == (0.0, 0)
    other.load_state_dict(state)
    other.extend(rows(5))
    other.update_priority(torch.arange(5), 9.0)
    other.load_state_dict(state)
    assert len(other) == 0
    assert other.write_count == 0
    assert other.sampler.default_priority == 1.0
    assert other.extend(rows(2)).tolist() == [0, 1]


def test_settings_of_an_index_that_is_there():
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=5)
    state = rb.state_dict()
    rb.sampler.beta = 0.9
    rb.load_state_dict(state)
    assert rb.sampler.beta == 0.5
    rb.sampler.alpha = 0.4
    with pytest.raises(IncompatibleCheckpoint, match="alpha: expected 0.4 as here, got 0.7"):
        rb.load_state_dict(state)


@pytest.mark.parametrize("length", [2, 3])
def test_draws_of_windows_of_several_lengths(length):
    """Which length a store's table counts decides how others are drawn."""

    def make():
        sampler = SliceSampler(slice_len=3, uniform_over="anchors")
        return buffer(LazyTensorStorage(40), sampler, generator=torch.Generator().manual_seed(1))

    rb, other = make(), make()
    rb.extend(rows(30))
    rb.sample(6)
    rb.set_sampler(SliceSampler(slice_len=length, uniform_over="anchors"))
    other.set_sampler(SliceSampler(slice_len=length, uniform_over="anchors"))
    other.extend(rows(7))
    other.sample(6)
    other.load_state_dict(through_a_file(rb.state_dict()))
    for _ in range(20):
        assert rb.sample(6)["step"].tolist() == other.sample(6)["step"].tolist()


# ---- passes ------------------------------------------------------------------------------------------------------------


def test_a_pass_goes_on_only_where_the_rows_are_those_of_the_state():
    def make():
        return buffer(sampler=SliceSamplerWithoutReplacement(slice_len=1), generator=torch.Generator().manual_seed(0))

    rb = make()
    rb.extend(rows(L).set("episode", torch.arange(L)))
    seen = rb.sample(4)["step"].tolist()
    state = rb.state_dict()
    for other in (make(), rb):
        other.load_state_dict(state)
        rest = other.sample(4)["step"].tolist() + other.sample(4)["step"].tolist()
        assert sorted(seen + rest) == list(range(L))
    other = make()
    other.extend(rows(L).set("episode", torch.arange(L)))
    other.extend(rows(L).set("episode", torch.arange(L)))
    other.sampler.load_state_dict(state["_sampler"])
    drawn = [other.sample(4)["step"].tolist() for _ in range(3)]
    assert sorted(sum(drawn, [])) == list(range(L)), "a pass of its own"


def test_the_pass_of_a_directory(tmp_path):
    rb = buffer(LazyMemmapStorage(L), SamplerWithoutReplacement(), n=L)
    seen = rb.sample(4)["step"].tolist()
    state = through_a_file(rb.state_dict())
    assert state["_storage"]["passes"] == {}
    assert list(rb.storage.state_dict()["passes"]) == ["main"]
    for storage in (LazyMemmapStorage(L, scratch_dir=tmp_path / "s"), LazyTensorStorage(L)):
        other = buffer(storage, SamplerWithoutReplacement())
        other.load_state_dict(state)
        rest = other.sample(4)["step"].tolist() + other.sample(4)["step"].tolist()
        assert sorted(seen + rest) == list(range(L))
        assert other.sampler.ran_out
        other.close()
    alone = LazyMemmapStorage(L)
    alone.load_state_dict(rb.storage.state_dict())
    other = buffer(alone, SamplerWithoutReplacement())
    assert sorted(seen + [s for _ in range(2) for s in other.sample(4)["step"].tolist()]) == list(range(L))
    other.close()
    rb.close()


# ---- writers -----------------------------------------------------------------------------------------------------------


def best(**more):
    return buffer(writer=TensorDictMaxValueWriter("score"), **more)


def test_the_best_rows_of_ranks_that_hardly_differ():
    up = float(np.nextafter(1.0, 2.0))
    data = rows(2 * L)
    data["score"] = torch.tensor([1.0, up, 1.0, up] * (L // 2), dtype=torch.float64)
    rb, other = best(), best()
    rb.extend(data[:L])
    other.load_state_dict(through_a_file(rb.state_dict()))
    for i in range(0, 2 * L, 3):
        assert rb.extend(data[i : i + 3]).tolist() == other.extend(data[i : i + 3]).tolist()
    assert bits(rb[:]) == bits(other[:])
    assert rb["score"].tolist() == [up] * L


def test_the_best_rows_of_ranks_beyond_what_float32_counts():
    most = 1 << 24
    data = rows(2 * L)
    data["score"] = torch.arange(most, most + 2 * L).double()
    rb, other = best(), best()
    rb.extend(data[:L])
    other.load_state_dict(through_a_file(rb.state_dict()))
    for one in data[L:]:
        assert rb.add(one) == other.add(one)
    assert sorted(other["score"].tolist()) == list(range(most + L, most + 2 * L))
    assert bits(rb[:]) == bits(other[:])


@pytest.mark.parametrize("reduction", ["sum", "mean", "median", "max", "min"])
def test_a_rank_follows_from_the_row_alone(reduction):
    """Not from the batch it came in: who reads the rows again, as after a load, must find the same ranks."""
    for m in (3, 17, 1000, 40_000):
        value = torch.randn(5, m, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
        writer = TensorDictMaxValueWriter("r", reduction)
        ranks = writer._reduced(value, 5)
        assert ranks.tolist() == writer._reduced(value.t().contiguous().t(), 5).tolist(), "other strides"
        assert ranks.tolist() == [writer._reduced(row.clone(), 1)[0] for row in value], "one by one"


def test_a_read_only_buffer():
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(6)), writer=ImmutableDatasetWriter())
    other = ReplayBuffer(storage=TensorStorage(torch.zeros(6, dtype=torch.int64)), writer=ImmutableDatasetWriter())
    other.load_state_dict(through_a_file(rb.state_dict()))
    assert other[:].tolist() == list(range(6))
    with pytest.raises(RuntimeError, match="read-only"):
        other.extend(torch.arange(2))


# ---- lists -------------------------------------------------------------------------------------------------------------


def items():
    return [
        torch.arange(3.0),
        torch.tensor(2, dtype=torch.int16),
        torch.zeros(0, 4),
        (torch.tensor(True), [torch.rand(2, 2).half(), {}]),
        {"b": torch.arange(2), "a": torch.rand(3)},
        TensorDict({"x": torch.rand(2, 3), "y": {"z": torch.arange(4).reshape(2, 2)}}, batch_size=[2]),
        TensorDict({}, batch_size=[3, 1]),
        torch.arange(5.0),
        torch.view_as_complex(torch.rand(2, 2)).conj(),
    ]


def test_items_of_every_form():
    given = items()
    rb = ReplayBuffer(storage=ListStorage(20), collate_fn=list)
    rb.extend(given)
    other = ReplayBuffer(storage=ListStorage(20), collate_fn=list)
    other.load_state_dict(through_a_file(rb.state_dict()))
    loaded = other[:]
    assert [type(item) for item in loaded] == [type(item) for item in given]
    assert bits(loaded) == bits([*given[:-1], given[-1].resolve_conj()])
    assert list(loaded[4]) == ["b", "a"]
    assert loaded[5].batch_size == (2,)
    assert loaded[6].batch_size == (3, 1)
    memory = {item.untyped_storage().data_ptr() for item in loaded if isinstance(item, torch.Tensor) and item.numel()}
    assert len(memory) == sum(isinstance(item, torch.Tensor) and item.numel() > 0 for item in loaded)


@pytest.mark.parametrize(
    ("item", "way"),
    [
        ("text", "item 1"),
        ({"a": {"b": 3}}, r"item 1\['a'\]\['b'\]"),
        ([torch.zeros(1), np.zeros(2)], r"item 1\[1\]"),
        ({1: torch.zeros(1)}, "item 1"),
        (torch.zeros(2).to_sparse(), "item 1"),
    ],
)
def test_items_that_cannot_be_saved(item, way):
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend([torch.zeros(1), item])
    with pytest.raises(TypeError, match=way):
        rb.state_dict()


def test_a_list_without_bound():
    rb, other = (ReplayBuffer(storage=ListStorage(), collate_fn=list) for _ in range(2))
    rb.extend(torch.arange(5))
    other.load_state_dict(rb.state_dict())
    assert other.extend([torch.tensor(5)]).tolist() == [5]
    bounded = ReplayBuffer(storage=ListStorage(3), collate_fn=list)
    with pytest.raises(ValueError, match="at most 3 items, got 5"):
        bounded.load_state_dict(rb.state_dict())
    assert len(bounded) == 0


# ---- the rest of a buffer ----------------------------------------------------------------------------------------------


def test_the_keys_of_a_state():
    rb = buffer(n=2)
    state = rb.state_dict()
    theirs = {
        "_storage",
        "_sampler",
        "_writer",
        "_transforms",
        "_batch_size",
        "_consume_after_n_samples",
        "_rng",
        "_prefetch_state",
    }
    assert set(state) == theirs | {"_lane", "_iterating", "_default_rng"}
    assert state["_rng"] is None
    assert state["_prefetch_state"] is None
    rb.set_rng(torch.Generator())
    rng, device = rb.state_dict()["_rng"]
    assert (rng.dtype, device) == (torch.uint8, "cpu")


def test_generators():
    mine = torch.Generator().manual_seed(5)
    rb = buffer(generator=mine, n=9)
    rb.sample()
    state = through_a_file(rb.state_dict())
    drawn = [rb.sample()["step"].tolist() for _ in range(5)]
    theirs = torch.Generator().manual_seed(6)
    for other in (buffer(), buffer(generator=theirs)):
        before = torch.get_rng_state()
        other.load_state_dict(state)
        assert [other.sample()["step"].tolist() for _ in range(5)] == drawn
        assert torch.equal(torch.get_rng_state(), before), "a load does not reseed the program"
    assert torch.equal(theirs.get_state(), mine.get_state()), "it is the generator that was given that goes on"


def test_the_default_generator():
    rb = buffer(n=9)
    torch.manual_seed(3)
    rb.sample()
    state = through_a_file(rb.state_dict())
    drawn = rb.sample()["step"].tolist()
    other = buffer()
    torch.manual_seed(4)
    other.load_state_dict(state, default_rng=True)
    assert other.sample()["step"].tolist() == drawn
    torch.manual_seed(4)
    other.load_state_dict(state)
    assert torch.initial_seed() == 4


def test_settings_of_the_buffer():
    rb = buffer(LazyTensorStorage(L, lanes=3), n=3).on_lane(2)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(L, lanes=3))
    other.load_state_dict(rb.state_dict())
    assert other.batch_size == 4
    assert other.extend(rows(1)).tolist() == rb.extend(rows(1)).tolist() == [9]


@pytest.mark.parametrize("batches", range(6))
def test_iteration_goes_on(batches):
    rb = buffer(sampler=SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(0), n=10)
    for _ in range(batches):
        rb.next()
    other = buffer(sampler=SamplerWithoutReplacement())
    other.load_state_dict(through_a_file(rb.state_dict()))
    for _ in range(9):
        assert bits(rb.next()) == bits(other.next())


def test_transforms():
    def make():
        return buffer(transform=Compose(VecNorm(["obs"], decay=0.9), ObservationNorm(1.0, 2.0, ["score"])))

    rb, other = make(), make()
    rb.extend(rows(9))
    torch.manual_seed(0)
    rb.sample()
    state = rb.state_dict()
    before = bits(state)
    drawn = rb.sample()
    rb.transform[1].scale.fill_(7.0)
    assert bits(state) == before
    other.load_state_dict(through_a_file(state), default_rng=True)
    assert bits(other.sample()) == bits(drawn)
    assert bits(other.transform[0].state_dict()) == bits(rb.transform[0].state_dict())


def test_modules_are_transforms_with_state():
    def make():
        torch.manual_seed(0)
        return ReplayBuffer(storage=LazyTensorStorage(5), transform=torch.nn.Linear(3, 2).double())

    rb, other = make(), make()
    state = rb.state_dict()
    with torch.no_grad():
        other.transform[0].weight.zero_()
    weight = other.transform[0].weight.clone()
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**state, "_transforms": {"0": {"weight": torch.zeros(1, 1), "bias": torch.ones(2)}}})
    assert torch.equal(other.transform[0].weight, weight)
    assert not torch.equal(other.transform[0].bias, torch.ones(2, dtype=torch.float64)), "and its other parts"
    other.load_state_dict(state)
    assert torch.equal(other.transform[0].weight, rb.transform[0].weight)


def test_final_observations():
    def make():
        finals = FinalObservations(["obs"], LazyTensorStorage(6))
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(L),
            sampler=NextFromFollowing(RandomSampler(), finals),
            transform=finals,
            batch_size=16,
            generator=torch.Generator().manual_seed(0),
        )

    def steps(n, first):
        data = rows(n, first).select("obs", "next")
        data["next", "obs"] = data["obs"] + 1
        data["obs"][1:] = data["next", "obs"][:-1]
        data["next", "obs"][:-1] = data["obs"][1:]
        data["next", "done"][-1] = True
        return data

    rb, other = make(), make()
    for first in range(0, 21, 7):
        rb.extend(steps(7, first))
    other.load_state_dict(through_a_file(rb.state_dict()))
    for first in range(21, 49, 7):
        one, two = rb.sample(), other.sample()
        assert bits(one.exclude(("next", "final"))) == bits(two.exclude(("next", "final")))
        rb.extend(steps(7, first))
        other.extend(steps(7, first))


class Counting(Newest):
    """Holds what no state can."""

    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def state_dict(self):
        return {**super().state_dict(), "deep": [{"held": self.held}]}


def test_a_sampler_of_ones_own():
    rb = buffer(sampler=Newest(), n=5)
    other = buffer(sampler=Newest(), n=2)
    other.load_state_dict(through_a_file(rb.state_dict()))
    assert other.sampler.state_dict() == {"rows": [0, 1, 2, 3, 4]}
    assert other.sample(2)["step"].tolist() == [3, 4]


@pytest.mark.parametrize("held", [object(), (1, 2), {1: 2}, {1}, np.float64(2.0), b"x"])
def test_state_that_cannot_be_saved_is_named(held):
    rb = buffer(sampler=Counting(held), n=2)
    with pytest.raises(TypeError, match=r"_sampler\['deep'\]\[0\]\['held'\]"):
        rb.state_dict()


def test_a_writer_of_ones_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(6), writer=Backwards())
    rb.extend(torch.arange(2))
    state = rb.state_dict()
    assert state["_writer"] == {}, "it has none"
    with pytest.raises(KeyError, match="_writer: expected an empty state"):
        rb.load_state_dict({**state, "_writer": {"asked": 3}})
    rb.load_state_dict(state)
    assert rb[:].tolist() == [0] * 4 + [1, 0]


# ---- refusals ----------------------------------------------------------------------------------------------------------


def put(state, way, value):
    """The state with another entry; ``...`` takes it out."""
    state = copied(state)
    at = state
    for part in way[:-1]:
        at = at[part]
    if value is ...:
        del at[way[-1]]
    else:
        at[way[-1]] = value(at[way[-1]]) if callable(value) else value
    return state


def _changed(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


BROKEN = [
    (("_storage",), ..., KeyError),
    (("_more",), 1, KeyError),
    (("_storage",), [], TypeError),
    (("_storage", "rows"), ..., KeyError),
    (("_storage", "more"), 1, KeyError),
    (("_storage", "schema"), 3, TypeError),
    (("_storage", "schema"), "{", ValueError),
    (("_storage", "schema"), lambda text: text.replace("float32", "float16"), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace('"capacity":12', '"capacity":24'), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace('"lanes":1', '"lanes":2'), IncompatibleCheckpoint),
    (("_storage", "schema"), lambda text: text.replace("[2,0]", "[9,0]"), IncompatibleCheckpoint),
    (("_storage", "schema"), None, ValueError),
    (("_storage", "lanes"), _changed((0, 1), L + 1), ValueError),
    (("_storage", "lanes"), _changed((0, 0), -1), ValueError),
    (("_storage", "lanes"), lambda lanes: lanes.int(), TypeError),
    (("_storage", "lanes"), lambda lanes: lanes[0], ValueError),
    (("_storage", "numbers"), _changed(0, -1), ValueError),
    (("_storage", "numbers"), _changed(0, 1 << 40), ValueError),
    (("_storage", "numbers"), lambda numbers: torch.cat([numbers] * 9), ValueError),
    (("_storage", "clock"), 0, ValueError),
    (("_storage", "clock"), True, TypeError),
    (("_storage", "write_count"), -1, ValueError),
    (("_storage", "write_count"), 1.0, TypeError),
    (("_storage", "rows"), lambda fields: fields[1:], ValueError),
    (("_storage", "rows", 0), lambda field: field.double(), TypeError),
    (("_storage", "rows", 0), lambda field: field[1:], ValueError),
    (("_storage", "rows", 0), "x", TypeError),
    (("_storage", "priorities"), {"a b": {}}, ValueError),
    (("_storage", "priorities", "critic", "eps"), 0.5, IncompatibleCheckpoint),
    (("_storage", "priorities", "critic", "alpha"), 0.5, IncompatibleCheckpoint),
    (("_storage", "priorities", "critic", "leaves"), lambda leaves: leaves.repeat(2), IncompatibleCheckpoint),
    (("_storage", "priorities", "critic", "leaves"), _changed(2, math.nan), PriorityError),
    (("_storage", "passes"), {"x": {"key": 1, "rows": 2, "visited": 3}}, ValueError),
    (("_storage", "windows"), {"main": 0}, ValueError),
    (("_sampler", "leaves"), ..., KeyError),
    (("_sampler", "leaves"), _changed(3, -1.0), PriorityError),
    (("_sampler", "leaves"), _changed(3, math.inf), PriorityError),
    (("_sampler", "leaves"), lambda leaves: leaves.float(), TypeError),
    (("_sampler", "alpha"), 0.6, IncompatibleCheckpoint),
    (("_sampler", "eps"), 0.6, IncompatibleCheckpoint),
    (("_sampler", "beta"), math.nan, ValueError),
    (("_sampler", "beta"), "0.4", TypeError),
    (("_storage", "priorities", "critic", "highest"), 1e300, PriorityError),
    (("_sampler", "highest"), -1.0, ValueError),
    (("_writer",), {"_cursor": 3}, KeyError),
    (("_transforms",), {}, KeyError),
    (("_transforms", "0", "frozen"), torch.zeros(2), TypeError),
    (("_transforms", "0", "0.mean"), ..., KeyError),
    (("_transforms", "0", "0.mean"), torch.full((3,), math.nan), ValueError),
    (("_transforms", "0", "0.weight"), torch.zeros(()), ValueError),
    (("_transforms", "0", "0.squares"), torch.zeros(2), ValueError),
    (("_transforms", "1", "scale"), torch.tensor(-1.0), ValueError),
    (("_transforms", "1", "loc"), "x", TypeError),
    (("_batch_size",), 0, ValueError),
    (("_batch_size",), "4", TypeError),
    (("_lane",), 1, ValueError),
    (("_iterating",), None, TypeError),
    (("_consume_after_n_samples",), 2, TypeError),
    (("_rng",), torch.zeros(3), TypeError),
    (("_rng",), [torch.zeros(3, dtype=torch.uint8), "cpu"], ValueError),
    (("_rng",), [torch.zeros(3), "cpu"], TypeError),
    (("_rng",), [torch.get_rng_state(), "cuda"], ValueError),
    (("_default_rng",), None, TypeError),
    (("_prefetch_state",), {"queue": []}, KeyError),
    (("_prefetch_state",), [], TypeError),
]


@pytest.mark.parametrize(("way", "value", "error"), BROKEN)
def test_a_state_that_is_refused_changes_nothing(way, value, error):
    def make(seed):
        rb = buffer(
            sampler=PrioritizedSampler(L, 0.7, 0.5),
            transform=Compose(VecNorm(["obs"]), ObservationNorm(1.0, 2.0, ["score"])),
            generator=torch.Generator().manual_seed(seed),
            n=seed,
        )
        critic = PrioritizedSampler(L, 1.0, 0.5, index="critic")
        critic.bind(rb.storage)
        rb.update_priority(torch.arange(seed), torch.rand(seed))
        rb.sample()
        return rb

    state = make(8).state_dict()
    broken = put(state, way, value)
    used, fresh = make(5), buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), transform=make(5).transform)
    for rb in (used,) if way[:2] in NEEDS_ROWS else (used, fresh):
        before = bits(rb.state_dict())
        with pytest.raises(error) as raised:
            rb.load_state_dict(broken)
        assert type(raised.value) is error
        assert bits(rb.state_dict()) == before


#: What can be compared only where there is something.
NEEDS_ROWS = [("_storage", "priorities"), ("_storage", "schema")]


BROKEN_LISTS = [
    (("max_size",), 13, IncompatibleCheckpoint),
    (("cursor",), -1, ValueError),
    (("numbers",), _changed(0, 2), ValueError),
    (("numbers",), _changed(0, 0), ValueError),
    (("numbers",), lambda numbers: numbers[1:], ValueError),
    (("items", "form"), _changed(0, 7), ValueError),
    (("items", "form"), _changed(0, -1), ValueError),
    (("items", "forms", 0, "tree"), "[", ValueError),
    (("items", "forms", 0, "tree"), '["object","x"]', ValueError),
    (("items", "forms", 0, "tree"), '["tensor","object",1,"cpu"]', ValueError),
    (("items", "forms", 0, "parts", 0, "bytes"), lambda raw: raw[1:], ValueError),
    (("items", "forms", 0, "parts", 0, "bytes"), lambda raw: torch.cat([raw, raw]), ValueError),
    (("items", "forms", 0, "parts", 0, "sizes"), lambda sizes: -sizes, ValueError),
    (("items", "forms", 0, "parts", 0, "sizes"), lambda sizes: sizes + (1 << 40), ValueError),
    (("items", "forms", 0, "parts"), [], ValueError),
    (("items", "forms", 0, "parts"), lambda parts: parts * 2, ValueError),
    (("items", "forms"), lambda forms: forms * 2, ValueError),
    (("items",), {}, KeyError),
    (("priorities",), {"main": 3}, TypeError),
]


@pytest.mark.parametrize(("way", "value", "error"), BROKEN_LISTS)
def test_a_list_that_is_refused_changes_nothing(way, value, error):
    def make(n):
        rb = ReplayBuffer(storage=ListStorage(L), collate_fn=list)
        rb.extend([torch.arange(float(k + 1)) for k in range(n)])
        return rb

    rb = make(3)
    before = bits(rb.state_dict())
    with pytest.raises(error):
        rb.storage.load_state_dict(put(make(5).storage.state_dict(), way, value))
    assert bits(rb.state_dict()) == before


def test_a_component_of_ones_own_that_refuses():
    class Picky(Newest):
        def load_state_dict(self, state_dict):
            self._rows = list(state_dict["rows"])
            if len(self._rows) > 3:
                raise OverflowError("too many")

    state = buffer(sampler=Newest(), n=5).state_dict()
    rb = buffer(sampler=Picky(), n=2)
    before = bits(rb.state_dict())
    with pytest.raises(OverflowError):
        rb.load_state_dict(state)
    assert bits(rb.state_dict()) == before
    with pytest.raises(KeyError):
        rb.load_state_dict({**state, "_transforms": {"0": {}}, "_sampler": {"rows": [1]}})
    assert bits(rb.state_dict()) == before


def test_another_layout_is_refused():
    state = buffer(n=5).state_dict()
    for storage, says in (
        (LazyTensorStorage(L + 1), f"capacity: expected {L + 1}, got {L}. Buffers of other sizes take it with loads"),
        (LazyTensorStorage(L, lanes=2), "lanes: expected 2, got 1. Buffers"),
        (LazyTensorStorage(L, ndim=2), r"ndim: expected 2, got 1\.$"),
    ):
        rb = buffer(storage)
        with pytest.raises(IncompatibleCheckpoint, match=f"schema: expected that of this storage, got another: {says}"):
            rb.load_state_dict(state)
        assert not rb.storage.initialized, "nothing was allocated"
    with pytest.raises(KeyError):
        buffer(ListStorage(L)).load_state_dict(state)


def test_a_disk_that_fails_leaves_an_empty_buffer(monkeypatch):
    rb = buffer(n=5)
    state = rb.state_dict()

    def fails(tensors):
        tensors[0][:3] = 1.0
        raise OSError(5, "no more")

    with pytest.raises(OSError, match="no more"):
        rb.storage.prepare_rows(
            {k: v for k, v in state["_storage"].items() if k != "rows"}, SimpleNamespace(fill=fails)
        ).commit()
    assert len(rb) == 0
    assert rb.extend(rows(2)).tolist() == [0, 1]


@pytest.mark.parametrize("writer", [RoundRobinWriter, lambda: TensorDictMaxValueWriter("a")], ids=["ring", "best"])
def test_states_of_a_buffer_at_work(writer):
    """Writers wait while a state is made or taken over: its rows are whole, and those it says are there."""
    stop, failed = threading.Event(), []

    def work(do):
        try:
            while not stop.is_set():
                do()
        except BaseException as error:
            failed.append(error)
            raise

    def same(steps):
        return TensorDict({"a": steps, "b": steps.unsqueeze(-1).expand(-1, 50).clone()}, batch_size=[len(steps)])

    rb = buffer(LazyTensorStorage(64), PrioritizedSampler(64, 0.7, 0.5), writer())
    numbers = itertools.count()

    def write():
        rb.extend(same(torch.arange(7) + 7 * next(numbers)))

    def read():
        with contextlib.suppress(NoSampleable):  # it is just being replaced
            batch = rb.sample(16)
            assert (batch["b"] == batch["a"].unsqueeze(-1)).all()

    write()
    threads = [threading.Thread(target=work, args=(do,)) for do in (write, read)]
    for thread in threads:
        thread.start()
    try:
        states = []
        for _ in range(40):
            states.append(rb.state_dict())
            rb.load_state_dict(states[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    for state in states:
        a, b = state["_storage"]["rows"]
        written, live = state["_storage"]["write_count"], len(a)
        assert live == min(written, 64)
        assert (b == a.unsqueeze(-1)).all()
        assert written % 7 == 0, "no write by half"
        assert (state["_sampler"]["leaves"][:live] > 0).all()


class Watching(Newest):
    """Lets another thread write while its state is made or taken over, and notes whether that waits."""

    def __init__(self):
        super().__init__()
        self.rb, self.waited, self.thread = None, [], None

    def write(self):
        self.thread = threading.Thread(target=self.rb.add, args=(rows(1)[0],))
        self.thread.start()
        self.thread.join(0.1)
        self.waited.append(self.thread.is_alive())

    def state_dict(self):
        self.write()
        return super().state_dict()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
def test_writers_wait_for_a_state(storage):
    rb = buffer(STORAGES[storage](), Watching(), n=3)
    rb.sampler.rb = rb
    state = rb.state_dict()
    rb.sampler.thread.join()
    assert rb.sampler.waited == [True]
    assert len(rb) == 4
    assert len(state["_storage"]["numbers"]) == 3
    assert state["_sampler"] == {"rows": [0, 1, 2]}
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
@pytest.mark.parametrize("n", [0, 2])
def test_writers_wait_until_all_is_taken_over(storage, n, monkeypatch):
    """A row that is written before the priorities are there is not one that the state says nothing of."""
    rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=n)
    state = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=4).state_dict()
    restore, threads = PriorityIndex.restore, []

    def late(index, state):
        threads.append(threading.Thread(target=rb.add, args=(rows(1)[0],)))
        threads[0].start()
        threads[0].join(0.1)
        restore(index, state)

    monkeypatch.setattr(PriorityIndex, "restore", late)
    rb.load_state_dict(state)
    threads[0].join()
    assert len(rb) == 5
    assert rb.sampler.state_dict()["leaves"][:6].tolist() == [1, 1, 1, 1, 1, 0]
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "device"])
def test_writers_wait_for_a_load(storage):
    rb = buffer(STORAGES[storage](), Watching(), n=3)
    rb.sampler.rb = rb
    state = rb.storage.state_dict()
    without = {name: value for name, value in state.items() if name != "rows"}

    def fill(tensors):
        assert len(rb) == 0, "nobody reads what is just being filled"
        rb.sampler.write()
        for tensor, field in zip(tensors, state["rows"], strict=True):
            tensor[:3] = field

    rb.storage.prepare_rows(without, SimpleNamespace(fill=fill)).commit()
    rb.sampler.thread.join()
    assert rb.sampler.waited == [True]
    assert rb["step"].tolist() == [0, 1, 2, 0]
    rb.close()


@pytest.mark.parametrize("storage", ["ram", "memmap", "list", "device"])
@pytest.mark.parametrize("part", ["buffer", "storage"])
def test_a_load_waits_for_who_has_placed_rows(storage, part):
    """And does not pause him: he would wait for the load, and it for him."""
    rb = buffer(STORAGES[storage](), n=3)
    one = rb if part == "buffer" else rb.storage
    thread = threading.Thread(target=one.load_state_dict, args=(one.state_dict(),))
    with rb.storage.placing:
        thread.start()
        thread.join(0.1)
        assert rb.extend(rows(1)).tolist() == [3]
    thread.join()
    assert len(rb) == 3
    rb.close()


def test_trees():
    tree = {"a": [1, None, {"b": torch.ones(2)}], "c": "x", "d": 1.5, "e": True}
    assert bits(mapped(tree, lambda tensor: tensor * 0)) == bits(
        {"a": [1, None, {"b": torch.zeros(2)}], "c": "x", "d": 1.5, "e": True}
    )
    copy_ = copied({"a": torch.nn.Parameter(torch.ones(2))})
    assert type(copy_["a"]) is torch.Tensor
    assert not copy_["a"].requires_grad


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_carry_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=7, generator=torch.Generator().manual_seed(0))
    state = rb.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = mapped(state, torch.zeros_like)
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert bits(loaded) == bits(state)
    other = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5))
    other.load_state_dict(loaded)
    assert contents(other) == contents(rb)
    tensors = []
    mapped(state, tensors.append)
    assert all(one.is_contiguous() and type(one) is torch.Tensor for one in tensors)
    memory = [one.untyped_storage().data_ptr() for one in tensors if one.numel()]
    assert len(set(memory)) == len(memory), "safetensors takes none that share memory"


def test_a_deepcopy_and_a_load_agree():
    rb = buffer(sampler=PrioritizedSampler(L, 0.7, 0.5), n=L + 3, generator=torch.Generator().manual_seed(0))
    assert contents(copy.deepcopy(rb)) == contents(rb)
