"""The sizes of the rings of ragged fields, which a saved description may have otherwise than the store that takes its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.format.schema import Field, Schema

#: By the number of the field that leads: items of a lane, and the longest row.
Rings: TypeAlias = "Mapping[int, tuple[int, int]]"


def rings_of(schema: Schema) -> Rings:
    """The sizes that a schema has."""
    return {group.leader: (group.items, schema.ragged[group.leader].max_length) for group in schema.ragged_groups}


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
    return with_rings(
        made, {n: (max(-(-items * now // before), 2 * most), most) for n, (items, most) in rings_of(schema).items()}
    )


def usual_row_bytes(schema: Schema) -> int:
    """Bytes of a row and its items where the rings of items are as full as those of rows."""
    return schema.row_bytes + sum(schema.values_bytes.values()) // schema.capacity


def most_row_bytes(schema: Schema) -> int:
    """Bytes of a row with as many items as it may have."""
    return schema.row_bytes + sum(it.max_length * it.item_bytes for it in schema.ragged.values())
