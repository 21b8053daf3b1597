"""Storage checkpointers: they save the rows of a storage, and load them. Those with a layout of TorchRL's are in :mod:`engram.torchrl`."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engram.errors import IncompatibleCheckpoint
from engram.format import disk
from engram.format.dumps import replacing, standing
from engram.format.part_reader import is_part
from engram.format.parts import PartReader
from engram.persist.components import Dumpable
from engram.persist.foreign import torchrl
from engram.persist.hooked import HookedSnapshot, LayoutHook, check_hook, is_hooked, prepare_hooked
from engram.persist.slots import LaidOut, is_layout, written_store

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engram.persist.hooked import Layout, LayoutSnapshot, LoadHook, SaveHook
    from engram.types import StorageLoad


def check_storage(storage: object, call: str) -> Dumpable:
    """The storage. Raises ``TypeError``: it is none of engram's."""
    if not isinstance(storage, Dumpable):
        raise TypeError(f"{call}: expected a storage of engram's, got a {type(storage).__name__}.")
    return storage


class Checkpointed(LaidOut, Protocol):
    """A storage, as checkpointers save and load it."""

    checkpointer: StorageCheckpointerBase

    def __len__(self) -> int: ...
    def notify(self, write: None, data: None) -> None: ...
    def prepare_snapshot(self, *, without: Collection[tuple[str, str]], whole: bool) -> object: ...
    def prepare_part(
        self, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()
    ) -> StorageLoad: ...


class LayoutPreparation(NamedTuple):
    """Takes a snapshot of a storage in the form that its checkpointer saves."""

    checkpointer: TensorStorageCheckpointer
    storage: LaidOut
    without: Collection[tuple[str, str]]

    def take(self) -> LayoutSnapshot | HookedSnapshot:
        """The snapshot. Writers wait until it is saved."""
        return self.checkpointer.snapshot(self.storage, self.without)


class StorageCheckpointerBase(abc.ABC):
    """Saves the rows of a storage and loads them. Base class of all storage checkpointers.

    ``dumps(storage, path)`` and ``loads(storage, path)`` are what a checkpointer of one's own implements: ``storage.dumps(path)`` calls it.
    ``rb.dumps`` takes the ones below only.

    >>> from engram import StorageCheckpointerBase, TensorStorageCheckpointer
    >>> isinstance(TensorStorageCheckpointer(), StorageCheckpointerBase)
    True
    """

    def __init__(self) -> None:
        self._save_hooks: list[SaveHook] = []
        self._load_hooks: list[LoadHook] = []

    def register_save_hook(self, hook: SaveHook) -> None:
        """Call ``hook(data, path=folder)`` with the rows before they are saved, after earlier hooks; its result is saved.

        Args:
            hook: takes and returns a TensorDict. It gets ``[T, *columns]`` slots of the storage, as live views; before, its attributes
                ``shift`` and ``is_full`` are set, if it has them: the slot behind the newest one, and whether all slots are live.

        Raises:
            TypeError: a hook that cannot be called so. ``dumps`` raises it, too, where it returns no TensorDict; and ``ValueError``, where
                no tensor with an element is left to be saved.

        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictReplayBuffer, TensorStorageCheckpointer
        >>> rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4.0)}, [4]))
        >>> checkpointer, path = TensorStorageCheckpointer(), tempfile.mkdtemp() + "/rows"
        >>> checkpointer.register_save_hook(lambda data, path=None: data.apply(lambda x: x * 2))
        >>> checkpointer.register_load_hook(lambda data, out=None: data.apply(lambda x: x / 2))
        >>> checkpointer.dumps(rb.storage, path)
        >>> checkpointer.loads(other.storage, path)
        >>> other.storage[:]["obs"].tolist()
        [0.0, 1.0, 2.0, 3.0]
        """
        check_hook(hook, "save", type(self).__name__)
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: LoadHook) -> None:
        """Call ``hook(data, out=None)`` with what was loaded, after earlier hooks. It returns ``[T, *columns]`` slots again.

        Raises:
            TypeError: a hook that cannot be called so. ``loads`` raises it, too, where it returns no TensorDict.

        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictReplayBuffer, TensorStorageCheckpointer
        >>> rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(4.0)}, [4]))
        >>> checkpointer, path = TensorStorageCheckpointer(), tempfile.mkdtemp() + "/rows"
        >>> checkpointer.register_save_hook(lambda data, path=None: data.apply(lambda x: x * 2))
        >>> checkpointer.dumps(rb.storage, path)
        >>> checkpointer.register_load_hook(lambda data, out=None: data)  # leaves them as they were saved
        >>> checkpointer.loads(other.storage, path)
        >>> other.storage[:]["obs"].tolist()
        [0.0, 2.0, 4.0, 6.0]
        """
        check_hook(hook, "load", type(self).__name__)
        self._load_hooks.append(hook)

    @property
    def is_plain(self) -> bool:
        """Whether it saves engram's own form, as a storage without a checkpointer does."""
        return False

    def preparation(self, storage: LaidOut, without: Collection[tuple[str, str]]) -> LayoutPreparation | None:
        """What takes a snapshot for ``rb.dumps``; None: the storage's own.

        Raises:
            TypeError: a checkpointer of one's own, which ``rb.dumps`` does not take.

        >>> from engram import LazyTensorStorage, TensorStorageCheckpointer
        >>> TensorStorageCheckpointer().preparation(LazyTensorStorage(10), ()) is None
        True
        """
        del storage, without
        raise TypeError(
            f"dumps: expected one of engram's storage checkpointers, got a {type(self).__name__}, which saves a storage alone. Call "
            "rb.storage.dumps(path)."
        )

    def prepare_load(self, storage: LaidOut, reader: PartReader, without: Sequence[str]) -> StorageLoad | None:
        """Check a part that is not of the storage's own form; None: it is.

        Raises: as :meth:`loads`; nothing is changed.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
        >>> from engram.format.parts import PartReader
        >>> folder = Path(tempfile.mkdtemp()) / "rows"
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.dumps(folder)
        >>> with PartReader.open(folder) as reader:  # of the storage's own form
        ...     TensorStorageCheckpointer().prepare_load(rb.storage, reader, ()) is None
        True
        """
        if is_layout(reader):
            return torchrl().prepare_layout(storage, reader, without)
        if is_hooked(reader):
            if not self._load_hooks:
                raise IncompatibleCheckpoint(
                    f"{reader.folder}: hooks have changed what was saved, and none is registered here that changes it back. Use "
                    "register_load_hook."
                )
            return prepare_hooked(storage, reader.folder, self._load_hooks, reader, without)
        return None

    @abc.abstractmethod
    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Save the rows of a storage in a folder.

        >>> import os, tempfile
        >>> import numpy as np
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, StorageCheckpointerBase
        >>> class AsArray(StorageCheckpointerBase):
        ...     def dumps(self, storage, path):
        ...         os.makedirs(path)
        ...         np.save(f"{path}/rows.npy", storage[:])
        ...     def loads(self, storage, path):
        ...         rows = torch.from_numpy(np.load(f"{path}/rows.npy"))
        ...         storage.set(range(len(rows)), rows)
        >>> rb, path = ReplayBuffer(storage=LazyTensorStorage(10)), tempfile.mkdtemp() + "/rows"
        >>> _ = rb.extend(torch.arange(3))
        >>> AsArray().dumps(rb.storage, path)
        >>> os.listdir(path)
        ['rows.npy']
        """

    @abc.abstractmethod
    def loads(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a folder.

        >>> import tempfile
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> path = tempfile.mkdtemp() + "/rows"
        >>> _ = rb.extend(torch.arange(3))
        >>> TensorStorageCheckpointer().dumps(rb.storage, path)
        >>> TensorStorageCheckpointer().loads(other.storage, path)
        >>> other[:].tolist()
        [0, 1, 2]
        """


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Saves engram's own form, which a storage saves without a checkpointer, too. With hooks: what they return.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend(torch.arange(10))
    >>> TensorStorageCheckpointer().dumps(rb.storage, "storage-checkpointer-example")
    >>> other = LazyTensorStorage(100)
    >>> TensorStorageCheckpointer().loads(other, "storage-checkpointer-example")
    >>> len(other)
    10
    """

    @property
    def layout(self) -> Layout | None:
        """The layout that it saves, piece by piece; None: engram's own form, or what hooks return."""
        return self._layout_of(self._save_hooks)

    def _layout_of(self, hooks: Sequence[object]) -> Layout | None:
        known = hooks[0] if len(hooks) == 1 else None
        return known.layout(type(self).__name__) if isinstance(known, LayoutHook) else None

    @property
    def is_plain(self) -> bool:
        return not self._save_hooks and not self._load_hooks

    def snapshot(self, storage: LaidOut, without: Collection[tuple[str, str]] = ()) -> LayoutSnapshot | HookedSnapshot:
        """What is saved, once writers wait. Raises as :meth:`dumps`.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import FlatStorageCheckpointer, LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        >>> flag = torch.zeros(3, 1, dtype=torch.bool)
        >>> after = TensorDict({"obs": torch.arange(1, 4), "reward": torch.ones(3, 1), "done": flag}, [3])
        >>> _ = rb.extend(TensorDict({"obs": torch.arange(3), "done": flag, "next": after}, [3]))
        >>> folder = Path(tempfile.mkdtemp()) / "rows"
        >>> with rb.storage.paused:
        ...     _ = FlatStorageCheckpointer().snapshot(rb.storage).save(folder)
        >>> TensorDict.load_memmap(folder)["obs"][:4].tolist()
        [0, 1, 2, 3]
        """
        layout = self.layout
        if layout is not None:
            return layout.snapshot(storage, without)
        return HookedSnapshot(storage, self._save_hooks, type(self).__name__, without)

    def preparation(self, storage: LaidOut, without: Collection[tuple[str, str]]) -> LayoutPreparation | None:
        """As of the base class: there is one with hooks.

        >>> from engram import FlatStorageCheckpointer, LazyTensorStorage
        >>> FlatStorageCheckpointer().preparation(LazyTensorStorage(10), ()) is None
        False
        """
        return LayoutPreparation(self, storage, without) if self._save_hooks else None

    def dumps(self, storage: Checkpointed, path: str | os.PathLike[str]) -> None:
        """Save the rows of a storage as a folder, which in one step replaces one that was saved there.

        With a layout or hooks writers wait until all is written. TorchRL's checkpointer of the same name reads the folder.

        Args:
            storage: what is saved.
            path: a free name, an empty folder, or what an earlier call has made.

        Raises:
            RuntimeError: nothing was ever written. FileExistsError: something else lies there. OSError: no space, or an I/O error.
            IncompatibleCheckpoint: rows that the layout cannot hold; names the row. Nothing is left, what lay there stays.

        Cost: reads each row once, and the files once more for their sums.

        >>> import tempfile
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
        >>> rb, path = ReplayBuffer(storage=LazyTensorStorage(10)), tempfile.mkdtemp() + "/rows"
        >>> _ = rb.extend(torch.arange(3))
        >>> TensorStorageCheckpointer().dumps(rb.storage, path)
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.loads(path)
        >>> len(rb)
        3
        """
        checked = check_storage(storage, f"{type(self).__name__}: dumps")
        written_store(storage, type(self).__name__)
        if not self._save_hooks:
            Dumpable.dumps(checked, Path(path))
            return
        with replacing(Path(path)) as folder, disk.batched_fsync(), storage.paused:
            self.snapshot(storage).save(folder)

    def loads(self, storage: Checkpointed, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a folder, in engram's form, or flat or nested, engram's or TorchRL's.

        Where engram saved it, tickets and priorities are as they were. TorchRL says neither: the oldest row gets the smallest ticket.

        Raises:
            CorruptCheckpoint: damaged; names the file. IncompatibleCheckpoint: other fields or another size than the storage has, or no
                such folder. Nothing is changed. OSError: it is not there.

        >>> import tempfile
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> path = tempfile.mkdtemp() + "/rows"
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.dumps(path)
        >>> TensorStorageCheckpointer().loads(other.storage, path)
        >>> other[:].tolist()
        [0, 1, 2]
        """
        check_storage(storage, f"{type(self).__name__}: loads")
        folder = standing(Path(path))
        if is_part(folder):
            with PartReader.open(folder) as reader:
                load = self.prepare_load(storage, reader, ()) or storage.prepare_part(reader)
                load.commit()
        else:
            self._prepare_foreign(storage, folder).commit()
        storage.notify(None, None)

    def _prepare_foreign(self, storage: LaidOut, folder: Path) -> StorageLoad:
        """Check a folder that engram did not write."""
        layout = self._layout_of(self._load_hooks) if self._load_hooks else torchrl().layout(type(self).__name__)
        return layout.load(storage, folder) if layout else prepare_hooked(storage, folder, self._load_hooks, None)


def accepted(given: object) -> object:
    """A checkpointer that a storage takes: one of TorchRL's for HDF5 files is wrapped, everything else stays."""
    theirs = any(base.__name__ == "H5StorageCheckpointer" for base in type(given).__mro__)
    return torchrl().checkpointer(given) if theirs and not isinstance(given, StorageCheckpointerBase) else given


def prepared_snapshot(storage: Checkpointed, without: Collection[tuple[str, str]]) -> object:
    """What takes the snapshot of a storage for a dump of a buffer, in the form that its checkpointer saves."""
    return storage.checkpointer.preparation(storage, without) or storage.prepare_snapshot(without=without, whole=True)


def prepare_dumped(
    storage: Checkpointed, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()
) -> StorageLoad:
    """Check a part of a dump for a storage, in whichever form. Raises as ``storage.loads``; nothing is changed."""
    known = storage.checkpointer.prepare_load(storage, reader, without)
    return known or storage.prepare_part(reader, close_open=close_open, without=without)


class ListStorageCheckpointer(TensorStorageCheckpointer):
    """Saves a list of tensors or TensorDicts in engram's own form.

    >>> import torch
    >>> from engram import ListStorage, ListStorageCheckpointer, ReplayBuffer
    >>> rb = ReplayBuffer(storage=ListStorage(100))
    >>> _ = rb.extend([torch.zeros(2), torch.zeros(3)])
    >>> ListStorageCheckpointer().dumps(rb.storage, "list-checkpointer-example")
    """

    def dumps(self, storage: Checkpointed, path: str | os.PathLike[str]) -> None:
        """Save the items of a storage. Raises ``RuntimeError``: there are none. ``TypeError``: an item that is no tensor or TensorDict.

        >>> import tempfile
        >>> import torch
        >>> from engram import ListStorage, ListStorageCheckpointer, ReplayBuffer
        >>> rb, other = (ReplayBuffer(storage=ListStorage(10)) for _ in range(2))
        >>> path = tempfile.mkdtemp() + "/items"
        >>> _ = rb.extend([torch.zeros(2), torch.zeros(3)])
        >>> ListStorageCheckpointer().dumps(rb.storage, path)
        >>> ListStorageCheckpointer().loads(other.storage, path)
        >>> [len(other[row]) for row in range(2)]
        [2, 3]
        """
        checked = check_storage(storage, f"{type(self).__name__}: dumps")
        if not len(storage):
            raise RuntimeError(f"{type(self).__name__}: dumps: expected items, got a storage that was never written.")
        if self._save_hooks:
            raise TypeError(f"{type(self).__name__}: dumps: expected no hooks: items of a list are saved one by one.")
        Dumpable.dumps(checked, Path(path))


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """Saves a list of compressed items in engram's own form: they stay compressed.

    >>> from engram import CompressedListStorageCheckpointer
    >>> CompressedListStorageCheckpointer().is_plain
    True
    """


class StorageEnsembleCheckpointer(ListStorageCheckpointer):
    """Saves the members of an ensemble in engram's own form.

    >>> from engram import StorageEnsembleCheckpointer
    >>> StorageEnsembleCheckpointer().is_plain
    True
    """
