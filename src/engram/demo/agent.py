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
LEARNING_RATE = 2.5e-4
HIDDEN = 256
SYNC = 200
"""Updates between two copies of the online network to the target network."""
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
            nn.Linear(observations, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, actions)
        )
        self._target = copy.deepcopy(self._online)
        self._optimizer = torch.optim.Adam(self._online.parameters(), lr=LEARNING_RATE, fused=True)
        self._updates = 0

    @torch.no_grad()
    def act(self, observation: Tensor) -> int:
        """The action with the highest value. ``observation``: float32 ``[observations]``."""
        return int(self._online(observation * self._scale).argmax())

    def learn(self, batch: TensorDictBase) -> float:
        """One update from a batch ``[B]``; the loss. Bootstraps on what did not terminate; truncated steps do.

        The mean of the steps' losses, each times its ``"priority_weight"`` if the batch has weights. Adds ``"td_error"``,
        float32 ``[B]``, absolute, to the batch.
        """
        value = self._online(batch["observation"] * self._scale).gather(1, batch["action"].unsqueeze(1))
        following = batch["next", "observation"] * self._scale
        with torch.no_grad():
            best = self._online(following).argmax(1, keepdim=True)
            bootstrap = self._target(following).gather(1, best) * ~batch["next", "terminated"]
            target = batch["next", "reward"] + GAMMA * bootstrap
        losses = nn.functional.smooth_l1_loss(value, target, reduction="none").squeeze(1)
        weights = batch.get("priority_weight", None)
        loss: Tensor = (losses if weights is None else weights * losses).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._updates += 1
        if self._updates % SYNC == 0:
            self._target.load_state_dict(self._online.state_dict())
        batch["td_error"] = (target - value.detach()).abs().squeeze(1)
        return float(loss.detach())

    def policy(self) -> Tensor:
        """What :meth:`act` needs, as one float32 tensor. A copy."""
        return nn.utils.parameters_to_vector(self._online.parameters()).detach()

    def take_policy(self, policy: Tensor) -> None:
        """Act from now on as the agent that gave :meth:`policy` did then."""
        nn.utils.vector_to_parameters(policy, self._online.parameters())

    def arrays(self) -> dict[str, Tensor]:
        """Everything that learning changed, as plain tensors by name. Copies."""
        tensors = {f"online.{name}": value for name, value in self._online.state_dict().items()}
        tensors |= {f"target.{name}": value for name, value in self._target.state_dict().items()}
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{number}.{name}": value for name, value in state.items()}
        tensors["updates"] = torch.tensor(self._updates)
        return {name: value.detach().clone() for name, value in tensors.items()}

    def restore(self, arrays: dict[str, Tensor]) -> None:
        """Take over what :meth:`arrays` gave."""
        groups: dict[str, dict[str, Tensor]] = {"online": {}, "target": {}}
        adam: dict[int, dict[str, Tensor]] = {}
        for name, value in arrays.items():
            group, _, rest = name.partition(".")
            if name == "updates":
                self._updates = int(value)
            elif group == "adam":
                number, _, entry = rest.partition(".")
                adam.setdefault(int(number), {})[entry] = value
            else:
                groups[group][rest] = value
        self._online.load_state_dict(groups["online"])
        self._target.load_state_dict(groups["target"])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": adam})
