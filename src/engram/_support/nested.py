"""Data of any form, walked in one place: nestings of dicts, tuples, named tuples, lists, dataclasses, TensorDicts and tensorclasses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import keyword
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, cast

import numpy as np
import torch

from engram._support import tensordicts
from engram._support.tensordicts import children, is_bare, is_non_tensor, is_tensor_collection, wrap

Path = tuple[str, ...]


def is_tensordict(data: object) -> TypeGuard[tensordicts.TensorDictBase]:
    """Whether data is a TensorDict or a tensorclass, which has its methods."""
    return is_tensor_collection(data)


def has_dimensions(data: object) -> bool:
    """Whether data is one tensor, array, TensorDict or tensorclass."""
    return isinstance(data, torch.Tensor | np.ndarray | np.generic) or is_tensor_collection(data)


class NoRows(RuntimeError):
    """A batch has no rows: ``extend`` of a buffer or a writer writes none then."""


def is_numbers(data: object) -> bool:
    """Whether data is a number of Python's or NumPy's, or a list of some, perhaps in each other."""
    if isinstance(data, list):
        return bool(data) and all(map(is_numbers, data))
    return isinstance(data, bool | int | float | np.number | np.bool_)


def is_number(data: object) -> bool:
    """Whether data is one number, perhaps in a tensor."""
    return not data.ndim if isinstance(data, torch.Tensor) else is_numbers(data) and not isinstance(data, list)


def has_entries(data: object) -> bool:
    """Whether data has entries by name: a dict, TensorDict or tensorclass."""
    return isinstance(data, dict) or is_tensor_collection(data)


def describe(value: object) -> str:
    """What messages say of data that was not expected."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if is_tensor_collection(value):
        return f"a {type(value).__name__} of batch size {list(value.batch_size)}"
    if isinstance(value, dict) and value:
        return f"{type(value).__name__} with {[*map(str, value)]!r:.80}"
    return f"{type(value).__name__} {value!r:.60}"


def is_dataclass(data: object) -> bool:
    """Whether data is an instance of a dataclass, and no tensorclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type) and not is_tensor_collection(data)


def is_named_tuple(data: object) -> bool:
    """Whether data is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def fields_of(cls: type[object]) -> tuple[str, ...]:
    """The names of a dataclass's or a named tuple's fields."""
    if dataclasses.is_dataclass(cls):
        return tuple([field.name for field in dataclasses.fields(cls)])
    return cast("tuple[str, ...]", operator.attrgetter("_fields")(cls))


def attributes(data: object) -> dict[str, object]:
    """The fields of a dataclass or a named tuple by name. Raises ``KeyError``: one has no value."""
    try:
        return {name: getattr(data, name) for name in fields_of(type(data))}
    except AttributeError as error:
        raise KeyError(
            f"{type(data).__name__}: expected a value in every field: {error}. Set it, or drop the field."
        ) from None


def with_fields(made: object, entries: Mapping[str, object]) -> object:
    """A new instance of a dataclass, frozen or not, filled: what its ``__init__`` does is for rows, and not called."""
    for name, value in entries.items():
        object.__setattr__(made, name, value)
    return made


def map_with_paths(
    data: object,
    change: Callable[[object, Path], object],
    path: Path = (),
    *,
    keep: bool = False,
    entries: Callable[[dict[str, object], Path], object] | None = None,
) -> Any:
    """The same dicts, tuples, lists and dataclasses around ``change(leaf, path)`` of all that they hold.

    A TensorDict is a leaf, and so is a list of numbers, as is everything else. Containers are new; with ``keep`` one in which nothing
    changed is returned itself, and of another dict a copy with all that its class holds besides. ``entries(dict, path)`` replaces the
    new dicts.
    """
    if isinstance(data, dict):
        new = {
            key: map_with_paths(value, change, (*path, str(key)), keep=keep, entries=entries)
            for key, value in data.items()
        }
        if not keep:
            return new if entries is None else entries(new, path)
        if all(new[key] is value for key, value in data.items()):
            return data
        made = copy.copy(data)
        made.update(new)
        return made
    if is_dataclass(data):
        named = attributes(data)
        new = {key: map_with_paths(it, change, (*path, key), keep=keep, entries=entries) for key, it in named.items()}
        same = keep and all(new[name] is value for name, value in named.items())
        return data if same else with_fields(copy.copy(data), new)
    if isinstance(data, tuple | list) and not is_numbers(data):
        values = [map_with_paths(it, change, (*path, str(i)), keep=keep, entries=entries) for i, it in enumerate(data)]
        if keep and all(new is old for new, old in zip(values, data, strict=True)):
            return data
        return type(data)(*values) if is_named_tuple(data) else type(data)(values)
    return change(data, path)


def map_leaves(data: object, change: Callable[[object], object]) -> Any:
    """The same dicts, tuples and lists, new, around ``change(leaf)`` of all that they hold; a TensorDict is a leaf, and numbers are."""
    return map_with_paths(data, lambda leaf, _: change(leaf))


def map_tensors(data: object, change: Callable[[torch.Tensor], object], **device: torch.device | None) -> Any:
    """New containers, TensorDicts among them, around ``change(tensor)`` of every tensor. Other objects stay.

    ``device=…`` is what TensorDicts say that they are on.
    """

    def within(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if not is_tensordict(leaf):
            return leaf
        if is_bare(leaf):
            entries = {key: within(value) for key, value in children(leaf).items()}
            return wrap(entries, leaf.batch_size, device.get("device", leaf.device))
        return leaf.apply(lambda x: change(x) if isinstance(x, torch.Tensor) else x, filter_empty=False, **device)

    return map_leaves(data, within)


def tensors(data: object) -> list[torch.Tensor]:
    """Every tensor in data."""
    found: list[torch.Tensor] = []

    def note(leaf: object) -> None:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_tensordict(leaf) and not is_bare(leaf):
            leaf.apply(note, filter_empty=True)
        elif is_tensordict(leaf):
            for value in children(leaf).values():
                note(value)

    map_leaves(data, note)
    return found


def parts_of(jagged: torch.Tensor) -> list[torch.Tensor]:
    """The values, offsets and perhaps lengths of a jagged tensor: the same objects at every call."""
    return [part for name in ("_values", "_offsets", "_lengths") if (part := getattr(jagged, name)) is not None]


def map_parts(jagged: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A jagged tensor around its changed parts: itself, where none has changed."""
    new = [*map(change, old := parts_of(jagged))]
    if all(map(operator.is_, new, old)):
        return jagged
    most, dim = jagged._get_max_seqlen(), jagged._ragged_idx  # type: ignore[attr-defined] # noqa: SLF001 - no other way
    return torch.nested.nested_tensor_from_jagged(new[0], new[1], (*new, None)[2], dim, max_seqlen=most)


def first_leaf(data: object) -> Any:
    """The first leaf of dicts, tuples and dataclasses; None if they hold none. A list is a leaf: of rows."""
    while True:
        if is_dataclass(data):
            data = next(iter(attributes(data).values()), None)
        elif isinstance(data, dict | tuple):
            data = next(iter(data.values() if isinstance(data, dict) else data), None)
        else:
            return data


def find(data: Any, path: Path) -> Any:
    """The entry of nested dicts and TensorDicts under a path of names; None if there is none.

    An entry whose key is an int is called by its digits.
    """
    for name in path:
        if isinstance(data, dict) and name not in data:
            data = {name_of(key): value for key, value in data.items()}
        if not has_entries(data) or name not in data.keys():  # noqa: SIM118 - TensorDicts compare values with "in"
            return None
        data = data[name] if isinstance(data, dict) else data.get(name)
    return data


def entries_of(data: object) -> Any:
    """What has entries by name, as it is. Of a dataclass or a named tuple a dict of its fields; of a tuple or list one by places; else
    an empty one.
    """
    if has_entries(data):
        return data
    if is_dataclass(data) or is_named_tuple(data):
        return attributes(data)
    return {str(place): value for place, value in enumerate(data)} if isinstance(data, tuple | list) else {}


def find_field(data: object, path: Path) -> object:
    """As :func:`find`, also within dataclasses, named tuples, and tuples and lists, whose entries are called by their places."""
    for name in path:
        data = find(entries_of(data), (name,))
    return data


def name_of(key: object) -> str:
    """What paths call an entry of a dict: an int by its digits. Other keys that are no strings stay, and are no field's."""
    return str(key) if isinstance(key, int) and not isinstance(key, bool) else key  # type: ignore[return-value]


def flatten(data: Any, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The entries of nested dicts and TensorDicts, with their paths: in these an int is its digits."""
    for key, value in data.items():
        name = name_of(key)
        if has_entries(value) and not is_non_tensor(value):
            yield from flatten(value, (*path, name))
        else:
            yield (*path, name), value


# ---- named tuples ------------------------------------------------------------------------------------------------------


def can_be_attribute(name: object) -> bool:
    """Whether a named tuple can have a field of this name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


def batch_of(names: tuple[str, ...], values: Iterable[object]) -> object:
    """A batch with these attributes. Pickles of one call this."""
    made: Callable[..., object] = class_of(names)
    return made(*values)


@functools.cache
def class_of(names: tuple[str, ...]) -> type[object]:
    """The class of all batches with these names."""

    def reduced(batch: Iterable[object]) -> tuple[object, ...]:
        return batch_of, (names, tuple(batch))

    return type("Batch", (namedtuple("Batch", names),), {"__slots__": (), "__reduce__": reduced})
