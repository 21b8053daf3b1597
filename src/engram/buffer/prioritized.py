"""Buffers whose sampler is a :class:`PrioritizedSampler`, for those who know them by these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch

from engram import samplers, storages
from engram._devices import existing_device
from engram._unsupported import Later, meant, reject_unsupported
from engram.buffer.compat import alias
from engram.buffer.hindsight import HERReplayBuffer
from engram.buffer.recipe import draws_by_priority, register
from engram.buffer.remote import RemoteTensorDictReplayBuffer
from engram.buffer.replay_buffer import ReplayBuffer
from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.buffer.wiring import checked_size, component

if TYPE_CHECKING:
    from engram.buffer.compat import BufferArguments

__all__ = [
    "HERReplayBuffer",
    "PrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]


#: A keyword of TorchRL's whose values change nothing here: all processes draw and update in one tree.
_OF_THE_TREE = {"sync": Later("nothing", (True,))}


def _check_tree(name: str, sync: object, device: torch.device | str | None) -> torch.device | None:
    """Where the tree is to be. Raises ``TypeError``; ``RuntimeError``: there is no such device on this machine."""
    reject_unsupported(name, {"sync": sync}, _OF_THE_TREE)
    return None if device is None else existing_device(device, f"{name}: sampler_device")


@register
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
    prioritized_sampler = alias("sampler", "The sampler with the priorities: :attr:`sampler`. TorchRL's name.")

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
        name = type(self).__name__
        device = _check_tree(name, sync, sampler_device)
        kwargs["sampler"] = _sampler(
            name, size, kwargs, alpha, beta, device=device, eps=eps, dtype=dtype, normalize=normalize
        )
        super().__init__(size, **kwargs)


@register
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
    prioritized_sampler = alias("sampler", "The sampler with the priorities: :attr:`sampler`. TorchRL's name.")

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
        name = type(self).__name__
        device = _check_tree(name, sync, sampler_device)
        kwargs["sampler"] = _sampler(
            name, size, kwargs, alpha, beta, device=device, eps=eps, reduction=reduction, normalize=normalize
        )
        super().__init__(size, priority_key=priority_key, **kwargs)


def _sampler(
    name: str, size: int | None, kwargs: BufferArguments, alpha: float | None, beta: float | None, **settings: Any
) -> samplers.PrioritizedSampler:
    """The buffer's sampler. ``ReplayBuffer.open`` hands over the one that the store noted."""
    given: Any = kwargs.get("sampler")
    if given is not None:
        if not draws_by_priority(given) or alpha is not None or beta is not None:
            raise TypeError(
                f"{name}: sampler: its sampler is a PrioritizedSampler made of alpha and beta. Use a ReplayBuffer."
            )
        made: samplers.PrioritizedSampler = given
        return made
    if alpha is None or beta is None:
        asked = "".join(meant(key, ("alpha", "beta")) for key in kwargs) or " Write alpha=0.6, beta=0.4, for instance."
        raise TypeError(f"{name}: expected alpha and beta, got alpha={alpha}, beta={beta}.{asked}")
    size, storage = checked_size(size, name), kwargs.get("storage")
    if storage is not None:
        storage = kwargs["storage"] = component(storage, storages.Storage, "storage", None)
    capacity = size or 1000 if storage is None else storage.max_size
    if capacity > 1 << 40:  # a list without bounds
        capacity = size or 1 << 20
    return samplers.PrioritizedSampler(capacity, alpha, beta, **settings)
