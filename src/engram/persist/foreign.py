"""What other libraries saved: folders and states. The package of such a format is imported when one of it is met."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from torch import Tensor

    from engram.store import Store
    from engram.types import Form, ItemsSource, RowsSource, StorageLoad

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


class Loading(Protocol):
    """A storage that is loaded."""

    memory: Store | None

    @property
    def form(self) -> Form: ...

    def prepare_rows(self, state: dict[str, object], source: RowsSource) -> StorageLoad: ...
    def prepare_items(self, source: ItemsSource) -> StorageLoad: ...
    def prepare_unwritten(self) -> StorageLoad: ...


class ForeignDump(Protocol):
    """A checked folder of another library, of one buffer."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def priorities(self) -> DumpedPriorities | None: ...
    @property
    def rng_state(self) -> Tensor | None: ...

    def prepare(self, storage: Loading, without: Collection[str]) -> StorageLoad:
        """Check its rows, without some entries, for a storage. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``."""


class ForeignEnsemble(Protocol):
    """A checked folder of another library, of several buffers."""

    @property
    def batch_size(self) -> int | None: ...
    @property
    def rng_state(self) -> Tensor | None: ...
    @property
    def members(self) -> Sequence[ForeignDump]: ...


class ForeignFormat(Protocol):
    """What another library saves."""

    @property
    def library(self) -> str: ...

    def recognises(self, path: Path) -> bool:
        """Whether a folder looks like one of this format. Opens nothing."""

    def read(self, path: Path, *, ndim: int, max_bytes: int) -> ForeignDump:
        """Describe and check a folder of one buffer. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``, ``OSError``."""

    def read_ensemble(self, path: Path, ndims: Sequence[int], *, max_bytes: int) -> ForeignEnsemble:
        """As :meth:`read`, of as many buffers."""


def foreign_format(path: Path) -> ForeignFormat | None:
    """The format of a folder that another library saved; None: it is none of those."""
    for mark, module in _FORMATS.items():
        if os.path.lexists(path / mark):
            found: ForeignFormat = importlib.import_module(module).FORMAT
            if found.recognises(path):
                return found
    return None


def foreign_state(state: object, ndim: int) -> ForeignDump | None:
    """A state that another library's buffer returned; None: it is none of those. Raises as its ``read_state``, which refuses ensembles."""
    module = _module_of(state)
    found: ForeignDump | None = None if module is None else module.read_state(state, ndim=ndim)
    return found


def _module_of(state: object) -> ModuleType | None:
    """The module that reads such a state; None: there is none, or it is engram's own."""
    if not isinstance(state, dict) or "_members" in state:
        return None
    storage = state.get("_storage")
    if not isinstance(storage, dict) or "clock" in storage:
        return None
    module = importlib.import_module("engram.migrate.torchrl.state")
    return module if module.is_torchrl_state(state) else None
