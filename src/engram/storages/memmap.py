"""Rows in a directory, memory-mapped: they outlive the process."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Unpack

import torch

from engram._support import checks, tensordicts, unsupported
from engram.errors import IncompatibleCheckpoint, IncompatibleStore
from engram.format import layout
from engram.format import schema as schemas
from engram.storages import _base, _geometry, _home, _ragged_structure, _structure, _types, own, ragged
from engram.store import lifetime, opening
from engram.store.store import Store


class LaterMemmapArguments(unsupported.TracingArguments, total=False):
    """As those, of this storage."""

    shared_init: Annotated[object, unsupported.Later("rb.share()", (True,))]


class MemmapArguments(LaterMemmapArguments, ragged.RaggedArguments, total=False):
    """As those, and what ragged fields there are."""


_NOT_YET = unsupported.carriers(LaterMemmapArguments)


class LazyMemmapStorage(own.LazyTensorStorage):
    """A folder of memory-mapped files ``<dir>/<key>.memmap``, made at the first write and shaped after its first row.

    ``TensorDict.load_memmap(dir)`` reads the folder without engram; :meth:`ReplayBuffer.open` goes on with it. Its space is
    reserved when it is made: a full disk is an ``OSError`` then, not a crash later. Creation logs one line:
    the folder, and of each key its shape, dtype and size. Samples are ordinary tensors; ``rb[:]`` shows the memory-mapped ones.

    Args:
        max_size: capacity in rows. With ``lanes`` it is rounded down per lane, with ``ndim > 1`` up to whole slots.
        scratch_dir: the folder. None: a fresh temporary one on disk, removed when the buffer is closed or collected.
        device: must be ``"cpu"``, or None.
        ndim, lanes, dtypes: as for :class:`LazyTensorStorage`. The folder notes ``dtypes`` for :meth:`ReplayBuffer.open`.
        ragged, ragged_bytes, ragged_layout, layout: as for :class:`LazyTensorStorage`. Ragged fields lie in ``.engram/ragged``; the others
            stay readable by ``TensorDict.load_memmap``.
        existsok: erase a store, or files of the same names, that lie in the folder.
        auto_cleanup: remove the files when the buffer is closed; None: only those of a temporary folder.
        io: how rows are moved. ``"auto"``: by copies while they are in memory, by reads and writes of the files while a look at
            some rows finds that they are not. ``"map"``: always by copies. ``"read"``: always by reads and writes, which a disk that
            fails makes an ``OSError``; a copy would end the process with ``SIGBUS``. Only the time differs, never the rows. It
            holds for all handles of the store in this process; ``stats()`` shows it. docs/larger-than-memory.md has the rest.

        group_small_fields: fields whose rows have at most so many bytes lie together in one file, in each row one after the other: a
            row of several small fields that is not in memory is then one read of the disk, not one per field. 0: every field has a
            file of its own, which ``TensorDict.load_memmap`` reads; those that lie together it does not see. ``dumps`` writes a file
            per field either way. It holds for the folder for good.

    Raises:
        ValueError: a device other than the CPU, another ``io``, or ``group_small_fields`` below 0. TypeError: it is no int.
        RuntimeError: the folder holds a store or files of the same names, and not ``existsok``.
        OSError: the folder is a file, not writable, or its disk is full. Nothing is left behind.
        OSError (of any call that reads or writes rows by ``io="read"``): the disk failed, or a file ends early. Its text says the byte.

    >>> import tempfile, torch
    >>> from engram import LazyMemmapStorage, ReplayBuffer
    >>> folder = tempfile.mkdtemp()
    >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder + "/replay"))
    >>> rb.extend({"a": torch.arange(3)})
    tensor([0, 1, 2])
    >>> rb.close()
    >>> ReplayBuffer.open(folder + "/replay")[:]["a"].tolist()
    [0, 1, 2]
    """

    #: What ``stats()`` says of the way that rows take. The first three are 0 or 1.
    _IO_STATE: ClassVar = (
        "larger_than_memory",
        "reads_from_files",
        "writes_to_files",
        "file_reads",
        "file_bytes_read",
        "file_writes",
        "file_bytes_written",
    )

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        lanes: int = 1,
        dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        io: str = "auto",
        group_small_fields: int = 0,
        **more: Unpack[MemmapArguments],
    ) -> None:
        geometry = _geometry.Geometry.checked(type(self).__name__, max_size, lanes, ndim, dtypes)
        geometry = geometry.with_ragged(more, type(self).__name__)
        unsupported.reject_unsupported("LazyMemmapStorage", more, _NOT_YET, type(self))
        unsupported.take_compilable(self, more)
        if str(device).split(":")[0] not in ("cpu", "None"):
            raise ValueError(
                f"LazyMemmapStorage: device: expected 'cpu', files are mapped into RAM; got {str(device)!r}."
            )
        self._configure(geometry.grouping(group_small_fields, type(self).__name__), "cpu")
        self._io = check_io("LazyMemmapStorage", io)
        self._scratch_dir = (
            None if scratch_dir is None else checks.check_path("LazyMemmapStorage: scratch_dir", scratch_dir)
        )
        self._existsok = existsok
        maker = secrets.token_hex(16)
        home = self._scratch_dir or Path(tempfile.gettempdir()).absolute() / f"engram-{maker}"
        temporary = auto_cleanup is True or (auto_cleanup is None and scratch_dir is None)
        self._home = _home.Home.of(self, home, maker, temporary=temporary)
        if self._scratch_dir is not None:  # say at once what would fail at the first write
            if layout.is_store(self._scratch_dir) and not existsok:
                raise RuntimeError(lifetime.occupied(self._scratch_dir, self._scratch_dir / layout.FOLDER))
            _check_place(self._scratch_dir)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        unclean: str = "refuse",
        dtypes: _types.Dtypes = _types.NO_DTYPES,
        readonly: bool = False,
        io: str = "auto",
    ) -> LazyMemmapStorage:
        """The storage in a folder, with its rows. ``ReplayBuffer.open`` is the public way.

        Raises ``TypeError``: ``directory`` is no path.

        >>> import tempfile, torch
        >>> from engram import LazyMemmapStorage, ReplayBuffer
        >>> folder = tempfile.mkdtemp()
        >>> with ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder)) as rb:
        ...     _ = rb.extend(torch.arange(10))
        >>> storage = LazyMemmapStorage.open(folder)
        >>> len(storage)
        10
        >>> storage.close()
        """
        path = checks.check_path("LazyMemmapStorage.open: directory", directory)
        store = (opening.open_readonly if readonly else opening.open_store)(path, unclean=unclean)
        schema = store.schema
        assert store.folder is not None  # it was opened there
        geometry = _geometry.Geometry(schema.capacity, schema.lanes, 1 + len(schema.columns), dtypes)
        storage = cls._in(_home.Home(store.folder), geometry, io)
        try:
            structure = _ragged_structure.structure_in(schema, dtypes)
        except (TypeError, IncompatibleStore) as error:
            store.close()
            error.add_note(f"The folder is {str(path)!r}.")
            raise
        structure.whose = f" The first row is in {str(path)!r}."
        storage._adopt(store, structure)
        return storage

    @classmethod
    def open_or_create(
        cls,
        directory: Path,
        max_size: int,
        lanes: int,
        ndim: int,
        dtypes: object,
        *,
        unclean: str,
        io: str = "auto",
        group_small_fields: int = 0,
        **more: Unpack[ragged.RaggedArguments],
    ) -> LazyMemmapStorage:
        """The storage in a folder, with its rows; or a new one, which the first write of any process that calls this creates.

        Args:
            directory: the folder.
            max_size, lanes, ndim, dtypes: as for the constructor; one that is there must have the same.
            unclean, io: as for :meth:`ReplayBuffer.open`.
            group_small_fields: as for the constructor.
            **more: ``ragged``, ``ragged_bytes``, ``ragged_layout``, ``layout`` and ``open_rows``: as for the constructor; the first
                three the same each time.

        Raises: as :meth:`ReplayBuffer.open_or_create`.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyMemmapStorage, ReplayBuffer
        >>> folder = Path(tempfile.mkdtemp()) / "store"
        >>> for run in range(2):
        ...     rb = ReplayBuffer(storage=LazyMemmapStorage.open_or_create(folder, 10, 1, 1, None, unclean="refuse"))
        ...     _ = rb.add(torch.tensor(run))
        ...     print(len(rb))
        ...     rb.close()
        1
        2
        """
        call = _home.OPEN_OR_CREATE
        geometry = _geometry.Geometry.checked(call, max_size, lanes, ndim, dtypes)
        geometry = geometry.with_ragged(more, call).grouping(group_small_fields, call)
        if not opening.holds_store(directory, call):
            _check_place(directory)
            return cls._in(_home.Home(directory, call), geometry, io)
        storage = cls.open(directory, unclean=unclean, dtypes=geometry.dtypes, io=io)
        found = storage.store.schema
        try:
            _check_size(found, geometry, directory)
        except IncompatibleStore:
            storage.close()
            raise
        storage._geometry, storage.ragged = geometry, geometry.ragged
        if found.ragged:
            storage.layout = geometry.ragged.layout._asdict()
        return storage

    @classmethod
    def _in(cls, home: _home.Home, geometry: _geometry.Geometry, io: str) -> LazyMemmapStorage:
        storage = cls.__new__(cls)
        storage._configure(geometry, "cpu")
        storage._io = io
        storage._scratch_dir = home.folder
        storage._existsok = False
        storage._home = home
        return storage

    def _allocate(self, schema: schemas.Schema) -> Store:
        assert self._home is not None  # as __init__ and open() leave it
        folder, replace = self._home.folder, self._existsok or self._scratch_dir is None
        try:
            return self._allocate_in(self._home, self._geometry.in_files(schema), replace=replace)
        except OSError as error:
            if error.errno is None or error.filename not in map(str, (folder, *folder.parents)):
                raise  # of a file in it, which is named
            where = f"LazyMemmapStorage: scratch_dir={str(folder)!r} cannot be made: {os.strerror(error.errno)}"
            raise type(error)(error.errno, where, error.filename) from error

    def check_writable(self) -> None:
        if self.memory is not None:
            self.memory.check_writable()

    def _adopt(self, store: Store, structure: _structure.Structure) -> None:
        home = self._home
        if home is not None and home.maker == _home.OPEN_OR_CREATE:
            _check_size(store.schema, self._geometry, home.folder)
        store.core.set_io(self._io)
        super()._adopt(store, structure)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if self.memory is not None:
            self.memory.core.set_io(self._io)

    def counters(self) -> dict[str, float]:
        io = () if self.memory is None else self.memory.core.io_state()
        return super().counters() | dict(zip(self._IO_STATE, io, strict=bool(io)))

    @property
    def scratch_dir(self) -> Path | None:
        """The folder, None while a temporary one has not been made."""
        memory = self.memory
        return self._scratch_dir if memory is None else memory.folder

    def view(self, where: _base.Rows, extra: dict[str, torch.Tensor] | None = None) -> object:
        view = super().view(where, extra)
        if self.structure is not None and self.structure.is_tensordict and tensordicts.is_tensor_collection(view):
            view.lock_()
        return view

    def cleanup(self) -> bool:
        """Close the store and remove its files. True if something was removed. Other files in the folder stay.

        Views handed out before stay valid until they are dropped.

        >>> import torch
        >>> from pathlib import Path
        >>> from engram import LazyMemmapStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir="cleanup-example"))
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.cleanup(), Path("cleanup-example").exists()
        (True, False)
        """
        return _remove(self.memory)

    def _after_close(self) -> dict[str, object]:
        memory: Store | None = vars(self).get("memory")
        folder = self._scratch_dir if memory is None else memory.folder
        return {**super()._after_close(), "cleanup": partial(_remove, memory), "scratch_dir": folder}


def check_io(call: str, io: object) -> str:
    """``io``, which says how rows are moved. Raises ``ValueError``: it is none of the words."""
    checks.check_choice(f"{call}: io", io, ("auto", "map", "read"))
    return str(io)


def _check_place(folder: Path) -> None:
    """Raise ``OSError`` for a folder that cannot be made, or not be written to."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(20, "LazyMemmapStorage: scratch_dir: expected a folder, found a file", str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(
            13, "LazyMemmapStorage: scratch_dir: expected a folder that can be written to", str(there)
        )


def _check_size(found: schemas.Schema, geometry: _geometry.Geometry, folder: Path) -> None:
    """Raise ``IncompatibleStore`` unless a store in a folder has the size that ``open_or_create`` was called with."""
    try:
        expected = geometry.with_own_rings(found, None, _home.OPEN_OR_CREATE) if geometry.ragged.fields else found
        differs = schemas.differences(geometry.schema(_ragged_structure.structure_in(expected), found.columns), found)
    except IncompatibleCheckpoint as error:
        differs = str(error).removeprefix(f"{_home.OPEN_OR_CREATE}: ").removesuffix(".")
    if len(found.columns) != geometry.ndim - 1:
        differs = f"ndim: expected {geometry.ndim}, got {1 + len(found.columns)}"
    if differs:
        raise IncompatibleStore(
            f"{_home.OPEN_OR_CREATE}: {str(folder)!r} holds a store of another size: {differs}. Use "
            f"ReplayBuffer.open({str(folder)!r}), which takes it as it is, or another folder."
        )


def _remove(store: Store | None) -> bool:
    return store is not None and store.remove()
