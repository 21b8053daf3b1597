"""What may be true of a trajectory: ``traj.reward.sum() > 100``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from engram._support.checks import check_callable
from engram._support.field_paths import checked_path, public

if TYPE_CHECKING:
    from engram.around.trajectory import Trajectory

    OfMany: TypeAlias = Callable[["Segments"], Tensor]
    Compare: TypeAlias = Callable[..., object]

    from tensordict import TensorDictBase


Reduction = Literal["sum", "mean", "max", "min", "first", "last"]
Path = tuple[str, ...]


class Segments:
    """Steps of ``K`` trajectories, ``N`` in all.

    Args:
        fields: ``[N, ...]`` each, by path.
        lengths: int64 ``[K]``, at least 1: steps of each.
    """

    def __init__(self, fields: Mapping[Path, Tensor], lengths: Tensor) -> None:
        self._fields = fields
        self.lengths = lengths
        """int64 ``[K]``"""
        self._stops = lengths.cumsum(0)
        self._of = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)

    def field(self, path: Path) -> Tensor:
        """``[N, ...]``: a field, or else that of the next step. Raises ``KeyError``."""
        for found in (path, ("next", *path)) if len(path) == 1 else (path,):
            if found in self._fields:
                return self._fields[found]
        raise KeyError(missing(path, self._fields))

    def split(self) -> Sequence[TensorDictBase]:
        """The fields of each trajectory, ``[T]``."""
        from tensordict import TensorDict

        data = TensorDict({}, [len(self._of)])
        for path, column in self._fields.items():
            data.set(path, column)
        return cast("Sequence[TensorDictBase]", data.split(self.lengths.tolist()))

    def any(self, steps: Tensor) -> Tensor:
        """Bool ``[K]``: whether something is true in a trajectory. ``steps``: bool ``[N, ...]``."""
        return self._scattered(steps.reshape(len(steps), -1).any(1).int(), "amax") > 0

    def all(self, steps: Tensor) -> Tensor:
        """Bool ``[K]``: whether all is."""
        return ~self.any(~steps)

    def reduced(self, values: Tensor, how: Reduction) -> Tensor:
        """``[K]``; ``[K, ...]`` of the first and the last step. Floats are summed up as float64, ints and bools as int64.

        ``values``: ``[N, ...]``.
        """
        if how == "first":
            return values[self._stops - self.lengths]
        if how == "last":
            return values[self._stops - 1]
        flat = values.reshape(len(values), -1)
        if how in ("max", "min"):
            rows = flat.amax(1) if how == "max" else flat.amin(1)
            return self._scattered(rows, f"a{how}")
        exact = torch.float64 if flat.dtype.is_floating_point else torch.int64
        sums = self._scattered(flat.sum(1, dtype=exact), "sum")
        return sums if how == "sum" else sums.double() / (self.lengths * flat.shape[1])

    def _scattered(self, values: Tensor, how: str) -> Tensor:
        out = torch.zeros(len(self.lengths), dtype=values.dtype, device="cpu")
        return out.scatter_reduce(0, self._of, values, how, include_self=False)


def missing(path: Path, known: Mapping[Path, object]) -> str:
    """What to say of a field that is not there."""
    beside = f" or {('next', *path)!r}" if len(path) == 1 else ""
    return f"query: expected a stored field {public(path)!r}{beside}, got {[public(key) for key in sorted(known)]}."


class TrajectoryPredicate:
    """Whether something is true of a trajectory. Comparisons with :data:`traj` make them, and ``&``, ``|`` and ``~`` join them.

    Args:
        fn: says so of a :class:`Trajectory`.
        description: for messages.
        keys: of the entries that it reads, if they are known: ``rb.query`` gives it no others.

    Raises ``TypeError``: ``fn`` is no function, or a key is none.

    >>> from engram import traj
    >>> (traj.reward.sum() > 100) & ~(traj.length >= 200)
    TrajectoryPredicate(((traj.reward.sum() > 100) & ~(traj.length >= 200)))
    """

    #: Says so of many trajectories at once; None: of one by one only.
    many: OfMany | None = None

    def __init__(
        self, fn: Callable[[Trajectory], object], description: str = "predicate", keys: Iterable[object] | None = None
    ) -> None:
        who = "TrajectoryPredicate"
        check_callable(f"{who}: fn", fn, "a function of a Trajectory")
        if isinstance(keys, str) or not (keys is None or isinstance(keys, Iterable)):
            raise TypeError(f"{who}: keys: expected a set of keys, got {keys!r}. Put one in braces.")
        self._fn = fn
        self._description = description
        self._keys = None if keys is None else frozenset(public(checked_path(key, f"{who}: keys")) for key in keys)

    @property
    def description(self) -> str:
        """For messages."""
        return self._description

    def required_keys(self) -> frozenset[object] | None:
        """Keys of the entries that it reads; None: they are not known.

        >>> from engram import traj
        >>> ((traj.reward.sum() > 1) | (traj["next", "done"] > 0).any()).required_keys() == {"reward", ("next", "done")}
        True
        """
        return self._keys

    def __call__(self, trajectory: Trajectory) -> bool:
        return holds(self._fn, trajectory)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self._description}: expected & and | between predicates and ~ before one, got and, or, not or a chain of comparisons, "
            "which would take one of them. Write (traj.length > 3) & (traj.length < 9)."
        )

    def _joined(self, other: object, symbol: str, joins: Compare) -> TrajectoryPredicate:
        if not isinstance(other, TrajectoryPredicate):
            reject(other, self._description)
            raise TypeError(f"{self._description} {symbol} …: expected a predicate, got {type(other).__name__}.")
        mine, theirs, keys = self.many, other.many, None
        needed = self.required_keys(), other.required_keys()
        if needed[0] is not None and needed[1] is not None:
            keys = needed[0] | needed[1]
        both = None if mine is None or theirs is None else lambda it: cast("Tensor", joins(mine(it), theirs(it)))
        description = f"({self._description} {symbol} {other.description})"
        return BatchedPredicate(lambda it: joins(self(it), other(it)), description, keys, both)

    def __and__(self, other: object) -> TrajectoryPredicate:
        return self._joined(other, "&", operator.and_)

    def __or__(self, other: object) -> TrajectoryPredicate:
        return self._joined(other, "|", operator.or_)

    def __invert__(self) -> TrajectoryPredicate:
        mine = self.many
        many = None if mine is None else lambda it: ~mine(it)
        return BatchedPredicate(lambda it: not self(it), f"~{self._description}", self._keys, many)

    def __repr__(self) -> str:
        return f"TrajectoryPredicate({self._description})"


class BatchedPredicate(TrajectoryPredicate):
    """One that may say so of many trajectories at once, too: bool ``[K]``."""

    def __init__(
        self, fn: Callable[[Trajectory], object], description: str, keys: frozenset[object] | None, many: OfMany | None
    ) -> None:
        super().__init__(fn, description, keys)
        self.many = many


class Comparison:
    """A comparison of each step, which :meth:`any` or :meth:`all` makes a predicate."""

    def __init__(self, field: Field, other: object, symbol: str, compare: Compare) -> None:
        self._field, self._other, self._compare = field, other, compare
        self._description = f"({field.description} {symbol} {other!r})"

    def any(self) -> TrajectoryPredicate:
        """True if it holds for any step."""
        return self._predicate("any")

    def all(self) -> TrajectoryPredicate:
        """True if it holds for every step."""
        return self._predicate("all")

    def _predicate(self, how: str) -> TrajectoryPredicate:
        field, other, compare = self._field, self._other, self._compare

        def of_one(trajectory: Trajectory) -> object:
            held = torch.as_tensor(compare(field.of(trajectory), other))
            return held.any() if how == "any" else held.all()

        def of_many(segments: Segments) -> Tensor:
            held = cast("Tensor", compare(segments.field(field.path), other))
            return segments.any(held) if how == "any" else segments.all(held)

        # A tensor might have an entry for each step.
        many = None if isinstance(other, Tensor) and other.ndim else of_many
        return BatchedPredicate(of_one, f"{self._description}.{how}()", field.keys, many)

    def __call__(self, trajectory: Trajectory | None = None) -> bool:
        raise TypeError(self._ambiguous())

    def _ambiguous(self) -> str:
        return (
            f"{self._description}: expected one bool for each trajectory, got a comparison of each step. Write "
            f"{self._description}.any() or .all()."
        )

    def __bool__(self) -> bool:
        raise TypeError(self._ambiguous())

    def __repr__(self) -> str:
        return f"Comparison{self._description}"


class _Comparable:
    """What ``<``, ``==`` and so on compare."""

    description: str
    __hash__ = None  # type: ignore[assignment] # as == makes a predicate

    def _compared(self, other: object, symbol: str, compare: Compare) -> object:
        raise NotImplementedError

    def __gt__(self, other: object) -> object:
        return self._compared(other, ">", operator.gt)

    def __ge__(self, other: object) -> object:
        return self._compared(other, ">=", operator.ge)

    def __lt__(self, other: object) -> object:
        return self._compared(other, "<", operator.lt)

    def __le__(self, other: object) -> object:
        return self._compared(other, "<=", operator.le)

    def __eq__(self, other: object) -> object:  # type: ignore[override]
        return self._compared(other, "==", operator.eq)

    def __ne__(self, other: object) -> object:  # type: ignore[override]
        return self._compared(other, "!=", operator.ne)

    def __repr__(self) -> str:
        return self.description

    def _check(self, other: object) -> None:
        if isinstance(other, _Comparable):
            raise TypeError(f"{self.description}: expected a number to compare with, got {other.description}.")


class Scalar(_Comparable):
    """One number of a trajectory."""

    def __init__(
        self, of_one: Callable[[Trajectory], object], of_many: OfMany, description: str, keys: frozenset[object]
    ) -> None:
        self._of_one, self._of_many, self.description, self._keys = of_one, of_many, description, keys

    def _compared(self, other: object, symbol: str, compare: Compare) -> TrajectoryPredicate:
        self._check(other)
        description = f"({self.description} {symbol} {other!r})"
        if not isinstance(other, Real | Tensor | np.ndarray) or (
            isinstance(other, Tensor | np.ndarray) and math.prod(other.shape) != 1
        ):
            raise TypeError(f"{description}: expected one number to compare with, got {other!r:.40}.")

        def of_many(segments: Segments) -> Tensor:
            held = cast("Tensor", compare(self._of_many(segments), other))
            if held.numel() != len(segments.lengths):
                raise RuntimeError(
                    f"{description}: expected one number of each trajectory, got shape {list(held.shape[1:])}. Store the number in a field "
                    "of its own, or reduce it with sum(), max() …."
                )
            return held.reshape(-1).bool()

        return BatchedPredicate(lambda it: compare(self._of_one(it), other), description, self._keys, of_many)


class Field(_Comparable):
    """An entry of each step, to be compared or reduced."""

    def __init__(self, key: object, description: str) -> None:
        self.path: Path = checked_path(key, "traj[key]")
        self.description = description
        self.keys = frozenset({cast("object", public(self.path))})

    def of(self, trajectory: Trajectory) -> Tensor:
        """Of one trajectory. Raises ``KeyError``: it has none."""
        value = trajectory.get(public(self.path))
        if value is None:
            raise KeyError(
                f"{self.description}: expected the key {public(self.path)!r}, or that of the next step, got {trajectory!r}."
            )
        return value

    def _compared(self, other: object, symbol: str, compare: Compare) -> Comparison:
        self._check(other)
        return Comparison(self, other, symbol, compare)

    def _reduced(self, how: Reduction, of_one: Callable[[Tensor], object]) -> Scalar:
        return Scalar(
            lambda it: of_one(self.of(it)),
            lambda segments: segments.reduced(segments.field(self.path), how),
            f"{self.description}.{how}()",
            self.keys,
        )

    def sum(self) -> Scalar:
        """The sum over all steps."""
        return self._reduced("sum", torch.sum)

    def mean(self) -> Scalar:
        """The mean over all steps."""
        return self._reduced("mean", lambda values: values.float().mean())

    def max(self) -> Scalar:
        """The largest value."""
        return self._reduced("max", torch.max)

    def min(self) -> Scalar:
        """The smallest value."""
        return self._reduced("min", torch.min)

    def first(self) -> Scalar:
        """That of the first step."""
        return self._reduced("first", lambda values: values[0])

    def last(self) -> Scalar:
        """That of the last step."""
        return self._reduced("last", lambda values: values[-1])


class TrajectoryRef:
    """What predicates are made of: ``traj.reward`` and ``traj["next", "reward"]`` are entries of each step, ``traj.length`` and
    ``traj.total_reward`` numbers of the trajectory.
    """

    @property
    def length(self) -> Scalar:
        """Steps."""
        return Scalar(lambda it: it.length, lambda segments: segments.lengths, "traj.length", frozenset())

    @property
    def total_reward(self) -> Scalar:
        """The sum of the rewards."""
        reward = Field("reward", "traj.reward")
        return Scalar(
            lambda it: it.total_reward,
            lambda segments: segments.reduced(segments.field(reward.path), "sum"),
            "traj.total_reward",
            reward.keys,
        )

    def __getattr__(self, name: str) -> Field:
        if name.startswith("_"):
            raise AttributeError(name)
        return Field(name, f"traj.{name}")

    def __getitem__(self, key: object) -> Field:
        return Field(key, f"traj[{key!r}]")

    def __repr__(self) -> str:
        return "traj"


traj = TrajectoryRef()
"""Begins predicates: ``(traj.reward.sum() > 100) & (traj.length < 200)``."""


def holds(predicate: Callable[[Trajectory], object], trajectory: Trajectory) -> bool:
    """Whether it is true of a trajectory. Raises ``TypeError``: it does not say so."""
    said = predicate(trajectory)
    if said is None or (isinstance(said, Tensor) and said.numel() != 1):
        got = "None" if said is None else f"a tensor {list(said.shape)}"
        raise TypeError(
            f"query: predicate: expected one bool for each trajectory, got {got}. Return one, such as that of any() or all()."
        )
    return bool(said)


def reject(predicate: object, call: str) -> None:
    """Raise ``TypeError`` for a comparison of each step, or what cannot be called."""
    if isinstance(predicate, Comparison):
        predicate()
    check_callable(
        call, predicate, "a predicate, such as traj.length > 3, or a function of a Trajectory", optional=True
    )
