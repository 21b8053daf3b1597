"""The contract of storages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.buffer.replay_buffer import ReplayBuffer
from engram.testing.contract import BufferContract, check, refuses, same

if TYPE_CHECKING:
    from engram.storages import Storage

_CAPACITY = 12


class StorageContract(BufferContract):
    """What a buffer expects of a storage. Derive from it and override :meth:`make`."""

    def make(self, capacity: int) -> Storage:
        """A new, empty storage of that many rows."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> object:
        """``n`` rows to write, each of which differs from all others."""
        return torch.arange(first, first + n)

    def _buffer(self, n: int = 0) -> ReplayBuffer:
        rb = ReplayBuffer(storage=self.make(_CAPACITY), batch_size=4)
        if n:
            rb.extend(self.rows(0, n))
        return rb

    def _begun(self) -> ReplayBuffer:
        return self._buffer(8)

    def _go_on(self, rb: ReplayBuffer) -> list[object]:
        held = [rb[row] for row in range(len(rb))]
        rb.extend(self.rows(8, 4))
        return [*held, *(rb[row] for row in range(len(rb)))]

    def _check_holds(self, rb: ReplayBuffer, first: int, n: int, where: str) -> None:
        """The rows, in order, are those that begin with ``first``."""
        check(len(rb) == n, f"expected {n} rows {where}, got {len(rb)}")
        other = ReplayBuffer(storage=self.make(_CAPACITY), batch_size=4)
        other.extend(self.rows(first, n))
        for row in range(n):
            check(same(rb[row], other[row]), f"expected row {row} to hold what was written {where}")

    # ---- what every storage must do ------------------------------------------------------------------------------------

    def test_holds_what_was_written(self) -> None:
        rb = self._buffer()
        check(len(rb) == 0, f"expected no rows at first, got {len(rb)}")
        rb.extend(self.rows(0, 5))
        self._check_holds(rb, 0, 5, "after one write")
        rb.extend(self.rows(5, 7))
        self._check_holds(rb, 0, _CAPACITY, "when it is full")

    def test_the_oldest_rows_are_overwritten(self) -> None:
        rb, other = self._buffer(_CAPACITY), self._buffer(_CAPACITY)
        rb.extend(self.rows(_CAPACITY, 5))
        check(len(rb) == _CAPACITY, f"expected {_CAPACITY} rows, got {len(rb)}")
        check(not same(rb[4], other[4]), "expected row 4 to be overwritten")
        check(same(rb[5], other[5]), "expected row 5 to stay")

    def test_rows_that_are_read_are_copies(self) -> None:
        rb = self._buffer(8)
        read = rb.sample()
        expected = [rb[row] for row in range(8)]
        if isinstance(read, torch.Tensor):
            read.zero_()
        check(all(same(rb[row], one) for row, one in enumerate(expected)), "expected a batch to be a copy")

    def test_rows_that_are_not_there_are_refused(self) -> None:
        rb = self._buffer(5)
        for row in (_CAPACITY, -_CAPACITY - 1):
            check(refuses(lambda row=row: rb[row]), f"expected an error for row {row} of {_CAPACITY}")  # type: ignore[misc]
        self._check_holds(rb, 0, 5, "after errors")

    def test_empty_forgets_all(self) -> None:
        rb = self._buffer(8)
        rb.empty()
        check(len(rb) == 0, f"expected no rows after empty(), got {len(rb)}")
        check(refuses(rb.sample), "expected an error for a draw after empty()")
        rb.extend(self.rows(100, 3))
        self._check_holds(rb, 100, 3, "after empty()")

    def test_a_row_can_be_assigned(self) -> None:
        rb, other = self._buffer(8), self._buffer(8)
        rb[2] = other[6]
        check(same(rb[2], other[6]), "expected row 2 to hold what was assigned")
        check(same(rb[3], other[3]), "expected row 3 to stay")
