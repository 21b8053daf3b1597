"""What the chain and its twin draw is what the host draws with the same key."""

import pytest
import torch

from engram.store.device.chain import Chain, Layout, columns_of, tree_at
from engram.types import WritePlan
from tests import stress
from tests.store.device.stores import (
    assert_as_prioritized,
    assert_as_uniform,
    assert_same,
    content,
    filled,
    prioritized,
    remove,
)
from tests.store.device.twin import Twin, high_product, random_bits

KEYS = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
GEOMETRIES = [
    (1, 1, None),
    (2, 1, [1]),
    (9, 1, None),
    (100, 1, [37]),
    (100_000, 1, [77_777]),
    (100_000, 1, None),
    (12, 4, [3, 0, 1, 2]),
    (12, 4, None),
    (6, 3, [0, 0, 1]),
    (64, 64, [lane % 2 for lane in range(64)]),
    (640, 64, [lane % 11 for lane in range(64)]),
    (99_968, 64, [lane * 24 for lane in range(64)]),
]


@pytest.mark.parametrize("of", [Chain, Twin])
@pytest.mark.parametrize(("capacity", "lanes", "rows"), GEOMETRIES)
def test_uniform_draws_are_the_hosts(of, capacity, lanes, rows):
    store = filled(capacity, lanes, [("int64", ())], rows)
    chain = Chain(columns_of(store), 12, "cpu", rows_per_program=16) if of is Chain else Twin(store, 16, "cpu")
    for key in KEYS[4:6] if of is Chain else KEYS:
        assert_as_uniform(chain.run(key), store, key)


@pytest.mark.parametrize("key", KEYS)
def test_one_program_a_row_draws_the_same(key):
    store = filled(30, 3, rows=[10, 3, 0])
    assert_as_uniform(Chain(columns_of(store), 5, "cpu").run(key), store, key)


def test_full_lanes_need_no_look_at_them():
    store = filled(12, 4)
    chain = Chain(columns_of(store), 6, "cpu", full=True, rows_per_program=8)
    assert_as_uniform(chain.run(9), store, 9)
    assert chain.launches == 3


def test_lanes_that_wrapped_and_began_again():
    store = filled(12, 4)
    for n in (1, 2, 3):
        store.empty(keep_write_count=False)
        for lane in range(n):
            store.write(WritePlan(lane=lane), content(store, torch.arange(2 * n)), 2 * n)
        assert_as_uniform(Chain(columns_of(store), 8, "cpu", rows_per_program=8).run(n), store, n)
        assert_as_uniform(Twin(store, 8, "cpu").run(n), store, n)


@pytest.mark.parametrize("of", [Chain, Twin])
@pytest.mark.parametrize(("capacity", "lanes"), [(20, 1), (20, 4)])
def test_void_rows_are_passed_over_as_by_the_host(of, capacity, lanes):
    store = filled(capacity, lanes)
    gone = [0, 3, 4, 7, 8, 12, 19, 15, 16, 2]
    remove(store, gone)
    assert store.core.void_rows == len(gone)
    chain = Chain(columns_of(store), 12, "cpu", rows_per_program=16) if of is Chain else Twin(store, 16, "cpu")
    for key in KEYS[:3]:
        batch = chain.run(key)
        assert_as_uniform(batch, store, key)
        assert not set(batch.rows.tolist()) & set(gone)
    assert (chain.counters[2] if of is Chain else chain.redraws) > 0


def test_edited_rows_keep_the_numbers_of_their_writes():
    store = filled(10)
    edited = torch.tensor([1, 2, 3])
    store.edit(edited, range(4), content(store, edited + 500))
    assert_as_uniform(Chain(columns_of(store), 12, "cpu", rows_per_program=16).run(3), store, 3)
    assert_as_uniform(Twin(store, 12, "cpu").run(3), store, 3)


@pytest.mark.parametrize("of", [Chain, Twin])
@pytest.mark.parametrize("capacity", [1, 8, 9, 64, 65, 700, 100_000])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_prioritized_draws_are_the_hosts(of, capacity, zeros):
    store = filled(capacity, 1, [("int64", ())], [max(1, capacity * 3 // 4)])
    index = prioritized(store, zeros=zeros if capacity > 8 else 0.0)
    at = columns_of(store, priorities=index)
    chain = (
        Chain(at, 12, "cpu", kind="prioritized", rows_per_program=16)
        if of is Chain
        else Twin(store, 32, "cpu", kind="prioritized", priorities=index)
    )
    for key in KEYS[5:6] if of is Chain else KEYS:
        assert_as_prioritized(chain.run(key), store, index, key)


def test_one_program_a_row_descends_the_same():
    store = filled(600, 1, [("int64", ())])
    index = prioritized(store, zeros=0.3)
    chain = Chain(columns_of(store, priorities=index), 4, "cpu", kind="prioritized")
    assert_as_prioritized(chain.run(5), store, index, 5)
    assert chain.launches == 3


@pytest.mark.stress
@pytest.mark.timeout(stress.LIMIT_S)
def test_many_prioritized_draws_are_the_hosts():
    store = filled(100_000, 1, [("int64", ())])
    index = prioritized(store, zeros=0.1)
    twin = Twin(store, 4096, "cpu", kind="prioritized", priorities=index)
    for key in range(stress.size(4, 1000)):
        assert_as_prioritized(twin.run(key), store, index, key)
    chain = Chain(columns_of(store, priorities=index), 1024, "cpu", kind="prioritized", rows_per_program=1024)
    for key in range(stress.size(0, 30)):
        assert_as_prioritized(chain.run(key), store, index, key)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_follow_beta_as_it_is_now(beta):
    store = filled(50, 1, [("int64", ())])
    index = prioritized(store, beta=0.9)
    chain = Chain(columns_of(store, priorities=index), 16, "cpu", kind="prioritized", rows_per_program=16)
    index.core.beta = beta
    assert_as_prioritized(chain.run(1), store, index, 1)
    assert beta or chain.run(1).weights.tolist() == [1.0] * 16


def test_levels_are_the_trees():
    assert tree_at(0, 1) == ((4096, 4160), (1, 1), 4224, 40)
    assert tree_at(64, 9) == ((4160, 4288, 4352), (9, 2, 1), 4480, 104)
    assert tree_at(0, 10**6).sizes == (10**6, 125_000, 15_625, 1954, 245, 31, 4, 1)


@pytest.mark.parametrize("of", [Chain, Twin])
def test_ranks_of_an_epoch(of):
    store = filled(12, 3, rows=[2, 4, 3])
    ranks = torch.tensor([0, 8, 1, 2, 3, 7])
    chain = (
        Chain(columns_of(store), 6, "cpu", kind="permuted", rows_per_program=8)
        if of is Chain
        else Twin(store, 6, "cpu", kind="permuted")
    )
    batch = chain.run(ranks=ranks)
    assert batch.rows.tolist() == [0, 10, 1, 4, 5, 9]
    assert_same(batch, store.read(batch.rows)[0])
    remove(store, [10, 4])
    assert chain.run(ranks=ranks).rows.tolist() == [0, 0, 1, 5, 5, 9], "the next row, as by the host"
    outside = chain.run(ranks=torch.tensor([0, 9, -1, 1, 10**12, 0]))
    assert outside.valid.all()
    assert set(outside.rows.tolist()) <= {0, 1}


def test_a_batch_of_a_given_key_and_of_the_counter():
    """Self-counting draws follow from the seed and the batch's number."""
    store = filled(1000, 1, [("int64", ())])
    seed = 2**63 + 12345
    chain = Chain(columns_of(store), 8, "cpu", seed=seed, rows_per_program=8)
    for number in range(3):
        signed = torch.tensor(seed - 2**64)
        key = int(random_bits(signed, torch.tensor(number), torch.tensor(0))) % 2**64
        assert_as_uniform(chain.run(), store, key)
    assert int(chain.counters[0]) == 3


def test_commands_of_a_ring():
    store = filled(50, 5)
    at = columns_of(store)
    layout = Layout(at.fields, 4, weighted=False)
    blocks = [layout.empty("cpu") for _ in range(3)]
    commands = torch.zeros(3, 8, dtype=torch.int64)
    chain = Chain(at, 4, "cpu", commands=commands.data_ptr(), slots=3, rows_per_program=4)
    for number in range(5):
        commands[number % 3, :2] = torch.tensor([77 + number, blocks[number % 3].data_ptr()])
        chain.launch()
        assert_as_uniform(layout.views(blocks[number % 3]), store, 77 + number)
    assert chain.launches == 5 * 4


@pytest.mark.parametrize("n", [1, 7, 2**31 + 5, 2**40, 2**62 - 1])
def test_products_of_128_bits(n):
    bits = torch.randint(-(2**63), 2**63 - 1, (1000,))
    expected = [(x % 2**64) * n >> 64 for x in bits.tolist()]
    assert high_product(bits, torch.tensor(n)).tolist() == expected


def chi_squared(rows, shares):
    counts = torch.bincount(rows, minlength=len(shares)).double()
    expected = shares * len(rows)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize("of", [Chain, Twin])
def test_draws_are_distributed_as_they_must_be(of, kind):
    """10^5 draws: chi² of 99 degrees of freedom is above 160 in one of 10,000 cases; keys are fixed."""
    store = filled(100, 1, [("uint8", ())])
    index = prioritized(store)
    leaves = index.leaves(100)
    shares = torch.full((100,), 0.01, dtype=torch.float64) if kind == "uniform" else leaves / leaves.sum()
    n = 100_000
    if of is Twin:
        rows = Twin(store, n, "cpu", kind=kind, priorities=index).run(11).rows
    else:  # the rows that draw() chose: no program a row is run for those
        chain = Chain(columns_of(store, priorities=index), n, "cpu", kind=kind, rows_per_program=8192)
        launch = chain._launch
        chain._launch = lambda name, *a, **k: launch(name, *a, **k) if name == "draw" else None
        chain.run(11)
        rows = chain._state[72:][:n]
        assert torch.equal(rows, Twin(store, n, "cpu", kind=kind, priorities=index).run(11).rows)
    assert chi_squared(rows, shares) < 160
