"""The replay buffer that draws by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias, Unpack, cast

import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engram._support.words import warn
from engram.adapters.sb3.buffers import ReplayBuffer, StoreArguments
from engram.samplers import PrioritizedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import Tensor


#: Batches without priorities in return, after which it is said.
_PATIENCE = 100


Loss: TypeAlias = "Callable[..., Tensor]"


class PrioritizedSamples(NamedTuple):
    """A batch of Stable-Baselines3 with what its loss is weighted by."""

    observations: Tensor | dict[str, Tensor]
    actions: Tensor
    next_observations: Tensor | dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None
    #: float32 ``[B, 1]``.
    weights: Tensor
    #: int64 ``[B]``: the rows, for :meth:`PrioritizedReplayBuffer.update_priorities`.
    rows: Tensor
    #: int64 ``[B]``: which step each row held.
    generation: Tensor


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` that draws steps in proportion to their priorities, which a directory keeps, too.

    :class:`PrioritizedDQN`, :class:`PrioritizedSAC` and :class:`PrioritizedTD3` weigh their losses by the weights of batches, and
    write the errors back. Other algorithms draw by it, but weigh nothing: a buffer whose 100 first batches bring no priorities back
    warns. (Schaul et al. 2016, "Prioritized Experience Replay".)

    Args:
        alpha: exponent of priorities; 0: all steps alike.
        beta: exponent of weights, between 0, no correction, and 1.
        eps: added to each priority.
        normalize: divide weights by the largest one of the ``"batch"``, or of the ``"store"``.
        buffer_size, observation_space, …, store: of :class:`ReplayBuffer`.

    Raises: as :class:`ReplayBuffer` and ``engram.PrioritizedSampler``.

    >>> import gymnasium, numpy
    >>> from engram.adapters.sb3 import PrioritizedReplayBuffer
    >>> buffer = PrioritizedReplayBuffer(100, gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3), alpha=1, eps=0)
    >>> for step in range(2):
    ...     at = numpy.full((1, 2), step)
    ...     buffer.add(at, at + 1, numpy.full(1, step), numpy.ones(1), numpy.zeros(1), [{}])
    >>> batch = buffer.sample(64)
    >>> buffer.update_priorities(batch, (batch.actions == 1).float())  # the second step, and never the first
    >>> buffer.sample(64).actions.unique().tolist()
    [1]
    """

    not_pickled = (*ReplayBuffer.not_pickled, "drawn")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[object],
        action_space: spaces.Space[object],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        normalize: Literal["store", "batch"] = "batch",
        **store: Unpack[StoreArguments],
    ) -> None:
        self._by = alpha, beta, eps, normalize
        #: What :attr:`beta` was at first.
        self.first_beta = beta
        self._waiting = 0
        made_of = buffer_size, observation_space, action_space, device, n_envs
        super().__init__(*made_of, optimize_memory_usage, handle_timeout_termination, **store)

    def _new_source(self) -> PrioritizedSampler:
        alpha, beta, eps, normalize = self._by
        return PrioritizedSampler(self.buffer_size * self.n_envs, alpha, beta, eps, normalize=normalize)

    @property
    def beta(self) -> float:
        """The exponent of weights. It may be set between draws."""
        return cast("PrioritizedSampler", self._source).beta

    @beta.setter
    def beta(self, value: float) -> None:
        cast("PrioritizedSampler", self._source).beta = value

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:  # type: ignore[override]
        """Draw a batch by priority. Raises: as :meth:`ReplayBuffer.sample`."""
        self._waiting += 1
        if self._waiting == _PATIENCE:
            warn(
                f"PrioritizedReplayBuffer: {_PATIENCE} batches were drawn, and no priorities came back: all steps are drawn alike. Use "
                "PrioritizedDQN, PrioritizedSAC or PrioritizedTD3 of engram.adapters.sb3, or call update_priorities(batch, errors)."
            )
        batch, info = self.rb.sample(batch_size, return_info=True)
        weights, rows, generation = (info[key] for key in ("priority_weight", "index", "index_generation"))
        make: Callable[..., PrioritizedSamples] = PrioritizedSamples
        #: The last batch.
        self.drawn = make(*self._parts(batch, env), weights.reshape(-1, 1).to(self.device), rows, generation)
        return self.drawn

    def update_priorities(self, batch: PrioritizedSamples, errors: Tensor) -> None:
        """Give the steps of a batch their priorities: ``abs(errors)``, ``[B]`` or ``[B, 1]``.

        Steps that were overwritten since are left out. Raises ``PriorityError``: errors that are not finite. ``ValueError``: of another
        number.
        """
        self._waiting = 0
        self.rb.update_priority(batch.rows, errors.detach().abs().reshape(-1).cpu(), generation=batch.generation)


class Prioritized(OffPolicyAlgorithm):
    """Makes an off-policy algorithm weigh its loss: ``class PrioritizedDDPG(Prioritized, DDPG): loss = torch.nn.functional.mse_loss``.

    The algorithm trains as it is written. While it does, :attr:`loss`, which it calls with predictions and targets ``[B, 1]``, is the
    mean of the losses of the steps, each times its ``weights``; and the errors, absolute, become priorities. Of several critics the
    largest error counts. Losses of the actor are not weighted.

    Args:
        args, kwargs: of the algorithm. ``replay_buffer_class`` is :class:`PrioritizedReplayBuffer`, or a subclass of it;
            ``replay_buffer_kwargs={"alpha": …, "beta": …}`` are of it. ``n_steps`` and ``gamma`` reach it.
        final_beta: what ``beta`` has become, linearly, when training ends. Default: it stays.

    Raises ``TypeError``: another ``replay_buffer_class``. When it trains, ``RuntimeError``: the algorithm did not call :attr:`loss`.
    """

    #: The function of ``torch.nn.functional`` that the algorithm calls.
    loss: ClassVar[Loss]

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

    def __init__(self, loss: Loss, buffer: PrioritizedReplayBuffer) -> None:
        super().__init__()
        self._loss, self._buffer = loss, buffer
        self._batch: PrioritizedSamples | None = None
        self._errors: Tensor | None = None
        self._batches = 0

    def __torch_function__(
        self, func: Loss, types: object, args: tuple[Tensor, ...] = (), kwargs: Mapping[str, object] | None = None
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
