"""A series of checkpoints of one buffer: incremental, atomic, in the background if wanted."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, Unpack, overload

from engram._support import checks, unsupported, words
from engram._support.progress import OnProgress, Work
from engram.checkpoint import reports
from engram.checkpoint.ranks import Ranks
from engram.checkpoint.reports import Entry, RestoreReport, SaveReport
from engram.checkpoint.requests import Endpoint, Requests, Schedule
from engram.checkpoint.restore import Restore
from engram.checkpoint.save import Checkpointable, Job, SaveAttempt, SaveHandle, Savers
from engram.checkpoint.watchdog import Watchdog
from engram.format.layout import is_store
from engram.saved import attempts, checkpoints, disk, documents, series
from engram.saved.rows import Roles

CurrentStep: TypeAlias = Callable[[], int]


__all__ = ["Checkpointer", "Entry", "RestoreReport", "SaveHandle", "SaveReport"]


class SaveElsewhere(SaveAttempt):
    """A save by the ranks that have the rows, and the handle that its caller gets.

    Args:
        job: whose save.
        request: what for.
        number: of the attempt.
        savers: of the buffer.
    """

    def __init__(self, job: Job, request: reports.SaveRequest, number: int, savers: Savers) -> None:
        super().__init__(job, request, number)
        self._wanted, self._savers = request, savers

    def prepare(self) -> None:
        """Return when all snapshots are taken. Raises as ``Checkpointer.save``."""
        self._started = time.perf_counter()
        self._savers.begin(self._wanted.step, self._wanted.user)

    def _write(self) -> SaveReport:
        report = self._savers.end()
        self.path = report.path
        return report


def _warn_of_others(root: Path) -> None:
    from torch import distributed

    there = distributed.is_available() and distributed.is_initialized()
    if there and (world := distributed.get_world_size()) > 1:
        words.warn(
            f"Checkpointer: torch.distributed has {world} ranks, and ranks= was not given: this process saves for itself, and takes "
            f"{root} from any other that does. Give ranks=Ranks.from_torch(), or a folder of its own to each."
        )


def _check_free(root: Path) -> None:
    """Raises ``FileExistsError``: something of engram's lies there that is no series of checkpoints."""
    found = "a dump. Take another" if checkpoints.is_checkpoint(root) else ""
    if is_store(root):
        found = f"that of a store. Take another, such as {root}-checkpoints"
    if found:
        raise FileExistsError(errno.EEXIST, f"Checkpointer: expected a folder for checkpoints, got {found}", str(root))


class Checkpointer:
    """Saves one buffer as a series of checkpoints below one folder, and restores it.

    Every checkpoint is complete. Files of rows that did not change since the last one are hard links to it: a checkpoint costs
    what is new, and removing one harms no other. The manifest appears last, by one hard link. If the process is killed during a save,
    the previous checkpoint remains valid.

    A save takes a consistent snapshot; later writes do not change it. Writers wait while 8 bytes per row and priority are copied.
    Rows are copied afterwards: a row that is overwritten before that is dropped, and counted.

    Args:
        root: the folder, one per buffer. Created if it does not exist.
        buffer: the buffer to save; with several ranks, that of this rank.
        ranks: the processes that save a checkpoint together, one shard each, such as ``Ranks.from_torch()``. Each of them creates a
            Checkpointer with the same arguments. Default: this process alone; of a buffer on Ray whose rows are elsewhere its shards,
            which save where they are.
        keep: how many checkpoints are kept.
        full_every: save every n-th checkpoint without links. A damaged disk block is shared by all checkpoints that link it.
        paranoid: compare linked files with the buffer. For tests of programs that write through views, which leaves no trace.
        prefetch: ``"drop"`` drops prefetched batches, as in ``dumps``: batches that are neither tensors nor TensorDicts cannot be
            saved.
        roles: the roles of fields, by key, for fields without a usual name: ``done``, ``terminated``, ``truncated``, ``step_type``,
            ``env_id``, ``traj_id``, ``position`` or ``data``. Several fields may have one role. The last part of a key, at any depth,
            is its usual name: that of a role, or ``traj_ids`` or ``episode`` for ``traj_id``. So ``("time_step", "env_id")`` has the
            role ``env_id``. With ``ranks``, the first save warns if no field says where trajectories end, and of an integer field
            that is named like an id and has no role.
        timeout: seconds that ranks wait for each other, also for the slowest shard.
        every_steps: :meth:`poll` saves every so many steps. If the last save has not ended on all ranks by then, it saves as soon as
            it has. Default: never.
        every_minutes: :meth:`poll` saves at the first agreement after so many minutes since the last save began, by the clock of
            rank 0.
        on_failure: what :meth:`poll` does if a save that it began fails: raise, or warn and continue.
        poll_every: calls of :meth:`poll` between two agreements of the ranks.

    Raises:
        ValueError: ``keep``, ``full_every``, ``every_steps`` or ``poll_every`` below 1; ``every_minutes`` or ``timeout`` not above 0;
            an unknown ``on_failure``, ``prefetch`` or role. TypeError: one of the first four is no int.
        FileExistsError: ``root`` holds a dump. OSError: the folder cannot be created.

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
        roles: Roles | None = None,
        timeout: float = 600.0,
        **advanced: Unpack[reports.AdvancedOptions],
    ) -> None:
        known = reports.AdvancedOptions.__annotations__
        unknown = {name: value for name, value in advanced.items() if name not in known}
        unsupported.reject_unsupported("Checkpointer", unknown, {}, reports.Options._fields)
        options = reports.Options(every_steps, every_minutes, keep, on_failure, prefetch, roles, timeout, **advanced)
        options.check()
        try:
            is_closed = buffer.closed
            savers = None if is_closed else buffer.savers
        except AttributeError as error:
            raise TypeError(
                f"Checkpointer: buffer: expected a buffer, got {type(buffer).__name__}. Write Checkpointer(root, buffer). "
                "An ensemble has one for each member."
            ) from error
        if is_closed:
            raise RuntimeError(
                "Checkpointer: buffer: expected an open buffer, got a closed one. ReplayBuffer.open the folder of its store."
            )
        self.root = Path(root).absolute()
        _check_free(self.root)
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._savers = savers
        if savers is not None:
            if ranks is not None:
                raise ValueError(
                    "Checkpointer: ranks: expected None where rows are elsewhere: each shard of this buffer is a rank."
                )
            savers.open(self.root, options)
        elif ranks is None:
            _warn_of_others(self.root)
        self._job = Job(self.root, buffer, ranks or Ranks.local(), options, doubtful=ranks is not None)
        self._schedule = Schedule(self._job.ranks, options)
        self._saves = self._guards = 0
        self._lock = threading.Lock()
        #: The save that began last.
        self._current: SaveAttempt | None = None
        #: A save that :meth:`poll` began, of which it has not said how it ended.
        self._unsettled: SaveAttempt | None = None

    def __repr__(self) -> str:
        options, defaults = self._job.options, {"keep": 3, "every_steps": None, "every_minutes": None}
        given = [f"{name}={value}" for name, value in options._asdict().items() if value != defaults.get(name, value)]
        return f"Checkpointer({', '.join([repr(str(self.root)), *given, repr(self._job.ranks)])})"

    @property
    def requests(self) -> Requests:
        """Requests for checkpoints that no save serves yet."""
        return self._schedule.requests

    # ---- saving ----------------------------------------------------------------------------------------------------------

    @overload
    def save(self, step: int, *, wait: Literal[True] = ..., **more: Unpack[reports.SaveArguments]) -> SaveReport: ...
    @overload
    def save(self, step: int, *, wait: Literal[False], **more: Unpack[reports.SaveArguments]) -> SaveHandle: ...
    @overload
    def save(self, step: int, *, wait: bool, **more: Unpack[reports.SaveArguments]) -> SaveReport | SaveHandle: ...
    def save(
        self,
        step: int,
        *,
        user: Mapping[str, object] | None = None,
        wait: bool = True,
        progress: OnProgress | None = None,
    ) -> SaveReport | SaveHandle:
        """Save a checkpoint. With several ranks, each of them calls this with the same step.

        If a save is under way, this waits until it has ended: every checkpoint is of its own step. :meth:`poll` never waits.

        Args:
            step: of the training; orders checkpoints.
            user: your own JSON, such as the name of the model's checkpoint. :meth:`restore` returns it. That of rank 0 counts.
            wait: False: return a :class:`SaveHandle` once the snapshot is taken. The process does not end before the save does.
            progress: called with a :class:`Progress` of this rank's shard now and then, and not where shards or servers have the rows.
                With ``wait=False`` it is called by another thread. What it raises ends the save, of which nothing remains. Default: a
                bar on a terminal, on rank 0 and with ``wait``, if it takes longer than a second.

        Returns:
            A :class:`SaveReport`, or the handle.

        Raises:
            KeyError: ``roles`` has a key that is not stored.
            TypeError: state that cannot be saved, or ``user`` is no dict of JSON. Names the entry.
            ValueError: ``step`` is no int of at least 0; ``user`` is too long, too deep or has a number that is not finite.
            RuntimeError: a later process has taken this folder over; or ``paranoid`` found a row that was changed through a view.
            WriterStalled: a writer did not stop for 5 s.
            OSError: no space, or an I/O error. The previous checkpoint remains valid.
            RankFailed: one of several ranks raised one of these, died, or was not ready in time. Raised on all of them.

        After the new checkpoint is complete nothing raises: what fails then, such as removing old ones, is logged as a warning.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("save-example", rb)
        >>> report = checkpoints.save(100, user={"model": "model-100.pt"})
        >>> report.steps
        10
        >>> handle = checkpoints.save(200, wait=False)  # while training goes on
        >>> handle.wait().steps
        10
        """
        request: reports.SaveRequest | Exception
        try:
            request = self._checked("save", step, user)
        except Exception as error:
            if self._job.ranks.world == 1:
                raise
            request = error  # others have come to save, and must hear of it
        attempt = self._attempt(request, progress)
        self._start(attempt, wait=wait)
        return attempt.wait() if wait else attempt

    def _checked(self, what: str, step: object, user: object) -> reports.SaveRequest:
        """The step and the user state, checked and noted."""
        checked = reports.SaveRequest(reports.checked_step(what, step), reports.checked_user(what, user) or {})
        self._job.latest = self._job.latest.then(checked.step, None if user is None else checked.user)
        return checked

    def _attempt(self, request: reports.SaveRequest | Exception, progress: OnProgress | None = None) -> SaveAttempt:
        """The next save; all ranks begin the same ones in the same order."""
        self._saves += 1
        if self._savers is not None and isinstance(request, reports.SaveRequest):
            return SaveElsewhere(self._job, request, self._saves - 1, self._savers)
        return SaveAttempt(self._job, request, self._saves - 1, progress)

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
                disk.start_thread(threading.Thread(target=attempt.run, name="engram-save", daemon=False))
        except BaseException as error:
            attempt.fail(error)
            raise

    # ---- when to save ----------------------------------------------------------------------------------------------------

    def poll(self, step: int, *, user: Mapping[str, object] | None = None) -> SaveHandle | None:
        """Save in the background if a save is due, or was requested on any rank. All ranks then save at this step.

        Every rank calls this at every step, with the same numbers. At every ``poll_every``-th call the ranks exchange one number, and
        agree on requests and on ``every_minutes``. What is due by ``every_steps`` is agreed on in the same call. If a rank still
        writes the last save, training continues, and the ranks agree again at the next call.

        Args:
            step: of the training; larger than at the last call.
            user: as for :meth:`save`. A crash checkpoint holds the ``user`` of the latest step that any call was given, or that
                :meth:`restore` found, so pass it on every rank.

        Returns:
            The handle of a save that began now; else None.

        Raises:
            ValueError: ``step`` is no int of at least 0, or ``user`` is not JSON; TypeError. With several ranks, this rank has taken
                part in the agreement nevertheless: no save begins on any rank, and what is due begins at the next call.
            RankFailed: a rank did not take part. If ``on_failure`` is ``"raise"``, also whatever made the last save fail that began
                here; otherwise that is a warning. What is due begins first.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> checkpoints = Checkpointer("poll-example", rb, every_steps=2)
        >>> for step in (1, 2):
        ...     _ = rb.add({"obs": [0.0]})
        ...     handle = checkpoints.poll(step)
        >>> handle.wait().step
        2
        """
        bad: Exception | None = None
        before = self._job.latest.step
        try:
            request = self._checked("poll", step, user)
            self._schedule.advanced(request.step - before)
        except (TypeError, ValueError) as error:
            if self._job.ranks.world == 1:
                raise
            bad = error
            request = reports.SaveRequest(before + self._schedule.stride, {})  # others have come to agree on this step
        busy = self._current is not None and not self._current.done
        attempt = None
        if self._schedule.agreed(before, request.step, able=bad is None and not busy):
            attempt = self._attempt(request)
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
            words.warn(f"poll: there is no new checkpoint: {type(error).__name__}: {error}")

    def request(self) -> None:
        """Request a checkpoint: all ranks save at the next agreement in :meth:`poll`. May be called in any thread of any rank.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("request-example", rb, poll_every=1)
        >>> checkpoints.request()
        >>> checkpoints.poll(100).wait().step
        100
        >>> checkpoints.poll(101) is None
        True
        """
        self.requests.ask()

    def listen_signals(self) -> contextlib.AbstractContextManager[None]:
        """Inside, SIGUSR2 to this process requests a checkpoint, as :meth:`request` does. Call it in the main thread.

        A handler that was set before is still called.

        >>> import signal, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("signals-example", rb, poll_every=1)
        >>> with checkpoints.listen_signals():
        ...     signal.raise_signal(signal.SIGUSR2)  # as `kill -USR2 PID` in a shell
        ...     saved = checkpoints.poll(100).wait()
        >>> saved.step
        100
        """
        return self.requests.listening(signal.SIGUSR2)

    @contextlib.contextmanager
    def guard(self, grace: float = 20.0) -> Iterator[None]:
        """Inside, if a rank fails, all live ranks save their shards.

        A rank fails when it raises, gets SIGTERM, or sends no heartbeat for 10 s. Each live rank then saves its shard in a thread of
        its own, as its main thread may wait in a collective that never ends. Afterwards the exception is raised, and SIGTERM does
        what it did before; if the main thread is stuck, the process exits with code 143. With the shards of all ranks the result is
        a checkpoint like others. With fewer it stays undecided, and ``restore(allow_partial=True)`` loads it. It is of the latest
        step, and has the latest ``user``, that :meth:`save`, :meth:`poll` or :meth:`restore` was given on the rank that noticed first.

        All ranks enter and leave together. ``sys.exit()`` leaves, too; any other exit code is a failure. A rank that leaves waits
        for the others up to ``timeout`` of the constructor; then it logs the missing ranks as an error, and continues. Call this in
        the main thread, which receives signals; SIGUSR2 requests a checkpoint, as in :meth:`listen_signals`.

        Args:
            grace: seconds that a rank waits for the shards of others before it ends. Launchers kill after 30.

        Raises:
            RankFailed: not all ranks entered. Whatever is raised inside.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("guard-example", rb)
        >>> with checkpoints.guard():  # an exception in here saves a checkpoint
        ...     _ = checkpoints.poll(1)
        """
        job, timeout = self._job, self._job.options.timeout
        if self._savers is not None:
            raise RuntimeError(
                "guard: expected a buffer whose rows are in this process. Those of shards do not depend on it: catch the error, and save."
            )
        job.protocol.claim(timeout)
        self._guards += 1
        watchdog = Watchdog(job.protocol, self._guards, lambda: job.latest[:2], job.write_crash, grace, timeout)
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self.listen_signals())
            with watchdog.watching():
                yield

    @contextlib.contextmanager
    def serve(
        self, address: str | None = None, *, token_file: str | os.PathLike[str] | None = None, interval: float = 1.0
    ) -> Iterator[Endpoint | None]:
        """Inside, rank 0 answers HTTP requests for checkpoints. On other ranks nothing happens.

        ``POST /checkpoint`` requests one, as :meth:`request` does, and returns 202 and an id. ``GET /checkpoint/<id>`` returns its
        state on each rank, ``GET /checkpoints`` a list. Each needs ``Authorization: Bearer <token>``.

        Args:
            address: ``"unix:<path>"``, or ``"127.0.0.1:<port>"`` (0: any that is free) for this machine alone. Default: a socket in a
                new folder that other users cannot enter.
            token_file: where the token lies; made if it is not there. Default: beside the socket, or in such a folder.
            interval: seconds from the end of a save that was asked for to the next request.

        Yields:
            The endpoint, with ``address`` and ``token_file``; None on other ranks.

        Raises:
            ValueError: an address that other machines could reach. PermissionError: a token file that others could read.
            OSError: the address cannot be used.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> with Checkpointer("serve-example", rb).serve() as endpoint:
        ...     print(endpoint.address.partition(":")[0])
        unix
        """
        if self._job.ranks.rank:
            yield None
            return
        with contextlib.closing(Endpoint(self.requests, self.list, address, token_file, interval)) as endpoint:
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
        convert: bool = False,
        progress: OnProgress | None = None,
    ) -> RestoreReport:
        """Load a checkpoint into the buffer. With several ranks, each of them calls this with the same arguments.

        If as many ranks with the same capacities and lanes saved it, each gets back its own shard, bit for bit. Otherwise whole
        trajectories are redistributed, the newest first, each to the rank and lane that hold the least so far. Priorities and ages
        stay; fields with the role ``env_id``, ``traj_id`` or ``position`` are rewritten. With a ``TensorDictMaxValueWriter`` single
        rows are redistributed, the best first, and no field is rewritten.

        Args:
            step: the step of the checkpoint. Default: the newest valid one. Newer ones that are damaged or incomplete are skipped
                with a warning, also if the damage shows while they are read.
            name: its name, as the report of the save says it: store it with the model.
            at_most: the newest valid checkpoint of this step or an earlier one, such as the step of the model. With ``name``: what to
                load if there is no valid checkpoint of that name; a warning says so.
            incomplete: what happens to incomplete trajectories that are redistributed. ``"open"``, without a last step: dropped,
                ``"truncate"`` marks their last step, ``"keep"`` keeps them as they are. ``"headless"``, without their first steps:
                dropped, or ``"keep"``. Trajectories without either need both. Default: dropped. If given, trajectories are
                redistributed in any case.
            overflow: if there is less room than was saved: ``"cut"`` keeps the newest, and nothing older than the first trajectory
                that does not fit; ``"fill"`` continues with older, shorter ones.
            max_drop_fraction: of the steps that may be dropped as incomplete, or as longer than a lane.
            env_id: the value of that field in redistributed rows: the lane, or its number among the lanes of all ranks. Shards that
                come back as they were keep what was written.
            resume: for shards that come back as they were. ``"env_reset"``: environments start new episodes, so trajectories that
                were open end where they are. The next row of their lanes is skipped, which marks the end and costs a full lane its
                oldest row (``given_up`` of the report). The next trajectory of such a lane follows a row that holds nothing: without
                ``is_init`` or ``step_type`` it counts as ``orphan``, which ``incomplete={"headless": "keep"}`` keeps.
                ``"exact"``: open trajectories continue, as after ``loads``.
            verify: ``"full"``: rank 0 checks every block, and that there are no other files, before anything changes. ``"read"``:
                blocks are checked when they are read if no rank holds rows, which halves the reads; otherwise each rank checks its
                share of the shards first.
            allow_partial: also load a checkpoint that lacks shards, as a job leaves it of which ranks died. ``missing`` of the report
                names their ranks.
            default_rng: as for ``loads``.
            convert: another sampler may have saved it, with its buffer class, or one with another ``alpha`` or ``eps``: as for ``loads``,
                whose other conversions need nothing here.
            progress: as for :meth:`save`. Of redistributed rows the total is an estimate.

        Returns:
            A :class:`RestoreReport`.

        Raises:
            ValueError: an argument is out of range, or ``step`` is given with ``at_most`` or ``name``.
            FileNotFoundError: there is no checkpoint, or none of that name or step.
            CorruptCheckpoint: the one of ``step`` or ``name`` is damaged, or every one is; or only ``allow_partial`` would load what
                a crashed job left. As ``loads``.
            IncompatibleCheckpoint: as ``loads``; or more than ``max_drop_fraction`` would be dropped. Nothing is changed.
            RankFailed: one of several ranks raised one of these, or died. Raised on all of them. Buffers that had begun to load are
                empty.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("restore-example", rb)
        >>> _ = checkpoints.save(100, user={"model": "model-100.pt"})
        >>> rb.empty()
        >>> report = checkpoints.restore()
        >>> report.step, report.user["model"], len(rb)
        (100, 'model-100.pt', 10)
        """
        options = reports.RestoreOptions(
            incomplete, overflow, max_drop_fraction, env_id, resume, verify, default_rng, convert
        )
        wanted = reports.Wanted(self.root, step, name, at_most, allow_partial)
        if self._savers is None:
            with Work("restoring", 0, progress, quiet=self._job.ranks.rank > 0) as work:
                report = Restore(self._job, wanted, options, work).run()
            reports.note_restore(self.root, report, self._job.ranks.rank)
        else:
            options.check()
            wanted.check()
            report = self._savers.restore(wanted, options)
            self._job.latest = reports.LatestStep(report.step, report.user, report.step)
        self._schedule.began()
        return report

    def stateful(
        self, step: CurrentStep, *, keep: int = 3, **restore: Unpack[reports.RestoreArguments]
    ) -> StatefulReplay:
        """An object with ``state_dict`` and ``load_state_dict``, which takes the replay into checkpoints of another library.

        For ``torch.distributed.checkpoint``, accelerate, Lightning Fabric, or ``torch.save``: see docs/training-frameworks.md. Only
        the name of a checkpoint below :attr:`root` goes in. ``state_dict()`` saves one of this step, or waits for the one that
        ``begin()`` began; ``load_state_dict(state)`` restores it, also on another number of ranks. With several ranks, all of them
        call these together.

        Args:
            step: returns the step of the training, such as ``lambda: trainer.global_step``; the same on all ranks. There is one
                checkpoint for each step: a second ``state_dict()`` at the same step returns the same name.
            keep: the newest checkpoints that were named this way stay, so many of them, whatever ``keep`` of the constructor and
                :meth:`prune` say. Give it as many as checkpoints of the other library are kept.
            **restore: arguments of :meth:`restore` besides ``step``, ``name`` and ``at_most``.

        Raises:
            TypeError: ``step`` is no function. ValueError: ``keep`` is below 1 or above 1,000.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> with tempfile.TemporaryDirectory() as root:
        ...     saved = Checkpointer(root, rb).stateful(lambda: 7).state_dict()
        ...     fresh = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        ...     Checkpointer(root, fresh).stateful(lambda: 0).load_state_dict(saved)
        >>> list(saved), len(fresh)
        (['checkpoint'], 10)
        """
        return StatefulReplay(self, self._job, step, keep, restore)

    # ---- the series ------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> str | None:
        """The name of the newest valid checkpoint; None: there is none to restore. File sizes are compared, not sums.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Checkpointer(root, ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)).latest is None
        True
        """
        path = series.Series(self.root).latest()[0]
        return None if path is None else path.name

    def list(self) -> builtins.list[Entry]:
        """All checkpoints, the newest first, and why some cannot be loaded. File sizes are compared, not sums.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("list-example", rb)
        >>> for step in (100, 200):
        ...     _ = checkpoints.save(step)
        >>> [entry.step for entry in checkpoints.list()]
        [200, 100]
        """
        look = series.Series(self.root).look
        return [Entry(str(name), name.step, self.root / str(name), look(name)) for name in attempts.names(self.root)]

    def verify(
        self, name: str, level: Literal["meta", "read", "full"] = "full", *, progress: OnProgress | None = None
    ) -> builtins.list[documents.Problem]:
        """What is wrong with a checkpoint; nothing, if it is empty.

        Args:
            name: as :meth:`list` has it.
            level: ``"meta"``: digests and sizes; ``"read"``: every block too; ``"full"``: and files that do not belong there.
            progress: called with a :class:`Progress` now and then. Default: a bar on a terminal if it takes longer than a second.

        Raises:
            FileNotFoundError: no such checkpoint. ValueError: no such level.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("verify-example", rb)
        >>> name = checkpoints.save(100).name
        >>> checkpoints.verify(name)
        []
        """
        checks.check_choice("verify: level", level, ("meta", "read", "full"))
        if name not in map(str, attempts.names(self.root)):
            raise FileNotFoundError(
                f"verify: {self.root}: expected one of {[str(n) for n in attempts.names(self.root)]}, got {name!r}."
            )
        wrong = series.Series(self.root).look(name)
        if wrong is not None:
            return [wrong]
        with (
            checkpoints.Checkpoint(self.root / name) as checkpoint,
            Work("checking", checkpoint.nbytes, progress) as work,
        ):
            checkpoint.progress = work
            return [*checkpoint.problems(level)]

    def prune(self, keep: int | None = None) -> builtins.list[str]:
        """Remove all but the newest checkpoints, but neither the last valid one nor those that :meth:`stateful` has named. Returns the
        names of those that were removed.

        Args:
            keep: how many valid ones are kept. Default: that of the constructor.

        Raises:
            ValueError: below 1. RuntimeError: a later process has taken this folder over. OSError: something cannot be removed.

        >>> import torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> checkpoints = Checkpointer("prune-example", rb)
        >>> for step in (100, 200):
        ...     _ = checkpoints.save(step)
        >>> len(checkpoints.prune(keep=1))
        1
        """
        if self._savers is not None:
            return self._savers.prune(keep)
        removed = self._job.series.prune(self._job.options.keep if keep is None else keep, self._job.protocol.epoch)
        reports.forget_reports(self.root, removed)
        return removed


#: The entry of the state.
_ENTRY = "checkpoint"


class StatefulReplay:
    """The replay of a Checkpointer with ``state_dict`` and ``load_state_dict``, as DCP, accelerate and Fabric call them.

    :meth:`Checkpointer.stateful` returns one. All ranks call each method together.

    Args:
        checkpointer: saves and restores.
        job: of the checkpointer.
        step: returns the step of the training.
        keep: how many checkpoints that were named stay.
        restore: what :meth:`Checkpointer.restore` is told besides the name.

    >>> import tempfile, torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
    >>> folder = tempfile.TemporaryDirectory()
    >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
    >>> state = replay.state_dict()
    >>> rb.empty()
    >>> replay.load_state_dict(state)
    >>> len(rb), replay.report.step
    (10, 7)
    >>> folder.cleanup()
    """

    def __init__(
        self, checkpointer: Checkpointer, job: Job, step: CurrentStep, keep: int, restore: reports.RestoreArguments
    ) -> None:
        checks.check_callable("stateful: step", step, "a function that returns the step", "Pass lambda: step.")
        self._checkpointer, self._job, self._step = checkpointer, job, step
        self._keep = checks.check_count("stateful: keep", keep, most=series.MAX_PINS)
        self._restore = restore
        self._handle: SaveHandle | None = None
        self._saved_step = -1
        #: What :meth:`load_state_dict` loaded last; None: nothing.
        self.report: RestoreReport | None = None

    def __repr__(self) -> str:
        handle = "" if self._handle is None else f", step {self._saved_step}: {self._handle!r}"
        return f"{type(self).__name__}({str(self._job.root)!r}, keep={self._keep}{handle})"

    def begin(self) -> SaveHandle:
        """Take the snapshot of this step now, and write it in the background. :meth:`state_dict` then waits for the rest of it only.

        Raises: as :meth:`Checkpointer.save`.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> handle = replay.begin()  # the model's own state may be copied meanwhile
        >>> replay.state_dict() == {"checkpoint": handle.wait().name}
        True
        >>> folder.cleanup()
        """
        step = reports.checked_step("stateful", self._step())
        self._pin(step)
        self._handle, self._saved_step = self._checkpointer.save(step, wait=False), step
        return self._handle

    def state_dict(self) -> dict[str, str]:
        """``{"checkpoint": name}``, once the replay of this step is saved: a save that :meth:`begin` began, or one that begins now.

        A second call at the same step returns the same name. If no rank holds a row, nothing is saved, and the name is empty: DCP
        asks a new buffer for its state before it loads one.

        Raises: as :meth:`Checkpointer.save`. The next call tries again.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> replay.state_dict() == replay.state_dict()  # one checkpoint a step
        True
        >>> folder.cleanup()
        """
        step = reports.checked_step("stateful", self._step())
        if self._handle is None or self._saved_step != step:
            rows, timeout = len(self._job.buffer.storage), self._job.options.timeout
            if not self._job.ranks.max(int(rows > 0), timeout):  # on no rank
                return {_ENTRY: ""}
            self.begin()
        handle = self._handle
        assert handle is not None  # begun here or before
        try:
            return {_ENTRY: handle.wait().name}
        except BaseException:
            if handle.done:
                self._handle = None
            raise

    def load_state_dict(self, state_dict: Mapping[str, str]) -> None:
        """Restore the checkpoint that a state names; of an empty name, forget all rows.

        Raises:
            ValueError: another library's state. FileNotFoundError: that checkpoint was removed; the buffer is as it was. Others: as
                :meth:`Checkpointer.restore`.

        >>> import tempfile, torch
        >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> folder = tempfile.TemporaryDirectory()
        >>> replay = Checkpointer(folder.name, rb).stateful(lambda: 7)
        >>> replay.load_state_dict({"checkpoint": ""})  # of a buffer that held no rows
        >>> len(rb)
        0
        >>> folder.cleanup()
        """
        name = state_dict.get(_ENTRY)
        if not isinstance(name, str) or set(state_dict) != {_ENTRY}:
            raise ValueError(
                f"load_state_dict: expected {{'{_ENTRY}': name}}, as stateful() saves it, got the entries {sorted(state_dict)}."
            )
        self._handle, self.report = None, None
        if name:
            try:
                self.report = self._checkpointer.restore(name=name, **self._restore)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"load_state_dict: {self._job.root}: the checkpoint {name} of this state is gone. Load a state whose checkpoint is "
                    "there, as Checkpointer.list() says, and give stateful(keep=) as many as states are kept; load_state_dict("
                    f"{{'{_ENTRY}': ''}}) begins with an empty buffer."
                ) from error
        else:
            self._job.buffer.empty()

    def _pin(self, step: int) -> None:
        """Before the save, so that no later one removes it."""
        if self._job.ranks.rank:
            return
        try:
            self._job.series.pin(step, self._keep)
        except (OSError, *documents.UNREADABLE) as error:
            words.warn(
                f"stateful: the checkpoint of step {step} stays no longer than others: {str(error).removesuffix('.')}. If "
                f"{series.PINS} is damaged, remove it, and load no state that was saved before."
            )
