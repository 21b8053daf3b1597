"""A buffer of TensorDicts: sampled batches say which rows they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import Tensor

from engram import writers
from engram._support.nested import is_number
from engram._support.tensordicts import (
    children,
    is_lazy_stack,
    is_tensor_collection,
    is_tensorclass,
    put,
    tensordict_type,
)
from engram._support.words import warn
from engram.around import Sequence
from engram.buffer.read_path import ReadPath
from engram.buffer.recipe import register
from engram.buffer.replay_buffer import ReplayBuffer
from engram.buffer.row_access import RowAccess
from engram.buffer.window_marks import attach
from engram.buffer.write_path import HELD_BACK, WritePath, rows_of
from engram.store.limits import WAIT_S, checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    from engram.buffer.configuration import BufferArguments
    from engram.buffer.lanes import Lane, Layout
    from engram.buffer.ragged_batches import SampleArguments
    from engram.types import Size, Told

__all__ = ["ReplayBuffer", "TensorDictReplayBuffer"]


class TensorDictReadPath(ReadPath):
    """Batches say which rows they hold."""

    shows_rows = True

    def attached(self, data: Any, rows: Any, info: dict[Any, Any]) -> Any:
        wiring, batch = self._wiring, rows.shape
        index = wiring.user_index(rows)
        if wiring.of_sampler.draws_windows and wiring.storage.ndim == 1:
            index = index.unsqueeze(-1)
        entries = {**info, "index": index}
        for key in wiring.source.computed_keys:  # transforms may have changed them in the batch
            del entries[key]
        if type(data) is tensordict_type() and data.batch_size == batch and not data.is_locked:
            put(data, entries)
        else:
            attach(data, batch, entries)
        return data


class TensorDictWritePath(WritePath):
    """Rows may bring their first priority along. What the sampler would refuse is refused before rows are written."""

    takes_tensordicts = True

    def add(self, data: object, lane: int | None, timeout: float) -> Any:
        row, priority = _to_store(data, "add"), self._priority_in(data)
        if priority is None:
            return super().add(row, lane, timeout)
        columns = self._wiring.storage.ndim - 1
        priority = priority.flatten(0, columns - 1) if columns else priority.reshape(1, -1)
        lane = self.begin_row(lane)
        transformed = self.transformed_row(row)
        if transformed is None:
            return self._wiring.no_index()
        self.check_rows(transformed.rows, priority)
        index = self.write_transformed(transformed, lane, timeout)
        if index is not None and (isinstance(index, int) or len(index)):  # None: the writer rejected the row
            self._update_priority(index, priority)
        return index

    def extend(
        self,
        data: object,
        lane: Lane,
        layout: Layout,
        lane_key: object,
        timeout: float,
        update_priority: bool | None = None,
    ) -> Tensor:
        data = _to_store(data, "extend")
        if layout is not None or lane_key is not None or (lane is None and self._lanes.default is None):
            data, lane = self._lanes.arranged(data, lane, layout, lane_key)
        priority = None if update_priority is False else self._priority_in(data)
        if priority is None:
            return super().extend(data, lane, None, None, timeout)
        columns = self._wiring.storage.ndim - 1
        if columns:  # [*columns, time, ...], but a row is a step of one column
            priority = priority.movedim(self._wiring.storage.dim_extend, 0).flatten(0, columns)
        rows = self.transformed_rows(data)
        if rows is HELD_BACK:
            return self._wiring.no_index()
        self.check_rows(rows_of(rows, columns + 1), priority)
        index = self.write_rows(rows, lane, timeout)
        if len(index):
            self._update_priority(index, priority)
        return index

    def check_rows(self, n: int | None, priority: object) -> None:
        """Refuse priorities that the sampler would. ``n``: of how many rows; None: the data does not say, and is refused later."""
        if n:
            self._bound_sampler().check_priority(priority, n)

    def _priority_in(self, data: Any) -> Any:
        """The priorities that come along with rows; None if there are none, or the sampler takes none."""
        brings = self._wiring.of_sampler.prioritized and not isinstance(data, list | tuple)  # of no rows
        return data.get(self._settings.priority_key, None) if brings else None

    def _update_priority(self, index: object, priority: object) -> None:
        self._bound_sampler().update_priority(self._wiring.rows_named(index), priority)

    def _bound_sampler(self) -> Any:
        if self._prefetching is not None:
            self._prefetching.materialize()
        return self._wiring.bound_sampler()


class TensorDictRowAccess(RowAccess):
    """Row access of buffers whose rows are replaced by TensorDicts."""

    def storable(self, data: Any, call: str) -> Any:
        return data if is_number(data) else _to_store(data, call)


@register
class TensorDictReplayBuffer(ReplayBuffer["TensorDictBase"]):
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

    _default_writer: Callable[[], object] = writers.TensorDictRoundRobinWriter
    _read_path = TensorDictReadPath
    _write_path = TensorDictWritePath
    _row_access = TensorDictRowAccess
    _writing: TensorDictWritePath

    def __init__(
        self, size: int | None = None, *, priority_key: str = "td_error", **kwargs: Unpack[BufferArguments]
    ) -> None:
        self._priority_key = priority_key
        super().__init__(size, **kwargs)

    @property
    def priority_key(self) -> str:
        """Entry with a row's priority."""
        assert self._priority_key is not None
        return self._priority_key

    def add(self, data: Any, *, lane: int | None = None, timeout: float | None = WAIT_S) -> Any:
        """As :meth:`ReplayBuffer.add`, for one TensorDict.

        Raises:
            ValueError: not a TensorDict.
            PriorityError: ``priority_key`` holds no priority. Nothing is written.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.add(TensorDict({"obs": torch.zeros(3)}))
        0
        """
        return self._writing.add(data, lane, timeout if timeout is WAIT_S else checked_timeout(timeout, "add"))

    def extend(  # type: ignore[override] # the first name is TorchRL's
        self,
        tensordicts: Any = None,
        *,
        data: object = None,
        lane: Lane = None,
        update_priority: bool | None = None,
        layout: Layout = None,
        lane_key: str | tuple[str, ...] | None = None,
        timeout: float | None = WAIT_S,
    ) -> Tensor:
        """As :meth:`ReplayBuffer.extend`, for a TensorDict with a batch dimension.

        Args:
            tensordicts, data: the rows: TorchRL's name for them here, and that of :meth:`ReplayBuffer.extend`.
            update_priority: False: ``priority_key`` in the data does not become the rows' priority. No effect with samplers
                that are not ``prioritized``.

        Raises:
            ValueError: not a TensorDict.
            PriorityError, RuntimeError: a bad priority under ``priority_key``, or another number of them than of rows. Nothing
                is written.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.extend(TensorDict({"obs": torch.zeros(5, 3)}, [5])).tolist()
        [0, 1, 2, 3, 4]
        """
        if timeout is not WAIT_S:
            timeout = checked_timeout(timeout, "extend")
        if data is not None:
            if tensordicts is not None:
                raise TypeError("extend: expected one of tensordicts and data, which are the same, got both.")
            tensordicts = data
        return self._writing.extend(tensordicts, lane, layout, lane_key, timeout, update_priority)

    @overload
    def sample(
        self,
        batch_size: Size = ...,
        return_info: Literal[False] = ...,
        include_info: bool | None = ...,
        **how: Unpack[SampleArguments],
    ) -> TensorDictBase: ...
    @overload
    def sample(
        self,
        batch_size: Size = ...,
        *,
        return_info: Literal[True],
        include_info: bool | None = ...,
        **how: Unpack[SampleArguments],
    ) -> Told[TensorDictBase]: ...
    @overload
    def sample(
        self, batch_size: Size, return_info: bool, include_info: bool | None = ..., **how: Unpack[SampleArguments]
    ) -> Any: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        **how: Unpack[SampleArguments],
    ) -> Any:
        """As :meth:`ReplayBuffer.sample`: a TensorDict with ``"index"``. ``include_info`` is deprecated, without effect.

        Raises:
            RuntimeError: a transform or collate function changed the batch size, so the keys cannot be attached.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(5, 3)}, [5]))
        >>> batch = rb.sample()
        >>> batch.shape, sorted(batch.keys())
        (torch.Size([4]), ['index', 'obs'])
        """
        if include_info is not None:
            warn("sample: include_info is deprecated: samples always carry their index.")
        return super().sample(batch_size, return_info, **how)

    def update_tensordict_priority(self, data: Any) -> None:
        """Hand the priorities of a sampled batch to the sampler; no effect on samplers without priorities.

        Args:
            data: a TensorDict with ``"index"`` and ``priority_key``, ``[B, ...]``. Of windows (:class:`Sequence`) the anchors get the
                priorities, of the records of which errors come: see there.

        Raises:
            KeyError: no ``priority_key``, with a sampler that has priorities.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> storage = LazyTensorStorage(100)
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=4)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(5, 3)}, [5]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4)  # of your model
        >>> rb.update_tensordict_priority(batch)
        """
        if not self._wiring.of_sampler.takes_priorities:
            return
        index, priority, generation = priorities_in(data, self._priority_key, type(self).__name__)
        unit = self._wiring.unit
        if isinstance(unit, Sequence) and "anchor_index" in children(data):
            errors = self._wiring.source.reduced(priority.reshape(data.numel(), -1))
            index, priority, generation = unit.anchor_priorities(errors, data)
        elif not data.batch_size:  # one row
            priority = priority.reshape(1, -1)
        self.update_priority(index, priority, generation=generation)

    @classmethod
    def open_arguments(cls, record: dict[str, Any]) -> dict[str, Any]:
        return {"priority_key": record["priority_key"]} if "priority_key" in record else {}


def priorities_in(data: object, priority_key: str | None, who: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Index, priorities and generations, if there are some, of a sampled batch. ``who``: the class to name.

    Raises ``TypeError``: it is no TensorDict. ``KeyError``: an entry is missing.
    """
    call = "update_tensordict_priority"
    if not is_tensor_collection(data):
        raise TypeError(f"{call}: expected a sampled TensorDict, got {type(data).__name__}. For rows: update_priority.")
    priority, index = data.get(priority_key, None), data.get("index", None)
    for key, entry in ((priority_key, priority), ("index", index)):
        if entry is None:
            advice = "" if key == "index" else f" Other keys: {who}(priority_key=…)."
            raise KeyError(f"{call}: expected the key {key!r}, got {[str(k) for k in children(data)]}.{advice}")
    return index, priority, data.get("index_generation", None)


def _to_store(data: Any, call: str) -> object:
    """A TensorDict without the entries that are synthesised on reading."""
    if call == "extend" and isinstance(data, list | tuple) and not data:
        return data
    if not is_tensor_collection(data) or is_tensorclass(data):
        raise ValueError(
            f"{call}: expected a TensorDict, got {type(data).__name__}. Write TensorDict(data, [n]), or use a ReplayBuffer for other data."
        )
    entries = data.keys() if is_lazy_stack(data) else children(data)  # whose entries may not go together
    if "index" in entries or "index_generation" in entries:
        return data.exclude("index", "index_generation")
    return data
