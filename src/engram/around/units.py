"""What a unit is, and the unit that changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engram._support.retries import Retries
from engram.errors import RowError
from engram.samplers import check_drawable
from engram.saved.parts import Noted

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.samplers._base import DeclaredSampler
    from engram.storages import Storage
    from engram.store import Key
    from engram.types import Draw, Info, NativeBatch, Shown


class Named(NamedTuple):
    """Rows of a storage, and how users name them."""

    index_of: Callable[[Tensor], Tensor]
    """Of rows ``[n]``: on the storage's device; with ``ndim > 1`` coordinates ``[n, ndim]``."""
    rows_of: Callable[[object], object]
    """The other way around; tuples of coordinates, too."""


class UnitReader:
    """Draws with a sampler, and reads the rows that a unit makes of what was drawn.

    Args:
        source: draws.
        named: how users name rows.
    """

    def __init__(self, source: DeclaredSampler, named: Named) -> None:
        self.source = source
        self.named = named

    def sample(
        self, storage: Storage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """Draw ``n`` rows with a key, and read: ``(columns, rows, info)``, as ``Sampler.sample_natively`` returns them."""
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, or the buffer is closed."""

    def draws_others(self, tickets: Tensor | None) -> bool:
        """Whether other rows may be drawn in place of some of a draw with these tickets."""
        traits = self.source.traits
        return (tickets is not None or traits.draws_uniformly) and not traits.consumes


def rows_of(rows: object) -> Tensor:
    """Rows as the native core reads them: int64, on the CPU, contiguous. Raises ``TypeError``: no ints."""
    if not isinstance(rows, Tensor):
        rows = torch.as_tensor(rows, device="cpu")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool:
        raise TypeError(f"sample_unit: expand: expected an index of ints, got {rows.dtype}.")
    return rows.to("cpu", torch.int64).reshape(-1).contiguous()


#: Rows as users name them; with ``ndim > 1`` a tuple of coordinates.
Index: TypeAlias = Tensor | tuple[Tensor, ...]


class SampleUnit(Noted):
    """What a drawn row stands for: ``ReplayBuffer(sample_unit=…)`` reads, in place of each drawn row, the rows that a unit names.

    For one of your own, override :meth:`expand`. It runs for every batch, between the draw and the read. Rows that are written over
    between the two are never mixed into a batch: the batch is drawn or expanded again.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, SampleUnit
    >>> class Pairs(SampleUnit):
    ...     def expand(self, index, info, storage):
    ...         return torch.stack([index, (index + 1) % len(storage)], -1).flatten(), info
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Pairs(), batch_size=3)
    >>> _ = rb.extend(torch.arange(10))
    >>> batch = rb.sample().view(3, 2)
    >>> bool(((batch[:, 1] - batch[:, 0]) % 10 == 1).all())
    True
    """

    #: What a store's record may name.
    known: ClassVar[dict[str, type[SampleUnit]]] = {}
    #: Whether :meth:`config` says all: a unit of the user's own is not noted in a store.
    recordable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.recordable = cls.__module__.startswith("engram.")
        if cls.recordable:
            cls.known[cls.__name__] = cls
        elif "expand" in vars(cls) and "read_with" not in vars(cls):  # else its parent's rows would be read
            cls.read_with = SampleUnit.read_with  # type: ignore[method-assign]

    @property
    def total(self) -> int:
        """Records that a drawn row stands for; 1 where the unit does not say."""
        return 1

    def expand(self, index: Index, info: Info, storage: Storage) -> tuple[Index, Info]:
        """The rows to read in place of those that were drawn.

        Args:
            index: int64 ``[B]`` drawn rows; with ``ndim > 1`` a tuple of ``ndim`` such tensors.
            info: what the sampler says of them. Entries with one value per drawn row must be repeated for each row that is returned.
            storage: of the buffer. Writing to it is not allowed.

        Returns:
            ``(index, info)``: int64 ``[N]`` live rows in the same form, and ``info``, to which entries may be added. Those that are
            tensors ``[N, ...]`` become entries of sampled TensorDicts.

        >>> import torch
        >>> from engram import Transition
        >>> Transition().expand(torch.tensor([3, 5]), {}, None)
        (tensor([3, 5]), {})
        """
        raise NotImplementedError(
            f"{type(self).__name__}.expand: a sample unit returns (index, info) of the rows to read."
        )

    def check(self, storage: Storage, source: DeclaredSampler) -> None:
        """Refuse a storage or a sampler. A buffer calls it when it takes the unit.

        Raises ``TypeError``: the unit cannot be used with one of them.

        >>> from engram import ListStorage, RandomSampler, Sequence
        >>> Sequence(2).check(ListStorage(10), RandomSampler())
        Traceback (most recent call last):
        TypeError: sample_unit: Sequence: expected a tensor storage, whose rows have end flags, got a ListStorage. ...
        """

    def read_with(self, source: DeclaredSampler, named: Named) -> UnitReader | None:
        """What draws with a sampler and reads batches of this unit; None: as without a unit. A buffer asks for it.

        >>> from engram import RandomSampler, Transition
        >>> Transition().read_with(RandomSampler(), None)  # rows are read as they are drawn
        """
        return ExpandedReader(self, source, named)


class Transition(SampleUnit):
    """A drawn row stands for itself: batches are as without a unit.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, Transition
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Transition(), batch_size=4)
    >>> _ = rb.extend(torch.arange(10))
    >>> rb.sample().shape
    torch.Size([4])
    """

    def expand(self, index: Index, info: Info, storage: Storage) -> tuple[Index, Info]:
        return index, info

    def read_with(self, source: DeclaredSampler, named: Named) -> UnitReader | None:
        return None


class ExpandedReader(UnitReader):
    """Asks a unit for rows, and reads them as they were when the draw began."""

    def __init__(self, unit: SampleUnit, source: DeclaredSampler, named: Named) -> None:
        super().__init__(source, named)
        self._unit = unit

    def sample(
        self, storage: Storage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """As :meth:`UnitReader.sample`.

        Raises:
            TypeError: the unit returned something else than ``(index, info)``. RowError: it named rows that hold nothing.
            WriterStalled: rows were written at every try.
        """
        del shown  # the unit may say anything
        source, retries, bits = self.source, Retries(), key.value
        draw: Draw | None = None
        try:
            while True:
                clock = storage.next_number()
                extent = storage.extent()
                check_drawable(extent.size)
                if draw is None or self.draws_others(draw.tickets):
                    source.bind(storage)
                    draw = source.draw(extent, n, bits)
                rows, info = self._expanded(storage, draw.rows, dict(draw.info))
                tickets = storage.tickets_of(rows)
                columns, moved = storage.read(rows, tickets)
                moved = sorted({*moved, *(tickets >= clock).nonzero().flatten().tolist()})
                if not moved:
                    break
                self._check_live(storage, rows)
                retries.again(rows, moved, ", of a sample unit,")
                bits = retries.key_of(key.value)
        except BaseException:
            if source.traits.consumes and draw is not None:
                source.were_read(draw, failed=True)
            raise
        if source.traits.consumes:
            source.were_read(draw)
        if storage.memory is not None:
            storage.memory.count_sampled(rows)
        info.pop("index_generation", None)  # of what was drawn
        if numbered or source.traits.prioritized:
            info["index_generation"] = storage.writes_of(rows, tickets)
        return columns, rows, info

    def _expanded(self, storage: Storage, drawn: Tensor, info: Info) -> tuple[Tensor, Info]:
        index = self.named.index_of(drawn)
        expanded: object = self._unit.expand(tuple(index.unbind(-1)) if index.ndim > 1 else index, info, storage)
        if not isinstance(expanded, tuple) or len(expanded) != 2 or not isinstance(expanded[1], dict):
            got = [type(it).__name__ for it in expanded] if isinstance(expanded, tuple) else type(expanded).__name__
            raise TypeError(
                f"sample: {type(self._unit).__name__}.expand: expected (index, info), an index and a dict, got {got}."
            )
        rows, capacity = rows_of(self.named.rows_of(expanded[0])), storage.extent().capacity
        outside = rows[(rows < 0) | (rows >= capacity)]
        if len(outside):
            raise RowError(
                f"sample: {type(self._unit).__name__}.expand: expected rows in [0, {capacity}), got {int(outside[0])}."
            )
        return rows, expanded[1]

    def _check_live(self, storage: Storage, rows: Tensor) -> None:
        gone = torch.nonzero(storage.hold_nothing(rows))
        if len(gone):
            raise RowError(
                f"sample: {type(self._unit).__name__}.expand: expected live rows, got row {int(rows[gone[0]])}, which holds nothing."
            )
