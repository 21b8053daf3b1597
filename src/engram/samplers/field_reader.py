"""Fields of the stored rows, for samplers that draw by what rows hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram.field_paths import checked_path, public

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engram.field_paths import FieldPath
    from engram.types import SampledStorage


class FieldReader:
    """Some fields of all rows, as they were when the draw began.

    A sampler that declares ``reads = ("group",)`` gets one as the fourth argument of ``draw``. Writes, edits and ``empty`` of every
    thread and process are in it; what tensors say stays the same until the draw returns. Do not write to them.

    ``reader["group"]`` is ``[capacity, *shape]``, on the CPU: one entry per row. Of rows that hold nothing it says anything.

    >>> import torch
    >>> from engram import Draw, LazyTensorStorage, RandomSampler, ReplayBuffer
    >>> class OfGroup(RandomSampler):
    ...     reads = ("group",)
    ...     def draw(self, extent, batch_size, key, reader):
    ...         of_group = reader.rows[reader["group"][reader.rows] == 1]
    ...         return Draw(of_group[:batch_size])
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=OfGroup(), batch_size=2)
    >>> _ = rb.extend({"group": torch.tensor([0, 1, 0, 1]), "x": torch.arange(4)})
    >>> rb.sample()["x"].tolist()
    [1, 3]
    """

    #: int64 ``[n]``, sorted: the rows that hold something.
    rows: Tensor
    #: int64 ``[capacity]``: the ticket number of every row, -1 where it holds nothing. ``Draw(rows, reader.tickets[rows])`` makes
    #: the buffer draw again in place of rows that change before they are read: a batch then has what the sampler has seen.
    tickets: Tensor
    #: int64, sorted: the rows that changed since the sampler's last draw; at the first draw, all that hold something.
    changed: Tensor

    def __init__(self, storage: SampledStorage, keys: Sequence[FieldPath]) -> None:
        #: Whose rows it reads.
        self.storage = storage
        self._keys = tuple(keys)
        self.forget()
        if storage.memory is not None:
            self._check()

    def forget(self) -> None:
        """Forget what was read: the storage's rows are in another store now. The next :meth:`refresh` reads all rows.

        >>> import torch
        >>> from engram import FieldReader, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend({"group": torch.arange(3)})
        >>> reader = FieldReader(rb.storage, [("group",)])
        >>> reader.refresh()
        >>> reader.forget()
        >>> len(reader.rows)
        0
        """
        self._values: dict[FieldPath, Tensor] = {}
        self._settled: int | None = None
        self.rows = self.changed = torch.empty(0, dtype=torch.int64, device="cpu")
        self.tickets = torch.full((0,), -1, device="cpu")

    def __getitem__(self, key: str | FieldPath) -> Tensor:
        """All rows of one field. Raises ``KeyError``: the sampler does not declare it."""
        path = checked_path(key, "reads")
        if path not in self._keys:
            raise KeyError(
                f"reads: expected one of the fields that the sampler declares, {self._named()}, got {key!r}."
            )
        return self._values[path]

    def refresh(self) -> None:
        """Read what changed since the last time.

        Raises ``KeyError``: no such field.

        Cost: O(1) if nothing was written. Else a word per row of the storage, about a millisecond per million, and the fields of the
        rows that changed.

        >>> import torch
        >>> from engram import FieldReader, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4))
        >>> _ = rb.extend({"group": torch.arange(3)})
        >>> reader = FieldReader(rb.storage, [("group",)])
        >>> reader.refresh()
        >>> _ = rb.add({"group": torch.tensor(7)})
        >>> reader.refresh()
        >>> reader.changed.tolist(), reader["group"].tolist()
        ([3], [0, 1, 2, 7])
        """
        storage = self.storage
        settled = storage.settled()
        if settled is not None and settled == self._settled:
            self.changed = self.changed[:0]
            return
        self._settled = None  # in case of an interrupt
        if not self._values:
            self._check()
            self.tickets = torch.full((storage.max_size,), -1, device="cpu")
        numbers = storage.tickets_of(torch.arange(storage.max_size, device="cpu"))
        changed = (numbers != self.tickets).nonzero().squeeze(1)
        live = changed[numbers[changed] >= 0]
        for path in self._keys:
            values, moved = storage.field(path, live, numbers[live])
            values = values.to("cpu")
            if path not in self._values:
                self._values[path] = values.new_zeros((storage.max_size, *values.shape[1:]))
            self._values[path][live] = values
            if moved:  # it is being written now: the next draw sees it
                numbers[live[moved]], settled = -1, None
        self.tickets, self.changed, self._settled = numbers, changed, settled
        self.rows = (numbers >= 0).nonzero().squeeze(1)

    def _check(self) -> None:
        """Raise ``KeyError`` for a field that is not stored."""
        assert self.storage.memory is not None  # it is asked when there are rows
        stored = {field.key for field in self.storage.memory.schema.fields}
        for path in self._keys:
            if path not in stored:
                known = [public(key) for key in sorted(stored)]
                raise KeyError(f"reads: expected stored fields, {known}, got {public(path)!r}.")

    def _named(self) -> list[str | FieldPath]:
        return [public(path) for path in self._keys]
