"""Storages whose rows have more than one dimension (``ndim > 1``).

``extend`` takes data laid out ``[*columns, time, ...]``; the store keeps it slot after slot, ``[time, *columns, ...]``, so
that a slot, one time step of every column, is a run of consecutive rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["first_leaf", "rows_of_batch", "rows_of_slot", "rows_of_stored"]


def rows_of_batch(data: Any, ndim: int, call: str) -> tuple[Any, tuple[int, ...]]:
    """``[*columns, time, ...]`` as rows ``[time * columns, ...]``, and the columns."""
    shape = _leading(data, ndim, f"{call}: expected data laid out [*columns, time, …] with {ndim} leading dimensions")

    def merge(x: Any) -> Any:
        rest = range(ndim, len(_shape(x)))
        return x.permute(ndim - 1, *range(ndim - 1), *rest).flatten(0, ndim - 1)

    return _map(data, merge), shape[:-1]


def rows_of_slot(data: Any, ndim: int, call: str) -> tuple[Any, tuple[int, ...]]:
    """One slot ``[*columns, ...]`` as rows ``[columns, ...]``, and the columns."""
    shape = _leading(data, ndim - 1, f"{call}: expected one slot with {ndim - 1} leading dimensions, the columns")
    return _map(data, lambda x: x.flatten(0, ndim - 2) if ndim > 2 else x), shape


def rows_of_stored(data: Any, ndim: int, call: str) -> tuple[Any, tuple[int, ...]]:
    """Data in the store's own layout ``[time, *columns, ...]`` as rows, and the columns."""
    shape = _leading(data, ndim, f"{call}: expected data laid out [time, *columns, …] with {ndim} leading dimensions")
    return _map(data, lambda x: x.flatten(0, ndim - 1)), shape[1:]


def first_leaf(data: Any) -> Any:
    """Some tensor or TensorDict of a pytree."""
    while isinstance(data, dict | tuple) and not is_tensor_collection(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    return data


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.batch_size if is_tensor_collection(x) else x.shape)


def _leading(data: Any, count: int, expected: str) -> tuple[int, ...]:
    shape = _shape(first_leaf(data))
    if len(shape) < count:
        raise RuntimeError(f"{expected}, got {list(shape)}.")
    return shape[:count]


def _map(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {key: _map(value, change) for key, value in data.items()}
    if isinstance(data, tuple):
        values = [_map(value, change) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    if is_tensor_collection(data) or isinstance(data, Tensor):
        return change(data)
    return change(torch.as_tensor(data, device="cpu"))
