"""A buffer of TensorDicts: sampled batches say which rows they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torch import Tensor

from engram import writers
from engram._tensordict import children, put
from engram._words import warn
from engram.buffer.replay_buffer import ReplayBuffer, register

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReplayBuffer", "TensorDictReplayBuffer"]


@register
class TensorDictReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` whose rows are TensorDicts.

    Samples carry ``"index"``, int64 ``[B]`` (``[B, ndim]`` with ``ndim > 1``), and with a writer that tracks generations
    ``"index_generation"``; both also stand in ``info``. They are never stored: entries of these names in what is written
    are dropped, and so are ``"priority_weight"`` and ``priority_key`` where the first row did not have them.

    Args:
        size: as for :class:`ReplayBuffer`.
        priority_key: entry with a row's priority, for prioritized samplers.
        **kwargs: as for :class:`ReplayBuffer`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rb.extend(TensorDict({"obs": torch.arange(10)}, batch_size=[10])).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> batch = rb.sample()
    >>> bool((batch["obs"] == batch["index"]).all())
    True
    """

    _shows_rows = True
    _default_writer: Callable[[], Any] = writers.TensorDictRoundRobinWriter

    def __init__(self, size: int | None = None, *, priority_key: str = "td_error", **kwargs: Any) -> None:
        self._priority_key = priority_key
        self._ignored = ("priority_weight", priority_key)
        super().__init__(size, **kwargs)

    @property
    def priority_key(self) -> str:
        """Entry with a row's priority."""
        return self._priority_key

    def add(self, data: Any, *, lane: int | None = None) -> Any:
        """As :meth:`ReplayBuffer.add`, for one TensorDict.

        Raises:
            ValueError: not a TensorDict.
            PriorityError: ``priority_key`` holds no priority. Nothing is written.
        """
        row = _to_store(data, "add")
        priority = self._priority_in(data)
        if priority is None:
            return self._add(row, lane, None)
        columns = self._storage.ndim - 1
        priority = priority.flatten(0, columns - 1) if columns else priority.reshape(1, -1)
        index = self._add(row, lane, self._check_of(priority))
        if index is not None and (isinstance(index, int) or len(index)):  # None: the writer rejected the row
            self._bound_sampler().update_priority(self._rows_named(index), priority)
        return index

    def extend(
        self, data: Any, *, lane: int | Tensor | Literal["each"] | None = None, update_priority: bool | None = None
    ) -> Tensor:
        """As :meth:`ReplayBuffer.extend`, for a TensorDict with a batch dimension.

        Args:
            update_priority: False: ``priority_key`` in the data does not become the rows' priority. No effect with samplers
                that are not ``prioritized``.

        Raises:
            ValueError: not a TensorDict.
            PriorityError, RuntimeError: a bad priority under ``priority_key``, or another number of them than of rows. Nothing
                is written.
        """
        data = _to_store(data, "extend")
        priority = None if update_priority is False else self._priority_in(data)
        if priority is None:
            return self._extend(data, lane, None)
        columns = self._storage.ndim - 1
        if columns:  # [*columns, time, ...], but a row is a step of one column
            priority = priority.movedim(columns, 0).flatten(0, columns)
        index = self._extend(data, lane, self._check_of(priority))
        if len(index):
            self._bound_sampler().update_priority(self._rows_named(index), priority)
        return index

    def _priority_in(self, data: Any) -> Any:
        """The priorities that come along with rows; None if there are none, or nobody who takes them."""
        return data.get(self._priority_key, None) if self._of_sampler.prioritized else None

    def _check_of(self, priority: Any) -> Callable[[int | None], None]:
        """Refuses priorities that the sampler would, before their rows are written."""

        def check(n: int | None) -> None:
            if n:  # else the storage refuses the data
                self._bound_sampler().check_priority(priority, n)

        return check

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """As :meth:`ReplayBuffer.sample`: a TensorDict with ``"index"``. ``include_info`` is deprecated, without effect.

        Raises:
            RuntimeError: a transform or collate function changed the batch size, so the keys cannot be attached.
        """
        if include_info is not None:
            warn("sample: include_info is deprecated: samples always carry their index.")
        return super().sample(batch_size, return_info)

    def _attached(self, data: Any, n: int, rows: Any, info: dict[str, Any]) -> Any:
        index = self._user_index(rows)
        if self._of_sampler.draws_windows and self._storage.ndim == 1:
            index = index.unsqueeze(-1)
        entries = {**info, "index": index}
        if type(data) is TensorDict and data.batch_size == (n,) and not data.is_locked:
            put(data, entries)
        else:
            self._attach(data, n, entries)
        return data

    def _attach(self, data: Any, n: int, entries: dict[str, Any]) -> None:
        """Add entries ``[n, ...]`` to a batch of another form than ours."""
        if not is_tensor_collection(data):
            raise RuntimeError(
                f"sample: expected a TensorDict after collating and transforms, got {type(data).__name__}."
            )
        if data.batch_size[:1] != (n,):
            raise RuntimeError(
                f"sample: a transform changed the batch size from {n} to {list(data.batch_size)}, so {sorted(map(str, entries))} "
                "cannot be attached. Use a ReplayBuffer with sample(return_info=True)."
            )
        missing = len(data.batch_size) - 1
        for key, value in entries.items():
            stored = data.get(key, None)
            if stored is not None and stored.shape == value.shape:  # a stored flag, marked
                data.set(key, value)
                continue
            laid_out = value.reshape(*value.shape[:1], *(1,) * missing, *value.shape[1:])
            data.set(key, laid_out.expand(*data.batch_size, *value.shape[1:]))

    def _without_synthesised(self, data: Any, call: str) -> Any:
        return _to_store(data, call)

    def update_tensordict_priority(self, data: Any) -> None:
        """Hand the priorities of a sampled batch to the sampler; no effect on samplers without priorities.

        Args:
            data: a TensorDict with ``"index"`` and ``priority_key``, ``[B, ...]``.

        Raises:
            KeyError: no ``priority_key``, with a sampler that has priorities.
        """
        if not self._of_sampler.takes_priorities:
            return
        priority = data.get(self._priority_key, None)
        if priority is None:
            raise KeyError(
                f"update_tensordict_priority: expected the key {self._priority_key!r}, got {[str(k) for k in children(data)]}."
            )
        index, generation = data.get("index"), data.get("index_generation", None)
        if not data.batch_size:  # one row
            priority = priority.reshape(1, -1)
        self._bound_sampler().update_priority(self._rows_named(index), priority, generation=generation)

    def _record_more(self) -> dict[str, Any]:
        return {"priority_key": self._priority_key}

    @classmethod
    def open_arguments(cls, record: dict[str, Any]) -> dict[str, Any]:
        return {"priority_key": record["priority_key"]} if "priority_key" in record else {}


def _to_store(data: Any, call: str) -> Any:
    """A TensorDict without the entries that are synthesised on reading."""
    if not is_tensor_collection(data) or is_tensorclass(data):
        raise ValueError(
            f"{call}: expected a TensorDict, got {type(data).__name__}. Use a ReplayBuffer for other data."
        )
    entries = children(data)
    if "index" in entries or "index_generation" in entries:
        return data.exclude("index", "index_generation")
    return data
