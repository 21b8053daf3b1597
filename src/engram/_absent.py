"""Names of TorchRL's replay classes that engram does not have, and what to use."""

from __future__ import annotations

_INSTEAD = {
    "RemoteTensorDictReplayBuffer": "RayReplayBuffer and ReplayBuffer.connect reach rows on other machines.",
    "StoreStorage": "engram serve hands a directory store to other machines.",
    "InPlaceSampler": "TorchRL has deprecated it.",
    "stack_tensors": "TorchRL has deprecated it. Batches are stacked without it.",
}

#: What programs go on importing from TorchRL, by where it is: what is not of replay, and transforms, which buffers take as they are.
_ELSEWHERE = {
    "torchrl.data": """
    ActionTokenizerBase AdaptiveKLController Binary BinaryToDecimal Bounded BoundedContinuous Categorical Choice Composite
    ConstantKLController ContentBase DEVICE_TYPING DensifyReward HashToInt History
    MCTSForest MultiCategorical MultiOneHot MultiStep NonTensor OneHot PairwiseDataset PromptData PromptTensorDictTokenizer
    QueryModule RandomProjectionHash RewardData RobotDatasetMetadata RolloutFromModel SipHash Stacked StackedComposite
    TensorDictMap TensorDictTokenizer TensorMap TensorSpec TokenizedDatasetLoader TopKRewardSelector Tree Unbounded
    UnboundedContinuous UnboundedDiscrete UniformActionTokenizer VideoClipRef VocabTailActionTokenizer
    check_no_exclusive_keys clear_video_decoder_cache consolidate_spec contains_lazy_spec create_infinite_iterator
    get_dataloader set_video_decoder_cache_size validate_vla_tensordict
    """,
    "torchrl.envs.transforms": """
    BurnInTransform MultiStepTransform NextObservationDelta NextStateReconstructor PinMemoryTransform PolicyAgeFilter
    RandomCropTensorDict Reward2GoTransform VecNormV2
    """,
    "torchrl.objectives.llm": "MCAdvantage",
}
_MODULES = {name: module for module, names in _ELSEWHERE.items() for name in names.split()}


def said_of(name: str) -> str:
    """A sentence on a name of TorchRL's that is not here; empty for other names."""
    instead = f"Import it from {_MODULES[name]}." if name in _MODULES else _INSTEAD.get(name)
    return "" if instead is None else f". It is a name of TorchRL's that engram does not have. {instead}"
