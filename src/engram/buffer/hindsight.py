"""A buffer whose batches are relabelled in hindsight, for those who know it by TorchRL's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from engram import samplers
from engram.buffer.compat import alias
from engram.buffer.recipe import register
from engram.buffer.tensordict import TensorDictReplayBuffer
from engram.buffer.wiring import component
from engram.expanders import Hindsight, HindsightStrategy
from engram.field_paths import checked_path
from engram.types import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.buffer.compat import BufferArguments

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

    reward_fn = alias("sampler.reward_fn")
    end_fn = alias("sampler.end_fn")
    her_ratio = alias("sampler.her_ratio")
    strategy = alias("sampler.strategy")

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
