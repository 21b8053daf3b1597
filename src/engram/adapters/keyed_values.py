"""Values by text keys in a store in a folder, which several processes put, get and clear at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from operator import le
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engram._support import checks, fork, native
from engram.buffer.replay_buffer import ReplayBuffer
from engram.errors import IncompatibleStore, RateLimited, StoreInUse
from engram.storages import LazyMemmapStorage
from engram.storages.ragged import Ragged
from engram.store import opening, ragged, ragged_rows, rings
from engram.store.keys import StoredKeys
from engram.store.trees import ALIGNMENT, FORM_OF, dense, tree_bytes, tree_of
from engram.types import StrPath

FORM = 8
#: What fills a form up, by the number of dimensions.
_NO_DIMS = [(-1,) * (FORM - 1 - n) for n in range(FORM)]
_DTYPE_OF_FORM = {form: dtype for dtype, form in FORM_OF.items()}


def encode(values: Sequence[object], where: Sequence[str], most: int) -> tuple[Tensor, ragged_rows.Items]:
    """Values as rows: their forms, int32 ``[n, 8]``, and their bytes.

    Args:
        values: tensors of any dtype that stores hold; NumPy arrays and numbers; str; bytes; None, bools, ints and floats; and lists,
            tuples and dicts of these. Tensors lose their graph, and come back on the CPU; numbers and texts of NumPy come back as
            Python's.
        where: what messages call each.
        most: bytes that a value may have, below 2 GiB.

    Raises:
        TypeError: anything else; names its class and what to do.
        ValueError: containers that hold themselves, or are hundreds deep; a value of more bytes.

    Cost: one copy of the tensors, and about 2 µs for each.

    >>> import torch
    >>> from engram.adapters.keyed_values import decode, encode
    >>> forms, items = encode([torch.arange(3), {"tokens": torch.zeros(2), "text": "abc"}], ["a", "b"], 1_000)
    >>> decode(forms, items.packed())
    [tensor([0, 1, 2]), {'tokens': tensor([0., 0.]), 'text': 'abc'}]
    """
    rows, parts = [], []
    for value, name in zip(values, where, strict=True):
        if isinstance(value, Tensor) and (n := value.dim()) < FORM and (part := dense(value, f"put: {name}")).numel():
            rows.append((FORM_OF[part.dtype], *part.shape, *_NO_DIMS[n]))
        else:
            part, length = tree_bytes(value, f"put: {name}")
            rows.append((0, length, *_NO_DIMS[1]))
        parts.append(part if part.dim() == 1 else part.reshape(-1))
    sizes = np.fromiter((part.nbytes for part in parts), np.int64, len(parts))
    if (sizes > most).any():
        at = int(sizes.argmax())
        expected = f"at most {most:,} bytes, a sixteenth of max_bytes and below 2 GiB"
        raise ValueError(f"put: {where[at]}: expected {expected}, got {sizes[at]:,}. Divide it, or use a larger store.")
    forms = np.array(rows, np.int32).reshape(-1, FORM)
    starts, runs, at = np.empty_like(sizes), [], 0
    for begin, end in _runs(forms):
        at += -at % ALIGNMENT
        ends = at + sizes[begin:end].cumsum()
        starts[begin:end] = ends - sizes[begin:end]
        runs.append((parts[begin:end], at, at := int(ends[-1])))
    buffer = torch.empty(at, dtype=torch.uint8, device="cpu")
    for run, first, last in runs:
        torch.cat(run, out=buffer[first:last].view(run[0].dtype))
    return torch.from_numpy(forms), ragged_rows.Items(
        buffer, torch.from_numpy(starts), torch.from_numpy(sizes.astype(np.int32))
    )


def decode(forms: Tensor, items: ragged_rows.Items) -> list[object]:
    """The values of rows.

    Args:
        forms: int32 ``[n, 8]``.
        items: their bytes, one row after the other and no others. Tensors share their memory, where that is aligned.

    Raises:
        ValueError: no such rows. Nothing is evaluated or looked up by name.
    """
    values, numbers = items.given, forms.numpy()
    at = [*items.starts.tolist(), len(values)]
    found: list[object] = []
    try:
        for begin, end in _runs(numbers):
            kind = int(numbers[begin, 0])
            if kind == 0:
                found += [tree_of(values[at[i] : at[i + 1]].clone(), int(numbers[i, 1])) for i in range(begin, end)]
            else:
                raw, dtype, shapes = values[at[begin] : at[end]], _DTYPE_OF_FORM[kind], numbers[begin:end, 1:]
                flat = (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)
                counts = np.abs(shapes).prod(1, dtype=np.int64).tolist()  # where there is no dimension is -1
                parts = flat.split(counts)  # type: ignore[no-untyped-call]
                if (shapes[:, 1:] >= 0).any() or (shapes[:, 0] < 0).any():
                    sizes = [[n for n in shape if n >= 0] for shape in shapes.tolist()]
                    parts = [part.view(shape) for part, shape in zip(parts, sizes, strict=True)]
                found += parts
    except (ArithmeticError, LookupError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"expected rows that encode() made, got others ({error}). Were they damaged?") from error
    return found


def _runs(forms: np.typing.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """From where to where neighbours are of one kind."""
    if len(forms):
        yield from itertools.pairwise([0, *(np.flatnonzero(np.diff(forms[:, 0])) + 1).tolist(), len(forms)])


#: Bytes of a key in UTF-8.
MAX_KEY_BYTES = 128
#: Rows that are looked at together.
_ROWS = 8_192
_WAIT_S = 60.0
#: The fields of a row, in the order of the schema.
_FIELDS = ("form", "key", "value")


class KeyedValues:
    """Values by text keys, in a store in a folder. Processes and threads of one machine use it at once.

    A value is a row of the store: its key, its form and its bytes (see :mod:`engram.adapters.keyed_values`). ``put`` appends the new rows,
    then removes the older ones of the same keys. So a process that is killed leaves the old or the new value of each key, whole, and
    what a ``put`` that has returned stored is there. Rows are in a ring. Before the ring comes to a value that was not cleared, ``put``
    appends that value again; where all of them do not fit, it refuses. No value makes way for another one.

    Args:
        path: the folder of the store. The first ``put`` of any process makes it, and reserves its space.
        max_keys: values that it holds at most, counting those that are being replaced.
        max_bytes: that all values may take. One may have a sixteenth of them, and three sixteenths stay free.
        unclean: as for ``ReplayBuffer.open``: ``"accept"`` takes a store that was open when the machine went down.

    Raises:
        TypeError, ValueError: no path; no numbers, or fewer than 16 keys or 1,024 bytes.

    >>> import tempfile, torch
    >>> from engram.adapters.keyed_values import KeyedValues
    >>> values = KeyedValues(tempfile.mkdtemp(), max_keys=100, max_bytes=1e6)
    >>> values.put(["0@tokens", "1@tokens", "0@text"], [torch.arange(3), torch.arange(2), "abc"])
    >>> values.get(["0@text", "1@tokens"])
    ['abc', tensor([0, 1])]
    >>> values.clear(["0@text"])
    >>> values.keys()
    ['0@tokens', '1@tokens']
    >>> values.close()
    """

    def __init__(
        self, path: StrPath, *, max_keys: int = 1 << 18, max_bytes: float = 4e9, unclean: str = "refuse"
    ) -> None:
        where = type(self).__name__
        self._folder = checks.check_path(f"{where}: path", path)
        self._max_keys = checks.check_count(f"{where}: max_keys", max_keys, least=16)
        self._max_bytes = int(checks.check_number(f"{where}: max_bytes", max_bytes, least=1_024, most=1 << 47))
        self._longest = min(self._max_bytes // 16, (1 << 31) - 1)  # items of a row are counted in 31 bits
        self._unclean = unclean
        self._known: ReplayBuffer[object] | None = None
        self._opening = fork.rlock()
        #: No row before this position is live. Positions only grow, and no row becomes live again.
        self._oldest = 0

    # ---- calls -------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], values: Sequence[object]) -> None:
        """Store values under keys, in place of what they had. Of a key that comes twice the last value counts.

        Raises:
            TypeError, ValueError: keys that are no texts of 1 to 128 bytes without zeros; not as many values; values that
                :func:`~engram.adapters.keyed_values.encode` refuses, or that are too large.
            RateLimited: so many values were not cleared that these do not fit. OSError: no space for a new store.

        Then none of them is stored.

        Cost: O(bytes). One process at a time appends; where the ring comes to old values, these are copied.
        """
        last = dict(zip(_checked_keys("put", keys), values, strict=False))
        if len(values) != len(keys):
            raise ValueError(f"put: expected a value for each of {len(keys)} keys, got {len(values)}.")
        if not last:
            return
        names = [*last]
        forms, items = encode([*last.values()], names, self._longest)
        packed = cast("Tensor", native.pack_texts([*names], MAX_KEY_BYTES)).view(-1, MAX_KEY_BYTES)
        with self._changing("put"):
            buffer = self._opened_or_new()
            self._make_room(buffer, len(names), items.total + int(items.lengths.max()))
            old = None if buffer.storage.memory is None else _stored(buffer)[1].all(names, "put")
            buffer.extend({"form": forms, "key": packed, "value": items})
            if old is not None:
                buffer.storage.remove(*old)
            self._known = buffer

    def get(self, keys: Sequence[str]) -> list[object]:
        """The values of keys, in their order. Tensors are on the CPU, and those of one call may be views of one memory, the caller's.

        Raises:
            KeyError: keys without values; its argument is the list of them. TypeError, ValueError: as :meth:`put`, of keys.

        Cost: O(bytes): each value is copied once. It waits for no writer.
        """
        left, buffer = list(range(len(_checked_keys("get", keys)))), self.buffer
        found: list[object] = [None] * len(keys)
        while left:
            names = [keys[place] for place in left]
            if buffer is None:
                raise KeyError(names)
            store, stored = _stored(buffer)
            rows, writes = stored.newest(names, "get")
            if bool((rows < 0).any()):
                raise KeyError(list(itertools.compress(names, (rows < 0).tolist())))
            (forms, _, items), gone = store.read(rows, expected=store.tickets_of_writes(rows, writes))
            kept = torch.ones(len(left), dtype=torch.bool, device="cpu")
            kept[gone] = False  # replaced or moved since: found again at once
            there = cast("ragged_rows.Items", items)[kept].packed() if gone else cast("ragged_rows.Items", items)
            for place, value in zip(itertools.compress(left, kept.tolist()), decode(forms[kept], there), strict=True):
                found[place] = value
            left = [left[place] for place in gone]
        return found

    def clear(self, keys: Sequence[str]) -> None:
        """Forget the values of keys. Keys without are ignored. Raises ``TypeError``, ``ValueError``: as :meth:`put`, of keys."""
        names = _checked_keys("clear", keys)
        if (buffer := self.buffer) is not None:
            with self._changing("clear"):
                rows, writes = _stored(buffer)[1].all(names, "clear")
                order = writes.argsort()  # the newest last: a death in here brings no older value back
                buffer.storage.remove(rows[order], writes[order])

    def keys(self) -> list[str]:
        """The keys that have values, those that were put or moved last at the end. Cost: O(max_keys)."""
        if (buffer := self.buffer) is None:
            return []
        with self._changing("keys"):
            store = _stored(buffer)[0]
            parts = [_names(store, *block).numpy().view(f"S{MAX_KEY_BYTES}") for block in self._live(store)]
        return [*dict.fromkeys(name.decode() for part in parts for name in part.ravel().tolist())]

    def save(self, folder: StrPath) -> None:
        """Save all values, as they are at one moment. Others go on. Raises as ``ReplayBuffer.dumps``."""
        with self._changing("save"):
            buffer = self._opened_or_new()
        buffer.dumps(folder)

    def load(self, folder: StrPath) -> None:
        """Replace all values, for every process, by what :meth:`save` wrote there. A process that dies in here may leave none.

        Raises as ``ReplayBuffer.loads``.
        """
        with self._changing("load"):
            buffer = self._opened_or_new()
            buffer.loads(folder)
            self._known = buffer

    def close(self) -> None:
        """Close the store in this process. The values stay. A later call opens it again."""
        with self._opening:
            if self._known is not None:
                self._known.close()
            self._known, self._oldest = None, 0

    # ---- the store ---------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> ReplayBuffer[object] | None:
        """The buffer of the rows, for checkpoints of them. None: nothing was ever put.

        Raises ``IncompatibleStore``: the folder holds another store, or one of other sizes.
        """
        with self._opening:
            place = self._folder / "values"
            if self._known is None and opening.holds_store(place, type(self).__name__):
                buffer: ReplayBuffer[object] = ReplayBuffer.open(place, unclean=self._unclean)
                schema = cast("ragged.RaggedStore", buffer.storage.memory).schema
                ring = [group.items for group in schema.ragged_groups]
                got = tuple(field.name for field in schema.fields), schema.capacity, *ring
                if got != (wanted := (_FIELDS, self._max_keys, self._max_bytes)):
                    buffer.close()
                    sizes = f"expected fields, max_keys and max_bytes {wanted}, got {got}"
                    raise IncompatibleStore(f"{str(place)!r}: {sizes}. Name those that it has, or another folder.")
                buffer.index_keys("key")
                self._known = buffer
            return self._known

    def _opened_or_new(self) -> ReplayBuffer[object]:
        """The store, or one that its first write makes."""
        if (known := self.buffer) is not None:
            return known
        fields: dict[str | tuple[str, ...], Ragged] = {"value": Ragged(torch.uint8, max_length=self._longest)}
        place = self._folder / "values"
        storage = LazyMemmapStorage(self._max_keys, scratch_dir=place, ragged=fields, ragged_bytes=self._max_bytes)
        buffer: ReplayBuffer[object] = ReplayBuffer(storage=storage)
        buffer.index_keys("key")
        return buffer

    def _changing(self, call: str) -> AbstractContextManager[None]:
        """Held by the one process and thread that puts or clears. Gone with the process that holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        where = f"{call}: another process or thread has been changing {str(self._folder)!r} for {_WAIT_S:g} s."
        return native.folder_lock(self._folder, _WAIT_S, lambda: StoreInUse(where))

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def _live(self, store: ragged.RaggedStore) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that have values, and their tickets, the oldest first. No other process writes meanwhile."""
        end = store.core.next_position(0)
        for at in range(max(self._oldest, end - store.capacity), end, _ROWS):
            rows = torch.arange(at, min(at + _ROWS, end), device="cpu") % store.capacity
            tickets = store.tickets_of(rows)
            live = tickets >= 0
            if bool(live.any()):
                yield rows[live], tickets[live]

    def _free(self, store: ragged.RaggedStore) -> tuple[int, int]:
        """Rows and bytes before the ring comes to its oldest value."""
        end, head = store.core.next_position(0), store.core.ragged_lane(0)[1]
        for rows, tickets in self._live(store):
            self._oldest = end - 1 - (end - 1 - int(rows[0])) % store.capacity
            first = int(_spans(store, rows[:1], tickets[:1]).offsets)
            return self._oldest + store.capacity - end, first + self._max_bytes - head
        self._oldest = end
        return store.capacity, self._max_bytes

    def _make_room(self, buffer: ReplayBuffer[object], rows: int, nbytes: int) -> None:
        """Have so many rows and bytes free, and enough to move the longest value: append the oldest values again.

        Raises ``RateLimited``: the values do not fit.
        """
        need = rows + 1, nbytes + 2 * self._longest  # 2: a value may not fit before the end of the ring
        store = cast("ragged.RaggedStore | None", buffer.storage.memory)
        if store is not None and all(map(le, need, self._free(store))):
            return
        live = (0, 0) if store is None else self._tidy(buffer)
        most_rows, most_bytes = self._max_keys - 1 - live[0], self._max_bytes - 3 * self._longest - live[1]
        if rows > most_rows or nbytes > most_bytes:
            raise RateLimited(
                f"put: expected room for {rows:,} values, got {max(0, most_rows):,} of max_keys={self._max_keys:,}; and for {nbytes:,} "
                f"bytes, got {max(0, most_bytes):,} of max_bytes={self._max_bytes:,}. Clear keys that are not needed any more, or use "
                "another folder with more of both."
            )
        while store is not None and not all(map(le, need, free := self._free(store))):
            self._move_oldest(buffer, *free)

    def _tidy(self, buffer: ReplayBuffer[object]) -> tuple[int, int]:
        """How many values there are, and their bytes. Older ones of a key, which a killed process left, are removed."""
        (store, stored), live, live_bytes = _stored(buffer), 0, 0
        for rows, tickets in self._live(store):
            writes = store.writes_of(rows, tickets)
            newest = stored.newest(_names(store, rows, tickets), "put")[1] == writes
            buffer.storage.remove(rows[~newest], writes[~newest])
            live += int(newest.sum())
            live_bytes += int(_spans(store, rows, tickets).lengths[newest].sum())
        return live, live_bytes

    def _move_oldest(self, buffer: ReplayBuffer[object], rows_free: int, bytes_free: int) -> None:
        """Append some of the oldest values again, and remove them where they were.

        A process that is killed meanwhile may leave the space unused until the ring comes round. Raises ``RateLimited``: there is no
        more.
        """
        store = _stored(buffer)[0]
        rows, tickets = next(self._live(store))
        ends = _spans(store, rows, tickets).lengths.cumsum(0)
        n = min(int((ends <= min(bytes_free - self._longest, self._longest)).sum()), rows_free)
        if n < 1:
            got = f"{rows_free:,} rows and {bytes_free:,} bytes: processes were killed while they moved values"
            raise RateLimited(f"put: expected room to move the oldest values, got {got}. Clear keys.")
        rows, tickets = rows[:n], tickets[:n]
        buffer.extend(dict(zip(_FIELDS, store.read(rows, expected=tickets)[0], strict=True)))
        buffer.storage.remove(rows, store.writes_of(rows, tickets))


def _stored(buffer: ReplayBuffer[object]) -> tuple[ragged.RaggedStore, StoredKeys]:
    """The store of a buffer that was written to, and the rows by their keys."""
    return cast("ragged.RaggedStore", buffer.storage.memory), cast("StoredKeys", buffer.storage.keyed("get"))


def _names(store: ragged.RaggedStore, rows: Tensor, tickets: Tensor) -> Tensor:
    """The keys of rows, uint8 ``[n, 128]``, while no other process writes."""
    return store.read(rows, expected=tickets, which=(_FIELDS.index("key"),))[0][0]


def _spans(store: ragged.RaggedStore, rows: Tensor, tickets: Tensor) -> rings.Spans:
    """Where the bytes of rows lie, while no other process writes."""
    return rings.Spans.of(store.read_spans(rows, tickets)[0][0])


def _checked_keys(call: str, keys: Sequence[str]) -> list[str]:
    """The keys. Raises ``TypeError``, ``ValueError``: they are none."""
    if not isinstance(keys, list | tuple) or not {*map(type, keys)} <= {str}:
        raise TypeError(f"{call}: keys: expected a list of strings, got {keys!r:.200}.")
    if native.pack_texts([*keys], MAX_KEY_BYTES) is None or "" in keys or "\0" in "".join(keys):
        bad = next(key for key in keys if native.pack_texts([key], MAX_KEY_BYTES) is None or not key or "\0" in key)
        expected = f"{call}: keys: expected texts of 1 to {MAX_KEY_BYTES} bytes in UTF-8 without zeros"
        raise ValueError(f"{expected}, got {bad!r:.200}. Shorten the name of the field.")
    return [*keys]
