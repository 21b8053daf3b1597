"""Reads, appends and updates of rows on an accelerator by operations of torch, which never wait for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from engram._support import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.store.device.priorities import DevicePriorities
    from engram.store.device.rows import DeviceRows
    from engram.store.device.store import DeviceStore


#: Step types: the first step of a trajectory, and the last one.
_FIRST, _LAST = 0, 2


#: How a field ends a trajectory: by another content in the following row; by the last type, or the first one in the following row; by
#: flags other than zero.
EndKind: TypeAlias = Literal["id", "step type", "any flag", "all flags"]


class End(NamedTuple):
    """A field that ends a trajectory."""

    field: int
    by: EndKind


class Followed:
    """Where the next observations of rows are. The newest row of a lane has none yet, unless it ends a trajectory.

    Args:
        store: the steps.
        finals: the observations after the last steps, in the order of ``fields``, and behind them a tag.
        mark: the field in which a last step names its row there, and the tag; -1 in those of other steps.
        fields: the observations.
        ends: what ends a trajectory. Without a mark such a step has no next observation.
    """

    def __init__(
        self, store: DeviceStore, finals: DeviceStore, mark: int, fields: Sequence[int], ends: Sequence[End]
    ) -> None:
        self.store, self.rows, self.finals_store, self.finals = store, store.rows, finals, finals.rows
        self.mark, self.fields, self.ends, self.width = mark, tuple(fields), ends, math.prod(store.schema.columns)
        self.table: Tensor | None = None
        """As the kernels find it; None: they cannot use it."""

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether rows have a next observation, and in which rows it is: int64 ``[n]`` each, of ``finals`` or -1, and of the steps."""
        steps, finals = self.rows, self.finals
        first = rows // steps.lane_length * steps.lane_length
        after = first + (rows - first + self.width) % steps.lane_length
        after.clamp_(max=steps.spare)  # nothing follows that one
        place, tag = steps.whole[self.mark][rows].unbind(-1)
        is_last, inside = place >= 0, place < finals.capacity
        kept = inside & (finals.whole[-1][torch.where(is_last & inside, place, finals.nowhere)] == tag)
        goes_on = steps.numbers[after] > steps.numbers[rows]  # else it is the newest of its lane, and the oldest comes
        for end in self.ends:
            goes_on &= ~self._ends(end, rows, after)
        return (steps.numbers[rows] > 0) & torch.where(is_last, kept, goes_on), torch.where(kept, place, -1), after

    def _ends(self, end: End, rows: Tensor, after: Tensor) -> Tensor:
        """Whether a trajectory ends with each of some rows, as one of the fields says: bool ``[n]``."""
        column = self.rows.whole[end.field]
        column = column.view(len(column), math.prod(column.shape[1:]))
        here = column[rows]
        if end.by == "id":
            return (here != column[after]).any(1)
        if end.by == "step type":
            return (here == _LAST).any(1) | (column[after] == _FIRST).any(1)
        return (here != 0).all(1) if end.by == "all flags" else (here != 0).any(1)

    def read(self, rows: Tensor) -> list[Tensor]:
        """The next observations of rows that have one, ``[n, *shape]`` per field."""
        _, place, after = self.find(rows)
        at, found = torch.where(place < 0, self.finals.nowhere, place), []
        for number, kept in zip(self.fields, self.finals.whole, strict=False):
            following = self.rows.whole[number][after]
            is_last = (place >= 0).view(-1, *[1] * (following.ndim - 1))
            found.append(torch.where(is_last, kept[at].to(following.dtype), following))
        return found

    def sample_rows(self, n: int, key: int, how: Drawing) -> list[Tensor]:
        """As :meth:`DeviceStore.sample_rows`, with next observations."""
        return self.store.sample_rows(n, key, how._replace(followed=self))

    def lost(self) -> int:
        """How many rows name a final observation that was overwritten. Waits for the device."""
        with self.rows, self.finals:
            rows = torch.arange(self.rows.capacity, device=self.rows.device)
            held = (self.rows.numbers[:-1] > 0) & (self.rows.whole[self.mark][:-1, 0] >= 0)
            return int((held & (self.find(rows)[1] < 0)).sum())


#: How often a place is drawn that needs a row which holds something, or has a next observation: as in row_kernels.py.
TRIES = 16


class Drawing(NamedTuple):
    """How rows are drawn, and what is read with them."""

    tree: DevicePriorities | None = None
    """The priorities to draw by; None: uniformly."""
    weighed: bool = True
    """Whether float32 weights over the largest in the store are said, or else float64 leaves."""
    followed: Followed | None = None
    """Where next observations are. Of a row that has none another takes the place."""


class Ring(NamedTuple):
    """Where steps are appended."""

    base: int = 0
    """The first row of the ring."""
    position: int = 0
    """Of the first step, as its number. Graphs take those of the cursor."""
    number: int = 0
    moves: bool = True
    """Whether the cursor moves on."""


class RowOperations:
    """What a store on a device does with its rows in every step. In a graph draws use torch's random numbers.

    The ``ledger`` of each call is the rows: columns, numbers and cursor. Nothing here keeps them.
    """

    def read(self, ledger: DeviceRows, n: int, key: int, size: int, how: Drawing) -> list[Tensor]:
        """A batch: one tensor per field, next observations, rows, numbers of their writes, and of a draw by priority weights or leaves.

        Args:
            n: rows.
            key: 64 random bits, ``0 <= key < 2 ** 64``. A graph draws other rows at each replay.
            size: how many rows hold data, all below it; at the replay of a graph the ring says it. -1: those that do lie apart.
            how: by priority, or uniformly.
        """
        tree, weighed, followed = how
        redrawn = followed is not None or (tree is None and ledger.capturing)
        rows, leaves = self._drawn(ledger, n * TRIES if redrawn else n, key, size, tree)
        if redrawn or leaves is not None:
            good = ledger.numbers[rows] > 0 if followed is None else followed.find(rows)[0]
            good = good if leaves is None else good & (leaves > 0)
            ledger.tally[3].add_(~good.any())
            rows, at = torch.where(good, rows, 0), _first(good.view(-1, n)) if redrawn else slice(n)
            rows, leaves = rows[at], leaves if leaves is None else leaves[at]
        beside = [] if tree is None or leaves is None else [tree.weigh(leaves).float() if weighed else leaves]
        following = [] if followed is None else followed.read(rows)
        return [*ledger.take(rows, range(len(ledger.whole))), *following, rows, ledger.numbers[rows], *beside]

    def _drawn(
        self, ledger: DeviceRows, n: int, key: int, size: int, tree: DevicePriorities | None
    ) -> tuple[Tensor, Tensor | None]:
        """``n`` rows as :meth:`read` has them, not all of which hold something; and their leaves."""
        if tree is None and size >= 0 and not ledger.capturing:
            return self._numbers(ledger, key, size, n), None
        share = self._numbers(ledger, key, 1 << 53, n) * 2.0**-53
        if tree is not None:
            return tree.tree.draw(share)
        if size >= 0:
            return (share * ledger.size()).long(), None
        held = (ledger.numbers > 0).cumsum(0)
        return torch.searchsorted(held, (share * held[-1]).long(), right=True).clamp_(max=ledger.spare), None

    def _numbers(self, ledger: DeviceRows, key: int, end: int, n: int) -> Tensor:
        """int64 ``[n]`` below ``end``, on the device."""
        if ledger.capturing:
            return torch.randint(end, (n,), device=ledger.device)
        numbers = native.empty_rows(n)
        native.uniform(key, end, numbers)
        return ledger.sent(numbers, "sample")

    def append(self, ledger: DeviceRows, columns: Sequence[Tensor], n: int, ring: Ring) -> tuple[Tensor, Tensor] | None:
        """Steps at the end of a ring; of more than it has rows, the last ones. In a graph: their rows and numbers, int64 ``[n]``.

        Args:
            columns: of all fields, on the device.
            n: steps.
            ring: where it is.
        """
        base, position, number, moves = ring
        steps = torch.arange(n, device=ledger.device)
        cursor = ledger.cursor.clone() if ledger.capturing else (position, number)
        rows, numbers = base + (cursor[0] + steps) % ledger.lane_length, cursor[1] + steps
        kept = slice(max(n - ledger.lane_length, 0), n)
        ledger.put(rows[kept], range(len(columns)), [column[kept] for column in columns], None)
        ledger.numbers.index_put_((rows[kept],), numbers[kept])
        for tree in ledger.trees:
            tree.written(rows[kept])
        if moves:
            ledger.cursor.add_(n)
        return (rows, numbers) if ledger.capturing else None

    def append_some(self, ledger: DeviceRows, columns: Sequence[Tensor], chosen: Tensor, base: int) -> Tensor:
        """Append those of some steps that a mask chooses: int64 ``[n, 2]``, their rows and tags; -1 of the others.

        Args:
            columns: of all fields but the last one, which holds the tags: ``base`` and the number of the write.
            chosen: bool ``[n]`` on the device. Of more than there are rows, the last ones stay.
        """
        order = chosen.cumsum(0)
        total = order[-1:].clone()
        rows, tags = (ledger.cursor[0] + order - 1) % ledger.capacity, ledger.cursor[1] + (order - 1 + base)
        at = torch.where(chosen & (order > total - ledger.capacity), rows, ledger.nowhere)
        ledger.put(at, range(len(columns)), columns, None)
        ledger.whole[-1].index_put_((at,), torch.where(chosen, tags, -1))
        ledger.numbers.index_put_((at,), torch.where(at < ledger.spare, tags - base, 0))
        ledger.cursor.add_(total)
        return torch.where(chosen.unsqueeze(1), torch.stack((rows, tags), 1), -1)

    def edit(self, ledger: DeviceRows, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
        """Replace fields of rows, int64 ``[n]`` on the device; negative ones count from the end of a full ring, or of what is written.

        Returns:
            The rows, the spare one in place of those that hold nothing, which are counted. Of a row that is named twice the last entry
            stays.
        """
        at = ledger.live(torch.where(rows < 0, rows + ledger.size(), rows))
        if ledger.capturing:
            ledger.count_edits(at)
        ledger.put(at, which, columns, ledger.last_of(at))
        ledger.count_edits(at)
        return at

    def update(
        self, ledger: DeviceRows, tree: DevicePriorities, rows: Tensor, priorities: Tensor, expected: Tensor | None
    ) -> None:
        """As :meth:`DevicePriorities.update_there`, of tensors on the device."""
        priorities = priorities.double()
        leaves = tree.leaf(priorities)
        good = (priorities >= 0) & (leaves < tree.most)
        inside = (rows >= 0) & (rows < ledger.capacity)
        at = torch.where(inside & good, rows, ledger.nowhere)
        held = ledger.numbers[at]
        used = held > 0 if expected is None else (held > 0) & (held == expected)
        ledger.tally[:3].add_(torch.stack((inside & good & ~used, ~good, ~inside & (rows != -1))).sum(1))
        leaves = torch.where(used, torch.where(leaves > 0, leaves, -tree.zero), tree.zero)
        at = torch.where(used, at, ledger.nowhere)
        if len(at):
            highest = torch.where(used, priorities, tree.zero).amax()
            torch.maximum(tree.highest_there, highest, out=tree.highest_there)
        last = ledger.last_of(at)
        tree.tree.put(at, leaves if last is None else leaves[last])


def _first(good: Tensor) -> Tensor:
    """Of bool ``[tries, n]`` for each place the first good one, as an index of all; where there is none, that of another place."""
    n, found = good.shape[1], good.any(0)
    at = good.long().argmax(0) * n + torch.arange(n, device=good.device)
    return torch.where(found, at, at[found.long().argmax(0, keepdim=True)])
