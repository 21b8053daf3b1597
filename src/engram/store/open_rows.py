"""Rows that grow: slots of a store in which they are put together, item by item, until they are sealed."""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import native
from engram.errors import CorruptStore, IncompatibleStore, RateLimited
from engram.store.adding import adopt_fields
from engram.store.blocks import aligned
from engram.store.indexes import LockedIndex
from engram.store.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engram.format.schema import Schema
    from engram.store.store import Store

#: Between looks for a slot that has become free.
_POLL_S = 0.002
#: Bytes of the count of how often a slot was taken.
_TIMES = 8


class OpenRowIndex(LockedIndex["native.OpenRows"]):
    """The slots of a store, and who has each."""

    kind = "open"
    make_core = native.OpenRows
    format_memory = staticmethod(native.format_open_rows)

    @classmethod
    def of_store(cls, store: Store, slots: int) -> OpenRows:
        """The slots of a store with ragged fields, made with so many if there are none.

        Raises:
            IncompatibleStore: it has another number of slots. OSError: no space.
        """
        slot_bytes = _SlotLayout.of(store.schema).nbytes
        nbytes = native.open_rows_bytes(slots, slot_bytes)
        return OpenRows(store, cls.of_name(store.indexes, "main", nbytes, slots, slot_bytes)[0])

    @classmethod
    def existing(cls, store: Store) -> OpenRows | None:
        """The slots of a store; None: it was never asked for some."""
        key = ("main", cls.kind)
        index = store.indexes.get(key) or store.indexes.refreshed().get(key)
        return None if index is None else OpenRows(store, index)


class _SlotLayout(NamedTuple):
    """Where things lie in a slot, from its own part on: first how often it was taken, int64."""

    lengths: dict[int, int]
    """The items of each group, uint32, by the number of its leader."""
    given: int
    """A byte for each field: whether it was given."""
    columns: dict[int, int]
    """A row of each field, by its number; the items of ragged ones."""
    nbytes: int

    @classmethod
    def of(cls, schema: Schema) -> _SlotLayout:
        lengths = {group.leader: _TIMES + 4 * place for place, group in enumerate(schema.ragged_groups)}
        given = end = _TIMES + 4 * len(lengths)
        end += len(schema.fields)
        columns = {}
        for number, field in enumerate(schema.fields):
            items = schema.ragged.get(number)
            end = aligned(end)
            columns[number] = end
            end += field.row_bytes if items is None else items.max_length * items.item_bytes
        return cls(lengths, given, columns, end)


class OpenRows:
    """The slots of a store, and what grows in them. Raises ``IncompatibleStore``: they have room for rows of other fields."""

    def __init__(self, store: Store, index: OpenRowIndex) -> None:
        layout = _SlotLayout.of(store.schema)
        if layout.nbytes != index.core.slot_bytes:
            adopt_fields(store)  # that another process added before it made the slots
            layout = _SlotLayout.of(store.schema)
            if layout.nbytes != index.core.slot_bytes:
                raise IncompatibleStore("open rows: expected slots for rows of this store, got some for other fields.")
        self.store, self.index, self.schema, self.layout = store, index, store.schema, layout

    def take(self, timeout: float) -> OpenSlot:
        """A free slot, which is this process's now.

        Args:
            timeout: seconds to wait for one.

        Raises:
            RateLimited: all were taken for so long.
        """
        deadline = monotonic() + timeout
        while (slot := self._free()) is None:
            if monotonic() >= deadline:
                raise RateLimited(
                    f"open_row: expected a free slot, got none in time: {self.index.core.slots} rows are open. Seal or discard some "
                    "(rb.unsealed() has those of processes that ended, too: resume() takes them over), wait longer (timeout=…), or make "
                    "the storage with more open_rows."
                )
            sleep(_POLL_S)
        found = OpenSlot(self, slot)
        found.clear()
        return found

    def _free(self) -> int | None:
        """The number of a free slot, taken for this process; None: there is none."""
        self.index.core.free_sealed(self.store.core)
        return self.index.core.take()

    def taken(self) -> list[OpenSlot]:
        """The slots that have an owner, and no row that was sealed."""
        self.index.core.free_sealed(self.store.core)
        return [OpenSlot(self, slot) for slot in range(self.index.core.slots) if self.index.core.owner(slot)]


class OpenSlot:
    """A row that grows. One thread at a time, of the process that owns it, may change it.

    Args:
        rows: the slots.
        number: which of them.
    """

    def __init__(self, rows: OpenRows, number: int) -> None:
        self.rows, self.number = rows, number
        self.owner = rows.index.core.owner(number)
        """Which process has it, as it was when this was made."""
        at = rows.index.core.address(number) - rows.index.block.address
        self._memory = rows.index.block.tensor[at : at + rows.layout.nbytes]
        self._times = int(self._taken)

    @property
    def _taken(self) -> Tensor:
        return self._memory[:_TIMES].view(torch.int64)

    @property
    def is_mine(self) -> bool:
        """Whether this process owns it, and it was not sealed or discarded since."""
        mine = self.rows.index.core.owner(self.number) == native.own_owner() == self.owner
        return mine and int(self._taken) == self._times

    @property
    def is_abandoned(self) -> bool:
        """Whether its owner has ended."""
        return not native.is_owner_alive(self.owner)

    def take_over(self) -> bool:
        """Make this process its owner. False: another one has it."""
        mine = native.own_owner()
        if self.owner != mine and not (self.is_abandoned and self.rows.index.core.take_over(self.number, self.owner)):
            return False
        self.owner = mine
        return self.is_mine

    def clear(self) -> None:
        """Begin again: nothing is given, there are no items, and what had the slot before has it no more."""
        self._memory[_TIMES : self.rows.layout.given + len(self.rows.schema.fields)] = 0
        self._times += 1
        self._taken.fill_(self._times)

    # ---- what is in it -------------------------------------------------------------------------------------------------

    def length(self, leader: int) -> int:
        """Items of the fields of a group, so far. Raises ``CorruptStore``: more than there is room for."""
        n, most = int(self._lengths(leader)), self.rows.schema.ragged[leader].max_length
        if not 0 <= n <= most:
            raise CorruptStore(f"open rows: expected at most {most} items in slot {self.number}, got {n}.")
        return n

    def _lengths(self, leader: int) -> Tensor:
        at = self.rows.layout.lengths[leader]
        return self._memory[at : at + 4].view(torch.int32)

    @property
    def lengths(self) -> dict[int, int]:
        """Items so far, by the leader of each group."""
        return {leader: self.length(leader) for leader in self.rows.layout.lengths}

    def shorten(self, lengths: Mapping[int, int]) -> None:
        """Drop the items behind these lengths, while this process has the row."""
        for leader, n in lengths.items() if self.is_mine else ():
            self._lengths(leader).fill_(n)

    def is_given(self, number: int) -> bool:
        """Whether a field has a value; of a ragged one, whether it was ever appended to."""
        return bool(self._memory[self.rows.layout.given + number])

    def _give(self, number: int) -> None:
        self._memory[self.rows.layout.given + number] = 1

    def column(self, number: int) -> Tensor:
        """The row of a field, ``[*shape]``; of a ragged one room for all items that it may have, ``[max_length, *shape]``. Live views."""
        schema, at = self.rows.schema, self.rows.layout.columns[number]
        field, it = schema.fields[number], schema.ragged.get(number)
        if it is None:
            return self._memory[at : at + field.row_bytes].view(torch_dtype(field)).view(field.shape)
        room = self._memory[at : at + it.max_length * it.item_bytes]
        return room.view(torch_dtype(it)).view(it.max_length, *it.shape)

    def items(self, number: int) -> Tensor:
        """The items of a ragged field so far, ``[length, *shape]``. A live view."""
        it = self.rows.schema.ragged[number]
        return self.column(number)[: self.length(number if it.is_leader else it.like)]

    # ---- how it grows --------------------------------------------------------------------------------------------------

    def fill(self, columns: Mapping[int, Tensor], given: Mapping[int, tuple[Mapping[int, Tensor], int]]) -> None:
        """Put a value into each of these fields, and :meth:`append` what is given of the others, by leader."""
        for number, column in columns.items():
            self.column(number).copy_(column)
            self._give(number)
        for leader, (items, n) in given.items():
            self.append(leader, items, n)

    def append(self, leader: int, items: Mapping[int, Tensor], n: int) -> None:
        """Append ``n`` items to the fields of a group: those given, zeros to the others. There is room for them.

        A process that dies in here leaves the length of before.
        """
        before = self.length(leader)
        for number in next(group.members for group in self.rows.schema.ragged_groups if group.leader == leader):
            room = self.column(number)[before : before + n]
            room.copy_(items[number]) if number in items else room.zero_()
            if number in items:
                self._give(number)
        self._lengths(leader).fill_(before + n)

    def seal(self, lane: int) -> tuple[int, int]:
        """Append the row to a lane, and free the slot: ``(row, ticket number)``. All fields of one size were given.

        It is one step: whenever this process dies the row is there or grows on.

        Raises as :meth:`Store.write`.
        """
        schema, core, places = self.rows.schema, self.rows.index.core, self.rows.layout.columns
        address = core.address(self.number)
        start = torch.zeros(1, dtype=torch.int64, device="cpu")
        sources = []
        for group in schema.ragged_groups:
            lengths = address + self.rows.layout.lengths[group.leader]
            values = tuple([address + places[number] for number in group.members])
            sources.append((lengths, start.data_ptr(), self.length(group.leader), values))
        columns = tuple([0 if number in schema.ragged else address + at for number, at in places.items()])
        return core.seal(self.rows.store.core, self.number, lane, columns, tuple(sources))

    def discard(self) -> None:
        """Free the slot: the row is gone."""
        self.rows.index.core.free(self.number)
