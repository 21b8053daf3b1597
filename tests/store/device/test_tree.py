"""The sum tree of a device beside plain sums and cumulative sums."""

import pytest
import torch

from engram.store.device.row_operations import SumTree

CPU = torch.device("cpu")
SIZES = [1, 2, 127, 128, 129, 5_000, 40_000, 300_000]


def tree_of(leaves):
    tree = SumTree(len(leaves), CPU)
    tree.put(torch.arange(len(leaves)), leaves)
    return tree


def some(n, seed=0):
    random = torch.Generator().manual_seed(seed)
    leaves = torch.rand(n, generator=random, dtype=torch.float64) ** 4
    leaves[torch.rand(n, generator=random) < 0.3] = 0.0
    leaves[n // 2] = 1.5
    return leaves


def check(tree, leaves):
    assert torch.equal(tree.leaves[: len(leaves)], leaves)
    assert not tree.leaves[len(leaves) :].any()
    for below, above in zip(tree.sums, tree.sums[1:], strict=False):
        assert torch.allclose(below.view(-1, 128).sum(1), above[: len(below) // 128], rtol=1e-12, atol=0)
        assert not above[len(below) // 128 :].any()
    positive = leaves[leaves > 0]
    assert float(tree.least()) == (float(positive.min()) if len(positive) else torch.inf)
    assert float(tree.total()) == pytest.approx(float(leaves.sum()), rel=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_sums_follow_every_change(n):
    leaves, random = some(n), torch.Generator().manual_seed(1)
    tree = tree_of(leaves)
    check(tree, leaves)
    for _ in range(5):
        rows = torch.randint(n, (min(n, 60),), generator=random)
        new = torch.rand(n, generator=random, dtype=torch.float64)[rows]  # equal where a row is named twice
        leaves[rows] = new
        tree.put(rows, new)
        check(tree, leaves)
        start = int(torch.randint(n, (), generator=random))
        stop = start + int(torch.randint(n - start, (), generator=random)) + 1
        leaves[start:stop] = 0.25
        tree.put(torch.arange(start, stop), torch.tensor(0.25, dtype=torch.float64))
        check(tree, leaves)
    tree.put(torch.full((3,), tree.spare), torch.zeros(3, dtype=torch.float64))
    check(tree, leaves)


@pytest.mark.parametrize("n", SIZES)
def test_draws_are_those_of_the_sum(n):
    leaves = some(n)
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows, mass = tree_of(leaves).draw(u)
    assert torch.equal(mass, leaves[rows])
    assert (mass > 0).all()
    ends = leaves.cumsum(0)
    x = u * ends[-1]
    # The intervals of the rows hold the numbers, but for rounding.
    assert (x <= ends[rows] + 1e-9 * ends[-1]).all()
    assert (x >= ends[rows] - leaves[rows] - 1e-9 * ends[-1]).all()


@pytest.mark.parametrize("place", [0, 127, 128, 4_999])
def test_one_leaf_above_zero_is_always_drawn(place):
    leaves = torch.zeros(5_000, dtype=torch.float64)
    leaves[place] = 1e-200
    u = torch.cat([torch.rand(1_000, dtype=torch.float64), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)])
    rows, mass = tree_of(leaves).draw(u)
    assert set(rows.tolist()) == {place}
    assert set(mass.tolist()) == {1e-200}


def test_the_largest_and_the_smallest_number():
    leaves = some(40_000)
    rows, mass = tree_of(leaves).draw(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    positive = leaves.nonzero().flatten()
    assert rows.tolist() == [int(positive[0]), int(positive[-1])]
    assert (mass > 0).all()


def test_nothing_to_draw():
    rows, mass = SumTree(300, CPU).draw(torch.rand(5, dtype=torch.float64))
    assert not mass.any()
    assert ((rows >= 0) & (rows < 512)).all()


def test_a_million_draws_have_the_distribution():
    leaves = some(1_000, seed=5)
    tree, random, count = tree_of(leaves), torch.Generator().manual_seed(7), torch.zeros(1_000, dtype=torch.float64)
    for _ in range(100):
        rows = tree.draw(torch.rand(10_000, generator=random, dtype=torch.float64))[0]
        count += torch.bincount(rows, minlength=1_000)
    expected = leaves / leaves.sum() * 1e6
    often = expected > 20
    chi = ((count - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert float(chi) < freedom + 5 * (2 * freedom) ** 0.5
    assert not count[leaves == 0].any()
