"""Storages saved in a layout: files that TorchRL reads, flat or in folders of nested tensors, and beside them engram's state, with sums."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from engram._support.state import typed
from engram._support.words import raise_as
from engram.errors import CorruptCheckpoint, CorruptStore, IncompatibleCheckpoint, IncompatibleStore
from engram.format import layout
from engram.format import schema as schemas
from engram.format.schema import DTYPES, MAX_DEPTH, MAX_DIMS
from engram.saved import disk, part_writer
from engram.saved.checkpointers import LAYOUTS, METADATA, Ring, SlotsSnapshot, check_sums, fields_of, summed
from engram.saved.folder import ENTRY, Folder, convert
from engram.saved.parts import read_state
from engram.saved.snapshot import SavedRows, bytes_of
from engram.store.memory import DTYPE_OF
from engram.torchrl import layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engram.saved.checkpointers import IndexNames, Key, SavedStorage
    from engram.saved.part_reader import PartReader
    from engram.types import StorageLoad

_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
#: What TensorDict's files say of a TensorDict, and what they are called: no parts of keys.
_TAKEN = frozenset({"shape", "device", "_type", "meta.json", METADATA})


class FolderSink:
    """Writes a layout into a folder.

    Args:
        folder: which exists.
        who: what messages begin with.
        nested: as nested tensors, of which each row is a trajectory; else flat.
    """

    def __init__(self, folder: Path, who: str, *, nested: bool) -> None:
        self._folder, self._who, self._nested = folder, who, nested
        self._described: dict[Key, layout.Described] = {}
        self._lengths: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(0), torch.zeros(0))
        self.files: list[str] = []

    def begin(self, ring: Ring, steps: layouts.Steps, keys: layouts.Keys) -> None:
        self._ring, self._steps = ring, steps
        if self._nested:
            self._lengths = steps.trajectories()
        noted = {keys.full: ring.full, keys.shift: ring.shift, layouts.SHAPE: [ring.slots, *ring.columns]}
        for name, data in noted.items():
            self._described[name,] = layout.Described(type="NonTensorData")
            said = {"_type": _NON_TENSOR, "data": data, "_is_non_tensor": True, "_metadata": None}
            self._put(f"{layout.encode_key(name)}/meta.json", said)

    @contextlib.contextmanager
    def column(self, key: Key, shape: torch.Size, dtype: torch.dtype, *, expanded: bool) -> Iterator[layouts.Write]:
        rows = self._steps.observations if expanded else self._ring.slots * self._ring.width
        name = self._name(key)
        described = layout.Described(device="cpu", shape=[rows, *shape], dtype=str(dtype), is_nested=self._nested)
        if self._nested:
            lengths = self._lengths[expanded]
            sizes = torch.cat([lengths[:, None], torch.tensor(shape, dtype=torch.int64).repeat(len(lengths), 1)], 1)
            described["shape"] = list(sizes.shape)
            disk.put(self._made(_shape_name(name)), bytes_of(sizes.contiguous()))
        self._described[key] = described
        row = shape.numel() * dtype.itemsize
        fd = disk.create(self._made(name), rows * row)
        try:
            yield lambda at, values: disk.write(fd, bytes_of(values), at * row)
            disk.finish(fd)
        except BaseException:
            fd.close()
            raise

    def _name(self, key: Key) -> str:
        """The name of an entry's file. Raises ``IncompatibleCheckpoint``: TensorDict's files need it."""
        if taken := sorted(_TAKEN & {*key}):
            raise IncompatibleCheckpoint(
                f"{self._who}: field {key}: TensorDict's files need the names {taken} for themselves. Rename the field."
            )
        name = layout.field_name(key)
        if not {name, _shape_name(name)}.isdisjoint(self.files):
            raise IncompatibleCheckpoint(
                f"{self._who}: field {key}: another field needs a file of the same name, {_shape_name(name)} or {name}. Rename one."
            )
        return name

    def finish(self, length: int) -> None:
        """Describe what was written. ``length``: live rows."""
        shape = [len(self._lengths[0])] if self._nested else []
        for path, raw in layout.metas(Path(), self._described, shape).items():
            disk.put(self._made(path.as_posix()), raw)
        self._put(METADATA, {"metadata": {}, "is_pytree": False, "len": length})

    def _made(self, name: str) -> Path:
        """The path of a new file."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.append(name)
        return path

    def _put(self, name: str, content: object) -> None:
        disk.put(self._made(name), json.dumps(content).encode())


def _shape_name(name: str) -> str:
    """The file with the sizes of trajectories, beside an entry's file."""
    return name.removesuffix(".memmap") + ".shape.memmap"


class _Description(msgspec.Struct):
    len: layouts.Count
    is_pytree: bool = False


class FolderLeaves:
    """A layout in a folder, flat or nested.

    Args:
        folder: what lies around it.
        parts: names of the folders that it lies in, below that.
        keys: of what says that it is full, and the shift.

    Raises:
        CorruptCheckpoint: it is damaged. IncompatibleCheckpoint: it is no such layout, or holds something else than tensors.
    """

    def __init__(self, folder: Folder, parts: tuple[str, ...], keys: layouts.Keys) -> None:
        self._folder, self._parts = folder, parts
        self.name = folder.name(parts)
        self._reserved, full, shift = keys.reserved, keys.full, keys.shift
        description: _Description = folder.described(_Description, (*parts, METADATA))
        self.length = description.len
        shape: int | tuple[int, ...] = convert(*self._noted(layouts.SHAPE, int | layouts.Shape))
        shape = (shape,) if isinstance(shape, int) else shape
        if not shape or 0 in shape or math.prod(shape) >= layouts.MAX_ROWS:
            raise CorruptCheckpoint(f"{self.name}: {layouts.SHAPE}: expected sizes of at least 1, got {list(shape)}.")
        self.ring = Ring(shape[0], shape[1:], convert(*self._noted(shift, int)), convert(*self._noted(full, bool)))
        if not 1 <= self.ring.shift <= shape[0]:
            raise CorruptCheckpoint(f"{self.name}: {shift}: expected 1 to {shape[0]}, got {self.ring.shift}.")
        self.leaves: dict[Key, layouts.LayoutLeaf] = {}
        self._files: dict[Key, tuple[tuple[str, ...], int]] = {}
        self._read_node(parts, ())

    def read(self, key: Key, first: int, n: int) -> torch.Tensor:
        leaf, (parts, nbytes) = self.leaves[key], self._files[key]
        values = torch.empty((n, *leaf.shape), dtype=DTYPE_OF[leaf.dtype], device="cpu")
        if values.numel():
            row = math.prod(leaf.shape) * DTYPES[leaf.dtype]
            if (first + n) * row > nbytes:
                raise CorruptCheckpoint(
                    f"{self._folder.name(parts)}: expected at least {first + n} values, it ends early."
                )
            self._folder.read_into(bytes_of(values), parts, nbytes, first * row)
        return values

    def _noted(self, name: str, kind: object) -> tuple[object, object, str]:
        parts = (*self._parts, layout.encode_key(name), "meta.json")
        meta = self._folder.json(parts)
        return meta.get("data"), kind, self._folder.name(parts)

    def _read_node(self, parts: tuple[str, ...], key: Key) -> None:
        name = self._folder.name((*parts, "meta.json"))
        meta = self._folder.json((*parts, "meta.json"))
        if meta.get("_type") != layouts.TENSORDICT:
            raise IncompatibleCheckpoint(f"{name}: expected a TensorDict, got {meta.get('_type')!s:.100}.")
        for entry, value in meta.items():
            if not isinstance(value, dict) or (not key and entry in self._reserved):
                continue
            own = (*key, entry)
            layouts.check_key(own, name)
            if value.get("type") == "TensorDict" and len(own) < MAX_DEPTH:
                self._read_node((*parts, layout.encode_key(entry)), own)
            elif "type" in value:
                raise IncompatibleCheckpoint(f"{name}: field {own}: expected a tensor, got {value['type']!s:.100}.")
            else:
                self._read_leaf(parts, own, convert(value, layouts.Leaf, f"{name}: field {own}"))

    def _read_leaf(self, parts: tuple[str, ...], key: Key, meta: layouts.Leaf) -> None:
        stem = layout.encode_key(key[-1])
        file = (*parts, stem + ".memmap")
        dtype = layouts.known_dtype(meta.dtype, f"{self.name}: field {key}")
        shape = self._nested_shape((*parts, stem + ".shape.memmap"), meta.shape) if meta.is_nested else meta.shape
        if not shape:
            raise CorruptCheckpoint(f"{self.name}: field {key}: expected values of steps, got a single one.")
        row = math.prod(shape[1:]) * DTYPES[dtype]
        nbytes = 0
        if row or file[-1] in self._folder.names(parts):
            with self._folder.open(file) as fd:
                nbytes = os.fstat(fd).st_size
        rows = nbytes // row if meta.is_nested and row else shape[0]
        if nbytes != rows * row:
            raise CorruptCheckpoint(
                f"{self._folder.name(file)}: expected {rows * row} bytes, got {nbytes}. The file was truncated or replaced."
            )
        self._files[key] = file, nbytes
        self.leaves[key] = layouts.LayoutLeaf(dtype, shape[1:], rows)

    def _nested_shape(self, parts: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all values of a nested tensor: those of its rows, which differ in their length only."""
        name = self._folder.name(parts)
        if len(sizes) != 2 or not 1 <= sizes[1] <= MAX_DIMS or not 1 <= sizes[0] <= self.ring.slots * self.ring.width:
            raise CorruptCheckpoint(f"{name}: expected sizes of trajectories, got an array of shape {list(sizes)}.")
        table = np.empty(sizes, np.int64)
        self._folder.read_into(table.reshape(-1).view(np.uint8).data, parts, table.nbytes)
        if (table < 0).any() or (table >= layouts.MAX_ROWS).any() or (table[:, 1:] != table[0, 1:]).any():
            raise CorruptCheckpoint(f"{name}: expected trajectories of steps of one shape.")
        return (int(table[:, 0].sum()), *map(int, table[0, 1:]))


class Layout(NamedTuple):
    """Which files rows are saved in."""

    #: ``flat`` or ``nested``.
    kind: str
    keys: layouts.Keys
    #: What messages begin with.
    who: str

    def snapshot(self, storage: SavedStorage, without: IndexNames = ()) -> LayoutSnapshot:
        """What is saved, once writers wait."""
        return LayoutSnapshot(storage, self, without)

    def load(self, storage: SavedStorage, folder: Path) -> StorageLoad:
        """Check a layout that engram did not write for a storage: everything that can be damaged, if it holds rows that would be lost."""
        dump, here = self.open(folder), storage.memory
        schema = dump.schema(None if here is None else here.schema)
        if here is not None and int(here.core.size()):
            dump.verify()
        return storage.prepare_rows(dump.state(schema), layouts.DumpedRows(dump, schema))

    def open(self, folder: Path) -> layouts.LayoutDump:
        """Describe and check the layout in a folder. Raises as :func:`open_layout`."""
        found = open_layout(Folder(folder), (), self.keys)
        if found is None:
            raise IncompatibleCheckpoint(f"{self.who}: loads: {folder}: expected one saved flat or nested, found none.")
        return found


_PART_OF = dict(zip(("flat", "nested", "hdf5"), LAYOUTS, strict=True))
_KIND_OF = {part: kind for kind, part in _PART_OF.items()}


def open_layout(folder: Folder, parts: tuple[str, ...], keys: layouts.Keys) -> layouts.LayoutDump | None:
    """Describe and check the layout that lies in a folder, whichever it is; None: there is none.

    Args:
        folder: what lies around it.
        parts: names of the folders that it lies in, below that.
        keys: which entries are flags and rewards.

    Raises:
        CorruptCheckpoint: damaged. IncompatibleCheckpoint: not of steps, or an HDF5 file.
    """
    shape = (*parts, layouts.SHAPE)
    if folder.is_folder(shape) and "meta.json" in folder.names(shape):
        return layouts.LayoutDump(FolderLeaves(folder, parts, keys), keys)
    if any(name.endswith(".h5") for name in folder.names(parts)):
        raise _hdf5(folder.name(parts))
    return None


def _hdf5(folder: str) -> IncompatibleCheckpoint:
    return IncompatibleCheckpoint(
        f"{folder}: expected a storage saved flat or nested, got an HDF5 file. TorchRL's checkpointer loads its rows, where TorchRL is "
        f"installed: H5StorageCheckpointer().loads(rb.storage, {folder!r})."
    )


class LayoutSnapshot(SlotsSnapshot):
    """A storage that is saved in a layout."""

    def __init__(self, storage: SavedStorage, laid: Layout, without: IndexNames = ()) -> None:
        super().__init__(storage, laid.who, without)
        self._layout, self._moment = laid, self._now()

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write it into a new folder, as a part of a dump.

        Raises:
            IncompatibleCheckpoint: the rows are no steps that follow each other; names the row.
            RuntimeError: rows were written since. OSError: no space, or an I/O error.
        """
        laid, ring, call = self._layout, self._ring, f"{self._who}: dumps"
        part = part_writer.PartWriter(folder, "storage", _PART_OF[laid.kind])
        sink = FolderSink(folder, call, nested=laid.kind == "nested")
        layouts.RowsWriter(fields_of(self._store, ring), ring, laid.keys, call).write(sink)
        sink.finish(ring.live * ring.width)
        if self._now() != self._moment:
            raise RuntimeError(f"{call}: expected no writes meanwhile, got some. Save it again.")
        for below in sorted({(folder / name).parent for name in sink.files} - {folder / layout.FOLDER}):
            disk.sync_folder(below)
        keys = msgspec.json.decode(msgspec.json.encode(laid.keys, order="sorted"))
        noted = {"file": "checkpoint.h5", "keys": keys, **summed(folder, sink.files)}
        return self._finished(part, noted, progress)

    @property
    def cursor(self) -> dict[str, int]:
        """Where TorchRL's writer goes on, and how many slots were ever written."""
        ring, written = self._ring, typed(self.state, "write_count", int, "storage")
        return {"cursor": ring.shift % ring.slots, "write_count": written // ring.width}

    def _now(self) -> tuple[int, int]:
        return int(self._store.core.next_ticket), int(self._store.core.write_count)


def prepare_layout(storage: SavedStorage, reader: PartReader, without: Sequence[str] = ()) -> StorageLoad:
    """Check a part in a layout for a storage: its sums first.

    Args:
        storage: which.
        reader: of the part.
        without: names of priorities that the caller loads.

    Raises:
        CorruptCheckpoint: damaged; names the file. IncompatibleCheckpoint: another schema. Nothing is changed.
    """
    if _KIND_OF[reader.type] == "hdf5":
        raise _hdf5(str(reader.folder))
    state = read_state(reader)
    noted = state.pop(ENTRY, None)
    root = str(reader.folder)
    text, priorities = state.get("schema"), state.get("priorities")
    if not isinstance(noted, dict) or not isinstance(text, str) or not isinstance(priorities, dict):
        raise CorruptCheckpoint(f"{root}: expected what the layout notes, found nothing.")
    check_sums(reader.folder, noted)
    keys: layouts.Keys = convert(noted.get("keys"), layouts.Keys, root)
    dump = Layout(_KIND_OF[reader.type], keys, "loads").open(reader.folder)
    with raise_as(CorruptCheckpoint, root, (ValueError, CorruptStore, IncompatibleStore)):
        schema = schemas.decode(text.encode(), root)
    expected = [(field.key, field.dtype, field.shape) for field in schema.fields]
    found = {(field.key, field.dtype, field.shape) for field in dump.fields}
    if (schema.capacity, schema.columns) != (dump.capacity, dump.columns) or not found.issuperset(expected):
        raise CorruptCheckpoint(f"{root}: expected the rows of its schema, got others.")
    kept = {name: it for name, it in priorities.items() if name not in without}
    return storage.prepare_rows({**state, "priorities": kept}, layouts.DumpedRows(dump, schema))
