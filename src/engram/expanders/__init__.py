"""Expanders wrap a sampler: they add to its batches what the steps around the drawn rows say."""

from engram.expanders._base import Expander
from engram.expanders.cat_frames import CatFrames, FrameStack
from engram.expanders.hindsight import Hindsight, HindsightStrategy
from engram.expanders.n_step import NStep
from engram.expanders.next_from_following import FinalObservations, NextFromFollowing, finals_of
from engram.expanders.reward_to_go import RewardToGo

__all__ = [
    "CatFrames",
    "Expander",
    "FinalObservations",
    "FrameStack",
    "Hindsight",
    "HindsightStrategy",
    "NStep",
    "NextFromFollowing",
    "RewardToGo",
    "finals_of",
]
