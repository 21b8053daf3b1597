"""The rows in a dump of TorchRL's, of a storage of tensors.

A *slot* is an entry along the first dimension of TorchRL's storage. With ``ndim > 1`` it has several rows, one per column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support.words import warn
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.schema import INTEGER, Field, Node, Schema
from engram.saved.checkpointers import rows_state
from engram.saved.folder import Folder
from engram.saved.snapshot import bytes_of
from engram.store.memory import DTYPE_OF
from engram.torchrl.described import check_bools, renumbered

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from engram.saved.checkpointers import DumpedPriorities, SavedStorage
    from engram.torchrl.components import DumpedRanks
    from engram.torchrl.layouts import LayoutDump
    from engram.types import RowsSource, RowsTarget, StorageLoad

#: Bytes that are read at a time.
_PIECE = 16 << 20


@dataclass(frozen=True)
class TorchRLDump:
    """A checked dump. Rows ``[0, length)`` are live, in one lane; the row written last is ``(position - 1) % capacity``."""

    path: Path
    capacity: int
    """Rows of the storage."""
    columns: tuple[int, ...]
    """Sizes of the dimensions after the first (``ndim > 1``); empty otherwise."""
    length: int
    """Live rows."""
    position: int
    """Position that the next row gets; the live ones are the ``length`` before it."""
    write_count: int
    """Rows ever written, as far as TorchRL knew."""
    fields: tuple[Field, ...]
    structure: Node
    """How a row is put together. A list in it may have been a tuple or a dict, and a key of digits an int: dumps do not say."""
    batch_size: int | None
    priorities: DumpedPriorities | None
    """None without a prioritized sampler."""
    drop_last: bool | None
    """None without a sampler without replacement."""
    ranks: DumpedRanks | None
    """None without a max-value writer."""
    rng_state: Tensor | None
    """uint8 ``[n]``, CPU: state of the generator that was given to the buffer; None if there was none."""
    left_out: tuple[str, ...]
    """What is in the folder and not here, each with its reason."""
    _files: Mapping[tuple[str, ...], tuple[str, ...]]
    """Key of a field → path of its file below the folder. A field without elements may have none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of the storage, live or not."""
        return self.capacity * sum(field.row_bytes for field in self.fields)

    def schema(self, like: Schema | None = None, without: Collection[str] = ()) -> Schema:
        """The schema of a store with these rows.

        Args:
            like: a schema whose structure is taken if it has the same keys, fields in its order. It decides between lists,
                tuples and dicts, and between ints and strings as their keys.
            without: entries at the root to leave out, those that the target makes up itself, such as ``"index"``. An entry
                that ``like`` has stays.

        Raises:
            IncompatibleCheckpoint: the structure is not known and ``like`` has other keys, or nothing is left.
        """
        kept = set() if like is None else {field.key for field in like.fields}
        out = {(name,) for name in without} - kept
        fields = [field for field in self.fields if field.key not in out]
        if not fields:
            raise IncompatibleCheckpoint(f"{self.path}: expected fields besides {sorted(without)}, got none.")
        numbers = {field.key: i for i, field in enumerate(fields)}
        structure = renumbered(
            self.structure, {i: numbers[f.key] for i, f in enumerate(self.fields) if f.key in numbers}
        )
        if like is not None and _fits(structure, like.structure):
            fields = [fields[numbers[field.key]] for field in like.fields]
            structure = like.structure
        else:
            _check_containers(structure, [field.name for field in fields], self.path)
        schema = Schema(self.capacity, 1, self.columns, tuple(fields), structure)
        validate(schema, self.path)
        return schema

    def state(self, schema: Schema) -> dict[str, object]:
        """The state without rows of a tensor storage with these rows; the oldest has the smallest ticket.

        ``schema``: as :meth:`schema` made it.
        """
        return rows_state(schema, self.length, self.position, self.write_count)

    def source(self, schema: Schema) -> RowsSource:
        """The rows, for the fields of a store."""
        return DumpedRows(self, schema)

    def prepare(self, storage: SavedStorage, without: Collection[str]) -> StorageLoad:
        """Check the rows for a storage. Raises as :meth:`schema`; ``IncompatibleCheckpoint``: it holds no tensors, or other ones."""
        if not storage.form.takes_rows:
            raise IncompatibleCheckpoint(
                f"{self.path}: expected a dump of engram's for a {storage.form.kind}, got one of TorchRL's. Load it into a "
                "LazyTensorStorage or a LazyMemmapStorage."
            )
        schema = self.schema(None if storage.memory is None else storage.memory.schema, without)
        return storage.prepare_rows(self.state(schema), self.source(schema))

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        """Copy rows ``[first, first + n)`` of a field into ``out``, by ``pread``.

        Args:
            key: of one of ``fields``.
            out: ``[n, *shape]`` of the field's dtype, contiguous, on the CPU. What it holds after an error is undefined.
            first: the first row.

        Raises:
            KeyError: no such field.
            ValueError: ``out`` has another shape, dtype or place, or there are no such rows.
            CorruptCheckpoint: the file changed since it was checked, or holds bytes that are no bool.
        """
        try:
            field = next(field for field in self.fields if field.key == key)
        except StopIteration:
            raise KeyError(
                f"expected a field of the dump, one of {[f.name for f in self.fields]}, got {key}."
            ) from None
        dtype = DTYPE_OF[field.dtype]
        if out.dtype is not dtype or out.ndim < 1 or out.shape[1:] != torch.Size(field.shape):
            raise ValueError(
                f"read_rows: field {field.name}: expected rows of shape {list(field.shape)} {field.dtype}, "
                f"got a tensor {list(out.shape)} {str(out.dtype).removeprefix('torch.')}."
            )
        if not out.is_cpu or not out.is_contiguous():
            raise ValueError(f"read_rows: field {field.name}: expected contiguous memory on the CPU.")
        if first < 0 or first + len(out) > self.length:
            raise ValueError(f"read_rows: expected rows of [0, {self.length}), got [{first}, {first + len(out)}).")
        if out.numel():
            folder, parts = Folder(self.path), self._files[key]
            folder.read_into(bytes_of(out), parts, field.row_bytes * self.capacity, field.row_bytes * first)
            check_bools(out, folder.name(parts))


@dataclass(frozen=True)
class TorchRLSteps(TorchRLDump):
    """A checked dump in which each observation was saved once: flat, nested or in an HDF5 file."""

    _layout: LayoutDump

    def schema(self, like: Schema | None = None, without: Collection[str] = ()) -> Schema:
        return self._layout.schema(like, without)

    def state(self, schema: Schema) -> dict[str, object]:
        return self._layout.state(schema, self.write_count)

    def source(self, schema: Schema) -> RowsSource:
        return self._layout.source(schema)

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        self._layout.read_rows(key, out, first)


class DumpedRows(NamedTuple):
    """The rows of a dump."""

    dump: TorchRLDump
    schema: Schema

    def fill(self, tensors: RowsTarget) -> None:
        """Read them into the fields of a store, ``[capacity, *shape]`` each."""
        for number, (field, tensor) in enumerate(zip(self.schema.fields, tensors, strict=True)):
            step = max(1, _PIECE // max(1, field.row_bytes))
            for first in range(0, self.dump.length, step):
                rows = tensor[first : min(first + step, self.dump.length)]
                direct = rows.is_cpu and rows.is_contiguous() and tensors.put is None
                piece = rows if direct else torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
                self.dump.read_rows(field.key, piece, first)
                if tensors.put is not None:
                    tensors.put(number, first, piece)
                elif piece is not rows:
                    rows.copy_(piece)


def validate(schema: Schema, path: Path) -> None:
    """Raise ``CorruptCheckpoint`` for a schema that no store can have."""
    try:
        schema.validate()
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: {str(error).removesuffix('.')}.") from error


def _check_containers(structure: Node, names: Sequence[str], path: Path) -> None:
    """A dump names the places of lists and tuples, ints and strings in one way: ``0``.

    Raises:
        IncompatibleCheckpoint: entries that may be of a list, a tuple or a dict.
    """
    kinds = set(_kinds_of_numbered(structure))
    if "list" in kinds:
        raise IncompatibleCheckpoint(
            f"{path}: a dump does not say whether {names} are in lists or in tuples, or in dicts whose keys are ints. "
            "Write one such row to the buffer first: its structure is taken."
        )
    if kinds:
        warn(
            f"{path}: a dump does not say which keys of dicts were ints: of {names}, all that are digits are read as strings. "
            "If they were ints, write one such row to the buffer first: its structure is taken."
        )


def _kinds_of_numbered(node: Node) -> Iterator[str]:
    """The kinds of containers whose entries have numbers for names; TensorDicts and tensorclasses name theirs by strings."""
    if node.kind == "list" or (node.kind == "dict" and any(map(INTEGER.fullmatch, node.children))):
        yield node.kind
    for child in node.children.values():
        yield from _kinds_of_numbered(child)


def _fits(dumped: Node, like: Node) -> bool:
    """Whether rows of the structure ``like`` would have been dumped as this one."""
    kinds = {"list": ("list", "tuple", "dict")}.get(dumped.kind, (dumped.kind,))
    return (
        like.kind in kinds
        and dumped.batch == like.batch
        and dumped.children.keys() == like.children.keys()
        and all(_fits(child, like.children[key]) for key, child in dumped.children.items())
    )
