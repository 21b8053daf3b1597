"""A server that keeps a copy of a store that another server serves, and serves it itself once it is promoted."""

from __future__ import annotations

import base64
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Self, cast

import msgspec
import torch
from pyarrow import ArrowException, flight

from engram.buffer.tensordict import ReplayBuffer
from engram.checkpoint.checkpointer import Checkpointer
from engram.format import files, layout
from engram.format.schema import decode
from engram.remote import protocol
from engram.remote.connection import Access, Connection, append_to, place_in
from engram.saved import attempts, disk
from engram.serving import notes, ticks
from engram.serving.awaiting import away
from engram.serving.service import Service, name_of
from engram.store.limits import Rules
from engram.store.opening import create_store
from engram.store.requests import NAME, WRITERS, WritersIndex
from engram.store.store import Store, StoreState

_log = logging.getLogger("engram")

#: Between two tries where the other server does not answer, and for how long it may take for its last checkpoint.
_RETRY_S, _LAST_S = 0.5, 30.0
#: Below the folder of copies: one that comes, what is served, and a store that is made of the newest one.
_COMING, _SERVED, _MAKING = "coming", "served.json", "making"


class Copying(NamedTuple):
    """How a server deals with the other one of its store."""

    #: How the other one is reached, by its address.
    reach: Callable[[str], Access]
    #: A write is acknowledged when the follower has its rows.
    sync: bool = False


def is_promoted(directory: Path) -> bool:
    """Whether a store in the directory is a copy that was promoted. Raises ``CorruptStore``."""
    return layout.is_store(directory) and bool(notes.read(directory).store)


def check_newest(directory: Path, copying: Copying | None) -> None:
    """Raise ``RuntimeError``: a copy of the store took over, so that it must not be served. Its follower is asked if it answers."""
    note = notes.read(directory)
    if not note.successor and note.follower and copying is not None:
        try:
            with closing(Connection(copying.reach(note.follower), standby=True)) as connection:
                served = connection.served
        except (OSError, ValueError, RuntimeError) as error:
            _log.warning("serve: %s, which has a copy of this store, does not answer: %s", note.follower, error)
        else:
            if served.store == note.name(name_of(directory, readonly=False)) and served.generation > note.generation:
                note = notes.change(directory, successor=note.follower)
    if note.successor:
        raise RuntimeError(
            f"serve: {str(directory)!r}: a copy of this store took over, and {note.successor} serves it. What was written here since is "
            "not in it. Serve another directory with --follow, to have a copy again."
        )


def tell_before(service: Service, address: str, copying: Copying) -> None:
    """Tell the server before, again and again until it has heard, that a copy took over."""
    folder, note = Path(cast("Store", service.buffer.storage.memory).directory or ""), service.note

    def tell() -> None:
        while True:
            try:
                with closing(Connection(copying.reach(note.before), standby=True)) as connection:
                    if connection.served.store == service.name and connection.served.generation < note.generation:
                        connection.ask("outdate", protocol.Outdate(service.name, note.generation, address), dict)
            except (OSError, ArrowException, ValueError, RuntimeError):
                time.sleep(2 * _RETRY_S)
            else:
                service.note = notes.change(folder, before="")
                return

    if note.before:
        threading.Thread(target=tell, name="engram-outdate", daemon=True).start()


def begin(service: object, address: protocol.Address, copying: Copying) -> None:
    """What a server does besides answering, as soon as it has an address: follow another one, or tell that it has taken over."""
    others = "" if address.host not in ("0.0.0.0", "::") else socket.gethostname()  # noqa: S104 - it is where others look for it
    reached = str(address._replace(host=others or address.host))
    if isinstance(service, Follower):
        service.begin(reached)
    elif isinstance(service, Service):
        tell_before(service, reached, copying)


class Follower:
    """Answers while it keeps a copy: then :meth:`found` is asked.

    Args:
        directory: where the store is to be once it is served: free, or an empty folder.
        leader: address of the server that has the store.
        copying: how that is reached.

    Raises ``FileExistsError``: there is something in the directory.
    """

    def __init__(self, directory: Path, leader: str, copying: Copying) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise FileExistsError(
                f"serve: --follow: expected a free name or an empty folder for a copy, found something in {str(directory)!r}."
            )
        self._directory, self._leader, self._copying = directory, leader, copying
        self._root = ticks.series_of(directory)
        disk.make_folders(str(self._root))
        self._held = disk.open_folder(self._root)
        if not disk.lock(self._held):
            raise FileExistsError(f"serve: --follow: another server keeps a copy in {str(self._root)!r}.")
        self._address = ""
        self._served = self._noted()
        newest = next(iter(attempts.names(self._root)), None) if self._served else None
        self._have = "" if newest is None else str(newest)
        #: When the copy was true, when the leader was heard of last, and the rows that it had ever written then.
        self._as_of = self._heard = time.monotonic()
        self._writes = 0
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._service: Service | None = None
        self._takes_over = False
        self._connection: Connection | None = None

    #: As of a service: it can be entered and closed.
    buffer = property(lambda self: self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Follow no more."""
        self._ends.set()
        if self._service is not None:
            self._service.buffer.close()

    def begin(self, address: str) -> None:
        """Follow, as the server of this address."""
        self._address = address
        threading.Thread(target=self._run, name="engram-follow", daemon=True).start()

    # ---- as a service --------------------------------------------------------------------------------------------------

    def found(self) -> Service | None:
        """The service of the store, once it is promoted."""
        return self._service

    @property
    def name(self) -> str:
        """As of ``Service``."""
        return self._served.store if self._served else ""

    def do(self, command: msgspec.Struct, data: bytes = b"") -> object:  # noqa: ARG002 - no command of a copy has any
        """As ``Service.do``. Raises Flight's error for a server that is gone: the store is at another one."""
        match command:
            case protocol.Describe() if self._served:
                return msgspec.structs.replace(self._served, standby=True, participant=0)
            case protocol.Health():
                now = time.monotonic()
                said = {"copy": self._have, "of": self._leader, "writes": self._writes}
                return {"store": self.name, **said, "age_s": now - self._as_of, "heard_s": now - self._heard}
            case protocol.Promote():
                return self._promote()
            case protocol.Outdate():
                return {}
        raise away(self.absent)

    @property
    def absent(self) -> str:
        """Why there is no store."""
        return f"it keeps a copy of the store at {self._leader}. It serves it after engram promote {self._address}"

    # ---- following -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        said = ""
        while not self._ends.wait(_RETRY_S if said or self._takes_over else 0.0):
            try:
                with self._lock:
                    if self._service is None and not self._takes_over:
                        self._fetch()
                said = ""
            except Exception as error:  # noqa: BLE001 - the next try may do better
                if str(error) != said:
                    _log.warning("serve: the copy of %s is not renewed: %s", self._leader, error)
                said = str(error) or type(error).__name__

    def _noted(self) -> protocol.Served | None:
        """What is copied, as an earlier process has noted it."""
        path = self._root / _SERVED
        return msgspec.json.decode(path.read_bytes(), type=protocol.Served) if path.exists() else None

    def _leading(self) -> Connection:
        """The connection to the leader. Raises ``ValueError``: it serves another store; ``ConnectionError``: it does not answer."""
        if self._connection is None:
            # One that was to hand over counts as a standby, until it is asked as before.
            self._connection = Connection(self._copying.reach(self._leader), self._served, standby=True)
        served = msgspec.structs.replace(self._connection.served, standby=False, participant=0)
        if not served.schema:
            self._connection.describe()
            raise ConnectionError("it has no store yet")
        if b'"finals":{' in msgspec.json.encode(served.recipe):
            raise ValueError("its sampler keeps final observations in a folder of their own, which is not copied")
        if served != self._served:
            disk.replace(self._root / _SERVED, msgspec.json.encode(served))
            self._served = served
        return self._connection

    def _fetch(self, *, last: bool = False) -> None:
        """Have a newer copy. Raises as :meth:`_leading`; ``OSError``: no space. What the leader's checkpoint raises."""
        coming, done = self._root / _COMING, None
        disk.remove(coming)
        disk.make_folder(coming)
        try:
            command = msgspec.json.encode(protocol.Tick(self._have, self._address, last))
            for name, data in self._leading().fetched(command, _LAST_S if last else None):
                if not name and data is not None:
                    done = msgspec.json.decode(data, type=protocol.Ticked)
                elif data is None:
                    target = place_in(coming, name)
                    os.link(self._root / self._have / name, target)
                else:
                    append_to(coming, name, data)
            if done is None or attempts.Name.parse(done.name) is None:
                raise ConnectionError("the stream ended early")
        except (flight.FlightError, ArrowException, ConnectionError):
            self._connection = None
            raise
        if done.name != self._have:
            os.rename(coming, self._root / done.name)
            self._keep(done.name)
        self._heard, self._writes = time.monotonic(), done.writes
        self._as_of = self._heard - done.age_s

    def _keep(self, name: str) -> None:
        """Have a new copy, and of the others only the one before it."""
        (self._root / "LATEST").write_text(f"{name}\n")
        for other in attempts.names(self._root):
            if str(other) not in (name, self._have):
                disk.remove(self._root / str(other))
        self._have = name

    # ---- taking over ---------------------------------------------------------------------------------------------------

    def _promote(self) -> protocol.Promoted:
        """Serve the newest copy. A leader that answers hands over; what one had that does not, and the copy lacks, is counted.

        Raises ``RuntimeError``: there is no copy, or it is served already. What fetching the last copy, and loading it, raises.
        """
        self._takes_over = True  # else the thread that follows would take the lock again and again
        try:
            if not self._lock.acquire(timeout=_LAST_S):  # the leader hangs
                if self._connection is not None:
                    self._connection.cancel()
                self._lock.acquire()
            try:
                return self._taken_over()
            finally:
                self._lock.release()
        finally:
            self._takes_over = False

    def _taken_over(self) -> protocol.Promoted:
        if self._service is not None:
            raise RuntimeError(f"promote: it is served already, as generation {self._service.note.generation}.")
        lost, handed_over = 0, True
        if not is_promoted(self._directory):
            try:
                self._fetch(last=True)
            except flight.FlightServerError as error:
                raise RuntimeError(
                    f"promote: {self._leader} answers, and does not hand over: {error}. Try again, or end it before."
                ) from error
            except (flight.FlightError, ArrowException, ConnectionError) as error:
                _log.warning("promote: %s does not hand over: %s", self._leader, error)
                handed_over = False
            if not self._have or self._served is None:
                raise RuntimeError(f"promote: expected a whole copy of the store at {self._leader}, got none yet.")
            lost = self._make(self._served)
        self._ends.set()  # from here on the leader's store is out of date, whatever fails
        self._service = service = Service(ReplayBuffer.open(self._directory))
        tell_before(service, self._address, self._copying)
        return protocol.Promoted(service.note.generation, len(service.buffer), lost, handed_over)

    def _make(self, served: protocol.Served) -> int:
        """Make the store of the newest copy, in one step: how many rows it lacks."""
        making, schema = self._root / _MAKING, decode(served.schema.encode(), "promote")
        disk.remove(making)
        create_store(schema, making).close()
        files.overwrite(making / layout.FOLDER / layout.BUFFER, msgspec.json.encode(served.recipe))
        with ReplayBuffer.open(making) as rb:
            store = cast("Store", rb.storage.memory)
            path = self._root / self._have
            state = msgspec.convert(attempts.read_attempt(path).user, ticks.State)
            _begin_at(store, state.bases)
            report = Checkpointer(self._root, rb).restore(resume="exact")
            state = msgspec.convert(report.user, ticks.State)
            table = zlib.decompress(base64.b64decode(state.writers))
            groups = len(store.schema.ragged_groups)
            index, _ = WritersIndex.of_name(store.indexes, NAME, len(table), WRITERS, groups)
            index.block.tensor.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
            WritersIndex.free_lock(index.block)
            if any(state.limit):
                rb.limit(*Rules(*state.limit).limits())
        lost = max(0, self._writes - state.writes)
        generation = served.generation + 1
        own, before = name_of(making, readonly=False), self._leader
        notes.change(making, folder=own, store=served.store, generation=generation, lost=lost, before=before)
        with suppress(FileNotFoundError):
            os.rmdir(self._directory)
        disk.rename(making, self._directory)
        disk.sync_folder(self._directory.parent)
        return lost


def _begin_at(store: Store, bases: list[int]) -> None:
    """Let the positions of an empty store's lanes go on where those of the other store do, so that requests find their rows."""
    lanes = torch.tensor([[base, store.lane_length if base else 0, 0, 0] for base in bases], device="cpu")
    store.replace(StoreState(lanes, torch.zeros(store.capacity, dtype=torch.int64, device="cpu"), 1, 0), lambda _: None)
