"""Rows that hold nothing from now on: ``remove``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram import storages
from engram._checks import as_numbers
from engram._tensordict import is_tensor_collection
from engram._unsupported import refused
from engram.errors import RowError

if TYPE_CHECKING:
    from engram.buffer.wiring import Wiring

CALL = "remove"


def remove_rows(wiring: Wiring, index: object, generation: object) -> int:
    """What ``ReplayBuffer.remove`` does, once the buffer may be edited."""
    rows, expected = checked(wiring, index, generation)
    storage = wiring.storage
    if not storage.initialized:
        return 0
    storage.begin_change()
    removed: int = storage.store.core.remove(rows.data_ptr(), len(rows), 0 if expected is None else expected.data_ptr())
    return removed


def checked(wiring: Wiring, index: object, generation: object) -> tuple[Tensor, Tensor | None]:
    """Rows and their generations, int64 ``[n]`` on the CPU. Raises as ``ReplayBuffer.remove``, once the buffer may be edited."""
    storage = wiring.storage
    if is_tensor_collection(index):
        raise TypeError(f'{CALL}: expected rows, got a {type(index).__name__}. Of a sampled batch: batch["index"].')
    if not isinstance(storage, storages.TensorStorage):
        if storage.traits.is_remote:
            raise refused(
                CALL, "Call it where the store is, such as on ReplayBuffer.open(directory) there: the server sees it."
            )
        raise RuntimeError(
            f"{CALL}: expected a tensor storage, got a {type(storage).__name__}, which cannot hold void rows. Write another item there, "
            "rb[i] = item, or keep the rows in a LazyTensorStorage."
        )
    if isinstance(storage, storages.OwnStorage):
        raise RuntimeError(
            f"{CALL}: expected rows in memory, got those of {storage!r}, which cannot hold void rows. Write another row there, "
            "rb[i] = row, or keep the rows in a LazyTensorStorage or LazyMemmapStorage."
        )
    index = index[0] if isinstance(index, tuple) and len(index) == storage.ndim == 1 else index
    rows = _ints("rows", wiring.rows_named(index))
    expected = None if generation is None else _ints("generation", generation)
    if expected is not None and expected.numel() != rows.numel():
        raise ValueError(
            f"{CALL}: expected one generation per row, got {rows.numel()} rows and {expected.numel()} generations."
        )
    outside = rows[(rows < -1) | (rows >= storage.max_size)]
    if len(outside):
        raise RowError(f"{CALL}: expected rows in [-1, {storage.max_size}), got {int(outside[0])}.")
    return rows, expected


def _ints(what: str, given: object) -> Tensor:
    """Ints ``[n]``, int64 on the CPU."""
    numbers = as_numbers(f"{CALL}: {what}", given)
    if numbers.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool:
        raise TypeError(f"{CALL}: {what}: expected ints, got {numbers.dtype}.")
    return numbers.to("cpu", torch.int64).reshape(-1).contiguous()
