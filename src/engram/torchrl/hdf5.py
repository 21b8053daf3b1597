"""TorchRL's checkpointer of HDF5 files and its hooks, under engram's names. They are TorchRL's, which must be installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch

from engram._support.tensordicts import tensordict_type
from engram.saved.checkpointers import (
    StorageCheckpointerBase,
    check_storage,
    fields_of,
    prepare_rows_of,
    ring_of,
    written_store,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from tensordict import TensorDict

    from engram.saved.checkpointers import LoadHook, SaveHook
    from engram.storages import Storage


class _Hook(Protocol):
    """A load hook of TorchRL's."""

    shift_key: str
    is_full_key: str

    def __call__(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict: ...


class _Theirs(Protocol):
    """A checkpointer of TorchRL's."""

    _load_hooks: Sequence[_Hook | Callable[..., TensorDict]]

    def dumps(self, storage: _Slots, path: Path) -> None: ...
    def loads(self, storage: _Slots, path: Path) -> None: ...


def _of_torchrl(name: str) -> ModuleType:
    """TorchRL's module. Raises ``ImportError``: it is not installed, or h5py is not; says how to install it."""
    try:
        import h5py
        import torchrl.data as found
    except ImportError as error:
        raise ImportError(
            f"{name}: it is TorchRL's, which needs h5py: pip install torchrl 'engram-replay[hdf5]'. FlatStorageCheckpointer needs neither."
        ) from error
    assert h5py
    module: ModuleType = found
    return module


def H5Split() -> SaveHook:  # noqa: N802 - a class of TorchRL's
    """TorchRL's save hook of that name: the trajectories of what :class:`TED2Nested` made become entries ``traj_0``, ``traj_1`` …

    Raises ``ImportError``: TorchRL or h5py is not installed.

    >>> from engram import H5Split
    >>> type(H5Split()).__module__.partition(".")[0]  # doctest: +SKIP
    'torchrl'
    """
    made: SaveHook = _of_torchrl("H5Split").H5Split()
    return made


def H5Combine() -> LoadHook:  # noqa: N802 - a class of TorchRL's
    """TorchRL's load hook of that name: entries ``traj_0``, ``traj_1`` … become nested tensors, as :class:`Nested2TED` takes them.

    Raises ``ImportError``: TorchRL or h5py is not installed.

    >>> from engram import H5Combine
    >>> type(H5Combine()).__module__.partition(".")[0]  # doctest: +SKIP
    'torchrl'
    """
    made: LoadHook = _of_torchrl("H5Combine").H5Combine()
    return made


class _Slots:
    """A storage, as TorchRL's checkpointers see one: with slots that are saved, or empty, and filled by what is loaded."""

    def __init__(self, data: TensorDict | None = None, length: int = 0, shift: int = 1, *, full: bool = False) -> None:
        self._storage: TensorDict | _Slots | None = data
        self.initialized, self._len = data is not None, length
        self._is_full, self._last_cursor = full, shift - 1

    def _init(self, first: TensorDict) -> None:
        del first  # says what a slot is; all of them follow
        self._storage = self

    def update_(self, data: TensorDict) -> None:
        self._storage = data


class H5StorageCheckpointer(StorageCheckpointerBase):
    """TorchRL's checkpointer of that name: it saves a storage as one HDF5 file with a group per trajectory.

    TorchRL and h5py must be installed. TorchRL does not check that nothing is lost, and keeps no sums; :class:`FlatStorageCheckpointer`
    does both. Only a storage is saved: ``rb.storage.dumps(path)``. ``checkpointer=`` takes an object of TorchRL's class, too.

    Args:
        **kwargs: as TorchRL's, such as ``checkpoint_file``.

    Raises ``ImportError``: TorchRL or h5py is not installed.

    >>> from engram import H5StorageCheckpointer, LazyTensorStorage, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(
    ...     storage=LazyTensorStorage(100), checkpointer=H5StorageCheckpointer(checkpoint_file="rows.h5")
    ... )  # doctest: +SKIP
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self._take(_of_torchrl("H5StorageCheckpointer").H5StorageCheckpointer(**kwargs))

    def _take(self, theirs: _Theirs) -> None:
        self._theirs, self._moment = copy.copy(theirs), (1, False)
        combine, back = theirs._load_hooks  # noqa: SLF001 - TorchRL has no other way to see which slot is the oldest
        self._names = cast("_Hook", back).shift_key, cast("_Hook", back).is_full_key
        self._theirs._load_hooks = [combine, self._note, back]  # noqa: SLF001

    def _note(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict:
        del out
        shift, full = (data.get_non_tensor(name) for name in self._names)
        self._moment = int(shift), bool(full)
        return data

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Save the rows of a storage, as TorchRL does: a folder with the file, or a path ``*.h5``.

        Raises ``RuntimeError``: nothing was ever written. ``IncompatibleCheckpoint``: several lanes, or removed rows.

        >>> H5StorageCheckpointer().dumps(rb.storage, "rows.h5")  # doctest: +SKIP
        """
        who = type(self).__name__
        check_storage(storage, f"{who}: dumps")
        with storage.paused:
            store = written_store(storage, who)
            ring = ring_of(store, who)
            data = tensordict_type()(batch_size=(ring.slots, *ring.columns))
            for key, tensor in fields_of(store, ring).items():
                data.set(key, tensor.view(ring.slots, *ring.columns, *tensor.shape[2:]))
            self._theirs.dumps(_Slots(data, ring.live * ring.width, ring.shift, full=ring.full), Path(path))

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a file, the oldest first. Raises what TorchRL and h5py raise.

        >>> H5StorageCheckpointer().loads(rb.storage, "rows.h5")  # doctest: +SKIP
        """
        check_storage(storage, f"{type(self).__name__}: loads")
        found = _Slots()
        self._theirs.loads(found, Path(path))
        data = cast("TensorDict", found._storage)  # noqa: SLF001 - as TorchRL names it
        shift, full = self._moment
        if full:
            data = data[(torch.arange(len(data)) + shift) % len(data)]
        prepare_rows_of(storage, data, int(found._len), str(path)).commit()  # noqa: SLF001
        storage.notify(None, None)


def wrapped(theirs: object) -> H5StorageCheckpointer:
    """A checkpointer of TorchRL's."""
    made = object.__new__(H5StorageCheckpointer)
    StorageCheckpointerBase.__init__(made)
    made._take(cast("_Theirs", theirs))
    return made
