"""Each row a limited number of times; and only rows that are ready and fresh, of those that another sampler draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from engram._support.checks import check_count
from engram._support.field_paths import FieldPath
from engram._support.retries import Retries
from engram._support.state import Change, Loads, check_keys, integer, typed
from engram.errors import EMPTY, IncompatibleCheckpoint, NoSampleable
from engram.samplers._base import MAX_DRAWS, NativeSampler, SamplerAround, declared
from engram.samplers.prioritized import PrioritizedSampler, rows_of
from engram.samplers.staleness import IndexedSampler, RuledSampler, StalenessAwareSampler, checked_uses
from engram.store.blocks import Key, Masses
from engram.store.indexes import check_index_name
from engram.store.row_indexes import MAX_USES, ConsumptionIndex, GroupRules
from engram.store.sampled import SampledStorage
from engram.types import Commit, Draw, Extent, NativeBatch, Sampler, Shown, Traits, Write

#: Rows that are offered at once, unless a batch has more.
_MAX_OFFERED = 1 << 16
#: Draws in place of rows that were refused, before they are drawn among those that are not.
_FEW = 8


class CountingSampler(IndexedSampler[ConsumptionIndex]):
    """Draws rows of which an index counts the draws."""

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn. Raises as the class says.

        >>> from engram import ConsumingSampler, ListStorage
        >>> ConsumingSampler().bind(ListStorage())
        Traceback (most recent call last):
        ValueError: ConsumingSampler: expected a storage with a bound, got a list without. Use ListStorage(max_size=…).
        """
        if storage is not self._storage:
            self._storage, self._index = storage, None
        if not (self._rules.exclude and storage.traits.has_fields):  # its fields may be named later
            self._attached()

    def _index_of(self, storage: SampledStorage) -> ConsumptionIndex | None:
        return storage.consumption(self.index_name, self._rules.max_uses or 0, self._rules)

    def observe(self, write: Write | None, data: object) -> None:
        """Look for new data again: the buffer was emptied or filled.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(3))
        >>> _ = rb.sample()
        >>> before = rb.sampler.ran_out
        >>> rb.empty()  # tells the sampler
        >>> before, rb.sampler.ran_out
        (True, False)
        """
        self.ran_out = False

    def drawable(self, storage: SampledStorage) -> int:
        self.bind(storage)
        index = self._attached()
        return 0 if index is None else index.core.drawable

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        """One that never ends for good: new rows go on with it.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(max_sample_count=1), batch_size=3)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.sampler.epoch(rb.storage)
        (1, 1)
        """
        return 1, self.drawable(storage)

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        return batch_size > 0 and self.drawable(storage) > 0

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """Let rows be drawn as often as new ones. Row -1 is passed over. Raises ``RowError``: a row outside the storage.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(1), batch_size=4)
        >>> rows = rb.extend(torch.zeros(4))
        >>> _ = rb.sample()
        >>> len(rb)
        0
        >>> rb.sampler.mark_update(rows)  # they can be drawn again
        >>> len(rb)
        4
        """
        own = self._attached()
        if own is not None:
            own.core.reset(rows_of(index, "mark_update"))

    def were_read(self, draw: Draw, *, failed: bool = False) -> None:
        index = self._attached()
        if index is not None and draw.tickets is not None:
            tell = index.core.take_back if failed else index.core.were_read
            tell(draw.rows.contiguous(), draw.tickets.contiguous())
            self.ran_out = self.ran_out and not (failed and index.core.drawable)

    def used_rows(self, n: int) -> Tensor:
        """int64 ``[k]``, ascending: rows that are used up, ``n`` at most.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=ConsumingSampler(max_sample_count=1), batch_size=4)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.sampler.used_rows(10).tolist()
        [0, 1, 2, 3]
        """
        index = self._attached()
        return _NOTHING[0] if index is None or not index.core.used else index.core.used_rows(n)


class ConsumingSampler(CountingSampler):
    """Draws each row ``max_sample_count`` times, then never again until it is overwritten. For on-policy data and queues.

    A batch has each row at most once, uniformly among those that are left, and is short when they run out; then ``ran_out`` is set,
    iteration ends, and drawing raises until there is new data. ``len(rb)`` is the number of rows that can still be drawn. A buffer's
    ``add`` and ``extend`` write over rows that are used up before they take the next place of the ring, so that no row is
    overwritten while a used one is there. (With several lanes, ``ndim > 1`` or ragged fields they keep to their rings: ``MaxInFlight``
    makes writers wait.)

    A draw counts before its rows are read; once they were read, those that are used up may be written over. So all threads and
    processes that draw from one store share its rows out exactly: a row is never handed out more often than ``max_sample_count``
    times, and writers take no row away from a draw under way. If a process dies between counting and handing out, or
    drops prefetched batches, these rows count as drawn. Counts belong to the storage, under the name ``index``: they stay when the
    sampler is replaced, and in a directory also when the process ends. Every writer keeps them, whatever its sampler. A buffer that
    only reads knows them, too, and counts what it draws itself for itself alone.

    Edits of single fields (``update_``, ``rb["key"] = …``, ``rb[i] = …``) leave a row's count as it is; ``rb.mark_update(index)``
    lets rows be drawn again.

    Args:
        max_sample_count: draws of a row.
        index: samplers with different names count for themselves.

    Raises:
        TypeError: ``max_sample_count`` is no int. ValueError: it is below 1; when a buffer takes it: a list without a bound.
        IncompatibleStore: when a buffer takes it: the rows of the index are drawn another number of times.
        NoSampleable: when drawing: no row is left (a ``RuntimeError``).

    Cost: drawing ``B`` rows takes O(B log rows). Memory: 12.3 bytes per row.

    >>> import torch
    >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
    >>> _ = rb.extend(torch.arange(4))
    >>> len(rb.sample()), len(rb)
    (3, 1)
    >>> [len(batch) for batch in rb]
    [1]
    """

    traits = NativeSampler.traits._replace(has_epochs=True, consumes=True)
    noted = ("max_sample_count",)
    _index_kind = ConsumptionIndex.kind

    def __init__(self, max_sample_count: int = 1, *, index: str = "main") -> None:
        check_index_name(index, "ConsumingSampler: index")
        self.max_sample_count = check_count("ConsumingSampler: max_sample_count", max_sample_count, most=MAX_USES - 1)
        self.index_name, self._rules = index, GroupRules(max_uses=self.max_sample_count)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        index = self._attached()
        rows, tickets = _NOTHING if index is None else index.core.claim(key, batch_size)
        self.ran_out = index is None or index.core.drawable == 0
        if not len(rows):
            if index is not None:
                index.core.count_starved()
            raise NoSampleable(
                f"sample: no row is left that was drawn fewer than max_sample_count={self.max_sample_count} times. Add data before "
                "sampling."
            )
        return Draw(rows, tickets)

    def masses(self, storage: SampledStorage) -> Masses:
        return Masses(float(self.drawable(storage)), 1.0, len(storage))

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """``max_sample_count``, ``ran_out`` and ``counts``, int32 ``[n]``: how often each row was drawn, up to the last that was.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=ConsumingSampler(max_sample_count=1), batch_size=4)
        >>> _ = rb.extend(torch.arange(4))
        >>> _ = rb.sample()
        >>> rb.sampler.state_dict()["counts"].tolist()
        [1, 1, 1, 1]
        """
        return {"max_sample_count": self.max_sample_count, "counts": self._uses(), "ran_out": self.ran_out}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = "ConsumingSampler"
        check_keys(state_dict, ("max_sample_count", "counts", "ran_out"), where)
        most = integer(state_dict, "max_sample_count", 1, MAX_USES, where)
        if most != self.max_sample_count:
            raise IncompatibleCheckpoint(
                f"{where}: max_sample_count: expected {self.max_sample_count} as here, got {most}. Make it with max_sample_count={most}."
            )
        index = self._attached()
        rows = capacity or (0 if index is None else index.core.rows)
        counts = checked_uses(state_dict, "counts", most, rows, where)
        return Change(self._take, counts, typed(state_dict, "ran_out", bool, where))

    def _take(self, counts: Tensor, ran_out: bool) -> None:
        self._restore_uses(counts)
        self.ran_out = ran_out

    def config(self) -> dict[str, object]:
        return {**super().config(), "index": self.index_name}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_storage": None, "_index": None}


class FilteredSampler(SamplerAround, CountingSampler, RuledSampler[ConsumptionIndex]):
    """Draws as another sampler does, but only rows that are ready, fresh and not used up.

    A draw of the other sampler that may not be used is repeated. So the distribution is that of the other sampler among the rows that may
    be drawn: in proportion to their priorities around a :class:`PrioritizedSampler`, and around a slice sampler that of the windows all
    of whose rows may be drawn. The draws of a batch follow one another: with ``max_uses`` each counts before the next one.

    The rules belong to an index of the storage, under the name ``index``, which every write and edit of every process keeps. All
    samplers with that name share it. With ``max_uses`` rows are used up as by a :class:`ConsumingSampler`: all threads and processes
    together hand a row out ``max_uses`` times and not more often, ``len(rb)`` is the number of rows that can still be drawn, a batch is
    short when they run out, and writers take the place of rows that are used up first, as they do for that sampler. ``MaxInFlight``
    then limits how many rows can be drawn; rows that are not ready, or too old, do not count. A buffer that only reads
    knows what others have used, and counts what it draws itself for itself alone.

    Everything else is that of :attr:`sampler`: priorities, weights, marks, and attributes such as ``rb.sampler.beta``.
    ``rb.sample(timeout=)`` waits for rows. ``rb.stats()`` has ``drawable_rows``, ``starved_draws``, which found too few, ``expired_rows``,
    which became too old, and with ``max_uses`` ``used_rows``, ``evicted_rows``, which were overwritten before they were used up, and
    ``dropped_rows``, which were removed or lost with their writer before that. Which rows are too old is counted when the next batch is
    drawn.

    Args:
        sampler: a sampler of rows, or a slice sampler with replacement, or a class of one. Expanders go around this one. A
            :class:`ConsumingSampler` says ``max_uses``, and draws each row once in a batch at most; ``max_staleness`` and ``ready`` of
            a :class:`StalenessAwareSampler` are rules here.
        ready: fields of floating numbers, 16 at most: a row is not drawn while one of them holds a NaN in it.
        max_uses: draws of a row; None: any number. Not with slice samplers, whose windows share rows.
        max_staleness: how far a row's version may be behind ``consumer_version``; -1: rows need no version.
        policy_version: the field with the version, one number per row. A NaN is never drawn.
        index: samplers with other rules need other names. The consumer's version has the same name.

    Raises:
        TypeError: no such sampler, a :class:`PromptGroupSampler`, which takes these rules itself, or no ints; when a buffer takes it: a
            list, but for ``max_uses`` alone. When drawing: versions that are no real numbers, a field of ``ready`` with integers, of which
            none is NaN, or rows on an accelerator.
        ValueError: no rule, a number out of range, ``max_uses`` with a slice sampler or another one than a ConsumingSampler has, or
            ``normalize="batch"`` of a :class:`PrioritizedSampler`; when a buffer takes it: a list without a bound.
        KeyError (when drawing): no such field.
        IncompatibleStore (when drawing): the storage's index of that name has other rules.
        NoSampleable (when drawing): no row can be drawn, or 1,000 draws in a row found none that can (a ``RuntimeError``).

    Around a :class:`SamplerWithoutReplacement` a batch is filled within one epoch. With ``drop_last`` one that is not full goes on with
    the next epoch.

    Cost: that of the other sampler for each draw that is repeated. Where few rows can be drawn, a :class:`RandomSampler` and a
    :class:`PrioritizedSampler` draw among them instead, in as many steps as there are of them. Each row that is written, edited or
    becomes too old costs O(log rows). Memory: 28.3 bytes per row; 12.3 with ``max_uses`` alone.

    >>> import torch
    >>> from engram import FilteredSampler, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
    >>> sampler = FilteredSampler(PrioritizedSampler(alpha=1.0, beta=0.4), ready=("reward",), max_uses=1)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
    >>> rows = rb.extend({"x": torch.arange(3), "reward": torch.tensor([0.5, torch.nan, torch.nan])})
    >>> rb.sample()["x"].tolist(), rb.can_sample()
    ([0], False)
    >>> rb = rb.set_at_("reward", torch.ones(1), rows[1:2])
    >>> rb.sample()["x"].tolist()
    [1]
    """

    def __init__(
        self,
        sampler: Sampler | type[Sampler],
        *,
        ready: Sequence[str | FieldPath] = (),
        max_uses: int | None = None,
        max_staleness: int = -1,
        policy_version: str | FieldPath = "policy_version",
        index: str = "main",
    ) -> None:
        name = "FilteredSampler"
        given: object = sampler() if isinstance(sampler, type) else sampler
        inner = cast("Any", given)
        of = declared(inner).traits if isinstance(given, Sampler) else Traits()
        windows = of.reads_windows and not (of.has_epochs or inner.streaming or inner.settings.online)
        counted = given.max_sample_count if isinstance(given, ConsumingSampler) else None
        around = isinstance(given, SamplerAround) or (of.consumes and not counted) or of.awaits_rows
        if not isinstance(given, Sampler) or around or of.draws_windows != windows:
            raise TypeError(
                f"{name}: sampler: expected a sampler of rows, or a slice sampler with replacement, got {inner!r:.80}. Put expanders and a "
                "LengthBucketSampler around this one; a PromptGroupSampler follows such rules itself: give them to it."
            )
        if isinstance(given, StalenessAwareSampler) and max_staleness == -1:
            max_staleness, policy_version = inner.max_staleness, inner.version_key
        ready = inner.ready if isinstance(given, StalenessAwareSampler) and not ready else ready
        max_uses = counted if max_uses is None else max_uses
        uses = None if max_uses is None else check_count(f"{name}: max_uses", max_uses, most=MAX_USES - 1)
        self._follow(name, GroupRules(max_uses=uses), ready, max_staleness, policy_version, index)
        over_batch = isinstance(given, PrioritizedSampler) and given.normalize == "batch"
        if not (self._rules.exclude or uses) or (uses and windows) or over_batch or (counted and counted != uses):
            raise ValueError(
                f"{name}: expected one of ready, max_uses and max_staleness, no max_uses with windows, which share rows, or another than a "
                f'ConsumingSampler has, and weights that are not those of normalize="batch", got max_uses={uses} and {inner!r:.80}.'
            )
        #: Rows that were drawn since the epoch of a sampler without replacement began; -1: its last batch said that it is over.
        self._seen = 0
        self._around(inner)

    def _around(self, inner: Sampler) -> None:
        """Draw as this sampler does."""
        self._source = declared(inner)
        if self._source.traits.draws_windows:
            cast("Any", inner).admits = self._admits
        if self._rules.version is None and isinstance(inner, StalenessAwareSampler):
            self._consumer = inner._consumer  # noqa: SLF001 - the only one that counts
        if isinstance(inner, ConsumingSampler):
            inner._rules, inner.index_name = self._rules, self.index_name  # noqa: SLF001 - one index counts
        if isinstance(inner, StalenessAwareSampler):
            inner.require(self.ready)
        self.sampler = inner

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are passed over."""
        of, uses = self._source.traits, self.max_uses is not None
        changed = of._replace(draws_uniformly=False, reads_natively=of.draws_windows, awaits_rows=True)
        return changed._replace(consumes=uses, has_epochs=of.has_epochs or uses)

    @property
    def default_priority(self) -> float:  # type: ignore[override]
        """That of :attr:`sampler`."""
        return cast("float", cast("Any", self.sampler).default_priority)

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Those of :attr:`sampler`, and the counts of draws."""
        uses = () if self.max_uses is None else ((self.index_name, ConsumptionIndex.kind),)
        return (*self._source.own_indexes, *uses)

    # ---- where the index is --------------------------------------------------------------------------------------------

    def bind(self, storage: SampledStorage) -> None:
        self._source.bind(storage)
        CountingSampler.bind(self, storage)
        if self._rules.version is not None:
            self._consumer.bind(storage)

    def moved(self) -> None:
        self._source.moved()
        super().moved()

    def _attached(self) -> ConsumptionIndex | None:
        """The index, as the version of the consumer now is."""
        index = super()._attached()
        if index is not None and self._rules.version is not None:
            index.core.set_floor(self._floor())
        return index

    def observe(self, write: Write | None, data: object) -> None:
        self._source.observe(write, data)
        self.ran_out = False

    def mark_update(self, index: object, *, storage: object = None) -> None:
        self._source.mark_update(index)
        CountingSampler.mark_update(self, index)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def _admits(self, rows: Tensor, tickets: Tensor, most: int = 1 << 62) -> Tensor:
        """Which rows are drawn, the first ``most``, bool ``[n]``: they count from now on. Raises ``NoSampleable``: none is left."""
        index = self._attached()
        if index is None or not index.core.drawable:
            raise self._starved(index)
        admitted = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        admitted[index.core.admit(rows.contiguous(), tickets.contiguous(), most)] = True
        return admitted

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        source, parts, need, tries = self._source, list[tuple[Draw, Tensor]](), batch_size, Retries()
        follows = source.traits.consumes or isinstance(source, StalenessAwareSampler)
        if follows and not ((index := self._attached()) and index.core.drawable):
            raise self._starved(index)
        if source.traits.draws_windows or source.traits.consumes:
            return source.draw(extent, batch_size, key)
        once, ended, self.ran_out = source.traits.draws_once, False, False
        while need and tries.count < MAX_DRAWS:
            if once and self.ran_out:  # the epoch is over, as the last batch may have said
                ended, self._seen = ended or self._seen >= 0, 0
                if parts and not (self.drop_last and self.max_uses is None):
                    break
                parts, need = [], batch_size  # the next epoch begins
            try:
                drawn = self._offered(extent, need, tries, key)
                good = self._admits(drawn.rows, cast("Tensor", drawn.tickets), need).nonzero().flatten()
            except BaseException as error:
                if parts and self.max_uses is not None and isinstance(error, NoSampleable):
                    break  # the others have no priority, or are used up
                for draw, taken in parts:
                    self.were_read(Draw(draw.rows[taken], cast("Tensor", draw.tickets)[taken]), failed=True)
                raise
            tries.count, need = tries.count + 1, need - len(good)
            parts += [(drawn, good)] if len(good) else []
        index = self._attached()
        if index is None or not parts or (need and self.max_uses is None and not once):
            raise self._starved(index)
        rows, tickets = (torch.cat([cast("Tensor", draw[i])[good] for draw, good in parts]) for i in range(2))
        self._seen = 0 if need or self.ran_out else self._seen + len(rows)
        if once and self.max_uses is None and self._seen >= index.core.drawable:
            ended, self._seen = True, -1  # no other row of the epoch may be drawn
        self.ran_out = self.ran_out or ended or (self.max_uses is not None and not index.core.drawable)
        info = {name: torch.cat([cast("Tensor", draw.info[name])[good] for draw, good in parts]) for name in drawn.info}
        return Draw(rows, tickets, info)

    def _offered(self, extent: Extent, n: int, tries: Retries, key: int) -> Draw:
        """Rows of the other sampler, with tickets: as many as it may take, where draws are independent; else ``n``.

        Where few can be drawn, it draws among these, if it can.
        """
        index, drawn, of = self._attached(), None, self._source.traits
        left = 0 if index is None else index.core.drawable
        if index is not None and left and (tries.count >= _FEW or n * extent.size > left * left):
            drawn = self._source.draw_among(index.core.drawable_rows(), n, tries.key_of(key))
        if drawn is None:
            independent = left and (of.draws_uniformly or of.prioritized)
            most = min(n * extent.size // left, _MAX_OFFERED) if independent else n
            if tries.count >= _FEW and isinstance(self._source, StalenessAwareSampler):  # which draws each row once
                most = min(extent.size, _MAX_OFFERED)
            drawn = self._source.draw(extent, max(n, most), tries.key_of(key))
        assert self._storage is not None  # it has rows
        return drawn if drawn.tickets is not None else drawn._replace(tickets=self._storage.tickets_of(drawn.rows))

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        return self._source.sample_natively(storage, key, n, numbered=numbered, shown=shown)

    def _starved(self, index: ConsumptionIndex | None) -> NoSampleable:
        """The error of a draw that found too few rows."""
        if index is None:
            return NoSampleable(EMPTY)
        index.core.count_starved()
        there = f"{index.core.drawable} of them, which {MAX_DRAWS} draws of {self.sampler!r:.80} did not find"
        return NoSampleable(
            f"sample: expected rows that can be drawn, got {there if index.core.drawable else 'none'}: "
            f"{self._passed_over()}. Add data before sampling."
        )

    def drawable(self, storage: SampledStorage) -> int:
        return len(storage) if self.max_uses is None else CountingSampler.drawable(self, storage)

    def can_sample(self, storage: SampledStorage, batch_size: int, **given: object) -> bool:
        if not len(storage) or not CountingSampler.drawable(self, storage):
            return False
        return bool(cast("Any", self._source).can_sample(storage, batch_size, **given))

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        return self._source.epoch(storage) if self.max_uses is None else CountingSampler.epoch(self, storage)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """That of :attr:`sampler`, and ``filter``: with ``max_uses`` the ``uses``, with versions ``consumer_version``.

        >>> import torch
        >>> from engram import FilteredSampler, LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> sampler = FilteredSampler(RandomSampler(), max_uses=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=2)
        >>> _ = rb.extend(torch.arange(2))
        >>> _ = rb.sample()
        >>> sampler.state_dict()
        {'filter': {'uses': tensor([1, 1], dtype=torch.int32)}}
        """
        return {**self._source.state_dict(), "filter": RuledSampler.state_dict(self)}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        own = typed({"filter": None, **state_dict}, "filter", dict, "FilteredSampler")
        inner = {name: value for name, value in state_dict.items() if name != "filter"}
        return Loads((super().prepare_load(inner, capacity), RuledSampler.prepare_load(self, own, capacity)))

    def config(self) -> dict[str, object]:
        return {**self._inner_config(), **self._rules_config(), "index": self.index_name}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_source": None, "_index": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        inner = cast("Sampler", state.pop("sampler"))
        super().__setstate__(state)
        self._around(inner)


_NOTHING = (torch.empty(0, dtype=torch.int64, device="cpu"),) * 2
