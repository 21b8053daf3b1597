"""Priorities of rows on an accelerator, which never wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram import _native
from engram.errors import EMPTY, NoSampleable, PriorityError, RowError
from engram.store.blocks import Masses
from engram.store.device.tree import SumTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.store.device.rows import DeviceRows
    from engram.store.device.store import DeviceStore
    from engram.store.keys import Key


class DevicePriorities:
    """As the priorities of a store on the CPU, in memory of the device: a leaf is ``(priority + eps) ** alpha``.

    Draws use the random numbers that draws on the CPU use, so the rows are the same ones but for rounding; those of a CUDA graph
    use torch's generator of the device. Of an update on the device the entries that are wrong are left out and counted.
    """

    def __init__(self, rows: DeviceRows, alpha: float, beta: float, eps: float, within_buffer: bool) -> None:
        self._rows, self.eps, self.within_buffer = rows, eps, within_buffer
        self.rows = rows.capacity
        self._most = 1e300 / rows.capacity
        self.tree = SumTree(rows.capacity, rows.device)
        #: alpha, beta, and the largest priority of all updates, 0 before the first: on the device, so that graphs see them change.
        self._alpha, self._beta, self._highest = torch.zeros(3, dtype=torch.float64, device=rows.device).unbind()
        self._alpha.fill_(alpha)
        self._beta.fill_(beta)
        self._zero = torch.zeros_like(self._alpha)
        self._powers = (alpha, beta)
        self._closed: object = None
        self.retired = False
        """Whether the priorities of that name are elsewhere now."""

    @property
    def core(self) -> DevicePriorities:
        """This, under the name that an index on the host has it by. Raises ``RuntimeError``: the store was closed."""
        return self if self._closed is None else self._closed  # type: ignore[return-value] # it raises whatever is asked

    @core.setter
    def core(self, refusing: object) -> None:
        self._closed = refusing

    # ---- parameters --------------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of priorities. Setting it raises all leaves to ``new / old``."""
        return self._powers[0]

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        power, leaves = alpha / self.alpha if self.alpha > 0 else 1.0, self.tree.leaves
        with self._rows:
            raised = torch.where(leaves > 0, leaves**power, leaves)
            if bool((raised >= self._most).any()):
                raise ValueError("with that alpha a priority is too large")
            leaves.copy_(raised)
            self.tree.sum_up()
            self._alpha.fill_(alpha)
            self._powers = (alpha, self.beta)

    @property
    def beta(self) -> float:
        """Exponent of the weights. Graphs see it change."""
        return self._powers[1]

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._rows:
            self._beta.fill_(beta)
            self._powers = (self.alpha, beta)

    @property
    def highest(self) -> float:
        """The largest priority of all updates, 0.0 before the first."""
        with self._rows:
            return float(self._highest)

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        with self._rows:
            return float(self.tree.total())

    @property
    def default_priority(self) -> float:
        """What new rows get."""
        with self._rows:
            leaf = float(self._default())
        return leaf ** (1 / self.alpha) - self.eps if self.alpha > 0 else self.highest or 1.0

    @property
    def masses(self) -> Masses:
        """Sum and smallest of the leaves, and live rows, of one moment."""
        total, least = self.total, float(self.tree.least())
        return Masses(total, 0.0 if least == torch.inf else least, int((self._rows.numbers > 0).sum()))

    def _default(self) -> Tensor:
        """The leaf of new rows, on the device."""
        leaf = (torch.where(self._highest > 0, self._highest, 1.0) + self.eps) ** self._alpha
        if not self.within_buffer:
            return leaf
        largest = self.tree.leaves.amax()
        return torch.where(largest > 0, largest, leaf)

    # ---- what the store tells ----------------------------------------------------------------------------------------

    def written(self, rows: Tensor) -> None:
        """Rows on the device, which may be named several times, hold new writes."""
        self.tree.put(rows, self._default())

    def written_span(self, start: int, stop: int) -> None:
        """Consecutive rows, at least one, hold new writes."""
        self.tree.put_span(start, stop, self._default())

    def emptied(self) -> None:
        """The store was emptied."""
        self._highest.zero_()
        self._set_all(torch.zeros_like(self.tree.leaves[: self.rows]))

    def scan(self, begin: int, end: int) -> None:
        """Of all rows, once the last ones are asked for: live ones without a priority get the default one, others none."""
        if end >= self.rows >= begin:
            self._set_all(self.tree.leaves[: self.rows])

    def _set_all(self, leaves: Tensor) -> None:
        """Set the leaves of live rows; those that none was ever given get the default one."""
        with self._rows:
            given, held = (leaves > 0) | leaves.signbit(), self._rows.numbers[:-1] > 0
            self.tree.leaves[: self.rows].copy_(torch.where(held, torch.where(given, leaves, self._default()), 0.0))
            self.tree.sum_up()

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def sample(self, store: DeviceStore, key: Key, n: int, single_precision: bool, over_batch: bool) -> list[Tensor]:
        """Rows by priority, on the device: one tensor per field, then rows, numbers of their writes and weights."""

        def drawn() -> tuple[Tensor, Tensor, Tensor]:
            rows, leaves = self._draw(key.value, n)
            least = torch.where(leaves > 0, leaves, torch.inf).amin() if over_batch else self.tree.least()
            weights = torch.where(leaves > 0, (least / leaves) ** self._beta, self._zero)
            return rows, self._rows.numbers[rows], weights.float() if single_precision else weights

        return store.sample_rows(drawn)

    def _draw(self, key: int, n: int) -> tuple[Tensor, Tensor]:
        ledger = self._rows
        if ledger.capturing:
            u = torch.rand(n, dtype=torch.float64, device=ledger.device)
        else:
            bits = _native.empty_rows(n)
            _native.uniform(key, 1 << 53, bits)
            u = ledger.sent(bits, "sample") * 2.0**-53
        rows, leaves = self.tree.draw(u)
        ledger.tally[3].add_((leaves <= 0).any())
        return torch.where(leaves > 0, rows, 0), leaves

    def draw(self, key: int, n: int, *, leaves: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The same on the host, which waits for it: rows, numbers, and float64 weights, or ``leaves`` in place of these.

        Raises ``NoSampleable``: all priorities are zero, or there are no rows.
        """
        if self.total == 0:
            raise NoSampleable(f"{EMPTY} Or all priorities are zero.")
        with self._rows:
            rows, found = self._draw(key, n)
            weights = found if leaves else (self.tree.least() / found) ** self._beta
            return rows.cpu(), self._rows.numbers[rows].cpu(), weights.cpu()

    # ---- changing ----------------------------------------------------------------------------------------------------

    def update(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """As :meth:`update_there`, where rows and priorities of the host are looked at first.

        Raises:
            PriorityError: one is negative, not finite or too large. Nothing is changed.
            RowError: a row outside the store. Nothing is changed.
        """
        self.check(priorities)
        if rows.is_cpu and bool(((rows < -1) | (rows >= self.rows)).any()):
            raise RowError(f"update_priority: expected rows in [-1, {self.rows}), got {rows.tolist()[:8]}….")
        self.update_there(rows, priorities, expected)

    def check(self, priorities: Tensor) -> None:
        """Raise ``PriorityError`` for priorities on the host of which one is negative, not finite or too large."""
        if not priorities.is_cpu:
            return
        good = (priorities >= 0) & ((priorities.double() + self.eps) ** self.alpha < self._most)
        if not bool(good.all()):
            at = int(good.long().argmin())
            raise PriorityError(
                f"update_priority: expected finite priorities of at least 0 whose power alpha={self.alpha:g} can be summed: a priority at "
                f"position {at} is {float(priorities[at])}."
            )

    def update_there(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """New priorities, ``[n]``, of rows int64 ``[n]``; -1 is passed over, and so are rows of other writes than expected, and rows
        that hold nothing: these are counted. Of a row that is named twice the last entry stays.

        A priority that is negative, not finite or too large leaves its row as it is, and is counted, too; so is a row outside.
        """
        ledger = self._rows
        with ledger:
            rows, priorities = ledger.sent(rows, "update_priority"), ledger.sent(priorities, "update_priority").double()
            leaves = (priorities + self.eps) ** self._alpha
            good = (priorities >= 0) & (leaves < self._most)
            inside = (rows >= 0) & (rows < ledger.capacity)
            at = torch.where(inside & good, rows, ledger.nowhere)
            held = ledger.numbers[at]
            used = held > 0 if expected is None else (held > 0) & (held == ledger.sent(expected, "update_priority"))
            ledger.tally[:3].add_(torch.stack((inside & good & ~used, ~good, ~inside & (rows != -1))).sum(1))
            leaves = torch.where(used, torch.where(leaves > 0, leaves, -self._zero), self._zero)
            at = torch.where(used, at, ledger.nowhere)
            if len(at):
                torch.maximum(self._highest, torch.where(used, priorities, self._zero).amax(), out=self._highest)
            last = ledger.last_of(at)
            self.tree.put(at, leaves if last is None else leaves[last])

    def update_arrays(self, *_: object) -> None:
        """Raises ``TypeError``: arrays become tensors first."""
        raise TypeError("update_arrays: expected an index on the CPU")

    def reset(self, rows: Tensor) -> None:
        """Give live rows the default priority again."""
        with self._rows:
            at = self._rows.live(self._rows.sent(rows, "mark_update"))
            self.tree.put(at, torch.where(at < self.rows, self._default(), 0.0))

    # ---- what the host asks for: each waits ------------------------------------------------------------------------------

    def leaves(self, n: int) -> Tensor:
        """float64 ``[n]``: ``(priority + eps) ** alpha`` of the first rows, 0 for rows that hold nothing. A copy."""
        with self._rows:
            return self.tree.leaves[:n].abs().cpu()

    def copy_to(self, room: Tensor) -> None:
        """Copy all leaves, and behind them the largest priority of all updates, into float64 ``[rows + 1]`` on the device."""
        room[:-1].copy_(self.tree.leaves[: self.rows])
        room[-1].copy_(self._highest)

    def leaves_of(self, rows: Tensor) -> Tensor:
        """float64 ``[n]``: the leaves of rows, int64 ``[n]``. A copy. Raises ``IndexError``: a row outside the store."""
        return self.leaves(self.rows)[rows]

    def weights(self, rows: Tensor) -> Tensor:
        """float64 ``[n]``: the weights that draws of these rows would have now; 0 for rows that cannot be drawn.

        Raises ``RowError``: a row outside the store.
        """
        if bool(((rows < 0) | (rows >= self.rows)).any()):
            raise RowError(f"weights: expected rows in [0, {self.rows}), got {rows.tolist()[:8]}….")
        leaves = self.leaves(self.rows)[rows]
        return torch.where(leaves > 0, (leaves / self.tree.least().cpu()) ** -self.beta, 0.0)

    def count(self, stats: dict[str, float]) -> None:
        """Add what it has to say to the numbers of the store."""
        stats["priority_mass"] = stats.get("priority_mass", 0.0) + self.total
        stats["priority_updates_dropped"] += int(self._rows.tally[0])

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a state that was checked; rows that it says nothing of get the default priority."""
        alpha, beta, highest, saved = (state[name] for name in ("alpha", "beta", "highest", "leaves"))
        assert isinstance(alpha, float) and isinstance(beta, float) and isinstance(saved, Tensor)  # noqa: PT018 - as checked
        leaves = torch.zeros(self.rows, dtype=torch.float64, device="cpu")
        leaves[: len(saved)] = saved
        with self._rows:
            self._powers = (alpha, beta)
            self._alpha.fill_(alpha)
            self._beta.fill_(beta)
            self._highest.fill_(float(highest))  # type: ignore[arg-type] # a number
            self._set_all(leaves.to(self._rows.device))
