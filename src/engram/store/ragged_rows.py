"""Rows of ragged fields: the items of each row, wherever they lie among those of all rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engram.format.schema import RaggedGroup


class Items:
    """The rows of one ragged field: row ``i`` is ``values[starts[i] : starts[i] + lengths[i]]``.

    Rows may lie in any order, and between them there may be items of no row, so that rows are chosen and replaced without
    moving items. It takes the place of a column ``[n, *shape]`` where rows are written and read.

    Args:
        values: ``[total, *shape]``, contiguous, on the CPU; None: all items are zeros, of a field that was left out.
        starts: int64 ``[n]``.
        lengths: int32 ``[n]``.
        numbers: int64 ``[n]``: the rows of the store that they were read from, for messages.
        offsets: int64 ``[n + 1]``, if the rows are known to lie one after the other: where they begin, and the end of the last one.
        ends: the same as int32, and ``longest``, the items of the longest row; None: not known yet.
    """

    __slots__ = ("ends", "lengths", "longest", "numbers", "offsets", "starts", "values")

    def __init__(
        self,
        values: Tensor | None,
        starts: Tensor,
        lengths: Tensor,
        numbers: Tensor | None = None,
        offsets: Tensor | None = None,
        ends: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        self.values, self.starts, self.lengths, self.numbers, self.offsets = values, starts, lengths, numbers, offsets
        self.ends, self.longest = ends, longest

    @classmethod
    def of_lengths(cls, values: Tensor | None, lengths: Tensor, numbers: Tensor | None = None) -> Items:
        """Rows that lie one after the other from the first item on. ``lengths``: int32 ``[n]``."""
        offsets = offsets_of(lengths)
        return cls(values, offsets[:-1], lengths, numbers, offsets)

    @classmethod
    def of_row(cls, values: Tensor) -> Items:
        """One row."""
        n = values.shape[0]
        starts, lengths, offsets = _alone(n)
        return cls(values, starts, lengths, None, offsets, None, n)

    @classmethod
    def joined(cls, several: Sequence[Items]) -> Items:
        """The rows of several fields of one dtype, in order. Those of fields that were left out are joined with their like."""
        lengths = torch.cat([it.lengths for it in several])
        given = [it.values for it in several if it.values is not None]
        if not given:
            return cls.of_lengths(None, lengths)
        firsts = [0]
        parts = []
        for it in several:
            part = it.values if it.values is not None else given[0].new_zeros((it.total, *given[0].shape[1:]))
            parts.append(part)
            firsts.append(firsts[-1] + len(part))
        starts = torch.cat([it.starts + first for it, first in zip(several, firsts, strict=False)])
        return cls(torch.cat(parts), starts, lengths)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def given(self) -> Tensor:
        """The values of rows that were read, or were not left out."""
        assert self.values is not None  # as the caller knows
        return self.values

    @property
    def total(self) -> int:
        """Items of all rows."""
        return int(self.lengths.sum()) if self.offsets is None or self.values is None else self.values.shape[0]

    @property
    def in_order(self) -> bool:
        """Whether the rows lie one after the other from the first item on, and there are no others."""
        if self.offsets is not None:
            return True
        there = self.total if self.values is None else len(self.values)
        return there == self.total and torch.equal(self.starts, offsets_of(self.lengths)[:-1])

    def packed(self) -> Items:
        """The same rows, one after the other. No copy where they are.

        Cost: else one copy of the items.
        """
        if self.offsets is not None:
            return self
        packed = Items.of_lengths(self.values, self.lengths, self.numbers)
        if self.values is not None and not self.in_order:
            packed.values = self.values.index_select(0, places_of(self.starts, packed.starts, self.lengths))
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return 0 if self.values is None else self.total * self.values[:1].nbytes if len(self.values) else 0

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
        first = len(self.given)
        self.values = torch.cat([self.given, fresh.given])
        self.starts, self.lengths = self.starts.clone(), self.lengths.clone()  # fields that share lengths share these
        self.offsets = self.ends = self.longest = None
        self.starts[places] = fresh.starts + first
        self.lengths[places] = fresh.lengths
        if self.numbers is not None and fresh.numbers is not None:
            self.numbers = self.numbers.index_copy(0, places, fresh.numbers)

    def rows(self) -> list[Tensor]:
        """A tensor ``[length, *shape]`` of each row: views where the items are in order, copies of them else."""
        there = self.packed()
        return list(there.given.split(there.lengths.tolist()))  # type: ignore[no-untyped-call]


def items_in(column: object) -> Items | None:
    """The items of a column that is one of a ragged field; None: of another one."""
    return column if isinstance(column, Items) else None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several columns of one field, in order; of a ragged one, too."""
    if len(parts) == 1:
        return parts[0]
    items = [it for part in parts if (it := items_in(part)) is not None]
    return cast("Tensor", Items.joined(items)) if items else torch.cat(list(parts))


@functools.lru_cache(1 << 12)
def _alone(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Start and length of the only row, and its offsets. They are never changed."""
    with torch.inference_mode(mode=False):
        offsets = torch.tensor([0, length], dtype=torch.int64, device="cpu")
        return offsets[:1], torch.tensor([length], dtype=torch.int32, device="cpu"), offsets


def offsets_of(lengths: Tensor) -> Tensor:
    """Where rows of these lengths begin that lie one after the other, and the end of the last one, int64 ``[n + 1]``."""
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
        starts = given[0].starts if given else members[0].starts
        return [it if it.starts is starts else Items(it.values, starts, it.lengths) for it in members]
    return [it.packed() for it in members]


def check_room(
    groups: Sequence[RaggedGroup], columns: Sequence[Tensor | Items], lane: int | Tensor, length: int
) -> None:
    """Raise ``ValueError`` where the last rows of a call need the room of others. ``lane``: of all or each; ``length``: its rows."""
    for leader, most, *_ in groups:
        items = cast("Items", columns[leader])
        if items.total <= most:
            continue
        for one in [lane] if isinstance(lane, int) else set(lane.tolist()):
            lengths = items.lengths if isinstance(lane, int) else items.lengths[lane == one]
            needed = int(lengths[-length:].sum())
            if needed > most:
                raise ValueError(
                    f"extend: expected at most {most:,} ragged items in one call, the room of a lane, got {needed:,}: the last rows would "
                    "overwrite the first. Write fewer rows at once, or make the storage with more ragged_bytes."
                )


class Addresses(NamedTuple):
    """Rows as calls of the core take them."""

    #: Of each field; 0 of one whose rows have any number of items.
    columns: tuple[int, ...]
    #: Of each group of those.
    items: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()
    #: What must stay until the call is over, beside the columns.
    kept: object = None


def addresses_of(groups: Sequence[RaggedGroup], columns: Sequence[Tensor | Items]) -> Addresses:
    """Columns of rows for a call of the core. ``groups``: those of the store's ragged fields."""
    shared = [sharing([cast("Items", columns[number]) for number in it.members]) for it in groups]
    of_columns = tuple([0 if isinstance(column, Items) else column.data_ptr() for column in columns])
    return Addresses(of_columns, tuple(map(source_of, shared)), shared)


def source_of(members: Sequence[Items]) -> tuple[int, int, int, tuple[int, ...]]:
    """Rows of a group as the core takes them. They share starts and lengths, and must stay until the call is over."""
    first, total = members[0], min(len(it.values) for it in members if it.values is not None)
    values = tuple([0 if it.values is None else it.values.data_ptr() for it in members])
    return first.lengths.data_ptr(), first.starts.data_ptr(), total, values
