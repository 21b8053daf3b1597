"""The storage of a buffer whose rows are on a server."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, cast
from uuid import uuid4

import msgspec
import torch
from torch import Tensor

from engram._native import NotAdmitted
from engram._unsupported import refused, refusing
from engram.errors import RateLimited
from engram.format.schema import decode
from engram.remote import wire
from engram.remote.commands import (
    COALESCED_BYTES,
    MAX_BATCHES,
    MAX_MESSAGE,
    Append,
    CanSample,
    Empty,
    EndTrajectory,
    NotOnce,
    Prioritize,
    Sample,
    Sampled,
    State,
    Stats,
)
from engram.remote.connection import IN_DOUBT as DOUBTFUL
from engram.remote.connection import Exchange, Message
from engram.remote.streaming import WritesUnderWay
from engram.storages import Storage, check_count, leading_size
from engram.storages._columns import rows_of_batch, rows_of_slot
from engram.storages._structure import Structure, stacked
from engram.store.requests import IN_DOUBT
from engram.types import Traits, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pyarrow import RecordBatch

    from engram.format.schema import Schema
    from engram.limits import Rules
    from engram.persist.roles import Roles
    from engram.remote.connection import Answer, Connection
    from engram.storages import Count
    from engram.store import Store
    from engram.types import Info, WritePlan

#: Columns of new priorities.
_PRIORITIES = wire.arrow_schema(
    [wire.Column("row", "int64", ()), wire.Column("priority", "float64", ()), wire.Column("ticket", "int64", ())]
)


#: So many bytes fit into the buffers of a connection whose server does not read.
_UNREAD = 32 << 10
#: Between two requests that the limits of the store refused.
_ASK_AGAIN_S = 0.02


class OfServer:
    """A component that asks a server."""


class ServedLimits:
    """Limits of a store that its server follows. It refuses at once what it does not admit, so clients ask again."""

    #: It may be: only the server knows.
    limited = True
    #: Of what is written to the store nothing is heard: it is waited for without it.
    write_count = 0

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

    def size(self) -> int:
        return self.state().size

    def admit_samples(self, rows: int) -> bool:  # noqa: ARG002 - the server is asked by the draw
        return True

    def admits_samples(self, rows: int) -> bool:  # noqa: ARG002 - the server has said that the rows can be sampled
        return True

    def give_back_samples(self, rows: int) -> None:
        """The server has done it."""

    def limit_event(self, samples: bool) -> int:  # noqa: ARG002 - as of a store that is here
        return 0

    def await_limit(self, samples: bool, rows: int, event: int, seconds: float) -> bool:  # noqa: ARG002
        """Sleep until the server is to be asked again."""
        time.sleep(min(seconds, _ASK_AGAIN_S))
        return True

    def await_insert(self, written: int, seconds: float) -> None:  # noqa: ARG002
        time.sleep(min(seconds, _ASK_AGAIN_S))

    def count_limit_wait(self, samples: bool) -> None:
        """The server counts none of these."""

    def wake_limits(self) -> None:
        """What waits here asks again by itself."""


class Memory(NamedTuple):
    """What readers of a store look at, of one that is elsewhere."""

    schema: Schema
    place: str
    core: ServedLimits
    directory: None = None
    is_native: bool = True
    closed: bool = False


class Drawn(NamedTuple):
    """A batch that a server drew."""

    columns: list[Tensor]
    rows: Tensor
    info: Info
    last: bool
    """An epoch ended with it."""


_BY_NUMBER = "Sample them, or use ReplayBuffer.open(directory) where the store is."


class RemoteStorage(Storage):
    """A store that a server has open. Whatever needs its rows here refuses, and says what to do instead."""

    traits = Traits(has_fields=True, is_remote=True)

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connect(connection)

    def _connect(self, connection: Connection) -> None:
        served = connection.served
        self.connection = connection
        self._schema = schema = decode(served.schema.encode(), "connect")
        self.structure = Structure.from_schema(schema)
        self._limits = ServedLimits(connection)
        place = f"at {', '.join(map(str, connection.access.addresses))}"
        self.memory = cast("Store", Memory(schema, place, self._limits))  # as far as readers look at it
        self.ndim = 1 + len(schema.columns)
        self._written = wire.arrow_schema(wire.written_columns(schema))
        self._learning, self._writing = Exchange(connection, "learn"), Exchange(connection, "write")
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

    initialized = True
    device = torch.device("cpu")
    shared = True

    @property
    def max_size(self) -> int:
        return self._schema.capacity

    @property
    def requested_size(self) -> int:
        return self.connection.served.requested_size

    @property
    def lanes(self) -> int:
        return self._schema.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        return self._schema.columns

    @property
    def nbytes(self) -> int:
        return self._schema.row_bytes * self._schema.capacity

    def _state(self) -> State:
        self._arrive()
        return self._limits.state()

    def __len__(self) -> int:
        return self._state().size

    @property
    def write_count(self) -> int:
        return self._state().write_count

    def counters(self) -> dict[str, float]:
        counters = self._state().counters
        if self._under_way is not None:
            counters |= {"rows_dropped": self._under_way.dropped, "rows_under_way": self._under_way.rows}
        return counters

    def _arrive(self) -> None:
        """Wait for what was written before."""
        if self._under_way is not None:
            self._under_way.settle()

    def admit(self, component: object, call: str) -> None:
        """Raise to refuse a sampler or a writer that a buffer is to take, in this call."""
        if not isinstance(component, OfServer):
            raise refused(
                call, "The store is drawn from and written to as its server does: change it where the store is."
            )

    def limit(self, rules: Rules, unconsumed: int) -> None:  # noqa: ARG002 - it is refused
        raise refused("limit", "Call it where the store is.")

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def batches_in_message(self, rows: int) -> int:
        """How many batches of so many rows one message asks for."""
        return min(MAX_BATCHES, max(1, COALESCED_BYTES // max(1, rows * self._schema.row_bytes)))

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        """Ask for a batch of each key, in one message, and do not wait for it.

        Raises ``ValueError``: a batch is larger than a message may be.
        """
        if rows * self._schema.row_bytes > MAX_MESSAGE:
            raise ValueError(
                f"sample: batch_size: expected batches of at most {MAX_MESSAGE} bytes over a connection, got {rows} rows of "
                f"{self._schema.row_bytes} bytes."
            )
        command = Sample(rows, [key & (1 << 64) - 1 for key in keys])
        with self._learning.lock:
            self._learning.send(Message(msgspec.json.encode(command)))

    def answer(self, rows: int) -> list[Drawn]:
        """The batches, of so many rows, of the message that was asked for first. Raises what drawing the first raised."""
        with self._learning.lock:
            try:
                return self._batches(self._learning.receive())
            except RateLimited:
                raise NotAdmitted(rows) from None

    def settle(self) -> None:
        """Wait until all that was asked for is drawn."""
        with self._learning.lock:
            self._learning.settle()

    def forget_asked(self) -> None:
        """Drop what was asked for."""
        with self._learning.lock:
            self._learning.settle()
            self._learning.forget()

    def draw(self, key: int, rows: int) -> Drawn:
        """A batch, in one request. Nothing else may be under way."""
        with self._learning.lock:
            try:
                self.ask_for([key], rows)
                return self.answer(rows)[0]
            finally:
                self._learning.forget()  # of one that was interrupted

    def _batches(self, answer: Answer) -> list[Drawn]:
        said = msgspec.json.decode(answer.said, type=Sampled)
        fields, counts = len(self._schema.fields), [math.prod(shape) for shape in said.sizes]
        entries = [wire.entry_of(it.name) for it in answer.columns[fields + 1 :]]
        batches: list[Drawn] = []
        for shape, flat in zip(said.sizes, wire.batches_in(answer.rows, answer.columns, counts), strict=True):
            tensors = flat if len(shape) == 1 else [it.reshape(*shape, *it.shape[1:]) for it in flat]
            info: Info = dict(zip(entries, tensors[fields + 1 :], strict=True))
            # Storages put columns together themselves: rows of windows lie one after the other.
            last = said.last and len(batches) == len(counts) - 1
            batches.append(Drawn(tensors[:fields], tensors[fields], info, last))
        return batches

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        """Send new priorities. Of what was asked for before, none is drawn by them; all that is asked for later is."""
        numbers = torch.full_like(rows, -1) if tickets is None else tickets
        batch = wire.record_batch(_PRIORITIES, [rows, priorities, numbers], len(rows))
        with self._learning.lock:
            self._unread += batch.nbytes
            if self._unread > _UNREAD:  # a server that waits for us to read its batches does not read
                self._learning.settle()
                self._unread = batch.nbytes
            self._learning.send(Message(msgspec.json.encode(Prioritize()), batch, again=False), answered=False)

    def can_sample(self, rows: int) -> bool:
        """Whether a batch of so many rows could be drawn now."""
        return bool(self.connection.ask("can_sample", CanSample(rows), bool))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[Tensor], int]:
        if batched and isinstance(data, list):
            data = stacked(data, call, self.structure.dtypes)
        if self.ndim > 1:
            data, columns = (rows_of_batch if batched else rows_of_slot)(data, self.ndim, call)
            batched = True
            if columns != self.columns:
                raise RuntimeError(f"{call}: expected columns {self.columns} as in the first write, got {columns}.")
        n = leading_size(data, call) if batched else 1
        check_count(call, count, n)
        return self.structure.flatten(data, n if batched else None, call, ignored), n

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        if n * self._schema.row_bytes > MAX_MESSAGE:
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

    def add_row(self, lane: object, data: object, ignored: Iterable[str] = ()) -> None:
        """There is no short path."""

    def append_of(self, data: object, lane: object) -> None:
        """There is no short path."""

    def empty(self, *, keep_write_count: bool) -> None:
        self._arrive()
        self.connection.ask("empty", Empty(keep_write_count), dict)

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """What ``ReplayBuffer.end_trajectory`` does."""
        self._arrive()
        named = [([key] if isinstance(key, str) else list(key), role) for key, role in (roles or {}).items()]
        rows = self.connection.ask("end_trajectory", EndTrajectory(lanes.tolist(), terminated, named), list[int])
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    # ---- reading -------------------------------------------------------------------------------------------------------

    def batch(self, columns: Sequence[Tensor], n: int | tuple[int, ...] | None) -> object:
        return self.structure.unflatten(columns, (n,) if isinstance(n, int) else n, self.device)

    def fetch_dump(self, folder: Path) -> None:
        """Write the files of a dump that the server makes into a new folder."""
        self._arrive()
        self.connection.fetch_dump(folder)

    # ---- what needs the rows here ----------------------------------------------------------------------------------------

    extent = refusing("extent", _BY_NUMBER)
    tickets_of = refusing("rb[index]", _BY_NUMBER)
    hold_nothing = refusing("rb[index]", _BY_NUMBER)
    field = refusing("rb[key]", _BY_NUMBER)
    settled = refusing("sampler", _BY_NUMBER)
    locate = resolve = read = patch = pack = get = refusing("rb[index]", _BY_NUMBER)
    edit = edit_fields = patch_fields = refusing("rb[index] = value", "Edit them where the store is.")
    next_number = refusing("state_dict", "Save with dumps(path), which streams them.")
    state_dict = state_without_rows = prepare_load = refusing(
        "state_dict", "Save with dumps(path), which streams them."
    )

    priorities = refusing("priorities", "Rows are drawn by them where the store is.")

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        return {"connection": self.connection}

    def __setstate__(self, state: dict[str, object]) -> None:
        Storage.__init__(self)
        self._connect(cast("Connection", state["connection"]))

    def close(self) -> None:
        exchanges, connection = (self._learning, self._writing), self.connection
        if self._under_way is not None:
            self._under_way.close(wait=not self.connection.is_searching)
        super().close()
        for exchange in exchanges:
            exchange.close()
        connection.close()

    def __repr__(self) -> str:
        return f"RemoteStorage({', '.join(map(str, self.connection.access.addresses))})"
