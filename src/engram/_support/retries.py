"""Repeats a read while writers move its rows."""

from __future__ import annotations

import time

from torch import Tensor

from engram._support import native
from engram.errors import WriterStalled

#: Tries without a pause between them.
TRIES_WITHOUT_PAUSE = 8


class Retries:
    """Counts the tries of one read: first some in a row, then one per millisecond, until the limit of waits is reached."""

    def __init__(self) -> None:
        self.count = 0
        self._limit = native.wait_limit()
        self._deadline = time.monotonic() + self._limit

    def again(self, rows: Tensor, moved: list[int], detail: str = "", call: str = "sample") -> None:
        """Call before each further try. ``moved``: places of the rows that moved; ``detail``: more on them, for the message.

        Raises ``WriterStalled``: the limit is reached.
        """
        self.count += 1
        if self.count > TRIES_WITHOUT_PAUSE:
            if time.monotonic() > self._deadline:
                raise WriterStalled(
                    f"{call}: row {int(rows[moved[0]])}{detail} moved at every try for {self._limit:g} s."
                )
            time.sleep(0.001)

    def key_of(self, key: int) -> int:
        """The key of draws in this try: other ones than in the tries before."""
        return (key + self.count * 0x9E3779B97F4A7C15) % (1 << 63)
