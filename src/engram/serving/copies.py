"""A second copy of a served store: checkpoints that its server makes, a follower that fetches them, and the store that it makes."""

from __future__ import annotations

import filecmp
import logging
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, cast
from uuid import uuid4

import msgspec
import pyarrow as pa
import torch
from pyarrow import ArrowException, flight

from engram._support import version, words
from engram.buffer import ReplayBuffer
from engram.buffer.configuration import Reaching
from engram.buffer.connecting import Way
from engram.checkpoint.checkpointer import Checkpointer
from engram.errors import CorruptStore
from engram.format import files, layout
from engram.format.schema import decode, encode
from engram.remote import protocol
from engram.remote.connection import Connection
from engram.saved import attempts, disk
from engram.serving.dumps import parts_of
from engram.store.keys import KeyIndex
from engram.store.lifetime import exclusive
from engram.store.limits import Rules
from engram.store.opening import create_store
from engram.store.requests import NAME, WRITERS, Requests, WritersIndex
from engram.store.store import Store, StoreState

_log = logging.getLogger("engram")

#: Flight's error of a server that is gone: clients ask another one, or the same again.
away = flight.FlightUnavailableError

#: Between two checkpoints, unless a write waits for one.
_INTERVAL_S = 0.2
#: Between two tries where the other server does not answer, and for how long it may take for an answer at first.
_RETRY_S, _ANSWER_S = 0.5, 20.0
#: In the folder of copies: one that comes, a store that is made of one, and the request to make it, or why it is not made.
_COMING, _MAKING, _PROMOTE = "coming", "making", "promote"
#: Open files, which stay locked as long as the process lives.
_leases: list[files.Descriptor] = []
#: For so long a follower that is silent is not replaced by another, and a write waits before there is a warning.
_SILENT_S = 10.0


class Listening(NamedTuple):
    """The address that a server listens at, and its secrets, which its text leaves out."""

    address: protocol.Address
    token: bytes
    tls: tuple[bytes, bytes] | None
    #: Certificates that sign those of clients, PEM; empty: clients need none.
    clients: bytes = b""
    #: The files by which the server is a client of others: it trusts what signs its certificate, and those of clients.
    reaching: Reaching | None = None
    #: Whether writes are acknowledged when a follower has their rows.
    sync: bool = False

    def __repr__(self) -> str:
        return f"Listening({self.address})"


def series_of(directory: Path) -> Path:
    """The folder of the checkpoints of which copies of a store are made, and of those that are copies: it lies beside that of the store."""
    whole = directory.resolve()
    return whole.with_name(f"{whole.name}-copy")


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file ``.engram/copy.json``. A store that has no other copy has none."""

    #: Of a copy that took over: the name that its folder gives it, so that a copy of the folder is another store, and that of the store.
    folder: str = ""
    store: str = ""
    #: How often a copy took over, up to this one, and how many rows this one lacked then, at least.
    generation: int = 0
    lost: int = 0
    #: Address of the server of the other copy.
    other: str = ""
    #: The other one took over: this one is served no more.
    outdated: bool = False

    @classmethod
    def of(cls, directory: Path) -> Note:
        """That of a store. Raises ``CorruptStore``."""
        path = directory / layout.FOLDER / layout.COPY
        with words.raise_as(CorruptStore, f"{path}: expected a note of a second copy"):
            return msgspec.json.decode(files.read_small(path, 1 << 16), type=Note) if path.exists() else Note()

    def noted(self, directory: Path, **changes: object) -> Note:
        """Change it, and write it down."""
        changed = msgspec.structs.replace(self, **changes)
        files.write_atomically(directory / layout.FOLDER / layout.COPY, msgspec.json.encode(changed))
        return changed


class Origin(msgspec.Struct, frozen=True):
    """What a checkpoint says of its store beside the rows and components: in ``user`` of its description."""

    store: str
    generation: int
    schema: str
    recipe: Mapping[str, object]
    writes: int
    #: Of each lane, the position at which it began again when the store was emptied last.
    bases: list[int]
    #: As ``Rules``.
    limit: tuple[float, float, int, int]
    #: The table of writers, which says whose requests these rows are, compressed.
    writers: bytes
    #: The field by which rows are found; empty: there is none.
    key: tuple[str, ...] = ()


class Copies:
    """The part of a service that keeps a follower supplied.

    Args:
        rb: the open buffer.
        folder: of its store.
        counts: what is another one after each change but writes.

    Raises ``RuntimeError``: the other copy took over. ``CorruptStore``.
    """

    def __init__(self, rb: ReplayBuffer, folder: Path, counts: Callable[[], object]) -> None:
        self._rb, self._folder, self._counts, self._store = rb, folder, counts, cast("Store", rb.storage.memory)
        own = name_of(folder, readonly=self._store.readonly)
        self.note = Note.of(folder)
        #: Of the store, for its clients.
        self.name = self.note.store if self.note.folder == own else own
        if self.note.outdated:
            raise RuntimeError(self.why_replaced)
        #: Whether a write is acknowledged when the follower has its rows; and whether the follower takes over now.
        self.sync = self.hands_over = False
        self._checkpoints: Checkpointer | None = None
        #: Held while a follower is answered; when one was heard last; and changes of what follows.
        self._turn, self._heard, self._changed = threading.Lock(), -_SILENT_S, threading.Condition()
        #: The numbers of the newest snapshot, of the newest checkpoint that arrived, and of the one that a write waits for.
        self._begun = self._arrived = self._wanted = 0
        #: The newest checkpoint: its name and number, what the store was, and when it was so.
        self._name, self._number, self._was, self._saved_at = "", 0, object(), 0.0
        #: The newest moment of which the follower has all, as far as it was heard of since the server began.
        self._copied_at = time.monotonic()

    @property
    def why_replaced(self) -> str:
        """Why the store is not served."""
        return (
            f"serve: {str(self._folder)!r}: a copy of this store took over, and {self.note.other or 'another server'} serves it. What was "
            "written here since is not in it. Serve another directory with --follow, to have a copy again."
        )

    def check_newest(self, store: str, generation: int) -> None:
        """Raise ``OSError``: another server has a newer copy. It is noted."""
        if store == self.name and generation > self.note.generation:
            self.note = self.note.noted(self._folder, outdated=True)
        if self.note.outdated:
            raise OSError(self.why_replaced)

    def look(self, at: Listening) -> bool:
        """Ask the server of the other copy, if it answers, whether that is newer. It is told of this one. ``at``: how it is reached."""
        if self.note.other:
            with suppress(OSError, ArrowException, ValueError):
                access = Way(patience=0.0, **(at.reaching or {})).access(self.note.other, "serve")
                with closing(Connection(access)) as connection:
                    newest = protocol.Describe(protocol.PROTOCOL, version.__version__, self.name, self.note.generation)
                    served = connection.ask("describe", newest, protocol.Served)
                self.check_newest(served.store, served.generation)
        return self.note.outdated

    def positions(self) -> tuple[int, int]:
        """The number of the checkpoint that has what is written by now, and that of the follower; zeros: there is none, or writes wait."""
        return (0, 0) if self.sync or not self._name else (self._begun + 1, self._arrived)

    def await_copy(self) -> None:
        """Return when the follower has what was written before, if writes wait for it. Raises Flight's error: it takes over."""
        if self.note.outdated:
            raise away(self.why_replaced)
        if not self.sync:
            return
        with self._changed:
            self._wanted = wanted = self._begun + 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._arrived >= wanted or self.hands_over, _SILENT_S):
                there, none = f"{self.note.other} to fetch its rows", "a server that follows. Start one with --follow"
                words.warn(f"serve: --sync-follower: a write waits for {there if self.is_followed else none}.")
                self._changed.wait_for(lambda: self._arrived >= wanted or self.hands_over)
            if self._arrived < wanted:
                raise away("the server hands over to its copy")

    def gauges(self) -> dict[str, float]:
        """How old the copy is, where there was one ever: it grows while no follower is heard of."""
        return {"copy_age_s": time.monotonic() - self._copied_at} if self.note.other else {}

    @property
    def is_followed(self) -> bool:
        """Whether a follower was heard of lately."""
        return self._turn.locked() or time.monotonic() < self._heard + _SILENT_S

    def notes_follower(self, command: protocol.Tick) -> bool:
        """Whether the follower is a new one, which is noted.

        Raises ``RuntimeError``: there is another one, or this one takes over before it has followed.
        """
        is_there, is_new = self.is_followed, command.address != self.note.other
        if is_new and (command.last or is_there):
            why = f"but {self.note.other} follows this server" if is_there else "before another takes over"
            raise RuntimeError(f"follow: expected one follower, {why}.")
        if is_new:
            other = protocol.address_of(command.address, "follow")  # no name of a file, which would be read
            self.note = self.note.noted(self._folder, other=str(other))
        return is_new

    def tick(self, command: protocol.Tick) -> protocol.Ticked:
        """Make a checkpoint, if the follower lacks something. Raises what saving raises."""
        with self._turn:
            with self._changed:
                if command.have == self._name:
                    copied_at = time.monotonic() if self._looks() == self._was else self._saved_at
                    self._arrived, self._copied_at = self._number, max(self._copied_at, copied_at)
                self._changed.notify_all()
            if self._is_due(command):
                self._save()
            self._heard = time.monotonic()
            return protocol.Ticked(self._name, self._store.core.write_count)

    def hand_over(self, *, begins: bool) -> None:
        """From now on no write is acknowledged that waits; or the follower goes on as before."""
        with self._changed:
            self.hands_over = begins
            self._changed.notify_all()

    def _is_due(self, command: protocol.Tick) -> bool:
        """Wait until a write waits, for a while. Whether a checkpoint is to be made."""
        if command.last or not self._name or command.have != self._name:
            return True
        with self._changed:
            waits = self._changed.wait_for(lambda: self._wanted > self._arrived, _INTERVAL_S)
        return waits or self._looks() != self._was

    def _looks(self) -> object:
        return self._store.core.next_ticket, self._counts()

    def _save(self) -> None:
        storage, root = self._rb.storage, series_of(self._folder)
        if self._checkpoints is None:
            Requests(self._store).next_request(uuid4())  # makes the table, before there are rows of it
            self._checkpoints = Checkpointer(root, self._rb, prefetch="drop")
        newest, was = next(iter(attempts.names(root)), None), self._looks()
        with storage.paused:  # the table of writers and the rows are of one moment
            with self._changed:
                self._begun = number = self._begun + 1
            self._saved_at, user = time.monotonic(), msgspec.to_builtins(self._origin())
            saving = self._checkpoints.save(0 if newest is None else newest.step + 1, user=user, wait=False)
        self._name, self._number, self._was = saving.wait().name, number, was

    def _origin(self) -> Origin:
        core, positions = self._store.core, self._store.lane_states()[:, 0].tolist()
        recipe = msgspec.json.decode((self._folder / layout.FOLDER / layout.BUFFER).read_bytes())
        if b'"finals":{' in msgspec.json.encode(recipe):
            raise ValueError("follow: the sampler keeps final observations in a folder beside the store, not copied.")
        bases = [core.next_position(lane) - position for lane, position in enumerate(positions)]
        writers = zlib.compress(self._store.indexes[NAME, WritersIndex.kind].block.tensor.numpy().tobytes(), 1)
        schema, keyed = encode(self._store.schema).decode(), KeyIndex.in_use(self._store)
        key = () if keyed is None else self._store.schema.fields[keyed.core.field].key
        return Origin(
            self.name, self.note.generation, schema, recipe, core.write_count, bases, core.limit, writers, key
        )

    def files(self, schema: pa.Schema, name: str, before: str = "") -> Iterator[pa.RecordBatch]:
        """The files of a checkpoint as record batches of name and data; null for those that the one before has, too.

        The first checkpoint of a server has files of its own, also of rows that did not change.
        """
        root = series_of(self._folder)
        if None in (attempts.Name.parse(name), attempts.Name.parse(before or name)):
            raise ValueError(f"follow: expected names of checkpoints, got {name!r:.80} and {before!r:.80}.")
        for path in sorted((root / name).rglob("*")):
            if path.is_file():
                file = path.relative_to(root / name)
                old = root / before / file
                with self._turn:  # a follower that waits for this is there
                    same = before and old.exists() and (old.samefile(path) or filecmp.cmp(old, path, shallow=False))
                    self._heard = time.monotonic()
                for part in (None,) if same else parts_of(path):
                    self._heard = time.monotonic() + _ANSWER_S  # parts on their way are read yet
                    yield pa.record_batch([[str(file)], [part]], schema=schema)


def name_of(folder: Path, *, readonly: bool) -> str:
    """What names the store in a folder to its clients. A copy of the folder is another store: it has another control block."""
    control = folder / layout.FOLDER / layout.CONTROL
    with exclusive(folder):  # of two servers that begin at once, one gives the name
        name = files.store_id(control, bytes(16) if readonly else secrets.token_bytes(16))
    return f"{control.stat().st_ino:x}-{name.hex()}"


# ---- the other copy ------------------------------------------------------------------------------------------------------


def begin(directory: Path, leader: str | None, at: Listening, lease: Path | None) -> None:
    """Return when the store in a directory is to be served: at once, or when it has taken over from that of a leader, as a copy.

    Raises as :class:`Follower`; ``FileExistsError``: another server has locked the lease; ``OSError``.
    """
    if lease is not None:
        _leases.append(files.Descriptor.open(lease, os.O_RDWR | os.O_CREAT))
    if leader is not None and not Note.of(directory).generation:
        Follower(directory, leader, at, *_leases).run()
        # The other server may hold it until it ends.
        threading.Thread(target=lambda: [disk.lock(it, wait=True) for it in _leases], daemon=True).start()
    elif not all(map(disk.lock, _leases)):
        raise FileExistsError(f"serve: --lease: expected {str(lease)!r} to be free, but another server has locked it.")


def promoted(directory: Path) -> Note:
    """Have the process that keeps a copy for a directory make the store, and serve it: what is noted then.

    Raises ``RuntimeError``: there is no such process, it serves the store already, or it cannot make it.
    """
    root, note, why = series_of(directory), Note.of(directory), ""
    if note.generation:
        raise RuntimeError(f"promote: {str(directory)!r} is served already, as generation {note.generation}.")
    asked = root / _PROMOTE
    with suppress(FileNotFoundError):  # there is no copy, or it is served now
        held = disk.open_folder(root)
        asked.touch()
        while not (why := asked.read_text()) and not disk.lock(held):
            time.sleep(_RETRY_S / 5)
    disk.remove(asked)
    if not (note := Note.of(directory)).generation:
        absent = f"no server keeps a copy for {str(directory)!r}. Start one with --follow"
        raise RuntimeError(f"promote: {(why or absent).rstrip('.')}.")
    return note


class Follower:
    """Keeps a copy of the store of another server.

    Args:
        directory: where the store is to be once it is served: free, or an empty folder.
        leader: address of the server that has the store.
        at: the address at which the store is to be served.
        lease: a file that the server of a store has locked, open; None: there is none.

    Raises ``FileExistsError``: there is something in the directory, or another process keeps a copy for it.
    """

    def __init__(self, directory: Path, leader: str, at: Listening, lease: int | None = None) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise FileExistsError(f"serve: --follow: expected a free name or an empty folder, got {str(directory)!r}.")
        self._directory, self._leader, self._lease, self._root = directory, leader, lease, series_of(directory)
        self._access = Way(patience=0.0, **(at.reaching or {})).access(leader, "serve: --follow")
        if at.address.port == 0 and at.address.scheme != "unix":
            raise ValueError(f"serve: --follow: expected --listen with a port, for clients, got {at.address}.")
        self._listens = at.address
        self._check_address()
        everywhere = at.address.host in ("0.0.0.0", "::")  # noqa: S104 - it is where others look for it
        self._address = str(at.address._replace(host=socket.gethostname()) if everywhere else at.address)
        disk.make_folders(str(self._root))
        self._held = disk.open_folder(self._root)
        deadline = time.monotonic() + _RETRY_S
        while not disk.lock(self._held):  # a promotion that finds no follower has it for a moment
            if time.monotonic() >= deadline:
                raise FileExistsError(f"serve: --follow: another process keeps a copy in {str(self._root)!r}.")
            time.sleep(_RETRY_S / 10)
        disk.remove(self._root / _PROMOTE)
        newest = next(iter(attempts.names(self._root)), None)
        #: The newest whole copy, whether it came since this began, and the rows that the leader had ever written when heard of last.
        self._have, self._trails, self._writes = "" if newest is None else str(newest), False, 0
        self._connection: Connection | None = None
        self._timeout_s = _ANSWER_S

    def run(self) -> None:
        """Follow until the store is to be served: then it is in the directory."""
        said, asked = "", self._root / _PROMOTE
        while True:
            why, takes_over = "", self._takes_over(asked)
            try:
                try:
                    if takes_over:
                        self._check_address()
                    self.fetch(last=takes_over)
                except ConnectionError as error:
                    self._connection = None
                    why = f"{self._leader} does not serve the store, and the newest copy here is {self._have or 'none'}: {error}"
                    if self._lease is not None and self._have and not self._trails:
                        why += " It may be old, and the lease does not promote it: if the leader is gone, call engram promote."
                if takes_over and self._have:
                    self.make()
                    disk.remove(asked)
                    return
            except Exception as error:  # noqa: BLE001 - the next try may do better
                why = f"{why} {self._leader} is neither copied nor replaced: {error}".lstrip()
            if takes_over and asked.exists():
                asked.write_text(why)
            if why not in ("", said):
                _log.warning("serve: --follow: %s", why)
            if said := why:
                time.sleep(_RETRY_S)

    def _check_address(self) -> None:
        """Raise ``OSError``: the server could not listen there."""
        host, port = self._listens.host, self._listens.port
        if self._listens.scheme != "unix":
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with words.raise_as(OSError, f"serve: {self._listens}: cannot listen there", OSError):
                socket.create_server((host, port), family=family).close()

    def _takes_over(self, asked: Path) -> bool:
        """Whether it is asked for, or no other process has the lease of a leader whose copy is no older than this process."""
        wanted = asked.exists() and not asked.stat().st_size
        return wanted or (self._lease is not None and self._trails and disk.lock(self._lease))

    def fetch(self, *, last: bool = False) -> None:
        """Have a newer copy, or the ``last`` one.

        Raises ``ConnectionError``: the other server does not answer, or serves another store; and what it raises.
        """
        coming = self._root / _COMING
        disk.remove(coming)
        if self._connection is None:  # one that breaks may have had too little time
            self._connection = Connection(self._access._replace(timeout_s=self._timeout_s))
            self._timeout_s *= 2
            if self._have and self._connection.served.store != self._origin().store:
                raise ConnectionError("another store is served there. To copy it, too, serve another directory.")
        command = protocol.Tick(self._have, self._address, last)
        ticked = self._connection.ask("tick", command, protocol.Ticked)
        self._writes = ticked.writes
        if ticked.name != self._have:
            ticket = f"copy {ticked.name} {self._have}".encode()
            try:
                self._connection.fetch_dump(coming, lambda _: None, ticket, self._root / self._have)
            except ConnectionError as error:
                self._connection = None
                raise RuntimeError(str(error)) from error  # it may live, and may have handed over
            os.rename(coming, self._root / str(attempts.Name.parse(ticked.name)))
            for name in map(str, attempts.names(self._root)):
                if name not in (ticked.name, self._have):
                    disk.remove(self._root / name)
        self._have, self._trails, self._timeout_s = ticked.name, True, _ANSWER_S

    def _origin(self) -> Origin:
        """What the newest copy says of its store."""
        return msgspec.convert(attempts.read_attempt(self._root / self._have).user, Origin)

    def make(self) -> Note:
        """Make the store of the newest copy, in one step. Raises what loading it raises."""
        making, origin = self._root / _MAKING, self._origin()
        disk.remove(making)
        create_store(decode(origin.schema.encode(), "promote"), making).close()
        files.overwrite(making / layout.FOLDER / layout.BUFFER, msgspec.json.encode(origin.recipe))
        with ReplayBuffer.open(making) as rb:
            store = cast("Store", rb.storage.memory)
            # Positions of lanes go on where those of the other store do, so that requests find their rows.
            lanes = torch.tensor([[it, bool(it) * store.lane_length, 0, 0] for it in origin.bases], device="cpu")
            empty = StoreState(lanes, torch.zeros(store.capacity, dtype=torch.int64, device="cpu"), 1, 0)
            store.replace(empty, lambda _: None)
            Checkpointer(self._root, rb).restore(name=self._have, resume="exact")
            table, groups = zlib.decompress(origin.writers), len(store.schema.ragged_groups)
            index, _ = WritersIndex.of_name(store.indexes, NAME, len(table), WRITERS, groups)
            index.block.tensor.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
            WritersIndex.free_lock(index.block)
            if origin.key:
                rb.index_keys(origin.key)
            if any(origin.limit):
                rb.limit(*Rules(*origin.limit).limits())
        lost, generation = max(0, self._writes - origin.writes), origin.generation + 1
        names = {"folder": name_of(making, readonly=False), "store": origin.store}
        note = Note().noted(making, generation=generation, lost=lost, other=self._leader, **names)
        disk.rename(making, self._directory)
        disk.sync_folder(self._directory.parent)
        _log.warning("serve: took over from %s, which had at least %d rows more", self._leader, lost)
        return note
