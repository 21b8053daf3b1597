"""Which members an index names."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engram._checks import as_numbers
from engram._tensordict import is_tensor_collection
from engram.nested import is_tensordict

T = TypeVar("T")

#: All members, in order.
ALL = slice(None)


def members_named(index: object, n: int, who: str) -> int | list[int]:
    """The member that an index names, or those.

    Args:
        index: an int, a slice, ``...``, or a list, range, array or tensor of ints.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: no index, or floats. RuntimeError: one of more than one dimension. IndexError: there is no such member, or none.
    """
    if index is Ellipsis:
        index = ALL
    if isinstance(index, slice):
        numbers = list(range(n))[index]
    else:
        if isinstance(index, bool) or not isinstance(index, int | list | range | np.ndarray | np.integer | Tensor):
            raise TypeError(f"{who}: expected an int, a slice, or ints that name members, got {type(index).__name__}.")
        named = as_numbers(f"{who}: members", index)
        if named.ndim > 1:
            raise RuntimeError(f"{who}: expected an int or a list of ints, got an index of shape {list(named.shape)}.")
        if named.numel() and (named.dtype.is_floating_point or named.dtype.is_complex or named.dtype is torch.bool):
            raise TypeError(f"{who}: expected ints that name members, got {named.dtype}.")
        for member in named.reshape(-1).tolist():
            if not -n <= member < n:
                raise IndexError(f"{who}: expected a member in [0, {n}), got {member}.")
        if named.ndim == 0:
            return int(named) % n
        numbers = [member % n for member in named.tolist()]
    if not numbers:
        raise IndexError(f"{who}: expected one member at least, got none of {n}.")
    return numbers


def split_index(index: object, who: str) -> tuple[object, object | None]:
    """An index of members, and one of their rows. None: of members alone. Raises ``IndexError``: an empty tuple."""
    if not isinstance(index, tuple):
        return index, None
    if not index:
        raise IndexError(f"{who}: expected an index of members, got ().")
    rows = index[1:]
    return index[0], None if not rows else rows[0] if len(rows) == 1 else rows


def check_ids(ids: object, n: int, what: str) -> Tensor:
    """Numbers of members, int64 on the CPU, of any shape. Raises ``TypeError``: no ints. ``ValueError``: there is no such member."""
    numbers = as_numbers(what, ids)
    if numbers.numel() and (numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool):
        raise TypeError(f"{what}: expected ints, the numbers of members, got {numbers.dtype}.")
    numbers = numbers.to("cpu", torch.int64)
    bad = numbers[(numbers < 0) | (numbers >= n)]
    if len(bad):
        raise ValueError(f"{what}: expected members in [0, {n}), got {int(bad[0])}.")
    return numbers


def routed(index: object, n: int, who: str) -> tuple[Tensor, Tensor]:
    """The members and their rows that an index of an ensemble names: int64 ``[*batch]`` and ``[*batch, ...]``.

    Args:
        index: what ``extend`` returned, or ``"index"`` of a batch: a TensorDict or dict with ``"buffer_ids"`` and ``"index"``.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: something else, or no ints. ValueError: no such member, or shapes that do not go together.
    """
    entries = index if isinstance(index, dict) or (is_tensor_collection(index) and is_tensordict(index)) else None
    ids, rows = (None, None) if entries is None else (entries.get("buffer_ids", None), entries.get("index", None))
    if ids is None or rows is None:
        got = type(index).__name__ if entries is None else f"one with {sorted(map(str, entries.keys()))}"
        raise TypeError(
            f"{who}: index: expected what extend returned, or batch['index'], with 'buffer_ids' and 'index', got {got}."
        )
    members, named = check_ids(ids, n, f"{who}: buffer_ids"), as_numbers(f"{who}: index", rows)
    if named.shape[: members.ndim] != members.shape:
        raise ValueError(
            f"{who}: expected an index that begins with the shape of buffer_ids, {list(members.shape)}, got {list(named.shape)}."
        )
    return members, named
