"""What draws and reads batches of a unit, in place of a buffer's own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.samplers._base import DeclaredSampler
    from engram.storages import Storage
    from engram.store import Key
    from engram.types import NativeBatch, Shown


class Named(NamedTuple):
    """Rows of a storage, and how users name them."""

    index_of: Callable[[Tensor], Tensor]
    """Of rows ``[n]``: on the storage's device; with ``ndim > 1`` coordinates ``[n, ndim]``."""
    rows_of: Callable[[object], object]
    """The other way around; tuples of coordinates, too."""


class UnitReader:
    """Draws with a sampler, and reads the rows that a unit makes of what was drawn.

    Args:
        source: draws.
        named: how users name rows.
    """

    def __init__(self, source: DeclaredSampler, named: Named) -> None:
        self.source = source
        self.named = named

    def sample(
        self, storage: Storage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """Draw ``n`` rows with a key, and read: ``(columns, rows, info)``, as ``Sampler.sample_natively`` returns them."""
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, or the buffer is closed."""

    def draws_others(self, tickets: Tensor | None) -> bool:
        """Whether other rows may be drawn in place of some of a draw with these tickets."""
        traits = self.source.traits
        return (tickets is not None or traits.draws_uniformly) and not traits.consumes


def as_rows(rows: object) -> Tensor:
    """Rows as the native core reads them: int64, on the CPU, contiguous. Raises ``TypeError``: no ints."""
    if not isinstance(rows, Tensor):
        rows = torch.as_tensor(rows, device="cpu")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
        raise TypeError(f"sample_unit: expand: expected an index of ints, got {rows.dtype}.")
    return rows.to("cpu", torch.int64).reshape(-1).contiguous()
