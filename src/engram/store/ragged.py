"""Stores with ragged fields: rows with any number of items, which the core moves beside their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, cast

import torch
from torch import Tensor

from engram._support import field_paths, native
from engram.errors import RowError
from engram.format.schema import RaggedGroup, Schema
from engram.store import blocks, memory, store
from engram.store.ragged_rows import Items, addresses_of, check_room, sharing, source_of
from engram.store.rings import RingsTarget, heads_of
from engram.types import Draw, RowsTarget, Write, WritePlan

#: Of each group its fields, the longest row, lengths, where rows begin, offsets as int64 and as int32, and the items of each field.
ItemsRead: TypeAlias = Sequence[tuple[list[int], int, Tensor, Tensor, Tensor, Tensor, list[Tensor]]]


def counted_groups(schema: Schema, field: field_paths.FieldPath | None, call: str) -> list[int]:
    """The groups of fields of which the longest is the length of a row: that of a field, or those of all that are no texts, if any.

    Raises ``KeyError``: no such ragged field.
    """
    places = {n: place for place, group in enumerate(schema.ragged_groups) for n in group.members}
    of_key = {schema.fields[n].key: place for n, place in places.items()}
    if field is not None and field not in of_key:
        raise KeyError(
            f"{call}: expected one of the ragged fields {[*map(field_paths.public, of_key)]}, got {field_paths.public(field)!r}."
        )
    numeric = [place for n, place in places.items() if not schema.ragged[n].kind] or [*places.values()]
    return numeric if field is None else [of_key[field]]


class RowsWithin(dict[object, float]):
    """How many rows batches by tokens had lately, by what was asked of them."""

    def note(self, form: object, rows: int) -> None:
        """A batch had so many."""
        if len(self) >= 64:  # kinds of batches
            self.clear()
        self[form] = 0.9 * self.get(form, rows) + 0.1 * rows


class RaggedStore(store.Store):
    """As :class:`Store`. Where columns are written and read, ragged fields have :class:`Items` in the place of tensors."""

    reads_apart = True
    #: int64 ``[lanes, groups]``: by how much offsets of items are larger here than where rows were saved; None: by nothing.
    item_shifts: Tensor | None = None

    def counted_groups(self, field: field_paths.FieldPath | None, call: str) -> list[int]:
        """As :func:`counted_groups`, which is asked once for each field."""
        if field not in self._counted:
            self._counted[field] = counted_groups(self.schema, field, call)
        return self._counted[field]

    @cached_property
    def _counted(self) -> dict[field_paths.FieldPath | None, list[int]]:
        return {}

    @property
    def saved_heads(self) -> Tensor:
        """int64 ``[lanes, groups]``: the offsets of the next items, as states say them: without the shifts."""
        heads = heads_of(self.core, self.schema)
        return heads if self.item_shifts is None else heads - self.item_shifts

    def replace(self, state: store.StoreState, fill: Callable[[RowsTarget], object]) -> None:
        """As for every store; ``fill`` puts items to their places, too. Offsets never fall."""
        rings = RingsTarget(self.core, self.schema, self.items)

        def filled(target: RowsTarget) -> None:
            target.rings = rings
            fill(target)
            rings.settle()
            self.item_shifts = rings.shifts

        super().replace(state, filled)

    def counters(self) -> dict[str, float]:
        """As for every store, and the rows that lost their items to newer ones."""
        return {"evicted_rows": self.core.evicted} | super().counters()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, columns: Sequence[Tensor | Items], n: int) -> Write:
        """As for every store. Raises, too: ``RuntimeError``: the plan names rows, and items lie in rings. ``ValueError``: a lane has no
        room for the items of all its rows. Nothing is written.
        """
        groups = self.schema.ragged_groups
        if plan.rows is not None and not self.schema.in_slots:
            names = ", ".join(self.schema.fields[number].name for number in self.schema.ragged)
            raise RuntimeError(
                f"write: ragged fields ({names}): expected rows that are appended to a lane, got ones that are placed. Use a "
                'RoundRobinWriter, or make the storage with ragged_layout="slots".'
            )
        if plan.rows is not None:
            at, given, _kept = addresses_of(groups, columns)
            return self._write_by_number(plan, n, self._which[: len(at)], at, given)
        assert plan.lane is not None  # a WritePlan has rows or a lane
        lanes = plan.lane if isinstance(plan.lane, int) else memory.as_rows(plan.lane, "extend")
        check_room(groups, columns, lanes, self.lane_length)
        addresses, sources, _kept = addresses_of(groups, columns)
        rows = native.empty_rows(n)
        if isinstance(lanes, int):
            return Write(rows, self.core.append_ragged(lanes, n, addresses, rows.data_ptr(), sources))
        return Write(rows, self.core.append_ragged_by_lane(lanes.data_ptr(), n, addresses, rows.data_ptr(), sources))

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor | Items]) -> Write:
        """As for every store. Rows whose items are replaced and that are overwritten meanwhile are left alone.

        Raises, too: ``ValueError``: a row has another number of items. Nothing is written.
        """
        if self.items.keys().isdisjoint(which):
            return super().edit(rows, which, cast("Sequence[Tensor]", columns))
        rows = memory.as_rows(rows, "edit")
        tickets = self.tickets_of(rows)
        if bool((tickets < 0).any()):
            row = int(rows[tickets < 0][0])
            raise RowError(f"edit: row {row} is not live. Only rows that were written can be edited.")
        return self.patch(rows, which, columns, self.writes_of(rows, tickets), call="edit")[0]

    def patch(
        self,
        rows: Tensor,
        which: Sequence[int],
        columns: Sequence[Tensor | Items],
        expected: Tensor,
        *,
        unedited: bool = False,
        call: str = "patch",
    ) -> tuple[Write, Tensor]:
        """As for every store. The items of each group, and the other fields together, are replaced one after the other: a
        reader may see a row between two steps.

        ``call``: for messages.

        Raises, too: ``ValueError``: a row has another number of items. Nothing is written.
        """
        if self.items.keys().isdisjoint(which):
            return super().patch(rows, which, cast("Sequence[Tensor]", columns), expected, unedited=unedited)
        rows, expected = memory.as_rows(rows, call), memory.as_rows(expected, call)
        parts = dict(zip(which, columns, strict=True))
        tickets = expected if unedited else self.tickets_of_writes(rows, expected)
        groups = [it for it in enumerate(self.schema.ragged_groups) if not parts.keys().isdisjoint(it[1].members)]
        for _, group in groups:
            self._check_lengths(group, rows, tickets, parts, call)
        write, numbers = Write(rows, 0), expected
        fixed = {number: cast("Tensor", column) for number, column in parts.items() if number not in self.items}
        if fixed:
            write, numbers = super().patch(rows, [*fixed], [*fixed.values()], expected, unedited=unedited)
            unedited = False  # a row has another ticket now, and the same number
        for at, group in groups:
            given = [cast("Items", parts[number]) for number in group.members if number in parts]
            kept = Items(None, given[0].starts, given[0].lengths)
            source = source_of(members := sharing([cast("Items", parts.get(number, kept)) for number in group.members]))
            known, numbers = numbers, torch.empty_like(rows)
            first, written = self.core.patch_items(
                at, rows.data_ptr(), len(rows), source, known.data_ptr(), numbers.data_ptr(), unedited
            )
            del members  # which were written
            write = Write(rows if written == len(rows) else rows[numbers >= 0], first)
            unedited = False
        return write, numbers

    def _check_lengths(
        self, group: RaggedGroup, rows: Tensor, tickets: Tensor, parts: dict[int, Tensor | Items], call: str
    ) -> None:
        """Raise ``ValueError`` where a row that has its ticket has another number of items than it is to be given."""
        (spans,), moved = super().read(rows.clamp(min=0), expected=tickets, which=(group.leader,))
        there = spans[:, 2].clone()
        for number in group.members:
            if number not in parts:
                continue
            given = cast("Items", parts[number]).lengths
            there[moved] = given[moved]
            if not torch.equal(there, given):
                at = int((there != given).int().argmax())
                raise ValueError(
                    f"{call}: field {self.schema.fields[number].name}: expected {int(there[at])} items, as row {int(rows[at])} has, got "
                    f"{int(given[at])}: an edit keeps the length. Write another row, or let rows grow in rb.open_row()."
                )

    # ---- saving ------------------------------------------------------------------------------------------------------

    def gather(
        self,
        group: RaggedGroup,
        rows: Tensor,
        tickets: Tensor,
        spans: Tensor,
        outputs: Sequence[Tensor],
        places: Tensor,
    ) -> list[int]:
        """Copy the items of rows, int64 ``[n]``, that have these tickets. The positions of those that have them no more.

        Args:
            group: of ragged fields.
            rows, tickets: int64 ``[n]``.
            spans: the leader's column, int32 ``[n, 3]``.
            outputs: memory of whole items, one of each member.
            places: int64 ``[n]``: which item of the outputs is the first of each row.
        """
        addresses = tuple([output.data_ptr() for output in outputs])
        number = self.schema.ragged_groups.index(group)
        found = rows.data_ptr(), len(rows), tickets.data_ptr(), spans.data_ptr(), addresses, places.data_ptr()
        return self.core.gather_items(number, *found)

    def read_spans(self, rows: Tensor, expected: Tensor) -> tuple[list[Tensor], list[int]]:
        """The columns of all leaders, int32 ``[n, 3]``, of rows that have these tickets; and the positions of those that have others."""
        return super().read(rows, expected=expected, which=[group.leader for group in self.schema.ragged_groups])

    def lengths_of(self, rows: Tensor, expected: Tensor, field: field_paths.FieldPath | None, call: str) -> Tensor:
        """How long rows are that have these tickets, int32 ``[n]``; of others any number. Raises as :func:`counted_groups`."""
        spans, _ = self.read_spans(rows, expected)
        return torch.stack([spans[place][:, 2] for place in counted_groups(self.schema, field, call)]).amax(0)

    def packed(self, columns: list[Tensor], live: Tensor) -> list[Tensor]:
        """The items of the first rows, while the store is paused: of each ragged field in order, ``[items, *shape]``, row after row.

        ``columns``, of all fields, hold lengths int32 ``[n]`` afterwards where spans were. ``live``: bool ``[n]``.
        """
        rows = live.nonzero()[:, 0]
        items = dict(zip(self.items, cast("list[Items]", self.read(rows, which=[*self.items])[0]), strict=True))
        for group in self.schema.ragged_groups:
            columns[group.leader] = torch.zeros(len(live), dtype=torch.int32, device="cpu")
            columns[group.leader][rows] = items[group.leader].lengths
        return [items[number].given for number in self.schema.ragged]

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        wanted = tuple(range(len(self.schema.fields))) if which is None else tuple(which)
        leaders = [it.leader for it in self.schema.ragged_groups if not {*it.members}.isdisjoint(wanted)]
        if not leaders:
            return super().read(rows, expected=expected, which=which)
        rows = memory.as_rows(rows, "read")
        tickets = self.tickets_of(rows) if expected is None else memory.as_rows(expected, "read")
        together = [*wanted, *(leader for leader in leaders if leader not in wanted)]
        columns, moved = super().read(rows, expected=tickets, which=None if which is None else together)
        at = {number: place for place, number in enumerate(together)}
        spans = [columns[at[it.leader]] if it.leader in leaders else rows for it in self.schema.ragged_groups]
        found = rows.data_ptr(), len(rows), tickets.data_ptr(), tuple([span.data_ptr() for span in spans]), moved
        groups, moved = self.core.read_items(self._item_layout, wanted, *found)
        _put(groups, columns, rows, at)
        return columns[: len(wanted)], moved

    def sample_uniform(self, key: blocks.Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        return self.sample_unlimited(key, n, with_rows, with_numbers, False)  # type: ignore[return-value] # it waits for nothing

    def sample_unlimited(
        self, key: blocks.Key, n: int, with_rows: bool, with_numbers: bool, unless_limited: bool = True
    ) -> list[Tensor] | None:
        drawn = self.core.draw_uniform(self.layout, key.address, n, True, True, unless_limited, self._item_layout)
        if drawn is None:
            return None
        (*columns, rows, numbers), groups = drawn
        _put(groups, columns, rows)
        return [*columns, *[rows] * with_rows, *[numbers] * with_numbers]

    def sample_within(
        self, key: int, n: int, fit: Callable[[Sequence[Tensor]], int]
    ) -> tuple[int, list[Tensor], Draw] | None:
        """Draw ``n`` live rows uniformly, with replacement, and read the first of them, as many as ``fit`` says of the leaders' columns,
        int32 ``[n, 3]``: how many, their columns and the draw. None: it says 0, or a row has moved meanwhile.
        """
        columns, rows, tickets = self.layout.allocate(n), native.empty_rows(n), native.empty_rows(n)
        addresses = tuple(map(torch.Tensor.data_ptr, columns))
        self.core.sample_uniform(key, n, addresses, rows.data_ptr(), tickets.data_ptr())
        spans = [columns[group.leader] for group in self.schema.ragged_groups]
        count = fit(spans)
        if not count:
            return None
        rows, columns = rows[:count], [column[:count] for column in columns]
        found = rows.data_ptr(), count, tickets.data_ptr(), tuple([span.data_ptr() for span in spans])
        groups, moved = self.core.read_items(self._item_layout, self._which, *found, [])
        _put(groups, columns, rows)
        return None if moved else (count, columns, Draw(rows, tickets[:count], {}))

    @cached_property
    def _item_layout(self) -> native.ItemLayout:
        specs = dict(zip(self.schema.ragged, memory.dlpack_specs([*self.schema.ragged.values()]), strict=True))
        return native.ItemLayout(tuple(tuple((n, specs[n]) for n in it.members) for it in self.schema.ragged_groups))


def store_class(schema: Schema) -> type[store.Store]:
    """The class of a store on the CPU for such rows."""
    return RaggedStore if schema.ragged else store.Store


def _put(groups: ItemsRead, columns: list[Tensor], rows: Tensor, at: Mapping[int, int] | None = None) -> None:
    """Put items, as the core has read them, in the place of spans. ``at``: where in the columns each field is; None: at its number."""
    for fields, longest, lengths, starts, offsets, ends, values in groups:
        for number, value in zip(fields, values, strict=True):
            place = number if at is None else at[number]
            columns[place] = Items(value, starts, lengths, rows, offsets, ends, longest)  # type: ignore[call-overload]
