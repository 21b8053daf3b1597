"""Windows around rows of one store, found natively."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from engram import _native
from engram.errors import RowError
from engram.field_paths import public
from engram.samplers.trajectory_tables import END_KEYS, Boundaries, TrajectoryKeys, numbers_by_path, shared_table
from engram.store import as_rows

if TYPE_CHECKING:
    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.store import Store
    from engram.units.sequence import WindowUnit


class Windows(NamedTuple):
    """Windows around anchors, one behind the other: tensors ``[n * total]``."""

    rows: Tensor
    tickets: Tensor
    """int64; -1 in all of a window of which something moved."""
    valid: Tensor
    steps: int
    """How many are valid."""
    told: list[Tensor]
    """Numbers of windows, numbers of steps, anchors, steps that are learned from; and tickets of anchors. Perhaps none."""


class WindowTable:
    """Where the trajectories of a store end, for a unit."""

    def __init__(self, memory: Store, unit: WindowUnit) -> None:
        """Raises ``TypeError``: rows have no fields. ``KeyError``: the flag is not stored. ``ValueError``: windows longer than a lane."""
        name, numbers = type(unit).__name__, numbers_by_path(memory)
        if not numbers:
            kind = memory.schema.structure.kind
            raise TypeError(
                f"sample: {name}: expected a tensor storage of rows with fields, such as TensorDicts, got rows of one tensor ({kind})."
            )
        boundaries = Boundaries((), ()) if unit.crosses else _boundaries_of(memory, numbers, unit, name)
        steps = memory.lane_length // math.prod(memory.schema.columns)
        if unit.reach > steps:
            raise ValueError(
                f"sample: {name}: expected windows of at most {steps} steps, as long as a lane of the storage, got {unit.reach} "
                f"({unit.total} records, {unit.dilation} apart). Draw shorter ones, or use a larger storage."
            )
        table = f"sequence-{'-'.join(map(str, boundaries.which)) or 'all'}"
        self.memory = memory
        self.init = numbers.get(unit.init_key) if unit.init_key is not None else None
        """The field that gets a mark at the first record of each window; None: none does."""
        self._table = shared_table(memory, table, boundaries, 1)
        self._spec = _native.WindowSpec(unit.total, True, False, 0, 0, 1, unit.dilation, unit.burn_in, 0, True)
        self._total = unit.total
        self._learned, self._shifted = unit.length, unit.episode_boundary == "stop"

    def around(self, rows: Tensor, tickets: Tensor | None) -> Windows:
        """The windows around rows, which must have these tickets.

        Raises ``RowError``: a row is outside the storage.

        Args:
            rows, tickets: int64 ``[n]``; no tickets: any.
        """
        return self._around(None, rows, tickets, told=True, numbered=False)[0]

    def read(
        self, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool
    ) -> tuple[Windows, list[Tensor], list[int]]:
        """The same, what they hold, and the numbers of the windows of which something moved.

        Args:
            rows, tickets: as :meth:`around`.
            told: whether windows say what their steps are, and with ``numbered`` the tickets of anchors.
        """
        if self.memory.is_native:
            return self._around(self.memory.layout, rows, tickets, told=told, numbered=numbered)
        windows = self._around(None, rows, tickets, told=told, numbered=numbered)[0]
        columns, moved = self.memory.read(windows.rows, expected=windows.tickets)
        return windows, columns, sorted({place // self._total for place in moved})

    def _around(
        self, layout: _native.Layout | None, rows: Tensor, tickets: Tensor | None, *, told: bool, numbered: bool
    ) -> tuple[Windows, list[Tensor], list[int]]:
        rows, expected = as_rows(rows, "sample"), None if tickets is None else as_rows(tickets, "sample")
        learned = self._learned if told else 0
        try:
            said, columns, moved, steps = self._table.around(
                self.memory.core, layout, rows, expected, self._spec, self._shifted, learned, numbered
            )
        except IndexError as error:
            raise RowError(f"sample: {error}.") from error
        records, numbers, valid, *told_of = said
        return Windows(records, numbers, valid, steps, told_of), columns, moved


def _boundaries_of(memory: Store, numbers: dict[FieldPath, int], unit: WindowUnit, name: str) -> Boundaries:
    """Ids, and the unit's flag; the usual ends, if that is the default one. Raises ``KeyError``: the flag is not stored, or nothing is."""
    key = unit.done_key
    assert key is not None  # else windows cross trajectories
    usual = key == END_KEYS[0]
    if usual or key in numbers:
        with suppress(RuntimeError):
            keys = TrajectoryKeys(None, None if usual else (key,), None)
            return keys.boundaries(memory.schema.fields, numbers, f"sample: {name}")
    raise KeyError(
        f"sample: {name}: done_key: expected a stored field, one of {[public(path) for path in numbers]}, got {public(key)!r}. Name "
        "the flag of a trajectory's last step, or pass done_key=None where there is one trajectory."
    )
