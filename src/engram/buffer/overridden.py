"""Writes of buffers whose components override methods of TorchRL's: the writer's ``add`` and ``extend``, the storage's ``set``, and the
sampler's ``mark_update``, ``add`` and ``extend``.

They are called in the order in which TorchRL calls them, one write at a time. The limits of the store admit the rows before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engram import _fork
from engram._checks import as_numbers
from engram._overrides import doing, overrides
from engram._tensordict import is_tensor_collection
from engram.nested import first_leaf, has_dimensions, map_leaves
from engram.storages import Storage, leading_size
from engram.types import Extent, Write, WritePlan
from engram.writers._base import NativeWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.buffer.lanes import Lanes
    from engram.buffer.wiring import Wiring

_one_by_one = _fork.rlock()


def write_overridden(
    here: Callable[..., Write], wiring: Wiring, lanes: Lanes, data: object, lane: object, call: str, *, batched: bool
) -> Write:
    """What ``here`` does, through the methods that are overridden."""
    storage, writer, memory, told = wiring.storage, wiring.writer, wiring.storage.memory, list[Write]()
    lane = lanes.default if lane is None else lane

    def tell(name: str, written: Write) -> None:
        if overrides(type(wiring.own_sampler), name):
            index: Any = wiring.user_index(written.survivors if wiring.of_writer.rejects else written.rows)
            if not batched and storage.ndim == 1:
                index = int(index[0]) if index[0] >= 0 else None
            getattr(wiring.own_sampler, name)(index)

    def own(data: object, call: str, batched: bool) -> Write:
        if storage.sets:
            told.append(
                _set(here, wiring, data, (lane, lanes.of_rows(lane, call, batched=batched)[0]), call, batched=batched)
            )
        else:
            told.append(here(data, lane, call, batched=batched))
        tell("mark_update", told[-1])
        return told[-1]

    with _one_by_one:
        if memory is not None and memory.core.limited:  # first: methods of the user's are called once
            memory.core.prepay_inserts((_steps(data, storage, call) if batched else 1) * math.prod(storage.columns))
        try:
            if isinstance(writer, NativeWriter) and overrides(type(writer), call):
                with doing(writer, own):
                    written = _written(wiring, getattr(writer, call)(data))
                if not told:
                    storage.notify(written, data)
                    tell("mark_update", written)
            else:
                written = own(data, call, batched)
        finally:
            if memory is not None:
                memory.core.return_prepaid()
        tell(call, written)
    return written


def _written(wiring: Wiring, index: object) -> Write:
    """What a writer of the user's says that it wrote: None, an int, rows, or coordinates with ``ndim > 1``."""
    if isinstance(index, tuple) or (isinstance(index, Tensor) and index.ndim > 1):
        index = wiring.rows_named(index)
    rows = as_numbers("index", -1 if index is None else index).to("cpu", torch.int64).reshape(-1)
    return Write(rows, 0, wiring.storage.tickets_of(rows.clamp(min=0)).where(rows >= 0, -1))


def _set(
    here: Callable[..., Write], wiring: Wiring, data: Any, lanes: tuple[object, Any], call: str, *, batched: bool
) -> Write:
    """Write by a ``set`` of the user's, which is told the places that come next: rows, with ``ndim > 1`` slots.

    Its ``super().set()`` of these, or of the first of them and then of the next ones, writes as if there were no override; of others it
    writes by number. ``lanes``: as it was named, and as it is.
    """
    storage, made, extent = wiring.storage, list[Write](), wiring.storage.extent()
    width = math.prod(storage.columns)
    n, plan = _steps(data, storage, call) if batched else 1, WritePlan(lane=lanes[1])
    if not wiring.appends:
        plan = wiring.placer.place(extent, n, lanes[1], data)
    rows = _following(extent, plan.lane, n, width) if plan.rows is None else plan.rows
    kept = plan.kept
    if kept is not None and batched:  # the others are rejected
        data = (
            [data[i] for i in kept]
            if isinstance(data, list)
            else map_leaves(data, lambda x: cast("Any", x)[kept] if has_dimensions(x) else x)
        )

    def own(cursor: object, data: object) -> None:
        named, begin = as_numbers("set: cursor", cursor), sum(len(it.rows) for it in made) // width
        end = begin + named.numel()
        whole = end - begin == len(rows)
        if named.reshape(-1).tolist() != rows[begin:end].tolist() or not (whole or plan.rows is None):
            with doing(storage, None):
                Storage.set(storage, cursor, data)
            return
        lane = lanes[0]
        if not whole:
            each = torch.as_tensor(plan.lane, device="cpu").expand(len(rows))[begin:end].tolist()
            lane = each if named.ndim else each[0]
        made.append(here(data, lane, call, batched=named.ndim > 0))

    if len(rows):
        with doing(storage, own):
            storage.set(rows if batched else int(rows[0]), data)
    if not made:
        made.append(Write(rows, 0, storage.tickets_of(rows)))
    done = Write(torch.cat([it.rows for it in made]), 0, torch.cat([it.tickets for it in made]))
    return done if kept is None else Write(plan.reported(done.rows, n), 0, plan.reported(done.tickets, n))


def _steps(data: object, storage: Storage, call: str) -> int:
    """How many steps a batch has, of each column."""
    if isinstance(data, list):
        return len(data)
    leaf: Any = first_leaf(data)
    shape = getattr(leaf, "batch_size" if is_tensor_collection(leaf) else "shape", ())
    return int(shape[storage.dim_extend]) if len(shape) >= storage.ndim else leading_size(data, call)


def _following(extent: Extent, lane: object, n: int, width: int) -> Tensor:
    """The places that come next in a lane, or in one for each row, int64 ``[n]``. ``width``: rows of a place."""
    length, seam, places = extent.capacity // len(extent.filled) // width, [row // width for row in extent.seam], []
    for one in torch.as_tensor(lane, device="cpu").expand(n).tolist():
        places.append(seam[one])
        seam[one] += 1 if (seam[one] + 1) % length else 1 - length
    return torch.tensor(places, device="cpu")
