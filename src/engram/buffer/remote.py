"""A buffer whose methods other processes call over ``torch.distributed.rpc``, for those who know it by TorchRL's name."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from engram.buffer.recipe import register
from engram.buffer.tensordict import TensorDictReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    #: A method.
    M = TypeVar("M", bound=Callable[..., object])

__all__ = ["RemoteTensorDictReplayBuffer"]


class _Reference(Protocol):
    """What stands for a buffer of this process, as ``torch.distributed.rpc.RRef`` does."""

    def local_value(self) -> TensorDictReplayBuffer:
        """The buffer."""


def _by_reference(method: M) -> M:
    """A method that takes a reference to the buffer in place of the buffer, too."""

    @wraps(method)
    def called(of: TensorDictReplayBuffer | _Reference, *given: object, **named: object) -> object:
        return method(of if isinstance(of, TensorDictReplayBuffer) else of.local_value(), *given, **named)

    called.__module__, called.__qualname__ = (
        __name__,
        f"RemoteTensorDictReplayBuffer.{method.__name__}",
    )  # by which it is pickled
    return cast("M", called)


@register
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
            **more: ``device`` and ``timeout``.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, RemoteTensorDictReplayBuffer
        >>> rb = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, batch_size=[10]))
        >>> batch, info = rb.sample(4, return_info=True)
        >>> batch["obs"].shape, info["index"].shape
        (torch.Size([4, 3]), torch.Size([4]))
        """
        sampled: TensorDictBase = super().sample(batch_size, return_info, include_info, **more)
        return sampled

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
