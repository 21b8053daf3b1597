"""The ring: the newest rows replace the oldest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Unpack

import torch

from engram._unsupported import NOT_TRACED, NoArguments, reject_unsupported, take_compilable
from engram.types import Extent, Traits, WritePlan
from engram.writers._base import NativeWriter

if TYPE_CHECKING:
    from torch import Tensor


class RoundRobinWriter(NativeWriter):
    """Appends to the ring of a lane. Of a batch longer than the ring, the newest rows stay.

    Args:
        compilable: the buffer of this writer is as one with ``compilable=True``.
        track_generations: samples have ``"index_generation"``, the number of the write that each row held when it was drawn.
            Larger is newer, over all rows of the store. A row that was overwritten since has another number; edits, dumps and
            loads leave it as it is.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter(track_generations=True))
    >>> rb.extend(torch.arange(5))
    tensor([0, 1, 2, 0, 1])
    >>> rb[:]
    tensor([3, 4, 2])
    >>> rb.writer.generations_of([2, 0]).diff() > 0
    tensor([True])
    """

    traits = Traits(appends=True)

    def __init__(
        self, compilable: bool = False, *, track_generations: bool = False, **unknown: Unpack[NoArguments]
    ) -> None:
        given = {"compilable": compilable, **unknown}
        reject_unsupported(type(self).__name__, given, NOT_TRACED, type(self))
        take_compilable(self, given)
        super().__init__()
        if track_generations:
            self.traits = self.traits._replace(tracks_tickets=True)

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        return WritePlan(lane=lane)

    def write_at(self, index: object, data: object) -> Tensor:
        """Write given rows. The cursor stays; tickets and the write count advance.

        The length grows to the highest row + 1; rows below it that were never written become zeros.

        Args:
            index: int64 ``[n]``, or a list of ints.
            data: ``n`` rows.

        Returns:
            int64 ``[n]``: the rows.

        Raises:
            RowError: a row is outside ``[0, capacity)``. Nothing is written.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        >>> _ = rb.extend(torch.arange(5))
        >>> _ = rb.writer.write_at([1, 3], torch.tensor([10, 30]))
        >>> rb[:].tolist()
        [0, 10, 2, 30, 4]
        """
        rows = torch.as_tensor(index, device="cpu").to(torch.int64).reshape(-1)
        return self._write("write_at", data, WritePlan(rows=rows), batched=True).rows

    def config(self) -> dict[str, object]:
        return {"track_generations": self.traits.tracks_tickets}


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A :class:`RoundRobinWriter` whose rows, read by number, have an ``"index"``: their number, which is not stored.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, writer=TensorDictRoundRobinWriter())
    >>> rb.add(TensorDict({"obs": torch.zeros(3)}))
    0
    """

    traits = Traits(appends=True, adds_index=True)


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
