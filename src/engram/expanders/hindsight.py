"""Hindsight: rows are relabelled with goals that their trajectories have reached."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from engram._checks import check_number
from engram._words import warn
from engram.expanders._base import Expander
from engram.expanders.relabelling import Relabelling, Rule
from engram.field_paths import as_path, checked_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.expanders.reading import Reading
    from engram.field_paths import FieldPath
    from engram.types import SampledStorage, Sampler


class HindsightStrategy(StrEnum):
    """Which step of a row's trajectory has reached the goal that the row gets.

    >>> from engram import HindsightStrategy
    >>> HindsightStrategy("final"), [*HindsightStrategy]
    ('final', ['future', 'final', 'episode', 'random'])
    """

    FUTURE = "future"
    """This one or a later one, each equally often."""
    FINAL = "final"
    """The last one; of an open trajectory, the newest."""
    EPISODE = "episode"
    """Any, each equally often."""
    RANDOM = "random"
    """Any step that is stored, of whatever trajectory."""

    def __repr__(self) -> str:
        return repr(str(self))


#: The goal that was reached before an action.
_ACHIEVED: FieldPath = ("achieved_goal",)
#: As the native core numbers them.
_NUMBERS = {strategy: number for number, strategy in enumerate(HindsightStrategy)}


class Hindsight(Expander):
    """Relabels a share of every batch with goals that were reached, and computes the rewards that they give.

    The first ``int(B * her_ratio)`` rows of a batch get, under ``goal_key`` and where it is stored under ``("next", goal_key)``, what a
    goal row has under ``achieved_goal_key``; then ``reward_key`` of these rows is what ``reward_fn`` returns of them, and their end
    flags follow from ``end_fn`` where it is given. The other rows are as they are stored, and nothing that is stored changes. The goal
    row is a step of the drawn row's own trajectory, which the strategy chooses (:class:`HindsightStrategy`), followed across the end
    of the array and cut at the seam. It is drawn with the batch, from its key. (Andrychowicz et al., "Hindsight experience replay",
    NeurIPS 2017.)

    Around a slice sampler, whole windows are relabelled, the first ``int(windows * her_ratio)`` of a batch: all steps of a window get
    one goal, drawn for its last step.

    Transforms run after it, so ``reward_fn`` sees rows as they are stored. Fields of a :class:`FrameStack` and the next observations of a
    :class:`NextFromFollowing`, inside or around it, are there, too. Of a buffer of several shards, the first rows of each shard's part
    of a batch are relabelled.

    Args:
        sampler: draws the rows: a sampler (also of slices), a sampler class, or another expander.
        reward_fn: is given the relabelled rows, ``[n]``, in the form of a batch before transforms, and returns a tensor of their rewards,
            ``[n, *shape]`` as they are stored; ``[n]`` for a stored ``[n, 1]``. It must not change what it is given, and must be
            thread-safe with ``prefetch``.
        her_ratio: the share of a batch, in [0, 1].
        strategy: a :class:`HindsightStrategy`, or its name.
        goal_key: the goals to replace.
        achieved_goal_key: the goals that were reached, a stored field of the same shape and dtype. Default: ``("next",
            "achieved_goal")`` (or ``"next_achieved_goal"`` and the like), which was reached by the action. Where that is not stored,
            ``"achieved_goal"``, which was reached before it: then no goal is the last state of an episode, and the first draw warns.
        reward_key: the rewards to replace.
        end_fn: is given the relabelled rows with their new rewards, as ``reward_fn`` is, and returns a tensor ``[n]`` or ``[n, 1]``:
            whether the goal ends the episode. The flag ``"terminated"`` of these rows is that; their other end flags are that or
            ``"truncated"``, which stays. Default: flags are as they are stored.
        traj_key, end_keys, index, end_when: as for :class:`NStep`.

    Raises: as :class:`NStep`, and
        TypeError: ``reward_fn`` or ``end_fn`` is not callable, or returns no tensor; when drawing: goals of two dtypes; an
            :class:`NStep` or :class:`RewardToGo` inside or around it, which add up rewards of other steps.
        ValueError: ``her_ratio`` outside [0, 1], or an unknown strategy; when drawing: goals of two shapes.
        NotImplementedError: when a buffer takes it: a storage with ``ndim > 1``.
        KeyError: when drawing: a field is not stored, or there are neither ids nor end flags; ``end_fn``, and there are none.
        RuntimeError: when drawing: ``reward_fn`` or ``end_fn`` returns another shape.

    A store cannot note a function: ``ReplayBuffer.open`` of a directory needs ``sampler=Hindsight(…)`` again, and :func:`serve`, whose
    program opens the store by itself, refuses the buffer.

    Cost: a plain draw, a look-up in the table of trajectories per relabelled row, which is logarithmic in their number, a read of
    one field there, and ``reward_fn``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import Hindsight, LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
    >>> def reward(rows):
    ...     return (rows["next", "achieved_goal"] == rows["desired_goal"]).float()
    >>> reached = torch.arange(5.).unsqueeze(1)
    >>> steps = TensorDict({"achieved_goal": reached[:4], "desired_goal": torch.full((4, 1), 9.), "next": {"achieved_goal": reached[1:],
    ...     "reward": torch.zeros(4, 1), "done": torch.tensor([0, 0, 0, 1]).bool().unsqueeze(1)}}, batch_size=[4])
    >>> sampler = Hindsight(RandomSampler(), reward, her_ratio=0.5, strategy="final")
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=8)
    >>> _ = rb.extend(steps)
    >>> batch = rb.sample()
    >>> batch["desired_goal"].flatten().tolist()
    [4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0, 9.0]
    >>> bool((batch["next", "reward"] == reward(batch)).all())
    True
    """

    #: The end flag that rows must have; None: ids of trajectories do in its place.
    _end: FieldPath | None = None

    _warned = False

    noted = ("her_ratio", "strategy", "goal_key", "achieved_goal_key", "reward_key")

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        reward_fn: Callable[..., object],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = HindsightStrategy.FUTURE,
        goal_key: object = "desired_goal",
        achieved_goal_key: object = None,
        reward_key: object = ("next", "reward"),
        end_fn: Callable[..., object] | None = None,
        traj_key: object = None,
        end_keys: object = None,
        index: str | None = None,
        end_when: str | None = None,
    ) -> None:
        for name, function in {"reward_fn": reward_fn, "end_fn": bool if end_fn is None else end_fn}.items():
            if not callable(function):
                raise TypeError(
                    f"Hindsight: {name}: expected a function of the relabelled rows, got {type(function).__name__}."
                )
        ratio = check_number("Hindsight: her_ratio", her_ratio, least=0, most=1)
        if strategy not in list(HindsightStrategy):
            raise ValueError(
                f"Hindsight: strategy: expected one of {[*map(str, HindsightStrategy)]}, got {strategy!r}."
            )
        self.reward_fn, self.end_fn = reward_fn, end_fn
        self.her_ratio = ratio
        self.strategy = HindsightStrategy(strategy)
        self.goal_key = checked_path(goal_key, "Hindsight: goal_key")
        self.achieved_goal_key = as_path(achieved_goal_key, "Hindsight: achieved_goal_key")
        self.reward_key = checked_path(reward_key, "Hindsight: reward_key")
        if isinstance(sampler, Expander) and any(isinstance(inner, Hindsight) for inner in sampler.chain):
            raise TypeError("Hindsight: sampler: expected one without hindsight, got a Hindsight inside.")
        super().__init__(sampler, traj_key=traj_key, end_keys=end_keys, index=index, end_when=end_when)

    def change(self, reading: Reading) -> None:
        """As for every expander.

        >>> from engram import Hindsight, RandomSampler
        >>> from engram.expanders.reading import Reading
        >>> from engram.format.schema import Field
        >>> goals = [Field(key, "float32", (2,)) for key in (("desired_goal",), ("next", "achieved_goal"))]
        >>> flags = [Field(("next", "reward"), "float32", (1,)), Field(("next", "done"), "bool", (1,))]
        >>> reading = Reading([*goals, *flags])
        >>> Hindsight(RandomSampler(), len).change(reading)
        >>> reading.relabelling is None
        False
        """
        goal = reading.number(self.goal_key, "Hindsight: goal_key")
        achieved = self._achieved(reading)
        reward = reading.number(self.reward_key, "Hindsight: reward_key")
        if self._end is not None:
            reading.number(self._end, "Hindsight: end_key")
        try:
            self.rules.boundaries(reading.fields, reading.numbers, "sample: Hindsight")
        except RuntimeError as error:
            raise KeyError(str(error)) from error
        rule = Rule(_NUMBERS[self.strategy], self.her_ratio, self.reward_fn, self.end_fn)
        ends = [] if self.end_fn is None else reading.flags(self.rules)
        reading.relabelling = Relabelling(reading, rule, goal, achieved, reward, ends)

    def _achieved(self, reading: Reading) -> int:
        """The field of the goals that were reached. Raises ``KeyError``: it is not stored."""
        if self.achieved_goal_key is not None:
            return reading.number(self.achieved_goal_key, "Hindsight: achieved_goal_key")
        after = reading.nexts_of(_ACHIEVED)
        if after:
            return after[0]
        before = reading.number(_ACHIEVED, "Hindsight: achieved_goal_key")
        if not self._warned:
            self._warned = True
            warn(
                "sample: Hindsight: goals are those that were achieved before each action, as ('next', 'achieved_goal') is not stored: "
                "none is the last state of an episode. Store it, or pass achieved_goal_key='achieved_goal' if this is meant."
            )
        return before

    def _check_storage(self, storage: SampledStorage) -> None:
        if storage.ndim > 1:
            raise NotImplementedError(
                f"Hindsight: expected a storage with ndim=1, got ndim={storage.ndim}. Use lanes: each is a ring of its own, such as one "
                "environment."
            )

    @property
    def recordable(self) -> bool:
        """False: a store cannot note a function."""
        return False
