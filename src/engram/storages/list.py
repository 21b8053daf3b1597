"""Any Python objects, in a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from engram._support.devices import existing_device
from engram._support.nested import NoRows, describe, find, is_named_tuple, map_with_paths
from engram._support.state import check_keys, integer, tensor_in, typed
from engram._support.tensordicts import detached, is_tensor_collection, is_tensorclass
from engram._support.unsupported import NOT_TRACED, TracingArguments, reject_unsupported, take_compilable
from engram.errors import IncompatibleCheckpoint, RowError
from engram.saved.snapshot import StoragePreparation, StorageSnapshot, WholeSnapshot, named_writes
from engram.storages._base import Count, Rows, Storage, check_count, check_plan
from engram.storages._geometry import Geometry
from engram.storages.items import ItemGroups, pack, unpack
from engram.storages.tensor_state import checked_priorities, saved_priorities
from engram.store import check_index_name
from engram.store.priorities import PriorityConfig, PriorityIndex
from engram.store.row_indexes import ALL_ROWS, ConsumptionIndex, GroupRules, Groups
from engram.types import Decompress, Extent, ItemsSource, StorageLoad, Write, WritePlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tensordict import TensorDict

    from engram._support.field_paths import FieldPath


class Void:
    """What a list has in place of an item that was removed: the class itself."""


class ListStorage(Storage):
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
        **later: Unpack[TracingArguments],
    ) -> None:
        reject_unsupported("ListStorage", later, NOT_TRACED, type(self))
        take_compilable(self, later)
        super().__init__()
        if max_size is not None:
            max_size = Geometry.checked(type(self).__name__, max_size).max_size
        self._max_size = max_size
        self._device = None if device is None else existing_device(device, f"{type(self).__name__}: device")
        self._items: list[object] = []
        self._numbers: list[int] = []
        #: Of each item the number of its write, which an edit leaves as it is: what handles name.
        self._writes: list[int] = []
        #: All rows that are void, and perhaps others; and the void ones in order, if they are known.
        self._removed: set[int] = set()
        self._holes: Tensor | None = None
        self._next = 1
        self._cursor = 0
        self._write_count = 0
        self._priorities: dict[str, PriorityIndex] = {}
        self._counts: dict[str, ConsumptionIndex] = {}
        self._groups: dict[tuple[FieldPath, FieldPath | None, GroupRules], ItemGroups] = {}

    def bound(self, size: int) -> None:
        if self._max_size is None:
            self._max_size = size

    @property
    def max_size(self) -> int:
        return self._max_size if self._max_size is not None else torch.iinfo(torch.int64).max

    @property
    def initialized(self) -> bool:
        return True

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
        return self._write_count

    def __len__(self) -> int:
        return self.extent().size if self._removed else len(self._items)

    def extent(self) -> Extent:
        if not self._removed:
            return Extent(self.max_size, (len(self._items),), (self._cursor % self.max_size,))
        with self._lock:
            holes = self._void_rows()
            filled, seam = len(self._items), self._cursor % self.max_size
            return Extent(self.max_size, (filled,), (seam,), holes if len(holes) else None)

    def _void_rows(self) -> Tensor:
        """int64: the rows that are void, in order. The lock is held."""
        if self._holes is None:
            length = len(self._items)
            found = sorted(row for row in self._removed if row < length and self._items[row] is Void)
            self._holes = torch.tensor(found, dtype=torch.int64, device="cpu")
        return self._holes

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[object], int]:
        items = self._split(data, call) if batched else [data]
        if not items:
            raise NoRows(f"{call}: expected at least one row, got an empty batch.")
        check_count(call, count, len(items))
        return self._stored(items), len(items)

    def _split(self, data: object, call: str) -> list[object]:
        if isinstance(data, list | tuple | range | set | frozenset) and not is_named_tuple(data):
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
        return kept if self._device is None else [map_with_paths(item, self._moved, keep=True) for item in kept]

    def _moved(self, leaf: object, _: object) -> object:
        return leaf.to(self._device) if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf

    def write(self, plan: WritePlan, prepared: list[object], n: int) -> Write:
        if plan.kept is not None:
            write = self.write(WritePlan(rows=plan.rows), [prepared[i] for i in plan.kept.tolist()], len(plan.kept))
            return Write(plan.reported(write.rows, n), write.first)
        self.begin_change()
        check_plan(plan, n, lanes=1)
        with self._lock:
            if plan.rows is not None:
                rows = plan.rows.tolist()
                length = len(self._items)
                for row in rows:
                    if not 0 <= row < self.max_size:
                        raise RowError(f"write: row {row} is outside [0, {self.max_size}).")
                    if row > length:
                        raise RuntimeError(
                            f"write: row {row}: expected at most {length}, the next row: a list cannot have a gap."
                        )
                    length = max(length, row + 1)
            else:
                rows = [(self._cursor + i) % self.max_size for i in range(n)]
            first = self._put(rows, prepared)
            if plan.rows is None:
                self._cursor += n
            self._write_count += n
            written = torch.tensor(rows, dtype=torch.int64, device="cpu")  # perhaps none
            for index in self._priorities.values():
                index.written(written)
            for counts in self._counts.values():
                counts.core.written(written, first)
        return Write(written, first)

    def _put(self, rows: list[int], items: list[object], *, edited: bool = False) -> int:
        """An interrupt may end this anywhere: it is the item, not its number, that makes a row."""
        self._holes = None
        del self._numbers[len(self._items) :], self._writes[len(self._items) :]
        first = self._next
        self._next += len(items)
        for i, (row, item) in enumerate(zip(rows, items, strict=True)):
            if row == len(self._items):
                self._numbers.append(first + i)
                self._writes.append(first + i)
                self._items.append(item)
            else:
                self._numbers[row] = first + i
                self._writes[row] = self._writes[row] if edited else first + i
                self._items[row] = item
        for groups in self._groups.values():
            groups.written(rows, items, edited=edited)
        self._removed.difference_update(rows)
        return first

    def edit(self, where: Rows, prepared: list[object]) -> Write:
        self.begin_change()
        with self._lock:
            if self._removed:
                self._live(where.rows)  # one that was removed since it was located stays void
            first = self._put(where.rows.tolist(), prepared, edited=True)
            for counts in self._counts.values():
                counts.core.edited(where.rows, first)
            return Write(where.rows, first)

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[list[object], list[int]]:
        items, wanted = self._items, rows.tolist()
        if expected is not None:
            return self._read_expected(wanted, expected.tolist())
        try:
            found = [items[row] for row in wanted]
        except IndexError as error:
            raise RowError(f"read: expected rows in [0, {len(items)}), got {max(wanted)}.") from error
        if wanted and min(wanted) < 0:
            raise RowError(f"read: expected rows in [0, {len(items)}), got {min(wanted)}.")
        return found, [i for i, item in enumerate(found) if item is Void]

    def __getitem__(self, index: object) -> object:
        with self._lock:  # no item is removed between the two looks
            found: object = super().__getitem__(index)
            return found

    def _read_expected(self, rows: list[int], expected: list[int]) -> tuple[list[object], list[int]]:
        with self._lock:
            items, numbers = self._items, self._numbers
            live = [0 <= row < len(items) and items[row] is not Void for row in rows]
            moved = [i for i, row in enumerate(rows) if not live[i] or numbers[row] != expected[i]]
            for row in rows:
                if not 0 <= row < self.max_size:
                    raise RowError(f"read: expected rows in [0, {len(items)}), got {row}.")
            return [items[row] if live[i] else None for i, row in enumerate(rows)], moved

    def patch(self, columns: list[object], places: list[int], fresh: list[object]) -> None:
        for place, item in zip(places, fresh, strict=True):
            columns[place] = item

    def some(self, columns: list[object], which: slice | list[int]) -> list[object]:  # type: ignore[override]
        return columns[which] if isinstance(which, slice) else [columns[i] for i in which]

    def pack(self, columns: list[object], where: Rows, extra: dict[str, Tensor] | None = None) -> object:
        if extra is not None:
            columns = [
                _with_entries(item, {key: value[i] for key, value in extra.items()}) for i, item in enumerate(columns)
            ]
        return columns[0] if where.single else columns

    def batch(self, columns: list[object], n: int | tuple[int, ...] | None) -> list[object]:
        return columns

    def remove(self, rows: Tensor, expected: Tensor | None) -> int:
        self.begin_change()
        with self._lock:
            named = rows.tolist()
            wanted = [None] * len(named) if expected is None else expected.tolist()
            gone = {
                row
                for row, number in zip(named, wanted, strict=True)
                if self._holds(row) and number in (None, self._writes[row])
            }
            if not gone:
                return 0
            self._removed |= gone  # first: an interrupt may end this anywhere
            self._holes = None
            self._next += len(gone)
            for row in gone:
                self._items[row] = Void
            self._tell_void(torch.tensor(sorted(gone), dtype=torch.int64, device="cpu"))
        return len(gone)

    def _holds(self, row: int) -> bool:
        """Whether there is an item. The lock is held."""
        return 0 <= row < len(self._items) and self._items[row] is not Void

    def _tell_void(self, rows: Tensor) -> None:
        """Void rows are not drawn. The lock is held."""
        for index in self._followers():
            index.lost(rows)

    def _followers(self) -> list[PriorityIndex | ConsumptionIndex | ItemGroups]:
        return [*self._priorities.values(), *self._counts.values(), *self._groups.values()]

    def empty(self, *, keep_write_count: bool) -> None:
        with self._lock:
            self._cursor = 0  # first: an interrupt may end this anywhere
            self._next += 1
            self._items.clear()
            self._numbers.clear()
            self._writes.clear()
            self._removed.clear()
            self._holes = None
            if not keep_write_count:
                self._write_count = 0
            for index in self._followers():
                index.emptied()

    def priorities(
        self, name: str, config: PriorityConfig, rows: int, device: torch.device | None = None
    ) -> tuple[PriorityIndex, bool] | None:
        check_index_name(name)
        self.bound(rows)
        with self._lock:
            known = self._priorities.get(name)
            if known is not None:
                return known, False
            index = self._priorities[name] = PriorityIndex.of_list(self.max_size, config)
            index.written(torch.arange(len(self._items), device="cpu"))
            index.lost(self._void_rows())
            return index, True

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
            if name not in self._counts:
                self._counts[name] = ConsumptionIndex.of_list(self.max_size, most)
                self._tell_counts()
            return self._counts[name].checked(None, name, ((), None, most))

    def groups(
        self, name: str, key: FieldPath, reward: FieldPath | None, rules: GroupRules = ALL_ROWS
    ) -> Groups | None:
        del name, key, reward, rules
        raise TypeError(
            "PromptGroupSampler: expected a tensor storage, whose rows have a field that says their group, or a LazyStackStorage, got a "
            f"{type(self).__name__}. Use one of these."
        )

    def _tell_groups(self, groups: ItemGroups) -> None:
        """In the order in which the items were written, of which draws are made. The lock is held."""
        by_age = [row for row in sorted(range(len(self._items)), key=self._numbers.__getitem__) if self._holds(row)]
        groups.written(by_age, [self._items[row] for row in by_age])
        groups.lost(self._void_rows())

    def _tell_counts(self) -> None:
        """Each item was not drawn yet. The lock is held."""
        for row, number in enumerate(self._numbers[: len(self._items)]):
            for counts in self._counts.values():
                counts.core.written(torch.tensor([row], device="cpu"), number)
        self._tell_void(self._void_rows())

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_groups": {}}  # they follow from the items

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
            there = np.array([item is not Void for item in self._items], bool)
            numbers, writes = (np.array(of, np.int64)[: len(there)] * there for of in (self._numbers, self._writes))
            return {
                "max_size": self._max_size,
                "cursor": self._cursor,
                "write_count": self._write_count,
                "clock": self._next,
                "numbers": torch.from_numpy(numbers),
                **named_writes(numbers, writes),
                "items": pack(self._items_to_save()),
                "priorities": saved_priorities(self._priorities, without),
            }

    def _items_to_save(self) -> list[object]:
        """The items as they are packed. The lock is held."""
        return [item for item in self._items if item is not Void]

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
        tickets = numbers[numbers != 0]
        if n and not (
            int(numbers.min()) >= 0 and int(numbers.max()) < clock and len(torch.unique(tickets)) == len(tickets)
        ):
            raise ValueError(
                f"{where}: numbers: expected each ticket once, in [1, {clock}), or 0 of a row that was removed."
            )
        writes = tensor_in(state_dict, "writes", torch.int64, (n,), where) if "writes" in state_dict else numbers
        if bool(((writes > numbers) | (writes < numbers.clamp(max=1))).any()):
            raise ValueError(f"{where}: writes: expected a number of at most its ticket, 0 of a row that was removed.")
        items = unpack(state_dict["items"], self._device, f"{where}: items")
        items = self._items_of(items, f"{where}: items")
        if len(items) != len(tickets):
            raise ValueError(f"{where}: items: expected {len(tickets)}, one per ticket, got {len(items)}.")
        priorities = checked_priorities(state_dict["priorities"], self._priorities, rows, f"{where}: priorities")
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
        said = (torch.arange(n, device="cpu") - source.position) % max(n, 1) + self._next
        state = {"numbers": said, "clock": n + self._next, "cursor": source.position, "write_count": source.write_count}
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
        return _ItemsPreparation(self, without)

    def counters(self) -> dict[str, float]:
        dropped = sum(int(index.core.dropped) for index in self._priorities.values())
        void = len(self._items) - len(self)
        return {**super().counters(), "void_rows": void, "priority_updates_dropped": dropped}

    def tickets_of(self, rows: Tensor) -> Tensor:
        with self._lock:
            found = [self._numbers[row] if self._holds(row) else -1 for row in rows.tolist()]
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    def writes_of(self, rows: Tensor, tickets: Tensor) -> Tensor:
        with self._lock:
            held = [self._writes[row] if self._holds(row) else -1 for row in rows.tolist()]
        writes = torch.tensor(held, dtype=torch.int64, device="cpu").reshape(rows.shape)
        return torch.where((writes >= 0) & (writes <= tickets), writes, tickets)

    def next_number(self) -> int:
        return self._next

    def settled(self) -> int | None:
        with self._lock:
            return self._next

    def field(self, key: tuple[str, ...], rows: Tensor, expected: Tensor) -> tuple[list[object], list[int]]:
        items, moved = self.read(rows, expected)
        values = [find(item, key) for item in items]
        for i, value in enumerate(values):
            if value is None and i not in moved:
                raise KeyError(
                    f"row {int(rows[i])}: expected a TensorDict or a dict with the key {key}, got {describe(items[i])}."
                )
        return values, moved

    def __repr__(self) -> str:
        bound = "unbounded" if self._max_size is None else f"{self._max_size:,}"
        return f"{type(self).__name__}(size={len(self):,}/{bound})"


class _ItemsPreparation(NamedTuple):
    """Items are copied while writers wait."""

    storage: ListStorage
    without: Collection[tuple[str, str]]

    def take(self) -> StorageSnapshot:
        state = self.storage.state_dict(without=self.without)
        return WholeSnapshot(
            type(self.storage).__name__, state, state["clock"], int(state["numbers"].count_nonzero()), 0
        )


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
            for name, (config, _) in self.priorities.items():
                storage.priorities(name, config, self.capacity)
            storage.empty(keep_write_count=False)
            shift = storage._next
            numbers, items = (state["numbers"] + shift).tolist(), iter(self.items)
            storage._writes = state.get("writes", state["numbers"]).tolist()
            storage._removed = {row for row, number in enumerate(numbers) if number == shift}
            storage._numbers = numbers
            storage._items = [Void if number == shift else next(items) for number in numbers]
            storage._cursor, storage._write_count = state["cursor"], state["write_count"]
            storage._next = state["clock"] + shift
            for index in storage._priorities.values():
                index.written(torch.arange(len(numbers), device="cpu"))
            for name, (_, entries) in self.priorities.items():
                storage._priorities[name].restore(entries)
            storage._tell_counts()  # and what is void
            for groups in storage._groups.values():
                storage._tell_groups(groups)


def _with_entries(item: object, entries: dict[str, Tensor]) -> object:
    """A TensorDict around the same tensors, with more entries; other items as they are."""
    if not is_tensor_collection(item) or is_tensorclass(item):
        return item
    made: TensorDict = item.copy()
    for key, value in entries.items():
        made.set(key, value.expand(made.batch_size))
    return made


def _without_graph(item: object) -> object:
    if isinstance(item, Tensor):
        return item.detach() if item.requires_grad else item
    return detached(item)
