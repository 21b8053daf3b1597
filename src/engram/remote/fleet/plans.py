"""The plan of a batch of several members, stores or buffers: who draws which of its units, by which key, and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch

from engram._support import native
from engram.store import ragged_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from tensordict import TensorDict
    from torch import Tensor

M = TypeVar("M")
Rows = TypeVar("Rows", bound="Tensor | TensorDict")

#: A row of a batch is ``store << SHIFT | row``.
SHIFT = 48
_WORD = (1 << 64) - 1
#: The number of a store's draws may not meet that of the choice among them.
_CHOICE = 1 << 62
#: Numbers that a double holds exactly lie below.
FINE = 1 << 53
#: Numbers that NumPy deals without replacement.
_MAX_DEALT_ROWS = 10**9


def number(rows: Tensor, store: int) -> Tensor:
    """Rows of a store as rows of the fleet; -1 stays."""
    return rows if store == 0 else torch.where(rows < 0, rows, rows | store << SHIFT)


def flattened(what: object, value: object, batch: torch.Size) -> object:
    """Values of rows ``[*batch]`` in one dimension; what no server takes as it is. Raises ``ValueError``: they are of other rows."""
    if not isinstance(value, list | tuple | np.ndarray | torch.Tensor):
        return value
    of_lists = isinstance(value, list | tuple) and len(batch) == 1
    values = [*value] if of_lists else torch.as_tensor(value)
    shape = values.shape[: len(batch)] if isinstance(values, torch.Tensor) else (len(values),)
    if shape != batch:
        raise ValueError(
            f"update_if_present: {what}: expected values of rows {list(batch)}, got {list(shape)}. Nothing is written."
        )
    return values.reshape(batch.numel(), *values.shape[len(batch) :]) if isinstance(values, torch.Tensor) else values


def picked(values: object, at: Tensor) -> object:
    """Those of some rows."""
    if isinstance(values, list):
        return [values[i] for i in at.tolist()]
    return values[at] if isinstance(values, torch.Tensor) else values


class Share(NamedTuple, Generic[M, Rows]):
    """The rows of a call that are of one member."""

    member: M
    #: Where they are among the rows of the call, int64 ``[k]``.
    at: Tensor
    rows: Rows

    def of(self, values: Tensor | None) -> Tensor | None:
        """Its part of values, one for each row of the call; None stays."""
        return None if values is None else _some(values, self.at)


def shares(members: Sequence[M], numbers: Tensor, rows: Rows) -> list[Share[M, Rows]]:
    """The share of each member that has rows. ``numbers``: of the member of each row, int64 ``[n]`` on the CPU; below 0: of none."""
    each = [number for number in sorted(set(numbers.tolist())) if number >= 0]
    places = [(numbers == number).nonzero().flatten() for number in each]
    return [Share(members[number], at, _some(rows, at)) for number, at in zip(each, places, strict=True)]


def _some(values: Rows, at: Tensor) -> Rows:
    """Some rows, wherever they lie."""
    return cast("Rows", values[at.to(values.device or "cpu")])


def key_of(key: int, store: int, attempt: int) -> int:
    """The key of a store's part of a batch: 63 bits, as of a local one, that follow from the batch's own."""
    mixed = (key + 0x9E3779B97F4A7C15 * (store * 0x10001 + attempt + 1)) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return (mixed ^ mixed >> 31) >> 1


def chosen(masses: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.int64]:
    """The member at each place in [0, 1) of the line on which members lie side by side, each as long as its mass."""
    ends = np.cumsum(masses)
    last = np.flatnonzero(masses)[-1]  # rounding must not choose one without mass
    return cast("NDArray[np.int64]", np.minimum(np.searchsorted(ends, at * ends[-1], side="right"), last))


def fractions(keys: Sequence[int], counts: Sequence[int], attempt: int) -> NDArray[np.float64]:
    """Places in [0, 1), so many of each key, one behind the other: others at each attempt."""
    numbers = native.empty_rows(sum(counts))
    parts = numbers.split([*counts])  # type: ignore[no-untyped-call]
    for key, some in zip(keys, parts, strict=True):
        if len(some):
            native.uniform(key_of(key, _CHOICE, attempt), FINE, some)
    return numbers.numpy() / FINE


def dealt(key: int, attempt: int, left: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """int64 ``[min(n, all)]``: the store of each in a random order of all that are left, so that counts are hypergeometric."""
    random = np.random.Generator(np.random.Philox(key=[key & _WORD, _CHOICE + attempt]))
    total = int(left.sum())
    n = min(n, total)
    if total < _MAX_DEALT_ROWS:
        counts = random.multivariate_hypergeometric(left, n, method="marginals")
    else:  # of so many, with replacement makes no difference that could be seen
        counts = np.minimum(random.multinomial(n, left / total), left)
    return random.permutation(np.repeat(np.arange(len(left)), counts))


def factor(beta: float, at: int, used: Sequence[float], now: Sequence[float], least: Sequence[float]) -> float:
    """By how much the weights of the rows of store ``at`` are to be multiplied.

    Rows were drawn with ``used / sum(used) * leaf / now``, and their store's weights are ``(leaf / least) ** -beta``. The products are over
    the smallest of all stores, ``(p / smallest p) ** -beta``, where ``p`` is how likely a row was.

    Args:
        beta: exponent.
        at: the store.
        used: masses that the stores were chosen by.
        now: masses when the rows were drawn.
        least: smallest leaves then, zero where there is none.
    """
    likely = [it * use / mass for it, use, mass in zip(least, used, now, strict=True) if it > 0 < use and mass > 0]
    own = least[at] * used[at] / now[at] if now[at] > 0 else 0.0
    return float((min(likely) / own) ** beta) if own > 0 else 1.0


def joined(parts: Sequence[Tensor], order: Tensor | None, units: int | None = None) -> Tensor:
    """Units of several parts, in an order. One part that is in order is not copied. ``units``: so many, of several rows each."""
    whole = ragged_rows.joined(parts)
    if (items := ragged_rows.items_in(whole)) is not None:  # whose units stay one behind the other
        if order is not None and units is not None:
            order = torch.arange(len(items), device="cpu").view(units, -1)[order].flatten()
        return whole if order is None else cast("Tensor", items[order])
    if units is not None:
        whole = whole.view(units, whole.shape[0] // units, *whole.shape[1:])
    return whole if order is None else whole.index_select(0, order)


def summed(each: Sequence[Mapping[str, float]], largest: Collection[str] = ()) -> dict[str, float]:
    """Numbers of all members together: sums, and of some names the largest."""
    names = dict.fromkeys(name for counts in each for name in counts)
    found = {name: [counts.get(name, 0) for counts in each] for name in names}
    return {name: max(values) if name in largest else sum(values) for name, values in found.items()}
