"""The commands of a server over its store, independent of how they arrive."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from uuid import UUID

import msgspec
import pyarrow as pa
import torch
from torch import Tensor

from engram import samplers, writers
from engram._support import field_paths, native, version
from engram.around import Expander, SampleUnit
from engram.buffer import ReplayBuffer, ragged_batches, window_marks
from engram.buffer.read_path import ReadPath
from engram.buffer.wiring import Wiring
from engram.errors import IncompatibleStore, NoSampleable, RowError
from engram.format import layout
from engram.format.schema import encode
from engram.format.sizes import most_row_bytes, usual_row_bytes
from engram.inspect import gauges
from engram.inspect.advice import drawing_by, is_over_batch
from engram.remote import protocol, wire
from engram.samplers import PrioritizedSampler
from engram.samplers.staleness import RuledSampler, VersionedSampler
from engram.serving.calls import Calls
from engram.serving.copies import Copies
from engram.serving.dumps import Dumps
from engram.store.adding import adopt_fields
from engram.store.blocks import DrawingPart, Masses, ThreadKey
from engram.store.lifetime import exclusive
from engram.store.limits import Rules
from engram.store.ragged_rows import Items, check_room, items_in, joined
from engram.store.requests import IN_DOUBT, OutOfOrder, Requests
from engram.store.store import Store
from engram.transforms import Compose
from engram.types import Entry, WritePlan

#: For how long a store that is drained takes no rows, if the drain does not go on.
DRAIN_LEASE_S = 60.0
#: Of answers that are made, or that clients have not read. Small ones are as many as streams, and are not counted.
ANSWER_BYTES = 2 * protocol.MAX_MESSAGE
#: For how long an answer waits until others are read.
_ROOM_TIMEOUT_S = 10.0


class Answers:
    """Bytes of large answers under way."""

    def __init__(self) -> None:
        self._bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def counted(self, nbytes: int) -> Iterator[None]:
        """Make an answer of so many bytes, and send it. It waits while those before it leave no room.

        Raises ``RuntimeError``: they are not read.
        """
        if nbytes <= protocol.COALESCED_BYTES:
            yield
            return
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._bytes or self._bytes + nbytes <= ANSWER_BYTES, _ROOM_TIMEOUT_S
            ):
                raise RuntimeError(
                    f"sample: expected at most {ANSWER_BYTES} bytes of batches under way from a server, got {self._bytes} before these "
                    f"{nbytes}, which clients did not read within {_ROOM_TIMEOUT_S:g} s. Draw again, or fewer rows."
                )
            self._bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= nbytes
                self._changed.notify_all()


#: For so many seconds a client that has connected counts as one that draws, before it draws.
_CONNECTING_S = 60.0


class Batches(NamedTuple):
    """Batches for one message."""

    metadata: protocol.Sampled
    columns: list[wire.Column]
    tensors: list[Tensor]


class _Drawn(NamedTuple):
    """A batch."""

    #: Of its rows.
    shape: torch.Size
    #: What the draw adds to the fields and the rows' numbers.
    entries: tuple[Entry, ...]
    #: Flat, ``[n, ...]``.
    tensors: list[Tensor]


class Forwarding(Protocol):
    """What moves the rows of a store to others."""

    def forwarding(self, rows: Tensor, priorities: Tensor, tickets: Tensor) -> AbstractContextManager[Tensor]:
        """Send new priorities to where rows are now. Gives the rows that are here; -1 for others."""


class Service:
    """The commands over an open buffer, for any number of threads."""

    def __init__(self, rb: ReplayBuffer) -> None:
        #: The open one.
        self.buffer = self._rb = rb
        self._wiring = Wiring(rb.storage, Compose.of(None), collate_fn=None, pinning=None, generator=None)
        self._wiring.unit = unit = _unit_of(rb)
        self._wiring.connect(rb.sampler, rb.writer, rb.batch_size)
        self._reading = ReadPath(self._wiring)
        store = rb.storage.memory
        assert store is not None  # it was opened
        assert store.directory is not None
        self._store, self._schema = store, store.schema
        self._folder = Path(store.directory)
        self._requests, self._calls = Requests(store), Calls(rb, self.check_stays)
        self._answers, self._dumps = Answers(), Dumps()
        self._key = ThreadKey()
        #: Bytes of a row, as it is stored, and of one of batches, whose stacks are wider.
        records = 1 if unit is None else unit.total
        self._stored_bytes = records * usual_row_bytes(self._schema)
        of = self._wiring.of_sampler  # what it draws may be gone where it cannot be sent
        gone = of.consumes or of.has_epochs or of.awaits_rows
        self._drawn_bytes = records * drawn_bytes(rb.sampler, store, consumes=gone)
        #: Clients that write, and streams of all kinds, which the server counts.
        self.writers = self.open_streams = 0
        #: Streams of batches; when the clients connected that have begun none yet; and the number of the newest client.
        self.streams = 0
        self._awaited: deque[float] = deque()
        self._newest = 0
        #: Held while a part of an epoch is drawn: it begins none that was not asked for.
        self._epoch = threading.Lock()
        self._counting = threading.Lock()
        self._fields = wire.fields_of(self._schema)
        self._fields_epoch = store.core.fields_epoch
        #: Of batches, by their fields and entries.
        self._columns: dict[tuple[object, ...], list[wire.Column]] = {}
        #: What moves the rows to other stores; None: they stay. And until when no rows are taken, by the clock.
        self.draining: Forwarding | None = None
        self.drained_until = 0.0
        self.copies = Copies(rb, self._folder, self._state)
        #: Of the store, for its clients.
        self.name = self.copies.name

    # ---- actions -------------------------------------------------------------------------------------------------------

    def do(self, command: msgspec.Struct, data: bytes = b"") -> object:
        """One of :data:`protocol.ACTIONS`: what is answered, as JSON will say it. Raises what it raises."""
        wiring = self._wiring
        match command:
            case protocol.Describe():
                return self._describe(command)
            case protocol.Health():
                return {"store": self.name, **self.copies.gauges()}
            case protocol.Stats():
                return self._state()
            case protocol.Gauges():
                own = self.copies.gauges() | {"server_streams": self.open_streams}
                return gauges(wiring.storage, wiring.source) | own
            case protocol.CanSample():
                return wiring.can_sample(command.rows)
            case protocol.CanRemove():
                wiring.check_editable("remove")
            case protocol.Empty():
                self._rb.empty(empty_write_count=not command.keep_write_count)
            case protocol.EndTrajectory():
                self.check_stays("end_trajectory")
                roles = {field_paths.public(path): role for path, role in command.roles} or None
                return self._rb.end_trajectory(command.lanes, terminated=command.terminated, roles=roles).tolist()
            case protocol.Limit():
                self._limit(command)
            case protocol.Version():
                return self._version(command)
            case protocol.Call():
                return self._calls.do(command, data)
        return {}

    @property
    def is_drained(self) -> bool:
        """Whether it takes no rows, as they are moved to other stores."""
        return time.monotonic() < self.drained_until

    def check_stays(self, call: str) -> None:
        """Raise ``TakesNone``: the store is drained."""
        if self.is_drained:
            raise protocol.TakesNone(
                f"{call}: expected a store that stays, got one that is drained. Connect to the others, and begin a new episode there."
            )

    def _describe(self, command: protocol.Describe) -> protocol.Served:
        check_protocol(command)
        self.copies.check_newest(command.store, command.generation)
        self.look_for_fields()
        recipe = json.loads((self._folder / layout.FOLDER / layout.BUFFER).read_bytes())
        served = served_by(self._rb, self.name, encode(self._schema).decode(), recipe, why_alone(self._rb))
        of = {"limited": self.limits_number() < 0, "participant": self._number_of_client(), "drained": self.is_drained}
        note = self.copies.note
        return msgspec.structs.replace(served, generation=note.generation, lost=note.lost, other=note.other, **of)

    def limits_number(self) -> int:
        """As :class:`protocol.Written` has it."""
        core = self._store.core
        number: int = core.fleet_limit[0]
        return number or (-1 if any(core.limit) else 0)

    def look_for_fields(self) -> int:
        """Take over the fields that any process has added since: how many there are."""
        if (epoch := self._store.core.fields_epoch) != self._fields_epoch:
            adopt_fields(self._store)
            self._schema, self._fields_epoch = self._store.schema, epoch
            self._fields = wire.fields_of(self._schema)
        return len(self._fields)

    def written(self, columns: int) -> list[wire.Column]:
        """What so many columns of rows on their way in are: fields that were added may be left out."""
        fields = columns - (self._schema.lanes > 1)
        known = fields if self._schema.first_fields <= fields <= len(self._fields) else len(self._fields)
        return wire.written_columns(self._schema.until(known))

    def _number_of_client(self) -> int:
        """Another one for each client that connects while others are there; 0 for the only one."""
        with self._counting:
            now = time.monotonic()
            while self._awaited and self._awaited[0] < now - _CONNECTING_S:
                self._awaited.popleft()
            self._newest = self._newest + 1 if self._awaited or self.streams else 0
            self._awaited.append(now)
            return self._newest

    def count_stream(self, stream: protocol.Stream, change: int) -> None:
        """A client has begun a stream, or ended it."""
        with self._counting:
            self.writers += change * (stream == "write")
            self.streams += change * (stream == "learn")
            if stream == "learn" and change > 0 and self._awaited:
                self._awaited.popleft()

    def _state(self) -> protocol.State:
        storage, core = self._wiring.storage, self._store.core
        limits = core.limit, core.limit_counts()
        counts = len(storage), self._rb.write_count, storage.counters()
        fields, mass = self.look_for_fields(), self._mass()
        return protocol.State(*counts, *limits, mass, self.writers, core.fleet_limit, fields, self.is_drained)

    def _mass(self) -> protocol.Mass | None:
        """Of the next draw."""
        wiring = self._wiring
        try:
            masses = wiring.source.masses(wiring.storage)
        except (NoSampleable, RuntimeError):
            return None
        key, left = wiring.source.epoch(wiring.storage)
        return None if masses is None else self._with_weights(masses, key, left)

    def _with_weights(self, masses: Masses, epoch: int, left: int) -> protocol.Mass:
        """Masses, and how weights of rows follow from them."""
        if not self._wiring.of_sampler.prioritized:
            return protocol.Mass(*masses, 0.0, epoch, left > 0)
        by = cast("PrioritizedSampler", drawing_by(self._wiring.sampler))
        return protocol.Mass(*masses, float(by.beta), epoch, left > 0, is_over_batch(by))

    def _limit(self, command: protocol.Limit) -> None:
        wiring = self._wiring
        rules = Rules(command.ratio, command.tolerance, command.min_size, command.in_flight)
        unconsumed = wiring.source.drawable(wiring.storage) if rules.in_flight else 0
        self._store.core.set_fleet_limit(*rules, unconsumed, command.fleet, command.stores, command.level)

    def _version(self, command: protocol.Version) -> int:
        sampler = self._rb.sampler
        undated = isinstance(sampler, RuledSampler) and sampler.max_staleness < 0
        if undated or not isinstance(sampler, VersionedSampler):
            raise TypeError(
                "consumer_version: expected a store that a StalenessAwareSampler draws from, or a PromptGroupSampler or a "
                f"FilteredSampler with max_staleness, got {sampler!r}."
            )
        if command.at_least is not None:
            sampler.consumer_version = command.at_least
        return sampler.consumer_version

    def dump_files(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The files of a dump as record batches of name and data. Raises as :meth:`Dumps.files`, when the first one is asked for."""
        return self._dumps.files(lambda path: self._rb.dumps(path, prefetch="drop"), schema)

    # ---- streams -------------------------------------------------------------------------------------------------------

    def answering(self, command: protocol.Sample) -> AbstractContextManager[None]:
        """Hold the memory that the batches of a command take, while they are drawn and sent.

        Raises ``ValueError``: too many, or too large ones. ``RuntimeError``: clients have not read what they asked for before.
        """
        each, most = _sizes(command), max(command.rows, *command.parts, 0)
        nbytes = protocol.held_bytes(most, self._drawn_bytes) * len(command.keys)
        if command.max_tokens:  # rows of so many items, as many as fit into a message whatever their lengths
            each, most = [int(command.rows >= 0)], self._rows_within(command)
            items = sum(it.item_bytes for it in self._schema.ragged.values())
            nbytes = protocol.held_bytes(most, self._schema.row_bytes) + command.max_tokens * items
            nbytes = min(nbytes, protocol.MAX_MESSAGE)
        together = most * self._stored_bytes * len(command.keys)
        batches = protocol.MAX_BATCHES if together <= protocol.COALESCED_BYTES else 1
        if (
            min(each, default=0) < 1
            or len(each) != len(command.keys)
            or not 1 <= len(command.keys) <= batches
            or nbytes > protocol.MAX_MESSAGE
        ):
            raise ValueError(
                f"sample: expected 1 to {protocol.MAX_BATCHES} batches of at most {protocol.COALESCED_BYTES} bytes together, or one of "
                f"at most {protocol.MAX_MESSAGE}, got {len(command.keys)} of {most} rows, {nbytes} bytes with their numbers."
            )
        return self._answers.counted(nbytes)

    def sample(self, command: protocol.Sample, fields: int | None = None) -> Batches:
        """Draw batches, :meth:`answering` the command. Fewer come where an epoch ends, or where there is nothing more to draw.

        Args:
            command: of the client.
            fields: how many its stream has; None: all.

        Raises ``RateLimited``: the limits of the store do not admit the first one now: clients wait. What drawing the first one raises.
        """
        parts, reading = command.parts, self._reading
        each = [self._rows_within(command)] if command.max_tokens else _sizes(command)
        if command.max_tokens:
            reading = cast(
                "ReadPath", ragged_batches.BatchForm.of_command(command).of(reading, self._wiring, ahead=False)
            )
        batches, last, masses = [], False, []
        for key, rows in zip(command.keys, each, strict=True):
            try:
                with self._wiring.gate.admitted(self._store, rows, uses_up=self._wiring.of_sampler.consumes):
                    if parts:
                        batch, mass = self._part(key, rows, command, reading)
                        masses.append(mass)
                    else:
                        batch = self._drawn(key, rows, reading)
                    batches.append(batch)
            except (NoSampleable, native.NotAdmitted):
                if not batches:
                    raise
                break
            last = self._wiring.epoch_ended()
            if last and not parts:
                break
        fields, entries = len(self._fields) if fields is None else fields, batches[0].entries
        # One that any process adds meanwhile is for later streams.
        drawn = [[*it.tensors[:fields], *it.tensors[-1 - len(entries) :]] for it in batches]
        tensors = drawn[0] if len(drawn) == 1 else [joined(same) for same in zip(*drawn, strict=True)]
        items = sum(it.nbytes for column in tensors if (it := items_in(column)) is not None)
        if items > protocol.MAX_MESSAGE:  # of rows that are far longer than others
            raise ValueError(
                f"sample: expected batches of at most {protocol.MAX_MESSAGE} bytes over a connection, got {items} bytes of items. Draw "
                "fewer rows."
            )
        sizes = [list(batch.shape) for batch in batches]
        metadata = protocol.Sampled(sizes, last, masses, self.limits_number() if parts else 0)
        return Batches(metadata, self._columns_of(entries, fields, tensors), tensors)

    def _rows_within(self, command: protocol.Sample) -> int:
        """How many rows a batch by tokens may have: at most as many as fit into a message if each is as long as it may be."""
        fit = protocol.MAX_MESSAGE // (most_row_bytes(self._schema) + protocol.BESIDE_ROW)
        return max(1, min(command.rows or command.max_tokens, fit))

    def _part(self, key: int, rows: int, command: protocol.Sample, reading: ReadPath) -> tuple[_Drawn, protocol.Mass]:
        """As :meth:`_drawn`, with what was true of the store. Raises ``NoSampleable``: the epoch is over, or no window begins there."""
        wiring = self._wiring
        source, storage = wiring.source, wiring.storage
        with self._epoch if wiring.of_sampler.has_epochs else contextlib.nullcontext():
            newest, left = source.epoch(storage)
            if command.epoch not in (0, newest) or not (left or (command.epoch, command.ended) == (0, newest)):
                raise NoSampleable("sample: the epoch is over.")
            with DrawingPart() as part:
                batch = self._drawn(key, rows, reading)
            newest, left = source.epoch(storage)
        found = part.masses if part.masses.live else source.masses(storage)
        assert found is not None  # the server says so when it is asked what it is
        return batch, self._with_weights(found, newest, left)

    def _drawn(self, key: int, rows: int, reading: ReadPath) -> _Drawn:
        self._key.set(key & (1 << 64) - 1)
        columns, index, info = reading.read(self._key, rows, "beside")
        assert index is not None  # beside
        if self._wiring.of_sampler.draws_windows and ("next", "truncated") not in info:  # which clients know
            ends = window_marks.WindowMarks(self._wiring, info, index.shape, ()).ends
            info |= {} if ends is None else {field_paths.WINDOW_ENDS: ends.unsqueeze(-1)}
        entries = {name: value for name, value in info.items() if isinstance(value, torch.Tensor)}
        shape, tensors = index.shape, [*columns, index, *entries.values()]
        if len(shape) > 1:
            tensors = [tensor.reshape(index.numel(), *tensor.shape[len(shape) :]) for tensor in tensors]
        return _Drawn(shape, tuple(entries), tensors)

    def _columns_of(self, entries: tuple[Entry, ...], fields: int, tensors: Sequence[Tensor]) -> list[wire.Column]:
        """What the columns of a batch are, which its fields and entries decide."""
        known = self._columns.get((fields, entries))
        if known is None:
            # Not as they are stored: stacks of frames are wider.
            names = [it.name for it in self._fields[:fields]] + [wire.ROW_NUMBER, *map(wire.entry_name, entries)]
            known = [wire.column_of(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
            self._columns[fields, entries] = known
        return known

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor) -> None:
        """New priorities; a ticket of -1 is any."""
        known, leaves = tickets >= 0, self.draining
        with contextlib.nullcontext(rows) if leaves is None else leaves.forwarding(rows, priorities, tickets) as here:
            for mask in (known, ~known) if bool(known.any()) and not bool(known.all()) else (slice(None),):
                generation = tickets[mask] if bool(known[mask].all()) else None
                index = self._wiring.user_index(here[mask])
                if index.ndim > 1:
                    index = index.where(here[mask].unsqueeze(-1) >= 0, -1)
                self._rb.update_priority(index, priorities[mask], generation=generation)

    def tickets(self, rows: Tensor) -> Tensor:
        """Which writes rows hold: -1 for none, or one that is under way. Raises ``RowError``: a row outside the store."""
        storage = self._wiring.storage
        storage.check_removal(rows)
        named = rows.clamp(min=0)
        held: Tensor = storage.writes_of(named, storage.tickets_of(named))
        return held.where(rows >= 0, -1)

    def remove(self, rows: Tensor, tickets: Tensor) -> int:
        """Remove rows that hold these writes: how many. Raises as ``ReplayBuffer.remove``."""
        self._wiring.check_editable("remove")
        storage = self._wiring.storage
        storage.check_removal(rows)
        return cast("int", storage.remove(rows.contiguous(), tickets.contiguous()))

    def take(self, command: protocol.Move, columns: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
        """Write rows of another store, with their priorities: what :class:`protocol.Move` has.

        Behind each request comes an empty one, which says that all of it was written: rows that are not there since then were removed.
        An empty one is the first, too, so that a writer who asks for more than that, and is not known, was forgotten.

        Raises as :meth:`append`. ``TakesNone``: they would replace rows, and may not, or are more than a lane has.
        """
        *columns, priorities = columns
        storage, requests, writer, number = self._wiring.storage, self._requests, command.writer, command.number
        n, lane = len(priorities), columns.pop() if storage.lanes > 1 else None
        with exclusive(self._folder):  # one after the other, whichever server they come to
            following = requests.next_request(writer)
            if following < number:
                raise protocol.NotOnce(
                    "drain: expected a writer that the other store knows, got one that it has forgotten: whether its last rows came is "
                    "unknown. Compare the stores. Then remove the file .engram/draining of the one that is drained, and drain again."
                )
            rows, new = torch.empty(0, dtype=torch.int64, device="cpu"), following == number
            if new:
                one = 0 if lane is None or not n else int(lane[0])
                self._check_room(one, columns, n, evict=command.evict)
                rows = self._request(writer, number, one, columns, n)
                if self._wiring.of_sampler.prioritized:
                    self.prioritize(rows, priorities, self.tickets(rows))
            elif following == number + 1:  # a server died in the midst of it
                storage.remove(self._rows_of(writer, number), None)
            else:
                rows = self._rows_of(writer, number)
            if new or following == 1:
                following = number + 2
                self._request(writer, number + 1, 0, [column[:0] for column in columns], 0)
            return following, [rows, self.tickets(rows)]

    def _rows_of(self, writer: UUID, number: int) -> Tensor:
        """The rows of a request; -1 for those that do not hold what it wrote."""
        lane, first, n = self._requests.place_of(writer, number)
        positions = torch.arange(first, first + n, device="cpu")
        rows = lane * self._store.lane_length + positions % self._store.lane_length
        return rows.where(self._wiring.storage.positions_of(rows) == positions, -1)

    def _check_room(self, lane: int, columns: Sequence[Tensor], n: int, *, evict: bool) -> None:
        """Raise ``TakesNone``: a lane does not take so many rows of another store. ``NotOnce``: the writer says where rows go."""
        if n:  # else the writer only asks what became of its rows
            self.check_stays("extend")
        self._check_groups(columns)
        if not self._wiring.appends_natively:
            raise protocol.NotOnce("expected a writer that appends rows.")
        storage, length = self._wiring.storage, self._store.lane_length
        ahead = (storage.extent().seam[lane] + torch.arange(n, device="cpu")) % length + lane * length
        if n > length or (not evict and bool((storage.tickets_of(ahead) >= 0).any())):
            raise protocol.TakesNone(f"lane {lane} has no room for {n} rows.")
        try:
            check_room(self._schema.ragged_groups, columns, lane, length)
        except ValueError as error:
            raise protocol.TakesNone(str(error)) from error

    def append(self, command: protocol.Append, columns: Sequence[Tensor], n: int) -> Tensor:
        """Write rows: their numbers.

        Raises as ``ReplayBuffer.extend``; ``RateLimited`` at once: clients wait. ``NotOnce``: the rows of a message that may be sent
        again would have to go somewhere else than behind the last ones, or the writer is not known.
        """
        wiring = self._wiring
        storage = wiring.storage
        lane = columns[-1] if storage.lanes > 1 else 0
        columns = columns[:-1] if storage.lanes > 1 else columns
        self._check_groups(columns)
        once = command.writer
        if self.is_drained and (once is None or self._requests.next_request(once) <= command.number):
            self.check_stays("extend")
        if once is not None:
            return self._append_once(command, columns, lane, n)
        if not wiring.appends_natively:
            return self._rb.extend(storage.batch(columns, (n,)), lane=lane, timeout=0)

        write = storage.write(WritePlan(lane=lane), list(columns), n)
        storage.notify(write, None)
        return cast("Tensor", write.rows)

    def _check_groups(self, columns: Sequence[Tensor]) -> None:
        """Raise ``ValueError``: a row has not the same number of items in fields that share lengths, or too many."""
        for group in self._schema.ragged_groups:
            each = [cast("Items", columns[number]).lengths for number in group.members]
            most = self._schema.ragged[group.leader].max_length
            for number, lengths in zip(group.members, each, strict=True):
                if not torch.equal(lengths, each[0]) or int(lengths.amax() if len(lengths) else 0) > most:
                    raise ValueError(
                        f"extend: field {self._schema.fields[number].name}: expected rows of at most {most} items, as many as field "
                        f"{self._schema.fields[group.leader].name} has, got {lengths.tolist()!s:.80}."
                    )

    def _append_once(self, command: protocol.Append, columns: Sequence[Tensor], lane: Tensor | int, n: int) -> Tensor:
        """Write rows as requests of a writer: one for each lane."""
        if not self._wiring.appends_natively:
            raise protocol.NotOnce("extend: the writer of the store says which rows are replaced.")
        lanes = sorted(set(lane.tolist())) if isinstance(lane, torch.Tensor) else [lane]
        if not lanes or not 0 <= lanes[0] <= lanes[-1] < self._schema.lanes:  # before a row is written
            raise RowError(f"extend: expected rows, and lanes in [0, {self._schema.lanes}), got lanes {lanes!r:.80}.")
        names = command.names()
        if len(names) != -(-len(lanes) // IN_DOUBT):
            raise ValueError(f"extend: expected a number for each {IN_DOUBT} lanes, got {len(names)} for {len(lanes)}.")
        if len(lanes) == 1:
            return self._request(*names[0], lanes[0], columns, n)
        assert isinstance(lane, torch.Tensor)  # several
        following = [self._requests.next_request(writer) for writer, _ in names]
        if any(number > expected for (_, number), expected in zip(names, following, strict=True)):
            raise protocol.NotOnce("extend: the writer is not known.")
        core, rows = self._store.core, torch.empty(n, dtype=torch.int64, device="cpu")
        if following[0] == command.number:
            core.prepay_inserts(n)  # all or none of them; a message that is sent again was admitted
        try:
            for done, one in enumerate(lanes):
                writer, number = names[done // IN_DOUBT]
                chosen = torch.nonzero(lane == one).flatten()
                part = [column[chosen] for column in columns]
                rows[chosen] = self._request(writer, number + done % IN_DOUBT, one, part, len(chosen))
        finally:
            core.return_prepaid()
        return rows

    def _request(self, writer: UUID, number: int, lane: int, columns: Sequence[Tensor], n: int) -> Tensor:
        try:
            return self._requests.append_by(writer, number, lane, columns, n).rows
        except OutOfOrder as error:
            raise protocol.NotOnce(str(error)) from error


def check_protocol(command: protocol.Describe) -> None:
    """Raise ``IncompatibleStore``: the client speaks another one."""
    if command.protocol != protocol.PROTOCOL:
        raise IncompatibleStore(
            f"connect: expected protocol {protocol.PROTOCOL}, of engram {version.__version__} on the server, got {command.protocol}, "
            f"of engram {command.engram:.40}. Use the same version on both sides."
        )


def _unit_of(rb: ReplayBuffer) -> SampleUnit | None:
    wiring: Wiring = vars(rb)["_wiring"]
    return wiring.unit


def why_alone(rb: ReplayBuffer) -> str:
    """Why batches cannot have rows of other stores, too; empty: they can."""
    sampler, storage = samplers.declared(rb.sampler), rb.storage
    if writers.declared(rb.writer).traits.rejects:
        return f"{rb.writer!r} keeps the best rows of one store"
    if storage.ndim > 1:
        return f"rows with ndim={storage.ndim} are numbered within one store"
    if (unit := _unit_of(rb)) is not None and unit.total != 1:
        return f"{unit!r} reads windows around rows of one store"
    if sampler.drop_last:
        return "drop_last counts the rows of one store"
    if not sampler.rows_together()[0]:
        return f"{rb.sampler!r} draws windows of different lengths"
    try:
        return f"{rb.sampler!r} draws from one store" if sampler.masses(storage) is None else ""
    except NoSampleable:
        return ""


def served_by(
    rb: ReplayBuffer, store: str = "", schema: str = "", recipe: dict[str, object] | None = None, alone: str = ""
) -> protocol.Served:
    """What a server says of a buffer; of one without a store, what it can say."""
    sampler, writer = samplers.declared(rb.sampler), writers.declared(rb.writer)
    return protocol.Served(
        protocol.PROTOCOL,
        version.__version__,
        store,
        schema,
        recipe or {},
        repr(rb.sampler),
        repr(rb.writer),
        [name for name, holds in sampler.traits._asdict().items() if holds],
        [name for name, holds in writer.traits._asdict().items() if holds],
        [([key] if isinstance(key, str) else list(key), flat) for key, flat in sampler.computed_keys.items()],
        rb.storage.requested_size,
        sampler.rows_together(),
        sampler.draws_of_a_row,
        alone,
        compressions=wire.COMPRESSIONS,
        level=protocol.LEVEL,
    )


def _sizes(command: protocol.Sample) -> list[int]:
    """Rows of each batch."""
    return command.parts or [command.rows] * len(command.keys)


def drawn_bytes(sampler: object, memory: Store, *, consumes: bool = False) -> int:
    """Bytes of a row of batches; of one that is used up by its draw, which must fit, as many as it may have."""
    if not isinstance(sampler, Expander):
        return most_row_bytes(memory.schema) if consumes else usual_row_bytes(memory.schema)
    try:
        sampler.expansion_of(memory)  # clients are told what batches have besides fields
        return max(memory.schema.row_bytes, sampler.ready_bytes(memory.schema.fields))
    except (KeyError, RuntimeError, TypeError, ValueError):  # drawing raises it, too
        return memory.schema.row_bytes
