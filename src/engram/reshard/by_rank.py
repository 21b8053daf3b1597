"""Rows by themselves, of which a writer keeps the best: where they go when others load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engram.reshard.plan import ReshardPlan, drop_rows, numbered, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engram.reshard.plan import Source, Target


def plan_by_rank(
    sources: Sequence[Source], values: Sequence[NDArray[np.float64]], targets: Sequence[Target]
) -> ReshardPlan:
    """Deal rows out round robin, the best first, until there is no room; each rank's lie in the order of their ages.

    Of equal ones that of the lower shard comes first, then the one that lies first in its table.

    Args:
        sources: the shards, in the order of their ranks; each row is a run of its own.
        values: of their rows.
        targets: the ranks that load, of one lane each.

    Cost: O(n log n).
    """
    shard, number = numbered(sources)
    time = np.concatenate([np.empty(0, np.int64), *(source.clock - source.runs[:, 3] for source in sources)])
    best_first = np.lexsort((number, shard, -np.concatenate([np.empty(0), *values])))
    rank = _round_robin([target.capacity for target in targets], len(shard))
    kept = best_first[: len(rank)]
    by_age = np.lexsort((number[kept], shard[kept], -time[kept], rank))
    kept, rank = kept[by_age], rank[by_age]
    position = within(np.bincount(rank, minlength=len(targets)))
    none = np.zeros(len(rank), bool)
    return ReshardPlan(
        rank,
        np.zeros_like(rank),
        position,
        shard[kept],
        number[kept],
        np.zeros_like(rank),
        np.ones_like(rank),
        none,
        none,
        len(targets),
        drop_rows("overflow", shard[best_first[len(rank) :]], len(sources)),
    )


def _round_robin(room: Sequence[int], n: int) -> NDArray[np.int64]:
    """The rank of each of ``n`` rows, or of as many as there is room for."""
    places = [min(size, n) for size in room]
    turn = np.concatenate([np.empty(0, np.int64), *(np.arange(size) for size in places)])
    rank = np.repeat(np.arange(len(places)), places)
    return rank[np.lexsort((rank, turn))][:n]
