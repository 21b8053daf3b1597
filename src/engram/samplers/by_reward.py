"""Which rows of a group are drawn by what they are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def chosen_rows(rewards: Tensor, sizes: Tensor, each: int, *, spread: bool, key: int) -> tuple[Tensor, bool]:
    """Places of ``each`` rows of every group, group by group, and whether some come again.

    Of a group with fewer rows all come, and then some again, at random.

    Args:
        rewards: float64 ``[n]``, finite: of the rows of all groups, one group after another, of each the oldest row first.
        sizes: int64 ``[groups]``, at least 1: rows of each.
        each: rows that are wanted of each.
        spread: those with the largest variance, and of equal ones the largest sum, in ascending order. Else the highest, the highest
            first, and of equal ones the newest.
        key: of the draw.

    Cost: O(n log n + groups * each).
    """
    group = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
    order = rewards.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, then by reward, then by age
    starts = (sizes.cumsum(0) - sizes)[:, None]
    once = sizes.clamp(max=each)[:, None]
    places = torch.arange(each, device="cpu").expand(len(sizes), each)
    if spread:
        lows = _lows(rewards[order], starts, sizes[:, None], once, each)
        ranks = torch.where(places < lows, places, sizes[:, None] - once + places)
    else:
        ranks = sizes[:, None] - 1 - places
    repeated = bool((once < each).any())
    if repeated:
        generator = torch.Generator().manual_seed(key % (1 << 63))
        again = (torch.rand(places.shape, generator=generator, dtype=torch.float64) * sizes[:, None]).long()
        ranks = torch.where(places < once, ranks, torch.minimum(again, sizes[:, None] - 1))
    return order[(starts + ranks).reshape(-1)], repeated


def _lows(ascending: Tensor, starts: Tensor, sizes: Tensor, once: Tensor, each: int) -> Tensor:
    """int64 ``[groups, 1]``: how many of the lowest rewards are among those with the largest variance; the others are the highest.

    Such rows are always some of the lowest and some of the highest: the variance is convex in each reward.
    """
    ends = starts + sizes
    means = (
        ascending[starts] + ascending[ends - 1]
    ) / 2  # variances do not depend on it, and are exact where rewards are close
    group = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes[:, 0])
    centred = ascending - means[group, 0]
    zero = torch.zeros(1, dtype=torch.float64, device="cpu")
    sums, squares = torch.cat([zero, centred.cumsum(0)]), torch.cat([zero, centred.square().cumsum(0)])
    low = torch.arange(each + 1, device="cpu")[None].minimum(once)
    high = once - low

    def over(prefix: Tensor) -> Tensor:
        return prefix[starts + low] - prefix[starts] + prefix[ends] - prefix[ends - high]

    totals = over(sums)
    variances = over(squares) / once - (totals / once).square()
    largest = variances.max(-1, keepdim=True).values
    close = torch.isclose(variances, largest, rtol=1e-12, atol=1e-12)
    return low.gather(1, torch.where(close, totals, -torch.inf).argmax(-1, keepdim=True))
