"""Storage checkpointers with TorchRL's names, whose files hold each observation once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.saved.checkpointers import TensorStorageCheckpointer
from engram.torchrl.hooks import Flat2TED, Nested2TED, TED2Flat, TED2Nested
from engram.torchrl.layouts import Keys

if TYPE_CHECKING:
    from collections.abc import Iterable


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """Saves steps in TorchRL's format with each observation once, a file per field.

    An observation is saved at its step; the next observation only of the last step of each trajectory. That takes nearly half the bytes
    where observations are large. It is checked while it is written that nothing is lost: flags at the root are False, and
    ``("next", key)`` is ``key`` of the next step, bit by bit, unless the step is ``done``.

    Args:
        done_keys: flags, as they are called at the root. Default: ``done``, ``truncated``, ``terminated``.
        reward_keys: entries below ``"next"`` only. Default: ``reward``.

    Rows of one lane; ``ndim > 1`` is possible. The rows after rows that were removed cannot be saved.

    >>> import torch
    >>> from engram import FlatStorageCheckpointer, LazyTensorStorage, TensorDictReplayBuffer
    >>> from tensordict import TensorDict
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), checkpointer=FlatStorageCheckpointer())
    >>> flag = torch.zeros(3, 1, dtype=torch.bool)
    >>> after = TensorDict({"obs": torch.arange(1, 4), "reward": torch.ones(3, 1), "done": flag}, [3])
    >>> _ = rb.extend(TensorDict({"obs": torch.arange(3), "done": flag, "next": after}, [3]))
    >>> rb.dumps("flat-checkpointer-example")
    >>> TensorDict.load_memmap("flat-checkpointer-example/storage")["obs"][:4].tolist()
    [0, 1, 2, 3]
    """

    _kind = "flat"

    def __init__(self, done_keys: Iterable[object] | None = None, reward_keys: Iterable[object] | None = None) -> None:
        super().__init__()
        keys = Keys.of(type(self).__name__, done_keys, reward_keys)
        flat = self._kind == "flat"
        save, load = (TED2Flat, Flat2TED) if flat else (TED2Nested, Nested2TED)
        self._save_hooks.append(save(done_keys=keys.flags, reward_keys=keys.rewards))
        self._load_hooks.append(load(done_keys=keys.flags, reward_keys=keys.rewards))


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """As :class:`FlatStorageCheckpointer`, with nested tensors of which each row is a trajectory. The bytes are the same.

    >>> from engram import NestedStorageCheckpointer
    >>> NestedStorageCheckpointer(reward_keys=("reward", ("agents", "reward"))).layout.kind
    'nested'
    """

    _kind = "nested"
