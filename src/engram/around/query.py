"""``rb.query``: the stored trajectories of which a predicate is true, such as ``traj.reward.sum() > 100``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch

from engram._support import tensordicts, words
from engram._support.checks import check_callable, check_type
from engram._support.field_paths import FieldPath, as_path, checked_path, public
from engram._support.nested import find_field, is_tensordict
from engram.around import episodes
from engram.format import schema
from engram.store.memory import DTYPE_NAMES
from engram.store.store import Store

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from engram.around.trajectory import Trajectory
    from engram.storages import Storage
    from engram.transforms import Compose

    OfMany: TypeAlias = Callable[["Segments"], torch.Tensor]
    Compare: TypeAlias = Callable[..., object]
    Predicate = Callable[[Trajectory], object] | None


Reduction = Literal["sum", "mean", "max", "min", "first", "last"]


class Segments:
    """Steps of ``K`` trajectories, ``N`` in all.

    Args:
        fields: ``[N, ...]`` each, by path.
        lengths: int64 ``[K]``, at least 1: steps of each.
    """

    def __init__(self, fields: Mapping[FieldPath, torch.Tensor], lengths: torch.Tensor) -> None:
        self._fields = fields
        #: int64 ``[K]``
        self.lengths = lengths
        self._stops = lengths.cumsum(0)
        self._of = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)

    def field(self, path: FieldPath) -> torch.Tensor:
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

    def any(self, steps: torch.Tensor) -> torch.Tensor:
        """Bool ``[K]``: whether something is true in a trajectory. ``steps``: bool ``[N, ...]``."""
        return self._scattered(steps.reshape(len(steps), -1).any(1).int(), "amax") > 0

    def all(self, steps: torch.Tensor) -> torch.Tensor:
        """Bool ``[K]``: whether all is."""
        return ~self.any(~steps)

    def reduced(self, values: torch.Tensor, how: Reduction) -> torch.Tensor:
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

    def _scattered(self, values: torch.Tensor, how: str) -> torch.Tensor:
        out = torch.zeros(len(self.lengths), dtype=values.dtype, device="cpu")
        return out.scatter_reduce(0, self._of, values, how, include_self=False)


def missing(path: FieldPath, known: Mapping[FieldPath, object]) -> str:
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
        both = None if mine is None or theirs is None else lambda it: cast("torch.Tensor", joins(mine(it), theirs(it)))
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

        def of_many(segments: Segments) -> torch.Tensor:
            held = cast("torch.Tensor", compare(segments.field(field.path), other))
            return segments.any(held) if how == "any" else segments.all(held)

        # A tensor might have an entry for each step.
        many = None if isinstance(other, torch.Tensor) and other.ndim else of_many
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
        if not isinstance(other, Real | torch.Tensor | np.ndarray) or (
            isinstance(other, torch.Tensor | np.ndarray) and math.prod(other.shape) != 1
        ):
            raise TypeError(f"{description}: expected one number to compare with, got {other!r:.40}.")

        def of_many(segments: Segments) -> torch.Tensor:
            held = cast("torch.Tensor", compare(self._of_many(segments), other))
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
        self.path: FieldPath = checked_path(key, "traj[key]")
        self.description = description
        self.keys = frozenset({cast("object", public(self.path))})

    def of(self, trajectory: Trajectory) -> torch.Tensor:
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

    def _reduced(self, how: Reduction, of_one: Callable[[torch.Tensor], object]) -> Scalar:
        return _scalar(self, how, lambda it: of_one(self.of(it)), f"{self.description}.{how}()")

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


def _scalar(field: Field, how: Reduction, of_one: Callable[[Trajectory], object], description: str) -> Scalar:
    return Scalar(of_one, lambda segments: segments.reduced(segments.field(field.path), how), description, field.keys)


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
        return _scalar(Field("reward", "traj.reward"), "sum", lambda it: it.total_reward, "traj.total_reward")

    def __getattr__(self, name: str) -> Field:
        if name.startswith("_"):
            raise AttributeError(name)
        return Field(name, f"traj.{name}")

    def __getitem__(self, key: object) -> Field:
        return Field(key, f"traj[{key!r}]")

    def __repr__(self) -> str:
        return "traj"


#: Begins predicates: ``(traj.reward.sum() > 100) & (traj.length < 200)``.
traj = TrajectoryRef()


def holds(predicate: Callable[[Trajectory], object], trajectory: Trajectory) -> bool:
    """Whether it is true of a trajectory. Raises ``TypeError``: it does not say so."""
    said = predicate(trajectory)
    if said is None or (isinstance(said, torch.Tensor) and said.numel() != 1):
        got = "None" if said is None else f"a tensor {list(said.shape)}"
        raise TypeError(f"query: predicate: expected one bool for each trajectory, got {got}. Return any() or all().")
    return bool(said)


def reject(predicate: object, call: str) -> None:
    """Raise ``TypeError`` for a comparison of each step, or what cannot be called."""
    if isinstance(predicate, Comparison):
        predicate()
    check_callable(call, predicate, "a predicate such as traj.length > 3, or a function of a Trajectory", optional=True)


#: Step types, as dm_env numbers them.
_FIRST, _LAST = 0, 2


def iter_trajectories(data: TensorDictBase, trajectory_key: object = None) -> Iterator[Trajectory]:
    """The trajectories in a TensorDict ``[N]`` whose steps follow one another, as :class:`Trajectory` around views.

    They are told apart as by ``rb.query``.

    Raises:
        TypeError: no TensorDict. ValueError: not one batch dimension.
        KeyError: no ids and no end flags, or none of that key.

    >>> import torch
    >>> from engram import iter_trajectories
    >>> from tensordict import TensorDict
    >>> data = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1]), "x": torch.arange(5)}, [5])
    >>> [trajectory.x.tolist() for trajectory in iter_trajectories(data)]
    [[0, 1], [2, 3, 4]]
    """
    from engram.around.trajectory import Trajectory

    check_flat(data, "iter_trajectories")
    if len(data):
        start, stop = _parts(data, trajectory_key, "iter_trajectories")
        for first, last in zip(start, stop, strict=True):
            yield Trajectory(data[first : last + 1])


def filter_trajectories(
    data: TensorDictBase, predicate: Callable[[Trajectory], object] | None = None, *, trajectory_key: object = None
) -> list[Trajectory]:
    """Those of :func:`iter_trajectories` of which a predicate is true; None: all. Raises as that; ``TypeError``: no predicate.

    >>> import torch
    >>> from engram import filter_trajectories, traj
    >>> from tensordict import TensorDict
    >>> data = TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1]), "x": torch.arange(5)}, [5])
    >>> filter_trajectories(data, traj.x.sum() > 3)[0].x.tolist()
    [2, 3, 4]
    """
    reject(predicate, "filter_trajectories")
    check_flat(data, "filter_trajectories")
    return [it for it in iter_trajectories(data, trajectory_key) if predicate is None or holds(predicate, it)]


def check_flat(data: object, call: str) -> None:
    """Raise ``TypeError``, ``ValueError`` unless it is a TensorDict ``[N]``."""
    from tensordict import TensorDictBase

    td: TensorDictBase = check_type(call, data, TensorDictBase, "a TensorDict")
    if td.batch_dims != 1:
        raise ValueError(f"{call}: expected a TensorDict with one batch dimension, [N], got {list(td.batch_size)}.")


def boundaries_of(
    fields: Sequence[schema.Field], numbers: dict[FieldPath, int], given: object, call: str
) -> episodes.Boundaries:
    """Where trajectories end among rows of these fields, with a warning where no id says it.

    Raises ``KeyError``: no field says it. ``TypeError``: no key.

    Args:
        fields, numbers: as :meth:`TrajectoryKeys.boundaries`.
        given: the field with ids; None: the usual ones.
    """
    path = as_path(given, f"{call}: trajectory_key")
    known = [public(key) for key in sorted(numbers)]
    if path is not None and path not in numbers:
        raise KeyError(f"{call}: trajectory_key: expected a stored field, one of {known}, got {public(path)!r}.")
    try:
        found = episodes.TrajectoryKeys(path, None, None).boundaries(fields, numbers, call)
    except RuntimeError:
        raise KeyError(
            f"{call}: expected trajectory ids, such as ('collector', 'traj_ids') or 'episode', or end flags such as ('next', 'done'), "
            f"got {known}. Name their field: trajectory_key=…."
        ) from None
    if not found.ids:
        words.warn(
            f"{call}: expected trajectory ids, such as the field ('collector', 'traj_ids') or 'episode', got the end flags "
            f"{[public(fields[number].key) for number in found.ends]} only: a trajectory whose last step has none is taken for a part of "
            "the next one. Store ids, or name their field: trajectory_key=…."
        )
    return found


def _parts(data: TensorDictBase, trajectory_key: object, call: str) -> tuple[list[int], list[int]]:
    """First and last step of each trajectory."""
    paths = ((key,) if isinstance(key, str) else key for key in data.keys(include_nested=True, leaves_only=True))
    columns = {path: column for path in paths if isinstance(column := data.get(path), torch.Tensor)}
    fields = [schema.Field(path, DTYPE_NAMES[it.dtype], tuple(it.shape[1:])) for path, it in columns.items()]
    found = boundaries_of(fields, {path: number for number, path in enumerate(columns)}, trajectory_key, call)
    ends = torch.zeros(len(data), dtype=torch.bool, device="cpu")
    for number in found.which:
        signal = columns[fields[number].key].reshape(len(data), -1).cpu()
        if number in found.ids:
            ends[:-1] |= (signal[1:] != signal[:-1]).any(1)
        elif episodes.step_type_bytes(fields[number]):
            ends |= (signal == _LAST).any(1)
            ends[:-1] |= (signal[1:] == _FIRST).any(1)
        else:
            ends |= (signal != 0).any(1)
    start, stop, _ = episodes.find_start_stop_traj(end=ends, at_capacity=False)
    return start[:, 0].tolist(), stop[:, 0].tolist()


class Queried(Protocol):
    """What a query asks of a buffer."""

    @property
    def storage(self) -> Storage:
        """Its rows."""

    @property
    def transform(self) -> Compose:
        """What batches go through."""


class Query:
    """The stored trajectories of which a predicate is true: ``rb.query(predicate=None, *, trajectory_key=None)``.

    Args:
        predicate: made with :data:`engram.traj`, ``traj.reward.sum() > 100``; then only the fields that it names are read of all
            trajectories, and all fields of those of which it is true. Or any callable that takes a :class:`Trajectory`. None: all.
        trajectory_key: the field with trajectory ids. Default: ``("collector", "traj_ids")``, ``"traj_ids"`` or ``"episode"``.
            A trajectory ends with its id, and at every stored end: ``("next", "done")``, ``"terminated"``, ``"truncated"``, or a step
            type. Where no id is stored, a warning says so.

    Returns a list of :class:`Trajectory`, copies, oldest first; lane by lane, and with ``ndim > 1`` column by column. Each is around a
    TensorDict, whatever the rows are. One that goes on across the end of the storage is whole; one that a writer overwrites during the
    call is left out. Read transforms are applied to each of the result; before, to decide, only those that write (``out_keys``) what
    the predicate reads, all up to one that does not say what it writes, and all for a callable. An empty buffer has none.

    Raises:
        TypeError: rows have no fields, or are several steps each; the predicate is none, or compares steps without ``any()`` or
            ``all()``.
        KeyError: no such field, or nothing that tells trajectories apart. RuntimeError: the buffer is a connection.

    Cost: the first call scans the rows once for their trajectories; afterwards O(trajectories + steps that are read). Predicates
    of :data:`engram.traj` are evaluated for all trajectories at once, without a call for each.

    >>> import torch
    >>> from engram import LazyTensorStorage, TensorDictReplayBuffer, traj
    >>> from tensordict import TensorDict
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend(TensorDict({"episode": torch.arange(9) // 3, ("next", "reward"): torch.arange(9.0)}, [9]))
    >>> [int(it.episode[0]) for it in rb.query((traj.reward.sum() > 5) & (traj.length == 3))]
    [1, 2]
    """

    def __init__(self, buffer: Queried) -> None:
        self._buffer = buffer

    def __call__(self, predicate: Predicate = None, *, trajectory_key: object = None) -> list[Trajectory]:
        """As the class says."""
        reject(predicate, "query")
        storage = self._buffer.storage
        if storage.traits.is_remote:
            raise RuntimeError(
                "query: expected rows that this process reads, got a connection. Call it where the store is, or open its folder: "
                "ReplayBuffer.open(…, readonly=True)."
            )
        if not len(storage):
            return []
        if not storage.traits.has_fields:
            return self._of_list(storage, predicate, trajectory_key)
        memory = storage.memory
        if memory is None or memory.schema.structure.kind not in episodes.NAMED or memory.schema.structure.batch:
            raise TypeError(
                f"query: expected rows with fields, of one step each, got those of a {type(storage).__name__} with "
                f"{'rows elsewhere' if memory is None else memory.schema.structure.kind}."
            )
        stored = Stored(storage, memory, trajectory_key)
        known = predicate if isinstance(predicate, TrajectoryPredicate) else None
        keys = None if known is None else known.required_keys()
        if known is None or keys is None or self._buffer.transform.needed(keys).reads:
            return self._chosen(stored.read(), predicate)
        segments = stored.segments(keys)
        if len(segments.lengths):
            stored.keep((known.many or _one_by_one(known))(segments))
        return self._chosen(stored.read(), None)

    def _chosen(self, parts: Sequence[TensorDictBase], predicate: Predicate) -> list[Trajectory]:
        """The trajectories of which it is true, through the transforms. The others only go through those that it needs."""
        from engram.around.trajectory import Trajectory

        every, found = self._buffer.transform, []
        keys = predicate.required_keys() if isinstance(predicate, TrajectoryPredicate) else None
        needed = every if keys is None else every.needed(keys)
        partly = len(needed) < len(every) and every.reads
        for data in parts:
            shown = Trajectory(needed.forward(data.clone() if partly else data))
            if predicate is None or holds(predicate, shown):
                found.append(Trajectory(every.forward(data)) if partly else shown)
        return found

    def _of_list(self, storage: Storage, predicate: Predicate, trajectory_key: object) -> list[Trajectory]:
        """The same of a list's items, which lie in memory as they are."""
        from tensordict import TensorDict, TensorDictBase

        extent = storage.extent()
        rows = extent.rows(torch.arange(extent.size, device="cpu"))
        items = [TensorDict(item, []) if isinstance(item, dict) else item for item in storage[rows]]
        full = extent.filled[0] == extent.capacity
        if not all(isinstance(item, TensorDictBase) and not item.batch_dims for item in items):
            raise TypeError("query: expected TensorDicts or dicts of one step each, got others in the list.")
        order = (rows - extent.seam[0] * full).remainder(extent.capacity).argsort()
        parts = torch.tensor_split(order, (rows[order].diff() % extent.capacity != 1).nonzero().flatten() + 1)
        stacks = [torch.stack([items[i] for i in part.tolist()]) for part in parts]  # void rows are between them
        found = [it.data for stack in stacks for it in iter_trajectories(stack, trajectory_key)]
        return self._chosen([data.clone() for data in found] if self._buffer.transform.reads else found, predicate)


def _one_by_one(predicate: TrajectoryPredicate) -> Callable[[Segments], torch.Tensor]:
    """Asks it of each trajectory, of which it gets the fields that were read."""

    def of_many(segments: Segments) -> torch.Tensor:
        from engram.around.trajectory import Trajectory

        return torch.tensor([predicate(Trajectory(data)) for data in segments.split()], dtype=torch.bool, device="cpu")

    return of_many


class Stored:
    """The trajectories of a store at one moment: which rows they have, and the tickets of these."""

    def __init__(self, storage: Storage, memory: Store, trajectory_key: object) -> None:
        self._storage, self._memory = storage, memory
        self._numbers = episodes.numbers_by_path(memory)
        boundaries = boundaries_of(memory.schema.fields, self._numbers, trajectory_key, "query")
        name = "-".join(["query", "id" if boundaries.ids else "end", *map(str, boundaries.which)])
        runs = torch.from_numpy(episodes.Episodes(memory, boundaries, name).table().runs().reshape(-1, 3))
        self._lengths = runs[:, 2]
        self._rows = self._rows_of(runs)
        self._tickets = storage.tickets_of(self._rows)
        self._drop((self._tickets < 0).nonzero().flatten())

    def _rows_of(self, runs: torch.Tensor) -> torch.Tensor:
        """int64 ``[N]``: of all steps, trajectory by trajectory. ``runs``: track, first place and length of each."""
        width = math.prod(self._memory.schema.columns)
        steps = self._memory.lane_length // width
        each = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), runs[:, 2])
        step = torch.arange(len(each), device="cpu") - (runs[:, 2].cumsum(0) - runs[:, 2])[each]
        track, place = runs[:, 0][each], runs[:, 1][each] + step
        return track // width * self._memory.lane_length + place % steps * width + track % width

    def _drop(self, steps: torch.Tensor | list[int]) -> torch.Tensor:
        """Leave out the trajectories of some steps. As :meth:`keep`."""
        kept = torch.ones(len(self._lengths), dtype=torch.bool, device="cpu")
        kept[torch.repeat_interleave(torch.arange(len(kept), device="cpu"), self._lengths)[steps]] = False
        return self.keep(kept)

    def keep(self, which: torch.Tensor) -> torch.Tensor:
        """Go on with some trajectories: bool ``[K]``. Which steps those have: bool ``[N]``."""
        steps = torch.repeat_interleave(which, self._lengths)
        self._lengths, self._rows, self._tickets = self._lengths[which], self._rows[steps], self._tickets[steps]
        return steps

    def _columns(self, which: list[int] | None) -> list[torch.Tensor]:
        """Fields of all steps; trajectories of which a row has moved are left out."""
        columns, moved = self._memory.read(self._rows, expected=self._tickets, which=which)
        if moved:
            steps = self._drop(moved)
            columns = [column[steps] for column in columns]
        return columns

    def segments(self, keys: frozenset[object]) -> Segments:
        """The fields of these keys. Raises ``KeyError``."""
        paths: list[FieldPath] = []
        for key in keys:
            path = (key,) if isinstance(key, str) else cast("FieldPath", key)
            found = [one for one in (path, ("next", *path)) if one in self._numbers][:1]
            if not found or (len(path) > 1 and found[0] != path):
                raise KeyError(missing(path, self._numbers))
            paths += found
        which = [self._numbers[path] for path in paths]
        columns = self._columns(which) if which else []
        return Segments(dict(zip(paths, (column.cpu() for column in columns), strict=True)), self._lengths)

    def read(self) -> list[TensorDictBase]:
        """All fields of each trajectory."""
        columns = self._columns(None)
        data: object = self._storage.batch(columns, len(self._rows))
        if self._storage.gets:
            data = self._storage.got(self._rows, data)
        if tensordicts.is_tensorclass(data) or not is_tensordict(data):
            entries = {public(key): value for key in self._numbers if (value := find_field(data, key)) is not None}
            data = tensordicts.tensordict_type()(entries, [len(self._rows)])
        return list(cast("TensorDictBase", data).split(self._lengths.tolist())) if len(self._lengths) else []
