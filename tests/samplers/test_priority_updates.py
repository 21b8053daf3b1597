"""Updates of priorities, those that come along, and those that are refused."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    ReplayBuffer,
    RowError,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.samplers.prioritized import ALPHA, BETA, kinds, leaves, made
from tests.statistics_of import counted

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


@pytest.mark.parametrize("rows", ["<i8", "<i4", ">i8", "u1"])
@pytest.mark.parametrize("priorities", ["<f8", "<f4", ">f4", "<f2", "<i8"])
@pytest.mark.parametrize("step", [1, 2, -1])
@kinds
def test_arrays_of_any_kind_are_what_tensors_of_them_are(storage, rows, priorities, step):
    index = np.array([3, 9, 0, 9, 5, 3, 1, 1], rows)[::step]
    values = np.array([1, 2, 3, 4, 5, 6, 7, 0.5]).astype(priorities)[::step]
    plain = torch.tensor(index.tolist()), torch.tensor(values.tolist(), dtype=torch.float64)
    for stale in (None, 2):
        ours, theirs = made(storage), made(storage)
        numbers = ours.storage.tickets_of(plain[0]).clone()
        if stale is not None:
            numbers[stale] += 1
        given = {} if stale is None else {"generation": numbers}
        ours.update_priority(index, values, **{key: value.numpy() for key, value in given.items()})
        theirs.update_priority(*plain, **given)
        assert torch.equal(leaves(ours), leaves(theirs))
        assert ours.stats()["priority_updates_dropped"] == theirs.stats()["priority_updates_dropped"]


@kinds
def test_bad_arrays_change_nothing(storage):
    rb = made(storage)
    before = leaves(rb)
    rows, priorities = np.array([1, 2]), np.array([5.0, 5.0])
    for wrong, error in (
        ((np.array([1, 10]), priorities), RowError),
        ((np.array([1, -2]), priorities.astype(np.float32)), RowError),
        ((rows, np.array([5.0, -1.0])), PriorityError),
        ((rows, np.array([5.0, np.nan], np.float32)), PriorityError),
        ((rows, np.ones(3)), RuntimeError),
        ((np.array([1.0, 2.0]), priorities), TypeError),
        ((rows, np.array([1j, 2])), TypeError),
    ):
        with pytest.raises(error, match="update_priority"):
            rb.update_priority(*wrong)
    with pytest.raises(RuntimeError, match="generation: expected one per row, 2, got 1"):
        rb.update_priority(rows, priorities, generation=np.array([1]))
    assert torch.equal(leaves(rb), before)


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


@kinds
def test_an_edit_keeps_the_priority_and_lets_updates_of_what_was_drawn_arrive(storage):
    rb = made(storage, alpha=1.0, eps=0.0)
    rb.update_priority(3, 5.0)
    info = rb.sample(return_info=True)[1]
    rb[3] = torch.tensor(33)
    assert leaves(rb)[3] == 5.0
    rb.update_priority(info["index"], 2.0, generation=info["index_generation"])
    assert leaves(rb)[3] == 2.0
    assert rb.stats()["priority_updates_dropped"] == 0


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
            counted(rb),
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
    with pytest.raises(RuntimeError, match="a priority per row, 2, or one for all, got"):
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
    with pytest.raises(RuntimeError, match="a priority per row, 4, or one for all, got"):
        rb.extend(steps(1.0, 2.0))
    with pytest.raises(RuntimeError, match="a priority per row, 2, or one for all, got"):
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


@pytest.mark.parametrize("sampler", [PrioritizedSampler(10, 1.0, 1.0), PrioritizedSampler(alpha=1.0, beta=1.0)])
def test_priorities_are_checked_for_a_buffer_only(sampler):
    with pytest.raises(RuntimeError, match="expected a sampler of a buffer, got one that is bound to no storage"):
        sampler.check_priority([1.0], 1)
    windows = SliceSampler(slice_len=2, traj_key="episode", anchors=sampler)
    with pytest.raises(RuntimeError, match="bound to no storage"):
        windows.check_priority([1.0], 1)
    ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    sampler.check_priority([1.0], 1)
    with pytest.raises(PriorityError):
        sampler.check_priority([-1.0], 1)


# ---- one for all -------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("one", [2.0, torch.tensor(2.0), torch.tensor([2.0]), [2.0], np.array([2.0], np.float32)])
def test_one_priority_is_that_of_all_rows(storage, one):
    rb = ReplayBuffer(storage=storage(8), sampler=PrioritizedSampler(8, alpha=1.0, beta=1.0, eps=0.0), batch_size=2)
    index = rb.extend(torch.arange(6))
    rb.update_priority(index, one)
    assert leaves(rb)[:6].tolist() == [2] * 6
    rb.update_priority(np.arange(2), one)
    rb.update_priority(index[:0], one)
    for other in (torch.ones(2), torch.ones(1, 1), torch.ones(0)):
        with pytest.raises(RuntimeError, match="a priority per row, 6, or one for all, got"):
            rb.update_priority(index, other)
    with pytest.raises(PriorityError):
        rb.update_priority(index, torch.tensor([-1.0]))
    assert leaves(rb)[:6].tolist() == [2] * 6
