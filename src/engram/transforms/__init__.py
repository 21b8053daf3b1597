"""Transforms: ``forward`` changes batches that are read, ``inv`` rows that are written.

Any object with ``forward``, ``inv`` or both is a transform, and so is a callable. The transforms here have TorchRL's names,
arguments and results. They take TensorDicts, nested dicts and, where keys do not matter, one tensor. They do not modify their
argument.
"""

from engram.transforms._base import Compose, Transform
from engram.transforms.casts import (
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    RenameTransform,
    SelectTransform,
)
from engram.transforms.vecnorm import ObservationNorm, RewardScaling, VecNorm
from engram.transforms.windows import ActionChunkTransform

__all__ = [
    "ActionChunkTransform",
    "Compose",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DoubleToFloat",
    "ExcludeTransform",
    "ObservationNorm",
    "RenameTransform",
    "RewardScaling",
    "SelectTransform",
    "Transform",
    "VecNorm",
]
