"""Reads, appends and updates of rows on an accelerator, which never wait for it: by operations of torch, and by kernels, one launch for a
batch, two for an append, one for an update.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engram._support import native
from engram.store.device.chain import CHUNKS, Launcher, call, chunk_for, kernels_of, signed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.store.device.rows import DevicePriorities, DeviceRows
    from engram.store.device.store import DeviceStore


#: Step types: the first step of a trajectory, and the last one.
_FIRST, _LAST = 0, 2


#: How a field ends a trajectory: by another content in the following row; by the last type, or the first one in the following row; by
#: flags other than zero.
EndKind: TypeAlias = Literal["id", "step type", "any flag", "all flags"]


class End(NamedTuple):
    """A field that ends a trajectory."""

    field: int
    by: EndKind


class Followed:
    """Where the next observations of rows are. The newest row of a lane has none yet, unless it ends a trajectory.

    Args:
        store: the steps.
        finals: the observations after the last steps, in the order of ``fields``, and behind them a tag.
        mark: the field in which a last step names its row there, and the tag; -1 in those of other steps.
        fields: the observations.
        ends: what ends a trajectory. Without a mark such a step has no next observation.
    """

    def __init__(
        self, store: DeviceStore, finals: DeviceStore, mark: int, fields: Sequence[int], ends: Sequence[End]
    ) -> None:
        self.store, self.rows, self.finals_store, self.finals = store, store.rows, finals, finals.rows
        self.mark, self.fields, self.ends, self.width = mark, tuple(fields), ends, math.prod(store.schema.columns)
        #: As the kernels find it; None: they cannot use it.
        self.table: Tensor | None = None

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether rows have a next observation, and in which rows it is: int64 ``[n]`` each, of ``finals`` or -1, and of the steps."""
        steps, finals = self.rows, self.finals
        first = rows // steps.lane_length * steps.lane_length
        after = first + (rows - first + self.width) % steps.lane_length
        after.clamp_(max=steps.spare)  # nothing follows that one
        place, tag = steps.whole[self.mark][rows].unbind(-1)
        is_last, inside = place >= 0, place < finals.capacity
        kept = inside & (finals.whole[-1][torch.where(is_last & inside, place, finals.nowhere)] == tag)
        goes_on = steps.numbers[after] > steps.numbers[rows]  # else it is the newest of its lane, and the oldest comes
        for end in self.ends:
            goes_on &= ~self._ends(end, rows, after)
        return (steps.numbers[rows] > 0) & torch.where(is_last, kept, goes_on), torch.where(kept, place, -1), after

    def _ends(self, end: End, rows: Tensor, after: Tensor) -> Tensor:
        """Whether a trajectory ends with each of some rows, as one of the fields says: bool ``[n]``."""
        column = self.rows.whole[end.field]
        column = column.view(len(column), math.prod(column.shape[1:]))
        here = column[rows]
        if end.by == "id":
            return (here != column[after]).any(1)
        if end.by == "step type":
            return (here == _LAST).any(1) | (column[after] == _FIRST).any(1)
        return (here != 0).all(1) if end.by == "all flags" else (here != 0).any(1)

    def read(self, rows: Tensor) -> list[Tensor]:
        """The next observations of rows that have one, ``[n, *shape]`` per field."""
        _, place, after = self.find(rows)
        at, found = torch.where(place < 0, self.finals.nowhere, place), []
        for number, kept in zip(self.fields, self.finals.whole, strict=False):
            following = self.rows.whole[number][after]
            is_last = (place >= 0).view(-1, *[1] * (following.ndim - 1))
            found.append(torch.where(is_last, kept[at].to(following.dtype), following))
        return found

    def sample_rows(self, n: int, key: int, how: Drawing) -> list[Tensor]:
        """As :meth:`DeviceStore.sample_rows`, with next observations."""
        return self.store.sample_rows(n, key, how._replace(followed=self))

    def lost(self) -> int:
        """How many rows name a final observation that was overwritten. Waits for the device."""
        with self.rows, self.finals:
            rows = torch.arange(self.rows.capacity, device=self.rows.device)
            held = (self.rows.numbers[:-1] > 0) & (self.rows.whole[self.mark][:-1, 0] >= 0)
            return int((held & (self.find(rows)[1] < 0)).sum())


#: How often a place is drawn that needs a row which holds something, or has a next observation: as in row_kernels.py.
TRIES = 16


class Drawing(NamedTuple):
    """How rows are drawn, and what is read with them."""

    #: The priorities to draw by; None: uniformly.
    tree: DevicePriorities | None = None
    #: Whether float32 weights over the largest in the store are said, or else float64 leaves.
    weighed: bool = True
    #: Where next observations are. Of a row that has none another takes the place.
    followed: Followed | None = None


class Ring(NamedTuple):
    """Where steps are appended."""

    #: The first row of the ring.
    base: int = 0
    #: Of the first step, as its number. Graphs take those of the cursor.
    position: int = 0
    number: int = 0
    #: Whether the cursor moves on.
    moves: bool = True


class RowOperations:
    """What a store on a device does with its rows in every step. In a graph draws use torch's random numbers.

    The ``ledger`` of each call is the rows: columns, numbers and cursor. Nothing here keeps them.
    """

    def read(self, ledger: DeviceRows, n: int, key: int, size: int, how: Drawing) -> list[Tensor]:
        """A batch: one tensor per field, next observations, rows, numbers of their writes, and of a draw by priority weights or leaves.

        Args:
            n: rows.
            key: 64 random bits, ``0 <= key < 2 ** 64``. A graph draws other rows at each replay.
            size: how many rows hold data, all below it; at the replay of a graph the ring says it. -1: those that do lie apart.
            how: by priority, or uniformly.
        """
        tree, weighed, followed = how
        redrawn = followed is not None or (tree is None and ledger.capturing)
        rows, leaves = self._drawn(ledger, n * TRIES if redrawn else n, key, size, tree)
        if redrawn or leaves is not None:
            good = ledger.numbers[rows] > 0 if followed is None else followed.find(rows)[0]
            good = good if leaves is None else good & (leaves > 0)
            ledger.tally[3].add_(~good.any())
            rows, at = torch.where(good, rows, 0), _first(good.view(-1, n)) if redrawn else slice(n)
            rows, leaves = rows[at], leaves if leaves is None else leaves[at]
        beside = [] if tree is None or leaves is None else [tree.weigh(leaves).float() if weighed else leaves]
        following = [] if followed is None else followed.read(rows)
        return [*ledger.take(rows, range(len(ledger.whole))), *following, rows, ledger.numbers[rows], *beside]

    def _drawn(
        self, ledger: DeviceRows, n: int, key: int, size: int, tree: DevicePriorities | None
    ) -> tuple[Tensor, Tensor | None]:
        """``n`` rows as :meth:`read` has them, not all of which hold something; and their leaves."""
        if tree is None and size >= 0 and not ledger.capturing:
            return self._numbers(ledger, key, size, n), None
        share = self._numbers(ledger, key, 1 << 53, n) * 2.0**-53
        if tree is not None:
            return tree.tree.draw(share)
        if size >= 0:
            return (share * ledger.size()).long(), None
        held = (ledger.numbers > 0).cumsum(0)
        return torch.searchsorted(held, (share * held[-1]).long(), right=True).clamp_(max=ledger.spare), None

    def _numbers(self, ledger: DeviceRows, key: int, end: int, n: int) -> Tensor:
        """int64 ``[n]`` below ``end``, on the device."""
        if ledger.capturing:
            return torch.randint(end, (n,), device=ledger.device)
        numbers = native.empty_rows(n)
        native.uniform(key, end, numbers)
        return ledger.sent(numbers, "sample")

    def append(self, ledger: DeviceRows, columns: Sequence[Tensor], n: int, ring: Ring) -> tuple[Tensor, Tensor] | None:
        """Steps at the end of a ring; of more than it has rows, the last ones. In a graph: their rows and numbers, int64 ``[n]``.

        Args:
            columns: of all fields, on the device.
            n: steps.
            ring: where it is.
        """
        base, position, number, moves = ring
        steps = torch.arange(n, device=ledger.device)
        cursor = ledger.cursor.clone() if ledger.capturing else (position, number)
        rows, numbers = base + (cursor[0] + steps) % ledger.lane_length, cursor[1] + steps
        kept = slice(max(n - ledger.lane_length, 0), n)
        ledger.put(rows[kept], range(len(columns)), [column[kept] for column in columns], None)
        ledger.numbers.index_put_((rows[kept],), numbers[kept])
        for tree in ledger.trees:
            tree.written(rows[kept])
        if moves:
            ledger.cursor.add_(n)
        return (rows, numbers) if ledger.capturing else None

    def append_some(self, ledger: DeviceRows, columns: Sequence[Tensor], chosen: Tensor, base: int) -> Tensor:
        """Append those of some steps that a mask chooses: int64 ``[n, 2]``, their rows and tags; -1 of the others.

        Args:
            columns: of all fields but the last one, which holds the tags: ``base`` and the number of the write.
            chosen: bool ``[n]`` on the device. Of more than there are rows, the last ones stay.
        """
        order = chosen.cumsum(0)
        total = order[-1:].clone()
        rows, tags = (ledger.cursor[0] + order - 1) % ledger.capacity, ledger.cursor[1] + (order - 1 + base)
        at = torch.where(chosen & (order > total - ledger.capacity), rows, ledger.nowhere)
        ledger.put(at, range(len(columns)), columns, None)
        ledger.whole[-1].index_put_((at,), torch.where(chosen, tags, -1))
        ledger.numbers.index_put_((at,), torch.where(at < ledger.spare, tags - base, 0))
        ledger.cursor.add_(total)
        return torch.where(chosen.unsqueeze(1), torch.stack((rows, tags), 1), -1)

    def edit(self, ledger: DeviceRows, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
        """Replace fields of rows, int64 ``[n]`` on the device; negative ones count from the end of a full ring, or of what is written.

        Returns:
            The rows, the spare one in place of those that hold nothing, which are counted. Of a row that is named twice the last entry
            stays.
        """
        at = ledger.live(torch.where(rows < 0, rows + ledger.size(), rows))
        if ledger.capturing:
            ledger.count_edits(at)
        ledger.put(at, which, columns, ledger.last_of(at))
        ledger.count_edits(at)
        return at

    def update(
        self, ledger: DeviceRows, tree: DevicePriorities, rows: Tensor, priorities: Tensor, expected: Tensor | None
    ) -> None:
        """As :meth:`DevicePriorities.update_there`, of tensors on the device."""
        priorities = priorities.double()
        leaves = tree.leaf(priorities)
        good = (priorities >= 0) & (leaves < tree.most)
        inside = (rows >= 0) & (rows < ledger.capacity)
        at = torch.where(inside & good, rows, ledger.nowhere)
        held = ledger.numbers[at]
        used = held > 0 if expected is None else (held > 0) & (held == expected)
        ledger.tally[:3].add_(torch.stack((inside & good & ~used, ~good, ~inside & (rows != -1))).sum(1))
        leaves = torch.where(used, torch.where(leaves > 0, leaves, -tree.zero), tree.zero)
        at = torch.where(used, at, ledger.nowhere)
        if len(at):
            highest = torch.where(used, priorities, tree.zero).amax()
            torch.maximum(tree.highest_there, highest, out=tree.highest_there)
        last = ledger.last_of(at)
        tree.tree.put(at, leaves if last is None else leaves[last])


def _first(good: Tensor) -> Tensor:
    """Of bool ``[tries, n]`` for each place the first good one, as an index of all; where there is none, that of another place."""
    n, found = good.shape[1], good.any(0)
    at = good.long().argmax(0) * n + torch.arange(n, device=good.device)
    return torch.where(found, at, at[found.long().argmax(0, keepdim=True)])


#: Children of a node of a sum tree.
FANOUT = 128


class SumTree:
    """float64 leaves, and of every 128 of them the sum and the smallest above zero, level on level up to a single node.

    Behind the leaves there is at least one that belongs to no row
    (:attr:`spare`): entries that change nothing are written there, as zero.

    >>> import torch
    >>> from engram.store.device.row_operations import SumTree
    >>> tree = SumTree(3, torch.device("cpu"))
    >>> tree.put(torch.tensor([0, 2]), torch.tensor([1.0, 3.0], dtype=torch.float64))
    >>> float(tree.total()), float(tree.least())
    (4.0, 1.0)
    >>> tree.draw(torch.tensor([0.1, 0.3], dtype=torch.float64))[0].tolist()
    [0, 2]
    """

    def __init__(self, leaves: int, device: torch.device) -> None:
        self.spare = leaves
        n = leaves + 1
        sizes: list[int] = []
        while n > 1 or not sizes:
            n = math.ceil(n / FANOUT)
            sizes.append(n * FANOUT)
        #: The leaves, and the sums of each level over the one below.
        self.sums = [torch.zeros(size, dtype=torch.float64, device=device) for size in (*sizes, n)]
        #: The smallest above zero; infinite where there is none. The leaves are their own.
        self.lows = [torch.full_like(level, torch.inf) for level in self.sums[1:]]
        # Numbers in Python would be made tensors by a kernel each time.
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._infinite = torch.full_like(self._zero, torch.inf)

    @property
    def leaves(self) -> Tensor:
        """The leaves, the spare ones included: float64."""
        return self.sums[0]

    def total(self) -> Tensor:
        """The sum of all leaves, on the device."""
        return self.sums[-1][0]

    def least(self) -> Tensor:
        """The smallest leaf above zero, on the device; infinite if there is none."""
        return self.lows[-1][0]

    # ---- changes -----------------------------------------------------------------------------------------------------

    def put(self, rows: Tensor, leaves: Tensor) -> None:
        """Set leaves. Of a row that is named twice all entries must be equal."""
        self.leaves.index_put_((rows,), leaves)
        self.sum_up()

    def sum_up(self) -> None:
        """Sum up again what lies above the leaves."""
        lows = torch.where(self.leaves > 0, self.leaves, self._infinite)
        for level, low in enumerate(self.lows):
            nodes = len(self.sums[level]) // FANOUT
            torch.sum(self.sums[level].view(-1, FANOUT), 1, out=self.sums[level + 1][:nodes])
            torch.amin(lows.view(-1, FANOUT), 1, out=low[:nodes])
            lows = low

    # ---- draws -------------------------------------------------------------------------------------------------------

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in proportion to their leaves, int64 ``[n]``, and these leaves.

        Args:
            u: float64 ``[n]`` in [0, 1), on the device.

        No row of leaf zero is drawn, unless all are zero.
        """
        # What is rounded must neither decrease nor end at a leaf without mass.
        ends = torch.where(self.leaves > 0, self.leaves.cumsum(0), self._zero).cummax(0).values
        rows = torch.searchsorted(ends, u * ends[-1], right=True).clamp_(max=self.spare)
        return rows, self.leaves[rows]


#: Of a part of a block: dtype, shape, strides, and where it begins, in elements.
_Part: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
#: dtypes of priorities that updates take.
_PRIORITIES = (torch.float32, torch.float64)

#: Programs that share the chunks of a row, at most.
_PARTS = 16
#: Sizes of batches whose parts are known.
_SIZES = 64
#: Fields that one launch appends.
_FIELDS = 8
#: Where the table begins, and words of an entry: as in row_kernels.py.
_TABLE, _ENTRY, _CHECKS = 16, 8, 8
#: Entries of updates are numbered from here on: the other numbers in ``_last`` are positions in a batch.
_FIRST_UPDATE = 1 << 40
#: Rows of an append that the kernels take: one program has their numbers and leaves.
_MOST_ROWS = 1 << 16
#: Bytes that a block has per place for row, number and weight. Places are padded to a multiple of 16, so every part begins at one.
_BESIDE_BYTES, _PADDED = 24, 16


class RowKernels(RowOperations):
    """The kernels for the rows of one ring on a device. No method waits for it.

    Args:
        rows: columns, numbers and cursor. Their memory stays where it is.
        launcher: queues a kernel, which it calls with the rest, on the stream in use: ``Accelerator.launch``.

    Raises:
        RuntimeError: as :func:`kernels_of`. Whatever Triton raises where it cannot compile.
    """

    def __init__(self, rows: DeviceRows, launcher: Launcher = call) -> None:
        self._interpreted, self._launcher = kernels_of(rows.device).INTERPRETED, launcher
        from engram.store.device import row_kernels

        self._kernels = vars(row_kernels)
        #: Kernels launched so far.
        self.launches = 0
        widths = [column[0].nbytes for column in rows.whole]
        self._chunk = chunk_for(widths)
        table, self._first_chunk, before = list[int](), [0], 0
        for column, nbytes in zip(rows.whole, widths, strict=True):
            table += self._entries(column, before, len(self._first_chunk) - 1)
            if nbytes:
                self._first_chunk.append(len(table) // _ENTRY)
            before += nbytes
        self._row_bytes, self._chunks = before, len(table) // _ENTRY
        kept = rows.numbers, rows.cursor, rows.tally, rows.last
        addresses = [tensor.data_ptr() for tensor in kept]
        words = [rows.capacity, rows.lane_length, *addresses, self._chunks, 0, 0, _FIRST_UPDATE, rows.edited.data_ptr()]
        words += [0] * (_TABLE - len(words)) + table
        self._state = torch.tensor(words, dtype=torch.int64, device="cpu").to(rows.device)
        self._parts = 1 if self._interpreted else min(_PARTS, max(self._chunks, 1))
        self._warps = CHUNKS[self._chunk]
        #: Of each field dtype, shape and strides of a row's values, and its bytes.
        self._fields = [(column.dtype, column.shape[1:], column.stride(), column[0].nbytes) for column in rows.whole]
        self._length, self._device = rows.lane_length, rows.device
        self._known: dict[tuple[int, torch.dtype | None, tuple[int, ...]], list[_Part]] = {}
        #: Where next observations are, as the kernels have found it last.
        self._table: Tensor | None = None
        self.warm_up()

    # ---- reads -------------------------------------------------------------------------------------------------------

    def read(self, ledger: DeviceRows, n: int, key: int, size: int, how: Drawing) -> list[Tensor]:
        """As :meth:`RowOperations.read`: one launch, and one block of memory for all of the batch."""
        tree, weighed, followed = how
        table = None if followed is None else self._table_of(followed)
        if (size < 0 and tree is None) or (followed is not None and table is None):
            return super().read(ledger, n, key, size, how)
        beside = None if tree is None else torch.float32 if weighed else torch.float64
        nexts = () if followed is None else followed.fields
        parts = self._known.get((n, beside, nexts)) or self._parts_of(n, beside, nexts)
        row_bytes = self._row_bytes + sum(self._fields[field][3] for field in nexts)
        nbytes = -(-n // _PADDED) * _PADDED * (_BESIDE_BYTES + row_bytes)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        state = None if tree is None else tree.state_there
        self._read(state, table, weighed, ledger.capturing, key, size, block.data_ptr(), n)
        typed = {dtype: block.view(dtype) for dtype in {part[0] for part in parts}}
        # data: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
        return [typed[dtype].as_strided(shape, strides, at).data for dtype, shape, strides, at in parts]

    def _parts_of(self, n: int, beside: torch.dtype | None, nexts: tuple[int, ...]) -> list[_Part]:
        """The parts of a block: fields, next observations, rows, numbers, perhaps weights or leaves. They are noted for the next batch."""
        padded, before = -(-n // _PADDED) * _PADDED, _BESIDE_BYTES
        parts: list[_Part] = []
        for dtype, shape, strides, nbytes in (*self._fields, *(self._fields[field] for field in nexts)):
            parts.append((dtype, (n, *shape), strides, padded * before // dtype.itemsize))
            before += nbytes
        parts += [(torch.int64, (n,), (1,), 0), (torch.int64, (n,), (1,), padded)]
        if beside is not None:
            parts.append((beside, (n,), (1,), padded * 16 // beside.itemsize))
        if len(self._known) > _SIZES:
            self._known.clear()
        self._known[n, beside, nexts] = parts
        return parts

    def _table_of(self, followed: Followed) -> Tensor | None:
        """Where next observations are, as the kernels find it. None: they do not know that dtype, or that end of an episode."""
        rows, finals = followed.rows, followed.finals
        pairs = [(rows.whole[field], kept) for field, kept in zip(followed.fields, finals.whole, strict=False)]
        known = all(one.dtype is kept.dtype for one, kept in pairs)
        if followed.table is None and known and {end.by for end in followed.ends} <= {"id", "any flag"}:
            checks, table, before = list[int](), list[int](), self._row_bytes
            for end in followed.ends:
                column = rows.whole[end.field]
                checks += [column.data_ptr(), column[0].nbytes, end.by == "id"]
            for column, kept in pairs:
                table += self._entries(column, before, kept.data_ptr(), kept.data_ptr())
                before += column[0].nbytes
            marks, tags = rows.whole[followed.mark], finals.whole[-1]
            at = [marks.data_ptr(), tags.data_ptr(), finals.capacity, followed.width]
            words = [*at, len(followed.ends), len(table) // _ENTRY, _CHECKS + len(checks), 0, *checks, *table]
            followed.table = self._table = torch.tensor(words, dtype=torch.int64, device="cpu").to(rows.device)
            for tree in (None, *(tree.state_there for tree in rows.trees)):
                self.warm_up(tree)
        return followed.table

    def _entries(self, column: Tensor, before: int, last: int, also: int = 0) -> list[int]:
        """The words of a table for the chunks of a column. ``last``: of each the last one; ``also``: another address that is read."""
        nbytes, words = column[0].nbytes, list[int]()
        aligned = column.data_ptr() | also | nbytes | 8
        for begin in range(0, nbytes, self._chunk):
            size = min(self._chunk, nbytes - begin)
            words += [column.data_ptr(), nbytes, begin, before, nbytes, size, aligned & -aligned, last]
        return words

    def _read(self, tree: Tensor | None, table: Tensor | None, weighed: bool, captured: bool, *numbers: int) -> None:
        n, state, key = numbers[-1], self._state, signed(numbers[0])
        block = self._block(n, 1)
        given = {"TREE": tree is not None, "WEIGHED": weighed, "CAPTURED": captured, "FOLLOWED": table is not None}
        grid, beside = (max(1, -(-n // block)), self._parts), [state if it is None else it for it in (tree, table)]
        self._launch(
            "read", grid, self._warps, state, *beside, key, *numbers[1:], BLOCK=block, CHUNK=self._chunk, **given
        )

    # ---- appends -----------------------------------------------------------------------------------------------------

    def append(self, ledger: DeviceRows, columns: Sequence[Tensor], n: int, ring: Ring) -> tuple[Tensor, Tensor] | None:
        """As :meth:`RowOperations.append`: two launches, of more than 8 fields or one tree one for each 8 and each tree."""
        if n > _MOST_ROWS:
            return super().append(ledger, columns, n, ring)
        base, position, number, moves = ring
        captured = ledger.capturing
        self._place(self._sources(columns), n, captured, base, position)
        index = torch.empty((2, n), dtype=torch.int64, device=self._device) if captured else None
        trees = [tree.for_kernels() for tree in ledger.trees]
        for place, (tree, leaf) in enumerate(trees or [(self._state, None)]):
            last = place >= len(trees) - 1
            given, to = 0 if leaf is None else leaf.data_ptr(), 0 if index is None else index.data_ptr()
            self._record(bool(trees), captured, last and moves, tree, base, position, number, n, given, to)
        return None if index is None else (index[0], index[1])

    def _sources(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """The values of all fields that have bytes, as kernels read them."""
        kept = []
        for column, (dtype, _, _, nbytes) in zip(columns, self._fields, strict=True):
            if nbytes:
                values = column.to(dtype).resolve_conj().resolve_neg().contiguous()
                aligned = not values.data_ptr() % (nbytes & -nbytes & 15 or 8)
                kept.append(values if aligned else values.clone())
        return kept

    def _place(self, sources: Sequence[Tensor], n: int, captured: bool, *at: int, rows: Tensor | None = None) -> None:
        """Copy rows to where they belong: a launch for each 8 fields. ``at``: base and position; ``rows``: those that are edited."""
        block, addresses = self._block(n, max(1, 4096 // self._chunk)), [values.data_ptr() for values in sources]
        copied = n if rows is not None else min(n, self._length)
        for start in range(0, max(len(addresses), 1), _FIELDS):
            some = addresses[start : start + _FIELDS]
            begin, end = self._first_chunk[start], self._first_chunk[start + len(some)]
            numbers = (*(at or (0, 0)), n, begin, end, *some, *[0] * (_FIELDS - len(some)))
            given = {"EDITS": rows is not None, "LAST": start + _FIELDS >= len(addresses), "CAPTURED": captured}
            self._launch(
                "place", (max(1, -(-copied // block)), max(1, min(self._parts, end - begin))), max(self._warps, 4),
                self._state, self._state if rows is None else rows, *numbers, BLOCK=block, CHUNK=self._chunk, **given,
            )  # fmt: skip

    def edit(self, ledger: DeviceRows, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Tensor:
        """As :meth:`RowOperations.edit`: of all fields two launches, of more than 8 fields one more for each 8."""
        if [*which] != [*range(len(self._fields))]:
            return super().edit(ledger, rows, which, columns)
        sources, at = self._sources(columns), torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._launch("claim", (1,), 8, self._state, rows.contiguous(), at, len(rows), BLOCK=1024)
        self._place(sources, len(rows), False, rows=at)
        return at

    def _record(self, has_tree: bool, captured: bool, moves: bool, tree: Tensor, *numbers: int) -> None:
        given = {"TREE": has_tree, "CAPTURED": captured, "LAST": moves}
        self._launch("record", (1,), 8, self._state, tree, *numbers, BLOCK=1024, NODES=64, **given)

    # ---- updates of priorities ---------------------------------------------------------------------------------------

    def update(
        self, ledger: DeviceRows, tree: DevicePriorities, rows: Tensor, priorities: Tensor, expected: Tensor | None  # noqa: ARG002 - as operations need it
    ) -> None:  # fmt: skip
        """As :meth:`RowOperations.update`: one launch."""
        priorities = priorities if priorities.dtype in _PRIORITIES else priorities.double()
        others = (rows, priorities, rows if expected is None else expected)
        self._update(expected is not None, tree.state_there, *(tensor.contiguous() for tensor in others), len(rows))

    def _update(self, expects: bool, *arguments: object) -> None:
        self._launch("update", (1,), 16, self._state, *arguments, BLOCK=1024, NODES=64, EXPECTED=expects)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def _block(self, n: int, on_device: int) -> int:
        """Rows of a program. In Triton's interpreter, where a program takes long, as many as can be."""
        return min(256, 1 << max(n - 1, 0).bit_length()) if self._interpreted else on_device

    def _launch(self, name: str, grid: tuple[int, ...], warps: int, *arguments: object, **constants: object) -> None:
        """One kernel. Without fused multiply-adds: they would draw other rows than the host."""
        self.launches += 1
        self._launcher(self._kernels[name][grid], *arguments, **constants, num_warps=warps, enable_fp_fusion=False)

    def warm_up(self, tree: Tensor | None = None) -> None:
        """Compile and load what graphs may capture, perhaps with a tree that was made, by calls for no rows."""
        if self._interpreted:
            return
        none, state = self._state[:0], self._state if tree is None else tree
        nones = [none] * min(len(self._first_chunk) - 1, _FIELDS + 1)
        for captured in (False, True):
            for either in (False, True):
                for table in dict.fromkeys((None, self._table)):
                    self._read(tree, table, either, captured, 0, 0, 0, 0)
                self._record(tree is not None, captured, either, state, *[0] * 6)
                for dtype in () if tree is None else _PRIORITIES:
                    self._update(either, tree, none, none.to(dtype), none, 0)
            self._place(nones[:_FIELDS], 0, captured)
        self._launch("claim", (1,), 8, self._state, none, none, 0, BLOCK=1024)
        self._place(nones, 0, False, rows=none)
        self.launches = 0


def tree_state(tree: SumTree, powers: Tensor, eps: float, most: float) -> Tensor:
    """A tree as the kernels find it. ``powers``: float64 ``[3]``, alpha, beta and the largest priority, contiguous."""
    numbers = torch.tensor([eps, most], dtype=torch.float64, device="cpu").view(torch.int64)  # their bits
    words = [len(tree.sums), powers.data_ptr(), *numbers.tolist()]
    for level, sums in enumerate(tree.sums):  # of which the nodes behind those above the level below are padding
        size = len(tree.sums[level - 1]) // FANOUT if level else len(sums)
        lows = tree.lows[level - 1] if level else None
        words += [sums.data_ptr(), 0 if lows is None else lows.data_ptr(), size]
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(sums.device)
