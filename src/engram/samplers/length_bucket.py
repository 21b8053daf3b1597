"""Batches of rows that are about as long as each other."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from engram._support import checks, field_paths, native
from engram.samplers import _base, consuming, prioritized, prompt_groups, redraw
from engram.store import blocks, ragged, sampled
from engram.types import Draw, Extent, Sampler, Traits

#: Which bucket of a pool is handed out is drawn by this and the key, independently of the pool.
_BUCKET = 0x2E0B4482A8F53C19


class LengthBucketSampler(_base.SamplerAround):
    """Draws batches of rows whose ragged fields are about equally long, so that padded batches hold little padding.

    For a batch of ``B`` rows the other sampler draws ``pool * B``. They are put in the order of their lengths and cut into ``pool`` buckets
    of ``B``, one of which is handed out, each with the same probability. So a row is drawn as often as by the other sampler, whatever its
    length: uniformly around a :class:`RandomSampler`, in proportion to its priority around a :class:`PrioritizedSampler`. The rows of one
    batch depend on each other. The larger the pool, the more alike the lengths of a batch, and the more rows are looked at.

    Around a :class:`ConsumingSampler`, or a :class:`FilteredSampler` with ``max_uses``, the rows of the other buckets are given back, and
    cannot be drawn by other processes until then. Everything else is that of :attr:`sampler`: priorities, weights, marks, and attributes
    such as ``rb.sampler.beta``. In the rare case that a row is overwritten while it is read, one of any length takes its place.

    Args:
        sampler: a sampler of rows, or a class of one. Filters go inside this one.
        field: the ragged field whose items count; None: of each row those of the longest field, texts only if there are no others.
        pool: buckets that a batch is chosen from.

    Raises:
        TypeError: no sampler of rows, or one of groups, windows or epochs; when drawing: a storage without ragged fields.
        ValueError: ``pool`` below 2, or ``normalize="batch"`` of a :class:`PrioritizedSampler`. KeyError (when drawing): no such field.
        As the other sampler.

    Cost: that of the other sampler for ``pool * B`` rows, and O(pool * B log(pool * B)). ``rb.sample(max_tokens=)`` is refused: batches by
    tokens are packed, and have no padding.

    >>> import torch
    >>> from engram import LazyTensorStorage, LengthBucketSampler, Ragged, ReplayBuffer
    >>> storage = LazyTensorStorage(100, ragged={"tokens": Ragged(torch.int32, max_length=50)}, layout="padded")
    >>> rb = ReplayBuffer(storage=storage, sampler=LengthBucketSampler(pool=16), batch_size=4)
    >>> rows = rb.extend({"tokens": [torch.ones(n, dtype=torch.int32) for n in [1, 49] * 20]})
    >>> mask = rb.sample()["tokens"].mask  # [4, 1] or [4, 49], and seldom both lengths
    >>> len(mask)
    4
    """

    def __init__(
        self,
        sampler: Sampler | type[Sampler] = redraw.RandomSampler,
        *,
        field: str | field_paths.FieldPath | None = None,
        pool: int = 8,
    ) -> None:
        name, inner = "LengthBucketSampler", cast("Any", sampler() if isinstance(sampler, type) else sampler)
        of = _base.declared(inner).traits if isinstance(inner, Sampler) else Traits(draws_windows=True)
        around = isinstance(inner, prompt_groups.PromptGroupSampler | _base.SamplerAround) and not isinstance(
            inner, consuming.FilteredSampler
        )
        if around or of.draws_windows or of.draws_once:
            raise TypeError(
                f"{name}: sampler: expected a sampler of single rows without epochs, such as RandomSampler(), got {inner!r:.80}."
            )
        if isinstance(inner, prioritized.PrioritizedSampler) and inner.normalize == "batch":
            raise ValueError(
                f'{name}: sampler: expected weights that are not those of normalize="batch", got {inner!r:.80}.'
            )
        self.field = field_paths.as_path(field, f"{name}: field")
        self.pool = checks.check_count(f"{name}: pool", pool, least=2)
        self._storage: sampled.SampledStorage | None = None
        self._source = _base.declared(inner)
        self.sampler = inner

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of :attr:`sampler`, but rows are drawn together."""
        return self._source.traits._replace(draws_uniformly=False, reads_natively=False)

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def bind(self, storage: sampled.SampledStorage) -> None:
        self._storage = storage
        self._source.bind(storage)

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        _base.check_drawable(extent.size)
        storage = self._storage
        store = None if storage is None else storage.memory
        if storage is None or not isinstance(store, ragged.RaggedStore):
            raise TypeError("sample: LengthBucketSampler: expected a storage with ragged fields, got one without.")
        drawn = self._source.draw(extent, batch_size * self.pool, key)
        try:
            tickets = storage.tickets_of(drawn.rows) if drawn.tickets is None else drawn.tickets
            lengths = store.lengths_of(drawn.rows, tickets, self.field, "sample: LengthBucketSampler: field")
            bucket = native.empty_rows(1)
            native.uniform(key ^ _BUCKET, -(-len(lengths) // batch_size), bucket)
            first = min(int(bucket) * batch_size, max(len(lengths) - batch_size, 0))  # consumed rows may be fewer
            places = lengths.argsort(stable=True)[first : first + batch_size].sort().values
        except BaseException:
            self._source.give_back(drawn, drawn.rows[:0])
            raise
        self._source.give_back(drawn, places)
        return _base.picked(drawn._replace(tickets=tickets), places)

    # ---- the sampler inside ----------------------------------------------------------------------------------------------

    def moved(self) -> None:
        self._source.moved()

    def were_read(self, draw: Draw, *, failed: bool = False) -> None:
        self._source.were_read(draw, failed=failed)

    def used_rows(self, n: int) -> Tensor:
        """Those of :attr:`sampler`.

        >>> import torch
        >>> from engram import ConsumingSampler, LazyTensorStorage, LengthBucketSampler, Ragged, ReplayBuffer
        >>> storage = LazyTensorStorage(10, ragged={"text": Ragged("utf-8", max_length=9)})
        >>> rb = ReplayBuffer(storage=storage, sampler=LengthBucketSampler(ConsumingSampler()), batch_size=2)
        >>> _ = rb.extend({"text": ["a", "b"]})
        >>> _ = rb.sample()
        >>> rb.sampler.used_rows(10).tolist()
        [0, 1]
        """
        return self._source.used_rows(n)

    def drawable(self, storage: sampled.SampledStorage) -> int:
        return self._source.drawable(storage)

    def can_sample(self, storage: sampled.SampledStorage, batch_size: int) -> bool:
        return self._source.can_sample(storage, batch_size)

    def masses(self, storage: sampled.SampledStorage) -> blocks.Masses | None:
        return self._source.masses(storage)

    @property
    def draws_of_a_row(self) -> int | None:  # type: ignore[override]
        """That of :attr:`sampler`."""
        return self._source.draws_of_a_row

    @property
    def max_size(self) -> int:
        """That of :attr:`sampler`."""
        return self._source.max_size

    def config(self) -> dict[str, object]:
        return {**self._inner_config(), "field": self.field and [*self.field], "pool": self.pool}

    def __getstate__(self) -> dict[str, object]:
        return {"sampler": self.sampler, "field": self.field, "pool": self.pool}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _storage=None, _source=_base.declared(cast("Sampler", state["sampler"])))
