"""Any objects, in a list."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import ListStorage, ReplayBuffer, RowError, TensorDictReplayBuffer


def buffer(size=10, **options):
    return ReplayBuffer(storage=ListStorage(size, **options), collate_fn=list)


def state(rb):
    storage = rb.storage
    return (list(storage), storage.extent(), storage.write_count, storage.tickets_of(torch.arange(12)).tolist())


# ---- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "items"),
    [
        (["a", "bc"], ["a", "bc"]),
        (("a", 1, None), ["a", 1, None]),
        ([["a"], ["b", "c"]], [["a"], ["b", "c"]]),
        (range(3), [0, 1, 2]),
        ({5}, [5]),
        (frozenset(["x"]), ["x"]),
        ([{"a": 1}, {}], [{"a": 1}, {}]),
        (np.arange(3), [0, 1, 2]),
    ],
)
def test_extend_takes_items(data, items):
    rb = buffer()
    assert rb.extend(data).tolist() == list(range(len(items)))
    assert list(rb.storage) == items
    assert rb[:] == items


def test_extend_takes_rows_of_tensors_and_tensordicts():
    rb = buffer()
    rb.extend(torch.arange(6).reshape(3, 2))
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert rb[1].tolist() == [2, 3]
    assert rb[4]["a"] == 1
    assert rb[4].batch_size == ()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_strings_of_rows_come_back(kind):
    rows = [TensorDict({"a": torch.tensor(i), "info": {"text": f"row {i}"}, "kind": "step"}, []) for i in range(4)]
    rb = kind(storage=ListStorage(10), batch_size=8)
    rb.extend(torch.stack(rows[:2]))
    rb.extend(torch.stack(rows[2:3]))
    rb.add(rows[3])
    batch = rb.sample()
    assert batch["info", "text"] == [f"row {i}" for i in batch["a"].tolist()]
    assert batch["kind"] == ["step"] * 8
    assert [rb[i]["info", "text"] for i in range(4)] == [f"row {i}" for i in range(4)]
    assert rb[:]["info", "text"] == [f"row {i}" for i in range(4)]


def test_add_takes_anything():
    rb = buffer()
    things = [None, "text", 1.5, [1, 2], {"a": 1}, torch.zeros(3), TensorDict({"a": torch.zeros(3)}, [3]), object()]
    for i, thing in enumerate(things):
        assert rb.add(thing) == i
    assert rb[3] == [1, 2]
    assert rb[7] is things[7]
    assert rb[6].batch_size == (3,)


def test_items_are_detached_and_moved():
    rb = buffer(device="cpu")
    rb.extend([torch.ones(2, requires_grad=True), TensorDict({"a": torch.ones(2, requires_grad=True)}, [2])])
    assert not rb[0].requires_grad
    assert not rb[1]["a"].requires_grad
    assert rb[1].device == torch.device("cpu")
    assert rb.storage.device == torch.device("cpu")
    assert buffer().storage.device is None


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_surrounding_device_changes_nothing(device):
    with torch.device(device):
        rb = buffer(4)
        rb.extend(["a", "b", "c"])
        rb.add("d")
        assert rb.extend(["e"]).tolist() == [0]
        assert rb[:] == ["e", "b", "c", "d"]
        assert rb[[3, 1]] == ["d", "b"]
        assert len(rb.sample(9)) == 9
        assert 3 in rb.storage
        rb[0] = "z"
        rb.storage.set(1, "y")
        assert rb[:2] == ["z", "y"]


# ---- a ring ----------------------------------------------------------------------------------------------------------


def test_rows_go_round():
    rb = buffer(4)
    assert rb.extend(list("abc")).tolist() == [0, 1, 2]
    assert rb.extend(list("def")).tolist() == [3, 0, 1]
    assert rb[:] == list("efcd")
    assert rb.extend(list("ghijkl")).tolist() == [2, 3, 0, 1, 2, 3]
    assert rb[:] == list("ijkl")
    assert (len(rb), rb.write_count) == (4, 12)
    assert rb.storage.extent() == (4, (4,), (0,), None)


def test_unbounded():
    storage = ListStorage()
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.extend(range(2000))
    assert len(rb) == 2000
    assert storage.max_size == torch.iinfo(torch.int64).max
    assert repr(storage) == "ListStorage(size=2,000/unbounded)"
    assert "capacity" not in rb.stats()


def test_the_buffers_size_bounds_a_storage_that_has_none():
    rb = ReplayBuffer(3, storage=ListStorage(), collate_fn=list)
    rb.extend(list("abcd"))
    assert rb[:] == ["d", "b", "c"]
    with pytest.raises(ValueError, match="size: expected the storage's max_size 5, got 3"):
        ReplayBuffer(3, storage=ListStorage(5))


def test_numbers_grow_with_every_write():
    rb = buffer(3)
    storage = rb.storage
    rb.extend(list("ab"))
    first = storage.tickets_of(torch.arange(3)).tolist()
    assert first[0] < first[1]
    assert first[2] == -1
    rb[0] = "c"
    assert storage.tickets_of(torch.tensor([0]))[0] > first[1]
    rb.empty()
    assert storage.tickets_of(torch.tensor([0, -1, 99])).tolist() == [-1, -1, -1]
    rb.add("d")
    assert storage.tickets_of(torch.tensor([0]))[0] > first[1] + 1


def test_empty_keeps_the_count_when_asked():
    rb = buffer()
    rb.extend(list("abc"))
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 3)
    rb.empty()
    assert rb.write_count == 0
    assert rb.add("x") == 0


# ---- rows by number --------------------------------------------------------------------------------------------------


def test_get_and_set():
    storage = ListStorage(5)
    storage.set(0, "a")
    storage.set(range(1, 3), ["b", "c"])
    assert storage.get(1) == "b"
    assert storage.get(range(3)) == ["a", "b", "c"]
    assert storage[[2, 0]] == ["c", "a"]
    storage.set([0, 3], ["A", "d"])
    storage[1] = "B"
    storage[[2, 3]] = ["C", "D"]
    assert list(storage) == ["A", "B", "C", "D"]
    assert (len(storage), storage.shape) == (4, (4,))
    assert storage.contains(torch.tensor([[0, 4], [3, -1]])).tolist() == [[True, False], [True, False]]
    assert (3 in storage, 4 in storage, -1 in storage) == (True, False, False)


def test_copies_are_independent():
    rb = buffer(4)
    rb.extend([["a"], ["b"]])
    for storage in (copy.deepcopy(rb.storage), pickle.loads(pickle.dumps(rb.storage))):
        twin = ReplayBuffer(storage=storage, collate_fn=list)
        assert twin.extend([["c"]]).tolist() == [2]
        twin[0].append("z")
        assert rb[:] == [["a"], ["b"]]
        assert twin.write_count == 3


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "error", "says"),
    [
        (
            lambda rb: rb.extend({"a": torch.zeros(2)}),
            TypeError,
            r"extend: expected a list of items.*got dict.*add\(\)\?",
        ),
        (lambda rb: rb.extend(torch.tensor(1)), TypeError, r"got Tensor\. Did you mean add\(\)\?"),
        (lambda rb: rb.extend(np.float32(1)), TypeError, r"Did you mean add\(\)\?"),
        (lambda rb: rb.extend(1.5), TypeError, r"got float\. Did you mean add\(\)\?"),
        (lambda rb: rb.extend("text"), TypeError, r"got str\. Did you mean add\(\)\?"),
        (
            lambda rb: rb.extend(TensorDict({"a": torch.zeros(2)}, [])),
            TypeError,
            r"TensorDict\. Did you mean add\(\)\?",
        ),
        (lambda rb: rb.extend(["x"], lane=1), RowError, r"lane: expected .*\[0, 1\).* got 1"),
        (lambda rb: rb.extend(["x", "y"], lane=torch.tensor([0, 1])), RowError, r"lanes? in \[0, 1\)"),
        (lambda rb: rb.extend(["x"], lane=torch.tensor([0, 0])), RuntimeError, "expected 2 rows, one per"),
        (lambda rb: rb.add("x", lane=-1), RowError, "lane"),
        (lambda rb: rb.storage.set(10, "x"), RowError, r"row 10 is outside \[0, 10\)"),
        (lambda rb: rb.storage.set(-1, "x"), RowError, r"row -1 is outside \[0, 10\)"),
        (
            lambda rb: rb.storage.set(5, "x"),
            RuntimeError,
            "row 5: expected at most 2, the next row: a list has no gaps",
        ),
        (lambda rb: rb.storage.set([2, 4], ["x", "y"]), RuntimeError, "row 4: expected at most 3"),
        (lambda rb: rb.storage.set([0, 1], ["x"]), RuntimeError, "expected 2 rows, one per index"),
        (lambda rb: rb.__setitem__(2, "x"), RowError, "row 2 is not live"),
        (lambda rb: rb.__setitem__([0, 1], ["x"]), RuntimeError, "expected 2 rows"),
        (lambda rb: rb[2], RowError, "row 2 is not live: expected one of 2 rows"),
        (lambda rb: rb[-3], RowError, "at least -2, got -3"),
        (lambda rb: rb.storage.read(torch.tensor([7])), RowError, r"rows in \[0, 2\), got 7"),
        (lambda rb: rb.storage.read(torch.tensor([-1])), RowError, r"rows in \[0, 2\), got -1"),
    ],
)
def test_refused_writes_change_nothing(write, error, says):
    rb = buffer()
    rb.extend(["a", "b"])
    before = state(rb)
    with pytest.raises(error, match=says):
        write(rb)
    assert state(rb) == before


@pytest.mark.parametrize(
    ("error", "size", "says"),
    [
        (ValueError, 0, "max_size: expected at least 1.*, got 0"),
        (ValueError, -3, "max_size: expected at least 1.*, got -3"),
        (TypeError, True, "max_size: expected an int, got bool"),
        (TypeError, 2.5, "max_size: expected an int, got float"),
        (TypeError, "3", "max_size: expected an int, got str"),
    ],
)
def test_impossible_sizes(error, size, says):
    with pytest.raises(error, match=f"ListStorage: {says}"):
        ListStorage(size)


def test_arguments_of_later():
    ListStorage(3, compilable=False)
    ListStorage(3, compilable=True)
    with pytest.raises(TypeError, match="ListStorage: compilable: expected True or False.*got 3"):
        ListStorage(3, compilable=3)
    with pytest.raises(TypeError, match="ListStorage: unexpected argument 'lanes'"):
        ListStorage(3, lanes=2)
