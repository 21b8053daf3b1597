"""Priorities of anchors, made of the errors of the records around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engram._checks import check_number
from engram.storages import coordinates


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
