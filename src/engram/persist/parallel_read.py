"""Reading in several threads: while one waits for the disk, another checks and places rows."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

__all__ = ["READERS", "parallel_read"]

#: Threads, the caller's included. Disks give more to two than to one; beyond that it is the processors that training needs.
READERS = 2
#: Seconds between two looks at whether a thread is there, of which nothing was heard.
_LOOK_S = 0.1


def parallel_read(shares: Sequence[Iterable[Callable[[], object]]], into: Sequence[Tensor]) -> None:
    """Call all that the shares consist of: each share one after another, several shares at once.

    Shares must not touch the same reader or the same rows at once. Tensors on a device are filled by this thread alone, as what is
    launched there belongs to its stream. Raises what the first one that fails does, an interrupt too, once the others stopped.
    """
    work = _Work(shares)
    helpers: list[_Helper] = []
    try:
        for _ in range(min(READERS, len(shares)) - 1 if all(tensor.is_cpu for tensor in into) else 0):
            helpers.append(_Helper(work))
            with contextlib.suppress(RuntimeError):  # there can be no more threads: this one does it all
                helpers[-1].start()
        work.do()
    except BaseException as error:  # noqa: BLE001 - an interrupt between two lines
        work.failed.append(error)
    for helper in helpers:
        while helper.is_at_it():  # it writes to the rows: no second interrupt gives them free before
            try:
                helper.ended.wait(_LOOK_S)
            except KeyboardInterrupt as error:
                work.failed.append(error)
    if work.failed:
        raise work.failed[0]


class _Work:
    """Shares that are still to be done."""

    def __init__(self, shares: Sequence[Iterable[Callable[[], object]]]) -> None:
        self._shares, self._turn = iter(shares), threading.Lock()
        self.failed: list[BaseException] = []

    def do(self) -> None:
        """One share after another, until there are no more or something failed in whatever thread."""
        try:
            while not self.failed:
                with self._turn:
                    share = next(self._shares, None)
                if share is None:
                    return
                for act in share:
                    if self.failed:
                        return
                    act()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for all
            self.failed.append(error)


class _Helper(threading.Thread):
    """A plain thread, as those of an executor are refused while the interpreter ends.

    It says itself when it has ended: ``join`` takes a thread for ended that it was interrupted in waiting for.
    """

    def __init__(self, work: _Work) -> None:
        super().__init__(name="engram-read")
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work.do()
        finally:
            self.ended.set()

    def is_at_it(self) -> bool:
        return not self.ended.is_set() and self in threading.enumerate()
