"""Steps of a loop, written to lanes that were named once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Added = int | Tensor | None


class Appender:
    """Writes rows whose fields are keyword arguments, always to the same lanes: what :meth:`ReplayBuffer.appender` returns.

    Holds the buffer. Several may write at once, from several threads too.

    >>> import numpy as np
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, lanes=2))
    >>> first = rb.appender(lane=0)
    >>> first.add(obs=np.zeros(3), action=1, reward=0.5)
    0
    >>> rb.appender(lane="each").extend(obs=np.ones((2, 3)), action=[0, 1], reward=[0.0, 1.0])
    tensor([ 1, 50])
    """

    __slots__ = ("_add", "_extend", "lane")

    def __init__(self, add: Callable[..., Added], extend: Callable[..., Tensor], lane: object) -> None:
        self._add, self._extend = add, extend
        #: Where rows go: an int, int64 ``[n]``, or ``"each"``.
        self.lane = lane

    def add(self, *row: object, **fields: object) -> Added:
        """Write one row, as :meth:`ReplayBuffer.add` of a dict. Nested fields are dicts: ``next={"obs": …}``.

        Raises: as :meth:`ReplayBuffer.add`. TypeError: a ``row`` by position.
        """
        if row:
            raise _positional("add", row)
        return self._add(fields, lane=self.lane)

    def extend(self, *rows: object, **fields: object) -> Tensor:
        """Write a batch of rows, as :meth:`ReplayBuffer.extend` of a dict. Raises: as that, and as :meth:`add`."""
        if rows:
            raise _positional("extend", rows)
        return self._extend(fields, lane=self.lane)


def _positional(call: str, given: tuple[object, ...]) -> TypeError:
    return TypeError(
        f"appender.{call}: expected fields by keyword, {call}(obs=…, action=…), got a {type(given[0]).__name__}. A dict goes in as "
        f"{call}(**row), other rows through rb.{call}(row, lane=…)."
    )
