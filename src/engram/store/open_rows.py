"""Rows that grow: slots of a store in which they are put together, item by item, until they are sealed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from time import monotonic, sleep

from torch import Tensor

from engram._support import field_paths, native
from engram.errors import IncompatibleStore, RateLimited
from engram.format.schema import Schema
from engram.format.sizes import slot_layout
from engram.store import adding, indexes, memory
from engram.store.store import Store

#: Between looks for a slot that has become free.
_POLL_S = 0.002
#: In place of the address of no items, of which torch says 0. Nothing is read there.
_EMPTY = 1


class OpenRowIndex(indexes.LockedIndex["native.OpenRows"]):
    """The slots of a store, and who has each."""

    kind = "open"
    #: Where things lie in a slot, and the schema that this is of: each open row asks.
    described: tuple[Schema, native.SlotLayout] | None = None
    make_core = native.OpenRows
    format_memory = staticmethod(native.format_open_rows)

    @classmethod
    def of_store(cls, store: Store, slots: int) -> OpenRows:
        """The slots of a store with ragged fields, made with so many if there are none.

        Raises:
            IncompatibleStore: it has another number of slots. OSError: no space.
        """
        slot_bytes = slot_layout(store.schema).nbytes
        nbytes = native.open_rows_bytes(slots, slot_bytes)
        return OpenRows(store, cls.of_name(store.indexes, "main", nbytes, slots, slot_bytes)[0])

    @classmethod
    def existing(cls, store: Store) -> OpenRows | None:
        """The slots of a store; None: it was never asked for some."""
        key = ("main", cls.kind)
        index = store.indexes.get(key) or store.indexes.refreshed().get(key)
        return None if index is None else OpenRows(store, index)


class OpenRows:
    """The slots of a store, and what grows in them. Raises ``IncompatibleStore``: they have room for rows of other fields."""

    def __init__(self, store: Store, index: OpenRowIndex) -> None:
        described = index.described
        layout = described[1] if described and described[0] is store.schema else slot_layout(store.schema)
        if layout.nbytes != index.core.slot_bytes:
            adding.adopt_fields(store)  # that another process added before it made the slots
            layout = slot_layout(store.schema)
            if layout.nbytes != index.core.slot_bytes:
                raise IncompatibleStore("open rows: expected slots for rows of this store, got some for other fields.")
        self.store, self.index, self.schema, self.layout = store, index, store.schema, layout
        index.described = store.schema, layout

    @cached_property
    def groups(self) -> dict[int, int]:
        """In which group each ragged field is."""
        return {n: g for g, it in enumerate(self.schema.ragged_groups) for n in it.members}

    @cached_property
    def numbers(self) -> dict[field_paths.FieldPath, int]:
        """The fields by key."""
        return {field.key: number for number, field in enumerate(self.schema.fields)}

    def take(self, timeout: float) -> OpenSlot:
        """A free slot, which is this process's now, and empty.

        Args:
            timeout: seconds to wait for one.

        Raises:
            RateLimited: all were taken for so long.
        """
        deadline = monotonic() + timeout
        while (slot := self.take_now()) is None:
            if monotonic() >= deadline:
                raise RateLimited(
                    f"open_row: expected a free slot, got none in time: {self.index.core.slots} rows are open. Seal or discard some "
                    "(rb.unsealed() has those of processes that ended, too: resume() takes them over), wait longer (timeout=…), or make "
                    "the storage with more open_rows."
                )
            sleep(_POLL_S)
        return slot

    def take_now(self) -> OpenSlot | None:
        """As :meth:`take`. None: all are taken."""
        taken = self.index.core.open(self.store.core, self.layout)
        return None if taken is None else OpenSlot(self, *taken, native.own_owner())

    def taken(self) -> list[OpenSlot]:
        """The slots that have an owner, and no row that was sealed."""
        core = self.index.core
        core.free_sealed(self.store.core)
        owners = [(slot, core.times(slot), core.owner(slot)) for slot in range(core.slots)]
        return [OpenSlot(self, *slot) for slot in owners if slot[-1]]


class OpenSlot:
    """A row that grows. One thread at a time, of the process that owns it, may change it.

    Args:
        rows: the slots.
        number: which of them.
        times: how often it was taken.
        owner: which process has it, as it is when this is made.
    """

    def __init__(self, rows: OpenRows, number: int, times: int, owner: int) -> None:
        self.rows, self.number, self.times, self.owner = rows, number, times, owner
        self._core = rows.index.core

    @property
    def is_mine(self) -> bool:
        """Whether this process owns it, and it was not sealed or discarded since."""
        return self.owner == native.own_owner() and self._core.is_held(self.number, self.times)

    @property
    def is_abandoned(self) -> bool:
        """Whether its owner has ended."""
        return not native.is_owner_alive(self.owner)

    def take_over(self) -> bool:
        """Make this process its owner. False: another one has it."""
        mine = native.own_owner()
        if self.owner != mine and not (self.is_abandoned and self._core.take_over(self.number, self.owner)):
            return False
        self.owner = mine
        return self.is_mine

    # ---- what is in it -------------------------------------------------------------------------------------------------

    def length(self, number: int) -> int:
        """Items of a ragged field, so far. Raises ``CorruptStore``: more than there is room for."""
        return self._core.lengths(self.rows.layout, self.number)[self.rows.groups[number]]

    @property
    def lengths(self) -> dict[int, int]:
        """Items so far, by the leader of each group. Raises as :meth:`length`."""
        lengths = self._core.lengths(self.rows.layout, self.number)
        return {group.leader: n for group, n in zip(self.rows.schema.ragged_groups, lengths, strict=True)}

    def is_given(self, number: int) -> bool:
        """Whether a field has a value; of a ragged one, whether it was ever appended to."""
        return bool(self._bytes(self.rows.layout.given(number), 1))

    def _bytes(self, at: int, nbytes: int) -> Tensor:
        """Some of the bytes of the slot, uint8 ``[nbytes]``. A live view."""
        block = self.rows.index.block
        first = self._core.address(self.number) - block.address + at
        return block.tensor[first : first + nbytes]

    def value(self, number: int) -> Tensor:
        """The row of a field, ``[*shape]``; of a ragged one the items so far, ``[length, *shape]``. A live view."""
        schema, at = self.rows.schema, self.rows.layout.places[number]
        field, it = schema.fields[number], schema.ragged.get(number)
        if it is None:
            return self._bytes(at, field.row_bytes).view(memory.torch_dtype(field)).view(field.shape)
        n = self.length(number)
        return self._bytes(at, n * it.item_bytes).view(memory.torch_dtype(it)).view(n, *it.shape)

    # ---- how it grows --------------------------------------------------------------------------------------------------

    def append(self, columns: Mapping[int, Tensor], items: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Put a value into each of some fields, and append items to those of some groups, zeros where none are given: there is room.

        Args:
            columns: of fields of one size, by number, as the core takes them.
            items: of groups, in order, the items by the number of the field, of one length.

        A process that dies in here leaves the lengths of before, or those of after.
        """
        given = self._addresses(columns, items)
        self._core.append(self.rows.layout, self.number, self.times, *given)

    def seal(
        self, lane: int, columns: Mapping[int, Tensor], items: Mapping[int, Mapping[int, Tensor]]
    ) -> tuple[int, int]:
        """Append to it, then append the row to a lane, and free the slot: ``(row, ticket number)``. All fields of one size were given.

        It is one step: whenever this process dies the row is there or grows on. So it does, without the last items, if this raises.

        Raises as :meth:`Store.write`.
        """
        given = self._addresses(columns, items)
        return self._core.seal(self.rows.store.core, self.rows.layout, self.number, self.times, lane, *given)

    def append_of(self, intake: native.Intake, data: object, *, values: bool) -> bool:
        """As :meth:`append`, of data as users hand it over. False: it must be prepared first, and nothing was appended.

        ``values``: it may hold fields of one size.
        """
        return self._core.append_of(intake, self.rows.layout, self.number, self.times, self.owner, data, values)

    def seal_of(self, intake: native.Intake, lane: int, data: object) -> tuple[int, int] | None:
        """As :meth:`seal`, of data as users hand it over. None: it must be prepared first, and the row grows on."""
        store = self.rows.store.core
        return self._core.seal_of(store, intake, self.rows.layout, self.number, self.times, self.owner, lane, data)

    def _addresses(
        self, columns: Mapping[int, Tensor], items: Mapping[int, Mapping[int, Tensor]]
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, tuple[int, ...]], ...]]:
        values, of_groups = [], []
        for number, column in columns.items():
            values.append((number, column.data_ptr()))
        for group, given in sorted(items.items()):
            addresses, n = dict.fromkeys(self.rows.schema.ragged_groups[group].members, 0), 0
            for number, values_of in given.items():
                addresses[number], n = values_of.data_ptr() or _EMPTY, values_of.shape[0]
            of_groups.append((group, n, tuple(addresses.values())))
        return tuple(values), tuple(of_groups)

    def discard(self) -> None:
        """Free the slot: the row is gone."""
        self._core.free(self.number)
