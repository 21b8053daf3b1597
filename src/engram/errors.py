"""Every exception of the package, in one tree.

::

    EngramError
    ├── RowError           IndexError     a row or lane outside the store, or a row that is not live
    ├── NoSampleable       RuntimeError   nothing can be drawn
    ├── PriorityError      ValueError     a priority that is negative, not finite or too large
    ├── WriterStalled      TimeoutError   a wait for another writer, or for a row that keeps changing, timed out
    ├── RateLimited        TimeoutError   the limits of the store did not admit rows in time
    ├── ReadOnlyStore      RuntimeError   a write to a store that was opened with readonly=True
    ├── StoreInUse         RuntimeError   another process has the directory open, or 256 processes have
    ├── ForkedHandle       RuntimeError   a store that a forked child could not share with its parent
    ├── IncompatibleStore  ValueError     another schema, geometry, format version or platform
    ├── CorruptStore       RuntimeError   a missing, truncated or changed file
    ├── UncleanStore       RuntimeError   the store was open when the machine crashed
    ├── IncompatibleCheckpoint  ValueError     another schema or geometry, or a newer format version
    ├── CorruptCheckpoint       RuntimeError   a missing, truncated, changed or hostile file
    ├── DatasetError            ValueError     a data set that cannot be read, imported or written as asked
    └── RankFailed         RuntimeError   a rank of the job failed, died or did not answer in time

Plain mistakes in a call keep their builtin class (``TypeError``, ``KeyError``, ``ValueError``, ``RuntimeError``,
``OSError``), as PyTorch RL users know them. A call that raises has changed nothing, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CorruptCheckpoint",
    "CorruptStore",
    "DatasetError",
    "EngramError",
    "ForkedHandle",
    "IncompatibleCheckpoint",
    "IncompatibleStore",
    "NoSampleable",
    "PriorityError",
    "RankFailed",
    "RateLimited",
    "ReadOnlyStore",
    "RowError",
    "StoreInUse",
    "UncleanStore",
    "WriterStalled",
]


class EngramError(Exception):
    """Base of every exception that engram defines."""


class RowError(EngramError, IndexError):
    """A row outside ``[0, capacity)``, a row that is not live, or a lane outside ``[0, lanes)``."""


#: TorchRL's programs look for how it begins.
EMPTY = "Cannot sample from an empty storage. Add data before sampling."


class NoSampleable(EngramError, RuntimeError):
    """Nothing can be drawn: the buffer is empty, or every priority is zero."""


class PriorityError(EngramError, ValueError):
    """A priority that is NaN, infinite, negative or too large to be summed. Nothing was changed."""


class WriterStalled(EngramError, TimeoutError):
    """A wait timed out: another writer holds the row, or the row was rewritten at every attempt."""


class RateLimited(EngramError, TimeoutError):
    """The limits of the store did not admit rows within the timeout. Nothing was written or drawn."""


class ReadOnlyStore(EngramError, RuntimeError):
    """A write to a store that was opened with ``readonly=True``, or a save of it. Nothing was changed."""


class StoreInUse(EngramError, RuntimeError):
    """The call needs exclusive access and another process has the directory open, or the limit of 256 processes is reached."""


class ForkedHandle(EngramError, RuntimeError):
    """A handle in a forked child that could not become a participant of its parent's store. Open the store again."""


class IncompatibleStore(EngramError, ValueError):
    """A store with another schema, geometry or format version, or created on another platform."""


class CorruptStore(EngramError, RuntimeError):
    """A store with a missing, truncated or changed file. Nothing in it was modified."""


class UncleanStore(EngramError, RuntimeError):
    """A store that was open when its machine crashed: its rows may be damaged.

    ``ReplayBuffer.open(dir, unclean="accept")`` opens it nevertheless.
    """


class IncompatibleCheckpoint(EngramError, ValueError):
    """A checkpoint with another schema, geometry or configuration than the buffer, or of a newer format version."""


class CorruptCheckpoint(EngramError, RuntimeError):
    """A checkpoint with a missing, truncated or changed file, or a file that engram did not write. Names file and byte.

    Neither the checkpoint nor the object to load it into was changed.
    """


class DatasetError(EngramError, ValueError):
    """A data set of another program that is damaged, of another version, or cannot be stored or written as asked.

    Of an import that had begun, the finished episodes stay in the directory; the same call goes on with them.
    """


class RankFailed(EngramError, RuntimeError):
    """A rank failed, died or did not answer in time. All ranks raise the same error, which names the failed ones.

    Args:
        message: what happened.
        causes: for each failed rank, the name of the exception that it raised, if it is known.
    """

    def __init__(self, message: str, causes: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})
