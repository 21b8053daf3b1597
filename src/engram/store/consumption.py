"""How often each row was drawn: one index of a store, whichever samplers draw by it.

The index belongs to the rows' storage under a name, and every write keeps it: a row that is written again was not drawn yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._support import native
from engram.errors import IncompatibleStore
from engram.store import INDEX_KINDS, Store, TicketIndex, check_index_name, private_block

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store import Block

#: Names the kind of index in a store's folder: never changes.
KIND = "draws"


class ConsumptionIndex(TicketIndex[native.Consumption]):
    """How often each row of one store, or of a list, was drawn. Made by :meth:`of_store` and :meth:`of_list`."""

    make_core = native.Consumption
    reset_mutex = staticmethod(native.reset_consumption_mutex)
    copy_memory = staticmethod(native.copy_consumption)

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: rows that are not used up."""
        stats["drawable_rows"] = stats.get("drawable_rows", 0) + self.core.drawable

    @classmethod
    def of_store(cls, store: Store, name: str, most: int) -> ConsumptionIndex:
        """The index of that name, of rows that are drawn ``most`` times. A new index scans the tickets once.

        Raises:
            ValueError: not a name of an index, or a store of 2^32 rows.
            IncompatibleStore: the rows of that index are drawn another number of times.
            OSError: no space for its file.
        """
        check_index_name(name)

        def make(block: Block) -> None:
            native.format_consumption(block.address, block.nbytes, store.capacity, most)

        index: ConsumptionIndex = store.indexes.lasting(name, KIND, native.consumption_bytes(store.capacity), make)[0]
        return index.checked(name, most)

    @classmethod
    def of_list(cls, rows: int, most: int) -> ConsumptionIndex:
        """Counts of a list's items, which are live as long as the index knows a ticket of theirs."""
        block = private_block(native.consumption_bytes(rows))
        native.format_consumption(block.address, block.nbytes, rows, most)
        return cls(block, None)

    def checked(self, name: str, most: int) -> ConsumptionIndex:
        """The index itself. Raises ``IncompatibleStore``: its rows are drawn another number of times."""
        if self.core.most != most:
            raise IncompatibleStore(
                f"index {name!r}: expected max_sample_count={self.core.most}, as the store's index of that name has, got {most}. Give "
                "it another name: index=…."
            )
        return self

    def claim(self, key: int, n: int) -> tuple[Tensor, Tensor]:
        """Draw up to ``n`` rows, each once, and count them: int64 rows, and the tickets that they must still have. Perhaps none."""
        rows, numbers = self.core.claim(key, n)
        return rows, numbers

    def were_read(self, rows: Tensor, tickets: Tensor, *, failed: bool = False) -> None:
        """Rows that were claimed have been read: those that are used up may be written over. ``failed``: not read, and not drawn."""
        (self.core.take_back if failed else self.core.were_read)(rows, tickets)

    def counts(self, n: int) -> Tensor:
        """int32 ``[n]``: how often the first rows were drawn. A copy."""
        out = torch.empty(n, dtype=torch.int32, device="cpu")
        self.core.counts(out)
        return out

    def restore(self, counts: Tensor) -> None:
        """Take over :meth:`counts`. Rows that it says nothing of were not drawn yet."""
        self.core.restore(counts)

    def reset(self, rows: Tensor) -> None:
        """Let live rows be drawn as often as new ones. Raises ``IndexError``: a row outside the store."""
        self.core.reset(rows)

    # ---- what a list calls, which has no native write path ------------------------------------------------------------

    def written(self, rows: Tensor, first: int) -> None:
        """Rows of a list hold new items, under the tickets ``first``, ``first + 1``, …"""
        self.core.written(rows, first)

    def edited(self, rows: Tensor, first: int) -> None:
        """Items of a list were replaced, and have these tickets now."""
        self.core.edited(rows, first)

    def lost(self, rows: Tensor) -> None:
        """Rows of a list hold nothing."""
        self.core.lost(rows)

    def emptied(self) -> None:
        """A list was emptied."""
        self.core.emptied()


INDEX_KINDS[KIND] = ConsumptionIndex
