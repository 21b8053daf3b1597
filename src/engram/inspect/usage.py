"""Counting how often each row is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.usage import UsageIndex

if TYPE_CHECKING:
    from engram.plotting.rows import Watched


def count_usage(self: Watched) -> None:
    """Count from now on how often each row is sampled: an index of 4 bytes a row, which stays with the store.

    Every process that samples from the store counts, from its next sample on. A row that is written again begins at 0; edits keep
    the count, and so does :meth:`open`. Then ``stats()`` has ``never_sampled_frac``, and :meth:`explain`, :meth:`health` and
    ``rb.plot.usage()`` say how often. Repeatable. A row that is written over while it is sampled may begin at 1.

    Raises:
        RuntimeError: nothing was ever written, so that there is no store yet; a connection: call it where the store is.
        TypeError: a ``ListStorage``, which keeps no indexes in a store. ReadOnlyStore: the buffer only reads.
        OSError: no space for the file. StoreInUse: another process is opening or closing the store.

    Cost: 4 bytes a row, and about a nanosecond for each row sampled.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=200)
    >>> _ = rb.extend(torch.arange(100))
    >>> rb.count_usage()
    >>> _ = rb.sample()
    >>> 0 < rb.stats()["never_sampled_frac"] < 0.4
    True
    """
    storage = self.storage
    if storage.traits.is_remote:
        raise RuntimeError(
            "count_usage: expected the rows in this process, the buffer is a connection. Call it where the store is."
        )
    if not storage.traits.has_fields:
        raise TypeError(
            f"count_usage: expected a tensor storage, got a {type(storage).__name__}. Use LazyTensorStorage or LazyMemmapStorage."
        )
    if storage.memory is None:
        raise RuntimeError("count_usage: expected a store, but nothing was ever written. Add data first.")
    storage.memory.check_writable()
    UsageIndex.of_store(storage.memory)
