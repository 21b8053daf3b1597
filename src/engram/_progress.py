"""Progress bars for work that is short except on the largest stores."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.progress import Progress, ProgressColumn, TaskID

CHUNK = 1 << 18
"""Rows to process between two looks at the clock."""
_SILENT_S = 1.0


def watch(left: Iterable[int], what: str) -> None:
    """Work through an iterable. On a terminal, a bar appears if that takes longer than a second.

    Args:
        left: each step does a piece of the work and yields how much is left.
        what: names the work.
    """
    pieces = iter(left)
    started = time.monotonic()
    for total in pieces:
        if total and time.monotonic() - started >= _SILENT_S:
            break
    else:
        return
    with _bar() as progress:
        task = progress.add_task(f"engram: {what}", total=total)
        for now in pieces:
            progress.update(task, completed=max(total - now, 0))


@contextlib.contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done since the last call. On a terminal, a bar with MB/s appears after a second.

    Args:
        what: names the work.
        total: bytes of the whole work.
    """
    started, done = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        shown: tuple[Progress, TaskID] | None = None

        def advance(count: int) -> None:
            nonlocal shown, done
            done += count
            if shown is None:
                if time.monotonic() - started < _SILENT_S:
                    return
                from rich.progress import DownloadColumn, TransferSpeedColumn

                progress = stack.enter_context(_bar(DownloadColumn(), TransferSpeedColumn()))
                shown = progress, progress.add_task(f"engram: {what}", total=total)
            shown[0].update(shown[1], completed=min(done, total))

        yield advance


def _bar(*columns: ProgressColumn) -> Progress:
    """A progress bar on the standard error stream, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    return Progress(
        *Progress.get_default_columns(), *columns, console=console, transient=True, disable=not console.is_terminal
    )
