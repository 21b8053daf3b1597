"""Which rows may have changed since they were looked at: an index of a store, for what ranks rows.

Every write of every process keeps it. A look costs what was written since the one before, not what the store holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram import _native
from engram.store import INDEX_KINDS, LockedIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engram.store import Block, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "changes"
#: Its names. The second one counts rows that are sampled as changed. Processes attach indexes by name, and a row is counted before it
#: is marked only if the counts come first: they are called "main".
WRITTEN, SAMPLED = "written", "sampled"


class ChangesIndex(LockedIndex[_native.Changes]):
    """Marks of the rows of one store. It has no lock: each mark is an atomic word."""

    #: Looks of before mean nothing to those that come.
    reset_mutex = staticmethod(_native.reset_changes)

    make_core = _native.Changes

    @classmethod
    def of_store(cls, store: Store, *, samples: bool = False) -> ChangesIndex:
        """The index, made if there is none. Raises ``OSError``: no space for its file.

        Args:
            store: whose rows these are.
            samples: rows that are sampled count as changed.
        """

        def make(block: Block) -> None:
            _native.format_changes(block.address, block.nbytes, store.capacity, samples)

        name = SAMPLED if samples else WRITTEN
        index: ChangesIndex
        index, made = store.indexes.lasting(name, KIND, _native.changes_bytes(store.capacity), make)
        if made and samples:
            store.core.ask_for_usage()
        return index

    def look(self, since: int) -> tuple[int, NDArray[np.int64]]:
        """The number of this look, and int64 ``[n]``, in order: rows that may have changed since that one. 0: all rows."""
        return self.core.look(since)


INDEX_KINDS[KIND] = ChangesIndex
