"""What all storages share: the type, and how an index of the user's becomes rows."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from engram._support import checks, closing, fork, words
from engram._support.field_paths import FieldPath
from engram._support.overrides import doing, meanwhile, overrides
from engram.errors import IncompatibleCheckpoint, RowError
from engram.format.schema import Schema
from engram.saved import checkpointers, checkpoints, part_reader, parts
from engram.storages.ragged import NO_RAGGED, RaggedOptions
from engram.storages.tensor_state import KeptRows, unwritten
from engram.store import keys, limits, open_rows, row_indexes, sampled
from engram.store.store import COUNTERS, Store
from engram.types import Declared, Form, ItemsSource, Listener, RowsSource, StorageLoad, Traits, Write, WritePlan


class Rows(NamedTuple):
    """An index of the user's, resolved against the live rows."""

    #: int64 ``[B]``.
    rows: torch.Tensor
    #: The user asked for one row, not for a batch of one.
    single: bool = False
    #: Rows ``[a, b)``, where the index is a contiguous slice without holes.
    span: tuple[int, int] | None = None
    #: ``ndim > 1``: the shape that the index selects from ``[*columns, time]``; ``rows`` is flat.
    shape: torch.Size | None = None
    #: The slice, where a live view shows these rows.
    view: slice | None = None


class Count(NamedTuple):
    """How many rows there must be."""

    rows: int
    why: str = "one per index or lane that was given"
    remedy: str = ""


class Port(sampled.SampledStorage, Protocol):
    """What every storage implements. Prepared rows, and columns that were read, are of the form that the storage likes."""

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[object, int]:
        """Check data and bring it into the form that :meth:`write` takes, with the number of rows. Writes nothing.

        The first call of a storage of tensors allocates its memory: the data says which fields there are.

        Args:
            data: one row, or a batch of rows.
            call: for messages.
            batched: whether it is a batch.
            ignored: names of entries that are not stored.
            count: rows there must be.

        Raises:
            KeyError: an entry is missing, or is no field. RuntimeError: another shape, dtype or number of rows. TypeError: no rows.

        >>> import torch
        >>> from engram import LazyTensorStorage
        >>> LazyTensorStorage(10).prepare({"obs": torch.arange(3)}, "extend", batched=True)
        ([tensor([0, 1, 2])], 3)
        """

    def write(self, plan: WritePlan, prepared: Any, n: int) -> Write:
        """Write prepared rows where a plan says.

        Args:
            plan: of ``n`` rows.
            prepared: as :meth:`prepare` returned it.

        Raises:
            RowError: a planned row or lane is outside the storage. RuntimeError: the plan is one of another number of rows.

        >>> import torch
        >>> from engram import LazyTensorStorage, WritePlan
        >>> storage = LazyTensorStorage(10)
        >>> prepared, n = storage.prepare(torch.arange(3), "extend", batched=True)
        >>> storage.write(WritePlan(lane=0), prepared, n).rows.tolist()
        [0, 1, 2]
        """

    def edit(self, where: Rows, prepared: Any) -> Write:
        """Replace live rows. Cursor and length stay.

        Args:
            where: as :meth:`Storage.locate` returns it.
            prepared: as :meth:`Storage.prepare_at` returns it.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> where = rb.storage.locate(1)
        >>> _ = rb.storage.edit(where, rb.storage.prepare_at(where, torch.tensor(7), "example"))
        >>> rb[:].tolist()
        [0, 7, 2]
        """

    def read(self, rows: torch.Tensor, expected: torch.Tensor | None = None) -> tuple[Any, list[int]]:
        """Copy rows out: ``(what pack takes, positions that moved)``.

        Args:
            rows: int64 ``[B]``.
            expected: int64 ``[B]``: tickets that the rows must still have; None: any whole row will do.

        Returns:
            Of tensors one column ``[B, *shape]`` per field; of a list ``B`` items. And the positions of rows that were overwritten,
            in ``[0, B)``: what was read for them is to be replaced.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
        >>> _ = rb.extend(torch.arange(3))
        >>> rows = torch.tensor([0, 2])
        >>> tickets = rb.storage.tickets_of(rows)
        >>> _ = rb.add(torch.tensor(7))  # overwrites row 0
        >>> columns, moved = rb.storage.read(rows, tickets)
        >>> moved
        [0]
        """

    def patch(self, columns: Any, places: list[int], fresh: Any) -> None:
        """Replace what :meth:`read` returned for some places.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> columns, _ = rb.storage.read(torch.tensor([0, 1]))
        >>> fresh, _ = rb.storage.read(torch.tensor([2]))
        >>> rb.storage.patch(columns, [1], fresh)
        >>> columns
        [tensor([0, 2])]
        """

    def batch(self, columns: Any, n: int | tuple[int, ...] | None) -> Any:
        """A sampled batch of ``n`` rows, or ``[*n]``, around what :meth:`read` returned; None: as the columns say. No copy.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.arange(3)})
        >>> columns, _ = rb.storage.read(torch.tensor([2, 0]))
        >>> rb.storage.batch(columns, 2)
        {'obs': tensor([2, 0])}
        """

    def pack(self, columns: Any, where: Rows, extra: dict[str, torch.Tensor] | None = None) -> Any:
        """Data in the user's form around what :meth:`read` returned. ``extra`` ``[n]`` joins the entries of TensorDicts.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.arange(3)})
        >>> where = rb.storage.locate(2)
        >>> columns, _ = rb.storage.read(where.rows)
        >>> rb.storage.pack(columns, where)  # one row
        {'obs': tensor(2)}
        """

    def empty(self, *, keep_write_count: bool) -> None:
        """Forget all rows, keep the memory.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.empty(keep_write_count=True)
        >>> len(rb), rb.write_count
        (0, 3)
        """

    @property
    def write_count(self) -> int:
        """Rows written since the last ``empty()``."""

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """All that is stored, and in which order it was written, as tensors and plain values: copies.

        ``without``: names and kinds of indexes that are left out, as the caller saves them.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.state_dict()["write_count"]
        3
        """


__all__ = ["Count", "Rows", "Storage", "check_count"]


class Storage(Declared, parts.Dumpable, Port):
    """Holds what is written. Base class of all storages, for type checks. A storage of one's own is a :class:`RowStorage`.

    A storage may serve several buffers: what is written through one is seen by the samplers of all.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> from engram import Storage
    >>> isinstance(rb.storage, Storage), rb.storage.initialized
    (True, False)
    """

    part = "storage"
    traits = Traits()
    #: The store that its rows lie in; None: there is none, or nothing was ever written.
    memory: Store | None = None
    #: Limits for the store, which does not exist yet; None: there are none, or it has them.
    pending_limit: limits.Rules | None = None
    #: The field by which rows of the store, which does not exist yet, are to be found; None: there is none, or it knows it.
    pending_key: FieldPath | None = None
    #: Dimensions of the layout that are indexed: 1, or 1 + the number of columns' dimensions.
    ndim: int = 1
    #: The one of these along which time runs in what is written and read by index; None: the last one.
    time_dim: int | None = None

    #: The ragged fields that it was asked for.
    ragged: RaggedOptions = NO_RAGGED

    #: Makes a batch of items, in place of a dense stack; None: nothing does.
    stacked: Callable[[list[object]], object] | None = None

    #: What a text about a buffer calls it; empty: by its class.
    described = ""
    #: Whether :meth:`get` and :meth:`set` are the user's own: a buffer reads and writes through them.
    gets, sets = False, False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.gets, cls.sets = overrides(cls, "get"), overrides(cls, "set")

    #: Whether it is in a forked child, which has not written yet, and its rows were not shared.
    _inherited = False

    def __init__(self) -> None:
        declared = {**vars(sampled.SampledStorage), **vars(Port)}
        missing = [name for name, it in declared.items() if name[0] != "_" and getattr(type(self), name, None) is it]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__}: expected the methods {missing}, got none of them. A storage of your own needs no base class, but "
                "the four methods of engram.RowStorage: extent, place, write and read."
            )
        self._lock = fork.rlock()
        fork.registered(self)
        self.listeners: list[weakref.ref[Listener]] = []

    # ---- who listens -------------------------------------------------------------------------------------------------

    def attach(self, buffer: Listener) -> None:
        """Tell a buffer of writes, after each. Holds no reference to it.

        Args:
            buffer: or another object with ``listens``, ``observe(write, data)`` and ``moved()``. One that is attached already is told once.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> class Watching:
        ...     listens = True
        ...     def observe(self, write, data):
        ...         print("emptied" if write is None else f"wrote {write.rows.tolist()}")
        ...     def moved(self): ...
        >>> rb, heard = ReplayBuffer(storage=LazyTensorStorage(10)), Watching()
        >>> rb.storage.attach(heard)
        >>> _ = rb.extend(torch.arange(2))
        wrote [0, 1]
        """
        if all(known() is not buffer for known in self.listeners):
            self.listeners.append(weakref.ref(buffer))

    def detach(self, buffer: Listener) -> None:
        """Stop telling a buffer.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> rb.storage.detach(rb)
        >>> rb.storage.has_listeners
        False
        """
        self.listeners = [weakref.ref(known) for known in self._live_listeners() if known is not buffer]

    def _live_listeners(self) -> list[Listener]:
        return [listener for known in self.listeners if (listener := known()) is not None]

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that the rows lie in: one of each member of an ensemble, else this one."""
        return (self,)

    @property
    def has_listeners(self) -> bool:
        """Whether a listener does something with writes."""
        return any(listener.listens for listener in self._live_listeners())

    def _notify_moved(self) -> None:
        """Tell every listener that the rows lie in another store now, or in none."""
        for listener in self._live_listeners():
            listener.moved()

    def notify(self, write: Write | None, data: object) -> None:
        """Tell every listener of a write, or of ``empty`` (None).

        The storage's own methods for writing do not: the caller who placed the rows tells.

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> class Watching(RandomSampler):
        ...     def observe(self, write, data):
        ...         print("emptied" if write is None else "wrote")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Watching())
        >>> rb.storage.notify(None, None)
        emptied
        """
        for known in self.listeners:
            if (listener := known()) is not None:
                listener.observe(write, data)

    # ---- what a storage does -----------------------------------------------------------------------------------------

    def bound(self, size: int) -> None:
        """Take a buffer's size as the limit of a storage that has none. Of one that has a limit, it stays.

        >>> from engram import LazyTensorStorage, ListStorage
        >>> unbounded, bounded = ListStorage(), LazyTensorStorage(10)
        >>> for storage in (unbounded, bounded):
        ...     storage.bound(100)
        >>> unbounded.max_size, bounded.max_size
        (100, 10)
        """

    @property
    def requested_size(self) -> int:
        """Rows that were asked for: fewer than fit, where lanes or columns made it more."""
        return self.max_size

    @property
    def dim_extend(self) -> int:
        """Dimension of ``extend``'s data along which time runs."""
        return self.ndim - 1 if self.time_dim is None else self.time_dim

    @property
    def columns(self) -> tuple[int, ...]:
        """Sizes of the dimensions after the first, with ``ndim > 1``, once they are known."""
        return ()

    @property
    def lanes(self) -> int:
        """Rings that the rows are divided into."""
        return 1

    def one_in_each_lane(self, why: str, remedy: str = "") -> tuple[torch.Tensor, Count]:
        """The lanes of rows of which each goes to one, in order, int64 ``[lanes]``, and how many rows there must be.

        Args:
            why, remedy: for the message where there are others: why there must be as many, and what to do.

        >>> from engram import LazyTensorStorage
        >>> lanes, count = LazyTensorStorage(6, lanes=2).one_in_each_lane("one for each environment")
        >>> lanes.tolist(), count.rows
        ([0, 1], 2)
        """
        return torch.arange(self.lanes, device="cpu"), Count(self.lanes, why, remedy)

    def unnamed_lanes(self, call: str, *, batched: bool) -> tuple[int | torch.Tensor, Count | None]:
        """Where rows go whose lane was not named, and how many there must be: of several lanes each takes one.

        Raises:
            RuntimeError: one row, and several lanes.

        >>> from engram import LazyTensorStorage
        >>> storage = LazyTensorStorage(6, lanes=2)
        >>> lanes, count = storage.unnamed_lanes("extend", batched=True)
        >>> lanes.tolist(), count.rows
        ([0, 1], 2)
        >>> storage.unnamed_lanes("add", batched=False)
        Traceback (most recent call last):
        RuntimeError: add: expected the lane of a row, one of 2, got none. ...
        """
        if self.lanes == 1:
            return 0, None
        if not batched:
            raise RuntimeError(
                f"{call}: expected the lane of a row, one of {self.lanes}, got none. Name it: {call}(..., lane=k), "
                "rb.appender(lane=k), or rb.on_lane(k) for all that follow."
            )
        return self.one_in_each_lane(
            "one for each lane as none was named",
            f" Name their lane: {call}(..., lane=…) takes an int or one per row, and rb.on_lane(k) stays. "
            'lane="each" is for one row in each, layout="time_first" or "lane_first" for several.',
        )

    @property
    def is_ragged(self) -> bool:
        """Whether rows of a field have different lengths, as far as that is known before the first write."""
        return bool(self.ragged.fields)

    @property
    def in_rings(self) -> bool:
        """Whether the items of ragged fields lie in rings, so that rows can only be appended; as far as that is known."""
        return self.is_ragged and not (self.ragged.slots if self.memory is None else self.memory.schema.in_slots)

    @property
    def supports_conditional_update(self) -> bool:
        """Whether rows have fields here, which ``update_if_present`` replaces."""
        return self.traits.has_fields and not self.traits.is_remote

    def flatten(self) -> Storage:
        """A storage with ``ndim`` 1 around the same rows: itself, if that is 1 already.

        >>> from engram import ListStorage
        >>> storage = ListStorage(10)
        >>> storage.flatten() is storage
        True
        """
        return self

    @property
    def shape(self) -> torch.Size:
        """Live slots, then the columns."""
        return torch.Size([len(self)])

    @property
    def shared(self) -> bool:
        """Whether processes that have a copy of it see the same rows."""
        return False

    def share(self, maker: str | None = None) -> None:
        """Move the rows to where other processes see them, too.

        ``maker``: 32 hexadecimal digits by which a process that takes the place of this one finds them again.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.share()  # other processes may have it now
        >>> int(rb[9])
        9
        """
        raise RuntimeError(
            f"share: {type(self).__name__} cannot be shared. Use LazyTensorStorage or LazyMemmapStorage."
        )

    def hand_over(self) -> None:
        """Before it is pickled: share the rows if that is for a process that is being started. A copy would be silent there.

        Other copies stay copies: ``copy``, ``pickle.dumps``, queues.

        Raises:
            RuntimeError: they cannot be shared.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(2))
        >>> rb.storage.hand_over()  # no process is being started here
        >>> rb.storage.shared
        False
        """
        if not fork.is_spawning():
            return
        try:
            if not self.shared:
                self.share()
        except RuntimeError as error:
            raise RuntimeError(
                "a buffer that is handed to a process is shared with it, but this one cannot be: "
                f"{str(error).removeprefix('share: ')} To give it a copy of its own, pass pickle.dumps(buffer)."
            ) from error
        fork.keep_for_child(self)  # a temporary store ends with its last owner

    def after_fork(self) -> None:
        """In a child: what it writes to memory that is not shared the parent does not see.

        Python calls it in the child of :func:`os.fork`. It neither copies nor shares anything.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.share()
        >>> rb.storage.after_fork()
        >>> rb.extend(torch.arange(2)).tolist()  # what is shared is written without a warning
        [0, 1]
        """
        self._inherited = not self.shared

    def begin_change(self) -> None:
        """Called before any change of rows or priorities. Warns once in a forked child that has a private copy.

        >>> from engram import LazyTensorStorage
        >>> LazyTensorStorage(4).begin_change()
        """
        if self._inherited:
            self.check_inherited()

    def check_inherited(self) -> None:
        """Before the first write of a forked child to a copy of its own: warn, once.

        Raises:
            RuntimeError: rows that processes share, but not as a store, only the parent may write.

        >>> import torch
        >>> import warnings
        >>> from engram import LazyTensorStorage
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     LazyTensorStorage(10).check_inherited()
        >>> str(said[0].message).partition(":")[0]
        'this process was forked from the one that made the buffer, which is not shared'
        """
        self._inherited = False
        if not self.shared:
            words.warn(
                "this process was forked from the one that made the buffer, which is not shared: what is written here stays here. "
                "Use a LazyTensorStorage or LazyMemmapStorage, and rb.share() before processes are started."
            )

    def check_writable(self) -> None:
        """Raise ``ReadOnlyStore`` where rows are only read, before anything else is said of a write.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyMemmapStorage, ReplayBuffer
        >>> folder = Path(tempfile.mkdtemp()) / "store"
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.check_writable()
        >>> rb.close()
        >>> LazyMemmapStorage.open(folder, readonly=True).check_writable()
        Traceback (most recent call last):
        engram.errors.ReadOnlyStore: ...
        """

    def number(self, value: object, path: tuple[str, ...]) -> object:
        """A number of a row, or a list of some, as it is stored under a path: a tensor of the field's dtype.

        A list storage keeps it as it is.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.add({"reward": torch.tensor(0.5)})
        >>> rb.storage.number(2, ("reward",))
        tensor(2.)
        """
        return value

    @property
    def placing(self) -> AbstractContextManager[object]:
        """Held from placing to writing, so that two writers do not choose the same row."""
        return self._lock

    def hold_nothing(self, rows: torch.Tensor) -> torch.Tensor:
        return self.tickets_of(rows) < 0

    def writes_of(self, rows: torch.Tensor, tickets: torch.Tensor) -> torch.Tensor:
        return tickets

    def positions_of(self, rows: torch.Tensor) -> torch.Tensor:
        """As ``writer.positions_of``, of rows int64 ``[n]`` on the CPU. Raises ``TypeError``: it has no lanes of tensors here.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend(torch.arange(6))
        >>> rb.storage.positions_of(torch.tensor([0, 1, 2])).tolist()
        [4, 5, 2]
        """
        raise TypeError(f"positions_of: expected a tensor storage of this machine, got {type(self).__name__}.")

    def keyed(self, call: str, key: FieldPath | None = None) -> keys.StoredKeys | None:
        """The rows by their key; None: nothing was ever written.

        Args:
            call: what messages begin with.
            key: the field that they have it in: noted, or the index is made; None: the store knows it.

        Raises:
            TypeError: it has no tensors here; or as ``ReplayBuffer.index_keys``. RuntimeError: no field was named.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> rb.storage.keyed("example", ("uid",)) is None
        True
        >>> _ = rb.extend({"uid": torch.tensor([7, 8, 9])})
        >>> rb.storage.keyed("example").newest([9, 6], "example")[0].tolist()
        [2, -1]
        """
        if not self.supports_conditional_update:
            raise TypeError(f"{call}: expected a tensor storage of this machine, got {type(self).__name__}.")
        if self.ndim > 1:
            raise NotImplementedError(
                f"{call}: expected a storage with ndim=1, whose rows have a key each, got ndim={self.ndim}."
            )
        with self._lock:
            if self.memory is not None:
                return keys.StoredKeys.of(self.memory, key, call)
            self.pending_key = key or self.pending_key
        if self.pending_key is None:
            raise keys.no_index(call)
        return None

    # ---- removing ------------------------------------------------------------------------------------------------------

    def check_removal(self, rows: torch.Tensor) -> None:
        """Raise what :meth:`remove` would of rows, int64 ``[n]``; -1 is passed over.

        Raises:
            RowError: a row outside the storage. RuntimeError: its rows cannot be removed.

        >>> import torch
        >>> from engram import ListStorage
        >>> ListStorage(4).check_removal(torch.tensor([4]))
        Traceback (most recent call last):
        engram.errors.RowError: remove: expected rows in [-1, 4), got 4.
        """
        outside = rows[(rows < -1) | (rows >= self.max_size)]
        if len(outside):
            raise RowError(f"remove: expected rows in [-1, {self.max_size}), got {int(outside[0])}.")

    def remove(self, rows: torch.Tensor, expected: torch.Tensor | None) -> int:
        """Make rows void, as ``ReplayBuffer.remove`` has it, after :meth:`check_removal`.

        Args:
            rows: int64 ``[n]``, contiguous, on the CPU.
            expected: tickets of the rows that go, as the rows; None: whatever they hold.

        Returns:
            How many rows were removed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.remove(torch.tensor([1]), None), rb[:].tolist()
        (1, [0, 2])
        """
        if self.memory is None:
            return 0
        self.begin_change()
        wanted = 0 if expected is None else expected.data_ptr()
        removed: int = self.memory.core.remove(rows.data_ptr(), len(rows), wanted)
        self.memory.refilled()
        return removed

    def limit(self, rules: limits.Rules, unconsumed: int) -> None:
        """Limit how fast rows come and go, at once or when there is a store. ``unconsumed``: rows that are not used up now.

        Raises ``TypeError``: there will be no store.

        >>> from engram import LazyTensorStorage
        >>> from engram.store.limits import Rules
        >>> storage = LazyTensorStorage(10)
        >>> storage.limit(Rules(min_size=5), unconsumed=0)
        >>> storage.pending_limit.min_size  # until there is a store
        5
        """
        if not self.traits.has_fields:
            raise TypeError(
                f"limit: expected a storage of tensors, got a {type(self).__name__}, which no other process or thread can wait for. "
                "Use LazyTensorStorage or LazyMemmapStorage."
            )
        with self._lock:
            if self.memory is None:
                self.pending_limit = rules if any(rules) else None
            else:
                self.memory.core.set_limit(*rules, unconsumed)

    def _give_pending(self, store: Store) -> None:
        """Make what was asked for before there was a store. Raises as :meth:`keyed`, once, before the limits."""
        key, self.pending_key = self.pending_key, None
        if key is not None:
            keys.StoredKeys.of(store, key, "index_keys")
        if store.schema.ragged and self.ragged.open_rows:
            # Now: processes that open the folder have no such option.
            open_rows.OpenRowIndex.of_store(store, self.ragged.open_rows)
        if self.pending_limit is not None:
            store.core.set_limit(*self.pending_limit, store.core.size())
            self.pending_limit = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory the rows take, 0 where that is not known."""
        return 0

    def counters(self) -> dict[str, float]:
        """Counters of the store for ``stats()``, by name: since the store was made, over all processes. Zeros before the first write.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.counters()["void_rows"]  # removed, or of writers that died
        0
        """
        return dict.fromkeys(COUNTERS, 0)

    # ---- state ---------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> AbstractContextManager[object]:
        """No process writes inside. Writers wait, for a limited time."""
        return self._lock

    def __getstate__(self) -> dict[str, object]:
        self.hand_over()
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_inherited", "listeners", "_rows")}

    def __setstate__(self, state: dict[str, object]) -> None:
        Storage.__init__(self)
        self.__dict__.update(state)

    def prepare_load(self, state_dict: dict[str, object]) -> StorageLoad:
        """Check a state. Raises as :meth:`load_state_dict`; nothing is changed.

        Returns:
            What replaces the rows: call its ``commit()`` once. Its ``allocate()`` takes the memory before, where there is none yet.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(3))
        >>> load = other.storage.prepare_load(rb.storage.state_dict())
        >>> before = len(other)
        >>> load.commit()
        >>> before, len(other)
        (0, 3)
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Replace what is stored by a saved state. The next writes go where they would have gone then.

        Rows get new tickets, in the old order, and keep the numbers of their writes, by which handles name them. Indexes that the
        state does not have give all rows the default priority. Samplers hear of an emptied storage.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range.
            IncompatibleCheckpoint: another schema, capacity, number of lanes, or ``alpha`` or ``eps`` of an index (a
                ``ValueError``). Nothing is changed.

        Cost: O(capacity).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> other = LazyTensorStorage(100)
        >>> other.load_state_dict(rb.storage.state_dict())
        >>> len(other)
        10
        """
        self.prepare_load(state_dict).commit()
        self.notify(None, None)

    # ---- files ---------------------------------------------------------------------------------------------------------

    #: Classes whose dumps can be loaded here, beside its own.
    _loads: tuple[str, ...] = ()

    def prepare_part(
        self, reader: part_reader.PartReader, *, close_open: bool = False, without: Sequence[str] = ()
    ) -> StorageLoad:
        """Check a part. Rows are read when it is committed, if nothing is stored here; else their blocks are checked before, too.

        ``close_open``: the trajectories that go on at the ends of lanes end there; the next row of such a lane is left out. ``without``:
        names of priorities that the caller loads.

        Raises: as :meth:`loads`. Nothing is changed.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> from engram.saved.part_reader import PartReader
        >>> folder = Path(tempfile.mkdtemp()) / "storage"
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.dumps(folder)
        >>> with PartReader.open(folder) as reader:
        ...     other.storage.prepare_part(reader).commit()
        >>> other[:].tolist()
        [0, 1, 2]
        """
        self._check_kind(reader)
        return self.prepare_load(parts.read_state(reader))

    def _check_kind(self, reader: part_reader.PartReader) -> None:
        parts.check_kind(reader, "storage", *dict.fromkeys((*self._loads, type(self).__name__)))

    # ---- rows that are placed one by one: only where they are tensors ---------------------------------------------------

    @property
    def form(self) -> Form:
        """How rows are kept, as far as a checkpoint must know."""
        return Form(type(self).__name__, self.max_size, self.lanes, self.ndim, takes_rows=False, lineage=self.lineage())

    def schema_here(self, text: str | None, where: str) -> Schema:
        """The schema of a saved state, with the capacity and lanes of this storage.

        Raises ``IncompatibleCheckpoint``: other fields, or none; or rows that are no tensors.

        Args:
            text: the state's ``"schema"``.
            where: for messages.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"obs": torch.zeros(3, 2)})
        >>> schema = LazyTensorStorage(100).schema_here(rb.storage.state_dict()["schema"], "example")
        >>> schema.capacity, schema.fields[0].shape
        (100, (2,))
        """
        raise IncompatibleCheckpoint(f"{where}: a {type(self).__name__} cannot be converted. Load it as it is.")

    def prepare_rows(self, state: dict[str, object], source: RowsSource) -> StorageLoad:
        """Check a state without rows. ``source`` has those, and fills the tensors of a store.

        Args:
            state: a ``state_dict`` without ``"rows"``.
            source: its ``fill(tensors)`` is called when the load is committed, with one tensor ``[capacity, *shape]`` per field.

        Raises: as :meth:`load_state_dict`; nothing is changed. The commit raises what ``source`` does: then the storage is empty.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(3))
        >>> class Sevens:
        ...     def fill(self, tensors):
        ...         for tensor in tensors:
        ...             tensor[:3] = 7
        >>> other.storage.prepare_rows(rb.storage.state_without_rows(), Sevens()).commit()
        >>> other[:].tolist()
        [7, 7, 7]
        """
        raise IncompatibleCheckpoint(f"expected a storage of tensors, got a {type(self).__name__}.")

    def prepare_items(self, source: ItemsSource) -> StorageLoad:
        """Check items that another library saved, as :meth:`prepare_rows` does a state.

        Raises ``IncompatibleCheckpoint``: this is no list, or one of another size. Nothing is changed.

        >>> from engram import ListStorage, ReplayBuffer
        >>> class Words:
        ...     name, length, capacity, position, write_count = "example", 2, None, 2, 2
        ...     def read(self, decompress, *, whole):
        ...         return iter(["a", "bc"])
        >>> rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
        >>> rb.storage.prepare_items(Words()).commit()
        >>> rb[:]
        ['a', 'bc']
        """
        raise IncompatibleCheckpoint(
            f"{source.name}: expected rows of tensors for a {type(self).__name__}, got the items of a list. Load them into a "
            "CompressedListStorage or a ListStorage."
        )

    def prepare_unwritten(self) -> StorageLoad:
        """What makes this storage one without rows, whose write count is 0.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.prepare_unwritten().commit()
        >>> len(rb)
        0
        """
        return self.prepare_rows(unwritten(), KeptRows([], []))

    # ---- what is saved ---------------------------------------------------------------------------------------------------

    def consumption(
        self, name: str, most: int, rules: row_indexes.GroupRules = row_indexes.ALL_ROWS
    ) -> row_indexes.ConsumptionIndex | None:
        return None if self.memory is None else row_indexes.ConsumptionIndex.of_store(self.memory, name, most, rules)

    def groups(
        self, name: str, key: FieldPath, reward: FieldPath | None, rules: row_indexes.GroupRules = row_indexes.ALL_ROWS
    ) -> row_indexes.Groups | None:
        if self.memory is not None:
            return row_indexes.Groups(self.memory, name, key, reward, rules)
        declared = self.ragged.fields.get(key)
        if declared is not None and (
            declared.kind not in row_indexes.TEXT_KEYS or (declared.max_length or 0) > row_indexes.MAX_KEY_BYTES
        ):
            raise row_indexes.no_group_key("PromptGroupSampler: group_key", key, declared)
        return None

    def some(self, columns: list[torch.Tensor], which: slice | list[int]) -> list[torch.Tensor]:
        """Some rows of what :meth:`read` returned or :meth:`prepare` made.

        A slice gives views; a list of positions, copies.

        >>> import torch
        >>> from engram import LazyTensorStorage
        >>> storage = LazyTensorStorage(10)
        >>> prepared, n = storage.prepare({"obs": torch.arange(4)}, "extend", batched=True)
        >>> storage.some(prepared, [1, 3])
        [tensor([1, 3])]
        """
        return [column[which] for column in columns]

    def priorities_in_use(self, name: str) -> dict[str, object] | None:
        """The state of the priorities of that name, as far as rows are in use; None: as the sampler says it.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.update_priority([0], [2.0])
        >>> state = rb.storage.priorities_in_use("main")
        >>> state["alpha"], len(state["leaves"])
        (0.6, 3)
        """
        return None

    def lineage(self) -> object:
        """Equal as long as the tickets of an older checkpoint mean the rows that are stored now.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> before = rb.storage.lineage()
        >>> _ = rb.extend(torch.arange(3))
        >>> same = rb.storage.lineage() == before
        >>> rb.storage.load_state_dict(rb.storage.state_dict())  # all rows get new tickets
        >>> same, rb.storage.lineage() == before
        (True, False)
        """
        return None

    #: What saves the rows and loads them; None: the storage itself does.
    _checkpointer: checkpointers.StorageCheckpointerBase | None = None
    _default_checkpointer: type[checkpointers.StorageCheckpointerBase] = checkpointers.TensorStorageCheckpointer

    @property
    def checkpointer(self) -> checkpointers.StorageCheckpointerBase:
        """What :meth:`dumps` and ``rb.dumps`` save the rows with. None sets the default one.

        >>> from engram import FlatStorageCheckpointer, LazyTensorStorage
        >>> storage = LazyTensorStorage(100)
        >>> storage.checkpointer = FlatStorageCheckpointer()
        >>> storage.checkpointer.is_plain
        False
        """
        if self._checkpointer is None:
            self._checkpointer = self._default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, given: checkpointers.StorageCheckpointerBase | None) -> None:
        taken = checkpointers.accepted(given)
        if not isinstance(taken, checkpointers.StorageCheckpointerBase | None):
            raise TypeError(f"checkpointer: expected a storage checkpointer, got {type(given).__name__}.")
        self._checkpointer = taken

    def register_save_hook(self, hook: checkpointers.SaveHook) -> None:
        """Call ``hook(data, path=folder)`` with the rows before they are saved, after earlier hooks; its result is saved.

        The hook is the checkpointer's: it is not saved, and copies of the storage in other processes have it only if it was there before.

        >>> from engram import LazyTensorStorage, TED2Flat
        >>> storage = LazyTensorStorage(100)
        >>> storage.register_save_hook(TED2Flat())
        """
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: checkpointers.LoadHook) -> None:
        """Call ``hook(data, out=None)`` with what was loaded, after earlier hooks; its result becomes the rows.

        >>> from engram import Flat2TED, LazyTensorStorage
        >>> storage = LazyTensorStorage(100)
        >>> storage.register_load_hook(Flat2TED())
        """
        self.checkpointer.register_load_hook(hook)

    if TYPE_CHECKING:

        def prepare_snapshot(
            self, *, without: Collection[tuple[str, str]] = (), whole: bool = True
        ) -> parts.Preparation[parts.PartSnapshot]: ...

        def state_without_rows(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, object]: ...

    def dumps(self, path: str | Path) -> None:
        """Save the rows as a folder, which in one step replaces one that was saved there: as the :attr:`checkpointer` does.

        Args:
            path: a free name, an empty folder, or what an earlier call has made.

        Raises:
            FileExistsError: something else lies there. OSError: no space, or an I/O error. What lay there before still does.
            TypeError: something that is neither a tensor nor a plain value; names the way to it.

        >>> import tempfile
        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb, path = ReplayBuffer(storage=LazyTensorStorage(10)), tempfile.mkdtemp() + "/rows"
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.storage.dumps(path)
        >>> rb.empty()
        >>> rb.storage.loads(path)
        >>> len(rb)
        3
        """
        if self._checkpointer is None or self._checkpointer.is_plain:
            super().dumps(path)
        else:
            self._checkpointer.dumps(self, path)

    def loads(self, path: str | Path) -> None:
        """Replace what is stored by what :meth:`dumps` saved. Samplers hear of an emptied storage.

        Raises:
            CorruptCheckpoint: damaged; names file and byte. IncompatibleCheckpoint: as :meth:`load_state_dict`, or of another
                kind of storage. Nothing is changed; but where nothing was stored rows are checked while they are read, and nothing
                is stored if that fails.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.dumps("storage-loads-example")
        >>> rb.storage.set(0, torch.tensor(99))
        >>> rb.storage.loads("storage-loads-example")
        >>> int(rb[0])
        0
        """
        if self._checkpointer is None or self._checkpointer.is_plain:
            with part_reader.PartReader.open(checkpoints.standing(Path(path))) as reader:
                checkpointers.prepare_dumped(self, reader).commit()
            self.notify(None, None)
        else:
            self._checkpointer.loads(self, path)

    dump = save = dumps
    load = loads

    #: Whether it was closed.
    closed = False

    def close(self) -> None:
        """Release files and locks. Repeatable. Tensors handed out stay valid; every use of the storage raises ``RuntimeError``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.close()
        >>> rb.storage.closed
        True
        """
        fork.dropped(self)
        why = "the storage was closed. Make another one, or ReplayBuffer.open the folder of one."
        closing.end(self, why, **self._after_close())

    def _after_close(self) -> dict[str, object]:
        """What goes on when it is closed."""
        return {}

    # ---- TorchRL's verbs ---------------------------------------------------------------------------------------------

    def set(self, cursor: object, data: object, *, set_cursor: bool = True) -> None:
        """Write rows by number.

        Args:
            cursor: an int (``data`` is one row), or a slice, range, list, array or tensor of rows (``data`` is a batch). A slice
                without an end goes as far as there is room; in a storage without a bound, as far as there are rows.
            data: the rows.
            set_cursor: accepted for compatibility; cursors belong to the store and never move here.

        Raises:
            IndexError: a row is outside ``[0, max_size)``. Nothing is written.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.set([0, 9], torch.tensor([7, 8]))
        >>> rb[[0, 9]]
        tensor([7, 8])
        """
        if (instead := meanwhile(self)) is not None:
            instead(cursor, data)
            return
        single = isinstance(cursor, int)
        if isinstance(cursor, slice):
            bounded = self.max_size < torch.iinfo(torch.int64).max
            cursor = range(*cursor.indices(self.max_size if bounded else max(*self.extent().filled, cursor.stop or 0)))
        rows = torch.tensor([cursor], device="cpu") if single else checks.as_ints("index", cursor).reshape(-1)
        outside = rows[(rows < 0) | (rows >= self.max_size)]
        if len(outside) and (self.initialized or self.ndim == 1):  # slots may still be rounded up
            raise RowError(f"set: row {int(outside[0])} is outside [0, {self.max_size}).")
        prepared, n = self.prepare(data, "set", batched=not single, count=Count(len(rows)))
        self.write(WritePlan(rows=rows), prepared, n)

    def get(self, index: object) -> Any:
        """What ``storage[index]`` is.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.get(slice(2, 4))
        tensor([2, 3])
        """
        return (meanwhile(self) or self.__getitem__)(index)

    def got(self, index: Any, data: Any) -> Any:
        """What a :meth:`get` of the user's own makes of rows that were read; it is called for one thread at a time.

        >>> import torch
        >>> from engram import LazyTensorStorage
        >>> class Halved(LazyTensorStorage):
        ...     def get(self, index):
        ...         return super().get(index) / 2
        >>> Halved(10).got([3], torch.tensor([6.0]))
        tensor([3.])
        """
        with self._lock, doing(self, lambda asked: data if asked is index else self[asked]):
            return self.get(index)

    def locate(self, index: object) -> Rows:
        """As :meth:`resolve`; with ``ndim > 1`` the index is one into the layout of ``extend``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        >>> _ = rb.extend(torch.arange(6).reshape(2, 3))  # two columns, three steps
        >>> rb.storage.locate((0, 2)).rows.tolist()  # of the first column the last step
        [4]
        """
        return self.resolve(index)

    def prepare_at(self, where: Rows, data: object, call: str, *, ignored: Iterable[str] = ()) -> Any:
        """Check data for rows that were located and bring it into the form that :meth:`edit` takes.

        Args:
            where: as :meth:`locate` returns it.
            data: as many rows.
            call: for messages.
            ignored: names of entries that are not stored.

        Raises:
            RuntimeError: another number of rows; another shape or dtype. KeyError: an entry is missing, or is no field.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(3))
        >>> where = rb.storage.locate([0, 2])
        >>> _ = rb.storage.edit(where, rb.storage.prepare_at(where, torch.tensor([7, 8]), "example"))
        >>> rb[:].tolist()
        [7, 1, 8]
        """
        return self.prepare(data, call, batched=not where.single, ignored=ignored, count=Count(len(where.rows)))[0]

    def __getitem__(self, index: Any) -> Any:
        where = self.resolve(index)
        return self.pack(self.read(where.rows)[0], where)

    def __setitem__(self, index: Any, value: Any) -> None:
        where = self.resolve(index)
        # Not the storage's own: no number stands for all fields.
        self.edit(where, Storage.prepare_at(self, where, value, "storage[index] = value"))

    def __iter__(self) -> Iterator[Any]:
        for rank in range(len(self)):
            yield self[int(self.extent().rows(torch.tensor([rank], device="cpu"))[0])]

    def contains(self, index: int | torch.Tensor) -> bool | torch.Tensor:
        """Whether rows are live: a bool for an int, a bool tensor of the same shape for a tensor of ints.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.storage.contains(9), rb.storage.contains(torch.tensor([9, 10])).tolist()
        (True, [True, False])
        """
        if isinstance(index, torch.Tensor):
            return (self.tickets_of(index.reshape(-1).to("cpu", torch.int64)) >= 0).reshape(index.shape)
        return bool(self.tickets_of(torch.tensor([operator.index(index)], device="cpu"))[0] >= 0)

    def __contains__(self, index: int | torch.Tensor) -> bool:
        found = self.contains(index)
        return bool(found.all()) if isinstance(found, torch.Tensor) else found

    # ---- indices -----------------------------------------------------------------------------------------------------

    def resolve(self, index: object) -> Rows:
        """The rows an index means: ints are rows, slices and masks count live rows in row order.

        Raises:
            RowError: outside the live rows.
            TypeError: not an index.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(4))
        >>> [rb.storage.resolve(index).rows.tolist() for index in (1, -1, slice(2), [3, 0])]
        [[1], [3], [0, 1], [3, 0]]
        """
        if index is Ellipsis or index is None or (isinstance(index, tuple) and not index):
            index = slice(None)
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, slice):
            extent = self.extent()
            try:
                start, stop, step = index.indices(extent.size)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"rb[a:b]: expected ints, or a step other than 0, got {index!r:.80}.") from None
            if step > 0:
                ranks = torch.arange(start, max(start, stop), step, device="cpu")
            else:
                ranks = torch.tensor(range(start, stop, step), dtype=torch.int64, device="cpu")
            rows = extent.rows(ranks)
            contiguous = step == 1 and (rows is ranks or len(extent.filled) == 1) and extent.holes is None
            return Rows(rows, span=(start, max(start, stop)) if contiguous else None)
        if not isinstance(index, torch.Tensor | np.ndarray | list | range):
            return Rows(self._live(self._row_number(index)), single=True)
        mask = checks.as_numbers("rb[index]", index).to("cpu")
        if mask.dtype is torch.bool:
            extent = self.extent()
            if mask.shape != (extent.size,):
                raise RowError(
                    f"rb[mask]: expected a mask of the {extent.size} live rows, got shape {list(mask.shape)}."
                )
            return Rows(extent.rows(mask.nonzero().reshape(-1)))
        return Rows(self._live(checks.as_ints("index", index).reshape(-1)), single=mask.ndim == 0)

    def _row_number(self, index: Any) -> torch.Tensor:
        try:
            row = operator.index(index)
        except TypeError:
            raise TypeError(
                "rb[index]: expected an int, slice, mask, or a list, range, array or tensor of ints; "
                f"got {type(index).__name__}."
            ) from None
        if not -(1 << 63) <= row < 1 << 63:
            raise RowError(f"rb[index]: expected one of {words.count(len(self), 'row')} with data, got {row}.")
        return torch.tensor([row], device="cpu")

    def _live(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by number; negative ones count live rows from the end."""
        if bool((rows < 0).any()):
            extent = self.extent()
            ranks = rows + extent.size
            if bool((ranks < 0).any()):
                raise RowError(f"rb[index]: expected indices of at least {-extent.size}, got {int(rows.min())}.")
            rows = torch.where(rows < 0, extent.rows(ranks.clamp(0, max(extent.size - 1, 0))), rows)
        doubtful = rows[self.tickets_of(rows) < 0]
        if len(doubtful):
            dead = doubtful[~self.extent().contains(doubtful)]  # the others are just being written
            if len(dead):
                holes, lost = self.extent().holes, ""
                if holes is not None:
                    lost = f"; {len(holes)} between them were removed, lost their items to newer ones, or died with a writer"
                raise RowError(
                    f"rb[index]: row {int(dead[0])} is not live: expected one of {words.count(len(self), 'row')} with data{lost}."
                )
        return rows


class WrongCount(RuntimeError):
    """There are other than as many rows as there must be."""


def check_count(call: str, count: Count | None, n: int) -> None:
    """Raise ``RuntimeError`` unless there are as many rows as there must be."""
    if count is not None and n != count.rows:
        raise WrongCount(f"{call}: expected {words.count(count.rows, 'row')}, {count.why}, got {n}.{count.remedy}")


def check_plan(plan: WritePlan, n: int, lanes: int) -> None:
    """Raise unless ``n`` rows can go where a plan says: ``RuntimeError``, ``RowError``."""
    named = plan.rows if plan.kept is None else None
    for what, each in (("lane: expected one lane", plan.lane), ("write: expected one index", named)):
        if isinstance(each, torch.Tensor) and each.shape != (n,):
            raise RuntimeError(f"{what} per row, [{n}], got {list(each.shape)}.")
    lane = plan.lane
    if isinstance(lane, torch.Tensor):
        if bool(((lane < 0) | (lane >= lanes)).any()):
            raise RowError(f"lane: expected lanes in [0, {lanes}), got {lane.tolist()[:8]}….")
    elif lane is not None and not 0 <= lane < lanes:
        raise RowError(f"lane: expected a lane in [0, {lanes}), got {lane}.")
