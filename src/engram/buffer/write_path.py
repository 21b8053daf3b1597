"""From what a user writes to rows of the storage: inverse transform, lane, place, write, notify.

Buffers whose components override methods of TorchRL's, the writer's ``add`` and ``extend``, the storage's ``set``, and the sampler's
``mark_update``, ``add`` and ``extend``, call them in the order in which TorchRL does, one write at a time. The limits of the store
admit the rows before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from engram import storages
from engram._support import checks, fork, native, nested, overrides, tensordicts
from engram.buffer.configuration import Settings
from engram.buffer.lanes import BATCHES, Lane, Lanes, Layout
from engram.buffer.prefetch import Prefetcher
from engram.buffer.recipe import Recipe
from engram.buffer.wiring import Wiring
from engram.env import Notes
from engram.store.store import Store
from engram.types import Extent, Write, WritePlan
from engram.writers._base import NativeWriter

Added = int | torch.Tensor | None

#: What the write transforms leave where they hold all rows back.
HELD_BACK = object()


class TransformedRows(NamedTuple):
    """One row behind the write transforms, or several that they made of it."""

    data: Any
    batched: bool
    #: How many; None: the data does not say.
    rows: int | None


class WritePath:
    """Writes rows, and keeps what the writes of one buffer need besides its components: its lane and its recipe."""

    #: Whether all rows are TensorDicts.
    takes_tensordicts = False
    #: Of the environment that was recorded last.
    notes = Notes()

    def __init__(
        self, wiring: Wiring, settings: Settings, lanes: Lanes, recipe: Recipe, prefetching: Prefetcher | None
    ) -> None:
        self._wiring = wiring
        self._settings = settings
        self._lanes = lanes
        self._recipe = recipe
        self._prefetching = prefetching

    def appending(self) -> Store | None:
        """The store, if rows may be appended to it natively: nothing else hears of writes, or changes them."""
        wiring, storage = self._wiring, self._wiring.storage
        memory: Store | None = storage.memory
        plain = wiring.appends_natively and not wiring.transform.writes and self._recipe.noted and storage.ndim == 1
        if not plain or memory is None or not memory.is_native or storage.traits.is_remote or wiring.has_listeners():
            return None
        storage.begin_change()
        if self._prefetching is not None:
            self._prefetching.materialize()
        return memory

    # ---- one row ---------------------------------------------------------------------------------------------------------

    def add(self, data: object, lane: int | None, timeout: float) -> Any:
        """Write one row: what ``ReplayBuffer.add`` returns."""
        lane = self.begin_row(lane)
        if not self._wiring.transform.writes:
            return self.write_row(data, lane, timeout)
        transformed = self.transformed_row(data)
        return self._wiring.no_index() if transformed is None else self.write_transformed(transformed, lane, timeout)

    def begin_row(self, lane: int | None) -> int | None:
        """Check the lane of a row, before anything else happens."""
        if self._prefetching is not None:
            self._prefetching.materialize()
        lane = self._lanes.default if lane is None else self._lanes.checked(lane, "add")
        if lane is None and self._wiring.appends:
            self._wiring.storage.unnamed_lanes("add", batched=False)  # refuses
        return lane

    def transformed_row(self, data: object) -> TransformedRows | None:
        """A row behind the write transforms; None if they hold it back.

        Transforms see it as a batch of one: a dimension more behind the batch dimensions that it has.
        """
        transform, at = self._wiring.transform, self._wiring.storage.ndim - 1
        if not transform.writes:
            return TransformedRows(data, batched=False, rows=rows_of(data, at))
        self._wiring.storage.check_writable()
        batch = transform.inv(nested.map_with_paths(data, self._in_batch))
        n = 0 if batch is None else _size_of_dim(batch, at)
        if n == 0:
            return None
        if n == 1:
            row = map_dimensioned(batch, lambda x: _without_dim(x, at))
            return TransformedRows(row, batched=False, rows=rows_of(row, at))
        batch = map_dimensioned(batch, lambda x: _move_dim(x, at, self._wiring.storage.dim_extend))
        return TransformedRows(batch, batched=True, rows=rows_of(batch, at + 1))

    def _in_batch(self, leaf: object, path: nested.Path) -> object:
        """A leaf of a row as a leaf of a batch of one: numbers, too, where they become a field."""
        leaf = self._wiring.storage.number(leaf, path) if nested.is_numbers(leaf) else leaf
        return _with_dim(leaf, self._wiring.storage.ndim - 1) if nested.has_dimensions(leaf) else leaf

    def write_transformed(self, transformed: TransformedRows, lane: int | None, timeout: float) -> Any:
        """Write what the transforms made."""
        write = self.write_rows if transformed.batched else self.write_row
        return write(transformed.data, lane, timeout)

    def write_row(self, data: object, lane: int | None, timeout: float | None) -> object:
        """Write one row that went through the transforms. ``timeout``: of the wait for the limits of the store; None: try once."""
        wiring = self._wiring
        storage = wiring.storage
        try:
            if wiring.appends_natively and self._recipe.noted:
                placed = storage.add_row(lane, data)
                if placed is not None:
                    row: int
                    row, number = placed
                    if storage.has_listeners if len(storage.listeners) > 1 else wiring.of_sampler.listens:
                        storage.notify(Write(torch.tensor([row], device="cpu"), number), data)
                    return None if row < 0 else row
            elif wiring.write_of is not None and not lane and self._recipe.noted:
                rows = self._write_of(data, batched=False)
                if rows is not None:
                    row = int(rows)
                    return None if row < 0 else row
            write = (self._write if wiring.hooked else self.write_here)(data, lane, "add", batched=False)
        except native.NotAdmitted as refused:
            if timeout is None:
                raise
            return wiring.gate.written(partial(self.write_row, data, lane), storage.memory, refused, timeout)
        if storage.ndim > 1:
            return wiring.user_index(write.rows)
        row = int(write.rows[0])
        return None if row < 0 else row

    # ---- a batch ---------------------------------------------------------------------------------------------------------

    def extend(self, data: object, lane: Lane, layout: Layout, lane_key: object, timeout: float) -> torch.Tensor:
        """Write a batch of rows: what ``ReplayBuffer.extend`` returns."""
        if layout is not None or lane_key is not None or (lane is None and self._lanes.default is None):
            data, lane = self._lanes.arranged(data, lane, layout, lane_key)
        data = self.transformed_rows(data)
        if data is HELD_BACK:
            return self._wiring.no_index()
        rows = self.write_rows(data, lane, timeout)
        if lane is None and (newest := self._lanes.newest) is not None:
            newest.append(rows)
            if len(newest) == BATCHES:
                self._lanes.watch(newest)
        return rows

    def transformed_rows(self, data: object) -> object:
        """A batch behind the write transforms; :data:`HELD_BACK` if they leave no row of it."""
        if self._prefetching is not None:
            self._prefetching.materialize()
        transform, dims = self._wiring.transform, self._wiring.storage.ndim
        if transform.writes and rows_of(data, dims) != 0:
            self._wiring.storage.check_writable()
            data = transform.inv(new_containers(data))
            if rows_of(data, dims) == 0:
                return HELD_BACK
        return data

    def write_rows(self, data: object, lane: Lane, timeout: float | None) -> torch.Tensor:
        """Write a batch that went through the transforms. ``timeout``: as :meth:`write_row`."""
        wiring = self._wiring
        storage = wiring.storage
        try:
            if wiring.appends_natively and self._recipe.noted:
                named = self._lanes.default if lane is None else lane
                if named is None and self._lanes.told:
                    named = "each"
                appended: Write | None = storage.append_of(data, named)
                if appended is not None:
                    if storage.has_listeners if len(storage.listeners) > 1 else wiring.of_sampler.listens:
                        storage.notify(appended, data)
                    return appended.rows
            elif wiring.write_of is not None and lane is None and self._recipe.noted:
                rows = self._write_of(data, batched=True)
                if rows is not None:
                    return rows
            write = (self._write if wiring.hooked else self.write_here)(data, lane, "extend", batched=True)
        except native.NotAdmitted as refused:
            if timeout is None:
                raise
            return wiring.gate.written(partial(self.write_rows, data, lane), storage.memory, refused, timeout)
        except nested.NoRows:
            return wiring.no_index().squeeze(1)
        return wiring.user_index(write.survivors if wiring.of_writer.rejects else write.rows)

    # ---- both ------------------------------------------------------------------------------------------------------------

    def _write_of(self, data: object, *, batched: bool) -> torch.Tensor | None:
        """Write where the writer says, in one native call. None: nothing was written, :meth:`_write` must look first."""
        wiring = self._wiring
        written = wiring.write_of(data, batched=batched)  # type: ignore[misc] # who calls has looked
        if written is None:
            return None
        storage = wiring.storage
        if storage.has_listeners if len(storage.listeners) > 1 else wiring.of_sampler.listens:
            storage.notify(written[0], data)
        return written[1]

    def _write(self, data: object, lane: object, call: str, *, batched: bool) -> Write:
        """Write through what components of the user's override."""
        wiring, lanes, told = self._wiring, self._lanes, list[Write]()
        storage, writer, memory = wiring.storage, wiring.writer, wiring.storage.memory
        lane = lanes.default if lane is None else lane

        def tell(name: str, written: Write) -> None:
            if overrides.overrides(type(wiring.own_sampler), name):
                index: Any = wiring.user_index(written.survivors if wiring.of_writer.rejects else written.rows)
                if not batched and storage.ndim == 1:
                    index = int(index[0]) if index[0] >= 0 else None
                getattr(wiring.own_sampler, name)(index)

        def own(data: object, call: str, batched: bool) -> Write:
            if storage.sets:
                named = lanes.of_rows(lane, call, batched=batched)[0]
                told.append(_set(self.write_here, wiring, data, (lane, named), call, batched=batched))
            else:
                told.append(self.write_here(data, lane, call, batched=batched))
            tell("mark_update", told[-1])
            return told[-1]

        with _one_by_one:
            if memory is not None and memory.core.limited:  # first: methods of the user's are called once
                memory.core.prepay_inserts((_steps(data, storage, call) if batched else 1) * math.prod(storage.columns))
            try:
                if isinstance(writer, NativeWriter) and overrides.overrides(type(writer), call):
                    with overrides.doing(writer, own):
                        written = _written(wiring, getattr(writer, call)(data))
                    if not told:
                        storage.notify(written, data)
                        tell("mark_update", written)
                else:
                    written = own(data, call, batched)
            finally:
                if memory is not None:
                    memory.core.return_prepaid()
            tell(call, written)
        return written

    def write_here(self, data: object, lane: object, call: str, *, batched: bool) -> Write:
        """Write as a buffer does whose components override nothing."""
        wiring = self._wiring
        storage = wiring.storage
        storage.check_writable()
        if wiring.of_writer.read_only:
            wiring.placer.place(storage.extent(), 0, 0, data)  # refuses
        lane = self._lanes.default if lane is None else lane
        unnamed = lane is None
        lane, count = self._lanes.of_rows(lane, call, batched=batched)
        if wiring.appends:
            ignored = self._settings.ignored
            prepared, n = storage.prepare(data, call, batched=batched, ignored=ignored, count=count)
            if not self._recipe.noted:  # before a row is there: this may raise
                self._recipe.note()
            write: Write = storage.write(WritePlan(lane=lane), prepared, n)
            if unnamed:
                self._lanes.say_unnamed()
        else:
            write = self._place_and_write(data, lane, call, count, batched=batched, unnamed=unnamed)
        if storage.has_listeners if len(storage.listeners) > 1 else wiring.of_sampler.listens:
            storage.notify(write, data)
        return write

    def _place_and_write(
        self, data: Any, lane: Any, call: str, count: storages.Count | None, *, batched: bool, unnamed: bool
    ) -> Write:
        """Write where the writer says."""
        storage, placer = self._wiring.storage, self._wiring.placer

        def place(n: int) -> WritePlan:
            plan = placer.place(storage.extent(), n, lane, data)
            if unnamed and plan.lane is lane:
                storages.check_count(call, storage.unnamed_lanes(call, batched=batched)[1], n)
            return plan

        plan: WritePlan | None = None
        if not placer.keeps_order:
            self._wiring.bound_sampler()  # its priorities say who goes
        if not storage.initialized:  # a writer that refuses leaves no memory behind
            rows = rows_of(data, storage.ndim) if batched else 1
            plan = None if rows is None or self._wiring.places_each else place(rows)
        prepared, n = storage.prepare(data, call, batched=batched, ignored=self._settings.ignored, count=count)
        if not self._recipe.noted:
            self._recipe.note()
        with storage.placing:
            if self._wiring.refills and not storage.is_ragged:
                return self._refill(prepared, n)
            if self._wiring.places_each:
                return self._place_each(prepared, n, data, batched=batched)
            if plan is None or len(storage):  # another process may have written first
                plan = place(n)
            write: Write = storage.write(plan, prepared, n)
            placer.written(plan, write)
        return write

    def _place_each(self, prepared: Any, n: int, data: Any, *, batched: bool) -> Write:
        """Write one row after the other where the user's ``get_insert_index`` says."""
        storage, writer = self._wiring.storage, self._wiring.writer
        places = torch.full((2, n), -1, device="cpu")
        for i in range(n):
            row = data
            if batched:
                pick = cast("Any", operator.itemgetter(i))
                row = pick(data) if isinstance(data, list) else nested.map_leaves(data, pick)
            at = writer.get_insert_index(row)
            if at is not None:
                plan = WritePlan(rows=torch.tensor([int(at)]))
                one = storage.some(prepared, [i]) if batched else prepared
                places[:, i] = torch.tensor([int(at), storage.write(plan, one, 1).first])
        return Write(places[0], 0, places[1])

    def _refill(self, prepared: object, n: int) -> Write:
        """Write over rows that are used up, and append the others: as few places of the ring as then all rows have one of their own.

        Of the used rows, those that the ring comes to meanwhile are not written by number.
        """
        memory = self._wiring.storage.memory
        if memory is None:
            return self._refill_admitted(prepared, n)
        # All of them or none, and before it is looked for places: those that make room for them are there then.
        memory.core.prepay_inserts(n)
        try:
            return self._refill_admitted(prepared, n)
        finally:
            memory.core.return_prepaid()

    def _refill_admitted(self, prepared: object, n: int) -> Write:
        storage = self._wiring.storage
        used = self._wiring.source.used_rows(n)
        if 0 < len(used) < n:
            extent = storage.extent()
            away, order = ((used - extent.seam[0]) % extent.capacity).sort()
            met = away - torch.arange(len(used), device="cpu") <= n - len(used)
            used = used[order[int(met.sum()) :]]
        k = len(used)
        written: list[Write] = []
        for plan, which, count in ((WritePlan(rows=used), slice(k), k), (WritePlan(lane=0), slice(k, None), n - k)):
            if count:
                written.append(storage.write(plan, storage.some(prepared, which) if count < n else prepared, count))
        if len(written) == 1:
            return written[0]
        rows, numbers = (torch.cat(both) for both in zip(*((one.rows, one.tickets) for one in written), strict=True))
        return Write(rows, written[0].first, numbers)


# ---- dimensions of nested data -----------------------------------------------------------------------------------------


def map_dimensioned(data: object, change: Callable[[Any], object]) -> object:
    """Nested data with ``change`` of every tensor, array or TensorDict, in new containers."""
    return nested.map_leaves(data, lambda leaf: change(leaf) if nested.has_dimensions(leaf) else leaf)


def new_containers(data: object) -> object:
    """The same tensors in containers that a transform may change: the caller's stay as they are."""
    return nested.map_leaves(data, lambda leaf: leaf.copy() if nested.is_tensordict(leaf) else leaf)


def rows_of(data: object, dims: int = 1) -> int | None:
    """Rows of a batch whose first ``dims`` dimensions count them: 0 for None, None where that cannot be told."""
    if data is None:
        return 0
    if isinstance(data, list):
        return len(data)
    leaf = nested.first_leaf(data)
    if not nested.has_dimensions(leaf):
        return len(data) if isinstance(data, tuple) else None
    shape = leaf.batch_size if tensordicts.is_tensor_collection(leaf) else leaf.shape
    return math.prod(shape[:dims]) if len(shape) >= dims else None


def _with_dim(x: Any, at: int) -> object:
    """A row as a batch of one: the dimension stands behind a TensorDict's own, or at ``at``."""
    if tensordicts.is_tensor_collection(x):
        return x.unsqueeze(-1)
    return x.unsqueeze(min(at, x.ndim)) if isinstance(x, torch.Tensor) else np.expand_dims(x, at)


def _size_of_dim(batch: object, at: int) -> int:
    """Rows in what a transform made of a batch of one."""
    leaf = nested.first_leaf(batch)
    if not nested.has_dimensions(leaf):
        return 1
    if tensordicts.is_tensor_collection(leaf):
        return int(leaf.batch_size[-1]) if leaf.batch_size else 1
    return int(leaf.shape[at]) if leaf.ndim > at else 1


def _without_dim(x: Any, at: int) -> object:
    if tensordicts.is_tensor_collection(x):
        return x.squeeze(-1) if x.batch_size else x
    return x.squeeze(at) if x.ndim > at else x


def _move_dim(x: object, at: int, to: int) -> object:
    """Several rows in the layout of ``extend``. ``at``: where they are in a tensor; in a TensorDict they come last."""
    if not tensordicts.is_tensor_collection(x):
        return x if at == to else torch.as_tensor(x).movedim(at, to)
    last = len(x.batch_size) - 1
    return x.permute(*range(to), last, *range(to, last))


_one_by_one = fork.rlock()


def _written(wiring: Wiring, index: object) -> Write:
    """What a writer of the user's says that it wrote: None, an int, rows, or coordinates with ``ndim > 1``."""
    if isinstance(index, tuple) or (isinstance(index, torch.Tensor) and index.ndim > 1):
        index = wiring.rows_named(index)
    rows = checks.as_numbers("index", -1 if index is None else index).to("cpu", torch.int64).reshape(-1)
    return Write(rows, 0, wiring.storage.tickets_of(rows.clamp(min=0)).where(rows >= 0, -1))


def _set(
    here: Callable[..., Write], wiring: Wiring, data: Any, lanes: tuple[object, Any], call: str, *, batched: bool
) -> Write:
    """Write by a ``set`` of the user's, which is told the places that come next: rows, with ``ndim > 1`` slots.

    Its ``super().set()`` of these, or of the first of them and then of the next ones, writes as if there were no override; of others it
    writes by number. ``lanes``: as it was named, and as it is.
    """
    storage, made, extent = wiring.storage, list[Write](), wiring.storage.extent()
    width = math.prod(storage.columns)
    n, plan = _steps(data, storage, call) if batched else 1, WritePlan(lane=lanes[1])
    if not wiring.appends:
        plan = wiring.placer.place(extent, n, lanes[1], data)
    rows = _following(extent, plan.lane, n, width) if plan.rows is None else plan.rows
    kept = plan.kept
    if kept is not None and batched:  # the others are rejected
        data = (
            [data[i] for i in kept]
            if isinstance(data, list)
            else nested.map_leaves(data, lambda x: cast("Any", x)[kept] if nested.has_dimensions(x) else x)
        )

    def own(cursor: object, data: object) -> None:
        named, begin = checks.as_numbers("set: cursor", cursor), sum(len(it.rows) for it in made) // width
        end = begin + named.numel()
        whole = end - begin == len(rows)
        if named.reshape(-1).tolist() != rows[begin:end].tolist() or not (whole or plan.rows is None):
            with overrides.doing(storage, None):
                storages.Storage.set(storage, cursor, data)
            return
        lane = lanes[0]
        if not whole:
            each = torch.as_tensor(plan.lane, device="cpu").expand(len(rows))[begin:end].tolist()
            lane = each if named.ndim else each[0]
        made.append(here(data, lane, call, batched=named.ndim > 0))

    if len(rows):
        with overrides.doing(storage, own):
            storage.set(rows if batched else int(rows[0]), data)
    if not made:
        made.append(Write(rows, 0, storage.tickets_of(rows)))
    done = Write(torch.cat([it.rows for it in made]), 0, torch.cat([it.tickets for it in made]))
    return done if kept is None else Write(plan.reported(done.rows, n), 0, plan.reported(done.tickets, n))


def _steps(data: object, storage: storages.Storage, call: str) -> int:
    """How many steps a batch has, of each column."""
    if isinstance(data, list):
        return len(data)
    leaf: Any = nested.first_leaf(data)
    shape = getattr(leaf, "batch_size" if tensordicts.is_tensor_collection(leaf) else "shape", ())
    return int(shape[storage.dim_extend]) if len(shape) >= storage.ndim else storages.leading_size(data, call)


def _following(extent: Extent, lane: object, n: int, width: int) -> torch.Tensor:
    """The places that come next in a lane, or in one for each row, int64 ``[n]``. ``width``: rows of a place."""
    length, seam, places = extent.capacity // len(extent.filled) // width, [row // width for row in extent.seam], []
    for one in torch.as_tensor(lane, device="cpu").expand(n).tolist():
        places.append(seam[one])
        seam[one] += 1 if (seam[one] + 1) % length else 1 - length
    return torch.tensor(places, device="cpu")


class Appender:
    """Writes rows whose fields are keyword arguments, always to the same lanes: what :meth:`ReplayBuffer.appender` returns.

    Holds the buffer. Several may write at once, from several threads too.

    >>> import numpy as np
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, lanes=2))
    >>> first = rb.appender(lane=0)
    >>> first.add(obs=np.zeros(3), action=1, reward=0.5)
    0
    >>> rb.appender(lane="each").extend(obs=np.ones((2, 3)), action=[0, 1], reward=[0.0, 1.0])
    tensor([ 1, 50])
    """

    __slots__ = ("_add", "_extend", "lane")

    def __init__(self, add: Callable[..., Added], extend: Callable[..., torch.Tensor], lane: object) -> None:
        self._add, self._extend = add, extend
        #: Where rows go: an int, int64 ``[n]``, or ``"each"``.
        self.lane = lane

    def add(self, *row: object, **fields: object) -> Added:
        """Write one row, as :meth:`ReplayBuffer.add` of a dict. Nested fields are dicts: ``next={"obs": …}``.

        Raises: as :meth:`ReplayBuffer.add`. TypeError: a ``row`` by position.
        """
        if row:
            raise _positional("add", row)
        return self._add(fields, lane=self.lane)

    def extend(self, *rows: object, **fields: object) -> torch.Tensor:
        """Write a batch of rows, as :meth:`ReplayBuffer.extend` of a dict. Raises: as that, and as :meth:`add`."""
        if rows:
            raise _positional("extend", rows)
        return self._extend(fields, lane=self.lane)


def _positional(call: str, given: tuple[object, ...]) -> TypeError:
    return TypeError(
        f"appender.{call}: expected fields by keyword, {call}(obs=…, action=…), got a {type(given[0]).__name__}. A dict goes in as "
        f"{call}(**row), other rows through rb.{call}(row, lane=…)."
    )
