"""Uniform over the live rows, with replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engram import _native
from engram._checks import check_count, check_number
from engram.samplers._base import NativeSampler, check_drawable
from engram.store import Masses
from engram.types import Draw

if TYPE_CHECKING:
    from engram.types import Extent, SampledStorage


#: What else is drawn by a key, independently: recent rows, and whether there is one more of them.
_RECENT, _REST = 0x9216D5D98979FB1B, 0xD1310BA698DFB5AC


class RandomSampler(NativeSampler):
    """Draws live rows uniformly, independently, with replacement. A batch may be larger than the buffer.

    ``RandomSampler(replacement=False, …)`` constructs a :class:`SamplerWithoutReplacement`. With tensor storages,
    drawing and copying are one native call.

    Args:
        recent_share: the part of each batch drawn uniformly from the newest rows; these come first. ``recent_share * B`` rows, rounded
            down or up at random so that the mean is exact.
        recent_steps: how many of each lane's last rows are new. With ``ndim > 1`` a step is a row for each column. Where one of them was
            removed, a row of all is drawn in its place.

    Raises:
        ValueError: ``recent_share`` outside [0, 1]; ``recent_steps`` below 1, or given without a share. TypeError: another argument;
            ``recent_share`` with ``replacement=False``.

    Cost with a share: O(B log lanes) for each draw.

    >>> import torch
    >>> from engram import RandomSampler, ReplayBuffer, LazyTensorStorage
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler())
    >>> _ = rb.extend(torch.arange(4))
    >>> rb.sample(100).unique()
    tensor([0, 1, 2, 3])
    """

    traits = NativeSampler.traits._replace(draws_uniformly=True)
    #: Of a subclass that does not call this one's ``__init__``.
    recent_share, recent_steps = 0.0, 0

    def __new__(cls, *args: object, replacement: bool = True, **kwargs: Any) -> Any:
        if cls.__init__ is not RandomSampler.__init__:  # a subclass has arguments of its own
            return super().__new__(cls)
        known = ("recent_share", "recent_steps") if replacement else ("drop_last", "shuffle", "index")
        unknown = sorted(kwargs.keys() - known)
        if unknown or args:
            raise TypeError(
                f"RandomSampler(replacement={replacement}): expected no arguments but {[*known]}, got {unknown or args}."
            )
        if replacement:
            return super().__new__(cls)
        from engram.samplers.epoch import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**kwargs)

    def __init__(self, *, replacement: bool = True, recent_share: float = 0.0, recent_steps: int = 0) -> None:
        self.recent_share = check_number("RandomSampler: recent_share", recent_share, least=0.0, most=1.0)
        self.recent_steps = check_count(
            "RandomSampler: recent_steps", recent_steps, least=1 if self.recent_share else 0
        )
        if self.recent_steps and not self.recent_share:
            raise ValueError(
                f"RandomSampler: recent_steps: expected a recent_share above 0 beside it, got {recent_share}."
            )
        if self.recent_share:
            self.traits, self.noted = self.traits._replace(draws_uniformly=False), ("recent_share", "recent_steps")

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        check_drawable(extent.size)
        ranks = _native.empty_rows(batch_size)
        _native.uniform(key, extent.size, ranks)
        rows = extent.rows(ranks)
        if self.recent_share:
            lanes, rest = torch.arange(len(extent.filled), device="cpu"), _native.empty_rows(1)
            _native.uniform(key ^ _REST, 1 << 53, rest)
            places = _native.empty_rows(int(self.recent_share * batch_size + int(rest) / (1 << 53)))
            _native.uniform(key ^ _RECENT, sum(min(n, self.recent_steps) for n in extent.filled), places)
            new = extent.in_order(lanes, self.recent_steps, places)
            rows[: len(new)] = new
        return Draw(rows)

    def masses(self, storage: SampledStorage) -> Masses:
        return Masses(len(storage), 1.0, len(storage))
