"""A sum tree on an accelerator, in torch operations that never wait for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Children of a node.
FANOUT = 128
_SHIFT = 7


class SumTree:
    """float64 leaves, and of every 128 of them the sum and the smallest above zero, level on level up to a single node.

    Behind the leaves there is at least one that belongs to no row
    (:attr:`spare`): entries that change nothing are written there, as zero.

    >>> import torch
    >>> from engram.store.device.tree import SumTree
    >>> tree = SumTree(3, torch.device("cpu"))
    >>> tree.put(torch.tensor([0, 2]), torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> float(tree.total()), float(tree.least())
    (4.0, 1.0)
    >>> tree.draw(torch.tensor([0.1, 0.3], dtype=torch.float64))[0].tolist()
    [0, 2]
    """

    def __init__(self, leaves: int, device: torch.device) -> None:
        self.spare = leaves
        n = leaves + 1
        sizes: list[int] = []
        while n > 1 or not sizes:
            n = math.ceil(n / FANOUT)
            sizes.append(n * FANOUT)
        #: The leaves, and the sums of each level over the one below.
        self.sums = [torch.zeros(size, dtype=torch.float64, device=device) for size in (*sizes, n)]
        #: The smallest above zero; infinite where there is none. The leaves are their own.
        self.lows = [torch.full_like(level, torch.inf) for level in self.sums[1:]]
        self._places = torch.arange(FANOUT, device=device)
        self._from_end = 2 * FANOUT - 1 - self._places
        # Numbers in Python would be made tensors by a kernel each time.
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._infinite = torch.full_like(self._zero, torch.inf)
        self._none = torch.full((), 2 * FANOUT, device=device)

    @property
    def leaves(self) -> Tensor:
        """The leaves, the spare ones included: float64."""
        return self.sums[0]

    def total(self) -> Tensor:
        """The sum of all leaves, on the device."""
        return self.sums[-1][0]

    def least(self) -> Tensor:
        """The smallest leaf above zero, on the device; infinite if there is none."""
        return self.lows[-1][0]

    # ---- changes -----------------------------------------------------------------------------------------------------

    def put(self, rows: Tensor, leaves: Tensor) -> None:
        """Set leaves. Of a row that is named twice all entries must be equal."""
        self.sums[0].index_put_((rows,), leaves)
        for level in range(len(self.lows)):
            rows = rows >> _SHIFT
            sums, lows = self._of_blocks(level, rows)
            self.sums[level + 1].index_put_((rows,), sums)
            self.lows[level].index_put_((rows,), lows)

    def put_span(self, start: int, stop: int, leaf: Tensor) -> None:
        """Set the leaves of some consecutive rows, at least one, to one value."""
        self.sums[0][start:stop].copy_(leaf)
        self.sum_up(start, stop)

    def sum_up(self, start: int = 0, stop: int | None = None) -> None:
        """Sum up again what lies above some consecutive leaves, at least one; by default above all."""
        stop = len(self.sums[0]) if stop is None else stop
        for level in range(len(self.lows)):
            start, stop = start >> _SHIFT, (stop - 1 >> _SHIFT) + 1
            sums, lows = self._of_blocks(level, slice(start, stop))
            self.sums[level + 1][start:stop].copy_(sums)
            self.lows[level][start:stop].copy_(lows)

    def _of_blocks(self, level: int, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Of blocks of a level: their sums, and what is smallest in them."""
        sums = self.sums[level].view(-1, FANOUT)[blocks]
        lows = (
            torch.where(sums > 0, sums, self._infinite) if level == 0 else self.lows[level - 1].view(-1, FANOUT)[blocks]
        )
        return sums.sum(1), lows.amin(1)

    # ---- draws -------------------------------------------------------------------------------------------------------

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in proportion to their leaves, int64 ``[n]``, and these leaves.

        Args:
            u: float64 ``[n]`` in [0, 1), on the device.

        No row of leaf zero is drawn, unless all are zero.
        """
        x, nodes = u * self.total(), torch.zeros_like(u, dtype=torch.int64)
        for level in reversed(range(len(self.lows))):
            block = self.sums[level].view(-1, FANOUT)[nodes]
            ends = block.cumsum(1)
            # The first one whose end lies above x, else the last one with mass.
            found = torch.where(ends > x.unsqueeze(1), self._places, self._from_end)
            place = torch.where(block > 0, found, self._none).amin(1, keepdim=True)
            place = torch.minimum(place, 2 * FANOUT - 1 - place).clamp_(min=0)
            mass = block.gather(1, place).squeeze(1)
            x = x - (ends.gather(1, place).squeeze(1) - mass)
            nodes = (nodes << _SHIFT) + place.squeeze(1)
        return nodes, mass
