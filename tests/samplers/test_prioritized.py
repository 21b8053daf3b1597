"""Draws by priority, against arrays and formulas that share nothing with the tree."""

import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import TensorDict

import engram
from engram import (
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RowError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.samplers.prioritized import ALPHA, BETA, EPS, kinds, leaves, made
from tests.statistics_of import assert_proportional

# ---- the distribution ------------------------------------------------------------------------------------------------


@kinds
def test_rows_are_drawn_in_proportion_and_weighed_by_the_formula(storage):
    rb = made(storage, batch_size=5000)
    priority = torch.tensor([0.0, 1.0, 2.0, 0.5, 7.0, 0.1, 3.0, 3.0, 0.01, 1.5], dtype=torch.float64)
    rb.update_priority(torch.arange(10), priority)
    leaf = (priority + EPS) ** ALPHA
    drawn, weight = [], []
    for _ in range(40):
        rows, info = rb.sample(return_info=True)
        assert torch.equal(rows, info["index"])
        drawn.append(rows)
        weight.append(info["priority_weight"])
    drawn, weight = torch.cat(drawn), torch.cat(weight)
    counts = torch.bincount(drawn, minlength=10).double()
    assert_proportional(counts, leaf)
    by_formula = (10 * leaf / leaf.sum()) ** -BETA
    by_formula /= by_formula.max()
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight.double(), by_formula[drawn], rtol=1e-6, atol=0)


def test_the_distribution_after_inserts_updates_and_overwrites():
    rb = made(capacity=50, rows=0, batch_size=50_000, alpha=1.0, eps=0.0)
    generator = np.random.default_rng(3)
    model, highest, at = np.zeros(50), 0.0, 0
    for _ in range(60):
        n = int(generator.integers(1, 30))
        rb.extend(torch.arange(n))
        for _ in range(n):
            model[at % 50] = highest or 1.0
            at += 1
        rows = generator.integers(0, min(at, 50), size=20)
        priority = generator.random(20) * 5
        rb.update_priority(torch.from_numpy(rows), torch.from_numpy(priority))
        model[rows] = priority  # of duplicates numpy keeps the last, too
        highest = max(highest, priority.max())
    np.testing.assert_allclose(leaves(rb).numpy(), model, rtol=1e-12)
    index = torch.cat([rb.sample(return_info=True)[1]["index"] for _ in range(20)])
    assert_proportional(np.bincount(index, minlength=50), model)


def test_draws_follow_from_the_generator():
    def draws(seed, **arguments):
        rb = made()
        rb.update_priority(torch.arange(10), torch.arange(10.0))
        if arguments:
            rb.set_rng(torch.Generator().manual_seed(seed))
        else:
            torch.manual_seed(seed)
        return [rb.sample().tolist() for _ in range(3)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(1, own=True) == draws(1, own=True) != draws(2, own=True)


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_alpha():
    priority = torch.tensor([1.0, 4.0], dtype=torch.float64)
    for alpha in (0.0, 0.5, 1.0, 2.0):
        rb = made(capacity=2, rows=2, alpha=alpha, eps=0.0)
        rb.update_priority(torch.arange(2), priority)
        torch.testing.assert_close(leaves(rb), priority**alpha)
    rb = made(capacity=2, rows=2, alpha=0.5, eps=0.0)
    rb.update_priority(torch.arange(2), priority)
    rb.sampler.alpha = 1.0
    assert rb.sampler.alpha == 1.0
    torch.testing.assert_close(leaves(rb), priority)


def test_alpha_from_zero_warns():
    rb = made(capacity=2, rows=2, alpha=0.0)
    with pytest.warns(UserWarning, match="stay so until they are updated"):
        rb.sampler.alpha = 0.6
    assert leaves(rb).tolist() == [1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.sampler.alpha = 0.0


def test_beta():
    rb = made(capacity=2, rows=2, alpha=1.0, eps=0.0)
    rb.update_priority(torch.arange(2), torch.tensor([1.0, 4.0]))
    for beta, expected in ((0.0, 1.0), (0.5, 0.5), (1.0, 0.25)):
        rb.sampler.beta = beta
        assert rb.sampler.beta == beta
        rows, info = rb.sample(return_info=True)
        assert info["priority_weight"][rows == 1].unique().tolist() == [expected]
        assert info["priority_weight"][rows == 0].unique().tolist() == [1.0]


def test_eps():
    assert leaves(made(capacity=1, rows=1, alpha=1.0, eps=0.25)).tolist() == [1.25]
    assert made(eps=0.25).sampler.eps == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_dtype(dtype):
    _, info = made(dtype=dtype).sample(return_info=True)
    assert info["priority_weight"].dtype is dtype


@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", 4.0), ("min", 1.0), ("mean", 7 / 3), ("median", 2.0), ("sum", 7.0)]
)
def test_reduction(reduction, expected):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, reduction=reduction, storage=LazyTensorStorage(4), batch_size=4
    )
    priority = torch.tensor([[1.0, 2.0, 4.0]]).expand(4, 3)
    rb.extend(TensorDict({"a": torch.arange(4), "td_error": priority}, [4]))
    torch.testing.assert_close(leaves(rb), torch.full((4,), expected, dtype=torch.float64))
    rb.update_priority(torch.arange(4), 9.0)
    batch = rb.sample()
    batch["td_error"] = priority
    rb.update_tensordict_priority(batch)
    torch.testing.assert_close(leaves(rb)[batch["index"]], torch.full((4,), expected, dtype=torch.float64))
    rb.add(TensorDict({"a": torch.tensor(1), "td_error": priority[0]}, []))
    torch.testing.assert_close(leaves(rb)[0], torch.tensor(expected, dtype=torch.float64))


def test_new_rows_get_the_largest_priority_there_ever_was():
    rb = made(capacity=4, rows=2, alpha=1.0, eps=0.0)
    assert leaves(rb).tolist() == [1, 1, 0, 0]
    rb.update_priority(0, 0.25)
    assert rb.sampler.default_priority == 0.25
    rb.update_priority(0, 7.0)
    rb.update_priority(0, 0.5)
    assert rb.sampler.default_priority == 7.0
    rb.extend(torch.arange(2))
    assert leaves(rb).tolist() == [0.5, 1, 7, 7]


def test_or_the_largest_that_is_live():
    rb = made(capacity=4, rows=4, alpha=0.5, eps=0.0, max_priority_within_buffer=True)
    rb.update_priority(torch.arange(4), torch.tensor([9.0, 4.0, 1.0, 1.0]))
    rb.update_priority(0, 2.0)
    assert rb.sampler.default_priority == pytest.approx(4.0)
    rb.add(torch.tensor(0))  # over row 0
    torch.testing.assert_close(leaves(rb), torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    assert rb.sampler.max_priority_within_buffer


def test_two_indexes_over_one_copy_of_the_rows():
    storage = LazyTensorStorage(4)
    critic = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(4, 1.0, 1.0, 0.0, index="critic"), batch_size=50)
    model = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(4, 1.0, 1.0, 0.0, index="model"), batch_size=50)
    same = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(4, 1.0, 1.0, 0.0, index="model"), batch_size=50)
    critic.extend(torch.arange(4))
    critic.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 0.0, 1.0]))
    model.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert set(critic.sample().tolist()) == {3}
    assert set(model.sample().tolist()) == {0} == set(same.sample().tolist())
    ReplayBuffer(storage=storage).add(torch.tensor(8))  # a write through any buffer keeps all of them
    assert leaves(critic).tolist() == [1, 0, 0, 1]
    assert leaves(model).tolist() == [1, 0, 0, 0]
    with pytest.raises(IncompatibleStore, match=r"index 'model': expected eps=0\.0 .* got eps=0\.5"):
        ReplayBuffer(storage=storage, sampler=PrioritizedSampler(4, 1.0, 1.0, 0.5, index="model"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"alpha": -1.0}, ValueError, "alpha: expected a finite number of at least 0, got -1"),
        ({"beta": -1.0}, ValueError, "beta"),
        ({"beta": float("nan")}, ValueError, "beta"),
        ({"eps": float("inf")}, ValueError, "eps"),
        ({"reduction": "prod"}, NotImplementedError, "reduction: expected one of"),
        ({"dtype": torch.int64}, TypeError, "floating point"),
        ({"index": "a/b"}, ValueError, "index: expected a name"),
        ({"index": ""}, ValueError, "index: expected a name"),
        ({"index": "x" * 65}, ValueError, "index: expected a name"),
        ({"capacity": 0}, ValueError, "max_capacity: expected at least 1"),
        ({"capacity": 2.0}, TypeError, "max_capacity: expected an int"),
    ],
)
def test_refused_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        PrioritizedSampler(arguments.pop("capacity", 10), **{"alpha": ALPHA, "beta": BETA, **arguments})


def test_settings_that_cannot_be_changed_to():
    rb = made()
    for name in ("alpha", "beta"):
        with pytest.raises(ValueError, match=name):
            setattr(rb.sampler, name, -0.1)
    rb.update_priority(0, 1e200)
    before = leaves(rb)
    with pytest.raises(ValueError, match="too large"):
        rb.sampler.alpha = 2.0
    assert torch.equal(leaves(rb), before)
    assert rb.sampler.alpha == ALPHA


def test_a_storage_larger_than_the_sampler():
    with pytest.raises(ValueError, match="max_capacity: expected at least the storage's 10 rows, got 9"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(9, ALPHA, BETA))
    rb = ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(3, ALPHA, BETA), collate_fn=list)
    rb.extend(list(range(5)))
    assert len(rb) == 3  # a list without a bound of its own has the sampler's


@pytest.mark.parametrize("listed", [False, True])
def test_the_storage_knows_how_many_rows(listed):
    storage = ListStorage(10) if listed else LazyTensorStorage(10)
    rb = ReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(alpha=1.0, beta=1.0), collate_fn=list if listed else None
    )
    assert rb.sampler.max_size == 10
    rb.update_priority(rb.extend(torch.arange(10)), torch.arange(10.0))
    rb.update_priority([0, 9], [100.0, 0.0])
    with pytest.raises(RowError):
        rb.update_priority([10], [1.0])
    assert 0 in [int(x) for x in rb.sample(100)]
    assert 9 not in [int(x) for x in rb.sample(100)]
    twin = pickle.loads(pickle.dumps(rb))
    twin.load_state_dict(rb.state_dict())
    assert 0 in [int(x) for x in twin.sample(100)]


def test_a_list_without_a_bound_needs_a_number():
    with pytest.raises(ValueError, match="max_capacity: expected a number of rows, as the storage has no bound"):
        ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    for given in ({}, {"alpha": 1.0}, {"beta": 1.0}):
        with pytest.raises(TypeError, match="PrioritizedSampler: expected alpha and beta"):
            PrioritizedSampler(**given)


def test_a_directory_keeps_a_sampler_without_a_number(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "a"),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0),
        batch_size=50,
    )
    rb.update_priority(rb.extend(torch.arange(10)), torch.tensor([1.0] + [0.0] * 9))
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "a")
    assert rb.sample().tolist() == [0] * 50
    assert rb.sampler.max_size == 10


# ---- against a model -------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A buffer of ids with priorities, and the same as a dict."""

    @initialize(capacity=st.integers(1, 9), alpha=st.sampled_from([0.0, 0.5, 1.0]), listed=st.booleans())
    def begin(self, capacity, alpha, listed):
        self.capacity, self.alpha, self.listed = capacity, alpha, listed
        storage = ListStorage(capacity) if listed else LazyTensorStorage(capacity)
        self.rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(capacity, alpha, 1.0, EPS), batch_size=16)
        self.model, self.ids, self.highest, self.cursor, self.next_id = {}, {}, 0.0, 0, 0
        self.drawn = None

    @rule(n=st.integers(1, 12))
    def extend(self, n):
        ids = torch.arange(self.next_id, self.next_id + n)
        self.rb.extend(list(ids) if self.listed else ids)
        for one in ids.tolist():
            row = self.cursor % self.capacity
            self.model[row], self.ids[row] = self.highest or 1.0, one
            self.cursor += 1
        self.next_id += n

    @rule(data=st.data())
    def update(self, data):
        if not self.model:
            return
        n = data.draw(st.integers(1, 6))
        rows = [data.draw(st.integers(-1, self.capacity - 1)) for _ in range(n)]
        values = [data.draw(st.sampled_from([0.0, 0.25, 1.0, 8.0])) for _ in range(n)]
        self.rb.update_priority(torch.tensor(rows), torch.tensor(values))
        for row, value in zip(rows, values, strict=True):
            if row in self.model:
                self.model[row] = value
                self.highest = max(self.highest, value)

    @rule()
    def draw(self):
        if self.model:
            rows, info = self.rb.sample(return_info=True)
            assert [self.ids[row] for row in info["index"].tolist()] == rows.tolist()
            self.drawn = (rows, info)

    @rule(value=st.sampled_from([0.5, 2.0]))
    def late_update(self, value):
        if self.drawn is None or not self.model:
            return
        rows, info = self.drawn
        self.rb.update_priority(info["index"], value, generation=info["index_generation"])
        for one, row in zip(rows.tolist(), info["index"].tolist(), strict=True):
            if self.ids.get(row) == one:
                self.model[row] = value
                self.highest = max(self.highest, value)

    @rule()
    def empty(self):
        self.rb.empty()
        self.model, self.ids, self.highest, self.cursor = {}, {}, 0.0, 0

    @invariant()
    def leaves_are_the_models(self):
        if not hasattr(self, "rb") or self.rb.sampler._attached() is None:
            return
        wanted = torch.zeros(self.capacity, dtype=torch.float64)
        for row, priority in self.model.items():
            wanted[row] = (priority + EPS) ** self.alpha
        torch.testing.assert_close(leaves(self.rb), wanted, rtol=1e-6, atol=0)


TestAgainstAModel = Machine.TestCase
TestAgainstAModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def test_the_list_is_public():
    assert engram.PrioritizedSampler is PrioritizedSampler


@pytest.mark.parametrize("windows", [False, True])
def test_a_sampler_that_serves_two_storages_keeps_their_priorities_apart(windows):
    if windows:
        sampler = engram.PrioritizedSliceSampler(10, 1.0, 1.0, eps=0.0, slice_len=1)
    else:
        sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0)
    one, other = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=8) for _ in range(2)
    )
    for rb in (one, other):
        rb.extend(TensorDict({"episode": torch.zeros(10), "td_error": torch.zeros(10), "x": torch.arange(10)}, [10]))
    one.update_priority(3, 1.0)
    other.update_priority(7, 1.0)
    for _ in range(2):
        assert set(one.sample()["x"].tolist()) == {3}
        assert set(other.sample()["x"].tolist()) == {7}
    one.update_tensordict_priority(TensorDict({"index": torch.tensor([3, 5]), "td_error": torch.tensor([0.0, 1])}, [2]))
    assert set(one.sample()["x"].tolist()) == {5}
    other.mark_update(torch.tensor([7]))
    other.add(TensorDict({"episode": torch.tensor(0.0), "td_error": torch.tensor(0.0), "x": torch.tensor(11)}))
    assert set(other.sample()["x"].tolist()) == {7}
    assert set(one.sample()["x"].tolist()) == {5}


def test_an_index_is_not_seen_before_it_knows_all_rows(monkeypatch):
    """Another thread that asks while it is made waits, and a state is of all rows."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 1.0, 1.0))
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    store = rb.storage.store
    scan, begun, go_on = type(store.indexes).scan, threading.Event(), threading.Event()

    def late(self, index, kind):
        begun.set()
        assert go_on.wait(60)
        scan(self, index, kind)

    monkeypatch.setattr(type(store.indexes), "scan", late)
    other = PrioritizedSampler(10, 1.0, 1.0, index="other")
    maker = threading.Thread(target=rb.set_sampler, args=(other,))
    maker.start()
    assert begun.wait(60)
    assert ("other", "priorities") not in store.indexes.refreshed()
    asked = threading.Thread(target=lambda: found.append(other.priorities().leaves(10)))
    found = []
    asked.start()
    asked.join(0.2)
    assert not found
    go_on.set()
    maker.join()
    asked.join()
    assert (found[0] > 0).all()
