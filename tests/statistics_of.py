"""Tests of distributions, without scipy."""

import math


def chi_square(observed, expected):
    """Pearson's statistic of counts against expected counts."""
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


def chi_square_limit(freedom, deviations=3.719):
    """What the statistic exceeds with probability 1e-4 by chance (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + deviations * math.sqrt(spread)) ** 3


def assert_uniform(counts):
    """Counts of equally likely outcomes."""
    counts = list(counts)
    expected = sum(counts) / len(counts)
    assert expected >= 5, "too few draws to say anything"
    if len(counts) > 1:
        statistic = chi_square(counts, [expected] * len(counts))
        assert statistic < chi_square_limit(len(counts) - 1), counts


def assert_proportional(counts, weights):
    """Counts of outcomes whose probabilities are as the weights; of one with weight zero there is none."""
    counts, weights = [float(c) for c in counts], [float(w) for w in weights]
    expected = [sum(counts) * w / sum(weights) for w in weights]
    assert all(c == 0 for c, e in zip(counts, expected, strict=True) if e == 0), "an impossible outcome came"
    pairs = [(c, e) for c, e in zip(counts, expected, strict=True) if e > 0]
    assert min(e for _, e in pairs) >= 5, "too few draws to say anything"
    if len(pairs) > 1:
        statistic = chi_square(*zip(*pairs, strict=True))
        assert statistic < chi_square_limit(len(pairs) - 1), counts


def counted(rb):
    """What a buffer counts: its statistics without rates and waits, which depend on the clock."""
    timed = ("_per_s", "_wait_ms_p50", "_wait_ms_p99")
    return {name: value for name, value in rb.stats().items() if not name.endswith(timed)}
