"""The checkpoints of a served store that a follower fetches again and again, each with the files that it lacks."""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa

from engram._support import words
from engram.checkpoint.ranks import Ranks
from engram.checkpoint.reports import Options, SaveRequest
from engram.checkpoint.save import Job, SaveAttempt
from engram.remote import protocol
from engram.saved import attempts, disk
from engram.serving import notes
from engram.serving.service import Service, parts_of
from engram.store.requests import NAME, Requests, WritersIndex
from engram.store.store import Store

#: Between two checkpoints at least, unless a write waits for one; and between two answers to a follower at most.
_INTERVAL_S, _IDLE_S = 0.25, 0.5
#: How often is looked at whether something changed.
_LOOK_S = 0.02
#: For how long a follower may end its last request, and a write wait for a follower before there is a warning.
_TURN_S, _WARNED_S = 5.0, 10.0


def series_of(directory: Path) -> Path:
    """Where the checkpoints of a store lie of which copies are made, and those that are copies: a folder beside its own."""
    return directory.with_name(f"{directory.name}-copy")


class State(msgspec.Struct, frozen=True):
    """What a checkpoint has of a store beside its rows and components: in ``user`` of its description."""

    #: Rows that were ever written.
    writes: int
    #: Of each lane, the position at which it began again when the store was emptied last.
    bases: list[int]
    #: As ``Rules``.
    limit: tuple[float, float, int, int]
    #: The table of writers, which says whose requests these rows are: compressed, as base64.
    writers: str


class Ticks:
    """Makes checkpoints of a store for one follower.

    Args:
        service: of the store.
        sync: a write is acknowledged when the follower has its rows.
    """

    def __init__(self, service: Service, *, sync: bool) -> None:
        store = service.buffer.storage.memory
        assert store is not None  # it is served
        assert store.directory is not None
        self._service, self._store, self._folder = service, store, Path(store.directory)
        Requests(store).next_request(uuid4())  # makes the table, before there are rows of it
        root = series_of(self._folder)
        disk.make_folders(str(root))
        options = Options(None, None, 1, "raise", "drop", None, 600.0)
        self._job = Job(root, service.buffer, Ranks.local(), options, doubtful=False)
        self._sync = sync
        #: Held while a follower is answered.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        #: Checkpoints whose snapshots were taken, and those of them that the follower has; and writes that wait.
        self._begun = self._arrived = self._waiting = 0
        #: What was sent last: its name and number, its files, what the store was then, and when.
        self._name, self._number, self._files = "", 0, dict[str, tuple[int, int]]()
        self._was: object = None
        self._at = 0.0
        #: Whether the follower takes over.
        self.hands_over = False

    def await_copy(self) -> bool:
        """Wait until the follower has what was written before, if writes are to. False: it takes over instead."""
        if not self._sync:
            return True
        with self._changed:
            wanted = self._begun + 1
            self._waiting += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._arrived >= wanted or self.hands_over, _WARNED_S):
                    words.warn(
                        "serve: --sync-follower: a write waits for a follower. Start one: engram serve DIRECTORY --follow ADDRESS."
                    )
                    self._changed.wait_for(lambda: self._arrived >= wanted or self.hands_over)
            finally:
                self._waiting -= 1
            return self._arrived >= wanted

    def hand_over(self, *, begins: bool) -> None:
        """From now on no write is acknowledged that waits; or the follower goes on as before."""
        with self._changed:
            self.hands_over = begins
            self._changed.notify_all()

    def files(self, command: protocol.Tick, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The files that the follower lacks as record batches of name and data, which is null of a file that it has; and :class:`Ticked`.

        Raises ``RuntimeError``: another follower is answered. What saving raises.
        """
        if not self._turn.acquire(timeout=_TURN_S):
            raise RuntimeError(
                f"follow: expected one follower, but that at {self._service.note.follower} is answered now."
            )
        try:
            self._hear(command)
            if self._is_due(command):
                yield from self._saved(command.have, schema)
            writes = self._store.core.write_count
            ticked = protocol.Ticked(self._name, writes, time.monotonic() - self._at)
            yield pa.record_batch([[""], [msgspec.json.encode(ticked)]], schema=schema)
        finally:
            self._turn.release()

    def _hear(self, command: protocol.Tick) -> None:
        """What the follower has, and where it is."""
        with self._changed:
            if command.have and command.have == self._name:
                self._arrived = self._number
            self._changed.notify_all()
        if command.address != self._service.note.follower:
            self._service.note = notes.change(self._folder, follower=command.address)

    def _is_due(self, command: protocol.Tick) -> bool:
        """Wait until a checkpoint is to be made, or for a while. Whether one is."""
        begun = time.monotonic()
        while True:
            with self._changed:
                if command.last or command.have != self._name or not self._name or self._waiting:
                    return True
                now, was = time.monotonic(), self._at
                if now - was >= _INTERVAL_S and self._looks() != self._was:
                    return True
                if now - begun >= _IDLE_S:
                    self._at = now  # nothing has changed since
                    return False
                self._changed.wait(_LOOK_S)

    def _looks(self) -> object:
        """What is another one after each change of the store."""
        return self._store.core.next_ticket, self._service.do(protocol.Stats())

    def _saved(self, have: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        known = self._files if have == self._name else {}
        path, number, was, at = self._save()
        files = {}
        for file in sorted(path.rglob("*")):
            if file.is_file():
                name, status = str(file.relative_to(path)), file.stat()
                files[name] = status.st_ino, status.st_mtime_ns
                linked = known.get(name) == files[name]
                for part in (None,) if linked else parts_of(file):
                    yield pa.record_batch([[name], [part]], schema=schema)
        self._name, self._number, self._files, self._was, self._at = path.name, number, files, was, at

    def _save(self) -> tuple[Path, int, object, float]:
        """A checkpoint: its folder and number, and what the store was, and when."""
        job, storage = self._job, self._service.buffer.storage
        newest = next(iter(attempts.names(job.root)), None)
        step = max(time.time_ns() // 1_000_000, 0 if newest is None else newest.step + 1)
        was = self._looks()
        with storage.paused:  # no write is under way
            with self._changed:
                self._begun += 1
                number = self._begun
            at, state = time.monotonic(), self._state(self._store)
            noted = msgspec.json.decode(msgspec.json.encode(state))  # as it comes back
            attempt = SaveAttempt(job, SaveRequest(step, noted), number)
            attempt.prepare()
        attempt.run()
        return attempt.wait().path, number, was, at

    @staticmethod
    def _state(store: Store) -> State:
        core, positions = store.core, store.lane_states()[:, 0].tolist()
        bases = [core.next_position(lane) - position for lane, position in enumerate(positions)]
        table = store.indexes[NAME, WritersIndex.kind].block.tensor.numpy().tobytes()
        return State(core.write_count, bases, core.limit, base64.b64encode(zlib.compress(table, 1)).decode())
