"""What samplers, and the steps around them, ask of a storage."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engram._support.field_paths import FieldPath
from engram.store.priorities import Priorities, PriorityConfig
from engram.store.row_indexes import ConsumptionIndex, GroupRules, Groups
from engram.store.store import Store
from engram.types import Extent, Traits


class StoredRows(Protocol):
    """What those who choose among the rows of a storage ask of it."""

    @property
    def memory(self) -> Store | None:
        """The store that holds its fields; None: of a list, or before the first write."""

    def extent(self) -> Extent:
        """What is live now.

        Returns:
            A value that later writes do not change. Before the first write it is empty. Cost: O(lanes), and O(holes).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.extent().size, rb.storage.extent().capacity
        (3, 100)
        """

    def tickets_of(self, rows: torch.Tensor) -> torch.Tensor:
        """int64, the shape of ``rows``: ticket numbers of rows; -1 for those that hold nothing or are just being written.

        A larger number is newer, and none is used twice: a row that has another one than before was overwritten or edited.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
        >>> _ = rb.extend(torch.arange(2))
        >>> before = rb.storage.tickets_of(torch.tensor([0, 1]))
        >>> _ = rb.add(torch.tensor(7))
        >>> (rb.storage.tickets_of(torch.tensor([0, 1])) != before).tolist()
        [True, False]
        """

    def field(self, key: tuple[str, ...], rows: torch.Tensor, expected: torch.Tensor) -> tuple[Any, list[int]]:
        """One field of rows that must have these tickets: a tensor ``[B, ...]`` or a list of ``B``; positions that moved.

        Raises:
            KeyError: no such field.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend({"obs": torch.arange(3), "reward": torch.ones(3)})
        >>> rows = torch.tensor([0, 2])
        >>> values, moved = rb.storage.field(("obs",), rows, rb.storage.tickets_of(rows))
        >>> values.tolist(), moved
        ([0, 2], [])
        """

    def settled(self) -> int | None:
        """Ticket number of the next write: rows are what they were as long as it stays. None while a write is under way.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend(torch.arange(3))
        >>> seen = rb.storage.settled()
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.settled() - seen
        2
        """


class SampledStorage(StoredRows, Protocol):
    """What samplers and expanders ask of a storage."""

    @property
    def traits(self) -> Traits:
        """What it can do."""

    @property
    def device(self) -> torch.device | None:
        """Where rows lie; None: not known before the first write."""

    @property
    def max_size(self) -> int:
        """Rows at most."""

    @property
    def ndim(self) -> int:
        """Dimensions of the data that make one row each."""

    @property
    def initialized(self) -> bool:
        """Whether anything was ever written."""

    @property
    def closed(self) -> bool:
        """Whether its memory was given back."""

    def __len__(self) -> int: ...

    def writes_of(self, rows: torch.Tensor, tickets: torch.Tensor) -> torch.Tensor:
        """The numbers of the writes that rows held when they had these tickets: what users get as ``"index_generation"``.

        An edit gives a row a new ticket, and leaves the number of its write. Of a row that was written since it is the ticket.

        Args:
            rows: int64 ``[B]``.
            tickets: int64 ``[B]``; -1 stays -1.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
        >>> rows = rb.extend(torch.arange(2))
        >>> before = rb.storage.tickets_of(rows)
        >>> rb[0] = torch.tensor(7)
        >>> rb.storage.writes_of(rows, rb.storage.tickets_of(rows)).equal(before)
        True
        """

    def hold_nothing(self, rows: torch.Tensor) -> torch.Tensor:
        """Whether rows hold nothing, because their writer died or the storage was emptied: bool.

        Args:
            rows: int64 ``[B]``, inside the storage. A row that is just being written holds something.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.hold_nothing(torch.tensor([2, 3])).tolist()
        [False, True]
        """

    def next_number(self) -> int:
        """Ticket number of the next write: by as much as a load moves this, it moves those of all rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> before = rb.storage.next_number()
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.next_number() - before
        2
        """

    def priorities(
        self, name: str, config: PriorityConfig, rows: int, device: torch.device | None = None
    ) -> tuple[Priorities, bool] | None:
        """The priorities of that name, and whether they were made by this call; None: nothing was ever written.

        Args:
            name: of the index, as :class:`PrioritizedSampler` has it in ``index``.
            config: how priorities become probabilities. Of priorities that are there already, what was stored counts.
            rows: the number of rows that a list without a bound has priorities for.
            device: where the priorities of rows on an accelerator are to be: there, or on the CPU; None: as the storage has them.

        Raises:
            IncompatibleStore: they are there with another ``eps`` or ``max_priority_within_buffer``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> from engram.store.priorities import PriorityConfig
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> config = PriorityConfig(alpha=0.6, beta=0.4, eps=1e-8, within_buffer=False)
        >>> rb.storage.priorities("main", config, 100) is None
        True
        >>> _ = rb.extend(torch.arange(3))
        >>> index, made = rb.storage.priorities("main", config, 100)
        >>> made, rb.storage.priorities("main", config, 100)[1]
        (True, False)
        """

    def consumption(self, name: str, most: int, rules: GroupRules = ...) -> ConsumptionIndex | None:
        """The counts of that name, of rows that are drawn ``most`` times and follow the rules; None: nothing was ever written.

        Raises:
            ValueError: the storage is a list without a bound.
            TypeError: it is a list, whose rows follow no rules. As :meth:`ConsumptionIndex.of_store`.
            IncompatibleStore: the rows of these counts are drawn another number of times, or follow other rules.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend(torch.arange(3))
        >>> rows, _ = rb.storage.consumption("main", 1).core.claim(key=7, n=2)
        >>> len(rows), rb.storage.consumption("main", 1).counts(3).sum().item()
        (2, 2)
        """

    def groups(self, name: str, key: FieldPath, reward: FieldPath | None, rules: GroupRules = ...) -> Groups | None:
        """The rows that have the same content in the field ``key``, in groups; None: nothing was ever written.

        ``rules``: which rows are in one; default all.

        Raises:
            TypeError: the storage is a list that has none; or the content of the field is no key. KeyError: no such field.
            ValueError: it is a list without a bound. IncompatibleStore: the index of that name has groups by other rules.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend({"prompt": torch.tensor([7, 7, 9])})
        >>> groups = rb.storage.groups("main", ("prompt",), None)
        >>> groups.count, groups.of_size(2)
        (2, 1)
        """
