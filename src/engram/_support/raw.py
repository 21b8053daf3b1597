"""The bytes of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in memory of the processor, uint8 ``[n]``: a view of a contiguous one, else of a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape: a single value is contiguous whatever its stride, and keeps that.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
