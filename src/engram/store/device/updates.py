"""Updates of priorities on their way from a device to the host: a ring that kernels fill and the host drains."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from engram.store.device.chain import call, kernels_of

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.device.chain import Launcher

#: Words before the slots, and before the entries of a slot; which of the first ones the host writes.
_HEADER, _SLOT_HEADER, _CONSUMED = 8, 4, 1
_ENTRIES_AT_ONCE = 1024


class Priorities(Protocol):
    """What :meth:`UpdateRing.drain` needs of an index of priorities."""

    @property
    def config(self) -> tuple[float, float, float, bool]: ...
    def update(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None: ...


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
        self.counters = torch.zeros(8, dtype=torch.int64, device=self.device)
        """On the device: at 5 the batches sent, at 7 the entries that were dropped because the ring was full."""
        self.drained = 0
        """Batches that the host has taken."""
        if not self._kernels.INTERPRETED:
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
        where = (n, self._address, self.entries)
        self._launcher(
            self._kernels.update[(1,)], *where, rows, tickets, priorities, self.counters, SLOTS=self.slots, BLOCK=_ENTRIES_AT_ONCE
        )
        self._launcher(self._kernels.publish[(1,)], *where, self.counters, SLOTS=self.slots)

    def drain(self, priorities: Priorities) -> Drained:
        """Apply what has arrived, in order, under its tickets. Entries that no priorities take are counted, and the others applied."""
        entries = refused = 0
        slot_words = _SLOT_HEADER + 3 * self.entries
        while True:
            slot = self._memory[_HEADER + self.drained % self.slots * slot_words :][:slot_words]
            if int(slot[0]) != self.drained + 1:
                return Drained(entries, refused)
            rows, tickets, values = slot[_SLOT_HEADER:].view(3, self.entries)[:, : int(slot[1])]
            values = values.view(torch.float64)
            alpha, _, eps, _ = priorities.config
            usable = (
                (values >= 0)
                & ((values + eps) ** alpha < 1e300 / self.capacity)
                & (rows >= -1)
                & (rows < self.capacity)
            )
            kept = usable.nonzero().flatten()
            refused += len(values) - len(kept)
            entries += len(kept)
            if len(kept):
                priorities.update(rows[kept], values[kept].to(self.dtype), tickets[kept])
            self.drained += 1
            self._memory[_CONSUMED] = self.drained
