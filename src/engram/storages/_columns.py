"""Storages whose rows have more than one dimension (``ndim > 1``).

``extend`` takes data laid out ``[*columns, time, ...]``; the store keeps it slot after slot, ``[time, *columns, ...]``, so
that a slot, one time step of every column, is a run of consecutive rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram._checks import check_count
from engram._tensordict import is_tensor_collection
from engram.nested import describe, map_with_paths
from engram.storages._keys import at
from engram.storages._structure import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def rows_of_batch(data: object, ndim: int, call: str) -> tuple[object, tuple[int, ...]]:
    """``[*columns, time, ...]`` as rows ``[time * columns, ...]``, and the columns."""

    def merge(x: Any) -> Any:
        rest = range(ndim, len(_shape(x)))
        return x.permute(ndim - 1, *range(ndim - 1), *rest).flatten(0, ndim - 1)

    rows, shape = _rearrange(data, ndim, merge, call, "data laid out [*columns, time, …]")
    return rows, shape[:-1]


def rows_of_slot(data: Any, ndim: int, call: str) -> tuple[Any, tuple[int, ...]]:
    """One slot ``[*columns, ...]`` as rows ``[columns, ...]``, and the columns."""
    return _rearrange(data, ndim - 1, lambda x: x.flatten(0, ndim - 2), call, "one slot, laid out [*columns, …]")


def rows_of_stored(data: object, ndim: int, call: str) -> tuple[object, tuple[int, ...]]:
    """Data in the store's own layout ``[time, *columns, ...]`` as rows, and the columns."""
    ndim = check_count(f"{call}: ndim", ndim)
    rows, shape = _rearrange(data, ndim, lambda x: x.flatten(0, ndim - 1), call, "data laid out [time, *columns, …]")
    return rows, shape[1:]


def rows_of_selection(data: object, shape: torch.Size, call: str) -> object:
    """Data for rows that an index selected, ``[*shape, ...]``, as rows ``[n, ...]``."""

    def merge(x: Any) -> object:
        return x.flatten(0, len(shape) - 1) if shape else x.unsqueeze(0)

    rows, found = _rearrange(data, len(shape), merge, call, "data for the rows of the index")
    if found != tuple(shape):
        raise RuntimeError(
            f"{call}: expected leading dimensions {list(shape)}, as the index selects, got {list(found)}."
        )
    return rows


def selected_rows(index: Any, slots: int, columns: tuple[int, ...]) -> Tensor:
    """The rows that an index into ``[*columns, slots]`` selects, int64 in the shape it selects.

    Raises:
        IndexError: out of range.
    """
    if isinstance(index, range):
        index = list(index)
    grid = (*columns, slots)
    rows = torch.zeros((), dtype=torch.int64, device="cpu")
    for place in (len(columns), *range(len(columns))):  # time first, as the store lays them out
        coordinate = torch.arange(grid[place], device="cpu")
        coordinate = coordinate.reshape([-1 if i == place else 1 for i in range(len(grid))])
        rows = rows * grid[place] + coordinate.expand(grid)[index]
    return rows


def rows_of_coordinates(coordinates: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The rows of coordinates ``[..., ndim]``, slot first; -1 for those outside of the sizes."""
    rows = torch.zeros(coordinates.shape[:-1], dtype=torch.int64, device="cpu")
    for size, place in zip(sizes, coordinates.unbind(-1), strict=True):
        rows = rows * size + place
    ends = torch.tensor(sizes, device="cpu")
    return torch.where(((coordinates >= 0) & (coordinates < ends)).all(-1), rows, -1)


def coordinates(rows: Tensor, columns: tuple[int, ...]) -> Tensor:
    """The coordinates ``[n, ndim]`` of rows, slot first; without columns the rows themselves."""
    if not columns:
        return rows
    places = []
    for width in reversed(columns):
        places.append(rows % width)
        rows = rows // width
    return torch.stack([rows, *reversed(places)], -1)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.batch_size if is_tensor_collection(x) else x.shape)


def _rearrange(
    data: Any, count: int, change: Callable[[Any], Any], call: str, layout: str
) -> tuple[object, tuple[int, ...]]:
    """``change`` every tensor or TensorDict of a pytree; also the first ``count`` sizes, which all of them must share."""
    seen: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    def rearrange(x: object, path: tuple[str, ...]) -> object:
        if not (is_tensor_collection(x) or isinstance(x, Tensor)):
            x = as_tensor(x, path, call)
        shape = _shape(x)
        if len(shape) < count:
            raise RuntimeError(
                f"{call}: {at(path)}: expected {layout} with {count} leading dimensions, got {list(shape)}."
            )
        seen.append((path, shape[:count]))
        if shape[:count] != seen[0][1]:
            raise RuntimeError(
                f"{call}: {at(path)}: expected leading dimensions {list(seen[0][1])} as in {at(seen[0][0])}, "
                f"got {list(shape[:count])}."
            )
        return change(x)

    rows = map_with_paths(data, rearrange)
    if not seen:
        raise TypeError(f"{call}: expected at least one tensor, got {describe(data)}.")
    return rows, seen[0][1]
