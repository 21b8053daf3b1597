"""What is said of saves and restores: values for the caller, lines for the log, a file beside the checkpoints."""

from __future__ import annotations

import logging
import operator
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec

from engram._support import checks, words
from engram._support.progress import OnProgress
from engram.errors import CorruptCheckpoint
from engram.reshard import driver, plan
from engram.saved import attempts, checkpoints, description, disk, documents, rows
from engram.saved.series import Series


class AdvancedOptions(TypedDict, total=False):
    """Arguments of the constructor that few programs give: see :class:`Checkpointer`."""

    full_every: int | None
    paranoid: bool
    poll_every: int


class SaveArguments(TypedDict, total=False):
    """Keywords of ``Checkpointer.save`` on which what it returns does not depend."""

    user: Mapping[str, object] | None
    progress: OnProgress | None


class RestoreArguments(TypedDict, total=False):
    """Arguments of a restore whose checkpoint is known: see :meth:`Checkpointer.restore`."""

    incomplete: Mapping[str, str] | None
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float
    env_id: Literal["lane", "global"]
    resume: Literal["env_reset", "exact"]
    verify: Literal["read", "full"]
    allow_partial: bool
    default_rng: bool
    convert: bool
    progress: OnProgress | None


class Options(NamedTuple):
    """Arguments of the constructor: see :class:`Checkpointer`."""

    every_steps: int | None
    every_minutes: float | None
    keep: int
    on_failure: str
    prefetch: Literal["save", "drop"]
    roles: rows.Roles | None
    timeout: float
    full_every: int | None = None
    paranoid: bool = False
    poll_every: int = 10

    def check(self) -> None:
        """Raise ``ValueError``, ``TypeError`` unless all can be."""
        checks.check_choice("Checkpointer: on_failure", self.on_failure, ("raise", "warn"))
        checks.check_choice("Checkpointer: prefetch", self.prefetch, ("save", "drop"))
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"Checkpointer: every_minutes: expected minutes above 0, got {self.every_minutes!r}.")
        if not self.timeout > 0:
            raise ValueError(f"Checkpointer: timeout: expected seconds above 0, got {self.timeout!r}.")
        for name in ("keep", "full_every", "every_steps", "poll_every"):
            value = self._asdict()[name]
            if value is not None or name in ("keep", "poll_every"):
                checks.check_count(f"Checkpointer: {name}", value)
        rows.check_roles(self.roles)


class SaveRequest(NamedTuple):
    """The checked step and user state of a save."""

    step: int
    #: A copy.
    user: dict[str, object]


def checked_step(what: str, step: object) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}: step: expected an int of at least 0, got {step!r}.")
    return number


def checked_user(what: str, user: object) -> dict[str, object] | None:
    """As it comes back from a checkpoint."""
    if user is None:
        return None
    if not isinstance(user, Mapping):
        raise TypeError(f"{what}: user: expected a dict of JSON, got {type(user).__name__}.")
    return documents.copied(user)


class LatestStep(NamedTuple):
    """The latest step that this rank was given, and its user state: a crash checkpoint is of that."""

    step: int = 0
    user: dict[str, object] = {}  # noqa: RUF012 - a value
    #: Of the call that gave ``user``.
    user_step: int = 0

    def then(self, step: int, user: dict[str, object] | None) -> LatestStep:
        """After another call: that of an earlier step changes nothing that a later one has said."""
        latest = self if user is None or step < self.user_step else self._replace(user=user, user_step=step)
        return latest._replace(step=max(step, self.step))


class RestoreOptions(NamedTuple):
    """Arguments of a restore that say how a checkpoint is loaded: see :meth:`Checkpointer.restore`."""

    incomplete: Mapping[str, str] | None
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float
    env_id: str
    resume: str
    verify: str
    default_rng: bool
    convert: bool

    def check(self) -> None:
        """Raise ``ValueError``: one is out of its range."""
        checks.check_choice("restore: resume", self.resume, ("env_reset", "exact"))
        checks.check_choice("restore: verify", self.verify, ("read", "full"))
        checks.check_choice("restore: overflow", self.overflow, ("cut", "fill"))
        checks.check_choice("restore: env_id", self.env_id, ("lane", "global"))
        if not 0.0 <= self.max_drop_fraction <= 1.0:
            raise ValueError(
                f"restore: max_drop_fraction: expected a number from 0 to 1, got {self.max_drop_fraction!r}."
            )
        plan.checked_incomplete(self.incomplete)


_log = logging.getLogger("engram")
_FOLDER = "reports"


class SaveReport(NamedTuple):
    """The report of a save: what the checkpoint holds, and what it took.

    >>> import torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
    >>> checkpoints = Checkpointer("report-example", rb)
    >>> report = checkpoints.save(100)
    >>> report.step, report.steps
    (100, 10)
    """

    name: str
    step: int
    path: Path
    #: Rows that were saved.
    steps: int
    #: Trajectories and their steps, by what is there of them: ``complete``, ``open``, ``headless``, …
    episodes: dict[str, dict[str, int]]
    #: Rows that were overwritten before they were copied.
    lost_rows: int
    bytes_written: int
    #: Of files that are also an older checkpoint's.
    bytes_linked: int
    #: For how long writers waited.
    paused_s: float
    seconds: float
    #: Of ``episodes``, those that are dropped if ranks of another number or size load them, unless ``restore(incomplete=…)`` says
    #: otherwise.
    would_drop: dict[str, dict[str, int]] = {}  # noqa: RUF012 - a value

    def __str__(self) -> str:
        episodes = ", ".join(f"{it['episodes']:,} {kind}" for kind, it in self.episodes.items())
        return (
            f"{self.name}: {words.count(self.steps, 'row')} (episodes: {episodes or 'none'}; {self.lost_rows:,} overwritten meanwhile), "
            f"{words.format_size(self.bytes_written)} written and {words.format_size(self.bytes_linked)} linked in {self.seconds:.2f} s, "
            f"writers waited {self.paused_s * 1e3:.1f} ms"
        )


class RestoreReport(NamedTuple):
    """The report of a restore: what was loaded.

    >>> import torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
    >>> checkpoints = Checkpointer("restored-example", rb)
    >>> _ = checkpoints.save(100)
    >>> checkpoints.restore().step
    100
    """

    name: str
    step: int
    path: Path
    #: Rows that are there now.
    steps: int
    user: dict[str, object]
    #: Newer ones that were damaged or not complete.
    passed_over: list[documents.Problem]
    seconds: float
    #: Ranks whose shards there are none of.
    missing: tuple[int, ...] = ()
    #: If trajectories were redistributed: episodes and steps ``saved``, by ``kinds``, ``kept``, ``dropped`` by reason and
    #: ``truncated``, in total and of each of the ``shards``; ``lost`` with missing ones, as far as an older checkpoint says it; the least
    #: and most steps of a rank and of a lane and the rows that are unused, in total and of each of the ``targets``; and the digest of
    #: the ``plan``. None: every rank has its own shard.
    dealt: dict[str, Any] | None = None
    #: Rows of the own shard that are not there: the oldest of each full lane whose newest trajectory was open, as its place marks
    #: that this ends.
    given_up: int = 0
    #: With ``convert=True``, of a checkpoint of another sampler's buffer: how its rows are drawn now; else empty.
    converted: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {words.count(self.steps, 'row')} in {self.seconds:.2f} s"
        if self.given_up:
            text += f"; {self.given_up:,} more were saved: the oldest of full lanes mark where what was open ends"
        if self.dealt is not None:
            text += f"; {driver.format_reshard(self.dealt)}"
        return f"{text}; {self.converted}" if self.converted else text


class Entry(NamedTuple):
    """A checkpoint of a series."""

    name: str
    step: int
    path: Path
    #: Why it cannot be loaded; None: it can.
    problem: documents.Problem | None


def episodes_of(totals: documents.Totals) -> dict[str, dict[str, int]]:
    """Episodes and steps by kind; without the kinds that there are none of."""
    counts = msgspec.to_builtins(totals)
    return {kind: counts[kind] for kind in description.KINDS if counts[kind]["episodes"]}


def note_restore(root: Path, report: RestoreReport, rank: int) -> None:
    """Log what was restored. Rank 0 also keeps in a file how trajectories were redistributed."""
    _log.info("restored %s", report)
    if report.dealt is None:
        return
    alone = len(report.dealt["shards"]) == len(report.dealt["targets"]) == 1
    for line in () if alone else driver.reshard_lines(report.dealt):  # of one shard and one buffer, the report says all
        _log.info("%s: %s", report.name, line)
    if rank:
        return
    left = {reason: it["steps"] for reason, it in report.dealt["dropped"].items() if it["steps"]}
    if left:
        words.warn(_said_left(report, report.dealt["saved"]["steps"], left, report.dealt["unused"]))
    folder = root / _FOLDER
    try:
        if not folder.is_dir():
            disk.make_folder(folder)
        said = msgspec.json.encode({"checkpoint": report.name, "step": report.step, **report.dealt})
        raw = msgspec.json.format(said, indent=1)
        disk.put(folder / f"load-{report.name}-{secrets.token_hex(4)}.json", raw)
    except OSError as error:  # the rows are there
        words.warn(f"restore: the report could not be written: {error}")


def _said_left(report: RestoreReport, saved: int, left: dict[str, int], unused: int) -> str:
    """What is said of steps that were dropped, by reason, of all that were saved; ``unused`` rows hold nothing."""
    said = f"restore: {report.path}: {words.count(sum(left.values()), 'step')} of {saved:,} were left out"
    over, more = left.pop("overflow", 0), ""
    counts = [f"{steps:,} of {reason} episodes" for reason, steps in left.items()]
    if over:
        free = f" as whole trajectories, and {words.count(unused, 'row')} stay unused" if unused else ""
        counts.append(f"{words.count(over, 'step')} did not fit{free}")
        fill = '; overflow="fill" fills these rows with older trajectories that are shorter' if unused else ""
        more = f" Larger storages take more{fill}."
    if set(left) - {"oversize"}:
        more += ' restore(incomplete={"open": "keep", "headless": "keep"}) keeps incomplete episodes.'
    return f"{said}: {', '.join(counts)}.{more}"


def forget_reports(root: Path, removed: Iterable[str]) -> None:
    """Remove what was noted of loads of checkpoints that are gone."""
    gone = tuple(f"load-{name}-" for name in removed)  # not patterns: pathlib and re would keep each
    if not gone:
        return
    for report in (root / _FOLDER).glob("load-*.json"):
        if report.name.startswith(gone):
            report.unlink(missing_ok=True)


class Wanted(NamedTuple):
    """The checkpoint that a restore is asked for."""

    root: Path
    step: int | None = None
    name: str | None = None
    #: The largest step.
    at_most: int | None = None
    #: One that lacks shards will do.
    partial: bool = False
    #: Folders that turned out to be damaged when they were read.
    damaged: tuple[documents.Problem, ...] = ()

    def check(self) -> None:
        """Raise ``ValueError``: ``step`` beside another."""
        for argument, other in (("at_most", self.at_most), ("name", self.name)):
            if self.step is not None and other is not None:
                raise ValueError(f"restore: expected step or {argument}, got step={self.step}, {argument}={other!r}.")

    @property
    def is_open(self) -> bool:
        """Whether another checkpoint will do where one is damaged."""
        return self.step is None and self.name is None

    def find(self, series: Series) -> tuple[Path, list[documents.Problem]]:
        """The checkpoint to load, and what was passed over.

        Raises:
            FileNotFoundError: there is none. CorruptCheckpoint: that one is damaged, or every one is.
        """
        if self.name is not None and self.at_most is not None:
            try:
                return self._replace(at_most=None).find(series)
            except (FileNotFoundError, CorruptCheckpoint) as error:
                path, problems = self._replace(name=None).find(series)
                words.warn(f"restore: {path.name} is loaded, as: {str(error).removeprefix('restore: ')}")
                return path, problems
        if self.partial:
            for name in filter(self._means, attempts.names(self.root)):
                if series.look(name) is None or attempts.is_partial(self.root / str(name)):
                    return self.root / str(name), []
        if self.is_open:
            return self._newest(series)
        found, passed_over = series.first(self._means)
        if found is not None:
            return found, passed_over
        if not passed_over:
            none = f"of step {self.step}, found none at all. Call save(step) first"
            of_step = f"of one of the steps {steps}, got {self.step}" if (steps := self._steps()) else none
            named = f"called {self.name!r}, found none" if self.name else of_step
            raise FileNotFoundError(f"restore: {self.root}: expected a checkpoint {named}.")
        if self.name is not None:
            raise documents.corrupt(*passed_over[0])
        raise self._none(
            passed_over, f"restore: no checkpoint of step {self.step} is whole: {'; '.join(map(str, passed_over))}"
        )

    def _none(self, passed_over: list[documents.Problem], why: str) -> Exception:
        """What is raised where there is no checkpoint: that there is none yet, where each save was killed or given up."""
        if not self.partial and any(attempts.is_partial(problem.path) for problem in passed_over):
            why += " allow_partial=True loads what some of the ranks saved."
        if Series(self.root).is_unfinished():
            return FileNotFoundError(f"{why} There is none yet, as no save has come to its end. Call save(step) first.")
        return CorruptCheckpoint(why)

    def _means(self, name: attempts.Name) -> bool:
        """Whether that one will do, as far as its name says."""
        if self.step not in (None, name.step) or self.name not in (None, str(name)):
            return False
        early = self.at_most is None or name.step <= self.at_most
        return early and all(str(name) != problem.path.name for problem in self.damaged)

    def _steps(self) -> list[int]:
        return sorted({name.step for name in attempts.names(self.root)})

    def _newest(self, series: Series) -> tuple[Path, list[documents.Problem]]:
        """The newest that is whole, and what was passed over."""
        at_most, damaged = self.at_most, [problem.path.name for problem in self.damaged]
        path, problems = series.latest(at_most=at_most, without=damaged)
        passed_over = [*self.damaged, *problems]
        if path is None:
            what = "a checkpoint" if at_most is None else f"a checkpoint of a step of at most {at_most}"
            if passed_over:
                whole = f"expected {what}, found none that is whole: {'; '.join(map(str, passed_over))}"
                raise self._none(passed_over, f"restore: {self.root}: {whole}")
            steps, none = self._steps(), "none. Call save(step) first, or name another folder"
            found = f"the steps {steps}" if steps else none
            raise FileNotFoundError(f"restore: {self.root}: expected {what}, found {found}.")
        for problem in passed_over:
            words.warn(f"restore: {path.name} is loaded, and not: {problem}")
        return path, passed_over


def lost_with(checkpoint: checkpoints.Checkpoint, root: Path) -> driver.Lost:
    """What the last whole checkpoint of this job has of ranks whose shards are missing."""
    missing, manifest = checkpoint.missing, checkpoint.manifest
    path = Series(root).latest(at_most=manifest.step)[0] if missing else None
    if path is None:
        return driver.Lost(missing)
    with checkpoints.Checkpoint(path) as before:
        if before.manifest.world != manifest.world + len(missing):
            return driver.Lost(missing)
        totals = documents.added(before.shard(rank).totals for rank in missing)
    return driver.Lost(missing, path.name, totals.episodes, totals.steps)
