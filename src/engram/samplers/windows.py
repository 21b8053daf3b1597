"""The base of the slice samplers: draws windows of consecutive steps of one trajectory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeAlias

from engram import _fork, _native
from engram.errors import NoSampleable
from engram.field_paths import FieldPath
from engram.retries import Retries
from engram.samplers._base import NativeSampler
from engram.samplers.end_marks import EndMarks
from engram.samplers.trajectory_tables import END_KEYS, StaticTable, TrajectoryKeys, numbers_by_path, shared_table
from engram.samplers.window_spec import Setting, WindowSpec
from engram.store import Key as DrawKey
from engram.types import Draw

if TYPE_CHECKING:
    from torch import Tensor

    from engram.samplers.prioritized import PrioritizedSampler
    from engram.store import Store
    from engram.types import Extent, Info, NativeBatch, ReadDraw, SampledStorage

    #: What all native draws of windows take: the store's core, fields, address of the key, number of windows, which windows,
    #: whether to pad them, whether to return tickets, marks.
    Arguments: TypeAlias = tuple[_native.Store, _native.Layout, int, int, _native.Shape, bool, bool, _native.Marks]

#: A draw that reads no field.
_NO_FIELDS = _native.Layout([])


class _Bound(NamedTuple):
    """A store, its table of trajectories, and the marks of windows that are drawn from it.

    Replaced as a whole: while one thread draws, others may draw from other stores.
    """

    memory: Store
    table: _native.Trajectories
    static: StaticTable | None
    marks: EndMarks
    apart: EndMarks
    """For draws whose columns are not read by the native core."""


class WindowSampler(NativeSampler):
    """Base of the slice samplers. A subclass says how windows are chosen: :meth:`_choose`."""

    traits = NativeSampler.traits._replace(reads_natively=True, draws_windows=True)

    #: Draws the first steps of windows by priority, and holds the priorities; None: they are drawn without.
    anchors: PrioritizedSampler | None = None

    noted: ClassVar[tuple[str, ...]] = (
        "num_slices",
        "slice_len",
        "end_key",
        "end_keys",
        "traj_key",
        "truncated_key",
        "init_key",
        "strict_length",
        "index",
    )

    num_slices = Setting[int | None]()
    slice_len = Setting[int | None]()
    end_key = Setting[FieldPath | None]()
    end_keys = Setting[tuple[FieldPath, ...] | None]()
    traj_key = Setting[FieldPath | None]()
    truncated_key = Setting[FieldPath | None]()
    init_key = Setting[FieldPath | None]()
    strict_length = Setting[bool]()
    pad_output = Setting[bool]()
    index = Setting[str]()

    def __init__(self, spec: WindowSpec) -> None:
        self._unbind()
        self.spec = spec

    # ---- the store and its table -------------------------------------------------------------------------------------

    def _unbind(self) -> None:
        self._lock = _fork.rlock()
        self._storage: SampledStorage | None = None
        self._bound: _Bound | None = None
        self._splits: dict[int, tuple[int, int, _native.Shape]] = {}

    def change(self, **entries: object) -> None:
        """Replace entries of the spec. The next draw follows the new ones."""
        with self._lock:
            self.spec = replace(self.spec, **entries)  # type: ignore[arg-type] # as unchecked as any attribute
            self._splits, self._bound = {}, None

    @property
    def _table(self) -> _native.Trajectories | None:
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
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: static boundaries are not noted in a store."""
        return self.rules is not None

    @property
    def rules(self) -> TrajectoryKeys | None:
        """Which trajectories its windows are of; None: those of static boundaries, which no field tells."""
        spec = self.spec
        ends = spec.end_keys or (None if spec.end_key is None else (spec.end_key,))
        return TrajectoryKeys(spec.traj_key, ends, spec.index) if spec.static is None else None

    def _bound_to(self, storage: SampledStorage | None, length: int) -> _Bound:
        """A storage's table and marks, looked for if another storage was drawn from last."""
        memory = None if storage is None else storage.memory
        bound = self._bound
        if bound is None or bound.memory is not memory:
            with self._lock:
                bound = self._bound
                if bound is None or bound.memory is not memory:
                    bound = self._bound = self._find(storage, memory, length)
        return bound

    def _find(self, storage: SampledStorage | None, memory: Store | None, length: int) -> _Bound:
        name, spec = type(self).__name__, self.spec
        if storage is None:
            raise RuntimeError(f"{name}: expected a storage: give the sampler to a ReplayBuffer, or bind(storage).")
        if memory is None:
            if not storage.initialized:
                raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
            raise RuntimeError(
                f"{name}: expected a tensor storage, got a {type(storage).__name__}. "
                "Use LazyTensorStorage or LazyMemmapStorage."
            )
        static, rules, numbers = None, self.rules, numbers_by_path(memory)
        if rules is not None:
            boundaries = rules.boundaries(memory.schema.fields, numbers, END_KEYS[:1], "sample")
            table = shared_table(memory, spec.index, boundaries, length)
        else:
            if not numbers:
                raise RuntimeError(f"{name}: expected rows with fields, such as dicts, got rows of one tensor each.")
            assert spec.static is not None  # as there are no rules
            kind, values = spec.static
            static = StaticTable(memory, kind, values, by_id=kind == "trajectories", window=length)
            table = static.table
        marks, apart = (
            EndMarks.of(memory, spec, weighted=self.anchors is not None, apart=apart) for apart in (False, True)
        )
        return _Bound(memory, table, static, marks, apart)

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _split(self, batch_size: int) -> tuple[int, int, _native.Shape]:
        """Windows, steps of each, and which they may be, for batches of that size. Remembered."""
        count, length = self.spec.split(batch_size)
        if len(self._splits) > 64:
            self._splits.clear()
        self._splits[batch_size] = split = (count, length, self.spec.shape(length))
        return split

    def _choose(self, table: _native.Trajectories, arguments: Arguments) -> list[Tensor]:
        """Let the native core draw: fields, rows, marks, weights of anchors, and tickets if asked for.

        ``arguments``: those that all of the table's ways to draw windows have in common.
        """
        raise NotImplementedError

    def _draw(
        self,
        storage: SampledStorage,
        layout: _native.Layout,
        key: DrawKey,
        n: int,
        *,
        numbered: bool,
        apart: bool,
        finished: tuple[int, int] | None = None,
    ) -> tuple[EndMarks, list[Tensor]]:
        """Draw windows in one native call: the fields of a layout, which may be empty, rows, marks and tickets if numbered.

        A window with a row that moves meanwhile is replaced by another one. ``finished``: as in :meth:`sample_apart`.
        """
        if storage is not self._storage:
            self.bind(storage)
        count, length, shape = self._splits.get(n) or self._split(n)
        if finished is not None:
            shape = shape.finished(*finished)
        store = storage.memory
        assert store is not None  # else there is nothing to draw, and the buffer says so
        bound = self._bound
        if bound is None or bound.memory is not store:
            bound = self._bound_to(storage, length)
        marks = bound.apart if apart else bound.marks
        arguments = (store.core, layout, key.address, count, shape, self.spec.pad_output, numbered, marks.wanted)
        if bound.static is None:
            tensors = self._choose(bound.table, arguments)
        else:
            with self._lock:  # until the draw is over: no other thread sees boundaries half placed
                bound = self._bound_to(storage, length)
                assert bound.static is not None
                bound.static.place(storage.extent())
                tensors = self._choose(bound.table, arguments)
        if not len(tensors[0]):
            if finished is not None and not bound.table.windows(store.core, shape):
                raise NoSampleable(
                    f"sample: slice_len={length}: expected a trajectory of at least {length} steps that have a next observation, which the "
                    f"newest {finished[1]} of an open one have not yet. Add data first, or lower slice_len."
                )
            self._raise_without_windows(bound.table, length)
        return marks, tensors

    def sample_natively(self, storage: SampledStorage, key: DrawKey, n: int, *, numbered: bool = False) -> NativeBatch:
        """Draw windows, read them and mark their ends in one native call: ``(columns, rows, info)``.

        Rows on an accelerator are read by torch, after the draw.
        """
        store = storage.memory
        assert store is not None
        if not store.is_native:
            return self.sample_apart(
                storage, key, n, lambda draw: store.read(draw.rows, expected=draw.tickets), numbered=numbered
            )
        numbered = numbered or self.anchors is not None
        marks, tensors = self._draw(storage, store.layout, key, n, numbered=numbered, apart=False)
        fields = len(store.tensors)
        return tensors[:fields], tensors[fields], marks.info(tensors, numbered=numbered)

    def sample_apart(
        self,
        storage: SampledStorage,
        key: DrawKey,
        n: int,
        read: ReadDraw,
        *,
        numbered: bool = False,
        finished: tuple[int, int] | None = None,
    ) -> NativeBatch:
        """As :meth:`sample_natively`, but the caller reads the columns.

        Args:
            storage, key, n, numbered: as there.
            read: returns one tensor per field (more may follow) of a draw's rows, and the places of those whose tickets have
                changed. If there are any, all windows are drawn again.
            finished: a field of int64 and a number of steps: windows hold none of so many at the end of a trajectory, if the first
                number in the field of its last step is negative.

        Raises:
            WriterStalled: there were some at every try for 5 s.
        """
        store = storage.memory
        assert store is not None
        retries, bits = Retries(), key
        while True:
            marks, drawn = self._draw(storage, _NO_FIELDS, bits, n, numbered=True, apart=True, finished=finished)
            rows, *marked = drawn
            columns, moved = read(Draw(rows, drawn[-1]))
            if not moved:
                break
            retries.again(rows, moved, ", of a window,")
            bits = DrawKey.of(retries.key_of(key.value))
        there = [tensor.to(store.device) for tensor in marked]
        numbered = numbered or self.anchors is not None
        tensors = [*columns[: len(store.tensors)], rows, *there]
        return columns, rows, marks.info(tensors, numbered=numbered)

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Rows and tickets of the windows that :meth:`sample_natively` draws with the same key."""
        storage = self._storage
        self._bound_to(storage, self.spec.split(batch_size)[1])  # raises for a storage without windows
        assert storage is not None
        _, drawn = self._draw(storage, _NO_FIELDS, DrawKey.of(key), batch_size, numbered=True, apart=True)
        return Draw(drawn[0], drawn[-1])

    def _raise_without_windows(self, table: _native.Trajectories, length: int) -> NoReturn:
        """Raise ``NoSampleable``, and say why there was no window to draw."""
        trajectories, longest = table.census()
        if trajectories == 0:
            raise NoSampleable("sample: the buffer is empty. Add data before sampling.")
        raise NoSampleable(
            f"sample: slice_len={length}: expected a trajectory of at least {length} steps, got {trajectories} of at most "
            f"{longest}. Lower slice_len, or pass strict_length=False."
        )

    # ---- the rest of a sampler ---------------------------------------------------------------------------------------

    def can_sample(self, storage: SampledStorage, batch_size: int, *, finished: tuple[int, int] | None = None) -> bool:
        """Whether a long enough trajectory is there; False, too, if boundaries or batch size do not fit.

        ``finished``: as in :meth:`sample_apart`.
        """
        if not len(storage):
            return False
        self.bind(storage)
        try:
            _, length, shape = self._split(batch_size)
            with self._lock:
                bound = self._bound_to(storage, length)
                if bound.static is not None:
                    bound.static.place(storage.extent())
        except (RuntimeError, ValueError):
            return False
        return bound.table.windows(bound.memory.core, shape.finished(*finished) if finished is not None else shape) > 0

    def sample(self, storage: SampledStorage, batch_size: int) -> tuple[tuple[Tensor, ...], Info]:
        """Draw from a storage with a key of torch's default generator: ``((int64 [B],), info)``."""
        self.bind(storage)
        self._bound_to(storage, self.spec.split(batch_size)[1])  # raises for a storage without windows
        key = DrawKey()
        key.draw()
        _, rows, info = self.sample_natively(storage, key, batch_size)
        return (rows,), info

    def __getstate__(self) -> dict[str, object]:
        local = ("_lock", "_storage", "_bound", "_splits", "spec")
        return {**vars(self.spec), **{name: value for name, value in vars(self).items() if name not in local}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._unbind()
        entries = {entry.name: state.pop(entry.name) for entry in fields(WindowSpec) if entry.name in state}
        static = {
            name: state.pop(f"_{name}", None) for name in ("ends", "trajectories")
        }  # pickled by an earlier version
        self.spec = WindowSpec(**{**static, **entries})
        vars(self).update(state)
