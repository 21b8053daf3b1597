"""Samplers say which rows to read."""

from engram._support.absent import moved_names
from engram.samplers._base import check_drawable, declared, picked
from engram.samplers.consuming import ConsumingSampler, FilteredSampler
from engram.samplers.epoch import SamplerWithoutReplacement
from engram.samplers.length_bucket import LengthBucketSampler
from engram.samplers.prioritized import PrioritizedSampler
from engram.samplers.prompt_groups import PromptGroupSampler
from engram.samplers.redraw import RandomSampler
from engram.samplers.staleness import StalenessAwareSampler

#: engram's own samplers of rows.
OF_ROWS = (
    ConsumingSampler,
    FilteredSampler,
    LengthBucketSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    PrioritizedSampler,
    PromptGroupSampler,
    StalenessAwareSampler,
)

__getattr__ = moved_names(__name__)

__all__ = [
    "KNOWN",
    "ConsumingSampler",
    "FilteredSampler",
    "LengthBucketSampler",
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
    "picked",
]
