"""The base of the slice samplers: draws windows of consecutive steps of one trajectory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias, cast

import torch

from engram._support import fork, words
from engram._support import native as _native
from engram._support.field_paths import WINDOW_ENDS, FieldPath, as_path, plain, public
from engram._support.retries import Retries
from engram.around.episodes import StaticTable, TrajectoryKeys, fragments_table, numbers_by_path
from engram.around.settings import Setting, WindowSettings, WindowSpec
from engram.errors import EMPTY, NoSampleable
from engram.format.schema import Schema
from engram.samplers import _base, prioritized
from engram.store import blocks
from engram.store.memory import dlpack_specs
from engram.store.sampled import SampledStorage
from engram.store.store import Store
from engram.types import Draw, Entry, Extent, Info, NativeBatch, ReadBatch, ReadDraw, Shown

Merge: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Table: TypeAlias = _native.Trajectories | _native.Fragments
NativeArguments: TypeAlias = tuple[
    _native.Store, _native.Layout, int, int, _native.WindowSpec, _native.Batched, _native.Marks
]

#: The entry of a draw's info that says at which places windows end: int64 ``[windows]``.
LAST_STEPS = "engram.ends"
#: Retries, 5 ms apart, before ``NoSampleable`` is raised although a trajectory is long enough.
_TRIES = 100
#: What windows leave out, as :meth:`WindowSampler.sample_apart` takes it; None: nothing.
Finished: TypeAlias = tuple[int, int] | None
#: A draw that reads no field.
_NO_FIELDS = _native.Layout([])
#: What may be shown of a batch; apart: the marks alone, as the caller reads the fields.
Way: TypeAlias = Shown | Literal["apart"]
_SHOWN: tuple[Way, ...] = ("nothing", "beside", "within", "apart")


class _Bound(NamedTuple):
    """A store, its table of trajectories, and the marks of windows that are drawn from it.

    Replaced as a whole: while one thread draws, others may draw from other stores.
    """

    memory: Store
    schema: Schema
    layout: _native.Layout
    table: Table
    static: StaticTable | None
    #: Marks and how windows are laid out: by what is shown of a batch, with tickets or without. "apart": all is shown, but the native core
    #: does not read the columns.
    ways: dict[tuple[Way, bool], tuple[EndMarks, _native.Batched]]
    #: The field that trajectories are told by; None: they are told by end flags, or are static.
    id_key: FieldPath | None

    def fits(self, memory: Store | None) -> bool:
        """Whether this is what a store has now."""
        return memory is not None and self.memory is memory and self.schema is memory.schema


class WindowSampler(_base.NativeSampler):
    """Base of the slice samplers. A subclass says how windows are chosen: :meth:`_choose`."""

    traits = _base.NativeSampler.traits._replace(reads_natively=True, draws_windows=True)

    #: Draws the first steps of windows by priority, and holds the priorities; None: they are drawn without.
    anchors: prioritized.PrioritizedSampler | None = None

    #: Says of rows, int64 ``[n]``, with their tickets which ones may be drawn, bool ``[n]``; None: all. Windows have no others.
    admits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    #: Whether the queue is that of completed windows, and not the online one.
    streaming: ClassVar[bool] = False

    _keys = ("end_key", "end_keys", "traj_key", "truncated_key", "init_key")
    noted: tuple[str, ...] = ("num_slices", "slice_len", *_keys, "strict_length", "index")

    num_slices = Setting[int | None]()
    slice_len = Setting[int | None]()
    end_key = Setting[FieldPath | None]()
    end_keys = Setting[tuple[FieldPath, ...] | None]()
    truncated_key = Setting[FieldPath | None]()
    init_key = Setting[FieldPath | None]()
    strict_length = Setting[bool]()
    pad_output = Setting[bool]()
    window = Setting[WindowSpec | None]()
    flat = Setting[bool]()
    index = Setting[str]()

    def __init__(self, settings: WindowSettings) -> None:
        self._unbind()
        self.settings = settings

    # ---- the store and its table -------------------------------------------------------------------------------------

    def _unbind(self) -> None:
        self._lock = fork.rlock()
        self._storage: SampledStorage | None = None
        self._bound: _Bound | None = None
        self._splits: dict[int, tuple[int, int, _native.WindowSpec]] = {}

    def change(self, **entries: object) -> None:
        """Replace entries of the settings. The next draw follows the new ones."""
        with self._lock:
            self.settings = replace(self.settings, **entries)  # type: ignore[arg-type] # as unchecked as any attribute
            self._splits, self._bound = {}, None

    @property
    def _table(self) -> Table | None:
        return None if self._bound is None else self._bound.table

    def bind(self, storage: SampledStorage) -> None:
        """Take a storage to draw from. The first draw makes its table.

        The buffer calls this when it takes the sampler and before every draw, as a sampler may serve several buffers.
        """
        if storage is not self._storage:
            with self._lock:
                self._storage, self._bound = storage, None

    def moved(self) -> None:
        with self._lock:
            self._bound = None

    @property
    def traj_key(self) -> str | FieldPath | None:
        """The field that is constant within a trajectory: the one given, else the one that the first draw found; None: there is none."""
        bound, given = self._bound, self.settings.traj_key
        found = given if given is not None or bound is None else bound.id_key
        return None if found is None else public(found)

    @traj_key.setter
    def traj_key(self, key: object) -> None:
        self.change(traj_key=as_path(key, f"{type(self).__name__}: traj_key"))

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: static boundaries are not noted in a store."""
        return self.rules is not None

    @property
    def rules(self) -> TrajectoryKeys | None:
        """Which trajectories its windows are of; None: those of static boundaries, which no field tells."""
        settings = self.settings
        ends = settings.end_keys if settings.end_key is None else (settings.end_key,)
        keys = TrajectoryKeys(settings.traj_key, ends, settings.index, settings.end_when)
        return keys if settings.static is None else None

    def _clock(self) -> tuple[int, int]:
        """Ticket number of the store's next write, and the number that states count from."""
        memory = None if self._storage is None else self._storage.memory
        return (0, 0) if memory is None else (int(memory.core.next_ticket), memory.base)

    def _bound_to(self, storage: SampledStorage | None, length: int) -> _Bound:
        """A storage's table and marks, looked for if another storage was drawn from last."""
        memory = None if storage is None else storage.memory
        bound = self._bound
        if bound is None or not bound.fits(memory):
            with self._lock:
                bound = self._bound
                while bound is None or not bound.fits(memory):  # again, if a field is added meanwhile
                    bound = self._bound = self._find(storage, memory, length)
        return bound

    def _find(self, storage: SampledStorage | None, memory: Store | None, length: int) -> _Bound:
        name, settings = type(self).__name__, self.settings
        if storage is None:
            raise RuntimeError(f"{name}: expected a storage: give the sampler to a ReplayBuffer, or bind(storage).")
        if memory is None:
            if not storage.initialized:
                raise NoSampleable(EMPTY)
            got = f"got a {type(storage).__name__}. Use LazyTensorStorage or LazyMemmapStorage."
            raise RuntimeError(f"{name}: expected a tensor storage, {got}")
        schema = memory.schema
        table, static, id_key = self._table_of(memory, length if settings.window is None else settings.window.reach)
        taken = None if isinstance(table, _native.Fragments) else self._taken_of(table)
        ways: dict[tuple[Way, bool], tuple[EndMarks, _native.Batched]] = {}
        for shown in _SHOWN:
            apart, rows = shown == "apart", shown != "nothing"
            marks = EndMarks.of(memory, settings, shown, weighted=self.anchors is not None) if rows else _NO_MARKS
            for numbered in (False, True):
                layout = (settings.pad_output, rows, numbered, settings.flat or apart, taken, self.streaming, apart)
                ways[shown, numbered] = marks, _native.Batched(*layout)
        return _Bound(memory, schema, _native.Layout(dlpack_specs(schema.fields)), table, static, ways, id_key)

    def _table_of(self, memory: Store, window: int) -> tuple[Table, StaticTable | None, FieldPath | None]:
        """The table of windows of so many steps, the one of given boundaries, and the field that tells trajectories apart."""
        settings, rules = self.settings, self.rules
        if rules is not None and settings.fragmented:
            fragments, found = fragments_table(memory, settings, rules, window)
            return fragments, None, found
        if rules is not None:
            episodes = rules.episodes(memory, "sample")
            return episodes.table(window), None, episodes.id_key
        if not numbers_by_path(memory):
            raise RuntimeError(f"{type(self).__name__}: expected rows with fields, got rows of one tensor each.")
        assert settings.static is not None  # as there are no rules
        kind, values = settings.static
        static = StaticTable(memory, kind, values, by_id=kind == "trajectories", window=window)
        return static.table, static, None

    def _taken_of(self, table: _native.Trajectories) -> torch.Tensor | None:
        """Ticket numbers that the online queue took last, int64 ``[tracks]``; None: there is no queue."""
        return None

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _split(self, batch_size: int) -> tuple[int, int, _native.WindowSpec]:
        """Windows, steps of each, and which they may be, for batches of that size. Remembered."""
        count, length = self.settings.split(batch_size)
        if len(self._splits) > 64:
            self._splits.clear()
        self._splits[batch_size] = split = (count, length, self.settings.native(length, type(self).__name__))
        return split

    def _choose(self, table: Table, arguments: NativeArguments) -> list[torch.Tensor]:
        """Let the native core draw: fields, rows, marks, weights of anchors, and tickets if asked for.

        ``arguments``: those that all of the table's ways to draw windows have in common.
        """
        raise NotImplementedError

    def _draw(
        self, storage: SampledStorage, key: blocks.Key, n: int, *, numbered: bool, shown: Way, finished: Finished = None
    ) -> tuple[EndMarks, list[torch.Tensor]]:
        """Draw windows in one native call: all fields, but none apart, rows and marks as shown, tickets if numbered.

        A window with a row that moves meanwhile is replaced by another one. ``finished``: as in :meth:`sample_apart`.
        """
        if storage is not self._storage:
            self.bind(storage)
        count, length, spec = self._splits.get(n) or self._split(n)
        if finished is not None:
            spec = spec.finished(*finished)
        store = storage.memory
        assert store is not None  # else there is nothing to draw, and the buffer says so
        store.core.find_fields()
        bound = self._bound
        if bound is None or bound.memory is not store or bound.schema is not store.schema:
            bound = self._bound_to(storage, length)
        if bound.id_key is None and bound.table.mixed():  # type: ignore[union-attr] # fragments have an id
            words.warn_of_mixed(type(self).__name__)
        marks, batched = bound.ways[shown, numbered]
        layout = _NO_FIELDS if shown == "apart" else bound.layout
        arguments = (store.core, layout, key.address, count, spec, batched, marks.wanted)
        if bound.static is None:
            tensors = self._choose(bound.table, arguments)
        else:
            with self._lock:  # until the draw is over: no other thread sees boundaries half placed
                bound = self._bound_to(storage, length)
                assert bound.static is not None
                bound.static.place(storage.extent())
                tensors = self._choose(bound.table, arguments)
        if not len(tensors[0]):
            if finished is not None and not bound.table.windows(store.core, spec):
                raise NoSampleable(
                    f"sample: {self.settings.named(length)}: expected a trajectory of at least {self.settings.needed(length)} steps that "
                    f"have a next observation, which the newest {finished[1]} of an open one have not yet. Add data first, or "
                    f"{self._shorter().lower()}."
                )
            tensors = self._drawn_later(bound, storage, arguments, length)
        return marks, tensors

    def _draw_admitted(
        self, storage: SampledStorage, key: blocks.Key, n: int, finished: Finished = None
    ) -> tuple[EndMarks, list[torch.Tensor]]:
        """Draw windows all of whose rows are admitted, without their fields: rows ``[B * T]``, marks and tickets.

        Others are drawn in place of the rest. Raises ``NoSampleable``: as :meth:`_draw`; few were admitted of many.
        """
        parts: list[list[torch.Tensor]] = []
        count, tries = self.settings.split(n)[0], Retries()
        while tries.count < _base.MAX_DRAWS:
            bits = key if tries.count == 0 else blocks.Key.of(tries.key_of(key.value))
            marks, tensors = self._draw(storage, bits, n, numbered=True, shown="apart", finished=finished)
            if self.admits is None:
                return marks, tensors
            ends = cast("torch.Tensor", self._ends(marks, tensors, n)[LAST_STEPS])
            of = torch.searchsorted(ends, torch.arange(len(tensors[0]), device="cpu"))  # the window of each row
            refused = torch.bincount(of[~self.admits(tensors[0], tensors[-1])], minlength=len(ends))
            chosen = (refused == 0).nonzero().flatten()[:count]
            parts.append([tensor[torch.isin(of, chosen)] for tensor in tensors])
            tries.count, count = tries.count + 1, count - len(chosen)
            if not count:
                return marks, [torch.cat(tensor) for tensor in zip(*parts, strict=True)]
        raise NoSampleable(
            f"sample: expected windows of rows that can be drawn, got others at {_base.MAX_DRAWS} draws. {self._shorter()}, or wait until "
            "more rows can be drawn."
        )

    def _drawn_later(
        self, bound: _Bound, storage: SampledStorage, arguments: NativeArguments, length: int
    ) -> list[torch.Tensor]:
        """Draw again where there was no window a moment ago, as a writer was in each of them. Raises ``NoSampleable``: there is none."""
        needed = self.settings.needed(length) if self.strict_length else 1
        for _ in range(0 if self.streaming or self.traits.has_epochs or self.anchors is not None else _TRIES):
            if bound.table.census()[1] < needed:
                break
            with self._lock:
                if bound.static is not None:
                    bound.static.place(storage.extent())
                tensors = self._choose(bound.table, arguments)
            if len(tensors[0]):
                return tensors
            time.sleep(0.005)
        return self._raise_without_windows(bound.table, length)

    def sample_natively(
        self, storage: SampledStorage, key: blocks.Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """Draw windows, read them and mark their ends in one native call: ``(columns, rows, info)``.

        Rows on an accelerator are read by torch, after the draw.
        """
        store = storage.memory
        assert store is not None
        if store.reads_apart or self.admits is not None:
            columns, rows, info = self.sample_apart(
                storage, key, n, lambda draw: store.read(draw.rows, expected=draw.tickets), numbered=numbered
            )
            return self.laid_out(columns, rows, info)
        if self.anchors is not None:
            numbered = True
            shown = "beside" if shown == "nothing" else shown  # as its weights are drawn anyway
        elif shown == "nothing":
            return self._draw(storage, key, n, numbered=False, shown=shown)[1], None, {}
        marks, tensors = self._draw(storage, key, n, numbered=numbered, shown=shown)
        fields = marks.fields
        return tensors[:fields], tensors[fields], marks.info(tensors, numbered=numbered, flat=self.settings.flat)

    def laid_out(self, columns: list[torch.Tensor], rows: torch.Tensor, info: Info) -> ReadBatch:
        """A batch of :meth:`sample_apart`, ``[B * T, ...]``, in the batch dimensions that were asked for."""
        window = self.settings.window
        if window is None or self.settings.flat:
            return columns, rows, info
        batch = (len(rows) // window.steps, window.steps)
        laid_out: Info = {
            entry: value.reshape(*batch, *value.shape[1:]) if isinstance(value, torch.Tensor) else value
            for entry, value in info.items()
        }
        return [column.reshape(*batch, *column.shape[1:]) for column in columns], rows.reshape(batch), laid_out

    def sample_apart(
        self,
        storage: SampledStorage,
        key: blocks.Key,
        n: int,
        read: ReadDraw,
        *,
        numbered: bool = False,
        finished: Finished = None,
        ended: bool = False,
    ) -> ReadBatch:
        """As :meth:`sample_natively`, but the caller reads the columns, and the batch is flat: :meth:`laid_out` shapes it.

        Args:
            storage, key, n, numbered: as there.
            read: returns one tensor per field (more may follow) of a draw's rows, and the places of those whose tickets have
                changed. If there are any, all windows are drawn again.
            finished: a field of int64 and a number of steps: windows hold none of so many at the end of a trajectory, if the first
                number in the field of its last step is negative.
            ended: the info of the draw has :data:`LAST_STEPS`.

        Raises:
            WriterStalled: there were some at every try for 5 s.
        """
        store = storage.memory
        assert store is not None
        retries, bits = Retries(), key
        while True:
            schema = store.schema
            marks, drawn = self._draw_admitted(storage, bits, n, finished)
            rows, *marked, tickets = drawn
            columns, moved = read(Draw(rows, tickets, self._ends(marks, drawn, n) if ended else {}))
            if store.schema is not schema:  # a field was added meanwhile
                continue
            if not moved:
                break
            retries.again(rows, moved, ", of a window,")
            bits = blocks.Key.of(retries.key_of(key.value))
        there = [tensor.to(store.device) for tensor in (*marked, store.writes_of(rows, tickets))]
        numbered = numbered or self.anchors is not None
        stored = columns[: marks.fields]
        stored += [rows] * (marks.fields - len(stored))  # fields that were added since the columns were chosen
        return columns, rows, marks.info([*stored, rows, *there], numbered=numbered)

    def _ends(self, marks: EndMarks, drawn: Sequence[torch.Tensor], n: int) -> Info:
        """The places at which the windows of a batch of size ``n`` end, as an info. ``drawn``: rows, marks and tickets."""
        settings, rows = self.settings, drawn[0]
        if length := settings.even_steps(n):
            return {LAST_STEPS: torch.arange(length - 1, len(rows), length, device="cpu")}
        key = settings.truncated_key
        at = marks.places[WINDOW_ENDS if key is None else public(key)] - marks.fields
        return {LAST_STEPS: drawn[at].flatten().nonzero().flatten()}

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Rows and tickets of the windows that :meth:`sample_natively` draws with the same key."""
        storage = self._storage
        self._bound_to(storage, self.settings.split(batch_size)[1])  # raises for a storage without windows
        assert storage is not None
        assert storage.memory is not None
        _, drawn = self._draw_admitted(storage, blocks.Key.of(key), batch_size)
        return Draw(drawn[0], drawn[-1])

    def _raise_without_windows(self, table: Table, length: int) -> NoReturn:
        """Raise ``NoSampleable``, and say why there was no window to draw."""
        trajectories, longest = table.census()
        if trajectories == 0:
            raise NoSampleable(EMPTY)
        if longest >= self.settings.needed(length) or not self.strict_length:
            raise NoSampleable(
                f"sample: {self.settings.named(length)}: expected a trajectory that stays while it is drawn, but at every try a writer was "
                f"in each of those that are long enough. {self._shorter()}, or use a larger storage."
            )
        raise NoSampleable(
            f"sample: {self.settings.named(length)}: expected a trajectory of at least {self.settings.needed(length)} steps, got "
            f"{trajectories} of at most {longest}. {self._shorter()}, or pass strict_length=False."
        )

    def _shorter(self) -> str:
        return "Lower slice_len" if self.settings.window is None else "Draw shorter windows"

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def masses(self, storage: SampledStorage) -> blocks.Masses:
        self.bind(storage)
        length = self.settings.length
        bound = self._bound_to(storage, length)
        choices = bound.table.choices(bound.memory.core, self.settings.native(length, type(self).__name__))
        return blocks.Masses(choices, 1.0, len(storage))

    def rows_together(self) -> tuple[int, int]:
        settings = self.settings
        length = settings.even_steps(0)
        if not length or settings.static is not None or settings.online or self.streaming:
            return 0, 0
        return length, length if settings.flat else 1

    def can_sample(self, storage: SampledStorage, batch_size: int, *, finished: Finished = None) -> bool:
        """Whether a long enough trajectory is there; False, too, if boundaries or batch size do not fit.

        ``finished``: as in :meth:`sample_apart`.
        """
        if not len(storage):
            return False
        self.bind(storage)
        try:
            _, length, spec = self._split(batch_size)
            with self._lock:
                bound = self._bound_to(storage, length)
                if bound.static is not None:
                    bound.static.place(storage.extent())
        except (RuntimeError, TypeError, ValueError):
            return False
        return bound.table.windows(bound.memory.core, spec.finished(*finished) if finished is not None else spec) > 0

    def sample(self, storage: SampledStorage, batch_size: int) -> tuple[tuple[torch.Tensor, ...], Info]:
        """Draw from a storage with a key of torch's default generator: ``((int64 [B],), info)``."""
        self.bind(storage)
        self._bound_to(storage, self.settings.split(batch_size)[1])  # raises for a storage without windows
        key = _base.key_for(storage, generator=self._rng)
        _, rows, info = self.sample_natively(storage, key, batch_size)
        assert rows is not None  # as they are shown
        info.pop(WINDOW_ENDS, None)
        return (rows,), info

    def config(self) -> dict[str, object]:
        window = self.settings.window
        spec = {} if window is None else {"window": asdict(window), "flat": self.settings.flat}
        if self.settings.end_when is not None:
            spec["end_when"] = self.settings.end_when
        return {**super().config(), "traj_key": plain(self.settings.traj_key), **spec}

    def __getstate__(self) -> dict[str, object]:
        local = ("_lock", "_storage", "_bound", "_splits", "settings", "admits")
        return {**vars(self.settings), **{name: value for name, value in vars(self).items() if name not in local}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._unbind()
        self.settings = WindowSettings(**{entry.name: state.pop(entry.name) for entry in fields(WindowSettings)})
        vars(self).update(state)


_MASK = ("collector", "mask")
_VALID, _LEARNING = "validity_mask", "learning_mask"
#: What the native core is told of a mark that is not wanted, or that is not merged with a stored flag.
_UNWANTED, _ALONE = -2, -1


class EndMarks(NamedTuple):
    """Which marks a batch of windows carries, and where its tensors hold them.

    The tensors of a batch are its columns, its rows, then one tensor per mark, priority weights and tickets if it has them.
    """

    #: What the native core is asked for.
    wanted: _native.Marks
    #: Entries of ``info`` that are among the tensors: the place of each.
    places: dict[Entry, int]
    #: Entries made of a stored flag and a mark: the entry, the function that merges them, and the places of both.
    merged: list[tuple[Entry, Merge, int, int]]
    #: Columns of the batch.
    fields: int = 0

    @classmethod
    def of(cls, store: Store, settings: WindowSettings, shown: Way, *, weighted: bool) -> EndMarks:
        """The marks for the flags that a store holds.

        Under ``truncated_key`` and its siblings ``done`` and ``terminated`` they are bool ``[B, 1]``. Under ``init_key``, if it is
        stored, the mark has its shape and dtype. With padding ``("collector", "mask")`` is bool ``[B]``; of windows of a spec,
        ``"validity_mask"`` and ``"learning_mask"`` are.

        Args:
            store: holds the rows.
            settings: names the flags, and says whether short windows are filled up.
            shown: ``"apart"``: the native core does not read the stored flags, so it cannot merge its marks with
                them. ``"within"``: the marks take the place of the batch's own flags: columns of the same shape and dtype are marked
                themselves.
            weighted: the batch has ``"priority_weight"``.
        """
        apart, within = shown == "apart", shown == "within"
        truncated_key, init_key, padded = settings.truncated_key, settings.init_key, settings.pad_output
        fields = numbers_by_path(store)
        places: dict[Entry, int] = {}
        merged: list[tuple[Entry, Merge, int, int]] = []
        ends, never, done, in_place, begun, begun_is_column = _UNWANTED, False, _UNWANTED, False, _UNWANTED, False
        stored = len(store.schema.fields)
        at = stored + 1
        if truncated_key is not None:
            *above, name = truncated_key
            within = within and name not in ("done", "terminated")
            number, entry = fields.get(truncated_key), public(truncated_key)
            if within and number is not None and _is_flag(store, number, (1,)):
                ends = places[entry] = number
            else:
                ends, places[entry], at = _ALONE, at, at + 1
            number, entry = fields.get((*above, "done")), public((*above, "done"))
            if within and number is not None and _is_flag(store, number, (1,)):
                done, in_place, places[entry] = number, True, number
            elif number is None or (not apart and _is_flag(store, number, (), (1,))):
                done, places[entry], at = _ALONE if number is None else number, at, at + 1
            else:
                done, at = _ALONE, at + 1
                merged.append((entry, _with_ends, number, at - 1))
            number, entry = fields.get((*above, "terminated")), public((*above, "terminated"))
            if number is None:
                never, places[entry], at = True, at, at + 1
            elif _is_flag(store, number, (1,)):
                places[entry] = number
            else:
                merged.append((entry, lambda stored, _: _as_flag(stored), number, number))
        elif not settings.are_even:  # for transforms alone, and for goals
            ends, places[WINDOW_ENDS], at = _ALONE, at, at + 1
        if init_key is not None and init_key in fields:
            number, entry = fields[init_key], public(init_key)
            if not apart and _is_flag(store, number, (), (1,)):
                begun, begun_is_column = number, store.schema.fields[number].shape != ()
                places[entry] = at
            else:
                begun = _ALONE
                merged.append((entry, with_starts, number, at))
            at += 1
        specified = settings.window is not None
        for mask in [_VALID, _LEARNING] if specified else [_MASK] if padded else []:
            places[mask], at = at, at + 1
        if weighted:
            places["priority_weight"] = at
        wanted = _native.Marks(ends, never, done, in_place, begun, begun_is_column, padded or specified, specified)
        return cls(wanted, places, merged, stored)

    def info(self, tensors: Sequence[torch.Tensor], *, numbered: bool, flat: bool = True) -> Info:
        """The ``info`` of a batch, without its index. ``numbered``: the last tensor holds tickets. ``flat``: tensors are ``[B, ...]``,
        else ``[B, T, ...]``.
        """
        info: Info = {entry: tensors[place] for entry, place in self.places.items()}
        for entry, merge, field, mark in self.merged:
            if flat:
                info[entry] = merge(tensors[field], tensors[mark])
            else:
                merged = merge(tensors[field].flatten(0, 1), tensors[mark].flatten(0, 1))
                info[entry] = merged.reshape(*tensors[field].shape[:2], *merged.shape[1:])
        if numbered:
            info["index_generation"] = tensors[-1]
        return info


_NO_MARKS = EndMarks(_native.Marks(_UNWANTED, False, _UNWANTED, False, _UNWANTED, False, False, False), {}, [])


def _is_flag(store: Store, number: int, *shapes: tuple[int, ...]) -> bool:
    field = store.schema.fields[number]
    return field.dtype == "bool" and tuple(field.shape) in shapes


# ---- flags that are stored as something else than bool [B] or [B, 1] -----------------------------------------------------


def _as_flag(stored: torch.Tensor) -> torch.Tensor:
    """A stored flag as bools ``[B, 1]`` (rows with batch dimensions: as stored)."""
    flag = stored if stored.dtype is torch.bool else stored != 0
    return flag.unsqueeze(-1) if flag.ndim == 1 else flag


def _with_ends(stored: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    flag = _as_flag(stored)
    return flag | _like(ends, flag)


def with_starts(stored: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """A stored flag of first steps, set where ``first`` is: a new tensor of its shape and dtype."""
    first = _like(first, stored)
    return stored | first if stored.dtype is torch.bool else stored.where(~first, 1)


def _like(mark: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Marks ``[B]`` or ``[B, 1]`` in the dimensions of a stored field."""
    return mark if mark.ndim == stored.ndim else mark.reshape(-1, *(1,) * (stored.ndim - 1))
