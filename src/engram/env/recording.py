"""Steps of environments become rows: what is the same for all kinds of environments.

The adapter of one environment calls a :class:`SingleRecording`, which writes rows one by one::

    begin(observation, infos)                 after a reset
    act(action)                               before a step
    follow(observation, reward, …)            after it; if it refuses
    go_on(observation, reward, …)

That of ``n`` environments that are stepped together, one to a lane, calls a :class:`VectorRecording`::

    begin(observation, told)                  after a reset
    act(action)                               before a step
    follow(observation, reward, …)            after it; if it refuses
    write(following, reward, …)
    go_on(observation, told)                  what the next actions answer to

Its observations and actions have a leading dimension ``n``. A step of plain values is followed in one native call.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch

from engram._support import native
from engram._support.field_paths import FieldPath, checked_path, nested, public
from engram._support.tensordicts import wrap
from engram.env.values import (
    BOOL,
    FLOAT32,
    Infos,
    Key,
    Notes,
    as_number,
    conformed,
    copied,
    has_tuple,
    leaves_in,
    of_each,
    pick,
    put,
    some,
)
from engram.storages import DefaultStorage, Storage
from engram.store.memory import dlpack_specs

if TYPE_CHECKING:
    from tensordict import TensorDict

    from engram.env.values import Array, Mask, Nested, Spec, Told
    from engram.saved.rows import Roles
    from engram.store.store import Store

Names: TypeAlias = Mapping[str, Key] | Mapping[tuple[str, ...], Key] | Mapping[Key, Key]
Form: TypeAlias = "dict[str, int | Form]"
Value: TypeAlias = "Nested | np.generic"
Appending: TypeAlias = "Callable[[Any], Store | None]"
#: Of each environment whether its episode is terminated, truncated, and over.
Flags: TypeAlias = "tuple[Mask, Mask, Mask]"
#: What is recorded of a step.
_NEXT = ("observation", "reward", "terminated", "truncated", "done")
FIELDS: tuple[FieldPath, ...] = (("observation",), ("action",), *(("next", name) for name in _NEXT))
#: Those that are one number; TensorDicts have them with a dimension of 1.
_NUMBERS = slice(3, 7)
_FLAGS = range(4, 7)
_ONE = torch.Size()
_ONLY = np.ones(1, np.bool_)
#: What records to each lane of a storage in this process: the one whose environment was reset last.
_RECORDING: weakref.WeakKeyDictionary[Storage, weakref.WeakValueDictionary[int, Recording]] = (
    weakref.WeakKeyDictionary()
)


class Recordable(Protocol):
    """A buffer, as a recording needs it."""

    @property
    def storage(self) -> Storage:
        """What holds the rows."""

    def add(self, data: object, *, lane: int) -> object:
        """Write one row to a lane."""

    def extend(self, data: object, *, lane: np.typing.NDArray[np.int64]) -> torch.Tensor:
        """Write rows, one to each of these lanes."""

    def end_trajectory(self, lane: np.typing.NDArray[np.int64], *, roles: Roles) -> torch.Tensor:
        """Make the newest step of each of these lanes an end."""


class Target(NamedTuple):
    """The buffer and the lanes that rows of environments go to."""

    buffer: Recordable
    #: int64 ``[n]``, one for each environment.
    lanes: torch.Tensor
    #: Under which fields are stored.
    names: Names | None
    #: Rows are TensorDicts; else dicts.
    tensordicts: bool
    #: What the agent supplies.
    notes: Notes
    #: Which entries of infos rows hold.
    infos: Infos
    #: The store of a buffer, if rows may be appended to it natively: nothing else hears of writes, or changes them.
    appending: Appending
    #: The entry that the buffer may take for the priority of a row.
    priority: str | None


class Recording:
    """Writes steps of ``n`` environments, those of each to a lane of its own.

    Args:
        target: where rows go. The trajectories that are open in the lanes end at once: their episodes will not go on.
        observation, action: their dtypes in one environment.
        batch: ``(n,)`` of those that are stepped together, ``()`` of one that is not.
        autoreset: what ends a wait for a reset: ``"NextStep"``, the next step; ``"SameStep"``; ``"Disabled"``, a reset.

    Raises:
        TypeError: a list storage, or one with ``ndim > 1``; tuples for TensorDicts. ValueError: not a lane per environment; fields
            that collide. KeyError: a name for something that is not recorded. What the buffer raises that ends trajectories.
    """

    def __init__(
        self, target: Target, observation: Spec, action: Spec, batch: tuple[int, ...] = (), autoreset: str = "NextStep"
    ) -> None:
        buffer, lanes, names, tensordicts, notes, infos, self._appending, self._priority = target
        count = math.prod(batch)
        _check(buffer.storage, lanes, count)
        notes.batch = batch
        if tensordicts and any(map(has_tuple, (observation, action))):
            raise TypeError("record: a TensorDict holds no tuples, but a space of it is one: use a ReplayBuffer.")
        self._buffer = buffer
        self._lanes: np.typing.NDArray[np.int64] = lanes.numpy().copy()  # the caller's
        self._observation_spec, self._action_spec = observation, action
        self._batched, self._autoreset = bool(batch), autoreset
        self._paths = stored_paths(names, [*notes.leaves, *infos.before, *infos.after])
        self._notes, self._infos = notes, infos
        #: What was noted for the step under way, and entries of infos that came with the observation before it.
        self._noted: list[Array] = []
        self._told: list[Array] = []
        self._roles: Roles = {self._paths[at]: FIELDS[at][-1] for at in _FLAGS}
        self._tensordicts = tensordicts
        #: A row, with the places of its values: of :data:`FIELDS`, notes, and infos before and after the action.
        self._form = cast("Form", nested({path: at for at, path in enumerate(self._paths)}))
        self._before: Nested = ()
        #: What was done in the step under way, if that is a row.
        self.acted: Nested = ()
        #: Of each environment: whether its next step is a row, which answers to ``_before``; whether the step under way is; whether the
        #: newest row in its lane is no end; and whether it takes no step before it is reset.
        self._running, self.acting, self._open, self.waiting = np.zeros((4, count), np.bool_)
        #: Whether another recording has had one of the lanes since the last reset.
        self._displaced = False
        #: Writes the next step; None: Python does. And what was made for a store.
        self._steps: native.Steps | None = None
        self._made: tuple[Store | None, native.Steps | None] = None, None
        buffer.end_trajectory(self._lanes, roles=self._roles)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_steps": None, "_made": (None, None)}

    def act(self, action: object) -> None:
        """Before a step: keep a copy of the action, which the step may change in place, if the step is a row.

        Later ones are none, until it is followed. So if the step raises, what comes later does not seem to follow what was before.

        Raises ``RuntimeError``: another environment that is recorded to the same lane was reset since.
        """
        self._check_lanes()
        if self._notes.leaves:
            self._notes.check(needed=some(self._running))
        if self._steps is None or not self._steps.act(action):
            kept = copied(conformed(self._action_spec, action, "action")) if some(self._running) else self.acted
            self._steps, self.acted = None, kept
            self.acting[:], self._running[:] = self._running, False
        self._noted = self._notes.take(needed=some(self.acting)) if self._notes.leaves else []

    def _take_lanes(self) -> None:
        """Be what records to the lanes, in place of others. What is open there ends, also where who recorded it is gone."""
        recording = _RECORDING.setdefault(self._buffer.storage, weakref.WeakValueDictionary())
        taken = [lane for lane in self._lanes.tolist() if recording.get(lane) is not self]
        for lane in taken:
            recording.get(lane, self).give_way()
            recording[lane], self._displaced = self, False
        if taken:
            self._buffer.end_trajectory(np.array(taken), roles=self._roles)

    def give_way(self) -> None:
        """Another one records to a lane of this: take no step before the next reset."""
        self._displaced, self._steps = True, None

    def _check_lanes(self) -> None:
        """Raise ``RuntimeError`` where another recording has had one of the lanes since the last reset."""
        if self._displaced:
            raise RuntimeError(
                f"step: another environment that records to one of the lanes {self._lanes.tolist()} was reset after this one: their "
                "steps would be one trajectory. Make the buffer with lanes=n, and name a lane for each: record(env, lane=k)."
            )

    def follow(self, seen: object, reward: object, terminated: object, truncated: object) -> bool:
        """After a step: write it in one native call. False: nothing has changed, since Python must look at it."""
        store = self._appending(self._buffer)
        steps = self._steps if store is self._made[0] else None
        done = (seen, reward, terminated, truncated, *self._noted)
        return steps is not None and store is not None and steps.go_on(store.core, done)

    def _prepare(self) -> None:
        """Let the next step be written natively, if it can be."""
        store = self._appending(self._buffer)
        if store is not None and store is not self._made[0]:
            self._made = store, self._steps_into(store)
        steps, self.acted = self._made[1], copied(self.acted)  # what was written may be held
        held = steps is not None and steps.hold([*leaves_in(self._before)], [*leaves_in(self.acted)])
        self._steps = steps if held else None

    def _steps_into(self, store: Store) -> native.Steps | None:
        """What writes steps natively. None: the store holds other rows, or they go through the buffer, which looks at them."""
        fields, extras = store.schema.fields, [leaf.dtype for leaf in self._notes.leaves.values()]
        numbers = {(field.key, field.dtype): i for i, field in enumerate(fields) if field.key != (self._priority,)}
        kinds = [self._observation_spec, self._action_spec, self._observation_spec, FLOAT32, BOOL, BOOL, BOOL, *extras]
        try:  # entries of infos come last
            trees = [_tree(*both, numbers) for both in zip(kinds, self._paths, strict=False)]
        except KeyError:
            return None
        specs, outcome = dlpack_specs(fields), [*trees[2:6], *trees[7:]]
        for number in trees[_NUMBERS]:
            specs[number] = (*specs[number][:2], ())
        parts = (trees[0], trees[1], ("tuple", tuple, [*range(len(outcome))], outcome))
        seen, action, followed = (native.Intake(specs, tree, trees[3:6]) for tree in parts)
        how = ([self._running, self.acting, self._open, self.waiting], self._batched, self._autoreset)
        return native.Steps(store.core, seen, action, followed, trees[6], self._lanes.tolist(), *how)

    def _rows(self, values: Sequence[Value], batch: torch.Size) -> object:
        """Rows in the form of the buffer, or one row, of values in the order of the form."""
        if not self._tensordicts:
            return _filled(self._form, values)
        widened = [*values]
        widened[_NUMBERS] = [value[..., None] for value in values[_NUMBERS]]  # type: ignore[call-overload, index]
        return _as_tensordict(_filled(self._form, widened), batch)

    def _extras(self, told: Sequence[Told], *batch: int) -> list[Array]:
        """What rows of this step hold besides :data:`FIELDS`."""
        return [*self._noted, *self._told, *self._infos.read(self._infos.after, told, *batch)]

    def _end(self, which: Mask) -> None:
        """End what is open in the lanes of these environments."""
        left = which & self._open
        if left.any():
            self._buffer.end_trajectory(self._lanes[left], roles=self._roles)
            self._open[left] = False


class SingleRecording(Recording):
    """Writes the steps of one environment, each with one ``add``. Arguments and errors are those of :class:`Recording`."""

    def begin(self, observation: object, infos: object) -> None:
        """The environment was reset. An episode that it was in ends as a truncation. Notes for its next step are forgotten."""
        self._notes.take(needed=False)
        found = conformed(self._observation_spec, observation, "observation")
        told = self._infos.read(self._infos.before, [(infos, ...)])
        self._take_lanes()
        self._end(_ONLY)
        self._before, self._told, self._running[0] = copied(found), told, True
        self._prepare()

    def go_on(self, seen: object, reward: object, terminated: object, truncated: object, infos: object) -> None:
        """After a step: write it, if it is a row. What was observed is what the next action answers to, unless the episode is over.

        Args:
            observation: the last one of an episode that is over.
            reward, terminated, truncated, infos: one each.
        """
        following = conformed(self._observation_spec, seen, "observation")
        ends = np.bool_(as_number(terminated)), np.bool_(as_number(truncated))  # faster than arrays
        over = ends[0] | ends[1]
        if self.acting[0]:
            extras = self._extras([(infos, ...)])
            values = (self._before, self.acted, following, np.float32(as_number(reward)), *ends, over, *extras)
            self._buffer.add(self._rows(values, _ONE), lane=int(self._lanes[0]))
            self._open[0] = not over
        elif not over:
            self._end(_ONLY)
        if not over:
            self._told = self._infos.read(self._infos.before, [(infos, ...)])
        self._before, self._running[0] = copied(following), not over
        self._prepare()


class VectorRecording(Recording):
    """Writes the steps of ``n`` environments that are stepped together. Arguments and errors are those of :class:`Recording`."""

    def begin(self, observation: object, told: Sequence[Told], which: Mask) -> None:
        """Environments were reset, ``which`` of them: bool ``[n]``. Episodes that they were in end as truncations.

        Notes for the next step are forgotten: those of environments that were reset answer to what is over.
        """
        self._notes.take(needed=False)
        found = conformed(self._observation_spec, observation, "observation")
        entries = self._infos.read(self._infos.before, told, len(which))
        self._take_lanes()
        self._end(which)
        for old, new in zip(self._told, entries, strict=False):
            new[~which] = old[~which]
        self._told = entries
        if len(self._before) == 0 or which.all():
            self._before = copied(found)
        else:
            for i in which.nonzero()[0].tolist():
                put(self._before, i, cast("Nested", pick(found, i)))
        self._running |= which
        self.waiting &= ~which
        self._prepare()

    def answer(self) -> Mask:
        """Before a step whose actions are kept elsewhere: as :meth:`act`. Of which environments it is a row: bool ``[n]``."""
        self._check_lanes()
        self._notes.check(needed=some(self._running))
        self.acting[:], self._running[:] = self._running, False
        self._noted = self._notes.take(needed=some(self.acting))
        return self.acting.copy()

    def write(self, acting: Mask, following: object, reward: object, flags: Flags, told: Sequence[Told]) -> None:
        """Write the step of the environments that were acting.

        Args:
            acting: whose step is a row, bool ``[n]``. What is said of the others is passed over.
            following: what was observed then, the last observation of an episode that is over.
            reward: ``[n]``.
            flags: as :func:`flags_of` returns them.
            told: infos of the step, of all that were acting.

        Raises ``ValueError``: rewards of another number of environments.
        """
        over = flags[-1]
        if some(acting):
            values: tuple[Nested, ...] = (
                self._before,
                self.acted,
                conformed(self._observation_spec, following, "next observation"),
                of_each(reward, FLOAT32, len(acting), "step: reward"),
                *flags,
                *self._extras(told, len(acting)),
            )
            rows = acting.nonzero()[0]
            if len(rows) < len(acting):
                values = tuple(cast("Nested", pick(value, rows)) for value in values)
            self._buffer.extend(self._rows(values, torch.Size([len(rows)])), lane=self._lanes[rows])
            self._open[rows] = ~over[rows]

    def go_on(self, observation: object, told: Sequence[Told], running: Mask, acting: Mask) -> None:
        """What the next actions answer to, of the environments that are ``running``. Of those ``acting`` the last step was a row."""
        self._end(running & ~acting)
        self._told = self._infos.read(self._infos.before, told, len(running))
        self._before = copied(conformed(self._observation_spec, observation, "observation"))
        self._running[:] = running
        self._prepare()


def flags_of(terminated: object, truncated: object, n: int) -> Flags:
    """Whether each of ``n`` episodes was terminated, was truncated, and is over. Raises ``ValueError``: flags of another number."""
    ends = of_each(terminated, BOOL, n, "step: terminated"), of_each(truncated, BOOL, n, "step: truncated")
    return *ends, ends[0] | ends[1]


def _tree(spec: Spec, path: FieldPath, numbers: Mapping[tuple[FieldPath, str], int]) -> Any:
    """How the core takes values apart into fields, whose ``numbers`` are by key and dtype. Raises ``KeyError``: there is none."""
    if isinstance(spec, np.dtype):
        return numbers[path, spec.name]
    entries = spec.items() if isinstance(spec, dict) else enumerate(spec)
    trees = {name: _tree(one, (*path, str(name)), numbers) for name, one in entries}
    return type(spec).__name__, type(spec), [*trees], [*trees.values()]


def _filled(form: Form, values: Sequence[object]) -> dict[str, object]:
    """Rows of this form."""
    return {name: values[at] if isinstance(at, int) else _filled(at, values) for name, at in form.items()}


def _as_tensordict(entries: dict[str, object], size: torch.Size) -> TensorDict:
    """A TensorDict of arrays, which share its memory. Its constructor would check each of them, for 70 µs a step."""
    of = {
        k: _as_tensordict(it, size) if isinstance(it, dict) else torch.from_numpy(np.asarray(it, order="C"))
        for k, it in entries.items()
    }
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


def _check(storage: Storage, lanes: torch.Tensor, count: int) -> None:
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
