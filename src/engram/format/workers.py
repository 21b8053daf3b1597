"""Work that several threads share: while one waits for the disk, another goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Ended", "work_off"]

#: Seconds between two looks at whether a thread is there, of which nothing was heard.
_LOOK_S = 0.1


class Ended:
    """Whether something has ended. A ``threading.Event`` is locked for ever if an interrupt arrives just as it takes its lock."""

    def __init__(self) -> None:
        self._is_set, self._wake = False, threading.Lock()
        self._wake.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # first: who waits looks at this from time to time
        with contextlib.suppress(RuntimeError):  # it was set before
            self._wake.release()

    def wait(self, timeout: float | None = None) -> bool:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_set and (left := until - time.monotonic()) > 0:
            if self._wake.acquire(timeout=min(left, _LOOK_S)):
                self._wake.release()
        return self._is_set


def work_off(shares: Sequence[Iterable[Callable[[], object]]], threads: int) -> None:
    """Call all that the shares consist of: each share one after another, several shares at once.

    Raises what the first one that fails does, an interrupt too, once the others stopped.

    Args:
        shares: no two of them may touch the same thing at once.
        threads: at most, the calling thread included. Where there can be no more, it does all.
    """
    left, turn = iter(shares), threading.Lock()
    failed: list[BaseException] = []

    def work(ended: Ended | None = None) -> None:
        """One share after another, until there are no more or something failed in whatever thread."""
        try:
            while not failed:
                with turn:
                    share = next(left, None)
                if share is None:
                    break
                for act in share:
                    if failed:
                        break
                    act()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for all
            failed.append(error)
        if ended is not None:
            ended.set()

    # Plain threads, as those of an executor are refused while the interpreter ends. Each says itself when it has ended: ``join``
    # takes a thread for ended that it was interrupted in waiting for.
    helpers: list[tuple[threading.Thread, Ended]] = []
    try:
        for _ in range(min(threads, len(shares)) - 1):
            ended = Ended()
            helpers.append((threading.Thread(target=work, args=(ended,), name="engram-worker"), ended))
            with contextlib.suppress(RuntimeError):  # there can be no more threads
                helpers[-1][0].start()
        work()
    except BaseException as error:  # noqa: BLE001 - an interrupt between two lines
        failed.append(error)
    if helpers:
        _join(helpers, failed)
    if failed:
        raise failed[0]


def _join(helpers: Sequence[tuple[threading.Thread, Ended]], failed: list[BaseException]) -> None:
    """Return when all have ended. They use what they were given: no second interrupt gives that free before.

    A thread without a number has not begun, as an interrupt ended its start, after which Python lists it for ever. If it begins yet,
    it sees the failure and touches nothing.
    """
    for helper, ended in helpers:
        while helper.ident is not None and not ended.is_set() and helper in threading.enumerate():
            try:
                ended.wait(_LOOK_S)
            except KeyboardInterrupt as error:
                failed.append(error)
