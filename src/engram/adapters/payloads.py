"""Values as rows of bytes, without pickle: tensors, texts, JSON values and containers of these.

A row has a *form*, int32 ``[8]``, and bytes:

- of a tensor with items: the form is 1 + the place of its dtype in :data:`engram.format.schema.DTYPES`, then its shape, filled up with
  -1; the bytes are its items in row-major order;
- of anything else: the form is 0, then how many bytes a JSON text has. The bytes are this text, and from the next multiple of 16 on the
  items of the tensors, the arrays and the bytes in it. These stand in the text as objects whose key ``""`` says what they are.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engram._support.copies import raw_bytes
from engram.format.schema import DTYPES
from engram.store.memory import DTYPE_NAMES, DTYPE_OF
from engram.store.ragged_rows import Items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

FORM = 8
_ALIGNMENT = 16
#: What fills a form up, by the number of dimensions.
_NO_DIMS = [(-1,) * (FORM - 1 - n) for n in range(FORM)]
_FORM_OF = {DTYPE_OF[name]: form for form, name in enumerate(DTYPES, 1) if name in DTYPE_OF}
_DTYPE_OF_FORM = {form: dtype for dtype, form in _FORM_OF.items()}
#: What leaves and containers are made of.
_MADE: dict[str, Callable[..., object]] = {"tensor": Tensor.detach, "array": Tensor.numpy, "tuple": tuple, "dict": dict}
_MADE["bytes"] = lambda leaf: leaf.numpy().tobytes()


def encode(values: Sequence[object], where: Sequence[str], most: int) -> tuple[Tensor, Items]:
    """Values as rows: their forms, int32 ``[n, 8]``, and their bytes.

    Args:
        values: tensors of any dtype that stores hold; NumPy arrays and numbers; str; bytes; None, bools, ints and floats; and lists,
            tuples and dicts of these. Tensors lose their graph, and come back on the CPU; numbers and texts of NumPy come back as
            Python's.
        where: what messages call each.
        most: bytes that a value may have, below 2 GiB.

    Raises:
        TypeError: anything else; names its class and what to do.
        ValueError: containers that hold themselves, or are hundreds deep; a value of more bytes.

    Cost: one copy of the tensors, and about 2 µs for each.

    >>> import torch
    >>> from engram.adapters.payloads import decode, encode
    >>> forms, items = encode([torch.arange(3), {"tokens": torch.zeros(2), "text": "abc"}], ["a", "b"], 1_000)
    >>> decode(forms, items.packed())
    [tensor([0, 1, 2]), {'tokens': tensor([0., 0.]), 'text': 'abc'}]
    """
    rows, parts = [], []
    for value, name in zip(values, where, strict=True):
        if isinstance(value, Tensor) and (n := value.dim()) < FORM and (part := _dense(value, name)).numel():
            rows.append((_FORM_OF[part.dtype], *part.shape, *_NO_DIMS[n]))
        else:
            part, length = _tree_bytes(value, name)
            rows.append((0, length, *_NO_DIMS[1]))
        parts.append(part if part.dim() == 1 else part.reshape(-1))
    sizes = np.fromiter((part.nbytes for part in parts), np.int64, len(parts))
    if (sizes > most).any():
        at = int(sizes.argmax())
        expected = f"at most {most:,} bytes, a sixteenth of max_bytes and below 2 GiB"
        raise ValueError(f"put: {where[at]}: expected {expected}, got {sizes[at]:,}. Divide it, or use a larger store.")
    forms = np.array(rows, np.int32).reshape(-1, FORM)
    starts, runs, at = np.empty_like(sizes), [], 0
    for begin, end in _runs(forms):
        at += -at % _ALIGNMENT
        ends = at + sizes[begin:end].cumsum()
        starts[begin:end] = ends - sizes[begin:end]
        runs.append((parts[begin:end], at, at := int(ends[-1])))
    buffer = torch.empty(at, dtype=torch.uint8, device="cpu")
    for run, first, last in runs:
        torch.cat(run, out=buffer[first:last].view(run[0].dtype))
    return torch.from_numpy(forms), Items(buffer, torch.from_numpy(starts), torch.from_numpy(sizes.astype(np.int32)))


def decode(forms: Tensor, items: Items) -> list[object]:
    """The values of rows.

    Args:
        forms: int32 ``[n, 8]``.
        items: their bytes, one row after the other and no others. Tensors share their memory, where that is aligned.

    Raises:
        ValueError: no such rows. Nothing is evaluated or looked up by name.
    """
    values, numbers = items.given, forms.numpy()
    at = [*items.starts.tolist(), len(values)]
    found: list[object] = []
    try:
        for begin, end in _runs(numbers):
            kind = int(numbers[begin, 0])
            if kind == 0:
                found += [_tree_of(values[at[i] : at[i + 1]].clone(), int(numbers[i, 1])) for i in range(begin, end)]
            else:
                raw, dtype, shapes = values[at[begin] : at[end]], _DTYPE_OF_FORM[kind], numbers[begin:end, 1:]
                flat = (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)
                counts = np.abs(shapes).prod(1, dtype=np.int64).tolist()  # where there is no dimension is -1
                parts = flat.split(counts)  # type: ignore[no-untyped-call]
                if (shapes[:, 1:] >= 0).any() or (shapes[:, 0] < 0).any():
                    sizes = [[n for n in shape if n >= 0] for shape in shapes.tolist()]
                    parts = [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]
                found += parts
    except (ArithmeticError, LookupError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"expected rows that encode() made, got others ({error}). Were they damaged?") from error
    return found


def _runs(forms: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """From where to where neighbours are of one kind."""
    if len(forms):
        yield from itertools.pairwise([0, *(np.flatnonzero(np.diff(forms[:, 0])) + 1).tolist(), len(forms)])


def _dense(value: Tensor, where: str) -> Tensor:
    """A tensor whose items are to be stored, on the CPU and without graph. Raises ``TypeError``: it is no plain one."""
    plain = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and value.layout is torch.strided
    if not plain or value.is_nested or value.is_meta or value.dtype not in _FORM_OF:
        raise TypeError(
            f"put: {where}: expected a dense torch.Tensor of one of {', '.join(DTYPES)}, got a {type(value).__name__} of {value.dtype}, "
            f"{value.layout}, {'nested, ' * value.is_nested}on {value.device}. Convert it, or write its parts as a list."
        )
    if value.requires_grad or not value.is_cpu or value.is_conj() or value.is_neg():
        value = value.detach().cpu().resolve_conj().resolve_neg()
    return value


def _tree_bytes(value: object, where: str) -> tuple[Tensor, int]:
    """A value as a text and leaves: uint8, and how many bytes the text has."""
    leaves = bytearray()
    try:
        text = json.dumps(_tree(value, leaves, where), ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        raise ValueError(f"put: {where}: expected containers at most hundreds deep, got deeper ones.") from None
    raw = bytearray(text + bytes(-len(text) % _ALIGNMENT) + leaves)
    return torch.frombuffer(raw, dtype=torch.uint8), len(text)


def _tree(value: object, leaves: bytearray, where: str) -> object:
    """A value as JSON. Raises ``TypeError``: it, or what is in it, is no value."""
    value = value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [_tree(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"": "tuple", "of": items}
    if isinstance(value, dict) and kind is dict:
        entries = {key: _tree(item, leaves, f"{where}[{key!r}]") for key, item in value.items()}
        if {*map(type, entries)} <= {str} and "" not in entries:
            return entries
        return {"": "dict", "of": [[_tree(key, leaves, where), item] for key, item in entries.items()]}
    if isinstance(value, Tensor):
        raw = raw_bytes(_dense(value, where)).numpy().tobytes()
        leaf = ["tensor", DTYPE_NAMES[value.dtype], *value.shape]
    elif isinstance(value, bytes) and kind is bytes:
        leaf, raw = ["bytes", "uint8", len(value)], value
    elif type(value) is np.ndarray and value.dtype.kind != "V" and value.dtype.name in DTYPES:
        leaf = ["array", value.dtype.name, *value.shape]
        raw = np.asarray(value, value.dtype.newbyteorder("=")).tobytes()
    else:
        raise TypeError(
            f"put: {where}: expected tensors, arrays of numbers, texts, bytes, numbers, or lists, tuples and dicts of them, got a "
            f"{kind.__module__}.{kind.__qualname__}, {value!r:.60}. Write what it consists of: objects are not pickled."
        )
    at = len(leaves)
    leaves += raw + bytes(-len(raw) % _ALIGNMENT)
    return {"": leaf, "at": [at, at + len(raw)]}


def _tree_of(raw: Tensor, length: int) -> object:
    """The value of such bytes, which are the caller's own."""
    leaves = raw[length + -length % _ALIGNMENT :]

    def grown(tree: dict[str, object]) -> object:
        match tree:
            case {"": str() as kind, "of": list() as items}:
                return _MADE[kind](items)
            case {"": [str() as kind, str() as name, *shape], "at": [int() as at, int() as end]}:
                return _MADE[kind](leaves[at:end].view(DTYPE_OF[name]).view(shape))  # type: ignore[arg-type]
            case {"": _}:
                raise ValueError(f"a leaf {tree!r:.80}")
        return tree

    return json.loads(raw[:length].numpy().tobytes().decode(errors="surrogatepass"), object_hook=grown)
