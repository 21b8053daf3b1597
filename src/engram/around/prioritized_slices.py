"""Windows whose first step is drawn by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from engram.around.slices import SliceSampler
from engram.around.windows import WindowSampler
from engram.samplers.prioritized import PrioritizedSampler

if TYPE_CHECKING:
    from typing import Self, Unpack

    from engram.around.slices import SliceArguments


class PrioritizedSliceSampler(SliceSampler):
    """A :class:`SliceSampler` whose windows start at rows drawn as by a :class:`PrioritizedSampler`.

    The first step is drawn in proportion to its priority among the rows where a window may start, so long trajectories
    weigh more. With the burn-in of a ``window`` it is the first step to learn from. Samples have ``"priority_weight"``, the
    weight of the step that was drawn at every step of its window, and ``"index_generation"``. Priorities belong to single
    steps: ``update_priority`` sets those of every row of a batch, or with one for each window those of the steps that were drawn.
    New rows, ``alpha`` and ``beta`` are as for ``PrioritizedSampler``. Tree and trajectory table belong to the store under the name
    ``index``.

    This class has TorchRL's signature. ``SliceSampler(anchors=PrioritizedSampler(…))`` draws the same windows.

    Args:
        max_capacity, alpha, beta, eps, dtype: as for :class:`PrioritizedSampler`.
        reduction, max_priority_within_buffer, normalize: as for :class:`PrioritizedSampler`.
        num_slices, slice_len, window, flat, online, end_key, end_keys, end_when: as for :class:`SliceSampler`.
        traj_key, ends, trajectories, cache_values, truncated_key, init_key: as for :class:`SliceSampler`.
        strict_length: skip shorter trajectories; False: draw such a trajectory from its first step.
        span: only at the right end; at the left it is ignored, with a warning.
        compile: has no effect.

    Raises: as :class:`SliceSampler` and :class:`PrioritizedSampler`.

    Cost: that of both. O(rows) if hardly any row of high priority may start a window.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
    >>> sampler = PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=3)
    >>> index = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> rb.update_priority(index, (index == 7).float())
    >>> rb.sample()["step"].tolist()
    [2, 3, 4]
    """

    traits = SliceSampler.traits._replace(prioritized=True, takes_priorities=True)
    noted = (*WindowSampler.noted, "span")
    anchors: PrioritizedSampler

    def __new__(cls, *args: object, replacement: bool = True, **kwargs: object) -> Self:  # noqa: ARG004 - for __init__
        if not replacement:
            raise TypeError(f"{cls.__name__}: expected replacement=True: draws by priority are independent.")
        return object.__new__(cls)

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        replacement: bool = True,
        normalize: Literal["store", "batch"] = "store",
        **slices: Unpack[SliceArguments],
    ) -> None:
        given = (max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)
        anchors = PrioritizedSampler(*given, index=slices.get("index", "main"), normalize=normalize)
        super().__init__(anchors=anchors, **slices)

    @property
    def max_size(self) -> int:
        """Rows at most, as :attr:`PrioritizedSampler.max_size`."""
        return self.anchors.max_size

    @property
    def alpha(self) -> float:
        """Exponent of priorities, as :attr:`PrioritizedSampler.alpha`."""
        return self.anchors.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.anchors.alpha = value

    @property
    def beta(self) -> float:
        """Exponent of the weights, as :attr:`PrioritizedSampler.beta`."""
        return self.anchors.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self.anchors.beta = value

    def config(self) -> dict[str, object]:
        slices = {name: value for name, value in super().config().items() if name != "anchors"}
        return {**slices, **self.anchors.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The sampler that a store noted: ``alpha`` and ``beta`` are those of its index.

        >>> from engram import PrioritizedSliceSampler
        >>> config = PrioritizedSliceSampler(100, alpha=0.6, beta=0.4, slice_len=4).config()
        >>> PrioritizedSliceSampler.from_config(config).slice_len
        4
        """
        made = cls(**{**config, "dtype": getattr(torch, config["dtype"])})
        made.anchors.adopts_index = True
        return made
