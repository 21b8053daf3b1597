import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from engram._support.state import mapped
from tests.buffer.dumped import Through
from tests.buffer.states import STORAGES, L, best, buffer, items, kinds, twins
from tests.components import Newest
from tests.twins import bits, by_state, contents, rows, through_a_file

pytestmark = pytest.mark.filterwarnings("ignore:sample. batch_size", "ignore:.* has no priorities")


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


def test_draws_of_before_match_the_rows_that_the_state_has_still():
    for storage in ("ram", "list"):
        rb = buffer(STORAGES[storage](), PrioritizedSampler(L, 1.0, 0.5, eps=0.0), n=L - 2)
        state, handles = rb.state_dict(), rb.sample(50)["index_generation"]
        rb.extend(rows(2, 70))
        later = rb.storage.tickets_of(torch.tensor([L - 2, L - 1]))
        rb.load_state_dict(state)
        rb.extend(rows(2, 80))  # where those were
        rb.update_priority([L - 2, L - 1], 9.0, generation=later)
        assert rb.sampler.state_dict()["highest"] == 0.0
        assert rb.stats()["priority_updates_dropped"] == 2
        again = rb.sample(200)["index_generation"]
        assert set(handles.tolist()) <= set(again.tolist())
        assert not set(later.tolist()) & set(again.tolist())


@pytest.mark.parametrize("storage", ["ram", "list"])
@pytest.mark.parametrize("way", ["by_state", "dumps", "series"])
def test_tickets_and_writes_keep_their_order(storage, way, ram):
    def orders(rb):
        tickets = rb.storage.tickets_of(torch.arange(L))
        return tickets.argsort().tolist(), rb.storage.writes_of(torch.arange(L), tickets)

    through = by_state if way == "by_state" else getattr(Through(ram), way)
    rb = buffer(STORAGES[storage](), n=L + 5)
    rb[3] = rows(1, 90)[0]
    order, writes = orders(rb)
    assert order[-1] == 3 == writes.argsort()[-2]
    for _ in range(2):
        other = buffer(STORAGES[storage]())
        through(rb, other)
        assert orders(other)[0] == order
        assert torch.equal(orders(other)[1], writes)
        rb = other


def test_states_of_lists_with_writes_that_no_list_has():
    rb = buffer(ListStorage(L), n=4)
    rb[1] = rows(1, 90)[0]
    state = rb.storage.state_dict()
    assert state["writes"].tolist() == [1, 2, 3, 4]
    assert state["numbers"].tolist() == [1, 5, 3, 4]
    for writes in ([1, 6, 3, 4], [1, 0, 3, 4], [1, -1, 3, 4], [1, 2, 3]):
        with pytest.raises(ValueError, match="writes"):
            rb.storage.load_state_dict({**state, "writes": torch.tensor(writes)})
    assert torch.equal(rb.storage.state_dict()["numbers"], state["numbers"])


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
    with buffer(sampler=PrioritizedSampler(L, 0.2, 0.5)) as fresh:
        fresh.load_state_dict(state)
        assert (fresh.sampler.alpha, fresh.sampler.beta) == (0.7, 0.5)
    rb.sampler.alpha = 0.4
    rb.load_state_dict(state)
    assert rb.sampler.alpha == 0.4


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
        ({1.5: torch.zeros(1)}, "item 1"),
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
