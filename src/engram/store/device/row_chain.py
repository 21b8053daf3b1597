"""Launches of the kernels for rows that lie on an accelerator: one for a batch, two for an append, one for an update."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from engram.store.device.chain import call, kernels_of, signed
from engram.store.device.tree import FANOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.store.device.chain import Launcher
    from engram.store.device.rows import DeviceRows
    from engram.store.device.tree import SumTree

#: What a draw by priority says beside its rows.
Beside: TypeAlias = Literal["single", "double", "leaves"]
BESIDE: tuple[Beside, ...] = ("single", "double", "leaves")
#: Of a part of a block: dtype, shape, strides, and where it begins, in elements.
_Part: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
_GIVEN, _UNIFORM, _PRIORITIZED = range(3)
#: dtypes of priorities that updates take.
KERNEL_DTYPES = (torch.float32, torch.float64)

#: Bytes that a program copies at once, with how many warps.
_CHUNKS = {256: 1, 2048: 4, 16384: 8}
#: Programs that share the chunks of a row, at most.
_PARTS = 16
#: Fields that one launch appends.
_FIELDS = 8
#: Where the table begins, and words of an entry: as in row_kernels.py.
_TABLE, _ENTRY = 16, 8
#: Entries of updates are numbered from here on: the other numbers in ``_last`` are positions in a batch.
_FIRST_UPDATE = 1 << 40
#: Entries of an update that one program takes; more are shared by several, a launch per level.
_ALONE = 1_024
#: Rows of an append that the kernels take: one program has their numbers and leaves.
MOST_ROWS = 1 << 16
#: Bytes that a block has per place for row, number and weight. Places are padded to a multiple of 16, so every part begins at one.
_BESIDE_BYTES, _PADDED = 24, 16


class RowKernels:
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
        self._rows, self._device = rows, rows.device
        widths = [column[0].nbytes for column in rows.whole]
        longest = max(widths, default=0)
        self._chunk = 256 if longest <= 256 else 2048 if longest <= 4096 else 16384
        table, self._first_chunk, before = [], [0], 0
        for column, nbytes in zip(rows.whole, widths, strict=True):
            aligned = column.data_ptr() | nbytes | 8
            for begin in range(0, nbytes, self._chunk):
                field, size = len(self._first_chunk) - 1, min(self._chunk, nbytes - begin)
                table += [column.data_ptr(), nbytes, begin, before, nbytes, size, aligned & -aligned, field]
            if nbytes:
                self._first_chunk.append(len(table) // _ENTRY)
            before += nbytes
        self._row_bytes, self._chunks = before, len(table) // _ENTRY
        addresses = [tensor.data_ptr() for tensor in (rows.numbers, rows.cursor, rows.tally, rows.last)]
        words = [rows.capacity, rows.lane_length, *addresses, self._chunks, 0, 0, _FIRST_UPDATE]
        words += [0] * (_TABLE - len(words)) + table
        self._state = torch.tensor(words, dtype=torch.int64, device="cpu").to(self._device)
        self._parts = 1 if self._interpreted else min(_PARTS, max(self._chunks, 1))
        self._warps = _CHUNKS[self._chunk]
        self._dtypes = {column.dtype for column in rows.whole} | {torch.int64}
        self._views = functools.lru_cache(maxsize=32)(self._view_parts)
        if not self._interpreted:
            self._warm_up()

    # ---- reads -------------------------------------------------------------------------------------------------------

    def read(
        self, n: int, key: int = 0, *, size: int = 0, given: Tensor | None = None, tree: Tensor | None = None, beside: Beside = "single"
    ) -> list[Tensor]:  # fmt: skip
        """A batch in a block of its own: one tensor per field, rows, numbers of their writes, and with a tree weights or leaves.

        Args:
            n: rows.
            key: 64 random bits, ``0 <= key < 2 ** 64``. A graph draws other rows at each replay.
            size: how many rows hold data, all below it; of the replay of a graph the ring says it.
            given: rows, int64 ``[n]`` on the device; None: they are drawn.
            tree: :func:`tree_state` of the priorities to draw by; None: uniformly.
            beside: what is said of rows drawn by priority.
        """
        padded = -(-n // _PADDED) * _PADDED
        block = torch.empty(padded * (_BESIDE_BYTES + self._row_bytes), dtype=torch.uint8, device=self._device)
        kind = _GIVEN if given is not None else _UNIFORM if tree is None else _PRIORITIZED
        rows = 0 if given is None else given.data_ptr()
        self._read(kind, beside, self._rows.capturing and given is None, key, size, rows, block.data_ptr(), n, tree)
        weights = None if kind != _PRIORITIZED else torch.float32 if beside == "single" else torch.float64
        typed = {dtype: block.view(dtype) for dtype in (*self._dtypes, *([weights] if weights else []))}
        # data: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
        return [
            typed[dtype].as_strided(shape, strides, at).data for dtype, shape, strides, at in self._views(n, weights)
        ]

    def _view_parts(self, n: int, weights: torch.dtype | None) -> list[_Part]:
        """The parts of a block: fields, rows, numbers, perhaps weights."""
        padded, before = -(-n // _PADDED) * _PADDED, _BESIDE_BYTES
        parts: list[_Part] = []
        for column in self._rows.whole:
            shape, dtype = (n, *column.shape[1:]), column.dtype
            parts.append((dtype, shape, column.stride(), padded * before // dtype.itemsize))
            before += column[0].nbytes
        parts += [(torch.int64, (n,), (1,), 0), (torch.int64, (n,), (1,), padded)]
        return parts if weights is None else [*parts, (weights, (n,), (1,), padded * 16 // weights.itemsize)]

    def _read(
        self, kind: int, beside: Beside, captured: bool, key: int, size: int, given: int, out: int, n: int, tree: Tensor | None
    ) -> None:  # fmt: skip
        block = self._block(n, 1)
        grid = (max(1, -(-n // block)), self._parts)
        self._launch(
            "read", grid, self._warps, self._state, self._state if tree is None else tree, signed(key), size, given, out, n,
            BLOCK=block, CHUNK=self._chunk, KIND=kind, BESIDE=BESIDE.index(beside), CAPTURED=captured,
        )  # fmt: skip

    # ---- appends -----------------------------------------------------------------------------------------------------

    def append(
        self,
        columns: Sequence[Tensor],
        n: int,
        trees: Sequence[tuple[Tensor, Tensor | None]],
        *,
        base: int = 0,
        position: int = 0,
        number: int = 0,
        moves: bool = True,
        index: Tensor | None = None,
    ) -> None:
        """Steps at the end of a ring; of more than it has rows, the last ones. In a graph, where the cursor on the device is then.

        Args:
            columns: of all fields, on the device.
            n: steps, at most :data:`MOST_ROWS`.
            trees: of priorities, each by :func:`tree_state`, with the leaf of new rows; None: that follows from the largest priority.
            base: the first row of the ring.
            position, number: of the first step. Graphs take those of the cursor.
            moves: whether the cursor moves on.
            index: int64 ``[2, n]`` on the device, contiguous: gets the rows and their numbers.
        """
        captured, kept = self._rows.capturing, []
        for column, whole in zip(columns, self._rows.whole, strict=True):
            if nbytes := whole[0].nbytes:
                values = column.to(whole.dtype).resolve_conj().resolve_neg().contiguous()
                aligned = not values.data_ptr() % (nbytes & -nbytes & 15 or 8)
                kept.append(values if aligned else values.clone())
        addresses = [values.data_ptr() for values in kept]
        for start in range(0, len(addresses), _FIELDS):
            some = addresses[start : start + _FIELDS]
            begin, end = self._first_chunk[start], self._first_chunk[start + len(some)]
            self._place(captured, base, position, n, begin, end, *some, *[0] * (_FIELDS - len(some)))
        for place, (tree, leaf) in enumerate(trees or [(self._state, None)]):
            last = place >= len(trees) - 1
            given, to = (0 if tensor is None else tensor.data_ptr() for tensor in (leaf, index if last else None))
            self._record(bool(trees), captured, last and moves, tree, base, position, number, n, given, to)

    def _place(self, captured: bool, base: int, position: int, n: int, begin: int, end: int, *sources: int) -> None:
        block, parts = self._block(n, max(1, 4096 // self._chunk)), min(self._parts, end - begin)
        grid = (max(1, -(-min(n, self._rows.lane_length) // block)), parts)
        numbers = (base, position, n, begin, end, *sources)
        self._launch(
            "place", grid, max(self._warps, 4), self._state, *numbers, BLOCK=block, CHUNK=self._chunk, CAPTURED=captured
        )

    def _record(self, has_tree: bool, captured: bool, moves: bool, tree: Tensor, *numbers: int) -> None:
        given = {"TREE": has_tree, "CAPTURED": captured, "LAST": moves}
        self._launch("record", (1,), 8, self._state, tree, *numbers, BLOCK=1024, NODES=64, **given)

    # ---- updates of priorities ---------------------------------------------------------------------------------------

    def update(self, tree: Tensor, levels: int, rows: Tensor, priorities: Tensor, expected: Tensor | None) -> None:
        """New priorities, float64 or float32 ``[n]``, of rows int64 ``[n]``: ``DevicePriorities.update_there``.

        All tensors are on the device, and contiguous. One launch; of more than 1,024 rows two and one per level.
        """
        n, arguments = len(rows), (tree, rows, priorities, rows if expected is None else expected, len(rows))
        if n <= _ALONE:
            self._update(-1, 1, expected is not None, *arguments, 0)
            return
        self._update(0, -(-n // _ALONE), expected is not None, *arguments, 0)
        self._update(1, -(-n // _ALONE), expected is not None, *arguments, 0)
        for level in range(1, levels):
            programs = 1 if level == levels - 1 else -(-n // 64)
            self._update(2, programs, expected is not None, *arguments, level)

    def _update(self, phase: int, programs: int, expects: bool, *arguments: object) -> None:
        given = {"EXPECTED": expects, "PHASE": phase}
        warps = 4 if phase == 2 else 16
        self._launch("update", (programs,), warps, self._state, *arguments, BLOCK=1024, NODES=64, **given)

    def _block(self, n: int, on_device: int) -> int:
        """Rows of a program. In Triton's interpreter, where a program takes long, as many as can be."""
        return min(256, 1 << max(n - 1, 0).bit_length()) if self._interpreted else on_device

    # ---- launches ----------------------------------------------------------------------------------------------------

    def _launch(self, name: str, grid: tuple[int, ...], warps: int, *arguments: object, **constants: object) -> None:
        """One kernel. Without fused multiply-adds: they would draw other rows than the host."""
        self.launches += 1
        self._launcher(self._kernels[name][grid], *arguments, **constants, num_warps=warps, enable_fp_fusion=False)

    def _warm_up(self) -> None:
        """Compile and load what graphs may capture, by calls for no rows."""
        for captured in (False, True):
            self._read(_UNIFORM, "single", captured, 0, 0, 0, 0, 0, None)
            if self._chunks:
                self._place(captured, 0, 0, 0, 0, 1, *[0] * _FIELDS)
            self._record(False, captured, True, self._state, *[0] * 6)
        self.launches = 0

    def warm_up_tree(self, tree: Tensor) -> None:
        """The same, of a tree that was made."""
        if self._interpreted:
            return
        none, launches = self._state[:0], self.launches
        for captured in (False, True):
            for beside in BESIDE:
                self._read(_PRIORITIZED, beside, captured, 0, 0, 0, 0, 0, tree)
            for moves in (False, True):
                self._record(True, captured, moves, tree, *[0] * 6)
        for phase in (-1, 0, 1, 2):
            for expects in (False, True):
                for dtype in KERNEL_DTYPES:
                    self._update(phase, 1, expects, tree, none, none.to(dtype), none, 0, 1)
        self.launches = launches


def tree_state(tree: SumTree, powers: Tensor, eps: float, most: float) -> Tensor:
    """A tree as the kernels find it. ``powers``: float64 ``[3]``, alpha, beta and the largest priority, contiguous."""
    words = [len(tree.sums), powers.data_ptr(), _bits_of(eps), _bits_of(most)]
    for level, sums in enumerate(tree.sums):  # of which the nodes behind those above the level below are padding
        size = len(tree.sums[level - 1]) // FANOUT if level else len(sums)
        words += [sums.data_ptr(), tree.lows[level - 1].data_ptr() if level else 0, size]
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(sums.device)


def _bits_of(number: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)
