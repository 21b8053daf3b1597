"""Storages of one's own that break one rule each: the contract finds every one of them."""

import pytest
import torch
from tensordict import TensorDict

from engram import Extent, Traits
from engram.testing import RowStorageContract
from tests.testing.test_broken_components import failures


class Ring:
    """A storage that keeps all rules, for others to break one: a ring of dicts, which hold the leaves of a row each."""

    traits = Traits(in_order=True, empties=True)

    def __init__(self, capacity):
        self.capacity, self.rows, self.seam = capacity, {}, 0

    def extent(self):
        return Extent(self.capacity, (len(self.rows),), (self.seam,))

    def place(self, n):
        return (self.seam + torch.arange(n)) % self.capacity

    def write(self, rows, data, *, append):
        for i, row in enumerate(rows.tolist()):
            self.rows[row] = {name: value[i].clone() for name, value in data.items()}
        if append:
            self.seam = (int(rows[-1]) + 1) % self.capacity

    def read(self, rows):
        found = [self.rows[row] for row in rows.tolist()]
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def empty(self):
        self.rows, self.seam = {}, 0


class Builds(Ring):
    """Returns what rows are built of, and not their leaves by name: here TensorDicts in each other."""

    def read(self, rows):
        return TensorDict(super().read(rows), [len(rows)]).unflatten_keys(".")


class FreeSlots(Ring):
    """Keeps all rules, too, and no order: it replaces the rows with the largest numbers."""

    traits = Traits()

    def place(self, n):
        fresh = list(range(len(self.rows), self.capacity))[:n]
        return torch.tensor([*fresh, *reversed(range(self.capacity - (n - len(fresh)), self.capacity))][:n])

    def write(self, rows, data, *, append):
        super().write(rows, data, append=False)


class CountsWhatIsWritten(Ring):
    def write(self, rows, data, *, append):
        seam = self.seam
        super().write(rows, data, append=False)
        self.seam = (seam + len(rows)) % self.capacity if append else seam


class LacksAMethod:
    extent, place, write = Ring.extent, Ring.place, Ring.write
    __init__ = Ring.__init__


class LeavesAGap(FreeSlots):
    def place(self, n):
        return torch.arange(len(self.rows) + 1, len(self.rows) + 1 + n) % self.capacity


class Reserves(Ring):
    def place(self, n):
        rows = super().place(n)
        self.seam = (self.seam + n) % self.capacity
        return rows


class PlacesBackwards(Ring):
    def place(self, n):
        return super().place(n).flip(0)


class KeepsTheSeam(Ring):
    def write(self, rows, data, *, append):
        super().write(rows, data, append=False)


class AlwaysAppends(Ring):
    def write(self, rows, data, *, append):
        super().write(rows, data, append=True)


class KeepsWhatItIsGiven(Ring):
    def write(self, rows, data, *, append):
        for i, row in enumerate(rows.tolist()):
            self.rows[row] = {name: value[i] for name, value in data.items()}
        if append:
            self.seam = (int(rows[-1]) + 1) % self.capacity


class HandsOutItsMemory(Ring):
    """All rows lie in one tensor of each leaf; a read of rows in order is a view of it."""

    data = None

    def write(self, rows, data, *, append):
        if self.data is None:
            self.data = {name: value[:1].repeat(self.capacity, *[1] * (value.ndim - 1)) for name, value in data.items()}
        for name, value in data.items():
            self.data[name][rows] = value
        super().write(rows, data, append=append)

    def read(self, rows):
        first, n = int(rows[0]), len(rows)
        in_order = torch.equal(rows, torch.arange(first, first + n))
        return {name: kept[first : first + n] if in_order else kept[rows] for name, kept in self.data.items()}


class ReadsInRowOrder(Ring):
    def read(self, rows):
        return super().read(rows.sort().values)


class ReadsEachRowOnce(Ring):
    def read(self, rows):
        return super().read(rows.unique())


class LosesAField(Ring):
    def read(self, rows):
        return {name: value for name, value in super().read(rows).items() if name != "step"}


class ChangesADtype(Ring):
    def read(self, rows):
        return {name: value.float() for name, value in super().read(rows).items()}


class KeepsRowsWhenEmptied(Ring):
    def empty(self):
        self.seam = 0


class DeclaresWhatItHasNot(Ring):
    empty = None


class CountsCapacityAsRows(Ring):
    def extent(self):
        return Extent(self.capacity, (self.capacity,), (self.seam,))


class CountsAppendedRowsOnly(Ring):
    """A file of its own says how many rows it has, and a write by number does not change it."""

    filled = 0

    def extent(self):
        return Extent(self.capacity, (self.filled,), (self.seam,))

    def write(self, rows, data, *, append):
        super().write(rows, data, append=append)
        self.filled = len(self.rows) if append else self.filled


class WritesTheFirstRowOnly(Ring):
    def write(self, rows, data, *, append):
        first = {name: value[:1].expand_as(value) for name, value in data.items()}
        super().write(rows, first, append=append)


class TwoLanes(Ring):
    def extent(self):
        return Extent(self.capacity, (len(self.rows), 0), (self.seam, 0))


class OpensEmpty(Ring):
    """Its rows end with it."""


class LosesTheSeam(Ring):
    """Opened again, it begins at row 0."""


@pytest.mark.parametrize("good", [Ring, FreeSlots, Builds])
def test_good_ones_keep_all_rules(good):
    assert not failures(RowStorageContract, good)


@pytest.mark.parametrize(
    ("storage", "test", "said"),
    [
        (LacksAMethod, "test_follows_the_protocol", "extent, place, write, read"),
        (LeavesAGap, "test_holds_what_was_written", "gap"),
        (Reserves, "test_place_has_no_side_effects", "no side effects"),
        (PlacesBackwards, "test_holds_what_was_written", "in_order"),
        (PlacesBackwards, "test_a_buffer_does_as_with_rows_in_memory", "in_order"),
        (CountsWhatIsWritten, "test_a_buffer_does_as_with_rows_in_memory", "the next one at"),
        (KeepsTheSeam, "test_holds_what_was_written", "seam"),
        (AlwaysAppends, "test_rows_are_replaced_by_number", "append=False"),
        (KeepsWhatItIsGiven, "test_what_is_written_is_copied", "copy it"),
        (HandsOutItsMemory, "test_what_is_read_is_new_memory", "new memory"),
        (ReadsInRowOrder, "test_rows_are_read_in_any_order", "order"),
        (ReadsEachRowOnce, "test_rows_are_read_in_any_order", "read"),
        (LosesAField, "test_holds_what_was_written", "missing ['step']"),
        (ChangesADtype, "test_holds_what_was_written", "float32"),
        (KeepsRowsWhenEmptied, "test_empty_forgets_all", "no rows after empty"),
        (DeclaresWhatItHasNot, "test_follows_the_protocol", "empties=True"),
        (CountsCapacityAsRows, "test_begins_without_rows", "no rows at first"),
        (CountsAppendedRowsOnly, "test_rows_are_replaced_by_number", "rows after the live ones to make them live"),
        (WritesTheFirstRowOnly, "test_holds_what_was_written", "hold what was written"),
        (TwoLanes, "test_begins_without_rows", "one lane"),
    ],
)
def test_broken_ones(storage, test, said):
    assert said in failures(RowStorageContract, storage)[test]


def opened_again(storage):
    other = Ring(storage.capacity)
    if type(storage) is not OpensEmpty:
        other.rows = dict(storage.rows)
    if type(storage) is Ring:
        other.seam = storage.seam
    return other


@pytest.mark.parametrize(("storage", "fails"), [(Ring, False), (OpensEmpty, True), (LosesTheSeam, True)])
def test_rows_that_are_not_there_when_it_is_opened_again(storage, fails):
    found = failures(RowStorageContract, storage, reopened=lambda self, one: opened_again(one))
    assert list(found) == (["test_rows_are_there_when_it_is_opened_again"] if fails else [])
