"""States of TorchRL's lists are loaded; those of its compressed lists and ensembles say what to do."""

import warnings
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict, tensorclass

from engram import (
    CompressedListStorage,
    IncompatibleCheckpoint,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from tests.torchrl.make_golden import TENSORS, rows
from tests.torchrl.test_torchrl_compressed import large, small

KINDS = ["ListStorage", "LazyStackStorage"]


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
    theirs = torchrl.ReplayBuffer(storage=torchrl.ListStorage(5), collate_fn=list)
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


def of_member(golden, number):
    """The state of a buffer: of a ring, of one that holds nothing, of a list, or of a list of streams."""
    state = torch.load(golden / "states" / "ensemble.pt")
    return {name: state[name][number] for name in ("_storage", "_sampler", "_writer")}


def test_what_is_committed(golden):
    with ReplayBuffer(storage=ListStorage(4), collate_fn=list) as items:
        quietly(items, of_member(golden, "2"))
        assert all(map(torch.equal, [items.storage[i] for i in range(3)], TENSORS))
        same(items.storage[3], item(2))
        assert items.write_count == 4
    with TensorDictReplayBuffer(storage=LazyTensorStorage(5)) as ring:
        quietly(ring, of_member(golden, "0"))
        assert ring[:]["number"].tolist() == [5, 6, 2, 3, 4]
        assert torch.equal(ring[:]["next", "obs"], ring[:]["obs"] + 1)
        ring.extend(rows(7, 1))
        assert ring[:]["number"].tolist() == [5, 6, 7, 3, 4]


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


LINEAR = torch.nn.Linear(1, 1).state_dict()


@pytest.mark.parametrize(
    ("path", "value", "error", "match"),
    [
        (("_storage", "_storage", 1), LINEAR, IncompatibleCheckpoint, "item 1: .*that of another object"),
        (("_storage", "_storage", 1), {"__batch_size": [], "a": 1}, IncompatibleCheckpoint, "item 1: .*an older one"),
        (("_storage", "_storage", 3, "a"), "x", IncompatibleCheckpoint, "item 3: a: expected a tensor, got a str"),
        (("_writer", "_cursor"), 5, ValueError, "_cursor"),
        (("_writer", "_cursor"), None, TypeError, "_cursor"),
        (("_writer",), {"_cursor": 1}, KeyError, "_write_count"),
        (("_rng",), 3, TypeError, "_rng"),
    ],
)
def test_states_that_are_none(golden, path, value, error, match):
    rb = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    rb.add("kept")
    with pytest.raises(error, match=match):
        rb.load_state_dict(put(of_member(golden, "2"), *path, value=value))
    assert rb.storage[0] == "kept"


@pytest.mark.parametrize(
    ("member", "storage", "match"),
    [
        ("2", lambda: ListStorage(3), "at most 3 items"),
        ("2", lambda: LazyTensorStorage(4), "got the items of a list"),
        ("0", lambda: LazyTensorStorage(6), "capacity"),
        ("1", lambda: LazyTensorStorage(4), "expected rows, got none"),
        ("3", lambda: ListStorage(2), r"those of a CompressedListStorage\. Save it with TorchRL's dumps\(path\)"),
    ],
)
def test_storages_of_another_kind(golden, member, storage, match):
    with pytest.raises(IncompatibleCheckpoint, match=match):
        ReplayBuffer(storage=storage(), collate_fn=list).load_state_dict(of_member(golden, member))


def test_states_of_ensembles_say_what_to_do(golden):
    state = torch.load(golden / "states" / "ensemble.pt")
    ensemble = ReplayBufferEnsemble(*(ReplayBuffer(storage=ListStorage(4)) for _ in range(4)), collate_fn=list)
    for rb in (ReplayBuffer(storage=ListStorage(4)), ensemble):
        with pytest.raises(IncompatibleCheckpoint, match=r"that of an ensemble\. Save it with TorchRL's dumps"):
            rb.load_state_dict(state)
    with pytest.raises(IncompatibleCheckpoint, match="expected the state of an ensemble, got that of one buffer"):
        ensemble.load_state_dict(of_member(golden, "2"))
