"""Writes that may be asked for several times, by a client that missed a reply, and happen once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import torch

from engram._support import native
from engram.errors import EngramError, RowError
from engram.store import indexes, memory, ragged_rows
from engram.store.store import Store

#: The name of the table of writers in a store.
NAME = "main"
#: Writers that a table has room for.
WRITERS = 1024
#: Requests of one writer that may be in doubt at a time.
IN_DOUBT = native.requests_in_doubt


class OutOfOrder(EngramError, RuntimeError):
    """A request that cannot come now: one before it is missing, or it is too old to be known. Nothing was changed."""

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        #: The position, or the number of the request, that can come next.
        self.expected = expected


class Written(NamedTuple):
    """What became of a request that is done: its rows are in the store."""

    #: int64 ``[n]``: the same whenever the request is repeated.
    rows: torch.Tensor
    #: How many of them this call wrote: 0 for a request that was done before.
    new: int


class WritersIndex(indexes.LockedIndex[native.Writers]):
    """The table of writers that share lanes, as a lasting index of their store."""

    reset_mutex = staticmethod(native.reset_writers_mutex)

    kind = "writers"
    make_core = native.Writers
    format_memory = staticmethod(native.format_writers)


class Requests:
    """Appends that happen once, however often and from however many processes they are asked for.

    A request that was acknowledged is not written again. One that was not, because its process died or its reply was lost, is
    repeated, in this or another process: what is missing of its rows is written, also beside a first process that was only slow. The
    rows get their priority once. An acknowledged request is in the store's memory, as any write is.

    There are two ways to say which request it is. A writer with a lane of its own says the lane's position, which the store keeps
    anyway. Writers that share lanes have a name and count their requests: then the store keeps a table of them, made by the first such
    request, with the last :data:`IN_DOUBT` requests of the last :data:`WRITERS` writers, 348 bytes each.

    Args:
        store: on the CPU.
        writers: room in the table, if this call is the one that makes it.

    Raises:
        RuntimeError: the store is on an accelerator.

    >>> import torch
    >>> from uuid import uuid4
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, lanes=2))
    >>> _ = rb.extend({"a": torch.arange(2)}, lane=0)
    >>> requests = Requests(rb.storage.store)
    >>> requests.next_position(1)
    0
    >>> requests.append_at(1, 0, [torch.tensor([7, 8, 9])], 3)
    Written(rows=tensor([5, 6, 7]), new=3)
    >>> requests.append_at(1, 0, [torch.tensor([7, 8, 9])], 3)
    Written(rows=tensor([5, 6, 7]), new=0)
    >>> writer = uuid4()
    >>> for _ in range(2):
    ...     print(requests.append_by(writer, 1, 0, [torch.tensor([4, 5])], 2))
    Written(rows=tensor([2, 3]), new=2)
    Written(rows=tensor([2, 3]), new=0)
    """

    def __init__(self, store: Store, writers: int = WRITERS) -> None:
        if not store.is_native:
            raise RuntimeError(f"Requests: expected a store on the CPU, got one on {store.device}.")
        self._store = store
        #: By how many fields a request has: those that were added may be left out.
        self._layouts: dict[int, native.Layout] = {}
        self._room = writers
        self._writers: WritersIndex | None = None

    def next_position(self, lane: int) -> int:
        """The position that :meth:`append_at` can begin with. Raises ``RowError``: a lane outside the store."""
        self._check_lane(lane, "next_position")
        return self._store.core.next_position(lane)

    def append_at(self, lane: int, position: int, columns: Sequence[torch.Tensor], n: int) -> Written:
        """Append ``n`` rows to a lane, at a position: once.

        The lane must have one writer, and no other kind of append: whatever is at these positions is taken for the rows of this
        request. Any number of requests may be in doubt; they are repeated in order, in any pieces. Rows that newer ones have replaced
        meanwhile count as written.

        Args:
            lane: of the store.
            position: of the first row, counted since the lane's first one. Not reset by ``empty()``, which moves a lane forward.
            columns: contiguous CPU tensors ``[n, *row shape]``, one per field; of a ragged field its :class:`Items`.
            n: rows.

        Raises:
            OutOfOrder: the lane's next position, ``expected``, is before this one, so that rows are missing; or the store was emptied
                since, so that it is not known whether these rows were there before. Nothing is written.
            RowError: a lane outside the store. RuntimeError: other columns, or some are ragged.
            RateLimited: the limits of the store do not admit the rows now. Nothing is written. A request is admitted once.
            ValueError: the limits can never admit so many.
            WriterStalled: another process held a row for 5 s; what was written stays. Repeat the request.
        """
        if self._store.schema.ragged:
            raise RuntimeError(
                "append_at: expected fields whose rows all have one size, got ragged ones. Give the writer a name, and use append_by."
            )
        self._check(lane, columns, n, "append_at")
        rows = native.empty_rows(n)
        addresses = tuple(map(torch.Tensor.data_ptr, columns))
        new, expected = self._store.core.append_at(lane, position, n, addresses, rows.data_ptr())
        if new < 0:
            raise OutOfOrder(
                f"append_at: expected position {expected}, the next one of lane {lane}, got {position}: "
                + ("rows between them are missing." if expected < position else "the store was emptied meanwhile.")
                + " Ask for next_position, and send what was not acknowledged from there.",
                expected,
            )
        return Written(rows, new)

    def next_request(self, writer: UUID) -> int:
        """Number of the writer's next request: 1 if the table does not know it."""
        return self._table().next(*_halves(writer))

    def place_of(self, writer: UUID, number: int) -> tuple[int, int, int]:
        """The lane of a request, the position of its first row, and how many it had; zeros: the table does not know it."""
        return self._table().rows_of(*_halves(writer), number) or (0, 0, 0)

    def append_by(self, writer: UUID, number: int, lane: int, columns: Sequence[torch.Tensor], n: int) -> Written:
        """Append ``n`` rows to a lane that several writers may share, as a request of a writer: once.

        A repeated request has the rows, and the lane, of the first time. It counts as written where the store was emptied since.
        At most :data:`IN_DOUBT` requests of a writer may be in doubt at a time. A writer that is new takes the place of the one that
        has been silent the longest: one that was silent while :data:`WRITERS` others wrote is no longer known. It has to begin
        with another name, and cannot learn whether a request that was in doubt was written.

        Args:
            writer: its name, never used by another one.
            number: of the request, from 1 on.
            lane, columns, n: as for :meth:`append_at`.

        Raises:
            OutOfOrder: the writer's next request, ``expected``, is another one. 1: the table does not know the writer. Nothing is written.
            ValueError: the request had other rows the first time, by their number or that of their items; or the limits can never admit so
                many.
            RowError, RuntimeError, RateLimited, WriterStalled: as :meth:`append_at`.
            OSError: no space for the table.
        """
        self._check(lane, columns, n, "append_by")
        rows, store = native.empty_rows(n), self._store
        ragged_rows.check_room(store.schema.ragged_groups, columns, lane, store.lane_length)
        given = ragged_rows.addresses_of(store.schema.ragged_groups, columns)
        try:
            new, expected = store.core.append_by(
                self._table(), *_halves(writer), number, lane, n, given.columns, rows.data_ptr(), given.items
            )
        except ValueError as error:
            said = str(error) if str(error).startswith("expected") else f"expected {error}, got {n}"
            raise ValueError(f"append_by: {said} for request {number} of writer {writer}.") from error
        if new < 0:
            raise OutOfOrder(
                f"append_by: expected request {expected} of writer {writer}, got {number}. The table knows its last {IN_DOUBT} "
                f"requests; of a writer that was silent while {self._table().writers} others wrote it knows none.",
                expected,
            )
        return Written(rows, new)

    def _table(self) -> native.Writers:
        if self._writers is None:
            known = self._store.indexes.refreshed().get((NAME, WritersIndex.kind))
            groups = len(self._store.schema.ragged_groups)
            nbytes = native.writers_bytes(self._room, groups) if known is None else known.block.nbytes
            self._writers = WritersIndex.of_name(self._store.indexes, NAME, nbytes, self._room, groups)[0]
        return self._writers.core

    def _check_lane(self, lane: int, call: str) -> None:
        if not 0 <= lane < self._store.lanes:
            raise RowError(f"{call}: expected a lane in [0, {self._store.lanes}), got {lane}.")

    def _check(self, lane: int, columns: Sequence[torch.Tensor], n: int, call: str) -> None:
        self._check_lane(lane, call)
        schema = self._store.schema
        fixed = [column for number, column in enumerate(columns) if number not in schema.ragged]
        count = len(columns) if schema.first_fields <= len(columns) <= len(schema.fields) else len(schema.fields)
        known = [field for field in schema.fields[:count] if field.ragged is None]
        layout = self._layouts.get(count)
        if layout is None:
            layout = self._layouts[count] = native.Layout(memory.dlpack_specs(known))
        if native.HAS_EXCHANGE and not layout.fits(fixed, n):
            fields = ", ".join(f"{field.name} {[n, *field.shape]} {field.dtype}" for field in known)
            got = ", ".join(f"{list(column.shape)} {column.dtype}" for column in fixed)
            raise RuntimeError(f"{call}: expected contiguous CPU columns {fields}; got {got}.")


def _halves(writer: UUID) -> tuple[int, int]:
    return writer.int >> 64, writer.int & ((1 << 64) - 1)
