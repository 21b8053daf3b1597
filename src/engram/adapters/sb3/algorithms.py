"""Stable-Baselines3's algorithms with losses that are weighted by the batch, whose errors become priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engram.adapters.sb3.prioritized import PrioritizedReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from engram.adapters.sb3.prioritized import PrioritizedSamples


class Prioritized(OffPolicyAlgorithm):
    """Makes an off-policy algorithm weigh its loss: ``class PrioritizedDDPG(Prioritized, DDPG): loss = torch.nn.functional.mse_loss``.

    The algorithm trains as it is written. While it does, :attr:`loss`, which it calls with predictions and targets ``[B, 1]``, is the
    mean of the losses of the steps, each times its ``weights``; and the errors, absolute, become priorities. Of several critics the
    largest error counts. Losses of the actor are not weighted.

    Args:
        *args, **kwargs: of the algorithm. ``replay_buffer_class`` is :class:`PrioritizedReplayBuffer`, or a subclass of it;
            ``replay_buffer_kwargs={"alpha": …, "beta": …}`` are of it. ``n_steps`` and ``gamma`` reach it.
        final_beta: what ``beta`` has become, linearly, when training ends. Default: it stays.

    Raises ``TypeError``: another ``replay_buffer_class``. When it trains, ``RuntimeError``: the algorithm did not call :attr:`loss`.
    """

    #: The function of ``torch.nn.functional`` that the algorithm calls.
    loss: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        *args: object,
        replay_buffer_class: type[PrioritizedReplayBuffer] = PrioritizedReplayBuffer,
        final_beta: float | None = None,
        **kwargs: object,
    ) -> None:
        given: object = replay_buffer_class
        if not (isinstance(given, type) and issubclass(given, PrioritizedReplayBuffer)):
            raise TypeError(
                f"{type(self).__name__}: replay_buffer_class: expected PrioritizedReplayBuffer, which draws by priority, got "
                f"{given!r}."
            )
        self.final_beta = final_beta
        construct: Callable[..., None] = super().__init__
        construct(*args, replay_buffer_class=replay_buffer_class, **kwargs)

    def _setup_model(self) -> None:
        steps, self.n_steps = self.n_steps, 1  # of which Stable-Baselines3 says that another class ignores them
        if steps > 1:
            self.replay_buffer_kwargs = {"n_steps": steps, "gamma": self.gamma, **self.replay_buffer_kwargs}
        super()._setup_model()
        self.n_steps = steps

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Take gradient steps, as the algorithm does. Raises: as the class says."""
        buffer = cast("PrioritizedReplayBuffer", self.replay_buffer)
        if self.final_beta is not None:
            left = self._current_progress_remaining
            buffer.beta = self.final_beta + left * (buffer.first_beta - self.final_beta)
        with _Weighted(type(self).loss, buffer) as weighted:
            super().train(gradient_steps, batch_size)
        weighted.check(type(self).__name__, gradient_steps)


class PrioritizedDQN(Prioritized, DQN):
    """``DQN`` with prioritized replay: :class:`Prioritized` says how.

    >>> from engram.adapters.sb3 import PrioritizedDQN
    >>> model = PrioritizedDQN("MlpPolicy", "CartPole-v1", buffer_size=1_000, learning_starts=20, seed=0,
    ...     replay_buffer_kwargs={"alpha": 0.6, "beta": 0.4}, final_beta=1.0)
    >>> _ = model.learn(100)
    >>> round(model.replay_buffer.beta, 2) > 0.9
    True
    """

    loss = functional.smooth_l1_loss


class PrioritizedSAC(Prioritized, SAC):
    """``SAC`` with prioritized replay, of which both critics are weighted: :class:`Prioritized` says how.

    >>> from engram.adapters.sb3 import PrioritizedSAC
    >>> model = PrioritizedSAC("MlpPolicy", "Pendulum-v1", buffer_size=1_000, learning_starts=20, batch_size=16)
    >>> _ = model.learn(30)
    >>> model.replay_buffer.sample(8).weights.shape
    torch.Size([8, 1])
    """

    loss = functional.mse_loss


class PrioritizedTD3(Prioritized, TD3):
    """``TD3`` with prioritized replay, of which both critics are weighted: :class:`Prioritized` says how.

    >>> from engram.adapters.sb3 import PrioritizedTD3
    >>> model = PrioritizedTD3("MlpPolicy", "Pendulum-v1", buffer_size=1_000, learning_starts=20, batch_size=16)
    >>> _ = model.learn(30)
    >>> model.replay_buffer.sample(8).weights.shape
    torch.Size([8, 1])
    """

    loss = functional.mse_loss


class _Weighted(TorchFunctionMode):
    """While it is entered, a loss is weighted by the batch that was drawn last, and its errors become priorities."""

    def __init__(self, loss: Callable[..., Tensor], buffer: PrioritizedReplayBuffer) -> None:
        super().__init__()
        self._loss, self._buffer = loss, buffer
        self._batch: PrioritizedSamples | None = None
        self._errors: Tensor | None = None
        self._batches = 0

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor:
        if func is not self._loss:
            return func(*args, **(kwargs or {}))
        predicted, target = args[:2]
        batch, errors = self._buffer.drawn, (predicted - target).detach().abs()
        if batch is self._batch:  # another critic
            errors = torch.maximum(errors, cast("Tensor", self._errors))
        else:
            self._batches += 1
        self._batch, self._errors = batch, errors
        self._buffer.update_priorities(batch, errors)
        return (batch.weights * func(predicted, target, reduction="none")).mean()

    def check(self, who: str, steps: int) -> None:
        """Raise ``RuntimeError`` if batches were drawn whose loss was another."""
        if self._batches != steps:
            raise RuntimeError(
                f"{who}: train: expected a call of {self._loss.__name__} for each of {steps} batches, got {self._batches}. Name the "
                "loss of the algorithm: loss = torch.nn.functional.…"
            )
