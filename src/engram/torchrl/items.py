"""The rows in a dump of TorchRL's: those of a storage of tensors, and the items of a ``CompressedListStorage``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from engram._support import copies, tensordicts, words
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import layout, strict
from engram.format.schema import DTYPES, INTEGER, MAX_DEPTH, Field, Node, Schema
from engram.saved import checkpointers, snapshot
from engram.saved.folder import Folder, convert
from engram.store.memory import DTYPE_OF
from engram.torchrl import layouts
from engram.torchrl.layouts import Count, DumpedRows, Leaf, Shape, check_bools, check_key, known_dtype, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from engram.torchrl.layouts import LayoutDump, Parts
    from engram.types import Decompress, StorageLoad

#: Bytes that are read at a time.
_PIECE = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TorchRLDump:
    """A checked dump. Rows ``[0, length)`` are live, in one lane; the row written last is ``(position - 1) % capacity``."""

    path: Path
    #: Rows of the storage.
    capacity: int
    #: Sizes of the dimensions after the first (``ndim > 1``); empty otherwise.
    columns: tuple[int, ...] = ()
    #: Live rows.
    length: int
    #: Position that the next row gets; the live ones are the ``length`` before it.
    position: int
    #: Rows ever written, as far as TorchRL knew.
    write_count: int
    fields: tuple[Field, ...]
    #: How a row is put together. A list in it may have been a tuple or a dict, and a key of digits an int: dumps do not say.
    structure: Node
    batch_size: int | None = None
    #: None without a prioritized sampler.
    priorities: checkpointers.DumpedPriorities | None
    #: uint8 ``[n]``, CPU: state of the generator that was given to the buffer; None if there was none.
    rng_state: Tensor | None = None
    #: What is in the folder and not here, each with its reason.
    left_out: tuple[str, ...] = ()
    #: Key of a field → path of its file below the folder. A field without elements may have none.
    _files: Mapping[tuple[str, ...], tuple[str, ...]]

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
        structure = layouts.structure_of(fields, self.structure, self.fields)
        if like is not None and _fits(structure, like.structure):
            found = {field.key: field for field in fields}
            fields, structure = [found[field.key] for field in like.fields], like.structure
        else:
            _check_containers(structure, [field.name for field in fields], self.path)
        schema = Schema(self.capacity, 1, self.columns, tuple(fields), structure)
        validate(schema, self.path)
        return schema

    def state(self, schema: Schema) -> dict[str, object]:
        """The state without rows of a tensor storage with these rows; the oldest has the smallest ticket.

        ``schema``: as :meth:`schema` made it.
        """
        return checkpointers.rows_state(schema, self.length, self.position, self.write_count)

    def prepare(self, storage: checkpointers.SavedStorage, without: Collection[str]) -> StorageLoad:
        """Check the rows for a storage. Raises as :meth:`schema`; ``IncompatibleCheckpoint``: it holds no tensors, or other ones."""
        if not storage.form.takes_rows:
            raise IncompatibleCheckpoint(
                f"{self.path}: expected a dump of engram's for a {storage.form.kind}, got one of TorchRL's. Load it into a "
                "LazyTensorStorage or a LazyMemmapStorage."
            )
        schema = self.schema(None if storage.memory is None else storage.memory.schema, without)
        return storage.prepare_rows(self.state(schema), DumpedRows(self, schema))

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        """Copy rows ``[first, first + n)`` of a field into ``out``, by ``pread``.

        Args:
            key: of one of ``fields``.
            out: ``[n, *shape]`` of the field's dtype, contiguous, on the CPU. What it holds after an error is undefined.
            first: the first row.

        Raises:
            CorruptCheckpoint: the file changed since it was checked, or holds bytes that are no bool.
        """
        if out.numel():
            folder, parts, row = Folder(self.path), self._files[key], out[:1].nbytes
            folder.read_into(snapshot.bytes_of(out), parts, row * self.capacity, row * first)
            check_bools(out, folder.name(parts))


@dataclass(frozen=True, kw_only=True)
class TorchRLSteps(TorchRLDump):
    """A checked dump in which each observation was saved once: flat, nested or in an HDF5 file."""

    _layout: LayoutDump

    def schema(self, like: Schema | None = None, without: Collection[str] = ()) -> Schema:
        return self._layout.schema(like, without)

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        self._layout.read_rows(key, out, first)


def validate(schema: Schema, path: Path) -> None:
    """Raise ``CorruptCheckpoint`` for a schema that no store can have."""
    with words.raise_as(CorruptCheckpoint, path):
        schema.validate()


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
        words.warn(
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
    alike = like.kind in kinds and dumped.batch == like.batch and dumped.children.keys() == like.children.keys()
    return alike and all(_fits(child, like.children[key]) for key, child in dumped.children.items())


_DESCRIPTIONS, _PLACES, _DATA = "metadata.json", "data_indices.json", "compressed_data"
_STACK = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
#: How many times as much memory as the text of descriptions takes what is read from it, at most.
_PARSED = 16
_MAX_BYTES = 1 << 60


class _Size(msgspec.Struct, tag_field="__type__", tag="torch.Size"):
    value: Shape


class _Dtype(msgspec.Struct, tag_field="__type__", tag="torch.dtype"):
    value: str


class _Tensor(msgspec.Struct, tag_field="type", tag="tensor"):
    """A tensor, which is compressed."""

    shape: _Size
    dtype: _Dtype


class _NonTensor(msgspec.Struct, tag_field="type", tag="non_tensor"):
    value: object


class _TensorDict(msgspec.Struct, tag_field="type", tag="tensordict"):
    fields: dict[str, _Tensor | _NonTensor]


class _Other(msgspec.Struct, tag_field="type", tag="other"):
    """Anything else, as JSON."""

    value: object


def is_compressed(folder: Folder, parts: Parts) -> bool:
    """Whether the items of a ``CompressedListStorage`` lie in a folder."""
    return bool({_PLACES, _DATA} & set(folder.names(parts)))


class CompressedItems:
    """Items, whose descriptions are read and checked at once.

    Args:
        folder: what lies around them.
        parts: names of the folders that they lie in, below that.
        max_bytes: what an item may take, and what all of them may if they are kept as they are. None: any number.

    Raises:
        CorruptCheckpoint: descriptions that are none, or contradict each other. IncompatibleCheckpoint: a dtype that cannot be stored.
    """

    def __init__(self, folder: Folder, parts: Parts, max_bytes: int | None) -> None:
        self._folder, self._parts = folder, parts
        self._most = _MAX_BYTES if max_bytes is None else max_bytes
        #: What was read last of TensorDicts: where, and what its description says.
        self._meta: tuple[Parts, dict[str, object]] = (), {}
        self._name = folder.name((*parts, _DESCRIPTIONS))
        self._items: list[_Tensor | _TensorDict | _Other] = convert(
            self._json(_DESCRIPTIONS), list[_Tensor | _TensorDict | _Other], self._name
        )
        name = folder.name((*parts, _PLACES))
        self._places: list[int | None] = convert(self._json(_PLACES), list[Count | None], name)
        if len(self._places) != len(self._items):
            raise CorruptCheckpoint(
                f"{name}: expected {len(self._items)} places, one an item, got {len(self._places)}."
            )
        there = [place for place in self._places if place is not None]
        data = (*parts, _DATA)
        folders = sorted(int(entry) for entry in folder.names(data) if entry.isdecimal())
        if there != list(range(len(there))) or folders != there:
            raise CorruptCheckpoint(
                f"{name}: expected the folders of {_DATA} in order, {len(folders)}, got {str(there[:8])[:-1]}{', …' * (len(there) > 8)}]."
            )
        if there and folder.json((*data, "meta.json")).get("_type") != _STACK:
            raise CorruptCheckpoint(f"{folder.name((*data, 'meta.json'))}: expected a stack of TensorDicts.")
        self._bytes = [
            sum(self._nbytes(tensor, self._where(number, key)) for key, tensor in _tensors(item))
            for number, item in enumerate(self._items)
        ]
        self.left_out: list[str] = []
        values = [value for item in self._items for value in _values(item)]
        if any(map(_is_ambiguous, values)):
            self.left_out.append(
                f"{'/'.join((*parts, _DESCRIPTIONS))}: which lists in items were tuples, and which keys were ints: they are read as lists "
                "and strings"
            )

    def __len__(self) -> int:
        return len(self._items)

    def read(self, decompress: Decompress | None, *, whole: bool, without: Collection[str] = ()) -> Iterator[object]:
        """The items in the order of their rows, one by one.

        Args:
            decompress: the function that reads the streams; None: those of zlib and Zstandard are read.
            whole: all of them are kept as they are.
            without: entries of TensorDicts to leave out.

        Raises:
            CorruptCheckpoint: damaged. IncompatibleCheckpoint: streams that are read otherwise, or larger than there is memory.
        """
        for number, nbytes in enumerate([sum(self._bytes)] if whole else self._bytes):
            if nbytes > self._most:
                what = "all items" if whole else f"item {number}"
                raise IncompatibleCheckpoint(
                    f"{self._name}: expected at most {self._most} bytes in {what}, as there is memory, got {nbytes}."
                    + (" Load it into a CompressedListStorage." if whole else "")
                )
        for number, item in enumerate(self._items):
            yield self._item(number, item, decompress, without)

    # ---- descriptions --------------------------------------------------------------------------------------------------

    def _json(self, file: str) -> object:
        with words.raise_as(CorruptCheckpoint, f"{self._folder.name((*self._parts, file))}: not readable as JSON"):
            return strict.parse_loosely(self._folder.read((*self._parts, file), self._most // _PARSED))

    def _where(self, number: int, key: str) -> str:
        return f"{self._name}: item {number}" + (f": field {key!r:.100}" if key else "")

    def _nbytes(self, tensor: _Tensor, where: str) -> int:
        return math.prod(tensor.shape.value) * DTYPES[known_dtype(tensor.dtype.value, where)]

    # ---- items ---------------------------------------------------------------------------------------------------------

    def _item(
        self, number: int, item: _Tensor | _TensorDict | _Other, decompress: Decompress | None, without: Collection[str]
    ) -> object:
        place = self._places[number]
        parts = (*self._parts, _DATA, str(place))
        if isinstance(item, _Other):
            if isinstance(item.value, dict) and "__type__" not in item.value:
                return self._entries(item.value, parts, self._where(number, ""), 1)
            return self._value(item.value, parts, "data", self._where(number, ""), 1)
        if place is None:
            raise CorruptCheckpoint(f"{self._where(number, '')}: expected a folder in {_DATA}, got none.")
        if isinstance(item, _Tensor):
            return self._decompressed(item, parts, "data", decompress, self._where(number, ""))
        made = tensordicts.tensordict_type()({}, batch_size=[])
        for key, field in item.fields.items():
            if key in without:
                continue
            where = self._where(number, key)
            if isinstance(field, _Tensor):
                made.set(key, self._decompressed(field, parts, key, decompress, where))
            else:
                made.set_non_tensor(key, self._value(field.value, parts, key, where, 1))
        return made

    def _decompressed(
        self, tensor: _Tensor, parts: Parts, key: str, decompress: Decompress | None, where: str
    ) -> Tensor:
        stream = self._leaf(parts, key, where)
        dtype, shape = DTYPE_OF[known_dtype(tensor.dtype.value, where)], torch.Size(tensor.shape.value)
        file = self._folder.name((*parts, f"{layout.encode_key(key)}.memmap"))
        return whole_of(stream, shape, dtype, decompress, file)

    def _leaf(self, parts: Parts, key: str, where: str) -> Tensor:
        """A tensor as it lies there."""
        for part in (*parts[len(self._parts) :], key):
            check_key((part,), where)
        name = self._folder.name((*parts, "meta.json"))
        if self._meta[0] != parts:
            self._meta = parts, self._folder.json((*parts, "meta.json"))
        leaf = convert(self._meta[1].get(key), Leaf, f"{name}: field {key!r:.100}")
        if leaf.is_nested:
            raise IncompatibleCheckpoint(f"{name}: field {key!r:.100}: nested tensors cannot be read.")
        nbytes = math.prod(leaf.shape) * DTYPES[known_dtype(leaf.dtype, f"{name}: field {key!r:.100}")]
        if nbytes > self._most:
            raise IncompatibleCheckpoint(
                f"{where}: expected at most {self._most} bytes, which there are, got {nbytes}."
            )
        if not nbytes:  # it may have no file
            return torch.empty(leaf.shape, dtype=DTYPE_OF[leaf.dtype.removeprefix("torch.")], device="cpu")
        return read_tensor(self._folder, (*parts, f"{layout.encode_key(key)}.memmap"), leaf)

    # ---- what is no tensor ---------------------------------------------------------------------------------------------

    def _entries(self, entries: dict[str, object], parts: Parts, where: str, depth: int) -> dict[str, object]:
        return {key: self._value(it, parts, key, f"{where}: {key!r:.100}", depth + 1) for key, it in entries.items()}

    def _value(self, value: object, parts: Parts, key: str, where: str, depth: int) -> object:
        """What JSON says, with the tensors that lie in ``parts``, as their dtypes are not in it."""
        if depth > MAX_DEPTH:
            raise CorruptCheckpoint(f"{where}: nested more than {MAX_DEPTH} deep.")
        if isinstance(value, list):
            if any(map(_is_tensor, value)):
                return self._listed(value, parts, key, where)
            return [self._value(one, parts, key, where, depth + 1) for one in value]
        if not isinstance(value, dict):
            return value
        if "__type__" not in value:
            return self._entries(value, (*parts, layout.encode_key(key)), where, depth)
        if _is_tensor(value):
            return self._leaf(parts, key, where)
        if value["__type__"] == "NonTensorData" and "value" in value:
            return self._value(value["value"], parts, key, where, depth + 1)
        if value["__type__"] == "torch.Size":
            return torch.Size(convert(value, _Size, where).value)
        if value["__type__"] == "torch.dtype":
            return DTYPE_OF[known_dtype(convert(value, _Dtype, where).value, where)]
        raise IncompatibleCheckpoint(f"{where}: a {str(value['__type__'])[:100]!r} cannot be read.")

    def _listed(self, values: list[object], parts: Parts, key: str, where: str) -> list[object]:
        """A list of tensors, which lie there as one."""
        if not all(map(_is_tensor, values)):
            raise IncompatibleCheckpoint(f"{where}: tensors beside other things in a list cannot be read.")
        together = self._leaf(parts, key, where)
        if together.shape[:1] != (len(values),):
            raise CorruptCheckpoint(f"{where}: expected {len(values)} tensors, got shape {list(together.shape)}.")
        return list(together.unbind(0))


_OTHERWISE = "TorchRL had a compression_fn of your own. Load it into a CompressedListStorage that has the decompression_fn to it."


class Items(Protocol):
    """The items of a list."""

    def __len__(self) -> int: ...

    def read(self, decompress: Decompress | None, *, whole: bool, without: Collection[str] = ()) -> Iterator[object]:
        """As :meth:`CompressedItems.read`."""


@dataclass(frozen=True)
class TorchRLItems:
    """A checked dump of a list. Rows ``[0, length)`` are live; the row written last is the one before ``cursor``."""

    path: Path
    items: Items
    #: Row that the next item gets: the number of items, if they do not fill the list.
    cursor: int
    #: Items ever written, as far as TorchRL knew.
    writes: int | None
    batch_size: int | None
    #: None without a prioritized sampler.
    priorities: checkpointers.DumpedPriorities | None
    #: uint8 ``[n]``, CPU: state of the generator that was given to the buffer; None if there was none.
    rng_state: Tensor | None
    #: What is in the folder and not here, each with its reason.
    left_out: tuple[str, ...]
    #: Entries of TensorDicts that are left out.
    without: Collection[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are known to be needed: none, as the storage may compress the items again."""
        return 0

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def length(self) -> int:
        return len(self.items)

    @property
    def capacity(self) -> int | None:
        """Rows of the list; None: a dump of one whose oldest item is in row 0 does not say it."""
        return self.length if 0 < self.cursor < self.length else None

    @property
    def position(self) -> int:
        """Position that the next item gets; the live ones are the ``length`` before it."""
        return self.length + self.cursor % max(self.length, 1)

    @property
    def write_count(self) -> int:
        return self.position if self.writes is None else self.writes

    def read(self, decompress: Decompress | None, *, whole: bool) -> Iterator[object]:
        """As :meth:`CompressedItems.read`."""
        return self.items.read(decompress, whole=whole, without=self.without)

    def prepare(self, storage: checkpointers.SavedStorage, without: Collection[str]) -> StorageLoad:
        """Read and check all items for a storage. Raises as :meth:`read`; ``IncompatibleCheckpoint``: it is no list, or another one."""
        return storage.prepare_items(replace(self, without=without))


def whole_of(
    stream: Tensor, shape: torch.Size, dtype: torch.dtype, decompress: Decompress | None, where: str
) -> Tensor:
    """The tensor that a stream, on the CPU, holds.

    Raises ``CorruptCheckpoint``: damaged. ``IncompatibleCheckpoint``: a stream that is read otherwise.
    """
    if decompress is not None:
        return _by(decompress, stream, shape, dtype, where)
    data = b"" if stream.dtype is not torch.uint8 else stream.numpy().tobytes()
    if not copies.is_stream(data):
        raise IncompatibleCheckpoint(f"{where}: expected a stream of zlib's or Zstandard's. {_OTHERWISE}")
    try:
        made = bytearray(copies.inflated(data, shape.numel() * dtype.itemsize, "loads"))
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: {error}. Nothing was changed. Copy it again.") from error
    values = torch.frombuffer(made, dtype=dtype) if made else torch.empty(0, dtype=dtype, device="cpu")
    check_bools(values, where)
    return values.reshape(shape)


def _by(decompress: Callable[..., object], stream: Tensor, shape: torch.Size, dtype: torch.dtype, file: str) -> Tensor:
    """What a function of the user's makes of a stream. Raises ``IncompatibleCheckpoint``: not what it should."""
    try:
        made = decompress(stream, {"shape": shape, "dtype": dtype, "device": torch.device("cpu")})
    except Exception as error:
        raise IncompatibleCheckpoint(
            f"{file}: the storage's decompression_fn raised {type(error).__name__} ({error!s:.200}). It must be the one that TorchRL had, "
            "whose default is zlib. Load it into a storage without one."
        ) from error
    if not isinstance(made, Tensor) or made.shape != shape or made.dtype is not dtype:
        got = f"{list(made.shape)} {made.dtype}" if isinstance(made, Tensor) else type(made).__name__
        raise IncompatibleCheckpoint(
            f"{file}: expected a tensor {list(shape)} {dtype} of the storage's decompression_fn, got {got}. It must be the one that "
            "TorchRL had, whose default is zlib."
        )
    return made


def _tensors(item: _Tensor | _TensorDict | _Other) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(item, _Tensor):
        yield "", item
    elif isinstance(item, _TensorDict):
        yield from ((key, field) for key, field in item.fields.items() if isinstance(field, _Tensor))


def _values(item: _Tensor | _TensorDict | _Other) -> Iterator[object]:
    if isinstance(item, _Other):
        yield item.value
    elif isinstance(item, _TensorDict):
        yield from (field.value for field in item.fields.values() if isinstance(field, _NonTensor))


def _is_tensor(value: object) -> bool:
    return isinstance(value, dict) and value.get("__type__") == "torch.Tensor"


def _is_ambiguous(value: object, depth: int = 0) -> bool:
    """Whether it may have been another one before JSON was made of it."""
    if isinstance(value, list):
        return True
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return False
    if "__type__" in value:
        return value["__type__"] == "NonTensorData" and _is_ambiguous(value.get("value"), depth + 1)
    return any(INTEGER.fullmatch(key) or _is_ambiguous(entry, depth + 1) for key, entry in value.items())
