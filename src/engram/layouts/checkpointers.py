"""What saves the rows of a storage, and loads them: in engram's own form, or in a layout that TorchRL reads, too."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engram.errors import IncompatibleCheckpoint
from engram.format import disk
from engram.format.dumps import replacing, standing
from engram.format.part_reader import is_part
from engram.format.parts import PartReader
from engram.layouts.hooked import HookedSnapshot, check_hook, is_hooked, prepare_hooked
from engram.layouts.hooks import Flat2TED, Nested2TED, TED2Flat, TED2Nested
from engram.layouts.parts import Layout, LayoutSnapshot, is_layout, prepare_layout, written_store
from engram.layouts.reading import Keys
from engram.persist.components import Dumpable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from engram.layouts.hooked import LoadHook, SaveHook
    from engram.layouts.parts import LaidOut
    from engram.layouts.reading import LayoutDump
    from engram.storages import Storage
    from engram.types import StorageLoad


def check_storage(storage: object, call: str) -> None:
    if not isinstance(storage, Dumpable):
        raise TypeError(f"{call}: expected a storage of engram's, got a {type(storage).__name__}.")


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
            return prepare_layout(storage, reader, without)
        if is_hooked(reader):
            if not self._load_hooks:
                raise IncompatibleCheckpoint(
                    f"{reader.folder}: hooks have changed what was saved, and none is registered here that changes it back. Use "
                    "register_load_hook."
                )
            return prepare_hooked(storage, reader.folder, self._load_hooks, reader, without)
        return None

    @abc.abstractmethod
    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
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
    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
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
        if len(self._save_hooks) != 1:
            return None
        hook = self._save_hooks[0]
        for kind, known in (("flat", TED2Flat), ("nested", TED2Nested)):
            if isinstance(hook, known) and type(hook).__call__ is known.__call__:
                return Layout(kind, hook.keys, type(self).__name__)
        return None

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
            return LayoutSnapshot(storage, layout, without)
        return HookedSnapshot(storage, self._save_hooks, type(self).__name__, without)

    def preparation(self, storage: LaidOut, without: Collection[tuple[str, str]]) -> LayoutPreparation | None:
        """As of the base class: there is one with hooks.

        >>> from engram import FlatStorageCheckpointer, LazyTensorStorage
        >>> FlatStorageCheckpointer().preparation(LazyTensorStorage(10), ()) is None
        False
        """
        return LayoutPreparation(self, storage, without) if self._save_hooks else None

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
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
        check_storage(storage, f"{type(self).__name__}: dumps")
        written_store(storage, type(self).__name__)
        if not self._save_hooks:
            Dumpable.dumps(storage, Path(path))
            return
        with replacing(Path(path)) as folder, disk.batched_fsync(), storage.paused:
            self.snapshot(storage).save(folder)

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a folder, in engram's form, or flat, nested or HDF5, engram's or TorchRL's.

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
        layout = self._loading()
        if layout is None:
            if not self._load_hooks:
                raise IncompatibleCheckpoint(
                    f"{folder}: expected a storage that engram saved, or one saved flat, nested or as HDF5. Of a dump of TorchRL's, "
                    "rb.loads reads the whole."
                )
            return prepare_hooked(storage, folder, self._load_hooks, None)
        return prepare_dump(storage, layout.open(folder))

    def _loading(self) -> Layout | None:
        """The layout whose keys say how a folder is read; None: hooks say it."""
        if not self._load_hooks:
            return Layout("flat", Keys(), type(self).__name__)
        hook = self._load_hooks[0]
        for known in (Nested2TED, Flat2TED):
            if len(self._load_hooks) == 1 and isinstance(hook, known) and type(hook).__call__ is known.__call__:
                return Layout("flat", hook.keys, type(self).__name__)
        return None


def prepared_snapshot(storage: Storage, without: Collection[tuple[str, str]]) -> object:
    """What takes the snapshot of a storage for a dump of a buffer, in the form that its checkpointer saves."""
    return storage.checkpointer.preparation(storage, without) or storage.prepare_snapshot(without=without, whole=True)


def prepare_dumped(
    storage: Storage, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()
) -> StorageLoad:
    """Check a part of a dump for a storage, in whichever form. Raises as ``storage.loads``; nothing is changed."""
    known = storage.checkpointer.prepare_load(storage, reader, without)
    return known or storage.prepare_part(reader, close_open=close_open, without=without)


def prepare_dump(storage: LaidOut, dump: LayoutDump) -> StorageLoad:
    """Check a layout that engram did not write for a storage: everything that can be damaged, if it holds rows that would be lost."""
    here = storage.memory
    schema = dump.schema(None if here is None else here.schema)
    if here is not None and int(here.core.size()):
        dump.verify()
    return storage.prepare_rows(dump.state(schema), dump.source(schema))


class ListStorageCheckpointer(TensorStorageCheckpointer):
    """Saves a list of tensors or TensorDicts in engram's own form.

    >>> import torch
    >>> from engram import ListStorage, ListStorageCheckpointer, ReplayBuffer
    >>> rb = ReplayBuffer(storage=ListStorage(100))
    >>> _ = rb.extend([torch.zeros(2), torch.zeros(3)])
    >>> ListStorageCheckpointer().dumps(rb.storage, "list-checkpointer-example")
    """

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
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
        check_storage(storage, f"{type(self).__name__}: dumps")
        if not len(storage):
            raise RuntimeError(f"{type(self).__name__}: dumps: expected items, got a storage that was never written.")
        if self._save_hooks:
            raise TypeError(f"{type(self).__name__}: dumps: expected no hooks: items of a list are saved one by one.")
        Dumpable.dumps(storage, Path(path))


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


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """Saves steps in TorchRL's format with each observation once, a file per field.

    An observation is saved at its step; the next observation only of the last step of each trajectory. That takes nearly half the bytes
    where observations are large. It is checked while it is written that nothing is lost: flags at the root are False, and
    ``("next", key)`` is ``key`` of the next step, bit by bit, unless the step is ``done``.

    Args:
        done_keys: flags, as they are called at the root. Default: ``done``, ``truncated``, ``terminated``.
        reward_keys: entries below ``"next"`` only. Default: ``reward``.

    Rows of one lane; ``ndim > 1`` is possible. The rows after rows that were removed cannot be saved.

    >>> import torch
    >>> from engram import FlatStorageCheckpointer, LazyTensorStorage, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), checkpointer=FlatStorageCheckpointer())
    >>> flag = torch.zeros(3, 1, dtype=torch.bool)
    >>> after = TensorDict({"obs": torch.arange(1, 4), "reward": torch.ones(3, 1), "done": flag}, [3])
    >>> _ = rb.extend(TensorDict({"obs": torch.arange(3), "done": flag, "next": after}, [3]))
    >>> rb.dumps("flat-checkpointer-example")
    >>> TensorDict.load_memmap("flat-checkpointer-example/storage")["obs"][:4].tolist()
    [0, 1, 2, 3]
    """

    _kind = "flat"

    def __init__(self, done_keys: Iterable[object] | None = None, reward_keys: Iterable[object] | None = None) -> None:
        super().__init__()
        keys = Keys.of(type(self).__name__, done_keys, reward_keys)
        flat = self._kind == "flat"
        save, load = (TED2Flat, Flat2TED) if flat else (TED2Nested, Nested2TED)
        self._save_hooks.append(save(done_keys=keys.flags, reward_keys=keys.rewards))
        self._load_hooks.append(load(done_keys=keys.flags, reward_keys=keys.rewards))


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """As :class:`FlatStorageCheckpointer`, with nested tensors of which each row is a trajectory. The bytes are the same.

    >>> from engram import NestedStorageCheckpointer
    >>> NestedStorageCheckpointer(reward_keys=("reward", ("agents", "reward"))).layout.kind
    'nested'
    """

    _kind = "nested"
