"""Draws as another sampler does, of rows that are ready, fresh and not used up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engram._support.checks import check_count
from engram._support.state import Loads, typed
from engram.errors import EMPTY, NoSampleable
from engram.samplers._base import MAX_DRAWS, DeclaredSampler, SamplerAround, declared
from engram.samplers.consuming import CountingSampler
from engram.samplers.prioritized import rows_of
from engram.samplers.redraw import Redraw
from engram.samplers.rules import RuledSampler, row_rules, rules_said
from engram.samplers.staleness import ConsumerVersion
from engram.store import Key, Masses, check_index_name
from engram.store.row_indexes import MAX_USES, ConsumptionIndex, GroupRules
from engram.types import Commit, Draw, Extent, NativeBatch, Sampler, Shown, Traits, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram._support.field_paths import FieldPath
    from engram.around.windows import WindowSampler
    from engram.store.sampled import SampledStorage

#: Draws in place of rows that were refused, before they are drawn among those that are not.
_FEW = 8


class FilteredSampler(SamplerAround, RuledSampler, CountingSampler):
    """Draws as another sampler does, but only rows that are ready, fresh and not used up.

    A draw of the other sampler that may not be used is repeated. So the distribution is that of the other sampler among the rows that may
    be drawn: in proportion to their priorities around a :class:`PrioritizedSampler`, and around a slice sampler that of the windows all
    of whose rows may be drawn. The draws of a batch follow one another: with ``max_uses`` each counts before the next one.

    The rules belong to an index of the storage, under the name ``index``, which every write and edit of every process keeps. All samplers
    with that name share it. With ``max_uses`` rows are used up as by a :class:`ConsumingSampler`: all threads and processes together hand
    a row out ``max_uses`` times and not more often, ``len(rb)`` is the number of rows that can still be drawn, a batch is short when they
    run out, and writers take the place of rows that are used up first. ``MaxInFlight`` then limits how many rows can be drawn; rows
    that are not ready, or too old, do not count.

    Everything else is that of :attr:`sampler`: priorities, weights, marks, and attributes such as ``rb.sampler.beta``. ``rb.sample(timeout=)``
    waits for rows. ``rb.stats()`` has ``drawable_rows``, ``starved_draws``, which found too few, ``expired_rows``, which became too old, and
    with ``max_uses`` ``used_rows`` and ``evicted_rows``, which were overwritten before they were used up.

    Args:
        sampler: a sampler of rows, or a slice sampler with replacement, or a class of one. Expanders go around this one.
        ready: fields of floating numbers, 16 at most: a row is not drawn while one of them holds a NaN in it.
        max_uses: draws of a row; None: any number. Not with slice samplers, whose windows share rows.
        max_staleness: how far a row's version may be behind ``consumer_version``; -1: rows need no version.
        policy_version: the field with the version, one number per row. A NaN is never drawn.
        index: samplers with other rules need other names. The consumer's version has the same name.

    Raises:
        TypeError: no such sampler, or no ints; when a buffer takes it: a list, but for ``max_uses`` alone. When drawing: versions that
            are no real numbers, a field of ``ready`` with integers, of which none is NaN, or rows on an accelerator.
        ValueError: no rule, a number out of range, a sampler that uses rows up itself, ``max_uses`` with a slice sampler, or with weights
            over those of each batch; when a buffer takes it: a list without a bound.
        KeyError (when drawing): no such field.
        IncompatibleStore (when drawing): the storage's index of that name has other rules.
        NoSampleable (when drawing): no row can be drawn, or 1,000 draws in a row found none that can (a ``RuntimeError``).

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
        inner: Any = sampler() if isinstance(sampler, type) else sampler
        if not isinstance(inner, Sampler) or isinstance(inner, SamplerAround) or declared(inner).traits.awaits_rows:
            raise TypeError(
                f"{name}: sampler: expected a sampler of rows or windows, got {inner!r:.80}. Put expanders around this one; a "
                "PromptGroupSampler has such rules itself."
            )
        check_index_name(index, f"{name}: index")
        uses = None if max_uses is None else check_count(f"{name}: max_uses", max_uses, most=MAX_USES - 1)
        self._rules = row_rules(GroupRules(max_uses=uses), name, ready, max_staleness, policy_version)
        of = declared(inner).traits
        if of.consumes or not (self._rules.exclude or uses):
            raise ValueError(
                f"{name}: expected one of ready, max_uses and max_staleness, and a sampler that uses no rows up, got {inner!r:.80}."
            )
        windows = cast("WindowSampler", inner)
        if of.draws_windows and (
            uses or not of.reads_windows or of.has_epochs or windows.streaming or windows.settings.online
        ):
            raise ValueError(
                f"{name}: expected a slice sampler with replacement, without max_uses, as windows share rows, got {inner!r:.80}."
            )
        if uses and getattr(inner, "normalize", "store") == "batch":
            raise ValueError(
                f'{name}: max_uses: expected weights that are over those of the store, got normalize="batch".'
            )
        self.index_name, self._consumer = index, ConsumerVersion(index)
        self._around(inner)

    def _around(self, inner: Any) -> None:
        """Draw as this sampler does."""
        self._source = declared(inner)
        if self._source.traits.draws_windows:
            inner.admits = self._admits
        if self._rules.version is None:
            self._consumer = getattr(inner, "_consumer", self._consumer)
        self.sampler = inner

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are passed over."""
        of, uses = self._source.traits, self.max_uses is not None
        changed = of._replace(draws_uniformly=False, reads_natively=of.draws_windows, awaits_rows=True)
        return changed._replace(consumes=uses, has_epochs=of.has_epochs or uses)

    @property
    def draws_of_a_row(self) -> int | None:  # type: ignore[override]
        return self.max_uses

    @property
    def default_priority(self) -> float:  # type: ignore[override]
        """That of :attr:`sampler`."""
        return cast("float", self.sampler.default_priority)

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Those of :attr:`sampler`, and the counts of draws."""
        uses = () if self.max_uses is None else ((self.index_name, ConsumptionIndex.kind),)
        return (*self._source.own_indexes, *uses)

    # ---- where the index is --------------------------------------------------------------------------------------------

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn. Raises as the class says, and as :attr:`sampler`."""
        self._source.bind(storage)
        if storage is not self._storage:
            self._storage, self._index = storage, None
            if not storage.traits.has_fields:  # it may refuse
                self._attached()
        if self._rules.version is not None:
            self._consumer.bind(storage)

    def moved(self) -> None:
        self._source.moved()
        self._index = None
        self._consumer.moved()

    def _attached(self) -> ConsumptionIndex | None:
        """The index, as the version of the consumer now is; None while nothing was ever written."""
        if self._index is None and self._storage is not None and not self._storage.closed:
            self._index = self._storage.consumption(self.index_name, self.max_uses or 0, self._rules)
        if self._index is not None and self._rules.version is not None:
            self._index.core.set_floor(self._floor())
        return self._index

    def observe(self, write: Write | None, data: object) -> None:
        """Calls that of :attr:`sampler`, and looks for new data again."""
        self._source.observe(write, data)
        self.ran_out = False

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """Calls that of :attr:`sampler`, and lets rows be drawn as often as new ones. Raises ``RowError``: a row outside the storage."""
        self._source.mark_update(index)
        own = self._attached()
        if own is not None:
            own.core.reset(rows_of(index, "mark_update"))

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def _admits(self, rows: Tensor, tickets: Tensor) -> Tensor:
        """Which rows are drawn, bool ``[n]``: they count from now on. Raises ``NoSampleable``: none is left that may be."""
        index = self._attached()
        if index is None or not index.core.drawable:
            raise self._starved(index)
        admitted = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        admitted[index.core.admit(rows.contiguous(), tickets.contiguous())] = True
        return admitted

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        if self._source.traits.draws_windows:
            return self._source.draw(extent, batch_size, key)
        index, once = self._attached(), self._source.traits.draws_once
        offered, self.ran_out = _Offered(self._source, self._storage, index), False
        while True:
            drawn = Redraw(cast("Any", self._storage), offered.draw(extent, batch_size, key), offered, key)
            left = (~self._admits(drawn.rows, drawn.tickets)).nonzero().flatten()
            if not once or self.ran_out or len(left) < len(drawn.rows):
                break
        while len(left) and not once and drawn.retries.count < MAX_DRAWS:
            try:
                places, fresh = drawn.again(left.tolist(), waiting=True)
                good = places[self._admits(fresh.rows, cast("Tensor", fresh.tickets))]
            except NoSampleable:  # of the rest none may be drawn, or has a priority
                if self.max_uses is None or len(left) == len(drawn.rows):
                    raise
                break
            left = left[~torch.isin(left, good)]
        if len(left) == len(drawn.rows) or (len(left) and self.max_uses is None and not once):
            raise self._starved(index)
        if self.max_uses is not None and index is not None and not index.core.drawable:
            self.ran_out = True
        return drawn.without(left.tolist())

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """That of :attr:`sampler`, which draws windows."""
        return self._source.sample_natively(storage, key, n, numbered=numbered, shown=shown)

    def _starved(self, index: ConsumptionIndex | None) -> NoSampleable:
        """The error of a draw that found too few rows."""
        if index is None:
            return NoSampleable(EMPTY)
        index.core.count_starved()
        why = rules_said(self._rules, self._floor())
        if not index.core.drawable:
            return NoSampleable(f"sample: no row can be drawn now: {why}. Add data before sampling.")
        return NoSampleable(
            f"sample: expected rows that may be drawn among those that {self.sampler!r:.80} draws, got others at {MAX_DRAWS} draws; {why}. "
            "Add data before sampling, or use a sampler that draws more of the rows."
        )

    def drawable(self, storage: SampledStorage) -> int:
        """How many rows may be drawn; without ``max_uses``, how many are stored."""
        self.bind(storage)
        index = self._attached()
        return len(storage) if self.max_uses is None else 0 if index is None else index.core.drawable

    def can_sample(self, storage: SampledStorage, batch_size: int, **given: Any) -> bool:
        """Whether a row may be drawn, and :attr:`sampler` could draw one."""
        self.bind(storage)
        index = self._attached() if len(storage) else None
        there = index is not None and index.core.drawable > 0
        return there and self._source.can_sample(storage, batch_size, **given)

    def masses(self, storage: SampledStorage) -> Masses | None:
        """As many as may be drawn; None: :attr:`sampler` does not draw uniformly."""
        index = self._attached()
        mass = 0 if index is None else index.core.drawable
        return Masses(float(mass), 1.0, len(storage)) if self._source.traits.draws_uniformly else None

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        """One that goes on with new rows; without ``max_uses`` that of :attr:`sampler`."""
        return self._source.epoch(storage) if self.max_uses is None else (1, self.drawable(storage))

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """``sampler``, its state; with ``max_uses`` the ``uses``, with versions ``consumer_version``.

        >>> import torch
        >>> from engram import FilteredSampler, LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> sampler = FilteredSampler(RandomSampler(), max_uses=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=2)
        >>> _ = rb.extend(torch.arange(2))
        >>> _ = rb.sample()
        >>> sampler.state_dict()
        {'uses': tensor([1, 1], dtype=torch.int32), 'sampler': {}}
        """
        return {**super().state_dict(), "sampler": self._source.state_dict()}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        rest = dict(state_dict)
        inner = typed(rest, "sampler", dict, "FilteredSampler")
        del rest["sampler"]
        return Loads((self._source.prepare_load(inner, capacity), super().prepare_load(rest, capacity)))

    def config(self) -> dict[str, object]:
        return {**self._inner_config(), **self._rules_config(), "index": self.index_name}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_source": None, "_index": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        inner = state.pop("sampler")
        super().__setstate__(state)
        self._around(inner)


class _Offered(DeclaredSampler):
    """Rows of a sampler, with their tickets, until few are admitted; then of those that may be drawn, if it can draw among them."""

    def __init__(self, source: DeclaredSampler, storage: Any, index: ConsumptionIndex | None) -> None:
        self._source, self._storage, self._index, self._tries = source, storage, index, 0

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        drawn, core = None, None if self._index is None else self._index.core
        if core is not None and (self._tries == _FEW or batch_size * extent.size > core.drawable**2):
            drawn = self._source.draw_among(core.drawable_rows(), batch_size, key) if core.drawable else None
        self._tries = min(self._tries + 1, _FEW)
        drawn = self._source.draw(extent, batch_size, key) if drawn is None else drawn
        return drawn if drawn.tickets is not None else drawn._replace(tickets=self._storage.tickets_of(drawn.rows))

    def draw_again(self, extent: Extent, drawn: Draw, moved: list[int], key: int) -> tuple[list[int], Draw]:
        fresh = self.draw(extent, len(moved), key)
        return moved[: len(fresh.rows)], fresh
