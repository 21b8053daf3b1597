"""Every exception of the package, in one tree.

::

    EngramError
    ├── RowError           IndexError     a row or lane outside the store, or a row that is not live
    ├── NoSampleable       RuntimeError   nothing can be drawn
    ├── PriorityError      ValueError     a priority that is negative, not finite or too large
    ├── WriterStalled      TimeoutError   a bounded wait for another writer, or for a row that keeps moving, ended
    ├── StoreInUse         RuntimeError   other live processes have the directory open, and this needs it alone
    ├── ForkedHandle       RuntimeError   a store that a forked child could not share with its parent
    ├── IncompatibleStore  ValueError     another schema, geometry, format version or platform
    ├── CorruptStore       RuntimeError   a missing, truncated or changed file
    ├── UncleanStore       RuntimeError   left open when the machine went down
    ├── IncompatibleCheckpoint  ValueError     another schema or geometry, or a newer format version
    ├── CorruptCheckpoint       RuntimeError   a missing, truncated, changed or hostile file
    └── RankFailed         RuntimeError   a rank of the job failed, died or did not answer in time

Plain mistakes in a call keep their builtin class (``TypeError``, ``KeyError``, ``ValueError``, ``RuntimeError``,
``OSError``), as PyTorch RL users know them. Whatever raises has changed nothing, unless it says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CorruptCheckpoint",
    "CorruptStore",
    "EngramError",
    "ForkedHandle",
    "IncompatibleCheckpoint",
    "IncompatibleStore",
    "NoSampleable",
    "PriorityError",
    "RankFailed",
    "RowError",
    "StoreInUse",
    "UncleanStore",
    "WriterStalled",
]


class EngramError(Exception):
    """Base of every exception that engram defines."""


class RowError(EngramError, IndexError):
    """A row outside ``[0, capacity)``, a row that is not live, or a lane outside ``[0, lanes)``."""


class NoSampleable(EngramError, RuntimeError):
    """Nothing can be drawn: the buffer is empty, or every priority is zero."""


class PriorityError(EngramError, ValueError):
    """A priority that is NaN, infinite, negative or too large to be summed. Nothing was changed."""


class WriterStalled(EngramError, TimeoutError):
    """A bounded wait ended: another writer holds the row, or the row moved at every try."""


class StoreInUse(EngramError, RuntimeError):
    """Other live processes have this directory open, and the call needs it alone; or as many as can have it open."""


class ForkedHandle(EngramError, RuntimeError):
    """A handle in a forked child that could not become a participant of the store of its parent. Open the store anew."""


class IncompatibleStore(EngramError, ValueError):
    """A store with another schema, geometry or format version, or made on another platform."""


class CorruptStore(EngramError, RuntimeError):
    """A store with a missing, truncated or changed file. Nothing in it was modified."""


class UncleanStore(EngramError, RuntimeError):
    """A store that was open when its machine went down: nothing is promised of its rows.

    ``ReplayBuffer.open(dir, unclean="accept")`` takes it as it is.
    """


class IncompatibleCheckpoint(EngramError, ValueError):
    """A checkpoint with another schema, geometry or configuration than the buffer, or of a newer format version."""


class CorruptCheckpoint(EngramError, RuntimeError):
    """A checkpoint with a missing, truncated or changed file, or one that no engram wrote. Names the file, and where in it.

    Nothing was changed, neither the checkpoint nor what was to be loaded.
    """


class RankFailed(EngramError, RuntimeError):
    """A rank failed, died or did not answer in time. The same on all ranks, and names those that failed.

    Args:
        message: what happened.
        causes: by rank, the name of the exception that it raised; empty where no exception is known.
    """

    def __init__(self, message: str, causes: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})
