"""Recording of environments: what an agent sees and does becomes rows of a buffer."""

from __future__ import annotations

import sys
from typing import TypeVar, cast

from engram.env.recording import Target
from engram.env.values import Examples, Infos, Key, Notes

__all__ = ["Examples", "Infos", "Key", "Notes", "Target", "record"]

E = TypeVar("E")


def record(env: E, target: Target) -> E:
    """What ``ReplayBuffer.record`` does, into these lanes of a buffer.

    A library is imported only where the program has imported it already, as an environment of its own has.
    """
    recorded: object = None
    if "gymnasium" in sys.modules:
        from engram.env import gymnasium

        recorded = gymnasium.recorded(env, target)
    if recorded is None and "pettingzoo" in sys.modules:
        from engram.env import pettingzoo

        recorded = pettingzoo.recorded(env, target)
    if recorded is None and "dm_env" in sys.modules:
        from engram.env import dm_env

        recorded = dm_env.recorded(env, target)
    if recorded is None:
        raise TypeError(
            "record: expected a gymnasium.Env or gymnasium.vector.VectorEnv, a pettingzoo.ParallelEnv or a dm_env.Environment, "
            f"got {type(env).__module__}.{type(env).__qualname__}."
        )
    return cast("E", recorded)
