"""A series of checkpoints of one buffer: incremental, atomic, in the background if wanted."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from engram._words import warn
from engram.checkpoint.endpoint import Endpoint
from engram.checkpoint.job import Job
from engram.checkpoint.options import Asked, Options, RestoreOptions, SeldomArguments, checked_step, checked_user
from engram.checkpoint.reports import Entry, RestoreReport, SaveReport, forget_reports, note_restore
from engram.checkpoint.restore import Restore
from engram.checkpoint.save import SaveAttempt, SaveHandle
from engram.checkpoint.schedule import Schedule
from engram.checkpoint.select import Wanted
from engram.checkpoint.watchdog import Watchdog
from engram.format import series
from engram.format.checkpoints import Checkpoint, is_checkpoint
from engram.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram.checkpoint.schedule import Requests
    from engram.format.problems import Problem
    from engram.types import Checkpointable

__all__ = ["Checkpointer", "Entry", "RestoreReport", "SaveHandle", "SaveReport"]


def _world_of_torch() -> int:
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class Checkpointer:
    """Saves one buffer again and again below one folder, and restores it.

    Every checkpoint is complete by itself: files of rows that did not change since the last one are hard links to it, so that it
    costs what is new, and removing one harms no other. It exists when its last file does, which appears in one step. The buffer
    is written and sampled while it is saved; what is saved is as it was at one moment, at which writers wait for a copy of
    8 bytes per row and priority. Where many write, rows that are overwritten before they are copied are left out, and counted.

    Args:
        root: the folder; made if it is not there. One buffer per folder.
        buffer: what is saved; of this rank, where there are several.
        ranks: the processes that save one checkpoint together, each its shard: ``Ranks.from_torch()``, say. Each of them makes this
            with the same arguments. Default: this process alone.
        keep: how many checkpoints stay.
        full_every: every so many checkpoints are saved without links: a damaged disk block is shared by all that link it.
        paranoid: compare what is linked with the buffer: for tests of programs that write through views, which leaves no trace.
        prefetch: ``"drop"`` leaves out batches that were drawn ahead, as for ``dumps``: for buffers whose batches are neither tensors
            nor TensorDicts, which cannot be saved.
        roles: what fields mean, by key, where they are not called as usual: ``done``, ``terminated``, ``truncated``,
            ``step_type``, ``env_id``, ``traj_id``, ``position`` or ``data``. Several may have one role. The usual names are those roles,
            and ``traj_ids`` and ``episode`` for ``traj_id``, as the last part of a key at any depth: ``("time_step", "env_id")``, say,
            in TensorDicts, dicts and named tuples. With ``ranks`` given, the first save warns where no field says where trajectories
            end, and of a field of integers that is called like an id and has no role.
        timeout: seconds that ranks wait for each other, also for the slowest one's shard.
        every_steps: :meth:`poll` saves whenever so many steps are over, or as soon after that as the last save is over on all ranks.
            Default: only what is asked for.
        every_minutes: it saves at the first agreement when the last save began so many minutes ago, by the clock of rank 0.
        on_failure: what :meth:`poll` does when a save that it began fails: raise, or warn and go on.
        poll_every: calls of :meth:`poll` from one agreement of the ranks to the next.

    Raises:
        ValueError: ``keep``, ``full_every``, ``every_steps`` or ``poll_every`` below 1; ``every_minutes`` or ``timeout`` not above 0;
            no such ``on_failure`` or ``prefetch``, or roles that there are not. TypeError: the first four are no ints.
        FileExistsError: a dump lies there. OSError: the folder cannot be made.

    >>> import tempfile, torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    >>> _ = rb.extend(torch.arange(100))
    >>> root = tempfile.TemporaryDirectory()
    >>> Checkpointer(root.name, rb).save(step=10).steps
    100
    >>> again = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    >>> Checkpointer(root.name, again).restore().step, len(again)
    (10, 100)
    >>> root.cleanup()
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        buffer: Checkpointable,
        *,
        ranks: Ranks | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        on_failure: Literal["raise", "warn"] = "warn",
        prefetch: Literal["save", "drop"] = "save",
        roles: Mapping[Any, str] | None = None,
        timeout: float = 600.0,
        **seldom: Unpack[SeldomArguments],
    ) -> None:
        options = Options(every_steps, every_minutes, keep, on_failure, prefetch, roles, timeout, **seldom)
        options.check()
        if buffer.closed:
            raise RuntimeError(
                "Checkpointer: buffer: expected an open buffer, got a closed one. ReplayBuffer.open the folder of its store."
            )
        self.root = Path(root).absolute()
        if is_checkpoint(self.root):
            raise FileExistsError(
                errno.EEXIST,
                "Checkpointer: expected a folder for checkpoints, got a dump. Take another",
                str(self.root),
            )
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if ranks is None and (world := _world_of_torch()) > 1:
            warn(
                f"Checkpointer: torch.distributed has {world} ranks, and ranks= was not given: this process saves for itself, and takes "
                f"{self.root} from any other that does. Give ranks=Ranks.from_torch(), or a folder of its own to each."
            )
        alone = ranks is None  # gets back its rows as they were
        self._job = Job(self.root, buffer, Ranks.local() if ranks is None else ranks, options, doubtful=not alone)
        self._schedule = Schedule(self._job.ranks, options)
        self._saves = self._guards = 0
        self._lock = threading.Lock()
        self._current: SaveAttempt | None = None
        """The save that began last."""
        self._unsettled: SaveAttempt | None = None
        """A save that :meth:`poll` began, of which it has not said how it ended."""

    @property
    def requests(self) -> Requests:
        """Requests for checkpoints that no save serves yet."""
        return self._schedule.requests

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, user: Mapping[str, Any] | None = None, wait: bool = True) -> Any:
        """Make a checkpoint. With several ranks, each of them calls this with the same step.

        While one is being made, another call waits for its end first, so that each is of its own step. :meth:`poll` never waits.

        Args:
            step: of the training; orders checkpoints.
            user: JSON of yours, which :meth:`restore` gives back: the name of the model's checkpoint, say. That of rank 0 counts.
            wait: False: return a :class:`SaveHandle` as soon as it is known what is saved. A process that ends meanwhile ends after
                the save.

        Returns:
            A :class:`SaveReport`, or the handle.

        Raises:
            KeyError: a key of ``roles`` is not stored.
            TypeError: state that cannot be saved, or ``user`` is not a dict of JSON; names the way to it.
            ValueError: ``step`` is no int of at least 0; ``user`` is too long, too deep or has a number that is not finite.
            RuntimeError: a later process has taken this folder over; or ``paranoid`` found a row that was changed through a view.
            WriterStalled: a writer did not stop for 5 s.
            OSError: no space, or an I/O error. The last checkpoint stays as it is.
            RankFailed: one of several ranks raised one of these, died, or was not ready in time; on all of them.

        Once there is a new checkpoint nothing raises: what fails then (old ones cannot be removed, say) is a warning in the log.
        """
        asked: Asked | Exception
        try:
            asked = self._hear("save", step, user)
        except Exception as error:
            if self._job.ranks.world == 1:
                raise
            asked = error  # others have come to save, and must hear of it
        attempt = self._attempt(asked)
        self._start(attempt, wait=wait)
        return attempt.wait() if wait else attempt

    def _hear(self, what: str, step: Any, user: Any) -> Asked:
        """The step and the user state, checked and noted."""
        step, user = checked_step(what, step), checked_user(what, user)
        self._job.heard = self._job.heard.then(step, user)
        return Asked(step, user or {})

    def _attempt(self, asked: Asked | Exception) -> SaveAttempt:
        """The next save; all ranks begin the same ones in the same order."""
        self._saves += 1
        return SaveAttempt(self._job, asked, self._saves - 1)

    def _start(self, attempt: SaveAttempt, *, wait: bool) -> None:
        """Take the snapshot, once the save before has ended, and write it. Whatever happens, the attempt ends."""
        try:
            with self._lock:
                if self._current is not None:
                    self._current.join()  # it ends at its deadline
                self._current = attempt
                self._schedule.began()
                attempt.prepare()
            if wait:
                attempt.run()
            else:
                # Not a daemon: the interpreter ends when the save has, which has a deadline.
                threading.Thread(target=attempt.run, name="engram-save", daemon=False).start()
        except BaseException as error:
            attempt.fail(error)
            raise

    # ---- when to save ----------------------------------------------------------------------------------------------------

    def poll(self, step: int, *, user: Mapping[str, Any] | None = None) -> SaveHandle | None:
        """Save if a save is due or was asked for, on whichever rank: then all ranks save at this step, in the background.

        Every rank calls this at every step, all with the same numbers. What was asked for is agreed on at every ``poll_every``-th
        call, by one number that all ranks exchange, and so is what is due by ``every_minutes``. What is due by ``every_steps`` is
        agreed on at once. Where one rank still writes the last save, all go on training, and that is agreed on again at the next call.

        Args:
            step: of the training; larger than at the last call.
            user: as for :meth:`save`. The one that was given with the latest step, to any call, or that :meth:`restore` found, is also
                that of a crash checkpoint, so give it on every rank.

        Returns:
            The handle of a save that began now; else None.

        Raises:
            ValueError: ``step`` is no int of at least 0, or ``user`` is not JSON; TypeError. Of several ranks, this one has taken part
                in this call all the same: no save begins in it on any rank, and what is due begins at the next one.
            RankFailed: a rank did not come to agree. Or the last save that began here failed, whatever it raised, if ``on_failure`` is
                ``"raise"``; otherwise that is a warning. What is due begins before.
        """
        bad: Exception | None = None
        before = self._job.heard.step
        try:
            asked = self._hear("poll", step, user)
            self._schedule.advanced(asked.step - before)
        except (TypeError, ValueError) as error:
            if self._job.ranks.world == 1:
                raise
            bad, asked = error, Asked(before + self._schedule.stride, {})  # others have come to agree on this step
        busy = self._current is not None and not self._current.done
        attempt = None
        if self._schedule.agreed(before, asked.step, able=bad is None and not busy):
            attempt = self._attempt(asked)
            self.requests.serve(attempt)
            self._start(attempt, wait=False)
        ended = self._unsettled
        if ended is None or ended.done:  # else none has begun, either
            self._unsettled = attempt
            if ended is not None:
                self._tell(ended)
        if bad is not None:
            raise bad
        return attempt

    def _tell(self, ended: SaveAttempt) -> None:
        """What became of a save that :meth:`poll` began, if it failed."""
        try:
            ended.wait()
        except Exception as error:
            if self._job.options.on_failure == "raise":
                raise
            warn(f"poll: there is no new checkpoint: {type(error).__name__}: {error}")

    def request(self) -> None:
        """Ask for a checkpoint: at the next agreement in :meth:`poll` all ranks save. From any thread of any rank."""
        self.requests.ask()

    def listen_signals(self) -> contextlib.AbstractContextManager[None]:
        """Inside, SIGUSR2 to this process asks for a checkpoint, as :meth:`request` does. From the main thread.

        Whoever handled that signal before still does.
        """
        return self.requests.listening(signal.SIGUSR2)

    @contextlib.contextmanager
    def guard(self, grace: float = 20.0) -> Iterator[None]:
        """Inside, the death of one rank costs the others nothing: their shards are saved.

        When this rank raises or gets SIGTERM, when another one does, or gives no sign of life for 10 s, each that lives saves its
        shard at once, in a thread of its own: the main thread may wait in a collective that will never end. What was raised is raised
        afterwards, SIGTERM does what it did before; if the main thread cannot, the process ends with code 143. With the shards of
        all ranks that is a checkpoint like others. With fewer it is undecided, and ``restore(allow_partial=True)`` loads it. It is of
        the latest step, and has the latest ``user``, that :meth:`save`, :meth:`poll` or :meth:`restore` heard of on the rank that
        noticed first.

        All ranks enter and leave this together; ``sys.exit()`` leaves it, too, and any other exit code is a failure. Whoever comes to its
        end waits for the others, at most for ``timeout`` of the constructor: then it logs as an error who is missing, and goes on.
        From the main thread, so that it hears of signals; SIGUSR2 is listened to as well.

        Args:
            grace: seconds that a rank waits for the shards of others, before it goes on with its end. Launchers kill after 30.

        Raises:
            RankFailed: not all ranks came. Whatever is raised inside.
        """
        job, timeout = self._job, self._job.options.timeout
        job.protocol.claim(timeout)
        self._guards += 1
        watchdog = Watchdog(job.protocol, self._guards, lambda: job.heard[:2], job.write_crash, grace, timeout)
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self.listen_signals())
            with watchdog.watching():
                yield

    @contextlib.contextmanager
    def serve(
        self,
        address: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        interval: float = 1.0,
    ) -> Iterator[Endpoint | None]:
        """Inside, rank 0 answers HTTP requests for checkpoints; on other ranks nothing happens.

        ``POST /checkpoint`` asks for one, as :meth:`request` does: 202 and an id. ``GET /checkpoint/<id>`` says what became of it, by
        rank; ``GET /checkpoints`` lists them. There is nothing else, and each needs ``Authorization: Bearer <token>``.

        Args:
            address: ``"unix:<path>"``, or ``"127.0.0.1:<port>"`` (0: any that is free) for this machine alone. Default: a socket in a
                new folder that nobody else may enter.
            token_file: where the token lies; made if it is not there. Default: beside the socket, or in such a folder.
            interval: seconds from the end of a save that was asked for to the next request.

        Yields:
            The endpoint, with ``address`` and ``token_file``; None on other ranks.

        Raises:
            ValueError: an address that other machines could reach. PermissionError: a token file that others could read.
            OSError: the address cannot be used.
        """
        if self._job.ranks.rank:
            yield None
            return
        with contextlib.closing(Endpoint(self, address, token_file, interval)) as endpoint:
            yield endpoint

    # ---- restoring -------------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        name: str | None = None,
        at_most: int | None = None,
        incomplete: Mapping[str, str] | None = None,
        overflow: Literal["cut", "fill"] = "cut",
        max_drop_fraction: float = 0.5,
        env_id: Literal["lane", "global"] = "lane",
        resume: Literal["env_reset", "exact"] = "env_reset",
        verify: Literal["read", "full"] = "read",
        allow_partial: bool = False,
        default_rng: bool = False,
    ) -> RestoreReport:
        """Load a checkpoint into the buffer. With several ranks, each of them calls this with the same arguments.

        As many ranks as saved it, with the same capacities and lanes, get back their own shards, bit for bit. Any other
        number or size of them gets whole trajectories, the newest first, each to the rank and lane that hold the least so far;
        priorities and ages stay as they are, and fields whose role is ``env_id``, ``traj_id`` or ``position`` say where a step is now.
        With a ``TensorDictMaxValueWriter`` rows are dealt out by themselves, the best first, and stay as they are.

        Args:
            step: which one. Default: the newest that is whole; newer ones that are not are passed over, with a warning, also those
                of which only reading tells.
            name: which one, as the report of the save has it: note it with the model that belongs to it.
            at_most: a step, that of the model: the newest that is whole and not of a later one. Beside ``name``: what to take if there
                is none of that name, or it is damaged; a warning says so.
            incomplete: what becomes of trajectories that are not whole when they are dealt out: ``"open"`` ones, without a last step,
                are dropped, ``"truncate"`` marks the last one there is, ``"keep"`` leaves them as they are; ``"headless"`` ones, without
                their first steps, are dropped or kept. Both count for those without either. Default: dropped. Given, they are dealt
                out in any case.
            overflow: where there is less room than was saved: ``"cut"`` keeps the newest and nothing behind the first that fits
                nowhere; ``"fill"`` goes on with older, shorter ones.
            max_drop_fraction: of the steps that may be left out as incomplete, or longer than a lane.
            env_id: what that field gets where trajectories are dealt out: the lane, or its number among the lanes of all ranks. In
                shards that come back as they were it says what was written.
            resume: ``"env_reset"``: environments begin anew, so the trajectories that were open end where they are; the next row of
                their lanes is left out, which marks that; it costs a full lane its oldest row (``given_up`` of the report). The next
                trajectory of such a lane follows a row that holds nothing. Where rows have neither ``is_init`` nor ``step_type``, it
                counts as ``orphan``: ``incomplete={"headless": "keep"}`` takes it along to other ranks.
                ``"exact"``: they go on, as after ``loads``. Of shards that come back as they were.
            verify: ``"full"``: check every block before anything changes, and that there are no other files; rank 0 does. ``"read"``:
                when it is read, if no rank has anything stored, which halves what is read; before, if one has: each rank checks its
                share of the shards.
            allow_partial: take one that lacks shards, too: what is left of a job of which ranks died. Then ``missing`` of the report
                names those.
            default_rng: as for ``loads``.

        Returns:
            A :class:`RestoreReport`.

        Raises:
            ValueError: an argument out of its range, or ``step`` beside ``at_most`` or ``name``.
            FileNotFoundError: there is none, or none of that name or step.
            CorruptCheckpoint: that of ``step`` or ``name`` is damaged, or every one is. As ``loads``.
            IncompatibleCheckpoint: as ``loads``; or more than ``max_drop_fraction`` would be left out. Nothing is changed.
            RankFailed: one of several ranks raised one of these or died; on all of them. Buffers that had begun to load are empty.
        """
        options = RestoreOptions(incomplete, overflow, max_drop_fraction, env_id, resume, verify, default_rng)
        wanted = Wanted(self.root, step, name, at_most, allow_partial)
        report = Restore(self._job, wanted, options).run()
        self._schedule.began()
        note_restore(self.root, report, self._job.ranks.rank)
        return report

    # ---- the series ------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> str | None:
        """The name of the newest checkpoint that is whole; None: there is nothing to restore. Sizes are compared, not sums.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Checkpointer(root, ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)).latest is None
        True
        """
        path = series.latest(self.root)[0]
        return None if path is None else path.name

    def list(self) -> builtins.list[Entry]:
        """All checkpoints, the newest first, and what is wrong with those that cannot be loaded. Sizes are compared, not sums."""
        return [
            Entry(str(name), name.step, self.root / str(name), series.look(self.root / str(name)))
            for name in series.names(self.root)
        ]

    def verify(self, name: str, level: Literal["meta", "read", "full"] = "full") -> builtins.list[Problem]:
        """What is wrong with a checkpoint; nothing, if it is empty.

        Args:
            name: as :meth:`list` has it.
            level: ``"meta"``: digests and sizes; ``"read"``: every block too; ``"full"``: and files that do not belong there.

        Raises:
            FileNotFoundError: no such checkpoint. ValueError: no such level.
        """
        if level not in ("meta", "read", "full"):
            raise ValueError(f"verify: level: expected 'meta', 'read' or 'full', got {level!r}.")
        if name not in map(str, series.names(self.root)):
            raise FileNotFoundError(
                f"verify: {self.root}: expected one of {[str(n) for n in series.names(self.root)]}, got {name!r}."
            )
        wrong = series.look(self.root / name)
        if wrong is not None:
            return [wrong]
        with Checkpoint(self.root / name) as checkpoint:
            return [*checkpoint.problems(level)]

    def prune(self, keep: int | None = None) -> builtins.list[str]:
        """Remove all but the newest checkpoints; never the last good one. Names of those that were removed.

        Args:
            keep: how many good ones stay. Default: as the constructor was told.

        Raises:
            ValueError: below 1. RuntimeError: a later process has taken this folder over. OSError: something cannot be removed.
        """
        removed = series.prune(
            self.root, self._job.options.keep if keep is None else keep, self._job.protocol.epoch, self._job.known
        )
        forget_reports(self.root, removed)
        return removed
