"""What ensembles refuse: in a sentence that names the member, and nothing is changed."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    Checkpointer,
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SliceSampler,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from tests.members.buffers import member, members, rows


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"p": [1.0]}, ValueError, "2 weights"),
        ({"p": [1.0, -1.0]}, ValueError, "at least 0, got -1"),
        ({"p": [0.0, 0.0]}, ValueError, "above 0"),
        ({"p": [float("nan"), 1.0]}, ValueError, "finite"),
        ({"p": "fair"}, ValueError, "'sampleable'"),
        ({"p": ["a", "b"]}, TypeError, "p"),
        ({"p": [1, 1], "sample_from_all": True}, RuntimeError, "got both"),
        ({"num_buffer_sampled": 0}, ValueError, "num_buffer_sampled"),
        ({"num_buffer_sampled": 2.5}, TypeError, "num_buffer_sampled"),
        ({"routing_key": "a", "routing_dim": 0}, ValueError, "got both"),
        ({"routing_dim": "a"}, TypeError, "routing_dim"),
        ({"routing_key": 1.5}, TypeError, "routing_key"),
        ({"collate_fn": 3}, TypeError, "collate_fn"),
        ({"samplers": SamplerEnsemble(RandomSampler())}, RuntimeError, "got both"),
        ({"collate_fns": [None, None]}, RuntimeError, "got both"),
        ({"sample_units": 3}, TypeError, "sample_units"),
        ({"prefetch": 2}, ValueError, "batch size"),
        ({"generator": 3}, TypeError, "generator"),
    ],
)
def test_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        ReplayBufferEnsemble(*members(5, 5), **arguments)


def test_what_is_no_member():
    with pytest.raises(TypeError, match="storages"):
        ReplayBufferEnsemble()
    with pytest.raises(TypeError, match="member 1: expected a ReplayBuffer"):
        ReplayBufferEnsemble(member(), ListStorage(3))
    with pytest.raises(TypeError, match="expected storages"):
        StorageEnsemble(RandomSampler())
    with pytest.raises(TypeError, match="expected samplers"):
        SamplerEnsemble()
    with pytest.raises(TypeError, match="expected writers"):
        WriterEnsemble(ListStorage(3))
    with pytest.raises(TypeError, match="transforms: expected 1"):
        StorageEnsemble(ListStorage(3), transforms=[None, None])


def test_components_of_another_number():
    two = StorageEnsemble(ListStorage(3), ListStorage(3))
    one = SamplerEnsemble(RandomSampler())
    with pytest.raises(ValueError, match="2 samplers and writers"):
        ReplayBufferEnsemble(storages=two, samplers=one, writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()))
    with pytest.raises(RuntimeError, match="SamplerEnsemble"):
        ReplayBufferEnsemble(
            storages=StorageEnsemble(ListStorage(3)), samplers=one, writers=WriterEnsemble(RoundRobinWriter()), p=[1]
        )
    with pytest.raises(ValueError, match="2 storages|1 storages"):
        WriterEnsemble(RoundRobinWriter()).register_storage(two)
    with pytest.raises(TypeError, match="StorageEnsemble"):
        WriterEnsemble(RoundRobinWriter()).register_storage(ListStorage(3))
    with pytest.raises(ValueError, match="1 storages"):
        one.sample(two, 3)
    with pytest.raises(TypeError, match="StorageEnsemble"):
        one.sample(ListStorage(3), 3)


def test_batch_sizes():
    rb = ReplayBufferEnsemble(*members(5, 5, 5))
    for size in (7, 1, 2):
        with pytest.raises(ValueError, match=f"multiple of num_buffer_sampled=3, got {size}"):
            rb.sample(size)
    with pytest.raises(RuntimeError, match="batch size"):
        rb.sample()
    with pytest.raises(RuntimeError, match="batch size"):
        iter(rb)
    with pytest.raises(ValueError, match="at least 1"):
        rb.sample(0)
    assert not rb.can_sample(7)


def test_an_empty_member_is_named():
    rb = ReplayBufferEnsemble(member(0, 5), member(1, 0), sample_from_all=True)
    assert not rb.can_sample(4)
    with pytest.raises(NoSampleable) as raised:
        rb.sample(4)
    assert "member 1" in raised.value.__notes__[0]
    assert ReplayBufferEnsemble(rb[0], rb[1], p=[1, 0]).can_sample(4)


def other_fields(number=1, **fields):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    rb.extend(TensorDict(fields, [5]))
    return rb


def test_members_of_other_fields():
    other = other_fields(a=torch.zeros(5), b=torch.zeros(5))
    for arguments in ({}, {"transform": lambda td: td}):
        some = TensorDictReplayBuffer(storage=other.storage, **arguments)
        with pytest.raises(KeyError, match="of member 0 and .*'b'.* of member 1"):
            ReplayBufferEnsemble(member(0, 5), some, sample_from_all=True).sample(4)
    with pytest.raises(KeyError, match="same fields"):  # whichever members are chosen
        ReplayBufferEnsemble(member(0, 5), other, p=[1, 0]).sample(4)
    only = TensorDictReplayBuffer(storage=other.storage, transform=lambda td: td.select("a"))
    keep = TensorDictReplayBuffer(storage=member(0, 5).storage, transform=lambda td: td.select("a").float())
    assert ReplayBufferEnsemble(keep, only, sample_from_all=True).sample(4)["a"].shape == (2, 2)


def test_members_of_other_dtypes_and_shapes():
    own = other_fields(a=torch.zeros(5))
    with pytest.raises(
        RuntimeError, match=r"'a': expected one dtype.*float32 of member 0 and torch.float64 of member 1"
    ):
        ReplayBufferEnsemble(own, other_fields(a=torch.zeros(5, dtype=torch.float64)), sample_from_all=True).sample(4)
    with pytest.raises(RuntimeError, match=r"same rows.*a \[\].*of member 0 and.*a \[3\]"):
        ReplayBufferEnsemble(own, other_fields(a=torch.zeros(5, 3)), sample_from_all=True).sample(4)


def test_parts_of_different_sizes():
    short = member(0, 3, sampler=SliceSampler(slice_len=4, strict_length=False))
    with pytest.raises(RuntimeError, match="windows of one length"):
        ReplayBufferEnsemble(short, short).sample(8)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (0.5, TypeError),
        ("a", TypeError),
        (None, TypeError),
        ([0.5], TypeError),
        (torch.tensor([True, False]), TypeError),
        (torch.zeros(2, 2, dtype=torch.int64), RuntimeError),
        (2, IndexError),
        (-3, IndexError),
        ([0, 5], IndexError),
        ([], IndexError),
        (slice(5, 7), IndexError),
        ((), IndexError),
        ((0, 50), IndexError),
        ((slice(None), 50), IndexError),
    ],
)
def test_indices(index, error):
    rb = ReplayBufferEnsemble(*members(5, 5))
    with pytest.raises(error):
        rb[index]


def test_components_refuse_an_index_of_rows():
    rb = ReplayBufferEnsemble(*members(5, 5))
    for one in (rb.sampler, rb.writer):
        with pytest.raises(IndexError, match="members alone"):
            one[0, 1]
    for call in ("add", "extend"):
        with pytest.raises(NotImplementedError, match="routing_key"):
            getattr(rb.writer, call)(rows(0, 1))
        with pytest.raises(RuntimeError, match="rows of its own"):
            getattr(rb.storage, call)(rows(0, 1))
    with pytest.raises(RuntimeError, match="rows of its own"):
        rb.storage.set(0, rows(0, 1))


def routed(*some, **arguments):
    return ReplayBufferEnsemble(*some, **{"routing_key": "to", **arguments})


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ({"a": torch.zeros(2)}, TypeError, "TensorDict"),
        (rows(0, 2), KeyError, "routing_key"),
        (rows(0, 2, to=torch.zeros(2)), TypeError, "ints"),
        (rows(0, 2, to=torch.tensor([0, 2])), ValueError, r"\[0, 2\), got 2"),
        (rows(0, 2, to=torch.tensor([0, -1])), ValueError, "got -1"),
        (rows(0, 2, to=torch.zeros(2, 3, dtype=torch.int64)), ValueError, "for each row"),
    ],
)
def test_rows_that_cannot_be_divided(data, error, match):
    rb = routed(*members(5, 5))
    with pytest.raises(error, match=match):
        rb.extend(data)
    assert [len(one) for one in rb._rbs] == [5, 5]


def test_writes_without_routing_and_of_other_kinds():
    rb = ReplayBufferEnsemble(*members(5, 5))
    with pytest.raises(RuntimeError, match="routing_key or routing_dim"):
        rb.extend(rows(0, 2))
    rb = ReplayBufferEnsemble(*members(5, 5), routing_dim=0)
    with pytest.raises(ValueError, match="2 entries"):
        rb.extend(rows(0, 3))
    with pytest.raises(ValueError, match="that dimension"):
        ReplayBufferEnsemble(*members(5, 5), routing_dim=1).extend(rows(0, 2))
    with pytest.raises(RuntimeError, match="Use extend"):
        rb.add(rows(0, 1)[0])
    rb = routed(*members(5, 5))
    with pytest.raises(ValueError, match="Did you mean extend"):
        rb.add(rows(0, 1, to=torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(NotImplementedError, match="update_priority"):
        rb.extend(rows(0, 1, to=torch.zeros(1, dtype=torch.int64)), update_priority=True)
    assert [len(one) for one in rb._rbs] == [5, 5]


def test_all_members_are_written_to_or_none():
    def fresh(number, **fields):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        rb.extend(rows(number, 5, to=torch.full((5,), number), **fields))
        return rb

    both = rows(0, 4, to=torch.tensor([0, 1, 0, 1]))
    rb = routed(fresh(0), fresh(1, more=torch.zeros(5)))
    with pytest.raises(KeyError) as raised:
        rb.extend(both)
    assert "member 1" in raised.value.__notes__[0]
    assert [len(one) for one in rb._rbs] == [5, 5]
    closed = TensorDictReplayBuffer(storage=fresh(1).storage, writer=ImmutableDatasetWriter())
    rb = routed(fresh(0), closed)
    with pytest.raises(RuntimeError, match="read-only|refuses|Immutable"):
        rb.extend(both)
    index = {"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([0, 0])}
    for call, does in (
        ("empty", rb.empty),
        ("remove", lambda: rb.remove(index)),
        (
            "update_if_present",
            lambda: rb.update_if_present(index=index, generation=torch.ones(2), patch={"a": torch.zeros(2)}),
        ),
    ):
        with pytest.raises(RuntimeError) as raised:
            does()
        assert str(raised.value) == f"{call}: the buffer is read-only (ImmutableDatasetWriter)."
        assert raised.value.__notes__ == ["Raised by member 1 of the ensemble. Nothing was changed."]
        assert [len(one) for one in rb._rbs] == [5, 5]
    prioritized = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(20))
    rb = routed(fresh(0), prioritized)
    with pytest.raises(PriorityError):
        rb.extend(both.clone().set("td_error", torch.tensor([1.0, -1.0, 1.0, 1.0])))
    assert [len(one) for one in rb._rbs] == [5, 0]


def test_updates_of_wrong_places():
    rb = routed(*members(5, 5, tracks=True))
    batch = rb.sample(4)
    good = {"index": batch["index"], "generation": batch["index_generation"], "patch": {"x": torch.ones(2, 2, 1)}}
    cases = [
        ({"index": batch["index", "index"]}, TypeError, "buffer_ids"),
        ({"index": {"buffer_ids": torch.tensor([7]), "index": torch.tensor([0])}}, ValueError, "got 7"),
        ({"index": {"buffer_ids": torch.tensor([0]), "index": torch.tensor([0, 1])}}, ValueError, "beginning with"),
        ({"generation": torch.zeros(3, dtype=torch.int64)}, ValueError, "one generation per row"),
        ({"patch": 3}, TypeError, "patch"),
        ({"patch": {"y": torch.zeros(2, 2)}}, KeyError, "y"),
        ({"patch": {"x": torch.zeros(3)}}, ValueError, "entries beginning with"),
        ({"patch": {"x": torch.zeros(2, 2, 7)}}, ValueError, "x"),
        ({"version": 3}, ValueError, "version_key and version"),
    ]
    for change, error, match in cases:
        with pytest.raises(error, match=match):
            rb.update_if_present(**{**good, **change})
    outside = {"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([0, 500])}
    numbers = torch.tensor([int(rb[0].writer.generations_of([0])[0]), 1])
    with pytest.raises(IndexError, match="got 500"):
        rb.update_if_present(index=outside, generation=numbers, patch={"x": torch.full((2, 1), 9.0)})
    assert not any(bool((one[:]["x"] == 9.0).any()) for one in rb._rbs)
    with pytest.raises(RuntimeError, match="a priority for each"):
        rb.update_priority(batch["index"], torch.ones(3))


@pytest.mark.parametrize(
    ("index", "generation", "error", "match"),
    [
        ([1, 500], None, IndexError, "got 500"),
        ([1, -2], None, IndexError, "got -2"),
        ([1, 1], [1], RuntimeError, "one per row, 2, got 1"),
        ([1, 1], [1] * 5, RuntimeError, "one per row, 2, got 5"),
        ([1, 1], [1.0, 1.0], TypeError, "float"),
    ],
)
def test_priorities_of_all_members_change_or_none(index, generation, error, match):
    def prioritized(number):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0))
        rb.extend(torch.zeros(5))
        return rb

    rb = ReplayBufferEnsemble(prioritized(0), prioritized(1))
    before = [str(one.sampler.state_dict()["leaves"]) for one in rb._rbs]
    named = {"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor(index)}
    numbers = None if generation is None else torch.tensor(generation)
    with pytest.raises(error, match=match):
        rb.update_priority(named, torch.full((2,), 50.0), generation=numbers)
    assert [str(one.sampler.state_dict()["leaves"]) for one in rb._rbs] == before
    rb.update_priority({**named, "index": torch.tensor([1, -1])}, 50.0)
    assert [str(one.sampler.state_dict()["leaves"]) != was for one, was in zip(rb._rbs, before, strict=True)] == [
        True,
        False,
    ]


def test_a_part_that_cannot_be_filled_uses_up_no_rows():
    def consumed(n):
        rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=ConsumingSampler(1))
        rb.extend(torch.arange(n))
        return rb

    rb = ReplayBufferEnsemble(consumed(6), num_buffer_sampled=1)
    first = rb.sample(4)
    with pytest.raises(NoSampleable, match="expected 4 rows for a batch, got 2") as raised:
        rb.sample(4)
    assert "member 0" in raised.value.__notes__[0]
    assert sorted(torch.cat([first, rb.sample(2)], 1)[0].tolist()) == list(range(6))
    rb = ReplayBufferEnsemble(consumed(6), consumed(1), sample_from_all=True)
    with pytest.raises(NoSampleable) as raised:
        rb.sample(4)
    assert "member 1" in raised.value.__notes__[0]
    assert sorted(rb[0].sample(6).tolist()) == list(range(6))
    rb = ReplayBufferEnsemble(consumed(6), num_buffer_sampled=2)  # both parts are of one member
    with pytest.raises(NoSampleable):
        rb.sample(8)
    assert sorted(rb.sample(6).flatten().tolist()) == list(range(6))


def test_untracked_members_take_no_updates():
    rb = routed(*members(5, 5))
    index = {"buffer_ids": torch.tensor([0]), "index": torch.tensor([0])}
    with pytest.raises(RuntimeError, match="track_generations"):
        rb.update_if_present(index=index, generation=torch.tensor([1]), patch={"x": torch.ones(1, 1)})


def test_after_the_end():
    rb = ReplayBufferEnsemble(*members(5, 5))
    rb.shutdown()
    assert not rb.is_alive
    with pytest.raises(RuntimeError, match="shut down"):
        rb.sample(4)
    assert rb[0].sample(4).shape == (4,)
    one = rb[0]
    rb.close()
    rb.close()
    assert rb.closed
    assert one.closed
    with pytest.raises(RuntimeError, match="the ensemble was closed"):
        rb.sample(4)
    assert isinstance(one, ReplayBuffer)


def test_a_checkpointer_is_of_a_member(tmp_path):
    of_it = [TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*of_it, batch_size=2)
    with pytest.raises(TypeError, match="got ReplayBufferEnsemble.*An ensemble has one for each member"):
        Checkpointer(tmp_path / "series", ensemble)
    assert not (tmp_path / "series").exists()
    for one in of_it:
        one.close()


def test_ints_of_numpy_are_ints():
    rb = ReplayBufferEnsemble(
        member(0, 6), member(1, 6), routing_dim=np.int64(-1), num_buffer_sampled=np.int32(3), batch_size=np.int64(3)
    )
    assert (rb.routing_dim, rb.sampler.num_buffer_sampled, rb.batch_size) == (-1, 3, 3)
    assert type(rb.routing_dim) is int
    assert rb.sample(np.int64(3)).shape == (3, 1)
    assert rb[np.int64(1)] is rb._rbs[1]
    for dim in (True, 0.0, np.bool_(True), "0", torch.tensor(0)):
        with pytest.raises(TypeError, match=f"routing_dim: expected an int, got {type(dim).__name__}"):
            ReplayBufferEnsemble(member(0, 6), routing_dim=dim)


@pytest.mark.parametrize("transforms", [[3], 3, ["x"], "x", [torch.zeros(1)]])
def test_transforms_of_storages_are_callables(transforms):
    with pytest.raises(TypeError, match="StorageEnsemble: transforms: expected a list of callables"):
        StorageEnsemble(LazyTensorStorage(4), transforms=transforms)
    assert StorageEnsemble(LazyTensorStorage(4), transforms=iter([None])).transforms == (None,)


def _fails(data):
    raise ValueError("as told")


def test_what_a_member_refuses_says_which_one():
    def named(does, rest=""):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
            does()
        assert raised.value.__notes__ == [f"Raised by member 1 of the ensemble.{rest}"]

    rb = ReplayBufferEnsemble(member(0, 6), member(1, 4, capacity=4))
    named(lambda: rb[:, 5])
    named(lambda: rb.storage[:, 5])
    named(lambda: rb.storage.get({"buffer_ids": torch.tensor([1]), "index": torch.tensor([[5]])}))
    storage = StorageEnsemble(*rb.storage, transforms=[None, _fails])
    named(lambda: storage.get({"buffer_ids": torch.tensor([1]), "index": torch.tensor([[0]])}))
    both = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
    named(lambda: both.sample(StorageEnsemble(rb.storage[0], LazyTensorStorage(4)), 4))
    state = rb.state_dict()
    state["_storage"]["1"] = {}
    named(lambda: rb.load_state_dict(state), " Nothing was changed.")
    named(lambda: rb.storage.prepare_load(state["_storage"]), " Nothing was changed.")
    row = {"buffer_ids": torch.tensor([1]), "index": torch.tensor([0])}
    patch = {"generation": torch.zeros(1), "patch": {"none": torch.zeros(1)}}
    named(lambda: rb.update_if_present(index=row, **patch), " Nothing was changed.")
    named(
        lambda: ReplayBufferEnsemble(
            storages=StorageEnsemble(LazyTensorStorage(4), LazyTensorStorage(4)),
            samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
            writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
            collate_fns=[None, 3],
        )
    )


def test_a_member_that_fails_amid_a_write_is_named():
    rb = routed(member(0, 0), member(1, 0))
    rb.extend(rows(0, 10, to=torch.arange(10) % 2))
    rb[1].append_transform(_fails, invert=True)
    with pytest.raises(ValueError, match="as told") as raised:
        rb.extend(rows(0, 4, to=torch.tensor([0, 1, 0, 1])))
    assert "Raised by member 1 of the ensemble. Members before it have written their rows." in raised.value.__notes__
    assert [len(one) for one in rb._rbs] == [7, 5]
    with pytest.raises(ValueError, match="as told") as raised:
        rb.extend(rows(0, 2, to=torch.tensor([1, 1])))
    assert "Raised by member 1 of the ensemble." in raised.value.__notes__


def test_a_device_that_is_none_is_refused_before_rows_are_drawn():
    rb = ReplayBufferEnsemble(member(0, 6), generator=torch.Generator().manual_seed(1))
    before = rb._wiring.generator.get_state()
    with pytest.raises(RuntimeError, match="sample: device: expected a device"):
        rb.sample(2, device="nowhere")
    assert torch.equal(before, rb._wiring.generator.get_state())


@pytest.mark.parametrize(
    ("part", "kind", "name"),
    [
        ("sampler", SamplerEnsemble, "sample"),
        ("sampler", SamplerEnsemble, "extend"),
        ("sampler", SamplerEnsemble, "mark_update"),
        ("storage", StorageEnsemble, "get"),
        ("storage", StorageEnsemble, "set"),
        ("writer", WriterEnsemble, "add"),
        ("writer", WriterEnsemble, "extend"),
        ("writer", WriterEnsemble, "get_insert_index"),
    ],
)
def test_overrides_that_would_never_be_called(part, kind, name):
    mine = type("Mine", (kind,), {name: lambda self, *given: None})
    kinds = {"storage": StorageEnsemble, "sampler": SamplerEnsemble, "writer": WriterEnsemble, part: mine}
    of = {"storage": lambda: LazyTensorStorage(20), "sampler": RandomSampler, "writer": RoundRobinWriter}
    made = {one: kinds[one](of[one](), of[one]()) for one in kinds}
    message = rf"Mine\.{name}: a buffer never calls it\. Override that of the components of members in its place"
    with pytest.raises(TypeError, match=message):
        ReplayBufferEnsemble(storages=made["storage"], samplers=made["sampler"], writers=made["writer"], batch_size=4)
    rb = ReplayBufferEnsemble(*members(5, 5), batch_size=4)
    before = getattr(rb, part)
    with pytest.raises(TypeError, match=message):
        getattr(rb, f"set_{part}")(mine(of[part](), of[part]()))
    assert getattr(rb, part) is before


def test_subclasses_that_add_methods_or_override_called_ones_are_taken():
    class Named(SamplerEnsemble):
        def named(self):
            return "mine"

    class Numbers(WriterEnsemble):
        def generations_of(self, index):
            return super().generations_of(index)

    rb = ReplayBufferEnsemble(*members(5, 5), batch_size=4)
    rb.set_sampler(Named(RandomSampler(), RandomSampler()))
    rb.set_writer(Numbers(RoundRobinWriter(), RoundRobinWriter()))
    assert rb.sampler.named() == "mine"
    rb.sample()
