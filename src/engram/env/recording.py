"""Steps of environments become rows: what is the same for all kinds of environments.

The adapter of one environment calls a :class:`SingleRecording`, which writes rows one by one::

    begin(observation)                        after a reset
    acted = act(action)                       before a step
    go_on(acted, observation, …)              after it

That of ``n`` environments that are stepped together, one to a lane, calls a :class:`VectorRecording`::

    begin(observation)                        after a reset
    acting = act()                            before a step
    write(acting, action, following, …)       after it
    go_on(observation, running, acting)       what the next actions answer to

Its observations and actions have a leading dimension ``n``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, SupportsFloat, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from engram._support.field_paths import FieldPath, checked_path, public
from engram._support.tensordicts import add_fields, wrap
from engram.storages import DefaultStorage, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tensordict import TensorDict

    from engram.saved.rows import Roles

Key: TypeAlias = str | tuple[str, ...]
Names: TypeAlias = Mapping[str, Key] | Mapping[tuple[str, ...], Key] | Mapping[Key, Key]
Mask: TypeAlias = "NDArray[np.bool_]"
Form: TypeAlias = "dict[str, int | Form]"
Array: TypeAlias = "NDArray[np.generic]"
Nested: TypeAlias = "Array | dict[str, Nested] | tuple[Nested, ...]"
Spec: TypeAlias = "np.dtype[np.generic] | dict[str, Spec] | tuple[Spec, ...]"
#: What is recorded of a step.
FIELDS: tuple[FieldPath, ...] = (
    ("observation",),
    ("action",),
    ("next", "observation"),
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
)
#: From which on they are one number; TensorDicts have them with a dimension of 1.
_FIRST_NUMBER = 3
_FLAGS = FIELDS[4:]
_ONE = torch.Size()


class Recordable(Protocol):
    """A buffer, as a recording needs it."""

    @property
    def storage(self) -> Storage:
        """What holds the rows."""

    def add(self, data: object, *, lane: int) -> object:
        """Write one row to a lane."""

    def extend(self, data: object, *, lane: NDArray[np.int64]) -> Tensor:
        """Write rows, one to each of these lanes."""

    def end_trajectory(self, lane: NDArray[np.int64], *, roles: Roles) -> Tensor:
        """Make the newest step of each of these lanes an end."""


class Target(NamedTuple):
    """The buffer and the lanes that rows of environments go to."""

    buffer: Recordable
    lanes: Tensor
    """int64 ``[n]``, one for each environment."""
    names: Names | None
    """Under which fields are stored."""
    tensordicts: bool
    """Rows are TensorDicts; else dicts."""


class Recording:
    """Writes steps of ``n`` environments, those of each to a lane of its own.

    Args:
        target: where rows go. The trajectories that are open in the lanes end at once: their episodes will not go on.
        count: ``n``.
        observation, action: their dtypes in one environment.

    Raises:
        TypeError: a list storage, or one with ``ndim > 1``; tuples for TensorDicts. ValueError: not a lane per environment; names
            that collide. KeyError: a name for something that is not recorded. What the buffer raises that ends trajectories.
    """

    def __init__(self, target: Target, count: int, observation: Spec, action: Spec) -> None:
        buffer, lanes, names, tensordicts = target
        _check(buffer.storage, lanes, count)
        if tensordicts and any(map(has_tuple, (observation, action))):
            raise TypeError(
                "record: a TensorDict holds no tuples, but a space of the environment is one: use a ReplayBuffer."
            )
        self._buffer = buffer
        self._lanes: NDArray[np.int64] = lanes.numpy().copy()  # the caller's
        self._observation_spec, self._action_spec = observation, action
        paths = stored_paths(names)
        self._roles: Roles = {paths[flag]: flag[-1] for flag in _FLAGS}
        self._tensordicts = tensordicts
        #: A row, with the places of :data:`FIELDS` in them for values.
        self._form: Form = {}
        add_fields(self._form, {path: at for at, path in enumerate(paths.values())})
        buffer.end_trajectory(self._lanes, roles=self._roles)

    def _rows(self, values: Sequence[Nested | np.generic], batch: torch.Size) -> object:
        """Rows in the form of the buffer, or one row, of values in the order of :data:`FIELDS`."""
        if not self._tensordicts:
            return _filled(self._form, values)
        widened = [value[..., None] for value in values[_FIRST_NUMBER:]]  # type: ignore[call-overload, index]
        return _as_tensordict(_filled(self._form, [*values[:_FIRST_NUMBER], *widened]), batch)


class SingleRecording(Recording):
    """Writes the steps of one environment, each with one ``add``. Arguments and errors are those of :class:`Recording`."""

    def __init__(self, target: Target, observation: Spec, action: Spec) -> None:
        super().__init__(target, 1, observation, action)
        self._lane = int(self._lanes[0])
        self._before: Nested | None = None
        #: Whether the next step is a row: it answers to ``_before``.
        self._running = False
        #: Whether the newest row is no end.
        self._open = False

    def begin(self, observation: object) -> None:
        """The environment was reset. An episode that it was in ends as a truncation."""
        found = conformed(self._observation_spec, observation, "observation")
        self._end()
        self._before, self._running = copied(found), True

    def act(self, action: object) -> Nested | None:
        """Before a step: a copy of the action, which the step may change in place; None if the step is no row.

        Later ones are none either, until :meth:`go_on`. So if the step raises, what comes later does not seem to follow what was
        before.
        """
        if not self._running:
            return None
        self._running = False
        return copied(conformed(self._action_spec, action, "action"))

    def go_on(
        self, acted: Nested | None, observation: object, reward: object, terminated: object, truncated: object
    ) -> None:
        """After a step: write it, if it is a row. What was observed is what the next action answers to, unless the episode is over.

        Args:
            acted: what :meth:`act` returned.
            observation: the last one of an episode that is over.
            reward, terminated, truncated: one each.
        """
        following = conformed(self._observation_spec, observation, "observation")
        ends = np.bool_(as_number(terminated)), np.bool_(as_number(truncated))  # faster than arrays
        over = ends[0] | ends[1]
        if acted is not None:
            assert self._before is not None  # one that acts has begun
            values = (self._before, acted, following, np.float32(as_number(reward)), *ends, over)
            self._buffer.add(self._rows(values, _ONE), lane=self._lane)
            self._open = not over
        elif not over:
            self._end()
        self._before, self._running = copied(following), not over

    def _end(self) -> None:
        """End what is open in the lane."""
        if self._open:
            self._buffer.end_trajectory(self._lanes, roles=self._roles)
            self._open = False


class VectorRecording(Recording):
    """Writes the steps of ``n`` environments that are stepped together. Arguments and errors are those of :class:`Recording`."""

    def __init__(self, target: Target, count: int, observation: Spec, action: Spec) -> None:
        super().__init__(target, count, observation, action)
        self._none = np.zeros(count, np.bool_)
        self._before: Nested | None = None
        #: Whose next step is a row: it answers to what stands in ``_before``.
        self._running = self._none
        #: In whose lane the newest row is no end.
        self._open = np.zeros(count, np.bool_)

    def begin(self, observation: object, which: Mask | None = None) -> None:
        """Environments were reset, ``which`` of them: bool ``[n]``, default all. Episodes that they were in end as truncations."""
        which = np.ones_like(self._running) if which is None else which
        found = conformed(self._observation_spec, observation, "observation")
        self._end(which)
        if self._before is None or which.all():
            self._before = copied(found)
        else:
            for i in which.nonzero()[0].tolist():
                put(self._before, i, cast("Nested", pick(found, i)))
        self._running = self._running | which

    def act(self) -> Mask:
        """Of which environments the next step is a row: bool ``[n]``. Of none, until :meth:`go_on`.

        So if the step raises, what comes later does not seem to follow what was before.
        """
        acting, self._running = self._running, self._none
        return acting

    def kept(self, action: object) -> Nested:
        """A copy of what is taken, ``[n, ...]``."""
        return copied(conformed(self._action_spec, action, "action"))

    def write(
        self, acting: Mask, action: object, following: object, reward: object, flags: tuple[Mask, Mask, Mask]
    ) -> None:
        """Write the step of the environments that were acting.

        Args:
            acting: whose step is a row, bool ``[n]``. What is said of the others is passed over.
            action: taken.
            following: what was observed then, the last observation of an episode that is over.
            reward: ``[n]``.
            flags: as :func:`flags_of` returns them.

        Raises ``ValueError``: rewards of another number of environments.
        """
        over = flags[-1]
        rows = None if acting.all() else acting.nonzero()[0]
        if rows is None or len(rows):
            assert self._before is not None  # one that acts has begun
            values: tuple[Nested, ...] = (
                self._before,
                conformed(self._action_spec, action, "action"),
                conformed(self._observation_spec, following, "next observation"),
                of_each(reward, FLOAT32, len(acting), "step: reward"),
                *flags,
            )
            if rows is None:
                self._buffer.extend(self._rows(values, torch.Size([len(acting)])), lane=self._lanes)
                self._open = ~over
            else:
                values = tuple(taken(value, rows) for value in values)
                self._buffer.extend(self._rows(values, torch.Size([len(rows)])), lane=self._lanes[rows])
                self._open = np.where(acting, ~over, self._open)

    def go_on(self, observation: object, running: Mask, acting: Mask) -> None:
        """What the next actions answer to, of the environments that are ``running``. Of those ``acting`` the last step was a row."""
        if not acting.all():
            self._end(running & ~acting)
        self._before = copied(conformed(self._observation_spec, observation, "observation"))
        self._running = running

    def _end(self, which: Mask) -> None:
        """End what is open in the lanes of these environments."""
        left = which & self._open
        if left.any():
            self._buffer.end_trajectory(self._lanes[left], roles=self._roles)
            self._open &= ~left


def flags_of(terminated: object, truncated: object, n: int) -> tuple[Mask, Mask, Mask]:
    """Whether each of ``n`` episodes was terminated, was truncated, and is over. Raises ``ValueError``: flags of another number."""
    ends = of_each(terminated, BOOL, n, "step: terminated"), of_each(truncated, BOOL, n, "step: truncated")
    return *ends, ends[0] | ends[1]


def _filled(form: Form, values: Sequence[object]) -> dict[str, object]:
    """Rows of this form."""
    return {name: values[at] if isinstance(at, int) else _filled(at, values) for name, at in form.items()}


def _as_tensordict(entries: dict[str, object], size: torch.Size) -> TensorDict:
    """A TensorDict of arrays, which share its memory. Its constructor would check each of them, for 70 µs a step."""
    of = {
        name: _as_tensordict(one, size) if isinstance(one, dict) else torch.from_numpy(one)
        for name, one in entries.items()
    }
    return wrap(of, size, None)


def stored_paths(names: Names | None) -> dict[FieldPath, FieldPath]:
    """Where each of :data:`FIELDS` is stored. Raises ``KeyError``, ``TypeError``, ``ValueError``: bad ``names``."""
    paths = {field: field for field in FIELDS}
    for key, name in dict(names or {}).items():
        field = checked_path(key, "record: names")
        if field not in paths:
            raise KeyError(f"record: names: expected some of {[public(one) for one in FIELDS]}, got {public(field)!r}.")
        paths[field] = checked_path(name, f"record: names: {key!r}")
    stored = list(paths.values())
    for i, one in enumerate(stored):
        for other in stored[:i]:
            if one[: len(other)] == other[: len(one)]:
                raise ValueError(
                    f"record: names: expected names that do not collide, got {public(other)!r} and {public(one)!r}."
                )
    return paths


def _check(storage: Storage, lanes: Tensor, count: int) -> None:
    """Raise unless a storage and its lanes can take the steps of so many environments. The default storage takes them as tensors."""
    if isinstance(storage, DefaultStorage) and count == 1:
        storage.become_tensors()
    if not storage.traits.has_fields or storage.ndim > 1:
        got = type(storage).__name__ if storage.ndim == 1 else f"ndim={storage.ndim}"
        raise TypeError(
            f"record: expected a LazyTensorStorage(max_size, lanes={count}) or another of tensors, got {got}."
        )
    if len(lanes) != count or len(set(lanes.tolist())) != count:
        raise ValueError(
            f"record: lane: expected a lane of its own for each of {count} environments, got {lanes.tolist()}. Make the storage with "
            f"lanes={count}, or name {count} of its {storage.lanes} lanes with lane=."
        )


S = TypeVar("S", bound=np.generic)
BOOL, FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
#: Kinds of dtypes that are numbers, and those of whole ones.
_NUMBERS, _WHOLE = "biufc", "biu"


def checked_dtype(dtype: object, field: str, what: object) -> np.dtype[np.generic]:
    """The dtype of rows of a ``field``. Raises ``TypeError``: it has none of numbers; ``what`` says what it is."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS:
        raise TypeError(f"record: {field}: expected numbers of a fixed shape, got {what}. Wrap the environment.")
    return dtype


def as_array(value: object) -> Array:
    """What an environment returned as an array, which shares its memory where it can.

    Args:
        value: an array, a number, a tensor (on any device, of any dtype, with or without gradient), or a list or tuple of these.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tensor):
        try:
            return value.numpy(force=True)
        except TypeError:  # bfloat16 and the like
            return value.float().numpy(force=True)
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor | list | tuple) for one in value):
        return np.stack([as_array(one) for one in value])
    return np.asarray(value)


def as_number(value: object) -> SupportsFloat:
    """A number that an environment returned: one of Python or NumPy. More than one number: an array of them."""
    if isinstance(value, (bool, int, float)):  # faster than a union
        return value
    array = as_array(value)
    return array.item() if array.size == 1 else array


def of_each(value: object, dtype: np.dtype[S], n: int, what: str) -> NDArray[S]:
    """What an environment returned for each of ``n`` environments, ``[n, ...]``. One number stands for all of them.

    Raises ``ValueError``: it is of another number of environments; says ``what`` it is.
    """
    if isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == (n,):
        return value
    array = as_array(value).astype(dtype, copy=False)
    if array.ndim == 0:
        return np.full(n, array)
    if len(array) != n:
        raise ValueError(f"{what}: expected one for each of {n} environments, got {list(array.shape)}.")
    return array[:, 0] if array.shape[1:] == (1,) else array


def conformed(spec: Spec, value: object, field: str) -> Nested:
    """A value as arrays of the dtypes of a spec; the same ones where they are that already.

    Raises:
        TypeError: it is nested in another way, or has fractions where the spec says whole numbers; names the entry.
    """
    if isinstance(spec, dict):
        if not isinstance(value, Mapping) or set(value.keys()) != spec.keys():
            got = list(value.keys()) if isinstance(value, Mapping) else type(value).__name__
            raise TypeError(f"record: {field}: expected a dict of {list(spec)}, got {got}.")
        return {key: conformed(entry, value[key], f"{field}[{key!r}]") for key, entry in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            raise TypeError(f"record: {field}: expected a tuple of {len(spec)}, got {type(value).__name__}.")
        return tuple(conformed(entry, value[i], f"{field}[{i}]") for i, entry in enumerate(spec))
    array = as_array(value)
    if array.dtype == spec:
        return array
    if array.dtype.kind not in (_WHOLE if spec.kind in _WHOLE else _NUMBERS):
        raise TypeError(f"record: {field}: expected {spec}, as the environment says, got {array.dtype}.")
    cast = array.astype(spec)
    if spec.kind in _WHOLE and not np.can_cast(array.dtype, spec) and not np.array_equal(cast, array):
        raise TypeError(f"record: {field}: expected {spec}, as the environment says, got {array.dtype} beyond it.")
    return cast


def has_tuple(spec: Spec) -> bool:
    """Whether a tuple is in it."""
    return isinstance(spec, tuple) or (isinstance(spec, dict) and any(map(has_tuple, spec.values())))


def mapped(change: Callable[..., Array], first: Nested, *others: Nested) -> Nested:
    """``change`` of the leaves that stand in the same place of several nestings."""
    if isinstance(first, dict):
        return {key: mapped(change, first[key], *(other[key] for other in others)) for key in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):
        return tuple(mapped(change, *entries) for entries in zip(first, *others, strict=True))
    return change(first, *others)


def copied(nested: Nested) -> Nested:
    """A copy."""
    return nested.copy() if isinstance(nested, np.ndarray) else mapped(np.array, nested)


def stacked(each: list[Nested]) -> Nested:
    """Those of ``n`` environments."""
    return mapped(lambda *leaves: np.stack(leaves), *each)


def taken(nested: Nested, which: NDArray[np.int64]) -> Nested:
    """Those of some environments."""
    return mapped(lambda leaf: leaf.take(which, 0), nested)


def pick(nested: object, i: int) -> object:
    """That of one environment: of arrays, tensors or lists of ``n``, or dicts and tuples of them."""
    if isinstance(nested, Mapping):
        return {key: pick(nested[key], i) for key in nested.keys()}  # noqa: SIM118 - a TensorDict iterates over its batch
    if isinstance(nested, tuple):
        return tuple(pick(one, i) for one in nested)
    return nested[i]  # type: ignore[index]


def put(nested: Nested, i: int, value: Nested) -> None:
    """Replace that of one environment, in place."""

    def replace(leaf: Array, new: Array) -> Array:
        leaf[i] = new
        return leaf

    mapped(replace, nested, value)
