"""``rb.query`` and predicates: beside TorchRL's on the same data, and against plain lists."""

import random
import warnings

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tensordict import TensorDict, lazy_stack

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Trajectory,
    TrajectoryPredicate,
    filter_trajectories,
    iter_trajectories,
    traj,
)
from tests import stress
from tests.samplers.machine import SETTINGS, StoreMachine, stressed
from tests.serving.servers import serving


def steps(lengths, first=0, **more):
    """Trajectories of these lengths, whose rows say which they are."""
    n = sum(lengths)
    number = torch.arange(first, first + n)
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    fields = {"episode": episode, "row": number, "obs": torch.stack([number, number % 5], -1).float()}
    return TensorDict({**fields, **more, "next": {"reward": (number % 7).float()[:, None], "done": done}}, [n])


def buffer(data, size=None, *, storage=LazyTensorStorage, **arguments):
    rb = TensorDictReplayBuffer(storage=storage(size or len(data)), sampler=RandomSampler(), batch_size=4, **arguments)
    rb.extend(data)
    return rb


def rows_of(found):
    return [it.row.tolist() for it in found]


# ---- beside TorchRL's --------------------------------------------------------------------------------------------------

#: Made of each library's ``traj``.
PREDICATES = {
    "all": lambda traj: None,
    "sum": lambda traj: traj.reward.sum() > 9,
    "nested": lambda traj: traj[("next", "reward")].sum() <= 9,
    "total": lambda traj: traj.total_reward >= 12,
    "mean": lambda traj: traj.reward.mean() < 3,
    "extremes": lambda traj: (traj.reward.max() == 6) | (traj.row.min() < 4),
    "ends": lambda traj: (traj.row.first() != 0) & (traj.reward.last() > 2),
    "length": lambda traj: (traj.length > 2) & ~(traj.length == 4),
    "any": lambda traj: (traj.obs > 3).any(),
    "every": lambda traj: (traj.reward < 6).all() | (traj["obs"] == 2).all(),
    "callable": lambda traj: lambda it: int(it.row[0]) % 2 == 0,
    "bools": lambda traj: traj.done.sum() == 1,
    "tensor": lambda traj: traj.reward.sum() > torch.tensor(9.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.parametrize("seed", range(4))
def test_trajectories_are_those_of_torchrl(name, seed):
    """Rings that are filled once or more, by ids or end flags."""
    rl = pytest.importorskip("torchrl.data")
    dice = random.Random(seed)
    size, by_id = dice.randint(10, 40), seed % 2 == 0
    found = []
    for library, make in ((rl, rl.TensorDictReplayBuffer), (None, TensorDictReplayBuffer)):
        dice = random.Random(seed)
        storage = (LazyTensorStorage if library is None else rl.LazyTensorStorage)(size)
        rb = make(storage=storage, batch_size=4)
        first = 0
        for _ in range(dice.randint(1, 6)):
            data = steps([dice.randint(1, 6) for _ in range(3)], first)
            first += len(data)
            rb.extend(data if by_id else data.exclude("episode"))
        predicate = PREDICATES[name](traj if library is None else rl.traj)
        found.append(rb.query(predicate))
    theirs, ours = found
    assert rows_of(ours) == rows_of(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.length == other.length
        other = other.data.exclude("index")
        assert (mine.data.exclude("index") == other).all()


@pytest.mark.filterwarnings("ignore")
def test_columns_are_those_of_torchrl():
    rl = pytest.importorskip("torchrl.data")
    episode = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 6, 6, 6, 7, 7]])
    row = torch.arange(12).reshape(2, 6)
    data = TensorDict({"episode": episode, "row": row, "next": {"reward": (row % 4).float()}}, [2, 6])
    found = []
    for storage, make in (
        (rl.LazyTensorStorage, rl.TensorDictReplayBuffer),
        (LazyTensorStorage, TensorDictReplayBuffer),
    ):
        rb = make(storage=storage(12, ndim=2), batch_size=4)
        rb.extend(data)
        found.append(rows_of(rb.query((rl.traj if storage is rl.LazyTensorStorage else traj).reward.sum() > 2)))
    assert found[0] == found[1]


# ---- which trajectories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_they_are_whole_across_the_end_and_oldest_first(storage):
    rb = buffer(steps([4, 3, 3]), 10, storage=storage)
    rb.extend(steps([6], 100))
    assert rows_of(rb.query()) == [[6], [7, 8, 9], list(range(100, 106))]
    rb.extend(steps([7], 200))
    assert rows_of(rb.query(traj.length > 1)) == [[103, 104, 105], list(range(200, 207))]


def test_lanes_come_one_after_another():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, lanes=2), batch_size=4)
    rb.extend(steps([3, 2], 50), lane=1)
    rb.extend(steps([2, 2]), lane=0)
    assert rows_of(rb.query()) == [[0, 1], [2, 3], [50, 51, 52], [53, 54]]


def test_only_the_fields_of_a_predicate_are_read(monkeypatch):
    rb = buffer(steps([3, 4, 2]))
    store, read = rb.storage.memory, []
    whole = store.read

    def noted(rows, **arguments):
        read.append((arguments.get("which"), len(rows)))
        return whole(rows, **arguments)

    monkeypatch.setattr(store, "read", noted)
    assert rows_of(rb.query(traj.reward.sum() > 8)) == [[3, 4, 5, 6]]
    names = [field.key for field in store.schema.fields]
    assert read == [([names.index(("next", "reward"))], 9), (None, 4)]
    read.clear()
    assert rows_of(rb.query(traj.length == 2)) == [[7, 8]]
    assert read == [(None, 2)]


def test_a_predicate_of_ones_own_gets_the_fields_that_it_names(monkeypatch):
    rb = buffer(steps([3, 4, 2]))
    got = []

    def long_enough(it):
        got.append(sorted(map(str, it.keys(True, True))))
        return it.reward.sum() > 3  # of the next step

    asked = []
    read = type(rb.storage.memory).read
    monkeypatch.setattr(type(rb.storage.memory), "read", lambda *a, **k: asked.append(k.get("which")) or read(*a, **k))
    found = rb.query(~TrajectoryPredicate(long_enough, keys={"reward"}))
    expected = rb.query(lambda it: not it.reward.sum() > 3)
    assert [it.length for it in found] == [it.length for it in expected]
    assert set(map(tuple, got)) == {("('next', 'reward')",)}
    assert [which is None or len(which) for which in asked] == [1, True, True]  # all fields of those that are returned
    with pytest.raises(KeyError, match="query: expected a stored field 'nothing'"):
        rb.query(TrajectoryPredicate(lambda it: True, keys={"nothing"}))


def test_results_are_copies():
    rb = buffer(steps([3, 4]))
    found = rb.query()
    found[0].data["row"].fill_(-1)
    assert rows_of(rb.query())[0] == [0, 1, 2]


def test_read_transforms_apply_to_predicates_and_results():
    rb = buffer(steps([3, 4]))
    rb.append_transform(lambda data: data.set(("next", "reward"), -data["next", "reward"]))
    found = rb.query(traj.reward.sum() < -5)
    assert rows_of(found) == [[3, 4, 5, 6]]
    assert float(found[0].total_reward) == -18


def test_another_field_tells_trajectories_apart():
    rb = buffer(steps([3, 4], other=torch.tensor([1, 1, 1, 1, 1, 2, 2])))
    assert rows_of(rb.query(trajectory_key="other")) == [[0, 1, 2], [3, 4], [5, 6]]
    assert len(rb.query()) == 2


def test_end_flags_do_with_a_warning():
    rb = buffer(steps([3, 4]).exclude("episode"))
    with pytest.warns(UserWarning, match=r"end flags \[\('next', 'done'\)\]") as caught:
        assert rows_of(rb.query()) == [[0, 1, 2], [3, 4, 5, 6]]
    assert caught[0].filename == __file__


def test_rows_that_are_overwritten_meanwhile_are_left_out(monkeypatch):
    rb = buffer(steps([3, 4, 3]))
    store = rb.storage.memory
    whole = store.read

    def overtaken(rows, **arguments):
        monkeypatch.setattr(store, "read", whole)
        rb.extend(steps([2], 100))  # the first two rows
        return whole(rows, **arguments)

    monkeypatch.setattr(store, "read", overtaken)
    assert rows_of(rb.query()) == [[3, 4, 5, 6], [7, 8, 9]]
    assert rows_of(rb.query()) == [[2], [3, 4, 5, 6], [7, 8, 9], [100, 101]]
    monkeypatch.setattr(store, "read", overtaken)  # rows 2 and 3 of the ring
    assert rows_of(rb.query(traj.reward.sum() >= 0)) == [[7, 8, 9], [100, 101]]
    for _ in range(3):  # and so on, until all were overwritten
        monkeypatch.setattr(store, "read", overtaken)
        rb.query(traj.length > 0)
    one = buffer(steps([2]))
    store = one.storage.memory
    whole = store.read

    def gone(rows, **arguments):
        monkeypatch.setattr(store, "read", whole)
        one.extend(steps([2], 100))
        return whole(rows, **arguments)

    monkeypatch.setattr(store, "read", gone)
    assert one.query((traj.obs > 0).any()) == []


class Queries(StoreMachine):
    """What a query finds follows from what rows hold."""

    def make_sampler(self, draw):
        return RandomSampler()

    @rule(least=st.integers(0, 5), length=st.integers(1, 4))
    def find(self, least, length):
        live = self.rings.live()
        runs = self.rings.runs(lambda a, b: a.done or a.episode != b.episode)
        worth = {row: step.step for row, step in live.items()}
        found = self.rb.query(lambda it: int(it["where"][:, 2].sum()) >= least)
        expected = [run for run in runs if sum(worth[row] for row in run) >= least]
        assert [it["where"].tolist() for it in found] == [[live[row].where for row in run] for run in expected]
        found = self.rb.query((traj.length >= length) & (traj.episode.max() >= 0))
        expected = [run for run in runs if len(run) >= length and max(live[row].episode for row in run) >= 0]
        assert [it["where"].tolist() for it in found] == [[live[row].where for row in run] for run in expected]


TestQueries = Queries.TestCase
TestQueries.settings = settings(SETTINGS, max_examples=stress.size(20, 1_000))
stressed(TestQueries)


# ---- trajectories and predicates by themselves -------------------------------------------------------------------------


def test_a_trajectory_shows_its_entries():
    it = next(iter_trajectories(steps([3, 2])))
    assert repr(it) == "Trajectory(length=3, keys=['episode', 'next', 'obs', 'row'])"
    assert it.reward.shape == (3, 1)
    assert it["next", "reward"] is it.data["next", "reward"]
    assert torch.equal(it["row"], it.row)
    assert isinstance(it[:2], Trajectory)
    assert it[1:].length == 2
    assert float(it.total_reward) == 3
    assert it.get("nothing") is None
    assert set(it.keys()) == {"episode", "row", "obs", "next"}
    with pytest.raises(AttributeError, match=r"'nothing'.*'next', 'nothing'.*'row'"):
        it.nothing  # noqa: B018
    with pytest.raises(ValueError, match=r"one batch dimension.*\[2, 3\]"):
        Trajectory(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    both = lazy_stack([it, it[:2]])
    assert [part.length for part in both.unbind(0)] == [3, 2]


def test_predicates_say_what_they_are():
    predicate = (traj.reward.sum() > 3) & ~((traj.obs >= 2).all() | (traj.length != 4))
    assert repr(predicate) == (
        "TrajectoryPredicate(((traj.reward.sum() > 3) & ~((traj.obs >= 2).all() | (traj.length != 4))))"
    )
    assert predicate.required_keys() == {"reward", "obs"}
    own = TrajectoryPredicate(lambda it: it.length > 2, "long")
    assert own.required_keys() is None
    assert (own | predicate).required_keys() is None
    assert [it.length for it in filter_trajectories(steps([3, 2, 4]), own & (traj.row.min() > 0))] == [4]
    assert rows_of(buffer(steps([3, 2, 4])).query(own & (traj.row.min() > 0))) == [[5, 6, 7, 8]]
    assert repr(traj) == "traj"
    assert repr(traj["next", "done"].max()) == "traj[('next', 'done')].max()"


def test_a_comparison_with_a_tensor_of_steps_is_made_one_by_one():
    rb = buffer(steps([2, 2]))
    assert rows_of(rb.query((traj.row == torch.tensor([2, 3])).all())) == [[2, 3]]


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_comparisons_of_steps_are_no_predicates():
    rb = buffer(steps([3, 2]))
    for query in (rb.query, lambda p: filter_trajectories(steps([2]), p)):
        with pytest.raises(TypeError, match=r"\(traj\.reward > 3\).*any\(\)"):
            query(traj.reward > 3)
    with pytest.raises(TypeError, match=r"any\(\)"):
        (traj.length > 1) & (traj.reward > 3)
    with pytest.raises(TypeError, match=r"any\(\)"):
        bool(traj.reward > 3)
    with pytest.raises(TypeError, match="expected a number"):
        _ = traj.reward.sum() > traj.length
    with pytest.raises(TypeError, match="predicate"):
        rb.query(3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrajectoryPredicate(3), "fn: expected a function of a Trajectory, got int"),
        (lambda: TrajectoryPredicate(len, keys="obs"), "keys: expected a set of keys, got 'obs'"),
        (lambda: TrajectoryPredicate(len, keys={1.5}), "keys: expected a string or a tuple of strings, got 1.5"),
        (lambda: 2 < traj.length < 5, "expected & and | between predicates"),
        (lambda: (traj.length > 2) and (traj.length < 5), "expected & and | between predicates"),
        (lambda: traj.length > "a", r"\(traj.length > 'a'\): expected one number to compare with, got 'a'"),
        (lambda: traj.reward.sum() > torch.zeros(2), "expected one number to compare with, got tensor"),
        (lambda: Trajectory(3), "data: expected a TensorDict .* got NonTensorData.*3"),
        (Trajectory, "data: expected a TensorDict"),
    ],
)
def test_what_is_no_predicate_or_trajectory(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def test_answers_that_are_no_bool():
    rb = buffer(steps([3, 2]))
    for predicate, got in ((lambda it: None, "None"), (lambda it: it.reward > 3, r"a tensor \[3")):
        for query in (
            rb.query,
            lambda p: filter_trajectories(steps([3]), p),
            lambda p: rb.query(TrajectoryPredicate(p)),
        ):
            with pytest.raises(TypeError, match=f"expected one bool for each trajectory, got {got}"):
                query(predicate)
    with pytest.raises(TypeError, match="filter_trajectories: expected a predicate"):
        filter_trajectories(steps([3]), 3)
    assert [it.length for it in rb.query(lambda it: it.length == 3)] == [3]


def test_keys_that_are_not_there():
    rb = buffer(steps([3, 2]))
    for predicate in (traj.nothing.sum() > 3, (traj.nothing > 3).any(), traj["next", "nothing"].sum() > 3):
        with pytest.raises(KeyError, match=r"nothing.*reward"):
            rb.query(predicate)
        with pytest.raises(KeyError, match="nothing"):
            filter_trajectories(steps([2]), predicate)
    with pytest.raises(KeyError, match=r"trajectory_key.*'nothing'"):
        rb.query(trajectory_key="nothing")
    with pytest.raises(KeyError, match=r"trajectory ids.*trajectory_key"):
        buffer(TensorDict({"x": torch.arange(4)}, [4])).query()
    for entry in (lambda it: it["nothing"].sum() > 3, lambda it: it["next", "nothing"].sum() > 3):
        with pytest.raises(KeyError, match=r"expected an entry .*'nothing'.*'next', 'reward'.*'obs'"):
            rb.query(entry)
    with pytest.raises(RuntimeError, match=r"one number of each trajectory.*\[2\]"):
        rb.query(traj.obs.first() > 3)


def test_rows_on_a_server(tmp_path):
    rb = buffer(steps([3, 2]), storage=lambda size: LazyMemmapStorage(size, scratch_dir=tmp_path / "s"))
    with serving(tmp_path / "s") as served:
        there = ReplayBuffer.connect(served.address)
        with pytest.raises(RuntimeError, match=r"query.*got a connection.*readonly=True"):
            there.query()
        there.close()
    rb.close()


def test_rows_without_trajectories():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    assert rb.query() == []
    rb.extend(torch.arange(4))
    with pytest.raises(TypeError, match=r"rows with fields, of one step each.*leaf"):
        rb.query()
    rb = ReplayBuffer(storage=ListStorage(4), batch_size=2)
    rb.extend([1, 2])
    with pytest.raises(TypeError, match="TensorDicts or dicts of one step"):
        rb.query()
    with pytest.raises(TypeError, match="dict"):
        list(iter_trajectories({"x": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        filter_trajectories(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(iter_trajectories(TensorDict({"episode": torch.zeros(0)}, [0]))) == []


class Counted(torch.nn.Module):
    """A transform that says what it reads and writes, and how many steps went through it."""

    def __init__(self, key, out=None, change=lambda value: value + 1):
        super().__init__()
        self.in_keys, self.change, self.steps = [key], change, 0
        if out is not None:
            self.out_keys = [out]

    def forward(self, data):
        self.steps += len(data)
        return data.set(self.out_keys[0], self.change(data[self.in_keys[0]])) if hasattr(self, "out_keys") else data


STORAGES = [LazyTensorStorage, ListStorage, lambda size: LazyTensorStorage(size, shared_init=True)]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_predicate_over_stored_fields_runs_no_transform_on_what_it_refuses(storage):
    rb = buffer(steps([3, 4, 5]), storage=storage)
    slow, other = Counted("obs", "obs"), Counted("row", "more")
    rb.append_transform(slow).append_transform(other)
    (found,) = rb.query((traj.reward.sum() > 10) & (traj.length == 4))
    assert found.row.tolist() == [3, 4, 5, 6]
    assert found.obs[:, 0].tolist() == [4, 5, 6, 7]  # once, where all go through them in the end
    assert (slow.steps, other.steps) == (4, 4)
    assert rb.query(traj.reward.sum() > 1000) == []
    assert (slow.steps, other.steps) == (4, 4)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_predicate_runs_the_transforms_that_it_needs_alone(storage):
    rb = buffer(steps([3, 4, 5]), storage=storage)
    first, unneeded = Counted("row", "twice", lambda value: value * 2), Counted("obs", "obs")
    second, last = Counted("twice", ("next", "more")), Counted("episode", "last")
    for transform in (first, unneeded, second, last):
        rb.append_transform(transform)
    (found,) = rb.query(traj.more.max() == 13)  # of row 6, as ("next", "more")
    assert found.twice.tolist() == [6, 8, 10, 12]
    assert found.obs[:, 0].tolist() == [4, 5, 6, 7]
    assert (unneeded.steps, last.steps) == (4, 4)
    assert (first.steps, second.steps) == (16, 16)


def test_what_does_not_say_what_it_writes_is_run_with_all_before_it():
    rb = buffer(steps([3, 4]))
    before, unknown, after = Counted("obs", "obs"), Counted("obs"), Counted("obs", "more")
    for transform in (before, unknown, after):
        rb.append_transform(transform)
    assert rb.query(traj.reward.sum() > 1000) == []
    assert (before.steps, unknown.steps, after.steps) == (7, 7, 0)
    assert rb.query(lambda it: bool((it.obs < 0).any())) == []  # a callable may read all
    assert (before.steps, unknown.steps, after.steps) == (14, 14, 7)
    rb.append_transform(lambda data: data.set("reward", -data["next", "reward"]))
    assert len(rb.query(traj["reward"].sum() < 0)) == 2


def test_transforms_of_torchrl_are_run_as_it_runs_them():
    torchrl_transforms = pytest.importorskip("torchrl.envs.transforms")
    rb = buffer(steps([3, 4, 5]))
    rb.append_transform(torchrl_transforms.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
    rb.append_transform(torchrl_transforms.ExcludeTransform("obs"))
    rb.append_transform(torchrl_transforms.RenameTransform(["row"], ["place"]))
    (found,) = rb.query(traj.reward.sum() > 26)
    assert found.total_reward == 36
    assert found.data.get("obs") is None
