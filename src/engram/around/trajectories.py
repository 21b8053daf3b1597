"""Where trajectories begin and end in tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: object = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """First and last step of every trajectory in a ring of slots.

    Args:
        trajectory: ids ``[T, *columns]``, constant within a trajectory.
        end: bools ``[T, *columns]``, true at the last step of one. Exactly one of the two; other dtypes: not zero.
        at_capacity: whether the ring is full: then trajectories go on across its end, from slot ``T - 1`` to slot 0.
        cursor: of a full ring, the slot that was written last: a trajectory ends there. An int, or a tensor, array, range or
            slice, of which the last element counts. None: nothing ends but by the signal.
        device: where the results are to be. Default: that of the signal.

    Returns:
        ``(start, stop, lengths)``, int64 ``[K, n]``, ``[K, n]`` and ``[K]``, with ``n`` the dimensions of the signal: the slot
        first, then the column. ``stop`` is inclusive; where it is smaller than ``start``, the trajectory goes on across the
        end of the ring. Grouped by column; within one, in the order of ``stop``. A column in which nothing ends has one
        trajectory, up to its last row.

    Raises:
        TypeError: not exactly one of ``trajectory`` and ``end``.
        RuntimeError: a signal without steps or dimensions.
        RuntimeError: ``cursor`` is an empty tensor, array, range or slice.
        ValueError: ``cursor`` is no slot.

    >>> import torch
    >>> start, stop, lengths = find_start_stop_traj(end=torch.tensor([0, 1, 0, 0, 1, 0]), at_capacity=True)
    >>> start.flatten().tolist(), stop.flatten().tolist(), lengths.tolist()
    ([5, 2], [1, 4], [3, 3])
    """
    if (trajectory is None) == (end is None):
        given = "both" if end is not None else "none"
        raise TypeError(f"find_start_stop_traj: expected one of trajectory and end, got {given}.")
    signal = trajectory if trajectory is not None else end
    assert signal is not None  # one of the two was given
    if signal.ndim == 0 or signal.numel() == 0:
        raise RuntimeError(
            f"find_start_stop_traj: expected a signal [T, *columns] with steps, got shape {list(signal.shape)}."
        )
    if trajectory is not None:
        stops = trajectory != trajectory.roll(-1, 0)  # in the last row: whether it is followed by slot 0
    else:
        stops = signal.clone() if signal.dtype is torch.bool else signal != 0
    steps = len(stops)
    if not at_capacity:
        stops[-1] = True
    elif cursor is not None:
        stops[_last_slot(cursor, steps)] = True
    columns = stops.reshape(steps, -1).t()
    columns[:, -1] |= ~columns.any(1)
    column, stop = columns.nonzero(as_tuple=True)
    before = stop.roll(1)  # the stop before, of the same column: for its first one, the column's last
    first = torch.ones_like(column, dtype=torch.bool)
    first[1:] = column[1:] != column[:-1]
    last = first.roll(-1).nonzero().flatten()
    before[first] = stop[last]
    lengths = (stop - before - 1) % steps + 1
    start = (before + 1) % steps
    places = torch.unravel_index(column, stops.shape[1:]) if stops.ndim > 1 else ()
    found = [torch.stack([slot, *places], -1) for slot in (start, stop)]
    target = signal.device if device is None else torch.device(device)
    return found[0].to(target), found[1].to(target), lengths.to(target)


def _last_slot(cursor: object, steps: int) -> int:
    if isinstance(cursor, slice):
        cursor = range(steps)[cursor]
    slots = torch.as_tensor(list(cursor[-1:]) if isinstance(cursor, range) else cursor).flatten()
    if not slots.numel():
        raise RuntimeError(
            "find_start_stop_traj: cursor: expected the slots that were written last, got none. Pass None."
        )
    slot = int(slots[-1])
    if not -steps <= slot < steps:
        raise ValueError(f"find_start_stop_traj: cursor: expected a slot in [0, {steps}), got {slot}.")
    return slot
