"""States that ``state_dict`` of TorchRL's buffers returned, described as its dumps are."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engram._support.nested import map_with_paths
from engram._support.state import integer, real, typed
from engram._support.tensordicts import children, is_tensor_collection, tensordict_type
from engram._support.words import warn
from engram.errors import IncompatibleCheckpoint
from engram.format.layout import SINGLE
from engram.format.schema import Field, Node
from engram.saved.checkpointers import DumpedPriorities, tensordicts_of
from engram.store.memory import DTYPE_NAMES
from engram.torchrl.items import TorchRLDump, TorchRLItems

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from tensordict import TensorDict

    from engram.types import Decompress


_OBJECT = "NonTensorData"


class Said(NamedTuple):
    """What a state says of one of its TensorDicts."""

    batch: torch.Size
    on_device: bool
    kind: str
    """The name of its class; empty: ``TensorDict``."""
    objects: dict[str, object]
    """What it has besides tensors, by name."""


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


def made_of(state: Mapping[str, object], said: Mapping[str, Said], without: Collection[str], where: str) -> object:
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
    made: dict[str, TensorDict] = {}
    for prefix in sorted(said, key=len):
        one = said[prefix]
        above, last = split(prefix, said)
        if prefix and path_of(prefix, said)[0] in without:
            continue
        if one.kind == _OBJECT:
            holder = made[above] if prefix else tensordict_type()(batch_size=one.batch)
            holder.set_non_tensor(last, one.objects.get("data"))
            if not prefix:
                return children(holder)[last]
            continue
        made[prefix] = tensordict_type()(batch_size=one.batch, device=own)
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


def _put(holder: TensorDict, name: str, value: Tensor | TensorDict, where: str) -> None:
    try:
        holder.set(name, value)
    except RuntimeError as error:
        raise ValueError(
            f"{where}: expected a shape that begins with {list(holder.batch_size)}, got {list(value.shape)}."
        ) from error


_PATH = Path("TorchRL's state")
#: What messages call it.
_WHERE = "load_state_dict: TorchRL's state"
_DUMP_IT = "Save it with TorchRL's dumps(path), and read that with loads(path)."


_OLD = "__batch_size"


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
        found = [
            one
            for item, said in zip(self._items, self._said, strict=True)
            if said is not None
            for one in lost(said, cast("dict[str, object]", item), objects=False)
        ]
        return list(dict.fromkeys(found))

    def read(self, decompress: Decompress | None, *, whole: bool, without: Collection[str] = ()) -> Iterator[object]:
        """The items in the order of their rows, one by one. Raises ``IncompatibleCheckpoint``, ``ValueError``: no such items."""
        del decompress, whole
        for number, (item, said) in enumerate(zip(self._items, self._said, strict=True)):
            yield self._item(item, said, without, f"{self._where}: item {number}")

    def _item(self, item: object, said: Mapping[str, Said] | None, without: Collection[str], where: str) -> object:
        if said is None:
            return map_with_paths(item, _copied, keep=True)
        return made_of(cast("dict[str, object]", item), said, without, where)


def _copied(leaf: object, _: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.clone() if is_tensor_collection(leaf) else leaf


class _Tree(Protocol):
    """TorchRL's, of the priorities of rows."""

    def __getitem__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TorchRLState(TorchRLDump):
    """A checked state. Its tensors are the state's."""

    _tensors: Mapping[tuple[str, ...], Tensor]

    def read_rows(self, key: tuple[str, ...], out: Tensor, first: int = 0) -> None:
        out.copy_(self._tensors[key][first : first + len(out)])


def _is_storage(state: object) -> bool:
    return isinstance(state, dict) and "_storage" in state


def _is_ensemble(state: Mapping[str, object]) -> bool:
    members = state.get("_storage")
    return isinstance(members, dict) and any(
        _is_storage(one) or _is_ensemble({"_storage": one}) for one in members.values()
    )


def read_state(state: Mapping[str, object], ndim: int) -> TorchRLState | TorchRLItems | None:
    """Describe and check a state; None: no buffer of TorchRL's returned it. Warns once, naming what of it is left out.

    Args:
        state: what ``ReplayBuffer.state_dict()`` of TorchRL returned, of a storage of tensors or of a list.
        ndim: of the storage it is for, which must be 1: a state does not say how rows are numbered otherwise.

    Raises:
        IncompatibleCheckpoint: no rows of tensors, an ensemble, what cannot be stored, or another ``ndim``.
        KeyError, TypeError, ValueError: an entry that is missing, of another type or out of range.
    """
    if not (_is_storage(state.get("_storage")) or _is_ensemble(state)):
        return None
    if not _is_storage(state["_storage"]):
        raise IncompatibleCheckpoint(f"{_WHERE}: expected that of one buffer, got that of an ensemble. {_DUMP_IT}")
    batch_size, rng_state, left_out = _of_the_buffer(state)
    found = _read_buffer(state, ndim, left_out)
    if left_out:
        warn(f"{_WHERE}: not read, and lost unless you set it up again: {'; '.join(dict.fromkeys(left_out))}.")
    out = tuple(left_out)
    if isinstance(found, TorchRLItems):
        return found._replace(batch_size=batch_size, rng_state=rng_state, left_out=out)
    return replace(found, batch_size=batch_size, rng_state=rng_state, left_out=out)


def _of_the_buffer(state: Mapping[str, object]) -> tuple[int | None, Tensor | None, list[str]]:
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


def _read_buffer(state: Mapping[str, object], ndim: int, left_out: list[str]) -> TorchRLState | TorchRLItems:
    """Rows or items, writer and sampler. Notes what is left out."""
    where = _WHERE
    storage, writer, sampler = (_part(state, name, where) for name in ("_storage", "_writer", "_sampler"))
    if sampler and "_sum_tree" not in sampler and "drop_last" not in sampler:
        left_out.append(f"the state of the sampler ({', '.join(sampler)})")
    rows = storage["_storage"]
    if isinstance(rows, list):
        return _read_items(storage, rows, writer, sampler, where, left_out)
    if ndim != 1:
        raise IncompatibleCheckpoint(
            f"{where}: expected a storage with ndim of 1, got {ndim}. Extend the buffer with its rows."
        )
    if isinstance(rows, dict) and not rows:
        raise IncompatibleCheckpoint(f"{where}: expected rows, got none: nothing was ever written.")
    said = text_in(rows, where)
    tensors = _leaves(rows, said, where)
    if said is not None:
        left_out += lost(said, cast("dict[str, object]", rows), objects=True)
    if not tensors:
        raise IncompatibleCheckpoint(f"{where}: expected fields that are tensors, got none.")
    capacity = min(len(tensor) for tensor in tensors.values())
    length = integer(storage, "_len", 0, capacity + 1, where)
    cursor, writes = _written(writer, length, capacity, where)
    return TorchRLState(
        path=_PATH,
        capacity=capacity,
        columns=(),
        length=length,
        position=cursor % capacity,
        write_count=writes,
        fields=tuple(Field(key, DTYPE_NAMES[one.dtype], tuple(one.shape[1:])) for key, one in tensors.items()),
        structure=Node("leaf", field=0) if [*tensors] == [(SINGLE,)] else tensordicts_of(tensors),
        batch_size=None,
        priorities=_priorities(sampler, length, where),
        rng_state=None,
        left_out=(),
        _files={},
        _tensors=tensors,
    )


def _read_items(
    storage: Mapping[str, object],
    items: list[object],
    writer: Mapping[str, object],
    sampler: Mapping[str, object],
    where: str,
    left_out: list[str],
) -> TorchRLItems:
    if "_metadata" in storage:
        raise IncompatibleCheckpoint(f"{where}: expected items, got those of a CompressedListStorage. {_DUMP_IT}")
    made = ListedItems(items, where)
    left_out += made.left_out
    cursor, writes = _written(writer, len(items), len(items), where)
    return TorchRLItems(
        _PATH, made, cursor, writes, None, _priorities(sampler, len(items), where), None, tuple(made.left_out)
    )


def _written(writer: Mapping[str, object], length: int, most: int, where: str) -> tuple[int, int]:
    """Row that is written next, and rows ever written."""
    if not writer:  # of a data set, which nothing is written to
        return length, length
    return integer(writer, "_cursor", 0, most + 1, where), integer(writer, "_write_count", 0, 1 << 62, where)


def _part(state: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    """Of a component."""
    found: Mapping[str, object] = typed(state, name, (dict, OrderedDict), where)
    return found


def _leaves(rows: object, said: Mapping[str, Said] | None, where: str) -> dict[tuple[str, ...], Tensor]:
    """The tensors of a storage, by key. In a state, the parts of a key are joined by points, as TorchRL reads them."""
    if not isinstance(rows, dict):
        return {(SINGLE,): _checked(rows, "rows", where)}
    names = [name for name in rows if name not in ("__batch_size", "__device")]  # of the TensorDict
    keys = {name: tuple(name.split(".")) if said is None else path_of(name, said) for name in names}
    return {key: _checked(rows[name], name, where) for name, key in keys.items()}


def _checked(value: object, name: str, where: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise IncompatibleCheckpoint(f"{where}: {name}: expected a tensor, got a {type(value).__name__}.")
    if value.ndim < 1 or value.dtype not in DTYPE_NAMES:
        raise IncompatibleCheckpoint(
            f"{where}: {name}: expected rows of a dtype that can be stored, got {value.dtype} of shape {list(value.shape)}."
        )
    return value.detach()


def _priorities(state: Mapping[str, object], length: int, where: str) -> DumpedPriorities | None:
    """Of a prioritized sampler, whose tree is an object of TorchRL's that is read by row; None: of another sampler."""
    if "_sum_tree" not in state:
        return None
    alpha, beta, eps = (real(state, name, where) for name in ("_alpha", "_beta", "_eps"))
    leaves = torch.as_tensor(cast("_Tree", state["_sum_tree"])[torch.arange(length)], dtype=torch.float64).reshape(-1)
    if leaves.numel() != length or not bool((leaves.isfinite() & (leaves >= 0)).all()):
        raise ValueError(f"{where}: _sum_tree: expected {length} priorities that are finite and at least 0.")
    value, _ = typed(state, "_max_priority", tuple, where)
    highest = None if value is None else float(value)
    if highest is not None and not math.isfinite(highest):
        raise ValueError(f"{where}: _max_priority: expected a finite one, got {highest}.")
    return DumpedPriorities(alpha, beta, eps, leaves, highest)
