"""Units: what a buffer makes of each drawn row. ``Sequence`` reads the window around it, and learns the priorities of rows from windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from engram._support import native, words
from engram._support.checks import as_ints, check_choice, check_count, check_number, check_type
from engram._support.field_paths import FieldPath, as_path, public
from engram._support.retries import Retries
from engram.around.episodes import END_KEYS, Boundaries, Episodes, TrajectoryKeys, numbers_by_path
from engram.around.windows import with_starts
from engram.errors import RowError
from engram.samplers import check_drawable
from engram.samplers._base import DeclaredSampler
from engram.samplers.redraw import Redraw
from engram.saved.parts import Noted
from engram.storages import Storage, TensorStorage, coordinates
from engram.store import blocks, ragged_rows, store
from engram.store.memory import as_rows
from engram.types import Draw, Entry, Info, NativeBatch, Shown


class Named(NamedTuple):
    """Rows of a storage, and how users name them."""

    #: Of rows ``[n]``: on the storage's device; with ``ndim > 1`` coordinates ``[n, ndim]``.
    index_of: Callable[[Tensor], Tensor]
    #: The other way around; tuples of coordinates, too.
    rows_of: Callable[[object], object]


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
        self, storage: Storage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
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
    return as_ints("sample_unit: expand", rows, "an index of ints").reshape(-1).contiguous()


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
        raise NotImplementedError(f"{type(self).__name__}.expand: a unit returns (index, info) of the rows to read.")

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


class Expanded(NamedTuple):
    """What a unit made of drawn rows."""

    #: Of the fields; unspecified where something moved.
    columns: list[Tensor]
    #: int64 ``[N]``, those of the batch.
    rows: Tensor
    #: Theirs.
    tickets: Tensor
    info: Info
    #: The places among the rows where something was written meanwhile, in order.
    moved: list[int]


class ExpandedReader(UnitReader):
    """Asks a unit for rows, and reads them as they were when the draw began."""

    def __init__(self, unit: SampleUnit, source: DeclaredSampler, named: Named) -> None:
        super().__init__(source, named)
        self._unit = unit

    def sample(
        self, storage: Storage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
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
                columns, rows, tickets, info, moved = self.expanded(storage, draw, clock)
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

    def expanded(self, storage: Storage, draw: Draw, clock: int) -> Expanded:
        """Rows for those that were drawn, and what they hold. ``clock``: the number of the first write that came since."""
        rows, info = self._expanded(storage, draw.rows, dict(draw.info))
        tickets = storage.tickets_of(rows)
        columns, moved = storage.read(rows, tickets)
        moved = sorted({*moved, *(tickets >= clock).nonzero().flatten().tolist()})
        return Expanded(columns, rows, tickets, info, moved)

    def _expanded(self, storage: Storage, drawn: Tensor, info: Info) -> tuple[Tensor, Info]:
        index, who = self.named.index_of(drawn), f"sample: {type(self._unit).__name__}.expand"
        expanded: object = self._unit.expand(tuple(index.unbind(-1)) if index.ndim > 1 else index, info, storage)
        if not isinstance(expanded, tuple) or len(expanded) != 2 or not isinstance(expanded[1], dict):
            got = [type(it).__name__ for it in expanded] if isinstance(expanded, tuple) else type(expanded).__name__
            raise TypeError(f"{who}: expected (index, info), an index and a dict, got {got}.")
        rows, capacity = rows_of(self.named.rows_of(expanded[0])), storage.extent().capacity
        outside = rows[(rows < 0) | (rows >= capacity)]
        if len(outside):
            raise RowError(f"{who}: expected rows in [0, {capacity}), got {int(outside[0])}.")
        return rows, expanded[1]

    def _check_live(self, storage: Storage, rows: Tensor) -> None:
        gone = torch.nonzero(storage.hold_nothing(rows))
        if len(gone):
            raise RowError(
                f"sample: {type(self._unit).__name__}.expand: expected live rows, got row {int(rows[gone[0]])}, which holds nothing."
            )


_BOUNDARIES = ("pad", "stop", "include_reset")
_MAX_STEPS = 1 << 40
#: Places in what windows tell.
_STEPS, _ANCHORS, _ANCHOR_TICKETS = 1, 2, 4
_AROUND = ", or a step around it,"


class Windows(NamedTuple):
    """Windows around anchors, one behind the other: tensors ``[n * total]``."""

    rows: Tensor
    #: int64; -1 in all of a window of which something moved.
    tickets: Tensor
    valid: Tensor
    #: How many are valid.
    steps: int
    #: Numbers of windows, numbers of steps, anchors, steps that are learned from; and tickets of anchors. Perhaps none.
    told: list[Tensor]


class WindowTable:
    """Where the trajectories of a store end, for a unit."""

    def __init__(self, memory: store.Store, unit: Sequence) -> None:
        """Raises ``TypeError``: rows have no fields. ``KeyError``: the flag is not stored. ``ValueError``: windows longer than a lane."""
        name, numbers = type(unit).__name__, numbers_by_path(memory)
        if not numbers:
            kind = memory.schema.structure.kind
            raise TypeError(
                f"sample: {name}: expected a tensor storage of rows with fields, such as TensorDicts, got rows of one tensor ({kind})."
            )
        boundaries = Boundaries((), ()) if unit.crosses else _boundaries_of(memory, numbers, unit, name)
        steps = memory.lane_length // math.prod(memory.schema.columns)
        if unit.reach > steps:
            raise ValueError(
                f"sample: {name}: expected windows of at most {steps} steps, as long as a lane of the storage, got {unit.reach} "
                f"({unit.total} records, {unit.dilation} apart). Draw shorter ones, or use a larger storage."
            )
        table = f"sequence-{'-'.join(map(str, boundaries.which)) or 'all'}{'-whole' if boundaries.all_flags else ''}"
        self.memory = memory
        #: The field that gets a mark at the first record of each window; None: none does.
        self.init = numbers.get(unit.init_key) if unit.init_key is not None else None
        self._table = Episodes(memory, boundaries, table).table()
        self._spec = native.WindowSpec(unit.total, True, False, 0, 0, 1, unit.dilation, unit.burn_in, 0, True)
        self._total, self._who = unit.total, name
        self._learned, self._shifted = unit.length, unit.episode_boundary == "stop"

    def read(
        self, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool
    ) -> tuple[Windows, list[Tensor], list[int]]:
        """The windows around rows, what they hold, and the numbers of the windows of which something moved. As :meth:`around`."""
        if not self.memory.reads_apart:
            return self.around(rows, tickets, told=told, numbered=numbered, layout=self.memory.layout)
        windows = self.around(rows, tickets, told=told, numbered=numbered)[0]
        columns, moved = self.memory.read(windows.rows, expected=windows.tickets)
        return windows, columns, sorted({place // self._total for place in moved})

    def around(
        self, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool, layout: native.Layout | None = None
    ) -> tuple[Windows, list[Tensor], list[int]]:
        """The same, but only fields of a layout are read; None: no field is, and no window counts as moved.

        Args:
            rows, tickets: int64 ``[n]``; no tickets: any.
            told: whether windows say what their steps are, and with ``numbered`` the tickets of anchors.
            layout: of the fields.

        Raises ``RowError``: a row is outside the storage.
        """
        rows, expected = as_rows(rows, "sample"), None if tickets is None else as_rows(tickets, "sample")
        learned = self._learned if told else 0
        if self._table.mixed():
            words.warn_of_mixed(self._who)
        try:
            said, columns, moved, steps = self._table.around(
                self.memory.core, layout, rows, expected, self._spec, self._shifted, learned, numbered
            )
        except IndexError as error:
            raise RowError(f"sample: {error}.") from error
        records, numbers, valid, *told_of = said
        return Windows(records, numbers, valid, steps, told_of), columns, moved


def _boundaries_of(memory: store.Store, numbers: dict[FieldPath, int], unit: Sequence, name: str) -> Boundaries:
    """Ids, and the unit's flag; the usual ends, if that is the default one. Raises ``KeyError``: the flag is not stored, or nothing is."""
    key, keys = unit.done_key, unit.rules
    assert key is not None  # else windows cross trajectories
    usual = key == END_KEYS[0]
    if not usual:
        keys = keys._replace(end_keys=(key,))
    if usual or key in numbers:
        try:
            return keys.boundaries(memory.schema.fields, numbers, f"sample: {name}")
        except RuntimeError:
            if usual and keys != TrajectoryKeys(None, None, None):  # they were named
                raise
    raise KeyError(
        f"sample: {name}: done_key: expected a stored field, one of {[public(path) for path in numbers]}, got {public(key)!r}. Name "
        "the flag of a trajectory's last step, or pass done_key=None where there is one trajectory."
    )


class WindowReader(UnitReader):
    """Draws anchors, finds the windows around them natively, and reads these.

    A window with a row that moves meanwhile is replaced by that around another row. Where rows are drawn once per epoch, it is read
    again.
    """

    def __init__(self, unit: Sequence, source: DeclaredSampler, named: Named) -> None:
        super().__init__(source, named)
        self._unit = unit
        self._table: WindowTable | None = None

    def moved(self) -> None:
        self._table = None

    def _table_of(self, memory: store.Store) -> WindowTable:
        table = self._table
        if table is None or table.memory is not memory:
            table = self._table = WindowTable(memory, self._unit)  # two threads at once get the same one of the store
        return table

    def sample(
        self, storage: Storage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """As :meth:`UnitReader.sample`.

        Raises:
            NoSampleable: nothing to draw. WriterStalled: a window moved at every try.
            KeyError, TypeError, ValueError: as :class:`WindowTable`.
        """
        extent, source = storage.extent(), self.source
        check_drawable(extent.size)
        memory = cast("store.Store", storage.memory)
        table = self._table_of(memory)
        source.bind(storage)
        draw = source.draw(extent, n, key.value)
        told, numbered = shown != "nothing", numbered or source.traits.prioritized
        said: Mapping[Entry, object] = draw.info
        try:
            windows, columns, moved = table.read(draw.rows, draw.tickets, told=told, numbered=numbered)
            if moved:
                others = self.source if self.draws_others(draw.tickets) else None
                redraw = Redraw(storage, draw, others, key.value, detail=_AROUND)
                self._read_again(table, redraw, windows, columns, moved)
                said = redraw.info
                windows = windows._replace(steps=int(windows.valid.count_nonzero()))
        except BaseException:
            if source.traits.consumes:
                source.were_read(draw, failed=True)
            raise
        if source.traits.consumes:
            source.were_read(draw)
        _count(memory, windows)
        if not told:
            return columns, None, {}
        return columns, windows.rows, self._info(table, windows, columns, said, len(draw.rows))

    def _read_again(
        self, table: WindowTable, redraw: Redraw, windows: Windows, columns: list[Tensor], moved: list[int]
    ) -> None:
        """Replace the windows that moved."""
        total, changing = self._unit.total, windows.told[_ANCHORS:]  # which window a record is of stays
        while moved:
            places, fresh = redraw.again(moved)
            records = (places.unsqueeze(1) * total + torch.arange(total, device="cpu")).flatten()
            told, numbered = bool(windows.told), len(windows.told) > _ANCHOR_TICKETS
            found, read, still = table.read(fresh.rows, fresh.tickets, told=told, numbered=numbered)
            mine = (*windows[:3], *changing, *columns)
            theirs = (*found[:3], *found.told[_ANCHORS:], *read)
            for to, of in zip(mine, theirs, strict=False):  # a field may have been added between both reads
                to[records if ragged_rows.items_in(to) is not None else records.to(to.device)] = of
            again = places.tolist()
            moved = [again[i] for i in still]

    def _info(
        self, table: WindowTable, windows: Windows, columns: list[Tensor], said: Mapping[Entry, object], n: int
    ) -> Info:
        """What a batch is said to be: entries on the storage's device."""
        info = self._unit.told(windows, said, n, self.named.index_of)
        if table.init is not None:
            flag = columns[table.init]
            starts = windows.told[_STEPS] == 0
            info[public(cast("FieldPath", self._unit.init_key))] = with_starts(flag, starts.to(flag.device))
        info.pop("index_generation", None)  # of the anchors
        if len(windows.told) > _ANCHOR_TICKETS:
            of = table.memory.writes_of
            info["index_generation"] = of(windows.rows, windows.tickets)
            info["anchor_generation"] = of(windows.told[_ANCHORS], windows.told[_ANCHOR_TICKETS])
        if table.memory.is_native:
            return info
        return {name: of.to(table.memory.device) if isinstance(of, Tensor) else of for name, of in info.items()}


class Sequence(SampleUnit):
    """A drawn row stands for a window around it: the anchor of a sequence of ``burn_in + length + bootstrap`` records.

    For recurrent networks: ``burn_in`` records before the anchor warm the state up, the ``length`` records from the anchor on are
    learned from, and the ``bootstrap`` records after these are for targets of several steps. The sampler chooses the anchors, with
    or without priorities. A batch of ``B`` anchors is flat, ``[B * total]``: ``batch.reshape(B, -1)`` has a window in each row.

    ``info``, and sampled TensorDicts, have besides what the sampler says (repeated for each record)::

        sequence_id, step_in_sequence   int64 [B * total]: which window, and the position in it
        validity_mask                   bool: a record of its own, and no repeated one
        learning_mask                   bool: among the ``length`` records from the anchor on
        anchor_index                    int64: the row that was drawn, [B * total], with ndim > 1 [B * total, ndim]
        anchor_generation               int64: its generation, where there is "index_generation", that of the record
        is_init                         where it is stored: as stored, or the first record of a window

    Transforms see ``done_key``, and those of ``end_keys`` that are stored, set at the last record of each window; afterwards they
    are as stored.

    A window holds steps of one trajectory and one lane (of one column, with ``ndim > 1``), and never crosses the seam of a full ring,
    where the newest row precedes the oldest. Where it would reach beyond, the first or last step that it may hold stands for those
    that are missing, and ``validity_mask`` is false there.

    Priorities belong to anchors. ``update_tensordict_priority(batch)`` gives each anchor the largest of the errors of its valid
    records, or with ``priority_eta`` that of R2D2; :meth:`anchor_priorities` computes them for other batches.

    Args:
        length: records to learn from.
        episode_boundary: what happens at the end of a trajectory. ``"pad"``: its last step is repeated. ``"stop"``: the window
            begins as much earlier as is needed to end there, but its anchor no earlier than the trajectory; what is still missing is
            padded. ``"include_reset"``: windows go on into the next trajectory.
        done_key: the stored flag of a trajectory's last step. By default every usual end counts, as for :class:`SliceSampler`:
            rows with ``terminated`` and ``truncated`` need no ``done``. A trajectory also ends where its id changes. None: all that is
            stored is one trajectory.
        burn_in: records before the anchor.
        bootstrap: records after those to learn from.
        dilation: steps of a trajectory from one record to the next.
        priority_eta: the weight of the largest error, against the mean of the errors to learn from, in a new priority: 0.9 in the
            paper (Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", ICLR 2019, section 2.3).
            None: the largest error of all valid records, as in TorchRL.
        init_key: the flag of first steps; None: it stays as it is stored.
        end_keys, traj_key, end_when: as for :class:`SliceSampler`; ``end_keys`` stands in place of ``done_key``.

    Raises:
        TypeError: no ints, or no key. ValueError: a size out of range, ``priority_eta`` outside [0, 1], another boundary.
        RuntimeError: ``end_keys`` beside another ``done_key`` than the default one.
        When a buffer takes it: TypeError: a list storage; a sampler of windows, or an expander.
        When drawing: TypeError: rows of one tensor each. KeyError: ``done_key`` is not stored, or by default
            no end and no id. RuntimeError: none of ``end_keys`` is stored, and no id. ValueError: windows longer than a lane.

    Cost: O(B · total), of which none depends on how much is stored. The first draw scans the flags once, and keeps 16 bytes per row.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from engram import LazyTensorStorage, Sequence, TensorDictReplayBuffer
    >>> unit = Sequence(length=3, burn_in=1)
    >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sample_unit=unit, batch_size=2)
    >>> done = torch.arange(10).unsqueeze(-1) % 5 == 4
    >>> _ = rb.extend(TensorDict({"obs": torch.arange(10), "next": {"done": done}}, [10]))
    >>> rb.sample()["obs"].shape
    torch.Size([8])
    >>> index, info = unit.expand(torch.tensor([3]), {}, rb.storage)
    >>> index.tolist(), info["validity_mask"].tolist()
    ([2, 3, 4, 4], [True, True, True, False])
    """

    noted = ("length", "episode_boundary", "done_key", "burn_in", "bootstrap", "dilation", "priority_eta", "init_key")

    def __init__(
        self,
        length: int,
        episode_boundary: Literal["pad", "stop", "include_reset"] = "pad",
        done_key: object = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
        *,
        priority_eta: float | None = None,
        init_key: object = "is_init",
        end_keys: Iterable[object] | None = None,
        traj_key: object = None,
        end_when: str | None = None,
    ) -> None:
        self.length = check_count("Sequence: length", length, "records", most=_MAX_STEPS)
        check_choice("Sequence: episode_boundary", episode_boundary, _BOUNDARIES)
        self.episode_boundary = episode_boundary
        self.done_key = as_path(done_key, "Sequence: done_key")
        self.burn_in = check_count("Sequence: burn_in", burn_in, "records", least=0, most=_MAX_STEPS)
        self.bootstrap = check_count("Sequence: bootstrap", bootstrap, "records", least=0, most=_MAX_STEPS)
        self.dilation = check_count("Sequence: dilation", dilation, "steps", most=_MAX_STEPS)
        if self.reach > _MAX_STEPS:
            raise ValueError(f"Sequence: expected windows over at most {_MAX_STEPS} steps, got {self.reach}.")
        self.priority_eta = priority_eta
        if priority_eta is not None:
            self.priority_eta = check_number("Sequence: priority_eta", priority_eta, least=0, most=1)
        self.init_key = as_path(init_key, "Sequence: init_key")
        self.rules = TrajectoryKeys.of("Sequence", traj_key, end_keys, None, end_when)
        if self.rules.end_keys is not None and self.done_key != END_KEYS[0]:
            raise RuntimeError("Sequence: expected one of done_key and end_keys, got both. Put all into end_keys.")

    @property
    def total(self) -> int:
        """Records of a window: ``burn_in + length + bootstrap``."""
        return self.burn_in + self.length + self.bootstrap

    @property
    def reach(self) -> int:
        """Steps of a trajectory from the first to the last record of a window, both included."""
        return (self.total - 1) * self.dilation + 1

    @property
    def crosses(self) -> bool:
        """Whether windows go on into the next trajectory."""
        return self.done_key is None or self.episode_boundary == "include_reset"

    def check(self, storage: Storage, source: DeclaredSampler) -> None:
        name = type(self).__name__
        if not storage.traits.has_fields:
            raise TypeError(
                f"sample_unit: {name}: expected a tensor storage, whose rows have end flags, got a {type(storage).__name__}. Use "
                "LazyTensorStorage or LazyMemmapStorage."
            )
        if source.traits.draws_windows:
            raise TypeError(
                f"sample_unit: {name}: expected a sampler of rows, which become anchors, got {source!r}, which draws windows by itself. "
                "Leave one of them out."
            )

    def read_with(self, source: DeclaredSampler, named: Named) -> UnitReader | None:
        return WindowReader(self, source, named)

    def told(
        self, windows: Windows, said: Mapping[Entry, object], n: int, index_of: Callable[[Tensor], Tensor]
    ) -> Info:
        """What is said of each record of the windows around ``n`` rows.

        Args:
            windows: as the native core finds them.
            said: of the rows. Entries that are tensors ``[n, ...]`` are repeated; the others stay.
            n: rows.
            index_of: how users name rows.

        >>> import torch
        >>> from engram import Sequence
        >>> from engram.around.sequence import Windows
        >>> row, yes = torch.tensor([3]), torch.tensor([True])
        >>> windows = Windows(row, row, yes, 1, [row - 3, row - 3, row, yes])
        >>> Sequence(1).told(windows, {}, 1, lambda rows: rows)["anchor_index"]
        tensor([3])
        """
        info: Info = {
            name: value.repeat_interleave(self.total, 0)
            if isinstance(value, Tensor) and value.ndim > 0 and len(value) == n
            else value
            for name, value in said.items()
        }
        info["sequence_id"], info["step_in_sequence"], anchors, info["learning_mask"] = windows.told[:_ANCHOR_TICKETS]
        info["validity_mask"], info["anchor_index"] = windows.valid, index_of(anchors)
        return info

    def config(self) -> dict[str, object]:
        """As of every unit: the arguments as plain values, of ``end_keys``, ``traj_key`` and ``end_when`` those that were given.

        >>> from engram import Sequence
        >>> Sequence(4, end_keys=["won"]).config()["end_keys"]
        ['won']
        """
        rules = self.rules.config()  # those that were given: earlier versions do not know them
        return {**super().config(), **{name: value for name, value in rules.items() if value is not None}}

    def expand(self, index: Index, info: Info, storage: Storage) -> tuple[Index, Info]:
        """The windows around rows of a storage.

        Args:
            index: int64 ``[B]``; with ``ndim > 1`` a tuple of such coordinates, or ``[B, ndim]``.
            info: of the rows. Entries that are tensors ``[B, ...]`` are repeated; the others stay.
            storage: a tensor storage of engram's that was written to.

        Returns:
            ``(index, info)`` of the records, as a batch has them, without generations and ``is_init``.

        Raises: as drawing does. RowError: a row that holds nothing. RuntimeError: the storage was never written to.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, Sequence
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"step": torch.arange(4), "done": torch.tensor([False, False, True, False])})
        >>> Sequence(2, done_key="done").expand(torch.tensor([1, 2]), {}, rb.storage)[0].tolist()
        [1, 2, 2, 2]
        """
        storage = check_type(f"{type(self).__name__}.expand", storage, TensorStorage, "a tensor storage")
        memory = storage.memory
        if memory is None:
            raise RuntimeError(f"{type(self).__name__}.expand: expected a storage with rows, got an empty one.")
        named = torch.stack(list(index), -1) if isinstance(index, tuple) else index
        rows = rows_of(storage.rows_at(named.to("cpu", torch.int64)) if storage.ndim > 1 else named)
        table, redraw = WindowTable(memory, self), Redraw(storage, Draw(rows), None, None, "expand", _AROUND)
        windows = table.around(rows, None, told=True, numbered=False)[0]
        while moved := (windows.tickets[:: self.total] < 0).nonzero().flatten().tolist():
            redraw.again(moved)
            windows = table.around(rows, None, told=True, numbered=False)[0]
        index_of = partial(coordinates, columns=storage.columns)
        told, records = self.told(windows, info, len(rows), index_of), index_of(windows.rows)
        return (tuple(records.unbind(-1)) if records.ndim > 1 else records), told

    def anchor_priorities(self, td_error: Tensor, info: Entries) -> AnchorPriorities:
        """New priorities of the anchors of a batch, of the errors of its records.

        Args:
            td_error: ``[B * total]`` or ``[B, total]``, finite and at least 0: of every record. More dimensions are reduced by max.
            info: of the batch, or a sampled TensorDict: ``"anchor_index"``, ``"validity_mask"``, ``"learning_mask"`` and, if it is
                there, ``"anchor_generation"``.

        Returns:
            ``anchors``, ``priority`` and ``generation``, each anchor once: the arguments of ``update_priority``.

        Raises:
            KeyError: ``info`` is of no sequences. RuntimeError: another number of errors than of records.

        >>> import torch
        >>> from engram import Sequence
        >>> info = {"anchor_index": torch.tensor([7, 7, 7]), "validity_mask": torch.tensor([True, True, False]),
        ...     "learning_mask": torch.tensor([True, True, True])}
        >>> Sequence(3, priority_eta=0.5).anchor_priorities(torch.tensor([1.0, 3.0, 9.0]), info).priority
        tensor([2.5000])
        """
        call, eta = "anchor_priorities", self.priority_eta  # None: the largest error of the valid records
        missing = [key for key in _NEEDED if info.get(key, None) is None]
        if missing:
            raise KeyError(f"{call}: expected info of sequences, with {missing}, got {sorted(map(str, info.keys()))}.")
        valid, learned, index = (cast("Tensor", info.get(key, None)) for key in _NEEDED)
        generation = cast("Tensor | None", info.get("anchor_generation", None))
        count, batch = valid.numel(), valid.shape
        if tuple(td_error.shape[: len(batch)]) != tuple(batch) and td_error.numel() != count:
            raise RuntimeError(
                f"{call}: td_error: expected an error per record, {list(batch)}, got {list(td_error.shape)}. Give a record that was "
                "padded any."
            )
        errors = _one_per_record(td_error.detach().reshape(count, -1), 1)
        columns = index.shape[valid.ndim :]  # coordinates of each anchor
        anchors, sizes = _numbers_of(index.reshape(count, *columns))
        counted = valid.reshape(-1) if eta is None else (valid & learned).reshape(-1)
        counted, errors = counted.to(anchors.device), errors.to(anchors.device)
        found, which = torch.unique(anchors[counted], return_inverse=True)
        errors = errors[counted]
        empty = errors.new_zeros(len(found))
        priority = empty.scatter_reduce(0, which, errors, "amax", include_self=False)
        if eta is not None:
            priority = eta * priority + (1 - eta) * empty.scatter_reduce(0, which, errors, "mean", include_self=False)
        if generation is not None:
            held = generation.reshape(-1)[counted]
            generation = held.new_zeros(len(found)).scatter_reduce(0, which, held, "amin", include_self=False)
        return AnchorPriorities(coordinates(found, sizes[1:]), priority, generation)


class Entries(Protocol):
    """What is said of the records of a batch: ``info``, or a TensorDict."""

    def get(self, key: str, default: None) -> object:
        """An entry; None: there is none."""

    def keys(self) -> Iterable[object]:
        """Of the entries."""


_NEEDED = ("validity_mask", "learning_mask", "anchor_index")


class AnchorPriorities(NamedTuple):
    """New priorities of anchors, each once.

    >>> import torch
    >>> from engram import AnchorPriorities, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(alpha=0.6, beta=0.4))
    >>> _ = rb.extend({"step": torch.arange(5)})
    >>> it = AnchorPriorities(torch.tensor([2, 4]), torch.tensor([0.5, 3.0]), None)  # as Sequence.anchor_priorities returns it
    >>> rb.update_priority(it.anchors, it.priority, generation=it.generation)
    """

    #: int64 ``[k]``; with ``ndim > 1`` ``[k, ndim]``.
    anchors: Tensor
    #: ``[k]``, of the dtype of the errors.
    priority: Tensor
    #: int64 ``[k]``; None: the batch says none, and every anchor that is live is updated.
    generation: Tensor | None


def r2d2_priority(td_error: Tensor, mask: Tensor | None = None, *, eta: float = 0.9) -> Tensor:
    """The priority of sequences by R2D2: ``eta * max + (1 - eta) * mean`` of the absolute errors in each.

    Args:
        td_error: float ``[B, T, ...]``: errors of ``B`` sequences. More dimensions are reduced by max.
        mask: bool ``[B, T]``: errors that count, such as ``learning_mask & validity_mask``. Default: all.
        eta: the weight of the largest error, in [0, 1].

    Returns:
        ``[B]`` of the same dtype and device, for ``update_priority``; 0 where nothing counts. Detached.

    Raises:
        RuntimeError: fewer than two dimensions, or a mask of another shape. TypeError: no floats. ValueError: ``eta`` outside [0, 1].

    Source: Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", ICLR 2019, section 2.3.

    >>> import torch
    >>> from engram import r2d2_priority
    >>> r2d2_priority(torch.tensor([[1.0, -3.0], [0.0, 2.0]]), eta=0.5)
    tensor([2.5000, 1.5000])
    """
    eta = check_number("r2d2_priority: eta", eta, least=0, most=1)
    if not td_error.is_floating_point():
        raise TypeError(f"r2d2_priority: td_error: expected floats, got {td_error.dtype}.")
    if td_error.ndim < 2:
        raise RuntimeError(f"r2d2_priority: td_error: expected [B, T, ...], got {list(td_error.shape)}.")
    errors = _one_per_record(td_error.detach().abs(), 2)
    if mask is None:
        mask = torch.ones_like(errors, dtype=torch.bool)
    elif mask.shape != errors.shape:
        raise RuntimeError(f"r2d2_priority: mask: expected {list(errors.shape)}, got {list(mask.shape)}.")
    mask = mask.to(errors.device, torch.bool)
    counted = errors.where(mask, 0)
    return eta * counted.amax(1) + (1 - eta) * counted.sum(1) / mask.sum(1).clamp(min=1)


def _numbers_of(index: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """One number for each anchor, int64 ``[n]``, and of coordinates ``[n, ndim]`` the sizes by which they are told apart."""
    if index.ndim == 1:
        return index, ()
    sizes = tuple((index.amax(0) + 1).tolist()) if len(index) else (1,) * index.shape[1]
    numbers = torch.zeros_like(index[:, 0])
    for place, size in zip(index.unbind(1), sizes, strict=True):
        numbers = numbers * size + place
    return numbers, sizes


def _one_per_record(errors: Tensor, dims: int) -> Tensor:
    """Errors with more dimensions than those of records, reduced by max."""
    return errors if errors.ndim == dims else errors.flatten(dims).amax(dims)


def _count(memory: store.Store, windows: Windows) -> None:
    """Count what was read: padding names some rows again."""
    if memory.core.hears_samples:
        memory.count_sampled(windows.rows[windows.valid])
    else:
        memory.core.count_all_sampled(windows.steps)
