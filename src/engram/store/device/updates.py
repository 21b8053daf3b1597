"""Updates of priorities on their way from a device to the host: a ring that kernels fill and the host drains."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram.store.device.chain import call, kernels_of

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.device.chain import Launcher
    from engram.store.indexes import Index

#: Words before the slots, and before the entries of a slot; which of the first ones the host writes.
_HEADER, _SLOT_HEADER, _CONSUMED = 8, 4, 1
_ENTRIES_AT_ONCE = 1024


class Drained(NamedTuple):
    """What a drain found."""

    entries: int = 0
    """Handed to the priorities, which drop those whose row was written since."""
    refused: int = 0
    """Entries with a priority that none can be: negative, not finite or too large; or of a row that does not exist."""


class UpdateRing:
    """Priorities that a learner computes on a device, on their way to a store on the host.

    :meth:`send` launches two kernels and waits for nothing: it may be captured in a CUDA graph, and each replay takes the next slot. When
    all slots are full, the entries are dropped and counted. The host calls :meth:`drain` from time to time.

    Args:
        capacity: rows of the store.
        entries: of a slot: a batch at most.
        slots: batches that may be under way.
        device: where the priorities are computed.
        memory: int64 ``[UpdateRing.words(entries, slots)]`` on the host, zeroed, which the device may write to; None: new memory, for a
            device that is the CPU.
        address: where the memory begins on the device; None: where it begins on the host.
        dtype: of the priorities: float32 or float64.
        launcher: as for ``Chain``.

    Raises:
        RuntimeError: :func:`engram.store.device.chain.kernels_of`. Whatever Triton raises where it cannot compile.
    """

    def __init__(
        self,
        capacity: int,
        entries: int,
        slots: int,
        device: torch.device | str,
        *,
        memory: Tensor | None = None,
        address: int | None = None,
        dtype: torch.dtype = torch.float32,
        launcher: Launcher = call,
    ) -> None:
        self.device = torch.device(device)
        self.capacity = capacity
        self.entries = entries
        self.slots = slots
        self.dtype = dtype
        self._kernels, self._launcher = kernels_of(self.device), launcher
        self._memory = (
            torch.zeros(self.words(entries, slots), dtype=torch.int64, device="cpu") if memory is None else memory
        )
        self._address = self._memory.data_ptr() if address is None else address
        self._state = torch.zeros(72, dtype=torch.int64, device=self.device)
        self.counters = self._state[64:]
        """On the device: at 5 the batches sent, at 7 the entries that were dropped because the ring was full."""
        self.drained = 0
        """Batches that the host has taken."""
        if not self._kernels.INTERPRETED:  # compiled and loaded now; the ring counts one empty batch
            self.send(*(torch.zeros(0, dtype=kind, device=self.device) for kind in (torch.int64, torch.int64, dtype)))

    @staticmethod
    def words(entries: int, slots: int) -> int:
        """Words of 64 bits that a ring needs."""
        return _HEADER + slots * (_SLOT_HEADER + 3 * entries)

    def send(self, rows: Tensor, tickets: Tensor, priorities: Tensor) -> None:
        """Launch the kernels that put a batch into the ring, on the current stream.

        Args:
            rows: int64 ``[n]`` on the device; -1 is passed over. tickets: int64 ``[n]``, as of a :class:`Batch`.
            priorities: ``[n]``, of the ring's dtype. All are contiguous.

        Raises:
            ValueError: another dtype or shape.
        """
        n = len(rows)
        kinds = [(tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) for tensor in (rows, tickets, priorities)]
        if kinds != [(kind, (n,), True) for kind in (torch.int64, torch.int64, self.dtype)] or n > self.entries:
            raise ValueError(
                f"update_priority: expected contiguous rows and tickets of int64 and priorities of {self.dtype}, at most {self.entries} "
                f"each, got {kinds}."
            )
        where = (self._state, self._address, self.entries, n)
        given = (*where, rows, tickets, priorities)
        self._launcher(self._kernels.update[(1,)], *given, SLOTS=self.slots, BLOCK=_ENTRIES_AT_ONCE)
        self._launcher(self._kernels.publish[(1,)], *where, SLOTS=self.slots)

    def drain(self, priorities: Index) -> Drained:
        """Apply what has arrived, in order, under its tickets. Entries that no priorities take are counted, and the others applied."""
        found, core = Drained(), priorities.core
        while True:
            begin = _HEADER + self.drained % self.slots * (_SLOT_HEADER + 3 * self.entries)
            number, n = self._memory[begin : begin + 2].tolist()
            if number != self.drained + 1:
                return found
            entries = self._memory[begin + _SLOT_HEADER :][: 3 * self.entries].view(3, self.entries)[:, :n]
            rows, values, tickets = entries[0], entries[2].view(torch.float64), entries[1]
            usable = (
                (values >= 0)
                & ((values + core.eps) ** core.alpha < 1e300 / self.capacity)
                & (rows >= -1)
                & (rows < self.capacity)
            )
            kept = usable.nonzero().flatten()
            core.update(rows[kept], values[kept].to(self.dtype), tickets[kept])
            found = Drained(found.entries + len(kept), found.refused + n - len(kept))
            self.drained += 1
            self._memory[_CONSUMED] = self.drained
