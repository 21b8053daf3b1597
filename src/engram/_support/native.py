"""The importer of the extension. `format.sizes` and `doctor`, which load no torch, import it, too, and `copies`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from engram import _core
from engram._core import *  # noqa: F403 - what there is, its stub lists once
from engram.errors import CorruptStore, NoSampleable, RateLimited, ReadOnlyStore, WriterStalled

MakeTensor: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class NotAdmitted(RateLimited):
    """A number of rows that the limits of a store refuse for now: buffers wait and try again."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows

    def __str__(self) -> str:
        return f"the limits of the store do not admit {self.rows} more rows now. Write through a buffer, which waits."


_core.raise_stalled_as(WriterStalled)
_core.raise_damaged_as(CorruptStore)
_core.raise_nothing_live_as(NoSampleable)
_core.raise_readonly_as(ReadOnlyStore)
_core.raise_limited_as(NotAdmitted)

#: Whether tensors can be looked at natively; if not, everything works and writes are slower.
HAS_EXCHANGE: bool = _core.use_tensor_type(torch.Tensor)
_core.use_array_types(np.ndarray, np.generic)


#: dtypes by DLPack's type code and bits.
_DTYPES = {
    (code, 8 * dtype.itemsize): dtype
    for code, dtypes in (
        (0, (torch.int8, torch.int16, torch.int32, torch.int64)),
        (1, (torch.uint8, torch.uint16, torch.uint32, torch.uint64)),
        (2, (torch.float16, torch.float32, torch.float64)),
        (4, (torch.bfloat16,)),
        (5, (torch.complex32, torch.complex64, torch.complex128)),
        (6, (torch.bool,)),
        (10, (torch.float8_e4m3fn,)),
        (11, (torch.float8_e4m3fnuz,)),
        (12, (torch.float8_e5m2,)),
        (13, (torch.float8_e5m2fnuz,)),
    )
    for dtype in dtypes
}
DLPACK = {dtype: code for code, dtype in _DTYPES.items()}


@contextmanager
def making(empty: MakeTensor | None) -> Iterator[None]:
    """In this block, ``empty(shape, dtype)`` makes the tensors that the core returns on this thread; None: the core itself.

    They must be contiguous, and on the CPU.
    """
    if empty is None:
        yield
        return

    def make(shape: tuple[int, ...], code: int, bits: int) -> torch.Tensor:
        return empty(shape, _DTYPES[code, bits])

    previous = _core.set_allocator(make)
    try:
        yield
    finally:
        _core.set_allocator(previous)
