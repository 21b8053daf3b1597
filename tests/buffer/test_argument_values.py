"""Unusual values, in one table: what is refused, as what, without changing anything; and what is taken, as what."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PriorityError,
    RowError,
    TensorDictReplayBuffer,
)
from tests import stress

NAN, INF = math.nan, math.inf
TINY = 5e-324  # the smallest double there is
MOST = 1.7976931348623157e308  # the largest
CAPACITIES = {"private": [1, 3, 7, 8, 9, 63, 64, 65], "shared": [1, 3, 8, 65], "directory": [1, 3, 7, 64]}


def rows(first, n):
    number = torch.arange(first, first + n)
    return TensorDict({"a": number, "b": torch.stack([number, -number], 1).float()}, [n])


@pytest.fixture(scope="module", params=[(kind, n) for kind in CAPACITIES for n in CAPACITIES[kind]], ids=str)
def rb(request, tmp_path_factory):
    """A full buffer whose priorities are 1, 2, …"""
    kind, capacity = request.param
    folder = tmp_path_factory.mktemp("values")
    storage = LazyMemmapStorage(capacity, scratch_dir=folder) if kind == "directory" else LazyTensorStorage(capacity)
    made = TensorDictReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(capacity, 1.0, 1.0, 0.0), shared=kind == "shared"
    )
    made.extend(rows(0, capacity))
    made.update_priority(torch.arange(capacity), torch.arange(1.0, capacity + 1))
    yield made
    made.close()


def state(rb):
    """All that a refused call must leave as it is."""
    index = rb.sampler.priorities()
    everything = torch.arange(rb.storage.max_size)
    return (
        index.leaves(index.core.rows).tolist(),
        index.core.highest,
        rb.write_count,
        len(rb),
        rb.storage.extent().seam,
        rb.storage.tickets_of(everything).tolist(),
        rb[:]["a"].tolist(),
        rb[:]["b"].tolist(),
    )


def extended(**changes):
    """A batch of two rows, with something else in it."""
    return lambda rb: rb.extend(TensorDict({**rows(0, 2).to_dict(), **changes}, [2]))


def updated(priority, index=0):
    return lambda rb: rb.update_priority(index, priority)


REFUSED = {
    # priorities
    "NaN": (updated(NAN), PriorityError),
    "inf": (updated(INF), PriorityError),
    "-inf": (updated(-INF), PriorityError),
    "-1": (updated(-1.0), PriorityError),
    "the smallest below zero": (updated(-TINY), PriorityError),
    "1e308": (updated(1e308), PriorityError),
    "the largest": (updated(MOST), PriorityError),
    "inf in half precision": (updated(torch.tensor([INF], dtype=torch.float16)), PriorityError),
    "NaN in bfloat16": (updated(torch.tensor([NAN], dtype=torch.bfloat16)), PriorityError),
    "an int that is negative": (updated(torch.tensor([-(2**63)])), PriorityError),
    "a bad one behind a good one": (updated([2.0, NAN], [0, 0]), PriorityError),
    "a bad one for a row that is passed over": (updated([NAN], [-1]), PriorityError),
    "no number": (updated("high"), (TypeError, ValueError)),
    "None": (updated(None), (TypeError, ValueError, RuntimeError)),
    "complex": (updated(torch.tensor([1j])), TypeError),
    "two for one row": (updated([1.0, 2.0], [0]), RuntimeError),
    "two for three rows": (updated([1.0, 2.0], [0, 0, 0]), RuntimeError),
    # rows of priorities
    "row -2": (updated(1.0, -2), RowError),
    "row 2**31": (updated(1.0, 2**31), RowError),
    "row 2**63 - 1": (updated(1.0, 2**63 - 1), RowError),
    "row -2**63": (updated(1.0, -(2**63)), RowError),
    "row 2**63": (updated(1.0, 2**63), RowError),
    "rows 2**63": (updated([1.0], [2**63]), RowError),
    "row 2**64": (updated(1.0, 2**64), RowError),
    "a row to remove, 2**63": (lambda rb: rb.remove([2**63]), RowError),
    "row 2**64 - 1": (updated(1.0, torch.tensor([2**64 - 1], dtype=torch.uint64)), RowError),
    "the row behind the last": (lambda rb: rb.update_priority(rb.storage.max_size, 1.0), RowError),
    "a good row and a bad one": (updated([1.0, 1.0], [0, 2**31]), RowError),
    "bool rows": (updated(1.0, torch.tensor([True])), TypeError),
    "float rows": (updated(1.0, torch.tensor([0.0])), TypeError),
    "rows of floats of another library": (updated(1.0, np.array([0.0])), TypeError),
    "a float row": (updated(1.0, 0.0), TypeError),
    "rows that are names": (updated(1.0, "a"), TypeError),
    "a generation too many": (
        lambda rb: rb.update_priority([0], [1.0], generation=torch.tensor([0, 0])),
        RuntimeError,
    ),
    # reading and editing by number
    "rb[2**31]": (lambda rb: rb[2**31], IndexError),
    "rb[2**63 - 1]": (lambda rb: rb[2**63 - 1], IndexError),
    "rb[2**64]": (lambda rb: rb[2**64], IndexError),
    "rb[-2**63]": (lambda rb: rb[-(2**63)], IndexError),
    "rb[0.0]": (lambda rb: rb[0.0], (TypeError, IndexError)),
    "rb[[0.5]]": (lambda rb: rb[torch.tensor([0.5])], (TypeError, IndexError)),
    "rb[[2**31]]": (lambda rb: rb[[2**31]], IndexError),
    "rb[uint64 2**64 - 1]": (lambda rb: rb[torch.tensor([2**64 - 1], dtype=torch.uint64)], IndexError),
    "rb[['a']]": (lambda rb: rb[["a"]], (TypeError, KeyError)),
    "rb[mask of another length]": (
        lambda rb: rb[torch.ones(rb.storage.max_size + 1, dtype=torch.bool)],
        (IndexError, RuntimeError),
    ),
    "an edit outside": (lambda rb: rb.__setitem__([0, 2**31], rows(0, 2)), IndexError),
    "an edit with too many rows": (lambda rb: rb.__setitem__([0], rows(0, 2)), (RuntimeError, IndexError)),
    "an edit of another dtype": (
        lambda rb: rb.set_at_("a", torch.tensor([0.5]), [0]),
        (TypeError, RuntimeError),
    ),
    # rows
    "another dtype": (extended(a=torch.zeros(2)), (TypeError, RuntimeError)),
    "another shape": (extended(b=torch.zeros(2, 3)), RuntimeError),
    "a dimension more": (extended(b=torch.zeros(2, 2, 1)), RuntimeError),
    "a field more": (extended(c=torch.zeros(2)), (KeyError, RuntimeError)),
    "a field less": (lambda rb: rb.extend(rows(0, 2).exclude("b")), (KeyError, RuntimeError)),
    "no device to speak of": (
        lambda rb: rb.extend(TensorDict({"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, 2)}, [2]).to("meta")),
        (RuntimeError, NotImplementedError, TypeError),
    ),
    "no rows at all": (lambda rb: rb.extend(None), (TypeError, ValueError)),
    "lane 1 of 1": (lambda rb: rb.extend(rows(0, 2), lane=1), RowError),
    "lane -1": (lambda rb: rb.extend(rows(0, 2), lane=-1), RowError),
    "lane 2**63": (lambda rb: rb.extend(rows(0, 2), lane=2**63), RowError),
    "lane True": (lambda rb: rb.extend(rows(0, 2), lane=torch.tensor([True, False])), (TypeError, RowError)),
    "lane 0.0": (lambda rb: rb.extend(rows(0, 2), lane=0.0), TypeError),
    # batches
    "no batch size": (lambda rb: rb.sample(), (ValueError, RuntimeError)),
    "a batch of -1": (lambda rb: rb.sample(-1), (ValueError, RuntimeError)),
    "a batch of 2**62": (lambda rb: rb.sample(2**62), (ValueError, RuntimeError, MemoryError)),
    "a batch of 1.5": (lambda rb: rb.sample(1.5), (TypeError, ValueError)),
}  # fmt: skip


def test_refused_and_nothing_changed(rb):
    before = state(rb)
    for what, (call, error) in REFUSED.items():
        try:
            call(rb)
        except error:
            pass
        except Exception as other:
            raise AssertionError(f"{what}: {other!r}") from other
        else:
            pytest.fail(f"{what}: no error")
        assert state(rb) == before, what


TAKEN = {
    "0": (0.0, 0.0),
    "-0.0": (-0.0, 0.0),
    "denormal": (TINY, TINY),
    "the smallest normal": (2.2250738585072014e-308, 2.2250738585072014e-308),
    "1e200": (1e200, 1e200),
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "bool tensor": (torch.tensor([True]), 1.0),
    "numpy": (np.float32(2.5), 2.5),
    "half precision": (torch.tensor([0.5], dtype=torch.float16), 0.5),
    "bfloat16": (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
    "uint8": (torch.tensor([255], dtype=torch.uint8), 255.0),
    "int64": (torch.tensor([2**53]), 2.0**53),
    "a denormal of single precision": (torch.tensor([1e-45]), float(torch.tensor(1e-45))),
    "not contiguous": (torch.arange(4.0)[2::5], 2.0),
    "more dimensions": (torch.tensor([[1.0, 5.0, 2.0]]), 5.0),
    "with a gradient": (torch.tensor([2.0], requires_grad=True), 2.0),
}


def test_taken(rb):
    last = rb.storage.max_size - 1
    for what, (priority, leaf) in TAKEN.items():
        rb.update_priority([last], priority)
        leaves = stress.check_priorities(rb.sampler.priorities(), range(last + 1))
        assert leaves[last] == leaf, what
        assert leaves[:last].tolist() == [float(i + 1) for i in range(last)], what
        if leaf == 0 and last:
            assert last not in rb.sample(64)["index"]
    rb.update_priority([last], float(last + 1))


def test_rows_that_say_nothing_change_nothing(rb):
    before = state(rb)
    rb.update_priority(torch.tensor([], dtype=torch.int64), torch.tensor([]))
    rb.update_priority([-1], [2.0])
    rb.update_priority([-1, -1], 2.0)
    assert state(rb)[0] == before[0]
    assert state(rb)[2:] == before[2:]
    assert rb[torch.tensor([], dtype=torch.int64)].shape == (0,)


def test_of_a_row_named_twice_the_last_entry_counts(rb):
    last = rb.storage.max_size - 1
    rb.update_priority([last] * 5, [1.0, 2.0, 0.0, 1e200, float(last + 1)])
    assert stress.check_priorities(rb.sampler.priorities(), range(last + 1))[last] == last + 1
    before = rb[last]["a"].item()
    rb[[last] * 3] = TensorDict({"a": torch.tensor([8, 9, before]), "b": rb[[last] * 3]["b"]}, [3])
    assert rb[last]["a"] == before


def test_all_priorities_zero(rb):
    n = rb.storage.max_size
    rb.update_priority(torch.arange(n), 0.0)
    with pytest.raises(NoSampleable):
        rb.sample(2)
    rb.update_priority(torch.arange(n), -0.0)
    assert not rb.can_sample(2)
    rb.update_priority(n - 1, TINY)  # the sum is a denormal
    assert set(rb.sample(16)["index"].tolist()) == {n - 1}
    assert rb.sample(4)["priority_weight"].tolist() == [1.0] * 4
    rb.update_priority(torch.arange(n), torch.arange(1.0, n + 1))


def test_sums_do_not_overflow(rb):
    """The largest priority that is taken, in every row: sum and weights stay finite. One more is refused."""
    n = rb.storage.max_size
    low, high = 1.0, 1e308  # where refusal begins, to the last bit but a few
    for _ in range(60):
        middle = math.sqrt(low) * math.sqrt(high)
        try:
            rb.update_priority(0, middle)
            low = middle
        except PriorityError:
            high = middle
    rb.update_priority(torch.arange(n), low)
    index = rb.sampler.priorities()
    assert math.isfinite(index.core.total)
    assert index.core.total >= low
    batch = rb.sample(32)
    assert bool((batch["priority_weight"] == 1).all())
    rb.update_priority(0, TINY)  # beside the smallest there is
    assert bool(rb.sample(32)["priority_weight"].isfinite().all())
    stress.check_priorities(index, range(n))
    rb.update_priority(torch.arange(n), torch.arange(1.0, n + 1))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_batches_around_the_capacity(rb, times):
    """Of more rows than there are places the last ones stay."""
    n = rb.storage.max_size
    for size in {max(1, times * n - 1), times * n, times * n + 1}:
        source = torch.stack([rows(1000, size).to_tensordict(), rows(0, size)], 1)[:, 0]  # not contiguous
        written = rb.extend(source)
        assert len(written) == size
        held = rb[:]["a"]
        for row, number in list(zip(written.tolist(), source["a"].tolist(), strict=True))[-n:]:
            assert held[row] == number
    rb.extend(rows(0, (-rb.storage.extent().seam[0]) % n or n))
    rb.extend(rows(0, n))
    rb.update_priority(torch.arange(n), torch.arange(1.0, n + 1))
    assert len(rb) == n
