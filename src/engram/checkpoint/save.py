"""One save, from the moment that it is of to its end."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

from engram._support.words import count
from engram.checkpoint.reports import Asked, SaveReport, episodes_of, forget_reports
from engram.errors import CorruptCheckpoint, RankFailed
from engram.format import disk, series
from engram.format.checkpoints import added
from engram.format.workers import Ended
from engram.reshard.shards import has_ends, saved_fields

if TYPE_CHECKING:
    from pathlib import Path

    from engram._support.progress import OnProgress
    from engram.checkpoint.job import Job, Parent
    from engram.format.checkpoints import Shard
    from engram.persist.parts import Snapshot

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
        self.path: Path | None = None
        """The folder that is written; None: not known yet."""
        self.ended: float | None = None
        """When it ended, by ``time.monotonic()``; None: it has not."""
        self._over = Ended()
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
        asked: what for; or why that was wrong: where there are other ranks, they must hear of it.
        number: of the attempt: the same on all ranks.
        progress: called with a :class:`Progress` now and then.
    """

    def __init__(self, job: Job, asked: Asked | Exception, number: int, progress: OnProgress | None = None) -> None:
        super().__init__()
        self._job, self._number, self._progress = job, number, progress
        self._asked = asked if isinstance(asked, Asked) else None
        self._failure: BaseException | None = None if isinstance(asked, Asked) else asked
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
            which = "" if self._asked is None else f" of step {self._asked.step}"
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
            job.known.forget(attempt.name)
            job.protocol.joined(self._number, timeout)
            with contextlib.suppress(OSError, CorruptCheckpoint):  # it may be removed by now
                series.withdraw(attempt, job.ranks.rank)
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
            drop = (
                f"{count(it['episodes'], f'{kind} episode')} with {count(it['steps'], 'step')}"
                for kind, it in report.would_drop.items()
            )
            _log.info("%s: redistributed to other ranks it would drop %s", attempt.name, ", ".join(drop))
        return report

    def _begin(self) -> Path:
        """On rank 0: the folder of the attempt."""
        if self._asked is None:
            assert self._failure is not None
            raise self._failure
        job = self._job
        return series.begin(
            job.root,
            step=self._asked.step,
            epoch=job.protocol.epoch,
            world=job.ranks.world,
            trigger="save",
            parent=None if self._parent is None else self._parent.path.name,
            user=self._asked.user,
        )

    def _vote(self, attempt: Path) -> BaseException | None:
        """Write the shard of this rank, and vote for the attempt, or against it. Why against it."""
        job = self._job
        try:
            if self._failure is not None:
                raise self._failure
            assert self._asked is not None
            assert self._snapshot is not None
            agreed = series.read_attempt(attempt)
            if agreed.step != self._asked.step:
                raise ValueError(f"save: step: expected {agreed.step}, as on rank 0, got {self._asked.step}.")
            if self._asked.user and self._asked.user != agreed.user:
                _log.warning(
                    "save: %s: user: expected the same on all ranks, got other keys or values on rank %d; those of rank 0 are "
                    "saved: %s",
                    attempt.name,
                    job.ranks.rank,
                    sorted(agreed.user),
                )
            job.write_shard(attempt, self._asked.step, self._snapshot, self._parent, self._progress)
            series.decide(attempt, job.protocol.epoch, known=job.known)  # the last rank to vote decides
        except BaseException as error:  # noqa: BLE001 - raised when all know
            with contextlib.suppress(OSError, CorruptCheckpoint, RuntimeError):
                if series.decision(attempt) is None:
                    series.refuse(attempt, job.ranks.rank, f"{type(error).__name__}: {error}")
                series.decide(attempt, job.protocol.epoch)
            return error
        return None

    def _said(self, attempt: Path, step: int, snapshot: Snapshot) -> SaveReport:
        shards: list[Shard] = []
        drops = False
        try:
            with self._job.known.open(attempt) as checkpoint:
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
        root, epoch = job.root, job.protocol.epoch
        try:
            job.protocol.forget()
            series.set_latest(root, name, epoch)
            if series.names(root)[:1] != [series.Name.parse(name)]:  # else no file need be looked at
                newest = series.latest(root, known=job.known)[0]
                if newest is not None and newest.name != name:
                    _log.warning(
                        "save: %s is there, but restore() takes %s, which is of a later step", name, newest.name
                    )
            forget_reports(root, series.retire(root, job.options.keep, epoch, job.known, saved=name))
        except (OSError, RuntimeError) as error:  # RankFailed is one
            _log.warning("save: %s is there; LATEST and old ones stay as they are until the next save: %s", name, error)
        else:
            disk.run_in_background(partial(_sweep, root))


def _sweep(root: Path) -> None:
    try:
        series.sweep(root)
    except OSError as error:
        _log.warning("old checkpoints are not removed: %s. The next save tries again", error)
