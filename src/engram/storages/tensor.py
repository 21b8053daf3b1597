"""Rows as columns of tensors, in RAM or on an accelerator."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch import Tensor

from engram._support.devices import existing_device
from engram._support.nested import NoRows, is_number
from engram._support.state import check_keys, copied, typed
from engram._support.words import count, raise_as
from engram.errors import EngramError, RowError
from engram.format.schema import Schema
from engram.saved.part_reader import PartReader
from engram.saved.parts import check_blocks
from engram.saved.rows import SavedRowsSource, read_rows_state
from engram.saved.snapshot import StoragePreparation
from engram.storages import _columns, _types, tensor_state
from engram.storages._base import Count, Rows, Storage, WrongCount, check_plan
from engram.storages._geometry import OF_DATA, Geometry, LaterArguments, positions_of, take_later
from engram.storages._home import Home, share_in_place
from engram.storages._ragged_structure import structure_in
from engram.storages._structure import Structure, device_of, leading_size
from engram.storages.ragged import RaggedLayout
from engram.storages.tensor_state import RowsLoad, RowsState
from engram.store import opening, ragged
from engram.store.device.store import DeviceStore
from engram.store.priorities import Priorities, PriorityConfig, PriorityIndex, priorities_of
from engram.store.store import NativeWrite, Store, T
from engram.types import Extent, Form, RowsSource, StorageLoad, Traits, Write, WritePlan


class _Unwritten:
    """``memory`` of a storage until it has a store, which then lies before this in the instance."""

    def __get__(self, storage: TensorStorage | None, _: type[object]) -> Store | None:
        return None if storage is None else storage._look()


class TensorStorage(Storage):
    """Around data that exists already: full from the start, without a copy where its memory allows.

    Args:
        storage: a tensor, TensorDict, tensorclass, or a nested dict or tuple of tensors or arrays, ``[C, ...]``. Its
            memory becomes the storage's: writes to the buffer change it. Leaves that are not contiguous are copied. Do not let
            torch move it afterwards, as ``share_memory_()`` and queues do: share it first.
        max_size: ``C``, or None.
        device: where the rows are to be; ``"auto"`` or None: where the data is.
        ndim: leading dimensions that index rows; of ``[T, *columns, ...]`` each ``[t, *column]`` is a row.
        lanes: rings that the rows are divided into.

    Raises:
        ValueError: ``max_size`` is not the data's, or both are None; ``lanes`` does not divide it.
        TypeError: a leaf is no tensor or array.

    Data that processes share already makes a storage that they share: around ``td.memmap_(folder)`` the folder becomes a store,
    which :meth:`ReplayBuffer.open` goes on with; around ``td.share_memory_()`` the store is in shared memory beside it. See
    docs/guarantees.md for data with which that cannot be: it works within one process, and ``share()`` says why. Data in private
    memory is copied by ``share()``; the tensors given here do not show later writes.

    >>> import torch
    >>> from engram import ReplayBuffer, TensorStorage
    >>> rb = ReplayBuffer(storage=TensorStorage({"a": torch.arange(4)}))
    >>> len(rb), rb[3]["a"]
    (4, tensor(3))
    """

    traits = Traits(has_fields=True)

    #: The store; None before the first write.
    memory: Store | None = _Unwritten()  # type: ignore[assignment]

    #: Where processes that have copies of this storage find its store; None: it is private.
    _home: Home | None = None
    #: What messages about rows that it does not take end with.
    remedy = ""
    #: Whether a thread is just opening a store that another process has created.
    _looking = False
    #: Why processes cannot share rows that lie in memory which they share; empty: they can.
    _unshared = ""
    #: TorchRL's collectors read it: processes agree on who makes the store at the first write, so no fake row is needed.
    shared_init = True

    def __init__(
        self,
        storage: object,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        lanes: int = 1,
        **later: Unpack[LaterArguments],
    ) -> None:
        take_later(self, later)
        if storage is None:
            raise ValueError("TensorStorage: expected data, got None. LazyTensorStorage(max_size) allocates its own.")
        rows, columns = (storage, ()) if ndim == 1 else _columns.rows_of_stored(storage, ndim, "TensorStorage")
        slots, capacity = (leading_size(data, "TensorStorage") for data in (storage, rows))
        if max_size is not None and max_size not in (slots, capacity):
            raise ValueError(f"TensorStorage: max_size: expected {slots}, the size of the data, got {max_size}.")
        self._configure(Geometry.checked("TensorStorage", capacity, lanes, ndim), device)
        if capacity % lanes:
            raise ValueError(f"TensorStorage: lanes: expected a divisor of the {capacity} rows, got {lanes}.")
        structure = Structure.of(rows, batched=True, call="TensorStorage")
        if self._device_argument in OF_DATA:
            self._device = device_of(rows)
        structure.on_host = self._device.type == "cpu"
        fields = structure.flatten(rows, capacity, "TensorStorage")
        schema = self._geometry.schema(structure, columns)
        if structure.on_host:
            store = Store.around(schema, [field.detach() for field in fields])
        else:
            store = DeviceStore.on(schema, self._device, [field.detach() for field in fields])
            store.fill()
        self._adopt(store, structure)
        if structure.on_host:
            self._share_in_place()

    # ---- set-up --------------------------------------------------------------------------------------------------------

    def _configure(self, geometry: Geometry, device: torch.device | str | None) -> None:
        super().__init__()
        where = f"{type(self).__name__}: device"
        self._device_argument = str(device)
        self._device = torch.device("cpu") if device in ("auto", "cpu", None) else existing_device(device, where)
        self._geometry, self.ragged = geometry, geometry.ragged
        self.ndim = geometry.ndim
        self._capacity = geometry.capacity
        self.structure: Structure | None = None  # how rows are put together; None before the first write

    def _adopt(self, store: Store, structure: Structure) -> None:
        if self.pending_key is not None or self.pending_limit is not None or store.schema.ragged:
            self._give_pending(store)
        structure.on_host = store.device.type == "cpu"
        self.structure = structure
        self._capacity = store.capacity
        self._device = store.device
        store.owners.add(self)
        self.memory = store  # last: other threads look at it first

    def _initialize(self, data: object, n: int | None, columns: tuple[int, ...], call: str) -> None:
        """Make the store for a first row (``n`` None), or a first batch of rows ``[n, ...]``. One around data has it."""

    def allocate_for(self, schema: Schema) -> None:
        """Take the memory for a schema that was checked, if there is none yet. Raises ``OSError``: no space.

        One around data has its memory, and does nothing here.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> other = LazyTensorStorage(100)
        >>> other.allocate_for(other.schema_here(rb.storage.state_dict()["schema"], "example"))
        >>> other.initialized, len(other), other.nbytes >= 800
        (True, 0, True)
        """

    # ---- sharing -------------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        return self._home is not None

    def _look(self) -> Store | None:
        """The store that another process has created since."""
        if self._looking or self._home is None or not self._home.holds_store:
            return None
        with self._lock:
            store: Store | None = self.__dict__.get("memory")
            if store is None and not self._looking:
                self._looking = True
                try:
                    store = self._home.find()
                    if store is not None:
                        self._adopt(store, structure_in(store.schema, self._geometry.dtypes, self.ragged))
                finally:
                    self._looking = False
            return store

    def share(self, maker: str | None = None) -> None:
        if self._home is not None:
            return
        if self._device.type != "cpu":
            raise RuntimeError(f"share: expected a storage on the CPU, got one on {self._device}.")
        if self._unshared:
            raise RuntimeError(f"share: {self._unshared}")
        if self._device_argument == "auto" and self.memory is None:
            raise RuntimeError(
                'share: expected a storage on the CPU, got device="auto" before the first write, which decides. Use device="cpu".'
            )
        self._forget_fake_rows()
        with self._lock:
            private: Store | None = self.memory
            self._home = home = Home.in_shared_memory(self, maker)
            if private is not None:
                try:
                    self._adopt(home.move(private), self.written())
                except BaseException:
                    self._home = None
                    raise
        self._notify_moved()

    def check_inherited(self) -> None:
        if self._unshared and self._home is None:
            raise RuntimeError(f"write: this process was forked from the one that made the buffer; {self._unshared}")
        super().check_inherited()

    def _share_in_place(self) -> None:
        """Make a store that processes share of rows in memory that they share already, or note why that cannot be."""
        try:
            shared = share_in_place(self.store, self)
        except (EngramError, OSError, RuntimeError, ValueError) as error:
            self._unshared = f"the rows lie in memory that processes share, but cannot be a store there: {error}"
            return
        if shared is not None:
            self._home, store = shared
            self._adopt(store, self.written())

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store.

        Raises:
            RuntimeError: nothing was ever written, so none was allocated.
        """
        if self.memory is None:
            raise RuntimeError(
                f"{type(self).__name__}: nothing was ever written: its memory is allocated by the first add or extend."
            )
        return self.memory

    def written(self) -> Structure:
        """How rows are put together. Raises ``RuntimeError``: nothing was ever written.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.zeros(3, 2), "next": {"reward": torch.zeros(3)}})
        >>> [field.key for field in rb.storage.written().fields]
        [('obs',), ('next', 'reward')]
        """
        self.store.bare.find_fields()
        assert self.structure is not None
        return self.structure

    @property
    def initialized(self) -> bool:
        return self.memory is not None

    @property
    def max_size(self) -> int:
        return self._capacity

    @property
    def requested_size(self) -> int:
        """The ``max_size`` it was made with; capacity differs where lanes or columns do not divide it."""
        return self._geometry.max_size

    @property
    def device(self) -> torch.device | None:
        """Where rows lie. It may be set until there are some; None, then or later, leaves them where they are written or lie.

        Setting it raises ``RuntimeError``: no such device on this machine, or rows lie on another one.

        >>> from engram import LazyTensorStorage
        >>> storage = LazyTensorStorage(10, device="auto")
        >>> storage.device = "cpu"
        """
        return self._device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        given = None if device is None else existing_device(device, f"{type(self).__name__}: device")
        with self._lock:
            if self.memory is None and self._home is None:
                self._device_argument, self._device = str(given), given or torch.device("cpu")
            elif given not in (None, self._device):
                raise RuntimeError(
                    f"{type(self).__name__}: device: expected {self._device}, where its rows are, got {given}. Make another storage."
                )

    @property
    def is_ragged(self) -> bool:
        return bool(self.ragged.fields if self.structure is None else self.structure.ragged)

    @property
    def lanes(self) -> int:
        return self._geometry.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        """Sizes of the row dimensions after the first; empty if ``ndim`` is 1."""
        return () if self.memory is None or self.ndim == 1 else self.memory.schema.columns

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self) // math.prod(self.columns), *self.columns])

    @property
    def write_count(self) -> int:
        return 0 if self.memory is None else int(self.memory.core.write_count) // math.prod(self.columns)

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def counters(self) -> dict[str, float]:
        return super().counters() if self.memory is None else self.memory.counters()

    def priorities(
        self, name: str, config: PriorityConfig, rows: int, device: torch.device | None = None
    ) -> tuple[Priorities, bool] | None:
        memory = self.memory
        if memory is not None and not memory.is_native:
            return priorities_of(memory, name, config, device)
        return None if memory is None else PriorityIndex.of_store(memory, name, config)

    def __len__(self) -> int:
        return 0 if self.memory is None else int(self.memory.core.size())

    def extent(self) -> Extent:
        if self.memory is None:
            lanes, length = self._geometry.lanes, self._capacity // self._geometry.lanes
            return Extent(self._capacity, (0,) * lanes, tuple(k * length for k in range(lanes)))
        return self.memory.extent()

    @property
    def _storage(self) -> Any:
        """All rows, as TorchRL's collectors look for them; None before the first write, and of ragged fields, which have no views."""
        if self.memory is None or self.written().ragged:
            return None
        return self._formed(self.store.views(), torch.Size((self._capacity,)))

    # ---- writing -------------------------------------------------------------------------------------------------------

    @property
    def placing(self) -> AbstractContextManager[object]:
        store = self.memory
        return self._lock if store is None or store.directory is None else store.placing()

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[Tensor], int]:
        given, dtypes = data, self._geometry.dtypes
        known = self.structure if self.memory is not None and self.ndim == 1 else None
        try:
            data, n, columns = _columns.rows_of_written(
                data, self, call, dtypes, batched=batched, count=count, known=known, ignored=ignored
            )
            if self.memory is None:
                with self._lock:
                    if self.memory is None:
                        self._initialize(data, n, columns, call)
            return self.written().flatten(data, n, call, ignored), n or 1
        except (KeyError, RuntimeError, TypeError) as error:
            _columns.check_even(given, call)
            is_wrong = isinstance(error, NoRows | WrongCount)
            if is_wrong or not self._forget_fake_rows(given, call, batched=batched, error=error):
                if self.remedy:
                    error.args = (f"{error.args[0]}{self.remedy}",)
                raise
        return self.prepare(given, call, batched=batched, ignored=ignored, count=count)

    def number(self, value: object, path: tuple[str, ...]) -> object:
        return _types.as_tensor(value, path, "add") if self.memory is None else self.written().number(value, path)

    def _forget_fake_rows(self, *row: object, batched: bool = False, error: Exception | None = None) -> bool:
        """Whether this was a storage whose rows say nothing of those to come, and is as before its first write now."""
        return False

    def add_row(self, lane: object, data: object, ignored: Iterable[str] = ()) -> tuple[int, int] | None:
        """One row to the end of a lane: ``(row, ticket number)``. The short path of ``add``; None: it takes the long one.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> rb.storage.add_row(0, torch.tensor(7)) is None  # before the first write
        True
        >>> _ = rb.extend(torch.arange(3))
        >>> row, ticket = rb.storage.add_row(0, torch.tensor(7))
        >>> row, int(rb[3])
        (3, 7)
        """
        if self._inherited:
            self.check_inherited()
        if self.memory is None or self.ndim > 1:
            return None
        return self.memory.append_row_of(self.structure.intake, data, lane)  # type: ignore[union-attr]

    def append_of(self, data: object, lane: object) -> Write | None:
        """A batch to the end of a lane, or to those of its rows. The short path of ``extend``; None: it takes the long one.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.append_of(torch.tensor([7, 8]), 0).rows.tolist()
        [3, 4]
        """
        if self._inherited:
            self.check_inherited()
        if self.memory is None or self.ndim > 1:
            return None
        return self.memory.append_of(self.structure.intake, data, lane)  # type: ignore[union-attr]

    def write_natively(self, write: NativeWrite[T]) -> T | None:
        """As :meth:`Store.write_natively`: the short path of writers that place rows in the call that writes them.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rows, first = rb.storage.write_natively(lambda core, intake: core.append_of(intake, torch.tensor([7, 8]), 0))
        >>> rows.tolist()
        [3, 4]
        """
        self.begin_change()
        return self.store.write_natively(self.written().intake, write)

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        self.begin_change()
        check_plan(plan, n, self._geometry.lanes)
        return self.memory.write(plan, prepared, n)  # type: ignore[union-attr] # prepared rows have one

    def edit(self, where: Rows, prepared: list[Tensor]) -> Write:
        self.begin_change()
        return self.store.edit(where.rows, range(len(prepared)), prepared)

    def prepare_at(self, where: Rows, data: object, call: str, *, ignored: Iterable[str] = ()) -> list[Tensor]:
        if is_number(data):  # of all fields
            form, lead = self.written(), () if where.single else where.shape or where.rows.shape
            values = [form.number(data, field.key).expand((*lead, *field.shape)) for field in form.fields]
            data = form.unflatten(values, lead)
        if where.shape is None:
            return super().prepare_at(where, data, call, ignored=ignored)  # type: ignore[no-any-return]
        rows = _columns.rows_of_selection(data, where.shape, call, self.written())
        return self.written().flatten(rows, len(where.rows), call, ignored)

    def edit_fields(self, where: Rows, entries: Mapping[tuple[str, ...], object], call: str) -> Write:
        """Replace some fields of live rows; everything is checked before anything is written.

        Raises:
            KeyError: no such field.
            RuntimeError: shape or dtype differ from the field's.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.arange(3), "reward": torch.zeros(3)})
        >>> _ = rb.storage.edit_fields(rb.storage.locate([0, 2]), {("reward",): torch.ones(2)}, "example")
        >>> rb["reward"].tolist()
        [1.0, 0.0, 1.0]
        """
        which, columns = self.written().columns(entries, where.shape or where.rows.shape, call=call)
        self.begin_change()
        return self.store.edit(where.rows, which, columns)

    def patch_fields(
        self, rows: Tensor, which: Sequence[int], columns: Sequence[Tensor], tickets: Tensor, *, unedited: bool = False
    ) -> tuple[Write, Tensor]:
        """As :meth:`Store.patch`, of checked columns: replace fields of the rows that still hold these writes, and of no others.

        Args:
            rows: int64 ``[n]``; -1 names none.
            which: numbers of the fields, in the order of the schema.
            columns: of each ``[n, *shape]``, contiguous, on the CPU.
            tickets: int64 ``[n]``, those that the rows were written with, as :meth:`writes_of` says them; ``unedited``: those that they
                must have now.

        Returns:
            What was written, and int64 ``[n]``: the number of the write of each row, -1 where it was left alone.

        Raises:
            RowError: a row is outside ``[-1, capacity)``. Nothing is written.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(3))
        >>> rows = torch.tensor([0, 2])
        >>> tickets = rb.storage.tickets_of(rows)
        >>> _ = rb.add(torch.tensor(5))  # overwrites row 0
        >>> write, numbers = rb.storage.patch_fields(rows, [0], [torch.tensor([7, 8])], tickets)
        >>> rb.storage[:].tolist(), (numbers >= 0).tolist()
        ([5, 1, 8], [False, True])
        """
        self.begin_change()
        return self.store.patch(rows, which, columns, tickets, unedited=unedited)

    def empty(self, *, keep_write_count: bool) -> None:
        if self.memory is not None:
            self.memory.empty(keep_write_count=keep_write_count)

    # ---- reading -------------------------------------------------------------------------------------------------------

    def read(self, rows: Tensor, expected: Tensor | None = None) -> tuple[list[Tensor], list[int]]:
        return self.store.read(rows, expected=expected)

    def pack(self, columns: Sequence[Tensor], where: Rows, extra: dict[str, Tensor] | None = None) -> Any:
        batch = torch.Size(()) if where.single else where.rows.shape if where.shape is None else where.shape
        if where.single or where.shape is not None:
            columns = [column.reshape((*batch, *column.shape[1:])) for column in columns]
        return self._formed(columns, batch, extra)

    def _formed(self, columns: Sequence[Tensor], batch: torch.Size, extra: dict[str, Tensor] | None = None) -> object:
        """Data in the user's form around columns ``[*batch, ...]``. Entries ``[n]`` join TensorDicts, not other rows."""
        structure = self.written()
        if extra is None or not structure.is_tensordict:
            return structure.unflatten(columns, batch, self._device)
        own = structure.root.batch
        entries = {k: v.reshape((*batch, *(1,) * len(own))).expand((*batch, *own)) for k, v in extra.items()}
        return structure.unflatten(columns, batch, self._device, entries)

    def patch(self, columns: list[Tensor], places: list[int], fresh: list[Tensor]) -> None:
        at = torch.tensor(places, device=self._device)
        for column, values in zip(columns, fresh, strict=False):  # a field may have been added between both reads
            column[at] = values

    def batch(self, columns: Sequence[Tensor], n: int | tuple[int, ...] | None, *layout: RaggedLayout | None) -> Any:
        shape, more = (n,) if isinstance(n, int) else n, (None, *layout) if layout else ()
        return self.structure.unflatten(columns, shape, self._device, *more)  # type: ignore[arg-type, union-attr]

    def grid(self, index: Any = ..., extra: dict[str, Tensor] | None = None) -> object:
        """``ndim > 1``: live views of all whole slots, or some, in the layout of ``extend``, ``[*columns, time]``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        >>> _ = rb.extend(torch.arange(6).reshape(2, 3))  # two columns, three steps
        >>> rb.storage.grid().tolist()
        [[0, 1, 2], [3, 4, 5]]
        """
        slots = len(self) // math.prod(self.columns)
        shape = (slots, *self.columns)
        columns = []
        for tensor in self.store.views():
            laid_out = tensor[: math.prod(shape)].reshape(*shape, *tensor.shape[1:])
            columns.append(laid_out.movedim(0, self.dim_extend)[index])
        batch = columns[0].shape[: columns[0].ndim - len(self.written().fields[0].shape)]
        return self._formed(columns, batch, extra)

    def view(self, where: Rows, extra: dict[str, Tensor] | None = None) -> object:
        """Live views of rows that were located by a slice: a writer at work shows through, nothing is checked.

        Of private memory, a view that torch moves to shared memory, by ``share_memory_()`` or in a queue of
        ``torch.multiprocessing``, becomes a copy, and so do all other views of that field.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> view = rb.storage.view(rb.storage.locate(slice(2)))
        >>> rb[0] = torch.tensor(7)
        >>> view.tolist()
        [7, 1]
        """
        if where.span is None:
            return self.grid(where.view, extra)
        return self._formed([tensor[slice(*where.span)] for tensor in self.store.views()], where.rows.shape, extra)

    def locate(self, index: Any) -> Rows:
        if self.ndim == 1:
            where = self.resolve(index)
            if where.span is None or self.written().ragged:
                return where
            return where._replace(view=slice(*where.span))
        slots = len(self) // math.prod(self.columns)
        with raise_as(RowError, "rb[index]", IndexError):
            rows = _columns.selected_rows(index, slots, self.columns, self.dim_extend)
        view = slice(None) if index is Ellipsis else index if isinstance(index, slice) else None
        return Rows(rows.reshape(-1), single=rows.ndim == 0, shape=rows.shape, view=view)

    def __getitem__(self, index: Any) -> Any:
        """Rows by number; zeros for a row that is allocated but unwritten (a buffer raises there)."""
        self.store  # noqa: B018 - raises where there is none
        if self.ndim == 1 and isinstance(index, int) and 0 <= index < self._capacity:
            row = torch.tensor([index], device="cpu")
            return self.pack(self.read(row)[0], Rows(row, single=True))
        where = self.resolve(index)
        return super().__getitem__(index) if where.span is None or self.written().ragged else self.view(where)

    def rows_at(self, coordinates: Tensor) -> Tensor:
        """``ndim > 1``: the rows of ``[..., ndim]`` coordinates, slot first; -1 for those outside.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        >>> _ = rb.extend(torch.arange(6).reshape(2, 3))  # two columns, three steps
        >>> rb.storage.rows_at(torch.tensor([[2, 1], [0, 7]])).tolist()  # step 2 of column 1; there is no column 7
        [5, -1]
        """
        if self.memory is None:
            return torch.full(coordinates.shape[:-1], -1)
        return _columns.rows_of_coordinates(coordinates, (self._capacity // math.prod(self.columns), *self.columns))

    def tickets_of(self, rows: Tensor) -> Tensor:
        return torch.full_like(rows, -1) if self.memory is None else self.memory.tickets_of(rows)

    def writes_of(self, rows: Tensor, tickets: Tensor) -> Tensor:
        return tickets if self.memory is None else self.memory.writes_of(rows, tickets)

    def positions_of(self, rows: Tensor) -> Tensor:
        return positions_of(rows, self.tickets_of(rows) >= 0, self.memory, math.prod(self.columns))

    def next_number(self) -> int:
        return 1 if self.memory is None else int(self.memory.core.next_ticket)

    def hold_nothing(self, rows: Tensor) -> Tensor:
        return self.store.hold_nothing(rows)

    def settled(self) -> int | None:
        if self.memory is None:
            return 0
        core = self.memory.core
        number = int(core.next_ticket)
        return number if core.in_flight == 0 else None

    def field(self, key: tuple[str, ...], rows: Tensor, expected: Tensor) -> tuple[Tensor, list[int]]:
        columns, moved = self.store.read(rows, expected=expected, which=(self.written().field_of(key),))
        return columns[0], moved

    def flatten(self) -> TensorStorage:
        """A storage with ``ndim`` 1 around the same rows, slot after slot.

        No copy: what is written to one is seen in the other.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        >>> _ = rb.extend(torch.arange(6).reshape(2, 3))  # two columns, three steps
        >>> flat = rb.storage.flatten()
        >>> flat.ndim, flat[:].tolist()
        (1, [0, 3, 1, 4, 2, 5])
        """
        if self.ndim == 1:
            return self
        flat = TensorStorage.__new__(TensorStorage)
        flat._configure(Geometry(self._capacity, dtypes=self._geometry.dtypes), self._device)
        flat._home = None if self._home is None else self._home._replace(host=None)
        if self._home is None:
            flat._unshared = "expected the storage that was made of the data, got a flat one around it. Share that one."
        flat._adopt(self.store, self.written())
        return flat

    # ---- state ---------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> AbstractContextManager[object]:
        store = self.memory
        return self._lock if store is None else store.paused()

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, object]:
        """As for every storage: the entries of :meth:`state_without_rows`, and ``rows``: of each field, in the order of the
        schema, the rows up to the last live one, ``[n, *shape]``; zeros in rows that hold nothing.

        Of ragged fields ``rows`` has the lengths, int32 ``[n]``, in the entry of the field that leads, and nothing in those of
        fields with ``like=``. ``items`` has the items of each ragged field, in the order of the schema: ``[total, *shape]``, row
        after row. A load lays them out again, from the beginning of each lane's ring.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend({"obs": torch.arange(10)})
        >>> state = rb.storage.state_dict()
        >>> len(state["rows"]), state["write_count"]
        (1, 10)
        """
        with self.paused:
            state = self.state_without_rows(without=without)
            numbers = state["numbers"]
            rows = [] if state["schema"] is None else self._first_rows(len(numbers))
            if state.pop(tensor_state.HEADS, None) is not None and isinstance(self.store, ragged.RaggedStore):
                state["items"] = self.store.packed(rows, numbers != 0)
        tensor_state.fill_with_zeros(rows, numbers == 0)
        return {**state, "rows": rows}

    def _first_rows(self, n: int) -> list[Tensor]:
        return copied([field[:n] for field in self.store.tensors])  # type: ignore[no-any-return]

    def state_without_rows(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """All of :meth:`state_dict` but the rows. Exact while writers are :attr:`paused`.

        ``schema``, JSON text, None before the first write; ``lanes``, int64 ``[L, 4]``: the position of each lane's next step and
        its live rows; ``numbers``, int64 ``[n]``: the tickets of the rows up to the last live one, 0 for those that hold nothing;
        ``clock``: the next ticket; a load changes neither, as both are without the store's ``base``; ``write_count``; by name
        ``priorities``, the ``passes`` of a directory, and ``windows``: the length that tables of trajectories count; and ``usage``,
        int32 ``[n]``, where :meth:`~ReplayBuffer.count_usage` was called: how often rows were sampled; and ``heads``, int64
        ``[L, groups]``, where fields are ragged: the offset of each lane's next item.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> state = rb.storage.state_without_rows()
        >>> state["write_count"], len(state["numbers"]), "rows" in state
        (3, 3, False)
        """
        store = self.memory
        if store is None:
            return tensor_state.unwritten()
        return tensor_state.with_numbers(store, tensor_state.describe_store(store, store.indexes.refreshed(), without))

    def prepare_load(self, state_dict: dict[str, Any]) -> StorageLoad:
        where = type(self).__name__
        check_keys(state_dict, (*tensor_state.ENTRIES, "rows"), where, optional=(*tensor_state.OPTIONAL, "items"))
        head = {name: value for name, value in state_dict.items() if name not in ("rows", "items")}
        rows = tensor_state.KeptRows([], [])
        load = self.prepare_rows(head, rows)
        rows.take(state_dict, load.schema, where)
        return load

    def prepare_rows(self, state: dict[str, Any], source: RowsSource) -> RowsLoad:
        where = type(self).__name__
        check_keys(state, tensor_state.ENTRIES, where, optional=tensor_state.OPTIONAL)
        if typed(state, "schema", (str, type(None)), where) is None:
            if any(len(state.get(name, ())) for name in ("lanes", "numbers", "priorities", "passes", "windows")):
                raise ValueError(f"{where}: expected nothing else in the state of a storage that was never written.")
            return RowsLoad(self, source)
        store = self.memory
        schema = self._geometry.same(state["schema"], None if store is None else store.schema, f"{where}: schema")
        return RowsLoad.checked(self, source, schema, RowsState.checked(state, schema, store, where), where)

    _loads = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage", "OwnStorage")

    @property
    def form(self) -> Form:
        return super().form._replace(takes_rows=True)

    def schema_here(self, text: str | None, where: str) -> Schema:
        return self._geometry.converted(text, None if self.memory is None else self.memory.schema, where)

    def priorities_in_use(self, name: str) -> dict[str, Any] | None:
        store = self.memory
        index: Priorities | None = None if store is None else store.indexes.refreshed().get((name, PriorityIndex.kind))
        return None if store is None or index is None else index.state(store.rows_in_use(store.lane_states()))

    def prepare_snapshot(self, *, without: Collection[tuple[str, str]] = (), whole: bool = True) -> StoragePreparation:
        return tensor_state.SnapshotPreparation(self, without, whole=whole)

    def lineage(self) -> object:
        return None if self.memory is None else (weakref.ref(self.memory), self.memory.replaced)

    def prepare_part(self, reader: PartReader, *, close_open: bool = False, without: Sequence[str] = ()) -> StorageLoad:
        self._check_kind(reader)
        reader.behind = self.memory is not None and self.memory.larger
        state = read_rows_state(reader, close_open=close_open, without=without)
        load = self.prepare_rows(state, SavedRowsSource(reader))
        if len(self):
            check_blocks(reader)
        return load

    # ---- copies and text -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        if self.memory is not None:
            state["memory"] = self.memory.detached()
            structure = self.written()
            if self.memory.directory is not None and structure.is_described and not structure.names:
                del state["structure"]  # the folder says it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("memory", None)
        super().__setstate__(state)
        if saved is not None:
            store = opening.reattach(saved)
            if "structure" not in state:
                self.structure = structure_in(store.schema, self._geometry.dtypes, self.ragged)
            elif self.structure is not None and len(self.structure.fields) < len(store.schema.fields):
                self.structure = self.structure.grown(store.schema)  # a field was added since
            store.owners.add(self)
            self.memory = store

    def close(self) -> None:
        store: Store | None = vars(self).get("memory")  # not one that another process has made
        super().close()
        if store is not None:
            store.release(self)

    def _after_close(self) -> dict[str, object]:
        store: Store | None = vars(self).get("memory")
        return {} if store is None or set(store.owners) - {self} else {"store": store}

    def __repr__(self) -> str:
        geometry = self._geometry
        lanes = f", lanes={geometry.lanes}" if geometry.lanes > 1 else ""
        asked = f", max_size={geometry.max_size:,} asked" if geometry.max_size != self._capacity else ""
        fields = "not allocated yet" if self.structure is None else count(len(self.structure.fields), "field")
        return f"{type(self).__name__}(size={len(self):,}/{self._capacity:,}{lanes}{asked}, {fields}, {self._device})"
