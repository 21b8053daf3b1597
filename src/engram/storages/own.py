"""Storages that a buffer completes: a user's object with four methods, and the default, which becomes tensors or a list when rows come."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, Unpack, cast, runtime_checkable

import msgspec
import torch

from engram._support import checks, words
from engram._support.state import copied
from engram._support.tensordicts import is_tensor_collection, wrap
from engram.errors import IncompatibleCheckpoint, IncompatibleStore
from engram.format.layout import SINGLE
from engram.format.schema import Field, Node, Schema, decode, differences, encode, renumbered
from engram.saved import part_reader, parts
from engram.saved.snapshot import RowsSnapshot, StoragePreparation, StorageSnapshot
from engram.storages import _base, _geometry, _home, ragged, tensor, tensor_state
from engram.storages._ragged_structure import RaggedStructure, structure_in, structure_of
from engram.storages._structure import Structure, device_of
from engram.storages.announcing import advice, announce, creation_line, temporary, warn_of_lanes
from engram.storages.list import ListStorage
from engram.store import elsewhere, keys, limits, opening
from engram.store.device.mirror import Mirror, copy_rows
from engram.store.device.store import DeviceStore
from engram.store.ragged import store_class
from engram.store.store import Store
from engram.types import Extent, Form, RowsSource, RowStorage, StorageLoad, Traits

GivenStorage: TypeAlias = _base.Storage | RowStorage | Callable[[], _base.Storage | RowStorage]

#: The methods that a storage of one's own has.
METHODS = ("extent", "place", "write", "read")


@runtime_checkable
class _Declares(Protocol):
    traits: Traits


@runtime_checkable
class _Empties(Protocol):
    def empty(self) -> None: ...


@runtime_checkable
class _KeepsSchema(Protocol):
    engram_schema: str | None


def _by_name(structure: Structure) -> Structure:
    """The leaves of rows in one dict, by names such as ``next.reward``."""
    leaves = [Field((".".join(it.key),), it.dtype, it.shape) for it in structure.fields]
    return Structure(leaves, Node("dict", children={it.name: Node("leaf", i) for i, it in enumerate(leaves)}))


class OwnColumns:
    """A user's object, field by field. Checks what it returns."""

    def __init__(self, own: RowStorage) -> None:
        self.own = own
        self.name = type(own).__name__
        declared = own.traits if isinstance(own, _Declares) else Traits()
        declared = checks.check_type(f"{self.name}: traits", declared, Traits, "a Traits", "Write Traits(…).")
        if declared.empties and not isinstance(own, _Empties):
            raise TypeError(f"{self.name}: expected the method empty, which Traits(empties=True) declares, got none.")
        self.in_order, self._empties = declared.in_order, declared.empties
        self.capacity = 0
        self.capacity = self.extent().capacity

    def take(self, structure: Structure) -> None:
        """Put rows together like this from now on. Raises ``ValueError``: two leaves have one name."""
        self.structure, self.leaves = structure, _by_name(structure)
        if len(self.leaves.root.children) < len(structure.fields):
            raise ValueError(
                f"{self.name}: expected leaves of different names, got {[it.name for it in self.leaves.fields]}. Rename a key."
            )

    def _call(self, method: str) -> str:
        return f"{self.name}.{method}"

    def extent(self) -> Extent:
        """Raises ``TypeError``, ``ValueError``: it is none, or none that a storage of one's own has."""
        found = self.own.extent()
        call = self._call("extent")
        found = checks.check_type(call, found, Extent, "an Extent", "Return Extent(capacity, (filled,), (seam,)).")
        if len(found.filled) != 1 or len(found.seam) != 1 or found.holes is not None:
            raise ValueError(f"{call}: expected one lane, no holes, Extent(capacity, (filled,), (seam,)), got {found}.")
        capacity, (filled,), (seam,), _ = found
        if not (0 <= filled <= capacity and 0 <= seam < capacity and capacity == (self.capacity or capacity)):
            expected = f"the capacity {self.capacity}" if self.capacity else "a capacity above 0"
            raise ValueError(f"{call}: expected {expected}, rows up to it and a seam below it, got {found}.")
        return found

    def place(self, n: int) -> torch.Tensor:
        """Raises ``TypeError``: no rows."""
        rows: object = self.own.place(n)
        if not isinstance(rows, torch.Tensor) or rows.dtype is not torch.int64 or rows.shape != (n,):
            got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise TypeError(f"{self._call('place')}: expected a tensor of int64 [{n}], got {got}.")
        return rows

    def write(self, rows: torch.Tensor, columns: Sequence[torch.Tensor], *, append: bool) -> None:
        leaves = dict(zip(self.leaves.root.children, columns, strict=True))
        try:
            self.own.write(rows.clone(), leaves, append=append)
        except AttributeError as error:
            error.add_note(f"{self._call('write')}: data is a dict of the leaves of rows, {[*leaves]}.")
            raise

    def read(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Raises as ``Structure.flatten``: it returned something else than was written."""
        found: object = self.own.read(rows.clone())
        form = self.structure
        if isinstance(found, dict) or is_tensor_collection(found):
            leaves = dict(found.items())
            names = self.leaves.root.children.keys()
            if leaves.keys() == names or (isinstance(found, dict) and leaves.keys() != {*form.root.keys}):
                found, form = leaves, self.leaves
        return form.flatten(found, len(rows), self._call("read"))

    def found_form(self) -> tuple[Structure, bool]:
        """How rows are put together that were there before, and whether a write is to say it, as names of leaves are all that is known."""
        row: object = self.own.read(torch.zeros(1, dtype=torch.int64, device="cpu"))
        if not isinstance(row, dict) or not all(isinstance(value, torch.Tensor) for value in row.values()):
            return Structure.of(row, batched=True, call=self._call("read")), False
        if isinstance(self.own, _KeepsSchema) and self.own.engram_schema:
            schema = decode(self.own.engram_schema.encode(), f"{self.name}.engram_schema")
            return Structure.from_schema(schema), False
        nested = row[SINGLE] if {*row} == {SINGLE} else wrap(row, torch.Size((1,)), None).unflatten_keys(".").to_dict()
        return Structure.of(nested, batched=True, call=self._call("read")), True

    def check_empties(self, call: str) -> None:
        if not self._empties:
            raise RuntimeError(
                f"{call}: {self.name} does not declare that it can forget its rows. Give it a method empty() and "
                "traits = Traits(empties=True)."
            )

    def empty(self, call: str) -> None:
        self.check_empties(call)
        if isinstance(self.own, _Empties):
            self.own.empty()


class OwnStorage(tensor.TensorStorage):
    """What a buffer makes of an object with the methods of :class:`~engram.types.RowStorage`: ``rb.storage``.

    Rows are as :attr:`own` keeps them. Tickets and indexes are in the memory of this process: one that makes a buffer of an object that
    has rows gives them new tickets, in the order of the ring, and the default priority.
    """

    def __init__(self, own: RowStorage) -> None:
        columns = OwnColumns(own)
        self._configure(_geometry.Geometry.checked(f"{columns.name}: capacity", columns.capacity), "cpu")
        #: The user's object.
        self.own = own
        self._columns = columns
        self._guessed = False
        if columns.extent().size:
            structure, self._guessed = columns.found_form()
            self._make(structure)

    def _make(self, structure: Structure) -> None:
        self._columns.take(structure)
        store = elsewhere.ForeignStore(self._geometry.schema(structure, ()), self._columns)
        store.take_extent(self._columns.extent())
        self._adopt(store, structure)
        self._note_schema()

    def _note_schema(self) -> None:
        if not self._guessed:
            with contextlib.suppress(AttributeError):  # the object takes none
                self.own.engram_schema = encode(self.store.schema).decode()  # type: ignore[attr-defined]

    def prepare(self, data: object, call: str, *, batched: bool, **more: object) -> tuple[list[torch.Tensor], int]:
        # The first write says how the leaves of rows are put together.
        if self._guessed and not (isinstance(data, list) and not data):
            row, whole = (data[0], False) if batched and isinstance(data, list) else (data, batched)
            given = Structure.of(row, batched=whole, call=call)
            leaves, before = _by_name(given).fields, self._columns.leaves.fields
            if {*leaves} == {*before}:
                root = renumbered(given.root, {n: before.index(leaf) for n, leaf in enumerate(leaves)})
                fields = [given.fields[leaves.index(leaf)] for leaf in before]
                form = Structure(fields, root, given._types, names=given.names)
                self._columns.structure = self.structure = form
                self._guessed, self.store.schema = False, self._geometry.schema(form, ())
                self._note_schema()
        return super().prepare(data, call, batched=batched, **more)  # type: ignore[arg-type]

    def _initialize(self, data: object, n: int | None, columns: tuple[int, ...], call: str) -> None:
        del columns  # there is one lane
        self._make(Structure.of(data, batched=n is not None, call=call))

    def allocate_for(self, schema: Schema) -> None:
        with self._lock:
            if self.memory is None:
                self._make(Structure.from_schema(schema))

    # ---- what needs rows in memory that engram knows -------------------------------------------------------------------

    def _unsupported(self, call: str, remedy: str) -> NoReturn:
        raise RuntimeError(f"{call}: the rows are in a {self._columns.name}, a storage of one's own. {remedy}")

    def share(self, maker: str | None = None) -> None:
        self._unsupported("share", "Share a LazyTensorStorage, or serve the buffer: rb.serve().")

    def limit(self, rules: limits.Rules, unconsumed: int) -> None:
        if any(rules):
            self._unsupported("limit", "Limit a LazyTensorStorage or LazyMemmapStorage.")

    def check_removal(self, rows: torch.Tensor) -> None:
        raise RuntimeError(
            f"remove and empty(lane=): expected rows in memory, got those of {self!r}, which cannot hold void "
            "rows. Write another row there, rb[i] = row, or keep the rows in a LazyTensorStorage or LazyMemmapStorage."
        )

    def __getstate__(self) -> dict[str, object]:
        self.hand_over()
        self._unsupported("copy", "Make a buffer around another one, and load rb.state_dict() there.")

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def locate(self, index: object) -> _base.Rows:
        return self.resolve(index)

    def __getitem__(self, index: object) -> object:
        """Live rows by number: a copy."""
        self.store  # noqa: B018 - raises where there is none
        return _base.Storage.__getitem__(self, index)

    @property
    def _storage(self) -> None:
        """There are no tensors that show all rows."""

    # ---- what is saved and loaded ---------------------------------------------------------------------------------------------------

    def _first_rows(self, n: int) -> list[torch.Tensor]:
        store = self.store
        assert isinstance(store, elsewhere.ForeignStore)
        return store.first_rows(n)

    def prepare_rows(self, state: dict[str, object], source: RowsSource) -> tensor_state.RowsLoad:
        """As for every tensor storage. Raises, too: ``RuntimeError``: rows cannot be forgotten; ``IncompatibleCheckpoint``: holes."""
        load = super().prepare_rows(state, source)
        if load.schema is not None or self.memory is not None:
            self._columns.check_empties("load")
        if load.state is not None:
            lanes, numbers = load.state.rows[:2]
            live = int(lanes[0, 1])
            if not bool((numbers[:live] > 0).all()):
                raise IncompatibleCheckpoint(
                    f"load: expected rows without holes, as a {self._columns.name} has none, got {int((numbers[:live] == 0).sum())} rows "
                    'that hold nothing. Of a checkpoint, Checkpointer.restore(resume="exact") leaves none.'
                )
        return load

    def prepare_snapshot(self, *, without: Collection[tuple[str, str]] = (), whole: bool = True) -> StoragePreparation:
        if whole:
            return parts.Unprepared(partial(self._snapshot, without))
        return tensor_state.SnapshotPreparation(self, without, whole=False)

    def _snapshot(self, without: Collection[tuple[str, str]]) -> StorageSnapshot:
        """Rows are copied while writers wait."""
        store = self.memory
        if store is None:
            return tensor_state.SnapshotPreparation(self, without, whole=False).take()
        state = self.state_dict(without=without)
        rows, live = copied(state.pop("rows")), len(self)
        return RowsSnapshot("OwnStorage", store.held(), state, 0, live, live * store.schema.row_bytes, rows)

    def __repr__(self) -> str:
        fields = "not written yet" if self.structure is None else words.count(len(self.structure.fields), "field")
        return f"OwnStorage({self._columns.name}, size={len(self):,}/{self._capacity:,}, {fields})"


def adapted(given: object) -> object:
    """A storage around an object with the methods of one's own; anything else as it is."""
    if isinstance(given, _base.Storage | type) or not isinstance(given, RowStorage):
        return given
    return OwnStorage(given)


#: empty() did not give the fields up.
_TAKEN = " The fields stay while others have the store open: empty() it before they do, or write a first row that is like all."


class LazyTensorStorage(tensor.TensorStorage):
    """RAM, or memory of an accelerator, allocated at the first write and shaped after its first row.

    Creation logs one line: where it is, and of each key its shape, dtype and size. RAM is taken page by page, as rows are written.
    ``rb[a:b]`` is a live view of it, which becomes a copy when torch moves it to shared memory (``share_memory_()``, queues).

    Args:
        max_size: capacity in rows. With ``lanes`` it is rounded down per lane, with ``ndim > 1`` up to whole slots.
        device: ``"cpu"``, an accelerator, or ``"auto"``, as None: that of the first row.
        ndim: leading dimensions of the data that index rows; ``extend`` takes ``[*columns, T, ...]``.
        lanes: rings of consecutive rows, each with a cursor of its own.
        dtypes: what fields are stored as, in place of the first row's dtypes: ``{"reward": torch.float32, ("next", "obs"):
            torch.float16}``. Whatever is written to such a field is cast, of arrays, tensors and numbers, in the call that copies it.
        ragged: fields whose rows have different lengths: ``{"tokens": Ragged(torch.int32, max_length=32_768), "text":
            Ragged("utf-8", max_length=4_096)}``. Others are found at the first write: jagged nested tensors, strings,
            bytes, and lists of arrays of different lengths.
        ragged_bytes: that the items of all ragged fields may take together, shared out in proportion to the bytes of their
            longest rows. None: enough for ``max_size`` rows of a quarter of ``max_length`` each. Where they are used up,
            the oldest rows of the lane make way, as where there are ``max_size`` rows.
        ragged_layout: ``"ring"``, as None: rows share the space, and are appended. ``"slots"``: each row has room for ``max_length``
            items, so that removers and writers that choose places work, too; it takes no ``ragged_bytes``, and of the memory
            only what rows fill.
        layout: how batches hold ragged fields: ``"jagged"``, a nested tensor; ``"packed"``, named tuples of ``values``,
            ``cu_seqlens`` and ``max_seqlen``; ``"padded"``, of ``values`` and ``mask``; or ``"list"``. TensorDicts hold
            TensorDicts in place of the named tuples; one with packed rows has no batch dimension. ``{"kind": "padded",
            "side": "left", "multiple": 8}`` says more of padded ones. Texts are lists of strings, or stacks in TensorDicts.

    Raises:
        ValueError: ``max_size`` or ``lanes`` out of range, ``lanes`` with ``ndim > 1``, ``ragged`` with ``ndim > 1`` or on an
            accelerator; ``ragged_bytes`` beside slots; at the first write, too few ``ragged_bytes`` for
            one row of ``max_length`` in each lane.
        TypeError: ``dtypes`` that name no field or no dtype. RuntimeError: no such device on this machine; at the first write, too
            little free memory there.

    A cast gives up precision and nothing more: an int that the dtype cannot hold, a float that would become infinite, a float for an
    int or a bool, and a complex number for a real one are refused (``RuntimeError``, nothing is written). Ints 0 and 1 may become
    bools, bools any number. A field that ``dtypes`` names and the first row does not have is a ``KeyError`` there.

    On an accelerator, in one process, ``extend``, uniform draws, draws and updates by a ``PrioritizedSampler``, and ``rb[i] = rows``
    never make the host wait, and a CUDA graph may capture them: of a storage of one lane, with data, rows and priorities that are on
    the device. Draws of a graph take torch's random numbers of the device. After a captured ``extend`` the device alone knows how many
    rows there are: the next call that needs it, such as ``len(rb)``, waits for it. What is wrong with priorities or rows on the device
    is left out there, and ``rb.stats()`` raises it. Other samplers draw on the host: they are correct there, and slower. Of the fields
    that say where trajectories end the host keeps a copy, so a write of data that is on the device waits for these few bytes. Expanders
    and ``share()`` need the CPU.

    ``mirror``: a folder to which rows and priorities on an accelerator are copied in the background, as docs/gpu.md describes. If the
    folder has rows already, the storage begins with them. ``rb.stats()`` has ``mirror_lag`` in rows, ``mirror_lag_s`` and
    ``mirror_lost``. :meth:`ReplayBuffer.open` opens the folder, also after this process was killed.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000))
    >>> rb.extend(torch.arange(6.).reshape(3, 2))
    tensor([0, 1, 2])
    >>> rb.sample(128).shape
    torch.Size([128, 2])
    >>> from engram import Ragged
    >>> fields = {"tokens": Ragged(torch.int32, max_length=100), "log_prob": Ragged(torch.float32, like="tokens")}
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000, ragged=fields, layout="packed"))
    >>> tokens, offsets = torch.arange(6, dtype=torch.int32), torch.tensor([0, 2, 6])
    >>> rb.extend({"tokens": (tokens, offsets), "log_prob": (torch.zeros(6), offsets)})
    tensor([0, 1])
    >>> rb[:]["tokens"].cu_seqlens.tolist()
    [0, 2, 6]
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        lanes: int = 1,
        dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        **more: Unpack[_geometry.LazyArguments],
    ) -> None:
        where = type(self).__name__
        geometry = _geometry.Geometry.checked(where, max_size, lanes, ndim, dtypes)
        geometry = geometry.with_ragged(more, where, "" if device in ("cpu", "auto", None) else f"device={device!r}")
        _geometry.take_later(self, more)
        self._configure(geometry, device)
        if mirror is not None:
            self._begin_mirror(checks.check_path(f"{type(self).__name__}: mirror", mirror).absolute())

    @property
    def layout(self) -> dict[str, object]:
        """How batches hold ragged fields, as ``layout=`` says it. It may be set at any time.

        Setting it raises ``TypeError``, ``ValueError``: it is no layout.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend({"tokens": [torch.arange(2), torch.arange(3)]})
        >>> rb.storage.layout = {"kind": "padded", "multiple": 4}
        >>> rb[:]["tokens"].values.tolist()
        [[0, 1, 0, 0], [0, 1, 2, 0]]
        """
        return self.ragged.layout._asdict()

    @layout.setter
    def layout(self, layout: object) -> None:
        with self._lock:
            self.ragged = self.ragged._replace(layout=ragged.RaggedLayout.checked(layout, type(self).__name__))
            if isinstance(self.structure, RaggedStructure):
                self.structure.options = self.ragged

    #: The folder that rows on an accelerator are copied to; None: there is none.
    _mirror: Path | None = None
    #: How many ticket numbers an earlier store of this storage has given: the next one does not repeat them.
    _given = 0

    def __getstate__(self) -> dict[str, object]:
        self.before_fork()  # other processes cannot, as long as this one has the store open
        # Without the mirror: one storage writes there.
        return {name: value for name, value in super().__getstate__().items() if name != "_mirror"}

    def before_fork(self) -> None:
        """Before this process forks: give up the fields of rows that :meth:`empty` forgot, which a child could not.

        >>> from engram import LazyTensorStorage
        >>> LazyTensorStorage(4).before_fork()
        """
        if self.shared:
            self._forget_fake_rows()

    def _forget_fake_rows(self, *row: object, batched: bool = False, error: Exception | None = None) -> bool:
        """Be as before the first write, if all rows are forgotten, and none of them was drawn or there was one slot. False: that is
        not so, or others use the store, too.

        Args:
            row: data that is to be written then, and the name of the call: it must have fields.
            batched: whether it is a batch.
            error: what it raised with the fields of the store; it says what to do if they stay.
        """
        with self._lock:
            store = vars(self).get("memory")
            if store is None:  # nothing was written, or another thread was faster
                return error is None
            given = int(store.core.next_ticket) - 1
            one_slot = 1 + math.prod(self.columns)  # a number for each row, and one for the emptying
            kept = store.core.counted()[1] and given - self._given != one_slot
            if given == self._given or kept or len(self) or self.write_count or self.written().added.fills:
                return False
            if error is not None:
                self.check_writable()
                data, call = row
                first = data[0] if batched and isinstance(data, list) else data
                Structure.of(first, batched=batched and first is data, call=str(call))
            before, limit, key = self.written(), limits.Rules(*store.core.limit), keys.key_of(store)
            self._looking = True  # it is still there
            try:
                del self.memory
                self._notify_moved()  # samplers keep what their indexes know, as long as there are any
                gone = store.discard(self)
            finally:
                self._looking = False
            if not gone:
                self._adopt(store, before)
                self._notify_moved()
                if error is not None:
                    error.args = (f"{error.args[0]}{_TAKEN}",)
                return False
            self._given, self.pending_limit, self.pending_key = given, limit if any(limit) else None, key
            self._capacity = self._geometry.capacity
            self.structure = None
        return True

    def _initialize(self, data: Any, n: int | None, columns: tuple[int, ...], call: str) -> None:
        if call == "add" and n is None and is_tensor_collection(data) and data.batch_size:
            words.warn(
                f"add: the first row is a TensorDict of batch size {list(data.batch_size)}; it is stored as one row of "
                "that shape. If it is a batch of rows, use extend()."
            )
        dtypes = self._geometry.dtypes
        structure = structure_of(data, batched=n is not None, call=call, dtypes=dtypes, ragged=self.ragged)
        if dtypes or structure.ragged:
            structure.flatten(data, n, call)  # before there is memory: values may not fit
        if self._device_argument in _geometry.OF_DATA and self._home is None:
            self._device = device_of(data)
        schema = self._geometry.schema(structure, columns)
        if self.pending_key is not None:
            keys.key_field(schema, self.pending_key)  # before there is memory
        self._adopt(self._allocate(schema), structure)
        announce(*advice(structure.fields, dtypes))
        warn_of_lanes(self._geometry.max_size, self._geometry.capacity, self._geometry.lanes)

    def allocate_for(self, schema: Schema) -> None:
        with self._lock:
            if self.memory is None:
                if self.pending_key is not None:
                    keys.key_field(schema, self.pending_key)
                self._adopt(self._allocate(schema), structure_in(schema, self._geometry.dtypes, self.ragged))

    def _allocate(self, schema: Schema) -> Store:
        if self._home is not None:
            return self._allocate_in(self._home, schema, replace=True)
        place = "RAM" if self._device.type == "cpu" else str(self._device)
        store = self._allocate_here(schema)
        opening.skip_numbers(store.core, self._given)
        if self._mirror is not None:
            assert isinstance(store, DeviceStore)  # as _begin_mirror() has seen
            store.mirror = Mirror(store, _home.Home(self._mirror).create(schema, replace=False, given=self._given))
        announce(creation_line(schema, place))
        return store

    def _allocate_here(self, schema: Schema) -> Store:
        """In memory of this process alone."""
        return (
            store_class(schema).private(schema) if self._device.type == "cpu" else DeviceStore.on(schema, self._device)
        )

    def _begin_mirror(self, folder: Path) -> None:
        """Note where rows are copied to; if there are some, begin with them."""
        self._check_accelerated()
        self._mirror, call = folder, f"{type(self).__name__}: mirror"
        if not opening.holds_store(folder, call):
            return
        target = opening.open_store(folder)
        try:
            found = msgspec.structs.replace(target.schema, grouped=0)
            if differs := differences(self._geometry.schema(Structure.from_schema(found), found.columns), found):
                raise IncompatibleStore(
                    f"{call}: {str(folder)!r} holds a store of another size: {differs}. Name another folder, or that size."
                )
            store, state = self._allocate_here(found), target.state()
            assert isinstance(store, DeviceStore)  # as was seen above
            copy_rows(target, store, target.rows_in_use(state.lanes), state)
            store.mirror = Mirror(store, target)
        except BaseException:
            target.close()
            raise
        self._adopt(store, structure_in(found, self._geometry.dtypes, self.ragged))

    def _check_accelerated(self) -> None:
        if self._device.type == "cpu":
            raise ValueError(
                f"{type(self).__name__}: mirror: expected a storage on an accelerator that device= names, got "
                f"device={self._device_argument!r}. LazyMemmapStorage keeps rows of the host in a folder."
            )

    def flush(self) -> None:
        """Wait until the ``mirror`` holds all rows and priorities as they are now. Without one nothing is done.

        Raises what keeps rows from getting there, such as ``OSError``: the disk failed.

        >>> from engram import LazyTensorStorage
        >>> LazyTensorStorage(4).flush()
        """
        store = vars(self).get("memory")
        if isinstance(store, DeviceStore) and store.mirror is not None:
            store.mirror.flush()

    def _allocate_in(self, home: _home.Home, schema: Schema, *, replace: bool) -> Store:
        store = home.create(schema, replace=replace, given=self._given)
        announce(creation_line(schema, cast("Path", store.directory)))  # it was just created there
        return store


def _of_tensors(name: str) -> Any:
    """A method that makes the storage one of tensors, and calls that one's."""

    def call(self: DefaultStorage, *args: object, **kwargs: object) -> object:
        return getattr(self.become_tensors(), name)(*args, **kwargs)

    return call


class DefaultStorage(ListStorage):
    """A list without rows. It becomes a :class:`LazyTensorStorage` when the first ones are dicts that such a storage takes, and when it
    is shared, limited or loaded with rows of tensors; else a :class:`ListStorage`.

    Dicts may hold tensors, arrays, numbers, and dicts of them; several come as a list of dicts or as a dict of columns. The buffer
    goes on with the same object.

    >>> import torch
    >>> from engram import ReplayBuffer
    >>> rb = ReplayBuffer(100, batch_size=4)
    >>> rb.storage
    ListStorage(size=0/100, a LazyTensorStorage if the first rows are dicts)
    >>> _ = rb.extend([{"obs": torch.zeros(3), "reward": 0.5}] * 2)
    >>> rb.storage
    LazyTensorStorage(size=2/100, 2 fields, cpu)
    """

    #: In a text about the buffer.
    described = "ListStorage, or LazyTensorStorage for rows that are dicts"

    def prepare(self, data: object, call: str, *, batched: bool, **options: Any) -> tuple[Any, int]:
        with self._lock:
            if isinstance(self, DefaultStorage):  # else another thread was faster
                if len(self) or not self._are_of_tensors(data, call, batched=batched):
                    prepared = ListStorage.prepare(self, data, call, batched=batched, **options)
                    self.__class__ = ListStorage  # type: ignore[assignment]
                    return prepared
                self.become_tensors()
        return self.prepare(data, call, batched=batched, **options)

    def _are_of_tensors(self, data: object, call: str, *, batched: bool) -> bool:
        """Whether rows are dicts that a tensor storage takes. Raises what that does of a dict of columns, which no list takes."""
        rows = data if batched and isinstance(data, list) else [data]
        if not rows or not all(isinstance(row, dict) for row in rows):
            return False
        try:
            with temporary():
                storage = LazyTensorStorage(1)
                storage.ragged = ragged.NO_RAGGED  # texts are kept in the list
                storage.prepare(data, call, batched=batched)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if batched and rows is not data:
                raise
            announce(
                f"{call}: rows are kept in a list, which is several times slower than a LazyTensorStorage: {error}"
            )
            return False
        return True

    def become_tensors(self) -> LazyTensorStorage:
        with self._lock:
            made = cast("LazyTensorStorage", self)
            if isinstance(self, DefaultStorage):
                # First what the other class needs: threads may be amid a method of this one.
                twin = LazyTensorStorage(self.max_size, device=self._device or "cpu")
                vars(self).update({**vars(twin), "_lock": self._lock, "listeners": self.listeners})
                made.__class__ = LazyTensorStorage
                made.remedy = " Rows of several kinds are for storage=ListStorage(…)."
                made._notify_moved()
        return made

    @property
    def form(self) -> Form:
        return super().form._replace(takes_rows=True)

    share, limit, prepare_rows, schema_here = map(_of_tensors, ("share", "limit", "prepare_rows", "schema_here"))

    def prepare_load(self, state_dict: dict[str, object]) -> StorageLoad:
        if isinstance(state_dict, dict) and state_dict.get("schema"):  # type: ignore[redundant-expr] # a user's
            return self.become_tensors().prepare_load(state_dict)
        return super().prepare_load(state_dict)

    def prepare_part(self, reader: part_reader.PartReader, **options: Any) -> StorageLoad:
        if reader.type in LazyTensorStorage._loads:
            return self.become_tensors().prepare_part(reader, **options)
        return super().prepare_part(reader, **options)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, a LazyTensorStorage if the first rows are dicts)"


DefaultStorage.__name__ = ListStorage.__name__  # which states of it say, and messages
