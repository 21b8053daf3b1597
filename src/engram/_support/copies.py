"""The bytes of tensors, and the threads that copy them."""

from __future__ import annotations

import torch
from torch import Tensor

from engram import _core


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in memory of the processor, uint8 ``[n]``: a view of a contiguous one, else of a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape: a single value is contiguous whatever its stride, and keeps that.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def set_num_threads(n: int) -> None:
    """Use ``n`` threads for copies of large batches, the calling thread included.

    Small batches (below 512 KiB) always use the calling thread alone. The default is the number of cores, at most 4.
    Results never depend on it.

    Args:
        n: threads in ``[1, 1024]``.

    Raises:
        ValueError: ``n`` is outside the range.
        TypeError: ``n`` is not an int.

    >>> import engram
    >>> engram.set_num_threads(2)
    >>> engram.num_threads()
    2
    """
    if type(n) is not int:
        raise TypeError(f"set_num_threads: expected an int, got {type(n).__name__}.")
    if not 1 <= n <= 1024:
        raise ValueError(f"set_num_threads: expected a number of threads in [1, 1024], got {n}.")
    _core.set_num_threads(n)


def num_threads() -> int:
    """Threads that a large copy may use, the calling thread included.

    >>> import engram
    >>> engram.num_threads() >= 1
    True
    """
    return int(_core.num_threads())
