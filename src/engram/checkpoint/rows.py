"""The rows of a store as files, and back: flat, a file per field; or in segments, of which those that did not change are linked."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from engram.checkpoint.runs import Marks, find_runs
from engram.format import layout
from engram.format.parts import Geometry, PartField, SegmentRows, segment_layout
from engram.store import StoreState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from engram.format.parts import PartReader, PartWriter
    from engram.format.schema import Schema
    from engram.store import Store

__all__ = ["Written", "described", "read_flat", "read_state", "write_flat", "write_tables"]

#: What a ticket says of a row that is whole, and of one of which nothing was saved.
_COMMITTED, _VOID = 2, 3
#: Bytes that are copied from an accelerator at a time.
_PIECE = 16 << 20
_STEP_FIRST, _STEP_LAST = 0, 2


def described(schema: Schema, roles: Sequence[str]) -> tuple[Geometry, list[PartField]]:
    """A store as a part describes it."""
    geometry = Geometry(schema.capacity, schema.lanes, schema.capacity // schema.lanes, schema.columns)
    fields = [
        PartField(number, field.key, field.dtype, field.shape, role)  # type: ignore[arg-type]
        for number, (field, role) in enumerate(zip(schema.fields, roles, strict=True))
    ]
    return geometry, fields


def _bytes_of(tensor: Tensor, begin: int, end: int) -> Any:
    """Rows as bytes; those on an accelerator are copied to the host."""
    rows = tensor[begin:end]
    return rows.cpu().reshape(-1).view(torch.uint8).numpy()


def _live(state: StoreState) -> Iterator[tuple[int, int]]:
    """Stretches of rows that hold something: ``[begin, end)``."""
    there = np.concatenate([[False], state.numbers.numpy() != 0, [False]])
    borders = np.flatnonzero(there[1:] != there[:-1])
    yield from zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)


def stored_rows(state: StoreState) -> int:
    """Rows of a flat file: up to the last one that is inside an extent."""
    length = len(state.numbers) // len(state.lanes)
    ends = [lane * length + live for lane, live in enumerate(state.lanes[:, 1].tolist()) if live]
    return max(ends, default=0)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_flat(part: PartWriter, store: Store, state: StoreState) -> None:
    """A file per field, with holes where nothing was written; and TensorDict's descriptions, so that it can be loaded without engram.

    Nobody must be writing.

    Raises:
        OSError: no space, or an I/O error.
    """
    rows = stored_rows(state)
    stretches = list(_live(state))
    for field, tensor in zip(store.schema.fields, store.tensors, strict=True):
        name = layout.field_path(_HERE, field.key).as_posix()
        size = field.row_bytes
        step = max(1, _PIECE // max(1, size))
        with part.file(name, rows * size, sparse=True) as file, _its_file(store, field.key) as source:
            at = 0
            for begin, end in stretches:
                file.skip((begin - at) * size)
                if source is not None:
                    file.copy_from(source, begin * size, (end - begin) * size)
                else:
                    for i in range(begin, end, step) if not tensor.is_cpu else (begin,):
                        file.write(_bytes_of(tensor, i, min(i + step, end) if not tensor.is_cpu else end))
                at = end
            file.skip((rows - at) * size)
    flat = msgspec.structs.replace(store.schema, capacity=rows)
    for path, raw in layout.meta_files(_HERE, flat).items():
        with part.file(path.as_posix(), len(raw)) as file:
            file.write(raw)


@contextlib.contextmanager
def _its_file(store: Store, key: tuple[str, ...]) -> Iterator[int | None]:
    """The file of a field of a directory store, whose space another file of that file system may share."""
    if store.directory is None:
        yield None
        return
    fd = os.open(layout.field_path(store.directory, key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
