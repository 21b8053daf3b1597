"""Fields that are added to rows which are there: ``add_field``, and ``rb[:] = data`` with new entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engram import storages
from engram._support.field_paths import checked_path
from engram._support.nested import find, flatten, has_entries
from engram.format.schema import Field
from engram.storages._columns import rows_of_selection
from engram.storages._structure import Structure
from engram.storages._types import as_tensor, cast
from engram.store import DTYPE_NAMES, DTYPE_OF
from engram.store import add_field as add_to_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engram._support.field_paths import FieldPath
    from engram.storages import Rows, Storage

_CALL = "add_field"


class _Writes(Protocol):
    takes_tensordicts: bool


class _Stored(Protocol):
    @property
    def _writing(self) -> _Writes: ...
    @property
    def storage(self) -> Storage: ...


def add_field(self: _Stored, key: str | tuple[str, ...], example: object, *, fill: object = 0) -> None:
    """Add a field to a buffer that holds rows: one column more in its store, for all processes that have it open.

    Every row has ``fill`` in it, until it is written with a value. From now on the field is one of those of ``rb[i]``, :meth:`sample`,
    dumps and checkpoints. Data that is written may leave it out, and gets ``fill`` then: a writer that does not know of the field goes on
    as before. Other handles, also in other processes, have it from their next call on; a batch that was prefetched stays as it is.

    Of a store in shared memory or in a folder, the field is there in all rows, or not at all, whenever this process is killed. Adding
    the same field again changes nothing, so every process of a program may do so.

    Args:
        key: of the field; a tuple for one inside of others. Containers that are missing are made.
        example: its value in one row: a tensor, array or number, which says shape and dtype, as for :meth:`add`. Its content is not read.
        fill: a number, or a value of that shape.

    Raises:
        ValueError: there is a field of that key with another dtype, shape or fill; a buffer of TensorDicts, whose writes drop
            ``"index"`` and ``"index_generation"``; rows that take no entry more, such as tuples; a fill
            that the dtype does not hold, or of another shape.
        TypeError: an example that is no tensor, array or number; a list storage.
        RuntimeError: nothing was ever written: the first row says the fields. Rows on an accelerator. A connection: call it where the
            store is.
        OSError: no space; the folder has a file of that name. ReadOnlyStore: the buffer only reads.
        WriterStalled: another thread or process was writing, or had paused the store, for 15 seconds. StoreInUse: another process is
            opening or closing it. Nothing is changed, whatever is raised.

    Cost: O(capacity) for the column. Writers wait while it is put in place, about a millisecond.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"reward": torch.ones(3)})
    >>> rb.add_field("value", torch.zeros(1), fill=-1.0)
    >>> _ = rb.add({"reward": 2.0, "value": torch.tensor([5.0])})
    >>> _ = rb.add({"reward": 3.0})
    >>> rb["value"].flatten()
    tensor([-1., -1., -1.,  5., -1.])
    """
    storage = _checked(self.storage)
    path = checked_path(key, f"{_CALL}: key")
    if self._writing.takes_tensordicts and path[0] in ("index", "index_generation"):
        raise ValueError(
            f"{_CALL}: key: expected another key than {key!r}: a {type(self).__name__} drops {path[0]!r} of what is written, as "
            "its batches say there which rows they are. Choose another name."
        )
    nested: object = 0
    for part in reversed(key if isinstance(key, tuple | list) else (key,)):
        nested = {part: nested}
    if _has_int(nested, path, {one.key for one in storage.store.schema.fields}):
        raise TypeError(
            f"{_CALL}: key: expected new keys that are strings, got {key!r}. Rows have ints from the first one on."
        )
    nested = example
    for part in reversed(path):
        nested = {part: nested}
    fields = Structure.of(nested, batched=False, call=_CALL).fields
    if len(fields) != 1 or fields[0].key != path:
        raise TypeError(f"{_CALL}: example: expected a tensor, an array or a number, got {type(example).__name__}.")
    _add(storage, fields[0], _row(fields[0], fill))


def _checked(storage: Storage) -> storages.TensorStorage:
    if storage.traits.is_remote:
        raise RuntimeError(
            f"{_CALL}: expected the rows in this process, the buffer is a connection. Call it where the store is."
        )
    if not isinstance(storage, storages.TensorStorage):
        raise TypeError(f"{_CALL}: expected a tensor storage, a {type(storage).__name__} has no fields.")
    if storage.memory is None:
        raise RuntimeError(
            f"{_CALL}: expected a store, but nothing was ever written. Write the field in the first row."
        )
    storage.memory.check_writable()
    if not storage.memory.is_native:
        raise RuntimeError(
            f"{_CALL}: expected rows on the CPU, got those of {storage.memory.place}. Write the field in the first row."
        )
    return storage


def _row(field: Field, fill: object) -> bytes:
    """A row of the field that holds a fill."""
    dtype, shape = DTYPE_OF[field.dtype], torch.Size(field.shape)
    given = as_tensor(fill, field.key, f"{_CALL}: fill", dtype).detach().cpu()
    value = given if given.dtype is dtype else cast(given, dtype)
    if value is None:
        raise ValueError(f"{_CALL}: fill: expected a value that {field.dtype} holds, got {fill!r:.80}.")
    if value.numel() != 1 and value.shape != shape:
        raise ValueError(f"{_CALL}: fill: expected a number, or shape {list(shape)}, got {list(value.shape)}.")
    row = torch.empty(shape, dtype=dtype, device="cpu").copy_(value.reshape(()) if value.numel() == 1 else value)
    return row.reshape(-1).view(torch.uint8).numpy().tobytes()


def _add(storage: storages.TensorStorage, field: Field, fill: bytes) -> None:
    try:
        add_to_store(storage.store, field, fill)
    except ValueError as error:
        raise ValueError(f"{_CALL}: {str(error).removesuffix('.')}.") from error


def add_entries(storage: Storage, where: Rows, data: object, call: str, ignored: Iterable[str]) -> None:
    """Add the fields of data ``[*batch, ...]`` for some rows that are not stored yet, filled with zeros.

    Nothing is done if there are none, or if no field can be added: then writing the data says what is wrong.

    Raises:
        KeyError, RuntimeError, TypeError: the other entries are not those of the rows. Nothing is changed.
        As :func:`add_field`.
    """
    if not isinstance(storage, storages.TensorStorage) or not storage.store.is_native or not has_entries(data):
        return
    structure, schema, new = storage.written(), storage.store.schema, []
    known, dims = {field.key for field in structure.fields}, storage.ndim
    for path, leaf in flatten(data):
        if path in known or path[0] in ignored:
            continue
        field = None if _has_int(data, path, known) else _field(path, leaf, dims, call)
        if field is None:
            return
        try:
            schema = schema.grown(field, bytes(field.row_bytes))
        except ValueError:
            return
        new.append(field)
    if new:
        rows = data if where.shape is None else rows_of_selection(data, where.shape, call, structure)
        structure.grown(schema).flatten(rows, len(where.rows), call, ignored)
        for field in new:
            _add(storage, field, bytes(field.row_bytes))


def _field(path: FieldPath, leaf: object, dims: int, call: str) -> Field | None:
    try:
        value: Tensor = as_tensor(leaf, path, call)
    except TypeError:
        return None
    if value.dtype not in DTYPE_NAMES or value.ndim < dims:
        return None
    return Field(path, DTYPE_NAMES[value.dtype], tuple(value.shape[dims:]))


def _has_int(data: object, path: FieldPath, known: set[FieldPath]) -> bool:
    """Whether a key on the way to an entry of data is an int that is no key of the rows yet."""
    for at, name in enumerate(path):
        new = not any(one[: at + 1] == path[: at + 1] for one in known)
        if new and isinstance(data, dict) and name not in data:
            return True
        data = find(data, (name,))
    return False
