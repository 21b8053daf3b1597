"""An Arrow Flight server of one store, and the process that runs it: ``engram serve``."""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import torch
from pyarrow import ArrowException, flight

from engram.buffer.configuration import Reaching
from engram.buffer.tensordict import ReplayBuffer
from engram.remote import protocol, wire
from engram.serving.awaiting import Awaiting
from engram.serving.copies import Listening, away
from engram.serving.draining import connected, drain, finish
from engram.serving.dumps import TooMany
from engram.serving.service import Service

_FILES = pa.schema([("name", pa.string()), ("data", pa.binary())])
#: Streams at a time: each holds a thread.
MAX_STREAMS = 1024
#: By what clients ask for them.
_LEVELS = range(protocol.LEVEL + 1)
_STREAMS = {wire.stream_name(*it): it[:2] for it in product(protocol.STREAMS, wire.COMPRESSIONS, _LEVELS)}
#: Between two questions to the server of the other copy.
WATCH_INTERVAL_S = 1.0
#: For how long a server that is to end waits for its clients.
_DRAIN_TIMEOUT_S = 5.0


#: Errors that Flight knows.
refusal, broken = flight.FlightUnauthenticatedError, flight.FlightServerError


class _Admission(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Middleware that refuses calls without the token, and calls that are for another store: their client looks for that one."""

    def __init__(self, token: bytes, service: Service | Awaiting) -> None:
        super().__init__()
        self._expected, self._service = b"Bearer " + token if token else b"", service

    def start_call(self, info: object, headers: dict[str, list[str | bytes]]) -> None:  # noqa: ARG002 - of all calls
        given = {name.lower(): value for name, values in headers.items() for value in reversed(values)}
        said = [given.get(name, b"") for name in ("authorization", protocol.MEANT_STORE)]
        token, store = (it.encode(errors="replace") if isinstance(it, str) else it for it in said)
        if self._expected and not hmac.compare_digest(token, self._expected):
            raise refusal("expected the server's token")
        if store and store != self._service.name.encode():
            raise away("it serves another store")


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """An Arrow Flight server that answers until :meth:`drain`. Rows and commands are checked before anything is done."""

    def __init__(
        self,
        service: Service | Awaiting,
        address: protocol.Address,
        *,
        token: bytes = b"",
        tls: tuple[bytes, bytes] | None = None,
        clients: bytes = b"",
        at: Listening | None = None,
    ) -> None:
        """``clients``: certificates that sign those of clients; empty: clients need none. ``at``: of a process that only serves."""
        self._given, self._at = service, at
        self._lock = threading.Lock()
        #: Actions under way, of which the last one to end tells.
        self._actions, self._idle = 0, threading.Condition(self._lock)
        #: Those under way end by a call of these.
        self._streams: dict[int, Callable[[], None]] = {}
        self._draining = False
        super().__init__(
            address.uri,
            middleware={"admission": _Admission(token, service)},
            **({} if tls is None else {"tls_certificates": [tls]}),
            **({"verify_client": True, "root_certificates": clients} if clients else {}),
        )
        self._doors = Doors(-1 if address.scheme == "unix" else self.port)

    @property
    def _service(self) -> Service | Awaiting:
        """Of the store, as soon as there is one."""
        given = self._given  # read once: another thread may find the store meanwhile
        if isinstance(given, Awaiting):
            self._given = given = given.found() or given
        if isinstance(given, Service) and self._at is not None:
            given.copies.sync = self._at.sync
        return given

    def _of_store(self) -> Service:
        """Raises Flight's error: there is no store yet."""
        service = self._service
        if isinstance(service, Awaiting):
            raise away("there is no store: nothing was ever written")
        return service

    # ---- actions -------------------------------------------------------------------------------------------------------

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """One of :data:`ACTIONS`: JSON in, JSON out."""
        with self._calling(context), self._at_work(action.type):
            done = self._done(action)
            return iter([done if isinstance(done, bytes) else msgspec.json.encode(done)])

    def _done(self, action: flight.Action) -> object:
        """What is answered."""
        try:
            kind = protocol.ACTIONS.get(action.type)
            if kind is None:
                raise ValueError(
                    f"expected one of the commands {', '.join(protocol.ACTIONS)}, got {action.type!r:.40}."
                )
            body, data = action.body.to_pybytes(), b""
            if kind is protocol.Call:
                body, _, data = body.partition(b"\n")
            command = protocol.decoded(kind, body or b"{}", action.type)
            if isinstance(command, protocol.Drain):
                return drain(self._of_store(), command, self._at and partial(connected, self._at))
            if isinstance(command, protocol.Tick):
                return self._tick(command)
            done = self._service.do(command, data)
            reads = isinstance(command, protocol.Call) and command.name in protocol.READS
            if isinstance(command, protocol.Empty | protocol.EndTrajectory | protocol.Call) and not reads:
                self._of_store().copies.await_copy()
            return done
        except flight.FlightError:
            raise
        except Exception as error:  # noqa: BLE001 - the client raises it
            return protocol.refusal_of(error)

    def watch(self, at: Listening) -> None:
        """End the process as soon as the server of the other copy of the store, or a client, says that it took over."""
        while not (isinstance(service := self._service, Service) and service.copies.look(at)):
            time.sleep(WATCH_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def _tick(self, command: protocol.Tick) -> protocol.Ticked:
        """Answer a follower. Raises ``OSError``: there is no store yet. ``RuntimeError``: what clients asked for is not finished."""
        if not isinstance(service := self._service, Service):
            raise OSError("there is no store yet: nothing was ever written.")
        service.check_stays("follow")
        if service.copies.notes_follower(command):  # clients that are told to leave connect again, and hear of it
            threading.Thread(target=self._finish, kwargs={"actions": 1}, daemon=True).start()
        service.copies.hand_over(begins=command.last)
        try:
            if command.last and not self._finish(actions=1):
                raise RuntimeError("calls of clients are under way.")
            return service.copies.tick(command)
        except BaseException:
            service.copies.hand_over(begins=False)
            raise

    @contextlib.contextmanager
    def _calling(self, context: flight.ServerCallContext) -> Iterator[None]:
        """A call of a client that is let in. Of an error that is none of Flight's it hears the text: not from which lines it comes."""
        self._doors.know(context.peer())
        try:
            yield
        except (flight.FlightError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001 - the client raises it
            text = error.strerror if isinstance(error, OSError) else str(error).partition(" Detail: Python")[0]
            raise broken(text or type(error).__name__) from None

    def _check_stays(self, action: str = "") -> None:
        """Raise Flight's error: the server leaves, or another one has the store. Then clients ask the next one."""
        copies = self._service.copies if isinstance(self._service, Service) else None
        gives_up = copies is not None and (copies.hands_over or copies.note.outdated)
        if self._draining or (gives_up and action != "tick"):
            raise away("the server leaves")

    @contextlib.contextmanager
    def _at_work(self, name: str) -> Iterator[None]:
        """Do an action. Raises as :meth:`_check_stays`."""
        with self._lock:
            self._check_stays(name)
            self._actions += 1
        try:
            yield
        finally:
            with self._lock:
                self._actions -= 1
                self._idle.notify_all()

    def list_actions(self, context: object) -> list[tuple[str, str]]:  # noqa: ARG002 - Flight's
        """The commands, and what they do."""
        return [(name, kind.__doc__ or "") for name, kind in protocol.ACTIONS.items()]

    # ---- streams -------------------------------------------------------------------------------------------------------

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """A stream of batches that are drawn (``learn``), of rows that are written (``write``), or of rows that go (``edit``)."""
        asked = _STREAMS.get(descriptor.command)
        if asked is None:
            raise broken(f"{protocol.NO_STREAM} {[*_STREAMS]}, got {descriptor.command!r:.40}.")
        with self._calling(context):
            stream = _Stream(self._of_store(), *asked, reader, writer)
            with self._stream(stream):
                stream.run()

    @contextlib.contextmanager
    def _stream(self, stream: _Stream) -> Iterator[None]:
        """One of the streams that there are. Raises Flight's error: the server leaves, or all are taken."""
        with self._lock:
            self._check_stays()
            if len(self._streams) >= MAX_STREAMS:
                raise away(f"{protocol.STREAMS_TAKEN}: {MAX_STREAMS}")
            self._streams[id(stream)] = stream.leave
            stream.service.open_streams = len(self._streams)
        try:
            yield
        finally:
            with self._lock:
                del self._streams[id(stream)]
                stream.service.open_streams = len(self._streams)

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """The files of a dump, or of a checkpoint for a follower."""
        what, *names = ticket.ticket.decode(errors="replace").split(" ")
        if not (what == "dump" and not names) and not (what == "copy" and len(names) == 2):
            raise broken(f"expected the ticket dump, got {ticket.ticket!r:.40}.")
        return flight.GeneratorStream(_FILES, self._files(context, names))

    def _files(self, context: flight.ServerCallContext, names: list[str]) -> Iterator[pa.RecordBatch]:
        with self._calling(context):
            try:
                service = self._of_store()
                yield from service.copies.files(_FILES, *names) if names else service.dump_files(_FILES)
            except TooMany as error:
                raise away(str(error)) from error

    def drain(self) -> bool:
        """Finish the commands under way, take no others, and tell every client that the server leaves: whether that is done.

        A client that does not read what it asked for is waited for no longer than a few seconds.
        """
        self._doors.close()
        self._draining = True
        return self._finish(actions=0)

    def _finish(self, *, actions: int) -> bool:
        """Wait until no more actions than these are under way, and no streams: whether that is so."""
        with self._lock:
            streams = list(self._streams.values())
        telling = [threading.Thread(target=leave, daemon=True) for leave in streams]
        for thread in telling:
            thread.start()
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        for thread in telling:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            idle = self._idle.wait_for(lambda: self._actions <= actions, max(0.0, deadline - time.monotonic()))
        return idle and not any(thread.is_alive() for thread in telling)


class _Stream:
    """One client's messages, in order: batches to draw (``learn``), rows to write (``write``) or rows that go (``edit``)."""

    def __init__(
        self,
        service: Service,
        name: protocol.Stream,
        compression: str | None,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        self.service, self._name, self._compression = service, name, compression
        self._reader, self._writer = reader, writer
        self._schema: tuple[pa.Schema, list[wire.Column]] | None = None
        #: Of batches: those of this moment, as a stream has one schema; and the columns of rows that come, which the first ones decide.
        self._fields, self._expected = service.look_for_fields(), list[wire.Column]()
        #: Held while a message is worked on.
        self._working = threading.Lock()
        self._left = False
        #: Whether the schema of messages was checked: a stream has one.
        self._checked = False

    def run(self) -> None:
        """Answer until the client or the server leaves."""
        self.service.count_stream(self._name, 1)
        try:
            self._run()
        finally:
            with self._working:  # gRPC aborts the process where something is written to a stream that has ended
                self._left = True
            self.service.count_stream(self._name, -1)

    def _run(self) -> None:
        while True:
            try:
                chunk = self._reader.read_chunk()
            except StopIteration:
                return
            with self._working:
                if self._left:
                    return
                metadata = chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b""
                try:
                    self._answer(protocol.decoded(protocol.STREAMS[self._name], metadata, self._name), chunk)
                except flight.FlightError:
                    raise
                except Exception as error:  # noqa: BLE001 - the client raises it
                    self._writer.write_metadata(msgspec.json.encode(protocol.refusal_of(error)))

    def leave(self) -> None:
        """Say so, behind what is being worked on."""
        with self._working, contextlib.suppress(flight.FlightError, OSError):  # the client has left already
            if not self._left:
                self._left = True
                self._writer.write_metadata(protocol.LEAVING)

    def _answer(self, command: msgspec.Struct, chunk: flight.FlightStreamChunk) -> None:
        """Do what a message says."""
        service = self.service
        match command:
            case protocol.Sample():
                with service.answering(command):
                    batches = service.sample(command, self._fields)
                    metadata = msgspec.json.encode(batches.metadata)
                    self._put(metadata, batches.columns, batches.tensors, len(batches.tensors[0]))
            case protocol.Prioritize():
                try:
                    service.prioritize(*self._rows_of(chunk, wire.PRIORITIES, "prioritize"))
                except Exception as error:  # nothing comes back
                    raise broken(f"prioritize: {error}") from error
            case protocol.Append():
                expected = self._expected or service.written(0 if chunk.data is None else chunk.data.num_columns)
                rows = service.append(command, self._rows_of(chunk, expected, "append"), chunk.data.num_rows)
                self._expected = expected
                service.copies.await_copy()
                written = protocol.Written(1, service.limits_number(), *service.copies.positions())
                metadata = msgspec.json.encode(written)
                self._put(metadata, wire.ROW, [rows], len(rows))
            case protocol.Move():
                number, taken = service.take(command, self._rows_of(chunk, [*service.written(0), wire.MOVED], "drain"))
                service.copies.await_copy()
                self._put(b'{"next":%d}' % number, wire.EDITS, taken, len(taken[0]))
            case protocol.Tickets():
                held = service.tickets(self._rows_of(chunk, wire.EDITS, "edit")[0])
                self._put(b'{"ok":1}', wire.TICKET, [held], len(held))
            case protocol.Remove():
                removed = service.remove(*self._rows_of(chunk, wire.EDITS, "edit"))
                service.copies.await_copy()
                self._writer.write_metadata(msgspec.json.encode(protocol.Removed(removed)))

    def _put(self, metadata: bytes, columns: list[wire.Column], tensors: list[torch.Tensor], rows: int) -> None:
        """Answer with rows."""
        if self._schema is None:
            self._schema = wire.arrow_schema(columns), columns
            self._writer.begin(self._schema[0], wire.options(self._compression))
        if columns is not self._schema[1] and columns != self._schema[1]:
            raise broken("the columns of batches have changed: begin another stream")
        self._writer.write_with_metadata(wire.record_batch(self._schema[0], tensors, rows), metadata)

    def _rows_of(self, chunk: flight.FlightStreamChunk, expected: list[wire.Column], call: str) -> list[torch.Tensor]:
        """The rows of a message. Raises ``ValueError``: it has none, others, or too many."""
        batch = chunk.data
        if batch is None:
            raise ValueError(f"{call}: expected rows in the message, got none.")
        nbytes = protocol.held_bytes(batch.num_rows, _row_bytes(tuple(expected)))
        if max(nbytes, batch.nbytes) > protocol.MAX_MESSAGE:
            raise ValueError(
                f"{call}: expected at most {protocol.MAX_MESSAGE} bytes, got {batch.num_rows} rows, {nbytes} bytes."
            )
        if not self._checked:
            got = wire.columns_in(batch.schema)
            if got != expected:
                raise ValueError(f"{call}: expected the columns {_column_names(expected)}, got {_column_names(got)}.")
            self._checked = True
        batch.validate()
        return wire.tensors_in(batch, expected)


@lru_cache
def _row_bytes(columns: tuple[wire.Column, ...]) -> int:
    return sum(column.nbytes for column in columns)


def _column_names(columns: list[wire.Column]) -> str:
    return ", ".join(f"{it.name} {it.dtype} {list(it.shape)}" for it in columns)[:400]


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(
    directory: Path,
    at: Listening,
    ready: Callable[[protocol.Address], None],
    also: Callable[[ReplayBuffer], object] | None = None,
    made: Callable[[], Service | Awaiting] | None = None,
) -> None:
    """Serve the store in a directory until SIGTERM or SIGINT, then finish what is under way. Does not return.

    ``ready`` is told the address when clients may come, and ``also`` the open buffer before. ``made`` makes what answers where there may
    be no store yet. Raises ``RuntimeError``: a copy took over; what these, opening the store and
    listening raise: then the buffer is closed, and signals and files are treated as before.
    """
    # where this fails, the process may go on and start programs, which inherit what is blocked
    with contextlib.ExitStack() as otherwise:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # before there are threads, which inherit it, too
        otherwise.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        make_room()
        service = Service(ReplayBuffer.open(directory)) if made is None else made()
        rb = otherwise.enter_context(service.buffer)
        finish(service.buffer.storage)
        found = service if isinstance(service, Service) else service.found()
        if found is not None and found.copies.look(at):
            raise RuntimeError(found.copies.why_replaced)
        if also is not None:
            also(rb)
        server = _server(service, at)
        otherwise.callback(server.drain)
        address = at.address
        if address.scheme != "unix":
            address = address._replace(port=server.port)
        threading.Thread(target=server.watch, args=(at,), name="engram-copies", daemon=True).start()
        ready(address)
        signal.sigwait(_SIGNALS)
        if server.drain():  # else a command is under way
            rb.close()
        if address.scheme == "unix":
            os.unlink(address.host)
        os._exit(0)  # gRPC would wait for clients to leave


def _server(service: Service | Awaiting, at: Listening) -> Server:
    """Listens already. A socket is the user's alone as soon as it is there. Raises ``OSError``: it cannot listen there."""
    before = os.umask(0o177)
    try:
        return Server(service, at.address, token=at.token, tls=at.tls, clients=at.clients, at=at)
    except ArrowException as error:  # which gRPC's log explains, in its own words
        raise OSError(
            f"serve: {at.address}: cannot listen there: {error}. Expected an address that is free, and of this machine; see the log "
            "above. Port 0 is any that is free."
        ) from error
    finally:
        os.umask(before)


def listening(
    address: str,
    token: str | os.PathLike[str] | None,
    tls_cert: str | os.PathLike[str] | None,
    tls_key: str | os.PathLike[str] | None,
    tls_clients: str | os.PathLike[str] | None = None,
    *,
    insecure: bool,
) -> Listening:
    """Check that it is safe to listen there. Raises as ``engram.serve``."""
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("serve: expected tls_cert and tls_key together, got one of them.")
    if tls_clients is not None and tls_cert is None:
        raise ValueError("serve: tls_clients: expected tls_cert and tls_key, too, got neither.")
    if address == "unix:":
        at = protocol.Address("unix", str(_own_folder() / f"{os.getpid()}.sock"))
    else:
        at = protocol.address_of(address, "serve", scheme="grpc" if tls_cert is None else "grpc+tls")
    if at.scheme == "unix":
        _check_free(Path(at.host))
    elif (at.scheme == "grpc+tls") != (tls_cert is not None):
        raise ValueError(f"serve: expected tls_cert and tls_key for grpc+tls and no other addresses, got {address!r}.")
    secret = protocol.token_in(token, "serve")
    if not insecure and at.scheme != "unix":
        if not secret:
            who = "every user of the machine reaches it" if at.is_loopback else "other machines reach it"
            raise ValueError(
                f"serve: expected a token on {at}: {who}. Pass the path of a file of mode 0600, or use a Unix socket."
            )
        if not at.is_loopback and tls_cert is None:
            raise ValueError(
                f"serve: expected tls_cert and tls_key on {at}, which other machines reach: rows and token would travel in the clear. "
                "Pass them, or insecure=True in a network that you trust."
            )
    tls = None if tls_cert is None or tls_key is None else (Path(tls_cert).read_bytes(), Path(tls_key).read_bytes())
    roots = [path for path in (tls_cert, tls_clients) if path is not None]
    reaching: Reaching = {"token": token, "tls_cert": tls_cert, "tls_key": tls_key, "tls_root": roots}
    return Listening(at, secret, tls, b"" if tls_clients is None else Path(tls_clients).read_bytes(), reaching)


def _own_folder() -> Path:
    """A folder of mode 0700, short enough for a socket."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if len(os.fsencode(root)) > 60:
        root = Path("/tmp")  # noqa: S108 - the folder below is made with mode 0700, and checked
    folder = root / f"engram-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"serve: expected a folder of mode 0700 that is yours at {str(folder)!r}. Remove it.")
    return folder


def _check_free(path: Path) -> None:
    """Refuse a socket at which a server answers; remove one of a server that died."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"serve: expected a folder for the socket at {str(path.parent)!r}.")
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(f"serve: {str(path)!r} is no socket.")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(f"serve: a server answers at unix:{path} already. Choose another path.")


# ---- connections: room for them, and an end to those that ask for nothing ----------------------------------------------

#: For how long a connection may ask for nothing that the server answers, before its first call.
SILENT_S = 10.0
#: So many files the process may have open, where the system lets it. At most one in so many is a connection that has asked for nothing.
_OPEN_FILES, _SHARE = 1 << 16, 4
_INTERVAL_S = 1.0


def make_room() -> int:
    """Raise the soft limit of open files, each connection being one: what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Doors:
    """The TCP connections to a port. Those that never called, and are old or too many, are closed: gRPC itself lets them stay.

    A call that is refused for its token is none.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._callers: set[str] = set()
        self._since: dict[str, float] = {}
        self._ended = threading.Event()
        if port > 0:
            threading.Thread(target=self._run, name="engram-doors", daemon=True).start()

    def know(self, peer: str) -> None:
        """Note who has called, as gRPC names it."""
        if self._port > 0:
            self._callers.add(unquote(peer))

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Close those that asked for nothing until now."""
        callers = self._callers.copy()  # as add and -=, it is atomic
        there = dict(self._connections())
        self._callers -= callers - there.keys()  # those that have called since need not be in the list
        self._since = {peer: self._since.get(peer, now) for peer in there if peer not in self._callers}
        oldest = sorted(self._since, key=self._since.__getitem__)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        too_many = set(oldest[: max(0, len(oldest) - most)])
        for peer in oldest:
            if peer in too_many or now - self._since[peer] >= SILENT_S:
                self._shut(there[peer], peer)

    def _connections(self) -> list[tuple[str, int]]:
        """Who is connected, and by which file."""
        try:
            files = [*map(int, os.listdir("/proc/self/fd"))]
        except OSError:  # no file is left to list them by
            files = [*range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
        return [(peer, file) for file in files if (peer := self._peer(file))]

    def _peer(self, file: int) -> str:
        """Who is at the other end, as gRPC names it; empty: it is no connection to the port."""
        try:
            with _borrowed(file) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != self._port:
                    return ""
                host, port = one.getpeername()[:2]
        except OSError:  # no socket, or one that listens
            return ""
        host = host.removeprefix("::ffff:")
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    def _shut(self, file: int, peer: str) -> None:
        """Let gRPC find the end of a connection."""
        if self._peer(file) == peer:  # else gRPC has closed it meanwhile
            with contextlib.suppress(OSError), _borrowed(file) as one:
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """A socket around a file that is another's. Raises ``OSError``: it is none."""
    one = socket.socket(fileno=file)
    try:
        yield one
    finally:
        one.detach()
