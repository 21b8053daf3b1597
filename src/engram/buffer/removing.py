"""Rows that hold nothing from now on: ``remove``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram._support.checks import as_numbers
from engram._support.tensordicts import is_tensor_collection

if TYPE_CHECKING:
    from engram.buffer.wiring import Wiring

CALL = "remove"


def remove_rows(wiring: Wiring, index: object, generation: object) -> int:
    """What ``ReplayBuffer.remove`` does, once the buffer may be edited."""
    removed: int = wiring.storage.remove(*checked(wiring, index, generation))
    return removed


def checked(wiring: Wiring, index: object, generation: object) -> tuple[Tensor, Tensor | None]:
    """Rows and their generations, int64 ``[n]`` on the CPU. Raises as ``ReplayBuffer.remove``, once the buffer may be edited."""
    storage = wiring.storage
    if is_tensor_collection(index):
        raise TypeError(f'{CALL}: expected rows, got a {type(index).__name__}. Of a sampled batch: batch["index"].')
    index = index[0] if isinstance(index, tuple) and len(index) == storage.ndim == 1 else index
    rows = _ints("rows", wiring.rows_named(index))
    expected = None if generation is None else _ints("generation", generation)
    if expected is not None and expected.numel() != rows.numel():
        raise ValueError(
            f"{CALL}: expected one generation per row, got {rows.numel()} rows and {expected.numel()} generations."
        )
    storage.check_removal(rows)
    return rows, expected


def _ints(what: str, given: object) -> Tensor:
    """Ints ``[n]``, int64 on the CPU."""
    numbers = as_numbers(f"{CALL}: {what}", given)
    if numbers.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool:
        raise TypeError(f"{CALL}: {what}: expected ints, got {numbers.dtype}.")
    return numbers.to("cpu", torch.int64).reshape(-1).contiguous()
