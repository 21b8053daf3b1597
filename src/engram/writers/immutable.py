"""Writes nothing: for buffers that are only read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Unpack

from engram._unsupported import NOT_TRACED, NoArguments, reject_unsupported, take_compilable
from engram.types import Traits
from engram.writers._base import NativeWriter

if TYPE_CHECKING:
    from torch import Tensor

    from engram.types import Extent


class ImmutableDatasetWriter(NativeWriter):
    """Rejects every write, edit and ``empty`` with ``RuntimeError``: for data sets.

    Args:
        compilable: the buffer of this writer is as one with ``compilable=True``.

    >>> import torch
    >>> from engram import ImmutableDatasetWriter, ReplayBuffer, TensorStorage
    >>> rb = ReplayBuffer(storage=TensorStorage(torch.arange(3)), writer=ImmutableDatasetWriter())
    >>> rb.add(torch.tensor(1))
    Traceback (most recent call last):
    RuntimeError: write: the buffer is read-only (ImmutableDatasetWriter). Use set_writer(RoundRobinWriter()) to write.
    """

    traits = Traits(read_only=True)

    def __init__(self, compilable: bool = False, **unknown: Unpack[NoArguments]) -> None:
        given = {"compilable": compilable, **unknown}
        reject_unsupported("ImmutableDatasetWriter", given, NOT_TRACED, type(self))
        take_compilable(self, given)
        super().__init__()

    @property
    def write_count(self) -> int:
        return 0

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> NoReturn:
        raise RuntimeError(
            "write: the buffer is read-only (ImmutableDatasetWriter). Use set_writer(RoundRobinWriter()) to write."
        )


class FollowingWriter(ImmutableDatasetWriter):
    """Rejects every write, edit and ``empty`` of a buffer that ``ReplayBuffer.follow`` has made."""

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> NoReturn:
        raise RuntimeError(
            "write: the buffer follows checkpoints, and is read-only (FollowingWriter). Write to the buffer that is saved there."
        )
