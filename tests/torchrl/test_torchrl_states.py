"""What ``state_dict`` of TorchRL's buffers returns is loaded."""

from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict

import engram
from engram import (
    IncompatibleCheckpoint,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

rl = pytest.importorskip("torchrl.data")
pytestmark = pytest.mark.filterwarnings("ignore")


def rows(first, n):
    step = torch.arange(first, first + n)
    return TensorDict({"a": step, "next": {"b": step.float()[:, None] / 2}}, [n])


@pytest.mark.parametrize("written", [1, 6, 8, 19])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("name", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_rows_and_cursor_go_on(name, storage, written):
    theirs = getattr(rl, name)(storage=rl.LazyTensorStorage(8), batch_size=4)
    theirs.extend(rows(0, written))
    with getattr(engram, name)(storage=storage(8)) as ours:
        ours.load_state_dict(theirs.state_dict())
        assert (len(ours), ours.batch_size) == (len(theirs), 4)
        for _ in range(2):
            assert torch.equal(ours[:]["a"], theirs[:]["a"])
            assert torch.equal(ours[:]["next", "b"], theirs[:]["next", "b"])
            both = [buffer.extend(rows(100, 3)).tolist() for buffer in (theirs, ours)]
            assert both[0] == both[1]
        assert ours.sample()["a"].shape == (4,)


def test_a_state_goes_through_a_file(tmp_path):
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), sampler=rl.SamplerWithoutReplacement())
    theirs.extend(rows(0, 5))
    theirs.sample(2)
    torch.save(theirs.state_dict(), tmp_path / "state")
    with TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=engram.SamplerWithoutReplacement()) as ours:
        ours.load_state_dict(torch.load(tmp_path / "state"))
        assert sorted(ours.sample(5)["a"].tolist()) == [0, 1, 2, 3, 4]  # a pass begins


def test_rows_of_one_tensor():
    theirs = rl.ReplayBuffer(storage=rl.LazyTensorStorage(4))
    theirs.extend(torch.arange(6))
    with ReplayBuffer(storage=LazyTensorStorage(4)) as ours:
        ours.load_state_dict(theirs.state_dict())
        assert ours[:].tolist() == theirs[:].tolist()


def test_no_field_is_lost_by_its_name():
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8))
    theirs.extend(rows(0, 6).set("__own", torch.arange(6)))
    with TensorDictReplayBuffer(storage=LazyTensorStorage(8)) as ours:
        ours.load_state_dict(theirs.state_dict())
        assert ours[:]["__own"].tolist() == [*range(6)]


class Tree:
    """As TorchRL's trees are read: by row. They are of a C++ extension that is not at hand with each torch."""

    def __init__(self, leaves):
        self.leaves = leaves

    def __getitem__(self, index):
        return self.leaves[index]


def prioritized_state(**changes):
    theirs = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8))
    theirs.extend(rows(0, 6))
    leaves = (torch.arange(8.0, dtype=torch.float64) + 1e-8) ** 0.6
    sampler = {
        "_schema_version": 1,
        "_alpha": 0.6,
        "_beta": 0.5,
        "_eps": 1e-8,
        "_max_priority": (5.0, 5),
        "_sum_tree": Tree(leaves),
        "_min_tree": Tree(leaves),
    }
    return {**theirs.state_dict(), "_sampler": {**sampler, **changes}}, leaves


@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_priorities_and_their_exponent(alpha):
    state, leaves = prioritized_state()
    with TensorDictPrioritizedReplayBuffer(alpha=alpha, beta=0.4, storage=LazyTensorStorage(8)) as ours:
        ours.load_state_dict(state)
        sampler = ours.sampler
        assert (sampler.alpha, sampler.beta, sampler.default_priority) == (0.6, 0.5, 5.0)
        assert torch.allclose(sampler.state_dict()["leaves"][:6], leaves[:6])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"_sum_tree": Tree(torch.full((8,), -1.0))}, ValueError, "6 priorities that are finite and at least 0"),
        ({"_alpha": "x"}, TypeError, "_alpha"),
        ({"_max_priority": (float("inf"), 1)}, ValueError, "_max_priority"),
    ],
)
def test_priorities_that_are_none_are_refused(change, error, said):
    state, _ = prioritized_state(**change)
    with TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(8)) as ours:
        ours.extend(rows(50, 2))
        with pytest.raises(error, match=said):
            ours.load_state_dict(state)
        assert ours[:]["a"].tolist() == [50, 51]


def changed(state, part, **entries):
    return {**state, part: {**state[part], **entries}}


def test_states_that_do_not_fit_are_refused():
    theirs = rl.ReplayBuffer(storage=rl.LazyTensorStorage(8))
    empty = theirs.state_dict()
    theirs.extend(rows(0, 6))
    state = theirs.state_dict()
    of_a_list = rl.ReplayBuffer(storage=rl.ListStorage(8))
    of_a_list.extend([1, 2])
    wrong = [
        (empty, LazyTensorStorage(8), IncompatibleCheckpoint, "nothing was ever written"),
        (state, LazyTensorStorage(9), IncompatibleCheckpoint, "8"),
        (state, ListStorage(8), IncompatibleCheckpoint, "Load it into a LazyTensorStorage"),
        (state, LazyTensorStorage(8, ndim=2), IncompatibleCheckpoint, "ndim of 1"),
        (of_a_list.state_dict(), LazyTensorStorage(8), IncompatibleCheckpoint, "got the items of a list"),
        (changed(state, "_storage", _len=9), LazyTensorStorage(8), ValueError, "_len"),
        (changed(state, "_writer", _cursor=-1), LazyTensorStorage(8), ValueError, "_cursor"),
        (
            changed(state, "_storage", _storage=OrderedDict(a="x")),
            LazyTensorStorage(8),
            IncompatibleCheckpoint,
            "got a str",
        ),
    ]
    for given, storage, error, said in wrong:
        with ReplayBuffer(storage=storage) as ours:
            with pytest.raises(error, match=said):
                ours.load_state_dict(given)
            assert len(ours) == 0


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
def test_draws_from_before_a_load_match_nothing_any_more(storage):
    """What writes of another library number themselves is nothing that a handle of here may be compared with."""
    theirs = rl.ReplayBuffer(storage=getattr(rl, storage)(8))
    theirs.extend(rows(0, 6) if storage == "LazyTensorStorage" else [{"a": torch.ones(())}] * 6)
    writer = engram.RoundRobinWriter(track_generations=True)
    with ReplayBuffer(storage=getattr(engram, storage)(8), writer=writer, batch_size=4) as ours:
        ours.extend(rows(50, 7) if storage == "LazyTensorStorage" else [{"a": torch.ones(())}] * 7)
        before = ours.writer.generations_of(torch.arange(7))
        ours.load_state_dict(theirs.state_dict())
        after = ours.writer.generations_of(torch.arange(6))
        assert after.min() > before.max()
        assert ours.remove(torch.arange(6), generation=before[:6]) == 0
        new = ours.extend(rows(90, 2) if storage == "LazyTensorStorage" else [{"a": torch.ones(())}] * 2)
        assert ours.writer.generations_of(torch.as_tensor(new)).min() > after.max()


@pytest.mark.parametrize("way", ["dump", "state"])
def test_rows_of_tensors_load_into_a_buffer_that_was_given_no_storage(way, tmp_path):
    theirs = rl.ReplayBuffer(storage=rl.LazyTensorStorage(8), batch_size=4)
    theirs.extend(rows(0, 11))
    ours = ReplayBuffer(8)
    if way == "dump":
        theirs.dumps(tmp_path / "dump")
        ours.loads(tmp_path / "dump")
    else:
        ours.load_state_dict(theirs.state_dict())
    assert type(ours.storage) is LazyTensorStorage
    assert torch.equal(ours[:]["a"], theirs[:]["a"])
    assert ours.extend(rows(20, 2)).tolist() == theirs.extend(rows(20, 2)).tolist()


def test_rows_of_tensors_do_not_load_into_a_list(tmp_path):
    theirs = rl.ReplayBuffer(storage=rl.LazyTensorStorage(8))
    theirs.extend(rows(0, 3))
    theirs.dumps(tmp_path / "dump")
    items = ReplayBuffer(8)
    items.add(torch.zeros(3))
    for ours in (ReplayBuffer(storage=ListStorage(8)), TensorDictReplayBuffer(8), items):
        with pytest.raises(
            IncompatibleCheckpoint, match="expected a dump of engram's for a ListStorage.* LazyTensorStorage"
        ):
            ours.loads(tmp_path / "dump")
