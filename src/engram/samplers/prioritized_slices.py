"""Windows whose first step is drawn by priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from engram import _native
from engram._words import warn
from engram.errors import NoSampleable
from engram.priorities import NOTHING
from engram.samplers.prioritized import PrioritizedSampler
from engram.samplers.slices import SliceSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.samplers.slices import Marks
    from engram.store import Key, Store
    from engram.types import Draw

__all__ = ["PrioritizedSliceSampler"]


class PrioritizedSliceSampler(SliceSampler):
    """A :class:`SliceSampler` whose windows start at rows drawn as a :class:`PrioritizedSampler` draws them.

    The first step is drawn in proportion to its priority among the rows where a window may start, so long trajectories weigh
    more. Samples carry ``"priority_weight"``, that of the first step at every step of its window, and
    ``"index_generation"``. Priorities are of single steps: ``update_priority`` sets those of every row of a batch. New rows,
    ``alpha`` and ``beta`` are as there; tree and table of trajectories belong to the store under the name ``index``.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as for :class:`PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, cache_values, truncated_key, init_key: as for
            :class:`SliceSampler`.
        strict_length: leave out shorter trajectories; False: such a one is drawn from its first step.
        span: only at the right end; at the left it is ignored, with a warning.
        compile: changes nothing.

    Raises: as both.

    Cost: that of both; where hardly any row of high priority may start a window, O(rows).

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
    >>> sampler = PrioritizedSliceSampler(100, alpha=1.0, beta=1.0, eps=0.0, slice_len=3)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=3)
    >>> index = rb.extend(TensorDict({"episode": torch.arange(20) // 5, "step": torch.arange(20) % 5}, batch_size=[20]))
    >>> rb.update_priority(index, (index == 7).float())
    >>> rb.sample()["step"].tolist()
    [2, 3, 4]
    """

    traits = SliceSampler.traits._replace(prioritized=True, takes_priorities=True)

    def __new__(cls, *args: Any, replacement: bool = True, **kwargs: Any) -> Any:  # noqa: ARG004 - for __init__
        if not replacement:
            raise TypeError("PrioritizedSliceSampler: expected replacement=True: draws by priority are independent.")
        return object.__new__(cls)

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        compile: Any = False,  # noqa: A002 - TorchRL's argument
        span: Any = False,
        max_priority_within_buffer: bool = False,
        index: str = "main",
        replacement: bool = True,
        **later: Any,
    ) -> None:
        if isinstance(span, tuple | list) and len(span) == 2 and span[0]:
            warn("PrioritizedSliceSampler: span: at the left end there is none.")
        if isinstance(span, tuple | list) and len(span) == 2:
            span = (False, span[1])
        elif isinstance(span, bool | int) and span:
            warn("PrioritizedSliceSampler: span: at the left end there is none.")
            span = (False, span)
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            compile=compile,
            span=span,
            index=index,
            **later,
        )
        #: Draws the anchors, and holds their priorities.
        self.anchors = PrioritizedSampler(
            max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, index=index
        )

    def bind(self, storage: Any) -> None:
        """Take a storage to draw from. Raises ``ValueError``: it is larger than ``max_capacity``."""
        if storage is not self._storage:
            super().bind(storage)
        self.anchors.bind(storage)

    def moved(self) -> None:
        super().moved()
        self.anchors.moved()

    # ---- what the anchors' sampler knows -------------------------------------------------------------------------------

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

    @property
    def default_priority(self) -> float:  # type: ignore[override]
        """What new rows get."""
        return self.anchors.default_priority

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        """New priorities of rows, step by step, as :meth:`PrioritizedSampler.update_priority`."""
        self.anchors.update_priority(index, priority, generation=generation)

    def check_priority(self, priority: Any, n: int) -> None:
        """As :meth:`PrioritizedSampler.check_priority`."""
        self.anchors.check_priority(priority, n)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Rows were rewritten: the default priority again."""
        self.anchors.mark_update(index, storage=storage)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def _sample(self, table: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
        index = self.anchors.priorities()
        try:
            drawn: list[Tensor] = table.sample_anchored(*arguments, index.core, self.anchors.dtype is torch.float32)
        except _native.NothingLive as error:
            raise NoSampleable(f"sample: {error}. {NOTHING}") from error
        return drawn

    def _marks_in(self, store: Store, fields: dict[tuple[str, ...], int], *, apart: bool) -> Marks:
        marks = super()._marks_in(store, fields, apart=apart)
        marks.places["priority_weight"] = marks.end
        return marks

    def sample_natively(
        self,
        storage: Any,
        key: Key,
        n: int,
        *,
        numbered: bool = True,
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """As :meth:`SliceSampler.sample_natively`, with weights and generations."""
        return super().sample_natively(storage, key, n, numbered=True)

    def sample_apart(
        self,
        storage: Any,
        key: Key,
        n: int,
        read: Callable[[Draw], tuple[list[Tensor], list[int]]],
        *,
        numbered: bool = True,
    ) -> tuple[list[Tensor], Tensor, dict[Any, Tensor]]:
        """As :meth:`SliceSampler.sample_apart`, with weights and generations."""
        return super().sample_apart(storage, key, n, read, numbered=True)

    def _info(self, marks: Marks, tensors: list[Tensor], *, numbered: bool) -> dict[Any, Tensor]:
        info = super()._info(marks, tensors, numbered=numbered)
        info["priority_weight"] = info["priority_weight"].to(self.anchors.dtype)
        return info

    def _refuse(self, table: Any, length: int) -> NoReturn:
        trajectories, longest = table.census()
        if longest < (length if self.strict_length else 1):
            super()._refuse(table, length)
        raise NoSampleable(
            f"sample: expected a row of positive priority where a window of {length} steps begins, got {trajectories} "
            f"trajectories of at most {longest} steps without one."
        )

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`PrioritizedSampler.state_dict`: the table of trajectories follows from the rows."""
        return self.anchors.state_dict()

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """As :attr:`PrioritizedSampler.own_indexes`."""
        return self.anchors.own_indexes

    def checked_state(self, state_dict: dict[str, Any], capacity: int | None = None) -> Callable[[], None]:
        """As :meth:`PrioritizedSampler.checked_state`."""
        return self.anchors.checked_state(state_dict, capacity)

    def config(self) -> dict[str, Any]:
        slices = super().config()
        left_out = ("pad_output", "uniform_over")
        return {**{k: v for k, v in slices.items() if k not in left_out}, **self.anchors.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrioritizedSliceSampler:
        """The sampler that a store noted: ``alpha`` and ``beta`` are those of its index."""
        made = cls(**{**config, "dtype": getattr(torch, config["dtype"])})
        made.anchors.adopts_index = True
        return made
