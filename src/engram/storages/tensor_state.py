"""The state of a store without its rows: what is saved of it, and what is checked before a load."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engram._support import checks, native, words
from engram._support.state import check_keys, integer, tensor_in, typed
from engram.errors import IncompatibleCheckpoint
from engram.format import schema as schemas
from engram.format.schema import Field, Schema
from engram.saved.checkpointers import SavedStorage
from engram.saved.ragged import RaggedRowsSource
from engram.saved.snapshot import RowsSnapshot, StorageSnapshot, WholeSnapshot, bytes_of, named_writes
from engram.store import adding, ragged, row_indexes
from engram.store.indexes import check_index_name
from engram.store.memory import as_words, refuse_ragged, torch_dtype, write_rows
from engram.store.priorities import NAMES, PriorityConfig, PriorityIndex, check_priorities, priorities_of
from engram.store.rings import Piece, check_room, compacted, fill_rings, heads_of, oldest_first
from engram.store.row_indexes import EpochIndex, Progress, UsageIndex, checked_progress
from engram.store.store import Store, StoreState
from engram.types import RowsSource, RowsTarget


def saved_priorities(
    indexes: Mapping[str, PriorityIndex],
    without: Collection[tuple[str, str]],
    rows: int | None = None,
    room: Mapping[str, Tensor] | None = None,
) -> dict[str, dict[str, object]]:
    """The states of priorities, by name. Copies.

    Args:
        indexes: by name.
        without: names and kinds of those that are left out.
        rows: whose leaves; default all.
        room: for leaves, by name.
    """
    return {
        name: index.state(rows, (room or {}).get(name))
        for name, index in sorted(indexes.items())
        if (name, PriorityIndex.kind) not in without
    }


def checked_priorities(
    state: Any, indexes: Mapping[str, PriorityIndex], rows: int, where: str
) -> dict[str, tuple[PriorityConfig, dict[str, object]]]:
    """What to make each index with, and its state. Raises: as :func:`check_priorities`."""
    checked = {}
    for name in check_names(state, where):
        entries = typed(state, name, dict, where)
        check_keys(entries, NAMES, f"{where}: {name!r}")
        known = indexes.get(name)
        config = None if known is None else known.config
        checked[name] = (check_priorities(entries, config, rows, f"{where}: {name!r}"), entries)
    return checked


def check_names(state: object, where: str) -> list[str]:
    """The names in a dict of indexes. Raises ``TypeError``, ``ValueError``: it is none, or one is no name."""
    state = checks.check_type(where, state, dict, "a dict")
    for name in state:
        check_index_name(name, where)
    return list(state)


def fill_with_zeros(columns: Sequence[Tensor], rows: Tensor) -> None:
    """Let some rows of fields be zeros. ``rows``: bool ``[n]``."""
    if bool(rows.any()):
        for column in columns:
            # torch fills not every dtype.
            raw = column.reshape(len(column), math.prod(column.shape[1:])).view(torch.uint8)
            raw[rows.to(column.device)] = 0


def checked_rows(saved: Sequence[object], fields: Sequence[Field], n: int, where: str) -> list[Tensor]:
    """Rows of a saved state: of each field a tensor ``[n, *shape]``. Raises ``TypeError``, ``ValueError``: they are none."""
    if len(saved) != len(fields):
        raise ValueError(f"{where}: rows: expected {len(fields)} fields, got {len(saved)}.")
    found = []
    for field, rows in zip(fields, saved, strict=True):
        leads = field.ragged is not None and field.ragged.is_leader  # then the entry has the lengths of its rows
        shape = (n,) if leads else (n, *field.shape)
        found.append(tensor_in({field.name: rows}, field.name, torch_dtype(field), shape, f"{where}: rows"))
    return found


#: Entries of a state, but for the rows.
ENTRIES = ("schema", "lanes", "numbers", "clock", "write_count", "priorities", "passes", "windows")
#: An entry that only those of stores have that count samples.
USAGE = "usage"
#: An entry that only those of stores with ragged fields have: offsets of items.
HEADS = "heads"
#: Entries that some states have.
OPTIONAL = ("writes", USAGE, HEADS)
#: Rows that may be written between preparing a snapshot and taking it, for which there is memory.
_SLACK = 1 << 17
#: Bytes of rows that are copied for a dump while writers wait, in a few milliseconds: it is exact then.
_COPIED = 32 << 20


def unwritten() -> dict[str, object]:
    """The state of a storage before its first row."""
    return {
        "schema": None,
        "lanes": torch.zeros((0, 4), dtype=torch.int64, device="cpu"),
        "numbers": torch.zeros(0, dtype=torch.int64, device="cpu"),
        "clock": 0,
        "write_count": 0,
        "priorities": {},
        "passes": {},
        "windows": {},
    }


def describe_store(
    store: Store,
    indexes: Mapping[tuple[str, str], Any],
    without: Collection[tuple[str, str]] = (),
    zeroed: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """The state without rows and without their tickets.

    Args:
        store: exact while its writers are paused.
        indexes: of the store, by name and kind.
        without: names and kinds of those that are left out.
        zeroed: memory for the leaves of priorities, by name.
    """
    now, usage = int(store.core.next_ticket), UsageIndex.in_use(store)
    passes = {name: index.state(now) for (name, kind), index in sorted(indexes.items()) if kind == EpochIndex.kind}
    clock, lanes = now - store.base, store.lane_states()
    in_use, priorities = store.rows_in_use(lanes), _of_kind(indexes, PriorityIndex.kind)
    return {
        "schema": schemas.encode(store.schema).decode(),
        "clock": clock,
        "lanes": lanes,
        "write_count": int(store.core.write_count),
        "priorities": saved_priorities(priorities, without, in_use, zeroed),
        "passes": {name: walk for name, walk in passes.items() if (name, EpochIndex.kind) not in without},
        "windows": dict(store.indexes.windows),
        **({} if usage is None else {USAGE: usage.saved(in_use)}),
        **({HEADS: store.saved_heads} if isinstance(store, ragged.RaggedStore) else {}),
    }


def with_numbers(store: Store, state: dict[str, Any]) -> dict[str, object]:
    """The same with ``numbers``: the tickets of the rows up to the last live one, without the store's base. ``writes`` are there
    where those are other numbers.
    """
    numbers, writes = store.numbers_before(state["clock"] + store.base, state["lanes"])
    live = numbers != 0
    last = len(live) - int(live[::-1].argmax()) if live.any() else 0
    numbers[live] -= store.base
    numbers = numbers[:last]
    return {**state, "numbers": torch.from_numpy(numbers), **named_writes(numbers, writes[:last])}


def _of_kind(indexes: Mapping[tuple[str, str], object], wanted: str) -> dict[str, Any]:
    return {name: index for (name, kind), index in indexes.items() if kind == wanted}


class RowsHolder(SavedStorage, Protocol):
    """The storage that a snapshot is taken of, or that takes a state over."""

    @property
    def nbytes(self) -> int: ...

    @property
    def max_size(self) -> int: ...

    @property
    def placing(self) -> AbstractContextManager[object]: ...

    def allocate_for(self, schema: Schema) -> None: ...


class SnapshotPreparation:
    """Memory for a snapshot of a storage, taken before writers wait: they wait for a copy only.

    Args:
        storage: which.
        without: names and kinds of indexes that others save.
        whole: copy the rows too, if that takes a few milliseconds.
    """

    def __init__(self, storage: RowsHolder, without: Collection[tuple[str, str]], *, whole: bool) -> None:
        self._storage, self._without, self._whole = storage, without, whole
        self._indexes: dict[tuple[str, str], object] = {}
        self._leaves: dict[str, Tensor] = {}
        self._rows: list[Tensor] = []
        store = storage.memory
        if store is not None:
            self._indexes = dict(store.indexes.refreshed())
            n = min(store.capacity, store.rows_in_use(store.lane_states()) + _SLACK)
            for name in {n for n, kind in self._indexes if kind == PriorityIndex.kind and (n, kind) not in without}:
                self._leaves[name] = store.zeroed(8 * n)[: 8 * n].zero_().view(torch.float64)
            if whole and not store.items:
                n = min(n, _COPIED // max(1, store.schema.row_bytes))
                self._rows = _memory_for(store.tensors, n, store)

    def take(self) -> StorageSnapshot:
        storage, store, kind = self._storage, self._storage.memory, type(self._storage).__name__
        if store is None:
            return WholeSnapshot(kind, storage.state_without_rows(), 1, 0, storage.nbytes)
        lanes = store.lane_states()
        used = store.rows_in_use(lanes)
        live = int(lanes[:, 1].sum()) - int(store.core.void_rows)
        state, base, copies = None, 0, None
        # Else a field was added meanwhile, or more rows were written.
        if self._rows and len(self._rows) == len(store.tensors) and used <= len(self._rows[0]):
            copies = [_copied(field[:used], memory) for field, memory in zip(store.tensors, self._rows, strict=True)]
            state = storage.state_without_rows(without=self._without)
        else:
            state, base = describe_store(store, self._indexes, self._without, self._leaves), store.base
        nbytes = live * store.schema.row_bytes + items_bytes(store)
        exact = bool(store.items) and self._whole and nbytes <= _COPIED
        return RowsSnapshot(kind, store.held(), state, base, live, nbytes, copies, exact)


def items_bytes(store: Store) -> int:
    """Bytes of the items that rows of a store may have now, at most. Cost: O(lanes), or O(rows) where rows have slots."""
    if not store.items:
        return 0
    groups = store.schema.ragged_groups
    sizes = torch.tensor([sum(store.items[n][:1].nbytes for n in group.members) for group in groups], device="cpu")
    if store.schema.in_slots:
        return int((torch.stack([store.tensors[it.leader][:, 2].sum() for it in groups]) * sizes).sum())
    rings = torch.tensor([group.items for group in groups], device="cpu")
    return int((heads_of(store.core, store.schema).minimum(rings) * sizes).sum())


def _memory_for(fields: Sequence[Tensor], n: int, store: Store) -> list[Tensor]:
    """Memory for a copy of ``n`` rows of each field. Pages of it that lie in RAM are there already."""
    sizes = [field[:n].nbytes + -field[:n].nbytes % 8 if field.is_cpu else 0 for field in fields]
    memory = store.zeroed(sum(sizes))[: sum(sizes)]
    memory[::4096] = 0  # a byte of each page
    return [
        raw[: field[:n].nbytes].view(field.dtype).view(n, *field.shape[1:])
        if field.is_cpu
        else torch.empty_like(field[:n])
        for field, raw in zip(fields, torch.split(memory, sizes), strict=True)
    ]


def _copied(rows: Tensor, memory: Tensor) -> Tensor:
    """A copy of rows in the first part of ``memory``. Rows in RAM are copied by the calling thread alone: torch's would wait for
    each other where other processes have the cores, and writers for them.
    """
    copy = memory[: len(rows)]
    if rows.is_contiguous() and rows.is_cpu:
        bytes_of(copy)[:] = bytes_of(rows)
    elif rows.is_cpu:  # other fields lie in between
        as_words(copy).numpy()[:] = as_words(rows).numpy()
    else:
        copy.copy_(rows)
    return copy


def _of_all_rows(state: dict[str, object], name: str, schema: Schema, where: str) -> Tensor:
    """int64 ``[capacity]`` of an entry that ends with the last live row."""
    saved = tensor_in(state, name, torch.int64, (None,), where)
    if len(saved) > schema.capacity:
        raise ValueError(f"{where}: {name}: expected at most {schema.capacity}, got {len(saved)}.")
    return torch.nn.functional.pad(saved, (0, schema.capacity - len(saved)))


class RowsState(NamedTuple):
    """A state without rows that was checked."""

    #: The state itself.
    entries: dict[str, Any]
    rows: StoreState
    windows: dict[str, int]
    passes: dict[str, Progress]
    priorities: dict[str, PriorityConfig]
    #: How often rows were sampled; None: that was not counted.
    usage: Tensor | None = None

    @classmethod
    def checked(cls, state: dict[str, object], schema: Schema, store: Store | None, where: str) -> RowsState:
        """Check a state.

        Args:
            state: with :data:`ENTRIES`, and perhaps ``"writes"``: without, no row was edited; None: rows lay elsewhere.
            schema: the one that it says, checked.
            store: that will hold the rows, if it is there.
            where: for messages.

        Raises:
            KeyError, TypeError, ValueError: a state that no store saves. IncompatibleCheckpoint: other parameters of priorities.
        """
        if store is not None and not store.is_native and len(store.schema.fields) != len(schema.fields):
            differs = schemas.differences(store.schema, schema)
            raise IncompatibleCheckpoint(
                f"{where}: schema: expected that of a store on {store.device}, got another: {differs}."
            )
        clock = integer(state, "clock", 1, 1 << 61, where)
        write_count = integer(state, "write_count", 0, 1 << 62, where)
        lanes = tensor_in(state, "lanes", torch.int64, (schema.lanes, 4), where).clone()
        numbers = _of_all_rows(state, "numbers", schema, where)
        name = "writes" if "writes" in state else "numbers"
        writes = None if state[name] is None else _of_all_rows(state, name, schema, where)
        kept = numbers if writes is None else writes
        with words.raise_as(ValueError, f"{where}: lanes and numbers"):
            said = numbers.data_ptr(), kept.data_ptr()
            native.check_state(schema.capacity // schema.lanes, clock, lanes.data_ptr(), schema.lanes, *said)
        windows = typed(state, "windows", dict, where)
        windows = {key: integer(windows, key, 1, 1 << 62, f"{where}: windows") for key in check_names(windows, where)}
        walks = typed(state, "passes", dict, where)
        check_names(walks, where)
        passes = {name: checked_progress(walk, f"{where}: passes: {name!r}") for name, walk in walks.items()}
        indexes = {} if store is None else _of_kind(store.indexes.refreshed(), PriorityIndex.kind)
        priorities = checked_priorities(state["priorities"], indexes, schema.capacity, f"{where}: priorities")
        configs = {name: config for name, (config, _) in priorities.items()}
        usage = tensor_in(state, USAGE, torch.int32, (None,), where) if USAGE in state else None
        if usage is not None and (len(usage) > schema.capacity or bool((usage < 0).any())):
            raise ValueError(f"{where}: {USAGE}: expected counts of at most {schema.capacity} rows, got others.")
        return cls(state, StoreState(lanes, numbers, clock, write_count, writes), windows, passes, configs, usage)

    def restore(self, store: Store, source: RowsSource) -> None:
        """Replace all that a store holds. Writers must be paused. Whatever ``source`` raises leaves it empty."""
        make = PriorityIndex.of_store if store.is_native else priorities_of
        trees = {name: make(store, name, config)[0] for name, config in self.priorities.items()}
        walked = {}
        if store.directory is not None:  # elsewhere a sampler keeps its own
            walked = {name: EpochIndex.of_store(store, name, row_indexes.NONE) for name in self.passes}
        counted = None if self.usage is None else UsageIndex.of_store(store)
        store.replace(self.rows, source.fill)
        store.indexes.count_windows(self.windows)
        for name, tree in trees.items():
            tree.restore(self.entries["priorities"][name])
        for name, index in walked.items():
            index.go_on(self.passes[name], int(store.core.next_ticket))
        if counted is not None and self.usage is not None:
            counted.restore(self.usage)


class KeptRows(NamedTuple):
    """The rows of a ``state_dict``: none before :meth:`take` has found them."""

    columns: list[Tensor]
    #: Of ragged fields, at most one entry.
    items: list[KeptItems]

    def take(self, state: Mapping[str, Tensor], schema: Schema | None, where: str) -> None:
        """Find and check the rows of a state whose other entries were checked.

        Args:
            state: with ``rows``, and with ``items`` where fields are ragged.
            schema: of the store that will hold them; None: of one that was never written.
            where: for messages.

        Raises:
            KeyError, TypeError, ValueError: a state that no store saves. IncompatibleCheckpoint: the rings here are too small.
        """
        saved, fields = typed(state, "rows", list, where), () if schema is None else schema.fields
        self.columns.extend(checked_rows(saved, fields, len(state["numbers"]), where))
        if schema is not None and schema.ragged:
            self.items.append(KeptItems.checked(state, self.columns, schema, where))

    def fill(self, tensors: RowsTarget) -> None:
        for number, column in enumerate(self.columns):
            if not (self.items and number in self.items[0].schema.ragged):
                write_rows(tensors, number, 0, column)
        for items in self.items:
            fill_rings(tensors, items)


class KeptItems:
    """The ragged rows of a ``state_dict``.

    Args:
        schema: of the store that they are for.
        lanes: as the state has them.
        lengths: int64 ``[n]`` of each group.
        values: of each ragged field, in order: ``[items, *shape]``, row after row.
    """

    def __init__(self, schema: Schema, lanes: Tensor, lengths: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.schema, self._lengths = schema, lengths
        self._values = dict(zip(schema.ragged, values, strict=True))
        self._order = oldest_first(lanes, schema.capacity // schema.lanes)
        self.spans, self.heads = compacted(lengths, self._order)
        self.lane_of = torch.arange(len(lengths[0]), device="cpu") // (schema.capacity // schema.lanes)

    @classmethod
    def checked(cls, state: Mapping[str, Tensor], columns: Sequence[Tensor], schema: Schema, where: str) -> KeptItems:
        """Check the items of a state.

        Args:
            state: whose ``numbers`` and ``lanes`` were checked.
            columns: its ``rows``, which were checked.
            schema: of the store that will hold the rows.
            where: for messages.

        Raises:
            KeyError, TypeError, ValueError: a state that no store saves. IncompatibleCheckpoint: the rings here are too small.
        """
        live, lengths = state["numbers"] != 0, {}
        for group in schema.ragged_groups:
            field, most = schema.fields[group.leader], schema.ragged[group.leader].max_length
            of_rows = columns[group.leader].to(torch.int64)
            check_lengths(of_rows, live, most, f"{where}: rows: {field.name}")
            lengths[group.leader] = of_rows
        given = typed(state, "items", list, where)
        if len(given) != len(schema.ragged):
            raise ValueError(f"{where}: items: expected those of {len(schema.ragged)} fields, got {len(given)}.")
        values = []
        for (number, it), saved in zip(schema.ragged.items(), given, strict=True):
            name, leader = schema.fields[number].name, number if it.is_leader else it.like
            total = int(lengths[leader].sum())
            values.append(tensor_in({name: saved}, name, torch_dtype(it), (total, *it.shape), f"{where}: items"))
        kept = cls(schema, state["lanes"], [lengths[group.leader] for group in schema.ragged_groups], values)
        check_room(kept.heads, schema, where)
        return kept

    def pieces(self, group: int) -> Iterator[Piece]:
        ends = self._lengths[group].cumsum(0)
        members = [self._values[number] for number in self.schema.ragged_groups[group].members]
        for lane, rows in enumerate(self._order):
            there = rows[rows < len(ends)]
            wraps = (there.diff() < 0).nonzero()[:, 0].tolist()
            for begin, end in pairwise([0, *(at + 1 for at in wraps), len(there)]):
                if begin < end:  # rows that follow each other here, too
                    first, last = int(there[begin]), int(there[end - 1])
                    items = slice(int(ends[first] - self._lengths[group][first]), int(ends[last]))
                    values = [of_field[items] for of_field in members]
                    yield Piece(lane, int(self.spans[group].offsets[first]), values)


def check_lengths(lengths: Tensor, live: Tensor, most: int, where: str) -> None:
    """Raise ``ValueError`` for lengths, int64 ``[n]``, that rows cannot have."""
    wrong = (lengths < 0) | (lengths > most) | ((lengths > 0) & ~live)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        of = f"expected 0 to {most} items" if bool(live[row]) else "expected no items, as it holds nothing"
        raise ValueError(f"{where}: row {row}: {of}, got {int(lengths[row])}.")


class FirstFields(NamedTuple):
    """The rows of a state that was saved before fields were added to the store: they hold what these are filled with."""

    source: RowsSource
    here: Schema
    #: How many fields it has.
    saved: int

    def fill(self, tensors: RowsTarget) -> None:
        first = RowsTarget(tensors[: self.saved])
        first.put, first.rings = tensors.put, tensors.rings
        self.source.fill(first)
        for number in range(self.saved, len(tensors)):
            adding.fill_rows(tensors[number], self.here.fill(number) or b"", zeroed=False)


class RowsLoad(NamedTuple):
    """A checked state and its rows, for a storage. Without a schema it is that of one that was never written."""

    storage: RowsHolder
    source: RowsSource
    schema: Schema | None = None
    state: RowsState | None = None

    @classmethod
    def checked(cls, storage: RowsHolder, source: RowsSource, schema: Schema, state: RowsState, where: str) -> RowsLoad:
        """Check the rows of a state. Raises as :class:`~engram.saved.ragged.RaggedRowsSource`."""
        if schema.ragged and isinstance(source, RaggedRowsSource):
            source.take_items(state.entries, schema, where)
        elif schema.ragged and not isinstance(source, KeptRows):
            refuse_ragged(schema, where, "Load what was saved without a layout or hooks")
        return cls(storage, source, schema, state)

    @property
    def capacity(self) -> int:
        return self.storage.max_size if self.schema is None else self.schema.capacity

    def allocate(self) -> None:
        if self.schema is None:
            return
        self.storage.allocate_for(self.schema)
        store = cast("Store", self.storage.memory)  # it was just allocated
        for number in range(len(store.schema.fields), len(self.schema.fields)):
            adding.add_field(store, self.schema.fields[number], self.schema.fill(number) or b"")

    def commit(self) -> None:
        self.allocate()
        storage = self.storage
        store = storage.memory
        if store is None:  # nothing was written here, either
            return
        with storage.placing, storage.paused:  # a writer that has placed rows is about to write them
            if self.state is not None and self.schema is not None:
                saved, here = len(self.schema.fields), store.schema
                source = self.source if saved == len(here.fields) else FirstFields(self.source, here, saved)
                self.state.restore(store, source)
            else:  # as Store.empty, which cannot be while the store is paused
                numbers = torch.zeros(store.capacity, dtype=torch.int64, device="cpu")
                lanes = torch.zeros((store.lanes, 4), dtype=torch.int64, device="cpu")
                store.replace(StoreState(lanes, numbers, 1, 0), lambda _: None)
