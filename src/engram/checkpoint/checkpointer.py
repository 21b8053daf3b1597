"""A series of checkpoints of one buffer: incremental, atomic, in the background if wanted."""

from __future__ import annotations

import builtins
import contextlib
import errno
import logging
import os
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engram._progress import bytes_bar
from engram.checkpoint import buffers
from engram.checkpoint.roles import check_roles
from engram.checkpoint.runs import KINDS
from engram.errors import CorruptCheckpoint
from engram.format import series
from engram.format.checkpoints import Checkpoint, is_checkpoint, rank_folder
from engram.format.problems import corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.format.parts import PartReader
    from engram.format.problems import Problem

__all__ = ["Checkpointer", "Entry", "RestoreReport", "SaveHandle", "SaveReport"]

_log = logging.getLogger("engram")


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

    def __str__(self) -> str:
        episodes = ", ".join(f"{count['episodes']} {kind}" for kind, count in self.episodes.items())
        return (
            f"{self.name}: {self.steps} rows (episodes: {episodes or 'none'}; {self.lost_rows} overwritten meanwhile), "
            f"{self.bytes_written / 1e6:.1f} MB written and {self.bytes_linked / 1e6:.1f} MB linked in {self.seconds:.2f} s, "
            f"writers waited {self.paused_s * 1e3:.1f} ms"
        )


class RestoreReport(NamedTuple):
    """What was loaded."""

    name: str
    step: int
    path: Path
    steps: int
    user: dict[str, Any]
    passed_over: list[Problem]
    """Newer ones that were damaged or not complete."""
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.steps} rows in {self.seconds:.2f} s"


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

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        self._report, self._error = report, error
        self._over.set()


class _Parent(NamedTuple):
    """The checkpoint whose segments can be linked, as long as the storage's lineage is this."""

    path: Path
    lineage: Any


class Checkpointer:
    """Saves one buffer again and again below one folder, and restores it.

    Every checkpoint is complete by itself: files of rows that did not change since the last one are hard links to it, so that it
    costs what is new, and removing one harms no other. It exists when its last file does, which appears in one step. The buffer
    is written and sampled while it is saved; what is saved is as it was at one moment, at which writers wait for a copy of
    8 bytes per row and priority. Where many write, rows that are overwritten before they are copied are left out, and counted.

    Args:
        root: the folder; made if it is not there. One buffer per folder.
        buffer: what is saved.
        keep: how many checkpoints stay.
        full_every: every so many checkpoints are saved without links: a damaged disk block is shared by all that link it.
        paranoid: compare what is linked with the buffer: for tests of programs that write through views, which leaves no trace.
        roles: what fields mean, by key, where they are not called as usual: ``done``, ``terminated``, ``truncated``,
            ``step_type``, ``env_id``, ``traj_id``, ``position`` or ``data``.

    Raises:
        ValueError: ``keep`` or ``full_every`` below 1, or roles that there are not. TypeError: they are no ints.
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
        keep: int = 3,
        full_every: int | None = None,
        paranoid: bool = False,
        roles: Mapping[Any, str] | None = None,
    ) -> None:
        for name, value in (("keep", keep), ("full_every", 1 if full_every is None else full_every)):
            if type(value) is not int:
                raise TypeError(f"Checkpointer: {name}: expected an int, got {type(value).__name__}.")
            if value < 1:
                raise ValueError(f"Checkpointer: {name}: expected at least 1, got {value}.")
        check_roles(roles)
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
        self._epoch: int | None = None
        self._parent: _Parent | None = None
        self._since_full = 0
        self._lock = threading.Lock()
        self._handle: SaveHandle | None = None

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, user: Mapping[str, Any] | None = None, wait: bool = True) -> Any:
        """Make a checkpoint.

        While one is being made, another call joins that: it returns, or waits for, the same one.

        Args:
            step: of the training; orders checkpoints.
            user: JSON of yours, which :meth:`restore` gives back: the name of the model's checkpoint, say.
            wait: False: return a :class:`SaveHandle` at once.

        Returns:
            A :class:`SaveReport`, or the handle.

        Raises:
            KeyError: a key of ``roles`` is not stored.
            TypeError: state that cannot be saved, or ``user`` is not JSON; names the way to it.
            ValueError: ``step`` is negative.
            RuntimeError: a later process has taken this folder over; or ``paranoid`` found a row that was changed through a view.
            WriterStalled: a writer did not stop for 5 s.
            OSError: no space, or an I/O error. The last checkpoint stays as it is.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"save: step: expected an int of at least 0, got {step!r}.")
        work: Callable[[], None] | None = None
        with self._lock:
            handle = self._handle
            if handle is None or handle.done:
                handle = self._handle = SaveHandle()
                work = self._prepared(step, dict(user or {}), handle)
        if work is not None and wait:
            work()
        elif work is not None:
            try:
                threading.Thread(target=work, name="engram-save", daemon=True).start()
            except BaseException as error:
                handle._end(None, error)  # noqa: SLF001 - our own
                raise
        return handle.wait() if wait else handle

    def _prepared(self, step: int, user: dict[str, Any], handle: SaveHandle) -> Callable[[], None]:
        """Note the moment; what writes it."""
        started = time.perf_counter()
        try:
            if self._epoch is None:
                self._epoch = series.claim_epoch(self.root)
                series.recover(self.root, self._epoch)
            storage = self._buffer.storage
            cut = storage.prepare_cut()
            with storage.paused:
                paused = time.perf_counter()
                state = cut()
                parts = self._buffer.parts(noted=state["priorities"])
                lineage = storage.lineage()
                paused = time.perf_counter() - paused
        except BaseException as error:
            handle._end(None, error)  # noqa: SLF001 - our own
            raise

        def work() -> None:
            try:
                report = self._write(step, user, storage, state, parts, lineage, paused, started)
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                handle._end(None, error)  # noqa: SLF001
            else:
                handle._end(report, None)  # noqa: SLF001

        return work

    def _write(
        self,
        step: int,
        user: dict[str, Any],
        storage: Any,
        state: dict[str, Any],
        parts: buffers.Parts,
        lineage: Any,
        paused: float,
        started: float,
    ) -> SaveReport:
        assert self._epoch is not None  # as _prepared leaves it
        parent = self._parent_of(lineage)
        attempt = series.begin(
            self.root,
            step=step,
            epoch=self._epoch,
            world=1,
            trigger="save",
            parent=None if parent is None else parent.path.name,
            user=user,
        )
        try:
            rows, infos = self._write_parts(attempt / rank_folder(0, 1), storage, state, parts, parent)
            series.accept(
                attempt,
                0,
                infos,
                layout="segments",
                cut=rows.cut,
                totals=rows.totals,
                schema_sum=rows.schema_sum,
            )
            manifest = series.decide(attempt, self._epoch)
        except BaseException as error:
            self._refuse(attempt, error)
            raise
        if manifest is None or manifest.status != "complete":
            raise CorruptCheckpoint(
                f"save: {attempt.name}: {'; '.join(manifest.reasons) if manifest else 'no decision'}."
            )
        self._parent = _Parent(attempt, lineage)
        self._since_full = 0 if parent is None else self._since_full + 1
        series.set_latest(self.root, attempt.name, self._epoch)
        series.prune(self.root, self._keep, self._epoch)
        written, linked = sum(info.written for info in infos), sum(info.linked for info in infos)
        kinds = {kind: count for kind in KINDS if (count := getattr(rows.totals, kind)).episodes}
        report = SaveReport(
            attempt.name,
            step,
            attempt,
            rows.totals.steps,
            {kind: {"episodes": count.episodes, "steps": count.steps} for kind, count in kinds.items()},
            rows.cut.lost_rows,
            written,
            linked,
            paused,
            time.perf_counter() - started,
        )
        _log.info("saved %s", report)
        return report

    def _refuse(self, attempt: Path, error: BaseException) -> None:
        assert self._epoch is not None
        with contextlib.suppress(OSError, CorruptCheckpoint, RuntimeError):
            if series.decision(attempt) is not None:  # it is there, but perhaps not on disk yet
                return
            series.refuse(attempt, 0, f"{type(error).__name__}: {error}")
            series.decide(attempt, self._epoch)

    def _parent_of(self, lineage: Any) -> _Parent | None:
        """The checkpoint to link from: the last one of this very storage, if it is still there."""
        due = self._full_every is not None and self._since_full + 1 >= self._full_every
        parent = self._parent
        if parent is None or due or lineage is None or parent.lineage != lineage or series.look(parent.path):
            return None
        return parent

    def _write_parts(
        self, folder: Path, storage: Any, state: dict[str, Any], parts: buffers.Parts, parent: _Parent | None
    ) -> tuple[Any, list[Any]]:
        with contextlib.ExitStack() as stack:
            reader: PartReader | None = None
            if parent is not None:
                checkpoint = stack.enter_context(Checkpoint(parent.path))
                reader = stack.enter_context(checkpoint.part(0, buffers.STORAGE))
            progress = stack.enter_context(bytes_bar("saving", storage.nbytes))
            rows = storage.save_cut(
                folder / buffers.STORAGE,
                state,
                roles=self._roles,
                parent=reader,
                paranoid=self._paranoid,
                progress=progress,
            )
            return rows, [rows.info, *buffers.write_parts(folder, parts)]

    # ---- restoring -------------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        resume: Literal["env_reset", "exact"] = "env_reset",
        verify: Literal["read", "full"] = "read",
        default_rng: bool = False,
    ) -> RestoreReport:
        """Load a checkpoint into the buffer.

        Args:
            step: which one. Default: the newest that is whole; newer ones that are not are passed over, with a warning.
            resume: ``"env_reset"``: environments begin anew, so the trajectories that were open end where they are; the next row of
                their lanes is left out, which marks that. ``"exact"``: they go on, as after ``loads``.
            verify: ``"full"``: check every block before anything changes. ``"read"``: when it is read, if nothing is stored here;
                that halves what is read.
            default_rng: as for ``loads``.

        Returns:
            A :class:`RestoreReport`.

        Raises:
            FileNotFoundError: there is none, or none of that step.
            CorruptCheckpoint: that of ``step`` is damaged, or every one is. As ``loads``.
            IncompatibleCheckpoint: as ``loads``.
        """
        started = time.perf_counter()
        if resume not in ("env_reset", "exact"):
            raise ValueError(f"restore: resume: expected 'env_reset' or 'exact', got {resume!r}.")
        if verify not in ("read", "full"):
            raise ValueError(f"restore: verify: expected 'read' or 'full', got {verify!r}.")
        path, passed_over = self._found(step)
        with Checkpoint(path) as checkpoint:
            if verify == "full":
                for problem in checkpoint.problems("full"):
                    raise corrupt(*problem)
            take = self._buffer.checked_parts(checkpoint, default_rng=default_rng, close_open=resume == "env_reset")
            take()
            manifest, totals = checkpoint.manifest, checkpoint.shard(0).totals
        self._parent = _Parent(path, self._buffer.storage.lineage())
        report = RestoreReport(
            path.name, manifest.step, path, totals.steps, manifest.user, passed_over, time.perf_counter() - started
        )
        _log.info("restored %s", report)
        return report

    def _found(self, step: int | None) -> tuple[Path, list[Problem]]:
        """The checkpoint to load, and what was passed over."""
        if step is None:
            path, passed_over = series.latest(self.root)
            if path is None:
                if passed_over:
                    raise CorruptCheckpoint(
                        f"restore: {self.root}: no checkpoint is whole: {'; '.join(map(str, passed_over))}"
                    )
                raise FileNotFoundError(f"restore: {self.root}: expected a checkpoint, found none.")
            for problem in passed_over:
                warnings.warn(f"restore: {path.name} is loaded, and not: {problem}", stacklevel=3)
            return path, passed_over
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
        if self._epoch is None:
            self._epoch = series.claim_epoch(self.root)
        return series.prune(self.root, self._keep if keep is None else keep, self._epoch)
