"""Stores whose rows the core cannot move: it keeps their tickets, cursors and indexes, of rows on an accelerator, too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from engram._support import devices, fork, native
from engram.errors import EMPTY, NoSampleable
from engram.format.sizes import device_row_bytes
from engram.store.device.row_operations import Drawing, Ring
from engram.store.device.rows import DeviceRows
from engram.store.memory import Block, dlpack_specs, new_control_memory, private_field, refuse_ragged
from engram.store.store import Saved, Store, StoreState
from engram.types import Changes, RowsTarget, Write, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.store.blocks import Key
    from engram.store.device.mirror import Mirror


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
        self._turn: contextlib.AbstractContextManager[object] = self._lock
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

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self.core.pausing((self._lock, self._pausing))  # in between, rows have tickets already and no data yet

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


class DeviceStore(HostedStore):
    """Rows on an accelerator, with their numbers and the cursor of their ring, and priorities that a sampler wants there.

    Appends, uniform draws, draws and updates of priorities, and edits wait for nothing on the device, and may be captured in a CUDA
    graph: of a store of one lane, by calls that name rows by tensors of the device. What the core has of the rows follows when a
    call asks for it (:attr:`core`): it is told of the rows that were appended since, which needs no look at the device. Once a graph was
    captured that appends, only the device knows how often it ran: then such a call waits for it. What an index of the host reads or
    hears of is written as on the CPU, at once.

    All calls use the current stream; one that is on another stream than the call before waits for it on the device.
    """

    def __init__(self, schema: Schema, rows: DeviceRows, control: Block, tickets: Block) -> None:
        self.device = rows.device
        self.rows = rows
        #: Whether samplers that name no device get their priorities here.
        self.keeps_priorities = rows.device.type != "cpu"
        super().__init__(schema, [column[:-1] for column in rows.whole], control, tickets)
        self._lock = self._placing = rows.lock  # the same one: no two threads take two locks in different orders
        self._turn = rows
        #: What copies the rows to a folder; None: nothing does.
        self.mirror: Mirror | None = None
        self._follow()

    @classmethod
    def on(cls, schema: Schema, device: torch.device, tensors: Sequence[Tensor] = ()) -> DeviceStore:
        """A store on ``device``, its memory taken at once; zeros, or the rows of ``tensors``.

        Raises ``RuntimeError``: the device has less free memory than the rows need. ``ValueError``: a field is ragged. Nothing is
        taken then.
        """
        refuse_ragged(schema, f"rows on {device}", "Use LazyTensorStorage without device=, or LazyMemmapStorage")
        devices.check_room(f"{schema.capacity:,} rows", device_row_bytes(schema.capacity, schema.row_bytes), device)
        return cls(schema, DeviceRows(schema, device, tensors), *new_control_memory(schema))

    # ---- what the core has of the rows -------------------------------------------------------------------------------

    @property
    def core(self) -> native.Store:
        """The core, which was told of all that was written. After a captured ``extend``: what the device says was written."""
        if (self.rows.pending or self.rows.captured) and not self.closed:
            self._settle()
        return self.bare

    @core.setter
    def core(self, core: native.Store) -> None:
        self.bare = core

    def settled(self) -> native.Store:
        """The core, which was told of all that was written and edited. Waits for the device where graphs, or indexes on it, did that."""
        self._settle_edits()
        return self.core

    def close(self) -> None:
        if self.mirror is not None:
            self.mirror.close()
        super().close()

    def discard(self, owner: object) -> bool:
        gone = super().discard(owner)
        if gone and self.mirror is not None:
            self.mirror.discard()
        return gone

    def _settle(self) -> None:
        """Tell the core of appended rows."""
        rows = self.rows
        if rows.captured and rows.capturing:
            return
        with self.rows:
            if rows.captured:
                position, clock, filled = rows.cursor.tolist()  # waits
                rows.known, rows.pending = (position, clock, filled), clock - self.bare.next_ticket
            while rows.pending > 0:
                k = min(rows.pending, self.capacity)
                there = (self.bare.next_position(0) + torch.arange(k, device="cpu")) % self.capacity
                columns = self._for_core(self._which, self._take(there, self._which))[1] if self._copies else []
                self.bare.append(0, k, tuple(map(torch.Tensor.data_ptr, columns)), there.data_ptr())
                rows.pending -= k

    def _settle_edits(self) -> None:
        """Let rows that were edited by an index on the device have new tickets. Waits for the device, where there may be some."""
        rows = self.rows
        if not rows.edits or rows.capturing:
            return
        with self.rows:
            edited = rows.newly_edited()
            edited = edited[self.tickets_of(edited) >= 0]  # the others were removed since
            rows.edits = rows.captured_edits
            if len(edited):
                super(HostedStore, self).edit(edited, *self._for_core(self._which, self._take(edited, self._which)))
                self._follow()

    def _follow(self) -> None:
        """Let the cursor on the device be where the core is, if that came there in another way."""
        rows = self.rows
        if self.lanes > 1:
            return
        at, filled = self.bare.next_position(0) + rows.pending, self.bare.extent()[0][0]
        rows.ring = filled == self.capacity or filled == self.bare.next_position(0) % self.capacity
        now = (at, self.bare.next_ticket + rows.pending, min(filled + rows.pending, self.capacity))
        if now != (*rows.known[:2], min(rows.known[2], self.capacity)):
            self._set_cursor(now)

    def _set_cursor(self, now: tuple[int, int, int]) -> None:
        self.rows.known = now
        self.rows.cursor.copy_(self.rows.accelerator.bring(torch.tensor(now, device="cpu")))
        if self.mirror is not None:
            self.rows.begin(0)

    def refilled(self) -> None:
        with self.rows:
            super().refilled()
            self._renumber(0, self.capacity)
            if self.lanes == 1:
                filled = self.core.extent()[0][0]
                self._set_cursor((self.core.next_position(0), self.core.next_ticket, filled))
            self._follow()
            for tree in self.rows.trees:
                tree.scan(0, self.capacity)

    def _renumber(self, start: int, stop: int) -> None:
        """Consecutive rows have the numbers that the core has of them."""
        rows = torch.arange(start, stop, device="cpu")
        numbers = self.writes_of(rows, self.tickets_of(rows)).clamp_(min=0)
        self.rows.numbers[start:stop].copy_(self.rows.accelerator.bring(numbers))

    def fill(self) -> None:
        """All rows are live, as they are."""
        self.core.fill()
        self.rows.replaced += 1
        self.refilled()

    def take_over(self, control: Tensor, tickets: Tensor) -> None:
        super().take_over(control, tickets)
        self.rows.replaced += 1
        self.refilled()

    def detached(self) -> Saved:
        with self.rows:
            self._settle_edits()
            self._settle()
            return super().detached()

    def replace(self, state: StoreState, fill: Callable[[RowsTarget], object]) -> None:
        with self.rows:
            try:
                super().replace(state, fill)
            finally:
                self.rows.replaced += 1
                self.rows.told.copy_(self.rows.edited)
                self.refilled()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self.rows:
            self._settle_edits()
            self._settle()
            with super().paused():
                yield

    def changes(self, since: int = 0) -> Changes:
        self._settle_edits()
        return super().changes(since)

    def counters(self) -> dict[str, float]:
        """As :meth:`Store.counters`. Raises what calls on the device could not, as :meth:`DeviceRows.check` has it."""
        self.rows.check()
        return super().counters() | ({} if self.mirror is None else self.mirror.stats())

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, columns: Sequence[Tensor], n: int) -> Write:
        fields = self.schema.fields
        # Perhaps one row.
        columns = [column.detach().reshape(n, *field.shape) for column, field in zip(columns, fields, strict=True)]
        with self.rows:
            if plan.rows is None and isinstance(plan.lane, int):
                return self._append(plan, plan.lane, columns, n)
            return self._write_apart(plan, columns, n)

    def _sent(self, columns: Sequence[Tensor], call: str) -> list[Tensor]:
        return [self.rows.sent(column, call) for column in columns]

    def _append(self, plan: WritePlan, lane: int, columns: list[Tensor], n: int) -> Write:
        rows, length = self.rows, self.lane_length
        if rows.capturing:
            return self._append_captured(columns, n)
        if rows.captured:
            self._settle()
        # The core may hear of rows later where nothing there listens, and it need not place them.
        lasting = len(self.indexes) == len(rows.trees) and not self.indexes.tables
        later = self.lanes == 1 and rows.ring and lasting and not self._copies and not self.bare.limited
        position, first = self.bare.next_position(lane) + rows.pending, self.bare.next_ticket + rows.pending
        if later:
            write = Write((position + torch.arange(n, device="cpu")) % length, first)
            rows.pending += n
        else:
            which, copied = self._for_core(self._which, columns)
            write = self._write(plan, n, which, tuple(map(torch.Tensor.data_ptr, copied)))
        moves = self.lanes == 1 and rows.ring
        sent = self._sent(columns, "extend")
        rows.work.append(rows, sent, n, Ring(lane * length, position, first, moves))
        if moves:
            rows.known = position + n, first + n, rows.known[2] + n
        if not later:
            self._follow()
        return write

    def _append_captured(self, columns: list[Tensor], n: int) -> Write:
        """Append where the cursor on the device is. Raises ``RuntimeError``: only the host can place the rows."""
        rows = self.rows
        if self.lanes > 1 or not rows.ring or self.bare.limited:
            why = "has limits" if self.bare.limited else "has rows that a writer placed"
            why = f"has {self.lanes} lanes" if self.lanes > 1 else why
            raise RuntimeError(
                f"extend: expected a storage of one ring while a CUDA graph is captured, got one that {why}: the host must place the rows. "
                "Make this call outside of the capture."
            )
        columns = self._sent(columns, "extend")
        rows.captured = True
        if self.mirror is not None:
            rows.begin(n)
        at, numbers = rows.work.append(rows, columns, n, Ring()) or (rows.numbers, rows.numbers)
        return Write(at, 0, numbers)

    def append_some(self, columns: Sequence[Tensor], chosen: Tensor, base: int) -> Tensor:
        """As :meth:`RowOperations.append_some`, to a store of one lane. Only the device knows how many rows that are."""
        columns = [column.detach() for column in columns]
        with self.rows:
            chosen, *columns = self._sent([chosen, *columns], "extend")
            self.rows.captured = True
            if self.mirror is not None:
                self.rows.begin(chosen.sum())
            return self.rows.work.append_some(self.rows, columns, chosen, base)

    def _write_apart(self, plan: WritePlan, columns: list[Tensor], n: int) -> Write:
        """Write where the plan says for each row."""
        rows, (filled, _) = self.rows, self.core.extent()
        which, copied = self._for_core(self._which, columns)
        write = self._write(plan, n, which, tuple(map(torch.Tensor.data_ptr, copied)))
        at = write.rows
        if plan.rows is not None:
            self._clear_gaps(filled)
        columns = self._sent(columns, "write")
        if plan.kept is not None:
            kept = rows.sent(plan.kept, "write")
            at, columns = at[plan.kept], [column[kept] for column in columns]
        at = rows.sent(at, "write")
        last = rows.last_of(at)
        rows.put(at, self._which, columns, last)
        rows.number(at, write.first, last)
        for tree in rows.trees:
            tree.written(at)
        self._follow()
        return write

    def _clear_gaps(self, filled: Sequence[int]) -> None:
        """Rows that became live because a row above them was written hold zeros."""
        for lane, (before, now) in enumerate(zip(filled, self.core.extent()[0], strict=True)):
            start, stop = lane * self.lane_length + before, lane * self.lane_length + now
            if start < stop:
                for tensor in self.tensors:
                    tensor[start:stop].zero_()
                self._renumber(start, stop)
                for tree in self.rows.trees:
                    tree.written(torch.arange(start, stop, device=self.device))

    def empty(self, *, keep_write_count: bool) -> None:
        with self.rows:
            super().empty(keep_write_count=keep_write_count)
            self.rows.numbers.zero_()
            self.rows.told.copy_(self.rows.edited)
            self.rows.emptied, self.rows.kept_count = self.rows.emptied + 1, keep_write_count
            for tree in self.rows.trees:
                tree.emptied()
            self._follow()

    # ---- editing -----------------------------------------------------------------------------------------------------

    def names(self, index: object) -> bool:
        """Whether an index names rows on the device, which can be edited without asking which they are."""
        there = isinstance(index, torch.Tensor) and index.ndim == 1 and index.dtype is torch.int64 and not index.is_cpu
        return there and self.lanes == 1 and self.rows.ring and not self._copies

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        if not rows.is_cpu or self.rows.capturing:
            if rows.is_cpu and _consecutive(rows):
                rows = torch.arange(int(rows[0]), int(rows[-1]) + 1, device=self.device)
            return self.edit_there(rows, which, columns)
        return super().edit(rows, which, columns)

    def edit_there(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        """As :meth:`edit`, of rows that only the device knows; negative ones count from the end.

        Rows that hold nothing are left out and counted: :meth:`DeviceRows.check` raises. The core hears of it when it is asked; the
        tickets of the write are unknown until then.
        """
        ledger, call = self.rows, "rb[index] = value"
        with ledger:
            rows = ledger.sent(rows, call)
            columns = self._sent(self._shaped(rows, which, columns), call)
            at = ledger.work.edit(ledger, rows, which, columns)
            ledger.edits, ledger.captured_edits = True, ledger.captured_edits or ledger.capturing
        return Write(at, 0)

    def _shaped(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> list[Tensor]:
        fields = self.schema.fields
        return [column.detach().reshape(len(rows), *fields[f].shape) for f, column in zip(which, columns, strict=True)]

    def patch(
        self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], expected: Tensor, *, unedited: bool = False
    ) -> tuple[Write, Tensor]:
        with self.rows:
            self._settle_edits()
            return super().patch(rows, which, columns, expected, unedited=unedited)

    def _put(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> None:
        self._follow()  # the core, which knows of it
        columns = self._sent(self._shaped(rows, which, columns), "rb[index] = value")
        if _consecutive(rows):
            self.rows.put_span(int(rows[0]), which, columns)
        else:
            at = self.rows.sent(rows, "rb[index] = value")
            self.rows.put(at, which, columns, self.rows.last_of(at))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _take(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        return self.rows.take(self.rows.sent(rows, "read"), which)

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        fields, ledger = len(self._which), self.rows
        if self._lies_apart and not ledger.capturing:
            found = super().sample_uniform(key, n, with_rows, with_numbers)
            return [*found[:fields], *(ledger.sent(beside, "sample") for beside in found[fields:])]
        columns = self.sample_rows(n, key.value, Drawing())
        return [*columns[:fields], *columns[fields : fields + 1] * with_rows, *columns[fields + 1 :] * with_numbers]

    @property
    def _lies_apart(self) -> bool:
        """Whether the live rows are not the first ones."""
        return self.lanes > 1 or self.bare.void_rows > 0 or not self.rows.ring

    def sample_rows(self, n: int, key: int, how: Drawing) -> list[Tensor]:
        """As :meth:`RowOperations.read`. Raises ``NoSampleable``: the store is empty."""
        ledger, followed = self.rows, how.followed
        with ledger, contextlib.nullcontext() if followed is None else followed.finals:
            size = 0 if ledger.capturing else self._size()
            if not ledger.capturing and not size:
                raise NoSampleable(EMPTY)
            size = -1 if self._lies_apart else size
            columns = ledger.work.read(ledger, n, key, size, how)
            if any(kind == "usage" for _, kind in self.indexes):
                beside = 0 if followed is None else len(followed.fields)
                self.count_sampled(columns[len(self._which) + beside].cpu())
            else:
                self.bare.count_all_sampled(n)
            return columns

    def _size(self) -> int:
        """Rows that hold data: without telling the core of them, where it only has to count them."""
        if self.rows.captured:
            self._settle()
        return min(self.bare.size() + self.rows.pending, self.capacity) if self.lanes == 1 else self.core.size()


def _consecutive(rows: Tensor) -> bool:
    """Whether rows on the host follow each other."""
    return len(rows) > 0 and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows), device="cpu"))
