"""Buffers whose sampler is made of their arguments: with priorities, or in hindsight."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack, cast

import torch

from engram import samplers, storages
from engram._support.devices import existing_device
from engram._support.field_paths import checked_path
from engram._support.unsupported import Later, meant, reject_unsupported
from engram.around import Hindsight, HindsightStrategy
from engram.buffer.recipe import draws_by_priority, register
from engram.buffer.replay_buffer import ReplayBuffer, shows
from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.buffer.wiring import checked_size, component
from engram.types import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    from engram.buffer.configuration import BufferArguments

    M = TypeVar("M", bound=Callable[..., object])

__all__ = [
    "HERReplayBuffer",
    "PrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]


_PRIORITIZED_SAMPLER = shows(
    lambda self: self.sampler, "The sampler with the priorities: :attr:`sampler`. TorchRL's name."
)
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


_END = ("next", "done")


@register
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
            end = checked_path(end_key, f"{name}: end_key")
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
