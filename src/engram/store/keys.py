"""Finds rows by the content of one field, their key. Every write of every process keeps the index."""

from __future__ import annotations

import numpy as np
import torch

from engram._support import checks, native
from engram._support.field_paths import FieldPath, public
from engram.errors import IncompatibleStore
from engram.format.schema import DTYPES, Field, Schema
from engram.store.indexes import TicketIndex, caught_up
from engram.store.row_indexes import MAX_KEY_BYTES, TEXTS, content_of, is_text, key_bytes_of
from engram.store.store import Store

#: dtypes of keys that are numbers.
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


class KeyIndex(TicketIndex[native.Keys]):
    """The rows of one store by their key. Made by :meth:`of_store`, found by :meth:`in_use`."""

    kind = "keys"
    #: Its name: a store has one such index.
    NAME = "main"
    #: Whether it is known to have scanned the rows: its maker may have died before.
    scanned = False
    make_core = native.Keys
    reset_mutex = staticmethod(native.reset_keys_mutex)
    copy_memory = staticmethod(native.copy_keys)
    format_memory = staticmethod(native.format_keys)

    @classmethod
    def of_store(cls, store: Store, key: FieldPath) -> KeyIndex:
        """The index, whose keys are a field. A new index scans the rows once.

        Raises:
            KeyError: no such field. TypeError: its content is no key. ValueError: a store of 2^32 rows.
            IncompatibleStore: the store has an index by another field.
            OSError: no space for its file.
        """
        number = key_field(store.schema, key)
        rows, key_bytes = store.capacity, key_bytes_of(store.schema.fields[number])
        index, _ = cls.of_name(store.indexes, cls.NAME, native.keys_bytes(rows), rows, number, key_bytes)
        if index.core.field != number:
            raise IncompatibleStore(
                f"index_keys: expected the field {public(store.schema.fields[index.core.field].key)!r}, by which rows of this store are "
                f"found already, got {public(key)!r}. A store has one key."
            )
        return index

    @classmethod
    def in_use(cls, store: Store) -> KeyIndex | None:
        """The index that this process or another one has made; None: there is none."""
        known: KeyIndex | None = store.indexes.get((cls.NAME, cls.kind))
        if known is None or not known.scanned:
            known = store.indexes.made_before(cls.NAME, cls.kind)
            if known is not None:
                known.scanned = True
        return known


class StoredKeys:
    """Finds the rows of a store by their key.

    Args:
        store: the rows.
        index: of their keys.
    """

    def __init__(self, store: Store, index: KeyIndex) -> None:
        self._store, self._index = store, index
        self._field = store.schema.fields[index.core.field]

    @classmethod
    def of(cls, store: Store, key: FieldPath | None, call: str) -> StoredKeys:
        """Those of a store. ``key``: the field that they are in; None: the store knows it.

        Raises:
            TypeError: the rows are not on the CPU. RuntimeError: the store does not know it. As :meth:`KeyIndex.of_store`.
        """
        if not store.is_native:
            raise TypeError(
                f'{call}: expected rows on the CPU, got those of {store.place}. Use a storage with device="cpu" and tensors.'
            )
        store.core.find_fields()  # another process may have added the one that has the keys
        index = KeyIndex.in_use(store) if key is None else KeyIndex.of_store(store, key)
        if index is None:
            raise no_index(call)
        return cls(store, index)

    def newest(self, keys: object, call: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``ReplayBuffer.rows_of``: int64 rows and generations ``[n]``. Raises what it raises of keys."""
        packed, n = packed_keys(self._field, keys, call)
        rows, writes = caught_up(self._index, readonly=self._store.readonly).core.find(packed.data_ptr(), n)
        return rows, writes

    def all(self, keys: object, call: str) -> tuple[torch.Tensor, torch.Tensor]:
        """All live rows with one of these keys, and their generations. Raises what ``ReplayBuffer.remove`` raises of keys."""
        packed, n = packed_keys(self._field, keys, call)
        rows, writes = caught_up(self._index, readonly=self._store.readonly).core.find_all(packed.data_ptr(), n)
        return rows, writes


def no_index(call: str) -> RuntimeError:
    """The error of rows that have no key."""
    return RuntimeError(
        f"{call}: expected rows with an index of their keys, got a buffer without one. Name the field that has them: "
        'rb.index_keys("uid").'
    )


def key_of(store: Store) -> FieldPath | None:
    """The field by which rows of a store are found; None: none was named."""
    index = KeyIndex.in_use(store) if store.is_native else None
    return None if index is None else store.schema.fields[index.core.field].key


def key_field(schema: Schema, key: FieldPath) -> int:
    """The number of a field whose content can be a key. Raises ``KeyError``: there is none. ``TypeError``: its content is no key."""
    numbers = {field.key: number for number, field in enumerate(schema.fields)}
    if key not in numbers:
        raise KeyError(
            f"index_keys: expected a stored field, one of {list(map(public, sorted(numbers)))}, got {public(key)!r}."
        )
    field = schema.fields[numbers[key]]
    number = field.dtype in _INTEGERS and field.row_bytes == DTYPES[field.dtype] and field.ragged is None
    if not (number or is_text(field)) or not 0 < key_bytes_of(field) <= MAX_KEY_BYTES:
        raise TypeError(
            f"index_keys: {public(key)!r}: expected one integer per row, {', '.join(_INTEGERS)}, or {TEXTS}; got {content_of(field)}. "
            "Number the rows, or hash their names."
        )
    return numbers[key]


def count_keys(keys: object) -> int:
    """How many keys these are, where no field says what they must be."""
    if isinstance(keys, str | bytes | int):
        return 1
    return len(keys) if isinstance(keys, list | tuple) else int(checks.as_numbers("keys", keys).reshape(-1).numel())


def packed_keys(field: Field, keys: object, call: str) -> tuple[torch.Tensor, int]:
    """Keys as the field has them, one behind the other in a contiguous tensor, and how many.

    Raises:
        TypeError: they are no texts, or no ints. ValueError: one is longer than the field, or a number that it cannot hold.
    """
    if not is_text(field):
        return _packed_numbers(field, keys, call)
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "USO":
        keys = keys.reshape(-1).tolist()
    if isinstance(keys, torch.Tensor | np.ndarray):
        return _packed_bytes(field, torch.as_tensor(keys), call)
    texts = [keys] if isinstance(keys, str | bytes) else list(keys) if isinstance(keys, list | tuple) else None
    packed = None if texts is None else native.pack_texts(texts, key_bytes_of(field))
    if texts is None or packed is None:
        raise _refused_texts(field, keys, texts, call)
    return packed, len(texts)


def _packed_numbers(field: Field, keys: object, call: str) -> tuple[torch.Tensor, int]:
    name = public(field.key)
    given = checks.as_ints(f"{call}: keys", keys, f"ints, as the field {name!r} has").reshape(-1).contiguous()
    if field.dtype == "int64":
        return given, len(given)  # as they are, which takes a third of the time
    packed = given.to(getattr(torch, field.dtype))
    if not torch.equal(packed.to(torch.int64), given):
        wrong = given[packed.to(torch.int64) != given][0]
        raise ValueError(f"{call}: keys: expected numbers that the field {name!r}, {field.dtype}, holds, got {wrong}.")
    return packed, len(packed)


def _packed_bytes(field: Field, keys: torch.Tensor, call: str) -> tuple[torch.Tensor, int]:
    """Keys that are bytes already: uint8 ``[n, length]``, or ``[length]`` for one."""
    length = key_bytes_of(field)
    if keys.dtype is not torch.uint8 or keys.ndim not in (1, 2):
        raise TypeError(
            f"{call}: keys: expected texts, or their bytes as uint8 [n, {length}], as the field {public(field.key)!r} has them, got "
            f"{str(keys.dtype).removeprefix('torch.')} {list(keys.shape)}."
        )
    rows = keys.to("cpu").reshape(-1, keys.shape[-1])
    if bool(rows[:, length:].any()):
        raise ValueError(
            f"{call}: keys: expected at most {length} bytes, as the field {public(field.key)!r} has, got {rows.shape[-1]}."
        )
    packed = torch.zeros(len(rows), length, dtype=torch.uint8, device="cpu")
    packed[:, : rows.shape[-1]] = rows[:, :length]
    return packed, len(rows)


def _refused_texts(field: Field, keys: object, texts: list[object] | None, call: str) -> Exception:
    """The error of keys that are no texts, or too long."""
    expected, name = f"{call}: keys: expected", public(field.key)
    if texts is None:
        return TypeError(
            f"{expected} a str or bytes, or a list of them, as the field {name!r} has texts, got {type(keys).__name__}."
        )
    for place, text in enumerate(texts):
        if not isinstance(text, str | bytes):
            return TypeError(
                f"{expected} str or bytes, as the field {name!r} has texts, got {type(text).__name__} at {place}."
            )
        size = len(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
        if size > key_bytes_of(field):
            return ValueError(
                f"{expected} at most {key_bytes_of(field)} bytes, as the field {name!r} has, got {size} at {place}: {text!r:.60}."
            )
    return ValueError(f"{expected} texts that UTF-8 can write, got a lone surrogate in one of them.")
