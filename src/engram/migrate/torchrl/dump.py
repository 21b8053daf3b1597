"""Folders that TorchRL's ``ReplayBuffer.dumps`` wrote: described, checked, and read row by row.

:func:`read` opens every description, looks at the size of every file and reads what is small: priorities, ranks, generator.
What it returns is fit to be loaded; rows are copied out of the folder afterwards, field by field. Nothing in the folder is
written, created or mapped, nothing is opened through a link, and no pickle is opened at all. TorchRL keeps no sums: of the
rows only the number of bytes can be checked.

A *slot* is an entry along the first dimension of TorchRL's storage. With ``ndim > 1`` it has several rows, one per column.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from engram._dtypes import DTYPE_OF
from engram._words import warn
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.folder import Folder, convert
from engram.format.schema import DTYPES, INTEGER, Field, Node, Schema
from engram.layouts.reading import rows_state
from engram.migrate.torchrl.storage import MAX_ROWS, Count, Leaf, Shape, Storage
from engram.persist.foreign import DumpedPriorities

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from engram.layouts.reading import LayoutDump
    from engram.types import RowsSource, RowsTarget

#: Bytes that are read at a time.
_PIECE = 16 << 20

_MARK = "buffer_metadata.json"
_OURS = "manifest.json"
_PICKLES = (".pkl", ".pickle", ".pt", ".t")
#: From here on a leaf of TorchRL's min tree means "never written": its float64 trees pass through float32 on the way out.
_UNWRITTEN = torch.finfo(torch.float32).max
_MAX_RNG_BYTES = 1 << 16

_Parameter = Annotated[float, msgspec.Meta(ge=0)]


class _Buffer(msgspec.Struct):
    batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Writer(msgspec.Struct):
    cursor: Count
    write_count: Count | None = None
    rank_key: str | tuple[str, ...] | None = None
    dtype: str = ""
    shape: Shape = ()


class _Priorities(msgspec.Struct):
    alpha: _Parameter = msgspec.field(name="_alpha")
    beta: _Parameter = msgspec.field(name="_beta")
    eps: _Parameter = msgspec.field(name="_eps")
    max_priority: tuple[_Parameter | None, float | None] = msgspec.field(name="_max_priority")
    max_capacity: Annotated[float, msgspec.Meta(ge=1, lt=MAX_ROWS)] = msgspec.field(name="_max_capacity")
    schema_version: Count = msgspec.field(name="_schema_version", default=0)


@dataclass(frozen=True)
class DumpedRanks:
    """What a max-value writer saved."""

    rank_key: str | tuple[str, ...]
    ranks: Tensor | None
    """float64 ``[length]``, CPU: the rank of each row, mostly with the precision of float32; None if they must be computed
    from the rows, since TorchRL's numbers of rows were rounded or do not name every row once."""


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
        structure = _renumbered(self.structure, [numbers.get(field.key) for field in self.fields])
        if like is not None and _fits(structure, like.structure):
            fields = [fields[numbers[field.key]] for field in like.fields]
            structure = like.structure
        else:
            _check_containers(structure, [field.name for field in fields], self.path)
        schema = Schema(self.capacity, 1, self.columns, tuple(fields), structure)
        _validate(schema, self.path)
        return schema

    def state(self, schema: Schema) -> dict[str, object]:
        """The state without rows of a tensor storage with these rows; the oldest has the smallest ticket.

        ``schema``: as :meth:`schema` made it.
        """
        return rows_state(schema, self.length, self.position, self.write_count)

    def source(self, schema: Schema) -> RowsSource:
        """The rows, for the fields of a store."""
        return DumpedRows(self, schema)

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
            folder.read_into(_bytes(out), parts, field.row_bytes * self.capacity, field.row_bytes * first)
            _check_bools(out, folder.name(parts))


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


def is_torchrl_dump(path: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like one that TorchRL's ``dumps`` wrote, and not like one of ours. Nothing is opened."""
    folder = Path(path)
    try:
        return stat.S_ISREG(os.lstat(folder / _MARK).st_mode) and not os.path.lexists(folder / _OURS)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read(path: str | os.PathLike[str], *, ndim: int = 1, max_bytes: int | None = None) -> TorchRLDump:
    """Describe and check a folder that TorchRL's ``ReplayBuffer.dumps`` wrote.

    Warns once, naming what is left out: pickles, which are never opened, and entries that are no tensors.

    Args:
        path: the folder.
        ndim: that of the storage it is for, 1 or 2: a dump does not say how many dimensions index rows. With more, neither
            does it say in which order they are, as TorchRL swaps the first and the last.
        max_bytes: what all rows of the storage may take, live or not. None: any number.

    Raises:
        CorruptCheckpoint: a missing, truncated, overlong or linked file, a description that is none or contradicts
            another, priorities that are not finite and at least 0. Names the file.
        IncompatibleCheckpoint: a layout that is not read (compressed, ensembles), a dtype that cannot be
            stored, another ``ndim`` or one above 2, more than ``max_bytes``.
        OSError: the folder is not there or not readable.

    Cost: O(fields), and O(length) for priorities and ranks; no rows are read.
    """
    folder = Folder(Path(path))
    if ndim > 2:
        raise IncompatibleCheckpoint(
            f"{path}: expected a storage with ndim of 1 or 2, got {ndim}: a dump does not say in which order the dimensions are. "
            "Load it with TorchRL and extend the buffer with its rows."
        )
    buffer = folder.described(_Buffer, (_MARK,))
    storage = Storage(folder, ndim)
    storage.read()
    fields = tuple(storage.fields)
    whole = Schema(storage.slots * math.prod(storage.columns), 1, storage.columns, fields, storage.structure)
    _validate(whole, folder.path)
    if max_bytes is not None and whole.capacity * whole.row_bytes > max_bytes:
        raise IncompatibleCheckpoint(
            f"{path}: expected at most {max_bytes} bytes, got {whole.capacity} rows of {whole.row_bytes} bytes. Raise max_bytes."
        )
    position, count, ranks = _read_writer(folder, storage)
    priorities, drop_last = _read_sampler(folder, storage.length, storage.left_out)
    found = {} if storage.layout is None else {"_layout": storage.layout}
    dump = (TorchRLDump if storage.layout is None else TorchRLSteps)(
        path=folder.path,
        capacity=whole.capacity,
        columns=storage.columns,
        length=storage.length,
        position=position,
        write_count=count,
        fields=fields,
        structure=storage.structure,
        batch_size=buffer.batch_size,
        priorities=priorities,
        drop_last=drop_last,
        ranks=ranks,
        rng_state=_read_rng(folder),
        left_out=(*_pickles(folder), *storage.left_out),
        _files=storage.files,
        **found,
    )
    if dump.left_out:
        warn(
            f"{path}: not read, and lost unless you set it up again: {'; '.join(dump.left_out)}. Pickles are never opened. "
            "(The dump has no checksums: sizes and descriptions were checked.)"
        )
    return dump


def _validate(schema: Schema, path: Path) -> None:
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


def _renumbered(node: Node, numbers: Sequence[int | None]) -> Node:
    """The structure with other numbers of fields, without those that have none."""
    if node.kind == "leaf":
        return Node("leaf", field=numbers[node.field] or 0)
    children = {
        key: _renumbered(child, numbers)
        for key, child in node.children.items()
        if child.kind != "leaf" or numbers[child.field] is not None
    }
    return msgspec.structs.replace(node, children=children)


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return values.reshape(-1).view(torch.uint8).numpy().data


def _tensor(folder: Folder, parts: tuple[str, ...], leaf: Leaf, rows: int | None = None) -> Tensor:
    """The first rows of a small tensor, all without ``rows``, in fresh memory. Its dtype is in the table."""
    dtype: torch.dtype = getattr(torch, leaf.dtype.removeprefix("torch."))
    nbytes = math.prod(leaf.shape) * dtype.itemsize
    folder.check(parts, nbytes)  # before anything is allocated
    values = torch.empty(leaf.shape if rows is None else (rows, *leaf.shape[1:]), dtype=dtype, device="cpu")
    if values.numel():
        folder.read_into(_bytes(values), parts, nbytes)
    _check_bools(values, folder.name(parts))
    return values


def _check_bools(values: Tensor, name: str) -> None:
    """Raise ``CorruptCheckpoint`` if bytes that are read as bool are neither 0 nor 1: what torch makes of them is undefined."""
    if values.dtype is torch.bool and values.numel() and int(values.view(torch.uint8).max()) > 1:
        raise CorruptCheckpoint(f"{name}: expected bools, got bytes other than 0 and 1.")


# ---- writer --------------------------------------------------------------------------------------------------------------


def _read_writer(folder: Folder, storage: Storage) -> tuple[int, int, DumpedRanks | None]:
    """Position and rows ever written, and what a max-value writer saved."""
    width = math.prod(storage.columns)
    live = storage.length // width
    parts = ("writer", "metadata.json")
    if parts[1] not in folder.names(parts[:1]):  # a writer that cannot write saves nothing
        return storage.length, storage.length, None
    writer = folder.described(_Writer, parts)
    if writer.cursor >= storage.slots or (live < storage.slots and writer.cursor != live):
        expected = f"{live}, as many as are live" if live < storage.slots else f"less than {storage.slots}"
        raise CorruptCheckpoint(f"{folder.name(parts)}: expected a cursor of {expected}, got {writer.cursor}.")
    ranks = None
    if writer.rank_key is not None:
        ranks = DumpedRanks(writer.rank_key, _read_ranks(folder, writer, storage))
    # The smallest number of writes that is large enough and leaves the cursor where it is.
    count = writer.write_count or 0
    least = max(count, live)
    position = least + (writer.cursor - least) % storage.slots
    return position * width, (position if writer.write_count is None else count) * width, ranks


def _read_ranks(folder: Folder, writer: _Writer, storage: Storage) -> Tensor | None:
    name = folder.name(("writer", "metadata.json"))
    dtype = writer.dtype.removeprefix("torch.")
    if dtype not in DTYPES or dtype == "bool" or dtype.startswith("complex"):
        raise CorruptCheckpoint(f"{name}: expected a dtype of numbers, got {writer.dtype!r}.")
    if writer.shape != (0,) and (len(writer.shape) != 2 or writer.shape[1] != 2 or writer.shape[0] > storage.slots):
        raise CorruptCheckpoint(
            f"{name}: expected at most {storage.slots} ranks with a row each, got shape {list(writer.shape)}."
        )
    if writer.shape[0] == 0:
        return torch.empty(0, dtype=torch.float64, device="cpu") if storage.length == 0 else None
    file = ("writer", "current_top_values.memmap")
    values = _tensor(folder, file, Leaf(writer.dtype, writer.shape))
    if values.is_floating_point() and storage.length > 2 / torch.finfo(values.dtype).eps:
        return None  # numbers of rows were rounded
    pairs = values.to(torch.float64)
    rows = pairs[:, 1]
    if not bool(((rows == rows.floor()) & (rows >= 0) & (rows < storage.slots)).all()):
        raise CorruptCheckpoint(f"{folder.name(file)}: expected rows of [0, {storage.slots}), got others.")
    at = rows.to(torch.int64)
    if not torch.equal(at.sort().values, torch.arange(storage.length, device="cpu")):
        return None
    ranks = torch.empty(storage.length, dtype=torch.float64, device="cpu")
    ranks[at] = pairs[:, 0]
    return ranks


# ---- sampler, generator, pickles -----------------------------------------------------------------------------------------


def _read_sampler(folder: Folder, length: int, left_out: list[str]) -> tuple[DumpedPriorities | None, bool | None]:
    names = folder.names(("sampler",))
    if "sampler_metadata.json" in names:
        return _read_priorities(folder, length), None
    if "meta.json" not in names:  # random and slice samplers save nothing
        return None, None
    meta = folder.json(("sampler", "meta.json"))
    if "drop_last" in meta:
        return None, bool(_entry_of(folder, "sampler", meta, "drop_last", "bool", 1))
    known = sorted(entry for entry, value in meta.items() if isinstance(value, dict))
    left_out.append(f"the sampler's state ({', '.join(known)})")
    return None, None


def _entry_of(folder: Folder, part: str, meta: dict[str, object], entry: str, dtype: str, limit: int) -> Tensor:
    """A small tensor of a component's own TensorDict."""
    name = folder.name((part, "meta.json"))
    leaf = convert(meta.get(entry), Leaf, f"{name}: {entry}")
    if leaf.dtype != f"torch.{dtype}" or not 1 <= math.prod(leaf.shape) <= limit:
        raise CorruptCheckpoint(
            f"{name}: {entry}: expected 1 to {limit} elements of {dtype}, got shape {list(leaf.shape)} {leaf.dtype!r}."
        )
    return _tensor(folder, (part, f"{entry}.memmap"), leaf)


def _read_priorities(folder: Folder, length: int) -> DumpedPriorities:
    described = ("sampler", "sampler_metadata.json")
    state = folder.described(_Priorities, described)
    size = int(state.max_capacity)
    if size != state.max_capacity or size < length:
        raise CorruptCheckpoint(
            f"{folder.name(described)}: expected room for {length} priorities, got _max_capacity={state.max_capacity}."
        )
    sums, mins = ("sampler", "sumtree.memmap"), ("sampler", "mintree.memmap")
    tree = Leaf("torch.float64", (size,))
    leaves, smallest = _tensor(folder, sums, tree, length), _tensor(folder, mins, tree, length)
    bad = ~(leaves.isfinite() & (leaves >= 0))
    if bool(bad.any()):
        i = int(bad.int().argmax())
        raise CorruptCheckpoint(
            f"{folder.name(sums)}: expected priorities that are finite and at least 0, got {float(leaves[i])} in row {i}."
        )
    bad = (smallest != leaves) & ~((leaves == 0) & (smallest >= _UNWRITTEN))
    if bool(bad.any()):
        i = int(bad.int().argmax())
        raise CorruptCheckpoint(
            f"{folder.name(mins)}: expected {float(leaves[i])} in row {i}, as in sumtree.memmap, got {float(smallest[i])}."
        )
    value, at = state.max_priority
    row = int(at) if at is not None and 0 <= at < length and at == int(at) else None
    if value is not None and row is not None and state.schema_version == 0 and state.alpha > 0:
        # Older versions keep the priority itself or, once they had to look for the largest in the tree, the leaf there.
        leaf = leaves[row]
        if float(leaf) == float(torch.tensor(value, dtype=torch.float32)):
            value = max(float(leaf ** (1 / state.alpha)) - state.eps, 0.0)
    if value is not None and not math.isfinite(value):
        raise CorruptCheckpoint(f"{folder.name(described)}: expected a largest priority that is finite, got {value}.")
    return DumpedPriorities(state.alpha, state.beta, state.eps, leaves, value, row)


def _read_rng(folder: Folder) -> Tensor | None:
    if not folder.names(("rng_state",)):
        return None
    meta = folder.json(("rng_state", "meta.json"))
    state = _entry_of(folder, "rng_state", meta, "rng_state", "uint8", _MAX_RNG_BYTES)
    mine = torch.Generator(device="cpu")
    if state.numel() == mine.get_state().numel():  # else it is that of an accelerator's generator
        try:
            mine.set_state(state)
        except RuntimeError as error:
            raise CorruptCheckpoint(f"{folder.name(('rng_state', 'rng_state.memmap'))}: {error}.") from error
    return state


_LOST = {
    "prefetch.pkl": "prefetched batches, if there were any",
    "transform.t": "state of the transforms",
    "consuming_sampler.pt": "state of the consuming sampler",
    "streaming_slice.pt": "state of the streaming slice sampler",
}


def _pickles(folder: Folder) -> list[str]:
    """Pickles that lie where TorchRL puts them, and what they hold."""
    return [
        f"{'/'.join((*parts, entry))} ({_LOST.get(entry, 'a pickle')})"
        for parts in ((), ("sampler",), ("writer",))
        for entry in folder.names(parts)
        if entry.endswith(_PICKLES)
    ]


class _Format:
    """As ``loads`` meets it."""

    library = "TorchRL"

    def recognises(self, path: Path) -> bool:
        return is_torchrl_dump(path)

    def read(self, path: Path, *, ndim: int, max_bytes: int) -> TorchRLDump:
        return read(path, ndim=ndim, max_bytes=max_bytes)


FORMAT = _Format()
