"""What is read in place of rows that moved between their draw and their read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from engram.errors import EMPTY, NoSampleable, RowError
from engram.retries import Retries
from engram.samplers.uniform import RandomSampler
from engram.types import Draw

if TYPE_CHECKING:
    from torch import Tensor

    from engram.samplers._base import DeclaredSampler
    from engram.types import Info, SampledStorage


class DrawOverBatch(Draw):
    """A draw by priority whose weights are over the largest of the batch: a row that is drawn in place of another changes them all."""

    #: Logarithms of the weights, each with the same number added, float64 ``[B]``.
    logs: Tensor

    @classmethod
    def of(cls, rows: Tensor, tickets: Tensor, writes: Tensor, logs: Tensor, dtype: torch.dtype) -> DrawOverBatch:
        """A draw with weights of that dtype."""
        made = cls(rows, tickets, {"priority_weight": _over_largest(logs).to(dtype), "index_generation": writes})
        made.logs = logs
        return made


def _over_largest(logs: Tensor) -> Tensor:
    """Weights, of which the largest is 1."""
    return (logs - logs.max()).exp() if len(logs) else logs


class Redraw:
    """The rows of one draw, of which some are drawn or read again.

    Args:
        storage: holds the rows.
        draw: whose rows moved.
        source: draws others in their place. None: the same rows are read again, with what they hold now, and live ones in place
            of those that hold nothing any more.
        key: of the draw. None: rows were named, not drawn, so that those that hold nothing any more are refused.
        call, detail: for messages.
    """

    def __init__(
        self,
        storage: SampledStorage,
        draw: Draw,
        source: DeclaredSampler | None,
        key: int | None,
        call: str = "sample",
        detail: str = "",
    ) -> None:
        self.rows = draw.rows.clone()
        self._tickets = None if draw.tickets is None else draw.tickets.clone()
        self.info: Info = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in draw.info.items()
        }
        self._logs = draw.logs.clone() if isinstance(draw, DrawOverBatch) else None
        self.retries = Retries()
        self._storage, self._source, self._key = storage, source, key
        self._call, self._detail = call, detail

    def repeat(self, moved: list[int], tensors: list[Tensor]) -> None:
        """Put other rows of the draw, by turns, at the places of those that moved. ``tensors``: what was read, changed as well."""
        there = torch.ones(len(self.rows), dtype=torch.bool, device="cpu")
        there[moved] = False
        good = there.nonzero().flatten()
        source = good[torch.arange(len(moved), device="cpu") % len(good)]
        for tensor in (self.rows, *tensors, *self.info.values()):
            if isinstance(tensor, torch.Tensor) and tensor.shape[:1] == self.rows.shape:
                tensor[moved] = tensor[source]

    def again(self, moved: list[int], *, waiting: bool = False) -> tuple[Tensor, Draw]:
        """The places of rows that moved, and of those that are drawn together with them; and what to read there.

        ``waiting``: no row moves, so there is nothing to wait for.

        Raises:
            RowError: a row that was named holds nothing any more.
            NoSampleable: the buffer was emptied.
            WriterStalled: rows moved at every try.
        """
        storage, retries, call = self._storage, self.retries, self._call
        extent = storage.extent()
        if extent.size == 0:
            raise NoSampleable(EMPTY if call == "sample" else f"{call}: the buffer was emptied meanwhile.")
        if waiting:
            retries.count += 1
        else:
            retries.again(self.rows, moved, self._detail, call)
        key = None if self._key is None else retries.key_of(self._key)
        if self._source is not None and key is not None:
            again, fresh = self._source.draw_again(extent, Draw(self.rows, self._tickets), moved, key)
            places = torch.tensor(again, device="cpu")
            self.rows[places] = fresh.rows
            if self._tickets is not None and fresh.tickets is not None:
                self._tickets[places] = fresh.tickets
            for name, value in fresh.info.items():
                known = self.info.get(name)
                if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
                    known[places.to(known.device)] = value
            if self._logs is not None and isinstance(fresh, DrawOverBatch):
                self._logs[places] = fresh.logs
                cast("Tensor", self.info["priority_weight"]).copy_(_over_largest(self._logs))
            return places, fresh
        places = torch.tensor(moved, device="cpu")
        gone = places[storage.hold_nothing(self.rows[places])]
        if len(gone):  # their writer died meanwhile
            if key is None:
                raise RowError(
                    f"{call}: row {int(self.rows[gone[0]])} is not live any more: its writer died, or the buffer was emptied."
                )
            self.rows[gone] = RandomSampler().draw(extent, len(gone), key).rows
        return places, Draw(self.rows[places])
