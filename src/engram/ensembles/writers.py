"""The writers of an ensemble."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from engram.ensembles.refusing import naming
from engram.ensembles.samplers import OnePerMember
from engram.ensembles.storages import StorageEnsemble, routed
from engram.types import Traits, Writer
from engram.writers._base import NativeWriter, declared

if TYPE_CHECKING:
    from torch import Tensor

    from engram.types import Extent, WritePlan


class _Writers(OnePerMember[Writer], NativeWriter):
    """What a buffer asks of the writers of an ensemble."""

    traits = Traits()

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        del extent, n, lane, data
        raise self._refused()

    def add(self, data: object = None) -> NoReturn:
        """Refuses: each member writes for itself."""
        del data
        raise self._refused()

    def extend(self, data: object = None) -> NoReturn:
        """Refuses: each member writes for itself."""
        del data
        raise self._refused()

    def _refused(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__}: expected a member to write to: ensemble[i].extend(data), or an ensemble that was made with "
            "routing_key or routing_dim."
        )


class WriterEnsemble(_Writers):
    """The writers of an ensemble, each of which writes to the storage of its member.

    Args:
        *writers: one of each member.

    Raises:
        TypeError: no writers.

    >>> from engram import RoundRobinWriter, WriterEnsemble
    >>> writer = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter(track_generations=True))
    >>> len(writer), writer.tracks_generations
    (2, False)
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        if not writers or not all(isinstance(one, Writer) for one in writers):
            got = [type(one).__name__ for one in writers] or "none"
            raise TypeError(f"{type(self).__name__}: expected writers, got {got}.")
        self._all = writers
        self._placers = tuple(map(declared, writers))

    @property
    def writers(self) -> tuple[Writer, ...]:
        """One of each member."""
        return self._all

    @property
    def tracks_generations(self) -> bool:
        """Whether all of them do."""
        return all(placer.traits.tracks_tickets for placer in self._placers)

    @property
    def write_count(self) -> int:
        """Rows written to all of the storages since each was last emptied."""
        return sum(placer.write_count for placer in self._placers)

    def register_storage(self, storage: object) -> None:
        """Set the storage of each writer that has another one.

        Raises:
            TypeError: no :class:`StorageEnsemble`. ValueError: not a storage for each writer. What a writer raises to refuse its storage.

        >>> from engram import LazyTensorStorage, RoundRobinWriter, StorageEnsemble, WriterEnsemble
        >>> writer = WriterEnsemble(RoundRobinWriter())
        >>> writer.register_storage(StorageEnsemble(LazyTensorStorage(10)))
        >>> writer.write_count
        0
        """
        who = type(self).__name__
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"{who}: expected a StorageEnsemble, got {type(storage).__name__}.")
        if len(storage) != len(self._all):
            raise ValueError(f"{who}: expected {len(self._all)} storages, one for each writer, got {len(storage)}.")
        for number, (placer, one) in enumerate(zip(self._placers, storage.storages, strict=True)):
            if placer._storage is not one:  # noqa: SLF001 - of the family
                with naming(number):
                    placer.register_storage(one)
        super().register_storage(storage)

    def generations_of(self, index: object) -> Tensor:
        """Ticket numbers of rows, int64, of the shape of ``"buffer_ids"``; -1 as each writer says it.

        Args:
            index: what ``extend`` of an ensemble returned, or ``"index"`` of a batch.

        Raises ``TypeError``, ``ValueError``: no such index, or no such member.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, RoundRobinWriter
        >>> member = ReplayBuffer(storage=LazyTensorStorage(100), writer=RoundRobinWriter(track_generations=True))
        >>> _ = member.extend(torch.zeros(3))
        >>> rows = {"buffer_ids": torch.tensor([0, 0]), "index": torch.tensor([2, 50])}
        >>> ReplayBufferEnsemble(member).writer.generations_of(rows).tolist()
        [3, -1]
        """
        ids, rows = routed(index, len(self._all), "generations_of")
        numbers = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        for member in sorted(set(ids.reshape(-1).tolist())):
            ours = ids == member
            found = self._placers[member].generations_of(rows[ours.to(rows.device)])
            numbers[ours] = found.to("cpu").reshape(int(ours.sum()), -1)[:, 0]
        return numbers
