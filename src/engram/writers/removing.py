"""Writes where a remover says, as soon as the store is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from engram.errors import IncompatibleCheckpoint
from engram.removers import FifoRemover, Lifo, LowestPriority, MaxTimesSampled, Remover, StalestFirst
from engram.types import Extent, Traits, WritePlan
from engram.writers._base import NativeWriter, free_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from engram.storages import Storage
    from engram.types import Commit

#: Removers that a store notes, and the attributes that are their arguments.
_KNOWN: dict[str, tuple[Callable[..., Remover], tuple[str, ...]]] = {
    "FifoRemover": (FifoRemover, ()),
    "Lifo": (Lifo, ()),
    "LowestPriority": (LowestPriority, ("index",)),
    "MaxTimesSampled": (MaxTimesSampled, ()),
    "StalestFirst": (StalestFirst, ("version_key",)),
}


class RemovingWriter(NativeWriter):
    """Fills the store, void rows first; once it is full, each row replaces one that a remover chooses.

    ``ReplayBuffer(remover=…)`` makes one. Rows of one call do not replace each other: of more rows than the store has, the newest
    stay, and ``extend`` returns -1 for the others. Rows are in no order of time, so the storage has one lane and ``ndim=1``, and samplers
    of windows and expanders are refused.

    Args:
        remover: a :class:`Remover`.
        track_generations: samples have ``"index_generation"``, as of a :class:`RoundRobinWriter`.

    Raises:
        TypeError: it has no method ``choose``.
        ValueError: the buffer's storage has ``ndim > 1`` or several lanes, or is a list. On writing: the remover chooses other rows than
            it was asked for.

    Cost: that of a write by number, and of the remover.

    >>> import torch
    >>> from engram import LazyTensorStorage, Lifo, RemovingWriter, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=RemovingWriter(Lifo()))
    >>> rb.extend(torch.arange(3)).tolist(), rb.add(torch.tensor(9))
    ([0, 1, 2], 2)
    """

    traits = Traits(adds_index=True, rejects=True)
    keeps_order = False

    def __init__(self, remover: Remover, *, track_generations: bool = False) -> None:
        super().__init__()
        if isinstance(remover, type) or not isinstance(remover, Remover):
            raise TypeError(
                f"remover: expected a component with the method choose(storage, n), such as Lifo(), got {remover!r:.80}."
            )
        self.remover = remover
        if track_generations:
            self.traits = self.traits._replace(tracks_tickets=True)

    def register_storage(self, storage: Storage) -> None:
        """As for every writer. Raises ``ValueError`` for a storage without fields, with ``ndim > 1`` or several lanes.

        >>> from engram import LazyTensorStorage, Lifo, RemovingWriter
        >>> RemovingWriter(Lifo()).register_storage(LazyTensorStorage(10, lanes=2))
        Traceback (most recent call last):
        ValueError: remover: expected a tensor storage with ndim=1 and one lane, got ...
        """
        if not storage.traits.has_fields or storage.ndim > 1 or storage.lanes > 1:
            raise ValueError(
                f"remover: expected a tensor storage with ndim=1 and one lane, got {storage!r}: rows that are chosen are in no order."
            )
        super().register_storage(storage)

    @property
    def ranking(self) -> Literal["newest"]:
        """Which rows are kept of saved ones, if there is no room for all."""
        return "newest"

    def state_dict(self) -> dict[str, object]:
        """That rows are in no order: on other ranks each goes by itself, and the newest stay.

        >>> from engram import LazyTensorStorage, Lifo, ReplayBuffer
        >>> ReplayBuffer(storage=LazyTensorStorage(3), remover=Lifo()).writer.state_dict()
        {'ranking': 'newest'}
        """
        return {"ranking": self.ranking}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a :meth:`state_dict`. Raises ``IncompatibleCheckpoint``: it is of another writer.

        >>> from engram import Lifo, RemovingWriter
        >>> writer = RemovingWriter(Lifo())
        >>> change = writer.prepare_load(writer.state_dict())
        """
        if state_dict != self.state_dict():
            raise IncompatibleCheckpoint(
                f"{type(self).__name__}: expected the state {self.state_dict()}, as its rows are in no order, got {state_dict!r:.300}. "
                "Load it into a buffer with a writer of the kind that was saved."
            )
        return super().prepare_load({}, capacity)

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        kept = min(n, extent.capacity)
        free = torch.from_numpy(free_rows(extent, kept))
        rows = free
        if len(free) < kept:
            chosen = self._chosen(extent, kept - len(free), free)
            rows = torch.cat([free, chosen]) if len(free) else chosen
        return WritePlan(rows=rows, kept=None if kept == n else torch.arange(n - kept, n, device="cpu"))

    def _chosen(self, extent: Extent, n: int, free: Tensor) -> Tensor:
        rows: object = self.remover.choose(self._storage, n)
        if not _are_rows(rows, n, extent.capacity) or (len(free) and bool(torch.isin(rows, free).any())):
            raise ValueError(
                f"{type(self.remover).__name__}.choose: expected {n} rows in [0, {extent.capacity}), int64 on the CPU, each once and live, "
                f"got {rows!r:.200}."
            )
        return rows

    @property
    def recordable(self) -> bool:
        """Whether the remover is one of engram's."""
        return type(self.remover).__module__.startswith("engram.")

    def config(self) -> dict[str, object]:
        name = type(self.remover).__name__
        arguments = {key: getattr(self.remover, key) for key in _KNOWN.get(name, (None, ()))[1]}
        tracks = {"track_generations": True} if self.traits.tracks_tickets else {}
        return {"remover": {"type": name, **arguments}, **tracks}

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        """Make the writer that a store noted.

        >>> from engram import RemovingWriter, StalestFirst
        >>> RemovingWriter.from_config(RemovingWriter(StalestFirst("version")).config())
        RemovingWriter(StalestFirst('version'))
        """
        noted = config["remover"]
        if not isinstance(noted, dict):
            raise TypeError(f"remover: expected a table with its type, got {noted!r:.80}.")
        made, names = _KNOWN[noted["type"]]
        arguments = {name: noted[name] for name in names}
        remover = made(**{name: tuple(it) if isinstance(it, list) else it for name, it in arguments.items()})
        return cls(remover, track_generations=bool(config.get("track_generations")))

    def __repr__(self) -> str:
        return f"RemovingWriter({self.remover!r}{', track_generations=True' if self.traits.tracks_tickets else ''})"


def _are_rows(rows: object, n: int, capacity: int) -> TypeGuard[Tensor]:
    """Whether they are ``n`` rows, one at least, each once."""
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or tuple(rows.shape) != (n,) or not rows.is_cpu:
        return False
    ordered = np.sort(rows.numpy())
    return bool(ordered[0] >= 0) and bool(ordered[-1] < capacity) and bool((ordered[1:] > ordered[:-1]).all())
