"""Who asks for a checkpoint: code, a signal, or a period. Asking only leaves a note; all ranks then save at one step."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Request", "Requests"]

#: How many requests are remembered, for those who ask what became of theirs.
_REMEMBERED = 64


class Request:
    """A wish, and what became of it."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.save: Any = None
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

    def serve(self, save: Any) -> None:
        """This save serves all that was asked for. To be called before its moment, so that nothing is lost."""
        with self._lock:
            self._signalled = False
            if self._open is not None:
                self._open.save, self._open = save, None

    @contextlib.contextmanager
    def listening(self, number: signal.Signals) -> Iterator[None]:
        """Inside, a signal asks for a save. Whoever handled it before still does.

        Raises:
            ValueError: not called from the main thread.
        """

        def handle(received: int, frame: Any) -> None:
            self.note_signal()
            if callable(before):
                before(received, frame)

        before = signal.getsignal(number)
        signal.signal(number, handle)
        try:
            yield
        finally:
            signal.signal(number, before if before is not None else signal.SIG_DFL)
