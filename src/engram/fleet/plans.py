"""Which store draws which rows of a batch: the arithmetic, which knows no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

#: A row of a batch is ``store << SHIFT | row``.
SHIFT = 48
_WORD = (1 << 64) - 1
#: The number of a store's draws may not meet that of the choice among them.
_CHOICE = 1 << 62
#: Numbers that NumPy deals without replacement.
_MOST_DEALT = 10**9


def number(rows: Tensor, store: int) -> Tensor:
    """Rows of a store as rows of the fleet; -1 stays."""
    return rows if store == 0 else torch.where(rows < 0, rows, rows | store << SHIFT)


def key_of(key: int, store: int, attempt: int) -> int:
    """The key of a store's part of a batch: 63 bits, as of a local one, that follow from the batch's own."""
    mixed = (key + 0x9E3779B97F4A7C15 * (store * 0x10001 + attempt + 1)) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return (mixed ^ mixed >> 31) >> 1


def chosen(key: int, attempt: int, masses: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    """int64 ``[n]``: the store of each, drawn by their masses with replacement, so that counts are multinomial."""
    ends = np.cumsum(masses)
    at = np.searchsorted(ends, _random(key, attempt).random(n) * ends[-1], side="right")
    stores: NDArray[np.int64] = np.minimum(at, np.flatnonzero(masses)[-1])
    return stores


def dealt(key: int, attempt: int, left: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """int64 ``[min(n, all)]``: the store of each in a random order of all that are left, so that counts are hypergeometric."""
    random, total = _random(key, attempt), int(left.sum())
    n = min(n, total)
    if total < _MOST_DEALT:
        counts = random.multivariate_hypergeometric(left, n, method="marginals")
    else:  # of so many, with replacement makes no difference that could be seen
        counts = np.minimum(random.multinomial(n, left / total), left)
    return random.permutation(np.repeat(np.arange(len(left)), counts))


def factors(beta: float, used: NDArray[np.float64], now: NDArray[np.float64], least: NDArray[np.float64]) -> Tensor:
    """By how much the weights of each store's rows are to be multiplied, float64 ``[stores]``.

    Rows were drawn with ``used / sum(used) * leaf / now``, and their store's weights are ``(leaf / least) ** -beta``. The products are over
    the smallest of all stores, ``(p / smallest p) ** -beta``, where ``p`` is how likely a row was.

    Args:
        beta: exponent.
        used: masses that the stores were chosen by.
        now: masses when the rows were drawn.
        least: smallest leaves then, zero where there is none.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        smallest = np.where((used > 0) & (now > 0) & (least > 0), least * used / now, np.inf)
        made = np.where(np.isfinite(smallest), (smallest.min() / smallest) ** beta, 1.0)
    return torch.from_numpy(made)


def placed(parts: Sequence[tuple[NDArray[np.int64], Tensor]], units: int, shape: Sequence[int]) -> Tensor:
    """Units of several parts, each at its places: ``[units, *shape]``. A part that is all of it is not copied."""
    first = parts[0][1]
    if len(parts) == 1:
        order = parts[0][0]
        return first if (order[1:] > order[:-1]).all() else first[torch.from_numpy(np.argsort(order))]
    made = first.new_empty((units, *shape))
    for places, part in parts:
        made[torch.from_numpy(places)] = part
    return made


def _random(key: int, attempt: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[key & _WORD, _CHOICE + attempt]))
