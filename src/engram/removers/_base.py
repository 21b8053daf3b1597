"""What a remover is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store import Store
    from engram.types import Extent


class Removable(Protocol):
    """The storage that is full, as a remover sees it."""

    @property
    def memory(self) -> Store | None:
        """The store that holds the rows."""

    def extent(self) -> Extent:
        """What is live now."""

    def tickets_of(self, rows: Tensor) -> Tensor:
        """Ticket numbers of rows, -1 for those that hold nothing: a larger one is a newer write."""

    def field(self, key: tuple[str, ...], rows: Tensor, expected: Tensor) -> tuple[Tensor, list[int]]:
        """A field of rows with these tickets, and the places of rows that have others by now."""

    def settled(self) -> int | None:
        """The next ticket number; None: a write is under way."""


@runtime_checkable
class Remover(Protocol):
    """Chooses the rows that new ones replace. A class with this method is enough.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> class LastPlaces:
    ...     def choose(self, storage, n):
    ...         capacity = storage.extent().capacity
    ...         return torch.arange(capacity - n, capacity)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), remover=LastPlaces())
    >>> _ = rb.extend(torch.arange(4))
    >>> rb.extend(torch.tensor([10, 11])).tolist()
    [2, 3]
    """

    def choose(self, storage: Removable, n: int) -> Tensor:
        """The ``n`` rows that go, int64 ``[n]``, each once and live. Called once no free row is left; no other process chooses meanwhile.

        >>> import torch
        >>> from engram import Lifo, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(4))
        >>> Lifo().choose(rb.storage, 2).tolist()
        [0, 2]
        """
