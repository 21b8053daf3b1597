"""Groups of the items of a list: their keys and rewards are rows of a store beside the list, which a native index keeps in groups."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from engram._support.field_paths import public
from engram._support.nested import find, flatten, has_entries
from engram._support.tensordicts import is_non_tensor
from engram.format.schema import Field, Node, Schema
from engram.store import Store
from engram.store.groups import StoredGroups, no_key, no_rewards
from engram.types import WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engram._support.field_paths import FieldPath
    from engram.storages.list import ListStorage
    from engram.store.groups import Drawn

T = TypeVar("T")

#: Bytes that stand for a key: no two keys have the same ones.
_DIGEST = 16
_KEY, _REWARD = ("key",), ("reward",)


class ItemGroups:
    """The groups of a list's items. The list tells it of every change, with its lock held.

    Args:
        storage: the list, with a bound.
        key: the entry of its items that says their group.
        reward: that with their reward; None: none is asked for.
    """

    def __init__(self, storage: ListStorage, key: FieldPath, reward: FieldPath | None) -> None:
        fields = Field(_KEY, "uint8", (_DIGEST,)), Field(_REWARD, "float64", ())
        structure = Node("dict", children={"key": Node("leaf", field=0), "reward": Node("leaf", field=1)})
        self._store = Store.private(Schema(storage.max_size, 1, (), fields, structure))
        self._storage, self._key, self._reward = storage, key, reward
        self._stored = StoredGroups(self._store, "main", _KEY, _REWARD)
        #: Rows without a key, and without a reward.
        self._no_key: set[int] = set()
        self._no_reward: set[int] = set()

    def written(self, rows: Sequence[int], items: Sequence[object]) -> None:
        """These items are in these rows now."""
        keys, rewards = bytearray(), []
        for row, item in zip(rows, items, strict=True):
            keys += _tried(self._key_of, item, row, self._no_key) or bytes(_DIGEST)
            rewards.append(_tried(self._reward_of, item, row, self._no_reward) or 0.0)
        if rewards:
            columns = (
                torch.frombuffer(keys, dtype=torch.uint8),
                torch.tensor(rewards, dtype=torch.float64, device="cpu"),
            )
            self._store.write(WritePlan(rows=torch.tensor(rows, device="cpu")), columns, len(rewards))

    def lost(self, rows: Tensor) -> None:
        """These rows, int64 ``[n]``, hold no items any more."""
        self._store.core.remove(rows.data_ptr(), len(rows), 0)
        self._no_key.difference_update(rows.tolist())
        self._no_reward.difference_update(rows.tolist())

    def emptied(self) -> None:
        """There are no items."""
        self._store.empty(keep_write_count=True)
        self._no_key.clear()
        self._no_reward.clear()

    @property
    def count(self) -> int:
        return self._stored.count

    def draw(self, strategy: str, key: int, groups: int, each: int, without: Tensor) -> Drawn:
        """As :meth:`engram.store.groups.Groups.draw`."""
        with self._storage.paused:  # so that the tickets are those of what was drawn
            for row in self._no_key:
                self._key_of(self._item(row))  # raises
            for row in self._no_reward:
                self._reward_of(self._item(row))
            found = self._stored.draw(strategy, key, groups, each, without)
            if found is None or isinstance(found, int):
                return found
            return found[0], self._storage.tickets_of(found[0]), found[2]

    def _item(self, row: int) -> object:
        return self._storage.read(torch.tensor([row], device="cpu"))[0][0]

    def _key_of(self, item: object) -> bytes:
        """What stands for the key of an item. Raises ``KeyError``: it has none. ``TypeError``: that is no key."""
        value = _entry(item, self._key)
        if value is None:
            raise no_key(self._key, _keys_of(item))
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            if value.numel() == 1:
                value = int(value)
            elif value.dtype is torch.uint8 and value.ndim == 1:
                value = value.cpu().numpy().tobytes().rstrip(b"\0")
        if isinstance(value, str):
            value = value.encode(errors="surrogatepass")
        if isinstance(value, int | np.integer):
            value = b"i%d" % int(value)
        elif isinstance(value, bytes):
            value = b"b" + value
        else:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"sample: {public(self._key)!r}: expected an integer or a text in each row, got {got}. Number the prompts, or hash them."
            )
        return blake2b(value, digest_size=_DIGEST).digest()

    def _reward_of(self, item: object) -> float:
        """The mean of the rewards of an item. Raises ``KeyError``: it has none. ``TypeError``: they are no real numbers."""
        if self._reward is None:
            return 0.0
        value = _entry(item, self._reward)
        if value is None:
            raise no_rewards(self._reward, _keys_of(item))
        if isinstance(value, int | float | np.number | np.ndarray):
            value = torch.as_tensor(value)
        if not isinstance(value, Tensor) or value.is_complex() or not value.numel():
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"sample: {public(self._reward)!r}: expected rewards that are real numbers, got {got}.")
        return float(value.double().mean())


def _tried(of: Callable[[object], T], item: object, row: int, without: set[int]) -> T | None:
    """What an item has; None: it has none, which drawing says."""
    try:
        found = of(item)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError):
        without.add(row)
        return None
    without.discard(row)
    return found


def _entry(item: object, path: FieldPath) -> object:
    found: object = find(item, path)
    return found.data if is_non_tensor(found) else found  # type: ignore[attr-defined] # tensordict's


def _keys_of(item: object) -> list[FieldPath]:
    return sorted(path for path, _ in flatten(item)) if has_entries(item) else []
