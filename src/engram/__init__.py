"""Experience replay that survives.

Names that need torch are loaded when they are first used, so that ``engram --help`` does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engram._version import __version__

if TYPE_CHECKING:
    from engram._native import num_threads, set_num_threads
    from engram.buffer.prioritized import (
        PrioritizedReplayBuffer,
        ReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )
    from engram.checkpoint.checkpointer import Checkpointer, RestoreReport, SaveHandle, SaveReport
    from engram.errors import (
        CorruptCheckpoint,
        CorruptStore,
        EngramError,
        ForkedHandle,
        IncompatibleCheckpoint,
        IncompatibleStore,
        NoSampleable,
        PriorityError,
        RankFailed,
        RowError,
        StoreInUse,
        UncleanStore,
        WriterStalled,
    )
    from engram.expanders import FinalObservations, FrameStack, NextFromFollowing, NStep, RewardToGo
    from engram.loader import DeviceLoader
    from engram.ranks import Ranks
    from engram.samplers import (
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
    )
    from engram.sizing import StoragePlan, plan
    from engram.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
    from engram.trajectories import DEFAULT_DONE_KEYS, find_start_stop_traj
    from engram.transforms import (
        Compose,
        DeviceCastTransform,
        DoubleToFloat,
        DTypeCastTransform,
        ExcludeTransform,
        ObservationNorm,
        RenameTransform,
        RewardScaling,
        SelectTransform,
        VecNorm,
    )
    from engram.types import Changes, Draw, Extent, Plan, Sampler, Traits, Write, WritePlan, Writer
    from engram.writers import (
        ImmutableDatasetWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
    )

__all__ = [  # noqa: RUF022 - as sorted() has it, which a test compares with
    "Changes",
    "Checkpointer",
    "Compose",
    "CorruptCheckpoint",
    "CorruptStore",
    "DEFAULT_DONE_KEYS",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DeviceLoader",
    "DoubleToFloat",
    "Draw",
    "EngramError",
    "ExcludeTransform",
    "Extent",
    "FinalObservations",
    "ForkedHandle",
    "FrameStack",
    "ImmutableDatasetWriter",
    "IncompatibleCheckpoint",
    "IncompatibleStore",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "NStep",
    "NextFromFollowing",
    "NoSampleable",
    "ObservationNorm",
    "Plan",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PriorityError",
    "RandomSampler",
    "RankFailed",
    "Ranks",
    "RenameTransform",
    "ReplayBuffer",
    "RestoreReport",
    "RewardScaling",
    "RewardToGo",
    "RoundRobinWriter",
    "RowError",
    "Sampler",
    "SamplerWithoutReplacement",
    "SaveHandle",
    "SaveReport",
    "SelectTransform",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "StoragePlan",
    "StoreInUse",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Traits",
    "UncleanStore",
    "VecNorm",
    "Write",
    "WritePlan",
    "Writer",
    "WriterStalled",
    "__version__",
    "find_start_stop_traj",
    "num_threads",
    "plan",
    "set_num_threads",
]

_HOME = {
    "engram._native": ("num_threads", "set_num_threads"),
    "engram.checkpoint.checkpointer": ("Checkpointer", "RestoreReport", "SaveHandle", "SaveReport"),
    "engram.errors": (
        "CorruptCheckpoint",
        "CorruptStore",
        "EngramError",
        "ForkedHandle",
        "IncompatibleCheckpoint",
        "IncompatibleStore",
        "NoSampleable",
        "PriorityError",
        "RankFailed",
        "RowError",
        "StoreInUse",
        "UncleanStore",
        "WriterStalled",
    ),
    "engram.expanders": ("FinalObservations", "FrameStack", "NStep", "NextFromFollowing", "RewardToGo"),
    "engram.loader": ("DeviceLoader",),
    "engram.ranks": ("Ranks",),
    "engram.samplers": (
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "RandomSampler",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
    ),
    "engram.sizing": ("StoragePlan", "plan"),
    "engram.storages": ("LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage", "TensorStorage"),
    # All from here: ReplayBuffer.open must know every buffer class that a store may have been used with.
    "engram.buffer.prioritized": (
        "PrioritizedReplayBuffer",
        "ReplayBuffer",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
    ),
    "engram.trajectories": ("DEFAULT_DONE_KEYS", "find_start_stop_traj"),
    "engram.transforms": (
        "Compose",
        "DTypeCastTransform",
        "DeviceCastTransform",
        "DoubleToFloat",
        "ExcludeTransform",
        "ObservationNorm",
        "RenameTransform",
        "RewardScaling",
        "SelectTransform",
        "VecNorm",
    ),
    "engram.types": ("Changes", "Draw", "Extent", "Plan", "Sampler", "Traits", "Write", "WritePlan", "Writer"),
    "engram.writers": (
        "ImmutableDatasetWriter",
        "RoundRobinWriter",
        "TensorDictMaxValueWriter",
        "TensorDictRoundRobinWriter",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
