"""Rows in RAM or on an accelerator, whose memory is allocated at the first write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Unpack

import torch

from engram._tensordict import is_tensor_collection
from engram._words import warn
from engram.limits import Rules
from engram.storages._geometry import OF_DATA, Geometry, LaterArguments, take_later
from engram.storages._structure import Structure, device_of
from engram.storages.announcing import advice, announce, creation_line, warn_of_lanes
from engram.storages.tensor import TensorStorage
from engram.store import DeviceStore, Store, skip_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.format.schema import Schema
    from engram.storages._home import Home

#: empty() did not give the fields up.
_TAKEN = " The fields stay while others have the store open: empty() it before they do, or write a first row that is like all."


class LazyTensorStorage(TensorStorage):
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

    Raises:
        ValueError: ``max_size`` or ``lanes`` out of range, ``lanes`` with ``ndim > 1``.
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

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000))
    >>> rb.extend(torch.arange(6.).reshape(3, 2))
    tensor([0, 1, 2])
    >>> rb.sample(128).shape
    torch.Size([128, 2])
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        lanes: int = 1,
        dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None,
        **later: Unpack[LaterArguments],
    ) -> None:
        take_later(self, later)
        self._configure(Geometry.checked(type(self).__name__, max_size, lanes, ndim, dtypes), device)

    #: How many ticket numbers an earlier store of this storage has given: the next one does not repeat them.
    _given = 0

    def __getstate__(self) -> dict[str, object]:
        self.before_fork()  # other processes cannot, as long as this one has the store open
        return super().__getstate__()

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
            before, limit = self.written(), Rules(*store.core.limit)
            self._looking = True  # it is still there
            try:
                del self.memory
                self._tell_moved()  # samplers keep what their indexes know, as long as there are any
                gone = store.discard(self)
            finally:
                self._looking = False
            if not gone:
                self._adopt(store, before)
                self._tell_moved()
                if error is not None:
                    error.args = (f"{error.args[0]}{_TAKEN}",)
                return False
            self._given, self.pending_limit = given, limit if any(limit) else None
            self._capacity = self._geometry.capacity
            self.structure = None
        return True

    def _initialize(self, data: Any, n: int | None, columns: tuple[int, ...], call: str) -> None:
        if call == "add" and n is None and is_tensor_collection(data) and data.batch_size:
            warn(
                f"add: the first row is a TensorDict of batch size {list(data.batch_size)}; it is stored as one row of "
                "that shape. If it is a batch of rows, use extend()."
            )
        dtypes = self._geometry.dtypes
        structure = Structure.of(data, batched=n is not None, call=call, dtypes=dtypes)
        if dtypes:
            structure.flatten(data, n, call)  # before there is memory: values may not fit
        if self._device_argument in OF_DATA and self._home is None:
            self._device = device_of(data)
        self._adopt(self._allocate(self._geometry.schema(structure, columns)), structure)
        announce(*advice(structure.fields, dtypes))
        warn_of_lanes(self._geometry.max_size, self._geometry.capacity, self._geometry.lanes)

    def allocate_for(self, schema: Schema) -> None:
        with self._lock:
            if self.memory is None:
                self._adopt(self._allocate(schema), Structure.from_schema(schema, self._geometry.dtypes))

    def _allocate(self, schema: Schema) -> Store:
        if self._home is not None:
            return self._allocate_in(self._home, schema, replace=True)
        place = "RAM" if self._device.type == "cpu" else str(self._device)
        store = Store.private(schema) if self._device.type == "cpu" else DeviceStore.on(schema, self._device)
        skip_numbers(store.core, self._given)
        announce(creation_line(schema.fields, schema.capacity, place))
        return store

    def _allocate_in(self, home: Home, schema: Schema, *, replace: bool) -> Store:
        store = home.create(schema, replace=replace, given=self._given)
        folder = store.directory
        assert folder is not None  # it was just created there
        announce(creation_line(schema.fields, schema.capacity, folder))
        return store
