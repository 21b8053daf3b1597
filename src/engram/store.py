"""A store: fields, tickets and lane cursors in one memory, private or in a directory.

The rows are plain tensors; who may read and write them when is decided by the native core, which sees the same memory by
address. Everything here is checked once, when a store is made or opened; after that a write or a read is one native call.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import MemoryMappedTensor

from engram import _fork, _native, _progress
from engram._mappings import map_piece, open_files
from engram.errors import (
    CorruptStore,
    ForkedHandle,
    IncompatibleStore,
    NoSampleable,
    RowError,
    StoreInUse,
    UncleanStore,
    WriterStalled,
)
from engram.format import files, layout
from engram.format import schema as schemas
from engram.format.control import FIXED_BYTES, processes
from engram.format.schema import DTYPES
from engram.types import Changes, Extent, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from engram._mappings import Piece
    from engram.format.schema import Field, Schema
    from engram.types import WritePlan

__all__ = [
    "DeviceStore",
    "Key",
    "Process",
    "Repair",
    "Saved",
    "Store",
    "StoreState",
    "ThreadKey",
    "check_index_name",
    "forget_temporary",
    "maker_of",
    "occupied",
    "shared_memory",
    "skip_numbers",
    "sweep_shared_memory",
    "torch_dtype",
]

#: For somebody who makes, opens or closes a store: that takes milliseconds, and as long as a scan.
_WAIT_S = 60.0

#: In place of the process that a temporary store is made for, when that is done with it; as long as any.
_NOBODY = b"0 0".ljust(48)

#: What a ticket says of a row that nobody is writing and that holds nothing.
_UNUSED, _VOID = 0, 3

#: DLPack's type codes.
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


class Repair(NamedTuple):
    """What opening a store that was not closed had to mend."""

    claims: int = 0
    """Writes that were under way."""
    voided: int = 0
    """Rows left half written; they are skipped from now on."""
    gaps: int = 0
    """Rows that were reserved but never begun."""

    def __str__(self) -> str:
        return f"{self.claims} unfinished writes, {self.voided} half-written rows and {self.gaps} rows that were never begun set aside"


class StoreState(NamedTuple):
    """What a store says of its rows at one moment, beside what they hold. Copies."""

    lanes: Tensor
    """int64 ``[L, 4]``: the position of each lane's next step, counted from the last ``empty``; its live rows; 0; 0."""
    numbers: Tensor
    """int64 ``[capacity]``: ticket numbers in ``[1, clock)``; 0 for rows that hold nothing."""
    clock: int
    """The next ticket number."""
    write_count: int
    """Rows written since the last ``empty``."""


def _index_file(folder: Path, kind: str, nbytes: int, make: Callable[[Block], None]) -> Block:
    """Memory of a new index in a directory. It appears at once and whole."""
    path = folder / kind
    hidden = folder / f".{kind}-{os.getpid()}-{threading.get_ident()}"
    for left in folder.glob(f".{kind}-*"):  # of somebody who died; the store's folder is locked
        left.unlink(missing_ok=True)
    with files.Creation() as made:
        made.folder(folder)
        made.file(hidden, nbytes)
        make(_file_block(hidden, nbytes))
        _unscanned(path).unlink(missing_ok=True)
        made.text(_unscanned(path), b"")
        hidden.rename(path)
        made.published(hidden, path)
        return _file_block(path, nbytes)


def _unscanned(index: Path) -> Path:
    """Lies beside an index until it has looked at all rows: if its maker dies before, whoever comes next lets it look."""
    return index.with_name(f".unscanned-{index.name}")


def _scan(core: Any, rows: int) -> Iterator[int]:
    """Let an index look at all rows, piece by piece: whoever writes waits for one of them only. How many are left."""
    for row in range(0, rows, _progress.CHUNK):
        end = min(row + _progress.CHUNK, rows)
        core.scan(row, end)
        yield rows - end


#: Makes an index of a kind around its memory, for a store. Whoever writes to a directory keeps all of its indexes, so all
#: kinds must be known.
INDEX_KINDS: dict[str, Any] = {}

_INDEX_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_index_name(name: Any, where: str = "index") -> None:
    """Raise unless this can be the name of an index: ``TypeError``, ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"{where}: expected a name, got {type(name).__name__}.")
    if not _INDEX_NAME.fullmatch(name):
        raise ValueError(f"{where}: expected a name of 1 to 64 letters, digits, '-' or '_', got {name!r}.")


class Key:
    """64 random bits, from which a sample follows. Drawing costs 0.6 µs; the core reads them at :attr:`address`, which saves a
    conversion.
    """

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):  # else it could not be drawn into outside of it
            self._bits = torch.zeros((), dtype=torch.int64, device="cpu")
        self.address = self._bits.data_ptr()
        self.draw = self._bits.random_
        """``draw()`` or ``draw(generator=…)``."""

    @classmethod
    def of(cls, value: int) -> Key:
        """These bits, ``0 <= value < 2 ** 64``."""
        made = cls()
        made._bits.fill_(value - (1 << 64) if value >= 1 << 63 else value)
        return made

    @property
    def value(self) -> int:
        """The bits, as an int."""
        return int(self._bits)


class ThreadKey(Key, threading.local):
    """A key that is drawn anew for every sample; each thread has its own, so that none sees another's."""


class Copied:
    """A tensor that exists for a copy only.

    On the CPU it goes by value: multiprocessing sends a tensor's file descriptor, which is closed, or another file's, when the
    tensor is gone before the receiver looks.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> tuple[Any, ...]:
        tensor = self.tensor
        if not tensor.is_cpu:
            return (tensor,)
        return tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.tensor, *how = state
        if how:
            dtype, shape = how
            self.tensor = torch.from_numpy(state[0]).view(dtype).view(shape)


class Saved(NamedTuple):
    """A store on its way through a copy or a pipe."""

    schema: Schema | None
    """None for a directory."""
    directory: Path | None
    parts: list[Copied] | None
    """Control block, tickets and fields, copied; None for a directory."""
    indexes: dict[tuple[str, str], Copied]
    """Memory of the indexes of a private store, copied."""


def torch_dtype(field: Field) -> torch.dtype:
    """The torch dtype of a field."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype


def dlpack_specs(fields: Sequence[Field]) -> list[tuple[int, int, tuple[int, ...]]]:
    """``(type code, bits, shape)`` of rows, as DLPack names them."""
    return [(_CODES[f.dtype.rstrip("0123456789")], 8 * DTYPES[f.dtype], f.shape) for f in fields]


class Process(NamedTuple):
    """A process, which its number alone does not name: that is given again."""

    pid: int
    start_time: int

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(pid, _native.start_time_of(pid))

    def runs(self) -> bool:
        return self.start_time != 0 and _native.start_time_of(self.pid) == self.start_time


class Block(NamedTuple):
    """Raw memory: the tensor keeps it alive."""

    tensor: Tensor
    nbytes: int

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


@torch.inference_mode(mode=False)  # else nobody could write to views of it outside of it
def private_block(nbytes: int) -> Block:
    """Zeroed private pages, taken from the system when they are first touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    if nbytes >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # random rows of a large field then miss the TLB less
    return Block(torch.frombuffer(memory, dtype=torch.uint8), nbytes)


@contextlib.contextmanager
def _mapping(path: Path) -> Iterator[None]:
    """A system call that fails is an ``OSError``: torch says ``RuntimeError``, with its number behind the message."""
    try:
        yield
    except RuntimeError as error:
        number = re.search(r"\((\d+)\)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (mapping it)", str(path)) from error


def _file_block(path: Path, nbytes: int) -> Block:
    files.check_size(path, nbytes)
    with _mapping(path), torch.device("cpu"):
        return Block(torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8), nbytes)


@torch.inference_mode(mode=False)
def _private_field(field: Field, capacity: int) -> Tensor:
    nbytes = field.row_bytes * capacity
    shape = (capacity, *field.shape)
    if not nbytes:
        return torch.empty(shape, dtype=torch_dtype(field), device="cpu")
    return private_block(nbytes).tensor[:nbytes].view(torch_dtype(field)).view(shape)


@torch.inference_mode(mode=False)
def _file_field(directory: Path, field: Field, capacity: int) -> Tensor:
    nbytes = field.row_bytes * capacity
    shape = torch.Size((capacity, *field.shape))
    if not nbytes:
        return torch.empty(shape, dtype=torch_dtype(field), device="cpu")
    path = layout.field_path(directory, field.key)
    files.check_size(path, nbytes)
    with _mapping(path), torch.device("cpu"):
        tensor: Tensor = MemoryMappedTensor.from_filename(path, dtype=torch_dtype(field), shape=shape)
    return tensor


def _segments_in(folder: Path) -> list[Any] | None:
    """Where rows lie that have no files in a store's folder, per field; None: they have.

    Raises ``CorruptStore``.
    """
    path = folder / layout.ADOPTED
    if not path.exists():
        return None
    try:
        segments = json.loads(files.read_small(path, schemas.MAX_BYTES))["segments"]
        for segment in segments or ():
            if segment is not None:
                device, inode, size, offset = segment
                if not all(type(number) is int and number >= 0 for number in (device, inode, size, offset)):
                    raise ValueError("a number that is none")
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptStore(f"{path}: expected where the rows lie, got something else ({error}).") from error
    return None if segments is None else list(segments)


@torch.inference_mode(mode=False)
def _segment_fields(folder: Path, schema: Schema, segments: list[Any], control: Block) -> list[Tensor]:
    """Fields in memory without a name, which is there as long as a process has it open: found by those that share the store.

    Only memory of the file system of the folder is looked for.

    Raises:
        CorruptStore: no such process, or none that this one may look at.
    """
    raw = control.tensor[:FIXED_BYTES].numpy().tobytes()
    there = open_files(("self", *processes(raw)))
    device = os.stat(folder).st_dev
    tensors = []
    if len(segments) != len(schema.fields):
        raise CorruptStore(f"{folder / layout.ADOPTED}: expected {len(schema.fields)} fields, got {len(segments)}.")
    for field, segment in zip(schema.fields, segments, strict=True):
        nbytes = field.row_bytes * schema.capacity
        shape = (schema.capacity, *field.shape)
        if not nbytes:
            tensors.append(torch.empty(shape, dtype=torch_dtype(field), device="cpu"))
            continue
        at, inode, size, offset = segment or (-1, -1, -1, -1)
        path = there.get((at, inode))
        if path is None or at != device or offset + nbytes > size:
            raise CorruptStore(
                f"{folder}: field {field.name}: its rows are in memory without a name, and no process that shares the store and "
                "that this one may look at has it open. It is gone when the last of them ends."
            )
        raw_rows = map_piece(path, at, inode, size)[offset : offset + nbytes]
        tensors.append(raw_rows.view(torch_dtype(field)).view(shape))
    return tensors


def _as_rows(rows: Tensor, call: str) -> Tensor:
    """Rows (or lanes, or tickets) as the core reads them: int64, contiguous, on the CPU.

    Raises:
        TypeError: not a tensor of ints.
    """
    if rows.dtype is not torch.int64 or not rows.is_cpu:
        if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype is torch.bool:
            raise TypeError(f"{call}: expected int64 rows, got a tensor of {rows.dtype}.")
        rows = rows.to("cpu", torch.int64)
    return rows.contiguous()


class Store:
    """Rows on the CPU, read and written by the native core.

    Make one with :meth:`private`, :meth:`create`, :meth:`around` or :meth:`open`.
    """

    device = torch.device("cpu")
    #: Whether the core moves the rows, and can make tensors.
    is_native = True
    #: Of one in a folder: whether its rows lie there, too, and not in memory that a program shared before.
    has_files = True

    def __init__(
        self,
        schema: Schema,
        tensors: Sequence[Tensor],
        control: Block,
        tickets: Block,
        directory: Path | None = None,
        repair: Repair | None = None,
    ) -> None:
        self.schema = schema
        self.tensors = tuple(tensors)
        self.directory = directory
        self.repair = repair
        """What opening had to mend; None if the store was closed in order."""
        self._control = control
        self._tickets = tickets
        self._which = tuple(range(len(schema.fields)))
        self.layout = _native.Layout(dlpack_specs(schema.fields))
        self._finalizer: weakref.finalize[..., Store] | None = None
        self.closed = False
        """Whether :meth:`close` was called."""
        #: Storages around it: within a process several may be.
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._indexes: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._indexes_lock = _fork.rlock()
        #: What samplers need besides the rows, by name and kind: kept up to date by every write.
        self.indexes: dict[tuple[str, str], Any] = {}
        self._indexing = _fork.lock()
        self._copied_indexes: dict[tuple[str, str], Block] = {}
        #: Of each table of trajectories, by name: the length of the windows that it counts. Draws depend on it.
        self.windows: dict[str, int] = {}
        #: The clock of the state that last replaced all rows, and the next ticket number then.
        self.replaced: tuple[int, int] | None = None
        native = self._native_fields()
        self._alive: _Alive | None = None
        self._participants: Any = None
        self._placing = _fork.rlock()
        self._pausing = _fork.rlock()
        _fork.mended(self, uses_others=True)  # indexes hear of what is repaired
        self.core: Any = _native.Store(
            control.address,
            control.nbytes,
            tickets.address,
            tickets.nbytes,
            tuple(tensor.data_ptr() for tensor, _ in native),
            tuple(field.row_bytes for _, field in native),
        )

    def _native_fields(self) -> list[tuple[Tensor, Field]]:
        """The fields that the core moves itself."""
        return list(zip(self.tensors, self.schema.fields, strict=True))

    # ---- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def private(cls, schema: Schema) -> Store:
        """A store in private memory. Pages are taken when rows are first written."""
        control, tickets = _new_words(schema, 0)
        return cls(schema, [_private_field(field, schema.capacity) for field in schema.fields], control, tickets)

    @classmethod
    def around(cls, schema: Schema, tensors: Sequence[Tensor]) -> Store:
        """A store around existing contiguous CPU tensors, all of whose rows are live."""
        control, tickets = _new_words(schema, 0)
        store = cls(schema, tensors, control, tickets)
        store.core.fill()
        return store

    @classmethod
    def create(
        cls,
        schema: Schema,
        directory: Path,
        *,
        maker: str = "",
        guest_of: Process | None = None,
        replace: bool = False,
        begin: Callable[[Any], None] = lambda _: None,
        adopted: Sequence[Piece | None] | None = None,
    ) -> Store:
        """A new store in a folder, its space reserved.

        Args:
            schema: what its rows are.
            directory: the folder.
            maker: whoever comes later with the same one gets the store that the first has made, if it has that schema.
            guest_of: a temporary store: the last process that closes it removes the folder, but for this one's sake it stays.
            replace: remove a store that is there, of another maker, and files of those names.
            begin: done to the core of the new store, without its fields, before anybody else sees it.
            adopted: where the rows of each field are already: in files of the folder, or in memory without a name that this
                process has mapped; None for a field without bytes.

        Raises:
            RuntimeError: the folder holds a store, or files of that name, and not ``replace``.
            IncompatibleStore: somebody with the same ``maker`` has made one of another schema.
            StoreInUse: ``replace``, but a live process has the store open.
            OSError: no space, no permission, not a folder. Nothing is left behind.
            ValueError: a key that cannot be a file name.
        """
        raw = schemas.encode(schema)
        if len(raw) > schemas.MAX_BYTES:
            raise ValueError(
                f"store: its description needs {len(raw)} bytes, at most {schemas.MAX_BYTES} are possible."
            )
        clash = layout.clash(schema.fields)
        if clash is not None:
            raise ValueError(
                f"store: two keys need {clash!r}, once as a file and once as a folder. Rename one of them."
            )
        paths = {layout.field_path(directory, field.key): field.row_bytes * schema.capacity for field in schema.fields}
        metas = layout.meta_files(directory, schema)
        note = None
        if adopted is not None:
            note, paths, metas = _adopting(adopted, paths, metas)
        hidden = directory / f"{layout.FOLDER}-{os.getpid()}-{threading.get_ident()}"
        with _attaching, files.Creation() as made, _alone(directory, made):
            _remove_unfinished(directory)
            if maker and maker_of(directory) == maker:
                store = cls._opened_or_attached(directory, "refuse")
                if store.schema != schema:
                    raise IncompatibleStore(
                        f"{str(directory)!r}: expected rows as in the first write of another process, got others: "
                        f"{schemas.differences(store.schema, schema)}."
                    )
                return store
            if replace:
                _remove_store(directory)
                for path in (*paths, *metas):
                    path.unlink(missing_ok=True)
            existing = [path for path in (directory / layout.FOLDER, *paths, *metas) if path.exists()]
            if existing:
                raise RuntimeError(occupied(directory, existing[0]))
            made.folder(hidden)
            if note is not None:  # first: should this process die, what was there stays
                made.text(hidden / layout.ADOPTED, note)
            made.text(hidden / layout.STORE, raw)  # first: should this process die, it says what else it has made
            _make_fields(made, paths, metas)
            _make_words(made, hidden, schema, maker, guest_of, begin)
            hidden.rename(directory / layout.FOLDER)  # from here on the folder is a store
            made.published(hidden, directory / layout.FOLDER)
            return cls._attach(schema, directory, schemas.fingerprint(raw), unclean="refuse")

    @classmethod
    def open(cls, directory: Path, *, unclean: str = "refuse") -> Store:
        """The store in a folder. Within a process every caller gets the same object.

        Raises:
            FileNotFoundError: there is no store.
            StoreInUse: it is being made or closed for seconds, or as many processes as can have it open.
            IncompatibleStore, CorruptStore, UncleanStore: it cannot be read as it is; nothing was changed.
        """
        directory = directory.absolute()
        _check_store(directory)
        with _attaching, _alone(directory):
            _check_store(directory)
            return cls._opened_or_attached(directory, unclean)

    @classmethod
    def _opened_or_attached(cls, directory: Path, unclean: str) -> Store:
        known = _opened(directory)
        if known is not None:
            return known
        path = directory / layout.FOLDER / layout.STORE
        raw = files.read_small(path, schemas.MAX_BYTES)
        return cls._attach(schemas.decode(raw, str(path)), directory, schemas.fingerprint(raw), unclean=unclean)

    @classmethod
    def _attach(cls, schema: Schema, directory: Path, fingerprint: int, *, unclean: str) -> Store:
        """The store in a folder whose description was read. The folder is locked."""
        folder = directory / layout.FOLDER
        alive, store = _Alive(directory), None
        try:
            control = _file_block(folder / layout.CONTROL, _native.control_bytes(schema.lanes))
            tickets = _file_block(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))
            segments = _segments_in(folder)
            if segments is None:
                tensors = [_file_field(directory, field, schema.capacity) for field in schema.fields]
            else:
                tensors = _segment_fields(folder, schema, segments, control)
            try:
                store = cls(schema, tensors, control, tickets, directory)
                store.has_files = segments is None
                participants = _native.Participants(
                    control.address, control.nbytes, tickets.address, tickets.nbytes, alive.fd
                )
            except ValueError as error:
                foreign = any(word in str(error) for word in ("format", "platform", "byte order"))
                kind = IncompatibleStore if foreign else CorruptStore
                raise kind(f"{folder}: {error}.") from error
            store._finalize_with(participants, alive)  # from here on to close it lets go of all that is taken
            core = store.core
            if (core.capacity, core.lanes) != (schema.capacity, schema.lanes) or core.schema_sum != fingerprint:
                raise CorruptStore(
                    f"{folder / layout.STORE}: expected the description this store was made with, got a changed one."
                )
            if _others_are_there(participants, directory):
                store._join(participants)
                store._attach_new_indexes()
                store._finish_scans(directory)  # whoever made an index may have died before it looked
            else:
                store._attach_first(participants, unclean)
            _register(directory, store)
        except BaseException:
            if store is not None:
                store.close()
            alive.release()
            raise
        return store

    def _finalize_with(self, participants: Any, alive: _Alive) -> None:
        self._alive, self._participants = alive, participants
        self._finalizer = weakref.finalize(
            self, _close, self.core, participants, alive, self._control, (self.directory, self.schema)
        )

    def _attach_first(self, participants: Any, unclean: str) -> None:
        """For the only process that has the store open: what others left is put in order."""
        assert self.directory is not None  # nobody else has it open
        core = self.core
        boot, last = _boot_id(), _last_boot_id(core)
        clean = last == "" or (core.clean and core.in_flight == 0)  # "": it was just made
        if not clean and not core.clean and last != boot and unclean != "accept":
            raise UncleanStore(
                f"open: the store in {str(self.directory)!r} was open when its machine went down, and nothing is promised "
                'of its rows. Use ReplayBuffer.open(dir, unclean="accept") to take it as it is.'
            )
        if clean:
            self._check_closed(self.directory)
        core.reset_locks(clean)
        self._attach_all_indexes(alone=True)
        if not clean:
            self.repair = Repair(*core.recover())
            for index in self.indexes.values():
                index.put_in_order()
        self._finish_scans(self.directory)
        core.boot_id = boot
        core.pid_namespace = _native.pid_namespace()
        core.clean = False  # before others see this process: should it die now, they may take it for alive, and write
        self._join(participants)

    def _check_closed(self, directory: Path) -> None:
        """What a store that was closed in order says of itself. Cost: O(lanes)."""
        try:
            self.core.check_closed()
        except CorruptStore as error:
            raise CorruptStore(f"{directory / layout.FOLDER / layout.CONTROL}: {error}") from None

    def _join(self, participants: Any) -> None:
        try:
            self.core.join(participants)
        except WriterStalled as error:
            raise StoreInUse(f"open: {str(self.directory)!r}: {error} Close it in one of them.") from error
        weak = weakref.ref(self)

        def attach() -> None:
            store = weak()
            if store is not None:
                store._attach_new_indexes()  # noqa: SLF001 - our own

        self.core.on_new_index(attach)

    def close(self) -> None:
        """Let go of it, with the storages around it; of a directory store, the last process marks it as closed in order. Repeatable.

        Of a temporary folder, the last one removes it. Tensors that were handed out stay valid, and so does what is :meth:`held`;
        whatever reads or writes rows or indexes raises ``RuntimeError``.
        """
        for owner in list(self.owners):
            owner.close()  # the last one comes back here
        finalizer = self._finalizer
        found = None if finalizer is None else finalizer.peek()
        if self.closed and found is None:
            return
        where = "" if self.directory is None else f" in {str(self.directory)!r}"
        why = f"the store{where} was closed. Use ReplayBuffer.open to go on with one in a folder."
        for one in (self, *self.indexes.values()):
            one.core = _Refusing(lambda: RuntimeError(why))
        self.closed = True
        if finalizer is not None and found is not None:
            _, close, arguments, _ = found
            close(*arguments)  # what an interrupt leaves is done by the next call, or when this is collected
            _forget(self)
            finalizer.detach()

    def remove(self) -> bool:
        """Close a directory store and remove its files. False: there are none any more, or another process has it open.

        Raises:
            StoreInUse: it was closed before, and somebody has opened it since.
        """
        if self.directory is None:
            return False
        self.close()
        if not (self.directory / layout.FOLDER).exists():
            return False
        with _alone(self.directory):
            if _others_have(self.directory):
                return False
            _remove_store(self.directory)
        with contextlib.suppress(OSError):
            self.directory.rmdir()
        return True

    def discard(self, owner: Any) -> bool:
        """Remove the store for its only one of the :attr:`owners`, which goes on without. False: there are others, here or in another
        process.
        """
        if any(other is not owner for other in self.owners):
            return False
        if self.directory is not None and not self.closed:
            with _alone(self.directory):
                if _others_are_there(self._participants, self.directory):
                    return False
                self.owners.discard(owner)
                self.close()
                erase(self.directory, self.schema)
        return True

    def release(self, owner: Any) -> None:
        """One of the :attr:`owners` is done with it; the last one closes it."""
        self.owners.discard(owner)
        if not self.owners:
            self.close()

    def held(self) -> Store:
        """The same store for a save in the background, which reads its rows to the end although it is closed meanwhile."""
        held = object.__new__(type(self))
        vars(held).update(vars(self))
        return held

    # ---- copies ------------------------------------------------------------------------------------------------------

    def detached(self) -> Saved:
        """What a copy of this object needs: where a directory store is, or the bytes of a private one."""
        if self.directory is not None:
            return Saved(None, self.directory, None, {})
        before = self._ticket_words().clone()
        fields = [tensor.clone() for tensor in self.tensors]
        tickets = self._tickets.tensor.clone()
        # A row that was written meanwhile may be torn: its copy is void.
        words = tickets[: 8 * self.capacity].view(torch.int64)
        words.copy_(torch.where(before == words, words, words | _VOID))
        indexes = {key: Copied(index.block.tensor.clone()) for key, index in self.indexes.items()}
        parts = [Copied(part) for part in (self._control.tensor.clone(), tickets, *fields)]
        return Saved(self.schema, None, parts, indexes)

    @staticmethod
    def reattach(saved: Saved) -> Store:
        """The store of a copied object: the same one for a directory, an independent one for private memory."""
        if saved.parts is None:
            assert saved.directory is not None  # one of the two is there
            return Store.open(saved.directory)
        schema = saved.schema
        assert schema is not None  # as detached() makes them
        control, tickets = _new_words(schema, 0)
        parts = [part.tensor for part in saved.parts]
        control.tensor.copy_(parts[0])
        tickets.tensor.copy_(parts[1])
        if any(not part.is_cpu for part in parts):
            store: Store = DeviceStore(schema, parts[2:], control, tickets)
        else:
            tensors = [_private_field(field, schema.capacity) for field in schema.fields]
            for tensor, part in zip(tensors, parts[2:], strict=True):
                tensor.copy_(part)
            store = Store(schema, tensors, control, tickets)
        store.core.recover()  # whoever was writing is not a writer of the copy
        for key, memory in saved.indexes.items():
            block = private_block(memory.tensor.numel())
            block.tensor.copy_(memory.tensor)
            INDEX_KINDS[key[1]].free_lock(block)  # whoever held it does not hold the copy's
            store._copied_indexes[key] = block
        return store

    def moved(self, directory: Path, maker: str, guest_of: Process | None) -> Store:
        """A store in a folder with the rows, cursors and indexes of this private one, which nobody must be writing to.

        Raises:
            OSError: no space. Nothing is left behind.
        """
        made = Store.create(self.schema, directory, maker=maker, guest_of=guest_of)
        try:
            for to, tensor in zip(made.tensors, self.tensors, strict=True):
                to.copy_(tensor)
            made.core.copy_state(self.core)
            for (name, kind), index in self.indexes.items():
                copied = index.block.tensor

                def fill(block: Block, copied: Tensor = copied, kind: str = kind) -> None:
                    block.tensor.copy_(copied)
                    INDEX_KINDS[kind].free_lock(block)

                made.lasting_index(name, kind, index.block.nbytes, fill)
        except BaseException:
            made.remove()
            raise
        return made

    # ---- its state ---------------------------------------------------------------------------------------------------

    def paused(self) -> AbstractContextManager[None]:
        """Inside nobody writes, in any process, and no write is under way. Re-entrant within a thread. Writers wait, bounded.

        Whoever reads goes on, and priorities may change.

        Raises:
            WriterStalled: somebody else has paused the store, or is writing, for 5 s.
        """
        return self._pausing_with((self._pausing,))

    def _pausing_with(self, locks: tuple[Any, ...]) -> AbstractContextManager[None]:
        hold: AbstractContextManager[None] = self.core.pausing(locks)
        return hold

    def state(self) -> StoreState:
        """What the store says of its rows now. Exact while it is :meth:`paused`; else rows written meanwhile are left out.

        Cost: O(capacity), a word per row.
        """
        clock, write_count = self.core.next_ticket, self.core.write_count
        lanes, numbers = self.lane_words(), torch.zeros(self.capacity, dtype=torch.int64, device="cpu")
        known = self.numbers_before(clock, lanes)
        numbers[: len(known)] = known
        return StoreState(lanes, numbers, clock, write_count)

    def rows_in_use(self, lanes: Tensor) -> int:
        """Of the ``lanes`` of a :class:`StoreState`: rows up to the last one that is inside an extent."""
        live = lanes[:, 1]
        ends = torch.arange(self.lanes, device="cpu") * self.lane_length + live
        return int(torch.where(live > 0, ends, 0).max())

    @property
    def base(self) -> int:
        """By how much tickets are larger than where the rows were saved that were loaded last: saved states are without it."""
        return 0 if self.replaced is None else self.replaced[1] - self.replaced[0]

    def lane_words(self) -> Tensor:
        """The ``lanes`` of a :class:`StoreState`. Cost: O(lanes)."""
        lanes = torch.zeros((self.lanes, 4), dtype=torch.int64, device="cpu")
        self.core.read_lanes(lanes.data_ptr())
        return lanes

    def numbers_before(self, clock: int, lanes: Tensor) -> Tensor:
        """Ticket numbers, int64, of the rows up to the last one in use when ``lanes`` were read.

        0 for a row that was written at ``clock`` or later, is not whole, or holds a step that its lane had already given up
        when ``lanes`` were read, because the writer that was to replace it died before it began.
        """
        rows = self.rows_in_use(lanes)
        numbers = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.core.read_numbers(clock, lanes.data_ptr(), numbers.data_ptr(), rows)
        return numbers

    def replace(self, state: StoreState, fill: Callable[[Sequence[Tensor]], object]) -> None:
        """Replace all rows: ``fill(tensors)`` may write to the :attr:`tensors` directly, while the store is empty and paused.

        Afterwards the rows are live as the state says, under new ticket numbers in the old order, so no earlier draw matches any
        more; indexes give them default priorities. Whatever is raised inside, or the process's death, leaves an empty store: also
        until it is no longer :meth:`paused`, where this is called inside of that.

        Args:
            state: as of a store with the same capacity and lanes.
            fill: writes the rows.

        Raises:
            ValueError: a state that no such store has. Nothing is changed.
            WriterStalled: as :meth:`paused`. Nothing is changed.
        """
        lanes, numbers = _as_rows(state.lanes, "replace"), _as_rows(state.numbers, "replace")
        if lanes.shape != (self.lanes, 4) or numbers.shape != (self.capacity,):
            raise ValueError(
                f"replace: expected {self.lanes} lanes and {self.capacity} rows, got shapes {list(lanes.shape)} and "
                f"{list(numbers.shape)}."
            )
        _native.check_state(self.lane_length, state.clock, lanes.data_ptr(), self.lanes, numbers.data_ptr())
        # No plan of a writer that looks first may outlive the rows it is about.
        with self.placing(), self.paused(), self.core.replacing():
            fill(self.tensors)
            self._refilled()
            self.core.replaced(state.clock, lanes.data_ptr(), numbers.data_ptr())
            self.core.write_count = state.write_count
            for (_, kind), index in self.indexes.items():
                self._scan(index, kind)

    def _refilled(self) -> None:
        """The rows were replaced, past the core."""

    # ---- writers that look first -------------------------------------------------------------------------------------

    def placing(self) -> AbstractContextManager[None]:
        """Held from placing to writing by writers that look for rows, so that no two choose the same one. Re-entrant.

        Raises:
            WriterStalled: another process has held it for 5 s.
        """
        hold: AbstractContextManager[None] = self.core.placing((self._placing,), self.directory is not None)
        return hold

    # ---- indexes ---------------------------------------------------------------------------------------------------

    def _ticket_words(self) -> Tensor:
        """int64 ``[capacity]``: the tickets, without the laps that lie behind them. A view."""
        return self._tickets.tensor[: 8 * self.capacity].view(torch.int64)

    @property
    def words(self) -> tuple[Tensor, Tensor]:
        """The memory of control block and tickets: whoever looks at them natively keeps it."""
        return self._control.tensor, self._tickets.tensor

    def lasting_index(self, name: str, kind: str, nbytes: int, make: Callable[[Block], None]) -> tuple[Any, bool]:
        """The index of that name and kind, and whether it was made just now: one that says more than the rows do.

        In a directory it is a file ``.engram/indexes/<name>/<kind>``, which stays. From then on every write is told to it.

        Args:
            name: of the index. kind: what it is.
            nbytes: of its memory.
            make: formats zeroed memory.

        Raises:
            IncompatibleStore: a file of another size.
            OSError: no space.
        """
        known = self.indexes.get((name, kind))
        if known is not None and not self._lacks_scan(name, kind):
            return known, False
        if self.directory is not None:
            return self._lasting_index(self.directory, name, kind, nbytes, make)
        with self._indexing:
            known = self.indexes.get((name, kind))
            if known is not None:
                return known, False
            copied = self._copied_indexes.pop((name, kind), None)
            if copied is not None:
                block = copied
            else:
                block = private_block(nbytes)
                make(block)
            index = INDEX_KINDS[kind](block, self)
            self.core.attach(index.core)
            try:
                self._scan(index, kind)  # also what a copy says of some rows may be old
            finally:  # other threads find it when it knows all rows
                self.indexes[name, kind] = index
            return index, copied is None

    def _lasting_index(
        self, directory: Path, name: str, kind: str, nbytes: int, make: Callable[[Block], None]
    ) -> tuple[Any, bool]:
        with _alone(directory):
            self._attach_new_indexes()
            self._finish_scans(directory)
            with self._indexing:
                known = self.indexes.get((name, kind))
                if known is not None:
                    if known.block.nbytes != nbytes:
                        raise IncompatibleStore(f"index {name!r}: expected {nbytes} bytes, got {known.block.nbytes}.")
                    return known, False
                block = _index_file(directory / layout.FOLDER / layout.INDEXES / name, kind, nbytes, make)
                # In this order: from the new epoch on every write of every process is told to it, and what was written
                # before is there when it looks around.
                index = self._attach_index(name, kind, block)
                self.core.knows_indexes(self.core.next_index_epoch())
                self._finish_scans(directory)
                return index, True

    def _finish_scans(self, directory: Path) -> None:
        """Show all rows to indexes that have not seen them. The folder is locked."""
        for (name, kind), index in self.indexes.items():
            if self._lacks_scan(name, kind):
                self._scan(index, kind)
                with contextlib.suppress(OSError):  # then somebody lets it look once more
                    _unscanned(directory / layout.FOLDER / layout.INDEXES / name / kind).unlink()

    def _lacks_scan(self, name: str, kind: str) -> bool:
        """Whether an index in a directory has not looked at all rows yet: its maker is at it, or died."""
        if self.directory is None:
            return False
        return _unscanned(self.directory / layout.FOLDER / layout.INDEXES / name / kind).exists()

    def _attach_index(self, name: str, kind: str, block: Block) -> Any:
        index = INDEX_KINDS[kind](block, self)
        self.core.attach(index.core)
        self.indexes[name, kind] = index
        return index

    def _scan(self, index: Any, kind: str) -> None:
        try:
            _progress.watch(_scan(index.core, self.capacity), f"giving rows {kind}")
        except BaseException:  # Ctrl-C: an index scanned by half would hide the other rows for good
            index.core.scan(0, self.capacity)
            raise

    def _attach_all_indexes(self, *, alone: bool = False) -> None:
        """Those in the directory: whoever writes keeps them, whatever sampler he has. ``alone``: nobody else has it open.

        Raises:
            IncompatibleStore: one of a kind that is not known here, or with other contents than its kind has.
        """
        assert self.directory is not None
        for path in sorted((self.directory / layout.FOLDER / layout.INDEXES).glob("*/[!.]*")):
            name, kind = path.parent.name, path.name
            if kind not in INDEX_KINDS:
                raise IncompatibleStore(
                    f"{path}: expected one of the kinds {sorted(INDEX_KINDS)}, got an index that a newer engram has made."
                )
            if (name, kind) not in self.indexes:
                block = _file_block(path, path.stat().st_size)
                if alone:
                    INDEX_KINDS[kind].free_lock(block)
                self._attach_index(name, kind, block)

    def all_indexes(self) -> dict[tuple[str, str], Any]:
        """The :attr:`indexes`, with those that other processes have made since."""
        if self.directory is not None and not self.closed:
            with _alone(self.directory):
                self._attach_new_indexes()
        return self.indexes

    def _attach_new_indexes(self) -> None:
        """Those that another process has made since we last looked."""
        with self._indexing:
            epoch = self.core.index_epoch
            self._attach_all_indexes()
            self.core.knows_indexes(epoch)

    # ---- what is there ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Rows."""
        return self.schema.capacity

    @property
    def lanes(self) -> int:
        """Rings that the rows are divided into."""
        return self.schema.lanes

    @property
    def lane_length(self) -> int:
        """Rows of a lane."""
        return self.schema.capacity // self.schema.lanes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, when all are written."""
        return self.schema.row_bytes * self.schema.capacity

    def extent(self) -> Extent:
        """What is live now. Cost: O(lanes); O(capacity) while rows left by a dead writer have not been overwritten."""
        filled, seam = self.core.extent()
        holes = torch.from_numpy(self.core.holes()) if self.core.void_rows else None
        return Extent(self.schema.capacity, filled, seam, holes)

    def index(self, name: str, kind: str, config: Any, make: Callable[[], Any]) -> Any:
        """The index of a name and kind; where there is none, ``make()`` makes it.

        Args:
            name: as the user calls it.
            kind: what it is: indexes of different kinds do not meet.
            config: what it was made for; compared with ``==``.
            make: makes it and attaches it to :attr:`core`. Called at most once, others wait for it.

        Raises:
            IncompatibleStore: the index of that name was made for something else.
        """
        with self._indexes_lock:
            if (name, kind) not in self._indexes:
                self._indexes[name, kind] = (config, make())
            known, index = self._indexes[name, kind]
        if known != config:
            raise IncompatibleStore(
                f"index {name!r}: expected the {kind} of {known}, as it was made, got {config}. Give another index=… name."
            )
        return index

    def count_windows(self, windows: Mapping[str, int]) -> None:
        """Let tables of trajectories count windows of these lengths: those that are there, and those to come."""
        with self._indexes_lock:
            self.windows = {**self.windows, **windows}
            for (name, _), (_, table) in self._indexes.items():
                table.count(self.windows[name])

    def before_fork(self) -> files.Descriptor | None:
        """A lock that parent and child have together, until the child is a participant of its own."""
        if self.directory is None or self.closed:
            return None
        try:
            fd = files.Descriptor.open(self.directory / layout.FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # it was removed
            return None
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    @staticmethod
    def forked(fd: files.Descriptor | None) -> None:
        """Let go of it in one of the two."""
        if fd is not None:
            fd.close()

    def after_fork(self) -> None:
        """In a child: threads of the parent that were writing to private memory do not exist here; a directory is shared."""
        if self.closed:
            return
        if self.directory is None:
            self.core.forget_holds()
            if self.core.in_flight or self.core.paused:
                self.core.recover()
        elif self._alive is not None:
            self._join_again(self.directory, self._alive)

    def _join_again(self, directory: Path, alive: _Alive) -> None:
        """In a forked child: be a participant beside the parent. Its descriptors and maps are there, its locks are not."""
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()
        try:
            _check_store(directory)
            participants = _native.Participants(
                self._control.address, self._control.nbytes, self._tickets.address, self._tickets.nbytes, alive.fd
            )
            self.core.forget_holds()
            self._join(participants)
        except (OSError, StoreInUse) as error:
            _forget(self)
            why = f"the store in {str(directory)!r} could not be shared with this forked process: {error}"

            def lost() -> ForkedHandle:
                return ForkedHandle(why)

            self.core = _Refusing(lost)
            return
        alive.pid = os.getpid()
        self._finalize_with(participants, alive)

    @staticmethod
    def room(nbytes: int) -> Tensor:
        """Zeroed private memory for an index, as bytes; pages are taken when they are first touched."""
        return private_block(nbytes).tensor

    def on_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[Tensor]]:
        """Fields where the core reads them, for an index: their numbers there, and CPU tensors ``[C, *row shape]``."""
        return tuple(numbers), [self.tensors[number] for number in numbers]

    # ---- writing ---------------------------------------------------------------------------------------------------

    def append_row(self, lane: int, columns: Sequence[Tensor]) -> tuple[int, int]:
        """Append one row: ``(row, ticket number)``. Columns: contiguous CPU tensors of a row's shape."""
        placed: tuple[int, int] = self.core.append_row(lane, tuple([column.data_ptr() for column in columns]))
        return placed

    def write(self, plan: WritePlan, columns: Sequence[Tensor], n: int) -> Write:
        """Write what the plan keeps of ``n`` rows where it says. Columns: contiguous CPU tensors ``[n, *row shape]``, one per
        field.

        Of more rows than a lane is long the last ones survive.

        Raises:
            WriterStalled: another writer held a row for 5 s; the rows before it are written.
            RowError: a planned row is outside the store. Nothing is written.
        """
        return self._write(plan, n, self._which, tuple([column.data_ptr() for column in columns]))

    def _write(self, plan: WritePlan, n: int, which: tuple[int, ...], addresses: tuple[int, ...]) -> Write:
        if plan.rows is not None:
            return self._write_by_number(plan, plan.rows, n, which, addresses)
        rows = _native.empty_rows(n)
        if isinstance(plan.lane, int):
            first = self.core.append(plan.lane, n, addresses, rows.data_ptr())
        else:
            assert plan.lane is not None  # a WritePlan has rows or a lane
            lane = _as_rows(plan.lane, "extend")
            first = self.core.append_by_lane(lane.data_ptr(), n, addresses, rows.data_ptr())
        return Write(rows, first)

    def _write_by_number(
        self, plan: WritePlan, planned: Tensor, n: int, which: tuple[int, ...], addresses: tuple[int, ...]
    ) -> Write:
        if plan.kept is None:
            rows, pick = _native.empty_rows(n).copy_(planned), 0  # the plan's own tensor is not handed out
        else:
            rows, kept = _as_rows(planned, "write"), _as_rows(plan.kept, "write")
            if rows.shape != kept.shape:
                raise RuntimeError(f"write: expected {len(kept)} rows, one for each that is kept, got {len(rows)}.")
            if not len(rows):  # no index need hear of it
                return Write(plan.reported(rows, n), 0)
            pick = kept.data_ptr()
        try:
            first = self.core.scatter(rows.data_ptr(), len(rows), which, addresses, True, pick, n)
        except IndexError as error:
            raise RowError(f"write: {error}.") from error
        return Write(plan.reported(rows, n), first)

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        """Replace fields ``which`` of live rows. Cursors and extent stay; the rows get new tickets.

        Of a row named twice the last entry wins.

        Raises:
            RowError: a row is not live. Nothing is written.
        """
        rows = _as_rows(rows, "edit")
        addresses = tuple([column.data_ptr() for column in columns])
        try:
            first = self.core.scatter(rows.data_ptr(), len(rows), tuple(which), addresses, False)
        except IndexError as error:
            raise RowError(f"edit: {error}. Only rows that were written can be edited.") from error
        return Write(rows, first)

    def empty(self, *, keep_write_count: bool) -> None:
        """Forget all rows; the memory stays, lanes begin again at their first row, no earlier ticket matches any more."""
        self.core.empty(keep_write_count)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[Tensor]:
        """Uninitialised CPU tensors for ``n`` rows of every field."""
        tensors: list[Tensor] = self.layout.allocate(n)
        return tensors

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        """Copy rows out: ``(columns, moved)``.

        Args:
            rows: int64 ``[B]``, CPU.
            expected: int64 ``[B]`` ticket numbers that the rows must still have.
            which: fields to read; all by default.

        Returns:
            One tensor ``[B, *row shape]`` per field, and the positions whose row was not whole, changed during the copy or
            has another ticket: their content is unspecified.

        Raises:
            RowError: a row is outside ``[0, capacity)``.
        """
        rows = _as_rows(rows, "read")
        n = rows.numel()
        if expected is not None and expected.shape != rows.shape:
            raise RuntimeError(f"read: expected one ticket per row, {list(rows.shape)}, got {list(expected.shape)}.")
        wanted = 0
        if expected is not None:
            expected = _as_rows(expected, "read")
            wanted = expected.data_ptr()
        if which is None and self.is_native:
            try:
                taken: tuple[list[Tensor], list[int]] = self.core.take(self.layout, rows.data_ptr(), n, wanted)
            except IndexError as error:
                raise RowError(f"read: {error}.") from error
            return taken
        if which is None:
            which = self._which
            columns = self.allocate(n)
        else:
            fields = [self.schema.fields[f] for f in which]
            columns = [torch.empty((n, *f.shape), dtype=torch_dtype(f), device="cpu") for f in fields]
        addresses = tuple([column.data_ptr() for column in columns])
        try:
            return columns, self.core.gather(rows.data_ptr(), n, tuple(which), addresses, wanted, 0)
        except IndexError as error:
            raise RowError(f"read: {error}.") from error

    def copy_rows(self, rows: Tensor, expected: Tensor, columns: Sequence[Tensor]) -> list[int]:
        """Copy rows into given memory: the positions whose row has another ticket, or had when it was copied.

        Args:
            rows: int64 ``[n]``, CPU. expected: int64 ``[n]`` ticket numbers.
            columns: uint8 ``[n, row bytes]``, CPU, one per field.
        """
        addresses = tuple([column.data_ptr() for column in columns])
        moved: list[int] = self.core.gather(rows.data_ptr(), len(rows), self._which, addresses, expected.data_ptr(), 0)
        return moved

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        """Draw ``n`` live rows uniformly, with replacement, and copy them: one native call.

        Args:
            key: 64 random bits, from which everything follows.
            n: rows.
            with_rows: return the rows drawn, int64 ``[n]``, behind the fields.
            with_numbers: return their ticket numbers, int64 ``[n]``, behind those.

        Returns:
            One tensor ``[n, *row shape]`` per field.

        Raises:
            NoSampleable: no row is live.
        """
        try:
            drawn: list[Tensor] = self.core.draw_uniform(self.layout, key.address, n, with_rows, with_numbers)
        except _native.NothingLive as error:
            raise NoSampleable(f"sample: {error}. Add data before sampling.") from error
        return drawn

    def read_ranked(
        self, key: int, size: int, start: int, n: int, *, shuffle: bool, with_numbers: bool = False
    ) -> list[Tensor]:
        """Copy part of a walk over ``size`` live rows, each of which comes once: one native call.

        Args:
            key: of the order; with ``shuffle=False`` it is that of the rows.
            size: live rows of the whole walk.
            start, n: ``[start, start + n)`` of the walk.
            with_numbers: return their ticket numbers, int64 ``[n]``, too.

        Returns:
            One tensor ``[n, *row shape]`` per field, then the rows, int64 ``[n]``.

        Raises:
            NoSampleable: there are fewer live rows now.
            WriterStalled: a row moved at every try.
        """
        try:
            walked: list[Tensor] = self.core.draw_ranked(self.layout, key, size, start, n, shuffle, with_numbers)
        except _native.NothingLive as error:
            raise NoSampleable(f"sample: {error}. Add data before sampling.") from error
        return walked

    def changes(self, since: int = 0) -> Changes:
        """Rows that were written or edited since a ticket, by any process.

        For samplers of your own that keep something per row: ``observe`` tells them of the writes of their process alone. Rows
        that were emptied, or left half written by a process that died, do not come: :meth:`numbers_of` says -1 of them.

        Args:
            since: a ticket number, such as :attr:`Changes.next` of the call before; 0: all live rows.

        Raises:
            WriterStalled: another writer has been about to write for 5 s.

        Cost: O(capacity), one word per row: about a millisecond per million rows. Releases the GIL.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(2))
        >>> seen = rb.storage.store.changes()
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.store.changes(seen.next).rows.tolist()
        [2, 0]
        """
        rows, numbers, following = self.core.changes(max(since, 0))
        return Changes(torch.from_numpy(rows), torch.from_numpy(numbers), following)

    def numbers_of(self, rows: Tensor) -> Tensor:
        """Ticket numbers of rows as they are now, int64 ``[B]``; -1 for a row that is not live or outside the store."""
        rows = _as_rows(rows, "numbers_of")
        numbers = torch.empty_like(rows)
        self.core.tickets_of(rows.data_ptr(), rows.numel(), numbers.data_ptr())
        return numbers

    def hold_nothing(self, rows: Tensor) -> Tensor:
        """Of rows inside the store: whether they are unused or void, and not just being written. bool ``[B]``"""
        states = self._ticket_words()[rows] & 3
        return (states == _UNUSED) | (states == _VOID)


class DeviceStore(Store):
    """Rows on an accelerator, moved by torch; tickets and cursors stay on the host.

    Within one process only. A lock orders reads and writes: torch cannot look at tickets between copies. Fields that an index
    reads have a copy on the host, which the core moves before the index hears of it: what a store on the CPU does with all.
    """

    is_native = False

    def __init__(self, schema: Schema, tensors: Sequence[Tensor], control: Block, tickets: Block) -> None:
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._lock = _fork.rlock()
        #: By number of the field, in the order in which the core has them.
        self._copies: dict[int, Tensor] = {}
        super().__init__(schema, tensors, control, tickets)
        self.layout = _native.Layout([])

    @classmethod
    def on(cls, schema: Schema, device: torch.device) -> DeviceStore:
        """A store on ``device``, its memory taken and zeroed at once."""
        control, tickets = _new_words(schema, 0)
        tensors = [
            torch.zeros((schema.capacity, *field.shape), dtype=torch_dtype(field), device=device)
            for field in schema.fields
        ]
        return cls(schema, tensors, control, tickets)

    def _native_fields(self) -> list[tuple[Tensor, Field]]:
        return []

    def paused(self) -> AbstractContextManager[None]:
        return self._pausing_with((self._lock, self._pausing))  # in between, rows have tickets already and no data yet

    def on_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[Tensor]]:
        """As :meth:`Store.on_host`. A field that is asked for first is copied; from then on every write of it is, too."""
        with self._lock:
            for number in numbers:
                if number not in self._copies:
                    field = self.schema.fields[number]
                    copy = _private_field(field, self.capacity).copy_(self.tensors[number])
                    self.core.add_field(copy.data_ptr(), field.row_bytes)
                    self._copies[number] = copy
            self.layout = _native.Layout(dlpack_specs([self.schema.fields[number] for number in self._copies]))
            order = list(self._copies)
            return tuple(order.index(number) for number in numbers), [self._copies[number] for number in numbers]

    def _refilled(self) -> None:
        for number, copy in self._copies.items():
            copy.copy_(self.tensors[number])

    def _for_core(self, which: Sequence[int], columns: Sequence[Tensor]) -> tuple[tuple[int, ...], list[Tensor]]:
        """What the core has of some fields: their numbers there, in order, and the columns as it reads them."""
        given = dict(zip(which, columns, strict=True))
        there = [(place, given[number]) for place, number in enumerate(self._copies) if number in given]
        return tuple(place for place, _ in there), [column.detach().to("cpu").contiguous() for _, column in there]

    def append_row(self, lane: int, columns: Sequence[Tensor]) -> tuple[int, int]:
        with self._lock:
            row, number = super().append_row(lane, self._for_core(self._which, columns)[1])
            for tensor, column in zip(self.tensors, columns, strict=True):
                tensor[row] = column.detach()
        return row, number

    def write(self, plan: WritePlan, columns: Sequence[Tensor], n: int) -> Write:
        fields = self.schema.fields
        columns = [
            column.reshape(n, *field.shape) for column, field in zip(columns, fields, strict=True)
        ]  # perhaps one row
        with self._lock:
            filled, _ = self.core.extent()
            which, copied = self._for_core(self._which, columns)
            write = self._write(plan, n, which, tuple([column.data_ptr() for column in copied]))
            rows = write.rows
            if plan.rows is not None:
                self._clear_gaps(filled)
            if plan.kept is not None:
                rows, columns = rows[plan.kept], [column[plan.kept.to(column.device)] for column in columns]
            self._put(rows, self._which, columns)
        return write

    def _clear_gaps(self, filled: Sequence[int]) -> None:
        """Rows that became live because a row above them was written hold zeros."""
        for lane, (before, now) in enumerate(zip(filled, self.core.extent()[0], strict=True)):
            start = lane * self.lane_length
            for tensor in self.tensors:
                tensor[start + before : start + now].zero_()

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        with self._lock:
            write = super().edit(rows, *self._for_core(which, columns))
            self._put(rows, which, columns)
        return write

    def _put(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> None:
        # Of a row written twice the last entry wins; index_put leaves that open.
        flipped = rows.flip(0)
        unique, inverse = torch.unique(flipped, return_inverse=True)
        last = torch.full_like(unique, len(rows)).scatter_reduce_(
            0, inverse, torch.arange(len(rows), device="cpu"), "amin"
        )
        source = (len(rows) - 1 - last).to(self.device)
        target = unique.to(self.device)
        for f, column in zip(which, columns, strict=True):
            self.tensors[f][target] = column.detach().to(self.device)[source]

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        with self._lock:
            _, moved = super().read(rows, expected=expected, which=())
            return self._take(rows, self._which if which is None else which), moved

    def copy_rows(self, rows: Tensor, expected: Tensor, columns: Sequence[Tensor]) -> list[int]:
        found, moved = self.read(rows, expected=expected)
        for column, value in zip(columns, found, strict=True):
            column.copy_(value.cpu().reshape(len(rows), -1).view(torch.uint8).view(column.shape))
        return moved

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        with self._lock:
            rows, *numbers = super().sample_uniform(key, n, True, with_numbers)[len(self._copies) :]
            columns = self._take(rows, self._which)
        return [*columns, *[rows] * with_rows, *(tickets.to(self.device) for tickets in numbers)]

    def _take(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        index = rows.to(self.device)
        return [self.tensors[f].index_select(0, index) for f in which]


# ---- words, locks and the stores of this process ---------------------------------------------------------------------


def _new_words(schema: Schema, fingerprint: int) -> tuple[Block, Block]:
    control = private_block(_native.control_bytes(schema.lanes))
    _native.format_control(control.address, control.nbytes, schema.capacity, schema.lanes, fingerprint)
    return control, private_block(layout.tickets_bytes(schema.capacity))


def skip_numbers(core: Any, given: int) -> None:
    """Let a new store begin behind that many ticket numbers, so that no draw of before matches: an emptying takes one."""
    for _ in range(given):
        core.empty(False)


def _adopting(
    adopted: Sequence[Piece | None], paths: Mapping[Path, int], metas: Mapping[Path, bytes]
) -> tuple[bytes, dict[Path, int], dict[Path, bytes]]:
    """What a store notes of rows that were there before it, and the files of fields and descriptions that are to be made.

    Raises:
        CorruptStore: a file of another size. OSError: no space, no permission.
    """
    if any(piece is not None and not piece.named for piece in adopted):
        segments = [None if piece is None else piece[2:] for piece in adopted]
        return json.dumps({"segments": segments}).encode(), {}, {}
    for path, nbytes in paths.items():
        if nbytes:
            files.take_space(path, nbytes)
    return b'{"segments": null}', {}, {path: text for path, text in metas.items() if not path.exists()}


def _make_fields(made: files.Creation, paths: Mapping[Path, int], metas: Mapping[Path, bytes]) -> None:
    for path, nbytes in paths.items():
        if nbytes:
            made.folder(path.parent)
            made.file(path, nbytes)
    for path, text in metas.items():
        made.folder(path.parent)
        made.text(path, text)


def _make_words(
    made: files.Creation,
    folder: Path,
    schema: Schema,
    maker: str,
    guest_of: Process | None,
    begin: Callable[[Any], None],
) -> None:
    """The files of a new store beside its description: that of its rows is there already."""
    made.file(folder / layout.CONTROL, _native.control_bytes(schema.lanes))
    made.file(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))
    made.text(folder / layout.ALIVE, b"")
    made.text(folder / layout.MAKER, maker.encode())
    if guest_of is not None:
        made.text(folder / layout.TEMPORARY, f"{guest_of.pid} {guest_of.start_time}".encode().ljust(len(_NOBODY)))
    made.text(folder / layout.BUFFER, layout.NO_RECORD)
    control = _file_block(folder / layout.CONTROL, _native.control_bytes(schema.lanes))
    tickets = _file_block(folder / layout.TICKETS, layout.tickets_bytes(schema.capacity))
    fingerprint = schemas.fingerprint(schemas.encode(schema))
    _native.format_control(control.address, control.nbytes, schema.capacity, schema.lanes, fingerprint)
    begin(_native.Store(control.address, control.nbytes, tickets.address, tickets.nbytes, (), ()))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _last_boot_id(core: Any) -> str:
    """The boot that a store was last opened in, "" for none yet."""
    try:
        return str(core.boot_id)
    except UnicodeDecodeError:
        return "unreadable"


class _Refusing:
    """In place of a core that must not be used any more."""

    def __init__(self, error: Callable[[], RuntimeError]) -> None:
        vars(self)["_error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._error()


def _alone(directory: Path, made: files.Creation | None = None, wait_s: float | None = None) -> Any:
    """While a store is made, opened or closed: no other process or thread does that in the folder.

    A context manager. A thread that is in it may come in again: a collected store is closed in the middle of something.

    Args:
        directory: the folder.
        made: makes it, if it is not there.
        wait_s: default a minute; 0.0: at once.

    Raises (when entered):
        StoreInUse: somebody else is at it. OSError: it is not there.
    """
    wait_s = _WAIT_S if wait_s is None else wait_s
    if made is not None:
        made.folder(directory)

    def busy() -> StoreInUse:
        return StoreInUse(
            f"{str(directory)!r}: somebody has been making, opening or closing the store for {wait_s:g} s."
        )

    return _native.folder_lock(directory, wait_s, busy)


class _Alive:
    """``.engram/alive``, in which the core locks one byte for as long as this process has the store open.

    Closing any descriptor of the file drops that lock: a process opens it once.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / layout.FOLDER / layout.ALIVE
        files.check_size(path, 0)
        self.fd = files.open_regular(path, os.O_RDWR)
        self.pid = os.getpid()

    def anybody(self) -> bool:
        """Whether another process has the store open."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return True
        return False

    def release(self) -> None:
        self.fd.close()


def _others_have(directory: Path) -> bool:
    """Whether another process has the store open that this one has not."""
    try:
        alive = _Alive(directory)
    except (FileNotFoundError, CorruptStore):
        return False
    try:
        return alive.anybody()
    finally:
        alive.release()


def _check_store(directory: Path) -> None:
    if not (directory / layout.FOLDER).exists():
        raise FileNotFoundError(
            f"open: expected a store in {str(directory)!r} (a folder with {layout.FOLDER}/{layout.STORE}), found none."
        )


def _schema_in(directory: Path) -> Schema:
    path = directory / layout.FOLDER / layout.STORE
    return schemas.decode(files.read_small(path, schemas.MAX_BYTES), str(path))


def maker_of(directory: Path) -> str:
    """The ``maker`` of the store in a folder; empty where there is none."""
    try:
        return (directory / layout.FOLDER / layout.MAKER).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


#: Held while a store is made or opened, so that two threads do not attach to one folder twice.
_attaching = _fork.rlock()
_registry: weakref.WeakValueDictionary[tuple[int, int], Store] = weakref.WeakValueDictionary()
_registry_lock = _fork.lock()


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(directory / layout.FOLDER)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _opened(directory: Path) -> Store | None:
    """The store that this process already has open there: closing a second descriptor would drop its lock."""
    identity = _identity(directory)
    with _registry_lock:
        return _registry.get(identity) if identity is not None else None


def _register(directory: Path, store: Store) -> None:
    identity = _identity(directory)
    assert identity is not None  # just attached
    with _registry_lock:
        _registry[identity] = store


def _forget(store: Store) -> None:
    with _registry_lock:
        for identity, known in list(_registry.items()):
            if known is store:
                del _registry[identity]


def _close(core: Any, participants: Any, alive: _Alive, control: Block, place: tuple[Path, Schema]) -> None:
    """Finalizer of a directory store. ``control`` keeps the words mapped until it ran."""
    if alive.pid != os.getpid():
        return  # a forked child that could not join
    directory, schema = place
    try:
        with _alone(directory):
            last = participants.joined and not _others_are_there(participants, directory)
            if last:
                core.reclaim()
                core.clean = core.in_flight == 0  # a thread may be writing still: then the next open looks at the rows
            if participants.joined:
                participants.leave()
                _leave_temporary(directory, schema if last else None)
    except (FileNotFoundError, StoreInUse):  # removed by somebody; or who comes next finds out that we are gone
        pass
    finally:
        participants.leave()
        del control
        alive.release()  # behind that: the descriptor's number may be another file's at once


def _others_are_there(participants: Any, directory: Path) -> bool:
    """Whether another process has the store open. Waits for those that are just being forked."""
    with files.Descriptor.open(directory / layout.FOLDER, os.O_RDONLY | os.O_DIRECTORY) as fd:
        deadline = time.monotonic() + _WAIT_S
        while not participants.others:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return True
                time.sleep(0.001)
            else:
                return bool(participants.others)  # who was being forked when we first looked has joined
    return True


def _host_of(directory: Path) -> Process | None:
    """The process that a temporary store was made for; None: it is not temporary."""
    try:
        pid, start_time = (directory / layout.FOLDER / layout.TEMPORARY).read_text().split()
        return Process(int(pid), int(start_time))
    except (OSError, ValueError):
        return None


def _leave_temporary(directory: Path, schema: Schema | None) -> None:
    """This process needs a store no more: a temporary one is removed, unless others have it open (no ``schema``), or the
    process that it was made for may still come.
    """
    host = _host_of(directory)
    if host is None:
        return
    ours = host == Process.this()
    if schema is not None and (ours or not host.runs()):
        erase(directory, schema)
        with contextlib.suppress(OSError):
            directory.rmdir()
    elif ours:
        files.overwrite(directory / layout.FOLDER / layout.TEMPORARY, _NOBODY)


def shared_memory() -> Path:
    """Where files lie in RAM, for all processes of this machine; else the folder for temporary files."""
    place = Path("/dev/shm")  # noqa: S108 - Linux has it there
    return place if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else Path(tempfile.gettempdir()).absolute()


def sweep_shared_memory() -> None:
    """Remove shared stores of this user all of whose processes died."""
    for directory in shared_memory().glob("engram-*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid():
                forget_temporary(
                    directory, maker_of(directory), wait_s=0.0
                )  # who is at it lives: then it is no remnant


def forget_temporary(directory: Path, maker: str, *, wait_s: float | None = None) -> None:
    """For the process that a temporary store was made for, which needs it no more."""
    with contextlib.suppress(OSError, StoreInUse, CorruptStore, IncompatibleStore):
        if maker_of(directory) != maker or _opened(directory) is not None:
            return  # who has it open removes it
        with _alone(directory, wait_s=wait_s):
            if not (directory / layout.FOLDER).exists():  # whoever was making it died
                _remove_unfinished(directory)
                if time.time() - directory.stat().st_mtime > _WAIT_S:  # else somebody may be about to lock it
                    directory.rmdir()
                return
            schema = _schema_in(directory)
            _leave_temporary(directory, None if _others_have(directory) else schema)


def erase(directory: Path, schema: Schema) -> None:
    """Remove the files of a store, and folders in it that are empty then. What else lies there is not ours and stays."""
    hidden = directory / f"{layout.FOLDER}-{os.getpid()}-{threading.get_ident()}"
    with contextlib.suppress(OSError):
        (directory / layout.FOLDER).rename(hidden)  # should this process die, it says what else there is
    if _erase_fields(directory, schema, hidden):  # else whoever comes next tries again
        shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(directory / layout.FOLDER, ignore_errors=True)


def _erase_fields(directory: Path, schema: Schema, hidden: Path) -> bool:
    """Remove the files of a store that was in ``hidden``, but for those that were there before it. Whether all are gone."""
    if (hidden / layout.ADOPTED).exists():
        return True
    paths = [layout.field_path(directory, field.key) for field in schema.fields]
    paths += layout.meta_files(directory, schema)
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in sorted({path.parent for path in paths} - {directory}, key=lambda folder: -len(folder.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not any(path.exists() for path in paths)


def _remove_unfinished(directory: Path) -> None:
    """What somebody had made of a store when he died. The folder is locked, so that nobody is still making one."""
    for hidden in directory.glob(f"{layout.FOLDER}-*"):
        gone = True
        with contextlib.suppress(CorruptStore, IncompatibleStore):  # then he had come no further
            path = hidden / layout.STORE
            gone = _erase_fields(
                directory, schemas.decode(files.read_small(path, schemas.MAX_BYTES), str(path)), hidden
            )
        if gone:
            shutil.rmtree(hidden, ignore_errors=True)


def _remove_store(directory: Path) -> None:
    """Remove a store that nobody has open."""
    if not (directory / layout.FOLDER).exists():
        return
    if _opened(directory) is not None:
        raise StoreInUse(
            f"expected a store that nobody has open, but this process has {str(directory)!r}. Close it first."
        )
    if _others_have(directory):
        raise StoreInUse(
            f"expected a store that nobody has open, but another process has {str(directory)!r}. Close it there first."
        )
    try:
        schema = _schema_in(directory)
    except (CorruptStore, IncompatibleStore):
        shutil.rmtree(directory / layout.FOLDER)  # its fields are not known: those of other names stay
    else:
        erase(directory, schema)


def occupied(directory: Path, existing: Path) -> str:
    """Why no store can be made in a folder: what lies there already."""
    if existing.name == layout.FOLDER:
        return (
            f"LazyMemmapStorage: scratch_dir={str(directory)!r} already holds a store. Use ReplayBuffer.open({str(directory)!r}) "
            "to go on with it. (existsok=True erases it, with all its rows.)"
        )
    return (
        f"LazyMemmapStorage: scratch_dir={str(directory)!r}: expected a folder without data of the same name, found "
        f"{str(existing)!r}. Choose another folder. (existsok=True erases what is found.)"
    )
