"""Progress of work that is long on large stores: a bar on a terminal, lines in the log elsewhere, and a call of the user's."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeAlias

from engram._support.words import format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.progress import Progress as Bar

OnProgress: TypeAlias = "Callable[[Progress], object]"
#: Rows to process between two looks at the clock.
CHUNK = 1 << 18
#: Seconds before a bar appears, between two lines in the log, and between two calls of the user's function.
_SILENT_S, _LOGGED_S, _TOLD_S = 1.0, 10.0, 0.1
_log = logging.getLogger("engram")
_clock = time.monotonic
_NEVER = float("inf")


class Progress(NamedTuple):
    """The progress of some work, passed to the function that is given as ``progress=``.

    It is called at most ten times a second, by whatever thread does the work, one call at a time; and once more, with ``done`` equal to
    ``total``, when all is done. So short work calls it once. What it raises ends the work, as an I/O error would, and comes out of the
    call that it was passed to.

    >>> import torch
    >>> from engram import LazyTensorStorage, Progress, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend(torch.arange(10))
    >>> def show(it: Progress) -> None:
    ...     print(f"{it.what}: {it.done / it.total:.0%}")
    >>> rb.dumps("progress-example", progress=show)
    saving: 100%
    """

    #: ``"saving"``, ``"loading"``, ``"restoring"``, ``"checking"`` or ``"copying"``.
    what: str
    #: Bytes. It never becomes less, and is ``total`` at most.
    done: int
    #: Bytes, as far as is known by now: it grows where a damaged checkpoint is passed over. 0: not known yet; the last call has 1 or
    #: more.
    total: int


class Work:
    """Counts what threads have done of some work: call it with how much it was. ``with`` ends it.

    Args:
        what: names the work.
        total: of the whole work; 0: not known. It may be changed.
        told: called with a :class:`Progress`. None: a bar on a terminal, if the work takes longer than a second, or a line in the log
            every ten seconds.
        unit: of the numbers.
        quiet: no bar: other ranks show theirs.
    """

    def __init__(
        self,
        what: str,
        total: int = 0,
        told: OnProgress | None = None,
        unit: Literal["bytes", "rows"] = "bytes",
        *,
        quiet: bool = False,
    ) -> None:
        self.total = total
        self._what, self._told, self._unit = what, told, unit
        self._done = 0
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._began = now = _clock()
        self._thread = threading.get_ident()
        self._next_bar = _NEVER if quiet or told is not None else now + _SILENT_S
        self._next_line = now + _LOGGED_S
        self._next_call = _NEVER if told is None else now + _TOLD_S
        self._next = min(self._next_bar, self._next_line, self._next_call)

    def __enter__(self) -> Self:
        return self

    def __call__(self, count: int) -> None:
        """So much more is done. Raises what the user's function does."""
        with self._lock:
            self._done += count
            if _clock() >= self._next:
                self._tell()

    def reach(self, done: int) -> None:
        """So much is done."""
        self(max(0, done - self._done))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None and self._told is not None:
            total = max(1, self.total or self._done)
            self._told(Progress(self._what, total, total))

    def _tell(self) -> None:
        now = _clock()
        done = min(self._done, self.total) if self.total else self._done
        if self._told is not None and now >= self._next_call:
            self._next_call = now + _TOLD_S
            told, self._told = self._told, None  # what raises is not called again, by another thread
            told(Progress(self._what, done, self.total))
            self._told = told
        if now >= self._next_bar:
            self._next_bar = now if self._show(done) else _NEVER
        if now >= self._next_line:
            self._next_line = now + _LOGGED_S
            if self._bar is None:
                self._write(done, now - self._began)
        self._next = min(self._next_bar, self._next_line, self._next_call)

    def _write(self, done: int, seconds: float) -> None:
        divisor, unit = (1e9, "GB") if self._unit == "bytes" else (1e6, "million rows")
        of = f" of {self.total / divisor:,.2f} {unit} ({format_share(done / self.total)})" if self.total else f" {unit}"
        _log.info("%s: %.2f%s in %.0f s", self._what, done / divisor, of, seconds)

    def _show(self, done: int) -> bool:
        """Whether there is a terminal, and it is this work's to use."""
        if self._bar is None:
            if self._thread != threading.main_thread().ident:  # it would run into what that one prints
                return False
            bar = _bar(self._unit)
            if bar.disable:
                return False
            bar.add_task(f"engram: {self._what}")
            bar.start()
            self._bar = bar
        self._bar.update(self._bar.task_ids[0], completed=done, total=self.total or None)
        return True


def watch(left: Iterable[int], what: str) -> None:
    """Work through an iterable, and show that as :class:`Work` does.

    Args:
        left: each step does a piece of the work and yields how much is left.
        what: names the work.
    """
    pieces = iter(left)
    total = next(pieces, 0)
    if total:
        with Work(what, total, unit="rows") as work:
            for now in pieces:
                work.reach(total - now)


def _bar(unit: str) -> Bar:
    """A bar on the standard error stream; disabled if that is no terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    console = Console(file=sys.stderr)
    more = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else ()
    return Progress(
        *Progress.get_default_columns(), *more, console=console, transient=True, disable=not console.is_terminal
    )
