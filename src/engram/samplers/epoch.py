"""Every live row once per epoch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from engram._support import native
from engram._support.retries import Retries
from engram._support.state import Change, typed
from engram.samplers._base import Accept, NativeSampler, check_drawable
from engram.store import blocks, indexes
from engram.store.row_indexes import NONE, EpochIndex, Progress, checked_progress
from engram.store.sampled import SampledStorage
from engram.store.store import Store
from engram.types import Commit, Draw, Extent, Info, NativeBatch, Shown, Write

#: Rows that are looked at together.
_SOME = 256


class SamplerWithoutReplacement(NativeSampler):
    """Draws each live row once per epoch, in random or in storage order.

    An epoch is over the rows that were live when it began. Rows that are written later join the next one; rows that are overwritten
    or removed before their turn drop out; rows that are edited stay. The last batch of an epoch is short, unless ``drop_last``, and
    sets ``ran_out``; the next draw starts a new epoch. The order is a keyed permutation, which takes no memory, whatever the size. A
    batch beside writes looks at the tickets of its rows, and of rows that have dropped out.

    In a store in a directory, or shared in RAM, the epoch belongs to the store, under the name ``index``. All its
    processes share the epoch, so each row is drawn by one of them, and the next process that opens the store continues
    it. If a process dies, the unused part of its batch is not drawn again.

    Args:
        drop_last: skip the rows of an epoch that do not fill a batch.
        shuffle: random order; otherwise row order.
        index: samplers with different names have separate epochs.

    Raises (when drawing):
        NoSampleable: the buffer is empty.
        ValueError: ``drop_last``, and fewer live rows than the batch size.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SamplerWithoutReplacement(), batch_size=4)
    >>> _ = rb.extend(torch.arange(9))
    >>> [len(batch) for batch in rb]
    [4, 4, 1]
    """

    traits = NativeSampler.traits._replace(reads_natively=True, draws_once=True, has_epochs=True, can_rewind=True)
    noted = ("drop_last", "shuffle")
    _index_kind = EpochIndex.kind

    def __init__(
        self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False, index: str = "main"
    ) -> None:
        if replacement:
            raise TypeError("SamplerWithoutReplacement: expected replacement=False. Use RandomSampler().")
        indexes.check_index_name(index, "SamplerWithoutReplacement: index")
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self.index_name = index
        self._own = EpochIndex.alone(native.epoch_bytes)
        #: The store that was drawn from last, and its epoch: the sampler's own, or that of a directory. Replaced as a whole.
        self._bound: tuple[Store | None, EpochIndex] = (None, self._own)
        self._storage: SampledStorage | None = None
        self._ran_out = False
        self._drawn_from: int | None = None
        #: Without so many rows an epoch is over.
        self._needed = 1

    # ---- which epoch ---------------------------------------------------------------------------------------------------

    def _epoch_of(self, store: Store | None) -> EpochIndex:
        """The epoch in which the rows of a store are drawn."""
        bound, epoch = self._bound
        if store is not bound:
            if store is None or store.directory is None:
                if bound is not None and epoch is self._own:  # that was of other rows
                    self._own.core.state = NONE
                epoch = self._own
            else:
                epoch = EpochIndex.of_store(store, self.index_name, self._own.core.state)
            self._bound = (store, epoch)
        return epoch

    def bind(self, storage: SampledStorage) -> None:
        """Take a storage to draw from. One in a directory has an epoch that all of its processes share.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> sampler = SamplerWithoutReplacement()
        >>> first = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)  # binds it
        >>> _ = first.extend(torch.arange(4))
        >>> _ = first.sample()
        >>> sampler.bind(first.storage)  # again: the epoch goes on
        >>> sampler.epoch(first.storage)[1]
        2
        """
        self._storage = storage
        self._epoch_of(storage.memory)

    def moved(self) -> None:
        self._bound, self._storage = (None, self._own), None

    def _clock(self) -> int:
        """The number of the next write; 0: it is not known."""
        store, storage = self._bound[0], self._storage
        if store is not None:
            return int(store.core.next_ticket)
        return 0 if storage is None else storage.next_number()

    def observe(self, write: Write | None, data: object) -> None:
        """End the epoch when the buffer was emptied.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.empty()  # tells the sampler
        >>> _ = rb.extend(torch.arange(6))
        >>> len(list(rb))  # batches of a whole epoch
        3
        """
        if write is None:
            self._own.core.state = NONE

    @property
    def ran_out(self) -> bool:
        """Whether the epoch of the last batch has ended. Another process may have drawn the rest of it, or written over it."""
        order, (store, epoch), storage = self._drawn_from, self._bound, self._storage
        if self._ran_out or order is None:
            return self._ran_out
        if store is not None:
            return bool(epoch.core.over(store.core, order, self._needed, self.shuffle))
        return storage is not None and storage.memory is None and self._listed_over(storage, order)

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out, self._drawn_from = value, None

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        size, (store, epoch), storage = extent.size, self._bound, self._storage
        needed = batch_size if self.drop_last else 1
        if size < needed:
            self._refuse(size, batch_size)
        if store is None and storage is not None and storage.memory is None:
            self._needed = needed
            return Draw(self._listed(storage, batch_size, key))
        if store is None and storage is not None:
            store, epoch = storage.memory, self._epoch_of(storage.memory)
        if store is None:  # nothing is known of the rows but their number
            order, ranks, _, start, count, self._ran_out = epoch.core.next(key, size, batch_size, self.drop_last, 0)
            rows = extent.rows(self._ranks(order, ranks, start, count))
            self._ran_out |= ranks - start - count < needed
        else:
            drawn = epoch.core.take(store.core, key, batch_size, self.drop_last, self.shuffle)
            if drawn is None:
                self._refuse(min(size, batch_size - 1 if self.drop_last else 0), batch_size)
            rows, order, self._ran_out = drawn
        self._drawn_from, self._needed = order, needed
        return Draw(rows)

    def draw_within(
        self, extent: Extent, batch_size: int, key: int, accept: Accept, before: torch.Tensor
    ) -> tuple[Draw, torch.Tensor]:
        """As of every sampler. The epoch goes on with the first row that is not handed out: it is looked at before it is taken.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False))
        >>> _ = rb.extend(torch.arange(4))
        >>> first = lambda draw: (draw, torch.tensor([0]))
        >>> _ = rb.sampler.draw_within(rb.storage.extent(), 3, 7, first, torch.empty(0, dtype=torch.int64))
        >>> rb.sample(2).tolist()
        [1, 2]
        """
        if self.drop_last:
            raise ValueError(
                "sample: max_tokens: expected drop_last=False, as no number of rows fills a batch, got drop_last=True."
            )
        store, retries = None if self._storage is None else self._storage.memory, Retries()
        assert store is not None  # the buffer has bound the storage, whose rows are in one
        epoch = self._epoch_of(store)
        while True:
            found = epoch.core.peek(store.core, retries.key_of(key), batch_size, self.shuffle)
            if found is None:
                self._refuse(0, batch_size)
            rows, ends, order, start = found
            draw, places = accept(Draw(rows))
            if not len(places) or epoch.core.advance(order, start, int(ends[places[-1]])):
                self._drawn_from, self._needed, self._ran_out = order, 1, False
                return draw, places
            retries.again(rows, [0])  # another thread or process was faster

    def _ranks(self, order: int, ranks: int, start: int, count: int) -> torch.Tensor:
        """The ranks that come at some places of an epoch."""
        found = native.empty_rows(count)
        if self.shuffle:
            native.permute(order, ranks, start, found)
        else:
            torch.arange(start, start + count, out=found, device="cpu")
        return found

    def _listed(self, storage: SampledStorage, n: int, key: int) -> torch.Tensor:
        """Rows of a storage that is no store: as ``core.take``."""
        core, rows = self._own.core, native.empty_rows(0)
        while True:
            ranks, clock = sum(storage.extent().filled), storage.next_number()  # an epoch that begins has rows of now
            whole = self.drop_last and not len(rows)
            order, of, begun, start, count, last = core.next(key, ranks, n - len(rows), whole, clock)
            rows = torch.cat((rows, self._still(storage, begun, self._ranks(order, of, start, count))))
            self._drawn_from, self._ran_out = order, last
            if last and len(rows) < self._needed:
                rows = rows[:0]  # of an epoch that is over
            elif last or len(rows) == n:
                self._ran_out = last or ((self.drop_last or begun != clock) and self._listed_over(storage, order))
                return rows

    @staticmethod
    def _still(storage: SampledStorage, begun: int, rows: torch.Tensor) -> torch.Tensor:
        """Those of the rows that hold what they held when an epoch began."""
        writes = storage.writes_of(rows, storage.tickets_of(rows))
        return rows[(writes >= 0) & ((writes < begun) if begun else True)]

    def _listed_over(self, storage: SampledStorage, order: int) -> bool:
        """Whether too few rows are left of the epoch of this order."""
        key, ranks, visited, begun = self._own.core.state
        found = 0
        while key == order and visited < ranks and found < self._needed:
            some = self._ranks(order, ranks, visited, min(_SOME, ranks - visited))
            found, visited = found + len(self._still(storage, begun, some)), visited + len(some)
        if key == order and found < self._needed:
            self._own.core.state = (key, ranks, ranks, begun)
        return found < self._needed

    def sample_natively(
        self, storage: SampledStorage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """:meth:`draw` and the rows' data in one native call: ``(columns, rows, info)``. The rows are None if nothing is shown.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> from engram.store.blocks import Key
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement())
        >>> _ = rb.extend(torch.arange(4) * 10)
        >>> columns, rows, info = rb.sampler.sample_natively(rb.storage, Key.of(7), 4)
        >>> torch.equal(columns[0], rows * 10), sorted(rows.tolist()), info
        (True, [0, 1, 2, 3], {})
        """
        store = storage.memory
        assert store is not None  # the buffer asks only then
        bound, epoch = self._bound  # another thread may bind another store before this one draws
        if store is not bound:
            epoch = self._epoch_of(store)
        with_rows = shown != "nothing"
        drawn = epoch.core.draw(
            store.core, store.layout, key.address, n, self.drop_last, self.shuffle, with_rows, numbered
        )
        if drawn is None:
            self._refuse(min(store.core.size(), n - 1 if self.drop_last else 0), n)  # of another thread's rows none
        columns, self._drawn_from, self._ran_out = drawn
        self._needed = n if self.drop_last else 1
        info: Info = {"index_generation": columns.pop()} if numbered else {}
        return columns, columns.pop() if with_rows else None, info

    def _refuse(self, size: int, batch_size: int) -> NoReturn:
        """Raise for a buffer with too few rows."""
        check_drawable(size)
        raise ValueError(
            f"sample: drop_last: expected at least batch_size={batch_size} live rows, got {size}. Add data first, or use "
            "drop_last=False."
        )

    def masses(self, storage: SampledStorage) -> blocks.Masses:
        size = len(storage)
        return blocks.Masses(self.epoch(storage)[1] or size, 1.0, size)

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        store, epoch = storage.memory, self._epoch_of(storage.memory)
        key, rows, visited, _ = epoch.core.state
        if store is not None and visited < rows and epoch.core.over(store.core, key, 1, self.shuffle):
            return key, 0
        return key, rows - visited

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        return len(storage) >= (batch_size if self.drop_last else 1)

    def state_dict(self) -> dict[str, object]:
        """``key``, ``rows`` and ``visited`` of the current epoch, and ``ran_out``: plain values. ``begun``, where there were writes
        since it began: how many ticket numbers they took.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> _ = rb.sample()
        >>> state = rb.sampler.state_dict()
        >>> state["rows"], state["visited"]
        (10, 4)
        """
        return {"ran_out": self.ran_out, **self._bound[1].state(self._clock())}  # in this order: the former moves on

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = "SamplerWithoutReplacement"
        progress = checked_progress(state_dict, where, "ran_out")
        return Change(self._go_on, progress, typed(state_dict, "ran_out", bool, where))

    def _go_on(self, progress: Progress, ran_out: bool) -> None:
        self._bound[1].go_on(progress, self._clock())
        self._ran_out, self._drawn_from = ran_out, None if ran_out or not progress[2] else progress[0]

    def config(self) -> dict[str, object]:
        return {**super().config(), "index": self.index_name}

    def __getstate__(self) -> dict[str, object]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("_own", "_bound", "_storage")}
        return state | {"walk": self._own.core.state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        walk = state.pop("walk")
        self.__dict__.update({"_storage": None, "_needed": 1, **state})
        self._own = EpochIndex.alone(native.epoch_bytes)
        self._own.core.state = (*walk, 0)[:4]  # earlier versions pickled three
        self._bound = (None, self._own)
