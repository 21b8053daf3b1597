"""Priorities that lie where the rows are, beside those of the host: the same draws for the same keys, weights and updates."""

import copy

import pytest
import torch
from tensordict import TensorDict

from engram import (
    IncompatibleStore,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PriorityError,
    RowError,
    TensorDictReplayBuffer,
)
from engram.store.priorities import DeviceIndex, PriorityIndex
from tests.store.device.there import There, both_ways  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("both_ways")


def steps_of(n, first=0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return TensorDict({"obs": torch.rand(n, 3, generator=random), "step": torch.arange(first, first + n)}, [n])


def pair(capacity=300, lanes=1, **arguments):
    return [
        TensorDictReplayBuffer(
            storage=storage(capacity, lanes=lanes),
            sampler=PrioritizedSampler(**{"alpha": 0.7, "beta": 0.5, **arguments}),
            generator=torch.Generator().manual_seed(3),
            batch_size=64,
        )
        for storage in (There, LazyTensorStorage)
    ]


def equal_draws(both, times=3):
    for _ in range(times):
        (ours, of_ours), (theirs, of_theirs) = (rb.sample(return_info=True) for rb in both)
        assert torch.equal(ours["index"], theirs["index"])
        assert torch.equal(ours["obs"], theirs["obs"])
        assert ours["priority_weight"].dtype is theirs["priority_weight"].dtype
        assert torch.allclose(ours["priority_weight"], theirs["priority_weight"], rtol=1e-6, atol=0)
        assert torch.equal(of_ours["index_generation"], of_theirs["index_generation"])
    return ours, theirs


def test_they_lie_there():
    ours, theirs = pair()
    for rb in (ours, theirs):
        rb.extend(steps_of(5))
    assert isinstance(ours.sampler.priorities(), DeviceIndex)
    assert isinstance(theirs.sampler.priorities(), PriorityIndex)


@pytest.mark.stress(sample=6)
@pytest.mark.parametrize("normalize", ["store", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lanes", [1, 3])
def test_draws_weights_and_updates_are_those_of_the_host(lanes, dtype, normalize):
    both = pair(lanes=lanes, dtype=dtype, normalize=normalize)
    random = torch.Generator().manual_seed(2)
    for turn in range(8):
        lane = turn % lanes
        for rb in both:
            rb.extend(steps_of(35, 100 * turn), lane=lane)
        batch, _ = equal_draws(both)
        error = torch.rand(64, generator=random, dtype=torch.float64)
        rows = torch.cat([batch["index"][:-1], torch.tensor([-1])])
        for rb in both:
            rb.update_priority(rows, error, generation=batch["index_generation"])
        equal_draws(both)
        for rb in both:
            rb.update_priority(rows[:9], 3.0 * turn)
            rb.sampler.mark_update(rows[20:24])
            rb[7] = steps_of(1)[0]  # an edit keeps the priority
    leaves = [rb.sampler.priorities().leaves(300) for rb in both]
    assert torch.allclose(*leaves, rtol=1e-12, atol=0)
    assert [rb.stats()["priority_updates_dropped"] for rb in both] == [0, 0]
    assert ours_equal(both, "default_priority")


def ours_equal(both, name):
    one, other = (getattr(rb.sampler, name) for rb in both)
    return one == pytest.approx(other)


def test_updates_that_come_too_late_are_dropped_and_counted():
    both = pair(40)
    for rb in both:
        rb.extend(steps_of(40))
        index = torch.arange(40)
        generation = rb.storage.writes_of(index, rb.storage.tickets_of(index))
        rb.extend(steps_of(10))
        rb.update_priority(index, torch.rand(40, generator=torch.Generator().manual_seed(1)), generation=generation)
        assert rb.stats()["priority_updates_dropped"] == 10
    equal_draws(both)


def test_of_a_row_that_is_named_twice_the_last_entry_counts():
    both = pair(eps=0.0, alpha=1.0)
    for n in (5, 3_000):
        rows = torch.randint(50, (n,), generator=torch.Generator().manual_seed(n))
        for rb in both:
            rb.extend(steps_of(50))
            rb.update_priority(rows, torch.arange(1.0, n + 1))
        found = [rb.sampler.priorities().leaves(50) for rb in both]
        assert torch.equal(*found)


@pytest.mark.parametrize("within", [False, True])
def test_what_new_rows_get(within):
    both = pair(20, max_priority_within_buffer=within)
    for rb in both:
        rb.extend(steps_of(10))
        rb.update_priority(torch.tensor([3]), torch.tensor([9.0]))
        rb.extend(steps_of(5))
        rb.update_priority(torch.tensor([3]), torch.tensor([0.5]))
        rb.extend(steps_of(3))
    assert torch.allclose(*(rb.sampler.priorities().leaves(20) for rb in both))
    assert ours_equal(both, "default_priority")
    for rb in both:
        rb.empty()
        rb.extend(steps_of(4))
    assert torch.allclose(*(rb.sampler.priorities().leaves(20) for rb in both))


def test_a_priority_of_zero_is_not_drawn():
    both = pair(eps=0.0)
    for rb in both:
        rb.extend(steps_of(6))
        rb.update_priority(torch.arange(5), torch.zeros(5))
        assert set(rb.sample()["index"].tolist()) == {5}
        rb.update_priority(torch.tensor([5]), torch.zeros(1))
        assert not rb.can_sample()
    with pytest.raises(NoSampleable):
        both[1].sample()
    both[0].sample()  # only the device knows
    with pytest.raises(NoSampleable, match="1 draws found no row, or no priority"):
        both[0].stats()


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), 1e308])
def test_bad_priorities_on_the_host_change_nothing(wrong):
    rb, _ = pair(alpha=1.0)
    rb.extend(steps_of(6))
    before = rb.sampler.priorities().leaves(6)
    with pytest.raises(PriorityError, match="position 1"):
        rb.update_priority(torch.arange(3), torch.tensor([0.5, wrong, 0.5], dtype=torch.float64))
    with pytest.raises(RowError):
        rb.update_priority(torch.tensor([1, 300]), torch.tensor([0.5, 0.5]))
    assert torch.equal(before, rb.sampler.priorities().leaves(6))


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), 1e308])
def test_bad_priorities_on_the_device_are_left_out_and_raised_later(wrong):
    rb, _ = pair(alpha=1.0, eps=0.0)
    rb.extend(steps_of(6))
    index = rb.sampler.priorities()
    index.update_there(torch.tensor([0, 1, 2, 400]), torch.tensor([0.5, wrong, 0.25, 1.0], dtype=torch.float64), None)
    assert index.leaves(3).tolist() == [0.5, 1.0, 0.25]
    with pytest.raises(PriorityError, match="got 1 others"):
        rb.stats()
    assert rb.stats()["size"] == 6  # it was said


def test_rows_outside_are_raised_later():
    rb, _ = pair()
    rb.extend(steps_of(6))
    rb.sampler.priorities().update_there(torch.tensor([-1, 400, 2, -7]), torch.ones(4), None)
    with pytest.raises(RowError, match="got 2 others"):
        rb.stats()


def test_alpha_and_beta():
    both = pair()
    for rb in both:
        rb.extend(steps_of(100))
        rb.update_priority(torch.arange(100), torch.linspace(0, 3, 100))
        rb.sampler.alpha, rb.sampler.beta = 0.3, 1.0
    equal_draws(both)
    for rb in both:
        with pytest.raises(ValueError, match="too large"):
            rb.sampler.alpha = 10_000.0


def test_removed_rows_are_not_drawn():
    both = pair(50)
    for rb in both:
        rb.extend(steps_of(40))
        rb.update_priority(torch.arange(40), torch.linspace(0.1, 1, 40))
        assert rb.remove(torch.arange(10, 30)) == 20
    ours, _ = equal_draws(both)
    assert not ((ours["index"] >= 10) & (ours["index"] < 30)).any()


def test_states_are_those_of_the_host():
    both = pair()
    for rb in both:
        rb.extend(steps_of(200))
        rb.update_priority(torch.arange(150), torch.linspace(0, 2, 150))
    states = [rb.state_dict() for rb in both]
    crossed = pair()
    for rb, state in zip(crossed, reversed(states), strict=True):
        rb.load_state_dict(state)
    assert isinstance(crossed[0].sampler.priorities(), DeviceIndex)
    equal_draws(crossed)
    for rb in crossed:
        rb.extend(steps_of(30))
    equal_draws(crossed)


def test_dumps(tmp_path):
    both = pair()
    for rb in both:
        rb.extend(steps_of(200))
        rb.update_priority(torch.arange(150), torch.linspace(0, 2, 150))
    both[0].dumps(tmp_path / "ours")
    both[1].dumps(tmp_path / "theirs")
    loaded = [pair()[0], pair()[0], pair()[1]]
    for rb, name in zip(loaded, ("ours", "theirs", "theirs"), strict=True):
        rb.loads(tmp_path / name)
    equal_draws(loaded[:2])
    found = [rb.sampler.priorities().leaves(300) for rb in loaded]
    assert torch.equal(found[1], found[2])
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=0)


def test_copies_have_the_priorities():
    rb, _ = pair()
    rb.extend(steps_of(200))
    rb.update_priority(torch.arange(150), torch.linspace(0, 2, 150))
    other = copy.deepcopy(rb)
    assert torch.equal(other.sampler.priorities().leaves(300), rb.sampler.priorities().leaves(300))


def test_windows_take_them_to_the_host():
    rb, _ = pair()
    data = steps_of(60)
    data["episode"] = torch.arange(60) // 6
    rb.extend(data)
    rb.update_priority(torch.arange(60), torch.linspace(0, 2, 60))
    before = rb.sampler.priorities().leaves(60)
    plain = rb.sampler
    rb.set_sampler(PrioritizedSliceSampler(300, 0.7, 0.5, slice_len=2, traj_key="episode"))
    assert len(rb.sample()) == 64
    index = rb.sampler.anchors.priorities()
    assert isinstance(index, PriorityIndex)
    assert torch.equal(index.leaves(60), before)
    rb.set_sampler(plain)
    assert plain.priorities() is index
    assert len(rb.sample()) == 64
    rb.set_sampler(PrioritizedSampler(alpha=0.7, beta=0.5, device="cpu"))
    rb.sample()
    with pytest.raises(IncompatibleStore, match="on the host, where another sampler has needed them"):
        DeviceIndex.of_device_store(rb.storage.store, "main", plain._config)


def test_a_tree_on_another_device():
    rb, _ = pair(device="meta")
    rb.extend(steps_of(3))
    with pytest.raises(ValueError, match="device: expected cpu, where the rows are"):
        rb.sample()


def test_other_parameters_are_refused():
    rb, _ = pair()
    rb.extend(steps_of(3))
    rb.sample()
    with pytest.raises(IncompatibleStore, match="expected eps="):
        rb.set_sampler(PrioritizedSampler(alpha=0.7, beta=0.5, eps=0.5))


def test_a_refused_sampler_takes_no_priorities_to_the_host():
    rb, _ = pair(alpha=1.0)
    rb.extend(steps_of(6))
    rb.update_priority(torch.arange(6), torch.arange(6.0))
    before = rb.sampler.priorities().leaves(6)
    for other in ({"eps": 0.5}, {"max_priority_within_buffer": True}):
        sampler = PrioritizedSampler(alpha=1.0, beta=0.5, device="cpu", **other)
        with pytest.raises(IncompatibleStore, match="another name"):
            TensorDictReplayBuffer(storage=rb.storage, sampler=sampler)
        assert rb.sampler.draws_on_device
        assert torch.equal(before, rb.sampler.priorities().leaves(6))
    rb.sample()
