"""Recording of environments: what an agent sees and does becomes rows of a buffer."""

from __future__ import annotations

import importlib
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
    for library in ("gymnasium", "pettingzoo", "dm_env"):
        if library in sys.modules:
            recorded = importlib.import_module(f"engram.env.{library}").recorded(env, target)
            if recorded is not None:
                return cast("E", recorded)
    raise TypeError(
        "record: expected a gymnasium.Env or gymnasium.vector.VectorEnv, a pettingzoo.ParallelEnv or a dm_env.Environment, "
        f"got {type(env).__module__}.{type(env).__qualname__}."
    )
