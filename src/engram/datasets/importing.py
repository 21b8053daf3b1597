"""From a data set to a directory: episodes are written in order, and a note in the directory says how many are whole.

A killed import goes on behind the last episode of the note. What was written after it is written again, to the same rows.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import numpy as np
import xxhash

from engram._support.checks import check_path
from engram._support.field_paths import FieldPath, public
from engram._support.progress import Work
from engram._support.words import count
from engram.around import FinalObservations, NextFromFollowing
from engram.around.reading import MARK
from engram.buffer.replay_buffer import ReplayBuffer
from engram.datasets.blocks import REWARD, TRAJECTORY, Array, Block, Columns, DataSet, ImportArguments, Source, nested
from engram.errors import CorruptStore, IncompatibleStore, StoreInUse
from engram.format import files, layout
from engram.samplers import RandomSampler
from engram.storages import LazyMemmapStorage
from engram.types import StrPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: In the directory of the store: the note, the folder of observations after last steps, and a file that an import locks.
NOTE, FINALS, LOCK = "import.json", "finals", "import.lock"
RETURN: FieldPath = ("episode_return",)
#: Written bytes after which the pages of the rows are given back.
_FORGET_BYTES = 32 << 20
_libc = ctypes.CDLL(None)
_log = logging.getLogger("engram")


class Note(msgspec.Struct):
    """What ``import.json`` says."""

    source: dict[str, object]
    rows: int = 0
    episodes: int = 0
    returns: float = 0.0  # their sum
    complete: bool = False
    version: Literal[1] = 1

    @classmethod
    def read(cls, folder: Path, source: Source) -> Note | None:
        """None: there is none. Raises ``CorruptStore``: it cannot be read. ``IncompatibleStore``: it is of another data set."""
        try:
            note = msgspec.json.decode((folder / NOTE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CorruptStore(f"{folder / NOTE}: expected the note of an import ({error}).") from error
        asked = _identity(source)
        if differs := [key for key in asked if asked[key] != note.source.get(key)]:
            raise IncompatibleStore(
                f"{source.call}: {str(folder)!r} holds an import of another data set, or of one that has changed since: "
                f"{differs} differ. Use another directory, or remove this one."
            )
        return note

    def write(self, folder: Path) -> None:
        raw = msgspec.json.encode(self)
        files.overwrite(folder / NOTE, raw.ljust(-(-len(raw) // 512) * 512))  # the next one then fits in its place


def import_source(source: Source, directory: StrPath, arguments: ImportArguments) -> DataSet:
    """Import a data set, or the rest of it, and open the store read-only.

    Raises:
        DatasetError: the data set cannot be read or stored. What was whole stays, and the same call goes on with it.
        IncompatibleStore: the directory holds another import. FileExistsError: it holds something else.
        StoreInUse: another process imports into it.
    """
    folder = check_path(f"{source.call}: directory", directory)
    if source.rows < 1:
        raise source.refuse("expected at least one row, got none.")
    note = Note.read(folder, source)
    if note is None or not note.complete:
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, source.call):
            _import_rest(source, folder, arguments, fresh=fresh)
    return ReplayBuffer.open(folder, readonly=True, batch_size=arguments.get("batch_size", 256))


@contextmanager
def _locked(folder: Path, call: str) -> Iterator[None]:
    with files.Descriptor.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(f"{call}: another process imports into {str(folder)!r}. Wait for it.") from None
        yield
        (folder / LOCK).unlink()


def _import_rest(source: Source, folder: Path, arguments: ImportArguments, *, fresh: bool) -> None:
    note = Note.read(folder, source)  # another process may have been faster
    if note is None and [*folder.iterdir()] != [folder / LOCK]:
        (folder / LOCK).unlink()
        raise FileExistsError(
            17, f"{source.call}: expected a new directory, or one of an import, got files", str(folder)
        )
    note = note or Note(_identity(source))
    try:
        note.write(folder)
        if not note.complete:
            _Import(source, folder, note, arguments).run()
    except BaseException:
        if not note.rows and not layout.is_store(folder):  # nothing of it is there
            for name in (NOTE, LOCK):
                (folder / name).unlink()
            if fresh:
                folder.rmdir()
        raise


def _identity(source: Source) -> dict[str, object]:
    return cast("dict[str, object]", json.loads(json.dumps({"from": source.call, **source.identity()})))


class _Import:
    """One import, from its note to the end."""

    def __init__(self, source: Source, folder: Path, note: Note, arguments: ImportArguments) -> None:
        self._source, self._folder, self._note, self._arguments = source, folder, note, arguments
        self._show = arguments.get("show") or _log.info
        #: What the tags of final observations count from.
        self._first_tag = xxhash.xxh3_64_intdigest(msgspec.json.encode(note.source, order="deterministic")) >> 2
        self._buffer: DataSet | None = None
        self._finals: DataSet | None = None
        self._unforgotten = 0

    def run(self) -> None:
        note, source = self._note, self._source
        try:
            with Work("importing", source.rows, self._arguments.get("progress"), "rows") as work:
                work(note.rows)
                for block in source.blocks(note.rows, note.episodes):
                    self._write(block)
                    work.reach(note.rows)
            if note.rows != source.rows:
                raise source.refuse(f"expected {count(source.rows, 'row')}, got {note.rows}: steps of it are missing.")
            note.complete = True
            note.write(self._folder)
            mean = f"mean return {note.returns / note.episodes:.6g}"
            self._show(f"{self._folder}: {count(note.episodes, 'episode')} of {count(note.rows, 'row')}, {mean}")
        finally:
            for opened in (self._buffer, self._finals):
                if opened is not None:
                    opened.close()

    def _write(self, block: Block) -> None:
        """Write whole episodes, then note them."""
        note, lengths = self._note, block.lengths
        rows, episodes = int(lengths.sum()), len(lengths)
        if note.rows + rows > self._source.rows:
            raise self._source.refuse(f"expected {count(self._source.rows, 'row')}, got more.")
        columns = {path: self._storable(path, column) for path, column in block.columns.items()}
        numbers = np.arange(note.episodes, note.episodes + episodes)
        columns.setdefault(TRAJECTORY, np.repeat(numbers, lengths))
        returns = self._returns(columns, lengths[lengths > 0])
        finals: Columns = {(".".join(path),): self._storable(path, column) for path, column in block.finals.items()}
        if finals:
            finals["tag",] = tags = self._first_tag + numbers
            columns[MARK] = mark = np.full((rows, 2), -1)
            mark[np.cumsum(lengths)[lengths > 0] - 1] = np.stack([numbers, tags], 1)[lengths > 0]
        buffer = self._buffer or self._open(columns, [*block.finals])
        if self._finals is not None:
            self._put(self._finals, note.episodes, finals)
        self._put(buffer, note.rows, columns)
        note.rows, note.episodes, note.returns = note.rows + rows, note.episodes + episodes, note.returns + returns
        note.write(self._folder)

    def _storable(self, path: FieldPath, column: Array) -> Array:
        """A column as a store takes it: in the byte order of this machine. Raises ``DatasetError``: it holds no numbers."""
        if column.dtype.kind not in "biufc" or column.dtype.char in "gG":
            expected = f"field {public(path)!r}: expected numbers, got {column.dtype}"
            raise self._source.refuse(f"{expected}. Leave it out: rename={{name: None}}.")
        if path == TRAJECTORY:
            return column.reshape(len(column)).astype(np.int64)
        return column.astype(column.dtype.newbyteorder("="), copy=False)

    @staticmethod
    def _returns(columns: Columns, lengths: Array) -> float:
        """Add a field that says at each step what the rewards of its episode sum up to. The sum of all of them."""
        reward = columns.get(REWARD)
        if reward is None or reward.size != len(reward) or reward.dtype.kind == "c":  # no single numbers
            return 0.0
        sums = np.add.reduceat(reward.reshape(-1).astype(np.float64), np.cumsum(lengths) - lengths)
        columns.setdefault(RETURN, np.repeat(sums.astype(np.float32), lengths))
        return float(sums.sum())

    def _open(self, columns: Columns, finals: list[FieldPath]) -> DataSet:
        """The store, made for such rows if it is not there. ``finals``: observations that are kept of last steps."""
        source = self._source
        there = [path for path in columns if path[0] == "observation" and ("next", *path) not in columns]
        kept: FinalObservations | list[FieldPath] = there
        if finals:
            kept = FinalObservations(finals, _storage(self._folder / FINALS, source.finals))
            self._finals = ReplayBuffer(storage=kept.storage)
        sampler = NextFromFollowing(RandomSampler(), kept) if finals or there else RandomSampler()
        storage, batch_size = _storage(self._folder, source.rows), self._arguments.get("batch_size", 256)
        self._buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
        for old, new in source.names.items() if not self._note.rows else ():
            kind = "" if new is None else f"{public(new)!r}, {columns[new].dtype}{[*columns[new].shape[1:]]}"
            self._show(f"{public(old)!r}: {kind or 'left out'}")
        return self._buffer

    def _put(self, buffer: DataSet, first: int, columns: Columns) -> None:
        """Write rows from one on. Those that a killed import has written, or has begun, are replaced."""
        storage = cast("LazyMemmapStorage", buffer.storage)
        n, there = len(next(iter(columns.values()))), storage.extent().size if storage.initialized else 0
        again = min(max(there - first, 0), n)
        if again:
            storage.set(range(first, first + again), nested({path: column[:again] for path, column in columns.items()}))
        if again < n:
            buffer.extend(nested({path: column[again:] for path, column in columns.items()}))
        self._unforgotten += sum(column.nbytes for column in columns.values())
        if self._unforgotten > _FORGET_BYTES:
            self._unforgotten = 0
            for tensor in (*storage.store.tensors, *storage.store.control_memory):
                forget(tensor.data_ptr(), tensor.nbytes)


def _storage(folder: Path, rows: int) -> LazyMemmapStorage:
    if layout.is_store(folder):
        return LazyMemmapStorage.open(folder, io="map")
    return LazyMemmapStorage(rows, scratch_dir=folder, existsok=True, io="map")  # a kill may have left files


def forget(address: int, nbytes: int) -> None:
    """Take pages of a mapped file out of this process. What was written to them stays; the next look reads them again."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
