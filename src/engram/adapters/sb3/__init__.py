"""Stable-Baselines3's replay buffers over engram's stores: on disk if asked, by priority, in hindsight.

One argument of an algorithm chooses one: ``replay_buffer_class=ReplayBuffer``. :mod:`engram.adapters.sb3` is imported by programs
that use Stable-Baselines3, and by nothing of engram.
"""

try:
    import stable_baselines3 as _installed  # noqa: F401 - looked for once, for the sentence below
except ModuleNotFoundError as error:
    if error.name != "stable_baselines3":
        raise
    raise ModuleNotFoundError(
        "engram.adapters.sb3: Stable-Baselines3 is not installed: pip install 'engram-replay[sb3]'."
    ) from None

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
