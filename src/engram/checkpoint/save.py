"""One save, from its snapshot to its commit, and what all saves and restores of a Checkpointer share."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from engram._support.progress import OnProgress, Work
from engram._support.words import count, warn
from engram.checkpoint.ranks import Ranks, looks
from engram.checkpoint.reports import LatestStep, SaveReport, SaveRequest, episodes_of, forget_reports
from engram.errors import CorruptCheckpoint, RankFailed
from engram.reshard.plan import has_ends, saved_fields
from engram.saved import attempts, disk, documents, part_reader, part_writer, parts
from engram.saved.documents import Manifest, Shard, added, rank_folder
from engram.saved.rows import doubts
from engram.saved.series import Series
from engram.saved.snapshot import RowsSnapshot, SavedRows, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized
    from pathlib import Path

    from engram.checkpoint.reports import Options, RestoreOptions, RestoreReport, Wanted
    from engram.format.schema import PartField
    from engram.reshard.driver import Reshard
    from engram.saved.checkpoints import Checkpoint
    from engram.types import BufferLoad, Form

#: Seconds after which a rank tries to decide without rank 0, which may be dead, or without all votes, of which one may be against.
_TRY_S = 2.0
#: Seconds that they leave rank 0 at the deadline, to give up for all.
_GRACE_S = 2.0


class Savers(Protocol):
    """The processes that have the rows of a buffer: each is a rank, and saves and restores its own."""

    def open(self, root: Path, options: Options) -> None:
        """Make a Checkpointer in each. Raises what making them raises; ``RankFailed``: one is gone."""

    def begin(self, step: int, user: Mapping[str, object]) -> None:
        """Begin a save, and return when all have taken their snapshots. Raises as ``Checkpointer.save``."""

    def end(self) -> SaveReport:
        """Wait for the save. Raises as ``Checkpointer.save``."""

    def restore(self, wanted: Wanted, options: RestoreOptions) -> RestoreReport:
        """Load a checkpoint. Raises as ``Checkpointer.restore``."""

    def prune(self, keep: int | None) -> list[str]:
        """As ``Checkpointer.prune``."""


class Checkpointable(Protocol):
    """A buffer, as a Checkpointer saves and restores it."""

    closed: bool

    @property
    def savers(self) -> Savers | None:
        """What saves and restores it where its rows are; None: this process does."""

    @property
    def storage(self) -> Sized:
        """Its rows."""

    @property
    def form(self) -> Form:
        """How it keeps its rows."""

    def empty(self) -> None:
        """Forget all rows."""

    def snapshot(self, *, prefetched: Literal["save", "drop"]) -> Snapshot:
        """All that a checkpoint saves, as it is now."""

    def prepare_load(
        self, checkpoint: Checkpoint, rank: int, *, default_rng: bool, close_open: bool, convert: bool
    ) -> BufferLoad:
        """Check the shard of a rank of a checkpoint, which must stay open until the load is committed."""

    def prepare_placed(
        self, checkpoint: Checkpoint, made: Reshard, rank: int, *, env_offset: int, default_rng: bool, convert: bool
    ) -> BufferLoad:
        """Check what a plan gives to a rank."""


class JobSeries:
    """A series of checkpoints of one job, whose ranks agree on attempts.

    Args:
        series: in a folder that is the same for all ranks.
        ranks: of the job. Each makes this in the same order, if there are several.
    """

    def __init__(self, series: Series, ranks: Ranks) -> None:
        self.root, self.series, self.ranks = series.root, series, ranks
        #: Before all of its keys in the store.
        self.section = ranks.section()
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
            self._epoch = attempts.claim_epoch(self.root)
            self.series.recover(self._epoch)
        return self._epoch

    def claim(self, timeout: float) -> int:
        """The same on all ranks, which must all call this. Raises :class:`RankFailed`: some did not."""
        given = self.ranks.together("epoch", lambda: b"" if self.ranks.rank else str(self.epoch).encode(), timeout)
        self._epoch = int(given[0])
        return self._epoch

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
        name = attempts.Name.parse(said["name"])
        if name is None:
            raise RankFailed(f"save: expected the name of an attempt from rank 0, got {said['name']!r:.100}.")
        folder = self.root / str(name)
        for _ in looks(started + timeout - time.monotonic(), at_files=True):
            if os.path.lexists(folder / documents.ATTEMPT):
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
        while (made := attempts.decision(folder)) is None:
            passed = next(when)
            late = passed > timeout + (_GRACE_S if self.ranks.rank else 0)
            while missing and attempts.has_voted(folder, missing[-1], world):
                missing.pop()
            if late or passed - asked > _TRY_S or not (missing or self.ranks.rank):
                asked = passed
                give_up = f"after {timeout:g} s" if late else None
                made = attempts.decide(folder, self.epoch, give_up=give_up, contents=self.series.contents(folder))
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
        #: What this process read and wrote of the series, so that no document is decoded twice.
        self.series = Series(root)
        self.protocol = JobSeries(self.series, ranks)
        self.latest = LatestStep()
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
        return None if self.series.look(parent.path.name) else parent

    def saved(self, path: Path, snapshot: Snapshot, parent: Parent | None) -> None:
        """There is a new checkpoint, which had this parent."""
        if self.parent is not None and self.ranks.rank:  # rank 0 forgets what it retires
            self.series.forget(self.parent.path.name)
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
        attempts.accept(attempt, rank, infos, rows.shard, step=step, contents=self.series.contents(attempt))

    def write_parts(
        self, folder: Path, snapshot: Snapshot, parent: Parent | None, progress: OnProgress | None
    ) -> tuple[SavedRows, list[part_writer.PartInfo]]:
        """Write its parts, but for the vote."""
        options = self.options
        with contextlib.ExitStack() as stack, disk.batched_fsync():
            reader: part_reader.PartReader | None = None
            if parent is not None:
                checkpoint = stack.enter_context(self.series.open(parent.path))
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
        self.write_shard(attempt, self.latest.step, snapshot, self.parent_of(snapshot))


_log = logging.getLogger("engram")


class SaveHandle:
    """A save that goes on in the background.

    >>> import torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
    >>> checkpoints = Checkpointer("handle-example", rb)
    >>> handle = checkpoints.save(100, wait=False)
    >>> handle.wait().step
    100
    """

    def __init__(self) -> None:
        #: The folder that is written; None: not known yet.
        self.path: Path | None = None
        #: When it ended, by ``time.monotonic()``; None: it has not.
        self.ended: float | None = None
        self._over = disk.WorkerEvent()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = (
            "going on" if not self.done else "done" if self._error is None else f"failed: {type(self._error).__name__}"
        )
        return f"{SaveHandle.__name__}({'' if self.path is None else f'{self.path.name}, '}{state})"

    @property
    def done(self) -> bool:
        """Whether it has ended, good or bad."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """The report, when it is there.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer. Whatever made the save fail; then there is no new checkpoint.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("wait-example", rb)
        >>> handle = checkpoints.save(100, wait=False)
        >>> handle.wait().steps
        10
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"save: not over after {timeout:g} s. It goes on: wait again.")
        if self._error is not None:
            raise self._error
        assert self._report is not None  # one of the two is there
        return self._report


class SaveAttempt(SaveHandle):
    """A save, and the handle that its caller gets: first :meth:`prepare`, then :meth:`run`, perhaps in another thread.

    Args:
        job: whose save.
        request: what for; or why that was wrong: where there are other ranks, they must hear of it.
        number: of the attempt: the same on all ranks.
        progress: called with a :class:`Progress` now and then.
    """

    def __init__(
        self, job: Job, request: SaveRequest | Exception, number: int, progress: OnProgress | None = None
    ) -> None:
        super().__init__()
        self._job, self._number, self._progress = job, number, progress
        self._request = request if isinstance(request, SaveRequest) else None
        self._failure: BaseException | None = None if isinstance(request, SaveRequest) else request
        self._snapshot: Snapshot | None = None
        self._parent: Parent | None = None
        self._started = 0.0

    def join(self) -> None:
        """Return when it has ended."""
        self._over.wait()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        traceback.clear_frames(error.__traceback__)  # a handle keeps the error, but no file that was open
        self._error = error
        self._end()

    def _end(self) -> None:
        self._snapshot = self._parent = None  # a handle keeps this, but no rows
        self.ended = time.monotonic()
        self._over.set()

    def prepare(self) -> None:
        """Take the snapshot. What that raises is raised by :meth:`run` where other ranks must hear of it."""
        self._started = time.perf_counter()
        if self._failure is not None:
            return
        try:
            self._snapshot = self._job.snapshot()
        except BaseException as error:
            if self._job.ranks.world == 1:
                raise
            self._failure = error

    def run(self) -> None:
        """Write the checkpoint. Whatever happens, the save ends; :meth:`wait` raises what made it fail."""
        try:
            self._report = self._write()
        except BaseException as error:  # noqa: BLE001 - raised by wait
            which = "" if self._request is None else f" of step {self._request.step}"
            _log.warning("the save%s failed: %s: %s", which, type(error).__name__, error)
            self.fail(error)
        else:
            self._end()

    def _write(self) -> SaveReport:
        job, world = self._job, self._job.ranks.world
        timeout = job.options.timeout
        if self._snapshot is not None:
            self._parent = job.parent_of(self._snapshot)
        self.path = attempt = job.protocol.begin(self._number, self._begin, timeout)
        error = self._vote(attempt)
        if error is not None and (world == 1 or not isinstance(error, Exception)):
            raise error
        manifest = job.protocol.decided(attempt, timeout)
        if manifest.status != "complete":
            job.series.forget(attempt.name)
            job.protocol.joined(self._number, timeout)
            with contextlib.suppress(OSError, CorruptCheckpoint):  # it may be removed by now
                attempts.withdraw(attempt, job.ranks.rank)
            why = f"save: {attempt.name}: {'; '.join(manifest.reasons)}."
            if world == 1:
                raise CorruptCheckpoint(why)
            raise RankFailed(why) from error
        snapshot = self._snapshot
        assert snapshot is not None  # else this rank voted against
        job.saved(attempt, snapshot, self._parent)
        report = self._said(attempt, manifest.step, snapshot)
        if job.ranks.rank == 0:
            self._tidy(attempt.name)
        _log.info("saved %s", report)
        if world > 1 and report.would_drop:
            each = report.would_drop.items()
            drop = (
                f"{count(it['episodes'], f'{kind} episode')} with {count(it['steps'], 'step')}" for kind, it in each
            )
            _log.info("%s: redistributed to other ranks it would drop %s", attempt.name, ", ".join(drop))
        return report

    def _begin(self) -> Path:
        """On rank 0: the folder of the attempt."""
        if self._request is None:
            assert self._failure is not None
            raise self._failure
        job, (step, user) = self._job, self._request
        parent, epoch = None if self._parent is None else self._parent.path.name, job.protocol.epoch
        return attempts.begin(
            job.root, step=step, epoch=epoch, world=job.ranks.world, trigger="save", parent=parent, user=user
        )

    def _vote(self, attempt: Path) -> BaseException | None:
        """Write the shard of this rank, and vote for the attempt, or against it. Why against it."""
        job = self._job
        try:
            if self._failure is not None:
                raise self._failure
            assert self._request is not None
            assert self._snapshot is not None
            agreed = attempts.read_attempt(attempt)
            if agreed.step != self._request.step:
                raise ValueError(f"save: step: expected {agreed.step}, as on rank 0, got {self._request.step}.")
            if self._request.user and self._request.user != agreed.user:
                _log.warning(
                    "save: %s: user: expected the same on all ranks, got other keys or values on rank %d; those of rank 0 are "
                    "saved: %s",
                    attempt.name,
                    job.ranks.rank,
                    sorted(agreed.user),
                )
            job.write_shard(attempt, self._request.step, self._snapshot, self._parent, self._progress)
            # The last rank to vote decides.
            attempts.decide(attempt, job.protocol.epoch, contents=job.series.contents(attempt))
        except BaseException as error:  # noqa: BLE001 - raised when all know
            with contextlib.suppress(OSError, CorruptCheckpoint, RuntimeError):
                if attempts.decision(attempt) is None:
                    attempts.refuse(attempt, job.ranks.rank, f"{type(error).__name__}: {error}")
                attempts.decide(attempt, job.protocol.epoch)
            return error
        return None

    def _said(self, attempt: Path, step: int, snapshot: Snapshot) -> SaveReport:
        shards: list[Shard] = []
        drops = False
        try:
            with self._job.series.open(attempt) as checkpoint:
                shards = [checkpoint.shard(rank) for rank in range(checkpoint.manifest.world)]
                fields = saved_fields(checkpoint)
                drops = snapshot.form.ranking is None and has_ends(fields)
                self._job.tell_doubts(fields, snapshot)
        except (OSError, CorruptCheckpoint) as error:  # it is there all the same; a slow rank may find it removed
            _log.warning(
                "save: %s is there; it cannot be read for a report, which lacks figures: %s", attempt.name, error
            )
        totals = added(shard.totals for shard in shards)
        episodes = episodes_of(totals)
        return SaveReport(
            attempt.name,
            step,
            attempt,
            totals.steps,
            episodes,
            sum(shard.cut.lost_rows for shard in shards),
            totals.bytes_written,
            totals.bytes_linked,
            snapshot.paused_s,
            time.perf_counter() - self._started,
            {kind: one for kind, one in episodes.items() if drops and kind != "complete"},
        )

    def _tidy(self, name: str) -> None:
        """Note the new checkpoint, and remove old ones. The new one is there, whatever fails here."""
        job = self._job
        root, series, epoch = job.root, job.series, job.protocol.epoch
        try:
            job.protocol.forget()
            series.set_latest(name, epoch)
            if attempts.names(root)[:1] != [attempts.Name.parse(name)]:  # else no file need be looked at
                newest = series.latest()[0]
                if newest is not None and newest.name != name:
                    _log.warning(
                        "save: %s is there, but restore() takes %s, which is of a later step", name, newest.name
                    )
            forget_reports(root, series.retire(job.options.keep, epoch, saved=name))
        except (OSError, RuntimeError) as error:  # RankFailed is one
            _log.warning("save: %s is there; LATEST and old ones stay as they are until the next save: %s", name, error)
        else:
            disk.run_in_background(partial(_sweep, series))


def _sweep(series: Series) -> None:
    try:
        series.sweep()
    except OSError as error:
        _log.warning("old checkpoints are not removed: %s. The next save tries again", error)
