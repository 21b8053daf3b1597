"""Parallel environments of PettingZoo: each agent is recorded as an environment of its own."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper

from engram.env.gymnasium import spec_of
from engram.env.recording import Target, VectorRecording, flags_of
from engram.env.values import Mask, Nested, Spec, Told, as_number, conformed, copied, stacked


def recorded(env: object, target: Target) -> object:
    """The environment, recorded; None if it is no parallel one of PettingZoo. Raises ``ValueError``: spaces of agents differ."""
    if not isinstance(env, ParallelEnv):
        return None
    first, *others = env.possible_agents
    for space_of in (env.observation_space, env.action_space):
        for agent in others:
            if _form_of(space_of(first)) != _form_of(space_of(agent)):
                raise ValueError(
                    f"record: expected agents with spaces of one shape and dtype, got {space_of(first)} of {first!r} and "
                    f"{space_of(agent)} of {agent!r}. Record each kind of agents into a buffer of its own."
                )
    specs = spec_of(env.observation_space(first), "observation"), spec_of(env.action_space(first), "action")
    return RecordedParallel(env, specs, VectorRecording(target, *specs, (1 + len(others),)))


def _form_of(space: spaces.Space[object]) -> object:
    """Shapes and dtypes of a space."""
    if isinstance(space, spaces.Dict):
        return {key: _form_of(entry) for key, entry in space.spaces.items()}
    return tuple(map(_form_of, space.spaces)) if isinstance(space, spaces.Tuple) else (space.shape, space.dtype)


class RecordedParallel(BaseParallelWrapper):  # type: ignore[misc] # it ships no types
    """Agents that act at the same time. Those that have left write nothing."""

    def __init__(self, env: ParallelEnv, specs: tuple[Spec, Spec], recording: VectorRecording) -> None:
        super().__init__(env)
        self._agents = list(env.possible_agents)
        self._specs = specs
        self._recording = recording

    def reset(self, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        """As the environment's."""
        result = self.env.reset(seed=seed, options=options)
        there = self._in(result[0])
        observed, told = self._stacked(result[0], there, 0, "observation"), self._told(result[1], there)
        self._recording.go_on(observed, told, there, np.zeros_like(there))
        return result

    def step(self, actions: dict[str, object]) -> object:
        """As the environment's."""
        recording = self._recording
        acting = recording.answer()
        kept: dict[str, object] = {  # the step may change them in place
            agent: copied(conformed(self._specs[1], actions[agent], f"action of {agent!r}"))
            for agent, acts in zip(self._agents, acting, strict=True)
            if acts and agent in actions
        }
        result = self.env.step(actions)
        observations, rewards, terminations, truncations, infos = result
        there = self._in(observations)
        acting = acting & there
        if there.any():
            observed = self._stacked(observations, there, 0, "observation")
            recording.acted = self._stacked(kept, acting, 1, "action") if acting.any() else ()
            outcome = (rewards, terminations, truncations)
            reward, terminated, truncated = ([as_number(of.get(agent, 0)) for agent in self._agents] for of in outcome)
            flags = flags_of(terminated, truncated, len(self._agents))
            running = there & ~flags[-1]
            recording.write(acting, observed, reward, flags, self._told(infos, acting))
            recording.go_on(observed, self._told(infos, running), running, acting)
        return result

    def _told(self, infos: dict[str, object], which: Mask) -> list[Told]:
        """The infos of ``which`` agents."""
        return [(infos.get(self._agents[i], {}), i) for i in which.nonzero()[0].tolist()]

    def _in(self, each: dict[str, object]) -> Mask:
        """Which agents are among these: bool ``[n]``."""
        return np.array([agent in each for agent in self._agents])

    def _stacked(self, each: dict[str, object], which: Mask, spec: int, field: str) -> Nested:
        """What ``which`` agents see or do, ``[n, ...]``. In the place of others stands what another one does."""
        known = [
            conformed(self._specs[spec], each[agent], f"{field} of {agent!r}") if there else None
            for agent, there in zip(self._agents, which, strict=True)
        ]
        filling = next(one for one in known if one is not None)
        return stacked([filling if one is None else one for one in known])
