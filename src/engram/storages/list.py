"""Any Python objects, in a list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engram._support import field_paths, nested, tensordicts, unsupported
from engram._support.devices import existing_device
from engram._support.state import check_keys, integer, tensor_in, typed
from engram._support.tensordicts import detached, is_tensor_collection, is_tensorclass
from engram.errors import IncompatibleCheckpoint, RowError
from engram.format.schema import Node, Schema
from engram.saved.parts import Unprepared
from engram.saved.snapshot import StoragePreparation, StorageSnapshot, WholeSnapshot, named_writes
from engram.storages import _base, _geometry
from engram.storages.items import ItemGroups, pack, unpack
from engram.storages.tensor_state import checked_priorities, saved_priorities
from engram.store import opening, store
from engram.store.indexes import check_index_name
from engram.store.priorities import PriorityConfig, PriorityIndex
from engram.store.row_indexes import ALL_ROWS, ConsumptionIndex, GroupRules, Groups
from engram.types import Decompress, Extent, ItemsSource, StorageLoad, Write, WritePlan

#: Rows of the store of a list without a bound, and of a long one until it has more.
_FIRST_ROWS = 1 << 24


def _numbered_rows(capacity: int) -> store.Store:
    """A store of rows without fields: it says which rows there are, and what their tickets are."""
    return store.Store.private(Schema(capacity, 1, (), (), Node("dict", children={})))


class ListStorage(_base.Storage):
    """A list of arbitrary objects: ragged tensors, strings, whole trajectories.

    ``extend`` takes a list, tuple, range or set, or a tensor, array or TensorDict, whose rows become the items. A named tuple is one
    item. Items are stored as they are, tensors detached: a later change of the object shows.

    Args:
        max_size: rows, or None: the buffer's ``size``, else unbounded.
        device: where tensors and TensorDicts are moved when they are written, those in dicts, lists and tuples too; or None.

    Raises:
        ValueError: ``max_size`` below 1.

    >>> from engram import ListStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    >>> rb.extend(["a", "bc"])
    tensor([0, 1])
    >>> rb[1]
    'bc'
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        **later: Unpack[unsupported.TracingArguments],
    ) -> None:
        unsupported.reject_unsupported("ListStorage", later, unsupported.NOT_TRACED, type(self))
        unsupported.take_compilable(self, later)
        super().__init__()
        if max_size is not None:
            max_size = _geometry.Geometry.checked(type(self).__name__, max_size).max_size
        self._max_size = max_size
        self._device = None if device is None else existing_device(device, f"{type(self).__name__}: device")
        #: By row; None where nothing is held.
        self._items: list[object] = []
        self._rows = _numbered_rows(min(self.max_size, _FIRST_ROWS))
        self._groups: dict[tuple[field_paths.FieldPath, field_paths.FieldPath | None, GroupRules], ItemGroups] = {}

    def bound(self, size: int) -> None:
        with self._lock:
            if self._max_size is None:
                self._max_size = max(size, self._filled())
                self._resize(min(self._max_size, _FIRST_ROWS))

    def _resize(self, capacity: int) -> None:
        """Give the store another number of rows. Those that there are keep the numbers of their writes. The lock is held."""
        if capacity == self._rows.capacity:
            return
        rows = _numbered_rows(capacity)
        if self.next_number() > 1:
            rows.replace(_with_capacity(self._rows.state(), capacity), lambda _: None)
        self._rows = rows

    def _all_rows(self) -> store.Store:
        """The store with all rows that the list may have, as indexes need it. The lock is held."""
        self._resize(self.max_size)
        return self._rows

    @property
    def max_size(self) -> int:
        return self._max_size if self._max_size is not None else torch.iinfo(torch.int64).max

    initialized = True

    @property
    def device(self) -> torch.device | None:
        """Where tensors of rows are moved to when they are written; None: they stay where they are. May be set.

        Setting it raises ``RuntimeError``: no such device on this machine.

        >>> from engram import ListStorage
        >>> storage = ListStorage(10)
        >>> storage.device = "cpu"
        >>> storage.device
        device(type='cpu')
        """
        return self._device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self._device = None if device is None else existing_device(device, f"{type(self).__name__}: device")

    @property
    def write_count(self) -> int:
        return int(self._rows.core.write_count)

    def __len__(self) -> int:
        return int(self._rows.core.size())

    def extent(self) -> Extent:
        with self._lock:
            core = self._rows.core
            holes = torch.from_numpy(core.holes()) if core.void_rows else None
            return Extent(self.max_size, core.extent()[0], (core.next_position(0) % self.max_size,), holes)

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: _base.Count | None = None
    ) -> tuple[list[object], int]:
        items = self._split(data, call) if batched else [data]
        if not items:
            raise nested.NoRows(f"{call}: expected at least one row, got an empty batch.")
        _base.check_count(call, count, len(items))
        return self._stored(items), len(items)

    def _split(self, data: object, call: str) -> list[object]:
        if isinstance(data, list | tuple | range | set | frozenset) and not nested.is_named_tuple(data):
            return list(data)
        if is_tensor_collection(data) and data.batch_size:
            return list(data.unbind(0))
        if isinstance(data, Tensor | np.ndarray) and data.ndim:
            return list(data)
        raise TypeError(
            f"{call}: expected a list of items, or a tensor, array or TensorDict with a batch dimension, "
            f"got {type(data).__name__}. Did you mean add()? Columns, as dicts, named tuples and HDF5 data sets ([:]) have them, go into a "
            "storage=LazyTensorStorage(size)."
        )

    def _stored(self, items: list[object]) -> list[object]:
        """Items as they are kept."""
        kinds = {type(item): item for item in items}  # each is looked at once
        with_tensors = {kind: isinstance(item, Tensor) or is_tensor_collection(item) for kind, item in kinds.items()}
        kept = [_without_graph(item) if with_tensors[type(item)] else item for item in items]
        return kept if self._device is None else [nested.map_with_paths(item, self._moved, keep=True) for item in kept]

    def _moved(self, leaf: object, _: object) -> object:
        return leaf.to(self._device) if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf

    def write(self, plan: WritePlan, prepared: list[object], n: int) -> Write:
        if plan.kept is not None:
            write = self.write(WritePlan(rows=plan.rows), [prepared[i] for i in plan.kept.tolist()], len(plan.kept))
            return Write(plan.reported(write.rows, n), write.first)
        self.begin_change()
        _base.check_plan(plan, n, lanes=1)
        with self._lock:
            rows = self._checked(plan.rows.tolist()) if plan.rows is not None else None
            behind = self._rows.core.next_position(0) + n if rows is None else max(rows, default=-1) + 1
            if behind > self._rows.capacity:
                self._resize(min(max(behind, 2 * self._rows.capacity), self.max_size))
            if rows is None:
                rows = [row % self.max_size for row in range(behind - n, behind)]
            return self._put(rows, prepared, partial(self._rows.write, plan, [], n))

    def _checked(self, rows: list[int]) -> list[int]:
        """Rows that a writer has placed: none leaves a gap."""
        length = self._filled()
        for row in rows:
            if not 0 <= row < self.max_size:
                raise RowError(f"write: row {row} is outside [0, {self.max_size}).")
            if row > length:
                raise RuntimeError(f"write: row {row}: expected at most {length}, the next row: a list has no gaps.")
            length = max(length, row + 1)
        return rows

    def _filled(self) -> int:
        """Rows from the first to the last that was ever written. An interrupted write may leave items behind them."""
        return int(self._rows.core.extent()[0][0])

    def _put(self, rows: list[int], items: list[object], number: Callable[[], Write], *, edited: bool = False) -> Write:
        """Keep the items of rows, which ``number()`` then gives their tickets. An interrupt leaves of each row the old item or the
        new one, and no row without; where groups have to know its key, none. The lock is held.
        """
        self._items.extend([None] * (max(rows, default=-1) + 1 - len(self._items)))
        try:
            for row, item in zip(rows, items, strict=True):
                self._items[row] = item
            write = number()
            for groups in self._groups.values():
                groups.written(rows, items, edited=edited)
        except BaseException:
            touched = torch.tensor(rows, device="cpu")
            if self._groups:
                self.remove(touched, None)
            else:  # what was drawn before is not what they hold now
                self._rows.edit(touched[self.tickets_of(touched) >= 0], (), [])
            raise
        return write

    def edit(self, where: _base.Rows, prepared: list[object]) -> Write:
        self.begin_change()
        with self._lock:
            self._live(where.rows)  # one that was removed since it was located stays void
            number = partial(self._rows.edit, where.rows, (), [])
            return self._put(where.rows.tolist(), prepared, number, edited=True)

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[list[object], list[int]]:
        with self._lock:
            items, wanted = self._items, rows.tolist()
            end = self._filled() if expected is None else self.max_size
            if wanted and not 0 <= min(wanted) <= max(wanted) < end:
                outside = next(row for row in wanted if not 0 <= row < end)
                raise RowError(f"read: expected rows in [0, {end}), got {outside}.")
            if expected is None and not self._rows.core.void_rows:
                return [items[row] for row in wanted], []
            tickets = self.tickets_of(rows)  # before the items: one written meanwhile has moved
            found = [items[row] if row < len(items) else None for row in wanted]
            gone = tickets < 0 if expected is None else (tickets < 0) | (tickets != expected)
            return found, gone.nonzero().flatten().tolist()

    def __getitem__(self, index: object) -> object:
        with self._lock:  # no item is removed between the two looks
            return super().__getitem__(index)

    def patch(self, columns: list[object], places: list[int], fresh: list[object]) -> None:
        for place, item in zip(places, fresh, strict=True):
            columns[place] = item

    def some(self, columns: list[object], which: slice | list[int]) -> list[object]:  # type: ignore[override]
        return columns[which] if isinstance(which, slice) else [columns[i] for i in which]

    def pack(self, columns: list[object], where: _base.Rows, extra: dict[str, Tensor] | None = None) -> object:
        if extra is not None:
            columns = [_with_entries(item, {key: it[i] for key, it in extra.items()}) for i, item in enumerate(columns)]
        return columns[0] if where.single else columns

    def batch(self, columns: list[object], n: int | tuple[int, ...] | None) -> list[object]:
        return columns

    def remove(self, rows: Tensor, expected: Tensor | None) -> int:
        self.begin_change()
        with self._lock:
            wanted = 0 if expected is None else expected.data_ptr()
            removed: int = self._rows.core.remove(rows.data_ptr(), len(rows), wanted)
            gone = rows[(rows >= 0) & (rows < len(self._items)) & (self.tickets_of(rows) < 0)]
            for row in gone.tolist():
                self._items[row] = None
            for groups in self._groups.values():
                groups.lost(gone)
        return removed

    def empty(self, *, keep_write_count: bool) -> None:
        with self._lock:
            self._rows.empty(keep_write_count=keep_write_count)
            self._items.clear()
            for groups in self._groups.values():
                groups.emptied()

    def priorities(
        self, name: str, config: PriorityConfig, rows: int, device: torch.device | None = None
    ) -> tuple[PriorityIndex, bool] | None:
        check_index_name(name)
        self.bound(rows)
        with self._lock:
            known = self._priorities().get(name)
            return (known, False) if known is not None else PriorityIndex.of_store(self._all_rows(), name, config)

    def _priorities(self) -> dict[str, PriorityIndex]:
        indexes = self._rows.indexes
        return {name: indexes[name, kind] for name, kind in indexes if kind == PriorityIndex.kind}

    def consumption(self, name: str, most: int, rules: GroupRules = ALL_ROWS) -> ConsumptionIndex | None:
        check_index_name(name)
        if rules.exclude:
            raise TypeError(
                f"FilteredSampler: expected a tensor storage, whose rows have fields that rules can name, got a {type(self).__name__}."
            )
        if self._max_size is None:
            raise ValueError(
                "ConsumingSampler: expected a storage with a bound, got a list without. Use ListStorage(max_size=…)."
            )
        with self._lock:
            return ConsumptionIndex.of_store(self._all_rows(), name, most, rules)

    def groups(
        self, name: str, key: field_paths.FieldPath, reward: field_paths.FieldPath | None, rules: GroupRules = ALL_ROWS
    ) -> Groups | None:
        raise TypeError(
            "PromptGroupSampler: expected a tensor storage, whose rows have a field that says their group, or a LazyStackStorage, got a "
            f"{type(self).__name__}. Use one of these."
        )

    def _tell_groups(self, groups: ItemGroups) -> None:
        """Groups that know of no rows hear of all. The lock is held."""
        tickets = self.tickets_of(torch.arange(len(self._items), device="cpu"))
        by_age = [row for row in tickets.argsort().tolist() if tickets[row] >= 0]
        groups.written(by_age, [self._items[row] for row in by_age])
        groups.lost((tickets < 0).nonzero().flatten())

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_rows": self._rows.detached(), "_groups": {}}  # these follow from the items

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_rows": opening.reattach(state["_rows"])})

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """As for every storage: ``max_size, cursor, write_count, clock``; ``numbers``, int64 ``[n]``, the items' tickets, 0 for rows
        that were removed; ``items``, of the other rows, as a few tensors; and ``priorities`` by name. ``writes``, where numbers of
        writes are others: these, 0 for rows that were removed.

        Raises:
            TypeError: an item that is not made of tensors, TensorDicts, dicts, lists and tuples; names it.

        >>> import torch
        >>> from engram import ListStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=ListStorage(10))
        >>> _ = rb.extend([torch.zeros(2), torch.zeros(3)])
        >>> rb.storage.state_dict()["write_count"]
        2
        """
        with self._lock:
            core, lanes = self._rows.core, self._rows.lane_states()
            numbers, writes = self._rows.numbers_before(core.next_ticket, lanes)
            return {
                "max_size": self._max_size,
                "cursor": int(lanes[0, 0]),
                "write_count": self.write_count,
                "clock": int(core.next_ticket),
                "numbers": torch.from_numpy(numbers),
                **named_writes(numbers, writes),
                "items": pack(self._items_to_save()),
                "priorities": saved_priorities(self._priorities(), without),
            }

    def _items_to_save(self) -> list[object]:
        """Those of rows that hold something, as they are saved. The lock is held."""
        live = self.tickets_of(torch.arange(len(self._items), device="cpu")) >= 0
        return [item for item, there in zip(self._items, live.tolist(), strict=True) if there]

    def _items_of(self, saved: list[object], where: str) -> list[object]:
        """The items of a state, as they are kept. Raises ``ValueError``: they are none."""
        return saved

    _loads = ("ListStorage",)

    def prepare_load(self, state_dict: dict[str, Any]) -> StorageLoad:
        where = "ListStorage"
        names = ("max_size", "cursor", "write_count", "clock", "numbers", "items", "priorities")
        check_keys(state_dict, names, where, optional=("writes",))
        max_size = typed(state_dict, "max_size", (int, type(None)), where)
        if max_size != self._max_size and None not in (max_size, self._max_size):
            raise IncompatibleCheckpoint(f"{where}: max_size: expected {self._max_size} as here, got {max_size}.")
        bound = self._max_size or max_size
        rows = bound or self.max_size
        for name in ("cursor", "write_count"):
            integer(state_dict, name, 0, 1 << 62, where)
        clock = integer(state_dict, "clock", 1, 1 << 61, where)
        numbers = tensor_in(state_dict, "numbers", torch.int64, (None,), where)
        n = len(numbers)
        if n > rows:
            raise ValueError(f"{where}: numbers: expected at most {rows} items, got {n}.")
        if n < min(rows, state_dict["cursor"]):
            raise ValueError(
                f"{where}: numbers: expected one for each of {state_dict['cursor']} rows up to the cursor, got {n}."
            )
        tickets = numbers[numbers != 0]
        if n and not (
            int(numbers.min()) >= 0 and int(numbers.max()) < clock and len(torch.unique(tickets)) == len(tickets)
        ):
            raise ValueError(f"{where}: numbers: expected each ticket once, in [1, {clock}), or 0 of a removed row.")
        writes = tensor_in(state_dict, "writes", torch.int64, (n,), where) if "writes" in state_dict else numbers
        if bool(((writes > numbers) | (writes < numbers.clamp(max=1))).any()):
            raise ValueError(f"{where}: writes: expected a number of at most its ticket, 0 of a row that was removed.")
        items = unpack(state_dict["items"], self._device, f"{where}: items")
        items = self._items_of(items, f"{where}: items")
        if len(items) != len(tickets):
            raise ValueError(f"{where}: items: expected {len(tickets)}, one per ticket, got {len(items)}.")
        priorities = checked_priorities(state_dict["priorities"], self._priorities(), rows, f"{where}: priorities")
        return _ItemsLoad(self, rows, bound, state_dict, items, priorities)

    #: Reads what another library compressed; None: zlib and Zstandard do.
    _decompress: Decompress | None = None
    #: Whether items take as much memory as they say.
    _keeps_whole = True

    def prepare_items(self, source: ItemsSource) -> StorageLoad:
        n, here = source.length, self._max_size
        if source.capacity is not None and here not in (None, source.capacity):
            raise IncompatibleCheckpoint(
                f"{source.name}: expected a list of {here} items, as here, got a full one of {source.capacity}, whose oldest item is not "
                f"the first. Make the storage with max_size={source.capacity}."
            )
        bound = here or source.capacity
        if n > (bound or n):
            raise IncompatibleCheckpoint(
                f"{source.name}: expected at most {bound} items, as here, got {n}. Make the storage with a max_size of at least {n}."
            )
        # Such as no write here had; the oldest row has the smallest.
        cursor, first = source.position, self.next_number()
        said = (torch.arange(n, device="cpu") - cursor) % max(n, 1) + first
        state = {"numbers": said, "clock": n + first, "cursor": cursor, "write_count": source.write_count}
        items = [
            kept
            for item in source.read(self._decompress, whole=self._keeps_whole)
            for kept in self._stored([item])  # one by one: each may become smaller
        ]
        return _ItemsLoad(self, bound or self.max_size, bound, state, items, {})

    def prepare_unwritten(self) -> StorageLoad:
        state = {"numbers": torch.zeros(0, dtype=torch.int64, device="cpu"), "clock": 1, "cursor": 0, "write_count": 0}
        return _ItemsLoad(self, self.max_size, self._max_size, state, [], {})

    def prepare_snapshot(self, *, without: Collection[tuple[str, str]] = (), whole: bool = True) -> StoragePreparation:
        del whole  # items are copied in any case
        return Unprepared(partial(self._snapshot, without))

    def _snapshot(self, without: Collection[tuple[str, str]]) -> StorageSnapshot:
        """Items are copied while writers wait."""
        state = self.state_dict(without=without)
        return WholeSnapshot(type(self).__name__, state, state["clock"], int(state["numbers"].count_nonzero()), 0)

    def counters(self) -> dict[str, float]:
        counted = self._rows.counters()
        return {**super().counters(), **{name: counted[name] for name in ("void_rows", "priority_updates_dropped")}}

    def tickets_of(self, rows: Tensor) -> Tensor:
        return self._rows.tickets_of(rows)

    def writes_of(self, rows: Tensor, tickets: Tensor) -> Tensor:
        return self._rows.writes_of(rows, tickets)

    def next_number(self) -> int:
        return int(self._rows.core.next_ticket)

    def settled(self) -> int | None:
        with self._lock:
            return self.next_number()

    def field(self, key: tuple[str, ...], rows: Tensor, expected: Tensor) -> tuple[list[object], list[int]]:
        items, moved = self.read(rows, expected)
        values = [nested.find(item, key) for item in items]
        for i, value in enumerate(values):
            if value is None and i not in moved:
                raise KeyError(
                    f"row {int(rows[i])}: expected a TensorDict or a dict with the key {key}, got {nested.describe(items[i])}."
                )
        return values, moved

    def __repr__(self) -> str:
        bound = "unbounded" if self._max_size is None else f"{self._max_size:,}"
        return f"{type(self).__name__}(size={len(self):,}/{bound})"


class _ItemsLoad(NamedTuple):
    """A checked state, for a list."""

    storage: ListStorage
    capacity: int
    bound: int | None
    state: dict[str, Any]
    items: list[object]
    priorities: dict[str, tuple[PriorityConfig, dict[str, Any]]]

    def allocate(self) -> None:
        """A list grows as it is filled."""

    def commit(self) -> None:
        storage, state = self.storage, self.state
        with storage._lock:
            storage._max_size = self.bound
            storage.empty(keep_write_count=False)
            numbers, writes, items = state["numbers"], state.get("writes", state["numbers"]), iter(self.items)
            storage._resize(min(storage.max_size, max(_FIRST_ROWS, storage._rows.capacity, len(numbers))))
            lanes = torch.tensor([[state["cursor"], len(numbers), 0, 0]], device="cpu")
            rows = store.StoreState(lanes, numbers, state["clock"], state["write_count"], writes)
            storage._rows.replace(_with_capacity(rows, storage._rows.capacity), lambda _: None)
            storage._items = [next(items) if number else None for number in numbers.tolist()]
            for name, (config, entries) in self.priorities.items():
                storage.priorities(name, config, self.capacity)[0].restore(entries)  # type: ignore[index] # a list has some
            for groups in storage._groups.values():
                storage._tell_groups(groups)


def _with_capacity(state: store.StoreState, capacity: int) -> store.StoreState:
    """The state of a store of other rows, in one that has so many. None beyond holds anything."""
    assert state.writes is not None  # as lists have them
    numbers, writes = (pad(of, (0, capacity - len(of))) for of in (state.numbers, state.writes))
    return state._replace(numbers=numbers, writes=writes)


def _with_entries(item: object, entries: dict[str, Tensor]) -> object:
    """A TensorDict around the same tensors, with more entries; other items as they are."""
    if not is_tensor_collection(item) or is_tensorclass(item):
        return item
    made: tensordicts.TensorDict = item.copy()
    for key, value in entries.items():
        made.set(key, value.expand(made.batch_size))
    return made


def _without_graph(item: object) -> object:
    if isinstance(item, Tensor):
        return item.detach() if item.requires_grad else item
    return detached(item)
