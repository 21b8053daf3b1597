"""Rows that grow in a store until they are sealed: answers that are still being generated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn, TypeAlias, cast
from uuid import UUID, uuid4

import torch
from torch import Tensor

from engram._support import checks, native, words
from engram._support.field_paths import checked_path, nested, public
from engram._support.nested import flatten
from engram.buffer.lanes import Lanes
from engram.buffer.wiring import Wiring
from engram.format.schema import name_of
from engram.remote.served import OneStore
from engram.store.limits import checked_timeout
from engram.store.open_rows import OpenRowIndex, OpenRows, OpenSlot
from engram.types import Write

Path: TypeAlias = tuple[str, ...]
#: A key as users write it.
Key: TypeAlias = str | Path
Fields: TypeAlias = Mapping[Path, object]
#: A row that a server has: its slot, how often that was taken, items by the key that leads a group, and whether it is abandoned.
ShownRow: TypeAlias = tuple[int, int, dict[Key, int], bool]
#: Fields by key; the values may be dicts of others.
Given: TypeAlias = Mapping[str, object] | Fields | Mapping[Key, object]


class OpenRow:
    """A row that grows, made by :meth:`ReplayBuffer.open_row`, and listed by :meth:`ReplayBuffer.unsealed`.

    Its items lie in a slot of the store. No sampler draws it, and it outlives its process, until :meth:`seal` makes it a row of the
    buffer or :meth:`discard` gives it up. One thread at a time may change it.

    >>> import torch
    >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
    >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4), batch_size=2)
    >>> row = rb.open_row(prompt=7, late={"reward": 0.0})
    >>> row.append(tokens=[1, 2, 3])
    >>> row.append(tokens=[4])
    >>> row.lengths, len(rb)
    ({'tokens': 4}, 0)
    >>> row.seal(reward=0.5)
    0
    >>> rb[0]["tokens"].tolist(), float(rb[0]["reward"])
    ([1, 2, 3, 4], 0.5)
    """

    def __init__(self, growing: GrowingRows, slot: OpenSlot, lane: int | None) -> None:
        self._growing, self._slot, self._lane = growing, slot, lane

    @property
    def place(self) -> tuple[int, int]:
        """The slot, and how often it was taken: no other row ever has the same."""
        return self._slot.number, self._slot.times

    @property
    def is_mine(self) -> bool:
        """Whether this process has it, and neither sealed nor discarded it."""
        return self._slot.is_mine and self._growing.has(self._slot)

    @property
    def groups(self) -> dict[Path, int]:
        """Of each ragged field, by its path, the place of its length among :attr:`lengths`."""
        rows = self._slot.rows
        return {key: rows.groups[n] for key, n in rows.numbers.items() if n in rows.groups}

    @property
    def lengths(self) -> dict[Key, int]:
        """Items so far, by the key of the field that leads a group."""
        fields = self._slot.rows.schema.fields
        return {public(fields[leader].key): n for leader, n in self._slot.lengths.items()}

    @property
    def fields(self) -> dict[Key, Tensor]:
        """What was given so far, by key: copies. The items of ragged fields, ``[length, *shape]``; texts as bytes, uint8."""
        slot, numbers = self._slot, self._slot.rows.numbers
        return {public(key): slot.value(n).clone() for key, n in numbers.items() if slot.is_given(n)}

    @property
    def is_abandoned(self) -> bool:
        """Whether the process that had it has ended."""
        return self._slot.is_abandoned

    def append(self, data: Given | None = None, /, **fields: object) -> None:
        """Append items to ragged fields. They are there whenever this returns, also if the process dies.

        Args:
            data: a dict of fields, also nested ones. fields: the same by name. Of fields that share lengths as many items at once; of
                those with ``like=`` that are left out the items are zeros, until the row is sealed and they are replaced. Copied.

        Raises:
            KeyError: a field that is not ragged, or not there.
            RuntimeError: more items than ``max_length``, other numbers of items in fields that share lengths, or a field with ``like=``
                without the field that it names; another dtype; the row was sealed or discarded, or belongs to another process. Nothing is
                changed.
            ValueError: JSON, which is written whole.

        Cost: O(bytes), a memcpy.

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> row = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4)).open_row(prompt=7)
        >>> row.append(tokens=[1, 2])
        >>> row.lengths
        {'tokens': 2}
        """
        if self._growing.append_of(self._slot, merged(data, fields)):
            return
        self._check_mine("append")
        given = paths_of(data, fields, self._slot.rows.numbers, "append")
        self._slot.append({}, self._growing.items_of(self._slot, given, "append"))

    def seal(self, data: Given | None = None, /, *, timeout: float | None = None, **fields: object) -> int:
        """Make it a row of the buffer, in one step: whenever this process dies it is a row, or grows on.

        Args:
            data, fields: what it lacks, and perhaps the last items, as for :meth:`append`. Ragged fields that never got any are empty.
            timeout: seconds to wait for a limit of the store; None: for ever.

        Returns:
            The row. This object cannot be used any more.

        Raises:
            KeyError: a field without a value, or one that is not there. RuntimeError, ValueError: as :meth:`append`, and for values of
                another shape or dtype. The row grows on.
            RateLimited, WriterStalled: as :meth:`ReplayBuffer.add`. The row grows on.

        Cost: O(bytes): the items are copied into the ring.

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4))
        >>> row = rb.open_row(prompt=7)
        >>> row.seal(tokens=[1, 2, 3]), len(rb)
        (0, 1)
        """
        wait = checked_timeout(timeout, "seal")
        row = self._growing.seal_of(self._slot, self._lane, merged(data, fields))
        if row is not None:
            return row
        self._check_mine("seal")
        given = paths_of(data, fields, self._slot.rows.numbers, "seal")
        return self._growing.seal(self._slot, self._lane, given, wait)

    def discard(self) -> None:
        """Give the row up, and free its slot. Raises ``RuntimeError``: as :meth:`append`.

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4))
        >>> rb.open_row(prompt=7).discard()
        >>> rb.unsealed()
        []
        """
        self._check_mine("discard")
        self._slot.discard()

    def resume(self) -> OpenRow:
        """Go on with the row of a process that has ended, from its last :meth:`append` on.

        Raises:
            RuntimeError: its process still runs, or another one has resumed it.

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4))
        >>> _ = rb.open_row(prompt=7)
        >>> [row.resume() for row in rb.unsealed() if row.is_abandoned]  # this process has it, and runs
        []
        """
        if not self._slot.take_over():
            raise RuntimeError(
                "resume: expected an open row whose process has ended, got one that a process still has. Choose one of rb.unsealed() whose "
                "is_abandoned is True."
            )
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("pickle: expected sealed rows, got an OpenRow, of one process or client. See rb.unsealed().")

    def _check_mine(self, call: str) -> None:
        if not self.is_mine:
            raise RuntimeError(
                f"{call}: expected an open row of this process, got one that was sealed or discarded, that another process has, or that "
                "share() has moved. Choose one of rb.unsealed(), take it over with resume() if its process has ended, or open another."
            )

    def __repr__(self) -> str:
        lengths = ", ".join(f"{key}={n}" for key, n in self.lengths.items())
        return f"OpenRow({lengths}{', abandoned' * self.is_abandoned})"


class GrowingRows:
    """Opens rows in the store of a buffer, and seals them."""

    def __init__(self, wiring: Wiring, lanes: Lanes) -> None:
        self._wiring, self._lanes = wiring, lanes

    def open(
        self, data: Given | None, fields: Mapping[str, object], late: Given | None, lane: int | None, timeout: float
    ) -> OpenRow:
        """What ``ReplayBuffer.open_row`` returns."""
        self._wiring.check_editable("open_row")
        self._check_appends("open_row")
        storage = self._wiring.storage
        if storage.traits.is_remote:
            lane = self._lane("open_row") if lane is None else self._lanes.checked(lane, "open_row")
            given, later = paths_of(data, fields, (), "open_row"), paths_of(late, {}, (), "open_row: late")
            store, holder = storage.stores(home=True)[0], uuid4()
            asked = {"data": given, "late": None if late is None else later, "lane": lane}
            shown = store.until(timeout, lambda: store.call("open_row", asked, 0, 0, holder))
            return ServedOpenRow(store, shown, lane, holder)
        slots = storage.ragged.open_rows
        rows = self._existing()
        if rows is None and not slots:
            raise RuntimeError(
                "open_row: expected a storage with slots for rows that grow, got none. Make it with ragged={…} and open_rows=…: as many as "
                "grow at once."
            )
        lane = self._lane("open_row") if lane is None else self._lanes.checked(lane, "open_row")
        if storage.memory is None:
            row = storage.ragged.without_items()
            row |= paths_of(data, fields, row, "open_row") | paths_of(late, {}, row, "open_row: late")
            storage.prepare(nested(row), "open_row", batched=False)
        rows = rows or OpenRowIndex.of_store(storage.store, slots)
        intake, whole = storage.written().intake, merged(data, fields)
        slot = rows.take_now() if whole and intake is not None else None
        if slot is not None:
            if slot.append_of(intake, whole, values=True):
                return OpenRow(self, slot, lane)
            slot.discard()
        given = paths_of(data, fields, rows.numbers, "open_row") if data or fields else {}
        columns, ragged = self._sorted(rows, given, "open_row")
        slot = rows.take(timeout)
        try:
            if given:
                slot.append(columns, self.items_of(slot, ragged, "open_row"))
        except BaseException:
            slot.discard()
            raise
        return OpenRow(self, slot, lane)

    def has(self, slot: OpenSlot) -> bool:
        """Whether a slot is of the store that the buffer has now."""
        return slot.rows.store is self._wiring.storage.memory

    def unsealed(self) -> list[OpenRow]:
        """What ``ReplayBuffer.unsealed`` returns."""
        if self._wiring.storage.traits.is_remote:
            each = [(it, it.call("unsealed", {})) for it in self._wiring.storage.stores(home=False)]
            return [ServedOpenRow(store, shown, self._lanes.default or 0) for store, rows in each for shown in rows]
        rows = self._existing()
        return [] if rows is None else [OpenRow(self, slot, None) for slot in rows.taken()]

    def _existing(self) -> OpenRows | None:
        store = self._wiring.storage.memory
        return OpenRowIndex.existing(store) if store is not None and store.schema.ragged else None

    def append_of(self, slot: OpenSlot, data: object) -> bool:
        """Append items in one native call. False: the data must be prepared, or refused."""
        intake = self._wiring.storage.written().intake if self.has(slot) else None
        return intake is not None and slot.append_of(intake, data, values=False)

    def seal_of(self, slot: OpenSlot, lane: int | None, data: object) -> int | None:
        """Seal a row in one native call. None: the data must be prepared or refused, or the limits of the store do not admit a row.

        Raises ``RuntimeError``: the writer says which rows are replaced.
        """
        self._check_appends("seal")
        intake = self._wiring.storage.written().intake if lane is not None and self.has(slot) else None
        try:
            sealed = None if intake is None else slot.seal_of(intake, lane, data)  # type: ignore[arg-type] # there is one
        except native.NotAdmitted:
            return None
        return None if sealed is None else self._noted(*sealed)

    def _noted(self, row: int, number: int) -> int:
        """A row, of which the others are told."""
        storage = self._wiring.storage
        if storage.has_listeners if len(storage.listeners) > 1 else self._wiring.of_sampler.listens:
            storage.notify(Write(torch.tensor([row], device="cpu"), number), None)
        return row

    def seal(self, slot: OpenSlot, lane: int | None, data: Fields, timeout: float) -> int:
        """What :meth:`OpenRow.seal` returns."""
        schema = slot.rows.schema
        columns, ragged = self._sorted(slot.rows, data, "seal")
        given = self.items_of(slot, ragged, "seal")
        # Ragged fields may be empty, but JSON may not.
        may_lack = {*columns, *(number for number, it in schema.ragged.items() if it.kind != "json")}
        lacking = [
            name_of(field.key)
            for number, field in enumerate(schema.fields)
            if not (number in may_lack or slot.is_given(number) or field.key in ragged)
        ]
        if lacking:
            raise KeyError(
                f"seal: expected a value for each field, got none for {', '.join(map(repr, lacking))}. Give them now."
            )
        return self._sealed(slot, self._lane("seal") if lane is None else lane, columns, given, timeout)

    def _check_appends(self, call: str) -> None:
        """Raise ``RuntimeError``: the writer says which rows are replaced, and a row that grows has nothing to say it by."""
        if not (self._wiring.of_writer.appends or self._wiring.of_writer.read_only):
            named = f"{call}: expected a writer that appends rows, got {type(self._wiring.writer).__name__}, which places them. "
            raise RuntimeError(named + "Write whole rows with extend, or use a RoundRobinWriter and no remover.")

    def _lane(self, call: str) -> int:
        """The lane of a row for which none was named."""
        default = self._lanes.default
        return int(self._wiring.storage.unnamed_lanes(call, batched=False)[0]) if default is None else default

    def _sealed(
        self, slot: OpenSlot, lane: int, columns: dict[int, Tensor], items: dict[int, dict[int, Tensor]], timeout: float
    ) -> int:
        try:
            return self._noted(*slot.seal(lane, columns, items))
        except native.NotAdmitted as refused:
            if timeout < 0:
                raise
            again = (slot, lane, columns, items, -1.0)
            wiring = self._wiring
            return wiring.gate.written(lambda _: self._sealed(*again), wiring.storage.memory, refused, timeout)

    # ---- what is given -------------------------------------------------------------------------------------------------

    def _sorted(self, rows: OpenRows, data: Fields, call: str) -> tuple[dict[int, Tensor], dict[Path, object]]:
        """The columns of fields of one size, by number, and what is given of ragged ones. Raises ``KeyError``: no such field."""
        structure, numbers = self._wiring.storage.written(), rows.numbers
        columns, ragged = {}, {}
        for key, value in data.items():
            if key not in numbers:
                names = [*map(public, numbers)]
                raise KeyError(
                    f"{call}: expected fields of {names}, got {public(key)!r}. The first row names them: open_row(late={{…}})."
                )
            if numbers[key] in rows.groups:
                ragged[key] = value
            else:
                columns[numbers[key]] = structure.column(numbers[key], value, (1,), call=call)[0].contiguous()
        return columns, ragged

    def items_of(self, slot: OpenSlot, data: Fields, call: str) -> dict[int, dict[int, Tensor]]:
        """The items of ragged fields, by group and then by number. There is room for them. Raises as :meth:`OpenRow.append`."""
        structure, rows = self._wiring.storage.written(), slot.rows
        given: dict[int, dict[int, Tensor]] = {}
        for key, value in data.items():
            number = rows.numbers.get(key, -1)
            if number not in rows.groups:
                names = [public(rows.schema.fields[it].key) for it in rows.groups]
                raise KeyError(f"{call}: expected ragged fields, of {names}, got {public(key)!r}. seal() takes others.")
            if rows.schema.ragged[number].kind == "json" and slot.length(number):
                raise ValueError(
                    f"{call}: {public(key)!r}: expected no JSON behind what is there already. Give it whole, once."
                )
            given.setdefault(rows.groups[number], {})[number] = structure.items_in(number, value, call)
        for items in given.values():
            self._check_room(slot, items, call)
        return given

    @staticmethod
    def _check_room(slot: OpenSlot, items: Mapping[int, Tensor], call: str) -> None:
        schema = slot.rows.schema
        sizes = {number: values.shape[0] for number, values in items.items()}
        number, n = next(iter(sizes.items()))
        if any(size != n for size in sizes.values()):
            said = {public(schema.fields[it].key): size for it, size in sizes.items()}
            raise RuntimeError(
                f"{call}: expected as many items in fields of one length, got {said}. Give each its own."
            )
        before, most = slot.length(number), schema.ragged[number].max_length
        leader = schema.ragged_groups[slot.rows.groups[number]].leader
        named = public(schema.fields[leader].key)
        if leader not in items:
            raise RuntimeError(
                f"{call}: {public(schema.fields[number].key)!r}: expected it beside {named!r}, whose lengths it has, got it alone."
            )
        if before + n > most:
            raise RuntimeError(
                f"{call}: {named!r}: expected at most {words.count(most, 'item')} a row, its max_length, got {before} and {n} "
                "more. Seal the row, or make the storage with a larger max_length."
            )


class ServedOpenRow(OpenRow):
    """A row that grows in a store that a server has open, which calls the methods of the row.

    What is sent again after a server was lost is done once: an append says how many items there were before, and a row is sealed or
    discarded by the one call that finds it.
    """

    def __init__(self, store: OneStore, shown: ShownRow, lane: int, holder: UUID | None = None) -> None:
        self._store, self._lane, self._holder = store, lane, holder
        *self._id, self._known, self._ended = shown

    @property
    def lengths(self) -> dict[Key, int]:
        return dict(self._known)

    @property
    def fields(self) -> dict[Key, Tensor]:
        return cast("dict[Key, Tensor]", self._call("show", {}))

    @property
    def is_abandoned(self) -> bool:
        return self._ended

    def _call(self, name: str, given: Mapping[str, object]) -> object:
        return self._store.call(name, given, *self._id, self._holder)

    def _changed(self, call: str, data: Given | None, fields: Mapping[str, object], **more: object) -> object:
        if self._holder is None:
            raise RuntimeError(
                f"{call}: expected an open row that this client has, got one that was sealed or discarded, or only listed. Resume it "
                "first, if it is_abandoned, or open another."
            )
        return self._call(call, {"lengths": self._known, "data": paths_of(data, fields, (), call), **more})

    def append(self, data: Given | None = None, /, **fields: object) -> None:
        self._known = cast("dict[Key, int]", self._changed("append", data, fields))

    def seal(self, data: Given | None = None, /, *, timeout: float | None = None, **fields: object) -> int:
        def sealed() -> object:
            with self._store.admitted(1):
                return self._changed("seal", data, fields, lane=self._lane)

        row = cast("int", self._store.until(checked_timeout(timeout, "seal"), sealed))
        self._holder = None
        return row if row < 0 else row + self._store.first

    def discard(self) -> None:
        self._changed("discard", None, {})
        self._holder = None

    def resume(self) -> OpenRow:
        holder = self._holder or uuid4()
        *_, self._known, _ = cast("ShownRow", self._store.call("resume", {}, *self._id, holder))
        self._holder, self._ended = holder, False
        return self


class Grows:
    """Has rows that grow."""

    _wiring: Wiring
    _lanes: Lanes

    def open_row(
        self,
        data: Given | None = None,
        /,
        *,
        lane: int | None = None,
        timeout: float | None = None,
        late: Given | None = None,
        **fields: object,
    ) -> OpenRow:
        """Open a row that grows: items are appended to it as they are generated, and :meth:`OpenRow.seal` makes it a row.

        Args:
            data: a dict of fields, also nested ones, that are known already. fields: the same by name.
            lane: the ring that it is appended to in the end; default as for :meth:`add`.
            timeout: seconds to wait until one of the ``open_rows`` of the storage is free; None: for ever.
            late: of the first row ever, the fields that only :meth:`OpenRow.seal` gives: values of their dtype and shape.

        Raises:
            RuntimeError: the storage has no ``open_rows``, or no ragged fields; as :meth:`OpenRow.append`.
            KeyError: a field that is not there. RateLimited: no slot was free in time. OSError: first write to a full disk.

        Cost: O(open rows), some microseconds. Without a sampler's notice: open rows are not drawn, saved or counted.

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4), batch_size=2)
        >>> row = rb.open_row(prompt=7)
        >>> row.append(tokens=[1, 2, 3])
        >>> row.seal(), rb[0]["tokens"].tolist()
        (0, [1, 2, 3])
        """
        wait = checked_timeout(timeout, "open_row")
        return GrowingRows(self._wiring, self._lanes).open(data, fields, late, lane, wait)

    def unsealed(self) -> list[OpenRow]:
        """The rows that grow in the store, of all processes: also those of processes that have died, which may be resumed.

        Cost: O(open rows).

        >>> import torch
        >>> from engram import LazyTensorStorage, Ragged, ReplayBuffer
        >>> fields = {"tokens": Ragged(torch.int32, max_length=100)}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10, ragged=fields, open_rows=4), batch_size=2)
        >>> row = rb.open_row(prompt=7)
        >>> row.append(tokens=[1, 2, 3])
        >>> [(it.fields["prompt"].item(), it.lengths) for it in rb.unsealed()]
        [(7, {'tokens': 3})]
        """
        return GrowingRows(self._wiring, self._lanes).unsealed()


def merged(data: Given | None, fields: Mapping[str, object]) -> object:
    """A dict of fields, or those by name; None: there are both."""
    return fields if data is None else None if fields else data


def paths_of(data: Given | None, named: Mapping[str, object], known: Collection[Path], call: str) -> dict[Path, object]:
    """Fields by path, of a dict that may be nested and of keywords. ``known``: fields, whose values may be dicts.

    Raises ``TypeError``: it is no dict.
    """
    if data is not None:
        checks.check_type(call, data, dict, "a dict of fields", f"Write {call}({{…}}), or name them.")
    found: dict[Path, object] = {}
    for key, value in (*(data or {}).items(), *named.items()):
        path = (key,) if isinstance(key, str) else checked_path(key, call)
        if isinstance(value, dict) and path not in known:
            found |= {(*path, *inner): leaf for inner, leaf in flatten(value)}
        else:
            found[path] = value
    return found
