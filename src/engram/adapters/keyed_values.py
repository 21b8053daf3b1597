"""Values by text keys in a store in a folder, which several processes put, get and clear at once."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, cast

import torch

from engram._support import fork, native
from engram._support.checks import check_count, check_number, check_path
from engram.adapters.payloads import decode, encode
from engram.buffer.replay_buffer import ReplayBuffer
from engram.errors import IncompatibleStore, RateLimited, StoreInUse
from engram.storages import LazyMemmapStorage
from engram.storages.ragged import Ragged
from engram.store.opening import holds_store
from engram.store.ragged_rows import Items
from engram.store.ragged_state import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from engram.store.keys import StoredKeys
    from engram.store.ragged import RaggedStore
    from engram.types import StrPath

#: Bytes of a key in UTF-8.
MAX_KEY_BYTES = 128
#: Of the bytes of a store, the part that one value may have.
_VALUES = 16
#: Rows that are looked at together, and bytes that are moved together.
_ROWS, _MOVED_BYTES = 8_192, 1 << 26
_WAIT_S = 60.0
#: The fields of a row, in the order of the schema.
_FIELDS = ("form", "key", "value")
_KEY = 1


class KeyedValues:
    """Values by text keys, in a store in a folder. Processes and threads of one machine use it at once.

    A value is a row of the store: its key, its form and its bytes (see :mod:`engram.adapters.payloads`). ``put`` appends the new rows,
    then removes the older ones of the same keys. So a process that is killed leaves the old or the new value of each key, whole, and
    what a ``put`` that has returned stored is there. Rows are in a ring. Before the ring comes to a value that was not cleared, ``put``
    appends that value again; where all of them do not fit, it refuses. No value makes way for another one.

    Args:
        folder: where the store is. The first ``put`` of any process makes it, and reserves its space.
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
        self, folder: StrPath, *, max_keys: int = 1 << 18, max_bytes: float = 4e9, unclean: str = "refuse"
    ) -> None:
        where = type(self).__name__
        self._folder = check_path(f"{where}: folder", folder)
        self._max_keys = check_count(f"{where}: max_keys", max_keys, least=16)
        self._max_bytes = int(check_number(f"{where}: max_bytes", max_bytes, least=1_024, most=1 << 47))
        self._longest = self._max_bytes // _VALUES
        self._unclean = unclean
        self._known: ReplayBuffer[Any] | None = None
        self._opening = fork.rlock()
        #: No row before this position is live. Positions only grow, and no row becomes live again.
        self._oldest = 0

    # ---- calls -------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], values: Sequence[object]) -> None:
        """Store values under keys, in place of what they had. Of a key that comes twice the last value counts.

        Raises:
            TypeError, ValueError: keys that are no texts of 1 to 128 bytes without zeros; not as many values; values that
                :func:`~engram.adapters.payloads.encode` refuses, or that are too large.
            RateLimited: so many values were not cleared that these do not fit. OSError: no space for a new store.

        Then none of them is stored.

        Cost: O(bytes). One process at a time appends; where the ring comes to old values, these are copied.
        """
        _check_keys("put", keys)
        if len(values) != len(keys):
            raise ValueError(f"put: expected a value for each of {len(keys)} keys, got {len(values)}.")
        last = dict(zip(keys, values, strict=True))
        if not last:
            return
        names = list(last)
        try:
            forms, items = encode(list(last.values()), names)
        except (TypeError, ValueError) as error:
            raise type(error)(f"put: {error}") from None
        longest = int(items.lengths.max())
        if longest > self._longest:
            raise ValueError(
                f"put: {names[int(items.lengths.argmax())]!r}: expected at most {self._longest:,} bytes, a sixteenth of "
                f"max_bytes={self._max_bytes:,}, got {longest:,}. Use another folder with a larger max_bytes."
            )
        packed = cast("Tensor", native.pack_texts([*names], MAX_KEY_BYTES)).view(-1, MAX_KEY_BYTES)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._changing("put"):
            buffer = self._opened_or_new()
            stored = self._make_room(buffer, len(names), items.total + longest)
            old = None if stored is None else stored.all(names, "put")
            buffer.extend(dict(zip(_FIELDS, (forms, packed, items), strict=True)))
            if old is not None:
                buffer.storage.remove(*old)
            self._known = buffer

    def get(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys, in their order. Tensors are on the CPU, and those of one call may be views of one memory, the caller's.

        Raises:
            KeyError: keys without values; its argument is the list of them. TypeError, ValueError: as :meth:`put`, of keys.

        Cost: O(bytes): each value is copied once. It waits for no writer.
        """
        _check_keys("get", keys)
        found: list[Any] = [None] * len(keys)
        left, buffer = list(range(len(keys))), self._opened()
        while left:
            names = [keys[place] for place in left]
            if buffer is None:
                raise KeyError(names)
            store, stored = _stored(buffer)
            rows, writes = stored.newest(names, "get")
            if bool((rows < 0).any()):
                raise KeyError(list(compress(names, (rows < 0).tolist())))
            (forms, _, items), gone = store.read(rows, expected=store.tickets_of_writes(rows, writes))
            there, places = cast("Items", items), left
            if gone:  # replaced or moved since: found again at once
                kept = torch.ones(len(left), dtype=torch.bool, device="cpu")
                kept[gone] = False
                forms, there, places = forms[kept], there[kept].packed(), list(compress(left, kept.tolist()))
            for place, value in zip(places, decode(forms, there), strict=True):
                found[place] = value
            left = [left[place] for place in gone]
        return found

    def clear(self, keys: Sequence[str]) -> None:
        """Forget the values of keys. Keys without are ignored. Raises ``TypeError``, ``ValueError``: as :meth:`put`, of keys."""
        _check_keys("clear", keys)
        buffer = self._opened()
        if buffer is not None:
            with self._changing("clear"):
                buffer.storage.remove(*_stored(buffer)[1].all(list(keys), "clear"))

    def keys(self) -> list[str]:
        """The keys that have values, those that were put or moved last at the end. Cost: O(max_keys)."""
        buffer = self._opened()
        if buffer is None:
            return []
        with self._changing("keys"):
            store = _stored(buffer)[0]
            parts = [_names(store, rows, tickets) for rows, tickets in self._live(store)]
        found = [name for part in parts for name in part.numpy().view(f"S{MAX_KEY_BYTES}").ravel().tolist()]
        return list(dict.fromkeys(name.decode(errors="surrogatepass") for name in found))

    @property
    def buffer(self) -> ReplayBuffer[Any] | None:
        """The buffer of the rows, for checkpoints of them. None: nothing was ever put."""
        return self._opened()

    def save(self, folder: StrPath) -> None:
        """Save all values, as they are at one moment. Others go on. Raises as ``ReplayBuffer.dumps``."""
        if (buffer := self._opened()) is not None:
            buffer.dumps(folder)

    def load(self, folder: StrPath) -> None:
        """Replace all values, for every process, by what :meth:`save` wrote there. Raises as ``ReplayBuffer.loads``."""
        path = check_path("load: folder", folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._changing("load"):
            buffer = self._opened_or_new()
            if path.exists():
                buffer.loads(path)
                self._known = buffer
            elif self._known is not None:  # it was saved before the first put
                buffer.empty()

    def close(self) -> None:
        """Close the store in this process. The values stay. A later call opens it again."""
        with self._opening:
            if self._known is not None:
                self._known.close()
            self._known, self._oldest = None, 0

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _changing(self, call: str) -> AbstractContextManager[None]:
        """Held by the one process and thread that puts or clears. Gone with the process that holds it."""

        def busy() -> StoreInUse:
            return StoreInUse(
                f"{call}: another process or thread has been changing values in {str(self._folder)!r} for {_WAIT_S:g} s."
            )

        lock: AbstractContextManager[None] = native.folder_lock(self._folder, _WAIT_S, busy)
        return lock

    def _opened(self) -> ReplayBuffer[Any] | None:
        """The store, if there is one. Raises ``IncompatibleStore``: another one, or of other sizes."""
        with self._opening:
            place = self._folder / "values"
            if self._known is None and holds_store(place, type(self).__name__):
                buffer: ReplayBuffer[Any] = ReplayBuffer.open(place, unclean=self._unclean)
                schema = _stored(buffer)[0].schema
                rings = [group.items for group in schema.ragged_groups]
                got = (tuple(field.name for field in schema.fields), schema.capacity, rings)
                if got != (wanted := (_FIELDS, self._max_keys, [self._max_bytes])):
                    buffer.close()
                    raise IncompatibleStore(
                        f"{str(place)!r}: expected a store of the fields, max_keys and max_bytes {wanted}, got {got}. Name those that it "
                        "has, or another folder."
                    )
                buffer.index_keys("key")
                self._known = buffer
            return self._known

    def _opened_or_new(self) -> ReplayBuffer[Any]:
        """The store, or one that its first write makes."""
        if (known := self._opened()) is not None:
            return known
        storage = LazyMemmapStorage(
            self._max_keys,
            scratch_dir=self._folder / "values",
            ragged={"value": Ragged(torch.uint8, max_length=self._longest)},
            ragged_bytes=self._max_bytes,
        )
        buffer: ReplayBuffer[Any] = ReplayBuffer(storage=storage)
        buffer.index_keys("key")
        return buffer

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def _live(self, store: RaggedStore) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that have values, and their tickets, the oldest first. Nobody else writes meanwhile."""
        end = store.core.next_position(0)
        at, known = max(self._oldest, end - store.capacity), False
        while at < end:
            positions = torch.arange(at, min(at + _ROWS, end), device="cpu")
            rows = positions % store.capacity
            tickets = store.tickets_of(rows)
            live = tickets >= 0
            at += len(rows)
            if not known:
                known = bool(live.any())
                self._oldest = int(positions[live][0]) if known else at
            if bool(live.any()):
                yield rows[live], tickets[live]

    def _free(self, store: RaggedStore) -> tuple[int, int]:
        """Rows and bytes before the ring comes to its oldest value."""
        oldest = next(self._live(store), None)
        if oldest is None:
            return store.capacity, self._max_bytes
        first = int(_spans(store, oldest[0][:1], oldest[1][:1]).offsets)
        used = store.core.next_position(0) - self._oldest, store.core.ragged_lane(0)[1] - first
        return store.capacity - used[0], self._max_bytes - used[1]

    def _make_room(self, buffer: ReplayBuffer[Any], rows: int, nbytes: int) -> StoredKeys | None:
        """Have so many rows and bytes free, and enough to move the longest value: append the oldest values again. None: it is new.

        Raises ``RateLimited``: the values do not fit.
        """
        rows, nbytes = rows + 1, nbytes + 2 * self._longest  # 2: it may not fit before the end of the ring
        if buffer.storage.keyed("put") is None:
            free, live, live_bytes = (self._max_keys, self._max_bytes), 0, 0
        else:
            store, stored = _stored(buffer)
            free = self._free(store)
            if rows <= free[0] and nbytes <= free[1]:
                return stored
            live, live_bytes = self._tidy(buffer, store, stored)
        if live + rows > self._max_keys or live_bytes + nbytes + self._longest > self._max_bytes:
            raise RateLimited(
                f"put: expected room for {rows - 1:,} values, got {self._max_keys - 1 - live:,} of max_keys={self._max_keys:,}; and for "
                f"{nbytes - 2 * self._longest:,} bytes, got {max(0, self._max_bytes - live_bytes - 3 * self._longest):,} of "
                f"max_bytes={self._max_bytes:,}. Clear keys that are not needed any more, or use another folder with more of both."
            )
        if rows <= free[0] and nbytes <= free[1]:
            return None
        while free := self._free(store):
            if rows <= free[0] and nbytes <= free[1]:
                break
            self._move_oldest(buffer, store, *free)
        return stored

    def _tidy(self, buffer: ReplayBuffer[Any], store: RaggedStore, stored: StoredKeys) -> tuple[int, int]:
        """How many values there are, and their bytes. Older ones of a key, which a killed process left, are removed."""
        live = live_bytes = 0
        for rows, tickets in self._live(store):
            writes = store.writes_of(rows, tickets)
            newest = stored.newest(_names(store, rows, tickets), "put")[1] == writes
            buffer.storage.remove(rows[~newest], writes[~newest])
            live += int(newest.sum())
            live_bytes += int(_spans(store, rows, tickets).lengths[newest].sum())
        return live, live_bytes

    def _move_oldest(self, buffer: ReplayBuffer[Any], store: RaggedStore, rows_free: int, bytes_free: int) -> None:
        """Append some of the oldest values again, and remove them where they were."""
        rows, tickets = next(self._live(store))
        ends = _spans(store, rows, tickets).lengths.cumsum(0)
        fitting = int((ends <= min(bytes_free - self._longest, _MOVED_BYTES)).sum())
        n = max(1, min(fitting, rows_free))
        columns, _ = store.read(rows[:n], expected=tickets[:n])
        buffer.extend(dict(zip(_FIELDS, columns, strict=True)))
        buffer.storage.remove(rows[:n], store.writes_of(rows[:n], tickets[:n]))


def _stored(buffer: ReplayBuffer[Any]) -> tuple[RaggedStore, StoredKeys]:
    """The store of a buffer that was written to, and the rows by their keys."""
    return cast("RaggedStore", buffer.storage.memory), cast("StoredKeys", buffer.storage.keyed("get"))


def _names(store: RaggedStore, rows: Tensor, tickets: Tensor) -> Tensor:
    """The keys of rows, uint8 ``[n, 128]``, while nobody else writes."""
    return store.read(rows, expected=tickets, which=(_KEY,))[0][0]


def _spans(store: RaggedStore, rows: Tensor, tickets: Tensor) -> Spans:
    """Where the bytes of rows lie, while nobody else writes."""
    return Spans.of(store.read_spans(rows, tickets)[0][0])


def _check_keys(call: str, keys: object) -> None:
    """Raise ``TypeError``, ``ValueError``: they are no keys."""
    if not isinstance(keys, list | tuple) or not set(map(type, keys)) <= {str}:
        odd = next((key for key in keys if type(key) is not str), None) if isinstance(keys, list | tuple) else keys
        raise TypeError(f"{call}: keys: expected a list of strings, got {odd!r:.80}.")
    if native.pack_texts(list(keys), MAX_KEY_BYTES) is None or "" in keys or "\0" in "".join(keys):
        bad = [key for key in keys if native.pack_texts([key], MAX_KEY_BYTES) is None or not key or "\0" in key]
        raise ValueError(
            f"{call}: keys: expected texts of 1 to {MAX_KEY_BYTES} bytes in UTF-8 without zeros, got {bad[0]!r:.200}. Shorten the name of "
            "the field."
        )
