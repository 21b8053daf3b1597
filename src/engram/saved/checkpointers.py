"""Storage checkpointers: they save the rows of a storage, as they are, as hooks return them, or in a layout of another library.

What TorchRL saved is read by :mod:`engram.torchrl`, which is imported when something of it is met.
"""

from __future__ import annotations

import abc
import importlib
import inspect
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import msgspec
import torch

from engram._support import checks, tensordicts
from engram._support.state import raised_by_the_user, typed
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import layout
from engram.format import schema as schemas
from engram.format.files import Descriptor
from engram.saved import checkpoints, description, disk, part_writer
from engram.saved.documents import Cut, ShardRows, Totals, corrupt
from engram.saved.folder import ENTRY, OF_DUMP, OF_WRITER, Folder, damaged_files, listed_files, summed_files
from engram.saved.part_reader import PartReader, is_part
from engram.saved.parts import Dumpable, Preparation, Unprepared, described_state, read_state
from engram.saved.snapshot import SavedRows
from engram.store.memory import DTYPE_NAMES, refuse_ragged, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tensordict import TensorDict

    from engram.store.store import Store
    from engram.types import Form, ItemsSource, RowsSource, RowsTarget, StorageLoad, Traits

Key: TypeAlias = tuple[str, ...]
#: Names and kinds of indexes of the store.
IndexNames: TypeAlias = "Collection[tuple[str, str]]"

#: What says how many rows there are, in a folder that TensorDict or a layout has written.
METADATA = "storage_metadata.json"
#: What a part that hooks have changed calls itself; and one in a layout, of which HDF5 is no more written.
HOOKED = "HookedLayout"
LAYOUTS = ("FlatLayout", "NestedLayout", "HDF5Layout")


class SavedStorage(Protocol):
    """A storage that is saved or loaded, as far as that asks of it."""

    memory: Store | None
    traits: Traits

    @property
    def form(self) -> Form: ...
    @property
    def paused(self) -> AbstractContextManager[object]: ...
    @property
    def checkpointer(self) -> StorageCheckpointerBase: ...

    def __len__(self) -> int: ...
    def notify(self, write: None, data: None) -> None: ...
    def state_without_rows(self, *, without: IndexNames = ()) -> dict[str, object]: ...
    def prepare_part(
        self, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()
    ) -> StorageLoad: ...
    def prepare_rows(self, state: dict[str, object], source: RowsSource) -> StorageLoad: ...
    def prepare_items(self, source: ItemsSource) -> StorageLoad: ...
    def prepare_unwritten(self) -> StorageLoad: ...


class Ring(NamedTuple):
    """The slots of a storage, and what of them is live."""

    slots: int
    #: Sizes of the dimensions after the first.
    columns: tuple[int, ...]
    #: Slot behind the one that was written last: the oldest one, if all are live. In ``[1, slots]``.
    shift: int
    #: Whether all slots are live; else those before ``shift`` are.
    full: bool

    @property
    def width(self) -> int:
        """Rows of a slot."""
        return torch.Size(self.columns).numel()

    @property
    def live(self) -> int:
        """Live slots."""
        return self.slots if self.full else self.shift

    def slot_of(self, time: int) -> int:
        """The slot of the step that is that many steps younger than the oldest."""
        return (time + self.shift) % self.slots if self.full else time

    def pieces(self, most: int) -> Iterator[tuple[int, int, int]]:
        """Live steps in pieces of at most ``most``: ``(time, slot, n)``, each of ``n`` slots that lie together."""
        time = 0
        while time < self.live:
            slot = self.slot_of(time)
            n = min(most, self.live - time, self.slots - slot)
            yield time, slot, n
            time += n


def ring_of(store: Store, who: str) -> Ring:
    """The ring that a store's rows are in.

    Raises:
        RuntimeError: it has no rows. IncompatibleCheckpoint: rows of several lanes, or removed ones between others.
    """
    schema = store.schema
    if schema.lanes > 1:
        raise IncompatibleCheckpoint(
            f"{who}: dumps: expected rows of one lane, got {schema.lanes} lanes, whose cursors this layout has no place for. Save them "
            "without it, or use ndim=2."
        )
    position, length = store.lane_states()[0, :2].tolist()
    if not length:
        raise RuntimeError(f"{who}: dumps: expected rows, got none: the storage is empty.")
    width = torch.Size(schema.columns).numel()
    full = length == schema.capacity
    if int(store.core.void_rows) or length % width or (not full and position % schema.capacity != length):
        raise IncompatibleCheckpoint(
            f"{who}: dumps: expected rows [0, {length}), got some of others, as rows between them were removed: this layout cannot say "
            "which. Save them without it."
        )
    slots = schema.capacity // width
    return Ring(slots, schema.columns, (position // width % slots or slots), full)


def fields_of(store: Store, ring: Ring) -> dict[Key, torch.Tensor]:
    """The fields of a store, ``[T, W, *shape]``. Views."""
    tensors = store.tensors
    return {
        field.key: tensor.view(ring.slots, ring.width, *tensor.shape[1:])
        for field, tensor in zip(store.schema.fields, tensors, strict=True)
    }


def slots_of(store: Store, ring: Ring) -> TensorDict:
    """The fields of a store, ``[T, *columns]``. Views."""
    data = tensordicts.tensordict_type()(batch_size=(ring.slots, *ring.columns))
    for key, tensor in fields_of(store, ring).items():
        data.set(key, tensor.view(ring.slots, *ring.columns, *tensor.shape[2:]))
    return data


@runtime_checkable
class HasCursor(Protocol):
    """A snapshot in a layout that TorchRL reads, too."""

    @property
    def cursor(self) -> dict[str, int]: ...


def for_torchrl(folder: Path, snapshot: object, batch_size: object) -> None:
    """Beside a storage in a layout, write what TorchRL's ``loads`` of a buffer with a uniform sampler reads, too."""
    if isinstance(snapshot, HasCursor):
        disk.put(folder / OF_DUMP, msgspec.json.encode({"batch_size": batch_size}))
        disk.put(folder / "writer" / OF_WRITER, msgspec.json.encode(snapshot.cursor))


def written_store(storage: SavedStorage, who: str) -> Store:
    """The store of a storage. Raises ``RuntimeError``: nothing was ever written. ``TypeError``: it has none."""
    store = storage.memory
    if store is not None:
        return store
    if not storage.traits.has_fields:
        raise TypeError(
            f"{who}: expected a storage of tensors, got a {type(storage).__name__}. Save it without the layout."
        )
    raise RuntimeError(f"{who}: dumps: expected rows, got a storage that was never written.")


def store_of_columns(storage: SavedStorage, who: str) -> Store:
    """The same of a storage whose rows all have one size. Raises, too: ``ValueError``: fields are ragged."""
    store = written_store(storage, who)
    refuse_ragged(store.schema, f"{who}: dumps", "Save it without a layout or hooks")
    return store


def is_layout(reader: PartReader) -> bool:
    """Whether a part holds a storage in a layout."""
    return reader.part == "storage" and reader.type in LAYOUTS


def rows_state(schema: schemas.Schema, length: int, position: int, write_count: int) -> dict[str, object]:
    """The state without rows of a tensor storage of one lane: the oldest row has the smallest ticket.

    Args:
        schema: with the capacity.
        length: live rows, whole slots.
        position: that the next row gets.
        write_count: rows ever written.
    """
    width = math.prod(schema.columns)
    slots, steps = schema.capacity // width, length // width
    seam = position // width % slots if length == schema.capacity else 0
    age = (torch.arange(steps, device="cpu") - seam) % max(steps, 1)  # of each slot: 0 is the oldest
    numbers = (age[:, None] * width + torch.arange(width, device="cpu") + 1).reshape(-1)
    return {
        "schema": schemas.encode(schema).decode(),
        "lanes": torch.tensor([[position, length, 0, 0]], device="cpu"),
        "numbers": numbers,
        "writes": None,
        "clock": length + 1,
        "write_count": write_count,
        "priorities": {},
        "passes": {},
        "windows": {},
    }


def summed(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Names, sizes and sums of files, as a state has them."""
    described, packed = summed_files(folder, names)
    return {"files": described, "sums": torch.frombuffer(packed, dtype=torch.uint8).clone()}


def check_sums(folder: Path, noted: Mapping[str, object]) -> None:
    """Raise ``CorruptCheckpoint`` unless files are as they were; names the file."""
    expected = noted.get("sums")
    raw = expected.numpy().tobytes() if isinstance(expected, torch.Tensor) and expected.dtype is torch.uint8 else b""
    for problem in damaged_files(folder, listed_files({ENTRY: noted}), raw):
        raise corrupt(*problem)


class DumpedPriorities(NamedTuple):
    """The priorities of a prioritized sampler, as another library saved them."""

    alpha: float
    beta: float
    eps: float
    #: float64 ``[length]``, CPU: ``(priority + eps) ** alpha`` of each row; finite, at least 0.
    leaves: torch.Tensor
    #: The largest priority so far, not raised to ``alpha``; None before the first.
    max_priority: float | None


class ForeignDump(Protocol):
    """A checked folder of another library, of one buffer."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def priorities(self) -> DumpedPriorities | None: ...
    @property
    def rng_state(self) -> torch.Tensor | None: ...

    def prepare(self, storage: SavedStorage, without: Collection[str]) -> StorageLoad:
        """Check its rows, without some entries, for a storage. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``."""


class ForeignEnsemble(NamedTuple):
    """A checked folder of another library, of several buffers."""

    batch_size: int | None
    rng_state: torch.Tensor | None
    members: Sequence[ForeignDump]


class ForeignFormat(Protocol):
    """A format of another library: its folders, states and layouts. A module of functions."""

    @property
    def library(self) -> str: ...

    def recognises(self, path: Path) -> bool:
        """Whether a folder looks like one of this format. Opens nothing."""

    def read(self, path: Path, *, ndim: int, max_bytes: int) -> ForeignDump:
        """Describe and check a folder of one buffer. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``, ``OSError``."""

    def read_ensemble(self, path: Path, ndims: Sequence[int], *, max_bytes: int) -> ForeignEnsemble:
        """As :meth:`read`, of as many buffers."""

    def read_state(self, state: dict[str, object], ndim: int) -> ForeignDump | None:
        """A state that a buffer returned; None: it is none of this format. Raises ``IncompatibleCheckpoint``: of an ensemble."""

    def layout(self, who: str) -> Layout:
        """The layout of the usual keys."""

    def prepare_layout(self, storage: SavedStorage, reader: PartReader, without: Sequence[str]) -> StorageLoad:
        """Check a part in a layout for a storage. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``."""

    def checkpointer(self, theirs: object) -> object:
        """A checkpointer of that library, as one of engram's."""


def torchrl() -> ForeignFormat:
    """What reads TorchRL's files and states."""
    return cast("ForeignFormat", importlib.import_module("engram.torchrl.dumps"))


def foreign_format(path: Path) -> ForeignFormat | None:
    """The format of a folder that another library saved; None: there is none."""
    return torchrl() if os.path.lexists(path / "buffer_metadata.json") and torchrl().recognises(path) else None


def foreign_state(state: object, ndim: int) -> ForeignDump | None:
    """A state that another library's buffer returned; None: it is engram's, or none. Raises as :meth:`ForeignFormat.read_state`."""
    if not isinstance(state, dict) or "_members" in state:
        return None
    storage = state.get("_storage")
    return torchrl().read_state(state, ndim) if isinstance(storage, dict) and "clock" not in storage else None


#: What hooks are called with besides the data: the keyword of a save hook, and of a load hook.
_KEYWORD = {"save": ("path", "folder"), "load": ("out", "None")}


def check_hook(hook: SaveHook | LoadHook, kind: str, who: str) -> None:
    """Raise ``TypeError`` unless a hook can be called as it will be.

    Args:
        hook: which. The call itself tells of a function of C that has no signature.
        kind: ``save`` or ``load``.
        who: what the message begins with.
    """
    keyword, value = _KEYWORD[kind]
    expected = f"{who}: register_{kind}_hook: expected a function that can be called as hook(data, {keyword}={value}), got {hook!r:.80}"
    if not callable(hook):
        raise TypeError(f"{expected}. Register a function.")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return
    try:
        signature.bind(None, **{keyword: None})
    except TypeError as error:
        raise TypeError(
            f"{expected}, which takes {signature}: {error}. Define it as (data, {keyword}=None)."
        ) from error


def applied(kind: str, hook: Callable[..., object], data: TensorDict, call: str, **keyword: object) -> TensorDict:
    """What a hook to ``save`` or to ``load`` makes of rows.

    Raises what it raises, with a note that names it; ``TypeError``: no TensorDict.
    """
    with raised_by_the_user(f"Raised by the {kind} hook {hook!r:.80}, in {call}."):
        found = hook(data, **keyword)
        if not isinstance(found, tensordicts.tensordict_type()):
            raise TypeError(
                f"{call}: expected a TensorDict from {hook!r:.80}, got {type(found).__name__}. Return one from it, also where the hook "
                "changes the data in place."
            )
    return cast("TensorDict", found)


class SaveHook(Protocol):
    """Changes what is saved: ``[T, *columns]`` slots of a storage, of which those behind the live ones hold anything."""

    def __call__(self, data: TensorDict, path: Path | None = None) -> TensorDict: ...


class LoadHook(Protocol):
    """Makes ``[T, *columns]`` slots of what a save hook returned."""

    def __call__(self, data: TensorDict, out: TensorDict | None = None) -> TensorDict: ...


@runtime_checkable
class _Timed(Protocol):
    """A hook that wants to know which slot is the oldest."""

    shift: int | None
    is_full: bool | None


class Layout(Protocol):
    """Files that hold each observation once."""

    def snapshot(self, storage: SavedStorage, without: IndexNames) -> SlotsSnapshot: ...

    def load(self, storage: SavedStorage, folder: Path) -> StorageLoad:
        """Check such files, which engram did not write, for a storage."""


@runtime_checkable
class LayoutHook(Protocol):
    """A hook that is a layout: rows are saved, or loaded, piece by piece, and the hook is not called."""

    def layout(self, who: str) -> Layout | None: ...


class SlotsSnapshot(abc.ABC):
    """A storage that is saved slot by slot, in another form than its own. It must not change until then.

    Args:
        storage: which; its writers are paused.
        who: what messages begin with.
        without: names and kinds of indexes that others save.

    Raises:
        RuntimeError: nothing was ever written. TypeError: it has no fields. ValueError: fields are ragged.
    """

    #: Whether writers must wait until it is saved.
    needs_pause = True

    def __init__(self, storage: SavedStorage, who: str, without: IndexNames = ()) -> None:
        self._store, self._who = store_of_columns(storage, who), who
        self.state = storage.state_without_rows(without=without)
        self._ring = ring_of(self._store, who)
        self._rows = self._ring.live * self._ring.width
        self.nbytes = self._rows * self._store.schema.row_bytes

    @abc.abstractmethod
    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write it into a new folder, as a part of a dump. Raises ``OSError``: no space, or an I/O error."""

    def _finished(
        self, part: part_writer.PartWriter, noted: Mapping[str, object], progress: Callable[[int], None] | None
    ) -> SavedRows:
        """Complete the part. ``noted``: of the files that lie beside it."""
        info = part.finish(described_state(part, {**self.state, ENTRY: noted}, "storage"))
        if progress is not None:
            progress(self.nbytes)
        cut, totals = Cut(typed(self.state, "clock", int, "storage")), Totals(steps=self._rows, episodes=0)
        return SavedRows(info, ShardRows(cut, totals, description.NO_SCHEMA))


class HookedSnapshot(SlotsSnapshot):
    """A storage that hooks change when it is saved."""

    def __init__(self, storage: SavedStorage, hooks: Sequence[SaveHook], who: str, without: IndexNames = ()) -> None:
        super().__init__(storage, who, without)
        self._hooks = hooks

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write it into a new folder, as a part of a dump.

        Raises:
            TypeError: a hook returned no TensorDict, or something in it that is no tensor, which would be pickled.
            ValueError: they returned nothing.
            OSError: no space, or an I/O error.
        """
        ring = self._ring
        part, data = part_writer.PartWriter(folder, "storage", HOOKED), slots_of(self._store, ring)
        holds = _has_elements(data)
        for hook in self._hooks:
            if isinstance(hook, _Timed):
                hook.shift, hook.is_full = ring.shift, ring.full
            data = applied("save", hook, data, f"{self._who}: dumps", path=folder)
        if holds and not _has_elements(data):
            names = ", ".join(f"{hook!r:.80}" for hook in self._hooks)
            raise ValueError(
                f"{self._who}: dumps: expected tensors of {ring.live} slots from the save hooks, {names}, got none with an element: the "
                "rows would be lost. Return from them what is to be saved."
            )
        data.memmap(folder, copy_existing=True)
        disk.put(folder / METADATA, msgspec.json.encode({"metadata": {}, "is_pytree": False, "len": self._rows}))
        files = _files(folder)
        if strange := [name for name in files if not name.endswith((".memmap", ".json"))]:
            raise TypeError(
                f"{self._who}: dumps: expected tensors from the hooks, got entries that are pickled: {strange[:5]}."
            )
        for name in files:
            disk.finish(Descriptor.open(folder / name, os.O_RDWR))
        return self._finished(part, summed(folder, files), progress)


def _has_elements(data: TensorDict) -> bool:
    return any(tensor.numel() for tensor in data.values(True, True) if isinstance(tensor, torch.Tensor))


def _files(folder: Path) -> list[str]:
    """Names of the files below a folder, but for engram's."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [path.as_posix() for path in found if path.parts[0] != layout.FOLDER]


def prepare_hooked(
    storage: SavedStorage,
    folder: Path,
    hooks: Sequence[LoadHook],
    reader: PartReader | None,
    without: Sequence[str] = (),
) -> StorageLoad:
    """Check what hooks make of a folder, for a storage.

    Args:
        storage: which.
        folder: with a TensorDict.
        hooks: called in order. What the last one returns is held in memory until it is committed.
        reader: of the part that lies there; None: there is none, so that the rows are ``[0, len)``, the oldest first.
        without: names of priorities that the caller loads.

    Raises:
        CorruptCheckpoint: damaged; names the file. IncompatibleCheckpoint: other fields than in the storage, or pickles. Nothing
            is changed.
    """
    state: dict[str, object] | None = None
    if reader is not None:
        state = read_state(reader)
        noted = state.pop(ENTRY, None)
        if not isinstance(noted, dict):
            raise CorruptCheckpoint(f"{folder}: expected sums of the files, found none.")
        check_sums(folder, noted)
    if strange := [name for name in _files(folder) if not name.endswith((".memmap", ".json"))]:
        raise IncompatibleCheckpoint(
            f"{folder}: expected tensors, got {strange[:5]}, which may be pickles. They are never opened."
        )
    length = Folder(folder).json((METADATA,)).get("len")
    if not isinstance(length, int) or length < 1:
        raise CorruptCheckpoint(f"{folder / METADATA}: expected the number of rows, got {length!r:.40}.")
    data = tensordicts.tensordict_type().load_memmap(folder)
    for hook in hooks:
        data = applied("load", hook, data, f"{folder}: load", out=None)
    return prepare_rows_of(storage, data, length, str(folder), state, without)


def prepare_rows_of(
    storage: SavedStorage,
    data: TensorDict,
    length: int,
    where: str,
    state: dict[str, object] | None = None,
    without: Sequence[str] = (),
) -> StorageLoad:
    """Check slots ``[T, *columns]`` for a storage, of which ``length`` rows are live. Without a state the oldest are the first ones.

    Raises ``IncompatibleCheckpoint``: other fields than in the storage.
    """
    slots = tuple(data.batch_size)
    fields = {(k,) if isinstance(k, str) else k: it.flatten(0, len(slots) - 1) for k, it in data.items(True, True)}
    if not slots or not fields or length > min(map(len, fields.values())):
        raise IncompatibleCheckpoint(
            f"{where}: expected at least {length} rows from the hooks, got the batch size {list(slots)}."
        )
    if state is None:
        like = None if storage.memory is None else storage.memory.schema
        schema = like or _schema({**fields, **_others(data)}, slots, where)
        state = rows_state(schema, length, length, length)
    else:
        schema = schemas.decode(typed(state, "schema", str, where).encode(), where)
        state["priorities"] = {
            name: it for name, it in typed(state, "priorities", dict, where).items() if name not in without
        }
    for field in schema.fields:
        found = fields.get(field.key)
        if found is None or DTYPE_NAMES.get(found.dtype) != field.dtype or tuple(found.shape[1:]) != field.shape:
            got = "none" if found is None else f"{found.dtype} of shape {list(found.shape[1:])}"
            raise IncompatibleCheckpoint(
                f"{where}: expected the field {field.key} {field.dtype} of shape {list(field.shape)} from the hooks, got {got}."
            )
    return storage.prepare_rows(state, _HookedRows([fields[field.key] for field in schema.fields], length))


class _HookedRows(NamedTuple):
    """Rows that hooks have made."""

    columns: list[torch.Tensor]
    length: int

    def fill(self, tensors: RowsTarget) -> None:
        for number, column in enumerate(self.columns):
            write_rows(tensors, number, 0, column[: self.length])


def _others(data: TensorDict) -> dict[Key, object]:
    """Entries that are no tensors."""
    from tensordict import is_leaf_nontensor

    found = data.items(True, True, is_leaf=is_leaf_nontensor)
    return {(key,) if isinstance(key, str) else key: it for key, it in found if not isinstance(it, torch.Tensor)}


def _schema(fields: Mapping[Key, object], slots: tuple[int, ...], where: str) -> schemas.Schema:
    """The schema of what hooks have made. Raises ``IncompatibleCheckpoint``: what cannot be stored."""
    made = []
    for key, value in fields.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
            got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise IncompatibleCheckpoint(
                f"{where}: field {key}: expected a tensor that can be stored from the hooks, got {got}. Leave it out, or make one of it."
            )
        made.append(schemas.Field(key, DTYPE_NAMES[value.dtype], tuple(value.shape[1:])))
    return schemas.Schema(math.prod(slots), 1, slots[1:], tuple(made), tensordicts_of(fields))


def tensordicts_of(keys: Iterable[Key]) -> schemas.Node:
    """TensorDicts in TensorDicts with fields of these keys, numbered in that order."""
    root = schemas.Node("tensordict", children={})
    for number, key in enumerate(keys):
        node = root
        for part in key[:-1]:
            node = node.children.setdefault(part, schemas.Node("tensordict", children={}))
        node.children[key[-1]] = schemas.Node("leaf", field=number)
    return root


def check_storage(storage: object, call: str) -> Dumpable:
    """The same, as what saves itself. Raises ``TypeError``: it is no storage of engram's."""
    return checks.check_type(call, storage, Dumpable, "a storage of engram's")


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

    def preparation(self, storage: SavedStorage, without: IndexNames) -> Preparation[SlotsSnapshot] | None:
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

    def prepare_load(self, storage: SavedStorage, reader: PartReader, without: Sequence[str]) -> StorageLoad | None:
        """Check a part that is not of the storage's own form; None: it is.

        Raises: as :meth:`loads`; nothing is changed.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, TensorStorageCheckpointer
        >>> from engram.saved.part_reader import PartReader
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
        if reader.part == "storage" and reader.type == HOOKED:
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

    def snapshot(self, storage: SavedStorage, without: IndexNames = ()) -> SlotsSnapshot:
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

    def preparation(self, storage: SavedStorage, without: IndexNames) -> Preparation[SlotsSnapshot] | None:
        """As of the base class: there is one with hooks.

        >>> from engram import FlatStorageCheckpointer, LazyTensorStorage
        >>> FlatStorageCheckpointer().preparation(LazyTensorStorage(10), ()) is None
        False
        """
        return Unprepared(lambda: self.snapshot(storage, without)) if self._save_hooks else None

    def dumps(self, storage: SavedStorage, path: str | os.PathLike[str]) -> None:
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
        itself = check_storage(storage, f"{type(self).__name__}: dumps")
        written_store(storage, type(self).__name__)
        if not self._save_hooks:
            Dumpable.dumps(itself, Path(path))
            return
        with checkpoints.replacing(Path(path)) as folder, disk.batched_fsync(), storage.paused:
            self.snapshot(storage).save(folder)

    def loads(self, storage: SavedStorage, path: str | os.PathLike[str]) -> None:
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
        folder = checkpoints.standing(Path(path))
        if is_part(folder):
            with PartReader.open(folder) as reader:
                load = self.prepare_load(storage, reader, ()) or storage.prepare_part(reader)
                load.commit()
        else:
            self._prepare_foreign(storage, folder).commit()
        storage.notify(None, None)

    def _prepare_foreign(self, storage: SavedStorage, folder: Path) -> StorageLoad:
        """Check a folder that engram did not write."""
        layout = self._layout_of(self._load_hooks) if self._load_hooks else torchrl().layout(type(self).__name__)
        return layout.load(storage, folder) if layout else prepare_hooked(storage, folder, self._load_hooks, None)


def accepted(given: object) -> object:
    """A checkpointer that a storage takes: one of TorchRL's for HDF5 files is wrapped, everything else stays."""
    theirs = any(base.__name__ == "H5StorageCheckpointer" for base in type(given).__mro__)
    return torchrl().checkpointer(given) if theirs and not isinstance(given, StorageCheckpointerBase) else given


def prepare_dumped(
    storage: SavedStorage, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()
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

    def dumps(self, storage: SavedStorage, path: str | os.PathLike[str]) -> None:
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
        itself = check_storage(storage, f"{type(self).__name__}: dumps")
        if not len(storage):
            raise RuntimeError(f"{type(self).__name__}: dumps: expected items, got a storage that was never written.")
        if self._save_hooks:
            raise TypeError(f"{type(self).__name__}: dumps: expected no hooks: items of a list are saved one by one.")
        Dumpable.dumps(itself, Path(path))


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
