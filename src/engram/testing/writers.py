"""The contract of writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.storages import LazyTensorStorage, TensorStorage
from engram.testing.contract import BufferContract, check, refuses, same, steps
from engram.types import Writer

if TYPE_CHECKING:
    from tensordict import TensorDict

    from engram.buffer.replay_buffer import ReplayBuffer

_CAPACITY = 32


class WriterContract(BufferContract):
    """What a buffer expects of a writer. Derive from it and override :meth:`make`."""

    read_only = False
    """The writer refuses every write."""

    def make(self, capacity: int) -> Writer:
        """A new writer for a storage of that many rows."""
        raise NotImplementedError

    def rows(self, first: int, n: int) -> TensorDict:
        """``n`` rows to write. Each must say in ``"step"`` which one it is: ``first``, ``first + 1``, …"""
        return steps(first, n)

    def _buffer(self, *, full: bool = False) -> TensorDictReplayBuffer:
        storage = TensorStorage(self.rows(0, _CAPACITY)) if full else LazyTensorStorage(_CAPACITY)
        return TensorDictReplayBuffer(storage=storage, writer=self.make(_CAPACITY), batch_size=8)

    def _begun(self) -> TensorDictReplayBuffer | None:
        if self.read_only:
            return None
        rb = self._buffer()
        self._write(rb, 0, 12)
        return rb

    def _write(self, rb: ReplayBuffer, first: int, n: int) -> list[int]:
        """The rows that were written, -1 for a rejected one. Checks that they hold what was written."""
        data = self.rows(first, n)
        before = data.clone()
        rows = torch.as_tensor(rb.extend(data)).reshape(-1)
        check(same(before, data), "expected place() to leave the data alone")
        check(len(rows) == n, f"expected the row of each of {n} steps, -1 for a rejected one, got {rows.tolist()}")
        check(((rows >= -1) & (rows < _CAPACITY)).all(), f"expected rows in [0, {_CAPACITY}), got {rows.tolist()}")
        last = {row: step for step, row in enumerate(rows.tolist()) if row >= 0}
        for row, step in last.items():
            check(int(rb["step"][row]) == first + step, f"expected step {first + step} in row {row}")
        return [int(row) for row in rows]

    def _go_on(self, rb: ReplayBuffer) -> list[list[int]]:
        return [self._write(rb, first, 5) for first in (1000, 1005, 1010)]

    # ---- what every writer must do -------------------------------------------------------------------------------------

    def test_follows_the_protocol(self) -> None:
        check(isinstance(self.make(_CAPACITY), Writer), "expected the method of engram.types.Writer: place")

    def test_rows_hold_what_was_written(self) -> None:
        if self.read_only:
            return
        rb = self._buffer()
        for first in range(0, 3 * _CAPACITY, 8):
            self._write(rb, first, 8)
            check(0 < len(rb) <= _CAPACITY, f"expected at most {_CAPACITY} rows, got {len(rb)}")

    def test_a_refused_write_changes_nothing(self) -> None:
        rb = self._buffer(full=True)
        before = rb[:].clone()
        if self.read_only:
            check(refuses(lambda: rb.extend(self.rows(40, 4))), "expected an error for a write")
            check(refuses(lambda: rb.add(self.rows(40, 1)[0])), "expected an error for a write")
        wrong = self.rows(40, 4)
        wrong["step"] = wrong["step"].float()
        check(refuses(lambda: rb.extend(wrong)), "expected an error for a field of another dtype")
        check(same(before, rb[:].clone()), "expected rows as they were after a write that was refused")

    def test_a_place_that_is_not_used_has_no_effect(self) -> None:
        if self.read_only:
            return
        rb, twin = self._buffer(), self._buffer()
        for one in (rb, twin):
            self._write(one, 0, 8)
        rb.writer.place(rb.storage.extent(), 4, 0, self.rows(8, 4))
        check(
            self._go_on(rb) == self._go_on(twin),
            "expected place() to have no side effects: the write may not take place",
        )

    def test_starts_again_after_empty(self) -> None:
        if self.read_only:
            return
        rb, new = self._buffer(), self._buffer()
        self._write(rb, 0, 40)
        rb.empty()
        check(len(rb) == 0, f"expected no rows after empty(), got {len(rb)}")
        check(self._go_on(rb) == self._go_on(new), "expected rows as from a new writer after empty()")
