"""Which checkpoint of a series a restore takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engram._words import warn
from engram.errors import CorruptCheckpoint
from engram.format import series
from engram.format.checkpoints import Checkpoint, added
from engram.format.problems import Problem, corrupt
from engram.reshard.reports import Lost

if TYPE_CHECKING:
    from pathlib import Path


class Wanted(NamedTuple):
    """Which checkpoint to load."""

    root: Path
    step: int | None = None
    name: str | None = None
    at_most: int | None = None
    """The largest step."""
    partial: bool = False
    """One that lacks shards will do."""
    damaged: tuple[Problem, ...] = ()
    """Folders that turned out to be damaged when they were read."""

    def check(self) -> None:
        """Raise ``ValueError``: ``step`` beside another."""
        for argument, other in (("at_most", self.at_most), ("name", self.name)):
            if self.step is not None and other is not None:
                raise ValueError(
                    f"restore: expected step or {argument}, got step={self.step} and {argument}={other!r}."
                )

    @property
    def is_open(self) -> bool:
        """Whether another checkpoint will do where one is damaged."""
        return self.step is None and self.name is None

    def find(self, known: series.Known) -> tuple[Path, list[Problem]]:
        """The checkpoint to load, and what was passed over.

        Raises:
            FileNotFoundError: there is none. CorruptCheckpoint: that one is damaged, or every one is.
        """
        if self.name is not None and self.at_most is not None:
            try:
                return self._replace(at_most=None).find(known)
            except (FileNotFoundError, CorruptCheckpoint) as error:
                path, problems = self._replace(name=None).find(known)
                why = str(error).removeprefix("restore: ")
                warn(f"restore: {path.name} is loaded, as: {why}")
                return path, problems
        if self.is_open and not self.partial:
            return self._newest(known)
        meant = [path for name in series.names(self.root) if self._means(name, path := self.root / str(name))]
        if self.partial:
            for path in meant:
                if series.look(path, known) is None or series.is_partial(path):
                    return path, []
        if self.is_open:
            return self._newest(known)
        if not meant:
            named = (
                f"called {self.name!r}, found none"
                if self.name
                else f"of one of the steps {steps}, got {self.step}"
                if (steps := self._steps())
                else f"of step {self.step}, found none at all. Call save(step) first"
            )
            raise FileNotFoundError(f"restore: {self.root}: expected a checkpoint {named}.")
        passed_over: list[Problem] = []
        for path in meant:
            wrong = series.look(path, known)
            if wrong is None:
                return path, passed_over
            passed_over.append(wrong)
        if self.name is not None:
            raise corrupt(*passed_over[0])
        raise self._none(
            passed_over, f"restore: no checkpoint of step {self.step} is whole: {'; '.join(map(str, passed_over))}"
        )

    def _none(self, passed_over: list[Problem], why: str) -> Exception:
        """What is raised where there is no checkpoint: that there is none yet, where each save was killed or given up."""
        if all(series.is_unfinished(self.root, problem) for problem in passed_over):
            return FileNotFoundError(f"{why} There is none yet, as no save has come to its end. Call save(step) first.")
        return CorruptCheckpoint(why)

    def _means(self, name: series.Name, path: Path) -> bool:
        """Whether that one will do, as far as its name says."""
        return (
            self.step in (None, name.step)
            and self.name in (None, str(name))
            and (self.at_most is None or name.step <= self.at_most)
            and all(path != problem.path for problem in self.damaged)
        )

    def _steps(self) -> list[int]:
        return sorted({name.step for name in series.names(self.root)})

    def _newest(self, known: series.Known) -> tuple[Path, list[Problem]]:
        """The newest that is whole, and what was passed over."""
        at_most, damaged = self.at_most, [problem.path.name for problem in self.damaged]
        path, problems = series.latest(self.root, at_most=at_most, without=damaged, known=known)
        passed_over = [*self.damaged, *problems]
        if path is None:
            what = "a checkpoint" if at_most is None else f"a checkpoint of a step of at most {at_most}"
            if passed_over:
                whole = f"expected {what}, found none that is whole: {'; '.join(map(str, passed_over))}"
                raise self._none(passed_over, f"restore: {self.root}: {whole}")
            found = (
                f"the steps {steps}"
                if (steps := self._steps())
                else "none. Call save(step) first, or name another folder"
            )
            raise FileNotFoundError(f"restore: {self.root}: expected {what}, found {found}.")
        for problem in passed_over:
            warn(f"restore: {path.name} is loaded, and not: {problem}")
        return path, passed_over


def lost_with(checkpoint: Checkpoint, root: Path) -> Lost:
    """What the last whole checkpoint of this job has of ranks whose shards are missing."""
    missing, manifest = checkpoint.missing, checkpoint.manifest
    path = series.latest(root, at_most=manifest.step)[0] if missing else None
    if path is None:
        return Lost(missing)
    with Checkpoint(path) as before:
        if before.manifest.world != manifest.world + len(missing):
            return Lost(missing)
        totals = added(before.shard(rank).totals for rank in missing)
    return Lost(missing, path.name, totals.episodes, totals.steps)
