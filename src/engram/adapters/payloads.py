"""Values as rows of bytes, without pickle: tensors, texts, JSON values and containers of these.

A row has a *form*, int32 ``[8]``, and bytes:

- of a tensor: the form is 1 + the place of its dtype in ``_DTYPES``, then its shape, filled up with -1; the bytes are its items in
  row-major order;
- of anything else: the form is 0, then how many bytes a JSON text has. The bytes are this text, and behind it the items of the tensors,
  the arrays and the bytes in it, each from a multiple of 16 on. They stand in the text as objects whose key ``""`` says what they are.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram._support.copies import raw_bytes
from engram.store.memory import DTYPE_NAMES, DTYPE_OF
from engram.store.ragged_rows import Items

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

FORM = 8
_ALIGNMENT, _NO_DIM = 16, -1
#: What fills a form up, by the number of dimensions.
_NO_DIMS = [(_NO_DIM,) * (FORM - 1 - n) for n in range(FORM)]
_MAX_BYTES = (1 << 31) - 1  # of a row: items of a row are counted in 31 bits
#: Their places are stored: new ones come last.
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float32", "float64"),
    *("complex32", "complex64", "complex128"),
)
_FORM_OF = {DTYPE_OF[name]: 1 + place for place, name in enumerate(_DTYPES) if name in DTYPE_OF}
_DTYPE_OF_FORM = {form: dtype for dtype, form in _FORM_OF.items()}


def encode(values: Sequence[object], where: Sequence[str]) -> tuple[Tensor, Items]:
    """Values as rows: their forms, int32 ``[n, 8]``, and their bytes.

    Args:
        values: tensors of any dtype that stores hold; NumPy arrays and numbers; str; bytes; None, bools, ints and floats; and lists,
            tuples and dicts of these. Tensors lose their graph, and come back on the CPU.
        where: what messages call each.

    Raises:
        TypeError: anything else; names its class and what to do.
        ValueError: containers that hold themselves, or are hundreds deep; a value of 2 GiB or more.

    Cost: one copy of the tensors, and about 2 µs for each.

    >>> import torch
    >>> from engram.adapters.payloads import decode, encode
    >>> forms, items = encode([torch.arange(3), {"tokens": torch.zeros(2), "text": "abc"}], ["a", "b"])
    >>> decode(forms, items.packed())
    [tensor([0, 1, 2]), {'tokens': tensor([0., 0.]), 'text': 'abc'}]
    """
    rows, parts = [], []
    for value, name in zip(values, where, strict=True):
        if isinstance(value, Tensor) and (n := value.dim()) < FORM:
            part = _dense(value, name)
            rows.append((_FORM_OF[part.dtype], *part.shape, *_NO_DIMS[n]))
            parts.append(part if n == 1 else part.reshape(-1))
        else:
            part, length = _tree_bytes(value, name)
            rows.append((0, length, *_NO_DIMS[1]))
            parts.append(part)
    forms = np.array(rows, np.int32).reshape(-1, FORM)
    sizes = np.fromiter((part.nbytes for part in parts), np.int64, len(parts))
    if len(sizes) and sizes.max() > _MAX_BYTES:
        at = int(sizes.argmax())
        raise ValueError(
            f"{where[at]}: expected a value of at most {_MAX_BYTES:,} bytes, got {sizes[at]:,}. Divide it."
        )
    starts, buffer = _joined(parts, forms[:, 0], sizes)
    # A row of no bytes has a place in its ring all the same.
    lengths = torch.from_numpy(sizes.astype(np.int32)).clamp_(min=1)
    return torch.from_numpy(forms), Items(buffer, starts, lengths)


def decode(forms: Tensor, items: Items) -> list[Any]:
    """The values of rows.

    Args:
        forms: int32 ``[n, 8]``.
        items: their bytes, one row after the other. Tensors share their memory, where that is aligned.

    Raises:
        ValueError: no such rows. Nothing is evaluated or looked up by name.
    """
    values, starts = items.given, items.starts.tolist()
    ends, numbers = (items.starts + items.lengths).tolist(), forms.numpy()
    found: list[Any] = []
    try:
        for begin, end in _runs(numbers[:, 0]):
            kind = int(numbers[begin, 0])
            if kind == 0:
                found += [_tree_of(values[starts[i] : ends[i]].clone(), int(numbers[i, 1])) for i in range(begin, end)]
            else:
                raw = values[starts[begin] : ends[end - 1]]
                found += _tensors_of(raw, _DTYPE_OF_FORM[kind], numbers[begin:end, 1:])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"expected rows that encode() made, got others ({error}). Were they damaged?") from error
    return found


def _runs(kinds: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """From where to where neighbours have the same number."""
    if len(kinds):
        yield from itertools.pairwise([0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)])


# ---- tensors -----------------------------------------------------------------------------------------------------------


def _dense(value: Tensor, where: str) -> Tensor:
    """A tensor whose items are to be stored, on the CPU and without graph. Raises ``TypeError``: it is no plain one."""
    if type(value) is not Tensor and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{where}: expected a torch.Tensor, got a {type(value).__name__}. Write what it stands for.")
    if value.layout is not torch.strided or value.is_nested or value.is_meta or value.dtype not in _FORM_OF:
        kind = "nested" if value.is_nested else f"{value.layout} on {value.device}"
        raise TypeError(
            f"{where}: expected a dense tensor of one of {', '.join(_DTYPES)}, got {value.dtype}, {kind}. Convert it, or write its "
            "parts as a list."
        )
    if value.requires_grad or not value.is_cpu or value.is_conj() or value.is_neg():
        value = value.detach().cpu().resolve_conj().resolve_neg()
    return value


def _joined(parts: list[Tensor], kinds: NDArray[np.int32], sizes: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Where the items of each part begin, int64 ``[n]``, in a buffer of all. Neighbours of one kind are copied together."""
    starts, runs, at = np.empty_like(sizes), [], 0
    for begin, end in _runs(kinds):
        at += -at % _ALIGNMENT
        ends = at + sizes[begin:end].cumsum()
        starts[begin:end] = ends - sizes[begin:end]
        runs.append((parts[begin:end], at, at := int(ends[-1])))
    buffer = torch.empty(at + 1, dtype=torch.uint8, device="cpu")  # 1: the byte of a last row of none
    for run, first, last in runs:
        torch.cat(run, out=buffer[first:last].view(run[0].dtype))
    return torch.from_numpy(starts), buffer


def _tensors_of(raw: Tensor, dtype: torch.dtype, shapes: NDArray[np.int32]) -> list[Tensor]:
    """Tensors whose items lie one behind the other; in the place of one without items is a byte. ``shapes``: ``[n, 7]``."""
    counts = np.where(shapes < 0, 1, shapes).prod(1, dtype=np.int64)
    if not counts.all():
        parts = raw.split(np.maximum(counts * dtype.itemsize, 1).tolist())  # type: ignore[no-untyped-call]
        parts = [part[: n * dtype.itemsize].clone().view(dtype) for part, n in zip(parts, counts.tolist(), strict=True)]
    else:
        flat = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        parts = flat.view(dtype).split(counts.tolist())  # type: ignore[no-untyped-call]
    if (shapes[:, 1:] < 0).all() and (shapes[:, 0] >= 0).all():
        return list(parts)
    return [part.view([n for n in shape if n >= 0]) for part, shape in zip(parts, shapes.tolist(), strict=True)]


# ---- everything else ---------------------------------------------------------------------------------------------------


def _tree_bytes(value: object, where: str) -> tuple[Tensor, int]:
    """A value as a text and leaves: uint8, and how many bytes the text has."""
    leaves: list[Tensor] = []
    try:
        text = json.dumps(_tree(value, leaves, where), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError(
            f"{where}: expected containers that do not hold themselves, and are not hundreds deep."
        ) from None
    raw = bytearray(text.encode(errors="surrogatepass"))
    length = len(raw)
    for leaf in leaves:
        raw += bytes(-len(raw) % _ALIGNMENT) + leaf.numpy().data
    return torch.frombuffer(raw, dtype=torch.uint8), length


def _tree(value: object, leaves: list[Tensor], where: str) -> object:
    """A value as JSON. Raises ``TypeError``: it, or what is in it, is no value."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is np.str_:
        return str(value)
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [_tree(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"": "tuple", "of": items}
    if isinstance(value, dict) and kind is dict:
        entries = {key: _tree(item, leaves, f"{where}[{key!r}]") for key, item in value.items()}
        if all(type(key) is str and key for key in entries):
            return entries
        return {"": "dict", "of": [[_tree(key, leaves, where), item] for key, item in entries.items()]}
    if isinstance(value, bytes):
        leaves.append(
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        )
        return {"": "bytes", "dtype": "uint8", "shape": [len(value)]}
    if isinstance(value, Tensor):
        tensor, what = _dense(value, where), "tensor"
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" and value.dtype.name in _DTYPES:
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        tensor = torch.from_numpy(native.copy()).view(value.shape)
        what = "array" if isinstance(value, np.ndarray) else "number"
    else:
        got = f"{kind.__module__}.{kind.__qualname__}" + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")
        raise TypeError(
            f"{where}: expected tensors, arrays of numbers, texts, bytes, numbers, or lists, tuples and dicts of them, got a {got}. Write "
            "what it consists of: objects are not pickled."
        )
    leaves.append(raw_bytes(tensor))
    return {"": what, "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(value.shape)}


def _tree_of(raw: Tensor, length: int) -> object:
    """The value of such bytes, which are the caller's own."""
    at = length

    def grown(tree: Any) -> object:
        nonlocal at
        if isinstance(tree, list):
            return [grown(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "" not in tree:
            return {key: grown(item) for key, item in tree.items()}
        if tree[""] == "tuple":
            return tuple(map(grown, tree["of"]))
        if tree[""] == "dict":
            items = [grown(item) for _, item in tree["of"]]
            return dict(zip([grown(key) for key, _ in tree["of"]], items, strict=True))
        dtype, shape = DTYPE_OF[tree["dtype"]], tree["shape"]
        at += -at % _ALIGNMENT
        end = at + math.prod(shape) * dtype.itemsize
        leaf, at = raw[at:end].view(dtype).view(shape), end
        match tree[""]:
            case "tensor":
                return leaf
            case "bytes":
                return leaf.numpy().tobytes()
            case "array":
                return leaf.numpy()
            case "number":
                return leaf.numpy()[()]
        raise ValueError(f"a leaf that is a {tree['']!r:.40}")

    return grown(json.loads(raw[:length].numpy().tobytes().decode(errors="surrogatepass")))
