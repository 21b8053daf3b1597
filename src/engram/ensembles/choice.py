"""How the members of a batch are chosen."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from engram import _native
from engram._checks import as_numbers, check_count
from engram.errors import NoSampleable
from engram.fleet import plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.samplers._base import DeclaredSampler
    from engram.types import SampledStorage

    #: The sampler and the storage of each member.
    Sources: TypeAlias = Sequence[tuple[DeclaredSampler, SampledStorage]]
    #: How likely members are.
    Weights: TypeAlias = Sequence[float] | Tensor | str | None

SAMPLEABLE = "sampleable"
#: Of a draw: the number that the choice of members has, which no member has.
_CHOICE = 1 << 40
#: Numbers that weights are compared with.
_FINE = 1 << 53


class Choice:
    """Chooses the members of a batch.

    Args:
        who: what messages begin with.
        members: how many there are.
        p, sample_from_all, num_buffer_sampled: as ``SamplerEnsemble`` has them.

    Raises: as ``SamplerEnsemble``.
    """

    def __init__(
        self, who: str, members: int, p: Weights, num_buffer_sampled: int | None, *, sample_from_all: bool
    ) -> None:
        self._who, self._members = who, members
        if sample_from_all and p is not None:
            raise RuntimeError(f"{who}: expected one of p and sample_from_all, got both.")
        self.sample_from_all = bool(sample_from_all)
        #: As it was given; None: as many as there are members.
        self.asked = (
            None if num_buffer_sampled is None else check_count(f"{who}: num_buffer_sampled", num_buffer_sampled)
        )
        self.parts = members if self.asked is None or self.sample_from_all else self.asked
        self.p: Tensor | str | None = None
        self._ends: list[float] = []
        self.weigh(p)

    def weigh(self, p: Weights) -> None:
        """Choose by other weights from now on. Raises ``TypeError``, ``ValueError``."""
        what, n = f"{self._who}: p", self._members
        if p is None or isinstance(p, str):
            if p not in (None, SAMPLEABLE):
                raise ValueError(f"{what}: expected weights or {SAMPLEABLE!r}, got {p!r}.")
            self.p, self._ends = p, []
            return
        weights = as_numbers(what, p).to("cpu", torch.float64)
        if weights.shape != (n,):
            raise ValueError(f"{what}: expected {n} weights, one for each member, got shape {list(weights.shape)}.")
        bad = weights[~(weights.isfinite() & (weights >= 0))]
        if len(bad):
            raise ValueError(f"{what}: expected finite weights of at least 0, got {float(bad[0])}.")
        if not bool(weights.sum() > 0):
            raise ValueError(f"{what}: expected a weight above 0, got {weights.tolist()}.")
        weights = weights / weights.max()  # whose sum is finite
        self.p = weights / weights.sum()
        self._ends = list(accumulate(self.p.tolist()))

    def rows_of_part(self, batch_size: int) -> int:
        """Rows of each part of a batch. Raises ``ValueError``: the batch cannot be divided."""
        rows, rest = divmod(batch_size, self.parts)
        if rest or not rows:
            raise ValueError(
                f"sample: batch_size: expected a multiple of num_buffer_sampled={self.parts}, got {batch_size}. Draw "
                f"{max(rows, 1) * self.parts} rows, or set num_buffer_sampled."
            )
        return rows

    def chosen(self, key: int, rows: int, sources: Sources) -> list[int]:
        """The member of each part of a batch, of so many rows each. Raises ``NoSampleable``: none can give a part."""
        n, ends = self._members, self._ends
        if self.sample_from_all:
            return list(range(n))
        if self.p is None:
            return self._numbers(key, n)
        if isinstance(self.p, str):
            ends = list(accumulate(_drawable(source, storage, rows) for source, storage in sources))
            if not ends[-1]:
                raise NoSampleable(
                    f"sample: expected a member of the ensemble that can give {rows} rows, got {n} that cannot."
                )
        at = [number / _FINE * ends[-1] for number in self._numbers(key, _FINE)]
        last = next(i for i, end in enumerate(ends) if end >= ends[-1])  # rounding must not choose one without weight
        return [min(bisect_right(ends, place), last) for place in at]

    def _numbers(self, key: int, below: int) -> list[int]:
        numbers = _native.empty_rows(self.parts)
        _native.uniform(plans.key_of(key, _CHOICE, 0), below, numbers)
        found: list[int] = numbers.tolist()
        return found

    def ready(self, sources: Sources, batch_size: int) -> bool:
        """Whether a batch could be drawn now from these samplers and storages of the members."""
        if batch_size % self.parts or batch_size < 1:
            return False
        able = [source.can_sample(storage, batch_size // self.parts) for source, storage in sources]
        if self.sample_from_all:
            return all(able)
        likely = self.p.tolist() if isinstance(self.p, Tensor) else [1.0] * len(able)
        return any(weight > 0 and can for weight, can in zip(likely, able, strict=True))

    def __repr__(self) -> str:
        p = self.p.tolist() if isinstance(self.p, Tensor) else self.p
        return "sample_from_all=True" if self.sample_from_all else f"p={p!r}, num_buffer_sampled={self.parts}"


def _drawable(source: DeclaredSampler, storage: SampledStorage, rows: int) -> float:
    """What a member could draw from now, rows or windows; 0 for one that could not give so many rows."""
    if not source.can_sample(storage, rows):
        return 0.0
    masses = source.masses(storage) if source.traits.draws_windows else None
    return float(source.drawable(storage) if masses is None else masses.total)
