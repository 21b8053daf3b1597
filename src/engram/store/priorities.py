"""Priorities of rows: one index of a store, whichever samplers draw from it.

The index belongs to the rows' storage under a name, and every write keeps it. Two buffers on one storage whose samplers name
different indexes have priorities of their own over one copy of the data.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram._support import native, words
from engram._support.state import real, tensor_in, typed
from engram.errors import IncompatibleCheckpoint, IncompatibleStore, PriorityError, RowError
from engram.store import blocks, indexes, memory
from engram.store.device.rows import DevicePriorities
from engram.store.device.store import DeviceStore
from engram.store.store import Store

Numbers: TypeAlias = np.typing.NDArray[np.generic]

#: Entries of a state.
NAMES = ("alpha", "beta", "eps", "max_priority_within_buffer", "highest", "leaves")


class PriorityConfig(NamedTuple):
    """How priorities become probabilities."""

    alpha: float
    beta: float
    eps: float
    within_buffer: bool


def state_of(config: PriorityConfig) -> dict[str, object]:
    """The state of priorities that no row has yet."""
    return dict(zip(NAMES, (*config, 0.0, torch.zeros(0, dtype=torch.float64, device="cpu")), strict=True))


def check_priorities(state: dict[str, object], config: PriorityConfig | None, rows: int, where: str) -> PriorityConfig:
    """Check the entries of :meth:`PriorityIndex.state` in ``state``; how priorities become probabilities there.

    Args:
        state: may hold more.
        config: as the priorities are that take it over; None: they will be made for it.
        rows: of those priorities. A state may have leaves of the first ones only.
        where: for messages.

    Raises:
        TypeError, ValueError: an entry of another type or shape, or out of range. PriorityError: a leaf that no priority has.
        IncompatibleCheckpoint: another ``eps`` or ``max_priority_within_buffer``, or number of rows.
    """
    alpha, beta, eps, highest = (real(state, name, where) for name in ("alpha", "beta", "eps", "highest"))
    found = PriorityConfig(alpha, beta, eps, typed(state, "max_priority_within_buffer", bool, where))
    leaves = tensor_in(state, "leaves", torch.float64, (None,), where)
    if config is not None:
        within = ("max_priority_within_buffer", config.within_buffer, found.within_buffer)
        for name, ours, theirs in (("eps", config.eps, found.eps), within):
            if ours != theirs:
                raise IncompatibleCheckpoint(
                    f"{where}: {name}: expected {ours} as here, got {theirs}. Make them with {name}={theirs}."
                )
    if leaves.numel() > rows:
        raise IncompatibleCheckpoint(f"{where}: leaves: expected those of at most {rows} rows, got {leaves.numel()}.")
    most, possible = 1e300 / rows, False  # no sum of such leaves overflows
    with contextlib.suppress(OverflowError):
        possible = (highest + eps) ** alpha < most
    if not possible:
        raise PriorityError(f"{where}: highest: expected one whose power alpha={alpha} can be summed, got {highest}.")
    least, largest = leaves.aminmax() if leaves.numel() else (leaves.new_zeros(()),) * 2  # NaN, if one is
    if not (least >= 0 and largest < most):
        row = int((~((leaves >= 0) & (leaves < most))).nonzero()[0])
        raise PriorityError(f"{where}: leaves: expected finite ones of at least 0, row {row} has {float(leaves[row])}.")
    return found


def with_parameters(state: dict[str, Any], alpha: float, eps: float) -> dict[str, Any]:
    """Priorities as they are with another ``alpha`` or ``eps``: each is computed from its leaf."""
    if (state["alpha"], state["eps"]) == (alpha, eps):
        return state
    leaves = state["leaves"]
    priorities = leaves.abs() ** (1 / state["alpha"]) - state["eps"] if state["alpha"] else torch.ones_like(leaves)
    powers = (priorities.clamp(min=0) + eps) ** alpha
    given = (leaves > 0) | leaves.signbit()
    powers = torch.where(powers > 0, powers, torch.full_like(powers, -0.0))
    return {**state, "alpha": alpha, "eps": eps, "leaves": torch.where(given, powers, leaves)}


class PriorityIndex(indexes.TicketIndex[native.Priorities]):
    """The priorities of the rows of one store. Made by :meth:`of_store`."""

    kind = "priorities"
    make_core = native.Priorities
    on_device = retired = False
    reset_mutex = staticmethod(native.reset_priorities_mutex)
    copy_memory = staticmethod(native.copy_priorities)
    format_memory = staticmethod(native.format_priorities)

    def count(self, stats: dict[str, float]) -> None:
        """As :meth:`Index.count`: updates that came too late, and the sum of what rows are drawn by."""
        stats["priority_updates_dropped"] += self.core.dropped
        stats["priority_mass"] = stats.get("priority_mass", 0.0) + self.core.total

    @classmethod
    def of_store(cls, store: Store, name: str, config: PriorityConfig) -> tuple[PriorityIndex, bool]:
        """The index of that name, and whether this call made it. A new index scans the tickets once.

        Raises:
            ValueError: not a name of an index.
            IncompatibleStore: the index of that name has another ``eps`` or ``max_priority_within_buffer``.
            OSError: no space for its file.
        """
        indexes.check_index_name(name)
        nbytes = native.priority_bytes(store.capacity, config.within_buffer)
        # No other thread looks while they are on neither the device nor the host.
        with store.placing() if isinstance(store, DeviceStore) else contextlib.nullcontext():
            moved = DeviceIndex.taken_off(store, name, config)
            index, made = cls.of_name(store.indexes, name, nbytes, store.capacity, *config)
            if moved is not None:
                index.restore(moved)
        check_parameters(name, index.core, config)
        return index, made

    @classmethod
    def of_no_store(cls, rows: int, config: PriorityConfig) -> PriorityIndex:
        """Priorities in private memory, of rows that are in no store."""
        return cls.alone(native.priority_bytes(rows, config.within_buffer), rows, *config)

    def draw(
        self, key: int, n: int, *, leaves: bool = False, among: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``n`` rows by priority, with replacement: int64 rows, int64 ticket numbers, float64 weights, or ``leaves`` in place of these.

        ``among``: of these rows only, int64 ``[m]``.

        Raises:
            NoSampleable: all priorities are zero, or there are no rows.
        """
        rows, numbers = native.empty_rows(n), native.empty_rows(n)
        weights = torch.empty(n, dtype=torch.float64, device="cpu")
        self.core.draw(key, rows, numbers, weights, leaves, among)
        return rows, numbers, weights

    def sample(self, store: Store, key: blocks.Key, n: int, single_precision: bool, over_batch: bool) -> list[Tensor]:
        """As :meth:`draw`, with the rows' data: one tensor per field, then rows, ticket numbers and weights, ``over_batch``: over the
        largest of these.
        """
        return self.core.sample(store.core, store.layout, key.address, n, single_precision, over_batch)

    def weights(self, rows: Tensor) -> Tensor:
        """float64 ``[B]``: the weights that draws of these rows would have now; 0 for rows that cannot be drawn.

        Raises ``RowError``: a row outside the store.
        """
        rows = rows.contiguous()
        out = torch.empty(len(rows), dtype=torch.float64, device="cpu")
        with words.raise_as(RowError, "weights", IndexError):
            self.core.weigh(rows, out)
        return out

    def check(self, priorities: Tensor) -> None:
        """Raise ``PriorityError`` for priorities of which one is negative, not finite or too large."""
        self.update(torch.full((len(priorities),), -1, device="cpu"), priorities, None)

    def update(self, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """New priorities, float64 or float32 ``[B]``, of rows int64 ``[B]``; -1 is passed over, and so are rows with another ticket.

        Raises:
            PriorityError: one is negative, not finite or too large. Nothing is changed.
            RowError: a row outside the store. Nothing is changed.
        """
        try:
            self.core.update(rows, priorities, expected)
        except (native.BadPriority, IndexError) as error:
            raise self._refusal(error) from error

    def update_arrays(self, rows: Numbers, priorities: Numbers, expected: Numbers | None) -> None:
        """As :meth:`update`, of as many priorities as rows. Raises ``TypeError``, too: arrays of other dtypes or strides."""
        try:
            self.core.update_arrays(rows, priorities, expected)
        except (native.BadPriority, IndexError) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> Exception:
        if isinstance(error, IndexError):
            return RowError(f"update_priority: {error}.")
        return PriorityError(
            f"update_priority: expected finite priorities of at least 0 whose power alpha={self.core.alpha:g} can be summed: {error}."
        )

    def reset(self, rows: Tensor) -> None:
        """Give live rows the default priority again. Raises ``RowError``: a row outside the store."""
        try:
            self.core.reset(rows)
        except IndexError as error:
            raise RowError(f"mark_update: {error}.") from error

    def leaves(self, n: int) -> Tensor:
        """float64 ``[n]``: ``(priority + eps) ** alpha`` of the first rows, 0 for rows that hold nothing. A copy."""
        out = torch.empty(n, dtype=torch.float64, device="cpu")
        self.core.leaves(out, False)
        return out

    def leaves_of(self, rows: Tensor) -> Tensor:
        """float64 ``[n]``: the leaves of rows, int64 ``[n]``. A copy. Raises ``IndexError``: a row outside the store."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), dtype=torch.float64, device="cpu")
        self.core.leaves_of(rows, out)
        return out

    # ---- state ---------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> PriorityConfig:
        """How priorities become probabilities now."""
        return PriorityConfig(self.core.alpha, self.core.beta, self.core.eps, self.core.within_buffer)

    @property
    def masses(self) -> blocks.Masses:
        """Sum and smallest of the leaves, and live rows, of one moment."""
        with blocks.DrawingPart() as part:
            self.core.weigh(None, None)
        return part.masses

    def state(self, rows: int | None = None, room: Tensor | None = None) -> dict[str, Any]:
        """``alpha, beta, eps, max_priority_within_buffer, highest`` and ``leaves``, float64 ``[rows]``, of which -0.0 is a
        priority of zero: copies.

        Args:
            rows: how many; default all.
            room: memory for the leaves, if it is large enough.
        """
        rows = self.core.rows if rows is None else rows
        fits = room is not None and len(room) >= rows
        leaves = room[:rows] if room is not None and fits else torch.empty(rows, dtype=torch.float64, device="cpu")
        self.core.leaves(leaves, True)
        return {**state_of(self.config), "highest": self.core.highest, "leaves": leaves}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state that :func:`check_priorities` has seen; leaves of rows that hold nothing become zero.

        Rows that it says nothing of, as they were written later, get the default priority.
        """
        leaves = state["leaves"].detach().to("cpu").contiguous()
        self.core.beta, self.core.highest = state["beta"], state["highest"]
        self.core.restore(leaves, state["alpha"])


class DeviceIndex(DevicePriorities):
    """The priorities of the rows of a store on an accelerator, which lie there. Made by :meth:`of_device_store`.

    A sampler that needs them on the host moves them there, for good (:attr:`retired`).
    """

    on_device = True

    @classmethod
    def of_device_store(cls, store: DeviceStore, name: str, config: PriorityConfig) -> tuple[DeviceIndex, bool]:
        """The index of that name on the device, and whether this call made it.

        Raises:
            ValueError: not a name of an index.
            IncompatibleStore: the index of that name has other parameters, or lies on the host.
        """
        indexes.check_index_name(name)
        with store.placing():
            known = store.indexes.get((name, PriorityIndex.kind))
            if known is not None:
                if not isinstance(known, DeviceIndex):
                    raise IncompatibleStore(
                        f"index {name!r}: expected priorities on {store.device}, got those of that name on the host, where another sampler "
                        "has needed them. Give this sampler device='cpu', or another name: index=…."
                    )
                check_parameters(name, known, config)
                return known, False
            index = cls(store.rows, *config)
            saved = None if store.mirror is None else store.mirror.saved(name)
            if saved is None:
                index.scan(0, store.capacity)
            else:
                check_priorities(saved, config, store.capacity, f"index {name!r} of the mirror")
                index.restore(saved)
            store.indexes.keep((name, PriorityIndex.kind), index)
            store.rows.trees.append(index)
        return index, True

    @classmethod
    def taken_off(cls, store: Store, name: str, config: PriorityConfig) -> dict[str, object] | None:
        """The state of the priorities of that name, which lie on the device no more; None: they did not. The caller holds the store.

        Raises ``IncompatibleStore``, as :meth:`PriorityIndex.of_store`: they stay there.
        """
        known = store.indexes.get((name, PriorityIndex.kind))
        if not (isinstance(store, DeviceStore) and isinstance(known, cls)):
            return None
        check_parameters(name, known, config)
        known.retired = True
        store.indexes.keep((name, PriorityIndex.kind), None)
        store.rows.trees.remove(known)
        return known.state()

    @property
    def config(self) -> PriorityConfig:
        """How priorities become probabilities now."""
        return PriorityConfig(self.alpha, self.beta, self.eps, self.within_buffer)

    def state(self, rows: int | None = None, room: Tensor | None = None) -> dict[str, object]:  # noqa: ARG002 - it waits anyway
        """As :meth:`PriorityIndex.state`."""
        with self._rows:
            leaves = self.tree.leaves[: self.rows if rows is None else rows].cpu()
            return {**state_of(self.config), "highest": self.highest, "leaves": leaves}

    @property
    def block(self) -> memory.Block:
        """Memory of an index on the host with these priorities: what copies of the store get."""
        index = PriorityIndex.of_no_store(self.rows, self.config)
        index.core.written(torch.arange(self.rows, device="cpu"))
        index.restore(self.state())
        return index.block


def priorities_of(
    store: Store, name: str, config: PriorityConfig, device: torch.device | None = None
) -> tuple[Priorities, bool]:
    """The priorities of that name where they are to be, and whether this call made them.

    Args:
        device: None: where they are, or else where the store has them.

    Raises as :meth:`PriorityIndex.of_store`; ``ValueError``: the rows are on another accelerator.
    """
    if isinstance(store, DeviceStore) and (device is None or device.type != "cpu"):
        if device not in (None, torch.device(store.device.type), store.device):
            raise ValueError(
                f"PrioritizedSampler: device: expected {store.device}, where the rows are, or 'cpu', got {device}."
            )
        known = store.indexes.get((name, PriorityIndex.kind))
        if device is not None or isinstance(known, DeviceIndex) or (known is None and store.keeps_priorities):
            return DeviceIndex.of_device_store(store, name, config)
    return PriorityIndex.of_store(store, name, config)


def check_parameters(name: str, known: native.Priorities | DevicePriorities, config: PriorityConfig) -> None:
    """Raise ``IncompatibleStore`` for an index of that name with another ``eps`` or ``max_priority_within_buffer``."""
    if (known.eps, known.within_buffer) != (config.eps, config.within_buffer):
        raise IncompatibleStore(
            f"index {name!r}: expected eps={known.eps} and max_priority_within_buffer={known.within_buffer}, as the store's "
            f"index of that name has, got eps={config.eps} and {config.within_buffer}. Give it another name: index=…."
        )


#: The priorities of rows as samplers use them, wherever they lie. :class:`PriorityIndex` says what their methods do.
Priorities: TypeAlias = PriorityIndex | DeviceIndex
