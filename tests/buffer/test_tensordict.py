"""TensorDictReplayBuffer: samples that say which rows they are."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.components import Listener


def steps(start, stop, **more):
    return TensorDict({"a": torch.arange(start, stop) * 10, **more}, batch_size=[stop - start])


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage, ListStorage])
def storage(request):
    return request.param


def test_defaults():
    rb = TensorDictReplayBuffer()
    assert type(rb.storage) is ListStorage
    assert type(rb.writer) is TensorDictRoundRobinWriter
    assert rb.priority_key == "td_error"
    assert TensorDictReplayBuffer(3).storage.max_size == 3
    with pytest.raises(TypeError):
        TensorDictReplayBuffer(3, "td_error")


# ---- what it takes -----------------------------------------------------------------------------------------------------------


@tensorclass
class Step:
    a: torch.Tensor


@pytest.mark.parametrize(
    "wrong",
    [
        Step(a=torch.zeros(2), batch_size=[2]),
        [steps(0, 1)[0], steps(0, 1)[0]],
        torch.zeros(2),
        {"a": torch.zeros(2)},
        (torch.zeros(2),),
        None,
    ],
    ids=lambda x: type(x).__name__,
)
def test_only_tensordicts(storage, wrong):
    rb = TensorDictReplayBuffer(storage=storage(5))
    for call in (rb.extend, rb.add):
        with pytest.raises(ValueError, match=rf"{call.__name__}.*TensorDict.*{type(wrong).__name__}.*ReplayBuffer"):
            call(wrong)
    assert len(rb) == 0


def test_other_kinds_of_tensordicts(storage):
    rb = TensorDictReplayBuffer(storage=storage(9))
    rb.extend(LazyStackedTensorDict(steps(0, 1)[0], steps(1, 2)[0]))
    rb.extend(steps(2, 4).lock_())
    rb.extend(steps(4, 8)[::2])
    rb.add(steps(9, 10)[0])
    assert rb["a"].tolist() == [0, 10, 20, 30, 40, 60, 90]


def test_one_row_is_not_a_batch(storage):
    rb = TensorDictReplayBuffer(storage=storage(5))
    with pytest.raises(TypeError, match=r"extend.*add\(\)"):
        rb.extend(steps(0, 1)[0])


def test_the_callers_data_stays_as_it_was(storage):
    rb = TensorDictReplayBuffer(storage=storage(5))
    data = steps(0, 3, index=torch.full((3,), 77), td_error=torch.ones(3))
    kept = data.clone()
    rb.extend(data)
    rb.add(data[0])
    rb[1] = data[0]
    rb.sample(4)
    assert (data == kept).all()
    assert set(data.keys()) == set(kept.keys())


# ---- keys ----------------------------------------------------------------------------------------------------------------------


def test_samples_carry_their_index(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), batch_size=8)
    rb.extend(steps(0, 7))
    sample, info = rb.sample(return_info=True)
    assert isinstance(sample, TensorDict)
    assert sample.batch_size == (8,)
    assert sample["index"].dtype is torch.int64
    assert torch.equal(sample["index"], info["index"])
    assert torch.equal(sample["a"], rb[sample["index"]]["a"])
    assert set(sample.keys()) == {"a", "index"}
    assert set(info) == {"index"}
    assert not sample.is_locked
    sample["more"] = torch.zeros(8)
    assert torch.equal(rb.sample()["index"], rb.sample()["index"]) in (True, False)
    assert set(rb.sample().keys()) == {"a", "index"}


def test_index_is_never_stored(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), writer=TensorDictRoundRobinWriter(track_generations=True))
    rb.extend(steps(0, 3, index=torch.full((3,), 99), index_generation=torch.full((3,), 99)))
    rb.add(steps(3, 4, index=torch.full((1,), 99))[0])
    rb[0] = steps(7, 8, index=torch.full((1,), 99))[0]
    sample = rb.sample(20)
    assert set(sample["index"].tolist()) <= {0, 1, 2, 3}
    assert 99 not in sample["index_generation"]
    rb.extend(rb.sample(2))  # a sample can be written back
    assert "index_generation" not in rb[0].keys()
    assert rb[:]["index"].tolist() == [0, 1, 2, 3, 4]
    if storage is not ListStorage:
        assert [field.name for field in rb.storage.store.schema.fields] == ["a"]
    assert set(rb.storage[1].keys()) == {"a"}


def test_index_generation(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), writer=RoundRobinWriter(track_generations=True))
    rb.extend(steps(0, 5))
    sample, info = rb.sample(30, return_info=True)
    assert sample["index_generation"].dtype is torch.int64
    assert sample["index_generation"].shape == (30,)
    assert torch.equal(sample["index_generation"], info["index_generation"])
    assert torch.equal(sample["index_generation"], rb.writer.generations_of(sample["index"]))
    rb.extend(steps(5, 7))
    stale = rb.writer.generations_of(sample["index"]) != sample["index_generation"]
    assert torch.equal(stale, sample["index"] < 2)
    assert "index_generation" not in TensorDictReplayBuffer(storage=rb.storage).sample(2).keys()


def test_rows_with_batch_dimensions(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), writer=TensorDictRoundRobinWriter(track_generations=True))
    rb.extend(TensorDict({"a": torch.arange(4 * 3 * 2).reshape(4, 3, 2)}, batch_size=[4, 3]))
    sample, info = rb.sample(6, return_info=True)
    assert sample.batch_size == (6, 3)
    assert info["index"].shape == (6,)
    assert torch.equal(sample["index"], info["index"][:, None].expand(6, 3))
    assert torch.equal(sample["index_generation"], info["index_generation"][:, None].expand(6, 3))
    assert torch.equal(sample["a"][..., 0] // 6, sample["index"])


def test_entries_of_a_sampler(storage):
    weights = torch.tensor([0.5, 0.25, 1.0])

    def draw(extent, batch_size, key):
        from engram import Draw

        return Draw(torch.tensor([2, 0, 1]), info={"priority_weight": weights})

    rb = TensorDictReplayBuffer(storage=storage(5), sampler=Listener(draw))
    rb.extend(steps(0, 5))
    sample, info = rb.sample(3, return_info=True)
    assert torch.equal(sample["priority_weight"], weights)
    assert torch.equal(info["priority_weight"], weights)
    assert sample["index"].tolist() == [2, 0, 1]
    _, info = ReplayBuffer(storage=rb.storage, sampler=Listener(draw)).sample(3, return_info=True)
    assert torch.equal(info["priority_weight"], weights)


def test_include_info_is_deprecated(storage):
    rb = TensorDictReplayBuffer(storage=storage(5))
    rb.extend(steps(0, 5))
    for value in (True, False):
        with pytest.warns(UserWarning, match="include_info"):
            assert "index" in rb.sample(2, include_info=value).keys()


def test_collating_into_something_else():
    rb = TensorDictReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend(steps(0, 5))
    with pytest.raises(RuntimeError, match="TensorDict.*list"):
        rb.sample(2)


def test_ragged_rows_in_a_list():
    rb = TensorDictReplayBuffer(5)
    for n in (1, 2, 3):
        rb.add(TensorDict({"a": torch.arange(n)}, batch_size=[]))
    sample = rb.sample(6)
    assert isinstance(sample, LazyStackedTensorDict)
    assert [len(row["a"]) for row in sample] == [1 + int(row["index"]) for row in sample]


def test_without_replacement(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), sampler=SamplerWithoutReplacement(), batch_size=2)
    rb.extend(steps(0, 5))
    batches = list(rb)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == [0, 1, 2, 3, 4]
    assert all(torch.equal(batch["a"], 10 * batch["index"]) for batch in batches)


def test_existing_data():
    data = steps(0, 5)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data))
    sample = rb.sample(9)
    assert torch.equal(sample["a"], 10 * sample["index"])
    assert set(data.keys()) == {"a"}


# ---- priorities ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["td_error", "other"])
def test_the_priority_key_is_used_not_stored(key):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), priority_key=key)
    assert rb.priority_key == key
    rb.extend(steps(0, 2))
    rb.extend(steps(2, 4, **{key: torch.ones(2), "priority_weight": torch.ones(2)}))
    rb.add(steps(4, 5, **{key: torch.ones(1)})[0])
    assert set(rb.storage[:].keys()) == {"a"}
    with pytest.raises(KeyError, match="unrelated"):
        rb.extend(steps(0, 2, unrelated=torch.ones(2)))
    if key == "other":
        with pytest.raises(KeyError, match="td_error"):
            rb.extend(steps(0, 2, td_error=torch.ones(2)))


def test_the_priority_key_is_stored_where_the_first_row_has_it():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    rb.extend(steps(0, 2, td_error=torch.tensor([0.5, 0.6])))
    assert rb["td_error"].tolist() == pytest.approx([0.5, 0.6])
    rb.extend(steps(2, 4, td_error=torch.tensor([0.7, 0.8]), index=torch.zeros(2)))
    assert rb["td_error"].tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8])
    with pytest.raises(KeyError, match="td_error"):
        rb.extend(steps(2, 4))


def test_update_priority_of_extend_has_no_effect_without_priorities(storage):
    rb = TensorDictReplayBuffer(storage=storage(9))
    rb.extend(steps(0, 2, td_error=torch.ones(2)), update_priority=True)
    rb.extend(steps(0, 2, td_error=torch.ones(2)), update_priority=False)
    assert len(rb) == 4


def test_update_tensordict_priority_is_silent_without_priorities(storage):
    rb = TensorDictReplayBuffer(storage=storage(9), batch_size=2)
    rb.extend(steps(0, 2))
    rb.update_tensordict_priority(rb.sample())


def test_update_tensordict_priority_reaches_a_sampler():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=Listener(), priority_key="error")
    rb.set_writer(TensorDictRoundRobinWriter(track_generations=True))
    rb.extend(steps(0, 2))
    sample = rb.sample(2)
    with pytest.raises(KeyError, match="'error'"):
        rb.update_tensordict_priority(sample)
    sample["error"] = torch.tensor([0.5, 0.7])
    rb.update_tensordict_priority(sample)
    ((index, priority, generation),) = rb.sampler.priorities
    assert torch.equal(index, sample["index"])
    assert torch.equal(priority, sample["error"])
    assert torch.equal(generation, sample["index_generation"])


# ---- lanes, edits ------------------------------------------------------------------------------------------------------------------


def test_lanes():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6, lanes=2))
    assert rb.add(steps(0, 1)[0], lane=1) == 3
    assert rb.extend(steps(1, 3), lane=torch.tensor([0, 1])).tolist() == [0, 4]
    assert rb.on_lane(1).add(steps(3, 4)[0]) == 5
    assert rb[:]["index"].tolist() == [0, 3, 4, 5]
    sample = rb.sample(50)
    assert set(sample["index"].tolist()) == {0, 3, 4, 5}
    assert torch.equal(sample["a"], rb[sample["index"]]["a"])


def test_edits():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(steps(0, 4))
    rb[1] = steps(9, 10)[0]
    rb[2:4] = steps(7, 9)
    assert rb["a"].tolist() == [0, 90, 70, 80]
    rb[:] = rb[:].clone()  # with its index
    assert rb["a"].tolist() == [0, 90, 70, 80]
    rb[0] = rb.sample(1)[0]
    rb.write_all(rb[:2].clone())
    assert rb["a"].tolist()[1:] == [90, 70, 80]
    assert rb.write_count == 4


# ---- what transforms and collate functions may return -------------------------------------------------------------------------


FORMS = {
    "locked": lambda td: TensorDict({"b": td["a"] * 2, "in": {"c": td["a"]}}, td.batch_size).lock_(),
    "memory-mapped": lambda td: TensorDict({"b": td["a"] * 2}, td.batch_size).memmap_(),
    "shared": lambda td: TensorDict({"b": td["a"] * 2}, td.batch_size).share_memory_(),
    "without batch size": lambda td: TensorDict({"b": td["a"] * 2}, []),
    "both": lambda td: TensorDict({"b": td["a"] * 2}, []).lock_(),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_transform_may_return_tensordicts_of_other_forms(form, prefetch):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4, prefetch=prefetch or None)
    rb.append_transform(FORMS[form])
    rb.extend(steps(0, 9))
    batch, info = rb.sample(return_info=True)
    assert (batch["b"] == batch["index"] * 20).all()
    assert (info["index"] == batch["index"]).all()
    assert batch.is_locked == (form != "without batch size")


def test_windows_are_marked_in_a_locked_tensordict():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=3), batch_size=6)
    rb.append_transform(FORMS["locked"])
    rb.extend(steps(0, 12, done=torch.arange(12) % 6 == 5))
    batch = rb.sample()
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert batch["index"].shape == (6, 1)


def test_a_tensorclass_has_no_place_for_the_index():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    rb.append_transform(lambda td: Step(a=td["a"] * 2, batch_size=td.batch_size))
    rb.extend(steps(0, 9))
    batch, info = rb.sample(return_info=True)
    assert type(batch) is Step
    assert (batch.a == info["index"] * 20).all()


def test_another_batch_size_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    rb.append_transform(lambda td: td[:2])
    rb.extend(steps(0, 9))
    with pytest.raises(RuntimeError, match=r"changed the batch size from 4 to \[2\]"):
        rb.sample()
