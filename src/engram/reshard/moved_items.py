"""The items of ragged rows that come to other lanes, or to rings of other sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram.saved.ragged import PartItems, check_longest
from engram.store.ragged_state import Piece, check_room, compacted, oldest_first

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from engram.format.schema import Schema


class MovedRows(NamedTuple):
    """Rows of one shard, and where they go."""

    items: PartItems
    target: Tensor
    """int64 ``[n]``: the row of the target for each of the shard, -1 where it is left out."""


class MovedItems:
    """The ragged rows that one rank gets, one after the other in the ring of their lane.

    Args:
        moved: of all shards with rows for it.
        lanes: int64 ``[L, 2]`` or wider, as the rank's store will have them.
        here: the schema of that store.
    """

    def __init__(self, moved: Sequence[MovedRows], lanes: Tensor, here: Schema) -> None:
        self._moved, self._here = moved, here
        length = here.capacity // here.lanes
        self.lane_of = torch.arange(here.capacity, device="cpu") // length
        lengths = [self._lengths(group) for group in range(len(here.ragged_groups))]
        self.spans, self.heads = compacted(lengths, oldest_first(lanes, length))

    def check(self, where: str) -> None:
        """Raise ``IncompatibleCheckpoint``: the rings of the store are too small. ``where``: for messages."""
        check_longest(self.spans, self._here, where)
        check_room(self.heads, self._here, where)

    def _lengths(self, group: int) -> Tensor:
        lengths = torch.zeros(len(self.lane_of), dtype=torch.int64, device="cpu")
        for one in self._moved:
            there = one.target >= 0
            lengths[one.target[there]] = one.items.spans[group].lengths[there]
        return lengths

    def pieces(self, group: int) -> Iterator[Piece]:
        for one in self._moved:
            there, to = one.target >= 0, one.target.clamp(min=0)
            lanes = torch.where(there, self.lane_of[to], -1)
            yield from one.items.picked(group, lanes, self.spans[group].offsets[to])
