"""Samples, components that are exchanged, and what a buffer says of itself."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

import engram
from engram import (
    Checkpointer,
    DeviceLoader,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    Ranks,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.buffer.every_storage import rows
from tests.components import Backwards, Listener

# ---- sampling --------------------------------------------------------------------------------------------------------------


def test_info_points_at_the_rows(storage):
    rb = ReplayBuffer(storage=storage(10))
    rb.extend(torch.arange(14) * 10)
    batch, info = rb.sample(30, return_info=True)
    assert set(info) == {"index"}
    assert info["index"].dtype is torch.int64
    assert info["index"].shape == (30,)
    assert torch.equal(batch, torch.stack([rb[int(i)] for i in info["index"]]))
    assert isinstance(rb.sample(30), torch.Tensor)
    assert isinstance(rb.sample(30, False), torch.Tensor)
    assert len(rb.sample(30, True)) == 2


def test_nothing_to_sample(storage):
    for empty in (ReplayBuffer(storage=storage(4), batch_size=2), ReplayBuffer(storage=storage(4), batch_size=2)):
        with pytest.raises(NoSampleable, match="Add data"):
            empty.sample()
        with pytest.raises(RuntimeError):
            empty.sample(3, return_info=True) if empty.batch_size is None else empty.sample(return_info=True)
        assert empty.can_sample() is False
        empty.extend(torch.arange(3))
        assert empty.can_sample() is True
        empty.empty()


@pytest.mark.filterwarnings("ignore:sample. batch_size=3")
def test_shutdown_refuses_sampling(storage):
    rb = ReplayBuffer(storage=storage(4), batch_size=2)
    rb.extend(torch.arange(4))
    batches = iter(rb)
    next(batches)
    assert rb.is_alive
    rb.shutdown()
    rb.shutdown(timeout=1.0)
    assert not rb.is_alive
    for call in (rb.sample, lambda: rb.sample(3), lambda: next(batches), rb.next):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    assert rows(rb) == [0, 1, 2, 3]


def test_it_runs_in_this_process(storage):
    rb = ReplayBuffer(storage=storage(4))
    assert rb.start() is rb
    assert rb.client() is rb
    assert rb.service_backend == "direct"
    assert rb.synchronize() is None
    assert rb.initialized is True
    assert rb.shared is (storage is LazyMemmapStorage)
    assert rb.dim_extend == 0
    rb.close()
    rb.close()


class TestIteration:
    def test_with_replacement_it_never_ends(self, storage):
        rb = ReplayBuffer(storage=storage(4), batch_size=3)
        rb.extend(torch.arange(4))
        batches = list(itertools.islice(rb, 50))
        assert len(batches) == 50
        assert all(len(batch) == 3 for batch in batches)

    def test_without_it_ends_and_begins_again(self, storage):
        rb = ReplayBuffer(storage=storage(5), sampler=SamplerWithoutReplacement(), batch_size=2)
        rb.extend(torch.arange(5))
        for _ in range(3):
            assert sorted(torch.cat(list(rb)).tolist()) == [0, 1, 2, 3, 4]

    def test_needs_the_constructors_batch_size(self):
        rb = ReplayBuffer(4)
        rb.extend(torch.arange(4))
        with pytest.raises(RuntimeError, match=r"ReplayBuffer\(batch_size"):
            iter(rb)

    def test_a_pass_that_ended_before_does_not_end_this_one(self):
        rb = ReplayBuffer(4, sampler=SamplerWithoutReplacement(), batch_size=4)
        rb.extend(torch.arange(4))
        rb.sample()
        assert rb.sampler.ran_out
        assert len(list(rb)) == 1

    def test_of_an_empty_buffer(self):
        with pytest.raises(NoSampleable):
            next(iter(ReplayBuffer(4, batch_size=2)))

    def test_next_is_one_step_of_a_persistent_iterator(self, storage):
        rb = ReplayBuffer(storage=storage(5), sampler=SamplerWithoutReplacement(), batch_size=2)
        rb.extend(torch.arange(5))
        for _ in range(2):
            steps = [rb.next() for _ in range(4)]
            assert [None if step is None else len(step) for step in steps] == [2, 2, 1, None]

    def test_next_clears_the_device_of_a_tensordict(self):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
        rb.extend(TensorDict({"a": torch.arange(5)}, batch_size=[5]))
        assert rb.sample().device == torch.device("cpu")
        step = rb.next()
        assert step.device is None
        assert step["a"].shape == (2,)


# ---- components ------------------------------------------------------------------------------------------------------------


class TestSwapping:
    def test_the_storage(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        rb.extend(torch.arange(4))
        old, new = rb.storage, ListStorage(3)
        assert rb.set_storage(new) is old
        assert rb.storage is new
        assert len(rb) == 0
        assert rb.write_count == 0
        rb.extend(torch.arange(10, 13))
        assert rb.writer.write_count == 3
        assert set(rb.sample().tolist()) <= {10, 11, 12}
        assert len(old) == 4
        rb.set_storage(TensorStorage(torch.arange(20, 25)))
        assert set(rb.sample().tolist()) <= set(range(20, 25))
        assert rb.add(torch.tensor(7)) == 0

    def test_the_storage_with_its_collate_function(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4), collate_fn=lambda x: ("old", x))
        rb.set_storage(ListStorage(3), lambda x: ("new", len(x)))
        rb.extend(["a"])
        assert rb.sample(2) == ("new", 2)
        rb.set_storage(ListStorage(3))
        rb.extend(["a"])
        assert rb.sample(2) == ("new", 2)
        rb.set_storage(ListStorage(3), collate_fn=len)
        rb.extend(["a"])
        assert rb.sample(2) == 2

    def test_the_old_storage_is_not_heard_any_more(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=Listener())
        old = rb.set_storage(LazyTensorStorage(4))
        ReplayBuffer(storage=old).add(torch.tensor(1))
        assert rb.sampler.heard == []
        ReplayBuffer(storage=rb.storage).add(torch.tensor(1))
        assert len(rb.sampler.heard) == 1

    def test_the_sampler(self, storage):
        rb = ReplayBuffer(storage=storage(4), batch_size=4)
        rb.extend(torch.arange(4))
        old = rb.sampler
        assert rb.set_sampler(SamplerWithoutReplacement(shuffle=False)) is old
        assert rb.sample().tolist() == [0, 1, 2, 3]
        rb.set_sampler(RandomSampler())
        assert len({tuple(rb.sample().tolist()) for _ in range(30)}) > 1

    def test_the_writer_and_the_place_where_it_goes_on(self, storage):
        rb = ReplayBuffer(storage=storage(4))
        rb.extend(torch.arange(3))
        old = rb.writer
        new = RoundRobinWriter(track_generations=True)
        assert rb.set_writer(new) is old
        assert rb.add(torch.tensor(3)) == 3
        assert rb.add(torch.tensor(4)) == 0
        assert "index_generation" in rb.sample(2, return_info=True)[1]
        rb.set_writer(ImmutableDatasetWriter())
        with pytest.raises(RuntimeError, match="read-only"):
            rb.add(torch.tensor(5))
        assert rb.write_count == 0
        rb.set_writer(Backwards())
        assert rb.add(torch.tensor(6)) == 3
        rb.set_writer(RoundRobinWriter())
        assert rb.add(torch.tensor(7)) == 1

    def test_given_as_classes(self):
        rb = ReplayBuffer(4)
        rb.set_storage(lambda: LazyTensorStorage(3))
        rb.set_sampler(SamplerWithoutReplacement)
        rb.set_writer(ImmutableDatasetWriter)
        assert (type(rb.storage), type(rb.sampler)) == (LazyTensorStorage, SamplerWithoutReplacement)
        assert type(rb.writer) is ImmutableDatasetWriter

    def test_wrong_ones_change_nothing(self):
        rb = ReplayBuffer(4)
        before = rb.storage, rb.sampler, rb.writer
        for call in (rb.set_storage, rb.set_sampler, rb.set_writer):
            for wrong in (3, None, "text", object()):
                with pytest.raises(TypeError, match=call.__name__.removeprefix("set_")):
                    call(wrong)
        assert (rb.storage, rb.sampler, rb.writer) == before
        rb.add(torch.tensor(1))
        assert len(rb.storage) == 1


def test_priorities_reach_the_sampler():
    rb = ReplayBuffer(4, sampler=Listener())
    rb.update_priority([1, 2], torch.tensor([0.5, 0.6]), generation=torch.tensor([3, 4]))
    rb.update_priority(1, 0.5)
    ((index, priority, generation), second) = rb.sampler.priorities
    assert (index, priority.tolist(), generation.tolist()) == ([1, 2], [0.5, 0.6000000238418579], [3, 4])
    assert second == (1, 0.5, None)


# ---- what it says of itself --------------------------------------------------------------------------------------------------


def test_stats(storage):
    rb = ReplayBuffer(storage=storage(4))
    expected = {
        "size": 0,
        "write_count": 0,
        "prefetch_queue_size": 0,
        "initialized": 1,
        "capacity": 4,
        "utilization": 0.0,
        "lanes": 1,
        "void_rows": 0,
        "lapped_rows": 0,
        "redraws": 0,
    }
    assert expected.items() <= rb.stats().items()
    rb.extend(torch.arange(3))
    assert (rb.stats()["size"], rb.stats()["write_count"], rb.stats()["utilization"]) == (3, 3, 0.75)
    rb.extend(torch.arange(3))
    assert (rb.stats()["size"], rb.stats()["write_count"], rb.stats()["utilization"]) == (4, 6, 1.0)
    assert all(isinstance(value, int | float) for value in rb.stats().values())
    assert "capacity" not in ReplayBuffer(storage=ListStorage()).stats()
    assert "utilization" not in ReplayBuffer(storage=ListStorage()).stats()
    assert ReplayBuffer(storage=LazyTensorStorage(6, lanes=3)).stats()["lanes"] == 3


def test_write_count_is_an_int(storage):
    rb = ReplayBuffer(storage=storage(4))
    assert type(rb.write_count) is int
    rb.extend(torch.arange(9))
    assert type(rb.write_count) is int
    assert rb.write_count == 9


class TestRepr:
    def test_of_an_empty_buffer(self, storage):
        text = repr(ReplayBuffer(storage=storage(4)))
        assert text.startswith("ReplayBuffer(size=0/4 ")
        assert "RandomSampler()" in text
        assert "Writer" not in text  # the usual one

    def test_of_a_written_one(self, tmp_path):
        rb = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(10_000, scratch_dir=tmp_path, lanes=3),
            sampler=SamplerWithoutReplacement(drop_last=True),
            transform=torch.nn.Identity(),
            batch_size=32,
        )
        rb.extend(
            TensorDict({"obs": torch.zeros(1234, 25), "next": {"r": torch.zeros(1234)}}, batch_size=[1234]), lane=0
        )
        assert len(repr(rb)) <= 120
        assert repr(rb).startswith("TensorDictReplayBuffer(size=1,234/9,999 (12.3 %), ")
        assert "sampler=SamplerWithoutReplacement" in repr(rb)
        text = rb._repr_html_()
        for part in (
            "<caption>TensorDictReplayBuffer</caption>",
            "<progress value='1234' max='9999'>",
            "1,234/9,999 (12.3 %)",
            "obs</td><td style='text-align:left'>float32</td><td style='text-align:left'>[25]<",
            "100 B</td><td style='text-align:left'>1 MB<",
            "(&#x27;next&#x27;, &#x27;r&#x27;)",
            "1.04 MB",
            str(tmp_path),
            "obs",
            "r",
            "lanes</th><td style='text-align:left'>3<",
            "asked for</th><td style='text-align:left'>10,000<",
            "SamplerWithoutReplacement(drop_last=True",
            "Compose(Identity)",
            "batch_size</th><td style='text-align:left'>32<",
        ):
            assert part in text, (part, text)
        assert "\n" not in text

    def test_arguments_of_components_that_are_not_the_default(self):
        sampler = PrioritizedSampler(alpha=0.7, beta=0.5, dtype=torch.float64)
        assert repr(sampler) == "PrioritizedSampler(alpha=0.7, beta=0.5, dtype='float64')"
        assert repr(PrioritizedSampler(4, 0.7, 0.5)) == "PrioritizedSampler(max_capacity=4, alpha=0.7, beta=0.5)"
        assert "pad_output" not in repr(SliceSampler(slice_len=2))

    def test_of_what_works_with_buffers(self, tmp_path):
        rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        rb.extend(torch.arange(4))
        assert repr(Ranks.local()) == "Ranks(rank=0, world=1)"
        assert repr(DeviceLoader(rb, "cpu")) == "DeviceLoader(batch_size=2, device='cpu')"
        assert repr(DeviceLoader(rb, "cpu", 3)) == "DeviceLoader(batch_size=2, device='cpu', depth=3)"
        checkpointer = Checkpointer(tmp_path, rb, every_steps=50, keep=3)
        assert repr(checkpointer) == f"Checkpointer({str(tmp_path)!r}, every_steps=50, Ranks(rank=0, world=1))"
        handle = checkpointer.save(1, wait=False)
        report = handle.wait()
        assert repr(handle) == f"SaveHandle({report.path.name}, done)"

    def test_of_an_unbounded_one(self):
        assert repr(ReplayBuffer(storage=ListStorage())).startswith("ReplayBuffer(size=0, storage=ListStorage")

    def test_many_fields_are_counted(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        rb.add({f"field{i:02}": torch.zeros(1) for i in range(20)})
        assert "fields=20, " in repr(rb)
        assert "field12" not in repr(rb)
        assert "field12" in rb._repr_html_()

    def test_html(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(4))
        rb.add({"<b>": torch.zeros(1)})
        html = rb._repr_html_()
        assert html.startswith("<table>")
        assert html.endswith("</table>")
        assert "<caption>ReplayBuffer</caption>" in html
        assert "&lt;b&gt;" in html
        assert "<b>" not in html
        assert "RandomSampler()" in html


def test_what_collectors_and_trainers_look_at(storage):
    rb = TensorDictReplayBuffer(storage=storage(6), transform=torch.nn.Identity(), batch_size=2)
    assert rb._storage.initialized is (storage is ListStorage)
    assert rb.shared is (storage is LazyMemmapStorage)
    rb.extend(TensorDict({"a": torch.arange(4)}, batch_size=[4]))
    assert rb._storage.initialized is True
    assert rb._storage.device == rb.storage.device == (None if storage is ListStorage else torch.device("cpu"))
    assert rb._sampler is rb.sampler
    assert len(rb._transform) == 1
    assert isinstance(rb._transform[0], torch.nn.Identity)
    if storage is not ListStorage:
        everything = rb._storage._storage
        assert isinstance(everything, TensorDict)
        assert list(everything.keys()) == ["a"]
        assert everything.batch_size == (6,)
    rb.update_tensordict_priority(rb.sample())
    rb.empty(empty_write_count=False)
    assert rb.write_count == 4


# ---- forms of rows -----------------------------------------------------------------------------------------------------------


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def test_tensorclasses(storage):
    rb = ReplayBuffer(storage=storage(4))
    rb.extend(Step(obs=torch.arange(6).reshape(3, 2), reward=torch.zeros(3), batch_size=[3]))
    rb.add(Step(obs=torch.tensor([6, 7]), reward=torch.tensor(1.0), batch_size=[]))
    sample = rb.sample(5)
    assert isinstance(sample, Step)
    assert sample.obs.shape == (5, 2)
    assert isinstance(rb[3], Step)
    assert rb[3].obs.tolist() == [6, 7]
    assert rb[:].obs.shape == (4, 2)


def test_tuples_and_numpy_arrays():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend((torch.arange(3), {"a": np.zeros((3, 2), dtype=np.float32)}))
    rb.add((torch.tensor(9), {"a": np.ones(2, dtype=np.float32)}))
    number, nested = rb.sample(6)
    assert number.shape == (6,)
    assert isinstance(nested["a"], torch.Tensor)
    assert isinstance(rb[3], tuple)
    assert rb[3][1]["a"].tolist() == [1, 1]


def test_a_first_row_with_batch_dimensions_is_one_row_and_warns():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.warns(UserWarning, match=r"\[3\].*one row"):
        rb.add(TensorDict({"a": torch.arange(3)}, batch_size=[3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.add(TensorDict({"a": torch.arange(3)}, batch_size=[3]))
    assert len(rb) == 2
    assert rb.sample(5).batch_size == (5, 3)


def test_any_object_in_a_list():
    rb = ReplayBuffer(3, collate_fn=list)
    thing = object()
    assert rb.add(thing) == 0
    assert rb.extend([None, "text"]).tolist() == [1, 2]
    assert rb[0] is thing
    assert rb[:] == [thing, None, "text"]
    assert set(map(id, rb.sample(20))) <= {id(thing), id(None), id(rb[2])}


def test_plan_says_of_fields_what_the_creation_log_says(caplog):
    row = {"obs": torch.zeros(4), "reward": torch.zeros(1)}
    text = str(engram.plan(row, 10))
    caplog.set_level("INFO", logger="engram")
    ReplayBuffer(storage=LazyTensorStorage(10)).add(row)
    (message,) = caplog.messages
    assert message == "10 rows in RAM, 200 B: obs [4] float32 (160 B), reward [1] float32 (40 B)"
    assert "obs: obs.memmap or RAM, 160 B, shape [10, 4] float32\nreward: reward.memmap or RAM, 40 B," in text
    assert "10 rows of" in text


def test_a_storage_that_the_sampler_refuses_changes_nothing():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=PromptGroupSampler(num_groups=1, group_key="a"), batch_size=2
    )
    rb.extend({"a": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(TypeError, match="ListStorage"):
        rb.set_storage(ListStorage(8))
    rb.extend({"a": torch.zeros(2, dtype=torch.int64)})
    assert len(rb) == 6
    assert rb.sample()["a"].tolist() == [0, 0]


def test_a_storage_that_the_sample_unit_refuses_changes_nothing():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sample_unit=Sequence(length=2), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(4), "next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}, [4]))
    before = rb.storage
    with pytest.raises(TypeError, match="got a ListStorage"):
        rb.set_storage(ListStorage(8))
    assert rb.storage is before
    assert rb.sample().shape == (4,)
