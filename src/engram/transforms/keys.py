"""Other entries, or other names, outside of the buffer than inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import is_tensor_collection

from engram.nested import has_entries
from engram.transforms._base import (
    Transform,
    arguments,
    as_keys,
    check_pairs,
    described,
    find,
    path_of,
    put,
    shallow,
)

if TYPE_CHECKING:
    from engram.transforms._base import Key

__all__ = ["ExcludeTransform", "RenameTransform", "SelectTransform"]


class RenameTransform(Transform):
    """Renames entries: ``in_keys`` become ``out_keys`` on reading, ``out_keys_inv`` become ``in_keys_inv`` on writing.

    Args:
        in_keys, out_keys: names inside and outside, in pairs.
        in_keys_inv, out_keys_inv: the same for writing; default nothing is renamed.
        create_copy: the entry keeps its old name, too.

    Raises:
        ValueError: not in pairs; a key on both sides, as the order would matter: use two transforms.
        KeyError: on use: no such entry. TypeError: on use: neither TensorDict nor dict.

    >>> import torch
    >>> from engram import RenameTransform
    >>> sorted(RenameTransform(["obs"], [("next", "obs")])({"obs": torch.zeros(2), "a": torch.zeros(2)}))
    ['a', 'next']
    """

    def __init__(
        self, in_keys: Any, out_keys: Any, in_keys_inv: Any = None, out_keys_inv: Any = None, create_copy: bool = False
    ) -> None:
        self.in_keys = as_keys(in_keys, "RenameTransform: in_keys")
        self.out_keys = as_keys(out_keys, "RenameTransform: out_keys")
        self.in_keys_inv = as_keys(in_keys_inv, "RenameTransform: in_keys_inv")
        self.out_keys_inv = (
            self.in_keys_inv if out_keys_inv is None else as_keys(out_keys_inv, "RenameTransform: out_keys_inv")
        )
        self.create_copy = bool(create_copy)
        check_pairs(self.in_keys, self.out_keys, "RenameTransform: in_keys and out_keys")
        check_pairs(self.in_keys_inv, self.out_keys_inv, "RenameTransform: in_keys_inv and out_keys_inv")
        both = [key for key in self.in_keys if key in self.out_keys]
        if both:
            raise ValueError(f"RenameTransform: expected no key among both in_keys and out_keys, got {both}. Use two.")
        self.reads, self.writes = bool(self.in_keys), bool(self.in_keys_inv)

    def forward(self, data: Any) -> Any:
        return self._renamed(data, self.in_keys, self.out_keys)

    def inv(self, data: Any) -> Any:
        return self._renamed(data, self.out_keys_inv, self.in_keys_inv)

    def _renamed(self, data: Any, old: list[Key], new: list[Key]) -> Any:
        made = shallow(data, "RenameTransform")
        for source in old:
            if find(data, source) is None:
                raise KeyError(f"RenameTransform: expected the key {source!r}, got {described(data)}.")
        if not self.create_copy:
            for source in old:
                _remove(made, source)
        for source, target in zip(old, new, strict=True):
            put(made, target, find(data, source))
        return made

    def __repr__(self) -> str:
        return arguments(self, ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"))


class SelectTransform(Transform):
    """Leaves only some entries of what is read.

    Args:
        *selected_keys: what stays, where it is there; a key of a nested TensorDict or dict means all of it.
        keep_rewards, keep_dones: ``"reward"`` and ``"done"`` stay, too.

    Raises:
        TypeError: no keys; on use: neither TensorDict nor dict.

    >>> import torch
    >>> from engram import SelectTransform
    >>> list(SelectTransform("obs", keep_dones=False)({"obs": torch.zeros(2), "done": torch.zeros(2)}))
    ['obs']
    """

    writes = False

    def __init__(self, *selected_keys: Any, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        self.selected_keys = as_keys(list(selected_keys), "SelectTransform: selected_keys")
        self.keep_rewards, self.keep_dones = bool(keep_rewards), bool(keep_dones)
        self._kept = [*self.selected_keys, *["reward"] * self.keep_rewards, *["done"] * self.keep_dones]

    def forward(self, data: Any) -> Any:
        if is_tensor_collection(data):
            return data.select(*self._kept, strict=False)
        shallow(data, "SelectTransform")  # refuses what has no keys
        made: dict[str, Any] = {}
        for key in self._kept:
            value = find(data, key)
            if value is not None:
                put(made, key, shallow(value, "SelectTransform") if has_entries(value) else value)
        return made

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(repr, self.selected_keys))})"


class ExcludeTransform(Transform):
    """Leaves out some entries of what is read, or of what is written.

    Args:
        *excluded_keys: what goes, where it is there.
        inverse: on writing, instead of on reading.

    Raises:
        TypeError: no keys; on use: neither TensorDict nor dict.

    >>> import torch
    >>> from engram import ExcludeTransform
    >>> list(ExcludeTransform("debug")({"obs": torch.zeros(2), "debug": torch.zeros(2)}))
    ['obs']
    """

    def __init__(self, *excluded_keys: Any, inverse: bool = False) -> None:
        self.excluded_keys = as_keys(list(excluded_keys), "ExcludeTransform: excluded_keys")
        self.inverse = bool(inverse)
        self.reads, self.writes = not self.inverse, self.inverse

    def forward(self, data: Any) -> Any:
        return data if self.inverse else self._without(data)

    def inv(self, data: Any) -> Any:
        return self._without(data) if self.inverse else data

    def _without(self, data: Any) -> Any:
        if is_tensor_collection(data):
            return data.exclude(*self.excluded_keys)
        made = shallow(data, "ExcludeTransform")
        for key in self.excluded_keys:
            if find(made, key) is not None:
                _remove(made, key)
        return made

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform({', '.join(map(repr, self.excluded_keys))}{inverse})"


def _remove(data: Any, key: Key) -> None:
    *way, last = path_of(key)
    for part in way:
        data = data.get(part)
    if isinstance(data, dict):
        del data[last]
    else:
        data.del_(last)
