"""CartPole, played with some exploration: what comes out are rows of the replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from tensordict import TensorDict

from engram.demo.task import EPSILON

if TYPE_CHECKING:
    import numpy as np

    from engram.demo.agent import Agent

__all__ = ["Player", "truncate"]


class Player:
    """An environment, and an agent that acts in it.

    Args:
        agent: chooses the actions that are not explored.
        generator: of exploration.
    """

    def __init__(self, agent: Agent, generator: torch.Generator) -> None:
        self.environment = gymnasium.make("CartPole-v1")
        self._agent = agent
        self._generator = generator
        self._observation: np.ndarray[Any, Any] | None = None
        self._return = 0.0

    @property
    def inside(self) -> bool:
        """Whether an episode is under way."""
        return self._observation is not None

    def step(self, steps: int, seed: int) -> tuple[TensorDict, float | None]:
        """One step: the row, and the return of the episode if it ends here.

        Args:
            steps: those made so far; exploration ends with them.
            seed: of the episode, if one begins here.
        """
        if self._observation is None:
            self._observation, _ = self.environment.reset(seed=seed)
            self._return = 0.0
        observation = torch.from_numpy(self._observation)
        action = self._choose(observation, steps)
        following, reward, terminated, truncated, _ = self.environment.step(action)
        row = TensorDict(
            {
                "observation": observation,
                "action": torch.tensor(action),
                "next": {
                    "observation": torch.from_numpy(following),
                    "reward": torch.tensor([float(reward)]),
                    "terminated": torch.tensor([terminated]),
                    "truncated": torch.tensor([truncated]),
                    "done": torch.tensor([terminated or truncated]),
                },
            }
        )
        self._return += float(reward)
        ended = terminated or truncated
        self._observation = None if ended else following
        return row, self._return if ended else None

    def _choose(self, observation: torch.Tensor, steps: int) -> int:
        first, last, until = EPSILON
        epsilon = max(last, first + (last - first) * steps / until)
        if float(torch.rand((), generator=self._generator)) < epsilon:
            return int(torch.randint(2, (), generator=self._generator))
        return self._agent.act(observation)


def truncate(replay: Any, row: int) -> None:
    """An episode ends with this row: nobody goes on with it."""
    for key in ("truncated", "done"):
        replay.set_at_(("next", key), torch.tensor([[True]]), [row])
