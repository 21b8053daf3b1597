"""The samplers of an ensemble, and the choice of members."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from engram import samplers
from engram._support import native
from engram._support.checks import as_numbers, check_count
from engram._support.state import Loads, check_keys, prepare_load, saved
from engram._support.tensordicts import tensordict_type
from engram.errors import NoSampleable
from engram.members.storages import StorageEnsemble, members_named, naming, split_index
from engram.remote.fleet import plans
from engram.samplers._base import DeclaredSampler, check_drawable, declared, key_for
from engram.types import Sampler, Traits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from tensordict import TensorDict

    from engram.store.sampled import SampledStorage
    from engram.types import Commit

    Sources: TypeAlias = Sequence[tuple[DeclaredSampler, SampledStorage]]
    Weights: TypeAlias = Sequence[float] | Tensor | str | None


T = TypeVar("T")


class OnePerMember(Generic[T]):
    """Components of one kind, one of each member, and their states by number."""

    #: One of each member.
    _all: tuple[T, ...]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def __getitem__(self, index: object) -> T | Self:
        """One of them, or an ensemble of some. Raises as ``ReplayBufferEnsemble[index]``."""
        of_members, rows = split_index(index, type(self).__name__)
        if rows is not None:
            raise IndexError(f"{type(self).__name__}: expected an index of members alone, got {index!r}.")
        named = members_named(of_members, len(self), type(self).__name__)
        return self._all[named] if isinstance(named, int) else self.some(named)

    def some(self, members: Sequence[int]) -> Self:
        """An ensemble of some of them."""
        return type(self)(*(self._all[member] for member in members))

    def state_dict(self) -> dict[str, object]:
        """The state of each, by its number."""
        return {str(number): saved(one, f"{type(self).__name__}[{number}]") for number, one in enumerate(self._all)}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a state. Raises what one of them raises for its own; nothing is changed."""
        del capacity  # each knows its own
        who = type(self).__name__
        check_keys(state_dict, tuple(map(str, range(len(self)))), who)
        states = enumerate(self._all)
        return Loads([prepare_load(one, state_dict[str(number)], f"{who}[{number}]") for number, one in states])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all))})"


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
                check_drawable(sum(len(storage) for _, storage in sources))
                raise NoSampleable(
                    f"sample: expected a member of the ensemble that can give {rows} rows, got {n} that cannot."
                )
        at = [number / _FINE * ends[-1] for number in self._numbers(key, _FINE)]
        last = next(i for i, end in enumerate(ends) if end >= ends[-1])  # rounding must not choose one without weight
        return [min(bisect_right(ends, place), last) for place in at]

    def _numbers(self, key: int, below: int) -> list[int]:
        numbers = native.empty_rows(self.parts)
        native.uniform(plans.key_of(key, _CHOICE, 0), below, numbers)
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
