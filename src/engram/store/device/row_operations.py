"""Reads, appends and updates of rows on an accelerator by operations of torch, which never wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram._support import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.store.device.priorities import DevicePriorities
    from engram.store.device.rows import DeviceRows

#: How often a captured draw looks for a row that holds something.
_TRIES = 16


class RowOperations:
    """What a store on a device does with its rows in every step. In a graph draws use torch's random numbers.

    The ``ledger`` of each call is the rows: columns, numbers and cursor. Nothing here keeps them.
    """

    def read(
        self,
        ledger: DeviceRows,
        n: int,
        key: int,
        size: int,
        tree: DevicePriorities | None = None,
        *,
        weighed: bool = True,
    ) -> list[Tensor]:
        """A batch: one tensor per field, rows, numbers of their writes, and of a draw by priority weights or leaves.

        Args:
            n: rows.
            key: 64 random bits, ``0 <= key < 2 ** 64``. A graph draws other rows at each replay.
            size: how many rows hold data, all below it; at the replay of a graph the ring says it.
            tree: the priorities to draw by; None: uniformly.
            weighed: whether float32 weights over the largest in the store are said, or else float64 leaves.
        """
        beside = []
        if tree is not None:
            rows, leaves = tree.tree.draw(self._numbers(ledger, key, 1 << 53, n) * 2.0**-53)
            ledger.tally[3].add_((leaves <= 0).any())
            rows, beside = torch.where(leaves > 0, rows, 0), [tree.weigh(leaves).float() if weighed else leaves]
        else:
            rows = self._live(ledger, n) if ledger.capturing else self._numbers(ledger, key, size, n)
        return [*ledger.take(rows, range(len(ledger.whole))), rows, ledger.numbers[rows], *beside]

    def _numbers(self, ledger: DeviceRows, key: int, end: int, n: int) -> Tensor:
        """int64 ``[n]`` below ``end``, on the device."""
        if ledger.capturing:
            return torch.randint(end, (n,), device=ledger.device)
        numbers = native.empty_rows(n)
        native.uniform(key, end, numbers)
        return ledger.sent(numbers, "sample")

    def _live(self, ledger: DeviceRows, n: int) -> Tensor:
        """Rows of the ring, uniformly, as it is at the replay of a graph; zeros where there are none.

        Of a row that was removed another takes the place: one of 16, else one of the batch.
        """
        tried = (torch.rand((n, _TRIES), dtype=torch.float64, device=ledger.device) * ledger.size()).long()
        held = (ledger.numbers[tried] > 0).long()
        rows, good = tried.gather(1, held.argmax(1, keepdim=True)).squeeze(1), held.amax(1)
        ledger.tally[3].add_(1 - good.amax())
        return torch.where(good > 0, rows, rows[good.argmax(0, keepdim=True)])

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
