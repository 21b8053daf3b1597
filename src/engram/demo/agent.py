"""Double DQN with a small network.

Source: van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning", AAAI 2016.
"""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

GAMMA = 0.99
LEARNING_RATE = 2.5e-4
HIDDEN = 256
#: Updates between two copies of the online network to the target network.
SYNC = 200
#: Of CartPole's observations: position, velocity, angle, angular velocity.
SCALE = (0.4, 0.5, 5.0, 0.5)


class Agent:
    """Chooses actions and learns from batches of CartPole steps."""

    def __init__(self) -> None:
        self._scale = torch.tensor(SCALE)
        self._online = nn.Sequential(
            nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)
        )
        self._target = copy.deepcopy(self._online)
        self._optimizer = torch.optim.Adam(self._online.parameters(), lr=LEARNING_RATE, fused=True)
        self._updates = 0

    @torch.no_grad()
    def act(self, observation: Tensor) -> int:
        """The action with the highest value. ``observation``: float32 ``[4]``."""
        return int(self._online(observation * self._scale).argmax())

    def learn(self, batch: TensorDictBase) -> float:
        """Update once from a batch ``[B]`` and return the loss.

        Bootstraps from steps that did not terminate; truncated steps bootstrap. The loss is the mean over the batch,
        weighted by ``"priority_weight"`` if the batch has it. Adds ``"td_error"``, float32 ``[B]``, absolute, to the batch.
        """
        value = self._online(batch["observation"] * self._scale).gather(1, batch["action"].unsqueeze(1))
        following = batch["next", "observation"] * self._scale
        with torch.no_grad():
            best = self._online(following).argmax(1, keepdim=True)
            bootstrap = self._target(following).gather(1, best) * ~batch["next", "terminated"]
            target = batch["next", "reward"] + GAMMA * bootstrap
        losses = nn.functional.smooth_l1_loss(value, target, reduction="none").squeeze(1)
        loss: Tensor = (batch.get("priority_weight", torch.ones(1)) * losses).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._updates += 1
        if self._updates % SYNC == 0:
            self._target.load_state_dict(self._online.state_dict())
        batch["td_error"] = (target - value.detach()).abs().squeeze(1)
        return float(loss.detach())

    def policy(self) -> Tensor:
        """The parameters of the network as one float32 tensor. A copy."""
        return nn.utils.parameters_to_vector(self._online.parameters()).detach()

    def load_policy(self, policy: Tensor) -> None:
        """Act, and learn on, with the parameters that :meth:`policy` returned."""
        nn.utils.vector_to_parameters(policy, self._online.parameters())
        self._target.load_state_dict(self._online.state_dict())
