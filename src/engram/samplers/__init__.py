"""Samplers say which rows to read."""

from engram.samplers._base import check_drawable, declared
from engram.samplers.consuming import ConsumingSampler
from engram.samplers.epoch import SamplerWithoutReplacement
from engram.samplers.prioritized import PrioritizedSampler
from engram.samplers.prioritized_slices import PrioritizedSliceSampler
from engram.samplers.prompt_groups import PromptGroupSampler
from engram.samplers.redraw import RandomSampler
from engram.samplers.slices import SliceSampler, StreamingSliceSampler
from engram.samplers.slices_epoch import SliceSamplerWithoutReplacement
from engram.samplers.staleness import StalenessAwareSampler
from engram.samplers.window_spec import WindowSpec

# As in TorchRL it is of both kinds; it shares no code with either.
SliceSampler.register(SliceSamplerWithoutReplacement)
SamplerWithoutReplacement.register(SliceSamplerWithoutReplacement)

__all__ = [
    "KNOWN",
    "ConsumingSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StreamingSliceSampler",
    "WindowSpec",
    "check_drawable",
    "declared",
]

#: engram's own samplers by name, as stores note them.
KNOWN = {
    cls.__name__: cls
    for cls in (
        ConsumingSampler,
        RandomSampler,
        SamplerWithoutReplacement,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        PromptGroupSampler,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StalenessAwareSampler,
        StreamingSliceSampler,
    )
}
