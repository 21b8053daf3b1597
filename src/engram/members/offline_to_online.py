"""Batches of two buffers: rows that were recorded before, and rows that training adds. The names are TorchRL's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import torch

from engram._support import checks, tensordicts
from engram.buffer.replay_buffer import ReplayBuffer
from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.members.reading import Member, concatenated
from engram.storages import LazyTensorStorage
from engram.storages.items import join
from engram.storages.own import GivenStorage

__all__ = ["OfflineToOnlineReplayBuffer", "prefill_replay_buffer"]

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)
#: Entries of batches that name rows of one buffer.
_OF_ONE_BUFFER = ("index", "index_generation")


class Dataset(Protocol[Batch_co]):
    """A source of rows: a buffer, or an object of another library with these two methods."""

    def __len__(self) -> int: ...

    def sample(self, batch_size: int, /) -> Batch_co:
        """So many rows."""


class OfflineToOnlineReplayBuffer(Generic[Batch]):
    """Draws a fixed share of each batch from rows that were recorded before, and the rest from rows that are added.

    Every batch has ``round(offline_fraction * batch_size)`` rows of the dataset first, then those of the online buffer. Of an online
    buffer that is empty no rows are drawn: the dataset gives them all. The dataset is only read.

    Args:
        offline_dataset: a buffer, or a dataset with ``sample(n)`` and ``len``.
        online_storage: the storage of the online buffer, or a callable that makes it. Either this or ``online_capacity``.
        online_capacity: rows of a :class:`LazyTensorStorage` that is made for it.
        offline_fraction: the share of the dataset, between 0 and 1.
        batch_size: of :meth:`sample`; default: said in each call.
        transform: called with each batch; what it returns is the batch.

    Raises:
        TypeError: the dataset has no ``sample``, such as the name of one. ValueError: not exactly one of ``online_storage`` and
            ``online_capacity``; a share or size out of range.

    Ragged fields are joined, too, and laid out as by the dataset, a :class:`ReplayBuffer` then: both buffers draw rows that are as they
    were read, without transforms and expanders.

    ``offline_buffer`` and ``online_buffer`` are the two. Priorities are theirs: draw from each by itself to update some, as a batch
    here does not say which rows it holds.

    Cost: that of the two draws, and one copy that joins them.

    >>> import torch
    >>> from engram import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
    >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> index = recorded.extend({"obs": torch.zeros(100, 4)})
    >>> rb = OfflineToOnlineReplayBuffer(recorded, online_capacity=100, offline_fraction=0.25, batch_size=32)
    >>> index = rb.extend({"obs": torch.ones(10, 4)})
    >>> rb.sample()["obs"].mean().item()
    0.75
    >>> rb.anneal(step=1, total_steps=2)
    >>> rb.offline_fraction
    0.125
    """

    def __init__(
        self,
        offline_dataset: Dataset[Batch],
        *,
        online_storage: GivenStorage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        who = type(self).__name__
        _check_dataset(f"{who}: offline_dataset", offline_dataset)
        if (online_storage is None) == (online_capacity is None):
            got = "none" if online_storage is None else "both"
            raise ValueError(f"{who}: expected one of online_storage and online_capacity, got {got}.")
        fraction = checks.check_number(f"{who}: offline_fraction", offline_fraction, least=0, most=1)
        if fraction in (0, 1):
            raise ValueError(f"{who}: offline_fraction: expected a number between 0 and 1, got {offline_fraction}.")
        checks.check_callable(f"{who}: transform", transform, "a function of a batch", optional=True)
        self._batch_size = None if batch_size is None else checks.check_count(f"{who}: batch_size", batch_size)
        if online_capacity is not None:
            online_storage = LazyTensorStorage(checks.check_count(f"{who}: online_capacity", online_capacity))
        kind = TensorDictReplayBuffer if isinstance(offline_dataset, TensorDictReplayBuffer) else ReplayBuffer
        #: The rows that were recorded before.
        self.offline_buffer = offline_dataset
        #: The rows that are added.
        self.online_buffer: ReplayBuffer[Batch] = kind(storage=online_storage)
        self._transform = transform
        # By these names trainers of TorchRL's save and load them.
        self._base_offline_fraction = self._offline_fraction = fraction

    @property
    def offline_fraction(self) -> float:
        """The share of a batch that is of the dataset now."""
        return self._offline_fraction

    def anneal(self, step: int, total_steps: int) -> None:
        """Let the share fall linearly, from what the constructor was given at step 0 to 0 at ``total_steps``, and stay there.

        Raises ``TypeError``: one of them is no number. ``ValueError``: ``step`` below 0, or ``total_steps`` below 1.

        >>> import torch
        >>> from engram import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = recorded.extend({"obs": torch.zeros(100, 4)})
        >>> rb = OfflineToOnlineReplayBuffer(recorded, online_capacity=100, batch_size=8)
        >>> for step in (0, 5, 20):
        ...     rb.anneal(step, total_steps=10)
        ...     print(rb.offline_fraction)
        0.5
        0.25
        0.0
        """
        total = checks.check_count("anneal: total_steps", total_steps)
        taken = checks.check_number("anneal: step", step, least=0)
        self._offline_fraction = self._base_offline_fraction * max(1.0 - taken / total, 0.0)

    def add(self, data: object) -> object:
        """Write a row to the online buffer, as :meth:`ReplayBuffer.add`.

        >>> import torch
        >>> from engram import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = recorded.extend({"obs": torch.zeros(100, 4)})
        >>> rb = OfflineToOnlineReplayBuffer(recorded, online_capacity=100, batch_size=8)
        >>> _ = rb.add({"obs": torch.ones(4)})
        >>> len(rb.online_buffer), len(rb)
        (1, 101)
        """
        return cast("object", self.online_buffer.add(data))

    def extend(self, data: object) -> torch.Tensor:
        """Write rows to the online buffer, as :meth:`ReplayBuffer.extend`.

        >>> import torch
        >>> from engram import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = recorded.extend({"obs": torch.zeros(100, 4)})
        >>> rb = OfflineToOnlineReplayBuffer(recorded, online_capacity=100, batch_size=8)
        >>> rb.extend({"obs": torch.ones(3, 4)}).tolist()
        [0, 1, 2]
        """
        return self.online_buffer.extend(data)

    def sample(self, batch_size: int | None = None) -> Batch:
        """A batch: rows of the dataset, then of the online buffer.

        Args:
            batch_size: rows; default that of the constructor.

        Returns:
            What the two buffers return, joined along the first dimension: new memory. TensorDicts have no ``"index"``, which would name
            rows of both.

        Raises:
            ValueError: there is no batch size, or it is below 1. KeyError: the two have other fields. RuntimeError: fields of another shape
                or dtype. What the two draws raise.

        >>> import torch
        >>> from engram import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = recorded.extend({"obs": torch.zeros(100, 4)})
        >>> rb = OfflineToOnlineReplayBuffer(recorded, online_capacity=100, batch_size=8)
        >>> _ = rb.extend({"obs": torch.ones(3, 4)})
        >>> rb.sample(4)["obs"][:, 0].tolist()
        [0.0, 0.0, 1.0, 1.0]
        """
        size = self._batch_size if batch_size is None else checks.check_count("sample: batch_size", batch_size)
        if size is None:
            raise ValueError("sample: batch_size: expected a number of rows, here or in the constructor, got none.")
        offline = size if not len(self.online_buffer) else round(self._offline_fraction * size)
        if offline in (0, size):
            batch = _anonymous((self.offline_buffer if offline else self.online_buffer).sample(size))
        elif self.online_buffer.storage.is_ragged:
            dataset = self.offline_buffer
            if not isinstance(dataset, ReplayBuffer) or not dataset.storage.is_ragged:
                raise TypeError(
                    f"sample: expected a ReplayBuffer with ragged fields as offline_dataset, as online, got a {type(dataset).__name__}."
                )
            both = (Member(0, dataset), offline), (Member(1, self.online_buffer), size - offline)
            batch = cast("Batch", concatenated(both))
        else:
            of_dataset, of_online = self.offline_buffer.sample(offline), self.online_buffer.sample(size - offline)
            batches = _anonymous(of_dataset), _anonymous(of_online)
            batch = join(batches, ("of the dataset", "of the online buffer"), torch.cat)
        return batch if self._transform is None else self._transform(batch)

    def __len__(self) -> int:
        """Rows of both."""
        return len(self.offline_buffer) + len(self.online_buffer)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(offline={len(self.offline_buffer)}, online={len(self.online_buffer)}, "
            f"offline_fraction={self._offline_fraction:g}, batch_size={self._batch_size})"
        )


def prefill_replay_buffer(
    rb: ReplayBuffer[Batch], dataset: Dataset[Batch], n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer[Batch]:
    """Copy rows of a dataset into a buffer.

    Of a buffer of engram's, each row is copied once, in the order in which ``dataset[:]`` has them. Other datasets are asked for
    ``sample(n)``, which may give a row twice.

    Args:
        rb: the buffer. Its transforms see the rows as those of any write.
        dataset: a buffer, or a dataset with ``sample(n)`` and ``len``.
        n_samples: rows, or slots of a buffer with ``ndim > 1``; at most and by default as many as the dataset has.
        chunk_size: rows that are copied at a time.

    Returns:
        The buffer.

    Raises:
        TypeError: the dataset has no ``sample``. ValueError: a number below 1. What writing raises: rows before it are there.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, prefill_replay_buffer
    >>> recorded = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> index = recorded.extend({"obs": torch.arange(100)})
    >>> rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(1_000)), recorded, n_samples=3)
    >>> rb[:]["obs"].tolist()
    [0, 1, 2]
    """
    who = "prefill_replay_buffer"
    if not {"extend"} <= set(dir(rb)):
        raise TypeError(f"{who}: rb: expected a buffer to write to, got {type(rb).__name__}.")
    _check_dataset(f"{who}: dataset", dataset)
    chunk = checks.check_count(f"{who}: chunk_size", chunk_size)
    # Not those that a queue has left; with ndim > 1 slots, as they are read and written by number.
    storage = dataset.storage if isinstance(dataset, ReplayBuffer) else None
    most = len(dataset) if storage is None else len(storage) // math.prod(storage.columns)
    rows = most if n_samples is None else min(checks.check_count(f"{who}: n_samples", n_samples), most)
    for first in range(0, rows, chunk):
        end = min(first + chunk, rows)
        some = dataset[first:end] if isinstance(dataset, ReplayBuffer) else dataset.sample(end - first)
        rb.extend(_anonymous(some))
    return rb


def _check_dataset(what: str, dataset: object) -> None:
    """Raise ``TypeError`` for what nothing can be drawn from."""
    if not {"sample", "__len__"} <= set(dir(dataset)):
        got = repr(dataset) if isinstance(dataset, str) else type(dataset).__name__
        raise TypeError(f"{what}: expected a buffer, or a dataset with sample(n) and len, got {got}. Load it first.")


def _anonymous(batch: Batch) -> Batch:
    """A batch without the entries that say which rows it holds."""
    if not tensordicts.is_tensor_collection(batch):
        return batch
    return cast("Batch", batch.exclude(*_OF_ONE_BUFFER))
