"""Rows by number: reading, editing, removing and emptying them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engram import storages
from engram._support import field_paths, nested, tensordicts
from engram._support.checks import as_ints
from engram.buffer import on_device, write_path
from engram.buffer.configuration import Settings
from engram.buffer.field_updates import CALL, ConditionalUpdateResult, FieldUpdates, add_entries, with_fields
from engram.buffer.prefetching import Prefetching
from engram.buffer.read_path import ReadPath
from engram.buffer.wiring import Wiring
from engram.device.direct import Replays
from engram.errors import EMPTY, RowError
from engram.format.schema import Field
from engram.saved.rows import Boundaries, Roles, boundary_fields, roles_of
from engram.store.device.store import DeviceStore
from engram.store.keys import count_keys
from engram.types import Draw

#: How often a slice is looked up whose rows are evicted before they are read.
_TRIES = 100


class RowAccess:
    """Reads and replaces live rows. It keeps what devices read by themselves, and nothing else."""

    def __init__(self, wiring: Wiring, settings: Settings, reading: ReadPath, prefetching: Prefetching | None) -> None:
        self._wiring = wiring
        self._settings = settings
        self._reading = reading
        self._prefetching = prefetching

    @cached_property
    def replays(self) -> Replays:
        """What draws batches on accelerators, by their devices."""
        return Replays(on_device.OnDevice(self._wiring, self._settings, self._reading))

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def get(self, index: object) -> Any:
        """What ``rb[index]`` returns."""
        if _is_key(index):
            return _entry(self.get(slice(None)), index)
        for _ in range(_TRIES if isinstance(index, slice) and self._wiring.storage.is_ragged else 0):
            # Rows of a slice may lose their items to newer ones meanwhile: then others are live.
            with suppress(RowError):
                return self._get(self._where(index), index)
        return self._get(self._where(index), index)

    def in_order(self, lanes: Tensor | None, end: int | None) -> object:
        """The rows of these lanes, int64 ``[k]``, lane after lane and oldest first, in the form of ``rb[rows]``; at most ``end``. None: all
        in row order.
        """
        if lanes is None:
            return self.get(slice(end))
        rows = self._wiring.storage.extent().in_order(lanes)[:end]
        return self._get(storages.Rows(rows), rows)

    def _get(self, where: storages.Rows, index: object) -> object:
        wiring, reading = self._wiring, self._reading
        if where.view is not None and not wiring.transform.reads:
            data = wiring.storage.view(where, self._entries(where))
        else:
            data = self._read(where)
        if wiring.storage.gets:
            data = wiring.storage.got(index, data)
        stacked = wiring.collates and not (where.single or isinstance(index, int))
        if stacked and data == [] and not len(wiring.storage) and wiring.collate_fn is None:
            raise RuntimeError(EMPTY)
        if stacked:
            data = reading.collated(data)
        if wiring.transform.reads:
            data = wiring.transform.forward(reading.copied(data, stacked=stacked and wiring.collate_fn is None))
        return data

    def _where(self, index: object) -> storages.Rows:
        """The rows an index means: with ``ndim > 1`` it is one into the layout of ``extend``, ``[*columns, T]``."""
        storage = self._wiring.storage
        if not storage.initialized:
            storage.store  # noqa: B018 - raises: nothing was written
        return cast("storages.Rows", storage.locate(index))

    def _read(self, where: storages.Rows) -> object:
        storage = self._wiring.storage
        columns, moved = storage.read(where.rows)
        if moved:
            self._reading.read_again(Draw(where.rows), columns, moved, "rb[index]")
        return storage.pack(columns, where, self._entries(where))

    def _entries(self, where: storages.Rows) -> dict[str, Tensor] | None:
        """Entries that TensorDicts read by number get beside their fields: with ``ndim > 1`` the slot, not the row."""
        wiring = self._wiring
        if not wiring.of_writer.adds_index:
            return None
        width = math.prod(wiring.storage.columns)
        return {"index": wiring.on_device(where.rows if width == 1 else where.rows // width)}

    # ---- editing ---------------------------------------------------------------------------------------------------------

    def set(self, index: object, value: object, call: str = "rb[index] = value") -> None:
        """What ``rb[index] = value`` does."""
        if _is_key(index):
            self.set_field(index, value, slice(None), "rb[key] = value")
            return
        self._check_editable(call)
        wiring = self._wiring
        memory = wiring.storage.memory
        there = isinstance(memory, DeviceStore) and memory.names(index) and wiring.storage.ndim == 1
        where = storages.Rows(cast("Tensor", index)) if there and not wiring.has_listeners() else self._where(index)
        value = self.storable(value, call)
        if wiring.transform.writes:
            value = wiring.transform.inv(write_path.new_containers(value))
        if isinstance(index, slice) and index == slice(None):
            add_entries(wiring.storage, where, value, call, self._settings.ignored)
        prepared = wiring.storage.prepare_at(where, value, call, ignored=self._settings.ignored)
        wiring.storage.notify(wiring.storage.edit(where, prepared), value)

    def storable(self, data: object, call: str) -> Any:  # noqa: ARG002 - TensorDict buffers have such entries
        """Data without the entries that are made on reading."""
        return data

    def set_field(self, key: object, value: object, index: object, call: str) -> None:
        """Replace one stored field of live rows, without transforms."""
        self._check_editable(call)
        storage = with_fields(self._wiring.storage, call)
        path = field_paths.checked_path(key, f"{call}: key")
        storage.notify(storage.edit_fields(self._where(index), {path: value}, call), None)

    def update(self, values: object, keys: Iterable[Any] | None) -> None:
        """Replace several stored fields of all live rows; ``keys``: only these of the values."""
        call = "update_"
        self._check_editable(call)
        if not nested.has_entries(values):
            raise TypeError(f"{call}: input: expected a dict or TensorDict, got {type(values).__name__}.")
        entries = dict(nested.flatten(values))
        if keys is not None:
            if isinstance(keys, str) or tensordicts.is_tensor_collection(keys) or not isinstance(keys, Iterable):
                raise TypeError(f"{call}: keys_to_update: expected a list of keys, got {keys!r:.80}.")
            wanted = [field_paths.checked_path(key, f"{call}: keys_to_update") for key in keys]
            for w in wanted:
                if not any(key[: len(w)] == w for key in entries):
                    raise KeyError(f"{call}: expected keys of the input, {list(entries)}, got {w}.")
            entries = {key: value for key, value in entries.items() if any(key[: len(w)] == w for w in wanted)}
        storage = with_fields(self._wiring.storage, call)
        storage.notify(storage.edit_fields(self._where(slice(None)), entries, call), None)

    def update_if_present(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult:
        """What ``ReplayBuffer.update_if_present`` does."""
        self._check_editable(CALL)
        return FieldUpdates(self._wiring).apply(index, generation, patch, version_key, version, newer=newer)

    def empty(self, lanes: Tensor | None, *, keep_write_count: bool) -> None:
        """What ``ReplayBuffer.empty`` does; ``lanes``, int64 ``[k]``: in these."""
        storage = self._wiring.storage
        if lanes is not None:
            remove_rows(self._wiring, self._wiring.user_index(storage.extent().in_order(lanes)), None)
            return
        storage.empty(keep_write_count=keep_write_count)
        storage.notify(None, None)
        self._wiring.tell_emptied()

    def remove(self, rows: object, generation: object, keys: object) -> int:
        """What ``ReplayBuffer.remove`` does."""
        self._check_editable(REMOVE)
        if (rows is None) == (keys is None) or (keys is not None and generation is not None):
            raise TypeError(f"{REMOVE}: expected rows, and perhaps their generations, or keys=.")
        if keys is None:
            return remove_rows(self._wiring, rows, generation)
        found = self._wiring.storage.keyed(REMOVE)
        return 0 if found is None else self._wiring.storage.remove(*found.all(keys, REMOVE))

    # ---- keys ------------------------------------------------------------------------------------------------------------

    def index_keys(self, field: object) -> None:
        """What ``ReplayBuffer.index_keys`` does."""
        call = "index_keys"
        self._wiring.storage.keyed(call, field_paths.checked_path(field, f"{call}: field"))

    def rows_of(self, keys: object) -> KeyedRows:
        """What ``ReplayBuffer.rows_of`` does."""
        call = "rows_of"
        found = self._wiring.storage.keyed(call)
        if found is None:
            unknown = torch.full((count_keys(keys),), -1, device="cpu")
            return KeyedRows(unknown, unknown.clone())
        return KeyedRows(*found.newest(keys, call))

    # ---- ends ------------------------------------------------------------------------------------------------------------

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """What ``ReplayBuffer.end_trajectory`` does in these lanes, int64 ``[k]``."""
        call = "end_trajectory"
        self._check_editable(call)
        wiring, storage = self._wiring, with_fields(self._wiring.storage, call)
        if wiring.of_writer.rejects:
            raise RuntimeError(
                f"{call}: expected rows in the order of steps, a {type(wiring.writer).__name__} keeps the best ones."
            )
        newest = newest_rows(storage, lanes)
        rows = newest[newest >= 0]
        if len(rows):
            schema = storage.store.schema
            meant = roles_of(schema.fields, roles)
            marks = _marks_of_ends(schema.fields, meant, terminated=terminated, call=call)
            boundaries = Boundaries(schema, meant)
            columns, moved = storage.read(rows)
            if moved:
                self._reading.read_again(Draw(rows), columns, moved, call)
            ends = torch.from_numpy(boundaries.marks([columns[number] for number in boundaries.which]).ends)
            newest[torch.isin(newest, rows[ends])] = -1
            rows = rows[~ends]
            if len(rows):
                entries: dict[field_paths.FieldPath, object] = {}
                for it in (field for field in schema.fields if field.key in marks):
                    shape, dtype = (len(rows), *it.shape), getattr(torch, it.dtype)
                    entries[it.key] = torch.full(shape, marks[it.key], dtype=dtype, device="cpu")
                storage.notify(storage.edit_fields(storages.Rows(rows), entries, call), None)
        index = wiring.user_index(newest)
        return index if storage.ndim == 1 else index.where(wiring.on_device(newest).unsqueeze(-1) >= 0, -1)

    def _check_editable(self, call: str) -> None:
        self._wiring.check_editable(call)
        if self._prefetching is not None:
            self._prefetching.materialize()


def newest_rows(storage: storages.TensorStorage, lanes: Tensor) -> Tensor:
    """The newest row of every column of each lane, int64 ``[k · columns]``; -1: there is none. Rows that hold nothing are skipped."""
    extent, width = storage.extent(), math.prod(storage.columns)
    tracks, column = lanes.repeat_interleave(width), torch.arange(width, device="cpu").repeat(len(lanes))
    filled = torch.tensor(extent.filled, device="cpu")[tracks]
    newest = torch.full_like(tracks, -1)
    for back in range(width, max(extent.filled) + 1, width):
        inside = (newest < 0) & (back <= filled)
        if not bool(inside.any()):
            break
        rows = torch.where(inside, extent.back(tracks, torch.full_like(tracks, back)) + column, 0)
        newest = newest.where(~inside | (storage.tickets_of(rows) < 0), rows)
    return newest


class KeyedRows(NamedTuple):
    """The result of :meth:`ReplayBuffer.rows_of`: int64 ``[n]`` on the CPU, a row and its generation per key; -1 where no row has it.

    >>> import torch
    >>> from engram import KeyedRows
    >>> found = KeyedRows(torch.tensor([3, -1]), torch.tensor([4, -1]))
    >>> found.rows[found.rows >= 0].tolist()
    [3]
    """

    #: Rows, as ``info["index"]`` names them.
    rows: Tensor
    #: The numbers of their writes, as ``info["index_generation"]`` has them.
    generations: Tensor


class _HasRows(Protocol):
    _rows: RowAccess


def index_keys(self: _HasRows, field: str | tuple[str, ...]) -> None:
    """Have rows found by the content of a field, their key: :meth:`rows_of`, and ``remove(keys=…)``.

    Call it once, before the first write or later. The store keeps the index: every write of every process updates it, and a store in
    a folder still has it when it is opened again, without this call. An index that is made when rows are there scans them once. A
    checkpoint does not say it: what is loaded into a buffer with an index is found by it.

    A row is found as soon as the call that wrote it returns, and until the row is overwritten, removed or forgotten, or its key is
    edited. If several live rows have one key, :meth:`rows_of` gives the one that was written last; if that one goes, the one before.

    Args:
        field: a stored field with one integer per row, with texts (``Ragged("utf-8")`` or ``Ragged("bytes")``) of at most 1,024 bytes, or
            with the bytes of a text, uint8 ``[n]``, filled up with zeros.

    Raises:
        KeyError: no such field. TypeError: its content is no key, or the storage has no tensors on this machine's CPU. Before the first
            write, that write raises them, and writes nothing. IncompatibleStore: the store has an index by another field.
        NotImplementedError: a storage with ``ndim > 1``. OSError: no space for its file.

    Cost: 28 bytes per row of the storage, whatever the key; each row written takes O(log rows). Scanning: O(rows).

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> rb.index_keys("uid")
    >>> _ = rb.extend({"uid": torch.tensor([70, 80]), "obs": torch.zeros(2, 3)})
    >>> rb.rows_of([80, 90]).rows.tolist()
    [1, -1]
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
    >>> _ = rb.extend({"uid": ["run-1", "run-22"], "tokens": [torch.arange(2), torch.arange(3)]})
    >>> rb.index_keys("uid")
    >>> rb.rows_of(["run-22", "run-2"]).rows.tolist()
    [1, -1]
    """
    self._rows.index_keys(field)


def rows_of(self: _HasRows, keys: object) -> KeyedRows:
    """Find rows by their keys, the content of the field that :meth:`index_keys` named.

    Rows and generations go to :meth:`update_if_present`, :meth:`update_priority` and :meth:`remove`, which leave a row alone if another
    process has overwritten it meanwhile. -1 names no row there.

    Args:
        keys: an int or several; of texts a str, encoded as UTF-8, bytes, a list of them, or uint8 ``[n, length]``. Zeros at the end of
            a text do not count.

    Returns:
        For each key the row that has it, of several the one that was written last, and its generation: int64 ``[n]`` on the CPU. -1: no
        live row has it. While another process edits the key of a row, the row may be found by neither its old nor its new key.

    Raises:
        RuntimeError: no field was named. TypeError: keys of another kind than the field has; a storage without tensors on this machine's
            CPU. ValueError: a text that is longer than the field, or a number that the field cannot hold.
        WriterStalled: a process has been holding the index for 5 s.

    Cost: O(log rows) per key at most, one native call. Of a store that this process opened with ``readonly=True`` also the rows
    written since the last call; after an edit or a removal all rows.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), writer=RoundRobinWriter(track_generations=True))
    >>> rb.index_keys("uid")
    >>> names = torch.tensor([list(b"ab-1"), list(b"ab-2")], dtype=torch.uint8)
    >>> _ = rb.extend({"uid": names, "reward": torch.zeros(2)})
    >>> found = rb.rows_of(["ab-2", "ab-3"])
    >>> found.rows.tolist()
    [1, -1]
    >>> late = {"reward": torch.tensor([0.5, 0.7])}
    >>> rb.update_if_present(index=found.rows, generation=found.generations, patch=late).updated.tolist()
    [True, False]
    """
    return self._rows.rows_of(keys)


def remove(self: _HasRows, rows: object = None, *, generation: object = None, keys: object = None) -> int:
    """Remove rows, for every process that has the store open. The next writes to their places make them live again.

    A removed row is void, like one whose writer died: draws, windows, slices, epochs, groups, trajectory tables, queries, expanders
    and checkpoints skip it, indexes forget its priority and its counts, ``len(rb)`` is one less, and ``stats()["void_rows"]`` one
    more. A trajectory ends before it, and another one begins behind it. The cursor stays: a ring reuses the row when it comes there, a
    writer that chooses rows takes void ones first.

    Each row is removed as a whole. If the process is killed during the call, some of the rows are removed and the others are as they
    were; the next process to use the store completes the indexes. Batches that were prefetched before still have the rows.

    Items of lists are removed in this process. A connected buffer has its server remove the rows, and one of several stores those of
    each: all stores are asked whether they can before a row goes. Without ``generation`` it asks first what the rows hold, and only
    that is removed, so that a message which is sent again removes no row that was written meanwhile.

    Args:
        rows: as :meth:`update_priority` takes them: an int, or ints ``[n]`` as ``info["index"]`` or :meth:`extend` names them, with
            ``ndim > 1`` coordinates. -1 is passed over.
        generation: ``info["index_generation"]``, or ``rb.writer.generations_of(rows)``: rows that were overwritten since then stay.
            None: rows are removed whatever they hold.
        keys: in place of rows: as :meth:`rows_of` takes them. All rows that have one of these keys are removed, unless they are
            overwritten meanwhile.

    Returns:
        How many rows were removed. Rows that hold nothing, or that are just being written, do not count.

    Raises:
        RowError: a row outside the storage (an ``IndexError``). ValueError: another number of generations than of rows. TypeError: no
            ints; or rows and keys, or neither. With keys as :meth:`rows_of`. In all cases nothing is removed.
        RuntimeError: the storage is one of your own, the buffer is read-only, or its server is of an older engram. ConnectionError: the
            server of a row is gone. If it was there when the stores were asked, rows of other stores may be removed: a note says how
            many.

    Cost: O(n log rows) for the indexes. After it, the next draw of windows, slices or groups of a reader looks at all tickets, O(rows).
    Of a connected buffer three requests to each store.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    >>> rows = rb.extend(torch.arange(4))
    >>> rb.remove(rows[1:3])
    2
    >>> rb[:].tolist(), len(rb), rb.stats()["void_rows"]
    ([0, 3], 2, 2)
    >>> rb.remove(1)
    0
    """
    return self._rows.remove(rows, generation, keys)


def _is_key(index: object) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and len(index) > 0 and all(isinstance(part, str) for part in index)
    )


def _entry(data: object, key: Any) -> object:
    for part in (key,) if isinstance(key, str) else key:
        entries = nested.entries_of(data)
        known = list(map(nested.name_of, entries.keys()))
        if part not in known:
            raise KeyError(f"rb[key]: expected one of {known}, got {part!r}{'' if part == key else f' in {key!r}'}.")
        data = nested.find(entries, (part,))
    return data


#: The step type of the last step of a trajectory, as dm_env numbers them.
_LAST = 2


def _marks_of_ends(
    fields: Sequence[Field], roles: Sequence[str], *, terminated: bool, call: str
) -> dict[field_paths.FieldPath, int]:
    """Path of every field that a new end is written to, and what is written.

    Args:
        fields: of the store.
        roles: what they mean.
        terminated: a new end is a terminal one; else a truncation.
        call: what messages begin with.

    Raises ``RuntimeError``: no field can say that a trajectory ends so.
    """
    meant = boundary_fields(fields, roles)
    kind, other = ("terminated", "truncated") if terminated else ("truncated", "terminated")
    marks = {field.key: 1 for field in (*meant["done"], *meant[kind])} | {field.key: _LAST for field in meant["last"]}
    if not marks:
        got = [field_paths.public(field.key) for field in meant[other]] or [field.name for field in fields]
        raise RuntimeError(
            f"{call}: expected a stored flag that says 'done' or {kind!r}, or a 'step_type', got {got}. Store ('next', {kind!r}), "
            "or name the field that says it with roles=. (Where ids tell trajectories apart, the next step's id ends one.)"
        )
    return marks


REMOVE = "remove"


def remove_rows(wiring: Wiring, index: object, generation: object) -> int:
    """What ``ReplayBuffer.remove`` does, once the buffer may be edited."""
    return cast("int", wiring.storage.remove(*checked_removal(wiring, index, generation)))


def checked_removal(wiring: Wiring, index: object, generation: object) -> tuple[Tensor, Tensor | None]:
    """Rows and their generations, int64 ``[n]`` on the CPU. Raises as ``ReplayBuffer.remove``, once the buffer may be edited."""
    storage = wiring.storage
    if tensordicts.is_tensor_collection(index):
        raise TypeError(f'{REMOVE}: expected rows, got a {type(index).__name__}. Of a sampled batch: batch["index"].')
    index = index[0] if isinstance(index, tuple) and len(index) == storage.ndim == 1 else index
    rows = as_ints(f"{REMOVE}: rows", wiring.rows_named(index)).reshape(-1).contiguous()
    expected = None if generation is None else as_ints(f"{REMOVE}: generation", generation).reshape(-1).contiguous()
    if expected is not None and expected.numel() != rows.numel():
        raise ValueError(
            f"{REMOVE}: expected one generation per row, got {rows.numel()} rows and {expected.numel()} generations."
        )
    storage.check_removal(rows)
    return rows, expected
