"""What engram's transforms share: keys, and looking into TensorDicts and nested dicts alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from engram import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["KeyedTransform", "Transform"]

Key: TypeAlias = str | tuple[str, ...]
"""Of an entry: a name, or names on the way to a nested one."""


class Transform:
    """Base of engram's transforms. One of your own needs no base class: ``forward`` and ``inv`` are enough."""

    #: Whether :meth:`forward` does anything, and :meth:`inv`: a direction that does not is passed over.
    reads = True
    writes = True

    def forward(self, data: Any) -> Any:
        """What the user gets for data that was read."""
        return data

    def inv(self, data: Any) -> Any:
        """What is stored for data that is written."""
        return data

    def __call__(self, data: Any) -> Any:
        return self.forward(data)


class KeyedTransform(Transform):
    """Computes an entry from an entry: ``out_keys`` from ``in_keys`` on reading, ``in_keys_inv`` from ``out_keys_inv`` on writing."""

    def __init__(self, in_keys: Any, out_keys: Any, in_keys_inv: Any, out_keys_inv: Any) -> None:
        name = type(self).__name__
        self.in_keys = as_keys(in_keys, f"{name}: in_keys")
        self.out_keys = self.in_keys if out_keys is None else as_keys(out_keys, f"{name}: out_keys")
        self.in_keys_inv = as_keys(in_keys_inv, f"{name}: in_keys_inv")
        self.out_keys_inv = self.in_keys_inv if out_keys_inv is None else as_keys(out_keys_inv, f"{name}: out_keys_inv")
        check_pairs(self.in_keys, self.out_keys, f"{name}: in_keys and out_keys")
        check_pairs(self.in_keys_inv, self.out_keys_inv, f"{name}: in_keys_inv and out_keys_inv")
        self.reads, self.writes = bool(self.in_keys), bool(self.in_keys_inv)

    def apply(self, value: Tensor) -> Tensor:
        """An entry as it is read."""
        raise NotImplementedError

    def apply_inv(self, value: Tensor) -> Tensor:
        """An entry as it is written."""
        raise NotImplementedError

    def forward(self, data: Any) -> Any:
        return self._mapped(data, self.in_keys, self.out_keys, self.apply)

    def inv(self, data: Any) -> Any:
        return self._mapped(data, self.out_keys_inv, self.in_keys_inv, self.apply_inv)

    def _mapped(self, data: Any, sources: list[Key], targets: list[Key], change: Callable[[Tensor], Tensor]) -> Any:
        if not sources:
            return data
        if is_tensor(data):
            return change(torch.as_tensor(data))
        made = shallow(data, type(self).__name__)
        for source, target in zip(sources, targets, strict=True):
            put(made, target, change(torch.as_tensor(entry(data, source, type(self).__name__))))
        return made


def as_keys(keys: Any, name: str) -> list[Key]:
    """Keys of the user's as a list; None is none, and a tuple is one key, as in TorchRL.

    Raises:
        TypeError: neither a string nor a tuple of strings is among them.
    """
    if keys is None:
        return []
    if isinstance(keys, str | tuple):
        keys = [keys]
    if not isinstance(keys, list):
        raise TypeError(f"{name}: expected a list of keys, strings or tuples of strings, got {keys!r}.")
    for key in keys:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{name}: expected keys that are strings or tuples of strings, got {key!r}.")
    return [key[0] if isinstance(key, tuple) and len(key) == 1 else key for key in keys]


def check_pairs(sources: list[Key], targets: list[Key], name: str) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{name}: expected as many of the one as of the other, got {sources} and {targets}.")


def path_of(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def is_tensor(data: Any) -> bool:
    """Whether data is one tensor or array."""
    return isinstance(data, Tensor | np.ndarray | np.generic) and not is_tensor_collection(data)


def find(data: Any, key: Key) -> Any:
    """The entry of a nested dict or TensorDict under a key, or None."""
    return nested.find(data, path_of(key))


def entry(data: Any, key: Key, call: str) -> Any:
    """The tensor or array under a key.

    Raises:
        KeyError: there is none.
        TypeError: something else is there.
    """
    value = find(data, key)
    if value is None:
        raise KeyError(f"{call}: expected the key {key!r}, got {described(data)}.")
    if not is_tensor(value):
        raise TypeError(f"{call}: expected a tensor under {key!r}, got {type(value).__name__}.")
    return value


def described(data: Any) -> str:
    """The keys of data, for messages."""
    return (
        f"the keys {[str(key) for key in data]}"
        if isinstance(data, dict)
        else f"the keys {sorted(map(str, data.keys()))}"
    )


def shallow(data: Any, call: str) -> Any:
    """Containers anew, around the same tensors, so that entries can be set in them.

    Raises:
        TypeError: no TensorDict, tensorclass or dict.
    """
    if is_tensor_collection(data):
        return data.copy()
    if isinstance(data, dict):
        return {key: shallow(value, call) if nested.has_entries(value) else value for key, value in data.items()}
    raise TypeError(f"{call}: expected a TensorDict, a tensorclass or a nested dict, got {type(data).__name__}.")


def put(data: Any, key: Key, value: Any) -> None:
    """Set an entry in containers of ours, making those on the way."""
    *way, last = path_of(key)
    for part in way:
        inner = data.get(part, None)
        if not nested.has_entries(inner):
            inner = {} if isinstance(data, dict) else TensorDict({}, batch_size=data.batch_size, device=data.device)
            _set(data, part, inner)
            inner = data.get(part)
        data = inner
    _set(data, last, value)


def _set(data: Any, name: str, value: Any) -> None:
    if isinstance(data, dict):
        data[name] = value
    else:
        data.set(name, value)


def map_tensors(data: Any, change: Callable[[Tensor], Any]) -> Any:
    """Every tensor and array of nested data changed, containers anew; other objects stay."""
    return nested.map_tensors(nested.map_leaves(data, lambda x: torch.as_tensor(x) if is_tensor(x) else x), change)


def arguments(transform: Any, names: Iterable[str]) -> str:
    """What ``repr`` shows."""
    shown = ", ".join(
        f"{name}={getattr(transform, name)!r}" for name in names if getattr(transform, name) not in (None, [])
    )
    return f"{type(transform).__name__}({shown})"
