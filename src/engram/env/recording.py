"""Steps of environments become rows: what is the same for all kinds of environments.

The adapter of one environment calls a :class:`SingleRecording`, which writes rows one by one::

    begin(observation, infos)                 after a reset
    acted = act(action)                       before a step
    go_on(acted, observation, …)              after it

That of ``n`` environments that are stepped together, one to a lane, calls a :class:`VectorRecording`::

    begin(observation, told)                  after a reset
    acting = act()                            before a step
    write(acting, action, following, …)       after it
    go_on(observation, told, running, …)      what the next actions answer to

Its observations and actions have a leading dimension ``n``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from engram._support.field_paths import FieldPath, checked_path, public
from engram._support.tensordicts import add_fields, wrap
from engram.env.values import (
    BOOL,
    FLOAT32,
    Infos,
    Key,
    Notes,
    as_number,
    conformed,
    copied,
    every,
    fill,
    has_tuple,
    of_each,
    pick,
    put,
    some,
)
from engram.storages import DefaultStorage, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tensordict import TensorDict

    from engram.env.values import Array, Mask, Nested, Spec, Told
    from engram.saved.rows import Roles

Names: TypeAlias = Mapping[str, Key] | Mapping[tuple[str, ...], Key] | Mapping[Key, Key]
Form: TypeAlias = "dict[str, int | Form]"
Value: TypeAlias = "Nested | np.generic"
#: Of each environment whether its episode is terminated, truncated, and over.
Flags: TypeAlias = "tuple[Mask, Mask, Mask]"
#: What is recorded of a step.
_NEXT = ("observation", "reward", "terminated", "truncated", "done")
FIELDS: tuple[FieldPath, ...] = (("observation",), ("action",), *(("next", name) for name in _NEXT))
#: Those that are one number; TensorDicts have them with a dimension of 1.
_NUMBERS = slice(3, 7)
_FLAGS = range(4, 7)
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
    notes: Notes
    """What the agent supplies."""
    infos: Infos
    """Which entries of infos rows hold."""
    copies: Callable[[], bool]
    """Whether nothing holds what was written once that has returned: its memory may be used again."""


class PreparedRows:
    """Rows of one step whose memory and containers are used for every step.

    Args:
        values: of a step, in the order of the form.
        rows_of: makes rows of values, which share their memory.
    """

    def __init__(self, values: Sequence[Value], rows_of: Callable[[Sequence[Value]], object]) -> None:
        self._own = [copied(cast("Nested", value)) for value in values]
        self._rows = rows_of(self._own)

    def filled(self, values: Sequence[Value]) -> object:
        """The rows of a step; None: some value has another shape."""
        return self._rows if all(map(fill, self._own, values)) else None


class Recording:
    """Writes steps of ``n`` environments, those of each to a lane of its own.

    Args:
        target: where rows go. The trajectories that are open in the lanes end at once: their episodes will not go on.
        count: ``n``.
        observation, action: their dtypes in one environment.

    Raises:
        TypeError: a list storage, or one with ``ndim > 1``; tuples for TensorDicts. ValueError: not a lane per environment; fields
            that collide. KeyError: a name for something that is not recorded. What the buffer raises that ends trajectories.
    """

    def __init__(self, target: Target, count: int, observation: Spec, action: Spec) -> None:
        buffer, lanes, names, tensordicts, notes, infos, self._copies = target
        self._prepared: PreparedRows | None = None
        _check(buffer.storage, lanes, count)
        if tensordicts and any(map(has_tuple, (observation, action))):
            raise TypeError("record: a TensorDict holds no tuples, but a space of it is one: use a ReplayBuffer.")
        self._buffer = buffer
        self._lanes: NDArray[np.int64] = lanes.numpy().copy()  # the caller's
        self._observation_spec, self._action_spec = observation, action
        paths = stored_paths(names, [*notes.leaves, *infos.before, *infos.after])
        self._notes, self._infos = notes, infos
        self._has_extras = bool(notes.leaves or infos.before or infos.after)
        #: What was noted for the step under way, and entries of infos that came with the observation before it.
        self._noted: list[Array] = []
        self._told: list[Array] = []
        self._roles: Roles = {paths[at]: FIELDS[at][-1] for at in _FLAGS}
        self._tensordicts = tensordicts
        #: A row, with the places of its values: of :data:`FIELDS`, notes, and infos before and after the action.
        self._form: Form = {}
        add_fields(self._form, {path: at for at, path in enumerate(paths)})
        buffer.end_trajectory(self._lanes, roles=self._roles)

    def _rows(self, values: Sequence[Value], batch: torch.Size) -> object:
        """Rows in the form of the buffer, or one row, of values in the order of the form. They may be written again after the write."""
        if not (self._tensordicts and self._copies()):  # dicts are made faster than they are filled
            return self._new_rows(values, batch)
        rows = None if self._prepared is None else self._prepared.filled(values)
        if rows is None:
            rows = self._new_rows(values, batch)
            self._prepared = PreparedRows(values, lambda own: self._new_rows(own, batch))
        return rows

    def _new_rows(self, values: Sequence[Value], batch: torch.Size) -> object:
        if not self._tensordicts:
            return _filled(self._form, values)
        widened = [*values]
        widened[_NUMBERS] = [value[..., None] for value in values[_NUMBERS]]  # type: ignore[call-overload, index]
        return _as_tensordict(_filled(self._form, widened), batch)

    def _extras(self, told: Sequence[Told], *batch: int) -> list[Array]:
        """What rows of this step hold besides :data:`FIELDS`."""
        if not self._has_extras:
            return []
        return [*self._noted, *self._told, *self._infos.read(self._infos.after, told, *batch)]


class SingleRecording(Recording):
    """Writes the steps of one environment, each with one ``add``. Arguments and errors are those of :class:`Recording`."""

    def __init__(self, target: Target, observation: Spec, action: Spec) -> None:
        super().__init__(target, 1, observation, action)
        self._notes.belong_to()
        self._lane = int(self._lanes[0])
        self._before: Nested | None = None
        #: Whether the next step is a row: it answers to ``_before``.
        self._running = False
        #: Whether the newest row is no end.
        self._open = False

    def begin(self, observation: object, infos: object) -> None:
        """The environment was reset. An episode that it was in ends as a truncation. Notes for its next step are forgotten."""
        self._notes.take(needed=False)
        found = conformed(self._observation_spec, observation, "observation")
        told = self._infos.read(self._infos.before, [(infos, ...)])
        self._end()
        self._before, self._told, self._running = copied(found), told, True

    def act(self, action: object) -> Nested | None:
        """Before a step: a copy of the action, which the step may change in place; None if the step is no row.

        Later ones are none either, until :meth:`go_on`. So if the step raises, what comes later does not seem to follow what was
        before.
        """
        kept = copied(conformed(self._action_spec, action, "action")) if self._running else None
        self._noted = self._notes.take(needed=self._running)
        self._running = False
        return kept

    def go_on(
        self, acted: Nested | None, seen: object, reward: object, terminated: object, truncated: object, infos: object
    ) -> None:
        """After a step: write it, if it is a row. What was observed is what the next action answers to, unless the episode is over.

        Args:
            acted: what :meth:`act` returned.
            observation: the last one of an episode that is over.
            reward, terminated, truncated, infos: one each.
        """
        following = conformed(self._observation_spec, seen, "observation")
        ends = np.bool_(as_number(terminated)), np.bool_(as_number(truncated))  # faster than arrays
        over = ends[0] | ends[1]
        if acted is not None:
            assert self._before is not None  # one that acts has begun
            extras = self._extras([(infos, ...)])
            values = (self._before, acted, following, np.float32(as_number(reward)), *ends, over, *extras)
            self._buffer.add(self._rows(values, _ONE), lane=self._lane)
            self._open = not over
        elif not over:
            self._end()
        if not over:
            self._told = self._infos.read(self._infos.before, [(infos, ...)])
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
        self._notes.belong_to(count)
        self._size = torch.Size([count])
        self._none = np.zeros(count, np.bool_)
        #: The mask of all environments: :meth:`act` returns this very one if the step is a row of each.
        self.everyone = np.ones(count, np.bool_)
        self._before: Nested | None = None
        #: Whose next step is a row: it answers to what stands in ``_before``.
        self._running = self._none
        #: In whose lane the newest row is no end.
        self._open = np.zeros(count, np.bool_)

    def begin(self, observation: object, told: Sequence[Told], which: Mask) -> None:
        """Environments were reset, ``which`` of them: bool ``[n]``. Episodes that they were in end as truncations.

        Notes for the next step are forgotten: those of environments that were reset answer to what is over.
        """
        self._notes.take(needed=False)
        found = conformed(self._observation_spec, observation, "observation")
        entries = self._infos.read(self._infos.before, told, len(which))
        self._end(which)
        for old, new in zip(self._told, entries, strict=False):
            new[~which] = old[~which]
        self._told = entries
        if self._before is None or which.all():
            self._before = copied(found)
        else:
            for i in which.nonzero()[0].tolist():
                put(self._before, i, cast("Nested", pick(found, i)))
        self._running = self._masked(self._running | which)

    def _masked(self, mask: Mask) -> Mask:
        """A mask, as :attr:`everyone` if it is of all."""
        return self.everyone if every(mask) else mask

    def act(self) -> Mask:
        """Of which environments the next step is a row: bool ``[n]``. Of none, until :meth:`go_on`.

        So if the step raises, what comes later does not seem to follow what was before.
        """
        acting = self._running
        self._noted = self._notes.take(needed=some(acting))
        self._running = self._none
        return acting

    def kept(self, action: object) -> Nested:
        """A copy of what is taken, ``[n, ...]``."""
        return copied(conformed(self._action_spec, action, "action"))

    def write(
        self, acting: Mask, action: Nested, following: object, reward: object, flags: Flags, told: Sequence[Told]
    ) -> None:
        """Write the step of the environments that were acting.

        Args:
            acting: whose step is a row, bool ``[n]``. What is said of the others is passed over.
            action: what :meth:`kept` returned, or arrays of its dtypes.
            following: what was observed then, the last observation of an episode that is over.
            reward: ``[n]``.
            flags: as :func:`flags_of` returns them.
            told: infos of the step, of all that were acting.

        Raises ``ValueError``: rewards of another number of environments.
        """
        over = flags[-1]
        if some(acting):
            assert self._before is not None  # one that acts has begun
            values: tuple[Nested, ...] = (
                self._before,
                action,
                conformed(self._observation_spec, following, "next observation"),
                of_each(reward, FLOAT32, len(acting), "step: reward"),
                *flags,
                *self._extras(told, len(acting)),
            )
            if acting is self.everyone:
                self._buffer.extend(self._rows(values, self._size), lane=self._lanes)
                self._open = ~over
            else:
                rows = acting.nonzero()[0]
                values = tuple(cast("Nested", pick(value, rows)) for value in values)
                self._buffer.extend(self._new_rows(values, torch.Size([len(rows)])), lane=self._lanes[rows])
                self._open = np.where(acting, ~over, self._open)

    def go_on(self, observation: object, told: Sequence[Told], running: Mask, acting: Mask) -> None:
        """What the next actions answer to, of the environments that are ``running``. Of those ``acting`` the last step was a row."""
        if acting is not self.everyone:
            self._end(running & ~acting)
        self._told = self._infos.read(self._infos.before, told, len(running))
        self._before = copied(conformed(self._observation_spec, observation, "observation"))
        self._running = running if running is self.everyone else self._masked(running)

    def _end(self, which: Mask) -> None:
        """End what is open in the lanes of these environments."""
        left = which & self._open
        if left.any():
            self._buffer.end_trajectory(self._lanes[left], roles=self._roles)
            self._open = self._open & ~left


def flags_of(terminated: object, truncated: object, n: int) -> Flags:
    """Whether each of ``n`` episodes was terminated, was truncated, and is over. Raises ``ValueError``: flags of another number."""
    ends = of_each(terminated, BOOL, n, "step: terminated"), of_each(truncated, BOOL, n, "step: truncated")
    return *ends, ends[0] | ends[1]


def _filled(form: Form, values: Sequence[object]) -> dict[str, object]:
    """Rows of this form."""
    return {name: values[at] if isinstance(at, int) else _filled(at, values) for name, at in form.items()}


def _as_tensordict(entries: dict[str, object], size: torch.Size) -> TensorDict:
    """A TensorDict of arrays, which share its memory. Its constructor would check each of them, for 70 µs a step."""
    of = {k: _as_tensordict(it, size) if isinstance(it, dict) else torch.from_numpy(it) for k, it in entries.items()}
    return wrap(of, size, None)


def stored_paths(names: Names | None, extras: Iterable[FieldPath]) -> list[FieldPath]:
    """Where each of :data:`FIELDS` is stored, then extras. Raises ``KeyError``, ``TypeError``, ``ValueError``: bad ``names``."""
    paths = {field: field for field in FIELDS}
    for key, name in dict(names or {}).items():
        field = checked_path(key, "record: names")
        if field not in paths:
            raise KeyError(f"record: names: expected some of {[public(one) for one in FIELDS]}, got {public(field)!r}.")
        paths[field] = checked_path(name, f"record: names: {key!r}")
    stored = [*paths.values(), *extras]
    for i, one in enumerate(stored):
        for other in stored[:i]:
            if one[: len(other)] == other[: len(one)]:
                raise ValueError(
                    f"record: names: expected names that do not collide, got {public(other)!r} and {public(one)!r}. Fields of store= and "
                    "info_keys= need names of their own, too."
                )
    return stored


def _check(storage: Storage, lanes: Tensor, count: int) -> None:
    """Raise unless a storage and its lanes can take the steps of so many environments. The default storage takes them as tensors."""
    if isinstance(storage, DefaultStorage) and count == 1:
        storage.become_tensors()
    if not storage.traits.has_fields or storage.ndim > 1:
        got = type(storage).__name__ if storage.ndim == 1 else f"ndim={storage.ndim}"
        raise TypeError(f"record: expected a LazyTensorStorage(max_size, lanes={count}) or one of tensors, got {got}.")
    if len(lanes) != count or len(set(lanes.tolist())) != count:
        raise ValueError(
            f"record: lane: expected a lane of its own for each of {count} environments, got {lanes.tolist()}. Make the storage with "
            f"lanes={count}, or name {count} of its {storage.lanes} lanes with lane=."
        )
