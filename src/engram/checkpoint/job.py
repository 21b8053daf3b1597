"""What all saves and restores of one Checkpointer share."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from engram._progress import Work
from engram._words import warn
from engram.checkpoint.commit_protocol import Attempts
from engram.checkpoint.options import Heard
from engram.format import disk, series
from engram.format.checkpoints import rank_folder
from engram.persist import parts
from engram.persist.roles import doubts
from engram.persist.snapshot import RowsSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from engram._progress import OnProgress
    from engram.checkpoint.options import Options
    from engram.checkpoint.save import SaveHandle
    from engram.format.parts import PartField, PartInfo, PartReader
    from engram.persist.parts import Snapshot
    from engram.persist.rows import SavedRows
    from engram.ranks import Ranks
    from engram.types import Checkpointable


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
                folder / parts.STORAGE,
                roles=options.roles,
                parent=reader,
                paranoid=options.paranoid,
                progress=work,
            )
            return rows, [rows.info, *parts.write_parts(folder, snapshot.parts)]

    def write_crash(self, attempt: Path) -> None:
        """Write the shard of this rank. If that fails, it is missing: there is no vote against what others can save."""
        snapshot = self.snapshot()
        self.write_shard(attempt, self.heard.step, snapshot, self.parent_of(snapshot))


#: How many requests are remembered, for those who ask what became of theirs.
_REMEMBERED = 64


class Request:
    """A wish, and what became of it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.save: SaveHandle | None = None
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

    def serve(self, save: SaveHandle) -> None:
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
