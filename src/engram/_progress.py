"""A bar for work that is short, but for the largest stores."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["CHUNK", "bytes_bar", "watch"]

CHUNK = 1 << 18
"""Rows to look at between two looks at the clock."""
_SILENT_S = 1.0


def watch(left: Iterable[int], what: str) -> None:
    """Go through pieces of work, with a bar on a terminal if that takes longer than a moment.

    Args:
        left: does a piece, and says how much is left then.
        what: the work is.
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
    """What is to be called with how many bytes were done, again and again: a bar with MB/s on a terminal, after a moment.

    Args:
        what: the work is.
        total: bytes of all of it.
    """
    started, done = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        progress: Any = None
        task: Any = None

        def advance(count: int) -> None:
            nonlocal progress, task, done
            done += count
            if progress is None:
                if time.monotonic() - started < _SILENT_S:
                    return
                from rich.progress import DownloadColumn, TransferSpeedColumn

                progress = stack.enter_context(_bar(DownloadColumn(), TransferSpeedColumn()))
                task = progress.add_task(f"engram: {what}", total=total)
            progress.update(task, completed=min(done, total))

        yield advance


def _bar(*columns: Any) -> Any:
    """A progress bar on the standard error stream, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    return Progress(
        *Progress.get_default_columns(), *columns, console=console, transient=True, disable=not console.is_terminal
    )
