"""How often each row was sampled since it was written: one index of a store, for people, where it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._support import native
from engram.format import layout
from engram.store import INDEX_KINDS, LockedIndex, read_block

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store import Block, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "usage"
#: Its name, of which there is one.
NAME = "main"


class UsageIndex(LockedIndex[native.Usage]):
    """Counts of samples of the rows of one store. It has no lock: each count is an atomic word."""

    make_core = native.Usage

    @classmethod
    def free_lock(cls, block: Block) -> None:
        """There is none."""

    @classmethod
    def of_store(cls, store: Store) -> UsageIndex:
        """The index, made if there is none: then no row counts as sampled. Raises ``OSError``: no space for its file."""

        def make(block: Block) -> None:
            native.format_usage(block.address, block.nbytes, store.capacity)

        index: UsageIndex
        index, made = store.indexes.lasting(NAME, KIND, native.usage_bytes(store.capacity), make)
        if made:
            store.core.ask_for_usage()
        return index

    @classmethod
    def in_use(cls, store: Store) -> UsageIndex | None:
        """The index, if samples are counted. Of a store that is only read, as others count them."""
        index: UsageIndex | None = store.indexes.get((NAME, KIND))
        if index is None and store.core.asked_usage:
            if store.readonly and store.folder is not None:
                path = store.folder / layout.FOLDER / layout.INDEXES / NAME / KIND
                return cls(read_block(path, path.stat().st_size), None) if path.exists() else None
            index = store.indexes.refreshed().get((NAME, KIND))
        return index

    def counts(self, rows: Tensor) -> Tensor:
        """int64 ``[n]``: how often these rows, int64 ``[n]``, were sampled."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), dtype=torch.int64, device="cpu")
        self.core.counts(rows, out)
        return out

    def saved(self, n: int) -> Tensor:
        """int32 ``[n]``: how often the first rows were sampled, copied."""
        return self._words[:n].clamp(min=0)  # above 2^31 - 1 they are negative; no row is sampled as often

    def restore(self, counts: Tensor) -> None:
        """Take over such counts; the other rows were not sampled."""
        self._words.zero_()[: len(counts)] = counts

    @property
    def _words(self) -> Tensor:
        return self.block.tensor[native.usage_bytes(0) : native.usage_bytes(self.core.rows)].view(torch.int32)


INDEX_KINDS[KIND] = UsageIndex
