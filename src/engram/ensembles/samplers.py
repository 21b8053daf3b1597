"""The samplers of an ensemble, and the choice of members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram import samplers
from engram._tensordict import tensordict_type
from engram.ensembles.choice import Choice
from engram.ensembles.parts import OnePerMember
from engram.ensembles.refusing import naming
from engram.ensembles.storages import StorageEnsemble
from engram.fleet import plans
from engram.samplers._base import DeclaredSampler, declared, key_for
from engram.types import Sampler, Traits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from tensordict import TensorDict
    from torch import Tensor

    from engram.ensembles.choice import Sources, Weights
    from engram.types import SampledStorage


class _Samplers(OnePerMember[Sampler], DeclaredSampler):
    """What a buffer asks of the samplers of an ensemble."""

    traits = Traits(has_epochs=False, listens=False)
    choice: Choice
    _declared: tuple[DeclaredSampler, ...]

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        return self.choice.ready(self.sources(storage), batch_size)

    def drawable(self, storage: SampledStorage) -> int:
        return sum(source.drawable(one) for source, one in self.sources(storage))

    def sources(self, storage: object) -> Sources:
        """Each sampler with its storage. Raises ``TypeError``: no ensemble. ``ValueError``: of another number of members."""
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"sample: expected a StorageEnsemble, got {type(storage).__name__}.")
        if len(storage) != len(self):
            raise ValueError(f"sample: expected {len(self)} storages, one for each sampler, got {len(storage)}.")
        return list(zip(self._declared, storage.storages, strict=True))

    def some(self, members: Sequence[int]) -> Self:
        """An ensemble of some of them, with as many parts in a batch. Raises ``ValueError``: all of these have weight 0."""
        choice, p = self.choice, self.choice.p
        weights = p if p is None or isinstance(p, str) else p[list(members)]
        some = super().some(members)
        some.choice = Choice(
            type(self).__name__, len(some), weights, choice.asked, sample_from_all=choice.sample_from_all
        )
        return some

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all))}, {self.choice!r})"


class SamplerEnsemble(_Samplers):
    """The samplers of an ensemble, and how often each is asked.

    Args:
        *samplers: one of each member.
        p: how likely each member is, relative to the others; or ``"sampleable"``: by the rows, or windows, that it could draw from
            at this moment. Default: all are equally likely. May be set later.
        sample_from_all: each member gives its part of every batch, in order.
        num_buffer_sampled: parts of a batch, each of which is of a member that is drawn by itself. Default: as many as there are
            members. Of no effect with ``sample_from_all``.

    Raises:
        RuntimeError: ``p`` and ``sample_from_all`` both. TypeError: no samplers, or a ``p`` without numbers. ValueError: not a weight for
            each member, one that is negative or not finite, all zero, or another name; a number below 1.

    >>> from engram import RandomSampler, SamplerEnsemble
    >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 3])
    >>> sampler.p.tolist()
    [0.25, 0.75]
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Weights = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        who = type(self).__name__
        if not samplers or not all(isinstance(one, Sampler) for one in samplers):
            got = [type(one).__name__ for one in samplers] or "none"
            raise TypeError(f"{who}: expected samplers, got {got}.")
        self._all = samplers
        self._declared = tuple(map(declared, samplers))
        self.choice = Choice(who, len(samplers), p, num_buffer_sampled, sample_from_all=sample_from_all)

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """One of each member."""
        return self._all

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch."""
        return self.choice.parts

    @property
    def sample_from_all(self) -> bool:
        """Whether each member gives its part of every batch."""
        return self.choice.sample_from_all

    @property
    def p(self) -> Tensor | str | None:
        """How likely each member is: a tensor whose sum is 1, ``"sampleable"``, or None."""
        return self.choice.p

    @p.setter
    def p(self, p: Weights) -> None:
        self.choice.weigh(p)

    @property
    def default_priority(self) -> float:
        """1.0: each member has its own, ``sampler[i].default_priority``."""
        return 1.0

    def add(self, index: object) -> None:
        """No effect, because members know their rows from their stores.

        >>> from engram import RandomSampler, SamplerEnsemble
        >>> SamplerEnsemble(RandomSampler()).add(0)
        """

    def extend(self, index: object) -> None:
        """No effect, because members know their rows from their stores.

        >>> from engram import RandomSampler, SamplerEnsemble
        >>> SamplerEnsemble(RandomSampler()).extend([0, 1])
        """

    def sample(self, storage: StorageEnsemble, batch_size: int) -> tuple[TensorDict, TensorDict]:
        """Draw from the storages of an ensemble with a key of torch's default generator.

        Returns:
            TensorDicts ``[num_buffer_sampled]``: ``"index"``, int64 ``[num_buffer_sampled, rows]``, and ``"buffer_ids"``, as
            ``storage.get`` takes them; and what all of the samplers say beside.

        Raises:
            TypeError: no :class:`StorageEnsemble`. ValueError: the batch cannot be divided, or there are more storages, or fewer.

        >>> import torch
        >>> from engram import ListStorage, RandomSampler, SamplerEnsemble, StorageEnsemble
        >>> storage = StorageEnsemble(ListStorage(4), ListStorage(4))
        >>> for member in storage.storages:
        ...     member.set(range(4), list("abcd"))
        >>> index, info = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True).sample(storage, 6)
        >>> index["index"].shape, index["buffer_ids"].tolist()
        (torch.Size([2, 3]), [0, 1])
        """
        sources = self.sources(storage)
        rows = self.choice.rows_of_part(batch_size)
        key = key_for(*(one for _, one in sources)).value
        ids = self.choice.chosen(key, rows, sources)
        draws = []
        for part, member in enumerate(ids):
            source, one = sources[member]
            with naming(member):
                samplers.check_drawable(one.extent().size)
                source.bind(one)
                draw = source.draw(one.extent(), rows, plans.key_of(key, member, part))
            if source.traits.consumes:
                source.were_read(draw)
            draws.append(draw)
        index = {"index": torch.stack([draw.rows for draw in draws]), "buffer_ids": torch.tensor(ids, device="cpu")}
        shared = set.intersection(*(set(draw.info) for draw in draws))
        info = {
            entry: torch.stack([torch.as_tensor(draw.info[entry]) for draw in draws])
            for entry in draws[0].info
            if entry in shared
        }
        kind, batch = tensordict_type(), [len(ids)]
        return kind(index, batch_size=batch), kind(info, batch_size=batch)
