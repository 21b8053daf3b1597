"""From a directory to other formats: the episodes of a store, in order."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from engram._support.checks import check_path
from engram._support.field_paths import FieldPath, public
from engram.around.episodes import TrajectoryKeys, numbers_by_path
from engram.around.following import finals_of
from engram.around.reading import MARK
from engram.buffer.replay_buffer import ReplayBuffer
from engram.datasets.blocks import BLOCK_BYTES, Array, Block, Columns, DataSet, Table
from engram.errors import DatasetError
from engram.format.files import Descriptor
from engram.saved import disk
from engram.types import StrPath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engram.format.schema import Field


class Stored(Table):
    """The rows of a store, lane after lane and oldest first."""

    sorted = False

    def __init__(self, buffer: DataSet, call: str, where: Path) -> None:
        super().__init__(call, where)
        self._storage, self._extent, self._finals = buffer.storage, buffer.storage.extent(), finals_of(buffer.sampler)
        memory = buffer.storage.memory
        assert memory is not None  # it was opened from its directory
        fields, self.rows = memory.schema.fields, self._extent.size
        if not self.rows:
            raise self.refuse("expected rows, got an empty store.")
        marks = TrajectoryKeys(None, None, None).boundaries(fields, numbers_by_path(memory), f"{call}: {where}")
        self.id = next((fields[number].key for number in marks.ids), None)
        self.ends = [fields[number].key for number in marks.ends]
        self._paths = [field.key for field in fields]
        self.names = {path: path for path in self._paths if path != MARK}
        check_dtypes(self, fields)
        self._piece = max(1, BLOCK_BYTES // memory.schema.row_bytes)

    def parts(self, row: int) -> Iterator[Iterator[Columns]]:
        assert row == 0  # exports begin there
        yield from map(self._lane, range(len(self._extent.filled)))

    def _lane(self, lane: int) -> Iterator[Columns]:
        filled = self._extent.filled[lane]
        for start in range(0, filled, self._piece):
            places = torch.arange(start, min(start + self._piece, filled))
            rows = self._extent.in_order(torch.tensor([lane]), places=places)
            columns, moved = self._storage.read(rows)
            if moved:
                raise self.refuse("expected a store that is not written to, but its rows change while they are read.")
            if len(rows):
                yield {path: column.numpy() for path, column in zip(self._paths, columns, strict=True)}

    def blocks(self, row: int, episode: int) -> Iterator[Block]:
        """Its episodes, and the observations after their last steps, as far as they are known."""
        for block in super().blocks(row, episode):
            mark, last = block.columns.pop(MARK, None), np.cumsum(block.lengths) - 1
            pairs = [(key, ("next", *key)) for key in block.columns if ("next", *key) in block.columns]
            finals = {key: block.columns[following][last] for key, following in pairs}
            known = None
            if mark is not None and self._finals is not None:
                known = mark[last, 0] >= 0
                values, found = self._finals.read(torch.from_numpy(mark[last[known]]))
                known[known] = found.numpy()
                finals |= {key: block.columns[key][last] for key in self._finals.keys}
                for key, value in zip(self._finals.keys, values, strict=False):
                    finals[key][known] = value[found].numpy()
            yield Block(block.columns, block.lengths, finals, known)

    def steps(self, block: Block, final: str, first: str | None = None) -> Columns:
        """The rows of a block, with the next observations where they are not stored: of what the store has observations of after last
        steps, and of fields whose path begins with ``first``. ``final``: as for :meth:`after`.
        """
        columns = dict(block.columns)
        for key in [key for key in columns if key in block.finals or key[0] == first]:
            if ("next", *key) not in columns:
                columns["next", *key] = following = np.roll(columns[key], -1, axis=0)
                following[np.cumsum(block.lengths) - 1] = self.after(block, key, final)
        return columns

    def after(self, block: Block, path: FieldPath, final: str) -> Array:
        """The observations after the last steps of a block, ``[episodes, …]``.

        Args:
            block: of this store.
            path: the observation.
            final: what those are that are not stored: ``"repeat"``, the observations of the last steps, or ``"refuse"``.
        """
        if path in block.finals and (final == "repeat" or block.known is None or block.known.all()):
            return block.finals[path]
        if final != "repeat":
            raise self.refuse(
                f"expected the observation after the last step of each episode, but none is stored of {public(path)!r}. "
                "final='repeat' takes that of the last step in its place."
            )
        return block.columns[path][np.cumsum(block.lengths) - 1]


def distinct(names: list[str], call: str) -> list[str]:
    """What fields are called in a file. Raises ``DatasetError``: two get one name, or one that of a group of others."""
    if same := [one for one, other in pairwise(sorted(f"{name}/" for name in names)) if other.startswith(one)]:
        raise DatasetError(f"{call}: expected a name for each field in the file, but several would be called {same}.")
    return names


def check_dtypes(source: Table, fields: Iterator[Field] | tuple[Field, ...]) -> None:
    for field in fields:
        if field.dtype.startswith(("float8", "bfloat", "complex32")):
            raise source.refuse(f"field {field.name}: expected a dtype that NumPy has, got {field.dtype}.")


@contextmanager
def stored(directory: StrPath, call: str) -> Iterator[Stored]:
    """The rows of a store, which is only read."""
    folder = check_path(f"{call}: directory", directory)
    with ReplayBuffer.open(folder, readonly=True) as buffer:
        yield Stored(buffer, call, folder)


@contextmanager
def written_whole(path: StrPath, call: str) -> Iterator[Path]:
    """Where to write a file or folder that then appears, whole, under a path. Raises ``FileExistsError``: that is there."""
    target = check_path(f"{call}: path", path)
    if target.exists():
        raise FileExistsError(17, f"{call}: expected a path where nothing is", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        for one in (partial, *partial.rglob("*")):
            with Descriptor.open(one, os.O_RDONLY) as fd:
                os.fsync(fd)
        with disk.open_folder(target.parent) as folder:
            if not disk.link(partial.name, folder, target):  # a folder, or a file system without links
                os.rename(partial, target)
            os.fsync(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a file or of nothing, it does nothing
        partial.unlink(missing_ok=True)
