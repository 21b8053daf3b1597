"""Names of torch's dtypes."""

import torch

from engram.format.schema import DTYPES

#: The dtypes that can be stored, by name; some are missing in older versions of torch.
DTYPE_OF: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_OF.items()}
