"""Moves the rows of a served store to other stores, and sends on what clients still say of them: ``engram drain``."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, Unpack, cast
from uuid import NAMESPACE_OID, uuid5

import msgspec
import torch
from torch import Tensor

from engram import samplers
from engram._support.words import raise_as
from engram.around.expander import Expander
from engram.buffer.configuration import Reaching
from engram.buffer.connecting import Way
from engram.errors import CorruptStore
from engram.format import files, layout
from engram.format.sizes import usual_row_bytes
from engram.inspect.advice import drawing_by
from engram.remote import protocol
from engram.remote.connection import Connection
from engram.remote.fleet import plans
from engram.remote.fleet.members import SKIP_S, Shard
from engram.remote.fleet.storage import FleetStorage, ask_servers, check_stores, storage_at
from engram.remote.served import ServedStorage
from engram.saved.rows import roles_of
from engram.serving.copies import Listening
from engram.serving.service import DRAIN_LEASE_S, Service
from engram.storages import Storage, TensorStorage
from engram.store.ragged_rows import items_in

#: Rows, and bytes, that are moved at a time; and for how many seconds one command moves some.
BLOCK_ROWS, BLOCK_BYTES, TURN_S = 4096, 4 << 20, 1.0
#: For how long new priorities of moved rows are sent on, once the last row has left; and between two looks for others.
FORWARD_S, INTERVAL_S = 60.0, 0.5
#: Held while rows are moved.
_MOVING = threading.Lock()


#: A client of the stores that a command names; None: there is none yet.
Connect: TypeAlias = Callable[[protocol.Drain], ServedStorage | None]


def drain(service: Service, command: protocol.Drain, connect: Connect | None) -> int:
    """Move some rows: how many are left. ``connect``: of a process that only serves.

    Raises ``RuntimeError``: this one does more. ``ValueError``: rows cannot be moved. ``ConnectionError``: no other store takes any.
    """
    if connect is None:
        raise RuntimeError("drain: expected a server that engram serve runs, got one that ends with its program.")
    with _MOVING:
        draining = cast("Draining | None", service.draining) or Draining(service, connect)
        # Before the others are asked whether they are drained: of two that are drained into each other, one sees the other.
        service.drained_until = math.inf
        try:
            draining.move(command)
        except BaseException:
            service.drained_until = 0.0
            raise
        service.drained_until = time.monotonic() + DRAIN_LEASE_S
        left = len(service.buffer.storage)
        if command.ends and not left:
            os.kill(os.getpid(), signal.SIGTERM)
        return left


def connected(at: Listening, command: protocol.Drain) -> ServedStorage:
    """A client of the stores that a command names, of a server at an address. Raises as ``ReplayBuffer.connect``."""
    # A list of addresses, and never the name of a file that has some: a client names it.
    access = Way(patience=SKIP_S, **(at.reaching or {})).access(command.to, "drain")
    named = [one._replace(certified=name) for one, name in zip(access.addresses, command.names, strict=False)]
    return storage_at(access._replace(addresses=tuple(named) or access.addresses), "skip", 0)


def drained(address: str, to: str, *, evict: bool, **how: Unpack[Reaching]) -> Iterator[int]:
    """Have the server at an address move its rows to others, and end: how many are left, again and again.

    Raises as ``ReplayBuffer.connect``, and as :func:`drain`.
    """
    way = Way(patience=0.0, **how)
    server, others = Connection(way.access(address, "drain")), way.access(to, "drain")
    own = [at for at, answer in ask_servers(others, "skip").items() if answer.store == server.served.store]
    addresses = [at for at in others.addresses if at not in own]
    command = protocol.Drain([*map(str, addresses)], evict, names=[at.certified for at in addresses])
    yield from turns(lambda: server.ask("drain", command, int))
    if others.members is not None:
        others.members.remove(own)
    with contextlib.suppress(ConnectionError):  # it may end before its answer is here
        server.ask("drain", msgspec.structs.replace(command, ends=True), int)


def turns(move_some: Callable[[], int]) -> Iterator[int]:
    """How many rows are left, again and again, until none are and new priorities of those that moved were sent on for a while."""
    since = time.monotonic()
    while (left := move_some()) or time.monotonic() < since + FORWARD_S:
        if left:
            yield left
            since = time.monotonic()
        else:
            time.sleep(INTERVAL_S)


class Note(msgspec.Struct, frozen=True):
    """A block of rows on its way. It is written down before the block is sent, so that no death of a process doubles or loses it.

    Until ``leaves``, all of its rows are in this store, and it is not known whether they are in the other one. From then on, those that
    it names are in the other one, and go from here. Numbers are int64 each, priorities float64.
    """

    #: The store that it goes to, and its request there.
    store: str
    number: int
    lane: int
    rows: bytes
    tickets: bytes
    #: As they were sent.
    priorities: bytes
    leaves: bool = False
    #: Rows to remove from the other store, since they changed here on their way, and their tickets there.
    there: tuple[bytes, bytes] = (b"", b"")


def _raw(numbers: Tensor) -> bytes:
    return numbers.numpy().tobytes()


def _numbers(raw: bytes, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")


def _noted(storage: Storage) -> tuple[Path, Note | None]:
    """The file in the folder of a store, and the block that is on its way, if there is one."""
    path = Path(str(cast("TensorStorage", storage).store.directory), layout.FOLDER, "draining")
    damaged = f"{path}: expected which rows a drain had on their way, got other bytes. Compare the stores, and remove the file"
    with raise_as(CorruptStore, damaged, msgspec.MsgspecError):
        raw = files.read_small(path, 1 << 20) if path.exists() else None
        return path, None if raw is None else msgspec.msgpack.decode(raw, type=Note | None)


def finish(storage: Storage) -> None:
    """Remove rows that have gone to another store, and that a server which died left here. The store must not have changed since."""
    if storage.initialized and (note := _noted(storage)[1]) is not None and note.leaves:
        _remove(storage, note)


def _remove(storage: Storage, note: Note) -> None:
    """Remove the rows of a note that are what they were."""
    rows, store = _numbers(note.rows), cast("TensorStorage", storage).store
    with storage.paused:
        rows = rows[storage.tickets_of(rows) == _numbers(note.tickets)]
        store.core.remove(rows.data_ptr(), len(rows), 0, paused=True)
    store.refilled()


class Draining:
    """The drain of a store: where its rows go, and where they went."""

    def __init__(self, service: Service, connect: Connect) -> None:
        self._service, self._storage, self._open = service, cast("TensorStorage", service.buffer.storage), connect
        self._path, self._note = _noted(self._storage)
        #: The other stores, of which this is a client that does not draw: as the last command named them, and as those before did; and
        #: whether it lets their rows be replaced.
        self._to, self._fleets, self._evict = list[str](), list[FleetStorage](), False
        #: Held while it is decided where a row is.
        self._places = threading.Lock()
        #: Of moved rows: which of the fleets they are in, ``store << SHIFT | row`` there, their tickets there, and those that they had
        #: here; or -1.
        self._moved = torch.empty(4, 0, dtype=torch.int64, device="cpu")

    # ---- where rows go -------------------------------------------------------------------------------------------------

    def _connect(self, command: protocol.Drain) -> FleetStorage:
        """The other stores. Raises as ``ReplayBuffer.connect``; ``ValueError``: they cannot take the rows."""
        if (to := command.to) and to != self._to:
            with contextlib.ExitStack() as refused:
                if (others := self._open(command)) is not None:
                    refused.callback(others.close)
                if not isinstance(others, FleetStorage):
                    raise ValueError("drain: expected stores, got servers that wait for a first row. Nothing is moved.")
                self._check(others)
                refused.pop_all()
            self._to, self._fleets = to, [*self._fleets, others]
            if not self._moved.numel():
                self._moved = torch.full((4, self._storage.max_size), -1, device="cpu")
            self._service.draining = self  # from now on it is asked where rows are
        if not self._to:
            raise ValueError("drain: expected servers of other stores, got none. Nothing is moved.")
        return self._fleets[-1]

    def _check(self, others: FleetStorage) -> None:
        served = [it.storage.served for it in others.members.shards]
        own = cast("protocol.Served", self._service.do(protocol.Describe(protocol.PROTOCOL, "")))
        check_stores([own, *served], None)
        sampler, fields = self._service.buffer.sampler, self._storage.store.schema.fields
        of, copies = samplers.declared(sampler).traits, self._service.copies
        mixes = (of.draws_windows or isinstance(sampler, Expander)) and "traj_id" not in roles_of(fields)
        for wrong, expected in (
            (min(it.level for it in served) < 2, "servers of this engram, or of a newer one"),
            (own.store in (it.store for it in served), "servers of other stores, got one of this store"),
            (copies.is_followed, f"a store that no server follows, and {copies.note.other} has a copy of all rows"),
            (any(it.drained for it in served), "stores that stay, got one that is drained itself"),
            (any("read_only" in it.traits_of_writer for it in (own, *served)), "stores whose writer is not read-only"),
            (of.consumes, f"rows that may be drawn again, and {own.sampler} uses them up"),
            (of.has_epochs, f"another sampler than {own.sampler}, in whose epochs rows that move would come twice"),
            (mixes, "ids of trajectories, as steps around rows are drawn"),
            (any(others.ledger.limit), "no limits, which would count moved rows as new: rb.limit(None)"),
        ):
            if wrong:
                raise ValueError(f"drain: expected {expected}. Nothing is moved.")

    def move(self, command: protocol.Drain) -> None:
        """Move some rows. Raises ``ConnectionError``: no other store takes any, or one may have some and is gone."""
        known, others = len(self._fleets), self._connect(command)
        storage, until, self._evict = self._storage, time.monotonic() + TURN_S, command.evict
        self._settle(others)
        schema, extent = storage.store.schema, storage.extent()
        if not command.evict and len(storage) and schema.ragged:
            raise ValueError(
                "drain: expected room for the rows, got rows of any length, for which it is unknown. Evict rows. Nothing is moved."
            )
        if not command.evict and len(self._fleets) > known and (room := others.max_size - len(others)) < len(storage):
            self._to = []  # it is checked again
            raise ValueError(f"drain: expected room for the rows, got {room} rows. Evict rows. Nothing is moved.")
        most = min(BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, usual_row_bytes(schema))))
        for lane in range(schema.lanes):
            rows, n, full, why = extent.in_order(torch.tensor([lane], device="cpu")), most, set[int](), ""
            while len(rows):
                there = [it for it in others.members.present() if it.number not in full]
                if not there:
                    raise ConnectionError(f"drain: no other store takes {len(rows)} rows of lane {lane}: {why}")
                shard = there[lane % len(there)]
                with others.members.reaching(shard):  # if it does not answer, others do
                    number = self._ask(shard, lane, 0, rows[:0])[0]
                if shard.lost:
                    continue
                n = min(n, len(rows))
                try:
                    taken = self._ask(shard, lane, number, rows[:n])[1]
                    if self._note is None or self._arrived(self._note, shard, taken):
                        rows = rows[n:]
                except protocol.TakesNone as error:
                    self._keep(None)
                    if n > 1:
                        n //= 2
                    else:
                        full, n, why = {*full, shard.number}, most, str(error)
                if time.monotonic() >= until:
                    return

    # ---- a block of rows -----------------------------------------------------------------------------------------------

    def _ask(self, shard: Shard, lane: int, number: int, rows: Tensor) -> tuple[int, list[Tensor]]:
        """What :class:`protocol.Move` has of rows, or of none. Rows are noted before they are sent."""
        torn, storage = [0], self._storage
        while torn:  # rows that change while they are read wait for the next turn: clients may go on changing them
            tickets = storage.tickets_of(rows)
            rows, tickets = rows[tickets >= 0], tickets[tickets >= 0]
            priorities = self._priorities(rows)
            columns, torn = storage.read(rows, tickets)
            rows = rows[[k for k in range(len(rows)) if k not in torn]] if torn else rows
        if len(rows) > 1 and sum(it.nbytes for it in map(items_in, columns) if it is not None) > BLOCK_BYTES:
            raise protocol.TakesNone("its rows are larger than a message.")
        if len(rows):
            store = shard.storage.served.store
            self._keep(Note(store, number, lane, _raw(rows), _raw(tickets), _raw(priorities)))
        writer = uuid5(NAMESPACE_OID, f"engram drain {self._service.name} {lane}")
        lanes = [torch.full_like(rows, lane)] if storage.lanes > 1 else []
        return shard.storage.take(protocol.Move(writer, number, self._evict), [*columns, *lanes, priorities])

    def _settle(self, others: FleetStorage) -> None:
        """Bring the block to its end that was on its way when a process died. Raises ``ConnectionError``: its store is not there."""
        note = self._note = _noted(self._storage)[1]  # who knows better may have removed it
        if note is None:
            return
        shard = next((it for it in others.members.shards if it.storage.served.store == note.store), None)
        if shard is None:
            raise ConnectionError(
                f"drain: rows may be in {note.store}. Drain to it, or remove the file .engram/draining here."
            )
        if note.leaves:
            _remove(self._storage, note)
            self._end(note, shard)
            return
        self._arrived(note, shard, self._ask(shard, note.lane, note.number, _numbers(b""))[1])

    def _arrived(self, note: Note, shard: Shard, taken: list[Tensor]) -> bool:
        """Let the rows of a block go from here: the other store has them. Those that were edited or removed here meanwhile go from there,
        and those that were removed there from here, too. False: the store has none, and rows stay.
        """
        there, theirs = taken
        if not len(there):
            self._keep(None)
            return False
        rows, tickets, storage = _numbers(note.rows), _numbers(note.tickets), self._storage
        with self._places:
            with storage.paused:
                now, same = self._priorities(rows), storage.tickets_of(rows) == tickets
                held, number = storage.writes_of(rows, tickets), len(self._fleets) - 1
                changed = _raw(there[~same]), _raw(theirs[~same])
                kept = {"rows": _raw(rows[same]), "tickets": _raw(tickets[same]), "there": changed, "leaves": True}
                before, note = note, msgspec.structs.replace(note, **kept)
                self._keep(note)
                at = torch.stack([torch.full_like(rows, number), plans.number(there, shard.number), theirs, held])
                self._moved[:, rows[same]] = at.where(theirs >= 0, -1)[:, same]
                _remove(storage, note)
            fresh = same & (theirs >= 0) & (now != _numbers(before.priorities, torch.float64))
            shard.storage.prioritize(there[fresh], now[fresh], theirs[fresh])  # before newer ones are sent on
        self._end(note, shard)
        return True

    def _end(self, note: Note, shard: Shard) -> None:
        """Remove what changed here from the other store, and forget the block."""
        rows, tickets = map(_numbers, note.there)
        if len(rows):
            shard.storage.remove(rows, tickets)
        self._keep(None)

    def _keep(self, note: Note | None) -> None:
        """Write down which block is on its way."""
        files.write_atomically(self._path, msgspec.msgpack.encode(note))
        self._note = note

    def _priorities(self, rows: Tensor) -> Tensor:
        """Those by which rows are drawn; ones, where none are."""
        by = drawing_by(self._service.buffer.sampler)
        if not isinstance(by, samplers.PrioritizedSampler) or not by.alpha:
            return torch.ones(len(rows), dtype=torch.float64, device="cpu")
        return (by.priorities().leaves_of(rows) ** (1 / by.alpha) - by.eps).clamp(min=0)

    # ---- what clients say of rows that went ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forwarding(self, rows: Tensor, priorities: Tensor, tickets: Tensor) -> Iterator[Tensor]:
        with self._places:
            fleets, to, theirs, held = self._moved[:, rows.clamp(min=0)]
            same = (tickets == held) | ((tickets < 0) & (self._service.tickets(rows) < 0))
            moved = (rows >= 0) & (to >= 0) & same
            yield rows.where(~moved, -1)
        for number, others in enumerate(self._fleets):
            at = moved & (fleets == number)
            others.prioritize(to[at], priorities[at], theirs[at])
