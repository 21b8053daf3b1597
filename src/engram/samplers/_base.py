"""What engram's own samplers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram._words import warn
from engram.errors import NoSampleable
from engram.persist.components import Dumpable
from engram.state import check_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engram.types import Draw, Extent, Write

__all__ = ["NativeSampler", "check_drawable"]


def check_drawable(size: int) -> None:
    """Raise ``NoSampleable`` if no row is live."""
    if size < 1:
        raise NoSampleable("sample: the buffer is empty. Add data before sampling.")


class NativeSampler(Dumpable):
    """Base of the samplers that draw in the native core."""

    part = "sampler"

    #: Whether :meth:`observe` does anything: the buffer calls it only then.
    listens = False
    #: Set by the last batch of a pass, for samplers that have passes.
    ran_out = False
    #: Whether draws are by priority.
    prioritized = False
    #: Priority of rows without one.
    default_priority = 1.0

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes; or a buffer that draws from it is closed."""

    def observe(self, write: Write | None, data: Any) -> None:
        """Nothing to note."""

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        """No effect, with a warning: this sampler has no priorities."""
        warn(f"{type(self).__name__} has no priorities: update_priority has no effect.")

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """No effect: this sampler has no priorities."""

    def add(self, index: Any) -> None:
        """No effect: rows are known from the store."""

    def extend(self, index: Any) -> None:
        """No effect: rows are known from the store."""

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether a draw of that size would succeed now."""
        return len(storage) > 0 and batch_size > 0

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw from a storage with a key of torch's default generator: ``(int64 [B], info)``."""
        key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        draw = self.draw(storage.extent(), batch_size, key)
        return draw.rows, dict(draw.info)

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Names and kinds of the store's indexes whose content the state has: a buffer's state has it there only."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors and plain values: copies."""
        return {}

    def checked_state(self, state_dict: dict[str, Any], capacity: int | None = None) -> Callable[[], None]:
        """Check a state; what takes it over. ``capacity``: rows that the storage will have then; None: as now."""
        check_keys(state_dict, (), type(self).__name__)
        return lambda: None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range. Nothing is
                changed.
        """
        self.checked_state(state_dict)()

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values: what a store notes to make the sampler again."""
        return {}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({arguments})"
