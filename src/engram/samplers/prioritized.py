"""Rows in proportion to their priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Never, cast

import numpy as np
import torch
from torch import Tensor

from engram._support import devices, state, unsupported, words
from engram._support.checks import as_ints, as_numbers, check_choice, check_count, check_number
from engram.errors import EMPTY, IncompatibleCheckpoint, NoSampleable
from engram.samplers import _base, redraw
from engram.store import blocks, indexes
from engram.store.priorities import NAMES, PriorityConfig, PriorityIndex, check_priorities, state_of, with_parameters
from engram.types import Commit, Draw, Extent, NativeBatch, Shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.store.priorities import Numbers, Priorities
    from engram.store.sampled import SampledStorage

#: ``[B, m]`` to ``[B]``.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "mean": lambda x: x.mean(1),
    "median": lambda x: x.median(1).values,
    "sum": lambda x: x.sum(1),
}


#: dtypes of priorities that the core takes.
_AS_THEY_ARE = (torch.float32, torch.float64)


class PrioritizedSampler(_base.NativeSampler):
    """Draws rows with replacement, each with ``P(i) = leaf_i / sum of leaves``, ``leaf_i = (priority_i + eps) ** alpha``.

    ``info`` and TensorDict batches have ``"priority_weight"``, ``[B]``: ``(leaf_i / smallest positive leaf) ** -beta``,
    in (0, 1], which is ``(N * P(i)) ** -beta`` over its maximum. ``normalize`` says of which rows that leaf is the
    smallest. They also have ``"index_generation"``, int64 ``[B]``:
    if an update is given it, and the row was rewritten since, the update is dropped and counted in
    ``stats()["priority_updates_dropped"]``. (Schaul et al., "Prioritized Experience Replay", ICLR 2016, §3.3 and 3.4.)

    New rows get the largest priority of all updates so far, 1.0 before the first, so that each is drawn soon. A row of
    priority 0 is drawn only if ``eps > 0``; if all leaves are 0, drawing raises. Priorities belong to the storage,
    under the name ``index``: they stay when the sampler is replaced, and in a directory also when the process ends. All
    samplers with that name share them, with ``alpha`` and ``beta``: one that joins them sets both for all processes.

    Args:
        max_capacity: number of rows, at least that of the storage. Default: the storage's; only a list without a bound needs it.
        alpha: needed. 0 is uniform, 1 proportional. Setting it raises all leaves to ``new / old``, in O(rows).
        beta: needed. 0 corrects nothing, 1 fully. May be set at any time, for annealing.
        eps: added to every priority.
        dtype: of the weights.
        reduction: of priorities with more than one dimension: max, min, mean, median or sum.
        max_priority_within_buffer: new rows get the largest priority of the rows that are live now.
        device: where the tree is of rows on an accelerator: that one, or "cpu"; default with the rows. That of other rows is on the CPU.
        index: the name of the priorities.
        normalize: ``"store"``: weights are over the largest weight in the store, as TorchRL's are. A single row of priority near 0 then
            makes all weights small. ``"batch"``: over the largest weight of each batch, which is 1.

    Raises:
        ValueError: a number is negative or infinite; another ``normalize``; when a buffer takes it: ``max_capacity`` is below the storage's
            capacity, or not given for a list without a bound. TypeError: no ``alpha`` or ``beta``.
        NotImplementedError: ``reduction`` is another one.

    Cost: drawing or updating ``B`` rows takes O(B log rows). Memory: 10.3 bytes per row.

    >>> import torch
    >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), sampler=PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=100)
    >>> index = rb.extend(torch.tensor([10, 20, 30]))
    >>> rb.update_priority(index, torch.tensor([0.0, 0.0, 5.0]))
    >>> rb.sample().unique().tolist()
    [30]
    """

    traits = _base.NativeSampler.traits._replace(reads_natively=True, prioritized=True, takes_priorities=True)
    _index_kind = PriorityIndex.kind
    normalize: Literal["store", "batch"] = "store"  # of samplers that earlier versions pickled
    #: Whether the tree lies on the accelerator where the rows are, or is to lie there; None: as the store has it.
    on_device: bool | None = None

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        *,
        index: str = "main",
        normalize: Literal["store", "batch"] = "store",
        **unknown: Never,
    ) -> None:
        unsupported.reject_unsupported("PrioritizedSampler", unknown, {}, PrioritizedSampler)
        check_choice("PrioritizedSampler: normalize", normalize, ("store", "batch"))
        if reduction not in _REDUCTIONS:
            raise NotImplementedError(
                f"PrioritizedSampler: reduction: expected one of {tuple(_REDUCTIONS)}, got {reduction!r}."
            )
        given: object = dtype
        if not (isinstance(given, torch.dtype) and given.is_floating_point):
            raise TypeError(f"PrioritizedSampler: dtype: expected a floating point dtype, got {dtype!r:.40}.")
        indexes.check_index_name(index, "PrioritizedSampler: index")
        if alpha is None or beta is None:
            raise TypeError(
                f"PrioritizedSampler: expected alpha and beta, got alpha={alpha}, beta={beta}. Write alpha=0.6, beta=0.4, for instance."
            )
        self._capacity = None if max_capacity is None else check_count("PrioritizedSampler: max_capacity", max_capacity)
        self._config = PriorityConfig(
            _number("alpha", alpha), _number("beta", beta), _number("eps", eps), bool(max_priority_within_buffer)
        )
        self.dtype = dtype
        self.reduction = reduction
        self.normalize = normalize
        self.device = (
            torch.device("cpu") if device is None else devices.named_device(device, "PrioritizedSampler: device")
        )
        self.on_device = None if device is None else self.device.type != "cpu"
        self.index_name = index
        #: Whether ``alpha`` was set since: then a state's is not taken over.
        self._alpha_was_set = False
        #: Whether ``alpha`` and ``beta`` of an index that exists count, and not those given here.
        self.adopts_index = False
        self._storage: SampledStorage | None = None
        self._index: Priorities | None = None

    # ---- where the priorities are --------------------------------------------------------------------------------------

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn. Raises ``ValueError``: it is larger than ``max_capacity``.

        A sampler may serve several storages, from one thread: buffers do this before they draw or update.

        >>> from engram import LazyTensorStorage, PrioritizedSampler
        >>> PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4).bind(LazyTensorStorage(100))
        Traceback (most recent call last):
        ValueError: PrioritizedSampler: max_capacity: expected at least the storage's 100 rows, got 10.
        """
        if storage is self._storage:
            if self._index is None:
                self._attached()
            return
        bounded = storage.max_size < torch.iinfo(torch.int64).max
        if self._capacity is None and not bounded:
            raise ValueError(
                "PrioritizedSampler: max_capacity: expected a number of rows, as the storage has no bound, got none."
            )
        if self._capacity is not None and bounded and storage.max_size > self._capacity:
            raise ValueError(
                f"PrioritizedSampler: max_capacity: expected at least the storage's {storage.max_size} rows, got "
                f"{self._capacity}."
            )
        self._storage, self._index = storage, None
        self._attached()

    def _attached(self) -> Priorities | None:
        """The index, made where the storage has rows but no such index yet; None while nothing was ever written."""
        if self._storage is not None and (self._index is None or self._index.retired or self._storage.closed):
            rows, traits, found = self._capacity or self._storage.max_size, self._storage.traits, None
            # Else nothing was ever written.
            if self._storage.memory is not None or not traits.has_fields or traits.is_remote:
                where = None if self.on_device is None else self.device if self.on_device else torch.device("cpu")
                found = self._storage.priorities(self.index_name, self._config, rows, where)
            if found is not None:
                index, made = found
                known = (index.core.alpha, index.core.beta)
                if not (made or self.adopts_index or known == (self._config.alpha, self._config.beta)):
                    index.core.alpha, index.core.beta = self._config.alpha, self._config.beta
                self._index = index
        return self._index

    @property
    def draws_on_device(self) -> bool:  # type: ignore[override]
        """Whether the priorities lie on the accelerator that the rows are on."""
        index = self._attached()
        return index is not None and index.on_device

    def moved(self) -> None:
        if self._index is not None:
            self._config, self._index = self._known(), None

    def _known(self) -> PriorityConfig:
        """How priorities become probabilities now; of a storage that was closed, as far as that is known."""
        if self._storage is None or self._storage.closed:
            return self._config
        index = self._attached()
        return self._config if index is None else index.config

    def priorities(self) -> Priorities:
        """The index of priorities, which belongs to the storage. Raises ``NoSampleable``: nothing was ever written.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=1.0, beta=0.4, eps=0.5))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.update_priority([0, 2], [1.0, 4.0])
        >>> rb.sampler.priorities().leaves(3).tolist()  # (priority + eps) ** alpha
        [1.5, 1.5, 4.5]
        """
        index = self._attached()
        if index is None:
            raise NoSampleable(EMPTY)
        return index

    # ---- settings ------------------------------------------------------------------------------------------------------

    @property
    def max_size(self) -> int:
        """Rows at most; 0 where neither ``max_capacity`` nor a storage says."""
        return self._capacity or (0 if self._storage is None else self._storage.max_size)

    @property
    def alpha(self) -> float:
        """Exponent of priorities. Setting it re-scales every leaf; from 0, where all are equal, they stay so (warning).

        A state or checkpoint that is loaded brings its own, unless this was set.
        """
        return self._known().alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = _number("alpha", value)
        if self.alpha == 0 and value > 0 and self._index is not None and self._index.core.total > 0:
            words.warn(
                "alpha: with alpha=0 all priorities were equal; rows that are there stay so until they are updated."
            )
        if self._index is not None:
            with words.raise_as(ValueError, "alpha"):
                self._index.core.alpha = value
        self._config = self._config._replace(alpha=value)
        self._alpha_was_set = True

    @property
    def beta(self) -> float:
        """Exponent of the weights."""
        return self._known().beta

    @beta.setter
    def beta(self, value: float) -> None:
        value = _number("beta", value)
        if self._attached() is not None:
            self._index.core.beta = value  # type: ignore[union-attr]
        self._config = self._config._replace(beta=value)

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._config.eps

    @property
    def max_priority_within_buffer(self) -> bool:
        """Whether new rows get the largest priority that is live, not the largest there ever was."""
        return self._config.within_buffer

    @property
    def default_priority(self) -> float:  # type: ignore[override]
        """What new rows get."""
        index = self._attached()
        return 1.0 if index is None else float(index.core.default_priority)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        index, over_batch = self.priorities(), self.normalize == "batch"
        rows, numbers, weights = index.draw(key, batch_size, leaves=over_batch)
        assert self._storage is not None  # it has priorities
        if index.on_device:
            numbers = self._storage.tickets_of(rows)
        writes = self._storage.writes_of(rows, numbers)
        if over_batch:
            return redraw.DrawOverBatch.of(rows, numbers, writes, weights.log().mul_(-index.core.beta), self.dtype)
        return Draw(rows, numbers, {"priority_weight": weights.to(self.dtype), "index_generation": writes})

    def draw_among(self, rows: Tensor, n: int, key: int) -> Draw | None:
        index, storage = self.priorities(), cast("SampledStorage", self._storage)
        if not isinstance(index, PriorityIndex):  # it is on a device
            return None
        drawn, _, weights = index.draw(key, n, among=rows)
        numbers = storage.tickets_of(drawn)
        said = {"priority_weight": weights.to(self.dtype), "index_generation": storage.writes_of(drawn, numbers)}
        return Draw(drawn, numbers, said)

    def sample_natively(
        self,
        storage: SampledStorage,
        key: blocks.Key,
        n: int,
        *,
        numbered: bool = True,
        shown: Shown = "beside",
        through: object = None,
    ) -> NativeBatch:
        """:meth:`draw` and the rows' data in one native call: ``(columns, rows, info)``.

        The info has ``"priority_weight"``, of the sampler's dtype, and ``"index_generation"``, int64: both ``[n]``. ``through``: what
        reads rows on a device in place of their store, and perhaps more than these.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> from engram.store.blocks import Key
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> _ = rb.extend(torch.arange(10) * 10)
        >>> columns, rows, info = rb.sampler.sample_natively(rb.storage, Key.of(7), 4)
        >>> torch.equal(columns[0], rows * 10), info["priority_weight"]
        (True, tensor([1., 1., 1., 1.]))
        """
        if storage is not self._storage:
            self.bind(storage)
        index = self._index
        if index is None or index.retired:
            index = self._attached()
        assert index is not None  # the buffer asks only then
        of = storage.memory if through is None else through  # where its priorities lie
        single, over_batch = self.dtype is torch.float32, self.normalize == "batch"
        columns = index.sample(of, key, n, single, over_batch)  # type: ignore[arg-type]
        weights = columns.pop()
        if weights.dtype is not self.dtype:
            weights = weights.to(self.dtype)
        numbers = columns.pop()
        return columns, columns.pop(), {"priority_weight": weights, "index_generation": numbers}

    def masses(self, storage: SampledStorage) -> blocks.Masses:
        self.bind(storage)
        return self.priorities().masses

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        self.bind(storage)
        index = self._attached()
        return index is not None and index.core.total > 0 and batch_size > 0

    # ---- updating ------------------------------------------------------------------------------------------------------

    def update_priority(
        self, index: object, priority: object, *, generation: Tensor | None = None, storage: object = None
    ) -> None:
        """New priorities of rows, in one native call.

        Args:
            index: rows: an int, int64 ``[B]``, or a 1-tuple of it. -1 is passed over. Of a row named twice the last counts.
            priority: a number for all, also as ``[1]``, or ``[B]``; more dimensions are reduced.
            generation: int64 ``[B]``, as in ``"index_generation"``: rows rewritten since are dropped and counted.

        Raises:
            PriorityError: a priority is negative, not finite or too large (a ``ValueError``). Nothing is changed.
            RowError: a row outside the storage. Nothing is changed.
            RuntimeError: another number of priorities than of rows. TypeError: complex ones, or no numbers.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> sampler.update_priority(rows, torch.rand(10))
        """
        if (
            isinstance(index, np.ndarray)
            and isinstance(priority, np.ndarray)
            and self._took(index, priority, generation)
        ):
            return
        rows = self._rows_of(index, "update_priority")
        priorities = as_priorities(priority, rows.numel(), self.reduced, there=self.draws_on_device)
        if generation is not None:
            generation = self._rows_of(generation, "update_priority: generation")
            if generation.numel() != rows.numel():
                raise RuntimeError(
                    f"update_priority: generation: expected one per row, {rows.numel()}, got {generation.numel()}."
                )
        own = self._attached()
        if own is None:
            raise RuntimeError("update_priority: expected rows that were written; nothing was ever written.")
        own.update(rows, priorities, generation)

    def _took(self, index: Numbers, priority: Numbers, generation: object) -> bool:
        """Set the priorities of plain arrays, without tensors of them. False: they are none. Raises as :meth:`update_priority`."""
        own = self._attached()
        if own is None or self._storage is None or self._storage.memory is None or index.shape != priority.shape:
            return False
        if generation is not None and not (isinstance(generation, np.ndarray) and generation.shape == index.shape):
            return False
        try:
            own.update_arrays(index, priority, generation)
        except TypeError:
            return False
        return True

    def check_priority(self, priority: object, n: int) -> None:
        """Raise as :meth:`update_priority` would for priorities of ``n`` rows. Changes nothing: no row need be written yet.

        Raises ``RuntimeError``, too: no buffer has the sampler yet.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.sampler.check_priority(torch.tensor([1.0, -1.0]), 2)
        Traceback (most recent call last):
        engram.errors.PriorityError: ...
        """
        priorities = as_priorities(priority, n, self.reduced, there=self.draws_on_device)
        if self._storage is None:
            raise RuntimeError(
                "check_priority: expected a sampler of a buffer, got one that is bound to no storage. Make the buffer first: "
                "ReplayBuffer(storage=…, sampler=…)."
            )
        own = self._attached() or PriorityIndex.of_no_store(min(self.max_size, self._storage.max_size), self._config)
        own.check(priorities)

    def _rows_of(self, index: object, call: str) -> Tensor:
        """As :func:`rows_of`; those on the device stay there, where the tree is."""
        one = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        there = self.draws_on_device and isinstance(one, Tensor) and one.dtype is torch.int64 and not one.is_cpu
        return one.reshape(-1) if there and isinstance(one, Tensor) else rows_of(index, call)

    def reduced(self, value: Tensor) -> Tensor:
        """``[B, ...]`` to ``[B]`` by :attr:`reduction`.

        >>> import torch
        >>> from engram import PrioritizedSampler
        >>> PrioritizedSampler(alpha=0.6, beta=0.4, reduction="max").reduced(torch.tensor([[1.0, 3.0], [2.0, 0.0]]))
        tensor([3., 2.])
        """
        flat = value.reshape(value.shape[0], -1)
        if flat.shape[1] == 1:
            return flat[:, 0]
        return _REDUCTIONS[self.reduction](flat)

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """Rows were rewritten: the default priority again. Raises ``RowError``: a row outside the storage.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=1.0, beta=0.4))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.update_priority([0, 1], [0.25, 4.0])
        >>> rb.sampler.mark_update([0])  # the highest priority so far
        >>> rb.sampler.priorities().leaves(2).round().tolist()
        [4.0, 4.0]
        """
        own = self._attached()
        if own is not None:
            own.reset(self._rows_of(index, "mark_update"))

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """``alpha, beta, eps, max_priority_within_buffer, highest`` and ``leaves``, float64 ``[rows]``: copies.

        A state is loaded only into a sampler of the same ``eps``, ``max_priority_within_buffer`` and number of rows. Its ``alpha`` is
        taken over, unless that of the sampler was set: then the priorities of the state get that exponent.

        ``highest`` is the largest priority of all updates, 0.0 before the first. Before anything was written there are no leaves.
        A leaf of -0.0 is a priority of zero, one of 0.0 that of a row that holds nothing.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, alpha=0.6, beta=0.4), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> state = rb.sampler.state_dict()
        >>> state["alpha"], state["leaves"].dtype
        (0.6, torch.float64)
        """
        index = self._attached()
        return state_of(self._config) if index is None else index.state()

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = "PrioritizedSampler"
        state.check_keys(state_dict, NAMES, where)
        index = self._attached()
        rows = capacity or (self.max_size or torch.iinfo(torch.int64).max if index is None else index.core.rows)
        config = check_priorities(state_dict, self._config, rows, where)
        if self._alpha_was_set:
            state_dict = with_parameters(state_dict, self.alpha, config.eps)
            config = check_priorities(state_dict, self._config, rows, where)
        leaves = len(state.tensor_in(state_dict, "leaves", torch.float64, (None,), where))
        if capacity is None and index is None and leaves:
            raise RuntimeError(f"{where}: expected a storage with rows before their priorities are loaded.")
        if capacity is None and index is not None and not leaves:
            raise IncompatibleCheckpoint(
                f"{where}: leaves: expected those of {rows} rows, got 0: the sampler of the state had no storage with rows. Load it before "
                "rows are written, or the state of one that had."
            )
        return state.Change(self._take, config, state_dict)

    def _take(self, config: PriorityConfig, state_dict: dict[str, object]) -> None:
        self._config = config
        index = self._attached()
        if index is not None:
            index.restore(state_dict)

    def config(self) -> dict[str, object]:
        return {
            "max_capacity": self._capacity,
            "alpha": self.alpha,
            "beta": self.beta,
            "eps": self.eps,
            "dtype": str(self.dtype).removeprefix("torch."),
            "reduction": self.reduction,
            "max_priority_within_buffer": self.max_priority_within_buffer,
            "index": self.index_name,
            # Earlier versions do not take it.
            **({} if self.normalize == "store" else {"normalize": self.normalize}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrioritizedSampler:
        """The sampler that a store noted: ``alpha`` and ``beta`` are those of its index.

        >>> from engram import PrioritizedSampler
        >>> config = PrioritizedSampler(10, alpha=0.6, beta=0.4, eps=0.5).config()
        >>> PrioritizedSampler.from_config(config).eps
        0.5
        """
        made = cls(**{**config, "dtype": getattr(torch, config["dtype"])})
        made.adopts_index = True
        return made

    def __getstate__(self) -> dict[str, object]:
        self._config = self._config._replace(alpha=self.alpha, beta=self.beta)
        return {**self.__dict__, "_storage": None, "_index": None, "adopts_index": True}


def as_priorities(priority: object, n: int, reduced: Callable[[Tensor], Tensor], *, there: bool = False) -> Tensor:
    """float64 or float32 ``[n]``, contiguous, on the CPU, or ``there``, where they are: of one number, ``[]`` or ``[1]``, the same for all
    rows. ``reduced``: makes ``[n]`` of ``[n, ...]``. Raises as :meth:`PrioritizedSampler.update_priority`, unless a priority itself is bad.
    """
    value = as_numbers("update_priority: priority", priority, torch.float64)
    if value.shape == (n,) and value.dtype in _AS_THEY_ARE and (there or value.is_cpu) and value.is_contiguous():
        return value if value.is_cpu else value.detach()
    if value.is_complex():
        raise TypeError(f"update_priority: expected real priorities, got {value.dtype}.")
    value = value.detach().to(value.device if there else "cpu", torch.float64)
    if value.ndim > 1 and value.shape[0] == n:
        value = reduced(value)
    if value.shape not in ((), (1,)) and value.numel() != n:
        raise RuntimeError(
            f"update_priority: expected a priority per row, {n}, or one for all, got {list(value.shape)}."
        )
    return value.reshape(-1).expand(n).contiguous()


def rows_of(index: object, call: str) -> Tensor:
    """The rows that a user named, as int64 ``[B]`` on the CPU.

    Raises:
        TypeError: not ints. RowError: one that no int64 holds.
    """
    if isinstance(index, tuple):
        if len(index) != 1:
            raise TypeError(f"{call}: expected rows, or a 1-tuple of them, got {len(index)} entries.")
        index = index[0]
    rows = index if isinstance(index, Tensor) else as_numbers(call, index)
    if rows.dtype is torch.int64 and rows.is_cpu and rows.ndim == 1 and rows.is_contiguous():
        return rows
    return as_ints(call, rows, "int rows").reshape(-1).contiguous()


def _number(name: str, value: object) -> float:
    return check_number(f"PrioritizedSampler: {name}", value, least=0)
