"""Double DQN with a small network.

Source: van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning", AAAI 2016.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["Agent"]

GAMMA = 0.99
LEARNING_RATE = 1e-3
TARGET_RATE = 0.01
#: Of the observations of CartPole: position, velocity, angle, angular velocity.
SCALE = (0.4, 0.5, 5.0, 0.5)


class Agent:
    """Chooses actions, learns from batches.

    Args:
        observations: numbers in an observation.
        actions: number of actions.
    """

    def __init__(self, observations: int = 4, actions: int = 2) -> None:
        self._scale = torch.tensor(SCALE[:observations])
        self._online = nn.Sequential(
            nn.Linear(observations, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions)
        )
        self._target = copy.deepcopy(self._online)
        self._optimizer = torch.optim.Adam(self._online.parameters(), lr=LEARNING_RATE)

    @torch.no_grad()
    def act(self, observation: Tensor) -> int:
        """The action with the highest value. ``observation``: float32 ``[observations]``."""
        return int(self._online(observation * self._scale).argmax())

    def learn(self, batch: TensorDictBase) -> float:
        """One update from a batch ``[B]``; the loss. Bootstraps on what did not terminate; truncated steps do."""
        value = self._online(batch["observation"] * self._scale).gather(1, batch["action"].unsqueeze(1))
        following = batch["next", "observation"] * self._scale
        with torch.no_grad():
            best = self._online(following).argmax(1, keepdim=True)
            bootstrap = self._target(following).gather(1, best) * ~batch["next", "terminated"]
            target = batch["next", "reward"] + GAMMA * bootstrap
        loss = nn.functional.smooth_l1_loss(value, target)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._online.parameters(), 10.0)
        self._optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self._target.parameters(), self._online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        return float(loss.detach())

    def arrays(self) -> dict[str, Tensor]:
        """Everything that learning changed, as plain tensors by name. Copies."""
        tensors = {f"online.{name}": value for name, value in self._online.state_dict().items()}
        tensors |= {f"target.{name}": value for name, value in self._target.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": value for name, value in state.items()}
        return {name: value.detach().clone() for name, value in tensors.items()}

    def restore(self, arrays: dict[str, Tensor]) -> None:
        """Take over what :meth:`arrays` gave."""
        groups: dict[str, dict[str, Tensor]] = {"online": {}, "target": {}}
        adam: dict[int, dict[str, Tensor]] = {}
        for name, value in arrays.items():
            group, _, rest = name.partition(".")
            if group == "adam":
                number, _, entry = rest.partition(".")
                adam.setdefault(int(number), {})[entry] = value
            else:
                groups[group][rest] = value
        self._online.load_state_dict(groups["online"])
        self._target.load_state_dict(groups["target"])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": adam})
