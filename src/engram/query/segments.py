"""Fields of many trajectories, one after another, and what is computed of each at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch

from engram.field_paths import public

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDictBase
    from torch import Tensor

Reduction = Literal["sum", "mean", "max", "min", "first", "last"]
Path = tuple[str, ...]


class Segments:
    """Steps of ``K`` trajectories, ``N`` in all.

    Args:
        fields: ``[N, ...]`` each, by path.
        lengths: int64 ``[K]``, at least 1: steps of each.
    """

    def __init__(self, fields: Mapping[Path, Tensor], lengths: Tensor) -> None:
        self._fields = fields
        self.lengths = lengths
        """int64 ``[K]``"""
        self._stops = lengths.cumsum(0)
        self._of = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)

    def field(self, path: Path) -> Tensor:
        """``[N, ...]``: a field, or else that of the next step. Raises ``KeyError``."""
        for found in (path, ("next", *path)) if len(path) == 1 else (path,):
            if found in self._fields:
                return self._fields[found]
        raise KeyError(missing(path, self._fields))

    def split(self) -> Sequence[TensorDictBase]:
        """The fields of each trajectory, ``[T]``."""
        from tensordict import TensorDict

        data = TensorDict({}, [len(self._of)])
        for path, column in self._fields.items():
            data.set(path, column)
        return cast("Sequence[TensorDictBase]", data.split(self.lengths.tolist()))

    def any(self, steps: Tensor) -> Tensor:
        """Bool ``[K]``: whether something is true in a trajectory. ``steps``: bool ``[N, ...]``."""
        return self._scattered(steps.reshape(len(steps), -1).any(1).int(), "amax") > 0

    def all(self, steps: Tensor) -> Tensor:
        """Bool ``[K]``: whether all is."""
        return ~self.any(~steps)

    def reduced(self, values: Tensor, how: Reduction) -> Tensor:
        """``[K]``; ``[K, ...]`` of the first and the last step. Floats are summed up as float64, ints and bools as int64.

        ``values``: ``[N, ...]``.
        """
        if how == "first":
            return values[self._stops - self.lengths]
        if how == "last":
            return values[self._stops - 1]
        flat = values.reshape(len(values), -1)
        if how in ("max", "min"):
            rows = flat.amax(1) if how == "max" else flat.amin(1)
            return self._scattered(rows, f"a{how}")
        exact = torch.float64 if flat.dtype.is_floating_point else torch.int64
        sums = self._scattered(flat.sum(1, dtype=exact), "sum")
        return sums if how == "sum" else sums.double() / (self.lengths * flat.shape[1])

    def _scattered(self, values: Tensor, how: str) -> Tensor:
        out = torch.zeros(len(self.lengths), dtype=values.dtype, device="cpu")
        return out.scatter_reduce(0, self._of, values, how, include_self=False)


def missing(path: Path, known: Mapping[Path, object]) -> str:
    """What to say of a field that is not there."""
    beside = f" or {('next', *path)!r}" if len(path) == 1 else ""
    return f"query: expected a stored field {public(path)!r}{beside}, got {[public(key) for key in sorted(known)]}."
