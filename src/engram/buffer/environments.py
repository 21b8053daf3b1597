"""Which environment has which lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram import _words
from engram.errors import RowError

if TYPE_CHECKING:
    from torch import Tensor

    from engram.buffer.wiring import Wiring

#: Where collectors say which environment a step is of.
ENV_ID = ("collector", "env_id")


class Environments:
    """The lanes of the environments that collectors number, as the rows say it: a lane is that of its newest row's environment.

    A handle remembers what it has seen, and looks at the rows again when it meets an environment that it does not know.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._lane_of: dict[int, int] = {}
        #: Whether environment ``k`` has lane ``k``, as far as known; None: the rows were not looked at.
        self._by_number: bool | None = None

    def lanes_of(self, ids: Tensor, call: str) -> Tensor:
        """The lane of each row, int64 ``[N]``, by the number of its environment, int64 ``[N]``.

        An environment keeps its lane. New ones have that of their number, if it is free, or else, in order, the lanes that are free,
        if they are as many.

        Raises ``RowError``: neither is so. Messages begin with ``call``.
        """
        if self._by_number is None:
            self._look()
        if self._by_number and bool(((ids >= 0) & (ids < self._wiring.storage.lanes)).all()):
            return ids
        numbers = ids.tolist()
        if not self._lane_of.keys() >= {*numbers}:
            self._look()
            self._give_lanes([number for number in dict.fromkeys(numbers) if number not in self._lane_of], call)
        return torch.tensor([self._lane_of[number] for number in numbers], device="cpu")

    def _give_lanes(self, new: list[int], call: str) -> None:
        lanes = self._wiring.storage.lanes
        free = sorted({*range(lanes)} - {*self._lane_of.values()})
        if len(new) == len(free):
            of = dict(zip(new if {*new} != {*free} else free, free, strict=True))
        elif {*new} <= {*free}:
            of = dict(zip(new, new, strict=True))
        else:
            other = next(number for number in new if number not in free)
            having = (
                f", of which the environments {sorted(self._lane_of)} have {len(self._lane_of)}"
                if self._lane_of
                else ""
            )
            raise RowError(
                f"{call}: lane: expected lanes in [0, {lanes}){having}, got {other}, and {_words.count(len(new), 'new environment')} for "
                f"{_words.count(len(free), 'free lane')}. Name them with lane=…"
            )
        self._lane_of.update(of)
        self._by_number = all(number == lane for number, lane in self._lane_of.items())

    def _look(self) -> None:
        """Take over what the newest rows say. Where rows do not hold their environment, or are elsewhere, what this handle remembers
        stays.
        """
        storage, store = self._wiring.storage, self._wiring.storage.memory
        self._by_number = self._by_number or not self._lane_of
        if (
            store is None
            or storage.traits.is_remote
            or ENV_ID not in (keys := [field.key for field in store.schema.fields])
        ):
            return
        extent = storage.extent()
        held = [lane for lane, filled in enumerate(extent.filled) if filled]
        length = extent.capacity // storage.lanes
        newest = [lane * length + (extent.seam[lane] - 1) % length for lane in held]
        (ids,), moved = store.read(torch.tensor(newest, dtype=torch.int64, device="cpu"), which=(keys.index(ENV_ID),))
        if ids.numel() != len(held):
            return
        said = {
            int(number): lane
            for i, (number, lane) in enumerate(zip(ids.flatten(), held, strict=True))
            if i not in moved
        }
        # Lanes that say the same tell no environments apart.
        self._lane_of = said if len(said) == len(held) - len(moved) else {}
        self._by_number = all(number == lane for number, lane in self._lane_of.items())
