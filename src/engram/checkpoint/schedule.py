"""When to save: after a number of steps or minutes, or when code, a signal or an HTTP request asks. All ranks save at one step."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from engram.checkpoint.options import Options
    from engram.checkpoint.save import SaveHandle
    from engram.ranks import Ranks

#: How many requests are remembered, for those who ask what became of theirs.
_REMEMBERED = 64


class Request:
    """A wish, and what became of it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.save: SaveHandle | None = None
        """The handle of the save that serves it; None: none has begun."""


class Requests:
    """Wishes of this rank that no save serves yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signalled = False
        self._open: Request | None = None
        self._known: dict[str, Request] = {}

    @property
    def any(self) -> bool:
        return self._signalled or self._open is not None

    def ask(self, *, join: bool = False) -> Request:
        """Ask for a save. From any thread, but not from a signal handler.

        Args:
            join: a save that has begun and is not over serves, too.
        """
        with self._lock:
            if self._open is not None:
                return self._open
            if join:
                for request in self._known.values():
                    if request.save is not None and not request.save.done:
                        return request
            self._open = Request()
            self._known[self._open.id] = self._open
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return self._open

    def find(self, name: str) -> Request | None:
        """The request of that id, if it is not forgotten."""
        with self._lock:
            return self._known.get(name)

    def latest(self) -> Request | None:
        """The last one that was asked for."""
        with self._lock:
            return next(reversed(self._known.values()), None)

    def note_signal(self, *_: object) -> None:
        """As :meth:`ask`, for signal handlers: takes no lock."""
        self._signalled = True

    def serve(self, save: SaveHandle) -> None:
        """This save serves all that was asked for. To be called before its moment, so that nothing is lost."""
        with self._lock:
            self._signalled = False
            if self._open is not None:
                self._open.save, self._open = save, None

    @contextlib.contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Inside, a signal requests a save. A handler that was set before is still called.

        Raises:
            ValueError: not called from the main thread.
        """

        def handle(received: int, frame: FrameType | None) -> None:
            self.note_signal()
            if callable(before):
                before(received, frame)

        before = signal.getsignal(number)
        signal.signal(number, handle)
        try:
            yield
        finally:
            signal.signal(number, before if before is not None else signal.SIG_DFL)


class Schedule:
    """When this rank wants a save, and when all agree to one.

    Args:
        ranks: of the job.
        options: of the Checkpointer.
    """

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self._ranks, self._options = ranks, options
        self.requests = Requests()
        self.stride = 1
        """Steps from one poll to the next, as far as is known."""
        self._polls = 0
        self._due = False
        self._began = time.monotonic()

    def began(self) -> None:
        """A save has begun, or a restore has ended."""
        self._began = time.monotonic()

    def advanced(self, steps: int) -> None:
        """So many steps passed since the last poll."""
        self.stride = max(1, steps)

    def agreed(self, before: int, step: int, *, able: bool) -> bool:
        """Whether all ranks begin a save now: one of them wants to, and each is able to.

        A rank that still writes the last save is not: training does not wait for that.

        Args:
            before: the step of the last poll.
            step: this one.
            able: whether this rank is.
        """
        options = self._options
        if options.every_steps is not None:
            self._due |= step // options.every_steps > before // options.every_steps
        self._polls += 1
        if not self._due and self._polls % options.poll_every:
            return False
        wish = int(self._due or self.requests.any or self._overdue()) if able else 2
        if self._ranks.max(wish, options.timeout) != 1:
            return False
        self._due = False
        return True

    def _overdue(self) -> bool:
        """Whether the clock asks for a save: that of rank 0, as others go otherwise."""
        every = None if self._ranks.rank else self._options.every_minutes
        return every is not None and time.monotonic() - self._began >= 60 * every
