"""Reading in several threads: while one waits for the disk, another checks and places rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.format.workers import work_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

#: Threads, the caller's included. Disks give more to two than to one; beyond that it is the processors that training needs.
READERS = 2


def parallel_read(shares: Sequence[Iterable[Callable[[], object]]], into: Sequence[Tensor]) -> None:
    """Call all that the shares consist of, in several threads, as :func:`work_off` does.

    Shares must not touch the same reader or the same rows at once. Tensors on a device are filled by this thread alone, as what is
    launched there belongs to its stream.
    """
    work_off(shares, READERS if all(tensor.is_cpu for tensor in into) else 1)
