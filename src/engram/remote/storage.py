"""The storage of a buffer whose rows are on a server."""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import cast
from uuid import uuid4

import msgspec
import pyarrow as pa
import torch
from pyarrow import RecordBatch
from torch import Tensor

from engram._support import fork, native
from engram.errors import RateLimited, RowError
from engram.format.schema import decode
from engram.remote import protocol, wire
from engram.remote.connection import IN_DOUBT as DOUBTFUL
from engram.remote.connection import Answer, Connection, Exchange, Message
from engram.remote.served import Drawn, OneStore, Parts, ServedLimits, ServedStorage, update_once
from engram.remote.under_way import GATHERED, WritesUnderWay
from engram.saved.rows import Roles
from engram.store.ragged_rows import items_in
from engram.store.requests import IN_DOUBT
from engram.types import Info, Write, WritePlan

_PRIORITIES, _EDITS = map(wire.arrow_schema, (wire.PRIORITIES, wire.EDITS))
_EDIT_BYTES = 16

#: Of rows that are kept until a copy of the store has them.
KEPT_BYTES = 64 << 20
#: So many bytes fit into the buffers of a connection whose server does not read.
_MAX_UNREAD_BYTES = 32 << 10


class RemoteStorage(ServedStorage):
    """The rows of a store that a server has open."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        served = connection.served
        self.connection = connection
        ask = partial(connection.ask, "stats", protocol.Stats(), protocol.State)
        self.limits, self._described = ServedLimits(ask, lambda: connection.served), served
        schema = decode(served.schema.encode(), "connect")
        self.describe(schema, f"at {connection.access}", self.limits, served.participant)
        #: Of messages of rows, by how many fields these have.
        self._written: dict[int, pa.Schema] = {}
        self._learning, self._writing = Exchange(connection, "learn"), Exchange(connection, "write")
        #: Of parts that are drawn beside those that are under way.
        self._redrawing = Exchange(connection, "learn")
        self._editing = Exchange(connection, "edit")
        #: Until the server says otherwise, a message of rows may be sent again.
        self._once = True
        #: The numbers that come next, of this writer and of those beside it, which have the lanes beyond eight of a message.
        self._numbers: list[int] = []
        #: Rows that the server has and its copy lacks, each with the number of the checkpoint that has them.
        self._kept: deque[tuple[int, bytes, RecordBatch]] = deque()
        self._kept_bytes = 0
        self._rename()
        access = connection.access.reached
        length = schema.capacity // schema.lanes if access.own_lanes and self.ndim == 1 else 0
        self._under_way = None if access.full is None else WritesUnderWay(access.full, self._sent, length)
        #: Held by a write that is not of one row, or the first one to a lane, which waits where numbers are told.
        self._writes = fork.lock()
        self.limits.hurried = self._learning.hurried = self._redrawing.hurried = access.hurried
        #: Bytes of priorities that were sent since all batches under way had come.
        self._unread = 0

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> protocol.Served:
        return self.connection.served

    @property
    def max_size(self) -> int:
        return self._schema.capacity

    @property
    def requested_size(self) -> int:
        return self.connection.served.requested_size

    def state(self) -> protocol.State:
        if self._under_way is not None:
            self._under_way.wait()
        state = self.limits.state()
        if state.fields > len(self._schema.fields):
            self.connection.describe()
            self.adopt_fields()
        return state

    def adopt_fields(self) -> None:
        served = self.connection.served
        if served is self._described:
            return
        with self._learning.lock:
            schema = decode(served.schema.encode(), "connect")
            if len(schema.fields) > len(self._schema.fields):
                for stream in (self._learning, self._redrawing):
                    stream.renew()
                assert self.memory is not None  # it is described
                self.describe(schema, self.memory.place, self.limits, self.memory.participant)
            self._described = served

    def gauges(self) -> dict[str, float]:
        try:
            return self.connection.ask("gauges", protocol.Gauges(), dict[str, float], hurried=self.limits.hurried)
        except ValueError:  # a server of an older engram knows no such command
            return {}

    def consumer_version(self, at_least: int | None = None) -> int:
        return self.connection.ask("version", protocol.Version(at_least), int, hurried=self.limits.hurried)

    def writers(self) -> int | None:
        """How many clients write; None: it takes no rows. If nothing was asked before, the connection rests again."""
        rests = not self.connection.is_open
        try:
            state = self.limits.state()
            return None if state.drained else state.writers
        finally:
            if rests:
                self.connection.rest()

    def counters(self) -> dict[str, float]:
        counters = super().counters()
        if self._under_way is not None:
            counters |= {"rows_dropped": self._under_way.dropped, "rows_under_way": self._under_way.rows}
        return counters

    @contextmanager
    def _arrived(self) -> Iterator[None]:
        """Waits for what was written before. The block may move a lane: meanwhile no write is told a number."""
        under_way = self._under_way
        with self._writes if under_way is not None and under_way.length else nullcontext():
            if under_way is not None:
                under_way.forget()
                under_way.settle()
            yield

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        protocol.check_fits("sample: batch_size", rows, self._usual_bytes, "Draw")
        self.ask(protocol.Sample(rows, [key & (1 << 64) - 1 for key in keys]))

    def ask(self, command: protocol.Sample) -> None:
        """Send a command, and do not wait for its answer."""
        with self._learning.lock:
            if self.connection.served is not self._described:
                self.adopt_fields()
            self._learning.send(Message(msgspec.json.encode(command)))

    def redraw(self, command: protocol.Sample) -> Parts:
        """What a command draws, whatever is under way. Raises as :meth:`answer`."""
        with self._redrawing.alone():
            self._redrawing.send(Message(msgspec.json.encode(command)))
            return self._parts(self._redrawing.receive())

    def answer_parts(self) -> Parts:
        """As :meth:`answer`, of batches that other stores draw the rest of."""
        with self._learning.lock:
            return self._parts(self._learning.receive())

    def _parts(self, answer: Answer) -> Parts:
        sampled = msgspec.json.decode(answer.metadata, type=protocol.Sampled)
        self.limits.tell(sampled.limits)
        tensors = wire.tensors_in(answer.rows, answer.columns)
        names, known = [it.name for it in answer.columns], len(self._schema.fields)
        fields = names.index(wire.ROW_NUMBER)
        info = dict(zip(map(wire.entry_of, names[fields + 1 :]), tensors[fields + 1 :], strict=True))
        return Parts(sampled.sizes, sampled.masses, tensors[: min(fields, known)], tensors[fields], info)

    def answer(self, rows: int) -> list[Callable[[], Drawn]]:
        with self._learning.lock:
            try:
                return self._batches(self._learning.receive())
            except RateLimited:
                raise native.NotAdmitted(rows) from None

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
                self._learning.forget()

    def _batches(self, answer: Answer) -> list[Callable[[], Drawn]]:
        metadata = msgspec.json.decode(answer.metadata, type=protocol.Sampled)
        fields = next(k for k, it in enumerate(answer.columns) if it.name == wire.ROW_NUMBER)
        counts = [math.prod(shape) for shape in metadata.sizes]
        entries = [wire.entry_of(it.name) for it in answer.columns[fields + 1 :]]

        def drawn(number: int, shape: list[int], copied: Callable[[], list[Tensor]]) -> Drawn:
            flat = copied()
            tensors = flat if len(shape) == 1 else [it.reshape(*shape, *it.shape[1:]) for it in flat]
            info: Info = dict(zip(entries, tensors[fields + 1 :], strict=True))
            # Storages put columns together themselves: rows of windows lie one after the other.
            last = metadata.last and number == len(counts) - 1
            return Drawn(tensors[: min(fields, known)], tensors[fields], info, last)

        known = len(self._schema.fields)
        batches = wire.batches_in(answer.rows, answer.columns, counts)
        return [partial(drawn, *of) for of in zip(itertools.count(), metadata.sizes, batches, strict=False)]

    def check_rows(self, rows: Tensor, call: str = "update_priority") -> None:
        outside = rows[(rows < -1) | (rows >= self.max_size)]
        if len(outside):
            raise RowError(f"{call}: expected rows in [-1, {self.max_size}), got {int(outside[0])}.")

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        numbers = torch.full_like(rows, -1) if tickets is None else tickets
        batch = wire.record_batch(_PRIORITIES, [rows, priorities, numbers], len(rows))
        with self._learning.lock:
            self._unread += batch.nbytes
            if self._unread > _MAX_UNREAD_BYTES:  # a server that waits for us to read its batches does not read
                self._learning.settle()
                self._unread = batch.nbytes
            self._learning.send(Message(msgspec.json.encode(protocol.Prioritize()), batch, again=False), answered=False)

    def draw_within(self, key: int, command: protocol.Sample) -> Drawn:
        protocol.check_level(self.served, str(self.connection.access), "sample: max_tokens")
        with self._learning.alone():
            self.ask(msgspec.structs.replace(command, keys=[key & (1 << 64) - 1]))
            return self.answer(0)[0]()

    def can_sample(self, rows: int) -> bool:
        return bool(self.connection.ask("can_sample", protocol.CanSample(rows), bool))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        items = sum(it.nbytes for column in prepared if (it := items_in(column)) is not None)
        protocol.check_fits("extend", n, self._schema.row_bytes + -(-items // max(n, 1)), "Write")
        columns, lane = prepared, plan.lane
        if self.lanes > 1:
            columns = [*prepared, lane if isinstance(lane, Tensor) else torch.full((n,), lane or 0, device="cpu")]
        lanes = lane.tolist() if isinstance(lane, Tensor) else [int(lane or 0)] * n
        schema = self._written_of(len(prepared))
        with self._writes:
            told = self._streamed(schema, columns, lanes, n)
            if told is not None:
                return Write(torch.tensor(told, device="cpu") if told else native.empty_rows(n).fill_(-1), 0)
            known = {}
            if self._under_way is not None:
                known = self._under_way.forget()  # else other threads' rows would be numbered, and come behind these
                self._under_way.settle()
                if self._under_way.rows:  # the limits of the store refuse them
                    self._under_way.newest = known
                    raise native.NotAdmitted(n)
            answer = self._sent(wire.record_batch(schema, columns, n))
            (rows,) = wire.tensors_in(answer.rows, answer.columns)
            if self._under_way is not None:
                self._under_way.length *= self._once  # else the writer of the store says which rows are replaced
                self._under_way.newest = {**known, **dict(zip(lanes, rows.tolist(), strict=True))}
            return Write(rows, 0)

    def _streamed(self, schema: pa.Schema, columns: list[Tensor], lanes: list[int], n: int) -> list[int] | None:
        """What a write that does not wait is told. None: it is to wait."""
        if self._under_way is None:
            return None
        self.connection.check()
        if self._schema.ragged or n * self._schema.row_bytes > GATHERED:
            return self._under_way.put(wire.record_batch(schema, columns, n), lanes)
        dense = map(Tensor.contiguous, columns)
        return self._under_way.gather(schema, [ctypes.string_at(it.data_ptr(), it.nbytes) for it in dense], lanes)

    def add_row(self, lane: object, data: object, ignored: Iterable[str] = ()) -> tuple[int, int] | None:  # noqa: ARG002
        """One row that goes with others, without waiting for the answer: its number or -1, and 0. None: it takes the long path."""
        self.adopt_fields()
        under_way = self._under_way
        intake = self.structure.intake if under_way is not None and self.ndim == 1 else None
        raws = None if intake is None else intake.bytes_of(data)
        if under_way is None or raws is None or not isinstance(lane, int) or sum(map(len, raws)) > GATHERED:
            return None
        self.connection.check()
        schema = self._written_of(len(raws))
        if self.lanes > 1:
            raws.append(lane.to_bytes(8, sys.byteorder))
        told = under_way.gather(schema, raws, (lane,))
        return None if told is None else (told[0] if told else -1, 0)

    def _written_of(self, fields: int) -> pa.Schema:
        """Of messages of rows with so many fields: those that were prepared before others were added have fewer."""
        if fields not in self._written:
            self._written[fields] = wire.arrow_schema(wire.written_columns(self._schema.until(fields)))
        return self._written[fields]

    def _sent(self, batch: RecordBatch) -> Answer:
        """The answer to rows: one request for each lane that they go to, which may be sent again where the server can know it."""
        lanes = 1 if self.lanes == 1 else len(batch.columns[-1].unique())
        each = [min(IN_DOUBT, lanes - first) for first in range(0, lanes, IN_DOUBT)]
        with self._writing.lock:
            while True:
                self._numbers += [1] * (len(each) - len(self._numbers))
                number, *more = self._numbers[: len(each)]
                command = protocol.Append(self._writer, number, more) if self._once else protocol.Append()
                resumed = self._writing.resumed
                try:
                    self._writing.send(Message(msgspec.json.encode(command), batch, again=self._once))
                    answer = self._writing.receive()
                except protocol.NotOnce as error:
                    if self._kept:  # a copy took over that lacks them
                        self._send_kept(batch.num_rows)
                        continue
                    # A name may have been forgotten, beside a thousand others. A new one is refused for what the store is.
                    self._once = number > 1
                    self._rename()
                    if self._writing.resumed != resumed:  # the first one may have been written
                        raise ConnectionError(DOUBTFUL) from error
                except RateLimited as error:  # nothing was written now, and the number stays the next one
                    # some of its lanes may have been, by another server
                    if lanes > 1 and self._writing.resumed != resumed:
                        self._rename()
                        raise ConnectionError(DOUBTFUL) from error
                    raise native.NotAdmitted(batch.num_rows) from None
                except BaseException:  # perhaps it was not written, so that the next number would come too early
                    self._writing.forget()
                    self._rename()
                    raise
                else:
                    written = msgspec.json.decode(answer.metadata, type=protocol.Written)
                    self.limits.tell(written.limits)
                    if self._once:
                        self._numbers[: len(each)] = [n + count for n, count in zip(self._numbers, each, strict=False)]
                        self._keep(command, batch, written)
                    return answer

    def _keep(self, command: protocol.Append, batch: RecordBatch, written: protocol.Written) -> None:
        """Keep rows until the copy of the store has them, if there is one; of more than fit, the newest."""
        if written.position:
            self._kept.append((written.position, msgspec.json.encode(command), wire.copied(batch)))
            self._kept_bytes += batch.nbytes
        while self._kept and (self._kept[0][0] <= written.copied or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= self._kept.popleft()[-1].nbytes

    def _send_kept(self, waiting: int) -> None:
        """Send again what is kept. Of a part the server says that it has it, or cannot know. The rest stays kept where this fails.

        Raises ``NotAdmitted``: limits do not admit it, nor the rows that wait for it. What sending raises.
        """
        try:
            while self._kept:
                _, command, batch = self._kept[0]
                with suppress(protocol.NotOnce):
                    self._writing.send(Message(command, batch))
                    self._writing.receive()
                self._kept_bytes -= self._kept.popleft()[-1].nbytes
        except RateLimited:
            raise native.NotAdmitted(waiting) from None
        except BaseException:
            self._writing.forget()
            raise

    def take(self, command: protocol.Move, columns: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
        """Write rows of another store, in a request that may be repeated: what :class:`protocol.Move` has. No writes go on beside it.

        Raises ``TakesNone``: nothing was written; ``NotOnce``, ``ConnectionError``: rows may be written or not.
        """
        schema = wire.arrow_schema([*wire.written_columns(self._schema), wire.MOVED])
        rows = wire.record_batch(schema, columns, len(columns[-1]))
        with self._writing.alone():
            self._writing.send(Message(msgspec.json.encode(command), rows))
            answer = self._writing.receive()
            (number,) = msgspec.json.decode(answer.metadata, type=dict[str, int]).values()
            return number, wire.tensors_in(answer.rows, answer.columns)

    def _rename(self) -> None:
        """Begin again as a writer that the server does not know."""
        self._writer, self._numbers = uuid4(), []

    def check_removal(self, rows: Tensor) -> None:
        """Raises, too: ``RuntimeError``: the server is read-only, or of an older engram. ``ValueError``: too many. ``ConnectionError``."""
        super().check_removal(rows)
        protocol.check_fits("remove", len(rows), _EDIT_BYTES, "Remove")
        with self._arrived():
            protocol.check_level(self.served, str(self.connection.access), "remove")
            self.connection.ask("can_remove", protocol.CanRemove(), dict)

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
            answer = self._edit(protocol.Remove(), rows, tickets)
            removed = msgspec.json.decode(answer.metadata, type=protocol.Removed).removed
            if self._editing.resumed != resumed:
                removed = int((self._tickets(torch.unique(rows)) < 0).sum())
            return removed

    def _tickets(self, rows: Tensor) -> Tensor:
        answer = self._edit(protocol.Tickets(), rows, torch.full_like(rows, -1))
        return wire.tensors_in(answer.rows, answer.columns)[0]

    def _edit(self, command: protocol.Tickets | protocol.Remove, rows: Tensor, tickets: Tensor) -> Answer:
        with self._editing.alone():
            batch = wire.record_batch(_EDITS, [rows, tickets], len(rows))
            self._editing.send(Message(msgspec.json.encode(command), batch))
            return self._editing.receive()

    # ---- methods that the server calls ---------------------------------------------------------------------------------

    def call_each(self, name: str, given: Mapping[str, object]) -> list[tuple[Tensor, ...]]:
        with self._arrived():
            return [cast("tuple[Tensor, ...]", self.connection.call(name, given))]

    def update(self, rows: Tensor, given: Mapping[str, object]) -> tuple[Tensor | None, ...]:
        with self._arrived():
            return update_once(self.connection.called, rows, given)

    def stores(self, *, home: bool) -> list[OneStore]:  # noqa: ARG002 - there is one
        return [OneStore(self._call, lambda _: nullcontext(), 0)]

    def _call(self, name: str, given: Mapping[str, object], *row: object) -> object:
        with self._arrived():
            return self.connection.call(name, given, *row)

    def empty(self, *, keep_write_count: bool) -> None:
        with self._arrived():
            self.connection.ask("empty", protocol.Empty(keep_write_count), dict)

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """What ``ReplayBuffer.end_trajectory`` does."""
        with self._arrived():
            named = [([key] if isinstance(key, str) else list(key), role) for key, role in (roles or {}).items()]
            command = protocol.EndTrajectory(lanes.tolist(), terminated, named)
            rows = self.connection.ask("end_trajectory", command, list[int])
            return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def limit_part(self, limit: protocol.Limit) -> None:
        """Set limits of several stores, of which this is one."""
        self.connection.ask("limit", limit, dict)

    # ---- reading -------------------------------------------------------------------------------------------------------

    def fetch_dump(self, folder: Path, progress: Callable[[int], None]) -> None:
        with self._arrived():
            self.connection.fetch_dump(folder, progress)

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[type[RemoteStorage], tuple[Connection]]:
        return RemoteStorage, (self.connection,)

    def close(self) -> None:
        opened = (self._learning, self._redrawing, self._writing, self._editing, self.connection)
        if self._under_way is not None:
            self._under_way.close(wait=not self.connection.is_searching)
        super().close()
        for one in opened:
            one.close()

    def __repr__(self) -> str:
        return f"RemoteStorage({self.connection.access})"
