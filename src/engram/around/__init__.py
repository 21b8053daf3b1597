"""The steps around a row: what ends a trajectory, windows, returns, stacks, goals in hindsight, sequences."""

from engram import samplers
from engram._support.field_paths import DEFAULT_DONE_KEYS
from engram.around.episodes import find_start_stop_traj
from engram.around.expander import Expander
from engram.around.following import FinalObservations, NextFromFollowing, finals_of
from engram.around.hindsight import Hindsight, HindsightStrategy
from engram.around.reductions import CatFrames, FrameStack, NStep, RewardToGo
from engram.around.sequence import AnchorPriorities, SampleUnit, Sequence, Transition, r2d2_priority
from engram.around.settings import WindowSpec
from engram.around.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
)
from engram.around.times import Window

# As in TorchRL it is of both kinds; it shares no code with either.
SliceSampler.register(SliceSamplerWithoutReplacement)
samplers.SamplerWithoutReplacement.register(SliceSamplerWithoutReplacement)

#: engram's own samplers by name, as stores note them.
_OF_WINDOWS = (PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement, StreamingSliceSampler)
KNOWN = {cls.__name__: cls for cls in (*samplers.OF_ROWS, *_OF_WINDOWS)}
Expander.known.update(KNOWN)

__all__ = [
    "DEFAULT_DONE_KEYS",
    "KNOWN",
    "AnchorPriorities",
    "CatFrames",
    "Expander",
    "FinalObservations",
    "FrameStack",
    "Hindsight",
    "HindsightStrategy",
    "NStep",
    "NextFromFollowing",
    "PrioritizedSliceSampler",
    "RewardToGo",
    "SampleUnit",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StreamingSliceSampler",
    "Transition",
    "Window",
    "WindowSpec",
    "finals_of",
    "find_start_stop_traj",
    "r2d2_priority",
]
