"""How much of a stress test an ordinary run does."""

import pytest

from tests import stress


@pytest.mark.parametrize(
    ("cases", "n", "kept"),
    [(6, 3, [0, 2, 5]), (36, 4, [0, 11, 23, 35]), (2, 1, [0]), (2, 5, [0, 1]), (1, 1, [0]), (3, 0, [])],
)
def test_a_sample_is_spread_evenly(cases, n, kept):
    assert stress.others(list(range(cases)), n) == [case for case in range(cases) if case not in kept]
