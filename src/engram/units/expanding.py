"""Reads batches of units of users' own, which name rows in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.errors import RowError
from engram.retries import Retries
from engram.samplers import check_drawable
from engram.units._base import UnitReader, as_rows

if TYPE_CHECKING:
    from torch import Tensor

    from engram.samplers._base import DeclaredSampler
    from engram.storages import Storage
    from engram.store import Key
    from engram.types import Draw, Info, NativeBatch, Shown
    from engram.units._base import Named, UnitBase


class ExpandedReader(UnitReader):
    """Asks a unit for rows, and reads them as they were when the draw began."""

    def __init__(self, unit: UnitBase, source: DeclaredSampler, named: Named) -> None:
        super().__init__(source, named)
        self._unit = unit

    def sample(
        self, storage: Storage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """As :meth:`UnitReader.sample`.

        Raises:
            TypeError: the unit returned something else than ``(index, info)``. RowError: it named rows that hold nothing.
            WriterStalled: rows were written at every try.
        """
        del shown  # the unit may say anything
        source, retries, bits = self.source, Retries(), key.value
        draw: Draw | None = None
        try:
            while True:
                clock = storage.next_number()
                extent = storage.extent()
                check_drawable(extent.size)
                if draw is None or self.draws_others(draw.tickets):
                    source.bind(storage)
                    draw = source.draw(extent, n, bits)
                rows, info = self._expanded(storage, draw.rows, dict(draw.info))
                tickets = storage.tickets_of(rows)
                columns, moved = storage.read(rows, tickets)
                moved = sorted({*moved, *(tickets >= clock).nonzero().flatten().tolist()})
                if not moved:
                    break
                self._check_live(storage, rows)
                retries.again(rows, moved, ", of a sample unit,")
                bits = retries.key_of(key.value)
        except BaseException:
            if source.traits.consumes and draw is not None:
                source.were_read(draw, failed=True)
            raise
        if source.traits.consumes:
            source.were_read(draw)
        if storage.memory is not None:
            storage.memory.count_sampled(rows)
        info.pop("index_generation", None)  # of what was drawn
        if numbered or source.traits.prioritized:
            info["index_generation"] = storage.writes_of(rows, tickets)
        return columns, rows, info

    def _expanded(self, storage: Storage, drawn: Tensor, info: Info) -> tuple[Tensor, Info]:
        index = self.named.index_of(drawn)
        expanded: object = self._unit.expand(tuple(index.unbind(-1)) if index.ndim > 1 else index, info, storage)
        if not isinstance(expanded, tuple) or len(expanded) != 2 or not isinstance(expanded[1], dict):
            got = [type(it).__name__ for it in expanded] if isinstance(expanded, tuple) else type(expanded).__name__
            raise TypeError(
                f"sample: {type(self._unit).__name__}.expand: expected (index, info), an index and a dict, got {got}."
            )
        rows, capacity = as_rows(self.named.rows_of(expanded[0])), storage.extent().capacity
        outside = rows[(rows < 0) | (rows >= capacity)]
        if len(outside):
            raise RowError(
                f"sample: {type(self._unit).__name__}.expand: expected rows in [0, {capacity}), got {int(outside[0])}."
            )
        return rows, expanded[1]

    def _check_live(self, storage: Storage, rows: Tensor) -> None:
        gone = torch.nonzero(storage.hold_nothing(rows))
        if len(gone):
            raise RowError(
                f"sample: {type(self._unit).__name__}.expand: expected live rows, got row {int(rows[gone[0]])}, which holds nothing."
            )
