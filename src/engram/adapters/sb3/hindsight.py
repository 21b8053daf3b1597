"""The replay buffer that relabels goals in hindsight."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Unpack, cast

import numpy as np
import stable_baselines3.her.her_replay_buffer as sb3
import torch
from gymnasium import spaces
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy

from engram._support import checks, words
from engram.adapters.sb3.buffers import DONE, Column, Infos, Path, ReplayBuffer, Rows, StoreArguments
from engram.around import FinalObservations, Hindsight

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from engram.types import Sampler

#: With ``copy_info_dict``, the row that a step was written to.
_ROW = ("row",)


class HerReplayBuffer(ReplayBuffer, sb3.HerReplayBuffer):  # type: ignore[misc] # methods of the first have the types of theirs
    """Stable-Baselines3's hindsight replay over a :class:`ReplayBuffer`: goals become goals that their own episode reached.

    Of each batch ``n_sampled_goal`` steps of ``n_sampled_goal + 1`` get another goal, and the reward that ``env.compute_reward`` has
    for it. Steps of an episode that is still open are drawn, too, with goals that it has reached so far, so that a batch can be drawn
    before the first episode ends. Of an old episode that is overwritten, the steps that are left are drawn.

    Args:
        buffer_size, observation_space, action_space, env: as in Stable-Baselines3; observations are a ``Dict`` with ``achieved_goal``
            and ``desired_goal``.
        n_sampled_goal: goals in hindsight for each stored one.
        goal_selection_strategy: ``"future"`` (of this or a later step), ``"final"`` or ``"episode"``.
        copy_info_dict: keep the infos of steps for ``compute_reward``. They are Python objects, which no directory holds.
        device, n_envs, …, store: of :class:`ReplayBuffer`, without ``n_steps`` and ``optimize_memory_usage``.

    Raises: as :class:`ReplayBuffer`, and ValueError: another strategy; ``copy_info_dict`` with ``scratch_dir``; ``n_steps`` or
        ``optimize_memory_usage``. TypeError: observations without goals.

    >>> from engram.adapters.sb3 import HerReplayBuffer
    >>> from stable_baselines3 import DQN
    >>> from stable_baselines3.common.envs import BitFlippingEnv
    >>> model = DQN("MultiInputPolicy", BitFlippingEnv(n_bits=4), buffer_size=1_000, replay_buffer_class=HerReplayBuffer,
    ...     replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"})
    >>> _ = model.learn(50)
    >>> model.replay_buffer.sample(10).observations["desired_goal"].shape
    torch.Size([10, 4])
    """

    not_pickled = (*ReplayBuffer.not_pickled, "env")
    env: VecEnv | None = None

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[object],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **store: Unpack[StoreArguments],
    ) -> None:
        who = type(self).__name__
        goals = {"achieved_goal", "desired_goal"}
        given: object = observation_space
        if not isinstance(given, spaces.Dict) or not goals <= {*observation_space.spaces}:
            raise TypeError(f"{who}: observation_space: expected a Dict with {sorted(goals)}, got {observation_space}.")
        named = KEY_TO_GOAL_STRATEGY.get(str(goal_selection_strategy).lower(), goal_selection_strategy)
        if not isinstance(named, GoalSelectionStrategy):
            raise ValueError(f"{who}: goal_selection_strategy: expected {[*KEY_TO_GOAL_STRATEGY]}, got {named!r}.")
        if copy_info_dict and store.get("scratch_dir") is not None:
            raise ValueError(
                f"{who}: copy_info_dict: expected no scratch_dir beside it, as infos are Python objects, which no directory holds. Let "
                "compute_reward read what it needs from the goals, or leave scratch_dir out."
            )
        self.env = env
        self.n_sampled_goal = checks.check_count(f"{who}: n_sampled_goal", n_sampled_goal, least=0)
        self.her_ratio = 1 - 1 / (self.n_sampled_goal + 1)
        self.goal_selection_strategy, self.copy_info_dict = named, copy_info_dict
        if store.get("n_steps", 1) != 1 or optimize_memory_usage:
            raise ValueError(
                f"{who}: expected n_steps=1 and optimize_memory_usage=False, as goals change rewards and next observations, got "
                f"n_steps={store.get('n_steps', 1)} and optimize_memory_usage={optimize_memory_usage}."
            )
        made_of = buffer_size, observation_space, action_space, device, n_envs
        super().__init__(*made_of, False, handle_timeout_termination, **store)
        #: The infos of each row.
        self.infos: np.typing.NDArray[np.object_] = np.full(self.buffer_size * self.n_envs, None)

    def _around(self, source: Sampler, finals: FinalObservations | None) -> Sampler:
        return Hindsight(
            super()._around(source, finals),
            self._rewards,
            her_ratio=self.her_ratio,
            strategy=self.goal_selection_strategy.name.lower(),
            goal_key=("observation", "desired_goal"),
            achieved_goal_key=("next", "observation", "achieved_goal"),
            end_keys=[DONE],
        )

    def _rewards(self, rows: Rows) -> torch.Tensor:
        """Of steps with their new goals, ``[B, 1]``."""
        if self.env is None:
            raise RuntimeError(f"{type(self).__name__}: expected an environment, for rewards: buffer.set_env(env).")
        following = cast("dict[str, dict[str, torch.Tensor]]", rows["next"])["observation"]
        reached, wanted = (following[key].numpy() for key in ("achieved_goal", "desired_goal"))
        infos: list[object] = [{} for _ in range(len(wanted))]
        if self.copy_info_dict:
            infos = copy.deepcopy(self.infos[cast("torch.Tensor", rows["row"])[:, 0].numpy()]).tolist()
        found = self.env.env_method("compute_reward", reached, wanted, infos, indices=[0])[0]
        return torch.from_numpy(np.asarray(found, np.float32).reshape(-1, 1))

    def _fields(self) -> dict[Path, Column]:
        return {**super()._fields(), **({_ROW: Column(np.dtype(np.int64), (1,))} if self.copy_info_dict else {})}

    def _more(self, infos: Infos) -> dict[str, object]:
        if not self.copy_info_dict:
            return {}
        rows = np.arange(self.n_envs) * self.buffer_size + self.pos
        for row, info in zip(rows, infos, strict=True):
            self.infos[row] = info
        return {"row": rows[:, None]}

    def set_env(self, env: VecEnv) -> None:
        """Name the environment that computes rewards, after a pickle was loaded. Raises ``ValueError``: there is one."""
        if self.env is not None:
            raise ValueError(f"{type(self).__name__}: set_env: expected no environment yet, got a buffer that has its.")
        self.env = env

    def truncate_last_trajectory(self) -> None:
        """Let episodes that are open count as truncated: their environments are reset."""
        if bool((self.rb.end_trajectory("each") >= 0).any()):
            words.warn(
                "The last trajectory in the replay buffer will be truncated.\n"
                "If you are in the same episode as when the replay buffer was saved,\n"
                "you should use `truncate_last_trajectory=False` to avoid that issue."
            )
