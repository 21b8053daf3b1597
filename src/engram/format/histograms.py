"""Histograms of what a description tells: made without NumPy, in JSON values."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bars of a histogram, at most.
BARS = 8
#: Values that are looked at, at most, where there may be very many.
MOST = 1 << 16
#: From this ratio of the largest to the smallest value on, each bar is as many times as wide as the one before.
_WIDE = 50.0


class Histogram(TypedDict):
    """Bar ``i`` counts values in ``[edges[i], edges[i + 1])``; the last bar also its upper edge."""

    edges: list[float]
    counts: list[int]


def histogram(values: Mapping[float, int], *, whole: bool = False) -> Histogram:
    """How often values of which size come.

    Args:
        values: how often each value comes, none negative.
        whole: values are whole numbers, and so are the edges.

    Returns:
        At most 8 bars. Without values there is none.

    >>> from engram.format.histograms import histogram
    >>> histogram({1: 3, 2: 5, 3: 2}, whole=True)
    {'edges': [1, 2, 3, 4], 'counts': [3, 5, 2]}
    """
    if not values:
        return {"edges": [], "counts": []}
    low, high = min(values), max(values)
    edges = _whole_edges(int(low), int(high)) if whole else _edges(low, high)
    counts = [0] * (len(edges) - 1)
    for value, number in values.items():
        counts[min(max(bisect.bisect_right(edges, value) - 1, 0), len(counts) - 1)] += number
    return {"edges": edges, "counts": counts}


def _edges(low: float, high: float) -> list[float]:
    if low == high:
        return [low, high]
    if low > 0 and high / low >= _WIDE:
        inner = [low * (high / low) ** (bar / BARS) for bar in range(1, BARS)]
    else:
        inner = [low + (high - low) * bar / BARS for bar in range(1, BARS)]
    return [low, *dict.fromkeys(edge for edge in inner if low < edge < high), high]


def _whole_edges(low: int, high: int) -> list[float]:
    """The last one is one more than the largest value."""
    if high + 1 - low <= BARS:
        return [*range(low, high + 2)]
    return [*dict.fromkeys([low, *(round(edge) for edge in _edges(low, high + 1)[1:-1]), high + 1])]
