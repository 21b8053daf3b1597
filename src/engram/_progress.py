"""A bar for work that is short, but for the largest stores."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CHUNK", "watch"]

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
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"engram: {what}", total=total)
        for now in pieces:
            progress.update(task, completed=max(total - now, 0))
