"""A store: fields, tickets and lane cursors in one memory, private or in a directory.

The rows are plain tensors. The native core, which sees the same memory by address, decides which thread or process may read and
write them when. A store is checked once, when it is created or opened; after that a write or a read is one native call.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram._support import fork
from engram._support import native as _native
from engram.errors import ForkedHandle, RowError, StoreInUse
from engram.format import files, layout
from engram.format.schema import Schema
from engram.store import memory
from engram.store.blocks import Key
from engram.store.indexes import Host, Indexes
from engram.store.lifetime import Attachment, erase, exclusive, forget, opened, others_have_open, remove_store
from engram.store.rings import NO_RINGS, RaggedMemory, private_rings
from engram.types import Changes, Extent, RowsTarget, Write, WritePlan

#: Items of ragged fields, as the core takes them.
Sources = tuple[tuple[int, int, int, tuple[int, ...]], ...]
T = TypeVar("T")
#: Writes with the core, and the intake that takes the data apart. None: it could not.
NativeWrite = Callable[[_native.Store, _native.Intake], T | None]

#: What a store counts of its rows, for ``stats()``.
COUNTERS = ("void_rows", "lapped_rows", "redraws", "priority_updates_dropped", "field_updates", "field_updates_dropped")
#: Ticket states of a row that holds nothing and that no writer is writing.
_UNUSED, _VOID = 0, 3


#: What an error says that came while all rows were being replaced: the old ones are gone.
_EMPTY_NOW = "The storage is empty now: the rows before had made way, and not all new ones could be written. Load again, or write."


class Repair(NamedTuple):
    """What was recovered when a store was opened that had not been closed."""

    #: Writes that were under way.
    claims: int = 0
    #: Rows left half written; they are skipped from now on.
    voided: int = 0
    #: Rows that were reserved but never begun.
    gaps: int = 0

    def __str__(self) -> str:
        if not any(self):
            return "no write was unfinished"
        return f"{self.claims} unfinished writes, {self.voided} half-written rows and {self.gaps} rows that were never begun set aside"


class StoreState(NamedTuple):
    """What a store says of its rows at one moment, beside what they hold. Copies."""

    #: int64 ``[L, 4]``: the position of each lane's next step, counted from the last ``empty``; its live rows; 0; 0.
    lanes: Tensor
    #: int64 ``[capacity]``: ticket numbers in ``[1, clock)``; 0 for rows that hold nothing.
    numbers: Tensor
    #: The next ticket number.
    clock: int
    #: Rows written since the last ``empty``.
    write_count: int
    #: int64 ``[capacity]``: the numbers of the writes that rows hold, which edits leave as they are; None: such as no write had.
    writes: Tensor | None = None


class Saved(NamedTuple):
    """A store on its way through a copy or a pipe."""

    #: None for a directory.
    schema: Schema | None
    directory: Path | None
    #: Control block, tickets and fields, copied; None for a directory.
    parts: list[memory.Copied] | None
    #: Memory of the indexes of a private store, copied.
    indexes: dict[tuple[str, str], memory.Copied]
    #: The parts of the :class:`RaggedMemory` of a private store, copied.
    rings: Sequence[memory.Copied] = ()
    #: Whether the directory is only read.
    readonly: bool = False


class _Refusing:
    """In place of a core that must not be used any more."""

    def __init__(self, error: Callable[[], RuntimeError]) -> None:
        vars(self)["_error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._error()


class Store:
    """Rows on the CPU, read and written by the native core.

    Make one with :meth:`private` or :meth:`around`; :mod:`engram.store.opening` creates and opens those in folders.
    """

    device = torch.device("cpu")
    #: Whether the rows are more than fits into memory.
    larger = False
    #: Whether the core moves all fields, and can make tensors.
    is_native = True
    #: Whether every write is refused; whether what drawn rows hold is read by calls of its own.
    readonly, reads_apart = False, False
    #: Its name, once it was asked for.
    origin = ""
    #: Whether the rows of a lane are in the order of writing, where no writer places them otherwise.
    in_order = True
    #: Where the rows lie; None: in private memory.
    folder: Path | None = None

    def __init__(
        self,
        schema: Schema,
        tensors: Sequence[Tensor],
        control: memory.Block,
        tickets: memory.Block,
        attachment: Attachment | None = None,
        *,
        abandoned: bool = False,
        rings: RaggedMemory = NO_RINGS,
    ) -> None:
        self.schema = schema
        #: Rows; rings that they are divided into; rows of each.
        self.capacity, self.lanes, self.lane_length = schema.capacity, schema.lanes, schema.capacity // schema.lanes
        self.tensors = tuple(tensors)
        #: The memory of ragged fields.
        self.rings = rings
        #: ``[lanes · items, *item shape]`` of each ragged field, by its number.
        self.items = rings.values
        #: This process's place among those that have the store open; None for private memory.
        self.attachment = attachment
        #: The folder that other processes write to, too; None for private memory, and for one that is only read.
        self.directory = None if attachment is None else attachment.directory
        self.folder = self.folder or self.directory
        #: What opening recovered; None if the store was closed in order.
        self.repair: Repair | None = None
        self._control = control
        self._tickets = tickets
        self._which = tuple(range(len(schema.fields)))
        self.layout = _native.Layout(memory.dlpack_specs(schema.fields))
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._views: list[Tensor] = []
        self._viewing = fork.lock()
        #: Whether :meth:`close` was called.
        self.closed = False
        #: Storages around it: within a process several may be.
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The clock of the state that last replaced all rows, and by how much their tickets are larger here.
        self.replaced: tuple[int, int] | None = None
        #: Held while a field is added to private memory.
        self.adding = fork.rlock()
        self._placing = fork.rlock()
        self._pausing = fork.rlock()
        fork.registered(self, uses_others=True)  # recovery tells the indexes
        #: The core; :attr:`bare` is the same, also where it has yet to hear of what was written.
        blocks = control.address, control.nbytes, tickets.address, tickets.nbytes
        data, row_bytes, strides = map(tuple, memory.placed(self.tensors if self.is_native else ()))
        self.core = self.bare = _native.Store(
            *blocks, data, row_bytes, strides, readonly=self.readonly, abandoned=abandoned
        )
        rings.connect(self.core, schema, alone=attachment is None and not self.readonly)
        if schema.added and self.is_native:
            for number in range(schema.first_fields, len(schema.fields)):
                self.core.set_fill(number, schema.fill(number) or b"")
        #: What samplers need besides the rows, by name and kind. Every write keeps them up to date.
        self.indexes = Indexes(Host(self.core, control.tensor, tickets.tensor, self.directory), schema.capacity)

    @classmethod
    def private(cls, schema: Schema) -> Store:
        """A store in private memory. Pages are taken when rows are first written."""
        control, tickets = memory.new_control_memory(schema)
        columns = [memory.private_field(field, schema.capacity) for field in schema.fields]
        return cls(schema, columns, control, tickets, rings=private_rings(schema))

    @classmethod
    def around(cls, schema: Schema, tensors: Sequence[Tensor]) -> Store:
        """A store around existing contiguous CPU tensors, all of whose rows are live. Raises ``ValueError``: a field is ragged."""
        memory.refuse_ragged(schema, "rows that exist already", "Write them to a new storage")
        control, tickets = memory.new_control_memory(schema)
        store = cls(schema, tensors, control, tickets)
        store.core.fill()
        return store

    # ---- its lifetime ------------------------------------------------------------------------------------------------

    @property
    def participant(self) -> int:
        """Which one this process is of those that have the store open, from 1 on; 0: it was the only one when it opened it."""
        return 0 if self.attachment is None else self.attachment.participant

    @property
    def has_files(self) -> bool:
        """Whether the rows of a store in a folder lie there, and not in memory that a program shared before."""
        return self.attachment is None or self.attachment.has_files

    def join(self, *, beside: bool) -> None:
        """From now on other processes share the store; ``beside``: some do. Raises ``StoreInUse``: too many have it open."""
        assert self.attachment is not None  # only those in a folder are shared
        self.attachment.join(self.core, self.indexes.attach_new, beside=beside)

    def close(self) -> None:
        """Release it, with the storages around it. The last process marks a directory store as closed in order. Repeatable.

        The last process removes a temporary folder. Tensors that were handed out stay valid, and so does what is :meth:`held`;
        every other call that reads or writes rows or indexes raises ``RuntimeError``.
        """
        for owner in list(self.owners):
            owner.close()  # the last one comes back here
        attached = self.attachment is not None and self.attachment.is_open
        if self.closed and not attached:
            return
        where = "" if self.directory is None else f" in {str(self.directory)!r}"
        why = f"the store{where} was closed. Use ReplayBuffer.open to go on with one in a folder."
        refusing: Any = _Refusing(lambda: RuntimeError(why))
        self.core = self.bare = refusing
        self.indexes.close(refusing)
        self.closed = True
        if self.attachment is not None:
            self.attachment.end(self)

    def remove(self) -> bool:
        """Close a directory store and remove its files. False: they are gone already, or another process has it open.

        Raises:
            StoreInUse: it was closed before, and this process has opened it again since.
        """
        if self.directory is None:
            return False
        folder = self.directory / layout.FOLDER
        was_there = folder.exists()
        self.close()  # which removes a temporary one
        if not folder.exists():
            return was_there
        with exclusive(self.directory):
            if others_have_open(self.directory):
                return False
            remove_store(self.directory)
        with contextlib.suppress(OSError):
            self.directory.rmdir()
        return True

    def discard(self, owner: object) -> bool:
        """Remove the store for its only one of the :attr:`owners`, which goes on without. False: there are others, in this or
        another process.
        """
        if any(other is not owner for other in self.owners):
            return False
        if self.attachment is not None and not self.closed:
            with exclusive(self.attachment.directory):
                if self.attachment.others():
                    return False
                self.owners.discard(owner)
                self.close()
                erase(self.attachment.directory, self.schema)
        return True

    def release(self, owner: object) -> None:
        """One of the :attr:`owners` no longer needs it; the last one closes it."""
        self.owners.discard(owner)
        if not self.owners:
            self.close()

    def held(self) -> Store:
        """The same store for a save in the background, which reads its rows to the end although it is closed meanwhile."""
        held = object.__new__(type(self))
        vars(held).update(vars(self))
        return held

    def detached(self) -> Saved:
        """What a copy of this object needs: where a directory store is, or the bytes of a private one."""
        if self.directory is not None:
            return Saved(None, self.directory, None, {})
        before = self._ticket_words().clone()
        fields = [tensor.clone() for tensor in self.tensors]
        rings = [memory.Copied(part.clone()) for part in self.rings.parts]
        tickets = self._tickets.tensor.clone()
        # A row that was written meanwhile may be torn: its copy is void.
        words = tickets[: 8 * self.capacity].view(torch.int64)
        words.copy_(torch.where(before == words, words, words | _VOID))
        indexes = {key: memory.Copied(index.block.tensor.clone()) for key, index in self.indexes.items()}
        parts = [memory.Copied(part) for part in (self._control.tensor.clone(), tickets, *fields)]
        return Saved(self.schema, None, parts, indexes, rings)

    def take_over(self, control: Tensor, tickets: Tensor) -> None:
        """Control memory of a copied store, whose rows are here already. Writers of the other store are none of this one's."""
        self._control.tensor.copy_(control)
        self._tickets.tensor.copy_(tickets)
        self.core.recover()

    # ---- forks -------------------------------------------------------------------------------------------------------

    def before_fork(self) -> files.Descriptor | None:
        """A lock that parent and child share until the child is a participant of its own."""
        if self.directory is None or self.closed:
            return None
        try:
            fd = files.Descriptor.open(self.directory / layout.FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # it was removed
            return None
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    @staticmethod
    def forked(fd: files.Descriptor | None) -> None:
        """Release that lock in one of the two."""
        if fd is not None:
            fd.close()

    def after_fork(self) -> None:
        """In a child. Private memory: recover what threads of the parent were writing. A directory: join beside the parent."""
        if self.closed:
            return
        if self.attachment is None:
            self.core.forget_holds()
            if self.core.in_flight or self.core.paused:
                self.core.recover()
        elif self.attachment.is_open:
            try:
                self.attachment.rejoin(self, self.core, self.indexes.attach_new)
            except (OSError, StoreInUse) as error:
                forget(self)
                why = f"the store in {str(self.directory)!r} could not be shared with this forked process: {error}"
                refusing: Any = _Refusing(lambda: ForkedHandle(why))
                self.core = self.bare = self.indexes.core = refusing

    # ---- its state ---------------------------------------------------------------------------------------------------

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """No process writes inside, and no write is under way. Re-entrant within a thread. Writers wait, for a limited time.

        Reads continue, and priorities may change.

        Raises:
            WriterStalled: another thread or process has paused the store, or is writing, for 5 s.
        """
        return self.core.pausing((self._pausing,))

    def state(self) -> StoreState:
        """What the store says of its rows now. Exact while it is :meth:`paused`; else rows written meanwhile are left out.

        Cost: O(capacity), a word per row.
        """
        clock, write_count = self.core.next_ticket, self.core.write_count
        lanes, both = self.lane_states(), torch.zeros((2, self.capacity), dtype=torch.int64, device="cpu")
        for to, known in zip(both, self.numbers_before(clock, lanes), strict=True):
            to[: len(known)] = torch.from_numpy(known)
        return StoreState(lanes, both[0], clock, write_count, both[1])

    def rows_in_use(self, lanes: Tensor) -> int:
        """Of the ``lanes`` of a :class:`StoreState`: rows up to the last one that is inside an extent."""
        live = lanes[:, 1]
        ends = torch.arange(self.lanes, device="cpu") * self.lane_length + live
        return int(torch.where(live > 0, ends, 0).max())

    @property
    def base(self) -> int:
        """By how much tickets are larger than where the rows were saved that were loaded last: saved states are without it."""
        return 0 if self.replaced is None else self.replaced[1]

    def lane_states(self) -> Tensor:
        """The ``lanes`` of a :class:`StoreState`. Cost: O(lanes)."""
        lanes = torch.zeros((self.lanes, 4), dtype=torch.int64, device="cpu")
        self.core.read_lanes(lanes.data_ptr())
        return lanes

    def numbers_before(self, clock: int, lanes: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ticket numbers, int64, of the rows up to the last one in use when ``lanes`` were read; and the numbers of their writes.

        0 for a row that was written at ``clock`` or later, is not whole, or holds a step that its lane had already given up
        when ``lanes`` were read, because the writer that was to replace it died before it began.
        """
        numbers, writes = np.zeros((2, self.rows_in_use(lanes)), np.int64)
        self.core.read_numbers(clock, lanes.data_ptr(), numbers.ctypes.data, len(numbers), writes.ctypes.data)
        return numbers, writes

    def replace(self, state: StoreState, fill: Callable[[RowsTarget], object]) -> None:
        """Replace all rows: ``fill(target)`` may write to the :attr:`tensors` directly, while the store is empty and paused.

        Afterwards the rows are live as the state says, under new ticket numbers in the old order, so no earlier draw matches any
        more; the numbers of their writes, which handles name, are as the state says. Indexes give them default priorities.
        Whatever is raised inside, or the process's death, leaves an empty store, as a note of the exception says: also until it is
        no longer :meth:`paused`, where this is called inside of that.

        Args:
            state: as of a store with the same capacity and lanes.
            fill: writes the rows.

        Raises:
            ValueError: a state that no such store has. Nothing is changed.
            WriterStalled: as :meth:`paused`. Nothing is changed.
        """
        lanes, numbers = memory.as_rows(state.lanes, "replace"), memory.as_rows(state.numbers, "replace")
        n = self.core.next_ticket
        writes = numbers + (n - 1) * numbers.sign() if state.writes is None else memory.as_rows(state.writes, "replace")
        if lanes.shape != (self.lanes, 4) or numbers.shape != (self.capacity,) or writes.shape != numbers.shape:
            raise ValueError(
                f"replace: expected {self.lanes} lanes and {self.capacity} rows, got shapes {list(lanes.shape)} and "
                f"{list(numbers.shape)}."
            )
        said = numbers.data_ptr(), writes.data_ptr()
        _native.check_state(self.lane_length, state.clock, lanes.data_ptr(), self.lanes, *said)
        # No plan of a writer that looks first may outlive the rows it is about.
        with self.placing(), self.paused(), self.core.replacing():
            target = RowsTarget(self.tensors)
            if self.core.io_state()[2]:  # rows are not in memory, and are written to their files
                target.put = self._refill
            try:
                fill(target)
                self.refilled()
            except BaseException as error:
                error.add_note(_EMPTY_NOW)
                raise
            self.replaced = state.clock, self.core.replaced(state.clock, lanes.data_ptr(), *said)
            self.core.write_count = state.write_count
            self.indexes.rescan()

    def _refill(self, field: int, first: int, rows: Tensor) -> None:
        if not self.core.refill(field, first, len(rows), rows.data_ptr()):
            self.tensors[field][first : first + len(rows)] = rows

    @contextlib.contextmanager
    def traceless(self, which: Iterable[int], first: int, n: int) -> Iterator[None]:
        """For reads of rows of some fields: what a larger store then has in memory is what it had before."""
        before = [(field, self.core.in_memory(field, first, n)) for field in which]
        try:
            yield
        finally:
            for field, pages in before:
                self.core.forget(field, first, pages)

    def refilled(self) -> None:
        """Rows were replaced or removed, past this object."""

    # ---- writers that look first -------------------------------------------------------------------------------------

    def placing(self) -> contextlib.AbstractContextManager[None]:
        """Held from placing to writing by writers that look for rows, so that no two choose the same one. Re-entrant.

        Raises:
            WriterStalled: another process has held it for 5 s.
        """
        return self.core.placing((self._placing,), self.directory is not None)

    # ---- its memory --------------------------------------------------------------------------------------------------

    def views(self) -> list[Tensor]:
        """The :attr:`tensors` for users, over torch storages of their own.

        torch moves the memory of a tensor in place when it, or a view of it, gets ``share_memory_()`` or is put into a queue of
        ``torch.multiprocessing``. It then moves what it has here, never the memory that the core writes to, and the next call
        makes a view of that again.
        """
        self.core.find_fields()
        with self._viewing:
            if self.directory is not None and self.has_files and opened(self.directory) is self:
                if any(not view.is_contiguous() and view.is_shared() for view in self._views):  # torch has moved it
                    self._views = []
                self._views = self._views or memory.file_views(self.directory, self.schema)
            elif [view.data_ptr() for view in self._views] != self._addresses:  # also if the folder was removed
                self._views = [memory.alias(tensor) for tensor in self.tensors]
            return self._views

    def grow(self, schema: Schema, tensors: Sequence[Tensor]) -> None:
        """Take over a schema with more fields, whose rows lie in these tensors. No writer is at work, and no other thread does this.

        A thread that has begun to read, or has prepared what it will write, goes on with the fields of before.
        """
        first, every = len(self.tensors), (*self.tensors, *tensors)
        new, addresses = schema.fields[first:], [tensor.data_ptr() for tensor in every]
        fills = [schema.fill(number) or b"" for number in range(first, len(every))]
        fields = [*zip(addresses[first:], [it.row_bytes for it in new], fills, memory.dlpack_specs(new), strict=True)]
        with self._viewing:
            mine: dict[str, object] = {"schema": schema, "tensors": every, "_which": tuple(range(len(every)))}
            mine |= {"_addresses": addresses, "_views": []}
            theirs = [(vars(owner), {"structure": owner.structure.grown(schema)}) for owner in list(self.owners)]
            self.core.grow(self.layout, fields, [(vars(self), mine), *theirs])  # whole, whatever interrupts Python

    def map_column(self, schema: Schema, number: int) -> Tensor:
        """The rows of a field that another process has added. Raises ``OSError``, ``CorruptStore``."""
        assert self.directory is not None  # only those in a folder have some
        path = layout.column_path(self.directory, schema, number)
        return memory.column_field(path, schema.fields[number], schema.capacity)

    def _ticket_words(self) -> Tensor:
        """int64 ``[capacity]``: the tickets, without the laps that lie behind them. A view."""
        return self._tickets.tensor[: 8 * self.capacity].view(torch.int64)

    @property
    def control_memory(self) -> tuple[Tensor, Tensor]:
        """The memory of control block and tickets: native objects over it keep both."""
        return self._control.tensor, self._tickets.tensor

    @property
    def place(self) -> str:
        """Where the rows lie, as users read it."""
        return str(self.folder or ("RAM" if self.device.type == "cpu" else self.device))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, when all are written, and of the rings of ragged fields."""
        return self.schema.nbytes

    def counters(self) -> dict[str, float]:
        """What happened to rows so far, in all processes, for ``stats()``; and what the indexes say."""
        core = self.core
        numbers = core.void_rows, core.lapped_rows, core.redraws, 0, core.patches, core.patches_dropped
        counts: dict[str, float] = dict(zip(COUNTERS, numbers, strict=True))
        for key in tuple(self.indexes):  # another thread may add one
            self.indexes[key].count(counts)
        return counts

    def check_writable(self) -> None:
        """Raise ``ReadOnlyStore`` if every write is refused."""

    def extent(self) -> Extent:
        """What is live now. Cost: O(lanes); O(capacity) while rows left by a dead writer have not been overwritten."""
        filled, seam = self.core.extent()
        holes = torch.from_numpy(self.core.holes()) if self.core.void_rows else None
        return Extent(self.schema.capacity, filled, seam, holes)

    @staticmethod
    def zeroed(nbytes: int) -> Tensor:
        """Zeroed private memory for an index, as bytes; pages are taken when they are first touched."""
        return memory.private_block(nbytes).tensor

    def on_host(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], list[Tensor]]:
        """Fields where the core reads them, for an index: their numbers there, and CPU tensors ``[C, *row shape]``."""
        return tuple(numbers), [self.tensors[number] for number in numbers]

    # ---- writing ---------------------------------------------------------------------------------------------------

    def append_row_of(self, intake: _native.Intake | None, data: object, lane: object) -> tuple[int, int] | None:
        """Append one row of data as users hand it over: ``(row, ticket number)``. None: it must be prepared first."""
        return None if intake is None else self.core.append_row_of(intake, data, lane)

    def append_of(self, intake: _native.Intake | None, data: object, lane: object) -> Write | None:
        """Append rows of data as users hand it over, to lanes as they name them. None: they must be prepared or checked first."""
        placed = None if intake is None else self.core.append_of(intake, data, lane)
        return None if placed is None else Write(*placed)

    def write_natively(self, intake: _native.Intake | None, write: NativeWrite[T]) -> T | None:
        """What a native call makes of data as users hand it over. None: it must be prepared first."""
        return None if intake is None else write(self.core, intake)

    def write(self, plan: WritePlan, columns: Sequence[Tensor], n: int) -> Write:
        """Write what the plan keeps of ``n`` rows where it says. Columns: contiguous CPU tensors ``[n, *row shape]``, one per
        field.

        Of more rows than a lane is long the last ones survive.

        Raises:
            WriterStalled: another writer held a row for 5 s; the rows before it are written.
            RowError: a planned row is outside the store. Nothing is written.
        """
        return self._write(plan, n, self._which[: len(columns)], tuple(map(torch.Tensor.data_ptr, columns)))

    def _write(self, plan: WritePlan, n: int, which: tuple[int, ...], addresses: tuple[int, ...]) -> Write:
        if plan.rows is not None:
            return self._write_by_number(plan, n, which, addresses)
        rows = _native.empty_rows(n)
        if isinstance(plan.lane, int):
            first = self.core.append(plan.lane, n, addresses, rows.data_ptr())
        else:
            assert plan.lane is not None  # a WritePlan has rows or a lane
            lane = memory.as_rows(plan.lane, "extend")
            first = self.core.append_by_lane(lane.data_ptr(), n, addresses, rows.data_ptr())
        return Write(rows, first)

    def _write_by_number(
        self, plan: WritePlan, n: int, which: tuple[int, ...], addresses: tuple[int, ...], items: Sources = ()
    ) -> Write:
        at = plan.rows
        assert at is not None  # rows are named
        if plan.kept is None:
            rows, pick = _native.empty_rows(n).copy_(at), 0  # the plan's own tensor is not handed out
        else:
            rows, kept = memory.as_rows(at, "write"), memory.as_rows(plan.kept, "write")
            if rows.shape != kept.shape:
                raise RuntimeError(f"write: expected {len(kept)} rows, one for each that is kept, got {len(rows)}.")
            if not len(rows):  # no index need hear of it
                return Write(plan.reported(rows, n), 0)
            pick = kept.data_ptr()
        try:
            first = self.core.scatter(rows.data_ptr(), len(rows), which, addresses, True, pick, n, items)
        except IndexError as error:
            raise RowError(f"write: {error}.") from error
        return Write(plan.reported(rows, n), first)

    def edit(self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor]) -> Write:
        """Replace fields ``which`` of live rows. Cursors, extent and the numbers of writes stay; the rows get new tickets.

        Of a row named twice the last entry wins.

        Raises:
            RowError: a row is not live. Nothing is written.
        """
        rows = memory.as_rows(rows, "edit")
        addresses = tuple(map(torch.Tensor.data_ptr, columns))
        try:
            first = self.core.scatter(rows.data_ptr(), len(rows), tuple(which), addresses, False)
        except IndexError as error:
            raise RowError(f"edit: {error}. Only rows that were written can be edited.") from error
        return Write(rows, first)

    def patch(
        self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], expected: Tensor, *, unedited: bool = False
    ) -> tuple[Write, Tensor]:
        """Replace fields ``which`` of the rows that still hold the write of their ``expected`` number, and of no others.

        Looking and writing are one step; a row that is being written is left alone, one that is being edited is waited for. -1 names no
        row. Entries count in order. ``unedited``: what is expected are tickets, so rows that were edited since are left alone, too.

        Returns:
            What was written, and int64 ``[n]``: the number of the write of each entry's row, -1 where it was left alone.

        Raises:
            RowError: a row is outside ``[-1, capacity)``. Nothing is written.
            WriterStalled: a row has been edited by another writer for 5 s; the entries before it are written.
        """
        rows, expected = memory.as_rows(rows, "patch"), memory.as_rows(expected, "patch")
        numbers = torch.empty_like(rows)
        addresses = tuple(map(torch.Tensor.data_ptr, columns))
        try:
            first, kept = self.core.patch(
                rows.data_ptr(), len(rows), tuple(which), addresses, expected.data_ptr(), numbers.data_ptr(), unedited
            )
        except IndexError as error:
            raise RowError(f"patch: {error}.") from error
        return Write(rows if kept == len(rows) else rows[numbers >= 0], first), numbers

    def empty(self, *, keep_write_count: bool) -> None:
        """Forget all rows; the memory stays, lanes begin again at their first row, no earlier ticket matches any more."""
        self.core.empty(keep_write_count)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(
        self, rows: Tensor, *, expected: Tensor | None = None, which: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        """Copy rows out: ``(columns, moved)``.

        Args:
            rows: int64 ``[B]``, CPU.
            expected: int64 ``[B]`` ticket numbers that the rows must still have.
            which: fields to read; all by default.

        Returns:
            One tensor ``[B, *row shape]`` per field, and the positions whose row was not whole, changed during the copy or
            has another ticket: their content is unspecified.

        Raises:
            RowError: a row is outside ``[0, capacity)``.
        """
        rows = memory.as_rows(rows, "read")
        n = rows.numel()
        if expected is not None and expected.shape != rows.shape:
            raise RuntimeError(f"read: expected one ticket per row, {list(rows.shape)}, got {list(expected.shape)}.")
        wanted = 0
        if expected is not None:
            expected = memory.as_rows(expected, "read")
            wanted = expected.data_ptr()
        try:
            if which is None and self.is_native:
                return self.core.take(self.layout, rows.data_ptr(), n, wanted)
            if which is None:
                which, columns = self._which, self.layout.allocate(n)
            else:
                fields = [self.schema.fields[f] for f in which]
                columns = [torch.empty((n, *f.shape), dtype=memory.torch_dtype(f), device="cpu") for f in fields]
            addresses = tuple(map(torch.Tensor.data_ptr, columns))
            return columns, self.core.gather(rows.data_ptr(), n, tuple(which), addresses, wanted, 0)
        except IndexError as error:
            raise RowError(f"read: {error}.") from error

    def copy_rows(self, rows: Tensor, expected: Tensor, columns: Sequence[Tensor]) -> list[int]:
        """Copy rows into given memory: the positions whose row has another ticket, or had when it was copied.

        Args:
            rows: int64 ``[n]``, CPU. expected: int64 ``[n]`` ticket numbers.
            columns: uint8 ``[n, row bytes]``, CPU, one per field.
        """
        addresses = tuple(map(torch.Tensor.data_ptr, columns))
        return self.core.gather(rows.data_ptr(), len(rows), self._which, addresses, expected.data_ptr(), 0)

    def sample_uniform(self, key: Key, n: int, with_rows: bool, with_numbers: bool = False) -> list[Tensor]:
        """Draw ``n`` live rows uniformly, with replacement, and copy them: one native call.

        Args:
            key: 64 random bits, from which everything follows.
            n: rows.
            with_rows: return the rows drawn, int64 ``[n]``, behind the fields.
            with_numbers: return their ticket numbers, int64 ``[n]``, behind those.

        Returns:
            One tensor ``[n, *row shape]`` per field.

        Raises:
            NoSampleable: no row is live.
        """
        return self.core.draw_uniform(self.layout, key.address, n, with_rows, with_numbers, False)

    def sample_unlimited(self, key: Key, n: int, with_rows: bool, with_numbers: bool) -> list[Tensor] | None:
        """As :meth:`sample_uniform`; None: nothing was drawn, as the store has limits, which are to admit the rows first."""
        return self.core.draw_uniform(self.layout, key.address, n, with_rows, with_numbers, True)

    def count_sampled(self, rows: Tensor) -> None:
        """Count rows, int64, that were sampled other than by one native call, which does that itself. -1 is none."""
        self.core.count_sampled(memory.as_rows(rows, "sample"))

    def changes(self, since: int = 0) -> Changes:
        """Rows that were written or edited since a ticket, by any process.

        For samplers of your own that keep something per row: ``observe`` tells them of the writes of their process alone. Rows
        that were emptied, or left half written by a process that died, do not come: :meth:`tickets_of` says -1 of them.

        Args:
            since: a ticket number, such as :attr:`Changes.next` of the call before; 0: all live rows.

        Raises:
            WriterStalled: another writer has been about to write for 5 s.

        Cost: O(capacity), one word per row: about a millisecond per million rows. Releases the GIL.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(2))
        >>> seen = rb.storage.store.changes()
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.store.changes(seen.next).rows.tolist()
        [2, 0]
        """
        rows, numbers, following = self.core.changes(max(since, 0))
        return Changes(torch.from_numpy(rows), torch.from_numpy(numbers), following)

    def tickets_of(self, rows: Tensor) -> Tensor:
        """Ticket numbers of rows as they are now, int64 ``[B]``; -1 for a row that is not live or outside the store."""
        rows = memory.as_rows(rows, "tickets_of")
        numbers = torch.empty_like(rows)
        self.core.tickets_of(rows.data_ptr(), rows.numel(), numbers.data_ptr())
        return numbers

    def writes_of(self, rows: Tensor, tickets: Tensor) -> Tensor:
        """The numbers of the writes that rows held when they had these tickets, int64 ``[B]``: what handles name.

        Of a row that was written since it is the ticket, which names nothing any more. -1 stays.
        """
        rows, numbers = memory.as_rows(rows, "writes_of"), memory.as_rows(tickets, "writes_of").clone()
        self.core.name_writes(rows.data_ptr(), rows.numel(), numbers.data_ptr())
        return numbers

    def tickets_of_writes(self, rows: Tensor, writes: Tensor) -> Tensor:
        """The tickets, int64 ``[B]``, of rows that still hold these writes; -1 of others. Raises ``WriterStalled`` as :meth:`patch`."""
        rows, expected = memory.as_rows(rows, "patch"), memory.as_rows(writes, "patch")
        numbers = torch.empty_like(rows)
        self.core.tickets_of_writes(rows.data_ptr(), rows.numel(), expected.data_ptr(), numbers.data_ptr())
        return numbers

    def hold_nothing(self, rows: Tensor) -> Tensor:
        """Of rows inside the store: whether they are unused or void, and not just being written. bool ``[B]``"""
        states = self._ticket_words()[rows] & 3
        return (states == _UNUSED) | (states == _VOID)
