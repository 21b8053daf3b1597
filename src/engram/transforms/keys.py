"""Transforms that rename, select and exclude entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.nested import has_entries, is_tensordict
from engram.transforms._base import (
    KeyedTransform,
    Transform,
    as_keys,
    described,
    find,
    keys_of,
    put,
    shallow,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from engram.transforms._base import Key, Keys


class RenameTransform(KeyedTransform):
    """Renames entries: ``in_keys`` become ``out_keys`` on reading, ``out_keys_inv`` become ``in_keys_inv`` on writing.

    Args:
        in_keys, out_keys: names in the buffer and in batches, in pairs.
        in_keys_inv, out_keys_inv: the same for writing. By default, nothing is renamed.
        create_copy: keep the entry under its old name as well.

    Raises:
        ValueError: the lists differ in length, or a key is in both of them (the order would matter: use two transforms).
        KeyError: on use: there is no such entry.
        TypeError: on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import RenameTransform
    >>> sorted(RenameTransform(["obs"], [("next", "obs")])({"obs": torch.zeros(2), "a": torch.zeros(2)}))
    ['a', 'next']
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, [] if out_keys is None else out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = bool(create_copy)
        both = [key for key in self.in_keys if key in self.out_keys]
        if both:
            raise ValueError(f"RenameTransform: expected no key among both in_keys and out_keys, got {both}. Use two.")

    def forward(self, data: object) -> object:
        return self._renamed(data, self.in_keys, self.out_keys)

    def inv(self, data: object) -> object:
        return self._renamed(data, self.out_keys_inv, self.in_keys_inv)

    def _renamed(self, data: object, old: list[Key], new: list[Key]) -> object:
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


class SelectTransform(Transform):
    """Keeps only some entries of a batch.

    Args:
        *selected_keys: the entries to keep, if they exist. The key of a nested TensorDict or dict selects all of it.
        keep_rewards, keep_dones: keep ``"reward"`` and ``"done"`` as well.

    Raises:
        TypeError: a key is not a string or a tuple of strings; on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import SelectTransform
    >>> list(SelectTransform("obs", keep_dones=False)({"obs": torch.zeros(2), "done": torch.zeros(2)}))
    ['obs']
    """

    writes = False

    def __init__(self, *selected_keys: Key, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        self.selected_keys = as_keys(list(selected_keys), "SelectTransform: selected_keys")
        self.keep_rewards, self.keep_dones = bool(keep_rewards), bool(keep_dones)
        self._kept = [*self.selected_keys, *["reward"] * self.keep_rewards, *["done"] * self.keep_dones]

    def forward(self, data: object) -> object:
        if is_tensordict(data):
            return data.select(*self._kept, strict=False)
        shallow(data, "SelectTransform")  # rejects data without keys
        selected: dict[str, object] = {}
        for key in self._kept:
            value = find(data, key)
            if value is not None:
                put(selected, keys_of(data, key), shallow(value, "SelectTransform") if has_entries(value) else value)
        return selected

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(repr, self.selected_keys))})"


class ExcludeTransform(Transform):
    """Removes some entries of a batch, or of rows that are written.

    Args:
        *excluded_keys: the entries to remove, if they exist.
        inverse: remove them on writing instead of on reading.

    Raises:
        TypeError: a key is not a string or a tuple of strings; on use: the data is neither a TensorDict nor a dict.

    >>> import torch
    >>> from engram import ExcludeTransform
    >>> list(ExcludeTransform("debug")({"obs": torch.zeros(2), "debug": torch.zeros(2)}))
    ['obs']
    """

    def __init__(self, *excluded_keys: Key, inverse: bool = False) -> None:
        self.excluded_keys = as_keys(list(excluded_keys), "ExcludeTransform: excluded_keys")
        self.inverse = bool(inverse)
        self.reads, self.writes = not self.inverse, self.inverse

    def forward(self, data: object) -> object:
        return data if self.inverse else self._without(data)

    def inv(self, data: object) -> object:
        return self._without(data) if self.inverse else data

    def _without(self, data: object) -> object:
        if is_tensordict(data):
            return data.exclude(*self.excluded_keys)
        made = shallow(data, "ExcludeTransform")
        for key in self.excluded_keys:
            if find(made, key) is not None:
                _remove(made, key)
        return made

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform({', '.join(map(repr, self.excluded_keys))}{inverse})"


def _remove(data: dict[str, object] | TensorDictBase, key: Key) -> None:
    *way, last = keys_of(data, key)
    for part in way:
        data = data.get(part)
    if isinstance(data, dict):
        del data[last]
    else:
        data.del_(last)
