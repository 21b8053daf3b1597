"""Buffers in functions under ``torch.compile``: one graph break for each call, and nothing is compiled again."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from tensordict import TensorDict

from engram import (
    CompressedListStorage,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo")  # of what it meets in buffers that are not compilable


@pytest.fixture(autouse=True)
def _from_the_start():
    dynamo.reset()
    yield
    dynamo.reset()


def rows(n=10):
    return {"obs": torch.arange(n * 3.0).reshape(n, 3), "done": torch.arange(n) % 5 == 4}


def td(n=10):
    return TensorDict({"obs": rows(n)["obs"], "next": {"done": rows(n)["done"].unsqueeze(-1)}}, [n])


def prioritized(**more):
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, batch_size=10, **more)


KINDS = {
    "TensorDicts": (lambda **more: TensorDictReplayBuffer(batch_size=10, **more), td),
    "dicts": (lambda **more: ReplayBuffer(batch_size=10, **more), rows),
    "prioritized": (prioritized, td),
    "windows": (lambda **more: TensorDictReplayBuffer(sampler=SliceSampler(slice_len=5), batch_size=10, **more), td),
}


def counted(step, times=5, backend="eager"):
    """Calls of a compiled function: of each, its graph breaks, and how many frames were compiled."""
    compiled = torch.compile(step, backend=backend)
    found = []
    for i in range(times):
        dynamo.utils.counters.clear()
        compiled(torch.full((3,), float(i)))
        counters = dynamo.utils.counters
        found.append((sum(counters["graph_break"].values()), counters["frames"]["total"]))
    return found


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_break_for_each_call(tmp_path, kind, disk):
    make, data = KINDS[kind]
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "s") if disk else LazyTensorStorage(100)
    rb = make(storage=storage, compilable=True)
    batch = data()

    def step(x):
        doubled = {"obs": x * 2}  # before a break, between two, and after
        rb.extend(batch)
        sampled = rb.sample()
        return (sampled["obs"] * doubled["obs"]).sum()

    found = counted(step)
    assert found[0][0] == 2
    assert found[1:] == [(0, 0)] * 4, "compiled again"
    assert rb.write_count == 50
    rb.close()


def test_all_calls_of_a_step():
    rb = prioritized(
        storage=LazyTensorStorage(100), compilable=True, writer=TensorDictRoundRobinWriter(track_generations=True)
    )
    rb.extend(td())

    def step(x):
        rb.add(TensorDict({"obs": x, "next": {"done": x[:1] > 9}}))
        sampled = rb.sample()
        sampled["td_error"] = sampled["obs"].sum(-1)
        rb.update_tensordict_priority(sampled)
        rb.update_priority(sampled["index"], x.sum())

    found = counted(step)
    assert found[0][0] == 4
    assert found[2:] == [(0, 0)] * 3
    assert rb.write_count == 15


def test_it_is_compiled_without_it_too_but_not_well():
    """The negative control: what is measured above is not so for every buffer."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
    batch = td()

    def step(x):
        rb.extend(batch)
        return rb.sample()["obs"] * x[0]

    assert counted(step, 1)[0][0] > 2


def test_batches_are_those_of_any_other_buffer():
    one, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=10, compilable=compilable)
        for compilable in (True, False)
    )
    for rb in (one, other):
        rb.extend(td())
        torch.manual_seed(4)
        rb.drawn = [rb.sample() for _ in range(3)]
    assert all((a == b).all() for a, b in zip(one.drawn, other.drawn, strict=True))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copies_and_pickles(delayed, again):
    rb = TensorDictReplayBuffer(
        storage=partial(LazyTensorStorage, 100), batch_size=10, compilable=True, delayed_init=delayed
    )
    if not delayed:
        rb.extend(td())
    twin, batch = again(rb), td()
    assert isinstance(twin, TensorDictReplayBuffer)

    def step(x):
        twin.extend(batch)
        return x + 1

    twin.extend(batch)  # a delayed one is made here
    found = counted(step)
    assert found[0][0] == 1
    assert found[1:] == [(0, 0)] * 4
    assert twin.write_count == 60 + 10 * (not delayed)
    assert repr(twin).startswith("TensorDictReplayBuffer(")


def test_a_directory_that_is_opened(tmp_path):
    ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "s"), compilable=True).extend(rows())
    rb = ReplayBuffer.open(tmp_path / "s", batch_size=5, compilable=True)
    assert counted(lambda x: rb.sample()["obs"][0] + x)[0][0] == 1
    rb.close()


STORAGES = {
    "tensors": partial(LazyTensorStorage, 20),
    "files": partial(LazyMemmapStorage, 20),
    "data": lambda **more: TensorStorage(rows(20), **more),
    "list": partial(ListStorage, 20),
    "stack": partial(LazyStackStorage, 20),
    "compressed": partial(CompressedListStorage, 20),
}
WRITERS = [
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
    ImmutableDatasetWriter,
    partial(TensorDictMaxValueWriter, rank_key="obs"),
]


def untraced(rb):
    return isinstance(rb, ReplayBuffer) and type(rb) is not ReplayBuffer


@pytest.mark.parametrize("kind", STORAGES)
def test_a_storage_that_asks_for_it_is_enough(kind):
    assert untraced(ReplayBuffer(storage=STORAGES[kind](compilable=True)))
    for nothing in ({}, {"compilable": False}, {"compilable": None}):
        assert type(ReplayBuffer(storage=STORAGES[kind](**nothing))) is ReplayBuffer
    with pytest.raises(TypeError, match="compilable: expected True or False, .*got 'yes'"):
        STORAGES[kind](compilable="yes")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_asks_for_it_is_enough(writer):
    asks, does_not = writer(compilable=True), writer(compilable=False)
    assert untraced(ReplayBuffer(storage=LazyTensorStorage(9), writer=asks))
    assert type(ReplayBuffer(storage=LazyTensorStorage(9), writer=does_not)) is ReplayBuffer
    assert repr(asks) == repr(does_not)
    assert asks.state_dict() == does_not.state_dict()
    assert asks.config() == does_not.config()
    assert pickle.loads(pickle.dumps(asks)).traits == asks.traits


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "components",
    [
        lambda: {"storage": LazyTensorStorage(100, compilable=True)},
        lambda: {"storage": LazyTensorStorage(100), "writer": RoundRobinWriter(True)},
        lambda: {"storage": LazyTensorStorage(100, compilable=True), "writer": RoundRobinWriter(compilable=True)},
    ],
)
def test_calls_are_then_one_graph_break_each(components, backend):
    rb, batch = ReplayBuffer(batch_size=10, **components()), rows()

    def step(x):
        rb.extend(batch)
        return (rb.sample()["obs"] * x).sum()

    found = counted(step, backend=backend)
    assert found[0][0] == 2
    assert found[1:] == [(0, 0)] * 4, "compiled again"
    assert rb.write_count == 50


def test_batches_are_the_same_then_and_so_are_copies_and_reprs():
    one, other = (
        ReplayBuffer(
            storage=LazyTensorStorage(100, compilable=asked),
            writer=RoundRobinWriter(asked),
            batch_size=10,
            generator=torch.Generator().manual_seed(4),
        )
        for asked in (True, False)
    )
    for rb in (one, other):
        rb.extend(rows())
    for again in (copy.copy, copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))):
        twins = again(one), again(other)
        assert [untraced(twin) for twin in twins] == [True, False]
        assert repr(twins[0]) == repr(twins[1])
        assert torch.equal(*(twin.sample()["obs"] for twin in twins))
    one.load_state_dict(other.state_dict())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.sample()["obs"], other.sample()["obs"])


def test_components_that_ask_for_it_later_are_enough():
    by_storage, by_writer, by_use = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(3))
    by_storage.set_storage(LazyTensorStorage(20, compilable=True))
    by_writer.set_writer(RoundRobinWriter(compilable=True))
    assert untraced(by_storage)
    assert untraced(by_writer)
    by_use = ReplayBuffer(storage=partial(LazyTensorStorage, 9, compilable=True), delayed_init=True)
    twin = pickle.loads(pickle.dumps(by_use))
    by_use.assemble()
    for rb in (by_storage, by_writer, by_use, twin):
        assert rb.extend(rows(4)).tolist() == [0, 1, 2, 3]
        assert untraced(rb)
        assert type(rb).__base__ is ReplayBuffer


def test_a_store_that_is_opened_does_not_ask_for_it(tmp_path):
    storage = LazyMemmapStorage(20, scratch_dir=tmp_path / "s", compilable=True)
    with ReplayBuffer(storage=storage, writer=RoundRobinWriter(True)) as rb:
        rb.extend(rows())
    with ReplayBuffer.open(tmp_path / "s") as rb:
        assert type(rb) is ReplayBuffer


def test_a_buffer_that_shall_not_be_is_of_its_class():
    for compilable in (False, None):
        rb = PrioritizedReplayBuffer(alpha=1, beta=1, storage=LazyTensorStorage(9), compilable=compilable)
        assert type(rb) is PrioritizedReplayBuffer
