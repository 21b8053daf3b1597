"""Folders that TorchRL's ``ReplayBuffer.dumps`` wrote: described, checked, and read piece by piece.

:func:`read` opens every description, looks at the size of every file and reads what is small: priorities, ranks, generator.
What it returns is fit to be loaded; rows and items are read out of the folder afterwards. Nothing in the folder is
written, created or mapped, nothing is opened through a link, and no pickle is opened at all. TorchRL keeps no sums: of the
rows only the number of bytes can be checked.

The module is a :class:`engram.saved.checkpointers.ForeignFormat`.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engram._support.words import warn
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import Schema
from engram.saved.folder import Folder
from engram.torchrl.checkpointers import checkpointer
from engram.torchrl.components import (
    Buffer,
    DumpedStorage,
    Places,
    described_writer,
    find_pickles,
    read_rng,
    read_sampler,
    read_writer,
)
from engram.torchrl.items import CompressedItems, TorchRLDump, TorchRLItems, TorchRLSteps, is_compressed, validate
from engram.torchrl.layouts import Count, Keys
from engram.torchrl.parts import Layout, prepare_layout
from engram.torchrl.states import read_state

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from engram.saved.checkpointers import DumpedPriorities, SavedStorage
    from engram.types import StorageLoad

__all__ = ["checkpointer", "layout", "library", "prepare_layout", "read", "read_ensemble", "read_state", "recognises"]

library = "TorchRL"
_MARK = "buffer_metadata.json"
_OURS = "manifest.json"


class _Members(msgspec.Struct):
    empty_members: tuple[Count, ...]


class EmptyMember(NamedTuple):
    """A buffer of an ensemble that held nothing: TorchRL saves its sampler and its writer."""

    path: Path
    priorities: DumpedPriorities | None
    batch_size: int | None = None
    rng_state: Tensor | None = None
    nbytes: int = 0

    def prepare(self, storage: SavedStorage, without: Collection[str]) -> StorageLoad:
        """What empties a storage."""
        del without
        return storage.prepare_unwritten()


class TorchRLEnsemble(NamedTuple):
    """A checked dump of a ``ReplayBufferEnsemble``."""

    path: Path
    batch_size: int | None
    rng_state: Tensor | None
    members: tuple[TorchRLDump | TorchRLItems | EmptyMember, ...]
    left_out: tuple[str, ...]
    """What is in the folder and not here, each with its reason."""


def recognises(path: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like one that TorchRL's ``dumps`` wrote, and not like one of ours. Nothing is opened."""
    folder = Path(path)
    try:
        return stat.S_ISREG(os.lstat(folder / _MARK).st_mode) and not os.path.lexists(folder / _OURS)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read(path: str | os.PathLike[str], *, ndim: int = 1, max_bytes: int | None = None) -> TorchRLDump | TorchRLItems:
    """Describe and check a folder that TorchRL's ``ReplayBuffer.dumps`` wrote, of one buffer.

    Warns once, naming what is left out: pickles, which are never opened, and entries that are no tensors.

    Args:
        path: the folder.
        ndim: that of the storage it is for, 1 or 2: a dump does not say how many dimensions index rows. With more, neither
            does it say in which order they are, as TorchRL swaps the first and the last.
        max_bytes: what all rows of the storage may take, live or not, or all items. None: any number.

    Raises:
        CorruptCheckpoint: a missing, truncated, overlong or linked file, a description that is none or contradicts
            another, priorities that are not finite and at least 0. Names the file.
        IncompatibleCheckpoint: an ensemble, a dtype that cannot be stored, another ``ndim`` or one above 2, more than ``max_bytes``.
        OSError: the folder is not there or not readable.

    Cost: O(fields), and O(length) for priorities, ranks and descriptions of items; no rows are read.
    """
    folder = Folder(Path(path))
    buffer = folder.described(Buffer, (_MARK,))
    if _is_ensemble(folder):
        raise IncompatibleCheckpoint(
            f"{folder.name(('storage',))}: expected the rows of one buffer, got those of an ensemble. Load the dump into a "
            "ReplayBufferEnsemble of as many buffers."
        )
    left_out = find_pickles(folder, ((), ("sampler",), ("writer",)))
    dump = _read_buffer(folder, Places(), ndim, max_bytes, buffer, left_out)
    _tell(path, left_out)
    return dump


def read_ensemble(
    path: str | os.PathLike[str], ndims: Sequence[int], *, max_bytes: int | None = None
) -> TorchRLEnsemble:
    """As :func:`read`, of a ``ReplayBufferEnsemble``.

    Args:
        path: the folder.
        ndims: of the storage of each buffer.
        max_bytes: what all of them may take.

    Raises: as :func:`read`. IncompatibleCheckpoint, too: of one buffer, or of another number of them.
    """
    folder = Folder(Path(path))
    buffer = folder.described(Buffer, (_MARK,))
    if not _is_ensemble(folder):
        raise IncompatibleCheckpoint(
            f"{folder.name(('storage',))}: expected the rows of an ensemble, got those of one buffer. Load the dump into a "
            "ReplayBuffer, such as one of the buffers here: ensemble[i].loads(path)."
        )
    numbers = range(len(ndims))
    empty = _empty_members(folder, len(ndims))
    left_out = find_pickles(folder, ((), ("storage",)))
    members: list[TorchRLDump | TorchRLItems | EmptyMember] = []
    for number, ndim in zip(numbers, ndims, strict=True):
        places = Places.of_member(number)
        left_out += find_pickles(folder, places[1:])
        if number in empty:
            members.append(EmptyMember(folder.path, read_sampler(folder, places.sampler, 0, left_out)))
            continue
        if _is_ensemble(folder, places.storage):
            raise IncompatibleCheckpoint(
                f"{folder.name(places.storage)}: expected the rows of one buffer, got those of an ensemble in an ensemble. Load it with "
                "TorchRL, and dump that by itself."
            )
        left = None if max_bytes is None else max(0, max_bytes - sum(one.nbytes for one in members))
        members.append(_read_buffer(folder, places, ndim, left, None, left_out))
    _tell(path, left_out)
    return TorchRLEnsemble(folder.path, buffer.batch_size, read_rng(folder), tuple(members), tuple(left_out))


def _tell(path: str | os.PathLike[str], left_out: Sequence[str]) -> None:
    if left_out:
        warn(
            f"{path}: not read, and lost unless you set it up again: {'; '.join(left_out)}. Pickles are never opened. "
            "(The dump has no checksums: sizes and descriptions were checked.)"
        )


def _read_buffer(
    folder: Folder, places: Places, ndim: int, max_bytes: int | None, buffer: Buffer | None, left_out: list[str]
) -> TorchRLDump | TorchRLItems:
    """One buffer, or one of an ensemble, without ``buffer``. Notes what is left out."""
    batch_size = None if buffer is None else buffer.batch_size
    rng_state = None if buffer is None else read_rng(folder)
    if is_compressed(folder, places.storage):
        return _read_items(folder, places, max_bytes, left_out)._replace(batch_size=batch_size, rng_state=rng_state)
    if ndim > 2:
        raise IncompatibleCheckpoint(
            f"{folder.path}: expected a storage with ndim of 1 or 2, got {ndim}: a dump does not say in which order the dimensions "
            "are. Load it with TorchRL and extend the buffer with its rows."
        )
    storage = DumpedStorage(folder, places.storage, ndim)
    storage.read()
    fields = tuple(storage.fields)
    whole = Schema(storage.slots * math.prod(storage.columns), 1, storage.columns, fields, storage.structure)
    validate(whole, folder.path)
    if max_bytes is not None and whole.capacity * whole.row_bytes > max_bytes:
        raise IncompatibleCheckpoint(
            f"{folder.path}: expected at most {max_bytes} bytes, got {whole.capacity} rows of {whole.row_bytes} bytes. Raise max_bytes."
        )
    position, count = read_writer(folder, places.writer, storage)
    priorities = read_sampler(folder, places.sampler, storage.length, storage.left_out)
    left_out += storage.left_out
    found = {} if storage.layout is None else {"_layout": storage.layout}
    return (TorchRLDump if storage.layout is None else TorchRLSteps)(
        path=folder.path,
        capacity=whole.capacity,
        columns=storage.columns,
        length=storage.length,
        position=position,
        write_count=count,
        fields=fields,
        structure=storage.structure,
        batch_size=batch_size,
        priorities=priorities,
        rng_state=rng_state,
        left_out=tuple(left_out),
        _files=storage.files,
        **found,
    )


def _read_items(folder: Folder, places: Places, max_bytes: int | None, left_out: list[str]) -> TorchRLItems:
    items = CompressedItems(folder, places.storage, max_bytes)
    left_out += items.left_out
    writer = described_writer(folder, places.writer)
    cursor, count = (len(items), None) if writer is None else (writer.cursor, writer.write_count)
    if cursor > len(items):
        name = folder.name((*places.writer, "metadata.json"))
        raise CorruptCheckpoint(
            f"{name}: expected a cursor of at most {len(items)}, as many as are live, got {cursor}."
        )
    priorities = read_sampler(folder, places.sampler, len(items), left_out)
    return TorchRLItems(folder.path, items, cursor, count, None, priorities, None, tuple(left_out))


def _is_ensemble(folder: Folder, parts: tuple[str, ...] = ("storage",)) -> bool:
    """Whether buffers of an ensemble lie in a folder, each by its number."""
    names = folder.names(parts)
    if "storage_metadata.json" in names or is_compressed(folder, parts):
        return False
    return "metadata.json" in names or any(entry.isdecimal() for entry in names)


def _empty_members(folder: Folder, expected: int) -> set[int]:
    """Which of the buffers of an ensemble held nothing. Each lies there or is one of those."""
    parts = ("storage", "metadata.json")
    names, name = folder.names(parts[:1]), folder.name(parts)
    found = folder.described(_Members, parts).empty_members if parts[1] in names else ()  # older ones save all
    empty = set(found)
    there = {int(entry) for entry in names if entry.isdecimal() and str(int(entry)) == entry}
    count = len(empty | there)
    if len(found) != len(empty) or empty & there or (empty | there) != set(range(count)):
        raise CorruptCheckpoint(
            f"{name}: expected each buffer once, in a folder or as an empty one, got folders {_said(there)} and empty_members "
            f"{_said(empty)}."
        )
    if count != expected:
        raise IncompatibleCheckpoint(
            f"{name}: expected an ensemble of {expected} members, as here, got one of {count}."
        )
    return empty


def _said(numbers: Collection[int]) -> str:
    return f"{sorted(numbers)[:8]}{'…' if len(numbers) > 8 else ''}"


def layout(who: str) -> Layout:
    """The layout of the usual keys. ``who``: what messages begin with."""
    return Layout("flat", Keys(), who)
