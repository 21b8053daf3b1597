"""Environments of Gymnasium: one, or a vector of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsFloat, TypeAlias

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from engram.env.recording import SingleRecording, Target, VectorRecording, flags_of
from engram.env.values import BOOL, Mask, Spec, Told, checked_dtype, conformed, copied, of_each, pick, put, some

if TYPE_CHECKING:
    Vector: TypeAlias = VectorEnv[object, object, Mask]
    _VectorWrapper: TypeAlias = VectorWrapper[object, object, object, object, Mask]
else:
    _VectorWrapper = VectorWrapper  # not generic in Gymnasium 1.2


def recorded(env: object, target: Target) -> object:
    """The environment, recorded; None if it is not one of Gymnasium."""
    if isinstance(env, VectorEnv):
        mode = autoreset_mode(env)
        observation = spec_of(env.single_observation_space, "observation")
        action = spec_of(env.single_action_space, "action")
        return RecordedVector(
            env, mode, observation, VectorRecording(target, observation, action, (env.num_envs,), mode.value)
        )
    if isinstance(env, gymnasium.Env):
        observation, action = spec_of(env.observation_space, "observation"), spec_of(env.action_space, "action")
        return RecordedEnv(env, SingleRecording(target, observation, action))
    return None


def spec_of(space: object, field: str) -> Spec:
    """The dtypes of a space. Raises ``TypeError``: one of something else than numbers of a fixed shape."""
    if isinstance(space, spaces.Dict):
        return {key: spec_of(entry, f"{field}[{key!r}]") for key, entry in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(spec_of(entry, f"{field}[{i}]") for i, entry in enumerate(space.spaces))
    dtype = space.dtype if isinstance(space, spaces.Space) and space.shape is not None else None
    return checked_dtype(dtype, field, space)


def autoreset_mode(env: Vector) -> AutoresetMode:
    """When the environments of a vector are reset. Raises ``ValueError``: it does not say."""
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise ValueError(
            f"record: expected env.metadata['autoreset_mode'] to be one of {[str(known) for known in AutoresetMode]}, got {mode!r}. "
            "It says whether the step after an end is one of the next episode. Set it."
        ) from None


class RecordedEnv(gymnasium.Wrapper[object, object, object, object]):
    """One environment, each step of which becomes a row. A step after an end, in place of a reset, is none."""

    def __init__(self, env: gymnasium.Env[object, object], recording: SingleRecording) -> None:
        super().__init__(env)
        self._recording = recording

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        """As the environment's."""
        result = self.env.reset(seed=seed, options=options)
        self._recording.begin(*result)
        return result

    def step(self, action: object) -> tuple[object, SupportsFloat, bool, bool, dict[str, object]]:
        """As the environment's."""
        self._recording.act(action)
        result = self.env.step(action)
        if not self._recording.follow(*result[:4]):
            self._recording.go_on(*result)
        return result


class RecordedVector(_VectorWrapper):
    """A vector of environments, each step of each of which becomes a row in the lane of its own."""

    def __init__(self, env: Vector, mode: AutoresetMode, observation: Spec, recording: VectorRecording) -> None:
        super().__init__(env)
        self._mode = mode
        self._spec_of_observation = observation
        self._recording = recording

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        """As the environment's."""
        mask = None if options is None else options.get("reset_mask")
        which: Mask = of_each(True if mask is None else mask, BOOL, self.num_envs, "reset: reset_mask").copy()
        result = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type] # vectors take a list of seeds, too
        self._recording.begin(result[0], [(result[1], which)], which)
        return result

    def step(self, actions: object) -> tuple[object, Mask, Mask, Mask, dict[str, object]]:
        """As the environment's."""
        self._recording.act(actions)
        result = self.env.step(actions)
        if not self._recording.follow(*result[:4]):
            self._go_on(*result)
        return result

    def _go_on(
        self, observation: object, reward: object, terminated: object, truncated: object, infos: dict[str, object]
    ) -> None:
        """Write a step that Python must look at."""
        recording = self._recording
        acting, flags = recording.acting, flags_of(terminated, truncated, self.num_envs)
        following, over = observation, flags[-1]
        told: list[Told] = [(infos, acting)]
        if self._mode is AutoresetMode.SAME_STEP and some(over):
            following = self._followed(observation, over, infos)
            told = [(infos, acting & ~over), (infos.get("final_info"), acting & over)]
        recording.write(acting, following, reward, flags, told)
        if self._mode is not AutoresetMode.SAME_STEP:
            # In NEXT_STEP the next step resets those that are over, and is none of theirs.
            recording.waiting[:] = over | (recording.waiting & (self._mode is AutoresetMode.DISABLED))
        running = ~recording.waiting
        recording.go_on(observation, [(infos, running)], running, acting)

    def _followed(self, observation: object, over: Mask, infos: dict[str, object]) -> object:
        """What followed the step: the last observation of an episode that is over, and not the first of the next one."""
        final = infos.get("final_obs")
        if final is None:
            raise RuntimeError(f"step: expected infos['final_obs'] of ended episodes, got {list(infos.keys())}.")
        following = copied(conformed(self._spec_of_observation, observation, "observation"))
        for i in over.nonzero()[0].tolist():
            put(following, i, conformed(self._spec_of_observation, pick(final, i), f"infos['final_obs'] of {i}"))
        return following
