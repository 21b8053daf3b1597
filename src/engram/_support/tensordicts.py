"""All that engram takes from tensordict. Nothing imports it before a TensorDict is met or made.

Its import takes as much CPU as that of torch, 1.6 s, and programs that write dicts of arrays do without it.

Three shortcuts for the hot path, each with the public way as fallback, are the only code that reaches inside TensorDict. The
public constructor checks every entry (4 µs for three leaves, unchecked 0.2 µs) and ``items()`` filters what it yields; both are
waste for data that was checked against a schema. tests/buffer/test_tensordict_shortcuts.py runs at both ends of the supported
range of versions.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensordict import LazyStackedTensorDict, NonTensorData
    from tensordict import TensorDict as TensorDict  # noqa: PLC0414 - other modules annotate with it
    from tensordict import TensorDictBase as TensorDictBase  # noqa: PLC0414 - as well

_K = TypeVar("_K", bound=str | tuple[str, ...])


if not TYPE_CHECKING:  # which would take every name for one of this module

    def __getattr__(name: str) -> object:
        """What annotations of other modules name, for those who look it up. Imports tensordict."""
        if name in ("TensorDict", "TensorDictBase"):
            return getattr(importlib.import_module("tensordict"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def tensordict_type() -> type[TensorDict]:
    """The class TensorDict. Imports tensordict."""
    from tensordict import TensorDict

    return cast("type[TensorDict]", TensorDict)


# ---- questions, which import nothing -----------------------------------------------------------------------------------
#
# Answers are kept by type, once tensordict is imported: until then nothing is one of its types.


@functools.cache
def _is_collection_type(kind: type[object]) -> bool:
    from tensordict import is_tensor_collection

    return bool(is_tensor_collection(kind))


@functools.cache
def _is_tensorclass_type(kind: type[object]) -> bool:
    from tensordict import is_tensorclass

    return bool(is_tensorclass(kind))


def is_tensorclass_type(kind: type) -> bool:
    """Whether a type is a tensorclass."""
    return sys.modules.get("tensordict") is not None and _is_tensorclass_type(kind)


def is_tensor_collection(data: object) -> TypeGuard[TensorDict]:
    """Whether data is a TensorDict of any class or a tensorclass."""
    kind: type = type(data)
    return sys.modules.get("tensordict") is not None and _is_collection_type(kind)


def is_tensorclass(data: object) -> TypeGuard[TensorDict]:
    """Whether data is a tensorclass."""
    kind: type = type(data)
    return is_tensorclass_type(kind)


def is_non_tensor(data: object) -> bool:
    """Whether data is an object, or a stack of objects, that a TensorDict holds in place of a tensor."""
    if not is_tensor_collection(data):
        return False
    from tensordict import is_non_tensor

    return bool(is_non_tensor(data))


def is_plain_tensordict(data: object) -> TypeGuard[TensorDict]:
    """Whether data is of the class TensorDict itself."""
    return is_tensor_collection(data) and type(data) is tensordict_type()


def is_lazy_stack(data: object) -> bool:
    """Whether data is a lazy stack of TensorDicts."""
    if not is_tensor_collection(data):
        return False
    from tensordict import LazyStackedTensorDict

    return isinstance(data, LazyStackedTensorDict)


def stack_of_objects(objects: Iterable[object]) -> object:
    """Objects as a TensorDict holds them, one per row. Imports tensordict."""
    from tensordict import NonTensorData, NonTensorStack

    return NonTensorStack(*[NonTensorData(it) for it in objects])


def objects_in(data: object) -> object:
    """The object that :func:`is_non_tensor` data is, or a list of those of its rows."""
    return cast("TensorDict", data).tolist()


def one_object(value: object) -> object:
    """An object as a TensorDict without dimensions holds it. Imports tensordict."""
    from tensordict import NonTensorData

    return NonTensorData(value)


# ---- shortcuts ---------------------------------------------------------------------------------------------------------


#: What a TensorDict consists of, as the shortcuts know it.
_INSIDES = {"_tensordict": dict, "_batch_size": torch.Size, "_device": torch.device, "_td_dim_names": NoneType}


#: What :func:`transparent_type` found, which hot paths read without a call.
_transparent: type[TensorDict] | None = None


@functools.cache
def transparent_type() -> type[TensorDict] | None:
    """TensorDict; None if it does not consist of just ``_INSIDES``, which can be set. Imports tensordict."""
    global _transparent  # noqa: PLW0603 - once
    kind = tensordict_type()
    try:
        insides = vars(kind({"a": torch.zeros(2, device="cpu")}, batch_size=[2], device="cpu"))
        blank = object.__new__(kind)
        for name, value in insides.items():
            setattr(blank, name, value)
    except (AttributeError, TypeError):
        return None
    if {name: type(value) for name, value in insides.items()} == _INSIDES:
        _transparent = kind
    return _transparent


def is_bare(td: object) -> TypeGuard[TensorDict]:
    """Whether data is a TensorDict that is just its entries, batch size and device: not locked, and its dimensions have no names."""
    if (_transparent or transparent_type()) is None or not is_plain_tensordict(td):
        return False
    return td.__dict__.keys() == _INSIDES.keys() and td._td_dim_names is None


def wrap(source: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    """A TensorDict that consists of just these entries, which are not checked."""
    kind = _transparent or transparent_type()
    if kind is None:
        return tensordict_type()(source, batch_size=batch_size, device=device)
    td: TensorDict = object.__new__(kind)
    td._tensordict = source
    td._batch_size = batch_size
    td._device = device
    td._td_dim_names = None
    return td


def children(td: Any, *, whole: bool = False) -> Mapping[str, torch.Tensor | Any]:
    """The entries of a TensorDict, by name. Not a copy: do not change it.

    A lazy stack shows those that all its TensorDicts have; if it is to be ``whole``, others raise ``KeyError``.
    """
    if type(td) is (_transparent or transparent_type()):
        entries: Mapping[str, Any] = td._tensordict
        return entries
    entries = dict(td.items())
    if whole and is_lazy_stack(td):
        for number, one in enumerate(td.tensordicts):
            if more := sorted(map(str, one.keys() - entries.keys())):
                raise KeyError(
                    f"data: expected a lazy stack of TensorDicts with the same fields, got {more} in number {number} and not in all. Write "
                    "the same fields in every row, or use a ListStorage."
                )
    return entries


def put(td: TensorDict, entries: Mapping[Any, torch.Tensor]) -> None:
    """Add entries whose shapes begin with the batch size, under strings or tuples, to an unlocked TensorDict."""
    kind = _transparent or transparent_type()
    if kind is None or type(td) is not kind:
        for key, value in entries.items():
            td.set(key, value)
        return
    own = td._tensordict
    for key, value in entries.items():
        if isinstance(key, str):
            own[key] = value
            continue
        child = own.get(key[0])
        if len(key) == 2 and child is None:
            own[key[0]] = wrap({key[1]: value}, td._batch_size, td._device)
        elif len(key) == 2 and isinstance(child, kind) and not child.is_locked:
            child._tensordict[key[1]] = value
        else:
            td.set(key, value)


def add_fields(data: object, fields: Mapping[_K, object]) -> None:
    """Add fields to a new batch. What is neither a dict nor a TensorDict has no place for them, and stays as it is."""
    if isinstance(data, dict):
        for key, value in fields.items():
            name, *below = (key,) if isinstance(key, str) else key
            if below:
                add_fields(data.setdefault(name, {}), {below[0] if len(below) == 1 else tuple(below): value})
            else:
                data[name] = value
    elif is_plain_tensordict(data):
        put(data, cast("Mapping[_K, torch.Tensor]", fields))


def detached(td: TensorDict) -> TensorDict:
    """A new TensorDict of the same entries, and of what is no part of a graph the same tensors. ``td.detach()`` takes 8 times as
    long.
    """
    kind = _transparent or transparent_type()
    if kind is None or td.__dict__.keys() != _INSIDES.keys() or td._td_dim_names is not None:
        return td if is_non_tensor(td) else td.detach()
    source = td._tensordict.copy()
    for key, value in source.items():  # to which no entry is added
        if not isinstance(value, torch.Tensor):
            source[key] = detached(value)
        elif value.requires_grad:
            source[key] = value.detach()
    return wrap(source, td._batch_size, td._device)


# ---- batches of TensorDicts that are kept -------------------------------------------------------------------------------


#: What an object in a TensorDict holds, as the shortcut knows it, and the classes of objects that cannot change.
_OBJECT_VALUES = {"data": "x", "_is_non_tensor": True, "_metadata": None}
_CONSTANTS = {str, bytes, bool, int, float, NoneType}


@functools.cache
def _stack_insides() -> dict[str, None] | None:
    """What a lazy stack has besides its TensorDicts, their dimension and its batch size; None if that is not just None."""
    from tensordict import LazyStackedTensorDict

    td = tensordict_type()(batch_size=[2])
    insides = dict(vars(LazyStackedTensorDict(td, stack_dim=1)))
    known = insides.pop("stack_dim", None), insides.pop("_batch_size", None), insides.pop("tensordicts", None)
    return insides if known == (1, torch.Size([2, 1]), [td]) and not any(insides.values()) else None


@functools.cache
def _object_type() -> type[NonTensorData] | None:
    """NonTensorData; None if a copy does not consist of just what the shortcut sets. Imports tensordict."""
    from tensordict import NonTensorData

    insides = vars(NonTensorData("x", batch_size=[2]).copy())
    if (
        insides.keys() == {"_tensordict", "_non_tensordict"}
        and insides["_non_tensordict"] == _OBJECT_VALUES
        and is_bare(insides["_tensordict"])
    ):
        return cast("type[NonTensorData]", NonTensorData)
    return None


def lazy_stack(tds: list[TensorDict], dim: int) -> LazyStackedTensorDict:
    """``LazyStackedTensorDict(*tds, stack_dim=dim)`` of TensorDicts of one batch size, and a ``dim`` of at least 0.

    Raises ``RuntimeError``: they are on different devices.
    """
    from tensordict import LazyStackedTensorDict

    others = _stack_insides()
    if others is None or len({td.device for td in tds}) > 1:
        return LazyStackedTensorDict(*tds, stack_dim=dim)
    size, stack = tds[0].batch_size, object.__new__(LazyStackedTensorDict)
    shape = torch.Size((*size[:dim], len(tds), *size[dim:]))
    vars(stack).update(others, stack_dim=dim, _batch_size=shape, tensordicts=tds)
    return stack


def copies(tds: Iterable[TensorDict]) -> list[TensorDict]:
    """Unlocked TensorDicts of the same tensors, as ``td.copy()`` makes each. That takes 8 times as long."""
    kind, made = _transparent or transparent_type(), []
    if kind is None:
        return [td.copy() for td in tds]
    for td in tds:
        own: type = type(td)
        if own is not kind or td._td_dim_names is not None:
            made.append(td.copy() if own is kind else _other_copy(td, kind))
            continue
        source = td._tensordict.copy()
        for key, value in source.items():  # to which no entry is added
            if not isinstance(value, torch.Tensor):
                source[key] = _other_copy(value, kind)
        new = object.__new__(kind)  # wrap, without a call
        new._tensordict = source
        new._batch_size = td._batch_size
        new._device = td._device
        new._td_dim_names = None
        made.append(new)
    return made


def _other_copy(td: TensorDict, kind: type[TensorDict]) -> TensorDict:
    """``td.copy()`` of an entry, at a tenth of its cost of a TensorDict, a text or a number."""
    own: type = type(td)
    if own is kind:
        return copies((td,))[0]
    if own is not _object_type():
        return td.copy()
    entries, values = td._tensordict, td._non_tensordict
    if entries._tensordict or entries._td_dim_names is not None or values["_metadata"] is not None:
        return td.copy()
    constant: type = type(values["data"])
    if constant not in _CONSTANTS:
        return td.copy()
    new, made = object.__new__(kind), object.__new__(own)
    new._tensordict = {}
    new._batch_size = entries._batch_size
    new._device = entries._device
    new._td_dim_names = None
    insides = made.__dict__
    insides["_tensordict"], insides["_non_tensordict"] = new, values.copy()
    return made
