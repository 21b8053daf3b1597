"""The contract of storages of one's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram._support.nested import map_tensors
from engram.buffer.replay_buffer import ReplayBuffer
from engram.samplers import PrioritizedSampler
from engram.storages import LazyTensorStorage, Storage, _structure, own
from engram.testing.contract import BufferContract, Contract, check, refuses, same
from engram.types import RowStorage

_CAPACITY = 12


class RowStorageContract(Contract):
    """What a buffer expects of a storage of one's own. Derive from it and override :meth:`make`."""

    def make(self, capacity: int) -> RowStorage:
        """A new, empty storage of that many rows."""
        raise NotImplementedError

    def reopened(self, storage: RowStorage) -> RowStorage | None:
        """Another object of the same rows, as a new process makes it; None: rows end with the object. ``storage`` is not used again."""
        del storage
        return None

    def _columns_of(self, storage: RowStorage) -> own.OwnColumns:
        """A storage, field by field."""
        made = own.OwnColumns(storage)
        made.take(_structure.Structure.of(self.rows(0, 1), batched=True, call="rows"))
        return made

    def _fields(self, first: int, n: int) -> list[torch.Tensor]:
        data = self.rows(first, n)
        check(_structure.leading_size(data, "rows") == n, f"expected {n} rows of rows()")
        structure = _structure.Structure.of(data, batched=True, call="rows")
        return [column.clone() for column in structure.flatten(data, n, "rows")]

    def _append(self, columns: own.OwnColumns, first: int, n: int) -> torch.Tensor:
        rows = columns.place(n)
        columns.write(rows, self._fields(first, n), append=True)
        return rows

    def _check_read(self, columns: own.OwnColumns, rows: Sequence[int], steps_there: Sequence[int], when: str) -> None:
        """Rows hold the steps with these numbers."""
        found = columns.read(torch.tensor(rows, device="cpu"))
        expected = [torch.cat(column) for column in zip(*(self._fields(step, 1) for step in steps_there), strict=True)]
        check(same(found, expected), f"expected rows {list(rows)} to hold what was written last {when}")

    # ---- what every one must do ----------------------------------------------------------------------------------------

    def test_follows_the_protocol(self) -> None:
        made = self.make(_CAPACITY)
        check(isinstance(made, RowStorage), "expected the methods of engram.RowStorage: extent, place, write, read")
        own.OwnColumns(made)  # raises for traits that are none

    def test_begins_without_rows(self) -> None:
        extent = self._columns_of(self.make(_CAPACITY)).extent()
        check(extent.capacity == _CAPACITY, f"expected a capacity of {_CAPACITY}, got {extent.capacity}")
        check(extent.filled == (0,), f"expected no rows at first, got {extent.filled[0]}")

    def test_holds_what_was_written(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        held: dict[int, int] = {}
        step = 0
        for n in (1, 4, 5, 7, _CAPACITY, 3):
            before = columns.extent()
            rows = self._append(columns, step, n).tolist()
            held.update(zip(rows, range(step, step + n), strict=True))
            step += n
            filled = columns.extent().filled[0]
            check(filled == len(held), f"expected {len(held)} rows after write(), got {filled}")
            said = f"expected place() to leave no gap, got the rows {sorted(held)}"
            check(sorted(held) == list(range(len(held))), said)
            self._check_read(columns, list(held), list(held.values()), "after write()")
            if columns.in_order:
                expected = [(before.seam[0] + i) % _CAPACITY for i in range(n)]
                said = f"expected place() to go on at the seam, {expected}, as in_order declares, got {rows}"
                check(rows == expected, said)
                seam = (rows[-1] + 1) % _CAPACITY
                check(columns.extent().seam == (seam,), f"expected the seam {seam}, got {columns.extent().seam[0]}")

    def test_place_has_no_side_effects(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        self._append(columns, 0, 5)
        before, rows = columns.extent(), columns.place(4)
        check(columns.extent() == before, "expected place() to have no side effects: the write may not take place")
        check(torch.equal(columns.place(4), rows), "expected place() to return the same rows until they are written")

    def test_rows_are_replaced_by_number(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        self._append(columns, 0, 6)
        before = columns.extent()
        columns.write(torch.tensor([4, 1], device="cpu"), self._fields(50, 2), append=False)
        self._check_read(columns, range(6), [0, 51, 2, 3, 50, 5], "by number")
        check(columns.extent() == before, "expected extent() to stay when live rows are replaced with append=False")
        columns.write(torch.tensor([6, 7], device="cpu"), self._fields(60, 2), append=False)
        self._check_read(columns, [6, 7, 0], [60, 61, 0], "by number")
        after = columns.extent()
        said = f"expected write(append=False) of the rows after the live ones to make them live, 8 in all, got {after.filled[0]}"
        check(after.filled == (8,), said)
        check(after.seam == before.seam or not columns.in_order, "expected the seam to stay with append=False")

    def test_rows_are_read_in_any_order(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        self._append(columns, 0, 8)
        self._check_read(columns, [7, 0, 0, 3, 7], [7, 0, 0, 3, 7], "in the order that was asked for")

    def test_what_is_read_is_new_memory(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        self._append(columns, 0, 8)
        for column in columns.read(torch.arange(8, device="cpu")):
            column.zero_()
        self._check_read(columns, range(8), range(8), "after what read() returned was changed: return new memory")

    def test_what_is_written_is_copied(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        given = self._fields(0, 8)
        columns.write(columns.place(8), given, append=True)
        for column in given:
            column.zero_()
        self._check_read(columns, range(8), range(8), "after what write() was given was changed: copy it")

    def test_empty_forgets_all(self) -> None:
        columns = self._columns_of(self.make(_CAPACITY))
        if refuses(lambda: columns.check_empties("empty")):
            return
        self._append(columns, 0, 8)
        columns.empty("empty")
        extent = columns.extent()
        check(extent.filled == (0,), f"expected no rows after empty(), got {extent.filled[0]}")
        check(extent.seam == (0,) or not columns.in_order, f"expected the seam 0 after empty(), got {extent.seam[0]}")
        self._append(columns, 100, 3)
        self._check_read(columns, range(3), range(100, 103), "after empty()")

    def test_rows_are_there_when_it_is_opened_again(self) -> None:
        for n in (5, 5 + _CAPACITY):
            made = self.make(_CAPACITY)
            columns = self._columns_of(made)
            rows = [row for first in range(0, n, 5) for row in self._append(columns, first, min(5, n - first)).tolist()]
            held = dict(zip(rows, range(n), strict=True))
            before = columns.extent()
            other = self.reopened(made)
            if other is None:
                return
            again = self._columns_of(other)
            check(again.extent() == before, f"expected {before} when it is opened again, got {again.extent()}")
            self._check_read(again, list(held), list(held.values()), "when it is opened again")

    def test_a_buffer_does_as_with_rows_in_memory(self) -> None:
        """The same writes, edits, draws and priorities as in a LazyTensorStorage, from the same seed."""
        if not self._columns_of(self.make(_CAPACITY)).in_order:
            return
        found = []
        for storage in (self.make(_CAPACITY), LazyTensorStorage(_CAPACITY)):
            sampler = PrioritizedSampler(_CAPACITY, alpha=0.7, beta=0.5)
            generator = torch.Generator().manual_seed(7)
            rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, generator=generator)
            seen: list[object] = []
            for first, n in ((0, 5), (5, 5), (10, 5), (15, 20), (35, 5), (40, 5)):  # once more rows than it holds
                seen.append(rb.extend(self.rows(first, n)))
                batch, info = rb.sample(return_info=True)
                seen.append((batch, info["index"]))
                rb.update_priority(info["index"], torch.arange(8, device="cpu") + 0.5)
                rb[1] = rb[0]
                seen.append([len(rb), rb[0], rb[-1], map_tensors(rb[:], torch.clone)])
            found.append(seen)
        check(same(*found), "expected rows and draws as with a LazyTensorStorage")


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
