"""Fields of rows that are there: updates of rows that were drawn, also in the background, and new fields."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram._support import fork, native, tensordicts, unsupported, words
from engram._support.checks import as_ints
from engram._support.copies import raw_bytes
from engram._support.field_paths import FieldPath, checked_path, nested
from engram._support.nested import find, flatten, has_entries
from engram.buffer.output import Source
from engram.buffer.wiring import Wiring
from engram.errors import RowError
from engram.format.schema import Field
from engram.inspect.plots import check_here
from engram.storages import Rows, Storage, TensorStorage, _columns, _structure
from engram.storages._types import as_tensor, cast
from engram.store import adding, memory, open_rows, ragged_rows
from engram.types import Write

CALL = "update_if_present"


@dataclass(frozen=True)
class ConditionalUpdateResult:
    """The result of :meth:`ReplayBuffer.update_if_present` for each entry. Tensors of the shape of ``generation``.

    >>> import torch
    >>> from engram import LazyTensorStorage, PrioritizedReplayBuffer
    >>> rb = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"obs": torch.zeros(10, 3), "value": torch.zeros(10)})
    >>> batch, info = rb.sample(return_info=True)
    >>> patch = {"value": torch.ones(4)}
    >>> result = rb.update_if_present(index=info["index"], generation=info["index_generation"], patch=patch)
    >>> result.updated.tolist()
    [True, True, True, True]
    >>> len(result), result[:2].updated.shape
    (4, torch.Size([2]))
    """

    #: bool: the row held what was drawn, and has the patch now.
    updated: Tensor
    #: bool: the row held what was drawn, but its version was too new; None without versions.
    version_rejected: Tensor | None
    #: int64: the number of the row's write, which an update leaves as it is; -1 where nothing was updated.
    generation: Tensor

    @property
    def batch_size(self) -> torch.Size:
        """The shape of ``generation``."""
        return self.updated.shape

    def __len__(self) -> int:
        """The first dimension. Raises ``TypeError``: there is none."""
        return len(self.updated)

    def __getitem__(self, index: object) -> ConditionalUpdateResult:
        """The result of some of the entries, as tensors are indexed: views where those would be."""
        rejected = self.version_rejected
        return ConditionalUpdateResult(
            self.updated[index],  # type: ignore[index]
            None if rejected is None else rejected[index],  # type: ignore[index]
            self.generation[index],  # type: ignore[index]
        )

    def to_tensordict(self) -> tensordicts.TensorDict:
        """A TensorDict of copies of the tensors.

        >>> import torch
        >>> from engram import ConditionalUpdateResult
        >>> result = ConditionalUpdateResult(torch.tensor([True]), None, torch.tensor([7]))
        >>> result.to_tensordict()["generation"]
        tensor([7])
        """
        named = {"updated": self.updated, "version_rejected": self.version_rejected, "generation": self.generation}
        present = {name: tensor.clone() for name, tensor in named.items() if tensor is not None}
        return tensordicts.tensordict_type()(present, batch_size=self.batch_size)

    @property
    def updated_count(self) -> int:
        """Entries that were written."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Entries that were rejected by their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Entries whose row was written or forgotten since."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


#: What is done of some entries already.
_Done: TypeAlias = ConditionalUpdateResult | None


class FieldUpdates:
    """Patches the rows of a buffer. It keeps nothing of its own."""

    def __init__(self, wiring: Wiring) -> None:
        storage = wiring.storage
        if storage.traits.is_remote:
            raise unsupported.refused(CALL, "Edit them where the store is.")
        if not isinstance(storage, TensorStorage):
            raise RuntimeError(f"{CALL}: expected a tensor storage, a {type(storage).__name__} has no fields.")
        if not (wiring.of_writer.tracks_tickets or wiring.of_sampler.prioritized):
            raise RuntimeError(
                f"{CALL}: expected a writer with track_generations=True, whose batches carry index_generation, got "
                f"{wiring.writer!r}."
            )
        self._wiring, self._storage = wiring, storage

    def apply(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult:
        """What ``ReplayBuffer.update_if_present`` does, once the buffer may be edited."""
        result = self._applied_natively(index, generation, patch, version_key, version, newer=newer)
        if result is not None and (version_key is None or not result.stale_count):
            return result
        rows, expected = self._named(index, generation)
        batch = expected.shape
        which, columns, versions = self._checked(patch, version_key, version, batch)
        expected, rejected = expected.reshape(-1), None
        if versions is None:
            write, numbers = self._storage.patch_fields(rows, which, columns, expected)
            if len(write.rows):
                self._storage.notify(write, None)
        else:
            columns, which = [*columns, versions[1]], [*which, versions[0]]
            numbers, rejected = self._newer(rows, expected, which, columns, result, newer)
            rejected = self._wiring.on_device(rejected.reshape(batch))
        numbers = numbers.reshape(batch)
        place = self._wiring.on_device
        updated = place(torch.from_numpy(np.asarray(numbers.numpy() >= 0)))
        return ConditionalUpdateResult(updated=updated, version_rejected=rejected, generation=place(numbers))

    def apply_once(
        self, index: object, generation: object, tickets: object, *, require_newer: bool, **given: object
    ) -> tuple[Tensor, ...]:
        """As :meth:`apply`, of rows that still have these tickets, ``[*batch]``: the same call has no second effect. None: it writes
        nothing. ``given``: the patch, and versions.

        Returns of each entry whether its version was rejected; the number of its write, -1 where nothing was updated; and of other rows
        that hold the write the ticket that they have now, and again the number where they have the patch, else -1.
        """
        self._wiring.check_editable(CALL)
        rows, expected = self._named(index, generation)
        which, columns, versions = self._checked(batch=(batch := expected.shape), **given)
        known = torch.full_like(rows, -1) if tickets is None else as_ints(f"{CALL}: tickets", tickets).reshape(-1)
        expected, store = expected.reshape(-1), self._storage.store
        if len(known) != len(rows):
            raise ValueError(f"{CALL}: tickets: expected one per row, {len(rows)}, got {len(known)}.")
        if versions is not None:
            columns, which = [*columns, versions[1]], [*which, versions[0]]
        numbers, rejected = torch.full_like(rows, -1), torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        if tickets is not None:
            held = store.tickets_of_writes(rows, expected)
            held, newer = held.where(held == known, -1), require_newer if versions else None
            numbers, rejected = self._patched(rows, held, which, columns, newer)
        others = store.tickets_of_writes(rows, expected.where((numbers < 0) & ~rejected, -1))
        found, moved = store.read(rows.clamp(min=0), expected=others, which=which)
        alike, pairs = torch.full_like(rows, -1), [*zip(map(_rows_of, found), map(_rows_of, columns), strict=True)]
        for i in (others >= 0).nonzero().flatten().tolist():
            if i not in moved and all(torch.equal(raw_bytes(one[i]), raw_bytes(other[i])) for one, other in pairs):
                alike[i] = expected[i]
        return rejected.reshape(batch), numbers.reshape(batch), others.reshape(batch), alike.reshape(batch)

    def _patched(
        self, rows: Tensor, tickets: Tensor, which: Sequence[int], columns: Sequence[Tensor], newer: bool | None
    ) -> tuple[Tensor, Tensor]:
        """Patch rows that have these tickets, where their versions, the last field, allow it; ``newer``: None: there are none.

        Returns the numbers of the writes, -1 where nothing was updated; and which versions were rejected.
        """
        rejected = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        if newer is not None:
            wins, live = map(torch.from_numpy, self._newest(rows, tickets, which[-1], columns[-1], newer=newer))
            tickets, rejected = tickets.where(wins, -1), live & ~wins
        write, numbers = self._storage.patch_fields(rows, which, columns, tickets, unedited=True)
        if len(write.rows):
            self._storage.notify(write, None)
        return numbers, rejected

    def _newer(
        self, rows: Tensor, expected: Tensor, which: Sequence[int], columns: Sequence[Tensor], done: _Done, newer: bool
    ) -> tuple[Tensor, Tensor]:
        """Patch rows where their versions allow it: the last field. Rows that others edit between the look and the patch come again.

        Returns as :meth:`_patched`. ``done``: of some entries.
        """
        numbers, rejected = torch.full_like(expected, -1), torch.zeros(expected.shape, dtype=torch.bool)
        if done is not None and done.version_rejected is not None:
            numbers, rejected = done.generation, done.version_rejected
        at, again = ((numbers < 0) & ~rejected).nonzero().squeeze(1), done is not None
        while len(at):
            tickets = self._storage.store.tickets_of_writes(rows[at], expected[at])
            if again and not bool((tickets >= 0).any()):
                break
            again, values = True, [column[at] for column in columns]
            numbers[at], rejected[at] = self._patched(rows[at], tickets, which, values, newer)
            at = at[(numbers[at] < 0) & ~rejected[at]]
        return numbers, rejected

    def _applied_natively(
        self, index: object, generation: object, patch: object, version_key: object, version: object, *, newer: bool
    ) -> ConditionalUpdateResult | None:
        """The short path, of tensors that lie as the core reads them. None: nothing was written, and Python looks at them."""
        if self._storage.ndim > 1 or not isinstance(index, Tensor) or not isinstance(generation, Tensor):
            return None
        versions = self._versions(version_key, version, generation.shape)
        field, given = (-1, None) if versions is None else versions
        try:
            made = self._storage.write_natively(
                lambda core, intake: core.patch_of(intake, index, generation, patch, field, given, newer)
            )
        except IndexError:  # a row outside the storage
            return None
        if made is None:
            return None
        first, kept, numbers, updated, rejected = made
        if kept and self._storage.listeners:
            self._storage.notify(Write(index if kept == len(index) else index[updated], first), None)
        return ConditionalUpdateResult(updated, rejected, numbers)

    def check(self, rows: Tensor, patch: object, version_key: object, version: object) -> None:
        """Raise what :meth:`apply` would of these rows, ``[n]``. Nothing is written."""
        most = self._storage.max_size
        outside = rows[(rows < -1) | (rows >= most)]
        if len(outside):
            raise RowError(f"{CALL}: expected rows in [-1, {most}), got {int(outside[0])}.")
        self._checked(patch, version_key, version, rows.shape)

    def _checked(
        self, patch: object, version_key: object, version: object, batch: torch.Size
    ) -> tuple[Sequence[int], list[Tensor], tuple[int, Tensor] | None]:
        """The fields of a patch and their columns, and what :meth:`_versions` returns."""
        entries, dims = dict(entries_of_patch(patch)), self._storage.ndim
        if dims > 1:  # what is laid out as the data of extend comes in the order of its index
            time, of = self._storage.dim_extend, self._storage.columns
            laid_out = (*of[:time], batch.numel() // math.prod(of), *of[time:])
            for key, value in entries.items():
                if isinstance(value, Tensor | np.ndarray) and tuple(value.shape[:dims]) == laid_out:
                    entries[key] = torch.as_tensor(value).movedim(time, 0)
        try:
            which, columns = self._storage.written().columns(entries, batch, call=CALL, loose=True)
        except RuntimeError as error:  # TorchRL's class
            raise ValueError(str(error)) from None
        versions = self._versions(version_key, version, batch)
        if versions is not None and versions[0] in which:
            path = self._storage.written().fields[versions[0]].key
            raise ValueError(f"{CALL}: expected a patch without the version key, got {path}. Pass it as version.")
        return which, columns, versions

    def _named(self, index: object, generation: object) -> tuple[Tensor, Tensor]:
        """Rows ``[n]`` and generations ``[*batch]``. Both may be spread over the batch dimensions of rows, as batches have them."""
        expected, own = as_ints(f"{CALL}: generation", generation), len(self._wiring.storage.written().root.batch)
        rows = self._wiring.rows_named(index)
        rows = as_ints(f"{CALL}: index", rows[0] if isinstance(rows, tuple) and len(rows) == 1 else rows)
        if own and expected.ndim > own and rows.shape == expected.shape:
            rows, expected = (x.flatten(x.ndim - own)[..., 0] for x in (rows, expected))
        if rows.numel() != expected.numel():
            raise ValueError(
                f"{CALL}: expected one generation per row, got {list(rows.shape)} rows and {list(expected.shape)} generations."
            )
        return rows.reshape(-1).contiguous(), expected

    def _versions(self, key: object, version: object, batch: torch.Size) -> tuple[int, Tensor] | None:
        """The field that holds versions, and those to compare, as rows of it."""
        if (key is None) != (version is None):
            raise ValueError(f"{CALL}: expected version_key and version together, got one of them.")
        if key is None:
            return None
        if isinstance(key, str) and "." in key:
            raise ValueError(f"{CALL}: version_key: expected a tuple, {tuple(key.split('.'))}, got {key!r}.")
        structure = self._storage.written()
        number = structure.field_of(checked_path(key, f"{CALL}: version_key"), CALL)
        field = structure.fields[number]
        if any(size != 1 for size in field.shape):
            raise ValueError(
                f"{CALL}: version_key: expected one number per row, field {field.name} has shape {list(field.shape)}."
            )
        given = version if isinstance(version, Tensor) else np.asarray(version)
        shape = (*batch, *field.shape)
        if math.prod(given.shape) == 1:
            given = given.expand(shape) if isinstance(given, Tensor) else np.broadcast_to(given, shape)
        elif math.prod(given.shape) == batch.numel():
            given = given.reshape(shape)
        typed = isinstance(version, Tensor | np.ndarray | np.generic)  # others have no dtype of their own
        try:
            return number, structure.column(number, given if typed else given.tolist(), batch, call=CALL)
        except RuntimeError as error:  # TorchRL's class
            raise ValueError(str(error)) from None

    def _newest(
        self, rows: Tensor, expected: Tensor, field: int, incoming: Tensor, *, newer: bool
    ) -> tuple[np.typing.NDArray[np.bool_], np.typing.NDArray[np.bool_]]:
        """Which entries are to be written, and which rows hold what was drawn: bool ``[n]``.

        Their versions are those under the tickets expected: a row that gets another one until it is written is left alone. Any
        version is newer than NaN.
        """
        live = expected.numpy() >= 0
        columns, moved = self._storage.store.read(rows.clamp(min=0), expected=expected, which=(field,))
        live[moved] = False
        stored, given = _comparable(columns[0]), _comparable(incoming)
        wins, floating = np.empty_like(live), stored.dtype == np.float64
        held, brought, here, won = stored.ctypes.data, given.ctypes.data, live.ctypes.data, wins.ctypes.data
        native.pick_newest(rows.data_ptr(), len(rows), held, brought, floating, newer, here, won)
        return wins, live


def _rows_of(column: Tensor) -> Sequence[Tensor]:
    """The rows of a field."""
    items = ragged_rows.items_in(column)
    return column.unbind() if items is None else items.rows()


def entries_of_patch(patch: object) -> Iterator[tuple[FieldPath, object]]:
    """The entries of a patch by their paths. Keys may be tuples, and values be nested."""
    if not has_entries(patch):
        raise TypeError(f"{CALL}: patch: expected a dict or TensorDict, got {type(patch).__name__}.")
    for key, value in patch.items():  # type: ignore[attr-defined]
        path = checked_path(key, f"{CALL}: patch")
        if has_entries(value):
            yield from flatten(value, path)
        else:
            yield path, value


def _comparable(values: Tensor) -> np.typing.NDArray[np.int64] | np.typing.NDArray[np.float64]:
    """In the same order, as the core compares them."""
    values = values.detach().to("cpu").reshape(-1)
    if values.is_floating_point():
        return values.double().numpy()
    if values.dtype is torch.uint64:
        return (values.numpy() ^ np.uint64(1 << 63)).view(np.int64)
    return values.to(torch.int64).numpy()


_CALL = "add_field"


class _Writes(Protocol):
    takes_tensordicts: bool


class _Stored(Protocol):
    @property
    def _writing(self) -> _Writes: ...
    @property
    def storage(self) -> Storage: ...


def add_field(self: _Stored, key: str | tuple[str, ...], example: object, *, fill: object = 0) -> None:
    """Add a field to a buffer that holds rows: one column more in its store, for all processes that have it open.

    Every row has ``fill`` in it, until it is written with a value. From now on the field is one of those of ``rb[i]``, :meth:`sample`,
    dumps and checkpoints. Data that is written may leave it out, and gets ``fill`` then: a writer that does not know of the field goes on
    as before. Other handles, also in other processes, have it from their next call on; a batch that was prefetched stays as it is.

    Of a store in shared memory or in a folder, the field is there in all rows, or not at all, whenever this process is killed. Adding
    the same field again changes nothing, so every process of a program may do so.

    Args:
        key: of the field; a tuple for one inside of others. Containers that are missing are made.
        example: its value in one row: a tensor, array or number, which says shape and dtype, as for :meth:`add`. Its content is not read.
        fill: a number, or a value of that shape.

    Raises:
        ValueError: there is a field of that key with another dtype, shape or fill; a buffer of TensorDicts, whose writes drop
            ``"index"`` and ``"index_generation"``; rows that take no entry more, such as tuples; a fill
            that the dtype does not hold, or of another shape.
        TypeError: an example that is no tensor, array or number; a list storage.
        RuntimeError: nothing was ever written: the first row says the fields. Rows on an accelerator. Slots of :meth:`open_row`, which
            have no room for it. A connection: call it where the store is.
        OSError: no space; the folder has a file of that name. ReadOnlyStore: the buffer only reads.
        WriterStalled: another thread or process was writing, or had paused the store, for 15 seconds. StoreInUse: another process is
            opening or closing it. Nothing is changed, whatever is raised.

    Cost: O(capacity) for the column. Writers wait while it is put in place, about a millisecond.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> _ = rb.extend({"reward": torch.ones(3)})
    >>> rb.add_field("value", torch.zeros(1), fill=-1.0)
    >>> _ = rb.add({"reward": 2.0, "value": torch.tensor([5.0])})
    >>> _ = rb.add({"reward": 3.0})
    >>> rb["value"].flatten()
    tensor([-1., -1., -1.,  5., -1.])
    """
    storage = _checked(self.storage)
    path = checked_path(key, f"{_CALL}: key")
    if self._writing.takes_tensordicts and path[0] in ("index", "index_generation"):
        raise ValueError(
            f"{_CALL}: key: expected another key than {key!r}: a {type(self).__name__} drops {path[0]!r} of what is written, as "
            "its batches say there which rows they are. Choose another name."
        )
    given = nested({(*key,) if isinstance(key, tuple | list) else (key,): 0})
    if _has_int(given, path, {one.key for one in storage.store.schema.fields}):
        raise TypeError(
            f"{_CALL}: key: expected new keys that are strings, got {key!r}. Rows have ints from the first one on."
        )
    fields = _structure.Structure.of(nested({path: example}), batched=False, call=_CALL).fields
    if len(fields) != 1 or fields[0].key != path:
        raise TypeError(f"{_CALL}: example: expected a tensor, an array or a number, got {type(example).__name__}.")
    _add(storage, fields[0], _row(fields[0], fill))


def with_fields(storage: Storage, call: str) -> TensorStorage:
    """A storage. Raises ``TypeError``: its rows have no fields."""
    if not isinstance(storage, TensorStorage):
        raise TypeError(f"{call}: expected a tensor storage, a {type(storage).__name__} has no fields.")
    return storage


def _checked(given: Storage) -> TensorStorage:
    check_here(given, _CALL)
    storage = with_fields(given, _CALL)
    if storage.memory is None:
        raise RuntimeError(f"{_CALL}: expected a store; nothing was ever written. Write the field in the first row.")
    storage.memory.check_writable()
    if storage.memory.schema.ragged and open_rows.OpenRowIndex.existing(storage.memory) is not None:
        raise RuntimeError(
            f"{_CALL}: expected a store without slots for rows that grow, got one whose slots have no room for more fields. Write the "
            "field in the first row, or make the storage without open_rows."
        )
    if not storage.memory.is_native:
        raise RuntimeError(
            f"{_CALL}: expected rows on the CPU, got those of {storage.memory.place}. Write the field in the first row."
        )
    return storage


def _row(field: Field, fill: object) -> bytes:
    """A row of the field that holds a fill."""
    dtype, shape = memory.DTYPE_OF[field.dtype], torch.Size(field.shape)
    given = as_tensor(fill, field.key, f"{_CALL}: fill", dtype).detach().cpu()
    value = given if given.dtype is dtype else cast(given, dtype)
    if value is None:
        raise ValueError(f"{_CALL}: fill: expected a value that {field.dtype} holds, got {fill!r:.80}.")
    if value.numel() != 1 and value.shape != shape:
        raise ValueError(f"{_CALL}: fill: expected a number, or shape {list(shape)}, got {list(value.shape)}.")
    row = torch.empty(shape, dtype=dtype, device="cpu").copy_(value.reshape(()) if value.numel() == 1 else value)
    return row.reshape(-1).view(torch.uint8).numpy().tobytes()


def _add(storage: TensorStorage, field: Field, fill: bytes) -> None:
    with words.raise_as(ValueError, _CALL):
        adding.add_field(storage.store, field, fill)


def add_entries(storage: Storage, where: Rows, data: object, call: str, ignored: Iterable[str]) -> None:
    """Add the fields of data ``[*batch, ...]`` for some rows that are not stored yet, filled with zeros.

    Nothing is done if there are none, or if no field can be added: then writing the data says what is wrong.

    Raises:
        KeyError, RuntimeError, TypeError: the other entries are not those of the rows. Nothing is changed.
        As :func:`add_field`.
    """
    if not isinstance(storage, TensorStorage) or not storage.store.is_native or not has_entries(data):
        return
    structure, schema, new = storage.written(), storage.store.schema, []
    known, dims = {field.key for field in structure.fields}, storage.ndim
    for path, leaf in flatten(data):
        if path in known or path[0] in ignored:
            continue
        field = None if _has_int(data, path, known) else _field(path, leaf, dims, call)
        if field is None:
            return
        try:
            schema = schema.grown(field, bytes(field.row_bytes))
        except ValueError:
            return
        new.append(field)
    if new:
        rows = data if where.shape is None else _columns.rows_of_selection(data, where.shape, call, structure)
        structure.grown(schema).flatten(rows, len(where.rows), call, ignored)
        for field in new:
            _add(storage, field, bytes(field.row_bytes))


def _field(path: FieldPath, leaf: object, dims: int, call: str) -> Field | None:
    try:
        value: Tensor = as_tensor(leaf, path, call)
    except TypeError:
        return None
    if value.dtype not in memory.DTYPE_NAMES or value.ndim < dims:
        return None
    return Field(path, memory.DTYPE_NAMES[value.dtype], tuple(value.shape[dims:]))


def _has_int(data: object, path: FieldPath, known: set[FieldPath]) -> bool:
    """Whether a key on the way to an entry of data is an int that is no key of the rows yet."""
    for at, name in enumerate(path):
        new = not any(one[: at + 1] == path[: at + 1] for one in known)
        if new and isinstance(data, dict) and name not in data:
            return True
        data = find(data, (name,))
    return False


class Updated(Protocol):
    """A buffer, or an ensemble of some."""

    _reading: Source
    _wiring: Wiring
    update_if_present: Callable[..., ConditionalUpdateResult]

    @property
    def service_backend(self) -> str:
        """Where it runs."""


class AfterUpdates:
    """Batches that are drawn after the updates that were submitted before."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.after_fork()
        fork.registered(self)

    def after_fork(self) -> None:
        """In a child: the thread is its parent's, and so is what it has to do."""
        self._lock = fork.lock()
        self._submitted: deque[Future[ConditionalUpdateResult]] = deque()
        self._thread = ThreadPoolExecutor(1, "engram-updates")

    def submit(self, update: Callable[[], ConditionalUpdateResult]) -> Future[ConditionalUpdateResult]:
        """Have an update made behind those that were submitted before."""
        with self._lock:
            future = self._thread.submit(update)
            self._submitted.append(future)
            return future

    def sample(self, batch_size: int, return_info: bool, timeout: float) -> object:
        """The next batch, as soon as the updates are made. Raises what one of them has raised, once."""
        while self._submitted:
            with self._lock:
                first = self._submitted[0] if self._submitted else None
            if first is not None:
                wait([first])
                self._forget(first)
        return self.source.sample(batch_size, return_info, timeout)

    def _forget(self, update: Future[ConditionalUpdateResult]) -> None:
        with self._lock:
            if not self._submitted or self._submitted[0] is not update:
                return  # another thread has seen to it
            self._submitted.popleft()
        if not update.cancelled() and (error := update.exception()) is not None:
            raise error


def submit_update_if_present(
    self: Updated,
    *,
    index: object,
    generation: object,
    patch: object,
    version_key: object = None,
    version: object = None,
    require_newer: bool = False,
) -> Future[ConditionalUpdateResult]:
    """As :meth:`update_if_present`, but by a thread in the background, which copies what is on an accelerator, too.

    Batches that are prefetched when this is called have the rows as they were; what is sampled afterwards waits for the update, and
    sees it. Updates are made in the order in which they were submitted. What is passed must not be changed before the future is done.

    Returns:
        A ``concurrent.futures.Future`` of what :meth:`update_if_present` returns. What that raises the future has, and the next
        :meth:`sample` raises it once.

    Raises:
        NotImplementedError: the rows are on a server.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    >>> index = rb.extend({"obs": torch.arange(4), "state": torch.zeros(4)})
    >>> generation = rb.writer.generations_of(index)
    >>> future = rb.submit_update_if_present(index=index, generation=generation, patch={"state": torch.ones(4)})
    >>> future.result().updated_count
    4
    """
    if self.service_backend != "direct" or self._wiring.storage.traits.is_remote:
        raise NotImplementedError(
            "submit_update_if_present: expected rows that are here, got a buffer whose rows are on a server. Call update_if_present."
        )
    reading = self._reading
    if not isinstance(reading, AfterUpdates):
        self._reading = reading = AfterUpdates(reading)
    named = {"index": index, "generation": generation, "patch": patch, "version_key": version_key, "version": version}
    return reading.submit(partial(self.update_if_present, **named, require_newer=require_newer))
