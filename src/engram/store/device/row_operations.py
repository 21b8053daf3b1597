"""Reads, appends and updates of rows on an accelerator by operations of torch, which never wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.store.device.followed import Followed
    from engram.store.device.priorities import DevicePriorities
    from engram.store.device.rows import DeviceRows

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

    def append(
        self,
        ledger: DeviceRows,
        columns: Sequence[Tensor],
        n: int,
        *,
        base: int = 0,
        position: int = 0,
        number: int = 0,
        moves: bool = True,
    ) -> tuple[Tensor, Tensor] | None:
        """Steps at the end of a ring; of more than it has rows, the last ones. In a graph: their rows and numbers, int64 ``[n]``.

        Args:
            columns: of all fields, on the device.
            n: steps.
            base: the first row of the ring.
            position, number: of the first step. Graphs take those of the cursor.
            moves: whether the cursor moves on.
        """
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
