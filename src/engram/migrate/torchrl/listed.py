"""The items of a list in a state of TorchRL's: of a ``ListStorage``, ``LazyStackStorage`` or ``CompressedListStorage``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engram._dtypes import DTYPE_NAMES
from engram._tensordict import is_tensor_collection, tensordict_type
from engram.errors import IncompatibleCheckpoint
from engram.migrate.torchrl.items import whole_of
from engram.migrate.torchrl.trees import lost, made_of, said_in
from engram.nested import map_with_paths
from engram.state import typed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from engram.migrate.torchrl.trees import Said
    from engram.types import Decompress

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
        self._said = [said_in(item, f"{where}: item {number}") for number, item in enumerate(items)]
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


class ListedStreams:
    """Items of a ``CompressedListStorage``, whose tensors are streams.

    Args:
        items, descriptions: as the state has them.
        where: for messages.

    Raises:
        TypeError, ValueError, KeyError: descriptions that are none. IncompatibleCheckpoint: a row without an item, or a dtype that
            cannot be stored.
    """

    left_out: Sequence[str] = ()

    def __init__(self, items: Sequence[object], descriptions: object, where: str) -> None:
        if not isinstance(descriptions, list) or len(descriptions) != len(items):
            got = len(descriptions) if isinstance(descriptions, list) else type(descriptions).__name__
            raise ValueError(f"{where}: _metadata: expected {len(items)} descriptions, one for each item, got {got}.")
        self._items, self._descriptions, self._where = items, descriptions, where
        for number, (item, said) in enumerate(zip(items, descriptions, strict=True)):
            _check(item, said, f"{where}: item {number}")

    def __len__(self) -> int:
        return len(self._items)

    def read(self, decompress: Decompress | None, *, whole: bool, without: Collection[str] = ()) -> Iterator[object]:
        """As of :class:`ListedItems`. Raises ``CorruptCheckpoint``, too: a damaged stream."""
        del whole
        for number, (item, said) in enumerate(zip(self._items, self._descriptions, strict=True)):
            yield _whole(item, said, decompress, without, f"{self._where}: item {number}")


def _check(item: object, said: object, where: str) -> None:
    if not isinstance(said, dict):
        raise IncompatibleCheckpoint(f"{where}: expected an item and its description, got {type(said).__name__}.")
    kind = typed(said, "type", str, where)
    if kind == "tensordict":
        fields = typed(said, "fields", dict, where)
        if not isinstance(item, dict) or item.keys() != fields.keys():
            raise ValueError(f"{where}: expected the entries {sorted(fields)}, as its description says, got others.")
        for key, one in fields.items():
            if not isinstance(one, dict):
                raise TypeError(f"{where}: {key}: expected a description, got a {type(one).__name__}.")
            if typed(one, "type", str, f"{where}: {key}") != "non_tensor":
                _check_stream(item[key], one, f"{where}: {key}")
    elif kind == "tensor":
        _check_stream(item, said, where)
    elif kind != "other":
        raise IncompatibleCheckpoint(f"{where}: a {kind!r:.80} cannot be read.")


def _check_stream(data: object, said: dict[str, object], where: str) -> None:
    dtype, _ = typed(said, "dtype", torch.dtype, where), typed(said, "shape", torch.Size, where)
    if dtype not in DTYPE_NAMES:
        raise IncompatibleCheckpoint(f"{where}: expected a dtype that can be stored, got {dtype}.")
    if not isinstance(data, Tensor):
        raise IncompatibleCheckpoint(f"{where}: expected a compressed tensor, got a {type(data).__name__}.")


def _whole(
    item: object, said: dict[str, object], decompress: Decompress | None, without: Collection[str], where: str
) -> object:
    if said["type"] == "tensor":
        return _stream(item, said, decompress, where)
    if said["type"] == "other":
        return map_with_paths(said["value"], _copied, keep=True)
    made = tensordict_type()(batch_size=[])
    for key, one in cast("dict[str, dict[str, object]]", said["fields"]).items():
        if key in without:
            continue
        if one["type"] != "non_tensor":
            made.set(key, _stream(cast("dict[str, object]", item)[key], one, decompress, f"{where}: {key}"))
        elif is_tensor_collection(one["value"]):
            made.set(key, one["value"].clone())
        else:
            made.set_non_tensor(key, one["value"])
    return made


def _stream(data: object, said: dict[str, object], decompress: Decompress | None, where: str) -> Tensor:
    stream = cast("Tensor", data).detach().to("cpu")
    return whole_of(stream, cast("torch.Size", said["shape"]), cast("torch.dtype", said["dtype"]), decompress, where)


def _copied(leaf: object, _: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.clone() if is_tensor_collection(leaf) else leaf
