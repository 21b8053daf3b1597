"""An epoch over the live rows, in which each comes once: a sampler's own, or one of a store that its processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from engram._support import native
from engram._support.state import check_keys, integer
from engram.store import INDEX_KINDS, LockedIndex, check_index_name, private_block

if TYPE_CHECKING:
    from engram.store import Block, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "pass"

#: Key of the order, rows of the epoch, how many of them were visited, and the number of the next write when it began; in a state how
#: many numbers were given since.
Progress: TypeAlias = tuple[int, int, int, int]
#: Before the first draw.
NONE: Progress = (0, 0, 0, 0)


class EpochIndex(LockedIndex[native.Epoch]):
    """Each call of ``core.next`` takes the next stretch of rows. Made by :meth:`of_store` and :meth:`own`."""

    reset_mutex = staticmethod(native.reset_epoch_mutex)

    make_core = native.Epoch

    @classmethod
    def own(cls) -> EpochIndex:
        """One in private memory."""
        block = private_block(native.epoch_bytes)
        native.format_epoch(block.address, block.nbytes)
        return cls(block, None)

    @classmethod
    def of_store(cls, store: Store, name: str, begun: Progress) -> EpochIndex:
        """The index of a directory store under a name. A new one continues from ``begun``.

        Raises:
            ValueError: not a name of an index.
            OSError: no space for its file.
        """
        check_index_name(name)

        def make(block: Block) -> None:
            native.format_epoch(block.address, block.nbytes)
            native.Epoch(block.address, block.nbytes, block.tensor).state = begun

        index: EpochIndex = store.indexes.lasting(name, KIND, native.epoch_bytes, make)[0]
        return index

    @property
    def progress(self) -> Progress:
        """See :data:`Progress`. Rows that were written after it began are not in it."""
        return self.core.state

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.core.state = progress

    def state(self, clock: int) -> dict[str, int]:
        """The :attr:`progress`, under ``key, rows, visited``; ``begun`` if writes came since. ``clock``: the next one's number."""
        key, rows, visited, begun = self.progress
        return {"key": key, "rows": rows, "visited": visited, **({"begun": begun} if 0 < begun < clock else {})}

    def go_on(self, saved: Progress, clock: int) -> None:
        """From a :meth:`state` on, in which the last number is that of the first write that came later; 0: there was none."""
        key, rows, visited, begun = saved
        self.progress = key, rows, visited, min(begun or clock, clock)


def checked_progress(state: dict[str, object], where: str, *others: str) -> Progress:
    """What an :meth:`EpochIndex.state` says, and ``others`` beside it. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
    check_keys(state, ("key", "rows", "visited", *others), where, optional=("begun",))
    key = integer(state, "key", 0, 1 << 63, where)
    rows = integer(state, "rows", 0, 1 << 62, where)
    begun = integer(state, "begun", 1, 1 << 62, where) if "begun" in state else 0
    return key, rows, integer(state, "visited", 0, rows + 1, where), begun


INDEX_KINDS[KIND] = EpochIndex
