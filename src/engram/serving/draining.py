"""Moves the rows of a served store to other stores, and sends on what clients still say of them: ``engram drain``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Unpack, cast
from uuid import UUID, uuid4

import msgspec
import torch
from torch import Tensor

from engram import samplers
from engram.buffer.connecting import Reaching, access_to
from engram.format import files, layout
from engram.inspect.advice import drawing_by
from engram.remote import protocol
from engram.remote.connection import Connection
from engram.remote.fleet import plans
from engram.remote.fleet.members import SKIP_S, Shard
from engram.remote.fleet.storage import FleetStorage, ask_servers, check_stores, storage_at
from engram.samplers import PrioritizedSampler
from engram.saved.rows import roles_of
from engram.serving.service import Service
from engram.storages import TensorStorage

#: Rows, and bytes, that are moved at a time; and for how many seconds one command moves some.
BLOCK_ROWS, BLOCK_BYTES, TURN_S = 4096, 4 << 20, 1.0
#: For how long new priorities of moved rows are sent on, once the last row has left; and between two looks for others.
FORWARD_S, INTERVAL_S = 60.0, 0.5
#: Held while rows are moved.
_MOVING = threading.Lock()


class Listening(NamedTuple):
    """The address that a server listens at, and its secrets, which its text leaves out."""

    address: protocol.Address
    token: bytes
    tls: tuple[bytes, bytes] | None
    #: Certificates that sign those of clients, PEM; empty: clients need none.
    clients: bytes = b""
    #: The files by which the server is a client of others: it trusts what signs its certificate, and those of clients.
    reaching: Reaching | None = None

    def __repr__(self) -> str:
        return f"Listening({self.address})"


def drain(service: Service, command: protocol.Drain, at: Listening | None) -> int:
    """Move some rows: how many are left. ``at``: of a process that only serves.

    Raises ``RuntimeError``: this one does more. ``ValueError``: rows cannot be moved. ``ConnectionError``: no other store takes any.
    """
    if at is None:
        raise RuntimeError("drain: expected a server that engram serve runs, got one that ends with its program.")
    with _MOVING:
        draining = cast("Draining | None", service.draining)
        if command.to and (draining is None or draining.to != command.to):
            service.draining = draining = Draining(service, command, at)
        if draining is None:
            raise ValueError("drain: expected servers of other stores, got none. Nothing is moved.")
        draining.move(evict=command.evict)
        left = len(service.buffer.storage)
        if not (command.to or left):
            os.kill(os.getpid(), signal.SIGTERM)
        return left


def drained(address: str, to: str, *, evict: bool, **how: Unpack[Reaching]) -> Iterator[int]:
    """Have the server at an address move its rows to others, and end: how many are left, again and again.

    Raises as ``ReplayBuffer.connect``, and as :func:`drain`.
    """
    server, others = Connection(access_to(address, "drain", 0.0, **how)), access_to(to, "drain", 0.0, **how)
    own = [at for at, answer in ask_servers(others, "skip").items() if answer.store == server.served.store]
    command, since = protocol.Drain([str(at) for at in others.addresses if at not in own], evict), time.monotonic()
    while (left := server.ask("drain", command, int)) or time.monotonic() < since + FORWARD_S:
        if left:
            yield left
            since = time.monotonic()
        else:
            time.sleep(INTERVAL_S)
    if others.members is not None:
        others.members.remove(own)
    with contextlib.suppress(ConnectionError):  # it may end before its answer is here
        server.ask("drain", protocol.Drain(), int)


class Note(msgspec.Struct, frozen=True):
    """A block of rows on its way. It is written down before the block is sent, so that no death of a process doubles or loses it."""

    #: The store that it goes to, and its request there.
    store: str
    writer: UUID
    #: It has the live rows of this lane between these tickets.
    lane: int
    first: int
    last: int
    #: Whether the store has said that it has them. Then they go from here.
    arrived: bool = False


class Draining:
    """The drain of a store: where its rows go.

    Raises as ``ReplayBuffer.connect``. ``ValueError``: the other stores cannot take the rows.
    """

    def __init__(self, service: Service, command: protocol.Drain, at: Listening) -> None:
        self.to, self._service, self._storage = command.to, service, cast("TensorStorage", service.buffer.storage)
        self._path = Path(str(self._storage.store.directory), layout.FOLDER, "draining")
        #: The block that may have arrived.
        noted = files.read_small(self._path, 4096) if self._path.exists() else b"null"
        self._note = msgspec.json.decode(noted, type=Note | None)
        access = access_to(",".join(command.to), "drain", SKIP_S, **(at.reaching or {}))
        #: The other stores, of which this is a client that does not draw.
        others = storage_at(access, "skip", 0)
        if not isinstance(others, FleetStorage):
            raise ValueError("drain: expected stores, got servers that wait for a first row. Nothing is moved.")
        self._others = others
        self._check(command)
        #: Held while it is decided where a row is.
        self._places = threading.Lock()
        #: Of moved rows: ``store << SHIFT | row`` where they are, their tickets there, and those that they had here; or -1.
        self._moved = torch.full((3, self._storage.max_size), -1, device="cpu")

    def _check(self, command: protocol.Drain) -> None:
        others, schema = self._others, self._storage.store.schema
        served = [it.storage.served for it in others.members.shards]
        own = cast("protocol.Served", self._service.do(protocol.Describe(protocol.PROTOCOL, "")))
        check_stores([own, *served], None)
        of, room = samplers.declared(self._service.buffer.sampler).traits, others.max_size - len(others)
        no_room, ids = schema.ragged or room < len(self._storage), "traj_id" in roles_of(schema.fields)
        for wrong, expected in (
            (min(it.level for it in served) < 2, "servers of this engram, or of a newer one"),
            (any("read_only" in it.traits_of_writer for it in (own, *served)), "stores whose writer is not read-only"),
            (of.consumes, f"rows that may be drawn again, and {own.sampler} uses them up"),
            (of.draws_windows and not ids, "ids of trajectories, as windows are drawn"),
            (any(others.ledger.limit), "no limits, which would count moved rows as new: rb.limit(None)"),
            (no_room and not command.evict, f"room for the rows, got {room} rows. Evict rows that are there"),
        ):
            if wrong:
                raise ValueError(f"drain: expected {expected}. Nothing is moved.")

    def move(self, *, evict: bool) -> None:
        """Move some rows. Raises ``ConnectionError``: no other store takes any, or one may have some and is gone."""
        members, schema, until = self._others.members, self._storage.store.schema, time.monotonic() + TURN_S
        if (note := self._note) is not None:
            rows, tickets = self._rows(note.lane)
            shard = next((it for it in members.shards if it.storage.served.store == note.store), None)
            noted = rows[(tickets >= note.first) & (tickets <= note.last)]
            while self._send(note, shard, noted[self._service.tickets(noted) >= 0], evict=evict) is None:
                pass
        length = min(it.storage.max_size for it in members.shards) // schema.lanes
        most = min(BLOCK_ROWS, length, max(1, BLOCK_BYTES // max(1, schema.row_bytes)))
        for lane in range(schema.lanes):
            (rows, tickets), full = self._rows(lane), set[int]()
            while len(rows):
                there = [it for it in members.present() if it.number not in full]
                if not there:
                    raise ConnectionError(
                        f"drain: the others have no room for {len(rows)} rows of lane {lane}. Evict rows."
                    )
                shard = there[lane % len(there)]
                with members.reaching(shard):  # if it does not answer, others do
                    shard.storage.state()
                if shard.lost:
                    continue
                note = Note(shard.storage.served.store, uuid4(), lane, *tickets[:most][[0, -1]].tolist())
                sent = self._send(note, shard, rows[:most], evict=evict)
                if sent is None:
                    rows, tickets = self._rows(lane)
                elif sent:
                    rows, tickets = rows[most:], tickets[most:]
                else:
                    full.add(shard.number)
                if time.monotonic() >= until:
                    return

    def _rows(self, lane: int) -> tuple[Tensor, Tensor]:
        """Live rows of a lane, oldest first, and what they hold."""
        rows = self._storage.extent().in_order(torch.tensor([lane], device="cpu"))
        tickets = self._service.tickets(rows)
        return rows[tickets >= 0], tickets[tickets >= 0]

    def _send(self, note: Note, shard: Shard | None, rows: Tensor, *, evict: bool) -> bool | None:
        """Move a block. False: its store does not take it; None: rows changed while they were read. Raises ``ConnectionError``: it may
        have it.
        """
        held = self._service.tickets(rows)
        if note.arrived or not len(rows):
            self._service.remove(rows, held)
            self._keep(None)
            return True
        if shard is None:
            raise ConnectionError(
                f"drain: rows may be in {note.store}. Drain to it; if it is gone, remove {self._path}."
            )
        tickets, priorities = self._storage.tickets_of(rows), self._priorities(rows)
        columns, torn = self._storage.read(rows, tickets)
        if torn:
            return None
        self._keep(note)
        try:
            there, theirs = shard.storage.take(protocol.Move(note.writer, evict), columns, note.lane, priorities)
        except protocol.TakesNone:
            self._keep(None)
            return False
        self._keep(msgspec.structs.replace(note, arrived=True))
        with self._places:
            now, same = self._priorities(rows), self._storage.tickets_of(rows) == tickets
            self._moved[:, rows[same]] = torch.stack([plans.number(there, shard.number), theirs, held])[:, same]
            self._service.remove(rows[same], held[same])
        if not same.all():  # they were edited, or removed, on their way
            shard.storage.remove(there[~same], theirs[~same])
        changed = same & (now != priorities)
        shard.storage.prioritize(there[changed], now[changed], theirs[changed])
        self._keep(None)
        return True

    def _keep(self, note: Note | None) -> None:
        """Write down which block is on its way."""
        self._note = note
        files.write_atomically(self._path, msgspec.json.encode(note))

    def _priorities(self, rows: Tensor) -> Tensor:
        """Those by which rows are drawn; ones, where none are."""
        by = drawing_by(self._service.buffer.sampler)
        if not isinstance(by, PrioritizedSampler) or not by.alpha:
            return torch.ones(len(rows), dtype=torch.float64, device="cpu")
        return (by.priorities().leaves_of(rows) ** (1 / by.alpha) - by.eps).clamp(min=0)

    @contextlib.contextmanager
    def forwarding(self, rows: Tensor, priorities: Tensor, tickets: Tensor) -> Iterator[Tensor]:
        with self._places:
            to, theirs, held = self._moved[:, rows.clamp(min=0)]
            moved = (rows >= 0) & (to >= 0) & ((tickets < 0) | (tickets == held))
            yield rows.where(~moved, -1)
        self._others.prioritize(to[moved], priorities[moved], theirs[moved])
