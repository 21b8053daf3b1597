"""Up to which policy version the consumer of a store's rows has come: one number that all its processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram import _native
from engram.store import INDEX_KINDS, LockedIndex, check_index_name, private_block

if TYPE_CHECKING:
    from engram.store import Block, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "consumer"


class ConsumerVersionIndex(LockedIndex[_native.ConsumerVersion]):
    """A version that only grows, until the store is emptied. It has no lock. Made by :meth:`of_store` and :meth:`own`."""

    make_core = _native.ConsumerVersion

    @classmethod
    def free_lock(cls, block: Block) -> None:
        """There is none. Raises as :meth:`LockedIndex.free_lock`."""
        cls(block, None)

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: the version; of several the newest."""
        stats["consumer_version"] = max(self.core.version, stats.get("consumer_version", self.core.version))

    @classmethod
    def own(cls) -> ConsumerVersionIndex:
        """One in private memory."""
        block = private_block(_native.consumer_version_bytes)
        _native.format_consumer_version(block.address, block.nbytes)
        return cls(block, None)

    @classmethod
    def of_store(cls, store: Store, name: str) -> ConsumerVersionIndex:
        """The index of a store under a name. Raises ``ValueError``: not a name of an index. ``OSError``: no space for its file."""
        check_index_name(name)

        def make(block: Block) -> None:
            _native.format_consumer_version(block.address, block.nbytes)

        index: ConsumerVersionIndex = store.indexes.lasting(name, KIND, _native.consumer_version_bytes, make)[0]
        return index


INDEX_KINDS[KIND] = ConsumerVersionIndex
