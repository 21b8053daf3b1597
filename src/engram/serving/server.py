"""An Arrow Flight server of one store."""

from __future__ import annotations

import contextlib
import hmac
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast

import msgspec
import pyarrow as pa
import torch
from pyarrow import flight

from engram.remote import wire
from engram.remote.commands import (
    ACTIONS,
    LEAVING,
    MAX_MESSAGE,
    Append,
    Prioritize,
    Remove,
    Removed,
    Sample,
    Tickets,
    decoded,
    held_bytes,
    refusal_of,
)
from engram.serving.service import TooMany

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engram.remote.addresses import Address
    from engram.serving.service import Service

C = TypeVar("C", bound=msgspec.Struct)
_LEARN = cast("type[Sample | Prioritize]", Sample | Prioritize)
_EDIT = cast("type[Tickets | Remove]", Tickets | Remove)
_FILES = pa.schema([("name", pa.string()), ("data", pa.binary())])
#: Streams at a time: each holds a thread.
MAX_STREAMS = 1024
#: For how long a server that is to end waits for its clients.
_LEAVE_S = 5.0


#: Errors that Flight knows.
refusal, broken, away = flight.FlightUnauthenticatedError, flight.FlightServerError, flight.FlightUnavailableError


class _Token(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets calls in that bring the token."""

    def __init__(self, token: bytes) -> None:
        super().__init__()
        self._expected = b"Bearer " + token

    def start_call(self, info: object, headers: dict[str, list[str | bytes]]) -> None:  # noqa: ARG002 - all calls need it
        given = next(
            (value for name, values in headers.items() if name.lower() == "authorization" for value in values), b""
        )
        raw = given.encode(errors="replace") if isinstance(given, str) else given
        if not hmac.compare_digest(raw, self._expected):
            raise refusal("expected the server's token")


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Answers until :meth:`drain`. Rows and commands are checked before anything is done."""

    def __init__(
        self, service: Service, address: Address, *, token: bytes = b"", tls: tuple[bytes, bytes] | None = None
    ) -> None:
        self._service = service
        self._lock = threading.Lock()
        #: Actions under way, of which the last one to end tells.
        self._actions, self._idle = 0, threading.Condition(self._lock)
        #: Those under way end by a call of these.
        self._streams: dict[int, Callable[[], None]] = {}
        self._draining = False
        super().__init__(
            address.uri,
            middleware={"token": _Token(token)} if token else None,
            **({} if tls is None else {"tls_certificates": [tls]}),
        )

    # ---- actions -------------------------------------------------------------------------------------------------------

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:  # noqa: ARG002 - Flight's
        """One of :data:`ACTIONS`: JSON in, JSON out."""
        with self._at_work():
            return iter([msgspec.json.encode(self._done(action))])

    def _done(self, action: flight.Action) -> object:
        """What is answered."""
        try:
            kind = ACTIONS.get(action.type)
            if kind is None:
                raise ValueError(f"expected one of the commands {', '.join(ACTIONS)}, got {action.type!r:.40}.")
            command = decoded(kind, action.body.to_pybytes() or b"{}", action.type)
            return self._service.do(action.type, command)
        except Exception as error:  # noqa: BLE001 - the client raises it
            return refusal_of(error)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Do an action, unless the server leaves: then clients ask the next one."""
        with self._lock:
            if self._draining:
                raise away("the server leaves")
            self._actions += 1
        try:
            yield
        finally:
            with self._lock:
                self._actions -= 1
                self._idle.notify_all()

    def list_actions(self, context: object) -> list[tuple[str, str]]:  # noqa: ARG002 - Flight's
        """The commands, and what they do."""
        return [(name, kind.__doc__ or "") for name, kind in ACTIONS.items()]

    # ---- streams -------------------------------------------------------------------------------------------------------

    def do_exchange(
        self,
        context: object,  # noqa: ARG002 - Flight's
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """A stream of batches that are drawn (``learn``), of rows that are written (``write``), or of rows that go (``edit``)."""
        kind = _STREAMS.get(descriptor.command)
        if kind is None:
            raise broken(f"expected a stream learn, write or edit, got {descriptor.command!r:.40}.")
        stream = kind(self._service, reader, writer)
        with self._lock:
            if self._draining or len(self._streams) >= MAX_STREAMS:
                raise away("the server leaves, or has as many streams as it takes")
            self._streams[id(stream)] = stream.leave
        try:
            stream.run()
        finally:
            with self._lock:
                del self._streams[id(stream)]

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.FlightDataStream:  # noqa: ARG002 - Flight's
        """The files of a dump."""
        if ticket.ticket != b"dump":
            raise broken(f"expected the ticket dump, got {ticket.ticket!r:.40}.")
        return flight.GeneratorStream(_FILES, self._files())

    def _files(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._service.dump_files(_FILES)
        except TooMany as error:
            raise away(str(error)) from error

    def drain(self) -> bool:
        """Finish the commands under way, take no others, and tell every client that the server leaves: whether that is done.

        A client that does not read what it asked for is waited for no longer than a few seconds.
        """
        with self._lock:
            self._draining = True
            streams = list(self._streams.values())
        telling = [threading.Thread(target=leave, daemon=True) for leave in streams]
        for thread in telling:
            thread.start()
        deadline = time.monotonic() + _LEAVE_S
        for thread in telling:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            idle = self._idle.wait_for(lambda: not self._actions, max(0.0, deadline - time.monotonic()))
        return idle and not any(thread.is_alive() for thread in telling)


class _Stream(Generic[C]):
    """One client's messages, in order."""

    #: What messages say.
    commands: ClassVar[type[msgspec.Struct]]
    call = ""

    def __init__(
        self, service: Service, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter
    ) -> None:
        self.service = service
        self._reader, self._writer = reader, writer
        self._schema: tuple[pa.Schema, list[wire.Column]] | None = None
        #: Held while a message is worked on.
        self._working = threading.Lock()
        self._left = False
        #: Whether the schema of messages was checked: a stream has one.
        self._checked = False

    def run(self) -> None:
        """Answer until the client or the server leaves."""
        self.count(1)
        try:
            self._run()
        finally:
            self.count(-1)

    def count(self, change: int) -> None:
        """A client has begun such a stream, or ended it."""

    def _run(self) -> None:
        while True:
            try:
                chunk = self._reader.read_chunk()
            except StopIteration:
                return
            with self._working:
                if self._left:
                    return
                said = chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
                try:
                    self.answer(cast("C", decoded(self.commands, said, self.call)), chunk)
                except flight.FlightError:
                    raise
                except Exception as error:  # noqa: BLE001 - the client raises it
                    self._writer.write_metadata(msgspec.json.encode(refusal_of(error)))

    def leave(self) -> None:
        """Say so, behind what is being worked on."""
        with self._working:
            self._left = True
            with contextlib.suppress(flight.FlightError, OSError):  # the client has left already
                self._writer.write_metadata(LEAVING)

    def answer(self, command: C, chunk: flight.FlightStreamChunk) -> None:
        """Do what a message says."""
        raise NotImplementedError

    def put(self, said: bytes, columns: list[wire.Column], tensors: list[torch.Tensor], rows: int) -> None:
        """Answer with rows."""
        if self._schema is None:
            self._schema = wire.arrow_schema(columns), columns
            self._writer.begin(self._schema[0])
        if columns is not self._schema[1] and columns != self._schema[1]:
            raise broken("the columns of batches have changed: begin another stream")
        self._writer.write_with_metadata(wire.record_batch(self._schema[0], tensors, rows), said)

    def rows_of(self, chunk: flight.FlightStreamChunk, expected: list[wire.Column], call: str) -> list[torch.Tensor]:
        """The rows of a message. Raises ``ValueError``: it has none, others, or too many."""
        batch = chunk.data
        if batch is None:
            raise ValueError(f"{call}: expected rows in the message, got none.")
        nbytes = held_bytes(batch.num_rows, _row_bytes(tuple(expected)))
        if max(nbytes, batch.nbytes) > MAX_MESSAGE:
            raise ValueError(
                f"{call}: expected at most {MAX_MESSAGE} bytes, got {batch.num_rows} rows, {nbytes} bytes."
            )
        if not self._checked:
            got = wire.columns_in(batch.schema)
            if got != expected:
                raise ValueError(f"{call}: expected the columns {_said(expected)}, got {_said(got)}.")
            self._checked = True
        batch.validate()
        return wire.tensors_in(batch, expected)


class _Learning(_Stream["Sample | Prioritize"]):
    commands, call = _LEARN, "learn"

    def count(self, change: int) -> None:
        self.service.count_stream(change)

    def answer(self, command: Sample | Prioritize, chunk: flight.FlightStreamChunk) -> None:
        if isinstance(command, Sample):
            with self.service.answering(command):
                batches = self.service.sample(command)
                self.put(msgspec.json.encode(batches.said), batches.columns, batches.tensors, len(batches.tensors[0]))
            return
        try:
            self.service.prioritize(*self.rows_of(chunk, wire.PRIORITIES, "prioritize"))
        except Exception as error:  # nothing comes back
            raise broken(f"prioritize: {error}") from error


class _Writing(_Stream[Append]):
    commands, call = Append, "write"

    def count(self, change: int) -> None:
        self.service.count_writer(change)

    def answer(self, command: Append, chunk: flight.FlightStreamChunk) -> None:
        columns = self.rows_of(chunk, self.service.written, "append")
        rows = self.service.append(command, columns, chunk.data.num_rows)
        self.put(b'{"ok":1}', wire.ROW, [rows], len(rows))


class _Editing(_Stream["Tickets | Remove"]):
    commands, call = _EDIT, "edit"

    def answer(self, command: Tickets | Remove, chunk: flight.FlightStreamChunk) -> None:
        rows, tickets = self.rows_of(chunk, wire.EDITS, "edit")
        if isinstance(command, Tickets):
            self.put(b'{"ok":1}', wire.TICKET, [self.service.tickets(rows)], len(rows))
        else:
            removed = Removed(self.service.remove(rows, tickets))
            self._writer.write_metadata(msgspec.json.encode(removed))


_STREAMS: dict[bytes, type[_Learning | _Writing | _Editing]] = {
    b"learn": _Learning,
    b"write": _Writing,
    b"edit": _Editing,
}


@lru_cache
def _row_bytes(columns: tuple[wire.Column, ...]) -> int:
    return sum(column.nbytes for column in columns)


def _said(columns: list[wire.Column]) -> str:
    return ", ".join(f"{it.name} {it.dtype} {list(it.shape)}" for it in columns)[:400]
