"""Other components in an ensemble that stays, and what of TorchRL's ensemble is asked of a member."""

import pickle

import pytest
import torch

import engram
from engram import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)
from tests.members.buffers import APART, check_rows, member, members, rows

# ---- samplers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 2])
def test_members_draw_with_their_new_samplers(prefetch):
    rb = ReplayBufferEnsemble(*members(20, 20), batch_size=8, prefetch=prefetch)
    rb.sample()
    before, old = rb.sampler, [one.sampler for one in rb._rbs]
    new = SamplerEnsemble(*(SamplerWithoutReplacement(shuffle=False) for _ in range(2)), sample_from_all=True)
    assert rb.set_sampler(new) is before
    assert rb.sampler is new
    assert [one.sampler for one in rb._rbs] == list(new.samplers)
    for first in (0, 4):
        batch = rb.sample()
        check_rows(batch)
        assert batch["index", "index"].tolist() == [list(range(first, first + 4))] * 2
        assert batch["index", "buffer_ids"].tolist() == [[0] * 4, [1] * 4]
    drawn = 4 * (2 + (prefetch or 0))
    assert rb[0].sample(2)["a"].tolist() == [drawn, drawn + 1]
    rb._sampler = before
    assert [one.sampler for one in rb._rbs] == old
    check_rows(rb.sample())


def test_parts_are_chosen_as_the_new_samplers_say():
    rb = ReplayBufferEnsemble(*members(20, 20))
    rb.set_sampler(SamplerEnsemble(RandomSampler(), RandomSampler(), p=[0, 1], num_buffer_sampled=4))
    batch = rb.sample(8)
    assert batch.shape == (4, 2)
    assert batch["index", "buffer_ids"].unique().tolist() == [1]


def test_a_pickled_one_has_the_new_samplers():
    rb = ReplayBufferEnsemble(*members(20, 20))
    rb.set_sampler(SamplerEnsemble(SamplerWithoutReplacement(), RandomSampler(), p=[1, 3]))
    again = pickle.loads(pickle.dumps(rb))
    assert [type(one).__name__ for one in again.sampler.samplers] == ["SamplerWithoutReplacement", "RandomSampler"]
    assert again.sampler.p.tolist() == [0.25, 0.75]


def test_a_sampler_that_one_member_refuses_changes_none():
    rb = ReplayBufferEnsemble(member(0, 5), member(1, 5, storage=ListStorage, collate_fn=torch.stack))
    before, old = rb.sampler, [one.sampler for one in rb._rbs]
    for given, error in (
        (SamplerEnsemble(RandomSampler(), PromptGroupSampler(num_groups=1)), TypeError),
        (SamplerEnsemble(RandomSampler(), SamplerWithoutReplacement(drop_last=True)), ValueError),
    ):
        with pytest.raises(error) as raised:
            rb.set_sampler(given)
        assert raised.value.__notes__ == ["Raised by member 1 of the ensemble. Nothing was changed."]
        assert rb.sampler is before
        assert [one.sampler for one in rb._rbs] == old
        assert rb.sample(4).shape == (2, 2)


# ---- writers -----------------------------------------------------------------------------------------------------------------


def test_members_write_with_their_new_writers():
    rb = ReplayBufferEnsemble(*members(5, 5), routing_key="to")
    other = [TensorDictRoundRobinWriter(track_generations=True) for _ in range(2)]
    before = rb.set_writer(WriterEnsemble(*other))
    assert [one.writer for one in rb._rbs] == other
    rb.empty()
    fresh = ReplayBufferEnsemble(*members(0, 0), routing_key="to")
    fresh.set_writer(WriterEnsemble(*[TensorDictRoundRobinWriter(track_generations=True) for _ in range(2)]))
    written = fresh.extend(rows(0, 4, to=torch.tensor([0, 1, 1, 0])))
    assert written["index"].tolist() == [0, 0, 1, 1]
    assert "index_generation" in written.keys()
    assert not before.tracks_generations
    rb._writer = WriterEnsemble(ImmutableDatasetWriter(), ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="read-only"):
        rb[1].extend(rows(0, 1))
    with pytest.raises(RuntimeError, match="read-only"):
        rb.empty()


# ---- storages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [None, 2])
def test_members_have_their_new_storages(prefetch):
    rb = ReplayBufferEnsemble(*members(20, 20), batch_size=8, prefetch=prefetch)
    rb.sample()
    before, filled = rb.storage, members(7, 9)
    new = StorageEnsemble(*(one.storage for one in filled))
    assert rb.set_storage(new) is before
    assert rb.storage is new
    assert [len(one) for one in rb._rbs] == [7, 9]
    for _ in range(10):
        batch = rb.sample()
        check_rows(batch)
        assert int(batch["index", "index"].max()) < 9
    rb._storage = before
    assert [len(one) for one in rb._rbs] == [20, 20]


def test_another_function_puts_the_parts_together():
    rb = ReplayBufferEnsemble(*members(5, 5))
    rb.set_storage(StorageEnsemble(*(one.storage for one in members(5, 5))), collate_fn=len)
    assert rb.sample(4) == 2


def test_a_storage_that_one_member_refuses_changes_none():
    rb = ReplayBufferEnsemble(*members(5, 5))
    rb.set_sampler(SamplerEnsemble(*(PromptGroupSampler(num_groups=1, group_key="a") for _ in range(2))))
    before = rb.storage
    with pytest.raises(TypeError) as raised:
        rb.set_storage(StorageEnsemble(LazyTensorStorage(10), ListStorage(10)))
    assert "Raised by member 1 of the ensemble. Nothing was changed." in raised.value.__notes__
    assert rb.storage is before
    assert [len(one) for one in rb._rbs] == [5, 5]
    assert rb.sample(2).shape == (2, 1)


# ---- what is refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "one", "two"),
    [
        ("set_sampler", RandomSampler(), SamplerEnsemble(*(RandomSampler() for _ in range(2)))),
        ("set_writer", TensorDictRoundRobinWriter(), WriterEnsemble(*(TensorDictRoundRobinWriter() for _ in range(2)))),
        ("set_storage", LazyTensorStorage(3), StorageEnsemble(ListStorage(3), ListStorage(3))),
    ],
)
def test_components_of_another_kind_or_number(call, one, two):
    rb = ReplayBufferEnsemble(*members(5, 5, 5))
    kept = rb.sampler, rb.writer, rb.storage
    with pytest.raises(
        TypeError, match=rf"^{call}: expected a {type(two).__name__}, one for each member, got {type(one).__name__}"
    ):
        getattr(rb, call)(one)
    with pytest.raises(ValueError, match=rf"^{call}: expected a {type(two).__name__} of 3, .* got 2"):
        getattr(rb, call)(two)
    assert (rb.sampler, rb.writer, rb.storage) == kept


def test_storages_with_transforms_are_refused():
    rb = ReplayBufferEnsemble(*members(5))
    with pytest.raises(ValueError, match="without transforms"):
        rb.set_storage(StorageEnsemble(LazyTensorStorage(3), transforms=[None]))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda rb: rb.query(), TypeError),
        (lambda rb: rb.set_("a", torch.zeros(5)), RuntimeError),
        (lambda rb: rb.set_at_("a", torch.zeros(1), [0]), RuntimeError),
        (lambda rb: rb.update_({"a": torch.zeros(5)}), RuntimeError),
        (lambda rb: rb.write_all(rows(0, 2)), RuntimeError),
        (lambda rb: rb.read_all_in_order(), RuntimeError),
        (lambda rb: rb.__setitem__(0, rows(0, 1)), RuntimeError),
        (lambda rb: rb.storage.__setitem__(0, rows(0, 1)), RuntimeError),
    ],
)
def test_rows_are_asked_of_a_member(call, error):
    rb = ReplayBufferEnsemble(*members(5, 5))
    with pytest.raises(error, match=r"^[\w.\[\] =]+: an ensemble has no rows of its own\. Ask a member, ensemble\[i\]"):
        call(rb)
    assert [one[:]["a"].tolist() for one in rb._rbs] == [
        [APART * number + row for row in range(5)] for number in range(2)
    ]


# ---- the rest of TorchRL's names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ReplayBufferEnsemble", "StorageEnsemble", "SamplerEnsemble", "WriterEnsemble"])
def test_every_public_name_of_torchrls_is_there(name):
    there = pytest.importorskip("torchrl.data.replay_buffers")
    names = {one for one in dir(getattr(there, name)) if not one.startswith("_")}
    assert sorted(one for one in names if not hasattr(getattr(engram, name), one)) == []


def prioritized(number):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0))
    rb.extend(torch.arange(5))
    rb.update_priority(torch.arange(5), torch.full((5,), 50.0))
    return rb


def test_rows_that_were_rewritten_have_the_default_priority_again():
    def leaves(rb):
        return [torch.as_tensor(one.sampler.state_dict()["leaves"])[:5].tolist() for one in rb._rbs]

    rb = ReplayBufferEnsemble(prioritized(0), prioritized(1))
    before = leaves(rb)
    with pytest.raises(IndexError, match="got 500"):
        rb.mark_update({"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([1, 500])})
    with pytest.raises(ValueError, match="got 2"):
        rb.mark_update({"buffer_ids": torch.tensor([2]), "index": torch.tensor([1])})
    with pytest.raises(TypeError, match="buffer_ids"):
        rb.mark_update(torch.tensor([1]))
    assert leaves(rb) == before
    index = torch.tensor([[1, 2], [4, 4]])
    rb.mark_update({"buffer_ids": torch.tensor([0, 1]), "index": index})
    for number, marked in enumerate(({1, 2}, {4})):
        alone = prioritized(number)
        alone.mark_update(torch.tensor(sorted(marked)))
        assert leaves(rb)[number] == leaves(ReplayBufferEnsemble(alone))[0]


def test_hooks_see_the_rows_of_every_member(tmp_path):
    seen = []
    rb, again = (ReplayBufferEnsemble(*members(n, n)) for n in (5, 0))

    def note(data, path=None):
        seen.append(data["a"][:5].tolist())  # of all that the storage could hold
        return data

    rb.register_save_hook(note)
    again.register_load_hook(lambda data, out=None: data.set("a", data["a"] + 1))
    with pytest.raises(TypeError, match="hook"):
        rb.register_save_hook(3)
    rb.dumps(tmp_path / "dump")
    assert seen == [list(range(5)), list(range(APART, APART + 5))]
    again.loads(tmp_path / "dump")
    assert [one[:]["a"].tolist() for one in again._rbs] == [list(range(1, 6)), list(range(APART + 1, APART + 6))]


def test_storages_become_flat():
    one = LazyTensorStorage(12, ndim=2)
    TensorDictReplayBuffer(storage=one).extend(rows(0, 12).reshape(4, 3))
    flat = StorageEnsemble(one, ListStorage(3), transforms=[None, len]).flatten()
    assert [it.ndim for it in flat] == [1, 1]
    assert flat.transforms == (None, len)
    assert [it.supports_conditional_update for it in (flat, *flat)] == [False, True, False]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_updates_in_the_background_are_seen_by_later_batches(prefetch):
    some = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictRoundRobinWriter(track_generations=True))
        for _ in range(2)
    ]
    rb = ReplayBufferEnsemble(*some, batch_size=8, prefetch=prefetch, routing_key="to")
    new = rb.extend(rows(0, 8, to=torch.arange(8) % 2))
    rb.sample()
    for value in (1.0, 2.0):
        future = rb.submit_update_if_present(
            index=new, generation=new["index_generation"], patch={"x": torch.full((8, 1), value)}
        )
        batches = [rb.sample()["x"] for _ in range(1 + (prefetch or 0))]  # those ahead have the rows as they were
        assert (batches[-1] == value).all()
        new["index_generation"] = future.result().generation
        assert future.result().updated.all()
    rb.submit_update_if_present(index=new, generation=new["index_generation"], patch={"y": torch.zeros(8)})
    with pytest.raises(KeyError, match="y"):
        rb.sample()
    assert (rb.sample()["x"] == 2.0).all()
