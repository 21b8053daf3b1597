"""Trajectories of a TensorDict whose steps lie in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram._dtypes import DTYPE_NAMES
from engram._words import warn
from engram.field_paths import as_path, public
from engram.format.schema import Field
from engram.query.predicates import holds, reject
from engram.samplers.trajectory_tables import TrajectoryKeys, step_type_bytes
from engram.trajectories import find_start_stop_traj

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensordict import TensorDictBase

    from engram.field_paths import FieldPath
    from engram.query.trajectory import Trajectory
    from engram.samplers.trajectory_tables import Boundaries

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
    from engram.query.trajectory import Trajectory

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
        found = TrajectoryKeys(path, None, None).boundaries(fields, numbers, call)
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
        elif step_type_bytes(fields[number]):
            ends |= (signal == _LAST).any(1)
            ends[:-1] |= (signal[1:] == _FIRST).any(1)
        else:
            ends |= (signal != 0).any(1)
    start, stop, _ = find_start_stop_traj(end=ends, at_capacity=False)
    return start[:, 0].tolist(), stop[:, 0].tolist()
