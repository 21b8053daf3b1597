"""Every live row once per pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram import _fork, _native
from engram.samplers._base import NativeSampler, check_drawable
from engram.types import Draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engram.store import Key, Store
    from engram.types import Extent, Write

__all__ = ["SamplerWithoutReplacement"]


class SamplerWithoutReplacement(NativeSampler):
    """Walks over the live rows, each once per pass, in random or in storage order.

    The last batch of a pass is short, unless ``drop_last``, and sets ``ran_out``; the next draw starts a new pass. So does
    any draw after the number of live rows changed. Overwriting a full ring does not: rows not yet visited show their new
    content. The order is a keyed permutation that takes no memory, whatever the size.

    Args:
        drop_last: skip the rows of a pass that do not fill a batch.
        shuffle: random order; else row order.

    Raises (when drawing):
        ValueError: ``drop_last`` and fewer live rows than the batch size.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SamplerWithoutReplacement(), batch_size=4)
    >>> _ = rb.extend(torch.arange(9))
    >>> [len(batch) for batch in rb]
    [4, 4, 1]
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        if replacement:
            raise TypeError("SamplerWithoutReplacement: expected replacement=False. Use RandomSampler().")
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.ran_out = False
        self._lock = _fork.lock()
        self._key = 0
        self._rows = 0
        self._visited = 0

    def observe(self, write: Write | None, data: Any) -> None:
        """An emptied buffer: the pass is over."""
        if write is None:
            with self._lock:
                self._rows = self._visited = 0

    def _advance(self, size: int, batch_size: int, key: Callable[[], int]) -> tuple[int, int, int]:
        """The next batch of the pass: ``(key of the order, first rank, ranks)``."""
        check_drawable(size)
        if self.drop_last and size < batch_size:
            raise ValueError(
                f"sample: drop_last: expected at least batch_size={batch_size} live rows, got {size}. Add data first, or use "
                "drop_last=False."
            )
        with self._lock:
            left = self._rows - self._visited
            if size != self._rows or left < (batch_size if self.drop_last else 1):
                self._key, self._rows, self._visited = key(), size, 0
            start = self._visited
            count = min(batch_size, size - start)
            self._visited += count
            if self.drop_last and size - self._visited < batch_size:
                self._visited = size  # the rest is skipped, whatever is asked for next
            self.ran_out = self._visited == size
            return self._key, start, count

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        order, start, count = self._advance(extent.size, batch_size, lambda: key)
        ranks = _native.empty_rows(count)
        if self.shuffle:
            _native.permute(order, extent.size, start, count, ranks.data_ptr())
        else:
            torch.arange(start, start + count, out=ranks, device="cpu")
        return Draw(extent.rows(ranks))

    def sample_natively(
        self, storage: Any, key: Key, n: int, *, numbered: bool = False
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """:meth:`draw` and the rows' data in one native call: ``(columns, rows, info)``."""
        store: Store = storage.memory
        size = store.core.size()
        order, start, count = self._advance(size, n, lambda: key.value)
        columns = store.read_ranked(order, size, start, count, shuffle=self.shuffle, with_numbers=numbered)
        info = {"index_generation": columns.pop()} if numbered else {}
        return columns, columns.pop(), info

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        return len(storage) >= (batch_size if self.drop_last else 1)

    def state_dict(self) -> dict[str, Any]:
        """``key``, ``rows`` and ``visited`` of the pass under way, and ``ran_out``: plain values."""
        return {"key": self._key, "rows": self._rows, "visited": self._visited, "ran_out": self.ran_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the pass of a saved state.

        Raises:
            KeyError: a missing or unknown entry. Nothing is changed.
            ValueError: a number out of range. Nothing is changed.
        """
        if set(state_dict) != {"key", "rows", "visited", "ran_out"}:
            raise KeyError(
                f"SamplerWithoutReplacement: expected a state with key, rows, visited, ran_out; got {sorted(state_dict)}."
            )
        key, rows, visited = (int(state_dict[name]) for name in ("key", "rows", "visited"))
        if not (0 <= visited <= rows and 0 <= key < 1 << 64):
            raise ValueError(f"SamplerWithoutReplacement: expected 0 <= visited <= rows, got {state_dict}.")
        with self._lock:
            self._key, self._rows, self._visited = key, rows, visited
            self.ran_out = bool(state_dict["ran_out"])

    def config(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "shuffle": self.shuffle}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = _fork.lock()
