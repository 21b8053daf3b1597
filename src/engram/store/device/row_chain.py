"""Launches of the kernels for rows that lie on an accelerator: one for a batch, two for an append, one for an update.

The sum tree that they draw from works by torch operations, which never wait for the device.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from engram.store.device.chain import CHUNKS, Launcher, call, chunk_for, kernels_of, signed
from engram.store.device.row_operations import Drawing, Followed, Ring, RowOperations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.store.device.priorities import DevicePriorities
    from engram.store.device.rows import DeviceRows

#: Children of a node of a sum tree.
FANOUT = 128


class SumTree:
    """float64 leaves, and of every 128 of them the sum and the smallest above zero, level on level up to a single node.

    Behind the leaves there is at least one that belongs to no row
    (:attr:`spare`): entries that change nothing are written there, as zero.

    >>> import torch
    >>> from engram.store.device.row_chain import SumTree
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
        self.launches = 0
        """Kernels launched so far."""
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
    words = [len(tree.sums), powers.data_ptr(), _bits_of(eps), _bits_of(most)]
    for level, sums in enumerate(tree.sums):  # of which the nodes behind those above the level below are padding
        size = len(tree.sums[level - 1]) // FANOUT if level else len(sums)
        lows = tree.lows[level - 1] if level else None
        words += [sums.data_ptr(), 0 if lows is None else lows.data_ptr(), size]
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(sums.device)


def _bits_of(number: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)
