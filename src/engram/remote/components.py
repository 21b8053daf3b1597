"""The sampler and the writer of a buffer whose rows are on a server: the server's do the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram._support.unsupported import refused, refusing
from engram.errors import PriorityError
from engram.remote.served import OfServer, ServedStorage
from engram.samplers._base import DeclaredSampler
from engram.samplers.prioritized import as_priorities, rows_of
from engram.samplers.staleness import check_version
from engram.types import Traits
from engram.writers._base import NativeWriter

if TYPE_CHECKING:
    from engram.remote.commands import Served
    from engram.store import Key
    from engram.store.sampled import SampledStorage
    from engram.types import NativeBatch, Shown


def _traits(names: list[str], **own: bool) -> Traits:
    known = {name: name in names for name in Traits._fields}
    return Traits(**{**known, "untraced": False, **own})  # that is of the process which serves


_REFUSED = refusing("sampler.alpha and sampler.beta", "They are the store's: look at them, and set them, where it is.")


class RemoteSampler(OfServer, DeclaredSampler):
    """Draws by the sampler of a server."""

    traits = Traits()

    def __init__(self, served: Served) -> None:
        self.traits = _traits(
            served.traits_of_sampler,
            draws_uniformly=False,
            reads_natively=True,
            can_rewind=False,
            listens=False,
            consumes=False,  # the server writes over rows that are used up
        )
        self.computed_keys = {key[0] if len(key) == 1 else tuple(key): flat for key, flat in served.computed_keys}
        self.draws_of_a_row = served.draws_of_a_row
        self._text = served.sampler
        self._storage: ServedStorage | None = None

    def bind(self, storage: SampledStorage) -> None:
        if not isinstance(storage, ServedStorage):
            raise refused("set_storage", "Make a buffer of its own for the storage.")
        self._storage = storage

    def _bound(self) -> ServedStorage:
        if self._storage is None:
            raise RuntimeError("sampler: expected a buffer that it draws for, got none. Use ReplayBuffer.connect.")
        return self._storage

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """A batch of the server."""
        del numbered, shown  # all comes along
        assert isinstance(storage, ServedStorage)  # it was bound to one
        batch = storage.draw(key.value, n)
        if batch.last:
            self.ran_out = True
        return batch.columns, batch.rows, batch.info

    draw = refusing("sampler.draw", "Use the buffer's sample.")
    mark_update = refusing("mark_update", "Rows that are written get the default priority.")
    state_dict = refusing("state_dict", "Save with dumps(path).")
    prepare_load = refusing("load_state_dict", "Load where the store is.")
    alpha = property(_REFUSED, _REFUSED, doc="Of the server.")
    beta = property(_REFUSED, _REFUSED, doc="Of the server.")

    @property
    def consumer_version(self) -> int:
        """As of ``StalenessAwareSampler``: of all stores the largest. Raises ``TypeError``: the stores' samplers have none."""
        return self._bound().consumer_version()

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        self._bound().consumer_version(check_version(value))

    def increment_consumer_version(self) -> None:
        """Come to the next version. Of two clients that do so at the same time one may have no effect."""
        self.consumer_version += 1

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:  # noqa: ARG002 - it has one
        return self._bound().can_sample(batch_size)

    def update_priority(self, index: object, priority: object, *, generation: Tensor | None = None) -> None:
        """Send new priorities, and do not wait: what is drawn later is drawn by them.

        Raises as ``PrioritizedSampler.update_priority``. Nothing is sent then.
        """
        if not self.traits.takes_priorities:
            super().update_priority(index, priority, generation=generation)
            return
        storage, rows = self._bound(), rows_of(index, "update_priority")
        storage.check_rows(rows)
        tickets = None if generation is None else rows_of(generation, "update_priority: generation")
        if tickets is not None and len(tickets) != len(rows):
            raise RuntimeError(f"update_priority: generation: expected one per row, {len(rows)}, got {len(tickets)}.")
        storage.prioritize(rows, _priorities(priority, len(rows)), tickets)

    def check_priority(self, priority: object, n: int) -> None:
        _priorities(priority, n)

    def __repr__(self) -> str:
        return self._text


def _priorities(priority: object, n: int) -> Tensor:
    """float64 ``[n]``, as a server takes it. Raises as ``PrioritizedSampler.update_priority``."""
    value = as_priorities(priority, n, lambda many: many.reshape(n, -1).amax(1)).to(torch.float64)
    bad = value[~((value >= 0) & torch.isfinite(value))]
    if len(bad):
        raise PriorityError(f"update_priority: expected finite priorities of at least 0, got {float(bad[0])}.")
    return value


class RemoteWriter(OfServer, NativeWriter):
    """Writes by the writer of a server."""

    traits = Traits()

    def __init__(self, served: Served) -> None:
        super().__init__()
        self.traits = _traits(
            served.traits_of_writer, appends=True, places_natively=False, read_only=False
        )  # the server refuses
        self._text = served.writer

    def register_storage(self, storage: object) -> None:
        if not isinstance(storage, ServedStorage):
            raise refused("set_storage", "Make a buffer of its own for the storage.")
        super().register_storage(storage)

    place = refusing("writer.place", "Use the buffer's add and extend.")

    def __repr__(self) -> str:
        return self._text
