"""The replay buffer that draws by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack, cast

from engram._support.words import warn
from engram.adapters.sb3.buffers import ReplayBuffer
from engram.samplers import PrioritizedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import Tensor

    from engram.adapters.sb3.buffers import StoreArguments

#: Batches without priorities in return, after which it is said.
_PATIENCE = 100


class PrioritizedSamples(NamedTuple):
    """A batch of Stable-Baselines3 with what its loss is weighted by."""

    observations: Tensor | dict[str, Tensor]
    actions: Tensor
    next_observations: Tensor | dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None
    weights: Tensor
    """float32 ``[B, 1]``."""
    rows: Tensor
    """int64 ``[B]``: the rows, for :meth:`PrioritizedReplayBuffer.update_priorities`."""
    generation: Tensor
    """int64 ``[B]``: which step each row held."""


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
        buffer_size, observation_space, …, **store: of :class:`ReplayBuffer`.

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
