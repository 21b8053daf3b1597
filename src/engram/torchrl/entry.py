"""What ``loads`` asks of this package. The rest of engram sees no other module of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.torchrl.dumps import is_torchrl_dump, read, read_ensemble
from engram.torchrl.hdf5 import wrapped
from engram.torchrl.layouts import Keys
from engram.torchrl.parts import Layout, prepare_layout
from engram.torchrl.states import is_torchrl_state, read_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engram.saved.checkpointers import SavedStorage
    from engram.saved.part_reader import PartReader
    from engram.torchrl.dumps import TorchRLEnsemble
    from engram.torchrl.hdf5 import H5StorageCheckpointer
    from engram.torchrl.items import TorchRLItems
    from engram.torchrl.rows import TorchRLDump
    from engram.types import StorageLoad


class _TorchRL:
    """As :class:`engram.saved.checkpointers.ForeignFormat` says."""

    library = "TorchRL"

    def recognises(self, path: Path) -> bool:
        return is_torchrl_dump(path)

    def read(self, path: Path, *, ndim: int, max_bytes: int) -> TorchRLDump | TorchRLItems:
        return read(path, ndim=ndim, max_bytes=max_bytes)

    def read_ensemble(self, path: Path, ndims: Sequence[int], *, max_bytes: int) -> TorchRLEnsemble:
        return read_ensemble(path, ndims, max_bytes=max_bytes)

    def read_state(self, state: dict[str, object], ndim: int) -> TorchRLDump | TorchRLItems | None:
        return read_state(state, ndim=ndim) if is_torchrl_state(state) else None

    def layout(self, who: str) -> Layout:
        return Layout("flat", Keys(), who)

    def prepare_layout(self, storage: SavedStorage, reader: PartReader, without: Sequence[str]) -> StorageLoad:
        return prepare_layout(storage, reader, without)

    def checkpointer(self, theirs: object) -> H5StorageCheckpointer:
        return wrapped(theirs)


FORMAT = _TorchRL()
