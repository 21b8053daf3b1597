"""Rows that are read by several threads: while one waits for the disk, another checks and places what it has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

__all__ = ["READERS", "read_at_once"]

#: Threads. Disks give more to two than to one; what is left then is work for processors, which training needs.
READERS = 2


def read_at_once(shares: Sequence[Iterable[Callable[[], object]]], into: Sequence[Tensor]) -> None:
    """Call all that the shares consist of: each share one after another, several shares at once.

    Shares must not touch the same reader or the same rows. Tensors on a device are filled by this thread alone, as what is
    launched there belongs to its stream. Raises what the first share that fails did, after the others stopped.
    """
    given_up = threading.Event()

    def work(share: Iterable[Callable[[], object]]) -> None:
        for act in share:
            if given_up.is_set():
                return
            act()

    if not all(tensor.is_cpu for tensor in into):
        for share in shares:
            work(share)
        return
    with ThreadPoolExecutor(READERS, "engram-read") as pool:
        try:
            for done in [pool.submit(work, share) for share in shares]:
                done.result()
        finally:
            given_up.set()
