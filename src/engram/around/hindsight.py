"""Hindsight: rows are relabelled with goals that their trajectories have reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Unpack, cast

import torch
from torch import Tensor

from engram._support import checks, field_paths, tensordicts, words
from engram._support import native as _native
from engram.around.expander import Expander, Reading, TrajectoryArguments
from engram.storages import TensorStorage
from engram.store import sampled, store
from engram.store.memory import dlpack_specs
from engram.types import Entry, Info, Sampler


class HindsightStrategy(StrEnum):
    """Which step of a row's trajectory has reached the goal that the row gets.

    >>> from engram import HindsightStrategy
    >>> HindsightStrategy("final"), [*HindsightStrategy]
    ('final', ['future', 'final', 'episode', 'random'])
    """

    #: This one or a later one, each equally often.
    FUTURE = "future"
    #: The last one; of an open trajectory, the newest.
    FINAL = "final"
    #: Any, each equally often.
    EPISODE = "episode"
    #: Any step that is stored, of whatever trajectory.
    RANDOM = "random"

    def __repr__(self) -> str:
        return repr(str(self))


#: The goal that was reached before an action.
_ACHIEVED: field_paths.FieldPath = ("achieved_goal",)
#: The end flag that says nothing of a goal.
_CUT = "truncated"


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
    _end: field_paths.FieldPath | None = None

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
        **trajectories: Unpack[TrajectoryArguments],
    ) -> None:
        for name, function in {"reward_fn": reward_fn, "end_fn": bool if end_fn is None else end_fn}.items():
            checks.check_callable(f"Hindsight: {name}", function, "a function of the relabelled rows")
        self.her_ratio = checks.check_number("Hindsight: her_ratio", her_ratio, least=0, most=1)
        checks.check_choice("Hindsight: strategy", strategy, list(HindsightStrategy))
        self.reward_fn, self.end_fn = reward_fn, end_fn
        self.strategy = HindsightStrategy(strategy)
        self.goal_key = field_paths.checked_path(goal_key, "Hindsight: goal_key")
        self.achieved_goal_key = field_paths.as_path(achieved_goal_key, "Hindsight: achieved_goal_key")
        self.reward_key = field_paths.checked_path(reward_key, "Hindsight: reward_key")
        if isinstance(sampler, Expander) and any(isinstance(inner, Hindsight) for inner in sampler.chain):
            raise TypeError("Hindsight: sampler: expected one without hindsight, got a Hindsight inside.")
        super().__init__(sampler, **trajectories)

    def change(self, reading: Reading) -> None:
        """As for every expander.

        >>> from engram import Hindsight, RandomSampler
        >>> from engram.around.expander import Reading
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
        ends = [] if self.end_fn is None else reading.flags(self.rules)
        reading.relabelling = Relabelling(self, reading, goal, achieved, reward, ends)

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
            words.warn(
                "sample: Hindsight: goals are those that were achieved before each action, as ('next', 'achieved_goal') is not stored: "
                "none is the last state of an episode. Store it, or pass achieved_goal_key='achieved_goal' if this is meant."
            )
        return before

    def _check_storage(self, storage: sampled.SampledStorage) -> None:
        if storage.ndim > 1:
            raise NotImplementedError(
                f"Hindsight: expected a storage with ndim=1, got ndim={storage.ndim}. Use lanes: each is a ring of its own, such as one "
                "environment."
            )

    #: A store cannot note a function.
    recordable = False


class Relabelling:
    """Puts goals into batches: reads them where rows are read, and computes the rewards when all rows stand.

    A batch is relabelled in its first rows; one of windows in its first windows, each of which has one goal, drawn for its last step.
    """

    def __init__(
        self, hindsight: Hindsight, reading: Reading, goal: int, achieved: int, reward: int, ends: list[int]
    ) -> None:
        """``goal``, ``achieved``, ``reward``, ``ends``: fields, the latter of end flags.

        Raises ``ValueError``, ``TypeError``: goals of another shape or dtype. ``KeyError``: ``end_fn`` ends episodes, and no flag does.
        """
        #: The share of a batch that gets another goal.
        self.ratio = hindsight.her_ratio
        self.reward_fn, self.end_fn = hindsight.reward_fn, hindsight.end_fn
        #: End flags, by key.
        self.ends = {reading.fields[number].key: number for number in ends}
        if self.end_fn is not None and all(key[-1] == _CUT for key in self.ends):
            raise KeyError(
                "sample: Hindsight: end_fn: expected a stored end flag that it can set, such as ('next', 'terminated'), got "
                f"{[*map(field_paths.public, reading.numbers)]}. Store one, or name it with end_keys=."
            )
        source, self.reward = reading.fields[achieved], reward
        self.fields = [goal, *reading.nexts_of(reading.fields[goal].key)]
        for field in (reading.fields[number] for number in self.fields):
            for kind, wrong, got, expected in (
                ("shape", ValueError, list(field.shape), list(source.shape)),
                ("dtype", TypeError, field.dtype, source.dtype),
            ):
                if got != expected:
                    raise wrong(
                        f"sample: Hindsight: field {field.name}: expected goals of the {kind} {expected} of {source.name}, got {got}. "
                        f"Store both in one {kind}."
                    )
        #: The fields that goals are put into, or follow from.
        self.reads = {*self.fields, achieved, reward, *self.ends.values()}
        strategy = [*HindsightStrategy].index(hindsight.strategy)  # as the native core numbers them
        self.native = _native.Goals(strategy, achieved, dlpack_specs([source])[0])

    def check(self, reading: Reading) -> None:
        """Raise ``TypeError`` if another expander changes what is relabelled, or sums rewards of other steps."""
        kinds = [column.kind for column in (*reading.columns, *reading.entries.values())]
        if "sum" in kinds or any(column.ahead for column in reading.columns):
            raise TypeError(
                "sample: Hindsight: expected no NStep or RewardToGo around or inside: the rewards that they add up are those of the "
                "stored goals. Relabel single steps."
            )
        for number in self.reads:
            if reading.columns[number].kind != "row":
                raise TypeError(
                    f"sample: Hindsight: expected {field_paths.public(reading.fields[number].key)!r} as it is stored, "
                    "but another expander changes it."
                )

    def goals(self, memory: store.Store, table: _native.Trajectories, key: int) -> Goals:
        """Those of a batch that is drawn with a key: none so far."""
        return Goals(self, memory, table, key)


class Goals:
    """The goals of one batch, of rows or of windows."""

    def __init__(self, relabelling: Relabelling, memory: store.Store, table: _native.Trajectories, key: int) -> None:
        """``key``: of the draw."""
        self._relabelling, self._core, self._table = relabelling, memory.core, table
        self._key, self._attempt = key % (1 << 64), 0
        #: Rows or windows that get one.
        self._most = 0
        self._found: Tensor | None = None
        #: Steps of each window; None: they are rows.
        self._steps: Tensor | None = None

    def read(self, rows: Tensor, tickets: Tensor, moved: list[int], places: Tensor | None = None) -> list[int]:
        """Read the goals of rows that were read with these tickets: those of them to draw again, ``moved`` among them.

        ``places``: where in the batch the rows stand; None: they are the batch.
        """
        some: Tensor | None = None
        if places is None:
            self._found, self._most = None, int(len(rows) * self._relabelling.ratio)
            n = self._most
        else:
            some = (places < self._most).nonzero().flatten()
            rows, tickets, places, n = rows[some], tickets[some], places[some], len(some)
        if not n:
            return moved
        native, attempt = self._relabelling.native, self._attempt
        values, missing = native.read(self._core, self._table, rows, tickets, places, n, self._key, attempt)
        self._attempt += 1
        if self._found is None or places is None:
            self._found = values
        else:
            self._found[places] = values
        if not missing:
            return moved
        return sorted({*moved, *(missing if some is None else some[missing].tolist())})

    def read_windows(self, rows: Tensor, tickets: Tensor, ends: Tensor) -> list[int]:
        """The goals of windows that end at these places among the rows: places of those without one now."""
        last = ends[: int(len(ends) * self._relabelling.ratio)]
        self._found, self._most = None, len(last)
        self._steps = torch.diff(last, prepend=last.new_full((1,), -1))
        missing = self.read(rows[last], tickets[last], [], torch.arange(len(last), device="cpu"))
        return [int(last[place]) for place in missing]

    def apply(
        self,
        storage: sampled.SampledStorage,
        columns: list[Tensor],
        info: Info,
        computed: Mapping[Entry, bool],
        cut: field_paths.FieldPath | None = None,
    ) -> None:
        """Put the goals into the first rows of the batch that was read, and the rewards and end flags that they give.

        Args:
            storage: of the rows.
            columns, info: changed in place.
            computed: entries of ``info`` that are fields of the batch.
            cut: the entry of ``info`` that marks where windows end.

        Raises ``RuntimeError``, ``TypeError``: a function returned something else than a reward, or flag, per row.
        """
        values, relabelling = self._found, self._relabelling
        if values is None:
            return
        if self._steps is not None:
            values = values.repeat_interleave(self._steps, 0)
        n = len(values)
        given = cast("list[object]", columns)  # items of ragged fields, too, which are never goals
        fixed = [it if isinstance(it, Tensor) else values for it in given]
        first = _native.put_goals(fixed, relabelling.fields, values, n)
        first = [
            part if isinstance(it, Tensor) else cast("Tensor", it)[:n] for part, it in zip(first, given, strict=True)
        ]
        batch: object = cast("TensorStorage", storage).batch(first, (n,))  # expanders take no other
        if computed:
            made = {key: cast("Tensor", info[key])[:n] for key in computed}
            tensordicts.add_fields(
                batch, {key: made[key].squeeze(-1) if flat else made[key] for key, flat in computed.items()}
            )
        stored, reward = first[relabelling.reward], relabelling.reward_fn(batch)
        if not isinstance(reward, Tensor) or reward.shape != stored.shape or reward.dtype is not stored.dtype:
            reward = _as_stored(reward, stored)
        stored.copy_(reward.detach())
        if relabelling.end_fn is not None:
            marks = None if cut is None else cast("Tensor", info[field_paths.public(cut)])
            _put_ends(relabelling.ends, relabelling.end_fn(batch), first, n, info, marks)


def _as_stored(reward: object, stored: Tensor) -> Tensor:
    """The reward of a function, in the shape of those that are stored. Raises ``TypeError``, ``RuntimeError``: it is none."""
    reward = checks.check_type("sample: Hindsight: reward_fn", reward, Tensor, f"a tensor {list(stored.shape)}")
    shape, got = stored.shape, reward.shape
    if got != shape and shape[1:] == (1,) and got == shape[:1]:
        reward, got = reward.unsqueeze(-1), shape
    if got != shape or not torch.can_cast(reward.dtype, stored.dtype):
        raise RuntimeError(
            f"sample: Hindsight: reward_fn: expected {list(shape)} {stored.dtype}, as rewards are stored, got {list(got)} "
            f"{reward.dtype}. Return one reward per row of the batch."
        )
    return reward


def _put_ends(
    ends: dict[field_paths.FieldPath, int], ended: object, first: list[Tensor], n: int, info: Info, cut: Tensor | None
) -> None:
    """Set the end flags of the first ``n`` rows of a batch. ``cut``: bool ``[B, 1]``, the marks of steps at which windows end."""
    ended = checks.check_type("sample: Hindsight: end_fn", ended, Tensor, f"a tensor [{n}]")
    if ended.shape not in ((n,), (n, 1)):
        raise RuntimeError(
            f"sample: Hindsight: end_fn: expected [{n}] or [{n}, 1], got {list(ended.shape)}. Return one flag per row of the batch."
        )
    terminal = over = ended.reshape(n) != 0
    for key, number in ends.items():
        if key[-1] == _CUT:
            over = over | (first[number].reshape(n, -1) != 0).any(1)
    marked = over if cut is None else over | cut[:n, 0]
    for key, number in ends.items():
        if key[-1] == _CUT:
            continue
        terminates = key[-1] == "terminated"
        _put(first[number], terminal if terminates else over)
        if field_paths.public(key) in info:  # windows end where they are cut
            _put(cast("Tensor", info[field_paths.public(key)])[:n], terminal if terminates else marked)


def _put(flag: Tensor, value: Tensor) -> None:
    """Set a flag ``[n, …]`` of any dtype to bools ``[n]``."""
    flag.copy_(value.view(len(value), *(1,) * (flag.ndim - 1)))
