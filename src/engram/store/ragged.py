"""Stores with ragged fields: rows with any number of items, which the core moves beside their columns."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from engram._support import native
from engram._support.retries import Retries
from engram.errors import RowError
from engram.store.blocks import Key
from engram.store.memory import as_rows, dlpack_specs
from engram.store.ragged_rows import Items, Packing, offsets_of, sharing
from engram.store.ragged_state import RingsTarget, heads_of
from engram.store.store import Store, StoreState
from engram.types import RowsTarget, Write, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engram.format.schema import RaggedGroup, Schema

    #: Groups that are read, and which of their fields.
    _Groups: TypeAlias = list[tuple[RaggedGroup, list[int]]]
    ItemsRead: TypeAlias = tuple[list[tuple[int, int, Tensor, Tensor, Tensor, list[Tensor]]], list[int]]


def private_store(schema: Schema) -> Store:
    """A store in private memory. Pages are taken when rows are first written."""
    return (RaggedStore if schema.ragged else Store).private(schema)


class RaggedStore(Store):
    """As :class:`Store`. Where columns are written and read, ragged fields have :class:`Items` in the place of tensors."""

    reads_apart = True
    #: int64 ``[lanes, groups]``: by how much offsets of items are larger here than where rows were saved; None: by nothing.
    item_shifts: Tensor | None = None

    @property
    def saved_heads(self) -> Tensor:
        """int64 ``[lanes, groups]``: the offsets of the next items, as states say them: without the shifts."""
        heads = heads_of(self.core, self.schema)
        return heads if self.item_shifts is None else heads - self.item_shifts

    def replace(self, state: StoreState, fill: Callable[[RowsTarget], object]) -> None:
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
        return super().counters() | {"evicted_rows": self.core.evicted}

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, plan: WritePlan, columns: Sequence[Tensor | Items], n: int) -> Write:
        """As for every store. Raises, too: ``RuntimeError``: the plan names rows. Nothing is written."""
        if plan.lane is None:
            names = ", ".join(self.schema.fields[number].name for number in self.schema.ragged)
            raise RuntimeError(
                f"write: ragged fields ({names}): expected rows that are appended to a lane, got ones that are placed. Use a "
                "RoundRobinWriter."
            )
        groups = [
            sharing([cast("Items", columns[number]) for number in it.members]) for it in self.schema.ragged_groups
        ]
        sources = tuple(map(_source, groups))
        addresses = tuple([0 if isinstance(column, Items) else column.data_ptr() for column in columns])
        rows = native.empty_rows(n)
        if isinstance(plan.lane, int):
            return Write(rows, self.core.append_ragged(plan.lane, n, addresses, rows.data_ptr(), sources))
        lanes = as_rows(plan.lane, "extend")
        return Write(rows, self.core.append_ragged_by_lane(lanes.data_ptr(), n, addresses, rows.data_ptr(), sources))

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor | Items]) -> Write:
        """As for every store. Rows whose items are replaced and that are overwritten meanwhile are left alone.

        Raises, too: ``ValueError``: a row has another number of items. Nothing is written.
        """
        if self.items.keys().isdisjoint(which):
            return super().edit(rows, which, cast("Sequence[Tensor]", columns))
        rows = as_rows(rows, "edit")
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
        rows, expected = as_rows(rows, call), as_rows(expected, call)
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
            source = _source(members := sharing([cast("Items", parts.get(number, kept)) for number in group.members]))
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

    def packed(self, columns: list[Tensor], live: Tensor) -> list[Tensor]:
        """The items of the first rows, while the store is paused: of each ragged field in order, ``[items, *shape]``, row after row.

        ``columns``, of all fields, hold lengths int32 ``[n]`` afterwards where spans were. ``live``: bool ``[n]``.
        """
        found: dict[int, Tensor] = {}
        rows = live.nonzero()[:, 0]
        tickets = self.tickets_of(rows)
        for group in self.schema.ragged_groups:
            spans = columns[group.leader][rows].contiguous()
            columns[group.leader] = torch.zeros(len(live), dtype=torch.int32, device="cpu")
            columns[group.leader][rows] = spans[:, 2]
            offsets = offsets_of(spans[:, 2])
            shapes = {number: (int(offsets[-1]), *self.items[number].shape[1:]) for number in group.members}
            outputs = [self.items[number].new_empty(shape) for number, shape in shapes.items()]
            self.gather(group, rows, tickets, spans, outputs, offsets[:-1])
            found.update(zip(group.members, outputs, strict=True))
        return [found[number] for number in self.schema.ragged]

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        wanted = tuple(range(len(self.schema.fields))) if which is None else tuple(which)
        layout, groups = self._reads(wanted)
        if not groups:
            return super().read(rows, expected=expected, which=which)
        rows = as_rows(rows, "read")
        tickets = self.tickets_of(rows) if expected is None else as_rows(expected, "read")
        together = [*wanted, *(group.leader for group, _ in groups if group.leader not in wanted)]
        columns, moved = super().read(rows, expected=tickets, which=None if which is None else together)
        at = {number: place for place, number in enumerate(together)}
        spans = tuple([columns[at[group.leader]].data_ptr() for group, _ in groups])
        found = self.core.read_items(layout, rows.data_ptr(), len(rows), tickets.data_ptr(), spans, moved)
        moved = self._put(groups, at, columns, rows, found)
        return columns[: len(wanted)], moved

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        drawn = self._sample(key, n, limited=False)
        assert drawn is not None  # it waits for nothing
        return _without(drawn, with_rows, with_numbers)

    def sample_unlimited(self, key: Key, n: int, with_rows: bool, with_numbers: bool) -> list[Tensor] | None:
        drawn = self._sample(key, n, limited=True)
        return None if drawn is None else _without(drawn, with_rows, with_numbers)

    def _sample(self, key: Key, n: int, *, limited: bool) -> list[Tensor] | None:
        """As :meth:`Store.sample_uniform`, with the rows and the numbers of their writes: rows whose items are gone already make place
        for others.

        ``limited``: None where the store has limits.

        Raises ``WriterStalled``: rows moved at every try.
        """
        drawn = self._draw(key, n, limited)
        if drawn is None or not drawn[1]:
            return None if drawn is None else drawn[0]
        columns, moved = drawn
        retries, again = Retries(), Key()
        while moved:
            retries.again(columns[-2], moved)
            again.set(retries.key_of(key.value))
            others = self._draw(again, len(moved), False)
            assert others is not None  # it waits for nothing
            fresh, still = others
            places = torch.tensor(moved, device="cpu")
            for column, values in zip(columns, fresh, strict=False):  # a field may have been added between both reads
                column[places] = values
            moved = [moved[place] for place in still]
        return columns

    def _draw(self, key: Key, n: int, limited: bool) -> tuple[list[Tensor], list[int]] | None:
        """Columns of rows, the rows and the numbers of their writes, in one native call; and positions of those whose items are gone."""
        layout, groups = self._reads(tuple(self.items))
        drawn = self.core.draw_uniform(self.layout, key.address, n, True, True, limited, layout)
        if drawn is None:
            return None
        columns, found = drawn
        return columns, self._put(groups, None, columns, columns[-2], found)

    def _put(
        self, groups: _Groups, at: dict[int, int] | None, columns: list[Tensor], rows: Tensor, found: ItemsRead
    ) -> list[int]:
        """Put the items that were read in the place of spans. The positions of rows that have them no more.

        Args:
            groups: those that were read, and which of their fields.
            at: where in the columns each field is; None: at its number.
            columns: as they were read, whose ragged fields are replaced.
            rows: int64 ``[n]``. found: what the core has read.
        """
        read, moved = found
        for (_, which), (_, longest, lengths, offsets, ends, values) in zip(groups, read, strict=True):
            packing = Packing(offsets, ends, longest)
            for number, value in zip(which, values, strict=True):
                place = number if at is None else at[number]
                columns[place] = cast("Tensor", Items(value, None, lengths, rows, packing))
        return moved

    def _reads(self, wanted: tuple[int, ...]) -> tuple[native.ItemLayout, _Groups]:
        """What a read of the ragged ones among some fields asks the core for, and of which groups which fields it is."""
        if wanted not in self._known_reads:
            of = [[number for number in group.members if number in wanted] for group in self.schema.ragged_groups]
            groups = [(group, which) for group, which in zip(self.schema.ragged_groups, of, strict=True) if which]
            specs = dict(zip(self.schema.ragged, dlpack_specs([*self.schema.ragged.values()]), strict=True))
            layout = native.ItemLayout(
                tuple(
                    (
                        self.schema.ragged_groups.index(group),
                        tuple((group.members.index(number), specs[number]) for number in which),
                    )
                    for group, which in groups
                )
            )
            self._known_reads[wanted] = layout, groups
        return self._known_reads[wanted]

    @cached_property
    def _known_reads(self) -> dict[tuple[int, ...], tuple[native.ItemLayout, _Groups]]:
        return {}


def _source(members: Sequence[Items]) -> tuple[int, int, int, tuple[int, ...]]:
    """Rows of a group as the core takes them. They share starts and lengths, and must stay until the call is over."""
    first, total = members[0], min(len(it.values) for it in members if it.values is not None)
    values = tuple([0 if it.values is None else it.values.data_ptr() for it in members])
    return first.lengths.data_ptr(), first.starts.data_ptr(), total, values


def _without(drawn: list[Tensor], with_rows: bool, with_numbers: bool) -> list[Tensor]:
    """Columns, and what is asked for of the rows and numbers behind them."""
    *columns, rows, numbers = drawn
    return [*columns, *[rows] * with_rows, *[numbers] * with_numbers]
