"""What all saves and restores of one Checkpointer share."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engram._support.progress import Work
from engram._support.words import warn
from engram.checkpoint.ranks import looks
from engram.checkpoint.reports import Heard
from engram.errors import RankFailed
from engram.format import disk, series
from engram.format.checkpoints import rank_folder
from engram.persist import parts
from engram.persist.roles import doubts
from engram.persist.snapshot import RowsSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from engram._support.progress import OnProgress
    from engram.checkpoint.checkpointable import Checkpointable
    from engram.checkpoint.ranks import Ranks
    from engram.checkpoint.reports import Options
    from engram.format.checkpoints import Manifest
    from engram.format.parts import PartField, PartInfo, PartReader
    from engram.persist.parts import Snapshot
    from engram.persist.rows import SavedRows


#: Seconds after which a rank tries to decide without rank 0, which may be dead, or without all votes, of which one may be against.
_TRY_S = 2.0
#: Seconds that they leave rank 0 at the deadline, to give up for all.
_GRACE_S = 2.0


class Attempts:
    """One series of checkpoints of one job.

    Args:
        root: of the series; the same folder for all ranks.
        ranks: of the job. Each makes this in the same order, if there are several.
        known: what this process knows of the series.
    """

    def __init__(self, root: Path, ranks: Ranks, known: series.Known) -> None:
        self.root, self.ranks, self.known = root, ranks, known
        self.section = ranks.section()
        """Before all of its keys in the store."""
        self._epoch: int | None = None
        self._told: list[str] = []
        self._began = 0.0

    @property
    def epoch(self) -> int:
        """Of this incarnation of the job. Rank 0's first call claims it, and commits what an earlier one left undecided.

        Raises:
            RankFailed: rank 0 has not said it. OSError: the folder cannot be used.
        """
        if self._epoch is None:
            if self.ranks.rank:
                raise RankFailed("rank 0 has not begun anything here yet.")
            self._epoch = series.claim_epoch(self.root)
            series.recover(self.root, self._epoch)
        return self._epoch

    def claim(self, timeout: float) -> int:
        """The same on all ranks, which must all call this. Raises :class:`RankFailed`: some did not."""
        _, given = self.ranks.run_on_all("epoch", self._own_epoch, timeout)
        self._epoch = int(given[0])
        return self._epoch

    def _own_epoch(self) -> tuple[None, bytes]:
        return None, str(self.epoch).encode() if self.ranks.rank == 0 else b""

    def begin(self, number: int, begun: Callable[[], Path], timeout: float) -> Path:
        """The folder of the attempt of that number, which rank 0 begins; others hear of it, or of its error.

        Raises:
            RankFailed: rank 0 could not begin it, or did not in time; or this folder is not visible here. Where there is no other
                rank, whatever ``begun`` raised.
        """
        key = f"{self.section}attempt/{number}"
        if self.ranks.rank:
            return self._joined(key, timeout)
        self._began = time.monotonic()
        self._told += [key, _joined_of(key)]
        try:
            folder = begun()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.ranks.set(key, json.dumps({"error": text}).encode())
            self.joined(number, timeout)
            if self.ranks.world == 1 or not isinstance(error, Exception):
                raise
            raise RankFailed(f"save: rank 0: {text}") from error
        self.ranks.set(key, json.dumps({"name": folder.name, "epoch": self.epoch}).encode())
        return folder

    def joined(self, number: int, timeout: float) -> None:
        """Return on rank 0 when all others have heard of the attempt of that number, at the latest ``timeout`` seconds after it
        began.

        The vote of a rank says that, too. So this is for an attempt that ends without all votes.
        """
        if self.ranks.rank == 0:
            left = self._began + timeout - time.monotonic()
            self.ranks.leave(_joined_of(f"{self.section}attempt/{number}"), self.ranks.world - 1, left)

    def forget(self) -> None:
        """All ranks have voted for the last attempt: no rank reads its entries, or those of earlier ones, any more."""
        for key in self._told:
            self.ranks.forget(key)
        self._told.clear()

    def _joined(self, key: str, timeout: float) -> Path:
        started = time.monotonic()
        raw = self.ranks.wait([key], timeout)[0]
        if raw is None:
            raise RankFailed(f"save: rank 0 began no checkpoint within {timeout:g} s.")
        self.ranks.leave(_joined_of(key), 0, 0.0)
        said = json.loads(raw)
        if "error" in said:
            raise RankFailed(f"save: rank 0: {said['error']}")
        self._epoch = int(said["epoch"])
        name = series.Name.parse(said["name"])
        if name is None:
            raise RankFailed(f"save: expected the name of an attempt from rank 0, got {said['name']!r:.100}.")
        folder = self.root / str(name)
        for _ in looks(started + timeout - time.monotonic(), at_files=True):
            if os.path.lexists(folder / series.ATTEMPT):
                return folder
            disk.look_again(self.root, folder)
        raise RankFailed(
            f"save: rank {self.ranks.rank}: expected {folder}, which rank 0 made, found none in {timeout:g} s. Is it a file "
            "system that all ranks share?"
        )

    def decided(self, folder: Path, timeout: float) -> Manifest:
        """The decision on an attempt, when it is there; after ``timeout`` seconds votes that are missing are ones against.

        Raises:
            RuntimeError: a later incarnation of the job has taken over.
        """
        world, asked, when = self.ranks.world, 0.0, looks(math.inf, at_files=True)
        missing = [] if self.ranks.rank else [*range(world)]
        while (made := series.decision(folder)) is None:
            passed = next(when)
            late = passed > timeout + (_GRACE_S if self.ranks.rank else 0)
            while missing and series.has_voted(folder, missing[-1], world):
                missing.pop()
            if late or passed - asked > _TRY_S or not (missing or self.ranks.rank):
                asked = passed
                give_up = f"after {timeout:g} s" if late else None
                made = series.decide(folder, self.epoch, give_up=give_up, known=self.known)
                if made is not None:
                    break
        return made


def _joined_of(key: str) -> str:
    """The counter of ranks that have heard of an attempt."""
    return f"{key}/joined"


class Parent(NamedTuple):
    """A checkpoint whose segments can be linked, as long as the lineage of the storage is this."""

    path: Path
    lineage: object


class Job:
    """A buffer, the ranks that save it together, and what one save leaves for the next.

    Args:
        root: the folder of the series.
        buffer: of this rank.
        ranks: of the job.
        options: of the Checkpointer.
        doubtful: warn once of fields that a restore on other ranks may misunderstand.
    """

    def __init__(self, root: Path, buffer: Checkpointable, ranks: Ranks, options: Options, *, doubtful: bool) -> None:
        self.root, self.buffer, self.ranks, self.options = root, buffer, ranks, options
        self.known = series.Known()
        """What this process read and wrote of the series, so that no document is decoded twice."""
        self.protocol = Attempts(root, ranks, self.known)
        self.heard = Heard()
        self.parent: Parent | None = None
        self._since_full = 0
        self._doubtful = doubtful

    def snapshot(self) -> Snapshot:
        """What a checkpoint is of: the buffer as it is now."""
        snapshot = self.buffer.snapshot(prefetched=self.options.prefetch)
        self.tell_doubts(snapshot.rows.fields(self.options.roles), snapshot)
        return snapshot

    def tell_doubts(self, fields: Sequence[PartField], snapshot: Snapshot) -> None:
        """Warn once of what a restore on other ranks would do to rows of these fields; a rank without rows, by those of others."""
        if not fields or not self._doubtful or snapshot.form.ranking is not None or snapshot.form.ndim > 1:
            return
        self._doubtful = False
        for text in doubts(fields, self.options.roles):
            warn(f"Checkpointer: {text}.")

    # ---- the parent ------------------------------------------------------------------------------------------------------

    def parent_of(self, snapshot: Snapshot) -> Parent | None:
        """The checkpoint to link from: the last one of this very storage, if it is still there."""
        parent, every = self.parent, self.options.full_every
        due = every is not None and self._since_full + 1 >= every
        if parent is None or due or snapshot.form.lineage is None or parent.lineage != snapshot.form.lineage:
            return None
        return None if series.look(parent.path, self.known) else parent

    def saved(self, path: Path, snapshot: Snapshot, parent: Parent | None) -> None:
        """There is a new checkpoint, which had this parent."""
        if self.parent is not None and self.ranks.rank:  # rank 0 forgets what it retires
            self.known.forget(self.parent.path.name)
        self.parent = Parent(path, snapshot.form.lineage)
        rows = snapshot.rows
        if isinstance(rows, RowsSnapshot) and not rows.store.readonly:
            rows.store.core.count_save()
        self._since_full = 0 if parent is None else self._since_full + 1

    # ---- the shard of this rank ------------------------------------------------------------------------------------------

    def write_shard(
        self, attempt: Path, step: int, snapshot: Snapshot, parent: Parent | None, progress: OnProgress | None = None
    ) -> None:
        """Write it, and vote for the attempt."""
        rank = self.ranks.rank
        rows, infos = self.write_parts(attempt / rank_folder(rank, self.ranks.world), snapshot, parent, progress)
        series.accept(attempt, rank, infos, rows.shard, step=step, known=self.known)

    def write_parts(
        self, folder: Path, snapshot: Snapshot, parent: Parent | None, progress: OnProgress | None
    ) -> tuple[SavedRows, list[PartInfo]]:
        """Write its parts, but for the vote."""
        options = self.options
        with contextlib.ExitStack() as stack, disk.batched_fsync():
            reader: PartReader | None = None
            if parent is not None:
                checkpoint = stack.enter_context(self.known.open(parent.path))
                reader = stack.enter_context(checkpoint.part(self.ranks.rank, parts.STORAGE))
            # Other ranks print to the same terminal.
            work = stack.enter_context(Work("saving", snapshot.rows.nbytes, progress, quiet=self.ranks.rank > 0))
            rows = snapshot.rows.save_segments(
                folder / parts.STORAGE, roles=options.roles, parent=reader, paranoid=options.paranoid, progress=work
            )
            return rows, [rows.info, *parts.write_parts(folder, snapshot.parts)]

    def write_crash(self, attempt: Path) -> None:
        """Write the shard of this rank. If that fails, it is missing: there is no vote against what others can save."""
        snapshot = self.snapshot()
        self.write_shard(attempt, self.heard.step, snapshot, self.parent_of(snapshot))


#: How many requests are remembered, for those who ask what became of theirs.
_REMEMBERED = 64


class Handle(Protocol):
    """A save that has begun."""

    path: Path | None
    ended: float | None

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for it. Raises what it raised."""


class Request:
    """A wish, and what became of it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.save: Handle | None = None
        """The handle of the save that serves it; None: none has begun."""


class Requests:
    """Wishes of this rank that no save serves yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signalled = False
        self._open: Request | None = None
        self._known: dict[str, Request] = {}

    @property
    def any(self) -> bool:
        return self._signalled or self._open is not None

    def ask(self, *, join: bool = False) -> Request:
        """Ask for a save. From any thread, but not from a signal handler.

        Args:
            join: a save that has begun and is not over serves, too.
        """
        with self._lock:
            if self._open is not None:
                return self._open
            if join:
                for request in self._known.values():
                    if request.save is not None and not request.save.done:
                        return request
            self._open = Request()
            self._known[self._open.id] = self._open
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return self._open

    def find(self, name: str) -> Request | None:
        """The request of that id, if it is not forgotten."""
        with self._lock:
            return self._known.get(name)

    def latest(self) -> Request | None:
        """The last one that was asked for."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    def note_signal(self, *_: object) -> None:
        """As :meth:`ask`, for signal handlers: takes no lock."""
        self._signalled = True

    def serve(self, save: Handle) -> None:
        """This save serves all that was asked for. To be called before its moment, so that nothing is lost."""
        with self._lock:
            self._signalled = False
            if self._open is not None:
                self._open.save, self._open = save, None

    @contextlib.contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Inside, a signal requests a save. A handler that was set before is still called.

        Raises:
            ValueError: not called from the main thread.
        """

        def handle(received: int, frame: FrameType | None) -> None:
            self.note_signal()
            if callable(before):
                before(received, frame)

        before = signal.getsignal(number)
        signal.signal(number, handle)
        try:
            yield
        finally:
            signal.signal(number, before if before is not None else signal.SIG_DFL)


class Schedule:
    """When this rank wants a save, and when all agree to one.

    Args:
        ranks: of the job.
        options: of the Checkpointer.
    """

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self._ranks, self._options = ranks, options
        self.requests = Requests()
        self.stride = 1
        """Steps from one poll to the next, as far as is known."""
        self._polls = 0
        self._due = False
        self._began = time.monotonic()

    def began(self) -> None:
        """A save has begun, or a restore has ended."""
        self._began = time.monotonic()

    def advanced(self, steps: int) -> None:
        """So many steps passed since the last poll."""
        self.stride = max(1, steps)

    def agreed(self, before: int, step: int, *, able: bool) -> bool:
        """Whether all ranks begin a save now: one of them wants to, and each is able to.

        A rank that still writes the last save is not: training does not wait for that.

        Args:
            before: the step of the last poll.
            step: this one.
            able: whether this rank is.
        """
        options = self._options
        if options.every_steps is not None:
            self._due |= step // options.every_steps > before // options.every_steps
        self._polls += 1
        if not self._due and self._polls % options.poll_every:
            return False
        wish = int(self._due or self.requests.any or self._overdue()) if able else 2
        if self._ranks.max(wish, options.timeout) != 1:
            return False
        self._due = False
        return True

    def _overdue(self) -> bool:
        """Whether the clock asks for a save: that of rank 0, as others go otherwise."""
        every = None if self._ranks.rank else self._options.every_minutes
        return every is not None and time.monotonic() - self._began >= 60 * every
