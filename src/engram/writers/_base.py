"""What engram's own writers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

from typing import Any, Literal, Never, NoReturn, cast

import numpy as np
import torch

from engram._support import nested, overrides, unsupported
from engram._support.checks import as_numbers
from engram.saved.parts import Component, adopt
from engram.types import Declared, Extent, Ranking, Traits, Write, WritePlan, Writer


class NativeWriter(Component):
    """Base of engram's writers."""

    part = "writer"
    traits = Traits()
    #: Whether rows lie in the order in which they came.
    keeps_order = True

    def __init__(self, compilable: bool = False, *, track_generations: bool = False, **unknown: Never) -> None:
        given = {"compilable": compilable, **unknown}
        unsupported.reject_unsupported(type(self).__name__, given, unsupported.NOT_TRACED, type(self))
        unsupported.take_compilable(self, given)
        if track_generations:
            self.traits = self.traits._replace(tracks_tickets=True)
        self._storage: Any = None

    @property
    def tracks_generations(self) -> bool:
        """Whether samples carry ``"index_generation"``."""
        return self.traits.tracks_tickets

    def register_storage(self, storage: Any) -> None:
        """Set the storage that :meth:`add`, :meth:`extend` and :meth:`write_at` write to.

        A buffer does this. Raises to refuse the storage: ``ValueError`` for several lanes or ``ndim > 1``, if a subclass has TorchRL's
        ``get_insert_index``.

        >>> import torch
        >>> from engram import LazyTensorStorage, RoundRobinWriter
        >>> writer = RoundRobinWriter()
        >>> writer.register_storage(LazyTensorStorage(10))
        >>> writer.extend(torch.arange(3)).tolist()
        [0, 1, 2]
        """
        if overrides.overrides(type(self), "get_insert_index") and storage.ndim * storage.lanes > 1:
            raise ValueError(
                f"{type(self).__name__}.get_insert_index: expected a storage with ndim=1 and one lane, got {storage!r}: it names rows."
            )
        if not (self.traits.appends or self.traits.read_only) and storage.in_rings:
            raise ValueError(
                f"{type(self).__name__}: expected a storage whose rows have one size, or ragged_layout='slots', got {storage!r}: items in "
                "rings are evicted oldest first, so rows are appended. Make it with slots, or use a RoundRobinWriter and no remover."
            )
        self._storage = storage

    def place(self, extent: Extent, n: int, lane: int | torch.Tensor, data: object) -> WritePlan:
        """Choose where rows go, as :meth:`engram.Writer.place` has it: without side effects.

        Args:
            extent: what is live now.
            n: rows.
            lane: where they were said to go: a lane, or one per row, int64 ``[n]``.
            data: the rows, as they were handed over.

        Raises:
            RuntimeError: the writer refuses every write.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
        >>> _ = rb.extend(TensorDict({"score": torch.tensor([3.0, 1.0])}, [2]))
        >>> plan = rb.writer.place(rb.storage.extent(), 1, 0, TensorDict({"score": torch.tensor([2.0])}, [1]))
        >>> plan.rows.tolist(), len(rb)  # the worst row; nothing was written
        ([1], 2)
        """
        raise NotImplementedError

    def written(self, plan: WritePlan, write: Write) -> None:
        """Hear that a plan was written, before anyone else can place rows.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> class Counting(TensorDictMaxValueWriter):
        ...     count = 0
        ...     def written(self, plan, write):
        ...         super().written(plan, write)
        ...         self.count += int((write.rows >= 0).sum())
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=Counting(rank_key="score"))
        >>> _ = rb.extend(TensorDict({"score": torch.tensor([3.0, 1.0])}, [2]))
        >>> _ = rb.extend(TensorDict({"score": torch.tensor([0.5])}, [1]))  # rejected
        >>> rb.writer.count
        2
        """

    def write_of(self, data: object, *, batched: bool) -> tuple[Write, torch.Tensor] | None:
        """Place and write data as users hand it over: what was written, and its rows as ``extend`` returns them. None: nothing
        was, and ``place`` must look first.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
        >>> rows = TensorDict({"score": torch.tensor([3.0, 1.0])}, [2])
        >>> rb.writer.write_of(rows, batched=True) is None  # before the first write, place() looks first
        True
        """
        return None

    @property
    def ranking(self) -> Ranking | Literal["newest"] | None:
        """Which rows are kept of saved ones, if there is no room for all; None: whole trajectories."""
        return None

    def _registered(self) -> Any:
        if self._storage is None:
            raise RuntimeError(f"{type(self).__name__}: expected a registered storage. Hand it to a buffer first.")
        return self._storage

    def _write(self, call: str, data: object, plan: WritePlan | None, *, batched: bool) -> Write:
        if plan is None and (instead := overrides.meanwhile(self)) is not None:
            return instead(data, call, batched)  # type: ignore[no-any-return]
        storage = self._registered()
        lane, count = (0, None) if plan is not None else storage.unnamed_lanes(call, batched=batched)
        prepared, n = storage.prepare(data, call, batched=batched, count=count)
        with storage.placing:
            plan = plan or self.place(storage.extent(), n, lane, data)
            write: Write = storage.write(plan, prepared, n)
            self.written(plan, write)
        storage.notify(write, data)
        return write

    def add(self, data: object) -> int | None:
        """Write one row to the registered storage, without transforms.

        Returns:
            The number of the row, or None if it was rejected.

        Raises:
            RuntimeError: no storage is registered, or it has several lanes (use the buffer's ``add`` with ``lane=``).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> rb.writer.add(torch.tensor(7))
        0
        """
        row = int(self._write("add", data, None, batched=False).rows[0])
        return None if self.traits.rejects and row < 0 else row

    def extend(self, data: object) -> torch.Tensor:
        """Write a batch of rows to the registered storage, without transforms. With several lanes, each gets one row.

        Returns:
            int64 ``[n]``: the numbers of the rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> rb.writer.extend(torch.arange(3)).tolist()
        [0, 1, 2]
        """
        try:
            write = self._write("extend", data, None, batched=True)
        except nested.NoRows:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return write.survivors if self.traits.rejects else write.rows

    @property
    def write_count(self) -> int:
        """Rows written to the registered storage since it was last emptied."""
        return 0 if self._storage is None else int(self._storage.write_count)

    def generations_of(self, index: object) -> torch.Tensor:
        """Numbers of the writes that rows hold, int64, same shape; -1 if not tracked, never written or out of range.

        With ``ndim > 1`` the index is ``[..., ndim]`` coordinates, or a tuple of those, and the result ``[...]``. Only
        equality and order have a meaning: a rewritten row has a larger number. An edit of a row leaves its number as it is.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter(track_generations=True))
        >>> _ = rb.extend(torch.arange(4))
        >>> before, after = rb.writer.generations_of([1, 0]).tolist()
        >>> after > before  # row 0 was written again
        True
        """
        rows = self._rows_of(index)
        if not self.traits.tracks_tickets or self._storage is None:
            return torch.full_like(rows, -1)
        rows_named = rows.reshape(-1)
        numbers: torch.Tensor = self._storage.writes_of(rows_named, self._storage.tickets_of(rows_named))
        return numbers.reshape(rows.shape)

    def positions_of(self, index: object) -> torch.Tensor:
        """How many steps each row's lane had before it, since the lane's first one or the last ``empty()``: int64, same shape.

        Of a lane's rows the oldest has the smallest position; it grows by 1 from row to row, also where the ring begins again, so
        differences are distances in time. ``position % (rb.capacity // rb.lanes)`` is the place in the lane. Of a row that is not live
        it is -1. Rows that a ``TensorStorage`` was made around are its first steps. The index is that of :meth:`generations_of`. It tells
        of what rows hold now: of rows that others may have overwritten since they were drawn, compare generations.

        Raises:
            TypeError: the storage is no tensor storage of this machine, or the writer chooses where rows go.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2))
        >>> _ = rb.extend(torch.arange(6), lane=1)
        >>> rb.writer.positions_of([4, 5, 6, 0]).tolist()  # row 4 was written twice
        [4, 5, 2, -1]
        """
        rows = self._rows_of(index)
        if self._storage is None:
            return torch.full_like(rows, -1)
        if self.traits.rejects or not self.keeps_order:
            raise TypeError(f"positions_of: expected rows in the order of steps, not of a {type(self).__name__}.")
        positions: torch.Tensor = self._storage.positions_of(rows.reshape(-1))
        return positions.reshape(rows.shape)

    def _rows_of(self, index: object) -> torch.Tensor:
        """The rows of an index in the users' form: int64, on the CPU."""
        ndim = 1 if self._storage is None else self._storage.ndim
        if isinstance(index, tuple):
            index = torch.stack([as_numbers("index", one).to("cpu") for one in index], -1) if ndim > 1 else index[0]
        rows = as_numbers("index", index).to("cpu", torch.int64)
        return self._storage.rows_at(rows) if ndim > 1 else rows


#: Traits that a user's writer may declare by attributes, and their names.
_ATTRIBUTES = {
    "read_only": "read_only",
    "rejects": "rejects",
    "adds_index": "adds_index",
    "tracks_tickets": "tracks_generations",
}


class _Adapted(NativeWriter):
    """A writer that follows the protocol only, with the rest of what a buffer asks of one.

    The optional attributes of such a writer are looked up here and nowhere else.
    """

    def __init__(self, inner: Writer) -> None:
        super().__init__()
        self._inner = inner
        own = getattr(inner, "traits", None)
        if not isinstance(own, Traits):
            own = Traits(**{trait: bool(getattr(inner, name, False)) for trait, name in _ATTRIBUTES.items()})
        #: What counts is its ``place``.
        self.traits = own._replace(appends=False, places_natively=False)
        adopt(self, inner, ("register_storage", "place", "written"))

    @property
    def ranking(self) -> Ranking | Literal["newest"] | None:
        return cast("Ranking | Literal['newest'] | None", getattr(self._inner, "ranking", None))

    def __repr__(self) -> str:
        return repr(self._inner)


def declared(writer: Writer) -> NativeWriter:
    """The writer, or of one that follows the protocol only, one around it that answers all that buffers ask."""
    return cast("NativeWriter", writer) if isinstance(writer, Declared) else _Adapted(writer)


_NONE = np.empty(0, np.int64)


def free_rows(extent: Extent, n: int) -> np.typing.NDArray[np.int64]:
    """The first rows that hold nothing, ``n`` at most, in order."""
    filled = extent.filled[0]
    if filled == extent.capacity and extent.holes is None:
        return _NONE
    holes = np.empty(0, np.int64) if extent.holes is None else extent.holes[:n].numpy()
    behind = np.arange(filled, min(extent.capacity, filled + n - len(holes)))
    return np.concatenate([holes, behind]) if len(holes) else behind


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

    def place(self, extent: Extent, n: int, lane: int | torch.Tensor, data: object) -> WritePlan:
        return WritePlan(lane=lane)

    def write_at(self, index: object, data: object) -> torch.Tensor:
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

    def __init__(self, compilable: bool = False, **unknown: Never) -> None:
        super().__init__(compilable, **unknown)

    write_count = 0

    def place(self, extent: Extent, n: int, lane: int | torch.Tensor, data: object) -> NoReturn:
        raise RuntimeError(
            "write: the buffer is read-only (ImmutableDatasetWriter). Use set_writer(RoundRobinWriter()) to write."
        )


class FollowingWriter(ImmutableDatasetWriter):
    """Rejects every write, edit and ``empty`` of a buffer that ``ReplayBuffer.follow`` has made."""

    def place(self, extent: Extent, n: int, lane: int | torch.Tensor, data: object) -> NoReturn:
        raise RuntimeError(
            "write: the buffer follows checkpoints, and is read-only (FollowingWriter). Write to the buffer that is saved there."
        )
