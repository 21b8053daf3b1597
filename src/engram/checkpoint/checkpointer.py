"""A series of checkpoints of one buffer: incremental, atomic, in the background if wanted."""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import logging
import operator
import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from engram._progress import bytes_bar
from engram._words import count, said_bytes, warn
from engram.checkpoint.commit_protocol import Attempts
from engram.checkpoint.endpoint import Endpoint
from engram.checkpoint.schedule import Requests
from engram.checkpoint.watchdog import Watchdog
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint, RankFailed
from engram.format import disk, series, strict
from engram.format.checkpoints import Checkpoint, is_checkpoint, rank_folder
from engram.format.problems import Problem, corrupt
from engram.persist import parts
from engram.persist.components import check_blocks
from engram.persist.roles import check_roles, doubts, roles_of
from engram.persist.rows import described
from engram.persist.trajectory_table import KINDS
from engram.ranks import Ranks
from engram.reshard.agreement import disagreements
from engram.reshard.driver import checked_incomplete, open_shards, saved_fields, seed_of
from engram.reshard.plan import Incomplete, Target
from engram.reshard.reports import Lost, move_lines, move_report, said_move
from engram.reshard.scatter import has_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engram.format.checkpoints import Shard
    from engram.format.parts import PartField, PartReader
    from engram.persist.rows import SavedRows
    from engram.reshard.driver import Move, Planner

__all__ = ["Checkpointer", "Entry", "RestoreReport", "SaveHandle", "SaveReport"]

T = TypeVar("T")

_log = logging.getLogger("engram")

#: How trajectories that are not whole come back all the same.
_WAYS = {
    "open": 'incomplete={"open": "keep"} (or "truncate") keeps those without a last step',
    "headless": 'incomplete={"headless": "keep"} keeps those without a first one',
}
_OTHERWISE = "max_drop_fraction=1.0 loads the rest. The buffer is as it was"


class SaveReport(NamedTuple):
    """What a checkpoint holds, and what it took."""

    name: str
    step: int
    path: Path
    steps: int
    """Rows that were saved."""
    episodes: dict[str, dict[str, int]]
    """Trajectories and their steps, by what is there of them: ``complete``, ``open``, ``headless``, …"""
    lost_rows: int
    """Rows that were overwritten before they were copied."""
    bytes_written: int
    bytes_linked: int
    """Of files that are also an older checkpoint's."""
    paused_s: float
    """For how long writers waited."""
    seconds: float
    would_drop: dict[str, dict[str, int]] = {}  # noqa: RUF012 - a value
    """Of ``episodes``, what is left out if another number or size of ranks loads them, unless ``restore(incomplete=…)`` says
    otherwise."""

    def __str__(self) -> str:
        episodes = ", ".join(f"{it['episodes']} {kind}" for kind, it in self.episodes.items())
        return (
            f"{self.name}: {self.steps} rows (episodes: {episodes or 'none'}; {self.lost_rows} overwritten meanwhile), "
            f"{said_bytes(self.bytes_written)} written and {said_bytes(self.bytes_linked)} linked in {self.seconds:.2f} s, "
            f"writers waited {self.paused_s * 1e3:.1f} ms"
        )


class RestoreReport(NamedTuple):
    """What was loaded."""

    name: str
    step: int
    path: Path
    steps: int
    """Rows that are there now."""
    user: dict[str, Any]
    passed_over: list[Problem]
    """Newer ones that were damaged or not complete."""
    seconds: float
    missing: tuple[int, ...] = ()
    """Ranks whose shards there are none of."""
    dealt: dict[str, Any] | None = None
    """Where trajectories were dealt out anew: episodes and steps ``saved``, of which ``kinds``, ``kept``, ``dropped`` by reason and
    ``truncated``, in total and of each of the ``shards``; ``lost`` with missing ones, as far as an older checkpoint says it; the least
    and most steps of a rank and of a lane and the rows that are unused, in total and of each of the ``targets``; and the digest of
    the ``plan``. None: every rank has its own shard."""
    given_up: int = 0
    """Rows of the own shard that are not there: the oldest of each full lane whose newest trajectory was open, as its place marks
    that this ends."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.steps} rows in {self.seconds:.2f} s"
        if self.given_up:
            text += f"; {self.given_up} more were saved: the oldest of full lanes mark where what was open ends"
        return text if self.dealt is None else f"{text}; {said_move(self.dealt)}"


class Entry(NamedTuple):
    """A checkpoint of a series."""

    name: str
    step: int
    path: Path
    problem: Problem | None
    """Why it cannot be loaded; None: it can."""


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """The folder that is written; None: not known yet."""
        self.ended: float | None = None
        """When it had come to its end, by ``time.monotonic()``; None: it has not."""
        self._over = threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has come to its end, good or bad."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """The report, when it is there.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer. Whatever made the save fail; then there is no new checkpoint.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"save: not over after {timeout:g} s. It goes on: wait again.")
        error = self._error
        if error is not None:
            raise error
        assert self._report is not None  # one of the two is there
        return self._report

    def _end(self, report: SaveReport | None, error: BaseException | None = None) -> None:
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # this handle keeps the error, but no file that was open
        self._report, self._error, self.ended = report, error, time.monotonic()
        self._over.set()


class _Parent(NamedTuple):
    """The checkpoint whose segments can be linked, as long as the storage's lineage is this."""

    path: Path
    lineage: Any


def _sweep(root: Path) -> None:
    try:
        series.sweep(root)
    except OSError as error:
        _log.warning("old checkpoints are not removed: %s. The next save tries again", error)


class _Wanted(NamedTuple):
    """Which checkpoint to load."""

    step: int | None = None
    name: str | None = None
    at_most: int | None = None
    """The largest step."""
    partial: bool = False
    """One that lacks shards will do."""
    damaged: tuple[Problem, ...] = ()
    """What was found to be when it was read: a folder, and what is wrong."""


class _How(NamedTuple):
    """How a checkpoint is loaded: see :meth:`Checkpointer.restore`."""

    incomplete: Incomplete | None
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float
    env_id: str
    resume: str
    verify: str
    default_rng: bool


def _world_of_torch() -> int:
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _is_damage(error: CorruptCheckpoint | RankFailed) -> bool:
    return isinstance(error, CorruptCheckpoint) or set(error.causes.values()) == {CorruptCheckpoint.__name__}


class _Asked(NamedTuple):
    """What a checkpoint is asked for with, checked."""

    step: int
    user: dict[str, Any]
    """A copy."""


def _checked_step(what: str, step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}: step: expected an int of at least 0, got {step!r}.")
    return number


def _checked_user(what: str, user: Any) -> dict[str, Any] | None:
    """As it comes back from a checkpoint."""
    if user is None:
        return None
    if not isinstance(user, Mapping):
        raise TypeError(f"{what}: user: expected a dict of JSON, got {type(user).__name__}.")
    copy: dict[str, Any] = strict.parse(strict.encode({"user": dict(user)}))["user"]
    return copy


class _Heard(NamedTuple):
    """What this rank was told of the latest step: a crash checkpoint is of that."""

    step: int = 0
    user: dict[str, Any] = {}  # noqa: RUF012 - a value
    user_step: int = 0
    """Of the call that gave ``user``."""

    def then(self, step: int, user: dict[str, Any] | None) -> _Heard:
        """After another call: that of an earlier step changes nothing that a later one has said."""
        latest = self if user is None or step < self.user_step else self._replace(user=user, user_step=step)
        return latest._replace(step=max(step, self.step))


class _Moment(NamedTuple):
    """What a checkpoint is of; rows are read later."""

    save: Callable[..., SavedRows]
    """The ``save_cut`` of the storage, which may be closed by then."""
    nbytes: int
    """Of the rows."""
    in_rows: bool
    """Whether they are no steps of trajectories."""
    state: dict[str, Any]
    parts: parts.Parts
    lineage: Any
    paused: float
    """Seconds that writers waited."""


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
        buffer: Any,
        *,
        ranks: Ranks | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        on_failure: Literal["raise", "warn"] = "warn",
        full_every: int | None = None,
        paranoid: bool = False,
        prefetch: Literal["save", "drop"] = "save",
        roles: Mapping[Any, str] | None = None,
        timeout: float = 600.0,
        poll_every: int = 10,
    ) -> None:
        if on_failure not in ("raise", "warn"):
            raise ValueError(f"Checkpointer: on_failure: expected 'raise' or 'warn', got {on_failure!r}.")
        if prefetch not in ("save", "drop"):
            raise ValueError(f"Checkpointer: prefetch: expected 'save' or 'drop', got {prefetch!r}.")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"Checkpointer: every_minutes: expected minutes above 0, got {every_minutes!r}.")
        if not timeout > 0:
            raise ValueError(f"Checkpointer: timeout: expected seconds above 0, got {timeout!r}.")
        for name, value in (
            ("keep", keep),
            ("full_every", 1 if full_every is None else full_every),
            ("every_steps", 1 if every_steps is None else every_steps),
            ("poll_every", poll_every),
        ):
            if type(value) is not int:
                raise TypeError(f"Checkpointer: {name}: expected an int, got {type(value).__name__}.")
            if value < 1:
                raise ValueError(f"Checkpointer: {name}: expected at least 1, got {value}.")
        check_roles(roles)
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
        self._buffer = buffer
        self._keep, self._full_every, self._paranoid, self._roles = keep, full_every, paranoid, roles
        self._prefetch = prefetch
        if ranks is None and (world := _world_of_torch()) > 1:
            warn(
                f"Checkpointer: torch.distributed has {world} ranks, and ranks= was not given: this process saves for itself, and takes "
                f"{self.root} from any other that does. Give ranks=Ranks.from_torch(), or a folder of its own to each."
            )
        self._ranks = Ranks.local() if ranks is None else ranks
        self._doubts = ranks is not None  # a process alone gets back its rows as they were
        self._attempts = Attempts(self.root, self._ranks)
        self._timeout = timeout
        self._saves = 0
        self._every_steps, self._poll_every, self._on_failure = every_steps, poll_every, on_failure
        self._period_s = None if every_minutes is None else 60 * every_minutes
        self._save_began = time.monotonic()
        self._polls = self._guards = 0
        self._heard = _Heard()
        self._stride = 1
        self._due = False
        self._unsettled: SaveHandle | None = None
        self.requests = Requests()
        self._parent: _Parent | None = None
        self._since_full = 0
        self._lock = threading.Lock()
        self._handle: SaveHandle | None = None

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
        asked: _Asked | Exception
        try:
            asked = self._hear("save", step, user)
        except Exception as error:
            if self._ranks.world == 1:
                raise
            asked = error  # others have come to save, and must hear of it
        return self._save(asked, SaveHandle(), wait=wait)

    def _hear(self, what: str, step: Any, user: Any) -> _Asked:
        """The step and the user state, checked and noted."""
        step, user = _checked_step(what, step), _checked_user(what, user)
        self._heard = self._heard.then(step, user)
        return _Asked(step, user or {})

    def _save(self, asked: _Asked | Exception, handle: SaveHandle, *, wait: bool) -> Any:
        """As :meth:`save`. Whatever happens, the handle ends."""
        try:
            with self._lock:
                before = self._handle
                if before is not None:
                    before._over.wait()  # noqa: SLF001 - our own; it ends at its deadline
                self._handle = handle
                work = self._prepared(asked, handle)
            if wait:
                work()
            else:
                # Not a daemon: the interpreter ends when the save has, which has a deadline.
                threading.Thread(target=work, name="engram-save", daemon=False).start()
        except BaseException as error:
            handle._end(None, error)  # noqa: SLF001 - our own
            raise
        return handle.wait() if wait else handle

    def _fields(self) -> Sequence[PartField]:
        """Those of this rank's rows, and what they mean; none before the first row, and of other rows than tensors."""
        store = getattr(self._buffer.storage, "memory", None)
        return () if store is None else described(store.schema, roles_of(store.schema.fields, self._roles))[1]

    def _tell_doubts(self, fields: Sequence[PartField]) -> None:
        """Warn once of what a restore on other ranks would do to rows of these fields; a rank without rows, by those of others."""
        if not fields or not self._doubts or self._in_rows or self._buffer.storage.ndim > 1:
            return
        self._doubts = False
        for text in doubts(fields, self._roles):
            warn(f"Checkpointer: {text}.")

    def _prepared(self, asked: _Asked | Exception, handle: SaveHandle) -> Callable[[], None]:
        """Note the moment; what writes it, and ends the handle whatever happens."""
        started, self._save_began = time.perf_counter(), time.monotonic()
        number = self._saves
        self._saves += 1
        moment: _Moment | BaseException
        try:
            moment = self._noted() if isinstance(asked, _Asked) else asked
            self._tell_doubts(self._fields())
        except BaseException as error:
            if self._ranks.world == 1:
                raise
            moment = error  # others must hear of it

        def work() -> None:
            try:
                handle._end(self._write(number, asked, moment, started, handle))  # noqa: SLF001 - our own
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                which = f" of step {asked.step}" if isinstance(asked, _Asked) else ""
                _log.warning("the save%s failed: %s: %s", which, type(error).__name__, error)
                handle._end(None, error)  # noqa: SLF001

        return work

    def _noted(self) -> _Moment:
        """What is saved is as it is now."""
        storage = self._buffer.storage
        drop = self._prefetch == "drop"
        self._buffer.parts(drop_ahead=drop)  # what cannot be saved, or is made now, keeps nobody waiting
        cut = storage.prepare_cut()
        with storage.paused:
            began = time.perf_counter()
            state = cut()
            parts = self._buffer.parts(noted=state["priorities"], drop_ahead=drop)
            lineage = storage.lineage()
            return _Moment(
                storage.save_cut, storage.nbytes, self._in_rows, state, parts, lineage, time.perf_counter() - began
            )

    def _write(
        self,
        number: int,
        asked: _Asked | Exception,
        moment: _Moment | BaseException,
        started: float,
        handle: SaveHandle,
    ) -> SaveReport:
        parent = None if isinstance(moment, BaseException) else self._parent_of(moment.lineage)
        name = None if parent is None else parent.path.name

        def begun() -> Path:
            if isinstance(asked, Exception):
                raise asked
            return series.begin(
                self.root,
                step=asked.step,
                epoch=self._attempts.epoch,
                world=self._ranks.world,
                trigger="save",
                parent=name,
                user=asked.user,
            )

        handle.path = attempt = self._attempts.begin(number, begun, self._timeout)
        error = self._vote(attempt, asked, moment, parent)
        if error is not None and (self._ranks.world == 1 or not isinstance(error, Exception)):
            raise error
        manifest = self._attempts.decided(attempt, self._timeout)
        if manifest.status != "complete":
            self._attempts.joined(number, self._timeout)
            with contextlib.suppress(OSError, CorruptCheckpoint):  # it may be removed by now
                series.withdraw(attempt, self._ranks.rank)
            why = f"save: {attempt.name}: {'; '.join(manifest.reasons)}."
            if self._ranks.world == 1:
                raise CorruptCheckpoint(why)
            raise RankFailed(why) from error
        assert isinstance(moment, _Moment)  # else this rank voted against
        self._parent = _Parent(attempt, moment.lineage)
        self._since_full = 0 if parent is None else self._since_full + 1
        report = self._report(attempt, manifest.step, moment, started)
        if self._ranks.rank == 0:
            self._tidy(attempt.name)
        _log.info("saved %s", report)
        if self._ranks.world > 1 and report.would_drop:
            drop = (
                f"{count(it['episodes'], f'{kind} episode')} with {count(it['steps'], 'step')}"
                for kind, it in report.would_drop.items()
            )
            _log.info("%s: dealt out to other ranks it would drop %s", attempt.name, ", ".join(drop))
        return report

    def _tidy(self, name: str) -> None:
        """What is left to do when there is a new checkpoint. There is one, whatever fails here."""
        try:
            self._attempts.forget()
            series.set_latest(self.root, name, self._attempts.epoch)
            if series.names(self.root)[:1] != [series.Name.parse(name)]:  # else no file need be looked at
                newest = series.latest(self.root)[0]
                if newest is not None and newest.name != name:
                    _log.warning(
                        "save: %s is there, but restore() takes %s, which is of a later step", name, newest.name
                    )
            self._forget_reports(series.retire(self.root, self._keep, self._attempts.epoch))
        except (OSError, RuntimeError) as error:  # RankFailed is one
            _log.warning("save: %s is there; LATEST and old ones stay as they are until the next save: %s", name, error)
        else:
            disk.run_in_background(partial(_sweep, self.root))

    def _vote(
        self, attempt: Path, asked: _Asked | Exception, moment: _Moment | BaseException, parent: _Parent | None
    ) -> BaseException | None:
        """Write the shard of this rank, and vote for the attempt, or against it. Why against it."""
        try:
            if isinstance(asked, Exception):
                raise asked
            if isinstance(moment, BaseException):
                raise moment
            agreed = series.read_attempt(attempt).step
            if agreed != asked.step:
                raise ValueError(f"save: step: expected {agreed}, as on rank 0, got {asked.step}.")
            self._tell_user_state(attempt, asked.user)
            self._write_shard(attempt, asked.step, moment, parent)
            series.decide(attempt, self._attempts.epoch)  # whoever votes last
        except BaseException as error:  # noqa: BLE001 - raised when all know
            with contextlib.suppress(OSError, CorruptCheckpoint, RuntimeError):
                if series.decision(attempt) is None:
                    series.refuse(attempt, self._ranks.rank, f"{type(error).__name__}: {error}")
                series.decide(attempt, self._attempts.epoch)
            return error
        return None

    def _tell_user_state(self, attempt: Path, user: dict[str, Any]) -> None:
        """Log it if what was noted here is not what is saved."""
        saved = series.read_attempt(attempt).user
        if user and user != saved:
            _log.warning(
                "save: %s: user: expected the same on all ranks, got other keys or values on rank %d; those of rank 0 are saved: %s",
                attempt.name,
                self._ranks.rank,
                sorted(saved),
            )

    def _write_shard(self, attempt: Path, step: int, moment: _Moment, parent: _Parent | None) -> None:
        rank = self._ranks.rank
        rows, infos = self._write_parts(attempt / rank_folder(rank, self._ranks.world), moment, parent)
        series.accept(
            attempt,
            rank,
            infos,
            layout="segments",
            cut=rows.cut,
            totals=rows.totals,
            schema_sum=rows.schema_sum,
            step=step,
        )

    def _report(self, attempt: Path, step: int, moment: _Moment, started: float) -> SaveReport:
        shards: builtins.list[Shard] = []
        drops = False
        try:
            with Checkpoint(attempt) as checkpoint:
                shards = [checkpoint.shard(rank) for rank in range(checkpoint.manifest.world)]
                fields = saved_fields(checkpoint)
                drops = not moment.in_rows and has_ends(fields)
                self._tell_doubts(fields)
        except (OSError, CorruptCheckpoint) as error:  # it is there all the same; a slow rank may find it removed
            _log.warning(
                "save: %s is there; it cannot be read for a report, which lacks figures: %s", attempt.name, error
            )
        episodes = {}
        for kind in KINDS:
            counts = [getattr(shard.totals, kind) for shard in shards]
            if any(count.episodes for count in counts):
                episodes[kind] = {
                    "episodes": sum(count.episodes for count in counts),
                    "steps": sum(count.steps for count in counts),
                }
        return SaveReport(
            attempt.name,
            step,
            attempt,
            sum(shard.totals.steps for shard in shards),
            episodes,
            sum(shard.cut.lost_rows for shard in shards),
            sum(shard.totals.bytes_written for shard in shards),
            sum(shard.totals.bytes_linked for shard in shards),
            moment.paused,
            time.perf_counter() - started,
            {kind: count for kind, count in episodes.items() if drops and kind != "complete"},
        )

    def _parent_of(self, lineage: Any) -> _Parent | None:
        """The checkpoint to link from: the last one of this very storage, if it is still there."""
        due = self._full_every is not None and self._since_full + 1 >= self._full_every
        parent = self._parent
        if parent is None or due or lineage is None or parent.lineage != lineage or series.look(parent.path):
            return None
        return parent

    def _write_parts(self, folder: Path, moment: _Moment, parent: _Parent | None) -> tuple[Any, list[Any]]:
        with contextlib.ExitStack() as stack, disk.batched_fsync():
            reader: PartReader | None = None
            if parent is not None:
                checkpoint = stack.enter_context(Checkpoint(parent.path))
                reader = stack.enter_context(checkpoint.part(self._ranks.rank, parts.STORAGE))
            progress = stack.enter_context(bytes_bar("saving", moment.nbytes))
            rows = moment.save(
                folder / parts.STORAGE,
                moment.state,
                roles=self._roles,
                parent=reader,
                paranoid=self._paranoid,
                progress=progress,
            )
            return rows, [rows.info, *parts.write_parts(folder, moment.parts)]

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
        before = self._heard.step
        try:
            asked = self._hear("poll", step, user)
            self._stride = max(1, asked.step - before)
        except (TypeError, ValueError) as error:
            if self._ranks.world == 1:
                raise
            bad, asked = error, _Asked(before + self._stride, {})  # others have come to agree on this step
        if self._every_steps is not None:
            self._due |= asked.step // self._every_steps > before // self._every_steps
        self._polls += 1
        handle = None
        if (self._due or self._polls % self._poll_every == 0) and self._agreed_to_save(able=bad is None):
            self._due = False
            handle = SaveHandle()
            self.requests.serve(handle)
            self._save(asked, handle, wait=False)
        ended = self._unsettled
        if ended is None or ended.done:  # else none has begun, either
            self._unsettled = handle
            if ended is not None:
                self._tell(ended)
        if bad is not None:
            raise bad
        return handle

    def _agreed_to_save(self, *, able: bool) -> bool:
        """Whether all ranks begin a save now: one wants to, and each is able to.

        None is that still writes the last one, as training is not to wait for that.
        """
        busy = self._handle is not None and not self._handle.done
        wish = 2 if busy or not able else int(self._due or self.requests.any or self._overdue())
        return self._ranks.max(wish, self._timeout) == 1

    def _overdue(self) -> bool:
        """Whether the clock asks for a save: that of rank 0, as others go otherwise."""
        period = None if self._ranks.rank else self._period_s
        return period is not None and time.monotonic() - self._save_began >= period

    def _tell(self, ended: SaveHandle) -> None:
        """What became of a save that :meth:`poll` began, if it failed."""
        try:
            ended.wait()
        except Exception as error:
            if self._on_failure == "raise":
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
        self._attempts.claim(self._timeout)
        self._guards += 1
        crashes = Watchdog(
            self._attempts, self._guards, lambda: self._heard[:2], self._write_crash, grace, self._timeout
        )
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self.listen_signals())
            with crashes.watching():
                yield

    def _write_crash(self, folder: Path) -> None:
        """Write the shard of this rank. If that fails, it is missing: there is no vote against what others can save."""
        moment = self._noted()
        self._write_shard(folder, self._heard.step, moment, self._parent_of(moment.lineage))

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
        if self._ranks.rank:
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
        started = time.perf_counter()

        def check() -> _How:
            for argument, value, allowed in (
                ("resume", resume, ("env_reset", "exact")),
                ("verify", verify, ("read", "full")),
                ("overflow", overflow, ("cut", "fill")),
                ("env_id", env_id, ("lane", "global")),
            ):
                if value not in allowed:
                    raise ValueError(f"restore: {argument}: expected {' or '.join(map(repr, allowed))}, got {value!r}.")
            for argument, other in (("at_most", at_most), ("name", name)):
                if step is not None and other is not None:
                    raise ValueError(f"restore: expected step or {argument}, got step={step} and {argument}={other!r}.")
            if not 0.0 <= max_drop_fraction <= 1.0:
                raise ValueError(
                    f"restore: max_drop_fraction: expected a number from 0 to 1, got {max_drop_fraction!r}."
                )
            policy = None if incomplete is None else checked_incomplete(incomplete)
            return _How(policy, overflow, max_drop_fraction, env_id, resume, verify, default_rng)

        wanted = _Wanted(step, name, at_most, allow_partial)
        while True:
            path, how, passed_over = self._agreed(wanted, check)
            try:
                report = self._load(path, how, passed_over, started)
            except (CorruptCheckpoint, RankFailed) as error:
                # All ranks heard of the same, so all of them go on alike.
                if step is not None or name is not None or not _is_damage(error):
                    raise
                wanted = wanted._replace(damaged=(*wanted.damaged, Problem(path, str(error))))
            else:
                self._note(report)
                return report

    def _load(self, path: Path, how: _How, passed_over: builtins.list[Problem], started: float) -> RestoreReport:
        """Load a checkpoint into the buffer."""
        with contextlib.ExitStack() as stack:
            checkpoint, targets, looks = self._opened(stack, path, how.verify, dealt_out=how.incomplete is not None)
            rank = self._ranks.rank
            if targets is None:
                close_open = how.resume == "env_reset" and not self._in_rows
                looks &= not len(self._buffer)  # what holds rows looks at its shard itself
                self._take(
                    lambda: self._buffer.checked_parts(
                        checkpoint, rank, default_rng=how.default_rng, close_open=close_open
                    ),
                    checkpoint if looks else None,
                )
                dealt, steps = None, len(self._buffer)
                given_up = max(0, checkpoint.shard(rank).totals.steps - steps)
            else:
                planner = self._buffer.planner(how.incomplete or Incomplete(), how.overflow)
                move = self._planned(checkpoint, stack, targets, planner, how.max_drop_fraction)
                offset = sum(target.lanes for target in targets[:rank]) if how.env_id == "global" else 0
                self._take(
                    lambda: self._placed(checkpoint, move, offset, default_rng=how.default_rng),
                    checkpoint if looks else None,
                )
                dealt = move_report(move, checkpoint.ranks, self._lost(checkpoint))
                steps, given_up = dealt["targets"][rank]["steps"], 0
            manifest, missing = checkpoint.manifest, checkpoint.missing
        self._heard, self._save_began = _Heard(manifest.step, manifest.user, manifest.step), time.monotonic()
        self._parent = _Parent(path, self._buffer.storage.lineage()) if dealt is None else None
        return RestoreReport(
            path.name,
            manifest.step,
            path,
            steps,
            manifest.user,
            passed_over,
            time.perf_counter() - started,
            missing,
            dealt,
            given_up,
        )

    def _agreed(self, wanted: _Wanted, check: Callable[[], _How]) -> tuple[Path, _How, builtins.list[Problem]]:
        """The checkpoint that all ranks load, as rank 0 finds it; what an earlier incarnation left undecided is decided first.

        All hear of what ``check`` raises on one of them.
        """
        checked: builtins.list[_How] = []
        passed_over: builtins.list[Problem] = []

        def find() -> bytes:
            checked.append(check())
            if self._ranks.rank:
                return b""
            try:  # all may have voted, and rank 0 died before it decided
                series.recover(self.root, series.newest_epoch(self.root))
            except (OSError, RuntimeError) as error:  # it may be a folder that is only read, or one where a job begins
                _log.warning("restore: what is undecided stays so: %s", error)
            try:
                path, problems = self._found(wanted)
            except (FileNotFoundError, CorruptCheckpoint) as error:
                return json.dumps([type(error).__name__, str(error)]).encode()
            passed_over.extend(problems)
            return json.dumps(["", path.name]).encode()

        kind, said = json.loads(self._ranks.together("restore", find, self._timeout)[0])
        if kind:
            raise (FileNotFoundError if kind == FileNotFoundError.__name__ else CorruptCheckpoint)(said)
        return self.root / said, checked[0], passed_over

    def _opened(
        self, stack: contextlib.ExitStack, path: Path, verify: str, *, dealt_out: bool
    ) -> tuple[Checkpoint, builtins.list[Target] | None, bool]:
        """The checkpoint, and where its trajectories are dealt out to; None: every rank gets back its shard.

        And whether its blocks must be looked at before anything changes, as some rank holds rows that damage would cost.
        """
        opened: builtins.list[Checkpoint] = []

        def open_it() -> bytes:
            try:
                checkpoint = stack.enter_context(
                    series.open_partial(path) if series.is_partial(path) else Checkpoint(path)
                )
            except (
                CorruptCheckpoint
            ) as error:  # rank 0 has looked at it: no damage that an older one would be better than
                raise RankFailed(f"expected {path.name} as rank 0 sees it, got {error}") from error
            opened.append(checkpoint)
            if verify == "full" and self._ranks.rank == 0:
                for problem in checkpoint.problems("full"):
                    raise corrupt(*problem)
            storage = self._buffer.storage
            same = (
                not (dealt_out or checkpoint.missing)
                and checkpoint.manifest.world == self._ranks.world
                and self._fits(checkpoint)
            )
            return json.dumps([same, len(storage) > 0, storage.lanes, storage.max_size // storage.lanes]).encode()

        said = [json.loads(one) for one in self._ranks.together("restore", open_it, self._timeout)]
        looks = verify == "read" and any(holds for _, holds, *_ in said)
        same = all(one[0] for one in said)
        return opened[0], None if same else [Target(lanes, length) for *_, lanes, length in said], looks

    @property
    def _in_rows(self) -> bool:
        """Whether rows of the buffer are no steps of trajectories, as its writer keeps the best ones."""
        return getattr(self._buffer.writer, "ranking", None) is not None

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """Whether this rank's shard is of a storage like the one here."""
        storage = self._buffer.storage
        with parts.open_storage(checkpoint, self._ranks.rank) as reader:
            geometry = reader.geometry
        if geometry is None or geometry.columns:
            return geometry is None or storage.ndim > 1
        return bool(storage.ndim == 1 and (geometry.capacity, geometry.lanes) == (storage.max_size, storage.lanes))

    def _planned(
        self,
        checkpoint: Checkpoint,
        stack: contextlib.ExitStack,
        targets: builtins.list[Target],
        planner: Planner,
        max_drop_fraction: float,
    ) -> Move:
        moves: builtins.list[Move] = []
        differing: builtins.list[str] = []

        def plan() -> bytes:
            self._check_takes(checkpoint)
            move = planner(open_shards(checkpoint, stack), targets)
            move.check_left_out(max_drop_fraction, f"restore: {checkpoint.folder}", _WAYS, _OTHERWISE)
            moves.append(move)
            differing.extend(disagreements(checkpoint, move))
            return move.plan.digest.encode()

        digests = self._ranks.together("restore", plan, self._timeout)
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise RankFailed(f"restore: expected the plan of rank 0 on all ranks, got others on ranks {other}.")
        for text in differing if self._ranks.rank == 0 else ():
            warn(f"restore: {checkpoint.folder.name}: {text}.")
        return moves[0]

    def _check_takes(self, checkpoint: Checkpoint) -> None:
        """Raise ``IncompatibleCheckpoint`` unless trajectories can be dealt out to the storage here."""
        storage = self._buffer.storage
        if storage.ndim > 1:
            got = f"one with ndim={storage.ndim}, whose columns advance together"
        elif not hasattr(storage, "checked_without_rows"):
            got = f"a {type(storage).__name__}"
        else:
            return
        raise IncompatibleCheckpoint(
            f"restore: {checkpoint.folder}: expected a storage of tensors with lanes to deal trajectories out to, got {got}. Make it "
            "with lanes=, or restore with as many ranks and into storages of the same kind and sizes as saved it."
        )

    def _placed(self, checkpoint: Checkpoint, move: Move, env_offset: int, *, default_rng: bool) -> Callable[[], None]:
        rank = self._ranks.rank
        state, fill = move.rows(rank, env_offset)
        take: Callable[[], None] = self._buffer.checked_placed(
            checkpoint,
            state,
            fill,
            leader=move.leader,
            seed=seed_of(checkpoint, self._ranks.world, rank),
            default_rng=default_rng,
        )
        return take

    def _take(self, check: Callable[[], Callable[[], None]], damaged: Checkpoint | None) -> None:
        """Take over what ``check`` returns, once all ranks have passed theirs; where one cannot then, all hold nothing.

        ``damaged``: a checkpoint that may be; the ranks share out its shards, and read the rows of each before that.
        """
        found: builtins.list[Callable[[], None]] = []
        loaded = False

        def look() -> bytes:
            found.append(check())
            if damaged is not None:
                for shard in range(self._ranks.rank, damaged.manifest.world, self._ranks.world):
                    with parts.open_storage(damaged, shard) as reader:
                        check_blocks(reader)
            return b""

        def load() -> bytes:
            nonlocal loaded
            found[0]()
            loaded = True
            return b""

        self._ranks.together("restore", look, self._timeout)
        try:
            self._ranks.together("restore", load, self._timeout)
        except BaseException:
            if loaded:
                self._buffer.empty()
            raise

    def _note(self, report: RestoreReport) -> None:
        """Log what was loaded, and keep what was dealt out in a file."""
        _log.info("restored %s", report)
        if report.dealt is None:
            return
        for line in move_lines(report.dealt):
            _log.info("%s: %s", report.name, line)
        if self._ranks.rank:
            return
        dropped = report.dealt["dropped"]
        if dropped["overflow"]["steps"]:
            warn(
                f"restore: {report.path}: {count(dropped['overflow']['steps'], 'step')} did not fit and were left out. Larger "
                'storages take more; overflow="fill" takes older trajectories that are shorter.'
            )
        folder = self.root / "reports"
        try:
            if not folder.is_dir():
                disk.make_folder(folder)
            raw = json.dumps({"checkpoint": report.name, "step": report.step, **report.dealt}, indent=1).encode()
            disk.put(folder / f"load-{report.name}-{secrets.token_hex(4)}.json", raw)
        except OSError as error:  # the rows are there
            warn(f"restore: the report could not be written: {error}")

    def _lost(self, checkpoint: Checkpoint) -> Lost:
        """What the last whole checkpoint of this job has of ranks whose shards are missing."""
        missing, manifest = checkpoint.missing, checkpoint.manifest
        path = series.latest(self.root, at_most=manifest.step)[0] if missing else None
        if path is None:
            return Lost(missing)
        with Checkpoint(path) as before:
            if before.manifest.world != manifest.world + len(missing):
                return Lost(missing)
            totals = [before.shard(rank).totals for rank in missing]
        return Lost(missing, path.name, sum(it.episodes for it in totals), sum(it.steps for it in totals))

    def _found(self, wanted: _Wanted) -> tuple[Path, builtins.list[Problem]]:
        """The checkpoint to load, and what was passed over."""
        if wanted.name is not None and wanted.at_most is not None:
            try:
                return self._found(wanted._replace(at_most=None))
            except (FileNotFoundError, CorruptCheckpoint) as error:
                path, problems = self._found(wanted._replace(name=None))
                why = str(error).removeprefix("restore: ")
                warn(f"restore: {path.name} is loaded, as: {why}")
                return path, problems
        if wanted.partial and (left := self._left(wanted)) is not None:
            return left, []
        if wanted.name is not None:
            if wanted.name not in map(str, series.names(self.root)):
                raise FileNotFoundError(
                    f"restore: {self.root}: expected a checkpoint called {wanted.name!r}, found none."
                )
            wrong = series.look(self.root / wanted.name)
            if wrong is not None:
                raise corrupt(*wrong)
            return self.root / wanted.name, []
        return self._newest(wanted) if wanted.step is None else self._of_step(wanted.step)

    def _newest(self, wanted: _Wanted) -> tuple[Path, builtins.list[Problem]]:
        """The newest that is whole, and what was passed over."""
        at_most, damaged = wanted.at_most, [problem.path.name for problem in wanted.damaged]
        path, problems = series.latest(self.root, at_most=at_most, without=damaged)
        passed_over = [*wanted.damaged, *problems]
        if path is None:
            what = "a checkpoint" if at_most is None else f"a checkpoint of a step of at most {at_most}"
            if passed_over:
                raise CorruptCheckpoint(
                    f"restore: {self.root}: expected {what}, found none that is whole: {'; '.join(map(str, passed_over))}"
                )
            steps = sorted({name.step for name in series.names(self.root)})
            raise FileNotFoundError(
                f"restore: {self.root}: expected {what}, found {f'the steps {steps}' if steps else 'none'}."
            )
        for problem in passed_over:
            warn(f"restore: {path.name} is loaded, and not: {problem}")
        return path, passed_over

    def _left(self, wanted: _Wanted) -> Path | None:
        """The newest that is whole, or of which shards are there."""
        for name in series.names(self.root):
            path = self.root / str(name)
            meant = (
                wanted.step in (None, name.step)
                and wanted.name in (None, str(name))
                and (wanted.at_most is None or name.step <= wanted.at_most)
            )
            damaged = any(path == problem.path for problem in wanted.damaged)
            if meant and not damaged and (series.look(path) is None or series.is_partial(path)):
                return path
        return None

    def _of_step(self, step: int) -> tuple[Path, builtins.list[Problem]]:
        named = [name for name in series.names(self.root) if name.step == step]
        if not named:
            steps = sorted({name.step for name in series.names(self.root)})
            raise FileNotFoundError(
                f"restore: {self.root}: expected a checkpoint of one of the steps {steps}, got {step}."
            )
        problems: builtins.list[Problem] = []
        for name in named:
            wrong = series.look(self.root / str(name))
            if wrong is None:
                return self.root / str(name), problems
            problems.append(wrong)
        raise CorruptCheckpoint(f"restore: no checkpoint of step {step} is whole: {'; '.join(map(str, problems))}")

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
        removed = series.prune(self.root, self._keep if keep is None else keep, self._attempts.epoch)
        self._forget_reports(removed)
        return removed

    def _forget_reports(self, removed: builtins.list[str]) -> None:
        """Remove what was noted of loads of checkpoints that are gone."""
        gone = tuple(f"load-{name}-" for name in removed)  # not patterns: pathlib and re would keep each
        for report in (self.root / "reports").glob("load-*.json"):
            if report.name.startswith(gone):
                report.unlink(missing_ok=True)
