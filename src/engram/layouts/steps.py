"""Where steps and observations lie when each observation is stored once.

``T`` slots, ``W`` columns. Steps lie column after column, in each the oldest first. Behind the observations of a trajectory lies its
last next observation, so that they are more than the steps: an *end* is a step that such a one follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Ring(NamedTuple):
    """The slots of a storage, and what of them is live."""

    slots: int
    columns: tuple[int, ...]
    """Sizes of the dimensions after the first."""
    shift: int
    """Slot behind the one that was written last: the oldest one, if all are live. In ``[1, slots]``."""
    full: bool
    """Whether all slots are live; else those before ``shift`` are."""

    @property
    def width(self) -> int:
        """Rows of a slot."""
        return torch.Size(self.columns).numel()

    @property
    def live(self) -> int:
        """Live slots."""
        return self.slots if self.full else self.shift

    def slot_of(self, time: int) -> int:
        """The slot of the step that is that many steps younger than the oldest."""
        return (time + self.shift) % self.slots if self.full else time

    def pieces(self, most: int) -> Iterator[tuple[int, int, int]]:
        """Live steps in pieces of at most ``most``: ``(time, slot, n)``, each of ``n`` slots that lie together."""
        time = 0
        while time < self.live:
            slot = self.slot_of(time)
            n = min(most, self.live - time, self.slots - slot)
            yield time, slot, n
            time += n


class Steps:
    """The places of steps and observations.

    Args:
        ring: the storage.
        done: bool ``[W, T]``, in order of time: which steps end trajectories.
    """

    def __init__(self, ring: Ring, done: Tensor) -> None:
        self.ring = ring
        self.ends = done.clone()
        self.ends[:, ring.live - 1] = True
        self._before = torch.zeros(self.ends.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(self.ends.reshape(-1), 0, out=self._before[1:])

    @property
    def observations(self) -> int:
        """How many observations there are."""
        return len(self._before) - 1 + int(self._before[-1])

    def places(self, column: int, first: int, n: int) -> Tensor:
        """Where the observations of ``n`` steps lie. int64 ``[n]``, ascending; the next observation of each lies behind it."""
        at = column * self.ring.slots + first
        return torch.arange(at, at + n, device="cpu") + self._before[at : at + n]

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """Of each trajectory, and of the slots behind the live ones of each column: steps and observations, int64 ``[n]``."""
        stops = self.ends.clone()
        stops[:, -1] = True
        last = stops.reshape(-1).nonzero().reshape(-1)
        lengths = torch.diff(last, prepend=torch.tensor([-1], device="cpu"))
        return lengths, lengths + self.ends.reshape(-1)[last]
