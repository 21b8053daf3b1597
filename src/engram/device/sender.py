"""Brings rows over that a device cannot read by itself, those that changed since the last time alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from engram.device.block import Block, Blocks
from engram.format.files import FIXED_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.device.accelerator import Accelerator
    from engram.store.device.resident import ResidentRows
    from engram.store.store import Store

#: How many bytes of rows go in one block.
_AT_ONCE = 64 << 20
_COMMITTED, _NUMBER = 2, (1 << 63) - 1


class Sender:
    """Keeps the rows of a store on a device as they are on the host, with their tickets and lanes.

    Args:
        store: rows on the CPU. resident: their memory on the device. accelerator: the device.
    """

    def __init__(self, store: Store, resident: ResidentRows, accelerator: Accelerator) -> None:
        self._store, self._resident, self.columns = store, resident, resident.columns
        self._accelerator, self._blocks = accelerator, Blocks(accelerator)
        control, tickets = store.control_memory
        self._lanes = control[FIXED_BYTES : FIXED_BYTES + resident.lanes.nbytes].view(torch.int64)
        self._words = tickets[: resident.words.nbytes].view(torch.int64)
        #: The ticket words on the device; 0: of a row that is not whole there.
        self._seen = torch.zeros(store.capacity, dtype=torch.int64, device="cpu")
        self._seen_lanes = torch.zeros_like(self._lanes, device="cpu")
        self._at_once = max(1, _AT_ONCE // max(1, store.schema.row_bytes))

    def send(self) -> None:
        """Queue copies of what changed since the last call, on the stream in use. Not in a capture.

        Cost: O(capacity), one word per row: about a millisecond per million rows.
        """
        lanes = self._lanes.clone()  # before the rows: those are as new at least
        changed = (self._words != self._seen).nonzero().squeeze(1)
        for rows in torch.split(changed, self._at_once) if len(changed) else ():
            words = self._words[rows]
            whole = ((words & 3) == _COMMITTED).nonzero().squeeze(1)
            numbers = (words[whole] & _NUMBER) >> 2
            columns, moved = self._store.read(rows[whole], expected=numbers)
            words[whole[moved]] = 0
            writes = self._store.writes_of(rows[whole], numbers)
            self._replace(*self._sent([rows, words, rows[whole], writes, *columns]))
            self._seen[rows] = words  # now: after an interrupt they are sent again
        if not torch.equal(lanes, self._seen_lanes):
            self._resident.lanes.copy_(self._sent([lanes])[0])
            self._seen_lanes = lanes

    def _sent(self, tensors: list[Tensor]) -> list[Tensor]:
        return cast("list[Tensor]", self._blocks.send(tensors, Block(self._accelerator.memory, 0)).batch)

    def _replace(self, rows: Tensor, words: Tensor, whole: Tensor, writes: Tensor, *columns: Tensor) -> None:
        """Put what came to its rows."""
        resident = self._resident
        resident.words[rows], resident.writes[whole] = words, writes
        for field, column in zip(resident.fields, columns, strict=True):
            if field.numel():
                field[whole] = column.reshape(-1).view(torch.uint8).view(len(whole), field.shape[1])
