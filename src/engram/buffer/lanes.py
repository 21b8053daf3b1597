"""Which lanes rows go to."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from engram import storages
from engram._checks import as_numbers
from engram.errors import RowError
from engram.state import integer, typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from engram.buffer.wiring import Wiring
    from engram.storages import Count

    #: How a call names lanes.
    Lane: TypeAlias = int | Sequence[int] | NDArray[np.integer] | Tensor | Literal["each"] | None


class Lanes:
    """The lane that a buffer named for its writes, and what a write may name."""

    def __init__(self, wiring: Wiring, named: int | None = None) -> None:
        self._wiring = wiring
        #: Whether it was logged that no lane was named.
        self.told = False
        #: Where rows go whose write names no lane; None: it must name one of several.
        self.default: int | None
        self.take(named)

    @property
    def named(self) -> int | None:
        """The one of several lanes that was named; None: none was."""
        return None if self._wiring.storage.lanes == 1 else self.default

    def take(self, named: int | None) -> None:
        """Name a lane. One that the storage does not have is forgotten."""
        lanes = self._wiring.storage.lanes
        if lanes == 1:
            self.default = 0
        else:
            self.default = named if named is not None and named < lanes else None

    @property
    def saved(self) -> int | list[int]:
        """In a state: a list of the lane that was named, or 0."""
        return 0 if self.named is None else [self.named]

    def checked_saved(self, state: dict[str, Any], where: str) -> int | None:
        """The lane that a state names. Earlier states have an int also of one that named its lane, unless that was 0."""
        saved = typed(state, "_lane", (list, int, type(None)), where)
        if saved in (None, 0):
            return None
        named = saved if isinstance(saved, list) else [saved]
        if len(named) != 1:
            raise ValueError(f"{where}: _lane: expected None or a list of one lane, got {len(named)}.")
        return integer({"_lane": named[0]}, "_lane", 0, self._wiring.storage.lanes, where)

    def of_rows(self, lane: Any, call: str, *, batched: bool) -> tuple[int | Tensor, Count | None]:
        """The lane of rows, or one per row, and how many rows there must be then.

        Raises:
            RowError: no such lane. TypeError, RuntimeError: no lane; one row, and several lanes, of which none was named.
        """
        storage = self._wiring.storage
        if lane is None and not self._wiring.appends:  # the writer names them, or hands these back
            return storage.one_in_each_lane("")[0], None
        if lane is None:
            unnamed: tuple[int | Tensor, Count | None] = storage.unnamed_lanes(call, batched=batched)
            return unnamed
        if isinstance(lane, str) and lane == "each" and batched:
            each: tuple[Tensor, Count] = storage.one_in_each_lane('one for each lane, as lane="each" says')
            return each
        lane = self.checked(lane)
        return lane, storages.Count(len(lane)) if isinstance(lane, Tensor) else None

    def checked(self, lane: Any) -> Any:
        """A lane as an int, or one per row as int64 ``[n]``. Raises as :meth:`of_rows`."""
        lanes = self._wiring.storage.lanes
        if isinstance(lane, str) and lane == "each":
            raise RuntimeError(
                f'lane="each": expected a batch of {lanes} rows for extend(), one for each lane, got one row or one lane.'
            )
        if isinstance(lane, list | tuple | range) or (not isinstance(lane, int) and getattr(lane, "ndim", 0) != 0):
            return self._checked_each(as_numbers("lane", lane).to("cpu"))
        try:
            number = operator.index(lane)
        except TypeError:
            raise TypeError(f"lane: expected an int, one int per row or 'each', got {lane!r}.") from None
        if not 0 <= number < lanes:
            raise RowError(f"lane: expected an int in [0, {lanes}) or one per row, got {lane!r}.")
        return number

    def meant(self, lane: object) -> Tensor:
        """The lanes that a call means which writes no rows: int64 ``[k]``. None: the one that was named; else all, as ``"each"``.

        Raises: as :meth:`of_rows`.
        """
        lane = self.default if lane is None else lane
        if lane is None or (isinstance(lane, str) and lane == "each"):
            return torch.arange(self._wiring.storage.lanes, device="cpu")
        checked = self.checked(lane)
        return checked if isinstance(checked, Tensor) else torch.tensor([checked], device="cpu")

    def _checked_each(self, lanes: Tensor) -> Tensor:
        """A lane per row. Checked before anything is allocated."""
        if lanes.ndim != 1:
            raise RuntimeError(
                f"lane: expected an int, or one per row in one dimension, got shape {list(lanes.shape)}."
            )
        if lanes.dtype.is_floating_point or lanes.dtype.is_complex or lanes.dtype is torch.bool:
            raise TypeError(f"lane: expected ints, one per row, got {lanes.dtype}.")
        if bool(((lanes < 0) | (lanes >= self._wiring.storage.lanes)).any()):
            raise RowError(f"lane: expected lanes in [0, {self._wiring.storage.lanes}), got {lanes.tolist()[:8]}….")
        return lanes.to(torch.int64)

    def say_unnamed(self) -> None:
        """Log once that no lane was named."""
        if not self.told:
            self.told = True
            lanes = self._wiring.storage.lanes
            storages.announcing.announce(
                [f'extend: no lane was named: of {lanes} rows each goes to a lane of its own, as lane="each" says.']
            )
