"""A store whose rows lie where the core cannot move them: it keeps their tickets, cursors and indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._support import fork, native
from engram.store.memory import Block, dlpack_specs, private_field
from engram.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.store.blocks import Key
    from engram.types import Write


class HostedStore(Store):
    """Rows that something else moves, while the core keeps tickets and cursors on the host.

    Within one process only. A lock orders reads and writes. Fields that an index reads have a copy on the host, which the
    core moves before the index hears of it, as it does with all fields of a store on the CPU.
    """

    is_native = False
    reads_apart = True

    def __init__(self, schema: Schema, tensors: Sequence[Tensor], control: Block, tickets: Block) -> None:
        self._lock = fork.rlock()
        #: What a call enters: it holds the lock.
        self._turn: AbstractContextManager[object] = self._lock
        #: By number of the field, in the order in which the core has them.
        self._copies: dict[int, Tensor] = {}
        super().__init__(schema, tensors, control, tickets)
        self.layout = native.Layout([])

    def _put(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Replace fields of rows; of a row that is named twice the last entry stays."""
        raise NotImplementedError

    def _take(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Fields of rows, copied."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[None]:
        return self._pausing_with((self._lock, self._pausing))  # in between, rows have tickets already and no data yet

    def on_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[Tensor]]:
        """As :meth:`Store.on_host`. A field that is asked for first is copied; from then on every write of it is, too."""
        with self._turn:
            for number in numbers:
                if number not in self._copies:
                    field = self.schema.fields[number]
                    copy = private_field(field, self.capacity).copy_(self.tensors[number])
                    self.core.add_field(copy.data_ptr(), field.row_bytes)
                    self._copies[number] = copy
            self.layout = native.Layout(dlpack_specs([self.schema.fields[number] for number in self._copies]))
            order = list(self._copies)
            return tuple(order.index(number) for number in numbers), [self._copies[number] for number in numbers]

    def refilled(self) -> None:
        for number, copy in self._copies.items():
            copy.copy_(self.tensors[number])

    def _for_core(self, which: Sequence[int], columns: Sequence[Tensor]) -> tuple[tuple[int, ...], list[Tensor]]:
        """What the core has of some fields: their numbers there, in order, and the columns as it reads them."""
        given = dict(zip(which, columns, strict=True))
        there = [(place, given[number]) for place, number in enumerate(self._copies) if number in given]
        return tuple(place for place, _ in there), [column.detach().to("cpu").contiguous() for _, column in there]

    def append_row_of(self, intake: object, data: object, lane: object) -> None:
        """The core has not all fields."""

    def append_of(self, intake: object, data: object, lane: object) -> None:
        """The core has not all fields."""

    def write_natively(self, intake: object, write: object) -> None:
        """The core has not all fields."""

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        with self._turn:
            write = super().edit(rows, *self._for_core(which, columns))
            self._put(rows, which, columns)
        return write

    def patch(
        self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], expected: Tensor, *, unedited: bool = False
    ) -> tuple[Write, Tensor]:
        with self._turn:
            write, numbers = super().patch(rows, *self._for_core(which, columns), expected, unedited=unedited)
            kept = (numbers >= 0).nonzero().squeeze(1)
            self._put(rows[kept], which, [column[kept.to(column.device)] for column in columns])
        return write, numbers

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        with self._turn:
            _, moved = super().read(rows, expected=expected, which=())
            return self._take(rows, self._which if which is None else which), moved

    def copy_rows(self, rows: Tensor, expected: Tensor, columns: Sequence[Tensor]) -> list[int]:
        found, moved = self.read(rows, expected=expected)
        for column, value in zip(columns, found, strict=True):
            column.copy_(value.cpu().reshape(len(rows), -1).view(torch.uint8).view(column.shape))
        return moved

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        with self._turn:
            rows, *numbers = super().sample_uniform(key, n, True, with_numbers)[len(self._copies) :]
            columns = self._take(rows, self._which)
        return [*columns, *[rows] * with_rows, *numbers]

    def sample_unlimited(self, key: Key, n: int, with_rows: bool, with_numbers: bool) -> list[Tensor] | None:
        if self.bare.limited:
            return None
        since = self.bare.begin_wait()
        columns = self.sample_uniform(key, n, with_rows, with_numbers)
        if since:
            self.bare.count_wait(since)
        return columns
