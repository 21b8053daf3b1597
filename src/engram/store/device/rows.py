"""Rows on an accelerator, with the numbers of their writes and the cursor of their ring: all that a CUDA graph needs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram._support import fork
from engram._support.words import warn
from engram.errors import EMPTY, NoSampleable, PriorityError, RowError
from engram.store.device.accelerator import Accelerator
from engram.store.device.row_chain import RowKernels
from engram.store.device.row_operations import RowOperations
from engram.store.memory import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.format.schema import Schema
    from engram.store.device.priorities import DevicePriorities

#: Rows of a write of which the last entry of each row is found by comparing all pairs.
_PAIRS = 1_024


class DeviceRows:
    """Columns, numbers and cursor, each on the device. No method waits for it, but :meth:`check` and :meth:`written`.

    Behind the last row there is one more, at :attr:`spare`: entries that change nothing are written there.
    """

    def __init__(self, schema: Schema, device: torch.device, tensors: Sequence[Tensor] = ()) -> None:
        self.device, self.capacity, self.accelerator = device, schema.capacity, Accelerator(device)
        self.lane_length = schema.capacity // schema.lanes
        self.spare = schema.capacity
        self.whole = [
            torch.zeros((schema.capacity + 1, *field.shape), dtype=torch_dtype(field), device=device)
            for field in schema.fields
        ]
        for column, tensor in zip(self.whole, tensors, strict=False):
            column[:-1].copy_(tensor)
        #: The number of the write that each row holds; 0: it holds nothing.
        self.numbers = torch.zeros(schema.capacity + 1, dtype=torch.int64, device=device)
        #: Edits by an index on the device, of each row: one counts when it begins, and when it ends.
        self.edited = torch.zeros(schema.capacity + 1, dtype=torch.int32, device=device)
        #: The same when the host last gave edited rows new tickets.
        self.told = torch.zeros_like(self.edited)
        #: Position of the next step, its number, and rows written since the last emptying: of a store of one lane.
        self.cursor = torch.zeros(3, dtype=torch.int64, device=device)
        #: Where the cursor will be once a graph has appended what it is at, which it says before; that counts where a mirror looks.
        self.begun = torch.zeros(1, dtype=torch.int64, device=device)
        #: Updates that came too late; bad priorities; rows outside the store or without data; draws where nothing had a priority.
        self.tally = torch.zeros(4, dtype=torch.int64, device=device)
        #: The spare row, on the device.
        self.nowhere = torch.full((), self.spare, device=device)
        #: By row the position of an entry that names it, as :meth:`last_of` and the kernels compare them.
        self.last = torch.full((schema.capacity + 1,), -1, dtype=torch.int64, device=device)
        self._checked = [0, 0, 0]
        #: The one of the last call outside of a graph.
        self.stream = self.accelerator.after(None)
        #: Held around every call by what enters these rows, so that the operations of two threads do not mix.
        self.lock = fork.rlock()
        # What the host knows of it, in one place for all stores around these rows.
        #: Appended rows that the core has not been told of.
        self.pending = 0
        #: Whether graphs append rows, and whether they edit some, of which the core hears when it is asked.
        self.captured, self.captured_edits = False, False
        #: Whether rows may have been edited of which it has not heard.
        self.edits = False
        #: Whether the live rows are those that the cursor has passed.
        self.ring = True
        #: What the cursor on the device was when the host last knew.
        self.known = (0, 0, 0)
        self.trees: list[DevicePriorities] = []
        #: How often all rows were replaced; how often they were forgotten, and whether the last time the count of writes stayed.
        self.replaced, self.emptied, self.kept_count = 0, 0, False

        #: What reads, appends and updates them.
        self.work = work_on(self)

    @property
    def capturing(self) -> bool:
        """Whether what is done now goes into a CUDA graph."""
        return self.accelerator.capturing()

    def __enter__(self) -> None:
        """For a call: no other thread's operations come in between, and those of earlier calls come before, whatever their streams."""
        with self.lock:
            self.follow_stream()
            self.lock.acquire()  # once more, for the block

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def follow_stream(self) -> None:
        """Let what is done on the current stream come after what was done before on another one."""
        if not self.capturing:
            self.stream = self.accelerator.after(self.stream)

    def sent(self, tensor: Tensor, call: str) -> Tensor:
        """A tensor on the device. Raises ``RuntimeError``: it is of the host, and a graph is captured."""
        if tensor.device == self.device:
            return tensor
        if self.capturing:
            raise RuntimeError(
                f"{call}: expected tensors on {self.device} while a CUDA graph is captured, got one on {tensor.device}, which would be "
                "read once and not at each replay. Move it there before, or make this call outside of the capture."
            )
        return self.accelerator.bring(tensor)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def last_of(self, rows: Tensor) -> Tensor | None:
        """For each entry the position of the last one that names its row: int64 ``[n]``. None: there is one entry only."""
        n, places = len(rows), torch.arange(len(rows), device=self.device)
        if n <= 1:
            return None
        if n <= _PAIRS:
            return torch.where(rows.unsqueeze(1) == rows, places, -1).amax(1)
        self.last.index_fill_(0, rows, -1)
        return self.last.scatter_reduce_(0, rows, places, "amax")[rows]

    def put(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], last: Tensor | None) -> None:
        """Replace fields of rows. ``last``: of rows that may be named several times, as :meth:`last_of` has it."""
        for number, column in zip(which, columns, strict=True):
            self.whole[number].index_put_((rows,), column if last is None else column[last])

    def put_span(self, start: int, which: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Replace fields of consecutive rows."""
        spans = [self.whole[number][start : start + len(column)] for number, column in zip(which, columns, strict=True)]
        torch._foreach_copy_(spans, list(columns))  # torch's optimizers use it

    def number(self, rows: Tensor, first: int | Tensor, last: Tensor | None) -> None:
        """Rows hold new writes, numbered from ``first`` on. ``last`` as for :meth:`put`."""
        numbers = torch.arange(len(rows), device=self.device) + first
        self.numbers.index_put_((rows,), numbers if last is None else numbers[last])

    def begin(self, n: int | Tensor) -> None:
        """Some steps will be appended at the cursor."""
        torch.add(self.cursor[:1], n, out=self.begun)

    def count_edits(self, rows: Tensor) -> None:
        """Edits of rows begin, or end. Those of one call do both at once, as readers come between calls."""
        ones = torch.ones(len(rows), dtype=torch.int32, device=self.device)
        self.edited.index_add_(0, rows, ones if self.capturing else ones * 2)

    def newly_edited(self) -> Tensor:
        """Rows that were edited since the last call, on the host, which waits; not those whose edit a graph is just making."""
        now = self.edited.clone()
        changed = (now != self.told) & (now % 2 == 0)
        self.told.copy_(torch.where(changed, now, self.told))
        return changed[:-1].nonzero().squeeze(1).cpu()

    def size(self) -> Tensor:
        """Rows of the ring that hold data, on the device."""
        return self.cursor[2].clamp(max=self.capacity)

    def live(self, rows: Tensor) -> Tensor:
        """Rows, the spare one in place of those that are outside or hold nothing, which are counted."""
        at = torch.where((rows >= 0) & (rows < self.capacity), rows, self.nowhere)
        wrong = self.numbers[at] <= 0
        self.tally[2].add_(wrong.sum())
        return torch.where(wrong, self.nowhere, at)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def take(self, rows: Tensor, which: Sequence[int]) -> list[Tensor]:
        """Fields of rows, copied."""
        return [self.whole[number].index_select(0, rows) for number in which]

    # ---- what the host asks for: each waits ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``PriorityError``, ``RowError`` or ``NoSampleable`` for what calls on the device left out since the last call."""
        with self:
            before, now = self._checked, self.tally[1:].tolist()
        bad, outside, empty = (b - a for a, b in zip(before, now, strict=True))
        self._checked = now
        left_out = "since the last look at the device; they were left out."
        if bad:
            raise PriorityError(f"update_priority: expected finite priorities, at least 0, got {bad} others {left_out}")
        if outside:
            raise RowError(f"expected rows that hold data, got {outside} others {left_out}")
        if empty:
            raise NoSampleable(f"{EMPTY} Since the last look at the device {empty} draws found no row, or no priority.")


def work_on(rows: DeviceRows) -> RowOperations:
    """Kernels on a CUDA device, else operations of torch. Warns where the device could run kernels, but something is missing."""
    if rows.device.type != "cuda":
        return RowOperations()
    obstacle = rows.accelerator.obstacle()
    if obstacle is None:
        try:
            with rows.accelerator.active():
                return RowKernels(rows, rows.accelerator.launch)
        except Exception as error:  # noqa: BLE001 - Triton has errors of its own, and those of the C compiler that it calls
            obstacle = f"{type(error).__name__}: {error}"
    warn(
        f"storage on {rows.device}: expected Triton's kernels, got none: {obstacle}. Torch's operations do the same, several times slower."
    )
    return RowOperations()
