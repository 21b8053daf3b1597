"""A pass over the live rows, each of which comes once: a sampler's own, or one of a store that all its processes walk together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _fork, _native
from engram.errors import IncompatibleStore
from engram.state import integer
from engram.store import INDEX_KINDS, check_index_name, private_block

if TYPE_CHECKING:
    from engram.store import Block, Store

__all__ = ["KIND", "PassIndex", "checked_walk"]

KIND = "pass"


class PassIndex:
    """Whoever draws takes the next stretch. Made by :meth:`of_store` and :meth:`own`."""

    def __init__(self, block: Block, store: Store | None) -> None:
        """``block``: formatted memory. Raises ``IncompatibleStore``: of another size or format."""
        try:
            self.core: Any = _native.Pass(block.address, block.nbytes, block.tensor)
        except ValueError as error:
            raise IncompatibleStore(f"index: {error}.") from error
        self.block = block
        """Its memory."""
        if store is None:  # else whoever holds its lock is there after a fork, too
            _fork.mended(self.core)

    @staticmethod
    def free_lock(block: Block) -> None:
        """As :meth:`PriorityIndex.free_lock`."""
        try:
            _native.reset_pass_mutex(block.address, block.nbytes)
        except ValueError as error:
            raise IncompatibleStore(f"index: {error}.") from error

    def put_in_order(self) -> None:
        """Nothing: a death leaves a pass whole."""

    @classmethod
    def own(cls) -> PassIndex:
        """One in private memory."""
        block = private_block(_native.pass_bytes)
        _native.format_pass(block.address, block.nbytes)
        return cls(block, None)

    @classmethod
    def of_store(cls, store: Store, name: str, begun: tuple[int, int, int]) -> PassIndex:
        """That of a directory store under a name; if it is made now, it goes on where ``begun`` is: ``(key, rows, visited)``.

        Raises:
            ValueError: a name that is none.
            OSError: no space for its file.
        """
        check_index_name(name)

        def make(block: Block) -> None:
            _native.format_pass(block.address, block.nbytes)
            _native.Pass(block.address, block.nbytes, block.tensor).walk = begun

        index: PassIndex = store.lasting_index(name, KIND, _native.pass_bytes, make)[0]
        return index

    def next(self, key: int, rows: int, n: int, *, whole: bool) -> tuple[int, int, int, bool]:
        """The next ``n`` of ``rows`` rows, or what is left: ``(key of the order, first rank, ranks, whether that was the end)``.

        Args:
            key: of the order, if a new pass begins: at the end of one, or when there were another number of rows.
            rows: at least one. n: at least one.
            whole: what does not fill ``n`` is skipped; then ``n <= rows``.

        Raises:
            WriterStalled: another process has held the pass for 5 s.
        """
        taken: tuple[int, int, int, bool] = self.core.next(key, rows, n, whole)
        return taken

    @property
    def walk(self) -> tuple[int, int, int]:
        """Key of the order, rows, and how many of them were visited."""
        walk: tuple[int, int, int] = self.core.walk
        return walk

    @walk.setter
    def walk(self, walk: tuple[int, int, int]) -> None:
        self.core.walk = walk

    def state(self) -> dict[str, Any]:
        """The :attr:`walk`, under ``key, rows`` and ``visited``: ints."""
        return dict(zip(("key", "rows", "visited"), self.walk, strict=True))


def checked_walk(state: dict[str, Any], where: str) -> tuple[int, int, int]:
    """The walk of a :meth:`PassIndex.state`; ``state`` may hold more. Raises ``TypeError``, ``ValueError``: it is none."""
    key = integer(state, "key", 0, 1 << 63, where)
    rows = integer(state, "rows", 0, 1 << 62, where)
    return key, rows, integer(state, "visited", 0, rows + 1, where)


INDEX_KINDS[KIND] = PassIndex
