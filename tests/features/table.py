"""The features of which the contract is asked."""

from importlib.util import find_spec

from tests.features import ahead, folding, reading, remembering, writing

FEATURES = {
    "Transition": reading.OneStep(),
    "Sequence": reading.Windows(),
    "PromptGroupSampler of numbers": reading.Groups("prompt"),
    "PromptGroupSampler of bytes": reading.Groups("name"),
    "query": reading.Queries(),
    "FrameStack": reading.Stacks(),
    "CatFrames": reading.Frames(),
    "NStep": reading.Returns(),
    "RewardToGo": reading.Sums(),
    "HER final": reading.Hindsights(),
    "HER future": reading.LaterGoals(),
    "HERReplayBuffer": reading.HerBuffer(),
    "StalenessAwareSampler": reading.Stale(),
    "ConsumingSampler": remembering.Consumed(),
    "StreamingSliceSampler": remembering.Streams(),
    "fragmented": remembering.Fragments("episode", 2),
    "fragmented by a field that stays": remembering.Fragments("prompt"),
    "remove": remembering.Removed(),
    "add_field": remembering.Added(),
    "remover=FifoRemover": writing.Fifo(),
    "remover=Lifo": writing.Newest(),
    "remover=LowestPriority": writing.Lowest(),
    "remover=MaxTimesSampled": writing.MostSampled(),
    "remover=StalestFirst": writing.Stalest(),
    "prefetch": ahead.Prefetched(),
    "prefetch of epochs": ahead.PrefetchedEpochs(),
    "LinearScheduler": ahead.Scheduled(),
    "integer keys": writing.Numbered(),
}
if find_spec("torchrl") is not None:
    FEATURES["MultiStepTransform"] = folding.Folded()
