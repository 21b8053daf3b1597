"""The arithmetic of draws over several stores, against what one list of all rows gives."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram.remote.fleet import plans

KEYS = st.integers(0, (1 << 63) - 1)
LEFT = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@given(KEYS, st.lists(st.sampled_from([0.0, 1e-9, 1.0, 7.5]), min_size=1, max_size=6).filter(any), st.integers(1, 40))
def test_stores_without_mass_are_never_chosen(key, masses, n):
    found = plans.chosen(np.array(masses), plans.fractions([key], [n], 0))
    assert len(found) == n
    assert all(masses[store] > 0 for store in found)


@given(KEYS, LEFT, st.integers(1, 100))
def test_what_is_dealt_is_a_part_of_what_is_left(key, left, n):
    found = np.bincount(plans.dealt(key, 0, np.array(left), n), minlength=len(left))
    assert found.sum() == min(n, sum(left))
    assert (found <= left).all()


def test_dealing_is_a_random_order_of_all():
    """Place by place and jointly: the first two, against all orders of 3, 1 and 2."""
    left, seen = np.array([3, 1, 2]), np.zeros((3, 3))
    for key in range(6000):
        first, second = plans.dealt(key, 0, left, 2)
        seen[first, second] += 1
    ways = np.outer(left, left) - np.diag(left)
    expected = ways / ways.sum() * 6000
    chi = ((seen - expected)[ways > 0] ** 2 / expected[ways > 0]).sum()
    assert seen[1, 1] == 0
    assert chi < 30  # of 7 degrees of freedom


def test_so_many_rows_that_they_cannot_be_dealt_one_by_one():
    found = plans.dealt(3, 0, np.array([3 * 10**9, 10**9]), 4000)
    assert abs(int((found == 0).sum()) - 3000) < 5 * 28


@given(
    st.floats(0, 1),
    st.lists(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.floats(0.5, 2), min_size=4, max_size=4),
)
def test_factors_make_weights_those_of_the_real_probabilities(beta, leaves, lag):
    now, least = np.array([sum(them) for them in leaves]), np.array([min(them) for them in leaves])
    used = now * lag[: len(leaves)]
    likely = [np.array(them) / total * use / used.sum() for them, total, use in zip(leaves, now, used, strict=True)]
    smallest = min(them.min() for them in likely)
    for at, (them, chances) in enumerate(zip(leaves, likely, strict=True)):
        factor = plans.factor(beta, at, list(used), list(now), list(least))
        got = factor * (np.array(them) / min(them)) ** -beta
        np.testing.assert_allclose(got, (chances / smallest) ** -beta, rtol=1e-9)
        assert (got <= 1 + 1e-9).all()


@given(st.lists(st.integers(-1, (1 << 48) - 1), min_size=1), st.integers(0, 4000))
def test_numbers_of_rows_say_their_store(rows, store):
    found = plans.number(torch.tensor(rows), store)
    for row, number in zip(rows, found.tolist(), strict=True):
        assert number == -1 if row == -1 else (number >> 48, number & (1 << 48) - 1) == (store, row)


def test_keys_of_parts_are_all_different():
    keys = {plans.key_of(key, store, attempt) for key in range(5) for store in range(70) for attempt in range(5)}
    assert len(keys) == 5 * 70 * 5
    assert max(keys) < 1 << 63


def test_units_are_put_at_their_places():
    tensors = [torch.tensor([[30], [0]]), torch.tensor([[10], [20]])]
    assert plans.joined(tensors, torch.tensor([1, 2, 3, 0])).flatten().tolist() == [0, 10, 20, 30]
    assert plans.joined(tensors, torch.tensor([1, 0]), 2).tolist() == [[[10], [20]], [[30], [0]]]
    assert plans.joined(tensors[:1], None) is tensors[0]


def test_places_of_a_key_are_its_own_whatever_others_are_asked_for():
    together = plans.fractions([5, 6, 7], [300, 0, 200], 1)
    assert together.tolist() == [*plans.fractions([5], [300], 1), *plans.fractions([7], [200], 1)]
    assert together[:200].tolist() != plans.fractions([5], [200], 2).tolist()
    assert ((together >= 0) & (together < 1)).all()
    tenths = np.bincount((plans.fractions([9], [20_000], 0) * 10).astype(int), minlength=10)
    assert ((tenths - 2000) ** 2 / 2000).sum() < 40  # of 9 degrees of freedom
