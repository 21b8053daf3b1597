"""What is admitted is what the definition says, in exact numbers."""

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import LazyTensorStorage, RateLimited, ReplayBuffer, SamplesPerInsert

CAPACITY = 64


class Model:
    """The band, from the paper: inserts and samples are counted, and the error is what both make together."""

    def __init__(self, ratio, min_size, tolerance):
        self.ratio, self.min_size = Fraction(ratio), min_size
        self.middle = self.ratio * min_size
        self.half = Fraction(tolerance) * self.middle
        self.inserted = self.sampled = 0

    @property
    def error(self):
        return self.ratio * self.inserted - self.sampled

    def insert(self, n):
        largest = self.middle + max(self.half, self.ratio * n)
        if self.inserted >= self.min_size and self.error + self.ratio * n > largest:
            return False
        self.inserted += n
        return True

    def sample(self, n):
        smallest = self.middle - max(self.half, n)
        if self.inserted < self.min_size or self.error - n < smallest:
            return False
        self.sampled += n
        return True


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([0.125, 0.5, 1, 1.75, 8, 31]),
    min_size=st.integers(1, CAPACITY),
    tolerance=st.sampled_from([0, 0.125, 0.5, 1, 4]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 48)), max_size=60),
)
def test_what_is_admitted_is_what_the_definition_says(ratio, min_size, tolerance, steps):
    model = Model(ratio, min_size, tolerance)
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY)).limit(
        SamplesPerInsert(ratio, min_size=min_size, tolerance=tolerance)
    )
    for inserts, n in [(True, 1), *steps]:
        expected = model.insert(n) if inserts else model.sample(n)
        assert admitted(rb, n, inserts=inserts) == expected
        stats = rb.stats()
        assert (stats["limit_inserts"], stats["limit_samples"]) == (model.inserted, model.sampled)
        assert stats["limit_level"] == model.error
        if not expected:  # then the other side is admitted, whatever its size
            assert admitted(rb, 49 - n, inserts=not inserts)
            assert model.sample(49 - n) if inserts else model.insert(49 - n)


def admitted(rb, n, *, inserts):
    try:
        if inserts:
            rb.extend(torch.zeros(n, dtype=torch.int64), timeout=0)
        else:
            rb.sample(n, timeout=0)
    except RateLimited:
        return False
    return True
