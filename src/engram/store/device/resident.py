"""Rows of a store that stay on a device, beside the ticket words under which they were read there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from engram._support.words import no_space
from engram.format.sizes import resident_sizes
from engram.store.blocks import ALIGNMENT
from engram.store.device.columns import Column, Columns
from engram.store.memory import torch_dtype

if TYPE_CHECKING:
    from engram.store.device.accelerator import Accelerator
    from engram.store.store import Store


class NoRoom(RuntimeError):
    """The rows of a store do not fit on a device."""


class ResidentRows:
    """Memory on a device for all rows of a store, empty at first: ticket words, numbers of writes, lanes, and the fields.

    A chain fills it with what it reads (``Chain(resident=…)``), or the host does, and a chain reads :attr:`columns` as a store.

    Args:
        store: rows on the CPU. accelerator: whose memory it is.

    Raises:
        NoRoom: too little is free, with the figures. Nothing is allocated.
    """

    def __init__(self, store: Store, accelerator: Accelerator) -> None:
        capacity, fields = store.capacity, store.schema.fields
        sizes = resident_sizes(capacity, store.lanes, [field.row_bytes for field in fields])
        begins, nbytes = [], 0
        for size in sizes:
            begins.append(nbytes)
            nbytes += -(-size // ALIGNMENT) * ALIGNMENT
        free, _ = accelerator.room()
        if nbytes > free:
            raise NoRoom(
                f"all rows stay on {accelerator.device}: {no_space(nbytes, free, 'Use fewer rows or a smaller dtype')}"
            )
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=accelerator.device)
        first = -memory.data_ptr() % ALIGNMENT
        parts = [memory[first + at : first + at + size] for at, size in zip(begins, sizes, strict=True)]
        self._of, self.nbytes = (store, store.schema), nbytes
        self.words, self.writes, self.lanes = (part.view(torch.int64) for part in parts[:3])
        self.fields = [part.view(capacity, math.prod(part.shape) // capacity) for part in parts[3:]]
        """uint8 ``[capacity, row bytes]`` each."""
        self.words.zero_()
        self.lanes.zero_()
        self.columns = Columns(
            self.words.data_ptr(),
            self.writes.data_ptr(),
            self.lanes.data_ptr(),
            capacity,
            store.lanes,
            store.lane_length,
            tuple(
                Column(
                    memory.data_ptr() + first + at, field.row_bytes, field.row_bytes, torch_dtype(field), field.shape
                )
                for at, field in zip(begins[3:], fields, strict=True)
            ),
        )

    def fits(self, store: Store) -> bool:
        """Whether it is for the rows of that store, with the fields that it has now."""
        return self._of[0] is store and self._of[1] is store.schema
