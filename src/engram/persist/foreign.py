"""What TorchRL saved: folders, states and layouts. :mod:`engram.torchrl` reads it, which is imported when something of it is met."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from engram.format.parts import PartReader
    from engram.persist.hooked import Layout
    from engram.persist.slots import LaidOut
    from engram.store import Store
    from engram.types import Form, ItemsSource, RowsSource, StorageLoad


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

    def read_state(self, state: dict[str, object], ndim: int) -> ForeignDump | None:
        """A state that a buffer returned; None: it is none of this format. Raises ``IncompatibleCheckpoint``: of an ensemble."""

    def layout(self, who: str) -> Layout:
        """The layout of the usual keys."""

    def prepare_layout(self, storage: LaidOut, reader: PartReader, without: Sequence[str]) -> StorageLoad:
        """Check a part in a layout for a storage. Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``."""

    def checkpointer(self, theirs: object) -> object:
        """A checkpointer of that library, as one of engram's."""


def torchrl() -> ForeignFormat:
    """What reads TorchRL's files and states."""
    found: ForeignFormat = importlib.import_module("engram.torchrl.dumps").FORMAT
    return found


def foreign_format(path: Path) -> ForeignFormat | None:
    """The format of a folder that another library saved; None: there is none."""
    return torchrl() if os.path.lexists(path / "buffer_metadata.json") and torchrl().recognises(path) else None


def foreign_state(state: object, ndim: int) -> ForeignDump | None:
    """A state that another library's buffer returned; None: it is engram's, or none. Raises as :meth:`ForeignFormat.read_state`."""
    if not isinstance(state, dict) or "_members" in state:
        return None
    storage = state.get("_storage")
    return torchrl().read_state(state, ndim) if isinstance(storage, dict) and "clock" not in storage else None
