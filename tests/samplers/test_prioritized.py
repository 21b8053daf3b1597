"""Draws by priority, against arrays and formulas that share nothing with the tree."""

import copy
import pickle
import struct
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
    CorruptStore,
    IncompatibleCheckpoint,
    IncompatibleStore,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    RowError,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    _progress,
)
from tests import fresh
from tests.statistics_of import assert_proportional

ALPHA, BETA, EPS = 0.7, 0.5, 1e-3


def made(storage=LazyTensorStorage, capacity=10, rows=10, batch_size=64, **settings_):
    arguments = {"alpha": ALPHA, "beta": BETA, "eps": EPS, **settings_}
    sampler = PrioritizedSampler(capacity, **arguments)
    rb = ReplayBuffer(storage=storage(capacity), sampler=sampler, batch_size=batch_size)
    if rows:
        rb.extend(list(torch.arange(rows)) if storage is ListStorage else torch.arange(rows))
    return rb


def leaves(rb):
    return rb.sampler.state_dict()["leaves"]


kinds = pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])


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


# ---- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1e-9, 1e308])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@kinds
def test_a_bad_priority_changes_nothing(storage, bad, dtype):
    if dtype is torch.float32 and bad == 1e308:
        pytest.skip("infinite in single precision")
    rb = made(storage, alpha=1.0)
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    before, default = leaves(rb), rb.sampler.default_priority
    values = torch.tensor([5.0, bad, 6.0], dtype=dtype)
    with pytest.raises(PriorityError, match="position 1"):
        rb.update_priority(torch.tensor([1, 2, 3]), values)
    with pytest.raises(ValueError, match="update_priority"):
        rb.update_priority(1, bad)
    assert torch.equal(leaves(rb), before)
    assert rb.sampler.default_priority == default


@kinds
def test_a_row_outside_changes_nothing(storage):
    rb = made(storage)
    before = leaves(rb)
    for row in (10, -2, 1 << 40):
        with pytest.raises(RowError, match="outside"):
            rb.update_priority(torch.tensor([1, row]), torch.tensor([5.0, 5.0]))
        with pytest.raises(RowError, match="outside"):
            rb.mark_update(torch.tensor([1, row]))
    assert torch.equal(leaves(rb), before)


@pytest.mark.parametrize(
    ("index", "priority", "expected"),
    [
        (3, 5.0, {3: 5.0}),
        (torch.tensor(3), torch.tensor(5.0), {3: 5.0}),
        (np.array([3, 4]), np.array([5.0, 6.0]), {3: 5.0, 4: 6.0}),
        ([3, 4], [5.0, 6.0], {3: 5.0, 4: 6.0}),
        ((torch.tensor([3, 4]),), torch.tensor([5.0, 6.0]), {3: 5.0, 4: 6.0}),
        (torch.tensor([3, -1, 4]), torch.tensor([5.0, 9.0, 6.0]), {3: 5.0, 4: 6.0}),
        (torch.tensor([3, 4, 3]), torch.tensor([5.0, 6.0, 7.0]), {3: 7.0, 4: 6.0}),
        (torch.tensor([3, 4]), 2.0, {3: 2.0, 4: 2.0}),
        (torch.tensor([3, 4], dtype=torch.int32), torch.tensor([5, 6]), {3: 5.0, 4: 6.0}),
        (torch.arange(8)[::2], torch.arange(8.0)[::2], {0: 0.0, 2: 2.0, 4: 4.0, 6: 6.0}),
        (torch.tensor([3, 4]), torch.tensor([[5.0], [6.0]], requires_grad=True), {3: 5.0, 4: 6.0}),
        (torch.tensor([], dtype=torch.int64), torch.tensor([]), {}),
    ],
)
def test_forms_of_index_and_priority(index, priority, expected):
    rb = made(alpha=1.0, eps=0.0)
    rb.update_priority(index, priority)
    wanted = torch.ones(10, dtype=torch.float64)
    for row, value in expected.items():
        wanted[row] = value
    assert torch.equal(leaves(rb), wanted)


@pytest.mark.parametrize(
    ("index", "priority", "error"),
    [
        (torch.tensor([1, 2]), torch.ones(3), RuntimeError),
        (torch.tensor([1.0]), torch.ones(1), TypeError),
        (torch.tensor([True]), torch.ones(1), TypeError),
        ((torch.tensor([1]), torch.tensor([1])), torch.ones(1), TypeError),
    ],
)
def test_refused_updates(index, priority, error):
    rb = made()
    before = leaves(rb)
    with pytest.raises(error):
        rb.update_priority(index, priority)
    assert torch.equal(leaves(rb), before)


@kinds
def test_updates_of_rows_rewritten_since_are_dropped_and_counted(storage):
    rb = made(storage, alpha=1.0, eps=0.0)
    info = rb.sample(return_info=True)[1]
    rb.extend(list(torch.arange(4)) if storage is ListStorage else torch.arange(4))  # over rows 0 to 3
    rb.update_priority(info["index"], torch.full((64,), 3.0), generation=info["index_generation"])
    drawn = set(info["index"].tolist())
    assert leaves(rb).tolist() == [3.0 if row > 3 and row in drawn else 1.0 for row in range(10)]
    assert rb.stats()["priority_updates_dropped"] == int((info["index"] <= 3).sum()) > 0
    rb.update_priority(torch.arange(4), 2.0)  # without a generation: the rows as they are
    assert leaves(rb)[:4].tolist() == [2.0] * 4


def test_an_edit_keeps_the_priority_and_makes_updates_of_what_was_drawn_stale():
    rb = made(alpha=1.0, eps=0.0)
    rb.update_priority(3, 5.0)
    info = rb.sample(return_info=True)[1]
    rb[3] = torch.tensor(33)
    assert leaves(rb)[3] == 5.0
    rb.update_priority(info["index"], 2.0, generation=info["index_generation"])
    assert leaves(rb)[3] == 5.0


def test_the_td_buffer_takes_generations_from_the_batch():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8), batch_size=64)
    rb.extend(TensorDict({"a": torch.arange(8)}, [8]))
    batch = rb.sample()
    assert set(batch.keys()) == {"a", "index", "index_generation", "priority_weight"}
    assert torch.equal(batch["a"], batch["index"])
    batch["td_error"] = torch.full((64,), 4.0)
    rb.extend(TensorDict({"a": torch.arange(8)}, [8]))
    rb.update_tensordict_priority(batch)
    assert leaves(rb).tolist() == [1.0] * 8
    assert rb.stats()["priority_updates_dropped"] == 64
    with pytest.raises(KeyError, match="td_error"):
        rb.update_tensordict_priority(rb.sample())


def test_written_rows_bring_their_priority_along():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, priority_key="p", storage=LazyTensorStorage(8), batch_size=8
    )
    data = TensorDict({"a": torch.arange(3), "p": torch.tensor([[1.0], [2.0], [3.0]])}, [3])
    rb.extend(data.exclude("p"))
    assert leaves(rb)[:3].tolist() == [1, 1, 1]
    rb.empty()
    rb.extend(data)
    assert leaves(rb)[:3].tolist() == [1, 2, 3]
    assert "p" not in rb.sample().keys()  # the first row had none, so it is not stored
    rb.extend(data, update_priority=False)
    assert leaves(rb)[3:6].tolist() == [3, 3, 3]
    rb.add(data[1])
    assert leaves(rb)[6] == 2
    rb.add(TensorDict({"a": torch.tensor(1)}, []))  # without: the default
    assert leaves(rb)[7] == 3


def test_a_rejected_row_brings_no_priority():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        eps=0.0,
        priority_key="p",
        storage=LazyTensorStorage(2),
        writer=TensorDictMaxValueWriter(rank_key="a"),
    )
    rb.extend(TensorDict({"a": torch.tensor([3.0, 2.0])}, [2]))
    assert rb.add(TensorDict({"a": torch.tensor(1.0), "p": torch.tensor(9.0)}, [])) is None
    assert leaves(rb).tolist() == [1.0, 1.0]
    assert rb.add(TensorDict({"a": torch.tensor(4.0), "p": torch.tensor(9.0)}, [])) == 1
    assert leaves(rb).tolist() == [1.0, 9.0]


# ---- priorities that come along and are refused -----------------------------------------------------------------------

BAD = [float("nan"), float("inf"), -float("inf"), -1.0, 1e308]


def along(storage, filled=2, alpha=2.0, **kwargs):
    """A buffer of TensorDicts whose rows bring priorities along under "p", and how to see all that a write would change."""
    sampler = PrioritizedSampler(6, alpha=alpha, beta=1.0, eps=0.0)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, priority_key="p", **kwargs)
    if filled:
        rb.extend(steps(*[1.0] * filled).exclude("p"), lane=0)

    def state():
        if not rb.storage.initialized:
            return None
        return [
            len(rb),
            rb.write_count,
            rb.storage.settled(),
            leaves(rb).tolist(),
            sampler.default_priority,
            rb.stats(),
        ]

    return rb, state


def steps(*priorities, dtype=torch.float64):
    priorities = torch.tensor(priorities, dtype=dtype)
    return TensorDict({"a": torch.arange(float(len(priorities))), "p": priorities}, [len(priorities)])


@kinds
@pytest.mark.parametrize("filled", [0, 2])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_priority_that_comes_along_writes_nothing(storage, filled, bad, dtype):
    rb, state = along(storage(6), filled)
    before = state()
    data = steps(1.0, bad, 2.0, dtype=dtype)
    for write in (lambda: rb.extend(data), lambda: rb.extend(data, lane=0), lambda: rb.add(data[1])):
        with pytest.raises(PriorityError, match="update_priority: expected finite priorities of at least 0"):
            write()
        assert state() == before
    if storage is not ListStorage:
        assert rb.storage.initialized == bool(filled)
    assert len(rb.extend(data, update_priority=False)) == 3  # nobody looks at them
    assert leaves(rb)[filled : filled + 3].tolist() == [1, 1, 1]
    rb.set_sampler(RandomSampler())
    assert len(rb.extend(data)) == 3


@kinds
def test_another_number_of_priorities_than_of_rows_writes_nothing(storage):
    rb, state = along(storage(6))
    data = steps(1.0, 2.0)
    data["p"] = torch.ones(2, 1)  # one per row: reduced
    rb.extend(data)
    before = state()
    one_of_two = TensorDict({"a": torch.arange(2.0)}, [2])
    one_of_two._tensordict["p"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="one priority per row, 2, got"):
        rb.extend(one_of_two)
    assert state() == before


@pytest.mark.parametrize("lane", [1, torch.tensor([1, 0, 1])])
def test_a_bad_priority_that_comes_along_to_lanes(lane):
    rb, state = along(LazyTensorStorage(6, lanes=2))
    before = state()
    with pytest.raises(PriorityError, match="position 2"):
        rb.extend(steps(1.0, 3.0, -2.0), lane=lane)
    assert state() == before
    with pytest.raises(PriorityError):
        rb.add(steps(-2.0)[0], lane=1)
    assert state() == before
    rb.extend(steps(1.0, 3.0, 2.0), lane=lane)
    assert len(rb) == 5


def test_a_bad_priority_of_a_slot_of_columns():
    rb, state = along(LazyTensorStorage(6, ndim=2), filled=0)
    good = TensorDict({"a": torch.zeros(2, 1), "p": torch.tensor([[3.0], [4.0]])}, [2, 1])
    rb.extend(good)
    before = state()
    for priorities in ([[3.0], [-4.0]], [[float("nan")], [1.0]]):
        bad = good.clone().set("p", torch.tensor(priorities))
        with pytest.raises(PriorityError):
            rb.extend(bad)
        with pytest.raises(PriorityError):
            rb.add(bad[:, 0])
        assert state() == before
    rb.add(good[:, 0])
    assert leaves(rb).tolist() == [9, 16, 9, 16, 0, 0]


def test_a_bad_priority_of_a_row_that_would_be_rejected():
    rb, state = along(LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="a"))
    before = state()
    row = TensorDict({"a": torch.tensor(-1.0), "p": torch.tensor(-2.0)}, [])
    with pytest.raises(PriorityError):
        rb.add(row)
    data = TensorDict({"a": torch.tensor([-1.0, 9.0]), "p": torch.tensor([-2.0, 1.0])}, [2])
    with pytest.raises(PriorityError, match="position 0"):
        rb.extend(data)
    assert state() == before


def test_priorities_are_counted_after_a_write_transform():
    class Doubled(torch.nn.Module):
        def forward(self, data):
            return data

        def inv(self, data):
            return torch.cat([data, data]) if data["a"].max() > 0 else data[:0]

    rb, state = along(LazyTensorStorage(6), filled=0, transform=Doubled())
    with pytest.raises(RuntimeError, match="one priority per row, 4, got"):
        rb.extend(steps(1.0, 2.0))
    with pytest.raises(RuntimeError, match="one priority per row, 2, got"):
        rb.add(steps(1.0, 2.0)[1])
    assert state() is None
    assert len(rb.extend(steps(-1.0))) == 0  # held back: nobody looks at it


def test_a_sampler_of_ones_own_may_take_priorities_unchecked():
    class Own:
        prioritized = True

        def __init__(self):
            self.heard = []

        def draw(self, extent, batch_size, key):
            raise NotImplementedError

        def observe(self, write, data):
            pass

        def update_priority(self, index, priority, *, generation=None):
            self.heard.append((index, priority.tolist()))

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=Own(), priority_key="p")
    rb.add(steps(-1.0)[0])
    assert rb.sampler.heard == [(0, [[-1.0]])]


@kinds
def test_mark_update(storage):
    rb = made(storage, alpha=1.0, eps=0.0)
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    rb.mark_update(torch.tensor([1, 2, -1]))
    assert leaves(rb).tolist() == [0, 9, 9, 3, 4, 5, 6, 7, 8, 9]


@kinds
def test_empty_forgets_priorities(storage):
    rb = made(storage, alpha=1.0, eps=0.0)
    rb.update_priority(torch.arange(10), 5.0)
    rb.empty()
    assert leaves(rb).sum() == 0
    assert rb.sampler.default_priority == 1.0
    with pytest.raises(NoSampleable):
        rb.sample()
    rb.extend(list(torch.arange(2)) if storage is ListStorage else torch.arange(2))
    assert set(rb.sample().tolist()) == {0, 1}


@kinds
def test_all_priorities_zero(storage):
    rb = made(storage, eps=0.0)
    rb.update_priority(torch.arange(10), 0.0)
    assert not rb.can_sample(1)
    with pytest.raises(NoSampleable, match="every priority is zero"):
        rb.sample()
    rb.update_priority(4, 0.5)
    assert set(rb.sample().tolist()) == {4}


def test_a_buffer_without_rows():
    rb = made(rows=0)
    assert not rb.can_sample(1)
    with pytest.raises(NoSampleable):
        rb.sample()
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        rb.update_priority(0, 1.0)
    assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.default_priority) == (ALPHA, BETA, 1.0)
    rb.sampler.beta = 0.9
    rb.extend(torch.arange(3))
    assert rb.sampler.beta == 0.9


def test_columns():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 1.0, 0.0), batch_size=30
    )
    rb.extend(torch.arange(6).reshape(2, 3))  # 2 columns, 3 slots
    index = torch.tensor([[2, 1], [0, 0]])
    rb.update_priority(torch.cartesian_prod(torch.arange(3), torch.arange(2)), 0.0)
    rb.update_priority(index, torch.tensor([1.0, 3.0]))
    rows, info = rb.sample(return_info=True)
    assert set(rows.tolist()) == {int(rb[:][1, 2]), int(rb[:][0, 0])}
    rb.update_priority(info["index"], 2.0, generation=info["index_generation"])
    rb.update_priority((torch.tensor([1]), torch.tensor([1])), torch.tensor([9.0]))
    assert sorted(leaves(rb)[leaves(rb) > 0].tolist()) == [2.0, 2.0, 9.0]
    with pytest.raises(RowError, match=r"got \[6, 0\]"):
        rb.update_priority(torch.tensor([[6, 0]]), 1.0)


@pytest.mark.parametrize("more", [(), (2,)])
@pytest.mark.parametrize("call", ["extend", "add"])
def test_priorities_that_come_along_belong_to_their_steps_in_every_column(call, more):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24, ndim=3), sampler=PrioritizedSampler(24, 1.0, 1.0, 0.0), batch_size=4
    )
    shape = (2, 3, 4) if call == "extend" else (2, 3)
    step = torch.arange(torch.Size(shape).numel()).reshape(shape)
    priority = (step + 1.0).reshape(*shape, *(1 for _ in more)).expand(*shape, *more)
    getattr(rb, call)(TensorDict({"step": step, "td_error": priority}, shape))
    for _ in range(20):
        batch, info = rb.sample(return_info=True)
        rows = rb.storage.rows_at(torch.stack(info["index"], -1))
        assert rb.sampler._index.leaves(24)[rows].tolist() == (batch["step"].flatten() + 1.0).tolist()


def test_lanes():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(8, lanes=4), sampler=PrioritizedSampler(8, 1.0, 1.0, 0.0), batch_size=64
    )
    rb.extend(torch.arange(4), lane=torch.tensor([3, 1, 3, 0]))
    assert leaves(rb).tolist() == [1, 0, 1, 0, 0, 0, 1, 1]
    assert set(rb.sample().tolist()) == {0, 1, 2, 3}


# ---- life ------------------------------------------------------------------------------------------------------------


def test_rows_that_are_there_already():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=32)
    rb.extend(torch.arange(3))
    previous = rb.set_sampler(PrioritizedSampler(5, 1.0, 1.0, 0.0))
    assert isinstance(previous, RandomSampler)
    assert leaves(rb).tolist() == [1, 1, 1, 0, 0]
    rb.update_priority(1, 8.0)
    rb.set_sampler(RandomSampler())
    rb.extend(torch.arange(1))  # kept up to date while nobody looks
    rb.set_sampler(PrioritizedSampler(5, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1, 8, 1, 8, 0]


def test_a_long_scan_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "CHUNK", 3)
    monkeypatch.setattr(_progress, "_SILENT_S", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=64)
    rb.extend(torch.arange(8))
    rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1.0] * 8 + [0.0] * 2
    assert "engram: giving rows priorities" in capsys.readouterr().err


def test_rows_written_during_a_scan(monkeypatch):
    monkeypatch.setattr(_progress, "CHUNK", 1)
    rb = ReplayBuffer(storage=LazyTensorStorage(3_000), batch_size=64)
    rb.extend(torch.arange(1_000))
    stop = threading.Event()

    def write():
        while not stop.is_set():
            rb.extend(torch.arange(7))

    writer = threading.Thread(target=write)
    writer.start()
    rb.set_sampler(PrioritizedSampler(3_000, 1.0, 1.0, 0.0))
    stop.set()
    writer.join()
    assert leaves(rb)[: len(rb)].tolist() == [1.0] * len(rb)
    assert leaves(rb)[len(rb) :].tolist() == [0.0] * (3_000 - len(rb))


def test_an_interrupted_scan_hides_no_row(monkeypatch, tmp_path):
    scanned = []

    def interrupt(pieces, _):
        scanned.append(next(iter(pieces)))
        raise KeyboardInterrupt

    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path), batch_size=64)
    rb.extend(torch.arange(8))
    with monkeypatch.context() as patch:
        patch.setattr(_progress, "CHUNK", 3)
        patch.setattr(_progress, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert scanned == [7]
    rb.set_sampler(PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [1.0] * 8 + [0.0] * 2


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_copies(storage, how):
    rb = made(storage)
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    rb.sampler.beta = 0.8
    other = how(rb)
    assert torch.equal(leaves(other), leaves(rb))
    assert (other.sampler.alpha, other.sampler.beta) == (ALPHA, 0.8)
    assert other.sampler.default_priority == 9.0
    other.update_priority(0, 4.0)
    assert not torch.equal(leaves(other), leaves(rb))
    torch.manual_seed(0)
    rb.update_priority(0, 4.0)
    drawn = rb.sample()
    torch.manual_seed(0)
    assert torch.equal(other.sample(), drawn)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_priority_of_zero_is_copied(storage, how):
    rb = made(storage, rows=4, alpha=1.0, eps=0.0)
    rb.update_priority(torch.tensor([1, 2]), torch.tensor([0.0, 3.0]))
    rb.sampler.alpha = 0.5
    other = how(how(rb))
    assert leaves(other).tolist() == leaves(rb).tolist()
    assert leaves(other)[:4].tolist() == [1, 0, 3**0.5, 1]
    assert not other.sampler.priorities().leaves(10).signbit().any()
    other.extend(list(torch.arange(7)) if storage is ListStorage else torch.arange(7))
    assert leaves(other)[1] == 0  # row 0 was the last one
    state = other.sampler.state_dict()
    other.update_priority(1, 2.0)
    other.sampler.load_state_dict(state)
    assert leaves(how(other))[1] == 0


def test_a_directory_keeps_priorities(tmp_path):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA, beta=BETA, storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "s"), batch_size=16
    )
    rb.extend(TensorDict({"a": torch.arange(12)}, [12]))
    rb.update_priority(torch.arange(12), torch.rand(12))
    rb.sampler.beta = 0.9
    before = rb.sampler.state_dict()
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s")
    assert type(rb) is TensorDictPrioritizedReplayBuffer
    after = rb.sampler.state_dict()
    assert torch.equal(after.pop("leaves"), before.pop("leaves"))
    assert after == before
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert leaves(rb)[12:14].tolist() == pytest.approx([rb.sampler.default_priority**ALPHA] * 2)
    rb.close()
    with pytest.raises(IncompatibleStore, match="eps"):
        ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(20, ALPHA, BETA, eps=0.5))
    rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(20, 1.0, 0.1))
    assert (rb.sampler.alpha, rb.sampler.beta) == (1.0, 0.1)
    rb.close()


def test_priorities_after_a_kill(tmp_path):
    program = fresh.start(
        """
        import torch
        from engram import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
        rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder), sampler=PrioritizedSampler(8, 1.0, 1.0, 0.0))
        rb.extend(torch.arange(6))
        rb.update_priority(torch.arange(1, 6), torch.arange(1.0, 6.0))
        print("ready", flush=True)
        while True: pass
        """,
        folder=str(tmp_path / "s"),
    )
    program.until("ready").kill()
    rb = ReplayBuffer.open(tmp_path / "s", batch_size=32)
    assert leaves(rb).tolist() == [1, 1, 2, 3, 4, 5, 0, 0]
    assert max(rb.sample().tolist()) <= 5
    rb.close()


def test_another_kind_of_file_is_refused(tmp_path):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"))
    rb.close()
    path = tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities"
    good = path.read_bytes()
    for content, message in ((good[:-8], "of another size"), (b"x" * 8 + good[8:], "not priorities"), (b"", "header")):
        path.write_bytes(content)
        with pytest.raises(IncompatibleStore, match=message):
            ReplayBuffer.open(tmp_path / "s")
    path.write_bytes(good)
    ReplayBuffer.open(tmp_path / "s").close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_leaf_that_is_none_is_an_error_when_it_is_drawn(tmp_path, value, opened):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), alpha=1.0)
    if opened == "after":
        rb.close()
    with open(tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities", "r+b") as file:
        file.seek(4096)
        file.write(struct.pack("=d", value))
    if opened == "after":
        rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(10, 1.0, BETA, EPS))

    def draw():
        for _ in range(100):
            _, info = rb.sample(64, return_info=True)
            assert torch.isfinite(info["priority_weight"]).all()

    with pytest.raises(CorruptStore, match="priorities: expected finite leaves"):
        draw()
    with pytest.raises(CorruptStore, match="leaves"):
        rb.state_dict()
    rb.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_sum_that_is_none_is_an_error_when_the_store_is_opened(tmp_path, value):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), alpha=1.0)
    rows = rb.storage.max_size
    rb.close()
    path = tmp_path / "s" / ".engram" / "indexes" / "main" / "priorities"
    nodes, at = rows, 4096
    while nodes > 8:  # sums of each level, padded to lines
        at += -(-nodes // 8) * 64
        nodes = -(-nodes // 8)
    at += -(-nodes // 8) * 64
    raw = bytearray(path.read_bytes())
    assert struct.unpack_from("=d", raw, at)[0] > 0
    struct.pack_into("=d", raw, at, value)
    path.write_bytes(raw)
    with pytest.raises(CorruptStore, match="priorities: expected a sum"):
        ReplayBuffer.open(tmp_path / "s")


def test_an_index_of_a_kind_that_is_not_known(tmp_path):
    made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s")).close()
    (tmp_path / "s" / ".engram" / "indexes" / "main" / "something").write_bytes(b"x")
    with pytest.raises(IncompatibleStore, match="newer engram"):
        ReplayBuffer.open(tmp_path / "s")


def test_whoever_writes_keeps_the_priorities_of_a_directory(tmp_path):
    rb = made(lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "s"), rows=4, alpha=1.0, eps=0.0)
    rb.update_priority(torch.arange(4), 5.0)
    rb.update_priority(0, 2.0)
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", sampler=RandomSampler())
    rb.extend(torch.arange(7))  # rows 4 to 9, and 0
    rb.close()
    rb = ReplayBuffer.open(tmp_path / "s", sampler=PrioritizedSampler(10, 1.0, 1.0, 0.0))
    assert leaves(rb).tolist() == [5.0] * 10
    rb.close()


def test_state_dict():
    rb, other = made(alpha=0.3), made()
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    state = rb.sampler.state_dict()
    state["leaves"][0] += 0  # a copy
    with pytest.raises(IncompatibleCheckpoint, match=r"alpha: expected 0.7 as here, got 0.3. Set alpha=0.3 first."):
        other.sampler.load_state_dict(state)
    assert other.sampler.alpha == 0.7
    other.sampler.alpha = 0.3
    other.sampler.load_state_dict(state)
    assert torch.equal(leaves(other), leaves(rb))
    assert (other.sampler.alpha, other.sampler.default_priority) == (0.3, 9.0)
    for change, error in (
        ({"eps": 1.0}, IncompatibleCheckpoint),
        ({"max_priority_within_buffer": True}, IncompatibleCheckpoint),
        ({"leaves": torch.zeros(3)}, TypeError),
        ({"leaves": torch.zeros(11, dtype=torch.float64)}, IncompatibleCheckpoint),
        ({"highest": 1e999}, ValueError),
        ({"highest": "9"}, TypeError),
        ({"leaves": torch.full((10,), -1.0, dtype=torch.float64)}, PriorityError),
        ({"leaves": torch.full((10,), 1e300, dtype=torch.float64)}, PriorityError),
        ({"alpha": -1.0}, ValueError),
        ({"more": 1}, KeyError),
    ):
        with pytest.raises(error):
            other.sampler.load_state_dict({**state, **change})
        assert torch.equal(leaves(other), leaves(rb))
    with pytest.raises(RuntimeError, match="expected a storage with rows"):
        made(rows=0, alpha=0.3).sampler.load_state_dict(state)


def test_buffers_by_their_names():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=0.5, eps=0.0, dtype=torch.float64, batch_size=4)
    assert isinstance(rb.storage, ListStorage)
    rb.extend([torch.tensor(1.0), torch.tensor(2.0)])
    _, info = rb.sample(return_info=True)
    assert info["priority_weight"].dtype is torch.float64
    assert rb.sampler.alpha == 1.0
    for kind in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(TypeError, match="expected alpha and beta"):
            kind(beta=1.0)
        with pytest.raises(TypeError, match="made of alpha and beta"):
            kind(alpha=1.0, beta=1.0, sampler=RandomSampler())
    assert isinstance(TensorDictPrioritizedReplayBuffer(alpha=1, beta=1), TensorDictReplayBuffer)


def test_repr_makes_it_again():
    sampler = PrioritizedSampler(7, 0.5, 0.25, index="x")
    config = sampler.config()
    assert PrioritizedSampler.from_config(config).config() == config
    assert "alpha=0.5" in repr(sampler)


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
