"""Kernels of rows on a device in Triton's interpreter, beside the operations of torch that do the same."""

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PriorityError,
    RandomSampler,
    RowError,
    TensorDictReplayBuffer,
)
from engram.samplers.prioritized import as_priorities
from engram.store.device.row_operations import Drawing, RowKernels
from engram.store.device.rows import DeviceRows
from tests.around.test_next_from_following import steps
from tests.device.graphs import Graph, state_of
from tests.store.device.test_followed import by_priority
from tests.store.device.test_followed import made as following
from tests.store.device.there import ByKernels, There

WIDTHS = {
    "byte": (torch.uint8, (7,)),
    "flag": (torch.bool, ()),
    "half": (torch.float16, (3,)),
    "wide": (torch.float64, (2, 40)),
}


def steps_of(n, first=0):
    """Leaves and sums of the priorities below have no rounding, so kernels and operations draw the same rows."""
    numbers = torch.arange(first, first + n)
    data = {"a": numbers, "b": numbers.unsqueeze(-1).repeat(1, 3).float(), "none": torch.zeros(n, 0)}
    for name, (dtype, shape) in WIDTHS.items():
        data[name] = (numbers.reshape(-1, *[1] * len(shape)) % 97).expand(n, *shape).to(dtype)
    return TensorDict(data, [n])


def numbers_of(n, first=0):
    return TensorDict({"a": torch.arange(first, first + n)}, [n])


def exact(n, seed=0):
    """Priorities of which no sum is rounded."""
    return torch.randint(0, 1 << 20, (n,), generator=torch.Generator().manual_seed(seed)).double() / 1024


def pair(capacity, *, prioritized=True, lanes=1, batch_size=64, **arguments):
    given = {"alpha": 1.0, "beta": 0.5, "eps": 0.0} | arguments
    return [
        TensorDictReplayBuffer(
            storage=storage(capacity, lanes=lanes),
            sampler=PrioritizedSampler(**given) if prioritized else None,
            generator=torch.Generator().manual_seed(5),
            batch_size=batch_size,
        )
        for storage in (ByKernels, There)
    ]


def rows_of(rb):
    return rb.storage.store.rows


def check_equal(ours, theirs, *, exactly=True):
    ledgers = rows_of(ours), rows_of(theirs)
    for one, other in zip(*(ledger.whole for ledger in ledgers), strict=True):
        assert torch.equal(one[:-1], other[:-1])
    for name in ("numbers", "cursor", "tally"):
        one, other = (getattr(ledger, name)[: ours.storage.max_size] for ledger in ledgers)
        assert torch.equal(one, other), name
    for one, other in zip(*(ledger.trees for ledger in ledgers), strict=True):
        assert torch.allclose(one.tree.leaves, other.tree.leaves, rtol=1e-14, atol=0)
        for sums, others in zip([*one.tree.sums, *one.tree.lows], [*other.tree.sums, *other.tree.lows], strict=True):
            assert torch.equal(sums, others) if exactly else torch.allclose(sums, others, rtol=1e-12, atol=0)
        assert one.highest == other.highest


def check_batches(ours, theirs):
    (batch, info), (other, beside) = (rb.sample(return_info=True) for rb in (ours, theirs))
    assert set(batch.keys()) == set(other.keys())
    for key, value in other.items():
        if key == "priority_weight":
            assert batch[key].dtype is value.dtype
            assert torch.allclose(batch[key], value, rtol=1e-6, atol=0)
        else:
            assert batch[key].dtype is value.dtype
            assert torch.equal(batch[key], value), key
    assert torch.equal(info["index"], beside["index"])
    return batch


@pytest.mark.parametrize("capacity", [1, 2, 129, 20_000])
def test_a_cycle_is_that_of_torch(capacity):
    ours, theirs = both = pair(capacity, batch_size=33)
    first = 0
    for turn, n in enumerate((1, capacity // 2 + 1, capacity, capacity // 3 + 1, capacity + 3)):
        for rb in both:
            rb.extend((steps_of if capacity < 1_000 else numbers_of)(n, first))
        first += n
        check_equal(*both)
        batch = check_batches(*both)
        for rb in both:
            rb.update_priority(batch["index"], exact(33, turn), generation=batch["index_generation"])
        check_equal(*both)
        check_batches(*both)
    assert ours.write_count == theirs.write_count == first


@pytest.mark.parametrize(
    "arguments", [{"alpha": 0.6, "eps": 1e-3}, {"alpha": 0.0}, {"max_priority_within_buffer": True}]
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_parameters_and_lanes(lanes, arguments):
    both = pair(600, lanes=lanes, **arguments)
    for turn in range(5):
        for rb in both:
            rb.extend(steps_of(140, 200 * turn), lane=turn % lanes)
            rows = torch.arange(turn, 90, 2)
            rb.update_priority(rows, exact(len(rows), turn) + 0.5)
        check_equal(*both, exactly=False)


@pytest.mark.parametrize("n", [1, 5, 1_024, 1_025, 3_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_of_a_row_named_twice_the_last_entry_counts(n, dtype):
    both = pair(500)
    random = torch.Generator().manual_seed(n)
    for rb in both:
        rb.extend(steps_of(400))
    for _ in range(2):
        rows = torch.randint(-1, 400, (n,), generator=random)
        priorities = torch.randint(0, 1_000, (n,), generator=random).to(dtype)
        numbers = rows_of(both[1]).numbers[rows.clamp(min=0)].clone()
        numbers[: n // 3] += 1  # of another write
        for rb in both:
            rb.sampler.priorities().update_there(rows, priorities, numbers)
        check_equal(*both)
    assert rows_of(both[0]).tally[0] > 0 or n < 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e300])
def test_what_no_row_takes_is_counted(bad):
    both = pair(50)
    for rb in both:
        rb.extend(steps_of(10))
        update = rb.sampler.priorities().update_there
        update(torch.tensor([3, 4, 4]), torch.tensor([2.0, bad, 5.0], dtype=torch.float64), None)
        update(torch.tensor([-1, 50, -7, 20, 1 << 40]), torch.ones(5, dtype=torch.float64), None)
        update(torch.empty(0, dtype=torch.int64), torch.empty(0), None)
    check_equal(*both)
    for rb in both:
        with pytest.raises(PriorityError, match="got 1 others"):
            rb.stats()
        rb.sampler.priorities().update_there(torch.tensor([77]), torch.ones(1), None)
        with pytest.raises(RowError, match="got 1 others"):
            rb.stats()


def test_operations_and_kernels_take_turns():
    """Edits by operations leave positions where the kernels note who names a row last."""
    both = pair(3_000)
    for rb in both:
        rb.extend(steps_of(3_000))
    for turn in range(3):
        rows = torch.randint(3_000, (2_000,), generator=torch.Generator().manual_seed(turn))
        for rb in both:
            rb.storage.store.edit_there(rows, [0], [torch.arange(2_000)])
            rb.update_priority(rows, exact(2_000, turn))
        check_equal(*both)


@pytest.mark.parametrize("n", [1, 40, 2_000])
@pytest.mark.parametrize("fields", [1, 20])
def test_edits_are_those_of_torch(fields, n):
    """Also of rows that are named several times, that count from the end, and that hold nothing; of two launches or three more."""
    both = pair(90, prioritized=False)

    def data(first):
        numbers = torch.arange(first, first + n) % 7
        wide = {f"f{field}": (numbers + field).unsqueeze(1).repeat(1, field) for field in range(fields)}
        return TensorDict({**wide, "a": numbers.float(), "b": numbers.bool()}, [n])

    for rb in both:
        rb.extend(data(0)[:40])
        rb.extend(data(0)[:40])
    launches = rows_of(both[0]).work.launches
    for turn in range(3):
        rows = torch.randint(-95, 95, (n,), generator=torch.Generator().manual_seed(turn))
        for rb in both:
            there = data(10 + turn)
            columns = [there[field.key] for field in rb.storage.store.schema.fields]
            if turn == 1:  # the last fields in another order, and so by operations
                rb.storage.store.edit_there(rows, [len(columns) - 1, 0], [columns[-1], columns[0]])
            else:
                rb.storage.store.edit_there(rows, range(len(columns)), columns)
        check_equal(*both)
        assert torch.equal(*(rows_of(rb).edited[:-1] for rb in both))
        assert torch.equal(*(rb.storage.store.rows.newly_edited() for rb in both))
    assert rows_of(both[0]).work.launches - launches == 2 * (2 if fields == 1 else 4)
    before = both[0]["a"].clone()
    graph_rows, there = torch.tensor([2, -1, 2])[:n], data(50)[:3]
    if n >= 3:
        columns = [there[field.key] for field in both[0].storage.store.schema.fields]
        store = both[0].storage.store
        store.edit_there(graph_rows, range(len(columns)), columns)
        now = both[0]["a"]
        assert now[2] == there["a"][2]
        assert now[-1] == there["a"][1]
        assert torch.equal(now[3:-1], before[3:-1])


@pytest.mark.parametrize("normalize", ["store", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights(normalize, dtype):
    both = pair(1_000, normalize=normalize, dtype=dtype, beta=0.7)
    for rb in both:
        rb.extend(steps_of(1_000))
        rb.update_priority(torch.arange(1_000), exact(1_000) + 1)
    batch = check_batches(*both)
    assert 0 < float(batch["priority_weight"].min()) <= float(batch["priority_weight"].max()) <= 1
    for rb in both:
        rb.sampler.beta = 0.0
    assert check_batches(*both)["priority_weight"].tolist() == [1.0] * 64


def test_a_hundred_thousand_draws_have_the_distribution():
    rb, _ = pair(5_000, batch_size=10_000)
    rb.extend(numbers_of(5_000))
    priorities = exact(5_000) ** 3
    priorities[::7] = 0
    rb.update_priority(torch.arange(5_000), priorities)
    count = torch.zeros(5_000, dtype=torch.float64)
    for _ in range(10):
        batch, info = rb.sample(return_info=True)
        count += torch.bincount(info["index"], minlength=5_000)
        least = priorities[priorities > 0].min()
        weights = (priorities[info["index"]] / least) ** -0.5
        assert torch.allclose(batch["priority_weight"].double(), weights, rtol=1e-6, atol=0)
    check_chi_square(count, priorities / priorities.sum() * 1e5)


def test_uniform_draws_have_the_distribution():
    rb, _ = pair(700, prioritized=False, batch_size=10_000)
    rb.extend(numbers_of(650))
    count = torch.zeros(700, dtype=torch.float64)
    for _ in range(10):
        count += torch.bincount(rb.sample()["index"], minlength=700)
    assert not count[650:].any()
    check_chi_square(count[:650], torch.full((650,), 1e5 / 650, dtype=torch.float64))


def check_chi_square(count, expected):
    often = expected > 10
    chi = ((count - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert float(chi) < freedom + 5 * (2 * freedom) ** 0.5
    assert not count[expected == 0].any()


@pytest.mark.parametrize("storage", ["kernels", "host"])
def test_uniform_batches_are_those_of_the_host(storage):
    both = [
        TensorDictReplayBuffer(storage=made(90), generator=torch.Generator().manual_seed(1), batch_size=40)
        for made in (ByKernels, There if storage == "kernels" else LazyTensorStorage)
    ]
    for n in (5, 60, 60):
        for rb in both:
            rb.extend(steps_of(n))
        check_batches(*both)


@pytest.mark.parametrize("place", [0, 127, 16_384, 39_999])
def test_one_leaf_above_zero_is_always_drawn(place):
    rb, _ = pair(40_000)
    rb.extend(numbers_of(40_000))
    tree = rb.sampler.priorities().tree
    tree.leaves.zero_()
    tree.put(torch.tensor([place]), torch.tensor([1e-200], dtype=torch.float64))
    batch = rb.sample()
    assert batch["index"].tolist() == batch["a"].tolist() == [place] * 64
    assert batch["priority_weight"].tolist() == [1.0] * 64


def test_addresses_of_ten_million_rows():
    rb, _ = pair(10_000_000, batch_size=8)
    rb.extend(numbers_of(3))
    rows, there = rows_of(rb), torch.arange(9_999_992, 10_000_000)
    rows.numbers[there] = torch.arange(1, 9)
    rows.whole[0][there] = there
    index = rb.sampler.priorities()
    index.update_there(torch.arange(3), torch.zeros(3), None)
    index.update_there(there, torch.full((8,), 0.5), None)
    assert [float(sums.sum()) for sums in index.tree.sums] == [4.0] * 5
    columns = rows.work.read(rows, 64, 3, 0, Drawing(index))
    assert torch.equal(columns[0], columns[1])
    assert set(columns[1].tolist()) == set(there.tolist())
    assert torch.equal(columns[2], columns[1] - 9_999_991)


def test_a_batch_is_its_own():
    """Fields of a block have versions of their own, so autograd can use one after another one was changed in place."""
    rb, _ = pair(50, batch_size=7)
    rb.extend(steps_of(50))
    batch = rb.sample()
    weight = torch.ones(3, requires_grad=True)
    loss = (batch["b"] * weight).sum()
    batch["wide"].add_(1)
    loss.backward()
    assert all(value.data_ptr() % 2 == 0 and value.is_contiguous() for value in batch.values())


def test_conjugates_and_views_are_resolved():
    numbers = torch.arange(6).to(torch.complex64) * (1 + 2j)
    data = {"z": numbers.conj(), "t": torch.arange(12).reshape(2, 6).T, "one": torch.ones(1).expand(6)}
    for rb in pair(20, prioritized=False):
        rb.extend(TensorDict(data, [6]))
        assert torch.equal(rb[:]["z"], numbers.conj().resolve_conj())
        assert torch.equal(rb[:]["t"], data["t"])
        assert rb[:]["one"].tolist() == [1.0] * 6


def test_values_are_read_at_addresses_as_wide_as_a_load(monkeypatch):
    """A device faults on a load of 8 bytes at an address that is no multiple of 8; the interpreter does not."""
    given, launch = [], RowKernels._launch

    def launched(kernels, name, grid, warps, *arguments, **constants):
        if name == "place":
            given.extend(arguments[7:])
        launch(kernels, name, grid, warps, *arguments, **constants)

    monkeypatch.setattr(RowKernels, "_launch", launched)
    memory = torch.arange(21, dtype=torch.float32)
    shifted = {
        "eight": memory[1:13].view(6, 2),
        "four": memory[1:19].view(6, 3),
        "bytes": memory.view(torch.uint8)[1:43].view(6, 7),
    }
    rb, _ = pair(20, prioritized=False)
    rb.extend(TensorDict(shifted, [6]))
    eight, four, odd = given[:3]
    assert eight % 8 == four % 4 == 0
    assert (four, odd) == (shifted["four"].data_ptr(), shifted["bytes"].data_ptr())  # these are not copied
    for key, value in shifted.items():
        assert torch.equal(rb[:][key], value)


@pytest.mark.parametrize("row_bytes", [300, 5_000, 40_001])
@pytest.mark.parametrize("fields", [1, 19])
def test_long_rows_and_many_fields(row_bytes, fields):
    both = pair(9, prioritized=False, batch_size=5)
    for n in (4, 7):
        data = {str(i): torch.randint(256, (n, row_bytes if i == 0 else i), dtype=torch.uint8) for i in range(fields)}
        for rb in both:
            rb.extend(TensorDict(data, [n]))
        check_equal(*both)
        check_batches(*both)


def test_nothing_to_draw():
    rb, _ = pair(50)
    rb.extend(steps_of(10))
    rb.update_priority(torch.arange(10), 0.0)
    rb.sample()
    with pytest.raises(NoSampleable, match="1 draws found no row"):
        rb.stats()


@pytest.mark.parametrize("storage", [ByKernels, LazyTensorStorage])
def test_rows_go_with_their_buffer(storage):
    """Nothing refers to the rows in a circle, so the device has their memory back at once."""
    rb = TensorDictReplayBuffer(
        storage=storage(20, device="meta" if storage is LazyTensorStorage else "cpu"), batch_size=4
    )
    rb.extend(numbers_of(9))
    gone = weakref.ref(rows_of(rb))
    gc.disable()
    try:
        del rb
        assert gone() is None
    finally:
        gc.enable()


# ---- launches ------------------------------------------------------------------------------------------------------------


def launches_of(rb, act):
    before = rows_of(rb).work.launches
    act()
    return rows_of(rb).work.launches - before


def test_launches():
    rb, _ = pair(1_000)
    rb.extend(steps_of(900))
    batch = rb.sample()
    assert launches_of(rb, rb.sample) == 1
    assert launches_of(rb, lambda: rb.extend(steps_of(300))) == 2
    assert launches_of(rb, lambda: rb.update_priority(batch["index"], torch.rand(64))) == 1
    uniform, _ = pair(1_000, prioritized=False)
    uniform.extend(steps_of(900))
    assert launches_of(uniform, uniform.sample) == 1


def test_priorities_of_the_device_are_taken_as_they_are():
    errors = torch.rand(3, device="meta", requires_grad=True)
    taken = as_priorities(errors, 3, lambda value: value, there=True)
    assert taken.dtype is torch.float32
    assert not taken.requires_grad


# ---- graphs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("n", "times"), [(3, 11), (50, 3)])
def test_a_lane_wraps_during_a_graph(monkeypatch, n, times, prioritized):
    rb, plain = pair(20, prioritized=prioritized)
    steps, error = steps_of(n), torch.rand(64)
    for it in (rb, plain):
        it.extend(steps_of(5))
        it.sample()

    def cycle():
        index = rb.extend(steps)
        batch = rb.sample()
        if prioritized:
            rb.sampler.priorities().update_there(batch["index"], error, batch["index_generation"])
        return [index, *batch.values()]

    graph = Graph(monkeypatch, state_of(rb.storage), cycle)
    drawn = []
    for turn in range(times):
        steps.copy_(steps_of(n, 100 * turn))
        error.copy_(torch.rand(64) + 0.5)
        graph.replay()
        expected = plain.extend(steps_of(n, 100 * turn))
        assert torch.equal(graph.result[0], expected)
        batch = dict(zip(rb.sample().keys(), graph.result[1:], strict=True))
        assert torch.equal(batch["b"][:, 0].long(), batch["a"])
        assert torch.equal(rb[:]["a"][batch["index"]], batch["a"])
        drawn.append(tuple(batch["index"].tolist()))
        if prioritized:
            leaves = torch.ones(20, dtype=torch.float64)
            leaves[batch["index"]] = error.double()
            known = rb.sampler.priorities().leaves(20)[batch["index"]]
            assert torch.equal(known, leaves[batch["index"]])
    assert len(set(drawn)) == times
    assert rb.write_count == plain.write_count
    assert torch.equal(rb["a"], plain["a"])
    assert torch.equal(rows_of(rb).numbers[:-1], rows_of(plain).numbers[:-1])


def test_captured_draws_pass_over_removed_rows(monkeypatch):
    rb, _ = pair(20, prioritized=False)
    rb.extend(steps_of(20))
    draw = Graph(monkeypatch, state_of(rb.storage), rb.sample)
    rb.remove(torch.arange(1, 20))
    for _ in range(3):
        draw.replay()
        assert draw.result["index"].tolist() == [0] * 64
    rb.empty()
    draw.replay()
    with pytest.raises(NoSampleable, match="1 draws found no row"):
        rb.stats()


def test_rows_of_the_cpu_have_no_kernels():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(steps_of(1))
    assert not isinstance(DeviceRows(rb.storage.store.schema, torch.device("cpu")).work, RowKernels)


@pytest.mark.parametrize("inner", [RandomSampler, by_priority])
@pytest.mark.parametrize("shape", [(2,), (7,), (3, 90)])
def test_next_observations_are_those_of_torch(monkeypatch, inner, shape):
    """Also in place of rows that have no next observation: half of them, here."""
    both = []
    for kernels in (False, True):
        monkeypatch.setattr(There, "kernels", kernels)
        both.append(following(12, inner=inner, finals=9))
        for first in (0, 6, 12):
            data = steps([False, True, False, True, True, False], first=first)
            for key in ("obs", ("next", "obs")):
                data[key] = data[key].sum(1).reshape(6, *[1] * len(shape)).repeat(1, *shape)
            both[-1].extend(data)
            both[-1].end_trajectory()
        if inner is by_priority:
            both[-1].update_priority(torch.arange(12), torch.arange(12).float())
    ours, theirs = (rb.sample(16, return_info=True)[1] for rb in both)
    assert torch.equal(ours["index"], theirs["index"])
    assert torch.equal(ours["next", "obs"], theirs["next", "obs"])
    assert both[1].storage.store.rows.work.launches == 3 * 2 + 1 + (inner is by_priority)
