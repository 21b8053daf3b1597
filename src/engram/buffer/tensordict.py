"""Buffers of TensorDicts, whose sampled batches say which rows they are, and buffers whose sampler is made of their arguments."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack, cast

import torch
from torch import Tensor

from engram import samplers, storages, writers
from engram._support import devices, field_paths, nested
from engram._support.tensordicts import (
    children,
    is_lazy_stack,
    is_tensor_collection,
    is_tensorclass,
    put,
    tensordict_type,
)
from engram._support.unsupported import Later, meant, reject_unsupported
from engram.around import Hindsight, HindsightStrategy, Sequence
from engram.buffer import read_path, recipe, row_access, window_marks, write_path
from engram.buffer.replay_buffer import ReplayBuffer, shows
from engram.buffer.wiring import checked_size, component
from engram.store.limits import WAIT_S, checked_timeout
from engram.types import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    from engram.buffer.configuration import BufferArguments
    from engram.buffer.lanes import Lane, Layout

    M = TypeVar("M", bound=Callable[..., object])


__all__ = [
    "HERReplayBuffer",
    "PrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]


class TensorDictReadPath(read_path.ReadPath):
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
            window_marks.attach(data, batch, entries)
        return data


class TensorDictWritePath(write_path.WritePath):
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
        if rows is write_path.HELD_BACK:
            return self._wiring.no_index()
        self.check_rows(write_path.rows_of(rows, columns + 1), priority)
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


class TensorDictRowAccess(row_access.RowAccess):
    """Row access of buffers whose rows are replaced by TensorDicts."""

    def storable(self, data: Any, call: str) -> Any:
        return data if nested.is_number(data) else _to_store(data, call)


@recipe.register
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
        wait = timeout if timeout is WAIT_S else checked_timeout(timeout, "extend")
        if data is not None:
            if tensordicts is not None:
                raise TypeError("extend: expected one of tensordicts and data, which are the same, got both.")
            tensordicts = data
        return self._writing.extend(tensordicts, lane, layout, lane_key, wait, update_priority)

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


_PRIORITIZED_SAMPLER = shows(lambda self: self.sampler, "TorchRL's name of :attr:`sampler`, which has the priorities.")
#: A keyword of TorchRL's whose values change nothing here: all processes draw and update in one tree.
_OF_THE_TREE = {"sync": Later("nothing", (True,))}


@recipe.register
class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a :class:`PrioritizedSampler`. Rows may be anything; which ones were drawn, and their
    weights, stand in ``info``.

    Args:
        size: rows; default the storage's.
        alpha, beta, eps, dtype, normalize: as for :class:`PrioritizedSampler`.
        sync: TorchRL's; without effect, as all processes draw and update in one tree.
        sampler_device: where that tree lies, if the rows are on an accelerator: there, which is the default, or ``"cpu"``. Of other rows
            it is on the CPU.
        **kwargs: those of :class:`ReplayBuffer`, but ``sampler``.

    >>> import torch
    >>> from engram import LazyTensorStorage, PrioritizedReplayBuffer
    >>> rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=8)
    >>> index = rb.extend(torch.arange(50))
    >>> batch, info = rb.sample(return_info=True)
    >>> info["priority_weight"].shape
    torch.Size([8])
    >>> rb.update_priority(info["index"], torch.rand(8), generation=info["index_generation"])
    """

    _prioritized = True
    prioritized_sampler = _PRIORITIZED_SAMPLER

    def __init__(
        self,
        size: int | None = None,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        sync: bool = True,
        sampler_device: torch.device | str | None = None,
        normalize: Literal["store", "batch"] = "store",
        **kwargs: Unpack[BufferArguments],
    ) -> None:
        tree = alpha, beta, sync, sampler_device
        kwargs["sampler"] = _sampler(self, size, kwargs, *tree, eps=eps, dtype=dtype, normalize=normalize)
        super().__init__(size, **kwargs)


@recipe.register
class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        size: rows; default the storage's.
        alpha, beta, eps, reduction, normalize: as for :class:`PrioritizedSampler`.
        priority_key: entry of a batch that :meth:`update_tensordict_priority` reads, and of written rows that brings their
            first priority along.
        sync, sampler_device: as for :class:`PrioritizedReplayBuffer`.
        **kwargs: those of :class:`TensorDictReplayBuffer`, but ``sampler``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
    >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=8)
    >>> index = rb.extend(TensorDict({"obs": torch.randn(50, 3)}, batch_size=[50]))
    >>> batch = rb.sample()
    >>> batch["td_error"] = torch.rand(8)
    >>> rb.update_tensordict_priority(batch)
    """

    _prioritized = True
    prioritized_sampler = _PRIORITIZED_SAMPLER

    def __init__(
        self,
        size: int | None = None,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        priority_key: str = "td_error",
        eps: float = 1e-8,
        reduction: str = "max",
        sync: bool = True,
        sampler_device: torch.device | str | None = None,
        normalize: Literal["store", "batch"] = "store",
        **kwargs: Unpack[BufferArguments],
    ) -> None:
        tree = alpha, beta, sync, sampler_device
        kwargs["sampler"] = _sampler(self, size, kwargs, *tree, eps=eps, reduction=reduction, normalize=normalize)
        super().__init__(size, priority_key=priority_key, **kwargs)


def _sampler(
    buffer: ReplayBuffer,
    size: int | None,
    kwargs: BufferArguments,
    alpha: float | None,
    beta: float | None,
    sync: bool,
    sampler_device: torch.device | str | None,
    **settings: Any,
) -> samplers.PrioritizedSampler:
    """The buffer's sampler. ``ReplayBuffer.open`` hands over the one that the store noted."""
    name, given = type(buffer).__name__, cast("Any", kwargs.get("sampler"))
    reject_unsupported(name, {"sync": sync}, _OF_THE_TREE)
    device = None if sampler_device is None else devices.existing_device(sampler_device, f"{name}: sampler_device")
    if given is not None:
        if not recipe.draws_by_priority(given) or alpha is not None or beta is not None:
            raise TypeError(
                f"{name}: sampler: its sampler is a PrioritizedSampler made of alpha and beta. Use a ReplayBuffer."
            )
        return cast("samplers.PrioritizedSampler", given)
    if alpha is None or beta is None:
        asked = "".join(meant(key, ("alpha", "beta")) for key in kwargs) or " Write alpha=0.6, beta=0.4, for instance."
        raise TypeError(f"{name}: expected alpha and beta, got alpha={alpha}, beta={beta}.{asked}")
    size, storage = checked_size(size, name), kwargs.get("storage")
    if storage is not None:
        storage = kwargs["storage"] = component(storage, storages.Storage, "storage", None)
    capacity = size or 1000 if storage is None else storage.max_size
    if capacity > 1 << 40:  # a list without bounds
        capacity = size or 1 << 20
    return samplers.PrioritizedSampler(capacity, alpha, beta, device=device, **settings)


_END = ("next", "done")


@recipe.register
class HERReplayBuffer(TensorDictReplayBuffer):
    """A :class:`TensorDictReplayBuffer` whose sampler is a :class:`Hindsight`: batches with goals that were reached.

    :attr:`sampler` is the expander, around the sampler that is given.

    Args:
        reward_fn: the rewards of relabelled rows, as for :class:`Hindsight`. None: ``sampler`` is a :class:`Hindsight`, as
            ``ReplayBuffer.open`` of its directory takes it, and the other arguments of this class are not given.
        her_ratio, strategy, goal_key, achieved_goal_key, reward_key, end_fn: as for :class:`Hindsight`.
        end_key: the flag at the last step of an episode; the flag ``"terminated"`` beside it counts, too. By default
            ``("next", "truncated")`` does as well, and trajectory ids as for :class:`NStep`. Another one must be stored: else sampling
            raises ``KeyError``.
        end_when: as for :class:`NStep`.
        priority_key: as for :class:`TensorDictReplayBuffer`.
        **kwargs: those of :class:`TensorDictReplayBuffer`. ``sampler`` draws the rows; default :class:`RandomSampler`.

    Raises: as :class:`TensorDictReplayBuffer` and :class:`Hindsight`.

    Differences from TorchRL's: goals are those that were achieved by an action where these are stored, they are followed across the end
    of the array, windows have one goal each, and ``reward_fn`` sees rows before transforms.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import HERReplayBuffer, LazyTensorStorage
    >>> def reward(rows):
    ...     return (rows["next", "achieved_goal"] == rows["desired_goal"]).float()
    >>> rb = HERReplayBuffer(reward, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(TensorDict({"desired_goal": torch.full((3, 1), 9.), "next": {"achieved_goal": torch.arange(1., 4.).unsqueeze(1),
    ...     "reward": torch.zeros(3, 1), "done": torch.tensor([[False], [False], [True]])}}, batch_size=[3]))
    >>> rb.sample()["desired_goal"].flatten().tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    reward_fn = shows(lambda self: self.sampler.reward_fn, "As :attr:`reward_fn`.")
    end_fn = shows(lambda self: self.sampler.end_fn, "As :attr:`end_fn`.")
    her_ratio = shows(lambda self: self.sampler.her_ratio, "As :attr:`her_ratio`.")
    strategy = shows(lambda self: self.sampler.strategy, "As :attr:`strategy`.")

    def __init__(
        self,
        reward_fn: Callable[..., object] | None = None,
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = HindsightStrategy.FUTURE,
        goal_key: str | tuple[str, ...] = "desired_goal",
        achieved_goal_key: str | tuple[str, ...] | None = None,
        reward_key: str | tuple[str, ...] = ("next", "reward"),
        end_fn: Callable[..., object] | None = None,
        end_key: str | tuple[str, ...] = _END,
        end_when: str = "any",
        priority_key: str = "td_error",
        **kwargs: Unpack[BufferArguments],
    ) -> None:
        name = type(self).__name__
        given = kwargs.get("sampler")
        sampler = samplers.RandomSampler() if given is None else component(given, Sampler, "sampler", None)
        if reward_fn is not None or not isinstance(sampler, Hindsight):
            if reward_fn is None:
                raise TypeError(
                    f"{name}: reward_fn: expected a function of the relabelled rows, got None. Pass it, or to open a store again "
                    "sampler=Hindsight(RandomSampler(), reward_fn)."
                )
            end = field_paths.checked_path(end_key, f"{name}: end_key")
            sampler = Hindsight(
                sampler,
                reward_fn,
                her_ratio=her_ratio,
                strategy=strategy,
                goal_key=goal_key,
                achieved_goal_key=achieved_goal_key,
                reward_key=reward_key,
                end_fn=end_fn,
                end_keys=None if end == _END else [end, (*end[:-1], "terminated")],
                end_when=None if end_when == "any" else end_when,
            )
            if end != _END:
                sampler._end = end  # noqa: SLF001 - an argument of this class only
        kwargs["sampler"] = sampler
        super().__init__(priority_key=priority_key, **kwargs)


class _Reference(Protocol):
    """A reference to a buffer of this process, such as a ``torch.distributed.rpc.RRef``."""

    def local_value(self) -> TensorDictReplayBuffer:
        """The buffer."""


def _by_reference(method: M) -> M:
    """A method that takes a reference to the buffer in place of the buffer, too."""

    @wraps(method)
    def called(of: TensorDictReplayBuffer | _Reference, *given: object, **named: object) -> object:
        return method(of if isinstance(of, TensorDictReplayBuffer) else of.local_value(), *given, **named)

    # By which it is pickled.
    called.__module__, called.__qualname__ = __name__, f"RemoteTensorDictReplayBuffer.{method.__name__}"
    return cast("M", called)


@recipe.register
class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A :class:`TensorDictReplayBuffer` as TorchRL's class of this name, whose methods other processes call by RPC.

    One process has the rows. Others call methods of an ``RRef`` to the buffer, or of the class with the ``RRef`` in place of the
    buffer: ``rpc_sync(rref.owner(), RemoteTensorDictReplayBuffer.sample, args=(rref, 32))``. Every such call pickles its rows.
    :func:`engram.serve` of the same buffer and :meth:`ReplayBuffer.connect` move them without pickles, many times faster, and
    processes of one machine share a buffer's memory: prefer these.

    Args:
        *args: those of :class:`TensorDictReplayBuffer`, and its keywords.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, RemoteTensorDictReplayBuffer
    >>> rb = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, batch_size=[10]))
    >>> rb.sample()["obs"].shape
    torch.Size([4, 3])
    """

    @_by_reference
    def sample(  # type: ignore[override] # TorchRL's order
        self, batch_size: int | None = None, include_info: bool | None = None, return_info: bool = False, **more: Any
    ) -> TensorDictBase:
        """As :meth:`TensorDictReplayBuffer.sample`; TorchRL has another order of the arguments here.

        Args:
            batch_size: rows. Default: the constructor's.
            include_info: deprecated, without effect.
            return_info: return ``(batch, info)``.
            **more: ``device``, ``timeout``, ``layout`` and ``max_tokens``.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, RemoteTensorDictReplayBuffer
        >>> rb = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, batch_size=[10]))
        >>> batch, info = rb.sample(4, return_info=True)
        >>> batch["obs"].shape, info["index"].shape
        (torch.Size([4, 3]), torch.Size([4]))
        """
        return super().sample(batch_size, return_info, include_info=include_info, **more)

    add = _by_reference(TensorDictReplayBuffer.add)
    extend = _by_reference(TensorDictReplayBuffer.extend)
    update_priority = _by_reference(TensorDictReplayBuffer.update_priority)
    update_tensordict_priority = _by_reference(TensorDictReplayBuffer.update_tensordict_priority)
    empty = _by_reference(TensorDictReplayBuffer.empty)
    stats = _by_reference(TensorDictReplayBuffer.stats)
    can_sample = _by_reference(TensorDictReplayBuffer.can_sample)
    state_dict = _by_reference(TensorDictReplayBuffer.state_dict)
    load_state_dict = _by_reference(TensorDictReplayBuffer.load_state_dict)
    dumps = _by_reference(TensorDictReplayBuffer.dumps)
    loads = _by_reference(TensorDictReplayBuffer.loads)
