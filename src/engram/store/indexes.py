"""The indexes of a store: what samplers need besides the rows, under a name and a kind."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

from torch import Tensor

from engram._support import fork, native, progress, words
from engram.errors import IncompatibleStore
from engram.format import files, layout
from engram.store.lifetime import exclusive
from engram.store.memory import Block, file_block, private_block

C = TypeVar("C", bound=fork.Forked)
K = TypeVar("K", bound="Ordered")
T = TypeVar("T")

#: Name and kind of an index.
IndexKey: TypeAlias = tuple[str, str]
AnyIndex: TypeAlias = "LockedIndex[Any]"


class Host(NamedTuple):
    """What an index needs of its store."""

    core: native.Store
    control: Tensor
    tickets: Tensor
    directory: Path | None


class Ordered(fork.Forked, Protocol):
    """The core of an index that knows which rows hold something."""

    def put_in_order(self) -> None: ...


#: All kinds, by name. Every process that writes to a directory maintains all of its indexes, so all kinds must be known.
INDEX_KINDS: dict[str, type[AnyIndex]] = {}


class LockedIndex(Generic[C]):
    """What indexes with a lock in their memory have in common. Each says how its core is made and its lock is freed."""

    core: C
    #: Names the kind of index in a store's folder: never changes.
    kind: str
    #: Makes the core around memory of an address and a size; the last argument keeps it alive. Raises ``ValueError``: it is no such memory.
    make_core: Callable[..., C]
    #: Formats memory of an address and a size; what follows are the index's own arguments.
    format_memory: Callable[..., None]
    #: Frees the lock in memory of an address and a size. Raises ``ValueError``: it is no such memory. None: there is no lock.
    reset_mutex: Callable[[int, int], None] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in vars(cls):
            INDEX_KINDS[cls.kind] = cls

    def __init__(self, block: Block, host: Host | None) -> None:
        """``block``: formatted memory. Raises ``IncompatibleStore``: of another size or format."""
        with words.raise_as(IncompatibleStore, "index"):
            self.core = self.made_around(block, host)
        #: Its memory.
        self.block = block
        if host is None or host.directory is None:
            # The lock of a shared index is held by a process that still exists after a fork.
            fork.registered(self.core)

    @classmethod
    def of_name(cls, indexes: Indexes, name: str, nbytes: int, *given: object) -> tuple[Self, bool]:
        """As :meth:`Indexes.lasting`. Raises ``TypeError``, ``ValueError``, too: not a name of an index."""
        check_index_name(name)
        return indexes.lasting(
            name, cls.kind, nbytes, lambda block: cls.format_memory(block.address, block.nbytes, *given)
        )

    @classmethod
    def alone(cls, nbytes: int, *given: object) -> Self:
        """One in private memory, of so many bytes, made with what is given to :attr:`format_memory`."""
        block = private_block(nbytes)
        cls.format_memory(block.address, block.nbytes, *given)
        return cls(block, None)

    def made_around(self, block: Block, host: Host | None) -> C:  # noqa: ARG002 - it depends on no row
        """The core. Raises ``ValueError``: it is no such memory."""
        return self.make_core(block.address, block.nbytes, block.tensor)

    @classmethod
    def free_lock(cls, block: Block) -> None:
        """Before an index is made around memory of a directory, by the only process that has it open: frees its lock.

        Raises ``IncompatibleStore``: no such memory.
        """
        if cls.reset_mutex is not None:
            with words.raise_as(IncompatibleStore, "index"):
                cls.reset_mutex(block.address, block.nbytes)

    @classmethod
    def copied(cls, memory: Tensor) -> Block:
        """Memory of an index that others may be changing, copied, its lock free. Raises as :meth:`free_lock`; ``WriterStalled``."""
        block = private_block(memory.numel())
        block.tensor.copy_(memory)
        cls.free_lock(block)
        return block

    def put_in_order(self) -> None:
        """After a recovery of the rows: nothing here, where the memory is whole after any death."""

    def count(self, stats: dict[str, float]) -> None:
        """Add what it has to say to the numbers of the store: nothing here."""


class TicketIndex(LockedIndex[K]):
    """What indexes have in common that compare the tickets of rows. Each says how memory that others may be changing is copied."""

    #: Copies memory from an address to another, of a size, its lock free. Raises ``ValueError``: it is no such memory.
    copy_memory: Callable[[int, int, int], None]

    def made_around(self, block: Block, host: Host | None) -> K:
        keep = (block.tensor,) if host is None else (block.tensor, host.control, host.tickets)
        return self.make_core(block.address, block.nbytes, None if host is None else host.core, keep)

    @classmethod
    def copied(cls, memory: Tensor) -> Block:
        block = private_block(memory.numel())
        with words.raise_as(IncompatibleStore, "index"):
            cls.copy_memory(memory.data_ptr(), block.address, block.nbytes)
        return block

    def put_in_order(self) -> None:
        """After a recovery of the rows: rows that hold nothing lose what it has of them. O(rows)."""
        self.core.put_in_order()


OneIndex = TypeVar("OneIndex", bound=AnyIndex)


def caught_up(index: OneIndex, *, readonly: bool) -> OneIndex:
    """An index as the rows are now, also of a store that this process only reads."""
    if readonly:
        index.core.catch_up()
    return index


_INDEX_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_index_name(name: object, where: str = "index") -> None:
    """Raise unless this can be the name of an index: ``TypeError``, ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"{where}: expected a name, got {type(name).__name__}.")
    if not _INDEX_NAME.fullmatch(name):
        raise ValueError(f"{where}: expected a name of 1 to 64 letters, digits, '-' or '_', got {name!r}.")


def _index_file(folder: Path, kind: str, nbytes: int, make: Callable[[Block], None]) -> Block:
    """Memory of a new index in a directory. The file is renamed into place when it is complete."""
    path = folder / kind
    hidden = folder / f".{kind}-{os.getpid()}-{threading.get_ident()}"
    for left in folder.glob(f".{kind}-*"):  # of processes that died; the store's folder is locked
        left.unlink(missing_ok=True)
    with files.Creation() as made:
        made.folder(folder)
        made.file(hidden, nbytes)
        make(file_block(hidden, nbytes))
        _unscanned(path).unlink(missing_ok=True)
        made.text(_unscanned(path), b"")
        made.publish(hidden, path)
        return file_block(path, nbytes)


def _nothing(block: Block) -> None:
    """Formats no memory: of an index that is copied."""


def _unscanned(index: Path) -> Path:
    """Exists beside an index until it has scanned all rows. If its maker dies before, the next process lets it scan."""
    return index.with_name(f".unscanned-{index.name}")


def _scan(index: AnyIndex, rows: int) -> Iterator[int]:
    """Let an index scan all rows in pieces, so that writers wait for one piece only. Yields how many rows are left."""
    for row in range(0, rows, progress.CHUNK):
        end = min(row + progress.CHUNK, rows)
        index.core.scan(row, end)
        yield rows - end


class Indexes(Mapping[IndexKey, Any]):
    """The indexes of one store. Every write keeps them up to date.

    Two sorts: those that last, which are the items of this mapping and lie in memory of the store; and tables, which each
    process builds from the rows.
    """

    def __init__(self, host: Host, capacity: int) -> None:
        self.core = host.core
        #: Of each table of trajectories, by name: the length of the windows that it counts. Draws depend on it.
        self.windows: dict[str, int] = {}
        #: Of each table of trajectories, by name: how many fields there were. Usual boundaries are looked for among them.
        self.made_with: dict[str, int] = {}
        #: Threads that change priorities without a call, until :meth:`close`.
        self.drains: weakref.WeakSet[native.UpdateDrain] = weakref.WeakSet()
        self._host = host
        self._closed = False
        self._capacity = capacity
        self._lasting: dict[IndexKey, Any] = {}
        self._lock = fork.lock()
        self._copied: dict[IndexKey, Block] = {}
        #: Those that this process builds: with what, and the table.
        self.tables: dict[IndexKey, tuple[object, Any]] = {}
        self._tables_lock = fork.rlock()

    def __getitem__(self, key: IndexKey) -> Any:
        return self._lasting[key]

    def __iter__(self) -> Iterator[IndexKey]:
        return iter(self._lasting)

    def __len__(self) -> int:
        return len(self._lasting)

    def close(self, core: native.Store) -> None:
        """Replaces the store's core, and those of its indexes, by one that raises. Threads apply what has arrived, and end."""
        self.core, self._closed = core, True
        for index in self._lasting.values():
            index.core = core
        for drain in list(self.drains):
            drain.stop()

    def keep(self, key: IndexKey, index: object) -> None:
        """Have an index that the core does not tell of writes; None: forget the one of that key."""
        self._lasting.pop(key, None)
        if index is not None:
            self._lasting[key] = index

    # ---- indexes that last -------------------------------------------------------------------------------------------

    def lasting(self, name: str, kind: str, nbytes: int, make: Callable[[Block], None]) -> tuple[Any, bool]:
        """The index of that name and kind, and whether it was made just now.

        In a directory it is the file ``.engram/indexes/<name>/<kind>``, which stays. Every later write updates it.

        Args:
            name: of the index. kind: what it is.
            nbytes: of its memory.
            make: formats zeroed memory.

        Raises:
            IncompatibleStore: a file of another size.
            OSError: no space.
        """
        known = self._lasting.get((name, kind))
        if known is not None and not self._lacks_scan(name, kind):
            return known, False
        if self._host.directory is not None:
            return self._lasting_in(self._host.directory, name, kind, nbytes, make)
        with self._lock:
            known = self._lasting.get((name, kind))
            if known is not None:
                return known, False
            copied = self._copy_of(name, kind)
            block = private_block(nbytes) if copied is None else copied
            if copied is None:
                make(block)
            index = INDEX_KINDS[kind](block, self._host)
            self.core.attach(index.core)
            try:
                self.scan(index, kind)  # a copied one, too: what it says of some rows may be old
            finally:  # other threads find it when it knows all rows
                self._lasting[name, kind] = index
            return index, copied is None

    def _copy_of(self, name: str, kind: str) -> Block | None:
        """Memory to begin with, in place of zeroed one."""
        return self._copied.pop((name, kind), None)

    def _has_copy(self, name: str, kind: str) -> bool:
        """Whether there is such memory."""
        return (name, kind) in self._copied

    def made_before(self, name: str, kind: str) -> Any | None:
        """The index of that name and kind that this process or another one has made; None: there is none. It has scanned the rows."""
        known = self._lasting.get((name, kind)) or self.refreshed().get((name, kind))
        if known is not None or self._has_copy(name, kind):
            known, _ = self.lasting(name, kind, 0 if known is None else known.block.nbytes, _nothing)
        return known

    def _lasting_in(
        self, directory: Path, name: str, kind: str, nbytes: int, make: Callable[[Block], None]
    ) -> tuple[Any, bool]:
        with exclusive(directory):
            self.attach_new()
            self.finish_scans()
            with self._lock:
                known = self._lasting.get((name, kind))
                if known is not None:
                    if known.block.nbytes != nbytes:
                        raise IncompatibleStore(f"index {name!r}: expected {nbytes} bytes, got {known.block.nbytes}.")
                    return known, False
                block = _index_file(directory / layout.FOLDER / layout.INDEXES / name, kind, nbytes, make)
                # In this order: from the new epoch on every process tells it of its writes, and its scan finds what was
                # written before.
                index = self._attach(name, kind, block)
                self.core.knows_indexes(self.core.next_index_epoch())
                self.finish_scans()
                return index, True

    def keep_copies(self, copies: Mapping[IndexKey, Tensor]) -> None:
        """Memory of the indexes of a copied private store, for :meth:`lasting`."""
        for key, memory in copies.items():
            self._copied[key] = INDEX_KINDS[key[1]].copied(memory)

    def copy_to(self, other: Indexes) -> None:
        """Let another store, which holds the same rows, have the same indexes."""
        for (name, kind), index in self.items():
            memory = index.block.tensor

            def fill(block: Block, memory: Tensor = memory, kind: str = kind) -> None:
                block.tensor.copy_(memory)
                INDEX_KINDS[kind].free_lock(block)

            other.lasting(name, kind, index.block.nbytes, fill)

    def rescan(self) -> None:
        """All rows were replaced."""
        for (_, kind), index in self.items():
            self.scan(index, kind)

    def scan(self, index: AnyIndex, kind: str) -> None:
        """Let an index scan all rows."""
        try:
            progress.watch(_scan(index, self._capacity), f"giving rows {kind}")
        except BaseException:  # Ctrl-C: an index that has scanned only some rows would hide the others for good
            index.core.scan(0, self._capacity)
            raise

    # ---- those of a directory ----------------------------------------------------------------------------------------

    def finish_scans(self) -> None:
        """Scan all rows for indexes that have not seen them. The folder is locked."""
        for (name, kind), index in self.items():
            mark = self._lacks_scan(name, kind)
            if mark is not None:
                self.scan(index, kind)
                with contextlib.suppress(OSError):  # then another process lets it scan once more
                    mark.unlink()

    def _lacks_scan(self, name: str, kind: str) -> Path | None:
        """The mark of an index in a directory that has not scanned all rows yet: its maker still scans, or died."""
        if self._host.directory is None:
            return None
        mark = _unscanned(self._host.directory / layout.FOLDER / layout.INDEXES / name / kind)
        return mark if mark.exists() else None

    def _attach(self, name: str, kind: str, block: Block) -> Any:
        index = INDEX_KINDS[kind](block, self._host)
        self.core.attach(index.core)
        self._lasting[name, kind] = index
        return index

    def attach_all(self, *, alone: bool = False) -> None:
        """Attaches every index in the directory: each writer maintains all of them, whatever its sampler.

        Args:
            alone: no other process has the store open.

        Raises:
            IncompatibleStore: an unknown kind of index, or one with other contents than its kind has.
        """
        assert self._host.directory is not None
        for path in sorted((self._host.directory / layout.FOLDER / layout.INDEXES).glob("*/[!.]*")):
            name, kind = path.parent.name, path.name
            if kind not in INDEX_KINDS:
                raise IncompatibleStore(
                    f"{path}: expected one of the kinds {sorted(INDEX_KINDS)}, got an index that a newer engram has made."
                )
            if (name, kind) not in self._lasting:
                block = file_block(path, path.stat().st_size)
                if alone:
                    INDEX_KINDS[kind].free_lock(block)
                self._attach(name, kind, block)

    def attach_new(self) -> None:
        """Attaches indexes that another process has made since the last look."""
        with self._lock:
            epoch = self.core.index_epoch
            self.attach_all()
            self.core.knows_indexes(epoch)

    def refreshed(self) -> Indexes:
        """These, with those that other processes have made since."""
        if self._host.directory is not None and not self._closed:
            with exclusive(self._host.directory):
                self.attach_new()
        return self

    # ---- tables that this process builds -----------------------------------------------------------------------------

    def table(self, name: str, kind: str, config: object, make: Callable[[], T]) -> T:
        """The table of a name and kind; ``make()`` makes it if there is none.

        Args:
            name: as the user calls it.
            kind: what it is: tables of different kinds have separate names.
            config: what it was made for; compared with ``==``.
            make: makes it and attaches it to the core. Called at most once, other threads wait for it.

        Raises:
            IncompatibleStore: the table of that name was made for something else.
        """
        with self._tables_lock:
            if (name, kind) not in self.tables:
                self.tables[name, kind] = (config, make())
            known, table = cast("tuple[object, T]", self.tables[name, kind])
        if known != config:
            raise IncompatibleStore(
                f"index {name!r}: expected the {kind} of {known}, as it was made, got {config}. Give another index=… name."
            )
        return table

    def count_windows(self, windows: Mapping[str, int]) -> None:
        """Let tables of trajectories, existing and future ones, count windows of these lengths."""
        with self._tables_lock:
            self.windows = {**self.windows, **windows}
            for (name, _), (_, table) in self.tables.items():
                table.count(self.windows[name])
