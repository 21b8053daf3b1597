"""Names that are not where a program looks for them: those of TorchRL's that engram does not have, and modules that moved."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Where modules are that had other paths in the package, by which they are imported until 1.0. Those inside of a folder moved with it,
#: unless they are named, too.
_MOVED_MODULES = {
    "around": "expanders trajectories units",
    "around.following": "expanders.next_from_following",
    "around.query": "query query.predicates",
    "around.reductions": "expanders.cat_frames expanders.n_step expanders.reward_to_go",
    "around.settings": "samplers.window_spec",
    "around.slices": "samplers.prioritized_slices samplers.slices samplers.slices_epoch",
    "around.trajectory": "query.trajectory",
    "around.windows": "samplers.windows",
    "buffer.schedulers": "schedulers",
    "checkpoint.ranks": "ranks",
    "device.loader": "loader",
    "inspect.metrics": "metrics",
    "inspect.plots": "plotting",
    "inspect.sizing": "sizing",
    "members": "ensembles",
    "members.offline_to_online": "offline_to_online",
    "remote.fleet": "fleet",
    "saved.description": "format.tables",
    "saved.inspection": "format.verify",
    "serving.on_ray": "cluster",
    "storages.items": "collate",
    "store.limits": "limits",
    "torchrl": "migrate migrate.torchrl",
    "torchrl.checkpointers": "layouts layouts.checkpointers",
    "writers.removers": "removers",
}
#: Names that modules had, which are where they were, and where the names are.
_MOVED_NAMES = {
    "engram.samplers": {
        "engram.around": "KNOWN PrioritizedSliceSampler SliceSampler SliceSamplerWithoutReplacement StreamingSliceSampler WindowSpec"
    },
    "engram.types": {"engram.checkpoint.save": "Checkpointable Savers", "engram.store.sampled": "SampledStorage"},
}

_INSTEAD = {
    "InPlaceSampler": "TorchRL has deprecated it.",
    "stack_tensors": "TorchRL has deprecated it. Batches are stacked without it.",
    "VecNormV2": "It is for environments: TorchRL's buffers do not take it, either. engram.VecNorm normalizes the rows of a buffer.",
}

#: Names that engram had, and what to use.
_REMOVED = {
    "Plan": "engram.WritePlan is its other name.",
    **dict.fromkeys(
        ("DrawReplay", "ReplayedDraw", "SamplingLog", "replay_draws"),
        "sample(return_info=True) says which rows a batch has: examples/sampling_log.py writes them down and reads them again.",
    ),
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


_MOVED = {name: there for there, names in _MOVED_MODULES.items() for name in names.split()}
_MODULES = {name: where for where, names in _ELSEWHERE.items() for name in names.split()}


def moved_to(path: str) -> str | None:
    """Where the module is that had this path; None: none had."""
    package, _, name = path.partition(".")
    if package != "engram" or not name:
        return None
    if name in _MOVED:
        return f"engram.{_MOVED[name]}"
    folder, _, inside = path.rpartition(".")
    there = moved_to(folder)
    return None if there is None else f"{there}.{inside}"


class MovedModules:
    """Imports modules by the paths that they had. Python asks it where nothing else finds one."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """As of ``sys.meta_path``."""
        return None if moved_to(name) is None else ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """As of any module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give a module the names of the one that has its place."""
        there = vars(importlib.import_module(str(moved_to(module.__name__))))
        vars(module).update({name: value for name, value in there.items() if name not in vars(module)})


def moved_names(module: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a module that had other names, too."""
    homes = {name: home for home, names in _MOVED_NAMES[module].items() for name in names.split()}

    def found(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return found


# The module of types stands below this one: it is given what it cannot ask for.
vars(importlib.import_module("engram.types"))["__getattr__"] = moved_names("engram.types")


def hint_on(name: str) -> str:
    """A sentence on a name that engram had, or a name of TorchRL's that is not here; empty for other names."""
    if name in _REMOVED:
        return f". It was removed. {_REMOVED[name]}"
    module, what = _MODULES.get(name, ("", ""))
    instead = f"Import it from {module}.{what}" if module else _INSTEAD.get(name)
    return "" if instead is None else f". It is a name of TorchRL's that engram does not have. {instead}"
