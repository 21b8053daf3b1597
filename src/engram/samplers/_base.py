"""What engram's own samplers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias, cast

import torch

from engram._support import fork, overrides, words
from engram._support.checks import as_numbers
from engram._support.field_paths import FieldPath, as_paths, checked_path, public
from engram._support.state import prepare_load, saved
from engram._support.tensordicts import is_tensor_collection
from engram.errors import EMPTY, NoSampleable, RowError
from engram.saved.parts import Component, adopt
from engram.store.blocks import Key, Masses
from engram.store.sampled import SampledStorage
from engram.types import Commit, Declared, Draw, Entry, Extent, Info, NativeBatch, Sampler, Shown, Traits, Write

#: Says which rows of a draw are handed out: the draw with the tickets that they have now, and positions.
Accept: TypeAlias = Callable[[Draw], tuple[Draw, torch.Tensor]]


#: Draws whose rows are all refused, after which no other is made.
MAX_DRAWS = 1000


def check_drawable(size: int) -> None:
    """Raise ``NoSampleable`` if no row is live."""
    if size < 1:
        raise NoSampleable(EMPTY)


def picked(draw: Draw, places: torch.Tensor) -> Draw:
    """Some rows of a draw whose tickets are known."""
    assert draw.tickets is not None  # as the caller knows
    shape = draw.rows.shape
    info = {k: v[places] if isinstance(v, torch.Tensor) and v.shape[:1] == shape else v for k, v in draw.info.items()}
    return Draw(draw.rows[places], draw.tickets[places], info)


def refuse_batch(index: object, priority: object) -> None:
    """Raise ``TypeError`` for a batch in place of the rows of ``update_priority``; a whole ``info`` is taken with priorities."""
    if is_tensor_collection(index) or (isinstance(index, dict) and (priority is None or "index" not in index)):
        raise TypeError(
            f"update_priority: expected rows and their priorities, got a {type(index).__name__}. For a sampled TensorDict: "
            'update_tensordict_priority(batch). For others: update_priority(info["index"], …), info of sample(return_info=True).'
        )


class DeclaredSampler(Component):
    """What a buffer asks of a sampler. Of one that follows the protocol only, :func:`declared` makes one."""

    part = "sampler"
    traits = Traits(has_epochs=False, listens=False, takes_priorities=False)

    #: Whether the last batch ended an epoch. The buffer sets it.
    ran_out = False
    #: Whether rows that do not fill a batch are skipped at the end of an epoch.
    drop_last = False
    #: After how many draws a row is used up; None: never.
    draws_of_a_row: int | None = None
    #: Whether draws are a ``sample`` of the user's own, of TorchRL's form.
    samples = False
    #: Whether it draws on the accelerator that the rows are on.
    draws_on_device = False
    #: Keys of the fields that ``draw`` is handed; None: it is handed none.
    reads: object = None
    #: Keys of the entries of :meth:`sample_natively`'s info that are fields of the batch, too, and whether ``[B, 1]`` is ``[B]`` there.
    computed_keys: Mapping[Entry, bool] = {}
    #: The kind of the store's index :attr:`index_name`, whose content the state has; None: there is none.
    _index_kind: str | None = None
    index_name: str

    @property
    def max_size(self) -> int:
        """How many rows it can draw from; 0: as many as its storage has."""
        return 0

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """Choose rows, as :meth:`engram.Sampler.draw` has it.

        Args:
            extent: what is live now.
            batch_size: rows that are asked for.
            key: 64 random bits, from which the draw follows: the same extent, state and key give the same rows.

        Returns:
            Rows, int64 ``[batch_size]``; fewer where rows are used up or an epoch ends.

        Raises:
            NoSampleable: no row can be drawn (a ``RuntimeError``).

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=RandomSampler())
        >>> _ = rb.extend(torch.arange(10))
        >>> first, again = (rb.sampler.draw(rb.storage.extent(), 4, key=7) for _ in range(2))
        >>> first.rows.shape, torch.equal(first.rows, again.rows)
        (torch.Size([4]), True)
        """
        raise NotImplementedError

    def draw_again(self, extent: Extent, drawn: Draw, moved: list[int], key: int) -> tuple[list[int], Draw]:
        """Others for the places of a draw whose rows moved, and for those that must be drawn together with them: which, and what.

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=RandomSampler())
        >>> _ = rb.extend(torch.arange(10))
        >>> extent = rb.storage.extent()
        >>> drawn = rb.sampler.draw(extent, 4, key=7)
        >>> places, others = rb.sampler.draw_again(extent, drawn, [1, 3], key=8)
        >>> places, others.rows.shape
        ([1, 3], torch.Size([2]))
        """
        if self.samples:
            moved = list(range(len(drawn.rows))) if self.traits.draws_windows else moved
        fresh = self.draw(extent, len(moved), key)
        return moved, fresh if fresh.rows.ndim == 1 else fresh._replace(rows=fresh.rows.reshape(-1))

    def draw_within(
        self, extent: Extent, batch_size: int, key: int, accept: Accept, before: torch.Tensor
    ) -> tuple[Draw, torch.Tensor]:
        """:meth:`draw`, of which only some rows are handed out: what was drawn, and their positions, int64. The others are given back.

        Args:
            extent, batch_size, key: as of :meth:`draw`.
            accept: returns the draw with the tickets that its rows have now, and positions of those that are handed out.
            before: int64: rows that the batch has already.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler())
        >>> _ = rb.extend(torch.arange(4))
        >>> first = lambda draw: (draw, torch.tensor([0]))
        >>> _, places = rb.sampler.draw_within(rb.storage.extent(), 3, 7, first, torch.empty(0, dtype=torch.int64))
        >>> places.tolist(), len(rb)
        ([0], 3)
        """
        draw = self._draw_beside(before, extent, batch_size, key)
        try:
            settled, places = accept(draw)
        except BaseException:
            self.give_back(draw, draw.rows[:0])
            raise
        self.give_back(settled, places)
        return draw, places

    def _draw_beside(self, before: torch.Tensor, extent: Extent, batch_size: int, key: int) -> Draw:
        """A draw of a batch that has rows already."""
        return self.draw(extent, batch_size, key)

    def give_back(self, draw: Draw, places: torch.Tensor) -> None:
        """The rows of a draw at other places than these are not handed out: another draw may take them.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler())
        >>> _ = rb.extend(torch.arange(4))
        >>> drawn = rb.sampler.draw(rb.storage.extent(), 3, key=7)
        >>> rb.sampler.give_back(drawn, torch.tensor([0, 1]))
        >>> len(rb)
        2
        """
        told = type(self).were_read is not DeclaredSampler.were_read
        if told and draw.tickets is not None and len(places) < len(draw.rows):
            others = torch.ones(len(draw.rows), dtype=torch.bool, device="cpu")
            others[places] = False
            self.were_read(Draw(draw.rows[others], draw.tickets[others]), failed=True)

    @property
    def rows_of_unit(self) -> int:
        """How many rows are drawn together, and handed out or not: those of a group."""
        return 1

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn; raises to refuse it. A buffer calls it before it draws; programs need not.

        A sampler that serves several storages is bound again for each.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler
        >>> sampler = PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4)
        >>> sampler.bind(LazyTensorStorage(100))
        Traceback (most recent call last):
        ValueError: PrioritizedSampler: max_capacity: expected at least the storage's 100 rows, got 10.
        """

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """:meth:`draw` and the rows' data in one native call, if the traits say so: ``(columns, rows, info)``.

        Args:
            storage: one of tensors, with rows.
            key: 64 random bits.
            n: rows.
            numbered: the info has tickets.
            shown: ``"nothing"``: the rows may be None, and the info need only have ``computed_keys``.

        Returns:
            One tensor ``[n, *shape]`` per field, in the order of the schema, copied; rows, int64 ``[n]``; and what the batch is said to be.

        Raises:
            NoSampleable: no row can be drawn. NotImplementedError: the traits do not say so.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> from engram.store.blocks import Key
        >>> sampler = PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
        >>> _ = rb.extend(torch.arange(10) * 10)
        >>> columns, rows, info = sampler.sample_natively(rb.storage, Key.of(7), 4)
        >>> torch.equal(columns[0], rows * 10), sorted(info)
        (True, ['index_generation', 'priority_weight'])
        """
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes; or a buffer that draws from it is closed.

        A buffer calls it. The sampler finds its index again before the next draw, with what it held.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(max_capacity=10, alpha=1.0, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
        >>> _ = rb.extend(torch.arange(3))
        >>> sampler.update_priority([2], [9.0])
        >>> _ = rb.share()  # moves the rows, and tells the sampler
        >>> (sampler.priorities().leaves(3) > 8).tolist()
        [False, False, True]
        """

    def observe(self, write: Write | None, data: object) -> None:
        """Hear of rows that were written or edited; ``write=None``: the buffer was emptied.

        The storage calls it, after each write of this process. A sampler that the store keeps an index for does nothing here; one with an
        epoch of its own ends it when the buffer was emptied.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.sampler.epoch(rb.storage)[1]  # rows are left
        2
        >>> rb.empty()  # tells the sampler
        >>> _ = rb.extend(torch.arange(6))
        >>> len(list(rb))  # a whole epoch
        3
        """

    def update_priority(self, index: object, priority: object, *, generation: torch.Tensor | None = None) -> None:
        """No effect, with a warning: this sampler has no priorities.

        >>> import warnings
        >>> from engram import RandomSampler
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     RandomSampler().update_priority([0], [1.0])
        >>> print(said[0].message)
        RandomSampler has no priorities: update_priority has no effect.
        """
        words.warn(f"{type(self).__name__} has no priorities: update_priority has no effect.")

    def check_priority(self, priority: object, n: int) -> None:
        """Raise as :meth:`update_priority` would for priorities of ``n`` rows.

        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> rb.sampler.check_priority([1.0, -1.0], 2)
        Traceback (most recent call last):
        engram.errors.PriorityError: ...
        """

    def reduced(self, value: torch.Tensor) -> torch.Tensor:
        """Priorities ``[n, ...]`` as one number per row, ``[n]``: the largest."""
        return value.flatten(1).amax(1)

    def mark_update(self, index: object) -> None:
        """Rows were rewritten: they get the default priority again. No effect: this sampler has no priorities.

        >>> from engram import SliceSampler
        >>> SliceSampler(num_slices=2).mark_update([0, 1])
        """

    def drawable(self, storage: SampledStorage) -> int:
        """How many rows may be drawn.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.sampler.drawable(rb.storage)
        1
        """
        return len(storage)

    def masses(self, storage: SampledStorage) -> Masses | None:
        """What draws over several stores choose this one by. None: they cannot.

        Returns:
            ``total``, in proportion to which a store is chosen; ``least``, the smallest leaf above zero of priorities, 1.0 of
            others; ``live``, the number of live rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler())
        >>> _ = rb.extend(torch.arange(4))
        >>> rb.sampler.masses(rb.storage)
        Masses(total=4, least=1.0, live=4)
        """
        return None

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        """The key of the newest epoch, and how much of it is left: 0 where the next draw begins another one.

        A sampler without epochs says ``(0, 0)``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
        >>> _ = rb.extend(torch.arange(10))
        >>> _ = rb.sample()
        >>> key, left = rb.sampler.epoch(rb.storage)
        >>> left
        7
        """
        return 0, 0

    def rows_together(self) -> tuple[int, int]:
        """Steps of each window, and how many of a batch size it is; zeros: windows differ, or follow from the batch size.

        >>> from engram import RandomSampler, SliceSampler
        >>> RandomSampler().rows_together(), SliceSampler(slice_len=4).rows_together()
        ((1, 1), (4, 4))
        """
        return 1, 1

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        """Whether a draw of this size would succeed now.

        Args:
            storage: the one that would be drawn from.
            batch_size: rows, or windows, that would be asked for.

        Raises:
            As drawing does, but for ``NoSampleable``.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(3))
        >>> before = rb.sampler.can_sample(rb.storage, 3)
        >>> _ = rb.sample()
        >>> before, rb.sampler.can_sample(rb.storage, 3)
        (True, False)
        """
        return len(storage) > 0 and batch_size > 0

    @property
    def chooser(self) -> DeclaredSampler:
        """The sampler that chooses the rows: this one, unless it is around another."""
        return self

    def draw_among(self, rows: torch.Tensor, n: int, key: int) -> Draw | None:
        """Draw ``n`` of these rows, int64 ``[m]``, as :meth:`draw` draws of all that are live; None: it cannot say how.

        Each of the draws is independent of the others.

        Raises:
            NoSampleable: none of them can be drawn.

        >>> import torch
        >>> from engram import RandomSampler
        >>> set(RandomSampler().draw_among(torch.tensor([3, 5]), 20, key=7).rows.tolist())
        {3, 5}
        """
        return None

    def were_read(self, draw: Draw, *, failed: bool = False) -> None:
        """The rows of a draw were read, and may be written over where they are used up. Told to one that ``consumes``.

        ``failed``: they were not, as reading them raised, or they did not fit into the batch: they count as drawn once less, and another
        draw takes them. Told to every sampler.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler())
        >>> _ = rb.extend(torch.arange(3))
        >>> drawn = rb.sampler.draw(rb.storage.extent(), 3, key=7)
        >>> len(rb.sampler.used_rows(10))  # none is written over before it was read
        0
        >>> rb.sampler.were_read(drawn)
        >>> rb.sampler.used_rows(10).tolist()
        [0, 1, 2]
        """

    def used_rows(self, n: int) -> torch.Tensor:
        """int64: live rows that will never be drawn again, ``n`` at most. Asked of one that ``consumes``."""
        raise NotImplementedError

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Names and kinds of the store's indexes whose content the state has: a buffer's state has it there only."""
        return () if self._index_kind is None else ((self.index_name, self._index_kind),)


def key_for(*storages: SampledStorage, generator: torch.Generator | None = None) -> Key:
    """A key of torch's default generator, or of another, for a draw of this process alone from storages."""
    key = Key()
    key.draw(generator=generator)
    key.mix(fork.stream(*(0 if it.memory is None else it.memory.participant for it in storages)))
    return key


class NativeSampler(DeclaredSampler, metaclass=ABCMeta):
    """Base of the samplers that draw in the native core, with TorchRL's verbs."""

    #: Priority of rows without one.
    default_priority = 1.0
    #: Drives a :meth:`sample` of the user's own, by the key of the draw.
    _rng: torch.Generator | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """A ``sample`` of the user's own draws in place of ``draw``. One that calls ``super().sample()`` gets the draws of its parent."""
        super().__init_subclass__(**kwargs)
        if overrides.overrides(cls, "update_priority"):
            cls.update_priority = _with_generation(cls.update_priority)  # type: ignore[method-assign]
        if not overrides.overrides(cls, "sample") or overrides.overrides(cls, "draw") or cls.draw is _draw_by_sample:
            return
        cls._draw_apart, cls.draw, cls.samples = cls.draw, _draw_by_sample, True  # type: ignore[method-assign]
        cls.traits = cls.traits.without({"draw"})

    def bind(self, storage: SampledStorage) -> None:
        self._storage: Any = storage

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_storage": None}

    def _draw_apart(self, extent: Extent, batch_size: int, key: int) -> Draw:
        """:meth:`draw`, whatever takes its place."""
        return self.draw(extent, batch_size, key)

    @property
    def prioritized(self) -> bool:
        """Whether draws are by priority."""
        return self.traits.prioritized

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """No effect: this sampler has no priorities."""

    def add(self, index: object) -> None:
        """No effect, because rows are known from the store."""

    def extend(self, index: object) -> None:
        """No effect, because rows are known from the store."""

    def sample(self, storage: SampledStorage, batch_size: int) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], Info]:
        """Draw from a storage with a key of torch's default generator: ``(int64 [B], info)``."""
        draw = self._draw_apart(storage.extent(), batch_size, key_for(storage, generator=self._rng).value)
        if self.traits.consumes:
            self.were_read(draw)
        return draw.rows, dict(draw.info)


# ---- samplers with a ``sample`` of the user's own -----------------------------------------------------------------------

_one_by_one = fork.rlock()


def _draw_by_sample(self: Any, extent: Extent, batch_size: int, key: int) -> Draw:
    """Rows of the user's ``sample(storage, batch_size)``, which has a generator of the key as ``_rng``.

    Raises ``TypeError``, ``RowError``: it returned none.
    """
    inner, storage = cast("Any", _said(self, "_inner", self)), self._storage
    call = f"sample: {type(inner).__name__}.sample"
    with _one_by_one:
        before, inner._rng = _said(inner, "_rng"), torch.Generator().manual_seed(key)  # noqa: SLF001 - TorchRL's
        try:
            drawn = inner.sample(storage, batch_size)
        finally:
            inner._rng = before  # noqa: SLF001
    if not isinstance(drawn, tuple) or len(drawn) != 2 or not isinstance(drawn[1], dict):
        raise TypeError(f"{call}: expected (index, info), as TorchRL's samplers return them, got {drawn!r:.80}.")
    index, said = drawn
    if isinstance(index, tuple):
        index = index[0] if len(index) == 1 else torch.stack([as_numbers(call, one).to("cpu") for one in index], -1)
    rows = as_numbers(call, index).to("cpu")
    if storage.ndim > 1 and rows.ndim > 1:  # coordinates
        rows = storage.rows_at(rows)
    if rows.is_floating_point() or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < extent.capacity):
        raise RowError(f"{call}: expected rows, ints in [0, {extent.capacity}), got {rows.tolist()!r:.80}.")
    rows = rows.to(torch.int64).reshape(rows.shape or (1,))
    info: Info = {}
    for name, value in ((name, torch.as_tensor(value)) for name, value in said.items() if name != "index"):
        shape = *value.shape, *(1,) * (rows.ndim - value.ndim)
        info[name] = value.reshape(shape).expand(*rows.shape, *shape[rows.ndim :])
    fixed = self.traits.consumes or self.traits.draws_windows  # no other row may take the place of one
    return Draw(rows, storage.tickets_of(rows.reshape(-1)) if fixed else None, info)


def _with_generation(theirs: Callable[..., None]) -> Callable[..., None]:
    """An ``update_priority`` of TorchRL's form, which knows no generations: rows that were written since become -1, passed over."""
    if {"generation", "kwargs"} & set(inspect.signature(theirs).parameters):
        return theirs

    @functools.wraps(theirs)
    def update_priority(
        self: Any, index: Any, priority: object, *, generation: object = None, **storage: object
    ) -> None:
        if generation is not None:
            rows = as_numbers("update_priority: index", index[0] if isinstance(index, tuple) else index).to("cpu")
            held = self._storage.writes_of(rows, self._storage.tickets_of(rows))
            index = rows.where(held == as_numbers("update_priority: generation", generation).to("cpu"), -1)
        theirs(self, index, priority, **storage)

    return update_priority


class SamplerAround(DeclaredSampler):
    """A sampler around another one, :attr:`sampler`. Attributes that it does not have are those of the other one."""

    #: What a store's record may name.
    known: ClassVar[dict[str, type[DeclaredSampler]]] = {}
    #: :attr:`sampler`, with all that is asked of one.
    _source: DeclaredSampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "sampler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.__dict__["sampler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if name.startswith("_") or "sampler" not in self.__dict__ or isinstance(own, property):
            super().__setattr__(name, value)
        elif name in self.__dict__ or hasattr(type(self), name) or not hasattr(self.sampler, name):
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be set. Make a new expander, and give it to rb.set_sampler()."
            )
        else:
            setattr(self.sampler, name, value)

    def observe(self, write: Write | None, data: object) -> None:
        self.sampler.observe(write, data)

    def update_priority(self, index: object, priority: object, *, generation: torch.Tensor | None = None) -> None:
        """Calls that of :attr:`sampler`."""
        self.sampler.update_priority(index, priority, generation=generation)

    @property
    def ran_out(self) -> bool:
        """Whether the last batch ended an epoch of :attr:`sampler`."""
        return self._source.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._source.ran_out = value

    @property
    def drop_last(self) -> bool:
        """That of :attr:`sampler`."""
        return self._source.drop_last

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        self.sampler.drop_last = value

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Those of :attr:`sampler`."""
        return self._source.own_indexes

    def state_dict(self) -> dict[str, object]:
        """That of :attr:`sampler`."""
        return self._source.state_dict()

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        return self._source.prepare_load(state_dict, capacity)

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        return self._source.epoch(storage)

    def rows_together(self) -> tuple[int, int]:
        """Those of :attr:`sampler`."""
        return self._source.rows_together()

    def check_priority(self, priority: object, n: int) -> None:
        """Calls that of :attr:`sampler`."""
        self._source.check_priority(priority, n)

    def mark_update(self, index: object) -> None:
        self._source.mark_update(index)

    @property
    def chooser(self) -> DeclaredSampler:
        """The sampler inside of all others, which chooses the rows."""
        return self._source.chooser

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all: a sampler of the user's own is not noted in a store."""
        inner = self.sampler
        known = self.known.get(type(inner).__name__) is type(inner)
        return known and bool(inner.recordable)

    def _inner_config(self) -> dict[str, object]:
        """The argument ``sampler`` of :meth:`config`."""
        known = self.recordable
        return {"sampler": {"type": type(self.sampler).__name__, "config": self.sampler.config()} if known else {}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """What a store noted, with the sampler inside."""
        inner, arguments = cls.known[config["sampler"]["type"]], config["sampler"]["config"]
        rest = {name: value for name, value in config.items() if name != "sampler"}
        return cls(inner.from_config(arguments), **rest)  # type: ignore[call-arg]  # each has a sampler first

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.config().items() if k != "sampler" and v is not None}
        return f"{type(self).__name__}({', '.join([repr(self.sampler), *(f'{k}={v!r}' for k, v in shown.items())])})"


#: Methods of a user's sampler that a buffer calls, if they are there.
_METHODS = ("observe", "update_priority", "bind", "moved", "can_sample", "check_priority", "mark_update")


def _said(inner: object, name: str, default: object = None) -> object:
    """An attribute that a user's sampler may have."""
    return getattr(inner, name, default)


class _Adapted(DeclaredSampler):
    """A sampler that follows the protocol only, with the rest of what a buffer asks of one.

    The optional attributes of such a sampler are looked up here and nowhere else.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        own = _said(inner, "traits")
        if not isinstance(own, Traits):
            listens, prioritized = bool(_said(inner, "listens", True)), _said(inner, "prioritized")
            takes = prioritized is None or bool(prioritized)
            own = Traits(listens=listens, prioritized=bool(prioritized), takes_priorities=takes)
        #: What counts is its ``draw``.
        self.traits = own._replace(draws_uniformly=False, reads_natively=False)
        adopt(self, inner, _METHODS)

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        return self._checked(self._inner.draw(extent, batch_size, key))

    def _checked(self, draw: Draw) -> Draw:
        """What was drawn. Raises ``TypeError``: no ``Draw`` of tensors."""
        rows, tickets = _said(draw, "rows", draw), _said(draw, "tickets")
        if rows is not draw and isinstance(rows, torch.Tensor) and isinstance(tickets, torch.Tensor | None):
            return draw
        got = tickets if rows is not draw and isinstance(rows, torch.Tensor) else rows
        raise TypeError(
            f"sample: {type(self._inner).__name__}.draw: expected a Draw of tensors, Draw(rows, tickets=None, info={{}}), got "
            f"{type(got).__name__}. Return Draw(torch.as_tensor(rows))."
        )

    @property
    def ran_out(self) -> bool:
        return bool(_said(self._inner, "ran_out"))

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if hasattr(self._inner, "ran_out"):
            self._inner.ran_out = value

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        return bool(_said(self._inner, "drop_last"))

    def state_dict(self) -> dict[str, object]:
        return saved(self._inner, "_sampler")

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        return prepare_load(self._inner, state_dict, "_sampler")

    def __repr__(self) -> str:
        return repr(self._inner)


class _Sampled(_Adapted):
    """A sampler of the user's own whose only way to draw is a ``sample`` of TorchRL's form."""

    samples, draw = True, _draw_by_sample

    def bind(self, storage: SampledStorage) -> None:
        self._storage = storage


class _Reading(_Adapted):
    """A sampler that is handed fields of the rows at each draw."""

    _reader: FieldReader | None = None

    def __init__(self, inner: Sampler, reads: object) -> None:
        super().__init__(inner)
        self._keys = as_paths(reads, f"{type(inner).__name__}: reads") or ()
        self._drawing = fork.rlock()
        for name in ("bind", "moved"):
            vars(self).pop(name, None)

    def bind(self, storage: SampledStorage) -> None:
        """Raises ``TypeError``: the storage has no fields. ``KeyError``: not those. What the sampler raises."""
        if not storage.traits.has_fields:
            raise TypeError(
                f"{type(self._inner).__name__}: expected a tensor storage, as it declares reads={list(map(public, self._keys))}; "
                f"a {type(storage).__name__} has no fields."
            )
        if self._reader is None or self._reader.storage is not storage:
            self._reader = FieldReader(storage, self._keys)
        self._call("bind", storage)

    def moved(self) -> None:
        if self._reader is not None:
            self._reader.forget()
        self._call("moved")

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        assert self._reader is not None  # a buffer binds it first
        with self._drawing:  # another thread's draw would change what is read
            self._reader.refresh()
            return self._checked(cast("Any", self._inner).draw(extent, batch_size, key, self._reader))

    def _call(self, name: str, *arguments: object) -> None:
        """Call an optional method."""
        if callable(method := _said(self._inner, name)):
            method(*arguments)


def declared(sampler: Sampler) -> DeclaredSampler:
    """The sampler, or of one that follows the protocol only, one around it that answers all that buffers ask."""
    reads = sampler.reads if isinstance(sampler, DeclaredSampler) else _said(sampler, "reads")
    if reads is not None:
        return _Reading(sampler, reads)
    if isinstance(sampler, Declared):
        return cast("DeclaredSampler", sampler)
    sampled = overrides.overrides(type(sampler), "sample") and not overrides.overrides(type(sampler), "draw")
    return (_Sampled if sampled else _Adapted)(sampler)


class FieldReader:
    """Some fields of all rows, as they were when the draw began.

    A sampler that declares ``reads = ("group",)`` gets one as the fourth argument of ``draw``. Writes, edits and ``empty`` of every
    thread and process are in it; what tensors say stays the same until the draw returns. Do not write to them.

    ``reader["group"]`` is ``[capacity, *shape]``, on the CPU: one entry per row. Of rows that hold nothing it says anything.

    >>> import torch
    >>> from engram import Draw, LazyTensorStorage, RandomSampler, ReplayBuffer
    >>> class OfGroup(RandomSampler):
    ...     reads = ("group",)
    ...     def draw(self, extent, batch_size, key, reader):
    ...         of_group = reader.rows[reader["group"][reader.rows] == 1]
    ...         return Draw(of_group[:batch_size])
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=OfGroup(), batch_size=2)
    >>> _ = rb.extend({"group": torch.tensor([0, 1, 0, 1]), "x": torch.arange(4)})
    >>> rb.sample()["x"].tolist()
    [1, 3]
    """

    #: int64 ``[n]``, sorted: the rows that hold something.
    rows: torch.Tensor
    #: int64 ``[capacity]``: the ticket number of every row, -1 where it holds nothing. ``Draw(rows, reader.tickets[rows])`` makes
    #: the buffer draw again in place of rows that change before they are read: a batch then has what the sampler has seen.
    tickets: torch.Tensor
    #: int64, sorted: the rows that changed since the sampler's last draw; at the first draw, all that hold something.
    changed: torch.Tensor

    def __init__(self, storage: SampledStorage, keys: Sequence[FieldPath]) -> None:
        #: Whose rows it reads.
        self.storage = storage
        self._keys = tuple(keys)
        self.forget()
        if storage.memory is not None:
            self._check()

    def forget(self) -> None:
        """Forget what was read: the storage's rows are in another store now. The next :meth:`refresh` reads all rows.

        >>> import torch
        >>> from engram import FieldReader, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend({"group": torch.arange(3)})
        >>> reader = FieldReader(rb.storage, [("group",)])
        >>> reader.refresh()
        >>> reader.forget()
        >>> len(reader.rows)
        0
        """
        self._values: dict[FieldPath, torch.Tensor] = {}
        self._settled: int | None = None
        self.rows = self.changed = torch.empty(0, dtype=torch.int64, device="cpu")
        self.tickets = torch.full((0,), -1, device="cpu")

    def __getitem__(self, key: str | FieldPath) -> torch.Tensor:
        """All rows of one field. Raises ``KeyError``: the sampler does not declare it."""
        path = checked_path(key, "reads")
        if path not in self._keys:
            raise KeyError(
                f"reads: expected one of the fields that the sampler declares, {[public(path) for path in self._keys]}, got {key!r}."
            )
        return self._values[path]

    def refresh(self) -> None:
        """Read what changed since the last time.

        Raises ``KeyError``: no such field.

        Cost: O(1) if nothing was written. Else a word per row of the storage, about a millisecond per million, and the fields of the
        rows that changed.

        >>> import torch
        >>> from engram import FieldReader, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend({"group": torch.arange(3)})
        >>> reader = FieldReader(rb.storage, [("group",)])
        >>> reader.refresh()
        >>> _ = rb.add({"group": torch.tensor(7)})
        >>> reader.refresh()
        >>> reader.changed.tolist(), reader["group"].tolist()
        ([3], [0, 1, 2, 7])
        """
        storage = self.storage
        settled = storage.settled()
        if settled is not None and settled == self._settled:
            self.changed = self.changed[:0]
            return
        self._settled = None  # in case of an interrupt
        if not self._values:
            self._check()
            self.tickets = torch.full((storage.max_size,), -1, device="cpu")
        numbers = storage.tickets_of(torch.arange(storage.max_size, device="cpu"))
        changed = (numbers != self.tickets).nonzero().squeeze(1)
        live = changed[numbers[changed] >= 0]
        for path in self._keys:
            values, moved = storage.field(path, live, numbers[live])
            values = values.to("cpu")
            if path not in self._values:
                self._values[path] = values.new_zeros((storage.max_size, *values.shape[1:]))
            self._values[path][live] = values
            if moved:  # it is being written now: the next draw sees it
                numbers[live[moved]], settled = -1, None
        self.tickets, self.changed, self._settled = numbers, changed, settled
        self.rows = (numbers >= 0).nonzero().squeeze(1)

    def _check(self) -> None:
        """Raise ``KeyError`` for a field that is not stored."""
        assert self.storage.memory is not None  # it is asked when there are rows
        stored = {field.key for field in self.storage.memory.schema.fields}
        for path in self._keys:
            if path not in stored:
                known = [public(key) for key in sorted(stored)]
                raise KeyError(f"reads: expected stored fields, {known}, got {public(path)!r}.")
