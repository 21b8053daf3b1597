"""What engram's own samplers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from engram._words import warn
from engram.errors import NoSampleable
from engram.persist.components import Dumpable
from engram.state import check_keys, checked, saved
from engram.types import Declared, Traits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engram.store import Key
    from engram.types import DeclaredSampler, Draw, Extent, Sampler, Write

__all__ = ["NativeSampler", "check_drawable", "declared"]


def check_drawable(size: int) -> None:
    """Raise ``NoSampleable`` if no row is live."""
    if size < 1:
        raise NoSampleable("sample: the buffer is empty. Add data before sampling.")


class NativeSampler(Declared, Dumpable):
    """Base of the samplers that draw in the native core."""

    part = "sampler"
    traits = Traits(has_epochs=False, listens=False, takes_priorities=False)

    #: Set by the last batch of an epoch, for samplers that have epochs.
    ran_out = False
    #: Whether rows that do not fill a batch are skipped at the end of an epoch.
    drop_last = False
    #: Priority of rows without one.
    default_priority = 1.0

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        raise NotImplementedError

    @property
    def prioritized(self) -> bool:
        """Whether draws are by priority."""
        return self.traits.prioritized

    def bind(self, storage: Any) -> None:
        """Meet the storage whose rows are drawn."""

    def sample_natively(
        self, storage: Any, key: Key, n: int, *, numbered: bool = False
    ) -> tuple[list[Tensor], Tensor, dict[Any, Any]]:
        """:meth:`draw` and the rows' data in one native call: ``(columns, rows, info)``."""
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes; or a buffer that draws from it is closed."""

    def observe(self, write: Write | None, data: Any) -> None:
        """Nothing to note."""

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        """No effect, with a warning: this sampler has no priorities."""
        warn(f"{type(self).__name__} has no priorities: update_priority has no effect.")

    def check_priority(self, priority: Any, n: int) -> None:
        """Raise as :meth:`update_priority` would for priorities of ``n`` rows."""

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """No effect: this sampler has no priorities."""

    def add(self, index: Any) -> None:
        """No effect, because rows are known from the store."""

    def extend(self, index: Any) -> None:
        """No effect, because rows are known from the store."""

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether a draw of this size would succeed now."""
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
        """Load a saved state.

        Raises:
            KeyError: an entry is missing or unknown.
            TypeError: an entry has the wrong type.
            ValueError: an entry is out of range. Nothing is changed.
        """
        self.checked_state(state_dict)()

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` describes the sampler completely."""
        return True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create the sampler again from what a store recorded."""
        return cls(**config)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, which a store records to create the sampler again."""
        return {}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({arguments})"


class _Adapted(NativeSampler):
    """A sampler that follows the protocol only, with the rest of what a buffer asks of one.

    The optional attributes of such a sampler are looked up here and nowhere else.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner: Any = inner
        own = getattr(inner, "traits", None)
        if not isinstance(own, Traits):
            prioritized = getattr(inner, "prioritized", None)
            own = Traits(
                listens=bool(getattr(inner, "listens", True)),
                prioritized=bool(prioritized),
                takes_priorities=prioritized is None or bool(prioritized),
            )
        #: What counts is its ``draw``.
        self.traits = own._replace(draws_uniformly=False, reads_natively=False)

    @property
    def ran_out(self) -> bool:
        return bool(getattr(self._inner, "ran_out", False))

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if hasattr(self._inner, "ran_out"):
            self._inner.ran_out = value

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        return bool(getattr(self._inner, "drop_last", False))

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        draw: Draw = self._inner.draw(extent, batch_size, key)
        return draw

    def observe(self, write: Write | None, data: Any) -> None:
        self._inner.observe(write, data)

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        self._inner.update_priority(index, priority, generation=generation)

    def bind(self, storage: Any) -> None:
        if hasattr(self._inner, "bind"):
            self._inner.bind(storage)

    def moved(self) -> None:
        if hasattr(self._inner, "moved"):
            self._inner.moved()

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        if hasattr(self._inner, "can_sample"):
            return bool(self._inner.can_sample(storage, batch_size))
        return len(storage) > 0

    def check_priority(self, priority: Any, n: int) -> None:
        if hasattr(self._inner, "check_priority"):
            self._inner.check_priority(priority, n)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        if hasattr(self._inner, "mark_update"):
            self._inner.mark_update(index)

    def state_dict(self) -> dict[str, Any]:
        return saved(self._inner, "_sampler")

    def checked_state(self, state_dict: dict[str, Any], capacity: int | None = None) -> Callable[[], None]:
        return checked(self._inner, state_dict, "_sampler").commit

    def __repr__(self) -> str:
        return repr(self._inner)


def declared(sampler: Sampler) -> DeclaredSampler:
    """The sampler, or of one that follows the protocol only, one around it that answers all that buffers ask."""
    made: Any = sampler if isinstance(sampler, Declared) else _Adapted(sampler)
    return made  # type: ignore[no-any-return]
