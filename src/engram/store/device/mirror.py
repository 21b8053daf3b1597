"""A copy in a folder of rows that lie on an accelerator, which trails behind them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from engram._support import devices, fork, native, words
from engram.store import blocks, memory
from engram.store.device.accelerator import Accelerator
from engram.store.device.rows import DevicePriorities
from engram.store.device.store import DeviceStore
from engram.store.store import Store, StoreState
from engram.types import RowsTarget, WritePlan

#: How often the thread looks for new rows; how often it copies priorities; how long it rests after an error.
LOOK_S, PRIORITIES_S, REST_S = 0.05, 1.0, 5.0
#: Bytes of the two blocks through which rows go, each.
BLOCK_BYTES = 16 << 20
#: How often a flush tries to read rows that graphs replace, and the time between.
_TRIES, _RETRY_S = 100, 0.01
_KIND = "priorities"


class _Leaves(NamedTuple):
    """Priorities of one name at one moment."""

    name: str
    #: alpha, beta, eps, and whether the largest priority is that within the buffer.
    parameters: tuple[float, float, float, bool]
    #: float64 ``[rows + 1]`` on the host: the leaves, and the largest priority of all updates.
    values: torch.Tensor


class _Block(NamedTuple):
    """Rows on their way, and what else happened to the rows until they were read."""

    #: When the rows were as the block says.
    looked: float
    #: Whether nothing was left that the block does not say.
    whole: bool
    #: Whether the rows were forgotten before, and whether the count of writes stayed then; None: they were not.
    emptied: bool | None
    #: int64 ``[a + e]``: rows to append, those of a lane in their order, then edited ones.
    rows: torch.Tensor
    #: int64 ``[a]``: lanes of the rows to append.
    lanes: torch.Tensor
    #: bool ``[a]``: the row was overwritten on the device before it was read.
    lost: torch.Tensor
    #: bool ``[e]``: of the edited rows, whether they hold new writes.
    placed: torch.Tensor
    #: int64 ``[L]``: positions up to which rows were appended before this block.
    before: torch.Tensor
    #: int64 ``[L]``: those of the next steps on the device.
    positions: torch.Tensor
    #: Rows that hold nothing.
    holes: torch.Tensor
    #: One pinned tensor ``[a + e, *row shape]`` per field.
    columns: list[torch.Tensor]
    #: Once the rows were read: the position of the step after those that were appended, or were just being; and of each row, int32 ``[a +
    #: e, 2]``, how many edits were known before, and how many there were then. None: no graph writes rows.
    moved: tuple[torch.Tensor, torch.Tensor] | None
    leaves: list[_Leaves]
    #: When it has come, the memory on the host holds the copies.
    copied: torch.Event


class Mirror:
    """Copies the rows of a store on an accelerator to a store in a folder, in the order of writing, in a thread of its own.

    Calls on the rows wait for nothing but the moment in which a block of rows is copied on the device. A second stream brings the
    block to pinned memory, and the thread writes it to the folder. What was written meanwhile stays in the columns and comes with
    the next block: a slow disk makes the folder lag, and nothing is dropped. A row that the ring overwrites before it is copied is
    counted as lost. Rows that a CUDA graph may be replacing while they are copied show by what it says first: up to where it appends,
    and the counts of edits; they are copied again.

    Args:
        store: the rows.
        target: the store in the folder, with the same schema and the same rows.
    """

    def __init__(self, store: DeviceStore, target: Store) -> None:
        self._store, self._target = store, target
        self.directory: Path | None = target.directory
        self._accelerator = Accelerator(store.device)
        self._order, self._down = self._accelerator.stream(), self._accelerator.stream()
        fields = [(memory.torch_dtype(field), field.shape, field.row_bytes) for field in store.schema.fields]
        self._parts = (*fields, (torch.int32, (2,), 8))
        needed = sum(nbytes for *_, nbytes in self._parts)
        self._most = max(1, min(BLOCK_BYTES // needed, store.capacity), math.prod(store.schema.columns))
        room = self._size(self._most)
        devices.check_room("the blocks of a mirror", 2 * room, store.device)
        there = [torch.empty(room, dtype=torch.uint8, device=store.device) for _ in range(2)]
        pinned = [self._accelerator.memory.empty((room,), torch.uint8) for _ in range(2)]
        self._rooms = [*zip(there, pinned, strict=True)]
        self._leaves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._turn, self._stop = fork.lock(), threading.Event()
        #: Why the last try to copy failed; None: it did not.
        self.error: Exception | None = None
        self._lost, self._resting, self._prioritized, self._tried = 0, 0.0, 0.0, 0.0
        self._begin()
        target.owners.add(self)  # a buffer that opens the folder in this process does not close it
        run = threading.Thread(target=_run, args=(weakref.ref(self), self._stop), name="engram-mirror", daemon=True)
        run.start()
        self._end = weakref.finalize(fork.registered(self), _end, self._stop, run)

    def _begin(self) -> None:
        """The folder holds the rows as they are now."""
        core, rows = self._store.settled(), self._store.rows
        self._at = self._store.lane_states()[:, 0].clone()
        self._seen = self._written = int(self._at.sum())
        self._clock, self._replaced, self._emptied = core.next_ticket, rows.replaced, rows.emptied
        self._edited = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._placed = torch.zeros(0, dtype=torch.bool, device="cpu")
        self._last, self._whole_at = self._signature(), time.monotonic()

    def _signature(self) -> tuple[int, ...]:
        """Changes with whatever happens to rows by calls of the host."""
        bare, rows = self._store.bare, self._store.rows
        return bare.next_ticket + rows.pending, bare.void_rows, rows.replaced, rows.emptied

    # ---- what others ask ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """``mirror_lag``: rows that the folder lacks; ``mirror_lag_s``: since when at most; ``mirror_lost``: rows that it will lack."""
        store, rows = self._store, self._store.rows
        with rows:
            lag = max(int(store.lane_states()[:, 0].sum()) - self._written, 0)
            idle = not (lag or rows.edits or len(self._edited)) and self._signature() == self._last
        seconds = 0.0 if idle else time.monotonic() - self._whole_at
        return {"mirror_lag": lag, "mirror_lag_s": seconds, "mirror_lost": self._lost}

    def saved(self, name: str) -> dict[str, object] | None:
        """The state of the priorities of that name in the folder; None: there are none."""
        index = self._target.indexes.get((name, _KIND))
        return None if index is None else dict(index.state())

    def flush(self) -> None:
        """Wait until the folder holds all rows and priorities as they are now. Raises what keeps it from that."""
        for _ in range(_TRIES):
            self._prioritized, self._resting = -math.inf, 0.0
            self.copy()
            if self.error is not None:
                raise self.error
            if self._written == self._seen and self._replaced == self._store.rows.replaced:
                return
            self._stop.wait(_RETRY_S)  # a graph, or a load, was replacing rows

    def close(self) -> None:
        """Copy what is left, and close the folder. Repeatable. An error was, or is, a warning."""
        self._end()
        if not self._target.closed:
            with contextlib.suppress(Exception):
                self.flush()
            self._target.release(self)

    def discard(self) -> None:
        """End, and remove the store in the folder, unless another process has it open."""
        self._end()
        self._target.discard(self)

    def after_fork(self) -> None:
        """In a child, which has no thread that copies."""
        self._end.detach()

    # ---- copying -----------------------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copy what was written until now. An error is kept; one warning says it."""
        with self._turn:
            if time.monotonic() < self._resting or self._store.closed or self._target.closed:
                return
            try:
                self._copy()
                self.error = None
            except Exception as error:  # noqa: BLE001 - whatever it is, the buffer works on
                self._replaced, self._resting = -1, time.monotonic() + REST_S  # all rows, then
                if self.error is None:
                    what = f"{type(error).__name__}: {error}"
                    words.warn(
                        f"mirror: the folder {str(self.directory)!r} lags behind, as copying rows to it fails: {what}"
                    )
                self.error = error

    def _copy(self) -> None:
        before, stream = None, self._store.rows.stream
        with self._accelerator.beside_captures():
            # In a capture, to wait for it would become part of the graph.
            while stream is None or not self._accelerator.capturing(stream):
                if self._store.rows.replaced != self._replaced:
                    self._copy_all()
                    before = None  # its rows were replaced
                block = self._read()
                if before is not None and not self._write(before):
                    if block is not None:
                        self._drop(block)
                    return
                if block is None or (block.whole and self._write(block)):
                    return
                before, self._rooms = block, self._rooms[::-1]

    def _read(self) -> _Block | None:
        """Begin to copy the next rows. None: there are none."""
        store, rows = self._store, self._store.rows
        with self._accelerator.on(self._order), rows:
            due = time.monotonic() - self._prioritized >= PRIORITIES_S
            due = due and any(kind == _KIND for _, kind in store.indexes)
            changed = rows.captured or rows.edits or rows.replaced != self._replaced or self._signature() != self._last
            if store.closed or not (due or changed or len(self._edited) or int(self._at.sum()) != self._seen):
                return None
            core = store.settled()
            if rows.replaced != self._replaced:
                return None  # the next look copies all
            emptied = rows.kept_count if rows.emptied != self._emptied else None
            if emptied is not None:
                self._at.zero_()
                self._seen, self._edited, self._placed = 0, self._edited[:0], self._placed[:0]
                self._emptied = rows.emptied
            positions = store.lane_states()[:, 0].clone()
            self._look_for_edits(core, int(positions.sum()))
            return self._block(positions, emptied, due=due)

    def _look_for_edits(self, core: native.Store, seen: int) -> None:
        """Learn which rows were written elsewhere than at the ends of lanes since the last look."""
        store, clock = self._store, core.next_ticket
        if clock - self._clock != seen - self._seen:
            found = store.changes(self._clock)
            writes = store.writes_of(found.rows, found.tickets)
            self._edited = torch.cat((self._edited, found.rows))
            self._placed = torch.cat((self._placed, writes >= self._clock))
        self._seen, self._clock, self._last = seen, clock, self._signature()

    def _within(self, rows: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Whether rows hold steps of their lane from ``first`` on, as many as ``count``: bool, as the rows."""
        length = self._store.lane_length
        lanes = rows // length
        return (rows - first[lanes]) % length < count[lanes]

    def _block(self, positions: torch.Tensor, emptied: bool | None, *, due: bool) -> _Block:
        store, length = self._store, self._store.lane_length
        ahead = positions - self._at
        gone = torch.where(ahead > 2 * length, (ahead // length - 1) * length, 0)  # whole laps
        self._lost += int(gone.sum())
        self._at += gone
        ahead -= gone
        alone = ~self._within(self._edited, self._at, ahead)  # the others come with the rows to append
        edited, placed = self._edited[alone], self._placed[alone]
        e = min(len(edited), max(1, self._most // 2))
        self._edited, self._placed = edited[e:], placed[e:]
        before, (lanes, steps) = self._at.clone(), self._next_steps(ahead, self._most - e)
        self._at += torch.bincount(lanes, minlength=store.lanes)
        where = torch.cat((lanes * length + steps % length, edited[:e]))
        columns, moved = self._stage(where)
        whole, now = int(self._at.sum()) == int(positions.sum()) and not len(self._edited), time.monotonic()
        leaves = []
        # Those of rows that the folder lacks come with the last block.
        if due and (whole or now - self._tried >= PRIORITIES_S):
            leaves, self._tried = self._stage_leaves(), now
            self._prioritized = now if whole else self._prioritized
        staged, size = self._accelerator.mark(self._order), self._size(len(where))
        room, pinned = self._rooms[0][0][:size], self._rooms[0][1][:size]
        with self._accelerator.on(self._down):
            self._accelerator.wait(self._down, staged)
            self._accelerator.launch(lambda: pinned.copy_(room, non_blocking=True))
            for one in leaves:
                if one.name in self._leaves:
                    self._accelerator.launch(self._bring_leaves, one.name)
        holes = torch.from_numpy(store.bare.holes()) if store.bare.void_rows else edited[:0]
        lost = steps < positions[lanes] - length
        done = self._accelerator.mark(self._down)
        return _Block(
            now, whole, emptied, where, lanes, lost, placed[:e], before, positions, holes, columns, moved, leaves, done
        )  # fmt: skip

    def _next_steps(self, ahead: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lanes and positions of steps to append, about that many, whole slots of all columns, the oldest of each lane first."""
        width = math.prod(self._store.schema.columns)
        each = max(width, most // max(1, int((ahead > 0).sum())) // width * width)
        counts = ahead.clamp(max=min(each, self._store.lane_length))
        counts = torch.where(counts.cumsum(0) <= max(most, width), counts, 0)
        lanes = torch.repeat_interleave(torch.arange(len(ahead), device="cpu"), counts)
        first = torch.repeat_interleave(self._at - counts.cumsum(0) + counts, counts)
        return lanes, first + torch.arange(len(lanes), device="cpu")

    def _size(self, n: int) -> int:
        """Bytes of a room for ``n`` rows."""
        return blocks.ALIGNMENT + sum(blocks.aligned(n * nbytes) for *_, nbytes in self._parts)

    def _divided(self, room: torch.Tensor, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Of a room for ``n`` rows the places of the columns, the last one that of counts of edits; and that of the cursor."""
        parts, at = [], blocks.ALIGNMENT
        for dtype, shape, nbytes in self._parts:
            parts.append(room[at : at + n * nbytes].view(dtype).view(n, *shape))
            at += blocks.aligned(n * nbytes)
        return parts, room[:8].view(torch.int64)

    def _stage(self, where: torch.Tensor) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
        """Queue a copy of rows on the device: where they will be on the host."""
        rows, (room, pinned) = self._store.rows, self._rooms[0]
        (*to, edits), cursor = self._divided(room, len(where))
        at, checked = rows.sent(where, "mirror"), rows.captured or rows.captured_edits

        def stage() -> None:
            for part, column in zip(to, rows.whole, strict=True):
                torch.index_select(column, 0, at, out=part)
            if checked:
                torch.maximum(rows.cursor[:1], rows.begun, out=cursor)
                edits.copy_(torch.stack((rows.told[at], rows.edited[at]), 1))

        self._accelerator.launch(stage)
        (*columns, edits), cursor = self._divided(pinned, len(where))
        return columns, (cursor, edits) if checked else None

    def _stage_leaves(self) -> list[_Leaves]:
        """Queue copies of the priorities of all names on the device."""
        found, capacity = [], self._store.capacity
        for (name, kind), index in self._store.indexes.items():
            if kind != _KIND:
                continue
            values = torch.empty(capacity + 1, dtype=torch.float64, device="cpu")
            if isinstance(index, DevicePriorities):
                if name not in self._leaves:
                    pinned = self._accelerator.memory.empty((capacity + 1,), torch.float64)
                    self._leaves[name] = values.to(self._store.device), pinned
                there, values = self._leaves[name]
                self._accelerator.launch(partial(index.copy_to, there))
            else:
                index.core.leaves(values[:-1], True)
                values[-1] = index.core.highest
            core = index.core
            found.append(_Leaves(name, (core.alpha, core.beta, core.eps, core.within_buffer), values))
        return found

    def _bring_leaves(self, name: str) -> None:
        there, pinned = self._leaves[name]
        pinned.copy_(there, non_blocking=True)

    def _copy_all(self) -> None:
        """Copy all rows: they were replaced, or copying has failed. The rows are locked for a piece at a time.

        Those that are written meanwhile are left out, and come with the next blocks.
        """
        store, rows = self._store, self._store.rows
        with store.paused():
            state, since, began = store.state(), store.core.next_ticket, (rows.replaced, rows.emptied)
            self._begin()
        written, self._written = self._written, 0

        def check() -> None:
            if (rows.replaced, rows.emptied) != began:
                raise _ReplacedAgain

        def take(some: torch.Tensor) -> torch.Tensor:
            with self._accelerator.on(self._order), rows:
                check()
                piece = some.clone()
                staged = self._accelerator.mark(self._order)
            with self._accelerator.on(self._down):
                self._accelerator.wait(self._down, staged)
                return piece.to("cpu")

        def leave_out() -> None:
            with rows:
                check()
                changed = torch.cat((store.changes(since).rows, self._being_written()))
            for numbers in (state.numbers, state.writes):
                if numbers is not None:
                    numbers[changed] = 0

        try:
            copy_rows(store, self._target, store.rows_in_use(state.lanes), state, take, leave_out)
        except _ReplacedAgain:
            self._replaced = -1  # the next look begins again
            return
        self._written, self._prioritized = written, -math.inf

    def _being_written(self) -> torch.Tensor:
        """Rows that graphs are just writing, some perhaps twice. Waits for the device, if there may be some."""
        rows, capacity = self._store.rows, self._store.capacity
        found = torch.zeros(0, dtype=torch.int64, device="cpu")
        if rows.captured:
            at = self._store.bare.next_position(0)
            ahead = min(max(int(rows.begun) - at, 0), capacity)
            found = (at + torch.arange(ahead, device="cpu")) % capacity
        if rows.captured_edits:
            found = torch.cat((found, (rows.edited != rows.told)[:-1].nonzero().squeeze(1).cpu()))
        return found

    # ---- writing to the folder ---------------------------------------------------------------------------------------

    def _write(self, block: _Block) -> bool:
        """Write a block to the folder. False: a graph was replacing some of its rows, which are to be read again, with all that follow."""
        block.copied.synchronize()
        target, a = self._target, len(block.lanes)
        if block.emptied is not None:
            target.empty(keep_write_count=block.emptied)
        good, behind = torch.ones(len(block.rows), dtype=torch.bool, device="cpu"), block.positions
        if block.moved is not None:
            (cursor,), edits = block.moved[0].tolist(), block.moved[1]
            behind = behind.clamp(min=cursor) if target.lanes == 1 else behind
            good = (edits[:, 0] == edits[:, 1]) & ~self._within(block.rows, block.positions, behind - block.positions)
        n = a if bool(good[:a].all()) else int(good[:a].long().argmin())
        if n:
            plan = WritePlan(lane=0) if target.lanes == 1 else WritePlan(lane=block.lanes[:n])
            target.write(plan, [column[:n] for column in block.columns], n)
        at = block.before + torch.bincount(block.lanes[:n], minlength=target.lanes)
        self._lost += int(block.lost[:n].sum())
        self._written = int(at.sum())
        self._write_edits(block, good[a:])
        left = behind - at
        if len(block.holes):
            gone = block.holes[~self._within(block.holes, at, left)]
            tickets = target.tickets_of(gone)
            gone, writes = gone[tickets >= 0], target.writes_of(gone, tickets)[tickets >= 0]
            target.core.remove(gone.data_ptr(), len(gone), writes.data_ptr())
        if n < a:
            self._at, self._prioritized = at, -math.inf
            return False
        rows = torch.arange(target.capacity, device="cpu")
        for leaves in block.leaves:
            self._write_leaves(leaves, self._within(rows, at, left))
        if block.whole:
            self._whole_at = block.looked
        return True

    def _write_edits(self, block: _Block, good: torch.Tensor) -> None:
        """Replace rows of the folder that were replaced on the device; those that a graph was just replacing come once more."""
        target, rows = self._target, block.rows[len(block.lanes) :]
        placed = block.placed | (target.tickets_of(rows) < 0)
        for which, is_new in ((good & placed, True), (good & ~placed, False)):
            chosen, which = rows[which], which.nonzero().squeeze(1) + len(block.lanes)
            columns = [column[which] for column in block.columns]
            if is_new and len(chosen):
                target.write(WritePlan(rows=chosen), columns, len(chosen))
            elif len(chosen):
                target.edit(chosen, range(len(columns)), columns)

    def _drop(self, block: _Block) -> None:
        """A block that is not written: what it has comes again."""
        self._edited = torch.cat((block.rows[len(block.lanes) :], self._edited))
        self._placed = torch.cat((block.placed, self._placed))
        self._emptied -= block.emptied is not None

    def _write_leaves(self, leaves: _Leaves, behind: torch.Tensor) -> None:
        """Set the priorities of the folder. ``behind``: of all rows, whether the folder does not hold them as they were yet."""
        (alpha, beta, *_), capacity = leaves.parameters, self._target.capacity

        def make(block: memory.Block) -> None:
            native.format_priorities(block.address, block.nbytes, capacity, *leaves.parameters)

        nbytes = native.priority_bytes(capacity, leaves.parameters[3])
        core = self._target.indexes.lasting(leaves.name, _KIND, nbytes, make)[0].core
        here = torch.empty(capacity, dtype=torch.float64, device="cpu")
        core.leaves(here, True)
        wanted, highest = torch.where(behind, here, leaves.values[:-1]), float(leaves.values[-1])
        if not torch.equal(wanted, here) or (core.alpha, core.beta, core.highest) != (alpha, beta, highest):
            core.beta, core.highest = beta, highest
            core.restore(wanted, alpha)


class _ReplacedAgain(Exception):
    """All rows were replaced or forgotten while they were copied."""


def copy_rows(
    source: Store,
    target: Store,
    n: int,
    state: StoreState,
    take: Callable[[torch.Tensor], torch.Tensor] = lambda some: some,
    then: Callable[[], object] = lambda: None,
) -> None:
    """Replace all rows of a store by those of another one of the same schema, of which the first ``n`` are in use.

    Args:
        state: of the source, which is paused, or which no other process or thread writes to.
        take: copies a piece of a field of the source. then: called when all are copied; it may change the state's tensors.
    """
    step = max(1, BLOCK_BYTES // max(1, source.schema.row_bytes))

    def fill(rows: RowsTarget) -> None:
        for number, tensor in enumerate(source.tensors):
            for first in range(0, n, step):
                memory.write_rows(rows, number, first, take(tensor[first : min(first + step, n)]).to(target.device))
        then()

    target.replace(state, fill)


def _run(mirror: weakref.ref[Mirror], stop: threading.Event) -> None:
    """Copy until this is to stop, and then once more."""
    stopping = False
    while not stopping:
        stopping = stop.wait(LOOK_S)
        held = mirror()
        if held is None:
            return
        held.copy()
        del held


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
