"""Checksums of files: xxh3-64 of each block of 256 KiB, so that a reader of some blocks can check them.

They find accidents. They do not prove who wrote a file.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Bytes of a block; the last one of a file may be shorter.
BLOCK = 1 << 18

_ZEROS = bytes(BLOCK)
_SUM_OF_ZEROS: int = xxhash.xxh3_64_intdigest(_ZEROS)


Sums: TypeAlias = "array[int]"


def blocks_of(nbytes: int) -> int:
    """How many blocks a file of that many bytes has."""
    return -(-nbytes // BLOCK)


class Summing:
    """Computes the sums of a file whose bytes come in order, in pieces of any size."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._open = xxhash.xxh3_64()
        self._filled = 0  # bytes of the block that is open

    def update(self, data: Buffer) -> None:
        """Add bytes. ``data``: C-contiguous."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        at = self._complete(view)
        while len(view) - at >= BLOCK:
            self._sums.append(xxhash.xxh3_64_intdigest(view[at : at + BLOCK]))
            at += BLOCK
        if at < len(view):
            self._open.update(view[at:])
            self._filled += len(view) - at

    def zeros(self, nbytes: int) -> None:
        """Add zero bytes. Cost: 8 bytes a block, none of them hashed."""
        first = min(nbytes, -self._filled % BLOCK)
        self.update(memoryview(_ZEROS)[:first])
        whole, rest = divmod(nbytes - first, BLOCK)
        self._sums.extend([_SUM_OF_ZEROS] * whole)
        self.update(memoryview(_ZEROS)[:rest])

    def done(self) -> Sums:
        """The sums of all blocks; the last one may be short. The object cannot be used afterwards."""
        if self._filled:
            self._sums.append(self._open.intdigest())
        return self._sums

    def _complete(self, view: memoryview) -> int:
        """Complete the open block. Returns how many bytes that took."""
        if not self._filled:
            return 0
        take = min(BLOCK - self._filled, len(view))
        self._open.update(view[:take])
        self._filled += take
        if self._filled == BLOCK:
            self._sums.append(self._open.intdigest())
            self._open.reset()
            self._filled = 0
        return take


def first_wrong(data: Buffer, sums: Sums, first: int) -> int | None:
    """The number of the first block whose bytes do not have its sum; None: all have.

    Args:
        data: bytes from the beginning of block ``first``; whole blocks, but for the last one of a file.
        sums: of all blocks of the file.
        first: number of a block.
    """
    view = memoryview(data)
    if not view.nbytes:
        return None
    view = view.cast("B")
    for i in range(blocks_of(len(view))):
        if xxhash.xxh3_64_intdigest(view[i * BLOCK : (i + 1) * BLOCK]) != sums[first + i]:
            return first + i
    return None


def pack(sums: Sums) -> bytes:
    """Sums as they lie in a file: u64, little-endian."""
    if sys.byteorder == "big":
        sums = sums[:]
        sums.byteswap()
    return sums.tobytes()


def unpack(raw: bytes) -> Sums:
    """Sums from a file, whose length is a multiple of 8."""
    sums = array("Q")
    sums.frombytes(raw)
    if sys.byteorder == "big":
        sums.byteswap()
    return sums
