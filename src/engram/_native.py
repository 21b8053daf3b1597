"""The only importer of the extension."""

from __future__ import annotations

from typing import Any

import torch

from engram import _core as _extension

_core: Any = _extension

__all__ = [
    "BadPriority",
    "Expansion",
    "Layout",
    "Marks",
    "NothingLive",
    "Participants",
    "Pass",
    "Priorities",
    "Ranking",
    "Shape",
    "Stalled",
    "Store",
    "Trajectories",
    "control_bytes",
    "empty_rows",
    "format_control",
    "format_pass",
    "format_priorities",
    "num_threads",
    "pass_bytes",
    "permute",
    "pid_namespace",
    "prefetch",
    "priority_bytes",
    "reset_pass_mutex",
    "reset_priorities_mutex",
    "set_num_threads",
    "stack",
    "start_time_of",
    "uniform",
]

BadPriority = _core.BadPriority
Expansion = _core.Expansion
Layout = _core.Layout
Marks = _core.Marks
Participants = _core.Participants
NothingLive = _core.NothingLive
Pass = _core.Pass
Priorities = _core.Priorities
Ranking = _core.Ranking
Shape = _core.Shape
Stalled = _core.Stalled
Store = _core.Store
Trajectories = _core.Trajectories
control_bytes = _core.control_bytes
empty_rows = _core.empty_rows
format_control = _core.format_control
format_pass = _core.format_pass
format_priorities = _core.format_priorities
pass_bytes: int = _core.pass_bytes
permute = _core.permute
pid_namespace = _core.pid_namespace
prefetch = _core.prefetch
priority_bytes = _core.priority_bytes
reset_pass_mutex = _core.reset_pass_mutex
reset_priorities_mutex = _core.reset_priorities_mutex
stack = _core.stack
start_time_of = _core.start_time_of
uniform = _core.uniform

#: Whether tensors can be looked at natively; if not, everything works and writes are slower.
HAS_EXCHANGE: bool = _core.use_tensor_type(torch.Tensor)


def set_num_threads(n: int) -> None:
    """Use ``n`` threads for copies of large batches, the calling thread included.

    Small batches (below 512 KiB) always use the calling thread alone. The default is the number of cores, at most 4.
    Results never depend on it.

    Args:
        n: threads in ``[1, 1024]``.

    Raises:
        ValueError: ``n`` is outside the range.
        TypeError: ``n`` is not an int.

    >>> import engram
    >>> engram.set_num_threads(2)
    >>> engram.num_threads()
    2
    """
    if type(n) is not int:
        raise TypeError(f"set_num_threads: expected an int, got {type(n).__name__}.")
    if not 1 <= n <= 1024:
        raise ValueError(f"set_num_threads: expected a number of threads in [1, 1024], got {n}.")
    _core.set_num_threads(n)


def num_threads() -> int:
    """Threads that a large copy may use, the calling thread included."""
    return int(_core.num_threads())
