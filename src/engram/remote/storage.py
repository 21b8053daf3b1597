"""The storage of a buffer whose rows are on a server."""

from __future__ import annotations

import itertools
import math
import time
from functools import partial
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec
import torch
from torch import Tensor

from engram._support.native import NotAdmitted
from engram._support.version import __version__
from engram.errors import RateLimited, RowError
from engram.format.schema import decode
from engram.remote import wire
from engram.remote.commands import (
    BESIDE_ROW,
    MAX_MESSAGE,
    Append,
    CanRemove,
    CanSample,
    Empty,
    EndTrajectory,
    Gauges,
    Limit,
    NotOnce,
    Prioritize,
    Remove,
    Removed,
    Sample,
    Sampled,
    State,
    Stats,
    Tickets,
    Version,
    held_bytes,
)
from engram.remote.connection import IN_DOUBT as DOUBTFUL
from engram.remote.connection import Exchange, Message
from engram.remote.served import ASK_AGAIN_S, Drawn, Limits, ServedStorage
from engram.remote.streaming import WritesUnderWay
from engram.storages import Storage
from engram.store.requests import IN_DOUBT
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyarrow import RecordBatch

    from engram.remote.commands import Served
    from engram.remote.connection import Answer, Connection
    from engram.saved.rows import Roles
    from engram.types import Info, WritePlan

_PRIORITIES, _EDITS = map(wire.arrow_schema, (wire.PRIORITIES, wire.EDITS))
_EDIT_BYTES = 16

#: So many bytes fit into the buffers of a connection whose server does not read.
_UNREAD = 32 << 10


class ServedLimits(Limits):
    """Limits of a store that its server follows. It refuses at once what it does not admit, so clients ask again."""

    #: It may be: only the server knows.
    limited = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def state(self) -> State:
        """Numbers of the store at this moment. Raises as :meth:`Connection.ask`."""
        return self._connection.ask("stats", Stats(), State)

    @property
    def limit(self) -> tuple[float, float, int, int]:
        return self.state().limit

    def limit_counts(self) -> dict[str, float]:
        return self.state().limit_counts

    @property
    def fleet_limit(self) -> tuple[int, int]:
        return self.state().fleet

    def size(self) -> int:
        return self.state().size

    def admits_samples(self, rows: int) -> bool:  # noqa: ARG002 - the server has said that the rows can be sampled
        return True

    def await_limit(self, samples: bool, rows: int, event: int, seconds: float) -> bool:  # noqa: ARG002
        """Sleep until the server is to be asked again."""
        time.sleep(min(seconds, ASK_AGAIN_S))
        return True

    def count_limit_wait(self, samples: bool) -> None:
        """The server counts none of these."""


class RemoteStorage(ServedStorage):
    """A store that a server has open."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connect(connection)

    def _connect(self, connection: Connection) -> None:
        served = connection.served
        self.connection = connection
        schema, self._limits = decode(served.schema.encode(), "connect"), ServedLimits(connection)
        self.describe(schema, f"at {connection.access}", self._limits, served.participant)
        self._written = wire.arrow_schema(wire.written_columns(schema))
        self._learning, self._writing = Exchange(connection, "learn"), Exchange(connection, "write")
        #: Of parts that are drawn beside those that are under way.
        self._redrawing = Exchange(connection, "learn")
        self._editing = Exchange(connection, "edit")
        #: Until the server says otherwise, a message of rows may be sent again.
        self._once = True
        #: The numbers that come next, of this writer and of those beside it, which have the lanes beyond eight of a message.
        self._numbers: list[int] = []
        self._rename()
        full = connection.access.full
        self._under_way = None if full is None else WritesUnderWay(full, self._sent)
        #: Bytes of priorities that were sent since all batches under way had come.
        self._unread = 0

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        return self.connection.served

    @property
    def max_size(self) -> int:
        return self._schema.capacity

    @property
    def requested_size(self) -> int:
        return self.connection.served.requested_size

    def state(self) -> State:
        if self._under_way is not None:
            self._under_way.wait()
        return self._limits.state()

    def gauges(self) -> dict[str, float]:
        try:
            return self.connection.ask("gauges", Gauges(), dict[str, float])
        except ValueError:  # a server of an older engram knows no such command
            return {}

    def consumer_version(self, at_least: int | None = None) -> int:
        return self.connection.ask("version", Version(at_least), int)

    def counters(self) -> dict[str, float]:
        counters = super().counters()
        if self._under_way is not None:
            counters |= {"rows_dropped": self._under_way.dropped, "rows_under_way": self._under_way.rows}
        return counters

    def _arrive(self) -> None:
        """Wait for what was written before."""
        if self._under_way is not None:
            self._under_way.settle()

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        if held_bytes(rows, self._schema.row_bytes) > MAX_MESSAGE:
            raise ValueError(
                f"sample: batch_size: expected batches of at most {MAX_MESSAGE} bytes over a connection, got {rows} rows of "
                f"{self._schema.row_bytes} bytes and {BESIDE_ROW} beside them."
            )
        self.ask(Sample(rows, [key & (1 << 64) - 1 for key in keys]))

    def ask(self, command: Sample) -> None:
        """Send a command, and do not wait for its answer."""
        with self._learning.lock:
            self._learning.send(Message(msgspec.json.encode(command)))

    def redraw(self, command: Sample) -> list[Drawn]:
        """What a command draws, whatever is under way. Raises as :meth:`answer`."""
        with self._redrawing.lock:
            try:
                self._redrawing.send(Message(msgspec.json.encode(command)))
                return [batch() for batch in self._batches(self._redrawing.receive())]
            finally:
                self._redrawing.forget()  # of one that was interrupted

    def answer(self, rows: int) -> list[Callable[[], Drawn]]:
        with self._learning.lock:
            try:
                return self._batches(self._learning.receive())
            except RateLimited:
                raise NotAdmitted(rows) from None

    def settle(self) -> None:
        with self._learning.lock:
            self._learning.settle()

    def forget_asked(self) -> None:
        with self._learning.lock:
            self._learning.settle()
            self._learning.forget()

    def draw(self, key: int, rows: int) -> Drawn:
        with self._learning.lock:
            try:
                self.ask_for([key], rows)
                return self.answer(rows)[0]()
            finally:
                self._learning.forget()  # of one that was interrupted

    def _batches(self, answer: Answer) -> list[Callable[[], Drawn]]:
        said = msgspec.json.decode(answer.said, type=Sampled)
        fields, counts = len(self._schema.fields), [math.prod(shape) for shape in said.sizes]
        entries = [wire.entry_of(it.name) for it in answer.columns[fields + 1 :]]

        def drawn(number: int, shape: list[int], copied: Callable[[], list[Tensor]]) -> Drawn:
            flat = copied()
            tensors = flat if len(shape) == 1 else [it.reshape(*shape, *it.shape[1:]) for it in flat]
            info: Info = dict(zip(entries, tensors[fields + 1 :], strict=True))
            # Storages put columns together themselves: rows of windows lie one after the other.
            last = said.last and number == len(counts) - 1
            mass = said.masses[number] if said.masses else None
            return Drawn(tensors[:fields], tensors[fields], info, last, mass)

        batches = wire.batches_in(answer.rows, answer.columns, counts)
        return [partial(drawn, *of) for of in zip(itertools.count(), said.sizes, batches, strict=False)]

    def check_rows(self, rows: Tensor, call: str = "update_priority") -> None:
        outside = rows[(rows < -1) | (rows >= self.max_size)]
        if len(outside):
            raise RowError(f"{call}: expected rows in [-1, {self.max_size}), got {int(outside[0])}.")

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        numbers = torch.full_like(rows, -1) if tickets is None else tickets
        batch = wire.record_batch(_PRIORITIES, [rows, priorities, numbers], len(rows))
        with self._learning.lock:
            self._unread += batch.nbytes
            if self._unread > _UNREAD:  # a server that waits for us to read its batches does not read
                self._learning.settle()
                self._unread = batch.nbytes
            self._learning.send(Message(msgspec.json.encode(Prioritize()), batch, again=False), answered=False)

    def can_sample(self, rows: int) -> bool:
        return bool(self.connection.ask("can_sample", CanSample(rows), bool))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        if held_bytes(n, self._schema.row_bytes) > MAX_MESSAGE:
            raise ValueError(
                f"extend: expected at most {MAX_MESSAGE} bytes at once over a connection. Write fewer rows."
            )
        columns, lane = prepared, plan.lane
        if self.lanes > 1:
            columns = [*prepared, lane if isinstance(lane, Tensor) else torch.full((n,), lane or 0, device="cpu")]
        batch = wire.record_batch(self._written, columns, n)
        lanes = frozenset(lane.tolist()) if isinstance(lane, Tensor) else frozenset((int(lane or 0),))
        if self._under_way is not None:
            self.connection.check()
            self._under_way.put(batch, lanes)
            return Write(torch.full((n,), -1, device="cpu"), 0)
        answer = self._sent(batch, len(lanes))
        (rows,) = wire.tensors_in(answer.rows, answer.columns)
        return Write(rows, 0)

    def _sent(self, batch: RecordBatch, lanes: int) -> Answer:
        with self._writing.lock:
            return self._appended(batch, lanes, batch.num_rows)

    def _appended(self, batch: RecordBatch, lanes: int, n: int) -> Answer:
        """The answer to rows: one request for each lane that they go to, which may be sent again where the server can know it."""
        each = [min(IN_DOUBT, lanes - first) for first in range(0, lanes, IN_DOUBT)]
        while True:
            self._numbers += [1] * (len(each) - len(self._numbers))
            number, *more = self._numbers[: len(each)]
            command = Append(self._writer, number, more) if self._once else Append()
            resumed = self._writing.resumed
            try:
                self._writing.send(Message(msgspec.json.encode(command), batch, again=self._once))
                answer = self._writing.receive()
            except NotOnce as error:
                # A name may have been forgotten, beside a thousand others. A new one is refused for what the store is.
                self._once = number > 1
                self._rename()
                if self._writing.resumed != resumed:  # the first one may have been written
                    raise ConnectionError(DOUBTFUL) from error
            except RateLimited as error:  # nothing of the message was written now, and its number stays the next one
                if lanes > 1 and self._writing.resumed != resumed:  # some of its lanes may have been, by another server
                    self._rename()
                    raise ConnectionError(DOUBTFUL) from error
                raise NotAdmitted(n) from None
            except BaseException:  # perhaps it was not written, so that the next number would come too early
                self._writing.forget()
                self._rename()
                raise
            else:
                if self._once:
                    self._numbers[: len(each)] = [one + count for one, count in zip(self._numbers, each, strict=False)]
                return answer

    def _rename(self) -> None:
        """Begin again as a writer that the server does not know."""
        self._writer, self._numbers = uuid4(), []

    def check_removal(self, rows: Tensor) -> None:
        """Raises, too: ``RuntimeError``: the server is read-only, or of an older engram. ``ValueError``: too many. ``ConnectionError``."""
        super().check_removal(rows)
        if held_bytes(len(rows), _EDIT_BYTES) > MAX_MESSAGE:
            raise ValueError(
                f"remove: expected at most {MAX_MESSAGE} bytes at once over a connection, got {len(rows)} rows. Remove fewer at once."
            )
        self._arrive()
        try:
            self.connection.ask("can_remove", CanRemove(), dict)
        except ValueError as error:  # a server of an older engram knows no such command
            raise RuntimeError(
                f"remove: the server at {self.connection.access} is of an older engram, which removes no rows over a connection. Serve the "
                f"store with engram {__version__} or newer, or remove them where it is."
            ) from error

    def remove(self, rows: Tensor, expected: Tensor | None) -> int:
        """Removes what the rows hold now: what is written while a message is sent again stays.

        If a server was lost meanwhile, rows count that hold nothing at the end, no matter which client removed them.
        """
        with self._editing.lock:
            tickets = self._tickets(rows)
            held = (tickets >= 0) & (True if expected is None else tickets == expected)
            rows, tickets = rows[held], tickets[held]
            if not len(rows):
                return 0
            resumed = self._editing.resumed
            removed = msgspec.json.decode(self._edit(Remove(), rows, tickets).said, type=Removed).removed
            if self._editing.resumed != resumed:
                removed = int((self._tickets(torch.unique(rows)) < 0).sum())
            return removed

    def _tickets(self, rows: Tensor) -> Tensor:
        answer = self._edit(Tickets(), rows, torch.full_like(rows, -1))
        return wire.tensors_in(answer.rows, answer.columns)[0]

    def _edit(self, command: Tickets | Remove, rows: Tensor, tickets: Tensor) -> Answer:
        try:
            batch = wire.record_batch(_EDITS, [rows, tickets], len(rows))
            self._editing.send(Message(msgspec.json.encode(command), batch))
            return self._editing.receive()
        finally:
            self._editing.forget()  # of one that was interrupted

    def empty(self, *, keep_write_count: bool) -> None:
        self._arrive()
        self.connection.ask("empty", Empty(keep_write_count), dict)

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """What ``ReplayBuffer.end_trajectory`` does."""
        self._arrive()
        named = [([key] if isinstance(key, str) else list(key), role) for key, role in (roles or {}).items()]
        rows = self.connection.ask("end_trajectory", EndTrajectory(lanes.tolist(), terminated, named), list[int])
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def limit_part(self, limit: Limit) -> None:
        """Set limits of several stores, of which this is one."""
        self.connection.ask("limit", limit, dict)

    # ---- reading -------------------------------------------------------------------------------------------------------

    def fetch_dump(self, folder: Path, progress: Callable[[int], None]) -> None:
        self._arrive()
        self.connection.fetch_dump(folder, progress)

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        return {"connection": self.connection}

    def __setstate__(self, state: dict[str, object]) -> None:
        Storage.__init__(self)
        self._connect(cast("Connection", state["connection"]))

    def close(self) -> None:
        exchanges, connection = (self._learning, self._redrawing, self._writing, self._editing), self.connection
        if self._under_way is not None:
            self._under_way.close(wait=not self.connection.is_searching)
        super().close()
        for exchange in exchanges:
            exchange.close()
        connection.close()

    def __repr__(self) -> str:
        return f"RemoteStorage({self.connection.access})"
