"""The three values that components exchange, and the protocols they follow.

The writer says *where*, the storage holds *what*, the sampler says *which*: storages, samplers and writers do not know
each other. Letters: ``B`` batch, ``n`` rows of a write, ``C`` capacity, ``L`` lanes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from typing_extensions import TypeVar

    #: What a buffer's batches are; anything, where a type checker cannot know.
    Batch = TypeVar("Batch", default=Any)
else:
    from typing import TypeVar

    Batch = TypeVar("Batch")

#: An entry of a batch: its name, or the path of names to it.
Entry: TypeAlias = str | tuple[str, ...]
#: A batch and its info, as users get them.
Told: TypeAlias = "tuple[Batch, dict[Entry, Any]]"
#: What a batch is said to be, beside its data.
Info: TypeAlias = dict[Entry, object]
#: Arguments: where tensors are to be, seconds to wait, rows. None: the default, without end, the constructor's.
Device: TypeAlias = "torch.device | str | None"
Wait: TypeAlias = float | None
StrPath: TypeAlias = "str | os.PathLike[str]"
Size: TypeAlias = int | None
#: Makes a tensor of a compressed one, and of its ``"shape"``, ``"dtype"`` and ``"device"``.
Decompress: TypeAlias = "Callable[[Tensor, dict[str, object]], Tensor]"
#: Columns, rows and info of a batch.
ReadBatch: TypeAlias = "tuple[list[Tensor], Tensor, Info]"
#: Which of these a user will see beside the columns: neither rows nor info; or both, of which the info's entries are not in the
#: batch, or take the place of the batch's own, so that they may be its columns, changed.
Shown: TypeAlias = Literal["nothing", "beside", "within"]
#: The same, as samplers read it natively: the rows may be None where nothing is shown.
NativeBatch: TypeAlias = "tuple[list[Tensor], Tensor | None, Info]"
#: Reads the rows of a draw: columns, and places of rows that have moved.
ReadDraw: TypeAlias = "Callable[[Draw], tuple[list[Tensor], list[int]]]"

__all__ = ["Declared", "Draw", "Extent", "Listener", "RowStorage", "Sampler", "Traits", "Write", "WritePlan", "Writer"]


class Extent(NamedTuple):
    """What is live now. Made by the storage, read by samplers and writers.

    A lane is a ring of ``capacity // lanes`` consecutive rows; lane ``k`` starts at row ``k * (capacity // lanes)``. Its
    first ``filled[k]`` rows hold data.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(6, lanes=2), batch_size=4)
    >>> _ = rb.extend(torch.arange(4), lane=1)
    >>> extent = rb.storage.extent()
    >>> extent.capacity, extent.filled, extent.size
    (6, (0, 3), 3)
    """

    #: Rows of the store.
    capacity: int
    #: ``[L]`` rows inside each lane's extent, holes included.
    filled: tuple[int, ...]
    #: ``[L]`` row that each lane will write next: of a full ring, its oldest row.
    seam: tuple[int, ...]
    #: int64, sorted: rows inside the extent that hold nothing, left by a writer that died; None if there are none.
    holes: Tensor | None = None

    @property
    def size(self) -> int:
        """Live rows, over all lanes."""
        return sum(self.filled) - (0 if self.holes is None else len(self.holes))

    def contains(self, rows: Tensor) -> Tensor:
        """Whether rows are inside their lane's extent and no holes: bool, same shape.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.zeros(3))
        >>> rb.storage.extent().contains(torch.tensor([2, 3])).tolist()
        [True, False]
        """
        import torch

        length = self.capacity // len(self.filled)
        inside = (rows >= 0) & (rows < self.capacity)
        lane = torch.where(inside, rows, 0) // length
        inside &= rows - lane * length < torch.tensor(self.filled, device="cpu")[lane]
        return inside if self.holes is None else inside & ~torch.isin(rows, self.holes)

    def rows(self, ranks: Tensor) -> Tensor:
        """The rows with these ranks among the live ones, in row order (lane after lane).

        Args:
            ranks: int64 ``[B]``, each in ``[0, size)``.

        Returns:
            int64 ``[B]`` in ``[0, capacity)``; ``ranks`` itself where rank and row agree. Cost: O(B log (L + holes)).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.zeros(3))
        >>> rb.storage.extent().rows(torch.tensor([0, 2])).tolist()
        [0, 2]
        """
        total = sum(self.filled)
        if self.holes is None and (len(self.filled) == 1 or total == self.capacity):
            return ranks
        import torch

        length = self.capacity // len(self.filled)
        filled = torch.tensor(self.filled, device="cpu")
        ends = filled.cumsum(0)
        starts = ends - filled
        if self.holes is not None:
            lane = self.holes // length
            before = starts[lane] + self.holes % length - torch.arange(len(self.holes), device="cpu")
            ranks = ranks + torch.searchsorted(before, ranks, right=True)
        lane = torch.searchsorted(ends, ranks, right=True)
        return ranks - starts[lane] + lane * length

    def back(self, lanes: Tensor, steps: Tensor) -> Tensor:
        """The row that each of these lanes wrote so many rows ago; 1: its newest.

        Args:
            lanes: int64 ``[B]``, each in ``[0, L)``.
            steps: int64 ``[B]``, each in ``[1, filled[lane]]``.

        Returns:
            int64 ``[B]``. A hole counts as a row. Where a writer chose the rows, their order in the lane is that of their numbers.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend(torch.arange(6))
        >>> rb.storage.extent().back(torch.tensor([0, 0]), torch.tensor([1, 4])).tolist()  # the ring goes on with row 2
        [1, 2]
        """
        import torch

        filled, seam = (torch.tensor(words, device="cpu")[lanes] for words in (self.filled, self.seam))
        start = lanes * (self.capacity // len(self.filled))
        return start + (seam - start - steps) % filled.clamp(min=1)

    def in_order(self, lanes: Tensor, most: int | None = None, places: Tensor | None = None) -> Tensor:
        """The live rows of lanes, lane after lane, each from its oldest to its newest row.

        Args:
            lanes: int64 ``[k]``, each in ``[0, L)``.
            most: of each lane only so many places back from its newest row; None: all.
            places: int64 ``[n]``: only the rows at these places of the whole order, of which a hole is one.

        Returns:
            int64 ``[n]``. Cost: O(n log k).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend(torch.arange(6))
        >>> rb.storage.extent().in_order(torch.tensor([0])).tolist()
        [2, 3, 0, 1]
        """
        import torch

        counts = torch.tensor(self.filled, device="cpu")[lanes].clamp(max=self.capacity if most is None else most)
        ends = counts.cumsum(0)
        places = torch.arange(int(ends[-1]) if len(ends) else 0, device="cpu") if places is None else places
        which = torch.searchsorted(ends, places, right=True)
        rows = self.back(lanes[which], ends[which] - places)
        return rows if self.holes is None else rows[~torch.isin(rows, self.holes)]


class WritePlan(NamedTuple):
    """Where a writer wants rows to go. Making one has no side effect.

    >>> import torch
    >>> from engram import WritePlan
    >>> WritePlan(lane=2).lane, WritePlan(rows=torch.tensor([4, 5])).rows.tolist()
    (2, [4, 5])
    """

    #: Append to this lane, or row ``i`` to lane ``lane[i]`` (int64 ``[n]``); None where rows are named.
    lane: int | Tensor | None = None
    #: int64 ``[n]``: write these rows by number. Cursors stay; the extent grows to cover them.
    rows: Tensor | None = None
    #: int64 ``[k]``, ascending: only these of the ``n`` rows of data are written, to ``rows`` ``[k]``; the others are
    #: rejected. None: all are written.
    kept: Tensor | None = None

    def reported(self, written: Tensor, n: int) -> Tensor:
        """int64 ``[n]``: where each row of the data was written, -1 for a rejected one. ``written``: the planned rows.

        >>> import torch
        >>> from engram import WritePlan
        >>> plan = WritePlan(rows=torch.tensor([7]), kept=torch.tensor([1]))
        >>> plan.reported(plan.rows, 3).tolist()
        [-1, 7, -1]
        """
        if self.kept is None:
            return written
        import torch

        rows = torch.full((n,), -1, device="cpu")
        rows[self.kept] = written
        return rows


class Write(NamedTuple):
    """What was written where. Made by the store.

    >>> import torch
    >>> from engram import Write
    >>> Write(torch.tensor([5, -1, 6]), first=40).tickets.tolist()
    [40, -1, 41]
    """

    #: int64 ``[n]``; -1 for a rejected row. Of a row that is named twice the last entry stays.
    rows: Tensor
    #: Ticket number of the first row that was written; the others follow, unless ``numbers`` has them.
    first: int
    #: int64 ``[n]``: the ticket numbers, where rows were written in more than one step.
    numbers: Tensor | None = None

    @property
    def tickets(self) -> Tensor:
        """int64 ``[n]`` ticket numbers: larger is newer, never reused; -1 for a rejected row."""
        import torch

        if self.numbers is not None:
            return self.numbers
        written = self.rows >= 0
        return torch.where(written, self.first - 1 + written.cumsum(0), -1)

    @property
    def survivors(self) -> Tensor:
        """int64 ``[n]``: the rows, but -1 for one that a later row of the same write replaced."""
        rows = self.rows.tolist()
        if len(set(rows)) + max(rows.count(-1), 1) - 1 == len(rows):  # none is named twice
            return self.rows
        import torch

        last = {row: i for i, row in enumerate(rows)}
        return torch.tensor([row if last[row] == i else -1 for i, row in enumerate(rows)], device="cpu")


class Draw(NamedTuple):
    """Which rows to read. Made by a sampler.

    >>> import torch
    >>> from engram import Draw
    >>> Draw(torch.tensor([0, 2, 2]), info={"age": torch.tensor([2, 0, 0])}).rows.tolist()
    [0, 2, 2]
    """

    #: int64 ``[B]`` rows in ``[0, capacity)``, on the CPU.
    rows: Tensor
    #: int64 ``[B]`` numbers the rows must still have when they are read, or None: any whole row will do.
    tickets: Tensor | None = None
    #: Named arrays with one entry per drawn row, handed to the user beside the batch.
    info: Mapping[Any, object] = {}


class Traits(NamedTuple):
    """What a component can do. It says so once, and the buffer reads it when it takes the component.

    The defaults are those of a component that says nothing, such as a sampler with the five methods of the protocol.

    >>> from engram import PrioritizedSampler, RandomSampler
    >>> RandomSampler().traits.draws_uniformly, PrioritizedSampler(10, 0.6, 0.4).traits.takes_priorities
    (True, True)
    """

    # ---- samplers
    #: Draws are uniform, independent, and without state: the store may make them in place of :meth:`Sampler.draw`.
    draws_uniformly: bool = False
    #: ``sample_natively`` draws and reads in one native call, in place of :meth:`Sampler.draw`. One that draws windows has
    #: ``sample_apart`` and ``rules``, too.
    reads_natively: bool = False
    #: Batches are windows of consecutive steps: ``info["index"]`` is a tuple.
    draws_windows: bool = False
    #: Each live row comes once per epoch, so no other row can be drawn in its place.
    draws_once: bool = False
    #: Draws come to an end, which ``ran_out`` says.
    has_epochs: bool = True
    #: A saved state takes the sampler back to an earlier place in its epoch.
    can_rewind: bool = False
    #: :meth:`Sampler.observe` does something with writes.
    listens: bool = True
    #: Draws are by priority, and rows may bring their first one along.
    prioritized: bool = False
    #: :meth:`Sampler.update_priority` has an effect.
    takes_priorities: bool = True
    # ---- writers
    #: Every row goes behind the last one of its lane: :meth:`Writer.place` need not be asked.
    appends: bool = False
    #: Every write and ``empty`` are refused.
    read_only: bool = False
    #: Rows may be rejected: they are reported as -1, and so is a row that a later one of the same batch replaced.
    rejects: bool = False
    #: Rows read back by number carry ``"index"``.
    adds_index: bool = False
    #: Samples carry ``"index_generation"``.
    tracks_tickets: bool = False
    # ---- storages
    #: Rows are tensors in named fields of a store; else they are items of a list.
    has_fields: bool = False
    # ---- writers, too: new ones stand last, as calls name them by place
    #: ``write_of`` places and writes data in one native call, where it can, in place of :meth:`Writer.place`.
    places_natively: bool = False
    # ---- samplers, too
    #: Rows are used up: those of a draw count when it is made. It may have fewer than were asked for, and no others are drawn in place
    #: of those that move before they are read.
    consumes: bool = False
    #: Of a storage: its rows are on a server.
    is_remote: bool = False
    # ---- storages of one's own
    #: Rows are a ring in the order of writing, so that consecutive ones are consecutive steps: :meth:`RowStorage.place` returns those
    #: from the seam on. Samplers that draw windows need it.
    in_order: bool = False
    #: There is a method ``empty()``, which forgets all rows: for ``rb.empty()``, and for states and dumps that are loaded.
    empties: bool = False
    # ---- storages and writers
    #: Made with ``compilable=True``: functions under ``torch.compile`` do not look into the calls of a buffer that has it.
    untraced: bool = False
    # ---- samplers, too
    #: Rows that are there may not be drawable yet: ``sample(timeout=…)`` waits until they are.
    awaits_rows: bool = False

    @property
    def reads_windows(self) -> bool:
        """Whether windows are drawn and read natively."""
        return self.draws_windows and self.reads_natively

    def without(self, overridden: Collection[str]) -> Traits:
        """The traits of a subclass that overrides these methods.

        Args:
            overridden: names of methods. One that no trait speaks for changes nothing.

        Returns:
            New traits: this one stays as it is.

        >>> from engram import RandomSampler
        >>> traits = RandomSampler().traits
        >>> traits.draws_uniformly, traits.without({"draw"}).draws_uniformly
        (True, False)
        """
        traits = self
        if "draw" in overridden:
            traits = traits._replace(draws_uniformly=False, reads_natively=False, has_epochs=True)
        if "observe" in overridden:
            traits = traits._replace(draws_uniformly=False, listens=True)
        if "update_priority" in overridden:
            traits = traits._replace(draws_uniformly=False, takes_priorities=True)
        if "place" in overridden:
            traits = traits._replace(appends=False)
        if "place" in overridden or "written" in overridden:
            traits = traits._replace(places_natively=False)
        return traits


class Declared:
    """Base of the components that declare their traits.

    A subclass has the traits of its parent, unless it overrides a method that one of them speaks for, or declares its own.
    """

    traits: Traits = Traits()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "traits" in vars(cls):
            return
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Declared) and "traits" in vars(base))
        if isinstance(parent.traits, Traits):  # else they follow from something else
            methods = ("draw", "observe", "update_priority", "place", "written")
            overridden = [name for name in methods if getattr(cls, name, None) is not getattr(parent, name, None)]
            cls.traits = parent.traits.without(overridden)


class Listener(Protocol):
    """What a storage tells of writes: a buffer."""

    @property
    def listens(self) -> bool:
        """Whether :meth:`observe` does something with writes."""

    def observe(self, write: Write | None, data: object) -> None:
        """Rows were written or edited; ``write=None``: all were forgotten."""

    def moved(self) -> None:
        """The rows lie in another store now, or in none until the next write."""


class Changes(NamedTuple):
    """Rows written or edited since some ticket. Made by the store, for samplers that need the writes of other processes.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend(torch.arange(3))
    >>> seen = rb.storage.memory.changes()
    >>> _ = rb.add(torch.tensor(7))  # perhaps by another process
    >>> rb.storage.memory.changes(since=seen.next).rows.tolist()
    [3]
    """

    #: int64 ``[n]``, each once, the one that was written longest ago first.
    rows: Tensor
    #: int64 ``[n]`` ticket numbers of the rows, ascending.
    tickets: Tensor
    #: Ask for this ticket the next time. Rows that were written beside a write still under way come again.
    next: int


class Commit(Protocol):
    """A load that was checked, and has changed nothing yet."""

    def commit(self) -> None:
        """Make the change. Call it once."""


class BufferLoad(Commit, Protocol):
    """A load of a buffer."""

    @property
    def converted(self) -> str:
        """How rows of another sampler's buffer are drawn afterwards; empty: as they were."""


class StorageLoad(Commit, Protocol):
    """A load of a storage."""

    @property
    def capacity(self) -> int:
        """Rows that there may be afterwards."""

    def allocate(self) -> None:
        """Take the memory that it needs, if there is none yet: the commit does so otherwise. Raises ``OSError``: no space."""


class RowsTarget(tuple["Tensor", ...]):
    """The tensors of a store whose rows are replaced, ``[capacity, *shape]``, one per field."""

    #: Writes rows of a field from one on, past its mapping: ``(number, first, rows)``. None: write to the tensors.
    put: Callable[[int, int, Tensor], None] | None = None
    #: Where the items of ragged fields go, for :func:`engram.store.rings.fill_rings`; None: no field is ragged.
    rings: object = None


class ItemsSource(Protocol):
    """Items of a list that another library saved."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def length(self) -> int:
        """How many there are, in rows ``[0, length)``."""

    @property
    def capacity(self) -> int | None:
        """Rows of a list that is full and whose oldest item is not the first; None: of one of any size."""

    @property
    def position(self) -> int:
        """Position that the next item gets."""

    @property
    def write_count(self) -> int:
        """Items ever written."""

    def read(self, decompress: Decompress | None, *, whole: bool) -> Iterator[object]:
        """The items in the order of their rows.

        Args:
            decompress: reads the streams; None: they are zlib's or Zstandard's.
            whole: all items are kept in memory as they are.

        Raises ``CorruptCheckpoint``, ``IncompatibleCheckpoint``.
        """


class RowsSource(Protocol):
    """Where the rows of a load come from."""

    def fill(self, tensors: RowsTarget) -> None:
        """Fill the tensors of a store."""


class Form(NamedTuple):
    """How a buffer keeps its rows, as far as a checkpoint must know."""

    #: The class of the storage.
    kind: str
    capacity: int
    lanes: int
    ndim: int
    #: Rows are tensors, so that a plan can place them one by one.
    takes_rows: bool
    #: Which rows stay, if rows are no steps of trajectories: the best, or the newest.
    ranking: Ranking | Literal["newest"] | None = None
    #: Equal to that of an older checkpoint as long as its tickets mean the rows that are stored now; None: unknown.
    lineage: object = None

    @property
    def lane_length(self) -> int:
        return self.capacity // self.lanes


class Ranking(NamedTuple):
    """How a writer ranks rows, of which it keeps the best."""

    #: Of the field that decides.
    key: tuple[str, ...]
    #: The value of each of ``n`` rows of that field, float64 ``[n]``, without NaN: larger ones are better.
    values: Callable[[Tensor], NDArray[np.float64]]


@runtime_checkable
class Sampler(Protocol):
    """What a custom sampler implements, and all it implements.

    One that declares ``reads = ("group", ("next", "reward"))`` gets a :class:`FieldReader` of these fields as the fourth argument of
    ``draw``.

    >>> import torch
    >>> from engram import Draw, LazyTensorStorage, ReplayBuffer
    >>> class Newest:
    ...     def draw(self, extent, batch_size, key):
    ...         return Draw(torch.arange(extent.size - batch_size, extent.size))
    ...     def observe(self, write, data): ...
    ...     def update_priority(self, index, priority, *, generation=None): ...
    ...     def state_dict(self):
    ...         return {}
    ...     def load_state_dict(self, state_dict): ...
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=Newest(), batch_size=3)
    >>> _ = rb.extend(torch.arange(10))
    >>> rb.sample()
    tensor([7, 8, 9])
    """

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Choose ``batch_size`` rows. ``key`` is 64 random bits, new for every draw: derive all randomness from it.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.sampler.draw(rb.storage.extent(), 4, key=7).rows.shape
        torch.Size([4])
        """

    def observe(self, write: Write | None, data: Any) -> None:
        """Hear of rows written or edited, after the fact; ``write=None`` means the buffer was emptied.

        Writes of other processes are not told: :attr:`Draw.rows` must come from the extent, not from what was heard.

        Args:
            write: the rows, int64 ``[n]``, and their tickets.
            data: what the caller handed over, before it was stored. Do not change it.

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> class Watching(RandomSampler):
        ...     def observe(self, write, data):
        ...         print("emptied" if write is None else f"wrote {write.rows.tolist()}")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=Watching())
        >>> _ = rb.extend(torch.arange(3))
        wrote [0, 1, 2]
        >>> rb.empty()
        emptied
        """

    def update_priority(self, index: Tensor, priority: Tensor, *, generation: Tensor | None = None) -> None:
        """Take new priorities for rows drawn earlier, or ignore them.

        Args:
            index: int64 ``[n]``: rows, as ``info["index"]`` had them.
            priority: ``[n]``.
            generation: int64 ``[n]``: tickets that the rows must still have; those that were overwritten since are to be ignored.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(max_capacity=4, alpha=1.0, beta=1.0)
        >>> generator = torch.Generator().manual_seed(0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=8, generator=generator)
        >>> _ = rb.extend(torch.arange(4))
        >>> sampler.update_priority(torch.tensor([0, 1, 2]), torch.zeros(3))
        >>> set(rb.sample().tolist())  # the others are drawn almost never
        {3}
        """

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors and plain values. Copies.

        >>> from engram import RandomSampler
        >>> RandomSampler().state_dict()
        {}
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state made by ``state_dict``. Copies.

        >>> from engram import RandomSampler
        >>> RandomSampler().load_state_dict({})
        """


@runtime_checkable
class Writer(Protocol):
    """What a custom writer implements: a policy of places. The cursors belong to the store.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, WritePlan
    >>> class ByValue:
    ...     def place(self, extent, n, lane, data):
    ...         return WritePlan(rows=data % extent.capacity)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=ByValue())
    >>> rb.extend(torch.tensor([13, 25])).tolist()
    [3, 5]
    """

    def place(self, extent: Extent, n: int, lane: int | Tensor, data: Any) -> WritePlan:
        """Choose where the ``n`` rows of ``data`` go. Must not have side effects; raises to refuse the write.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> RoundRobinWriter().place(rb.storage.extent(), 3, 0, torch.arange(3))
        WritePlan(lane=0, rows=None, kept=None)
        """


@runtime_checkable
class RowStorage(Protocol):
    """What a storage of one's own implements, and all it implements: rows in a place that engram does not know.

    ``ReplayBuffer(storage=mine)`` works with a plain class that has these four methods. Data is a dict of tensors, the leaves of rows by
    name, such as ``next.reward``, of the dtypes and shapes of the first row; the one of rows that are a tensor each is called
    ``_-single-tensor-_``. The buffer builds rows of them: TensorDicts, tensorclasses, dicts, tuples, dataclasses. Calls never overlap,
    also where several threads sample. Tickets, priorities and tables of trajectories are the buffer's, in memory. What else the class
    can do it declares: ``traits = Traits(in_order=True, empties=True)``.

    What rows are built of is in the attribute ``engram_schema``, a string that the buffer sets on the object. One that keeps it beside
    rows that are there before the buffer gives back the same kind of rows. Without it they are nested dicts until the first write.

    >>> import torch
    >>> from engram import Extent, ReplayBuffer, Traits
    >>> class Ring:
    ...     traits = Traits(in_order=True)
    ...     def __init__(self, capacity):
    ...         self.capacity, self.rows, self.seam = capacity, {}, 0
    ...     def extent(self):
    ...         return Extent(self.capacity, (len(self.rows),), (self.seam,))
    ...     def place(self, n):
    ...         return (self.seam + torch.arange(n)) % self.capacity
    ...     def write(self, rows, data, *, append):
    ...         for i, row in enumerate(rows.tolist()):
    ...             self.rows[row] = {name: value[i].clone() for name, value in data.items()}
    ...         if append:
    ...             self.seam = (int(rows[-1]) + 1) % self.capacity
    ...     def read(self, rows):
    ...         found = [self.rows[row] for row in rows.tolist()]
    ...         return {name: torch.stack([one[name] for one in found]) for name in found[0]}
    >>> rb = ReplayBuffer(storage=Ring(4), batch_size=2)
    >>> rb.extend(torch.arange(6)).tolist()
    [0, 1, 2, 3, 0, 1]
    >>> rb[:].tolist()
    [4, 5, 2, 3]
    """

    @abstractmethod
    def extent(self) -> Extent:
        """What is live now: a capacity that never changes, and one lane without holes, whose first rows hold data.

        A storage that finds rows where it keeps them, from an earlier process, says so here.

        >>> from engram import Extent
        >>> Extent(capacity=100, filled=(3,), seam=(3,)).size
        3
        """

    @abstractmethod
    def place(self, n: int) -> Tensor:
        """The rows that the next ``n`` rows of data go to: int64 ``[n]``. Must not have side effects: the write may be refused.

        Each is a live one or follows them without a gap. Of a ring, those from the seam on; ``n`` may be larger than the capacity.

        >>> import torch
        >>> (98 + torch.arange(4)) % 100  # of a ring of 100 rows, whose seam is at 98
        tensor([98, 99,  0,  1])
        """

    @abstractmethod
    def write(self, rows: Tensor, data: dict[str, Tensor], *, append: bool) -> None:
        """Let these rows hold this data, whole or not at all.

        Args:
            rows: int64 ``[k]``, each named once; live ones, or those that follow them.
            data: the leaves of rows by name, ``[k, ...]`` each, on the CPU. Copy what is kept: it may be the caller's memory.
            append: the rows are those of :meth:`place`, so of a ring the seam is ``(rows[-1] + 1) % capacity`` from now on. False: they
                were named by number, or are edited; the seam stays.

        >>> import torch
        >>> kept = torch.zeros(10)
        >>> kept[torch.tensor([4, 2])] = torch.tensor([0.5, 1.5])  # a copy of the data
        >>> kept[2]
        tensor(1.5000)
        """

    @abstractmethod
    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """Live rows, int64 ``[k]``, one perhaps several times: new memory, the leaves by name as they were written.

        Rows that are built already, such as TensorDicts, are taken, too.

        >>> import torch
        >>> kept = torch.arange(10) * 2
        >>> kept[torch.tensor([3, 3, 1])]
        tensor([6, 6, 2])
        """
