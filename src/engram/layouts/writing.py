"""Rows of a storage, written as a layout has them: piece by piece, each observation once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from engram.errors import IncompatibleCheckpoint
from engram.layouts.keys import Keys, entries_of
from engram.layouts.reading import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from engram.layouts.keys import Entry, Key
    from engram.layouts.reading import Ring

#: Bytes of rows that are brought into order at a time.
_PIECE = 16 << 20


class Column(Protocol):
    """Takes the values of one entry, those that lie together at a time. What is not written is zero."""

    def write(self, at: int, values: Tensor) -> None:
        """Values ``[n, *shape]``, contiguous on the CPU, from the ``at``-th on."""


class Sink(Protocol):
    """Where a layout is written to."""

    def begin(self, ring: Ring, steps: Steps, keys: Keys) -> None:
        """Before the first entry."""

    def column(
        self, key: Key, shape: torch.Size, dtype: torch.dtype, *, expanded: bool
    ) -> AbstractContextManager[Column]:
        """Begin an entry. ``expanded``: it has next observations."""


class RowsWriter:
    """Writes the rows of a storage into a sink.

    Args:
        fields: tensors ``[T, W, *shape]`` by key, each slot a row per column. They do not change meanwhile.
        ring: which of them are live.
        keys: which are flags and rewards.
        where: what messages begin with.

    Raises:
        IncompatibleCheckpoint: the fields are no steps, or flags are not one per step; or a flag at the root is True.
    """

    def __init__(self, fields: Mapping[Key, Tensor], ring: Ring, keys: Keys, where: str) -> None:
        self._fields, self._ring, self._keys, self._where = fields, ring, keys, where
        self._entries = entries_of(fields, keys, where)
        self._check_fields()
        done = fields[keys.done]
        flags = torch.zeros((ring.width, ring.slots), dtype=torch.bool, device="cpu")
        for time, slot, n in ring.pieces(ring.slots):
            flags[:, time : time + n] = done[slot : slot + n].reshape(n, ring.width).t().cpu()
        self.steps = Steps(ring, flags)

    def _check_fields(self) -> None:
        done = self._fields[self._keys.done]
        if done.dtype is not torch.bool or done.shape[2:].numel() != 1:
            raise IncompatibleCheckpoint(
                f"{self._where}: {self._keys.done}: expected one bool per step, got {done.dtype} of shape {list(done.shape[2:])}. "
                "Name another field: done_key=…."
            )
        for entry in self._entries:
            if entry.expanded:
                assert entry.root is not None
                assert entry.after is not None
                root, after = self._fields[entry.root], self._fields[entry.after]
                if (root.dtype, root.shape) != (after.dtype, after.shape):
                    raise IncompatibleCheckpoint(
                        f"{self._where}: expected fields {entry.root} and {entry.after} of the same shape and dtype, got "
                        f"{list(root.shape[2:])} {root.dtype} and {list(after.shape[2:])} {after.dtype}."
                    )

    def check_flags(self) -> None:
        """Raise ``IncompatibleCheckpoint``: a flag at the root is True, which the layout has no place for."""
        for key in sorted(self._keys.flags & self._fields.keys()):
            for _, slot, n in self._ring.pieces(self._ring.slots):
                if bool(self._fields[key][slot : slot + n].any()):
                    raise IncompatibleCheckpoint(
                        f"{self._where}: expected the field {key} False in every row, as the layout saves {('next', *key)} only, got a "
                        "row where it is True. Save it without this layout."
                    )

    def write(self, sink: Sink) -> None:
        """Write everything.

        Raises:
            IncompatibleCheckpoint: a next observation is not the observation of the step after it; names the row.
        """
        self.check_flags()
        sink.begin(self._ring, self.steps, self._keys)
        for entry in self._entries:
            like = self._fields[entry.root or entry.after or self._keys.done]
            with sink.column(entry.key, like.shape[2:], like.dtype, expanded=entry.expanded) as column:
                (self._write_observations if entry.expanded else self._write_steps)(entry, column)

    def _most(self, tensor: Tensor) -> int:
        return max(1, _PIECE // max(1, tensor[:1, :1].nbytes))

    def _write_steps(self, entry: Entry, column: Column) -> None:
        tensor = self._fields[entry.root or entry.after or self._keys.done]
        most = self._most(tensor)
        for number in range(self._ring.width):
            for time, slot, n in self._ring.pieces(most):
                column.write(number * self._ring.slots + time, _copied(tensor[slot : slot + n, number]))

    def _write_observations(self, entry: Entry, column: Column) -> None:
        assert entry.root is not None
        assert entry.after is not None
        root, after = self._fields[entry.root], self._fields[entry.after]
        most, ring = self._most(root), self._ring
        for number in range(ring.width):
            for time, slot, n in ring.pieces(most):
                here = _copied(root[slot : slot + n, number])
                beyond = _copied(after[slot : slot + n, number])
                ends = self.steps.ends[number, time : time + n]
                self._check_continued(entry, here, beyond, (number, time, n), ends)
                places = self.steps.places(number, time, n)
                first = int(places[0])
                values = here
                if bool(ends.any()):
                    values = here.new_empty((n + int(ends.sum()), *here.shape[1:]))
                    values[places - first] = here
                    values[places[ends] - first + 1] = beyond[ends]
                column.write(first, values)

    def _check_continued(
        self, entry: Entry, here: Tensor, beyond: Tensor, piece: tuple[int, int, int], ends: Tensor
    ) -> None:
        """Raise ``IncompatibleCheckpoint`` unless each next observation is the observation after it, bit by bit."""
        number, time, n = piece
        assert entry.root is not None
        same = ends.clone()
        same[:-1] |= (_raw(here[1:]) == _raw(beyond[:-1])).all(1)
        if not bool(ends[-1]):  # the step after this piece is live, as the last live one is an end
            slot = self._ring.slot_of(time + n)
            same[-1:] = (_raw(_copied(self._fields[entry.root][slot : slot + 1, number])) == _raw(beyond[-1:])).all(1)
        if not bool(same.all()):
            wrong = int((~same).nonzero()[0])
            row = self._ring.slot_of(time + wrong) * self._ring.width + number
            after = self._ring.slot_of(time + wrong + 1) * self._ring.width + number
            raise IncompatibleCheckpoint(
                f"{self._where}: row {row}: expected {entry.after} to be {entry.root} of row {after}, the step after it, as row {row} does "
                "not end its trajectory; got another value. Rows of multi-step returns, and trajectories without a done flag at their "
                "end, cannot be saved in this layout."
            )


def _copied(rows: Tensor) -> Tensor:
    """A copy of rows whose strides are the usual ones, also of a single row, which torch calls contiguous whatever they are."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)


def _raw(values: Tensor) -> Tensor:
    """The bytes of rows, ``[n, words]``: in words as long as rows permit, as few are compared faster."""
    rows = values.contiguous().reshape(len(values), values.shape[1:].numel()).view(torch.uint8)
    word = next(it for it in (torch.int64, torch.int32, torch.int16, torch.uint8) if rows.shape[1] % it.itemsize == 0)
    return rows.view(word) if rows.numel() else rows
