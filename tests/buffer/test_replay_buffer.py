"""ReplayBuffer: its arguments, writing, sampling, iterating, what it says of itself, and what it refuses."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    RowError,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.buffer.every_storage import rows
from tests.components import Listener


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# ---- constructor: every argument matters -----------------------------------------------------------------------------------


def test_all_defaults():
    rb = ReplayBuffer()
    assert isinstance(rb.storage, ListStorage)
    assert rb.storage.max_size == 1000
    assert type(rb.sampler) is RandomSampler
    assert type(rb.writer) is RoundRobinWriter
    assert rb.batch_size is None
    assert len(rb.transform) == 0
    assert len(rb) == 0


class TestSize:
    def test_is_that_of_the_default_storage(self):
        rb = ReplayBuffer(3)
        assert rb.storage.max_size == 3
        rb.extend(torch.arange(5))
        assert rows(rb) == [3, 4, 2]

    def test_bounds_a_list_storage_that_has_none(self):
        rb = ReplayBuffer(3, storage=ListStorage())
        rb.extend(torch.arange(5))
        assert rows(rb) == [3, 4, 2]
        unbounded = ReplayBuffer(storage=ListStorage())
        unbounded.extend(torch.arange(5))
        assert rows(unbounded) == [0, 1, 2, 3, 4]
        assert "capacity" not in unbounded.stats()

    def test_agrees_with_the_storage(self, storage):
        assert ReplayBuffer(7, storage=storage(7)).storage.max_size == 7
        with pytest.raises(ValueError, match="size.*7.*8"):
            ReplayBuffer(8, storage=storage(7))

    def test_agrees_with_what_the_storage_was_asked_for(self):
        rb = ReplayBuffer(100, storage=LazyTensorStorage(100, lanes=3))
        assert rb.storage.max_size == 99
        ReplayBuffer(99, storage=LazyTensorStorage(100, lanes=3))
        with pytest.raises(ValueError, match="size"):
            ReplayBuffer(98, storage=LazyTensorStorage(100, lanes=3))

    @pytest.mark.parametrize("size", [0, -1])
    def test_out_of_range(self, size):
        with pytest.raises(ValueError, match=f"size.*{size}"):
            ReplayBuffer(size)

    @pytest.mark.parametrize("size", [2.5, "10", True, [3]])
    def test_of_another_type(self, size):
        with pytest.raises(TypeError, match="size"):
            ReplayBuffer(size)


class TestComponents:
    def test_given_as_objects(self):
        storage, sampler, writer = LazyTensorStorage(5), SamplerWithoutReplacement(), RoundRobinWriter()
        rb = ReplayBuffer(storage=storage, sampler=sampler, writer=writer)
        assert rb.storage is storage
        assert rb.sampler is sampler
        assert rb.writer is writer

    def test_given_as_callables(self):
        rb = ReplayBuffer(
            storage=lambda: LazyTensorStorage(5),
            sampler=SamplerWithoutReplacement,
            writer=lambda: RoundRobinWriter(track_generations=True),
        )
        assert type(rb.storage) is LazyTensorStorage
        assert type(rb.sampler) is SamplerWithoutReplacement
        assert rb.writer.tracks_generations
        assert type(ReplayBuffer(storage=ListStorage).storage) is ListStorage

    @pytest.mark.parametrize("wrong", [3, "LazyTensorStorage", RandomSampler(), RoundRobinWriter, lambda: None, []])
    def test_a_wrong_storage(self, wrong):
        with pytest.raises(TypeError, match="storage.*Storage"):
            ReplayBuffer(storage=wrong)

    @pytest.mark.parametrize("wrong", [3, "uniform", ListStorage(3), RoundRobinWriter(), ListStorage, lambda: 3])
    def test_a_wrong_sampler(self, wrong):
        with pytest.raises(TypeError, match="sampler.*Sampler"):
            ReplayBuffer(sampler=wrong)

    @pytest.mark.parametrize("wrong", [3, "ring", ListStorage(3), RandomSampler(), RandomSampler, lambda: 3])
    def test_a_wrong_writer(self, wrong):
        with pytest.raises(TypeError, match="writer.*Writer"):
            ReplayBuffer(writer=wrong)

    def test_a_storage_class_that_needs_arguments(self):
        with pytest.raises(TypeError, match="max_size"):
            ReplayBuffer(10, storage=LazyTensorStorage)


class TestBatchSize:
    def test_is_the_default_of_sample(self, storage):
        rb = ReplayBuffer(storage=storage(5), batch_size=3)
        rb.extend(torch.arange(5))
        assert rb.batch_size == 3
        assert len(rb.sample()) == 3
        assert rb.can_sample()

    def test_missing(self, storage):
        rb = ReplayBuffer(storage=storage(5))
        rb.extend(torch.arange(5))
        for call in (rb.sample, rb.can_sample, rb.next, lambda: iter(rb)):
            with pytest.raises(RuntimeError, match="batch.size"):
                call()

    def test_given_twice_the_call_wins_and_says_so_once(self):
        rb = ReplayBuffer(5, batch_size=3)
        rb.extend(torch.arange(5))
        with pytest.warns(UserWarning, match="batch_size=4.*batch_size=3"):
            assert len(rb.sample(4)) == 4
        assert len(rb.sample(5)) == 5
        assert len(rb.sample()) == len(rb.sample(3)) == 3

    def test_asking_whether_a_sample_is_possible_says_nothing(self):
        rb = ReplayBuffer(5, batch_size=3)
        rb.extend(torch.arange(5))
        assert rb.can_sample(4)
        with pytest.warns(UserWarning, match="batch_size=4"):
            rb.sample(4)

    @pytest.mark.parametrize("wrong", [0, -1])
    def test_out_of_range(self, wrong, storage):
        with pytest.raises(ValueError, match=f"batch_size.*{wrong}"):
            ReplayBuffer(batch_size=wrong)
        for filled in (False, True):
            rb = ReplayBuffer(storage=storage(5))
            if filled:
                rb.extend(torch.arange(5))
            with pytest.raises(ValueError, match=f"batch_size.*{wrong}"):
                rb.sample(wrong)

    @pytest.mark.parametrize("wrong", [2.0, "3", True, torch.tensor(3)])
    def test_of_another_type(self, wrong):
        with pytest.raises(TypeError, match="batch_size"):
            ReplayBuffer(batch_size=wrong)
        rb = ReplayBuffer(5)
        rb.extend(torch.arange(5))
        with pytest.raises(TypeError, match="batch_size"):
            rb.sample(wrong)


class TestGenerator:
    def test_drives_every_draw(self, storage):
        def draws(seed):
            rb = ReplayBuffer(storage=storage(50), generator=seeded(seed))
            rb.extend(torch.arange(50))
            return rb.sample(20).tolist()

        assert draws(1) == draws(1) != draws(2)

    def test_on_another_device(self):
        class Elsewhere(torch.Generator):
            device = torch.device("cuda")

        with pytest.raises(ValueError, match="generator.*CPU.*cuda"):
            ReplayBuffer(5, generator=Elsewhere())
        with pytest.raises(ValueError, match="generator.*CPU.*cuda"):
            ReplayBuffer(5).set_rng(Elsewhere())


LATER = {
    "service_backend_options": ({}, "service_backend='ray'"),
    "transport": ("distributed", "service_backend='ray'"),
    "transport_options": ({}, "service_backend='ray'"),
}


class TestArgumentsThatComeLater:
    @pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
    @pytest.mark.parametrize(("name", "value", "carrier"), [(k, *v) for k, v in LATER.items()], ids=LATER.keys())
    def test_are_named_with_what_will_carry_them(self, buffer, name, value, carrier):
        with pytest.raises(TypeError, match=rf"{buffer.__name__}.*'{name}'.*{carrier}"):
            buffer(10, **{name: value})

    @pytest.mark.parametrize("name", LATER)
    def test_may_be_off(self, name):
        ReplayBuffer(10, **{name: None})
        TensorDictReplayBuffer(10, **{name: False})

    def test_unknown_ones(self):
        with pytest.raises(TypeError, match="storge"):
            ReplayBuffer(10, storge=ListStorage(10))
        with pytest.raises(TypeError, match="storge"):
            ReplayBuffer(10, storge=None)
        with pytest.raises(TypeError, match="priority_key"):
            ReplayBuffer(10, priority_key="td_error")

    def test_positional(self):
        with pytest.raises(TypeError):
            ReplayBuffer(10, ListStorage(10))


# ---- writing ---------------------------------------------------------------------------------------------------------------


def test_add_and_extend_return_rows(storage):
    rb = ReplayBuffer(storage=storage(4))
    first = rb.add(torch.tensor(0))
    assert type(first) is int
    assert first == 0
    index = rb.extend(torch.arange(1, 6))
    assert index.dtype is torch.int64
    assert index.device.type == "cpu"
    assert index.tolist() == [1, 2, 3, 0, 1]
    assert rows(rb) == [4, 5, 2, 3]
    assert rb.add(torch.tensor(6)) == 2
    assert rb.write_count == 7


def test_more_rows_than_fit(storage):
    rb = ReplayBuffer(storage=storage(4))
    rb.add(torch.tensor(-1))
    index = rb.extend(torch.arange(11))
    assert index.tolist() == [(1 + i) % 4 for i in range(11)]
    assert rows(rb) == [7, 8, 9, 10]
    assert (len(rb), rb.write_count) == (4, 12)


def test_a_list_of_rows_is_stacked():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}])
    assert rb["a"].tolist() == [1, 2]


def test_what_extend_refuses():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    for one in (torch.tensor(1), 3.0, TensorDict({"a": torch.zeros(2)}, batch_size=[])):
        with pytest.raises(TypeError, match="extend"):
            rb.extend(one)
    for wrong in (range(3), {1, 2}, "text", None):
        with pytest.raises(TypeError, match="extend"):
            rb.extend(wrong)
    assert not rb.storage.initialized


class TestLane:
    def test_of_one_call(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2))
        assert rb.lanes == 2
        assert rb.add(torch.tensor(1), lane=1) == 3
        assert rb.add(torch.tensor(2), lane=0) == 0
        assert rb.extend(torch.tensor([3, 4]), lane=1).tolist() == [4, 5]
        assert rb.extend(torch.tensor([5, 6]), lane=torch.tensor([1, 0])).tolist() == [3, 1]
        assert rb.extend(torch.tensor([7, 8]), lane=[0, 1]).tolist() == [2, 4]
        assert rb.extend(torch.tensor([9]), lane=np.array([1])).tolist() == [5]
        assert rb.add(torch.tensor(10), lane=np.int64(1)) == 3

    def test_of_the_handle(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2))
        assert rb.on_lane(1) is rb
        assert rb.add(torch.tensor(1)) == 3
        assert rb.extend(torch.tensor([2])).tolist() == [4]
        assert rb.add(torch.tensor(2), lane=0) == 0
        assert ReplayBuffer(storage=rb.storage).on_lane(0).add(torch.tensor(1)) == 1  # a lane of its own

    @pytest.mark.parametrize("lane", [-1, 2, 100])
    def test_out_of_range(self, lane):
        for filled in (False, True):
            rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2))
            if filled:
                rb.extend(torch.arange(2), lane=0)
            for call in (
                lambda: rb.add(torch.tensor(1), lane=lane),
                lambda: rb.extend(torch.arange(2), lane=lane),
                lambda: rb.extend(torch.arange(2), lane=torch.tensor([0, lane])),
                lambda: rb.on_lane(lane),
            ):
                with pytest.raises(RowError, match=rf"lane.*2\).*{lane}"):
                    call()
            assert rb.write_count == 2 * filled
            assert rb.storage.initialized == filled
            assert rb.add(torch.tensor(0), lane=0) == 2 * filled

    def test_one_per_row(self, storage):
        for filled in (False, True):
            rb = ReplayBuffer(storage=storage(6))
            if filled:
                rb.extend(torch.arange(2))
            for n in (2, 4):
                with pytest.raises(RuntimeError, match=rf"{n} rows.*lane.*3"):
                    rb.extend(torch.arange(3), lane=torch.zeros(n, dtype=torch.int64))
            assert rb.write_count == 2 * filled
            assert rb.extend(torch.arange(3), lane=torch.zeros(3, dtype=torch.int64)).tolist() == [
                2 * filled + i for i in range(3)
            ]

    @pytest.mark.parametrize("lane", ["a", 0.5, torch.tensor([0.5, 0.5]), torch.tensor([True, False]), object()])
    def test_of_another_type(self, lane):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2))
        rb.extend(torch.arange(2))
        with pytest.raises(TypeError, match="lane"):
            rb.extend(torch.arange(2), lane=lane)
        assert rb.write_count == 2

    def test_a_list_storage_has_one(self):
        rb = ReplayBuffer(5)
        assert rb.lanes == 1
        for lane in (1, torch.tensor([0, 1])):
            with pytest.raises(RowError, match="lane"):
                rb.extend(torch.arange(2), lane=lane)
        assert len(rb) == 0


def test_update_priority_of_extend_is_for_tensordict_buffers(storage):
    rb = ReplayBuffer(storage=storage(4))
    for value in (True, False):
        with pytest.raises(NotImplementedError, match="update_priority"):
            rb.extend(torch.arange(2), update_priority=value)
    assert len(rb) == 0
    rb.extend(torch.arange(2), update_priority=None)


class TestAllOrNothing:
    """Whatever is refused has changed nothing."""

    GOOD = {"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}
    WRONG = {
        "missing field": ({"a": torch.zeros(3, 2)}, KeyError, "'b'"),
        "unknown field": ({**GOOD, "d": torch.zeros(3)}, KeyError, "'d'"),
        "missing nested field": ({**GOOD, "b": {}}, KeyError, "'c'"),
        "shape": ({**GOOD, "a": torch.zeros(3, 5)}, RuntimeError, r"a\b.*\[3, 2\].*\[3, 5\]"),
        "shape that would broadcast": ({**GOOD, "a": torch.zeros(3, 1)}, RuntimeError, r"a\b.*\[3, 2\].*\[3, 1\]"),
        "dtype": ({**GOOD, "b": {"c": torch.zeros(3).double()}}, RuntimeError, r"'c'.*float32.*float64"),
        "dtype that would cast": ({**GOOD, "a": torch.zeros(3, 2).int()}, RuntimeError, r"a\b.*float32.*int32"),
        "rows": ({**GOOD, "b": {"c": torch.zeros(2)}}, RuntimeError, "rows"),
        "kind of the tree": (torch.zeros(3, 2), TypeError, "dict"),
        "kind of a node": ({**GOOD, "b": torch.zeros(3)}, TypeError, "'b'"),
        "kind of a leaf": ({**GOOD, "a": "text"}, TypeError, "'a'"),
        "one row": ({"a": torch.zeros(2), "b": {"c": torch.tensor(0.0)}}, (TypeError, RuntimeError), "extend"),
    }

    @pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
    def rb(self, request):
        rb = ReplayBuffer(storage=request.param(4))
        rb.extend({"a": torch.arange(6.0).reshape(3, 2), "b": {"c": torch.arange(3.0)}})
        return rb

    def unchanged(self, rb):
        assert (len(rb), rb.write_count) == (3, 3)
        assert rb["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert rb["b", "c"].tolist() == [0, 1, 2]
        assert not rb.storage[3]["a"].any()
        assert rb.add({"a": torch.ones(2), "b": {"c": torch.tensor(9.0)}}) == 3

    @pytest.mark.parametrize(("data", "kind", "says"), WRONG.values(), ids=WRONG.keys())
    def test_extend(self, rb, data, kind, says):
        with pytest.raises(kind, match=says) as caught:
            rb.extend(data)
        assert "extend" in str(caught.value)
        self.unchanged(rb)

    def test_extend_by_no_rows(self, rb):
        assert rb.extend({"a": torch.zeros(0, 2), "b": {"c": torch.zeros(0)}}).tolist() == []
        self.unchanged(rb)

    @pytest.mark.parametrize("what", ["missing field", "unknown field", "shape", "dtype", "kind of the tree"])
    def test_add(self, rb, what):
        data, kind, says = self.WRONG[what]
        first = (
            {k: v[0] if isinstance(v, torch.Tensor) else {"c": v["c"][0]} for k, v in data.items()}
            if isinstance(data, dict)
            else data[0]
        )
        with pytest.raises(kind, match=says.replace("3, ", "")) as caught:
            rb.add(first)
        assert "add" in str(caught.value)
        self.unchanged(rb)

    @pytest.mark.parametrize("what", ["missing field", "shape", "dtype", "rows", "kind of the tree"])
    def test_assignment(self, rb, what):
        data, kind, says = self.WRONG[what]
        with pytest.raises(kind, match=says):
            rb[:] = data
        self.unchanged(rb)

    def test_a_list_with_one_wrong_row(self, rb):
        good = {"a": torch.zeros(2), "b": {"c": torch.tensor(0.0)}}
        for wrong in ({"a": torch.zeros(2)}, {**good, "a": torch.zeros(3)}, {**good, "b": {"c": torch.tensor(0)}}):
            with pytest.raises((KeyError, RuntimeError)):
                rb.extend([good, good, wrong])
        self.unchanged(rb)

    def test_the_first_write(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        for wrong in ({"a": torch.zeros(3), "b": torch.zeros(2)}, {"a": object()}):
            with pytest.raises((TypeError, RuntimeError)):
                rb.extend(wrong)
        assert not rb.storage.initialized
        assert rb.extend({"z": torch.zeros(2)}).tolist() == [0, 1]

    def test_a_mistake_that_has_a_likely_reason_is_told_it(self, rb):
        with pytest.raises(RuntimeError, match=r"extend\(\)"):
            rb.add(self.GOOD)
        with pytest.raises(RuntimeError, match=r"torch.float32"):
            rb.extend({**self.GOOD, "a": torch.zeros(3, 2).double()})
        with pytest.raises(RuntimeError, match=r"reshape\(\[3, 2\]\)"):
            rb.extend({**self.GOOD, "a": torch.zeros(3, 2, 1)})
        flat = ReplayBuffer(storage=LazyTensorStorage(4))
        flat.add(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"add\(\)"):
            flat.extend(torch.zeros(2))


def test_what_cannot_be_stored_in_tensors():
    for wrong, kind, says in [
        ({".engram": torch.zeros(3)}, ValueError, ".engram"),
        ({"a": torch.zeros(3).to_sparse()}, TypeError, "'a'.*dense"),
        ({"a": np.array([None, None])}, TypeError, "'a'"),
        ({"a": [1, "x"]}, TypeError, "'a'"),
        ({1.5: torch.zeros(3)}, TypeError, "keys"),
        ({}, TypeError, "at least one"),
        (TensorDict({"a": object()}, batch_size=[3]), TypeError, "'a'"),
    ]:
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        with pytest.raises(kind, match=says):
            rb.extend(wrong)
        assert not rb.storage.initialized


def test_resolved_views_are_stored():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    data = torch.randn(3, 2, dtype=torch.complex64)
    rb.extend({"conj": data.conj(), "neg": data.conj().imag, "strided": data.t()[:, :].t()})
    assert torch.equal(rb["conj"], data.conj().resolve_conj())
    assert torch.equal(rb["neg"], -data.imag)
    assert torch.equal(rb["strided"], data)
    assert not rb["conj"].is_conj()


def test_stored_rows_are_copies_without_history(storage):
    rb = ReplayBuffer(storage=storage(4))
    data = torch.ones(2, requires_grad=True)
    rb.add(data)
    rb.extend((data * 2)[None])
    assert not rb[:].requires_grad
    assert not rb.sample(3).requires_grad
    assert data.requires_grad
    if storage is not ListStorage:  # a list keeps the objects
        with torch.no_grad():
            data.fill_(9)
        assert rb[0].tolist() == [1, 1]
    sample = rb.sample(4)
    sample.fill_(5)
    assert rb[:].tolist()[1] == [2, 2]


def test_one_storage_serves_several_buffers(storage):
    first = ReplayBuffer(storage=storage(4), sampler=Listener())
    second = ReplayBuffer(storage=first.storage)
    second.extend(torch.arange(3))
    assert rows(first) == [0, 1, 2]
    assert first.add(torch.tensor(3)) == 3
    assert second.write_count == 4
    assert [heard for heard, _ in first.sampler.heard] == [[0, 1, 2], [3]]


class TestEmpty:
    def test_forgets_the_rows_and_begins_again(self, storage):
        rb = ReplayBuffer(storage=storage(4))
        rb.extend(torch.arange(6))
        rb.empty()
        assert (len(rb), rb.write_count, rb.stats()["size"]) == (0, 0, 0)
        with pytest.raises(NoSampleable):
            rb.sample(1)
        with pytest.raises(RowError):
            rb[0]
        assert rb.extend(torch.tensor([7, 8])).tolist() == [0, 1]
        assert rows(rb) == [7, 8]

    def test_may_keep_the_count(self, storage):
        rb = ReplayBuffer(storage=storage(4))
        rb.extend(torch.arange(6))
        rb.empty(empty_write_count=False)
        assert (len(rb), rb.write_count) == (0, 6)
        rb.add(torch.tensor(0))
        assert rb.write_count == 7
        rb.empty(False)
        assert rb.write_count == 7
        rb.empty()
        assert rb.write_count == 0

    def test_of_a_buffer_that_was_never_written(self, storage):
        rb = ReplayBuffer(storage=storage(4))
        rb.empty()
        assert len(rb) == 0

    def test_keeps_fields(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        rb.extend(torch.zeros(2, 3))
        rb.sample(1)
        rb.empty()
        with pytest.raises(RuntimeError, match=r"\[3\]"):
            rb.add(torch.zeros(2))
