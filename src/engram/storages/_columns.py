"""Storages whose rows have more than one dimension (``ndim > 1``).

``extend`` takes data laid out ``[*columns, time, ...]``; the store keeps it slot after slot, ``[time, *columns, ...]``, so
that a slot, one time step of every column, is a run of consecutive rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from engram._support import checks, nested, tensordicts
from engram.format.layout import SINGLE
from engram.storages import _base, _ragged_structure, _structure, _types


def rows_of_batch(data: object, ndim: int, call: str, time: int) -> tuple[object, tuple[int, ...]]:
    """``[*columns, ...]`` with the dimension ``time`` among the columns as rows ``[time * columns, ...]``, and the columns."""

    def merge(x: Any) -> object:
        rest = [dim for dim in range(len(_shape(x))) if dim != time]
        return x.permute(time, *rest).flatten(0, ndim - 1)

    layout = "data laid out [*columns, time, …]" if time == ndim - 1 else f"data whose dimension {time} is time"
    rows, shape = _rearrange(data, ndim, merge, call, layout)
    return rows, (*shape[:time], *shape[time + 1 :])


def rows_of_slot(data: object, ndim: int, call: str) -> tuple[object, tuple[int, ...]]:
    """One slot ``[*columns, ...]`` as rows ``[columns, ...]``, and the columns."""
    return _rearrange(data, ndim - 1, lambda x: x.flatten(0, ndim - 2), call, "one slot, laid out [*columns, …]")


def rows_of_written(
    data: object,
    storage: _base.Storage,
    call: str,
    dtypes: _types.Dtypes,
    *,
    batched: bool,
    count: _base.Count | None,
    known: _structure.Structure | None = None,
    ignored: Iterable[str] = (),
) -> tuple[object, int | None, tuple[int, ...]]:
    """What is written to a storage as rows, how many, or None of one without a dimension, and the columns.

    Raises as :func:`stacked`, whose arguments ``known`` and ``ignored`` are, :func:`structure_of`, :func:`leading_size` and
    :func:`check_count`.
    """
    columns: tuple[int, ...] = ()
    ragged = storage.ragged
    if batched and _ragged_structure.is_uneven(data, known, ragged):
        data = list(data.unbind(0))  # type: ignore[attr-defined] # as was looked
    if batched and (isinstance(data, list) or (isinstance(data, tuple) and not data)):
        rows = data

        def made(row: object) -> _structure.Structure:
            return _ragged_structure.structure_of(
                row, batched=False, call=call, dtypes=dtypes, ragged=ragged.of_rows(rows)
            )

        data = _structure.stacked(rows, call, made, known, ignored)
    if storage.ndim > 1:
        slots = rows_of_batch(data, storage.ndim, call, storage.dim_extend) if batched else None
        data, columns = slots or rows_of_slot(data, storage.ndim, call)
        batched = True
    n = (
        _structure.leading_size(data, call, ragged=partial(_ragged_structure.rows_at, known, ragged))
        if batched
        else None
    )
    if columns and storage.memory is not None and columns != storage.columns:
        raise RuntimeError(f"{call}: expected columns {storage.columns} as in the first write, got {columns}.")
    _base.check_count(call, count, n or 1)
    return data, n, columns


def rows_of_stored(data: object, ndim: int, call: str) -> tuple[object, tuple[int, ...]]:
    """Data in the store's own layout ``[time, *columns, ...]`` as rows, and the columns."""
    ndim = checks.check_count(f"{call}: ndim", ndim)
    rows, shape = _rearrange(data, ndim, lambda x: x.flatten(0, ndim - 1), call, "data laid out [time, *columns, …]")
    return rows, shape[1:]


def rows_of_selection(data: object, shape: torch.Size, call: str, structure: _structure.Structure) -> object:
    """Data for rows that an index selected, ``[*shape, ...]`` or what is broadcast to that, as rows ``[n, ...]``."""
    own = {field.key: field.shape for field in structure.fields}

    def spread(x: object, path: tuple[str, ...]) -> object:
        if tensordicts.is_tensor_collection(x):
            return x.expand(*shape) if shape[len(shape) - x.ndim :] == x.batch_size else x
        with contextlib.suppress(RuntimeError):  # what differs is said below
            return structure.number(x, path).expand(*shape, *own.get(path or (SINGLE,), ()))
        return x

    def merge(x: Any) -> object:
        return x.flatten(0, len(shape) - 1) if shape else x.unsqueeze(0)

    spreads = nested.map_with_paths(data, spread)
    rows, found = _rearrange(spreads, len(shape), merge, call, "data for the rows of the index")
    if found != tuple(shape):
        raise RuntimeError(f"{call}: expected leading dimensions {list(shape)} of the index, got {list(found)}.")
    return rows


def selected_rows(index: Any, slots: int, columns: tuple[int, ...], time: int) -> torch.Tensor:
    """The rows that an index into ``[*columns]``, with the slots as dimension ``time``, selects: int64 in the shape it selects.

    Raises:
        IndexError: out of range.
    """
    if isinstance(index, range):
        index = list(index)
    grid = (*columns[:time], slots, *columns[time:])
    rows = torch.zeros((), dtype=torch.int64, device="cpu")
    for place in sorted(range(len(grid)), key=lambda dim: dim != time):  # time first, as the store lays them out
        coordinate = torch.arange(grid[place], device="cpu")
        coordinate = coordinate.reshape([-1 if i == place else 1 for i in range(len(grid))])
        rows = rows * grid[place] + coordinate.expand(grid)[index]
    return rows


def rows_of_coordinates(coordinates: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The rows of coordinates ``[..., ndim]``, slot first; -1 for those outside of the sizes."""
    rows = torch.zeros(coordinates.shape[:-1], dtype=torch.int64, device=coordinates.device)
    inside = rows == 0
    for size, place in zip(sizes, coordinates.unbind(-1), strict=True):
        rows, inside = rows * size + place, inside & (place >= 0) & (place < size)
    return torch.where(inside, rows, -1)


def coordinates(rows: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    """The coordinates ``[n, ndim]`` of rows, slot first; without columns the rows themselves."""
    if not columns:
        return rows
    places = []
    for width in reversed(columns):
        places.append(rows % width)
        rows = rows // width
    return torch.stack([rows, *reversed(places)], -1)


def check_even(data: Any, call: str, path: tuple[str, ...] = ()) -> None:
    """Raise ``RuntimeError`` where the TensorDicts of a lazy stack have tensors of several shapes under a key."""
    if tensordicts.is_lazy_stack(data):
        rows: list[dict[tuple[str, ...], object]] = [dict(nested.flatten(row, path)) for row in data.tensordicts]
        for key in rows[0]:
            shapes = {str(list(it.shape)): None for row in rows if isinstance(it := row.get(key), torch.Tensor)}
            if len(shapes) > 1:
                raise RuntimeError(
                    f"{call}: {_types.at(key)}: expected tensors of one shape in a stack, got {', '.join(shapes)}. Pad them, or use a "
                    "LazyStackStorage, whose rows may have several shapes."
                ) from None
    elif nested.has_entries(data) and not tensordicts.is_non_tensor(data):
        for key, child in data.items():
            check_even(child, call, (*path, str(key)))


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.batch_size if tensordicts.is_tensor_collection(x) else x.shape)


def _rearrange(
    data: Any, count: int, change: Callable[[Any], Any], call: str, layout: str
) -> tuple[object, tuple[int, ...]]:
    """``change`` every tensor or TensorDict of a pytree; also the first ``count`` sizes, which all of them must share."""
    seen: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    def rearrange(x: object, path: tuple[str, ...]) -> object:
        if not (tensordicts.is_tensor_collection(x) or isinstance(x, torch.Tensor)):
            x = _types.as_tensor(x, path, call)
        if isinstance(x, torch.Tensor) and x.is_nested:
            raise RuntimeError(
                f"{call}: {_types.at(path)}: expected rows of one size where ndim > 1, got a nested tensor. Use ndim=1."
            )
        shape = _shape(x)
        if len(shape) < count:
            raise RuntimeError(
                f"{call}: {_types.at(path)}: expected {layout} with {count} leading dimensions, got {list(shape)}."
            )
        seen.append((path, shape[:count]))
        if shape[:count] != seen[0][1]:
            raise RuntimeError(
                f"{call}: {_types.at(path)}: expected leading dimensions {list(seen[0][1])} as in {_types.at(seen[0][0])}, "
                f"got {list(shape[:count])}."
            )
        return change(x)

    rows = nested.map_with_paths(data, rearrange)
    if not seen:
        raise TypeError(f"{call}: expected at least one tensor, got {nested.describe(data)}.")
    return rows, seen[0][1]
