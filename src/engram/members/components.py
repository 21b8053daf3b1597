"""The storages, samplers and writers of an ensemble, one of each member, and the choice of members."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Generic, NoReturn, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from engram._support import native, tensordicts
from engram._support.checks import as_ints, as_numbers, check_count, check_type
from engram._support.nested import is_tensordict
from engram._support.state import Loads, check_keys, prepare_load, saved, typed
from engram._support.tensordicts import is_tensor_collection, tensordict_type
from engram.errors import NoSampleable
from engram.remote.fleet import plans
from engram.samplers._base import DeclaredSampler, check_drawable, declared, key_for
from engram.saved.checkpointers import IndexNames, LoadHook, SaveHook
from engram.saved.parts import PartSnapshot, Preparation
from engram.storages import Storage
from engram.store.sampled import SampledStorage
from engram.types import Commit, Sampler, StorageLoad, Traits, Writer
from engram.writers import _base

Change: TypeAlias = Callable[[object], object]
Sources: TypeAlias = Sequence[tuple[DeclaredSampler, SampledStorage]]
Odds: TypeAlias = Sequence[float] | Tensor | str | None


T = TypeVar("T")
MEMBERS = "ints, the numbers of members"


@contextmanager
def naming(member: int, after: str = "") -> Iterator[None]:
    """Errors of a member say its number, and what has come of the call."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised by member {member} of the ensemble.{after and ' ' + after}")
        raise


def asks_a_member(call: str, kind: type[Exception] = RuntimeError) -> Callable[..., NoReturn]:
    """A method of a buffer, or of a storage, that an ensemble does not have."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise kind(f"{call}: an ensemble has no rows of its own. Ask a member, ensemble[i], or ensemble.storage[i].")

    refuse.__doc__ = f"Raises ``{kind.__name__}``: it is asked of a member."
    return refuse


#: All members, in order.
ALL = slice(None)


def members_named(index: object, n: int, who: str) -> int | list[int]:
    """The member that an index names, or those.

    Args:
        index: an int, a slice, ``...``, or a list, range, array or tensor of ints.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: no index, or floats. RuntimeError: one of more than one dimension. IndexError: there is no such member, or none.
    """
    if index is Ellipsis:
        index = ALL
    if isinstance(index, slice):
        numbers = list(range(n))[index]
    else:
        if isinstance(index, bool) or not isinstance(index, int | list | range | np.ndarray | np.integer | Tensor):
            raise TypeError(f"{who}: expected an int, a slice, or ints that name members, got {type(index).__name__}.")
        named = as_numbers(f"{who}: members", index)
        if named.ndim > 1:
            raise RuntimeError(f"{who}: expected an int or a list of ints, got an index of shape {list(named.shape)}.")
        named = as_ints(f"{who}: members", named, MEMBERS)
        for member in named.reshape(-1).tolist():
            if not -n <= member < n:
                raise IndexError(f"{who}: expected a member in [0, {n}), got {member}.")
        if named.ndim == 0:
            return int(named) % n
        numbers = [member % n for member in named.tolist()]
    if not numbers:
        raise IndexError(f"{who}: expected one member at least, got none of {n}.")
    return numbers


def split_index(index: object, who: str) -> tuple[object, object | None]:
    """An index of members, and one of their rows. None: of members alone. Raises ``IndexError``: an empty tuple."""
    if not isinstance(index, tuple):
        return index, None
    if not index:
        raise IndexError(f"{who}: expected an index of members, got ().")
    rows = index[1:]
    return index[0], None if not rows else rows[0] if len(rows) == 1 else rows


def check_ids(ids: object, n: int, what: str) -> Tensor:
    """Numbers of members, int64 on the CPU, of any shape. Raises ``TypeError``: no ints. ``ValueError``: there is no such member."""
    numbers = as_ints(what, ids, MEMBERS)
    bad = numbers[(numbers < 0) | (numbers >= n)]
    if len(bad):
        raise ValueError(f"{what}: expected members in [0, {n}), got {int(bad[0])}.")
    return numbers


def routed(index: object, n: int, who: str) -> tuple[Tensor, Tensor]:
    """The members and their rows that an index of an ensemble names: int64 ``[*batch]`` and ``[*batch, ...]``.

    Args:
        index: what ``extend`` returned, or ``"index"`` of a batch: a TensorDict or dict with ``"buffer_ids"`` and ``"index"``.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: something else, or no ints. ValueError: no such member, or shapes that do not go together.
    """
    entries = index if isinstance(index, dict) or (is_tensor_collection(index) and is_tensordict(index)) else None
    ids, rows = (None, None) if entries is None else (entries.get("buffer_ids", None), entries.get("index", None))
    if ids is None or rows is None:
        got = type(index).__name__ if entries is None else f"one with {sorted(map(str, entries.keys()))}"
        raise TypeError(f"{who}: index: expected 'buffer_ids' and 'index', as of extend or batch['index'], got {got}.")
    members, named = check_ids(ids, n, f"{who}: buffer_ids"), as_numbers(f"{who}: index", rows)
    if named.shape[: members.ndim] != members.shape:
        raise ValueError(f"{who}: expected an index beginning with {list(members.shape)}, got {list(named.shape)}.")
    return members, named


class OfMembers(Generic[T]):
    """Components of one kind, one of each member."""

    #: One of each member.
    _all: tuple[T, ...]

    def _take(self, given: tuple[T, ...], kind: type, what: str) -> None:
        """Keep components. Raises ``TypeError``: there are none, or one is something else."""
        if not given or not all(isinstance(one, kind) for one in given):
            got = [type(one).__name__ for one in given] or "none"
            raise TypeError(f"{type(self).__name__}: expected {what}, got {got}.")
        self._all = given

    def __iter__(self) -> Iterator[T]:
        return iter(self._all)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all))})"


class OnePerMember(OfMembers[T]):
    """Components of one kind, and their states by the number of the member."""

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

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:  # noqa: ARG002 - each knows its own
        """Check a state. Raises what one of them raises for its own; nothing is changed."""
        who = type(self).__name__
        check_keys(state_dict, tuple(map(str, range(len(self)))), who)
        states = enumerate(self._all)
        return Loads([prepare_load(one, state_dict[str(number)], f"{who}[{number}]") for number, one in states])


class _Storages(OfMembers[Storage], Storage):
    """The storages of an ensemble, as far as a buffer asks them."""

    traits = Traits()

    @property
    def initialized(self) -> bool:
        return all(one.initialized for one in self._all)

    @property
    def max_size(self) -> int:
        return sum(one.max_size for one in self._all)

    @property
    def device(self) -> torch.device | None:
        devices = {one.device for one in self._all}
        return devices.pop() if len(devices) == 1 else None

    @property
    def write_count(self) -> int:
        return sum(one.write_count for one in self._all)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._all)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self._all)])

    def counters(self) -> dict[str, float]:
        return plans.summed([one.counters() for one in self._all])

    def next_number(self) -> int:
        """Each has tickets of its own."""
        return 0

    @property
    def shared(self) -> bool:
        return all(one.shared for one in self._all)

    def share(self, maker: str | None = None) -> None:  # noqa: ARG002 - each would take the other's place
        for one in self._all:
            one.share()

    def empty(self, *, keep_write_count: bool) -> None:
        for one in self._all:
            one.empty(keep_write_count=keep_write_count)
            one.notify(None, None)

    add = extend = set = asks_a_member("write")
    __setitem__ = asks_a_member("storage[index] = value")
    extent = asks_a_member("extent")
    contains = asks_a_member("contains")
    tickets_of = hold_nothing = field = locate = resolve = read = patch = pack = batch = asks_a_member("storage[index]")
    prepare = write = edit = prepare_at = asks_a_member("write")
    check_removal = remove = asks_a_member("remove")
    settled = priorities = consumption = groups = limit = keyed = asks_a_member("sampler")

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self, *, without: IndexNames = ()) -> dict[str, object]:  # noqa: ARG002 - as of one storage
        """The state of each, by its number."""
        return {str(number): one.state_dict() for number, one in enumerate(self._all)}

    def prepare_load(self, state_dict: dict[str, object]) -> StorageLoad:
        who = type(self).__name__
        check_keys(state_dict, tuple(map(str, range(len(self)))), who)
        states = [typed(state_dict, str(number), dict, who) for number in range(len(self))]
        loads = []
        for number, state in enumerate(states):
            with naming(number, "Nothing was changed."):
                loads.append(self._all[number].prepare_load(state))
        return _Loads(loads)

    def prepare_snapshot(self, *, without: IndexNames = (), whole: bool = True) -> Preparation[PartSnapshot]:  # noqa: ARG002 - as of one storage
        return super(Storage, self).prepare_snapshot()

    def close(self) -> None:
        for one in self._all:
            one.close()
        super().close()


class StorageEnsemble(_Storages):
    """The storages of an ensemble.

    Args:
        *storages: one of each member.
        transforms: applied to what :meth:`get` returns, one for each storage, of which some may be None.

    Raises:
        TypeError: no storages, another number of transforms, or one that cannot be called.

    >>> import torch
    >>> from engram import ReplayBuffer, LazyTensorStorage, StorageEnsemble
    >>> storage = StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(20))
    >>> len(storage), storage.max_size
    (2, 30)
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Change | None] | None = None) -> None:
        super().__init__()
        self._take(storages, Storage, "storages")
        who = type(self).__name__
        given: object = () if transforms is None else transforms
        changes = tuple(given) if isinstance(given, Iterable) else (given,)
        if not isinstance(given, Iterable) or not all(one is None or callable(one) for one in changes):
            raise TypeError(f"{who}: transforms: expected a list of callables or None, got {transforms!r:.80}.")
        if transforms is not None and len(changes) != len(storages):
            raise TypeError(
                f"{who}: transforms: expected {len(storages)}, one for each storage, got {len(changes)}. None stands for no transform."
            )
        self._transforms = None if transforms is None else changes

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def storages(self) -> tuple[Storage, ...]:
        """One of each member."""
        return self._all

    _storages = storages  # as TorchRL's calls them

    @property
    def transforms(self) -> tuple[Change | None, ...] | None:
        """What is applied to the rows of each; None: nothing."""
        return self._transforms

    def flatten(self) -> StorageEnsemble:
        """The storages with ``ndim`` 1, around the same rows, as :meth:`TensorStorage.flatten`.

        >>> from engram import ListStorage, StorageEnsemble
        >>> len(StorageEnsemble(ListStorage(12), ListStorage(12)).flatten())
        2
        """
        return StorageEnsemble(*(one.flatten() for one in self._all), transforms=self._transforms)

    def register_save_hook(self, hook: SaveHook) -> None:
        """As of each of the storages: ``hook`` sees the rows of one after the other.

        >>> from engram import LazyTensorStorage, StorageEnsemble, TED2Flat
        >>> StorageEnsemble(LazyTensorStorage(10)).register_save_hook(TED2Flat())
        """
        for one in self._all:
            one.register_save_hook(hook)

    def register_load_hook(self, hook: LoadHook) -> None:
        """As of each of the storages: ``hook`` sees the rows of one after the other.

        >>> from engram import Flat2TED, LazyTensorStorage, StorageEnsemble
        >>> StorageEnsemble(LazyTensorStorage(10)).register_load_hook(Flat2TED())
        """
        for one in self._all:
            one.register_load_hook(hook)

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def get(self, index: object) -> list[tuple[int, object]]:
        """Rows by number: ``[(member, rows), …]``, where the rows went through its transform.

        Args:
            index: a TensorDict or dict with ``"buffer_ids"`` ``[n]`` and ``"index"`` ``[n, rows]``, as ``SamplerEnsemble.sample``
                returns it.

        Raises:
            TypeError: something else. ValueError: no such member. RowError: no such row.

        >>> import torch
        >>> from engram import ListStorage, StorageEnsemble
        >>> storage = StorageEnsemble(ListStorage(4), ListStorage(4))
        >>> storage[1].set(range(2), ["a", "b"])
        >>> storage.get({"buffer_ids": torch.tensor([1]), "index": torch.tensor([[1, 0]])})
        [(1, ['b', 'a'])]
        """
        ids, rows = routed(index, len(self._all), "get")
        return [(member, self._read(member, one)) for member, one in zip(ids.tolist(), rows, strict=True)]

    def _read(self, member: int, rows: object) -> object:
        with naming(member):
            data = self._all[member].get(rows)
            change = None if self._transforms is None else self._transforms[member]
            return data if change is None else change(data)

    def _rows(self, member: int, rows: object) -> object:
        with naming(member):
            return self._all[member][rows]

    def __getitem__(self, index: object) -> object:
        """``storage[i]``: one of the storages; ``storage[i, j]``: rows of it; ``storage[[i, k]]``: an ensemble of some;
        ``storage[:, j]``: a list of the rows of each. Raises as ``ReplayBufferEnsemble[index]``.
        """
        of_members, rows = split_index(index, type(self).__name__)
        named = members_named(of_members, len(self._all), type(self).__name__)
        if isinstance(named, int):
            return self._all[named] if rows is None else self._all[named][rows]
        if rows is not None:
            return [self._rows(member, rows) for member in named]
        some = None if self._transforms is None else [self._transforms[member] for member in named]
        return StorageEnsemble(*(self._all[member] for member in named), transforms=some)


class _Loads(Loads):
    """The loads of all storages."""

    capacity = 0

    def allocate(self) -> None:
        """Each does when it is committed."""


SAMPLEABLE = "sampleable"
#: Of a draw: the number that the choice of members has, which no member has.
_CHOICE = 1 << 40


def _drawable(source: DeclaredSampler, storage: SampledStorage, rows: int) -> float:
    """What a member could draw from now, rows or windows; 0 for one that could not give so many rows."""
    if not source.can_sample(storage, rows):
        return 0.0
    masses = source.masses(storage) if source.traits.draws_windows else None
    return float(source.drawable(storage) if masses is None else masses.total)


class _Samplers(OnePerMember[Sampler], DeclaredSampler):
    """The samplers of an ensemble and the choice of members, as far as a buffer asks them. Raises as :class:`SamplerEnsemble`."""

    traits = Traits(has_epochs=False, listens=False)

    def __init__(
        self, *samplers: Sampler, p: Odds = None, sample_from_all: bool = False, num_buffer_sampled: int | None = None
    ) -> None:
        who = type(self).__name__
        self._take(samplers, Sampler, "samplers")
        self._declared = tuple(map(declared, samplers))
        if sample_from_all and p is not None:
            raise RuntimeError(f"{who}: expected one of p and sample_from_all, got both.")
        #: As it was given; None: as many as there are members.
        self.asked_parts = num_buffer_sampled
        if num_buffer_sampled is not None:
            self.asked_parts = check_count(f"{who}: num_buffer_sampled", num_buffer_sampled)
        self._from_all = bool(sample_from_all)
        self._parts = len(samplers) if self.asked_parts is None or self._from_all else self.asked_parts
        self._weigh(p)

    def _weigh(self, p: Odds) -> None:
        """Choose by other weights from now on. Raises ``TypeError``, ``ValueError``."""
        what, n = f"{type(self).__name__}: p", len(self)
        self._p: Tensor | str | None
        if p is None or isinstance(p, str):
            if p not in (None, SAMPLEABLE):
                raise ValueError(f"{what}: expected weights or {SAMPLEABLE!r}, got {p!r}.")
            self._p, self._ends = p, list[float]()
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
        self._p = weights / weights.sum()
        self._ends = list(accumulate(self._p.tolist()))

    def rows_of_part(self, batch_size: int) -> int:
        """Rows of each part of a batch. Raises ``ValueError``: the batch cannot be divided."""
        rows, rest = divmod(batch_size, self._parts)
        if rest or not rows:
            raise ValueError(
                f"sample: batch_size: expected a multiple of num_buffer_sampled={self._parts}, got {batch_size}. Draw "
                f"{max(rows, 1) * self._parts} rows, or set num_buffer_sampled."
            )
        return rows

    def chosen(self, key: int, rows: int, sources: Sources) -> list[int]:
        """The member of each part of a batch, of so many rows each. Raises ``NoSampleable``: none can give a part."""
        n, ends = len(self), self._ends
        if self._from_all:
            return list(range(n))
        if self._p is None:
            return self._numbers(key, n)
        if isinstance(self._p, str):
            ends = list(accumulate(_drawable(source, storage, rows) for source, storage in sources))
            if not ends[-1]:
                check_drawable(sum(len(storage) for _, storage in sources))
                raise NoSampleable(f"sample: expected a member that has {rows} rows, got {n} that have not.")
        # A few parts: NumPy, as in plans.chosen, would take longer than the rest of the choice.
        at = [number / plans.FINE * ends[-1] for number in self._numbers(key, plans.FINE)]
        last = next(i for i, end in enumerate(ends) if end >= ends[-1])  # rounding must not choose one without weight
        return [min(bisect_right(ends, place), last) for place in at]

    def _numbers(self, key: int, below: int) -> list[int]:
        numbers = native.empty_rows(self._parts)
        native.uniform(plans.key_of(key, _CHOICE, 0), below, numbers)
        return numbers.tolist()

    def ready(self, sources: Sources, batch_size: int) -> bool:
        """Whether a batch could be drawn now from these samplers and storages of the members."""
        if batch_size % self._parts or batch_size < 1:
            return False
        able = [source.can_sample(storage, batch_size // self._parts) for source, storage in sources]
        if self._from_all:
            return all(able)
        likely = self._p.tolist() if isinstance(self._p, Tensor) else [1.0] * len(able)
        return any(weight > 0 and can for weight, can in zip(likely, able, strict=True))

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        return self.ready(self.sources(storage), batch_size)

    def drawable(self, storage: SampledStorage) -> int:
        return sum(source.drawable(one) for source, one in self.sources(storage))

    def sources(self, storage: object) -> Sources:
        """Each sampler with its storage. Raises ``TypeError``: no ensemble. ``ValueError``: of another number of members."""
        storage = check_type("sample", storage, StorageEnsemble, "a StorageEnsemble")
        if len(storage) != len(self):
            raise ValueError(f"sample: expected {len(self)} storages, one for each sampler, got {len(storage)}.")
        return list(zip(self._declared, storage.storages, strict=True))

    def some(self, members: Sequence[int]) -> Self:
        """An ensemble of some of them, with as many parts in a batch. Raises ``ValueError``: all of these have weight 0."""
        p = self._p[list(members)] if isinstance(self._p, Tensor) else self._p
        samplers = (self._all[member] for member in members)
        return type(self)(*samplers, p=p, sample_from_all=self._from_all, num_buffer_sampled=self.asked_parts)

    def __repr__(self) -> str:
        p = self._p.tolist() if isinstance(self._p, Tensor) else self._p
        how = "sample_from_all=True" if self._from_all else f"p={p!r}, num_buffer_sampled={self._parts}"
        return f"{type(self).__name__}({', '.join(map(repr, self._all))}, {how})"


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

    #: 1.0: each member has its own, ``sampler[i].default_priority``.
    default_priority = 1.0

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """One of each member."""
        return self._all

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch."""
        return self._parts

    @property
    def sample_from_all(self) -> bool:
        """Whether each member gives its part of every batch."""
        return self._from_all

    @property
    def p(self) -> Tensor | str | None:
        """How likely each member is: a tensor whose sum is 1, ``"sampleable"``, or None."""
        return self._p

    @p.setter
    def p(self, p: Odds) -> None:
        self._weigh(p)

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

    def sample(
        self, storage: StorageEnsemble, batch_size: int
    ) -> tuple[tensordicts.TensorDict, tensordicts.TensorDict]:
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
        rows = self.rows_of_part(batch_size)
        key = key_for(*(one for _, one in sources)).value
        ids = self.chosen(key, rows, sources)
        draws = []
        for part, member in enumerate(ids):
            source, one = sources[member]
            with naming(member):
                check_drawable(one.extent().size)
                source.bind(one)
                draw = source.draw(one.extent(), rows, plans.key_of(key, member, part))
            if source.traits.consumes:
                source.were_read(draw)
            draws.append(draw)
        index = {"index": torch.stack([draw.rows for draw in draws]), "buffer_ids": torch.tensor(ids, device="cpu")}
        shared = [entry for entry in draws[0].info if all(entry in draw.info for draw in draws)]
        info = {entry: torch.stack([torch.as_tensor(draw.info[entry]) for draw in draws]) for entry in shared}
        kind, batch = tensordict_type(), [len(ids)]
        return kind(index, batch_size=batch), kind(info, batch_size=batch)


class _Writers(OnePerMember[Writer], _base.NativeWriter):
    """The writers of an ensemble, as far as a buffer asks them."""

    traits = Traits()

    def add(self, *_: object, **__: object) -> NoReturn:
        """Refuses: each member writes for itself."""
        raise NotImplementedError(
            f"{type(self).__name__}: expected a member to write to: ensemble[i].extend(data), or an ensemble that was made with "
            "routing_key or routing_dim."
        )

    extend = place = add


class WriterEnsemble(_Writers):
    """The writers of an ensemble, each of which writes to the storage of its member.

    Args:
        *writers: one of each member.

    Raises:
        TypeError: no writers.

    >>> from engram import RoundRobinWriter, WriterEnsemble
    >>> writer = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter(track_generations=True))
    >>> len(writer), writer.tracks_generations
    (2, False)
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self._take(writers, Writer, "writers")
        self._placers = tuple(map(_base.declared, writers))

    @property
    def writers(self) -> tuple[Writer, ...]:
        """One of each member."""
        return self._all

    @property
    def tracks_generations(self) -> bool:
        """Whether all of them do."""
        return all(placer.traits.tracks_tickets for placer in self._placers)

    @property
    def write_count(self) -> int:
        """Rows written to all of the storages since each was last emptied."""
        return sum(placer.write_count for placer in self._placers)

    def register_storage(self, storage: object) -> None:
        """Set the storage of each writer that has another one.

        Raises:
            TypeError: no :class:`StorageEnsemble`. ValueError: not a storage for each writer. What a writer raises to refuse its storage.

        >>> from engram import LazyTensorStorage, RoundRobinWriter, StorageEnsemble, WriterEnsemble
        >>> writer = WriterEnsemble(RoundRobinWriter())
        >>> writer.register_storage(StorageEnsemble(LazyTensorStorage(10)))
        >>> writer.write_count
        0
        """
        who = type(self).__name__
        storage = check_type(who, storage, StorageEnsemble, "a StorageEnsemble")
        if len(storage) != len(self._all):
            raise ValueError(f"{who}: expected {len(self._all)} storages, one for each writer, got {len(storage)}.")
        for number, (placer, one) in enumerate(zip(self._placers, storage.storages, strict=True)):
            if placer._storage is not one:  # noqa: SLF001 - of the family
                with naming(number):
                    placer.register_storage(one)
        super().register_storage(storage)

    def generations_of(self, index: object) -> Tensor:
        """Ticket numbers of rows, int64, of the shape of ``"buffer_ids"``; -1 as each writer says it.

        Args:
            index: what ``extend`` of an ensemble returned, or ``"index"`` of a batch.

        Raises ``TypeError``, ``ValueError``: no such index, or no such member.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, RoundRobinWriter
        >>> member = ReplayBuffer(storage=LazyTensorStorage(100), writer=RoundRobinWriter(track_generations=True))
        >>> _ = member.extend(torch.zeros(3))
        >>> rows = {"buffer_ids": torch.tensor([0, 0]), "index": torch.tensor([2, 50])}
        >>> ReplayBufferEnsemble(member).writer.generations_of(rows).tolist()
        [3, -1]
        """
        ids, rows = routed(index, len(self._all), "generations_of")
        rows = rows.reshape(ids.numel(), *rows.shape[ids.ndim :])
        numbers = torch.full((ids.numel(),), -1, dtype=torch.int64, device="cpu")
        for share in plans.shares(self._placers, ids.reshape(-1), rows):
            found = share.member.generations_of(share.rows)
            numbers[share.at] = found.to("cpu").reshape(len(share.at), -1)[:, 0]
        return numbers.reshape(ids.shape)
