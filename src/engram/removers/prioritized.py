"""The remover that asks the priorities of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram import _native, priorities
from engram.store import check_index_name

if TYPE_CHECKING:
    from torch import Tensor

    from engram.removers._base import Removable


class LowestPriority:
    """The rows of lowest priority go; of equal ones that with the lower number.

    Asks the priorities of the store, as every process has left them. Exact.

    Args:
        index: name of the priorities, as the sampler's ``index=``.

    Raises:
        TypeError, ValueError: ``index`` is no name of an index.
        RuntimeError: when the store is full: it has no such priorities (use a :class:`PrioritizedSampler`), or fewer rows than are to go
            have one above zero (use ``eps`` above 0).

    Cost: O(log rows) per row, natively, with the lock of the priorities held.

    >>> import torch
    >>> from engram import LazyTensorStorage, LowestPriority, PrioritizedSampler, ReplayBuffer
    >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, remover=LowestPriority(), batch_size=2)
    >>> rows = rb.extend(torch.arange(3))
    >>> rb.update_priority(rows, torch.tensor([2.0, 0.5, 1.0]))
    >>> rb.add(torch.tensor(10))
    1
    """

    def __init__(self, index: str = "main") -> None:
        check_index_name(index, "LowestPriority: index")
        self.index = index

    def choose(self, storage: Removable, n: int) -> Tensor:
        """The ``n`` rows of lowest priority, the lowest first.

        >>> import torch
        >>> from engram import LazyTensorStorage, LowestPriority, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(3))
        >>> rb.update_priority(rb.extend(torch.arange(3)), torch.tensor([2.0, 0.5, 1.0]))
        >>> LowestPriority().choose(rb.storage, 2).tolist()
        [1, 2]
        """
        store = storage.memory
        if store is None:
            raise RuntimeError("LowestPriority: expected a tensor storage that was written to.")
        key = (self.index, priorities.KIND)
        index = store.indexes.get(key) or store.indexes.refreshed().get(key)
        if index is None:
            raise RuntimeError(
                f"LowestPriority: expected priorities {self.index!r} in the store, got none. Use a PrioritizedSampler, or name its index."
            )
        rows = _native.empty_rows(n)
        found = index.core.lowest(rows)
        if found < n:
            raise RuntimeError(
                f"LowestPriority: expected {n} rows with a priority above zero, got {found}. Use eps above 0, so that no priority is zero."
            )
        return rows

    def __repr__(self) -> str:
        return "LowestPriority()" if self.index == "main" else f"LowestPriority(index={self.index!r})"
