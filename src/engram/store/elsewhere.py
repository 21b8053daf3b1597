"""A store whose rows lie in an object of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from engram.format.schema import Schema
from engram.store.device.store import HostedStore
from engram.store.memory import as_rows, new_control_memory, private_field, refuse_ragged, torch_dtype
from engram.store.store import Store, StoreState
from engram.types import Extent, RowsTarget, Write, WritePlan


class Columns(Protocol):
    """The rows of such an object, field by field."""

    #: Its class, for messages; and whether its rows are a ring in the order of writing.
    name: str
    in_order: bool

    def extent(self) -> Extent:
        """What it says is live."""

    def place(self, n: int) -> torch.Tensor:
        """The rows that the next ``n`` go to."""

    def write(self, rows: torch.Tensor, columns: Sequence[torch.Tensor], *, append: bool) -> None:
        """Replace rows, each of which is named once."""

    def read(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Live rows, one new tensor per field."""

    def empty(self, call: str) -> None:
        """Forget all rows. Raises as :meth:`check_empties`."""

    def check_empties(self, call: str) -> None:
        """Raise ``RuntimeError`` if it cannot forget its rows."""


#: Rows that are read or written at once where all are.
_AT_ONCE = 4096


class ForeignStore(HostedStore):
    """Rows in an object of the user's own; tickets, cursors and indexes stay here.

    Calls of the object never overlap: the lock that orders reads and writes is held around each.
    """

    def __init__(self, schema: Schema, columns: Columns) -> None:
        refuse_ragged(schema, columns.name, "Use LazyTensorStorage or LazyMemmapStorage")
        self._columns, self.in_order = columns, columns.in_order
        super().__init__(schema, (), *new_control_memory(schema))

    @property
    def place(self) -> str:
        return self._columns.name

    def take_extent(self, extent: Extent) -> None:
        """Make the rows live that the object holds. They get tickets in the order in which a ring would have written them."""
        live, seam = extent.filled[0], extent.seam[0]
        if not live:
            return
        position = seam if live < self.capacity else live + seam
        age = (torch.arange(live, device="cpu") - (seam if live == self.capacity else 0)) % self.capacity
        numbers = torch.zeros(self.capacity, dtype=torch.int64, device="cpu")
        numbers[:live] = age + 1
        lanes = torch.tensor([[position, live, 0, 0]], device="cpu")
        super().replace(StoreState(lanes, numbers, live + 1, live), lambda _: None)

    # ---- all rows ------------------------------------------------------------------------------------------------------

    def _pieces(self, n: int) -> Iterator[torch.Tensor]:
        for first in range(0, n, _AT_ONCE):
            yield torch.arange(first, min(first + _AT_ONCE, n), device="cpu")

    def first_rows(self, n: int) -> list[torch.Tensor]:
        """The first ``n`` rows of every field, copied."""
        with self._lock:
            pieces = [self._columns.read(rows) for rows in self._pieces(n)]
        fields = self.schema.fields
        empty = [torch.empty((0, *field.shape), dtype=torch_dtype(field), device="cpu") for field in fields]
        return [torch.cat(column) for column in zip(*(pieces or [empty]), strict=True)]

    def on_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        with self._lock:
            new = [number for number in numbers if number not in self._copies]
            copies = [private_field(self.schema.fields[number], self.capacity) for number in new]
            for rows in self._pieces(self.core.extent()[0][0] if new else 0):
                found = self._columns.read(rows)
                for number, copy in zip(new, copies, strict=True):
                    copy[rows] = found[number]
            for number, copy in zip(new, copies, strict=True):
                self.core.add_field(copy.data_ptr(), self.schema.fields[number].row_bytes)
                self._copies[number] = copy
            return super().on_host(numbers)

    def refilled(self) -> None:
        """The copies are filled where the rows are."""

    def replace(self, state: StoreState, fill: Callable[[RowsTarget], object]) -> None:
        used = int(state.lanes[0, 1])
        if not bool((state.numbers[:used] > 0).all()):
            raise ValueError("replace: expected a state without rows that hold nothing between others.")
        tensors = [private_field(field, self.capacity) for field in self.schema.fields]
        fill(RowsTarget(tensors))
        seam = int(state.lanes[0, 0]) % self.capacity

        def pour(_: RowsTarget) -> None:
            self._columns.empty("load")
            try:
                for append, n in ((False, used), (True, min(seam, used) if self.in_order else 0)):
                    for rows in self._pieces(n):
                        self._columns.write(rows, [tensor[rows] for tensor in tensors], append=append)
            except BaseException:
                self._columns.empty("load")
                raise
            for number, copy in self._copies.items():
                copy.copy_(tensors[number])

        self._columns.check_empties("load")
        with self._lock:
            super().replace(state, pour)

    def empty(self, *, keep_write_count: bool) -> None:
        with self._lock:
            self._columns.empty("empty")
            super().empty(keep_write_count=keep_write_count)

    # ---- writing ---------------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, columns: Sequence[torch.Tensor], n: int) -> Write:
        fields = self.schema.fields
        columns = [column.reshape(n, *field.shape) for column, field in zip(columns, fields, strict=True)]
        with self._lock:
            self._check_extent()
            rows = self._placed(n) if plan.rows is None else as_rows(plan.rows, "write")
            kept = columns if plan.kept is None else [column[plan.kept] for column in columns]
            self._check_rows(rows, "write" if plan.rows is not None else f"{self._columns.name}.place")
            if len(rows):
                self._put_columns(rows, kept, append=plan.rows is None)
            if plan.rows is None and not self.in_order:
                plan = WritePlan(rows=rows)
            which, copied = self._for_core(self._which, columns)
            return self._write(plan, n, which, tuple(map(torch.Tensor.data_ptr, copied)))

    def edit(self, rows: torch.Tensor, which: Sequence[int], columns: Sequence[torch.Tensor]) -> Write:
        with self._lock:
            live = self.core.extent()[0][0]
            if len(rows) and int(rows.min()) >= 0 and int(rows.max()) < live:  # else the core says which is not live
                self._put(rows, which, columns)
            return Store.edit(self, rows, *self._for_core(which, columns))

    def _placed(self, n: int) -> torch.Tensor:
        """Where ``n`` rows go that no writer has placed."""
        rows = self._columns.place(n)
        seam = self.core.extent()[1][0]
        if self.in_order and not torch.equal(rows, (seam + torch.arange(n, device="cpu")) % self.capacity):
            raise RuntimeError(
                f"{self._columns.name}.place: expected {n} rows from {seam} on, the ring that in_order declares, got "
                f"{rows.tolist()[:8]}…. Do not declare in_order."
            )
        return rows

    def _check_rows(self, rows: torch.Tensor, call: str) -> None:
        """Raise ``RuntimeError`` unless rows are inside the store, and leave no gap behind the live ones."""
        live = self.core.extent()[0][0]
        fresh = torch.unique(rows[(rows < 0) | (rows >= live)])
        if len(fresh) and not torch.equal(fresh, torch.arange(live, live + len(fresh), device="cpu")):
            odd = int(fresh[fresh != torch.arange(live, live + len(fresh), device="cpu")][0])
            raise RuntimeError(f"{call}: row {odd}: expected one of the {live} live rows, or the next ones in order.")
        if len(rows) and int(rows.max()) >= self.capacity:
            raise RuntimeError(f"{call}: expected rows below the capacity {self.capacity}, got {int(rows.max())}.")

    def _check_extent(self) -> None:
        """Raise ``RuntimeError`` unless the object holds what was written here."""
        said, (filled, seam) = self._columns.extent(), self.core.extent()
        if said.filled != tuple(filled) or (self.in_order and said.seam != tuple(seam)):
            raise RuntimeError(
                f"write: {self._columns.name}: expected {filled[0]} rows, the next one at {seam[0]}, as this buffer has written them, got "
                f"{said.filled[0]}, the next one at {said.seam[0]}. Let one buffer at a time write to it; buffers that share rb.storage "
                "count as one."
            )

    def _put_columns(self, rows: torch.Tensor, columns: Sequence[torch.Tensor], *, append: bool) -> None:
        """Write rows, of one that is named twice the last entry."""
        last = {row: place for place, row in enumerate(rows.tolist())}
        if len(last) < len(rows):
            places = torch.tensor(sorted(last.values()), device="cpu")
            rows, columns = rows[places], [column[places] for column in columns]
        self._columns.write(rows, columns, append=append)

    def _put(self, rows: torch.Tensor, which: Sequence[int], columns: Sequence[torch.Tensor]) -> None:
        if not len(rows):
            return
        merged = list(columns)
        if tuple(which) != self._which:
            merged = self._columns.read(rows)
            for number, column in zip(which, columns, strict=True):
                merged[number] = column
        shapes = [field.shape for field in self.schema.fields]
        merged = [column.reshape(len(rows), *shape) for column, shape in zip(merged, shapes, strict=True)]
        self._put_columns(rows, merged, append=False)

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def _take(self, rows: torch.Tensor, which: Sequence[int]) -> list[torch.Tensor]:
        live = self.core.extent()[0][0]
        if live:  # of rows that were emptied meanwhile others are read, as they have moved
            columns = self._columns.read(rows.clamp(max=live - 1)) if len(rows) else self.first_rows(0)
            return [columns[number] for number in which]
        fields = [self.schema.fields[number] for number in which]
        return [torch.zeros((len(rows), *field.shape), dtype=torch_dtype(field), device="cpu") for field in fields]
