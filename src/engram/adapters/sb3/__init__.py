"""Stable-Baselines3's replay buffers over engram's stores: on disk if asked, by priority, in hindsight.

One argument of an algorithm chooses one: ``replay_buffer_class=ReplayBuffer``. :mod:`engram.adapters.sb3` is imported by programs
that use Stable-Baselines3, and by nothing of engram.
"""

from engram._support.unsupported import needs

with needs("engram.adapters.sb3", "sb3"):
    import stable_baselines3 as _installed  # noqa: F401 - says how to install it

from engram.adapters.sb3.buffers import ReplayBuffer
from engram.adapters.sb3.hindsight import HerReplayBuffer
from engram.adapters.sb3.prioritized import (
    Prioritized,
    PrioritizedDQN,
    PrioritizedReplayBuffer,
    PrioritizedSAC,
    PrioritizedSamples,
    PrioritizedTD3,
)

__all__ = [
    "HerReplayBuffer",
    "Prioritized",
    "PrioritizedDQN",
    "PrioritizedReplayBuffer",
    "PrioritizedSAC",
    "PrioritizedSamples",
    "PrioritizedTD3",
    "ReplayBuffer",
]
