"""What a remover is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store import Store
    from engram.types import Extent


class Removable(Protocol):
    """The storage that is full, as a remover sees it.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> class LeastScore:
    ...     def choose(self, storage, n):
    ...         rows = torch.arange(storage.extent().capacity)
    ...         score, _ = storage.field(("score",), rows, storage.tickets_of(rows))
    ...         return score.argsort()[:n]
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), remover=LeastScore())
    >>> _ = rb.extend({"score": torch.tensor([2.0, 1.0, 3.0])})
    >>> rb.add({"score": torch.tensor(5.0)})
    1
    """

    @property
    def memory(self) -> Store | None:
        """The store that holds the rows."""

    def extent(self) -> Extent:
        """What is live now.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend({"a": torch.tensor([7, 8, 9])})
        >>> rb.storage.extent().capacity
        3
        """

    def tickets_of(self, rows: Tensor) -> Tensor:
        """Ticket numbers of rows, -1 for those that hold nothing: a larger one is a newer write.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend({"a": torch.tensor([7, 8, 9])})
        >>> tickets = rb.storage.tickets_of(torch.arange(3))
        >>> bool(tickets[2] > tickets[0])
        True
        """

    def field(self, key: tuple[str, ...], rows: Tensor, expected: Tensor) -> tuple[Tensor, list[int]]:
        """A field of rows with these tickets, and the places of rows that have others by now.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend({"a": torch.tensor([7, 8, 9])})
        >>> rows = torch.tensor([0, 2])
        >>> values, moved = rb.storage.field(("a",), rows, rb.storage.tickets_of(rows))
        >>> values.tolist(), moved
        ([7, 9], [])
        """

    def settled(self) -> int | None:
        """The next ticket number; None: a write is under way.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend({"a": torch.tensor([7, 8, 9])})
        >>> before = rb.storage.settled()
        >>> _ = rb.add({"a": torch.tensor(1)})
        >>> rb.storage.settled() - before
        1
        """


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
