"""Environments of dm_env."""

from __future__ import annotations

import dm_env
from dm_env import specs

from engram.env.recording import SingleRecording, Target
from engram.env.values import Spec, as_array, checked_dtype


def recorded(env: object, target: Target) -> object:
    """The environment, recorded; None if it is not one of dm_env."""
    if not isinstance(env, dm_env.Environment):
        return None
    spaces = _spec_of(env.observation_spec(), "observation"), _spec_of(env.action_spec(), "action")
    return RecordedEnvironment(env, SingleRecording(target, *spaces))


def _spec_of(spec: object, field: str) -> Spec:
    """The dtypes of a spec. Raises ``TypeError``: one of something else than numbers."""
    if isinstance(spec, dict):
        return {key: _spec_of(entry, f"{field}[{key!r}]") for key, entry in spec.items()}
    if isinstance(spec, tuple | list):
        return tuple(_spec_of(entry, f"{field}[{i}]") for i, entry in enumerate(spec))
    return checked_dtype(spec.dtype if isinstance(spec, specs.Array) else None, field, spec)


class RecordedEnvironment(dm_env.Environment):  # type: ignore[misc] # it ships no types
    """One environment. An end with a discount of 0 is terminal, every other one a truncation. First steps are no rows."""

    def __init__(self, env: dm_env.Environment, recording: SingleRecording) -> None:
        self._env = env
        self._recording = recording

    def __getattr__(self, name: str) -> object:
        if name == "_env":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self) -> dm_env.TimeStep:
        """As the environment's."""
        timestep = self._env.reset()
        self._recording.begin(timestep.observation, {})
        return timestep

    def step(self, action: object) -> dm_env.TimeStep:
        """As the environment's."""
        self._recording.act(action)
        timestep = self._env.step(action)
        if timestep.first():  # it was reset, and passed over the action
            self._recording.begin(timestep.observation, {})
            return timestep
        terminated = timestep.last() and not as_array(timestep.discount).any()
        truncated = timestep.last() and not terminated
        outcome = (timestep.observation, timestep.reward, terminated, truncated)
        if not self._recording.follow(*outcome):
            self._recording.go_on(*outcome, {"discount": timestep.discount})
        return timestep

    def observation_spec(self) -> object:
        """As the environment's."""
        return self._env.observation_spec()

    def action_spec(self) -> object:
        """As the environment's."""
        return self._env.action_spec()

    def reward_spec(self) -> object:
        """As the environment's."""
        return self._env.reward_spec()

    def discount_spec(self) -> object:
        """As the environment's."""
        return self._env.discount_spec()

    def close(self) -> None:
        """As the environment's."""
        self._env.close()
