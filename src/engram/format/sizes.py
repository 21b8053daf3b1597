"""Sizes of stores, for commands that do not wait for torch, which :mod:`engram._support.native` imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from engram import _core
from engram._support.memory import available_memory
from engram._support.words import format_size
from engram.format import layout
from engram.format.schema import SPAN_BYTES, Field, Schema

priority_bytes, is_owner_alive = _core.priority_bytes, _core.is_owner_alive
#: Children of a node of a sum tree on a device; a line of memory, at which parts of a block begin; bytes of a mirror's two blocks.
_FANOUT, _LINE, _MIRROR = 128, 64, 32 << 20


def resident_bytes(directory: Path, capacity: int) -> int:
    """Of the store in a folder: bytes that every draw touches."""
    indexes = len(list((directory / layout.FOLDER / layout.INDEXES).glob("*/priorities")))
    spans = len(list((directory / layout.FOLDER / layout.RAGGED).glob("*.spans")))
    return layout.tickets_bytes(capacity) + spans * SPAN_BYTES * capacity + indexes * priority_bytes(capacity, True)


def ragged_control_bytes(schema: Schema) -> int:
    """Size of the control block of ragged fields; 0: there are none."""
    groups = len(schema.ragged_groups)
    return _core.ragged_bytes(schema.lanes, groups) if groups else 0


def slot_layout(schema: Schema) -> _core.SlotLayout:
    """Where things lie in a slot of a row that grows."""
    items = schema.ragged
    row_bytes = [items[n].item_bytes if n in items else field.row_bytes for n, field in enumerate(schema.fields)]
    return _core.SlotLayout(row_bytes, tuple((items[it.leader].max_length, it.members) for it in schema.ragged_groups))


class ShownField(NamedTuple):
    """A field as people read it."""

    name: str
    #: Of an item, where the field is ragged; or the kind of its text.
    dtype: str
    #: Of a row: ``[4]``; ``[≤ 100, 4]`` where it has up to 100 items of shape ``[4]``.
    shape: str
    #: Bytes that a row has at most.
    row_bytes: int
    #: Bytes of all rows, and of the rings of their items.
    nbytes: int
    is_ragged: bool = False

    @property
    def row(self) -> str:
        """The bytes of a row."""
        return "≤ " * self.is_ragged + format_size(self.row_bytes)

    @classmethod
    def of(cls, field: Field, capacity: int, lanes: int = 1) -> ShownField:
        """A field of a store of that many rows."""
        key, row, it = field.key, field.row_bytes, field.ragged
        name = key[0] if len(key) == 1 else str(key)
        if it is None:
            return cls(name, field.dtype, str(list(field.shape)), row, row * capacity)
        shape, room = str([it.max_length, *it.shape]), lanes * it.room(capacity // lanes) * it.item_bytes
        most = row + it.max_length * it.item_bytes
        return cls(name, it.kind or it.dtype, f"[≤ {shape[1:]}", most, row * capacity + room, is_ragged=True)


def device_row_bytes(capacity: int, row_bytes: int) -> int:
    """Of rows on a device, with a spare one: the fields, the number of the write, two counts of edits and a position."""
    return (capacity + 1) * (row_bytes + 24)


def device_priority_bytes(capacity: int) -> int:
    """Of the priorities of such rows: float64 leaves, and above them the sum and the smallest of every node."""
    nodes = -(-(capacity + 1) // _FANOUT)
    nbytes = 8 * _FANOUT * nodes
    while nodes > 1:
        nodes = -(-nodes // _FANOUT)
        nbytes += 16 * _FANOUT * nodes
    return nbytes + 16


def resident_sizes(capacity: int, lanes: int, row_bytes: Sequence[int]) -> list[int]:
    """Of rows that stay on a device once they were read: ticket words, numbers of writes, lanes, and each field."""
    return [8 * capacity, 8 * capacity, _LINE * lanes, *(nbytes * capacity for nbytes in row_bytes)]


class DevicePlan(msgspec.Struct, frozen=True):
    """Memory that rows take on a device, and that a device which reads rows takes on the host, in bytes. ``print`` shows it.

    >>> import torch, engram
    >>> found = engram.plan({"obs": torch.zeros(4)}, 1_000_000, device="cuda").on_device
    >>> found.storage, found.batch
    (40000040, 9472)
    """

    device: str
    #: Free memory of the device; None: that is not known, as on a machine without one.
    free: int | None
    #: On the device: the rows of ``LazyTensorStorage(device=)``, with final observations that a sampler needs.
    storage: int
    #: On the device, beside those: what a sampler by priority needs.
    priorities: int
    #: On the device, and as much pinned memory of the host: what ``mirror=`` needs.
    mirror: int
    #: On the device: all rows, with ``transport="resident"``.
    resident: int
    #: On the device: one batch. A ``DeviceLoader`` has at most :attr:`batches` under way, each in a block of its own.
    batch: int
    batches: int
    #: On the host: what ``transport="direct"`` pins, which is the whole store.
    pinned: int
    #: On the host: pinned blocks of ``transport="block"``, all together.
    block: int
    #: Memory of the host that this process may have.
    available: int

    @classmethod
    def of(
        cls, device: str, free: int | None, capacity: int, row_bytes: Sequence[int], beside: int, batch_size: int, finals: int = 0
    ) -> DevicePlan:  # fmt: skip
        """The plan for rows of fields of that many bytes each. ``beside``: bytes of a store on the host, beside its rows."""
        row, batches = sum(row_bytes), 3
        batch = _in_lines(n * batch_size for n in (*row_bytes, 8, 8, 1, 4))  # and index, ticket, flag and weight
        return cls(
            device, free,
            device_row_bytes(capacity, row) + finals, device_priority_bytes(capacity), _MIRROR + 8 * capacity,
            _in_lines(resident_sizes(capacity, 1, row_bytes)) + _LINE,
            batch, batches,
            row * capacity + beside + priority_bytes(capacity, True), batches * (1 << (batch - 1).bit_length()), available_memory(),
        )  # fmt: skip

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit into memory, a sentence each."""
        ways = (
            (f"LazyTensorStorage(device={self.device!r})", self.storage, self.free, "Use fewer or smaller rows"),
            ('transport="resident"', self.resident, self.free, 'Leave transport="resident" out'),
            ('transport="direct"', self.pinned, self.available or None, 'DeviceLoader uses transport="block" then'),
        )
        return tuple(
            f"Too little memory for {way}: expected {format_size(needed)}, got {format_size(free)} that are free. {advice}."
            for way, needed, free, advice in ways
            if free is not None and free < needed
        )

    def facts(self) -> Iterator[tuple[str, str, str]]:
        """What takes memory, how much, and a remark."""
        free = "free memory unknown on this machine" if self.free is None else f"{format_size(self.free)} free"
        have = f", {format_size(self.available)} available" * bool(self.available)
        yield "rows there", format_size(self.storage), f"LazyTensorStorage(device={self.device!r}): {free}"
        yield "priorities there", format_size(self.priorities), "if a sampler draws by them"
        yield "a mirror", format_size(self.mirror), 'mirror="DIR", and as much pinned on the host'
        yield "resident rows", format_size(self.resident), 'transport="resident"'
        each = f"{self.batches} of {format_size(self.batch)}, in a loader"
        yield "batches", format_size(self.batch * self.batches), each
        yield "pinned rows", format_size(self.pinned), f'of the host, for transport="direct"{have}'
        yield "pinned blocks", format_size(self.block), 'of the host, for transport="block"'

    def __str__(self) -> str:
        lines = (f"  {what}: {size}, {remark}" for what, size, remark in self.facts())
        return "\n".join([f"On {self.device}, or for it:", *lines, *self.problems])


def _in_lines(sizes: Iterable[int]) -> int:
    """Bytes of parts that begin at a line each."""
    return sum(-(-nbytes // _LINE) * _LINE for nbytes in sizes)


# ---- rings of ragged fields, which a saved description may have otherwise than the store that takes its rows ----------------

#: By the number of the field that leads: items of a lane's ring, 0 where rows have slots; and the longest row.
Rings: TypeAlias = "Mapping[int, tuple[int, int]]"


def rings_of(schema: Schema) -> Rings:
    """The sizes that a schema has."""
    return {n: (it.items, it.max_length) for n, it in schema.ragged.items() if it.is_leader}


def with_rings(schema: Schema, sizes: Rings) -> Schema:
    """The same with rings of these sizes."""

    def sized(number: int, field: Field) -> Field:
        it = field.ragged
        found = sizes.get(number if it is None or it.is_leader else it.like)
        if it is None or found is None:
            return field
        return msgspec.structs.replace(field, ragged=msgspec.structs.replace(it, items=found[0], max_length=found[1]))

    return msgspec.structs.replace(schema, fields=tuple(sized(n, field) for n, field in enumerate(schema.fields)))


def without_rings(schema: Schema) -> Schema:
    """The same whatever its rings hold: rows of such stores can be in one batch."""
    return with_rings(schema, dict.fromkeys(rings_of(schema), (1, 1))) if schema.ragged else schema


def resized(schema: Schema, capacity: int, lanes: int) -> Schema:
    """The same with other sizes, and rings that hold as many items for each row."""
    before, now = schema.capacity // schema.lanes, capacity // lanes
    made = msgspec.structs.replace(schema, capacity=capacity, lanes=lanes)
    if now == before or not schema.ragged:
        return made
    sizes = rings_of(schema).items()
    return with_rings(made, {n: (it and max(-(-it * now // before), 2 * most), most) for n, (it, most) in sizes})


def usual_row_bytes(schema: Schema) -> int:
    """Bytes of a row and its items where the rings of items are as full as those of rows."""
    return schema.row_bytes + sum(schema.values_bytes.values()) // schema.capacity


def most_row_bytes(schema: Schema) -> int:
    """Bytes of a row with as many items as it may have."""
    return schema.row_bytes + sum(it.max_length * it.item_bytes for it in schema.ragged.values())
