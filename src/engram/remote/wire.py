"""Rows as Arrow record batches: a column of binaries per field, whose metadata say dtype and shape."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias, cast

import pyarrow as pa
import torch

from engram._support.native import Layout, received
from engram.format.schema import DTYPES, Field, Schema
from engram.store.memory import DTYPE_NAMES, DTYPE_OF, dlpack_specs
from engram.store.ragged_rows import Items, items_in, offsets_of

Received: TypeAlias = Callable[[], list[torch.Tensor]]


#: Names of columns that are no fields begin with it.
MARK = ":"
#: That of the numbers of the rows of batches.
ROW_NUMBER = f"{MARK}row"
_NOTHING = pa.py_buffer(b"")


class Column(NamedTuple):
    """One column of a message."""

    name: str
    dtype: str
    #: Of one row; of an item, where rows have any number of them.
    shape: tuple[int, ...]
    #: Whether they have.
    ragged: bool = False

    @property
    def nbytes(self) -> int:
        """Of one row, or item."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def type(self) -> pa.DataType:
        """Arrow's."""
        return pa.large_binary() if self.ragged else pa.binary(self.nbytes)

    def field(self) -> pa.Field:
        """As a field of an Arrow schema."""
        metadata = {"dtype": self.dtype, "shape": json.dumps(self.shape)} | ({"ragged": "1"} if self.ragged else {})
        return pa.field(self.name, self.type, nullable=False, metadata=metadata)


#: Of rows by number, with the tickets that they have or must have; and of new priorities.
ROW, TICKET = [Column("row", "int64", ())], [Column("ticket", "int64", ())]
#: Of rows that come from another store, behind those that are written.
MOVED = Column(f"{MARK}priority", "float64", ())
EDITS, PRIORITIES = ROW + TICKET, [*ROW, Column("priority", "float64", ()), *TICKET]


def fields_of(schema: Schema) -> list[Column]:
    """The columns of a store's rows: field ``k`` is called ``k:`` and its key."""
    whats = [it.ragged or it for it in schema.fields]
    names = [f"{k}{MARK}{'/'.join(it.key)}" for k, it in enumerate(schema.fields)]
    each = zip(names, whats, schema.fields, strict=True)
    return [Column(name, it.dtype, tuple(it.shape), it is not field) for name, it, field in each]


def written_columns(schema: Schema) -> list[Column]:
    """The columns of rows on their way into a store: their lanes, too, where there are several."""
    lanes = [Column(f"{MARK}lane", "int64", ())] if schema.lanes > 1 else []
    return [*fields_of(schema), *lanes]


def entry_name(key: str | tuple[str, ...]) -> str:
    """The name of the column of an entry of ``info``."""
    return MARK + json.dumps(key)


@lru_cache
def entry_of(name: str) -> str | tuple[str, ...]:
    """The entry of ``info`` that a column is. Raises ``ValueError``: it is none."""
    key = json.loads(name.removeprefix(MARK))
    return key if isinstance(key, str) else tuple(key)


def column_of(name: str, rows: torch.Tensor) -> Column:
    """The column of a tensor ``[n, *shape]``, or of rows of items."""
    items = items_in(rows)
    values = rows if items is None else items.given
    return Column(name, DTYPE_NAMES[values.dtype], tuple(values.shape[1:]), items is not None)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The schema of messages with these columns."""
    return pa.schema([column.field() for column in columns])


def columns_in(schema: pa.Schema) -> list[Column]:
    """The columns that a schema says, before anything is allocated. Raises ``ValueError``: it says no such columns."""
    return [_column_in(field) for field in schema]


def _column_in(field: pa.Field) -> Column:
    metadata = field.metadata or {}
    try:
        shape = [operator.index(size) for size in json.loads(metadata[b"shape"])]
        column = Column(field.name, metadata[b"dtype"].decode(), tuple(shape), b"ragged" in metadata)
        good = min(shape, default=1) >= column.ragged and field.type == column.type
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"column {field.name!r:.80}: expected a dtype and a shape, got {metadata!r:.80}.") from error
    if not good:
        raise ValueError(
            f"column {field.name!r:.80}: expected {column.nbytes} bytes a row, as its dtype and shape say, got {field.type}."
        )
    return column


def record_batch(schema: pa.Schema, columns: Sequence[torch.Tensor], rows: int) -> pa.RecordBatch:
    """A message around contiguous tensors, and around items that lie one after the other, without a copy.

    Raises ``ValueError``: one has not the bytes that the schema says.
    """
    arrays = []
    for field, tensor in zip(schema, columns, strict=True):
        if (items := items_in(tensor)) is not None:
            arrays.append(_array_of(field, items, rows))
            continue
        dense, nbytes = tensor.contiguous(), field.type.byte_width * rows
        if dense.nbytes != nbytes:
            raise ValueError(f"column {field.name!r:.80}: expected {nbytes} bytes for {rows} rows, got {dense.nbytes}.")
        arrays.append(pa.FixedSizeBinaryArray.from_buffers(field.type, rows, [None, _raw(dense)]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """In memory of its own: the caller may change its tensors."""
    arrays = []
    for array in batch.columns:
        raws = [raw and pa.py_buffer(raw.to_pybytes()) for raw in array.buffers()]
        arrays.append(pa.Array.from_buffers(array.type, len(array), raws))
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One behind the other."""
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _array_of(field: pa.Field, items: Items, rows: int) -> pa.Array:
    """A column of rows of items. Those of a field that was left out are zeros. Raises as :func:`record_batch`."""
    column, there = _column_in(field), items.packed()
    values = there.values
    if values is None:
        values = torch.zeros((there.total, *column.shape), dtype=DTYPE_OF[column.dtype], device="cpu")
    offsets = offsets_of(there.lengths) if there.offsets is None else there.offsets
    nbytes = int(offsets[-1]) * column.nbytes
    if len(offsets) != rows + 1 or values.nbytes != nbytes:
        raise ValueError(
            f"column {field.name!r:.80}: expected {nbytes} bytes of items of {rows} rows, got {values.nbytes} of {len(there)}."
        )
    ends = offsets * column.nbytes
    return pa.Array.from_buffers(field.type, rows, [None, _raw(ends), _raw(values)])


def _raw(tensor: torch.Tensor) -> pa.Buffer:
    """The memory of a contiguous tensor, which the buffer keeps."""
    return pa.foreign_buffer(tensor.data_ptr(), tensor.nbytes, tensor) if tensor.nbytes else _NOTHING


#: Rows are gathered until there is so much.
GATHERED_BYTES = 64 << 10


class Rows:
    """The rows of one write, or of several that were gathered."""

    def __init__(self, schema: pa.Schema, whole: pa.RecordBatch | None = None) -> None:
        """``whole``: they are those of a batch, and no others are gathered."""
        self.schema, self._whole = schema, whole
        #: Of each row, the number that its writer was told; -1: none. Empty: none were.
        self.told: list[int] = []
        self._raws = [bytearray() for _ in schema]
        #: Of each write.
        self.sizes: list[int] = [] if whole is None else [whole.num_rows]
        self.rows: int = 0 if whole is None else whole.num_rows
        self.nbytes: int = 0 if whole is None else whole.nbytes
        self.open, self.is_full = whole is None, False

    def gather(self, columns: list[bytes], n: int, nbytes: int) -> None:
        for raw, column in zip(self._raws, columns, strict=True):
            raw += column
        self.sizes.append(n)
        self.rows, self.nbytes = self.rows + n, self.nbytes + nbytes
        self.is_full = self.nbytes >= GATHERED_BYTES

    def takes(self, schema: pa.Schema) -> bool:
        """Whether others may be gathered to these."""
        return self.open and not self.is_full and self.schema is schema

    def batch(self) -> pa.RecordBatch:
        """All of them, from now on no others."""
        self.open = False
        if self._whole is None:
            arrays = [
                pa.FixedSizeBinaryArray.from_buffers(field.type, self.rows, [None, pa.py_buffer(raw)])
                for field, raw in zip(self.schema, self._raws, strict=True)
            ]
            self._whole = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return self._whole

    def halves(self) -> list[Rows]:
        """The first writes, and the others; of one write itself."""
        if len(self.sizes) < 2:
            return [self]
        found, first, half = [], 0, len(self.sizes) // 2
        for sizes in (self.sizes[:half], self.sizes[half:]):
            part, n = Rows(self.schema), sum(sizes)
            widths = [field.type.byte_width for field in self.schema]
            part._raws = [raw[first * it : (first + n) * it] for raw, it in zip(self._raws, widths, strict=True)]
            part.sizes, part.rows, part.nbytes, part.open = sizes, n, self.nbytes // self.rows * n, False
            part.told = self.told[first : first + n]
            found.append(part)
            first += n
        return found


#: How columns are compressed on their way: by Arrow, each buffer by itself.
COMPRESSIONS = (None, "zstd")


def stream_name(stream: str, compression: str | None, level: int = 0) -> bytes:
    """What a client asks for: a stream whose messages are compressed in both directions, or are not, of a server that has said this level.

    A server of a lower one, which is at its address now, has no such stream. Those of engrams before level 3 do not name it.
    """
    how, of = "" if compression is None else f"+{compression}", f"@{level}" if level >= 3 else ""
    return f"{stream}{how}{of}".encode()


def options(compression: str | None) -> pa.ipc.IpcWriteOptions:
    """Those of messages whose columns are compressed, or are not."""
    return pa.ipc.IpcWriteOptions(compression=compression)


def tensors_in(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[torch.Tensor]:
    """The columns of a message, ``[rows, *shape]`` each. Raises as :func:`batches_in`."""
    return batches_in(batch, columns, [batch.num_rows])[0]()


def batches_in(batch: pa.RecordBatch, columns: Sequence[Column], sizes: Sequence[int]) -> list[Received]:
    """The columns of the batches of a message, of these sizes and one behind the other.

    They are copied when they are called for: into the block of a loader that draws, else into memory of their own. Columns of 64 KiB or
    more stay where they are if the processor can read them there: they keep the whole message.

    Raises ``ValueError``: the buffers of the message are not what its schema says, or it has fewer rows.
    """
    layout, row_bytes = _layout(tuple(columns))
    rows, memories, ragged = batch.num_rows, [], {}
    for place, (column, size, array) in enumerate(zip(columns, row_bytes, batch.columns, strict=True)):
        if column.ragged:
            ragged[place] = _ItemsOf.array(column, array)
            continue
        nbytes, raw = size * rows, array.buffers()[1]
        if array.null_count or array.offset or (nbytes and (raw is None or raw.size < nbytes)):
            raise ValueError(f"column {column.name!r:.80}: expected {nbytes} bytes for {rows} rows, without nulls.")
        memories.append(raw)
    begins = [0, *itertools.accumulate(sizes)]
    if begins[-1] > rows or min(sizes, default=0) < 0:
        raise ValueError(f"expected columns with the bytes of all rows, {begins[-1]}, got those of {rows}.")
    each = list(zip(begins, sizes, strict=False))
    plain: list[Received] = [partial(received, memories, layout, begin, size) for begin, size in each]
    if not ragged:
        return plain
    return [partial(_with_items, of, ragged, *where) for of, where in zip(plain, each, strict=True)]


class _ItemsOf(NamedTuple):
    """The items of all rows of a message."""

    raw: pa.Buffer
    layout: Layout
    #: int64 ``[rows + 1]``.
    offsets: torch.Tensor

    @classmethod
    def array(cls, column: Column, array: pa.Array) -> _ItemsOf:
        """Raises ``ValueError``: offsets that fall, or lie outside of the items."""
        _, ends, raw = array.buffers()
        count, size = len(array) + 1, 0 if raw is None else raw.size
        offsets = torch.frombuffer(bytearray(ends or bytes(8)), dtype=torch.int64)[:count]
        items = offsets // column.nbytes
        lacks = array.null_count or array.offset or len(offsets) < count or int(offsets[0]) or int(offsets[-1]) > size
        if lacks or bool((offsets.diff() < 0).any()) or not torch.equal(items * column.nbytes, offsets):
            raise ValueError(
                f"column {column.name!r:.80}: expected offsets of whole items within those that came, which rise, without nulls."
            )
        return cls(_NOTHING if raw is None else raw, _layout((column._replace(ragged=False),))[0], items)

    def rows(self, begin: int, size: int) -> Items:
        """Those of a batch."""
        of_batch = self.offsets[begin : begin + size + 1]
        first = int(of_batch[0])
        (values,) = received([self.raw], self.layout, first, int(of_batch[-1]) - first)
        return Items.of_lengths(values, of_batch.diff().to(torch.int32))


def _with_items(plain: Received, ragged: Mapping[int, _ItemsOf], begin: int, size: int) -> list[torch.Tensor]:
    columns = plain()
    for place, items in ragged.items():
        columns.insert(place, cast("torch.Tensor", items.rows(begin, size)))
    return columns


@lru_cache
def _layout(columns: tuple[Column, ...]) -> tuple[Layout, list[int]]:
    """What makes tensors of columns that are not ragged, and the bytes of a row of each column."""
    fields = [Field((it.name,), it.dtype, it.shape) for it in columns if not it.ragged]
    return Layout(dlpack_specs(fields)), [it.nbytes for it in columns]
