"""Rows in a directory, memory-mapped: they outlive the process."""

from __future__ import annotations

import os
import secrets
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engram._later import refuse
from engram.format import layout
from engram.storages._structure import Structure
from engram.storages.tensor import LazyTensorStorage, announce, creation_lines
from engram.store import Process, Store, forget_temporary, maker_of

if TYPE_CHECKING:
    from engram.format.schema import Schema

__all__ = ["LazyMemmapStorage"]

_LATER = {"compilable": "tracing through torch.compile", "shared_init": "rb.share()"}


class LazyMemmapStorage(LazyTensorStorage):
    """A folder of memory-mapped files ``<dir>/<key>.memmap``, made at the first write and shaped after its first row.

    ``TensorDict.load_memmap(dir)`` reads the folder without engram; :meth:`ReplayBuffer.open` goes on with it. Its space is
    reserved when it is made: a full disk is an ``OSError`` then, not a crash later. Creation logs, per key, path, MB and
    shape. Samples are ordinary tensors; ``rb[:]`` shows the memory-mapped ones.

    Args:
        max_size: capacity in rows. With ``lanes`` it is rounded down per lane, with ``ndim > 1`` up to whole slots.
        scratch_dir: the folder. None: a fresh temporary one on disk, removed when the buffer is closed or collected.
        device: must be ``"cpu"``.
        ndim, lanes: as for :class:`LazyTensorStorage`.
        existsok: replace a store, or files of the same names, that lie in the folder.
        auto_cleanup: remove the files when the buffer is closed; None: only those of a temporary folder.

    Raises:
        ValueError: a device other than the CPU.
        RuntimeError: the folder holds a store or files of the same names, and not ``existsok``.
        OSError: the folder is a file, not writable, or its disk is full. Nothing is left behind.

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

    _memory: Store | None = None
    #: Whether a thread is just taking a store that another process has made.
    _looking = False

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        lanes: int = 1,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        **later: Any,
    ) -> None:
        refuse("LazyMemmapStorage", later, _LATER)
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"LazyMemmapStorage: device: expected 'cpu', files are mapped into RAM; got {str(device)!r}."
            )
        self._configure(max_size, device="cpu", ndim=ndim, lanes=lanes)
        self._scratch_dir = None if scratch_dir is None else Path(scratch_dir).absolute()
        self._existsok = existsok
        self._auto_cleanup = auto_cleanup
        #: What copies of this storage in other processes know the store by that one of them makes.
        self._maker = secrets.token_hex(16)
        temporary = auto_cleanup is True or (auto_cleanup is None and scratch_dir is None)
        #: The process that the store is made for, if it is temporary.
        self._host = Process.this() if temporary else None
        if temporary:
            weakref.finalize(self, _forget, self._place, self._maker, os.getpid())
        if self._scratch_dir is not None:
            self._check_folder(self._scratch_dir)

    @property
    def memory(self) -> Store | None:
        """The store; None before the first write, whoever of those that have a copy of this storage makes it."""
        if self._memory is None and not self._looking:
            self._look()
        return self._memory

    @memory.setter
    def memory(self, store: Store | None) -> None:
        self._memory = store

    def _look(self) -> None:
        """Take the store that another process has made meanwhile."""
        directory = self._place
        if not self._maker or maker_of(directory) != self._maker:
            return
        with self._lock:
            if self._memory is None:
                self._looking = True
                try:
                    store = Store.open(directory)
                    self._adopt(store, Structure.from_schema(store.schema))
                except FileNotFoundError:  # closed by all
                    return
                finally:
                    self._looking = False

    @property
    def _place(self) -> Path:
        return self._scratch_dir or Path(tempfile.gettempdir()).absolute() / f"engram-{self._maker}"

    def _check_folder(self, folder: Path) -> None:
        """Say at once what would fail at the first write."""
        if layout.is_store(folder) and not self._existsok:
            raise RuntimeError(
                f"LazyMemmapStorage: scratch_dir={str(folder)!r} already holds a store. Use "
                f"ReplayBuffer.open({str(folder)!r}) to go on with it, or pass existsok=True to replace it."
            )
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(20, "scratch_dir: expected a folder, found a file", str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(13, "scratch_dir: expected a folder that can be written to", str(there))

    @classmethod
    def open(cls, directory: Path, *, unclean: str = "refuse") -> LazyMemmapStorage:
        """The storage in a folder, with its rows. ``ReplayBuffer.open`` is the public way."""
        store = Store.open(directory, unclean=unclean)
        schema = store.schema
        storage = cls.__new__(cls)
        storage._configure(schema.capacity, device="cpu", ndim=1 + len(schema.columns), lanes=schema.lanes)
        storage._scratch_dir = store.directory
        storage._existsok = False
        storage._auto_cleanup = None
        storage._maker = ""
        storage._host = None
        try:
            structure = Structure.from_schema(schema)
        except TypeError:
            store.close()
            raise
        storage._adopt(store, structure)
        return storage

    def _allocate(self, schema: Schema) -> Store:
        store = Store.create(
            schema,
            self._place,
            maker=self._maker,
            guest_of=self._host,
            replace=self._existsok or self._scratch_dir is None,
        )
        directory = store.directory
        assert directory is not None  # it was just made there
        announce(creation_lines(schema.fields, schema.capacity, lambda field: layout.field_path(directory, field.key)))
        return store

    @property
    def scratch_dir(self) -> Path | None:
        """The folder, None while a temporary one has not been made."""
        memory = self.memory
        return self._scratch_dir if memory is None else memory.directory

    def slice(self, start: int, stop: int, extra: Any = None) -> Any:
        return self._locked(super().slice(start, stop, extra))

    def grid(self, index: Any = ..., extra: Any = None) -> Any:
        return self._locked(super().grid(index, extra))

    def _locked(self, view: Any) -> Any:
        if self.structure is not None and self.structure.is_tensordict:
            view.lock_()
        return view

    def cleanup(self) -> bool:
        """Close the store and remove its files. True if something was removed. Other files in the folder stay.

        Views handed out before stay valid until they are dropped.
        """
        return self.memory is not None and self.memory.remove()


def _forget(directory: Path, maker: str, pid: int) -> None:
    if pid == os.getpid():
        forget_temporary(directory, maker)
