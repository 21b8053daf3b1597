"""Public names of TorchRL's data and transforms that engram does not have, and what to use."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Where modules are that programs and pickles name by the paths that they had before, with all modules that were in them.
MOVED = {
    "engram.expanders": "engram.around",
    "engram.samplers.prioritized_slices": "engram.around",
    "engram.samplers.slices": "engram.around",
    "engram.samplers.slices_epoch": "engram.around",
    "engram.samplers.trajectory_tables": "engram.around",
    "engram.samplers.window_spec": "engram.around",
    "engram.trajectories": "engram.around",
    "engram.units": "engram.around",
}
#: Where the names are that a module had, which has others still.
MOVED_NAMES = {
    "engram.samplers": (
        "engram.around",
        "KNOWN PrioritizedSliceSampler SliceSampler SliceSamplerWithoutReplacement StreamingSliceSampler WindowSpec",
    )
}


class _Finder(MetaPathFinder, Loader):
    """Finds modules by the paths that they had before."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's
        known = name in MOVED or name.rpartition(".")[0] in MOVED
        return spec_from_loader(name, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module)["__getattr__"] = partial(getattr, import_module(MOVED.get(name) or MOVED[name.rpartition(".")[0]]))


sys.meta_path.insert(0, _Finder())  # before others: a folder without modules is a package, too


def moved(module: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a module, for the names that it had before."""
    where, names = MOVED_NAMES[module]

    def found(name: str) -> object:
        if name not in names.split():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(where), name)

    return found


_INSTEAD = {
    "InPlaceSampler": "TorchRL has deprecated it.",
    "stack_tensors": "TorchRL has deprecated it. Batches are stacked without it.",
    "VecNormV2": "It is for environments: TorchRL's buffers do not take it, either. engram.VecNorm normalizes the rows of a buffer.",
}

#: What programs go on importing from TorchRL, by where it is, and what buffers do with it.
_ELSEWHERE = {
    ("torchrl.data", ""): """
    ActionTokenizerBase AdaptiveKLController Binary BinaryToDecimal Bounded BoundedContinuous Categorical Choice Composite
    ConstantKLController ContentBase DEVICE_TYPING DensifyReward HashToInt History
    MCTSForest MultiCategorical MultiOneHot MultiStep NonTensor OneHot PairwiseDataset PromptData PromptTensorDictTokenizer
    QueryModule RandomProjectionHash RewardData RobotDatasetMetadata RolloutFromModel SipHash Stacked StackedComposite
    TensorDictMap TensorDictTokenizer TensorMap TensorSpec TokenizedDatasetLoader TopKRewardSelector Tree Unbounded
    UnboundedContinuous UnboundedDiscrete UniformActionTokenizer VideoClipRef VocabTailActionTokenizer
    check_no_exclusive_keys clear_video_decoder_cache consolidate_spec contains_lazy_spec create_infinite_iterator
    get_dataloader set_video_decoder_cache_size validate_vla_tensordict
    """,
    ("torchrl.data.datasets", " A buffer takes its rows: rb.extend(dataset[:])."): """
    AtariDQNExperienceReplay BaseDatasetExperienceReplay D4RLExperienceReplay GenDGRLExperienceReplay LeRobotExperienceReplay
    MinariExperienceReplay OpenMLExperienceReplay OpenXExperienceReplay RobosetExperienceReplay VD4RLExperienceReplay
    """,
    ("torchrl.data.datasets", ""): "lerobot_columns_to_tensordict load_dataset register_dataset",
    ("torchrl.envs.transforms", " Buffers take it as TorchRL's do: transform=…."): """
    ActionDiscretizer ActionMask ActionScaling ActionTokenizerTransform AutoResetTransform BatchSizeTransform BinarizeReward
    BurnInTransform CatTensors CenterCrop ClipTransform ConditionalPolicySwitch ConditionalSkip Crop DecodeVideoTransform
    DiscreteActionProjection EndOfLifeTransform ExpandAs FiniteTensorDictCheck FlattenAction FlattenObservation FrameSkipTransform
    GrayScale Hash InitTracker LineariseRewards MacroPrimitiveTransform MeanActionSelector ModuleTransform MultiAction
    MultiStepTransform NextObservationDelta NextStateReconstructor NoopResetEnv ObservationTransform PermuteTransform
    PinMemoryTransform PolicyAgeFilter R3MTransform RNDTransform RandomCropTensorDict RandomTruncationTransform RayTransform
    RemoveEmptySpecs Resize Reward2GoTransform RewardClipping RewardSum SatelliteAttitudeTransform SignTransform SqueezeTransform
    Stack StepCounter SuccessReward TargetReturn TensorDictPrimer TerminateTransform TimeMaxPool Timer ToTensorImage Tokenizer
    TrajCounter Transform URScriptPrimitiveTransform UnaryTransform UnsqueezeTransform VC1Transform VIPRewardTransform VIPTransform
    VecGymEnvTransform gSDENoise
    """,
    ("torchrl.envs.transforms", ""): """
    AutoResetEnv CartesianSolver HumanoidMacroAction MacroAction MacroPrimitive RobotMacroAction RobotMacroActionMode RunningMeanStd
    SatelliteMacroAction TargetMacroAction TransformedEnv URScriptPrimitive
    """,
    ("torchrl.objectives.llm", ""): "MCAdvantage",
}


class StoreStorage:
    """The name of TorchRL's storage in a Redis server, for imports and ``isinstance``. engram has none: making one says what to use.

    Raises ``NotImplementedError``: always.

    >>> from engram import StoreStorage
    >>> StoreStorage(1_000, host="localhost")
    Traceback (most recent call last):
    NotImplementedError: StoreStorage: expected a storage of engram's, got TorchRL's in a Redis server. ...
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "StoreStorage: expected a storage of engram's, got TorchRL's in a Redis server. For rows that several machines write and "
            "sample, use LazyMemmapStorage(size, scratch_dir=DIR), engram serve DIR, and ReplayBuffer.connect(ADDRESS) elsewhere."
        )


_MODULES = {name: where for where, names in _ELSEWHERE.items() for name in names.split()}


def said_of(name: str) -> str:
    """A sentence on a name of TorchRL's that is not here; empty for other names."""
    module, what = _MODULES.get(name, ("", ""))
    instead = f"Import it from {module}.{what}" if module else _INSTEAD.get(name)
    return "" if instead is None else f". It is a name of TorchRL's that engram does not have. {instead}"
