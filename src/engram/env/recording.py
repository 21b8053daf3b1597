"""Steps of environments become rows: what is the same for all kinds of environments.

An adapter calls, for ``n`` environments that are stepped together, one to a lane::

    begin(observation)                        after a reset
    acting = act()                            before a step
    write(acting, action, following, …)       after it
    go_on(observation, running, acting)       what the next actions answer to

Observations and actions have a leading dimension ``n``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from engram._tensordict import wrap
from engram.env.nesting import conformed, copied, has_tuple, pick, put, taken
from engram.field_paths import checked_path, public

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    #: Begins to record some number of environments with such observations and actions.
    Begin: TypeAlias = Callable[[int, Spec, Spec], "Recording"]
    Mask: TypeAlias = NDArray[np.bool_]

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
#: Those of them that are one number; TensorDicts have them with a dimension of 1.
_NUMBERS = FIELDS[3:]
_FLAGS = FIELDS[4:]


class Recordable(Protocol):
    """What a recording asks of a buffer."""

    @property
    def storage(self) -> Storage:
        """What holds the rows."""

    def extend(self, data: object, *, lane: NDArray[np.int64]) -> Tensor:
        """Write rows, one to each of these lanes."""

    def end_trajectory(self, lane: NDArray[np.int64], *, roles: Roles) -> Tensor:
        """Make the newest step of each of these lanes an end."""


class Recording:
    """Writes the steps of ``n`` environments that are stepped together, those of each to a lane of its own.

    Args:
        buffer: where rows go. The trajectories that are open in the lanes end at once: their episodes will not go on.
        lanes: int64 ``[n]``.
        count: ``n``.
        spaces: dtypes of an observation and of an action of one environment.
        names: under which fields are stored.
        tensordicts: rows are TensorDicts; else dicts.

    Raises:
        TypeError: a list storage, or one with ``ndim > 1``; tuples for TensorDicts. ValueError: not a lane per environment; names
            that collide. KeyError: a name for something that is not recorded. What the buffer raises that ends trajectories.
    """

    def __init__(
        self,
        buffer: Recordable,
        lanes: Tensor,
        count: int,
        spaces: tuple[Spec, Spec],
        names: Names | None,
        *,
        tensordicts: bool,
    ) -> None:
        _check(buffer.storage, lanes, count)
        if tensordicts and any(map(has_tuple, spaces)):
            raise TypeError(
                "record: a TensorDict holds no tuples, but a space of the environment is one: use a ReplayBuffer."
            )
        self._buffer = buffer
        self._lanes: NDArray[np.int64] = lanes.numpy().copy()  # the caller's
        self._observation_spec, self._action_spec = spaces
        paths = stored_paths(names)
        self._roles: Roles = {paths[flag]: flag[-1] for flag in _FLAGS}
        self._tensordicts = tensordicts
        #: Where each of :data:`FIELDS` is stored: the names above the last one, that one, and whether it gets a dimension of 1.
        self._places = [(path[:-1], path[-1], tensordicts and field in _NUMBERS) for field, path in paths.items()]
        self._none = np.zeros(count, np.bool_)
        self._before: Nested | None = None
        #: Whose next step is a row: it answers to what stands in ``_before``.
        self._running = self._none
        #: In whose lane the newest row is no end.
        self._open = np.zeros(count, np.bool_)
        buffer.end_trajectory(self._lanes, roles=self._roles)

    def begin(self, observation: object, which: Mask | None = None) -> None:
        """Environments were reset, ``which`` of them: bool ``[n]``, default all. Episodes that they were in end as truncations."""
        which = np.ones_like(self._running) if which is None else which
        found = conformed(self._observation_spec, observation, "observation")
        self._end(which)
        if self._before is None or which.all():
            self._before = copied(found)
        else:
            for i in which.nonzero()[0].tolist():
                put(self._before, i, pick(found, i))
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
        self, acting: Mask, action: object, following: object, reward: object, terminated: object, truncated: object
    ) -> Mask:
        """Write the step of the environments that were acting: whether the episode of each is over, bool ``[n]``.

        Args:
            acting: whose step is a row, bool ``[n]``. What is said of the others is passed over.
            action: taken.
            following: what was observed then, the last observation of an episode that is over.
            reward, terminated, truncated: ``[n]``.
        """
        ends = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        over: Mask = ends[0] | ends[1]
        rows = None if acting.all() else acting.nonzero()[0]
        if rows is None or len(rows):
            assert self._before is not None  # one that acts has begun
            values: tuple[Nested, ...] = (
                self._before,
                conformed(self._action_spec, action, "action"),
                conformed(self._observation_spec, following, "next observation"),
                np.asarray(reward, np.float32),
                *ends,
                over,
            )
            if rows is None:
                self._buffer.extend(self._rows(values, len(acting)), lane=self._lanes)
                self._open = ~over
            else:
                values = tuple(taken(value, rows) for value in values)
                self._buffer.extend(self._rows(values, len(rows)), lane=self._lanes[rows])
                self._open = np.where(acting, ~over, self._open)
        return over

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

    def _rows(self, values: tuple[Nested, ...], n: int) -> object:
        """A batch of ``n`` rows in the form of the buffer."""
        rows: dict[str, object] = {}
        for (above, name, widened), value in zip(self._places, values, strict=True):
            entries = rows
            for part in above:
                entries = entries.setdefault(part, {})  # type: ignore[assignment] # names do not collide
            entries[name] = value[:, None] if widened else value  # type: ignore[call-overload, index]
        return _as_tensordict(rows, torch.Size([n])) if self._tensordicts else rows


def _as_tensordict(entries: dict[str, object], size: torch.Size) -> TensorDict:
    """A TensorDict of arrays, which share its memory. Its constructor would check each of them, for 70 µs a step."""
    of = {
        name: _as_tensordict(one, size) if isinstance(one, dict) else torch.as_tensor(one)
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
    """Raise unless a storage and its lanes can take the steps of so many environments."""
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
