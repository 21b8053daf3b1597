"""Saves of a buffer whose rows other processes have: those write them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engram.checkpoint.save import SaveAttempt

if TYPE_CHECKING:
    from engram.checkpoint.job import Job
    from engram.checkpoint.options import Asked
    from engram.checkpoint.reports import SaveReport
    from engram.types import Savers


class SaveElsewhere(SaveAttempt):
    """A save by the ranks that have the rows, and the handle that its caller gets.

    Args:
        job: whose save.
        asked: what for.
        number: of the attempt.
        savers: of the buffer.
    """

    def __init__(self, job: Job, asked: Asked, number: int, savers: Savers) -> None:
        super().__init__(job, asked, number)
        self._wanted, self._savers = asked, savers

    def prepare(self) -> None:
        """Return when all snapshots are taken. Raises as ``Checkpointer.save``."""
        self._started = time.perf_counter()
        self._savers.begin(self._wanted.step, self._wanted.user)

    def _write(self) -> SaveReport:
        report = self._savers.end()
        self.path = report.path
        return report
