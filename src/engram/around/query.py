"""``rb.query``: the stored trajectories of which a predicate is true."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from engram._support.field_paths import FieldPath, as_path, public
from engram._support.nested import find_field, is_tensordict
from engram._support.tensordicts import is_tensorclass, tensordict_type
from engram._support.words import warn
from engram.around import episodes
from engram.around.predicates import Segments, TrajectoryPredicate, holds, missing, reject
from engram.format.schema import Field
from engram.store import DTYPE_NAMES, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensordict import TensorDictBase

    from engram.around.episodes import Boundaries
    from engram.around.trajectory import Trajectory
    from engram.storages import Storage
    from engram.transforms import Compose

    Predicate = Callable[[Trajectory], object] | None


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

    if not isinstance(data, TensorDictBase):
        raise TypeError(f"{call}: expected a TensorDict, got {type(data).__name__}.")
    if data.batch_dims != 1:
        raise ValueError(f"{call}: expected a TensorDict with one batch dimension, [N], got {list(data.batch_size)}.")


def boundaries_of(fields: Sequence[Field], numbers: dict[FieldPath, int], given: object, call: str) -> Boundaries:
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
        warn(
            f"{call}: expected trajectory ids, such as the field ('collector', 'traj_ids') or 'episode', got the end flags "
            f"{[public(fields[number].key) for number in found.ends]} only: a trajectory whose last step has none is taken for a part of "
            "the next one. Store ids, or name their field: trajectory_key=…."
        )
    return found


def _parts(data: TensorDictBase, trajectory_key: object, call: str) -> tuple[list[int], list[int]]:
    """First and last step of each trajectory."""
    paths = ((key,) if isinstance(key, str) else key for key in data.keys(include_nested=True, leaves_only=True))
    columns = {path: column for path in paths if isinstance(column := data.get(path), Tensor)}
    fields = [Field(path, DTYPE_NAMES[column.dtype], tuple(column.shape[1:])) for path, column in columns.items()]
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


def _one_by_one(predicate: TrajectoryPredicate) -> Callable[[Segments], Tensor]:
    """Asks it of each trajectory, of which it gets the fields that were read."""

    def of_many(segments: Segments) -> Tensor:
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

    def _rows_of(self, runs: Tensor) -> Tensor:
        """int64 ``[N]``: of all steps, trajectory by trajectory. ``runs``: track, first place and length of each."""
        width = math.prod(self._memory.schema.columns)
        steps = self._memory.lane_length // width
        each = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), runs[:, 2])
        step = torch.arange(len(each), device="cpu") - (runs[:, 2].cumsum(0) - runs[:, 2])[each]
        track, place = runs[:, 0][each], runs[:, 1][each] + step
        return track // width * self._memory.lane_length + place % steps * width + track % width

    def _drop(self, steps: Tensor | list[int]) -> Tensor:
        """Leave out the trajectories of some steps. As :meth:`keep`."""
        kept = torch.ones(len(self._lengths), dtype=torch.bool, device="cpu")
        kept[torch.repeat_interleave(torch.arange(len(kept), device="cpu"), self._lengths)[steps]] = False
        return self.keep(kept)

    def keep(self, which: Tensor) -> Tensor:
        """Go on with some trajectories: bool ``[K]``. Which steps those have: bool ``[N]``."""
        steps = torch.repeat_interleave(which, self._lengths)
        self._lengths, self._rows, self._tickets = self._lengths[which], self._rows[steps], self._tickets[steps]
        return steps

    def _columns(self, which: list[int] | None) -> list[Tensor]:
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
        if is_tensorclass(data) or not is_tensordict(data):
            entries = {public(key): value for key in self._numbers if (value := find_field(data, key)) is not None}
            data = tensordict_type()(entries, [len(self._rows)])
        return list(cast("TensorDictBase", data).split(self._lengths.tolist())) if len(self._lengths) else []
