"""What other libraries saved: folders and states. The package of such a format is imported when one of it is met."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.types import RowsSource

#: A file that lies in folders of a format, and the module whose ``FORMAT`` reads those.
_FORMATS = {"buffer_metadata.json": "engram.migrate.torchrl.dump"}


class DumpedPriorities(NamedTuple):
    """What a prioritized sampler saved."""

    alpha: float
    beta: float
    eps: float
    leaves: Tensor
    """float64 ``[length]``, CPU: ``(priority + eps) ** alpha`` of each row; finite, at least 0."""
    max_priority: float | None
    """The largest priority so far, not raised to ``alpha``; None before the first."""
    max_row: int | None
    """The row that has it, if that is known."""


class ForeignDump(Protocol):
    """A checked folder of another library, of one buffer."""

    @property
    def path(self) -> Path: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def priorities(self) -> DumpedPriorities | None: ...
    @property
    def rng_state(self) -> Tensor | None: ...

    def schema(self, like: Schema | None, without: Collection[str]) -> Schema:
        """The schema of a store with its rows, as that of the storage, ``like``, if there is one; without some entries."""

    def state(self, schema: Schema) -> dict[str, object]:
        """The state without rows of a storage of that schema."""

    def source(self, schema: Schema) -> RowsSource:
        """Its rows."""


class ForeignFormat(Protocol):
    """What another library saves."""

    @property
    def library(self) -> str: ...

    def recognises(self, path: Path) -> bool:
        """Whether a folder looks like one of this format. Opens nothing."""

    def read(self, path: Path, *, ndim: int, max_bytes: int) -> ForeignDump:
        """Describe and check a folder. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``, ``OSError``."""


def foreign_format(path: Path) -> ForeignFormat | None:
    """The format of a folder that another library saved; None: it is none of those."""
    for mark, module in _FORMATS.items():
        if os.path.lexists(path / mark):
            found: ForeignFormat = importlib.import_module(module).FORMAT
            if found.recognises(path):
                return found
    return None


def foreign_state(state: object, ndim: int) -> ForeignDump | None:
    """A state that another library's buffer returned; None: it is none of those. Raises as its ``read_state``."""
    storage = state.get("_storage") if isinstance(state, dict) else None
    if not isinstance(storage, dict) or "_storage" not in storage:
        return None
    found: ForeignDump = importlib.import_module("engram.migrate.torchrl.state").read_state(state, ndim=ndim)
    return found
