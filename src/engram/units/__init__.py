"""Sample units: what one draw of a sampler stands for in a batch, a row or a window around it."""

from engram.units._base import SampleUnit, Transition
from engram.units.sequence import AnchorPriorities, Sequence, r2d2_priority

__all__ = ["AnchorPriorities", "SampleUnit", "Sequence", "Transition", "r2d2_priority"]
