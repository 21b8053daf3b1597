"""A list's items as a few tensors: of each leaf the bytes of all items, one behind the other, and their shapes.

Items of one *form* have the same containers, keys, dtypes and numbers of dimensions; sizes may differ.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram._support.copies import raw_bytes
from engram._support.state import check_keys, tensor_in, typed
from engram._support.tensordicts import is_plain_tensordict, tensordict_type
from engram.format.schema import DTYPES
from engram.store.memory import DTYPE_NAMES, DTYPE_OF

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_DEPTH = 16


def pack(items: Sequence[object]) -> dict[str, Any]:
    """``forms``, a list of forms, and ``form``, int64 ``[n]``, which one each item has. Copies.

    A form has ``tree``, JSON text, and ``parts``: one ``{bytes, sizes}`` for each leaf and each TensorDict of the tree, in its
    order: uint8, and int64 ``[items, dims]``, the shapes (of a TensorDict the batch sizes, without bytes).

    Raises:
        TypeError: an item that is not made of tensors, TensorDicts, dicts, lists and tuples; names the way to what it has.
    """
    forms: dict[str, list[tuple[list[Tensor], list[list[int]]]]] = {}
    numbers: dict[str, int] = {}
    which = []
    for number, item in enumerate(items):
        parts: list[tuple[Tensor | None, list[int]]] = []
        tree = json.dumps(_tree(item, parts, f"item {number}", 0), separators=(",", ":"))
        known = forms.setdefault(tree, [([], []) for _ in parts])
        which.append(numbers.setdefault(tree, len(numbers)))
        for (leaves, sizes), (leaf, size) in zip(known, parts, strict=True):
            sizes.append(size)
            if leaf is not None:
                leaves.append(leaf)
    return {
        "form": torch.tensor(which, dtype=torch.int64, device="cpu"),
        "forms": [
            {
                "tree": tree,
                "parts": [
                    {
                        "bytes": torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *leaves]),
                        "sizes": torch.tensor(sizes, dtype=torch.int64, device="cpu").reshape(
                            len(sizes), len(sizes[0])
                        ),
                    }
                    for leaves, sizes in parts
                ],
            }
            for tree, parts in forms.items()
        ],
    }


def _tree(item: Any, parts: list[tuple[Tensor | None, list[int]]], where: str, depth: int) -> list[Any]:
    """What an item is made of: ``[kind, …]``. Appends its leaves' bytes and sizes."""
    if depth > _MAX_DEPTH:
        raise TypeError(f"{where}: expected items that are at most {_MAX_DEPTH} deep.")
    if isinstance(item, Tensor):
        if item.dtype not in DTYPE_NAMES or item.layout is not torch.strided:
            raise TypeError(
                f"{where}: expected a dense tensor of one of {sorted(DTYPES)}, got {item.dtype}, {item.layout}."
            )
        value = item.detach().resolve_conj().resolve_neg().to("cpu")
        parts.append((raw_bytes(value), list(item.shape)))
        return ["tensor", DTYPE_NAMES[item.dtype], item.ndim, str(item.device)]
    if is_plain_tensordict(item):
        parts.append((None, list(item.batch_size)))
        entries = [[key, _tree(value, parts, f"{where}[{key!r}]", depth + 1)] for key, value in item.items()]
        device = None if item.device is None else str(item.device)
        return ["tensordict", len(item.batch_size), device, entries]
    if type(item) is dict:
        for key in item:
            if not (_is_key(key) or _is_integer(key)):
                raise TypeError(
                    f"{where}: expected keys that are strings, tuples of strings or ints, got {key!r:.80}. Other "
                    "dicts cannot be saved."
                )
        return ["dict", [[key, _tree(value, parts, f"{where}[{key!r}]", depth + 1)] for key, value in item.items()]]
    if type(item) in (list, tuple):
        children = [_tree(value, parts, f"{where}[{i}]", depth + 1) for i, value in enumerate(item)]
        return [type(item).__name__, children]
    raise TypeError(
        f"{where}: expected tensors, TensorDicts, or dicts, lists and tuples of them, got a {type(item).__name__}. Only those can "
        "be saved."
    )


def unpack(state: dict[str, Any], device: torch.device | None, where: str) -> list[Any]:
    """The items of :func:`pack`, in memory of their own.

    Args:
        state: what ``pack`` returned.
        device: of all tensors; None: where they were.
        where: for messages.

    Raises:
        KeyError, TypeError, ValueError: no such state. Nothing is evaluated or looked up by name.
        RuntimeError: a device that is not here.
    """
    check_keys(state, ("form", "forms"), where)
    which = tensor_in(state, "form", torch.int64, (None,), where)
    made = [
        _unpack_form(form, int((which == number).sum()), device, f"{where}: form {number}")
        for number, form in enumerate(typed(state, "forms", list, where))
    ]
    if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(made):
        raise ValueError(f"{where}: form: expected numbers in [0, {len(made)}), got up to {int(which.max())}.")
    following = [iter(items) for items in made]
    return [next(following[number]) for number in which.tolist()]


def _unpack_form(form: Any, n: int, device: torch.device | None, where: str) -> list[Any]:
    check_keys(form, ("tree", "parts"), where)
    try:
        tree = json.loads(typed(form, "tree", str, where))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: tree: not readable as JSON ({error}).") from error
    parts = list(typed(form, "parts", list, where))
    items = _unpack(tree, parts, n, device, where, 0)
    if parts:
        raise ValueError(f"{where}: expected parts for the leaves of its tree, got {len(parts)} more.")
    return items


def _unpack(tree: Any, parts: list[object], n: int, device: torch.device | None, where: str, depth: int) -> list[Any]:
    """``n`` items of a tree, whose parts are taken from the front."""
    match tree if depth <= _MAX_DEPTH else None:
        case ["tensor", str(name), int(ndim), str(saved)] if name in DTYPES:
            return _tensors(parts, DTYPE_OF[name], ndim, n, device or torch.device(saved), where)
        case ["tensordict", int(ndim), None | str() as saved, list(entries)]:
            part = _part(parts, ndim, n, where)
            if part["bytes"].numel():
                raise ValueError(f"{where}: expected no bytes of a TensorDict, got {part['bytes'].numel()}.")
            own = saved if saved is None or device is None else device
            columns = _entries(entries, parts, n, device, where, depth)
            return [
                tensordict_type()({key: column[i] for key, column in columns.items()}, batch_size=size, device=own)
                for i, size in enumerate(part["sizes"].tolist())
            ]
        case ["dict", list(entries)]:
            columns = _entries(entries, parts, n, device, where, depth, integers=True)
            return [{key: column[i] for key, column in columns.items()} for i in range(n)]
        case ["list" | "tuple" as kind, list(children)]:
            rows = [_unpack(child, parts, n, device, where, depth + 1) for child in children]
            return [(list if kind == "list" else tuple)(column[i] for column in rows) for i in range(n)]
    raise ValueError(f"{where}: tree: expected the form of an item, got {str(tree)[:80]!r}.")


def _entries(
    entries: list[Any],
    parts: list[Any],
    n: int,
    device: torch.device | None,
    where: str,
    depth: int,
    *,
    integers: bool = False,
) -> dict[Any, list[Any]]:
    columns: dict[object, list[object]] = {}
    for found in entries:
        match found:
            case [str() | int() | list() as written, child]:
                key = tuple(written) if isinstance(written, list) else written  # JSON has no tuples
                if (_is_key(key) or (integers and _is_integer(key))) and key not in columns:
                    columns[key] = _unpack(child, parts, n, device, where, depth + 1)
                    continue
        raise ValueError(f"{where}: tree: expected keys, each once, got {str(found)[:80]!r}.")
    return columns


def _is_key(key: object) -> bool:
    """A name, or a path of names: what a draw's info has."""
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(name, str) for name in key))


def _is_integer(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool)


def _part(parts: list[Any], ndim: int, n: int, where: str) -> dict[str, Tensor]:
    if not parts:
        raise ValueError(f"{where}: expected a part for each leaf of its tree, got too few.")
    part = parts.pop(0)
    check_keys(part, ("bytes", "sizes"), where)
    sizes = tensor_in(part, "sizes", torch.int64, (n, ndim), where)
    if bool((sizes < 0).any()):
        raise ValueError(f"{where}: sizes: expected sizes of at least 0, got {int(sizes.min())}.")
    return {"bytes": tensor_in(part, "bytes", torch.uint8, (None,), where), "sizes": sizes}


def _tensors(parts: list[Any], dtype: torch.dtype, ndim: int, n: int, device: torch.device, where: str) -> list[Tensor]:
    part = _part(parts, ndim, n, where)
    found, at = [], 0
    for shape in part["sizes"].tolist():
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if at + nbytes > part["bytes"].numel():
            break
        # A copy lies where the dtype may lie.
        found.append(part["bytes"][at : at + nbytes].clone().view(dtype).reshape(shape).to(device))
        at += nbytes
    if len(found) != n or at != part["bytes"].numel():
        raise ValueError(f"{where}: bytes: expected as many as the sizes say, got {part['bytes'].numel()}.")
    return found
