"""Where a device finds the rows of a store in host memory, and where a batch of them lies on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engram.format.files import FIXED_BYTES
from engram.format.schema import Field
from engram.store.blocks import ALIGNMENT, GENERATION, INDEX, WEIGHT, BlockLayout
from engram.store.memory import row_stride, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from engram.store.indexes import Index
    from engram.store.store import Store

#: Children of a node of the store's priority tree: one line of 64 bytes.
FANOUT = 8
#: Bytes before the tree, and where beta stands among them: ``native/core/priorities.h``.
_TREE_AT, _BETA_AT = 4096, 40
_VALID = Field(("valid",), "bool", ())


class Column(NamedTuple):
    """The rows of one field."""

    address: int
    stride: int
    """Bytes from row to row: more than ``row_bytes`` for small fields that lie together."""
    row_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row."""


class Tree(NamedTuple):
    """The priority tree of a store: addresses of doubles."""

    sums: tuple[int, ...]
    """By level, the leaves first and the root last."""
    sizes: tuple[int, ...]
    """Nodes by level."""
    least: int
    """The smallest leaf above zero."""
    beta: int


class Columns(NamedTuple):
    """A store by addresses. All are valid on the device that reads it; nothing here keeps the memory alive or registered."""

    tickets: int
    """A word per row: ``edited << 63 | number << 2 | state``."""
    writes: int
    """A word per row: where the row is edited, the number of the write that it holds."""
    lanes_at: int
    """64 bytes per lane: cursor, base and high are the first three words."""
    capacity: int
    lanes: int
    lane_length: int
    fields: tuple[Column, ...]
    tree: Tree | None = None


def columns_of(
    store: Store, translate: Callable[[int], int] = lambda address: address, priorities: Index | None = None
) -> Columns:
    """A store as a device reads it.

    Args:
        store: rows on the CPU. The caller keeps it open as long as a device reads it.
        translate: from an address of the host to that of the same byte on the device. Called once per memory: with the beginning
            of the tickets, the control block, the priorities, and of each field that has bytes.
        priorities: the store's index of priorities to draw by.
    """
    control, words = store.control_memory
    tickets, capacity = translate(words.data_ptr()), store.capacity
    behind = 8 * capacity + -(-4 * capacity // 8) * 8  # tickets and laps
    fields = []
    for field, tensor in zip(store.schema.fields, store.tensors, strict=True):
        address = translate(tensor.data_ptr()) if field.row_bytes else 0
        fields.append(Column(address, row_stride(tensor), field.row_bytes, torch_dtype(field), field.shape))
    return Columns(
        tickets,
        tickets + (behind if words.nbytes > behind else 0),  # stores of before have none, nor rows that were edited
        translate(control.data_ptr()) + FIXED_BYTES,
        capacity,
        store.lanes,
        store.lane_length,
        tuple(fields),
        None if priorities is None else tree_at(translate(priorities.block.address), capacity),
    )


def tree_at(address: int, leaves: int) -> Tree:
    """The tree in the memory of an index of priorities that begins at an address: leaves, sums, then minima, level by level.

    Levels are padded to whole lines of 64 bytes.
    """
    sizes = [leaves, -(-leaves // FANOUT)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // FANOUT))
    begin = [address + _TREE_AT]
    for size in (*sizes, *sizes[1:]):
        begin.append(begin[-1] + -(-size // FANOUT) * FANOUT * 8)
    return Tree(tuple(begin[: len(sizes)]), tuple(sizes), begin[-2], address + _BETA_AT)


class Batch(NamedTuple):
    """Rows that a device has read. All tensors are views of the block."""

    block: Tensor
    """uint8, all parts one behind the other."""
    fields: tuple[Tensor, ...]
    """``[B, *row shape]`` per field."""
    rows: Tensor
    """int64 ``[B]``; -1 where no row could be read."""
    tickets: Tensor
    """int64 ``[B]``: the numbers of the writes that the rows held, which updates of priorities name; -1 where there is none."""
    valid: Tensor
    """bool ``[B]``: False where no row could be read, and all bytes of the row are zero."""
    weights: Tensor | None
    """float32 ``[B]``, of draws by priority: over the smallest leaf of the store; 0 where no row could be read."""


class Layout:
    """One block of bytes per batch: the fields, rows, tickets, valid and weights, each part at a multiple of 64 bytes.

    Args:
        fields: those of the batch.
        batch_size: rows.
        weighted: whether it has weights.
    """

    def __init__(self, fields: Iterable[Column], batch_size: int, *, weighted: bool) -> None:
        named = [Field((str(number),), str(field.dtype)[6:], field.shape) for number, field in enumerate(fields)]
        blocks = BlockLayout((*named, INDEX, GENERATION, _VALID, *([WEIGHT] if weighted else [])))
        self.batch_size = batch_size
        self.weighted = weighted
        self.nbytes = -(-blocks.nbytes(batch_size) // ALIGNMENT) * ALIGNMENT
        offsets = blocks.offsets(batch_size)
        self.fields = tuple(offsets[: len(named)])
        """Where each field begins."""
        self.rows, self.tickets, self.valid = offsets[len(named) : len(named) + 3]
        self.weights = offsets[-1] if weighted else 0
        shapes = [(batch_size, *field.shape) for field in blocks.fields]
        self._parts = [
            (
                torch_dtype(field),
                shape,
                torch.empty(shape, device="meta").stride(),
                offset // torch_dtype(field).itemsize,
            )
            for offset, field, shape in zip(offsets, blocks.fields, shapes, strict=True)
        ]
        self._dtypes = {dtype for dtype, *_ in self._parts}

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialised block on a device, at a multiple of 64 bytes."""
        block = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        begin = -block.data_ptr() % ALIGNMENT
        return block[begin : begin + self.nbytes]

    def views(self, block: Tensor) -> Batch:
        """The parts of a block.

        Raises:
            ValueError: it is not uint8 of :attr:`nbytes` in one piece, or does not begin at a multiple of 64 bytes.
        """
        if (block.dtype, tuple(block.shape), block.stride(), block.data_ptr() % ALIGNMENT) != (
            torch.uint8,
            (self.nbytes,),
            (1,),
            0,
        ):
            raise ValueError(
                f"Layout: expected a contiguous block of uint8 [{self.nbytes}] at a multiple of {ALIGNMENT} bytes, got {block.dtype} "
                f"{list(block.shape)} at {block.data_ptr():#x}. Use Layout.empty."
            )
        typed = {dtype: (view := block.view(dtype), view.storage_offset()) for dtype in self._dtypes}
        # data: each has a version of its own, which autograd compares. Of views, a change of one would be a change of all.
        parts = [
            typed[dtype][0].as_strided(shape, strides, typed[dtype][1] + at).data
            for dtype, shape, strides, at in self._parts
        ]
        count = len(self.fields)
        rows, tickets, valid = parts[count : count + 3]
        return Batch(block, tuple(parts[:count]), rows, tickets, valid, parts[-1] if self.weighted else None)
