"""Rows as Arrow record batches: a column of fixed-size binaries per field, whose metadata say dtype and shape."""

from __future__ import annotations

import itertools
import json
import math
import operator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from torch import Tensor

from engram._support.native import Layout, received
from engram.format.schema import DTYPES, Field, Schema
from engram.store.memory import DTYPE_NAMES, dlpack_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Names of columns that are no fields begin with it.
MARK = ":"
_NOTHING = pa.py_buffer(b"")


class Column(NamedTuple):
    """One column of a message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one row."""

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    def field(self) -> pa.Field:
        """As a field of an Arrow schema."""
        metadata = {"dtype": self.dtype, "shape": json.dumps(self.shape)}
        return pa.field(self.name, pa.binary(self.nbytes), nullable=False, metadata=metadata)


#: Of rows by number, with the tickets that they have or must have; and of new priorities.
ROW, TICKET = [Column("row", "int64", ())], [Column("ticket", "int64", ())]
EDITS, PRIORITIES = ROW + TICKET, [*ROW, Column("priority", "float64", ()), *TICKET]


def fields_of(schema: Schema) -> list[Column]:
    """The columns of a store's rows: field ``k`` is called ``k:`` and its key."""
    return [Column(f"{k}{MARK}{'/'.join(it.key)}", it.dtype, it.shape) for k, it in enumerate(schema.fields)]


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


def column_of(name: str, tensor: Tensor, dims: int) -> Column:
    """The column of a tensor ``[*batch, *shape]``, whose batch has so many dimensions."""
    return Column(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape[dims:]))


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
        column = Column(field.name, metadata[b"dtype"].decode(), tuple(shape))
        good = min(shape, default=0) >= 0 and field.type == pa.binary(column.nbytes)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"column {field.name!r:.80}: expected a dtype and a shape, got {metadata!r:.80}.") from error
    if not good:
        raise ValueError(
            f"column {field.name!r:.80}: expected {column.nbytes} bytes a row, as its dtype and shape say, got {field.type}."
        )
    return column


def record_batch(schema: pa.Schema, tensors: Sequence[Tensor], rows: int) -> pa.RecordBatch:
    """A message around contiguous tensors, without a copy. Raises ``ValueError``: one has not the bytes that the schema says."""
    arrays = []
    for field, tensor in zip(schema, tensors, strict=True):
        dense, nbytes = tensor.contiguous(), field.type.byte_width * rows
        if dense.nbytes != nbytes:
            raise ValueError(f"column {field.name!r:.80}: expected {nbytes} bytes for {rows} rows, got {dense.nbytes}.")
        raw = pa.foreign_buffer(dense.data_ptr(), nbytes, dense) if nbytes else _NOTHING
        arrays.append(pa.FixedSizeBinaryArray.from_buffers(field.type, rows, [None, raw]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def tensors_in(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[Tensor]:
    """The columns of a message, ``[rows, *shape]`` each. Raises as :func:`batches_in`."""
    return batches_in(batch, columns, [batch.num_rows])[0]()


def batches_in(
    batch: pa.RecordBatch, columns: Sequence[Column], sizes: Sequence[int]
) -> list[Callable[[], list[Tensor]]]:
    """The columns of the batches of a message, of these sizes and one behind the other.

    They are copied when they are called for: into the block of a loader that draws, else into memory of their own. Columns of 64 KiB or
    more stay where they are if the processor can read them there: they keep the whole message.

    Raises ``ValueError``: the buffers of the message are not what its schema says, or it has fewer rows.
    """
    layout, row_bytes = _layout(tuple(columns))
    memories, rows = [], batch.num_rows
    for column, size, array in zip(columns, row_bytes, batch.columns, strict=True):
        nbytes, raw = size * rows, array.buffers()[1]
        if array.null_count or array.offset or (nbytes and (raw is None or raw.size < nbytes)):
            raise ValueError(f"column {column.name!r:.80}: expected {nbytes} bytes for {rows} rows, without nulls.")
        memories.append(raw)
    begins = [0, *itertools.accumulate(sizes)]
    if begins[-1] > rows or min(sizes, default=0) < 0:
        raise ValueError(f"expected columns with the bytes of all rows, {begins[-1]}, got those of {rows}.")
    return [partial(received, memories, layout, begin, size) for begin, size in zip(begins, sizes, strict=False)]


@lru_cache
def _layout(columns: tuple[Column, ...]) -> tuple[Layout, list[int]]:
    """What makes tensors of columns, and the bytes of a row of each."""
    fields = [Field((it.name,), it.dtype, it.shape) for it in columns]
    return Layout(dlpack_specs(fields)), [it.row_bytes for it in fields]
