"""Batches as blocks of bytes, and the keys that they are drawn with: one piece of memory holds all columns, and both ends compute where
each one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engram._support import native
from engram.format.schema import Field, validate_fields
from engram.store.memory import dlpack_specs
from engram.types import Entry


class Key:
    """64 random bits, from which a sample follows. Drawing costs 0.6 µs; the core reads them at :attr:`address`, which saves a
    conversion.
    """

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):  # else it could not be drawn into outside of inference mode
            self._bits = torch.zeros((), dtype=torch.int64, device="cpu")
        self.address = self._bits.data_ptr()
        #: ``draw()`` or ``draw(generator=…)``.
        self.draw = self._bits.random_
        #: ``mix(stream)``: into the bits of a draw those of :func:`engram._support.fork.stream`.
        self.mix = self._bits.bitwise_xor_

    @classmethod
    def of(cls, value: int) -> Key:
        """These bits, ``0 <= value < 2 ** 64``."""
        key = cls()
        key.set(value)
        return key

    def set(self, value: int) -> None:
        """To these bits, ``0 <= value < 2 ** 64``, in place of a draw."""
        self._bits.fill_(value - (1 << 64) if value >= 1 << 63 else value)

    @property
    def value(self) -> int:
        """The bits, as an int."""
        return int(self._bits)


class ThreadKey(Key, threading.local):
    """A key that is drawn again for every sample. Each thread has its own, so that no thread sees another's."""


#: Rows that were drawn, their tickets, and the weights of draws by priority: what native draws add behind the fields, in this order.
INDEX = Field(("index",), "int64", ())
GENERATION = Field(("index_generation",), "int64", ())
WEIGHT = Field(("priority_weight",), "float32", ())

#: Columns begin at multiples of it.
ALIGNMENT = 64


class Masses(NamedTuple):
    """What was true of a store when a batch was drawn from it, at the same moment: what exact draws over several stores need."""

    #: Sum of all leaves of priorities; of uniform draws the live rows; of an epoch the rows that are left of it.
    total: float
    #: The smallest leaf above zero, which weights are over; 1.0 where each row is equally likely.
    least: float
    #: Live rows.
    live: int


class BlockLayout:
    """Columns of a batch in one block of bytes: in order, each at a multiple of 64 bytes.

    It follows from the columns and a number of rows alone: both ends compute it, and neither has to trust the other.

    Args:
        fields: dtype and row shape of each column: those of a schema, with :data:`INDEX`, :data:`GENERATION` and
            :data:`WEIGHT` behind them where a draw has them.

    Raises:
        ValueError: a dtype or shape that no store has, or two columns of one key.

    >>> layout = BlockLayout([Field(("obs",), "float32", (3,)), INDEX])
    >>> layout.offsets(10), layout.nbytes(10)
    ([0, 128], 256)
    >>> block = layout.empty(10)
    >>> obs, index = layout.views(block, 10)
    >>> obs.shape, index.dtype
    (torch.Size([10, 3]), torch.int64)
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        validate_fields(self.fields, 1)
        self._row_bytes = [field.row_bytes for field in self.fields]
        self._native = native.Layout(dlpack_specs(self.fields))

    @classmethod
    def of(cls, columns: Mapping[Entry, torch.Tensor], *, ndim: int = 1) -> BlockLayout:
        """That of a batch whose columns were drawn into a block: in the order in which they lie there.

        Args:
            columns: by key. They may be those of any sampler; a tensor that lies elsewhere comes somewhere in between.
            ndim: dimensions of the batch: 2 for windows ``[n, T, ...]``, which count as ``n * T`` rows.
        """

        def begins(item: tuple[Entry, torch.Tensor]) -> int:
            _, column = item
            return column.data_ptr()

        found = sorted(columns.items(), key=begins)
        by_path = [((key,) if isinstance(key, str) else key, column) for key, column in found]
        return cls(Field(path, str(it.dtype).removeprefix("torch."), (*it.shape[ndim:],)) for path, it in by_path)

    def offsets(self, rows: int) -> list[int]:
        """Where each column of so many rows begins."""
        offsets, at = [], 0
        for row_bytes in self._row_bytes:
            offsets.append(at)
            at += aligned(row_bytes * rows)
        return offsets

    def nbytes(self, rows: int) -> int:
        """Bytes of a block of so many rows: a multiple of 64."""
        return sum(aligned(row_bytes * rows) for row_bytes in self._row_bytes)

    def empty(self, rows: int, batches: int = 1) -> NDArray[np.uint8]:
        """An uninitialised block for so many batches one behind the other, uint8 ``[batches * nbytes(rows)]``, at a multiple of 64."""
        return empty_block(batches * self.nbytes(rows), "cpu").numpy()

    def views(self, block: object, n: int, *, rows: int | None = None, at: int = 0) -> list[torch.Tensor]:
        """The columns of a batch, ``[n, *row shape]``: views, which keep the block. Views of read-only memory must not be written to.

        Args:
            block: any object with bytes, of this machine's byte order.
            n: rows.
            rows: how many the block has room for, which decides where columns begin. Default ``n``.
            at: where the batch begins.

        Raises:
            ValueError: the block is shorter than the layout, or does not begin at a multiple of 8 bytes.
            TypeError, BufferError: it has no bytes in one piece.
        """
        rows = n if rows is None else rows
        if not 0 <= n <= rows or at < 0:
            raise ValueError(f"views: expected 0 to {rows} rows, at 0 or behind it, got {n} rows at {at}.")
        available = memoryview(block).nbytes  # type: ignore[arg-type] # says itself what has no bytes
        if at + self.nbytes(rows) > available:
            raise ValueError(f"views: expected {self.nbytes(rows)} bytes for {rows} rows at {at}, got {available}.")
        try:
            return native.block_views(block, self._native, [at + offset for offset in self.offsets(rows)], n)
        except ValueError as error:
            raise ValueError(f"views: expected {error}.") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)


class DrawingPart:
    """A context: what is drawn on this thread is a part of a batch of which other stores draw the rest.

    Of windows whose first step is drawn by priority, fewer may come: where none begins at a step that was drawn, the store of that
    window is to be chosen again, so that the windows of all stores together are drawn in proportion.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> from engram.store.blocks import Key
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> _ = rb.extend({"a": torch.arange(4)})
    >>> with DrawingPart() as part:
    ...     _ = rb.storage.store.sample_uniform(Key.of(1), 8, with_rows=False)
    >>> part.masses
    Masses(total=4.0, least=1.0, live=4)
    """

    def __init__(self) -> None:
        self._native = native.OutputBlock(None)

    def __enter__(self) -> Self:
        self._native.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._native.__exit__(kind, error, at)

    @property
    def masses(self) -> Masses:
        """Of the last draw that says them: uniform ones, those by priority, and epochs; all zero where none does."""
        return Masses(*self._native.masses)


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty_block(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Uninitialised memory on a device, uint8 ``[nbytes]``, at a multiple of 64 bytes."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + nbytes]
