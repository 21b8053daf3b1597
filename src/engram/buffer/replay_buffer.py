"""The replay buffer: it wires storage, sampler, writer and transforms together, and decides nothing itself."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import time
from functools import partial
from html import escape
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch import Tensor

from engram import _fork, _native, collate, expanders, priorities, samplers, storages, writers
from engram._closing import end
from engram._later import refuse
from engram._tensordict import children
from engram._words import warn
from engram.errors import CorruptStore, IncompatibleCheckpoint, NoSampleable, RowError, WriterStalled
from engram.format import disk, files, layout, series
from engram.format.checkpoints import Checkpoint, finish_dump, replacing
from engram.nested import first_leaf, flatten, has_dimensions, has_entries, map_leaves
from engram.packing import pack, unpack
from engram.persist import parts as saved_parts
from engram.persist.components import check_blocks
from engram.persist.foreign import foreign_format
from engram.persist.parts import Snapshot
from engram.pinning import pinning_for
from engram.prefetch import Prefetcher, Steps
from engram.reshard.driver import convert as converted_for
from engram.reshard.driver import seed_of
from engram.reshard.reports import said_counts
from engram.reshard.shards import open_shard
from engram.state import Change, check_keys, checked, copied, integer, read_from, saved, tensor_in, typed
from engram.store import Copied, Key, ThreadKey
from engram.transforms import Compose
from engram.types import DeclaredSampler, DeclaredWriter, Draw, Form, Sampler, Traits, Write, WritePlan, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from engram.format.parts import PartReader
    from engram.persist.foreign import ForeignDump
    from engram.pinning import Pinning
    from engram.reshard.driver import Reshard
    from engram.storages import Count, Rows, Storage
    from engram.types import Commit

__all__ = ["ReplayBuffer"]

_LATER = {
    "sample_unit": "expanders",
    "dim_extend": "the storage (until then: storage.ndim - 1)",
    "checkpointer": "a choice of layouts for dumps (until then: dumps and Checkpointer, which have one)",
    "consume_after_n_samples": "a ConsumingSampler",
    "compilable": "tracing through torch.compile",
    "delayed_init": "remote buffers",
    "service_backend": "remote buffers",
    "service_backend_options": "remote buffers",
    "transport": "remote buffers",
    "transport_options": "remote buffers",
}

#: Entries of a state that lie in the part of a checkpoint that is the buffer's own.
_IN_BUFFER = ("batch_size", "lane", "iterating", "consume_after_n_samples")

#: Entries of a state.
_STATE = (
    "_storage",
    "_sampler",
    "_writer",
    "_transforms",
    "_batch_size",
    "_lane",
    "_iterating",
    "_consume_after_n_samples",
    "_rng",
    "_default_rng",
    "_prefetch_state",
)

#: Reads of one row that keeps moving: tries in a row, before there are pauses.
_TRIES = 8


class ReplayBuffer:
    """Rows in, batches out.

    Args:
        size: rows; must equal the storage's ``max_size`` if both are given, and bounds a ``ListStorage`` that has none.
        storage: where the rows are: a storage or a class of one. Default ``ListStorage(size or 1000)``.
        sampler: which rows a batch has: a sampler or a class of one. Default :class:`RandomSampler`.
        writer: where new rows go: a writer or a class of one. Default :class:`RoundRobinWriter`.
        collate_fn: applied to every batch: tensor storages hand it the gathered batch, list storages the list of items.
            Default: nothing; list storages stack tensors and TensorDicts.
        transform: applied to batches after collating (``forward``) and to data before writing (``inv``): see :class:`Compose`.
        transform_factory: makes the transform, without arguments, in place of ``transform``: where buffers are made of a shared
            description, each needs one of its own. Called once, at once.
        batch_size: default of :meth:`sample`; needed to iterate and to prefetch.
        prefetch: batches asked for ahead of the one that :meth:`sample` returns: see docs/prefetch.md. Default, 0: none.
        pin_memory: batches lie in page-locked memory, every CPU tensor of them and of ``info``: see docs/pinning.md. Without
            an accelerator one warning, and ordinary memory.
        generator: a CPU ``torch.Generator`` that drives every draw. Default: torch's, at the moment of each draw.

    Raises:
        TypeError: a component of the wrong kind, or an argument of TorchRL's that is not supported yet (named); ``transform`` and
            ``transform_factory`` both.
        ValueError: ``size`` and the storage's ``max_size`` differ; ``batch_size`` below 1; ``prefetch`` below 0, or without
                ``batch_size``.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    >>> rb.extend({"obs": torch.randn(100, 4), "reward": torch.zeros(100, 1)}).shape
    torch.Size([100])
    >>> rb.sample()["obs"].shape
    torch.Size([32, 4])
    """

    _default_writer: Callable[[], Any] = writers.RoundRobinWriter
    #: Whether batches say which rows they hold.
    _shows_rows = False
    #: Entries of the data that may be there without being stored.
    _ignored: tuple[str, ...] = ()
    #: Whether :meth:`close` was called.
    closed = False

    def __init__(
        self,
        size: int | None = None,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = False,
        generator: torch.Generator | None = None,
        shared: bool = False,
        **later: Any,
    ) -> None:
        refuse(type(self).__name__, later, _LATER)
        if transform_factory is not None and not callable(transform_factory):
            raise TypeError(
                f"{type(self).__name__}: transform_factory: expected a callable that makes a transform, got "
                f"{type(transform_factory).__name__}."
            )
        if transform_factory is not None and transform is not None:
            raise TypeError(f"{type(self).__name__}: expected one of transform and transform_factory, got both.")
        if batch_size is not None:
            _check_batch_size(batch_size)
        depth = _depth(prefetch, batch_size, type(self).__name__)
        if size is not None:
            if type(size) is not int:
                raise TypeError(f"{type(self).__name__}: size: expected an int, got {type(size).__name__}.")
            if size < 1:
                raise ValueError(f"{type(self).__name__}: size: expected at least 1 row, got {size}.")
        pinning = pinning_for(pin_memory, type(self).__name__)
        made = _instance(storage, storages.Storage, "storage", lambda: storages.ListStorage(size or 1000))
        if isinstance(made, storages.ListStorage) and size is not None:
            made.bound(size)
        requested = made.requested_size
        if size is not None and size not in (made.max_size, requested):
            raise ValueError(
                f"{type(self).__name__}: size: expected the storage's max_size {made.max_size}, got {size}. Give one of them."
            )
        self._size = size
        self._storage: Any = made
        self._batch_size = batch_size
        self._collate_fn = collate_fn
        self._transform = Compose.of(transform if transform_factory is None else transform_factory())
        self._pinning = pinning
        self._lane = _lane_in(made, None)
        self._told_lanes = False
        self._iterator: Iterator[Any] | None = None
        self._warned_batch_size = False
        self._shut_down = False
        self._key = ThreadKey()
        self._prefetcher = Prefetcher(depth, self._steps) if depth else None
        self._recorded = self._looked_for_record = False
        self._generator: torch.Generator | None = None
        self._sampler: Any = None
        self.set_rng(generator)
        self._writer: Any = None
        self._source: DeclaredSampler
        """The sampler, with all that is asked of one."""
        self._placer: DeclaredWriter
        """The writer, with all that is asked of one."""
        self._of_sampler = self._of_writer = Traits()
        self._take_sampler(_instance(sampler, Sampler, "sampler", samplers.RandomSampler))
        self._take_writer(_instance(writer, Writer, "writer", self._default_writer))
        made.attach(self)
        self.share(shared)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(self, data: Any, *, lane: int | None = None) -> Any:
        """Write one row.

        Args:
            data: a tensor, TensorDict, tensorclass, or a nested dict or tuple of tensors or arrays, without a batch
                dimension; with a ``ListStorage`` any object. The first row fixes fields, dtypes and shapes. Copied.
            lane: the ring to append to, where there are several; default the handle's (:meth:`on_lane`).

        Returns:
            The row, an int; None if the writer rejected it. With ``ndim > 1``, int64 ``[rows written, ndim]``. An empty index
            if a write transform held the row back.

        Raises:
            KeyError, RuntimeError, TypeError: fields, shapes or dtypes, or kinds differ from the first row's; or an entry is no
                tensor, such as a string, for which there is ``ListStorage``. Names the field. Nothing is written.
            RowError: no such lane. RuntimeError: several lanes, of which none was named.
            OSError: first write to a full disk.

        Cost: O(bytes of the row). Releases the GIL; may be called from several threads.
        """
        return self._add(data, lane, None)

    def _add(self, data: Any, lane: int | None, accept: Callable[[int | None], None] | None) -> Any:
        """``add``. ``accept`` hears how many rows it will be (None: the data does not say) and may refuse: nothing is written."""
        if self._prefetcher is not None:
            self._prefetcher.settle(self)
        lane = self._lane if lane is None else self._check_lane(lane)
        if lane is None and self._appends:
            self._storage.unnamed_lanes("add", batched=False)  # refuses
        if self._transform.writes:
            return self._add_transformed(data, lane, accept)
        storage = self._storage
        if accept is not None:
            accept(_rows_of(data, storage.ndim - 1))
        if self._appends and storage.ndim == 1 and self._recorded:
            row: int
            row, number = storage.add_row(lane, data, self._ignored)
            if self._listening():
                storage.notify(Write(torch.tensor([row], device="cpu"), number), data)
            return row
        return self._added(self._write(data, lane, "add", batched=False))

    def _added(self, write: Write) -> Any:
        """What ``add`` returns."""
        if self._storage.ndim > 1:
            return self._user_index(write.rows)
        row = int(write.rows[0])
        return None if self._of_writer.rejects and row < 0 else row

    def _add_transformed(self, data: Any, lane: int | None, accept: Callable[[int | None], None] | None) -> Any:
        """Write transforms see a row as a batch of one: a dimension more behind the batch dimensions it has."""
        at = self._storage.ndim - 1
        batch = self._transform.inv(_map_tensors(data, lambda x: _with_dim(x, at)))
        n = 0 if batch is None else _size_of_dim(batch, at)
        if n == 0:
            return self._no_index()
        if n == 1:
            row = _map_tensors(batch, lambda x: _without_dim(x, at))
            if accept is not None:
                accept(_rows_of(row, at))
            return self._added(self._write(row, lane, "add", batched=False))
        batch = _map_tensors(batch, lambda x: _move_dim(x, at))
        if accept is not None:
            accept(_rows_of(batch, at + 1))
        return self._extended(self._write(batch, lane, "extend", batched=True))

    def extend(
        self, data: Any, *, lane: int | Tensor | Literal["each"] | None = None, update_priority: bool | None = None
    ) -> Tensor:
        """Write a batch of rows.

        Args:
            data: as for :meth:`add`, every leaf ``[n, ...]``; or a list of ``n`` rows, which are stacked. With ``ndim > 1``
                ``[*columns, T, ...]``. Copied.
            lane: an int, or int64 ``[n]`` with a lane per row (order is kept within each), or ``"each"``: of as many rows as there
                are lanes, row ``i`` to lane ``i``. Default the handle's; of several lanes, of which it named none, ``"each"``.
            update_priority: only for prioritized TensorDict buffers.

        Returns:
            int64 ``[n]`` rows; of more rows than fit, the newest stay and rows repeat. -1 for rows that the writer rejected.
            With ``ndim > 1`` ``[rows written, ndim]`` in storage order.

        Raises:
            KeyError, RuntimeError, TypeError: as :meth:`add`; an empty batch; one row without batch dimension.
            RowError: no such lane. RuntimeError: several lanes, of which none was named, and another number of rows than of lanes.
            NotImplementedError: ``update_priority``.

        Cost: O(bytes). Contiguous data is copied with one memcpy per field and chunk. Releases the GIL.
        """
        if update_priority is not None:
            raise NotImplementedError("extend: update_priority is for prioritized TensorDict buffers.")
        return self._extend(data, lane, None)

    def _extend(
        self, data: Any, lane: int | Tensor | str | None, accept: Callable[[int | None], None] | None
    ) -> Tensor:
        """``extend``. ``accept``: as for ``_add``."""
        self._settle()
        dims = self._storage.ndim
        if self._transform.writes and _rows_of(data, dims) != 0:
            data = self._transform.inv(_containers_anew(data))
            if _rows_of(data, dims) == 0:
                return self._no_index()
        if accept is not None:
            accept(_rows_of(data, dims))
        return self._extended(self._write(data, lane, "extend", batched=True))

    def _extended(self, write: Write) -> Tensor:
        """What ``extend`` returns."""
        return self._user_index(write.survivors if self._of_writer.rejects else write.rows)

    def _write(self, data: Any, lane: Any, call: str, *, batched: bool) -> Write:
        storage = self._storage
        if self._of_writer.read_only:
            self._placer.place(storage.extent(), 0, 0, data)
        lane = self._lane if lane is None else lane
        unnamed = lane is None
        lane, count = self._lanes_of(lane, call, batched=batched)
        if self._appends:
            prepared, n = storage.prepare(data, call, batched=batched, ignored=self._ignored, count=count)
            if not self._recorded:  # before a row is there: this may raise
                self._record()
            write: Write = storage.write(WritePlan(lane=lane), prepared, n)
        else:
            write = self._place_and_write(data, lane, call, count, batched=batched, unnamed=unnamed)
        if unnamed and self._appends and not self._told_lanes:
            self._told_lanes = True
            storages.tensor.announce(
                [
                    f'extend: no lane was named: of {storage.lanes} rows each goes to a lane of its own, as lane="each" says.'
                ]
            )
        if self._listening():
            storage.notify(write, data)
        return write

    def _place_and_write(
        self, data: Any, lane: Any, call: str, count: Count | None, *, batched: bool, unnamed: bool
    ) -> Write:
        storage = self._storage

        def place(n: int) -> WritePlan:
            made = self._placer.place(storage.extent(), n, lane, data)
            if unnamed and made.lane is lane:
                storages.check_count(call, storage.unnamed_lanes(call, batched=batched)[1], n)
            return made

        plan: WritePlan | None = None
        if not storage.initialized:  # a writer that refuses leaves no memory behind
            rows = _rows_of(data, storage.ndim) if batched else 1
            plan = None if rows is None else place(rows)
        prepared, n = storage.prepare(data, call, batched=batched, ignored=self._ignored, count=count)
        if not self._recorded:
            self._record()
        with storage.placing:
            if plan is None or len(storage):  # another process may have written first
                plan = place(n)
            write: Write = storage.write(plan, prepared, n)
            self._placer.written(plan, write)
        return write

    def _listening(self) -> bool:
        """Whether the sampler of any buffer on this storage wants to hear of writes."""
        storage = self._storage
        return bool(storage.is_heard) if len(storage.listeners) > 1 else self._of_sampler.listens

    @property
    def listens(self) -> bool:
        """Whether the sampler wants to hear of writes."""
        return self._of_sampler.listens

    def _lanes_of(self, lane: Any, call: str, *, batched: bool) -> tuple[int | Tensor, Count | None]:
        """The lane of rows, or one per row, and how many there must be then."""
        storage = self._storage
        if lane is None and not self._appends:  # the writer names them, or hands these back
            return storage.one_in_each_lane("")[0], None
        if lane is None:
            unnamed: tuple[int | Tensor, Count | None] = storage.unnamed_lanes(call, batched=batched)
            return unnamed
        if isinstance(lane, str) and lane == "each" and batched:
            each: tuple[Tensor, Count] = storage.one_in_each_lane('one for each lane, as lane="each" says')
            return each
        lane = self._check_lane(lane)
        return lane, storages.Count(len(lane)) if isinstance(lane, Tensor) else None

    def _check_lane(self, lane: Any) -> Any:
        if isinstance(lane, str) and lane == "each":
            raise RuntimeError(
                f'lane="each": expected a batch of {self.lanes} rows for extend(), one for each lane, got one row or one lane.'
            )
        if isinstance(lane, list) or getattr(lane, "ndim", 0) != 0:
            return self._check_lanes(torch.as_tensor(lane, device="cpu"))
        try:
            number = operator.index(lane)
        except TypeError:
            raise TypeError(f"lane: expected an int, one int per row or 'each', got {lane!r}.") from None
        if not 0 <= number < self._storage.lanes:
            raise RowError(f"lane: expected an int in [0, {self._storage.lanes}) or one per row, got {lane!r}.")
        return number

    def _check_lanes(self, lanes: Tensor) -> Tensor:
        """A lane per row. Checked before anything is allocated."""
        if lanes.ndim != 1:
            raise RuntimeError(
                f"lane: expected an int, or one per row in one dimension, got shape {list(lanes.shape)}."
            )
        if lanes.dtype.is_floating_point or lanes.dtype.is_complex or lanes.dtype is torch.bool:
            raise TypeError(f"lane: expected ints, one per row, got {lanes.dtype}.")
        if bool(((lanes < 0) | (lanes >= self._storage.lanes)).any()):
            raise RowError(f"lane: expected lanes in [0, {self._storage.lanes}), got {lanes.tolist()[:8]}….")
        return lanes.to(torch.int64)

    def on_lane(self, lane: int) -> Self:
        """Make ``lane`` this handle's lane for all later writes. Returns the buffer.

        Until then a handle has none, where there are several lanes: its writes name one, or write a row to each. Copies and saved
        states keep it.

        Raises ``RowError``: no such lane.
        """
        self._lane = self._check_lane(lane)
        return self

    @property
    def _named_lane(self) -> int | None:
        """The lane of this handle, if it named one of several."""
        return None if self._storage.lanes == 1 else self._lane

    @property
    def _saved_lane(self) -> int | list[int]:
        """In a state: a list of the lane that was named, or 0."""
        return 0 if self._named_lane is None else [self._named_lane]

    @property
    def lanes(self) -> int:
        """Rings of consecutive rows that the storage is divided into."""
        return int(self._storage.lanes)

    def observe(self, write: Write | None, data: Any) -> None:
        """Called by the storage after a write through any buffer or writer; tells the sampler if it listens."""
        if write is not None and not (self._recorded or self._looked_for_record):
            self._looked_for_record = True
            if not self._is_recorded():
                with contextlib.suppress(OSError):  # the rows are there; the next write through this buffer notes it
                    self._record()
        if write is None or self._of_sampler.listens:
            self._source.observe(write, data)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows; memory stays allocated. ``empty_write_count=False`` keeps :attr:`write_count`.

        A process that is killed in here leaves the rest to the others, who find it within half a second: a priority that one of
        them gives meanwhile to a row that was written since becomes the default one, 1.

        Raises:
            RuntimeError: the writer is read-only.
        """
        if self._of_writer.read_only:
            raise RuntimeError(f"empty: the buffer is read-only ({type(self._writer).__name__}).")
        self._drop_ahead("empty")
        self._storage.empty(keep_write_count=not empty_write_count)
        self._storage.notify(None, None)

    # ---- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch.

        Args:
            batch_size: rows; default the constructor's, and nothing else with ``prefetch``.
            return_info: return ``(batch, info)``; ``info["index"]`` is int64 ``[B]`` (with ``ndim > 1`` a tuple of those).

        Returns:
            New tensors ``[B, ...]`` in the form of the rows (dict in, dict out), on the storage's device. Samplers without
            replacement may return fewer rows at the end of a pass.

        Raises:
            RuntimeError: no batch size is known; the buffer was shut down; with ``prefetch``, it was closed, or one of its own
                transforms is calling.
            NoSampleable: the buffer is empty (a ``RuntimeError``).
            ValueError: ``batch_size`` below 1, or with ``prefetch`` another one than the constructor's.

        Cost: O(bytes of the batch): two native calls at most. Releases the GIL; may be called from several threads.
        """
        if batch_size is None:
            batch_size = self._batch_size
        if batch_size is None or batch_size != self._batch_size:
            batch_size = self._resolve_batch_size(batch_size)
        if self._shut_down:
            raise RuntimeError("sample: the buffer was shut down.")
        prefetcher = self._prefetcher
        if prefetcher is not None:
            return self._prefetched(prefetcher, batch_size, return_info)
        key = self._draw_key()
        if self._pinning is None:
            return self._sampled(key, batch_size, return_info)
        return self._pinned_sample(self._pinning, key, batch_size, return_info)

    def _pinned_sample(self, pinning: Pinning, key: Key, batch_size: int, return_info: bool) -> Any:
        """A batch in pinned memory: gathered there, where nothing stands between gathering and the user."""
        if self._transform.reads or self._collates:
            return self._sampled(key, batch_size, return_info)
        with pinning.gathering():
            return self._sampled(key, batch_size, return_info)

    def _sampled(self, key: Key, batch_size: int, return_info: bool) -> Any:
        """Draw with a key, and read."""
        storage: Any = self._storage
        if self._draws_natively and storage.memory is not None:
            with_rows = return_info or self._shows_rows
            columns = storage.memory.sample_uniform(key, batch_size, with_rows, self._of_writer.tracks_tickets)
            info = {"index_generation": columns.pop()} if self._of_writer.tracks_tickets else {}
            return self._finish(columns, batch_size, columns.pop() if with_rows else None, info, return_info)
        columns, rows, info = self._read_batch(key, batch_size)
        return self._finish(columns, rows.numel(), rows, info, return_info)

    def _read_batch(self, key: Key, n: int) -> tuple[Any, Tensor, dict[str, Any]]:
        """Draw with a key, and copy the rows: ``(columns, rows, info)``."""
        storage: Any = self._storage
        if self._draws_natively and storage.memory is not None:
            columns = storage.memory.sample_uniform(key, n, True, self._of_writer.tracks_tickets)
            info = {"index_generation": columns.pop()} if self._of_writer.tracks_tickets else {}
            return columns, columns.pop(), info
        natively, memory = self._sample_natively, storage.memory
        if natively is not None and memory is not None and (memory.is_native or self._of_sampler.draws_windows):
            columns, rows, info = natively(storage, key, n, numbered=self._of_writer.tracks_tickets)
            return columns, rows, info
        return self._draw(n, key.value)

    def _finish(self, columns: Any, n: int, rows: Tensor | None, info: dict[str, Any], return_info: bool) -> Any:
        """From ``n`` rows that were read to what the user gets; ``rows`` may be None where nobody asked for them."""
        data = self._storage.batch(columns, n)
        if self._collates:
            data = self._collate(data)
        device = None
        if self._transform.reads:
            device = getattr(data, "device", None)
            data = self._transform.forward(self._copied(data, stacked=self._collate_fn is None))
        data = self._attached(data, n, rows, info)
        sample = (data, self._info(rows, info)) if return_info else data
        return sample if self._pinning is None else self._pinning(sample, device)

    # ---- batches ahead -------------------------------------------------------------------------------------------------

    def _prefetched(self, prefetcher: Prefetcher, batch_size: int, return_info: bool) -> Any:
        """The first of the batches ahead."""
        if prefetcher.lazy:
            try:
                key = prefetcher.turns.popleft()
            except IndexError:  # more threads than turns
                return self._sampled(self._draw_key(), batch_size, return_info)
            start = perf_counter()
            try:
                return self._sampled(key, batch_size, return_info)
            finally:
                if self._generator is None:  # _ask_ahead, without a call
                    key.draw()
                else:
                    key.draw(generator=self._generator)
                prefetcher.turns.append(key)
                if prefetcher.dear or perf_counter() - start > prefetcher.dear_s:
                    prefetcher.took(perf_counter() - start)
        data, rows, info = prefetcher.next(self)
        if not return_info:
            return data
        return data, (info if rows is None else self._info(rows, info))

    def _ask_ahead(self, key: Key) -> None:
        if self._generator is None:
            key.draw()
        else:
            key.draw(generator=self._generator)

    def _read_ahead(self, key: Key) -> tuple[Any, Any]:
        assert self._batch_size is not None
        before = self._source.state_dict() if self._of_sampler.can_rewind and not self.shared else None
        if self._pinning is None or self._transform.reads or self._collates:
            return self._read_batch(key, self._batch_size), before
        with self._pinning.gathering():
            return self._read_batch(key, self._batch_size), before

    def _finish_ahead(self, read: Any) -> Any:
        """``(data, rows, info)``, whose info is made when somebody asks for it; pinned, it is complete, and the rows are None."""
        columns, rows, info = read
        if self._pinning is None:
            return self._finish(columns, rows.numel(), rows, info, False), rows, info
        data, info = self._finish(columns, rows.numel(), rows, info, True)
        return data, None, info

    def _pass_ended(self) -> bool:
        """Whether the batch read last ended a pass. The sampler says so when that batch is handed out."""
        ended = self._of_sampler.has_epochs and self._source.ran_out
        if ended:
            self._source.ran_out = False
        return ended

    def _pass_over(self) -> None:
        self._source.ran_out = True

    _steps = Steps(ask=_ask_ahead, read=_read_ahead, finish=_finish_ahead, ended=_pass_ended, over=_pass_over)

    def _settle(self) -> None:
        """What happens to the buffer now is not for batches that were asked for before."""
        if self._prefetcher is not None:
            self._prefetcher.settle(self)

    def _drop_ahead(self, call: str, *, keys: bool = True) -> None:
        """Forget the batches ahead. Their rows go back to a pass, unless other processes walk it, too."""
        if self._prefetcher is None:
            return
        before = self._prefetcher.drop(call, keys=keys)
        if before is not None and not self.shared:
            ran_out = self._source.ran_out
            self._source.load_state_dict(before)
            self._source.ran_out = ran_out

    def _attached(self, data: Any, n: int, rows: Any, info: dict[str, Any]) -> Any:  # noqa: ARG002 - TensorDict buffers do
        """The batch with the entries that say which rows it holds."""
        return data

    def _info(self, rows: Any, info: dict[str, Any]) -> dict[str, Any]:
        index: Any = self._user_index(rows)
        if self._storage.ndim > 1:
            index = tuple(index.unbind(-1))
        elif self._of_sampler.draws_windows:
            index = (index,)
        return {"index": index, **info}

    def _collate(self, data: Any) -> Any:
        if self._collate_fn is not None:
            return self._collate_fn(data)
        return collate.stack(data) if isinstance(self._storage, storages.ListStorage) else data

    def _copied(self, data: Any, *, stacked: bool) -> Any:
        """Data that transforms may change: a list storage hands out what it keeps, unless it was stacked into something new."""
        if not isinstance(self._storage, storages.ListStorage):
            return data
        if stacked:
            return _map_tensors(data, lambda x: x.clone() if isinstance(x, LazyStackedTensorDict) else x)
        return _map_tensors(data, lambda x: x.copy() if isinstance(x, np.ndarray | np.generic) else x.clone())

    def _draw(self, batch_size: int, key: int) -> tuple[Any, Tensor, dict[str, Any]]:
        """Ask the sampler, read, and draw again what moved meanwhile."""
        extent = self._storage.extent()
        if extent.size == 0:
            samplers.check_drawable(extent.size)
        if self._of_sampler.draws_windows:  # perhaps it has drawn for another buffer since
            self._source.bind(self._storage)
        draw = self._source.draw(extent, batch_size, key)
        chosen = draw.tickets is not None
        if self._of_writer.tracks_tickets and not chosen:  # so that the generation is that of what was read
            draw = draw._replace(tickets=self._storage.numbers_of(draw.rows))
        columns, moved = self._storage.read(draw.rows, draw.tickets)
        if moved:
            draw = self._read_again(draw, columns, moved, "sample", key=key, chosen=chosen)
        info = dict(draw.info)
        if self._of_writer.tracks_tickets:
            info["index_generation"] = draw.tickets
        return columns, draw.rows, info

    def _read_again(
        self, draw: Draw, columns: Any, moved: list[int], call: str, *, key: int | None = None, chosen: bool = False
    ) -> Draw:
        """Replace what was read of rows that moved meanwhile; what was read in the end.

        The same rows once more; or, where the sampler named the tickets they must have (``chosen``), others of its choice. Of
        the others those that hold nothing any more are replaced by live ones; without a ``key`` they are refused.

        Raises:
            RowError: a row that holds nothing any more, without a ``key``.
            NoSampleable: the buffer was emptied.
            WriterStalled: a row moved at every try.
        """
        storage = self._storage
        rows, info = draw.rows.clone(), dict(draw.info)
        tickets = None if draw.tickets is None else draw.tickets.clone()
        deadline = time.monotonic() + _native.wait_limit()
        attempt = 0
        while moved:
            attempt += 1
            extent = storage.extent()
            if extent.size == 0:
                raise NoSampleable(f"{call}: the buffer was emptied meanwhile. Add data first.")
            if attempt > _TRIES:
                if time.monotonic() > deadline:
                    raise WriterStalled(
                        f"{call}: row {int(rows[moved[0]])} moved at every try for {_native.wait_limit():g} s."
                    )
                time.sleep(0.001)
            places = torch.tensor(moved, device="cpu")
            expected = None
            gone = [] if chosen else [moved[i] for i in storage.hold_nothing(rows[places]).nonzero().flatten().tolist()]
            if gone and key is None:
                raise RowError(
                    f"{call}: row {int(rows[gone[0]])} is not live any more: its writer died, or the buffer was emptied."
                )
            if gone:  # their writer died meanwhile
                assert key is not None
                rows[gone] = samplers.RandomSampler().draw(extent, len(gone), _mix(key, attempt)).rows
            if chosen:
                assert key is not None
                other = self._source.draw(extent, len(moved), _mix(key, attempt))
                rows[places], expected = other.rows, other.tickets
                info = {name: _replaced(value, places, other.info.get(name)) for name, value in info.items()}
            if tickets is not None:
                expected = storage.numbers_of(rows[places]) if expected is None else expected
                tickets[places] = expected
            fresh, still = storage.read(rows[places], expected)
            storage.patch(columns, moved, fresh)
            moved = [moved[i] for i in still]
        return Draw(rows, tickets, info)

    def _draw_key(self) -> Key:
        """64 random bits from the generator: all randomness of one draw."""
        key = self._key
        if self._generator is None:
            key.draw()
        else:
            key.draw(generator=self._generator)
        return key

    def _resolve_batch_size(self, batch_size: int | None, *, drawing: bool = True) -> int:
        if batch_size is None:
            if self._batch_size is None:
                raise RuntimeError(
                    "sample: expected a batch size: pass sample(batch_size) or ReplayBuffer(batch_size=…)."
                )
            return self._batch_size
        _check_batch_size(batch_size)
        if drawing and self._prefetcher is not None and batch_size != self._batch_size:
            raise ValueError(
                f"sample: batch_size: expected the prefetched {self._batch_size}, got {batch_size}. Sample from another ReplayBuffer "
                "over the same storage, or without prefetch."
            )
        if drawing and not self._warned_batch_size and self._batch_size not in (None, batch_size):
            self._warned_batch_size = True
            warn(f"sample: batch_size={batch_size} is used instead of the buffer's batch_size={self._batch_size}.")
        return batch_size

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether :meth:`sample` would find data now. Raises ``RuntimeError`` if no batch size is known."""
        n = self._resolve_batch_size(batch_size, drawing=False)
        return self._source.can_sample(self._storage, n)

    def __iter__(self) -> Iterator[Any]:
        """Batches, until the sampler ran out; for ever with replacement. Needs the constructor's ``batch_size``."""
        if self._batch_size is None:
            raise RuntimeError("iteration: expected a batch size: pass ReplayBuffer(batch_size=…).")
        return self._batches()

    def _batches(self, *, begun: bool = False) -> Iterator[Any]:
        """``begun``: go on behind a batch that was handed out, perhaps the last of its pass."""
        if not begun:
            self._source.ran_out = False
        while not begun or self._prefetcher or not self._source.ran_out:
            begun = True
            yield self.sample()

    def next(self) -> Any:
        """The next batch of a persistent iterator; None at its end, after which it begins again. Td batches: no device."""
        if self._iterator is None:
            self._iterator = iter(self)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        elif is_tensor_collection(batch):
            batch = batch.clear_device_()
        return batch

    # ---- rows by number ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: Any) -> Any:
        """Rows by number, after collating and read transforms.

        Args:
            index: an int (one row, negative counts live rows from the end); a slice or bool mask over the live rows in row
                order; a list, range, array or tensor of rows; or a key, ``rb["a"]`` or ``rb["next", "reward"]``: that field
                of all live rows.

        Returns:
            A copy; but a contiguous slice of a tensor storage without transforms is a **live view**: a writer at work shows
            through, and writing to it writes the buffer unnoticed.

        Raises:
            RowError: a row that is not live (an ``IndexError``).
            KeyError: no such field.
            RuntimeError: nothing was ever written.
        """
        if _is_key(index):
            return _entry(self[:], index)
        where = self._where(index)
        if where.view is not None and not self._transform.reads:
            data = self._storage.view(where, self._row_entries(where))
        else:
            data = self._read(where)
        stacked = not (not self._collates or where.single or isinstance(index, int))
        if stacked:
            data = self._collate(data)
        if self._transform.reads:
            data = self._transform.forward(self._copied(data, stacked=stacked and self._collate_fn is None))
        return data

    def _where(self, index: Any) -> Rows:
        """The rows an index means: with ``ndim > 1`` it is one into the layout of :meth:`extend`, ``[*columns, T]``."""
        storage = self._storage
        if not storage.initialized:
            storage.store  # noqa: B018 - raises: nothing was written
        where: Rows = storage.locate(index)
        return where

    def _read(self, where: Rows) -> Any:
        columns, moved = self._storage.read(where.rows)
        if moved:
            self._read_again(Draw(where.rows), columns, moved, "rb[index]")
        return self._storage.pack(columns, where, self._row_entries(where))

    def _row_entries(self, where: Rows) -> dict[str, Tensor] | None:
        """Entries that TensorDicts read by number get beside their fields: with ``ndim > 1`` the slot, not the row."""
        if not self._of_writer.adds_index:
            return None
        width = math.prod(self._storage.columns)
        return {"index": self._to_device(where.rows if width == 1 else where.rows // width)}

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace live rows, or with a key one field of all live rows. Write transforms apply to rows.

        Cursor and length stay.

        Raises:
            RowError: a row that is not live. KeyError: no such field. RuntimeError: shapes or dtypes differ. Nothing is
                written.
        """
        self._check_editable("rb[index] = value")
        if _is_key(index):
            self._edit_field(index, value, slice(None), "rb[key] = value")
            return
        where = self._where(index)
        value = self._without_synthesised(value, "rb[index] = value")
        if self._transform.writes:
            value = self._transform.inv(_containers_anew(value))
        prepared = self._storage.prepare_at(where, value, "rb[index] = value", ignored=self._ignored)
        self._storage.notify(self._storage.edit(where, prepared), value)

    def _without_synthesised(self, data: Any, call: str) -> Any:  # noqa: ARG002 - TensorDict buffers have such entries
        """Data without the entries that are made on reading."""
        return data

    def set_at_(self, key: Any, value: Any, index: Any) -> Self:
        """Replace one stored field of live rows, in place, without transforms.

        Raises: as ``rb[index] = value``. TypeError: a list storage, which has no fields.
        """
        self._check_editable("set_at_")
        self._edit_field(key, value, index, "set_at_")
        return self

    def set_(self, key: Any, value: Any) -> Self:
        """Replace one stored field of all live rows: ``value`` is ``[len(rb), ...]``. Raises: as :meth:`set_at_`."""
        self._check_editable("set_")
        self._edit_field(key, value, slice(None), "set_")
        return self

    def update_(
        self,
        input: Any,  # noqa: A002 - TensorDict's name
        clone: bool = False,  # noqa: ARG002 - TensorDict's argument: what is stored is always a copy
        *,
        keys_to_update: Iterable[Any] | None = None,
    ) -> Self:
        """Replace several stored fields of all live rows.

        Args:
            input: a (nested) dict or TensorDict of ``[len(rb), ...]`` tensors.
            clone: accepted for compatibility: values are always copied into the store.
            keys_to_update: only these keys; all of ``input`` by default.

        Raises: as :meth:`set_at_`. Keys and shapes are checked first; then nothing or everything is written.
        """
        self._check_editable("update_")
        entries = dict(flatten(input))
        if keys_to_update is not None:
            wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys_to_update]
            for w in wanted:
                if not any(key[: len(w)] == w for key in entries):
                    raise KeyError(f"update_: expected keys of the input, {list(entries)}, got {w}.")
            entries = {key: value for key, value in entries.items() if any(key[: len(w)] == w for w in wanted)}
        storage = self._tensor_storage("update_")
        storage.notify(storage.edit_fields(self._where(slice(None)), entries, "update_"), None)
        return self

    def _edit_field(self, key: Any, value: Any, index: Any, call: str) -> None:
        storage = self._tensor_storage(call)
        path = (key,) if isinstance(key, str) else tuple(key)
        write = storage.edit_fields(self._where(index), {path: value}, call)
        storage.notify(write, None)

    def _tensor_storage(self, call: str) -> storages.TensorStorage:
        if not isinstance(self._storage, storages.TensorStorage):
            raise TypeError(f"{call}: expected a tensor storage, a {type(self._storage).__name__} has no fields.")
        return self._storage

    def _check_editable(self, call: str) -> None:
        if self._of_writer.read_only:
            raise RuntimeError(f"{call}: the buffer is read-only ({type(self._writer).__name__}).")
        self._settle()

    def read_all_in_order(self, end: int | None = None) -> Any:
        """``rb[:end]``: live rows in row order."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """``rb[:end] = data``; ``end`` defaults to the number of rows given."""
        self[: _rows_of(data) if end is None else end] = data

    # ---- components ----------------------------------------------------------------------------------------------------

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end of the list: forward on what is read, inverse on what is written.

        A plain callable is for reading; with ``invert`` for writing. On reading, a transform must return something; on
        writing, None or no rows hold everything back. What it raises comes through, with a note which one it was; nothing is
        written then. The containers it is given are its own, and of what was read the tensors, too.

        Prefetched batches are dropped.

        Raises:
            RuntimeError: no transform.
        """
        self._drop_ahead("append_transform")
        self._transform.append(transform, invert=invert)
        self._choose_paths()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """As :meth:`append_transform`, before position ``index``. Raises ``ValueError`` for a position out of range."""
        self._drop_ahead("insert_transform")
        self._transform.insert(index, transform, invert=invert)
        self._choose_paths()
        return self

    @property
    def storage(self) -> Storage:
        """What holds the rows."""
        storage: Storage = self._storage
        return storage

    @property
    def sampler(self) -> Any:
        """What chooses rows to read."""
        if not self._draws_natively:
            self._settle()  # it may be changed now
        return self._sampler

    @property
    def writer(self) -> Any:
        """What chooses where new rows go."""
        self._settle()  # it may write now
        return self._writer

    @property
    def transform(self) -> Compose:
        """The list of transforms."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Default batch size."""
        return self._batch_size

    @property
    def prefetch(self) -> int:
        """Batches asked for ahead."""
        return 0 if self._prefetcher is None else self._prefetcher.depth

    @property
    def dim_extend(self) -> int:
        """Dimension of ``extend``'s data along which time runs."""
        return int(self._storage.ndim) - 1

    @property
    def initialized(self) -> bool:
        """Whether the buffer is built. Always true here."""
        return True

    @property
    def shared(self) -> bool:
        """Whether several processes may use the buffer."""
        return bool(self._storage.shared)

    def share(self, shared: bool = True) -> Self:
        """Let processes that receive the buffer from now on see the same rows: all of them may write, sample and update.

        A ``LazyMemmapStorage`` is shared already. The rows of a ``LazyTensorStorage`` move to a folder in the system's
        shared memory, whose RAM is taken at once; the last process that closes it removes it. No other thread may use the
        buffer meanwhile; views handed out before show the old memory. A buffer that is handed to a process which is being
        started by ``spawn`` or ``forkserver`` is shared at that moment. Before a ``fork``, call this.

        Args:
            shared: False does nothing.

        Returns:
            The buffer.

        Raises:
            RuntimeError: a storage that cannot be shared: a list, on an accelerator, or around shared memory that cannot be a
                store (see docs/guarantees.md).
            OSError: it does not fit into shared memory. Nothing has changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100)).share()
        >>> rb.extend(torch.arange(3)).tolist(), rb.shared
        ([0, 1, 2], True)
        """
        if shared and not self.shared:
            self._settle()
            self._storage.share()
        return self

    def moved(self) -> None:
        """Called by the storage when its rows lie in another store, or in none until the next write."""
        self._source.moved()
        self._choose_paths()
        self._recorded = False
        with contextlib.suppress(OSError):  # the next write notes it
            self._record()

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Swap the storage (and the collate function, if one is given); the previous storage is returned."""
        previous: Storage = self._storage
        made = _instance(storage, storages.Storage, "storage", None)
        self._placer.register_storage(made)  # first: it may refuse
        self._drop_ahead("set_storage")
        self._lane = _lane_in(made, self._named_lane)
        self._storage = made
        previous.detach(self)
        self._storage.attach(self)
        if collate_fn is not None:
            self._collate_fn = collate_fn
        self._take_sampler(self._sampler)
        self._take_writer(self._writer)
        return previous

    def set_sampler(self, sampler: Sampler) -> Any:
        """Swap the sampler; the previous one is returned."""
        previous = self._sampler
        made = _instance(sampler, Sampler, "sampler", None)
        self._drop_ahead("set_sampler")
        self._take_sampler(made)
        self._record()
        return previous

    def set_writer(self, writer: Writer) -> Any:
        """Swap the writer; the previous one is returned. Cursors belong to the store: the next write goes on there."""
        previous = self._writer
        made = _instance(writer, Writer, "writer", None)
        self._drop_ahead("set_writer")
        self._take_writer(made)
        self._record()
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """The generator of all later draws; None: torch's default one. Raises ``ValueError`` for one not on the CPU."""
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"generator: expected a CPU generator, got one on {generator.device}. Rows are drawn on the CPU."
            )
        if self._sampler is not None:
            self._drop_ahead("set_rng", keys=False)
        self._generator = generator

    def _take_sampler(self, sampler: Any) -> None:
        source = samplers.declared(sampler)
        if source.drop_last and self._batch_size is None:
            raise ValueError(f"{type(sampler).__name__}: drop_last needs ReplayBuffer(batch_size=…).")
        source.bind(self._storage)  # first: it may refuse
        self._sampler, self._source, self._of_sampler = sampler, source, source.traits
        self._recorded = False
        self._choose_paths()

    def _take_writer(self, writer: Any) -> None:
        placer = writers.declared(writer)
        placer.register_storage(self._storage)  # first: it may refuse
        self._writer, self._placer, self._of_writer = writer, placer, placer.traits
        self._recorded = False
        self._choose_paths()

    def _choose_paths(self) -> None:
        """Uniform draws and plain appends need nothing between them and the store: one native call each."""
        fields, of_sampler = self._storage.traits.has_fields, self._of_sampler
        self._draws_natively = fields and of_sampler.draws_uniformly
        self._sample_natively = self._source.sample_natively if fields and of_sampler.reads_natively else None
        self._appends = fields and self._of_writer.appends
        self._collates = not fields or self._collate_fn is not None
        if self._prefetcher is not None:
            plainly = self._draws_natively and self._pinning is None and not self._transform.reads
            self._prefetcher.draws(plainly=plainly, passes=of_sampler.has_epochs, kept=not self.shared)

    def update_priority(self, index: Any, priority: Any, *, generation: Tensor | None = None) -> None:
        """New priorities of rows; a sampler without priorities warns and does nothing.

        Args:
            index: rows as ``info["index"]`` or :meth:`extend` names them; -1 is passed over, of duplicates the last counts.
            priority: a number for all, or ``[B]``: at least 0 and finite.
            generation: ``info["index_generation"]``: rows rewritten since they were drawn are dropped and counted in ``stats()``.

        Raises:
            PriorityError: a priority is NaN, infinite, negative or too large. Nothing is changed.
            RowError: a row outside the storage. RuntimeError: another number of priorities than rows. Nothing is changed.
        """
        self._bound_sampler().update_priority(self._rows_named(index), priority, generation=generation)

    def mark_update(self, index: Any) -> None:
        """Rows were rewritten: give them the default priority again. No effect on samplers without priorities."""
        self._bound_sampler().mark_update(self._rows_named(index))

    def _bound_sampler(self) -> DeclaredSampler:
        """The sampler, which may have served another storage meanwhile."""
        self._settle()
        self._source.bind(self._storage)
        return self._source

    def _rows_named(self, index: Any) -> Any:
        """Rows of an index in the users' form; with ``ndim > 1`` coordinates ``[B, ndim]`` or an ``ndim``-tuple of ``[B]``."""
        dims = self._storage.ndim
        if dims == 1:
            return index
        if isinstance(index, tuple):
            index = torch.stack([torch.as_tensor(one, device="cpu") for one in index], -1)
        if not isinstance(index, Tensor) or index.shape[-1:] != (dims,):
            raise RuntimeError(f"expected an index [B, {dims}], or a tuple of {dims} tensors [B].")
        rows = self._storage.rows_at(index.to("cpu", torch.int64))
        outside = (rows < 0) & ~(index == -1).all(-1).to("cpu")
        if bool(outside.any()):
            raise RowError(f"expected an index inside the storage, got {index[outside.to(index.device)][0].tolist()}.")
        return rows

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors and plain values: copies, which ``torch.save`` and the like carry.

        Keys: ``_storage`` (rows, their order, cursors, indexes), ``_sampler`` (with the index that it draws from),
        ``_writer``, ``_transforms``, ``_batch_size``, ``_lane`` (a list of the one that was named, or 0), ``_iterating``
        (whether :meth:`next` is amid a pass), ``_consume_after_n_samples``, ``_rng`` (``[state, device]`` of the generator that was
        given, else None), ``_default_rng`` (the state of torch's) and ``_prefetch_state``. Writers, of all processes, wait meanwhile.

        Raises:
            TypeError: something that is neither a tensor nor a plain value, in items of a list or in the state of a component of
                your own; names the way to it.

        Cost: O(bytes of the rows), which are copied.
        """
        self._finish_ahead_of_pause()
        with self._storage.paused:
            state = self._state_but_rows()
            return {"_storage": self._storage.state_dict(without=self._sampler_indexes()), **state}

    def _finish_ahead_of_pause(self) -> None:
        """What is made now keeps no writer waiting; and transforms may be writers."""
        self._bound_sampler()
        self.synchronize()

    def _state_but_rows(self, *, with_sampler: bool = True, drop_ahead: bool = False) -> dict[str, Any]:
        """All of :meth:`state_dict` but the storage's. ``drop_ahead``: as if the batches ahead had never been drawn from a pass."""
        ahead = None if self._prefetcher is None else self._prefetcher.saved(self)  # first: it draws what was asked for
        sampler = saved(self._bound_sampler(), "_sampler") if with_sampler else {}
        if drop_ahead and ahead is not None:
            befores = [batch["before"] for batch in ahead["batches"] if batch.get("before") is not None]
            sampler, ahead = next(iter(befores), sampler), None
        if ahead is not None and not any(ahead.values()):
            ahead = None
        return {
            "_sampler": sampler,
            "_writer": saved(self._writer, "_writer"),
            "_transforms": self._transform.state_dict(),
            "_batch_size": self._batch_size,
            "_lane": self._saved_lane,
            "_iterating": self._iterator is not None,
            "_consume_after_n_samples": None,
            "_rng": None if self._generator is None else [self._generator.get_state(), "cpu"],
            "_default_rng": torch.default_generator.get_state(),
            "_prefetch_state": None if ahead is None else self._prefetch_state(ahead),
        }

    def _sampler_index(self) -> str | None:
        """The name of the priorities that are all of the sampler's state; None: it has another one."""
        own = self._sampler_indexes()
        return own[0][0] if [kind for _, kind in own] == [priorities.KIND] else None

    def _sampler_indexes(self) -> tuple[tuple[str, str], ...]:
        """Names and kinds of the storage's indexes that the sampler's state has."""
        return self._bound_sampler().own_indexes

    def load_state_dict(self, state_dict: dict[str, Any], *, default_rng: bool = False) -> None:
        """Take over a saved state: every later operation gives what it would have given then.

        Draws, too, if a generator was given, or with ``default_rng``. Rows get new tickets: draws of before do not match any more,
        and priorities that come for them are dropped. Samplers of other buffers on the storage hear of an emptied one.

        Args:
            state_dict: of a buffer with the same kinds of components, and fields, capacity and lanes as here, if anything was
                written. The sampler's ``alpha`` must be that of the state.
            default_rng: set torch's default generator, too: for the whole program.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range.
            IncompatibleCheckpoint: another schema, capacity, number of lanes, alpha or eps (a ``ValueError``). Whatever components of
                your own raise. Nothing is changed.
            OSError: no space for the rows. The buffer is empty then, if it was not already.

        Cost: O(bytes of the rows), which are copied.
        """
        self._prepare_state(state_dict, default_rng=default_rng).commit()

    def _prepare_state(self, state: Any, *, default_rng: bool) -> Commit:
        """Check a state."""
        name = type(self).__name__
        check_keys(state, _STATE, name)
        load = checked(self._storage, state["_storage"], f"{name}: _storage")
        return self._prepare_rest(state, state["_storage"], load, default_rng=default_rng)

    def _prepare_rest(
        self, state: dict[str, Any], of_storage: dict[str, Any], storage_load: Commit, *, default_rng: bool
    ) -> Commit:
        """Check all but the storage's state.

        ``of_storage``: the plain values of that one.
        """
        name = type(self).__name__
        batch_size = typed(state, "_batch_size", (int, type(None)), name)
        if batch_size is not None:
            _check_batch_size(batch_size)
        elif self._source.drop_last:
            raise IncompatibleCheckpoint(f"{name}: _batch_size: expected an int, as drop_last needs one, got None.")
        elif self.prefetch:
            raise IncompatibleCheckpoint(
                f"{name}: _batch_size: expected an int, as prefetch={self.prefetch} needs one, got None. Load it without prefetch."
            )
        lane = self._checked_lane(state, name)
        iterating = typed(state, "_iterating", bool, name)
        if state["_consume_after_n_samples"] is not None:
            raise TypeError(f"{name}: _consume_after_n_samples: expected None: a ConsumingSampler will carry it.")
        rng = self._checked_rng(state["_rng"])
        default = _checked_generator(state["_default_rng"], f"{name}: _default_rng")
        take_prefetched = self._checked_prefetch(state["_prefetch_state"])
        sampler = self._bound_sampler()
        take_writer = checked(self._writer, state["_writer"], f"{name}: _writer")
        take_transforms = checked(self._transform, state["_transforms"], f"{name}: _transforms")
        take_sampler = Change(sampler.checked_state(state["_sampler"], self._storage.capacity_after(of_storage)))

        def take() -> None:
            self._drop_ahead("load", keys=False)
            self._storage.allocate_for(of_storage)
            # Whoever wrote in between would write rows that the sampler's state does not know.
            with self._storage.placing, self._storage.paused:  # who has placed rows is about to write them
                storage_load.commit()
                self._storage.notify(None, None)
                self._bound_sampler()  # to what was allocated just now
                take_sampler.commit()
                take_writer.commit()
                take_transforms.commit()
                self._batch_size, self._lane = batch_size, lane
                self._iterator = self._batches(begun=True) if iterating else None
                if rng is not None:
                    self._generator = self._generator or torch.Generator()
                    self._generator.set_state(rng.get_state())
                if default_rng:
                    torch.default_generator.set_state(default.get_state())
                take_prefetched()
            with contextlib.suppress(OSError):  # the rows are there; the next write notes it
                if not self._recorded:
                    self._record()

        return Change(take)

    def _checked_lane(self, state: dict[str, Any], where: str) -> int | None:
        """The lane of a saved handle. Earlier states have an int also of one that named its lane, unless that was 0."""
        saved = typed(state, "_lane", (list, int, type(None)), where)
        if saved in (None, 0):
            return _lane_in(self._storage, None)
        named = saved if isinstance(saved, list) else [saved]
        if len(named) != 1:
            raise ValueError(f"{where}: _lane: expected None or a list of one lane, got {len(named)}.")
        return integer({"_lane": named[0]}, "_lane", 0, self._storage.lanes, where)

    def _checked_rng(self, rng: Any) -> torch.Generator | None:
        where = f"{type(self).__name__}: _rng"
        if rng is None:
            return None
        if not isinstance(rng, list | tuple) or len(rng) != 2:
            raise TypeError(f"{where}: expected None or [state, device], got a {type(rng).__name__}.")
        if rng[1] != "cpu":
            raise ValueError(f"{where}: expected the state of a CPU generator, got one of {rng[1]!r}.")
        return _checked_generator(rng[0], where)

    def _prefetch_state(self, ahead: dict[str, Any]) -> dict[str, Any]:
        """Batches that were asked for and not handed out, and the keys of those that come next."""
        queue = []
        for batch in ahead["batches"]:
            made = batch.get("made")
            known = None if made is None else pack([[part for part in made if part is not None]])
            queue.append({"key": batch["key"], "made": known, "last": batch.get("last"), "before": batch.get("before")})
        clock = self._storage.next_number()
        return {"version": 1, "capacity": self.prefetch, "clock": clock, "queue": queue, "keys": ahead["keys"]}

    def _checked_prefetch(self, state: Any) -> Callable[[], None]:
        """Check batches that were asked for and not handed out; what takes them over."""
        prefetcher, where = self._prefetcher, f"{type(self).__name__}: _prefetch_state"
        if state is None:
            return lambda: None
        check_keys(state, ("version", "capacity", "clock", "queue", "keys"), where)
        integer(state, "version", 1, 2, where)
        depth = integer(state, "capacity", 1, 1 << 31, where)
        if depth != self.prefetch:
            raise RuntimeError(
                f"{where}: expected a buffer with prefetch={depth}, as it was saved, got prefetch={self.prefetch}."
            )
        batches = [
            self._checked_batch(entry, f"{where}: batch {i}")
            for i, entry in enumerate(typed(state, "queue", list, where))
        ]
        keys = [_checked_key(key, f"{where}: keys") for key in typed(state, "keys", list, where)]
        clock = integer(state, "clock", 0, 1 << 62, where)
        assert prefetcher is not None  # its depth is not 0

        def take() -> None:
            moved = self._storage.next_number() - clock  # the rows have new tickets, in the old order
            for batch in batches:
                for made in batch.get("made", ()):
                    _renumber(made, moved)
            prefetcher.restore({"batches": batches, "keys": keys})

        return take

    def _checked_batch(self, entry: Any, where: str) -> dict[str, Any]:
        check_keys(entry, ("key", "made", "last", "before"), where)
        key = _checked_key(entry["key"], where)
        if entry["made"] is None:
            return {"key": key}
        parts = unpack(entry["made"], None, where)
        if len(parts) != 1 or len(parts[0]) not in (2, 3) or not isinstance(parts[0][-1], dict):
            raise ValueError(f"{where}: made: expected a batch, perhaps rows, and info.")
        data, *rows, info = parts[0]
        before = copied(typed(entry, "before", (dict, type(None)), where), where)
        last = typed(entry, "last", bool, where)
        return {"key": key, "made": (data, rows[0] if rows else None, info), "last": last, "before": before}

    # ---- files ---------------------------------------------------------------------------------------------------------

    def dumps(self, path: str | os.PathLike[str], *, prefetch: str = "save") -> None:
        """Save the buffer as a folder, which in one step replaces one that was saved there.

        All of :meth:`state_dict`, a folder per component; ``TensorDict.load_memmap(path / "storage")`` reads the rows of a tensor
        storage. Of rows that were never written nothing is saved. What is saved is as it was at one moment, for which writers, of all
        processes, wait: for the copy of 8 bytes per row and priority, and of all rows if these are below 32 MiB or items of a
        ``ListStorage``. Larger ones are copied while others write: a row that is overwritten or changed before that is left out, and
        the log says how many. Readers do not wait. What was replaced is removed in the background, where the end of the
        program waits for it.

        Args:
            path: a free name, an empty folder, or what an earlier call has made.
            prefetch: ``"drop"`` leaves out batches that were drawn ahead: then the saved buffer draws others in their place.

        Raises:
            FileExistsError: something else lies there.
            TypeError: something that is neither a tensor nor a plain value; names the way to it.
            ValueError: ``prefetch`` is neither ``"save"`` nor ``"drop"``.
            OSError: no space, or an I/O error. What lay there before still does.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(f"{folder}/replay")
        ...     other.loads(f"{folder}/replay")
        >>> other[:3]
        tensor([0, 1, 2])
        """
        if prefetch not in ("save", "drop"):
            raise ValueError(f"dumps: prefetch: expected 'save' or 'drop', got {prefetch!r}.")
        self._finish_ahead_of_pause()
        with replacing(Path(path)) as folder, disk.batched_fsync():
            prepared = self._storage.prepare_snapshot(without=self._sampler_indexes(), whole=True)
            with self._storage.paused:
                snapshot = prepared.take()
                parts = self._parts(noted=(), drop_ahead=prefetch == "drop")
            rows = snapshot.save(folder / saved_parts.STORAGE)
            infos = [rows.info, *saved_parts.write_parts(folder, parts)]
            finish_dump(folder, infos, cut=rows.cut, totals=rows.totals, schema_sum=rows.schema_sum)

    def loads(self, path: str | os.PathLike[str], *, convert: bool = False, default_rng: bool = False) -> None:
        """Take over what :meth:`dumps` saved: every later operation gives what it would have given then.

        Args:
            path: the folder; or one that TorchRL 0.14 dumped: its rows, cursor, priorities with alpha and beta, and generator are
                taken. Its pickles are never opened; a warning names them.
            convert: of another capacity or number of lanes whole trajectories are taken, the newest first, and dealt out to the lanes:
                fields that mean lanes, ids or positions (``env_id``, ``collector/traj_ids`` or ``episode``) are rewritten. With a
                ``TensorDictMaxValueWriter`` the best rows are taken, as they are. A pass begins anew, batches ahead are dropped.
                Priorities of another ``alpha`` or ``eps`` are computed anew. What is left out is counted in a warning.
            default_rng: as for :meth:`load_state_dict`.

        Raises:
            CorruptCheckpoint: damaged; names file and byte. IncompatibleCheckpoint: a folder of checkpoints, or saved by other kinds of
                components, or as :meth:`load_state_dict`. Nothing is changed; but where nothing was stored rows are checked while
                they are read, and nothing is stored if that fails.
            OSError: no space for the rows, or an I/O error. The buffer is empty then, if it was not already.
        """
        foreign = foreign_format(Path(path))
        if foreign is not None:
            if convert:
                raise IncompatibleCheckpoint(
                    f"{path}: a dump of {foreign.library}'s cannot be converted. Load it into a buffer of its size."
                )
            dump = foreign.read(Path(path), ndim=self._storage.ndim, max_bytes=_free_bytes())
            self._prepare_foreign(dump, foreign.library).commit()
            return
        if series.is_series(Path(path)):
            raise IncompatibleCheckpoint(
                f"{path}: expected a dump or one checkpoint, got a folder of them. Checkpointer({str(path)!r}, rb).restore() loads the "
                "newest of it; loads takes the path of one."
            )
        with Checkpoint(Path(path)) as checkpoint:
            if checkpoint.manifest.world > 1:
                raise IncompatibleCheckpoint(
                    f"loads: {path}: expected what one process saved, got a checkpoint of {checkpoint.manifest.world} ranks. "
                    f"Checkpointer({str(Path(path).parent)!r}, buffer).restore(name={Path(path).name!r}) takes all of it."
                )
            self.prepare_load(checkpoint, default_rng=default_rng, convert=convert).commit()

    dump = save = dumps
    load = loads

    def _prepare_foreign(self, dump: ForeignDump, library: str) -> Commit:
        """Check a dump of another library's. What it does not say stays as it is here."""
        storage = self._storage
        if not storage.form.takes_rows:
            raise IncompatibleCheckpoint(
                f"{dump.path}: expected a dump of engram's for a {type(storage).__name__}, got one of {library}'s. Load it into a "
                "LazyTensorStorage or a LazyMemmapStorage."
            )
        synthesised = ("index", "index_generation") if self._shows_rows else ()
        here = None if storage.memory is None else storage.memory.schema
        schema = dump.schema(here, (*self._ignored, *synthesised))
        of_storage = dump.state(schema)
        load = storage.prepare_rows(of_storage, dump.source(schema))
        state = self._state_but_rows()
        if dump.priorities is not None and state["_sampler"].keys() >= {"alpha", "eps", "highest"}:
            leaves = dump.priorities.leaves
            state["_sampler"] |= {
                "alpha": dump.priorities.alpha,
                "beta": dump.priorities.beta,
                "eps": dump.priorities.eps,
                "highest": dump.priorities.max_priority or 0.0,
                "leaves": torch.where(leaves == 0, -0.0, leaves),
            }
        elif "leaves" in state["_sampler"]:
            state["_sampler"]["leaves"] = torch.zeros(0, dtype=torch.float64, device="cpu")
        if "visited" in state["_sampler"]:
            state["_sampler"] |= {"key": 0, "rows": 0, "visited": 0, "ran_out": False}
        if dump.rng_state is not None and self._generator is not None:
            state["_rng"] = [dump.rng_state, "cpu"]
        state["_batch_size"] = self._batch_size or dump.batch_size
        state["_prefetch_state"] = None
        return self._prepare_rest(state, of_storage, load, default_rng=False)

    def snapshot(self, *, prefetched: Literal["save", "drop"] = "save") -> Snapshot:
        """All that a checkpoint saves, as it is now. Writers wait for a copy of 8 bytes per row and priority.

        ``prefetched``: ``"drop"`` leaves out batches that were drawn ahead.
        """
        storage = self._storage
        drop = prefetched == "drop"
        self._parts(
            drop_ahead=drop
        )  # raises for what cannot be saved, and makes what is made once, before writers wait
        prepared = storage.prepare_snapshot(whole=False)
        with storage.paused:
            began = time.perf_counter()
            rows = prepared.take()
            parts = self._parts(noted=rows.priorities, drop_ahead=drop)
            return Snapshot(rows, parts, self.form, time.perf_counter() - began)

    @property
    def form(self) -> Form:
        """How the buffer keeps its rows, as far as a checkpoint must know."""
        form: Form = self._storage.form
        return form._replace(ranking=self._placer.ranking)

    def _parts(self, *, noted: Collection[str] | None = None, drop_ahead: bool = False) -> saved_parts.Parts:
        """All of the state but the storage's, as the parts of a checkpoint.

        ``noted``: names of priorities that the storage's part has, default all; the sampler's says which of them it is, if that is its
        state. ``drop_ahead``: without batches ahead.
        """
        index = self._sampler_index()
        if index is not None and (noted is None or index in noted):
            of_sampler: dict[str, Any] | None = {saved_parts.INDEX: index}
        else:
            of_sampler = None if index is None else self._storage.priorities_in_use(index)
        state = self._state_but_rows(with_sampler=of_sampler is None, drop_ahead=drop_ahead)
        if of_sampler is not None:
            state["_sampler"] = of_sampler
        functions = self._transform.functions
        states = {
            "sampler": state["_sampler"],
            "writer": state["_writer"],
            "transforms": state["_transforms"] | ({saved_parts.FUNCTIONS: functions} if functions else {}),
            "buffer": {name: state[f"_{name}"] for name in _IN_BUFFER},
            "rng": {"generator": state["_rng"], "default": state["_default_rng"]},
            "prefetch": {"batches": state["_prefetch_state"]},
        }
        return saved_parts.Parts(states, self._kinds())

    def _kinds(self) -> dict[str, str]:
        components = {"sampler": self._sampler, "writer": self._writer, "transforms": self._transform, "buffer": self}
        kinds = {part: type(component).__name__ for part, component in components.items()}
        return {**kinds, "rng": "Generator", "prefetch": "Prefetcher"}

    def prepare_load(
        self,
        checkpoint: Checkpoint,
        rank: int = 0,
        *,
        default_rng: bool = False,
        close_open: bool = False,
        convert: bool = False,
    ) -> Commit:
        """Check a rank's parts of a checkpoint, which must stay open until the load is committed.

        ``close_open``: trajectories that go on end where they are.

        Raises: as :meth:`loads`. Nothing is changed.
        """
        where = str(checkpoint.shard_folder(rank))
        with read_from(where):
            return self._prepare_parts(checkpoint, rank, where, default_rng, close_open, convert)

    def _prepare_parts(
        self, checkpoint: Checkpoint, rank: int, where: str, default_rng: bool, close_open: bool, convert: bool
    ) -> Commit:
        reader = saved_parts.open_storage(checkpoint, rank)
        found = saved_parts.read_parts(checkpoint, rank)
        states = saved_parts.checked_states(found, checkpoint.shard_folder(rank), self._kinds())
        if saved_parts.INDEX in states["sampler"]:
            states["sampler"] = saved_parts.index_state(reader, states["sampler"])
        of_storage: dict[str, Any] = reader.state
        if convert:
            of_storage, load = self._prepare_conversion(reader, states)
        else:
            load = self._storage.prepare_part(reader, close_open=close_open)
        state = self._state_of_parts(states, where)
        return self._prepare_rest(state, of_storage, load, default_rng=default_rng)

    def prepare_placed(
        self, checkpoint: Checkpoint, made: Reshard, rank: int, *, env_offset: int = 0, default_rng: bool = False
    ) -> Commit:
        """Check what a plan gives to this buffer of a checkpoint.

        What is not of rows is that of one rank. Passes over the rows and generators begin again, and nothing is prefetched.

        Args:
            checkpoint: open until the load is committed.
            made: the plan, of shards of that checkpoint.
            rank: of this buffer.
            env_offset: added to the lane in fields whose role is ``env_id``.
            default_rng: seed torch's default generator, too.

        Raises: as :meth:`loads`. Nothing is changed.
        """
        placed = made.rows(rank, env_offset)
        where = str(checkpoint.shard_folder(made.leader))
        with read_from(where):
            load = self._storage.prepare_rows(placed.state, placed.source)
            seed = seed_of(checkpoint, len(made.targets), rank)
            generator = torch.Generator().manual_seed(seed).get_state()
            shard = checkpoint.shard_folder(made.leader)
            read = saved_parts.checked_states(made.leader_parts(checkpoint), shard, self._kinds())
            self._state_of_parts(read, where)  # they have what is replaced
            states = {part: saved_parts.reset(part, state, seed, generator) for part, state in read.items()}
            if saved_parts.INDEX in states["sampler"]:
                states["sampler"] = placed.state["priorities"][states["sampler"][saved_parts.INDEX]]
            state = self._state_of_parts(states, where)
            state["_rng"] = None if self._generator is None else [generator, "cpu"]
            state["_lane"] = self._saved_lane  # that of another rank says nothing here
            return self._prepare_rest(state, placed.state, load, default_rng=default_rng)

    def _state_of_parts(self, states: dict[str, dict[str, Any]], where: str) -> dict[str, Any]:
        """All but the storage's, as :meth:`state_dict` has it."""
        for part, names in (("buffer", _IN_BUFFER), ("rng", ("generator", "default")), ("prefetch", ("batches",))):
            check_keys(states[part], names, f"{where}: {part}")
        functions = typed(
            {saved_parts.FUNCTIONS: [], **states["transforms"]}, saved_parts.FUNCTIONS, list, f"{where}: transforms"
        )
        saved_ones, ours = set(states["transforms"]) - {saved_parts.FUNCTIONS}, set(self._transform.state_dict())
        if saved_ones != ours:
            raise IncompatibleCheckpoint(
                f"{where}: transforms: expected the states {sorted(ours)}, got {sorted(saved_ones)}."
            )
        here = self._transform.functions
        if len(here) < len(functions):
            warn(
                f"{where}: saved with the transforms {', '.join(map(str, functions))}, which are code and not in it, and loaded into a "
                f"buffer with {', '.join(here) or 'none'}. Make the buffer with them: transform=…, or append_transform."
            )
        return {
            "_sampler": states["sampler"],
            "_writer": states["writer"],
            "_transforms": {name: of for name, of in states["transforms"].items() if name != saved_parts.FUNCTIONS},
            **{f"_{name}": states["buffer"][name] for name in _IN_BUFFER},
            "_rng": states["rng"]["generator"],
            "_default_rng": states["rng"]["default"],
            "_prefetch_state": states["prefetch"]["batches"],
        }

    def _prepare_conversion(
        self, reader: PartReader, states: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, Any], Commit]:
        """Check what is to be converted: the state that the storage gets, and its load. Changes the other states."""
        storage, sampler = self._storage, states["sampler"]
        shard = open_shard(reader, held=True)
        own = [name for name, kind in self._sampler_indexes() if kind == priorities.KIND and "leaves" in sampler]
        for name in own:
            here = self._sampler.state_dict()
            shard.head["priorities"][name] = priorities.with_parameters(sampler, here["alpha"], here["eps"])
        schema = storage.schema_here(shard.head["schema"], str(reader.folder))
        converted = converted_for(shard, schema, storage.ndim, self.form.ranking)
        dropped = [
            f"{said_counts(counts)} as {reason}" for reason, counts in converted.dropped.items() if counts["steps"]
        ]
        if dropped:
            warn(
                f"loads: {reader.folder.parent}: left out: {', '.join(dropped)}. The newest were taken: a larger storage takes more."
            )
        if len(storage):
            check_blocks(reader)
        state, source = converted.rows
        others = {name: known for name, known in state["priorities"].items() if name not in own}
        load = storage.prepare_rows({**state, "priorities": others}, source)
        for name in own:
            states["sampler"] = state["priorities"][name]
        states["sampler"] = saved_parts.reset_pass(states["sampler"], 0)
        states["prefetch"] = {"batches": None}
        if states["buffer"].get("lane") not in [[lane] for lane in range(storage.lanes)]:
            states["buffer"]["lane"] = 0
        return state, load

    # ---- life ----------------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Note in the directory which components the buffer has, for :meth:`open`."""
        if not self._storage.initialized:
            return
        store = self._storage.memory
        if store is None or store.directory is None or store.closed:
            self._recorded = True
            return
        self._recorded = False
        record = {
            "buffer": type(self).__name__,
            "sampler": _recorded(self._sampler, _SAMPLERS),
            "writer": _recorded(self._writer, _WRITERS),
            "batch_size": self._batch_size,
            "prefetch": self.prefetch,
            **self._record_more(),
        }
        files.overwrite(store.directory / layout.FOLDER / layout.BUFFER, json.dumps(record).encode())
        self._recorded = True

    def _is_recorded(self) -> bool:
        """Whether the directory names some components already."""
        store = self._storage.memory
        if store is None or store.directory is None or store.closed:
            return True
        return bool(_read_record(store.directory))

    def _record_more(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def open(
        directory: str | os.PathLike[str],
        *,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = False,
        generator: torch.Generator | None = None,
        unclean: str = "refuse",
        **later: Any,
    ) -> ReplayBuffer:
        """Go on with a store in a directory: same rows, length, cursors and lanes, sampling at once.

        Buffer class, sampler, writer, batch size and prefetch are those of the buffer that last wrote to it; an argument replaces
        one. If its process died, rows that were half written are set aside and that is logged. Within one process, a store that is
        open already is attached to.

        Args:
            directory: the ``scratch_dir`` of a ``LazyMemmapStorage``.
            sampler, writer, collate_fn, transform, batch_size, prefetch, pin_memory, generator: as for the constructor.
            unclean: ``"accept"`` takes a store that was open when the machine went down; ``"refuse"`` raises.

        Raises:
            FileNotFoundError: no store there.
            StoreInUse: another live process has it open.
            CorruptStore: a file is missing, truncated or changed. Nothing is modified.
            IncompatibleStore: made by a newer engram or on another platform.
            UncleanStore: see ``unclean``.
            TypeError: it was used with a custom sampler or writer, or with a tensorclass the program has not defined.

        Cost: O(1), and O(capacity) words if the last process died.
        """
        refuse("open", later, _LATER)
        if unclean not in ("refuse", "accept"):
            raise ValueError(f"open: unclean: expected 'refuse' or 'accept', got {unclean!r}.")
        path = Path(directory).absolute()
        storage = storages.LazyMemmapStorage.open(path, unclean=unclean)
        repair = storage.store.repair
        if repair is not None:  # said before anything else can fail
            storages.tensor.announce([f"{path}: its last process did not close it: {repair}."])
        try:
            record = _read_record(path)
            buffer_class = _BUFFERS.get(str(record.get("buffer", "ReplayBuffer")))
            if buffer_class is None:
                raise TypeError(f"open: the store was used by an unknown buffer class {record.get('buffer')!r}.")
            if batch_size is None:
                batch_size = _recorded_batch_size(record)
            arguments: dict[str, Any] = {
                "sampler": sampler if sampler is not None else _made_again(record.get("sampler"), _SAMPLERS, "sampler"),
                "writer": writer if writer is not None else _made_again(record.get("writer"), _WRITERS, "writer"),
                "batch_size": batch_size,
                "prefetch": prefetch if prefetch is not None else _recorded_prefetch(record, batch_size),
                **buffer_class.open_arguments(record),
            }
            rb: ReplayBuffer = buffer_class(
                storage=storage,
                collate_fn=collate_fn,
                transform=transform,
                pin_memory=pin_memory,
                generator=generator,
                **arguments,
            )
        except BaseException:
            storage.close()
            raise
        return rb

    @classmethod
    def open_arguments(cls, record: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - subclasses read it
        """Constructor arguments of this class in what a store recorded."""
        return {}

    def close(self) -> None:
        """Let go of files and locks; a temporary folder is removed. Repeatable; tensors handed out stay valid.

        From then on every use of the buffer, of its storage and of a sampler that draws from it raises ``RuntimeError``. ``repr``,
        :attr:`closed`, the names of its components, public attributes of your own and ``cleanup()`` of a ``LazyMemmapStorage`` go on.
        Where several buffers of this process use one store, it is the last one that closes it, and the others go on. With
        ``prefetch`` the batches ahead are dropped, and the threads end, which is waited for but for seconds at most. A save in the
        background that was begun is finished. Files and locks are let go when the buffer is collected or the program ends, too.
        """
        prefetcher, storage = self._prefetcher, self._storage
        if prefetcher is not None:
            prefetcher.close()
        if storage.closed:
            last = True
        else:
            storage.detach(self)
            last = not storage.listeners
        self._source.moved()  # what it kept of the storage
        goes_on = {
            name: value for name, value in vars(self).items() if not name.startswith("_")
        }  # the user's: ours are private
        goes_on |= {"sampler": self._sampler, "writer": self._writer}  # which refuse what needs the storage
        if last:
            goes_on |= {"storage": storage, "close": partial(_close, storage)}
        end(self, "the buffer was closed. Make another one, or ReplayBuffer.open the folder of its store.", **goes_on)
        if last:
            storage.close()

    def start(self) -> Self:
        """Returns the buffer: it runs in this process."""
        return self

    def client(self) -> Self:
        """Returns the buffer itself."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether sampling is possible: false after :meth:`shutdown`."""
        return not self._shut_down

    @property
    def service_backend(self) -> str:
        """Where the buffer runs: ``"direct"``, in this process."""
        return "direct"

    def synchronize(self) -> None:
        """Wait until threads have made the batches that they were given. What that raised, :meth:`sample` raises."""
        if self._prefetcher is not None:
            self._prefetcher.wait()

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse sampling from now on, and end the threads of ``prefetch``. Repeatable.

        Args:
            timeout: seconds to wait for what threads are at; None: until it is done.
        """
        self._shut_down = True
        if self._prefetcher is not None:
            self._prefetcher.close(timeout)

    def __getstate__(self) -> dict[str, Any]:
        if _fork.is_spawning():
            self._settle()
            self._storage.hand_over()
        prefetcher = self._prefetcher
        ahead = None if prefetcher is None or self.shared else prefetcher.saved(self)  # first: it reads
        chosen = ("_source", "_placer", "_of_sampler", "_of_writer", "_sample_natively")
        left = ("_key", "_iterator", "_generator", "_prefetcher", *chosen)
        state = {k: v for k, v in self.__dict__.items() if k not in left}
        state["_prefetch"] = self.prefetch, None if ahead is None else _by_value(ahead)
        # An array goes by value. A tensor that is gone before the receiver looks takes its file descriptor along.
        state["_generator_state"] = None if self._generator is None else self._generator.get_state().numpy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator_state = state.pop("_generator_state")
        depth, ahead = state.pop("_prefetch")
        self.__dict__.update(state)
        self._key = ThreadKey()
        self._prefetcher = Prefetcher(depth, self._steps) if depth else None
        self._iterator = None
        self._generator = None
        if generator_state is not None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.from_numpy(generator_state))
        self._storage.attach(self)
        self._placer = writers.declared(self._writer)
        self._of_writer = self._placer.traits
        self._take_sampler(self._sampler)
        if self._prefetcher is not None and ahead is not None:
            self._prefetcher.restore(_from_value(ahead))

    # ---- seeing it -----------------------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """Rows (``ndim > 1``: slots) written since the last :meth:`empty`; 0 for a writer that cannot write."""
        return 0 if self._of_writer.read_only else self._storage.write_count

    def stats(self) -> dict[str, float]:
        """A flat dict of numbers: ``size, write_count, prefetch_queue_size, initialized, lanes``, when bounded ``capacity``
        and ``utilization``, and the store's ``void_rows, lapped_rows, redraws``.

        A process that dies just as it counts a void row may leave ``void_rows`` one too high, and so ``len(rb)`` one too low, until
        the next process that opens the store alone counts them again. No row is hidden by that: draws and ``rb[:]`` see all.
        """
        size = len(self)
        stats: dict[str, float] = {
            "size": size,
            "write_count": self.write_count,
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": 1,
            "lanes": self.lanes,
        }
        capacity: int = self._storage.max_size
        if capacity < torch.iinfo(torch.int64).max:
            stats |= {"capacity": capacity, "utilization": size / capacity}
        stats.update(self._storage.counters())
        return stats

    def _facts(self) -> list[tuple[str, str]]:
        """What ``repr`` shows, by name."""
        storage = self._storage
        facts = [("storage", repr(storage))] if storage.closed else self._facts_of_storage()
        facts += [("sampler", repr(self._sampler)), ("writer", repr(self._writer))]
        if len(self._transform):
            facts.append(("transform", repr(self._transform)))
        if self._batch_size is not None:
            facts.append(("batch_size", str(self._batch_size)))
        if self._prefetcher is not None:
            facts.append(("prefetch", str(self.prefetch)))
        return facts

    def _facts_of_storage(self) -> list[tuple[str, str]]:
        storage = self._storage
        size, capacity = len(self), storage.max_size
        if capacity < torch.iinfo(torch.int64).max:
            rows = f"{size:_}/{capacity:_} ({100 * size / capacity:.3g} %)".replace("_", " ")
        else:
            rows = f"{size:_}".replace("_", " ")
        facts = [("size", rows)]
        store = storage.memory
        if store is not None:
            place = (
                str(store.directory)
                if store.directory
                else ("RAM" if store.device.type == "cpu" else str(store.device))
            )
            facts.append(("memory", f"{_human(storage.nbytes)} {place}"))
            facts.append(("fields", ", ".join(field.name for field in store.schema.fields[:8])))
            if len(store.schema.fields) > 8:
                facts[-1] = ("fields", f"{len(store.schema.fields)}: {facts[-1][1]}, …")
        else:
            facts.append(("storage", type(storage).__name__))
        if storage.lanes > 1:
            facts.append(("lanes", str(storage.lanes)))
        requested = storage.requested_size
        if requested != capacity:
            facts.append(("asked for", str(requested)))
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self._facts())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"

    # ---- small helpers -------------------------------------------------------------------------------------------------

    def _user_index(self, rows: Tensor) -> Tensor:
        """Rows as the user sees them: on the storage's device, with ``ndim > 1`` ``[n, ndim]`` coordinates."""
        storage = self._storage
        if storage.ndim > 1:
            coordinates = []
            for width in reversed(storage.columns):
                coordinates.append(rows % width)
                rows = rows // width
            rows = torch.stack([rows, *reversed(coordinates)], -1)
        return self._to_device(rows)

    def _to_device(self, rows: Tensor) -> Tensor:
        device = self._storage.device
        return rows if device is None or device.type == "cpu" else rows.to(device)

    def _no_index(self) -> Tensor:
        return torch.empty((0, self._storage.ndim), dtype=torch.int64, device="cpu")


# ---- components in a store's record ------------------------------------------------------------------------------------

_SAMPLERS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        samplers.RandomSampler,
        samplers.SamplerWithoutReplacement,
        samplers.PrioritizedSampler,
        samplers.PrioritizedSliceSampler,
        samplers.SliceSampler,
        samplers.SliceSamplerWithoutReplacement,
        expanders.FrameStack,
        expanders.NStep,
        expanders.RewardToGo,
    )
}
_WRITERS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        writers.RoundRobinWriter,
        writers.TensorDictRoundRobinWriter,
        writers.TensorDictMaxValueWriter,
        writers.ImmutableDatasetWriter,
    )
}
_BUFFERS: dict[str, type[ReplayBuffer]] = {"ReplayBuffer": ReplayBuffer}


def register(cls: type[ReplayBuffer]) -> type[ReplayBuffer]:
    """Let :meth:`ReplayBuffer.open` restore a buffer class."""
    _BUFFERS[cls.__name__] = cls
    return cls


def _recorded(component: Any, known: dict[str, Any]) -> dict[str, Any]:
    name = type(component).__name__
    if known.get(name) is type(component) and component.recordable:
        return {"type": name, "config": component.config()}
    return {"type": name, "custom": True}


def _recorded_batch_size(record: dict[str, Any]) -> int | None:
    batch_size: int | None = record.get("batch_size")
    if batch_size is not None:
        try:
            _check_batch_size(batch_size)
        except (TypeError, ValueError) as error:
            raise CorruptStore(f"open: the recorded {error}") from error
    return batch_size


def _recorded_prefetch(record: dict[str, Any], batch_size: int | None) -> int:
    try:
        return _depth(record.get("prefetch"), batch_size, "what was recorded")
    except (TypeError, ValueError) as error:
        raise CorruptStore(f"open: {error}") from error


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / layout.FOLDER / layout.BUFFER
    if not path.exists():
        return {}
    try:
        record = json.loads(files.read_small(path, 1 << 20))
    except ValueError as error:
        raise CorruptStore(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(record, dict):
        raise CorruptStore(f"{path}: expected an object.")
    return record


def _made_again(record: Any, known: dict[str, Any], kind: str) -> Any:
    if record is None:
        return None
    name = record.get("type") if isinstance(record, dict) else None
    if not isinstance(record, dict) or record.get("custom") or name not in known:
        raise TypeError(f"open: the store was used with the custom {kind} {name!r}: pass {kind}=….")
    try:
        config = record.get("config", {})
        return known[name].from_config(config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        why = str(error).removesuffix(".")
        raise CorruptStore(f"open: cannot make the recorded {kind} {name!r} again: {why}.") from error


def _lane_in(storage: Storage, named: int | None) -> int | None:
    """The lane of a handle on a storage, if it named that one; None: writes must name one of several."""
    if storage.lanes == 1:
        return 0
    return named if named is not None and named < storage.lanes else None


def _close(storage: Storage) -> None:
    storage.close()


def _free_bytes() -> int:
    """What rows that a dump claims may take: half of the memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _checked_key(key: Any, where: str) -> int:
    """64 bits, as an int. Raises ``TypeError``, ``ValueError``: they are none."""
    return integer({"key": key}, "key", -(1 << 63), 1 << 64, where)


def _checked_generator(state: Any, where: str) -> torch.Generator:
    """A generator of a saved state. Raises ``TypeError``, ``ValueError``: it is none."""
    generator = torch.Generator()
    try:
        generator.set_state(tensor_in({"state": state}, "state", torch.uint8, (None,), where).clone())
    except RuntimeError as error:
        raise ValueError(f"{where}: expected the state of a generator: {error}.") from error
    return generator


# ---- data of any form --------------------------------------------------------------------------------------------------


def _instance(given: Any, kind: Any, name: str, default: Callable[[], Any] | None) -> Any:
    if given is None and default is not None:
        return default()
    made = given() if isinstance(given, type) or (callable(given) and not isinstance(given, kind)) else given
    if not isinstance(made, kind):
        raise TypeError(f"{name}: expected a {kind.__name__} or a callable that makes one, got {type(given).__name__}.")
    return made


def _check_batch_size(batch_size: Any) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise TypeError(f"batch_size: expected an int, got {type(batch_size).__name__}.")
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}.")


def _depth(prefetch: Any, batch_size: int | None, call: str) -> int:
    """Batches to ask for ahead."""
    if prefetch is None or prefetch is False:
        return 0
    if type(prefetch) is not int:
        raise TypeError(f"{call}: prefetch: expected an int, a number of batches, got {type(prefetch).__name__}.")
    if prefetch < 0:
        raise ValueError(f"{call}: prefetch: expected at least 0 batches, got {prefetch}.")
    if prefetch and batch_size is None:
        raise ValueError(f"{call}: prefetch={prefetch}: expected a batch size, too: pass batch_size=….")
    return prefetch


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and len(index) > 0 and all(isinstance(part, str) for part in index)
    )


def _entry(data: Any, key: Any) -> Any:
    for part in (key,) if isinstance(key, str) else key:
        known = list(data.keys()) if has_entries(data) else []
        if part not in known:
            raise KeyError(f"rb[key]: expected one of {known}, got {part!r} in {key!r}.")
        data = data[part] if isinstance(data, dict) else data.get(part)
    return data


def _map_tensors(data: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every tensor, array or TensorDict of nested data."""
    return map_leaves(data, lambda leaf: change(leaf) if has_dimensions(leaf) else leaf)


class _ByValue:
    """A TensorDict on its way through a copy."""

    def __init__(self, td: TensorDict) -> None:
        self.entries = _by_value(dict(children(td)))
        self.batch_size, self.device = td.batch_size, td.device
        self.names = td.names if any(td.names) else None

    def restored(self) -> TensorDict:
        return TensorDict(_from_value(self.entries), batch_size=self.batch_size, device=self.device, names=self.names)


def _by_value(data: Any) -> Any:
    """Batches for a copy: copies of their tensors, which go by value (see ``Copied``); other objects as they are."""

    def copied(leaf: Any) -> Any:
        if type(leaf) is TensorDict:
            return _ByValue(leaf)
        return Copied(leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(data, copied)


def _from_value(data: Any) -> Any:
    """Batches again."""

    def restored(leaf: Any) -> Any:
        if isinstance(leaf, _ByValue):
            return leaf.restored()
        return leaf.tensor if isinstance(leaf, Copied) else leaf

    return map_leaves(data, restored)


def _containers_anew(data: Any) -> Any:
    """The same tensors in containers that a transform may change: the caller's stay as they are."""
    return _map_tensors(data, lambda x: x.copy() if is_tensor_collection(x) else x)


def _rows_of(data: Any, dims: int = 1) -> int | None:
    """Rows of a batch whose first ``dims`` dimensions count them: 0 for None, None where that cannot be told."""
    if data is None:
        return 0
    if isinstance(data, list):
        return len(data)
    leaf = first_leaf(data)
    if not has_dimensions(leaf):
        return len(data) if isinstance(data, tuple) else None
    shape = leaf.batch_size if is_tensor_collection(leaf) else leaf.shape
    return math.prod(shape[:dims]) if len(shape) >= dims else None


def _renumber(made: Any, by: int) -> None:
    """The tickets that a batch or its info says, if it says them."""
    if not has_entries(made):
        return
    numbers = made.get("index_generation", None)
    if isinstance(numbers, Tensor) and numbers.dtype is torch.int64:
        made["index_generation"] = torch.where(numbers > 0, numbers + by, numbers)


def _with_dim(x: Any, at: int) -> Any:
    """A row as a batch of one: the dimension stands behind a TensorDict's own, or at ``at``."""
    if is_tensor_collection(x):
        return x.unsqueeze(-1)
    return x.unsqueeze(at) if isinstance(x, Tensor) else np.expand_dims(x, at)


def _size_of_dim(batch: Any, at: int) -> int:
    """Rows in what a transform made of a batch of one."""
    leaf = first_leaf(batch)
    if not has_dimensions(leaf):
        return 1
    if is_tensor_collection(leaf):
        return int(leaf.batch_size[-1]) if leaf.batch_size else 1
    return int(leaf.shape[at]) if leaf.ndim > at else 1


def _without_dim(x: Any, at: int) -> Any:
    if is_tensor_collection(x):
        return x.squeeze(-1) if x.batch_size else x
    return x.squeeze(at) if x.ndim > at else x


def _move_dim(x: Any, at: int) -> Any:
    """Several rows in the layout of ``extend``."""
    if not is_tensor_collection(x):
        return x
    last = len(x.batch_size) - 1
    return x.permute(*range(at), last, *range(at, last))


def _replaced(values: Any, places: Tensor, others: Any) -> Any:
    """An entry of a draw's info in which some rows were drawn again."""
    if not isinstance(values, Tensor) or not isinstance(others, Tensor):
        return values
    values = values.clone()
    values[places.to(values.device)] = others
    return values


def _mix(key: int, attempt: int) -> int:
    """The key of a redraw, derived from the draw's own so that the generator is not asked again."""
    return (key + attempt * 0x9E3779B97F4A7C15) % (1 << 63)


def _human(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
