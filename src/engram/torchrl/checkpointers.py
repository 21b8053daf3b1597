"""Storage checkpointers with TorchRL's names, whose files hold each observation once, their hooks, and TorchRL's own HDF5 checkpointer."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import torch

from engram._support import field_paths, tensordicts
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.saved import checkpointers
from engram.store.memory import DTYPE_NAMES, DTYPE_OF
from engram.torchrl.layouts import FULL, SHAPE, SHIFT, Keys, LayoutDump, LayoutLeaf, RowsWriter, Steps, Write, as_key
from engram.torchrl.parts import Layout

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

    from tensordict import TensorDict

    from engram.saved.checkpointers import Key, LoadHook, SaveHook
    from engram.storages import Storage


class _Hook:
    _kind = "flat"
    _done: str | tuple[str, ...] = "done"

    def __init__(
        self,
        done_key: str | tuple[str, ...] | None = None,
        shift_key: str = SHIFT,
        is_full_key: str = FULL,
        done_keys: Iterable[object] = field_paths.DEFAULT_DONE_KEYS,
        reward_keys: Iterable[object] = ("reward",),
    ) -> None:
        keys = Keys.of(type(self).__name__, done_keys, reward_keys)
        done = as_key(self._done if done_key is None else done_key, f"{type(self).__name__}: done_key")
        self.keys = msgspec.structs.replace(keys, done=done, shift=shift_key, full=is_full_key)

    def layout(self, who: str) -> Layout | None:
        """The layout that the hook stands for, which is saved and loaded piece by piece; None: a class of yours calls otherwise.

        ``who``: what messages begin with.

        >>> from engram import TED2Nested
        >>> TED2Nested().layout("dumps").kind
        'nested'
        """
        calls = next(base for base in type(self).__mro__ if "__call__" in vars(base))
        return Layout(self._kind, self.keys, who) if calls.__module__ == __name__ else None


class TED2Flat(_Hook):
    """A save hook: steps in TorchRL's format become a flat TensorDict that holds each observation once.

    Args:
        done_key: the entry that says whether a trajectory ends with the step, one bool.
        shift_key: where the slot behind the newest one is noted.
        is_full_key: where it is noted whether all slots are live.
        done_keys: flags, as they are called at the root. Those below ``"next"`` are saved; those at the root must be False.
        reward_keys: rewards, which are below ``"next"`` only.

    Called with ``(data, path=None)``: a TensorDict ``[T, *columns]`` whose slots are those of a storage, after ``shift`` and ``is_full``
    were set, as checkpointers do. Returns a TensorDict without batch size: steps ``[T * columns, *shape]``, the oldest first,
    observations with the last next observation of each trajectory behind its steps. With ``path`` its tensors are files of that folder.

    Raises:
        IncompatibleCheckpoint: data that is not saved without loss: a next observation is not the observation of the next
            step, a flag at the root is True, or a field has no counterpart.
        RuntimeError: ``shift`` or ``is_full`` was not set. TypeError: no TensorDict.

    >>> import torch
    >>> from engram import Flat2TED, TED2Flat
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([[False], [False], [True]])
    >>> after = TensorDict({"obs": torch.tensor([1, 2, 9]), "reward": torch.ones(3), "done": done}, [3])
    >>> data = TensorDict({"obs": torch.arange(3), "done": torch.zeros_like(done), "next": after}, [3])
    >>> hook = TED2Flat()
    >>> hook.shift, hook.is_full = 3, True
    >>> flat = hook(data)
    >>> flat["obs"]
    tensor([0, 1, 2, 9])
    >>> bool((Flat2TED()(flat) == data).all())
    True
    """

    _done = ("next", "done")
    #: Slot behind the one that was written last.
    shift: int | None = None
    #: Whether all slots are live.
    is_full: bool | None = None

    def __call__(self, data: TensorDict, path: Path | None = None) -> TensorDict:
        return self._flat(data, path)[0]

    def _flat(self, data: TensorDict, path: Path | None) -> tuple[TensorDict, Steps]:
        who = type(self).__name__
        _check(data, who)
        if self.shift is None or self.is_full is None:
            raise RuntimeError(f"{who}: expected shift and is_full to be set, as a checkpointer does, got None.")
        slots, columns = data.batch_size[0], tuple(data.batch_size[1:])
        if not 0 <= self.shift <= slots:
            raise ValueError(f"{who}: shift: expected 0 to {slots}, got {self.shift}.")
        ring = checkpointers.Ring(slots, columns, self.shift or slots, bool(self.is_full))
        fields = {}
        for key, value in data.items(True, True):
            whole = value.reshape(slots, ring.width, *value.shape[data.ndim :])
            fields[(key,) if isinstance(key, str) else key] = whole
        writer = RowsWriter(fields, ring, self.keys, who)
        sink = _TensorDictSink(path)
        writer.write(sink)
        return sink.out, writer.steps


class Flat2TED(_Hook):
    """A load hook: what :class:`TED2Flat` made becomes steps in TorchRL's format again.

    Args:
        done_key: the entry that says whether a trajectory ends with the step.
        shift_key: where the slot behind the newest one is noted.
        is_full_key: where it is noted whether all slots are live.
        done_keys: flags. Those at the root become False.
        reward_keys: rewards.

    Called with ``(data, out=None)``. Returns a TensorDict ``[T, *columns]``, in which slots are those of before; or fills ``out``.

    Raises:
        CorruptCheckpoint: entries are not as long as the ends of trajectories say. KeyError: ``out`` lacks a field.

    >>> from engram import Flat2TED
    >>> Flat2TED().keys.done
    ('done',)
    """

    def __call__(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict:
        _check(data, type(self).__name__)
        leaves = _TensorDictLeaves(data, self.keys, type(self).__name__)
        dump = LayoutDump(leaves, self.keys)
        ring = dump.ring
        made = tensordicts.tensordict_type()(batch_size=(ring.slots, *ring.columns)) if out is None else out
        for field in dump.fields:
            shape = (ring.slots, *ring.columns, *field.shape)
            if out is None:
                made.set(field.key, torch.zeros(shape, dtype=DTYPE_OF[field.dtype]))
            tensor = made.get(field.key, None)
            if tensor is None:
                if dump.origin(field.key).key is None:
                    continue
                raise KeyError(
                    f"{type(self).__name__}: out: expected the field {field.key}, got {sorted(map(str, made.keys(True)))}."
                )
            for time, slot, n in ring.pieces(max(1, (16 << 20) // max(1, field.row_bytes * ring.width))):
                rows = dump.rows(dump.origin(field.key), field.shape, DTYPE_OF[field.dtype], (time, n))
                tensor[slot : slot + n] = rows.reshape(n, *ring.columns, *field.shape)
        return made


class TED2Nested(TED2Flat):
    """A save hook: as :class:`TED2Flat`, with nested tensors of which each row is a trajectory.

    The rows of columns that are not full end with one for the slots that hold nothing.

    >>> from engram import TED2Nested
    >>> hook = TED2Nested()
    >>> hook.shift is None
    True
    """

    _kind = "nested"

    def __call__(self, data: TensorDict, path: Path | None = None) -> TensorDict:
        flat, steps = self._flat(data, path)
        lengths, longer = steps.trajectories()
        out = tensordicts.tensordict_type()(batch_size=[len(lengths)])
        out.update(dict(flat.non_tensor_items()))
        out.memmap_(path)
        for key, value in flat.items(True, True):
            rows = lengths if len(value) == int(lengths.sum()) else longer
            shape = torch.tensor(value.shape[1:], dtype=torch.int64).repeat(len(rows), 1)
            shape = torch.cat([rows[:, None], shape], 1)
            if path is None:
                value = value.clone()
            out.make_memmap_from_storage(key, value.untyped_storage(), dtype=value.dtype, shape=shape)
        return out


class Nested2TED(Flat2TED):
    """A load hook: what :class:`TED2Nested` made becomes steps in TorchRL's format again.

    >>> from engram import Nested2TED
    >>> Nested2TED().keys.shift
    'shift'
    """

    def __call__(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict:
        _check(data, type(self).__name__)
        flat = tensordicts.tensordict_type()(dict(data.non_tensor_items()))
        for key, value in data.items(True, True):
            flat.set(key, _flattened(value))
        return super().__call__(flat, out=out)


def _check(data: object, who: str) -> None:
    if not tensordicts.is_tensor_collection(data):
        raise TypeError(f"{who}: expected a TensorDict, got a {type(data).__name__}.")


def _flattened(value: torch.Tensor) -> torch.Tensor:
    """The values of a nested tensor, one behind the other. A view."""
    if not value.is_nested:
        raise IncompatibleCheckpoint(f"Nested2TED: expected nested tensors, got one of shape {list(value.shape)}.")
    shape = [value.size(dim) for dim in range(2, value.ndim)]
    return torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).view(-1, *shape)


class _TensorDictSink:
    """Writes a layout into a TensorDict; into files if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.out = tensordicts.tensordict_type()()

    def begin(self, ring: checkpointers.Ring, steps: Steps, keys: Keys) -> None:
        self._ring, self._steps = ring, steps
        self.out.set_non_tensor(keys.full, ring.full)
        self.out.set_non_tensor(keys.shift, ring.shift)
        self.out.set_non_tensor(SHAPE, (ring.slots, *ring.columns))
        if self._path is not None:
            self.out.memmap_(self._path)

    @contextlib.contextmanager
    def column(self, key: Key, shape: torch.Size, dtype: torch.dtype, *, expanded: bool) -> Iterator[Write]:
        n = self._steps.observations if expanded else self._ring.slots * self._ring.width
        if self._path is None:
            values = torch.zeros((n, *shape), dtype=dtype)
            self.out.set(key, values)
        else:
            values = self.out.make_memmap(key, shape=torch.Size((n, *shape)), dtype=dtype)

        def write(at: int, some: torch.Tensor) -> None:
            values[at : at + len(some)] = some

        yield write


class _TensorDictLeaves:
    """A layout in a flat TensorDict."""

    def __init__(self, data: TensorDict, keys: Keys, who: str) -> None:
        self.name = who
        noted = {name: data.get_non_tensor(name, default=None) for name in keys.reserved}
        shape, shift, full = noted[SHAPE], noted[keys.shift], noted[keys.full]
        shape = (int(shape),) if isinstance(shape, int) else tuple(map(int, shape or ()))
        if not shape or min(shape) < 1 or shift is None or full is None or not 1 <= int(shift) <= shape[0]:
            raise CorruptCheckpoint(f"{who}: expected the entries {keys.reserved} of a layout, got {noted}.")
        self.ring = checkpointers.Ring(shape[0], shape[1:], int(shift), bool(full))
        self.length = self.ring.live * self.ring.width
        self._values: dict[Key, torch.Tensor] = {}
        self.leaves: dict[Key, LayoutLeaf] = {}
        for key, value in data.items(True, True):
            if value.dtype not in DTYPE_NAMES:
                raise IncompatibleCheckpoint(f"{who}: {key}: expected a dtype that can be stored, got {value.dtype}.")
            own = (key,) if isinstance(key, str) else key
            self._values[own] = value
            self.leaves[own] = LayoutLeaf(DTYPE_NAMES[value.dtype], tuple(value.shape[1:]), len(value))

    def read(self, key: Key, first: int, n: int) -> torch.Tensor:
        return self._values[key][first : first + n].cpu()


class FlatStorageCheckpointer(checkpointers.TensorStorageCheckpointer):
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

    _hooks: tuple[type[TED2Flat], type[Flat2TED]] = TED2Flat, Flat2TED

    def __init__(self, done_keys: Iterable[object] | None = None, reward_keys: Iterable[object] | None = None) -> None:
        super().__init__()
        keys = Keys.of(type(self).__name__, done_keys, reward_keys)
        save, load = self._hooks
        self._save_hooks.append(save(done_keys=keys.flags, reward_keys=keys.rewards))
        self._load_hooks.append(load(done_keys=keys.flags, reward_keys=keys.rewards))


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """As :class:`FlatStorageCheckpointer`, with nested tensors of which each row is a trajectory. The bytes are the same.

    >>> from engram import NestedStorageCheckpointer
    >>> NestedStorageCheckpointer(reward_keys=("reward", ("agents", "reward"))).layout.kind
    'nested'
    """

    _hooks = TED2Nested, Nested2TED


class _ShiftHook(Protocol):
    """A load hook of TorchRL's."""

    shift_key: str
    is_full_key: str

    def __call__(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict: ...


class _Theirs(Protocol):
    """A checkpointer of TorchRL's."""

    _load_hooks: Sequence[_ShiftHook | Callable[..., TensorDict]]

    def dumps(self, storage: _Slots, path: Path) -> None: ...
    def loads(self, storage: _Slots, path: Path) -> None: ...


def _of_torchrl(name: str) -> ModuleType:
    """TorchRL's module. Raises ``ImportError``: it is not installed, or h5py is not; says how to install it."""
    try:
        import h5py  # noqa: F401 - what TorchRL needs to save by it
        import torchrl.data as found
    except ImportError as error:
        raise ImportError(
            f"{name}: it is TorchRL's, which needs h5py: pip install torchrl 'engram-replay[hdf5]'. FlatStorageCheckpointer needs neither."
        ) from error
    return cast("ModuleType", found)


def H5Split() -> SaveHook:  # noqa: N802 - a class of TorchRL's
    """TorchRL's save hook of that name: the trajectories of what :class:`TED2Nested` made become entries ``traj_0``, ``traj_1`` …

    Raises ``ImportError``: TorchRL or h5py is not installed.

    >>> from engram import H5Split
    >>> type(H5Split()).__module__.partition(".")[0]  # doctest: +SKIP
    'torchrl'
    """
    return cast("SaveHook", _of_torchrl("H5Split").H5Split())


def H5Combine() -> LoadHook:  # noqa: N802 - a class of TorchRL's
    """TorchRL's load hook of that name: entries ``traj_0``, ``traj_1`` … become nested tensors, as :class:`Nested2TED` takes them.

    Raises ``ImportError``: TorchRL or h5py is not installed.

    >>> from engram import H5Combine
    >>> type(H5Combine()).__module__.partition(".")[0]  # doctest: +SKIP
    'torchrl'
    """
    return cast("LoadHook", _of_torchrl("H5Combine").H5Combine())


class _Slots:
    """A storage, as TorchRL's checkpointers see one: with slots that are saved, or empty, and filled by what is loaded."""

    def __init__(self, data: TensorDict | None = None, length: int = 0, shift: int = 1, *, full: bool = False) -> None:
        self._storage: TensorDict | _Slots | None = data
        self.initialized, self._len = data is not None, length
        self._is_full, self._last_cursor = full, shift - 1

    def _init(self, first: TensorDict) -> None:  # noqa: ARG002 - says what a slot is; all of them follow
        self._storage = self

    def update_(self, data: TensorDict) -> None:
        self._storage = data


class H5StorageCheckpointer(checkpointers.StorageCheckpointerBase):
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
        self._names = cast("_ShiftHook", back).shift_key, cast("_ShiftHook", back).is_full_key
        self._theirs._load_hooks = [combine, self._note, back]  # noqa: SLF001

    def _note(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict:  # noqa: ARG002 - as of a hook
        shift, full = (data.get_non_tensor(name) for name in self._names)
        self._moment = int(shift), bool(full)
        return data

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Save the rows of a storage, as TorchRL does: a folder with the file, or a path ``*.h5``.

        Raises ``RuntimeError``: nothing was ever written. ``IncompatibleCheckpoint``: several lanes, or removed rows.

        >>> H5StorageCheckpointer().dumps(rb.storage, "rows.h5")  # doctest: +SKIP
        """
        who = type(self).__name__
        checkpointers.check_storage(storage, f"{who}: dumps")
        with storage.paused:
            store = checkpointers.store_of_columns(storage, who)
            ring = checkpointers.ring_of(store, who)
            slots = checkpointers.slots_of(store, ring)
            self._theirs.dumps(_Slots(slots, ring.live * ring.width, ring.shift, full=ring.full), Path(path))

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Replace the rows of a storage by those of a file, the oldest first. Raises what TorchRL and h5py raise.

        >>> H5StorageCheckpointer().loads(rb.storage, "rows.h5")  # doctest: +SKIP
        """
        checkpointers.check_storage(storage, f"{type(self).__name__}: loads")
        found = _Slots()
        self._theirs.loads(found, Path(path))
        data = cast("TensorDict", found._storage)  # noqa: SLF001 - as TorchRL names it
        shift, full = self._moment
        if full:
            data = data[(torch.arange(len(data)) + shift) % len(data)]
        checkpointers.prepare_rows_of(storage, data, int(found._len), str(path)).commit()  # noqa: SLF001
        storage.notify(None, None)


def checkpointer(theirs: object) -> H5StorageCheckpointer:
    """A checkpointer of TorchRL's."""
    made = object.__new__(H5StorageCheckpointer)
    checkpointers.StorageCheckpointerBase.__init__(made)
    made._take(cast("_Theirs", theirs))
    return made
