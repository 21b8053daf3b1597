"""What is wrong with a file: said the same way by a load that stops and by a report that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engram.errors import CorruptCheckpoint

__all__ = ["Problem", "corrupt", "problem_of"]


class Problem(NamedTuple):
    """One file that is not as it must be."""

    path: Path
    what: str
    """What was expected and what was found."""
    offset: int | None = None
    """Byte in the file; None: the file as a whole."""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at byte {self.offset}"
        return f"{self.path}{where}: {self.what}."


def corrupt(path: Path, what: str, offset: int | None = None) -> CorruptCheckpoint:
    """The exception that says so."""
    return CorruptCheckpoint(Problem(path, what, offset))


def problem_of(error: CorruptCheckpoint) -> Problem:
    """What ``corrupt`` was told."""
    problem = error.args[0]
    return problem if isinstance(problem, Problem) else Problem(Path(), str(error).removesuffix("."))
