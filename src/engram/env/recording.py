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

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch

from engram._tensordict import wrap
from engram.env.nesting import BOOL, FLOAT32, as_number, conformed, copied, has_tuple, of_each, pick, put, taken
from engram.field_paths import checked_path, public
from engram.storages import DefaultStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from tensordict import TensorDict
    from torch import Tensor

    from engram.env.nesting import Nested, Spec
    from engram.field_paths import FieldPath
    from engram.persist.roles import Roles
    from engram.storages import Storage

    Key: TypeAlias = str | tuple[str, ...]
    #: Names under which fields are stored, by the usual ones.
    Names: TypeAlias = Mapping[str, Key] | Mapping[tuple[str, ...], Key] | Mapping[Key, Key]
    Mask: TypeAlias = NDArray[np.bool_]
    #: Names of fields, nested, with a number for each field.
    Form: TypeAlias = dict[str, int | "Form"]

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
    """What a recording asks of a buffer."""

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
    """Where rows of environments go."""

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
        for at, (*above, name) in enumerate(paths.values()):
            entries = self._form
            for part in above:
                entries = entries.setdefault(part, {})  # type: ignore[assignment] # names do not collide
            entries[name] = at
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
            f"record: expected a tensor storage, such as LazyTensorStorage(max_size, lanes={count}), got {got}."
        )
    if len(lanes) != count or len(set(lanes.tolist())) != count:
        raise ValueError(
            f"record: lane: expected a lane of its own for each of {count} environments, got {lanes.tolist()}. Make the storage with "
            f"lanes={count}, or name {count} of its {storage.lanes} lanes with lane=."
        )
