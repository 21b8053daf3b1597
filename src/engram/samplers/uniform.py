"""Uniform over the live rows, with replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _native
from engram.samplers._base import NativeSampler, check_drawable
from engram.store import Masses
from engram.types import Draw

if TYPE_CHECKING:
    from engram.types import Extent, SampledStorage


class RandomSampler(NativeSampler):
    """Draws live rows uniformly, independently, with replacement. A batch may be larger than the buffer.

    ``RandomSampler(replacement=False, …)`` constructs a :class:`SamplerWithoutReplacement`. With tensor storages,
    drawing and copying are one native call.

    >>> import torch
    >>> from engram import RandomSampler, ReplayBuffer, LazyTensorStorage
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler())
    >>> _ = rb.extend(torch.arange(4))
    >>> rb.sample(100).unique()
    tensor([0, 1, 2, 3])
    """

    traits = NativeSampler.traits._replace(draws_uniformly=True)

    def __new__(cls, *args: object, replacement: bool = True, **kwargs: Any) -> Any:
        if cls.__init__ is not RandomSampler.__init__:  # a subclass has arguments of its own
            return super().__new__(cls)
        if replacement:
            if kwargs or args:
                raise TypeError(f"RandomSampler: unexpected arguments {sorted(kwargs)} with replacement.")
            return super().__new__(cls)
        from engram.samplers.epoch import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**kwargs)

    def __init__(self, *, replacement: bool = True) -> None:
        pass

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        check_drawable(extent.size)
        ranks = _native.empty_rows(batch_size)
        _native.uniform(key, extent.size, ranks)
        return Draw(extent.rows(ranks))

    def masses(self, storage: SampledStorage) -> Masses:
        return Masses(len(storage), 1.0, len(storage))
