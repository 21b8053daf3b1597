"""Rows by number and fields by key: reading, assigning, editing in place."""

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RowError,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.components import Listener

TENSORS = [LazyTensorStorage, LazyMemmapStorage]


@pytest.fixture(params=[*TENSORS, ListStorage])
def rb(request):
    """Rows 10 … 14 of seven."""
    rb = ReplayBuffer(storage=request.param(7))
    rb.extend(torch.arange(10, 15))
    return rb


@pytest.fixture(params=TENSORS)
def fields(request):
    rb = ReplayBuffer(storage=request.param(7))
    rb.extend({"a": torch.arange(5), "next": {"r": torch.zeros(5, 2)}})
    return rb


# ---- one row ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [3, np.int64(3), torch.tensor(3), np.array(3), -2, torch.tensor(-2), (3,)])
def test_one_row(rb, index):
    row = rb[index]
    assert row == 13
    assert row.shape == ()


@pytest.mark.parametrize("index", [5, 6, 7, 100, -6, -100, torch.tensor(5), [0, 5], torch.tensor([-6]), range(4, 6)])
def test_rows_that_are_not_live(rb, index):
    with pytest.raises(RowError):
        rb[index]
    with pytest.raises(IndexError):
        rb[index] = torch.ones(np.shape(index), dtype=torch.int64)
    assert [int(row) for row in rb[:]] == [10, 11, 12, 13, 14]


def test_a_row_is_a_copy_except_in_a_list():
    rb = ReplayBuffer(storage=LazyTensorStorage(7))
    rb.extend(torch.zeros(5))
    rb[3].fill_(9)
    assert rb[3] == 0


@pytest.mark.parametrize("index", [1.0, object(), torch.tensor([0.5]), [0.5], {1}])
def test_what_is_no_index(rb, index):
    with pytest.raises(TypeError, match="index"):
        rb[index]


# ---- many rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(None), [0, 1, 2, 3, 4]),
        (slice(1, 3), [1, 2]),
        (slice(3, 1), []),
        (slice(-2, None), [3, 4]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        (slice(2, 100), [2, 3, 4]),
        (..., [0, 1, 2, 3, 4]),
        ((), [0, 1, 2, 3, 4]),
        (range(1, 4), [1, 2, 3]),
        (range(4, -1, -2), [4, 2, 0]),
        ([4, 0, 0, -1], [4, 0, 0, 4]),
        (torch.tensor([4, 0]), [4, 0]),
        (torch.tensor([4, 0], dtype=torch.int32), [4, 0]),
        (np.array([4, -5]), [4, 0]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
        (np.array([False] * 5), []),
        ([True, True, False, False, True], [0, 1, 4]),
        ([], []),
        (torch.tensor([], dtype=torch.int64), []),
    ],
    ids=repr,
)
def test_many_rows(rb, index, expected):
    if isinstance(rb.storage, ListStorage) and not expected:
        rb = ReplayBuffer(storage=rb.storage, collate_fn=list)
    assert [int(row) for row in rb[index]] == [10 + i for i in expected]


@pytest.mark.parametrize("n", [0, 4, 6, 7])
def test_a_mask_is_over_the_live_rows(rb, n):
    with pytest.raises(IndexError, match=rf"mask.*5.*\[{n}\]"):
        rb[torch.ones(n, dtype=torch.bool)]


def test_rows_of_several_lanes():
    rb = ReplayBuffer(storage=LazyTensorStorage(9, lanes=3))
    rb.extend(torch.arange(2), lane=0)
    rb.extend(torch.arange(10, 14), lane=2)
    assert rb[:].tolist() == [0, 1, 13, 11, 12]  # in row order, not by age
    assert rb[1:3].tolist() == [1, 13]
    assert rb[-1] == 12
    assert rb[-4] == 1
    assert rb[8] == 12
    assert rb[[0, 7, -5]].tolist() == [0, 11, 0]
    assert rb[torch.tensor([False, True, True, False, False])].tolist() == [1, 13]
    for row in (2, 3, 5):
        with pytest.raises(RowError, match=str(row)):
            rb[row]
    rb[1:3] = torch.tensor([77, 78])
    assert rb[:].tolist() == [0, 77, 78, 11, 12]
    assert rb.storage[6] == 78


@pytest.mark.parametrize("storage", TENSORS)
def test_contiguous_slices_are_live_views(storage):
    rb = ReplayBuffer(storage=storage(7))
    rb.extend(torch.arange(5))
    view, part, copy = rb[:], rb[1:3], rb[[1, 2]]
    rb[1] = torch.tensor(9)
    assert view.tolist() == [0, 9, 2, 3, 4]
    assert part.tolist() == [9, 2]
    assert copy.tolist() == [1, 2]
    part[1] = 8
    assert rb[2] == 8


def test_memory_mapped_views_are_locked():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(7))
    rb.extend(TensorDict({"a": torch.arange(5)}, batch_size=[5]))
    assert rb[:].is_locked
    assert isinstance(rb[:]["a"], MemoryMappedTensor)
    assert not rb[[0, 1]].is_locked
    assert not rb[0].is_locked
    assert not rb.sample(2).is_locked


@pytest.mark.parametrize("storage", TENSORS)
def test_a_storage_that_was_never_written(storage):
    rb = ReplayBuffer(storage=storage(7))
    for index in (0, slice(None), [0], "a", -1, ...):
        with pytest.raises(RuntimeError, match="never written|nothing was ever"):
            rb[index]
    with pytest.raises(RuntimeError):
        rb[0] = torch.tensor(1)


def test_after_empty(fields):
    fields.empty()
    assert fields[:]["a"].shape == (0,)
    with pytest.raises(RowError):
        fields[0]
    with pytest.raises(RowError):
        fields[-1]


def test_read_all_in_order(rb):
    assert [int(row) for row in rb.read_all_in_order()] == [10, 11, 12, 13, 14]
    assert [int(row) for row in rb.read_all_in_order(2)] == [10, 11]
    assert [int(row) for row in rb.read_all_in_order(end=-1)] == [10, 11, 12, 13]
    rb.extend(torch.arange(15, 20))
    assert [int(row) for row in rb.read_all_in_order()] == [17, 18, 19, 13, 14, 15, 16]


# ---- fields ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
@pytest.mark.parametrize("storage", TENSORS)
def test_fields_by_key(kind, storage):
    data = {"a": torch.arange(5), "next": {"r": torch.ones(5, 2)}}
    rb = ReplayBuffer(storage=storage(7))
    rb.extend(data if kind == "dict" else TensorDict(data, batch_size=[5]))
    assert rb["a"].tolist() == [0, 1, 2, 3, 4]
    assert rb["next", "r"].shape == (5, 2)
    assert rb[("a",)].tolist() == [0, 1, 2, 3, 4]
    assert set(rb["next"].keys()) == {"r"}
    for key in ("b", ("next", "a"), ("a", "b"), ("next", "r", "s")):
        with pytest.raises(KeyError, match="expected one of"):
            rb[key]
    rb["a"] = rb["a"] + 10
    rb["next", "r"] = torch.zeros(5, 2)
    assert rb["a"].tolist() == [10, 11, 12, 13, 14]
    assert not rb[2]["next"]["r"].any()
    for key in ("b", ("next", "a"), "next"):
        with pytest.raises(KeyError, match="stored field"):
            rb[key] = torch.zeros(5)


def test_assigning_a_field_is_checked(fields):
    for wrong in (
        torch.zeros(5),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(5, 1, dtype=torch.int64),
        torch.tensor(1),
    ):
        with pytest.raises(RuntimeError, match=r"a\b.*\[5\].*int64"):
            fields["a"] = wrong
    assert fields["a"].tolist() == [0, 1, 2, 3, 4]


def test_set_at(fields):
    assert fields.set_at_("a", torch.tensor([70, 71]), [4, 0]) is fields
    assert fields["a"].tolist() == [71, 1, 2, 3, 70]
    fields.set_at_(("next", "r"), torch.ones(2), 1)
    fields.set_at_(("next", "r"), torch.ones(1, 2), -1)
    assert fields["next", "r"].sum(1).tolist() == [0, 2, 0, 0, 2]
    fields.set_at_("a", torch.tensor([5, 6]), torch.tensor([False, True, False, True, False]))
    fields.set_at_("a", torch.tensor([8, 9]), slice(2, 5, 2))
    assert fields["a"].tolist() == [71, 5, 8, 6, 9]
    fields.set_at_("a", torch.tensor([1, 2]), [0, 0])  # the last one stays
    assert fields["a"][0] == 2
    fields.set_at_("a", np.array([3]), [0])
    assert fields["a"][0] == 3


def test_what_set_at_refuses(fields):
    for key, value, index, kind in [
        ("b", torch.zeros(1), 0, KeyError),
        ("next", torch.zeros(1), 0, KeyError),
        ("a", torch.zeros(1), 0, RuntimeError),
        ("a", torch.tensor([1, 2]), 0, RuntimeError),
        ("a", torch.tensor([1, 2]), [0], RuntimeError),
        ("a", torch.tensor([1]), [5], IndexError),
        ("a", torch.tensor([1, 2]), [0, 7], IndexError),
        ("a", "text", 0, TypeError),
        ("a", 3.5, 0, RuntimeError),
        ("a", None, 0, TypeError),
    ]:
        with pytest.raises(kind, match="set_at_|index"):
            fields.set_at_(key, value, index)
    assert fields["a"].tolist() == [0, 1, 2, 3, 4]


def test_set(fields):
    assert fields.set_("a", torch.arange(5) * 2) is fields
    assert fields["a"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="set_"):
        fields.set_("a", torch.arange(4))


class TestUpdate:
    def test_several_fields(self, fields):
        assert fields.update_({"a": torch.full((5,), 7), "next": {"r": torch.ones(5, 2)}}) is fields
        assert fields["a"].tolist() == [7] * 5
        assert fields["next", "r"].all()
        fields.update_(TensorDict({"next": {"r": torch.zeros(5, 2)}}, batch_size=[5]), clone=True)
        assert not fields["next", "r"].any()

    def test_only_some_keys(self, fields):
        new = {"a": torch.full((5,), 7), "next": {"r": torch.ones(5, 2)}}
        fields.update_(new, keys_to_update=["a"])
        assert (fields["a"].tolist(), fields["next", "r"].any()) == ([7] * 5, False)
        fields["a"] = torch.zeros(5, dtype=torch.int64)
        fields.update_(new, keys_to_update=[("next", "r")])
        assert (fields["a"].any(), fields["next", "r"].all()) == (False, True)
        fields["next", "r"] = torch.zeros(5, 2)
        fields.update_(new, keys_to_update=["next"])
        assert (fields["a"].any(), fields["next", "r"].all()) == (False, True)

    def test_one_wrong_field_changes_nothing(self, fields):
        for wrong, kind in [
            ({"a": torch.full((5,), 7), "b": torch.zeros(5)}, KeyError),
            ({"a": torch.full((5,), 7), "next": {"r": torch.ones(5, 3)}}, RuntimeError),
            ({"a": torch.full((5,), 7), "next": {"r": torch.ones(4, 2)}}, RuntimeError),
        ]:
            with pytest.raises(kind, match="update_"):
                fields.update_(wrong)
        assert fields["a"].tolist() == [0, 1, 2, 3, 4]
        assert not fields["next", "r"].any()

    def test_values_are_copied(self, fields):
        value = torch.full((5,), 7)
        fields.update_({"a": value})
        value.fill_(8)
        assert fields["a"].tolist() == [7] * 5


def test_list_storages_have_no_fields():
    rb = ReplayBuffer(storage=ListStorage(5))
    rb.extend([{"a": torch.tensor(i)} for i in range(3)])
    for call in (
        lambda: rb.set_at_("a", torch.tensor(1), 0),
        lambda: rb.set_("a", torch.zeros(3)),
        lambda: rb.update_({"a": torch.zeros(3)}),
        lambda: rb.__setitem__("a", torch.zeros(3)),
    ):
        with pytest.raises(TypeError, match="ListStorage"):
            call()


def test_editing_a_row_of_a_batch_edits_a_copy():
    """``rb[idx]["k"] = v`` does not write; ``set_at_`` does."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"a": torch.arange(3)}, batch_size=[3]))
    rb[[0, 1]]["a"] = torch.tensor([7, 7])
    assert rb["a"].tolist() == [0, 1, 2]


# ---- assigning rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "n", "expected"),
    [
        (2, None, [10, 11, 0, 13, 14]),
        (-1, None, [10, 11, 12, 13, 0]),
        (torch.tensor(0), None, [0, 11, 12, 13, 14]),
        (slice(1, 3), 2, [10, 0, 1, 13, 14]),
        (slice(None, None, -2), 3, [2, 11, 1, 13, 0]),
        ([4, 0], 2, [1, 11, 12, 13, 0]),
        ([2, 2, 2], 3, [10, 11, 2, 13, 14]),
        (torch.tensor([True, False, False, False, True]), 2, [0, 11, 12, 13, 1]),
        (range(1, 3), 2, [10, 0, 1, 13, 14]),
        (..., 5, [0, 1, 2, 3, 4]),
    ],
    ids=repr,
)
def test_assigning_rows(rb, index, n, expected):
    rb[index] = torch.tensor(0) if n is None else torch.arange(n)
    assert [int(row) for row in rb[:]] == expected
    assert (len(rb), rb.write_count) == (5, 5)
    assert rb.add(torch.tensor(99)) == 5


@pytest.mark.parametrize(
    ("index", "value"),
    [(slice(1, 3), torch.arange(3)), ([0], torch.arange(2)), (slice(None), torch.arange(4)), ([0, 1], torch.arange(1))],
)
def test_assigning_another_number_of_rows(rb, index, value):
    with pytest.raises(RuntimeError, match=rf"expected \d rows?,.*got {len(value)}"):
        rb[index] = value
    assert [int(row) for row in rb[:]] == [10, 11, 12, 13, 14]


def test_assigned_values_are_checked(fields):
    row = {"a": torch.tensor(7), "next": {"r": torch.ones(2)}}
    for wrong, kind in [
        ({"a": torch.tensor(7)}, KeyError),
        ({**row, "b": torch.tensor(1)}, KeyError),
        ({**row, "a": torch.tensor(7.0)}, RuntimeError),
        ({**row, "next": {"r": torch.ones(3)}}, RuntimeError),
        (torch.tensor(7), RuntimeError),  # a number of all fields, of which one has floats
        (torch.zeros(2), TypeError),
    ]:
        with pytest.raises(kind):
            fields[0] = wrong
    assert fields["a"].tolist() == [0, 1, 2, 3, 4]
    fields[0] = row
    assert fields["a"].tolist() == [7, 1, 2, 3, 4]


def test_write_all(rb):
    rb.write_all(torch.tensor([0, 1]))
    assert [int(row) for row in rb[:]] == [0, 1, 12, 13, 14]
    rb.write_all(torch.tensor([5, 6, 7]), end=3)
    assert [int(row) for row in rb[:]] == [5, 6, 7, 13, 14]
    with pytest.raises(RuntimeError, match="3 rows.*got 2"):
        rb.write_all(torch.tensor([0, 1]), end=3)
    with pytest.raises(RuntimeError, match="5 rows.*got 6"):
        rb.write_all(torch.arange(6))
    assert [int(row) for row in rb[:]] == [5, 6, 7, 13, 14]
    assert (len(rb), rb.write_count) == (5, 5)
    rb.extend(torch.arange(4))
    rb.write_all(torch.arange(20, 27))
    assert [int(row) for row in rb[:]] == list(range(20, 27))


def test_every_edit_is_heard_and_moves_the_generation():
    rb = ReplayBuffer(storage=LazyTensorStorage(7), sampler=Listener())
    rb.extend({"a": torch.arange(5)})
    edits = {
        "rb[i]": (lambda: rb.__setitem__(1, {"a": torch.tensor(7)}), [1]),
        "rb[i:j]": (lambda: rb.__setitem__(slice(1, 3), {"a": torch.tensor([7, 8])}), [1, 2]),
        "rb[k]": (lambda: rb.__setitem__("a", torch.arange(5)), [0, 1, 2, 3, 4]),
        "set_at_": (lambda: rb.set_at_("a", torch.tensor([7]), [4]), [4]),
        "set_": (lambda: rb.set_("a", torch.arange(5)), [0, 1, 2, 3, 4]),
        "update_": (lambda: rb.update_({"a": torch.arange(5)}), [0, 1, 2, 3, 4]),
        "write_all": (lambda: rb.write_all({"a": torch.arange(2)}), [0, 1]),
    }
    for name, (edit, expected) in edits.items():
        rb.sampler.heard.clear()
        before = rb.storage.tickets_of(torch.arange(7))
        edit()
        assert [heard for heard, _ in rb.sampler.heard] == [expected], name
        after = rb.storage.tickets_of(torch.arange(7))
        assert (after != before).nonzero().flatten().tolist() == expected, name
        assert (after[expected] > before.max()).all(), name


def test_existing_data_is_edited_in_place():
    data = torch.arange(5)
    rb = ReplayBuffer(storage=TensorStorage(data))
    rb[2] = torch.tensor(20)
    assert data.tolist() == [0, 1, 20, 3, 4]
    assert rb.add(torch.tensor(9)) == 0
    assert data[0] == 9


def test_update_refuses_keys_that_are_not_there():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend({"a": torch.arange(4)})
    with pytest.raises(KeyError, match="typo"):
        rb.update_({"a": torch.zeros(4, dtype=torch.int64)}, keys_to_update=["typo"])
    assert rb["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "index", [slice(0, 2), slice(0, 5), slice(0, None), slice(2, 4), slice(None, 3), 0, [0, 1], ...]
)
def test_rows_by_number_take_no_new_field(index, shared):
    """It would be a column of the whole store, with zeros in the other rows."""
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"a": torch.arange(5)})
    if shared:
        rb.share()
    rows = {"a": torch.zeros_like(rb[index]["a"])}
    with pytest.raises(KeyError, match="add_field"):
        rb[index] = rows | {"b": rows["a"]}
    assert list(rb[:]) == ["a"]
    assert rb["a"].tolist() == [0, 1, 2, 3, 4]
    rb[:] = {"a": torch.arange(5), "b": torch.arange(5)}
    assert rb["b"].tolist() == [0, 1, 2, 3, 4]


def test_only_a_write_of_all_rows_adds_a_field():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend({"a": torch.arange(5)})
    with pytest.raises(KeyError, match="add_field"):
        rb.write_all({"a": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(3)})
    rb.write_all({"a": torch.arange(5), "b": torch.ones(5)})
    assert rb["b"].tolist() == [1] * 5
