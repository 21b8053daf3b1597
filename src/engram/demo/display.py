"""Where training stands: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from engram.demo.task import BATCH

if TYPE_CHECKING:
    from rich.console import Console

    from engram.demo.progress import Progress

__all__ = ["Display"]


class Display:
    """Shows a run from ``with`` on.

    Args:
        console: where.
        progress: what.
        steps: environment steps, at most.
    """

    def __init__(self, console: Console, progress: Progress, steps: int) -> None:
        self._console = console
        self._progress = progress
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[extra]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=progress.steps, extra="")
        self._began = self._shown = time.perf_counter()
        self._updates = progress.updates

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def refresh(self) -> None:
        """Show it again if it is time."""
        now = time.perf_counter()
        if now - self._shown <= (0.2 if self._console.is_terminal else 5.0):
            return
        self._shown = now
        progress = self._progress
        ratio = progress.updates * BATCH / max(progress.steps, 1)
        rate = (progress.updates - self._updates) * BATCH / (now - self._began)
        status = f"return {progress.recent_return:.0f}, replay ratio {ratio:.0f}, {rate:,.0f} samples/s"
        self._bar.update(self._task, completed=progress.steps, extra=status)
        if not self._console.is_terminal:
            self._console.print(f"step {progress.steps}: {status}")
