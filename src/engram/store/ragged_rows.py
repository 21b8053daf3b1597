"""Rows of ragged fields: the items of each row, wherever they lie among those of all rows; and how a store writes and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import torch

from engram._support import native
from engram._support.retries import Retries
from engram.store.blocks import Key
from engram.store.memory import as_rows, torch_dtype
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from engram.format.schema import RaggedGroup, Schema
    from engram.types import WritePlan


class Items:
    """The rows of one ragged field: row ``i`` is ``values[starts[i] : starts[i] + lengths[i]]``.

    Rows may lie in any order, and between them there may be items of no row, so that rows are chosen and replaced without
    moving items. It takes the place of a column ``[n, *shape]`` where rows are written and read.

    Args:
        values: ``[total, *shape]``, contiguous, on the CPU; None: all items are zeros, of a field that was left out.
        starts: int64 ``[n]``.
        lengths: int32 ``[n]``.
        numbers: int64 ``[n]``: the rows of the store that they were read from, for messages.
    """

    __slots__ = ("lengths", "numbers", "starts", "values")

    def __init__(self, values: Tensor | None, starts: Tensor, lengths: Tensor, numbers: Tensor | None = None) -> None:
        self.values, self.starts, self.lengths, self.numbers = values, starts, lengths, numbers

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: Tensor) -> Items:
        """Rows that lie one after the other from the first item on. ``lengths``: int32 ``[n]``."""
        return cls(values, starts_of(lengths), lengths)

    @classmethod
    def joined(cls, several: Sequence[Items]) -> Items:
        """The rows of several fields of one dtype, in order. Those of fields that were left out are joined with their like."""
        lengths = torch.cat([it.lengths for it in several])
        given = [it.values for it in several if it.values is not None]
        if not given:
            return cls(None, starts_of(lengths), lengths)
        firsts = [0]
        parts = []
        for it in several:
            part = it.values if it.values is not None else given[0].new_zeros((it.total, *given[0].shape[1:]))
            parts.append(part)
            firsts.append(firsts[-1] + len(part))
        starts = torch.cat([it.starts + first for it, first in zip(several, firsts, strict=False)])
        return cls(torch.cat(parts), starts, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Items of all rows."""
        return int(self.lengths.sum())

    @property
    def in_order(self) -> bool:
        """Whether the rows lie one after the other from the first item on, and there are no others."""
        there = self.total if self.values is None else len(self.values)
        return there == self.total and torch.equal(self.starts, starts_of(self.lengths))

    def packed(self) -> Items:
        """The same rows, one after the other. No copy where they are.

        Cost: else one copy of the items.
        """
        if self.in_order:
            return self
        starts = starts_of(self.lengths)
        if self.values is None:
            return Items(None, starts, self.lengths, self.numbers)
        values = self.values.index_select(0, places_of(self.starts, starts, self.lengths))
        return Items(values, starts, self.lengths, self.numbers)

    @property
    def shape(self) -> torch.Size:
        """``[n]``: what a row holds has no shape."""
        return self.lengths.shape

    def reshape(self, *_: object) -> Items:
        """The same rows: there is no other shape."""
        return self

    def __getitem__(self, which: slice | Sequence[int] | Tensor) -> Items:
        """Some of the rows. No items are copied."""
        numbers = None if self.numbers is None else self.numbers[which]
        return Items(self.values, self.starts[which], self.lengths[which], numbers)

    def __setitem__(self, places: Tensor, fresh: Items) -> None:
        """Replace rows by others, of any lengths. ``places``: int64 ``[m]``, where each is to be."""
        assert self.values is not None  # rows that were read have items
        assert fresh.values is not None
        first = len(self.values)
        self.values = torch.cat([self.values, fresh.values])
        self.starts, self.lengths = self.starts.clone(), self.lengths.clone()  # fields that share lengths share these
        self.starts[places] = fresh.starts + first
        self.lengths[places] = fresh.lengths
        if self.numbers is not None and fresh.numbers is not None:
            self.numbers = self.numbers.index_copy(0, places, fresh.numbers)

    def rows(self) -> list[Tensor]:
        """A tensor ``[length, *shape]`` of each row: views where the items are in order, copies of them else."""
        there = self.packed()
        assert there.values is not None  # rows that were read have items
        return list(there.values.split(there.lengths.tolist()))  # type: ignore[no-untyped-call]


def starts_of(lengths: Tensor) -> Tensor:
    """Where rows of these lengths begin that lie one after the other, int64 ``[n]``."""
    ends = lengths.cumsum(0, dtype=torch.int64)
    return ends - lengths


def offsets_of(lengths: Tensor) -> Tensor:
    """The same with the end of the last row behind, int64 ``[n + 1]``."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def places_of(starts: Tensor, to: Tensor, lengths: Tensor) -> Tensor:
    """Where the items of rows lie that begin at ``starts``, in the order of rows that begin at ``to``, one after the other: int64."""
    total = int(lengths.sum())
    return torch.arange(total, device="cpu") + (starts - to).repeat_interleave(
        lengths.to(torch.int64), output_size=total
    )


def sharing(group: Iterable[Items]) -> list[Items]:
    """The members of a group with the same :attr:`Items.starts`, as the core takes them. Their lengths are equal.

    Cost: members whose items lie differently are copied.
    """
    members = list(group)
    given = [it for it in members if it.values is not None]
    if all(it.starts is given[0].starts or torch.equal(it.starts, given[0].starts) for it in given[1:]):
        starts = given[0].starts if given else starts_of(members[0].lengths)
        return [Items(it.values, starts, it.lengths) for it in members]
    return [it.packed() for it in members]


# ---- in a store ------------------------------------------------------------------------------------------------------------


class HoldsRagged(Protocol):
    """A store, as far as its ragged fields are written and read."""

    schema: Schema
    layout: native.Layout

    @property
    def core(self) -> native.Store: ...
    def tickets_of(self, rows: Tensor) -> Tensor: ...
    def tickets_of_writes(self, rows: Tensor, writes: Tensor) -> Tensor: ...
    def read_columns(
        self, rows: Tensor, expected: Tensor | None, which: Sequence[int] | None
    ) -> tuple[list[Tensor], list[int]]: ...


def append(store: HoldsRagged, plan: WritePlan, columns: Sequence[Tensor | Items], n: int) -> Write:
    """Append rows some of whose columns are :class:`Items`, as :meth:`Store.write` does others.

    Raises:
        RuntimeError: the plan names rows. Nothing is written. As :meth:`Store.write`.
    """
    schema = store.schema
    if plan.lane is None:
        refuse(
            schema,
            "write",
            "rows that are appended to a lane, got ones that a writer or remover places",
            "Use a RoundRobinWriter",
        )
    groups = [sharing([cast("Items", columns[number]) for number in it.members]) for it in schema.ragged_groups]
    sources = tuple(map(_source, groups))
    addresses = tuple([0 if isinstance(column, Items) else column.data_ptr() for column in columns])
    rows = native.empty_rows(n)
    if isinstance(plan.lane, int):
        return Write(rows, store.core.append_ragged(plan.lane, n, addresses, rows.data_ptr(), sources))
    lanes = as_rows(plan.lane, "extend")
    return Write(rows, store.core.append_ragged_by_lane(lanes.data_ptr(), n, addresses, rows.data_ptr(), sources))


def _source(members: Sequence[Items]) -> tuple[int, int, int, tuple[int, ...]]:
    """Rows of a group as the core takes them. They share starts and lengths, and must stay until the call is over."""
    total = min(len(it.values) for it in members if it.values is not None)
    values = tuple([0 if it.values is None else it.values.data_ptr() for it in members])
    return members[0].lengths.data_ptr(), members[0].starts.data_ptr(), total, values


def refuse(schema: Schema, call: str, expected: str, advice: str) -> NoReturn:
    """Raise ``RuntimeError``: ragged fields cannot do that."""
    names = ", ".join(schema.fields[number].name for number in schema.ragged)
    raise RuntimeError(f"{call}: ragged fields ({names}): expected {expected}. {advice}.")


def check_columns(schema: Schema, which: Iterable[int], call: str) -> None:
    """Raise ``RuntimeError`` where one of the fields is ragged, whose items cannot be replaced in place yet."""
    if any(number in schema.ragged for number in which):
        refuse(
            schema,
            call,
            "fields whose rows have one size, got ragged ones: their items stay as they are written",
            "Write the row anew",
        )


def read(
    store: HoldsRagged, rows: Tensor, expected: Tensor | None, which: Sequence[int] | None
) -> tuple[list[Tensor], list[int]]:
    """As :meth:`Store.read`; columns of ragged fields are :class:`Items`."""
    schema = store.schema
    wanted = range(len(schema.fields)) if which is None else which
    groups = [group for group in schema.ragged_groups if not {*group.members}.isdisjoint(wanted)]
    if not groups:
        return store.read_columns(rows, expected, which)
    rows = as_rows(rows, "read")
    tickets = store.tickets_of(rows) if expected is None else as_rows(expected, "read")
    read_ = None if which is None else [*which, *(group.leader for group in groups if group.leader not in wanted)]
    columns, moved = store.read_columns(rows, tickets, read_)
    at = {number: place for place, number in enumerate(wanted if read_ is None else read_)}
    moved = _resolve(store, groups, at, columns, rows, tickets, moved)
    return columns[: len(wanted)], moved


def draw(
    store: HoldsRagged, key: Key, n: int, with_rows: bool, with_numbers: bool, unless_limited: bool
) -> list[Tensor] | None:
    """As :meth:`Store.sample_uniform` and :meth:`Store.sample_unlimited`; columns of ragged fields are :class:`Items`.

    Raises, too: ``WriterStalled``: a row moved at every try.
    """
    drawn = _drawn(store, key, n, unless_limited)
    if drawn is None:
        return None
    columns, moved = drawn
    retries, again = Retries(), Key()
    while moved:
        retries.again(columns[-2], moved)
        again.set(retries.key_of(key.value))
        fresh, still = _drawn(store, again, len(moved), False) or ([], [])
        places = torch.tensor(moved, device="cpu")
        for column, values in zip(columns, fresh, strict=False):  # a field may have been added between both reads
            column[places] = values
        moved = [moved[place] for place in still]
    kept = len(columns) - 2
    return columns[:kept] + [columns[kept]] * with_rows + [columns[kept + 1]] * with_numbers


def _drawn(store: HoldsRagged, key: Key, n: int, unless_limited: bool) -> tuple[list[Tensor], list[int]] | None:
    """Columns, rows and numbers of writes of rows that were drawn, and the positions of those whose items are gone already."""
    columns: list[Tensor] | None
    if unless_limited:
        columns = store.core.draw_uniform(store.layout, key.address, n, True, True, True)
    else:
        columns = store.core.draw_uniform(store.layout, key.address, n, True, True, False)
    if columns is None:
        return None
    rows, writes = columns[-2:]
    at = {number: number for number in range(len(store.schema.fields))}
    tickets = store.tickets_of_writes(rows, writes)
    return columns, _resolve(store, store.schema.ragged_groups, at, columns, rows, tickets, [])


def _resolve(
    store: HoldsRagged,
    groups: Sequence[RaggedGroup],
    at: dict[int, int],
    columns: list[Tensor],
    rows: Tensor,
    tickets: Tensor,
    moved: list[int],
) -> list[int]:
    """Put the items of rows in the place of their spans.

    Args:
        store: the rows.
        groups: of the ragged fields that are read.
        at: where in the columns each field is.
        columns: as they were read. Those of ragged fields are replaced.
        rows, tickets: int64 ``[n]``. Of rows whose ticket is another now nothing is read.
        moved: positions of rows that were not whole when their columns were read.

    Returns:
        The positions whose row was not whole, has another ticket, or has lost its items.
    """
    schema, gone = store.schema, set(moved)
    for group in groups:
        spans = columns[at[group.leader]]
        if gone:
            spans[sorted(gone)] = 0
        lengths = spans[:, 2].contiguous()
        which = [number for number in group.members if number in at]
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
        starts, total = offsets[:-1], int(offsets[-1])
        values = {}
        for number in which:
            it = schema.ragged[number]
            values[number] = torch.empty((total, *it.shape), dtype=torch_dtype(it), device="cpu")
        lost = store.core.gather_items(
            schema.ragged_groups.index(group),
            rows.data_ptr(),
            len(rows),
            tickets.data_ptr(),
            spans.data_ptr(),
            tuple([values[number].data_ptr() if number in values else 0 for number in group.members]),
            starts.data_ptr(),
        )
        gone.update(lost)
        for number, items in values.items():
            columns[at[number]] = cast("Tensor", Items(items, starts, lengths, rows))
    return sorted(gone)
