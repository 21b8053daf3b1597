"""Writes nothing: for buffers whose rows come from checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from engram.writers.immutable import ImmutableDatasetWriter

if TYPE_CHECKING:
    from torch import Tensor

    from engram.types import Extent


class FollowingWriter(ImmutableDatasetWriter):
    """Rejects every write, edit and ``empty`` of a buffer that ``ReplayBuffer.follow`` has made."""

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> NoReturn:
        raise RuntimeError(
            "write: the buffer follows checkpoints, and is read-only (FollowingWriter). Write to the buffer that is saved there."
        )
