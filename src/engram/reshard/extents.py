"""Rows that follow each other in a source and in a target, and how they are read and put there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engram import _native
from engram.format.sums import BLOCK
from engram.reshard.plan import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartReader
    from engram.persist.rows import Stretch

#: Bytes that are read at a time: as many as caches hold.
_WINDOW = 2 << 20


class Extents(NamedTuple):
    """Steps of one source that follow each other there and in the target, by their first row there.

    All int64 ``[K]`` and contiguous.
    """

    first: NDArray[np.int64]
    """Row of the source."""
    target: NDArray[np.int64]
    """Row of the target."""
    rows: NDArray[np.int64]
    """How many."""

    def near(self, begin: int, end: int) -> Extents:
        """Those with rows in ``[begin, end)`` of the source."""
        low = (self.first + self.rows).searchsorted(begin, "right")
        high = self.first.searchsorted(end)
        return Extents(self.first[low:high], self.target[low:high], self.rows[low:high])

    def windows(self, begin: int, end: int, most: int, gap: int) -> Iterator[tuple[int, int]]:
        """Rows of the source in ``[begin, end)`` among which there is something wanted: ``most`` at a time, without long gaps."""
        low, high = np.maximum(self.first, begin), np.minimum(self.first + self.rows, end)
        breaks = (low[1:] - high[:-1] >= gap).nonzero()[0]
        starts, stops = [low[0], *low[breaks + 1]], [*high[breaks], high[-1]]
        for start, stop in zip(map(int, starts), map(int, stops), strict=True):
            for at in range(start, stop, most):
                yield at, min(at + most, stop)


def _pairs(extents: Extents, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the source in ``[begin, end)`` that are wanted, and where they go."""
    first, target, rows = extents.near(begin, end)
    skipped = np.maximum(begin - first, 0)
    count = np.minimum(first + rows, end) - first - skipped
    step = within(count)
    return (first + skipped).repeat(count) + step, (target + skipped).repeat(count) + step


def zeroed_window(row_bytes: int = 0) -> Tensor:
    """Memory for a window, with the rest of the blocks at its ends."""
    return torch.empty(max(row_bytes, _WINDOW) + 2 * BLOCK, dtype=torch.uint8, device="cpu")


def windows(
    reader: PartReader, stretch: Stretch, extents: Extents, size: int, memory: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """What is wanted of a stretch, with little beside it: the number of the first row, and the bytes of it and those behind it.

    They are read in whole blocks, each of which is checked; the next ones come to the same memory.
    """
    wanted = extents.near(stretch.begin, stretch.end)
    if not size or not len(wanted.first):
        return
    for low, high in wanted.windows(stretch.begin, stretch.end, max(1, _WINDOW // size), max(1, BLOCK // size)):
        at = stretch.offset + (low - stretch.begin) * size
        skipped = at % BLOCK
        stop = min(-(-(at + (high - low) * size) // BLOCK) * BLOCK, reader.listing.files[stretch.file].bytes)
        reader.read(stretch.file, at - skipped, memory[: stop - at + skipped].numpy().data)
        yield low, memory[skipped : skipped + (high - low) * size]


def put(source: Tensor, begin: int, extents: Extents, tensor: Tensor) -> None:
    """Rows of a source, ``begin`` and those behind it, to their places in a field."""
    end = begin + len(source)
    near = extents.near(begin, end)
    if tensor.is_cpu:
        size = source.nbytes // max(1, len(source))
        _native.place_runs(
            source.data_ptr(),
            begin,
            len(source),
            torch.from_numpy(near.first),
            torch.from_numpy(near.target),
            torch.from_numpy(near.rows),
            tensor.data_ptr(),
            len(tensor),
            size,
            size if tensor.is_contiguous() else tensor.stride(0) * tensor.element_size(),
        )
        return
    at, to = (torch.from_numpy(column) for column in _pairs(near, begin, end))
    flat = tensor.reshape(len(tensor), -1).view(torch.uint8)
    flat.index_copy_(0, to.to(tensor.device), source.index_select(0, at - begin).to(tensor.device))


def put_by_run(source: Tensor, begin: int, extents: Extents, write: Callable[[int, Tensor], None]) -> None:
    """As :func:`put`, with a call that writes rows from one on: each run of rows that stay together by itself."""
    end = begin + len(source)
    for first, target, rows in zip(*(column.tolist() for column in extents.near(begin, end)), strict=True):
        skipped = max(begin - first, 0)
        write(target + skipped, source[first + skipped - begin : min(first + rows, end) - begin])
