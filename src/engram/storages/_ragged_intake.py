"""From what users hand over for a ragged field to its items: jagged tensors, values and offsets, lists of arrays, texts."""

from __future__ import annotations

import json
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from engram._support import field_paths, native, nested, tensordicts
from engram.storages._types import as_tensor
from engram.storages.ragged import ItemField, Ragged, uneven_rows
from engram.store.memory import DTYPE_NAMES
from engram.store.ragged_rows import Items

_FORMS = "a jagged nested tensor, (values, offsets), or a list of arrays"


# ---- a row, and rows ---------------------------------------------------------------------------------------------------


def rows_in(field: ItemField, value: object, call: str) -> Items:
    """Rows of a field as users hand them over, of as many as there are.

    Args:
        field: what its items are.
        value: a nested tensor ``[n, *, *shape]``; ``(values, offsets)`` or a dict, TensorDict or named tuple with ``values`` and
            ``offsets`` (or ``cu_seqlens``, or ``lengths``); a list of arrays or tensors ``[length, *shape]``; a tensor or array
            ``[n, length, *shape]`` of rows of one length. Of texts a list, a ``NonTensorStack`` or an array of them, or the
            above of uint8.
        call: for messages.

    Returns:
        The rows; over the user's own memory, where it is contiguous and on the CPU.

    Raises:
        TypeError: none of these.
        RuntimeError: items of another dtype or shape, or a row longer than ``max_length``.
        ValueError: offsets that fall, do not begin at 0, or do not end with the values; texts that cannot be encoded.

    Cost: of nested tensors and values with offsets O(n) and no copy; of lists one copy.
    """
    if isinstance(value, Items):
        return _fitting(field, value, call)
    texts = _texts(field, value) if field.kind else None
    if texts is not None:
        return _fitting(field, _encoded(field, texts, call), call)
    items = _fitting(field, _of_numbers(field, value, call), call)
    if field.kind == "utf-8":
        _check_text(field, items, call)
    return items


def _of_numbers(field: ItemField, value: object, call: str) -> Items:
    if isinstance(value, Tensor) and value.is_nested:
        return _of_nested(field, value, call)
    parts = None if field.kind == "json" else _parts(value)
    if parts is not None:
        return _of_parts(field, parts, call)
    if isinstance(value, Tensor | np.ndarray) and value.dtype != np.dtype(object):
        return _of_even(field, value, call)
    if not field.kind and _are_two_lists(value):
        raise TypeError(
            f"{call}: {field.where}: expected values and offsets, or a list of rows, got a tuple of two lists, which may be either. Write "
            '{"values": …, "offsets": …}, or [row, row].'
        )
    if isinstance(value, list | tuple | np.ndarray):
        return _of_list(field, list(value), call)
    expected = f"a list of {field.expected}" if field.kind else f"{_FORMS}, of {field.expected}"
    one = " It looks like one row: did you mean add()?" if isinstance(value, str | bytes) else ""
    raise TypeError(f"{call}: {field.where}: expected {expected}, got {nested.describe(value)}.{one}")


def row_in(field: ItemField, value: object, call: str) -> Items:
    """One row of a field, as users hand it over: a tensor, array or list of numbers ``[length, *shape]``; a text.

    Raises as :func:`rows_in`.
    """
    if isinstance(value, Items):
        return _fitting(field, value, call)
    if tensordicts.is_non_tensor(value):
        value = tensordicts.objects_in(value)
    if field.kind and not isinstance(value, Tensor | np.ndarray):
        return _fitting(field, _encoded(field, [value], call), call)
    if isinstance(value, Tensor) and value.is_nested:
        raise RuntimeError(
            f"{call}: {field.where}: expected one row of {field.expected}, got a nested tensor of {value.size(0)} rows. "
            "Did you mean extend()?"
        )
    row = torch.empty(0, dtype=field.dtype) if isinstance(value, list) and not value else value
    return _fitting(field, _of_list(field, [row], call), call)


def _fitting(field: ItemField, items: Items, call: str) -> Items:
    """The rows, whose items are checked. Raises ``RuntimeError``: a row is too long, or items are of another dtype or shape."""
    values = items.values
    if values is not None:
        if values.dtype is not field.dtype or values.shape[1:] != field.shape:
            _refuse_items(field, values, call)
        if values.requires_grad or not values.is_cpu or not values.is_contiguous():
            values = values.detach().cpu().contiguous()
        values = values.resolve_conj().resolve_neg()
        if values is not items.values:
            items = Items(values, items.starts, items.lengths)
    longest = int(items.lengths.max()) if items.longest is None and len(items) else items.longest or 0
    return _of_length(field, items, longest, call)


def _of_length(field: ItemField, items: Items, longest: int, call: str) -> Items:
    """The rows. Raises ``RuntimeError``: the longest one has too many items."""
    if longest > field.max_length:
        unit = "bytes" if field.kind else "items"
        row = int(items.lengths.argmax())
        raise RuntimeError(
            f"{call}: {field.where}: expected rows of at most max_length={field.max_length:,} {unit}, got {longest:,} in row {row}. "
            f"Cut it, or make the storage with a larger one: ragged={{{field_paths.public(field.key)!r}: Ragged(…, max_length=…)}}. "
            "Where it was not given, it follows from the first rows."
        )
    return items


def _refuse_items(field: ItemField, values: Tensor, call: str, row: str = "") -> None:
    got = f"{str(values.dtype).removeprefix('torch.')} items"
    if values.shape[1:] != field.shape:
        got += f" of shape {list(values.shape[1:])}"
        remedy = "Of a row, the first dimension alone may differ."
    else:
        remedy = f"Convert them, a tensor with .to(torch.{DTYPE_NAMES[field.dtype]}), an array with .astype."
    raise RuntimeError(f"{call}: {field.where}: expected {field.expected}, got {got}{row}. {remedy}")


def same_lengths(leader: ItemField, lengths: Tensor, field: ItemField, items: Items, call: str) -> None:
    """Raise ``RuntimeError`` unless the rows of a field have the lengths of those that it shares them with."""
    if items.lengths is lengths or torch.equal(items.lengths, lengths):
        return
    if len(items) != len(lengths):
        raise RuntimeError(
            f"{call}: {field.where}: expected {len(lengths)} rows, as {leader.where} has, got {len(items)}."
        )
    row = int((items.lengths != lengths).int().argmax())
    raise RuntimeError(
        f"{call}: {field.where}: expected the lengths of {leader.where}, which it shares: {int(lengths[row])} items in row {row}, got "
        f"{int(items.lengths[row])}. Declare it without like=, if it has lengths of its own."
    )


# ---- what was not declared --------------------------------------------------------------------------------------------


def found_in(value: object, *, batched: bool) -> Ragged | None:
    """What a field is whose first rows, or first row, say that its rows have different lengths; None: they do not say so."""
    if isinstance(value, Tensor):
        if not (batched and value.is_nested):
            return None
        items = value.values() if value.layout is torch.jagged else value.unbind()[0]
        return Ragged(value.dtype, shape=tuple(items.shape[1:]))
    if not batched:
        text = tensordicts.objects_in(value) if tensordicts.is_non_tensor(value) else value
        return None if isinstance(text, np.generic) else _kind_of([text])
    if isinstance(value, np.ndarray):
        return _kind_of(value.tolist()) if value.dtype.kind in "US" and value.ndim == 1 else None
    if tensordicts.is_non_tensor(value):
        texts = tensordicts.objects_in(value)
        return _kind_of(texts[0] if isinstance(texts, list) and texts and isinstance(texts[0], list) else texts)
    return _kind_of(value) or uneven_rows(value) if isinstance(value, list) else None


def _kind_of(texts: object) -> Ragged | None:
    for kind, of in (("utf-8", str), ("bytes", bytes)):
        if isinstance(texts, list) and texts and all(isinstance(text, of) for text in texts):
            return Ragged(kind)
    return None


def comes_later(value: object) -> bool:
    """Whether None stands for the items of a field, which has the lengths of another; in TensorDicts one None a row."""
    objects = tensordicts.objects_in(value) if tensordicts.is_non_tensor(value) else value
    return objects is None or (isinstance(objects, list) and bool(objects) and all(it is None for it in objects))


def count_rows(value: object) -> int | None:
    """How many rows a leaf of a ragged field holds; None: it is none that is known."""
    if isinstance(value, Items | list):
        return len(value)
    if tensordicts.is_non_tensor(value):
        objects = tensordicts.objects_in(value)
        return len(objects) if isinstance(objects, list) else None
    if isinstance(value, Tensor | np.ndarray):
        return (value.size(0) if isinstance(value, Tensor) else len(value)) if value.ndim else None  # nested: no shape
    parts = _parts(value)
    if parts is not None:
        return len(cast("Sized", parts.where)) - (parts.name != "lengths")
    return len(value) if isinstance(value, tuple) else None


# ---- numbers -----------------------------------------------------------------------------------------------------------


def _of_nested(field: ItemField, nested_rows: Tensor, call: str) -> Items:
    value = cast("Any", nested_rows)  # which has methods that torch does not type
    if value.layout is not torch.jagged:
        return _of_list(field, list(value.unbind()), call)
    if value._ragged_idx != 1:
        raise RuntimeError(
            f"{call}: {field.where}: expected a nested tensor whose rows differ in their first dimension, got {list(value.shape)}. "
            f"Transpose it, so that dimension 1 is the one of the lengths."
        )
    offsets, lengths = value.offsets(), value.lengths()
    if lengths is None:
        lengths = offsets.diff()
    return Items(value.values(), _on_host(offsets[:-1]), _on_host(lengths).to(torch.int32))


def _on_host(numbers: Tensor) -> Tensor:
    """int64, contiguous, on the CPU."""
    return numbers.detach().to("cpu", torch.int64).contiguous()


class _Parts(NamedTuple):
    """Items of all rows, and where the rows are."""

    values: object
    where: object
    #: Of ``where``.
    name: str


def _parts(value: object) -> _Parts | None:
    """Values and offsets in any of their forms; None: it is none of them."""
    if isinstance(value, tuple) and not nested.is_named_tuple(value):
        offsets = len(value) == 2 and _are_offsets(value[1]) and not _are_two_lists(value)
        return _Parts(value[0], value[1], "offsets") if offsets else None
    entries = nested.entries_of(value) if not isinstance(value, list | Tensor | np.ndarray) else {}
    names = set(entries.keys())
    for name in ("offsets", "cu_seqlens", "lengths"):
        if "values" in names and name in names and names <= {"values", name, "max_seqlen", "min_seqlen"}:
            return _Parts(entries["values"], entries[name], name)
    return None


def _are_two_lists(value: object) -> bool:
    """Whether it is a tuple of two lists, which may be two rows, or values and offsets."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(it, list) for it in value)


def _are_offsets(value: object) -> bool:
    """Whether it is an array of ints, or a list of some."""
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu"
    return isinstance(value, list) and all(isinstance(it, int) for it in value)


def _of_parts(field: ItemField, parts: _Parts, call: str) -> Items:
    values, where = as_tensor(parts.values, field.key, call, field.dtype), parts.where
    if not _are_offsets(where):
        raise TypeError(f"{call}: {field.where}: {parts.name}: expected ints, got {nested.describe(where)}.")
    numbers = _on_host(torch.as_tensor(np.asarray(where, np.int64)) if not isinstance(where, Tensor) else where)
    expected, got = "", ""
    if numbers.dim() != 1 or values.dim() == 0 or (parts.name != "lengths" and not len(numbers)):
        expected, got = "one dimension, [n + 1]", f"{list(numbers.shape)} of values {list(values.shape)}"
    elif parts.name == "lengths":
        if len(numbers) and int(numbers.min()) < 0:
            expected, got = "lengths of at least 0", str(int(numbers.min()))
        numbers = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
    if not expected:
        starts, lengths, longest, first, last, falls = native.rows_between(numbers)
        if first != 0:
            expected, got = "offsets that begin at 0", f"{first} first. Subtract it, and cut the values"
        elif falls >= 0:
            expected, got = "offsets that rise", f"{numbers[falls]} and then {numbers[falls + 1]}, at row {falls}"
        elif last != len(values):
            cut = "" if last > len(values) else ". Cut the values, so that none is dropped"
            expected, got = f"rows that end with the {len(values):,} values", f"an end at {last:,}{cut}"
        else:
            return Items(values, starts, lengths, offsets=numbers, longest=longest)
    raise ValueError(f"{call}: {field.where}: {parts.name}: expected {expected}, got {got}.")


def _of_even(field: ItemField, value: object, call: str) -> Items:
    """Rows ``[n, length, *shape]`` of one length."""
    rows = as_tensor(value, field.key, call, field.dtype)
    if rows.dim() < 2 or rows.shape[2:] != field.shape:
        one = (
            " It looks like one row: did you mean add()?" if rows.shape[1:] == field.shape and call == "extend" else ""
        )
        raise RuntimeError(
            f"{call}: {field.where}: expected {_FORMS} of {field.expected}, got {nested.describe(rows)}.{one}"
        )
    lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int32, device="cpu")
    return Items.of_lengths(rows.reshape(-1, *field.shape), lengths)


def _of_list(field: ItemField, given: Sequence[object], call: str) -> Items:
    """A list of rows ``[length, *shape]``."""
    rows = [row for row in given if isinstance(row, Tensor)]
    if len(rows) < len(given):
        empty = torch.empty((0, *field.shape), dtype=field.dtype, device="cpu")
        rows = [
            empty if isinstance(row, list) and not row else as_tensor(row, field.key, call, field.dtype)
            for row in given
        ]
    for number, row in enumerate(rows):
        if row.dtype is not field.dtype or row.dim() == 0 or row.shape[1:] != field.shape:
            if row.dim() == 0 or row.is_nested:
                raise RuntimeError(
                    f"{call}: {field.where}: expected rows of {field.expected}, got {nested.describe(row)} as row {number}."
                )
            _refuse_items(field, row, call, f" in row {number}")
    if len(rows) == 1:
        return Items.of_row(rows[0])
    lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int32, device="cpu")
    if not rows:
        return Items.of_lengths(torch.empty((0, *field.shape), dtype=field.dtype, device="cpu"), lengths)
    with torch.no_grad():
        return Items.of_lengths(torch.cat(rows), lengths)


# ---- texts -------------------------------------------------------------------------------------------------------------


def _texts(field: ItemField, value: object) -> list[object] | None:
    """Rows of a text as a list; None: they are bytes in tensors or arrays, or nothing that is known."""
    if tensordicts.is_non_tensor(value):
        objects = tensordicts.objects_in(value)
        # a TensorDict makes one list for each row of a list that is set in it
        if field.kind != "json" and isinstance(objects, list) and objects and isinstance(objects[0], list):
            return objects[0]
        return cast("list[object]", objects)
    if isinstance(value, np.ndarray) and value.dtype.kind in "USOT":
        return list(value.tolist())
    if isinstance(value, tuple) and _parts(value) is None:
        return list(value)
    raw = isinstance(value, list) and value and all(isinstance(it, Tensor | np.ndarray) for it in value)
    return value if isinstance(value, list) and not raw else None


def _check_text(field: ItemField, items: Items, call: str) -> None:
    """Raise ``ValueError`` where bytes that are handed over as a text are none."""
    for number, row in enumerate(items.rows()):
        try:
            row.numpy().tobytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{call}: {field.where}: expected text in UTF-8, got other bytes in row {number}: {error}."
            ) from error


def _encoded(field: ItemField, texts: Sequence[object], call: str) -> Items:
    """Texts as their bytes. Raises ``TypeError``, ``ValueError``: one is none."""
    raw: list[bytes] = []
    for number, text in enumerate(texts):
        try:
            raw.append(_bytes_of(text, field.kind))
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"{call}: {field.where}: expected {field.expected}, got {nested.describe(text)} in row {number}: {error}."
            ) from error
    lengths = torch.tensor([*map(len, raw)], dtype=torch.int32, device="cpu")
    joined = bytearray().join(raw)
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8, device="cpu")
    return Items.of_lengths(values, lengths)


def _bytes_of(value: object, kind: str) -> bytes:
    """A text as it is stored. Of JSON canonical: sorted keys, no spaces, so that equal values are equal bytes."""
    if kind == "json":
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if kind == "utf-8" and isinstance(value, str):
        return value.encode()
    if kind == "bytes" and isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"it is no {'str' if kind == 'utf-8' else 'bytes'}")
