"""Rows of saved stores on their way to the places that a plan gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram._support import native
from engram.errors import IncompatibleCheckpoint
from engram.format import schema as schemas
from engram.reshard.plan import TRUNCATED, ReshardPlan, SavedShard, Source, fields_of, lanes_of, within
from engram.saved import rows as saved_rows
from engram.saved.description import BLOCK
from engram.saved.documents import corrupt
from engram.saved.part_reader import PartReader, Stretch, stretches, ticket_stretches
from engram.saved.ragged import PartItems, check_longest
from engram.store.memory import DTYPE_OF, as_words
from engram.store.rings import Piece, check_room, compacted, fill_rings, oldest_first
from engram.types import RowsTarget

#: Bytes that are read at a time: as many as caches hold.
_WINDOW = 2 << 20


class Extents(NamedTuple):
    """Steps of one source that follow each other there and in the target, by their first row there.

    All int64 ``[K]`` and contiguous.
    """

    #: Row of the source.
    first: NDArray[np.int64]
    #: Row of the target.
    target: NDArray[np.int64]
    #: How many.
    rows: NDArray[np.int64]

    def near(self, begin: int, end: int) -> Extents:
        """Those with rows in ``[begin, end)`` of the source."""
        low = (self.first + self.rows).searchsorted(begin, "right")
        high = self.first.searchsorted(end)
        return Extents(self.first[low:high], self.target[low:high], self.rows[low:high])

    def windows(self, begin: int, end: int, most: int, gap: int) -> Iterator[tuple[int, int]]:
        """Rows of the source in ``[begin, end)`` among which there is something wanted: ``most`` at a time, without long gaps."""
        low, high = np.maximum(self.first, begin), np.minimum(self.first + self.rows, end)
        breaks = (low[1:] - high[:-1] >= gap).nonzero()[0]
        starts, stops = [low[0], *low[breaks + 1]], [*high[breaks], high[-1]]
        for start, stop in zip(map(int, starts), map(int, stops), strict=True):
            for at in range(start, stop, most):
                yield at, min(at + most, stop)


def _pairs(extents: Extents, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the source in ``[begin, end)`` that are wanted, and where they go."""
    first, target, rows = extents.near(begin, end)
    skipped = np.maximum(begin - first, 0)
    count = np.minimum(first + rows, end) - first - skipped
    step = within(count)
    return (first + skipped).repeat(count) + step, (target + skipped).repeat(count) + step


def zeroed_window(row_bytes: int = 0) -> Tensor:
    """Memory for a window, with the rest of the blocks at its ends."""
    return torch.empty(max(row_bytes, _WINDOW) + 2 * BLOCK, dtype=torch.uint8, device="cpu")


def windows(
    reader: PartReader, stretch: Stretch, extents: Extents, size: int, memory: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """What is wanted of a stretch, with little beside it: the number of the first row, and the bytes of it and those behind it.

    They are read in whole blocks, each of which is checked; the next ones come to the same memory.
    """
    wanted = extents.near(stretch.begin, stretch.end)
    if not size or not len(wanted.first):
        return
    for low, high in wanted.windows(stretch.begin, stretch.end, max(1, _WINDOW // size), max(1, BLOCK // size)):
        at = stretch.offset + (low - stretch.begin) * size
        skipped = at % BLOCK
        stop = min(-(-(at + (high - low) * size) // BLOCK) * BLOCK, reader.listing.files[stretch.file].bytes)
        reader.read(stretch.file, at - skipped, memory[: stop - at + skipped].numpy().data)
        yield low, memory[skipped : skipped + (high - low) * size]


def put(source: Tensor, begin: int, extents: Extents, tensor: Tensor) -> None:
    """Rows of a source, ``begin`` and those behind it, to their places in a field."""
    end = begin + len(source)
    near = extents.near(begin, end)
    if tensor.is_cpu:
        size = source.nbytes // max(1, len(source))
        stride = size if tensor.is_contiguous() else tensor.stride(0) * tensor.element_size()
        runs = torch.from_numpy(near.first), torch.from_numpy(near.target), torch.from_numpy(near.rows)
        native.place_runs(source.data_ptr(), begin, len(source), *runs, tensor.data_ptr(), len(tensor), size, stride)
        return
    at, to = (torch.from_numpy(column) for column in _pairs(near, begin, end))
    flat = tensor.reshape(len(tensor), -1).view(torch.uint8)
    flat.index_copy_(0, to.to(tensor.device), source.index_select(0, at - begin).to(tensor.device))


def put_by_run(source: Tensor, begin: int, extents: Extents, write: Callable[[int, Tensor], None]) -> None:
    """As :func:`put`, with a call that writes rows from one on: each run of rows that stay together by itself."""
    end = begin + len(source)
    for first, target, rows in zip(*(column.tolist() for column in extents.near(begin, end)), strict=True):
        skipped = max(begin - first, 0)
        write(target + skipped, source[first + skipped - begin : min(first + rows, end) - begin])


def read_first_steps(saved: SavedShard, key: tuple[str, ...]) -> Tensor:
    """A field of the first step of each trajectory, ``[K, *shape]``.

    Raises:
        CorruptCheckpoint: a block is damaged.
        IncompatibleCheckpoint: there is no such field.
    """
    reader, geometry = saved.reader, saved.reader.geometry
    number = next((number for number, field in enumerate(saved.fields) if field.key == key), None)
    if number is None or geometry is None:
        raise IncompatibleCheckpoint(
            f"{reader.folder}: expected the field {key} to rank rows by, got {[field.key for field in saved.fields]}."
        )
    field = saved.fields[number]
    lane, first = saved.source.runs[:, 0], saved.source.runs[:, 1]
    rows = lane * geometry.lane_length + first % lanes_of(reader)[lane, 1]
    order = rows.argsort(kind="stable")
    ones = Extents(np.ascontiguousarray(rows[order]), order, np.ones_like(order))
    column = torch.empty((len(rows), *field.shape), dtype=DTYPE_OF[field.dtype], device="cpu")
    memory = zeroed_window(field.row_bytes)
    for stretch in stretches(reader):
        if stretch.field == number:
            for low, raw in windows(reader, stretch, ones, field.row_bytes, memory):
                put(raw.reshape(-1, field.row_bytes), low, ones, column)
    return column


#: Rows whose fields are rewritten at a time.
_REWRITTEN = 1 << 18


class Numbering:
    """The trajectories of one rank, whose rows are in their places and still have their old numbers.

    Args:
        shards: all of them.
        plan: where their trajectories went.
        mine: int64 ``[K]``: which of them are this rank's, by lane and position.
        schema: of the rank's store.
    """

    def __init__(
        self, shards: Sequence[SavedShard], plan: ReshardPlan, mine: NDArray[np.int64], schema: schemas.Schema
    ) -> None:
        self._shards, self._plan, self._mine = shards, plan, mine
        fields = next(one.fields for one in shards if one.fields)
        roles = [field.role for field in fields]
        self._says = saved_rows.Boundaries(schema, roles)
        self._keys = [field.key for field in saved_rows.boundary_fields(fields, roles)["traj_id"]]
        self._source, self._run = plan.source[mine], plan.run[mine]

    def numbers(self, tensors: Sequence[Tensor], first: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each, from 0 on, in the order of their places.

        Args:
            tensors: the fields of the store.
            first: the row of the first step of each.

        Cost: O(K log K). Where pieces of one trajectory have come to lie next to each other, the numbers in their shards are read.
        """
        count, plan, mine = len(self._mine), self._plan, self._mine
        if not count or not self._keys:
            return np.arange(count)
        begun = self._marks(tensors, first)
        assert begun.ids is not None  # a field says them
        if len(set(zip(self._source.tolist(), *begun.ids.T.tolist(), strict=True))) == count:  # no pieces
            return np.arange(count)
        lane, begin, end = (self._of_runs(column) for column in range(3))
        over = self._marks(tensors, first + plan.steps[mine] - 1).ends
        ends = plan.truncated[mine] if over is None else over | plan.truncated[mine]
        order = np.lexsort((begin, *begun.ids.T, lane, self._source))
        breaks = np.ones(count, bool)
        older, newer = order[:-1], order[1:]
        breaks[1:] = (self._source[older] != self._source[newer]) | (lane[older] != lane[newer]) | ends[older]
        breaks[1:] |= (begun.ids[older] != begun.ids[newer]).any(1)
        if begun.starts is not None:
            breaks[1:] |= begun.starts[newer]
        group = _numbered(order, breaks)
        touch = (plan.lane[mine[1:]] == plan.lane[mine[:-1]]) & ~plan.gap[mine[:-1]]  # no row lies between them
        behind = 1 + ((group[1:] == group[:-1]) & touch).nonzero()[0]
        behind = behind if over is None else behind[~self._continues(behind, begin[behind] - end[behind - 1])]
        if len(behind):
            place = np.empty(count, np.int64)
            place[order] = np.arange(count)
            breaks[np.maximum(place[behind], place[behind - 1])] = True
            group = _numbered(order, breaks)
        return group

    def _of_runs(self, column: int) -> NDArray[np.int64]:
        """What the tables of the shards say of each trajectory."""
        found = np.empty(len(self._mine), np.int64)
        for which in np.unique(self._source).tolist():
            its = self._source == which
            found[its] = self._shards[which].source.runs[self._run[its], column]
        return found

    def _marks(self, tensors: Sequence[Tensor], rows: NDArray[np.int64]) -> saved_rows.Marks:
        columns = (tensors[which] for which in self._says.which)
        at = torch.from_numpy(rows)
        return self._says.marks([_taken(column, at) for column in columns])

    def _continues(self, behind: NDArray[np.int64], between: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of those goes on where the one before it ended: no step that lay between them was of the same trajectory."""
        goes_on = np.zeros(len(behind), bool)
        for which in np.unique(self._source[behind]).tolist():
            shard = self._shards[which]
            if shard.source.columns != 1:
                continue
            its = self._source[behind] == which
            newer, runs = behind[its], shard.source.runs
            covered = np.append(0, (runs[:, 2] - runs[:, 1]).cumsum())
            one, other = self._run[newer - 1], self._run[newer]
            alike = _next_alike(shard, self._keys[0])[one] == other
            whole = self._plan.skipped[self._mine[newer]] == 0
            goes_on[its] = alike & (covered[other] - covered[one + 1] == between[its]) & whole
        return goes_on


def _numbered(order: NDArray[np.int64], breaks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers of groups that begin at those places of an order, by where their first members are."""
    group = np.empty(len(order), np.int64)
    group[order] = breaks.cumsum() - 1
    _, first, found = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[first.argsort()] = np.arange(len(first))
    return number[found]


def _next_alike(shard: SavedShard, key: tuple[str, ...]) -> NDArray[np.int64]:
    """int64 ``[K]``: for each run of a shard the next one in its lane that has the same number; -1: there is none."""
    runs = shard.source.runs
    ids = read_first_steps(shard, key).reshape(len(runs), -1).contiguous().view(torch.uint8).numpy()
    order = np.lexsort((runs[:, 1], *ids.T, runs[:, 0]))
    same = (runs[order[1:], 0] == runs[order[:-1], 0]) & (ids[order[1:]] == ids[order[:-1]]).all(1)
    found = np.full(len(runs), -1)
    found[order[:-1][same]] = order[1:][same]
    return found


def _taken(column: Tensor, rows: Tensor) -> Tensor:
    """Some rows, also of a dtype that torch cannot index."""
    flat = column.reshape(len(column), -1).view(torch.uint8)
    taken = flat[rows.to(column.device)].cpu().contiguous().view(column.dtype)
    return taken.reshape(len(rows), *column.shape[1:])


class MovedRows(NamedTuple):
    """Rows of one shard, and where they go."""

    items: PartItems
    #: int64 ``[n]``: the row of the target for each of the shard, -1 where it is left out.
    target: Tensor


class MovedItems:
    """The ragged rows that one rank gets, one after the other in the ring of their lane.

    Args:
        moved: of all shards with rows for it.
        lanes: int64 ``[L, 2]`` or wider, as the rank's store will have them.
        here: the schema of that store.
    """

    def __init__(self, moved: Sequence[MovedRows], lanes: Tensor, here: schemas.Schema) -> None:
        self._moved, self._here = moved, here
        length = here.capacity // here.lanes
        self.lane_of = torch.arange(here.capacity, device="cpu") // length
        lengths = [self._lengths(group) for group in range(len(here.ragged_groups))]
        self.spans, self.heads = compacted(lengths, oldest_first(lanes, length))

    def check(self, where: str) -> None:
        """Raise ``IncompatibleCheckpoint``: the rings of the store are too small. ``where``: for messages."""
        check_longest(self.spans, self._here, where)
        check_room(self.heads, self._here, where)

    def _lengths(self, group: int) -> Tensor:
        lengths = torch.zeros(len(self.lane_of), dtype=torch.int64, device="cpu")
        for one in self._moved:
            there = one.target >= 0
            lengths[one.target[there]] = one.items.spans[group].lengths[there]
        return lengths

    def pieces(self, group: int) -> Iterator[Piece]:
        for one in self._moved:
            there, to = one.target >= 0, one.target.clamp(min=0)
            lanes = torch.where(there, self.lane_of[to], -1)
            yield from one.items.picked(group, lanes, self.spans[group].offsets[to])


class Scatter:
    """The rows of some shards that one rank gets.

    Args:
        shards: all of them.
        plan: where their trajectories go.
        rank: which gets them.
        schema: of its store.
        env_offset: added to the lane in fields whose role is ``env_id``.
    """

    def __init__(
        self, shards: Sequence[SavedShard], plan: ReshardPlan, rank: int, schema: schemas.Schema, env_offset: int = 0
    ) -> None:
        self._shards, self._plan, self._rank, self._schema = shards, plan, rank, schema
        self._env_offset = env_offset
        self._fields = fields_of(shards)
        self._length = schema.capacity // schema.lanes
        self._mine = (plan.rank == rank).nonzero()[0]
        self._items: MovedItems | None = None

    # ---- the state without rows ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state of the store without rows.

        Tickets keep their ages; priorities are copied, bit for bit, and every rank gets the largest one of all; passes begin
        again. Of the files, only what this rank gets is read, in whole blocks.

        Raises:
            CorruptCheckpoint: a block is damaged, or a trajectory has rows that are void.
            IncompatibleCheckpoint: the shards differ in alpha, eps or the names of their indexes.
        """
        shards, plan, schema = self._shards, self._plan, self._schema
        clock = max(one.source.clock for one in shards)
        numbers = torch.zeros(schema.capacity, dtype=torch.int64, device="cpu")
        mine = plan.rank == self._rank
        written = [one for one in shards if one.reader.geometry is not None]
        priorities = _common_priorities(written, schema.capacity)
        memory = zeroed_window()
        for which, one in enumerate(shards):
            if (mine & (plan.source == which)).any():
                extents = self._extents(which)
                _place_numbers(one, extents, clock - one.source.clock, numbers, memory)
                for name, common in priorities.items():
                    _place_leaves(one, extents, name, common["leaves"], memory)
        if int(numbers.count_nonzero()) != int(plan.steps[mine].sum()):
            raise corrupt(shards[0].reader.folder.parent, "expected trajectories of rows that are there, got void ones")
        heads = [one.head for one in written]
        lanes = torch.zeros((schema.lanes, 4), dtype=torch.int64, device="cpu")
        load = np.bincount(plan.lane[mine], plan.steps[mine] + plan.gap[mine], schema.lanes).astype(np.int64)
        lanes[:, 0] = lanes[:, 1] = torch.from_numpy(load)
        return {
            "schema": schemas.encode(schema).decode(),
            "lanes": lanes,
            "numbers": numbers,
            "writes": None,
            "clock": clock,
            "write_count": (sum(int(head["write_count"]) for head in heads) + plan.ranks - 1 - self._rank)
            // plan.ranks,
            "priorities": priorities,
            "passes": {},
            "windows": dict(heads[0]["windows"]) if heads else {},
        }

    def _extents(self, which: int) -> Extents:
        """What the rank gets of one shard."""
        plan, shard = self._plan, self._shards[which]
        geometry = shard.reader.geometry
        assert geometry is not None  # it has runs
        at = ((plan.rank == self._rank) & (plan.source == which)).nonzero()[0]
        columns = shard.source.columns
        runs = shard.source.runs[plan.run[at]]
        begin = _kept_from(plan, at, shard.source)
        target, steps = plan.lane[at] * self._length + plan.position[at], plan.steps[at]
        start = runs[:, 0] * geometry.lane_length
        # Positions go round the live rows: those that were written by number, ahead of the cursor, lie behind the newest one.
        ring = lanes_of(shard.reader)[runs[:, 0], 1]
        if columns > 1:  # every step is an extent
            step = within(steps)
            rows = start.repeat(steps) + (begin.repeat(steps) + step * columns) % ring.repeat(steps)
            found = Extents(rows, target.repeat(steps) + step, np.ones_like(rows))
        else:
            offset = begin % ring
            before = np.minimum(steps, ring - offset)  # up to the end of the ring
            wraps = steps > before
            both = (start + offset, start[wraps]), (target, (target + before)[wraps]), (before, (steps - before)[wraps])
            found = Extents(*map(np.concatenate, both))
        order = found.first.argsort(kind="stable")
        return Extents(found.first[order], found.target[order], found.rows[order])

    # ---- the rows --------------------------------------------------------------------------------------------------------

    def check_ranges(self) -> None:
        """Raise ``IncompatibleCheckpoint`` if lanes, trajectories or positions have numbers that their fields cannot hold."""
        plan, mine = self._plan, self._mine
        _check_range(self._fields, "env_id", self._env_offset + self._schema.lanes - 1, "lanes")
        _check_range(self._fields, "traj_id", len(mine) - 1, "trajectories")
        rows = int((plan.position + plan.steps)[mine].max(initial=0))
        _check_range(self._fields, "position", rows - 1, "rows in a lane")

    def take_items(self, state: Mapping[str, Tensor], here: schemas.Schema, where: str) -> None:
        """As for every :class:`~engram.saved.ragged.RaggedRowsSource`."""
        self._items = self._moved(state["lanes"], here)
        self._items.check(where)

    def needed_items(self) -> dict[int, int]:
        """The items of the lane that gets most of them, by the number of the leader. Raises ``CorruptCheckpoint``."""
        most = self._moved(self.state()["lanes"], self._schema).heads.amax(0).tolist()
        return {group.leader: items for group, items in zip(self._schema.ragged_groups, most, strict=True)}

    def _moved(self, lanes: Tensor, schema: schemas.Schema) -> MovedItems:
        moved = []
        for which, one in enumerate(self._shards):
            if ((self._plan.rank == self._rank) & (self._plan.source == which)).any():
                saved = saved_rows.read_rows_state(one.reader) if one.held is None else one.held
                extents, rows = self._extents(which), np.full(len(saved["numbers"]), -1, np.int64)
                at, to = _pairs(extents, 0, len(rows))
                rows[at] = to
                moved.append(MovedRows(PartItems(one.reader, saved), torch.from_numpy(rows)))
        return MovedItems(moved, lanes, schema)

    def fill(self, tensors: RowsTarget) -> None:
        """Read the rows into the fields of the store: each file once and in pieces, several shards at once, every block checked.

        Fields whose role says so are rewritten: ``env_id`` to the lane, ``traj_id`` to the number of the trajectory, ``position``
        by how far it moved; and the last steps of the trajectories that the plan truncates.
        """
        saved_rows.parallel_read(
            [self._placed(which, tensors) for which, one in enumerate(self._shards) if len(one.source.runs)], tensors
        )
        if self._items is not None:
            fill_rings(tensors, self._items)
        self._rewrite(tensors)

    def _placed(self, which: int, tensors: RowsTarget) -> Iterator[Callable[[], None]]:
        fields, reader, extents = self._fields, self._shards[which].reader, self._extents(which)
        memory = zeroed_window(max((field.row_bytes for field in fields), default=0))
        for stretch in stretches(reader):
            field, tensor = fields[stretch.field], tensors[stretch.field]
            if field.ragged:
                continue
            for low, raw in windows(reader, stretch, extents, field.row_bytes, memory):
                rows = raw.reshape(-1, field.row_bytes)
                if tensors.put is None:
                    yield partial(put, rows, low, extents, tensor)
                else:
                    yield partial(put_by_run, rows, low, extents, partial(tensors.put, stretch.field))

    def _rewrite(self, tensors: Sequence[Tensor]) -> None:
        plan = self._plan
        roles = zip((field.role for field in self._fields), tensors, strict=True)
        rewritten = [(role, tensor) for role, tensor in roles if role in ("env_id", "traj_id", "position")]
        steps, lane, position = plan.steps[self._mine], plan.lane[self._mine], plan.position[self._mine]
        shift = np.zeros(len(self._mine), np.int64)
        if any(role == "position" for role, _ in rewritten):
            for which, one in enumerate(self._shards):
                its = plan.source[self._mine] == which
                shift[its] = position[its] - _kept_from(plan, self._mine[its], one.source) // one.source.columns
        numbers = np.arange(len(self._mine))
        if any(role == "traj_id" for role, _ in rewritten):
            numbering = Numbering(self._shards, plan, self._mine, self._schema)
            numbers = numbering.numbers(tensors, lane * self._length + position)
        values = {"env_id": lane + self._env_offset, "traj_id": numbers, "position": shift}
        piece = (steps.cumsum() - steps) // _REWRITTEN
        for some in np.split(np.arange(len(self._mine)), np.flatnonzero(np.diff(piece)) + 1) if rewritten else ():
            step = within(steps[some])
            rows = torch.from_numpy((lane[some] * self._length + position[some]).repeat(steps[some]) + step)
            for role, tensor in rewritten:
                words = as_words(tensor)
                at = rows.to(tensor.device)
                value = torch.from_numpy(values[role][some].repeat(steps[some])).reshape(-1, *[1] * (tensor.ndim - 1))
                if role == "position":
                    value = words[at].to("cpu").view(tensor.dtype).to(torch.int64) + value
                words[at] = value.to(tensor.dtype).view(words.dtype).to(tensor.device)
        last = plan.truncated[self._mine]
        ends = (lane * self._length + position + steps - 1)[last]
        if len(ends):
            _truncate(self._fields, tensors, torch.from_numpy(ends))


def _kept_from(plan: ReshardPlan, at: NDArray[np.int64], source: Source) -> NDArray[np.int64]:
    """Of some of the trajectories that are kept, all of one source: the position there of the first step that is."""
    return cast("NDArray[np.int64]", source.runs[plan.run[at], 1] + plan.skipped[at] * source.columns)


def _place_numbers(shard: SavedShard, extents: Extents, later: int, numbers: Tensor, memory: Tensor) -> None:
    """Tickets of a source, ``later`` than they are there; 0 for void ones."""
    if shard.held is not None:
        held = shard.held["numbers"]
        put(torch.where(held != 0, held + later, 0), 0, extents, numbers)
        return
    reader = shard.reader
    for stretch in ticket_stretches(reader):
        for low, raw in windows(reader, stretch, extents, 8, memory):
            words, offset = raw.view(torch.int64), stretch.offset + 8 * (low - stretch.begin)
            there = saved_rows.checked_numbers(words.numpy(), reader.folder / stretch.file, offset)
            np.add(there, later, out=there, where=there != 0)
            put(words, low, extents, numbers)


def _place_leaves(shard: SavedShard, extents: Extents, name: str, leaves: Tensor, memory: Tensor) -> None:
    """Priorities of a source. Rows behind the last one that has any are not saved."""
    found = shard.head["priorities"][name]["leaves"]
    if shard.held is not None:
        put(found, 0, extents, leaves)
        return
    reader = shard.reader
    array = reader.arrays[found["$array"]]
    if array.dtype != "float64" or len(array.shape) != 1:
        raise corrupt(
            reader.folder, f"priorities {name!r}: expected a float64 one of [n], got {array.dtype} {array.shape}"
        )
    stretch = Stretch(reader.array_file(found["$array"]), 0, 0, 0, array.shape[0])
    for low, raw in windows(reader, stretch, extents, 8, memory):
        put(raw.view(torch.float64), low, extents, leaves)


def _common_priorities(written: Sequence[SavedShard], rows: int) -> dict[str, dict[str, Any]]:
    if not written:
        return {}
    every = [one.head["priorities"] for one in written]
    for one, other in zip(written, every, strict=True):
        if other.keys() != every[0].keys():
            raise IncompatibleCheckpoint(
                f"{one.reader.folder}: expected the priorities {sorted(every[0])}, as in {written[0].reader.folder}, got {sorted(other)}."
            )
    common = {}
    for name, state in every[0].items():
        for one, other in zip(written, every, strict=True):
            for entry in ("alpha", "eps", "max_priority_within_buffer"):
                if other[name][entry] != state[entry]:
                    raise IncompatibleCheckpoint(
                        f"{one.reader.folder}: priorities {name!r}: expected {entry}={state[entry]}, as in {written[0].reader.folder}, "
                        f"got {other[name][entry]}."
                    )
        highest = max(other[name]["highest"] for other in every)
        leaves = torch.zeros(rows, dtype=torch.float64, device="cpu")
        common[name] = {**state, "highest": highest, "leaves": leaves}
    return common


def _check_range(fields: Sequence[schemas.PartField], role: str, most: int, what: str) -> None:
    """Raise ``IncompatibleCheckpoint`` unless the field of that role can say every number up to ``most``."""
    for field in fields:
        if field.role != role:
            continue
        dtype = DTYPE_OF[field.dtype]
        counts = dtype is not torch.bool and not dtype.is_floating_point  # what is shifted must count as ints do
        if dtype.is_complex or (role == "position" and not counts):
            raise IncompatibleCheckpoint(
                f"{field.key}: expected a dtype of integers, as its role is {role!r}, got {field.dtype}. Save it with such a one, "
                "or with another role."
            )
        if most > (limit := _largest(dtype)):
            raise IncompatibleCheckpoint(
                f"{field.key}: expected at most {limit + 1} {what}, as many as {field.dtype} can number, got {most + 1}. Use a "
                "larger dtype, or give the field another role."
            )


def _largest(dtype: torch.dtype) -> int:
    """Up to which number all integers are exact."""
    if dtype is torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _truncate(fields: Sequence[schemas.PartField], tensors: Sequence[Tensor], rows: Tensor) -> None:
    """Mark steps as the last ones of trajectories that were cut short."""
    said = saved_rows.boundary_fields(fields, [field.role for field in fields])
    lasts = {role: said["last" if role == "step_type" else role] for role in TRUNCATED}
    for field, tensor in zip(fields, tensors, strict=True):
        if field in lasts.get(field.role, ()):
            value = torch.tensor(TRUNCATED[field.role], device="cpu").to(tensor.dtype)
            words = as_words(tensor)
            words[rows.to(tensor.device)] = value.view(words.dtype).to(tensor.device)
