"""The importer of the extension; `_sizes`, and `doctor`, which load no torch, import it, too."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from engram import _core
from engram._core import (
    PARALLEL_BYTES,
    BadPriority,
    Batched,
    Changes,
    ConsumerVersion,
    Consumption,
    Epoch,
    Expansion,
    Fragments,
    Goals,
    Groups,
    Index,
    Intake,
    Layout,
    Marks,
    OutputBlock,
    Participants,
    Priorities,
    Ranking,
    Store,
    Trajectories,
    UpdateDrain,
    Usage,
    VersionTable,
    WindowSpec,
    Writers,
    block_views,
    changes_bytes,
    check_state,
    consumer_version_bytes,
    consumption_bytes,
    control_bytes,
    copy_consumption,
    copy_groups,
    copy_priorities,
    empty_rows,
    epoch_bytes,
    folder_lock,
    format_changes,
    format_consumer_version,
    format_consumption,
    format_control,
    format_epoch,
    format_groups,
    format_priorities,
    format_usage,
    format_writers,
    groups_bytes,
    permute,
    pick_newest,
    pid_namespace,
    place_runs,
    prefetch,
    priority_bytes,
    put_goals,
    received,
    requests_in_doubt,
    reset_changes,
    reset_consumption_mutex,
    reset_epoch_mutex,
    reset_groups_mutex,
    reset_priorities_mutex,
    reset_writers_mutex,
    stack,
    start_time_of,
    uniform,
    usage_bytes,
    wait_limit,
    writers_bytes,
)
from engram.errors import CorruptStore, NoSampleable, RateLimited, ReadOnlyStore, WriterStalled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    MakeTensor: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

__all__ = [
    "PARALLEL_BYTES",
    "BadPriority",
    "Batched",
    "Changes",
    "ConsumerVersion",
    "Consumption",
    "Epoch",
    "Expansion",
    "Fragments",
    "Goals",
    "Groups",
    "Index",
    "Intake",
    "Layout",
    "Marks",
    "NotAdmitted",
    "OutputBlock",
    "Participants",
    "Priorities",
    "Ranking",
    "Store",
    "Trajectories",
    "UpdateDrain",
    "Usage",
    "VersionTable",
    "WindowSpec",
    "Writers",
    "block_views",
    "changes_bytes",
    "check_state",
    "consumer_version_bytes",
    "consumption_bytes",
    "control_bytes",
    "copy_consumption",
    "copy_groups",
    "copy_priorities",
    "empty_rows",
    "epoch_bytes",
    "folder_lock",
    "format_changes",
    "format_consumer_version",
    "format_consumption",
    "format_control",
    "format_epoch",
    "format_groups",
    "format_priorities",
    "format_usage",
    "format_writers",
    "groups_bytes",
    "making",
    "num_threads",
    "permute",
    "pick_newest",
    "pid_namespace",
    "place_runs",
    "prefetch",
    "priority_bytes",
    "put_goals",
    "received",
    "requests_in_doubt",
    "reset_changes",
    "reset_consumption_mutex",
    "reset_epoch_mutex",
    "reset_groups_mutex",
    "reset_priorities_mutex",
    "reset_writers_mutex",
    "set_num_threads",
    "stack",
    "start_time_of",
    "uniform",
    "usage_bytes",
    "wait_limit",
    "writers_bytes",
]


class NotAdmitted(RateLimited):
    """A number of rows that the limits of a store refuse for now: buffers wait and try again."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows

    def __str__(self) -> str:
        return f"the limits of the store do not admit {self.rows} more rows now. Write through a buffer, which waits."


_core.raise_stalled_as(WriterStalled)
_core.raise_damaged_as(CorruptStore)
_core.raise_nothing_live_as(NoSampleable)
_core.raise_readonly_as(ReadOnlyStore)
_core.raise_limited_as(NotAdmitted)

#: Whether tensors can be looked at natively; if not, everything works and writes are slower.
HAS_EXCHANGE: bool = _core.use_tensor_type(torch.Tensor)
_core.use_array_types(np.ndarray, np.generic)


_DTYPES = {
    (code, 8 * dtype.itemsize): dtype
    for code, dtypes in (
        (0, (torch.int8, torch.int16, torch.int32, torch.int64)),
        (1, (torch.uint8, torch.uint16, torch.uint32, torch.uint64)),
        (2, (torch.float16, torch.float32, torch.float64)),
        (4, (torch.bfloat16,)),
        (5, (torch.complex32, torch.complex64, torch.complex128)),
        (6, (torch.bool,)),
        (10, (torch.float8_e4m3fn,)),
        (11, (torch.float8_e4m3fnuz,)),
        (12, (torch.float8_e5m2,)),
        (13, (torch.float8_e5m2fnuz,)),
    )
    for dtype in dtypes
}
"""dtypes by DLPack's type code and bits."""
DLPACK = {dtype: code for code, dtype in _DTYPES.items()}


@contextmanager
def making(empty: MakeTensor | None) -> Iterator[None]:
    """In this block, ``empty(shape, dtype)`` makes the tensors that the core returns on this thread; None: the core itself.

    They must be contiguous, and on the CPU.
    """
    if empty is None:
        yield
        return

    def make(shape: tuple[int, ...], code: int, bits: int) -> torch.Tensor:
        return empty(shape, _DTYPES[code, bits])

    previous = _core.set_allocator(make)
    try:
        yield
    finally:
        _core.set_allocator(previous)


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
    """Threads that a large copy may use, the calling thread included.

    >>> import engram
    >>> engram.num_threads() >= 1
    True
    """
    return int(_core.num_threads())
