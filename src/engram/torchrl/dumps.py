"""What TorchRL saved: folders that its ``ReplayBuffer.dumps`` wrote, and states that ``state_dict`` of its buffers returned.

:func:`read` opens every description, looks at the size of every file and reads what is small: priorities, ranks, generator.
What it returns is fit to be loaded; rows and items are read out of the folder afterwards. Nothing in the folder is
written, created or mapped, nothing is opened through a link, and no pickle is opened at all. TorchRL keeps no sums: of the
rows only the number of bytes can be checked. :func:`read_state` describes a state as a folder is described.

The module is a :class:`engram.saved.checkpointers.ForeignFormat`.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import msgspec
import torch
from torch import Tensor

from engram._support import nested, tensordicts, words
from engram._support.state import integer, real, typed
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format.layout import SINGLE
from engram.format.schema import Field, Node, Schema
from engram.saved.checkpointers import DumpedPriorities, ForeignEnsemble, SavedStorage, tensordicts_of
from engram.saved.folder import Folder
from engram.store.memory import DTYPE_NAMES
from engram.torchrl import components, layouts
from engram.torchrl.checkpointers import checkpointer
from engram.torchrl.items import CompressedItems, TorchRLDump, TorchRLItems, TorchRLSteps, is_compressed, validate
from engram.torchrl.parts import Layout, prepare_layout
from engram.types import Decompress, StorageLoad, StrPath

__all__ = ["checkpointer", "layout", "library", "prepare_layout", "read", "read_ensemble", "read_state", "recognises"]

library = "TorchRL"
_MARK = "buffer_metadata.json"
_OURS = "manifest.json"

_State: TypeAlias = Mapping[str, object]
_PATH = Path("TorchRL's state")
#: What messages call it.
_WHERE = "load_state_dict: TorchRL's state"
_DUMP_IT = "Save it with TorchRL's dumps(path), and read that with loads(path)."
#: The kind of an entry that is no tensor; and what a state of an older tensordict has.
_OBJECT, _OLD = "NonTensorData", "__batch_size"


class _Members(msgspec.Struct):
    empty_members: tuple[layouts.Count, ...]


class EmptyMember(NamedTuple):
    """A buffer of an ensemble that held nothing: TorchRL saves its sampler and its writer."""

    priorities: DumpedPriorities | None
    batch_size: int | None = None
    rng_state: Tensor | None = None
    nbytes: int = 0

    def prepare(self, storage: SavedStorage, without: Collection[str]) -> StorageLoad:  # noqa: ARG002 - there are no rows
        """What empties a storage."""
        return storage.prepare_unwritten()


def recognises(path: StrPath) -> bool:
    """Whether a folder looks like one that TorchRL's ``dumps`` wrote, and not like one of ours. Nothing is opened."""
    folder = Path(path)
    try:
        return stat.S_ISREG(os.lstat(folder / _MARK).st_mode) and not os.path.lexists(folder / _OURS)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read(path: StrPath, *, ndim: int = 1, max_bytes: int | None = None) -> TorchRLDump | TorchRLItems:
    """Describe and check a folder that TorchRL's ``ReplayBuffer.dumps`` wrote, of one buffer.

    Warns once, naming what is left out: pickles, which are never opened, and entries that are no tensors.

    Args:
        path: the folder.
        ndim: that of the storage it is for, 1 or 2: a dump does not say how many dimensions index rows. With more, neither
            does it say in which order they are, as TorchRL swaps the first and the last.
        max_bytes: what all rows of the storage may take, live or not, or all items. None: any number.

    Raises:
        CorruptCheckpoint: a missing, truncated, overlong or linked file, a description that is none or contradicts
            another, priorities that are not finite and at least 0. Names the file.
        IncompatibleCheckpoint: an ensemble, a dtype that cannot be stored, another ``ndim`` or one above 2, more than ``max_bytes``.
        OSError: the folder is not there or not readable.

    Cost: O(fields), and O(length) for priorities, ranks and descriptions of items; no rows are read.
    """
    folder = Folder(Path(path))
    buffer = folder.described(components.Buffer, (_MARK,))
    if _is_ensemble(folder):
        raise IncompatibleCheckpoint(
            f"{folder.name(('storage',))}: expected the rows of one buffer, got those of an ensemble. Load the dump into a "
            "ReplayBufferEnsemble of as many buffers."
        )
    left_out, rng_state = components.find_pickles(folder, ((), ("sampler",), ("writer",))), components.read_rng(folder)
    dump = _read_buffer(folder, components.Places(), ndim, max_bytes, left_out)
    _tell(path, left_out)
    return replace(dump, batch_size=buffer.batch_size, rng_state=rng_state, left_out=tuple(left_out))


def read_ensemble(path: StrPath, ndims: Sequence[int], *, max_bytes: int | None = None) -> ForeignEnsemble:
    """As :func:`read`, of a ``ReplayBufferEnsemble``.

    Args:
        path: the folder.
        ndims: of the storage of each buffer.
        max_bytes: what all of them may take.

    Raises: as :func:`read`. IncompatibleCheckpoint, too: of one buffer, or of another number of them.
    """
    folder = Folder(Path(path))
    buffer = folder.described(components.Buffer, (_MARK,))
    if not _is_ensemble(folder):
        raise IncompatibleCheckpoint(
            f"{folder.name(('storage',))}: expected the rows of an ensemble, got those of one buffer. Load the dump into a "
            "ReplayBuffer, such as one of the buffers here: ensemble[i].loads(path)."
        )
    numbers = range(len(ndims))
    empty = _empty_members(folder, len(ndims))
    left_out = components.find_pickles(folder, ((), ("storage",)))
    members: list[TorchRLDump | TorchRLItems | EmptyMember] = []
    for number, ndim in zip(numbers, ndims, strict=True):
        places = components.Places.of_member(number)
        left_out += components.find_pickles(folder, places[1:])
        if number in empty:
            members.append(EmptyMember(components.read_sampler(folder, places.sampler, 0, left_out)))
            continue
        if _is_ensemble(folder, places.storage):
            raise IncompatibleCheckpoint(
                f"{folder.name(places.storage)}: expected the rows of one buffer, got those of an ensemble in an ensemble. Load it with "
                "TorchRL, and dump that by itself."
            )
        left = None if max_bytes is None else max(0, max_bytes - sum(one.nbytes for one in members))
        members.append(_read_buffer(folder, places, ndim, left, left_out))
    _tell(path, left_out)
    return ForeignEnsemble(buffer.batch_size, components.read_rng(folder), members)


def _tell(path: StrPath, left_out: Sequence[str]) -> None:
    if left_out:
        words.warn(
            f"{path}: not read, and lost unless you set it up again: {'; '.join(left_out)}. Pickles are never opened. "
            "(The dump has no checksums: sizes and descriptions were checked.)"
        )


def _read_buffer(
    folder: Folder, places: components.Places, ndim: int, max_bytes: int | None, left_out: list[str]
) -> TorchRLDump | TorchRLItems:
    """The rows of one buffer, or of one of an ensemble. Notes what is left out."""
    if is_compressed(folder, places.storage):
        return _read_items(folder, places, max_bytes, left_out)
    if ndim > 2:
        raise IncompatibleCheckpoint(
            f"{folder.path}: expected a storage with ndim of 1 or 2, got {ndim}: a dump does not say in which order the dimensions "
            "are. Load it with TorchRL and extend the buffer with its rows."
        )
    storage = components.DumpedStorage(folder, places.storage, ndim)
    storage.read()
    fields = tuple(storage.fields)
    whole = Schema(storage.slots * math.prod(storage.columns), 1, storage.columns, fields, storage.structure)
    validate(whole, folder.path)
    if max_bytes is not None and whole.capacity * whole.row_bytes > max_bytes:
        raise IncompatibleCheckpoint(
            f"{folder.path}: expected at most {max_bytes} bytes, got {whole.capacity} rows of {whole.row_bytes} bytes. Raise max_bytes."
        )
    position, count = components.read_writer(folder, places.writer, storage)
    priorities = components.read_sampler(folder, places.sampler, storage.length, storage.left_out)
    left_out += storage.left_out
    rows = TorchRLDump(
        path=folder.path,
        capacity=whole.capacity,
        columns=storage.columns,
        length=storage.length,
        position=position,
        write_count=count,
        fields=fields,
        structure=storage.structure,
        priorities=priorities,
        left_out=tuple(left_out),
        _files=storage.files,
    )
    if storage.layout is None:
        return rows
    return TorchRLSteps(**{**vars(rows), "position": storage.layout.position, "_layout": storage.layout})


def _read_items(folder: Folder, places: components.Places, max_bytes: int | None, left_out: list[str]) -> TorchRLItems:
    items = CompressedItems(folder, places.storage, max_bytes)
    left_out += items.left_out
    writer = components.described_writer(folder, places.writer)
    cursor, count = (len(items), None) if writer is None else (writer.cursor, writer.write_count)
    if cursor > len(items):
        name = folder.name((*places.writer, "metadata.json"))
        raise CorruptCheckpoint(f"{name}: expected a cursor of at most {len(items)}, the live items, got {cursor}.")
    priorities = components.read_sampler(folder, places.sampler, len(items), left_out)
    return TorchRLItems(folder.path, items, cursor, count, None, priorities, None, tuple(left_out))


def _is_ensemble(folder: Folder, parts: tuple[str, ...] = ("storage",)) -> bool:
    """Whether buffers of an ensemble lie in a folder, each by its number."""
    names = folder.names(parts)
    if "storage_metadata.json" in names or is_compressed(folder, parts):
        return False
    return "metadata.json" in names or any(entry.isdecimal() for entry in names)


def _empty_members(folder: Folder, expected: int) -> set[int]:
    """Which of the buffers of an ensemble held nothing. Each lies there or is one of those."""
    parts = ("storage", "metadata.json")
    names, name = folder.names(parts[:1]), folder.name(parts)
    found = folder.described(_Members, parts).empty_members if parts[1] in names else ()  # older ones save all
    empty = set(found)
    there = {int(entry) for entry in names if entry.isdecimal() and str(int(entry)) == entry}
    count = len(empty | there)
    if len(found) != len(empty) or empty & there or (empty | there) != set(range(count)):
        raise CorruptCheckpoint(
            f"{name}: expected each buffer once, in a folder or as an empty one, got folders {_said(there)} and empty_members "
            f"{_said(empty)}."
        )
    if count != expected:
        raise IncompatibleCheckpoint(f"{name}: expected {expected} members, as here, got an ensemble of {count}.")
    return empty


def _said(numbers: Collection[int]) -> str:
    return f"{sorted(numbers)[:8]}{'…' if len(numbers) > 8 else ''}"


def layout(who: str) -> Layout:
    """The layout of the usual keys. ``who``: what messages begin with."""
    return Layout("flat", layouts.Keys(), who)


class Said(NamedTuple):
    """What a state says of one of its TensorDicts."""

    batch: torch.Size
    on_device: bool
    #: The name of its class; empty: ``TensorDict``.
    kind: str
    #: What it has besides tensors, by name.
    objects: dict[str, object]


def text_in(state: object, where: str) -> dict[str, Said] | None:
    """What a TensorDict's state says of each TensorDict in it, by the beginning of the names of its entries; None: it is no such state.

    Raises ``IncompatibleCheckpoint``: the state of something else.
    """
    noted = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    if not isinstance(noted, dict):
        return None
    found = {}
    for prefix, said in noted.items():
        batch = said.get("batch_size") if isinstance(said, dict) else None
        if not isinstance(prefix, str) or not isinstance(batch, torch.Size):
            raise IncompatibleCheckpoint(
                f"{where}: expected the state of a TensorDict, got that of another object. Extend the buffer with the object itself."
            )
        kind, objects = said.get("_type", ""), said.get("_non_tensor", {})
        found[prefix] = Said(batch, said.get("device") is not None, str(kind), dict(objects))
    return {"": found.get("", Said(torch.Size([]), False, "", {})), **found}


def split(name: str, said: Collection[str]) -> tuple[str, str]:
    """The TensorDict that an entry is in, and its name there: names are joined by points, and may have points of their own."""
    above = max((prefix for prefix in said if prefix and name.startswith(f"{prefix}.")), key=len, default="")
    return above, name[len(above) + 1 :] if above else name


def path_of(name: str, said: Collection[str]) -> tuple[str, ...]:
    """The key of an entry, or of a TensorDict."""
    above, last = split(name, said)
    return (*path_of(above, said), last) if above else (last,)


def lost(said: Mapping[str, Said], names: Collection[str], *, objects: bool) -> list[str]:
    """What a state does not say of its TensorDicts, in words.

    Args:
        said: of them.
        names: of the tensors.
        objects: whether what is no tensor is lost, too.
    """
    found = []
    for prefix, one in said.items():
        what = f"field {prefix!r:.100}" if prefix else "the root"
        filled = any(name.startswith(f"{prefix}." if prefix else "") for name in (*names, *filter(None, said)))
        if one.kind not in ("", _OBJECT):
            found.append(f"the class of {what}, {one.kind}, which is read as a TensorDict")
        if not one.kind and not filled:
            found.append(f"what {what} held, if it was a stack of objects: the state has an empty TensorDict there")
        if objects and one.objects:
            found.append(f"{what}, which is no tensor" if one.kind == _OBJECT else f"{sorted(one.objects)} of {what}")
    return found


def made_of(state: _State, said: Mapping[str, Said], without: Collection[str], where: str) -> object:
    """The TensorDict, or the object, whose state this is, with tensors of its own.

    Args:
        state: its tensors by name.
        said: of its TensorDicts.
        without: entries to leave out.
        where: for messages.

    Raises:
        IncompatibleCheckpoint: an entry that is no tensor. ValueError: one that does not have the batch size that is said.
    """
    devices = {value.device for value in state.values() if isinstance(value, Tensor)}
    own = devices.pop() if said[""].on_device and len(devices) == 1 else None
    made: dict[str, tensordicts.TensorDict] = {}
    for prefix in sorted(said, key=len):
        one = said[prefix]
        above, last = split(prefix, said)
        if prefix and path_of(prefix, said)[0] in without:
            continue
        if one.kind == _OBJECT:
            holder = made[above] if prefix else tensordicts.tensordict_type()(batch_size=one.batch)
            holder.set_non_tensor(last, one.objects.get("data"))
            if not prefix:
                return tensordicts.children(holder)[last]
            continue
        made[prefix] = tensordicts.tensordict_type()(batch_size=one.batch, device=own)
        for name, value in one.objects.items():
            made[prefix].set_non_tensor(name, value)
        if prefix:
            _put(made[above], last, made[prefix], f"{where}: {prefix}")
    for name, value in state.items():
        above, last = split(name, said)
        if path_of(name, said)[0] in without:
            continue
        if not isinstance(value, Tensor):
            raise IncompatibleCheckpoint(f"{where}: {name}: expected a tensor, got a {type(value).__name__}.")
        if above not in made:
            raise ValueError(f"{where}: {name}: expected an entry of a TensorDict, got one of a {said[above].kind}.")
        _put(made[above], last, value.detach().clone(), f"{where}: {name}")
    return made[""]


def _put(holder: tensordicts.TensorDict, name: str, value: Tensor | tensordicts.TensorDict, where: str) -> None:
    try:
        holder.set(name, value)
    except RuntimeError as error:
        raise ValueError(
            f"{where}: expected a shape that begins with {list(holder.batch_size)}, got {list(value.shape)}."
        ) from error


class ListedItems:
    """Items of a ``ListStorage``. Tensors are copied when they are read; what is no tensor is taken as it is.

    Args:
        items: as the state has them.
        where: for messages.

    Raises:
        IncompatibleCheckpoint: the state of an object that is no TensorDict, or one of another form.
    """

    def __init__(self, items: Sequence[object], where: str) -> None:
        self._items, self._where = items, where
        self._said = [text_in(item, f"{where}: item {number}") for number, item in enumerate(items)]
        for number, (item, said) in enumerate(zip(items, self._said, strict=True)):
            if said is None and isinstance(item, dict) and _OLD in item:
                raise IncompatibleCheckpoint(
                    f"{where}: item {number}: expected what tensordict 0.14 saves, got the state of an older one. Load it with TorchRL, "
                    "and save it again."
                )

    def __len__(self) -> int:
        return len(self._items)

    @property
    def left_out(self) -> list[str]:
        """What the state does not say, each once."""
        both = zip(cast("Sequence[dict[str, object]]", self._items), self._said, strict=True)
        found = (lost(said, item, objects=False) for item, said in both if said is not None)
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))

    def read(self, decompress: Decompress | None, *, whole: bool, without: Collection[str] = ()) -> Iterator[object]:  # noqa: ARG002 - as of items on disk
        """The items in the order of their rows, one by one. Raises ``IncompatibleCheckpoint``, ``ValueError``: no such items."""
        for number, (item, said) in enumerate(zip(self._items, self._said, strict=True)):
            if said is None:
                yield nested.map_with_paths(item, _copied, keep=True)
            else:
                yield made_of(cast("dict[str, object]", item), said, without, f"{self._where}: item {number}")


def _copied(leaf: object, _: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.clone() if tensordicts.is_tensor_collection(leaf) else leaf


@dataclass(frozen=True, kw_only=True)
class TorchRLState(TorchRLDump):
    """A checked state. Its tensors are the state's."""

    _tensors: Mapping[tuple[str, ...], Tensor]

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        out.copy_(self._tensors[key][first : first + len(out)])


def _is_storage(state: object) -> bool:
    return isinstance(state, dict) and "_storage" in state


def _holds_members(state: _State) -> bool:
    members = state.get("_storage")
    return isinstance(members, dict) and any(
        _is_storage(one) or _holds_members({"_storage": one}) for one in members.values()
    )


def read_state(state: _State, ndim: int) -> TorchRLDump | TorchRLItems | None:
    """Describe and check a state; None: no buffer of TorchRL's returned it. Warns once, naming what of it is left out.

    Args:
        state: what ``ReplayBuffer.state_dict()`` of TorchRL returned, of a storage of tensors or of a list.
        ndim: of the storage it is for, which must be 1: a state does not say how rows are numbered otherwise.

    Raises:
        IncompatibleCheckpoint: no rows of tensors, an ensemble, what cannot be stored, or another ``ndim``.
        KeyError, TypeError, ValueError: an entry that is missing, of another type or out of range.
    """
    if not (_is_storage(state.get("_storage")) or _holds_members(state)):
        return None
    if not _is_storage(state["_storage"]):
        raise IncompatibleCheckpoint(f"{_WHERE}: expected that of one buffer, got that of an ensemble. {_DUMP_IT}")
    batch_size, rng_state, left_out = _of_the_buffer(state)
    found = _buffer_in(state, ndim, left_out)
    if left_out:
        words.warn(f"{_WHERE}: not read, and lost unless you set it up again: {'; '.join(dict.fromkeys(left_out))}.")
    return replace(found, batch_size=batch_size, rng_state=rng_state, left_out=tuple(left_out))


def _of_the_buffer(state: _State) -> tuple[int | None, Tensor | None, list[str]]:
    """Batch size and generator; and what of the rest is not read."""
    batch_size, rng, batches = state.get("_batch_size"), state.get("_rng"), state.get("_prefetch_state")
    left_out, rng_state = [], None
    if rng is not None:
        both = typed(state, "_rng", tuple, _WHERE)
        if len(both) != 2:
            raise IncompatibleCheckpoint(f"{_WHERE}: _rng: expected (state, device), got a tuple of {len(both)}.")
        made, device = both
        if device == "cpu":
            rng_state = made
        else:
            left_out.append(f"the state of the generator on {device!r:.40}")
    if state.get("_transforms"):
        left_out.append("the state of the transforms")
    if isinstance(batches, dict) and batches.get("queue"):
        left_out.append("prefetched batches")
    return batch_size if isinstance(batch_size, int) and batch_size > 0 else None, rng_state, left_out


def _buffer_in(state: _State, ndim: int, left_out: list[str]) -> TorchRLState | TorchRLItems:
    """Rows or items, writer and sampler. Notes what is left out."""
    kinds = (dict, OrderedDict)
    storage, writer, sampler = (typed(state, name, kinds, _WHERE) for name in ("_storage", "_writer", "_sampler"))
    if sampler and "_sum_tree" not in sampler and "drop_last" not in sampler:
        left_out.append(f"the state of the sampler ({', '.join(sampler)})")
    rows = storage["_storage"]
    if isinstance(rows, list):
        return _items_in(storage, rows, writer, sampler, left_out)
    if ndim != 1:
        raise IncompatibleCheckpoint(
            f"{_WHERE}: expected a storage with ndim of 1, got {ndim}. Extend the buffer with its rows."
        )
    if isinstance(rows, dict) and not rows:
        raise IncompatibleCheckpoint(f"{_WHERE}: expected rows, got none: nothing was ever written.")
    said = text_in(rows, _WHERE)
    tensors = _leaves(rows, said)
    if said is not None:
        left_out += lost(said, cast("dict[str, object]", rows), objects=True)
    if not tensors:
        raise IncompatibleCheckpoint(f"{_WHERE}: expected fields that are tensors, got none.")
    capacity = min(len(tensor) for tensor in tensors.values())
    length = integer(storage, "_len", 0, capacity + 1, _WHERE)
    cursor, writes = _written(writer, length, capacity)
    return TorchRLState(
        path=_PATH,
        capacity=capacity,
        length=length,
        position=cursor % capacity,
        write_count=writes,
        fields=tuple(Field(key, DTYPE_NAMES[one.dtype], tuple(one.shape[1:])) for key, one in tensors.items()),
        structure=Node("leaf", field=0) if [*tensors] == [(SINGLE,)] else tensordicts_of(tensors),
        priorities=_priorities(sampler, length),
        _files={},
        _tensors=tensors,
    )


def _items_in(
    storage: _State, items: list[object], writer: _State, sampler: _State, left_out: list[str]
) -> TorchRLItems:
    if "_metadata" in storage:
        raise IncompatibleCheckpoint(f"{_WHERE}: expected items, got those of a CompressedListStorage. {_DUMP_IT}")
    made = ListedItems(items, _WHERE)
    left_out += made.left_out
    cursor, writes = _written(writer, len(items), len(items))
    return TorchRLItems(_PATH, made, cursor, writes, None, _priorities(sampler, len(items)), None, tuple(made.left_out))


def _written(writer: _State, length: int, most: int) -> tuple[int, int]:
    """Row that is written next, and rows ever written."""
    if not writer:  # of a data set, which nothing is written to
        return length, length
    return integer(writer, "_cursor", 0, most + 1, _WHERE), integer(writer, "_write_count", 0, 1 << 62, _WHERE)


def _leaves(rows: object, said: Mapping[str, Said] | None) -> dict[tuple[str, ...], Tensor]:
    """The tensors of a storage, by key. In a state, the parts of a key are joined by points, as TorchRL reads them."""
    if not isinstance(rows, dict):
        return {(SINGLE,): _checked(rows, "rows")}
    names = [name for name in rows if name not in ("__batch_size", "__device")]  # of the TensorDict
    keys = {name: tuple(name.split(".")) if said is None else path_of(name, said) for name in names}
    return {key: _checked(rows[name], name) for name, key in keys.items()}


def _checked(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise IncompatibleCheckpoint(f"{_WHERE}: {name}: expected a tensor, got a {type(value).__name__}.")
    if value.ndim < 1 or value.dtype not in DTYPE_NAMES:
        raise IncompatibleCheckpoint(
            f"{_WHERE}: {name}: expected rows of a dtype that can be stored, got {value.dtype} of shape {list(value.shape)}."
        )
    return value.detach()


def _priorities(state: _State, length: int) -> DumpedPriorities | None:
    """Of a prioritized sampler, whose tree is an object of TorchRL's that is read by row; None: of another sampler."""
    if "_sum_tree" not in state:
        return None
    alpha, beta, eps = (real(state, name, _WHERE) for name in ("_alpha", "_beta", "_eps"))
    tree = cast("Mapping[Tensor, Tensor]", state["_sum_tree"])  # TorchRL's, which takes rows as an index
    leaves = torch.as_tensor(tree[torch.arange(length)], dtype=torch.float64).reshape(-1)
    if leaves.numel() != length or not bool((leaves.isfinite() & (leaves >= 0)).all()):
        raise ValueError(f"{_WHERE}: _sum_tree: expected {length} priorities that are finite and at least 0.")
    value, _ = typed(state, "_max_priority", tuple, _WHERE)
    highest = None if value is None else float(value)
    if highest is not None and not math.isfinite(highest):
        raise ValueError(f"{_WHERE}: _max_priority: expected a finite one, got {highest}.")
    return DumpedPriorities(alpha, beta, eps, leaves, highest)
