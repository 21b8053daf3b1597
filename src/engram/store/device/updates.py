"""Updates of priorities on their way from a device to the host: a ring that kernels fill and the host drains."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from engram._support import fork, native
from engram.store.device.chain import Launcher, call, kernels_of

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.indexes import Index, Indexes

#: Words before the slots, and before the entries of a slot; which of the first ones the host writes.
_HEADER, _SLOT_HEADER, _CONSUMED = 8, 4, 1
_ENTRIES_AT_ONCE = 1024
#: Of the counters on the device: batches sent.
_SENT = 5


class Drained(NamedTuple):
    """What the host has taken from a ring."""

    batches: int = 0
    """Since the ring was made."""
    entries: int = 0
    """Handed to the priorities that are attached, which drop those whose row was written since."""
    refused: int = 0
    """Entries with a priority that none can be: negative, not finite or too large; or of a row that does not exist."""


class UpdateRing:
    """Priorities that a learner computes on a device, on their way to a store on the host.

    :meth:`send` launches two kernels and waits for nothing: it may be captured in a CUDA graph, and each replay takes the next slot. When
    all slots are full, the entries are dropped and counted. Once priorities are attached, the first :meth:`send` starts a native thread
    that applies what arrives, under its tickets and without Python's lock. Draws show an update some batches later. An update that is
    under way is lost when the process dies. In a forked child nothing is applied.

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
        self._attached: tuple[Index, Indexes] | None = None
        self._drain: native.UpdateDrain | None = None
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
            ValueError: another dtype or shape; or the priorities that are attached have another number of rows.
            RuntimeError: their store was closed before the first call.
            WriterStalled, CorruptStore: of the priorities, since the last call. Nothing is applied before they are attached again.
        """
        self._run()
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

    def attach(self, priorities: Index, indexes: Indexes) -> None:
        """Let updates reach an index of priorities, from the next :meth:`send` or :meth:`flush` on, in place of what was attached.

        Args:
            priorities: of as many rows as the ring. indexes: those of their store; :meth:`Indexes.close` ends the updates.

        Raises as :meth:`close`.
        """
        self.close()
        self._attached = (priorities, indexes)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all batches are applied that were sent on the current stream, for which the device is waited for.

        Args:
            timeout_s: default :func:`engram._support.native.wait_limit`.

        Returns:
            False: they were not applied in that time, or no priorities are attached.

        Raises as :meth:`send`.
        """
        drain = self._run()
        sent = int(self.counters[_SENT])
        return drain is not None and drain.flush(sent, native.wait_limit() if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Apply what has arrived, and detach the priorities. Repeatable. Call it before the ring's memory is given back.

        Raises as :meth:`send`.
        """
        drain, self._drain, self._attached = self._drain, None, None
        if drain is not None:
            self._stop()
            drain.check()

    @property
    def stats(self) -> Drained:
        """What was taken so far. What the device counts is in :attr:`counters`."""
        batches, *others = (int(self._memory[_CONSUMED]),) if self._drain is None else self._drain.counts
        return Drained(batches - (not self._kernels.INTERPRETED), *others)  # without the one that the constructor sent

    def _run(self) -> native.UpdateDrain | None:
        """The thread that applies updates, started if there is none yet. None: no priorities are attached. Raises what ended it."""
        if self._drain is None and self._attached is not None:
            priorities, indexes = self._attached
            if priorities.core.rows != self.capacity:
                raise ValueError(
                    f"update_priority: expected priorities of {self.capacity} rows, as many as the ring is for, got those of "
                    f"{priorities.core.rows}. Attach those of the store that is drawn from."
                )
            ring = (self._memory.data_ptr(), self._memory.nbytes, self.slots, self.entries)
            drain = native.UpdateDrain(*ring, self.dtype is torch.float32, priorities.core, self._memory)
            self._drain, self._stop = fork.registered(drain, uses_others=True), weakref.finalize(self, drain.stop)
            indexes.drains.add(drain)
        if self._drain is not None:
            self._drain.check()
        return self._drain
