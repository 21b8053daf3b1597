"""Storages that hooks of the user's change on their way to a folder and back."""

from __future__ import annotations

import inspect
import math
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch

from engram._support.state import raised_by_the_user, typed
from engram._support.tensordicts import tensordict_type
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import beside, disk, layout
from engram.format import schema as schemas
from engram.format.checkpoints import Cut, ShardRows, Totals
from engram.format.files import Descriptor
from engram.format.folder import Folder
from engram.format.parts import NO_SCHEMA, PartWriter
from engram.format.schema import Field, Node, Schema, put_leaf
from engram.persist.components import described_state, read_state
from engram.persist.rows import SavedRows
from engram.persist.slots import HOOKED, METADATA, check_sums, fields_of, ring_of, rows_state, summed, written_store
from engram.store.memory import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from engram.format.parts import PartReader
    from engram.persist.slots import Key, LaidOut
    from engram.types import RowsTarget, StorageLoad


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


def saved_by(hook: SaveHook, data: TensorDict, path: Path, who: str) -> TensorDict:
    """What a save hook makes of rows. Raises what it raises, with a note that names it; ``TypeError``: no TensorDict."""
    with raised_by_the_user(f"Raised by the save hook {hook!r:.80} of {who}."):
        return _checked(hook(data, path=path), f"{who}: dumps", hook)


def loaded_by(hook: LoadHook, data: TensorDict, where: str) -> TensorDict:
    """What a load hook makes of what was saved. Raises as :func:`saved_by`."""
    with raised_by_the_user(f"Raised by the load hook {hook!r:.80}."):
        return _checked(hook(data, out=None), f"{where}: load", hook)


def _checked(data: TensorDict, call: str, hook: SaveHook | LoadHook) -> TensorDict:
    if not isinstance(data, tensordict_type()):
        raise TypeError(
            f"{call}: expected a TensorDict from {hook!r:.80}, got {type(data).__name__}. Return one from it, also where the hook changes "
            "the data in place."
        )
    return data


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


class LayoutSnapshot(Protocol):
    """A storage that is saved in a layout."""

    state: dict[str, object]
    nbytes: int
    needs_pause: bool

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows: ...


class Layout(Protocol):
    """Files that hold each observation once."""

    @property
    def kind(self) -> str: ...

    def snapshot(self, storage: LaidOut, without: Collection[tuple[str, str]]) -> LayoutSnapshot: ...

    def load(self, storage: LaidOut, folder: Path) -> StorageLoad:
        """Check such files, which engram did not write, for a storage."""


@runtime_checkable
class LayoutHook(Protocol):
    """A hook that is a layout: rows are saved, or loaded, piece by piece, and the hook is not called."""

    def layout(self, who: str) -> Layout | None: ...


class HookedSnapshot:
    """A storage that hooks change when it is saved. It must not change until then.

    Raises ``RuntimeError``: nothing was ever written.
    """

    #: Whether writers must wait until it is saved.
    needs_pause = True

    def __init__(
        self, storage: LaidOut, hooks: Sequence[SaveHook], who: str, without: Collection[tuple[str, str]] = ()
    ) -> None:
        self._store, self._hooks, self._who = written_store(storage, who), hooks, who
        self.state = storage.state_without_rows(without=without)
        self._ring = ring_of(self._store, who)
        self.nbytes = self._ring.live * self._ring.width * self._store.schema.row_bytes

    def save(self, folder: Path, progress: Callable[[int], None] | None = None) -> SavedRows:
        """Write it into a new folder, as a part of a dump.

        Raises:
            TypeError: a hook returned no TensorDict, or something in it that is no tensor, which would be pickled.
            ValueError: they returned nothing.
            OSError: no space, or an I/O error.
        """
        ring = self._ring
        part = PartWriter(folder, "storage", HOOKED)
        data = tensordict_type()(batch_size=(ring.slots, *ring.columns))
        for key, tensor in fields_of(self._store, ring).items():
            data.set(key, tensor.view(ring.slots, *ring.columns, *tensor.shape[2:]))
        holds = _has_elements(data)
        for hook in self._hooks:
            if isinstance(hook, _Timed):
                hook.shift, hook.is_full = ring.shift, ring.full
            data = saved_by(hook, data, folder, self._who)
        if holds and not _has_elements(data):
            names = ", ".join(f"{hook!r:.80}" for hook in self._hooks)
            raise ValueError(
                f"{self._who}: dumps: expected tensors of {ring.live} slots from the save hooks, {names}, got none with an element: the "
                "rows would be lost. Return from them what is to be saved."
            )
        data.memmap(folder, copy_existing=True)
        live = ring.live * ring.width
        disk.put(folder / METADATA, msgspec.json.encode({"metadata": {}, "is_pytree": False, "len": live}))
        files = _files(folder)
        if strange := [name for name in files if not name.endswith((".memmap", ".json"))]:
            raise TypeError(
                f"{self._who}: dumps: expected tensors from the hooks, got entries that are pickled: {strange[:5]}."
            )
        for name in files:
            disk.finish(Descriptor.open(folder / name, os.O_RDWR))
        info = part.finish(described_state(part, {**self.state, beside.ENTRY: summed(folder, files)}, "storage"))
        if progress is not None:
            progress(self.nbytes)
        return SavedRows(
            info, ShardRows(Cut(typed(self.state, "clock", int, "storage")), Totals(steps=live, episodes=0), NO_SCHEMA)
        )


def _has_elements(data: TensorDict) -> bool:
    return any(tensor.numel() for tensor in data.values(True, True) if isinstance(tensor, torch.Tensor))


def _files(folder: Path) -> list[str]:
    """Names of the files below a folder, but for engram's."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [path.as_posix() for path in found if path.parts[0] != layout.FOLDER]


def is_hooked(reader: PartReader) -> bool:
    """Whether a part holds a storage that hooks have changed."""
    return reader.part == "storage" and reader.type == HOOKED


def prepare_hooked(
    storage: LaidOut, folder: Path, hooks: Sequence[LoadHook], reader: PartReader | None, without: Sequence[str] = ()
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
        noted = state.pop(beside.ENTRY, None)
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
    data = tensordict_type().load_memmap(folder)
    for hook in hooks:
        data = loaded_by(hook, data, str(folder))
    return prepare_rows_of(storage, data, length, str(folder), state, without)


def prepare_rows_of(
    storage: LaidOut,
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
    fields = {
        (key,) if isinstance(key, str) else key: value.flatten(0, len(slots) - 1)
        for key, value in data.items(True, True)
    }
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

    columns: list[Tensor]
    length: int

    def fill(self, tensors: RowsTarget) -> None:
        for number, (tensor, column) in enumerate(zip(tensors, self.columns, strict=True)):
            rows = column[: self.length]
            if tensors.put is not None:
                tensors.put(number, 0, rows.cpu().contiguous())
            else:
                tensor[: self.length] = rows


def _others(data: TensorDict) -> dict[Key, object]:
    """Entries that are no tensors."""
    from tensordict import is_leaf_nontensor

    found = data.items(True, True, is_leaf=is_leaf_nontensor)
    return {(key,) if isinstance(key, str) else key: it for key, it in found if not isinstance(it, torch.Tensor)}


def _schema(fields: Mapping[Key, object], slots: tuple[int, ...], where: str) -> Schema:
    """The schema of what hooks have made. Raises ``IncompatibleCheckpoint``: what cannot be stored."""
    made, root = [], Node("tensordict", children={})
    for number, (key, value) in enumerate(fields.items()):
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
            got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise IncompatibleCheckpoint(
                f"{where}: field {key}: expected a tensor that can be stored from the hooks, got {got}. Leave it out, or make one of it."
            )
        put_leaf(root, key, number)
        made.append(Field(key, DTYPE_NAMES[value.dtype], tuple(value.shape[1:])))
    return Schema(math.prod(slots), 1, slots[1:], tuple(made), root)
