"""A sum tree on an accelerator, in torch operations that never wait for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Children of a node.
FANOUT = 128


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
        # Numbers in Python would be made tensors by a kernel each time.
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._infinite = torch.full_like(self._zero, torch.inf)

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
        self.leaves.index_put_((rows,), leaves)
        self.sum_up()

    def sum_up(self) -> None:
        """Sum up again what lies above the leaves."""
        lows = torch.where(self.leaves > 0, self.leaves, self._infinite)
        for level, low in enumerate(self.lows):
            nodes = len(self.sums[level]) // FANOUT
            torch.sum(self.sums[level].view(-1, FANOUT), 1, out=self.sums[level + 1][:nodes])
            torch.amin(lows.view(-1, FANOUT), 1, out=low[:nodes])
            lows = low

    # ---- draws -------------------------------------------------------------------------------------------------------

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in proportion to their leaves, int64 ``[n]``, and these leaves.

        Args:
            u: float64 ``[n]`` in [0, 1), on the device.

        No row of leaf zero is drawn, unless all are zero.
        """
        # What is rounded must neither decrease nor end at a leaf without mass.
        ends = torch.where(self.leaves > 0, self.leaves.cumsum(0), self._zero).cummax(0).values
        rows = torch.searchsorted(ends, u * ends[-1], right=True).clamp_(max=self.spare)
        return rows, self.leaves[rows]
