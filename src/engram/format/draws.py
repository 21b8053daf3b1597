"""Sampling logs: a file of records, appended to, of which a process that is killed leaves a torn one at most. docs/sampling-log.md
describes every byte.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import xxhash

from engram._words import said_size
from engram.errors import CorruptCheckpoint
from engram.format import disk, strict
from engram.format.files import Descriptor
from engram.format.problems import corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

_log = logging.getLogger("engram")

#: How a file begins: the last four bytes are the version, 1.0.
MAGIC = b"engram.draws" + struct.pack("<HH", 1, 0)
_MARK = b"DRAW"
#: Mark, kind, bytes of what follows the sum; then the sum of these and of what follows.
_HEAD = struct.Struct("<4sIQ")
_SUM = struct.Struct("<Q")
_OVERHEAD = _HEAD.size + _SUM.size
#: Kinds of records.
FORM, BATCH = 1, 2
_PIECE = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """An array of a batch."""

    key: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    """Behind the dimensions of the rows; of one without them, all of it."""
    plain: bool = True
    """Its key is a str, not a tuple of one."""
    whole: bool = False
    """It has no entry per row."""
    array: bool = False
    """It is a NumPy array."""


class Form(strict.Document, frozen=True, kw_only=True):
    """What batches of a sampler have, written before the first of them. Batches name it by its place in the file."""

    capacity: int
    lanes: int
    base: int
    """By how much tickets of the store are larger than those that are written here."""
    sampler: str
    around: tuple[str, ...]
    """Classes of the expanders, the innermost first."""
    steps: int
    """Of each window, where rows are ``[B, T]``; 0: they are ``[n]``."""
    row_bytes: int
    columns: tuple[Entry, ...]
    """Fields of the batch, as they were read."""
    computed: tuple[Entry, ...]
    """Entries that expanders made of the steps around each row."""
    said: tuple[Entry, ...]
    """What the sampler said besides, such as weights and masks: their values are in the record."""
    format: Literal["engram.draws"] = "engram.draws"


class Batch(NamedTuple):
    """The record of one batch, but for its arrays."""

    form: int
    """Where the record of its form begins."""
    key: int
    digest: bytes
    """xxh3-128 of columns and computed entries, in the order of the form."""
    first_ticket: int
    """The smallest; those of the rows are written as what they are larger."""
    batch_size: int
    """That was asked for."""
    rows: int
    kept: int
    """Rows whose values are in the record, too, as steps after them were not written yet."""
    ticket_bytes: int

    def packed(self) -> bytes:
        """The bytes before the arrays."""
        return _BATCH.pack(*self)

    @classmethod
    def unpacked(cls, raw: memoryview, where: str) -> tuple[Batch, memoryview]:
        """A record, and its arrays. Raises ``CorruptCheckpoint``: it is none."""
        if len(raw) < _BATCH.size:
            raise CorruptCheckpoint(f"{where}: expected at least {_BATCH.size} bytes of a batch, got {len(raw)}.")
        made = cls(*_BATCH.unpack(raw[: _BATCH.size]))
        if made.ticket_bytes not in (4, 8) or made.kept > made.rows:
            raise CorruptCheckpoint(f"{where}: expected the sizes of a batch, got {made}.")
        return made, raw[_BATCH.size :]


_BATCH = struct.Struct("<QQ16sqIIII")


def _sum(head: bytes, parts: Sequence[Buffer]) -> bytes:
    summing = xxhash.xxh3_64(head)
    for part in parts:
        summing.update(part)
    return _SUM.pack(summing.intdigest())


class Appending:
    """A log that is open for writing, by one process at a time.

    Args:
        path: of the file; created if it is missing. A torn record at its end is cut off.

    Raises:
        RuntimeError: another process or object writes to it. CorruptCheckpoint: it is no log, or damaged before its end.
        OSError: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Descriptor.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        self.closed = False
        try:
            self._end = self._prepared()
        except BaseException:
            self._file.close()
            raise

    def _prepared(self) -> int:
        """Where records are appended."""
        fd = self._file
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise corrupt(self.path, "expected a regular file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"SamplingLog: {self.path}: expected a file of its own, but another process or SamplingLog writes to it. Give each "
                "process another path."
            ) from None
        size = os.fstat(fd).st_size
        if size < len(MAGIC) and MAGIC.startswith(os.pread(fd, size, 0)):  # new, or killed before the first record
            os.ftruncate(fd, 0)
            disk.write(fd, MAGIC, 0)
            return len(MAGIC)
        reading = Records(self.path, fd)
        for _ in reading:
            pass
        if reading.torn:
            _log.warning("%s: %s of a torn record were cut off", self.path, said_size(reading.torn))
            os.ftruncate(fd, reading.end)
        return reading.end

    def append(self, kind: int, *parts: Buffer) -> int:
        """Write a record: where it begins. It outlives the process when this returns.

        Raises:
            OSError: no space, or an I/O error. The log ends before it.
        """
        begin = self._end
        head = _HEAD.pack(_MARK, kind, sum(memoryview(part).nbytes for part in parts))
        fd, raw = self._file, b"".join([head, _sum(head, parts), *parts])
        try:
            disk.write(fd, raw, begin)
        except OSError:
            os.ftruncate(fd, begin)
            raise
        self._end = begin + len(raw)
        return begin

    def let_go(self) -> None:
        """In a forked child: its copy of the descriptor would keep the file locked when the parent has died."""
        self.closed = True
        self._file.close()

    def close(self) -> None:
        """Wait until all is on disk, and close the file. Repeatable."""
        if not self.closed:
            self.closed = True
            try:
                os.fsync(self._file)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)  # which a child that was just forked would hold on
                self._file.close()


class Record(NamedTuple):
    """A record of a log."""

    begin: int
    kind: int
    raw: memoryview


class Records:
    """The records of a log, in order. Ends before a record that is torn: one that nothing whole follows.

    Args:
        path: for messages.
        fd: of the file. It is read at offsets, so others may use it meanwhile.

    Raises ``CorruptCheckpoint``, also while iterating: no log, one of a newer version, or a damaged record.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self.end = len(MAGIC)
        """Behind the last whole record so far."""
        self.torn = 0
        """Bytes behind that, in the end."""

    def __iter__(self) -> Iterator[Record]:
        path, begun = self._path, os.pread(self._fd, len(MAGIC), 0)
        if begun != MAGIC:
            raise corrupt(
                path, f"expected a sampling log of version 1.0, which begins with {MAGIC!r}, got {begun!r}", 0
            )
        size = os.fstat(self._fd).st_size
        while self.end < size:
            record = self._record(self.end, size)
            if record is None:
                if self._whole_one_follows(self.end + 1, size):
                    raise corrupt(path, "expected a record, found damage; whole records follow it", self.end)
                self.torn = size - self.end
                return
            self.end += _OVERHEAD + len(record.raw)
            yield record

    def _record(self, begin: int, size: int) -> Record | None:
        """The record at a place; None: there is none."""
        head = os.pread(self._fd, _OVERHEAD, begin)
        if len(head) < _OVERHEAD:
            return None
        mark, kind, nbytes = _HEAD.unpack(head[: _HEAD.size])
        if mark != _MARK or nbytes > size - begin - _OVERHEAD:
            return None
        raw = bytearray(nbytes)
        if disk.read(self._fd, memoryview(raw), begin + _OVERHEAD) != nbytes:
            return None
        if _sum(head[: _HEAD.size], [raw]) != head[_HEAD.size :]:
            return None
        return Record(begin, kind, memoryview(raw))

    def _whole_one_follows(self, begin: int, size: int) -> bool:
        for first in range(begin, size, _PIECE):
            piece = os.pread(self._fd, _PIECE + len(_MARK) - 1, first)
            at = piece.find(_MARK)
            while at >= 0:
                if self._record(first + at, size) is not None:
                    return True
                at = piece.find(_MARK, at + 1)
        return False
