"""Transforms: forward on what is read, inverse on what is written.

Any object with ``forward`` and/or ``inv`` is one, and so is a callable. Those here have TorchRL's names, arguments and results, and
take TensorDicts, nested dicts and, where keys do not matter, one tensor. None of them changes what it is given.
"""

from engram.transforms._base import Transform
from engram.transforms.casts import DeviceCastTransform, DoubleToFloat, DTypeCastTransform
from engram.transforms.compose import Compose
from engram.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from engram.transforms.scaling import ObservationNorm, RewardScaling
from engram.transforms.vecnorm import VecNorm

__all__ = [
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
