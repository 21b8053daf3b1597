"""Writers that choose which rows stay: those of highest rank, or all but those that a remover names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeGuard, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram._support import checks, field_paths, native, nested, state, tensordicts, unsupported
from engram.errors import IncompatibleCheckpoint
from engram.saved.parts import Noted
from engram.store.store import Store
from engram.types import Commit, Extent, Ranking, Traits, Write, WritePlan
from engram.writers._base import NativeWriter, free_rows
from engram.writers.removers import KNOWN, Remover


def _sum(x: Tensor) -> Tensor:
    """Sums of rows that follow from their numbers alone: torch's depend on how many rows, strides and threads there are."""
    with np.errstate(invalid="ignore"):  # of both infinities: then it is NaN, which is noticed
        return torch.from_numpy(np.add.reduce(x.contiguous().numpy(), axis=1))


#: ``[n, m]`` to ``[n]``. A NaN among a row's numbers makes its rank NaN.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": _sum,
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "mean": lambda x: _sum(x) / x.shape[1],
    "median": lambda x: x.median(1).values,
}
#: Numbers that NumPy knows, too.
_IN_NUMPY = (torch.float32, torch.float64, torch.int64)


class _NoRank(RuntimeError, KeyError):
    """Data without the rank key: TorchRL's programs expect either. Says its message as it is, not as a key."""

    __str__ = Exception.__str__


class TensorDictMaxValueWriter(NativeWriter):
    """Keeps the ``max_size`` best rows: TensorDicts or dicts. In a full storage, a row replaces the worst row if it is better.

    The rank of a row is its ``rank_key``, reduced to one number in float64. A row that is only as good as the worst row
    is rejected. Of several worst rows, the one with the lowest number is replaced. ``add`` returns None for a rejected
    row. ``extend`` has the result of adding the rows one by one, and returns -1 for rows that were rejected or replaced
    by a later one. ``write_count`` counts the accepted rows, including replaced ones.

    Ranks follow from the stored rows: edits, ``empty`` and the writes of other writers and buffers count from the next
    write on. A NaN that is stored that way ranks below all numbers.

    Args:
        rank_key: the entry by which rows are ranked: a tensor, an array or numbers. Default ``("next", "reward")``.
        reduction: ``"sum"``, ``"max"``, ``"min"``, ``"mean"`` or ``"median"`` (the lower one of an even count), over
            all numbers of the entry in a row.
        track_generations: samples have ``"index_generation"``, as of a :class:`RoundRobinWriter`.

    Raises:
        NotImplementedError: ``reduction`` is another one.
        TypeError: ``rank_key`` is not a string or a tuple of strings.
        ValueError: the buffer's storage has ``ndim > 1`` or several lanes. On writing: a rank is NaN, or a row has no
            number to rank it by.
        RuntimeError: on writing: the data is neither a TensorDict nor a dict, nor a list of such rows.
        KeyError: on writing: the data has no ``rank_key``. It is a ``RuntimeError``, too.

    Cost of writing n rows: O(n log rows) on average; once for about every eighth of the storage that is replaced, one pass over
    all ranks, O(rows). In a full storage of tensors, ranked by one number per row, one native call does it.
    Up to 64 rows of which half are kept take at most three times as long as a plain ``extend``; each further kept row takes as
    long as a write to an arbitrary place. After another writer wrote to the storage or rows were edited, O(rows), because those
    rows are read again.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
    >>> rb.extend(TensorDict({"score": torch.tensor([3., 1., 2.])}, batch_size=[3]))
    tensor([ 0, -1,  1])
    >>> rb.add(TensorDict({"score": torch.tensor(2.)})) is None
    True
    >>> rb.add(TensorDict({"score": torch.tensor(5.)}))
    1
    >>> rb["score"]
    tensor([3., 5.])
    """

    traits = Traits(adds_index=True, rejects=True, places_natively=True)

    def __init__(
        self,
        rank_key: str | tuple[str, ...] | None = None,
        reduction: str = "sum",
        *,
        track_generations: bool = False,
        **later: Unpack[unsupported.TracingArguments],
    ) -> None:
        super().__init__(track_generations=track_generations, **later)  # type: ignore[arg-type]
        if reduction not in _REDUCTIONS:
            raise NotImplementedError(
                f"{type(self).__name__}: reduction: expected one of {list(_REDUCTIONS)}, got {reduction!r}."
            )
        who = f"{type(self).__name__}: rank_key"
        self._rank_key = ("next", "reward") if rank_key is None else field_paths.checked_path(rank_key, who)
        self._reduction = reduction
        self._stored: _Stored | None = None

    @property
    def rank_key(self) -> str | tuple[str, ...]:
        """Entry that rows are ranked by."""
        return field_paths.public(self._rank_key)

    @property
    def reduction(self) -> str:
        """How the numbers of a row become its rank."""
        return self._reduction

    def register_storage(self, storage: Any) -> None:
        """As for every writer. Raises ``ValueError`` for a storage with ``ndim > 1`` or several lanes.

        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter
        >>> TensorDictMaxValueWriter().register_storage(LazyTensorStorage(10, lanes=2))
        Traceback (most recent call last):
        ValueError: TensorDictMaxValueWriter: expected a storage with 1 lane, got 2: ...
        """
        if storage.ndim > 1:
            raise ValueError(
                f"{type(self).__name__}: expected a storage with ndim=1, got ndim={storage.ndim}: its rows would be parts of "
                "slots. Store each trajectory as one row, or flatten the data."
            )
        if storage.lanes > 1:
            raise ValueError(
                f"{type(self).__name__}: expected a storage with 1 lane, got {storage.lanes}: the best rows of all are in no "
                "order. Use lanes=1."
            )
        super().register_storage(storage)
        self._stored = None

    @property
    def ranking(self) -> Ranking:
        """Which rows are kept of saved ones, if there is no room for all."""
        return Ranking(self._rank_key, lambda values: _or_least(self._reduced(values, len(values))))

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        ranks = self._ranks_of(data, n)
        free = free_rows(extent, n)
        if len(free) == n:
            return WritePlan(rows=torch.from_numpy(free))
        storage = self._registered()
        with storage.placing:
            memory = storage.memory
            if self._stored is None or self._stored.memory is not memory:
                self._stored = _Stored(storage, memory, extent.capacity, self._rank_key, self._reduced)
            self._stored.catch_up()
            return self._stored.place(ranks, free)

    def written(self, plan: WritePlan, write: Write) -> None:
        if self._stored is not None:
            self._stored.written(plan, write)

    def write_of(self, data: object, *, batched: bool) -> tuple[Write, Tensor] | None:
        storage, stored = self._storage, self._stored
        if stored is None:
            return None
        with storage.placing:
            return stored.write_of(data, batched=batched) if stored.memory is storage.memory else None

    def get_insert_index(self, data: object) -> int | None:
        """The row that one row of data would be written to now; None if it would be rejected. Nothing is written.

        Raises: as ``add``.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
        >>> _ = rb.extend(TensorDict({"score": torch.tensor([3.0, 1.0])}, [2]))
        >>> [rb.writer.get_insert_index(TensorDict({"score": torch.tensor(score)}, [])) for score in (2.0, 0.5)]
        [1, None]
        """
        plan = self.place(self._registered().extent(), 1, 0, data)
        assert plan.rows is not None  # as place makes them
        return int(plan.rows[0]) if len(plan.rows) else None

    def _write(self, call: str, data: object, plan: WritePlan | None, *, batched: bool) -> Write:
        if not self._registered().initialized:  # data that is refused leaves no memory behind
            self._ranks_of(data, None if batched else 1)
        return super()._write(call, data, plan, batched=batched)

    def _ranks_of(self, data: object, n: int | None) -> NDArray[np.float64]:
        """Ranks of ``n`` rows that are to be written, float64 ``[n]``. None: of as many as the rank entry has."""
        if isinstance(data, list):  # of rows
            ranks = np.array([self._ranks_of(row, 1)[0] for row in data], dtype=np.float64)
        else:
            value = self._entry(data)
            if n is None:
                n = len(value) if isinstance(value, list) else (tuple(getattr(value, "shape", ())) or (1,))[0]
            ranks = self._reduced(value, n)
        if len(ranks) and math.isnan(ranks.max()):  # the largest of numbers with a NaN is NaN
            nan = np.isnan(ranks)
            raise ValueError(
                f"{type(self).__name__}: {self.rank_key!r}: expected ranks that are numbers, got NaN in row "
                f"{int(nan.argmax())} of {len(ranks)}. Leave out such rows."
            )
        return ranks

    def _entry(self, data: Any) -> object:
        """The rank entry of data."""
        if not nested.has_entries(data) or tensordicts.is_tensorclass(data):
            raise RuntimeError(
                f"{type(self).__name__} expects data to be a tensor collection: a TensorDict or a dict, got {type(data).__name__}. Use a "
                "RoundRobinWriter for other data."
            )
        value: object = nested.find(data, self._rank_key)
        if value is None:  # TensorDicts iterate over rows
            got = f"{self.rank_key!r}, got {[*map(str, data.keys())]}"
            missing = _NoRank(f"{type(self).__name__}: expected the rank key {got}.")
            raise missing
        return value

    def _reduced(self, value: object, n: int) -> NDArray[np.float64]:
        """Ranks from the rank entry of ``n`` rows."""
        if isinstance(value, np.ndarray | np.generic | list | int | float):
            numbers_of_python = not isinstance(value, np.ndarray | np.generic)
            value = checks.as_numbers(f"{type(self).__name__}: {self.rank_key!r}", value)
            value = value.float() if numbers_of_python and value.is_floating_point() else value  # as they are stored
        if not isinstance(value, Tensor) or value.dtype.is_complex:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{type(self).__name__}: {self.rank_key!r}: expected a tensor of real numbers, got {kind}.")
        if n and not value.numel():
            raise ValueError(
                f"{type(self).__name__}: {self.rank_key!r}: expected at least one number per row, got shape {list(value.shape)}."
            )
        ranks: NDArray[np.float64]
        if value.numel() == n and value.dtype in _IN_NUMPY and value.is_cpu and not value.requires_grad:
            ranks = value.resolve_neg().numpy().astype(np.float64)  # half the time
        else:
            numbers = value.detach().to("cpu", torch.float64).resolve_neg()
            if value.numel() > n:
                numbers = _REDUCTIONS[self._reduction](numbers.reshape(n, -1))
            ranks = numbers.numpy()
        return ranks.reshape(n)

    def state_dict(self) -> dict[str, object]:
        """What rows are ranked by: ``rank_key``, a list, and ``reduction``. Ranks follow from the rows.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score"))
        >>> _ = rb.extend(TensorDict({"score": torch.tensor([3.0, 1.0])}, [2]))
        >>> rb.writer.state_dict()
        {'rank_key': ['score'], 'reduction': 'sum'}
        """
        return {"rank_key": list(self._rank_key), "reduction": self._reduction}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        state.check_keys(state_dict, ("rank_key", "reduction"), type(self).__name__)
        here = self.state_dict()
        if state_dict != here:
            raise IncompatibleCheckpoint(
                f"{type(self).__name__}: expected rows that are ranked by {here}, as here, got {state_dict!r:.300}. Make the "
                "writer with those arguments."
            )
        return state.Loads()

    def config(self) -> dict[str, object]:
        tracks = {"track_generations": True} if self.traits.tracks_tickets else {}
        return {"rank_key": self.rank_key, "reduction": self._reduction, **tracks}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stored": None}


class _Stored:
    """Ranks of a storage's rows.

    The storage is the truth: its tickets say which rows changed since they were looked at. After a write of our own plan, and
    nothing else, there is nothing to look at.
    """

    def __init__(
        self,
        storage: Any,
        memory: Store | None,
        capacity: int,
        key: tuple[str, ...],
        reduced: Callable[[object, int], NDArray[np.float64]],
    ) -> None:
        self.memory = memory
        self._storage = storage
        self._key = key
        self._reduced = reduced
        self._ranking = native.Ranking(capacity)
        #: Ticket numbers that the rows had when they were last looked at, and which one was the next: those from there to
        #: the one that is next now are of our own writes.
        self._numbers, self._looked = np.full(capacity, -1), 0
        self._settled: int | None = None
        self._planned: WritePlan | None = None
        #: The field that they are ranked by; None: rows are no fields, or it is none of them.
        self._field: int | None = None
        if memory is not None:
            self._field = next((i for i, field in enumerate(memory.schema.fields) if field.key == key), None)

    def write_of(self, data: object, *, batched: bool) -> tuple[Write, Tensor] | None:
        """Place and write rows in one native call: what was written, and the rows that stay."""
        settled = self._settled
        if settled is None or self._field is None:
            return None
        self._settled = self._planned = None  # in case of an error or an interrupt
        field = self._field
        written = self._storage.write_natively(
            lambda core, intake: self._ranking.write_of(core, intake, field, data, batched, settled)
        )
        if written is None:
            self._settled = settled
            return None
        rows, lasting, first, self._settled = written
        return Write(rows, first), lasting

    def place(self, ranks: NDArray[np.float64], free: NDArray[np.int64]) -> WritePlan:
        """Rows of data in order: the first ones to the free rows, then each one to the worst row if it is better."""
        rows, kept = self._ranking.place(ranks, free)
        plan = WritePlan(rows=torch.from_numpy(rows), kept=None if len(kept) == len(ranks) else torch.from_numpy(kept))
        self._planned = plan
        return plan

    def written(self, plan: WritePlan, write: Write) -> None:
        """Bring up to date what a plan changed, if it is the last one and nothing was written since it was made."""
        if self._planned is not plan or write.first != self._settled:
            return
        assert plan.rows is not None  # as place makes them
        self._settled = self._planned = None  # in case of an interrupt
        self._ranking.keep()
        self._settled = write.first + len(plan.rows)

    def catch_up(self) -> None:
        """Learn what changed. Cost: O(1) if only our own plans were written, else O(rows)."""
        settled = self._storage.settled()
        if settled is None or settled != self._settled:
            self._look_again(settled)

    def _look_again(self, settled: int | None) -> None:
        """Compare all tickets, and read the rows that have another one."""
        until = self._settled or 0
        self._settled = self._planned = None  # in case of an interrupt
        numbers = self._storage.tickets_of(torch.arange(len(self._numbers), device="cpu")).numpy()
        changed = np.flatnonzero((numbers != self._numbers) & ((numbers < self._looked) | (numbers >= until)))
        ranks = np.full(len(changed), np.inf)  # of a row that is just being written: it is not ours to replace
        live = np.flatnonzero(numbers[changed] >= 0)
        if len(live):
            rows = changed[live]
            values, moved = self._storage.field(self._key, torch.from_numpy(rows), torch.from_numpy(numbers[rows]))
            if moved:
                whole = np.setdiff1d(np.arange(len(live)), moved)
                values = values[torch.from_numpy(whole)] if isinstance(values, Tensor) else [values[i] for i in whole]
                numbers[rows[moved]] = -1
                live, settled = live[whole], None
            ranks[live] = self._ranks_of(values, len(live))
        self._ranking.set(changed, ranks)
        self._numbers, self._looked, self._settled = numbers, settled or 0, settled

    def _ranks_of(self, values: Sequence[object] | Tensor, n: int) -> NDArray[np.float64]:
        if isinstance(values, Tensor):
            ranks = self._reduced(values, n)
        else:
            ranks = np.array([self._reduced(value, 1)[0] for value in values], dtype=np.float64)
        return _or_least(ranks)


def _or_least(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """A NaN that is stored ranks below all numbers."""
    return np.where(np.isnan(ranks), -np.inf, ranks)


class RemovingWriter(NativeWriter):
    """Fills the store, void rows first; once it is full, each row replaces one that a remover chooses.

    ``ReplayBuffer(remover=…)`` makes one. Rows of one call do not replace each other: of more rows than the store has, the newest
    stay, and ``extend`` returns -1 for the others. Rows are in no order of time, so the storage has one lane and ``ndim=1``, and samplers
    of windows and expanders are refused.

    Args:
        remover: a :class:`Remover`.
        track_generations: samples have ``"index_generation"``, as of a :class:`RoundRobinWriter`.

    Raises:
        TypeError: it has no method ``choose``.
        ValueError: the buffer's storage has ``ndim > 1`` or several lanes, or is a list. On writing: the remover chooses other rows than
            it was asked for.

    Cost: that of a write by number, and of the remover.

    >>> import torch
    >>> from engram import LazyTensorStorage, Lifo, RemovingWriter, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=RemovingWriter(Lifo()))
    >>> rb.extend(torch.arange(3)).tolist(), rb.add(torch.tensor(9))
    ([0, 1, 2], 2)
    """

    traits = Traits(adds_index=True, rejects=True)
    keeps_order = False

    def __init__(self, remover: Remover, *, track_generations: bool = False) -> None:
        super().__init__(track_generations=track_generations)
        if isinstance(remover, type) or not isinstance(remover, Remover):
            raise TypeError(
                f"remover: expected a component with the method choose(storage, n), such as Lifo(), got {remover!r:.80}."
            )
        self.remover = remover

    def register_storage(self, storage: Any) -> None:
        """As for every writer. Raises ``ValueError`` for a storage without fields, with ``ndim > 1`` or several lanes.

        >>> from engram import LazyTensorStorage, Lifo, RemovingWriter
        >>> RemovingWriter(Lifo()).register_storage(LazyTensorStorage(10, lanes=2))
        Traceback (most recent call last):
        ValueError: remover: expected a tensor storage with ndim=1 and one lane, got ...
        """
        if not storage.traits.has_fields or storage.ndim > 1 or storage.lanes > 1:
            raise ValueError(
                f"remover: expected a tensor storage with ndim=1 and one lane, got {storage!r}: rows that are chosen are in no order."
            )
        super().register_storage(storage)

    #: Which rows are kept of saved ones, if there is no room for all.
    ranking = "newest"

    def state_dict(self) -> dict[str, object]:
        """That rows are in no order: on other ranks each goes by itself, and the newest stay.

        >>> from engram import LazyTensorStorage, Lifo, ReplayBuffer
        >>> ReplayBuffer(storage=LazyTensorStorage(3), remover=Lifo()).writer.state_dict()
        {'ranking': 'newest'}
        """
        return {"ranking": self.ranking}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a :meth:`state_dict`. Raises ``IncompatibleCheckpoint``: it is of another writer.

        >>> from engram import Lifo, RemovingWriter
        >>> writer = RemovingWriter(Lifo())
        >>> change = writer.prepare_load(writer.state_dict())
        """
        if state_dict != self.state_dict():
            raise IncompatibleCheckpoint(
                f"{type(self).__name__}: expected the state {self.state_dict()}, as its rows are in no order, got {state_dict!r:.300}. "
                "Load it into a buffer with a writer of the kind that was saved."
            )
        return super().prepare_load({}, capacity)

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: object) -> WritePlan:
        kept = min(n, extent.capacity)
        free = torch.from_numpy(free_rows(extent, kept))
        rows = free
        if len(free) < kept:
            chosen = self._chosen(extent, kept - len(free), free)
            rows = torch.cat([free, chosen]) if len(free) else chosen
        return WritePlan(rows=rows, kept=None if kept == n else torch.arange(n - kept, n, device="cpu"))

    def _chosen(self, extent: Extent, n: int, free: Tensor) -> Tensor:
        rows: object = self.remover.choose(self._storage, n)
        if not _are_rows(rows, n, extent.capacity) or (len(free) and bool(torch.isin(rows, free).any())):
            raise ValueError(
                f"{type(self.remover).__name__}.choose: expected {n} rows in [0, {extent.capacity}), int64 on the CPU, each once and live, "
                f"got {rows!r:.200}."
            )
        return rows

    @property
    def recordable(self) -> bool:
        """Whether a store that notes the remover can make it again."""
        return self.remover.__class__ in KNOWN.values()

    def config(self) -> dict[str, object]:
        name = type(self.remover).__name__
        arguments = self.remover.config() if isinstance(self.remover, Noted) else {}
        tracks = {"track_generations": True} if self.traits.tracks_tickets else {}
        return {"remover": {"type": name, **arguments}, **tracks}

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Self:
        """Make the writer that a store noted.

        >>> from engram import RemovingWriter, StalestFirst
        >>> RemovingWriter.from_config(RemovingWriter(StalestFirst("version")).config())
        RemovingWriter(StalestFirst(version_key='version'))
        """
        noted = config["remover"]
        if not isinstance(noted, dict):
            raise TypeError(f"remover: expected a table with its type, got {noted!r:.80}.")
        remover = KNOWN[noted["type"]].from_config({key: it for key, it in noted.items() if key != "type"})
        return cls(remover, track_generations=bool(config.get("track_generations")))

    def __repr__(self) -> str:
        return f"RemovingWriter({self.remover!r}{', track_generations=True' if self.traits.tracks_tickets else ''})"


def _are_rows(rows: object, n: int, capacity: int) -> TypeGuard[Tensor]:
    """Whether they are ``n`` rows, one at least, each once."""
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or tuple(rows.shape) != (n,) or not rows.is_cpu:
        return False
    ordered = np.sort(rows.numpy())
    return bool(ordered[0] >= 0) and bool(ordered[-1] < capacity) and bool((ordered[1:] > ordered[:-1]).all())
