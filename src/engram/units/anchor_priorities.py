"""Priorities of anchors, made of the errors of the records around them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engram import _native
from engram._checks import check_number
from engram._words import warn_of_mixed
from engram.errors import RowError
from engram.field_paths import public
from engram.samplers.trajectory_tables import END_KEYS, Boundaries, TrajectoryKeys, numbers_by_path, shared_table
from engram.storages import coordinates
from engram.store import as_rows

if TYPE_CHECKING:
    from engram.field_paths import FieldPath
    from engram.store import Store
    from engram.units.sequence import WindowUnit


class Windows(NamedTuple):
    """Windows around anchors, one behind the other: tensors ``[n * total]``."""

    rows: Tensor
    tickets: Tensor
    """int64; -1 in all of a window of which something moved."""
    valid: Tensor
    steps: int
    """How many are valid."""
    told: list[Tensor]
    """Numbers of windows, numbers of steps, anchors, steps that are learned from; and tickets of anchors. Perhaps none."""


class WindowTable:
    """Where the trajectories of a store end, for a unit."""

    def __init__(self, memory: Store, unit: WindowUnit) -> None:
        """Raises ``TypeError``: rows have no fields. ``KeyError``: the flag is not stored. ``ValueError``: windows longer than a lane."""
        name, numbers = type(unit).__name__, numbers_by_path(memory)
        if not numbers:
            kind = memory.schema.structure.kind
            raise TypeError(
                f"sample: {name}: expected a tensor storage of rows with fields, such as TensorDicts, got rows of one tensor ({kind})."
            )
        boundaries = Boundaries((), ()) if unit.crosses else _boundaries_of(memory, numbers, unit, name)
        steps = memory.lane_length // math.prod(memory.schema.columns)
        if unit.reach > steps:
            raise ValueError(
                f"sample: {name}: expected windows of at most {steps} steps, as long as a lane of the storage, got {unit.reach} "
                f"({unit.total} records, {unit.dilation} apart). Draw shorter ones, or use a larger storage."
            )
        table = f"sequence-{'-'.join(map(str, boundaries.which)) or 'all'}{'-whole' if boundaries.all_flags else ''}"
        self.memory = memory
        self.init = numbers.get(unit.init_key) if unit.init_key is not None else None
        """The field that gets a mark at the first record of each window; None: none does."""
        self._table = shared_table(memory, table, boundaries, 1)
        self._spec = _native.WindowSpec(unit.total, True, False, 0, 0, 1, unit.dilation, unit.burn_in, 0, True)
        self._total, self._who = unit.total, name
        self._learned, self._shifted = unit.length, unit.episode_boundary == "stop"

    def around(self, rows: Tensor, tickets: Tensor | None) -> Windows:
        """The windows around rows, which must have these tickets.

        Raises ``RowError``: a row is outside the storage.

        Args:
            rows, tickets: int64 ``[n]``; no tickets: any.
        """
        return self._around(None, rows, tickets, told=True, numbered=False)[0]

    def read(
        self, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool
    ) -> tuple[Windows, list[Tensor], list[int]]:
        """The same, what they hold, and the numbers of the windows of which something moved.

        Args:
            rows, tickets: as :meth:`around`.
            told: whether windows say what their steps are, and with ``numbered`` the tickets of anchors.
        """
        if self.memory.is_native:
            return self._around(self.memory.layout, rows, tickets, told=told, numbered=numbered)
        windows = self._around(None, rows, tickets, told=told, numbered=numbered)[0]
        columns, moved = self.memory.read(windows.rows, expected=windows.tickets)
        return windows, columns, sorted({place // self._total for place in moved})

    def _around(
        self, layout: _native.Layout | None, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool
    ) -> tuple[Windows, list[Tensor], list[int]]:
        rows, expected = as_rows(rows, "sample"), None if tickets is None else as_rows(tickets, "sample")
        learned = self._learned if told else 0
        if self._table.mixed():
            warn_of_mixed(self._who)
        try:
            said, columns, moved, steps = self._table.around(
                self.memory.core, layout, rows, expected, self._spec, self._shifted, learned, numbered
            )
        except IndexError as error:
            raise RowError(f"sample: {error}.") from error
        records, numbers, valid, *told_of = said
        return Windows(records, numbers, valid, steps, told_of), columns, moved


def _boundaries_of(memory: Store, numbers: dict[FieldPath, int], unit: WindowUnit, name: str) -> Boundaries:
    """Ids, and the unit's flag; the usual ends, if that is the default one. Raises ``KeyError``: the flag is not stored, or nothing is."""
    key, keys = unit.done_key, unit.rules
    assert key is not None  # else windows cross trajectories
    usual = key == END_KEYS[0]
    if not usual:
        keys = keys._replace(end_keys=(key,))
    if usual or key in numbers:
        try:
            return keys.boundaries(memory.schema.fields, numbers, f"sample: {name}")
        except RuntimeError:
            if usual and keys != TrajectoryKeys(None, None, None):  # they were named
                raise
    raise KeyError(
        f"sample: {name}: done_key: expected a stored field, one of {[public(path) for path in numbers]}, got {public(key)!r}. Name "
        "the flag of a trajectory's last step, or pass done_key=None where there is one trajectory."
    )


class Entries(Protocol):
    """What is said of the records of a batch: ``info``, or a TensorDict."""

    def get(self, key: str, default: None) -> object:
        """An entry; None: there is none."""

    def keys(self) -> Iterable[object]:
        """Of the entries."""


_NEEDED = ("validity_mask", "learning_mask", "anchor_index")


class AnchorPriorities(NamedTuple):
    """New priorities of anchors, each once.

    >>> import torch
    >>> from engram import AnchorPriorities, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(alpha=0.6, beta=0.4))
    >>> _ = rb.extend({"step": torch.arange(5)})
    >>> it = AnchorPriorities(torch.tensor([2, 4]), torch.tensor([0.5, 3.0]), None)  # as Sequence.anchor_priorities returns it
    >>> rb.update_priority(it.anchors, it.priority, generation=it.generation)
    """

    anchors: Tensor
    """int64 ``[k]``; with ``ndim > 1`` ``[k, ndim]``."""
    priority: Tensor
    """``[k]``, of the dtype of the errors."""
    generation: Tensor | None
    """int64 ``[k]``; None: the batch says none, and every anchor that is live is updated."""


def checked_eta(what: str, eta: object) -> float:
    """The weight of the largest error. Raises ``TypeError``, ``ValueError``: it is no number in [0, 1]."""
    return check_number(what, eta, least=0, most=1)


def r2d2_priority(td_error: Tensor, mask: Tensor | None = None, *, eta: float = 0.9) -> Tensor:
    """The priority of sequences by R2D2: ``eta * max + (1 - eta) * mean`` of the absolute errors in each.

    Args:
        td_error: float ``[B, T, ...]``: errors of ``B`` sequences. More dimensions are reduced by max.
        mask: bool ``[B, T]``: errors that count, such as ``learning_mask & validity_mask``. Default: all.
        eta: the weight of the largest error, in [0, 1].

    Returns:
        ``[B]`` of the same dtype and device, for ``update_priority``; 0 where nothing counts. Detached.

    Raises:
        RuntimeError: fewer than two dimensions, or a mask of another shape. TypeError: no floats. ValueError: ``eta`` outside [0, 1].

    Source: Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", ICLR 2019, section 2.3.

    >>> import torch
    >>> from engram import r2d2_priority
    >>> r2d2_priority(torch.tensor([[1.0, -3.0], [0.0, 2.0]]), eta=0.5)
    tensor([2.5000, 1.5000])
    """
    eta = checked_eta("r2d2_priority: eta", eta)
    if not td_error.is_floating_point():
        raise TypeError(f"r2d2_priority: td_error: expected floats, got {td_error.dtype}.")
    if td_error.ndim < 2:
        raise RuntimeError(f"r2d2_priority: td_error: expected [B, T, ...], got {list(td_error.shape)}.")
    errors = _one_per_record(td_error.detach().abs(), 2)
    if mask is None:
        mask = torch.ones_like(errors, dtype=torch.bool)
    elif mask.shape != errors.shape:
        raise RuntimeError(f"r2d2_priority: mask: expected {list(errors.shape)}, got {list(mask.shape)}.")
    mask = mask.to(errors.device, torch.bool)
    counted = errors.where(mask, 0)
    return eta * counted.amax(1) + (1 - eta) * counted.sum(1) / mask.sum(1).clamp(min=1)


def of_anchors(td_error: Tensor, info: Entries, eta: float | None) -> AnchorPriorities:
    """What :meth:`Sequence.anchor_priorities` returns. ``eta=None``: the largest error of the valid records."""
    call = "anchor_priorities"
    missing = [key for key in _NEEDED if info.get(key, None) is None]
    if missing:
        raise KeyError(
            f"{call}: expected info of a batch of sequences, with {missing}, got {sorted(map(str, info.keys()))}."
        )
    valid, learned, index = (cast("Tensor", info.get(key, None)) for key in _NEEDED)
    generation = cast("Tensor | None", info.get("anchor_generation", None))
    count, batch = valid.numel(), valid.shape
    if tuple(td_error.shape[: len(batch)]) != tuple(batch) and td_error.numel() != count:
        raise RuntimeError(
            f"{call}: td_error: expected an error per record, {list(batch)}, got {list(td_error.shape)}. Give a record that was padded any."
        )
    errors = _one_per_record(td_error.detach().reshape(count, -1), 1)
    columns = index.shape[valid.ndim :]  # coordinates of each anchor
    anchors, sizes = _numbers_of(index.reshape(count, *columns))
    counted = valid.reshape(-1) if eta is None else (valid & learned).reshape(-1)
    counted, errors = counted.to(anchors.device), errors.to(anchors.device)
    found, which = torch.unique(anchors[counted], return_inverse=True)
    errors = errors[counted]
    empty = errors.new_zeros(len(found))
    priority = empty.scatter_reduce(0, which, errors, "amax", include_self=False)
    if eta is not None:
        priority = eta * priority + (1 - eta) * empty.scatter_reduce(0, which, errors, "mean", include_self=False)
    if generation is not None:
        held = generation.reshape(-1)[counted]
        generation = held.new_zeros(len(found)).scatter_reduce(0, which, held, "amin", include_self=False)
    return AnchorPriorities(coordinates(found, sizes[1:]), priority, generation)


def _numbers_of(index: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """One number for each anchor, int64 ``[n]``, and of coordinates ``[n, ndim]`` the sizes by which they are told apart."""
    if index.ndim == 1:
        return index, ()
    sizes = tuple((index.amax(0) + 1).tolist()) if len(index) else (1,) * index.shape[1]
    numbers = torch.zeros_like(index[:, 0])
    for place, size in zip(index.unbind(1), sizes, strict=True):
        numbers = numbers * size + place
    return numbers, sizes


def _one_per_record(errors: Tensor, dims: int) -> Tensor:
    """Errors with more dimensions than those of records, reduced by max."""
    return errors if errors.ndim == dims else errors.flatten(dims).amax(dims)
