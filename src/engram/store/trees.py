"""Values as a text and bytes, without pickle: tensors, arrays, texts, bytes, numbers, and lists, tuples and dicts of these."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engram._support.copies import raw_bytes
from engram.format.schema import DTYPES
from engram.store.memory import DTYPE_NAMES, DTYPE_OF

ALIGNMENT = 16
FORM_OF = {DTYPE_OF[name]: form for form, name in enumerate(DTYPES, 1) if name in DTYPE_OF}
#: What leaves and containers are made of.
_MADE: dict[str, Callable[..., object]] = {"tensor": Tensor.detach, "array": Tensor.numpy, "tuple": tuple, "dict": dict}
_MADE["bytes"] = lambda leaf: leaf.numpy().tobytes()


def dense(value: Tensor, where: str) -> Tensor:
    """A tensor whose items are to be stored, on the CPU and without graph. Raises ``TypeError``: it is no plain one."""
    plain = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and value.layout is torch.strided
    if not plain or value.is_nested or value.is_meta or value.dtype not in FORM_OF:
        raise TypeError(
            f"{where}: expected a dense torch.Tensor of one of {', '.join(DTYPES)}, got a {type(value).__name__} of {value.dtype}, "
            f"{value.layout}, {'nested, ' * value.is_nested}on {value.device}. Convert it, or write its parts as a list."
        )
    if value.requires_grad or not value.is_cpu or value.is_conj() or value.is_neg():
        value = value.detach().cpu().resolve_conj().resolve_neg()
    return value


def tree_bytes(value: object, where: str) -> tuple[Tensor, int]:
    """A value as a text and leaves: uint8, and how many bytes the text has."""
    leaves = bytearray()
    try:
        text = json.dumps(_tree(value, leaves, where), ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        raise ValueError(f"{where}: expected containers at most hundreds deep, got deeper ones.") from None
    raw = bytearray(text + bytes(-len(text) % ALIGNMENT) + leaves)
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
        raw = raw_bytes(dense(value, where)).numpy().tobytes()
        leaf = ["tensor", DTYPE_NAMES[value.dtype], *value.shape]
    elif isinstance(value, bytes) and kind is bytes:
        leaf, raw = ["bytes", "uint8", len(value)], value
    elif type(value) is np.ndarray and value.dtype.kind != "V" and value.dtype.name in DTYPES:
        leaf = ["array", value.dtype.name, *value.shape]
        raw = np.asarray(value, value.dtype.newbyteorder("=")).tobytes()
    else:
        raise TypeError(
            f"{where}: expected tensors, arrays of numbers, texts, bytes, numbers, or lists, tuples and dicts of them, got a "
            f"{kind.__module__}.{kind.__qualname__}, {value!r:.60}. Write what it consists of: objects are not pickled."
        )
    at = len(leaves)
    leaves += raw + bytes(-len(raw) % ALIGNMENT)
    return {"": leaf, "at": [at, at + len(raw)]}


def tree_of(raw: Tensor, length: int) -> object:
    """The value of such bytes, which are the caller's own."""
    leaves, taken = raw[length + -length % ALIGNMENT :], 0

    def grown(tree: dict[str, object]) -> object:
        match tree:
            case {"": str() as kind, "of": list() as items}:
                return _MADE[kind](items)
            case {"": [str() as kind, str() as name, *shape], "at": [int() as at, int() as end]}:
                nonlocal taken
                taken += abs(end - at)
                if taken > len(leaves):  # some stand for several values
                    raise ValueError(f"{taken} bytes of leaves, where {len(leaves)} came")
                return _MADE[kind](leaves[at:end].view(DTYPE_OF[name]).view(shape))  # type: ignore[arg-type]
            case {"": _}:
                raise ValueError(f"a leaf {tree!r:.80}")
        return tree

    return json.loads(raw[:length].numpy().tobytes().decode(errors="surrogatepass"), object_hook=grown)
