"""States of TorchRL's lists and ensembles are loaded."""

import warnings
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    CompressedListStorage,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from tests.migrate.make_golden import TENSORS, rows
from tests.migrate.test_torchrl_compressed import large, small

KINDS = ["ListStorage", "LazyStackStorage", "CompressedListStorage"]


@tensorclass
class Note:
    a: torch.Tensor
    words: str


def item(i):
    inner = TensorDict({"b": torch.ones(1) * i, "x.y": torch.zeros(2)})
    return TensorDict({"a": torch.arange(i + 2), "next": inner, "text": f"number {i}", "c.d": torch.ones(1)})


def compressed(size):
    return CompressedListStorage(size, compression_fn=small, decompression_fn=large)


def quietly(rb, state):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.load_state_dict(state)


def same(one, other):
    assert (one == other).all()
    assert one["text"] == other["text"]
    assert set(one.keys(True)) == set(other.keys(True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written", [0, 1, 4, 7])
@pytest.mark.parametrize("here", [ListStorage, LazyStackStorage, compressed])
@pytest.mark.parametrize("kind", KINDS)
def test_items_and_cursor_go_on(torchrl, kind, here, written):
    theirs = torchrl.ReplayBuffer(storage=getattr(torchrl, kind)(4), batch_size=3, collate_fn=list)
    for i in range(written):
        theirs.add(item(i))
    with ReplayBuffer(storage=here(4), collate_fn=list) as ours:
        ours.extend([item(50)] * 2)
        quietly(ours, theirs.state_dict())
        assert (len(ours), ours.write_count, ours.batch_size) == (min(written, 4), written, 3)
        for i in range(len(ours)):
            same(ours.storage[i], theirs._storage[i])
        assert ours.add(item(9)) == theirs.add(item(9))
        same(ours.storage[written % 4], item(9))


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_tensordict(torchrl, tmp_path):
    there = [torch.arange(3), "text", 7, {"a": torch.ones(2), "n": [1, {"b": torch.zeros(1)}]}, [torch.ones(1), 2]]
    for kind in ("ListStorage", "CompressedListStorage"):
        theirs = torchrl.ReplayBuffer(storage=getattr(torchrl, kind)(5), collate_fn=list)
        for one in there:
            theirs.add(one)
        with ReplayBuffer(storage=ListStorage(5), collate_fn=list) as ours:
            quietly(ours, theirs.state_dict())
            assert str(ours[:]) == str(there)
            ours[0][0].fill_(9)
            ours[3]["a"].fill_(9)
            assert str(theirs._storage[0]) == str(torch.arange(3)), "tensors are the buffer's own"


@pytest.mark.filterwarnings("ignore")
def test_a_state_goes_through_a_file(torchrl, tmp_path):
    theirs = torchrl.ReplayBuffer(storage=torchrl.ListStorage(5), generator=torch.Generator().manual_seed(3))
    theirs.add(item(1))
    torch.save(theirs.state_dict(), tmp_path / "state")
    here = torch.Generator()
    with ReplayBuffer(storage=ListStorage(5), generator=here, collate_fn=list) as ours:
        quietly(ours, torch.load(tmp_path / "state"))
        same(ours.storage[0], item(1))
        assert torch.equal(here.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.filterwarnings("ignore")
def test_names_with_points_and_batch_sizes_stay(torchrl):
    theirs = torchrl.ReplayBuffer(storage=torchrl.ListStorage(5))
    theirs.add(TensorDict({"a.b": torch.ones(2, 3), "n": TensorDict({"c.d": torch.ones(2, 3, 1)}, [2, 3])}, [2]))
    tensors = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(5))
    tensors.extend(TensorDict({"a.b": torch.ones(2)}, [2]))
    with ReplayBuffer(storage=ListStorage(5)) as ours:
        quietly(ours, theirs.state_dict())
        found = ours.storage[0]
        assert (found.batch_size, found["n"].batch_size) == ((2,), (2, 3))
        assert set(found.keys(True, True)) == {"a.b", ("n", "c.d")}
    with ReplayBuffer(storage=LazyTensorStorage(5)) as ours:
        quietly(ours, tensors.state_dict())
        assert list(ours[:].keys()) == ["a.b"]


@pytest.mark.filterwarnings("ignore")
def test_what_the_state_does_not_have_is_named(torchrl):
    theirs = torchrl.ReplayBuffer(storage=torchrl.ListStorage(5))
    theirs.add(Note(a=torch.ones(2), words="some", batch_size=[]))
    theirs.add(TensorDict({"e": TensorDict({})}))
    with ReplayBuffer(storage=ListStorage(5)) as ours:
        with pytest.warns(UserWarning, match="the class of the root, Note.*what field 'e' held") as caught:
            ours.load_state_dict(theirs.state_dict())
        assert len(caught) == 1
        assert ours.storage[0]["words"] == "some"
        assert ours.storage[0]["a"].tolist() == [1, 1]
    tensors = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(5))
    tensors.extend(TensorDict({"a": torch.ones(2)}, [2]))
    state = tensors.state_dict()
    state |= {"_transforms": {"mean": torch.ones(1)}, "_sampler": {"_sample_count": torch.ones(2)}}
    with ReplayBuffer(storage=LazyTensorStorage(5)) as ours, pytest.warns(UserWarning, match="lost") as caught:
        ours.load_state_dict(state)
    for said in ("the state of the transforms", "the state of the sampler (_sample_count)"):
        assert said in str(caught[0].message)


# ---- ensembles -------------------------------------------------------------------------------------------------------------


def members(third=ListStorage, sizes=(5, 4, 4, 2)):
    return [
        TensorDictReplayBuffer(storage=LazyTensorStorage(sizes[0])),
        TensorDictReplayBuffer(storage=LazyTensorStorage(sizes[1])),
        ReplayBuffer(storage=third(sizes[2]), collate_fn=list),
        ReplayBuffer(storage=ListStorage(sizes[3]), collate_fn=list),
    ]


def check(rb):
    ring, nothing, items, streams = (rb[i] for i in range(4))
    assert ring[:]["number"].tolist() == [5, 6, 2, 3, 4]
    assert torch.equal(ring[:]["next", "obs"], ring[:]["obs"] + 1)
    assert len(nothing) == 0
    assert all(map(torch.equal, [items.storage[i] for i in range(3)], TENSORS))
    same(items.storage[3], item(2))
    assert all(map(torch.equal, [streams.storage[i] for i in range(2)], [TENSORS[2], TENSORS[1]]))
    assert [rb[i].write_count for i in range(4)] == [7, 0, 4, 3]
    assert rb.batch_size == 8
    ring.extend(rows(7, 1))
    assert ring[:]["number"].tolist() == [5, 6, 7, 3, 4]
    streams.add("next")
    assert streams.storage[1] == "next"


def test_what_is_committed(golden):
    """An ensemble of a ring, of a buffer that holds nothing, and of two lists."""
    state = torch.load(golden / "states" / "ensemble.pt")
    generator = torch.Generator()
    rb = ReplayBufferEnsemble(*members(), collate_fn=list, generator=generator)
    rb[0].extend(rows(50, 2))
    rb[1].extend(rows(50, 2))
    quietly(rb, state)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
    check(rb)


@pytest.mark.filterwarnings("ignore")
def test_torchrl_returns_what_is_committed(torchrl, golden):
    from tests.migrate.make_golden import ensemble_state

    def said(state):
        if isinstance(state, dict):
            return {key: said(value) for key, value in state.items()}
        return [said(one) for one in state] if isinstance(state, list | tuple) else type(state).__name__

    assert said(ensemble_state(torchrl)) == said(torch.load(golden / "states" / "ensemble.pt"))


@pytest.mark.filterwarnings("ignore")
def test_storages_of_an_ensemble(torchrl):
    from torchrl.data.replay_buffers import RandomSampler, RoundRobinWriter, SamplerEnsemble, WriterEnsemble

    theirs = torchrl.ReplayBufferEnsemble(
        storages=torchrl.StorageEnsemble(torchrl.LazyTensorStorage(4), torchrl.ListStorage(4)),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        collate_fns=[None, list],
        collate_fn=list,
        batch_size=2,
    )
    rb = ReplayBufferEnsemble(
        ReplayBuffer(storage=LazyTensorStorage(4)), ReplayBuffer(storage=ListStorage(4)), collate_fn=list
    )
    rb[0].extend(torch.ones(3))
    quietly(rb, theirs.state_dict())
    assert [len(rb[0]), len(rb[1])] == [0, 0]


# ---- what is refused -------------------------------------------------------------------------------------------------------


def put(state, *path, value):
    """A copy with another entry."""
    if not path:
        return value
    if isinstance(state, list):
        return [put(one, *path[1:], value=value) if i == path[0] else one for i, one in enumerate(state)]
    made = OrderedDict(state)
    vars(made).update(vars(state) if isinstance(state, OrderedDict) else {})
    made[path[0]] = put(state.get(path[0]), *path[1:], value=value)
    return made if isinstance(state, OrderedDict) else dict(made)


LISTS, STREAMS = ("_storage", "2", "_storage"), ("_storage", "3", "_storage")
SAID = ("_storage", "3", "_metadata")
LINEAR = torch.nn.Linear(1, 1).state_dict()


@pytest.mark.parametrize(
    ("path", "value", "error", "match"),
    [
        ((*LISTS, 1), LINEAR, IncompatibleCheckpoint, "member 2: item 1: .*that of another object"),
        ((*LISTS, 1), {"__batch_size": [], "a": 1}, IncompatibleCheckpoint, "item 1: .*an older one"),
        ((*LISTS, 3, "a"), "x", IncompatibleCheckpoint, "item 3: a: expected a tensor, got a str"),
        (("_writer", "2", "_cursor"), 5, ValueError, "member 2: _cursor"),
        (("_writer", "2"), {"_cursor": 1}, KeyError, "_write_count"),
        (("_writer", "3", "_cursor"), None, TypeError, "member 3: _cursor"),
        (SAID, [], ValueError, "member 3: _metadata: expected 2 descriptions"),
        ((*SAID, 1), None, IncompatibleCheckpoint, "item 1: expected an item and its description"),
        ((*SAID, 1, "type"), "pickle", IncompatibleCheckpoint, "item 1: a 'pickle' cannot be read"),
        ((*SAID, 1, "dtype"), torch.qint8, IncompatibleCheckpoint, "item 1: expected a dtype"),
        ((*SAID, 1, "shape"), [2, 3], TypeError, "item 1: shape"),
        ((*SAID, 1, "shape"), torch.Size([2, 4]), CorruptCheckpoint, "item 1: expected a stream of 32 bytes"),
        ((*SAID, 1, "shape"), torch.Size([1 << 20, 1 << 40]), CorruptCheckpoint, "item 1: expected a stream"),
        ((*STREAMS, 1), b"x", IncompatibleCheckpoint, "item 1: expected a compressed tensor, got a bytes"),
        ((*STREAMS, 1), torch.ones(3, dtype=torch.uint8), IncompatibleCheckpoint, "item 1: .*compression_fn of your own"),
        (("_storage", "0"), {"0": {"_storage": []}}, IncompatibleCheckpoint, "member 0: .*ensemble in an ensemble"),
        (("_storage", "4"), {"_storage": []}, IncompatibleCheckpoint, "of 4 members, as here, got one of 5"),
        (("_storage",), {"_storage": []}, IncompatibleCheckpoint, r"that of one buffer.*ensemble\[i\].load_state_dict"),
        (("_rng",), 3, TypeError, "_rng"),
    ],
)  # fmt: skip
def test_states_that_are_none(golden, path, value, error, match):
    """Nothing has changed, not even of the members before."""
    state = torch.load(golden / "states" / "ensemble.pt")
    rb = ReplayBufferEnsemble(*members(), collate_fn=list)
    rb[0].extend(rows(50, 2))
    rb[2].add("kept")
    with pytest.raises(error, match=match):
        rb.load_state_dict(put(state, *path, value=value))
    assert rb[0][:]["number"].tolist() == [50, 51]
    assert rb[2].storage[0] == "kept"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"sizes": (6, 4, 4, 2)}, "capacity"),
        ({"sizes": (5, 4, 3, 2)}, "at most 3 items"),
        ({"sizes": (5, 4, 4, 3)}, "a full one of 2"),
        ({"third": LazyTensorStorage}, "got the items of a list"),
    ],
)
def test_members_of_another_kind(golden, given, match):
    rb = ReplayBufferEnsemble(*members(**given), collate_fn=list)
    rb[0].extend(rows(50, 2))
    with pytest.raises(IncompatibleCheckpoint, match=match) as caught:
        rb.load_state_dict(torch.load(golden / "states" / "ensemble.pt"))
    assert "member" in caught.value.__notes__[0]
    assert len(rb[0]) == 2


def test_a_buffer_takes_no_ensemble(golden):
    with pytest.raises(IncompatibleCheckpoint, match="that of an ensemble.*ReplayBufferEnsemble of as many"):
        ReplayBuffer(storage=ListStorage(4)).load_state_dict(torch.load(golden / "states" / "ensemble.pt"))
