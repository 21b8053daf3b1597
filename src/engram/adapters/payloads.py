"""Values as bytes, without pickle: tensors, texts, JSON values and containers of these.

A payload is a header and what it describes, both padded with zeros to multiples of 16 bytes, so that tensors lie aligned
wherever payloads follow one another:

    ========  ==========================================================================
    byte 0    version of the layout, 1
    byte 1    kind, see ``_Kind``
    byte 2    dtype, its place in ``_DTYPES``; else 0
    byte 3    n, how many sizes follow
    bytes 8   n sizes, uint64, little endian: of a tensor its shape; of a text or of bytes how many bytes
    ========  ==========================================================================

Tensors and arrays: their items in row-major order. Jagged tensors: the ragged dimension and whether there are lengths as
sizes; payloads of the values, the offsets and the lengths. Strided nested tensors: how many as size; a payload of each.
Trees: the bytes of a JSON text as size; the text, which says where the leaves are; a payload of each leaf.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from torch import Tensor

from engram._support.copies import raw_bytes
from engram.store.memory import DTYPE_NAMES, DTYPE_OF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_VERSION = 1
_ALIGNMENT = 16
_HEAD, _SIZE = struct.Struct("<BBBB4x"), 8
_MAX_DEPTH = 16
_MAX_NUMPY_DIMS = 64

#: Their places are stored: new ones come last.
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float32", "float64"),
    *("complex32", "complex64", "complex128"),
)
_PLACE = {name: place for place, name in enumerate(_DTYPES)}
#: Those that NumPy has, too.
_OF_NUMPY = {name for name in _DTYPES if not name.startswith(("bfloat", "float8", "complex32"))}
_TENSORS_OF_NUMPY = {DTYPE_OF[name] for name in _OF_NUMPY}


class _Kind(enum.IntEnum):
    """What a payload holds. The numbers are stored."""

    TENSOR = 0
    ARRAY = 1
    NUMBER = 2  # of NumPy
    TEXT = 3
    BYTES = 4
    JSON = 5
    TREE = 6
    JAGGED = 7
    NESTED = 8


def encode(value: object, where: str = "encode") -> bytearray:
    """A value as bytes.

    Args:
        value: a tensor of any dtype that stores hold, also a nested one; a NumPy array or number; a str; bytes; None, a bool, an
            int or a float; or lists, tuples and dicts of these, whose keys are strings or ints. Tensors lose their graph, and
            come back on the CPU. NumPy's texts and bytes come back as Python's.
        where: begins messages.

    Raises:
        TypeError: anything else; names its class and the way to it.
        ValueError: containers that are more than 16 deep.

    Cost: a copy of the tensors, and about 3 µs for each.

    >>> import torch
    >>> from engram.adapters.payloads import decode, encode
    >>> decode(encode({"tokens": torch.arange(3), "text": "abc"}))
    {'tokens': tensor([0, 1, 2]), 'text': 'abc'}
    """
    out = bytearray()
    _append(out, value, where, 0)
    return out


def decode(payload: Buffer, where: str = "decode") -> object:
    """The value that :func:`encode` made bytes of.

    Args:
        payload: these bytes. If they can be written, tensors share their memory, which is the caller's alone then.
        where: begins messages.

    Raises:
        ValueError: no such bytes. Nothing is evaluated or looked up by name.
    """
    view = memoryview(payload)
    if view.readonly or view.format != "B":
        view = memoryview(bytearray(view))
    try:
        value, end = _Reader(view, where).value(0, 0)
    except (struct.error, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{where}: expected a payload, got {len(view)} bytes that are none ({error}).") from error
    if end != len(view):
        raise ValueError(f"{where}: expected a payload of {end} bytes, got {len(view)}.")
    return value


# ---- to bytes ----------------------------------------------------------------------------------------------------------


def _append(out: bytearray, value: object, where: str, depth: int) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        _append_tensor(out, value, where)
    elif _is_numeric(value):
        form = _Kind.ARRAY if isinstance(value, np.ndarray) else _Kind.NUMBER
        items = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).tobytes()
        _append_items(out, form, items, value.shape, value.dtype.name)
    elif isinstance(value, str) and kind in (str, np.str_) and (text := _utf8(value)) is not None:
        _append_items(out, _Kind.TEXT, text, (len(text),))
    elif isinstance(value, bytes) and kind in (bytes, np.bytes_):
        _append_items(out, _Kind.BYTES, value, (len(value),))
    else:
        leaves: list[tuple[object, str]] = []
        tree = _tree(value, leaves, where, depth)
        plain = tree[0] == "=" and not leaves
        text = json.dumps(tree[1] if plain else tree, separators=(",", ":")).encode()
        _append_items(out, _Kind.JSON if plain else _Kind.TREE, text, (len(text),))
        for leaf, way in leaves:
            _append(out, leaf, way, depth + 1)


def _append_items(out: bytearray, kind: _Kind, items: Buffer, sizes: tuple[int, ...], dtype: str | None = None) -> None:
    out += struct.pack(f"<BBBB4x{len(sizes)}Q", _VERSION, kind, _PLACE[dtype] if dtype else 0, len(sizes), *sizes)
    out += bytes(-len(out) % _ALIGNMENT)
    out += items
    out += bytes(-len(out) % _ALIGNMENT)


def _append_tensor(out: bytearray, value: Tensor, where: str) -> None:
    if value.is_nested:
        _append_nested(out, value, where)
    elif value.layout is not torch.strided or value.dtype not in DTYPE_NAMES or value.is_meta:
        raise TypeError(
            f"{where}: expected a dense tensor of one of {sorted(DTYPE_OF)}, got {value.dtype}, {value.layout}, on {value.device}. "
            "Convert it before it is written."
        )
    elif type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{where}: expected a torch.Tensor, got a {type(value).__name__}. Write what it stands for.")
    else:
        _append_items(out, _Kind.TENSOR, _items(value), value.shape, DTYPE_NAMES[value.dtype])


def _append_nested(out: bytearray, value: Tensor, where: str) -> None:
    value = value.detach()
    parts: Sequence[Tensor]
    if value.layout is torch.jagged:
        ragged = [isinstance(size, int) for size in value.shape].index(False)
        inner = value.values(), value.offsets(), value.lengths()  # type: ignore[attr-defined] # jagged ones have them
        parts = [part for part in inner if part is not None]
        _append_items(out, _Kind.JAGGED, b"", (ragged, len(parts) == 3))
    else:
        parts = value.unbind()
        _append_items(out, _Kind.NESTED, b"", (len(parts),))
    for part in parts:
        _append_tensor(out, part, where)


def _items(tensor: Tensor) -> Buffer:
    """The items of a dense tensor in row-major order: its own memory, where that is them."""
    if tensor.requires_grad or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.dtype in _TENSORS_OF_NUMPY and tensor.is_contiguous():
        return tensor.numpy().data
    return raw_bytes(tensor).numpy().data


def _utf8(text: str) -> bytes | None:
    """A text as UTF-8; None if it holds halves of characters, which JSON can say."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def _tree(value: object, leaves: list[tuple[object, str]], where: str, depth: int) -> list[object]:
    """A value as JSON: ``["=", JSON value]``, ``["leaf"]`` (the next one), ``["list" | "tuple", [tree, …]]`` or
    ``["dict", [[key, tree], …]]``.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ["=", value]
    if kind is np.str_:
        return ["=", str(value)]
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where}: expected containers that are at most {_MAX_DEPTH} deep.")
    if isinstance(value, list | tuple) and kind in (list, tuple):
        parts = [_tree(item, leaves, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        plain = kind is list and all(part[0] == "=" for part in parts)
        return ["=", [part[1] for part in parts]] if plain else [kind.__name__, parts]
    if isinstance(value, dict) and kind is dict:
        kinds = set(map(type, value))
        if not kinds <= {str, int}:
            raise TypeError(f"{where}: expected keys that are strings or ints, got {list(value)!r:.80}.")
        entries = [[key, _tree(item, leaves, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()]
        plain = int not in kinds and all(part[0] == "=" for _, part in entries)
        return ["=", {key: part[1] for key, part in entries}] if plain else ["dict", entries]
    if isinstance(value, Tensor) or _is_numeric(value) or kind in (bytes, np.bytes_):
        leaves.append((value, where))
        return ["leaf"]
    got = f"{kind.__module__}.{kind.__qualname__}" + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")
    raise TypeError(
        f"{where}: expected tensors, arrays of numbers, texts, bytes, numbers, or lists, tuples and dicts of them, got a {got}. Write "
        "what it consists of: objects are not pickled."
    )


def _is_numeric(value: object) -> TypeGuard[np.ndarray | np.generic]:
    """Whether a value is NumPy's, and tensors have its dtype, too."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype.name in _OF_NUMPY


# ---- from bytes --------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads values from a payload.

    Args:
        view: the bytes, which can be written.
        where: begins messages.
    """

    def __init__(self, view: memoryview, where: str) -> None:
        self._view, self._where = view, where

    def value(self, at: int, depth: int) -> tuple[object, int]:
        """The value whose payload begins there, and where that ends."""
        version, kind, dtype, n = _HEAD.unpack_from(self._view, at)
        sizes = struct.unpack_from(f"<{n}Q", self._view, at + _HEAD.size)
        if version != _VERSION or kind not in _READ or dtype >= len(_DTYPES) or depth > _MAX_DEPTH:
            raise self._refusal(f"version {version}, kind {kind}, dtype {dtype}, depth {depth}")
        return _READ[kind](self, sizes, dtype, _aligned(at + _HEAD.size + _SIZE * n), depth)

    def _refusal(self, got: str) -> ValueError:
        return ValueError(
            f"{self._where}: expected a payload of version {_VERSION}, got {got}. Was it written by another program, or damaged?"
        )

    def _span(self, at: int, nbytes: int) -> int:
        """Where bytes that begin there end."""
        if at + nbytes > len(self._view):
            raise self._refusal(f"{nbytes} bytes from {at} on, of {len(self._view)}")
        return _aligned(at + nbytes)

    def tensor(self, sizes: tuple[int, ...], dtype: int, at: int, _: int) -> tuple[Tensor, int]:
        kind, numel = DTYPE_OF[_DTYPES[dtype]], math.prod(sizes)
        end = self._span(at, numel * kind.itemsize)
        if not numel:
            return torch.empty(sizes, dtype=kind, device="cpu"), end
        flat = torch.frombuffer(self._view, dtype=kind, count=numel, offset=at)
        return (flat if len(sizes) == 1 else flat.view(sizes)), end

    def array(self, sizes: tuple[int, ...], dtype: int, at: int, _: int) -> tuple[NDArray[np.generic], int]:
        if _DTYPES[dtype] not in _OF_NUMPY or len(sizes) > _MAX_NUMPY_DIMS or max(sizes, default=0) >= 1 << 63:
            raise self._refusal(f"an array of {_DTYPES[dtype]} with {len(sizes)} dimensions")
        kind, numel = np.dtype(_DTYPES[dtype]), math.prod(sizes)
        end = self._span(at, numel * kind.itemsize)
        found = np.frombuffer(self._view, kind, numel, at) if numel else np.empty(0, kind)
        return found.reshape(sizes), end

    def number(self, sizes: tuple[int, ...], dtype: int, at: int, depth: int) -> tuple[object, int]:
        array, end = self.array(sizes, dtype, at, depth)
        return array[()], end

    def _raw(self, sizes: tuple[int, ...], at: int) -> tuple[bytes, int]:
        if len(sizes) != 1:
            raise self._refusal(f"{len(sizes)} sizes of bytes")
        end = self._span(at, sizes[0])
        return bytes(self._view[at : at + sizes[0]]), end

    def octets(self, sizes: tuple[int, ...], _: int, at: int, __: int) -> tuple[bytes, int]:
        return self._raw(sizes, at)

    def text(self, sizes: tuple[int, ...], _: int, at: int, __: int) -> tuple[str, int]:
        raw, end = self._raw(sizes, at)
        try:
            return raw.decode(), end
        except UnicodeDecodeError as error:
            raise self._refusal(f"a text that is not UTF-8 ({error})") from error

    def json(self, sizes: tuple[int, ...], _: int, at: int, __: int) -> tuple[object, int]:
        raw, end = self._raw(sizes, at)
        try:
            return json.loads(raw), end
        except ValueError as error:
            raise self._refusal(f"a text that is not JSON ({error})") from error

    def _parts(self, n: int, at: int, depth: int) -> tuple[list[object], int]:
        """The values of so many payloads in a row."""
        if n > len(self._view):
            raise self._refusal(f"{n} parts")
        found = []
        for _ in range(n):
            value, at = self.value(at, depth + 1)
            found.append(value)
        return found, at

    def jagged(self, sizes: tuple[int, ...], _: int, at: int, depth: int) -> tuple[Tensor, int]:
        if len(sizes) != 2:
            raise self._refusal(f"{len(sizes)} sizes of a jagged tensor")
        parts, end = self._parts(3 if sizes[1] else 2, at, depth)
        values, offsets, *rest = _tensors(parts)
        lengths = rest[0] if rest else None
        if not _is_jagged(sizes[0], values, offsets, lengths):
            raise self._refusal("a jagged tensor whose offsets do not fit its values")
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=sizes[0]), end

    def nested(self, sizes: tuple[int, ...], _: int, at: int, depth: int) -> tuple[Tensor, int]:
        if len(sizes) != 1:
            raise self._refusal(f"{len(sizes)} sizes of a nested tensor")
        parts, end = self._parts(sizes[0], at, depth)
        return torch.nested.as_nested_tensor(_tensors(parts), layout=torch.strided), end

    def tree(self, sizes: tuple[int, ...], dtype: int, at: int, depth: int) -> tuple[object, int]:
        tree, at = self.json(sizes, dtype, at, depth)
        return self._grown(tree, at, depth)

    def _grown(self, tree: object, at: int, depth: int) -> tuple[object, int]:
        """The value of a tree whose next leaf begins there, and where the last one ends."""
        match tree if depth <= _MAX_DEPTH else None:
            case ["=", value]:
                return value, at
            case ["leaf"]:
                return self.value(at, depth + 1)
            case ["list" | "tuple" as kind, list(parts)]:
                items = []
                for part in parts:
                    item, at = self._grown(part, at, depth + 1)
                    items.append(item)
                return (items if kind == "list" else tuple(items)), at
            case ["dict", list(entries)]:
                made = {}
                for entry in entries:
                    match entry:
                        case [str() | int() as key, part]:
                            made[key], at = self._grown(part, at, depth + 1)
                        case _:
                            raise self._refusal(f"the entry {str(entry)[:60]!r}")
                return made, at
        raise self._refusal(f"the tree {str(tree)[:60]!r}")


_READ: dict[int, Callable[[_Reader, tuple[int, ...], int, int, int], tuple[object, int]]] = {
    _Kind.TENSOR: _Reader.tensor,
    _Kind.ARRAY: _Reader.array,
    _Kind.NUMBER: _Reader.number,
    _Kind.TEXT: _Reader.text,
    _Kind.BYTES: _Reader.octets,
    _Kind.JSON: _Reader.json,
    _Kind.TREE: _Reader.tree,
    _Kind.JAGGED: _Reader.jagged,
    _Kind.NESTED: _Reader.nested,
}


def _tensors(parts: list[object]) -> list[Tensor]:
    """Parts as tensors. Raises ``TypeError``: others."""
    found = [part for part in parts if isinstance(part, Tensor)]
    if len(found) < len(parts):
        raise TypeError("parts of a nested tensor that are no tensors")
    return found


def _is_jagged(ragged: int, values: Tensor, offsets: Tensor, lengths: Tensor | None) -> bool:
    """Whether every row lies within the values."""
    numbers = [offsets] if lengths is None else [offsets, lengths]
    if not 1 <= ragged <= values.ndim or any(x.dtype not in (torch.int64, torch.int32) or x.ndim != 1 for x in numbers):
        return False
    size, starts = values.shape[ragged - 1], offsets[:-1]
    if len(offsets) < 2 or bool(((offsets < 0) | (offsets > size)).any()):
        return False
    sizes = offsets.diff() if lengths is None else lengths
    return sizes.shape == starts.shape and bool(((sizes >= 0) & (sizes <= size) & (starts + sizes <= size)).all())


def _aligned(at: int) -> int:
    return at + -at % _ALIGNMENT
