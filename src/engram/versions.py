"""Up to which policy version the consumer of a store's rows has come: one number that all its processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram import _native
from engram.store import INDEX_KINDS, check_index_name, private_block, wrong_memory

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store import Block, Host, Store

#: Names the kind of index in a store's folder: never changes.
KIND = "consumer"


class ConsumerVersionIndex:
    """A version that only grows, until the store is emptied. Made by :meth:`of_store` and :meth:`own`."""

    def __init__(self, block: Block, host: Host | None = None) -> None:
        """``block``: formatted memory. Raises ``IncompatibleStore``: of another size or format."""
        del host  # it depends on no row
        try:
            self.core = _native.ConsumerVersion(block.address, block.nbytes, block.tensor)
        except ValueError as error:
            raise wrong_memory(error) from error
        self.block = block
        """Its memory."""

    @staticmethod
    def free_lock(block: Block) -> None:
        """It has none. Raises as :meth:`LockedIndex.free_lock`."""
        ConsumerVersionIndex(block)

    @staticmethod
    def copied(memory: Tensor) -> Block:
        """As :meth:`LockedIndex.copied`."""
        block = private_block(memory.numel())
        block.tensor.copy_(memory)
        return block

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: the version; of several the newest."""
        stats["consumer_version"] = max(self.core.version, stats.get("consumer_version", self.core.version))

    def put_in_order(self) -> None:
        """Does nothing: one word is whole after any death."""

    @classmethod
    def own(cls) -> ConsumerVersionIndex:
        """One in private memory."""
        block = private_block(_native.consumer_version_bytes)
        _native.format_consumer_version(block.address, block.nbytes)
        return cls(block)

    @classmethod
    def of_store(cls, store: Store, name: str) -> ConsumerVersionIndex:
        """The index of a store under a name. Raises ``ValueError``: not a name of an index. ``OSError``: no space for its file."""
        check_index_name(name)

        def make(block: Block) -> None:
            _native.format_consumer_version(block.address, block.nbytes)

        index: ConsumerVersionIndex = store.indexes.lasting(name, KIND, _native.consumer_version_bytes, make)[0]
        return index


INDEX_KINDS[KIND] = ConsumerVersionIndex
