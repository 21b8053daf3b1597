"""Work that several threads share: while one waits for the disk, another goes on."""

from __future__ import annotations

import _thread
import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Seconds between two looks at what may have ended unheard.
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


def begin(thread: threading.Thread) -> None:
    """Start a thread. An interrupt may come back from here, but does not keep the thread from running.

    ``Thread.start`` waits under a lock until the thread has begun. If an interrupt leaves that locked, the thread waits for ever, and
    so does the interpreter in the end. Here a thread waits that gets no interrupts.

    Raises:
        RuntimeError: there can be no more threads, or the interpreter ends.
    """
    begun = Ended()
    failed: list[BaseException] = []

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001 - the calling thread raises it
            failed.append(error)
        finally:
            begun.set()

    _thread.start_new_thread(start, ())
    begun.wait()
    if failed:
        raise failed[0]


def work_off(shares: Sequence[Iterable[Callable[[], object]]], threads: int) -> None:
    """Call all that the shares consist of: each share one after another, several shares at once.

    Raises what the first one that fails does, an interrupt too, once the others stopped.

    Args:
        shares: no two of them may touch the same thing at once.
        threads: at most, the calling thread included. Where there can be no more, it does all.
    """
    left = collections.deque(shares)
    failed: list[BaseException] = []
    ended: list[None] = []
    heard = _thread.allocate_lock()  # released when another helper has ended

    def help_out() -> None:
        _work(left, failed)
        ended.append(None)
        with contextlib.suppress(RuntimeError):  # it is released, and the waiting thread looks once more
            heard.release()

    # Bare threads cost little. Those of an executor are refused while the interpreter ends, and a save may end after the program.
    helpers: list[int] = []
    try:
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            for _ in range(min(threads, len(shares)) - 1):
                # Begun and noted in one call of C code, which no interrupt divides.
                helpers.extend(map(_thread.start_new_thread, (help_out,), ((),)))
        _work(left, failed)
    except BaseException as error:  # noqa: BLE001 - an interrupt between two lines
        failed.append(error)
    while len(ended) < len(helpers):  # they use what they were given: no second interrupt gives that free before
        try:
            heard.acquire(timeout=_LOOK_S)
        except KeyboardInterrupt as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _work(left: collections.deque[Iterable[Callable[[], object]]], failed: list[BaseException]) -> None:
    """Do one share after another, until there are no more or something failed in whatever thread."""
    try:
        while not failed:
            try:
                share = left.popleft()
            except IndexError:
                return
            for act in share:
                if failed:
                    return
                act()
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for all
        failed.append(error)
