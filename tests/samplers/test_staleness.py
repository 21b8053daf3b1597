"""StalenessAwareSampler: rows by how far the consumer is ahead of the policy that made them."""

import copy
import itertools
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tensordict import TensorDict

from engram import (
    FilteredSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.samplers.machine import SETTINGS, StoreMachine, stressed
from tests.statistics_of import assert_proportional, assert_uniform
from tests.store.device.there import There
from tests.store.processes import Child
from tests.testing.test_broken_storages import Ring
from tests.twins import through_a_file


def buffer(versions, batch_size, consumer=0, *, storage=None, seed=0, **arguments):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(max(len(versions), 1)) if storage is None else storage,
        sampler=StalenessAwareSampler(**arguments),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    if len(versions):
        rb.extend({"row": torch.arange(len(versions)), "policy_version": torch.as_tensor(versions)})
    rb.sampler.consumer_version = consumer
    return rb


def rows_of(rb):
    return rb.sample()["row"].tolist()


# ---- which rows --------------------------------------------------------------------------------------------------------


def test_draws_are_in_proportion_to_freshness():
    rb = buffer([0, 0, 1, 3, 3, 3], 1, 3)
    counts = Counter(row for _ in range(1200) for row in rows_of(rb))
    assert_proportional([counts[row] for row in range(6)], [1 / 4, 1 / 4, 1 / 3, 1, 1, 1])


def test_can_sample_says_whether_a_row_is_fresh_enough():
    rb = buffer([], 2, max_staleness=1)
    assert not rb.can_sample()
    rb.extend({"row": torch.arange(3), "policy_version": torch.tensor([0, 0, 1])})
    for consumer, fresh in [(0, True), (1, True), (2, True), (3, False)]:
        rb.sampler.consumer_version = consumer
        assert rb.can_sample() == fresh
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend({"row": torch.arange(1), "policy_version": torch.tensor([2])})
    assert rb.can_sample()
    assert rows_of(rb)
    rb = buffer([1], 2, staleness_weight_fn=torch.zeros_like)
    assert not rb.can_sample()


def test_rows_of_a_batch_are_drawn_one_after_another_without_replacement():
    weights = [1 / 4, 1 / 3, 1 / 2, 1, 1]
    rb = buffer([0, 1, 2, 3, 3], 2, 3)
    counts = Counter(tuple(rows_of(rb)) for _ in range(2500))
    pairs = list(itertools.permutations(range(5), 2))
    total = sum(weights)
    assert_proportional(
        [counts[pair] for pair in pairs], [weights[a] / total * weights[b] / (total - weights[a]) for a, b in pairs]
    )


def test_rows_that_are_rarely_drawn_fill_a_batch_as_likely_as_others_like_them():
    """Most draws would be of one row, so the others are drawn at once."""
    rb = buffer([9, 0, 0, 0], 3, 9, staleness_weight_fn=lambda s: torch.where(s == 0, 1e6, 1.0))
    batches = [rows_of(rb) for _ in range(300)]
    assert {batch[0] for batch in batches} == {0}
    assert_uniform(Counter(tuple(batch[1:]) for batch in batches).values())
    assert len({tuple(batch) for batch in batches}) == 6


def test_rows_that_are_too_stale_are_not_drawn():
    rb = buffer([0, 1, 2, 3, 4], 3, 4, max_staleness=2)
    assert {tuple(sorted(rows_of(rb))) for _ in range(20)} == {(2, 3, 4)}
    rb.sampler.max_staleness = 0
    assert rows_of(rb) == [4, 4, 4]  # a batch of more rows than there are repeats some
    rb.sampler.increment_consumer_version()
    with pytest.raises(NoSampleable, match=r"max_staleness=0.*consumer_version=5.*0\.0, 4\.0"):
        rb.sample()
    rb.sampler.max_staleness = -1
    assert len(set(rows_of(rb))) == 3


def test_staleness_is_shown():
    rb = buffer([0, 4, 7], 3, 5)
    batch, info = rb.sample(return_info=True)
    assert info["staleness"].dtype is torch.float32
    assert info["staleness"].tolist() == [5 - version for version in batch["policy_version"].tolist()]


def test_rows_newer_than_the_consumer_are_fresh():
    rb = buffer([9, 0], 1, 0)
    counts = Counter(row for _ in range(400) for row in rows_of(rb))
    assert_proportional([counts[0], counts[1]], [1, 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_versions_of_any_number(dtype, shape):
    rb = buffer(torch.tensor([1, 2, 3, 4]).to(dtype).reshape(4, *shape), 2, 4, max_staleness=1)
    assert sorted(rows_of(rb)) == [2, 3]


def test_a_version_that_is_nan_is_never_drawn():
    rb = buffer(torch.tensor([1.0, float("nan"), 1.0]), 3, 1)
    assert set(rows_of(rb)) == {0, 2}
    rb["policy_version"] = torch.tensor([float("nan"), 1.0, 1.0])
    assert set(rows_of(rb)) == {1, 2}


def test_nested_versions_of_tensordicts_with_columns():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=StalenessAwareSampler(1, version_key=("collector", "version")),
        batch_size=4,
    )
    version = torch.arange(4).expand(3, 4).contiguous()
    rb.extend(TensorDict({"x": torch.zeros(3, 4), "collector": {"version": version}}, [3, 4]))
    rb.sampler.consumer_version = 3
    batch = rb.sample()
    assert set(batch["collector", "version"].tolist()) <= {2, 3}
    assert batch["staleness"].tolist() == (3 - batch["collector", "version"]).tolist()


# ---- the version -------------------------------------------------------------------------------------------------------


def test_the_version_only_grows_until_the_store_is_emptied():
    rb = buffer([0], 1, 4)
    rb.sampler.consumer_version = 2
    assert rb.sampler.consumer_version == 4
    other = ReplayBuffer(storage=rb.storage, sampler=StalenessAwareSampler(), batch_size=1)
    other.sampler.increment_consumer_version()
    assert rb.sampler.consumer_version == 5
    rb.set_sampler(StalenessAwareSampler(index="apart"))
    assert rb.sampler.consumer_version == 0
    rb.empty()
    assert other.sampler.consumer_version == 0


def test_a_version_said_before_the_first_write_stays():
    rb = buffer([], 1, 7)
    rb.extend({"row": torch.arange(1), "policy_version": torch.tensor([3])})
    assert rb.sample(return_info=True)[1]["staleness"].tolist() == [4]


def _write_and_learn(directory):
    rb = ReplayBuffer.open(directory)
    rb.extend({"row": torch.arange(10, 14), "policy_version": torch.full((4,), 8)})
    rb[0] = {"row": torch.tensor(20), "policy_version": torch.tensor(9)}
    rb.sampler.consumer_version = 9
    rb.close()


def test_processes_see_versions_and_rows_of_each_other(tmp_path):
    rb = buffer([0] * 6, 1, 1, storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "s"), max_staleness=1)
    assert rows_of(rb)[0] < 6
    Child(_write_and_learn, tmp_path / "s").join()
    assert rb.sampler.consumer_version == 9
    assert {row for _ in range(200) for row in rows_of(rb)} == {10, 11, 13, 20}
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s")
    assert repr(rb.sampler) == "StalenessAwareSampler(max_staleness=1)"
    assert rb.sampler.consumer_version == 9
    assert rows_of(rb)[0] >= 10
    rb.close()
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True)
    assert rows_of(reader)[0] >= 10
    reader.close()


def test_a_reader_follows_writers(tmp_path):
    """Rows that are written, edited and removed after a read-only buffer was opened."""
    rb = buffer([0] * 6, 1, 1, storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "s"), max_staleness=1)
    reader = ReplayBuffer.open(tmp_path / "s", readonly=True)
    assert {row for _ in range(60) for row in rows_of(reader)} == set(range(6))
    rb.extend({"row": torch.arange(6, 11), "policy_version": torch.tensor([1, 1, 0, 1, 3])})
    rb.set_at_("policy_version", torch.tensor([-1, -1]), torch.tensor([3, 4]))
    assert rb.remove(torch.tensor([5])) == 1
    drawn = {row for _ in range(200) for row in rows_of(reader)}
    assert drawn == {8, 9, 10, 6, 7}  # of rows 0, 1 and 2, which were written over, and of 6 and 7
    reader.close()
    rb.close()


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_arguments():
    for given, error in (
        ({"max_staleness": -2}, ValueError),
        ({"max_staleness": 1.5}, TypeError),
        ({"staleness_weight_fn": 3}, TypeError),
        ({"version_key": 1.5}, TypeError),
        ({"index": "a/b"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(given))):
            StalenessAwareSampler(**given)
    sampler = StalenessAwareSampler()
    with pytest.raises(TypeError, match="consumer_version"):
        sampler.consumer_version = 1.5
    with pytest.raises(ValueError, match="max_staleness"):
        sampler.max_staleness = -5


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda s: -s - 1, ValueError),
        (lambda s: s / 0, ValueError),
        (lambda s: s[:1], ValueError),
        (lambda s: 1.0, TypeError),
        (lambda s: s * 0, NoSampleable),
    ],
)
def test_bad_weights(function, error):
    with pytest.raises(error):
        buffer([0, 1], 1, 1, staleness_weight_fn=function).sample()


def test_rows_without_a_version():
    rb = buffer([0, 1], 1, version_key="made_by")
    with pytest.raises(KeyError, match="made_by"):
        rb.sample()
    rb = buffer(torch.zeros(2, 3), 1)
    with pytest.raises(TypeError, match=r"version_key: 'policy_version': expected one real number per row.*\[3\]"):
        rb.sample()
    rb = ReplayBuffer(storage=ListStorage(5), sampler=StalenessAwareSampler(), batch_size=1)
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.add({"policy_version": torch.tensor(0)})
    with pytest.raises(TypeError, match="ListStorage"):
        rb.sample()


def test_an_empty_buffer():
    with pytest.raises(NoSampleable):
        buffer([], 1).sample()


# ---- where the rows are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [There, Ring], ids=["accelerator", "own"])
def test_rows_on_an_accelerator_or_in_a_storage_of_ones_own(kind):
    rb = buffer([0, 0, 1, 3, 3, 3], 1, 3, storage=kind(6))
    counts = Counter(row for _ in range(600) for row in rows_of(rb))
    assert_proportional([counts[row] for row in range(6)], [1 / 4, 1 / 4, 1 / 3, 1, 1, 1])
    rb.sampler.max_staleness = 0
    rb.set_at_("policy_version", torch.tensor([3, 2]), torch.tensor([0, 5]))
    assert {row for _ in range(100) for row in rows_of(rb)} == {0, 3, 4}
    rb.extend({"row": torch.arange(6, 9), "policy_version": torch.tensor([3, 0, 3])})  # over the first three
    assert {row for _ in range(100) for row in rows_of(rb)} == {6, 8, 3, 4}


# ---- states ------------------------------------------------------------------------------------------------------------


def test_a_saved_state_sets_the_version(tmp_path):
    rb = buffer([0, 1, 2, 3], 2, 3, max_staleness=2)
    state = through_a_file(rb.state_dict())
    expected = [rows_of(rb) for _ in range(5)]
    other = buffer([0, 1, 2, 3], 2, 9, seed=5)
    other.load_state_dict(state)
    assert (other.sampler.consumer_version, other.sampler.max_staleness) == (3, 2)
    assert [rows_of(other) for _ in range(5)] == expected
    for wrong, error in (
        ({"max_staleness": -2}, ValueError),
        ({"consumer_version": "1"}, TypeError),
        ({"x": 1}, KeyError),
    ):
        with pytest.raises(error):
            other.sampler.load_state_dict({**state["_sampler"], **wrong})
    assert other.sampler.consumer_version == 3


def test_a_function_is_no_recipe(tmp_path):
    rb = buffer([0], 1, storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "s"), staleness_weight_fn=torch.exp)
    rb.close()
    with pytest.raises(TypeError, match="sampler=…"):
        ReplayBuffer.open(tmp_path / "s")
    ReplayBuffer.open(tmp_path / "s", sampler=StalenessAwareSampler()).close()


# ---- against a model ---------------------------------------------------------------------------------------------------


def version_of(step):
    return (step.episode + step.step) % 5


class Versions(StoreMachine):
    """Which rows may be drawn follows from what they hold."""

    def make_sampler(self, draw):
        self.consumer = 0
        return StalenessAwareSampler(draw(st.integers(-1, 3)))

    @staticmethod
    def data(steps):
        data = StoreMachine.data(steps)
        data["policy_version"] = torch.tensor([[version_of(step)] for step in steps])
        return data

    def emptied(self):
        self.consumer = 0

    @rule(version=st.integers(-1, 6))
    def learn(self, version):
        self.rb.sampler.consumer_version = version
        self.consumer = max(self.consumer, version)
        assert self.rb.sampler.consumer_version == self.consumer

    @rule(ns=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def draw(self, ns):
        for n in ns:
            most = self.rb.sampler.max_staleness
            stale = {row: self.consumer - version_of(step) for row, step in self.rings.live().items()}
            drawable = {row for row, s in stale.items() if most < 0 or s <= most}
            if not drawable:
                with pytest.raises(NoSampleable):
                    self.rb.sample(n)
                continue
            rows, info = self.drawn(n)
            assert set(rows) <= drawable
            assert len(set(rows)) == n or n > len(drawable)
            assert info["staleness"].tolist() == [stale[row] for row in rows]


TestVersions = pytest.mark.filterwarnings("ignore:sample. batch_size")(Versions.TestCase)
TestVersions.settings = settings(SETTINGS, max_examples=stress.size(20, 2_000))
stressed(TestVersions)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_have_versions_of_their_own(how):
    rb = buffer([0, 1, 2], 2, 2)
    other = how(rb)
    other.sampler.consumer_version = 5
    assert (rb.sampler.consumer_version, other.sampler.consumer_version) == (2, 5)


# ---- rows that are ready -----------------------------------------------------------------------------------------------


def rewarded(folder, sampler):
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder), sampler=sampler, batch_size=40)
    rewards = torch.tensor([0.5, torch.nan, 1.0, torch.nan])
    rb.extend(
        {
            "row": torch.arange(4),
            "policy_version": torch.zeros(4),
            "next": {"reward": rewards},
            "done": rewards[[0, 0, 1, 1]],
        }
    )
    return rb


@pytest.mark.parametrize("how", ["argument", "before the first write", "set again"])
def test_what_is_to_be_ready_is_noted(tmp_path, how):
    ready = ["done", ("next", "reward")]
    sampler = StalenessAwareSampler(3, ready=ready) if how == "argument" else StalenessAwareSampler(3)
    if how == "before the first write":
        sampler.require(ready)
    rb = rewarded(tmp_path / "s", sampler)
    if how == "set again":
        assert {*rows_of(rb)} == {0, 1, 2, 3}
        sampler.require(ready)
        rb.set_sampler(sampler)
    assert {*rows_of(rb)} == {0}
    rb.close()
    for readonly in (False, True):
        again = ReplayBuffer.open(tmp_path / "s", readonly=readonly)
        assert (again.sampler.ready, again.sampler.max_staleness) == (("done", ("next", "reward")), 3)
        assert repr(again.sampler) == "StalenessAwareSampler(max_staleness=3, ready=['done', ('next', 'reward')])"
        assert {*rows_of(again)} == {0}
        again.close()


def test_less_is_to_be_ready_later(tmp_path):
    rb = rewarded(tmp_path / "s", StalenessAwareSampler(ready=["done"]))
    assert {*rows_of(rb)} == {0, 1}
    state = rb.sampler.state_dict()
    assert state == {"consumer_version": 0, "max_staleness": -1}
    rb.sampler.require(())
    rb.sampler.load_state_dict(state)  # which does not say it
    assert {*rows_of(rb)} == {0, 1, 2, 3}
    rb.close()


def test_a_filtered_sampler_takes_it_over(tmp_path):
    """Alone, and in place of what the one inside says."""
    rb = rewarded(tmp_path / "a", FilteredSampler(StalenessAwareSampler(ready=["done"]), max_uses=1))
    assert rb.sampler.ready == ("done",)
    assert len(rb) == 2
    assert sorted(rows_of(rb)) == [0, 1]
    rb.close()
    again = ReplayBuffer.open(tmp_path / "a")
    assert (again.sampler.ready, again.sampler.sampler.ready, again.can_sample()) == (("done",), ("done",), False)
    again.close()
    inner = StalenessAwareSampler(ready=["done"])
    rb = rewarded(tmp_path / "b", FilteredSampler(inner, ready=[("next", "reward")]))
    assert (inner.ready, {*rows_of(rb)}) == ((("next", "reward"),), {0, 2})
    rb.close()


@pytest.mark.parametrize(
    ("ready", "error", "why"),
    [
        ("reward", TypeError, "ready: expected a sequence of fields, such as"),
        (3, TypeError, "ready: expected a sequence of fields, such as"),
        ([2.5], TypeError, "ready"),
        ([f"f{n}" for n in range(17)], ValueError, "expected at most 16 fields, got 17"),
    ],
)
def test_what_cannot_be_ready_is_refused_and_changes_nothing(ready, error, why):
    sampler = StalenessAwareSampler(ready=["done"])
    for call in (lambda: sampler.require(ready), lambda: StalenessAwareSampler(ready=ready)):
        with pytest.raises(error, match=why):
            call()
    assert sampler.ready == ("done",)
