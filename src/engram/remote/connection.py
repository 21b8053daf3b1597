"""A connection to the servers of one store: commands, and streams that go on at another server when theirs is gone."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow as pa
import torch
from pyarrow import flight

from engram._support import fork, version, words
from engram.remote import protocol, wire
from engram.remote.member_list import MemberList
from engram.store.trees import tree_bytes, tree_of

T = TypeVar("T")

#: Errors of a server that is gone, or of the way to it.
GONE = (
    flight.FlightUnavailableError,
    flight.FlightInternalError,
    flight.FlightCancelledError,
    flight.FlightTimedOutError,
    OSError,
    StopIteration,
)
#: Of a write.
IN_DOUBT = (
    "extend: the server was lost before it acknowledged the rows: they may be written or not. Look at write_count."
)
#: Streams of one client that break in a row, without an answer in between.
_MAX_STREAM_FAILURES = 20
#: For how long a server may take to answer the first command.
_FIRST_ANSWER_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
#: For how long another thread that connects is waited for, by one that is in a hurry.
_HURRY_S = 1.0
#: A peer that does not acknowledge what is sent, or an idle one that does not answer a ping, is gone after so long.
_KEEPALIVE_TIMEOUT_MS = 10_000
#: Between two pings. A server takes those that come more often than each 5 minutes for an attack, and ends the connection.
_KEEPALIVE_INTERVAL_MS = 310_000
#: A parent's clients and streams, in a forked child: to free one would wait for threads that are not there.
_of_parents: list[object] = []
#: Of a file in a dump.
_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


class Found(NamedTuple):
    """Addresses of the servers of one store, and their token. Its text leaves the token out."""

    addresses: tuple[protocol.Address, ...]
    token: bytes

    def __repr__(self) -> str:
        return f"Found({self})"

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))


class Servers(Protocol):
    """A source of the addresses of a store's servers."""

    @property
    def reached(self) -> Access:
        """How they are reached, wherever they are."""

    @property
    def replaces_lost(self) -> bool:
        """Whether an empty store takes the place of one that was lost."""

    def find(self, known: protocol.Served | None) -> Found:
        """Where they are now. ``known``: what they serve; None: that is not known yet.

        Raises ``ConnectionError``: they are nowhere now. OSError, ValueError: their token cannot be read.
        """


class Access(NamedTuple):
    """Addresses of servers, and how they are reached: all that a pickled buffer takes along. It holds no secret."""

    addresses: tuple[protocol.Address, ...]
    #: The path of the file.
    token: str | None
    #: The paths of certificates that sign theirs; empty: those of the system.
    root_certificates: tuple[str, ...]
    #: For how long servers that are gone are looked for.
    patience_s: float
    #: What a write does that has no credits; None: writes wait for their acknowledgement.
    full: protocol.Full | None = None
    #: Whether draws, numbers and priorities wait for no server that does not answer at once: other stores go on. Writes do.
    hurried: bool = False
    #: The paths of the client's certificate and its key.
    own_certificate: tuple[str, str] | None = None
    #: By which rows are compressed on their way.
    compression: str | None = None
    #: Where the addresses of a fleet are listed; None: they do not change.
    members: MemberList | None = None
    #: Whether no other client or process writes to the lanes that this one writes to.
    own_lanes: bool = False
    #: For how long a call may take; None: it is waited for.
    timeout_s: float | None = None

    @property
    def reached(self) -> Access:
        return self

    @property
    def replaces_lost(self) -> bool:
        return False

    def find(self, known: protocol.Served | None) -> Found:  # noqa: ARG002 - they are where they were
        """Where they are, and the token in the file. Raises as :func:`token_in`."""
        return Found(self.addresses, protocol.token_in(self.token, "connect"))

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))


class Final(ConnectionError):
    """Raised where no patience helps."""


class Untrusted(Final):
    """Raised for a server with which no TLS connection can be made."""


class _AnotherStore(Final, ValueError):
    """Raised for a server whose rows are not those of the servers before: of a fleet, the store is gone."""


class Connection:
    """A connection to the servers of one store. One of them is used at a time.

    Args:
        access: where they are.
        known: what they serve; None: the first one says it.
        opens: at once; else at the first use, for which ``known`` must be given.
    """

    def __init__(self, access: Servers, known: protocol.Served | None = None, *, opens: bool = True) -> None:
        self.access = access
        self._lock = fork.rlock()
        fork.registered(self)
        self._client: flight.FlightClient | None = None
        self.options: flight.FlightCallOptions | None = None
        self._next = 0
        self.forked = self._closed = False
        #: Set when it is closed: nothing is looked for then.
        self._ends = threading.Event()
        #: While no server answers; and since one that serves another store did.
        self.is_searching = self.is_replaced = False
        #: What the first server said. Others must say the same.
        self.served = self._open(known) if opens or known is None else known

    def _open(self, known: protocol.Served | None = None, patience_s: float | None = None) -> protocol.Served:
        """Connect to the first server that answers. Raises as ``ReplayBuffer.connect``."""
        patience_s = self.access.reached.patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                served = self._opened_one(self.access.find(known), known)
            except Final:
                raise
            except ConnectionError as error:
                self.is_searching = True
                if time.monotonic() + pause > deadline:
                    raise ConnectionError(
                        f"connect: no server answered{words.format_wait(patience_s)} at {self.access}: {_short(error)} Start one "
                        "with engram serve, or pass another address."
                    ) from error
            else:
                self.is_searching = False
                return served
            self.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _opened_one(self, found: Found, known: protocol.Served | None) -> protocol.Served:
        """Connect to the first server that answers. Raises ``ConnectionError``: none does; ``ValueError``: all serve another store."""
        why: Exception | None = None
        final: Final | None = None
        for _ in found.addresses:
            address = found.addresses[self._next % len(found.addresses)]
            try:
                return self._opened(address, known, found.token)
            except PermissionError:
                raise
            except Final as error:
                final, self.is_replaced = error, isinstance(error, _AnotherStore)
                self._next += 1
            except GONE as error:
                why = error
                self._next += 1
        if final is not None and (why is None or isinstance(final, Untrusted)):
            raise final
        raise ConnectionError(str(why)) from why

    def _opened(self, address: protocol.Address, known: protocol.Served | None, token: bytes) -> protocol.Served:
        access = self.access.reached
        headers = [(b"authorization", b"Bearer " + token)] if token else []
        more = _secrets_of(access) if address.scheme == "grpc+tls" else {}
        client = flight.connect(
            address.uri,
            generic_options=[
                ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
            ],
            override_hostname=address.certified or None,
            **more,
        )
        first = flight.FlightCallOptions(headers=headers, timeout=_FIRST_ANSWER_TIMEOUT_S)
        try:
            with _explained(address):
                newest = (known.store, known.generation) if known is not None and known.generation else ()
                described = msgspec.json.encode(protocol.Describe(protocol.PROTOCOL, version.__version__, *newest))
                raw = _answer(client, first, "describe", described, "connect")
            refuse(raw)
            served = msgspec.json.decode(raw, type=protocol.Served)
            if known is not None and served.store != known.store and not self.access.replaces_lost:
                raise _AnotherStore(f"connect: {address} serves another store than the servers before. Connect again.")
            if access.compression not in served.compressions:
                raise Final(
                    f"connect: {address}: its engram sends no rows by {access.compression}. Connect without compression=."
                )
        except BaseException:
            client.close()
            raise
        if known is not None and served.generation > known.generation and served.lost:
            words.warn(
                f"connect: {address} took over from another server. It lacked at least {words.count(served.lost, 'row')} of that one."
            )
        if served.other and isinstance(self.access, Access):
            addresses = dict.fromkeys((*self.access.addresses, protocol.address_of(served.other, "connect")))
            self.access = self.access._replace(addresses=tuple(addresses))
        if served.schema and not self.access.replaces_lost:
            # A channel connects again by itself, to what listens at its address then.
            headers = [*headers, (protocol.MEANT_STORE.encode(), served.store.encode())]
        with self._lock:
            self.rest()
            self._client = client
            self.options = flight.FlightCallOptions(headers=headers, timeout=access.timeout_s)
        return served

    def again(self, broken: flight.FlightClient | None, *, hurried: bool = False) -> None:
        """Connect to a server that answers, if the one of this client is gone. ``hurried``: if one does at once.

        Raises ``ConnectionError``: none does.
        """
        with self._turn(hurried=hurried):
            if self._client is broken:
                self._next += 1
                self.rest()  # if none answers, who asks next looks again
            self.client(hurried=hurried)

    @contextmanager
    def _turn(self, *, hurried: bool) -> Iterator[None]:
        """Hold the lock. Raises ``ConnectionError``: ``hurried``, and another thread looks for a server."""
        if (hurried and self.is_searching) or not self._lock.acquire(timeout=_HURRY_S if hurried else -1):
            raise ConnectionError(f"no server answers at {self.access}: it is looked for.")
        try:
            yield
        finally:
            self._lock.release()

    def reconnect(self) -> None:
        """Connect if a server answers at once. Raises ``ConnectionError``: none does."""
        self.served = self._open(self.served, 0.0)
        if self._closed:
            self.rest()

    def add_address(self, address: protocol.Address) -> None:
        """Another server of the store has answered there."""
        self.is_replaced = False
        if isinstance(self.access, Access) and address not in self.access.addresses:
            self.access = self.access._replace(addresses=(address, *self.access.addresses))

    def check(self) -> None:
        """Raise ``RuntimeError`` in a forked child, and where it was closed."""
        if self.forked:
            raise RuntimeError(
                "this process was forked from the one that connected, whose connection it cannot use. Connect again, or start processes "
                "by spawn."
            )
        if self._closed:
            raise RuntimeError("the connection was closed. Connect again.")

    def client(self, *, hurried: bool = False) -> flight.FlightClient:
        """Of Arrow Flight. Raises as :meth:`again`."""
        with self._turn(hurried=hurried):
            self.check()
            if self._client is None:
                self.served = self._open(self.served, 0.0 if hurried else None)
            assert self._client is not None  # it was opened
            return self._client

    def describe(self) -> None:
        """Ask what is :attr:`served` now. Raises as :meth:`ask`."""
        self.served = self.ask("describe", protocol.Describe(protocol.PROTOCOL, version.__version__), protocol.Served)

    def pause(self, seconds: float) -> None:
        """Sleep. Raises ``RuntimeError``: it was closed meanwhile."""
        if self._ends.wait(seconds):
            self.check()

    @property
    def is_open(self) -> bool:
        """Whether a server was asked something, since :meth:`rest`."""
        return self._client is not None

    def rest(self) -> None:
        """Hang up until something is asked again. No stream may be open."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def ask(self, name: str, command: msgspec.Struct, kind: type[T], *, hurried: bool = False) -> T:
        """Do an action that may be done twice. Raises what the server does, and as :meth:`again`."""
        return msgspec.json.decode(self._asked(name, msgspec.json.encode(command), hurried=hurried)[0], type=kind)

    def _asked(self, name: str, body: bytes, *, hurried: bool = False) -> tuple[bytes, bool]:
        """An answer, and whether the message was sent several times. Raises as :meth:`ask`."""
        again = False
        while True:
            client = self.client(hurried=hurried)
            try:
                raw = _answer(client, self.options, name, body, name)
            except GONE:
                self.again(client, hurried=hurried)
                again = True
                continue
            refuse(raw, again=again)  # outside: an OSError of the server's is no server that is gone
            return raw, again

    def call(self, name: str, given: Mapping[str, object], *row: object) -> object:
        """As :meth:`called`, what the method returns."""
        return self.called(name, given, *row)[0]

    def called(self, name: str, given: Mapping[str, object], *row: object) -> tuple[object, bool]:
        """Call a method of the buffer that a server has: what it returns, and whether the message was sent several times. ``row``: of a
        :class:`protocol.Call`.

        -1 of a row that is gone as the first one of several messages sealed or discarded it, whose answer was lost.

        Raises ``RuntimeError``, too: the server is of an older engram.
        """
        protocol.check_level(self.served, str(self.access), name)
        data, length = tree_bytes({**given}, name)
        command = msgspec.json.encode(protocol.Call(name, length, *row))  # type: ignore[arg-type] # the server checks them
        try:
            raw, again = self._asked("call", command + b"\n" + data.numpy().tobytes())
        except protocol.RowGone as error:
            if error.again and name in ("seal", "discard"):
                return -1, True
            raise
        head, _, tree = raw.partition(b"\n")
        return tree_of(torch.frombuffer(bytearray(tree), dtype=torch.uint8), int(head)), again

    def fetch_dump(
        self, folder: Path, progress: Callable[[int], None], ticket: bytes = b"dump", before: Path = Path()
    ) -> None:
        """Write the files of a dump that the server makes. ``progress`` is called with how many bytes came. ``before``: a folder of
        files that need not come again.

        Raises ``ValueError``: a name leads out of the folder. ``ConnectionError``: the server is lost before all files came, or has as
        many dumps under way as it makes.
        """
        client = self.client()
        try:
            reader = client.do_get(flight.Ticket(ticket), self.options)
            for chunk in reader:
                for name, data in zip(*(chunk.data.column(k).to_pylist() for k in range(2)), strict=True):
                    _append(folder, name, data, before)
                    progress(len(data or b""))
        except (flight.FlightError, pa.ArrowException) as error:
            raise ConnectionError(f"dumps: the server sent no whole dump: {_short(error)} Call it again.") from error

    def close(self) -> None:
        """End what looks for a server, too. Repeatable."""
        self._closed = True
        self._ends.set()
        self.rest()
        fork.dropped(self)

    def after_fork(self) -> None:
        """In a child: gRPC's threads are not there."""
        self.forked = True
        _of_parents.append(self._client)
        self._client = None

    def __reduce__(self) -> tuple[type[Connection], tuple[Servers]]:
        return Connection, (self.access,)


def _secrets_of(access: Access) -> dict[str, bytes]:
    """What Arrow Flight takes for TLS. Raises ``OSError``: a file cannot be read."""
    roots = b"\n".join(Path(path).read_bytes() for path in access.root_certificates)
    found = {"tls_root_certs": roots} if roots else {}
    if access.own_certificate is not None:
        certificate, key = (Path(path).read_bytes() for path in access.own_certificate)
        found |= {"cert_chain": certificate, "private_key": key}
    return found


@contextmanager
def _explained(address: protocol.Address) -> Iterator[None]:
    """Say what to do where no TLS connection can be made. Raises :class:`Untrusted`, and what Flight raises of others."""
    try:
        yield
    except flight.FlightUnavailableError as error:
        text = str(error)
        if "certificate verify failed" in text:
            why = text.rpartition("certificate verify failed")[2].strip(" :.")
            raise Untrusted(
                f"connect: the certificate of {address} is not trusted ({why}). Pass tls_root= the path of the certificate that signed it, "
                "PEM; a list, where servers have several."
            ) from error
        if "is not in peer certificate" in text:
            raise Untrusted(
                f"connect: the certificate of {address} is not for that name. Connect by one that it has, or make it for this one."
            ) from error
        if "wrong version number" in text:
            raise Untrusted(
                f"connect: the server at {address} speaks no TLS. Pass grpc:// and its address, or start it with a certificate."
            ) from error
        raise


def _answer(client: flight.FlightClient, options: flight.FlightCallOptions, name: str, body: bytes, call: str) -> bytes:
    try:
        return b"".join(part.body.to_pybytes() for part in client.do_action(flight.Action(name, body), options))
    except flight.FlightUnauthenticatedError:
        raise PermissionError(
            f"{call}: the server refused the token, or expects one: pass token= the path of the file that the server was given."
        ) from None


def _append(folder: Path, name: str, data: bytes | None, before: Path) -> None:
    """To a file of a dump; None: it is that of the folder ``before``."""
    path = folder / name
    if not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise ValueError(f"dumps: the server sent a file {name!r:.80}, which is no place in the folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if data is None:
        os.link(before / name, path)
        return
    with path.open("ab") as file:
        file.write(data)


def refuse(raw: bytes, *, again: bool = False) -> None:
    """Raise the error that an answer is, if it is one. ``again``: it is the answer to the last of several messages."""
    if raw.startswith(b'{"error":'):
        raise protocol.raised(msgspec.json.decode(raw, type=protocol.Refusal), again=again)


def _short(error: object) -> str:
    """What an error says, without the words that gRPC and Flight put around what the system said."""
    text = next(iter(str(error).splitlines()), "").partition(". gRPC client debug context")[0]
    if text.startswith("Flight returned unavailable error"):
        text = text.rpartition("error: ")[2]
    hint = " (It may expect grpc+tls://, or a certificate: tls_cert= and tls_key=.)" if "Socket closed" in text else ""
    return f"{text:.200}.{hint}" if text else f"{type(error).__name__}."


def _is_gone(error: BaseException) -> bool:
    """Whether a stream ended as its server is gone, or another engram is there now, which has no such stream."""
    return isinstance(error, GONE) or (isinstance(error, flight.FlightError) and protocol.NO_STREAM in str(error))


class Message(NamedTuple):
    """A message to a server."""

    command: bytes
    #: A record batch, or None.
    rows: pa.RecordBatch | None = None
    #: Whether it is sent once more where its server is gone before it answered.
    again: bool = True


class Answer(NamedTuple):
    """A server's answer to a message."""

    metadata: bytes
    rows: pa.RecordBatch
    #: Of the rows.
    columns: list[wire.Column]


class Exchange:
    """A stream of messages, answered in order. Its server may change between two of them."""

    def __init__(self, connection: Connection, stream: protocol.Stream) -> None:
        self._connection, self._stream = connection, stream
        #: Held by the thread that sends, or waits for an answer.
        self.lock = fork.rlock()
        self._client: flight.FlightClient | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: flight.FlightStreamReader | None = None
        self._schema: pa.Schema | None = None
        self._columns: list[wire.Column] = []
        self._failures = 0
        #: Since when all streams of servers are taken; None: they are not.
        self._full_since: float | None = None
        #: Whether a server is taken only if it answers at once: others can do what is asked.
        self.hurried = False
        #: How often it went on by a new stream: what waited then was sent again.
        self.resumed = 0
        #: Sent, and to be answered.
        self.waiting: deque[Message] = deque()
        #: Answers, in order.
        self._came: deque[Answer] = deque()
        fork.registered(self)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Ask one thing, with the lock held. If it is interrupted, it is forgotten."""
        with self.lock:
            try:
                yield
            finally:
                self.forget()

    def send(self, message: Message, *, answered: bool = True) -> None:
        """Send a message. Raises ``ConnectionError``: no server answers, or it was not to be sent again."""
        self._connection.check()
        if self._writer is None:
            self._connection.client(hurried=self.hurried)  # where none answers, nothing was sent
        try:
            if self._writer is None:
                self._put_all()
            self._put(message)
            if answered:
                self.waiting.append(message)
        except BaseException as error:  # it may have been sent: its answer would be taken for that of the next
            if not _is_gone(error):
                self._drop()
                self.waiting = deque(other for other in self.waiting if other is not message)
                raise
            if answered:
                self.waiting.append(message)
            self._resume(error)

    def _put_all(self) -> None:
        """Send what waits, by a new stream."""
        for message in self.waiting:
            self._put(message)

    def receive(self) -> Answer:
        """The answer to the oldest message that waits for one. Raises what the server did; ``ConnectionError``: none answers."""
        if not self._came:
            self._read()
        answer = self._came.popleft()
        refuse(answer.metadata)
        return answer

    def settle(self) -> None:
        """Wait for the answers to all messages. Raises ``ConnectionError``: no server answers."""
        while self.waiting:
            self._read()

    def renew(self) -> None:
        """As :meth:`settle`; what is sent next goes by a new stream, which may have other columns."""
        self.settle()
        self._drop()

    def forget(self) -> None:
        """Drop what waits, and the answers that came."""
        if self.waiting:
            self._drop()
        self.waiting.clear()
        self._came.clear()

    def _read(self) -> None:
        """Wait for an answer. An interrupt loses none: what waits is sent again, by a new stream."""
        while True:
            try:
                if self._writer is None:
                    self._put_all()
                assert self._reader is not None  # it was begun, or was not ended
                chunk = self._reader.read_chunk()
                metadata = chunk.app_metadata.to_pybytes()
                if metadata == protocol.LEAVING:
                    raise StopIteration
            except BaseException as error:
                if _is_gone(error):
                    self._resume(error)
                    continue
                self._drop()
                self.waiting = deque(message for message in self.waiting if message.again)
                raise
            self._failures, self._full_since = 0, None
            self.waiting.popleft()
            if not self._columns and chunk.data is not None:  # a stream has one schema
                self._columns = wire.columns_in(chunk.data.schema)
            self._came.append(Answer(metadata, chunk.data, self._columns))
            return

    def _put(self, message: Message) -> None:
        if self._writer is None:
            self._client = self._connection.client(hurried=self.hurried)
            how, level = self._connection.access.reached.compression, min(self._connection.served.level, protocol.LEVEL)
            name = flight.FlightDescriptor.for_command(wire.stream_name(self._stream, how, level))
            self._writer, self._reader = self._client.do_exchange(name, self._connection.options)
            self._schema, self._columns = None, []
        if message.rows is None:
            self._writer.write_metadata(message.command)
            return
        if self._schema is not None and not self.waiting and not self._schema.equals(message.rows.schema):
            self._drop()
            self._put(message)
            return
        if self._schema is None:
            self._schema = message.rows.schema
            self._writer.begin(self._schema, wire.options(self._connection.access.reached.compression))
        self._writer.write_with_metadata(message.rows, message.command)

    def _resume(self, error: BaseException) -> None:
        """Go on at a server that answers, with all messages that wait. One that left said so, or has no such stream: it did none."""
        left = isinstance(error, StopIteration) or protocol.NO_STREAM in str(error)
        if not left and any(not message.again for message in self.waiting):
            self._drop()
            self.waiting.clear()
            with suppress(Exception):  # what is sent next goes to one that answers, or says why not
                self._connection.again(self._client, hurried=True)
            raise ConnectionError(IN_DOUBT) from error
        self.resumed += 1
        while True:
            self._drop()
            if protocol.STREAMS_TAKEN in str(error):
                self._await_stream(error)
            else:
                self._failures += 1
            if self._failures > _MAX_STREAM_FAILURES:
                self.waiting.clear()
                raise ConnectionError(
                    f"the server broke the stream {_MAX_STREAM_FAILURES} times in a row: {_short(error)}"
                ) from error
            try:
                self._connection.again(self._client, hurried=self.hurried)
            except BaseException:
                self.waiting.clear()
                raise
            try:
                self._put_all()
            except BaseException as again:
                if not _is_gone(again):
                    raise
                error = again
            else:
                return

    def _await_stream(self, error: BaseException) -> None:
        """Pause before the next try. Raises ``ConnectionError``: all streams have been taken for too long."""
        now, access = time.monotonic(), self._connection.access
        since = self._full_since = now if self._full_since is None else self._full_since
        pause = min(max(_FIRST_PAUSE_S, now - since), _LONGEST_PAUSE_S)
        if now - since + pause > (0.0 if self.hurried else access.reached.patience_s):
            self.waiting.clear()
            self._full_since = None
            raise ConnectionError(
                f"{access}: {_short(error)} They were{words.format_wait(now - since)}. Close buffers, or start another server of the store."
            ) from error
        self._connection.pause(pause)

    def _drop(self) -> None:
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            with suppress(*GONE, pa.ArrowException):
                writer.close()

    def close(self) -> None:
        """Repeatable."""
        self._drop()
        self.waiting.clear()
        self._came.clear()

    def after_fork(self) -> None:
        """In a child, as of a connection."""
        _of_parents.append((self._client, self._writer, self._reader))
        self._client = self._writer = self._reader = None
